"""The spill file: exact bytes through every kind of trouble the system can make."""

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delta.errors import HostFullError, SwapError
from delta.runtime import spill
from delta.runtime.pieces import BLOCK_BYTES, CALL_BYTES
from delta.runtime.rawmem import AlignedBuffer
from delta.runtime.spill import CHUNK_BYTES, FileRoom, SpillFile

MIB = 2**20


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def file(request: pytest.FixtureRequest, spill_dir: Path) -> Iterator[SpillFile]:
    file = SpillFile(str(spill_dir), direct=request.param)
    yield file
    file.close()


def buffer(content: bytes) -> AlignedBuffer:
    made = AlignedBuffer(max(len(content), 1))
    made.view[: len(content)] = content
    return made


def write_to(file: SpillFile, room: FileRoom, content: bytes, skip_bytes: int = 0) -> None:
    source = buffer(content)  # alive until the write has returned
    file.write(room, source.address, len(content), skip_bytes)


def write(file: SpillFile, content: bytes) -> FileRoom:
    room = file.reserve(len(content))
    write_to(file, room, content)
    return room


def read(file: SpillFile, room: FileRoom, nbytes: int) -> bytes:
    back = AlignedBuffer(max(nbytes, 1))
    file.read(room, back.address, nbytes)
    return bytes(back.view[:nbytes])


def in_pieces(real: Callable[..., int], piece_bytes: int) -> Callable[..., int]:
    """The system call, moving at most so much at a time."""

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        first = []
        left = piece_bytes
        for view in buffers:
            first.append(memoryview(view)[:left])
            left -= len(first[-1])
        return real(fd, [view for view in first if view], offset)

    return short


