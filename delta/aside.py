"""The process that searches for a better plan beside the training: a pickled task comes in, a pickled plan goes out."""

from __future__ import annotations

import os
import pickle
import sys

NICE = 10  # the training goes first where cores are short


def _yield_to_the_training() -> None:
    """Take only time that nobody else wants. At this niceness alone a search still slowed down a training with a thread
    on every core by a fifth, because its parallel loops wait for the slowest thread."""
    os.nice(NICE)
    if hasattr(os, "SCHED_IDLE"):  # on Linux
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """Answer one task on the standard input. What a solver prints itself does not reach the answer."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _yield_to_the_training()
    from delta.planner import BESIDE  # here: that takes half a second, which is the training's, too

    task = pickle.load(sys.stdin.buffer)
    with answer:
        pickle.dump(BESIDE[task.options.kind](task), answer, protocol=pickle.HIGHEST_PROTOCOL)
