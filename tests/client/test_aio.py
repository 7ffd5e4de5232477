"""The reader for event loops: the contract of the blocking one, and what only a loop can ask."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import DEADLINE_S, Daemon, damage, run_python, sample, serving, stopped, until, write

import ffserve
from ffserve.client import failover
from ffserve.client import loop as loops
from ffserve.client.loop import LARGE_COPY_SIZE
from ffserve.errors import (
    ChecksumError,
    FFServeError,
    SampleIndexError,
    ServerUnavailable,
    UsageError,
)

COUNT = 300
TRUTH = [sample(i) for i in range(COUNT)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("aio") / "a.ffr", TRUTH)


@pytest.fixture(params=["off", "daemon"])
def server(request: pytest.FixtureRequest) -> str:
    """What to give as `server`: both kinds of source."""
    if request.param == "off":
        return "off"
    daemon = request.getfixturevalue("daemon")
    assert isinstance(daemon, Daemon)
    return daemon.socket


@pytest.fixture
async def reader(path: str, server: str) -> AsyncIterator[ffserve.aio.Reader]:
    async with ffserve.aio.open(path, server=server) as opened:
        yield opened


def drop_cache(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


# ---- the contract -----------------------------------------------------------------------------


async def test_read_gives_every_sample_in_order_and_repeated(reader: ffserve.aio.Reader) -> None:
    order = [*np.random.default_rng(1).permutation(COUNT).tolist(), 5, 5, 0]
    got = await reader.read(order)
    assert [g.tobytes() for g in got] == [TRUTH[i] for i in order]
    assert all(g.flags.writeable and g.flags.owndata for g in got)
    assert await reader.read([]) == []
    assert len(reader) == COUNT


async def test_read_batch_gives_one_buffer(reader: ffserve.aio.Reader) -> None:
    batch = await reader.read_batch(range(COUNT))
    assert [g.tobytes() for g in batch] == TRUTH
    assert (np.diff(batch.offsets) == await reader.sizes()).all()
    out = np.empty(batch.buffer.nbytes + 7, np.uint8)
    again = await reader.read_batch(range(COUNT), out=out)
    assert again.buffer.base is out
    assert again.buffer.tobytes() == batch.buffer.tobytes()
    with pytest.raises(UsageError):
        await reader.read_batch(range(COUNT), out=out[:10])


async def test_iteration_gives_every_sample_once(reader: ffserve.aio.Reader) -> None:
    assert [s.tobytes() async for s in reader] == TRUTH
    got = []
    async for batch in reader.batches(range(COUNT - 1, -1, -1), count=7):
        got += [s.tobytes() for s in batch]
    assert got == TRUTH[::-1]


async def test_small_batches_are_asked_for_together(tmp_path: Path, server: str) -> None:
    path = write(tmp_path / "a.ffr", [sample(i, [2000, 100]) for i in range(500)])
    damage(path, 300)
    async with ffserve.aio.open(path, server=server) as reader:
        got: list[ffserve.Batch] = []
        with pytest.raises(ChecksumError) as caught:
            async for batch in reader.batches(count=8):
                got.append(batch)
        assert caught.value.index == 300
        samples = [s.tobytes() for batch in got for s in batch]
        assert samples == [sample(i, [2000, 100]) for i in range(296)]
        buffers = {id(b.buffer if b.buffer.base is None else b.buffer.base) for b in got}
        assert len(got) == 37 and len(buffers) == 2


async def test_iteration_that_is_left_early_leaves_nothing(reader: ffserve.aio.Reader) -> None:
    async with contextlib.aclosing(reader.batches(count=3)) as batches:
        async for batch in batches:
            assert [s.tobytes() for s in batch] == TRUTH[:3]
            break
    assert [s.tobytes() for s in await reader.read([1])] == [TRUTH[1]]


async def test_index_outside_and_reader_closed(path: str, server: str) -> None:
    reader = await ffserve.aio.open(path, server=server)
    with pytest.raises(SampleIndexError):
        await reader.read([COUNT])
    await reader.read([0])
    await reader.aclose()
    await reader.aclose()
    with pytest.raises(UsageError):
        await reader.read([0])


async def test_damaged_sample_fails_alone_and_can_be_left_out(tmp_path: Path, server: str) -> None:
    path = write(tmp_path / "a.ffr", TRUTH[:20])
    damage(path, 6)
    async with ffserve.aio.open(path, server=server) as reader:
        with pytest.raises(ChecksumError) as caught:
            await reader.read(range(20))
        assert caught.value.index == 6
        with pytest.raises(ChecksumError):
            await reader.read_batch(range(20))
        mixed = await reader.read(range(20), errors="return")
        assert isinstance(mixed[6], ChecksumError)
        assert bytes(mixed[7]) == TRUTH[7]
    async with ffserve.aio.open(path, server=server, on_error="skip") as reader:
        assert len(reader) == 19
        assert [e.index for e in reader.damaged] == [6]
        assert bytes((await reader.read([6]))[0]) == TRUTH[7]


async def test_files_and_options_that_are_none(path: str, tmp_path: Path, server: str) -> None:
    with pytest.raises(FFServeError):
        await ffserve.aio.open(tmp_path / "nothing.ffr", server=server)
    with pytest.raises(UsageError):
        await ffserve.aio.open(path, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ServerUnavailable):
        await ffserve.aio.open(path, server=str(tmp_path / "none"))


async def test_source_and_stats(reader: ffserve.aio.Reader, server: str) -> None:
    await reader.read(range(50))
    assert reader.source.startswith("engine" if server == "off" else f"daemon {server}")
    assert reader.stats()["samples"] == 50
    assert len(reader.shards) == 1


async def test_announced_orders_reach_the_daemon(path: str) -> None:
    with serving() as daemon:
        async with ffserve.aio.open(path, server=daemon.socket) as reader:
            order = np.random.default_rng(2).permutation(COUNT)
            await reader.announce(order, 3, name="by chance")
            facts = await asyncio.to_thread(daemon.status)
            (progress,) = facts["progress"]
            assert (progress["announced"], progress["name"], progress["count"]) == (
                [3],
                "by chance",
                COUNT,
            )
            with pytest.raises(SampleIndexError):
                await reader.announce([1, 1])
            got = await reader.read(order[:50])
            assert [bytes(s) for s in got] == [TRUTH[i] for i in order[:50].tolist()]


# ---- many at once -----------------------------------------------------------------------------


@pytest.mark.check
async def test_hundreds_of_requests_share_one_connection(path: str) -> None:
    with serving() as daemon:
        async with (
            ffserve.aio.open(path, server=daemon.socket) as one,
            ffserve.aio.open(path, server=daemon.socket) as two,
        ):
            before = daemon.fd_count()
            got = await asyncio.gather(
                *(r.read([i, (7 * i) % COUNT]) for i in range(COUNT) for r in (one, two))
            )
            wanted = [[TRUTH[i], TRUTH[(7 * i) % COUNT]] for i in range(COUNT) for _ in "12"]
            assert [[bytes(s) for s in pair] for pair in got] == wanted
            until(lambda: daemon.fd_count() <= before, "there is no other connection")


async def test_more_requests_than_a_session_may_have(path: str) -> None:
    with serving() as daemon:
        async with ffserve.aio.open(path, server=daemon.socket) as reader:
            with stopped(daemon.pid):
                tasks = [asyncio.create_task(reader.read([i])) for i in range(COUNT)]
                await asyncio.sleep(0.05)
                for task in tasks[10:200:3]:
                    task.cancel()
                await asyncio.sleep(0)
            got = await asyncio.gather(*tasks, return_exceptions=True)
        for i, answer in enumerate(got):
            if i in range(10, 200, 3):
                assert isinstance(answer, asyncio.CancelledError)
            else:
                assert isinstance(answer, list)
                assert bytes(answer[0]) == TRUTH[i]


def test_threads_that_ask_for_more_than_a_session_may_have(path: str) -> None:
    with serving() as daemon, daemon.open(path) as reader:
        got: dict[int, bytes] = {}

        def one(i: int) -> None:
            got[i] = bytes(reader.read([i])[0])

        threads = [threading.Thread(target=one, args=(i,)) for i in range(150)]
        with stopped(daemon.pid):
            for thread in threads:
                thread.start()
            until(
                lambda: len(reader._selector.source.connection.channel.unanswered) == 64,
                "64 are asked for",
            )  # type: ignore[union-attr]
        for thread in threads:
            thread.join()
        assert got == {i: TRUTH[i] for i in range(150)}


async def test_closing_a_reader_left_tasks_waiting_whose_requests_were_kept_back(path: str) -> None:
    """Another reader keeps the connection open, so nothing broke it."""
    with serving() as daemon:
        async with ffserve.aio.open(path, server=daemon.socket) as other:
            reader = await ffserve.aio.open(path, server=daemon.socket)
            with stopped(daemon.pid):
                tasks = [asyncio.create_task(reader.read([i])) for i in range(COUNT)]
                await asyncio.sleep(0.05)
                await reader.aclose()
            _, waiting = await asyncio.wait(tasks, timeout=DEADLINE_S)
            assert not waiting
            assert all(task.exception() or task.result() for task in tasks)
            assert [bytes(s) for s in await other.read(range(COUNT))] == TRUTH


@pytest.mark.check
async def test_the_loop_goes_on_while_the_daemon_does_not(path: str) -> None:
    with serving() as daemon:
        async with ffserve.aio.open(path, server=daemon.socket) as reader:
            with stopped(daemon.pid):
                # More than the socket takes.
                tasks = [asyncio.create_task(reader.read(range(COUNT))) for _ in range(200)]
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not any(task.done() for task in tasks)
            for samples in await asyncio.gather(*tasks):
                assert [bytes(s) for s in samples] == TRUTH


async def test_hits_let_others_run(daemon: Daemon, path: str) -> None:
    async with ffserve.aio.open(path, server=daemon.socket) as reader:
        await reader.read(range(COUNT))
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(50):
            await reader.read_batch(range(20))
        task.cancel()
        size = 50 * sum(map(len, TRUTH[:20]))
        assert size > 4 * LARGE_COPY_SIZE
        assert turns >= size // LARGE_COPY_SIZE - 1


async def test_large_copies_run_beside_the_loop(daemon: Daemon, tmp_path: Path) -> None:
    truth = [sample(i, [3_000_000], seed=3) for i in range(4)]
    path = write(tmp_path / "large.ffr", truth)
    async with ffserve.aio.open(path, server=daemon.socket) as reader:
        for _ in range(3):
            got = await asyncio.gather(*(reader.read_batch([i, 3 - i]) for i in range(4)))
            for i, batch in enumerate(got):
                assert [bytes(s) for s in batch] == [truth[i], truth[3 - i]]
        names = {thread.name for thread in threading.enumerate()}
        assert any(name.startswith("ffserve-aio") for name in names)


# ---- being cancelled --------------------------------------------------------------------------


@pytest.mark.check
async def test_cancelled_requests_give_their_pins_back(tmp_path: Path) -> None:
    truth = [sample(i, [20_000], seed=4) for i in range(400)]
    path = write(tmp_path / "a.ffr", truth)
    # Pins that nobody gives back stay, and who waits for room gives up soon.
    patch = (
        "from ffserve.server.reading import pins, scheduler\n"
        "pins.PIN_GRACE_S, scheduler.GIVE_UP_S = 1000, 1.0"
    )
    with serving(arena="2MiB", patch=patch) as daemon:
        async with ffserve.aio.open(path, server=daemon.socket) as reader:
            connection = next(iter(loops.loop_state()._connections.values()))
            for turn in range(8):
                with stopped(daemon.pid):
                    numbers = range(turn * 50, turn * 50 + 50)
                    tasks = [asyncio.create_task(reader.read([i])) for i in numbers]
                    await asyncio.sleep(0)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    assert all(task.cancelled() for task in tasks)
                while connection.channel.unanswered:
                    await asyncio.sleep(0.001)
            for start in range(0, 400, 10):
                got = await reader.read(range(start, start + 10))
                assert [bytes(s) for s in got] == truth[start : start + 10]
            assert not connection._awaited
            assert connection.channel.owes_since is None
            assert not connection.channel.unanswered


async def test_cancelled_opening_leaves_no_data_set(path: str) -> None:
    with serving() as daemon:
        async with ffserve.aio.open(path, server=daemon.socket):
            with stopped(daemon.pid):
                task = asyncio.ensure_future(_opened(path, daemon.socket))
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            async def sessions() -> int:
                facts = await asyncio.to_thread(daemon.status)
                return int(facts["shards"][0]["sessions"])

            while await sessions() != 1:
                await asyncio.sleep(0.01)


async def _opened(path: str, server: str) -> ffserve.aio.Reader:
    return await ffserve.aio.open(path, server=server)


async def test_cancelled_read_into_a_buffer_writes_no_more(path: str, server: str) -> None:
    async with ffserve.aio.open(path, server=server) as reader:
        total = sum(map(len, TRUTH))
        for turn in range(20):
            drop_cache(path)
            out = np.zeros(total, np.uint8)
            task = asyncio.create_task(reader.read_batch(range(COUNT), out=out))
            for _ in range(turn):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            seen = out.tobytes()
            await reader.read(range(0, COUNT, 17))
            assert out.tobytes() == seen


async def test_cancelled_local_reads_leave_nothing(path: str) -> None:
    async with ffserve.aio.open(path, server="off") as reader:
        for _ in range(10):
            drop_cache(path)
            tasks = [asyncio.create_task(reader.read(range(COUNT))) for _ in range(4)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        engine = loops.loop_state().engine()
        while any(one.in_flight for one in engine.engines.all):
            await asyncio.sleep(0.001)
        source: Any = reader._here().source
        while source._pending:
            await asyncio.sleep(0.001)
        assert not engine._ended
        assert [bytes(s) for s in await reader.read(range(COUNT))] == TRUTH


# ---- the daemon goes away ---------------------------------------------------------------------


@pytest.mark.check
async def test_restart_in_mid_request(path: str) -> None:
    daemon = Daemon(arena="8MiB").start()
    try:
        async with ffserve.aio.open(path, server=daemon.socket) as reader:

            async def some(seed: int) -> None:
                for turn in range(12):
                    order = np.random.default_rng([seed, turn]).integers(0, COUNT, 40)
                    got = await reader.read_batch(order)
                    assert [bytes(s) for s in got] == [TRUTH[i] for i in order.tolist()]
                    await asyncio.sleep(0.01)

            jobs = [asyncio.create_task(some(seed)) for seed in range(8)]
            await asyncio.sleep(0.03)
            await asyncio.to_thread(daemon.end, signal.SIGKILL)
            await asyncio.sleep(0.02)
            await asyncio.to_thread(daemon.start)
            await asyncio.gather(*jobs)
            assert reader.source == f"daemon {daemon.socket}"
    finally:
        daemon.close()


@pytest.mark.check
async def test_required_daemon_that_stays_away(path: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(failover.RECONNECT_S, "require", 0.2)
    daemon = Daemon(arena="8MiB").start()
    try:
        async with ffserve.aio.open(path, server=daemon.socket) as reader:
            with stopped(daemon.pid):
                tasks = [asyncio.create_task(reader.read([i])) for i in range(20)]
                await asyncio.sleep(0)
            await asyncio.to_thread(daemon.end, signal.SIGKILL)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            lost = [a for a in answers if isinstance(a, ServerUnavailable)]
            with pytest.raises(ServerUnavailable):
                await reader.read(range(COUNT))
            assert all(isinstance(a, list) or a in lost for a in answers)
    finally:
        daemon.close()


async def test_auto_reads_by_itself_when_the_daemon_is_gone(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(failover.RECONNECT_S, "auto", 0.1)
    daemon = Daemon(arena="8MiB").start()
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    try:
        async with ffserve.aio.open(path) as reader:
            assert reader.source.startswith("daemon")
            await asyncio.to_thread(daemon.end, signal.SIGKILL)
            assert [bytes(s) for s in await reader.read(range(COUNT))] == TRUTH
            assert reader.source.startswith("engine")
            assert "reads the files without it" in caplog.text
    finally:
        daemon.close()


# ---- loops, threads, processes ----------------------------------------------------------------


def test_one_reader_in_many_loops(path: str, server: str) -> None:
    async def make() -> ffserve.aio.Reader:
        reader = await ffserve.aio.open(path, server=server)
        assert bytes((await reader.read([5]))[0]) == TRUTH[5]
        return reader

    reader = asyncio.run(make())
    failures: list[BaseException] = []

    async def use() -> None:
        got = await asyncio.gather(*(reader.read(range(i, COUNT, 9)) for i in range(9)))
        for i, part in enumerate(got):
            assert [bytes(s) for s in part] == TRUTH[i::9]

    def run() -> None:
        try:
            asyncio.run(use())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    asyncio.run(use())
    asyncio.run(reader.aclose())


async def test_copy_of_a_reader_connects_anew(reader: ffserve.aio.Reader) -> None:
    copy = pickle.loads(pickle.dumps(reader))
    try:
        assert bytes((await copy.read([7]))[0]) == TRUTH[7]
    finally:
        await copy.aclose()


FORKED = """
import asyncio, os, sys
import ffserve
path, server = sys.argv[1:3]

