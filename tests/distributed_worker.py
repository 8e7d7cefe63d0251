"""One of the processes that `test_inside_distributed.py` starts: trains plainly and under Delta, and compares.

Arguments are `case:policy`. Prints one JSON object for each, from the first process; what differs is counted over all
processes.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from inside import different, policy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import delta
from delta.runtime.hooks import Hooks
from delta.runtime.kept import Passed

STEPS = 4
WIDTH = 16
AUDIT = {"weights_saved": 0, "weights_evictable": 0}
WATCHED: list[nn.Module] = []


class Block(nn.Module):
    """A residual block with what a transformer's and a convolutional network's blocks have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Three blocks; `batch_norm` adds buffers to broadcast, `spare` parameters that only odd steps use."""

    def __init__(self, batch_norm: bool = False, spare: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity()
        self.spare = nn.Linear(WIDTH, WIDTH) if spare else None
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if self.spare is not None and step % 2:
            x = x + self.spare(x).tanh()
        return self.last(self.norm(x))


def whole(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies in this process."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(model: nn.Module, micro_batches: int = 1) -> list[Tensor]:
    """Losses, gradients and state after each step. Each process has its own data."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for step in range(STEPS):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with nullcontext() if last else model.no_sync():
                loss = model(torch.randn(6, WIDTH, generator=generator), step).float().square().mean()
                loss.backward()
            found.append(loss.detach().clone())
        found += [whole(p.grad) for p in model.parameters() if p.grad is not None]
        optimiser.step()
        optimiser.zero_grad()
        found += [whole(tensor) for tensor in model.state_dict().values()]
    return found


def ddp(micro_batches: int = 1, batch_norm: bool = False, spare: bool = False, **options: bool) -> list[Tensor]:
    return train(DistributedDataParallel(Net(batch_norm, spare), **options), micro_batches)


def fsdp(reshard: bool = True, mixed: bool = False, compiled: bool = False, columns: bool = False) -> list[Tensor]:
    """FSDP2: each block for itself, then the rest; `columns` shards along the last dimension."""
    model, options = Net(), {"reshard_after_forward": reshard}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if columns:
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.dim() - 1)
    for block in model.blocks:
        if compiled:
            block.compile(backend="aot_eager")
        fully_shard(block, **options)
    fully_shard(model, **options)
    WATCHED[:] = [model]
    return train(model)


def flat_fsdp() -> list[Tensor]:
    """The first FSDP, which flattens the weights of a module into one parameter."""
    wrap = ModuleWrapPolicy({Block})
    return train(FullyShardedDataParallel(Net(), auto_wrap_policy=wrap, device_id=torch.device("cpu")))


@contextmanager
def watched_weights() -> Iterator[None]:
    """Look at each saved tensor that lies in a gathered weight: Delta must have left it alone."""
    pack = Hooks.pack

    def audited(hooks: Hooks, tensor: Tensor) -> object:
        packed = pack(hooks, tensor)
        if tensor.untyped_storage()._cdata in gathered():
            AUDIT["weights_saved"] += 1
            AUDIT["weights_evictable"] += type(packed) is not Passed
        return packed

    Hooks.pack = audited
    try:
        yield
    finally:
        Hooks.pack = pack


def groups_of(state: Any) -> Sequence[Any]:
    """torch 2.11 has one at most."""
    return state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]


def gathered() -> set[int]:
    """The storages that FSDP2 has gathered the weights of the watched model into."""
    modules = [module for model in WATCHED for module in model.modules() if isinstance(module, FSDPModule)]
    states = [module._get_fsdp_state() for module in modules]
    groups = [group for state in states for group in groups_of(state) if group is not None]
    weights = [weight for group in groups for weight in group.fsdp_params]
    return {part.untyped_storage()._cdata for weight in weights for part in weight.all_gather_outputs}


CASES: dict[str, Callable[[], list[Tensor]]] = {
    "ddp": ddp,
    "ddp_static_graph": partial(ddp, static_graph=True),
    "ddp_bucket_view": partial(ddp, gradient_as_bucket_view=True),
    "ddp_no_sync": partial(ddp, micro_batches=3),
    "ddp_unused_parameters": partial(ddp, spare=True, find_unused_parameters=True),
    "ddp_batch_norm": partial(ddp, batch_norm=True),
    "fsdp": fsdp,
    "fsdp_no_reshard": partial(fsdp, reshard=False),
    "fsdp_mixed_precision": partial(fsdp, mixed=True),
    "fsdp_compiled": partial(fsdp, compiled=True),
    "fsdp_columns": partial(fsdp, columns=True),
    "flat_fsdp": flat_fsdp,
}


def compare(name: str, chosen: str) -> dict[str, object]:
    """Run a case plainly and under a policy; says what it came to, over all processes."""
    torch.manual_seed(0)
    plain = CASES[name]()
    torch.manual_seed(0)
    torch._dynamo.reset()
    WATCHED.clear()
    AUDIT.update(weights_saved=0, weights_evictable=0)
    with watched_weights(), delta.evict(activations="0%", policy=policy(chosen), device="cpu") as run:
        evicted = CASES[name]()
    counts = torch.tensor([len(different(plain, evicted)), *AUDIT.values()])
    dist.all_reduce(counts)
    found = dict(zip(("different", *AUDIT), counts.tolist(), strict=True))
    report = run.report()
    return {"case": name, "policy": chosen, "evictions": dict(report.evictions), "modes": dict(report.modes), **found}


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for name in names:
        case, _, chosen = name.partition(":")
        found = compare(case, chosen)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def leave() -> None:
    """End the process without ending the interpreter first. FSDP keeps gloo's threads beyond `destroy_process_group`,
    and where one of them lets go of its last tensor while the interpreter ends, it asks for the GIL in a destructor and
    the process is aborted (torch 2.13, on a busy machine)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
    leave()
