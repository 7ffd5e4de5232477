"""Attacks: a program that asks a daemon for more than its share, and one that reads as users do.

    python attacks.py KIND SOCKET FILE COUNT       attack until killed; says "ready" when it begins
    python attacks.py honest SOCKET SOURCE FOLDER  read until killed; a line a call: kind, begin and
                                                   seconds

A test starts both as users of their own (`setpriv`). An attacker does not block: it has many
connections and sends on each of them whatever the socket takes. It breaks no rule of the protocol
unless its kind says so, and connects again where the daemon ends a session.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from attack_programs import PROGRAMS, enter_another_namespace, go_on_as_root_of_a_namespace, run
from daemon import Raw, asking, get

import ffserve
from ffserve import protocol
from ffserve.client.daemon.handshake import Handshake
from ffserve.errors import FFServeError

Bytes = bytes | memoryview
Script = Iterator["Bytes | int"]
"""What one connection does: sends bytes, or waits for that many messages of the daemon (0: for
one turn of the others; -1: for ever, without reading)."""

BURST, BATCH = protocol.MOST_REQUESTS, 1024
SAMPLES = 16_384
"""In the files that the tests write."""
_encode = protocol.encode
ROW = protocol.IDENTITY_DTYPE.itemsize


_BOMBS: dict[str, dict[str, Any]] = {
    "gzip.recordio": {"format": "recordio", "compression": "gzip", "max_chunk_size": 61 << 20},
    "snappy.recordio": {"format": "recordio", "compression": "snappy", "max_chunk_size": 61 << 20},
    "bomb.tfrecord.gz": {"format": "tfrecord", "compression": "gzip"},
}


# ---- kinds ----------------------------------------------------------------------------------


def gets(raw: Raw, file: str) -> Script:
    """As many unanswered GETs as are allowed, large and never acknowledged."""
    number, chance = raw.open(file).dataset, np.random.default_rng(raw.socket.fileno())
    for first in itertools.count(2, BURST):
        for tag in range(first, first + BURST):
            yield _encode(get(tag, number, chance.integers(0, SAMPLES, BATCH)))
        yield BURST


def leases(raw: Raw, file: str) -> Script:
    """The same with leases, held until the next burst."""
    number, chance = raw.open(file).dataset, np.random.default_rng(raw.socket.fileno())
    for first in itertools.count(2, BURST):
        tags = list(range(first, first + BURST))
        for tag in tags:
            packed = protocol.pack_indices(chance.integers(0, SAMPLES, BATCH))
            yield _encode(protocol.Lease(tag, number, packed))
        yield BURST
        yield _encode(protocol.Release(protocol.pack_tags(tags)))


def status(raw: Raw, file: str) -> Script:
    """STATUS without end, read by nobody, after many shards were opened."""
    folder = os.path.dirname(file) + "/many"
    if os.path.isdir(folder):
        raw.open(*(f"{folder}/{name}" for name in sorted(os.listdir(folder))))
    for first in itertools.count(2, 1000):
        yield b"".join(_encode(protocol.Status(tag)) for tag in range(first, first + 1000))


def connections(raw: Raw, file: str) -> Script:
    """Nothing: the number of connections is the attack."""
    yield -1


def connects(raw: Raw, file: str) -> Script:
    """Connections that end at once, one after another."""
    raw.socket.close()
    yield 0


def halves(raw: Raw, file: str) -> Script:
    """A frame as long as one may be that never ends."""
    raw.open(file)
    yield protocol.MAX_FRAME_SIZE.to_bytes(4, "little") + b"\x93\x03\x01\xc6\x00\xff\xff\xf0"
    piece = memoryview(bytes(1 << 20))
    for _ in range(15):
        yield piece
    yield -1


def drops(raw: Raw, file: str) -> Script:
    """A GET of 512 KiB, byte by byte."""
    number = raw.open(file).dataset
    for tag in itertools.count(2):
        frame = memoryview(_encode(get(tag, number, range(65_536 // 4))))
        for place in range(len(frame)):
            yield frame[place : place + 1]
        yield 1


def strings(raw: Raw, file: str) -> Script:
    """OPEN with millions of strings."""
    what = {"paths": ["/x"] * 5_000_000, "format": None, "verify": True}
    frame = memoryview(_encode(protocol.Open(7, what, b"")))
    while True:
        yield frame
        yield 1


def opens(raw: Raw, file: str) -> Script:
    """OPENs of many files that do not exist, and data sets that are never closed."""
    raw.open(file)
    nowhere = {"paths": ["/nowhere/at/all"] * 2000, "format": None, "verify": True}
    for tag in itertools.count(2, 2):
        yield _encode(protocol.Open(tag, nowhere, bytes(ROW * 2000)))
        yield _encode(asking(file, tag=tag + 1))


def tags(raw: Raw, file: str) -> Script:
    """RELEASE and TELL of millions of tags."""
    packed = np.arange(4_000_000, dtype="<u4").tobytes()
    release, tell = _encode(protocol.Release(packed)), _encode(protocol.Tell(0, 0, 0, packed))
    while True:
        yield memoryview(release)
        yield memoryview(tell)


def orders(raw: Raw, file: str) -> Script:
    """Orders of a million positions with replacement, in the largest pieces, and then a jump to the
    end."""
    number, count = raw.open(file).dataset, 1 << 20
    what = {"name": None, "replacement": True}
    chance = np.random.default_rng(raw.socket.fileno())
    packed = protocol.pack_order(chance.integers(0, SAMPLES, 65_536))
    for epoch in itertools.count():
        for start in range(0, count, 65_536):
            yield _encode(protocol.Order(5, number, epoch, count, start, packed, what))
        yield 1
        yield _encode(protocol.Reached(number, epoch, count))


def seens(raw: Raw, file: str) -> Script:
    """SEEN of as many samples as are allowed."""
    number, chance = raw.open(file).dataset, np.random.default_rng(raw.socket.fileno())
    indices = chance.integers(0, SAMPLES, protocol.MAX_GET_COUNT)
    frame = memoryview(_encode(protocol.Seen(number, protocol.pack_order(indices))))
    while True:
        yield frame


def datasets(raw: Raw, file: str) -> Script:
    """Thousands of data sets with an announced order each, then the end of the session."""
    raw.open(file)
    order = protocol.pack_order(np.arange(SAMPLES))
    for first in range(2, 4000, 50):
        yield b"".join(_encode(asking(file, tag=tag)) for tag in range(first, first + 50))
        yield 50
        for number in range(first, first + 50):
            facts = {"name": None, "replacement": False}
            yield _encode(protocol.Order(1, number, 0, SAMPLES, 0, order, facts))
        yield 50
    raw.socket.close()
    yield 0


def claims(raw: Raw, file: str) -> Script:
    """Prepared samples of several keys: everything is claimed, CLAIMs wait for one another, samples
    are handed over one by one, and the session ends."""
    source, chance = raw.open(file).dataset, np.random.default_rng(raw.socket.fileno())
    memory, most = os.memfd_create("attack"), protocol.MOST_CLAIMED
    os.ftruncate(memory, 4096 * most)
    for tag, key in enumerate((bytes(32), chance.bytes(32), chance.bytes(32)), 2):
        raw.send(protocol.Prepare(tag, source, key, {"name": "attack"}))
        assert isinstance(raw.receive(), protocol.Need)
        raw.pass_files(tag, [memory])
        assert isinstance(raw.receive(), protocol.Opened)
    os.close(memory)
    number, places = 2, 4096 * np.arange(most, dtype=np.int64)

    def put(tag: int, indices: np.ndarray) -> bytes:
        sizes = np.full(len(indices), 4096, np.int64)
        packed = map(protocol.pack_indices, (indices, places[: len(indices)], sizes))
        return _encode(protocol.Put(tag, number, *packed, 1))

    for first in range(10, 4000, 1000):
        for k, low in enumerate(range(0, SAMPLES, most)):
            packed = protocol.pack_indices(np.arange(low, low + most))
            yield _encode(protocol.Claim(first + k, number, packed, 0))
        for tag in range(first + 100, first + 116):
            packed = protocol.pack_indices(chance.integers(0, SAMPLES, most))
            yield _encode(protocol.Claim(tag, number, packed, 1))
        for tag in range(first + 200, first + 456):
            yield put(tag, chance.integers(0, SAMPLES, 1))
        yield put(first + 500, np.arange(most))
        yield SAMPLES // most + 257
    raw.socket.close()
    yield 0


def small(raw: Raw, file: str) -> Script:
    """Messages of a few bytes that need no answer, as many as go."""
    number = raw.open(file).dataset
    frame = _encode(protocol.Tell(number, 1, 1, b"")) + _encode(protocol.Reached(number, 0, 1))
    many = memoryview(frame * 10_000)
    while True:
        yield many


def namespaces(raw: Raw, file: str) -> Script:
    """GETs of four size classes in forty mount namespaces."""
    files = [file]
    for size, count in ((1 << 10, 4096), (16 << 10, 1024), (64 << 10, 256)):
        files.append(f"{os.path.dirname(file)}/{size}.ffr")
        if not os.path.exists(files[-1]):
            write_samples(files[-1], size, count)
    opened = [raw.open(each, tag=tag) for tag, each in enumerate(files, 2)]
    counts = [np.frombuffer(each.shards, protocol.SHARD_DTYPE)["count"][0] for each in opened]
    chance, burst = np.random.default_rng(raw.socket.fileno()), BURST // 4
    for first in itertools.count(10, BURST):
        for k, (each, count) in enumerate(zip(opened, counts, strict=True)):
            for tag in range(first + k * burst, first + (k + 1) * burst):
                yield _encode(get(tag, each.dataset, chance.integers(0, count, 256)))
        yield BURST


def bombs(raw: Raw, file: str) -> Script:
    """Chunks of a few KiB that are up to 61 MiB when they are decoded, read at random."""
    files = []
    for name, options in _BOMBS.items():
        files.append(f"{os.path.dirname(file)}/{name}")
        if not os.path.exists(files[-1]):
            unfinished = f"{files[-1]}.{os.getpid()}"
            with ffserve.create(unfinished, **options) as writer:
                for _ in range(16 * 61):
                    writer.write(bytes(1 << 20))
            os.rename(unfinished, files[-1])
    opened = [raw.open(each, tag=tag) for tag, each in enumerate(files, 2)]
    chance = np.random.default_rng(raw.socket.fileno())
    for first in itertools.count(10, 64):
        for tag in range(first, first + 64):
            number = opened[tag % len(opened)].dataset
            yield _encode(get(tag, number, chance.integers(0, 16 * 61, 16)))
        yield 64


def distrust(raw: Raw, file: str) -> Script:
    """Preparations without end that are not deterministic."""
    source, memory = raw.open(file).dataset, os.memfd_create("attack")
    os.ftruncate(memory, 4096)
    for tag in itertools.count(2):
        raw.socket.setblocking(True)
        raw.send(protocol.Prepare(tag, source, os.urandom(32), {"name": "attack"}))
        assert isinstance(raw.receive(), protocol.Need)
        raw.pass_files(tag, [memory])
        opened = raw.receive()
        assert isinstance(opened, protocol.Opened)
        raw.send(protocol.Distrust(opened.dataset, 0), protocol.Close(opened.dataset))
        yield 0


def names(raw: Raw, file: str) -> Script:
    """Jobs with the name of another user's, and STATUS to see whether it is taken."""
    raw.open(file)
    raw.send(protocol.Status(2))
    report = raw.receive()
    assert isinstance(report, protocol.Report)
    found = {job["name"] for job in report.facts["jobs"]} - {_TAKEN}
    if any(name.startswith(_TAKEN) for name in found):
        raise SystemExit(f"the daemon told that a name is taken: {found}")
    raw.socket.close()
    yield 0


