"""A real daemon for the tests: a process of its own, its log watched, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import preloaded

import ffserve
from ffserve import formats, protocol
from ffserve.client.daemon import connection
from ffserve.reader import open_files

DEADLINE_S = 60.0
"""For whatever must happen some time; a loaded machine is slow."""
EXPECTED = (
    r"serving .* on .*, arena .*, engine \w+, version .*; limits: .* of locked memory",
    r"stopping: \d+ clients",
    # A client gets these errors too.
    r"damaged sample: .*",
    r"cannot read a sample: .*",
    r"no memory for a sample: .*",
    r"cannot open files for user \d+: .*",
    r"refused a client of user \d+: .*",
    # Other programs use the same disk and the same memory.
    r"slow disk: .*",
    r"waiting for memory to be free: .*",
)
"""What a daemon's log may hold in any test."""


def until(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """Wait for a condition; return its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"this did not come about: {what}"
        time.sleep(0.01)
    return value


class Daemon:
    """`python -m ffserve serve` on a socket of its own.

    Args:
        arena, roots, options: of the command line.
        expect: patterns of the log lines that this test provokes; any other fails it.
        patch: statements run in the process before the daemon begins, to set its constants.
    """

    def __init__(
        self,
        *,
        arena: str = "64MiB",
        roots: Sequence[str | Path] = ("/",),
        options: Sequence[str] = (),
        expect: Sequence[str] = (),
        patch: str = "",
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ffs-"))
        self.directory.chmod(0o755)
        self.socket = str(self.directory / "s")
        self.expect = [*EXPECTED, *expect]
        program = ["-m", "ffserve"]
        if patch:
            program = ["-c", f"{patch}\nfrom ffserve.cli import main\nraise SystemExit(main())"]
        self.command = [
            sys.executable,
            "-W",
            "error",
            *program,
            "serve",
            *("--socket", self.socket, "--arena", arena),
            *(argument for root in roots for argument in ("--root", str(root))),
            *options,
        ]
        self.environment: dict[str, str] | None = None
        self.log = self.directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> Daemon:
        """Start it, or start it again on the same socket, and wait until it answers."""
        assert self.process is None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
            )
        if wait:
            until(self._answers, "the daemon answers")
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.text()
        with socket.socket(socket.AF_UNIX) as attempt:
            if attempt.connect_ex(self.socket):
                return False
            # It listens before it is ready. Once it has closed this connection it serves others.
            attempt.settimeout(DEADLINE_S)
            attempt.shutdown(socket.SHUT_WR)
            return attempt.recv(1) == b""

    @property
    def pid(self) -> int:
        """Of the running daemon."""
        assert self.process is not None
        return self.process.pid

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal; return its exit code, negative for a signal."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        self.process = None
        return code

    def text(self) -> str:
        """Its log so far."""
        return self.log.read_text()

    def status(self) -> dict[str, Any]:
        """What `ffserve status` shows."""
        return connection.status(self.socket)

    def cache(self) -> dict[str, int]:
        """The cache's counters."""
        return dict(self.status()["cache"])

    def fd_count(self) -> int:
        """Descriptors that it holds."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def socket_count(self, *, local: bool = False) -> int:
        """Sockets that it holds; local: only those of clients, with none to origins."""
        links = set()
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                links.add(os.readlink(f"/proc/{self.pid}/fd/{fd}"))
        if local:
            rows = Path(f"/proc/{self.pid}/net/unix").read_text().splitlines()[1:]
            links &= {f"socket:[{row.split()[6]}]" for row in rows if row.endswith(self.socket)}
        return sum(link.startswith("socket:") for link in links)

    def private_size(self) -> int:
        """Bytes of memory that it does not share."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    def open(self, paths: Any, **options: Any) -> ffserve.Reader:
        """Open files through this daemon and no other way."""
        return ffserve.open(paths, server=self.socket, **options)

    def check_log(self) -> None:
        """Fail on any line that was not expected."""
        for line in self.text().splitlines():
            text = re.sub(r" \(\d+ more in \d+ s\)$", "", line.removeprefix("ffserve: "))
            assert any(re.fullmatch(known, text) for known in self.expect), self.text()

    def close(self) -> None:
        """Kill it if it still runs, and remove its directory."""
        if self.process is not None:
            self.end(signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[Daemon]:
    """A running daemon; at the end it must still live, stop when told to, and have a clean log."""
    with started(Daemon(**options)) as daemon:
        yield daemon


AnyDaemon = TypeVar("AnyDaemon", bound=Daemon)


@contextlib.contextmanager
def started(daemon: AnyDaemon) -> Iterator[AnyDaemon]:
    """The same of a daemon that was not started yet."""
    try:
        daemon.start()
        yield daemon
        if daemon.process is not None:
            assert daemon.process.poll() is None, daemon.text()
            assert daemon.end() == 0, daemon.text()
        daemon.check_log()
    finally:
        daemon.close()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP a process for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def sample(
    index: int, sizes: Sequence[int] = (0, 1, 511, 512, 513, 5000, 70_000), seed: int = 0
) -> bytes:
    """The bytes of a test file's sample: every one different, of very different sizes."""
    size = sizes[index % len(sizes)]
    return np.random.default_rng([seed, index]).bytes(size)


def write(path: str | Path, samples: Sequence[bytes]) -> str:
    """Write a record file; its suffix tells the format, FFRecord where it tells none."""
    known = formats.by_suffix(path)
    with ffserve.create(path, format=known.name if known else "ffrecord") as writer:
        for each in samples:
            writer.write(each)
    return str(path)


def damage(path: str | Path, index: int) -> None:
    """Turn a bit in a sample's last byte, without a trace in the file's times."""
    with open_files([str(path)], None, server="off", verify=False, whole=True) as reader:
        offsets, lengths, _ = reader.tables(0)
    times = os.stat(path)
    with open(path, "r+b") as file:
        place = int(offsets[index] + lengths[index]) - 1
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def run_python(
    program: str,
    *arguments: Any,
    code: int | None = 0,
    timeout: float = 100,
    imports: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, which has imported ffserve and can import this module.

    Args: code: what it exits with; None: anything. imports: modules that it has imported as well.
    """
    done = preloaded.start().run(program, [*map(str, arguments)], imports, timeout)
    if code is not None:
        assert done.returncode == code, (done.stdout, done.stderr)
    return done


class Raw:
    """A client that speaks the protocol by hand.

    Args: keep: whether received descriptors stay open, in `fds`.
    """

    def __init__(self, path: str, *, hello: bool = True, keep: bool = False, **about: Any) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(path)
        self._decoder = protocol.Decoder(protocol.FROM_SERVER)
        self._messages: list[protocol.Message] = []
        self._keep = keep
        self.fds: list[int] = []
        if hello:
            self.hello(**about)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()
        while self.fds:
            os.close(self.fds.pop())

    def hello(self, **about: Any) -> protocol.Message:
        """Greet; return the answer."""
        default = {
            "versions": [protocol.VERSION],
            "client": "test",
            "job": "raw",
            "pid": 1,
            "locks": True,
        }
        self.send(protocol.Hello({**default, **about}))
        return self.receive()

    def send(self, *messages: protocol.Message) -> None:
        """Send whole messages."""
        self.socket.sendall(b"".join(map(protocol.encode, messages)))

    def receive(self, *, alive: bool = False) -> protocol.Message:
        """Return the next message; EOFError when the daemon hung up.

        Args: alive: return signs of life as well.
        """
        while not self._messages:
            chunk, fds, _, _ = socket.recv_fds(self.socket, 65536, 16)
            self.fds += fds
            while self.fds and not self._keep:
                os.close(self.fds.pop())
            if not chunk:
                raise EOFError
            fed = self._decoder.feed(chunk)
            self._messages = [m for m in fed if alive or not isinstance(m, protocol.Alive)]
        return self._messages.pop(0)

    def open(self, *paths: str, verify: bool = True, tag: int = 1) -> protocol.Opened:
        """Open a data set, with descriptors where the daemon needs them."""
        self.send(asking(*paths, verify=verify, tag=tag))
        answer = self.receive()
        while isinstance(answer, protocol.Need):
            positions = protocol.unpack_positions(answer.positions, len(paths))
            self.pass_files(tag, [paths[position] for position in positions])
            answer = self.receive()
        assert isinstance(answer, protocol.Opened), answer
        return answer

    def pass_files(
        self, tag: int, files: Sequence[str | int], *, kinds: bytes | None = None
    ) -> None:
        """Answer a NEED.

        Args: files: paths, which are opened, or descriptors. kinds: None: all are record files.
        """
        fds = [os.open(f, os.O_RDONLY) if isinstance(f, str) else f for f in files]
        message = protocol.Files(tag, bytes(len(fds)) if kinds is None else kinds)
        socket.send_fds(self.socket, [protocol.encode(message)], fds)
        for file, fd in zip(files, fds, strict=True):
            if isinstance(file, str):
                os.close(fd)

    def refused(self) -> ffserve.FFServeError:
        """Return why the daemon ends the session, having seen it end."""
        answer = self.receive()
        while not isinstance(answer, protocol.Fail):
            answer = self.receive()
        assert answer.tag == 0
        late: protocol.Message = answer
        try:
            # The I/O thread may have been about to send a READY.
            while isinstance(late, (protocol.Fail, protocol.Ready)):
                late = self.receive()
        except (EOFError, ConnectionError):
            return protocol.error_from_wire(answer.error)
        raise AssertionError(f"the daemon goes on with {late}")


def search_memory(path: str, file: str, wanted: Sequence[str]) -> None:
    """Search all memory that a client of a file can get for some bytes, after it has read the first
    200 samples. Print the number of descriptors, and which bytes were found.

    Args: wanted: in hexadecimal digits.
    """
    sought, found = [bytes.fromhex(digits) for digits in wanted], set()
    with Raw(path, keep=True) as raw:
        opened = raw.open(file)
        count = min(int(np.frombuffer(opened.shards, protocol.SHARD_DTYPE)["count"][0]), 200)
        raw.send(get(2, opened.dataset, range(count)))
        answer = raw.receive()
        assert isinstance(answer, protocol.Ready) and answer.count == count
        for fd in raw.fds:
            at = 0
            while True:
                # Only what has pages: the files are sparse and very large.
                try:
                    start = os.lseek(fd, at, os.SEEK_DATA)
                    at = os.lseek(fd, start, os.SEEK_HOLE)
                except OSError:
                    break
                content = os.pread(fd, at - start, start)
                found.update(k for k, one in enumerate(sought) if one in content)
        print(len(raw.fds), *sorted(found))


def pack_identities(states: Sequence[os.stat_result]) -> bytes:
    """Return the states of files as OPEN has them."""
    rows = [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in states]
    return np.array(rows, protocol.IDENTITY_DTYPE).tobytes()


def asking(
    *paths: str, verify: bool = True, tag: int = 1, states: Sequence[os.stat_result] = ()
) -> protocol.Open:
    """An OPEN as a client sends it; `states`: of the files, if not those that they have."""
    identities = pack_identities(states or [os.stat(path) for path in paths])
    what = {"paths": list(paths), "format": None, "verify": verify}
    return protocol.Open(tag, what, identities)


def get(
    tag: int, dataset: int, indices: Sequence[int], acknowledged: Sequence[int] = ()
) -> protocol.Get:
    """A GET as a client sends it."""
    packed = protocol.pack_indices(np.array(indices, np.int64))
    return protocol.Get(tag, dataset, packed, protocol.pack_tags(list(acknowledged)), 0, 0)


@contextlib.contextmanager
def ready(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that says "ready" and is killed at the end. Args: options: of `Popen`."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stdin):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def client(program: str, *arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own that says "ready" and is killed at the end."""
    with ready([sys.executable, "-c", program, *map(str, arguments)]) as process:
        yield process


PROXY = """
import socket, sys, threading
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[2]); listener.listen()
def copy(source, target):
    while piece := source.recv(65536):
        target.sendall(piece)
    target.shutdown(socket.SHUT_WR)
print("ready", flush=True)
while True:
    client, _ = listener.accept()
    daemon = socket.socket(socket.AF_UNIX); daemon.connect(sys.argv[1])
    for pair in ((client, daemon), (daemon, client)):
        threading.Thread(target=copy, args=pair, daemon=True).start()
"""


@contextlib.contextmanager
def proxy(daemon: str, place: Path) -> Iterator[str]:
    """A process that passes bytes on, as socat does."""
    command = [sys.executable, "-c", PROXY, daemon, str(place)]
    with ready(command, stderr=subprocess.DEVNULL):
        yield str(place)


def everything_is_given_back(daemon: Daemon) -> None:
    """Fill the whole arena anew: that works only when nothing is pinned."""
    path = write(daemon.directory / "large.ffr", [sample(1, [0, 900_000])])
    with daemon.open(path) as reader:
        assert len(reader[0]) == 900_000
    os.unlink(path)
