"""Explaining: why the bytes of a sample are wrong, before clients are told that it is damaged.

The file may have changed since it was opened, or its index file may have been stale
(`shardfile.FileState.contradiction`). To find that out, the daemon looks at the file, may decode
some of its chunks, and writes an index file. It does so in a thread of the user who asks. An answer
waits for this at most EXPLAIN_S; after that, and when too many answers of the user wait, it has the
errors as the reads found them. The explanation of one sample holds for all samples of the file.
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
from ffserve.engine.many_files import close_fds
from ffserve.errors import FFServeError, FormatError
from ffserve.limits import MOST_EXPLAINED_FILES, MOST_EXPLAINED_SAMPLES, MOST_EXPLANATIONS
from ffserve.server.files.catalog import Catalog
from ffserve.server.files.shards import OpenShard
from ffserve.server.users.descriptors import closer_of
from ffserve.server.users.shares import User
from ffserve.server.users.threads import UserThreads

EXPLAIN_S = 2.0
"""An answer waits for its explanation at most this long. A client waits for an answer for far
longer.
"""


@dataclass(slots=True)
class FailedSample:
    """A sample that cannot be read.

    position: in its request. shard: None for a prepared sample, which is in no file. record: the
    offset, length and checksum of its payload.
    """

    position: int
    number: int
    shard: OpenShard | None
    error: FFServeError
    record: tuple[int, int, int]

    def explained(self) -> FFServeError:
        """Return the error, with the explanation if there is one."""
        return self.error if self.shard is None else explained(self.shard, self.error)


@dataclass(eq=False, slots=True)
class _Answer:
    """An answer that waits for an explanation.

    files: a descriptor for each shard that is looked at. until: the end of the wait. send: sends
    the answer; None: it was sent.
    """

    failed: list[FailedSample]
    files: dict[OpenShard, int]
    until: float
    send: Callable[[], object] | None
    timer: asyncio.TimerHandle | None = None


class Explainer:
    """Explains the failed samples of answers."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._threads = UserThreads("ffserve-explain", MOST_EXPLANATIONS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.waiting_count = 0
        """So many answers wait."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report to this loop."""
        self._loop = loop
        self._threads.attach(loop)

    def explain(self, user: User, failed: list[FailedSample], send: Callable[[], object]) -> None:
        """Find out more about failed samples of an answer to a user.

        Args: send: called once, in the loop's thread, when `FailedSample.explained` returns the
            final error; called at once if there is nothing to find out.
        """
        files = _files(failed)
        if not files:
            send()
            return
        assert self._loop is not None
        answer = _Answer(failed, files, time.monotonic() + EXPLAIN_S, send)
        # The user object is replaced when the user's sessions have ended.
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
    """Whether a sample may have an explanation."""
    shard = sample.shard
    return (
        isinstance(sample.error, FormatError)
        and shard is not None
        and shard.contradiction is None
        and shard.remote is None  # the file of the store changes with each block
    )


def _files(failed: list[FailedSample]) -> dict[OpenShard, int]:
    """Return descriptors of the files to look at; fewer if the daemon has no more descriptors."""
    files: dict[OpenShard, int] = {}
    with contextlib.suppress(OSError):
        for each in filter(_is_doubtful, failed):
            if (
                each.shard is not None
                and each.shard not in files
                and len(files) < MOST_EXPLAINED_FILES
            ):
                files[each.shard] = os.dup(each.shard.fd)
    return files


def _look(answer: _Answer) -> None:
    """Look at the files of an answer. It runs in a thread of the user."""
    looked: Counter[OpenShard] = Counter()
    try:
        for each in filter(_is_doubtful, answer.failed):
            if time.monotonic() >= answer.until:
                break
            shard = each.shard
            if shard in answer.files and looked[shard] < MOST_EXPLAINED_SAMPLES:
                looked[shard] += 1
                look(shard, answer.files[shard], each.error, each.record)
    finally:
        close_fds(list(answer.files.values()))


def explained(shard: OpenShard, error: FFServeError) -> FFServeError:
    """Return the error of a sample, with the explanation for its shard if there is one."""
    if shard.contradiction is None or not isinstance(error, FormatError):
        return error
    return contradicted(error, shard.contradiction)


def look(shard: OpenShard, fd: int, error: FFServeError, record: tuple[int, int, int]) -> None:
    """Find out why a sample is wrong. It may run in any thread.

    Args: fd: of the sample's file. error, record: see `FailedSample`.
    """
    about = shard.path, shard.scanned, record, shard.chunked
    found = shard.opened.contradiction(error, fd, *about, "inode")
    if found is not None:
        shard.contradiction = found
