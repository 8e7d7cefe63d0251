"""Programs that go one of several ways: loops of so many turns, layers that are dropped by chance, early exits.

Nothing tells at the first save which way a step will go, so it begins by the routine of the way that is expected, and
leaves it where another call comes. Up to there it went like other steps that are known, and could go on by the routine
of one of these, had that the same done with what was saved so far. So it is made to: of two ways that begin alike the
one that saves more is planned first, and the plan of the other one has to do the same up to where they part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from delta.profile import Profile
from delta.types import Action

# So many steps that left their routine midway, and so many of all, make a program one that goes several ways. Where it
# is one step in sixteen, say, the others had better not do like that.
LEAST, MOST_ASTRAY = 3, 1 / 8
# What has passed by a routine has no recipe. So where a step leaves all that is known it may be over its limit: after
# one that was, so many are recorded whole, each time twice as many, up to the `LONGEST`.
OVERRUN, LONGEST = 8, 256
WIDER = 16  # ... and after a way that is larger than all before: there may be a larger one
ALIKE = 0.01  # what is no larger than by that is as large


@dataclass(slots=True)
class Branching:
    """Whether a program goes one of several ways, as far as its steps have told. `possible`: if the policy can follow
    it there. `wary`: so many steps to come are recorded whole, whatever is known of them."""

    possible: bool
    wary: int = 0
    _steps: int = 0
    _astray: int = 0  # of them, those that went otherwise than expected when something had been saved
    _overruns: int = 0

    @property
    def on(self) -> bool:
        return self.possible and self._astray >= max(LEAST, MOST_ASTRAY * self._steps)

    def ended(self, otherwise: bool) -> None:
        """A step has ended."""
        self._steps += 1
        self._astray += otherwise
        self.wary = max(0, self.wary - 1)

    def overran(self) -> None:
        """... that left its routine for none, and was over its limit."""
        self.wary = min(LONGEST, OVERRUN << self._overruns)
        self._overruns += 1

    def came(self, of_widest: float) -> None:
        """... that saved so many times what the largest one does that begins like it."""
        if of_widest > 1 + ALIKE:
            self.wary = max(self.wary, WIDER)


@dataclass(frozen=True, slots=True)
class Fork:
    """What two ways have in common: their first calls, and the tensors saved meanwhile."""

    calls: int
    packs: int


def fork_of(one: Profile, other: Profile) -> Fork | None:
    """Where they part; None where that is before anything has been saved."""
    if one.signatures[:1] != other.signatures[:1]:  # as most are: looked at first, for their calls are many
        return None
    ours, theirs = one.bare.log, other.bare.log
    calls = _common((call for call, _ in ours.calls), (call for call, _ in theirs.calls))
    mine = zip(one.signatures, ours.orders, ours.calls_at, strict=False)
    packs = min(
        _common(mine, zip(other.signatures, theirs.orders, theirs.calls_at, strict=False)),
        bisect_right(ours.calls_at, calls),
    )
    return Fork(calls, packs) if packs else None


def _common(one: Iterable[object], other: Iterable[object]) -> int:
    """How many of the first ones are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def trunk_of(profile: Profile, profiles: Iterable[Profile]) -> tuple[Profile, Fork] | None:
    """The way that this one has to do like: of those that save more, and have a plan, one with which it has most calls
    in common."""
    larger = (p for p in profiles if p.plan is not None and p.unevicted_peak_bytes > profile.unevicted_peak_bytes)
    forks = [(other, fork) for other in larger if (fork := fork_of(profile, other)) is not None]
    return max(forks, key=lambda found: (found[1].calls, found[0].unevicted_peak_bytes), default=None)


def done_by(trunk: Profile, fork: Fork, profile: Profile) -> dict[int, Action]:
    """What is done by the trunk's plan with what the other way saves before they part, or has made by then: by save
    order. What the trunk does not save is kept: nobody will know how to make it again."""
    assert trunk.plan is not None
    actions, saved = trunk.plan.actions, len(set(profile.course.orders[: fork.packs]))
    made_there = {made: actions[order] for order, made in _makers(trunk).items()}
    made_here = {order: made for order, made in _makers(profile).items() if made[0] < fork.calls and order >= saved}
    later = {order: made_there.get(made, Action.KEEP) for order, made in made_here.items()}
    return dict(enumerate(actions[:saved])) | later


def read_by_trunk(profile: Profile) -> set[int]:
    """What replays of the trunk read of what is saved before they part, by save order: a step that goes on by its
    routine has to know more of that than its bytes."""
    read = profile.trunk.routine.read if profile.trunk is not None and profile.trunk.routine is not None else ()
    return set(read).intersection(profile.course.orders[: profile.trunk_packs])


def _makers(profile: Profile) -> dict[int, tuple[int, int]]:
    """By save order of what a call of forward has made: the number of that call, and which of its results it is."""
    graph, found = profile.graph, dict[int, tuple[int, int]]()
    number = {op: place for place, (_, op) in enumerate(profile.bare.log.calls)}
    for order, node in enumerate(graph.saved):
        op = graph.nodes[node].op
        if op is not None and op in number:
            found[order] = number[op], graph.ops[op].outputs.index(node)
    return found
