"""Memory for batches that is used again."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import ffserve
from ffserve.engine import arrays
from ffserve.engine import shm as buffers
from ffserve.engine.shm import MOST_KEPT, SMALL_SIZE, empty

LARGE = SMALL_SIZE + 1


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    gc.collect()
    buffers._spare.clear()


def place(array: np.ndarray) -> int:  # type: ignore[type-arg]
    return int(array.__array_interface__["data"][0])


def test_a_large_buffer_is_used_again_when_nothing_refers_to_it() -> None:
    first = empty(LARGE)
    first[:] = 7
    part = first[1000:2000][::2]
    where = place(first)
    del first
    other = empty(LARGE)
    assert place(other) != where and (part == 7).all(), "a view of it is in use"
    del part
    again = empty(LARGE)
    assert place(again) == where
    assert again.shape == (LARGE,) and again.flags.writeable and again.flags.c_contiguous
    assert not np.shares_memory(again, other)


def test_a_buffer_is_used_again_for_one_that_is_a_little_larger() -> None:
    """Windows of an order differ a little: each had the kernel clear all its pages."""
    first = empty(81_002_496)
    where = place(first)
    del first
    assert place(empty(81_920_000)) == where


def test_one_is_kept_and_none_that_is_far_too_large() -> None:
    sizes = [LARGE, LARGE + 1, 3 * LARGE]
    held = [empty(size) for size in sizes]
    held.clear()
    assert len(buffers._spare) == 1
    assert len(empty(LARGE)) == LARGE
    huge = empty(MOST_KEPT + 1)
    buffers._spare.clear()
    del huge
    assert not buffers._spare


def test_small_ones_own_their_memory() -> None:
    assert empty(SMALL_SIZE).flags.owndata and len(empty(0)) == 0
    assert not buffers._spare


def test_from_many_threads() -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(20):
            mine = empty(LARGE + mark)
            mine[::4096] = mark
            if not (mine[::4096] == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.check
def test_batches_that_are_kept_stay_as_they_are(tmp_path: Path) -> None:
    size = 1 << 20
    with ffserve.create(tmp_path / "a.ffr", n=40) as writer:
        for k in range(40):
            writer.write(np.full(size, k, np.uint8))
    with ffserve.open(tmp_path / "a.ffr", server="off") as reader:
        batches = [reader.read_batch(np.arange(40)[::step]) for step in (1, -1, 1)]
        shown = pickle.loads(pickle.dumps(batches[1].buffer))
        del batches[0]
        batches.append(reader.read_batch(range(40)))
    assert [one[0] for one in batches[0]] == list(range(39, -1, -1))
    assert [one[0] for one in batches[2]] == list(range(40))
    assert (shown == batches[0].buffer).all()


LARGE_LISTS = """
import resource, sys
import ffserve

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with ffserve.open(sys.argv[1], server="off") as reader:
    for _ in range(3):
        reader.read(range(96))
    before = faults()
    for _ in range(5):
        reader.read(range(96))
    print((faults() - before) // 5)
"""


@pytest.mark.check
def test_the_memory_of_a_list_of_96_mib_was_cleared_anew_for_each_batch(tmp_path: Path) -> None:
    path = tmp_path / "large.ffr"
    with ffserve.create(path, n=96) as writer:
        for _ in range(96):
            writer.write(bytes(1 << 20))
    done = subprocess.run(
        [sys.executable, "-c", LARGE_LISTS, path], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2000, "pages of 4 KiB that the kernel cleared; 24,576 for all"


ARRAYS = """
import mmap
from pathlib import Path
import numpy as np
from ffserve.engine import arrays, shm
SIZE, COUNT, COLLAPSE = 102_400, 256, 25
def huge_kib():
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.split("AnonHugePages:")[1].split()[0])
probe = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
try:
    probe.madvise(mmap.MADV_HUGEPAGE)
    probe[::4096] = bytes(len(probe) // 4096)
    probe.madvise(COLLAPSE)
except OSError:
    print("none")
    raise SystemExit
probe.close()
shm.keep_freed_memory()
before = huge_kib()
made, places = arrays.separate(np.arange(COUNT + 1) * SIZE)
print(huge_kib() - before)
"""


@pytest.mark.skipif(arrays.MISSING != "", reason=f"lists of arrays in C: {arrays.MISSING}")
def test_many_small_arrays_lie_in_huge_pages() -> None:
    """As one array of as many bytes does, by numpy."""
    for _ in range(5):  # memory may be in pieces for a moment
        done = subprocess.run(
            [sys.executable, "-c", ARRAYS], capture_output=True, text=True, check=True
        )
        if done.stdout == "none\n":
            pytest.skip("the kernel gives no huge pages on request")
        if int(done.stdout) >= 16 << 10:
            return
    raise AssertionError(f"{done.stdout} KiB of 25,600 are in huge pages")
