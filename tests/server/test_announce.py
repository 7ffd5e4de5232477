"""Announced orders: as data, as messages, and orders that are refused."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import DEADLINE_S, Daemon, Raw, get, sample, serving, stopped, until, write
from hypothesis import given
from hypothesis import strategies as st

import ffserve
from ffserve import protocol
from ffserve.cache.next_use import NextUse
from ffserve.cache.orders import PARTS, PIECE, AnnouncedOrder, Arriving, done
from ffserve.errors import FFServeError, SampleIndexError, UsageError

COUNT = 300


def arrive(
    numbers: Any,
    count: int | None = None,
    *,
    low: int = 0,
    span: int = 0,
    replacement: bool = False,
) -> AnnouncedOrder:
    """Return an order that was received in pieces."""
    numbers = np.asarray(numbers, np.int64)
    span = span or int(numbers.max()) + 1 - low
    arriving = Arriving(
        len(numbers) if count is None else count,
        sample_count=span,
        low=low,
        span=span,
        replacement=replacement,
    )
    for start in range(0, len(numbers), 1000):
        arriving.add(numbers[start : start + 1000])
    return arriving.finish()


# ---- as data -----------------------------------------------------------------------------------


def test_four_jobs_with_orders_of_their_own_take_44_bytes_per_sample() -> None:
    """They are the current and the next epoch of each; 4 more bytes are the sample's `slot_of`."""
    order = arrive(np.random.default_rng(0).permutation(1000))
    assert 4 + 4 * 2 * order.size / 1000 <= 44


@pytest.mark.parametrize("count", (1, 3, 249, 250, 251, 1000, PIECE, PIECE + 1, 3 * PIECE - 1))
def test_an_order_maps_positions_to_samples_and_parts(count: int) -> None:
    numbers = np.random.default_rng(count).permutation(count) + 100
    order = arrive(numbers, low=100, span=count)
    assert np.array_equal(order.numbers(0, count), numbers)
    start, stop = count // 3, count - count // 5
    assert np.array_equal(order.numbers(start, stop), numbers[start:stop])
    parts = order.parts(numbers)
    assert parts[0] >= 1 and parts[-1] <= PARTS
    assert (np.diff(parts.astype(int)) >= 0).all()
    for position in (0, count // 2, count - 1):
        part = order.part(position)
        assert parts[position] == part
        assert order.edge(part) <= position < order.edge(part + 1)
    assert order.edge(PARTS + 1) == count
    outside = np.array([0, 99, 100 + count, -1, -(1 << 63), (1 << 63) - 1])
    assert order.parts(outside).tolist() == [0] * 6


def test_positions_before_the_job_are_dropped() -> None:
    numbers = np.random.default_rng(1).permutation(4 * PIECE)
    order = arrive(numbers)
    before = order.size
    order.advance(2 * PIECE + 5)
    assert before - order.size == 2 * PIECE * 4
    assert not order.parts(numbers[: 2 * PIECE + 5]).any()
    assert order.parts(numbers[2 * PIECE + 5 :]).all()
    assert np.array_equal(
        order.numbers(2 * PIECE + 5, 3 * PIECE), numbers[2 * PIECE + 5 : 3 * PIECE]
    )


@given(
    drawn=st.lists(st.integers(0, 40), min_size=1, max_size=600), steps=st.lists(st.integers(1, 90))
)
def test_a_repeated_sample_has_the_part_of_its_next_use(drawn: list[int], steps: list[int]) -> None:
    order = arrive(drawn, span=41, replacement=True)
    position = 0
    for step in [0, *steps, 1000]:
        position = min(position + step, len(drawn))
        # The order within a part is not known.
        passed = order.edge(order.part(position)) if position < len(drawn) else position
        order.advance(passed)
        parts = order.parts(np.arange(41))
        for number in range(41):
            later = [p for p in range(passed, len(drawn)) if drawn[p] == number]
            assert parts[number] == (order.part(later[0]) if later else 0)


def test_equal_orders_share_their_pieces() -> None:
    numbers = np.random.default_rng(0).permutation(1000)
    first, second = arrive(numbers), arrive(numbers.copy())
    assert done(first.same(second))
    second.share(first)
    assert all(a is b for a, b in zip(first._pieces, second._pieces, strict=True))
    assert not done(first.same(arrive(numbers[::-1])))
    first.advance(1000)
    assert np.array_equal(second.numbers(0, 1000), numbers)


@pytest.mark.parametrize("count", (0, -1, 11, 10**12))
def test_an_order_of_an_invalid_length_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match="positions"):
        Arriving(count, sample_count=10, low=0, span=10, replacement=False)


