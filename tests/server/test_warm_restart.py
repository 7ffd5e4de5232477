"""Restarts that keep the cache: a successor takes over the memory of the daemon before."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import DEADLINE_S, Daemon, Raw, run_python, sample, serving, until, write
from service_manager import COLD, ManagedDaemon, inventory_of, managed

import ffserve
from ffserve import protocol
from ffserve.cache.inventory import NAME, SHARD, Inventory
from ffserve.client.daemon.shared_memory import DaemonSource
from ffserve.config import ServerConfig
from ffserve.errors import AccessDenied, ReadError, ServerUnavailable, UsageError
from ffserve.server.life import handover
from ffserve.server.life.daemon import EXIT_FAULT
from ffserve.server.life.restart import MOST_ATTEMPTS, PAGE_NAME, take
from ffserve.system.memfd import sealed_file

SIZES = (0, 1, 511, 512, 513, 5000, 70_000)
COUNT = 400
CONFIG = ServerConfig(arena_size_bytes=64 << 20)
SAMPLES = [sample(i, SIZES) for i in range(COUNT)]
SMALL = [sample(i, (100, 200, 0, 300), seed=1) for i in range(3000)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of every kind: records, small records that share slots, chunks."""
    folder = tmp_path_factory.mktemp("data")
    return [
        write(folder / "a.ffr", SAMPLES),
        write(folder / "small.tfrecord", SMALL),
        write(folder / "chunks.recordio", SAMPLES[:200]),
    ]


def contents(reader: ffserve.Reader) -> list[bytes]:
    return [bytes(each) for each in reader.read(range(len(reader)))]


def moved(reader: ffserve.Reader, generation: int) -> None:
    """Read what is cached until the reader has moved to the daemon of this generation."""

    def has_moved() -> bool:
        reader.read([0])
        source = reader._selector.source
        if not isinstance(source, DaemonSource):
            return False
        return source.connection.handshake._generation == generation

    until(has_moved, "the reader has moved to the successor")


def read_count(daemon: Daemon) -> int:
    return daemon.cache()["blocks_read"]


# ---- what is kept -------------------------------------------------------------------------------


@pytest.mark.check
def test_nothing_is_read_again_after_a_restart(paths: list[str]) -> None:
    with managed() as daemon:
        readers = [daemon.open(path) for path in paths]
        expected = [contents(reader) for reader in readers]
        assert read_count(daemon) > 0
        for generation, number in ((2, signal.SIGTERM), (3, signal.SIGKILL)):
            daemon.restart(number)
            # Nobody has noticed: it got the broken connection of the others.
            with daemon.open(paths[0]) as fresh:
                assert contents(fresh) == SAMPLES
            for reader, samples in zip(readers, expected, strict=True):
                moved(reader, generation)
                assert contents(reader) == samples
            assert read_count(daemon) == 0, "the successor has all samples"
        for reader in readers:
            reader.close()


READ_ALL_AS = """
import hashlib, os, sys, ffserve, ffserve.client.failover, ffserve.formats.ffrecord
ffserve.open
os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
with ffserve.open(sys.argv[1], server=sys.argv[2]) as reader:
    samples = [bytes(each) for each in reader.read(range(len(reader)))]
print(hashlib.sha256(b"".join(samples)).hexdigest())
"""


def private_files(daemon: Daemon) -> dict[int, tuple[Path, list[bytes]]]:
    """A file that only its owner may read, by owner."""
    if os.geteuid():
        pytest.skip("needs root")
    private = {}
    for uid in (4001, 4002):
        path, samples = daemon.directory / f"{uid}.ffr", [sample(i, SIZES, uid) for i in range(60)]
        write(path, samples)
        os.chown(path, uid, uid)
        path.chmod(0o600)
        private[uid] = path, samples
    return private


def read_as_owners(daemon: Daemon, private: dict[int, tuple[Path, list[bytes]]]) -> None:
    """Have owners read their files; compare."""
    for uid, (path, samples) in private.items():
        found = run_python(READ_ALL_AS, path, daemon.socket, uid).stdout.strip()
        assert found == hashlib.sha256(b"".join(samples)).hexdigest()


