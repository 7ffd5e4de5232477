"""Samples through the socket, where memory cannot be shared."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import (
    Daemon,
    Raw,
    damage,
    get,
    run_python,
    sample,
    serving,
    until,
    write,
)
from liar import Liar, Peer, opens

import ffserve
from ffserve import protocol
from ffserve.client.connection import Connection
from ffserve.client.failover import OpenRequest
from ffserve.client.inline import SampleSink
from ffserve.errors import ChecksumError, ProtocolError, SampleIndexError, UsageError

COUNT = 300
TRUTH = [sample(i) for i in range(COUNT)]
INLINE = ["--payload", "inline"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("inline") / "a.ffr", TRUTH)


@pytest.fixture(scope="module")
def inline() -> Iterator[Daemon]:
    """A daemon that sends everything through the socket."""
    with serving(options=INLINE) as running:
        yield running


@pytest.fixture
def reader(path: str, inline: Daemon) -> Iterator[ffserve.Reader]:
    with inline.open(path) as opened:
        yield opened


# ---- the contract -----------------------------------------------------------------------------


def test_read_and_read_batch(reader: ffserve.Reader) -> None:
    order = [*np.random.default_rng(1).permutation(COUNT).tolist(), 5, 5, 0]
    got = reader.read(order)
    assert [g.tobytes() for g in got] == [TRUTH[i] for i in order]
    assert all(g.flags.writeable and g.flags.owndata for g in got)
    batch = reader.read_batch(order)
    assert [g.tobytes() for g in batch] == [TRUTH[i] for i in order]
    assert reader.read([]) == []
    assert len(reader.read_batch([])) == 0
    with pytest.raises(SampleIndexError):
        reader.read([COUNT])


def test_into_the_callers_buffer(reader: ffserve.Reader) -> None:
    total = sum(map(len, TRUTH))
    out = np.zeros(total + 5, np.uint8)
    batch = reader.read_batch(range(COUNT), out=out)
    assert batch.buffer.base is out
    assert out[:total].tobytes() == b"".join(TRUTH)
    assert not out[total:].any()
    with pytest.raises(UsageError):
        reader.read_batch(range(COUNT), out=np.zeros(total - 1, np.uint8))
    with pytest.raises(UsageError):
        reader.read_batch(range(COUNT), out=np.zeros(total, np.int8))  # type: ignore[arg-type]
    assert reader.read_batch(range(COUNT)).buffer.tobytes() == b"".join(TRUTH)


def test_lengths_and_tables_come_through_the_protocol(reader: ffserve.Reader, path: str) -> None:
    assert reader.sizes().tolist() == [len(s) for s in TRUTH]
    assert reader.sizes([3, 3, 0]).tolist() == [len(TRUTH[i]) for i in (3, 3, 0)]
    with ffserve.open(path, server="off") as plain:
        for mine, theirs in zip(reader.tables(0), plain.tables(0), strict=True):
            assert (mine == theirs).all()


def test_iteration_leases_and_stats(reader: ffserve.Reader) -> None:
    assert [s.tobytes() for s in reader] == TRUTH
    with reader.lease([1, 2, 1]) as views:
        assert [bytes(v) for v in views] == [TRUTH[i] for i in (1, 2, 1)]
        assert not any(v.flags.writeable for v in views)
    assert reader.stats()["samples"] == COUNT + 3


def shared_memory() -> set[str]:
    """The inodes of the daemons' memory that this process has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "/memfd:ffserve" in line}


def test_nothing_of_the_memory_is_handed_out(inline: Daemon, path: str) -> None:
    before = shared_memory()  # other tests' arenas
    with inline.open(path) as reader:
        reader.read([0])
        assert shared_memory() <= before


def test_threads_share_a_connection(inline: Daemon, path: str) -> None:
    with inline.open(path) as reader:
        wrong: list[int] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(20):
                order = rng.integers(0, COUNT, 30)
                if [bytes(s) for s in reader.read(order)] != [TRUTH[i] for i in order.tolist()]:
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


