"""Leak checks around every test, and the options and markers."""

import gc
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from leaks import Snapshot, files_left

# Before anything imports them: what these modules assert is told as fully as what tests assert.
pytest.register_assert_rewrite("exactly", "inside", "simple_dtr", "simulated_card", "toy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_configure() -> None:
    """Plain PyTorch is what every test compares with: its first calls must give the bits of the later ones."""
    if find_spec("torch") is not None:  # tests of the pure part run without it
        from delta.runtime.settle import settle_kernels

        settle_kernels()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        _skip(items, "slow", "slow: runs with --slow")
    if any(item.get_closest_marker("cuda") for item in items):
        import torch  # here, so that tests of the pure part run without it

        if not torch.cuda.is_available():
            _skip(items, "cuda", "needs a CUDA device")


def pytest_collection_finish() -> None:
    """What is there now stays: most of a million objects, which else each collection and each of Delta's searches for
    models would walk anew. A model that a test file made on being imported is not found any more."""
    gc.collect()
    gc.freeze()


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """No test leaves a thread, an open spill file, pinned memory or another setting of the process behind."""
    before = Snapshot.take()
    yield
    leaks = before.leaks()
    assert not leaks, f"left behind: {', '.join(leaks)}"


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks hear of every saved tensor: none is left to autograd alone."""
    from delta.expected import Expected

    monkeypatch.setattr(Expected, "may_leave_alone", lambda *args: False)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step, whether it followed a routine to its end."""
    from delta.learner import Learner

    found, end = list[bool](), Learner.end

    def noting(learner: Learner, *told: Any) -> None:
        found.append(learner.routine is not None)
        end(learner, *told)

    monkeypatch.setattr(Learner, "end", noting)
    return found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread."""
    import torch  # here, so that tests of the pure part run without it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def briefly_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better plans are searched for a tenth as long."""
    from delta.planner import anneal

    monkeypatch.setattr(anneal, "MOST", anneal.MOST // 10)


@pytest.fixture
def searched_here(briefly_searched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """... and in this process: one of its own takes a second to start."""
    from delta.planner import BESIDE, Plan, Task
    from delta.runtime import planning

    class Here:
        ended = True

        def __init__(self, task: Task) -> None:
            self.task = task

        def plan(self) -> Plan | None:
            return BESIDE[self.task.options.kind](self.task)

        def wait(self) -> None: ...

        def stop(self) -> None: ...

    monkeypatch.setattr(planning, "_Search", Here)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> int:
    """So much of the CPU's memory is in use, and saved activations: a budget on the device that can be counted."""
    from delta.idle import Idle
    from delta.runtime.gauge import Gauge

    beside_bytes, is_over = 2**20, Idle.is_over

    def look(gauge: Gauge, own: bool = False, uncounted_bytes: int = 0) -> None:
        if gauge.on:
            engine = gauge._engine
            now_bytes = beside_bytes + engine.ledger.resident_bytes + uncounted_bytes
            if own:
                engine.settled(now_bytes, now_bytes, uncounted_bytes)
            else:
                engine.looked(now_bytes, now_bytes, uncounted_bytes)

    def counted(idle: Idle, watched_bytes: int, used_bytes: Callable[[], int]) -> bool:
        return is_over(idle, watched_bytes, lambda: beside_bytes + idle._ledger.resident_bytes + watched_bytes)

    monkeypatch.setattr(Gauge, "look", look)
    monkeypatch.setattr(Idle, "is_over", counted)
    return beside_bytes


@pytest.fixture
def spill_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy to or from a spill file's buffer, from here on."""
    from delta.runtime import spill
    from delta.runtime.rawmem import copy_bytes

    copied: list[int] = []

    def counted(to: int, source: int, nbytes: int) -> None:
        copied.append(nbytes)
        copy_bytes(to, source, nbytes)

    monkeypatch.setattr(spill, "copy_bytes", counted)
    return copied


@pytest.fixture
def spill_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory for spill files, which must be empty again when the test has ended."""
    directory = tmp_path / "spill"
    directory.mkdir()
    yield directory
    left = files_left(directory)
    assert not left, f"files left in the spill directory: {', '.join(left)}"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a plan replays is recorded, as if none of it could be noted by the runtime alone."""
    monkeypatch.setattr("delta.routine.noted_ops", lambda *_: set())
