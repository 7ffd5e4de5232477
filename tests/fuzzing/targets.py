"""Coverage-guided fuzzing of what arrives from sockets and files: `targets.py NAME CORPUS [FLAGS]`.

frames: the decoders of both sides. daemon: a whole server in this process, which gets bytes through
a socket. files: opening and reading record files. index: index files.

An input fails if anything but an ffserve error is raised, or the daemon reports an internal error.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import atheris
import numpy as np

with atheris.instrument_imports(include=["ffserve"]):
    import ffserve
    from ffserve import formats, protocol
    from ffserve.config import ServerConfig
    from ffserve.disk import index_file
    from ffserve.disk.files import read_at_of
    from ffserve.errors import FFServeError, ProtocolError
    from ffserve.formats.base import ScannedFormat
    from ffserve.formats.tfcompressed import CompressedShard
    from ffserve.server.sessions.server import Server
    from ffserve.server.sessions.state import ServerState

FORMATS = (None, "ffrecord", "recordio", "tfrecord")
FOLDER = Path("/dev/shm/ffserve-fuzzing")
"""Known to the corpus: OPEN messages name files in it."""
RECORDS = [b"", b"a", b"record " * 100, bytes(5000)]


def frames(data: bytes) -> None:
    """The first byte chooses the side and the size of the pieces in which the bytes arrive."""
    if not data:
        return
    side = protocol.FROM_CLIENT if data[0] & 1 else protocol.FROM_SERVER
    step = 1 + (data[0] >> 1)
    decoder = protocol.Decoder(side)
    try:
        for start in range(1, len(data), step):
            for message in decoder.feed(data[start : start + step]):
                protocol.encode(message)
                if isinstance(message, protocol.Fail):
                    protocol.error_from_wire(message.error)
    except ProtocolError:
        pass


class InternalError(logging.Handler):
    """Fails the input when the daemon logs an error of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            raise AssertionError(record.getMessage()) from record.exc_info[1]


