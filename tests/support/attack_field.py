"""A daemon under attack, and the promise: what an honest client of another user beside it gets.

    python tests/support/attack_field.py [KIND ...]

As root: print the table of SECURITY.md for these kinds of `attacks.py` (all by default). KIND may
be `computing` as well: a process that has no connection and takes a processor. With --beside the
attacks go to another daemon, so only processors and disk are shared.

A test attacks in the body of `Field.attacked`, or has a kind run by `Field.run`:

    with field.attacked("what is done"):
        ...
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attacks
import numpy as np
from attack_programs import RESOLVER, SECRET
from daemon import DEADLINE_S, Daemon, ready, started, until

import ffserve

HONEST, HOSTILE = 65_432, 65_433
COUNTS = {
    "gets": 20,
    "leases": 20,
    "status": 3,
    "connections": 4200,
    "connects": 4,
    "halves": 40,
    "drops": 10,
    "strings": 2,
    "opens": 4,
    "tags": 4,
    "orders": 4,
    "seens": 4,
    "datasets": 2,
    "claims": 8,
    "small": 10,
    "namespaces": 40,
    "bombs": 16,
    "distrust": 4,
    "names": 4,
    "sparse_index": 4,
    "tables": 4,
    "scans": 4,
    "index_cache": 2,
    "open_files": 1,
    "origins": 2,
    "hanging": 1,
    "tiny": 2,
    "rebinding": 2,
}
"""Connections of each attack, or processes."""
EXPECT = (
    r"closed a session \(pid \d+\): .*",
    r"remote files: store /.*, .* of .*",
    r"store: the origin does not answer, so it is asked less often: .*",
)
CACHED_COUNT = 7000
"""Index files in the daemon's cache before anything begins."""
IDLE_S, ATTACKED_S = 2.0, 5.0
"""How long an honest client is measured before an attack and during it."""


@dataclass(frozen=True)
class Promise:
    """What no attack may exceed.

    Args:
        factor, floor_s: of batches in a hundred, 99 take at most `factor` times what they take
            without the attack, or `floor_s`: the attackers use the same processors.
        worst_s: the slowest batch; on a machine that is busy otherwise, `factor` times the slowest
            without the attack. begun_s: the same of the slowest greeting, or opening of a file that
            was never open.
        grown_size: bytes by which the daemon's own memory has grown since it began.
    """

    factor: float = 5
    floor_s: float = 0.05
    worst_s: float = 0.5
    begun_s: float = 2.0
    grown_size: int = 200 * 10**6


NOTHING = Promise(1e9, DEADLINE_S, DEADLINE_S, DEADLINE_S, 1 << 60)
"""To measure only."""


@dataclass(frozen=True)
class Cost:
    """What an attack cost: the 99th percentiles of an honest client's batches without it and during
    it, its slowest batch, its slowest greeting or opening, and by how much the daemon's memory had
    grown."""

    attack: str
    idle_s: float
    attacked_s: float
    worst_s: float
    begun_s: float
    grown_size: int

    def __str__(self) -> str:
        """Return a row of the table in SECURITY.md."""
        seconds = self.idle_s, self.attacked_s, self.worst_s, self.begun_s
        times = (f"{1e3 * each:.1f}" for each in seconds)
        return f"| {' | '.join((self.attack, *times, str(round(self.grown_size / 1e6))))} |"

    def check(self, promise: Promise, idle_worst_s: float, idle_begun_s: float) -> None:
        """Fail if this is more than was promised. Args: the slowest calls without the attack."""
        most = max(promise.factor * self.idle_s, promise.floor_s)
        assert self.attacked_s <= most, f"{self}: more than {promise.factor} times"
        most = max(promise.factor * idle_worst_s, promise.worst_s)
        assert self.worst_s <= most, f"{self}: a batch took too long"
        most = max(promise.factor * idle_begun_s, promise.begun_s)
        assert self.begun_s <= most, f"{self}: a greeting or opening took too long"
        assert self.grown_size <= promise.grown_size, f"{self}: the daemon's memory has grown"


HEADER = (
    "| attack | p99 without it, ms | p99, ms | slowest, ms | slowest start, ms | memory, MB |",
    "|---|---|---|---|---|---|",
)
costs: list[Cost] = []
"""What was measured in this process, in order."""
BEGIN, END = "<!-- make attack: begin -->\n", "<!-- make attack: end -->"


def table() -> str:
    """Return what was measured as a table."""
    return "".join(f"{row}\n" for row in (*HEADER, *costs))


