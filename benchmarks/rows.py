"""All rows of docs/BENCHMARKS.md."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import resource
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ffserve
from benchmarks import shuffle
from benchmarks.harness.contestants import HOT_SHARE
from benchmarks.harness.kinds import (
    DEPTH,
    FFSERVE,
    STREAM_DEPTH,
    ColdRead,
    cold,
    disk,
    hot,
    memcpy,
    peer_contestant,
    stream,
)
from benchmarks.harness.measuring import (
    Bench,
    Contestant,
    Group,
    Result,
    Row,
    Yardstick,
    held_in_memory,
    ratio,
)
from benchmarks.harness.peers import BY_NAME, Peer
from benchmarks.subjects import engine, nodes, peer_rows, remote_opening, store, view
from benchmarks.subjects.local import Local
from ffserve.bench.samples import MIB, BenchmarkData, generated
from ffserve.formats import NAMES, by_name
from ffserve.formats.ffrecord import tables_end

KIB = 1024
SMALL, LARGE, CHUNKED = 4 * KIB, 100 * KIB, 16 * KIB
HOT_SIZE, COLD_SIZE, PEER_SIZE, TOKENS_SIZE = 512 * MIB, 3072 * MIB, 512 * MIB, 128 * MIB
EPOCH_SIZE = 256 * MIB
PEER_SAMPLE_SIZES = (KIB, SMALL, LARGE, MIB)
PEER_CLIENTS = (2, 8)
WINDOWED_SAMPLE_SIZES = (KIB, SMALL)
WINDOWED_SIZE, WINDOW_SIZE = 1024 * MIB, 16 * MIB
"""fio reads the beginning of the file in every turn, which a virtual machine's host then has in
memory; so there is no more of it. Blocks of a window have 512 KiB."""
PEER_BATCH_SIZE = 32 * MIB
LIST_LIMITS = {(SMALL, 64): 0.7, (LARGE, 64): 0.75, (LARGE, 256): 0.85}
"""Of lists of arrays, by sample size and batch."""
TORCH_WARM_SIZE = 64 * MIB
"""Bytes after which a loader's workers have allocated all shared memory that they use."""
QUICK = (
    "hot/4KiB/", "hot/100KiB/", "torch/", "cold/4KiB/", "cold/100KiB/", "stream/",
    "windowed/", "open/", "crowd/",
)  # fmt: skip
"""The rows of a quick look at all that matters."""
LONG = 5
"""A run is so many times as long when the daemon's CPU is measured while it is nearly idle."""
CONTESTANTS = "benchmarks.harness.contestants"
MANY_FILES, SHARD_SAMPLES = 10_000, 10

Note = Callable[[str], None]


def groups(
    bench: Bench, peers: Sequence[Peer], scale: float = 1.0, note: Note = lambda text: None
) -> list[Group]:
    """Return all groups.

    Args:
        scale: multiplies the sizes of the data.
        note: takes a line about each group of rows that cannot run.
    """

    def data(sample_size: int, size: int) -> BenchmarkData:
        return generated(bench.folder, sample_size, max(int(size * scale), 64 * sample_size))

    found = []
    for sample_size in (SMALL, LARGE):
        found += _hot(bench, data(sample_size, HOT_SIZE), with_peers=bool(peers))
        found += _torch(bench, data(sample_size, HOT_SIZE), note)
    found += _tokens(bench, data(100, TOKENS_SIZE), note)
    for sample_size in (SMALL, LARGE):
        found += _cold(bench, data(sample_size, COLD_SIZE))
    small, large = (_at_blocks(bench, size, scale) for size in (SMALL, LARGE))
    found += _aligned(bench, small)
    found += [engine.group(bench, each) for each in (small, large)]
    for sample_size in (SMALL, LARGE):
        local = Local(bench, data(sample_size, HOT_SIZE), data(sample_size, EPOCH_SIZE), note)
        found += local.groups(data(sample_size, COLD_SIZE))
    for sample_size in WINDOWED_SAMPLE_SIZES:
        found += _windowed(bench, data(sample_size, WINDOWED_SIZE))
    found += _formats(bench, scale)
    for sample_size in (SMALL, LARGE):
        found += _crowd(bench, data(sample_size, COLD_SIZE))
    found += view.groups(bench, data(LARGE, HOT_SIZE), data(100, TOKENS_SIZE), note)
    found += store.groups(bench, (SMALL, LARGE), scale, bool(peers), note)
    found += nodes.groups(bench, LARGE, scale, note)
    if importlib.util.find_spec("botocore") is None:
        note("store/…-shards: not measured, it needs botocore (pip install botocore)")
    else:
        found.append(remote_opening.group(bench, max(int(MANY_FILES * scale), 10), note))
    found += _opening(bench, many_samples(bench.folder, max(int(10_000_000 * scale), 1000), 100))
    small, large = (
        peer_rows.numbered(bench.folder, size, max(int(HOT_SIZE * scale), 64 * size))
        for size in (SMALL, LARGE)
    )
    found += peer_rows.groups(bench, small, large, peers, note)
    for kind in NAMES:
        found += _many_files(bench, max(int(MANY_FILES * scale), 10), kind, note)
    return found + _peers(bench, [data(size, PEER_SIZE) for size in PEER_SAMPLE_SIZES], peers)


