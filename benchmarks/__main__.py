"""The data plane against memory and disk, in one run: `make bench`.

Each contestant runs in processes of its own and takes turns with its yardstick; the median of the
ratios of the turns is printed. Yardsticks: hot, one plain copy a sample from random places, as many
processes; cold, fio with io_uring and O_DIRECT at the same size and depth.

    python -m benchmarks [--folder .bench] [--turns 3] [--seconds 1.5] [--only WORD] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ffserve
from ffserve.client.connection import status
from ffserve.engine.ring import describe

MIB = 1 << 20
STEPS = (4096, 100 * 1024)
HOT_SIZE = 512 * MIB
COLD_SIZE = 3072 * MIB
DEPTH = 128

Row = dict[str, Any]


def make_shard(folder: Path, step: int, size: int) -> str:
    """Write one FFRecord shard of equal random samples, once."""
    path = folder / f"{step}-{size // MIB}.ffr"
    if not path.exists():
        block = np.random.default_rng(step).integers(
            0, 256, 64 * MIB // step * step, dtype=np.uint8
        )
        rows = block.reshape(-1, step)
        count = size // step
        with ffserve.create(path, n=count) as writer:
            for k in range(count):
                writer.write(rows[k % len(rows)])
    drop_cache(path)
    return str(path)


def drop_cache(path: Path) -> None:
    """Take a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@contextlib.contextmanager
def daemon(folder: Path, arena: int, engine: str = "auto") -> Iterator[str]:
    """A fresh daemon; yields its socket."""
    place = tempfile.mkdtemp(prefix="ffserve-bench-")
    socket = os.path.join(place, "s")
    command = [sys.executable, "-m", "ffserve", "serve", "--socket", socket]
    command += ["--arena", str(arena), "--root", str(folder), "--log-level", "warning"]
    command += ["--engine", engine]
    process = subprocess.Popen(command)
    try:
        while not os.path.exists(socket):
            time.sleep(0.02)
            if process.poll() is not None:
                raise SystemExit("the daemon did not start")
        while (arena_now := status(socket)["arena"])["populated"] < arena_now["size"]:
            time.sleep(0.05)
        yield socket
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(place)


