"""From loads to engine batches and back: one engine (one I/O thread) a block device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.arena import Arena
from ffserve.cache.cache import Failure, Int64s, Load
from ffserve.cache.shm import SharedMemory
from ffserve.cache.tables import Blocks, Directory, ShardTable
from ffserve.config import EngineName
from ffserve.engine.io import MERGED_GAP, MERGED_SIZE, Batch, DirectReply, Engine, refused
from ffserve.errors import ReadError
from ffserve.server.chunks import ChunkLoader

MERGED_MOST = 32 * 1024
"""Blocks up to this size are merged: copying more than that out of a bounce buffer (3 us and above)
costs more than the read that is spared."""

Done = Callable[[Load, dict[int, Failure]], None]


class Engines:
    """Submits loads to the engines and reports what came of them.

    Args: kind, depth: of every engine. done: called in the loop's thread, once a load.
    """

    def __init__(
        self,
        kind: EngineName,
        depth: int,
        memory: SharedMemory,
        arena: Arena,
        directory: Directory,
        table: ShardTable,
    ) -> None:
        self._kind = kind
        self._depth = depth
        self._memory = memory
        self._arena = arena
        self._directory = directory
        self._table = table
        self._engines: list[Engine] = []
        self._by_device: dict[int, int] = {}
        self._batches: dict[int, _Part] = {}
        self._next_tag = 1
        self._arena_ready = (0, arena.size)
        self._decoding = ChunkLoader(self._submit_batch, memory, directory, table)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.done: Done = _nobody
        self.broke: Callable[[], object] = _nobody_hears
        """Called when an engine has broken. What it was reading is never reported, since the kernel
        may still write to those slots."""
        self.read_size = 0
        """Bytes read from files since the start, over-read included."""
        self._start_engine()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the engines from this loop."""
        self._loop = loop
        self._decoding.attach(loop)
        for number, engine in enumerate(self._engines):
            loop.add_reader(engine.fileno(), self._reap, number)

    @property
    def kind(self) -> str:
        """Which engine the probe chose."""
        return self._engines[0].kind

    @property
    def broken(self) -> bool:
        """Whether an engine has broken."""
        return any(engine.broken for engine in self._engines)

    @property
    def in_flight(self) -> int:
        """Batches submitted and not yet reported."""
        return len(self._batches) + self._decoding.in_flight

    def _start_engine(self) -> int:
        engine = Engine(self._kind, depth=self._depth)
        engine.set_arena(
            self._memory.address,
            self._memory.size,
            self._directory.entries_memory.address,
            self._directory.capacity,
        )
        self._engines.append(engine)
        engine.arena_ready(*self._arena_ready)
        number = len(self._engines) - 1
        if self._loop is not None:
            self._loop.add_reader(engine.fileno(), self._reap, number)
        return number

    def arena_ready(self, size: int, end: int) -> None:
        """Bytes [0, size) of the arena have their pages, [0, end) are in use; see
        `Engine.arena_ready`. Any thread."""
        self._arena_ready = size, end
        for engine in tuple(self._engines):
            engine.arena_ready(size, end)

    def add_file(self, device: int, fd: int, alignment: int) -> tuple[int, int]:
        """Return (engine, file) for an open file on a device."""
        if device not in self._by_device:
            number = self._start_engine() if self._by_device else 0
            self._by_device[device] = number
        number = self._by_device[device]
        return number, self._engines[number].add_file(fd, alignment)

    def remove_file(self, engine: int, file: int) -> None:
        """Forget a file of which no read is queued or in flight."""
        self._engines[engine].remove_file(file)

    def submit(self, load: Load, answer: DirectReply | None = None) -> None:
        """Read the blocks of a load; `done` is called when all have ended.

        Args: answer: waits for the load; where a part of it is decoded here, it does not go out.
        """
        if self._table.has_chunks:
            chunked = self._table.chunked[load.blocks.shards]
            if chunked.any():
                if answer is not None:
                    answer.cancel()
                self._submit_chunks(load, chunked)
                return
        if len(self._engines) == 1:
            self._submit_whole(load, 0, answer)
            return
        engines = self._table.engines[load.blocks.shards]
        if np.count_nonzero(engines != engines[0]) == 0:
            self._submit_whole(load, int(engines[0]), answer)
            return
        numbers = np.unique(engines).tolist()
        outcome = _Outcome(len(numbers))
        load.reads = 0
        for number in numbers:
            part = _Part(number, load.blocks, load.offsets, load.sizes, load, outcome)
            part = part.take(np.flatnonzero(engines == number))
            load.reads += self._submit_part(part, MERGED_MOST, answer)

    def _submit_whole(self, load: Load, engine: int, answer: DirectReply | None) -> None:
        part = _Part(engine, load.blocks, load.offsets, load.sizes, load, _Outcome(1))
        load.reads = self._submit_part(part, MERGED_MOST, answer)

    def _submit_chunks(self, load: Load, chunked: NDArray[np.bool_]) -> None:
        """What lies in chunks goes by way of their decoder, the rest as ever."""
        plain, packed = np.flatnonzero(~chunked), np.flatnonzero(chunked)
        engines = self._table.engines[load.blocks.shards[plain]]
        numbers = np.unique(engines).tolist()
        outcome = _Outcome(len(numbers) + 1)
        load.reads = len(packed)
        for number in numbers:
            part = _Part(number, load.blocks, load.offsets, load.sizes, load, outcome)
            load.reads += self._submit_part(part.take(plain[engines == number]), MERGED_MOST)
        self._decoding.submit(
            load.blocks.take(packed),
            load.offsets[packed],
            lambda failures: self._ended(load, outcome, failures),
        )

    def _ended(self, load: Load, outcome: _Outcome, failures: dict[int, Failure]) -> None:
        outcome.failures.update(failures)
        outcome.remaining -= 1
        if outcome.remaining == 0:
            self.done(load, outcome.failures)

    def _submit_part(self, part: _Part, most: int, answer: DirectReply | None = None) -> int:
        """Read blocks of one device, those of up to `most` bytes together with neighbours; return
        how many reads that takes."""
        batch = Batch.of_blocks(
            self._table.c,
            part.blocks.table,
            part.slots,
            part.slot_sizes,
            self._memory.address,
            (most, MERGED_GAP, MERGED_SIZE),
        )
        reads = batch.read_count
        if answer is not None:
            answer.wait_for(batch)
        batch.tag = self._next_tag
        self._batches[batch.tag] = part
        self._next_tag += 1
        self._submit_batch(part.engine, batch)
        return reads

    def _submit_batch(self, engine: int, batch: Batch) -> None:
        try:
            self._engines[engine].submit(batch)
        except ReadError:
            self.broke()

    def reap(self) -> None:
        """Report what has ended by now, without waiting to be told."""
        for number in range(len(self._engines)):
            self._reap(number)

    def _reap(self, number: int) -> None:
        engine = self._engines[number]
        for batch in engine.completed():
            if batch.failed and engine.broken:
                self.broke()
                return
            self.read_size += batch.bytes
            if self._decoding.took(batch):
                continue
            part = self._batches.pop(batch.tag)
            if batch.failed and len(batch.reads) < len(part.slots):
                # What the disk refused as a whole is read again, each block by itself.
                heads = np.cumsum(part.blocks.counts) - part.blocks.counts
                rows = np.flatnonzero(refused(batch.records["status"][heads]))
                if len(rows):
                    again = part.take(rows)
                    batch.records["status"][np.isin(batch.records["entry"], again.samples())] = 0
                    part.outcome.remaining += 1
                    self._submit_part(again, 0)
            failures = _failures(batch) if batch.failed else {}
            batch.free()
            self._ended(part.load, part.outcome, failures)

    def counters(self) -> dict[str, int]:
        """Return the engines' counters, summed."""
        total: dict[str, int] = {}
        for engine in self._engines:
            for name, value in engine.counters().items():
                total[name] = total.get(name, 0) + value
        return total

    def close(self) -> None:
        """Wait for what is in flight and end the I/O threads."""
        for engine in self._engines:
            if self._loop is not None:
                self._loop.remove_reader(engine.fileno())
            engine.close()
        self._decoding.close()