async def test_awaited(inline: Daemon, path: str) -> None:
    async with ffserve.aio.open(path, server=inline.socket) as reader:
        got = await asyncio.gather(*(reader.read([i, COUNT - 1 - i]) for i in range(COUNT)))
        assert [[bytes(s) for s in pair] for pair in got] == [
            [TRUTH[i], TRUTH[COUNT - 1 - i]] for i in range(COUNT)
        ]
        assert (await reader.sizes()).tolist() == [len(s) for s in TRUTH]
        out = np.zeros(sum(map(len, TRUTH)), np.uint8)
        for turn in range(30):
            task = asyncio.create_task(reader.read_batch(range(COUNT), out=out))
            for _ in range(turn):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            out[:] = 7
            await reader.read([1])
            assert (out == 7).all()
        assert [bytes(s) async for s in reader] == TRUTH


def test_damaged_samples_fail_alone(inline: Daemon, tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", TRUTH[:40])
    for index in (3, 39):
        damage(path, index)
    with inline.open(path) as reader:
        mixed = reader.read(range(40), errors="return")
        for i, got in enumerate(mixed):
            if i in (3, 39):
                assert isinstance(got, ChecksumError)
                assert got.index == i
            else:
                assert bytes(got) == TRUTH[i]  # type: ignore[arg-type]
        with pytest.raises(ChecksumError):
            reader.read_batch([3])
        assert reader.read_batch([4]).buffer.tobytes() == TRUTH[4]


# ---- much data, little room -------------------------------------------------------------------


def test_far_more_than_the_arena_holds(tmp_path: Path) -> None:
    truth = [sample(i, [40_000, 90_000, 100, 1_200_000], seed=2) for i in range(120)]
    path = write(tmp_path / "a.ffr", truth)
    with serving(arena="8MiB", options=INLINE) as daemon, daemon.open(path) as reader:
        for seed in range(2):
            order = np.random.default_rng(seed).permutation(120)
            batch = reader.read_batch(order)
            assert [bytes(s) for s in batch] == [truth[i] for i in order.tolist()]
            assert [bytes(s) for s in reader.read(order)] == [truth[i] for i in order.tolist()]
            out = np.empty(batch.buffer.nbytes, np.uint8)
            again = reader.read_batch(order, out=out)
            assert out.tobytes() == batch.buffer.tobytes() == again.buffer.tobytes()


def test_a_hundred_thousand_small_samples_at_once(inline: Daemon, tmp_path: Path) -> None:
    truth = [struct.pack("<Q", i) * (i % 5) for i in range(100_000)]
    path = write(tmp_path / "small.ffr", truth)
    with inline.open(path) as reader:
        assert reader.read_batch(range(100_000)).buffer.tobytes() == b"".join(truth)
        assert reader.sizes().tolist() == [len(s) for s in truth]


def test_slow_reader_holds_nobody_up_and_gets_everything(tmp_path: Path) -> None:
    truth = [sample(i, [50_000], seed=5) for i in range(200)]
    path = write(tmp_path / "a.ffr", truth)
    with (
        serving(arena="4MiB", options=INLINE) as daemon,
        Raw(daemon.socket, payload=["inline"]) as slow,
    ):
        dataset = slow.open(path).dataset
        # Takes all room there is, and does not read what comes.
        for tag in range(1, 17):
            slow.send(get(tag, dataset, range((tag * 10) % 190, (tag * 10) % 190 + 10)))
        with daemon.open(path) as reader:
            for start in range(0, 200, 20):
                got = reader.read(range(start, start + 20))
                assert [bytes(s) for s in got] == truth[start : start + 20]
        assert daemon.status()["cache"]["blocked"] == 0
        # What it is sent at last is whole.
        answered = 0
        while answered < 16:
            tag, samples, ready = received(slow)
            first = (tag * 10) % 190
            assert samples[: ready.count] == truth[first : first + ready.count]
            answered += 1


def received(raw: Raw) -> tuple[int, list[bytes], protocol.Ready]:
    """Take in what answers one GET."""
    lengths: list[int] = []
    content = b""
    while True:
        message = raw.receive()
        match message:
            case protocol.Sending(lengths=packed):
                lengths = np.frombuffer(packed, "<u8").tolist()
            case protocol.Payload():
                content += raw.payload()
            case protocol.Ready():
                edges = np.cumsum([0, *lengths]).tolist()
                samples = [content[a:b] for a, b in pairwise(edges)]
                return message.tag, samples, message
            case _:
                raise AssertionError(message)


def test_client_killed_while_it_is_sent_to(tmp_path: Path) -> None:
    truth = [sample(i, [100_000], seed=6) for i in range(60)]
    path = write(tmp_path / "a.ffr", truth)
    program = """
import sys, ffserve, threading
r = ffserve.open(sys.argv[1], server=sys.argv[2])
r.read([0])
print("ready", flush=True)
while True: r.read(range(60))
"""
    with serving(arena="8MiB", options=INLINE) as daemon, daemon.open(path) as reader:
        before = daemon.fd_count()
        for _ in range(3):
            process = subprocess.Popen(
                [sys.executable, "-c", program, path, daemon.socket],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.kill()
            process.wait()
            process.stdout.close()
            assert [bytes(s) for s in reader.read(range(60))] == truth
        until(lambda: daemon.fd_count() <= before, "its descriptors are closed")


def test_restart_in_mid_batch(tmp_path: Path) -> None:
    truth = [sample(i, [100_000], seed=7) for i in range(80)]
    path = write(tmp_path / "a.ffr", truth)
    daemon = Daemon(arena="16MiB", options=INLINE).start()
    try:
        with daemon.open(path) as reader:
            got: list[Any] = []
            stop = threading.Event()

            def work() -> None:
                while not stop.is_set():
                    got.append(reader.read_batch(range(80)).buffer.tobytes())

            thread = threading.Thread(target=work)
            thread.start()
            for _ in range(2):
                count = len(got)
                until(lambda: len(got) > count + 1, "batches come")  # noqa: B023
                daemon.end(signal.SIGKILL)
                daemon.start()
            count = len(got)
            until(lambda: len(got) > count, "batches come again")
            stop.set()
            thread.join()
        assert set(got) == {b"".join(truth)}
    finally:
        daemon.close()


# ---- the handshake ----------------------------------------------------------------------------


def test_client_that_cannot_map_asks_for_inline(daemon: Daemon, path: str) -> None:
    program = """
import resource, sys, ffserve, numpy
import ffserve.reader, ffserve.client.local
now = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (now + (48 << 20), now + (48 << 20)))
with ffserve.open(sys.argv[1], server=sys.argv[2]) as reader:
    print(type(reader._selector.source).__name__, sum(len(s) for s in reader.read(range(300))))
"""
    out = run_python(program, path, daemon.socket).stdout.split()
    assert out == ["InlineSource", str(sum(map(len, TRUTH)))]


def test_client_that_gets_no_descriptors_asks_for_inline(daemon: Daemon, path: str) -> None:
    program = """
import os, resource, sys, ffserve
import ffserve.reader
used = max(map(int, os.listdir("/proc/self/fd")))
# Room for the socket and not for what comes with the greeting.
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, used + 1))
with ffserve.open(sys.argv[1], server=sys.argv[2]) as reader:
    print(type(reader._selector.source).__name__, sum(len(s) for s in reader.read(range(300))))
"""
    out = run_python(program, path, daemon.socket).stdout.split()
    assert out == ["InlineSource", str(sum(map(len, TRUTH)))]


def test_what_is_done_stands_in_the_greeting(daemon: Daemon, inline: Daemon) -> None:
    with Raw(daemon.socket, hello=False) as raw:
        welcome = raw.hello()
        assert isinstance(welcome, protocol.Welcome)
        assert welcome.about["payload"] == "shared"
    for server, can in ((daemon, ["inline"]), (inline, ["shared", "inline"])):
        with Raw(server.socket, hello=False) as raw:
            welcome = raw.hello(payload=can)
            assert isinstance(welcome, protocol.Welcome)
            assert welcome.about["payload"] == "inline"


@pytest.mark.parametrize("can", [["carrier pigeon"], [], "inline", None])
def test_greetings_that_are_refused(can: Any) -> None:
    expect = [r"closed a session \(pid \d+\): the client accepts the payload .*"]
    with serving(expect=expect) as daemon, Raw(daemon.socket, hello=False) as raw:
        answer = raw.hello(payload=can)
        assert isinstance(answer, protocol.Fail)


def test_old_client_at_a_daemon_that_only_sends() -> None:
    expect = [r"closed a session \(pid \d+\): the client accepts the payload .*"]
    with serving(options=INLINE, expect=expect) as daemon, Raw(daemon.socket, hello=False) as raw:
        assert isinstance(raw.hello(), protocol.Fail)


def test_lease_has_no_place(path: str) -> None:
    expect = [r"closed a session \(pid \d+\): LEASE in a session with inline payload"]
    with (
        serving(options=INLINE, expect=expect) as daemon,
        Raw(daemon.socket, payload=["inline"]) as raw,
    ):
        dataset = raw.open(path).dataset
        raw.send(protocol.Lease(1, dataset, protocol.pack_indices(np.array([0]))))
        assert isinstance(raw.refused(), ProtocolError)


def test_more_requests_than_a_session_may_have(path: str) -> None:
    expect = [r"closed a session \(pid \d+\): more than 64 unanswered requests"]
    with (
        serving(options=INLINE, expect=expect) as daemon,
        Raw(daemon.socket, payload=["inline"]) as raw,
    ):
        dataset = raw.open(path).dataset
        # Nothing is read meanwhile: what is sent does not fit into the socket.
        with contextlib.suppress(BrokenPipeError):
            for tag in range(1, 100):
                raw.send(get(tag, dataset, range(COUNT)))
        until(lambda: "64 unanswered requests" in daemon.text(), "the daemon has enough")


# ---- a daemon that lies -----------------------------------------------------------------------


def sending(*answers: bytes) -> Callable[[Peer], None]:
    """Answer the first GET after OPEN, whose tag is 2, with these bytes."""

    def script(peer: Peer) -> None:
        opens(peer)
        peer.receive()
        peer.send(*answers)

    return script


def lengths(*values: int) -> bytes:
    return protocol.encode(protocol.Sending(2, np.array(values, "<u8").tobytes()))


def payload(size: int, content: bytes, tag: int = 2) -> bytes:
    return protocol.encode(protocol.Payload(tag, size)) + content


def ready(count: int) -> bytes:
    return protocol.encode(protocol.Ready(2, count, []))


LIES = {
    "more samples than asked for": [lengths(1, 1, 1)],
    "a sample beyond the arena": [lengths(1 << 40)],
    "lengths that wrap around": [lengths((1 << 64) - 1, 2)],
    "lengths that are no numbers": [protocol.encode(protocol.Sending(2, b"123"))],
    "lengths twice": [lengths(1), lengths(1)],
    "bytes before their lengths": [payload(3, b"abc")],
    "more bytes than it said": [lengths(1, 1), payload(3, b"abc")],
    "fewer bytes than it said": [lengths(3, 3), payload(3, b"abc"), ready(2)],
    "no bytes at all": [lengths(3, 3), ready(2)],
    "no lengths at all": [ready(2)],
    "more than it was asked for": [lengths(0, 0), ready(3)],
    "payload of a size that cannot be": [protocol.encode(protocol.Payload(2, 1 << 40))],
}


@pytest.mark.parametrize("name", LIES)
def test_a_daemon_that_sends(name: str, tmp_path: Path) -> None:
    with Liar(tmp_path, sending(*LIES[name])) as liar:
        connection = Connection(liar.path, "job")
        connection.open(OpenRequest(("/",), None, "require", True, False))
        sink = SampleSink(2, connection.handshake.arena_size, apart=False, out=None)
        tag = connection.channel.get(1, np.array([0, 1]), sink)
        with pytest.raises(ProtocolError):
            answer = connection.wait(tag)
            if not 0 <= answer.count <= 2:
                raise ProtocolError("as InlineSource says")
            sink.complete(answer.count)
        connection.close()


def test_a_daemon_that_sends_in_pieces(tmp_path: Path) -> None:
    content = sample(5, [70_000])
    stream = lengths(60_000, 10_000) + payload(70_000, content) + ready(2)
    pieces = [stream[k : k + 777] for k in range(0, len(stream), 777)]
    # And for somebody who never asked.
    with Liar(tmp_path, sending(payload(500, bytes(500), tag=99), *pieces)) as liar:
        connection = Connection(liar.path, "job")
        connection.open(OpenRequest(("/",), None, "require", True, False))
        sink = SampleSink(2, connection.handshake.arena_size, apart=True, out=None)
        tag = connection.channel.get(1, np.array([0, 1]), sink)
        arrays = sink.complete(connection.wait(tag).count).arrays
        assert arrays is not None
        assert [bytes(a) for a in arrays] == [content[:60_000], content[60_000:]]
        connection.close()
