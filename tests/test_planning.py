"""Planning beside the training: what is open to a search, when one is started and stopped, and that no step waits."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from operator import mul
from types import SimpleNamespace

import pytest
from builders import a_log, an_op
from models import CASES, train
from test_monet import best_cost_ns, random_step
from test_planner import chain
from toy import Toy

import delta
from delta.budget import Budget
from delta.config import PlannerConfig
from delta.learner import Learner
from delta.planner import BESIDE, PLANNERS, Task, cover, forecast
from delta.planner.assemble import assemble, best, plan_of
from delta.planner.cuts import cut_links
from delta.planner.forecast import Forecaster
from delta.planner.program import Program
from delta.planner.steplog import build_graph
from delta.planning import OPEN
from delta.runtime import planning
from delta.runtime.planning import PlanningAside
from delta.simulate import simulate
from delta.trace import Recording, read
from delta.trace.events import FREE
from delta.types import Action, Kind, Link
from delta.units import Share

KEEP, SWAP, RECOMPUTE = Action.KEEP, Action.SWAP, Action.RECOMPUTE
LINK = Link(1e9, 1e9, 0.3)


def a_task(graph, limit_bytes, allowed=(KEEP, RECOMPUTE), known=()):
    return Task(graph, limit_bytes, LINK, allowed, {}, False, PlannerConfig(), known)


# -- what the engine holds open ---------------------------------------------------------------------------------------
def step(toy: Toy, base: int, cost_ns: int = 10) -> None:
    """A chain of three storages of 40 bytes is saved, and needed in reverse."""
    toy.source(base, 0)
    for k in (1, 2, 3):
        toy.op(base + k, 40, [base + k - 1], cost_ns=cost_ns)
        toy.let_go(base + k - 1)
        toy.now = 100 * base + 10 * k
        toy._do(toy.engine.saved(base + k, k, toy.now))
    toy.let_go(base + 3)
    for k in (3, 2, 1):
        toy.use(base + k, 100 * base + 100 - 20 * k)


def a_planned_toy() -> Toy:
    toy = Toy(85, actions=("keep", "recompute"))
    step(toy, 1)
    assert toy.engine.learner.profiles[0].plan is not None
    return toy


def test_a_planned_step_is_open_until_its_search_has_ended():
    engine = a_planned_toy().engine
    (task,) = engine.planning.open_tasks
    assert task.graph is engine.learner.profiles[0].graph and task.known == ()
    assert engine.planning.open_tasks[0] is task
    found = assemble(task, (RECOMPUTE, RECOMPUTE, KEEP))
    engine.planning.search_ended(task, found)
    assert engine.planning.open_tasks == []
    assert engine.learner.profiles[0].plan is found


def test_the_found_plan_is_followed_in_the_next_step():
    toy = a_planned_toy()
    (task,) = toy.engine.planning.open_tasks
    found = assemble(task, (RECOMPUTE, RECOMPUTE, KEEP))
    toy.engine.planning.search_ended(task, found)
    toy.source(11, 0)
    toy.op(12, 40, [11])
    toy._do(toy.engine.saved(12, 1, 1010))
    assert toy.engine.learner.plan is found


def test_a_plan_that_would_be_further_over_the_limit_than_steps_are_is_left():
    """All that is kept takes 120 bytes; the last steps have taken 80 of 85."""
    for actions, followed in (((KEEP, KEEP, KEEP), False), ((RECOMPUTE, KEEP, KEEP), True)):
        toy = a_planned_toy()
        for base in (11, 21, 31):
            step(toy, base)
        (task,), profile = toy.engine.planning.open_tasks, toy.engine.learner.profiles[0]
        known, found = profile.plan, assemble(task, actions)
        assert profile.over_bytes == 80 - 85 and (found.peak_bytes <= task.limit_bytes) is followed
        toy.engine.planning.search_ended(task, found)
        assert (profile.plan, profile.over_bytes) == ((found, None) if followed else (known, -5))
        assert toy.engine.planning.open_tasks == []


def test_of_a_plan_that_no_step_has_followed_yet_nobody_knows_how_far_it_is_over(monkeypatch):
    toy = a_planned_toy()
    for base in (11, 21, 31):
        step(toy, base)
    profile = toy.engine.learner.profiles[0]
    known = profile.plan
    monkeypatch.setattr(Budget, "limit_bytes", lambda *asked, **more: 45)
    step(toy, 41)
    assert profile.plan is not known and profile.over_bytes is None
    monkeypatch.undo()
    toy = a_planned_toy()
    (task,), profile = toy.engine.planning.open_tasks, toy.engine.learner.profiles[0]
    found = assemble(task, (KEEP, KEEP, KEEP))
    toy.engine.planning.search_ended(task, found)
    assert profile.plan is found


def product(toy: Toy, base: int) -> None:
    """c is made of a and b, and each takes 100 bytes; d, of c, takes 200. Backward needs d, c, b, a."""
    toy.source(base, 0)
    for k, nbytes, sources, cost_ns in (
        (1, 100, [0], 10),
        (2, 100, [0], 10),
        (3, 100, [1, 2], 10),
        (4, 200, [3], 10**5),
    ):
        toy.op(base + k, nbytes, [base + source for source in sources], cost_ns=cost_ns)
        toy.now = 100 * base + 10 * k
        toy._do(toy.engine.saved(base + k, k, toy.now))
        toy.let_go(*{3: (base + 1, base + 2), 4: (base + 3, base + 4)}.get(k, ()))
    for k in (4, 3, 2, 1):
        toy.use(base + k, 100 * base + 400 - 50 * k)


@pytest.mark.parametrize(("actions", "c"), [(("keep", "swap", "recompute"), SWAP), (("keep", "recompute"), RECOMPUTE)])
def test_what_a_replay_would_have_no_room_for_is_copied_by_plans_too(actions, c):
    """a, b and c together take 300 bytes, of which a plan has 297; c and d do, too."""
    toy = Toy(301, actions, Link(1e9, 1e9, 1.0))
    for base in (0, 10, 20):
        product(toy, base)
        (profile,) = toy.engine.learner.profiles
        assert profile.plan is not None and profile.plan.actions[2] is c
    (task,) = toy.engine.planning.open_tasks
    assert (task.limit_bytes, task.graph is profile.graph) == (297, c is RECOMPUTE)
    found = assemble(task, (RECOMPUTE, RECOMPUTE, c, KEEP))
    toy.engine.planning.search_ended(task, found)
    assert profile.plan is found, "the task is that of the graph as it is"


def test_where_everything_may_go_a_rehearsal_sees_to_the_room(monkeypatch):
    """What is read in forward is needed there, and may go in between."""
    asked = []
    monkeypatch.setitem(PLANNERS, "profile", lambda task: asked.append(task) or assemble(task, [KEEP] * 4))
    toy = Toy(299, announced=True)
    product(toy, 0)
    (profile,) = toy.engine.learner.profiles
    assert [task.graph is profile.graph for task in asked] == [True]


def test_a_step_that_is_planned_anew_asks_anew_and_knows_the_plan_in_use():
    toy = a_planned_toy()
    (task,) = toy.engine.planning.open_tasks
    step(toy, 11, cost_ns=5)  # op times have become better
    (later,) = toy.engine.planning.open_tasks
    assert later is not task and later.known == PLANNERS["profile"](task).actions
    plan = toy.engine.learner.profiles[0].plan
    toy.engine.planning.search_ended(task, assemble(task, (KEEP, KEEP, KEEP)))
    assert toy.engine.learner.profiles[0].plan is plan, "the answer to what is not asked any more is left"
    toy.engine.planning.search_ended(later, None)
    assert toy.engine.learner.profiles[0].plan is plan, "nothing was found"
    assert toy.engine.planning.open_tasks == []


def test_the_last_few_that_were_planned_are_open_the_last_one_first(monkeypatch):
    planning = a_planned_toy().engine.planning
    graph = planning.learner.profiles[0].graph
    monkeypatch.setattr(Learner, "planned_as", lambda *asked: planning.learner.profiles[0])
    for number in range(OPEN + 1):
        planning.plan(replace(graph, end_ns=number), 85, {})
    assert [task.graph.end_ns for task in planning.open_tasks] == list(range(OPEN, 0, -1))


def test_other_planners_leave_nothing_open():
    toy = Toy(85, actions=("keep", "recompute"), planner={"kind": "monet"})
    step(toy, 1)
    assert toy.engine.learner.profiles[0].plan is not None
    assert toy.engine.planning.open_tasks == []


def test_a_plan_for_another_size_is_taken_if_it_is_better(monkeypatch):
    """A greedy one that lets all go is dearer than that; what may not go at this size is kept."""
    planning = a_planned_toy().engine.planning
    graph = planning.learner.profiles[0].graph
    task = planning._task(graph, 85, {})
    known = planning.plan_once(graph, 85, {}).actions
    monkeypatch.setitem(PLANNERS, "profile", lambda task: assemble(task, (RECOMPUTE, RECOMPUTE, RECOMPUTE)))
    assert planning.plan_like(graph, 85, []).actions == (RECOMPUTE, RECOMPUTE, RECOMPUTE)
    assert best(task, [assemble(task, known), planning.plan_like(graph, 85, [])]).actions == known
    assert planning.plan_like(graph, 85, [known]).actions == known
    tried, made = [], plan_of
    monkeypatch.setattr("delta.planning.plan_of", lambda *asked: tried.append(asked[2]) or made(*asked))
    nodes = tuple(replace(node, evictable=node.order != 1) for node in graph.nodes)
    planning.plan_like(replace(graph, nodes=nodes), 85, [(RECOMPUTE, RECOMPUTE, KEEP)])
    assert tried == [[RECOMPUTE, KEEP, KEEP]]


def test_what_others_take_is_left_free_where_the_graph_does_not_tell(monkeypatch):
    planning = a_planned_toy().engine.planning
    graph = planning.learner.profiles[0].graph
    bare, told = planning.plan_on(graph, 85, {}, {}), replace(graph, beside_saves=(30,) * len(graph.saved))
    assert bare.peak_bytes <= 85 < planning.plan_on(graph, 200, {}, {}).peak_bytes
    monkeypatch.setattr(planning, "_budget", Budget(device_bytes=200, other_bytes=115))
    assert planning.plan_on(graph, 200, {}, {}) == planning.plan(graph, 200, {}) == bare
    assert planning.plan_on(told, 200, {}, {}).actions == (KEEP,) * len(graph.saved)


def test_where_nothing_has_to_go_no_other_plan_is_tried():
    planning = a_planned_toy().engine.planning
    assert planning.plan_like(planning.learner.profiles[0].graph, 10**6, [(RECOMPUTE, KEEP, KEEP)]).idle


# -- what the planners make of it -------------------------------------------------------------------------------------
def test_the_plan_in_use_stays_where_the_greedy_one_is_dearer():
    better = 0
    for seed in range(30):
        graph = random_step(seed)
        task = a_task(graph, graph.unevicted_bytes * 60 // 100)
        at_once, searched = PLANNERS["profile"](task), BESIDE["profile"](task)
        assert best(task, (at_once, searched)) == best(task, (searched,)), "never worse"
        again = replace(task, known=searched.actions)
        assert best(task, (PLANNERS["profile"](again), searched)).actions in (searched.actions, at_once.actions)
        costs = [forecast(graph, plan.actions, LINK).cost_ns for plan in (PLANNERS["profile"](again), searched)]
        assert costs[0] == costs[1]
        better += searched.actions != at_once.actions
    assert better


@pytest.mark.parametrize(
    ("allowed", "at_once_at_most", "seeds"),
    [((KEEP, RECOMPUTE), 1.25, 25), ((KEEP, SWAP), 1.1, 25), ((KEEP, RECOMPUTE, SWAP), 1.1, 8)],
    ids=str,
)
def test_plans_against_all_there_are(allowed, at_once_at_most, seeds):
    """Steps small enough to try every assignment. The search finds a plan wherever there is one, and close to the best;
    the greedy plan costs more, and not much."""
    best_ns = at_once_ns = searched_ns = 0
    for seed in range(seeds):
        graph = random_step(seed)
        for percent in (40, 60, 80):
            task = a_task(graph, graph.unevicted_bytes * percent // 100, allowed)
            least_ns = best_cost_ns(task)
            if least_ns is None:
                continue
            at_once, searched = PLANNERS["profile"](task), BESIDE["profile"](task)
            assert searched.peak_bytes <= task.limit_bytes
            if at_once.peak_bytes <= task.limit_bytes:
                best_ns += least_ns
                at_once_ns += forecast(graph, at_once.actions, LINK).cost_ns
                searched_ns += forecast(graph, searched.actions, LINK).cost_ns
    assert 0 < best_ns <= searched_ns <= 1.05 * best_ns
    assert at_once_ns <= at_once_at_most * best_ns


def a_deep_step(blocks, stream_bytes=1000):
    """Blocks of a matrix product, two element-wise ops and a residual add: four saved storages each."""
    ops, saves, nbytes, now_ns, stream = [], [], {0: 0}, 0, 0
    for block in range(blocks):
        made = range(4 * block + 1, 4 * block + 5)
        reads = ([stream], [made[0]], [made[1]], [made[2], stream])
        for number, inputs, cost_ns in zip(made, reads, (2000, 100, 120, 90), strict=True):
            ops.append(an_op(number, inputs, [number], cost_ns=cost_ns))
            nbytes[number] = 4000 if number != made[3] else stream_bytes
            now_ns += cost_ns
            saves.append((number, now_ns, number))
        stream = made[3]
    count = len(saves)
    needs = [(v, now_ns + 1000 * (count - v)) for v in reversed(range(count))]
    releases = [(v, count - v) for v in reversed(range(count))]
    return build_graph(a_log(ops, nbytes, saves, needs, releases, now_ns + 1000 * count, {0: Kind.SOURCE}), 0)


@pytest.mark.parametrize("percent", [70, 50, 30])
@pytest.mark.parametrize("allowed", [(KEEP, RECOMPUTE), (KEEP, RECOMPUTE, SWAP)], ids=str)
def test_a_thousand_storages_take_few_forecasts(percent, allowed, monkeypatch):
    """A forecast takes as long as a step is long: planning may take a fixed number of them."""
    graph = a_deep_step(260)
    made = []
    forecast_of = Forecaster.forecast
    monkeypatch.setattr(Forecaster, "forecast", lambda self, actions: made.append(1) or forecast_of(self, actions))
    task = a_task(graph, graph.unevicted_bytes * percent // 100, allowed)
    assert PLANNERS["profile"](task).peak_bytes <= task.limit_bytes
    assert len(graph.saved) > 1000 and len(made) <= 20


def test_chains_are_cut_where_they_are_narrow():
    """Dropping the stream is cheapest of all, but then one need would bring all of it back, and every block with it.
    With some of it kept no matrix product has to go."""
    graph = a_deep_step(60, 4000)
    task = a_task(graph, graph.unevicted_bytes // 2)
    made = PLANNERS["profile"](task)
    assert made.peak_bytes <= task.limit_bytes
    dropped = [v % 4 for v, action in enumerate(made.actions) if action is RECOMPUTE]
    assert 0 not in dropped and {1, 2, 3} == set(dropped)


@pytest.mark.parametrize(
    ("room_bytes", "at_most"), [(0, 0), (200, 800), (400, 800), (600, 600), (700, 700), (900, 900)]
)
def test_what_lies_between_two_cuts_fits_beside_them_or_comes_close(room_bytes, at_most):
    """Three cuts with three between two of them take 600 bytes, and nothing less is enough."""
    ops = [an_op(number, [number - 1], [number]) for number in range(1, 13)]
    nbytes = {number: 100 if number else 0 for number in range(13)}
    saves = [(number, 10 * number, number) for number in range(1, 13)]
    needs = [(v, 300 - 10 * v) for v in reversed(range(12))]
    graph = build_graph(a_log(ops, nbytes, saves, needs, [(v, 12 - v) for v in range(12)], 400, {0: Kind.SOURCE}), 0)
    kept = cut_links(graph, range(12), set(range(12)), room_bytes)
    runs = [after - before - 1 for before, after in pairwise([-1, *kept, 12])]
    if room_bytes:
        assert kept and 100 * (len(kept) + max(runs)) <= at_most
    else:
        assert kept == []


def test_a_large_program_is_solved_relaxed_and_close_to_its_bound(monkeypatch):
    """A relaxation cannot cost more than the best plan."""
    graph = a_deep_step(130)
    task = a_task(graph, graph.unevicted_bytes * 40 // 100)
    bounds = []
    solve = Program.solve

    def solved(self, time_limit_s, gap, relaxed):
        found = solve(self, time_limit_s, gap, relaxed)
        assert relaxed
        bounds.append(sum(map(mul, self.costs, found or ())))
        return found

    monkeypatch.setattr(cover, "WHOLE", 100)
    monkeypatch.setattr(Program, "solve", solved)
    made = BESIDE["profile"](task)
    unit_ns = sum(op.cost_ns for op in graph.ops) / 1000
    assert made.peak_bytes <= task.limit_bytes
    assert bounds[0] * unit_ns <= made.replay_ns <= 1.03 * bounds[0] * unit_ns


# -- when a search is started and stopped -----------------------------------------------------------------------------
class FakeSearch:
    """A search that ends when it is told to."""

    found = "a plan"

    def __init__(self, task):
        self.task, self.ended, self.stopped = task, False, False
        FakeSearch.started.append(self)

    def plan(self):
        return self.found

    def wait(self):
        self.ended = True

    def stop(self):
        self.stopped = True


@pytest.fixture
def engine(monkeypatch):
    FakeSearch.started = []
    monkeypatch.setattr(planning, "_Search", FakeSearch)
    engine = SimpleNamespace(open_tasks=[], answers=[])

    def search_ended(task, plan):
        engine.answers.append((task, plan))
        engine.open_tasks = [other for other in engine.open_tasks if other is not task]

    engine.search_ended = search_ended
    return engine


def test_a_task_is_let_alone_for_a_step_and_then_searched_once(engine):
    aside = PlanningAside(engine)
    aside.step_begins()
    engine.open_tasks = ["first"]
    aside.step_begins()
    assert not FakeSearch.started
    for _ in range(3):
        aside.step_begins()
    (search,) = FakeSearch.started
    assert (search.task, engine.answers) == ("first", []), "steps go on without an answer"
    search.ended = True
    aside.step_begins()
    assert engine.answers == [("first", "a plan")] and search.stopped
    for _ in range(3):
        aside.step_begins()
    assert len(FakeSearch.started) == 1


def test_a_search_for_what_is_not_asked_any_more_is_stopped(engine):
    aside = PlanningAside(engine)
    engine.open_tasks = ["first"]
    aside.step_begins()
    aside.step_begins()
    engine.open_tasks = ["second"]
    aside.step_begins()
    assert [(s.task, s.stopped) for s in FakeSearch.started] == [("first", True)]
    aside.step_begins()
    assert [(s.task, s.stopped) for s in FakeSearch.started] == [("first", True), ("second", False)]
    assert engine.answers == []


def test_a_search_goes_on_while_others_are_asked_for_and_the_last_one_is_next(engine):
    """Where sizes change, each step that is recorded asks for another."""
    aside = PlanningAside(engine)
    for number in range(4):
        engine.open_tasks = [f"task {number}", *engine.open_tasks]
        aside.step_begins()
    (search,) = FakeSearch.started
    assert (search.task, search.stopped) == ("task 0", False)
    search.ended = True
    aside.step_begins()
    assert engine.answers == [("task 0", "a plan")] and FakeSearch.started[-1].task == "task 3"


def test_closing_stops_a_search_and_starts_none(engine):
    aside = PlanningAside(engine)
    engine.open_tasks = ["first"]
    aside.step_begins()
    aside.step_begins()
    aside.close()
    aside.close()
    assert FakeSearch.started[0].stopped
    FakeSearch.started[0].ended = True
    for _ in range(3):
        aside.step_begins()
    assert len(FakeSearch.started) == 1 and engine.answers == []


def test_who_compares_times_may_wait_for_a_search(engine):
    aside = PlanningAside(engine)
    aside.wait()
    engine.open_tasks = ["first"]
    aside.step_begins()
    aside.step_begins()
    aside.wait()
    assert engine.answers == [], "a plan is taken between two steps only"
    aside.step_begins()
    assert engine.answers == [("first", "a plan")]


# -- the process ------------------------------------------------------------------------------------------------------
def wait_for(search, patience_s=60.0):
    until = time.monotonic() + patience_s
    while not search.ended:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_process_finds_what_the_planner_finds():
    graph = next(graph for graph in map(random_step, range(40)) if graph.unevicted_bytes)
    task = a_task(graph, graph.unevicted_bytes * 60 // 100)
    search = planning._Search(task)
    wait_for(search)
    assert search.plan() == BESIDE["profile"](task)
    search.stop()


def test_a_path_among_the_places_of_modules_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # by Python as well
    graph = next(graph for graph in map(random_step, range(40)) if graph.unevicted_bytes)
    search = planning._Search(a_task(graph, graph.unevicted_bytes * 60 // 100))
    wait_for(search)
    assert search.plan() is not None
    search.stop()


def test_a_process_that_fails_has_found_nothing():
    search = planning._Search("no task")
    wait_for(search)
    assert search.plan() is None
    search.stop()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux")
def test_the_process_takes_only_time_that_nobody_wants():
    """Seen from outside, while it waits for its task."""
    start = f"import sys; sys.path[:] = {sys.path!r}; from delta.aside import main; main()"
    with subprocess.Popen([sys.executable, "-I", "-c", start], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as it:
        until = time.monotonic() + 60
        while os.sched_getscheduler(it.pid) != os.SCHED_IDLE:
            assert it.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        it.kill()


def test_it_gives_way_before_it_imports_the_planners():
    """Which takes half a second."""
    script = f"""
