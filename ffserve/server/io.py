"""I/O of the daemon: loads become engine batches; one engine (one I/O thread) per block device."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ffserve.cache.arena import Arena
from ffserve.cache.cache import Failure, Int64s, Load
from ffserve.cache.tables import Blocks, Directory, ShardTable
from ffserve.config import EngineName
from ffserve.engine.io import MERGED_GAP, MERGED_SIZE, DirectReply, Engine, EngineBatch, refused
from ffserve.engine.shm import NOWHERE
from ffserve.errors import STATUS_CHECKSUM, ChecksumError, ReadError
from ffserve.memfd import SharedMemory
from ffserve.server.chunks import ChunkLoader
from ffserve.server.damage import SecondReader, WrongSample
from ffserve.server.fetches import Fetches, Gate, Waiting
from ffserve.server.page_cache import CachedFiles, Int32s
from ffserve.server.remote import RemoteShard
from ffserve.server.scheduler import SampleRequest
from ffserve.server.statistics import Histogram
from ffserve.store.fetching import Fetcher

MERGED_MOST = 32 * 1024
"""Blocks up to this size are merged. Copying a larger one out of a bounce buffer (3 us and above)
costs more than the read that merging saves."""


SLOW_S = 5.0
"""A read that takes longer is slow: hundreds of reads may wait for one disk, but not so long."""
SLOW_READ_S = 0.5
"""The files of a read that takes longer are shown as slow."""

MOST_AGAIN = 1024
"""Wrong samples of a batch that are read again. A block may hold 8192 small samples; where as many
are wrong, the others are reported as they are."""

MOST_ENGINES = 16
"""Users can make devices without a disk (tmpfs, subvolumes): beyond, such devices share engines."""


@dataclass(slots=True)
class _MemoryFile:
    """A client's memory file. loads: that read from it. removed: it is not needed any more."""

    fd: int
    loads: int = 0
    removed: bool = False


