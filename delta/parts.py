"""The parts that a policy picks by name, and how a program adds parts of its own.

A score ranks what may go (`delta.filter.scores`), a planner plans a step as a whole (`delta.planner.task`). Policies
are checked against these names, so a part has to be registered before a policy that names it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from delta.errors import PolicyError

if TYPE_CHECKING:
    from delta.filter.scores import Score
    from delta.planner.task import Planner

SHIPPED_SCORES = ("delta", "delta-paper", "dtr", "coop", "msps", "size-staleness", "lru", "size")
SHIPPED_PLANNERS = ("profile", "mimose", "monet", "optimal-checkpoint", "capuchin", "none")

_scores = dict.fromkeys(SHIPPED_SCORES)
_planners = dict.fromkeys(SHIPPED_PLANNERS)


def score_names() -> tuple[str, ...]:
    """What `filter.score` may be."""
    return tuple(_scores)


def planner_names() -> tuple[str, ...]:
    """What `planner.kind` may be."""
    return tuple(_planners)


def register_score(name: str, score: Score) -> None:
    """Let policies rank by `score`, a function of a `delta.filter.Candidate`; the smallest goes first.

    PolicyError where the name is empty or belongs to a shipped score. A name registered before stands for the new one.
    """
    from delta.filter.scores import SCORES

    _register(name, score, "score", SHIPPED_SCORES)
    SCORES[name] = score
    _scores[name] = None


def register_planner(name: str, planner: Planner) -> None:
    """Let policies plan by `planner`, which makes a `delta.planner.Plan` of a `delta.planner.Task`.

    PolicyError where the name is empty or belongs to a shipped planner. A name registered before stands for the new
    one.
    """
    from delta.planner.registry import PLANNERS

    _register(name, planner, "planner", SHIPPED_PLANNERS)
    PLANNERS[name] = planner
    _planners[name] = None


def _register(name: str, part: Callable[..., object], kind: str, shipped: tuple[str, ...]) -> None:
    if not isinstance(name, str) or not name:
        raise PolicyError(f"the name of a {kind} must be a non-empty string, not {name!r}")
    if name in shipped:
        raise PolicyError(f"{name!r} is a shipped {kind}: give yours another name. Shipped: {', '.join(shipped)}.")
    if not callable(part):
        raise PolicyError(f"the {kind} {name!r} has to be callable, {part!r} is not")
