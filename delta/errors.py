"""Every error Delta raises on purpose, one tree.

::

    DeltaError
    ├── BudgetError                          a budget that cannot be read, or cannot be held with `strict: true`
    ├── PolicyError             (ValueError) a policy that cannot be read, or makes no sense
    ├── TimelineError           (ValueError) a timeline file that cannot be read
    ├── PlotError                            a plot cannot be drawn for want of a package, or cannot be written
    ├── TraceError              (ValueError) a trace that cannot be read, written or recorded
    ├── NestedSessionError      (RuntimeError) `delta.evict` entered inside another one
    ├── RecomputeMismatchError  (RuntimeError) a replayed op gave something else than the first time
    ├── StorageModifiedError    (RuntimeError) a saved tensor was changed in place before backward
    └── SwapError               (RuntimeError) a transfer to or from the host failed
        └── HostFullError                    no host room for a copy out; nothing was changed

A message says what was given, what is allowed, and what to do. Errors of the program that is trained are never wrapped:
an exception of the model leaves the block as it was raised.
"""


class DeltaError(Exception):
    """Root of the tree: ``except delta.DeltaError`` catches everything Delta raises on purpose."""


class BudgetError(DeltaError):
    """A budget that cannot be read (``"8 apples"``), is given twice, or cannot be held while the policy is strict."""


class PolicyError(DeltaError, ValueError):
    """A policy that is unknown, unreadable, or holds a key, a value or a pair of values that is not allowed."""


class TimelineError(DeltaError, ValueError):
    """A timeline file that is not one, is of another version, or is damaged."""


class TraceError(DeltaError, ValueError):
    """A trace that is not one, is of another version, is damaged, or cannot be written; names file and line."""


class PlotError(DeltaError):
    """A plot was asked for, and the package that draws it is not installed, or its page cannot be written."""


class NestedSessionError(DeltaError, RuntimeError):
    """``delta.evict`` was entered while another block is open. One after the other is fine."""


class RecomputeMismatchError(DeltaError, RuntimeError):
    """A replayed op gave another shape, dtype or layout than it did in forward, so its value cannot be trusted."""


class StorageModifiedError(DeltaError, RuntimeError):
    """A tensor needed by backward was modified in place after it was saved: the error autograd itself would raise."""


class SwapError(DeltaError, RuntimeError):
    """A copy to or from host memory (or the spill file) failed. The data that was complete before it still is."""


class HostFullError(SwapError):
    """No host room for a copy out. Nothing was changed: the caller may keep the tensor or recompute it instead."""
