"""What the demo measures by itself, so that its figures do not rest on Delta's own: bits, resident memory, saved bytes.

Not covered: time, which the worker takes around the parts of a step that count.
"""

import ctypes
import hashlib
import resource
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over shape, dtype and every byte of the tensors, in order: equal digests mean equal bits."""
    sha = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous()
        sha.update(f"{tuple(data.shape)} {data.dtype};".encode())
        if data.numel():
            # Through ctypes, because Tensor.numpy() would make NumPy a requirement.
            sha.update((ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr()))
    return sha.hexdigest()


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


class _Saved:
    """What autograd holds instead of a saved tensor; it dies when autograd lets go of it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: autograd saves some outputs of the very node that holds them, and that would be a cycle.
        self.tensor = tensor.detach()


class SavedBytes:
    """Counts the bytes of unique storages autograd has saved and still holds, those of parameters and buffers left out.

    A context manager; the count and its peak stay readable after the block.
    """

    def __init__(self, model: nn.Module) -> None:
        owned = [*model.parameters(), *model.buffers()]
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in owned}
        self._holders: Counter[int] = Counter()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__(None, None, None)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes and address not in self._excluded:
            # The handle keeps the storage alive, so the address names it until the last handle has died.
            self._holders[address] += 1
            if self._holders[address] == 1:
                self.live_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(saved, self._drop, address, nbytes)
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        return saved.tensor

    def _drop(self, address: int, nbytes: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._holders[address]
            self.live_bytes -= nbytes
