"""What the machine says about itself, and what is said where it is silent."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml  # type: ignore[import-untyped]
import pytest

from delta.runtime import monitor


def test_host_facts() -> None:
    facts = monitor.host_facts()
    assert 0 < facts.resident_bytes < facts.total_bytes
    assert 0 < facts.available_bytes <= facts.total_bytes
    assert "available" in str(facts)


def fake_driver(monkeypatch: pytest.MonkeyPatch, *, silent: bool = False) -> None:
    """NVML with one card; ``silent``: one that does not know its link."""

    def link(_: object) -> int:
        if silent:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 4

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _: "Card",
        "nvmlDeviceGetUUID": lambda _: "GPU-ab-cd",
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=8 * 2**30, used=2**30),
        "nvmlDeviceGetPciInfo": lambda _: SimpleNamespace(busId="00000000:65:00.0"),
        "nvmlDeviceGetCurrPcieLinkGeneration": link,
        "nvmlDeviceGetCurrPcieLinkWidth": link,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(monitor, "pci_numa_node", lambda bus_id: 1)


def test_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(monkeypatch)
    (card,) = monitor.gpus().cards
    assert (card.total_bytes, card.used_bytes, card.numa_node) == (8 * 2**30, 2**30, 1)
    assert str(card) == "Card, 1 GiB of 8 GiB used on the card, PCIe 4.0 x4, NUMA node 1, driver 570.1"
    assert monitor.gpus().text == str(card)


def test_a_card_is_found_by_the_uuid_that_torch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(monkeypatch)
    assert monitor.gpu("ab-cd") == monitor.gpu("GPU-ab-cd") == monitor.gpus().cards[0]
    assert monitor.gpu("other") is None


def test_what_a_card_does_not_know_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(monkeypatch, silent=True)
    assert monitor.gpus().cards[0].pcie_generation is None
    assert "PCIe unknown" in monitor.gpus().text


@pytest.mark.parametrize(
    ("missing", "text"), [("nvmlInit", "install one"), ("nvmlDeviceGetCount", "does not describe")]
)
def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch, missing: str, text: str) -> None:
    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    fake_driver(monkeypatch)
    monkeypatch.setattr(pynvml, missing, fails)
    assert monitor.gpus().cards == ()
    assert text in monitor.gpus().text


@pytest.mark.parametrize(("content", "node"), [("1\n", 1), ("-1\n", None), ("?", None), (None, None)])
def test_numa_node(tmp_path: Path, content: str | None, node: int | None) -> None:
    device = tmp_path / "0000:65:00.0"
    device.mkdir()
    if content is not None:
        (device / "numa_node").write_text(content)
    assert monitor.pci_numa_node("00000000:65:00.0", tmp_path) == node


@pytest.mark.parametrize(("content", "cpus"), [("0-2,8\n", {0, 1, 2, 8}), ("5\n", {5}), ("\n", set()), (None, set())])
def test_node_cpus(tmp_path: Path, content: str | None, cpus: set[int]) -> None:
    (tmp_path / "node1").mkdir()
    if content is not None:
        (tmp_path / "node1" / "cpulist").write_text(content)
    assert monitor.node_cpus(1, tmp_path) == cpus


def test_where_a_spill_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        psutil,
        "disk_partitions",
        lambda all: [
            SimpleNamespace(mountpoint="/", fstype="ext4"),
            SimpleNamespace(mountpoint=str(tmp_path), fstype="tmpfs"),
            SimpleNamespace(mountpoint=f"{tmp_path}-other", fstype="xfs"),
        ],
    )
    (tmp_path / "below").mkdir()
    inside = monitor.spill_facts(str(tmp_path / "below"))
    assert inside.in_memory and inside.file_system == "tmpfs" and inside.free_bytes > 0
    assert "host.spill_dir" in inside.text
    outside = monitor.spill_facts(os.sep)
    assert not outside.in_memory and outside.file_system == "ext4"


def test_a_missing_spill_directory_is_no_error(tmp_path: Path) -> None:
    facts = monitor.spill_facts(str(tmp_path / "missing"))
    assert facts.free_bytes == 0 and "cannot be used" in facts.text
