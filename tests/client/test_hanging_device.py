"""Without a daemon: a file system that hangs, and files on other devices, read meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import DEADLINE_S, sample, until
from fuse import READ, fuse

import ffserve

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")

COUNT = 32
TRUTH = [sample(k, sizes=(100_000, 110_000)) for k in range(COUNT)]
"""So many bytes that the chunks of a file are several batches, one for each thread that decodes."""
KINDS: dict[str, dict[str, Any]] = {
    "records": {"format": "ffrecord"},
    "chunks": {"format": "recordio", "max_chunk_size": 200_000},
}


class Files:
    """The same samples in two files: `hanging` is on a file system that answers no read within
    `hung`."""

    def __init__(self, hanging: str, good: str, begin: Path) -> None:
        self.hanging, self.good = hanging, good
        self._begin = begin

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        """From now on no read is answered; at the end they fail."""
        self._begin.touch()
        try:
            yield
        finally:
            # The connection is ended, although the file system is in use.
            subprocess.run(["umount", "-f", os.path.dirname(self.hanging)], capture_output=True)

    def hangs(self) -> bool:
        """Whether a read waits for ever."""
        return self._begin.stat().st_size > 0

    def evict(self) -> None:
        """Have the next read of the good file need its device."""
        fd = os.open(self.good, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@pytest.fixture(params=KINDS)
def files(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Files]:
    good = str(tmp_path / "good")
    with ffserve.create(good, **KINDS[request.param]) as writer:
        for each in TRUTH:
            writer.write(each)
    begin = tmp_path / "begin"
    with fuse(tmp_path, READ, begin=begin, source=good) as hanging:
        yield Files(hanging, good, begin)


def opened(files: Files, way: str) -> tuple[ffserve.Reader, ffserve.Reader, int]:
    """Return a reader of the hanging file and one of the good file, with its first index there."""
    if way == "one reader":
        reader = ffserve.open([files.hanging, files.good], server="off")
        return reader, reader, COUNT
    hanging, good = (ffserve.open(path, server="off") for path in (files.hanging, files.good))
    return hanging, good, 0


@pytest.mark.parametrize("way", ["one reader", "two readers"])
def test_a_device_that_hangs_held_up_reads_of_all_others(files: Files, way: str) -> None:
    hanging, good, first = opened(files, way)
    threads: list[threading.Thread] = []

    def beside(read: Any) -> threading.Thread:
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        threads.append(thread)
        return thread

    found: list[list[bytes]] = []

    def read_good() -> None:
        for chosen in (range(COUNT), range(5, 15), [7]):
            files.evict()
            samples = good.read([first + k for k in chosen])
            found.append([bytes(each) for each in samples])

    with files.hung():
        beside(lambda: hanging.read(range(COUNT), errors="return"))
        until(files.hangs, "a read hangs")
        beside(read_good).join(DEADLINE_S)
        assert found == [TRUTH, TRUTH[5:15], [TRUTH[7]]]
        assert threads[0].is_alive()
    for thread in threads:
        thread.join(DEADLINE_S)


def test_event_loops_read_other_devices_meanwhile(files: Files) -> None:
    async def read() -> None:
        paths = [files.hanging, files.good]
        async with ffserve.aio.open(paths, server="off") as reader:
            with files.hung():
                waiting = asyncio.create_task(reader.read(range(COUNT), errors="return"))
                while not files.hangs():
                    await asyncio.sleep(0.01)
                for chosen in (range(COUNT), range(5, 15), [7]):
                    files.evict()
                    reading = asyncio.create_task(reader.read([COUNT + k for k in chosen]))
                    done, _ = await asyncio.wait([reading], timeout=DEADLINE_S)
                    assert done, "it waits for the device that hangs"
                    assert [bytes(each) for each in await reading] == [TRUTH[k] for k in chosen]
                assert not waiting.done()
            await waiting

    asyncio.run(read())


def test_a_batch_over_two_devices(files: Files) -> None:
    """Each engine reads its part; errors are those of the samples that failed."""
    with ffserve.open([files.hanging, files.good], server="off") as reader:
        assert [bytes(each) for each in reader.read(range(2 * COUNT))] == TRUTH + TRUTH
        batch = reader.read_batch([COUNT, 0, COUNT + 1, 1])
        assert [bytes(each) for each in batch] == [TRUTH[0], TRUTH[0], TRUTH[1], TRUTH[1]]
