"""Lets contestants take turns and keeps the median of each row.

In every turn of a group the yardstick and all contestants run one after the other, in the opposite
order every other turn, so that a machine that becomes slower or faster meanwhile does so for all of
them. A row's value is computed within each turn; what is shown is the median of the turns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ffserve.bench import yardsticks
from ffserve.bench.contestant import cpu_s, memory
from ffserve.bench.records import MIB, Data
from ffserve.cli import own
from ffserve.errors import FFServeError, ServerUnavailable, UsageError

RATIO = "×"
YARDSTICKS = ("ffserve.bench.yardsticks", "ffserve.bench.peers")
"""Modules of contestants that run no code of ffserve's."""
COLD_ARENA_SIZE = 512 * MIB
PATIENCE_S = 240.0
"""A contestant that is silent for this long has failed."""
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclass(frozen=True)
class Checkout:
    """Another ffserve to be measured beside this one: a checkout with the C core built in it.

    Its daemons are its own. Its contestants are this tree's modules, put in the place of the
    checkout's `ffserve.bench`, so that both trees are measured by the same code; such modules use
    public names of ffserve only.
    """

    directory: str
    """Its `.venv/bin/python` is used where there is one."""

    def __post_init__(self) -> None:
        if not os.path.isfile(os.path.join(self.directory, "ffserve", "__init__.py")):
            raise UsageError("no checkout of ffserve in this directory", path=self.directory)

    @property
    def python(self) -> str:
        """The interpreter that runs the checkout's code."""
        own_python = os.path.join(self.directory, ".venv", "bin", "python")
        return own_python if os.path.exists(own_python) else sys.executable

    def program(self) -> list[str]:
        """Return the command that runs the checkout's `ffserve`."""
        return self._command({}, "ffserve")

    def contestant(self, module: str, of: str) -> list[str]:
        """Return the command that runs a module of the harness over the checkout's ffserve.

        Args: of: the module of the contestant that it will import.
        """
        packages = {"ffserve.bench": os.path.dirname(__file__)}
        if not of.startswith("ffserve."):
            name = of.partition(".")[0]
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            packages[name] = os.path.dirname(spec.origin)
        return self._command(packages, module)

    def _command(self, packages: dict[str, str], module: str) -> list[str]:
        directory = os.path.realpath(self.directory)
        program = _IN_CHECKOUT.format(directory=directory, packages=packages, module=module)
        return [self.python, "-c", program]

    def status(self, socket: str) -> dict[str, Any]:
        """Ask a daemon for its status with the checkout's own command."""
        command = [*self.program(), "status", "--json", "--socket", socket]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise ServerUnavailable(done.stderr.strip() or "no answer", path=socket)
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts


_IN_CHECKOUT = """
import importlib.util, os, runpy, sys
sys.path.insert(0, {directory!r})
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
import ffserve
if os.path.dirname(os.path.dirname(ffserve.__file__)) != {directory!r}:
    raise SystemExit("ffserve was imported from " + ffserve.__file__ + ", not from {directory}")
for name, place in {packages!r}.items():
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(place, "__init__.py"), submodule_search_locations=[place])
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


def _runs_ffserve(who: str) -> bool:
    return not who.startswith(YARDSTICKS)


class ContestantFailed(FFServeError):
    """A contestant ended without figures; the text is what it said last."""


@dataclass(frozen=True)
class Result:
    """What the clients of one contestant did in one run, and what the daemon did meanwhile."""

    clients: tuple[dict[str, Any], ...]
    daemon: Mapping[str, float] = field(default_factory=dict)
    """cpu_s, wall_s, pss (bytes), blocks_read."""

    def total(self, name: str) -> float:
        """Return the sum of a figure over the clients."""
        return float(sum(client.get(name, 0) for client in self.clients))

    @property
    def rates(self) -> list[float]:
        """Bytes a second of each client."""
        return [client["size"] / client["seconds"] for client in self.clients]

    @property
    def rate(self) -> float:
        """Bytes a second of all clients."""
        return sum(self.rates)

    @property
    def cpu_us(self) -> float:
        """CPU microseconds a sample, the daemon's included."""
        used = self.total("cpu") + self.daemon.get("cpu_s", 0.0)
        return used / max(1.0, self.total("samples")) * 1e6

    def batch_s(self, percent: float) -> float:
        """Return a percentile of the batches' times."""
        return float(np.percentile(np.concatenate([c["took"] for c in self.clients]), percent))