class _Outcome:
    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.failures: dict[int, Failure] = {}


@dataclass(slots=True)
class _Part:
    """The blocks of a load that lie on one device, with their slots."""

    engine: int
    blocks: Blocks
    slots: Int64s
    slot_sizes: Int64s
    load: Load
    outcome: _Outcome

    def take(self, rows: Int64s) -> _Part:
        """Return some of the blocks."""
        slots, sizes = self.slots[rows], self.slot_sizes[rows]
        return _Part(self.engine, self.blocks.take(rows), slots, sizes, self.load, self.outcome)

    def samples(self) -> Int64s:
        """Return the numbers of all samples in the blocks."""
        firsts, counts = self.blocks.firsts, self.blocks.counts
        starts = np.cumsum(counts) - counts
        return np.repeat(firsts - starts, counts) + np.arange(int(counts.sum()))


def _failures(batch: Batch) -> dict[int, Failure]:
    records = batch.records
    bad = records[records["status"] != 0]
    return {
        int(row["entry"]): Failure(int(row["status"]), int(row["found"]), int(row["checksum"]))
        for row in bad
    }


def _nobody(load: Load, failures: dict[int, Failure]) -> None:
    raise AssertionError("a load ended and nobody was told")


def _nobody_hears() -> None:
    raise AssertionError("an engine broke and nobody was told")
