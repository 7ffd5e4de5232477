"""A daemon under attack: both users' processes, and what an attack costs the honest one.

    python tests/support/attack_field.py [KIND ...]

As root: print for each kind of `attacks.py` (all by default) how long the batches of an honest
client take while the attack runs, as multiples of the median without it, and its slowest greeting.
KIND may be `computing` as well: a process that has no connection and takes a processor. With
--beside the attacks go to another daemon, so only processors and disk are shared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import attacks
import numpy as np
from daemon import DEADLINE_S, Daemon, ready, serving

import ffserve

HONEST, HOSTILE = 65_432, 65_433
COUNTS = {
    "gets": 20,
    "leases": 20,
    "status": 3,
    "connections": 4200,
    "connects": 4,
    "halves": 40,
    "drops": 10,
    "strings": 2,
    "opens": 4,
    "tags": 4,
    "orders": 4,
    "seens": 4,
    "datasets": 2,
    "claims": 8,
    "small": 10,
}
"""Connections of each attack."""
EXPECT = (r"closed a session \(pid \d+\): .*",)


@dataclass
class Field:
    """A daemon that everybody may connect to, and files that everybody may read."""

    daemon: Daemon
    honest: str
    hostile: str

    def command(self, uid: int, *arguments: object) -> list[str]:
        user = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
        return [*user, sys.executable, str(Path(attacks.__file__)), *map(str, arguments)]

    @contextlib.contextmanager
    def attack(self, kind: str, count: int) -> Iterator[None]:
        with ready(self.command(HOSTILE, kind, self.daemon.socket, self.hostile, count)):
            yield

    def measure(self, seconds: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the times of an honest client's batches and of its greetings."""
        command = self.command(HONEST, "honest", self.daemon.socket, self.honest, seconds)
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False
        )
        found = json.loads(done.stdout)
        assert not found["refused"], "the honest client was refused"
        return np.array(found["reads"]), np.array(found["greetings"])


@contextlib.contextmanager
def field(shards: int) -> Iterator[Field]:
    with serving(arena="32MiB", options=["--socket-mode", "0666"], expect=EXPECT) as daemon:
        paths = [str(daemon.directory / name) for name in ("honest.ffr", "hostile.ffr")]
        attacks.write_samples(paths[0])
        shutil.copy(paths[0], paths[1])
        many = daemon.directory / "many"
        many.mkdir()
        with ffserve.create(many / "0.ffr", n=1) as writer:
            writer.write(b"x")
        for number in range(1, shards):
            shutil.copy(many / "0.ffr", many / f"{number}.ffr")
        yield Field(daemon, *paths)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """A process that takes a processor."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--shards", type=int, default=300)
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    given = parser.parse_args()
    print("kind          quiet p50 ms   p50    p99    greeting ms")
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(field(given.shards))
        other = stack.enter_context(field(given.shards)) if given.beside else made
        for kind in given.kinds or ["computing", *attacks.KINDS]:
            usual = float(np.median(made.measure(2)[0]))
            with computing() if kind == "computing" else other.attack(kind, COUNTS[kind]):
                reads, greetings = made.measure(given.seconds)
            p50, p99 = np.quantile(reads, (0.5, 0.99)) / usual
            slowest = greetings.max() * 1e3
            print(f"{kind:12} {usual * 1e3:10.2f} {p50:9.1f} {p99:6.1f} {slowest:9.0f}", flush=True)


if __name__ == "__main__":
    main()
