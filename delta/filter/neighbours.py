"""What to evict so that a request finds its room in one piece: the cheapest way that a layout offers.

Inside a segment it is a run of neighbours (Coop, `window.py`). Whole segments can be given back to the device, which
makes a new one of them wherever they lay, so of these any will do. That second way is not in the paper, whose pool is
one segment. It is a knapsack to be filled at least cost; the greedy way taken here costs at most twice the least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from delta.filter.window import Piece, cheapest_window
from delta.layout import Area, Place

Price = Callable[[int], int | None]
"""What evicting a record costs, whole and not negative; None if it has to stay."""
_Found = tuple[int, list[Place]]  # a cost, and what it clears


def cheapest_neighbours(areas: Iterable[Area], price: Price) -> tuple[int, ...] | None:
    """The records to evict for a request; None if nothing would make room for it. Among equals, from the first area."""
    best: _Found | None = None
    for area in areas:
        costs = [_cost(place, price) for place in area.places]
        found = _pages(area, costs) if area.pages else _window(area, costs)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else tuple(record for place in best[1] for record in place.records)


def _cost(place: Place, price: Price) -> int | None:
    total = 0
    for record in place.records:
        cost = price(record)
        if cost is None:
            return None
        total += cost
    return total


def _window(area: Area, costs: Sequence[int | None]) -> _Found | None:
    pieces = [Piece(place.nbytes, place.segment, cost) for place, cost in zip(area.places, costs, strict=True)]
    window = cheapest_window(pieces, area.need_bytes)
    return None if window is None else (window.cost, list(area.places[window.start : window.stop]))


def _pages(area: Area, costs: Sequence[int | None]) -> _Found | None:
    """Fill up by cost for size; what would be enough is tried as the last one, and not taken (J. Csirik et al.,
    *Heuristics for the 0-1 min-knapsack problem*, Acta Cybernetica 10, 1991)."""
    priced = [
        (cost, place) for cost, place in zip(costs, area.places, strict=True) if cost is not None and place.nbytes
    ]
    priced.sort(key=lambda item: item[0] / item[1].nbytes)
    taken: list[tuple[int, Place]] = []
    taken_bytes = taken_cost = 0
    best: _Found | None = None
    for cost, place in priced:
        if taken_bytes + place.nbytes < area.need_bytes:
            taken.append((cost, place))
            taken_bytes, taken_cost = taken_bytes + place.nbytes, taken_cost + cost
        elif best is None or taken_cost + cost < best[0]:
            best = _without_waste([*taken, (cost, place)], area.need_bytes)
    return best


def _without_waste(items: Iterable[tuple[int, Place]], need_bytes: int) -> _Found:
    """As much of these as is needed; the dearest that can be spared stay."""
    kept = sorted(items, key=lambda item: -item[0])
    spare_bytes = sum(place.nbytes for _, place in kept) - need_bytes
    needed = []
    for cost, place in kept:
        if place.nbytes <= spare_bytes:
            spare_bytes -= place.nbytes
        else:
            needed.append((cost, place))
    return sum(cost for cost, _ in needed), [place for _, place in needed]
