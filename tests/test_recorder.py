"""What the recorder writes down of a program's ops, and that nobody notices it."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import a_policy
from models import CASES, train
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import delta
from delta.budget import Budget
from delta.engine import Engine
from delta.routine import Routine, Way
from delta.runtime.core import Core
from delta.runtime.device import make_device
from delta.runtime.persistent import Persistent
from delta.runtime.recorder import Recorder
from delta.timeline import Timeline
from delta.types import AwaitOut, Kind, Link, Preserve
from delta.units import Bytes


@pytest.fixture
def core():
    """A session's mechanism without its hooks: nothing is ever saved, so nothing is evicted."""
    policy = a_policy()
    engine = Engine(policy, Budget(activations=Bytes(10**9)), Link(1e9, 1e9))
    made = Core(engine, make_device("chaos:0", policy.host), Persistent(None), Timeline(None, {}))
    yield made
    made.engine.ledger.validate()
    made.close()


def names(core: Core) -> list[str]:
    return [op.name for op in core.engine.ledger.ops.values()]


def last(core: Core):
    return list(core.engine.ledger.ops.values())[-1]


def record(core: Core, tensor: torch.Tensor):
    """The ledger's record of a tensor's storage, or None."""
    number = core.storages.known(tensor)
    return core.engine.ledger[number] if number is not None else None


# -- what is recorded -------------------------------------------------------------------------------------------------
def test_an_op_is_recorded_with_what_it_reads_and_makes(core):
    x = torch.randn(4, 6)
    with Recorder(core):
        y = x.sin()
        z = y * x
    assert names(core) == ["aten.sin", "aten.mul"]
    sin, mul = core.engine.ledger.ops.values()
    assert sin.inputs == (core.storages.known(x),)
    assert sin.outputs == (core.storages.known(y),)
    assert mul.inputs == (core.storages.known(y), core.storages.known(x))
    assert mul.outputs == (core.storages.known(z),)
    assert sin.replayable
    assert mul.replayable
    assert (record(core, y).nbytes, record(core, y).kind) == (96, Kind.ACTIVATION)


class LateClock:
    """Says only when it is waited for how long the n-th op took: n microseconds."""

    late = True

    def __init__(self) -> None:
        self.ops = 0

    def start(self) -> None:
        self.ops += 1

    def stop(self, mark: None) -> int:
        return 1000 * self.ops

    def hold_back(self, ns: int) -> None:
        """Nothing is ever early."""

    def elapsed_ns(self, token: int) -> None:
        return None

    def wait_ns(self, token: int) -> int:
        return token


def test_times_that_the_device_tells_later_reach_their_ops(core):
    core.op_times.clock = LateClock()
    x = torch.randn(4, 6)
    with Recorder(core):
        _made = x.sin(), x.cos()
    assert [op.cost_ns for op in core.engine.ledger.ops.values()] == [0, 0]
    core.forward_again()
    assert [op.cost_ns for op in core.engine.ledger.ops.values()] == [1000, 2000]


def test_an_op_whose_time_is_known_is_not_timed(core, monkeypatch):
    x, started = torch.randn(4, 6), []
    monkeypatch.setattr(core.op_times.clock, "start", lambda: started.append(1) or time.perf_counter_ns())
    core.engine.learner._costs = iter([(torch.ops.aten.sin.default, 1234)])
    with Recorder(core):
        _made = x.sin()
        assert (last(core).cost_ns, started) == (1234, [])
        _also = x.cos()
        assert last(core).cost_ns < 10**12 and started == [1]


def test_under_a_routine_a_call_is_recorded_or_passes(core):
    """What a recorded one reads gets its record by that, large or small: it is what has had one in other steps."""

    def step():
        passed, read = x.sin(), x.cos()
        return passed, read, read[:1].exp()

    x = torch.randn(4, 6)
    with Recorder(core):
        observed = step()
    calls = [(call, -1) for call, _ in core.engine.learner.log.calls]
    core.engine.learner.routine = Routine(calls, [Way.PASS, Way.PASS, Way.RECORD])
    with Recorder(core):
        passed, read, recorded = step()
    assert record(core, passed) is None
    assert record(core, read).op is None
    assert record(core, read).kind is Kind.ACTIVATION
    assert core.engine.ledger.recoverable(core.storages.known(recorded), grasp=True)
    assert names(core) == ["aten.sin", "aten.cos", "aten.exp", "aten.exp"]
    assert all(record(core, value).op is not None for value in observed)


