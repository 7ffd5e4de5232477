"""Damage: samples whose checksum was wrong are read a second time, in a thread of their user.

A sample that is right then is published where it belongs. Records in chunks are read again by the
thread that decodes them (`chunks.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from ffserve.cache.cache import Load
from ffserve.cache.tables import Directory
from ffserve.engine.shm import publish_run
from ffserve.errors import Failure
from ffserve.memfd import SharedMemory
from ffserve.reads.damage import WrongRecord

_ONE = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class WrongSample:
    """A sample whose checksum was wrong.

    fd: of its file. place: offset in the arena. mend: called before the second read: has damaged
    blocks of a remote file fetched again, and returns whether there were any; None: it is not one.
    """

    record: WrongRecord
    fd: int
    place: int
    mend: Callable[[], bool] | None


Outcome: TypeAlias = tuple[list[int], dict[int, Failure]]
"""Numbers of the samples that are right now, and the failures of the others."""


@dataclass(slots=True)
class _Thread:
    """The thread of a user. loads: those that it has not ended."""

    pool: ThreadPoolExecutor
    loads: int = 0


class SecondReader:
    """See the module's text.

    Args: ended: called in the loop's thread when one of the `batches` of a load, samples that are
        read again, has ended.
    """

    def __init__(
        self,
        memory: SharedMemory,
        directory: Directory,
        ended: Callable[[Load], None],
    ) -> None:
        self._memory = memory
        self._directory = directory
        self._ended = ended
        self._threads: dict[Hashable, _Thread] = {}
        """By user, as long as it has samples here: storage or an origin that hangs holds up one
        user's samples only."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.in_flight = 0
        """Loads with samples that are being read again."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report to this loop."""
        self._loop = loop

    def submit(self, load: Load, samples: list[WrongSample], who: Hashable) -> None:
        """Read samples of a load again, after others of the same user. Their files stay open until
        `ended` is called."""
        thread = self._threads.get(who)
        if thread is None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="ffserve-second-read")
            thread = self._threads[who] = _Thread(pool)
        load.batches += 1
        thread.loads += 1
        self.in_flight += 1
        future = thread.pool.submit(self._read, samples)
        future.add_done_callback(partial(self._report, load, who))

    def _read(self, samples: list[WrongSample]) -> Outcome:
        right: list[int] = []
        failures: dict[int, Failure] = {}
        entries, mended = self._directory.entries_memory.address, False
        for sample in samples:
            # Others of them may lie in the blocks that the first has mended.
            mended = (sample.mend is not None and sample.mend()) or mended
            record = sample.record
            if not record.is_right(sample.fd, self._memory.address + sample.place):
                failures[record.key] = record.failure
                continue
            lengths = np.array([record.length], np.int64)
            publish_run(entries, record.key, sample.place, _ONE, lengths)
            if not mended:
                right.append(record.key)
        return right, failures

    def _report(self, load: Load, who: Hashable, done: Future[Outcome]) -> None:
        if done.cancelled():  # the daemon ends
            return
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._end, load, who, done)

    def _end(self, load: Load, who: Hashable, done: Future[Outcome]) -> None:
        self.in_flight -= 1
        thread = self._threads[who]
        thread.loads -= 1
        if not thread.loads:
            del self._threads[who]
            thread.pool.shutdown(wait=False)
        right, failures = done.result()
        load.right += right
        load.failures.update(failures)
        self._ended(load)

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads.values():
            thread.pool.shutdown(wait=True, cancel_futures=True)
