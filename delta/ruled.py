"""What the rules of a policy say of the storages that a step saves.

A storage is asked about when it is saved, by the op and the module that made it: when the step ends, those that nothing
reads have been forgotten.
"""

from __future__ import annotations

from delta.config import Policy
from delta.types import Action


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
