"""What the demo measures by itself, so that its figures do not rest on Delta's own: bits, resident memory, saved bytes.

Not covered: time, which the worker takes around the parts of a step that count.
"""

import ctypes
import gc
import hashlib
import resource
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from delta.runtime import rematerialise
from delta.runtime.device.base import Device, HostBlock, Ticket
from delta.runtime.made_again import MadeAgain
from delta.runtime.recompute import results_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_ODD = 0x1E3779B97F4A7C15
_WEIGHED = 2**22  # elements at a time: 64 MiB besides
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@torch.no_grad()  # nobody's forward: a recorder that is on has nothing to record
def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over shape, dtype and every byte of the tensors, in order: equal digests mean equal bits. Of the bytes of
    a tensor on a card, which would take longer to fetch than a step takes, over a sum of 64 bits (`_weighed`)."""
    sha = hashlib.sha256()
    weighed: list[Tensor] = []
    for tensor in tensors:
        data = tensor.detach().contiguous()
        sha.update(f"{tuple(data.shape)} {data.dtype};".encode())
        if data.device.type != "cpu":
            weighed.append(_weighed(data))
        elif data.numel():
            _update(sha, data)
    if weighed:
        _update(sha, torch.stack(weighed).cpu())
    return sha.hexdigest()


def _update(sha: "hashlib._Hash", data: Tensor) -> None:
    # Through ctypes, because Tensor.numpy() would make NumPy a requirement.
    sha.update((ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr()))


def _weighed(data: Tensor) -> Tensor:
    """The sum of all elements' bits modulo 2**64, each times an odd number of its own: one that differs, if in one bit,
    makes another sum; that several make up for each other is as likely as any 64 bits. One int64, on the device."""
    bits = data.flatten().view(_BITS[data.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, bits.numel(), _WEIGHED):
        piece = bits[start : start + _WEIGHED].to(torch.int64)
        places = torch.arange(start, start + piece.numel(), device=data.device)
        total += piece.mul_(places.mul_(_ODD).bitwise_or_(1)).sum()
    return total


def gradient_digest(model: nn.Module) -> str:
    """The digest of every gradient, in the order of the parameters."""
    return digest(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


class ResidentPeak:
    """The largest resident set size of this process since it was made, in bytes.

    Linux keeps the mark (VmHWM) and lets a process reset its own. Where that is not permitted the mark covers the
    process's whole life; where there is no /proc, ``ru_maxrss`` does. ``method`` says which.
    """

    def __init__(self) -> None:
        self.method = "ru_maxrss, whole process"
        if _status_bytes("VmHWM") is not None:
            self.method = "VmHWM since training began" if _reset_mark() else "VmHWM, whole process"
        self.start_bytes = _status_bytes("VmRSS") or 0

    def read(self) -> int:
        """The peak so far, in bytes."""
        mark = _status_bytes("VmHWM")
        return mark if mark is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status_bytes(key: str) -> int | None:
    """A field of /proc/self/status, which is in units of 1024 bytes."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _reset_mark() -> bool:
    try:
        _CLEAR_REFS.write_text("5")  # proc(5): 5 resets the peak resident set size
    except OSError:
        return False
    return True


