"""Peers that break the protocol: clients at a real daemon, daemons at a real client."""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import mmap
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from daemon import (
    DEADLINE_S,
    Daemon,
    Raw,
    asking,
    get,
    run_python,
    sample,
    serving,
    until,
    write,
)

import ffserve
import ffserve.client.failover
from ffserve import protocol
from ffserve.engine.slots import ENTRY_DTYPE
from ffserve.errors import (
    FFServeError,
    ProtocolError,
    ReadError,
    SampleIndexError,
    ServerUnavailable,
)

COUNT = 50


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of COUNT samples."""
    return write(tmp_path_factory.mktemp("data") / "a.ffr", [sample(i) for i in range(COUNT)])


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that may log sessions that it closed."""
    with serving(expect=[r"closed a session \(pid \d+\): .*"]) as running:
        yield running


@pytest.fixture(autouse=True)
def others_are_served(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a client connected before the test and one connected after it are served."""
    if "daemon" not in request.fixturenames:
        yield
        return
    daemon, path = request.getfixturevalue("daemon"), request.getfixturevalue("path")
    with daemon.open(path) as before:
        yield
        with daemon.open(path) as after:
            for reader in (before, after):
                assert [s.tobytes() for s in reader.read(range(0, COUNT, 7))] == [
                    sample(i) for i in range(0, COUNT, 7)
                ]


def frame(*values: Any) -> bytes:
    """Return a frame with any body."""
    body: bytes = msgpack.packb(list(values))
    return struct.pack("<I", len(body)) + body


# ---- clients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "about",
    [
        {"versions": []},
        {"versions": [2.0]},
        {"versions": None},
        {"versions": {"a": 1}},
        {"job": ""},
        {"job": 7},
        {"job": "x" * 1000},
    ],
)
def test_an_invalid_hello_is_refused(daemon: Daemon, about: dict[str, Any]) -> None:
    with Raw(daemon.socket, hello=False) as raw:
        raw.send(
            protocol.Hello({"versions": [protocol.VERSION], "client": "t", "job": "j", **about})
        )
        error = raw.refused()
        assert isinstance(error, ProtocolError)
        assert "HELLO" in str(error)


@pytest.mark.parametrize(
    "message",
    [
        protocol.Status(1),
        protocol.Bye(),
        get(1, 1, [0]),
        asking("/"),
        protocol.Files(1, b""),
    ],
)
def test_a_session_must_begin_with_hello(daemon: Daemon, message: protocol.Message) -> None:
    with Raw(daemon.socket, hello=False) as raw:
        raw.send(message)
        assert "HELLO" in str(raw.refused())


def test_a_second_hello_is_refused(daemon: Daemon) -> None:
    with Raw(daemon.socket) as raw:
        raw.send(protocol.Hello({"versions": [protocol.VERSION], "job": "j"}))
        assert isinstance(raw.refused(), ProtocolError)


@pytest.mark.parametrize("hello", [False, True])
@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<I", protocol.MAX_FRAME_SIZE + 1),
        b"\xff" * 100,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        struct.pack("<I", 0),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 1) + b"\x91",
        frame(),
        frame("x"),
        frame(True),
        frame(99),
        frame(-1),
        frame(2**63),
        frame(protocol.Ready.TYPE, 1, 1, []),
        frame(protocol.Get.TYPE, 1),
        frame(protocol.Get.TYPE, 1, 1, [1, 2], b"", 0, 0),
        frame(protocol.Get.TYPE, True, 1, b"", b"", 0, 0),
        frame(protocol.Status.TYPE, 1.0),
        frame(protocol.Open.TYPE, 1, None),
        frame(protocol.Hello.TYPE, {1: 2}),
        b"\x05\0\0\0\xdd\xff\xff\xff\xff",
        struct.pack("<I", 100_000) + b"\x91" * 100_000,
    ],
)
def test_invalid_frames_are_refused(daemon: Daemon, garbage: bytes, hello: bool) -> None:
    with Raw(daemon.socket, hello=hello) as raw:
        raw.socket.sendall(garbage)
        assert isinstance(raw.refused(), ProtocolError)


def test_random_frames_are_refused(daemon: Daemon) -> None:
    chance = random.Random(3)
    for _ in range(100):
        with Raw(daemon.socket) as raw:
            body = chance.randbytes(chance.randrange(1, 60))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                raw.socket.sendall(struct.pack("<I", len(body)) + body)
                raw.socket.sendall(b"\0" * 4)
            assert isinstance(raw.refused(), ProtocolError)


def test_frames_with_a_wrong_size(daemon: Daemon) -> None:
    whole = protocol.encode(protocol.Status(1))
    with Raw(daemon.socket) as raw:
        raw.socket.sendall(struct.pack("<I", len(whole)) + whole[4:])
        raw.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            raw.receive()
    with Raw(daemon.socket) as raw:
        raw.socket.sendall(struct.pack("<I", len(whole) - 5) + whole[4:] + whole)
        assert isinstance(raw.refused(), ProtocolError)
    with Raw(daemon.socket) as raw:
        raw.socket.sendall(struct.pack("<I", protocol.MAX_FRAME_SIZE) + b"\x91")


def test_frames_byte_by_byte(daemon: Daemon, path: str) -> None:
    with Raw(daemon.socket) as raw:
        dataset = raw.open(path).dataset
        for byte in protocol.encode(get(2, dataset, range(COUNT))):
            raw.socket.sendall(bytes([byte]))
        ready = raw.receive()
        assert isinstance(ready, protocol.Ready)
        assert (ready.tag, ready.count, ready.errors) == (2, COUNT, [])


@pytest.mark.parametrize(
    "what",
    [
        {},
        {"paths": [], "format": None, "verify": True},
        {"paths": "/x", "format": None, "verify": True},
        {"paths": ["relative"], "format": None, "verify": True},
        {"paths": ["/x\0y"], "format": None, "verify": True},
        {"paths": [7], "format": None, "verify": True},
        {"paths": ["/x"], "format": 7, "verify": True},
        {"paths": ["/x"], "format": None, "verify": 1},
        {"paths": ["/x"], "format": None},
    ],
)
def test_an_invalid_open_is_refused(daemon: Daemon, what: dict[str, Any]) -> None:
    with Raw(daemon.socket) as raw:
        raw.send(protocol.Open(1, what, bytes(40)))
        assert isinstance(raw.refused(), ProtocolError)


@pytest.mark.parametrize("size", [0, 39, 80])
def test_an_open_with_another_number_of_identities_is_refused(daemon: Daemon, size: int) -> None:
    with Raw(daemon.socket) as raw:
        what = {"paths": ["/x"], "format": None, "verify": True}
        raw.send(protocol.Open(1, what, bytes(size)))
        assert isinstance(raw.refused(), ProtocolError)


def test_a_failed_open_does_not_end_the_session(daemon: Daemon, path: str) -> None:
    with Raw(daemon.socket) as raw:
        for tag, form in enumerate(["wav", "recordio", "x" * 300]):
            opening = asking(path, tag=tag + 5)
            raw.send(protocol.Open(tag + 5, {**opening.what, "format": form}, opening.identities))
            if isinstance(answer := raw.receive(), protocol.Need):
                raw.pass_files(tag + 5, [path])
                answer = raw.receive()
            assert isinstance(answer, protocol.Fail) and answer.tag == tag + 5
        raw.open(path)


def test_get_for_a_data_set_that_is_not_open(daemon: Daemon, path: str) -> None:
    for message in (get(1, 1, [0]), protocol.Lease(1, 99, protocol.pack_indices(np.arange(3)))):
        with Raw(daemon.socket) as raw:
            raw.send(message)
            assert "not open" in str(raw.refused())
    with Raw(daemon.socket) as raw:
        dataset = raw.open(path).dataset
        raw.send(protocol.Close(dataset), protocol.Close(dataset), get(1, dataset, [0]))
        assert "not open" in str(raw.refused())


@pytest.mark.parametrize("index", [-1, COUNT, 2**62, -(2**63)])
def test_index_out_of_range_fails_the_request_only(daemon: Daemon, path: str, index: int) -> None:
    with Raw(daemon.socket) as raw:
        dataset = raw.open(path).dataset
        raw.send(get(1, dataset, [0, index, 1]), get(2, dataset, [0]))
        failed, ready = raw.receive(), raw.receive()
        assert isinstance(failed, protocol.Fail) and failed.tag == 1
        error = protocol.error_from_wire(failed.error)
        assert isinstance(error, SampleIndexError) and error.index == index
        assert isinstance(ready, protocol.Ready) and ready.count == 1


@pytest.mark.parametrize("packed", [b"1234567", b"\0" * 9, b"\0" * 8 * 65_537])
def test_indices_of_a_wrong_size(daemon: Daemon, path: str, packed: bytes) -> None:
    for lease in (True, False):
        with Raw(daemon.socket) as raw:
            dataset = raw.open(path).dataset
            raw.send(
                protocol.Lease(1, dataset, packed)
                if lease
                else protocol.Get(1, dataset, packed, b"", 0, 0)
            )
            assert "invalid indices" in str(raw.refused())


def test_invalid_and_reused_tags(daemon: Daemon, path: str) -> None:
    everything = range(COUNT)
    for messages in (
        [get(1, 1, everything), get(1, 1, everything)],
        [get(1, 1, [0]), protocol.Lease(1, 1, protocol.pack_indices(np.arange(2)))],
        [get(0, 1, [0])],
        [get(-1, 1, [0])],
        [get(2**32, 1, [0])],
    ):
        with Raw(daemon.socket) as raw:
            assert raw.open(path).dataset == 1
            raw.send(*messages)
            assert "tag" in str(raw.refused())
    with Raw(daemon.socket) as raw:
        dataset = raw.open(path).dataset
        for _ in range(3):
            raw.send(get(7, dataset, [1, 2], acknowledged=[7, 8, 8, 2**32 - 1]))
            assert isinstance(raw.receive(), protocol.Ready)
            raw.send(protocol.Release(protocol.pack_tags([7, 12, 7])))
        raw.send(protocol.Tell(0, 0, 0, b"123"))
        assert "invalid tags" in str(raw.refused())


def test_false_counters(daemon: Daemon, path: str) -> None:
    with Raw(daemon.socket) as raw:
        raw.open(path)
        for _ in range(3):
            raw.send(protocol.Tell(0, 2**64 - 1, 2**64 - 1, b""))
        raw.send(protocol.Status(3))
        assert isinstance(raw.receive(), protocol.Report)
    daemon.status()
    with Raw(daemon.socket) as raw:
        raw.open(path)
        raw.send(protocol.Tell(0, -1, 0, b""))
        assert isinstance(raw.refused(), ProtocolError)


def test_false_counters_for_a_file_larger_than_the_arena(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [bytes(200_000)] * 10)
    with serving(arena="1MiB") as daemon, Raw(daemon.socket) as raw:
        raw.open(path)
        raw.send(protocol.Tell(0, 2**63 - 1, 2**63 - 1, b""), protocol.Status(3))
        assert isinstance(raw.receive(), protocol.Report)
        daemon.status()


@pytest.mark.parametrize("key", ["versions", "payload"])
def test_a_long_text_in_hello_filled_the_log_and_got_no_reply(daemon: Daemon, key: str) -> None:
    before = len(daemon.text())
    with Raw(daemon.socket, hello=False) as raw:
        about = {"versions": [protocol.VERSION], "job": "j", key: "\x01" * 900_000}
        raw.send(protocol.Hello(about))
        assert isinstance(raw.refused(), ProtocolError)
    assert len(daemon.text()) - before < 1000


def test_an_open_with_a_long_format_got_no_reply(daemon: Daemon, path: str) -> None:
    with Raw(daemon.socket) as raw:
        what = {"paths": [path], "format": "\x01" * 5_000_000, "verify": True}
        raw.send(protocol.Open(7, what, bytes(40)))
        assert isinstance(raw.receive(), protocol.Need)
        raw.pass_files(7, [path])
        failed = raw.receive()
        assert isinstance(failed, protocol.Fail) and failed.tag == 7
        assert 1000 < len(failed.error[1]) <= protocol.MOST_TEXT
        raw.open(path)


def test_paths_of_millions_of_folders_blocked_all_openers_for_ever(
    daemon: Daemon, path: str
) -> None:
    """The daemon resolves no path of a client, however long it is."""
    with Raw(daemon.socket) as raw:
        for tag in range(5, 10):
            what = {"paths": ["/x" * 8_388_000], "format": "ffrecord", "verify": True}
            raw.send(protocol.Open(tag, what, bytes(40)))
            assert isinstance(raw.receive(), protocol.Need)
            raw.pass_files(tag, [path])
            assert isinstance(raw.receive(), protocol.Opened)


@pytest.mark.check
def test_a_report_of_thousands_of_jobs_and_data_sets_did_not_fit_into_a_frame() -> None:
    program = """
import numpy as np
from ffserve import protocol
from ffserve.cache.orders import done
from ffserve.config import ServerConfig
from ffserve.server.users.peers import Peer
from ffserve.server.status.report import status
from ffserve.server.sessions.state import ServerState
state = ServerState(ServerConfig(arena_size_bytes=16 << 20))
for k in range(5000):
    job = state.jobs.obtain(f"{k:0200}", 0.0, 0)
    job.sessions, job.paths = 1, "/" + "x" * 4000
    for part in (1, 2):
        state.memory.next_use.join(job.key, np.array([2 * k]), np.array([part]))
frame = protocol.encode(protocol.Report(1, done(status(state, 1.0, Peer(1, 0, 1)))))
[report] = protocol.Decoder(protocol.FROM_SERVER).feed(frame)
assert [len(report.facts[key]) for key in ("jobs", "progress", "groups")] == [1000] * 3
state.close()
"""
    run_python(program)


TWO_SHARDS = """
import asyncio
import numpy as np
from ffserve.cache.orders import done
from ffserve.config import ServerConfig
from ffserve.server.users.peers import Peer
from ffserve.server.status.report import status
from ffserve.server.files.shards import FileIdentity, OpenShard, ShardKey
from ffserve.server.sessions.state import ServerState
state = ServerState(ServerConfig(arena_size_bytes=32 << 20))
owner, catalog = (0, 0), state.files.catalog
source = OpenShard(
    ShardKey(FileIdentity(1, 2, 3, 4, 5), None, True, False, None, 7), "/a.ffr", "ffrecord",
    fd=-1, size=0, count=9, base=0, checksum_kind=0, fingerprint=6, alignment=1, cached_fd=-1,
    payload_size=900, device=1, scanned=None, domain=state.domains.obtain(owner),
)
kept, gone = (catalog.open_prepared([source], [0], key * 32, "p", owner) for key in (b"k", b"g"))
"""
"""The state of a daemon with two shards."""


def test_a_shard_that_was_forgotten_during_a_report_ended_the_daemon() -> None:
    program = """
catalog.close(gone, owner)
steps = status(state, 1.0, Peer(1, 0, 0))
assert next(steps) is None and next(steps) is None  # the shards that there are at the beginning
asyncio.run(catalog.closer.forget(gone))
assert [row["count"] for row in done(steps)["shards"]] == [9]
state.close()
"""
    run_python(TWO_SHARDS + program)


def test_a_file_was_shown_as_slow_because_it_got_the_numbers_of_another() -> None:
    program = """
bases = [kept[0].base, gone[0].base]
state.slow_read(np.array(bases), 1.0, 2.0)
assert list(state.faults.slow_reads) == bases
catalog.close(gone, owner)
asyncio.run(catalog.closer.forget(gone))
assert list(state.faults.slow_reads) == bases[:1]
state.close()
"""
    run_python(TWO_SHARDS + program)


def test_too_many_requests_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [bytes(900_000), bytes(1_300_000)])
    refusal = r"closed a session \(pid \d+\): the session has more than .*"
    with serving(arena="2MiB", expect=[refusal]) as daemon, Raw(daemon.socket) as raw:
        dataset = raw.open(path).dataset
        raw.send(protocol.Lease(1, dataset, protocol.pack_indices(np.array([0]))))
        assert raw.receive() == protocol.Ready(1, 1, [])
        # There is no room for the second sample beside the leased one, so these requests wait.
        raw.send(*(get(2 + k, dataset, [1]) for k in range(protocol.MOST_REQUESTS + 1)))
        assert f"more than {protocol.MOST_REQUESTS} unanswered requests" in str(raw.refused())


@pytest.mark.check
def test_a_client_that_reads_no_replies_waits_for_itself_only(path: str) -> None:
    """Its messages stay in the socket. When it reads, it gets a reply to each of them."""
    count = 30_000
    with serving() as daemon, daemon.open(path) as reader:
        before = daemon.private_size()
        with Raw(daemon.socket) as raw:
            frames = b"".join(protocol.encode(protocol.Status(tag)) for tag in range(count))
            raw.socket.settimeout(0.5)
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent < len(frames):
                    sent += raw.socket.send(frames[sent:])
            assert reader[3].tobytes() == sample(3)
            raw.socket.settimeout(DEADLINE_S)
            for tag in range(500):
                report = raw.receive()
                assert isinstance(report, protocol.Report) and report.tag == tag
            assert daemon.private_size() - before < 64 << 20


def test_hello_has_a_time_limit() -> None:
    patch = "import ffserve.server.sessions.server as s; s.HELLO_TIMEOUT_S = 1.0"
    refusal = r"closed a session \(pid \d+\): the client sent no HELLO message within .* s"
    hello = protocol.encode(
        protocol.Hello({"versions": [protocol.VERSION], "job": "j", "client": "x" * 1000})
    )
    with serving(patch=patch, expect=[refusal]) as daemon:
        with Raw(daemon.socket, hello=False) as silent, Raw(daemon.socket, hello=False) as slow:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for byte in hello[:-1]:
                    slow.socket.sendall(bytes([byte]))
                    time.sleep(0.03)
            for raw in (silent, slow):
                assert "no HELLO message" in str(raw.refused())
        until(lambda: not daemon.status()["jobs"], "the daemon answers")


def test_descriptors_from_a_client_are_not_kept(daemon: Daemon) -> None:
    before = daemon.fd_count()
    for _ in range(20):
        with Raw(daemon.socket) as raw:
            with contextlib.suppress(PermissionError):  # since Linux 6.16
                socket.send_fds(raw.socket, [protocol.encode(protocol.Tell(0, 0, 0, b""))], [0, 0])
            raw.send(protocol.Status(1))
            assert isinstance(raw.receive(), protocol.Report)
    until(lambda: daemon.fd_count() <= before, "no descriptor of the client is kept")


# ---- daemons ----------------------------------------------------------------------------------

ARENA_SIZE = 1 << 20
CAPACITY = 4096
Answer = Callable[[socket.socket, protocol.Message], None]


def memory(size: int, *, sealed: bool = True) -> int:
    """Return a memfd like those that the daemon sends."""
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, 1033, 2 | 4)
    return fd


class Hostile:
    """A daemon whose replies to HELLO, OPEN and GET a test can replace."""

    def __init__(self, directory: Path) -> None:
        self.socket = str(directory / "s")
        self.arena = memory(ARENA_SIZE)
        self.directory = memory(CAPACITY * 16)
        self.index = memory(CAPACITY * 12)
        self.about: dict[str, Any] = {
            "version": protocol.VERSION,
            "server": "hostile",
            "epoch": 1,
            "arena_size": ARENA_SIZE,
            "capacity": CAPACITY,
            "max_get": 65_536,
        }
        self.page = memory(mmap.PAGESIZE)
        os.pwrite(self.page, struct.pack("<Q", 1), 0)
        self.page_fds = [self.page]
        self.fds = [self.arena, self.directory, self.index]
        self.domains = [0]
        self.count = 3
        self.base = 0
        self.fingerprint = 0
        self.on_hello: Answer = self.welcome
        self.on_open: Answer = self.opened
        self.on_get: Answer = lambda sock, message: None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.socket)
        self._listener.listen()
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._socks.append(sock)
                threading.Thread(target=self._talk, args=(sock,), daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        decoder = protocol.Decoder(protocol.FROM_CLIENT)
        with contextlib.suppress(OSError), sock:
            while chunk := sock.recv(65536):
                for message in decoder.feed(chunk):
                    match message:
                        case protocol.Hello():
                            self.on_hello(sock, message)
                        case protocol.Open():
                            self.on_open(sock, message)
                        case protocol.Get() | protocol.Lease():
                            self.on_get(sock, message)

    def welcome(self, sock: socket.socket, message: protocol.Message) -> None:
        """Send WELCOME with `about` and `page_fds`."""
        socket.send_fds(sock, [protocol.encode(protocol.Welcome(self.about))], self.page_fds)

    def opened(self, sock: socket.socket, message: protocol.Message) -> None:
        """Send OPENED with `base`, `count`, `domains` and `fds`."""
        assert isinstance(message, protocol.Open)
        table = np.zeros(1, protocol.SHARD_DTYPE)
        table["base"], table["count"], table["size"] = self.base, self.count, 1000
        table["fingerprint"] = self.fingerprint
        packed = protocol.pack_tags(self.domains)
        answer = protocol.Opened(message.tag, 1, table.tobytes(), ["ffrecord"], packed)
        socket.send_fds(sock, [protocol.encode(answer)], self.fds)

    def entries(self) -> Any:
        """Return the directory, writable."""
        return np.frombuffer(mmap.mmap(self.directory, CAPACITY * 16), ENTRY_DTYPE)

    def close(self) -> None:
        """End it."""
        self._listener.close()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for fd in (self.page, self.arena, self.directory, self.index):
            os.close(fd)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Hostile]:
    daemon = Hostile(tmp_path)
    yield daemon
    daemon.close()


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffserve.client.daemon.handshake.CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setitem(ffserve.client.failover.RECONNECT_S, "require", 0.2)


REFUSED = (ProtocolError, ServerUnavailable, ReadError)
BAD_FRAMES: Sequence[bytes] = [
    b"",
    b"\xff" * 8,
    frame(),
    frame(protocol.Ready.TYPE, 1),
    frame(protocol.Welcome.TYPE, []),
    frame(protocol.Welcome.TYPE, {}),
    frame(protocol.Status.TYPE, 1),
    frame(protocol.Fail.TYPE, 0, []),
    frame(protocol.Fail.TYPE, 0, ["x", 1, 2, 3, 4, 5]),
    frame(protocol.Fail.TYPE, 0, ["unknown code", "no", None, None, None, None]),
    frame(protocol.Fail.TYPE, 0, ["protocol", "go away", None, None, None, None]),
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
]


@pytest.mark.parametrize("sent", BAD_FRAMES)
def test_an_invalid_welcome_is_refused(hostile: Hostile, sent: bytes, path: str) -> None:
    def answer(sock: socket.socket, message: protocol.Message) -> None:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_RDWR)

    hostile.on_hello = answer
    with pytest.raises(FFServeError) as caught:
        ffserve.open(path, server=hostile.socket)
    assert isinstance(caught.value, (*REFUSED, FFServeError))


def test_the_handshake_has_a_time_limit(hostile: Hostile, path: str) -> None:
    def dribble(sock: socket.socket, message: protocol.Message) -> None:
        sock.sendall(struct.pack("<I", 1000))
        for _ in range(1000):
            sock.sendall(b"x")
            time.sleep(0.1)

    for answer in (lambda sock, message: None, dribble):
        hostile.on_hello = answer
        started = time.monotonic()
        with pytest.raises(ServerUnavailable, match="handshake timed out"):
            ffserve.open(path, server=hostile.socket)
        assert time.monotonic() - started < DEADLINE_S


@pytest.mark.parametrize(
    "about",
    [
        {"version": 1},
        {"version": None},
        {"version": protocol.VERSION + 1},
        {"arena_size": 0},
        {"arena_size": -1},
        {"arena_size": "1"},
        {"arena_size": ARENA_SIZE + 1},
        {"arena_size": 2**63},
        {"arena_size": 2**64 - 1},
        {"arena_size": None},
        {"capacity": 0},
        {"capacity": None},
        {"capacity": 2**64 - 1},
    ],
)
def test_a_welcome_with_false_numbers_is_refused(
    hostile: Hostile, about: dict[str, Any], path: str
) -> None:
    hostile.about.update(about)
    with pytest.raises(REFUSED):
        ffserve.open(path, server=hostile.socket)


def test_wrong_descriptors_are_refused(hostile: Hostile, path: str) -> None:
    page, right = list(hostile.page_fds), list(hostile.fds)
    reading, writing = os.pipe()
    unsealed, small = memory(ARENA_SIZE, sealed=False), memory(4096)
    wrong: list[tuple[list[int], list[int], list[int]]] = [
        ([], right, [0]),
        ([reading], right, [0]),
        ([unsealed], right, [0]),
        ([small], right, [0]),  # the page of another epoch
        ([*page, *page], right, [0]),
        (page, right[:2], [0]),
        (page, [], [0]),
        (page, right, [0, 1]),
        (page, right * 2, [0, 0]),
        (page, right, [1]),
        (page, right, []),
        (page, [reading] * 3, [0]),
        (page, [unsealed, *right[1:]], [0]),
        (page, [small, *right[1:]], [0]),
    ]
    before = len(os.listdir("/proc/self/fd"))
    for hostile.page_fds, hostile.fds, hostile.domains in wrong:
        with pytest.raises(REFUSED):
            ffserve.open(path, server=hostile.socket)
    for fd in (reading, writing, unsealed, small):
        os.close(fd)
    gc.collect()
    # The sockets of `Hostile` are in this process as well, at most one per connection.
    assert len(os.listdir("/proc/self/fd")) <= before - 4 + len(wrong)


@pytest.mark.parametrize(
    ("base", "count"),
    [(0, CAPACITY + 1), (CAPACITY, 1), (2**63, 1), (0, 2**63), (2**64 - 1, 2), (1, 2**64 - 1)],
)
def test_shards_outside_the_tables_are_refused(
    hostile: Hostile, path: str, base: int, count: int
) -> None:
    hostile.base, hostile.count = base, count
    with pytest.raises(REFUSED):
        ffserve.open(path, server=hostile.socket)


@pytest.mark.parametrize(
    "answer",
    [
        protocol.Opened(1, 1, b"", []),
        protocol.Opened(1, 1, b"x" * 40, []),
        protocol.Opened(1, 1, b"", ["ffrecord"]),
        protocol.Opened(1, 1, b"\0" * 80, ["a", "b"]),
        protocol.Opened(1, 1, b"\0" * 40, [1]),  # type: ignore[list-item]
        protocol.Ready(1, 1, []),
        protocol.Welcome({}),
        protocol.Fail(1, []),
        protocol.Fail(1, ["path", 1, 2, 3, 4, 5]),
        protocol.Fail(0, ["protocol", "bad", None, None, None, None]),
    ],
)
def test_an_invalid_reply_to_open_is_refused(
    hostile: Hostile, path: str, answer: protocol.Message
) -> None:
    def reply(sock: socket.socket, message: protocol.Message) -> None:
        sock.sendall(protocol.encode(answer))
        if isinstance(answer, protocol.Welcome):
            sock.shutdown(socket.SHUT_RDWR)

    hostile.on_open = reply
    with pytest.raises(REFUSED):
        ffserve.open(path, server=hostile.socket)


@pytest.mark.parametrize("lease", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        lambda tag: protocol.Ready(tag, 4, []),
        lambda tag: protocol.Ready(tag, -1, []),
        lambda tag: protocol.Ready(tag, 2**63, []),
        lambda tag: protocol.Ready(tag, 3, [1]),
        lambda tag: protocol.Ready(tag, 3, [[0]]),
        lambda tag: protocol.Ready(tag, 3, [[3, "read", "m", None, None, None, None]]),
        lambda tag: protocol.Ready(tag, 3, [[-1, "read", "m", None, None, None, None]]),
        lambda tag: protocol.Ready(tag, 1, [[2, "read", "m", None, None, None, None]]),
        lambda tag: protocol.Ready(tag, 3, [["0", "read", "m", None, None, None, None]]),
        lambda tag: protocol.Report(tag, {}),
        lambda tag: protocol.Fail(tag, ["protocol", "no", None, None, None, None]),
        lambda tag: protocol.Fail(0, ["protocol", "no", None, None, None, None]),
        lambda tag: protocol.Fail(tag, [None]),
        lambda tag: None,
    ],
)
def test_an_invalid_reply_to_get_or_lease_is_refused(
    hostile: Hostile, path: str, answer: Callable[[int], protocol.Message | None], lease: bool
) -> None:
    hostile.entries()["length_low"] = 10

    def reply(sock: socket.socket, message: protocol.Message) -> None:
        assert isinstance(message, (protocol.Get, protocol.Lease))
        sent = answer(message.tag)
        if sent is None:
            sock.shutdown(socket.SHUT_RDWR)
        else:
            sock.sendall(protocol.encode(sent))

    hostile.on_get = reply
    with ffserve.open(path, server=hostile.socket) as reader:
        if answer(1) is None:
            hostile.on_hello = lambda sock, message: sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(REFUSED):
            if lease:
                with reader.lease(range(3)):
                    pass
            else:
                reader.read(range(3))


def test_samples_that_are_ready_but_never_readable(
    hostile: Hostile, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile.entries()["length_low"] = 10

    def reply(sock: socket.socket, message: protocol.Message) -> None:
        assert isinstance(message, (protocol.Get, protocol.Lease))
        sock.sendall(protocol.encode(protocol.Ready(message.tag, len(message.indices) // 8, [])))

    hostile.on_get = reply
    monkeypatch.setattr("ffserve.client.daemon.shared_memory._MOST_EMPTY_ROUNDS", 30)
    with ffserve.open(path, server=hostile.socket) as reader:
        with pytest.raises(ReadError, match="too busy"):
            reader.read(range(3))
        with pytest.raises(ReadError, match="too busy"), reader.lease(range(3)):
            pass
    # A reader that need not have the daemon reads them without it.
    with ffserve.open(path, server="off") as reader:
        hostile.fingerprint = reader.shards[0].fingerprint
    monkeypatch.setenv("FFSERVE_SOCKET", hostile.socket)
    with ffserve.open(path) as reader:
        assert [each.tobytes() for each in reader.read(range(3))] == [sample(i) for i in range(3)]
        assert reader.source.startswith("daemon ") and "too busy" in str(reader.stats()["unserved"])


@pytest.mark.parametrize(
    ("seq", "length", "place"),
    [
        (3, 10, ARENA_SIZE - 9),
        (3, 10, ARENA_SIZE),
        (3, 10, 2**48 - 1),
        (3, ARENA_SIZE + 1, 0),
        (3, 2**32 - 1, ARENA_SIZE - 1),
        (3, 16, 2**48 - 8),
    ],
)
def test_directory_that_points_outside_the_arena_is_refused(
    hostile: Hostile, path: str, seq: int, length: int, place: int
) -> None:
    entries = hostile.entries()
    entries["length_low"] = 10
    entries["seq"] = seq
    entries[1] = (seq, length, place)
    with ffserve.open(path, server=hostile.socket) as reader:
        assert reader[0].tobytes() == b"\0" * 10
        with pytest.raises(REFUSED):
            reader.read_batch(range(3))
        with pytest.raises(REFUSED):
            reader.read([1])
        hostile.on_get = lambda sock, message: sock.sendall(
            protocol.encode(protocol.Ready(message.tag, 3, []))  # type: ignore[union-attr]
        )
        with pytest.raises(REFUSED), reader.lease(range(3)):
            pass


def test_auto_reads_without_a_daemon_that_breaks_the_protocol(hostile: Hostile, path: str) -> None:
    hostile.about["arena_size"] = 2**63
    program = (
        "import os, sys, ffserve, logging; os.environ['FFSERVE_SOCKET'] = sys.argv[2]\n"
        "logging.basicConfig(format='%(message)s')\n"
        "print(ffserve.open(sys.argv[1])[0].tobytes(), ffserve.open(sys.argv[1]).source)"
    )
    done = run_python(program, path, hostile.socket)
    assert done.stdout.startswith(f"{sample(0)!r} engine ")
    assert done.stderr.count("reads the files without the daemon") == 1


@pytest.mark.check
def test_surplus_descriptors_of_a_welcome_are_closed(hostile: Hostile, path: str) -> None:
    def flood(sock: socket.socket, message: protocol.Message) -> None:
        whole = protocol.encode(protocol.Welcome(hostile.about))
        for start in range(0, len(whole), 10):
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", hostile.page_fds))
            sock.sendmsg([whole[start : start + 10]], [rights])
            time.sleep(0.01)

    hostile.on_hello = flood
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(REFUSED):
        ffserve.open(path, server=hostile.socket)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
