"""Training loops drawn at random, as users write them: blocks of all kinds, batches of one size or of many, and what
else happens between two steps and within them (`TURNS`). Every choice comes from the seed, so a loop can be run again.

What PyTorch itself refuses is a part of the loop: the error counts like a result.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS, STEPS = 16, 50, 14
Enter = Callable[[nn.Module], AbstractContextManager[object]]


# -- blocks: (batch, length, WIDTH) to the same -----------------------------------------------------------------------
class Attention(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fused = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        heads = [each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.into(self.norm(x)).chunk(3, -1)]
        if self.fused:
            found = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        else:
            weights = (heads[0] @ heads[1].transpose(-1, -2)).div_(2)
            hidden = torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1)
            found = F.dropout(weights.masked_fill(hidden, -1e9).softmax(-1), 0.1, self.training) @ heads[2]
        return x + self.out(found.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        kinds = [nn.ReLU(inplace=True), nn.GELU(), nn.SiLU(inplace=True), nn.LeakyReLU(0.1, inplace=True), nn.PReLU()]
        self.act, self.drop = draw.choice(kinds), nn.Dropout(draw.choice([0, 0.2]), inplace=draw.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.last(self.act(self.first(x))))


class Convolution(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=draw.choice([1, 4]))
        self.norm = draw.choice([nn.BatchNorm1d(WIDTH), nn.GroupNorm(4, WIDTH), nn.InstanceNorm1d(WIDTH, affine=True)])
        self.inplace = draw.random() < 0.6

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x.transpose(1, 2))), inplace=self.inplace).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.cells = draw.choice([nn.LSTM, nn.GRU])(WIDTH, WIDTH, draw.choice([1, 2]), batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cells(x)[0]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        gate = torch.tanh(a)
        ctx.save_for_backward(gate, b)
        return gate * b

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def, override]
        gate, b = ctx.saved_tensors
        return grad * b * (1 - gate * gate), grad * gate


class _Clamp(torch.autograd.Function):
    """Writes into what it is given."""

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        a.mul_(2).clamp_(min=-1)
        ctx.mark_dirty(a)
        ctx.save_for_backward(a)
        return a

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        (a,) = ctx.saved_tensors
        return grad * 2 * (a > -1)


class Odd(nn.Module):
    """One of `ODD`: what its parts are for."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mean", torch.ones(WIDTH))
        self.kind, self.draw = draw.choice(list(ODD)), random.Random(draw.random())

    def forward(self, x: Tensor) -> Tensor:
        return ODD[self.kind](self, x)


def _shifted(block: Odd, x: Tensor) -> Tensor:
    y = block.linear(x)
    y[:, 1:] += x[:, :-1]
    return y


def _running_mean(block: Odd, x: Tensor) -> Tensor:
    if block.training:
        block.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    return x * block.mean.abs().sqrt() + block.linear(x)