def followed(core: Core, step: Callable[[], object], ways: Sequence[Way], **known: Any) -> Routine:
    """The routine of that step, which has gone once so."""
    with Recorder(core):
        step()
    calls = [(call, -1) for call, _ in core.engine.learner.log.calls]
    core.engine.learner.routine = routine = Routine(calls, ways, **known)
    with Recorder(core):
        step()
    return routine


def asked_about(monkeypatch) -> list[object]:
    """The calls of which a routine is asked what way they take, from here on."""
    asked, way = [], Routine.way
    monkeypatch.setattr(Routine, "way", lambda routine, call: asked.append(call) or way(routine, call))
    return asked


def test_what_was_let_pass_passes_at_once(core, monkeypatch):
    """Not what writes or draws numbers, nor what needs memory that it may be refused, nor where hooks go on or off."""

    def step():
        image = torch.randn(1, 1, 4, 4)
        return F.conv2d(image, image), image.add_(1), image.sin(), image.cos(), image.tan(), image.exp()

    aten = torch.ops.aten
    turned = []
    monkeypatch.setattr(core.stretches, "turn", lambda off, calls: turned.append(calls))
    ways = [Way.PASS] * 4 + [Way.RECORD] + [Way.PASS] * 2
    routine = followed(core, step, ways, alone=SimpleNamespace(turns={4: True}))
    assert routine.passing == [None] * 5 + [aten.tan.default, aten.exp.default, None]
    routine.restart()
    asked = asked_about(monkeypatch)
    with Recorder(core):
        step()
    assert (routine.calls, len(asked), turned) == (7, 5, [4, 4])
    assert not {aten.tan.default, aten.exp.default}.intersection(asked)


@pytest.mark.parametrize("where", ["no gradients", "backward", "inside", "passing", "another op", "forward"])
def test_elsewhere_it_is_looked_at(core, where, monkeypatch):
    x = torch.randn(4)
    routine = followed(core, x.sin, [Way.PASS])
    routine.restart()
    assert routine.passing[0] is torch.ops.aten.sin.default
    asked = asked_about(monkeypatch)
    core.passes = where == "passing"
    around = {"no gradients": torch.no_grad(), "inside": core}.get(where, nullcontext())

    def run(_: object = None) -> None:
        with Recorder(core), around:
            x.cos() if where == "another op" else x.sin()

    if where == "backward":
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(run)
        torch.autograd.grad(leaf.sum(), leaf, create_graph=True)  # with gradients on
    else:
        run()
    core.passes = False
    assert (routine.calls, len(asked)) == {"forward": (1, 0), "another op": (0, 1)}.get(where, (0, 0))


def test_what_is_made_after_backward_has_asked_ends_a_step_first(core, monkeypatch):
    x, ended = torch.randn(4), []
    routine = followed(core, x.sin, [Way.PASS])
    routine.restart()
    monkeypatch.setattr(core, "forward_again", lambda: ended.append(routine.calls))
    monkeypatch.setattr(core.engine.step_ends, "needed", {1})
    with Recorder(core):
        x.sin()
    assert (ended, routine.calls) == ([0], 1)


