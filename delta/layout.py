"""Where records lie in device memory, as far as a device can tell: what evicting neighbours together needs to know.

A request for n bytes is served in one of two ways. Some free block of a segment is large enough; or the device has
enough memory, in whole segments that nobody uses and in what is in no segment yet, for a new segment: such memory is
pages, and need not be side by side. `Layout.areas` lists, for one request, all memory by these two ways.

A device without addresses has no layout. Not here: what a window costs, and which one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Place:
    """Memory that is free once `records` are gone: a block has one, a whole segment all that lie in it, free memory
    none. A number that is no record of the ledger's is somebody else's memory, which stays."""

    nbytes: int
    segment: int
    records: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Area:
    """Places, some of which together make `need_bytes` of room for a request: neighbours in one segment, in the order
    of `places`, or, if `pages`, any of them."""

    need_bytes: int
    places: Sequence[Place]
    pages: bool = False


class Layout(Protocol):
    """The addresses of one device."""

    bounded: bool
    """Whether this memory is the budget: then a request fits where it finds a place, and bytes need not be counted."""

    def areas(self, nbytes: int) -> Sequence[Area]:
        """All memory that could serve a request for so many bytes."""
