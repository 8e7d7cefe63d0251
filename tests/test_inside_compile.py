"""Promise P1 inside `torch.compile`, which stays on: as many graphs are compiled and run as without Delta."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
import torch._inductor.config
from inside import POLICIES, STEPS, different, exact, numbers, policy
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch._higher_order_ops import scan
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import delta
from delta.runtime import recorder

pytestmark = [
    pytest.mark.filterwarnings("ignore:the budget of:RuntimeWarning"),
    # PyTorch's compiler warns of what it does itself.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

WIDTH = 16


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test compiles anew, and the next one too. The compiler must not leave threads of its own behind."""
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)  # it may be a stand-in without one
    torch._dynamo.reset()
    counters.clear()
    # Nor need it compile a program to find out what the processor can do.
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}):
        yield
    torch._dynamo.reset()


@dataclass
class Counting:
    """A backend that counts the graphs it compiles and how often they run."""

    inner: str
    compiled: int = 0
    ran: int = 0
    sizes: list[int] = field(default_factory=list)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compiled += 1
        self.sizes.append(len(graph.graph.nodes))
        run = lookup_backend(self.inner)(graph, inputs)

        def counted(*args: Any) -> Any:
            self.ran += 1
            return run(*args)

        return counted

    def take(self) -> tuple[int, int, list[int], int]:
        """What was compiled and run since the last call, and where Dynamo gave a graph up."""
        taken = self.compiled, self.ran, self.sizes, sum(counters["graph_break"].values())
        self.compiled, self.ran, self.sizes = 0, 0, []
        counters.clear()
        return taken


class Block(nn.Module):
    """A residual block with statistics that a compiled graph writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def block_model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))


def batches(rows: Callable[[int], int] = lambda step: 4) -> Callable[[int], Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda step: torch.randn(rows(step), WIDTH, generator=generator)


def compiled(
    model: nn.Sequential, backend: object, part: bool, dynamic: bool | None = None
) -> tuple[nn.Sequential, Callable[[Tensor], Tensor]]:
    """The model and its forward, which is compiled, or one block of it is."""
    if part:
        model[1] = torch.compile(model[1], backend=backend, dynamic=dynamic)
    return model, model if part else torch.compile(model, backend=backend, dynamic=dynamic)


def compiled_model(backend: object, part: bool, dynamic: bool | None = None) -> list[Tensor]:
    """Compile a model, or one block of it, and train it; with `dynamic`, on batches of differing length."""
    model, forward = compiled(block_model(), backend, part, dynamic)
    batch = batches((lambda step: 4 + step % 3) if dynamic else (lambda step: 4))
    return numbers(model, lambda step: forward(batch(step)).square().sum())


# -- the compile stays on ---------------------------------------------------------------------------------------------
def quick_and_slow() -> list[Any]:
    """Every backend, on a whole model and on a part of it, under every policy; a few of them in the default run."""
    quick = {("eager", False, "recompute"), ("aot_eager", False, "delta"), ("inductor", True, "swap")}
    quick |= {("aot_eager", True, name) for name in POLICIES}
    every = product(("eager", "aot_eager", "inductor"), (False, True), POLICIES)
    return [pytest.param(*given, marks=[] if given in quick else pytest.mark.slow) for given in every]


@pytest.mark.parametrize(("backend", "part", "policy_name"), quick_and_slow())
def test_compiled_inside_the_block(backend, part, policy_name):
    counting = Counting(backend)
    counts = []

    def program() -> list[Tensor]:
        torch._dynamo.reset()
        found = compiled_model(counting, part)
        counts.append(counting.take())
        return found

    with torch._inductor.config.patch(force_disable_caches=policy_name == "recompute"):  # for one of them traced anew
        report = exact(program, policy_name)
    plain, evicted = counts
    assert evicted == plain
    assert plain[1] == STEPS
    assert report.modes == {"observe": 1, "planned": STEPS - 1}


@pytest.mark.parametrize(("backend", "part"), [("aot_eager", False), ("inductor", True)])
def test_compiled_before_the_block(backend, part):
    """Neither entering the block nor leaving it invalidates what was compiled, in whatever mode a step runs."""
    counting = Counting(backend)
    model, forward = compiled(block_model(), counting, part)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def program() -> list[Tensor]:
        model.load_state_dict(state)
        torch.manual_seed(3)
        batch = batches()
        return numbers(model, lambda step: forward(batch(step)).square().sum())

    plain = program()
    assert counting.take()[:2] == (1, STEPS)
    for name in POLICIES:
        for limit in ("0%", "50%", "1GiB"):
            with delta.evict(activations=limit, policy=policy(name), device="cpu"):
                evicted = program()
            assert different(plain, evicted) == []
            assert counting.take()[:2] == (0, STEPS)
    assert different(plain, program()) == []
    assert counting.take()[:2] == (0, STEPS)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dynamic_shapes(backend):
    counting = Counting(backend)
    counts = []

    def program() -> list[Tensor]:
        torch._dynamo.reset()
        found = compiled_model(counting, part=True, dynamic=True)
        counts.append(counting.take())
        return found

    exact(program, "recompute")
    assert counts[1] == counts[0]
    assert counts[0][0] < STEPS


# -- writes that compiled code makes past the dispatcher --------------------------------------------------------------
class Average(nn.Module):
    """Reads a buffer outside of the compiled part that writes it."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.update = torch.compile(self._update, backend=backend)

    def _update(self, x: Tensor) -> None:
        self.average.mul_(0.9).add_(x.mean(0) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        y = (x - self.average).exp()  # what backward needs is made from the buffer as it was
        self.update(x.detach())
        return y.sin()


def a_buffer_written_between_forward_and_backward(backend: str) -> list[Tensor]:
    model, batch = Average(backend), batches()
    return numbers(model, lambda step: model(batch(step)).sum())


def statistics_written_between_forward_and_backward(backend: str) -> list[Tensor]:
    linear, norm, batch = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), batches()
    model, compiled = nn.ModuleList([linear, norm]), torch.compile(norm, backend=backend)

    def loss(step: int) -> Tensor:
        x = linear(batch(step))
        y = (x - norm.running_mean).exp()
        return (compiled(x) + y.sin()).exp().sum()

    return numbers(model, loss)


