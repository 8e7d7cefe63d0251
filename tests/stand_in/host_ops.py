"""Computes every op of PyTorch's CUDA build on the host, in the memory that the stand-in for the runtime gave out.

All else is PyTorch's own: allocator, streams, events, pinned memory, generators, and autograd's thread for the device.
Results come late, in the order of their stream, so that whoever does not wait for them reads what was there before. An
op that writes into its arguments does so at once, when its stream has come to it.

The scaled dot products and cuDNN's ops, which a CPU has under other names, are written out here. Not here: recurrent
nets on CUDA, sparse tensors, what a custom kernel does.
"""

from __future__ import annotations

import ctypes
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

aten = torch.ops.aten
_RUNTIME = ctypes.CDLL(None)  # preloaded
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
# They compute nothing.
_NATIVE = frozenset(
    "empty.memory_format empty_strided as_strided view _reshape_alias view_as_real view_as_complex set_ "  # noqa: SIM905
    "set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor resize_ record_stream unfold "
    "_local_scalar_dense is_pinned _pin_memory is_set_to _has_same_storage_numel _lazy_clone".split()
)
_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Put the host's ops in the place of the kernels."""
    native_copy = torch.library.get_kernel("aten::copy_", "CUDA")
    with _no_warnings():
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            space, _, full = name.partition("::")
            packet, _, overload = full.partition(".")
            op = getattr(getattr(aten, packet, None), overload or "default", None)
            if space != "aten" or full in _NATIVE or op is None:
                continue
            _library.impl(full, _kernel(op, _WRITTEN_OUT.get(full, op)), "CUDA", allow_override=True)
        _library.impl("copy_", lambda *args: _copy(native_copy, *args), "CUDA", allow_override=True)
    torch.cuda._sleep = lambda cycles: None  # a kernel like any other; and the card is slow enough


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Each kernel that is replaced is told of on the standard error."""
    sys.stderr.flush()
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(nothing)
        os.close(stderr)


def _stream() -> int:
    return int(torch._C._cuda_getCurrentRawStream(0))


def _wait() -> None:
    """Until the current stream has come to the end of what it was given."""
    _RUNTIME.cudaStreamSynchronize(ctypes.c_void_p(_stream()))


def _host(tensor: Tensor) -> Tensor:
    """A tensor of the host over the same memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())


