"""The mechanism: the only place that imports torch, starts threads and touches streams. Imported as
``delta.runtime``.
"""

if __name__ != "delta.runtime":
    raise ImportError(f"import this package as delta.runtime, not as {__name__}: there must be one copy of it")