def say(size):
    # In one piece, since parent and child write to the same pipe.
    os.write(1, b"%d\\n" % size)

async def check(reader):
    got = await asyncio.gather(*(reader.read([i, i + 1]) for i in range(100)))
    return sum(len(s) for pair in got for s in pair)

def child(reader):
    code = 1
    try:
        say(asyncio.run(check(reader)))
        code = 0
    finally:
        os._exit(code)

async def main():
    async with ffserve.aio.open(path, server=server) as reader:
        say(await check(reader))
        # With requests on their way.
        tasks = [asyncio.ensure_future(check(reader)) for _ in range(3)]
        await asyncio.sleep(0)
        pid = os.fork()
        if pid == 0:
            asyncio.events._set_running_loop(None)
            child(reader)
        for task in tasks:
            say(await task)
        assert os.waitpid(pid, 0)[1] == 0
        say(await check(reader))

asyncio.run(main())
"""


@pytest.mark.check
def test_fork_with_requests_on_their_way(path: str, server: str) -> None:
    lines = run_python(FORKED, path, server).stdout.split()
    assert len(lines) == 6
    assert set(lines) == {str(sum(len(TRUTH[i]) + len(TRUTH[i + 1]) for i in range(100)))}


def test_a_child_kept_the_files_of_its_parents_loop_open(path: str) -> None:
    program = """
