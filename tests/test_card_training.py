"""Whole trainings on the CUDA device's own logic, over a simulated card that does everything at once: streams, events,
pinned slabs and the card's clock beside hooks, recorder, plans and replays. And on a real one."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from covering import in_pairs
from models import CASES, train
from simulated_card import Event, SimulatedCard, SimulatedEvent, SimulatedStream, Stream
from torch import Tensor, nn

import delta
from delta.learner import Learner
from delta.planner import PLANNERS, Plan, Task
from delta.planner.assemble import plan_of
from delta.planner.steplog import StepGraph
from delta.runtime import session
from delta.runtime.device.cuda import CudaDevice
from delta.runtime.host import SLAB_BYTES
from delta.runtime.monitor import maps_memory
from delta.types import Action

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
]
STEPS = 4
_SEGMENT_BYTES = 20 * 2**20  # what the allocator reserves for a tensor of some megabytes


class PromptEvent(SimulatedEvent):
    def record(self, stream: Stream) -> None:
        super().record(stream)
        self.card.settle()


class PromptCard(SimulatedCard):
    """What is put into a stream has been done when the call returns, as what the program does on this host has. Memory
    that nobody holds any more is overwritten."""

    def new_event(self) -> PromptEvent:
        return PromptEvent(self)

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        super().copy(to, source, stream)
        self.settle()


@pytest.fixture
def card(monkeypatch) -> PromptCard:
    """Whatever device a session asks for, it gets this card's."""
    card = PromptCard()
    monkeypatch.setattr(session, "make_device", lambda name, host: CudaDevice(card, host))
    return card


@in_pairs(
    case=["gpt", "cnn"],
    policy=["swap", "recompute", "delta", "dtr", "mimose", "capuchin"],
    share=["0%", "40%", "100%"],
)
def test_a_training_on_a_card_gives_the_same_bits(card, case, policy, share):
    plain = train(CASES[case], STEPS)
    with delta.evict(
        activations=share, policy=delta.load_policy(policy, {"filter.min_bytes": 0}), device="cuda"
    ) as run:
        evicted = train(CASES[case], STEPS)
    assert plain.differences(evicted) == []
    report = run.report()
    assert (report.swapped_out_bytes + report.recomputed_bytes > 0) == (share != "100%")
    assert run._core is not None
    assert (run._core.engine.ledger.handles, run._core.device.host_bytes()) == (0, 0)
    assert card.slabs == 0
    replayed = [op for profile in run._core.engine.learner.profiles for op in profile.graph.ops]
    assert all(op.cost_ns >= run._core.device.replay_ns > 0 for op in replayed)


@pytest.mark.parametrize(
    ("limit", "expands"), [({}, False), ({"activations": "40%"}, True), ({"budget": "1GiB"}, True)], ids=str
)
def test_segments_are_expandable_while_there_is_a_limit(card, limit, expands):
    with delta.evict(**limit, device="cuda"):
        assert card.expands == expands
    assert not card.expands


def test_pinned_memory_that_only_early_steps_needed_is_given_back(card):
    """As when a first plan swaps many times as much as those that follow."""
    pinned: list[int] = []
    with delta.evict(
        activations="40%", policy=delta.load_policy("swap", {"filter.min_bytes": 0}), device="cuda"
    ) as run:
        assert run._core is not None
        pool, trim = run._core.device._pool, run._core.device.trim_host
        run._core.device.trim_host = lambda: (trim(), pinned.append(card.slabs))
        early = [pool.take(SLAB_BYTES) for _ in range(3)]
        for piece in early:
            pool.give_back(piece)
        train(CASES["gpt"], 8)
    assert pinned == [3, 1]
    assert run.report().swapped_out_bytes


@pytest.mark.parametrize("share", ["40%", "100%"])
def test_memory_that_only_early_steps_needed_is_given_back(card, share):
    """Once the steps go as planned, and where nothing is evicted, it is not: to map it again takes time."""
    card.use = (100, 100, 400, 106)
    given_back: list[int] = []
    with delta.evict(activations=share, policy=delta.load_policy("swap", {"filter.min_bytes": 0}), device="cuda"):
        for _ in range(10):
            given_back.append(-card.emptied)
            train(CASES["gpt"], 1)
            given_back[-1] += card.emptied
    assert given_back == ([0, 1, 1, 1, *[0] * 6] if share != "100%" else [0] * 10)


class LateEvent(SimulatedEvent):
    def record(self, stream: Stream) -> None:
        super().record(stream)
        self.card.compute_all()


