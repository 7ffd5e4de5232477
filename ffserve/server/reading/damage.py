"""Damage: samples whose checksum was wrong are read a second time, in a thread of their user.

A sample that is right then is published where it belongs. Storage or an origin that hangs holds up
the samples of one user only. Chunks of local files are read again by the thread that decodes them
(`chunk_loader.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from ffserve.cache.cache import Load
from ffserve.cache.tables import Directory
from ffserve.engine.shm import publish_run
from ffserve.reads.records import Failures
from ffserve.reads.second_read import WrongRecord
from ffserve.server.users.threads import UserThreads
from ffserve.system.memfd import SharedMemory

_ONE = np.zeros(1, np.int64)
_ANY = 1 << 62
"""The threads have no bound of their own: the requests of a user bound what it has in flight."""


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


Outcome: TypeAlias = tuple[list[int], Failures]
"""The numbers of the samples that were right at the second read, and the failures of the others."""


class SecondReader:
    """Reads damaged samples again.

    Args: ended: called in the loop's thread with a load whose samples were read again; it has their
        failures then.
    """

    def __init__(
        self, memory: SharedMemory, directory: Directory, ended: Callable[[Load], None]
    ) -> None:
        self._memory = memory
        self._directory = directory
        self._ended = ended
        self._threads = UserThreads("ffserve-second-read", _ANY)
        self._closed = False
        self.in_flight = 0
        """Loads with samples that are being read again."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report to this loop."""
        self._threads.attach(loop)

    def submit(self, load: Load, samples: list[WrongSample], who: Hashable) -> None:
        """Read samples of a load again, after others of the same user. Their files stay open until
        `ended` is called."""
        failures = {each.record.key: each.record.failure for each in samples}
        self.call(load, partial(self._read, samples), failures, who)

    def call(
        self, load: Load, read: Callable[[], Outcome], failures: Failures, who: Hashable
    ) -> None:
        """Make a call that reads samples of a load again, after others of the same user. Args:
        failures: of these samples, if it cannot be made."""
        load.batches += 1
        self.in_flight += 1
        if not self._threads.call(who, read, partial(self._end, load)):
            self._end(load, ([], failures))

    def _read(self, samples: list[WrongSample]) -> Outcome:
        right: list[int] = []
        failures: Failures = {}
        entries, mended = self._directory.entries_memory.address, False
        for sample in samples:
            # Other wrong samples may lie in the blocks that the first one has mended.
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

    def _end(self, load: Load, outcome: Outcome) -> None:
        self.in_flight -= 1
        if self._closed:  # and so are the engines
            return
        right, failures = outcome
        load.right += right
        load.failures.update(failures)
        self._ended(load)

    def close(self) -> None:
        """End the threads."""
        self._closed = True
        self._threads.close(wait=True)
