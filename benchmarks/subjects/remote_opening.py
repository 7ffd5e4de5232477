"""Rows of opening many remote files: an origin of our own with 20 ms of latency.

The yardstick asks for the same bytes with as many threads and nothing else: the pages of the
listing one after the other, then the beginning of each object.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any

import ffserve
from benchmarks.harness.latent_origin import PAGE_COUNT, latent_origin, name_of
from benchmarks.harness.measuring import Bench, Contestant, Group, Result, Row, Yardstick
from ffserve.bench.ceilings import Case, Delivered
from ffserve.bench.samples import MIB, BenchmarkData

HERE = "benchmarks.subjects.remote_opening"
LATENCY_S = 0.02
SAMPLES, SAMPLE_SIZE = 16, 4096
THREADS = 64
"""Of the yardstick."""
DESCRIPTORS = 7
"""The daemon needs fewer for a remote file, of which half are for one user."""


def _first_batch(case: Case) -> dict[str, float]:
    """Open all objects and read a batch; return the milliseconds of the first, and of both."""
    begun = time.perf_counter()
    reader = ffserve.open("s3://bucket/many", server=case["server"])
    opened = time.perf_counter()
    count = len(reader)
    assert count == case["count"]
    reader.read_batch([k * 7919 % count for k in range(case["batch"])])
    ended = time.perf_counter()
    return {"open_ms": (opened - begun) * 1e3, "batch_ms": (ended - begun) * 1e3}


def opening(case: Case) -> Delivered:
    """Open a data set of many remote files once."""
    _prepare(case)
    yield 0, 0
    yield _first_batch(case)


def keep_open(case: Case) -> Delivered:
    """Hold the data set open from the warm-up to the end of the run."""
    _prepare(case)
    with ffserve.open("s3://bucket/many", server=case["server"]) as reader:
        yield 0, 0
        yield {"samples": len(reader)}


def _prepare(case: Case) -> None:
    """Import what the first URL of a process imports."""
    os.environ.update(case["environment"])
    ffserve.open(f"s3://bucket/{name_of(0)}", server="off").close()


def opening_plainly(case: Case) -> Delivered:
    """Ask for the pages of the listing, and for the beginning of each object."""
    kept, place = local(), case["environment"]["AWS_ENDPOINT_URL"].partition("://")[2]

    def get(path: str) -> None:
        if not hasattr(kept, "connection"):
            kept.connection = http.client.HTTPConnection(place)
        kept.connection.request("GET", path, headers={"Range": "bytes=0-65535"})
        kept.connection.getresponse().read()

    yield 0, 0
    begun = time.perf_counter()
    count = case["count"] // SAMPLES
    for k in range(0, count, PAGE_COUNT):
        get(f"/bucket/?list-type=2&continuation-token={k}")
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(get, [f"/bucket/{name_of(k)}" for k in range(count)]))
    yield {"open_ms": (time.perf_counter() - begun) * 1e3}


def group(bench: Bench, count: int, note: Callable[[str], None]) -> Group:
    """Return the group. Args: count: of files."""
    path = os.path.join(bench.folder, "one-of-many.ffr")
    one = BenchmarkData("one", (path,), SAMPLES, SAMPLES * SAMPLE_SIZE, SAMPLE_SIZE)
    whole: dict[str, Any] = {"count": count * SAMPLES, "batch": 64}

    def run(function: str, *, daemon: bool = False, kept: bool = False) -> Result:
        with contextlib.ExitStack() as stack:
            endpoint = stack.enter_context(latent_origin(path, count, LATENCY_S))
            environment = {
                "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
            }  # fmt: skip
            case = {**whole, "environment": environment, "warm": 1}
            if daemon:
                place = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="store-", dir=bench.folder)
                )
                options = "--store-directory", f"{place}/store", "--store-size", "20GiB"
                case["daemon"] = stack.enter_context(bench.daemon(one, 256 * MIB, options))
            if kept:
                stack.enter_context(bench.start(f"{HERE}:keep_open", None, **case))
            return bench.run(f"{HERE}:{function}", None, **case)

    def rows(name: str, text: str, limit: float | None) -> tuple[Row, ...]:
        opened, first = f"store/{count}-shards/{name}", f"store/{count}-shards/{name}/batch"
        return (
            Row(opened, f"{text} opens them", _total("open_ms"), "ms", limit, at_most=True),
            Row(first, f"{text} has its first batch", _total("batch_ms"), "ms", at_most=True),
        )

    by_daemon = [
        Contestant("the first client", lambda: run("opening", daemon=True),
                   rows("first", "the first client of a daemon", 3000.0)),
        Contestant("a second client", lambda: run("opening", daemon=True, kept=True),
                   rows("second", "a second client", 300.0)),
    ]  # fmt: skip
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < DESCRIPTORS * count:
        note(f"store/{count}-shards: no daemon, it may have too few files open (ulimit -Hn)")
        by_daemon.clear()
    return Group(
        f"{count:,} remote files over {LATENCY_S * 1e3:.0f} ms",
        Yardstick("the same bytes by threads", lambda: run("opening_plainly")),
        (
            Contestant("without a daemon", lambda: run("opening"),
                       rows("ranges", "a client without a daemon", 3000.0)),
            *by_daemon,
        ),
        one.make, {"state": "remote", "bytes": SAMPLE_SIZE, "batch": 64},
    )  # fmt: skip


def _total(name: str) -> Callable[[Result, Result | None], float]:
    return lambda result, _: result.total(name)
