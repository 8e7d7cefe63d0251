"""The simulator: a recorded step on a virtual device, under the engine that runs on real ones.

::

    allocator   where storages lie         machine    clock, link, memory, a log
    player      trace -> engine -> machine  checker    the log, checked without the engine
    simulation  one run and its figures     table      many runs, for people
    floor       the least a budget can cost, by the planners, with no run at all
"""

from delta.simulate.simulation import ALLOCATORS, Run, Status, check_run, simulate

__all__ = ["ALLOCATORS", "Run", "Status", "check_run", "simulate"]