import sys
sys.path[:] = {sys.path!r}
from delta import aside
def tell():
    print(sorted(name for name in sys.modules if name.startswith(("delta.planner", "pydantic"))), file=sys.stderr)
    sys.exit()
aside._yield_to_the_training = tell
aside.main()
"""
    told = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert told.stderr == "[]\n"


def test_a_process_under_way_is_ended_at_once():
    search = planning._Search(a_task(chain(), 520))
    began = time.monotonic()
    search.stop()
    assert search.ended and time.monotonic() - began < 5


@pytest.mark.parametrize("interpreter", ["/nowhere/python", "", None])
def test_without_a_process_nothing_is_searched(interpreter, monkeypatch):
    monkeypatch.setattr(sys, "executable", interpreter)
    answers = []
    task = a_task(chain(), 520)
    aside = PlanningAside(SimpleNamespace(open_tasks=[task], search_ended=lambda *answer: answers.append(answer)))
    aside.step_begins()
    aside.step_begins()
    assert answers == [(task, None)]


# -- in training ------------------------------------------------------------------------------------------------------
STEPS = 8


def test_a_plan_that_arrives_late_changes_no_bit(monkeypatch):
    """It is another one than the first: more is recomputed."""

    class Late(FakeSearch):
        def __init__(self, task):
            super().__init__(task)
            self.ended, self.found = True, PLANNERS["profile"](replace(task, limit_bytes=task.limit_bytes * 9 // 10))
            assert self.found.actions != PLANNERS["profile"](task).actions

    FakeSearch.started = []
    monkeypatch.setattr(planning, "_Search", Late)
    policy = delta.load_policy("delta", {"filter.min_bytes": 0, "director.actions": ["keep", "recompute"]})
    with delta.evict(activations="50%", policy=policy) as run:
        evicted = train(CASES["gpt"], STEPS)
        (search,) = FakeSearch.started
        plans = [profile.plan for profile in run._core.engine.learner.profiles]
    assert any(search.found is plan for plan in plans) and search.stopped
    assert train(CASES["gpt"], STEPS).differences(evicted) == []


def test_a_block_that_ends_meanwhile_leaves_no_process(monkeypatch):
    started = []

    class Watched(planning._Search):
        def __init__(self, task):
            super().__init__(task)
            started.append(self)

        @property
        def ended(self):
            return self._process.returncode is not None  # it is never found to have ended by itself

    monkeypatch.setattr(planning, "_Search", Watched)
    policy = delta.load_policy("delta", {"filter.min_bytes": 0})
    with delta.evict(activations="50%", policy=policy):
        train(CASES["gpt"], STEPS)
        assert started and started[-1]._process.returncode is None
    assert all(search._process.returncode is not None for search in started)


@pytest.mark.parametrize("content", [b"", b"\x80\x05\x95", b"no pickle"])
def test_what_cannot_be_read_is_no_plan(content):
    """Where the program ignores SIGCHLD, one that was killed seems to have ended well."""
    search = planning._Search(a_task(chain(), 520))
    search.wait()
    assert search._process.returncode == 0
    search._found.truncate(0)
    search._found.seek(0)
    search._found.write(content)
    assert search.plan() is None
    search.stop()


# -- in the simulator -------------------------------------------------------------------------------------------------
def test_the_simulator_searches_in_no_time_and_repeats(tmp_path, monkeypatch):
    policy = delta.load_policy("delta", {"filter.min_bytes": 0})
    with delta.evict(activations="100%", trace=Recording(tmp_path / "gpt.jsonl")) as run:
        train(CASES["gpt"], 1)
    trace = replace(read(run.traces[0]), bookkeeping=FREE)  # plans leave Delta's own work out
    with_search = simulate(trace, policy, Share(0.4))
    assert simulate(trace, policy, Share(0.4)) == with_search
    asked = []
    monkeypatch.setitem(BESIDE, "profile", lambda task: asked.append(task) or PLANNERS["profile"](task))
    without = simulate(trace, policy, Share(0.4))
    assert asked
    assert with_search.total_ns <= without.total_ns
