"""What the long run takes for growth, and what not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import until
from measure import MIB, Series, Sizes, growth, sizes_of

HOLDING = """
import sys
import numpy as np
import allocator
from ffserve.engine.shm import keep_freed_memory
keep_freed_memory()
if sys.argv[3] == "arrays":
    held = [np.ones(1 << 20, np.uint8) for _ in range(64)]
    last = np.ones(1 << 20, np.uint8)
else:
    held = [bytes(100) for _ in range(600_000)]
    some = held[::500]
if sys.argv[2] == "frees":
    del held
allocator.report(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("what", ["arrays", "objects"])
@pytest.mark.parametrize("does", ["holds", "frees"])
def test_memory_that_allocators_keep_is_not_used(tmp_path: Path, does: str, what: str) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path), does, what]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        until((tmp_path / str(process.pid)).exists, "it says what it uses")
        sizes = sizes_of(process.pid, tmp_path)
        process.communicate()
    assert sizes.anonymous > 64 * MIB
    assert (sizes.used > 64 * MIB) == (does == "holds")


def series(*used: list[int]) -> Series:
    """Return the series of a process that uses so many MiB, in each of three thirds of 100 s."""
    found = Series(Path("/nowhere"))
    for third, row in enumerate(used):
        for k, mib in enumerate(row):
            when = 100 * third + 100 * k / len(row)
            rows = found._rows.setdefault("it", [])
            rows.append((when, Sizes(0, 0, 500 * MIB, mib * MIB, 0, 30, 4, 300)))
    return found


def test_a_process_that_was_busy_more_often_was_said_to_grow() -> None:
    """Its caches are full or empty, and its age is another when it was started again."""
    thirds = series([60, 200] * 5, [60, 60, 200, 60, 60], [60, 200, 200, 60, 200] * 2).thirds(300)
    assert growth(thirds) == []


def test_a_client_that_has_read_by_itself_keeps_its_caches() -> None:
    thirds = series([37] * 10, [37] * 3 + [65] * 7, [65] * 10).thirds(300)
    assert growth(thirds) and growth(thirds, {"it"}) == []
    assert growth(series([37] * 10, [37] * 10, [500] * 10).thirds(300), {"it"})


def test_a_leak_is_found_under_what_goes_up_and_down() -> None:
    thirds = series([60, 200] * 5, [80, 220] * 5, [115, 250] * 5).thirds(300)
    [found] = growth(thirds)
    assert found.startswith("used of it: ")