def _half_precision(block: Odd, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block.linear(x) @ block.linear.weight
    return x + y.float().tanh()


def _experts(block: Odd, x: Tensor) -> Tensor:
    """As many rows for each as the data has it."""
    rows = x.flatten(0, 1)
    which, out = rows.argmax(-1) % 3, torch.zeros_like(rows)
    for number, expert in enumerate(block.experts):
        mine = (which == number).nonzero().flatten()
        out = out.index_add(0, mine, F.gelu(expert(rows[mine])))
    return x + out.view_as(x)


def _without_gradient(block: Odd, x: Tensor) -> Tensor:
    with torch.no_grad():
        mask = (x * 2).sigmoid_()
    return block.linear(x) * mask


def _in_place(block: Odd, x: Tensor) -> Tensor:
    y = block.linear(x)
    y += x
    y *= block.scale
    return y.tanh_()


def _through_a_view(block: Odd, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.copy_(block.linear(x))
    y.transpose(1, 2).relu_()
    return y + x


ODD: dict[str, Callable[[Odd, Tensor], Tensor]] = {
    "shifted": _shifted,
    "running mean": _running_mean,
    "half precision": _half_precision,
    "experts": _experts,
    "without gradient": _without_gradient,
    "in place": _in_place,
    "through a view": _through_a_view,
    "at random depth": lambda b, x: b.linear(x) + x if b.draw.random() < 0.7 or not b.training else x * b.scale,
    "of one's own": lambda b, x: x + _Gate.apply(b.linear(x), x.sigmoid()),  # type: ignore[no-untyped-call]
    "of one's own, in place": lambda b, x: x + _Clamp.apply(b.linear(x) + 1),  # type: ignore[no-untyped-call]
    "gated": lambda b, x: x + b.linear(x).mul_(2).sigmoid() * b.experts[0](x),
    "largest": lambda b, x: x.scatter_add(-1, b.linear(x).topk(4, -1).indices, x[..., :4].sigmoid()),
    "spectrum": lambda b, x: x + torch.fft.irfft(torch.fft.rfft(b.linear(x), dim=1) * 0.9, n=x.shape[1], dim=1),
    "pieces": lambda b, x: torch.cat([b.linear(each) * each.sin() for each in x.split(max(1, x.shape[1] // 3), 1)], 1),
    "noise": lambda b, x: x + torch.rand_like(x) * b.linear(x) + torch.bernoulli(x.detach().sigmoid()),
    "product": lambda b, x: x + (b.linear(x).abs() + 1).prod(-1, keepdim=True).log1p() * 0.01,
    "distances": lambda b, x: x + (torch.cdist(b.linear(x)[:, :4], x).softmax(-1) @ x).mean(1, keepdim=True),
}
BLOCKS: list[Callable[[random.Random], nn.Module]] = [Attention, Mlp, Convolution, Recurrent, Odd, Odd, Odd]


class Net(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(draw.choice(BLOCKS)(draw) for _ in range(draw.randint(2, 6)))
        # None: not checkpointed; else whether in the reentrant way. What draws at random would do so again.
        self.checkpoints = [draw.choice([None] * 8 + [False, True]) for _ in self.blocks]
        if draw.random() < 0.3:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block, reentrant in zip(self.blocks, self.checkpoints, strict=True):
            if reentrant is None or isinstance(block, Odd) or not (self.training and torch.is_grad_enabled()):
                h = block(h)
            else:
                h = checkpoint(block, h, use_reentrant=reentrant)
        return h * 1.0  # PyTorch crashes where a hook is put on what some functions give

    def loss(self, x: Tensor) -> Tensor:
        return self.loss_of(self(x), x)

    def loss_of(self, h: Tensor, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(h)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


# -- what happens besides ---------------------------------------------------------------------------------------------
class Stop(Exception):
    """Raised by the program in the middle of things, and caught."""


@dataclass
class Training:
    draw: random.Random
    model: Net
    optimiser: torch.optim.Optimizer
    found: list[Tensor | str] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


@contextmanager
def _stopping(hook: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    except Stop:
        pass
    finally:
        hook.remove()


def _stop(*_: object) -> None:
    raise Stop


def evaluated(on: Training, x: Tensor) -> None:
    on.model.eval()
    with torch.no_grad():
        on.found.append(on.model.loss(x).clone())
    on.model.train()


def unused(on: Training, x: Tensor) -> None:
    on.model.loss(x)


def forward_stopped(on: Training, x: Tensor) -> None:
    with _stopping(on.draw.choice(on.model.blocks).register_forward_pre_hook(_stop)):  # type: ignore[arg-type]
        on.model.loss(x)


def of_the_input(on: Training, x: Tensor) -> None:
    h = on.model.embedding(x)
    (grad,) = torch.autograd.grad(on.model.blocks[0](h).square().mean(), h, retain_graph=on.draw.random() < 0.5)
    on.found.append(grad.clone())


def frozen(on: Training, x: Tensor) -> None:
    parameter = on.draw.choice(on.parameters)
    parameter.requires_grad_(not parameter.requires_grad)
    if not any(each.requires_grad for each in on.parameters):
        on.parameters[0].requires_grad_(True)


def hooked(on: Training, x: Tensor) -> None:
    if on.hooks and on.draw.random() < 0.5:
        on.hooks.pop().remove()
    elif (parameter := on.draw.choice(on.parameters)).requires_grad:
        on.hooks.append(parameter.register_hook(lambda grad: grad * 0.9))


def loaded(on: Training, x: Tensor) -> None:
    on.model.load_state_dict(copy.deepcopy(on.model.state_dict()))


def moved(on: Training, x: Tensor) -> None:
    parameter = on.draw.choice(on.parameters)
    parameter.data = parameter.data.clone()


def averaged(on: Training, x: Tensor) -> None:
    for parameter in on.parameters:
        parameter.data.copy_(parameter.data * 0.99)


def copied(on: Training, x: Tensor) -> None:
    on.found.append(copy.deepcopy(on.model).loss(x).detach().clone())


BETWEEN = [evaluated, unused, forward_stopped, of_the_input, frozen, hooked, loaded, moved, averaged, copied]


def held_on(on: Training, h: Tensor, loss: Tensor) -> Tensor:
    on.held = [*on.held[-1:], h]
    return loss


def clamped(on: Training, h: Tensor, loss: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return loss


def penalised(on: Training, h: Tensor, loss: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, h, create_graph=True)
    return loss + grad.square().sum() * 10


def logged(on: Training, h: Tensor, loss: Tensor) -> Tensor:
    on.found.append(h.detach().norm())
    return loss


def backward_stopped(on: Training, h: Tensor, loss: Tensor) -> Tensor:
    with _stopping(h.register_hook(_stop)):
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return loss


def two_losses(on: Training, h: Tensor, loss: Tensor) -> Tensor:
    h.square().mean().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return loss


def twice(on: Training, h: Tensor, loss: Tensor) -> Tensor:
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return loss


WITHIN = [held_on, clamped, penalised, logged, backward_stopped, two_losses, twice]
TURNS = [turn.__name__ for turn in (*BETWEEN, *WITHIN)]


# -- a loop -----------------------------------------------------------------------------------------------------------
def run(seed: int, enter: Enter | None = None) -> list[Tensor | str]:
    """All losses, gradients, buffers, parameters and the generator's state. `enter`: the block for that model, entered
    once or twice."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(draw)
    make = draw.choice([torch.optim.SGD, torch.optim.AdamW])
    on = Training(draw, model, make(model.parameters(), lr=0.01))
    share, often = draw.choice([0.05, 0.15, 0.3]), draw.choice([0.15, 0.3, 0.6])
    turns = {name for name in TURNS if draw.random() < share}
    if "frozen" in turns or "moved" in turns:
        turns.discard("hooked")  # on parameters like these PyTorch crashes
    lengths = [draw.randint(8, 16)] if draw.random() < 0.6 else list(range(8, 25))
    batch, rows, again = draw.choice([2, 4]), draw.choice([1, 1, 2, 3]), draw.choice([0, 0, STEPS // 2])
    with ExitStack() as block:
        for step in range(STEPS):
            if enter is not None and step in (0, again):
                on.held.clear()
                block.close()
                block.enter_context(enter(model))
            x = torch.randint(0, TOKENS, (batch, draw.choice(lengths)))
            _step(on, x, {name for name in TURNS if name in turns and draw.random() < often})
            if (step + 1) % rows == 0:
                on.optimiser.step()
                on.optimiser.zero_grad(set_to_none=draw.random() < 0.7)
        on.held.clear()
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]  # autograd lets go of what a failed one left
    return [*on.found, *_copies(model.buffers()), *_copies(model.parameters()), torch.get_rng_state()]


def _step(on: Training, x: Tensor, turns: set[str]) -> None:
    try:
        for between in BETWEEN:
            if between.__name__ in turns:
                between(on, x)
        h = on.model(x)
        loss = on.model.loss_of(h, x)
        for within in WITHIN:
            if within.__name__ in turns:
                loss = within(on, h, loss)
        loss.backward()  # type: ignore[no-untyped-call]
        on.found.append(loss.detach().clone())
    except RuntimeError as error:
        on.found.append(str(error)[:40])
    on.found += _copies(p.grad for p in on.parameters if p.grad is not None)


def _copies(tensors: Iterator[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]
