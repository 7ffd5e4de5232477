"""The benchmark of the policy runs, small, and counts what the kernel counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import policy
from benchmarks.closed_loop import write_data
from benchmarks.harness import cgroup
from benchmarks.policy import Cell


@pytest.mark.check
def test_a_cell_agrees_with_the_simulation_and_the_kernel(
    tmp_path: Path,
) -> None:
    path = write_data(tmp_path, 2000, policy.SIZE)
    row = policy.run(Cell("two jobs", 2, True, 0.5, pace=2000.0, samples=2000), path)
    policy.show(row)
    # Two seconds of two jobs: on a busy machine they are no whole epochs, and what is counted in
    # several places is not counted at one moment. What it agrees to is what the benchmark is for.
    assert row["hit_rate"] <= row["belady"] + 0.1
    # The window takes 128 samples of each job out of the thousand that fit.
    assert row["hit_rate"] >= row["simulated"] - 0.2
    try:
        cgroup.disk_of(path)
    except cgroup.NoCgroup:
        return
    # The kernel also counts programs and libraries, where memory is short and they are read again.
    assert 0.75 * row["daemon_bytes"] <= row["kernel_bytes"]
    assert row["kernel_bytes"] <= 1.25 * row["daemon_bytes"] + (64 << 20)


def test_a_process_in_a_cgroup_gets_no_more_memory_than_that() -> None:
    try:
        with cgroup.limited(memory_size=64 << 20) as group:
            assert group.peak() < 64 << 20 and group.killed() == 0
    except cgroup.NoCgroup as error:
        pytest.skip(str(error))
