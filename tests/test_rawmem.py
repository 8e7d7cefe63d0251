"""Memory below the tensors."""

import mmap
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from delta.runtime import rawmem
from delta.runtime.rawmem import AlignedBuffer, HugePages, ResidentMeter, as_bytes, drop_pages, sole_owner, tensor_at

MIB = 2**20


def test_buffers_are_aligned_and_private() -> None:
    buffer = AlignedBuffer(10_000)
    assert buffer.address % mmap.PAGESIZE == 0
    tensor_at(buffer.address, 3).fill_(7)
    assert bytes(buffer.view[:4]) == b"\7\7\7\0"


@pytest.mark.parametrize("nbytes", [2 * MIB, 5 * MIB + 100])
def test_what_makes_huge_pages_begins_at_one(nbytes: int) -> None:
    buffer = AlignedBuffer(nbytes)
    assert buffer.address % (2 * MIB) == 0
    assert len(buffer.view) == buffer.nbytes == nbytes
    buffer.view[:] = os.urandom(nbytes)
    assert bytes(tensor_at(buffer.address + nbytes - 100, 100).numpy()) == bytes(buffer.view[-100:])
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the system has no huge pages to ask for")
    assert "hg" in flags_at(buffer.address)


def flags_at(address: int) -> list[str]:
    """What the system knows of the mapping that the address is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            inside = int(place[1], 16) <= address < int(place[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("nothing is mapped there")


@pytest.mark.parametrize(
    ("state", "libc", "tunables", "lacks"),
    [
        ("always [madvise] never", ("glibc", "2.36"), None, True),
        ("always [madvise] never", ("glibc", "2.35"), "glibc.malloc.check=1", True),
        ("always [madvise] never", ("glibc", "2.36"), "glibc.malloc.check=1:glibc.malloc.hugetlb=2", False),
        ("always [madvise] never", ("glibc", "2.34"), None, False),
        ("always [madvise] never", ("", ""), None, False),
        ("[always] madvise never", ("glibc", "2.36"), None, False),
        ("always madvise [never]", ("glibc", "2.36"), None, False),
        (None, ("glibc", "2.36"), None, False),
    ],
)
def test_huge_pages_are_missed_where_asking_for_them_helps(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    state: str | None,
    libc: tuple[str, str],
    tunables: str | None,
    lacks: bool,
) -> None:
    if state is not None:
        (tmp_path / "enabled").write_text(state + "\n")
    monkeypatch.setattr(rawmem, "_HUGE_PAGES_STATE", tmp_path / "enabled")
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if tunables is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    assert rawmem.heap_lacks_huge_pages() is lacks


def test_the_setting_gives_the_heap_huge_pages() -> None:
    if not rawmem.heap_lacks_huge_pages():
        pytest.skip("they need not be asked for here, or cannot be")
    script = "from pathlib import Path; held = bytearray(2**24); print(Path('/proc/self/smaps').read_text())"
    settings = {**os.environ, rawmem.GLIBC_SETTINGS: rawmem.HUGE_PAGES}
    maps = subprocess.run([sys.executable, "-c", script], env=settings, capture_output=True, text=True, check=True)
    assert "VmFlags" in maps.stdout
    assert any("hg" in line.split() for line in maps.stdout.splitlines() if line.startswith("VmFlags:"))


@pytest.mark.parametrize("given", ["[madvise]", "[always]", "[never]", None])
def test_the_heap_asks_for_huge_pages_where_that_is_how_they_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    """Once for what is there, and once more when it has grown."""
    if given is not None:
        (tmp_path / "enabled").write_text(f"some {given} others\n")
    (tmp_path / "maps").write_text(
        "1000-2000 r--p 0 0 0 /bin/a\n400000-500000 rw-p 0 0 0    [heap]\n500000-600000 [heap]\n"
    )
    monkeypatch.setattr(rawmem, "_HUGE_PAGES_STATE", tmp_path / "enabled")
    monkeypatch.setattr(rawmem, "_MAPS", tmp_path / "maps")
    ends, asked = [0x600123, 0x600123, 0x700000], []
    monkeypatch.setattr(rawmem, "_heap_end", lambda: ends.pop(0))
    library = SimpleNamespace(madvise=lambda start, nbytes, advice: asked.append((start.value, nbytes.value, advice)))
    monkeypatch.setattr(rawmem, "_libc", lambda: library)
    pages = HugePages()
    for _ in range(3):
        pages.ask()
    told = [(0x400000, 0x200000, mmap.MADV_HUGEPAGE), (0x400000, 0x300000, mmap.MADV_HUGEPAGE)]
    assert asked == (told if given == "[madvise]" else [])


def test_the_heap_has_asked_for_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start = rawmem._heap_start()
    if start is None or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("there is no heap to be found, or the system has no huge pages to ask for")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(rawmem, "_HUGE_PAGES_STATE", tmp_path / "enabled")
    HugePages().ask()
    assert "hg" in flags_at(start)
    assert "hg" in flags_at(rawmem._heap_end() - 1)


def test_as_bytes_shares() -> None:
    tensor = torch.zeros(3, dtype=torch.float32)
    as_bytes(tensor.untyped_storage()).fill_(0xFF)
    assert bool(tensor.isnan().all())


def test_sole_owner() -> None:
    storage = torch.UntypedStorage(8)
    assert sole_owner(storage)
    same = storage
    assert sole_owner(same)
    tensor = as_bytes(storage)
    assert not sole_owner(storage)
    del tensor
    assert sole_owner(storage)


@pytest.mark.cuda
def test_sole_owner_on_a_card() -> None:
    storage = torch.UntypedStorage(8, device="cuda")
    assert sole_owner(storage)
    tensor = as_bytes(storage)
    assert not sole_owner(storage)
    assert sole_owner(storage, tensors=1)
    del tensor
    assert sole_owner(storage)


def test_borrowed_memory_has_another_owner() -> None:
    """Poisoning or dropping it would change an array that the user still holds."""
    array = np.ones(4096, dtype=np.float32)
    borrowed = torch.from_numpy(array).untyped_storage()  # the tensor is gone: an assert would keep it
    shared = torch.ones(4).share_memory_().untyped_storage()
    assert not sole_owner(borrowed)
    assert not sole_owner(shared)
    assert array.sum() == 4096


def test_the_meter_agrees_with_psutil() -> None:
    meter = ResidentMeter()
    assert abs(meter.read_bytes() - psutil.Process().memory_info().rss) < 4 * MIB
    ballast = torch.ones(16 * MIB)
    assert meter.read_bytes() > 60 * MIB
    del ballast
    meter.close()
    meter.close()
    assert meter.read_bytes() > 0  # opens it again
    meter.close()


def test_the_meter_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawmem, "_STATM", "/missing")
    assert abs(ResidentMeter().read_bytes() - psutil.Process().memory_info().rss) < 4 * MIB


def test_dropped_pages_are_no_longer_resident() -> None:
    meter, storage = ResidentMeter(), torch.UntypedStorage(32 * MIB)
    as_bytes(storage).fill_(1)
    before = meter.read_bytes()
    dropped = drop_pages(storage)
    assert 32 * MIB - 2 * mmap.PAGESIZE <= dropped <= 32 * MIB
    assert before - meter.read_bytes() > 30 * MIB
    as_bytes(storage).fill_(2)  # the memory is still there to be written
    assert int(as_bytes(storage)[12345]) == 2
    meter.close()


def test_a_storage_inside_a_page_keeps_it() -> None:
    storage = torch.UntypedStorage(100)
    as_bytes(storage).fill_(5)
    assert drop_pages(storage) == 0
    assert bool((as_bytes(storage) == 5).all())


def test_trimming_without_glibc_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rawmem.trim_heap() in (True, False)
    monkeypatch.setattr(rawmem, "_libc", lambda: object())
    assert rawmem.trim_heap() is False
