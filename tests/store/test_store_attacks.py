"""Users that fill the daemon's store: the remote batches of an honest user come as before."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from daemon import ready, run_python, serving
from origins import HttpOrigin, http_origin
from test_daemon_store import BLOCK, daemon_options, served
from test_store_blocks import tiny_objects

from ffserve.store.directory import Store

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
pytestmark = [
    pytest.mark.attack,
    pytest.mark.check,
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users"),
]

HONEST, HOSTILE = 61_011, 61_012
COUNT = 18_000
FILES, SAMPLES = 20, 512
"""Files of the honest user, and samples of 4 KiB in each."""
WORST_S, FACTOR, FLOOR_S = 0.5, 5, 0.1
"""An honest batch takes WORST_S at most, and 99 of 100 FACTOR times what they take otherwise, or
FLOOR_S on a busy machine."""
BECOME = """
import json, os, sys, threading, time, itertools
import numpy as np
import ffserve, ffserve.reader, ffserve.client.announced, ffserve.store.credentials, msgpack
import fsspec, aiohttp, fsspec.implementations.http
os.environ["HOME"] = "/nonexistent"
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
"""
READ = """
order, times = 16 * np.random.default_rng(0).permutation(int(sys.argv[4]) // 16), []
with ffserve.open(json.loads(sys.argv[3]), server=sys.argv[2]) as reader:
    for first in range(0, len(order), 8):
        begun = time.monotonic()
        reader.read(order[first : first + 8])
        times.append(time.monotonic() - begun)
print(json.dumps(times))
"""
FILL = """
def fill(part):
    for number in itertools.count(part, 4):
        with ffserve.open(f"{sys.argv[3]}/tiny-{number % 1000}.ffr", server=sys.argv[2]) as reader:
            reader[0]
        print("ready", flush=True)

for part in range(3):
    threading.Thread(target=fill, args=(part,), daemon=True).start()
fill(3)
"""


@pytest.fixture(scope="module")
def origin() -> Iterator[HttpOrigin]:
    with http_origin() as running:
        yield running


def batches(socket: str, urls: list[str]) -> np.ndarray:
    """Return the seconds that each batch of the honest user takes; each needs eight new blocks."""
    count = FILES * SAMPLES
    done = run_python(BECOME + READ, HONEST, socket, json.dumps(urls), count)
    return np.array(json.loads(done.stdout))


@contextlib.contextmanager
def filling(socket: str, url: str) -> Iterator[None]:
    command = [sys.executable, "-c", BECOME + FILL, str(HOSTILE), socket, url]
    with ready(command):
        yield


def test_tiny_objects_made_the_batches_of_others_take_7_s(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    samples = [bytes(4096)] * SAMPLES
    urls = [served(origin, tmp_path, samples, f"{k}.ffr") for k in range(FILES)]
    tiny = origin.files[served(origin, tmp_path, [b"x"], "tiny.ffr").rpartition("/")[2]]
    for number in range(1000):
        origin.put(f"tiny-{number}.ffr", tiny)
    (tmp_path / "quiet").mkdir()
    (tmp_path / "full").mkdir()
    options = ("--socket-mode", "0666")
    with serving(**daemon_options(tmp_path / "quiet", options=options)) as daemon:
        quiet = batches(daemon.socket, urls)
    tiny_objects(tmp_path / "full" / "store", COUNT)
    store = Store(str(tmp_path / "full" / "store"), None, BLOCK)
    size = store.used
    store.abandon()
    with serving(**daemon_options(tmp_path / "full", size, options)) as daemon:
        with filling(daemon.socket, origin.url):
            attacked = batches(daemon.socket, urls)
        store_now = daemon.status()["store"]
    assert store_now["used"] <= size and store_now["evicted"] > 1000
    assert len(os.listdir(tmp_path / "full" / "store" / "objects")) > COUNT // 3
    p99, usual = np.quantile(attacked, 0.99), np.quantile(quiet, 0.99)
    print(f"p99 {usual * 1e3:.0f} -> {p99 * 1e3:.0f} ms, worst {attacked.max() * 1e3:.0f} ms")
    assert attacked.max() <= WORST_S, np.sort(attacked)[-5:]
    assert p99 <= max(FACTOR * usual, FLOOR_S), (usual, p99)