@pytest.mark.parametrize("at_once", [True, False])
def test_what_passes_is_run_once_more_out_of_memory(core, at_once, monkeypatch):
    """Its size counts where nobody hears of what is saved."""
    x, failures, lost = torch.randn(4), [torch.OutOfMemoryError("full"), None, None, None], []
    routine = followed(core, lambda: (x.sin(), x.cos()), [Way.PASS] * 2)

    class Tight(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.sin.default and (failure := failures.pop(0)):
                raise failure
            return func(*args, **kwargs or {})

    monkeypatch.setattr(core.stretches, "lost", lambda: lost.append(len(failures)))
    asked = asked_about(monkeypatch)
    for off, nbytes in ((True, 16), (False, 12), (True, 12)):
        core.stretches.off, routine.made_bytes[0] = off, nbytes
        routine.restart()
        if not at_once:
            routine.passing[0] = None
        with Tight(), Recorder(core):
            made = x.sin()
        assert torch.equal(made, torch.sin(x))
    core.stretches.off = False
    assert (len(asked), core.oom_rescues, lost) == (0 if at_once else 3, 1, [0]), "only the last"


def test_what_makes_no_tensor_ends_no_routine(core):
    """Within the step: a number is asked for now and then, a part of it is named for the profiler."""
    x = torch.randn(4, 6)
    number = torch.tensor(3.0)
    with Recorder(core):
        made = [x.sin(), x.cos()]
    calls = [(call, -1) for call, _ in core.engine.learner.log.calls]
    core.engine.learner.routine = routine = Routine(calls, [Way.PASS, Way.RECORD])
    core.engine.learner.begin(recording=True)
    core.engine.learner.packed(0, 0)
    with Recorder(core):
        made.append(x.sin())
        assert number.item() == 3
        with torch.profiler.record_function("a part"):
            made.append(x.cos())
    assert core.engine.routine is routine
    assert names(core) == ["aten.sin", "aten.cos", "aten.cos"]


def test_a_write_under_a_routine_ends_a_version_all_the_same(core):
    def versions() -> tuple[int | None, int | None]:
        y = x.sin()
        before = core.storages.known(y)
        y.add_(1)
        return before, core.storages.known(y)

    x = torch.randn(4, 6)
    with Recorder(core):
        versions()
    calls = [(call, -1) for call, _ in core.engine.learner.log.calls]
    core.engine.learner.routine = Routine(calls, [Way.RECORD, Way.PASS])
    with Recorder(core):
        before, after = versions()
    assert before is not None
    assert after != before


@pytest.mark.parametrize("way", list(Way))
def test_the_program_s_own_op_is_not_delta_s_overhead(core, way, monkeypatch):
    x = torch.randn(4, 6)
    with Recorder(core):
        x.sin()
    calls = [(call, -1) for call, _ in core.engine.learner.log.calls]
    core.engine.learner.routine = Routine(calls, [way])
    run, left_out_ns = core.outside, []

    def slowly(func, args, kwargs):
        time.sleep(0.02)
        return run(func, args, kwargs)

    monkeypatch.setattr(core, "outside", slowly)
    monkeypatch.setattr(core, "own_time", left_out_ns.append)
    with Recorder(core):
        x.sin()
    assert [ns >= 20_000_000 for ns in left_out_ns] == ([True] if way is Way.RECORD else [])


def test_inputs_are_sources_or_parameters(core):
    layer = nn.Linear(6, 3)
    x = torch.randn(4, 6)
    with Recorder(core):
        layer(x)
    assert record(core, x).kind is Kind.SOURCE
    assert record(core, layer.weight).kind is Kind.PARAMETER, "seen as weight.t()"
    assert record(core, layer.bias).kind is Kind.PARAMETER


def test_views_are_no_records(core):
    x = torch.randn(4, 6)
    with Recorder(core):
        x.t()
        x.view(24)
        x[1:]
        x.expand(2, 4, 6)
    assert names(core) == []
    assert record(core, x) is None


def test_an_unmarked_alias_is_found_by_its_storage(core):
    """_unsafe_view says in its schema that it makes something new."""
    x = torch.randn(4, 6)
    with Recorder(core):
        y = x.sin()
        z = torch.ops.aten._unsafe_view.default(y, [24])
        z.cos()
    assert core.storages.known(z) == core.storages.known(y)
    assert names(core) == ["aten.sin", "aten.cos"]


def test_several_results_are_one_op(core):
    x = torch.randn(4, 6)
    with Recorder(core):
        normal, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [6], None, None, 1e-5)
    assert last(core).outputs == (core.storages.known(normal), core.storages.known(mean), core.storages.known(rstd))


def test_factories_read_nothing_and_can_run_again(core):
    with Recorder(core):
        x = torch.ones(3)
    assert (last(core).inputs, last(core).replayable) == ((), True)
    assert core.slots[core.storages.known(x)].recipe is not None


def test_an_op_that_may_not_run_again_keeps_nothing_alive(core):
    x = torch.randn(4, 6)
    with Recorder(core):
        y = x.sin()
        values, _ = y.topk(2)
    assert names(core) == ["aten.sin", "aten.topk"]
    assert (last(core).inputs, last(core).replayable) == ((), False)
    assert core.slots[core.storages.known(values)].recipe is None


