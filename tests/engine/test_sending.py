"""Samples into a socket: the call of the C core."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from ffserve.cache.shm import SharedMemory
from ffserve.engine.sending import Run, unread


@pytest.fixture(scope="module")
def arena() -> Iterator[SharedMemory]:
    memory = SharedMemory("test-references", 8 << 20)
    memory.array[:] = np.random.default_rng(3).integers(0, 256, 8 << 20, np.uint8)
    yield memory
    memory.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


@pytest.mark.parametrize("refer_from", [0, 1, 5000, 16384, 1 << 40])
@pytest.mark.parametrize("buffer", [4096, 20_000, 1 << 20])
def test_sent_is_what_was_to_be(
    arena: SharedMemory, pair: tuple[socket.socket, socket.socket], refer_from: int, buffer: int
) -> None:
    near, far = pair
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    chance = random.Random(refer_from + buffer)
    for _ in range(20):
        count = chance.randrange(40)
        lengths = np.array([chance.choice((0, 1, 4096, 5000, 70_000)) for _ in range(count)], "i8")
        starts = np.array([chance.randrange((8 << 20) - 70_000) for _ in range(count)], "i8")
        head = bytes(chance.randrange(30))
        expected = head + b"".join(
            arena.array[s : s + n].tobytes() for s, n in zip(starts, lengths, strict=True)
        )
        run = Run(head, arena.fd, arena.array, starts, lengths, refer_from)
        assert run.size == len(expected)
        got = b""
        while run.sent < run.size or len(got) < run.size:
            assert run.rest() == expected[run.sent :]
            with contextlib.suppress(BlockingIOError):
                if run.sent < run.size:
                    went = run.send(near.fileno())
                    assert went > 0
                    run.sent += went
            assert unread(near.fileno()) >= run.sent - len(got)
            if run.sent > len(got):
                got += far.recv(chance.choice((1, 1000, 1 << 20)))
        assert got == expected
        assert unread(near.fileno()) == 0


def test_what_a_closed_socket_held_is_gone(
    arena: SharedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    run = Run(b"", arena.fd, arena.array, np.zeros(1, np.int64), np.full(1, 50_000), 1)
    assert run.send(near.fileno()) == 50_000
    assert unread(near.fileno()) >= 50_000
    far.close()
    assert unread(near.fileno()) == 0
    with pytest.raises(BrokenPipeError):
        run.send(near.fileno())


def test_by_reference_means_that_a_later_change_is_seen(
    arena: SharedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    """Else the tests of pins (test_references.py) would say nothing."""
    near, far = pair
    for refer_from, seen in ((1, True), (0, False)):
        arena.array[:10_000] = 1
        run = Run(b"", arena.fd, arena.array, np.zeros(1, np.int64), np.full(1, 10_000), refer_from)
        assert run.send(near.fileno()) == 10_000
        arena.array[:10_000] = 2
        assert set(far.recv(10_000, socket.MSG_WAITALL)) == ({2} if seen else {1})
