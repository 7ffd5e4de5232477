"""Inline payload: samples are sent completely through a real socket."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from ffserve.engine.io import PayloadRun
from ffserve.memfd import SharedMemory


@pytest.fixture(scope="module")
def arena() -> Iterator[SharedMemory]:
    memory = SharedMemory("test-sending", 8 << 20)
    memory.array[:] = np.random.default_rng(3).integers(0, 256, 8 << 20, np.uint8)
    yield memory
    memory.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


@pytest.mark.parametrize("buffer", [4096, 20_000, 1 << 20])
def test_all_bytes_arrive_in_order(
    arena: SharedMemory, pair: tuple[socket.socket, socket.socket], buffer: int
) -> None:
    near, far = pair
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    chance = random.Random(buffer)
    for most in (40,) * 60 + (700,):
        count = chance.randrange(most)
        lengths = np.array([chance.choice((0, 1, 4096, 5000, 70_000)) for _ in range(count)], "i8")
        starts = np.array([chance.randrange((8 << 20) - 70_000) for _ in range(count)], "i8")
        head = bytes(chance.randrange(1, 30))
        expected = head + b"".join(
            arena.array[s : s + n].tobytes() for s, n in zip(starts, lengths, strict=True)
        )
        run = PayloadRun(head, arena.array, starts, lengths)
        assert run.size == len(expected)
        got = b""
        while len(got) < run.size:
            assert run.rest() == expected[run.sent :]
            with contextlib.suppress(BlockingIOError):
                if run.sent < run.size:
                    assert run.send(near.fileno()) == (run.sent == run.size)
            got += far.recv(chance.choice((1000, 100_000, 1 << 20)))
        assert got == expected


def test_a_closed_socket_is_an_error(
    arena: SharedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    far.close()
    run = PayloadRun(b"head", arena.array, np.zeros(1, np.int64), np.full(1, 50_000))
    with pytest.raises(BrokenPipeError):
        run.send(near.fileno())
