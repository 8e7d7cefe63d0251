"""What the rules of a policy say of the storages that a step saves, and which rules match none of them.

A storage is asked about when it is saved, by the op and the module that made it: when the step ends, those that nothing
reads have been forgotten.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from delta.config import Policy, Rule
from delta.types import Action

TOLD = 3  # names, those nearest to the rule's
WHOLE = 4  # steps that are looked at: of several kinds that take turns, each saves something else


class Ruled:
    """The saved storages of the step under way, by save order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._makers: list[tuple[str, str]] = []  # (op, module); empty where they are not known
        self._seen: set[tuple[str, str]] = set()  # in whole steps
        self._whole = 0  # steps

    def saved(self, op: str, module: str) -> None:
        self._makers.append((op, module))

    def new_step(self) -> None:
        self._makers.clear()

    def forced(self) -> dict[int, Action]:
        """What the first rule that matches says, where one does."""
        actions = (self._policy.rule_for(*maker) for maker in self._makers)
        return {order: action for order, action in enumerate(actions) if action is not None}

    def seen_whole(self) -> str | None:
        """The step that ends was seen from its first op. Once there have been a few: what to tell the user of the rules
        that matched nothing they saved, if there are such."""
        self._whole += 1
        if self._whole > WHOLE:
            return None
        self._seen.update(self._makers)
        return self._unmatched() if self._whole == WHOLE else None

    def _unmatched(self) -> str | None:
        steps, seen = f"{WHOLE} whole steps", self._seen
        told = [
            f"rules.{number} ({_asked(rule)}) matched nothing that {steps} saved; {_names(rule, seen)}"
            for number, rule in enumerate(self._policy.rules)
            if not any(rule.matches(*maker) for maker in seen)
        ]
        if not told:
            return None
        return (
            ". ".join(told)
            + ". Ops are named as PyTorch's dispatcher names them, without the overload, and modules as "
            "model.named_modules() does; a trace of the step (delta.evict(trace=...)) names all of its ops"
        )


def _asked(rule: Rule) -> str:
    globs = [f"{key}={glob!r}" for key, glob in (("op", rule.op), ("module", rule.module)) if glob is not None]
    return ", ".join([*globs, f"action={rule.action}"])


def _names(rule: Rule, makers: Collection[tuple[str, str]]) -> str:
    ops, modules = ({maker[place] for maker in makers} - {""} for place in (0, 1))
    seen = [
        f"the nearest names of {what}: {', '.join(_nearest(glob, names))}" if names else f"no {what} were seen"
        for what, glob, names in (("ops", rule.op, ops), ("modules", rule.module, modules))
        if glob is not None
    ]
    return ", ".join(seen)


def _nearest(glob: str, names: Collection[str]) -> list[str]:
    return get_close_matches(glob, sorted(names), n=TOLD, cutoff=0.0)
