"""Samples through the daemon: hits copied straight out of its arena, misses asked for.

A request looks every sample up in the shared directory, sends GETs for those that are not there,
copies those that are, and then waits. A sample that vanishes between look-up and copy is asked for
like any other; the daemon pins what it announces until this side acknowledges it, so every round
gets further.

Lengths of records that lie in chunks are not known until the daemon has decoded those. A request
for such waits for all of them first, and takes its memory then; a length once known stays so.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from ffserve import protocol
from ffserve.client import buffers
from ffserve.client.connection import Connection
from ffserve.client.in_order import cut
from ffserve.client.request import Awaited, Copy, RemotePending, Steps, Unsized, failures_of
from ffserve.client.source import Batch, Bytes, Int64s, Leased, Pending, Target, check_out
from ffserve.client.tally import Tally
from ffserve.dataset import Layout, ShardInfo
from ffserve.engine.shm import View
from ffserve.errors import FFServeError, ProtocolError, ReadError
from ffserve.formats.base import UNKNOWN_LENGTH

GET_COUNT = 1024
"""Samples in one GET: enough for the engine's full depth many times over."""
GET_SIZE = 8 << 20
"""Bytes of samples in one GET, if that is more than one sample: while the client copies them, the
daemon reads the next ones."""
GETS_IN_FLIGHT = 4
"""The daemon works on the next while this side copies the last."""
EARLY_SIZE, EARLY_S = 1 << 20, 0.001
"""A GET of so many bytes is copied as it comes, with a look at what is there after a millisecond
and then whenever a quarter more time has passed: the copy takes a good part of the time that
reading does. Of a smaller one it is not worth the looks."""
EARLY_IDLE_S = 0.25
"""After so long without a sample the answer is waited for, which has an end."""
_MOST_EMPTY_ROUNDS = 1000


