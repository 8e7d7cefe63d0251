"""Replays: the same bits as the first time, and nothing else changed."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import delta
from delta.errors import RecomputeMismatchError
from delta.runtime.opfacts import facts_of
from delta.runtime.recompute import Input, Product, Recipe, Scratch, Slot, fill, replay, results_of, strip
from delta.runtime.view import View

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().contiguous().flatten().view(torch.uint8).tolist())


# -- whole ops, through a block that recomputes everything ------------------------------------------------------------
class Probe(torch.autograd.Function):
    """Saves its input; backward notes what came back, and as what."""

    seen: list[Tensor]

    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        Probe.seen.append(value)
        return torch.zeros_like(value)


def batch_norm(training: bool) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        mean, var = STATISTICS
        return F.batch_norm(x, mean, var, torch.ones(4), torch.ones(4), training=training)

    return run


def out_argument(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    torch.mul(x.detach(), 3.0, out=made)
    return made + x


def set_items(x: Tensor) -> Tensor:
    made = torch.zeros(8, 4, 6, 6)
    made[2:7] = x[2:7] * 2
    made[0].add_(1)
    return made * 1


def own_generator(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    torch.rand(7, generator=generator)
    return x * torch.bernoulli(torch.full_like(x, 0.5), generator=generator)


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, torch.linspace(-1, 1, 30).reshape(5, 6))


STATISTICS = (torch.zeros(4), torch.ones(4))
TABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "unary": torch.tanh,
    "binary with itself": lambda x: x * x,
    "scalar": lambda x: x.pow(3) + 0.5,
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "convolution": lambda x: F.conv2d(x, torch.linspace(-1, 1, 144).reshape(4, 4, 3, 3), padding=1),
    "channels last": lambda x: x.to(memory_format=torch.channels_last) * 2,
    "convolution, channels last": lambda x: F.conv2d(
        x.to(memory_format=torch.channels_last), torch.linspace(-1, 1, 16).reshape(4, 4, 1, 1)
    ),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (6,)),
    "group norm": lambda x: F.group_norm(x, 2),
    "batch norm in training": batch_norm(True),
    "batch norm in evaluation": batch_norm(False),
    "max pooling": lambda x: F.max_pool2d(x, 2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "several results, the second": lambda x: torch.var_mean(x, 0)[1],
    "several results, one of them a view": lambda x: (x * 2).unbind(0)[3] * 1,
    "in place": lambda x: (x * 2).add_(1).mul_(3).relu_(),
    "in place on a view": set_items,
    "out=": out_argument,
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout twice": lambda x: F.dropout(F.dropout(x, 0.3), 0.3),
    "feature dropout": lambda x: F.dropout2d(x, 0.5),
    "noise": lambda x: x + torch.randn_like(x),
    "in-place noise": lambda x: torch.empty_like(x).uniform_() * x,
    "a generator of its own": own_generator,
    "other dtype": lambda x: x.double() / 3,
    "autocast": autocast,
    "concatenation": lambda x: torch.cat([x, x * 2, x], 1),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "index": lambda x: x.index_select(0, torch.tensor([3, 1, 1])),
    "transposed": lambda x: (x * 2).transpose(0, 1),
    "expanded": lambda x: (x * 2)[:1].expand(8, 4, 6, 6),
    "sliced": lambda x: (x * 2)[1:3, :, ::2],
    "complex": lambda x: torch.view_as_real(torch.fft.rfft(x).conj().resolve_conj()),
    "conjugated": lambda x: torch.fft.rfft(x).conj(),
    "linear on a reshaped copy": lambda x: x.transpose(1, 2).reshape(8, 144) @ torch.ones(144, 3),
}


@pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning")
@pytest.mark.parametrize("name", TABLE)
def test_a_replay_gives_the_same_bits_and_changes_nothing(name):
    policy = delta.load_policy("recompute", {"filter.min_bytes": 0, "planner.kind": "none"})
    torch.manual_seed(3)
    Probe.seen = []
    for statistics in STATISTICS:
        statistics.fill_(0.5)
    x = torch.randn(8, 4, 6, 6, requires_grad=True)
    with delta.evict(policy=policy, activations="0%", device="chaos:1") as run:
        value = TABLE[name](x)
        expected, view, random = bits(value), View.of(value), torch.get_rng_state()
        statistics = [bits(tensor) for tensor in STATISTICS]
        end = Probe.apply(value)
        del value
        torch.ones(1).sin()  # an op later, nothing of it is left
        end.backward()
        assert run.report().evictions["recompute"] >= 1
        assert run.report().recomputed_bytes > 0
    (seen,) = Probe.seen
    assert bits(seen) == expected
    assert View.of(seen) == view
    assert torch.equal(torch.get_rng_state(), random)
    assert [bits(tensor) for tensor in STATISTICS] == statistics


def test_batch_norm_did_update_its_statistics_the_first_time():
    """Or the test above would show nothing."""
    for statistics in STATISTICS:
        statistics.fill_(0.5)
    TABLE["batch norm in training"](torch.randn(8, 4, 6, 6))
    assert all(bool((statistics != 0.5).all()) for statistics in STATISTICS)


@pytest.mark.filterwarnings("ignore:the budget of")
def test_a_recurrence_of_which_nothing_may_stay_ends():
    """The state at each place is read by two branches of two ops: each place would double the replays, without end for
    a long one. So it is in each step."""
    weight, places, made_kib = torch.nn.Parameter(torch.full((256,), 0.5)), 10, [0]
    with delta.evict(activations="0%", policy="dtr", device="cpu") as run:
        for _ in range(3):
            state = weight * 1.0
            for _ in range(places):
                state = state.sin().sin() + state.cos().cos()
            state.sum().backward()
            made_kib.append(run.report().recomputed_bytes // 1024)
    replays = {after - before for before, after in pairwise(made_kib)}
    assert len(replays) == 1
    of_all_needs = sum(4 * 5 * place for place in range(1, places + 1))  # four at each, each of five ops a place
    assert 0 < replays.pop() <= of_all_needs, "6,108, were the same made again for as long as it goes"


# -- recipes by hand --------------------------------------------------------------------------------------------------
def recipe(func, args, kwargs=None, *, generator=None, **changes) -> tuple[Recipe, dict[int, torch.UntypedStorage]]:
    """The recipe of a call, its tensors being records 0, 1, ..., its results 100, 101, ...; and their storages."""
    call = strip(args, kwargs or {})
    storages = {i: tensor.untyped_storage() for i, tensor in enumerate(call.tensors)}
    inputs = tuple(Input(i, View.of(tensor)) for i, tensor in enumerate(call.tensors))
    state = generator.get_state() if generator is not None else None
    written = [p for p in facts_of(func).mutates if isinstance(p, int)]
    if written:
        tensor = call.tensors[0]
        products = (Product(100, tensor.untyped_storage().nbytes(), View.of(tensor), written=0),)
    else:
        results = results_of(func(*args, **kwargs or {}))
        products = tuple(
            Product(100 + i, r.untyped_storage().nbytes(), View.of(r), result=i) for i, r in enumerate(results)
        )
    made = {"products": products} | changes
    return Recipe(func, facts_of(func), call.args, call.kwargs, inputs, made["products"], generator, state), storages


def test_strip_takes_tensors_out_and_fill_puts_them_back():
    a, b = torch.ones(2), torch.zeros(3)
    call = strip((a, [b, None, (a, 2)], "text"), {"out": b, "scale": 0.5})
    assert call.args == (Slot(0), [Slot(1), None, (Slot(2), 2)], "text")
    assert call.kwargs == {"out": Slot(3), "scale": 0.5}
    assert [t is u for t, u in zip(call.tensors, [a, b, a, b], strict=True)] == [True] * 4
    filled = fill(call.args, call.tensors)
    assert filled[0] is a
    assert filled[1][0] is b
    assert filled[1][2] == (a, 2)
    assert isinstance(filled[1], list)


def test_strip_keeps_no_tensor_alive():
    import gc
    import weakref

    tensor = torch.ones(2)
    there = weakref.ref(tensor)
    gc.disable()
    try:
        stripped = strip((tensor, [tensor]), {}).args
        del tensor
        assert there() is None, "by a reference cycle"
    finally:
        gc.enable()
    assert stripped == (Slot(0), [Slot(1)])


def test_scratch_is_filled_with_zeros_of_its_kind():
    made = fill(Scratch((2, 3), torch.float64, torch.device("cpu")), [])
    assert (made.shape, made.dtype, made.abs().sum()) == ((2, 3), torch.float64, 0)


def test_results_are_the_tensors_in_order():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [r.numel() for r in results_of((a, None, [b, 3], c))] == [1, 2, 3]
    assert results_of(None) == []


def test_several_results_come_back_under_their_records():
    x = torch.randn(4, 6)
    made, storages = recipe(aten.native_layer_norm.default, (x, [6], None, None, 1e-5))
    found = replay(made, storages.__getitem__, frozenset(), {})
    assert sorted(found) == [100, 101, 102]
    again = [product.view.over(found[product.record]) for product in made.products]
    for left, right in zip(again, aten.native_layer_norm.default(x, [6], None, None, 1e-5), strict=True):
        assert bits(left) == bits(right)


def test_what_is_left_of_a_batch_norm_gives_its_output():
    x = torch.randn(4, 6)
    call = (x, None, None, None, None, True, 0.1, 1e-5)
    whole, storages = recipe(aten.native_batch_norm.default, call)
    made = replace(whole, again_ns=1)
    output, *statistics = aten.native_batch_norm.default(*call)
    left = {101 + number: tensor.untyped_storage() for number, tensor in enumerate(statistics)}
    found = replay(made, storages.__getitem__, frozenset(), left)
    assert sorted(found) == [100]
    assert bits(made.products[0].view.over(found[100])) == bits(output)
    one_gone = replay(made, storages.__getitem__, frozenset(), {101: left[101]})
    untried = replay(whole, storages.__getitem__, frozenset(), left)
    assert sorted(one_gone) == sorted(untried) == [100, 101, 102]


def test_an_op_that_overwrites_works_on_a_copy():
    x = torch.ones(4)
    made, storages = recipe(aten.add_.Tensor, (x, torch.full((4,), 2.0)))
    found = replay(made, storages.__getitem__, frozenset(), {})
    assert x.tolist() == [1.0] * 4
    assert made.products[0].view.over(found[100]).tolist() == [3.0] * 4


def test_what_may_be_stolen_is_overwritten_without_a_copy():
    x = torch.ones(4)
    made, storages = recipe(aten.add_.Tensor, (x, torch.full((4,), 2.0)))
    found = replay(made, storages.__getitem__, frozenset({0}), {})
    assert found[100].data_ptr() == x.data_ptr()
    assert x.tolist() == [3.0] * 4


def test_an_overwritten_storage_that_is_read_through_two_views_is_copied_once():
    """x[:2].add_(x[2:]): both arguments must look at the same copy."""
    x = torch.arange(4.0)
    call = strip((x[:2], x[2:]), {})
    inputs = tuple(Input(0, View.of(tensor)) for tensor in call.tensors)
    product = Product(100, 16, View.of(x[:2]), written=0)
    func = aten.add_.Tensor
    made = Recipe(func, facts_of(func), call.args, call.kwargs, inputs, (product,), None, None)
    found = replay(made, lambda record: x.untyped_storage(), frozenset(), {})
    assert View.of(x).over(found[100]).tolist() == [2.0, 4.0, 2.0, 3.0]
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_generator_is_put_back_even_if_the_op_fails():
    generator = torch.Generator().manual_seed(1)
    x = torch.ones(100)
    made, storages = recipe(aten.bernoulli.p, (x, 0.5), {"generator": generator}, generator=generator)
    first = aten.bernoulli.p(x, 0.5, generator=torch.Generator().manual_seed(1))
    generator.manual_seed(77)
    now = generator.get_state()
    found = replay(made, storages.__getitem__, frozenset(), {})
    assert bits(made.products[0].view.over(found[100])) == bits(first)
    assert torch.equal(generator.get_state(), now)
    failing = Recipe(made.func, made.facts, (Slot(0), 2.0), made.kwargs, made.inputs, made.products, generator, now)
    generator.manual_seed(78)
    now = generator.get_state()
    with pytest.raises(RuntimeError, match="p"):
        replay(failing, storages.__getitem__, frozenset(), {})
    assert torch.equal(generator.get_state(), now)


def test_a_replay_leaves_no_graph():
    x = torch.randn(4, requires_grad=True)
    made, storages = recipe(aten.mul.Tensor, (x.detach(), x.detach()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: pytest.fail("saved"), lambda t: t):
        replay(made, storages.__getitem__, frozenset(), {})


def test_a_replay_is_not_autocast():
    """The recorded op is what autocast made of the call: it must not be cast once more."""
    x = torch.randn(4, 4)
    made, storages = recipe(aten.mm.default, (x, x))
    with torch.autocast("cpu", torch.bfloat16):
        found = replay(made, storages.__getitem__, frozenset(), {})
    assert bits(made.products[0].view.over(found[100])) == bits(x @ x)


X = torch.ones(4, 6)


@pytest.mark.parametrize(
    ("view", "nbytes", "result"),
    [
        (View.of(X.double()), 192, 0),  # another dtype
        (View.of(X.reshape(6, 4)), 96, 0),  # another shape
        (View.of(X.t().contiguous().t()), 96, 0),  # another layout
        (View.of(X), 100, 0),  # a storage of another size
        (View.of(X), 96, 1),  # no such result
    ],
)
def test_a_result_that_is_not_what_was_recorded_is_refused_and_the_op_named(view, nbytes, result):
    made, storages = recipe(aten.relu.default, (X,), products=(Product(100, nbytes, view, result=result),))
    with pytest.raises(RecomputeMismatchError) as caught:
        replay(made, storages.__getitem__, frozenset(), {})
    text = str(caught.value)
    assert "replaying aten.relu gave" in text
    assert f"({nbytes} bytes)" in text
    assert '{op: "aten.relu", action: keep}' in text
