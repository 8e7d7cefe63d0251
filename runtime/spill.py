"""The spill file: host room on disk for storages that were evicted.

Created at first use and unlinked right after it is opened, so nothing is left behind however the process ends. Read
and written past the page cache (O_DIRECT) where the file system allows, through page-aligned buffers; elsewhere
buffered, and the cached pages are dropped again where the system heeds that. A short write is continued, and nothing
counts as written before all of it is.

Failure contract: a `write` that raises has told nobody that the data is there; an extent can be read only after its
write returned. Every failure is a SwapError (HostFullError when the disk is full) that names the directory, the sizes
and what to do.

Not covered: which thread does the I/O. Calls from several threads at once are fine.
"""

import errno
import fcntl
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from delta.errors import HostFullError, SwapError
from delta.runtime.extents import Extent, ExtentAllocator, round_up
from delta.runtime.rawmem import AlignedBuffer, copy_bytes
from delta.units import format_bytes

BLOCK_BYTES = 4096  # what O_DIRECT wants of offsets, lengths and addresses on every file system met so far
CHUNK_BYTES = 4 * 2**20
_SPARE_BUFFERS = 2  # one for each direction; a caller that helps out brings a third, which is not kept
_MAX_STALLS = 16  # writes in a row that moved nothing
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_HINT = "give another directory with host.spill_dir in the policy"


