"""Direct replies, sent by the I/O thread, through real engines and a real daemon."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from daemon import Raw, asking, get, sample, serving, stopped, write

from ffserve import protocol
from ffserve.engine import io
from ffserve.engine.io import NOWHERE, DirectReply, Engine, EngineBatch, ReplySocket

CONTENT = np.random.default_rng(4).bytes(64 * 1024)
FRAME = b"all of it has come"


@pytest.fixture(params=io.probe())
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine that reports by its descriptor, as the daemon's do."""
    with Engine(request.param, depth=8, threads=4) as opened:
        opened.fileno()
        yield opened


@pytest.fixture
def file(engine: Engine, tmp_path: Path) -> Iterator[int]:
    """CONTENT, as a file of the engine."""
    path = tmp_path / "content"
    path.write_bytes(CONTENT)
    fd = os.open(path, os.O_RDONLY)
    yield engine.add_file(fd, 1)
    os.close(fd)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The daemon's end, which does not block, and the client's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def reading(engine: Engine, file: int, offset: int, size: int = 1000) -> EngineBatch:
    """A batch of one read; beyond the file's end it will fail."""
    batch = engine.batch(1, 1)
    into = np.zeros(size, np.uint8)
    batch.reads[0] = (offset, size, NOWHERE, 0, file, 0, 0, 1)
    batch.records[0] = (offset, size, NOWHERE, into.ctypes.data, 0, 0, 0, 0)
    batch.keep = into
    return batch


def await_all(engine: Engine, count: int) -> None:
    """Hear of `count` batches."""
    while count:
        assert select.select([engine.fileno()], [], [], 30)[0]
        count -= len(engine.completed())


def sent(theirs: socket.socket) -> bytes:
    """What has come by now."""
    return theirs.recv(1000) if select.select([theirs], [], [], 0)[0] else b""


class Replying:
    """Batches with one reply."""

    def __init__(self, engine: Engine, reply_socket: ReplySocket, *batches: EngineBatch) -> None:
        self.reply = DirectReply(reply_socket, FRAME)
        self._kept = [batch.keep for batch in batches]
        for batch in batches:
            self.reply.wait_for(batch)
            engine.submit(batch)


