"""The harness of `benchmarks`: what it computes, and that its cases run, small."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import mmap
import os
import re
import resource
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ffserve
from benchmarks import picture, readme
from benchmarks import rows as all_rows
from benchmarks.harness import cgroup, kinds, measuring, peers, report
from benchmarks.harness.installation import THIS
from benchmarks.harness.measuring import (
    Bench,
    Contestant,
    ContestantFailed,
    ContestantHung,
    Group,
    Result,
    Row,
    Yardstick,
    measure,
    ratio,
)
from benchmarks.harness.relay import relayed
from benchmarks.subjects import engine, peer_rows
from ffserve.bench import ceilings, samples
from ffserve.bench.child_processes import running
from ffserve.bench.samples import MIB, BenchmarkData
from ffserve.engine import io
from ffserve.engine.cached import cached_pages
from ffserve.errors import UsageError

KIB = 1024


def ran(rate: float, **more: Any) -> Result:
    """One client that delivered at a rate."""
    figures = {"samples": 10, "size": int(rate), "seconds": 1.0, "cpu": 1e-4, "batch_s": [0.1, 0.2]}
    return Result(({**figures, **more},))


def group(
    *contestants: Contestant, base: list[float], substitute: bool = False, **more: Any
) -> Group:
    rates = iter(base)
    yardstick = Yardstick("a yardstick", lambda: ran(next(rates)), substitute)
    return Group("title", yardstick, contestants, **more)


def contestant(
    name: str, rates: list[float], limit: float | None = None, **more: Any
) -> Contestant:
    left = iter(rates)
    row = Row(name, name, ratio, limit=limit)
    return Contestant(name, lambda: ran(next(left)), (row,), **more)


# ---------------------------------------------------------------- arithmetic


def test_a_row_is_the_median_of_the_ratios_of_the_turns() -> None:
    found = measure(group(contestant("x", [50, 90, 80], limit=0.5), base=[100, 100, 200]), 3)
    [row] = found
    assert row["value"] == pytest.approx(0.5)
    assert (row["low"], row["high"], row["turns"]) == (0.4, 0.9, 3)
    assert row["reached"] is True
    assert row["mb_s"] == pytest.approx(80e-6)
    assert row["yardstick_mb_s"] == pytest.approx(100e-6)
    assert row["cpu_us"] == pytest.approx(10)


def test_every_other_turn_goes_the_other_way_round() -> None:
    order: list[str] = []

    def noting(name: str) -> Result:
        order.append(name)
        return ran(1)

    both = tuple(
        Contestant(name, lambda name=name: noting(name), (Row(name, name, ratio),)) for name in "ab"
    )
    measure(Group("", Yardstick("y", lambda: noting("y")), both), 3)
    assert "".join(order) == "yabbayyab"


def test_limits_go_both_ways_and_a_substitute_judges_nothing() -> None:
    low = Row("low", "", lambda result, base: 3.0, "µs", limit=4.0, at_most=True)
    high = dataclasses.replace(low, name="high", limit=2.0)
    free = dataclasses.replace(low, name="free", limit=None)
    one = Contestant("x", lambda: ran(1), (low, high, free))
    rows = measure(group(one, base=[1]), 1)
    assert [row["reached"] for row in rows] == [True, False, None]
    rows = measure(group(one, base=[1], substitute=True), 1)
    assert [row["reached"] for row in rows] == [None, None, None]


def test_several_clients_and_a_daemon_are_added_up() -> None:
    clients = (
        {
            "samples": 10,
            "size": 100,
            "seconds": 1.0,
            "cpu": 1e-3,
            "anonymous": 5,
            "batch_s": [0.1] * 99,
        },
        {"samples": 30, "size": 300, "seconds": 2.0, "cpu": 1e-3, "anonymous": 7, "batch_s": [1.0]},
    )
    result = Result(clients, {"cpu_s": 2e-3, "pss": 11, "blocks_read": 8, "wall_s": 2.0})
    assert result.rate == 250 and result.rates == [100, 150]
    assert result.cpu_us == pytest.approx(100)
    assert result.total("anonymous") == 12
    assert result.batch_s(50) == pytest.approx(0.1)
    assert result.batch_s(99.9) > 0.9
    assert kinds._miss_us(result, None) == pytest.approx(250)


def test_only_an_optional_contestant_may_fail() -> None:
    def fail() -> Result:
        raise ContestantFailed("it broke")

    broken = Contestant("x", fail, (Row("x", "x", ratio),), optional=True)
    left_out: dict[str, str] = {}
    rows = measure(group(broken, contestant("y", [1, 1]), base=[1, 1]), 2, left_out)
    assert [row["contestant"] for row in rows] == ["y"]
    assert left_out == {"x": "it broke"}
    assert report.reasons(left_out) == ["left out: x: it broke"]
    with pytest.raises(ContestantFailed):
        measure(group(dataclasses.replace(broken, optional=False), base=[1]), 1)


def test_only_keeps_the_contestants_of_matching_rows() -> None:
    both = group(contestant("hot/a", []), contestant("cold/b", []), base=[])
    kept = both.only(("cold",))
    assert kept is not None and [c.name for c in kept.contestants] == ["cold/b"]
    assert both.only(("warm",)) is None
    assert both.only(()) is both


def test_the_verdict_names_the_fastest_peer_and_missed_limits() -> None:
    labels = {"state": "hot", "bytes": 4096}
    found = [
        *measure(group(contestant("ffserve read", [80], limit=0.9), contestant("LMDB", [40]),
                       contestant("slow", [10]), contestant("nothing", [90]), base=[100],
                       labels=labels), 1),
    ]  # fmt: skip
    for row in found:
        row["name"] = f"hot/x/{row['contestant']}"
    said = report.verdict(found)
    assert "0.80 of a yardstick, 2.0 times" in said[0] and "LMDB, 0.40" in said[0]
    assert said[1] == "0 of 1 limits are reached."
    assert "hot/x/ffserve read (0.80, >= 0.90)" in said[2]


# ---------------------------------------------------------------- data


def test_sizes_are_named_as_people_name_them() -> None:
    assert [samples.size_label(n) for n in (100, 4096, 102_400, 1 << 20, 1500)] == [
        "100B", "4KiB", "100KiB", "1MiB", "1500B",
    ]  # fmt: skip


def test_of_a_users_files_the_first_samples_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "mine.ffr"
    with ffserve.create(path) as writer:
        for size in (100, 200, 300, 400):
            writer.write(bytes(size))
    some = samples.existing([str(path)], 650)
    assert (some.count, some.size, some.mean) == (3, 600, 200)
    assert samples.existing([str(path)], 50).count == 1
    assert [len(sample) for sample in some.samples()] == [100, 200, 300]
    with ffserve.create(tmp_path / "none.ffr") as writer:
        writer.write(b"")
    with pytest.raises(UsageError):
        samples.existing([str(tmp_path / "none.ffr")], 650)


@pytest.mark.check
@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_peer_reads_all_bytes_of_a_batch(peer: peers.Peer, even: bool, tmp_path: Path) -> None:
    """Some leave what they opened to the collector."""
    if peer.missing or peer.open is None or peer.installation != THIS or peer.name == "TFRecord":
        pytest.skip(peer.missing or "it runs in `make interop`")
    path = tmp_path / "some.ffr"
    sizes = [700] * 40 if even else [1 + 37 * k for k in range(40)]
    with ffserve.create(path) as writer:
        for size in sizes:
            writer.write(bytes(size))
    data = samples.existing([str(path)], 1 << 30)
    peer.make(str(tmp_path), data)
    directory = peer.files_path(str(tmp_path), data)
    chosen = np.array([5, 39, 0, 7, 5]) if not peer.in_order else np.arange(40)
    assert peer.open(directory)(chosen) == sum(sizes[k] for k in chosen)
    gc.collect()


@pytest.mark.interop
@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("step", [4 * KIB, 100 * KIB])
def test_a_peer_takes_part(peer: peers.Peer, step: int, bench: Bench, tmp_path: Path) -> None:
    """In memory and from disk; two jobs at once. Every sample has its bytes."""
    if peer.missing:
        pytest.skip(peer.missing)
    data = samples.generated(tmp_path, step, 16 << 20)
    data.make()
    for clients, cold in ((1, False), (1, True), (2, True)):
        run = kinds.peer_contestant(bench, peer, data, 16, clients, "", cold=cold).run
        for client in run().clients:
            assert client["size"] == step * client["samples"] > 0


def test_the_adapter_for_ffrecord_runs_with_its_drop_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ffrecord", ffserve)
    data = samples.generated(tmp_path, 100, 10_000)
    data.make()
    peer = peers.BY_NAME["ffrecord"]
    peer.make(str(tmp_path), data)
    assert peer.open(peer.files_path(str(tmp_path), data))(np.array([3, 99, 3])) == 300


# ---------------------------------------------------------------- processes


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    with Bench(str(tmp_path), 0.02) as made:
        yield made


def small(folder: Path, step: int = 4 * KIB) -> BenchmarkData:
    data = samples.generated(folder, step, 1 << 20)
    data.make()
    return data


def test_files_in_memory_stay_there_while_a_contestant_runs(tmp_path: Path) -> None:
    path, empty = tmp_path / "data", tmp_path / "empty"
    path.write_bytes(bytes(1 << 20))
    empty.touch()
    with open(path, "rb") as file:

        def pages() -> int:
            try:
                return cached_pages(file.fileno(), 0, 1 << 20)
            except OSError as error:
                pytest.skip(f"the kernel does not tell what is in memory: {error}")

        if os.geteuid() and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 1 << 20:
            pytest.skip("this user may not lock 1 MiB")
        with measuring.held_in_memory([str(path), str(empty)]):
            samples.evict([str(path)])
            assert pages() == (1 << 20) // resource.getpagesize()
        assert str(path) not in Path("/proc/self/maps").read_text(), "it is unlocked"


@pytest.mark.check
def test_every_client_reads_in_an_order_of_its_own(bench: Bench, tmp_path: Path) -> None:
    result = bench.run("benchmarks.harness.contestants:read_batch", small(tmp_path), clients=3)
    assert len(result.clients) == 3
    for client in result.clients:
        assert client["size"] == 4 * KIB * client["samples"] > 0
        assert len(client["batch_s"]) * 64 == client["samples"]
        assert (
            client["cpu"] > 0 and client["anonymous"] > 0 and client["pss"] >= client["anonymous"]
        )


def test_a_contestant_that_fails_is_quoted(bench: Bench, tmp_path: Path) -> None:
    gone = samples.generated(tmp_path, 4 * KIB, 1 << 20)
    with pytest.raises(ContestantFailed, match="ffr"):
        bench.run("benchmarks.harness.contestants:read_batch", gone)


@pytest.mark.check
def test_hot_data_are_read_once_by_the_daemon(bench: Bench, tmp_path: Path) -> None:
    data = small(tmp_path)
    found = measure(kinds.hot(bench, data, 16, 2, {"read_batch": 0.1, "lease": None}), 1)
    assert [row["name"] for row in found] == [
        "hot/4KiB/batch16/clients2/read_batch", "hot/4KiB/batch16/clients2/lease",
    ]  # fmt: skip
    assert all(row["value"] > 0 and row["clients"] == 2 for row in found)
    assert bench.hot_daemon(data).status()["cache"]["blocks_read"] == data.count


@pytest.mark.check
def test_a_contestant_that_does_not_end_has_failed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client of two ends, the other never does; and one is never ready."""
    (tmp_path / "never.py").write_text(
        "import time\n"
        "def ends(case):\n"
        "    yield 1, 1\n"
        "    if case['client']: time.sleep(1000)\n"
        "    yield 1, 1\n"
        "def begins(case):\n"
        "    time.sleep(1000)\n"
        "    yield 1, 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for function, clients in (("never:ends", 2), ("never:begins", 1)):
        with pytest.raises(ContestantHung, match=f"{function} did not end within 2 s"):
            bench.run(function, clients=clients, warm=1, timeout_s=2)


def own_environment(folder: Path, name: str) -> Path:
    """A virtual environment where the benchmark looks for the packages of a peer."""
    own = folder / "peers" / name
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", own], check=True)
    return own


def test_a_peer_may_have_an_interpreter_of_its_own(bench: Bench, tmp_path: Path) -> None:
    """Its environment has a package that this one lacks, and another release of one that it has."""
    own = own_environment(tmp_path, "a-peer")
    [site] = own.glob("lib/python*/site-packages")
    (site / "only_there.py").write_text(
        "import click, numpy\ndef read(case):\n    yield {'click': click.release}\n"
    )
    (site / "click.py").write_text("release = 'its own'")
    peer = peers.Peer(
        "a peer", "a-peer", "only_there", lambda data, directory: None, prefix=str(tmp_path)
    )
    assert peer.missing is None
    result = bench.run("only_there:read", installation=peer.installation)
    assert result.clients == ({"click": "its own"},)
    assert dataclasses.replace(peer, package="another").missing is not None


@pytest.mark.check
def test_a_peer_that_hangs_is_left_out_and_does_not_run_again(bench: Bench, tmp_path: Path) -> None:
    own = own_environment(tmp_path, "a-peer")
    (own / "bin" / "python").unlink()
    (own / "bin" / "python").write_text(f"#!/bin/sh\necho >>{tmp_path}/runs\nsleep 1000\n")
    (own / "bin" / "python").chmod(0o755)
    peer = peers.Peer(
        "a peer", "a-peer", "only_there", lambda *_: None, prefix=str(tmp_path), timeout_s=3.0
    )
    data = small(tmp_path)
    os.mkdir(peer.files_path(bench.folder, data))
    for batch in (16, 32):
        name, left_out = f"hot/4KiB/batch{batch}/clients1", dict[str, str]()
        group = kinds.hot(bench, data, batch, 1, {"read_batch": None}, [peer])
        [row] = measure(group, 2, left_out)
        assert row["name"] == f"{name}/read_batch"
        assert left_out == {
            f"{name}/a peer": "benchmarks.harness.peers:read did not end within 3 s"
        }
    assert (tmp_path / "runs").read_text() == "\n"


ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "error"}


