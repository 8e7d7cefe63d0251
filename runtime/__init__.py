"""The mechanism: the only place that imports torch, starts threads and touches streams. Imported as
``delta.runtime``.
"""

if __name__ != "delta.runtime":
    raise ImportError(f"import this package as delta.runtime, not as {__name__}: there must be one copy of it")

import warnings

with warnings.catch_warnings():  # numpy is optional for torch and not used here: its absence is no news to the user
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    import torch  # noqa: F401
