"""Jobs whose workers, other jobs or daemon are killed in mid-epoch."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import DEADLINE_S, Daemon, run_python, sample, serving, stopped, until, write
from reading_jobs import COUNT, SIZES, jobs


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of COUNT samples."""
    samples = [sample(i, SIZES) for i in range(COUNT)]
    return write(tmp_path_factory.mktemp("data") / "a.ffr", samples)


@pytest.fixture(scope="module")
def truth(path: str) -> list[tuple[int, str]]:
    """The samples that every job must get: each once, by index and MD5."""
    import hashlib

    return [(i, hashlib.md5(sample(i, SIZES)).hexdigest()) for i in range(COUNT)]


Truth = list[tuple[int, str]]


@pytest.mark.check
def test_same_samples_with_and_without_a_daemon(path: str, truth: Truth) -> None:
    with jobs(1, path, "off") as [alone]:
        expected, source, _ = alone.end()
    assert source.startswith("engine ")
    assert sorted(expected) == truth
    with serving(arena="4MiB") as daemon, jobs(2, path, daemon.socket) as running:
        for job in running:
            got, source, err = job.end()
            assert (source, err) == (f"daemon {daemon.socket}", "")
            assert sorted(got) == truth


@pytest.mark.check
def test_daemon_killed_in_mid_epoch_and_started_again(path: str, truth: Truth) -> None:
    with serving(arena="4MiB") as daemon, jobs(2, path, daemon.socket, pause=0.1) as running:
        assert daemon.end(signal.SIGKILL) == -signal.SIGKILL
        time.sleep(0.1)
        assert all(job.process.poll() is None for job in running)
        daemon.start()
        for job in running:
            got, source, err = job.end()
            assert sorted(got) == truth, "every sample exactly once, with the right bytes"
            assert (source, err) == (f"daemon {daemon.socket}", "")


@pytest.mark.check
def test_daemon_restarted_three_times(path: str, truth: Truth) -> None:
    with serving() as daemon, jobs(2, path, daemon.socket, pause=0.03) as running:
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
            daemon.end(number)
            daemon.start()
            time.sleep(0.15)
        for job in running:
            assert sorted(job.end()[0]) == truth


@pytest.mark.check
def test_a_killed_job_does_not_disturb_other_jobs(path: str, truth: Truth) -> None:
    with serving(arena="2MiB") as daemon, jobs(2, path, daemon.socket, pause=0.01) as running:
        running[0].kill()
        for job in running[1:]:
            assert sorted(job.end()[0]) == truth
        until(lambda: not daemon.status()["shards"][0]["sessions"], "all sessions ended")


@pytest.mark.check
def test_worker_killed_in_mid_epoch(path: str, truth: Truth) -> None:
    with serving(arena="2MiB") as daemon, jobs(2, path, daemon.socket, pause=0.02) as running:
        os.kill(running[0].workers[0], signal.SIGKILL)
        for job in running:
            assert sorted(job.end()[0]) == truth


AUTO = """
import logging, os, sys, ffserve, ffserve.client.failover as failover
os.environ["FFSERVE_SOCKET"] = sys.argv[2]
failover.RECONNECT_S.update(auto=0.3, require=0.3)
failover.RETURN_AFTER_S = float(sys.argv[4])
logging.basicConfig(format="%(levelname)s %(message)s")
readers = [ffserve.open(sys.argv[1], server=sys.argv[3]) for _ in range(2)]
print(*[r.source for r in readers], flush=True)
for k, line in enumerate(sys.stdin):
    try:
        part = range(200 * (k % 6), 200 * (k % 6) + 200)
        got = [hash(r.read_batch(part).buffer.tobytes()) for r in readers]
        print(len(set(got)), *[r.source for r in readers], flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


@contextlib.contextmanager
def piped(program: str, *arguments: Any) -> Iterator[Any]:
    """Run a program with pipes to all its streams, and kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def conversation(*arguments: Any) -> Iterator[Any]:
    """Run a client that reads when it is asked to; yields its process and a function that asks."""
    with piped(AUTO, *arguments) as process:

        def read() -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            line: str = process.stdout.readline()
            return line

        assert "daemon" in process.stdout.readline()
        yield process, read


@pytest.mark.check
def test_auto_reads_without_the_daemon_warns_once_and_returns(path: str) -> None:
    with serving() as daemon, conversation(path, daemon.socket, "auto", 0.2) as (process, read):
        assert read().startswith("1 daemon ")
        daemon.end(signal.SIGKILL)
        assert read().startswith("1 engine ")
        assert read().startswith("1 engine ")
        daemon.start()
        both = f"1 daemon {daemon.socket} daemon {daemon.socket}\n"
        until(lambda: read() == both, "both readers use the daemon again")
        _, err = process.communicate()
        assert err.count("the daemon went away, so this process reads the files") == 1, err
        assert len(err.splitlines()) == 1, err


@pytest.mark.check
@pytest.mark.parametrize("how", ["require", "path"])
def test_a_required_daemon_that_does_not_return(path: str, how: str) -> None:
    with serving() as daemon:
        server = "require" if how == "require" else daemon.socket
        with conversation(path, daemon.socket, server, 30) as (process, read):
            assert read().startswith("1 daemon ")
            daemon.end(signal.SIGKILL)
            assert read().startswith("ServerUnavailable ")
            daemon.start()
            assert read().startswith("1 daemon "), "a reader that failed once can be used again"
            assert process.poll() is None


@pytest.mark.check
def test_file_replaced_while_the_daemon_was_away(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [sample(i, SIZES) for i in range(COUNT)])
    with serving() as daemon, conversation(path, daemon.socket, "auto", 30) as (_, read):
        assert read().startswith("1 daemon ")
        daemon.end(signal.SIGKILL)
        write(path, [sample(i, SIZES, seed=1) for i in range(COUNT)])
        daemon.start()
        assert read().startswith("FormatError ")


