"""The algorithm that cuDNN takes for a convolution, which decides its last bits.

It is given by the call, with two exceptions (PyTorch's Conv_v8.cpp). With `torch.backends.cudnn.benchmark` on it is the
one found fastest, anew in each thread. And where there is no memory for what it works with, another is taken in
silence, and kept for all calls like it *in that thread* from then on, though there be memory again; only the
allocator's count of refusals tells of the first time. Replays run in a thread of autograd's, forward does not. So

- under a budget the allocator refuses no convolution anything for its sake (`Recorder`);
- once one has been refused something because the card is full, no further convolution gets a recipe, and what has one
  by then is replayed in a thread that has no choices to remember.

Not seen: what was refused before the block.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from delta.runtime.device.base import Device
    from delta.runtime.opfacts import OpFacts

_fell_back = Event()  # in this process
R = TypeVar("R")


def searches() -> bool:
    """Whether cuDNN takes the algorithm that it finds fastest."""
    return torch._C._get_cudnn_benchmark()


def fell_back() -> bool:
    """Whether it has ever taken another algorithm for want of memory."""
    return _fell_back.is_set()


def note_fall_back() -> None:
    """It has."""
    _fell_back.set()


def refused(facts: OpFacts, device: Device, refusals: int) -> bool:
    """Whether the allocator had nothing to give to a call that has just ended: then it fell back. `refusals`: those
    before it."""
    if facts.refusals(device) == refusals:
        return False
    note_fall_back()
    return True


def by_first_choice(facts: OpFacts, device: Device, run: Callable[[], R]) -> R:
    """Replay a call by the algorithm of the first time. OutOfMemoryError where there is no memory for that."""
    refusals = facts.refusals(device)
    result = _in_a_new_thread(device, run) if facts.cudnn_chooses and fell_back() else run()
    if refused(facts, device, refusals):
        raise torch.OutOfMemoryError(
            f"replaying {facts.name} found no memory for the algorithm it ran with, and another gives other bits. "
            "Leave more free for workspaces (budget.reserve in the policy), or give a smaller batch."
        )
    return result


def _in_a_new_thread(device: Device, run: Callable[[], R]) -> R:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(device.as_here(run)).result()
