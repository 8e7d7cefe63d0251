"""Memory below the tensors: addresses, page-aligned buffers, resident size, pages given back to the system.

What is known about glibc (2.36, Linux 6, measured with tensors of 0.25 to 64 MiB): a tensor below the mmap threshold
(128 KiB at the start, raised by glibc up to 32 MiB whenever a larger mapped block is freed) lies on the heap, and
freeing it in the middle of the heap gives nothing back: 512 MiB of which every second 4 MiB tensor was freed stayed
at 512 MiB resident. ``malloc_trim(0)`` does give such holes back, 26-30 us per MiB returned and 10-600 us when there
is nothing to return. Pages given back are faulted in again when the hole is reused, about 0.24 ms per MiB, so it is
worth doing only when resident memory is what the budget counts.

Where the heap has huge pages, copies to a file take less from compute: steps of a vision transformer under policy
``swap`` at 30 %, 540 MB out and back, took 0.986 of their time without (medians of 14, in turns).

Not covered: allocators other than glibc's. Without ``malloc_trim`` the functions here do less, never harm.
"""

import ctypes
import functools
import mmap
import os
import platform
import resource
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import psutil
import torch

from delta.runtime.landing import is_landing

_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2 * 2**20  # where pages have 4 KiB; elsewhere a multiple of the page all the same
_STATM = "/proc/self/statm"
_MAPS = Path("/proc/self/maps")
_HUGE_PAGES_STATE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Read when a process starts: with this setting glibc asks for huge pages.
GLIBC_SETTINGS, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"

copy_bytes: Callable[[int, int, int], object] = (
    ctypes.memmove
)  # (to address, from address, nbytes); the GIL is released meanwhile