@pytest.mark.check
def test_samples_of_every_user_are_kept_apart_and_kept() -> None:
    with managed() as daemon:
        private = private_files(daemon)
        common = write(daemon.directory / "common.ffr", SAMPLES)
        os.chmod(common, 0o644)
        Path(daemon.socket).chmod(0o666)
        with daemon.open(common) as reader:
            assert contents(reader) == SAMPLES
        read_as_owners(daemon, private)
        domains = daemon.status()["domains"]
        assert len(domains) == 3
        daemon.restart()
        read_as_owners(daemon, private)
        with daemon.open(common) as reader:
            assert contents(reader) == SAMPLES
        assert read_count(daemon) == 0
        after = daemon.status()["domains"]
        assert [(each["user"], each["size"]) for each in after] == [
            (each["user"], each["size"]) for each in domains
        ]


@pytest.mark.check
def test_memory_of_a_user_that_is_lost_is_given_to_the_next_user() -> None:
    """Slots of it that were being filled stayed in place, under a number that the next user got,
    who then found another file's pages there."""
    from ffserve.cache.arena import SMALLEST_SLOT
    from ffserve.engine.slots import LOADING, RESIDENT

    lost = r"dropped the samples of user 4001, namespace \d+: the descriptor \S+ is missing"
    with managed(arena="16MiB", expect=[lost]) as daemon:
        private = private_files(daemon)
        Path(daemon.socket).chmod(0o666)
        with daemon.open(write(daemon.directory / "common.ffr", SAMPLES[:20])) as reader:
            contents(reader)
        read_as_owners(daemon, private)  # the number of the first one lies between two others
        daemon.end(signal.SIGKILL)
        with inventory_of(daemon) as inventory:
            ((_, serial, number, _, _),) = [row for row in inventory.domains() if row[3] == 4001]
            slabs = np.flatnonzero(inventory.slabs.domains == number)
            per_slab = inventory.get("slab_size") // SMALLEST_SLOT
            states = inventory.states.reshape(-1, per_slab)[slabs]
            assert (states == RESIDENT).any()
            states[states == RESIDENT] = LOADING
            inventory.states.reshape(-1, per_slab)[slabs] = states
        os.close(daemon.stored.pop(f"ffserve-arena-{serial}"))
        daemon.start()
        for _ in range(2):
            read_as_owners(daemon, {uid: private[uid] for uid in (4002, 4001)})


@pytest.mark.check
def test_shards_beyond_the_limit_wait_for_their_jobs(tmp_path: Path) -> None:
    patch = "import ffserve.limits as c; c.MOST_CLOSED = 2\n"
    patch += "import ffserve.server.sessions.server as s; s.TEND_INTERVAL_S = 0.05"
    with managed(patch=patch) as daemon:
        files = [write(tmp_path / f"{k}.ffr", SAMPLES[k : k + 20]) for k in range(5)]
        with daemon.open(files) as reader:
            expected = contents(reader)
        assert read_count(daemon) > 0, "by now the daemon knows that all reads have ended"
        daemon.restart()
        time.sleep(0.3)
        with daemon.open(files) as reader:
            assert contents(reader) == expected
        assert read_count(daemon) == 0


@pytest.mark.check
def test_a_file_that_changed_meanwhile_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", SAMPLES[:50])
    with managed() as daemon:
        with daemon.open(path) as reader:
            assert contents(reader) == SAMPLES[:50]
        daemon.end(signal.SIGKILL)
        write(path, SAMPLES[50:100])
        daemon.start()
        with daemon.open(path) as reader:
            assert contents(reader) == SAMPLES[50:100]
        assert read_count(daemon) > 0


@pytest.mark.check
def test_a_smaller_arena_keeps_what_fits_into_it(paths: list[str]) -> None:
    with managed(arena="16MiB", options=["--max-arena", "64MiB"]) as daemon:
        with daemon.open(paths[0]) as reader:
            assert contents(reader) == SAMPLES
        daemon.end()
        daemon.command[daemon.command.index("--arena") + 1] = "2MiB"
        daemon.start()
        until(lambda: daemon.status()["arena"]["size"] == 2 << 20, "the arena has shrunk")
        with daemon.open(paths[0]) as reader:
            assert contents(reader) == SAMPLES
        daemon.end()
        daemon.command[daemon.command.index("--arena") + 1] = "32MiB"
        daemon.start()
        with daemon.open(paths[0]) as reader:
            assert contents(reader) == SAMPLES
        assert daemon.status()["arena"]["size"] == 32 << 20


