"""Training jobs for the tests: processes that read an epoch and pause on demand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from daemon import DEADLINE_S

COUNT = 1200


SIZES = [0, 100, 5000, 20_000, 70_000]


JOB = """
import hashlib, multiprocessing, sys, threading, time
from multiprocessing.connection import wait
import numpy as np
import ffserve, ffserve.client.failover as failover
path, server, seed, pause, reconnect_s = sys.argv[1:6]
failover.RECONNECT_S.update(auto=float(reconnect_s), require=float(reconnect_s))
reader = ffserve.open(path, server=server)

def share(reader, mine, pipe, pause, go):
    for start in range(0, len(mine), 20):
        if start == 20: go.poll(None)
        part = mine[start:start + 20]
        got = reader.read(part)
        pipe.send([(int(i), hashlib.md5(s).hexdigest()) for i, s in zip(part, got)])
        time.sleep(pause)

order = np.random.default_rng(int(seed)).permutation(len(reader))
missing, pipes, workers = set(order.tolist()), [], []
# No lock that a killed worker could hold.
go, go_on = multiprocessing.Pipe(duplex=False)
for k in range(2):
    inner, outer = multiprocessing.Pipe(duplex=False)
    arguments = (reader, order[k::2], outer, float(pause), go)
    workers.append(multiprocessing.Process(target=share, args=arguments))
    workers[-1].start()
    outer.close()
    pipes.append(inner)
print("workers", *[worker.pid for worker in workers], flush=True)

def goes_on():
    sys.stdin.readline()
    go_on.send("for all, and read by none")

threading.Thread(target=goes_on).start()

def take(batch):
    missing.difference_update(i for i, _ in batch)
    print(*[f"{i}:{digest}" for i, digest in batch], flush=True)

while pipes:
    for pipe in wait(pipes):
        try:
            take(pipe.recv())
        except (EOFError, OSError):
            pipes.remove(pipe)
for worker in workers: worker.join()
# A worker that was killed owes something.
for i in sorted(missing): take([(i, hashlib.md5(reader[i]).hexdigest())])
print("source", reader.source, flush=True)
"""


class Job:
    """A training run with two workers, which prints what it got.

    Each worker stands still behind its first batch until the job is told to go on.
    """

    def __init__(
        self, path: str, server: str, *, seed: int, pause: float = 0.0, reconnect_s: float = 30
    ) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-W", "error", "-c", JOB),
                *(path, server, str(seed), str(pause), str(reconnect_s)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.workers = [int(pid) for pid in self.process.stdout.readline().split()[1:]]
        assert len(self.workers) == 2

        self.first = self.process.stdout.readline()
        assert ":" in self.first, "it has samples"

    def go_on(self) -> None:
        """Let it read the rest."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[list[tuple[int, str]], str, str]:
        """Return samples, the source at the end, standard error."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        self.process.wait(DEADLINE_S)
        self.errors.seek(0)
        err = self.errors.read()
        assert self.process.returncode == 0, err
        lines = (self.first + out).splitlines()
        assert lines[-1].startswith("source ")
        pairs = [pair.split(":") for line in lines[:-1] for pair in line.split()]
        return [(int(i), digest) for i, digest in pairs], lines[-1][7:], err

    def kill(self) -> None:
        """SIGKILL it with its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.errors.close()


@contextlib.contextmanager
def jobs(count: int, *arguments: Any, **options: Any) -> Iterator[list[Job]]:
    """Several jobs, all in the middle of their epoch, none of which outlives the test."""
    started: list[Job] = []
    try:
        for seed in range(count):
            started.append(Job(*arguments, seed=seed, **options))
        for job in started:
            job.go_on()
        yield started
    finally:
        for job in started:
            job.kill()