def test_an_order_with_replacement_has_a_largest_length() -> None:
    Arriving(1 << 20, sample_count=10, low=0, span=10, replacement=True)
    # A small data set that a mixture repeats hundreds of times.
    Arriving(600 * 10_000, sample_count=10_000, low=0, span=10_000, replacement=True)
    with pytest.raises(UsageError):
        Arriving(10**12, sample_count=10**6, low=0, span=10, replacement=True)


def test_an_order_that_is_too_short_too_long_or_repeats_is_refused() -> None:
    with pytest.raises(UsageError, match="ends after 3 of the 4"):
        arrive([0, 1, 2], 4, span=4)
    with pytest.raises(UsageError, match="more positions"):
        arrive([0, 1, 2, 3], 3, span=4)
    with pytest.raises(SampleIndexError) as caught:
        arrive([0, 3, 1, 3], span=4)
    assert caught.value.index == 3


def test_all_orders_together_have_a_limit() -> None:
    next_use = NextUse(most_size=20_000)
    progress = next_use.join("a", np.array([0]), np.array([3000]))
    arriving = next_use.arriving(progress, 3000, replacement=False)
    arriving.add(np.arange(3000))
    next_use.announced(progress, 0, arriving.finish(), None, None, 0.0)
    with pytest.raises(UsageError, match="together"):
        next_use.arriving(progress, 3000, replacement=False)
    next_use.leave(progress, None)
    assert not next_use.jobs


def test_incomplete_orders_count_against_the_limit() -> None:
    next_use = NextUse(most_size=40_000)
    progress = next_use.join("a", np.array([0]), np.array([3000]))
    begun = [next_use.arriving(progress, 3000, replacement=False) for _ in range(2)]
    with pytest.raises(UsageError, match="together"):
        next_use.arriving(progress, 3000, replacement=False)
    begun.pop()
    next_use.arriving(progress, 3000, replacement=False)


def test_progress_advances_from_epoch_to_epoch() -> None:
    next_use = NextUse()
    progress = next_use.join("a", np.array([0]), np.array([100]))
    for epoch in (3, 4):
        next_use.announced(progress, epoch, arrive(np.arange(100)), None, "me", 0.0)
    progress.advance_to(3, 40, 1.0)
    progress.advance_to(2, 90, 1.0)
    assert (progress.epoch, progress.position) == (3, 40)
    progress.advance_to(3, 10**9, 2.0)
    assert (progress.epoch, progress.position, list(progress.orders)) == (4, 0, [4])
    progress.advance_to(6, 5, 3.0)
    assert (progress.epoch, progress.order, progress.size) == (6, None, 0)
    next_use.announced(progress, 1, arrive(np.arange(100)), None, "me", 0.0)
    assert (progress.epoch, progress.position) == (1, 0)
    progress.end("another")
    assert progress.orders
    progress.end("me")
    assert not progress.orders


# ---- as messages --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of COUNT samples."""
    return write(tmp_path_factory.mktemp("data") / "a.ffr", [sample(i) for i in range(COUNT)])


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """A daemon for all tests of the module."""
    with serving(expect=[r"closed a session \(pid \d+\): .*"]) as running:
        yield running


