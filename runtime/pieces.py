"""How a transfer between memory and a file is put to the system: what of it goes straight, and what through a buffer.

O_DIRECT moves whole blocks between memory and file that both begin at a block. Where memory and file are in phase (a
byte lies equally far behind the start of its block in both), all blocks but the first and the last go straight, and
what the other two hold beside goes nowhere: only pages that belong to the caller altogether are ever given to the
system, so that a fork while a copy is under way takes nothing from anybody.

The system pins memory page by page, and hands the pages to the disk one by one. What that takes from compute, in ms for
each MiB in a loop, two threads on two cores, beside a product of matrices and beside sums: a write from pages of 4 KiB
0.06 and 0.10, the same by way of a buffer of huge pages 0.14 and 0.17; a read into pages of 4 KiB 0.13 and 0.18 to
0.26, by way of a buffer of such pages 0.10 to 0.13 and 0.17 to 0.24, of huge ones 0.06 and 0.13 to 0.18. So what is
written goes straight, and what was read made a detour. On another machine the detour took 0.25 of processor time, most
of it for the copy, and a read straight into pages of 4 KiB 0.06, into huge ones 0.035. So for reads the device tries
both (`delta.runtime.device.cpu`).

Pure arithmetic: no call is made here, no byte is moved.
"""

import ctypes
import mmap
from collections.abc import Iterator
from typing import NamedTuple

from delta.runtime.extents import round_up
from delta.runtime.rawmem import AlignedBuffer

BLOCK_BYTES = max(4096, mmap.PAGESIZE)  # what O_DIRECT wants of addresses, offsets and lengths on all file systems met
CALL_BYTES = 16 * 2**20  # straight, in one call: others want the disk and Python's lock too


class Copy(NamedTuple):
    """Bytes between memory and the buffer, at these addresses: before a write to the buffer, after a read from it."""

    memory: int
    staged: int
    nbytes: int


class Piece(NamedTuple):
    """One call: these views, one behind the other, are the file from the offset on."""

    offset_bytes: int
    views: list[memoryview]
    copies: list[Copy]


def buffered(offset_bytes: int, address: int, nbytes: int) -> Iterator[Piece]:
    """Through the page cache, which takes everything as it lies."""
    for start in range(0, nbytes, CALL_BYTES):
        view = _view(address + start, min(CALL_BYTES, nbytes - start))
        yield Piece(offset_bytes + start, [view], [])


def direct(
    buffer: AlignedBuffer, offset_bytes: int, address: int, nbytes: int, detour: bool = False
) -> Iterator[Piece]:
    """Past the page cache, all of it through the buffer where a ``detour`` is asked for. Of the blocks at both ends all
    is written: what else was in them is lost.
    """
    in_phase = (offset_bytes - address) % BLOCK_BYTES == 0
    way = _straight if in_phase and nbytes >= 2 * BLOCK_BYTES and not detour else _staged
    return way(buffer, offset_bytes, address, nbytes)


def rest(views: list[memoryview], done_bytes: int) -> list[memoryview]:
    """What of the views comes after so many bytes."""
    left: list[memoryview] = []
    for view in views:
        if done_bytes < len(view):
            left.append(view[done_bytes:])
        done_bytes = max(0, done_bytes - len(view))
    return left


def _straight(buffer: AlignedBuffer, offset_bytes: int, address: int, nbytes: int) -> Iterator[Piece]:
    """Memory and file in phase, two blocks at least: those at the ends by way of two blocks of the buffer."""
    lead_bytes = address % BLOCK_BYTES
    first, end = address - lead_bytes, address + nbytes
    for start in range(first, end, CALL_BYTES):
        stop = min(start + CALL_BYTES, round_up(end, BLOCK_BYTES))
        inner_start, inner_stop = start, stop
        head, tail, copies = [], [], []
        if start < address:
            inner_start += BLOCK_BYTES
            head.append(buffer.view[:BLOCK_BYTES])
            copies.append(Copy(address, buffer.address + lead_bytes, inner_start - address))
        if stop > end:
            inner_stop -= BLOCK_BYTES
            tail.append(buffer.view[BLOCK_BYTES : 2 * BLOCK_BYTES])
            copies.append(Copy(inner_stop, buffer.address + BLOCK_BYTES, end - inner_stop))
        inner = [_view(inner_start, inner_stop - inner_start)] if inner_start < inner_stop else []
        yield Piece(offset_bytes - lead_bytes + start - first, [*head, *inner, *tail], copies)


def _staged(buffer: AlignedBuffer, offset_bytes: int, address: int, nbytes: int) -> Iterator[Piece]:
    """All of it through the buffer."""
    lead_bytes = offset_bytes % BLOCK_BYTES
    for start in range(0, lead_bytes + nbytes, buffer.nbytes):
        stop = min(start + buffer.nbytes, lead_bytes + nbytes)
        begin = max(start, lead_bytes)
        copy = Copy(address + begin - lead_bytes, buffer.address + begin - start, stop - begin)
        view = buffer.view[: round_up(stop - start, BLOCK_BYTES)]
        yield Piece(offset_bytes - lead_bytes + start, [view], [copy])


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
