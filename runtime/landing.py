"""Where what is read back from a file lands: a storage whose bytes begin as far behind a block as they do in the file.

Then they are read straight into it (`delta.runtime.pieces`). The heap puts storages where it likes, so such a storage
is cut from one that is a block larger, which it keeps alive. Like all borrowed memory it cannot be resized, but nobody
else has it: `is_landing` tells it from what came from NumPy or another library.
"""

import ctypes
import weakref

import torch

_cut: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by identity


def landing(nbytes: int, phase_bytes: int, block_bytes: int) -> torch.UntypedStorage:
    """A storage on the CPU of that many bytes, which begin `phase_bytes` behind the start of a block."""
    whole = torch.UntypedStorage(nbytes + block_bytes)
    skipped_bytes = (phase_bytes - whole.data_ptr()) % block_bytes
    memory = (ctypes.c_ubyte * nbytes).from_address(whole.data_ptr() + skipped_bytes)
    memory.whole = whole  # type: ignore[attr-defined]
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    key = storage._cdata
    _cut[key] = weakref.ref(storage, lambda ref: _forget(key, ref))
    return storage


def is_landing(storage: torch.UntypedStorage) -> bool:
    """Whether the storage was cut here."""
    ref = _cut.get(storage._cdata)
    return ref is not None and ref() is storage


def _forget(key: int, ref: "weakref.ref[torch.UntypedStorage]") -> None:
    if _cut.get(key) is ref:
        del _cut[key]