def an_activation_written_after_it_was_read(backend: str) -> list[Tensor]:
    linear, batch = nn.Linear(WIDTH, WIDTH), batches()
    write = torch.compile(lambda x: x.mul_(2).add_(1), backend=backend)

    def loss(step: int) -> Tensor:
        x = batch(step).sin()
        y = (linear.bias + x).exp()  # made from x as it was
        write(x)
        return (y.sin() * (linear.weight[0] * x)).sum()  # reads x as it is now

    return numbers(linear, loss)


def a_detached_write(backend: str) -> list[Tensor]:
    linear, batch = nn.Linear(WIDTH, WIDTH), batches()
    write = torch.compile(lambda x: x.detach().mul_(2).add_(1), backend=backend)

    def loss(step: int) -> Tensor:
        x = batch(step).sin()
        y = (linear.bias + x).exp()
        write(x)
        return (y.sin() * (linear.weight[0] * x)).sum()

    return numbers(linear, loss)


def buffers_that_a_graph_uses_again(backend: str) -> list[Tensor]:
    """Without gradients a compiled graph writes its own results in place."""
    linear, weight, batch = nn.Linear(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH), batches()
    features = torch.compile(lambda x: ((x @ weight).relu() + 1).relu(), backend=backend)
    return numbers(linear, lambda step: (features(batch(step)) * linear.weight[0]).exp().sin().sum())


WRITES = (
    a_buffer_written_between_forward_and_backward,
    statistics_written_between_forward_and_backward,
    an_activation_written_after_it_was_read,
    a_detached_write,
    buffers_that_a_graph_uses_again,
)


@pytest.mark.parametrize("policy_name", ["swap", "recompute"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", WRITES, ids=lambda program: program.__name__)
def test_writes_of_compiled_code(program, backend, policy_name):
    exact(lambda: program(backend), policy_name)


# -- what else can be compiled ----------------------------------------------------------------------------------------
def trained(function: Callable[[Tensor], Tensor], backend: str | None) -> Callable[[], list[Tensor]]:
    """A program whose loss goes through `function`, compiled where a backend is given."""

    def program() -> list[Tensor]:
        torch._dynamo.reset()
        forward = torch.compile(function, backend=backend) if backend else function
        linear, batch = nn.Linear(WIDTH, WIDTH), batches()
        return numbers(linear, lambda step: forward(linear(batch(step)).sin()).exp().sum())

    return program


def conditional(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a: a.sin().exp(), lambda a: a.cos(), (x,))


def loop(x: Tensor) -> Tensor:
    _, found = while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.sin()), (torch.tensor(0), x.detach()))
    return x * found


def running_products(x: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a * b, x, dim=0, combine_mode="generic")


def scanned(x: Tensor) -> Tensor:
    return scan(lambda carry, a: (carry + a.sin(), carry * a), torch.zeros(WIDTH), x, dim=0)[1]


def mapped(x: Tensor) -> Tensor:
    return map_rows(lambda row: row.sin().exp(), x)


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(lambda a: a.sin().exp().cos(), x, use_reentrant=False)


