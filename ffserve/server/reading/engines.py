"""I/O of the daemon: loads become engine batches, and their outcomes go back to the scheduler.

Extents, checks, decoding and second reads are those of `ffserve/reads/`; here they are driven from
the event loop, and samples are put into slots of the arena. A load is divided by device, by what is
in the page cache, and into records and chunks. It ends with the last of its parts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from ffserve.cache.arena import Arena
from ffserve.cache.cache import Load
from ffserve.cache.tables import Blocks, Directory, ShardTable
from ffserve.config import EngineName
from ffserve.dtypes import Int32s, Int64s
from ffserve.engine.io import MERGED_GAP, MERGED_SIZE, DirectReply, Engine, EngineBatch
from ffserve.engine.shm import NOWHERE
from ffserve.errors import STATUS_CHECKSUM, ChecksumError, ReadError
from ffserve.reads.records import Failures, outcome_of
from ffserve.reads.second_read import WrongRecord
from ffserve.server.files.remote import RemoteShard
from ffserve.server.prepared.copying import Copier
from ffserve.server.reading.chunk_loader import ChunkLoader
from ffserve.server.reading.damage import Outcome, SecondReader, WrongSample
from ffserve.server.reading.devices import Device, Devices
from ffserve.server.reading.fetches import BlockGate, Fetches, WaitingLoad
from ffserve.server.reading.requests import SampleRequest
from ffserve.server.reading.statistics import Histogram
from ffserve.server.users.peers import Account, account_of
from ffserve.store.fetching import Fetcher
from ffserve.system.memfd import SharedMemory

MERGED_MOST = 32 * 1024
"""Blocks up to this size are merged. Copying a larger one out of a bounce buffer (3 us and above)
costs more than the read that merging saves."""
SLOW_S = 5.0
"""The daemon reports the disk of a read that takes longer: hundreds of reads may wait for one disk,
but not for this long."""
SLOW_READ_S = 0.5
"""`ffserve status` shows the files of a read that takes longer."""


@dataclass(slots=True)
class _Reading:
    """A batch in flight: which blocks of a load it reads (None: all). units: see `outcome_of`;
    None: those blocks."""

    load: Load
    rows: Int64s | None
    units: Int64s | None = None

    @property
    def blocks(self) -> Blocks:
        """The blocks that it reads."""
        return self.load.blocks if self.rows is None else self.load.blocks.take(self.rows)


class ReadEvents(Protocol):
    """The receiver of the outcomes of reads. It is called in the loop's thread, with the time."""

    def ended(self, loads: list[Load], now: float) -> None:
        """Take loads that have ended, with their failures. There may be no load."""
        ...

    def broken(self) -> None:
        """Note that an engine has broken. Its loads are never reported, since the kernel may still
        write to their slots."""
        ...

    def slow_disk(self, device: str, seconds: float, now: float) -> None:
        """Note that a read from a device takes this many seconds."""
        ...

    def slow_read(self, numbers: Int64s, seconds: float, now: float) -> None:
        """Note that the reads of these samples, one of each block, took SLOW_READ_S or longer."""
        ...

    def corrected(self, numbers: Int64s, now: float) -> None:
        """Note samples that were right at the second read only."""
        ...