import asyncio, os, sys, ffserve
def held():
    return sum(link.is_symlink() and os.readlink(link) == sys.argv[1]
               for link in os.scandir("/proc/self/fd"))
async def main():
    async with ffserve.aio.open(sys.argv[1], server="off") as reader:
        await reader.read([0])
        assert held() == 1
        pid = os.fork()
        if pid == 0:
            os._exit(held())
        assert os.waitpid(pid, 0)[1] == 0
        await reader.read([1])
asyncio.run(main())
"""
    run_python(program, os.path.realpath(path))


def test_a_loop_that_ended_without_closing(path: str, server: str) -> None:
    program = """
import asyncio, contextlib, sys, os, threading, time, ffserve
async def main():
    reader = await ffserve.aio.open(sys.argv[1], server=sys.argv[2])
    task = asyncio.ensure_future(reader.read(range(300)))
    await asyncio.sleep(0)
    return reader
def threads():
    # Neither the pool, which outlives the loops and grows to its bound when a thread is not idle
    # again in time, nor the kernel's workers of a ring.
    names = []
    for each in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{each}/comm") as comm:
            names.append(comm.read())
    pool = [each for each in threading.enumerate() if each.name.startswith("ffserve-aio")]
    return sum(not name.startswith("iou-") for name in names) - len(pool)
kept, most = [], 1000
for _ in range(4):
    kept.append(asyncio.run(main()))
    deadline = time.monotonic() + 30
    while threads() > most and time.monotonic() < deadline:
        time.sleep(0.01)  # one that was told to end
    most = threads()
    print(len(os.listdir("/proc/self/fd")), most)
async def close():
    for reader in kept:
        await reader.aclose()
asyncio.run(close())
print(len(os.listdir("/proc/self/fd")))
"""
    *open_ones, closed = run_python(program, path, server).stdout.splitlines()
    assert int(open_ones[-1].split()[1]) <= int(open_ones[-2].split()[1])
    assert int(closed) <= int(open_ones[0].split()[0])


@pytest.mark.check
def test_import_is_light() -> None:
    program = """
import sys, ffserve
assert "ffserve.aio" not in sys.modules and "asyncio" not in sys.modules
assert callable(ffserve.aio.open)
assert not {"uvloop", "torch", "click"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
