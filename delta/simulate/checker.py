"""Checks the log of a machine, knowing nothing of the engine that made it.

What must hold: an op reads only what is there and whole, and writes only where memory has been taken; memory is never
over the capacity; the copies of one direction follow each other, none faster than the link; what comes back went out
whole before; what is decoded was encoded before; nothing is freed or overwritten while it is being copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from delta.simulate.machine import Entry
from delta.types import Link


class ScheduleError(AssertionError):
    """A schedule that no device could run: a defect in Delta."""


def check(log: Iterable[Entry], nbytes: Mapping[int, int], capacity_bytes: int, link: Link | None) -> int:
    """Walk through the log; returns the most bytes that were taken. ScheduleError names the first impossible one."""
    checker = _Checker(nbytes, capacity_bytes, link)
    for position, entry in enumerate(log):
        try:
            checker.take(entry)
        except ScheduleError as error:
            raise ScheduleError(f"entry {position}, {entry}: {error}") from None
    return checker.peak_bytes


class _Checker:
    def __init__(self, nbytes: Mapping[int, int], capacity_bytes: int, link: Link | None) -> None:
        self._nbytes, self._capacity_bytes, self._link = nbytes, capacity_bytes, link
        self._whole_ns: dict[int, int | None] = {}  # storages with memory -> since when they are whole
        self._host_ns: dict[int, int] = {}  # host copies -> since when they are whole
        self._leaving_ns: dict[int, int] = {}
        self._encoded: dict[int, int] = {}  # encoded forms -> storages
        self._link_free_ns = {"out": 0, "in": 0}
        self._busy_ns = 0
        self._used_bytes = 0
        self.peak_bytes = 0

    def take(self, entry: Entry) -> None:
        _require(entry.began_ns <= entry.ended_ns, "ends before it begins")
        match entry.what:
            case "alloc":
                self._alloc(entry.storages[0])
            case "free":
                self._free(entry.storages[0], entry.began_ns)
            case "become":
                self._become(entry.reads[0], entry.storages[0], entry.began_ns)
            case "run":
                self._run(entry)
            case "encode":
                self._run(entry)
                self._encoded[entry.storages[0]] = entry.reads[0]
            case "decode":
                _require(self._encoded.get(entry.reads[0]) == entry.storages[0], "is decoded from something else")
                self._run(entry)
            case "out" | "in":
                self._copy(entry)
            case _:
                raise ScheduleError("unknown")

    def _alloc(self, storage: int) -> None:
        _require(storage not in self._whole_ns, "has memory already")
        self._whole_ns[storage] = None
        self._used_bytes += self._nbytes[storage]
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        _require(self._used_bytes <= self._capacity_bytes, f"{self._used_bytes} bytes are taken")

    def _free(self, storage: int, now_ns: int) -> None:
        _require(storage in self._whole_ns, "has no memory")
        self._require_still(storage, now_ns)
        del self._whole_ns[storage]
        self._used_bytes -= self._nbytes[storage]

    def _become(self, old: int, new: int, now_ns: int) -> None:
        _require(old in self._whole_ns and new not in self._whole_ns, "cannot turn into the other")
        self._require_still(old, now_ns)
        self._whole_ns[new] = self._whole_ns.pop(old)

    def _run(self, entry: Entry) -> None:
        _require(entry.began_ns >= self._busy_ns, "compute is busy")
        self._busy_ns = entry.ended_ns
        for storage in entry.reads:
            self._require_whole(storage, entry.began_ns)
        for storage in entry.storages:
            _require(storage in self._whole_ns, f"{storage} has no memory to be written to")
            self._whole_ns[storage] = entry.ended_ns

    def _copy(self, entry: Entry) -> None:
        storage = entry.storages[0]
        if self._link is None:
            raise ScheduleError("there is no link")
        _require(entry.began_ns >= self._link_free_ns[entry.what], "the link is busy")
        self._link_free_ns[entry.what] = entry.ended_ns
        rate = self._link.out_bytes_per_s if entry.what == "out" else self._link.in_bytes_per_s
        least_ns = int(self._nbytes[storage] * 1e9 / rate)
        _require(entry.ended_ns - entry.began_ns >= least_ns, "faster than the link")
        if entry.what == "out":
            self._require_whole(storage, entry.began_ns)
            self._host_ns[storage] = self._leaving_ns[storage] = entry.ended_ns
        else:
            _require(self._host_ns.get(storage, entry.began_ns + 1) <= entry.began_ns, "the host has no whole copy")
            _require(self._whole_ns.get(storage, 0) is None, "there is no new memory for it")
            self._whole_ns[storage] = entry.ended_ns

    def _require_whole(self, storage: int, now_ns: int) -> None:
        since_ns = self._whole_ns.get(storage)
        _require(since_ns is not None and since_ns <= now_ns, f"{storage} is not there, or not whole")

    def _require_still(self, storage: int, now_ns: int) -> None:
        """No copy of the storage, out or back, is under way."""
        _require(self._leaving_ns.get(storage, 0) <= now_ns, "is still being copied out")
        _require((self._whole_ns[storage] or 0) <= now_ns, "is still being copied back")


def _require(met: bool, otherwise: str) -> None:
    if not met:
        raise ScheduleError(otherwise)
