"""``deltactl doctor``: what Delta finds on this machine, what it measures, what is missing and how to get it.

Every finding stands on its own: something that fails is reported, and the rest still is.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from delta.config import HostConfig
from delta.policies.loader import load
from delta.runtime.device import make_device
from delta.runtime.monitor import host_facts, spill_facts
from delta.runtime.rawmem import GLIBC_SETTINGS, HUGE_PAGES, heap_lacks_huge_pages
from delta.text import aligned
from delta.units import format_bytes

_PACKAGES = (
    "delta-evict",
    "torch",
    "psutil",
    "nvidia-ml-py",
    "pydantic",
    "numpy",
    "scipy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "plotly",
)


@dataclass(frozen=True, slots=True)
class DeviceFinding:
    """One device and its measured copy speed each way; ``problem`` says why it could not be used or measured."""

    name: str
    title: str
    capacity_bytes: int | None = None
    out_bytes_per_s: float | None = None
    in_bytes_per_s: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that would serve and is not here."""

    what: str
    why: str
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings. A version of None means the package is not installed."""

    python: str
    system: str
    versions: dict[str, str | None]
    cuda: str | None
    cores: int
    ram_bytes: int
    ram_available_bytes: int
    spill_directory: str
    spill_free_bytes: int | None
    devices: tuple[DeviceFinding, ...]
    missing: tuple[Missing, ...]

    def as_dict(self) -> dict[str, Any]:
        """The findings, JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        directory = self.spill_directory
        spill = f"{directory}, not writable" if self.spill_free_bytes is None else spill_facts(directory).text
        rows = [
            ("python", f"{self.python} on {self.system}"),
            *((name, number or "not installed") for name, number in self.versions.items()),
            ("CUDA of torch", self.cuda or "none (CPU build)"),
            ("cores", str(self.cores)),
            ("memory", f"{format_bytes(self.ram_bytes)}, {format_bytes(self.ram_available_bytes)} available"),
            ("spill directory", spill),
            *((f"device {device.name}", _device_text(device)) for device in self.devices),
            *((f"missing {item.what}", f"{item.why}; {item.how}") for item in self.missing),
        ]
        return aligned(rows)


def _device_text(device: DeviceFinding) -> str:
    size = "" if device.capacity_bytes is None else f", {format_bytes(device.capacity_bytes)}"
    if device.problem is not None or device.out_bytes_per_s is None or device.in_bytes_per_s is None:
        return f"{device.title}{size}; {device.problem}"
    out, back = format_bytes(int(device.out_bytes_per_s)), format_bytes(int(device.in_bytes_per_s))
    return f"{device.title}{size}; copies out {out}/s, in {back}/s"


def diagnose() -> Diagnosis:
    """Look at the machine and measure its devices. Takes about a second; changes nothing."""
    host = load("delta").host
    memory = host_facts()
    spill, spill_free_bytes = _spill(host)
    return Diagnosis(
        python=platform.python_version(),
        system=platform.platform(terse=True),
        versions={name: _version(name) for name in _PACKAGES},
        cuda=torch.version.cuda,
        cores=len(os.sched_getaffinity(0)),
        ram_bytes=memory.total_bytes,
        ram_available_bytes=memory.available_bytes,
        spill_directory=spill,
        spill_free_bytes=spill_free_bytes,
        devices=tuple(_measured(name, host) for name in _device_names()),
        missing=tuple(_missing()),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _spill(host: HostConfig) -> tuple[str, int | None]:
    """The directory of spill files, and what is free there; None where none can be made. Where there is no directory
    for temporary files, the reason stands for it."""
    try:
        spill = host.spill_dir or tempfile.gettempdir()
        return spill, shutil.disk_usage(spill).free if os.access(spill, os.W_OK | os.X_OK) else None
    except OSError as error:
        return error.strerror or str(error), None


def _device_names() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _title(name: str) -> str:
    return platform.processor() or platform.machine() if name == "cpu" else torch.cuda.get_device_name(name)


def _measured(name: str, host: HostConfig) -> DeviceFinding:
    title = name
    try:
        title = _title(name)
        device = make_device(name, host)
        try:
            speed = device.bandwidth()
            return DeviceFinding(name, title, device.capacity_bytes(), speed.out_bytes_per_s, speed.in_bytes_per_s)
        finally:
            device.close()
    except Exception as error:  # whatever a driver throws is the finding
        return DeviceFinding(name, title, problem=f"not usable: {error}")


def _missing() -> Iterator[Missing]:
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        yield Missing(
            "torch with CUDA", "an NVIDIA driver is here, this torch is a CPU build", "see https://pytorch.org"
        )
    if torch.version.cuda is not None and find_spec("cupy") is None:
        extra = f"cuda{torch.version.cuda.partition('.')[0]}"
        yield Missing(
            "CuPy",
            "where the driver registers no memory, PyTorch pins it and keeps it",
            f"pip install 'delta-evict[{extra}]'",
        )
    if heap_lacks_huge_pages():
        yield Missing(
            "huge pages for the heap",
            "on a CPU, what is swapped takes a little more from compute",
            f"start Python with {GLIBC_SETTINGS}={HUGE_PAGES} in the environment",
        )
    if find_spec("scipy") is None:
        yield Missing("SciPy", "monet, and better plans beside the training, need it", "pip install scipy")
    if find_spec("plotly") is None:
        yield Missing("Plotly", "only text, SVG and Chrome traces are drawn", "pip install 'delta-evict[plot]'")