KINDS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        gets, leases, status, connections, connects, halves, drops, strings, opens, tags, orders,
        seens, datasets, claims, small, namespaces, bombs, distrust, names,
    )
} | PROGRAMS  # fmt: skip
_SILENT = ("connections", "connects")
"""Kinds that do not greet."""
_IN_NAMESPACES = ("namespaces", "open_files")
_TAKEN = "honest"
"""Name of the honest client's job."""


# ---- the attacker ---------------------------------------------------------------------------


class Attacker:
    """One connection of an attack, made again when it ends."""

    def __init__(self, kind: str, path: str, file: str) -> None:
        self._kind, self._path, self._file = kind, path, file
        self._raw: Raw | None = None
        self._left: Bytes = b""
        self._await = 0

    def step(self) -> bool:
        """Do what is possible now; return whether anything was."""
        if self._raw is None:
            return self._connect()
        try:
            return self._send() if self._left else self._go_on(self._raw)
        except (OSError, EOFError, AssertionError, FFServeError):
            self._drop()
            return False

    def _connect(self) -> bool:
        if self._kind in _IN_NAMESPACES:
            enter_another_namespace()
        try:
            raw = Raw(self._path, hello=False)
        except OSError:
            return False
        try:
            if self._kind not in _SILENT:
                unused = f"attack {os.getpid()} {random.randrange(1 << 30)}"
                raw.hello(job=_TAKEN if self._kind == "names" else unused)
            self._script = KINDS[self._kind](raw, self._file)
            self._raw = raw
            self._advance()
        except (OSError, EOFError, AssertionError, FFServeError):
            raw.socket.close()
            self._raw = None
            return False
        if raw.socket.fileno() < 0:
            self._raw = None
        else:
            raw.socket.setblocking(False)
        return True

    def _advance(self) -> None:
        step = next(self._script)
        if isinstance(step, int):
            self._await = step
        else:
            self._left = step

    def _send(self) -> bool:
        assert self._raw is not None
        try:
            sent = self._raw.socket.send(self._left)
        except BlockingIOError:
            return False
        self._left = memoryview(self._left)[sent:]
        if not self._left:
            self._advance()
        return True

    def _go_on(self, raw: Raw) -> bool:
        if self._await > 0:
            try:
                while self._await:
                    raw.receive()
                    self._await -= 1
            except BlockingIOError:
                return False
        if self._await < 0:
            return False
        self._advance()
        if raw.socket.fileno() < 0:
            self._drop()
        return True

    def _drop(self) -> None:
        if self._raw is not None:
            self._raw.socket.close()
        self._raw, self._left, self._await = None, b"", 0


