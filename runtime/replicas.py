"""Refuses `nn.DataParallel` over several devices: its replicas run in threads of their own, on other devices.

Neither the hooks nor the recorder are there, so that nothing of what the replicas save would ever be evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from delta.errors import DeltaError


@contextmanager
def no_replicas() -> Iterator[None]:
    """While entered, an `nn.DataParallel` that would make replicas raises DeltaError; on one device it passes."""
    plain = nn.DataParallel.replicate
    nn.DataParallel.replicate = _refuse  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.DataParallel.replicate = plain  # type: ignore[method-assign]


def _refuse(parallel: nn.DataParallel[Any], module: nn.Module, device_ids: Any) -> Any:
    raise DeltaError(
        f"nn.DataParallel over devices {list(device_ids)} runs in threads that delta.evict does not reach; use "
        "DistributedDataParallel with one process for each device, or give it one device"
    )
