"""The simulation tells the truth: real jobs on a real daemon hit as often as simulated ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from daemon import serving, write

from ffserve.cache.simulation import SimulatedJob, Simulation, belady, shuffled
from ffserve.engine.io import open_direct

COUNT, SIZE, BATCH = 12_288, 8192, 64
SHARE = 0.25
STEP_S = 0.012
"""How long a job computes on a batch: a reader then reports each of its reads."""
WARM, EPOCHS = 2, 2
BOUND = 0.015

PROGRAM = """
import sys
import numpy as np
import ffserve
path, socket, seed, epochs, batch = sys.argv[1:]
with ffserve.open(path, server=socket) as reader:
    count = len(reader)
    draw = lambda epoch: np.random.default_rng([int(seed), epoch]).permutation(count)
    reader.announce(draw(0), 0)
    print("ready", flush=True)
    for epoch in range(int(epochs)):
        reader.announce(draw(epoch + 1), epoch + 1)
        numbers = draw(epoch)
        for start in range(0, count, int(batch)):
            sys.stdin.readline()
            reader.read_batch(numbers[start : start + int(batch)])
            print("used", flush=True)
"""


def measured(path: str, job_count: int) -> float:
    """Return the share of samples that jobs, which take turns, used without a read."""
    with serving(arena=str(int(COUNT * SIZE * SHARE))) as daemon:
        jobs = [
            subprocess.Popen(
                [
                    *(sys.executable, "-W", "error", "-c", PROGRAM),
                    *(path, daemon.socket, str(seed), str(WARM + EPOCHS), str(BATCH)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for seed in range(job_count)
        ]

        def expect(line: str) -> None:
            for job in jobs:
                assert job.stdout is not None and job.stdout.readline() == line

        def step() -> None:
            begun = time.monotonic()
            for job in jobs:
                assert job.stdin is not None
                job.stdin.write("\n")
            expect("used\n")
            time.sleep(max(begun + STEP_S - time.monotonic(), 0.0))

        try:
            expect("ready\n")
            for _ in range(WARM * COUNT // BATCH):
                step()
            before = daemon.cache()["blocks_read"]
            for _ in range(EPOCHS * COUNT // BATCH):
                step()
            reads = daemon.cache()["blocks_read"] - before
        finally:
            for job in jobs:
                job.kill()
                job.communicate()
    return 1 - float(reads) / (job_count * EPOCHS * COUNT)


@pytest.mark.parametrize(
    "job_count",
    [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.check)],
)
def test_a_simulation_promised_more_hits_than_the_daemon_delivered(
    tmp_path: Path, job_count: int
) -> None:
    content = np.random.default_rng(0).bytes(SIZE)
    path = write(tmp_path / "data.ffr", [content] * COUNT)
    fd, alignment = open_direct(path)
    os.close(fd)
    pace = BATCH / STEP_S
    jobs = [
        SimulatedJob(shuffled(COUNT, seed), pace=pace, batch=BATCH) for seed in range(job_count)
    ]
    simulation = Simulation(COUNT, SHARE, jobs, sample_size=SIZE, alignment=alignment)
    try:
        epoch_s = COUNT / pace
        result = simulation.run(warm_s=WARM * epoch_s, seconds=EPOCHS * epoch_s)
    finally:
        simulation.close()
    hit_rate = measured(path, job_count)
    assert hit_rate == pytest.approx(result.hit_rate, abs=BOUND)
    # As many samples as the arena has bytes for: the ends of the disk blocks that they were read
    # with took 3 points.
    best = belady(result.trace, result.slots, result.measured_from)
    assert result.slots == int(COUNT * SHARE)
    assert best - BOUND < hit_rate < best + 0.005
    assert best - BOUND < result.hit_rate < best + 0.001
