"""The daemon's side of lease tables."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from daemon import DEADLINE_S, Raw, sample, serving, until, write
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_cache import Node
from test_daemon import everything_is_given_back
from test_hazards import named, words

from ffserve import protocol
from ffserve.cache.arena import SMALLEST_SLOT, Arena
from ffserve.cache.tables import Directory
from ffserve.engine.hazards import MOST_HAZARDS, Hazards, Leaser, Leases, Table
from ffserve.engine.view import View, publish
from ffserve.errors import FFServeError, ProtocolError
from ffserve.server.hazards import IDLE_S, LOOKS, SHARE, LeaseTable, LeaseTables

MIB = 1 << 20
SIZES = [30_000]


# ---- who may hold how much -----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300_000) | st.integers(0, 200), min_size=1, max_size=60),
    alignment=st.sampled_from((1, 512, 4096)),
    arena_size=st.sampled_from((MIB, 5 * MIB, 700 * MIB)),
)
def test_a_lease_is_charged_no_less_than_its_slot(
    lengths: list[int], alignment: int, arena_size: int
) -> None:
    node = Node([lengths], arena_size, alignment)
    try:
        [base] = node.bases
        extra = int(node.table.lease_extra(np.array([base]), node.arena)[0])
        blocks = node.table.blocks(np.arange(base, base + len(lengths)))
        assert (node.arena.slot_sizes(blocks.sizes) <= np.array(lengths) + extra).all()
        assert (node.arena.slot_sizes(blocks.sizes) >= blocks.sizes).all()
        assert extra >= SMALLEST_SLOT
    finally:
        node.directory.close()


class Shared:
    """Tables over an arena whose samples 0 to 255 lie in slots of 4096 bytes."""

    def __init__(self) -> None:
        self.arena, self.directory = Arena(MIB), Directory(1 << 22)
        assert self.directory.reserve(256) == 0
        taken = self.arena.take(0, 200)
        self.directory.slot_of[: len(taken)] = np.array(taken) + 1
        self.tables = LeaseTables(self.arena, self.directory)
        self.errors: list[FFServeError] = []
        self.total = MIB * SHARE[0] // SHARE[1]

    def table(self) -> LeaseTable:
        table = self.tables.table(self.errors.append)
        assert table is not None
        os.close(table.take_fd())
        return table

    def hold(self, table: LeaseTable, numbers: Sequence[int]) -> None:
        """As a client that obeys no budget."""
        assert len(numbers) <= 64 * 64
        if numbers:
            named(table.memory)[: 64 * 64] = 0
        named(table.memory)[: len(numbers)] = np.array(numbers, np.int64) + 1
        words(table.memory)[8] = 4096 * len(numbers)
        words(table.memory)[16] = (1 << -(-len(numbers) // 64)) - 1


@pytest.fixture
def node() -> Iterator[Shared]:
    node = Shared()
    yield node
    node.directory.close()


def test_equal_shares_as_far_as_others_have_let_go(node: Shared) -> None:
    tables, total = node.tables, node.total
    first, second, third = (node.table() for _ in range(3))
    assert [t.budget for t in (first, second, third)] == [0, 0, 0]
    tables.wanted(first, 0.0)
    assert first.budget == first.allowed == total
    node.hold(first, range(total // 4096 - 10))
    tables.wanted(second, 0.0)
    assert first.budget == total // 2 and second.budget == second.allowed == 10 * 4096
    tables.wanted(third, 0.0)
    assert third.budget == 0 and tables.promised_size <= total
    node.hold(first, [])
    tables.wanted(third, 0.0)
    assert [t.budget for t in (first, second, third)] == [total // 3] * 3
    tables.drop(second)
    tables.share_out()
    assert first.budget == third.budget == total // 2
    node.arena.resize(2)
    tables.resized()
    assert first.budget == third.budget == total // 4 and not node.errors
    tables.drop(first)
    tables.drop(third)
    assert tables.promised_size == 0


def test_who_holds_more_than_is_allowed_is_cut_off(node: Shared) -> None:
    tables = node.tables
    greedy, modest = node.table(), node.table()
    tables.wanted(greedy, 0.0)
    tables.wanted(modest, 0.0)
    node.hold(modest, [3, 3, 7])
    most = greedy.allowed // 4096
    node.hold(greedy, range(most))
    assert sorted(set(tables.slots().tolist())) == sorted(
        set((node.directory.slot_of[:most] - 1).tolist())
    )
    node.hold(greedy, range(most + 1))
    held = sorted(set(tables.slots().tolist()))
    assert held == sorted({int(node.directory.slot_of[k]) - 1 for k in (3, 7)})
    [error] = node.errors
    assert isinstance(error, ProtocolError) and "leases more" in str(error)
    assert greedy.budget == 0 and modest.budget == node.total
    assert tables.held_size == 2 * 4096


def test_a_client_was_cut_off_that_leased_something_else_while_its_table_was_read(
    node: Shared,
) -> None:
    """The daemon saw what it had leased before and after, together more than it may."""
    tables, table = node.tables, node.table()
    tables.wanted(table, 0.0)
    entries, arena = node.directory.entries_memory.address, np.zeros(MIB, np.uint8)
    for number in range(200):
        publish(entries, number, number * 4096, 4000)
    view = View(arena.ctypes.data, MIB, [(entries, 0, 256)])
    leaser = Leaser(Leases(table.memory), view, [0], 96)
    stop = np.frombuffer(mmap.mmap(-1, 8), np.uint64)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            one, early, late = np.zeros(1, np.int64), np.arange(1, 32), np.arange(32, 63)
            first, *_others = [leaser.lease(one) for _ in range(65)]
            first.release()
            while not stop[0]:
                # In the first panel; then in the last one, with something small in the first.
                lease = leaser.lease(early)
                assert not lease.left
                lease.release()
                small = leaser.lease(one)
                lease = leaser.lease(late)
                assert not lease.left
                small.release()
                lease.release()
            code = 0
        finally:
            os._exit(code)
    try:
        until(lambda: len(tables.slots()) > 64, "the client leases")
        torn, deadline = 0, time.monotonic() + DEADLINE_S / 3
        while torn < 5 and not node.errors:
            if time.monotonic() > deadline:
                pytest.skip("the race was not run: there is one processor, or none to spare")
            samples, _ = Hazards([table.memory]).read()
            torn += len(samples) * SMALLEST_SLOT > table.allowed
            assert len(tables.slots()) * SMALLEST_SLOT <= node.total
    finally:
        stop[0] = 1
        ended = os.waitpid(pid, 0)[1]
    assert not node.errors and ended == 0


def test_one_was_cut_off_for_what_two_others_did(
    node: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that took turns in holding too much ended with all who seemed to in the last look."""
    tables = node.tables
    wrong, also_wrong, honest = (node.table() for _ in range(3))
    for table in (wrong, also_wrong, honest):
        tables.wanted(table, 0.0)
    most = honest.allowed // 4096
    looks = 0

    class Between(Hazards):
        """Before each look the tables change."""

        def read(self) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
            nonlocal looks
            looks += 1
            for table, holds in ((wrong, looks % 2), (also_wrong, not looks % 2)):
                node.hold(table, range(most + 1 if holds else 0))
            # As it is seen of one that gives back and leases anew meanwhile.
            node.hold(honest, range(100, 100 + most + (looks % LOOKS == 0)))
            return super().read()

    monkeypatch.setattr("ffserve.engine.hazards.Hazards", Between)
    tables.share_out()
    for _ in range(20):
        held = set(tables.slots().tolist())
        assert held >= set((node.directory.slot_of[100 : 100 + most] - 1).tolist())
    assert not node.errors and honest.allowed
    monkeypatch.undo()
    tables.share_out()
    node.hold(honest, [])
    node.hold(also_wrong, [])
    node.hold(wrong, range(most + 1))
    tables.slots()
    assert len(node.errors) == 1 and not wrong.allowed, "who always does is cut off"