def test_a_small_view_of_a_big_storage_is_no_input(core):
    """A recipe would have to hold all of it."""
    big = torch.randn(100)
    with Recorder(core):
        y = big[:10].sin()
        z = big[:60].sin()
    assert not core.engine.ledger.ops[record(core, y).op].replayable
    assert core.engine.ledger.ops[record(core, z).op].replayable


def test_nor_is_a_small_view_of_what_an_earlier_step_has_made(core):
    """As of a data set that the program made inside the block: each batch is a stack of its rows."""
    with Recorder(core):
        big = torch.zeros(100).sin()
        core.run(core.engine._cut())
        y = big[:10].sin()
        z = big[:60].sin()
    assert not core.engine.ledger.ops[record(core, y).op].replayable
    assert core.engine.ledger.ops[record(core, z).op].replayable


def test_subclasses_and_sparse_tensors_are_left_alone(core):
    class Mine(torch.Tensor):
        pass

    x = torch.randn(4).as_subclass(Mine)
    with Recorder(core):
        y = x.sin()
        s = torch.ones(3).to_sparse()
    assert isinstance(y, Mine)
    assert s.is_sparse
    assert not any(op.replayable for op in core.engine.ledger.ops.values() if op.name == "aten.to_sparse")


def test_what_dies_is_forgotten_with_its_op(core):
    x = torch.randn(4)
    with Recorder(core):
        y = x.sin()
        z = y.cos()
        del y, z
        torch.ones(1)
    assert "aten.sin" not in names(core)


def test_an_ancestor_stays_while_its_descendant_lives(core):
    x = torch.randn(4)
    with Recorder(core):
        y = x.sin().cos().tan()
        torch.ones(1)
    assert names(core)[:3] == ["aten.sin", "aten.cos", "aten.tan"]
    assert core.storages.known(y) is not None


# -- when nothing is recorded -----------------------------------------------------------------------------------------
def test_ops_without_gradients_are_not_recorded(core):
    x = torch.randn(4)
    with Recorder(core), torch.no_grad():
        x.sin()
    assert names(core) == []


def test_within_a_step_what_is_made_without_gradients_is_known(core):
    """What is made of it may be replayed."""
    x = torch.randn(4)
    core.engine.learner.begin(recording=True)
    core.engine.learner.packed(0, 0)
    with Recorder(core), torch.no_grad():
        made = x.sin()
    found = record(core, made)
    assert found is not None and found.op is None and names(core) == []


def test_backward_is_not_recorded(core):
    x = torch.randn(4, requires_grad=True)
    with Recorder(core):
        loss = x.sin().sum()
        before = names(core)
        loss.backward()
    assert before == ["aten.sin", "aten.sum"]
    assert "aten.cos" not in names(core)


def test_a_write_is_noticed_even_where_nothing_is_recorded(core):
    """y's recipe reads x; x is then written with gradients off: x is another record now."""
    x = torch.randn(4)
    with Recorder(core):
        y = x.sin()
        before = core.storages.known(x)
        with torch.no_grad():
            x.add_(1)
    assert core.storages.known(x) != before
    assert not core.engine.ledger.recoverable(core.storages.known(y), grasp=True)


# -- writes -----------------------------------------------------------------------------------------------------------
def test_a_write_makes_a_new_version(core):
    x = torch.randn(4)
    with Recorder(core):
        y = x.sin()
        old = core.storages.known(y)
        y.mul_(2)
        new = core.storages.known(y)
    assert new != old
    assert last(core).inputs == (old,)
    assert last(core).outputs == (new,)
    assert last(core).overwrites == (old,)
    assert not core.engine.ledger[old].alive


class Late:
    """A clock that knows how long an op took when it is asked for the second time."""

    late = True

    def start(self):
        return []

    def stop(self, mark):
        return mark

    def elapsed_ns(self, token):
        token.append(1)
        return 5 if len(token) > 1 else None


def test_times_that_nobody_asks_for_are_not_kept_for_ever(core, monkeypatch):
    monkeypatch.setattr("delta.runtime.op_times._MOST_MISSING", 8)
    core.op_times.clock = Late()
    x = torch.randn(4)
    with Recorder(core):
        kept = [x.sin() for _ in range(50)]
    assert len(kept) == 50 and len(core.op_times.missing) <= 9


