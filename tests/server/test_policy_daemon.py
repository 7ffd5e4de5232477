"""The policy in a real daemon: prefetch; jobs that compete, depart, stop or are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from daemon import Daemon, Raw, get, sample, serving, until, write

import ffserve
from ffserve import protocol

COUNT, SIZE = 1200, 16_000
BATCH = 20


def content(index: int) -> bytes:
    """Return a sample of the test files."""
    return sample(index, (SIZE,))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files of COUNT samples, each larger than the arena."""
    directory = tmp_path_factory.mktemp("data")
    samples = [content(i) for i in range(COUNT)]
    return [write(directory / name, samples) for name in ("a.ffr", "b.ffr")]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon whose arena holds a quarter of a file; kills the jobs that a test leaves behind."""
    with serving(arena="6MiB") as running:
        yield running
        for job in Job.started:
            job.kill()
        Job.started.clear()


def order(seed: int, epoch: int) -> Any:
    """Return a random order of all samples."""
    return np.random.default_rng([seed, epoch]).permutation(COUNT)


def read_slowly(reader: ffserve.Reader, epoch: int, numbers: Any) -> None:
    """Read like a job that computes for longer than the disk reads; check every byte."""
    source: Any = reader._selector.current()
    for start in range(0, len(numbers), BATCH):
        part = numbers[start : start + BATCH]
        until(lambda part=part: not len(source.view.locate(part)[1]), "the batch is prefetched")
        assert [s.tobytes() for s in reader.read(part)] == [content(i) for i in part]
        reader.reached(epoch, start + len(part))


def progress_of(daemon: Daemon, job: str | None = None) -> dict[str, Any]:
    """Return the progress of a job, or the only one."""
    (progress,) = [each for each in daemon.status()["progress"] if job in (None, each["job"])]
    return dict(progress)


@pytest.mark.check
def test_an_announced_job_that_computes_sends_no_request(daemon: Daemon, paths: list[str]) -> None:
    with daemon.open(paths[0]) as reader:
        reader.announce(order(1, 0), 0)
        for epoch in range(3):
            reader.announce(order(1, epoch + 1), epoch + 1)
            # Prefetching begins with the announcement, before the first request.
            read_slowly(reader, epoch, order(1, epoch))
        assert reader.stats()["misses"] == 0
        facts = daemon.status()
        # A quarter fits; the rest was read once per epoch, and little more.
        kept = facts["arena"]["size"] / (COUNT * SIZE)
        epochs = facts["cache"]["blocks_read"] / COUNT
        assert 1 + 2 * (1 - kept) - 0.1 <= epochs <= 3 * 1.05
        assert facts["cache"]["prefetched"] == facts["cache"]["blocks_read"]
        assert facts["cache"]["asked"] == 0
        (job,) = [job for job in facts["jobs"] if job["paths"]]
        assert job["hit_rate"] == 1.0 and job["read_size"] > 0
        assert job["alone_size"] > 0


@pytest.mark.check
def test_two_announced_jobs_read_little_more_than_one(daemon: Daemon, paths: list[str]) -> None:
    jobs = [Job(daemon, paths[0], seed=1, epochs=4, kind="in step", go=False) for _ in range(2)]
    for _ in range(4 * COUNT // BATCH):
        for job in jobs:
            job.step()
        for job in jobs:
            job.done()
    for job in jobs:
        assert job.end() == 4 * COUNT
        assert job.process.stdin is not None
        job.process.stdin.close()
    # Both read the same order at the same time, so each finds what the other has read.
    assert daemon.cache()["blocks_read"] < 1.2 * 4 * COUNT


PROGRAM = """
import sys
import numpy as np
import ffserve
path, socket, seed, epochs, kind = sys.argv[1:]
right = 0
with ffserve.open(path, server=socket) as reader:
    count = len(reader)
    draw = lambda epoch: np.random.default_rng([int(seed), epoch]).permutation(count)
    if kind != "silent":
        reader.announce(draw(0), 0)
    print("ready", flush=True)
    if kind != "in step":
        sys.stdin.readline()
    for epoch in range(int(epochs)):
        if kind != "silent":
            reader.announce(draw(epoch + 1), epoch + 1)
        numbers = draw(epoch)
        for start in range(0, count, 20):
            if kind == "in step":
                sys.stdin.readline()
            right += len(reader.read(numbers[start : start + 20]))
            if kind == "in step":
                print("done", flush=True)
        print(epoch, reader.stats()["hits"], flush=True)
    print("end", right, flush=True)
