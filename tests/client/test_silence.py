"""A daemon that is stopped, slow or gone: what its clients notice."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import DEADLINE_S, Daemon, Raw, sample, serving, stopped, until, write

import ffserve
from ffserve import aio, protocol
from ffserve.client import failover
from ffserve.client.daemon import connection, handshake
from ffserve.client.daemon.channel import SilentError
from ffserve.errors import ServerUnavailable

COUNT = 40
SLOW_DISK = """
import asyncio
from ffserve.server.reading import engines
from ffserve.server.sessions import server
server.ALIVE_INTERVAL_S = 0.2
submit = engines.Engines.submit
engines.Engines.submit = lambda *args: asyncio.get_running_loop().call_later(4.5, submit, *args)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", [sample(i) for i in range(COUNT)])


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon that readers with `server="auto"` find."""
    with serving() as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        yield daemon
        if daemon.process is None:
            daemon.start()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 1)


def hits(reader: ffserve.Reader) -> None:
    assert bytes(reader.read_batch([7]).buffer) == sample(7)
    time.sleep(0.01)


def test_clients_that_only_hit_never_noticed_that_their_daemon_was_gone(
    own: Daemon, path: str
) -> None:
    with ffserve.open(path) as reader:
        hits(reader)
        own.end(signal.SIGKILL)
        own.start()

        def moved() -> bool:
            hits(reader)
            return bool(own.status()["jobs"])

        until(moved, "the job is known to the new daemon")
        assert reader.source == f"daemon {own.socket}"


@pytest.mark.usefixtures("impatient")
async def test_a_loop_that_is_owed_nothing_any_more_has_no_error(daemon: Daemon, path: str) -> None:
    wrong: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    async with aio.open(path, server=daemon.socket) as reader:
        assert bytes((await reader.read([0]))[0]) == sample(0)
        await asyncio.sleep(1.2)  # somebody looks whether the daemon is silent
        assert bytes((await reader.read([1]))[0]) == sample(1)
    assert not wrong


@pytest.mark.check
async def test_a_loop_that_only_hits_notices_it_too(own: Daemon, path: str) -> None:
    async with aio.open(path) as reader:
        await reader.read_batch([7])
        own.end(signal.SIGKILL)
        own.start()
        deadline = time.monotonic() + DEADLINE_S
        while not own.status()["jobs"]:
            assert time.monotonic() < deadline
            assert bytes((await reader.read_batch([7])).buffer) == sample(7)


@pytest.mark.check
@pytest.mark.usefixtures("impatient")
def test_a_stopped_daemon_is_left_and_found_again(
    own: Daemon, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request in flight held the reader for 127 s."""
    monkeypatch.setattr(failover, "RETURN_AFTER_S", 0.2)
    with ffserve.open(path) as reader:
        hits(reader)
        with stopped(own.pid):
            # Not: and then waits for a greeting, five seconds each time.
            monkeypatch.setattr(handshake, "CONNECT_TIMEOUT_S", 60.0)
            assert bytes(reader[8]) == sample(8)
            assert reader.source.startswith("engine")
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:
                hits(reader)
        until(lambda: hits(reader) or reader.source.startswith("daemon"), "the reader is back")
        assert bytes(reader[9]) == sample(9)
    assert "does not respond, so this process reads the files without it" in caplog.text
    assert "has sent nothing for 1 s" in caplog.text
    caplog.clear()


@pytest.mark.check
@pytest.mark.usefixtures("impatient")
def test_where_the_daemon_is_required_the_error_says_that_it_is_stopped(
    own: Daemon, path: str
) -> None:
    with own.open(path) as reader, stopped(own.pid):
        with pytest.raises(
            SilentError, match=r"sent nothing for 1 s.*whether its process is stopped"
        ):
            reader.read([7])
        with pytest.raises(ServerUnavailable):
            ffserve.open(path, server=own.socket)


@pytest.mark.check
@pytest.mark.usefixtures("impatient")
async def test_a_loop_leaves_a_stopped_daemon(
    own: Daemon, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with aio.open(path) as reader:
        with stopped(own.pid):
            assert bytes((await reader.read([7]))[0]) == sample(7)
            assert reader.source.startswith("engine")
    assert "does not respond, so" in caplog.text
    caplog.clear()


@pytest.mark.check
def test_a_slow_daemon_is_not_taken_for_a_stopped_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 3)
    with serving(patch=SLOW_DISK) as slow:
        with slow.open(path) as reader:
            assert bytes(reader[7]) == sample(7)
            assert reader.source == f"daemon {slow.socket}"
        _takes_a_while(slow, path)


def _takes_a_while(slow: Daemon, path: str) -> None:
    """A client that asks gets ALIVE until it gets its answer, and none afterwards."""
    with Raw(slow.socket) as raw:
        opened = raw.open(path)
        raw.send(protocol.Get(2, opened.dataset, protocol.pack_indices(np.array([9])), b"", 0, 0))
        got: list[Any] = [raw.receive(alive=True)]
        while isinstance(got[-1], protocol.Alive):
            got.append(raw.receive(alive=True))
        assert len(got) > 3
        # One more may be under way: an I/O thread answers, and the loop learns of it later.
        raw.socket.settimeout(1.0)
        late: list[Any] = []
        with pytest.raises(TimeoutError):
            while len(late) < 2:
                late.append(raw.receive(alive=True))


@pytest.mark.check
@pytest.mark.usefixtures("impatient")
async def test_a_loop_that_was_held_up_does_not_blame_the_daemon(path: str) -> None:
    with serving(
        patch="from ffserve.server.sessions import server; server.ALIVE_INTERVAL_S = 0.2"
    ) as own:
        async with aio.open(path, server=own.socket) as reader:
            reading = asyncio.ensure_future(reader.read([7]))
            await asyncio.sleep(0)
            time.sleep(2.0)
            assert bytes((await reading)[0]) == sample(7)
            assert reader.source == f"daemon {own.socket}"


def test_an_answer_that_never_comes_is_given_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ffserve.client.daemon import channel

    monkeypatch.setattr(channel, "ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.setitem(failover.RECONNECT_S, "require", 0.1)
    monkeypatch.setattr(failover.SourceSelection, "replacing", _raise)
    with (
        serving(
            patch=SLOW_DISK.replace("4.5", "1e6"),
            options=["--drain-timeout", "0"],
            expect=["stopped with unanswered requests after 0 s"],
        ) as slow,
        slow.open(path) as reader,
        pytest.raises(ServerUnavailable, match="not answered a request for 1 s"),
    ):
        reader.read([7])


def _raise(_selection: Any, _lost: Any, error: Exception) -> Iterator[None]:
    raise error
    yield
