"""Trains under `budget=` in a process of its own, and prints for each step the most that was resident, as Linux counts
it: `python device_budget_worker.py ACTIVATIONS_BYTES STEPS`, the budget being what the process takes before and that.

One op in the middle makes a temporary of 48 MiB, and backward another.
"""

import ctypes
import json
import sys
from pathlib import Path

import torch
from torch import nn

import delta

ROWS, WIDTH, LAYERS = 2048, 256, 12
WORKING_BYTES = 48 * 2**20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x + layer(x)
            if number == LAYERS // 2:
                columns = WORKING_BYTES // 4 // ROWS
                x = x + 1e-6 * (x @ x.repeat(columns // ROWS + 1, 1)[:columns].T).sum(1, keepdim=True)
        return x


def resident_bytes(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main(activations_bytes: int, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    (net(torch.ones(8, WIDTH)).sum() * 0).backward()  # libraries set themselves up
    ctypes.CDLL(None).malloc_trim(0)
    budget = resident_bytes("VmRSS") + activations_bytes
    peaks = []
    with delta.evict(net, budget=budget, policy="delta") as run:
        for index in range(steps):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
            Path("/proc/self/clear_refs").write_text("5")  # the most that is resident is counted anew
            net(x).square().mean().backward()
            net.zero_grad(set_to_none=False)
            peaks.append(resident_bytes("VmHWM"))
    report = run.report()
    told = {"budget": budget, "peaks": peaks, "warnings": report.warnings, "evictions": sum(report.evictions.values())}
    print(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
