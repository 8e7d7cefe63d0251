"""Promise P1 with several processes: two of them, over gloo, started by torchrun as a user would start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("distributed_worker.py")
PROCESSES = 2
PATIENCE_S = 300
DDP = ("ddp", "ddp_static_graph", "ddp_bucket_view", "ddp_no_sync", "ddp_unused_parameters", "ddp_batch_norm")
FSDP = ("fsdp", "fsdp_no_reshard", "fsdp_mixed_precision", "fsdp_compiled", "fsdp_columns")
QUICK = [f"{name}:recompute" for name in (*DDP, *FSDP)] + ["ddp:swap", "fsdp:swap"]
SLOW = [f"{name}:{policy}" for name in (*DDP, *FSDP) for policy in ("swap", "delta")]
SLOW = [given for given in SLOW if given not in QUICK] + [f"flat_fsdp:{policy}" for policy in ("swap", "recompute")]


@cache
def run(cases: tuple[str, ...], processes: int) -> subprocess.CompletedProcess[str]:
    """Run the cases one after the other in one set of processes, once however many tests look at them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += [str(WORKER), *cases]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def results(cases: tuple[str, ...], processes: int = PROCESSES) -> dict[str, dict[str, Any]]:
    ran = run(cases, processes)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {f"{result['case']}:{result['policy']}": result for result in found}


def check(result: dict[str, Any]) -> None:
    """Equal in every number of every process; steps were observed and planned; weights were left alone."""
    assert result["different"] == 0
    assert set(result["modes"]) == {"observe", "planned"}
    assert sum(result["evictions"].values()) > 0
    assert result["weights_evictable"] == 0
    assert (result["weights_saved"] > 0) is result["case"].startswith("fsdp")


@pytest.mark.parametrize("case", QUICK)
def test_two_processes(case):
    check(results(tuple(QUICK))[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_two_processes_all_policies(case):
    check(results(tuple(SLOW))[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ddp:recompute", "fsdp:recompute"])
def test_one_process(case):
    """FSDP2 then fills its weights by another way: a plain copy."""
    check(results(("ddp:recompute", "fsdp:recompute"), processes=1)[case])
