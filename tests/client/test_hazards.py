"""Tables of hazards: a client names what it reads in place, another evicts, neither is missed."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from daemon import DEADLINE_S
from numpy.typing import NDArray

from ffserve.cache.shm import sealed_file
from ffserve.engine import hazards
from ffserve.engine.core import ffi, lib
from ffserve.engine.hazards import MOST_HAZARDS, TABLE_SIZE, Hazards, Leaser, Leases, Table, restore
from ffserve.engine.view import ENTRY_DTYPE, View, publish
from ffserve.errors import ReadError

BUDGET = 1 << 40


def shared(size: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def new_table() -> Table:
    fd = sealed_file("test-leases", TABLE_SIZE)
    try:
        return Table(fd)
    finally:
        os.close(fd)


def words(table: Table) -> NDArray[np.uint64]:
    """budget, claimed and live are words 0, 8 and 16 to 23."""
    return np.frombuffer(table.memory, np.uint64)


def named(table: Table) -> NDArray[np.uint32]:
    return np.frombuffer(table.memory, np.uint32)[64 : 64 + MOST_HAZARDS]


class Shelf:
    """Slots of one size, more samples than slots, and somebody who evicts."""

    def __init__(self, samples: int = 8, slots: int = 4, size: int = 4096) -> None:
        self.size, self.samples, self.slots = size, samples, slots
        self.arena = shared(slots * size)
        self.entries = np.frombuffer(mmap.mmap(-1, samples * ENTRY_DTYPE.itemsize), ENTRY_DTYPE)
        self.table = new_table()
        self.table.set_budget(BUDGET)
        self.view = View(
            self.arena.ctypes.data, len(self.arena), [(self.entries.ctypes.data, 0, samples)]
        )
        self.holds = [-1] * slots
        self.turns = self.restored = self.evicted = 0
        for slot in range(slots):
            self._fill(slot, slot)
        self._first, self._count = np.zeros(1, np.int64), np.ones(1, np.int64)
        self._place, self._room = np.zeros(1, np.uint64), np.array([size], np.uint64)
        self._names, self._ends = np.zeros(MOST_HAZARDS, np.uint32), np.zeros(1, np.int64)
        self._retract = (
            ffi.cast("ffs_entry *", self.entries.ctypes.data),
            *(ffi.from_buffer("int64_t[]", array) for array in (self._first, self._count)),
            *(ffi.from_buffer("uint64_t[]", array) for array in (self._place, self._room)),
            1,
        )
        self._read = (
            ffi.new("ffs_hazards *[]", [self.table._c]),
            1,
            ffi.from_buffer("uint32_t[]", self._names),
            ffi.from_buffer("int64_t[]", self._ends),
        )

    def leaser(self, leases: Leases | None = None, extra: int = 0) -> Leaser:
        return Leaser(leases or Leases(self.table), self.view, [0], extra)

    def _fill(self, slot: int, number: int) -> None:
        self.turns += 1
        self.arena[slot * self.size : (slot + 1) * self.size] = number + 1
        publish(self.entries.ctypes.data, number, slot * self.size, self.size)
        self.holds[slot] = number

    def evict(self) -> None:
        """Evict a slot, unless it is leased, and fill it with the next sample that is nowhere."""
        slot = self.turns % self.slots
        number = self._first[0] = self.holds[slot]
        self._place[0] = slot * self.size
        # As fast upon each other as can be, so that a client has to be fast to come between.
        lib.ffs_retract(*self._retract)
        count = lib.ffs_hazards_read(*self._read)
        if number in self._names[:count]:
            self.restored += 1
            self.turns += 1
            restore(self.entries.ctypes.data, self._first)
            return
        self.evicted += 1
        absent = [n for n in range(self.samples) if n not in self.holds]
        self._fill(slot, absent[self.turns % len(absent)])


def lease_and_look(shelf: Shelf, leaser: Leaser, stop: Callable[[], bool], seed: int = 0) -> int:
    """Lease in a loop; what is leased must be that sample's and stay so."""
    random = np.random.default_rng(seed)
    rows = shelf.arena.reshape(shelf.slots, shelf.size)
    leased = 0
    while not stop():
        wanted = random.integers(0, shelf.samples, hazards.PANEL)
        lease = leaser.lease(wanted)
        there = lease.starts >= 0
        places, values = lease.starts[there] // shelf.size, wanted[there] + 1
        for _ in range(3):
            assert (rows[places] == values[:, None]).all(), "leased bytes are not the sample's"
        leased += len(places)
        lease.release()
    return leased


