"""Swap, recompute or encode, per record: the cheapest of what the policy allows and the record can bear.

Cheapest is per byte that it frees: an encoded form stays on the device, the other two free all.

With `hidden_swap` a swap costs what compute would wait for it (`LinkQueue.exposed_ns`); without, it costs its whole way
out and back, as DELTA publishes it (ACM TACO 2024). Either way with what a runtime takes for two copies, as a chain's
cost has what it takes for each replay. A rule of the policy overrides the costs, never what is possible: a
record without a recipe is not recomputed, whatever the YAML says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from delta.costs import LinkQueue
from delta.types import Action, Encoding


class RuleLike(Protocol):
    """One line under `rules:` of a policy (see `delta.config.Rule`)."""

    @property
    def action(self) -> Action: ...
    def matches(self, op: str, module: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Prospect:
    """What the director may know of a record that may go."""

    nbytes: int
    op: str  # name of the op that made it, "" if unknown
    module: str  # qualified name of the module that made it, "" if unknown
    chain_ns: int | None  # replay of its missing chain; None: it cannot be replayed
    host_whole: bool  # the host holds a copy already
    swappable: bool  # the host tier can take it
    now_ns: int
    next_use_ns: int
    encoding: Encoding | None = None  # the smaller form it can be kept in, and there is room for now


@dataclass(frozen=True, slots=True)
class Choice:
    """An action, its cost in ns, and the bytes of an encoded form that stay on the device."""

    action: Action
    cost_ns: int
    stays_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Director:
    """Chooses among `actions`; the first matching rule wins."""

    actions: tuple[Action, ...]
    rules: Sequence[RuleLike] = ()
    hidden_swap: bool = True

    def choose(self, prospect: Prospect, queue: LinkQueue) -> Choice | None:
        """The cheapest possible action other than keep, or None where the record has to stay."""
        wanted = self.ruled(prospect.op, prospect.module)
        if wanted is Action.KEEP:
            return None
        options = self._options(prospect, queue)
        if wanted is not None:
            options = [option for option in options if option.action is wanted] or options
        return min(
            options, key=lambda option: option.cost_ns / max(1, prospect.nbytes - option.stays_bytes), default=None
        )

    def possible(self, op: str, module: str, replayable: bool, swappable: bool) -> list[Action]:
        """What `choose` would choose from for such a record, encoded forms aside."""
        wanted = self.ruled(op, module)
        if wanted is Action.KEEP:
            return []
        able = ((Action.RECOMPUTE, replayable), (Action.SWAP, swappable))
        actions = [action for action, is_able in able if is_able and action in self.actions]
        return [wanted] if wanted in actions else actions

    def _options(self, prospect: Prospect, queue: LinkQueue) -> list[Choice]:
        options = []
        if Action.RECOMPUTE in self.actions and prospect.chain_ns is not None:
            options.append(Choice(Action.RECOMPUTE, prospect.chain_ns))
        if Action.SWAP in self.actions and (prospect.swappable or prospect.host_whole):
            options.append(Choice(Action.SWAP, self._swap_ns(prospect, queue)))
        if Action.ENCODE in self.actions and prospect.encoding is not None and not prospect.host_whole:
            options.append(Choice(Action.ENCODE, prospect.encoding.cost_ns, prospect.encoding.nbytes))
        return options

    def _swap_ns(self, prospect: Prospect, queue: LinkQueue) -> int:
        if self.hidden_swap:
            return queue.exposed_ns(prospect.nbytes, prospect.now_ns, prospect.next_use_ns, prospect.host_whole)
        link = queue.link
        return link.out_ns(prospect.nbytes) + link.in_ns(prospect.nbytes) + int(2 * link.copy_ns)

    def ruled(self, op: str, module: str) -> Action | None:
        """The action a rule of the policy gives to what this op made, if one does."""
        return next((rule.action for rule in self.rules if rule.matches(op, module)), None)
