"""Why a job waits: a slow disk, a job that takes memory, a slow `process`."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
from daemon import Daemon, Raw, get, run_python, sample, serving, until, write
from http_daemon import ask, measured

from benchmarks.harness.cgroup import NoCgroup, limited
from ffserve import protocol
from ffserve.server.reading.waiting import CAUSES, RECENT_S, JobReads, JobTime, SessionTime, Use

SIZE, COUNT, BATCH = 16_000, 600, 16
DATA_SIZE = SIZE * COUNT
FITS = f"{DATA_SIZE * 5 // 4}"
"""An arena that holds one data set, but not two."""
RECENT = "import ffserve.server.reading.waiting as waiting; waiting.RECENT_S = 4.0"
RUNS = 20
MOST_WRONG = 1
LOADING = """
import ctypes, glob, resource, msgpack, numpy, ffserve, ffserve.reader
import ffserve.client.daemon.connection, ffserve.formats.recordio, ffserve.formats.tfrecord
numpy.random.default_rng(0).permutation(9)
"""
"""Imports that another user may not do."""
ALICE = 61_001
Facts: TypeAlias = Callable[[], dict[str, Any]]
"""Returns what the daemon tells of a job now."""

READING = """
import sys
import numpy as np
import ffserve
path, socket = sys.argv[1:]
with ffserve.open(path, server=socket) as reader:
    for epoch in range(1_000_000):
        order = np.random.default_rng(epoch).permutation(len(reader))
        for start in range(0, len(order), 16):
            reader.read(order[start : start + 16])
        print(epoch, flush=True)
"""
PROCESSING = """
import os, sys, time
path, os.environ["FFSERVE_SOCKET"] = sys.argv[1:]
import ffserve.torch
class Slow(ffserve.torch.Dataset):
    def process(self, indices, data):
        time.sleep(0.1)
        return [int(one.sum()) for one in data]
if __name__ == "__main__":
    data = Slow(path)
    for epoch in range(1_000_000):
        loader = ffserve.torch.DataLoader(data, batch_size=16, shuffle=True, num_workers=2)
        for number, batch in enumerate(loader):
            if number == 4:
                print(epoch, flush=True)
