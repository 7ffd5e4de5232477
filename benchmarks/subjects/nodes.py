"""Rows of many nodes: four daemons and a bucket behind a link of 50 MB/s, with a cache network of
`deploy/cache-network` (four members) and without.

All are on this machine, and only the link to the origin is limited. Each daemon has a reader that
reads an epoch in an order of its own; the time is that until the last one ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.measuring import Bench, Contestant, Group, Result, Row, Yardstick
from benchmarks.subjects import store
from ffserve.bench.ceilings import Case, Delivered
from ffserve.bench.child_processes import Daemon
from ffserve.bench.samples import BenchmarkData
from ffserve.errors import FFServeError

HERE = "benchmarks.subjects.nodes"
PROGRAM = Path(__file__).parents[2] / "deploy/cache-network/cache-network"
COUNT, BATCH = 4, 8
KILLED_AT = 0.4
"""The part of the data that has left the origin when a member is killed."""
RESTART_S = 0.1
"""As in ffserve-cache.service."""
START_S = 20.0

Note = Callable[[str], None]


def _await(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not ready():
        if time.monotonic() > deadline:
            raise FFServeError("nginx does not start")
        time.sleep(0.05)


@contextlib.contextmanager
def members(place: str, origin: str) -> Iterator[dict[int, dict[str, str]]]:
    """Run the members of a cache network, of which the k-th listens at ``PLACE/k/run/cache.sock``.

    Args:    origin: the address that they may ask.
    Returns: their environments by their numbers.
    """
    names = [f"127.0.0.1:{port}" for port in _free_ports(COUNT)]
    made = f"{place}/certificates"
    subprocess.run(["sh", str(PROGRAM), "certificates", made, "127.0.0.1"], check=True)
    settings = {
        **os.environ, "ORIGINS": origin, "MEMBERS": " ".join(names), "SIZE": "4g", "WORKERS": "1",
        "CERTIFICATE": f"{made}/127.0.0.1.pem", "KEY": f"{made}/127.0.0.1.key",
        "AUTHORITY": f"{made}/authority.pem",
    }  # fmt: skip
    found: list[subprocess.Popen[bytes]] = []
    environments = {}
    try:
        for k, name in enumerate(names):
            own = {"RUN": f"{place}/{k}/run", "CACHE": f"{place}/{k}/cache", "LISTEN": name}
            found.append(_member({**settings, **own}))
            environments[found[-1].pid] = {**settings, **own}
        _await(lambda: all(os.path.exists(f"{place}/{k}/run/nginx.pid") for k in range(COUNT)))
        yield environments
    finally:
        for each in found:
            _kill(each.pid)
            each.wait()


def _member(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sh", str(PROGRAM), "run"], env=environment, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        some = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in some:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in some]


def epoch(case: Case) -> Delivered:
    """Read an epoch on each node at the same time; kill a member meanwhile, if that is wanted, and
    start it again as soon as systemd would."""
    yield 0, 0
    before = store.received(case)
    readers = []
    for seed, place in enumerate(case["sockets"]):
        given = {"environment": case["environment"], "urls": case["urls"], "seed": seed}
        readers.append(
            subprocess.Popen(
                [sys.executable, "-m", HERE, json.dumps(given)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, env={**os.environ, "FFSERVE_SOCKET": place}, text=True,
            )
        )  # fmt: skip
    for each in readers:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    begun, again = time.perf_counter(), None
    for each in readers:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    if case["victim"]:
        while store.received(case) - before < KILLED_AT * case["payload"]:
            time.sleep(0.01)
        _kill(case["victim"])
        time.sleep(RESTART_S)
        again = _member(case["environment_of_victim"])
    found = [json.loads(each.communicate()[0]) for each in readers]
    assert all(one["sum"] == found[0]["sum"] for one in found), "all have read the same bytes"
    if again is not None:
        _kill(again.pid)
        again.wait()
    yield {
        "size": sum(one["size"] for one in found), "seconds": time.perf_counter() - begun,
        "received": store.received(case) - before, "slowest_s": max(o["slowest_s"] for o in found),
    }  # fmt: skip


def read(case: dict[str, Any]) -> dict[str, Any]:
    """Read an epoch in this process, when it is told to."""
    os.environ.update(case["environment"])
    import numpy as np

    import ffserve

    with ffserve.open(case["urls"]) as reader:
        order = np.random.default_rng(case["seed"]).permutation(len(reader))
        print("ready", flush=True)
        sys.stdin.readline()
        reader.announce(order)
        total, size, slowest = 0, 0, 0.0
        for at in range(0, len(order), BATCH):
            begun = time.perf_counter()
            samples = reader.read(order[at : at + BATCH])
            slowest = max(slowest, time.perf_counter() - begun)
            total += sum(zlib.crc32(sample) for sample in samples)
            size += sum(map(len, samples))
    return {"sum": total, "size": size, "slowest_s": slowest}


def groups(bench: Bench, sample_size: int, scale: float, note: Note) -> list[Group]:
    """Return the group, if this machine can measure it."""
    programs = ("tc", "nginx", "openssl", "curl")
    if os.geteuid() != 0 or not all(map(shutil.which, programs)):
        note("nodes: not measured, it needs root, iproute2, nginx, openssl and curl")
        return []
    if importlib.util.find_spec("botocore") is None:
        note("nodes: not measured, it needs botocore (pip install 'ffserve[remote]')")
        return []
    size = max(int(store.WHOLE_SIZE * scale / 2), store.MIN_SIZE)
    data = store.remote_data(bench.folder, sample_size, size)

    def run(*, cached: bool, kill: bool = False) -> Result:
        return _run(bench, data, cached=cached, kill=kill)

    def times(result: Result, base: Result | None) -> float:
        assert base is not None
        return result.total("seconds") / base.total("seconds")

    def share(result: Result, _: Result | None) -> float:
        return COUNT * result.total("received") / result.total("size")

    def slowest(result: Result, _: Result | None) -> float:
        return result.total("slowest_s")

    shared = (
        Row("nodes/first", "four nodes with a cache network, first epoch / without", times,
            limit=0.35, at_most=True),
        Row("nodes/bytes", "bytes from the origin / size of the samples", share, limit=1.02,
            at_most=True),
    )  # fmt: skip
    killed = (
        Row("nodes/killed/bytes", "the same with a member killed in mid-epoch", share, limit=1.3,
            at_most=True),
        Row("nodes/killed/slowest", "the slowest batch then", slowest, "s", 2.0, at_most=True),
    )  # fmt: skip
    return [
        Group(
            f"four nodes, remote files of {data.name}, {store.RATE / 1e6:.0f} MB/s",
            Yardstick("without a cache", lambda: run(cached=False)),
            (
                Contestant("cache network", lambda: run(cached=True), shared),
                Contestant("member killed", lambda: run(cached=True, kill=True), killed),
            ),
            lambda: store.make(data),
            {"state": "remote", "bytes": data.mean, "batch": BATCH, "clients": COUNT},
        )
    ]


def _run(bench: Bench, data: BenchmarkData, *, cached: bool, kill: bool) -> Result:
    with contextlib.ExitStack() as stack:
        folder = os.path.join(bench.folder, "origin")
        served = stack.enter_context(store.static_origin(folder, store.RATE))
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes-", dir=bench.folder))
        victim, environment = 0, {}
        if cached:
            address = served.endpoint.partition("//")[2].partition(":")[0]
            found = stack.enter_context(members(place, address))
            if kill:
                victim, environment = list(found.items())[-1]
        daemons: list[Daemon] = []
        for k in range(COUNT):
            options = ["--store-directory", f"{place}/store-{k}", "--store-size", "4GiB"]
            if cached:
                options += ["--store-cache", f"unix:{place}/{k}/run/cache.sock"]
            daemons.append(stack.enter_context(bench.daemon(data, data.size // 2, options)))
        case = {
            **served.case(), "urls": store._urls(data), "warm": 1, "payload": data.size,
            "sockets": [each.socket for each in daemons], "victim": victim,
            "environment_of_victim": environment,
        }  # fmt: skip
        return bench.run(f"{HERE}:epoch", data, **case)


if __name__ == "__main__":
    print(json.dumps(read(json.loads(sys.argv[1]))))