class Engines:
    """Submits loads to the engines and reports when they have ended.

    Args:
        kind, depth: of every engine.
        events: is told of the loads that have ended, and of slow and broken devices.
        fetcher: brings the blocks of remote files; None: there are none.
    """

    def __init__(
        self,
        kind: EngineName,
        depth: int,
        memory: SharedMemory,
        arena: Arena,
        directory: Directory,
        table: ShardTable,
        events: ReadEvents,
        fetcher: Fetcher | None = None,
    ) -> None:
        self._kind, self._depth = kind, depth
        self._memory = memory
        self._directory = directory
        self._table = table
        self._batches: dict[EngineBatch, _Reading] = {}
        """Batches of records in flight."""
        self._arena_ready = (0, arena.size)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._devices = Devices(self._start_engine, self._watch)
        self._chunks = ChunkLoader(
            memory, directory, table, self._devices, self._submit, self._ended_apart, self._mending,
            self._read_chunks_again,
        )  # fmt: skip
        self.copier = Copier(memory, directory, self._ended_apart)
        """Copies prepared samples."""
        self.fetches = (
            None if fetcher is None else Fetches(fetcher, table, directory, self._fetched)
        )
        self._second, self._second_of_remote = (
            SecondReader(memory, directory, self._ended_apart) for _ in range(2)
        )
        """Readers of damaged samples. The second one is for remote files, whose reads may wait for
        an origin."""
        self._events = events
        self._done: list[Load] = []
        """Loads that have ended and were not reported yet."""
        self._awake_at = time.monotonic()
        """When the loop was last known to run."""
        self.checksum_failures = 0
        """Samples whose checksum did not match, since the start."""
        self.read_size = 0
        """Bytes read from files since the start, over-read included."""
        self.cached_size = 0
        """The bytes of these that were read from the page cache, without over-read and chunks."""
        self.reading = Histogram()
        """How long reads took, from their submission to their end."""

    # ---- engines --------------------------------------------------------------------------

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the engines from this loop."""
        self._loop = loop
        parts = self._chunks, self.copier, self._second, self._second_of_remote, self.fetches
        for part in parts:
            if part is not None:
                part.attach(loop)
        for device in self._devices.all:
            self._watch(device)

    def _watch(self, device: Device) -> None:
        if self._loop is not None:
            self._loop.add_reader(device.engine.fileno(), self._reap, device)

    def _start_engine(self) -> Engine:
        engine = Engine(self._kind, depth=self._depth)
        entries = self._directory.entries_memory.address, self._directory.capacity
        engine.set_arena(self._memory.address, self._memory.size, *entries)
        engine.arena_ready(*self._arena_ready)
        return engine

    @property
    def kind(self) -> str:
        """The kind of engine that the probe chose."""
        return self._devices.all[0].engine.kind

    @property
    def decoding(self) -> Histogram:
        """The time from the end of the read of chunks to the end of their decoding."""
        return self._chunks.decoding

    @property
    def broken(self) -> bool:
        """Whether an engine has broken."""
        return any(device.engine.broken for device in self._devices.all)

    @property
    def in_flight(self) -> int:
        """Parts of loads that have not ended."""
        parts = self._chunks, self.copier, self._second, self._second_of_remote, self.fetches
        return len(self._batches) + sum(part.in_flight for part in parts if part is not None)

    def arena_ready(self, size: int, end: int) -> None:
        """Bytes [0, size) of the arena have their pages, [0, end) are in use; see
        `Engine.arena_ready`. Any thread."""
        self._arena_ready = size, end
        for device in tuple(self._devices.all):
            device.engine.arena_ready(size, end)

    def add_files(
        self, device: int, fds: Int32s, alignments: Int64s, cached_fds: Int32s
    ) -> tuple[int, Int32s]:
        """Return the number of a device's engine, and those of open files on it.

        Args: cached_fds: the same files, see `page_cache.open_cached`; -1: not open.
        """
        found = self._devices.of(device)
        return found.number, found.add_files(fds, alignments, cached_fds)

    def remove_file(self, engine: int, file: int) -> None:
        """Forget a file of which no read is queued or in flight."""
        self._devices.all[engine].remove_file(file)

    def device_of(self, engine: int) -> str:
        """Return the device that an engine reads: where it is mounted, and its number."""
        return self._devices.name_of(self._devices.all[engine])

    def counters(self) -> dict[str, int]:
        """Return the engines' counters, summed."""
        total: dict[str, int] = {}
        for device in self._devices.all:
            for name, value in device.engine.counters().items():
                total[name] = total.get(name, 0) + value
        return total

    # ---- loads to batches -----------------------------------------------------------------

    def submit(self, load: Load, reply: DirectReply | None = None) -> None:
        """Read the blocks of a load.

        Args: reply: waits for the load; it is never sent if a part of the load is decoded here.
        """
        if load.source is not None:
            load.batches += 1
            self.copier.submit(load)
            return
        if self.fetches is not None and (waiting := self._hold(self.fetches, load)) is not None:
            if reply is not None:
                reply.hold()
            load.reads, load.batches = 1, load.batches + 1
            self.fetches.fetch(waiting)
            return
        load.reads = self._read(load, None, reply)

    def _read(self, load: Load, rows: Int64s | None, reply: DirectReply | None) -> int:
        """Read blocks of a load (None: all) from their files; return the number of reads."""
        if self._table.has_chunks:
            shards = load.blocks.shards if rows is None else load.blocks.shards[rows]
            chunked = self._table.chunked[shards]
            if chunked.any():
                if reply is not None:
                    reply.hold()
                every = np.arange(len(shards)) if rows is None else rows
                plain = every[~chunked]
                self._chunks.submit(load, every[chunked])
                reads = len(every) - len(plain)
                return reads + (self._read_records(load, plain, None) if len(plain) else 0)
        return self._read_records(load, rows, reply)

    def _read_records(self, load: Load, rows: Int64s | None, reply: DirectReply | None) -> int:
        """Read blocks of records: a batch for each device, and for what is in the page cache."""
        parts = list(self._parts(load, rows))
        if reply is not None and len(parts) > 1:
            reply.hold()
        reads = sum(self._submit_part(load, reply, *part) for part in parts)
        if reply is not None and len(parts) > 1:
            reply.arm()
        return reads

    def _parts(self, load: Load, rows: Int64s | None) -> list[tuple[Device, Int64s | None, bool]]:
        """Return the device of each part of some blocks (None: all), their rows, and whether they
        are in the page cache. Of each device the disk's part is the first: the disk is busy with it
        while the other is copied."""
        devices = self._devices.all
        if len(devices) == 1:
            by_device: list[tuple[Device, Int64s | None]] = [(devices[0], rows)]
        else:
            shards = load.blocks.shards if rows is None else load.blocks.shards[rows]
            engines = self._table.engines[shards]
            numbers = np.unique(engines).tolist()
            if len(numbers) == 1:
                by_device = [(devices[numbers[0]], rows)]
            else:
                every = np.arange(len(shards)) if rows is None else rows
                by_device = [(devices[number], every[engines == number]) for number in numbers]
        found: list[tuple[Device, Int64s | None, bool]] = []
        for device, mine in by_device:
            cached = None
            if device.cached.count:
                blocks = load.blocks if mine is None else load.blocks.take(mine)
                files = self._table.files[blocks.shards]
                cached = device.cached.find(files, blocks.begins, blocks.ends)
            if cached is None:
                found.append((device, mine, False))
                continue
            every = np.arange(len(cached)) if mine is None else mine
            halves = (every[~cached], False), (every[cached], True)
            found += [(device, part, from_cache) for part, from_cache in halves if len(part)]
        return found

    def _submit_part(
        self,
        load: Load,
        reply: DirectReply | None,
        device: Device,
        rows: Int64s | None,
        cached: bool,
        file: int = -1,
    ) -> int:
        """Read blocks by one batch; return the number of reads.

        Args: cached: through the page cache. file: to read from, in the place of their own.
        """
        blocks, offsets, sizes = load.blocks, load.offsets, load.sizes
        if rows is not None:
            blocks, offsets, sizes = blocks.take(rows), offsets[rows], sizes[rows]
        batch = EngineBatch.of_blocks(
            self._table.c,
            blocks.table,
            offsets,
            sizes,
            self._memory.address,
            (MERGED_MOST, MERGED_GAP, MERGED_SIZE),
            cached=cached or file >= 0,
        )
        if file >= 0:
            batch.reads["file"] = file
        elif cached:
            batch.reads["file"] = device.cached.numbers(batch.reads["file"])
            self.cached_size += int((blocks.ends - blocks.begins).sum())
        if reply is not None:
            reply.wait_for(batch)
        return self._begin(device, batch, _Reading(load, rows))

    def _begin(self, device: Device, batch: EngineBatch, reading: _Reading) -> int:
        count = batch.read_count
        self._batches[batch] = reading
        reading.load.batches += 1
        self._submit(device, batch)
        return count

    def _submit(self, device: Device, batch: EngineBatch) -> None:
        batch.begun = time.monotonic()
        try:
            device.engine.submit(batch)
        except ReadError:
            self._events.broken()

    # ---- remote files ---------------------------------------------------------------------

    def set_remotes(self, engine: int, files: Int32s, shards: dict[int, RemoteShard]) -> None:
        """Note that files that were added belong to remote shards. Args: shards: of each, by its
        first number."""
        assert self.fetches is not None
        device = self._devices.all[engine]
        numbers = files.tolist(), device.cached.numbers(files).tolist()
        for number, again, (base, remote) in zip(*numbers, shards.items(), strict=True):
            device.remote[number] = remote
            if again >= 0:
                device.remote[again] = remote
            self.fetches.add(base, remote)

    def remove_remote(self, base: int) -> None:
        """Note that a remote shard is closed. Args: base: its first number."""
        if self.fetches is not None:
            self.fetches.remove(base)

    def _mending(
        self, device: Device, file: int, load: Load, begin: int, end: int
    ) -> Callable[[], bool] | None:
        """Return a function that fetches an extent of a file again if this disk has damaged it;
        None if the file is not remote."""
        remote = device.remote.get(file)
        if remote is None or self.fetches is None:
            return None
        passed = device.fd(file) if file in device.memory else -1
        return partial(self.fetches.mend, remote, load, begin, end, passed)

    @staticmethod
    def _hold(fetches: Fetches, load: Load) -> WaitingLoad | None:
        asking = load.fetches[0]
        gate = asking.gate if isinstance(asking, SampleRequest) else None
        return fetches.hold(load, gate if isinstance(gate, BlockGate) else None)

    def _fetched(self, waiting: WaitingLoad) -> None:
        """Read a load whose blocks came or cannot be had."""
        load, fetches = waiting.load, self.fetches
        assert fetches is not None
        load.fetch_s = time.monotonic() - waiting.begun
        load.failures.update(fetches.failures(waiting))
        # Shards were opened and closed meanwhile.
        load.blocks.shards[:] = self._table.rows(load.blocks.firsts)
        left = np.ones(len(load.blocks.firsts), np.bool_)
        left[list(waiting.errors)] = False
        for passed, rows in waiting.passed:
            mine = rows[left[rows]]
            left[mine] = False
            self._read_passed(load, passed.fd, mine, fetches.shard(passed.base))
        if left.any():
            self._read(load, None if left.all() else np.flatnonzero(left), None)
        self._ended_apart(load)

    def _read_passed(self, load: Load, fd: int, rows: Int64s, remote: RemoteShard | None) -> None:
        """Read blocks of one shard from a memory file, which is closed with the load. Args: remote:
        where its bytes came from."""
        if not len(rows):
            os.close(fd)
            return
        device = self._devices.all[int(self._table.engines[load.blocks.shards[rows[0]]])]
        file = device.add_memory(fd, remote)
        load.releases += [partial(device.remove_memory, file), partial(os.close, fd)]
        if self._table.chunked[load.blocks.shards[rows[0]]]:
            self._chunks.submit(load, rows, file)
        else:
            self._submit_part(load, None, device, rows, False, file)

    # ---- batches that have ended ----------------------------------------------------------

    def reap(self) -> None:
        """Report the batches that have ended by now, without waiting for the loop."""
        for device in self._devices.all:
            self._end_batches(device)
        self._report()

    def _reap(self, device: Device) -> None:
        # Loads that have ended are answered before anything else is read, which takes far longer.
        self._end_batches(device)
        self._report()

    def _report(self) -> None:
        done, self._done = self._done, []
        self._events.ended(done, time.monotonic())

    def _end_batches(self, device: Device) -> None:
        engine = device.engine
        now = time.monotonic()
        self._wake(now)
        for batch in engine.completed():
            if batch.failed and engine.broken:
                self._events.broken()
                return
            took_s = now - batch.begun
            self.reading.note(took_s)
            if took_s >= SLOW_READ_S:
                self._note_slow(device, batch, took_s, now)
            self.read_size += batch.bytes
            if self._chunks.take(batch):
                continue
            reading = self._batches.pop(batch)
            if batch.failed:
                self._fail(device, batch, reading)
            batch.free()
            self._ended(reading.load)

    def _fail(self, device: Device, batch: EngineBatch, reading: _Reading) -> None:
        """Enter the failures of a batch, and read again what may be right then."""
        load, units = reading.load, reading.units
        if units is None:
            counts = reading.blocks.counts
            units = np.repeat(np.arange(len(counts)), counts)
        found = outcome_of(batch, batch.records["entry"].astype(np.int64), units)
        load.failures.update(found.failures)
        if found.again is not None:
            again = _Reading(load, reading.rows, units[found.rows])
            self._begin(device, found.again, again)
        if found.wrong:
            samples = [self._wrong_sample(device, load, record) for record in found.wrong]
            remote = any(sample.mend is not None for sample in samples)
            reader = self._second_of_remote if remote else self._second
            reader.submit(load, samples, _who_asks(load))

    def _read_chunks_again(
        self, load: Load, read: Callable[[], Outcome], failures: Failures
    ) -> None:
        self._second_of_remote.call(load, read, failures, _who_asks(load))

    def _wrong_sample(self, device: Device, load: Load, record: WrongRecord) -> WrongSample:
        file, place = record.file, record.dest - self._memory.address
        if record.slot != NOWHERE:
            # As the engine reads it: from the beginning of a disk block on.
            alignment = device.alignment(file)
            place = record.slot + record.offset - record.read_offset // alignment * alignment
        extent = record.offset, record.offset + record.length
        return WrongSample(
            record, device.fd(file), place, self._mending(device, file, load, *extent)
        )

    def _ended_apart(self, load: Load) -> None:
        """Note that a part of a load has ended, and not with a batch of records."""
        self._ended(load)
        self._report()

    def _ended(self, load: Load) -> None:
        """Note that a part of a load has ended."""
        load.batches -= 1
        if load.batches:
            return
        for release in load.releases:
            release()
        self.checksum_failures += sum(
            f.status == STATUS_CHECKSUM or isinstance(f.error, ChecksumError)
            for f in load.failures.values()
        )
        if load.right:
            self._events.corrected(np.array(load.right, np.int64), time.monotonic())
        self._done.append(load)

    # ---- slow reads -----------------------------------------------------------------------

    def _note_slow(self, device: Device, batch: EngineBatch, took_s: float, now: float) -> None:
        """A batch that has ended took long."""
        if took_s >= SLOW_S and batch is not device.slow:
            self._events.slow_disk(self._devices.name_of(device), took_s, now)
        reading = self._batches.get(batch)
        firsts = self._chunks.firsts_of(batch) if reading is None else reading.blocks.firsts
        self._events.slow_read(firsts, took_s, now)

    def find_slow(self, now: float) -> None:
        """Find reads that have been in flight for long. Called more often than every SLOW_S."""
        self._wake(now)
        for device in self._devices.all:
            batch = next(iter(device.engine.in_flight), None)
            slow = batch is not None and now - batch.begun >= SLOW_S
            if batch is not None and slow and batch is not device.slow:
                self._events.slow_disk(self._devices.name_of(device), now - batch.begun, now)
            device.slow = batch if slow else None

    def _wake(self, now: float) -> None:
        """Note that the loop runs. If it has not run for long (the process was stopped, the machine
        slept), the disks are not to blame, and their reads count as begun now."""
        if now - self._awake_at >= SLOW_S:
            for device in self._devices.all:
                for batch in device.engine.in_flight:
                    batch.begun = now
        self._awake_at = now

    def close(self) -> None:
        """Wait for the reads in flight and end the I/O threads."""
        if self.fetches is not None:
            self.fetches.close()
        for device in self._devices.all:
            if self._loop is not None:
                self._loop.remove_reader(device.engine.fileno())
            device.engine.close()
        for part in (self._chunks, self.copier, self._second, self._second_of_remote):
            part.close()


def _who_asks(load: Load) -> Account | None:
    """Return the user whose request a load is for; None: it is read ahead."""
    asking = load.fetches[0] if load.fetches else None
    owner = asking.owner.who if isinstance(asking, SampleRequest) else None
    return None if owner is None else account_of(owner)