class SpillFile:
    """One unlinked file in ``directory`` (None: the directory for temporary files), and the room in it.

    ``direct=False`` keeps to buffered I/O even where O_DIRECT would work.
    """

    def __init__(self, directory: str | None = None, *, direct: bool = True) -> None:
        self.directory = directory if directory is not None else tempfile.gettempdir()
        self.direct = direct  # after the file is open: what is really used
        self._lock = threading.Condition()
        self._extents = ExtentAllocator(BLOCK_BYTES)
        self._buffers: list[AlignedBuffer] = []
        self._active = 0  # reads and writes under way
        self._fd: int | None = None
        self._closer: weakref.finalize[..., SpillFile] | None = None
        self._closed = False

    @property
    def used_bytes(self) -> int:
        return self._extents.used_bytes

    def check(self) -> None:
        """Create and remove a file in the directory. SwapError when that is impossible, so that the user hears before
        training.
        """
        os.close(self._create())

    def free_disk_bytes(self) -> int:
        """What the file system has left for this user. SwapError when it cannot be asked."""
        try:
            facts = os.statvfs(self.directory)
        except OSError as error:
            raise self._unusable(error) from error
        return facts.f_bavail * facts.f_frsize

    def reserve(self, nbytes: int) -> Extent:
        """Room for ``nbytes``. HostFullError when the disk has not that much left; SwapError when the file cannot be
        made.
        """
        with self._lock:
            self._open()
            growth_bytes = self._extents.growth_bytes(nbytes)
            if growth_bytes and growth_bytes > self.free_disk_bytes():
                raise self._full(growth_bytes)
            extent = self._extents.allocate(nbytes)
            assert extent is not None, "a file without a capacity always has room"
            return extent

    def give_back(self, extent: Extent) -> None:
        with self._lock:
            self._extents.free(extent)

    def write(self, extent: Extent, address: int, nbytes: int, skip_bytes: int = 0) -> None:
        """Write ``nbytes`` of memory into the extent, ``skip_bytes`` (whole blocks) behind its start. SwapError
        unless all is handed over.
        """
        with self._buffer() as (fd, buffer):
            for start in range(0, nbytes, buffer.nbytes):
                part = min(buffer.nbytes, nbytes - start)
                copy_bytes(buffer.address, address + start, part)
                view = buffer.view[: round_up(part, BLOCK_BYTES)]
                self._write_all(fd, view, extent.offset_bytes + skip_bytes + start)

    def read(self, extent: Extent, address: int, nbytes: int, skip_bytes: int = 0) -> None:
        """Read ``nbytes`` of the extent, from ``skip_bytes`` (whole blocks) on, into memory, or raise SwapError."""
        with self._buffer() as (fd, buffer):
            for start in range(0, nbytes, buffer.nbytes):
                part = min(buffer.nbytes, nbytes - start)
                view = buffer.view[: round_up(part, BLOCK_BYTES)]
                self._read_all(fd, view, extent.offset_bytes + skip_bytes + start)
                copy_bytes(address + start, buffer.address, part)

    def _write_all(self, fd: int, view: memoryview, offset_bytes: int) -> None:
        """All of ``view`` to the file at the offset, however many calls that takes."""
        done = stalls = 0
        while done < len(view):
            try:
                moved = os.pwritev(fd, [view[done:]], offset_bytes + done)
            except InterruptedError:
                moved = 0
            except OSError as error:
                raise self._failed("write", error, len(view)) from error
            step = self._usable(moved)
            stalls = 0 if step else stalls + 1
            if stalls > _MAX_STALLS:
                raise SwapError(
                    f"the spill file in {self.directory!r} takes no more data, and gives no reason; {_HINT}"
                )
            done += step
        self._drop_cached(fd, offset_bytes, len(view))

    def _read_all(self, fd: int, view: memoryview, offset_bytes: int) -> None:
        """Fill ``view`` from the file at the offset, however many calls that takes."""
        done = stalls = 0
        while done < len(view):
            try:
                moved = os.preadv(fd, [view[done:]], offset_bytes + done)
            except InterruptedError:
                moved = 0
            except OSError as error:
                raise self._failed("read", error, len(view)) from error
            step = self._usable(moved)
            stalls = 0 if step else stalls + 1
            if stalls > _MAX_STALLS:
                raise SwapError(
                    f"the spill file in {self.directory!r} ended before {format_bytes(len(view))} were read back"
                )
            done += step
        self._drop_cached(fd, offset_bytes, len(view))

    def close(self) -> None:
        """Give the disk room back, once reads and writes under way have ended. Later use raises SwapError;
        idempotent.
        """
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: self._active == 0)
            self._buffers.clear()
            self._fd = None
            if self._closer is not None:
                self._closer()
                self._closer = None

    @contextmanager
    def _buffer(self) -> Iterator[tuple[int, AlignedBuffer]]:
        """An aligned buffer and the open file, which stays open until the buffer is back."""
        with self._lock:
            fd = self._open()
            self._active += 1
            buffer = self._buffers.pop() if self._buffers else None
        try:
            buffer = buffer or AlignedBuffer(CHUNK_BYTES)
            yield fd, buffer
        finally:
            with self._lock:
                self._active -= 1
                if buffer is not None and not self._closed and len(self._buffers) < _SPARE_BUFFERS:
                    self._buffers.append(buffer)
                self._lock.notify_all()

    def _open(self) -> int:
        """The file, made at the first call. The caller holds the lock."""
        if self._closed:
            raise SwapError("the spill file is closed: the session it belonged to has given its host room back")
        if self._fd is None:
            fd = self._create()
            self._closer = weakref.finalize(self, os.close, fd)
            self.direct = self.direct and _set_direct(fd)
            self._fd = fd
        return self._fd

    def _create(self) -> int:
        try:
            fd, path = tempfile.mkstemp(prefix="delta-spill-", dir=self.directory)
        except OSError as error:
            raise self._unusable(error) from error
        os.unlink(path)
        return fd

    def _usable(self, moved: int) -> int:
        """How much of a transfer to build on: with O_DIRECT the next call has to start at a block again."""
        return moved // BLOCK_BYTES * BLOCK_BYTES if self.direct else moved

    def _drop_cached(self, fd: int, offset_bytes: int, nbytes: int) -> None:
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset_bytes, nbytes, os.POSIX_FADV_DONTNEED)

    def _unusable(self, error: OSError) -> SwapError:
        return SwapError(
            f"no spill file can be made in {self.directory!r} ({error.strerror}): make it writable, or {_HINT}"
        )

    def _failed(self, verb: str, error: OSError, nbytes: int) -> SwapError:
        if error.errno in _FULL:
            return self._full(nbytes)
        return SwapError(
            f"cannot {verb} {format_bytes(nbytes)} of the spill file in {self.directory!r} ({error.strerror}); {_HINT}"
        )

    def _full(self, wanted_bytes: int) -> HostFullError:
        return HostFullError(
            f"no room for {format_bytes(wanted_bytes)} more in the spill file in {self.directory!r}, "
            f"which holds {format_bytes(self.used_bytes)}; {format_bytes(self.free_disk_bytes())} are free: "
            f"make room, or {_HINT}"
        )


def _set_direct(fd: int) -> bool:
    """Turn the page cache off for the file, and try it. False where the file system does not do that."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag)
        os.pwritev(fd, [AlignedBuffer(BLOCK_BYTES).view], 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True
