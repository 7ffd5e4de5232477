"""Copies of prepared samples out of the memory files of clients, into slots of the arena.

A PUT gets slots and turns as a GET does, but reads no disk: a thread copies the bytes and publishes
them. A client can cut its memory file at any time; then the samples behind the cut fail.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Callable
from functools import partial

import numpy as np

from ffserve.cache.cache import Load
from ffserve.cache.tables import Directory
from ffserve.engine.shm import publish_run
from ffserve.errors import STATUS_TRUNCATED, Failure
from ffserve.limits import MEMORY_FILES_SHARE
from ffserve.reads.records import Failures
from ffserve.server.users.threads import UserThreads
from ffserve.system.memfd import SharedMemory

_ONE = np.zeros(1, np.int64)


class PreparedFile:
    """A client's memory file. It is closed when it is dropped and no copy from it is under way."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.copies = 0
        self.dropped = False

    def close_unused(self) -> None:
        """Close the file if it is not needed any more."""
        if self.dropped and not self.copies and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Copier:
    """Copies the samples of loads that have a memory file.

    Args: ended: called in the loop's thread with a load, which has its failures then.
    """

    def __init__(
        self, memory: SharedMemory, directory: Directory, ended: Callable[[Load], object]
    ) -> None:
        self._memory = memory
        self._directory = directory
        self._ended = ended
        self._threads = UserThreads("ffserve-copy", 1 << 62)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.file_count = 0
        """Memory files that are open."""
        self.most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // MEMORY_FILES_SHARE
        """The largest number of them."""
        self.in_flight = 0
        """Loads that are being copied."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report to this loop."""
        self._loop = loop
        self._threads.attach(loop)

    def open(self, fd: int) -> PreparedFile:
        """Take a descriptor of a client's memory file, to be closed by `drop`."""
        self.file_count += 1
        return PreparedFile(fd)

    def drop(self, file: PreparedFile) -> None:
        """Copy no further load from a file."""
        self.file_count -= 1
        file.dropped = True
        file.close_unused()

    def submit(self, load: Load) -> None:
        """Copy the samples of a load, which have a slot each."""
        file = load.source
        assert isinstance(file, PreparedFile)
        file.copies += 1
        self.in_flight += 1
        load.reads = 0
        # A memory file does not hang, so one thread serves all users.
        copied = self._threads.call(
            None, partial(self._copy, load, file.fd), partial(self._end, load, file)
        )
        if not copied:
            failures = dict.fromkeys(load.blocks.firsts.tolist(), Failure(-errno.EAGAIN))
            assert self._loop is not None
            self._loop.call_soon(self._end, load, file, failures)

    def _copy(self, load: Load, fd: int) -> Failures:
        failures: Failures = {}
        blocks, entries = load.blocks, self._directory.entries_memory.address
        columns = blocks.firsts, blocks.begins, blocks.ends, load.offsets
        for number, begin, end, place in zip(*(c.tolist() for c in columns), strict=True):
            length = end - begin
            try:
                got = os.preadv(fd, [self._memory.array[place : place + length].data], begin)
            except OSError as error:
                failures[number] = Failure(-(error.errno or errno.EIO))
                continue
            if got < length:
                failures[number] = Failure(STATUS_TRUNCATED)
                continue
            publish_run(entries, number, place, _ONE, np.array([length], np.int64))
        return failures

    def _end(self, load: Load, file: PreparedFile, failures: Failures) -> None:
        self.in_flight -= 1
        file.copies -= 1
        file.close_unused()
        load.failures.update(failures)
        self._ended(load)

    def close(self) -> None:
        """End the thread."""
        self._threads.close(wait=True)
