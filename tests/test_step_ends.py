"""Steps in which something saved outlives backward: where they end, what is learned, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from covering import in_pairs
from exactly import DEVICES, POLICIES, exact, numbers_of, state_of
from inside import different
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toy import Toy

import delta
from delta.step_ends import StepEnds
from delta.types import Action, SwapIn

pytestmark = pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")


# -- which signal ends a step -----------------------------------------------------------------------------------------
class Loop:
    """`save` returns a name for what is saved; `need` asks for it in backward."""

    def __init__(self) -> None:
        self.ends = StepEnds()
        self.told: list[bool] = []

    def forward(self) -> int:
        if self.ends.needed:
            self.told.append(self.ends.forward())
            if self.told[-1]:
                self.ends.ended()
        return self.ends.stretch

    def backward(self, *stretches: int) -> None:
        for stretch in stretches:
            self.ends.need(stretch)


def test_a_step_that_ends_by_itself_never_asks():
    loop = Loop()
    for _ in range(3):
        loop.backward(loop.forward())
        loop.ends.ended()
    assert loop.told == []


def test_a_stretch_that_stands_for_itself_shows_that_steps_do():
    """At the first new forward it may still be the same step; at the second it is known, and at every later one."""
    loop = Loop()
    for _ in range(5):
        loop.backward(loop.forward())
    assert loop.told == [False, True, True, True]


def test_several_forwards_before_one_backward_are_one_stretch():
    loop = Loop()
    loop.backward(loop.forward(), loop.forward(), loop.forward())
    assert loop.told == []


def test_a_step_with_two_backwards_goes_on_between_them():
    """A generator waits while its discriminator is trained."""
    loop = Loop()
    for _ in range(3):
        first = loop.forward()
        loop.backward(first)
        loop.backward(first, loop.forward())
        loop.ends.ended()
    assert loop.told == [False, False, False]


def test_three_losses_over_one_graph_are_one_step():
    loop = Loop()
    first = loop.forward()
    for _ in range(3):
        loop.backward(first, loop.forward())
    assert loop.told == [False, False]


def test_steps_of_several_stretches_are_found():
    """Two backwards a step, and something is left over."""
    loop = Loop()
    whole = []
    for _ in range(5):
        first = loop.forward()
        whole += [loop.ends.whole] * loop.told[-1:].count(True)
        loop.backward(first)
        loop.backward(first, loop.forward())
    assert loop.told == [False, False, False] + [True, False] * 3
    assert whole == [False, True, True], "two steps at first, then each by itself"


def test_backward_that_asks_for_something_older_puts_an_end_to_it():
    loop = Loop()
    for _ in range(3):
        older = loop.forward()
        loop.backward(older)
    assert loop.told == [False, True]
    loop.backward(older, loop.forward())
    assert loop.told == [False, True, True]
    loop.forward()
    assert loop.told == [False, True, True, False], "it has been wrong, and waits again"


# -- the engine -------------------------------------------------------------------------------------------------------
RECOMPUTE = ("keep", "recompute")


def step(toy: Toy, source: int, at: int, left: int | None = None) -> int:
    """Makes and saves three records of 100 bytes, needs all but the last, which is left over; returns that one. What
    the step before has `left` dies after forward."""
    records = [source + k for k in range(1, 4)]
    toy.forward_again(at)
    toy.source(source, 10)
    for record in records:
        toy.op(record, 100, [record - 1])
        if record - 1 in toy.program and record - 1 != source:
            toy.let_go(record - 1)
        toy.save(record, at + 10 * (record - source))
    toy.let_go(records[-1])
    if left is not None:
        toy.unsave(left)
    for record in reversed(records[:-1]):
        toy.use(record, at + 60)
    return records[-1]


def test_what_is_left_over_does_not_keep_a_step_from_ending():
    toy = Toy(10_000, RECOMPUTE)
    left = None
    steps = []
    for k in range(5):
        left = step(toy, 10 * k, 1000 * k, left)
        steps.append(toy.engine.totals.steps)
    assert steps == [0, 0, 1, 2, 3]
    assert (toy.engine.ledger.handles, toy.engine.ledger.left_over) == (1, 0)
    toy.unsave(left)
    assert toy.engine.totals.steps == 4
    assert toy.engine.ledger.handles == 0


def test_what_is_left_over_counts_and_can_be_had():
    """Limit 250: of the left over 100 bytes a recipe is all that is there, and it goes on being so in the next step."""
    toy = Toy(250, RECOMPUTE)
    kept = []
    for k in range(4):
        kept.append(step(toy, 10 * k, 1000 * k))
    ledger = toy.engine.ledger
    assert all(ledger[record].handles for record in kept)
    toy.replayed.clear()
    for record in reversed(kept):
        toy.use(record, 5000)
    assert ledger.handles == 0 and toy.replayed
    ledger.validate()


def test_what_is_left_over_leaves_no_trace_in_the_step_after():
    toy = Toy(10_000, RECOMPUTE)
    left = [step(toy, 10 * k, 1000 * k) for k in range(3)]
    toy.forward_again(5000)
    for source in (100, 200):
        toy.source(source, 10)
        toy.op(source + 1, 100, [source])
        toy.save(source + 1, 5000 + source)
    log = toy.engine.learner.log
    for record in left:
        toy.use(record, 6000)
    assert (log.needs, log.releases) == ([], [])
    assert toy.engine.ledger.own_handles == 2
    toy.use(201, 6010)
    assert log.needs == [(1, 1010 - 100)] and log.releases == [(1, 1)]


def test_what_is_left_over_on_the_host_comes_back_when_it_is_asked_for():
    """Before anything is saved in the next step. It is in no order by which another one would be brought along."""
    toy = Toy(10_000, ("keep", "swap"))
    left = [step(toy, 10 * k, 1000 * k) for k in range(3)]
    toy.forward_again(5000)
    toy.let_go(*left)
    for record in left:
        toy._do(toy.engine._room.carry_out(toy.engine.ledger[record], Action.SWAP, 5000, wait=True))
    assert not toy.mine & set(left)
    assert [i for i in toy.use(left[0], 6000) if isinstance(i, SwapIn)] == [SwapIn(left[0])]


def test_a_step_is_planned_for_the_room_that_is_left():
    toy = Toy(250, RECOMPUTE)
    for k in range(3):
        step(toy, 10 * k, 1000 * k)
    assert toy.engine.ledger.left_over == 2
    standing = toy.engine.ledger.resident_bytes
    asked = []
    make_plan = toy.engine.learner.revising.make_plan
    toy.engine.learner.revising.make_plan = lambda graph, limit, forced: (
        asked.append(limit) or make_plan(graph, limit, forced)
    )
    before = toy.engine.learner.standing_bytes
    toy.forward_again(4000)
    assert standing and asked == [int((250 - before) * toy.engine.learner.revising.aim)]


# -- real programs ----------------------------------------------------------------------------------------------------
STEPS = 7


def mlp(inputs: int, outputs: int, width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def trained(models: list[nn.Module], make_step: Callable[[int], Tensor]) -> list[Tensor]:
    """`make_step` runs forward and backward; what it returns lives until the next one has been made."""
    optimiser = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05)
    found = []
    for index in range(STEPS):
        kept = make_step(index)
        optimiser.step()
        found += state_of(*models)
        optimiser.zero_grad()
    del kept
    return found


def bert() -> list[Tensor]:
    """The pooler's output is in no loss, and lives until the next forward has made another."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertModel(config)
    tokens = torch.randint(0, 64, (4, 16))

    def make_step(index: int) -> object:
        out = model(tokens)
        out.last_hidden_state.square().mean().backward()
        return out

    return trained([model], make_step)


