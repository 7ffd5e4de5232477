"""Random sessions of well-formed messages, at a daemon that serves another client meanwhile: the
daemon ends the sessions that break the protocol, and the other client is not affected."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from daemon import Raw, get, serving, until, write
from hostile_sessions import COUNT, TRUTH, talk

from ffserve import protocol

EXPECT = (
    r"closed a session \(pid \d+\): .*",
    r"arena .*",
)


def run(tmp_path: Path, seed: int, sessions: int) -> None:
    path = write(tmp_path / "a.ffr", TRUTH)
    chance = random.Random(seed)
    ended = 0
    with serving(arena="2MiB", options=["--max-arena", "8MiB"], expect=EXPECT) as daemon:
        reader = daemon.open(path)
        with reader:
            fds = daemon.fd_count()
            for _ in range(sessions):
                ended += talk(chance, daemon.socket, path)
                some = [chance.randrange(COUNT) for _ in range(20)]
                assert [bytes(each) for each in reader.read(some)] == [TRUTH[i] for i in some]
            until(lambda: daemon.fd_count() <= fds, "the descriptors of the sessions are closed")
            with reader.lease([0, 5]) as leased:
                assert bytes(leased[1]) == TRUTH[5]
            until(lambda: daemon.status()["arena"]["leased"] == 0, "no lease is left")
            with Raw(daemon.socket) as raw:
                number = raw.open(path).dataset
                raw.send(get(3, number, range(COUNT)))
                assert isinstance(raw.receive(), protocol.Ready)
    assert 0 < ended < sessions


def test_any_messages(tmp_path: Path) -> None:
    run(tmp_path, 0, 60)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(1, 11))
def test_any_messages_for_longer(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 600)