class LateStream(SimulatedStream):
    def wait_event(self, event: Event) -> None:
        super().wait_event(event)
        self.card.compute_all()


class LateCard(SimulatedCard):
    """Compute is done at once. Copies have never ended by themselves, until compute waits for them."""

    def new_stream(self) -> LateStream:
        self.streams.append(LateStream(self, f"stream{len(self.streams)}"))
        return self.streams[-1]

    def new_event(self) -> LateEvent:
        return LateEvent(self)

    def compute_all(self) -> None:
        self.run_until(lambda: not self.streams[0].work)

    def let_some_run(self) -> None:
        """They are late."""


@pytest.mark.parametrize("share", ["30%", "50%", "70%"])
@pytest.mark.parametrize("case", ["gpt", "encoder"])
def test_late_copies_out_cost_neither_the_limit_nor_a_routine(monkeypatch, case, share):
    """A third of what is saved is kept, swapped and dropped each, as far as that fits and can be."""
    card, ways = LateCard(), (Action.SWAP, Action.RECOMPUTE, Action.KEEP)
    monkeypatch.setattr(session, "make_device", lambda name, host: CudaDevice(card, host))
    plain = train(CASES[case], 2 * STEPS)

    def mixed(task: Task) -> Plan:
        actions = []
        for order, node in enumerate(task.graph.nodes[node] for node in task.graph.saved):
            way = ways[order % 3] if node.evictable else Action.KEEP
            replayable = node.op is not None and task.graph.ops[node.op].replayable
            actions.append(Action.SWAP if way is Action.RECOMPUTE and not replayable else way)
        kept = [order for order, action in enumerate(actions) if action is Action.KEEP]
        while (plan := plan_of(task.graph, task.link, actions)).peak_bytes > task.limit_bytes and kept:
            if task.graph.nodes[task.graph.saved[order := kept.pop()]].evictable:
                actions[order] = Action.SWAP
        return plan

    monkeypatch.setitem(PLANNERS, "profile", mixed)
    cramped: list[Learner] = []
    monkeypatch.setattr(Learner, "cramped", lambda learner: cramped.append(learner))
    policy = delta.load_policy("delta", {"filter.min_bytes": 0, "planner.kind": "profile"})
    with delta.evict(activations=share, policy=policy, device="cuda") as run:
        assert run._core is not None
        run._core.planning.close()  # nobody looks for a better plan
        engine, peaks = run._core.engine, list[tuple[int, int]]()
        finish = engine._finish_step
        monkeypatch.setattr(
            engine, "_finish_step", lambda *args: peaks.append((args[1], engine.limit_bytes or 0)) or finish(*args)
        )
        evicted = train(CASES[case], 2 * STEPS)
        assert engine.routine is not None
    assert plain.differences(evicted) == []
    assert not cramped
    assert all(peak_bytes <= limit_bytes for peak_bytes, limit_bytes in peaks[1:])


