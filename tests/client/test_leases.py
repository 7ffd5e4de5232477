"""Leases without asking: what is read in place stays, whatever the daemon evicts meanwhile."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from daemon import DEADLINE_S, Raw, get, sample, serving, stopped, until, write
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_cache import Node
from test_daemon import client, everything_is_given_back
from test_hazards import named, words

import ffserve
from ffserve import protocol
from ffserve.cache.arena import SMALLEST_SLOT, Arena
from ffserve.cache.directory import Directory
from ffserve.cache.shm import sealed_file
from ffserve.client.remote import RemoteSource
from ffserve.engine.hazards import MOST_HAZARDS, TABLE_SIZE, Hazards, Leaser, Leases, Table
from ffserve.engine.view import View, publish
from ffserve.errors import FFServeError, ProtocolError, UsageError
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


def table_of(reader: ffserve.Reader) -> Table:
    source = reader._supply.source
    assert isinstance(source, RemoteSource)
    leases = source.connection.given.leases
    assert leases is not None
    return leases._table


def written_by(reader: ffserve.Reader) -> bytes:
    """All of a reader's table but the budget, which is the daemon's to write."""
    return bytes(table_of(reader).memory)[8:]


def leased_by(reader: ffserve.Reader) -> int:
    """How many samples this process leases without asking."""
    return len(Hazards([table_of(reader)]).read()[0])


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", [sample(i, SIZES) for i in range(100)])


def warm(reader: ffserve.Reader, indices: Sequence[int]) -> None:
    """Have samples in memory, and a budget."""
    with reader.lease(indices):
        pass


def test_a_lease_of_what_is_in_memory_sends_nothing(path: str) -> None:
    with serving() as daemon, daemon.open(path) as reader:
        warm(reader, range(100))
        asked = daemon.cache()["asked"]
        for _ in range(10):
            with reader.lease([5, 6, 5]) as views:
                assert [v.tobytes() for v in views] == [sample(i, SIZES) for i in (5, 6, 5)]
                assert not any(v.flags.writeable or v.flags.owndata for v in views)
                assert leased_by(reader) == 3
        assert leased_by(reader) == 0
        assert daemon.cache()["asked"] == asked
        assert reader.stats()["hits"] == 30
        with pytest.raises(ValueError, match="mine"), reader.lease([1]):
            raise ValueError("mine")
        assert leased_by(reader) == 0


def test_an_array_of_indices_is_leased_like_a_list(path: str) -> None:
    """It takes a shorter way; what the reader counts, tells and refuses is the same."""
    with serving() as daemon, daemon.open(path) as reader:
        warm(reader, range(100))
        asked = daemon.cache()["asked"]
        for chosen in (np.array([5, 6, 5]), np.arange(10)[::2], np.array([7], np.uint8)):
            with reader.lease(chosen) as views:
                assert [v.tobytes() for v in views] == [sample(i, SIZES) for i in chosen.tolist()]
                assert leased_by(reader) == len(chosen)
        assert leased_by(reader) == 0
        assert daemon.cache()["asked"] == asked
        assert reader.stats()["hits"] == 9
        leased = (5, 6, 5, 0, 2, 4, 6, 8, 7)
        assert reader.stats()["bytes"] == sum(len(sample(i, SIZES)) for i in leased)
        with reader.lease(np.zeros(0, np.int64)) as views:
            assert list(views) == []
        for bad in ([3, 100], [-1], [2**62]):
            with pytest.raises(IndexError), reader.lease(np.array(bad)):
                pass
        assert leased_by(reader) == 0
        reader.close()
        with pytest.raises(UsageError, match="closed"), reader.lease(np.arange(3)):
            pass


WAITING = """
import sys, ffserve
r = ffserve.open(sys.argv[1], server=sys.argv[2])
words = memoryview(r._supply.source.connection.given.leases._table.memory).cast("Q")
for _ in range(3):
    with r.lease(range(5)): pass
    assert words[0] > 0, "the share is not given anew"
    print("ready", flush=True)
    sys.stdin.readline()
    assert words[0] == 0, "the share was not taken"
