"""What control groups leave this process of the machine's memory. Containers, Slurm and systemd limit it so.

A limit of any group above counts as well as that of the process's own. A container may see the path that its group has
outside of it, with nothing there: then what it has is at the root. What cannot be read limits nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Of one group: its limit, and what is left of it."""

    limit_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class _Names:
    """Files of a group, and the row of ``memory.stat`` for the file cache that goes first when memory is short."""

    limit: str
    used: str
    cache: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def memory_limits(groups: Path = _GROUPS, mount: Path = _MOUNT) -> Iterator[GroupMemory]:
    """Of every group with a limit that the process is in. `groups` lists them; they lie under `mount`."""
    for root, path, names in _hierarchies(groups, mount):
        for group in (path, *path.parents):
            if (found := _read(root / group, names)) is not None:
                yield found


def _hierarchies(groups: Path, mount: Path) -> Iterator[tuple[Path, Path, _Names]]:
    """Where groups lie that may limit memory, and the path of the process's own below that."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        if not controllers:
            yield mount, own, _V2
        elif "memory" in controllers.split(","):
            yield mount / controllers, own, _V1


def _read(group: Path, names: _Names) -> GroupMemory | None:
    try:
        limit_bytes = int((group / names.limit).read_text())  # "max" where there is none
        used_bytes = int((group / names.used).read_text())
    except (OSError, ValueError):
        return None
    return GroupMemory(limit_bytes, max(0, limit_bytes - used_bytes + _cached_bytes(group, names)))


def _cached_bytes(group: Path, names: _Names) -> int:
    try:
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(rows.get(names.cache, 0))
    except (OSError, ValueError):
        return 0
