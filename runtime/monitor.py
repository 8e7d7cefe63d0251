"""What the machine says about itself: cards (NVML), memory (psutil, control groups), the spill directory.

Nothing here raises because a driver, a card or a file is missing: the text of the answer says what is missing and how
to get it.
"""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import pynvml  # type: ignore[import-untyped]

from delta.runtime.cgroups import memory_limits
from delta.units import format_bytes

T = TypeVar("T")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Memory that this process may use, on the machine or in its container, and memory that it does use."""

    total_bytes: int
    available_bytes: int
    resident_bytes: int
    cpu_count: int

    def __str__(self) -> str:
        total, available, resident = map(format_bytes, (self.total_bytes, self.available_bytes, self.resident_bytes))
        return f"{total} memory, {available} available, {resident} resident in this process, {self.cpu_count} cores"


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One card as its driver sees it: all processes' memory, not only ours. None where the driver does not tell."""

    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    driver: str
    pcie_generation: int | None
    pcie_width: int | None
    numa_node: int | None

    def __str__(self) -> str:
        link = "PCIe unknown" if self.pcie_generation is None else f"PCIe {self.pcie_generation}.0 x{self.pcie_width}"
        node = "NUMA node unknown" if self.numa_node is None else f"NUMA node {self.numa_node}"
        used, total = format_bytes(self.used_bytes), format_bytes(self.total_bytes)
        return f"{self.name}, {used} of {total} used on the card, {link}, {node}, driver {self.driver}"


@dataclass(frozen=True, slots=True)
class Gpus:
    """All cards, or a text that says why there are none."""

    cards: tuple[GpuFacts, ...]
    text: str


@dataclass(frozen=True, slots=True)
class SpillFacts:
    """The directory for the spill file. ``in_memory``: its file system lives in memory, spilling there saves none."""

    directory: str
    file_system: str
    free_bytes: int
    in_memory: bool
    text: str


def host_facts() -> HostFacts:
    memory, groups = psutil.virtual_memory(), list(memory_limits())
    total = min([int(memory.total), *(group.limit_bytes for group in groups)])
    available = min([int(memory.available), *(group.available_bytes for group in groups)])
    resident = psutil.Process().memory_info().rss
    return HostFacts(total, available, int(resident), os.cpu_count() or 1)


def gpus() -> Gpus:
    """The cards, asked from NVML."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus((), f"no NVIDIA driver answers ({error}): install one, or run on the CPU")
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        cards = tuple(_card(handle, driver) for handle in handles)
    except pynvml.NVMLError as error:
        return Gpus((), f"the NVIDIA driver does not describe its cards ({error})")
    finally:
        pynvml.nvmlShutdown()
    return Gpus(cards, "; ".join(map(str, cards)) or "the NVIDIA driver runs, but has no card")


def gpu(uuid: str) -> GpuFacts | None:
    """The card with this UUID, as torch knows it (torch leaves the prefix out). Its index differs under
    CUDA_VISIBLE_DEVICES.
    """
    wanted = uuid.removeprefix("GPU-")
    return next((card for card in gpus().cards if card.uuid.removeprefix("GPU-") == wanted), None)


def maps_memory(index: int) -> bool:
    """Whether the driver of this card (by torch's index) maps memory to addresses of one's choice, which the
    allocator's expandable segments need. Virtual cards may not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    card, answer = ctypes.c_int(), ctypes.c_int()
    failed = driver.cuDeviceGet(ctypes.byref(card), index)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(answer), _VIRTUAL_MEMORY, card)
    return not failed and bool(answer.value)


def _card(handle: object, driver: str) -> GpuFacts:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    pci = _told(lambda: str(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    return GpuFacts(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        driver=driver,
        pcie_generation=_told(lambda: int(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))),
        pcie_width=_told(lambda: int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
        numa_node=None if pci is None else pci_numa_node(pci),
    )


def _told(ask: Callable[[], T]) -> T | None:
    """The answer, or None where this card or driver does not support the question."""
    try:
        return ask()
    except pynvml.NVMLError:
        return None


def pci_numa_node(bus_id: str, devices: Path = _PCI_DEVICES) -> int | None:
    """The NUMA node a PCI device hangs on; None on machines with one node, or where the kernel does not tell.

    NVML writes the domain with eight digits, sysfs with four.
    """
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((devices / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def node_cpus(node: int, nodes: Path = _NODES) -> frozenset[int]:
    """The CPUs of a NUMA node; empty where the kernel does not tell."""
    try:
        parts = (nodes / f"node{node}" / "cpulist").read_text().strip().split(",")
        bounds = [tuple(map(int, part.split("-"))) for part in parts if part]
    except (OSError, ValueError):
        return frozenset()
    return frozenset(cpu for bound in bounds for cpu in range(bound[0], bound[-1] + 1))


def spill_facts(directory: str) -> SpillFacts:
    """Where a spill file in this directory would lie."""
    try:
        facts = os.statvfs(directory)
    except OSError as error:
        return SpillFacts(
            directory, "?", 0, False, f"{directory} cannot be used ({error.strerror}): set host.spill_dir in the policy"
        )
    free_bytes = facts.f_bavail * facts.f_frsize
    kind = _file_system(os.path.realpath(directory))
    in_memory = kind in ("tmpfs", "ramfs")
    text = f"{directory} ({kind}), {format_bytes(free_bytes)} free"
    if in_memory:
        text += ": this lives in memory, so spilling there saves none; set host.spill_dir to a directory on disk"
    return SpillFacts(directory, kind, free_bytes, in_memory, text)


def _file_system(path: str) -> str:
    """The type of the file system that the longest mount point above the path belongs to."""
    best, kind = "", "?"
    for part in psutil.disk_partitions(all=True):
        inside = part.mountpoint == "/" or path == part.mountpoint or path.startswith(part.mountpoint + "/")
        if inside and len(part.mountpoint) >= len(best):
            best, kind = part.mountpoint, part.fstype
    return kind