class RemoteSource:
    """A data set of the daemon, opened over a connection.

    Args: opened: the daemon's answer. paths: absolute, of the shards, as they were asked for.

    Raises: ProtocolError when the answer is none; the connection is then still the caller's.
    """

    def __init__(
        self, connection: Connection, opened: protocol.Opened, paths: tuple[str, ...]
    ) -> None:
        self.connection = connection
        self._mappings: list[NDArray[np.uint8]] = []
        self.dataset = opened.dataset
        self._set_up(opened, paths)
        self.description = f"daemon {connection.path}"
        self._closed = False
        self._tally = Tally(connection, opened.dataset)

    def _set_up(self, opened: protocol.Opened, paths: tuple[str, ...]) -> None:
        if (
            len(opened.shards) != len(paths) * protocol.SHARD_DTYPE.itemsize
            or len(opened.formats) != len(paths)
            or not all(isinstance(name, str) for name in opened.formats)
        ):
            raise ProtocolError("the daemon opened another number of shards than asked for")
        table = np.frombuffer(opened.shards, protocol.SHARD_DTYPE)
        self._bases = table["base"].astype(np.int64)
        self.layout = Layout(table["count"].astype(np.int64), self._bases)
        self.count = self.layout.count
        self.shards = [
            ShardInfo(
                path, name, int(row["count"]), int(first), int(row["size"]), int(row["fingerprint"])
            )
            for path, name, row, first in zip(
                paths, opened.formats, table, self.layout.firsts[:-1], strict=True
            )
        ]
        self._map()

    def _map(self) -> None:
        segments = []
        for first, base, count in self.layout.runs():
            mapping = self.connection.given.entries(base, count)
            self._mappings.append(mapping)
            segments.append((mapping.__array_interface__["data"][0], first, count))
        arena = self.connection.given.arena
        self._arena = arena
        self._view = View(arena.__array_interface__["data"][0], arena.nbytes, segments)

    def sizes(self, indices: Int64s | None) -> Int64s:
        """Return lengths in bytes; what lies in chunks that nobody read yet is read."""
        pending = self.start_sizes(indices)
        if pending is not None:
            self._run(pending, self.sizes_steps(pending))
        return self.known_sizes(indices)

    def start_sizes(self, indices: Int64s | None) -> RemotePending | None:
        """Ask for what must be read to know lengths; None when they are known."""
        chosen = self._all() if indices is None else indices
        offsets, missing, unknown = self._view.locate(chosen)
        if not unknown:
            return None
        blank = missing[np.diff(offsets)[missing] == 0]
        return self._begin(chosen[blank], np.arange(len(blank)), Unsized(False, None))

    def sizes_steps(self, pending: RemotePending) -> Steps:
        """What makes lengths known, as `steps`. Raises the error of the first that cannot be."""
        assert pending.unsized is not None
        yield from self._learn(pending, pending.unsized)
        self._let_go(pending)
        for _, error in sorted(pending.unsized.failed.items()):
            raise error
        return {}

    def known_sizes(self, indices: Int64s | None) -> Int64s:
        """Return lengths in bytes, 0 where they are not known."""
        return np.diff(self._view.locate(self._all() if indices is None else indices)[0])

    def _all(self) -> Int64s:
        return np.arange(self.count, dtype=np.int64)

    def estimate(self, indices: Int64s) -> Int64s:
        """Return lengths in bytes, a guess where they are not known; never asks."""
        offsets, missing, unknown = self._view.locate(indices)
        sizes = np.diff(offsets)
        if unknown:
            blank = missing[sizes[missing] == 0]
            means = np.array([s.size // max(s.count, 1) for s in self.shards], np.int64)
            sizes[blank] = means[self.layout.shards(indices[blank])]
        return sizes

    # ---- reading --------------------------------------------------------------------------

    def copied(self, indices: Int64s, out: Bytes | None) -> Batch | None:
        """Copy a batch out of the arena if all of it is there.

        The short way for what is asked for most. It counts and notes no more than it must;
        the tally does the rest, now and then.
        """
        if out is not None:
            check_out(out, 0)
        found = self._view.copy_batch(indices, out, buffers.empty)
        if found is None:
            return None
        buffer, offsets = found
        self._tally.took(indices, len(buffer))
        return Batch(buffer, offsets)

    def start(self, indices: Int64s, *, apart: bool, out: Bytes | None = None) -> RemotePending:
        """Ask for what is not in memory."""
        offsets, missing, unknown = self._view.locate(indices)
        if unknown:
            return self._begin(indices, missing, Unsized(apart, out))
        if out is not None:
            out = check_out(out, int(offsets[-1]))
        pending = RemotePending(indices, Target(offsets, apart=apart, out=out))
        if len(missing):
            self._tally.tell_seen()
            self._want(pending, missing)
            self._ask(pending)
        return pending

    def _begin(self, indices: Int64s, missing: Int64s, unsized: Unsized) -> RemotePending:
        nothing = Target(np.zeros(1, np.int64), apart=False)
        pending = RemotePending(indices, nothing, unsized=unsized)
        self._tally.tell_seen()
        self._want(pending, missing)
        self._ask(pending)
        return pending

    @staticmethod
    def _want(pending: RemotePending, positions: Int64s) -> None:
        offsets = pending.target.offsets
        if offsets[-1] <= GET_SIZE:  # or not known yet
            parts = range(0, len(positions), GET_COUNT)
            pending.todo.extend(positions[k : k + GET_COUNT] for k in parts)
        else:
            sizes = np.diff(offsets)[positions]
            pending.todo.extend(part for part, _ in cut(positions, sizes, GET_COUNT, GET_SIZE))

    def _ask(self, pending: RemotePending) -> None:
        while pending.todo and len(pending.asked) < GETS_IN_FLIGHT:
            positions = pending.todo.popleft()
            tag = self.connection.get(self.dataset, pending.indices[positions])
            pending.asked.append((tag, positions))

    def finish(self, pending: Pending) -> dict[int, FFServeError]:
        """Copy what is there, wait for the rest."""
        return self._run(pending, self.steps(pending))

    def _run(self, pending: Pending, steps: Steps) -> dict[int, FFServeError]:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Awaited):
                    self._copy_early(pending, step)
                    step = steps.send(self.connection.wait_ready(step.tag))
                else:
                    if step.pause_s:
                        time.sleep(step.pause_s)
                    step = steps.send(self.copy(pending, step.positions))
        except StopIteration as end:
            failed: dict[int, FFServeError] = end.value
            return failed
        except BaseException:
            for tag in self.give_up(pending):
                self.connection.give_up(tag)
            raise

    def _copy_early(self, pending: Pending, awaited: Awaited) -> None:
        """Copy what has come until the answer does. What is readable in the directory can be
        taken at any time; the answer only says that all of it is, and what failed."""
        begun = came = now = time.monotonic()
        while awaited.early is not None and len(awaited.early) and now - came < EARLY_IDLE_S:
            if self.connection.answered(awaited.tag, max(EARLY_S, (now - begun) / 4)):
                return
            left = self.copy(pending, awaited.early)
            now = time.monotonic()
            came = now if len(left) < len(awaited.early) else came
            awaited.early = left

    def steps(self, pending: Pending) -> Steps:
        """What `finish` does, one step after the other, without doing it.

        Yields an Awaited, to be sent the READY, or a Copy, to be sent the positions that were
        not readable (what `copy` returns).
        """
        assert isinstance(pending, RemotePending)
        count = len(pending.indices)
        missed = sum(map(len, pending.todo)) + sum(len(p) for _, p in pending.asked)
        if pending.unsized is not None:
            return (yield from self._steps_unsized(pending, pending.unsized, missed))
        if missed < count:
            positions = self._hit_positions(pending) if missed else None
            vanished = yield Copy(positions)
            assert isinstance(vanished, np.ndarray)
            hits = pending.indices if positions is None else pending.indices[positions]
            self._tally.note_seen(hits)
            if len(vanished):
                missed += len(vanished)
                pending.todo.append(vanished)
        self._tally.count(count - missed, missed, int(pending.target.offsets[-1]))
        if not pending.todo and not pending.asked:
            return {}
        return (yield from self._wait(pending))

    def _hit_positions(self, pending: RemotePending) -> Int64s:
        hit = np.ones(len(pending.indices), np.bool_)
        for positions in pending.todo:
            hit[positions] = False
        for _, positions in pending.asked:
            hit[positions] = False
        return np.flatnonzero(hit)

    def _steps_unsized(self, pending: RemotePending, unsized: Unsized, missed: int) -> Steps:
        hits = self._hit_positions(pending)
        yield from self._learn(pending, unsized)
        failed = unsized.failed
        try:
            offsets, missing, unknown = self._view.locate(pending.indices)
            if unknown > len(failed):
                raise ProtocolError("the daemon does not know the length of a sample it read")
            out = unsized.out
            if out is not None:
                out = check_out(out, int(offsets[-1]))
            pending.target = Target(offsets, apart=unsized.apart, out=out)
            bad = np.array(sorted(failed), np.int64)
            gone = np.setdiff1d(missing, bad)
            self._want(pending, gone)
            there = np.setdiff1d(self._hit_positions(pending), bad)
            vanished = yield Copy(there)
            assert isinstance(vanished, np.ndarray)
            self._tally.note_seen(pending.indices[hits])
        finally:
            self._let_go(pending)
        if len(vanished):
            pending.todo.append(vanished)
        self._tally.count(len(pending.indices) - missed, missed, int(offsets[-1]))
        return failed | (yield from self._wait(pending))

    def _learn(self, pending: RemotePending, unsized: Unsized) -> Steps:
        """Wait until everything that was asked for was decoded once, so that its length is known.

        The last few answers are held, not acknowledged, so that most requests find all of it; not
        so where the arena has no room for all of a GET, since others wait for it then.
        """
        while pending.todo or pending.asked:
            self._ask(pending)
            tag, positions = pending.asked[0]
            ready = yield Awaited(tag)
            assert isinstance(ready, protocol.Ready)
            pending.asked.popleft()
            _, rest = self._answered(ready, positions, unsized.failed)
            unsized.held.append(tag)
            while len(unsized.held) > (0 if len(rest) else GETS_IN_FLIGHT):
                self.connection.acknowledge(unsized.held.popleft())
            if len(rest):
                pending.todo.appendleft(rest)
        return {}

    @staticmethod
    def _answered(
        ready: protocol.Ready, positions: Int64s, errors: dict[int, FFServeError]
    ) -> tuple[Int64s, Int64s]:
        """Enter a READY's errors; return the positions that are readable, and those still due."""
        if not 0 <= ready.count <= len(positions):
            raise ProtocolError("the daemon answered for samples it was not asked for")
        done, rest = positions[: ready.count], positions[ready.count :]
        if ready.errors:
            failed = failures_of(ready.errors, len(done))
            errors.update((int(done[k]), error) for k, error in failed.items())
            done = np.delete(done, list(failed))
        return done, rest

    def _wait(self, pending: RemotePending) -> Steps:
        errors: dict[int, FFServeError] = {}
        empty_rounds = 0
        while pending.todo or pending.asked:
            self._ask(pending)
            tag, positions = pending.asked[0]
            size = int(pending.target.offsets[-1]) * len(positions) // len(pending.indices)
            awaited = Awaited(tag, early=positions if size >= EARLY_SIZE else None)
            ready = yield awaited
            assert isinstance(ready, protocol.Ready)
            pending.asked.popleft()
            done, rest = self._answered(ready, positions, errors)
            left = positions if awaited.early is None else awaited.early
            early = len(left) < len(positions)
            if early:
                done, rest = done[np.isin(done, left)], rest[np.isin(rest, left)]
            pause_s = 0.001 if empty_rounds > 10 else 0.0
            vanished = yield Copy(done, pause_s)
            assert isinstance(vanished, np.ndarray)
            self.connection.acknowledge(tag)
            got_on = early or bool(ready.errors) or len(vanished) < len(done)
            empty_rounds = 0 if got_on else empty_rounds + 1
            if empty_rounds > _MOST_EMPTY_ROUNDS:
                raise ReadError(
                    "the daemon's arena is too busy: samples are evicted before they are copied",
                    hint="start the daemon with a larger --arena",
                )
            if len(vanished) or len(rest):
                pending.todo.appendleft(np.concatenate((vanished, rest)))
        return errors

    def copy(self, pending: Pending, positions: Int64s | None) -> Int64s:
        """Copy samples; return the positions of those that were not readable."""
        assert isinstance(pending, RemotePending)
        target = pending.target
        left = self._view.gather(
            pending.indices, target.offsets, target.buffer, target.addresses, positions
        )
        if left is None:
            raise ProtocolError("a sample changed its length while its data set was open")
        return left

    def give_up(self, pending: Pending) -> list[int]:
        """Nobody waits for a request any more; return the tags that are still to be answered."""
        assert isinstance(pending, RemotePending)
        tags = [tag for tag, _ in pending.asked]
        pending.asked.clear()
        pending.todo.clear()
        self._let_go(pending)
        return tags

    def _let_go(self, pending: RemotePending) -> None:
        """Acknowledge what was held until it was copied."""
        while pending.unsized is not None and pending.unsized.held:
            self.connection.acknowledge(pending.unsized.held.popleft())

    # ---- leases ---------------------------------------------------------------------------

    def lease(self, indices: Int64s) -> Leased:
        """Return read-only views of the arena that stay what they are until they are released.

        The daemon pins the samples; those beyond what it pins (leases together take at most half
        of the arena) are copied.
        """
        offsets, missing, _ = self._view.locate(indices)
        sizes = np.diff(offsets)
        starts = np.full(len(indices), -1, np.int64)
        held = _Held(self.connection)
        try:
            first, refused = 0, False
            while first < len(indices) and not refused:
                part = indices[first : first + protocol.MAX_GET_COUNT]
                ready = self.connection.wait_ready(held.ask(self.dataset, part))
                if not 0 <= ready.count <= len(part):
                    raise ProtocolError("the daemon leased samples it was not asked for")
                for _, error in sorted(failures_of(ready.errors, ready.count).items()):
                    raise error
                places = self._view.places(part[: ready.count])
                starts[first : first + ready.count] = places.view(np.int64)  # NOWHERE: -1
                first, refused = first + ready.count, ready.count == 0
            if len(missing):
                sizes = self.known_sizes(indices)
            copied = np.flatnonzero(starts < 0)
            copies: dict[int, Bytes] = {}
            if len(copied):
                copies = dict(zip(copied.tolist(), self._copies(indices[copied]), strict=True))
                sizes[copied] = [copy.nbytes for copy in copies.values()]
            pinned = len(indices) - len(copied)
            misses = min(len(missing), pinned)
            size = int(sizes.sum() - sizes[copied].sum())
            self._tally.count_asked(pinned - misses, misses, size)
            return Leased(self._arena, starts, sizes, copies, held)
        except BaseException:
            held.release()
            raise

    def _copies(self, indices: Int64s) -> list[Bytes]:
        pending = self.start(indices, apart=True)
        errors = self.finish(pending)
        for _, error in sorted(errors.items()):
            raise error
        assert pending.target.arrays is not None
        for array in pending.target.arrays:
            array.flags.writeable = False
        return pending.target.arrays

    # ---- what will be read ----------------------------------------------------------------

    def announce(self, order: Int64s, epoch: int, name: str | None, replacement: bool) -> None:
        """Tell the daemon the order of an epoch."""
        self.connection.announce(self.dataset, epoch, order, name, replacement)

    @property
    def job(self) -> str:
        """The training run that it is opened for."""
        return self.connection.job

    def reached(self, epoch: int, position: int) -> bool:
        """Tell the daemon how far the job has come in an epoch's order; False: it is gone."""
        return self.connection.reached(self.dataset, epoch, position)

    # ---- the rest -------------------------------------------------------------------------

    def tables(
        self, shard: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of a shard's payload offsets, lengths and checksums."""
        count = int(self.layout.counts[shard])
        first = int(self.layout.firsts[shard])
        offsets, checksums = self.connection.given.index(int(self._bases[shard]), count)
        chosen = np.arange(first, first + count, dtype=np.int64)
        edges, missing, unknown = self._view.locate(chosen)
        lengths = np.diff(edges).astype(np.uint64)
        if unknown:
            lengths[missing[lengths[missing] == 0]] = UNKNOWN_LENGTH
        return offsets, lengths, checksums

    def stats(self) -> dict[str, int | float | str]:
        """Return counters since the source was opened."""
        return self._tally.facts()

    def after_fork(self) -> None:
        """The parent's connection is not ours."""
        self._closed = True

    def close(self) -> None:
        """Close the data set; the last one of the process closes the connection."""
        if self._closed:
            return
        self._closed = True
        if self.connection.alive:
            self._tally.enter_fresh()
            self.connection.close_dataset(self.dataset)
        self.connection.leave()


class _Held:
    """Leases that the daemon has been asked for; fulfils `source.Held`."""

    __slots__ = ("_connection", "_tags")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tags: list[int] = []

    def ask(self, dataset: int, indices: Int64s) -> int:
        """Send a LEASE; return its tag."""
        return self._connection.lease(dataset, indices, self._tags)

    def release(self) -> None:
        """Give all of them back. A second call does nothing."""
        tags, self._tags = self._tags, []
        if tags:
            self._connection.release(tags)
