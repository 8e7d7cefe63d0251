"""Programs in which bytes become others where nobody sees it, or nothing depends on them yet: results are plain's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from covering import in_pairs, in_turns
from test_kept import gradients
from test_noted import KEEP, RECOMPUTE, SWAP, counted, nothing_left, planned
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import delta
from delta.record import Host
from delta.types import Action, OpInfo

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
]
POLICIES = ("swap", "recompute", "delta")
STEPS = 8


def block(policy: str, share: str = "0%", device: str = "cpu") -> delta.evict:
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0})
    return delta.evict(activations=share, policy=chosen, device=device)


def layers(count: int = 6) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(nn.Linear(24, 24) for _ in range(count))


def plain_gradients(net: nn.ModuleList, loss: Callable[[], Tensor]) -> list[Tensor]:
    loss().backward()
    found = gradients(net)
    net.zero_grad()
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def of(name: str, action: Action) -> Callable[[OpInfo | None], Action]:
    """A plan in which what that op makes is treated so, and all else is kept."""
    return lambda op: action if op is not None and op.name == name else KEEP


# -- between steps ----------------------------------------------------------------------------------------------------
@in_pairs(policy=POLICIES, device=["cpu", "chaos:3"], grad=[True, False])
def test_a_state_that_is_carried_over_and_partly_reset(policy: str, device: str, grad: bool) -> None:
    """What is saved of it in one step is written in place before the next, which saves it again."""

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        rnn, head = nn.Linear(64, 64), nn.Linear(64, 8)
        h, found = torch.zeros(256, 64), list[Tensor]()
        for _ in range(STEPS):
            with torch.set_grad_enabled(grad):
                h = h.detach()
                h[::4] = 0
            h = torch.tanh(rnn(h) + torch.randn(256, 64))
            head(h).square().mean().backward()
            found += [parameter.grad.clone() for parameter in rnn.parameters() if parameter.grad is not None]
            rnn.zero_grad()
            head.zero_grad()
        return found

    plain = run()
    with block(policy, device=device):
        assert same(run(), plain)


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_that_are_given_other_data_after_each_step(policy: str) -> None:
    """With gradients on, so that ops are recorded. What is made of such a weight can be made again as ever."""

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.Tanh())])
        found, x = list[Tensor](), torch.randn(128, 64)
        for _ in range(STEPS):
            net(x).square().mean().backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                found.append(parameter.grad)
                parameter.data = parameter.data - 0.1 * parameter.grad
                parameter.grad = None
        return found

    plain = run()
    with block(policy, "40%") as told:
        assert same(run(), plain)
    report = told.report()
    assert report.peak_activation_bytes <= 0.4 * report.unevicted_peak_activation_bytes
    assert report.steps_over == 0


def test_what_the_program_still_has_keeps_no_room_on_the_host() -> None:
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(256, 64)
    with block("swap") as run:
        core = run._core
        assert core is not None
        for _ in range(3):
            batch = x.sin()
            net(batch).square().mean().backward()
            core.hear()
            assert all(rec.host is Host.NONE for rec in core.engine.ledger.records.values())
            while core.swap.busy:
                core.hear()
            assert core.device.host_bytes() == 0
            del batch
        assert run.report().swapped_out_bytes


# -- memory that others fill ------------------------------------------------------------------------------------------
def through_numpy(x: Tensor) -> None:
    x.numpy()[:] = np.random.default_rng(1).standard_normal(tuple(x.shape))


def through_an_address(x: Tensor) -> None:
    import ctypes

    value = np.random.default_rng(1).standard_normal(tuple(x.shape)).astype(np.float32)
    ctypes.memmove(x.data_ptr(), value.ctypes.data, value.nbytes)


@pytest.mark.parametrize("share", ["0%", "50%"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("make", "fill"),
    [(torch.zeros, through_numpy), (torch.empty, through_numpy), (torch.empty, through_an_address)],
)
def test_what_others_fill(policy: str, share: str, make: Callable[..., Tensor], fill: Callable[[Tensor], None]) -> None:
    """The op that has made it does not make it again: a batch, and what each layer is scaled by."""
    net = layers()

    def filled() -> Tensor:
        x = make(16, 24)
        fill(x)
        return x

    def loss() -> Tensor:
        x = filled()
        for layer in net:
            x = (layer(x) * filled()).sin()
        return x.square().mean()

    expected = plain_gradients(net, loss)
    with block(policy, share) as run:
        for _ in range(STEPS):
            loss().backward()
            assert same(gradients(net), expected)
            net.zero_grad()
    assert run.report().evictions


def test_what_a_noted_call_has_made_and_others_fill_before_it_is_saved() -> None:
    net, filled = layers(), list[int]()

    def loss() -> Tensor:
        torch.manual_seed(3)
        x = torch.randn(16, 24)
        for layer in net:
            h = layer(x) + 1.0
            if filled:
                through_numpy(h.detach())
            x = h.cos()
        return x.square().mean()

    filled.append(1)
    expected = plain_gradients(net, loss)
    filled.clear()
    with planned(loss, of("aten.add", RECOMPUTE)):
        net.zero_grad()
        filled.append(1)
        loss().backward()
    assert same(gradients(net), expected)


# -- other data -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["data", "set_"])
def test_what_a_note_reads_is_given_other_data(how: str) -> None:
    net, shift, later, swap = layers(8), torch.ones(24), torch.zeros(24), list[int]()

    def loss() -> Tensor:
        torch.manual_seed(3)
        x = torch.randn(16, 24)
        for layer in net:
            x = (layer(x) + shift).sin().tanh()
        if swap and how == "data":
            shift.data = later
        elif swap:
            shift.set_(later)
        return x.square().mean()

    expected = plain_gradients(net, loss)
    with planned(loss, of("aten.add", RECOMPUTE)) as core:
        net.zero_grad()
        swap.append(1)
        loss().backward()
        nothing_left(core)
    assert same(gradients(net), expected)


def test_what_a_note_has_made_is_given_other_data() -> None:
    """Straight through: the sign goes on, and backward sees tanh."""
    net, kept = layers(), list[Tensor]()

    def loss() -> Tensor:
        torch.manual_seed(3)
        x = torch.randn(16, 24)
        kept.clear()
        for layer in net:
            x = (layer(x) + 1.0).tanh()
            x.data = x.data.sign()
            kept.append(x)
        return x.square().mean()

    expected = plain_gradients(net, loss)
    with planned(loss, of("aten.tanh", RECOMPUTE)):
        net.zero_grad()
        loss().backward()
    assert same(gradients(net), expected)


# -- written while notes read it --------------------------------------------------------------------------------------
def test_a_record_that_a_note_reads_is_written() -> None:
    net, write = layers(), list[int]()

    def loss() -> Tensor:
        torch.manual_seed(3)
        x = torch.randn(16, 24)
        for layer in net:
            h = layer(x)
            aux = h.sin()  # saves h, and is not in the loss
            x = (h + 1.0).cos()
            if write:
                with torch.no_grad():
                    h.zero_()
            del aux
        return x.square().mean()

    write.append(1)
    expected = plain_gradients(net, loss)
    write.clear()

    def act(op: OpInfo | None) -> Action:
        return KEEP if op is None else {"aten.addmm": SWAP, "aten.add": RECOMPUTE}.get(op.name, KEEP)

    with planned(loss, act):
        net.zero_grad()
        write.append(1)
        loss().backward()
    assert same(gradients(net), expected)


def test_what_went_is_saved_again_when_nobody_could_ask_any_more() -> None:
    net, odd = layers(8), list[int]()

    def loss() -> Tensor:
        torch.manual_seed(3)
        x = torch.randn(16, 24)
        for index, layer in enumerate(net):
            h = layer(x) + 1.0
            a: Tensor | None = h.sin()
            if odd and index == 3:
                a = None  # this branch is not wanted today
            b = h.cos()
            x = b + (b if a is None else a)
        return x.square().mean()

    odd.append(1)
    expected = plain_gradients(net, loss)
    odd.clear()

    def act(op: OpInfo | None) -> Action:
        return RECOMPUTE if op is not None and op.name == "aten.add" and len(op.inputs) == 1 else KEEP

    with planned(loss, act) as core:
        net.zero_grad()
        odd.append(1)
        found = loss()
        counted(core)
        found.backward()
        del found
        nothing_left(core)
    assert same(gradients(net), expected)


# -- what formulas of backward write between their saves --------------------------------------------------------------
def same_under(name: str, activations: str, numbers: Callable[[], list[Tensor]]) -> bool:
    """Whether a training has plain PyTorch's numbers under that policy and limit."""
    plain = numbers()
    with delta.evict(activations=activations, policy=delta.load_policy(name, {"filter.min_bytes": 0}), device="cpu"):
        evicted = numbers()
    return all(map(torch.equal, plain, evicted))


