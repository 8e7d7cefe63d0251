"""Promise P1 with function transforms, forward-mode derivatives and the functional interface of autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from covering import in_turns
from inside import POLICIES, STEPS, exact, numbers, policy
from torch import Tensor, func, nn
from torch.autograd import forward_ad, functional
from torch.nn import functional as F

import delta

pytestmark = [
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),  # forward mode uses it
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),  # so does func.linearize
]

WIDTH = 4


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def rows(count: int = 3) -> Tensor:
    return torch.randn(count, WIDTH)


def curve(x: Tensor) -> Tensor:
    return (x * 2).sin().exp()


def energy(x: Tensor) -> Tensor:
    return curve(x).square().sum()


# -- what runs inside a block -----------------------------------------------------------------------------------------
def functional_call() -> list[Tensor]:
    """Parameters given by hand, as meta-learning does."""
    model, found = network(), []
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for _ in range(STEPS):
        func.functional_call(model, weights, (rows(),)).exp().sum().backward()
        found += [weight.grad.clone() for weight in weights.values()]
    return found


def inner_steps() -> list[Tensor]:
    """Meta-learning without torch.func: gradients of gradients through updated weights."""
    model = network()

    def loss(step: int) -> Tensor:
        weights = dict(model.named_parameters())
        for _ in range(2):
            inner = func.functional_call(model, weights, (rows(),)).square().sum()
            gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            weights = {name: w - 0.01 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return func.functional_call(model, weights, (rows(),)).square().sum()

    return numbers(model, loss)


def vectorised() -> list[Tensor]:
    model, weight = network(), torch.randn(WIDTH, WIDTH)
    return numbers(model, lambda step: torch.vmap(lambda row: (weight @ row.sin()).exp())(model(rows())).sum())


def vectorised_with_random_numbers() -> list[Tensor]:
    model = network()
    drop = torch.vmap(lambda row: F.dropout(row.sin(), 0.5).exp(), randomness="different")
    return numbers(model, lambda step: drop(model(rows())).sum())


def an_ensemble() -> list[Tensor]:
    """Stacked weights of several models, called at once."""
    models = [network() for _ in range(3)]
    weights, buffers = func.stack_module_state(models)
    base = network().to("meta")
    call = torch.vmap(lambda w, b, x: func.functional_call(base, (w, b), (x,)), in_dims=(0, 0, None))
    found = []
    for _ in range(STEPS):
        call(weights, buffers, rows()).square().sum().backward()
        found += [weight.grad.clone() for weight in weights.values()]
    return found


def forward_mode() -> list[Tensor]:
    """A tangent, and a gradient through both the value and the tangent."""
    model = network()

    def loss(step: int) -> Tensor:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(rows(), rows())
            value, tangent = forward_ad.unpack_dual(curve(model(x)))
            return value.sum() + tangent.square().sum()

    return numbers(model, loss)


def directional_derivative() -> list[Tensor]:
    """Its constants have tangents without bytes (zero tensors)."""
    model = network()

    def loss(step: int) -> Tensor:
        value, tangent = func.jvp(curve, (model(rows()),), (rows(),))
        return value.sum() + tangent.square().sum()

    return numbers(model, loss)


def forward_over_reverse() -> list[Tensor]:
    """The gradient has a tangent of its own: what backward reads must have kept its tangent."""
    x, direction, found = rows(), rows(), []
    for _ in range(STEPS):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), direction)
            (gradient,) = torch.autograd.grad(energy(dual), dual)
            found += [part.detach().clone() for part in forward_ad.unpack_dual(gradient) if part is not None]
    return found


def gradients_checked() -> list[Tensor]:
    x = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(curve, (x,), check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(curve, (x,))
    return [x]


def several_gradients_at_once() -> list[Tensor]:
    x = torch.randn(WIDTH, requires_grad=True)
    return list(torch.autograd.grad(curve(x), x, torch.eye(WIDTH), is_grads_batched=True))


def several_gradients_of_noise_at_once() -> list[Tensor]:
    """What backward asks for is made with random numbers, which this kind of vmap refuses to draw."""
    x = torch.randn(WIDTH, requires_grad=True)
    noisy = torch.nn.functional.dropout(curve(x)).exp()
    return list(torch.autograd.grad(noisy, x, torch.eye(WIDTH), is_grads_batched=True))


def several_gradients_of_noise_by_vmap() -> list[Tensor]:
    x = torch.randn(WIDTH, requires_grad=True)
    noisy = torch.nn.functional.dropout(curve(x)).exp()
    along = func.vmap(lambda v: torch.autograd.grad(noisy, x, v, retain_graph=True)[0])
    return [along(torch.eye(WIDTH))]


def listed(found: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


RUN: dict[str, Callable[[], list[Tensor]]] = {
    program.__name__: program
    for program in (
        functional_call,
        inner_steps,
        vectorised,
        vectorised_with_random_numbers,
        an_ensemble,
        forward_mode,
        directional_derivative,
        forward_over_reverse,
        gradients_checked,
        several_gradients_at_once,
        several_gradients_of_noise_at_once,
        several_gradients_of_noise_by_vmap,
    )
}
RUN |= {
    "functional.jacobian": lambda: listed(functional.jacobian(curve, rows())),
    "functional.jacobian_create_graph": lambda: listed(functional.jacobian(curve, rows(), create_graph=True)),
    "functional.jacobian_vectorised": lambda: listed(functional.jacobian(curve, rows(), vectorize=True)),
    "functional.jacobian_forward_mode": lambda: listed(
        functional.jacobian(curve, rows(), vectorize=True, strategy="forward-mode")
    ),
    "functional.hessian": lambda: listed(functional.hessian(energy, rows())),
    "functional.hvp": lambda: listed(functional.hvp(energy, rows(), rows())),
    "functional.vhp": lambda: listed(functional.vhp(energy, rows(), rows())),
    "functional.jvp": lambda: listed(functional.jvp(curve, rows(), rows())),
    "functional.vjp": lambda: listed(functional.vjp(curve, rows(), rows())),
    "jacfwd": lambda: listed(func.jacfwd(curve)(rows())),
    "linearize": lambda: listed(func.linearize(curve, rows())[0]),
}


@in_turns(name=RUN, policy_name=POLICIES)
def test_numbers_equal_plain(name, policy_name):
    exact(RUN[name], policy_name)


# -- what PyTorch refuses under saved-tensor hooks --------------------------------------------------------------------
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "grad": func.grad(energy),
    "grad_and_value": func.grad_and_value(energy),
    "vjp": partial(func.vjp, curve),
    "jacrev": func.jacrev(curve),
    "hessian": func.hessian(energy),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reverse_mode_transforms_are_refused_and_the_error_says_what_to_do(name):
    x = rows()
    REFUSED[name](x)
    refused = pytest.raises(RuntimeError, match="saved tensor hooks")
    with refused as caught, delta.evict(activations="0%", policy=policy("recompute"), device="cpu"):
        REFUSED[name](x)
    (note,) = caught.value.__notes__
    assert "delta.evict" in note and "torch.autograd.grad" in note
    REFUSED[name](x)  # and nothing is left behind


def test_other_errors_get_no_note():
    with pytest.raises(RuntimeError) as caught, delta.evict(activations="0%", device="cpu"):
        raise RuntimeError("something else")
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's compiler warns of what it does itself
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("policy_name", ["swap", "recompute"])
def test_compiled_they_work(policy_name, monkeypatch):
    """Compiled code meets no hooks inside a transform: the way out."""
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)  # no thread for a progress bar
    model = network()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def gradient(x: Tensor) -> dict[str, Tensor]:
        return func.grad(lambda w: func.functional_call(model, w, (x,)).square().sum())(weights)

    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    exact(lambda: list(compiled(rows()).values()), policy_name)
    torch._dynamo.reset()