print("done", flush=True)
"""


def test_who_leases_again_has_a_share_again(path: str) -> None:
    patch = "import ffserve.server.hazards as hazards; hazards.IDLE_S = 0.0"
    with (
        serving(arena="1MiB", patch=patch) as daemon,
        client(WAITING, path, daemon.socket) as other,
    ):
        assert other.stdin is not None and other.stdout is not None
        with daemon.open(path) as reader:
            for k in range(3):
                for _ in range(3):
                    warm(reader, range(50, 80))
                assert words(table_of(reader))[0] == MIB * SHARE[0] // SHARE[1]
                other.stdin.write("\n")
                other.stdin.flush()
                assert other.stdout.readline() == ("done\n" if k == 2 else "ready\n")


LEASING = """
import sys, time, zlib, numpy as np, ffserve
path, server, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
truth = [zlib.crc32(s) for s in ffserve.open(path, server="off").read(range(100))]
r = ffserve.open(path, server=server)
random = np.random.default_rng(int(sys.argv[4]))
print("ready", flush=True)
end, leased, asking = time.monotonic() + seconds, 0, 0
table = r._supply.source.connection.given.leases._table
while time.monotonic() < end or leased < 200:
    chosen = random.integers(0, 100, 3)
    with r.lease(chosen) as views:
        for _ in range(2):
            for i, view in zip(chosen.tolist(), views):
                assert zlib.crc32(view) == truth[i], i
        leased += int(np.frombuffer(table.memory, np.uint64)[16:24].any())
