"""What to evict so that a request finds its room in one piece: the cheapest window over all that a layout offers.

Inside a segment a window is a run of neighbours (Coop, `window.py`). Whole segments can be given back to the device,
which makes a new one of them wherever they lay; so of these a window takes the ones that are cheapest for their size.
That second way is not in the paper, whose pool is one segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from delta.filter.window import Piece, Window, cheapest_window
from delta.layout import Area, Place

Price = Callable[[int], int | None]
"""What evicting a record costs, whole and not negative; None if it has to stay."""


def cheapest_neighbours(areas: Iterable[Area], price: Price) -> tuple[int, ...] | None:
    """The records to evict for a request; None if nothing would make room for it. Among equals, from the first area."""
    found = [window for area in areas if (window := _cheapest(area, price)) is not None]
    return min(found, key=lambda window: window[0])[1] if found else None


def _cheapest(area: Area, price: Price) -> tuple[int, tuple[int, ...]] | None:
    """Cost and records of the cheapest window of one area."""
    places = list(area.places)
    costs = [_cost(place, price) for place in places]
    pieces = [Piece(place.nbytes, place.segment, cost) for place, cost in zip(places, costs, strict=True)]
    if area.pages:
        order = sorted((at for at, cost in enumerate(costs) if cost is not None), key=lambda at: _density(pieces[at]))
        places, pieces = [places[at] for at in order], [Piece(pieces[at].nbytes, 0, costs[at]) for at in order]
    window = cheapest_window(pieces, max(1, area.need_bytes))
    return None if window is None else (window.cost, _records(places, window))


def _cost(place: Place, price: Price) -> int | None:
    total = 0
    for record in place.records:
        cost = price(record)
        if cost is None:
            return None
        total += cost
    return total


def _density(piece: Piece) -> float:
    return (piece.cost or 0) / max(1, piece.nbytes)


def _records(places: Sequence[Place], window: Window) -> tuple[int, ...]:
    return tuple(record for place in places[window.start : window.stop] for record in place.records)