# ---------------------------------------------------------------- the developers' part

ROOT = Path(__file__).parents[2]


def recorded(name: str, value: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "value": value, "low": value, "high": value, "unit": "×",
        "contestant": "ffserve x", "at_most": False, **more,
    }  # fmt: skip


def test_a_row_is_worse_if_its_best_turn_is_worse() -> None:
    old = [recorded("a", 0.8), recorded("b", 0.8), recorded("c", 4.0, at_most=True)]
    slow, edge = 0.8 * (1 - report.TOLERANCE) - 0.01, 0.8 * (1 - report.TOLERANCE) + 0.01
    assert report.compare(old, [recorded("a", edge)]) == ([], 0, 1)
    worse, _, _ = report.compare(old, [recorded("a", slow), recorded("b", slow, high=0.8)])
    assert [line.split(":")[0] for line in worse] == ["a"]
    worse, better, compared = report.compare(
        old, [recorded("b", 1.2), recorded("c", 6.0, at_most=True)]
    )
    assert ([line.split(":")[0] for line in worse], better, compared) == (["c"], 1, 2)


def test_times_peers_and_new_rows_are_not_compared() -> None:
    old = [recorded("a", 0.8, unit="ms"), recorded("b", 0.8, contestant="LMDB"), recorded("c", 0.8)]
    new = [recorded("a", 0.1, unit="ms"), recorded("b", 0.1, contestant="LMDB"), recorded("d", 0.1)]
    assert report.compare(old, new) == ([], 0, 0)