def write_table(page: Path) -> None:
    """Put the table in the place of the one in a document."""
    above, begin, rest = page.read_text().partition(BEGIN)
    _, end, below = rest.partition(END)
    assert begin and end, f"{page} has no place for the table"
    page.write_text(f"{above}{begin}\n{table()}\n{end}{below}")


class Honest:
    """A process of a user that reads batches, opens files and greets, until it is closed.

    Args: source: path or URL of what `attacks.write_samples` has written. folder: of this user.
    """

    def __init__(self, socket: str, source: str, folder: Path, uid: int = HONEST) -> None:
        self._times, self._errors = folder / "times", folder / "errors"
        with self._times.open("wb") as times, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command(uid, "honest", socket, source, folder),
                stdin=subprocess.DEVNULL,
                stdout=times,
                stderr=errors,
            )
        self._read = 0
        self._rows: list[tuple[str, float, float]] = []

    def _update(self) -> None:
        """Read what it has written meanwhile: kind, begin and seconds of each call."""
        assert self._process.poll() is None, f"honest client: {self._errors.read_text()}"
        with self._times.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        for line in text.decode().splitlines():
            kind, begin, seconds = line.split()
            self._rows.append((kind, float(begin), float(seconds)))

    def seconds(self, begin: float, end: float) -> dict[str, np.ndarray]:
        """Return how long the calls of each kind took that were under way between two times.

        Raises: AssertionError: the client had an error, or a call does not end.
        """

        def passed() -> bool:
            self._update()
            return bool(self._rows) and sum(self._rows[-1][1:]) >= end

        until(passed, "the honest client's call has ended")
        found: dict[str, list[float]] = {"batch": []}
        for kind, begun, seconds in reversed(self._rows):
            if begun + seconds < begin:
                break
            if begun <= end:
                found.setdefault(kind, []).append(seconds)
        return {kind: np.array(each) for kind, each in found.items()}

    def idle(self, seconds: float) -> dict[str, np.ndarray]:
        """Let it go on for a while; return the same of that."""
        until(lambda: self._update() or len(self._rows) > 100, "the honest client reads")
        begin = time.monotonic()
        time.sleep(seconds)
        return self.seconds(begin, time.monotonic())

    def close(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def command(uid: int, *arguments: object) -> list[str]:
    """Return the command that runs `attacks.py` as a user."""
    return [*python_of(uid), str(Path(attacks.__file__)), *map(str, arguments)]


def python_of(uid: int) -> list[str]:
    """Return the command that runs Python as a user."""
    user = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
    return [*user, sys.executable]


class Field:
    """A daemon that everybody may connect to, files that everybody may read, and an honest client,
    which reads `source`; `folder` is the attacker's."""

    def __init__(self, daemon: Daemon, samples: int = attacks.SAMPLES) -> None:
        self.daemon = daemon
        self.source = str(daemon.directory / "honest.ffr")
        self.folder = self.folder_of(HOSTILE)
        self.hostile = str(self.folder / "attack.ffr")
        self._stack = contextlib.ExitStack()
        attacks.write_samples(self.source, count=samples)
        shutil.copy(self.source, self.hostile)
        os.chown(self.hostile, HOSTILE, HOSTILE)
        self.honest = self.client(self.source)
        self.honest.idle(0)
        self._base = daemon.private_size()

    def folder_of(self, uid: int) -> Path:
        """Make a directory of a user."""
        folder = Path(tempfile.mkdtemp(dir=self.daemon.directory))
        os.chown(folder, uid, uid)
        folder.chmod(0o755)
        return folder

    def client(self, source: str, uid: int = HONEST) -> Honest:
        """Start another honest client."""
        made = Honest(self.daemon.socket, source, self.folder_of(uid), uid)
        self._stack.callback(made.close)
        return made

    def close(self) -> None:
        """End the honest clients."""
        self._stack.close()

    @contextlib.contextmanager
    def attacking(self, kind: str, count: int = 0) -> Iterator[subprocess.Popen[str]]:
        """The process of a kind of `attacks.py`, which has begun."""
        count = count or COUNTS[kind]
        with ready(command(HOSTILE, kind, self.daemon.socket, self.hostile, count)) as process:
            yield process

    def run(self, kind: str, seconds: float = ATTACKED_S, promise: Promise = Promise()) -> None:
        """Let a kind of `attacks.py` attack for a while, and check the promise."""
        idle_s = min(seconds, IDLE_S)
        with self.attacked(title(kind), None, promise, idle_s), self.attacking(kind) as process:
            time.sleep(seconds)
            assert process.poll() is None, "the attack has ended by itself"

    @contextlib.contextmanager
    def attacked(
        self,
        attack: str,
        honest: Honest | None = None,
        promise: Promise = Promise(),
        idle_s: float = IDLE_S,
    ) -> Iterator[None]:
        """Check the promise, and that the daemon lives, while the body attacks.

        Args: attack: as the table says it. idle_s: for so long the client is measured before.
        """
        honest = honest or self.honest
        idle = honest.idle(idle_s)
        with self._watched() as sizes:
            begin = time.monotonic()
            yield
            took = honest.seconds(begin, time.monotonic())
        assert self.daemon.status()["pid"] == self.daemon.pid, "root is served"
        (idle_p99, *slowest), (p99, worst, begun) = map(slow_calls, (idle, took))
        cost = Cost(attack, idle_p99, p99, worst, begun, max(sizes) - self._base)
        costs.append(cost)
        cost.check(promise, *slowest)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[int]]:
        """Look at the daemon's own memory every few milliseconds."""
        sizes, over = [self.daemon.private_size()], threading.Event()

        def watch() -> None:
            while not over.wait(0.01):
                sizes.append(self.daemon.private_size())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield sizes
        finally:
            over.set()
            thread.join()


