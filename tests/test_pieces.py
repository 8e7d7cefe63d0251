"""How a transfer is cut into calls: every byte once, whole blocks, and nothing of anybody else's."""

import ctypes
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta.runtime import pieces
from delta.runtime.pieces import BLOCK_BYTES, Piece
from delta.runtime.rawmem import AlignedBuffer, copy_bytes, tensor_at

CALL_BYTES = 4 * BLOCK_BYTES
BUFFER_BYTES = 3 * BLOCK_BYTES
MOST_BYTES = 11 * BLOCK_BYTES
GUARD = 0xA5


@pytest.fixture(autouse=True, scope="module")
def short_calls() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "CALL_BYTES", CALL_BYTES)
        yield


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def memory_views(piece: Piece, buffer: AlignedBuffer) -> list[memoryview]:
    inside = range(buffer.address, buffer.address + buffer.nbytes)
    return [view for view in piece.views if address_of(view) not in inside]


def write(file: bytearray, parts: Iterator[Piece]) -> list[int]:
    """Carry the pieces out; returns how many bytes each had copied."""
    copied = []
    for piece in parts:
        for copy in piece.copies:
            copy_bytes(copy.staged, copy.memory, copy.nbytes)
        end = piece.offset_bytes
        for view in piece.views:
            file[end : end + len(view)] = view
            end += len(view)
        copied.append(sum(copy.nbytes for copy in piece.copies))
    return copied


def read(file: bytearray, parts: Iterator[Piece]) -> None:
    for piece in parts:
        end = piece.offset_bytes
        for view in piece.views:
            view[:] = file[end : end + len(view)]
            end += len(view)
        for copy in piece.copies:
            copy_bytes(copy.memory, copy.staged, copy.nbytes)


phases = st.integers(0, BLOCK_BYTES - 1)
lengths = st.one_of(
    st.integers(1, MOST_BYTES),
    st.integers(0, 9).flatmap(lambda blocks: st.integers(blocks * BLOCK_BYTES + 1, blocks * BLOCK_BYTES + 3)),
)


@settings(max_examples=300, deadline=None)
@given(phases, phases, phases, lengths, st.booleans(), st.booleans())
def test_what_is_written_is_read_back(
    writer: int, reader: int, place: int, nbytes: int, in_phase: bool, detour: bool
) -> None:
    """Written from one address, read to another, in phase with the file or not; what lies beside stays as it is."""
    if in_phase:
        writer = reader = place
    content = os.urandom(nbytes)
    source, target = AlignedBuffer(MOST_BYTES + 2 * BLOCK_BYTES), AlignedBuffer(MOST_BYTES + 2 * BLOCK_BYTES)
    source.view[writer : writer + nbytes] = content
    tensor_at(target.address, target.nbytes).fill_(GUARD)
    file, buffer = bytearray(MOST_BYTES + 4 * BLOCK_BYTES), AlignedBuffer(BUFFER_BYTES)
    offset = BLOCK_BYTES + place

    write(file, pieces.direct(buffer, offset, source.address + writer, nbytes))
    assert file[offset : offset + nbytes] == content
    read(file, pieces.direct(buffer, offset, target.address + reader, nbytes, detour))
    guard = bytes([GUARD])
    assert bytes(target.view[:reader]) == guard * reader
    assert bytes(target.view[reader : reader + nbytes]) == content
    assert bytes(target.view[reader + nbytes :]) == guard * (target.nbytes - reader - nbytes)


@settings(max_examples=300, deadline=None)
@given(phases, phases, lengths, st.booleans())
def test_calls_are_as_the_system_wants_them(phase: int, place: int, nbytes: int, detour: bool) -> None:
    memory, buffer = AlignedBuffer(MOST_BYTES + 2 * BLOCK_BYTES), AlignedBuffer(BUFFER_BYTES)
    address = memory.address + phase
    expected = place // BLOCK_BYTES * BLOCK_BYTES
    for piece in pieces.direct(buffer, place, address, nbytes, detour):
        assert piece.offset_bytes == expected
        assert all(address_of(view) % BLOCK_BYTES == 0 for view in piece.views)
        assert all(view and len(view) % BLOCK_BYTES == 0 for view in piece.views)
        assert sum(map(len, piece.views)) <= CALL_BYTES
        for view in memory_views(piece, buffer):
            assert address <= address_of(view) and address_of(view) + len(view) <= address + nbytes
        expected += sum(map(len, piece.views))
    assert place + nbytes <= expected < place + nbytes + BLOCK_BYTES


@pytest.mark.parametrize("phase", [0, 64, BLOCK_BYTES - 64])
@pytest.mark.parametrize("blocks", [2, 3, 4, 5, 8, 9, 10])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_in_phase_only_the_ends_are_copied(phase: int, blocks: int, more: int) -> None:
    nbytes = max(blocks * BLOCK_BYTES + more, 2 * BLOCK_BYTES)
    memory, buffer = AlignedBuffer(MOST_BYTES + 2 * BLOCK_BYTES), AlignedBuffer(BUFFER_BYTES)
    parts = pieces.direct(buffer, phase, memory.address + phase, nbytes)
    copied = sum(write(bytearray(MOST_BYTES + 4 * BLOCK_BYTES), parts))
    assert copied == -phase % BLOCK_BYTES + (phase + nbytes) % BLOCK_BYTES


@pytest.mark.parametrize(("phase", "detour"), [(64, False), (0, True)])
def test_out_of_phase_and_on_a_detour_all_is_copied(phase: int, detour: bool) -> None:
    memory, buffer = AlignedBuffer(MOST_BYTES), AlignedBuffer(BUFFER_BYTES)
    file = bytearray(MOST_BYTES + 4 * BLOCK_BYTES)
    copied = write(file, pieces.direct(buffer, phase, memory.address, 10 * BLOCK_BYTES, detour))
    assert sum(copied) == 10 * BLOCK_BYTES
    assert max(copied) <= BUFFER_BYTES


def test_the_page_cache_takes_all_as_it_lies() -> None:
    memory = AlignedBuffer(MOST_BYTES)
    parts = list(pieces.buffered(100, memory.address + 1, 2 * CALL_BYTES + 5))
    assert [(part.offset_bytes, len(part.views[0]), part.copies) for part in parts] == [
        (100, CALL_BYTES, []),
        (100 + CALL_BYTES, CALL_BYTES, []),
        (100 + 2 * CALL_BYTES, 5, []),
    ]
    assert [address_of(part.views[0]) for part in parts] == [
        memory.address + 1,
        memory.address + 1 + CALL_BYTES,
        memory.address + 1 + 2 * CALL_BYTES,
    ]


@pytest.mark.parametrize(
    ("done", "left"),
    [(0, ["ab", "c", "def"]), (1, ["b", "c", "def"]), (2, ["c", "def"]), (3, ["def"]), (5, ["f"]), (6, [])],
)
def test_the_rest_of_a_call(done: int, left: list[str]) -> None:
    views = [memoryview(text.encode()) for text in ("ab", "c", "def")]
    assert [bytes(view).decode() for view in pieces.rest(views, done)] == left