def test_a_copy_out_that_fails_while_a_write_waits_is_asked_about_again(core, monkeypatch):
    """The engine had seen a copy on its way, and wanted no clone."""
    answers, ran = [[], [Preserve(7)], [AwaitOut(7)]], []
    monkeypatch.setattr(core.storages, "known", lambda tensor: 7)
    monkeypatch.setattr(core.engine, "before_overwrite", lambda record, in_backward: answers.pop())
    monkeypatch.setattr(core, "run", ran.extend)
    assert core.writes.begin([torch.ones(4)]) == {7}
    assert ran == [AwaitOut(7), Preserve(7)]


def test_out_is_a_write(core):
    x = torch.randn(4)
    with Recorder(core):
        out = torch.empty(4)
        old = core.storages.known(out)
        torch.sin(x, out=out)
    assert core.storages.known(out) != old
    assert last(core).name == "aten.sin"
    assert last(core).outputs == (core.storages.known(out),)
    assert last(core).overwrites == (old,)


def test_what_the_caller_made_stays_a_source_when_written(core):
    """No recipe makes it and none reads it: there is no older version anybody could ask for."""
    x, out = torch.randn(4), torch.empty(4)
    with Recorder(core):
        torch.sin(x, out=out)
    assert names(core) == []
    assert record(core, out).kind is Kind.SOURCE


def test_writing_through_a_view_writes_the_storage(core):
    x = torch.randn(4, 6)
    with Recorder(core):
        y = x.sin()
        old = core.storages.known(y)
        y[2].zero_()
    assert core.storages.known(y) != old
    assert last(core).outputs == (core.storages.known(y),)


# -- which writes have to be known ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prepare", "minded"),
    [
        pytest.param(lambda core, x: None, False, id="nobody knows it"),
        pytest.param(lambda core, x: core.storages.create(x, Kind.PARAMETER), False, id="only known"),
        pytest.param(lambda core, x: x.sin(), True, id="read by a recipe that lives"),
        pytest.param(
            lambda core, x: core.engine.saved(core.storages.create(x, Kind.ACTIVATION), 1, 1), True, id="saved"
        ),
    ],
)
def test_a_write_is_minded_where_something_depends_on_what_is_there(core, prepare, minded):
    x = torch.ones(4)
    with Recorder(core):
        kept = prepare(core, x)
    assert core.storages.minds(x) is minded
    del kept


def test_a_write_into_what_was_made_and_nobody_read_is_minded(core):
    with Recorder(core):
        made = torch.ones(4).sin()
    assert core.storages.minds(made)


def test_what_a_recipe_has_read_can_be_read_again_after_a_write(core):
    """The version counter has moved, and that is no write that nobody knows of."""
    x = torch.ones(4)
    with Recorder(core):
        x.cos()
        core.hear()
        assert not record(core, x).users
        with torch.no_grad():
            x.mul_(2)
        made = x.sin()
    assert last(core).inputs == (core.storages.known(x),)
    assert last(core).outputs == (core.storages.known(made),)
    assert last(core).replayable
    assert not core.slots[core.storages.known(x)].written_unseen


def test_nobody_comes_in_for_a_write_that_spoils_nothing(core, monkeypatch):
    """Of batch norm's counters, for one, there are dozens."""
    counter, x = torch.zeros(()), torch.ones(4)
    core.storages.create(counter, Kind.PARAMETER)
    entered = []
    with Recorder(core):
        y = x.sin()  # a recipe that a write could spoil
        core.engine.learner.routine = Routine([(torch.ops.aten.add_.Tensor, -1)], [Way.PASS])
        monkeypatch.setattr(type(core), "__enter__", lambda core: entered.append(core))
        counter.add_(1)
        monkeypatch.undo()
    assert entered == []
    assert float(counter) == 1.0
    del y


@pytest.mark.parametrize("within", [False, True])
def test_a_death_within_an_event_waits_for_its_end(core, within):
    tensor = torch.ones(4)
    record = core.storages.create(tensor, Kind.ACTIVATION)
    with core:
        core.run(core.engine.saved(record, 1, 1))
    with core.lock if within else nullcontext():
        core.inbox.handle_died(record)
        assert core.engine.ledger.handles == within
    core.hear()
    assert core.engine.ledger.handles == 0


