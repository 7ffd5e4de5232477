"""Readers whose daemon is dead, stopped or restarting, seen from their other threads and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from daemon import DEADLINE_S, sample, serving, stopped, until, write

import ffserve
from ffserve.client.daemon import handshake
from ffserve.client.failover import RECONNECT_S
from ffserve.errors import ServerUnavailable, UsageError
from ffserve.system.socket_path import Places

COUNT, SIZE = 100, 30_000
NEVER_S = 1000.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", [sample(i, [SIZE]) for i in range(COUNT)])


class Reading(threading.Thread):
    """Reads everything in a thread; `error` is what that ended with."""

    def __init__(self, reader: ffserve.Reader) -> None:
        super().__init__()
        self.reader = reader
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.reader.read_batch(range(COUNT))
        except BaseException as error:
            self.error = error


def test_one_dead_daemon_blocked_all_connections_of_the_process(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting and the handshake were made under the lock of all connections."""
    monkeypatch.setattr(handshake, "CONNECT_TIMEOUT_S", NEVER_S)
    dead = str(tmp_path / "dead")
    errors: list[BaseException] = []

    def wait_for_the_dead_one() -> None:
        try:
            ffserve.open(path, server=dead)
        except ServerUnavailable as error:
            errors.append(error)

    with socket.socket(socket.AF_UNIX) as listener, serving() as daemon:
        listener.bind(dead)
        listener.listen()
        waiting = threading.Thread(target=wait_for_the_dead_one)
        waiting.start()
        with listener.accept()[0]:  # which stays silent
            with daemon.open(path) as reader:
                assert bytes(reader[3]) == sample(3, [SIZE])
            assert waiting.is_alive()
        listener.close()
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive()
    assert len(errors) == 1


def test_the_error_about_a_lost_daemon_named_another_socket(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the system's socket, a client looks at its user's."""
    monkeypatch.setitem(RECONNECT_S, "require", 0.1)
    monkeypatch.delenv("FFSERVE_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with serving() as daemon:
        places = Places(daemon.socket, str(tmp_path), is_root=False)
        monkeypatch.setattr(Places, "of_process", lambda: places)
        with ffserve.open(path, server="require") as reader:
            daemon.end()
            with pytest.raises(ServerUnavailable) as raised:
                reader.read_batch(range(COUNT))
            assert raised.value.path == daemon.socket
        daemon.start()


def test_close_waited_for_a_thread_that_looked_for_the_daemon(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECONNECT_S, "require", NEVER_S)
    with serving() as daemon:
        reader = daemon.open(path)
        daemon.end()
        reading = Reading(reader)
        until(lambda: reader._selector.selection.source is None, "the thread looks for a daemon")
        time.sleep(0.1)
        reader.close()
        reading.join(DEADLINE_S)
        assert not reading.is_alive()
        assert isinstance(reading.error, UsageError) and "closed" in str(reading.error)
        daemon.start()


def test_threads_looked_for_a_lost_daemon_one_after_another(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them for as long as is allowed, while the others waited for it."""
    monkeypatch.setitem(RECONNECT_S, "require", 1.0)
    with serving() as daemon, daemon.open(path) as reader, socket.socket(socket.AF_UNIX) as dying:
        daemon.end()
        dying.bind(daemon.socket)
        dying.listen(100)
        threads = [Reading(reader) for _ in range(6)]
        attempts = 0
        dying.settimeout(0.1)
        while any(thread.is_alive() for thread in threads):
            with contextlib.suppress(TimeoutError):
                dying.accept()[0].close()
                attempts += 1
        assert all(isinstance(thread.error, ServerUnavailable) for thread in threads)
        dying.close()
        daemon.start()
    assert attempts < 40, "there are at most ten in a search"


def test_close_by_another_thread_ended_a_read_with_a_bare_error(path: str) -> None:
    """Waiting for READY the reader polled a socket that was closed: "file descriptor -1"."""
    with serving(arena="1MiB") as daemon:
        for _ in range(5):
            reader = daemon.open(path)
            with stopped(daemon.pid):
                reading = Reading(reader)
                channel = reader._selector.current().connection.channel  # type: ignore[attr-defined]
                until(lambda channel=channel: channel.unanswered, "the thread waits")
                reader.close()
                reading.join(DEADLINE_S)
            assert isinstance(reading.error, UsageError) and "closed" in str(reading.error)


@pytest.mark.check
async def test_aclose_left_a_task_looking_for_the_daemon(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECONNECT_S, "require", NEVER_S)
    with serving() as daemon:
        reader = await ffserve.aio.open(path, server=daemon.socket)
        daemon.end()
        task = asyncio.create_task(reader.read_batch(range(COUNT)))
        await asyncio.sleep(0.1)
        assert not task.done()
        await reader.aclose()
        with pytest.raises(UsageError, match="closed"):
            await asyncio.wait_for(task, DEADLINE_S)
        daemon.start()


@pytest.mark.check
async def test_reports_of_a_loop_piled_up_in_front_of_a_stopped_daemon(path: str) -> None:
    with serving() as daemon:
        async with ffserve.aio.open(path, server=daemon.socket) as reader:
            await reader.announce(np.arange(COUNT))
            await reader.read_batch(range(10))
            channel = reader._here().source.connection.channel  # type: ignore[union-attr]
            with stopped(daemon.pid):
                for k in range(100_000):
                    reader.reached(0, 10 + k // 2000)
                await reader.read_batch(range(10))
                queued = len(channel._front) + sum(map(len, channel._queue))
                assert queued < 4096
            reader.reached(0, COUNT - 1)

            def position() -> int:
                return max((each["position"] for each in daemon.status()["progress"]), default=-1)

            deadline = time.monotonic() + DEADLINE_S
            while position() != COUNT - 1:
                assert time.monotonic() < deadline, "the last position was reported"
                await asyncio.sleep(0.01)
            assert len(await reader.read(range(COUNT))) == COUNT