def test_a_reply_is_sent_with_the_last_of_its_batches(
    engine: Engine, file: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    reply_socket = ReplySocket(ours.fileno())
    first = Replying(engine, reply_socket, reading(engine, file, 0), reading(engine, file, 5000))
    await_all(engine, 2)
    assert not sent(theirs) and not first.reply.sent, "there may be more to wait for"
    last = reading(engine, file, 9000)
    kept = last.keep
    first.reply.wait_for(last)
    first.reply.arm()
    engine.submit(last)
    await_all(engine, 1)
    assert first.reply.sent and sent(theirs) == FRAME
    del kept


@pytest.mark.parametrize("bad", [0, 1])
def test_no_reply_is_sent_after_a_failure(
    engine: Engine, file: int, pair: tuple[socket.socket, socket.socket], bad: int
) -> None:
    ours, theirs = pair
    offsets = [0, 5000]
    offsets[bad] = len(CONTENT) - 10
    batches = [reading(engine, file, offset) for offset in offsets]
    replying = Replying(engine, ReplySocket(ours.fileno()), *batches)
    replying.reply.arm()
    await_all(engine, 2)
    assert not replying.reply.sent and not sent(theirs)


def test_a_held_reply_and_a_blocked_socket_send_nothing(
    engine: Engine, file: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    reply_socket = ReplySocket(ours.fileno())
    held = Replying(engine, reply_socket, reading(engine, file, 0))
    held.reply.hold()
    held.reply.arm()
    await_all(engine, 1)
    assert not held.reply.sent and not sent(theirs)

    reply_socket.block(True)
    blocked = Replying(engine, reply_socket)
    batch = reading(engine, file, 0)
    kept = batch.keep
    blocked.reply.wait_for(batch)
    blocked.reply.arm()
    engine.submit(batch)
    await_all(engine, 1)
    assert not blocked.reply.sent and not sent(theirs)

    reply_socket.block(False)
    free = DirectReply(reply_socket, FRAME)
    batch.keep = kept
    free.wait_for(batch)
    free.arm()
    engine.submit(batch)
    await_all(engine, 1)
    assert free.sent and sent(theirs) == FRAME


def test_a_client_that_reads_nothing_or_is_gone_holds_nobody_up(
    engine: Engine, file: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    with pytest.raises(BlockingIOError):
        while True:
            ours.send(bytes(1000))
    for gone in (False, True):
        if gone:
            theirs.close()
        batch = reading(engine, file, 0)
        kept = batch.keep
        reply = DirectReply(ReplySocket(ours.fileno()), FRAME)
        reply.wait_for(batch)
        reply.arm()
        engine.submit(batch)
        await_all(engine, 1)
        assert not reply.sent
        del kept


# ---- with a daemon ----------------------------------------------------------------------------

COUNT, SIZE = 4000, 3000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Far more than the arena holds, so that everything is missed."""
    place = tmp_path_factory.mktemp("data") / "a.ffr"
    return write(place, [sample(i, sizes=[SIZE]) for i in range(COUNT)])


@pytest.mark.check
def test_a_client_is_quicker_than_the_loop_and_uses_its_tag_again_at_once(path: str) -> None:
    chance = np.random.default_rng(1)
    with serving(arena="4MiB") as daemon, Raw(daemon.socket) as client:
        dataset = client.open(path).dataset
        for turn in range(300):
            count = int(chance.integers(1, 300))
            indices = chance.integers(0, COUNT, count)
            client.send(get(1, dataset, indices.tolist(), [1] if turn else []))
            ready = client.receive()
            assert isinstance(ready, protocol.Ready) and ready.tag == 1 and not ready.errors
            assert 0 < ready.count <= count
        client.send(protocol.Status(7))
        report = client.receive()
        assert isinstance(report, protocol.Report), "an answer came twice"


@pytest.mark.check
def test_answers_do_not_get_into_long_frames(path: str) -> None:
    """REPORTs of many pieces, answers of both threads, and a client that reads late."""
    chance = np.random.default_rng(2)
    with serving(arena="4MiB") as daemon, Raw(daemon.socket) as client:
        opened = client.open(path)
        for more in range(300):
            client.send(asking(path, tag=2 + more))
            assert isinstance(client.receive(), protocol.Opened)
        tag, due = 1000, set()
        acknowledged: list[int] = []
        for _ in range(40):
            for _ in range(8):
                tag += 2
                indices = chance.integers(0, COUNT, 40).tolist()
                client.send(get(tag, opened.dataset, indices, acknowledged))
                client.send(protocol.Status(tag + 1))
                due |= {tag, tag + 1}
                acknowledged = []
            while due:
                answer = client.receive()
                assert isinstance(answer, (protocol.Ready, protocol.Report))
                due.remove(answer.tag)
                if isinstance(answer, protocol.Ready):
                    acknowledged.append(answer.tag)


def test_who_dies_or_stops_with_answers_on_their_way_holds_nobody_up(path: str) -> None:
    with serving(arena="4MiB") as daemon, daemon.open(path) as other:
        for turn in range(30):
            client = Raw(daemon.socket)
            dataset = client.open(path).dataset
            for tag in range(1, 30):
                indices = range((turn * 29 + tag) * 37 % 3000, COUNT, 41)
                client.send(get(tag, dataset, list(indices)))
            if turn % 2:
                assert isinstance(client.receive(), protocol.Ready)
            client.socket.close()
            chosen = list(range(turn, COUNT, 97))
            assert [s.tobytes() for s in other.read(chosen)] == [
                sample(i, sizes=[SIZE]) for i in chosen
            ]


def test_the_daemon_is_stopped_or_killed_between_question_and_answer(path: str) -> None:
    chosen = list(range(0, COUNT, 11))
    with serving(arena="4MiB") as daemon:
        with Raw(daemon.socket) as client:
            dataset = client.open(path).dataset
            for tag in range(1, 20):
                client.send(get(tag, dataset, chosen[tag::20]))
            with stopped(daemon.pid):
                pass
            tags = {getattr(client.receive(), "tag", 0) for _ in range(1, 20)}
            assert tags == set(range(1, 20))
        with daemon.open(path) as reader:
            pending = reader.batches(chosen, count=8)
            next(pending)
            daemon.end(9)
            daemon.start()
            rest = [s.tobytes() for batch in pending for s in batch]
            assert rest == [sample(i, sizes=[SIZE]) for i in chosen[8:]]