"""


class Job:
    """A training run in a process of its own."""

    def __init__(self, daemon: Daemon, path: str, program: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, path, daemon.socket],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.path = path

    def epoch(self) -> None:
        """Wait for the end of an epoch."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), "the job has ended"

    def facts(self, daemon: Daemon) -> dict[str, Any]:
        """Return what the daemon tells of it."""
        (facts,) = [job for job in daemon.status()["jobs"] if job["paths"] == self.path]
        return dict(facts)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def started(daemon: Daemon, path: str, program: str = READING) -> Iterator[Job]:
    """A running job."""
    job = Job(daemon, path, program)
    try:
        yield job
    finally:
        job.end()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two data sets on the disk, not in the page cache."""
    directory = tmp_path_factory.mktemp("waiting")
    samples = [sample(index, [SIZE]) for index in range(COUNT)]
    return [write(directory / f"{name}.ffr", samples) for name in ("first", "second")]


def forget(paths: list[str]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def slowed(paths: list[str], arena: str, read_iops: int) -> Iterator[Daemon]:
    """A daemon whose disk does so many reads a second."""
    forget(paths)
    with contextlib.ExitStack() as stack:
        try:
            cgroup = stack.enter_context(limited(read_iops=read_iops, path=paths[0]))
        except NoCgroup as reason:
            pytest.skip(str(reason))
        daemon = stack.enter_context(serving(arena=arena, patch=RECENT))
        cgroup.join(daemon.pid)
        yield daemon


@contextlib.contextmanager
def slow_disk(paths: list[str]) -> Iterator[tuple[str, Facts]]:
    """A job whose data do not fit, on a disk of 300 reads a second."""
    with slowed(paths, "4MiB", 300) as daemon, started(daemon, paths[0]) as job:
        until(lambda: daemon.cache()["blocks_read"] > 100, "it reads")
        yield "disk", lambda: job.facts(daemon)


@contextlib.contextmanager
def thief(paths: list[str]) -> Iterator[tuple[str, Facts]]:
    """A job whose data fit, until another one reads others."""
    with slowed(paths, FITS, 600) as daemon, started(daemon, paths[0]) as job:
        job.epoch()
        job.epoch()
        with started(daemon, paths[1]) as other:
            other.epoch()
            other.epoch()
            yield "taken", lambda: job.facts(daemon)
            assert job.facts(daemon)["taken_by"] == other.facts(daemon)["name"]


@contextlib.contextmanager
def slow_process(paths: list[str]) -> Iterator[tuple[str, Facts]]:
    """A job that computes for long after each read, and whose data do not fit."""
    with slowed(paths, "4MiB", 1500) as daemon, started(daemon, paths[0], PROCESSING) as job:
        job.epoch()
        yield "trainer", lambda: job.facts(daemon)


FAULTS = {"slow disk": slow_disk, "thief": thief, "slow process": slow_process}


def found(facts: dict[str, Any]) -> str:
    """Return the cause with the largest share; "" as long as nothing is known."""
    recent = facts["recent"]
    assert set(recent) == set(CAUSES)
    if not any(recent.values()):
        return ""
    assert sum(recent.values()) == pytest.approx(1.0, abs=0.001)
    return max(recent, key=recent.__getitem__)


@pytest.mark.check
@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_is_found(paths: list[str], fault: str) -> None:
    with FAULTS[fault](paths) as (cause, facts):
        until(lambda: found(facts()) == cause, f"the cause is {cause}")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_is_found_in_nearly_every_run(paths: list[str], fault: str) -> None:
    wrong = []
    for _ in range(RUNS):
        with FAULTS[fault](paths) as (cause, facts):
            time.sleep(5)
            known = facts()
            if found(known) != cause:
                wrong.append(known["recent"])
    print(f"{fault}: {RUNS - len(wrong)} of {RUNS}")
    assert len(wrong) <= MOST_WRONG, wrong


# ---- how long requests take --------------------------------------------------------------------

COMPETING_S = 3.0
OFTEN = "import ffserve.server.sessions.server as server; server.ALIVE_INTERVAL_S = 0.1"
"""Time is divided far more often than usual."""


class Competition(NamedTuple):
    """What a daemon says after three jobs have competed for its disk."""

    jobs: list[dict[str, Any]]
    requests_s: float
    queue_s: float
    disk_s: float


def keep_asking(daemon: Daemon, path: str, job: str, until_s: float) -> None:
    """Read batches at random, one after another, as a job of this name."""
    with Raw(daemon.socket, job=job) as raw:
        dataset = raw.open(path).dataset
        for tag in range(2, 1 << 20):
            order = np.random.default_rng([tag, ord(job)]).permutation(COUNT)[:64]
            raw.send(get(tag, dataset, order.tolist(), [tag - 1] if tag > 2 else []))
            answer = raw.receive()
            assert isinstance(answer, protocol.Ready) and answer.count
            if time.monotonic() > until_s:
                until(lambda: len(answered(daemon)) == 3, "all of them were measured")
                return


def answered(daemon: Daemon) -> list[dict[str, Any]]:
    """The jobs of which it is known why they wait."""
    return [job for job in daemon.status()["jobs"] if sum(job["time_s"].values())]


@pytest.fixture(scope="module")
def competition(tmp_path_factory: pytest.TempPathFactory) -> Competition:
    """Three jobs that read at random, on a daemon that has one read in flight."""
    pytest.importorskip("prometheus_client")
    directory = tmp_path_factory.mktemp("competing")
    samples = [sample(index, [SIZE]) for index in range(COUNT)]
    paths = [write(directory / f"{name}.ffr", samples) for name in "abc"]
    forget(paths)
    with measured("--depth", "1", arena="4MiB", patch=OFTEN) as (daemon, address):
        end = time.monotonic() + COMPETING_S
        threads = [
            threading.Thread(target=keep_asking, args=(daemon, path, name, end))
            for path, name in zip(paths, "abc", strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        jobs, (_, _, text) = answered(daemon), ask(address)
    assert len(jobs) == 3

    def seconds(name: str) -> float:
        (found,) = re.findall(rf"^ffserve_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found)

    phases = [
        seconds(f'request_phase_duration_seconds_sum{{phase="{phase}"}}')
        for phase in ("queue", "disk")
    ]
    return Competition(jobs, seconds("request_duration_seconds_sum"), *phases)


@pytest.mark.check
def test_requests_took_no_longer_than_until_the_last_message(competition: Competition) -> None:
    """Their durations ended at the time of the last message, long before their reads had."""
    # A request waits for its turn, then for one batch past the page cache and one through it.
    assert competition.requests_s >= competition.queue_s + competition.disk_s / 2


def test_jobs_waited_far_less_than_their_sessions(competition: Competition) -> None:
    for job in competition.jobs:
        waiting_s = sum(job["time_s"].values()) - job["time_s"]["trainer"]
        assert job["waited_s"] > 0.8 * waiting_s > 0, job


def test_waiting_for_a_turn_while_others_read_was_called_the_disk(
    competition: Competition,
) -> None:
    """Where one request fills all reads in flight, none of others are when its own begin."""
    assert competition.queue_s > 0
    parts = [(job["time_s"]["queue"], job["time_s"]["disk"]) for job in competition.jobs]
    queue_s, disk_s = (sum(column) for column in zip(*parts, strict=True))
    assert queue_s > disk_s / 4, competition


# ---- how time is divided -----------------------------------------------------------------------


def session_of(job: JobTime, *spans: tuple[float, float], until: float) -> SessionTime:
    """A session that joins at 0 and asks in these spans."""
    session = SessionTime()
    job.begin(session, 0.0)
    for at, change in sorted([(b, 1) for b, _ in spans] + [(e, -1) for _, e in spans]):
        session.ask(at) if change > 0 else session.answer(at)
    session.advance(until)
    return session


NOTHING = Use(0, 0, 1.0, None)


def test_overlapping_requests_of_a_session_count_once_and_sessions_add_up() -> None:
    job = JobTime()
    session_of(job, (1.0, 3.0), (2.0, 4.0), until=10.0)
    session_of(job, (5.0, 6.0), until=10.0)
    job.step(10.0, JobReads(), NOTHING)
    assert job.causes == pytest.approx(
        {
            "disk": 4.0,
            "queue": 0,
            "taken": 0,
            "decode": 0,
            "memory": 0,
            "origin": 0,
            "trainer": 16.0,
        }
    )
    assert job.recent(10.0)["trainer"] == pytest.approx(0.8)
    assert sum(job.recent(10.0 + RECENT_S).values()) == 0


def test_blocks_of_remote_files_that_requests_and_loads_wait_for_are_the_origin() -> None:
    job, session = JobTime(), SessionTime()
    job.begin(session, 0.0)
    session.ask(0.0)
    session.fetch(0.0, 1)
    session.fetch(3.0, -1)
    session.answer(7.0)
    reads = JobReads()
    reads.begin(1, 1)
    reads.end(1, 4.0, 0.0, 0.0, 3.0)
    job.step(10.0, reads, NOTHING)
    # 3 s before the load, and three quarters of the 4 s of the load.
    expected = {"origin": 3.0 + 3.0, "disk": 1.0, "trainer": 3.0}
    rest = dict.fromkeys(set(CAUSES) - set(expected), 0.0)
    assert job.causes == pytest.approx({**expected, **rest})


def test_a_request_without_an_answer_counts_and_memory_by_its_share() -> None:
    job, session = JobTime(), SessionTime()
    job.begin(session, 0.0)
    session.ask(0.0)
    session.ask(0.0)
    session.block(4.0, 1)
    session.block(8.0, -1)
    job.step(10.0, JobReads(), NOTHING)
    assert job.causes["memory"] == pytest.approx(2.0) and job.causes["disk"] == pytest.approx(8.0)
    job.end(session, 12.0)
    assert not job.idle
    job.step(12.0, JobReads(), NOTHING)
    assert job.causes["disk"] == pytest.approx(10.0) and job.idle


def test_waiting_for_a_first_turn_is_the_queue_as_far_as_others_read() -> None:
    job, session = JobTime(), SessionTime()
    job.begin(session, 0.0)
    session.ask(0.0)
    session.queue(0.0, 0.75)
    session.queue(4.0, -0.75)
    session.answer(8.0)
    job.step(10.0, JobReads(), NOTHING)
    assert job.causes["queue"] == pytest.approx(3.0) and job.causes["disk"] == pytest.approx(5.0)


def test_a_session_that_is_absent_counts_only_if_all_are() -> None:
    job = JobTime()
    session_of(job, until=0.0)
    busy = session_of(job, (0.0, 50.0), (60.0, 80.0), until=100.0)
    job.step(100.0, JobReads(), NOTHING)
    assert sum(job.causes.values()) == pytest.approx(100.0)
    assert job.causes["disk"] == pytest.approx(70.0)
    assert not busy.asked
    job.step(200.0, JobReads(), NOTHING)
    assert job.causes["trainer"] == pytest.approx(30.0 + 2 * 100.0)


def test_waiting_is_divided_by_what_the_reads_were_like() -> None:
    job, reads = JobTime(), JobReads()
    session_of(job, (0.0, 8.0), until=8.0)
    # In its first epoch it reads twice what it uses: blocks are larger than samples.
    reads.size = 2000
    job.step(8.0, reads, Use(1000, 1000, 1.0, "other"))
    assert job.causes["disk"] == pytest.approx(8.0) and job.taken_by is None
    (session,) = job.sessions
    session.ask(8.0)
    # Half of the reads in flight are of others; a quarter of the loads' time is decoding.
    reads.begin(4, 8)
    reads.end(4, 4.0, 3.0, 1.0)
    reads.size += 1000
    job.step(16.0, reads, Use(1500, 1000, 0.5, "other"))
    # Alone it would have read half of the 500 again, 500 bytes with what lies around them.
    assert job.alone_size == 2500 and job.taken_by == "other"
    expected = {"taken": 4.0, "decode": 1.0, "queue": 1.5, "disk": 8.0 + 1.5}
    assert {cause: job.causes[cause] for cause in expected} == pytest.approx(expected)
    # Without a read since then they are divided likewise.
    job.step(24.0, reads, Use(1500, 1000, 0.5, "other"))
    assert job.causes["taken"] == pytest.approx(8.0)


def test_nothing_is_taken_without_another_job() -> None:
    job, reads = JobTime(), JobReads()
    session_of(job, (0.0, 8.0), until=8.0)
    reads.size = 5000
    job.step(8.0, reads, Use(2000, 1000, 1.0, None))
    assert job.causes["taken"] == 0 and job.taken_by is None


@pytest.mark.check
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_the_name_of_another_users_job_is_not_shown() -> None:
    become = f"import os\nos.setgroups([]); os.setgid({ALICE}); os.setuid({ALICE})\n"
    with serving(arena=FITS, options=["--socket-mode", "0666"]) as daemon:
        samples = [sample(index, [SIZE]) for index in range(COUNT)]
        mine, other = (write(daemon.directory / f"{name}.ffr", samples) for name in "ab")
        with started(daemon, mine, f"{LOADING}{become}{READING}") as job:
            job.epoch()
            job.epoch()
            with started(daemon, other) as thief:
                name = until(lambda: job.facts(daemon)["taken_by"], "memory is taken")
                assert name == thief.facts(daemon)["name"]
                asking = f"{LOADING}from ffserve.client.daemon import connection\n{become}"
                program = f"{asking}print(connection.status({daemon.socket!r})['jobs'])"
                answer = run_python(program).stdout
                assert "'taken_by': '(another user)'" in answer and name not in answer