def slow_calls(took: dict[str, np.ndarray]) -> tuple[float, float, float]:
    """Return the 99th percentile of batches, and the slowest batch, greeting or opening."""
    others = (float(each.max()) for kind, each in took.items() if kind != "batch")
    batches = took["batch"]
    return float(np.quantile(batches, 0.99)), float(batches.max()), max(others, default=0.0)


def title(kind: str) -> str:
    """Return what a kind of `attacks.py` does, in a few words."""
    text = attacks.KINDS[kind].__doc__ or kind
    return " ".join(text.partition(".\n")[0].split()).rstrip(".")


@contextlib.contextmanager
def field(shards: int = 0, samples: int = attacks.SAMPLES, **options: Any) -> Iterator[Field]:
    """Args: shards: files that `status` opens. samples: that the honest client reads, twice as many
    as the arena holds. options: of `Daemon`."""
    settings = ["--socket-mode", "0666", *options.pop("options", ())]
    expect = [*EXPECT, *options.pop("expect", ())]
    options = {"arena": "32MiB", "patch": RESOLVER, **options}
    made = Daemon(**{**options, "options": settings, "expect": expect})
    made.environment = environment_of(made.directory / "home")
    made.command += ["--store-directory", str(made.directory / "store"), "--store-size", "256MiB"]
    with started(made) as daemon, contextlib.closing(Field(daemon, samples)) as found:
        many = found.folder / "many"
        many.mkdir()
        with ffserve.create(many / "0.ffr", n=1) as writer:
            writer.write(b"x")
        for number in range(1, shards):
            shutil.copy(many / "0.ffr", many / f"{number}.ffr")
        yield found


def environment_of(home: Path) -> dict[str, str]:
    """Make the home of a daemon's user who has credentials for everything, and an index cache."""
    cache = home / ".cache" / "ffserve" / "index"
    cache.mkdir(parents=True, mode=0o700)
    for number in range(CACHED_COUNT):
        (cache / f"{number:032x}.ffx").write_bytes(b"x" * 100)
    (home / ".netrc").write_text(f"default login own password {SECRET}\n")
    (home / ".netrc").chmod(0o600)
    names = ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_SAS_TOKEN")
    environment = {**os.environ, **dict.fromkeys(names, SECRET), "HOME": str(home)}
    for name in ("XDG_CACHE_HOME", "CACHE_DIRECTORY", "NETRC"):
        environment.pop(name, None)
    return environment


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """A process that takes a processor."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=ATTACKED_S)
    parser.add_argument("--shards", type=int, default=300)
    parser.add_argument("--arena", default="32MiB")
    parser.add_argument("--samples", type=int, default=attacks.SAMPLES)
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    given = parser.parse_args()
    print(*HEADER, sep="\n", flush=True)
    with contextlib.ExitStack() as stack:
        sizes: dict[str, Any] = {"samples": given.samples, "arena": given.arena}
        made = stack.enter_context(field(given.shards, **sizes))
        other = stack.enter_context(field(given.shards, **sizes)) if given.beside else made
        for kind in given.kinds or ["computing", *attacks.KINDS]:
            attack = computing() if kind == "computing" else other.attacking(kind)
            with made.attacked(kind, promise=NOTHING), attack:
                time.sleep(given.seconds)
            print(costs[-1], flush=True)


if __name__ == "__main__":
    main()