def cpu_of(socket: str) -> float:
    """CPU seconds of the daemon, all its threads."""
    fields = Path(f"/proc/{status(socket)['pid']}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(cases: list[Row]) -> Row:
    """Run contestants together; return their summed rate in bytes a second and CPU a byte."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", json.dumps(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for case in cases
    ]
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise SystemExit("a contestant failed")
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [json.loads(process.communicate()[0]) for process in processes]
    return {
        "rate": sum(r["size"] / r["seconds"] for r in results),
        "cpu": sum(r["cpu"] for r in results) / max(1, sum(r["size"] for r in results)),
        "size": sum(r["size"] for r in results),
    }


def fio(path: str, step: int, depth: int, seconds: float) -> float:
    """Bytes a second of random reads at a depth."""
    command = [
        "fio", "--name=cold", f"--filename={path}", "--rw=randread", f"--bs={step}",
        f"--iodepth={depth}", "--ioengine=io_uring", "--direct=1", "--norandommap",
        "--thread=1", "--randrepeat=0",
        "--registerfiles=1", "--nonvectored=1", "--time_based",
        f"--runtime={max(1, round(seconds))}", "--output-format=json",
    ]  # fmt: skip
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = json.loads(out[out.index("{") :])["jobs"][0]
    return float(job["read"]["iops"]) * step


class Bench:
    """Collects rows and prints them as they come."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder: Path = arguments.folder
        self.turns: int = arguments.turns
        self.seconds: float = arguments.seconds
        self.only: str | None = arguments.only
        self.rows: list[Row] = []

    def wanted(self, name: str) -> bool:
        return self.only is None or self.only in name

    def compare(
        self, name: str, step: int, yardstick: Callable[[], float], contestant: Callable[[], Row]
    ) -> None:
        """Let both run in turn; print the median ratio."""
        ratios, ours, extra = [], [], {}
        for _ in range(self.turns):
            base = yardstick()
            row = contestant()
            ratios.append(row["rate"] / base)
            ours.append(row["rate"])
            extra = {k: v for k, v in row.items() if k not in ("rate", "size")}
        row = {
            "case": name,
            "step": step,
            "ratio": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "mb_s": statistics.median(ours) / 1e6,
            **extra,
        }
        self.rows.append(row)
        notes = f"  daemon {row['daemon_us']:.1f} us a sample" if "daemon_us" in row else ""
        print(
            f"{name:44} {step:7} B {row['ratio']:6.2f}  ({row['low']:.2f} to {row['high']:.2f})"
            f" {row['mb_s']:8.0f} MB/s{notes}",
            flush=True,
        )

    def case(self, kind: str, step: int, count: int, batch: int, **more: Any) -> Row:
        base = {"case": kind, "step": step, "count": count, "batch": batch, "seed": 1}
        return {**base, "seconds": self.seconds, "warm": 8, "once": False, **more}

    def hot(self, step: int) -> None:
        """Everything in the arena."""
        path = make_shard(self.folder, step, HOT_SIZE)
        count = HOT_SIZE // step
        with daemon(self.folder, 2 * HOT_SIZE) as socket:
            with ffserve.open(path, server=socket) as opened:
                for _ in opened.batches():
                    pass
            reading = {"paths": [path], "server": socket, "way": "read_batch"}
            for batch in (64, 256):
                for clients in (1, 2):
                    name = f"hot read_batch({batch}), {clients} client(s) / memcpy"
                    if self.wanted(name):
                        self.compare(
                            name,
                            step,
                            lambda b=batch, c=clients: run(
                                [self.case("memcpy", step, count, b, seed=s) for s in range(c)]
                            )["rate"],
                            lambda b=batch, c=clients: run(
                                [
                                    self.case("reader", step, count, b, seed=s, **reading)
                                    for s in range(c)
                                ]
                            ),
                        )
            name = "hot read(64), list of arrays / memcpy"
            if self.wanted(name):
                self.compare(
                    name,
                    step,
                    lambda: run([self.case("memcpy", step, count, 64)])["rate"],
                    lambda: run(
                        [self.case("reader", step, count, 64, **{**reading, "way": "read"})]
                    ),
                )
            name = "hot torch DataLoader, 2 workers / memcpy"
            if self.wanted(name):
                os.environ["FFSERVE_SOCKET"] = socket
                self.compare(
                    name,
                    step,
                    lambda: run([self.case("memcpy", step, count, 64)])["rate"],
                    lambda: run([self.case("loader", step, count, 64, paths=[path])]),
                )
                del os.environ["FFSERVE_SOCKET"]

    def cold(self, step: int) -> None:
        """Nothing in memory."""
        path = make_shard(self.folder, step, COLD_SIZE)
        count = COLD_SIZE // step
        ways = [
            ("cold daemon, batches(64) in flight", "streamed", 64, DEPTH, "daemon"),
            ("cold daemon, 2 clients of read_batch(64)", "reader2", 64, DEPTH, "daemon"),
            ("cold daemon, one read_batch(64)", "reader", 64, 64, "daemon"),
            ("cold daemon, one read_batch(256)", "reader", 256, DEPTH, "daemon"),
            ("cold engine in process, batches(64) in flight", "streamed", 64, DEPTH, "off"),
            ("cold engine in process, one read_batch(64)", "reader", 64, 64, "off"),
            ("cold preadv loop", "preadv", 64, DEPTH, "off"),
        ]
        for what, kind, batch, depth, server in ways:
            name = f"{what} / fio"
            if not self.wanted(name):
                continue

            def contestant(k: str = kind, b: int = batch, s: str = server) -> Row:
                drop_cache(Path(path))
                if s == "off":
                    return run([self._cold_case(k, step, count, b, path, "off", 1)])
                with daemon(self.folder, 512 * MIB) as socket:
                    if k == "reader2":
                        cases = [
                            self._cold_case("reader", step, count, b, path, socket, seed)
                            for seed in (1, 2)
                        ]
                    else:
                        cases = [self._cold_case(k, step, count, b, path, socket, 1)]
                    before = cpu_of(socket)
                    row = run(cases)
                    used = cpu_of(socket) - before
                    missed = status(socket)["cache"]["blocks_read"]
                    return {**row, "daemon_us": used / max(missed, 1) * 1e6}

            self.compare(name, step, lambda d=depth: fio(path, step, d, self.seconds), contestant)

    def _cold_case(
        self, kind: str, step: int, count: int, batch: int, path: str, server: str, seed: int
    ) -> Row:
        return self.case(
            kind, step, count, batch, paths=[path], raw=path, server=server, way="read_batch",
            once=True, warm=2, seed=seed,
        )  # fmt: skip


def main() -> None:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--only", help="rows whose name has this word")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    arguments.folder = arguments.folder.resolve()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}; {describe()}")
    print(f"{'case / yardstick':44} {'size':>9} {'ratio':>6}  (turns)")
    bench = Bench(arguments)
    for step in STEPS:
        if arguments.only is None or "cold" not in arguments.only:
            bench.hot(step)
        if arguments.only is None or "cold" in arguments.only:
            if shutil.which("fio"):
                bench.cold(step)
            else:
                print("cold cases left out: fio is not installed")
    if arguments.json:
        arguments.json.write_text(json.dumps(bench.rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
