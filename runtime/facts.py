"""What a reader of measured figures has to know: hardware, versions, commit, day."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from delta.policies.loader import load
from delta.runtime import monitor
from delta.runtime.device import make_device
from delta.units import format_bytes


def machine_facts(device: str = "cpu", policy: str = "delta") -> dict[str, str]:
    """What a reader has to know to compare: hardware, versions, commit, day. Each fact is a text."""
    facts = {"processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores"}
    facts["memory"] = format_bytes(monitor.host_facts().total_bytes)
    if device != "cpu":
        facts["cards"] = monitor.gpus().text
    facts["host tier"] = _link(device, policy)
    facts["system"] = platform.platform(terse=True)
    facts["versions"] = f"Python {platform.python_version()}, torch {torch.__version__}{_transformers()}"
    return {**facts, "commit": _commit(), "day": datetime.now(UTC).date().isoformat()}


def _transformers() -> str:
    try:
        return f", transformers {version('transformers')}"
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _link(device: str, policy: str) -> str:
    made = make_device(device, load(policy).host)
    try:
        speed = made.bandwidth()
    finally:
        made.close()
    where = "spill file" if made.kind == "cpu" else "pinned memory"
    return f"{where}, {format_bytes(int(speed.out_bytes_per_s))}/s out, {format_bytes(int(speed.in_bytes_per_s))}/s in"


def _commit() -> str:
    """The commit of the checkout this file is in; with a + where the files differ from it. A copy of the files alone
    does not know it: there `DELTA_COMMIT` in the environment says."""
    if told := os.environ.get("DELTA_COMMIT"):
        return told
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
