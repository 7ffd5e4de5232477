"""The harness: data sets, daemons and contestants in turns, and the rows computed from them.

In every turn of a group the yardstick and all contestants run one after the other, in the opposite
order every other turn, so that a machine that becomes slower or faster does so for all of them. The
value of a row is computed within each turn; the result is the median of the turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import math
import mmap
import os
import select
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import ffserve
from benchmarks.harness.contestants import cpu_s, memory
from benchmarks.harness.installation import THIS, Installation
from ffserve.bench import ceilings, child_processes
from ffserve.bench.child_processes import Daemon
from ffserve.bench.samples import MIB, PIECE_SIZE, BenchmarkData, evict
from ffserve.engine.io import open_direct
from ffserve.errors import FFServeError, UsageError

RATIO = "×"
COLD_ARENA_SIZE = 512 * MIB
TIMEOUT_S = 240.0
"""A contestant whose warm-up or run takes longer has failed."""
_libc = ctypes.CDLL(None)
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


# --------------------------------------------------------------------------- data


def extent(data: BenchmarkData) -> tuple[int, int]:
    """Return the bytes that direct I/O has to read for a sample (the median of the first file),
    and the device's logical block, at whose multiples such reads begin and end."""
    fd, block = open_direct(data.paths[0])
    os.close(fd)
    with ffserve.open(data.paths, server="off") as reader:
        offsets, lengths, _ = reader.tables(0)
    begins = offsets.astype(np.int64)
    ends = begins + lengths.astype(np.int64)
    sizes = -(-ends // block) - begins // block
    return int(np.median(sizes)) * block, block


def files_below(path: str) -> list[str]:
    """Return the file itself, or the files below a directory."""
    if os.path.isfile(path):
        return [path]
    return [os.path.join(top, name) for top, _, names in os.walk(path) for name in names]


def _read_directly(path: str) -> None:
    """Read a file past the page cache."""
    buffer = mmap.mmap(-1, PIECE_SIZE)
    fd, _ = open_direct(path)
    try:
        for place in range(0, os.path.getsize(path), PIECE_SIZE):
            os.preadv(fd, [buffer], place)
    finally:
        os.close(fd)


@contextlib.contextmanager
def held_in_memory(paths: Sequence[str]) -> Iterator[None]:
    """Keep files in the page cache.

    They are locked there: the kernel may take a page back at any time, for instance because a
    memory cgroup is reclaimed, and one page in a hundred that is read from the disk halves a rate.
    Without the right to lock as much (RLIMIT_MEMLOCK) they are only read once.
    """
    kept = []
    for path in filter(os.path.getsize, paths):
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        pages = np.frombuffer(content, np.uint8)
        if _libc.mlock(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(len(pages))):
            pages[:: mmap.PAGESIZE].max()
        kept.append(pages)  # unmapped, and so unlocked, with its last reference
    yield


# --------------------------------------------------------------------------- groups and rows


@dataclass(frozen=True)
class Result:
    """The figures of one run: of each client, and of the daemon meanwhile."""

    clients: tuple[dict[str, Any], ...]
    daemon: Mapping[str, float] = field(default_factory=dict)
    """cpu_s, wall_s, pss (bytes), blocks_read."""

    def total(self, name: str) -> float:
        """Return the sum of a figure over the clients."""
        return float(sum(client.get(name, 0) for client in self.clients))

    @property
    def rates(self) -> list[float]:
        """Bytes per second of each client."""
        return [client["size"] / client["seconds"] for client in self.clients]

    @property
    def rate(self) -> float:
        """Bytes per second of all clients."""
        return sum(self.rates)

    @property
    def cpu_us(self) -> float:
        """CPU microseconds per sample, the daemon's included."""
        used = self.total("cpu") + self.daemon.get("cpu_s", 0.0)
        return used / max(1.0, self.total("samples")) * 1e6

    def batch_s(self, percent: float) -> float:
        """Return a percentile of the batches' times."""
        return float(np.percentile(np.concatenate([c["batch_s"] for c in self.clients]), percent))


@dataclass(frozen=True)
class Row:
    """One figure of the benchmark.

    Args:
        value: computes it from the result of the contestant and that of the yardstick.
        limit: the project's own goal, if there is one.
        at_most: less is better.
    """

    name: str
    description: str
    value: Callable[[Result, Result | None], float]
    unit: str = RATIO
    limit: float | None = None
    at_most: bool = False


@dataclass(frozen=True)
class Contestant:
    """One way to read, and the rows computed from it.

    Args:
        optional: it may fail, and is then left out.
        labels: take precedence over the group's.
    """

    name: str
    run: Callable[[], Result]
    rows: tuple[Row, ...]
    optional: bool = False
    labels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Yardstick:
    """The way to read that the contestants of a group are compared with; its rate is 1.00.

    Args: substitute: it stands in for one that is not installed, so limits are not judged.
    """

    name: str
    run: Callable[[], Result]
    substitute: bool = False


@dataclass(frozen=True)
class Group:
    """Contestants that take turns with one yardstick.

    Args:
        prepare: makes the data.
        labels: recorded with each row: state, bytes, clients, batch.
    """

    title: str
    yardstick: Yardstick | None
    contestants: tuple[Contestant, ...]
    prepare: Callable[[], None] = lambda: None
    labels: Mapping[str, Any] = field(default_factory=dict)

    def only(self, texts: Sequence[str]) -> Group | None:
        """Return the group with the contestants of rows whose name contains one of the texts."""
        if not texts:
            return self
        return self._with(lambda name: any(text in name for text in texts))

    def without(self, names: Container[str]) -> Group | None:
        """Return the group with the contestants that have other rows than those of the names."""
        return self._with(lambda name: name not in names)

    def _with(self, wanted: Callable[[str], bool]) -> Group | None:
        kept = tuple(
            contestant
            for contestant in self.contestants
            if any(wanted(row.name) for row in contestant.rows)
        )
        return replace(self, contestants=kept) if kept else None

    def row_names(self) -> list[str]:
        """Return the names of the group's rows."""
        return [row.name for contestant in self.contestants for row in contestant.rows]


def chosen(groups: Sequence[Group], texts: Sequence[str], command: str) -> list[Group]:
    """Return the groups with the contestants of rows whose name contains one of the texts.

    Args:   texts: none for all rows. command: prints the names of the rows, for the hint.
    Raises: UsageError if there is no such row.
    """
    found = [kept for group in groups if (kept := group.only(texts)) is not None]
    if not found:
        raise UsageError(
            f"no row's name contains {' or '.join(map(repr, texts))}",
            hint=f"'{command}' prints the names",
        )
    return found


def ratio(result: Result, base: Result | None) -> float:
    """Return the throughput divided by the yardstick's."""
    assert base is not None
    return result.rate / base.rate


def measure(
    group: Group, turns: int, left_out: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run all turns of a group.

    Args:
        left_out: takes the reason for each row whose contestant failed, by the row's name.
    Returns: a dict per row: name, description, contestant, yardstick, value (the median), low,
        high, unit, limit, at_most, reached (None where nothing is judged), turns, and figures.
    Raises:  ContestantFailed when one fails that is not optional.
    """
    group.prepare()
    running = {contestant.name: contestant for contestant in group.contestants}
    results: dict[str, list[Result]] = {name: [] for name in running}
    bases: list[Result] = []
    for turn in range(turns):
        steps: list[str | None] = [None, *running]
        for name in steps if turn % 2 == 0 else reversed(steps):
            if name is None:
                if group.yardstick is not None:
                    bases.append(group.yardstick.run())
                continue
            try:
                results[name].append(running[name].run())
            except FFServeError as error:
                if not running[name].optional:
                    raise
                if left_out is not None:
                    left_out |= {row.name: str(error) for row in running[name].rows}
                del results[name], running[name]
    rows = []
    for name, contestant in running.items():
        figures = _figures(results[name], bases)
        for row in contestant.rows:
            values = [
                row.value(result, bases[turn] if bases else None)
                for turn, result in enumerate(results[name])
            ]
            labels = {**group.labels, **contestant.labels}
            rows.append({**_summary(row, values, group), "contestant": name, **labels, **figures})
    return rows


def measure_both(
    group: Group, other: Group, turns: int, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run all turns of the same group over two installations with one yardstick.

    In a turn each contestant of ``group`` runs next to its namesake in ``other``, in the opposite
    order every other turn.

    Args: note: takes a line about each contestant that fails in either.
    Returns: a dict per row: name, unit, at_most, value (of ``group``, the median), other (of
        ``other``), quotient (the median of value / other within a turn), low, high (of the
        quotient), turns.
    """
    group.prepare()
    pairs = {
        one.name: (one, two) for one, two in zip(group.contestants, other.contestants, strict=True)
    }
    found: dict[str, list[tuple[float, float]]] = {}
    for turn in range(turns):
        base = group.yardstick.run() if group.yardstick is not None else None
        step = 1 if turn % 2 == 0 else -1
        for name in list(pairs)[::step]:
            both = pairs[name]
            try:
                here, there = [one.run() for one in both[::step]][::step]
            except FFServeError as error:
                note(f"{name} is left out: {error}")
                del pairs[name]
                continue
            for row in both[0].rows:
                values = row.value(here, base), row.value(there, base)
                found.setdefault(row.name, []).append(values)
    return [_quotient(row, found[row.name]) for one, _ in pairs.values() for row in one.rows]


def _quotient(row: Row, values: list[tuple[float, float]]) -> dict[str, Any]:
    quotients = [here / there if there else math.nan for here, there in values]
    return {
        "name": row.name,
        "unit": row.unit,
        "at_most": row.at_most,
        "value": statistics.median(here for here, _ in values),
        "other": statistics.median(there for _, there in values),
        "quotient": statistics.median(quotients),
        "low": min(quotients),
        "high": max(quotients),
        "turns": len(values),
    }


def _summary(row: Row, values: list[float], group: Group) -> dict[str, Any]:
    value = statistics.median(values)
    reached = None
    judged = group.yardstick is None or not group.yardstick.substitute
    if row.limit is not None and judged:
        reached = value <= row.limit if row.at_most else value >= row.limit
    return {
        "name": row.name,
        "description": row.description,
        "yardstick": group.yardstick.name if group.yardstick is not None else "",
        "value": value,
        "low": min(values),
        "high": max(values),
        "unit": row.unit,
        "limit": row.limit,
        "at_most": row.at_most,
        "reached": reached,
        "turns": len(values),
    }


def _figures(results: list[Result], bases: list[Result]) -> dict[str, Any]:
    """Return throughput, CPU time and memory behind a contestant's rows: medians and peaks."""
    found: dict[str, Any] = {}
    if results and "size" in results[0].clients[0]:
        found["mb_s"] = statistics.median(r.rate for r in results) / 1e6
        found["cpu_us"] = statistics.median(r.cpu_us for r in results)
        if "anonymous" in results[0].clients[0]:
            found["anonymous_mb"] = max(r.total("anonymous") for r in results) / 1e6
            found["pss_mb"] = max(r.total("pss") for r in results) / 1e6
        if all("pss" in r.daemon for r in results):
            found["daemon_pss_mb"] = max(r.daemon["pss"] for r in results) / 1e6
    if bases and "size" in bases[0].clients[0]:
        found["yardstick_mb_s"] = statistics.median(b.rate for b in bases) / 1e6
        found["yardstick_cpu_us"] = statistics.median(b.cpu_us for b in bases)
    return found


# --------------------------------------------------------------------------- running them


class ContestantFailed(FFServeError):
    """A contestant ended without figures; the text is the last line that it wrote."""


class ContestantHung(ContestantFailed):
    """A contestant did not end."""


class RunningContestant:
    """A contestant whose clients have warmed up and wait for the start."""

    def __init__(
        self,
        function: str,
        process: subprocess.Popen[bytes],
        pids: list[int],
        errors: Any,
        daemon: Daemon | None,
        timeout_s: float,
    ) -> None:
        self.pids = pids
        """The process id of each client."""
        self._function = function
        self._process = process
        self._errors = errors
        self._daemon = daemon
        self._timeout_s = timeout_s

    def begin(self) -> None:
        """Start the clients."""
        if self._daemon is not None:
            self._blocks = self._blocks_read()
            self._cpu_s = cpu_s(self._daemon.process.pid)
            self._begun = time.perf_counter()
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def finish(self) -> Result:
        """Wait for the clients and return their figures.

        Raises: ContestantFailed.
        """
        try:
            lines = self._process.communicate(timeout=self._timeout_s)[0].splitlines()
        except subprocess.TimeoutExpired:
            raise _hung(self._function, self._timeout_s) from None
        counted: dict[str, float] = {}
        if self._daemon is not None:  # its status must not be in its figures
            pid = self._daemon.process.pid
            used, wall = cpu_s(pid) - self._cpu_s, time.perf_counter() - self._begun
            counted = {"cpu_s": used, "wall_s": wall, "pss": memory(pid)["pss"]}
            counted["blocks_read"] = self._blocks_read() - self._blocks
        if len(lines) != len(self.pids) or self._process.wait() != 0:
            raise _failure(self._function, self._errors)
        return Result(tuple(map(json.loads, lines)), counted)

    def _blocks_read(self) -> int:
        assert self._daemon is not None
        return int(self._daemon.status()["cache"]["blocks_read"])


@contextlib.contextmanager
def contestant(
    case: dict[str, Any],
    *,
    daemon: Daemon | None = None,
    installation: Installation = THIS,
    before_exec: Callable[[], None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[RunningContestant]:
    """Start a contestant; when the context begins, its clients have warmed up.

    Args:
        case: see `benchmarks.harness.contestants`; "function", "clients", "warm" and
            "seconds" at least.
        daemon: the daemon whose work is counted.
        before_exec: called in the child process.
        timeout_s: for the warm-up, and for the run.
    Raises: ContestantFailed when a client ends before it is ready; ContestantHung.
    """
    package = case["function"].partition(".")[0]
    packages = {
        "ffserve.bench": os.path.dirname(ceilings.__file__),
        "benchmarks": os.path.dirname(os.path.dirname(__file__)),
    }
    if package not in ("benchmarks", "ffserve") and installation.directory is not None:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        packages[package] = os.path.dirname(spec.origin)
    command = [*installation.command("benchmarks.harness.contestants", packages), json.dumps(case)]
    environment = {**ENVIRONMENT, "FFSERVE_SOCKET": str(case.get("server", "off"))}
    with (
        tempfile.TemporaryFile() as errors,
        child_processes.running(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            environment=environment, before_exec=before_exec,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            raise _hung(case["function"], timeout_s)
        words = process.stdout.readline().split()
        if words[:1] != [b"ready"]:
            raise _failure(case["function"], errors)
        yield RunningContestant(
            case["function"], process, list(map(int, words[1:])), errors, daemon, timeout_s
        )


def _hung(function: str, timeout_s: float) -> ContestantHung:
    return ContestantHung(f"{function} did not end within {timeout_s:.0f} s")


def _failure(function: str, errors: Any) -> ContestantFailed:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return ContestantFailed(lines[-1] if lines else f"{function} ended without figures")


def cold_memory(data: BenchmarkData) -> int:
    """Return the bytes of data that a contestant may have in memory when it reads from disk."""
    return max(64 * MIB, min(COLD_ARENA_SIZE, data.size // 2))


class Bench:
    """A place to run benchmarks: its directory, its daemons, its contestants.

    Args:
        folder: for data and the peers' files; on the disk to be measured.
        seconds: of each run.
        engine: of the daemons, see `ffserve serve`.
        installation: the ffserve that daemons and contestants run.
        warm_disk: what `from_disk` is to read from the disk's own cache.
    """

    def __init__(
        self,
        folder: str,
        seconds: float,
        engine: str = "auto",
        installation: Installation = THIS,
        *,
        warm_disk: bool = False,
    ) -> None:
        self.folder = os.path.realpath(folder)
        self.seconds = seconds
        self.engine = engine
        self.installation = installation
        self.warm_disk = warm_disk
        self.hung: dict[str, str] = {}
        """Peers that did not end, and what was said: they do not run again."""
        self._hot: tuple[BenchmarkData, Daemon] | None = None
        self._kept = contextlib.ExitStack()

    def close(self) -> None:
        """Stop the daemon that is kept."""
        self._hot = None
        self._kept.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextlib.contextmanager
    def daemon(
        self, data: BenchmarkData, arena: int, options: Sequence[str] = ()
    ) -> Iterator[Daemon]:
        """Run a new daemon for the data, with its whole arena populated."""
        options = ["--engine", self.engine, *options]
        with child_processes.daemon(
            data.roots, arena, options,
            program=self.installation.command("ffserve"), ask=self.installation.status,
        ) as daemon:  # fmt: skip
            daemon.await_arena()
            yield daemon

    def from_disk(self, paths: Sequence[str]) -> None:
        """Remove files from the page cache, so that they are read from the disk.

        With `warm_disk` they are read once past the page cache, too. Then the host of a virtual
        disk has them in its memory for every contestant, not only for those that run later.
        """
        if self.warm_disk:
            for path in paths:
                _read_directly(path)
        evict(paths)

    def cold_daemon(self, data: BenchmarkData) -> contextlib.AbstractContextManager[Daemon]:
        """Run a new daemon whose arena is `cold_memory`."""
        return self.daemon(data, cold_memory(data))

    def hot_daemon(self, data: BenchmarkData) -> Daemon:
        """Return a daemon that has all of the data in its arena; kept until another is wanted."""
        if self._hot is None or self._hot[0] != data:
            self.close()
            daemon = self._kept.enter_context(self.daemon(data, 64 * MIB + 2 * data.size))
            self.run("benchmarks.harness.contestants:fill", data, daemon=daemon)
            self._hot = data, daemon
        return self._hot[1]

    def start(
        self,
        function: str,
        data: BenchmarkData | None = None,
        *,
        daemon: Daemon | None = None,
        installation: Installation | None = None,
        before_exec: Callable[[], None] | None = None,
        timeout_s: float = TIMEOUT_S,
        **case: Any,
    ) -> contextlib.AbstractContextManager[RunningContestant]:
        """Start a contestant.

        Args:
            function: "module:function", see `benchmarks.harness.contestants`.
            data: what it reads.
            daemon: the daemon that it reads through, whose work is counted.
            installation: what runs it, instead of this bench's.
            before_exec: called in the child process.
            timeout_s: for its warm-up, and for its run.
            case: more for the function, such as ``clients``: the processes that do the same at
                once, each in an order of its own.
        """
        case = {
            "batch": 64, "seed": 1, "once": False, "warm": 2, "seconds": self.seconds, "clients": 1,
            "server": daemon.socket if daemon else "off", **case, "function": function,
        }  # fmt: skip
        if data is not None:
            about = {"paths": data.paths, "count": data.count, "sample_size": data.mean}
            case = {**about, **case}
        if case["once"]:  # a small data set must last for some batches
            case["batch"] = min(case["batch"], max(1, case["count"] // 4))
            case["warm"] = min(case["warm"], case["count"] // case["batch"] - 1)
        return contestant(
            case, daemon=daemon, installation=installation or self.installation,
            before_exec=before_exec, timeout_s=timeout_s,
        )  # fmt: skip

    def run(self, function: str, data: BenchmarkData | None = None, **options: Any) -> Result:
        """Run a contestant from its start to its end; see `start`.

        Raises: ContestantFailed.
        """
        with self.start(function, data, **options) as running:
            running.begin()
            return running.finish()

    def fio(self, data: BenchmarkData, depth: int, pattern: ceilings.Pattern) -> Result:
        """Run fio, or its stand-in where it is not installed."""
        if ceilings.has_fio():
            figures = ceilings.fio(
                data.paths, data.mean, depth, self.seconds, pattern, lambda: extent(data)
            )
            return Result((figures,))
        function = "ffserve.bench.ceilings:raw_reads"
        return self.run(function, data, batch=ceilings.RAW_THREADS)
