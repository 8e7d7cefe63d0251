"""Promise P1 on PyTorch's operator database: a spread of it by default, all of it with --slow.

Skipped are no ops. Samples whose bits plain PyTorch itself does not give twice are named in `opdb.UNREPEATABLE`, and
shown to be so here.
"""

import ctypes
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import delta
from delta.runtime import rematerialise
from delta.runtime.opfacts import facts_of
from delta.runtime.pages import read_places
from delta.runtime.rawmem import as_bytes, tensor_at
from delta.runtime.spill import SpillFile
from delta.runtime.view import View, is_plain

pytestmark = pytest.mark.usefixtures("one_thread")

# `scripts/gpu-check` collects the tests on machines with no more than PyTorch and what Delta itself needs.
MISSING = "PyTorch's operator database imports expecttest and numpy, which the extra `test` of setup.cfg installs"
opdb = pytest.importorskip("opdb", reason=MISSING)
exactness = pytest.importorskip("exactness", reason=MISSING)
aten = torch.ops.aten
Handled, Verdict = opdb.Handled, opdb.Verdict


@pytest.mark.parametrize("name", [name for name, op in opdb.ops().items() if opdb.dtypes_of(op)])
def test_an_op_gives_the_bits_of_plain(name, spill_dir):
    """The first sample on the real device, the last one on the worst legal device."""
    op = opdb.ops()[name]
    samples = opdb.samples_of(op, opdb.dtypes_of(op)[0])
    found = [*opdb.outcomes(op, samples[0], str(spill_dir), devices=["cpu"])]
    found += opdb.outcomes(op, samples[-1], str(spill_dir), devices=["chaos:1"])
    assert [outcome for outcome in found if outcome.verdict is Verdict.WRONG] == []


class Elsewhere(TorchDispatchMode):
    """Runs each element-wise call twice: as it is, and into a copy of its first argument where Delta would do so."""

    def __init__(self):
        super().__init__()
        self.tried, self.differing = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        copy = args[0].clone() if args and is_tensor(args[0]) and facts_of(func).in_place is not None else None
        made = func(*args, **kwargs)
        if copy is not None and View.of(made) == View.of(copy) == View.of(args[0]) and made.is_floating_point():
            again = facts_of(func).in_place(copy, *args[1:], **kwargs)
            self.tried.add(func)
            if again is not copy or bits_of(again) != bits_of(made):
                self.differing.append((func, args, kwargs))
        return made


def is_tensor(value):
    return isinstance(value, torch.Tensor) and is_plain(value)


def bits_of(tensor):
    return bytes(as_bytes(tensor.untyped_storage()).tolist())


def test_in_place_of_its_first_argument_an_element_wise_op_gives_the_same_bits():
    with Elsewhere() as calls, opdb.quiet():
        for op in opdb.ops().values():
            for dtype in {torch.float32, torch.float64}.intersection(opdb.dtypes_of(op)):
                for sample in opdb.samples_of(op, dtype):
                    with suppress(RuntimeError, ValueError, NotImplementedError):
                        op(sample.input, *sample.args, **sample.kwargs)
    assert calls.differing == []
    assert len(calls.tried) > 60 and {aten.mul.Tensor, aten.relu.default, aten.tanh.default} <= calls.tried


@pytest.mark.slow
@pytest.mark.parametrize("task", exactness.tasks(), ids=lambda task: f"{task.op} {task.dtype}")
def test_every_sample_gives_the_bits_of_plain(task, spill_dir):
    part = exactness.work(task, str(spill_dir))
    assert part.wrong == []


def test_a_quick_sweep_has_each_op_in_one_dtype_and_every_dtype():
    quick, whole = exactness.tasks(quick=True), exactness.tasks()
    assert [task.op for task in quick] == list(dict.fromkeys(task.op for task in whole))
    assert {task._replace(quick=False) for task in quick} < set(whole)
    assert min(Counter(task.dtype for task in quick).values()) > len(quick) // 5


def test_a_quick_sweep_has_each_sample_under_one_policy_and_every_policy(spill_dir):
    count = len(opdb.samples_of(opdb.ops()["nn.functional.gelu"], torch.float32))
    part = exactness.work(exactness.Task("nn.functional.gelu", "float32", True), str(spill_dir))
    ran = {key: part.found[key] for key in part.found if key[2] == Verdict.IDENTICAL}
    assert part.samples == count > len(opdb.POLICIES)
    for device in opdb.DEVICES:
        counts = [ran[policy, device, Verdict.IDENTICAL] for policy in opdb.POLICIES]
        assert sum(counts) == count and max(counts) - min(counts) <= 1


# --- the comparison sees what it has to see ---------------------------------------------------------------------------


def first_sample(name):
    op = opdb.ops()[name]
    return op, opdb.samples_of(op, torch.float32)[0]


def verdicts(name, policy, spill_dir):
    return [outcome.verdict for outcome in opdb.outcomes(*first_sample(name), str(spill_dir), [policy])]


def test_a_replay_that_is_off_by_one_bit_is_wrong(monkeypatch, spill_dir):
    replay = rematerialise.replay

    def flipped(*args):
        storages = replay(*args)
        for storage in storages.values():
            storage[0] ^= 1
        return storages

    assert set(verdicts("mul", "recompute", spill_dir)) == {Verdict.IDENTICAL}
    monkeypatch.setattr(rematerialise, "replay", flipped)
    assert set(verdicts("mul", "recompute", spill_dir)) == {Verdict.WRONG}


