"""Random programs: op graphs over matrices of one shape, run as a user would write them.

A program is a list of steps; each makes one value out of earlier ones. A value is let go of after its last use, as the
local variables of a model's forward are. What nobody uses goes into the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, COLUMNS = 8, 16


class Weights(nn.Module):
    """What the ops of a program share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, COLUMNS)
        self.norm = nn.BatchNorm1d(COLUMNS)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, COLUMNS))


Op = Callable[..., Tensor]
UNARY: dict[str, Op] = {
    "sin": lambda w, a: a.sin(),
    "tanh": lambda w, a: a.tanh(),
    "exp": lambda w, a: (-a * a).exp(),
    "relu": lambda w, a: a.relu(),
    "softmax": lambda w, a: a.softmax(-1),
    "layer norm": lambda w, a: F.layer_norm(a, (COLUMNS,)),
    "batch norm": lambda w, a: w.norm(a),
    "linear": lambda w, a: w.linear(a),
    "scale": lambda w, a: a * w.scale,
    "dropout": lambda w, a: F.dropout(a, 0.3),
    "noise": lambda w, a: a * torch.rand_like(a),
    "in place": lambda w, a: (a + 1).mul_(0.5).relu_(),
    "in place on a part": lambda w, a: _halve_first_rows(a.clone()),
    "in place on the result of a saving op": lambda w, a: w.linear(a).add_(1),
    "transposed": lambda w, a: a.t().contiguous().t(),
    "view": lambda w, a: a.reshape(COLUMNS, ROWS).t(),
    "shape": lambda w, a: a.reshape(COLUMNS, ROWS).cos().reshape(ROWS, COLUMNS),
    "slice": lambda w, a: torch.cat([a[2:] * a[2:], a[:2]]),
    "reduction": lambda w, a: a - a.mean(0, keepdim=True),
    "moments": lambda w, a: (a - torch.var_mean(a, 1, keepdim=True)[1]) * a.var(1, keepdim=True),
    "expanded": lambda w, a: a.sum(1, keepdim=True).expand(ROWS, COLUMNS) * 0.1,
    "halves": lambda w, a: torch.cat([a.chunk(2)[1].sin(), a.chunk(2)[0]]),
    "largest": lambda w, a: a * a.topk(1).values,
    "no gradient": lambda w, a: a * _without_gradient(a),
}
BINARY: dict[str, Op] = {
    "add": lambda w, a, b: a + b,
    "mul": lambda w, a, b: a * b,
    "residual in place": lambda w, a, b: a.sin().add_(b.mul(0.5)),
    "where": lambda w, a, b: torch.where(a > 0, a, b),
    "matmul": lambda w, a, b: (a @ b.t()) @ b * 0.01,
}


def _halve_first_rows(a: Tensor) -> Tensor:
    a[:2] *= 0.5
    return a


def _without_gradient(a: Tensor) -> Tensor:
    with torch.no_grad():
        return (a * 2).sigmoid_()


@dataclass(frozen=True)
class Step:
    """Makes the next value from earlier ones; value 0 is the input."""

    op: str
    reads: tuple[int, ...]


Program = Sequence[Step]


@st.composite
def programs(draw: st.DrawFn, most: int = 40) -> Program:
    """5 to `most` steps: chains for the greater part, with branches, skips and repeated uses."""
    count = draw(st.integers(5, most))
    steps = []
    for number in range(1, count + 1):
        near = st.integers(max(0, number - 2), number - 1)
        far = st.integers(0, number - 1)
        if draw(st.integers(0, 3)):
            steps.append(Step(draw(st.sampled_from(sorted(UNARY))), (draw(near),)))
        else:
            steps.append(Step(draw(st.sampled_from(sorted(BINARY))), (draw(near), draw(far))))
    return tuple(steps)


def loss_of(program: Program, weights: Weights, given: Tensor, look: Callable[[list[Tensor]], None]) -> Tensor:
    """Run a program forward. `look` sees the values that are alive after each step."""
    last_use = {0: 0} | {read: number for number, step in enumerate(program) for read in step.reads}
    values: dict[int, Tensor] = {0: given * 1}
    for number, step in enumerate(program):
        op = UNARY.get(step.op) or BINARY[step.op]
        values[number + 1] = op(weights, *(values[read] for read in step.reads))
        for read in set(step.reads):
            if last_use[read] == number:
                del values[read]
        look(list(values.values()))
    return torch.stack([value.square().mean() for value in values.values()]).sum()
