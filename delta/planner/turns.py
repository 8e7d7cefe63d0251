"""A step as a sequence of turns, where every access of the program is announced.

In a turn the program reads some storages, all of which have to be there at once, may run an op that makes others, and
lets go of some. Storages are numbered by the order of their first save, as everywhere in the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """`reads`: what has to be there; `op`: the op that runs, if one does; `freed`: what the program lets go of after
    it. `start_ns`, `end_ns`: net times."""

    reads: tuple[int, ...]
    op: int | None
    start_ns: int
    end_ns: int
    freed: tuple[int, ...]


def turns_of(
    ends: Sequence[tuple[int, int, int]],
    needs: Sequence[int],
    releases: Iterable[tuple[int, int]],
    end_ns: int,
) -> Iterator[Turn]:
    """`ends`: for each turn, the needs and ops so far and the net time at its end. `releases`: (storage, turns so far).

    Needs after the last turn are those of a turn of their own, in which the program reads its results.
    """
    if not ends:
        return
    freed: dict[int, list[int]] = {}
    for storage, turns in releases:
        freed.setdefault(turns - 1, []).append(storage)
    needed = ran = began_ns = 0
    for turn, (needs_so_far, ops_so_far, at_ns) in enumerate(ends):
        reads = tuple(dict.fromkeys(needs[needed:needs_so_far]))
        op = ops_so_far - 1 if ops_so_far > ran else None
        yield Turn(reads, op, began_ns, at_ns, tuple(freed.get(turn, ())) if turn < len(ends) - 1 else ())
        needed, ran, began_ns = needs_so_far, ops_so_far, at_ns
    last = tuple(dict.fromkeys(needs[needed:]))
    yield Turn(last, None, began_ns, end_ns, tuple(freed.get(len(ends) - 1, ())))