class Daemon:
    """A server in this process, which a client writes to."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._failures: list[Any] = []
        self._loop.set_exception_handler(lambda _, context: self._failures.append(context))
        logging.getLogger("ffserve").addHandler(InternalError())
        logging.getLogger("ffserve").propagate = False
        self._path = str(FOLDER / "socket")
        Path(self._path).unlink(missing_ok=True)
        self._fds = [os.open(FOLDER / "a.ffr", os.O_RDONLY), os.open(FOLDER, os.O_RDONLY)]
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._path)
        listener.listen(16)
        config = ServerConfig(
            arena_size_bytes=1 << 20, max_arena_size_bytes=4 << 20, engine="threads"
        )
        self._server = Server(ServerState(config), listener)

    def __call__(self, data: bytes) -> None:
        """The first byte tells whether HELLO goes before the bytes, and which descriptors go with
        them (if the kernel allows it) and with the answers to NEED."""
        self._loop.run_until_complete(self._serve(data))
        if self._failures:
            context = self._failures.pop()
            raise AssertionError(context) from context.get("exception")

    async def _serve(self, data: bytes) -> None:
        if not data:
            return
        hello: dict[str, Any] = {"versions": [protocol.VERSION], "job": "fuzzing"}
        if data[0] & 2:
            hello["payload"] = ["shared", "inline"]
        prefix = protocol.encode(protocol.Hello(hello)) if data[0] & 1 else b""
        client = socket.socket(socket.AF_UNIX)
        client.connect(self._path)
        client.setblocking(False)
        try:
            if prefix:
                client.send(prefix)
                await self._drain(client, until_end=False)
            fds, content = self._fds[: data[0] >> 2 & 3], data[1:100_000] or b"\0"
            if data[0] & 16:
                with contextlib.suppress(PermissionError):
                    socket.send_fds(client, [content[:1]], fds)
                    content = content[1:]
            if content:
                client.send(content)
            if data[0] & 32:
                await self._pass(client, fds, data[0] >> 6)
            client.shutdown(socket.SHUT_WR)
            await self._drain(client, until_end=True)
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            pass
        finally:
            client.close()
        while self._server.connection_count:
            await asyncio.sleep(0)

    async def _pass(self, client: socket.socket, fds: list[int], more: int) -> None:
        """Wait for NEEDs, and answer each with FILES, which may announce more than come."""
        decoder = protocol.Decoder(protocol.FROM_SERVER)
        # The bytes before may end within a frame, which swallows the FILES: then none will answer.
        idle, patience = 0, 40
        while idle < 20 and patience:
            opening = bool(self._server._openings)
            idle, patience = (0, patience - 1) if opening else (idle + 1, patience)
            await asyncio.sleep(0.0005 if opening else 0)
            try:
                chunk, came, _, _ = socket.recv_fds(client, 65536, 16)
            except BlockingIOError:
                continue
            for fd in came:
                os.close(fd)
            if not chunk:
                return
            decoder.push(chunk)
            while (message := decoder.next()) is not None:
                if isinstance(message, protocol.Opened):
                    return
                if isinstance(message, protocol.Need):
                    files = protocol.Files(message.tag, bytes(len(fds) + more % 2))
                    socket.send_fds(client, [protocol.encode(files)], fds)

    async def _drain(self, client: socket.socket, *, until_end: bool) -> None:
        for _ in range(10_000):
            try:
                received, fds, _, _ = socket.recv_fds(client, 65536, 16)
            except BlockingIOError:
                await asyncio.sleep(0)
                continue
            for fd in fds:
                os.close(fd)
            if not received or not until_end:
                return


def files(data: bytes) -> None:
    """The first byte chooses format and options; the rest is the file."""
    if not data:
        return
    path = FOLDER / "any.bin"
    path.write_bytes(data[1:])
    try:
        with ffserve.open(
            path,
            format="tar" if data[0] & 16 else FORMATS[data[0] & 3],
            server="off",
            verify=bool(data[0] & 4),
            on_error="skip" if data[0] & 8 else "raise",
        ) as reader:
            reader.read(range(min(len(reader), 64)), errors="return")
    except FFServeError:
        pass


def index(data: bytes) -> None:
    """The bytes are the numbers of an index file, which is valid otherwise: of a plain file, or
    (first bit) seek points of a compressed one."""
    if not data:
        return
    name = "c.tfrecord.gz" if data[0] & 1 else "a.tfrecord"
    path, kept = FOLDER / name, b""
    count = len(data) // 12
    lengths = np.frombuffer(data, "<u8", count).astype(np.uint64)
    checksums = np.frombuffer(data, "<u4", count, 8 * count).astype(np.uint32)
    fd = os.open(path, os.O_RDONLY)
    try:
        read_at = read_at_of(fd, str(path))
        chosen = formats.by_name("tfrecord")
        assert isinstance(chosen, ScannedFormat)
        size = os.fstat(fd).st_size
        if data[0] & 1:
            true = chosen.open(read_at, size, str(path))
            lengths, checksums, kept = true.lengths, true.checksums, data[1:]
        identity = index_file.Identity.of(fd, str(path), "tfrecord")
        content = index_file.encode(identity, lengths, checksums, kept)
        found = index_file.decode(content, identity)
        assert found is not None and found.kept == kept
        shard = chosen.restore(found.lengths, found.checksums, found.kept, size, str(path))
        if isinstance(shard, CompressedShard):
            shard.limit(1 << 24)
            shard.fits(read_at)
            shard.agrees(read_at, np.arange(shard.count))
        else:
            assert shard is None or bool((shard.offsets + shard.lengths <= size).all())  # type: ignore[attr-defined]
    finally:
        os.close(fd)


def seeds(target: str) -> Iterator[bytes]:
    """Yield inputs to begin with: valid ones."""
    messages: list[Any] = [
        protocol.Open(1, {"paths": [f"{FOLDER}/a.ffr"], "format": None, "verify": True}, bytes(40)),
        protocol.Get(2, 1, protocol.pack_indices(np.arange(4)), b"", 1, 100),
        protocol.Lease(3, 1, protocol.pack_indices(np.arange(4))),
        protocol.Order(
            5, 1, 0, 4, 0, protocol.pack_order(np.arange(4)), {"name": "n", "replacement": False}
        ),
        protocol.Reached(1, 0, 2),
        protocol.Seen(1, protocol.pack_order(np.arange(4))),
        protocol.Release(protocol.pack_tags([3])),
        protocol.Tell(1, 1, 10, protocol.pack_tags([2])),
        protocol.Times(5000, bytes(100)),
        protocol.Status(6),
        protocol.Resize(7, 2 << 20),
        protocol.Prepare(8, 1, bytes(protocol.KEY_SIZE), {"name": "n"}),
        protocol.Claim(9, 2, protocol.pack_indices(np.arange(4)), 0),
        protocol.Put(10, 2, protocol.pack_indices(np.arange(4)), bytes(32), bytes(32), 5),
        protocol.Distrust(2, 1),
        protocol.Close(1),
    ]
    encoded = [protocol.encode(message) for message in messages]
    if target == "daemon":
        for first in (1, 3, 7, 21, 37, 39, 101, 103):
            yield bytes([first]) + b"".join(encoded)
        yield b"\0" + protocol.encode(protocol.Hello({"versions": [1], "job": "j"}))
    elif target == "frames":
        yield from (b"\xff" + frame for frame in encoded)
        answers = [
            protocol.Welcome({"version": 1}),
            protocol.Opened(1, 1, bytes(64), ["ffrecord"]),
            protocol.Ready(1, 4, [[0, "checksum", "text", "path", 1, 2, "hint"]]),
            protocol.Fail(1, ["checksum", "text", "path", 1, 2, "hint"]),
        ]
        yield from (b"\xfe" + protocol.encode(answer) for answer in answers)
    elif target == "files":
        for path in sorted((Path(__file__).parents[1] / "golden").rglob("*")):
            if path.is_file() and path.suffix != ".json" and path.stat().st_size < 10_000:
                yield from (bytes([first]) + path.read_bytes() for first in (4, 12))
        compressed = (FOLDER / "c.tfrecord.gz").read_bytes()
        yield from (bytes([first]) + compressed for first in (4, 12))
        yield from (bytes([first]) + (FOLDER / "a.tar").read_bytes() for first in (20, 28))
    else:
        yield np.array([100, 16], "<u8").tobytes() + bytes(8)
        content = (FOLDER / "c.tfrecord.gz").read_bytes()
        found = formats.by_name("tfrecord").open(
            lambda at, into: (
                into.__setitem__(slice(None), content[at : at + len(into)]) or len(into)
            ),
            len(content),
            "c",
        )
        yield b"\1" + found.kept  # type: ignore[attr-defined]


def main() -> None:
    """Run one target over its corpus, from these seeds on; other arguments go to libFuzzer."""
    name, corpus = sys.argv.pop(1), Path(sys.argv.pop(1))
    FOLDER.mkdir(exist_ok=True)
    for suffix in ("ffr", "recordio", "tfrecord", "tar"):
        with ffserve.create(FOLDER / f"a.{suffix}") as writer:
            for record in RECORDS:
                writer.write(record)
    (FOLDER / "c.tfrecord.gz").write_bytes(gzip.compress((FOLDER / "a.tfrecord").read_bytes()))
    targets = {"frames": lambda: frames, "daemon": Daemon, "files": lambda: files}
    target: Callable[[bytes], None] = {**targets, "index": lambda: index}[name]()
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in seeds(name):
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    atheris.Setup([sys.argv[0], str(corpus), *sys.argv[1:]], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