def test_batch_norm_statistics_are_written_but_not_read(core):
    norm = nn.BatchNorm1d(6)
    x = torch.randn(4, 6)
    with Recorder(core):
        y = norm(x)
    op = core.engine.ledger.ops[record(core, y).op]
    assert op.name == "aten.native_batch_norm"
    assert op.overwrites == ()
    assert set(op.inputs) == {core.storages.known(x), core.storages.known(norm.weight), core.storages.known(norm.bias)}


def test_batch_norm_in_evaluation_reads_its_statistics(core):
    norm = nn.BatchNorm1d(6).eval()
    with Recorder(core):
        y = norm(torch.randn(4, 6))
    assert core.storages.known(norm.running_mean) in core.engine.ledger.ops[record(core, y).op].inputs


# -- random numbers ---------------------------------------------------------------------------------------------------
def test_the_generator_s_state_is_that_before_the_draw(core):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with Recorder(core):
        noise = torch.empty(4).uniform_()
    recipe = core.slots[core.storages.known(noise)].recipe
    assert recipe.generator is torch.default_generator
    assert torch.equal(recipe.generator_state, state)
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_generator_that_was_given_is_the_one_kept(core):
    generator = torch.Generator().manual_seed(9)
    with Recorder(core):
        noise = torch.bernoulli(torch.full((4,), 0.5), generator=generator)
    recipe = core.slots[core.storages.known(noise)].recipe
    recipe.generator.manual_seed(10)
    assert generator.initial_seed() == 10, "the same one"


# -- convolutions on CUDA ---------------------------------------------------------------------------------------------
@pytest.fixture
def on_cuda(core, monkeypatch):
    """The session as it would be on CUDA; returns what the allocator says to how often it had nothing to give."""
    refusals = [0]
    monkeypatch.setattr(core.device, "kind", "cuda")
    monkeypatch.setattr(core.device, "refusals", lambda: refusals[0])
    monkeypatch.setattr("delta.runtime.cudnn._fell_back", Event())
    return refusals


def convolved(core) -> bool:
    """Whether a convolution that runs now may be replayed."""
    with Recorder(core):
        kept = torch.nn.functional.conv2d(torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3))
    assert kept.numel() and names(core)[-1] == "aten.convolution"
    return last(core).replayable


def test_a_convolution_is_replayed(core, on_cuda):
    assert convolved(core)


def test_a_convolution_whose_algorithm_is_searched_for_is_not_replayed_on_cuda(core, on_cuda, monkeypatch):
    monkeypatch.setattr(torch._C, "_get_cudnn_benchmark", lambda: True)
    assert not convolved(core)
    assert not convolved(core)
    (told,) = core.engine.totals.warnings
    assert told.startswith("torch.backends.cudnn.benchmark is on")


def test_elsewhere_it_is(core, monkeypatch):
    monkeypatch.setattr(torch._C, "_get_cudnn_benchmark", lambda: True)
    assert convolved(core)


def test_a_convolution_that_went_without_memory_it_asked_for_is_not_replayed(core, on_cuda, monkeypatch):
    """It took another algorithm than the first choice, which a replay might have memory for. The next one like it takes
    that, too, and is refused nothing."""
    with monkeypatch.context() as patch:
        runs = core.outside
        patch.setattr(core, "outside", lambda *call: on_cuda.append(on_cuda.pop() + 1) or runs(*call))
        assert not convolved(core)
    assert not convolved(core)


@pytest.mark.parametrize("grad", [True, False])
def test_a_convolution_is_refused_nothing_for_the_budget_s_sake(core, grad, monkeypatch):
    """It would not say so, but take another algorithm, and give other bits."""
    happened = []
    monkeypatch.setattr(core.device, "enforce", happened.append)

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            happened.append(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    with Sees(), Recorder(core), torch.set_grad_enabled(grad):
        torch.nn.functional.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3)).sin()
    assert happened[-3:] == [False, "convolution", "sin"]


