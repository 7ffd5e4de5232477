"""The last release, installed from its wheel: its clients with today's daemon, today's clients with
its daemon, and the change from its daemon to today's.

`LAST` names its tag or commit. Where this checkout has no history, FFSERVE_LAST is the path of its
wheel, or a requirement for pip such as ffserve==0.1.0.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import DEADLINE_S, Daemon, sample, serving, started, until, write

import ffserve
from ffserve import protocol

pytestmark = pytest.mark.upgrades

ROOT = Path(__file__).parents[2]
LAST = (Path(__file__).parent / "LAST").read_text().strip()
SUPPORT = str(ROOT / "tests" / "support")
SAMPLES = [sample(index) for index in range(200)]
DIGEST = hashlib.sha256(b"".join(SAMPLES)).hexdigest()

READING = """
import asyncio, hashlib, os, sys
import numpy as np
import ffserve
from ffserve.torch import DataLoader, Dataset

path, server, site = sys.argv[1:]
assert ffserve.__file__.startswith(site), ffserve.__file__

def digest(samples):
    return hashlib.sha256(b"".join(bytes(each) for each in samples)).hexdigest()

with ffserve.open(path, server=server) as reader:
    everything = range(len(reader))
    print("missed", digest(reader.read(everything)))
    print("found", digest(reader.read(everything)))
    print("batch", digest(reader.read_batch(everything)))
    print("iterated", digest(reader))
    reader.announce(np.arange(len(reader)))
    print("announced", digest(reader.read(everything)))
    with reader.lease(everything) as leased:
        print("leased", digest(leased))

async def read():
    async with await ffserve.aio.open(path, server=server) as reader:
        return digest(await reader.read(everything))
print("async", asyncio.run(read()))

class Samples(Dataset):
    def process(self, indices, data):
        return [bytes(each) for each in data]
os.environ["FFSERVE_SOCKET"] = server
loader = DataLoader(Samples([path]), batch_size=16, num_workers=2, collate_fn=list)
print("loader", digest(each for batch in loader for each in batch))
"""
WAYS = ("missed", "found", "batch", "iterated", "announced", "leased", "async", "loader")

LOOPING = """
import hashlib, os, sys
import ffserve
path, server, stop, site = sys.argv[1:]
assert ffserve.__file__.startswith(site), ffserve.__file__
count, found = 0, set()
with ffserve.open(path, server=server) as reader:
    while not os.path.exists(stop):
        samples = reader.read(range(len(reader)))
        found.add(hashlib.sha256(b"".join(bytes(each) for each in samples)).hexdigest())
        count += 1
        if count == 1:
            print("ready", flush=True)
        if not reader.source.startswith("daemon"):
            found.add(reader.source)
print(*found, flush=True)
"""


@pytest.fixture(scope="session")
def last(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory with the package of the last release."""
    place = tmp_path_factory.mktemp("last")
    site = str(place / "site")
    release = os.environ.get("FFSERVE_LAST") or _sources(place)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--target", site, release], check=True)
    return site


def _sources(place: Path) -> str:
    """Return a directory with the sources of the last release."""
    known = ["git", "-C", str(ROOT), "cat-file", "-e", f"{LAST}^{{commit}}"]
    if subprocess.run(known, capture_output=True, check=False).returncode:
        whole = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
        found = subprocess.run(whole, capture_output=True, text=True, check=False).stdout.strip()
        assert found != "false", f"tests/upgrades/LAST names {LAST}, which the history has not"
        pytest.skip(f"no {LAST} in this checkout: set FFSERVE_LAST to the wheel of that release")
    sources = place / "sources"
    sources.mkdir()
    archive = ["git", "-C", str(ROOT), "archive", LAST]
    packed = subprocess.run(archive, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(sources)], input=packed, check=True)
    return str(sources)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks for packages in the current directory first."""
    monkeypatch.chdir("/")


def environment(site: str) -> dict[str, str]:
    """Return the environment of a process of this release, or of one in a directory."""
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{SUPPORT}"}


def run(program: str, site: str, *arguments: str) -> str:
    """Run a program with the package in a directory; return its output."""
    command = [sys.executable, "-c", program, *arguments, site]
    done = subprocess.run(
        command, env=environment(site), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A record file."""
    return write(tmp_path / "data.ffr", SAMPLES)


def sessions(daemon: Daemon) -> int:
    """Return how many sessions jobs have."""
    return sum(job["sessions"] for job in daemon.status()["jobs"] if job["paths"])