def benchmarks(*arguments: str | Path, code: int = 0, error: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stderr if error else done.stdout


TINY = ("--scale", "0.02", "--seconds", "0.02", "--turns", "1")


@pytest.mark.check
def test_rows_are_recorded_a_few_at_a_time_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    some = (*TINY, "--folder", tmp_path, "--no-peers", "--only", "tokens")
    benchmarks(*some, "--record", file)
    first = json.loads(file.read_text())
    [row] = [row for row in first["rows"] if row["name"] == "tokens/100B/numpy"]
    row["value"] = 1000.0
    first["rows"].insert(0, recorded("another", 1.0))
    file.write_text(json.dumps(first))
    old = tmp_path / "old.json"
    old.write_text(json.dumps(first))
    assert "1 worse" in benchmarks(*some, "--compare", old, "--record", file, code=1)
    again = json.loads(file.read_text())
    assert [row["name"] for row in again["rows"]] == [row["name"] for row in first["rows"]]
    assert again["rows"][0]["value"] == 1.0 and again["rows"][1]["value"] < 1000
    assert benchmarks(*some, "--record", file, "--resume", "--list") == ""
    one = (*some[:-2], "--only", "hot/4KiB/batch64")
    said = benchmarks(*one, "--record", file, "--resume", "--minutes", "0")
    assert "not measured after 0 minutes: hot, 4KiB, batches of 64, 2 clients" in said
    assert json.loads(file.read_text()) == again


@pytest.mark.check
def test_rows_of_two_machines_are_not_mixed_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    some = (*TINY, "--folder", tmp_path, "--no-peers", "--only", "tokens", "--record", file)
    benchmarks(*some)
    first = json.loads(file.read_text())
    for name, other in (("cpu", "Another CPU"), ("cores", 999), ("disk_limit", "1 MB/s")):
        file.write_text(json.dumps({**first, "machine": {**first["machine"], name: other}}))
        before = file.read_text()
        said = benchmarks(*some, code=2, error=True)
        assert f"another machine ({name}: {other}" in said and "a new file" in said
        assert file.read_text() == before
    file.write_text(json.dumps({**first, "machine": {**first["machine"], "kernel": "newer"}}))
    benchmarks(*some)


def test_a_recorded_row_goes_when_its_contestant_fails(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    a, b = recorded("a", 1.0), recorded("b", 2.0)
    facts: dict[str, Any] = {"cpu": "x"}
    report.record(file, report.document(facts, [a, b], [], {}))
    report.record(file, report.document(facts, [], [], {"a": "it broke"}))
    found = json.loads(file.read_text())
    assert found["rows"] == [b] and found["left_out"] == {"a": "it broke"}
    report.record(file, report.document(facts, [a], [], {}))
    found = json.loads(file.read_text())
    assert found["rows"] == [b, a] and found["left_out"] == {}


def test_a_peer_that_failed_stands_in_the_readme(tmp_path: Path) -> None:
    name = "jobs/{}/depth128/{}"
    rows = [
        recorded(name.format(size, who), value, description=who)
        for size, who, value in [
            ("4KiB", "one-order", 1.5), ("4KiB", "own-orders", 0.9), ("100KiB", "one-order", 1.2),
            ("100KiB", "own-orders", 1.0), ("4KiB", "slow", 0.125), ("4KiB", "fast", 0.5),
        ]
    ]  # fmt: skip
    left_out = {name.format("4KiB", "broken"): "it broke"}
    lines = readme._two_jobs({"rows": rows, "left_out": left_out}).splitlines()[2:]
    assert lines == [
        "| ffserve, one order for both jobs | 1.50 | 1.20 |",
        "| ffserve, orders of their own | 0.90 | 1.00 |",
        "| fast | 0.50 |  |",
        "| slow | 0.12 |  |",
        "| broken | failed |  |",
    ]


@pytest.mark.check
def test_the_disk_is_slower_for_all_within_a_limit(tmp_path: Path) -> None:
    """fio and a client without a daemon read 20 MB a second, of 4 KiB reads 1000."""
    if no_disk_limit(tmp_path):
        pytest.skip("it needs fio, root and a block device")
    before = set(Path("/sys/fs/cgroup").rglob("ffserve-bench-*"))
    file = tmp_path / "rows.json"
    for name, limit, most in (("100KiB", "20,100000", 30.0), ("4KiB", "10000,1000", 8.0)):
        only = (
            "--only",
            f"stream/{name}/engine" if name == "100KiB" else f"cold/{name}/depth64/engine64",
        )
        benchmarks("--scale", "0.02", "--seconds", "1", "--turns", "1", "--no-peers",
                   "--folder", tmp_path, *only, "--disk-limit", limit, "--json", file)  # fmt: skip
        found = json.loads(file.read_text())
        [row] = found["rows"]
        assert 0 < row["mb_s"] < most and 0 < row["yardstick_mb_s"] < most
        assert found["machine"]["disk_limit"].startswith(limit.partition(",")[0])
    left = set(Path("/sys/fs/cgroup").rglob("ffserve-bench-*")) - before
    assert all(Path("/proc", group.name.split("-")[2]).exists() for group in left)


def test_a_package_has_no_more_page_cache_than_a_daemon_has_arena(tmp_path: Path) -> None:
    """Its 160 MiB are in the page cache when it is ready; 16 MiB and what it may allocate stay."""
    if (reason := cgroup.missing()) is not None:
        pytest.skip(reason)
    path = tmp_path / "data"
    path.write_bytes(bytes(160 * MIB))
    samples.evict([str(path)])
    program = """
import os, sys
input()
fd = os.open(sys.argv[1], os.O_RDONLY)
while os.read(fd, 1 << 20):
    pass
print("ready", flush=True)
input()
"""
    with (
        cgroup.limited(memory_size=cgroup.UNLIMITED) as group,
        running(
            [sys.executable, "-c", program, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as process,
    ):  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        group.join(process.pid)
        process.stdin.write(b"go\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        before = resident(path)
        with group.keeping_cached(16 * MIB):
            after = resident(path)
        assert process.poll() is None
    most = 17 * MIB + cgroup.ALLOCATED_AT_ONCE  # 1 MiB: what processors have charged ahead
    if before <= most:
        pytest.skip("this machine has no memory for so much page cache")
    assert after <= most


@pytest.mark.parametrize("warm", [False, True])
def test_a_virtual_disk_is_warmed_and_the_page_cache_is_not(tmp_path: Path, warm: bool) -> None:
    path, size = tmp_path / "data", 33 * MIB + 5  # the last read is short
    path.write_bytes(bytes(size))
    try:
        cgroup.disk_of(str(path))
    except cgroup.NoCgroup as reason:
        pytest.skip(str(reason))
    samples.evict([str(path)])
    before = cgroup.process_read(os.getpid())
    with Bench(str(tmp_path), 0.1, warm_disk=warm) as bench:
        bench.from_disk([str(path)])
    read = cgroup.process_read(os.getpid()) - before
    assert (read >= size) == warm
    assert resident(path) == 0


def resident(path: Path) -> int:
    """Return how many bytes of a file are in the page cache."""
    with open(path, "rb") as file:
        return cached_pages(file.fileno(), 0, path.stat().st_size) * mmap.PAGESIZE


def no_disk_limit(folder: Path) -> bool:
    try:
        with cgroup.limited(read_rate=1_000_000, path=str(folder)):
            return not ceilings.has_fio()
    except cgroup.NoCgroup:
        return True


@pytest.mark.soak  # 17 s
def test_another_checkout_takes_turns_with_this_one(tmp_path: Path) -> None:
    """The other one is a copy of this tree's package, changed where it would be seen."""
    other = tmp_path / "other"
    leave = shutil.ignore_patterns("__pycache__", "bench")
    shutil.copytree(ROOT / "ffserve", other / "ffserve", ignore=leave)
    folder = tmp_path / "data"
    some = (*TINY, "--folder", folder, "--only", "hot/4KiB/batch64/clients1")
    file = tmp_path / "both.json"
    said = benchmarks(*some, "--against", other, "--json", file)
    assert "this/other" in said
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert sorted(rows) == [
        f"hot/4KiB/batch64/clients1/{name}" for name in ("drop_in", "read", "read_batch")
    ]  # fmt: skip
    for row in rows.values():
        assert row["value"] > 0 and row["other"] > 0
        assert row["low"] == row["quotient"] == row["high"]
    (other / "ffserve" / "cli" / "daemon" / "serve.py").unlink()
    one = (*some[:-1], f"{some[-1]}/read_batch")
    said = benchmarks(*one, "--against", other, code=1)  # its daemon does not start
    assert "read_batch is left out" in said and "ffserve.cli.daemon.serve" in said


@pytest.mark.soak  # 10 s
def test_the_engine_alone_is_measured(bench: Bench, tmp_path: Path) -> None:
    data = samples.generated(tmp_path, 4 * KIB, 1023 * 4 * KIB, "at-blocks")
    group = engine.group(bench, data)
    names = group.row_names()
    assert {name.split("/")[2] for name in names} == set(io.probe())
    found = measure(group, 1)
    assert [row["name"] for row in found] == names
    assert all(row["value"] > 0 for row in found)


def test_every_row_is_explained() -> None:
    text = (ROOT / "docs" / "BENCHMARKS.md").read_text()
    patterns = [
        re.sub(
            "SIZE|KIND|PEER|WHO", "[^/]+", re.sub(r"(?<=[a-z])(?<!Ki)B\b", r"\\d+", word)
        ).replace("clientsC", r"\w+")
        for word in re.findall(r"`([a-z-]+/[^` ]+)`", text)
    ]
    with Bench(str(ROOT), 1.0) as bench:
        found, _ = kinds.installed_peers()
        for each in all_rows.groups(bench, found):
            for one in each.contestants:
                for row in one.rows:
                    known = any(re.fullmatch(p.replace("…", ".*"), row.name) for p in patterns)
                    assert known, row.name
                    if row.limit is not None:
                        assert f"{row.limit:g}" in text


@pytest.mark.soak
def test_all_cases_run_and_the_picture_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    benchmarks(*TINY, "--folder", tmp_path, "--record", file)
    rows = json.loads(file.read_text())["rows"]
    names = set(benchmarks(*TINY, "--folder", tmp_path, "--list").splitlines())
    assert {row["name"] for row in rows} == names
    assert all(row["value"] >= 0 for row in rows)
    if importlib.util.find_spec("matplotlib") is None:
        return
    benchmarks("--draw-only", "--record", file, "--picture", tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_bar_of_the_picture_says_in_which_order_was_read() -> None:
    """A fast bar of an easier order stood beside ours without a word."""

    def row(who: str, mb_s: float) -> dict[str, Any]:
        return {"name": f"loaders/4KiB/{who}", "bytes": 4000, "mb_s": mb_s}

    rows = [row("torch-LMDB", 4.0), row("ffserve", 16.0), row("WebDataset", 8.0)]
    rows += [row("FFCV-quasi-random", 32.0), {**row("torch-LMDB", 4.0), "name": "cold/4KiB/LMDB"}]
    assert picture.bars(rows, "4KiB") == [
        ("FFCV-quasi-random", 8000, "own order"),
        ("ffserve", 4000, "random order"),
        ("WebDataset", 2000, "shuffle buffer"),
        ("torch-LMDB", 1000, "random order"),
    ]
    assert picture.bars(rows, "100KiB") == []
    recorded = json.loads((ROOT / "docs/bench.json").read_text())["rows"]
    for size in picture.PANELS:
        shown = picture.bars(recorded, size)
        assert {bar.name for bar in shown} == peer_rows.PEERS.keys()
        assert {bar.order for bar in shown} == picture.COLOURS.keys()


# ---------------------------------------------------------------- loaders of several packages


def test_peers_stand_in_the_documents_when_they_are_recorded() -> None:
    assert readme._peers({"rows": []}) == ""
    values = {"cpu": 30.4, "design": -1.0, "lost": 0.0}
    rows = [{"name": f"peers/100KiB/x/{what}", "value": v} for what, v in values.items()]
    head, _, line = readme._peers({"rows": rows}).strip().splitlines()
    cells = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert cells["CPU µs"] == "30" and cells["lost, %"] == "0.0" and cells["design effect"] == ""


def test_a_relay_counts_requests_and_makes_them_longer() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline():
                while self.rfile.readline() not in (b"\r\n", b""):
                    pass
                self.wfile.write(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as origin:
        threading.Thread(target=origin.serve_forever, daemon=True).start()
        address = str(origin.server_address[0]), int(origin.server_address[1])
        with relayed(address, 0.05) as relay:
            with socket.create_connection(("127.0.0.1", relay.port)) as client:
                for _ in range(3):
                    begun = time.monotonic()
                    client.sendall(b"GET /x HTTP/1.1\r\nHost: y\r\n\r\n")
                    assert client.recv(1000) == answer
                    assert time.monotonic() - begun >= 0.05
            assert (relay.requests, relay.received) == (3, 3 * len(answer))
        origin.shutdown()


@pytest.mark.check
def test_loaders_lose_and_double_nothing_or_say_so(bench: Bench, tmp_path: Path) -> None:
    """Over a small data set: ours goes on where its checkpoint was, torch's own begins again."""
    pytest.importorskip("torch")
    small, large = (peer_rows.numbered(str(tmp_path), size, 2048 * size) for size in (512, 1024))
    known = [peers.BY_NAME["preadv"]]
    notes: list[str] = []
    rows: dict[str, float] = {}
    for group in peer_rows.groups(bench, small, large, known, notes.append):
        failed: dict[str, str] = {}
        found = measure(group, 1, failed)
        assert not failed, failed
        rows |= {row["name"].partition("/")[2]: row["value"] for row in found}
    assert rows["1KiB/ffserve/lost"] == rows["1KiB/ffserve/doubled"] == 0
    assert rows["1KiB/torch-pread/lost"] == 0 and 40 <= rows["1KiB/torch-pread/doubled"] <= 60
    for who in ("ffserve", "torch-pread"):
        assert 0.3 < rows[f"1KiB/{who}/design"] < 3
        assert rows[f"1KiB/{who}/per-core"] == pytest.approx(1e6 / rows[f"1KiB/{who}/cpu"])
        assert min(rows[f"1KiB/{who}/{what}"] for what in ("pss", "first", "cpu")) > 0
    if peer_rows.rclone() is not None:
        assert 1 <= rows["1KiB/ffserve/bytes"] < 1.5 and rows["1KiB/ffserve/requests"] > 0


def test_every_loader_has_a_package() -> None:
    peer_loaders = pytest.importorskip("benchmarks.subjects.peer_loaders", exc_type=ImportError)
    assert peer_loaders.LOADERS.keys() == peer_rows.PEERS.keys()
    assert set(peer_rows.PEERS.values()) - {""} <= peers.BY_NAME.keys()