def attack(kind: str, path: str, file: str, count: int) -> None:
    """Attack for ever."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attackers = [Attacker(kind, path, file) for _ in range(count)]
    for attacker in attackers:
        attacker.step()
    print("ready", flush=True)
    while True:
        if sum(attacker.step() for attacker in attackers) == 0:
            time.sleep(0.002)


# ---- the honest client ----------------------------------------------------------------------


@contextlib.contextmanager
def timed(kind: str) -> Iterator[None]:
    """Print when a call began, and how long it took."""
    begun = time.monotonic()
    yield
    print(kind, f"{begun:.6f} {time.monotonic() - begun:.6f}", flush=True)


def honest(path: str, source: str, folder: str) -> None:
    """Read batches of 64; now and then greet, or open a file that was never open."""
    chance = np.random.default_rng(os.getpid())
    fresh = f"{folder}/fresh.tfrecord"
    with ffserve.open(source, server=path) as reader:
        for turn in itertools.count():
            indices = chance.integers(0, len(reader), 64)
            with timed("batch"):
                batch = reader.read(indices)
            for index, each in zip(indices.tolist(), batch, strict=True):
                assert int(each[:8].view(np.int64)[0]) == index
            if turn % 20 == 1:
                with timed("greeting"):
                    Handshake(path, "honest").socket.close()
            if turn % 100 == 2:
                assert reader.source.startswith("daemon"), reader.source
                with ffserve.create(fresh) as writer:
                    for _ in range(300):
                        writer.write(bytes(4096))
                with timed("opening"), ffserve.open(fresh, server=path) as other:
                    assert len(other[7]) == 4096
                os.unlink(fresh)


def write_samples(path: str, size: int = 4096, count: int = SAMPLES) -> None:
    """Write the file of samples that `honest` checks."""
    content = np.random.default_rng(0).integers(0, 1 << 62, size // 8)
    with ffserve.create(path, format="ffrecord", n=count) as writer:
        for index in range(count):
            content[0] = index
            writer.write(content)


if __name__ == "__main__":
    kind, path, file, amount = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt):
        if kind == "honest":
            honest(path, file, amount)
        else:
            socket.setdefaulttimeout(30)
            if kind in _IN_NAMESPACES:
                go_on_as_root_of_a_namespace()
            begin = run if kind in PROGRAMS else attack
            begin(kind, path, file, int(amount))