@pytest.mark.parametrize("old", ["client", "daemon"])
def test_clients_and_daemons_of_both_releases(last: str, path: str, old: str) -> None:
    sites = {"client": str(ROOT), "daemon": str(ROOT), old: last}
    daemon = Daemon()
    daemon.environment = environment(sites["daemon"])
    with started(daemon):
        output = run(READING, sites["client"], path, daemon.socket)
        assert output.splitlines() == [f"{way} {DIGEST}" for way in WAYS]
        # Today's commands with both.
        facts = daemon.status()
        assert facts["cache"]["asked"] >= len(SAMPLES)
        command = [sys.executable, "-m", "ffserve", "status", "--socket", daemon.socket]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        assert path in shown.stdout and not shown.stderr


ALONE = """
import os, resource, sys
import ffserve, ffserve.reader, ffserve.client.local
path, os.environ["FFSERVE_SOCKET"], limited = sys.argv[1:]
ffserve.open(path, server="off").close()
if limited == "limited":  # the arena cannot be mapped
    now = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (now + (48 << 20), now + (48 << 20)))
with ffserve.open(path) as reader:
    print(reader.source.split()[0], sum(map(len, reader.read(range(len(reader))))))
"""


@pytest.mark.parametrize("old", ["client", "daemon"])
def test_who_can_take_samples_only_through_the_socket_reads_alone(
    last: str, path: str, old: str
) -> None:
    """A client of the last release that cannot map memory; its daemon that hands none out."""
    options = ["--payload", "inline"] if old == "daemon" else []
    daemon = Daemon(options=options, expect=[r"closed a session .*: the client accepts the .*"])
    daemon.environment = environment(last if old == "daemon" else str(ROOT))
    with started(daemon):
        site = last if old == "client" else str(ROOT)
        limited = "limited" if old == "client" else "free"
        command = [sys.executable, "-c", ALONE, path, daemon.socket, limited]
        done = subprocess.run(
            command, env=environment(site), capture_output=True, text=True, check=True, timeout=120
        )
        assert done.stdout == f"engine {sum(map(len, SAMPLES))}\n"
        assert "without the daemon: the client accepts the payload" in done.stderr


@pytest.mark.parametrize("old", ["client", "daemon"])
def test_prepared_samples_are_shared_by_both_releases(
    last: str, path: str, tmp_path: Path, old: str
) -> None:
    """Two clients of each release; each release prepares at most once, and nothing if its encoding
    is that of the other one."""
    log = str(tmp_path / "log")
    daemon = Daemon()
    daemon.environment = environment(last if old == "daemon" else str(ROOT))
    with started(daemon):
        digests = set()
        counts = []
        for site in (last, str(ROOT)) * 2:
            command = [sys.executable, f"{SUPPORT}/preparing.py", log, "0", "16", path]
            chosen = {**environment(site), "FFSERVE_SOCKET": daemon.socket}
            done = subprocess.run(
                command, env=chosen, capture_output=True, text=True, check=True, timeout=120
            )
            digests.add(done.stdout)
            counts.append(len(Path(log).read_text().splitlines()))
        assert len(digests) == 1
        assert counts[0] == len(SAMPLES) and counts[1] in (len(SAMPLES), 2 * len(SAMPLES))
        assert counts[1:] == counts[1:2] * 3


def test_todays_daemon_takes_over_from_that_of_the_last_release(
    last: str, path: str, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    before = Daemon(expect=[r"stopping: \d+ clients, another daemon takes over"])
    before.environment = environment(last)
    with started(before):
        clients = []
        for site in (last, str(ROOT)):
            command = [sys.executable, "-c", LOOPING, path, before.socket, str(stop), site]
            clients.append(
                subprocess.Popen(command, env=environment(site), stdout=subprocess.PIPE, text=True)
            )
        for client in clients:
            assert client.stdout is not None and client.stdout.readline() == "ready\n"
        with subprocess.Popen([*before.command, "--handover"], stderr=subprocess.DEVNULL) as heir:
            try:
                assert before.process is not None
                assert before.process.wait(DEADLINE_S) == 0
                before.process = None
                until(lambda: before.status()["pid"] == heir.pid, "today's daemon serves")
                until(lambda: sessions(before) >= 2, "both clients moved over")
                stop.touch()
                for client in clients:
                    output, _ = client.communicate(timeout=DEADLINE_S)
                    assert (client.returncode, output) == (0, f"{DIGEST}\n")
            finally:
                heir.terminate()
                for client in clients:
                    client.kill()


def test_the_last_release_is_not_this_one(last: str) -> None:
    program = "import sys, ffserve\nfrom ffserve import protocol\nprint(protocol.VERSION)"
    version = int(run(program, last))
    assert version in protocol.VERSIONS
    assert not ffserve.__file__.startswith(last)
    with serving() as daemon:
        assert daemon.status()["version"] == ffserve.__version__