def test_a_share_that_nobody_used_was_kept_for_ever(node: Shared) -> None:
    tables, total = node.tables, node.total
    idle, used, holding, asking = (node.table() for _ in range(4))
    for table in (idle, used, holding, asking):
        tables.wanted(table, 0.0)
        node.hold(table, [1])
        node.hold(table, [])
    node.hold(holding, [2])
    for seconds in range(1, int(IDLE_S)):
        tables.wanted(asking, float(seconds))
    assert asking.budget == total // 4, "it is too early to tell"
    tables.wanted(asking, IDLE_S)
    assert asking.budget == total // 4
    node.hold(used, [3])
    node.hold(used, [])
    tables.wanted(asking, 2 * IDLE_S)
    assert idle.budget == idle.allowed == 0
    assert asking.budget == used.budget == holding.budget == total // 3
    tables.wanted(idle, 2 * IDLE_S + 1)
    assert [t.budget for t in (idle, used, holding, asking)] == [total // 4] * 4
    node.hold(holding, [])
    for times in (3, 4, 5):
        tables.wanted(asking, times * IDLE_S)
    assert asking.budget == total and tables.promised_size == total
    tables.drop(idle)
    assert asking.budget == total


def test_nonsense_in_a_table(node: Shared) -> None:
    tables = node.tables
    wild, quiet = node.table(), node.table()
    tables.wanted(wild, 0.0)
    tables.wanted(quiet, 0.0)
    node.hold(wild, [255, 256, 1 << 22, (1 << 32) - 2])
    assert not len(tables.slots()), "numbers that mean nothing, or nothing in memory"
    words(wild.memory)[8] = 1 << 63
    third = node.table()
    tables.wanted(third, 0.0)
    assert tables.promised_size <= node.total, "what a client says that it claims is not believed"
    named(wild.memory)[:] = 5
    words(wild.memory)[16:24] = (1 << 64) - 1
    assert not len(tables.slots())
    assert len(node.errors) == 1 and wild.budget == 0, "one sample, more often than there are slots"


# ---- a real daemon -------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", [sample(i, SIZES) for i in range(100)])


class Hostile(Raw):
    """A client that has a table of leases and writes what it likes."""

    def __init__(self, path: str) -> None:
        self.fds: list[int] = []
        super().__init__(path, leases=True)

    def receive(self) -> protocol.Message:
        while not self._messages:
            chunk, fds, _, _ = socket.recv_fds(self.socket, 65536, 16)
            self.fds += fds
            if not chunk:
                raise EOFError
            self._messages = self._decoder.feed(chunk)
        return self._messages.pop(0)

    def table(self) -> Table:
        assert len(self.fds) == 4
        table = Table(self.fds[3])
        for fd in self.fds:
            os.close(fd)
        return table


def test_a_client_that_writes_nonsense_is_cut_off_and_others_go_on(path: str) -> None:
    expect = [r"closed a session \(pid \d+\): the client leases more of the arena.*", r"  .*"]
    with serving(arena="1MiB", expect=expect) as daemon, daemon.open(path) as reader:
        with Hostile(daemon.socket) as hostile:
            with pytest.raises(OSError):
                os.ftruncate(hostile.fds[3], 0)
            with pytest.raises(OSError):
                os.ftruncate(hostile.fds[3], 1 << 30)
            table = hostile.table()
            named(table)[:] = np.arange(MOST_HAZARDS) % 100 + 1
            words(table)[16:24] = (1 << 64) - 1
            assert len(reader.read(range(100))) == 100, "nobody looks before it has a budget"
            dataset = hostile.open(path).dataset
            hostile.send(protocol.Lease(5, dataset, protocol.pack_indices(np.array([1]))))
            assert len(reader.read(range(100))) == 100
            error = hostile.refused()
            assert isinstance(error, ProtocolError) and "leases more" in str(error)
        assert [s.tobytes() for s in reader.read(range(100))] == [
            sample(i, SIZES) for i in range(100)
        ]
        everything_is_given_back(daemon)
