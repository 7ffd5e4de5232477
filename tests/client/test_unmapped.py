"""Processes that cannot map the daemon's memory: they read the files themselves, and say why."""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import Daemon, Raw, proxy, run_python, sample, serving, write

import ffserve
from ffserve import protocol
from ffserve.client.daemon.mapped_memory import UnmappedError, check_page
from ffserve.errors import ProtocolError, ServerUnavailable
from ffserve.system.memfd import MemoryFile

COUNT = 30
TRUTH = [sample(i) for i in range(COUNT)]
LIMITS = {
    "no address space": """
import resource
now = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (now + (48 << 20), now + (48 << 20)))
""",
    "no more open files": """
import os, resource
used = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 3, used + 3))
""",
}
"""What keeps a process from mapping the memory. For descriptors: there is room for socket and
page, and not for what comes with OPENED."""
REQUIRE = """
import hashlib, sys, ffserve, ffserve.reader, ffserve.client.local.local_source
from ffserve.errors import ServerUnavailable
ffserve.open(sys.argv[1], server="off").close()  # its engine has all that it needs
{limit}
try:
    ffserve.open(sys.argv[1], server="require")
except ServerUnavailable as error:
    print(error)
"""
READ = (
    REQUIRE
    + """
with ffserve.open(sys.argv[1]) as reader:
    print(reader.source)
    print(hashlib.sha256(reader.read_batch(range(len(reader))).buffer.tobytes()).hexdigest())
    print(reader.stats()["unserved"])
"""
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("unmapped") / "a.ffr", TRUTH)


@pytest.fixture
def behind_proxy(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The socket of a proxy, at which readers look for the daemon."""
    with proxy(daemon.socket, tmp_path / "proxy") as place:
        monkeypatch.setenv("FFSERVE_SOCKET", place)
        yield place


@pytest.mark.parametrize("reason", LIMITS)
def test_a_limit_of_the_process(
    daemon: Daemon, path: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    done = run_python(READ.format(limit=LIMITS[reason]), path)
    required, source, digest, unserved = done.stdout.splitlines()
    assert reason in required and daemon.socket in required and "raise its limit" in required
    says = r"cannot map the daemon's memory: this process (may have|has) " + reason
    assert re.fullmatch(rf"engine \w+ \(daemon not used: {says}.*\)", source)
    assert re.search(says, unserved)
    assert digest == hashlib.sha256(b"".join(TRUTH)).hexdigest()
    assert done.stderr.count("reads the files without the daemon") == 1


def test_the_kernel_drops_descriptors_that_have_no_room(
    daemon: Daemon, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    limit = LIMITS["no more open files"].replace("used + 3", "used + 1")
    required = run_python(REQUIRE.format(limit=limit), path).stdout
    assert "no more open files (raise its limit: ulimit -n)" in required


def test_a_proxy_that_passes_no_descriptors(
    behind_proxy: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    says = "cannot map the daemon's memory: 0 descriptors came with WELCOME, not 1"
    for server in ("require", behind_proxy):
        with pytest.raises(ServerUnavailable, match=r"WELCOME.*without a proxy") as caught:
            ffserve.open(path, server=server)
        assert not caught.value.retryable
    with ffserve.open(path) as reader:
        assert [bytes(each) for each in reader] == TRUTH
        assert reader.source.startswith("engine ")
        assert reader.source.endswith(f" (daemon not used: {says})")
        assert says in str(reader.stats()["unserved"])
        with pickle.loads(pickle.dumps(reader)) as copy:
            assert bytes(copy[3]) == TRUTH[3] and copy.source == reader.source
    assert caplog.text.count("reads the files without the daemon") == 1
    caplog.clear()


async def test_a_reader_of_an_event_loop_does_the_same(
    behind_proxy: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UnmappedError, match="without a proxy"):
        await ffserve.aio.open(path, server="require")
    async with ffserve.aio.open(path) as reader:
        assert [bytes(each) async for each in reader] == TRUTH
        assert "(daemon not used: cannot map the daemon's memory" in reader.source
    caplog.clear()


def test_no_daemon_is_started_beside_one_that_cannot_be_mapped(
    behind_proxy: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    inode = os.stat(behind_proxy).st_ino
    with ffserve.open(path, server="start") as reader:
        assert bytes(reader[1]) == TRUTH[1] and "daemon not used" in reader.source
    assert os.stat(behind_proxy).st_ino == inode
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    caplog.clear()


def test_the_daemon_still_says_how_it_is(behind_proxy: str, daemon: Daemon) -> None:
    """A status needs no memory."""
    command = [sys.executable, "-m", "ffserve", "status", "--json", "--socket", behind_proxy]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["pid"] == daemon.pid


def test_a_mapping_that_is_refused() -> None:
    """Here the descriptor does not allow it, elsewhere a filter of system calls."""
    page = MemoryFile("test-page", mmap.PAGESIZE)
    write_only = os.open(f"/proc/self/fd/{page.fd}", os.O_WRONLY)
    try:
        with pytest.raises(UnmappedError, match="cannot map 4096 bytes of the daemon's memory"):
            check_page("/socket", [write_only], 0, 1 << 20, lost=False)
    finally:
        os.close(write_only)
        page.close()


# ---- clients of the release before -------------------------------------------------------------


@pytest.mark.parametrize("payload", [["shared", "inline"], ["shared"]])
def test_clients_that_could_take_samples_through_the_socket_are_served(
    daemon: Daemon, path: str, payload: list[str]
) -> None:
    with Raw(daemon.socket, hello=False) as raw:
        welcome = raw.hello(payload=payload)
        assert isinstance(welcome, protocol.Welcome) and welcome.about["payload"] == "shared"
        assert raw.open(path).dataset == 1


@pytest.mark.check
@pytest.mark.parametrize("payload", [["inline"], ["carrier pigeon"], [], "inline", None])
def test_clients_that_take_samples_only_through_the_socket_are_told_what_to_do(
    payload: object,
) -> None:
    expect = [r"closed a session \(pid \d+\): the client accepts the payload .*"]
    with serving(expect=expect) as daemon, Raw(daemon.socket, hello=False) as raw:
        answer = raw.hello(payload=payload)
        assert isinstance(answer, protocol.Fail)
        with pytest.raises(ProtocolError, match=r"in shared memory.*upgrade.*reads the files"):
            raise protocol.error_from_wire(answer.error)