@pytest.mark.check
def test_numbers_are_not_given_again_after_a_restart(paths: list[str], tmp_path: Path) -> None:
    other = write(tmp_path / "b.ffr", SAMPLES[:30])
    with managed() as daemon:
        with daemon.open(paths[0]) as reader:
            assert contents(reader) == SAMPLES
        with inventory_of(daemon) as inventory:
            before = inventory.get("next_number")
        assert before >= COUNT
        daemon.restart()
        with daemon.open(other) as reader:
            assert contents(reader) == SAMPLES[:30]
            assert reader._selector.source._bases[0] >= before


# ---- killed at any moment -----------------------------------------------------------------------


class Checking(threading.Thread):
    """Reads random batches, and compares each sample, until it is told to stop."""

    def __init__(self, reader: ffserve.Reader, truth: list[bytes], seed: int) -> None:
        super().__init__(daemon=True)
        self.reader, self.truth = reader, truth
        self.random = np.random.default_rng(seed)
        self.stopping = False
        self.batches = 0
        self.longest_s = 0.0
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while not self.stopping:
                indices = self.random.integers(0, len(self.truth), 32)
                began = time.monotonic()
                batch = self.reader.read_batch(indices)
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                for index, found in zip(indices.tolist(), batch, strict=True):
                    assert bytes(found) == self.truth[index], f"sample {index}"
                self.batches += 1
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.stopping = True
        self.join(DEADLINE_S)
        assert self.error is None, self.error
        assert not self.is_alive()


