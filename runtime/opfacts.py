"""What is known of an aten op beyond its name: whether it may be run again, and what it writes.

Decided once per overload, from the schema and tags, with lists only where PyTorch's own marks are missing (rules 4
and 6 of the design, section 6):

- the batch-norm family updates running statistics that its schema does not mark as written;
- `rrelu_with_noise` writes its noise argument;
- what writes into an argument and gives something new besides (an observer of quantization that moves its ranges) has
  read what it then wrote over, so it is not run again; of batch norm's statistics nothing was read;
- results that depend on data (`topk`, `sort`, ...) decide what later ops do, so they are kept rather than made again;
- cuDNN's recurrent nets draw their dropout from a state of their own, which they move on in silence;
- on a CPU threads that accumulate into one place may do so in any order;
- on CUDA, ops whose threads add or write to one place in any order need not give the same bits twice, and of the ops
  of backward hardly any promises to: of those, only the pointwise ones are run again there;
- convolutions there may take another algorithm the second time (`cudnn_chooses`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from delta.runtime import cudnn

if TYPE_CHECKING:
    from delta.runtime.device.base import Device

# The batch-norm family: `running_mean` and `running_var` are written although most schemas do not say so.
_UPDATES_STATISTICS = {
    "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm",
    "batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
}  # fmt: skip
_DATA_DEPENDENT = {
    "topk", "sort", "argsort", "msort", "kthvalue", "mode", "median", "nanmedian", "multinomial", "nonzero",
    "unique_dim", "_unique", "_unique2", "unique_consecutive", "unique_dim_consecutive",
}  # fmt: skip
_NEVER = {
    "rrelu_with_noise", "rrelu_with_noise_", "item", "_local_scalar_dense", "set_", "resize_", "resize_as_",
    "_cudnn_rnn", "_cudnn_init_dropout_state", "miopen_rnn", "_unsafe_masked_index_put_accumulate",
}  # fmt: skip
# Where their argument `accumulate` is true, on a CPU too.
_ACCUMULATE = {
    "index_put", "index_put_", "_index_put_impl", "_index_put_impl_", "_unsafe_index_put", "put", "put_",
}  # fmt: skip
# From the documentation of `torch.use_deterministic_algorithms`.
_UNORDERED_ON_CUDA = {
    *_ACCUMULATE, "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
    "bincount", "histc", "cumsum", "cumprod", "logcumsumexp", "index_reduce", "index_reduce_", "index_copy",
    "index_copy_", "scatter", "scatter_", "embedding_bag", "_embedding_bag", "ctc_loss", "_ctc_loss", "_cudnn_ctc_loss",
    "nll_loss2d_forward", "max_unpool2d", "max_unpool3d", "cudnn_convolution_transpose",
}  # fmt: skip
_UNFILLED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
_CUDNN_CHOOSES = {
    "convolution", "_convolution", "convolution_overrideable", "cudnn_convolution", "cudnn_convolution_transpose",
    "cudnn_convolution_relu", "cudnn_convolution_add_relu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpFacts:
    """`mutates`: positions (or names, for keyword arguments) of arguments that are written.

    `statistics`: positions of running statistics, written where the argument at `training` says so (None: always).

    `cudnn_chooses`: on CUDA cuDNN chooses the algorithm, and with it the last bits (`cudnn.py`). `transposed`: the
    position of the argument that says whether a convolution is; it runs as the gradient of another one there, which may
    add up in any order.

    `accumulates`: the position of the argument that says whether threads add to one place in any order.

    `unfilled`: it gives memory that somebody has to fill.

    `in_place`: of an element-wise op, the overload that does the same into its first argument.

    `plain`: it writes nothing, and on any device gives what its arguments alone say.
    """

    name: str
    replayable: bool
    replayable_on_cuda: bool
    cudnn_chooses: bool
    seeded: bool
    mutates: tuple[int | str, ...]
    statistics: tuple[int, ...]
    training: int | None
    accumulates: int | None
    transposed: int | None
    view: bool  # its results share an input's storage and nothing is written
    unfilled: bool
    in_place: OpOverload | None
    writes_lists: bool  # of tensors, into which PyTorch counts no writes under a dispatch mode
    idle: bool  # a view, or it gives no tensor at all (a number, a mark for the profiler) and writes none
    writes: bool
    plain: bool

    def replays_on(self, kind: str, args: Sequence[Any]) -> bool:
        """Whether this call on a device of that `kind` gives the same bits again, as PyTorch is set now."""
        if kind != "cuda":
            at = self.accumulates
            accumulates = at is not None and len(args) > at and args[at]
            return self.replayable and (not accumulates or torch._C._get_deterministic_algorithms())
        if self.cudnn_chooses and (cudnn.fell_back() or cudnn.searches()):
            return False
        if self.transposed is not None and args[self.transposed] and not _in_order():
            return False
        return self.replayable_on_cuda

    def refusals(self, device: Device) -> int:
        """How often the allocator has had nothing to give, if that may have the op take another algorithm; else 0."""
        return device.refusals() if self.cudnn_chooses else 0

    def statistics_written(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Positions of the running statistics this call updates: none when the op runs in evaluation mode."""
        if not self.statistics or (self.training is not None and not args[self.training]):
            return ()
        return tuple([position for position in self.statistics if args[position] is not None])