print(leased, flush=True)
"""


def lease_while_all_is_evicted(path: str, seconds: float, clients: int) -> None:
    with serving(arena="1MiB") as daemon:
        with daemon.open(path) as reader:
            reader.read(range(100))
            before = daemon.cache()["evicted"]
            with contextlib.ExitStack() as stack:
                running = [
                    stack.enter_context(client(LEASING, path, daemon.socket, seconds, seed))
                    for seed in range(clients)
                ]
                while any(process.poll() is None for process in running):
                    for first in range(0, 100, 10):
                        reader.read(range(first, first + 10))
                for process in running:
                    assert process.stdout is not None
                    assert process.returncode == 0
                    assert int(process.stdout.read()) >= 200
            assert daemon.cache()["evicted"] > before + 100
        everything_is_given_back(daemon)


def test_leased_samples_match_their_checksums_while_all_is_evicted(path: str) -> None:
    lease_while_all_is_evicted(path, 2.0, 2)


@pytest.mark.soak
def test_leased_samples_match_their_checksums_for_long(path: str) -> None:
    lease_while_all_is_evicted(path, 60.0, 6)


def test_leased_bytes_stay_while_everything_else_is_evicted(path: str) -> None:
    with serving(arena="1MiB") as daemon:
        with daemon.open(path) as reader:
            warm(reader, range(5))
            with reader.lease(range(5)) as views:
                assert leased_by(reader) == 5
                for start in range(5, 95, 10):
                    reader.read(range(start, start + 10))
                assert [v.tobytes() for v in views] == [sample(i, SIZES) for i in range(5)]
                assert daemon.status()["arena"]["leased"] >= 5 * SIZES[0]
            assert daemon.status()["arena"]["leased"] == 0
        everything_is_given_back(daemon)


HOLDING = """
import sys, threading, zlib, ffserve
r = ffserve.open(sys.argv[1], server=sys.argv[2])
with r.lease(range(5)): pass
lease = r.lease(range(5)); views = lease.__enter__()
held = r._supply.source.connection.given.leases._table.memory
assert any(held[128:192]), "leased by asking"
sums = [zlib.crc32(v) for v in views]
print("ready", flush=True)
sys.stdin.readline()
assert sums == [zlib.crc32(v) for v in views]
print("same", flush=True)
threading.Event().wait()
"""


def test_a_client_killed_while_it_holds_leaves_nothing_behind(path: str) -> None:
    with serving(arena="1MiB") as daemon:
        with client(HOLDING, path, daemon.socket) as holder:
            assert daemon.status()["arena"]["leased"] >= 5 * SIZES[0]
            holder.kill()
        until(lambda: daemon.status()["arena"]["leased"] == 0, "its leases have ended")
        everything_is_given_back(daemon)


def test_a_stopped_client_keeps_its_leases_and_nobody_waits_for_it(path: str) -> None:
    with serving(arena="1MiB") as daemon, client(HOLDING, path, daemon.socket) as holder:
        with stopped(holder.pid), daemon.open(path) as reader:
            for _ in range(2):
                got = [s.tobytes() for s in reader.read(range(100))]
                assert got == [sample(i, SIZES) for i in range(100)]
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "same\n"


def test_a_child_leaves_its_parents_leases_alone(path: str) -> None:
    with serving() as daemon, daemon.open(path) as reader:
        warm(reader, range(10))
        lease = reader.lease(range(10))
        views = lease.__enter__()
        before = written_by(reader)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                lease.__exit__(None, None, None)
                for _ in range(2):
                    with reader.lease(range(20)) as own:
                        assert [v.tobytes() for v in own] == [sample(i, SIZES) for i in range(20)]
                assert leased_by(reader) == 0
                status = 0
            finally:
                os._exit(status)
        _, ended = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(ended) == 0
        assert written_by(reader) == before, "the child wrote into it"
        assert [v.tobytes() for v in views] == [sample(i, SIZES) for i in range(10)]
        lease.__exit__(None, None, None)
        assert leased_by(reader) == 0


@pytest.mark.parametrize("asked", [False, True], ids=["by table", "by asking"])
def test_leased_bytes_changed_when_the_daemon_was_told_to_stop(tmp_path: Path, asked: bool) -> None:
    """One session after the other is closed; the others' requests waited for this one's room."""
    truth = [sample(k, SIZES) for k in range(5)] + [sample(k, [900_000]) for k in range(5, 10)]
    path = write(tmp_path / "a.ffr", truth)
    options, expect = ["--drain-timeout", "0.2"], ["stopped with requests unanswered after .*"]
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(serving(arena="1MiB", options=options, expect=expect))
        reader = stack.enter_context(daemon.open(path))
        if not asked:
            warm(reader, [0])
        views = stack.enter_context(reader.lease([0]))
        assert leased_by(reader) == (0 if asked else 1)
        for index in range(5, 10):
            waiting = stack.enter_context(Raw(daemon.socket))
            waiting.send(get(2, waiting.open(path).dataset, [index]))
        until(lambda: daemon.cache()["blocked"] == 5, "the others wait for room")
        daemon.end(signal.SIGTERM)
        assert views[0].tobytes() == truth[0]


def test_what_the_budget_does_not_cover_is_leased_the_other_way_or_copied(path: str) -> None:
    with serving(arena="1MiB") as daemon, daemon.open(path) as reader:
        warm(reader, range(20))
        with reader.lease(range(60)) as views, reader.lease(range(40, 100)) as others:
            assert [v.tobytes() for v in views] == [sample(i, SIZES) for i in range(60)]
            assert [v.tobytes() for v in others] == [sample(i, SIZES) for i in range(40, 100)]
            assert daemon.status()["arena"]["leased"] <= MIB // 2
        everything_is_given_back(daemon)


def test_the_arena_shrinks_when_the_lease_is_over(path: str) -> None:
    with serving(arena="8MiB") as daemon, daemon.open(path) as reader:
        warm(reader, range(100))
        reader.read(range(100))
        with reader.lease(range(0, 100, 2)) as views:
            assert leased_by(reader) == 50
            source = reader._supply.source
            assert isinstance(source, RemoteSource)
            source.connection.resize(2 * MIB)
            until(lambda: daemon.status()["arena"]["held"], "all but what is leased is empty")
            assert daemon.status()["arena"]["resizing"]
            assert [v.tobytes() for v in views] == [sample(i, SIZES) for i in range(0, 100, 2)]
        until(lambda: not daemon.status()["arena"]["resizing"], "it has shrunk")
        assert [s.tobytes() for s in reader.read(range(100))] == [
            sample(i, SIZES) for i in range(100)
        ]


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


def test_a_daemon_whose_table_is_none_is_refused(path: str) -> None:
    from ffserve.client.greeting import map_table

    small = sealed_file("test", 4096)
    with pytest.raises(ProtocolError, match="table of leases"):
        map_table(small, TABLE_SIZE, "s")
    loose = os.memfd_create("test")
    os.ftruncate(loose, TABLE_SIZE)
    with pytest.raises(ProtocolError, match="table of leases"):
        map_table(loose, TABLE_SIZE, "s")
    with pytest.raises(ProtocolError, match="table of leases"):
        map_table(sealed_file("test", TABLE_SIZE), TABLE_SIZE - 1, "s")
    for fd in (small, loose):
        with pytest.raises(OSError):
            os.fstat(fd)
