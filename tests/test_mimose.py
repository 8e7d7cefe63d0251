"""Policy `mimose` on real tensors: lengths and batches that change from step to step, bit for bit as plain PyTorch."""

import random

import pytest
import torch
from torch import Tensor, nn

import delta
from delta.engine import Engine
from delta.families import FamilyLearner
from delta.learner import WATCHFUL
from delta.runtime.demo_model import Gpt, GptConfig, next_byte_loss
from delta.types import Mode

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT_BYTES = 5 * 2**18
OBSERVED = 3


@pytest.fixture
def steps(monkeypatch):
    """Every finished step: mode, peak, and what its peak would have been."""
    seen = []
    finish = Engine._finish_step
    monkeypatch.setattr(Engine, "_finish_step", lambda *args: seen.append(finish(*args)) or seen[-1])
    return seen


def shapes(count: int, batches: tuple[int, ...]) -> list[tuple[int, int]]:
    draw = random.Random(7)
    return [(draw.choice(batches), draw.randint(16, 64)) for _ in range(count)]


def train(sizes: list[tuple[int, int]]) -> list[Tensor]:
    """Losses and gradients of all steps."""
    torch.manual_seed(0)
    model = Gpt(GptConfig(layers=3, width=64, heads=4, seq=64))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    found = []

    def one(batch: int, length: int) -> None:
        loss = next_byte_loss(model, torch.randint(0, 256, (batch, length + 1), generator=generator))
        loss.backward()
        with torch.no_grad():
            found.extend([loss.detach().clone(), *(p.grad.clone() for p in model.parameters())])
        optimiser.step()
        optimiser.zero_grad()

    for batch, length in sizes:
        one(batch, length)
    return found


def under(policy, sizes, **limit):
    with delta.evict(policy=policy, **limit) as run:
        found = train(sizes)
    return found, run.report()


def mimose(**overrides):
    return delta.load_policy("mimose", {"filter.min_bytes": 0} | overrides)


@pytest.mark.parametrize("batches", [(4,), (2, 3, 4, 5)])
def test_changing_sizes_are_exact_within_the_limit_and_planned(batches, steps):
    sizes = shapes(24, batches)
    found, report = under(mimose(), sizes, activations=LIMIT_BYTES)
    assert all(map(torch.equal, found, train(sizes)))
    assert report.warnings == ()
    assert max(step.peak_bytes for step in steps) <= LIMIT_BYTES
    assert report.unevicted_peak_activation_bytes > 1.3 * LIMIT_BYTES
    modes = [step.mode for step in steps]
    assert Mode.OBSERVE not in modes[OBSERVED:]
    assert modes.count(Mode.PLANNED) > 10
    assert report.evictions["recompute"] > 0


def test_every_plan_is_timed():
    sizes = [(4, 20), (4, 50), (4, 41), (4, 63), (4, 63), (4, 62)]
    _, report = under(mimose(), sizes, activations=LIMIT_BYTES)
    assert report.plans == {"made": 2, "found": 1}
    assert report.longest_plan_ns["found"] > 0
    assert "plans" in str(report)


def test_a_share_is_one_of_each_step_s_own_peak(steps):
    sizes = shapes(16, (4,))
    found, _ = under(mimose(), sizes, activations="60%")
    assert all(map(torch.equal, found, train(sizes)))
    assert [step.mode for step in steps[OBSERVED:]] == [Mode.PLANNED] * 13
    for step in steps[OBSERVED:]:
        assert step.peak_bytes <= 0.6 * step.unevicted_peak_bytes


def test_a_program_that_takes_another_turn_stays_exact(steps):
    """A batch of one needs one copy less in this model: other ops, and one storage less, than the plan is for."""
    limit_bytes = 5 * 2**17
    sizes = [*shapes(6, (4,)), (1, 60), (1, 63), (4, 40), (1, 50), *shapes(3, (4,))]
    found, _ = under(mimose(), sizes, activations=limit_bytes)
    assert all(map(torch.equal, found, train(sizes)))
    assert max(step.peak_bytes for step in steps[OBSERVED:]) <= limit_bytes
    assert Mode.OBSERVE not in [step.mode for step in steps][OBSERVED:]


def test_other_policies_observe_every_new_size(steps):
    """What the tests above are about."""
    under(delta.load_policy("capuchin", {"filter.min_bytes": 0}), shapes(6, (4,)), activations=LIMIT_BYTES)
    assert [step.mode for step in steps].count(Mode.OBSERVE) > OBSERVED


