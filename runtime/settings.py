"""Settings of the process that decide which kernel an op takes and what bits it gives.

A program may change them between forward and backward (`torch.backends.mkldnn.flags` around a layer, a loss in full
precision, another number of threads), so a replay runs under those of forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

Settings = tuple[Any, ...]


def _set_deterministic(on: bool) -> None:
    torch._C._set_deterministic_algorithms(on, warn_only=torch._C._get_deterministic_algorithms_warn_only())


def _precision(backend: str, op: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return partial(torch._C._get_fp32_precision_getter, backend, op), partial(_set_precision, backend, op)


def _set_precision(backend: str, op: str, precision: str) -> None:
    """Where that is what is set for all backends or ops, the op goes on following those."""
    torch._C._set_fp32_precision_setter(backend, op, "none")
    if torch._C._get_fp32_precision_getter(backend, op) != precision:
        torch._C._set_fp32_precision_setter(backend, op, precision)


def _flushes() -> bool:
    """Whether this thread takes subnormal numbers for zero; PyTorch sets that, and does not say it."""
    return _LEAST_NORMAL * 0.5 == 0.0


def _reductions(read: Callable[[], Any], write: Callable[..., Any]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Two settings in one: whether a product may add up in reduced precision, and whether in parts."""
    return read, lambda value: write(*value)


_LEAST_NORMAL = sys.float_info.min
_EVERYWHERE: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_deterministic_algorithms, _set_deterministic),
)
_ON_CPU = (
    (torch.get_num_threads, torch.set_num_threads),
    (_flushes, torch.set_flush_denormal),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    (torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled),
    (
        torch._C._get_cpu_allow_fp16_reduced_precision_reduction,  # type: ignore[attr-defined]
        torch._C._set_cpu_allow_fp16_reduced_precision_reduction,  # type: ignore[attr-defined]
    ),
    _precision("mkldnn", "matmul"),
    _precision("mkldnn", "conv"),
)
_ON_CUDA = (
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    _precision("cuda", "matmul"),
    _precision("cuda", "conv"),
    _reductions(
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        torch._C._set_cublas_allow_fp16_reduced_precision_reduction,
    ),
    _reductions(
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        torch._C._set_cublas_allow_bf16_reduced_precision_reduction,
    ),
    (torch._C._get_cublas_allow_fp16_accumulation, torch._C._set_cublas_allow_fp16_accumulation),
    (torch._C._get_blas_preferred_backend, torch._C._set_blas_preferred_backend),
    (torch._C._get_linalg_preferred_backend, torch._C._set_linalg_preferred_backend),
)
_ALL = _EVERYWHERE + _ON_CPU + (_ON_CUDA if torch.backends.cuda.is_built() else ())
_READ = tuple(read for read, _ in _ALL)


def current() -> Settings:
    """The settings as they are now."""
    return tuple([read() for read in _READ])


def under(settings: Settings) -> AbstractContextManager[None]:
    """Settings as they were; afterwards as they are now."""
    now = current()
    return _AS_THEY_ARE if now == settings else _changed(now, settings)


_AS_THEY_ARE = nullcontext()


@contextmanager
def _changed(now: Settings, settings: Settings) -> Iterator[None]:
    _change(now, settings)
    try:
        yield
    finally:
        _change(settings, now)


def _change(now: Settings, wanted: Settings) -> None:
    for (_, write), is_now, value in zip(_ALL, now, wanted, strict=True):
        if is_now != value:
            write(value)
