"""PyTorch's own operator database as cases: every op with autograd support, forward and backward, also under Delta.

A case is one sample input of one op in one dtype. Its tensors are made by recorded ops, so that nothing autograd saves
is a leaf and everything can be evicted; nothing but autograd keeps what forward made. What a run gives is compared byte
by byte: outputs, gradients, the inputs as the op left them (batch-norm statistics), the state of the random generator.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import set_rng_seed
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

import delta
from delta.runtime.device import Bandwidth
from delta.runtime.device.chaos import ChaosDevice
from delta.runtime.device.cpu import CpuDevice
from delta.runtime.device.cuda import CudaDevice

SEED = 5
POLICIES = ("swap", "recompute", "delta")
DEVICES = ("cpu", "chaos:1")
CARD = "cuda"
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@cache
def ops() -> dict[str, OpInfo]:
    """Every op with autograd support, by its full name."""
    return {op.full_name: op for op in op_db if op.supports_autograd}


def dtypes_of(op: OpInfo, kind: str = "cpu") -> list[torch.dtype]:
    """The dtypes of the sweep in which an op has a backward on the CPU, or on a card."""
    return [dtype for dtype in DTYPES if op.supports_dtype(dtype, kind) and dtype in op.supported_backward_dtypes(kind)]


def samples_of(op: OpInfo, dtype: torch.dtype, kind: str = "cpu") -> list[SampleInput]:
    """The op's sample inputs, the same ones in every process."""
    set_rng_seed(SEED)
    # What `op.sample_inputs` wraps: the wrapper looks at the source of the calling test for every sample.
    with quiet():
        return list(op.sample_inputs_func(op, kind, dtype, True))


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings of the ops themselves (deprecated, beta) are no news here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- one run --------------------------------------------------------------------------------------------------------
Bits = tuple[Any, ...]


@dataclass(frozen=True)
class Numbers:
    """What a run gave: the bits of every tensor by its role, and the type of the error that ended it."""

    bits: dict[str, Bits]
    error: str = ""
    message: str = field(default="", compare=False)

    def differences(self, other: Numbers) -> list[str]:
        """Roles whose bits differ; an error where the other run had none, or another one, comes first."""
        found = [f"{side.error}: {side.message}" for side in (self, other) if side.error and self.error != other.error]
        roles = dict.fromkeys([*self.bits, *other.bits])
        return found + [role for role in roles if self.bits.get(role) != other.bits.get(role)]