# -- where it fits ----------------------------------------------------------------------------------------------------
@pytest.fixture
def watched(monkeypatch, steps):
    """The steps that were only watched."""
    found = []
    step = Engine.watched_step
    monkeypatch.setattr(Engine, "watched_step", lambda *args: (found.append(len(steps)), step(*args)))
    return found


class Attends(nn.Module):
    """Attention written out, whose weights grow with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q = layer(x)
            x = x + (q @ q.transpose(1, 2)).softmax(2) @ q
        return x


def attend(sizes: list[tuple[int, int]]) -> list[Tensor]:
    """Gradients of all steps."""
    torch.manual_seed(0)
    net, found = Attends(), []
    for batch, length in sizes:
        net(torch.randn(batch, length, 16)).square().mean().backward()
        found += [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
    return found


@pytest.mark.parametrize("device", ["cpu", "chaos:3"])
@pytest.mark.parametrize("other", [(16, 16), (1, 64)], ids=["told by its first tensor", "told by its bytes"])
def test_while_inputs_keep_their_size_and_fit_steps_are_only_watched(steps, watched, device, other):
    """One that does not fit ends that before it is too late: it is within the limit, though what it saves can only be
    made again."""
    one = (8, 8)
    with delta.evict(policy="keep"):
        attend([one, other])
    fitting_bytes, larger_bytes = (step.peak_bytes for step in steps)
    limit_bytes = (2 * fitting_bytes + larger_bytes) // 3
    steps.clear(), watched.clear()
    sizes = [one] * 6 + [other] + [one] * 5
    with delta.evict(policy=mimose(), activations=limit_bytes, device=device) as run:
        found = attend(sizes)
    assert all(map(torch.equal, found, attend(sizes)))
    assert watched == [3, 4, 5, 10, 11]
    assert max(step.peak_bytes for step in steps) <= limit_bytes < larger_bytes
    assert run.report().evictions["recompute"] > 0 and run.report().warnings == ()


def test_a_size_that_is_new_is_recorded_though_it_fits(watched):
    """Nobody knows that when it begins."""
    with delta.evict(policy=mimose(), activations="1MiB"):
        attend([(8, 8)] * 5 + [(9, 8)] * 4 + [(8, 8)])
    assert watched == [3, 4, 8]


def test_where_they_do_not_fit_all_are_recorded(watched):
    sizes = [(4, 32)] * 6
    found, _ = under(mimose(), sizes, activations="70%")
    assert all(map(torch.equal, found, train(sizes)))
    assert watched == []


# -- routines ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def followed(monkeypatch):
    """Of every step that ended: whether it went by a routine to its end."""
    seen = []
    went = FamilyLearner._went

    def noted(self):
        seen.append(self._following is not None and self.routine is not None)
        went(self)

    monkeypatch.setattr(FamilyLearner, "_went", noted)
    return seen


@pytest.mark.parametrize("device", ["cpu", "chaos:3"])
def test_once_observed_every_step_follows_a_routine_within_its_limit(followed, steps, device):
    sizes = shapes(24, (4,))
    found, report = under(mimose(), sizes, activations=LIMIT_BYTES, device=device)
    assert all(map(torch.equal, found, train(sizes)))
    assert followed == [False] * OBSERVED + [True] * (len(sizes) - OBSERVED)
    assert max(step.peak_bytes for step in steps) <= LIMIT_BYTES
    assert report.evictions["recompute"] > 0


def test_another_turn_ends_the_routine_and_is_recorded_for_a_while(followed):
    """A batch of one needs one copy less in this model."""
    sizes = [*shapes(6, (3, 4)), (1, 60), *shapes(WATCHFUL + 2, (3, 4))]
    found, _ = under(mimose(), sizes, activations=LIMIT_BYTES)
    assert all(map(torch.equal, found, train(sizes)))
    assert followed[OBSERVED:] == [True] * 3 + [False] * (1 + WATCHFUL) + [True] * 2


def test_with_rules_every_step_is_recorded(followed):
    policy = mimose(rules=[{"op": "*gelu*", "action": "recompute"}])
    sizes = shapes(8, (4,))
    found, _ = under(policy, sizes, activations=LIMIT_BYTES)
    assert all(map(torch.equal, found, train(sizes)))
    assert not any(followed)