@pytest.mark.check
def test_daemon_that_serves_other_roots_after_its_restart(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [sample(i, SIZES) for i in range(COUNT)])
    (tmp_path / "elsewhere").mkdir()
    with serving() as daemon, conversation(path, daemon.socket, "auto", 30) as (process, read):
        assert read().startswith("1 daemon ")
        daemon.end(signal.SIGKILL)
        daemon.command[daemon.command.index("--root") + 1] = str(tmp_path / "elsewhere")
        daemon.start()
        assert read().startswith("1 engine ")
        _, err = process.communicate()
        assert "outside its roots" in err


@pytest.mark.check
def test_hits_continue_while_no_daemon_runs(path: str) -> None:
    with serving() as daemon, daemon.open(path) as reader:
        expected = reader.read_batch(range(100)).buffer.tobytes()
        with reader.lease(range(10)) as views:
            daemon.end(signal.SIGKILL)
            assert [v.tobytes() for v in views] == [sample(i, SIZES) for i in range(10)]
        assert reader.read_batch(range(100)).buffer.tobytes() == expected
        daemon.start()
        assert reader[1000].tobytes() == sample(1000, SIZES)


@pytest.mark.check
def test_iteration_continues_across_a_restart(path: str) -> None:
    with serving() as daemon, daemon.open(path) as reader:
        got = []
        for k, batch in enumerate(reader.batches(count=100)):
            got += [one.tobytes() for one in batch]
            if k in (0, 5):
                daemon.end(signal.SIGKILL)
                daemon.start()
        assert got == [sample(i, SIZES) for i in range(COUNT)]


@pytest.mark.check
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unclosed socket
def test_unclosed_readers_keep_no_descriptors_of_ended_daemons(path: str) -> None:
    with serving() as daemon, daemon.open(path) as reader:
        counts = []
        for _ in range(3):
            other = daemon.open(path)
            assert other[0].tobytes() == sample(0, SIZES)
            daemon.end(signal.SIGKILL)
            daemon.start()
            assert reader[1 + len(counts)].tobytes() == sample(1 + len(counts), SIZES)
            del other
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[-1] <= counts[0], counts


STOPPED = """
import logging, sys, ffserve, ffserve.client.daemon.connection as module
module.SILENCE_S = 3
import ffserve.client.failover as failover, ffserve.client.daemon.handshake as handshake
logging.basicConfig(format="%(levelname)s %(message)s")
reader = ffserve.open(sys.argv[1], server="auto")
print(reader.source, flush=True)
sys.stdin.readline()
handshake.CONNECT_TIMEOUT_S = 0.3
failover.RECONNECT_S.update(auto=0.3)
print(reader.source, len(reader.read_batch(range(1000))), reader.source, flush=True)
"""


@pytest.mark.check
def test_a_stopped_daemon_counts_as_lost(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        with piped(STOPPED, path) as client:
            assert client.stdout.readline().startswith("daemon ")
            with stopped(daemon.pid):
                out, err = client.communicate("go\n", timeout=DEADLINE_S)
            assert out == f"daemon {daemon.socket} 1000 engine {out.split()[-1]}\n", (out, err)
            assert "reads the files without it" in err


BUSY = """
import logging, sys, time, ffserve
import ffserve.client.failover as failover, ffserve.client.daemon.handshake as handshake
handshake.CONNECT_TIMEOUT_S, failover.RETURN_AFTER_S = 0.3, 0.0
logging.basicConfig(format="%(levelname)s %(message)s")
reader, other = ffserve.open(sys.argv[1]), ffserve.open(sys.argv[1])
print(reader.source, reader.stats()["unserved"] == other.stats()["unserved"] != "", flush=True)
sys.stdin.readline()
handshake.CONNECT_TIMEOUT_S = 30
while reader.source.startswith("engine"): time.sleep(0.01)
print(len(reader.read([0])), reader.source, "unserved" in reader.stats(), flush=True)
"""


@pytest.mark.check
def test_a_daemon_with_a_late_welcome_was_left_for_ever_without_a_warning(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        with contextlib.ExitStack() as stack:
            with stopped(daemon.pid):
                reading = stack.enter_context(piped(BUSY, path))
                assert re.fullmatch(r"engine \w+ True\n", reading.stdout.readline())
            out, err = reading.communicate("go\n", timeout=DEADLINE_S)
        assert out == f"1 daemon {daemon.socket} False\n"
        [line] = err.splitlines()
        assert line.startswith(
            "WARNING this process reads the files without the daemon: "
            f"{daemon.socket}: the handshake "
        )
        assert "server='require'" in line


def test_no_daemon(path: str, tmp_path: Path) -> None:
    program = (
        "import os, sys, ffserve; os.environ['FFSERVE_SOCKET'] = sys.argv[2]\n"
        "from ffserve.errors import ServerUnavailable\n"
        "print(ffserve.open(sys.argv[1]).source)\n"
        "for server in ('require', sys.argv[2]):\n"
        "    try: ffserve.open(sys.argv[1], server=server)\n"
        "    except ServerUnavailable as error: print(error)\n"
    )
    lines = run_python(program, path, tmp_path / "none").stdout.splitlines()
    assert lines[0].startswith("engine ")
    assert len(lines) == 3
    assert all("ffserve serve" in line and str(tmp_path / "none") in line for line in lines[1:])


def test_sigint_ends_a_daemon_with_status_0() -> None:
    daemon = Daemon()
    try:
        daemon.start()
        assert daemon.end(signal.SIGINT) == 0
        daemon.check_log()
    finally:
        daemon.close()
