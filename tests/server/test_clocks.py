"""Clocks that jump, and clients and daemons whose clocks differ: nobody notices."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import Daemon, sample, started, write
from service_manager import managed

COUNT = 300
DAY_S = 86_400
JUMPS = (400 * DAY_S, -400 * DAY_S, -DAY_S // 4, 60_000 * DAY_S, 0)
"""Seconds by which the clock of the daemon is wrong, one after another; one is the year 2190."""
pytestmark = pytest.mark.check


def samples_of(seed: int) -> list[bytes]:
    return [sample(index, (0, 1, 513, 5000), seed) for index in range(COUNT)]


@pytest.fixture
def jumping(tmp_path: Path) -> Iterator[tuple[Daemon, Path]]:
    """A daemon with a small store, and the file that says by how much its clock is wrong."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    store = "--store-directory", str(tmp_path / "store"), "--store-size", str(1 << 20)
    patch = (
        # Only Python reads CLOCK_REALTIME; a time namespace does not change it.
        f"import pathlib, time\nusual, place = time.time, pathlib.Path({str(offset)!r})\n"
        "time.time = lambda: usual() + float(place.read_text() or 0)\n"
        "import ffserve.config as c, ffserve.store.directory as d\n"
        f"c.MIN_STORE_SIZE = 0\nd.Store.__init__.__defaults__ = (None, {64 << 10})\n"
    )
    daemon = Daemon(arena="2MiB", options=store, expect=[r"remote files: store /.*"], patch=patch)
    with started(daemon):
        yield daemon, offset


def test_a_clock_that_jumps_stops_no_fetch_and_no_eviction(
    jumping: tuple[Daemon, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has room for a third of the files, and the memory for a part of that."""
    from origins import http_origin

    daemon, offset = jumping
    monkeypatch.setenv("FFSERVE_START", "0")
    with http_origin() as origin:
        urls, truth = [], []
        for seed in range(6):
            path = write(tmp_path / f"{seed}.ffr", samples_of(seed))
            urls.append(origin.put(f"{seed}.ffr", Path(path).read_bytes()))
            truth += samples_of(seed)
        chance = random.Random(0)
        with daemon.open(urls) as reader:
            for epoch, jump in enumerate(JUMPS):
                offset.write_text(str(jump))
                order = chance.sample(range(len(truth)), len(truth))
                reader.announce(order, epoch=epoch)
                for first in range(0, len(order), 100):
                    part = order[first : first + 100]
                    if first == 900:
                        offset.write_text(str(-30 * DAY_S))
                    assert [bytes(each) for each in reader.read(part)] == [truth[k] for k in part]
                assert 0 <= daemon.status()["uptime_s"] < 1000
    used = sum(path.stat().st_blocks for path in (tmp_path / "store").rglob("*")) * 512
    assert used < 4 << 20


READ = """
import sys, ffserve
with ffserve.open(sys.argv[2], server=sys.argv[1]) as reader:
    reader.announce(range(len(reader)))
    for first in range(0, len(reader), 50):
        print(*(bytes(one).hex() or "-" for one in reader.read(range(first, first + 50))))
    leases = reader.leases(range(10)) if hasattr(reader, "leases") else None
"""


def in_time_namespace(offset: str, *command: str) -> list[str]:
    return ["unshare", "--time", "--monotonic", offset, "--boottime", offset, *command]


def needs_time_namespaces() -> None:
    tried = subprocess.run(in_time_namespace("1000", "true"), capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("needs root, time namespaces and unshare of util-linux 2.36")


def test_a_client_whose_clock_is_thirty_years_ahead(tmp_path: Path) -> None:
    needs_time_namespaces()
    path = write(tmp_path / "a.ffr", samples_of(0))
    with started(Daemon()) as daemon:
        for _ in range(2):
            command = in_time_namespace("1000000000", sys.executable, "-c", READ)
            done = subprocess.run(
                [*command, daemon.socket, path], capture_output=True, text=True, timeout=60
            )
            assert not done.returncode and not done.stderr, done.stderr
            assert [bytes.fromhex(e.strip("-")) for e in done.stdout.split()] == samples_of(0)
        assert daemon.cache()["blocks_read"] < 2 * COUNT, "the second one found the samples"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_successor_whose_clock_is_far_ahead_or_behind(tmp_path: Path, number: int) -> None:
    """As after the start of a container again: its time namespace has other offsets."""
    needs_time_namespaces()
    path = write(tmp_path / "a.ffr", samples_of(0))
    with managed() as daemon:
        plain, reader = daemon.command, daemon.open(path)
        for offset in ("1000000000", "0", "500000"):
            assert [bytes(each) for each in reader.read(range(COUNT))] == samples_of(0)
            daemon.end(number)
            daemon.command = in_time_namespace(offset, *plain)
            daemon.start()
            with daemon.open(path) as other:
                assert [bytes(each) for each in other.read(range(COUNT))] == samples_of(0)
            assert daemon.cache()["blocks_read"] == 0, "the successor has all samples"
        reader.close()