def test_a_copy_back_that_is_off_by_one_bit_is_wrong(monkeypatch, spill_dir):
    read = SpillFile.read

    def flipped(self, extent, address, nbytes):
        read(self, extent, address, nbytes)
        tensor_at(address, nbytes)[0] ^= 1

    monkeypatch.setattr(SpillFile, "read", flipped)
    assert verdicts("mul", "swap", spill_dir) == [Verdict.WRONG, Verdict.IDENTICAL]  # chaos has no file


def test_an_error_that_plain_does_not_raise_is_wrong(monkeypatch, spill_dir):
    def broken(*args):
        raise ArithmeticError("injected")

    monkeypatch.setattr(rematerialise, "replay", broken)
    op, sample = first_sample("mul")
    for outcome in opdb.outcomes(op, sample, str(spill_dir), ["recompute"]):
        assert outcome.verdict is Verdict.WRONG
        assert outcome.differences[0] == "ArithmeticError: injected"


@pytest.mark.parametrize("dtype", opdb.DTYPES, ids=str)
def test_bits_tell_apart_what_equality_does_not(dtype):
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    assert opdb.bits_of(zeros[0]) != opdb.bits_of(zeros[1])
    nan = torch.tensor(float("nan"), dtype=dtype)
    assert opdb.bits_of(nan) == opdb.bits_of(nan.clone())


# --- what cannot be evicted -------------------------------------------------------------------------------------------


def test_sparse_tensors_pass_through(spill_dir):
    op = opdb.ops()["to_sparse"]
    found = {
        outcome.handled: outcome
        for sample in opdb.samples_of(op, torch.float32)
        for outcome in opdb.outcomes(op, sample, str(spill_dir))
    }
    assert all(outcome.verdict is Verdict.IDENTICAL for outcome in found.values())
    assert "sparse layout" in found[Handled.PASSED].passed


class Keeping(torch.autograd.Function):
    """Saves whatever it is given, and shows what it gets back."""

    seen: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Keeping.seen.extend(ctx.saved_tensors)
        return gradient, None


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_bsc((2, 2)),
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.ones(4).as_subclass(type("Mine", (torch.Tensor,), {})),
    ],
    ids=["coo", "csr", "bsc", "quantized", "nested", "subclass"],
)
def test_what_is_not_a_plain_strided_tensor_passes_through(make, spill_dir):
    Keeping.seen.clear()
    with opdb.quiet():
        kept = make()
        policy = opdb.policy_of("delta", str(spill_dir))
        with delta.evict(opdb.NO_MODULE, activations="0%", policy=policy, device="chaos:1") as session:
            Keeping.apply(torch.ones(2, requires_grad=True), kept).sum().backward()
    (seen,) = Keeping.seen
    assert (type(seen), seen.layout, seen.dtype) == (type(kept), kept.layout, kept.dtype)
    assert session.report().evictions == {}
    assert session.report().unevicted_peak_activation_bytes == 0
    Keeping.seen.clear()


# --- what plain PyTorch does not give twice ---------------------------------------------------------------------------


def fill_free_memory(byte: int) -> None:
    """What the next small allocations find in their memory. Through the C library: PyTorch asks it for aligned memory,
    which is cut out of larger free pieces."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    blocks = [(libc.malloc(size), size) for size in range(16, 1024, 16) for _ in range(50)]
    for address, size in blocks:
        ctypes.memset(address, byte, size)
    for address, _ in blocks:
        libc.free(address)


def test_two_plain_runs_differ():
    """In a process of its own: whether filled memory is what such an op gets hangs on all that the heap has seen."""
    code = "import test_op_database; print(*test_op_database.that_differ())"
    run = [sys.executable, "-c", code]
    found = subprocess.run(run, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.split()
    assert found == [name for entry in opdb.UNREPEATABLE if entry.here for name in entry.ops]


TRIES = 8  # with one, two processes of five did not get the memory that they had filled


def that_differ() -> list[str]:
    """Of the ops that are said not to give the same bits twice, those that do not."""
    torch.set_num_threads(1)
    found = []
    for entry in opdb.UNREPEATABLE:
        for name in entry.ops:
            op = opdb.ops()[name]
            covered = [sample for sample in opdb.samples_of(op, torch.float32) if entry.covers(op, sample)]
            if any(_differs(op, sample) for _ in range(TRIES) for sample in covered):
                found.append(name)
    return found


def _differs(op, sample) -> bool:
    fill_free_memory(0)
    first = opdb.run(op, sample)
    fill_free_memory(1)
    return first != opdb.run(op, sample)


def test_what_reads_unfilled_memory_is_never_replayed():
    """Else backward would go on with another solution than forward did."""
    assert not facts_of(torch.ops.aten.linalg_lstsq.default).replayable


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_made_from_the_result():
    result = exactness.Sweep.read(exactness.RESULT)
    assert read_places(exactness.PAGE.read_text(encoding="utf-8")) == exactness.places(result)
    assert result.wrong == []
    assert {(row.policy, row.device) for row in result.rows} == {(p, d) for p in opdb.POLICIES for d in opdb.DEVICES}
    for row in result.rows:
        assert sum(row.counts[verdict] for verdict in Verdict) == result.samples[row.dtype]
        assert sum(row.counts[handled] for handled in Handled) == result.samples[row.dtype]
