"""`scripts/gpu-check` as far as it goes without a card."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def gpu_check(where: Path, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [ROOT / "scripts/gpu-check", *arguments], capture_output=True, text=True, cwd=where, env=environment
    )


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "give the folder for the results"),
        (["--device", "tpu", "results"], 2, "give the folder for the results"),
        (["--device"], 2, "give the folder for the results"),
        (["results"], 3, "no CUDA device: torch "),
    ],
)
def test_without_a_card(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    done = gpu_check(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    done = gpu_check(tmp_path, "results", python=str(bare))
    assert done.returncode == 4
    assert f"{bare} has no torch psutil pynvml yaml pydantic pydantic_core typer" in done.stderr


@pytest.mark.slow
def test_a_dry_run_leaves_all_its_files(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--device", "cpu", "results")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        "bench.json",
        "bench.txt",
        "delta.jsonl",
        "doctor.json",
        "memory.svg",
        "tests.txt",
    ]
    result = json.loads((tmp_path / "results/bench.json").read_text())
    assert result["gradients_identical"] and [model["model"] for model in result["models"]] == ["unet"]
    assert "test_device_conformance.py" in (tmp_path / "results/tests.txt").read_text()
    assert (tmp_path / "results/memory.svg").read_text().startswith("<svg")
