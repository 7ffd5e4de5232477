"""Daemons that break the protocol, or take their time: what becomes of the client's requests."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from daemon import DEADLINE_S, sample, until, write
from liar import Liar, Peer, gives, opens

import ffserve
from ffserve import protocol
from ffserve.client.daemon import connection as connections
from ffserve.client.daemon.connection import Connection
from ffserve.client.failover import RECONNECT_S, OpenRequest, source_over
from ffserve.errors import ProtocolError


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", [sample(0), sample(1)])


def answers_wrongly(peer: Peer) -> None:
    """Answer the second of two GETs with OPENED, and never the first."""
    opens(peer)
    _, second = peer.receive(), peer.receive()
    assert isinstance(second, protocol.Get)
    peer.send(protocol.Opened(second.tag, 2, b"", []))


def test_an_answer_of_the_wrong_kind_left_other_threads_waiting(path: str, tmp_path: Path) -> None:
    """They were not notified, nor was the socket shut down: they waited for SILENCE_S."""
    errors: list[ProtocolError] = []

    def read(reader: ffserve.Reader) -> None:
        try:
            reader.read([0])
        except ProtocolError as error:
            errors.append(error)

    with Liar(tmp_path, answers_wrongly) as liar, ffserve.open(path, server=liar.path) as reader:
        threads = [threading.Thread(target=read, args=(reader,), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(errors) == 2
        assert all("OPENED where READY is due" in str(error) for error in errors)
        assert liar.hung_up.wait(DEADLINE_S)


async def test_an_answer_of_the_wrong_kind_left_other_tasks_waiting(
    path: str, tmp_path: Path
) -> None:
    with Liar(tmp_path, answers_wrongly) as liar:
        async with ffserve.aio.open(path, server=liar.path) as reader:
            tasks = [asyncio.create_task(reader.read([k])) for k in range(2)]
            done, waiting = await asyncio.wait(tasks, timeout=DEADLINE_S)
            assert not waiting
            assert all("OPENED where READY is due" in str(task.exception()) for task in done)
            assert liar.hung_up.wait(DEADLINE_S)


@pytest.mark.check
async def test_a_pause_between_requests_counted_as_silence_of_the_daemon(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit of an answer ran from the last one, however long nothing was asked."""
    monkeypatch.setattr(connections, "SILENCE_S", 4)
    monkeypatch.setitem(RECONNECT_S, "require", 0.1)

    def script(peer: Peer) -> None:
        opens(peer)
        for pause_s in (0.0, 2.0):
            get = peer.receive()
            assert isinstance(get, protocol.Get)
            time.sleep(pause_s)
            gives(peer, get, b"abc")

    with Liar(tmp_path, script) as liar:
        async with ffserve.aio.open(path, server=liar.path) as reader:
            for number, pause_s in ((0, 2.2), (1, 0.0)):
                assert [bytes(each) for each in await reader.read([number])] == [b"abc"]
                await asyncio.sleep(pause_s)


def test_a_data_set_that_could_not_be_used_stayed_open(tmp_path: Path) -> None:
    received: list[protocol.Message] = []

    def script(peer: Peer) -> None:
        opened = peer.receive()
        assert isinstance(opened, protocol.Open)
        peer.send(protocol.Opened(opened.tag, 5, b"", []))
        received.append(peer.receive())

    with Liar(tmp_path, script) as liar:
        connection = Connection(liar.path, "job")
        request = OpenRequest(("/",), None, "require", True, False)
        opened = connection.open(request)
        with pytest.raises(ProtocolError, match="invalid OPENED"):
            source_over(connection, opened, request)
        until(lambda: received, "the data set is closed")
        assert received == [protocol.Close(5)]
        connection.close()
