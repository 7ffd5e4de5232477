"""Inline payload and pins: samples stay pinned until they are sent; slow clients give way."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from daemon import Daemon, Raw, client, get, run_python, sample, serving, until, write

import ffserve
from ffserve import protocol
from ffserve.server.users import MOST_UNSENT

COUNT = 700
SIZE = 100_000
ARENA = "32MiB"
FEW = range(100, 113)
"""Samples that fit into a socket."""
MANY = range(60)
"""More than one run of a reply."""
INLINE = ["--payload", "inline"]


def truth(index: int) -> bytes:
    return sample(index, [SIZE], seed=11)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twice as much as the arena holds."""
    return write(tmp_path_factory.mktemp("inline") / "a.ffr", [truth(i) for i in range(COUNT)])


@contextlib.contextmanager
def idle(daemon: Daemon, path: str, asked: range = FEW) -> Iterator[Raw]:
    """A client that asks for samples and does not read them."""
    with Raw(daemon.socket, payload=["inline"]) as raw:
        raw.send(get(1, raw.open(path).dataset, asked))
        least = len(asked) * SIZE if len(asked) <= len(FEW) else 1 << 20
        until(lambda: unread_here(raw) >= least, "its socket is full of samples")
        yield raw


def unread_here(raw: Raw) -> int:
    """Return the bytes in the socket of a client."""
    return len(raw.socket.recv(4 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT))


def await_end(raw: Raw) -> None:
    """Wait until the daemon has closed its end."""
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        until(lambda: raw.send(protocol.Status(9)), "the daemon has closed its end")


def fds_without_sessions(daemon: Daemon) -> int:
    until(lambda: daemon.status()["shards"][0]["sessions"] == 0, "readers have left")
    counts: list[int] = []

    def settled() -> bool:
        counts.append(daemon.fd_count())
        return counts[-10:].count(counts[-1]) == 10

    until(settled, "the session that asked for the status has ended")
    return counts[-1]


def read_all(daemon: Daemon, path: str, times: int = 2) -> None:
    """Read everything, so that every slot that may be reused is."""
    with daemon.open(path) as reader:
        for _ in range(times):
            for start in range(0, COUNT, 50):
                got = reader.read(range(start, start + 50))
                assert all(bytes(s) == truth(start + k) for k, s in enumerate(got))


def received(raw: Raw) -> tuple[list[bytes], int]:
    """Receive the answer to one GET: the samples, and how many of them are valid."""
    lengths: list[int] = []
    content = b""
    while True:
        match raw.receive():
            case protocol.Sending(lengths=packed):
                lengths = np.frombuffer(packed, "<u8").tolist()
            case protocol.Payload():
                content += raw.payload()
            case protocol.Ready(count=count):
                edges = np.cumsum([0, *lengths]).tolist()
                return [content[a:b] for a, b in pairwise(edges)], count
            case message:
                raise AssertionError(message)


def test_unread_samples_stay_unchanged(path: str) -> None:
    with serving(arena=ARENA, options=INLINE) as daemon, idle(daemon, path) as raw:
        read_all(daemon, path)
        samples, count = received(raw)
        assert count == len(FEW)
        assert samples == [truth(i) for i in FEW]
        assert daemon.status()["cache"]["blocked"] == 0


def test_every_session_that_did_not_read_kept_a_copy_of_four_megabytes(path: str) -> None:
    """So 3,277 sessions of one user could take 13 GB of the daemon's own memory."""
    count = 60
    with serving(arena=ARENA, options=INLINE) as daemon, contextlib.ExitStack() as clients:
        raws = [clients.enter_context(Raw(daemon.socket, payload=["inline"])) for _ in range(count)]
        sets = [raw.open(path).dataset for raw in raws]
        before = daemon.private_size()
        for place, (raw, number) in enumerate(zip(raws, sets, strict=True)):
            first = place * len(MANY) % (COUNT - len(MANY))
            raw.send(get(2, number, range(first, first + len(MANY))))
            until(lambda raw=raw: unread_here(raw) >= SIZE, "its socket has samples")
        assert daemon.private_size() - before < 2 * MOST_UNSENT
        samples, sent = received(raws[0])
        assert sent > 0 and samples[:sent] == [truth(i) for i in MANY[:sent]]


@pytest.mark.parametrize("leaves", ["ends with BYE", "breaks the protocol"])
def test_unread_samples_of_an_ended_session_stay_unchanged(path: str, leaves: str) -> None:
    expect = [r"closed a session \(pid \d+\): GET for data set 77, which is not open.*"]
    with serving(arena=ARENA, options=INLINE, expect=expect) as daemon:
        read_all(daemon, path, 1)
        fds = fds_without_sessions(daemon)
        with idle(daemon, path) as raw:
            raw.send(protocol.Bye() if leaves == "ends with BYE" else get(2, 77, [0]))
            await_end(raw)
            read_all(daemon, path)
            samples, count = received(raw)
            assert count == len(FEW)
            assert samples == [truth(i) for i in FEW]
            with contextlib.suppress(EOFError, ConnectionResetError):
                assert isinstance(raw.receive(), protocol.Fail)
                raw.receive()
            until(lambda: daemon.fd_count() <= fds, "the socket is closed when all was read")