@in_turns(name=["delta", "swap", "recompute", "capuchin"], activations=["0%", "50%"])
def test_the_gradient_of_a_gradient_of_an_lstm(name, activations):
    """Its formula writes into chunks of one storage, and saves that after each write."""

    def gradients():
        torch.manual_seed(0)
        lstm = nn.LSTM(8, 8)
        found = []
        for _ in range(7):
            out, _ = lstm(torch.randn(3, 1, 8))
            slopes = torch.autograd.grad(out.square().mean(), list(lstm.parameters()), create_graph=True)
            sum(slope.square().sum() for slope in slopes).backward()
            found += [parameter.grad.clone() for parameter in lstm.parameters()]
            lstm.zero_grad()
        return found

    assert same_under(name, activations, gradients)


@in_pairs(
    name=["delta", "swap", "monet", "recompute"], cell=[nn.GRUCell, nn.LSTMCell], activations=["0%", "50%", "80%"]
)
def test_a_cell_inside_a_checkpoint_that_runs_again_in_backward(name, cell, activations):
    """It writes into chunks of one storage there, beside copies of it that have begun."""

    def gradients():
        torch.manual_seed(0)
        inner, before, found = cell(8, 8), nn.Linear(8, 8), []

        def unrolled(x):
            state = x if cell is nn.GRUCell else (x, x)
            for _ in range(3):
                state = inner(x, state)
            return state if cell is nn.GRUCell else state[0]

        for _ in range(12):
            checkpoint(unrolled, before(torch.randn(6, 8)), use_reentrant=True).square().mean().backward()
            found += [parameter.grad.clone() for parameter in (*inner.parameters(), *before.parameters())]
            inner.zero_grad()
            before.zero_grad()
        return found

    assert same_under(name, activations, gradients)
