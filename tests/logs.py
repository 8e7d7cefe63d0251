"""Logs in the format of DTR, made up: chains and residual nets, forward and backward, in few words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any


class Log:
    """Instructions one after the other; `write` makes a file of them."""

    def __init__(self) -> None:
        self._lines: list[dict[str, Any]] = []

    def _say(self, instruction: str, **fields: Any) -> None:
        self._lines.append({"INSTRUCTION": instruction, **fields})

    def start(self) -> None:
        self._say("ANNOTATE", ANNOTATION="START")

    def backward(self) -> None:
        self._say("ANNOTATE", ANNOTATION="BACKWARD")

    def constant(self, name: str, nbytes: int) -> None:
        self._say("CONSTANT", NAME=name)
        self._say("MEMORY", NAME=name, MEMORY=str(nbytes))

    def call(self, op: str, args: Sequence[str], cost_ns: int, **results: int) -> None:
        """An op; `results` gives the bytes of each."""
        self._say("CALL", NAME=op, ARGS=list(args), RESULT=list(results), TIME=str(cost_ns))
        for name, nbytes in results.items():
            self._say("MEMORY", NAME=name, MEMORY=str(nbytes))
            self._say("ALIAS", NAME=name, ALIAS="-1")

    def mutate(self, op: str, args: Sequence[str], position: int, cost_ns: int) -> None:
        self._say("MUTATE", NAME=op, ARGS=list(args), MUTATE=[position], TIME=str(cost_ns))

    def release(self, *names: str) -> None:
        for name in names:
            self._say("RELEASE", NAME=name)

    def write(self, path: Path) -> Path:
        path.write_text("".join(json.dumps(line) + "\n" for line in self._lines), encoding="utf-8")
        return path


def chain(length: int) -> Log:
    """`length` layers of 100 bytes and 10 ns; the backward of each, 20 ns, reads what went in, and frees it. The
    gradient of the input is the result."""
    return residual_net(length, sizes=[100] * length, costs_ns=[10] * length, skip=0)


def residual_net(length: int, sizes: Sequence[int], costs_ns: Sequence[int], skip: int = 3) -> Log:
    """Layers that each read the one before, and every `skip`-th also the one `skip` before it, to be added in place.

    Backward goes the other way: the gradient of a layer is made from that of the next, and what the layer read.
    """
    log = Log()
    log.constant("w", 40)
    log.start()
    log.call("load", [], 1, x0=sizes[0])
    read: list[list[str]] = []
    for layer in range(1, length + 1):
        nbytes, cost_ns = sizes[layer - 1], costs_ns[layer - 1]
        read.append([f"x{layer - 1}"])
        log.call(f"layer{layer}", [*read[-1], "w"], cost_ns, **{f"x{layer}": nbytes})
        if skip and layer > skip and layer % skip == 0:
            read[-1].append(f"x{layer - skip}")
            log.mutate("add_", [f"x{layer}", f"x{layer - skip}"], 0, 1 + cost_ns // 7)
    log.backward()
    log.call("loss", [f"x{length}"], 3, **{f"g{length}": sizes[length - 1]})
    for layer in range(length, 0, -1):
        gradient = {f"g{layer - 1}": sizes[max(0, layer - 2)]}
        log.call(f"back{layer}", [f"g{layer}", *read[layer - 1], "w"], 2 * costs_ns[layer - 1], **gradient)
        log.release(f"g{layer}", f"x{layer}")
    log.release("x0")
    return log


def random_net(length: int, seed: int) -> Log:
    """A residual net in which no two sizes and no two times are equal."""
    random = Random(seed)
    sizes = random.sample(range(50, 5000), length)
    costs_ns = random.sample(range(100, 100_000), length)
    return residual_net(length, sizes, costs_ns)