def test_an_ended_session_that_is_never_read_leaves_nothing_behind(path: str) -> None:
    with serving(arena=ARENA, options=INLINE) as daemon:
        read_all(daemon, path, 1)
        fds = fds_without_sessions(daemon)
        with idle(daemon, path) as raw:
            raw.send(protocol.Bye())
            await_end(raw)
        until(lambda: daemon.fd_count() <= fds, "the socket goes with its peer")


def test_clients_that_never_read_do_not_block_others(path: str) -> None:
    with serving(arena=ARENA, options=INLINE) as daemon, contextlib.ExitStack() as stack:
        raws = [stack.enter_context(idle(daemon, path, MANY)) for _ in range(8)]
        read_all(daemon, path)
        for raw in raws:
            samples, count = received(raw)
            assert samples[:count] == [truth(i) for i in MANY][:count]


def test_an_acknowledgement_that_comes_early_frees_nothing(path: str) -> None:
    with serving(arena=ARENA, options=INLINE) as daemon, idle(daemon, path, MANY) as raw:
        raw.send(protocol.Tell(0, 0, 0, protocol.pack_tags([1])))
        read_all(daemon, path)
        samples, count = received(raw)
        assert samples[:count] == [truth(i) for i in MANY][:count]
        assert count


def test_a_slow_client_advances_while_others_need_memory(path: str) -> None:
    with (
        serving(arena=ARENA, options=INLINE) as daemon,
        Raw(daemon.socket, payload=["inline"]) as raw,
    ):
        dataset = raw.open(path).dataset
        stop = threading.Event()

        def press() -> None:
            while not stop.is_set():
                read_all(daemon, path, 1)

        thread = threading.Thread(target=press)
        thread.start()
        try:
            todo = list(range(60))
            tag = 10
            while todo:
                raw.send(get(tag, dataset, todo))
                samples, count = received(raw)
                assert samples[:count] == [truth(i) for i in todo[:count]]
                todo, tag = todo[count:], tag + 1
        finally:
            stop.set()
            thread.join()


def test_a_daemon_that_stops_leaves_what_it_sent(path: str) -> None:
    with serving(arena=ARENA, options=INLINE) as daemon, idle(daemon, path) as raw:
        assert daemon.end() == 0
        samples, count = received(raw)
        assert count == len(FEW)
        assert samples == [truth(i) for i in FEW]


def test_a_client_that_does_not_read_gives_way(path: str, tmp_path: Path) -> None:
    large = sample(0, [30 << 20])
    other = write(tmp_path / "large.ffr", [large])
    with serving(arena=ARENA, options=INLINE) as daemon:
        read_all(daemon, path, 1)
        with idle(daemon, path, MANY) as raw, daemon.open(other) as reader:
            assert bytes(reader.read([0])[0]) == large
            samples, count = received(raw)
            assert len(FEW) <= count < len(MANY)
            assert samples[:count] == [truth(i) for i in MANY][:count]


def test_an_arena_that_shrinks(path: str) -> None:
    with serving(arena=ARENA, options=INLINE) as daemon:
        read_all(daemon, path, 1)
        with idle(daemon, path, range(COUNT - 40, COUNT)) as raw, daemon.open(path) as reader:
            run_python(
                "import sys; from ffserve.client.connection import Connection\n"
                "Connection(sys.argv[1], 'j').resize(4 << 20)",
                daemon.socket,
            )
            reader.read([0])
            assert bytes(reader.read([1])[0]) == truth(1)
            samples, count = received(raw)
            assert samples[:count] == [truth(i) for i in range(COUNT - 40, COUNT)][:count]
            until(lambda: not daemon.status()["arena"]["resizing"], "it has shrunk")
            assert daemon.status()["arena"]["size"] == 4 << 20


def test_clients_killed_in_mid_batch(path: str) -> None:
    program = """
import sys, ffserve
r = ffserve.open(sys.argv[1], server=sys.argv[2])
r.read([0])
print("ready", flush=True)
while True: r.read(range(60))
"""
    with serving(arena=ARENA, options=INLINE) as daemon:
        read_all(daemon, path, 1)
        fds = fds_without_sessions(daemon)
        for _ in range(3):
            with client(program, path, daemon.socket) as process:
                process.send_signal(signal.SIGSTOP)
        until(lambda: daemon.status()["shards"][0]["sessions"] == 0, "their sessions have ended")
        until(lambda: daemon.fd_count() <= fds, "their sockets are closed")
        read_all(daemon, path, 1)


def test_a_reader_reads_everything(path: str) -> None:
    with serving(arena="160MiB", options=INLINE) as daemon, daemon.open(path) as reader:
        assert isinstance(reader, ffserve.Reader)
        order = np.random.default_rng(0).permutation(COUNT)
        for _ in range(3):
            batch = reader.read_batch(order)
            assert [bytes(s) for s in batch] == [truth(i) for i in order.tolist()]