@pytest.fixture
def real_card() -> Iterator[None]:
    """Plain PyTorch gives the same bits twice, cuDNN included."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.cuda
@pytest.mark.usefixtures("real_card")
@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.parametrize("share", ["0%", "40%"])
@pytest.mark.parametrize("policy", delta.policies())
@pytest.mark.parametrize("case", CASES)
def test_a_training_on_a_real_card_gives_the_same_bits(case: str, policy: str, share: str) -> None:
    plain = train(CASES[case], STEPS, "cuda")
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    with delta.evict(activations=share, policy=chosen, device="cuda") as run:
        evicted = train(CASES[case], STEPS, "cuda")
    assert plain.differences(evicted) == []
    assert (sum(run.report().evictions.values()) > 0) == (policy != "keep")
    assert run._core is not None
    assert (run._core.engine.ledger.handles, run._core.device.host_bytes()) == (0, 0)


class Peak(NamedTuple):
    """What the allocator gave out and had reserved at most in a step."""

    allocated_bytes: int
    reserved_bytes: int


def wide(peaks: list[Peak]) -> list[Tensor]:
    """A training of tensors that have segments of their own; notes the peak of each step."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256)) for _ in range(6)]
    model = nn.Sequential(*parts).cuda()
    optimiser = torch.optim.AdamW(model.parameters())
    found = []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        loss = model(torch.randn(3072, 256, device="cuda")).square().mean()
        loss.backward()
        found += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
        optimiser.step()
        optimiser.zero_grad()
        peaks.append(Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    return found


@pytest.mark.cuda
@pytest.mark.usefixtures("real_card")
@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.parametrize("part", [0.9, 0.6])
@pytest.mark.parametrize("policy", ["delta", "swap", "recompute"])
def test_a_budget_of_a_real_card_is_kept_to_and_ends_no_training(policy: str, part: float) -> None:
    plain_peaks: list[Peak] = []
    plain = wide(plain_peaks)
    torch.cuda.empty_cache()
    budget_bytes, peaks = int(max(peak.allocated_bytes for peak in plain_peaks) * part), list[Peak]()
    with delta.evict(budget=budget_bytes, policy=policy, device="cuda"):
        evicted = wide(peaks)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(plain, evicted, strict=True))
    known = peaks[1:]  # the first step is not known before
    assert max(peak.allocated_bytes for peak in known) <= budget_bytes
    if maps_memory(torch.cuda.current_device()):
        # The allocator has a pool for large requests and one for small ones, and grows either by a segment.
        assert max(peak.reserved_bytes for peak in known) <= 1.05 * budget_bytes + 2 * _SEGMENT_BYTES
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def learned(device: str, policy: str) -> StepGraph:
    """What is known of a step of a small net when it is planned for the first time."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(5)]
    model, graphs = nn.Sequential(*parts).to(device), list[StepGraph]()
    model(torch.randn(128, 64, device=device)).square().mean().backward()  # kernels are loaded when first needed
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    with delta.evict(activations="300KiB", policy=chosen, device=device) as run:
        assert run._core is not None
        learner = run._core.engine.learner
        plans = learner.revising.make_plan
        assert plans is not None
        learner.revising.make_plan = lambda graph, *rest: graphs.append(graph) or plans(graph, *rest)  # type: ignore[func-returns-value]
        model(torch.randn(128, 64, device=device)).square().mean().backward()
    return graphs[0]


@pytest.mark.cuda
@pytest.mark.parametrize("policy", ["delta", "swap", "recompute"])
def test_a_step_is_known_on_a_real_card_as_on_a_cpu(policy: str) -> None:
    """What is saved, how long the program uses it itself, when it is needed and let go of. The ops that run from the
    first save to the last one are a part of that time."""
    card, cpu = learned("cuda", policy), learned("cpu", policy)
    for part in ("saved", "floats_to", "needs", "first_need", "release", "needs_before"):
        assert getattr(card, part) == getattr(cpu, part), part
    assert [node.nbytes for node in card.nodes] == [node.nbytes for node in cpu.nodes]
    assert [op.name for op in card.ops] == [op.name for op in cpu.ops]
    between = card.ops[1:-2]  # a layer norm, which saves first; the loss is made after all
    between_ns = [op.cost_ns - CudaDevice.replay_ns for op in between]
    assert 0 < sum(between_ns) <= card.save_ns[-1] + 1000 * len(between_ns), "events tell half microseconds"
    assert card.save_ns[-1] < card.need_ns[0] < card.end_ns


class Lengths(NamedTuple):
    """A training of rows of another number in each step."""

    gradients: list[Tensor]
    followed: list[bool]  # of each step: whether forward ended as its routine has it


def of_changing_length(device: str, run: delta.evict | None = None) -> Lengths:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    model = nn.Sequential(*(nn.Sequential(part, nn.Linear(256, 64)) for part in parts)).to(device)
    found = Lengths([], [])
    for rows in (40, 100, 70, 55, 90, 63, 48, 81, 72, 59):
        loss = model(torch.randn(rows, 64, device=device)).square().mean()
        learner = run._core.engine.learner if run is not None and run._core is not None else None
        found.followed.append(learner is not None and learner.routine is not None)
        loss.backward()
        found.gradients.extend(p.grad.cpu() for p in model.parameters() if p.grad is not None)
        model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.parametrize("where", ["simulated", pytest.param("real", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("policy", ["delta", "recompute", "swap", "mimose"])
def test_steps_of_changing_length_follow_routines_and_give_the_same_bits(
    policy: str, where: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("card" if where == "simulated" else "real_card")
    device = "cpu" if where == "simulated" else "cuda"
    plain = of_changing_length(device)
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    with delta.evict(activations="60%", policy=chosen, device="cuda") as run:
        evicted = of_changing_length(device, run)
    assert all(map(torch.equal, plain.gradients, evicted.gradients))
    assert evicted.followed == [False] * 3 + [True] * 7
    assert sum(run.report().evictions.values()) > 0
    assert run._core is not None
    assert (run._core.engine.ledger.handles, run._core.device.host_bytes()) == (0, 0)
