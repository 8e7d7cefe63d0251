"""What a container leaves of the machine's memory, and what each of several processes has of it."""

from pathlib import Path

import psutil
import pytest

from delta.runtime import monitor
from delta.runtime.cgroups import GroupMemory, memory_limits
from delta.runtime.device.parts import limit_bytes, part_bytes
from delta.units import Bytes, Share

GIB = 2**30


def a_group(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content + "\n")


def found(tmp_path: Path, *lines: str) -> list[GroupMemory]:
    (tmp_path / "groups").write_text("".join(f"{line}\n" for line in lines))
    return list(memory_limits(tmp_path / "groups", tmp_path / "mount"))


def test_a_group_and_those_above_it(tmp_path: Path) -> None:
    """File cache that nobody has used twice goes when memory is short, so it is available."""
    root = tmp_path / "mount"
    a_group(root, cgroup__procs="1")  # the machine's own root has no limit
    a_group(root / "job", memory__max=str(8 * GIB), memory__current=str(7 * GIB), memory__stat="anon 9")
    stat = f"anon 5\nfile 7\ninactive_file {GIB // 2}"
    a_group(root / "job/step", memory__max=str(4 * GIB), memory__current=str(3 * GIB), memory__stat=stat)
    a_group(root / "job/step/task", memory__max="max", memory__current="1")
    limits = [GroupMemory(4 * GIB, GIB + GIB // 2), GroupMemory(8 * GIB, GIB)]
    assert found(tmp_path, "1:name=systemd:/", "0::/job/step/task") == limits


def test_a_container_may_see_only_its_own_group(tmp_path: Path) -> None:
    """At the root, whatever path the group has outside."""
    a_group(tmp_path / "mount", memory__max=str(GIB), memory__current=str(2 * GIB))
    assert found(tmp_path, "0::/docker/0123") == [GroupMemory(GIB, 0)]
    assert found(tmp_path, "0::/") == [GroupMemory(GIB, 0)]


def test_the_first_version(tmp_path: Path) -> None:
    group = tmp_path / "mount/memory/slurm/job"
    stat = f"inactive_file 0\ntotal_inactive_file {GIB // 4}"
    a_group(group, memory__limit_in_bytes=str(GIB), memory__usage_in_bytes=str(GIB // 2), memory__stat=stat)
    expected = [GroupMemory(GIB, GIB // 2 + GIB // 4)]
    assert found(tmp_path, "5:cpu,cpuacct:/", "4:memory:/slurm/job", "0::/") == expected


def test_what_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    assert list(memory_limits(tmp_path / "missing", tmp_path)) == []
    assert found(tmp_path, "0::/gone") == []
    a_group(tmp_path / "mount", memory__max="max", memory__current="1")
    assert found(tmp_path, "0::/") == []


@pytest.mark.parametrize(
    ("groups", "total_bytes", "available_bytes"),
    [
        ([], 0, 0),
        ([GroupMemory(2**20, 2**10), GroupMemory(2**21, 2**9)], 2**20, 2**9),
        ([GroupMemory(2**62, 2**62)], 0, 0),
    ],
)
def test_the_tightest_counts(
    groups: list[GroupMemory], total_bytes: int, available_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(monitor, "memory_limits", lambda: groups)
    facts = monitor.host_facts()
    assert (facts.total_bytes, facts.available_bytes) == (
        total_bytes or memory.total,
        available_bytes or memory.available,
    )


@pytest.mark.parametrize(("processes", "part"), [(None, 800), ("", 800), ("4", 200), ("0", 800), ("many", 800)])
def test_a_share_is_one_of_this_process_s_part(
    processes: str | None, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun says how many there are on the machine. A size is what it is."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert part_bytes(800) == part
    assert limit_bytes(Share(0.5), 800) == part // 2
    assert limit_bytes(Bytes(300), 800) == 300