"""


class Job:
    """A training run in a process of its own: `announced`, `silent`, or announced and `in step`
    with the test, batch by batch."""

    started: ClassVar[list[Job]] = []

    def __init__(
        self,
        daemon: Daemon,
        path: str,
        *,
        seed: int,
        epochs: int,
        kind: str = "announced",
        go: bool = True,
    ) -> None:
        command = [sys.executable, "-c", PROGRAM, path, daemon.socket, str(seed), str(epochs), kind]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.started.append(self)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        assert self.output.readline() == "ready\n"
        if go:
            self.go_on()

    def go_on(self) -> None:
        """Let it begin to read."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.close()

    def step(self) -> None:
        """Let it read a batch."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def done(self) -> None:
        """Wait until it has read it."""
        while self.output.readline() != "done\n":
            assert self.process.poll() is None

    def epoch(self) -> int:
        """Wait for the end of an epoch; return all hits so far."""
        return int(self.output.readline().split()[1])

    def end(self) -> int:
        """Wait for its end; return the number of samples that it read."""
        lines = self.output.read().splitlines()
        assert self.process.wait() == 0
        self.output.close()
        return int(lines[-1].split()[1])

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self.output.close()


@pytest.fixture(params=(SIZE, 3 * SIZE), ids=("one size", "another size"))
def other_path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A second data set; samples of another size have slots in other slabs than the first one's."""
    return write(tmp_path / "other.ffr", [sample(i, (request.param,)) for i in range(COUNT)])


@pytest.mark.check
def test_two_data_sets_compete_and_neither_starves(
    daemon: Daemon, paths: list[str], other_path: str
) -> None:
    first = Job(daemon, paths[0], seed=1, epochs=10_000, kind="silent")
    before = first.epoch()
    assert first.epoch() > before
    second = Job(daemon, other_path, seed=2, epochs=10_000, kind="silent")
    # How soon it gets its share depends on the pace of the first: count epochs, not time.
    hits = [second.epoch() for _ in range(4)]
    # A sixteenth of the arena, a quarter of what it is due.
    enough = 0.25 * daemon.status()["arena"]["size"] / 4 / os.path.getsize(other_path) * COUNT
    while min(np.diff(hits[-4:])) <= enough:
        assert len(hits) < 100, f"the second job's data set gets nothing: {np.diff(hits)}"
        hits.append(second.epoch())
    groups = {g["group"]: g for g in daemon.status()["groups"] if g["jobs"]}
    assert all(g["used"] >= 0.8 * g["floor"] for g in groups.values())
    second.kill()
    first.kill()


