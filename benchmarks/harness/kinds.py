"""The kinds of groups that rows are made of: hot, cold, from first to last; and the peers in them.

A row is named ``state/size/…/contestant``. Limits are the project's own goals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import cgroup
from benchmarks.harness.measuring import (
    Bench,
    Contestant,
    ContestantFailed,
    ContestantHung,
    Group,
    Result,
    Row,
    Yardstick,
    cold_memory,
    files_below,
    held_in_memory,
    ratio,
)
from benchmarks.harness.peers import PEERS, Peer
from ffserve.bench import ceilings
from ffserve.bench.ceilings import Pattern
from ffserve.bench.samples import BenchmarkData
from ffserve.errors import FFServeError

FFSERVE = "ffserve"
DEPTH = 128
"""Reads in flight of a daemon by default."""
STREAM_DEPTH = 16
"""Reads in flight of fio when it reads in order."""
_PATTERN_NAMES = {
    "blocks": "", "stream": "", "extents": ", extents", "batches": ", extents, a batch at a time",
}  # fmt: skip


def memcpy(bench: Bench, data: BenchmarkData, batch: int = 64, clients: int = 1) -> Yardstick:
    """Return the yardstick of memory, with as many processes as there are clients."""
    function = "ffserve.bench.ceilings:memcpy"
    return Yardstick(
        "memcpy", lambda: bench.run(function, data, batch=batch, clients=clients, warm=8)
    )


def disk(bench: Bench, data: BenchmarkData, depth: int, pattern: Pattern) -> Yardstick:
    """Return the yardstick of the disk."""

    def run() -> Result:
        bench.from_disk(data.paths)
        return bench.fio(data, depth, pattern)

    name = "fio in order" if pattern == "stream" else f"fio at depth {depth}"
    name += _PATTERN_NAMES[pattern]
    if not ceilings.has_fio():
        name = f"{ceilings.RAW_THREADS} Python threads of preadv (no fio)"
    return Yardstick(name, run, substitute=not ceilings.has_fio())


def hot(
    bench: Bench,
    data: BenchmarkData,
    batch: int,
    clients: int,
    functions: dict[str, float | None],
    peers: Sequence[Peer] = (),
    prefix: str = "hot",
) -> Group:
    """Return a group that reads from memory: the arena, for a peer the page cache.

    Args: functions: of `benchmarks.harness.contestants`, each with its limit.
    """
    name = f"{prefix}/{data.name}/batch{batch}/clients{clients}"

    def run(function: str) -> Result:
        daemon = bench.hot_daemon(data)
        result = bench.run(
            f"benchmarks.harness.contestants:{function}", data, batch=batch, clients=clients,
            daemon=daemon, warm=8,
        )  # fmt: skip
        if result.daemon["blocks_read"] > 0:
            raise FFServeError(
                f"the daemon read from disk in a hot run: its arena does not hold {data.size} bytes"
            )
        return result

    def contestant(function: str, limit: float | None) -> Contestant:
        row = Row(f"{name}/{function}", f"{FFSERVE} {function}", ratio, limit=limit)
        return Contestant(f"{FFSERVE} {function}", lambda: run(function), (row,))

    return Group(
        title=f"hot, {data.name}, batches of {batch}, {_client_count(clients)}",
        yardstick=memcpy(bench, data, batch, clients),
        contestants=(
            *(contestant(function, limit) for function, limit in functions.items()),
            *(peer_contestant(bench, p, data, batch, clients, name, cold=False) for p in peers),
        ),
        prepare=data.make,
        labels={"state": "hot", "bytes": data.mean, "batch": batch, "clients": clients},
    )


@dataclasses.dataclass(frozen=True)
class ColdRead:
    """One way of ffserve to read cold data: a row's name and a contestant's function.

    Args: case: more for the function.
    """

    name: str
    function: str
    batch: int
    clients: int = 1
    limit: float | None = None
    daemon: bool = True
    case: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, bench: Bench, data: BenchmarkData) -> Result:
        """Run it with nothing in memory."""
        bench.from_disk(data.paths)
        function = f"benchmarks.harness.contestants:{self.function}"
        case = {"batch": self.batch, "clients": self.clients, "once": True, **self.case}
        if not self.daemon:
            return bench.run(function, data, **case)
        with bench.cold_daemon(data) as daemon:
            return bench.run(function, data, daemon=daemon, **case)


def cold(
    bench: Bench,
    data: BenchmarkData,
    depth: int,
    reads: Sequence[ColdRead],
    peers: Sequence[Peer] = (),
    peer_batch: int = 256,
    cpu_limit: float | None = None,
    prefix: str = "cold",
    pattern: Pattern = "blocks",
    peer_clients: int = 1,
) -> Group:
    """Return a group that reads from disk: every sample once, in random order.

    Args:
        depth: reads in flight of the yardstick.
        pattern: the reads of the yardstick.
        cpu_limit: of the daemon's CPU microseconds per missed sample in the first of ``reads``;
            None: no such row.
    """
    name = f"{prefix}/{data.name}/depth{depth}"

    def contestant(read: ColdRead, first: bool) -> Contestant:
        rows = [Row(f"{name}/{read.name}", f"{FFSERVE} {read.name}", ratio, limit=read.limit)]
        if first and cpu_limit is not None:
            row = f"{name}/daemon-cpu"
            text = "the daemon's CPU per missed sample"
            rows.append(Row(row, text, _miss_us, "µs", cpu_limit, at_most=True))
            rows.append(
                Row(f"{row}/fio", f"{text} / fio's CPU per read", _miss_share, at_most=True)
            )
        return Contestant(
            f"{FFSERVE} {read.name}", lambda: read.run(bench, data), tuple(rows),
            labels={"batch": read.batch, "clients": read.clients},
        )  # fmt: skip

    return Group(
        title=f"cold, {data.name}, against {depth} reads in flight{_PATTERN_NAMES[pattern]}",
        yardstick=disk(bench, data, depth, pattern),
        contestants=(
            *(contestant(read, k == 0) for k, read in enumerate(reads)),
            *(
                peer_contestant(bench, p, data, peer_batch, peer_clients, name, cold=True)
                for p in peers
            ),
        ),
        prepare=data.make,
        labels={"state": "cold", "bytes": data.mean, "batch": peer_batch, "clients": peer_clients},
    )


def stream(bench: Bench, data: BenchmarkData, limit: float | None) -> Group:
    """Return a group that reads from the first sample to the last, with and without a daemon."""
    name = f"stream/{data.name}"

    def contestant(read: ColdRead) -> Contestant:
        row = Row(f"{name}/{read.name}", f"{FFSERVE} in order, {read.name}", ratio, limit=limit)
        return Contestant(f"{FFSERVE} {read.name}", lambda: read.run(bench, data), (row,))

    return Group(
        title=f"from first to last, {data.name}",
        yardstick=disk(bench, data, STREAM_DEPTH, "stream"),
        contestants=(
            contestant(ColdRead("daemon", "in_order", 64)),
            contestant(ColdRead("engine", "in_order", 64, daemon=False)),
        ),
        prepare=data.make,
        labels={"state": "stream", "bytes": data.mean, "clients": 1},
    )


def peer_contestant(
    bench: Bench,
    peer: Peer,
    data: BenchmarkData,
    batch: int,
    clients: int,
    name: str,
    *,
    cold: bool,
) -> Contestant:
    """Return a peer that reads the same samples in the same batches.

    Args: cold: from disk, with as much page cache as a daemon's arena, where a cgroup can be made.
    """

    def run() -> Result:
        if peer.name in bench.hung:
            raise ContestantFailed(bench.hung[peer.name])
        try:
            return run_once()
        except ContestantHung as error:
            bench.hung[peer.name] = str(error)
            raise

    def run_once() -> Result:
        files_path = peer.files_path(bench.folder, data)
        if not os.path.exists(files_path):
            bench.run(
                "benchmarks.harness.peers:prepare", peer=peer.name, folder=bench.folder,
                installation=peer.installation, samples=dataclasses.asdict(data),
            )  # fmt: skip
        files = files_below(files_path)
        if cold:
            bench.from_disk(files)
        with contextlib.ExitStack() as stack:
            group = None
            if not cold:
                stack.enter_context(held_in_memory(files))
            elif cgroup.missing() is None:
                group = stack.enter_context(cgroup.limited(memory_size=cgroup.UNLIMITED))
            running = stack.enter_context(
                bench.start(
                    "benchmarks.harness.peers:read", data, peer=peer.name, files_path=files_path,
                    installation=peer.installation, imports=[peer.module] if peer.forks else [],
                    batch=batch, clients=clients, once=cold, timeout_s=peer.timeout_s,
                    before_exec=group.join if group is not None else None,
                )
            )  # fmt: skip
            if group is not None:
                stack.enter_context(group.keeping_cached(cold_memory(data)))
            running.begin()
            return running.finish()

    description = f"{peer.name}, in order" if peer.in_order else peer.name
    row = Row(f"{name}/{peer.name}", description, ratio)
    return Contestant(peer.name, run, (row,), optional=True)


def installed_peers() -> tuple[list[Peer], list[str]]:
    """Return the peers that can take part, and a line about each that cannot."""
    reasons = {peer: peer.missing for peer in PEERS}
    notes = [f"{peer.name}: {reason}" for peer, reason in reasons.items() if reason is not None]
    if (reason := cgroup.missing()) is not None:
        notes.append(f"packages that read from disk may keep all of the data in memory: {reason}")
    return [peer for peer, reason in reasons.items() if reason is None], notes


def _client_count(clients: int) -> str:
    return "1 client" if clients == 1 else f"{clients} clients"


def _miss_us(result: Result, base: Result | None) -> float:
    return result.daemon["cpu_s"] / max(1.0, result.daemon["blocks_read"]) * 1e6


def _miss_share(result: Result, base: Result | None) -> float:
    assert base is not None
    return _miss_us(result, base) / base.cpu_us
