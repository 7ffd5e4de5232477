"""The rows of docs/BENCHMARKS.md: those of `ffserve bench` in all sizes, and more."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence

import ffserve
from benchmarks import contestants
from ffserve.bench import cases, peers, records
from ffserve.bench.cases import DEPTH, Way, cold, hot, stream
from ffserve.bench.peers import Peer
from ffserve.bench.records import MIB, Data
from ffserve.bench.runner import Bench, Entrant, Group, Result, Row, ratio

KIB = 1024
SMALL, LARGE, CHUNKED = 4 * KIB, 100 * KIB, 16 * KIB
HOT_SIZE, COLD_SIZE, PEER_SIZE, TOKENS_SIZE = 512 * MIB, 3072 * MIB, 512 * MIB, 128 * MIB
SWEEP = (KIB, SMALL, LARGE, MIB)
CLIENTS = (2, 4, 8)
PEER_BATCH_SIZE = 32 * MIB
TORCH_WARM_SIZE = 64 * MIB
"""Bytes after which a loader's workers have taken all shared memory that they use."""
QUICK = (
    "hot/4KiB/", "hot/100KiB/", "inline/", "torch/", "cold/4KiB/", "cold/100KiB/", "stream/",
    "open/", "crowd/",
)  # fmt: skip
"""Rows of a quick look at all that matters."""
LONG = 5
"""A figure about the daemon's CPU needs a run so many times as long."""


def groups(bench: Bench, rivals: Sequence[Peer], scale: float = 1.0) -> list[Group]:
    """Return all groups; `scale` multiplies the sizes of the data."""

    def data(step: int, size: int) -> Data:
        return records.generated(bench.folder, step, max(int(size * scale), 64 * step))

    found = []
    for step in (SMALL, LARGE):
        found += _hot(bench, data(step, HOT_SIZE)) + _torch(bench, data(step, HOT_SIZE))
    found += _tokens(bench, data(100, TOKENS_SIZE))
    for step in (SMALL, LARGE):
        found += _cold(bench, data(step, COLD_SIZE))
    found += _at_blocks(bench, scale)
    found += _formats(bench, scale)
    for step in (SMALL, LARGE):
        found += _crowd(bench, data(step, COLD_SIZE))
    many = contestants.many_samples(bench.folder, max(int(10_000_000 * scale), 1000), 100)
    found += _opening(bench, many)
    return found + _peers(bench, [data(step, PEER_SIZE) for step in SWEEP], rivals)


def _hot(bench: Bench, data: Data) -> list[Group]:
    found = []
    for batch in (64, 256):
        for clients in (1, 2):
            ways: dict[str, float | None] = {"read_batch": 0.85}
            if (batch, clients) == (64, 1):
                ways["read"] = 0.75 if data.mean == LARGE else None
            found.append(hot(bench, data, batch, clients, ways))
    for batch, limit in cases.inline_limits(data).items():
        found.append(hot(bench, data, batch, 1, {"read_batch": limit}, inline=True))

    def run(way: str, batch: int, seconds: float) -> Result:
        daemon = bench.hot_daemon(data)
        who = f"ffserve.bench.ours:{way}"
        return bench.run(who, data, batch=batch, daemon=daemon, warm=8, seconds=seconds)

    idle = Row(f"hot/{data.name}/daemon-cpu", "the daemon's share of a core while a client only "
               "hits", _daemon_share, "%", 1.0, at_most=True)  # fmt: skip
    lease = Row(f"hot/{data.name}/lease", "lease, a sample, batches of 64", _sample_ns, "ns",
                1500.0, at_most=True)  # fmt: skip
    found.append(
        Group(
            title=f"hot, {data.name}, the daemon's CPU and leases",
            against="",
            yardstick=None,
            entrants=(
                Entrant("ffserve read_batch", lambda: run("read_batch", 256, LONG * bench.seconds),
                        (idle,)),
                Entrant("ffserve lease", lambda: run("lease", 64, bench.seconds), (lease,),
                        labels={"batch": 64}),
            ),
            before=data.make,
            labels={"state": "hot", "bytes": data.mean, "batch": 256, "clients": 1},
        )
    )  # fmt: skip
    return found


