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


class Ruled:
    """The saved storages of the step under way, by save order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._makers: list[tuple[str, str]] = []  # (op, module); empty where they are not known

    def saved(self, op: str, module: str) -> None:
        self._makers.append((op, module))

    def new_step(self) -> None:
        self._makers.clear()

    def forced(self) -> dict[int, Action]:
        """What the first rule that matches says, where one does."""
        actions = (self._policy.rule_for(*maker) for maker in self._makers)
        return {order: action for order, action in enumerate(actions) if action is not None}

    def unmatched(self) -> str | None:
        """What to tell the user of the rules that match nothing the step has saved; None where all do."""
        makers = set(self._makers)
        told = [
            f"rules.{number} ({_asked(rule)}) matched nothing that the first whole step saved; {_seen(rule, makers)}"
            for number, rule in enumerate(self._policy.rules)
            if not any(rule.matches(*maker) for maker in makers)
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


def _seen(rule: Rule, makers: Collection[tuple[str, str]]) -> str:
    ops, modules = ({maker[place] for maker in makers} - {""} for place in (0, 1))
    seen = [
        f"the nearest names of {what}: {', '.join(_nearest(glob, names))}" if names else f"no {what} were seen"
        for what, glob, names in (("ops", rule.op, ops), ("modules", rule.module, modules))
        if glob is not None
    ]
    return ", ".join(seen)


def _nearest(glob: str, names: Collection[str]) -> list[str]:
    return get_close_matches(glob, sorted(names), n=TOLD, cutoff=0.0)
