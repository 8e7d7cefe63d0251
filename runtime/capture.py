"""While a CUDA graph is captured, Delta does nothing.

What a graph's backward needs has to stay where it is: a replay of the graph reads it there, and no hook is called. Nor
may an event be asked about meanwhile, by any thread, or the capture fails. What autograd saves passes untouched, ops
are not recorded, and transfers are looked after when the capture has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from delta.runtime.core import Core


@contextmanager
def heard_of_capture(core: Core) -> Iterator[None]:
    """While entered, `core` hears of captures: those of `torch.cuda.graph` and of compiled code, too."""
    graphs: Any = torch.cuda.CUDAGraph
    begin, end = graphs.capture_begin, graphs.capture_end

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        core.capture(True)
        try:
            begin(graph, *args, **kwargs)
        except BaseException:
            core.capture(False)
            raise

    def capture_end(graph: Any) -> None:
        try:
            end(graph)
        finally:
            core.capture(False)

    graphs.capture_begin, graphs.capture_end = capture_begin, capture_end
    try:
        yield
    finally:
        graphs.capture_begin, graphs.capture_end = begin, end
        core.capture(False)  # one that goes on after the block is none of its business