def a_second_head() -> list[Tensor]:
    body, heads = mlp(8, 16), [mlp(16, 4), mlp(16, 4)]

    def make_step(index: int) -> object:
        y = body(torch.randn(32, 8))
        outs = [head(y) for head in heads]
        outs[0].square().mean().backward()
        return outs

    return trained([body, *heads], make_step)


def two_models_in_turn() -> list[Tensor]:
    models, heads = [mlp(8, 16), mlp(12, 16)], [mlp(16, 3), mlp(16, 5)]

    def make_step(index: int) -> object:
        which = index % 2
        y = models[which](torch.randn(32, 12)[:, : 8 + 4 * which].contiguous())
        heads[which](y).square().mean().backward()
        return y.exp().sin()

    return trained([*models, *heads], make_step)


def accumulation() -> list[Tensor]:
    body, heads = mlp(8, 16), [mlp(16, 4), mlp(16, 4)]

    def make_step(index: int) -> object:
        kept = []
        for _ in range(2):
            y = body(torch.randn(32, 8))
            outs = [head(y) for head in heads]
            outs[0].square().mean().backward()
            kept.append(outs)
        return kept

    return trained([body, *heads], make_step)


def two_forwards_and_then_backward() -> list[Tensor]:
    body, heads = mlp(8, 16), [mlp(16, 4), mlp(16, 4)]

    def make_step(index: int) -> object:
        ys = [body(torch.randn(32, 8)) for _ in range(2)]
        outs = [[head(y) for head in heads] for y in ys]
        (outs[0][0].square().mean() + outs[1][0].square().mean()).backward()
        return outs

    return trained([body, *heads], make_step)


def checkpointed() -> list[Tensor]:
    body, heads = mlp(8, 16), [mlp(16, 4), mlp(16, 4)]

    def make_step(index: int) -> object:
        y = checkpoint(body, torch.randn(32, 8), use_reentrant=False)
        outs = [head(y) for head in heads]
        outs[0].square().mean().backward()
        return outs

    return trained([body, *heads], make_step)


