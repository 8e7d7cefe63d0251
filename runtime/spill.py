"""The spill file: host room on disk for storages that were evicted.

Created at first use and unlinked right after it is opened, so nothing is left behind however the process ends. Read
and written past the page cache (O_DIRECT) where the file system allows, straight from memory that is in phase with its
room, and to it if not told otherwise (`delta.runtime.pieces`); elsewhere buffered, and the cached pages are dropped
again where the system heeds that. A short write is continued, and nothing counts as written before all of it is.

Failure contract: a `write` that raises has told nobody that the data is there; room can be read only after its write
returned. Every failure is a SwapError (HostFullError when the disk is full) that names the directory, the sizes
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
from dataclasses import dataclass
from typing import Literal

from delta.errors import HostFullError, SwapError
from delta.runtime import pieces
from delta.runtime.extents import Extent, ExtentAllocator
from delta.runtime.pieces import BLOCK_BYTES, Piece
from delta.runtime.rawmem import AlignedBuffer, copy_bytes
from delta.units import format_bytes

CHUNK_BYTES = 4 * 2**20  # of what goes through a buffer
_SPARE_BUFFERS = 2  # one for each direction; a caller that helps out brings a third, which is not kept
_MAX_STALLS = 16  # writes in a row that moved nothing
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_HINT = "give another directory with host.spill_dir in the policy"


@dataclass(frozen=True, slots=True)
class FileRoom:
    """Room in the file for content that begins ``phase_bytes`` behind the start of the extent's first block."""

    extent: Extent
    phase_bytes: int

    @property
    def start_bytes(self) -> int:
        return self.extent.offset_bytes + self.phase_bytes


class SpillFile:
    """One unlinked file in ``directory`` (None: the directory for temporary files), and the room in it. SwapError where
    there is no such directory.

    ``direct=False`` keeps to buffered I/O even where O_DIRECT would work.
    """

    def __init__(self, directory: str | None = None, *, direct: bool = True) -> None:
        self.directory = directory if directory is not None else _temporary()
        self.direct = direct  # after the file is open: what is really used
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
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
            facts = os.statvfs(self.directory) if self._fd is None else os.fstatvfs(self._fd)
        except OSError as error:
            raise self._unusable(error) from error
        return facts.f_bavail * facts.f_frsize

    def reserve(self, nbytes: int, phase_bytes: int = 0) -> FileRoom:
        """Room for ``nbytes`` that begin ``phase_bytes`` behind the start of a block. HostFullError when the disk has
        not that much left; SwapError when the file cannot be made.
        """
        with self._lock:
            self._open()
            growth_bytes = self._extents.growth_bytes(phase_bytes + nbytes)
            if growth_bytes and growth_bytes > self.free_disk_bytes():
                raise self._full(growth_bytes)
            extent = self._extents.allocate(phase_bytes + nbytes)
            assert extent is not None, "a file without a capacity always has room"
            return FileRoom(extent, phase_bytes)

    def give_back(self, room: FileRoom) -> None:
        with self._lock:
            self._extents.free(room.extent)

    def write(self, room: FileRoom, address: int, nbytes: int, skip_bytes: int = 0) -> None:
        """Write ``nbytes`` of memory into the room, ``skip_bytes`` (whole blocks) behind its start. SwapError unless
        all is handed over.
        """
        with self._buffer() as (fd, buffer):
            for piece in self._pieces(buffer, room.start_bytes + skip_bytes, address, nbytes):
                for copy in piece.copies:
                    copy_bytes(copy.staged, copy.memory, copy.nbytes)
                self._move("write", fd, piece)

    def read(self, room: FileRoom, address: int, nbytes: int, skip_bytes: int = 0, *, detour: bool = False) -> None:
        """Read ``nbytes`` of the room, from ``skip_bytes`` (whole blocks) on, into memory, or raise SwapError.

        ``detour``: by way of a buffer of huge pages, which is quicker where the memory has small ones.
        """
        with self._buffer() as (fd, buffer):
            for piece in self._pieces(buffer, room.start_bytes + skip_bytes, address, nbytes, detour):
                self._move("read", fd, piece)
                for copy in piece.copies:
                    copy_bytes(copy.memory, copy.staged, copy.nbytes)

    def _pieces(
        self, buffer: AlignedBuffer, offset_bytes: int, address: int, nbytes: int, detour: bool = False
    ) -> Iterator[Piece]:
        if self.direct:
            return pieces.direct(buffer, offset_bytes, address, nbytes, detour)
        return pieces.buffered(offset_bytes, address, nbytes)

    def _move(self, verb: Literal["write", "read"], fd: int, piece: Piece) -> None:
        """All of a piece, however many calls that takes."""
        call = os.pwritev if verb == "write" else os.preadv
        nbytes = sum(len(view) for view in piece.views)
        done = stalls = 0
        while done < nbytes:
            try:
                moved = call(fd, pieces.rest(piece.views, done), piece.offset_bytes + done)
            except OSError as error:
                raise self._failed(verb, error, nbytes) from error
            step = self._usable(moved)
            stalls = 0 if step else stalls + 1
            if stalls > _MAX_STALLS:
                raise self._stalled(verb, nbytes)
            done += step
        self._drop_cached(fd, piece.offset_bytes, nbytes)

    def close(self) -> None:
        """Give the disk room back, once reads and writes under way have ended. Later use raises SwapError;
        idempotent.
        """
        with self._lock:
            self._closed = True
            self._idle.wait_for(lambda: self._active == 0)
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
                self._idle.notify_all()

    def _open(self) -> int:
        """The file, made at the first call. The caller holds the lock."""
        if self._closed:
            raise SwapError("the spill file is closed: the session it belonged to has given its host room back")
        if self._fd is None:
            fd = self._create()
            self._closer = weakref.finalize(self, _give_up, fd, os.getpid())
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

    def _stalled(self, verb: str, nbytes: int) -> SwapError:
        if verb == "write":
            return SwapError(f"the spill file in {self.directory!r} takes no more data, and gives no reason; {_HINT}")
        return SwapError(f"the spill file in {self.directory!r} ended before {format_bytes(nbytes)} were read back")

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


def _give_up(fd: int, owner_pid: int) -> None:
    """Give the disk room back. A forked process that lives on has the file open, too, and would keep it; when one such
    ends, it is not the one to empty what the others read.
    """
    try:
        if os.getpid() == owner_pid:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise SwapError(
            f"no spill file can be made ({error.strerror}): make one of them writable, or {_HINT}"
        ) from error


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
