"""Settles what PyTorch's CPU kernels choose on their first call, so that every later call gives the same bits.

oneMKL before 2025.0 chooses the kernel of each vector-maths function (``sqrt``, ``exp``, ...) in the function's first
call. When two threads make that call at once, one of them may run a kernel of lower precision for its part of the
tensor, in that one call only (pytorch issue 188792). A process that trains plainly then differs from the next one, and
an op recomputed differs from what was computed first. One call from one thread, ahead of all others, settles it.
"""

import torch

_FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2"),
    *("expm1", "floor", "lgamma", "log", "log10", "log1p", "log2", "reciprocal", "round", "rsqrt", "sigmoid", "sin"),
    *("sinh", "sqrt", "tan", "tanh", "trunc"),
)
_FEW = 32  # elements: enough for a vector register and a tail, too few for a second thread


def settle_kernels() -> None:
    """Call each vector-maths function once per precision from this thread. Cheap; a second call changes nothing."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        for dtype in (torch.float32, torch.float64):
            few = torch.full((_FEW,), 0.5, dtype=dtype, device="cpu")
            for function in _FUNCTIONS:
                getattr(torch, function)(few)
            torch.atan2(few, few)
            torch.pow(few, few)