def kill_again_and_again(paths: list[str], count: int, seed: int, arena: str) -> None:
    """Kill a daemon `count` times at random moments, while its clients miss and hit."""
    rng = random.Random(seed)
    truth = [SAMPLES, SMALL, SAMPLES[:200]]
    # A minute for each kill would set a small arena aside as a whole.
    patch = (
        "import ffserve.server.life.daemon as d; d.QUARANTINE_S, d.SETTLE_INTERVAL_S = 2.0, 0.05"
    )
    with managed(arena=arena, patch=patch) as daemon:
        readers = [daemon.open(path) for path in paths for _ in range(2)]
        jobs = [Checking(reader, truth[k // 2], seed * 100 + k) for k, reader in enumerate(readers)]
        for _ in range(count):
            time.sleep(rng.choice((0.0, 0.02, 0.2)) * rng.random())
            daemon.restart(signal.SIGKILL)
        batches = [job.batches for job in jobs]
        until(
            lambda: all(job.error or job.batches > n for job, n in zip(jobs, batches, strict=True)),
            "all jobs go on",
        )
        for job in jobs:
            job.end()
        for reader in readers:
            reader.close()
        with inventory_of(daemon) as inventory:
            assert inventory.get("generation") == count + 1, "no start was cold"


@pytest.mark.check
def test_no_sample_is_wrong_after_kills_while_slots_are_filled(paths: list[str]) -> None:
    kill_again_and_again(paths, 6, 1, "1MiB")


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arena", ["1MiB", "4MiB", "64MiB"])
def test_many_kills(paths: list[str], arena: str) -> None:
    kill_again_and_again(paths, int(os.environ.get("FFSERVE_KILLS", "100")), 2, arena)


@pytest.mark.parametrize(
    "count", [pytest.param(4, marks=pytest.mark.check), pytest.param(20, marks=pytest.mark.soak)]
)
def test_killed_while_it_takes_over(paths: list[str], count: int) -> None:
    with managed(arena="4MiB") as daemon:
        with daemon.open(paths[0]) as reader:
            contents(reader)
        for delay_s in np.linspace(0.05, 0.5, count).tolist():
            daemon.end(signal.SIGKILL)
            daemon.start(wait=False)
            time.sleep(delay_s)
            daemon.end(signal.SIGKILL)
            with inventory_of(daemon) as inventory:
                inventory.header["attempts"] = 0
            daemon.start()
            for path, truth in zip(paths, (SAMPLES, SMALL, SAMPLES[:200]), strict=True):
                with daemon.open(path) as reader:
                    assert contents(reader) == truth


@pytest.mark.check
def test_slots_that_were_being_filled_are_not_used_for_a_time(paths: list[str]) -> None:
    from ffserve.engine.slots import LOADING, RESIDENT

    quarantine_s = 3.0
    patch = (
        "import ffserve.server.life.daemon as d; d.QUARANTINE_S, d.SETTLE_INTERVAL_S = 3.0, 0.05"
    )
    with managed(arena="4MiB", patch=patch) as daemon:
        left_memory(daemon, paths[0])
        with inventory_of(daemon) as inventory:
            slots = np.flatnonzero(inventory.states == RESIDENT)[:20]
            inventory.states[slots] = LOADING
        begun = time.monotonic()
        daemon.start()
        with daemon.open(paths[0]) as reader:
            assert contents(reader) == SAMPLES
            with inventory_of(daemon) as inventory:
                kept = (inventory.states[slots] == LOADING).all()
                late = time.monotonic() - begun > quarantine_s  # on a very busy machine
                assert kept or late, "nothing is read into them"
                until(
                    lambda: (inventory.states[slots] != LOADING).all(), "the quarantine has ended"
                )
            assert contents(reader) == SAMPLES


# ---- what is not believed -----------------------------------------------------------------------


def cold(daemon: ManagedDaemon, reason: str, path: str) -> None:
    daemon.start()
    assert reason in daemon.text()
    with daemon.open(path) as reader:
        assert contents(reader) == SAMPLES
    assert read_count(daemon) > 0
    # The memory of the daemon before is not held any more.
    daemon.restart()
    with daemon.open(path) as reader:
        assert contents(reader) == SAMPLES
    assert read_count(daemon) == 0


def left_memory(daemon: ManagedDaemon, path: str) -> None:
    with daemon.open(path) as reader:
        contents(reader)
    assert daemon.status(), "by now the daemon knows that all reads have ended"
    daemon.end(signal.SIGKILL)


@pytest.mark.check
def test_another_layout_starts_cold_and_says_so(paths: list[str]) -> None:
    with managed(expect=[COLD]) as daemon:
        left_memory(daemon, paths[0])
        with inventory_of(daemon) as inventory:
            inventory.header["layout"] += 1
        cold(daemon, "the memory has layout version 2", paths[0])


@pytest.fixture(scope="module")
def left(paths: list[str]) -> Iterator[dict[str, int]]:
    """The descriptors that a daemon left, by name."""
    with managed(options=["--max-arena", "64MiB"]) as daemon:
        left_memory(daemon, paths[0])
        yield daemon.stored


@contextlib.contextmanager
def copied(left: dict[str, int]) -> Iterator[dict[str, int]]:
    """These descriptors, with a copy of the inventory, which a test and `take` may change."""
    fds = {name: os.dup(fd) for name, fd in left.items() if name != NAME}
    size = os.fstat(left[NAME]).st_size
    fds[NAME] = sealed_file("copy", size)
    end = 0
    with contextlib.suppress(OSError):  # the last part may be a hole
        while end < size:
            start = os.lseek(left[NAME], end, os.SEEK_DATA)
            end = os.lseek(left[NAME], start, os.SEEK_HOLE)
            os.pwrite(fds[NAME], os.pread(left[NAME], end - start, start), start)
    yield fds
    for fd in fds.values():
        os.close(fd)


def not_taken(fds: dict[str, int], reason: str) -> None:
    """Fail to take memory over; what was used is closed, and the rest is the caller's."""
    before = dict(fds)
    with pytest.raises(ReadError, match=reason):
        take(fds, CONFIG)
    for name in before.keys() - fds.keys():
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(before[name])


def test_memory_that_is_as_it_should_be_is_taken(left: dict[str, int]) -> None:
    with copied(left) as fds:
        kept = take(fds, CONFIG)
        assert not fds and [shard.count for shard in kept.shards] == [COUNT]
        for file in (kept.page, kept.inventory, *(f for each in kept.domains for f in each.files)):
            file.close()


@pytest.mark.parametrize("name", [PAGE_NAME, NAME, "ffserve-arena-1", "ffserve-directory-1"])
def test_files_that_are_not_what_they_should_be(
    left: dict[str, int], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def unsealed() -> int:
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, os.fstat(left[name]).st_size)
        return fd

    def of_all() -> int:
        fd = sealed_file("x", os.fstat(left[name]).st_size)
        os.fchmod(fd, 0o666)
        return fd

    def read_only() -> int:
        return os.open(f"/proc/self/fd/{left[name]}", os.O_RDONLY)

    def smaller() -> int:
        return sealed_file("x", 8192)

    caplog.set_level("INFO", "ffserve")
    for make, reason in (
        (unsealed, "no sealed memory file"),
        (of_all, "with mode 666"),
        (read_only, "not for reading and writing"),
        (smaller, "8192 bytes|begins with other bytes"),
        (lambda: os.open("/dev/null", os.O_RDWR), "no sealed memory file"),
        (None, f"the descriptor {name} is missing"),
    ):
        with copied(left) as fds:
            os.close(fds.pop(name))
            if make is not None:
                fds[name] = make()
            if name in (PAGE_NAME, NAME):
                not_taken(fds, reason)
            else:
                not_taken(fds, "the memory of the first domain is missing")
                assert re.search(f"dropped the samples of .*{reason}", caplog.text)
                caplog.clear()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("magic", 0, "begins with other bytes"),
        ("slabs", 1 << 40, "invalid sizes"),
        ("slabs", 3, "does not fit its 3 slabs"),
        ("slab_size", 12345, "invalid sizes"),
        ("capacity", 3, "invalid sizes"),
        ("generation", 0, "invalid generation"),
        ("terms", b"\0" * 32, "another value of 'common'"),
        ("state", 2, "internal error"),
        ("attempts", MOST_ATTEMPTS, "ended while they were taking over this memory"),
    ],
)
def test_headers_that_are_not_believed(
    left: dict[str, int], field: str, value: Any, reason: str
) -> None:
    with copied(left) as fds:
        fd = os.dup(fds[NAME])
        inventory = Inventory.adopt(fd, os.fstat(fd).st_size)
        inventory.header[field] = np.void(value) if isinstance(value, bytes) else value
        inventory.close()
        not_taken(fds, reason)


EXTREMES = (-(1 << 63), -1, 0, 1, 1 << 31, (1 << 63) - 1)


def numbers_of(inventory: Inventory, table: str) -> list[tuple[np.ndarray, str]]:
    """The numbers of the first rows of a table."""
    rows = getattr(inventory, table)[:2]
    assert rows.dtype.names is not None
    return [(rows, name) for name in rows.dtype.names if rows.dtype[name].kind in "iu"]


@pytest.mark.check
@pytest.mark.parametrize("table", ["header", "_domains", "_shards"])
def test_any_number_in_the_inventory_is_refused_or_harmless(
    left: dict[str, int], table: str
) -> None:
    for place in range(40):
        for value in EXTREMES:
            with copied(left) as fds, contextlib.ExitStack() as stack:
                fd = os.dup(fds[NAME])
                inventory = Inventory.adopt(fd, os.fstat(fd).st_size)
                stack.callback(inventory.close)
                numbers = numbers_of(inventory, table)
                if place >= len(numbers):
                    return
                rows, name = numbers[place]
                rows[name] = np.array([value], np.int64).astype(rows.dtype[name])
                del rows, numbers
                try:
                    kept = take(fds, CONFIG)
                except ReadError:
                    continue
                files = (f for each in kept.domains for f in each.files)
                for file in (kept.page, kept.inventory, *files):
                    file.close()


@pytest.mark.check
@pytest.mark.parametrize("table", ["_domains", "_shards"])
def test_no_number_in_the_inventory_makes_a_sample_another_one(
    paths: list[str], table: str
) -> None:
    truth = (SAMPLES, SMALL, SAMPLES[:200])
    with managed(expect=[r"dropped the samples of .*", COLD]) as daemon:
        for place in range(40):
            for path, samples in zip(paths, truth, strict=True):
                with daemon.open(path) as reader:
                    assert contents(reader) == samples
            left_memory(daemon, paths[0])
            with inventory_of(daemon) as inventory:
                numbers = numbers_of(inventory, table)
                if place >= len(numbers):
                    break
                rows, name = numbers[place]
                value = EXTREMES[place % len(EXTREMES)]
                rows[name] = np.array([value], np.int64).astype(rows.dtype[name])
                del rows, numbers
            daemon.start()


@pytest.mark.check
def test_a_lost_file_starts_cold_and_says_so(paths: list[str]) -> None:
    with managed(expect=[COLD, r"dropped the samples of .*"]) as daemon:
        left_memory(daemon, paths[0])
        os.close(daemon.stored.pop("ffserve-arena-1"))
        cold(daemon, "starting with empty memory", paths[0])


@pytest.mark.check
def test_garbage_in_the_tables_is_never_served(paths: list[str]) -> None:
    """Whatever the tables hold, a sample is right, or read again."""
    rng = np.random.default_rng(0)
    with managed(arena="4MiB", expect=[r"dropped the samples of .*", COLD]) as daemon:
        for round in range(9):
            left_memory(daemon, paths[round % 3])
            with inventory_of(daemon) as inventory:
                for table in (
                    *inventory.slabs,
                    inventory.states,
                    inventory.leases[:0],
                    inventory._shards[:4],
                    inventory._domains[1:4],
                ):
                    view = table.view(np.uint8).reshape(-1)[: 64 * SHARD.itemsize]
                    if len(view):
                        places = rng.integers(0, len(view), 20)
                        view[places] = rng.integers(0, 256, 20)
            daemon.start()
            for path, truth in zip(paths, (SAMPLES, SMALL, SAMPLES[:200]), strict=True):
                with daemon.open(path) as reader:
                    assert contents(reader) == truth


@pytest.mark.check
def test_shards_are_compared_with_their_files(paths: list[str]) -> None:
    """A wrong size made other blocks of the samples, and a wrong kind of checksum verified none."""
    fields = (("payload_size", 1 << 40), ("checksum_kind", 0), ("alignment", 1 << 15))
    with managed() as daemon:
        for field, value in fields:
            left_memory(daemon, paths[0])
            with inventory_of(daemon) as inventory:
                assert inventory._shards[field][0] != value
                inventory._shards[field][0] = value
            daemon.start()
            with daemon.open(paths[0]) as reader:
                assert contents(reader) == SAMPLES
            assert read_count(daemon) > 0, field


@pytest.mark.check
def test_entries_that_point_elsewhere_are_dropped(paths: list[str]) -> None:
    from ffserve.engine.slots import ENTRY_DTYPE
    from ffserve.system.memfd import MemoryFile, SharedMemory

    rng = np.random.default_rng(0)
    with managed(arena="16MiB") as daemon:
        left_memory(daemon, paths[0])
        fd = os.dup(daemon.stored["ffserve-directory-1"])
        file = MemoryFile.adopted("x", fd, os.fstat(fd).st_size)
        memory = SharedMemory("x", file.size, file)
        entries = memory.array[: COUNT * 16].view(ENTRY_DTYPE)
        assert (entries["seq"] & 1).sum() == COUNT
        hit = rng.choice(COUNT, 50, replace=False)
        # Beyond the arena. The lengths stay: they are compared with the file's.
        elsewhere = rng.integers(16 << 20, 1 << 47, 50).astype(np.uint64)
        # Other samples' slots, whose own entries stay: two samples cannot share one.
        elsewhere[25:] = entries["place"][np.setdiff1d(range(COUNT), hit)[:25]]
        entries["place"][hit] = elsewhere
        memory.close()
        daemon.start()
        with daemon.open(paths[0]) as reader:
            assert contents(reader) == SAMPLES
        assert 0 < read_count(daemon) < 200


@pytest.mark.check
def test_memory_in_doubt_is_not_taken_over(paths: list[str], tmp_path: Path) -> None:
    """After an internal error the tables may be wrong."""
    trigger = tmp_path / "now"
    patch = f"""
import os
from ffserve.server.sessions.server import Server
work = Server._show_life
def faulty(self):
    if os.path.exists({str(trigger)!r}):
        raise KeyError("fault of the test")
    work(self)
Server._show_life = faulty
"""
    with managed(
        patch=patch, expect=[COLD, r"internal error.*", r"[T ].*", r"KeyError.*"]
    ) as daemon:
        with daemon.open(paths[0]) as reader:
            assert contents(reader) == SAMPLES
        trigger.touch()
        assert daemon.process is not None
        assert daemon.process.wait(DEADLINE_S) == EXIT_FAULT
        daemon.process = None
        trigger.unlink()
        cold(daemon, "ended with an internal error", paths[0])


@pytest.mark.check
def test_a_stopped_service_keeps_nothing(paths: list[str]) -> None:
    with managed() as daemon:
        left_memory(daemon, paths[0])
        daemon.drop_store()
        daemon.start()
        with daemon.open(paths[0]) as reader:
            assert contents(reader) == SAMPLES
        assert read_count(daemon) > 0


# ---- leases -------------------------------------------------------------------------------------


@pytest.mark.check
def test_leased_samples_stay_in_place_until_their_reader_is_gone(paths: list[str]) -> None:
    patch = "import ffserve.server.life.daemon as d; d.SETTLE_INTERVAL_S = 0.05"
    with managed(arena="4MiB", patch=patch) as daemon:
        reader, other = daemon.open(paths[0]), daemon.open(paths[0])
        leased = [index for index in range(COUNT) if 0 < len(SAMPLES[index]) < 6000][:40]
        with reader.lease(leased) as views:
            kept = [bytes(view) for view in views]
            for _ in range(2):
                daemon.restart()
                # All memory is used anew, several times.
                for _ in range(3):
                    assert contents(other) == SAMPLES
                assert [bytes(view) for view in views] == kept == [SAMPLES[i] for i in leased]
            with inventory_of(daemon) as inventory:
                assert np.count_nonzero(inventory.leases) > 0
        reader.close()
        with inventory_of(daemon) as inventory:
            until(lambda: not inventory.leases.any(), "the leases have ended")
        assert contents(other) == SAMPLES
        other.close()


@pytest.mark.check
def test_leased_samples_of_a_lost_shard_stay_over_two_restarts(paths: list[str]) -> None:
    """The second successor took their slots for slots that were being filled, and used them."""
    patch = (
        "import ffserve.server.life.daemon as d; d.QUARANTINE_S, d.SETTLE_INTERVAL_S = 0.2, 0.05"
    )
    with managed(arena="4MiB", patch=patch) as daemon:
        with daemon.open(paths[0]) as reader:
            leased = [index for index in range(COUNT) if 0 < len(SAMPLES[index]) < 6000][:40]
            with reader.lease(leased) as views:
                for _ in range(2):
                    daemon.end(signal.SIGKILL)
                    with inventory_of(daemon) as inventory:
                        for row in inventory.shards():
                            inventory.remove_shard(row.base)
                    daemon.start()
                time.sleep(1.0)  # the quarantine has ended
                with daemon.open(paths[0]) as other:
                    for _ in range(3):
                        assert contents(other) == SAMPLES
                assert [bytes(view) for view in views] == [SAMPLES[i] for i in leased]
        with inventory_of(daemon) as inventory:
            until(lambda: not inventory.leases.any(), "the leases have ended")


# ---- handover -----------------------------------------------------------------------------------


@contextlib.contextmanager
def taking_over(daemon: Daemon, *options: str) -> Iterator[subprocess.Popen[str]]:
    heir = subprocess.Popen(
        [*daemon.command, "--handover", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield heir
    finally:
        heir.kill()
        heir.communicate()


@pytest.mark.check
def test_a_daemon_takes_over_from_a_running_one(paths: list[str]) -> None:
    with serving(expect=[r"stopping: \d+ clients, another daemon takes over"]) as daemon:
        readers = [daemon.open(path) for path in paths]
        truth = [SAMPLES, SMALL, SAMPLES[:200]]
        jobs = [Checking(r, t, 5) for r, t in zip(readers, truth, strict=True)]
        for reader, samples in zip(readers, truth, strict=True):
            assert contents(reader) == samples
        with taking_over(daemon) as heir:
            assert daemon.process is not None
            assert daemon.process.wait(DEADLINE_S) == 0
            daemon.process = None
            for reader in readers:
                moved(reader, 2)
            assert daemon.status()["pid"] == heir.pid
            assert read_count(daemon) == 0
            for job in jobs:
                job.end()
            for reader, samples in zip(readers, truth, strict=True):
                assert contents(reader) == samples
                reader.close()
            assert read_count(daemon) == 0
            assert Path(daemon.socket + ".lock").read_text() == f"{heir.pid}\n"
            heir.terminate()
            output, _ = heir.communicate(timeout=DEADLINE_S)
            assert "took over" in output
        assert not os.path.exists(daemon.socket)


def test_only_its_own_user_takes_a_daemon_over(paths: list[str]) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    with serving(expect=[r"closed a session .*"]) as daemon:
        Path(daemon.socket).chmod(0o666)
        os.setegid(4001)
        os.seteuid(4001)
        try:
            with Raw(daemon.socket) as raw:
                raw.send(protocol.Handover(3))
                assert "did not announce" in str(raw.refused())
            with Raw(daemon.socket, handover=True) as raw:
                raw.send(protocol.Handover(3))
                answer = raw.receive()
        finally:
            os.seteuid(0)
            os.setegid(0)
        assert isinstance(answer, protocol.Fail) and answer.tag == 3
        assert isinstance(protocol.error_from_wire(answer.error), AccessDenied)
        with daemon.open(paths[0]) as reader:
            assert contents(reader) == SAMPLES


@pytest.mark.check
def test_no_handover_without_a_daemon_or_under_a_service_manager(paths: list[str]) -> None:
    daemon = Daemon()
    done = subprocess.run([*daemon.command, "--handover"], capture_output=True, text=True)
    assert done.returncode == 2 and "no daemon serves this socket" in done.stderr
    daemon.close()
    with managed() as service, taking_over(service) as heir:
        output, _ = heir.communicate(timeout=DEADLINE_S)
        assert heir.returncode == 2 and "service manager" in output
        with service.open(paths[0]) as reader:
            assert contents(reader) == SAMPLES


@pytest.mark.check
def test_a_handover_failed_at_once_while_many_clients_were_connecting(paths: list[str]) -> None:
    """And said that no daemon serves the socket."""
    over = r"stopping: \d+ clients, another daemon takes over"
    with serving(expect=[over]) as daemon, contextlib.ExitStack() as stack:
        os.kill(daemon.pid, signal.SIGSTOP)
        with contextlib.suppress(BlockingIOError):
            while True:  # until the queue is full
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(daemon.socket)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handover, "CONNECT_TIMEOUT_S", 0.1)
            with pytest.raises(UsageError, match="took no connection") as caught:
                handover.take_from(daemon.socket)
        assert caught.value.hint is not None and "overloaded" in caught.value.hint
        with taking_over(daemon) as heir:
            time.sleep(1.0)
            assert heir.poll() is None
            os.kill(daemon.pid, signal.SIGCONT)
            stack.close()
            assert daemon.process is not None and daemon.process.wait(DEADLINE_S) == 0
            daemon.process = None
            assert heir.poll() is None


@pytest.mark.check
def test_settings_that_cannot_be_do_not_end_the_daemon_before(paths: list[str]) -> None:
    """They were noticed after it had handed over."""
    with serving() as daemon, daemon.open(paths[0]) as reader:
        assert contents(reader) == SAMPLES
        with taking_over(daemon, "--socket-group", "no-such-group") as heir:
            output, _ = heir.communicate(timeout=DEADLINE_S)
            assert heir.returncode == 2 and "unknown group" in output
        assert contents(reader) == SAMPLES
        assert daemon.process is not None and daemon.process.poll() is None


def test_a_handover_without_a_free_descriptor_was_an_internal_error(paths: list[str]) -> None:
    with serving() as daemon, daemon.open(paths[0]) as reader:
        with Raw(daemon.socket, handover=True) as raw:
            limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
            raw.send(protocol.Handover(3))
            answer = raw.receive()
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
        assert isinstance(answer, protocol.Fail) and answer.tag == 3
        assert isinstance(protocol.error_from_wire(answer.error), ServerUnavailable)
        assert contents(reader) == SAMPLES


@pytest.mark.parametrize("after", ["connecting", "WELCOME", "a part"])
def test_a_daemon_that_dies_while_it_hands_over(after: str, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def predecessor() -> None:
            connection, _ = listener.accept()
            with connection:
                if after == "connecting":
                    # The second message of the successor meets a closed socket.
                    connection.recv(8)
                    return
                connection.recv(65536)
                fds = [listener.fileno()]
                welcome = protocol.Welcome({"version": 1})
                socket.send_fds(connection, [protocol.encode(welcome)], fds)
                if after == "a part":
                    part = protocol.encode(protocol.Handed(1, ["listener"], 2))
                    socket.send_fds(connection, [part], fds)

        thread = threading.Thread(target=predecessor)
        thread.start()
        with pytest.raises(ServerUnavailable, match="did not hand over") as caught:
            handover.take_from(path)
        thread.join()
        assert caught.value.path == path
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "nothing is held")


@pytest.mark.check
def test_http_is_handed_over(paths: list[str]) -> None:
    with contextlib.closing(Daemon()) as place:
        http = str(place.directory / "http")
        expect = [r"stopping: \d+ clients, another daemon takes over"]
        with serving(options=["--http", http], expect=expect) as daemon:

            def ready() -> bool:
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(DEADLINE_S)
                    if client.connect_ex(http):
                        return False
                    client.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    return client.recv(4096).startswith(b"HTTP/1.1 200 ")

            until(ready, "it answers HTTP requests")
            with daemon.open(paths[0]) as reader:
                assert contents(reader) == SAMPLES
                with taking_over(daemon) as heir:
                    assert daemon.process is not None
                    assert daemon.process.wait(DEADLINE_S) == 0
                    daemon.process = None
                    until(ready, "the successor answers HTTP requests")
                    moved(reader, 2)
                    assert daemon.status()["pid"] == heir.pid
                    assert read_count(daemon) == 0
                    heir.terminate()
                    assert heir.wait(DEADLINE_S) == 0
            assert not os.path.exists(http)