def _kernel(op: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    seeded = torch.Tag.nondeterministic_seeded in op.tags
    tensors = [index for index, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"]
    packet = getattr(aten, op._schema.name.partition("::")[2])

    def kernel(*args: Any, **kwargs: Any) -> Any:
        _wait()
        call = _Call()
        given, more = call.on_host(args), {name: call.on_host(value) for name, value in kwargs.items()}
        more.pop("pin_memory", None)
        run = compute
        if compute is op and any(index < len(given) and isinstance(given[index], int | float) for index in tensors):
            run = packet  # a wrapped number arrives as a Python one
        with torch._C._AutoDispatchBelowAutograd():
            if not seeded:
                return call.on_card(run(*given, **more))
            with call.drawing():
                return call.on_card(run(*given, **more))

    return kernel


class _Call:
    """One call of an op: its tensors on the host, its results on the card."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._layouts: list[tuple[Any, Any]] = []
        self._generator: torch.Generator | None = None

    def on_host(self, value: Any) -> Any:
        match value:
            case Tensor() if value.is_cuda:
                for card, host in self._pairs:
                    if card is value:
                        return host
                self._pairs.append((value, _host(value)))
                self._layouts.append((value.size(), value.stride()))
                return self._pairs[-1][1]
            case list() | tuple():
                return type(value)(self.on_host(each) for each in value)
            case torch.device(type="cuda"):
                return torch.device("cpu")
            case torch.Generator():
                self._generator = value
                return None
        return value

    def on_card(self, result: Any) -> Any:
        self._resize()
        return self._results(result)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the card's generator. A kernel does so when it has memory for its results."""
        generator = self._generator or torch.cuda.default_generators[0]
        state = generator.get_state()
        numbers = state.view(torch.int64).clone()
        numbers[-1] += 4
        generator.set_state(numbers.view(torch.uint8))
        hosts = torch.get_rng_state()
        torch.default_generator.manual_seed(zlib.crc32(state.numpy().tobytes()))
        try:
            yield
        except torch.OutOfMemoryError:
            generator.set_state(state)
            raise
        finally:
            torch.set_rng_state(hosts)

    def _resize(self) -> None:
        """An argument for results may have been too small."""
        for (card, host), layout in zip(self._pairs, self._layouts, strict=True):
            if (host.size(), host.stride()) != layout:
                card.resize_(host.size())
                _host(card).copy_(host)

    def _results(self, result: Any) -> Any:
        if isinstance(result, list | tuple):
            return type(result)(self._results(each) for each in result)
        if not isinstance(result, Tensor):
            return result
        for card, host in self._pairs:
            if host is result:
                return card
        for card, host in self._pairs:
            if result.numel() and host.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
                return card.as_strided(result.size(), result.stride(), result.storage_offset())
        return _delivered(result)


def _delivered(result: Tensor) -> Tensor:
    """The result on the card, in a while."""
    card = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device="cuda")
    if not result.numel():
        return card
    if not is_non_overlapping_and_dense_or_false(result):
        _wait()
        _host(card).copy_(result)
        return card
    nbytes = ctypes.c_size_t(result.numel() * result.element_size())
    to, source = ctypes.c_void_p(card.data_ptr()), ctypes.c_void_p(result.data_ptr())
    _RUNTIME.standInDeliver(to, source, nbytes, ctypes.c_void_p(_stream()))
    return card


def _copy(native: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What PyTorch hands to the runtime as one copy stays that."""
    with torch._C._AutoDispatchBelowAutograd():
        whole = to.is_contiguous() and source.is_contiguous() and to.size() == source.size()
        if whole and to.dtype == source.dtype:
            native.call_boxed(_KEY, to, source, non_blocking)
        else:
            _wait()
            (_host(to) if to.is_cuda else to).copy_(_host(source) if source.is_cuda else source)
    return to


# -- ops that a CPU has under other names -----------------------------------------------------------------------------
def _convolution(x: Tensor, w: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, *flags: bool) -> Tensor:
    return aten.convolution.default(x, w, None, stride, padding, dilation, False, [0] * len(stride), groups)


def _transposed(
    x: Tensor, w: Tensor, padding: Any, more: Any, stride: Any, dilation: Any, groups: int, *flags: bool
) -> Tensor:
    return aten.convolution.default(x, w, None, stride, padding, dilation, True, more, groups)


def _batch_norm(*args: Any) -> tuple[Tensor, ...]:
    return (*aten.native_batch_norm.default(*args), torch.zeros(0, dtype=torch.uint8))


def _batch_norm_backward(
    x: Tensor, grad: Tensor, w: Tensor, mean: Any, var: Any, save_mean: Any, save_var: Any, eps: float, reserve: Tensor
) -> tuple[Tensor, ...]:
    wanted = [True, True, True]
    return aten.native_batch_norm_backward.default(grad, x, w, mean, var, save_mean, save_var, True, eps, wanted)


def _weights(
    q: Tensor, k: Tensor, bias: Tensor | None, seed: Tensor, dropout: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, probabilities, and what dropout multiplies those with."""
    score = (q.float() @ k.float().transpose(-2, -1)) * scale
    if bias is not None:
        score = score + bias
    if causal:
        later = ~torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
        score = score.masked_fill(later, float("-inf"))
    probability = score.softmax(-1)
    if not dropout:
        return score, probability, torch.ones(())
    drawn = torch.rand(probability.shape, generator=torch.Generator().manual_seed(int(seed)))
    return score, probability, (drawn >= dropout).float() / (1 - dropout)


def _as_heads(made: Tensor, like: Tensor) -> Tensor:
    """In the layout that CUDA's kernels give: batch, sequence, heads."""
    return made.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    wants_sums: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seed = torch.randint(0, 2**31, ()) if dropout else torch.empty((), dtype=torch.int64)
    score, probability, kept = _weights(q, k, bias, seed, dropout, causal, scale or q.size(-1) ** -0.5)
    sums = score.logsumexp(-1).float() if wants_sums else torch.empty(0)
    return _as_heads((probability * kept) @ v.float(), q), sums, seed, torch.empty((), dtype=torch.int64)


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor | None,
    dropout: float,
    wanted: Sequence[bool],
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    scale, grad = scale or q.size(-1) ** -0.5, grad.float()
    _, probability, kept = _weights(q, k, bias, seed, dropout, causal, scale)
    of_v = (probability * kept).transpose(-2, -1) @ grad
    of_probability = (grad @ v.float().transpose(-2, -1)) * kept
    of_score = probability * (of_probability - (of_probability * probability).sum(-1, keepdim=True))
    of_q, of_k = of_score @ k.float() * scale, of_score.transpose(-2, -1) @ q.float() * scale
    return _as_heads(of_q, q), _as_heads(of_k, k), _as_heads(of_v, v), of_score if wanted[3] else torch.empty(0)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False, **more: Any
) -> tuple[Any, ...]:
    out, sums, seed, _ = _attention(q, k, v, None, True, dropout, causal, **more)
    state = torch.stack([seed, seed]).to(torch.uint64) if dropout else torch.zeros(2, dtype=torch.uint64)
    unused = torch.empty((), dtype=torch.uint64)
    return out, sums, None, None, q.size(2), k.size(2), state, unused, torch.empty(0)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any, **more: Any
) -> tuple[Tensor, ...]:
    *_, dropout, causal, state, _ = rest
    wanted, seed = [True, True, True, False], state[0].to(torch.int64)
    return _attention_backward(grad, q, k, v, None, out, sums, seed, None, dropout, wanted, causal, **more)[:3]


def _cudnn_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    wants_sums: bool,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    **more: Any,
) -> tuple[Any, ...]:
    out, sums, seed, offset = _attention(q, k, v, bias, True, dropout, causal, **more)
    return out, sums.unsqueeze(-1), None, None, q.size(2), k.size(2), seed, offset, torch.empty(0)


def _cudnn_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    *rest: Any,
    **more: Any,
) -> tuple[Tensor, ...]:
    *_, dropout, causal = rest
    wanted = [True, True, True, False]
    return _attention_backward(grad, q, k, v, bias, out, sums, seed, offset, dropout, wanted, causal, **more)[:3]


_WRITTEN_OUT: dict[str, Callable[..., Any]] = {
    "cudnn_convolution": _convolution,
    "cudnn_convolution_transpose": _transposed,
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn_attention,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
}