def broken_graph(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.exp().cos()


def random_numbers(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.3) * torch.rand_like(x)


def no_gradients_inside(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.sin().add_(1)
    return (x * scale).exp()


def attention(x: Tensor) -> Tensor:
    """Without gradients: flex attention has no backward on the CPU."""
    with torch.no_grad():
        q = x.view(1, 1, 4, WIDTH).repeat(1, 1, 8, 1)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu")
        weights = flex_attention(q, q.sin(), q.cos(), score_mod=lambda s, b, h, i, j: s + i - j, block_mask=mask)
    return x * weights[0, 0, :4]


HIGHER_ORDER = (conditional, loop, running_products, scanned, mapped, checkpointed, broken_graph, random_numbers)
FUNCTIONS = [(function, None) for function in HIGHER_ORDER if function is not broken_graph]
FUNCTIONS += [(function, "aot_eager") for function in (*HIGHER_ORDER, no_gradients_inside)]
FUNCTIONS += [(attention, None), (checkpointed, "inductor")]
FUNCTIONS += [pytest.param(function, "inductor", marks=pytest.mark.slow) for function in (conditional, random_numbers)]


@pytest.mark.parametrize("policy_name", ["swap", "recompute"])
@pytest.mark.parametrize(("function", "backend"), FUNCTIONS, ids=lambda given: getattr(given, "__name__", given))
def test_higher_order_ops_and_graphs(function, backend, policy_name):
    report = exact(trained(function, backend), policy_name)
    assert report.steps == STEPS


def flex_attention_compiled() -> list[Tensor]:
    linear, batch = nn.Linear(WIDTH, WIDTH), batches()
    compiled = torch.compile(attention, fullgraph=True)
    return numbers(linear, lambda step: compiled(linear(batch(step))).exp().sum())


@pytest.mark.slow
@pytest.mark.parametrize("policy_name", POLICIES)
def test_flex_attention_compiled(policy_name):
    exact(flex_attention_compiled, policy_name)


# -- backward inside compiled code ------------------------------------------------------------------------------------
def whole_step(backend: str = "aot_eager") -> list[Tensor]:
    """The compiled function runs backward too: Delta's hooks are called in the midst of it."""
    torch._dynamo.reset()
    model, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)), batches()

    @torch.compile(backend=backend)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    found = []
    for number in range(STEPS):
        found += [step(batch(number)).detach(), *(p.grad.clone() for p in model.parameters())]
    return found


def compiled_autograd() -> list[Tensor]:
    """The graph of backward is traced; Delta's hooks are left out of it and called as they are."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        return whole_step()


def compiled_optimiser() -> list[Tensor]:
    """Parameters are written by compiled code."""
    model, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)), batches()
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    advance = torch.compile(optimiser.step, backend="aot_eager")
    found = []
    for number in range(STEPS):
        loss = model(batch(number)).sum()
        loss.backward()
        advance()
        optimiser.zero_grad()
        found.append(loss.detach())
    return found + [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("policy_name", ["swap", "recompute"])
@pytest.mark.parametrize("program", [whole_step, compiled_autograd, compiled_optimiser], ids=lambda f: f.__name__)
def test_backward_and_optimiser_compiled(program, policy_name):
    exact(program, policy_name)


# -- a block inside of compiled code ----------------------------------------------------------------------------------
def block() -> delta.evict:
    return delta.evict(activations="0%", policy=policy("recompute"), device="cpu")


def test_a_block_in_a_compiled_function_breaks_the_graph_and_works():
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)

    def loss(x: Tensor) -> Tensor:
        with block() as run:
            found = linear(x).sin().exp().sum()
            reports.append(run.report)
        return found

    reports: list[Any] = []
    expected = loss(x)
    expected.backward()
    gradient, linear.weight.grad = linear.weight.grad, None
    compiled = torch.compile(loss, backend="eager")
    for _ in range(2):
        found = compiled(x)
        found.backward()
        assert different([expected, gradient], [found, linear.weight.grad]) == []
        assert sum(reports[-1]().evictions.values()) > 0
        linear.weight.grad = None


def test_a_decorated_function_can_be_compiled():
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    function = torch.compile(block()(lambda x: linear(x).sin().exp().sum()), backend="eager")
    expected = linear(x).sin().exp().sum()
    for _ in range(2):
        assert torch.equal(function(x), expected)


def test_fullgraph_says_that_a_block_cannot_be_in_it():
    run = block()

    @torch.compile(backend="eager", fullgraph=True)
    def loss(x: Tensor) -> Tensor:
        with run:
            return x.sin().sum()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="evict"):
        loss(torch.randn(4))


def test_nothing_that_the_recorder_does_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops between two graphs of one function run under Dynamo's eye, and the recorder is called by them."""
    seen: dict[str, bool] = {}
    facts_of = recorder.facts_of

    def watched_facts_of(func: torch._ops.OpOverload) -> Any:
        watching = torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None
        seen[func.name()] = seen.get(func.name(), False) or watching
        return facts_of(func)

    def program(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        return (y * torch.nonzero(y > 0).shape[0]).sum()

    monkeypatch.setattr(recorder, "facts_of", watched_facts_of)
    monkeypatch.setattr(recorder, "KNOWN", {})  # what other tests have asked for would not be asked again
    compiled, weight = torch.compile(program, backend="eager"), torch.randn(8, 8, requires_grad=True)
    with delta.evict(activations=100, device="cpu"):
        for _ in range(3):
            compiled(torch.randn(8, 8), weight).backward()
    assert "aten::nonzero" in seen
    assert not any(seen.values())