@dataclass(frozen=True)
class Row:
    """One figure: its name, what it says, how it is computed from a contestant's result and the
    yardstick's, and the limit that it shall reach, if there is one."""

    name: str
    what: str
    value: Callable[[Result, Result | None], float]
    unit: str = RATIO
    limit: float | None = None
    at_most: bool = False


@dataclass(frozen=True)
class Entrant:
    """One contestant and the rows that it fills. An ``optional`` one may fail: it is left out.
    Its ``labels`` take the place of the group's."""

    who: str
    run: Callable[[], Result]
    rows: tuple[Row, ...]
    optional: bool = False
    labels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Contestants that take turns with one yardstick."""

    title: str
    against: str
    """The yardstick, in words; empty when there is none."""
    yardstick: Callable[[], Result] | None
    entrants: tuple[Entrant, ...]
    before: Callable[[], None] = lambda: None
    """Makes the data."""
    judged: bool = True
    """False when the yardstick is a stand-in for one that is not installed."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Goes into each row's figures: state, bytes, clients, batch."""

    def only(self, words: tuple[str, ...]) -> Group | None:
        """Return the group with those entrants of which a row's name has one of the words."""
        if not words:
            return self
        kept = tuple(
            entrant
            for entrant in self.entrants
            if any(word in row.name for row in entrant.rows for word in words)
        )
        return self.with_entrants(kept) if kept else None

    def with_entrants(self, entrants: tuple[Entrant, ...]) -> Group:
        """Return the group with other contestants."""
        return Group(
            self.title, self.against, self.yardstick, entrants,
            self.before, self.judged, self.labels,
        )  # fmt: skip


def ratio(result: Result, base: Result | None) -> float:
    """Throughput as a share of the yardstick's."""
    assert base is not None
    return result.rate / base.rate


