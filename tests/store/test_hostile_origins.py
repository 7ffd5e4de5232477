"""Origins that turn hostile after they were opened, with an honest user beside them."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attacks
import numpy as np
import pytest
from attack_field import HOSTILE, Field
from daemon import Daemon, ready, serving, started
from origins import HttpOrigin, _Handler, _Server, http_origin

import ffserve
from ffserve.limits import MOST_ORIGINS, ORIGIN_THREADS

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
pytestmark = [
    pytest.mark.check,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes other users"
    ),
]

SUPPORT = Path(__file__).parents[1] / "support"
MOST_S, MOST_GROWN = 0.5, 200 << 20
COUNT = 4096
LINES = (r"remote files: store /.*", r"store: the origin does not answer.*")


@contextmanager
def origin_at(address: str, port: int = 0) -> Iterator[HttpOrigin]:
    """An origin at an address of this machine, or at all of them (0.0.0.0)."""
    origin = HttpOrigin()
    server = _Server((address, port), type("Handler", (_Handler,), {"origin": origin}))
    origin.url = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield origin
    finally:
        origin.recover()
        server.shutdown()
        thread.join()
        server.server_close()


def content_of(path: Path, count: int, seed: int) -> bytes:
    """A record file of samples of 1000 bytes that begin with their number."""
    chance = np.random.default_rng(seed)
    with ffserve.create(path) as writer:
        for index in range(count):
            sample = chance.integers(0, 1 << 62, 125)
            sample[0] = index
            writer.write(sample)
    content = path.read_bytes()
    path.unlink()
    return content


HANGING = f"""
import os, sys, threading, time
sys.path.insert(0, {str(SUPPORT)!r})
import aiohttp, fsspec.implementations.http, numpy as np
import ffserve, ffserve.formats.ffrecord
os.setgroups([]); os.setgid({HOSTILE}); os.setuid({HOSTILE})
os.environ["FFSERVE_START"] = "0"
readers = [ffserve.open(url, server=sys.argv[1]) for url in sys.argv[2:]]
print("ready", flush=True)
sys.stdin.readline()
def read(reader, first):
    while True:
        try:
            reader.read(range(first, first + 4))
        except ffserve.FFServeError:
            pass
for reader in readers:
    for k in range({ORIGIN_THREADS}):
        threading.Thread(target=read, args=(reader, 256 * k), daemon=True).start()
time.sleep(1000)
"""


@pytest.mark.attack
def test_sixty_four_origins_that_answer_the_table_and_then_hang(tmp_path: Path) -> None:
    store = tmp_path / "store"
    options = ["--store-directory", str(store), "--store-size", str(1 << 30)]
    options += ["--socket-mode", "0666"]
    with (
        serving(options=options, expect=LINES) as daemon,
        origin_at("0.0.0.0") as hostile,
        http_origin() as other,
    ):
        hostile.put("a.ffr", content_of(tmp_path / "a.ffr", COUNT, 0))
        port = hostile.url.rpartition(":")[2]
        urls = [f"http://127.0.0.{k + 1}:{port}/a.ffr" for k in range(MOST_ORIGINS)]
        fine = other.put("b.ffr", content_of(tmp_path / "b.ffr", COUNT, 1))
        local = str(daemon.directory / "local.ffr")
        attacks.write_samples(local)
        field = Field(daemon, local, "")
        quiet, _ = field.measure(2)
        before = daemon.private_size()
        with ready([sys.executable, "-c", HANGING, daemon.socket, *urls]) as attacker:
            hostile.stalled.set()
            assert attacker.stdin is not None
            attacker.stdin.write("\n")
            attacker.stdin.flush()
            time.sleep(2)
            reads, greetings = field.measure(4)
            begun = time.monotonic()
            with daemon.open(fine) as reader:
                for first in range(0, COUNT, 256):
                    batch = reader.read(range(first, first + 256))
                    assert [int(each.view(np.int64)[0]) for each in batch] == list(
                        range(first, first + 256)
                    )
            took_s = time.monotonic() - begun
            threads = len(os.listdir(f"/proc/{daemon.pid}/task"))
            assert threads < MOST_ORIGINS * ORIGIN_THREADS + 100
            assert daemon.private_size() - before < MOST_GROWN
        found = [1e3 * float(np.quantile(times, 0.99)) for times in (quiet, reads)]
        print(found, reads.max(), greetings.max(), took_s, threads)
        assert reads.max() < MOST_S and took_s < 5, (found, reads.max(), took_s)


# ---- names ------------------------------------------------------------------------------------

READ = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import ffserve, numpy as np
with ffserve.open(sys.argv[2], server=sys.argv[1]) as reader:
    print("ready", flush=True)
    first = int(sys.stdin.readline())
    try:
        while True:
            found = reader.read(range(first, first + 256))
            marks = {{int(each.view(np.int64)[1]) for each in found}}
            print(first, len(marks), *sorted(marks)[:2], flush=True)
            first += 256
    except (ffserve.FFServeError, IndexError) as error:
        print(type(error).__name__, error, flush=True)
"""


def test_a_name_that_leads_to_another_address_the_second_time(tmp_path: Path) -> None:
    """Its file has the same size, and another content and tag: no sample comes from there."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.0.1 data.test\n")
    inside = ["unshare", "-m", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    options = ["--store-directory", str(tmp_path / "store"), "--store-size", str(1 << 30)]
    patch = (
        "import ffserve.store.directory as d, ffserve.store.fetching as f\n"
        f"d.Store.__init__.__defaults__ = (None, {64 << 10})\nf.MOST_READ_AHEAD = 0\n"
    )
    daemon = Daemon(options=options, expect=LINES, patch=patch)
    daemon.command = [*inside, *daemon.command]
    first, second = (content_of(tmp_path / "a.ffr", COUNT, seed) for seed in (0, 1))
    assert len(first) == len(second)
    with started(daemon):
        with origin_at("127.0.0.1") as origin:
            origin.put("a.ffr", first)
            port = int(origin.url.rpartition(":")[2])
            command = [*inside, sys.executable, "-c", READ]
            attacker = ready([*command, daemon.socket, f"http://data.test:{port}/a.ffr"])
            reader = attacker.__enter__()
        hosts.write_text("127.0.0.1 localhost\n127.0.0.2 data.test\n")
        with origin_at("127.0.0.2", port) as other:
            other.put("a.ffr", second)
            other.put("a.ffr", second)
            assert reader.stdin is not None and reader.stdout is not None
            reader.stdin.write("0\n")
            reader.stdin.flush()
            said = reader.stdout.read()
        attacker.__exit__(None, None, None)
    print(said)
    assert "the object changed at the origin since it was opened" in said
    assert other.requests["GET"] + other.requests["HEAD"], "it was asked"
