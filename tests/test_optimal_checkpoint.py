"""Optimal gradient checkpoint search: division trees by hand, cuts against all others, plans. Units: bytes, ns."""

from random import Random

import pytest
from builders import a_log, an_op
from logs import random_net

from delta.config import PlannerConfig
from delta.planner import StepGraph, Task, forecast
from delta.planner.accessibility import Accessibility, Cut
from delta.planner.optimal_checkpoint import optimal_checkpoint
from delta.planner.segments import Segment, Shape, divide
from delta.planner.steplog import build_graph
from delta.planner.vertices import vertices_of
from delta.policies.loader import load
from delta.simulate import Status, simulate
from delta.trace import read
from delta.types import Action, Kind, Link
from delta.units import Share

KEEP, RECOMPUTE = Action.KEEP, Action.RECOMPUTE
IDLE_LINK = Link(1.0, 1.0)


# -- the division tree ------------------------------------------------------------------------------------------------
def chain(length: int) -> list[list[int]]:
    return [[number + 1] for number in range(length - 1)] + [[]]


def test_a_chain_is_linear():
    tree = divide(chain(5))
    assert (tree.shape, tree.inner, tree.level) == (Shape.LINEAR, (1, 2, 3), (1, 2, 3))
    assert [child.shape for child in tree.children] == [Shape.LEAF] * 4


def test_a_residual_block_is_a_branch_in_a_chain():
    """0 -> 1 -> (2 -> 3, and past them) -> 4 -> 5."""
    tree = divide([[1], [2, 4], [3], [4], [5], []])
    assert (tree.shape, tree.level) == (Shape.LINEAR, (1, 4))
    block = tree.children[1]
    assert (block.shape, block.inner, block.level) == (Shape.BRANCH, (2, 3), ())
    assert [(child.shape, child.level) for child in block.children] == [(Shape.LINEAR, (2, 3))]


def test_parts_side_by_side_are_a_branch():
    tree = divide([[1, 2], [3], [4], [5], [5], []])
    assert tree.shape is Shape.BRANCH
    assert [child.inner for child in tree.children] == [(1, 3), (2, 4)]


def test_crossed_parts_are_complicate_and_what_is_closed_in_them_is_found():
    """Two strands with an edge across, from 1 to 6; between 1 and 5 two vertices side by side, which are closed."""
    tree = divide([[1, 2], [3, 4, 6], [6], [5], [5], [7], [7], []])
    assert (tree.shape, tree.level) == (Shape.COMPLICATE, (1, 2, 5, 6))
    assert [(child.source, child.target, child.inner) for child in tree.children] == [(1, 5, (3,)), (1, 5, (4,))]


def a_dag(random: Random, length: int) -> list[list[int]]:
    """One source, one target, edges that do not lead far."""
    after: list[set[int]] = [set() for _ in range(length)]
    for vertex in range(1, length):
        for _ in range(random.choice([1, 1, 2])):
            after[random.randint(max(0, vertex - 3), vertex - 1)].add(vertex)
    for vertex in range(length - 1):
        if not after[vertex]:
            after[vertex].add(random.randint(vertex + 1, length - 1))
    return [sorted(others) for others in after]


@pytest.mark.parametrize("seed", range(60))
def test_every_segment_is_closed_and_every_vertex_is_in_one_place(seed):
    random = Random(seed)
    after = a_dag(random, random.randint(3, 16))

    def look(segment: Segment) -> None:
        inside = set(segment.inner)
        for vertex in segment.inner:
            assert set(after[vertex]) <= inside | {segment.target}
        for vertex in set(range(len(after))) - inside - {segment.source}:
            assert inside.isdisjoint(after[vertex])
        below = [vertex for child in segment.children for vertex in child.inner]
        assert sorted([*segment.level, *below]) == list(segment.inner)
        for child in segment.children:
            look(child)

    look(divide(after))


# -- cuts -------------------------------------------------------------------------------------------------------------
def every_way(after: list[list[int]], nbytes: list[int]) -> int:
    """The least sum of checkpoints and largest connected rest, over all sets of checkpoints."""
    inner, best = range(1, len(after) - 1), sum(nbytes)
    for chosen in range(1 << len(inner)):
        left = {vertex for vertex in inner if not chosen >> (vertex - 1) & 1}
        total, largest = sum(nbytes[vertex] for vertex in inner if vertex not in left), 0
        while left:
            todo, size = [left.pop()], 0
            while todo:
                vertex = todo.pop()
                size += nbytes[vertex]
                near = {other for other in left if other in after[vertex] or vertex in after[other]}
                left -= near
                todo += near
            largest = max(largest, size)
        best = min(best, total + largest)
    return best


def some_bytes(random: Random, length: int) -> list[int]:
    return [0, *(random.randint(1, 20) for _ in range(length - 2)), 0]


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_of_a_chain_is_better(seed):
    random = Random(seed)
    after = chain(random.randint(3, 11))
    nbytes = some_bytes(random, len(after))
    assert Accessibility(divide(after), nbytes, nbytes).least().total_bytes == every_way(after, nbytes)


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_of_any_graph_is_the_best_over_all_caps_and_no_better_than_can_be(seed):
    random = Random(seed)
    after = a_dag(random, random.randint(4, 11))
    nbytes = some_bytes(random, len(after))
    search = Accessibility(divide(after), nbytes, nbytes)
    found = search.least()
    assert found.total_bytes == min(search.cut(cap).total_bytes for cap in range(sum(nbytes) + 1))
    assert every_way(after, nbytes) <= found.total_bytes <= sum(nbytes)
    assert sorted([*found.checkpoints, *(vertex for unit in found.units for vertex in unit)]) == [
        *range(1, len(after) - 1)
    ]


