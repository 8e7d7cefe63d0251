"""The leak checks themselves: each must see its kind of leak, and see it go."""

import sys
import threading
import types

import torch
from leaks import Snapshot, files_left


def test_a_running_thread_is_seen():
    stop = threading.Event()
    before = Snapshot.take()
    thread = threading.Thread(target=stop.wait, name="left-over")
    thread.start()
    try:
        assert before.leaks(patience_s=0) == ["thread left-over"]
    finally:
        stop.set()
        thread.join()
    assert before.leaks(patience_s=0) == []


def test_an_open_deleted_file_is_seen(tmp_path):
    before = Snapshot.take()
    path = tmp_path / "spill"
    with path.open("wb"):
        path.unlink()
        (leak,) = before.leaks(patience_s=0)
    assert leak.endswith(f"{path} (deleted)")
    assert before.leaks(patience_s=0) == []


def test_an_open_file_of_ours_is_seen(tmp_path):
    before = Snapshot.take()
    with (tmp_path / "delta-1.spill").open("wb"), (tmp_path / "someone-elses").open("wb"):
        (leak,) = before.leaks(patience_s=0)
    assert leak.endswith("delta-1.spill")


def test_pinned_memory_is_seen(monkeypatch):
    before = Snapshot.take()
    live = before.slab_bytes + 4096
    monkeypatch.setitem(sys.modules, "delta.runtime.host", types.SimpleNamespace(live_slab_bytes=lambda: live))
    assert before.leaks(patience_s=0) == ["4096 bytes of pinned host memory"]


def test_another_setting_is_seen(one_thread):
    before = Snapshot.take()
    torch.set_num_threads(2)
    assert before.leaks(patience_s=0) == ["threads: 2, was 1"]


def test_a_thread_that_ends_in_time_is_no_leak():
    before = Snapshot.take()
    threading.Timer(0.05, lambda: None).start()
    assert before.leaks(patience_s=2) == []


def test_files_left(tmp_path):
    assert files_left(tmp_path, patience_s=0) == []
    (tmp_path / "a").touch()
    assert files_left(tmp_path, patience_s=0) == [str(tmp_path / "a")]