def _in_order() -> bool:
    """Whether cuDNN is told to add up in one order."""
    return torch._C._get_cudnn_deterministic() or torch._C._get_deterministic_algorithms()


def facts_of(func: OpOverload) -> OpFacts:
    """The facts of one overload."""
    known = KNOWN.get(id(func))
    if known is None:
        known = KNOWN[id(func)] = func, _facts(func)
    return known[1]


# By identity, since hashing an overload takes a call of Python; each is kept, so that its identity stays its own.
KNOWN: dict[int, tuple[OpOverload, OpFacts]] = {}


def _facts(func: OpOverload) -> OpFacts:
    schema = func._schema
    short = schema.name.split("::")[1]
    mutates = _mutates(func)
    names = [argument.name for argument in schema.arguments]
    statistics: tuple[int, ...] = ()
    if func.namespace == "aten" and short in _UPDATES_STATISTICS:
        statistics = tuple(names.index(name) for name in ("running_mean", "running_var") if name in names)
    aliases = [result.alias_info for result in schema.returns]
    view = bool(aliases) and not mutates and all(alias is not None and not alias.is_write for alias in aliases)
    tags = set(func.tags)
    may = (
        func.namespace == "aten"
        and short not in _NEVER
        and short not in _DATA_DEPENDENT
        and torch.Tag.dynamic_output_shape not in tags
        and torch.Tag.data_dependent_output not in tags
        and torch.Tag.nondeterministic_bitwise not in tags
        and (bool(statistics) or not (mutates and None in aliases))
    )
    in_any_order = short in _UNORDERED_ON_CUDA or ("_backward" in short and torch.Tag.pointwise not in tags)
    cudnn_chooses = func.namespace == "aten" and short in _CUDNN_CHOOSES
    seeded, writes = torch.Tag.nondeterministic_seeded in tags, bool(mutates or statistics)
    return OpFacts(
        name=f"{func.namespace}.{short}",
        replayable=may,
        replayable_on_cuda=may and not in_any_order,
        cudnn_chooses=cudnn_chooses,
        seeded=seeded,
        mutates=mutates,
        statistics=statistics,
        training=names.index("training") if statistics and "training" in names else None,
        accumulates=names.index("accumulate") if func.namespace == "aten" and short in _ACCUMULATE else None,
        transposed=names.index("transposed") if "transposed" in names else None,
        view=view,
        unfilled=func.namespace == "aten" and short in _UNFILLED,
        in_place=_in_place(func) if may and not mutates and torch.Tag.pointwise in tags else None,
        writes_lists=not short.startswith("_fused_")  # which count none anywhere
        and any(
            argument.alias_info is not None and argument.alias_info.is_write and "List" in str(argument.type)
            for argument in schema.arguments
        ),
        idle=view or not (mutates or statistics or any("Tensor" in str(result.type) for result in schema.returns)),
        writes=writes,
        plain=may and not (in_any_order or cudnn_chooses or seeded or writes),
    )


def _mutates(func: OpOverload) -> tuple[int | str, ...]:
    """The places, or names, of the arguments that it writes into. `set_` gives a tensor another storage, and writes
    into none."""
    if func._schema.name.endswith("::set_"):
        return ()
    return tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _in_place(func: OpOverload) -> OpOverload | None:
    packet = getattr(torch.ops.aten, f"{func._schema.name.split('::')[1]}_", None)
    if packet is None or func._overloadname not in packet.overloads():
        return None
    found: OpOverload = getattr(packet, func._overloadname)
    alike = [[(each.name, str(each.type)) for each in one._schema.arguments] for one in (func, found)]
    return found if alike[0] == alike[1] and len(func._schema.returns) == 1 else None
