"""The service under a real systemd, for the tests of tests/systemd: installed as the document says,
and jobs that use it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from daemon import DEADLINE_S, sample, until, write
from systemd_container import DATA, ROOT, SOURCE, Container

COUNT = 500
FFSERVE = "/opt/ffserve/bin/ffserve"
FILE = f"{DATA}/train.ffr"
PRIVATE = f"{DATA}/private.ffr"
"""A file that only alice may read."""
WHOLE = COUNT // 7 + 16
"""Batches of a job that has read every sample."""
SETTINGS = "/etc/ffserve/ffserve.toml"
SMALL = 'arena = "64M"\nmax_arena = "256M"\n'
"""By default a daemon takes a quarter of the memory."""
JOB = textwrap.dedent("""
    import hashlib, os, sys, time
    import ffserve
    _, path, server, sums, stop = sys.argv
    sums = open(sums).read().split()
    batches, longest, sources = 0, 0.0, set()
    with ffserve.open(path, server=server) as reader:
        while not os.path.exists(stop):
            begin = time.monotonic()
            first = batches * 7 % len(reader)
            indices = [(first + i) % len(reader) for i in range(16)]
            for index, sample in zip(indices, reader.read(indices)):
                assert hashlib.sha256(sample).hexdigest() == sums[index], index
            batches += 1
            longest = max(longest, time.monotonic() - begin)
            sources.add(reader.source.split()[0])
            open(f"{stop}.{batches % 2}", "w").write(str(batches))
            time.sleep(0.01)
    print(batches, round(longest, 3), *sorted(sources))
""")
"""Reads until a file exists, and compares each sample with its checksum."""


def prepare(container: Container) -> None:
    """Install the service as the document says, as root."""
    for directory in (container.data, *container.data.parents[:3]):
        directory.chmod(directory.stat().st_mode | 0o055)
    samples = [sample(index) for index in range(COUNT)]
    write(container.data / "train.ffr", samples)
    write(container.data / "private.ffr", samples)
    sums = subprocess.run(
        [sys.executable, "-c", "import hashlib, sys, ffserve\n"
         "for s in ffserve.open(sys.argv[1], server='off'): print(hashlib.sha256(s).hexdigest())",
         container.data / "train.ffr"], capture_output=True, check=True,
    )  # fmt: skip
    (container.data / "sums").write_bytes(sums.stdout)
    (container.data / "job.py").write_text(JOB)
    scratch = container.data / "scratch"
    scratch.mkdir()
    scratch.chmod(0o777)
    container.run("useradd", "--create-home", "alice")
    container.run("useradd", "--create-home", "bob")
    container.run("chown", "alice:alice", PRIVATE)
    container.run("chmod", "600", PRIVATE)
    container.before = set(container.run("cat", "/etc/group").splitlines())
    block = (ROOT / "docs/howto/service.md").read_text().split("```sh\n")[1].split("```")[0]
    commands = [
        line.partition("  #")[0].strip().replace("sudo ", "") for line in block.splitlines()
    ]
    for line in commands[:2]:
        container.run("sh", "-ec", f"cd {SOURCE} && USER=alice && {line}", timeout=300)
    # Jobs have a program of their own, which an upgrade of the service leaves alone.
    container.run("cp", "-r", "/opt/ffserve", "/opt/job")
    container.last = commands[2]


@contextmanager
def job(
    machine: Container,
    server: str = "require",
    user: str = "alice",
    least: int = 20,
    path: str = FILE,
) -> Iterator[dict[str, Any]]:
    """A job that runs meanwhile. It must not fail; the dictionary has what it says at the end."""
    number = len(list((machine.data / "scratch").iterdir()))
    stop = f"{DATA}/scratch/{number}-stop"
    words = ("/opt/job/bin/python", f"{DATA}/job.py", path, server, f"{DATA}/sums", stop)
    process = machine.start(*words, user=user)
    facts: dict[str, Any] = {}

    def batches() -> int:
        assert process.poll() is None, process.stdout.read()  # type: ignore[union-attr]
        found = [0]
        for each in (machine.data / "scratch").glob(f"{number}-stop.*"):
            found.append(int(each.read_text() or 0))
        return max(found)

    def go_on(count: int = least) -> None:
        aim = batches() + count
        until(lambda: batches() >= aim, f"the job goes on, {machine.log()}")

    facts["go_on"] = go_on
    try:
        go_on()
        yield facts
        go_on()
        (machine.data / "scratch" / f"{number}-stop").touch()
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
        count, longest, *sources = output.splitlines()[-1].split()
        facts.update(batches=int(count), longest_s=float(longest), sources=sources)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def status(machine: Container, user: str = "alice", *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        machine.run(FFSERVE, "status", "--json", *options, user=user)
    )
    return found


def answers_again(machine: Container, pid: int) -> int:
    """Wait for another daemon than this one; return its number."""

    def another() -> int:
        now = machine.pid()
        return (
            now
            if now != pid and machine.property("ffserve.service", "SubState") == "running"
            else 0
        )

    return int(until(another, "systemd starts another daemon"))


def has_moved(machine: Container, *jobs: dict[str, Any]) -> None:
    """Wait until jobs have moved to the next daemon, and read every sample again."""

    def have_moved() -> bool:
        return sum(each["open"] for each in status(machine, "root")["shards"]) == len(jobs)

    until(have_moved, "the jobs have moved")
    for each in jobs:
        each["go_on"](WHOLE)
