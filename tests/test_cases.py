"""Promise P1 on the ways people write training code: every case under every policy, everything evicted."""

from collections.abc import Callable

import pytest
import torch
from covering import in_pairs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import delta

pytestmark = [
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:RNN module weights:UserWarning"),
]


def gradients(module: nn.Module, *more: Tensor) -> list[Tensor]:
    return [p.grad for p in module.parameters()] + list(module.buffers()) + [t.grad for t in more]


def checkpointed(reentrant: bool) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.2))
    x = torch.randn(4, 8, requires_grad=True)
    y = checkpoint(model, x.sin(), use_reentrant=reentrant)
    checkpoint(model, y, use_reentrant=reentrant).pow(2).sum().backward()
    return gradients(model, x)


def autocast_forward_only() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().pow(2).sum() + model(x * 2).float().sum()
    loss.backward()
    return gradients(model)


def autocast_around_backward_too() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(4, 8)).float().pow(2).sum().backward()
    return gradients(model)


def double_backward() -> list[Tensor]:
    x, w = torch.randn(5, requires_grad=True), torch.randn(5, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad((w @ x.tanh()).exp().sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    return [x.grad, w.grad, gradient]


def lstm() -> list[Tensor]:
    model = nn.LSTM(6, 7, 2, dropout=0.3, bidirectional=True)
    x = torch.randn(5, 3, 6, requires_grad=True)
    model(x)[0].pow(2).sum().backward()
    return gradients(model, x)


def gru() -> list[Tensor]:
    model = nn.GRU(6, 7, 2)
    x = torch.randn(5, 3, 6, requires_grad=True)
    model(x)[0].pow(2).sum().backward()
    return gradients(model, x)


def two_backwards_of_one_graph() -> list[Tensor]:
    x = torch.randn(6, requires_grad=True)
    y = x.sin().exp().tanh()
    y.sum().backward(retain_graph=True)
    y.pow(2).sum().backward()
    return [x.grad]


class Exponential(torch.autograd.Function):
    """Saves one tensor the proper way and hangs another on the context."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.twice = x * 2
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y + ctx.twice


def custom_function() -> list[Tensor]:
    x = torch.randn(6, requires_grad=True)
    Exponential.apply(Exponential.apply(x.sin())).tanh().sum().backward()
    return [x.grad]


def views() -> list[Tensor]:
    x = torch.randn(4, 6, requires_grad=True)
    y = x * 2
    transposed = y[1:, ::2].t().contiguous().exp().sum()
    expanded = y.unsqueeze(0).expand(3, 4, 6).sigmoid().pow(2).sum()
    (transposed + expanded + y.view(2, 12).narrow(1, 3, 5).cos().sum()).backward()
    return [x.grad]


def product_whose_formula_looks_at_the_mode_stack() -> list[Tensor]:
    x = torch.randn(4, 6, requires_grad=True)
    (x * 2).prod().backward()
    return [x.grad]


def in_place_everywhere() -> list[Tensor]:
    x = torch.randn(4, 6, requires_grad=True)
    y = (x * 2).relu_() + 1
    y.mul_(3)
    z = y.clone()
    z[1] = 0
    z[:, 2].exp_()
    z.sigmoid().sum().backward()
    return [x.grad]


def complex_numbers() -> list[Tensor]:
    x = torch.randn(4, 6, dtype=torch.cfloat, requires_grad=True)
    torch.view_as_real((x.conj() * x.exp()).sin()).pow(2).sum().backward()
    return [x.grad]


def attention_with_dropout() -> list[Tensor]:
    q = torch.randn(2, 4, 8, 16, requires_grad=True)
    F.scaled_dot_product_attention(q.sin(), q.cos(), q.exp(), dropout_p=0.2).pow(2).sum().backward()
    return [q.grad]


def channels_last_with_every_norm() -> list[Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.3),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.GroupNorm(2, 8),
        nn.Flatten(),
        nn.Linear(72, 3),
    ).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for _ in range(2):
        model(x).pow(2).sum().backward()
    model.eval()
    model(x).sum().backward()
    model.train()
    with torch.no_grad():
        model(x)
    return gradients(model)


def forwards_before_their_backwards() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    first = model(torch.randn(4, 8))
    second = model(first)
    third = model(second.detach())
    (first.sum() * 2 + second.pow(2).sum()).backward()
    third.exp().sum().backward()
    return gradients(model)


def a_parameter_changed_between_forward_and_backward() -> list[Tensor]:
    w, x = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    y = (x + w.detach()).exp().sin()  # backward needs exp's result, whose recipe reads w as it was
    with torch.no_grad():
        w.mul_(3)
    y.sum().backward()
    return [x.grad]


def a_step_that_fails_and_one_that_goes_on() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    with pytest.raises(ZeroDivisionError):
        model(x).sum() / (1 // 0)
    model(x).pow(2).sum().backward()
    return gradients(model)


CASES: dict[str, Callable[[], list[Tensor]]] = {
    function.__name__: function
    for function in (
        autocast_forward_only,
        autocast_around_backward_too,
        double_backward,
        lstm,
        gru,
        two_backwards_of_one_graph,
        custom_function,
        views,
        product_whose_formula_looks_at_the_mode_stack,
        in_place_everywhere,
        complex_numbers,
        attention_with_dropout,
        channels_last_with_every_norm,
        forwards_before_their_backwards,
        a_parameter_changed_between_forward_and_backward,
        a_step_that_fails_and_one_that_goes_on,
    )
}
CASES |= {"checkpoint": lambda: checkpointed(False), "checkpoint_reentrant": lambda: checkpointed(True)}


@in_pairs(name=CASES, policy=["recompute", "swap", "delta"], device=["cpu", "chaos:1", "chaos:2"])
def test_numbers_equal_plain(name, policy, device, spill_dir):
    torch.manual_seed(3)
    plain = CASES[name]()
    plain_random = torch.get_rng_state()
    modes = torch._C._len_torch_dispatch_stack()
    chosen = delta.load_policy(policy, {"filter.min_bytes": 0, "host.spill_dir": str(spill_dir)})
    torch.manual_seed(3)
    with delta.evict(activations="0%", policy=chosen, device=device) as run:
        evicted = CASES[name]()
    assert [torch.equal(*pair) for pair in zip(plain, evicted, strict=True)] == [True] * len(plain)
    assert torch.equal(plain_random, torch.get_rng_state())
    assert torch._C._len_torch_dispatch_stack() == modes
    assert run.report().steps > 0