def standing_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of unique storages that stay from step to step: parameters, buffers and the optimizer's state."""
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    storages = (tensor.untyped_storage() for tensor in chain(model.parameters(), model.buffers(), state))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class AllocatedBytes:
    """The most bytes that a CPU's allocator had given out at once in the block, those of before left out.

    From PyTorch's profiler, which sees whoever allocates. A context manager; the peak is there after it.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._profiler = profile(profile_memory=True)

    def __enter__(self) -> Self:
        gc.collect()  # garbage that an earlier profile saw allocated would count as freed in this one
        self._profiler.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._profiler.__exit__(None, None, None)
        results: Any = self._profiler.kineto_results
        events = [event for event in results.events() if event.name() == "[memory]"]
        sizes = (event.nbytes() for event in sorted(events, key=lambda event: int(event.start_ns())))
        self.peak_bytes = max(accumulate(sizes), default=0)


class _Mark:
    """A storage that is counted: its size, and the live saved tensors on it."""

    __slots__ = ("handles", "key", "nbytes")

    def __init__(self, key: int, nbytes: int) -> None:
        self.key, self.nbytes = key, nbytes
        self.handles = 0


class _Saved:
    """What autograd holds instead of a saved tensor; it dies when autograd lets go of it."""

    __slots__ = ("__weakref__", "packed")

    def __init__(self, packed: Any) -> None:
        self.packed = packed


class SavedBytes:
    """Counts the bytes of unique storages autograd has saved and still holds, those of parameters and buffers left out.

    A context manager; the count and its peak stay readable after the block.
    """

    def __init__(self, model: nn.Module) -> None:
        owned = [*model.parameters(), *model.buffers()]
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in owned}
        self._marks: dict[int, _Mark] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self._hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__(None, None, None)

    def keep(self, tensor: Tensor) -> Any:
        """What to hold for a saved tensor."""
        # Detached: autograd saves some outputs of the very node that holds them, and that would be a cycle.
        return tensor.detach()

    def give(self, kept: Any) -> Tensor:
        """The saved tensor again."""
        tensor: Tensor = kept
        return tensor

    def counts(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is one to count."""
        storage = tensor.untyped_storage()
        return bool(storage.nbytes()) and storage.data_ptr() not in self._excluded

    def mark(self, storage: torch.UntypedStorage) -> _Mark:
        """Count a storage from now on, until it dies or the last saved tensor on it does, if there is one."""
        key = storage._cdata
        mark = self._marks.get(key)
        if mark is None:
            mark = self._marks[key] = _Mark(key, storage.nbytes())
            weakref.finalize(storage, self._uncount, mark)
            self.live_bytes += mark.nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return mark

    def _pack(self, tensor: Tensor) -> _Saved:
        mark = self.mark(tensor.untyped_storage()) if self.counts(tensor) else None
        saved = _Saved(self.keep(tensor))
        if mark is not None:
            mark.handles += 1
            weakref.finalize(saved, self._handle_died, mark)
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        return self.give(saved.packed)

    def _handle_died(self, mark: _Mark) -> None:
        mark.handles -= 1
        if not mark.handles:
            self._uncount(mark)

    def _uncount(self, mark: _Mark) -> None:
        if self._marks.get(mark.key) is mark:
            del self._marks[mark.key]
            self.live_bytes -= mark.nbytes


class ResidentBytes(SavedBytes):
    """The same count from outside an open block of `delta.evict`: only storages that are on the device now.

    ``host_peak_bytes``: the most that the host tier held.

    Stands between autograd and Delta's hooks. A saved storage counts while it is alive and has a live saved tensor; the
    result of an op that is replayed, and a copy back into ``device``, count until they die. Nobody asks
    Delta what it holds.
    """

    def __init__(self, model: nn.Module, device: Device) -> None:
        super().__init__(model)
        self.host_peak_bytes = 0
        self._device = device

    def __enter__(self) -> Self:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert hooks is not None, "no block of delta.evict is open"
        self._delta_pack, self._delta_unpack = hooks
        self._copy_in = self._device.copy_in
        self._copy_out = self._device.copy_out
        vars(self._device).update(copy_in=self._copied_in, copy_out=self._copied_out)
        self._replays = [
            (rematerialise, "replay", vars(rematerialise)["replay"]),  # of recipes
            (MadeAgain, "run_again", MadeAgain.run_again),  # of notes
        ]
        for where, name, replay in self._replays:
            setattr(where, name, self._shown(replay))
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        del vars(self._device)["copy_in"], vars(self._device)["copy_out"]
        for where, name, replay in self._replays:
            setattr(where, name, replay)

    def keep(self, tensor: Tensor) -> Any:
        return self._delta_pack(tensor)

    def give(self, kept: Any) -> Tensor:
        tensor: Tensor = self._delta_unpack(kept)
        return tensor

    def _shown(self, replay: Callable[..., Any]) -> Callable[..., Any]:
        def replayed(*arguments: Any) -> Any:
            with _ResultsOfOps(self.made):  # the program's own modes do not see replays
                return replay(*arguments)

        return replayed

    def made(self, tensors: Iterable[Tensor]) -> None:
        """Delta made these."""
        for tensor in filter(self.counts, tensors):
            self.mark(tensor.untyped_storage())

    def _copied_in(self, block: HostBlock) -> Ticket:
        ticket = self._copy_in(block)
        assert ticket.storage is not None
        self.mark(ticket.storage)
        return ticket

    def _copied_out(self, storage: torch.UntypedStorage) -> Ticket:
        ticket = self._copy_out(storage)
        self.host_peak_bytes = max(self.host_peak_bytes, self._device.host_bytes())
        return ticket


class _ResultsOfOps(TorchDispatchMode):
    """Shows the results of every op that runs while it is on the mode stack."""

    def __init__(self, show: Callable[[list[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._show = show

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._show(results_of(result))
        return result