@pytest.mark.parametrize("nbytes", [1, BLOCK_BYTES, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_round_trip(file: SpillFile, nbytes: int) -> None:
    content = os.urandom(nbytes)
    before = write(file, b"before")
    extent = write(file, content)
    after = write(file, b"after")
    assert read(file, extent, nbytes) == content
    assert (read(file, before, 6), read(file, after, 5)) == (b"before", b"after")


def test_parts_of_an_extent(file: SpillFile) -> None:
    extent = file.reserve(2 * BLOCK_BYTES)
    write_to(file, extent, b"b", skip_bytes=BLOCK_BYTES)
    write_to(file, extent, b"a")
    back = AlignedBuffer(1)
    file.read(extent, back.address, 1, skip_bytes=BLOCK_BYTES)
    assert bytes(back.view) == b"b"


def test_memory_that_is_not_aligned(file: SpillFile) -> None:
    content = os.urandom(10_000)
    extent = file.reserve(9_999)
    source = buffer(content)
    file.write(extent, source.address + 1, 9_999)
    assert read(file, extent, 9_999) == content[1:]


PHASES = [0, 64, BLOCK_BYTES - 64]


@pytest.mark.parametrize("wrote", PHASES)
@pytest.mark.parametrize("reads", PHASES)
@pytest.mark.parametrize("nbytes", [2 * BLOCK_BYTES, CHUNK_BYTES + 100, 2 * CALL_BYTES + 100])
def test_memory_may_lie_anywhere(file: SpillFile, wrote: int, reads: int, nbytes: int) -> None:
    content = os.urandom(nbytes)
    before, room, after = write(file, b"b" * 5000), file.reserve(nbytes, wrote), write(file, b"a" * 5000)
    source, back = buffer(b"." * wrote + content), AlignedBuffer(reads + nbytes + 100)
    file.write(room, source.address + wrote, nbytes)
    file.read(room, back.address + reads, nbytes)
    assert bytes(back.view) == bytes(reads) + content + bytes(100)
    assert (read(file, before, 5000), read(file, after, 5000)) == (b"b" * 5000, b"a" * 5000)


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_in_phase_with_its_room_makes_no_detour(file: SpillFile, spill_copies: list[int], phase: int) -> None:
    memory = AlignedBuffer(MIB + 2 * BLOCK_BYTES)
    room = file.reserve(MIB, phase)
    file.write(room, memory.address + phase, MIB)
    file.read(room, memory.address + phase, MIB)
    assert sum(spill_copies) == (2 * BLOCK_BYTES if file.direct and phase else 0)
    file.read(room, memory.address + phase + 64, MIB)
    assert sum(spill_copies) >= (MIB if file.direct else 0)


def test_a_detour_is_made_when_asked_for(file: SpillFile, spill_copies: list[int]) -> None:
    room = write(file, b"x" * MIB)
    spill_copies.clear()
    back = AlignedBuffer(MIB)
    file.read(room, back.address, MIB, detour=True)
    assert bytes(back.view) == b"x" * MIB
    assert sum(spill_copies) == (MIB if file.direct else 0)


def test_room_has_its_phase_on_top(file: SpillFile) -> None:
    room = file.reserve(BLOCK_BYTES, 64)
    assert room.extent.nbytes == file.used_bytes == 2 * BLOCK_BYTES
    file.give_back(room)
    assert file.used_bytes == 0


def test_room_is_used_again(file: SpillFile) -> None:
    first = write(file, b"x" * 5000)
    assert file.used_bytes == 2 * BLOCK_BYTES
    file.give_back(first)
    assert file.used_bytes == 0
    assert file.reserve(8000) == first


def test_nothing_is_made_before_it_is_used(file: SpillFile) -> None:
    before = os.listdir("/proc/self/fd")
    SpillFile(file.directory).check()
    assert os.listdir("/proc/self/fd") == before
    file.reserve(1)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    assert os.listdir(file.directory) == []  # no name: nothing is left after a crash


def test_a_forgotten_file_is_closed(spill_dir: Path) -> None:
    before = os.listdir("/proc/self/fd")
    SpillFile(str(spill_dir)).reserve(1)
    assert os.listdir("/proc/self/fd") == before


def test_threads_write_and_read_at_once(file: SpillFile) -> None:
    contents = [os.urandom(CHUNK_BYTES + 7) for _ in range(4)]
    start, wrong = threading.Barrier(4), []

    def work(content: bytes) -> None:
        start.wait()
        if read(file, write(file, content), len(content)) != content:
            wrong.append(content)

    threads = [threading.Thread(target=work, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("piece_bytes", [BLOCK_BYTES, 3 * BLOCK_BYTES + 100])
def test_short_writes_and_reads_are_continued(
    file: SpillFile, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    content = os.urandom(50_000)
    file.reserve(1)  # the probe for O_DIRECT comes before
    monkeypatch.setattr(os, "pwritev", in_pieces(os.pwritev, piece_bytes // BLOCK_BYTES * BLOCK_BYTES))
    monkeypatch.setattr(os, "preadv", in_pieces(os.preadv, piece_bytes // BLOCK_BYTES * BLOCK_BYTES))
    assert read(file, write(file, content), len(content)) == content


def test_a_short_write_that_ends_inside_a_block_starts_again_at_the_block(
    spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def odd(fd: int, buffers: list[Any], offset: int) -> int:
        asked.append((offset, sum(map(len, buffers))))
        return 5000 if len(asked) == 1 else asked[-1][1]

    file = SpillFile(str(spill_dir))
    file.reserve(1)
    monkeypatch.setattr(os, "pwritev", odd)
    for file.direct in (True, False):
        asked.clear()
        write(file, b"x" * 12288)
        start = asked[0][0]
        assert [(offset - start, size) for offset, size in asked] == (
            [(0, 12288), (4096, 8192)] if file.direct else [(0, 12288), (5000, 7288)]
        )
    file.close()


def raising(number: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, HostFullError), (errno.EDQUOT, HostFullError), (errno.EIO, SwapError)]
)
def test_a_failed_write_says_why_and_what_to_do(
    file: SpillFile, monkeypatch: pytest.MonkeyPatch, number: int, error: type[SwapError]
) -> None:
    extent = file.reserve(5000)
    monkeypatch.setattr(os, "pwritev", raising(number))
    with pytest.raises(SwapError, match=r"host\.spill_dir") as caught:
        write_to(file, extent, b"x" * 5000)
    assert type(caught.value) is error
    assert file.directory in str(caught.value)
    assert ("8 KiB" if file.direct else "4.88 KiB") in str(caught.value)


def test_a_failed_read_says_so(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = write(file, b"x")
    monkeypatch.setattr(os, "preadv", raising(errno.EIO))
    with pytest.raises(SwapError, match=f"cannot read {'4 KiB' if file.direct else '1 B'}"):
        read(file, extent, 1)


@pytest.mark.parametrize(("call", "text"), [("pwritev", "takes no more data"), ("preadv", "ended before")])
def test_a_transfer_that_stops_moving_is_an_error(
    file: SpillFile, monkeypatch: pytest.MonkeyPatch, call: str, text: str
) -> None:
    extent = write(file, b"x")
    monkeypatch.setattr(os, call, lambda *_: 0)
    with pytest.raises(SwapError, match=text):
        write_to(file, extent, b"x") if call == "pwritev" else read(file, extent, 1)


def test_a_full_disk_is_noticed_when_room_is_reserved(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpillFile, "free_disk_bytes", lambda _: 3 * BLOCK_BYTES)
    hole = file.reserve(2 * BLOCK_BYTES)
    file.reserve(BLOCK_BYTES)
    with pytest.raises(HostFullError, match=r"no room for 16 KiB more .* holds 12 KiB; 12 KiB are free"):
        file.reserve(4 * BLOCK_BYTES)
    file.give_back(hole)
    assert file.reserve(2 * BLOCK_BYTES) == hole  # room inside the file needs no disk


def test_a_file_system_without_o_direct_is_used_buffered(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return 0

    monkeypatch.setattr(fcntl, "fcntl", refuses)
    file = SpillFile(str(spill_dir))
    content = os.urandom(10_001)
    assert read(file, write(file, content), len(content)) == content
    assert not file.direct
    file.close()


@pytest.mark.parametrize("place", ["missing", "a file"])
def test_an_unusable_directory_is_heard_of_at_once(tmp_path: Path, place: str) -> None:
    directory = tmp_path / "there"
    if place == "a file":
        directory.write_text("")
    file = SpillFile(str(directory))
    for use in (file.check, lambda: file.reserve(1), file.free_disk_bytes):
        if place == "a file" and use == file.free_disk_bytes:
            continue  # a file lies on a file system too
        with pytest.raises(SwapError, match=f"{directory}.*host\\.spill_dir"):
            use()


def test_no_directory_for_temporary_files_is_heard_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(spill.tempfile, "gettempdir", none)
    with pytest.raises(SwapError, match=r"No usable temporary directory found in .*host\.spill_dir"):
        SpillFile()


def test_close_waits_for_what_is_under_way(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile(str(spill_dir))
    extent = file.reserve(1)
    writing, may_write = threading.Event(), threading.Event()
    real = os.pwritev

    def slow(fd: int, buffers: list[Any], offset: int) -> int:
        writing.set()
        assert may_write.wait(5)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    writer = threading.Thread(target=write_to, args=(file, extent, b"x"))
    closer = threading.Thread(target=file.close)
    writer.start()
    assert writing.wait(5)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    may_write.set()
    writer.join()
    closer.join()


def test_a_closed_file_refuses(file: SpillFile) -> None:
    extent = write(file, b"x")
    file.close()
    file.close()
    for use in (lambda: file.reserve(1), lambda: read(file, extent, 1)):
        with pytest.raises(SwapError, match="closed"):
            use()
    file.give_back(extent)  # but a late owner may still say that it is done


def test_room_is_given_back_though_a_forked_process_has_the_file_open(file: SpillFile) -> None:
    write(file, b"x" * MIB)
    assert file._fd is not None
    inherited = os.dup(file._fd)
    assert os.fstat(inherited).st_blocks > 0
    file.close()
    assert os.fstat(inherited).st_blocks == 0
    os.close(inherited)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_forked_process_that_is_done_with_the_file_empties_it_for_nobody(file: SpillFile, forgotten: bool) -> None:
    room = write(file, b"x" * MIB)
    assert file._closer is not None
    child = os.fork()
    if not child:
        try:
            file._closer() if forgotten else file.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert read(file, room, MIB) == b"x" * MIB


def test_an_open_file_tells_what_is_free_where_it_lies(file: SpillFile) -> None:
    """Its directory may be gone, or another file system be mounted there."""
    write(file, b"x")
    file.directory = "/nowhere"
    assert file.free_disk_bytes() > 0
