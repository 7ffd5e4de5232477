"""Programs that do anything, killed, stopped and held up, on a daemon whose arena is far too small,
grows and shrinks. No byte may be wrong. `everything.py` does the same, and more, for longer."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest
import random_client
from daemon import DEADLINE_S, Daemon, damage, serving, stopped, until, write

from ffserve.client.daemon.connection import Connection

CLIENTS = 4
SECONDS = 3.0
SUFFIXES = (".ffr", ".tfrecord", ".recordio", ".ffr", ".tfrecord", ".ffr")
ARENAS = (4 << 20, 8 << 20, 24 << 20)


class Story:
    """What was done to whom and when, for whoever has to explain a failure."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._lines: deque[str] = deque(maxlen=40)

    def add(self, what: str) -> None:
        """Go on."""
        self._lines.append(f"{time.monotonic():.3f} s: {what}")

    def of(self, pid: int, errors: Path) -> str:
        """Tell it, from where a client failed."""
        self.add(f"client {pid} was found dead")
        log = self._daemon.text()[-4000:]
        return "\n".join((f"client {pid}: {errors.read_text()}", *self._lines, "daemon:", log))


class Client:
    """A process that runs `random_client`."""

    def __init__(self, seed: int, daemon: Daemon, going: Path, paths: list[str]) -> None:
        self._errors = going.with_name(f"errors-{seed}")
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-W", "error", random_client.__file__),
                    *(str(seed), daemon.socket, str(going), *paths),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "begun\n", self._errors.read_text()

    def alive(self, story: Story) -> None:
        """Fail if it ended by itself."""
        assert self.process.poll() is None, story.of(self.process.pid, self._errors)

    def end(self, story: Story) -> str:
        """Wait for its end; return what it did."""
        out, _ = self.process.communicate(timeout=2 * DEADLINE_S)
        assert self.process.returncode == 0, story.of(self.process.pid, self._errors)
        return out

    def kill(self) -> None:
        """SIGKILL it with its children."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.mark.check
def test_for_a_while(tmp_path: Path) -> None:
    chance = random.Random(0)
    paths = [
        write(tmp_path / f"{place}{suffix}", random_client.samples(place))
        for place, suffix in enumerate(SUFFIXES)
    ]
    damage(paths[-1], random_client.DAMAGED)
    going = tmp_path / "going"
    going.touch()
    expect = [r"arena .*", r".*checksum.*", r".* is now .*", r".*resiz.*", r"stopped with .*"]
    with serving(arena="4MiB", options=["--max-arena", "24MiB"], expect=expect) as daemon:
        story = Story(daemon)
        clients = [Client(k, daemon, going, paths) for k in range(CLIENTS)]
        number = CLIENTS
        try:
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:
                time.sleep(chance.random() * 0.2)
                for client in clients:
                    client.alive(story)
                what = chance.choice(("resize", "kill", "stop", "hold"))
                victim = chance.randrange(len(clients))
                pid = clients[victim].process.pid
                if what == "resize":
                    story.add(f"resize to {(size := chance.choice(ARENAS))}")
                    _resize(daemon, size)
                elif what == "kill":
                    clients[victim].kill()
                    clients[victim] = Client(number, daemon, going, paths)
                    number += 1
                    story.add(f"client {pid} killed, {clients[victim].process.pid} in its place")
                else:
                    pid = pid if what == "stop" else daemon.pid
                    story.add(f"{pid} is stopped for a while")
                    with stopped(pid):
                        time.sleep(chance.random() * 0.3)
            going.unlink()
            for client in clients:
                assert client.end(story)
        finally:
            for client in clients:
                if client.process.poll() is None:
                    client.kill()
        until(
            lambda: not any(shard["sessions"] for shard in daemon.status()["shards"]),
            "all sessions are over",
        )
        _resize(daemon, ARENAS[0])
        until(lambda: daemon.status()["arena"]["size"] == ARENAS[0], "nothing is held any more")


def _resize(daemon: Daemon, size: int) -> None:
    with contextlib.closing(Connection(daemon.socket, "resizer")) as connection:
        connection.resize(size)