def bits_of(tensor: Tensor) -> Bits:
    """Type, sizes, strides and bytes of a tensor: equal exactly where no bit differs."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():  # looking is not part of the run
        if tensor.layout is not torch.strided:
            return (tensor.layout, tuple(tensor.shape), *(bits_of(part) for part in _sparse_parts(tensor)))
        flat = tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg().flatten()
        return tensor.dtype, tuple(tensor.shape), tensor.stride(), flat.view(torch.uint8).numpy(force=True).tobytes()


def _sparse_parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def run(op: OpInfo, sample: SampleInput) -> Numbers:
    """Forward and backward of one sample from the fixed seed."""
    torch.manual_seed(SEED)
    leaves: list[Tensor] = []
    bits: dict[str, Bits] = {}
    try:
        with quiet():
            _forward_and_backward(op, sample, leaves, bits)
    except Exception as error:
        return Numbers(bits, type(error).__name__, str(error))
    bits |= {f"gradient {i}": bits_of(leaf.grad) for i, leaf in enumerate(leaves) if leaf.grad is not None}
    states = {"random state": bits_of(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        states["random state of the card"] = bits_of(torch.cuda.get_rng_state())
    return Numbers(bits | states)


def _forward_and_backward(op: OpInfo, sample: SampleInput, leaves: list[Tensor], bits: dict[str, Bits]) -> None:
    roots = _forward(op, sample, leaves, bits)
    if roots:
        torch.autograd.backward(roots, [_cotangent(root) for root in roots])


def _forward(op: OpInfo, sample: SampleInput, leaves: list[Tensor], bits: dict[str, Bits]) -> list[Tensor]:
    """Run the op; returns copies of its differentiable outputs, since the outputs themselves are to be evicted."""
    given = (sample.input, sample.args, sample.kwargs)
    first, args, kwargs = tree_map(lambda value: _made(value, leaves) if isinstance(value, Tensor) else value, given)
    result = op(first, *args, **kwargs)
    outputs = _tensors(sample.output_process_fn_grad(result))
    bits |= {f"output {i}": bits_of(tensor) for i, tensor in enumerate(outputs)}
    bits |= {f"input {i}": bits_of(tensor) for i, tensor in enumerate(_tensors((first, args, kwargs)))}
    # Neither op saves anything but a sparse tensor: what is evicted was saved by the op under test.
    return [out.clone() if out.layout is torch.strided else out.to_dense() for out in outputs if out.requires_grad]


def _tensors(tree: Any) -> list[Tensor]:
    return [value for value in tree_leaves(tree) if isinstance(value, Tensor)]


def _made(tensor: Tensor, leaves: list[Tensor]) -> Tensor:
    """The tensor as a recorded op makes it from a leaf, with its strides and its place in its storage."""
    with torch.no_grad():
        leaf = tensor.detach().clone()
        alike = tensor.layout is not torch.strided or (leaf.stride() == tensor.stride() and _fills_storage(tensor))
        if not alike:
            leaf = tensor.new_empty(0).set_(tensor.untyped_storage()).clone()
    leaf.requires_grad_(tensor.requires_grad)
    leaves.append(leaf)
    if alike:
        return leaf.clone()
    made = leaf.clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return made.conj() if tensor.is_conj() else made


def _fills_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _cotangent(root: Tensor) -> Tensor:
    """A gradient that weighs every element of an output differently."""
    real = torch.linspace(0.5, 1.5, root.numel(), dtype=torch.float64, device=root.device).reshape(root.shape)
    return (torch.complex(real, 1 - real) if root.is_complex() else real).to(root.dtype)


# -- under Delta ----------------------------------------------------------------------------------------------------
# A constant, so that decisions repeat and no time goes into measuring it; slow, so that the policy delta finds both
# actions worth it for tensors as small as these.
LINK = Bandwidth(1e8, 1e8)
NO_MODULE = nn.Module()  # a case has no parameters: nothing to search for


@cache
def policy_of(name: str, spill_dir: str) -> delta.Policy:
    return delta.load_policy(name, {"filter.min_bytes": 0, "host.spill_dir": spill_dir})


@dataclass(frozen=True)
class Evicted:
    """A run with everything evicted: what it gave, how often which action was taken, and what could have been."""

    numbers: Numbers
    evictions: dict[str, int]
    evictable_bytes: int


def run_evicted(op: OpInfo, sample: SampleInput, policy: str, device: str, spill_dir: str) -> Evicted:
    """`run` with no room for any activation."""
    with (
        quiet(),  # that a limit of nothing cannot be held is told as a warning
        patch.object(CpuDevice, "bandwidth", lambda _: LINK),
        patch.object(CpuDevice, "interference", lambda _: 1.0),
        patch.object(ChaosDevice, "bandwidth", lambda _: LINK),
        patch.object(CudaDevice, "bandwidth", lambda _: LINK),
        delta.evict(NO_MODULE, activations="0%", policy=policy_of(policy, spill_dir), device=device) as session,
    ):
        numbers = run(op, sample)
    report = session.report()
    return Evicted(numbers, dict(report.evictions), report.unevicted_peak_activation_bytes)


# -- what plain PyTorch does not give twice ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Unrepeatable:
    """Samples whose bits differ between two plain runs, and why. A test shows it for each."""

    ops: tuple[str, ...]
    reason: str
    keywords: dict[str, Any]
    mended: str  # the release of PyTorch since which two runs agree

    @property
    def when(self) -> str:
        keywords = ", ".join(f"`{name}={value!r}`" for name, value in self.keywords.items())
        return f"{keywords} before PyTorch {self.mended}"

    @property
    def here(self) -> bool:
        return bool(torch.__version__ < self.mended)  # compares as a version, not as text

    def covers(self, op: OpInfo, sample: SampleInput) -> bool:
        return op.full_name in self.ops and self.keywords.items() <= sample.kwargs.items()


UNREPEATABLE = (
    Unrepeatable(
        ("linalg.lstsq", "linalg.lstsq.grad_oriented"),
        "LAPACK's gelsy reads an array of pivots that PyTorch allocates and does not fill: what lay in that memory "
        "before decides the order of the columns, and so the rounding (pytorch #187411)",
        {"driver": "gelsy"},
        mended="2.14",
    ),
)


# -- verdicts ---------------------------------------------------------------------------------------------------------
class Verdict(StrEnum):
    """How a run under Delta compares with the plain one."""

    IDENTICAL = "identical"
    SAME_ERROR = "same error"  # plain PyTorch raises, and so does this, with the same type
    UNREPEATABLE = "unrepeatable"  # differs, as two plain runs do
    WRONG = "wrong"


class Handled(StrEnum):
    """What became of what autograd saved."""

    SWAPPED = "swapped"
    RECOMPUTED = "recomputed"
    BOTH = "both"
    KEPT = "kept"  # could be evicted, but not by an action of this policy
    PASSED = "passed through"  # nothing that was saved can be evicted
    NOTHING = "nothing saved"


@dataclass(frozen=True)
class Outcome:
    """One sample under one policy on one device."""

    policy: str
    device: str
    verdict: Verdict
    handled: Handled
    passed: frozenset[str]  # what was saved, where all of it passed through
    error: str  # the type of what plain PyTorch raised
    differences: list[str]


def outcomes(
    op: OpInfo,
    sample: SampleInput,
    spill_dir: str,
    policies: Sequence[str] = POLICIES,
    devices: Sequence[str] = DEVICES,
) -> Iterator[Outcome]:
    """The sample under every policy on every device, each in a session of its own, against one plain run.

    On a card many ops give other bits each time: what a few more plain runs show counts as unrepeatable there.
    """
    plain = run(op, sample)
    unrepeatable = any(entry.here and entry.covers(op, sample) for entry in UNREPEATABLE)
    if CARD in devices:
        unrepeatable = unrepeatable or any(run(op, sample) != plain for _ in range(6))
    for policy in policies:
        for device in devices:
            evicted = run_evicted(op, sample, policy, device, spill_dir)
            handled = _handled(evicted)
            passed = frozenset(_saved_kinds(op, sample)) if handled is Handled.PASSED else frozenset()
            if handled is Handled.PASSED and not passed:
                handled = Handled.NOTHING
            verdict = _verdict(plain, evicted.numbers, unrepeatable)
            differences = plain.differences(evicted.numbers)
            yield Outcome(policy, device, verdict, handled, passed, plain.error, differences)


def _verdict(plain: Numbers, evicted: Numbers, unrepeatable: bool) -> Verdict:
    if plain == evicted:
        return Verdict.SAME_ERROR if plain.error else Verdict.IDENTICAL
    return Verdict.UNREPEATABLE if unrepeatable and plain.error == evicted.error else Verdict.WRONG


def _handled(evicted: Evicted) -> Handled:
    match sorted(evicted.evictions):
        case ["recompute", "swap"]:
            return Handled.BOTH
        case ["recompute"]:
            return Handled.RECOMPUTED
        case ["swap"]:
            return Handled.SWAPPED
    return Handled.KEPT if evicted.evictable_bytes else Handled.PASSED


def _saved_kinds(op: OpInfo, sample: SampleInput) -> set[str]:
    """What autograd saves for this sample, in words."""
    kinds: set[str] = set()

    def note(tensor: Tensor) -> Tensor:
        kinds.add(_kind(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run(op, sample)
    return kinds


def _kind(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return "sparse layout"
    if not tensor.numel():
        return "no elements"
    return "a single bool" if tensor.dtype is torch.bool and tensor.numel() == 1 else "other"