def test_a_job_that_departs_from_its_order_is_served(daemon: Daemon, paths: list[str]) -> None:
    with daemon.open(paths[0]) as reader:
        # It announces one half of the file and reads the other.
        reader.announce(range(COUNT // 2))
        numbers = COUNT // 2 + np.random.default_rng(0).permutation(COUNT // 2)
        for start in range(0, len(numbers), BATCH):
            part = numbers[start : start + BATCH]
            assert [s.tobytes() for s in reader.read(part)] == [content(i) for i in part]
        reader.read(range(COUNT // 2, COUNT))
        assert progress_of(daemon)["kind"] == "departed"
        assert progress_of(daemon)["order_size"] == 0
        reader.announce(range(COUNT), 1)
        assert progress_of(daemon)["kind"] == "announced"


def test_an_abandoned_epoch_does_not_block_others(daemon: Daemon, paths: list[str]) -> None:
    with daemon.open(paths[0]) as reader:
        for epoch in range(6):
            reader.announce(order(3, epoch), epoch)
            reader.announce(order(3, epoch + 1), epoch + 1)
            reader.reached(epoch, 0)
            read_slowly(reader, epoch, order(3, epoch)[: 3 * BATCH])
        progress = progress_of(daemon)
        assert progress["announced"] == [5, 6] and progress["order_size"] <= 2 * 5 * COUNT
        with daemon.open(paths[1]) as other:
            # The whole arena is available: nothing is pinned for the abandoned epochs.
            everything = other.read(range(COUNT))
            assert [s.tobytes() for s in everything] == [content(i) for i in range(COUNT)]


def test_an_order_changed_in_mid_epoch_blocks_nothing(daemon: Daemon, paths: list[str]) -> None:
    with daemon.open(paths[0]) as reader:
        for seed in (6, 7):
            # In mid-epoch another order replaces the first, for this epoch and the next.
            for epoch in (0, 1):
                reader.announce(order(seed, epoch), epoch)
            assert progress_of(daemon)["order_size"] == 2 * 5 * COUNT
            assert progress_of(daemon)["position"] == 0
            read_slowly(reader, 0, order(seed, 0)[: COUNT // 2])
        assert progress_of(daemon)["kind"] == "announced"
        assert daemon.status()["cache"]["blocked"] == 0


SLOWLY = """
import time
from ffserve.cache.next_use import NextUse
announcing = NextUse.announcing
def slowly(*args):
    for _ in range(100):
        time.sleep(0.002)
        yield None
    return (yield from announcing(*args))
NextUse.announcing = slowly
"""


@pytest.mark.check
def test_an_order_that_was_replaced_in_steps_was_not_prefetched(paths: list[str]) -> None:
    """Between two steps the prefetching began again where the old order was, far ahead."""
    with serving(arena="6MiB", patch=SLOWLY) as daemon:
        other = Job(daemon, paths[1], kind="silent", seed=1, epochs=10_000)
        try:
            with daemon.open(paths[0]) as reader:
                for seed in (6, 7):
                    reader.announce(order(seed, 0), 0)
                    read_slowly(reader, 0, order(seed, 0)[: 5 * BATCH])
        finally:
            other.kill()


@pytest.mark.check
def test_a_restarted_rank_announces_its_order_again(daemon: Daemon, paths: list[str]) -> None:
    other = Job(daemon, paths[0], seed=8, epochs=10_000)
    rank = Job(daemon, paths[0], seed=9, epochs=10_000)
    rank.epoch()
    rank.kill()
    until(lambda: len(daemon.status()["progress"]) == 1, "its order is freed")
    rank = Job(daemon, paths[0], seed=9, epochs=3)
    assert rank.end() == 3 * COUNT
    other.epoch()
    assert daemon.status()["cache"]["blocked"] == 0
    other.kill()
    until(lambda: not daemon.status()["progress"], "all orders are freed")


@pytest.mark.check
def test_the_memory_of_a_killed_announcing_process_is_freed(
    daemon: Daemon, paths: list[str]
) -> None:
    job = Job(daemon, paths[0], seed=4, epochs=1000)
    job.epoch()
    job.kill()
    until(lambda: not daemon.status()["progress"], "its order is freed")
    with daemon.open(paths[1]) as reader:
        assert len(reader.read(range(COUNT))) == COUNT
    assert daemon.status()["cache"]["blocked"] == 0


def test_an_order_outlives_a_killed_worker(daemon: Daemon, paths: list[str]) -> None:
    with daemon.open(paths[0]) as reader:
        reader.announce(order(5, 0), 0)
        child = os.fork()
        if child == 0:
            for start in range(0, COUNT, BATCH):
                reader.read(order(5, 0)[start : start + BATCH])
            signal.pause()
        until(
            lambda: progress_of(daemon)["position"] > 0,
            "the worker's requests advance it",
        )
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert progress_of(daemon)["kind"] == "announced"
        part = order(5, 0)[:50]
        assert [s.tobytes() for s in reader.read(part)] == [content(i) for i in part]


def test_hits_of_a_silent_job_count_as_seen(daemon: Daemon, paths: list[str]) -> None:
    with daemon.open(paths[0]) as reader:
        reader.read(range(100))
        reader.read(range(100))
        reader.read(range(100, 110))
        assert progress_of(daemon)["kind"] == "silent"
        assert progress_of(daemon)["position"] == 10 or progress_of(daemon)["position"] == 110


def test_hits_outside_the_data_set_break_the_protocol(paths: list[str]) -> None:
    expect = [r"closed a session \(pid \d+\): .*"]
    with serving(expect=expect) as daemon, Raw(daemon.socket) as raw:
        raw.open(paths[0])
        raw.send(protocol.Seen(1, protocol.pack_order(np.array([COUNT - 1]))))
        raw.send(get(2, 1, [0]))
        assert raw.receive() == protocol.Ready(2, 1, [])
        raw.send(protocol.Seen(1, protocol.pack_order(np.array([COUNT]))))
        assert isinstance(raw.refused(), ffserve.ProtocolError)