# -- out of memory ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("grad", [True, False])
def test_an_op_that_runs_out_of_memory_runs_once_more(core, monkeypatch, grad):
    """The second time nothing is refused for the budget's sake."""
    rescued, enforced = [], []
    monkeypatch.setattr(core.device, "enforce", enforced.append)
    monkeypatch.setattr(core.engine, "rescue", lambda now_ns: rescued.append(now_ns) or [])
    failures = [torch.OutOfMemoryError("full"), None]

    class Tight(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.sin.default and (failure := failures.pop(0)):
                raise failure
            return func(*args, **kwargs or {})

    x = torch.randn(4)
    with Tight(), Recorder(core), torch.set_grad_enabled(grad):
        y = x.sin()
    assert torch.equal(y, torch.sin(x))
    assert len(rescued) == core.oom_rescues == 1
    assert enforced == [False]


@pytest.mark.parametrize("collecting", [True, False])
def test_within_an_op_garbage_is_collected_as_the_program_wants(core, collecting, monkeypatch):
    """And no longer."""

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(gc.isenabled())
            return func(*args, **kwargs or {})

    seen, right_after = [], []
    monkeypatch.setattr(core, "own_time", lambda ns: right_after.append(gc.isenabled()))
    x = torch.randn(4)
    try:
        if not collecting:
            gc.disable()
        with Sees(), Recorder(core):
            x.sin()
        seen.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == [collecting] * 2
    assert right_after == [False]


def test_a_second_failure_is_the_user_s(core):
    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.sin.default:
                raise torch.OutOfMemoryError("full")
            return func(*args, **kwargs or {})

    x = torch.randn(4)
    with Full(), Recorder(core), pytest.raises(torch.OutOfMemoryError, match="full"):
        x.sin()


def test_other_errors_pass_unchanged(core):
    with Recorder(core), pytest.raises(RuntimeError, match="size"):
        torch.ones(3) @ torch.ones(4)
    assert not core.inside()


# -- together with the user's own mode --------------------------------------------------------------------------------
class Counting(TorchDispatchMode):
    """A user's mode: counts the ops it sees."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **kwargs or {})


def depth() -> int:
    return torch._C._len_torch_dispatch_stack()


@pytest.fixture(scope="module")
def plain_counts():
    with Counting() as counting:
        train(CASES["cnn"], 6)
    return counting.counts


# Observed first, then recorded or not as the plan wants: `swap` turns the recorder off after three steps, a budget that
# is kept (100 GB) turns it off after one.
RUNS = {
    "swap": {"policy": ("swap", {"filter.min_bytes": 0}), "activations": "60%"},
    "idle": {"policy": ("delta", {}), "activations": 10**11},
    "recompute": {"policy": ("recompute", {"filter.min_bytes": 0}), "activations": "60%"},
}


@pytest.fixture(params=RUNS)
def session(request):
    chosen = RUNS[request.param]
    policy = delta.load_policy(*chosen["policy"])
    return delta.evict(activations=chosen["activations"], policy=policy, device="chaos:2")


def only_forward(counts: Counter, plain: Counter) -> dict[str, int]:
    """Ops of which fewer were seen than plain training runs."""
    return {op: counts[op] - count for op, count in plain.items() if counts[op] < count}


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_a_mode_inside_the_block_sees_every_op(session, plain_counts):
    with session, Counting() as counting:
        train(CASES["cnn"], 6)
    assert only_forward(counting.counts, plain_counts) == {}
    assert depth() == 0


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_a_mode_around_the_block_sees_every_op(session, plain_counts):
    with Counting() as counting, session:
        train(CASES["cnn"], 6)
        assert depth() in (1, 2)
    assert only_forward(counting.counts, plain_counts) == {}
    assert depth() == 0


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
def test_a_mode_that_comes_and_goes_is_never_taken_off_in_delta_s_place(session):
    model, x = CASES["cnn"].make(), torch.randn(3, 3, 16, 16)
    with session:
        for _ in range(6):
            loss = F.mse_loss(model(x), torch.zeros(3, 5))
            with Counting() as counting:
                below = depth() - 1
                loss.backward()
                F.mse_loss(model(x), torch.zeros(3, 5)).backward()
                assert depth() == below + 1
                assert torch.utils._python_dispatch._get_current_dispatch_mode() is counting
            assert depth() == below
        assert depth() in (0, 1)
    assert depth() == 0


def test_the_recorder_leaves_when_the_block_ends():
    with delta.evict(activations=10**6, device="chaos:0"):
        assert depth() == 1
    assert depth() == 0


def test_an_idle_step_has_no_recorder():
    with delta.evict(activations=10**9, device="chaos:0"):
        train(CASES["gpt"], 2)
        torch.ones(2, requires_grad=True).exp().sum().backward()
        assert depth() == 0


def test_without_a_budget_nothing_is_recorded():
    with delta.evict(device="chaos:0"):
        assert depth() == 0