class Engines:
    """Submits loads to the engines and reports when they have ended.

    Args:
        kind, depth: of every engine.
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
        fetcher: Fetcher | None = None,
    ) -> None:
        self._kind, self._depth = kind, depth
        self._memory = memory
        self._directory = directory
        self._table = table
        self._engines: list[Engine] = []
        self._by_device: dict[int, int] = {}
        self._diskless: list[int] = []
        """Engines of devices without a disk."""
        self._cached: list[CachedFiles] = []
        """By engine."""
        self._batches: dict[EngineBatch, tuple[Load, Int64s | None]] = {}
        """Batches in flight: the load, and which of its blocks (None: all)."""
        self._memory_files: dict[int, _MemoryFile] = {}
        """Of the first engine, by number."""
        self._arena_ready = (0, arena.size)
        self._fds: list[Int32s] = []
        """By engine: the descriptor of each of its files, by number."""
        self._chunks = ChunkLoader(
            self._submit,
            memory,
            directory,
            table,
            self._decoded,
            self._file_numbers,
            self._fd_of,
            self._mend_file,
        )
        self.fetches = (
            None if fetcher is None else Fetches(fetcher, table, directory, self._fetched)
        )
        self._remote: dict[tuple[int, int], RemoteShard] = {}
        """By engine and number of the file: those of remote files."""
        # The second is for samples of remote files, which may wait for an origin.
        self._second, self._mending = (
            SecondReader(memory, directory, self._decoded) for _ in range(2)
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self.loaded: Callable[[Load, dict[int, Failure], float], object] = _unexpected
        """Called in the loop's thread when a load has ended, with its failures and the time:
        `Scheduler.loaded`."""
        self.reaped: Callable[[float], object] = _unexpected
        """Called with the time after some loads have ended; see `Scheduler.loaded`."""
        self.on_broken: Callable[[], object] = _unexpected
        """Called when an engine has broken. Its loads are never reported, since the kernel may
        still write to their slots."""
        self.on_slow: Callable[[str, float], object] = _unexpected
        """Called with a device and the seconds that a read from it takes."""
        self.on_right: Callable[[Int64s], object] = _unexpected
        """Called with samples that were right at the second read only."""
        self.on_slow_read: Callable[[Int64s, float], object] = lambda *_: None
        """Called with samples whose reads together took SLOW_READ_S or longer, one of each block,
        and the seconds."""
        self._slow: list[EngineBatch | None] = []
        """By engine: the batch in flight of which `on_slow` was told."""
        self._awake_at = time.monotonic()
        """When the loop was last known to run."""
        self.checksum_failures = 0
        """Samples whose checksum did not match, since the start."""
        self.read_size = 0
        """Bytes read from files since the start, over-read included."""
        self.reading = Histogram()
        """From the submission of reads to their end."""
        self.cached_size = 0
        """Those of them that were read from the page cache, without over-read and chunks."""
        self._start_engine()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the engines from this loop."""
        self._loop = loop
        self._chunks.attach(loop)
        self._second.attach(loop)
        self._mending.attach(loop)
        if self.fetches is not None:
            self.fetches.attach(loop)
        for number, engine in enumerate(self._engines):
            loop.add_reader(engine.fileno(), self._reap, number)

    @property
    def kind(self) -> str:
        """The kind of engine that the probe chose."""
        return self._engines[0].kind

    @property
    def decoding(self) -> Histogram:
        """How long chunks were decoded, from the end of their read."""
        return self._chunks.decoding

    @property
    def broken(self) -> bool:
        """Whether an engine has broken."""
        return any(engine.broken for engine in self._engines)

    @property
    def in_flight(self) -> int:
        """Batches submitted and not yet reported."""
        fetching = 0 if self.fetches is None else self.fetches.in_flight
        again = self._second.in_flight + self._mending.in_flight
        return len(self._batches) + self._chunks.in_flight + again + fetching

    def _start_engine(self) -> int:
        engine = Engine(self._kind, depth=self._depth)
        engine.set_arena(
            self._memory.address,
            self._memory.size,
            self._directory.entries_memory.address,
            self._directory.capacity,
        )
        self._engines.append(engine)
        self._cached.append(CachedFiles())
        self._fds.append(np.zeros(0, np.int32))
        self._slow.append(None)
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

    def add_files(
        self, device: int, fds: Int32s, alignments: Int64s, cached_fds: Int32s
    ) -> tuple[int, Int32s]:
        """Return the engine of a device, and the numbers of open files on it.

        Args: cached_fds: the same files, see `page_cache.open_cached`; -1: not open.
        """
        number = self._by_device.get(device)
        if number is None:
            number = self._by_device[device] = self._engine_for(device)
        engine = self._engines[number]
        files = engine.add_files(fds, alignments)
        cached = engine.add_files(cached_fds, np.ones(len(fds), np.int64))
        self._cached[number].add(files, cached_fds, cached)
        more = int(max(files.max(), cached.max())) + 1 - len(self._fds[number])
        if more > 0:
            more += len(self._fds[number])
            self._fds[number] = np.append(self._fds[number], np.full(more, -1, np.int32))
        self._fds[number][cached[cached >= 0]] = cached_fds[cached >= 0]
        self._fds[number][files] = fds
        return number, files

    def _fd_of(self, engine: int, file: int) -> int:
        """Return the descriptor of a file that is being read, by its number. Any thread."""
        return int(self._fds[engine][file])

    def _engine_for(self, device: int) -> int:
        """Return the number of the engine of a device from which nothing was read so far."""
        if not self._by_device:
            return 0
        number = len(self._engines)
        if os.major(device):
            return self._start_engine()
        if number < MOST_ENGINES or not self._diskless:
            self._diskless.append(number)
            return self._start_engine()
        return self._diskless[device % len(self._diskless)]

    def remove_file(self, engine: int, file: int) -> None:
        """Forget a file of which no read is queued or in flight."""
        for number in (file, self._cached[engine].remove(file)):
            if number >= 0:
                self._remote.pop((engine, number), None)
                self._engines[engine].remove_file(number)

    def set_remote(self, engine: int, file: int, base: int, remote: RemoteShard) -> None:
        """A file that was added is that of a remote shard. Args: base: its first number."""
        assert self.fetches is not None
        (cached,) = self._cached[engine].numbers(np.array([file], np.int32)).tolist()
        for number in (file, cached):
            if number >= 0:
                self._remote[engine, number] = remote
        self.fetches.add(base, remote)

    def _mend_file(self, engine: int, file: int, begin: int, end: int) -> bool:
        """Have an extent of a file fetched again if it is remote and damaged on this disk; return
        whether it was. In a thread that may wait."""
        remote = self._remote.get((engine, file))
        return (
            remote is not None
            and self.fetches is not None
            and self.fetches.mend(remote, begin, end)
        )

    def add_memory(self, fd: int) -> int:
        """Take a memory file that prepared samples are read from; return its number for
        `Fetch.file`."""
        (number,) = self._engines[0].add_files(np.array([fd], np.int32), np.ones(1, np.int64))
        self._memory_files[int(number)] = _MemoryFile(fd)
        return int(number)

    @property
    def memory_count(self) -> int:
        """Memory files that are open."""
        return len(self._memory_files)

    def remove_memory(self, number: int) -> None:
        """Close a memory file, as soon as no load reads from it any more."""
        file = self._memory_files[number]
        file.removed = True
        self._close_unused(number, file)

    def _close_unused(self, number: int, file: _MemoryFile) -> None:
        if file.removed and not file.loads:
            del self._memory_files[number]
            self._engines[0].remove_file(number)
            os.close(file.fd)

    def _file_numbers(self, engines: Int32s, files: Int32s, begins: Int64s, ends: Int64s) -> Int32s:
        """Return the numbers by which extents are read: through the page cache what is there."""
        chosen = files
        for number in np.unique(engines).tolist():
            of_engine = np.flatnonzero(engines == number)
            cached = self._cached[number]
            found = cached.find(files[of_engine], begins[of_engine], ends[of_engine])
            if found is not None:
                chosen = chosen.copy() if chosen is files else chosen
                inside = of_engine[found]
                chosen[inside] = cached.numbers(files[inside])
        return chosen

    def submit(self, load: Load, reply: DirectReply | None = None) -> None:
        """Read the blocks of a load.

        Args: reply: waits for the load; it is never sent if a part of the load is decoded here.
        """
        if load.file >= 0:
            self._memory_files[load.file].loads += 1
            load.reads = self._read(0, load, None, MERGED_MOST, reply)
            return
        if self.fetches is not None and (waiting := self._hold(self.fetches, load)) is not None:
            if reply is not None:
                reply.hold()
            load.reads, load.batches = 1, load.batches + 1
            self.fetches.fetch(waiting)
            return
        load.reads = self._submit_rows(load, None, reply)

    def _submit_rows(self, load: Load, rows: Int64s | None, reply: DirectReply | None) -> int:
        """Read blocks of a load (None: all) from their files; return the number of reads."""
        if self._table.has_chunks:
            shards = load.blocks.shards if rows is None else load.blocks.shards[rows]
            chunked = self._table.chunked[shards]
            if chunked.any():
                if reply is not None:
                    reply.hold()
                every = np.arange(len(shards)) if rows is None else rows
                plain = every[~chunked]
                reads = len(every) - len(plain)
                if len(plain):
                    reads += self._read_by_engine(load, plain)
                self._chunks.submit(load, every[chunked])
                return reads
        if len(self._engines) == 1:
            return self._read(0, load, rows, MERGED_MOST, reply)
        return self._read_by_engine(load, rows, reply)

    # ---- remote files ---------------------------------------------------------------------

    @staticmethod
    def _hold(fetches: Fetches, load: Load) -> Waiting | None:
        asking = load.fetches[0]
        if not isinstance(asking, SampleRequest):
            return fetches.hold(load, None)
        waiting = fetches.hold(load, asking.owner.who)
        if waiting is not None and isinstance(asking.gate, Gate):
            waiting.known = asking.gate.errors
        return waiting

    def _fetched(self, waiting: Waiting) -> None:
        """The blocks of a load came, or cannot be had."""
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
            self._read_passed(load, passed.fd, mine)
        if left.any():
            rest = None if left.all() else np.flatnonzero(left)
            self._submit_rows(load, rest, None)
        self._decoded(load)

    def _read_passed(self, load: Load, fd: int, rows: Int64s) -> None:
        """Read blocks of one shard from a memory file, which is closed with the load."""
        if not len(rows):
            os.close(fd)
            return
        number = int(self._table.engines[load.blocks.shards[rows[0]]])
        (file,) = self._engines[number].add_files(np.array([fd], np.int32), np.ones(1, np.int64))
        file = int(file)
        if file >= len(self._fds[number]):
            more = np.full(file + 1 - len(self._fds[number]), -1, np.int32)
            self._fds[number] = np.append(self._fds[number], more)
        self._fds[number][file] = fd
        load.pinned.append((_PassedFile(self._engines[number], file, fd), None))
        if self._table.chunked[load.blocks.shards[rows[0]]]:
            self._chunks.submit(load, rows, file)
        else:
            self._read_from(number, load, rows, MERGED_MOST, None, cached=False, file=file)

    def _read_by_engine(
        self, load: Load, rows: Int64s | None, reply: DirectReply | None = None
    ) -> int:
        """Read blocks of a load (None: all), one batch per engine; return the number of reads."""
        shards = load.blocks.shards if rows is None else load.blocks.shards[rows]
        engines = self._table.engines[shards]
        numbers = np.unique(engines).tolist()
        if len(numbers) == 1:
            return self._read(numbers[0], load, rows, MERGED_MOST, reply)
        reads = 0
        if reply is not None:
            reply.hold()
        for number in numbers:
            part = np.flatnonzero(engines == number)
            part = part if rows is None else rows[part]
            reads += self._read(number, load, part, MERGED_MOST, reply)
        if reply is not None:
            reply.arm()
        return reads

    def _read(
        self,
        number: int,
        load: Load,
        rows: Int64s | None,
        merged_most: int,
        reply: DirectReply | None = None,
    ) -> int:
        """Read blocks of a load (None: all) with one engine, those of up to `merged_most` bytes
        together with neighbours; return the number of reads."""
        found = None
        if load.file < 0 and self._cached[number].count:
            blocks = load.blocks if rows is None else load.blocks.take(rows)
            files = self._table.files[blocks.shards]
            found = self._cached[number].find(files, blocks.begins, blocks.ends)
        if found is None:
            return self._read_from(number, load, rows, merged_most, reply, cached=False)
        rows = np.arange(len(found)) if rows is None else rows
        reads = 0
        if reply is not None:
            reply.hold()
        # The disk is busy with its part while the other is copied.
        for part, cached in ((rows[~found], False), (rows[found], True)):
            if len(part):
                reads += self._read_from(number, load, part, merged_most, reply, cached=cached)
        if reply is not None:
            reply.arm()
        return reads

    def _read_from(
        self,
        number: int,
        load: Load,
        rows: Int64s | None,
        merged_most: int,
        reply: DirectReply | None,
        *,
        cached: bool,
        file: int = -1,
    ) -> int:
        """Read blocks, all of them from the page cache or all of them past it.

        Args: file: to read from, in the place of their own.
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
            (merged_most, MERGED_GAP, MERGED_SIZE),
            cached=cached or file >= 0,
        )
        if load.file >= 0 or file >= 0:
            batch.reads["file"] = load.file if file < 0 else file
        elif cached:
            batch.reads["file"] = self._cached[number].numbers(batch.reads["file"])
            self.cached_size += int((blocks.ends - blocks.begins).sum())
        reads = batch.read_count
        if reply is not None:
            reply.wait_for(batch)
        self._batches[batch] = load, rows
        load.batches += 1
        self._submit(number, batch)
        return reads

    def _submit(self, number: int, batch: EngineBatch) -> None:
        batch.begun = time.monotonic()
        try:
            self._engines[number].submit(batch)
        except ReadError:
            self.on_broken()

    def reap(self) -> None:
        """Report the batches that have ended by now, without waiting for the loop."""
        for number in range(len(self._engines)):
            self._reap(number)

    def _reap(self, number: int) -> None:
        # Loads that have ended are answered before anything else is read, which takes far longer.
        self._end_batches(number)
        self.reaped(time.monotonic())

    def _end_batches(self, number: int) -> None:
        engine = self._engines[number]
        now = time.monotonic()
        self._wake(now)
        for batch in engine.completed():
            if batch.failed and engine.broken:
                self.on_broken()
                return
            took_s = now - batch.begun
            self.reading.note(took_s)
            if took_s >= SLOW_READ_S:
                self._note_slow(number, batch, took_s)
            self.read_size += batch.bytes
            if self._chunks.take(batch):
                continue
            load, rows = self._batches.pop(batch)
            if batch.failed:
                self._fail(number, batch, load, rows)
            batch.free()
            self._ended(load)

    def _note_slow(self, number: int, batch: EngineBatch, took_s: float) -> None:
        """A batch that has ended took long."""
        if took_s >= SLOW_S and batch is not self._slow[number]:
            self.on_slow(self.device_of(number), took_s)
        load, rows = self._batches.get(batch, (None, None))
        if load is None:
            self.on_slow_read(self._chunks.firsts_of(batch), took_s)
        elif load.file < 0:
            firsts = load.blocks.firsts
            self.on_slow_read(firsts if rows is None else firsts[rows], took_s)

    def find_slow(self, now: float) -> None:
        """Find reads that have been in flight for long. Called more often than every SLOW_S."""
        self._wake(now)
        for number, engine in enumerate(self._engines):
            batch = next(iter(engine.in_flight), None)
            slow = batch is not None and now - batch.begun >= SLOW_S
            if batch is not None and slow and batch is not self._slow[number]:
                self.on_slow(self.device_of(number), now - batch.begun)
            self._slow[number] = batch if slow else None

    def _wake(self, now: float) -> None:
        """The loop runs. If it has not run for long (the process was stopped, the machine slept),
        the disks are not to blame: their reads begin now."""
        if now - self._awake_at >= SLOW_S:
            for engine in self._engines:
                for batch in engine.in_flight:
                    batch.begun = now
        self._awake_at = now

    def device_of(self, number: int) -> str:
        """Return the device that an engine reads: where it is mounted, and its number."""
        numbers = [device for device, engine in self._by_device.items() if engine == number]
        devices = [f"{os.major(device)}:{os.minor(device)}" for device in numbers]
        name = f"device {', '.join(devices)}"
        with contextlib.suppress(OSError), open("/proc/self/mountinfo", "rb") as mounts:
            for line in mounts:
                fields = os.fsdecode(line).split(" ")
                if fields[2] in devices:
                    return f"{fields[4]} ({name})"
        return name

    def _decoded(self, load: Load) -> None:
        self._ended(load)
        self.reaped(time.monotonic())

    def _fail(self, number: int, batch: EngineBatch, load: Load, rows: Int64s | None) -> None:
        """Enter the failures of a batch. If the disk refused a merged read, read each of its blocks
        again by itself."""
        blocks = load.blocks if rows is None else load.blocks.take(rows)
        records = batch.records
        if batch.read_count < len(blocks.firsts):
            heads = np.cumsum(blocks.counts) - blocks.counts
            again = np.flatnonzero(refused(records["status"][heads]))
            if len(again):
                inside = np.isin(records["entry"], _samples(blocks.take(again)))
                records["status"][inside] = 0
                self._read(number, load, again if rows is None else rows[again], 0)
        # A gap of a tolerant scan has no bytes.
        wrong = (records["status"] == STATUS_CHECKSUM) & (records["length"] > 0)
        wrong[np.flatnonzero(wrong)[MOST_AGAIN:]] = False
        if wrong.any():
            samples = self._wrong_samples(number, batch, np.flatnonzero(wrong))
            remote = any(sample.mend is not None for sample in samples)
            asking = load.fetches[0] if load.fetches else None
            who = asking.owner.who if isinstance(asking, SampleRequest) else None
            (self._mending if remote else self._second).submit(load, samples, who)
        failed = records[(records["status"] != 0) & ~wrong]
        columns = (failed[name].tolist() for name in ("entry", "status", "found", "checksum"))
        for entry, *about in zip(*columns, strict=True):
            load.failures[entry] = Failure(*about)

    def _wrong_samples(self, number: int, batch: EngineBatch, rows: Int64s) -> list[WrongSample]:
        """Return the samples of some records of a batch, and where they belong in the arena."""
        samples = []
        reads = np.searchsorted(batch.reads["first_record"], rows, side="right") - 1
        shards = self._table.rows(batch.records["entry"][rows].astype(np.int64))
        columns = batch.reads[reads], batch.records[rows], shards.tolist()
        for read, record, shard in zip(*columns, strict=True):
            file = int(read["file"])
            place = int(record["dest"]) - self._memory.address
            extent = int(record["offset"]), int(record["offset"]) + int(record["length"])
            if int(read["slot"]) != NOWHERE:
                # As the engine reads it: from the beginning of a disk block on.
                direct = file == int(self._table.files[shard])
                alignment = int(self._table.alignments[shard]) if direct else 1
                begin = int(read["offset"]) // alignment * alignment
                place = int(read["slot"]) + int(record["offset"]) - begin
            samples.append(
                WrongSample(
                    int(record["entry"]),
                    self._fd_of(number, file),
                    int(record["offset"]),
                    int(record["length"]),
                    place,
                    int(read["checksum_kind"]),
                    int(record["checksum"]),
                    int(record["found"]),
                    partial(self._mend_file, number, file, *extent)
                    if (number, file) in self._remote
                    else None,
                )
            )
        return samples

    def _ended(self, load: Load) -> None:
        """One batch of a load has ended."""
        load.batches -= 1
        if load.batches == 0:
            if load.pinned and self.fetches is not None:
                self.fetches.release(load)
            if load.file >= 0:
                file = self._memory_files[load.file]
                file.loads -= 1
                self._close_unused(load.file, file)
            self.checksum_failures += sum(
                f.status == STATUS_CHECKSUM or isinstance(f.error, ChecksumError)
                for f in load.failures.values()
            )
            if load.right:
                self.on_right(np.array(load.right, np.int64))
            self.loaded(load, load.failures, time.monotonic())

    def counters(self) -> dict[str, int]:
        """Return the engines' counters, summed."""
        total: dict[str, int] = {}
        for engine in self._engines:
            for name, value in engine.counters().items():
                total[name] = total.get(name, 0) + value
        return total

    def close(self) -> None:
        """Wait for the reads in flight and end the I/O threads."""
        if self.fetches is not None:
            self.fetches.close()
        for engine in self._engines:
            if self._loop is not None:
                self._loop.remove_reader(engine.fileno())
            engine.close()
        self._chunks.close()
        self._second.close()
        self._mending.close()


@dataclass(slots=True)
class _PassedFile:
    """A memory file that a load reads from, among what it holds of the store."""

    engine: Engine
    number: int
    fd: int

    def unpin(self, _: object) -> None:
        """The load has ended."""
        self.engine.remove_file(self.number)
        os.close(self.fd)


def _samples(blocks: Blocks) -> Int64s:
    """Return the numbers of all samples in blocks."""
    firsts, counts = blocks.firsts, blocks.counts
    starts = np.cumsum(counts) - counts
    return np.repeat(firsts - starts, counts) + np.arange(int(counts.sum()))


def _unexpected(*_: object) -> None:
    raise AssertionError("a load has ended or an engine broke, and no owner is set")
