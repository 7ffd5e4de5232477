"""Explaining: whether wrong bytes are damage, before clients are told so.

The file may have changed since it was opened, or its index file may have been stale
(`shardfile.FileState.contradiction`). To find that out, the file is looked at, some of its chunks
may be decoded, and an index file is written. That happens in a thread of the user who asks. An
answer waits for it for EXPLAIN_S at most; then, and where too many answers of the user wait, it has
the errors as the reads found them. What was found out of a file holds for all of its samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ffserve.disk.shardfile import contradicted
from ffserve.engine.opening import close_fds
from ffserve.errors import FFServeError, FormatError
from ffserve.server.files.catalog import Catalog
from ffserve.server.files.shards import OpenShard
from ffserve.server.users.descriptors import closer_of
from ffserve.server.users.shares import User
from ffserve.server.users.threads import UserThreads

EXPLAIN_S = 2.0
"""A client that waits for an answer is patient for far longer."""
MOST_CALLS = 4
"""Answers of one user that wait for explanations."""
MOST_FILES = 16
"""Files that are looked at for one answer; each takes a descriptor meanwhile."""
MOST_SAMPLES = 64
"""Samples of a file that are compared with its tables for one answer, in a few milliseconds."""


@dataclass(slots=True)
class FailedSample:
    """A sample that cannot be read.

    position: in its request. shard: None: it is a prepared sample, which is in no file. record:
    payload offset, length and checksum.
    """

    position: int
    number: int
    shard: OpenShard | None
    error: FFServeError
    record: tuple[int, int, int]

    def explained(self) -> FFServeError:
        """Return the error, with what is known of the file."""
        return self.error if self.shard is None else explained(self.shard, self.error)


@dataclass(eq=False, slots=True)
class _Answer:
    """An answer that waits.

    files: a descriptor for each shard that is looked at. until: when it waits no longer. send:
    called then; None: it was.
    """

    failed: list[FailedSample]
    files: dict[OpenShard, int]
    until: float
    send: Callable[[], object] | None
    timer: asyncio.TimerHandle | None = None


class Explainer:
    """See the module's text."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._threads = UserThreads("ffserve-explain", MOST_CALLS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.waiting_count = 0
        """Answers that wait."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report to this loop."""
        self._loop = loop
        self._threads.attach(loop)

    def explain(self, user: User, failed: list[FailedSample], send: Callable[[], object]) -> None:
        """Find out more about failed samples of an answer to a user.

        Args: send: called in the loop's thread, once, when `FailedSample.explained` says all that
            will be known; at once if nothing is to be found out.
        """
        files = _files(failed)
        if not files:
            send()
            return
        assert self._loop is not None
        answer = _Answer(failed, files, time.monotonic() + EXPLAIN_S, send)
        # Not the object: when all of its sessions have ended, the user gets another.
        who = user.uid, user.trusted
        if not self._threads.call(who, partial(_look, answer), partial(self._end, answer)):
            closer_of(user).close_fds(list(files.values()))
            send()
            return
        self.waiting_count += 1
        answer.timer = self._loop.call_later(EXPLAIN_S, self._send, answer)

    def _end(self, answer: _Answer, _: None) -> None:
        for shard in answer.files:
            if shard.contradiction is not None:
                self._catalog.set_stale(shard)
        assert answer.timer is not None
        answer.timer.cancel()
        self._send(answer)

    def _send(self, answer: _Answer) -> None:
        send, answer.send = answer.send, None
        if send is not None:
            self.waiting_count -= 1
            send()

    def close(self) -> None:
        """End the threads."""
        self._threads.close(wait=False)


def _is_doubtful(sample: FailedSample) -> bool:
    """Whether more may be found out about a sample."""
    shard = sample.shard
    return (
        isinstance(sample.error, FormatError)
        and shard is not None
        and shard.contradiction is None
        and shard.remote is None  # the store's file changes with each block
    )


def _files(failed: list[FailedSample]) -> dict[OpenShard, int]:
    """Return descriptors of the files to look at; fewer where the daemon may have no more."""
    files: dict[OpenShard, int] = {}
    with contextlib.suppress(OSError):
        for each in filter(_is_doubtful, failed):
            if each.shard is not None and each.shard not in files and len(files) < MOST_FILES:
                files[each.shard] = os.dup(each.shard.fd)
    return files


def _look(answer: _Answer) -> None:
    """In a thread of the user."""
    looked: Counter[OpenShard] = Counter()
    try:
        for each in filter(_is_doubtful, answer.failed):
            if time.monotonic() >= answer.until:
                break
            shard = each.shard
            if shard in answer.files and looked[shard] < MOST_SAMPLES:
                looked[shard] += 1
                look(shard, answer.files[shard], each.error, each.record)
    finally:
        close_fds(list(answer.files.values()))


def explained(shard: OpenShard, error: FFServeError) -> FFServeError:
    """Return the error of a sample of a shard, with what is known of the file."""
    if shard.contradiction is None or not isinstance(error, FormatError):
        return error
    return contradicted(error, shard.contradiction)


def look(shard: OpenShard, fd: int, error: FFServeError, record: tuple[int, int, int]) -> None:
    """Find out why a sample is wrong. Any thread. Args: fd: of its file. error, record: of it."""
    about = shard.path, shard.scanned, record, shard.chunked
    found = shard.opened.contradiction(error, fd, *about, "inode")
    if found is not None:
        shard.contradiction = found