def a_loss_over_what_was_kept() -> list[Tensor]:
    """The second head's outputs of several steps are in one loss at last."""
    body, heads = mlp(8, 16), [mlp(16, 4), mlp(16, 4)]
    found, kept = [], []
    for _ in range(STEPS):
        y = body(torch.randn(32, 8))
        heads[0](y.detach()).square().mean().backward()
        kept.append(heads[1](y))
    torch.stack(kept).square().mean().backward()
    found += state_of(body, *heads)
    return found


def gan() -> list[Tensor]:
    """The generator's activations outlive the discriminator's backward."""
    generator, critic = mlp(8, 12), mlp(12, 1)
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (generator, critic)]
    found = []
    for _ in range(STEPS):
        optimisers[1].zero_grad()
        critic(torch.randn(32, 12)).mean().backward()
        fake = generator(torch.randn(32, 8))
        (-critic(fake.detach()).mean()).backward()
        optimisers[1].step()
        optimisers[0].zero_grad()
        critic(fake).mean().backward()
        optimisers[0].step()
        found += state_of(generator, critic)
    return found


def gradient_penalty() -> list[Tensor]:
    critic, head = mlp(8, 16), mlp(16, 2)

    def make_step(index: int) -> object:
        x = torch.randn(32, 8, requires_grad=True)
        y = critic(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        unused = head(y)
        (y.mean() + (slope.norm(2, dim=1) - 1).square().mean()).backward()
        return unused

    return trained([critic, head], make_step)


LEFT_OVER = (bert, a_second_head, two_models_in_turn, accumulation, two_forwards_and_then_backward, checkpointed)
OTHERS = (a_loss_over_what_was_kept, gan, gradient_penalty)


@in_pairs(program=LEFT_OVER + OTHERS, policy=POLICIES, device=DEVICES, share=("0%", "40%"))
def test_the_numbers_are_those_of_plain_training(program, policy, device, share):
    report = exact(program, policy, device, share)
    assert sum(report.evictions.values()) > 0


@pytest.mark.parametrize("activations", [None, "1GiB"])
@pytest.mark.parametrize("program", LEFT_OVER + OTHERS)
def test_the_numbers_are_those_of_plain_training_where_everything_fits(program, activations):
    plain = numbers_of(program)
    with delta.evict(activations=activations, device="cpu") as run:
        assert different(plain, numbers_of(program)) == []
    assert run.report().modes["idle"] >= 1
    assert (run._core.watch.resident_bytes, run._core.engine.ledger.handles) == (0, 0)


@pytest.mark.parametrize("program", LEFT_OVER)
def test_steps_end_and_are_planned_and_the_budget_is_held(program):
    chosen = delta.load_policy("delta", {"filter.min_bytes": 0})
    with delta.evict(activations="50%", policy=chosen, device="cpu") as run:
        numbers_of(program)
    report = run.report()
    expected = 2 * STEPS if program is accumulation else STEPS
    assert report.steps >= expected - 1, "it took two to see where they end"
    assert report.modes["planned"] >= expected - 5
    assert report.peak_activation_bytes <= 1.01 * report.budget_bytes
    if program is bert:
        assert run._core.engine.learner.routine is not None, "steps are alike from their first op on"


def test_a_gan_s_steps_are_whole():
    chosen = delta.load_policy("delta", {"filter.min_bytes": 0})
    with delta.evict(activations="60%", policy=chosen, device="cpu") as run:
        numbers_of(gan)
    report = run.report()
    assert report.steps == 2 * STEPS, "one of the critic alone, and one of both"
    assert report.modes["planned"] >= 2 * STEPS - 4


def test_what_is_only_watched_ends_its_steps_too():
    """With 4 rows a step fits; then one with 64 does not, and is taken over with what was left over."""
    body, heads = mlp(8, 16), [mlp(16, 4), mlp(16, 4)]

    def make_step(rows: int) -> object:
        y = body(torch.ones(rows, 8))
        outs = [head(y) for head in heads]
        outs[0].square().mean().backward()
        return outs

    with delta.evict(activations="60KiB", device="cpu") as run:
        core = run._core
        for _ in range(8):
            kept = make_step(4)
        assert run.report().modes["idle"] >= 4
        assert core.watch.count and core.watch.resident_bytes < 16_000
        known = len(core.watch._handles)
        for _ in range(8):
            kept = make_step(4)
        assert len(core.watch._handles) == known, "what died is forgotten"
        kept = make_step(64)
        assert core.watch.resident_bytes == 0, "looked after, what was left over too"
        assert core.engine.ledger.handles
        core.engine.ledger.validate()
        del kept
        assert core.engine.ledger.handles == 0