def _hot(bench: Bench, data: BenchmarkData, *, with_peers: bool) -> list[Group]:
    found = []
    for batch in (64, 256):
        for clients in (1, 2):
            functions: dict[str, float | None] = {"read_batch": 0.85}
            if clients > 1:
                found.append(hot(bench, data, batch, clients, functions))
                continue
            limit = LIST_LIMITS.get((data.mean, batch))
            lists = hot(bench, data, batch, 1, {**functions, "read": limit, "drop_in": limit})
            others = (_checked_preads(bench, data, batch),) if with_peers else ()
            found.append(dataclasses.replace(lists, contestants=(*lists.contestants, *others)))

    def run(function: str, batch: int, seconds: float) -> Result:
        return bench.run(
            f"{CONTESTANTS}:{function}", data, batch=batch, daemon=bench.hot_daemon(data), warm=8,
            seconds=seconds,
        )  # fmt: skip

    idle = Row(
        f"hot/{data.name}/daemon-cpu", "the daemon's share of a core while a client only hits",
        _daemon_share, "%", 1.0, at_most=True,
    )  # fmt: skip
    lease = (
        Row(f"hot/{data.name}/lease", "lease, per sample", _sample_ns, "ns", 1500.0, at_most=True),
        Row(f"hot/{data.name}/lease/memcpy", "lease / a copy", _times_slower, at_most=True),
    )
    labels = {"state": "hot", "bytes": data.mean, "clients": 1}
    found.append(
        Group(
            f"hot, {data.name}, batches of 256", None,
            (
                Contestant(
                    "ffserve read_batch", lambda: run("read_batch", 256, LONG * bench.seconds),
                    (idle,),
                ),
            ),
            data.make, {**labels, "batch": 256},
        )
    )  # fmt: skip
    found.append(
        Group(
            f"hot, {data.name}, leases in batches of 64", memcpy(bench, data),
            (Contestant("ffserve lease", lambda: run("lease", 64, bench.seconds), lease),),
            data.make, {**labels, "batch": 64},
        )
    )  # fmt: skip
    return found


def _checked_preads(bench: Bench, data: BenchmarkData, batch: int) -> Contestant:
    def run() -> Result:
        with held_in_memory(data.paths):
            return bench.run(f"{CONTESTANTS}:checked_preads", data, batch=batch, warm=8)

    row = Row(
        f"hot/{data.name}/batch{batch}/clients1/checked_preads",
        "pread and zlib's CRC-32 in Python, a sample at a time", ratio,
    )  # fmt: skip
    return Contestant("pread and CRC-32", run, (row,))


