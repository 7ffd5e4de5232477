"""Lets contestants take turns and keeps the median of each row.

In every turn of a group the yardstick and all contestants run one after the other, in the opposite
order every other turn, so that a machine that becomes slower or faster meanwhile does so for all of
them. A row's value is computed within each turn; what is shown is the median of the turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ffserve
from ffserve.bench import yardsticks
from ffserve.bench.contestant import cpu_s, memory
from ffserve.bench.records import MIB, Data
from ffserve.cli import own
from ffserve.errors import FFServeError

RATIO = "×"
COLD_ARENA_SIZE = 512 * MIB
PATIENCE_S = 240.0
"""A contestant that is silent for this long has failed."""
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


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
    """

    def __init__(self, folder: str, seconds: float, engine: str = "auto") -> None:
        self.folder = os.path.realpath(folder)
        self.seconds = seconds
        self.engine = engine
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
            with own.daemon(
                socket, data.roots, arena, ["--engine", self.engine, *options]
            ) as daemon:
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
            with ffserve.open(data.paths, server=daemon.socket) as reader:
                for _ in reader.batches(range(data.count)):
                    pass
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
        command = [*own.python("ffserve.bench.contestant"), json.dumps(case)]
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
