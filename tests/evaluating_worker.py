"""A process that trains under `budget=` and evaluates after each step. What it holds and what an evaluation takes would
fit beside each other; what the steps leave in the heap comes on top.

Run by `test_headroom.py`; prints the budget and the most that Linux saw resident in each evaluation, as JSON.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import torch
from device_budget_worker import resident_bytes
from torch import nn

import delta

WIDTH, ROWS, STEPS = 256, 2048, 6
BUDGET_BYTES = 120 * 2**20  # above what is resident at first: the net takes 80 to 110, an evaluation 44 of its own


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(6)
    ]
    net = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(8, WIDTH)).sum().backward()  # libraries and the optimizer set themselves up
    optimizer.step()
    optimizer.zero_grad()
    ctypes.CDLL(None).malloc_trim(0)
    budget, peaks = resident_bytes("VmRSS") + BUDGET_BYTES, []
    with delta.evict(net, budget=budget, policy=delta.load_policy("delta", {"filter.min_bytes": 65536})):
        for _ in range(STEPS):
            net(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            Path("/proc/self/clear_refs").write_text("5")  # the most that is resident is counted anew
            with torch.no_grad():
                net(torch.randn(2 * ROWS, WIDTH))
            peaks.append(resident_bytes("VmHWM"))
    print(json.dumps({"budget": budget, "peaks": peaks}))


if __name__ == "__main__":
    main()