def progress_of(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the progress of the jobs that announced something."""
    return [progress for progress in daemon.status()["progress"] if progress["announced"]]


@pytest.fixture
def daemon(shared: Daemon) -> Daemon:
    """The daemon after the jobs of earlier tests have ended."""
    until(lambda: not shared.status()["progress"], "the jobs of earlier tests have ended")
    return shared


def test_announce_then_read(daemon: Daemon, path: str) -> None:
    orders = [np.random.default_rng(epoch).permutation(COUNT) for epoch in range(3)]
    with daemon.open(path) as reader:
        for epoch in (0, 1):
            reader.announce(orders[epoch], epoch, name="sweep")
        assert progress_of(daemon)[0]["announced"] == [0, 1]
        assert progress_of(daemon)[0]["name"] == "sweep"
        for epoch in (0, 1):
            reader.announce(orders[epoch + 1].tolist(), epoch + 1)
            for start in range(0, COUNT, 50):
                part = orders[epoch][start : start + 50]
                assert [s.tobytes() for s in reader.read(part)] == [sample(i) for i in part]
        until(
            lambda: progress_of(daemon)[0]["epoch"] == 2,
            "the reader has reported epoch 2",
        )
        assert progress_of(daemon)[0]["announced"] == [2]
    until(lambda: not progress_of(daemon), "the orders end with their reader")


def test_reported_positions_replace_the_count_of_the_reader(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as reader:
        reader.announce(range(COUNT))
        reader.reached(0, 7)
        reader.read(range(COUNT))
        until(lambda: progress_of(daemon)[0]["position"] == 7, "the position has arrived")
        copy = pickle.loads(pickle.dumps(reader))
        copy.read(range(COUNT))
        copy.close()
        assert progress_of(daemon)[0]["position"] == 7


@pytest.mark.parametrize("server", ("off", "daemon"))
def test_an_invalid_order_is_refused(
    server: str, path: str, request: pytest.FixtureRequest
) -> None:
    place = "off" if server == "off" else request.getfixturevalue("daemon").socket
    with ffserve.open(path, server=place) as reader:
        for wrong, error in (
            ([], UsageError),
            ([COUNT], SampleIndexError),
            ([-1], SampleIndexError),
            ([1, 2, 1], SampleIndexError),
            (["a"], UsageError),
            (None, UsageError),
        ):
            with pytest.raises(error):
                reader.announce(wrong)
        for epoch in (-1, "1", 1.5, 1 << 70):
            with pytest.raises(UsageError):
                reader.announce([1], epoch)  # type: ignore[arg-type]
            with pytest.raises(UsageError):
                reader.reached(epoch, 0)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            reader.announce([1], name="")
        reader.announce([1, 2, 1], replacement=True)
        reader.reached(0, 2)
        assert reader[5].tobytes() == sample(5)


def order(tag: int, indices: Any, count: int | None = None, start: int = 0, **what: Any) -> Any:
    """Return an ORDER as a client sends it."""
    packed = protocol.pack_order(np.asarray(indices, np.int64))
    about = {"name": None, "replacement": False, **what}
    length = len(indices) if count is None else count
    return protocol.Order(tag, 1, 0, length, start, packed, about)


REFUSED: dict[str, list[Any]] = {
    "empty": [order(5, [])],
    "10^12": [order(5, [1], 10**12)],
    "10^12 with replacement": [order(5, [1], 10**12, replacement=True)],
    "negative": [order(5, [1], -4)],
    "outside": [order(5, [COUNT])],
    "far outside": [order(5, [(1 << 32) - 1])],
    "repeated": [order(5, [1, 2, 1])],
    "too long": [order(5, [1, 2, 3], 2)],
    "a gap": [order(5, [1, 2], 6), order(5, [4, 5], 6, 3)],
    "another length": [order(5, [1, 2], 6), order(5, [4, 5], 7, 2)],
    "an empty piece": [order(5, [1, 2], 6), order(5, [], 6, 2)],
    "interrupted by another": [order(5, [1, 2], 6), order(6, [1, 2])],
}


@pytest.mark.parametrize("pieces", REFUSED.values(), ids=REFUSED.keys())
def test_a_job_is_served_after_an_invalid_order(
    daemon: Daemon, path: str, pieces: list[Any]
) -> None:
    with Raw(daemon.socket) as raw:
        raw.open(path)
        raw.send(*pieces)
        answer = raw.receive()
        assert isinstance(answer, protocol.Fail) and answer.tag == 5
        error: FFServeError = protocol.error_from_wire(answer.error)
        assert isinstance(error, (UsageError, SampleIndexError)), error
        if pieces[-1].tag == 5:
            # The rest of the refused order is ignored; another order is accepted.
            raw.send(order(5, [7], 6, 3))
            raw.send(order(6, [3, 1, 2]))
        assert raw.receive() == protocol.Ready(6, len([3, 1, 2]) if pieces[-1].tag == 5 else 2, [])
    with Raw(daemon.socket) as raw:
        raw.open(path)
        raw.send(*(piece for piece in pieces if piece.tag == 5), get(7, 1, [3, 4]))
        answers = [raw.receive() for _ in range(1 if pieces[-1].tag == 6 else 2)]
        assert answers[-1] == protocol.Ready(7, 2, [])
        until(
            lambda: [job["kind"] for job in daemon.status()["progress"]] == ["silent"],
            "the job is silent",
        )


def test_a_session_is_served_between_the_pieces_of_its_order(daemon: Daemon, path: str) -> None:
    """Two sessions announce at the same time, and one of them ends in between."""
    with Raw(daemon.socket) as raw, Raw(daemon.socket, job="another") as other:
        for each in (raw, other):
            each.open(path)
            each.send(order(5, [1, 2], 6), get(6, 1, [3]))
        for each in (raw, other):
            assert each.receive() == protocol.Ready(6, 1, [])
        other.send(order(5, [3], 6, 2))
        other.socket.close()
        raw.send(order(5, [3, 4], 6, 2), order(5, [0, 5], 6, 4), get(7, 1, [3]))
        assert raw.receive() == protocol.Ready(5, 6, [])
        assert raw.receive() == protocol.Ready(7, 1, [])
        raw.send(order(8, [2, 1]))  # the one before is complete, and not answered again
        assert raw.receive() == protocol.Ready(8, 2, [])


@pytest.mark.parametrize(
    "message",
    [
        protocol.Order(0, 1, 0, 1, 0, bytes(4), {"name": None, "replacement": False}),
        protocol.Order(1, 1, -1, 1, 0, bytes(4), {"name": None, "replacement": False}),
        protocol.Order(1, 9, 0, 1, 0, bytes(4), {"name": None, "replacement": False}),
        protocol.Order(1, 1, 0, 1, 0, bytes(3), {"name": None, "replacement": False}),
        protocol.Order(1, 1, 0, 1, 0, bytes(4), {"name": 7, "replacement": False}),
        protocol.Order(1, 1, 0, 1, 0, bytes(4), {"name": "x" * 201, "replacement": False}),
        protocol.Order(1, 1, 0, 1, 0, bytes(4), {}),
        protocol.Reached(9, 0, 0),
        protocol.Reached(1, -1, 0),
        protocol.Reached(1, 0, -1),
        protocol.Reached(1, 0, 1 << 63),
    ],
    ids=repr,
)
def test_an_announcement_that_breaks_the_protocol(daemon: Daemon, path: str, message: Any) -> None:
    with Raw(daemon.socket) as raw:
        raw.open(path)
        raw.send(message)
        assert isinstance(raw.refused(), ffserve.ProtocolError)


ANNOUNCER = """
import sys, time, ffserve
reader = ffserve.open(sys.argv[1], server=sys.argv[2])
reader.announce(range(len(reader)))
print("announced", flush=True)
time.sleep(60)
"""


def test_the_order_of_a_killed_process_is_freed(daemon: Daemon, path: str) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", ANNOUNCER, path, daemon.socket], stdout=subprocess.PIPE
    )
    assert job.stdout is not None
    try:
        assert job.stdout.readline() == b"announced\n"
        assert [progress["order_size"] for progress in progress_of(daemon)] == [5 * COUNT]
    finally:
        job.kill()
        job.wait()
        job.stdout.close()
    until(lambda: not progress_of(daemon), "the order is freed")


def test_an_order_is_announced_again_to_the_next_daemon(path: str, tmp_path: Path) -> None:
    with serving() as daemon, daemon.open(path) as reader:
        reader.announce(range(COUNT // 2), 4)
        reader.reached(4, 20)
        daemon.end(signal.SIGKILL)
        daemon.start()
        reader.read([COUNT - 1])  # not in the order, so not prefetched: this asks the daemon
        until(
            lambda: [(p["epoch"], p["position"]) for p in progress_of(daemon)] == [(4, 20)],
            "it is announced to the next daemon",
        )


@pytest.mark.check
@pytest.mark.parametrize("counts_itself", [False, True])
def test_a_job_that_sends_no_request_finds_the_next_daemon(path: str, counts_itself: bool) -> None:
    """Such as the process of a loader whose workers read, or a job that finds all in memory."""
    with serving() as daemon, daemon.open(path) as reader:
        reader.read(range(COUNT))
        reader.announce(range(COUNT), 4)
        reader.announce(range(COUNT), 5)

        def advance() -> None:
            if counts_itself:
                position = reader._announced.position[1]
                reader.read([position])
            else:
                reader.reached(4, 20)

        advance()
        daemon.end(signal.SIGKILL)
        for _ in range(3):
            advance()
        daemon.start()

        def progress() -> Any:
            advance()
            return progress_of(daemon)

        until(progress, "it is announced to the next daemon")
        until(lambda: progress()[0]["announced"] == [4, 5], "with the epoch after it")
        until(
            lambda: progress()[0]["position"] >= (1 if counts_itself else 20),
            "and the position",
        )


def test_a_stopped_daemon_does_not_block_reports_of_positions(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as reader:
        reader.announce(range(COUNT), 4)

        def report() -> None:
            for position in range(20_000):
                reader.reached(4, position % COUNT)

        loop = threading.Thread(target=report, daemon=True)
        with stopped(daemon.pid):
            loop.start()
            loop.join(DEADLINE_S)
            assert not loop.is_alive()

        def position() -> Any:
            reader.reached(4, COUNT - 1)
            return progress_of(daemon)[0]["position"] == COUNT - 1

        until(position, "the connection works, and the last position has arrived")
        assert reader.read([5])[0].tobytes() == sample(5)


def test_a_closed_reader_refuses_to_report(path: str) -> None:
    with serving() as daemon:
        with daemon.open(path) as reader:
            reader.announce(range(COUNT))
        with pytest.raises(UsageError, match="closed"):
            reader.reached(0, 1)


SIBLING = """
import os, sys, ffserve
reader = ffserve.open(sys.argv[1], server=sys.argv[2])
half = len(reader) // 2
pipes = [os.pipe() for _ in range(2)]
done = os.pipe()
for rank in range(2):
    if os.fork() == 0:
        os.close(done[1])
        mine = range(rank * half, (rank + 1) * half)
        ahead = reader.batches(mine, count=2)
        samples = [s.tobytes() for s in next(ahead)]
        reader.announce(mine, 3)
        samples += [s.tobytes() for batch in ahead for s in batch]
        assert samples == [s.tobytes() for s in reader.read(mine)]
        os.write(pipes[rank][1], b"1")
        os.read(done[0], 1)
        os._exit(0)
for pipe in pipes: os.read(pipe[0], 1)
print("announced", flush=True)
sys.stdin.read()
os.close(done[1])
"""


def test_forked_siblings_announce_an_order_each_after_reading(daemon: Daemon, path: str) -> None:
    """They belonged to one job when they read, so the second order could replace the first."""
    parent = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SIBLING, path, daemon.socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"announced\n"
    announced = [progress for progress in progress_of(daemon) if progress["announced"]]
    assert [progress["count"] for progress in announced] == [COUNT // 2] * 2
    assert announced[0]["job"] != announced[1]["job"]
    parent.communicate()
    assert parent.returncode == 0
    until(lambda: not progress_of(daemon), "the orders are freed")


def test_a_forked_worker_reports_nothing(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as reader:
        reader.announce(range(COUNT))
        child = os.fork()
        if child == 0:
            reader.read(range(100))
            os._exit(0)
        os.waitpid(child, 0)
        assert progress_of(daemon)[0]["position"] == 0
