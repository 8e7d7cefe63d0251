"""Ways to pin host memory for a CUDA device, best first: our own mapping registered with the driver, CuPy, PyTorch.

Registering takes a third of the time of the runtime's own allocation, which is CuPy's: 0.16 s for a GiB instead of 0.47
on an H100 (both are copied from and to at the same 54 GB/s), and pinning is done while a step waits. CuPy serves where
the driver registers nothing. Its pool rounds and keeps blocks too, so its plain `PinnedMemory` is used. Where there is
no CuPy it is PyTorch's allocator, which keeps what it was given until the process ends. Pages come
from the card's NUMA node when the allocating thread runs there at the first touch, so the thread moves there for that
moment.
"""

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from delta.runtime.host import Slab, SlabSource
from delta.runtime.monitor import node_cpus
from delta.runtime.rawmem import AlignedBuffer, tensor_at

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context, so for every card


def slab_source(numa_node: int | None) -> SlabSource:
    """The best way that works, with pages from that node, by the card that is current when it is asked for a slab."""
    cpus = frozenset[int]() if numa_node is None else node_cpus(numa_node)

    def source(nbytes: int) -> Slab:
        with running_on(cpus):
            return _pinned_slab(nbytes)

    return source


@contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """Keep this thread on these CPUs, as far as it is allowed to use them."""
    allowed = os.sched_getaffinity(0)
    if not cpus & allowed:
        yield
        return
    os.sched_setaffinity(0, cpus & allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _pinned_slab(nbytes: int) -> Slab:
    with suppress(RuntimeError):
        return _registered_slab(nbytes)
    if importlib.util.find_spec("cupy") is not None:
        return _cupy_slab(nbytes)
    return _torch_slab(nbytes)


def _registered_slab(nbytes: int) -> Slab:
    """Memory of our own, touched here and then registered: exact to the page."""
    buffer = AlignedBuffer(nbytes)
    memory = torch.frombuffer(buffer.view, dtype=torch.uint8)
    buffer.keep_from_forks()
    ctypes.memset(buffer.address, 0, nbytes)  # by this thread: an op of PyTorch's is shared out to others
    runtime, card = torch.cuda.cudart(), torch.cuda.current_device()
    status = int(runtime.cudaHostRegister(buffer.address, nbytes, _PORTABLE))
    if status:
        _forget_error()
        raise RuntimeError(f"cudaHostRegister says error {status}")

    def release() -> None:
        torch.cuda.synchronize(card)  # no transfer may be using the pages
        with torch.cuda.device(card):
            runtime.cudaHostUnregister(buffer.address)

    return Slab(memory, release)


def _forget_error() -> None:
    """CUDA remembers a call that failed until somebody asks, and PyTorch asks after each launch of a kernel: the next
    op of the program would be told of this one."""
    with suppress(RuntimeError):
        torch.cuda._sleep(0)


def _cupy_slab(nbytes: int) -> Slab:
    cuda = importlib.import_module("cupy").cuda
    pinned = [cuda.PinnedMemory(nbytes)]  # unpinned and freed with its last reference
    return Slab(tensor_at(int(pinned[0].ptr), nbytes), pinned.clear)


def _torch_slab(nbytes: int) -> Slab:
    """A slab is a power of two as a rule, so PyTorch's rounding costs nothing. It is freed with its last piece."""
    return Slab(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True), _nothing)


def _nothing() -> None:
    pass