class AlignedBuffer:
    """Page-aligned private memory that O_DIRECT accepts; unmapped when the last reference is gone.

    What of it makes whole huge pages begins at one, and the system is asked for them: it pins page by page what a file
    is read into or written from.
    """

    def __init__(self, nbytes: int) -> None:
        huge_bytes = nbytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        # Private: the default for an anonymous mmap is shared, which a forked worker process would write into.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, nbytes + (_HUGE_PAGE_BYTES if huge_bytes else 0), flags=flags)
        mapped_at = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        skipped_bytes = -mapped_at % _HUGE_PAGE_BYTES if huge_bytes else 0
        self.nbytes = nbytes
        self.view = memoryview(self._map)[skipped_bytes : skipped_bytes + nbytes]
        self.address = mapped_at + skipped_bytes
        if huge_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system that has none of them
                self._map.madvise(mmap.MADV_HUGEPAGE, skipped_bytes, huge_bytes)

    def keep_from_forks(self) -> None:
        """A forked process gets none of it: not where a device reads and writes pages that are mapped once and for
        all, which a copy made for either process would part from its memory (get_user_pages, madvise(2))."""
        if hasattr(mmap, "MADV_DONTFORK"):
            self._map.madvise(mmap.MADV_DONTFORK)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as a flat uint8 tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensor_at(address: int, nbytes: int) -> torch.Tensor:
    """A flat uint8 tensor over memory owned by someone else, who has to outlive it."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def sole_owner(storage: torch.UntypedStorage, tensors: int = 0) -> bool:
    """Whether no tensor, but for so many, and no other storage handle shares this memory, and freeing it is up to
    torch's own allocator.

    The use count is 1 for a storage that only its Python handle holds; each tensor adds one. Several names for one
    handle cannot be told apart, and memory that torch only borrowed (numpy, mmap, DLPack) is recognised by being not
    resizable, unless it was borrowed here. Memory of a card always passes for shared, whoever uses it.
    """
    users: int = torch._C._storage_Use_Count(storage._cdata)
    if users != 1 + tensors or not (storage.resizable() or is_landing(storage)):
        return False
    return storage.is_cuda or not storage.is_shared()


class ResidentMeter:
    """Resident set size of this process in bytes, in about a microsecond (psutil needs seven)."""

    def __init__(self) -> None:
        self._closer: weakref.finalize[..., ResidentMeter] | None = None
        self._fd = -1
        self._page_bytes = os.sysconf("SC_PAGESIZE")

    def read_bytes(self) -> int:
        """The size now. The file stays open between calls, until `close`."""
        if self._closer is None and not self._open():
            return int(psutil.Process().memory_info().rss)
        return int(os.pread(self._fd, 128, 0).split()[1]) * self._page_bytes

    def _open(self) -> bool:
        try:
            self._fd = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        self._closer = weakref.finalize(self, os.close, self._fd)
        return True

    def close(self) -> None:
        if self._closer is not None:
            self._closer()
            self._closer = None


def peak_resident_bytes() -> int:
    """The most that was ever resident in this process, as Linux counts it (in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def trim_heap() -> bool:
    """Give free heap pages back to the system. False where the C library cannot (it is not glibc)."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True


class HugePages:
    """Has the C library's heap in huge pages, where the system has them for those who ask.

    What was trimmed away is then faulted in again by pages of 2 MiB: 0.04 ms per MiB in place of 0.37, where the
    machine has some at hand. As `GLIBC_TUNABLES` would have it from the start of the process, but for what is mapped by
    itself and for the heaps of other threads. It stays when the block has ended: there is no way back to what was.
    """

    def __init__(self) -> None:
        self._start = _heap_start() if _huge_pages_on_request() else None
        self._nbytes = 0

    def ask(self) -> None:
        """For what the heap has grown by since the last time."""
        if self._start is None:
            return
        nbytes = (_heap_end() - self._start) // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes > 0 and nbytes != self._nbytes:
            self._nbytes = nbytes
            _libc().madvise(ctypes.c_void_p(self._start), ctypes.c_size_t(nbytes), _MADV_HUGEPAGE)


def _heap_start() -> int | None:
    """Where the heap of the C library's main arena begins."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.partition("-")[0], 16) for line in lines if line.endswith("[heap]")), None)


def _heap_end() -> int:
    program_break = _libc().sbrk
    program_break.restype = ctypes.c_void_p
    return int(program_break(0))


def _huge_pages_on_request() -> bool:
    try:
        return "[madvise]" in _HUGE_PAGES_STATE.read_text()
    except OSError:
        return False


class _HeapFacts(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@functools.cache
def _mallinfo() -> Callable[[], _HeapFacts] | None:
    # With the interpreter's lock, so that who has looked can say of when that is.
    found = getattr(ctypes.PyDLL(None), "mallinfo2", None)
    if found is None:
        return None
    found.restype = _HeapFacts
    return cast(Callable[[], _HeapFacts], found)


def heap_lacks_huge_pages() -> bool:
    """Whether the system has huge pages for those who ask, and glibc (2.35 and later) has not been told to ask."""
    library, release = platform.libc_ver()
    knows_how = library == "glibc" and tuple(map(int, release.split(".")[:2])) >= (2, 35)
    told = HUGE_PAGES.partition("=")[0] in os.environ.get(GLIBC_SETTINGS, "")
    return _huge_pages_on_request() and knows_how and not told


def heap_bytes() -> int | None:
    """What the C library's heap has given out and not got back, in about a microsecond. None where it cannot say
    (glibc before 2.33, other libraries), or another allocator has taken its place.
    """
    facts = _mallinfo()
    if facts is None:
        return None
    now = facts()
    return int(now.uordblks + now.hblkhd) or None


def drop_pages(storage: torch.UntypedStorage) -> int:
    """Give the whole pages inside a CPU storage back at once; its content is lost. Returns their bytes.

    22-37 us per MiB, and exact where freeing and trimming depend on the heap's layout. Only for a storage that is
    `sole_owner`'s.
    """
    page_bytes = mmap.PAGESIZE
    start = -(-storage.data_ptr() // page_bytes) * page_bytes
    nbytes = (storage.data_ptr() + storage.nbytes()) // page_bytes * page_bytes - start
    if nbytes <= 0:
        return 0
    failed: int = _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), _MADV_DONTNEED)
    return 0 if failed else nbytes
