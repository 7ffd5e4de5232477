"""Random sessions of well-formed messages, most of them valid, by a client that speaks the protocol
by hand.

    python hostile_sessions.py SEED SOCKET FILE      hold sessions until killed
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from daemon import Raw, pack_identities, sample

from ffserve import protocol
from ffserve.errors import ProtocolError

COUNT = 300
TRUTH = [sample(i) for i in range(COUNT)]
MESSAGES = 60
"""Messages in one session."""
MEMORY_SIZE = 100_000
"""Of the memory file that prepared samples come through."""


class Talker:
    """Makes random messages, most of them valid."""

    def __init__(self, chance: random.Random, path: str) -> None:
        self._chance = chance
        self._path = path
        self._kinds: tuple[Callable[[], protocol.Message], ...] = (
            self._open,
            self._files,
            self._get,
            self._get,
            self._get,
            self._lease,
            self._release,
            self._tell,
            self._order,
            self._order,
            self._reached,
            self._seen,
            self._close,
            self._status,
            self._resize,
            self._prepare,
            self._claim,
            self._claim,
            self._put,
            self._put,
            self._distrust,
        )
        self._arrived = 0

    def message(self) -> protocol.Message:
        """Return the next message."""
        return self._chance.choice(self._kinds)()

    def _number(self, *usual: int) -> int:
        strange = (0, 1, -1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62), (1 << 63) - 1, -(1 << 63))
        return self._chance.choice(strange if self._chance.random() < 0.02 else usual)

    def _tag(self) -> int:
        return self._number(*range(1, 40)) if self._chance.random() < 0.1 else self._fresh()

    def _fresh(self) -> int:
        return self._chance.randrange(1000, 1 << 32)

    def _dataset(self) -> int:
        return self._number(1, 1, 1, 2, 3)

    def _indices(self, dtype: str) -> bytes:
        count = self._number(0, 1, 7, 40, 300)
        whole = np.array(
            [self._chance.randrange(COUNT) for _ in range(min(abs(count), 500))], np.int64
        )
        if len(whole) and self._chance.random() < 0.03:
            whole[self._chance.randrange(len(whole))] = self._chance.choice((COUNT, 1 << 31))
        packed = whole.astype(dtype).tobytes()
        return packed[:-1] if self._chance.random() < 0.01 else packed

    def _tags(self) -> bytes:
        return protocol.pack_tags([self._chance.randrange(40) for _ in range(3)])

    def _open(self) -> protocol.Message:
        path = self._chance.choice((self._path, self._path, "/nowhere", "relative"))
        what: dict[str, Any] = {"paths": [path], "format": None, "verify": True}
        if self._chance.random() < 0.05:
            what.pop(self._chance.choice(list(what)))
        states = [] if path.startswith("/nowhere") or path == "relative" else [os.stat(path)]
        identities = pack_identities(states) or bytes(40)
        return protocol.Open(self._tag(), what, identities)

    def _files(self) -> protocol.Message:
        kinds = bytes(self._chance.choice((0, 0, 1, 7)) for _ in range(self._chance.randrange(4)))
        return protocol.Files(self._tag(), kinds)

    def _get(self) -> protocol.Message:
        acknowledged = self._tags() if self._chance.random() < 0.5 else b""
        return protocol.Get(
            self._tag(), self._dataset(), self._indices("<i8"), acknowledged,
            self._number(0, 5), self._number(0, 500),
        )  # fmt: skip

    def _lease(self) -> protocol.Message:
        return protocol.Lease(self._tag(), self._dataset(), self._indices("<i8"))

    def _release(self) -> protocol.Message:
        return protocol.Release(self._tags())

    def _tell(self) -> protocol.Message:
        return protocol.Tell(self._dataset(), self._number(0, 9), self._number(0, 99), self._tags())

    def _order(self) -> protocol.Message:
        begin = self._chance.random() < 0.6
        packed = self._indices("<u4")
        if begin:
            packed = np.random.default_rng(self._fresh()).permutation(COUNT).astype("<u4").tobytes()
        what = {"name": self._chance.choice((None, "a", "b")), "replacement": begin is False}
        return protocol.Order(
            5, self._dataset(), self._number(0, 1, 2), self._number(COUNT, COUNT, len(packed) // 4),
            0 if begin else self._number(40, COUNT), packed, what,
        )  # fmt: skip

    def _reached(self) -> protocol.Message:
        return protocol.Reached(self._dataset(), self._number(0, 1, 2), self._number(*range(COUNT)))

    def _seen(self) -> protocol.Message:
        return protocol.Seen(self._dataset(), self._indices("<u4"))

    def _prepare(self) -> protocol.Message:
        key = self._chance.randbytes(32 if self._chance.random() < 0.95 else 31)
        return protocol.Prepare(self._tag(), self._dataset(), key, {"name": "n"})

    def _claim(self) -> protocol.Message:
        wait = self._number(0, 0, 0, 1)
        return protocol.Claim(self._tag(), self._prepared(), self._indices("<i8"), wait)

    def _put(self) -> protocol.Message:
        indices = self._indices("<i8")
        count = len(indices) // 8
        places = [self._chance.randrange(2 * MEMORY_SIZE) for _ in range(count)]
        lengths = [self._chance.choice((0, 1, 100, 70_000)) for _ in range(count)]
        if count and self._chance.random() < 0.02:
            lengths[0] = self._chance.choice(((1 << 32) - 1, 1 << 32, 1 << 63))
        packed = [np.array(numbers, "<u8").tobytes() for numbers in (places, lengths)]
        return protocol.Put(self._tag(), self._prepared(), indices, *packed, self._number(0, 7))

    def _distrust(self) -> protocol.Message:
        return protocol.Distrust(self._prepared(), self._number(0, 1))

    def _prepared(self) -> int:
        return self._number(*(2 for _ in range(20)), 1)

    def _close(self) -> protocol.Message:
        return protocol.Close(self._number(2, 3, 4))

    def _status(self) -> protocol.Message:
        return protocol.Status(self._tag())

    def _resize(self) -> protocol.Message:
        return protocol.Resize(self._tag(), self._number(2 << 20, 4 << 20, 8 << 20))


def talk(chance: random.Random, socket: str, path: str) -> bool:
    """Run one session; return whether the daemon ended it before its last message."""
    talker = Talker(chance, path)
    with Raw(socket) as raw:
        sent = 0
        try:
            opened = raw.open(path)
            if chance.random() < 0.5:
                prepare(raw, opened.dataset, chance.choice((bytes(32), chance.randbytes(32))))
            while sent < MESSAGES:
                # A number that cannot be encoded; descriptors that nobody asked for.
                with contextlib.suppress(ProtocolError, PermissionError):
                    message = talker.message()
                    if isinstance(message, protocol.Files) and chance.random() < 0.7:
                        count = chance.choice((len(message.kinds), chance.randrange(4)))
                        raw.pass_files(message.tag, [path] * count, kinds=message.kinds)
                    else:
                        raw.send(message)
                sent += 1
                if chance.random() < 0.3:
                    _drain(raw)
            if chance.random() < 0.5:
                raw.send(protocol.Bye())
        except (BrokenPipeError, ConnectionResetError):
            pass
        return sent < MESSAGES


def prepare(raw: Raw, dataset: int, key: bytes) -> None:
    """Open the prepared samples of a data set."""
    raw.send(protocol.Prepare(2, dataset, key, {"name": "n"}))
    if isinstance(raw.receive(), protocol.Need):
        memory = os.memfd_create("hostile")
        os.ftruncate(memory, MEMORY_SIZE)
        raw.pass_files(2, [memory])
        os.close(memory)
        assert isinstance(raw.receive(), protocol.Opened)


def _drain(raw: Raw) -> None:
    raw.socket.setblocking(False)
    try:
        with contextlib.suppress(BlockingIOError):
            while raw.socket.recv(1 << 16):
                pass
    finally:
        raw.socket.setblocking(True)


def main() -> None:
    """Hold sessions for ever; a daemon that is away is waited for."""
    seed, socket, path = sys.argv[1:]
    chance = random.Random(int(seed))
    print("ready", flush=True)
    while True:
        try:
            talk(chance, socket, path)
        except (OSError, EOFError, AssertionError):
            time.sleep(0.05)  # refused, or the daemon has ended


if __name__ == "__main__":
    main()
