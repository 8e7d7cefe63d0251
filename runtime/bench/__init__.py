"""``scripts/bench``, also ``python -m delta.runtime.bench``: what Delta costs, beside what people use today.

::

    options    what is compared: models, ways, budgets
    measure    one model in all ways, a process for each, in turns       result    the figures, to and from JSON
    goals      what was set out to reach, and whether it is              view      tables for people
    pages      docs/benchmarks/, made from the JSON                      picture   the README's
    largest    `max-batch`: the largest batch that fits                  search    by bisection
    hot_path   `hot-path`: what Delta's Python costs                     decisions what an eviction costs the engine
"""
