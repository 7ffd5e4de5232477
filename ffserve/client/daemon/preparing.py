"""Prepared samples in the client: found in shared memory, or prepared here and handed over.

A batch is looked up in the mapped directory like one of raw samples. For what is missing the daemon
says who prepares it: this process, which then puts the results into a memory file of its own that
the daemon copies from; or another session, which this one waits for when it has put what is its
own. docs/decisions/prepared.md has the reasons.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ffserve import protocol
from ffserve.client.daemon.connection import Connection
from ffserve.client.daemon.shared_memory import DaemonSource
from ffserve.client.source import arrays_of, cut
from ffserve.dtypes import Bytes, Int64s
from ffserve.engine.shm import Located
from ffserve.errors import FFServeError, ProtocolError
from ffserve.protocol import ELSEWHERE, READABLE, YOURS

log = logging.getLogger("ffserve")

CHECKED_EVERY = 10_000
"""One in this many samples that are found in memory is prepared again and compared."""
MOST_ROUNDS = 4
"""Samples that vanish before they are copied are claimed again this many times; then this process
prepares them."""
LARGEST_MEMORY = 256 << 20
"""Bytes of the memory file, of which only those that were written take memory; results of one batch
beyond that are not shared."""
PUT_SIZE = 4 << 20
"""Bytes in one PUT, if that is more than one sample: the daemon takes no more of a request than an
eighth of its arena."""
LOOKED_AT = 4096
"""Samples by which it is estimated how many are in memory."""
_ALIGNMENT = 64

Pieces: TypeAlias = Sequence[Any]
"""Buffers that one after another are a prepared sample."""
Make: TypeAlias = Callable[[Int64s], list[Any]]
"""Prepares the samples of these indices."""


class PreparedSource(DaemonSource):
    """The prepared samples of a data set of the daemon, or items that are made of no file.

    Args:
        dataset: its number; None: there is none. paths: of its files.
        key, what: as in PREPARE.
        pieces: the bytes of a result, none if it is not to be shared; value: the result that was
            made of bytes.
        shown: the indices of samples in the user's data set, for messages.
    Raises: what the daemon answers to PREPARE; ServerUnavailable; OSError: no memory file.
    """

    def __init__(
        self,
        connection: Connection,
        dataset: int | None,
        paths: tuple[str, ...],
        key: bytes,
        what: dict[str, Any],
        pieces: Callable[[Any], Pieces],
        value: Callable[[Bytes], Any],
        shown: Callable[[Int64s], Int64s],
    ) -> None:
        memory = os.memfd_create("ffserve-prepared", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, LARGEST_MEMORY)
            self._memory = memoryview(mmap.mmap(memory, LARGEST_MEMORY))
            opened = connection.prepare(dataset, key, what, memory)
        finally:
            os.close(memory)
        try:
            super().__init__(connection, opened, paths)
        except BaseException:
            connection.close_dataset(opened.dataset)
            raise
        self.statistics.prepared = True
        self._name = what["name"]
        self._pieces = pieces
        self._value = value
        self._shown = shown
        self._putting = threading.Lock()
        """Held while the memory file is written to."""
        self._put_tags: list[int] = []
        """Of PUTs that may still be copied from the memory file."""
        self._unchecked = random.randrange(CHECKED_EVERY)
        """Samples before the next one that is checked."""
        self.trusted = True
        """False once a sample was prepared with another result."""

    # ---- reading --------------------------------------------------------------------------

    def values(self, indices: Int64s, make: Make) -> list[Any]:
        """Return prepared samples.

        Args: make: prepares those that this process is to prepare.
        Raises: what `make` raises; ServerUnavailable, ProtocolError: the daemon is gone.
        """
        found = self.cached_arrays(indices)
        if isinstance(found, list):
            self._check(indices, found, make)
            return [self._value(array) for array in found]
        batch = _Batch(indices)
        self._copy(batch, batch.left, make)
        for round in range(MOST_ROUNDS):
            # Of repeated samples one is claimed; the others are found in memory afterwards.
            _, firsts = np.unique(indices[batch.left], return_index=True)
            left = batch.left[np.sort(firsts)]
            if not len(left):
                return batch.values
            for first in range(0, len(left), protocol.MOST_CLAIMED):
                part = left[first : first + protocol.MOST_CLAIMED]
                # The first time nothing is waited for: others may wait for what is claimed here.
                self._claim(batch, part, make, wait=round > 0)
        if len(batch.left):
            batch.enter(batch.left, make(indices[batch.left]))
        return batch.values

    def found_share(self, indices: Int64s) -> float:
        """Return which share of some samples is in memory."""
        some = np.ascontiguousarray(indices[:: len(indices) // LOOKED_AT + 1])
        return 1 - len(self.view.locate(some).missing) / max(len(some), 1)

    def _claim(self, batch: _Batch, left: Int64s, make: Make, *, wait: bool) -> None:
        """Claim samples that are left, prepare those that this process is to, copy the readable."""
        indices = batch.indices[left]
        self.statistics.report_hits()
        tag = self.blocking.channel.claim(self.dataset, indices, wait=wait)
        claimed: protocol.Claimed = self.blocking.wait(tag)
        states = np.frombuffer(claimed.states, np.uint8)
        if len(states) != len(left):
            raise ProtocolError(f"invalid CLAIMED: {len(states)} states of {len(left)} samples")
        mine, shared = (states != READABLE) & (states != ELSEWHERE), states == YOURS
        if mine.any():
            self._make(batch, left[mine], shared[mine], make)
        self._copy(batch, left[states == READABLE], make)

    def _make(self, batch: _Batch, positions: Int64s, shared: Any, make: Make) -> None:
        """Prepare samples, and put those that are shared."""
        indices = batch.indices[positions]
        begun = time.monotonic()
        try:
            values = make(indices)
            cost_s = time.monotonic() - begun
            pieces = [self._pieces(v) for v, s in zip(values, shared.tolist(), strict=True) if s]
        except BaseException:
            self._give_up(indices[shared])
            raise
        self.statistics.count(0, len(values), 0)
        if pieces:
            self._put(indices[shared], pieces, cost_s * len(pieces) / len(values))
        batch.enter(positions, values)

    def _copy(self, batch: _Batch, positions: Int64s, make: Make) -> None:
        """Copy the samples that are readable."""
        indices = batch.indices[positions]
        found = self.view.copy_arrays(indices, arrays_of) if len(indices) else None
        if isinstance(found, Located):
            there = np.ones(len(positions), np.bool_)
            there[found.missing] = False
            positions = positions[there]
            indices = batch.indices[positions]
            found = self.view.copy_arrays(indices, arrays_of) if len(indices) else None
        if found is not None and not isinstance(found, Located):
            arrays, size = found
            self.statistics.add_hits(indices, size)
            self._check(indices, arrays, make)
            batch.enter(positions, [self._value(array) for array in arrays])

    def close(self) -> None:
        """Close the data set; the connection is that of the raw samples."""
        if not self.closed:
            self.closed = True
            if self.connection.alive:
                self.statistics.enter_hits()
                self.connection.close_dataset(self.dataset)

    # ---- handing over ---------------------------------------------------------------------

    def _put(self, indices: Int64s, samples: list[Pieces], cost_s: float) -> None:
        """Write samples to the memory file and have the daemon copy them."""
        sizes = np.array([sum(len(piece) for piece in pieces) for pieces in samples], np.int64)
        places = np.zeros(len(sizes), np.int64)
        steps = -(-sizes // _ALIGNMENT) * _ALIGNMENT
        np.cumsum(steps[:-1], out=places[1:])
        fits = (places + sizes <= LARGEST_MEMORY) & (sizes <= protocol.MOST_PREPARED_SIZE)
        with self._putting:
            self._await_puts()
            for at, pieces, good in zip(places.tolist(), samples, fits.tolist(), strict=True):
                for piece in pieces if good else ():
                    self._memory[at : at + len(piece)] = piece
                    at += len(piece)
            lengths = np.where(fits, sizes, 0)
            for part, size in cut(np.arange(len(sizes)), sizes, protocol.MOST_CLAIMED, PUT_SIZE):
                cost_us = int(1e6 * cost_s * size / max(int(sizes.sum()), 1))
                tag = self.blocking.channel.put(
                    self.dataset, indices[part], places[part], lengths[part], cost_us
                )
                self._put_tags.append(tag)
            self.blocking.flush()

    def _await_puts(self) -> None:
        """Wait until the daemon has copied what was put before.

        If that is not known, since the connection broke, the memory file is never written again: a
        daemon that was stopped may go on, and copy from it for others.
        """
        while self._put_tags:
            try:
                self.blocking.wait(self._put_tags[0])
            except FFServeError:
                if not self.connection.alive:
                    raise
            del self._put_tags[0]

    def _give_up(self, indices: Int64s) -> None:
        """End claims of samples that could not be prepared."""
        if len(indices):
            none = np.zeros(len(indices), np.int64)
            channel = self.blocking.channel
            channel.give_up(channel.put(self.dataset, indices, none, none, 0))
            self.blocking.flush()

    # ---- the check ------------------------------------------------------------------------

    def _check(self, indices: Int64s, arrays: list[Bytes], make: Make) -> None:
        """Prepare one of CHECKED_EVERY samples again and compare."""
        self._unchecked -= len(arrays)
        if self._unchecked >= 0 or not arrays:
            return
        self._unchecked = random.randrange(2 * CHECKED_EVERY)
        k = random.randrange(len(arrays))
        (again,) = make(indices[k : k + 1])
        if b"".join(bytes(piece) for piece in self._pieces(again)) != arrays[k].tobytes():
            self.trusted = False
            self.blocking.channel.distrust(self.dataset, int(indices[k]))
            self.blocking.flush()
            log.warning(
                "%s is not deterministic: it gave two results for sample %d; its samples are "
                "not shared any more",
                self._name,
                int(self._shown(indices[k : k + 1])[0]),
            )


class _Batch:
    """A batch on its way. left: the positions without a value."""

    def __init__(self, indices: Int64s) -> None:
        self.indices = indices
        self.values: list[Any] = [None] * len(indices)
        self.left = np.arange(len(indices), dtype=np.int64)

    def enter(self, positions: Int64s, values: list[Any]) -> None:
        """Enter the values at some positions, all of them left."""
        for position, value in zip(positions.tolist(), values, strict=True):
            self.values[position] = value
        self.left = np.setdiff1d(self.left, positions, assume_unique=True)


def prepared_source(
    source: object,
    key: bytes,
    name: str,
    pieces: Callable[[Any], Pieces],
    value: Callable[[Bytes], Any],
    shown: Callable[[Int64s], Int64s],
) -> PreparedSource | None:
    """Return the prepared samples of a reader's source; None where they cannot be shared."""
    if not isinstance(source, DaemonSource) or not isinstance(source.connection, Connection):
        return None
    if not source.connection.handshake.shares_prepared:
        return None
    about = key, {"name": name}, pieces, value, shown
    try:
        return PreparedSource(source.connection, source.dataset, source.paths, *about)
    except (FFServeError, OSError) as error:
        log.warning("prepared samples are not shared: %s", error)
        return None
