"""Planning as the engine has it: what a planner is asked, what is held open for a longer search, what is told of it.

A planner that answers in milliseconds is asked between two steps. Where a longer search may find a better plan
(`BESIDE`), its task stays open: the runtime has it searched beside the training and tells what was found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from delta.budget import Budget
from delta.config import Policy
from delta.errors import PolicyError
from delta.families import FamilyLearner
from delta.learner import Learner
from delta.parts import SHIPPED_PLANNERS
from delta.planner import BESIDE, BY_POSITION, FEEDBACK, PLANNERS, Plan, StepGraph, Task
from delta.planner.assemble import best, plan_of
from delta.planner.choices import obeyed_rules, without_wide_replays
from delta.profile import Profile
from delta.revising import AIM, Revising
from delta.sizes import Sizes
from delta.types import Action, Link

OPEN = 4  # tasks at most, those planned last


class _Open(NamedTuple):
    """A task worth a longer search, the graph it was asked for, and the bytes that its plan was to take."""

    task: Task
    graph: StepGraph
    aim_bytes: int


class Planning:
    """Plans for `learner`, which is given once it exists. `announced` as the engine has it."""

    learner: Learner

    def __init__(self, policy: Policy, budget: Budget, link: Link, announced: bool) -> None:
        self._policy, self._budget, self._link, self._announced = policy, budget, link, announced
        self._kind = policy.planner.kind
        self._open: list[_Open] = []  # the last one planned last
        self.made = 0
        self.failed: Exception | None = None  # of a planner of the program's own, until the program can be told

    @property
    def by_position(self) -> bool:
        """Whether plans know, place by place, what a device budget has to leave to others."""
        return self._budget.device_bytes is not None and self._kind in BY_POSITION

    def limit_bytes(self, unevicted_peak_bytes: int, told: bool) -> int | None:
        """The limit for a step that has just begun: see `sizes.Limit`."""
        return self._budget.limit_bytes(unevicted_peak_bytes, beside_bytes=0 if told else None)

    @property
    def heeds_late(self) -> bool:
        """Whether plans learn from copies back that came late."""
        return self._kind in FEEDBACK

    def plan(self, graph: StepGraph, limit_bytes: int, forced: Mapping[int, Action]) -> Plan | None:
        """A plan for steps like `graph`, at once. None where a planner of the program's own has failed."""
        task = self._task(graph, self._for_graph(graph, limit_bytes), forced)
        plan = self._ask(task)
        if plan is not None and self._kind in BESIDE and not self._announced and not plan.idle:
            others = [other for other in self._open if other.graph is not graph]
            self._open = [*others, _Open(task, graph, limit_bytes)][-OPEN:]
        return plan

    def plan_once(self, graph: StepGraph, limit_bytes: int, forced: Mapping[int, Action]) -> Plan | None:
        """The same for a step that may not come again, with nothing held open. The limit is that for activations."""
        return self._ask(self._task(graph, limit_bytes, forced))

    def plan_like(self, graph: StepGraph, limit_bytes: int, known: Iterable[Sequence[Action]]) -> Plan | None:
        """... or a better one, with the actions of a plan that is `known` of a step that differs in its sizes only."""
        task = self._task(graph, limit_bytes, {})
        made = self._ask(task)
        if made is None or made.idle:
            return made
        may_go = [graph.nodes[node].evictable for node in graph.saved]
        others = ([action if may else Action.KEEP for action, may in zip(each, may_go, strict=True)] for each in known)
        return best(task, [made, *(plan_of(graph, self._link, actions) for actions in others)])

    def plan_on(
        self, graph: StepGraph, limit_bytes: int, forced: Mapping[int, Action], fixed: Mapping[int, Action]
    ) -> Plan | None:
        """A plan that does what is `fixed`, by save order, whether it has to or not, and no more if that is enough."""
        limit_bytes = self._for_graph(graph, limit_bytes)
        plan = plan_of(graph, self._link, [fixed.get(order, Action.KEEP) for order in range(len(graph.saved))])
        if plan.peak_bytes <= limit_bytes:
            return plan
        more = self.plan_once(graph, limit_bytes, {**fixed, **forced})
        if more is None:
            return None
        return plan_of(graph, self._link, [fixed.get(order, action) for order, action in enumerate(more.actions)])

    def _for_graph(self, graph: StepGraph, limit_bytes: int) -> int:
        """What is left of a device's budget where the graph does not say, place by place, what others take."""
        if self.by_position and not graph.beside_saves:
            return max(0, limit_bytes - self._budget.beside_bytes(graph.unevicted_bytes))
        return limit_bytes

    def _task(self, graph: StepGraph, limit_bytes: int, forced: Mapping[int, Action]) -> Task:
        actions = self._policy.director.actions
        task = Task(
            without_wide_replays(graph, limit_bytes) if Action.SWAP in actions and not self._announced else graph,
            limit_bytes,
            self._link,
            actions,
            forced,
            self._announced,
            self._policy.planner,
            () if self._announced else self.learner.actions_for(graph),
        )
        return replace(task, forced=obeyed_rules(task)) if forced else task

    def _ask(self, task: Task) -> Plan | None:
        self.made += 1
        planner = PLANNERS[self._kind]
        if self._kind in SHIPPED_PLANNERS:
            return planner(task)
        try:
            plan: object = planner(task)
            if not isinstance(plan, Plan):
                raise PolicyError(f"planner {self._kind!r} answered {plan!r}: a planner makes a delta.planner.Plan.")
        except Exception as error:
            self.failed = error
            return None
        return plan

    def amend(self, plan: Plan, graph: StepGraph, gone: Mapping[int, Action]) -> Plan | None:
        """The plan in which the storages `gone`, by save order, go as well when they have been saved. The plan itself
        where it has them go already, or says when storages go after that. None where the plan's peak would be higher
        for it: what had to go while chains came back, in backward, lengthens them."""
        kept = (order for order, action in enumerate(plan.actions) if action is Action.KEEP)
        more = {order: gone[order] for order in kept if order in gone}
        if plan.evictions or plan.moves or not more:
            return plan
        amended = plan_of(graph, self._link, [more.get(order, action) for order, action in enumerate(plan.actions)])
        return amended if amended.peak_bytes <= plan.peak_bytes else None

    def heed_late(self, plan: Plan, graph: StepGraph, late: Collection[int]) -> Plan:
        """The plan after a step in which backward waited for the copies back of the save orders `late`."""
        return FEEDBACK[self._kind](plan, graph, self._link, late)

    @property
    def open_tasks(self) -> list[Task]:
        """What a longer search may find a better plan for, outside of the engine, planned last first.

        A task is the same as long as it is worth the search: once its kind of step has been planned anew, it is not."""
        self._open = [each for each in self._open if self._profile_for(each) is not None]
        return [each.task for each in reversed(self._open)]

    def _profile_for(self, each: _Open) -> Profile | None:
        return self.learner.planned_as(each.graph, each.aim_bytes)

    def search_ended(self, task: Task, plan: Plan | None) -> None:
        """The search for an open task is over. A plan it found is followed from the next step on, unless it would be
        over the limit by more than the last step was: what goes beside a plan that is over may have brought it there.

        To be told between two steps. An answer to what is not asked any more is left."""
        ended = [each for each in self._open if each.task is task]
        self._open = [each for each in self._open if each.task is not task]
        profile = self._profile_for(ended[0]) if ended else None
        if profile is None or plan is None:
            return
        if profile.over_bytes is None or plan.peak_bytes - task.limit_bytes <= max(0, profile.over_bytes):
            self.learner.follow(profile, plan)


def learner_for(policy: Policy, planning: Planning, announced: bool) -> Learner:
    """The learner that suits a policy, whose plans are `planning`'s; it is given to it. `announced` as the engine has
    it."""
    kind, min_bytes = policy.planner.kind, policy.filter.min_bytes
    revising = Revising(
        min_bytes,
        {"none": None, "mimose": planning.plan_once}.get(kind, planning.plan),
        aim=1.0 if announced else AIM,  # where nothing has to be guessed, nothing is left unused
        selective=not policy.rules,  # they ask for the names of ops
        heed_late=planning.heed_late if planning.heeds_late else None,
        amend=planning.amend,
        plan_on=planning.plan_on if kind == "profile" and not announced else None,
    )
    if kind == "mimose":
        planning.learner = FamilyLearner(revising, limit=planning.limit_bytes, options=policy.planner)
        return planning.learner
    planning.learner = learner = Learner(revising)
    if kind == "profile" and revising.selective and not announced:
        learner.sizes = Sizes(min_bytes, planning.plan_like, planning.limit_bytes, revising.aim, revising.data)
    return learner