def measure(
    group: Group, turns: int, note: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """Let a group take its turns.

    Args:
        note: is told who was left out, and why.
    Returns: one dict a row: name, what, who, against, value (the median), low, high, unit, limit,
        at_most, reached (None where nothing is judged), turns, and the figures behind it.
    Raises:  ContestantFailed when one fails that is not optional.
    """
    group.before()
    entrants = {entrant.who: entrant for entrant in group.entrants}
    results: dict[str, list[Result]] = {who: [] for who in entrants}
    bases: list[Result] = []
    for turn in range(turns):
        steps: list[str | None] = [None, *entrants]
        for who in steps if turn % 2 == 0 else reversed(steps):
            if who is None:
                if group.yardstick is not None:
                    bases.append(group.yardstick())
                continue
            try:
                results[who].append(entrants[who].run())
            except FFServeError as error:
                if not entrants[who].optional:
                    raise
                note(f"{who} is left out: {error}")
                del results[who], entrants[who]
    rows = []
    for who, entrant in entrants.items():
        figures = _figures(results[who], bases)
        for row in entrant.rows:
            values = [
                row.value(result, bases[turn] if bases else None)
                for turn, result in enumerate(results[who])
            ]
            labels = {**group.labels, **entrant.labels}
            rows.append({**_summary(row, values, group), "who": who, **labels, **figures})
    return rows


def measure_both(
    group: Group, other: Group, turns: int, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Let the contestants of two trees take turns with one yardstick.

    In a turn each contestant of ``group`` runs next to its namesake in ``other``, in the opposite
    order every other turn.

    Args:
        other: the same group over another tree.
        note: is told which contestants failed in either tree, and why.
    Returns: one dict a row: name, unit, at_most, value (this tree, the median), other (the other
        tree's), quotient (the median of this tree's value divided by the other's within a turn),
        low, high (of the quotient), turns.
    """
    group.before()
    pairs = {one.who: (one, two) for one, two in zip(group.entrants, other.entrants, strict=True)}
    found: dict[str, list[tuple[float, float]]] = {}
    for turn in range(turns):
        base = group.yardstick() if group.yardstick is not None else None
        step = 1 if turn % 2 == 0 else -1
        for who in list(pairs)[::step]:
            both = pairs[who]
            try:
                here, there = [one.run() for one in both[::step]][::step]
            except FFServeError as error:
                note(f"{who} is left out: {error}")
                del pairs[who]
                continue
            for one, two in zip(both[0].rows, both[1].rows, strict=True):
                found.setdefault(one.name, []).append(
                    (one.value(here, base), two.value(there, base))
                )
    return [_compared(row, found[row.name]) for one, _ in pairs.values() for row in one.rows]


def _compared(row: Row, values: list[tuple[float, float]]) -> dict[str, Any]:
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
    if row.limit is not None and group.judged:
        reached = value <= row.limit if row.at_most else value >= row.limit
    return {
        "name": row.name,
        "what": row.what,
        "against": group.against,
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
    """Return what stands behind the rows of one contestant, medians and peaks of the turns."""
    found: dict[str, Any] = {}
    if results and "size" in results[0].clients[0]:
        found["mb_s"] = statistics.median(r.rate for r in results) / 1e6
        found["cpu_us"] = statistics.median(r.cpu_us for r in results)
        if "own" in results[0].clients[0]:
            found["own_mb"] = max(r.total("own") for r in results) / 1e6
            found["pss_mb"] = max(r.total("pss") for r in results) / 1e6
        if results[0].daemon:
            found["daemon_pss_mb"] = max(r.daemon["pss"] for r in results) / 1e6
    if bases:
        found["yardstick_mb_s"] = statistics.median(b.rate for b in bases) / 1e6
        found["yardstick_cpu_us"] = statistics.median(b.cpu_us for b in bases)
    return found


class Bench:
    """Where a benchmark runs: its folder, its daemons, its contestants.

    Args:
        folder: for data and what peers make of them; on the disk to be measured.
        seconds: of each run.
        engine: of the daemons, see `ffserve serve`.
        checkout: the ffserve that daemons and contestants run; None: this process's.
    """

    def __init__(
        self, folder: str, seconds: float, engine: str = "auto", checkout: Checkout | None = None
    ) -> None:
        self.folder = os.path.realpath(folder)
        self.seconds = seconds
        self.engine = engine
        self.checkout = checkout
        self._hot: tuple[Data, bool, own.Daemon] | None = None
        self._keep = contextlib.ExitStack()

    def close(self) -> None:
        """End what still runs."""
        self._hot = None
        self._keep.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- daemons --------------------------------------------------------------------------

    @contextlib.contextmanager
    def daemon(self, data: Data, arena: int, options: Sequence[str] = ()) -> Iterator[own.Daemon]:
        """A fresh daemon for the data, with the memory of its arena all there."""
        with tempfile.TemporaryDirectory(prefix="ffserve-bench-") as place:
            socket = os.path.join(place, "s")
            program, ask = None, None
            if self.checkout is not None:
                program, ask = self.checkout.program(), self.checkout.status
            with own.daemon(
                socket, data.roots, arena, ["--engine", self.engine, *options],
                program=program, ask=ask,
            ) as daemon:  # fmt: skip
                while (now := daemon.status()["arena"])["populated"] < now["size"]:
                    time.sleep(0.02)
                yield daemon

    def cold_daemon(self, data: Data) -> contextlib.AbstractContextManager[own.Daemon]:
        """A fresh daemon whose arena holds at most half of the data."""
        return self.daemon(data, max(64 * MIB, min(COLD_ARENA_SIZE, data.size // 2)))

    def hot_daemon(self, data: Data, *, inline: bool = False) -> own.Daemon:
        """A daemon that has all of the data in its arena; kept until another is asked for.

        Args: inline: it sends samples through the socket.
        """
        if self._hot is None or self._hot[:2] != (data, inline):
            self.close()
            options = ("--payload", "inline") if inline else ()
            daemon = self._keep.enter_context(self.daemon(data, 64 * MIB + 2 * data.size, options))
            self.run("ffserve.bench.ours:fill", data, daemon=daemon)
            self._hot = data, inline, daemon
        return self._hot[2]

    # ---- contestants ----------------------------------------------------------------------

    def run(
        self,
        who: str,
        data: Data | None = None,
        *,
        clients: int = 1,
        daemon: own.Daemon | None = None,
        **case: Any,
    ) -> Result:
        """Run a contestant.

        Args:
            who: "module:function", see `ffserve.bench.contestant`.
            data: what it reads; its paths, count and step go into the case.
            clients: how many processes do the same at once, each in an order of its own.
            daemon: the one that it reads through, whose work is counted.
            case: more for the function.
        Raises: ContestantFailed.
        """
        case = {
            "batch": 64, "seed": 1, "once": False, "warm": 2, "seconds": self.seconds,
            "server": daemon.socket if daemon else "off", **case, "who": who, "clients": clients,
        }  # fmt: skip
        if data is not None:
            case = {"paths": data.paths, "count": data.count, "step": data.mean, **case}
        if case["once"]:  # a small data set must last for some batches
            case["batch"] = min(case["batch"], max(1, case["count"] // 4))
            case["warm"] = min(case["warm"], case["count"] // case["batch"] - 1)
        module = "ffserve.bench.contestant"
        if self.checkout is not None and _runs_ffserve(who):
            command = self.checkout.contestant(module, who.partition(":")[0])
        else:
            command = own.python(module)
        command = [*command, json.dumps(case)]
        environment = {**ENVIRONMENT, "FFSERVE_SOCKET": str(case["server"])}
        with (
            tempfile.TemporaryFile() as errors,
            own.running(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                environment=environment,
            ) as process,
        ):  # fmt: skip
            assert process.stdin is not None and process.stdout is not None
            counting = _Counting(daemon)
            lines: list[bytes] = []
            if _readable(process) and process.stdout.readline() == b"ready\n":
                counting.begin()
                process.stdin.write(b"go\n")
                process.stdin.flush()
                if _readable(process):
                    lines = process.stdout.readlines()
                counting.end()
            if len(lines) != clients or process.wait() != 0:
                errors.seek(0)
                words = errors.read().decode(errors="replace").strip().splitlines()
                raise ContestantFailed(words[-1] if words else f"{who} said nothing")
        return Result(tuple(map(json.loads, lines)), counting.found)

    def fio(self, data: Data, depth: int, pattern: yardsticks.Pattern) -> Result:
        """Run the disk's yardstick, or its stand-in where fio is not installed."""
        if yardsticks.has_fio():
            figures = yardsticks.fio(data, depth, self.seconds, pattern)
            return Result((figures,))
        who = "ffserve.bench.yardsticks:raw_reads"
        return self.run(who, data, batch=yardsticks.RAW_THREADS)


def _readable(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], PATIENCE_S)[0])


class _Counting:
    """What a daemon does between two moments."""

    def __init__(self, daemon: own.Daemon | None) -> None:
        self._daemon = daemon
        self.found: dict[str, float] = {}

    def begin(self) -> None:
        """Begin, its answer about itself not counted."""
        if self._daemon is not None:
            self._blocks = self._daemon.status()["cache"]["blocks_read"]
            self._cpu_s = cpu_s(self._daemon.process.pid)
            self._begun = time.perf_counter()

    def end(self) -> None:
        """End, likewise."""
        if self._daemon is not None:
            pid = self._daemon.process.pid
            used, wall = cpu_s(pid) - self._cpu_s, time.perf_counter() - self._begun
            self.found = {
                "cpu_s": used,
                "wall_s": wall,
                "pss": memory(pid)["pss"],
                "blocks_read": self._daemon.status()["cache"]["blocks_read"] - self._blocks,
            }