def test_no_leased_sample_is_written_over() -> None:
    """A process evicts all the time what this one leases."""
    shelf = Shelf()
    told = shared(16).view(np.uint64)
    stop = shared(1)
    pid = os.fork()
    if pid == 0:
        try:
            while not stop[0]:
                shelf.evict()
                told[:] = shelf.restored, shelf.evicted
        finally:
            os._exit(0)
    try:
        least_s, most_s = time.monotonic() + 1.5, time.monotonic() + DEADLINE_S

        def over() -> bool:
            now = time.monotonic()
            return now > most_s or (now > least_s and bool((told[:2] > (100, 1000)).all()))

        leased = lease_and_look(shelf, shelf.leaser(), over)
    finally:
        stop[0] = 1
        os.waitpid(pid, 0)
    restored, evicted = told.tolist()
    assert leased > 1000 and evicted > 1000
    assert restored > 100, "the race was never run"
    assert not words(shelf.table)[16:24].any() and words(shelf.table)[8] == 0


def test_threads_lease_at_once_from_one_table() -> None:
    shelf = Shelf(samples=16, slots=12)
    leases, stop = Leases(shelf.table), threading.Event()
    counts, problems = [0] * 3, []

    def work(k: int) -> None:
        try:
            counts[k] = lease_and_look(shelf, shelf.leaser(leases), stop.is_set, seed=k)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + DEADLINE_S
    while (shelf.evicted < 1000 or shelf.restored < 30) and time.monotonic() < deadline:
        shelf.evict()
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems, problems
    assert min(counts) > 10 and shelf.restored >= 30
    assert not words(shelf.table)[16:24].any() and words(shelf.table)[8] == 0


def test_what_is_not_readable_or_beyond_the_budget_is_not_leased() -> None:
    shelf = Shelf()
    leaser = shelf.leaser(extra=904)
    shelf.table.set_budget(12_000)
    lease = leaser.lease(np.array([0, 5, 1, 0, 2]))
    assert lease.starts.tolist() == [0, -1, 4096, -1, -1]
    assert (lease.left, lease.size) == (3, 8192)
    assert shelf.table.set_budget(9999) == 10_000
    assert sorted(Hazards([shelf.table]).read()[0].tolist()) == [0, 1]
    assert leaser.lease(np.array([2])).left == 1
    lease.release()
    lease.release()
    assert shelf.table.set_budget(0) == 0
    assert leaser.lease(np.array([0])).left == 1
    assert not len(Hazards([shelf.table]).read()[0])
    with pytest.raises(ReadError):
        leaser.lease(np.array([8]))


def test_more_leases_than_a_table_has_panels() -> None:
    shelf = Shelf()
    leaser, wanted = shelf.leaser(), np.zeros(1, np.int64)
    held = [leaser.lease(wanted) for _ in range(hazards.PANELS)]
    assert not any(lease.left for lease in held)
    assert leaser.lease(wanted).left == 1
    assert len(Hazards([shelf.table]).read()[0]) == hazards.PANELS
    held.pop().release()
    assert leaser.lease(wanted).left == 0
    assert shelf.leaser().lease(np.zeros(MOST_HAZARDS + 1, np.int64)).left == 1


def test_an_entry_outside_of_the_arena_leases_nothing() -> None:
    shelf = Shelf()
    publish(shelf.entries.ctypes.data, 7, shelf.arena.nbytes, 1)
    with pytest.raises(ReadError):
        shelf.leaser().lease(np.array([0] * 100 + [7]))
    assert not words(shelf.table)[16:24].any() and words(shelf.table)[8] == 0