def test_checkpoints_of_a_chain_of_equals_are_its_root():
    nbytes = [0, *[1] * 24, 0]
    assert Accessibility(divide(chain(26)), nbytes, nbytes).least() == Cut(
        (5, 10, 15, 20), ((1, 2, 3, 4), (6, 7, 8, 9), (11, 12, 13, 14), (16, 17, 18, 19), (21, 22, 23, 24)), 4, 4
    )


def test_caps_are_held_where_a_vertex_allows_it():
    nbytes = [0, 3, 9, 2, 2, 0]
    search = Accessibility(divide(chain(6)), nbytes, nbytes)
    assert search.cut(4) == Cut((2,), ((1,), (3, 4)), 9, 4)
    assert search.cut(0).checkpoints == (1, 2, 3, 4)
    assert search.cut(search.whole_bytes) == Cut((), ((1, 2, 3, 4),), 0, 16)


# -- plans ------------------------------------------------------------------------------------------------------------
def a_net(length: int = 24, nbytes: int = 100, cost_ns=lambda layer: 10) -> StepGraph:
    """Layers of which each reads the one before; all are saved. A mask made from nothing is read by all but the first,
    and each has noise of its own that no layer reads."""
    source, mask = 0, 1
    ops, saves, sizes = [an_op(1, [], [mask])], [(mask, 0, 1)], {source: 10, mask: 10}
    for layer in range(length):
        made, noise = 10 + layer, 1000 + layer
        reads = [10 + layer - 1, mask] if layer else [source]
        ops.append(an_op(2 + layer, reads, [made, noise], cost_ns=cost_ns(layer)))
        sizes |= {made: nbytes, noise: 1}
        saves += [(made, 10 * layer + 10, layer + 2), (noise, 10 * layer + 10, layer + 2)]
    orders = list(reversed(range(len(saves))))
    needs = [(order, 1000 + 10 * position) for position, order in enumerate(orders)]
    releases = [(order, position + 1) for position, order in enumerate(orders)]
    log = a_log(ops, sizes, saves, needs, releases, 9000, {source: Kind.SOURCE})
    return build_graph(log, 0)


def a_task(graph: StepGraph, limit_bytes: int, allowed=(KEEP, RECOMPUTE), forced=None) -> Task:
    return Task(graph, limit_bytes, IDLE_LINK, allowed, forced or {}, False, PlannerConfig())


def test_vertices_are_ops_and_what_starts_on_its_own_is_none():
    found = vertices_of(a_task(a_net(4), 0))
    assert [(vertex.before, vertex.after) for vertex in found] == [({-1}, {1}), ({0}, {2}), ({1}, {3}), ({2}, {4})]
    assert [vertex.orders for vertex in found] == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_under_no_budget_at_all_it_is_the_plan_of_the_least_memory():
    """24 layers of 101 bytes: four stay, and at most four and their neighbour are there again at once."""
    plan = optimal_checkpoint(a_task(a_net(), 0))
    assert 4 <= plan.actions[1::2].count(KEEP) <= 6
    assert plan.actions[0] is KEEP, "the mask is read by all"
    assert plan.peak_bytes <= 12 * 101


@pytest.mark.parametrize("percent", [40, 60, 80, 100])
def test_a_budget_is_held_and_used(percent):
    graph = a_net(cost_ns=lambda layer: 10 + layer)
    limit_bytes = graph.unevicted_bytes * percent // 100
    plan = optimal_checkpoint(a_task(graph, limit_bytes))
    assert plan.peak_bytes == forecast(graph, plan.actions, IDLE_LINK).peak_bytes <= limit_bytes
    assert plan.replay_ns < optimal_checkpoint(a_task(graph, 0)).replay_ns
    assert (percent == 100) == plan.idle


def test_what_is_dearest_per_byte_stays():
    dear = optimal_checkpoint(a_task(a_net(cost_ns=lambda layer: 9000 if layer < 6 else 1), 1300)).actions
    assert dear[1:13:2].count(RECOMPUTE) <= dear[13::2].count(RECOMPUTE) // 3


def test_rules_and_allowed_actions_are_respected():
    forced = {1: KEEP, 3: KEEP, 5: RECOMPUTE}
    plan = optimal_checkpoint(a_task(a_net(), 0, forced=forced))
    assert [plan.actions[order] for order in forced] == list(forced.values())
    assert optimal_checkpoint(a_task(a_net(), 0, allowed=(KEEP,))).idle


def test_plans_repeat():
    assert optimal_checkpoint(a_task(a_net(), 1500)) == optimal_checkpoint(a_task(a_net(), 1500))


@pytest.mark.parametrize("share", [0.5, 0.35])
def test_a_log_where_everything_may_go_runs(tmp_path, share):
    trace = read(random_net(30, seed=3).write(tmp_path / "net.log"))
    run = simulate(trace, load("optimal-checkpoint", {"filter.min_bytes": 0}), Share(share))
    assert run.status is Status.OK
    assert 1 < run.overhead < 1.6