def _torch(bench: Bench, data: BenchmarkData, note: Note) -> list[Group]:
    if importlib.util.find_spec("torch") is None:
        note(f"torch/{data.name}: not measured, torch is not installed (pip install torch)")
        return []
    batch = 64
    labels = {"state": "hot", "bytes": data.mean, "batch": batch, "clients": 1}

    def run(name: str, *, daemon: bool = True) -> Result:
        served = bench.hot_daemon(data) if daemon else None
        warm = max(32, TORCH_WARM_SIZE // (batch * data.mean))
        function = f"benchmarks.subjects.torch_contestants:{name}"
        return bench.run(function, data, batch=batch, daemon=served, warm=warm)

    def contestant(name: str, limit: float) -> Contestant:
        row = Row(f"torch/{data.name}/{name}", f"ffserve, {name}", ratio, limit=limit)
        return Contestant(f"ffserve {name}", lambda: run(name), (row,))

    in_memory = Yardstick(
        "the same loader over samples in the workers' memory",
        lambda: run("tensors_in_memory", daemon=False),
    )
    return [
        Group(
            f"torch DataLoader, 2 workers, {data.name}, raw samples", memcpy(bench, data),
            (contestant("raw", 0.4),), data.make, labels,
        ),
        Group(
            f"torch DataLoader, 2 workers, {data.name}, tensors, torch's collate", in_memory,
            (contestant("tensors", 0.9),), data.make, labels,
        ),
    ]  # fmt: skip


def _tokens(bench: Bench, data: BenchmarkData, note: Note) -> list[Group]:
    labels = {"state": "hot", "bytes": data.mean, "batch": 1024, "clients": 1}
    title = f"tokens, {data.name}, batches of 1024, hot"

    def run() -> Result:
        daemon = bench.hot_daemon(data)
        return bench.run(f"{CONTESTANTS}:read_batch", data, batch=1024, daemon=daemon, warm=8)

    def against(name: str, limit: float, yardstick: Yardstick) -> Group:
        row = Row(f"tokens/{data.name}/{name}", "ffserve read_batch", ratio, limit=limit)
        contestant = Contestant("ffserve read_batch", run, (row,))
        return Group(title, yardstick, (contestant,), data.make, labels)

    numpy = Yardstick(
        "table[indices] of one numpy array",
        lambda: bench.run(f"{CONTESTANTS}:array_rows", data, batch=1024, warm=8),
    )
    found = [against("numpy", 0.3, numpy)]
    original = BY_NAME["ffrecord"]
    if original.missing is None:
        peer = peer_contestant(bench, original, data, 1024, 1, "tokens", cold=False)
        found.append(against("ffrecord", 20.0, Yardstick("the original ffrecord", peer.run)))
    else:
        note(f"tokens/{data.name}/ffrecord: not measured, ffrecord is {original.missing}")
    return found


def _cold(bench: Bench, data: BenchmarkData) -> list[Group]:
    cpu_limit = {SMALL: 4.0, LARGE: 13.0}[data.mean]
    engine = 0.9 if data.mean == LARGE else None
    return [
        cold(
            bench, data, DEPTH,
            [
                ColdRead("in_flight", "in_flight", 64, limit=0.95),
                ColdRead("clients2", "read_batch", 64, clients=2, limit=0.95),
                ColdRead("batch256", "read_batch", 256, limit=0.8),
                ColdRead("engine", "in_flight", 64, limit=engine, daemon=False),
            ],
            cpu_limit=cpu_limit,
        ),
        cold(
            bench, data, 64,
            [
                ColdRead("batch64", "read_batch", 64, limit=0.8),
                ColdRead("engine64", "read_batch", 64, daemon=False),
            ],
        ),
        cold(
            bench, data, DEPTH,
            [ColdRead("in_flight", "in_flight", 64), ColdRead("batch256", "read_batch", 256)],
            prefix="cold-extents", pattern="extents",
        ),
        *(
            cold(
                bench, data, batch,
                [ColdRead(f"batch{batch}", "read_batch", batch)],
                prefix="cold-batches", pattern="batches",
            )
            for batch in (64, 256)
        ),
        stream(bench, data, limit=0.9),
    ]  # fmt: skip


def _at_blocks(bench: Bench, sample_size: int, scale: float) -> BenchmarkData:
    """Describe records that begin at blocks of 4 KiB.

    The header of an FFRecord file of N samples, 12 + 12N bytes, ends at a block where N + 1 is a
    multiple of 1024.
    """
    count = max(1, round(COLD_SIZE * scale / sample_size / 1024)) * 1024 - 1
    return generated(bench.folder, sample_size, count * sample_size, "at-blocks")


def _aligned(bench: Bench, data: BenchmarkData) -> list[Group]:
    return [
        cold(
            bench, data, DEPTH,
            [
                ColdRead("in_flight", "in_flight", 64),
                ColdRead("clients2", "read_batch", 64, clients=2),
                ColdRead("batch256", "read_batch", 256),
            ],
        ),
        cold(bench, data, 64, [ColdRead("batch64", "read_batch", 64)]),
    ]  # fmt: skip


def _windowed(bench: Bench, data: BenchmarkData) -> list[Group]:
    """Return the groups of a windowed order: its speed beside reading in order, its quality."""
    name, window, batch = f"windowed/{data.name}", WINDOW_SIZE // data.mean, 64

    def contestant(row: str, function: str, daemon: bool) -> Contestant:
        read = ColdRead(row, function, batch, daemon=daemon, case={"window": window, "warm": 1})
        rows = (Row(f"{name}/{row}", f"{FFSERVE} windowed, {row}", ratio, limit=0.8),)
        return Contestant(f"{FFSERVE} {row}", lambda: read.run(bench, data), rows)

    def measured(prefix: str, quality: Callable[[], dict[str, float]]) -> Contestant:
        rows = tuple(
            Row(
                f"{name}/{prefix}{key}", text,
                lambda result, _, key=key: result.total(key), unit,  # type: ignore[misc]
            )
            for key, (text, unit) in shuffle.MEASURES.items()
        )  # fmt: skip
        return Contestant(f"{prefix}order", lambda: Result((quality(),)), rows)

    labels = {"state": "windowed", "bytes": data.mean, "batch": batch, "clients": 1}
    return [
        Group(
            f"windowed order, {data.name}, windows of {window:,} samples",
            disk(bench, data, STREAM_DEPTH, "stream"),
            (
                contestant("daemon", "windowed", daemon=True),
                contestant("engine", "windowed", daemon=False),
                contestant("daemon64", "windowed_batch", daemon=True),
                contestant("engine64", "windowed_batch", daemon=False),
            ),
            data.make, labels,
        ),
        Group(
            f"quality of the windowed order, {data.name}", None,
            (
                measured("", lambda: shuffle.of_windows(data.count, window, batch)),
                measured("buffer-", lambda: shuffle.of_buffer(data.count, window, batch)),
            ),
            labels=labels,
        ),
    ]  # fmt: skip


def _formats(bench: Bench, scale: float) -> list[Group]:
    """Return groups of TFRecord, and of RecordIO with chunks of 1 MiB."""

    def data(sample_size: int, size: int, kind: str, **options: str | int) -> BenchmarkData:
        size = max(int(size * scale), 64 * sample_size)
        return generated(bench.folder, sample_size, size, kind, **options)

    hot_data = data(LARGE, HOT_SIZE, "tfrecord", format="tfrecord")
    cold_data = data(LARGE, COLD_SIZE, "tfrecord", format="tfrecord")
    found = [
        hot(bench, hot_data, 64, 1, {"read_batch": 0.85}),
        cold(
            bench, cold_data, DEPTH,
            [
                ColdRead("in_flight", "in_flight", 64, limit=0.95),
                ColdRead("batch256", "read_batch", 256, limit=0.8),
            ],
        ),
    ]  # fmt: skip
    for compression in ("none", "snappy"):
        chunks = data(
            CHUNKED, HOT_SIZE, f"recordio-{compression}",
            format="recordio", compression=compression, max_chunk_size=MIB,
        )  # fmt: skip
        reads = [ColdRead("in_flight", "in_flight", 64), ColdRead("batch64", "read_batch", 64)]
        found += [
            hot(bench, chunks, 64, 1, {"read_batch": 0.85}),
            cold(bench, chunks, DEPTH, reads),
        ]
    return found


def _crowd(bench: Bench, data: BenchmarkData) -> list[Group]:
    name = f"crowd/{data.name}"

    def run(clients: int) -> Result:
        bench.from_disk(data.paths)
        with bench.cold_daemon(data) as daemon:
            bench.run(f"{CONTESTANTS}:fill", data, daemon=daemon, count=data.count // HOT_SHARE)
            return bench.run(
                f"{CONTESTANTS}:mixed", data, clients=clients, daemon=daemon,
                seconds=2 * bench.seconds,
            )  # fmt: skip

    rows = (
        Row(f"{name}/throughput", "64 clients, all together", ratio, limit=0.8),
        Row(f"{name}/p99", "64 clients, a batch's p99 / p50", _tail, limit=5.0, at_most=True),
        Row(f"{name}/fair", "64 clients, the slowest client / the mean", _fair, limit=0.5),
    )
    return [
        Group(
            f"64 clients on batches of 64, half hot, half cold, {data.name}",
            Yardstick("2 such clients", lambda: run(2)),
            (Contestant("ffserve crowd", lambda: run(64), rows),), data.make,
            {"state": "mixed", "bytes": data.mean, "batch": 64, "clients": 64},
        )
    ]  # fmt: skip


def _opening(bench: Bench, data: BenchmarkData) -> list[Group]:
    function = f"{CONTESTANTS}:opening"

    def run() -> Result:
        with (
            bench.daemon(data, 64 * MIB) as daemon,
            bench.start(f"{CONTESTANTS}:keep_open", data, daemon=daemon, warm=1),
        ):
            return bench.run(function, data, daemon=daemon)

    rows = (
        Row("open/10M/time", "a second client opens it", _open_ms, "ms", 5.0, at_most=True),
        Row("open/10M/time/local", "the same / without a daemon", _open_share, at_most=True),
        Row(
            "open/10M/memory", "its private memory grows by",
            lambda result, base: result.total("grown_mb"), "MB", 1.0, at_most=True,
        ),
    )  # fmt: skip
    return [
        Group(
            f"a data set of {data.count:,} samples",
            Yardstick("opening it without a daemon", lambda: bench.run(function, data)),
            (Contestant("ffserve open", run, rows),),
            lambda: make_many(data), {"state": "open"},
        )
    ]  # fmt: skip


def _many_files(bench: Bench, count: int, kind: str, note: Note) -> list[Group]:
    """Return the group that opens a data set of many files, which are in the page cache."""
    name, function = f"open/{count}-shards/{kind}", f"{CONTESTANTS}:opening"
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < count * 3 // 2:
        note(f"{name}: not measured, a process may have too few files open (ulimit -Hn)")
        return []
    data = many_files(bench.folder, count, kind)

    def read_all() -> None:
        # They are not locked in the page cache: each would take a descriptor.
        for path in shard_paths(data, count, kind):
            Path(path).read_bytes()

    def run(*, again: bool) -> Result:
        with contextlib.ExitStack() as stack:
            read_all()
            daemon = stack.enter_context(bench.daemon(data, 64 * MIB))
            if again:
                kept = f"{CONTESTANTS}:keep_open"
                stack.enter_context(bench.start(kept, data, daemon=daemon, warm=1))
            return bench.run(function, data, daemon=daemon)

    def plainly() -> Result:
        read_all()
        return bench.run(f"{CONTESTANTS}:opening_plainly", data)

    def rows(turn: str, text: str, limit: float) -> tuple[Row, ...]:
        return (
            Row(f"{name}/{turn}", text, _open_ms, "ms", limit, at_most=True),
            Row(f"{name}/{turn}/plain", f"{text} / plainly", _open_share, at_most=True),
        )

    return [
        Group(
            f"a data set of {count:,} {kind} files",
            Yardstick("open, fstat and a read of each file in Python", plainly),
            (
                Contestant(
                    "the first client", lambda: run(again=False),
                    rows("first", "the first client opens it", 1500.0),
                ),
                Contestant(
                    "a second client", lambda: run(again=True),
                    rows("second", "a second client opens it", 300.0),
                ),
            ),
            lambda: make_files(data, count, kind), {"state": "open"},
        )
    ]  # fmt: skip


def many_files(folder: str, count: int, kind: str) -> BenchmarkData:
    """Describe a directory of many files of a few samples each, which `make_files` writes."""
    samples = count * SHARD_SAMPLES
    path = str(Path(folder) / f"{count}-{kind}")
    return BenchmarkData(f"{count}-{kind}", (path,), samples, samples * 1000, 1000)


def shard_paths(data: BenchmarkData, count: int, kind: str) -> list[str]:
    """Return the paths of the files in the directory."""
    suffix = by_name(kind).suffixes[0]
    return [f"{data.paths[0]}/{k:05}{suffix}" for k in range(count)]


def make_files(data: BenchmarkData, count: int, kind: str) -> None:
    """Write the files, which are all alike, unless they exist."""
    first, *others = map(Path, shard_paths(data, count, kind))
    if others[-1].exists():
        return
    first.parent.mkdir(exist_ok=True)
    with ffserve.create(first, format=kind) as writer:
        for k in range(SHARD_SAMPLES):
            writer.write(bytes([k]) * data.mean)
    content = first.read_bytes()
    for path in others:
        path.write_bytes(content)


def many_samples(folder: str, count: int, sample_size: int) -> BenchmarkData:
    """Describe a file of very many samples of zeros, which `make_many` writes."""
    path = str(Path(folder) / f"{count}.ffr")
    return BenchmarkData(f"{count // 1_000_000}M", (path,), count, count * sample_size)


def make_many(data: BenchmarkData) -> None:
    """Write the file: its tables, and a hole for the samples."""
    path = Path(data.paths[0])
    if path.exists():
        return
    checksums = np.full(data.count, zlib.crc32(bytes(data.mean)), "<u4").tobytes()
    offsets = np.arange(data.count, dtype="<i8") * data.mean + tables_end(data.count)
    body: list[Any] = [struct.pack("<q", data.count), checksums, offsets.tobytes()]
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    part_path = path.with_suffix(".part")
    with open(part_path, "wb") as file:
        file.write(struct.pack("<I", crc))
        for part in body:
            file.write(part)
        file.truncate(tables_end(data.count) + data.size)
    part_path.rename(path)


def _peers(bench: Bench, sets: Sequence[BenchmarkData], peers: Sequence[Peer]) -> list[Group]:
    found = []
    for data in sets:
        batch = max(1, min(256, PEER_BATCH_SIZE // data.mean))
        found.append(hot(bench, data, batch, 1, {"read_batch": None}, peers, "hot-peers"))
        if data.mean == SMALL:
            found += [
                hot(bench, data, batch, clients, {"read_batch": None}, peers, "hot-peers")
                for clients in PEER_CLIENTS
            ]
        if data.mean in (SMALL, LARGE):
            found.append(_two_jobs(bench, data, batch, peers))
        reads = [ColdRead(name, name, batch) for name in ("in_flight", "read_batch")]
        found.append(cold(bench, data, DEPTH, reads, peers, peer_batch=batch, prefix="cold-peers"))
    return found


def _two_jobs(bench: Bench, data: BenchmarkData, batch: int, peers: Sequence[Peer]) -> Group:
    """Return the group of two jobs that train on one data set from disk at the same time."""
    return cold(
        bench, data, DEPTH,
        [
            ColdRead(row, "job", batch, clients=2, case={"shared": shared, "warm": 1})
            for row, shared in (("one-order", True), ("own-orders", False))
        ],
        peers, peer_batch=batch, prefix="jobs", peer_clients=2,
    )  # fmt: skip


def _daemon_share(result: Result, base: Result | None) -> float:
    return 100 * result.daemon["cpu_s"] / result.daemon["wall_s"]


def _sample_ns(result: Result, base: Result | None) -> float:
    return result.total("seconds") / result.total("samples") * 1e9


def _times_slower(result: Result, base: Result | None) -> float:
    return 1 / ratio(result, base)


def _tail(result: Result, base: Result | None) -> float:
    return result.batch_s(99) / result.batch_s(50)


def _fair(result: Result, base: Result | None) -> float:
    return min(result.rates) * len(result.rates) / result.rate


def _open_ms(result: Result, base: Result | None) -> float:
    return result.total("open_ms")


def _open_share(result: Result, base: Result | None) -> float:
    assert base is not None
    return _open_ms(result, base) / _open_ms(base, None)