def _torch(bench: Bench, data: Data) -> list[Group]:
    if importlib.util.find_spec("torch") is None:
        return []
    batch = 64
    labels = {"state": "hot", "bytes": data.mean, "batch": batch, "clients": 1}

    def run(name: str, *, daemon: bool = True) -> Result:
        served = bench.hot_daemon(data) if daemon else None
        warm = max(32, TORCH_WARM_SIZE // (batch * data.mean))
        who = f"benchmarks.torch_cases:{name}"
        return bench.run(who, data, batch=batch, daemon=served, warm=warm)

    def entrant(name: str, limit: float) -> Entrant:
        row = Row(f"torch/{data.name}/{name}", f"ffserve, {name}", ratio, limit=limit)
        return Entrant(f"ffserve {name}", lambda: run(name), (row,))

    return [
        Group(
            f"torch DataLoader, 2 workers, {data.name}, raw samples", cases.MEMCPY,
            lambda: bench.run("ffserve.bench.yardsticks:memcpy", data, warm=8),
            (entrant("raw", 0.4),), data.make, labels=labels,
        ),
        Group(
            f"torch DataLoader, 2 workers, {data.name}, tensors, torch's collate",
            "the same loader over samples in the workers' memory",
            lambda: run("tensors_in_memory", daemon=False),
            (entrant("tensors", 0.9),), data.make, labels=labels,
        ),
    ]  # fmt: skip


def _tokens(bench: Bench, data: Data) -> list[Group]:
    labels = {"state": "hot", "bytes": data.mean, "batch": 1024, "clients": 1}

    def ours() -> Result:
        return bench.run(
            "ffserve.bench.ours:read_batch", data, batch=1024, daemon=bench.hot_daemon(data), warm=8
        )

    def against(name: str, limit: float) -> Entrant:
        row = Row(f"tokens/{data.name}/{name}", "ffserve read_batch", ratio, limit=limit)
        return Entrant("ffserve read_batch", ours, (row,))

    title = f"tokens, {data.name}, batches of 1024, hot"
    found = [
        Group(
            title, "table[indices] of one numpy array",
            lambda: bench.run("ffserve.bench.yardsticks:array_rows", data, batch=1024, warm=8),
            (against("numpy", 0.3),), data.make, labels=labels,
        )
    ]  # fmt: skip
    original = peers.BY_NAME["ffrecord"]
    if original.missing is None:
        run = cases.rival(bench, original, data, 1024, 1, "tokens", cold=False).run
        found.append(
            Group(title, "the original ffrecord", run, (against("ffrecord", 20.0),), data.make,
                  labels=labels)
        )  # fmt: skip
    return found


def _cold(bench: Bench, data: Data) -> list[Group]:
    cpu_limit = {SMALL: 4.0, LARGE: 13.0}[data.mean]
    engine = 0.9 if data.mean == LARGE else None
    return [
        cold(
            bench, data, DEPTH,
            [
                Way("in_flight", "in_flight", 64, limit=0.95),
                Way("clients2", "read_batch", 64, clients=2, limit=0.95),
                Way("batch256", "read_batch", 256, limit=0.8),
                Way("engine", "in_flight", 64, limit=engine, daemon=False),
            ],
            cpu_limit=cpu_limit,
        ),
        cold(
            bench, data, 64,
            [
                Way("batch64", "read_batch", 64, limit=0.8),
                Way("engine64", "read_batch", 64, daemon=False),
            ],
        ),
        cold(
            bench, data, DEPTH,
            [Way("in_flight", "in_flight", 64), Way("batch256", "read_batch", 256)],
            prefix="cold-extents", pattern="extents",
        ),
        *(
            cold(
                bench, data, batch,
                [Way(f"batch{batch}", "read_batch", batch)],
                prefix="cold-batches", pattern="batches",
            )
            for batch in (64, 256)
        ),
        stream(bench, data, limit=0.9),
    ]  # fmt: skip


def _at_blocks(bench: Bench, scale: float) -> list[Group]:
    """Records of 4 KiB that begin at blocks of 4 KiB: the header of an FFRecord file, 12 + 12N
    bytes, ends at one where N + 1 is a multiple of 1024."""
    count = max(1, round(COLD_SIZE * scale / SMALL / 1024)) * 1024 - 1
    data = records.generated(bench.folder, SMALL, count * SMALL, "at-blocks")
    return [
        cold(
            bench, data, DEPTH,
            [
                Way("in_flight", "in_flight", 64),
                Way("clients2", "read_batch", 64, clients=2),
                Way("batch256", "read_batch", 256),
            ],
        ),
        cold(bench, data, 64, [Way("batch64", "read_batch", 64)]),
    ]  # fmt: skip


def _formats(bench: Bench, scale: float) -> list[Group]:
    """TFRecord like FFRecord; random samples of RecordIO out of chunks of 1 MiB."""

    def data(step: int, size: int, kind: str, **options: str | int) -> Data:
        size = max(int(size * scale), 64 * step)
        return records.generated(bench.folder, step, size, kind, **options)

    hot_data = data(LARGE, HOT_SIZE, "tfrecord", format="tfrecord")
    cold_data = data(LARGE, COLD_SIZE, "tfrecord", format="tfrecord")
    found = [
        hot(bench, hot_data, 64, 1, {"read_batch": 0.85}),
        cold(
            bench, cold_data, DEPTH,
            [
                Way("in_flight", "in_flight", 64, limit=0.95),
                Way("batch256", "read_batch", 256, limit=0.8),
            ],
        ),
    ]  # fmt: skip
    for compression in ("none", "snappy"):
        chunks = data(
            CHUNKED, HOT_SIZE, f"recordio-{compression}",
            format="recordio", compression=compression, max_chunk_size=MIB,
        )  # fmt: skip
        ways = [Way("in_flight", "in_flight", 64), Way("batch64", "read_batch", 64)]
        found += [
            hot(bench, chunks, 64, 1, {"read_batch": 0.85}),
            cold(bench, chunks, DEPTH, ways),
        ]
    return found


def _crowd(bench: Bench, data: Data) -> list[Group]:
    name = f"crowd/{data.name}"

    def run(clients: int) -> Result:
        records.evict(data.paths)
        with bench.cold_daemon(data) as daemon:
            hot_count = data.count // contestants.HOT_SHARE
            bench.run("ffserve.bench.ours:fill", data, daemon=daemon, count=hot_count)
            return bench.run(
                "benchmarks.contestants:mixed", data, clients=clients, daemon=daemon, warm=2,
                seconds=2 * bench.seconds,
            )  # fmt: skip

    rows = (
        Row(f"{name}/throughput", "64 clients, all together", ratio, limit=0.8),
        Row(f"{name}/p99", "64 clients, a batch's p99 / p50", _tail, limit=5.0, at_most=True),
        Row(f"{name}/fair", "64 clients, the slowest's part of its fair share", _fair, limit=0.5),
    )
    return [
        Group(
            f"64 clients on batches of 64, half hot, half cold, {data.name}", "2 such clients",
            lambda: run(2), (Entrant("ffserve crowd", lambda: run(64), rows),), data.make,
            labels={"state": "mixed", "bytes": data.mean, "batch": 64, "clients": 64},
        )
    ]  # fmt: skip


def _opening(bench: Bench, data: Data) -> list[Group]:
    def run() -> Result:
        with contextlib.ExitStack() as stack:
            daemon = stack.enter_context(bench.daemon(data, 64 * MIB))
            stack.enter_context(ffserve.open(data.paths, server=daemon.socket))
            return bench.run("benchmarks.contestants:opening", data, daemon=daemon)

    rows = (
        Row("open/10M/time", "a second client opens it", lambda result, base:
            result.total("open_ms"), "ms", 5.0, at_most=True),
        Row("open/10M/memory", "its private memory grows by", lambda result, base:
            result.total("grown_mb"), "MB", 1.0, at_most=True),
    )  # fmt: skip
    return [
        Group(
            f"a data set of {data.count:,} samples", "", None,
            (Entrant("ffserve open", run, rows),),
            lambda: contestants.make_many(data), labels={"state": "open"},
        )
    ]  # fmt: skip


def _peers(bench: Bench, sets: Sequence[Data], rivals: Sequence[Peer]) -> list[Group]:
    found = []
    for data in sets:
        batch = max(1, min(256, PEER_BATCH_SIZE // data.mean))
        found.append(hot(bench, data, batch, 1, {"read_batch": None}, rivals, "hot-peers"))
        if data.mean == SMALL:
            found += [
                hot(bench, data, batch, clients, {"read_batch": None}, rivals, "hot-peers")
                for clients in CLIENTS
            ]
        ways = [Way("in_flight", "in_flight", batch), Way("read_batch", "read_batch", batch)]
        found.append(cold(bench, data, DEPTH, ways, rivals, rival_batch=batch, prefix="cold-peers"))
    return found


def _daemon_share(result: Result, base: Result | None) -> float:
    return 100 * result.daemon["cpu_s"] / result.daemon["wall_s"]


def _sample_ns(result: Result, base: Result | None) -> float:
    return result.total("seconds") / result.total("samples") * 1e9


def _tail(result: Result, base: Result | None) -> float:
    return result.batch_s(99) / result.batch_s(50)


def _fair(result: Result, base: Result | None) -> float:
    return min(result.rates) * len(result.rates) / result.rate
