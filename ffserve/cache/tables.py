"""The tables that all sessions share: the directory of samples, and the open shards.

*Directory*: one entry per sample of every open shard. Three arrays run in parallel, addressed by
the sample number: the *directory* (seqlock, offset in the arena, length: 16 bytes, `ffs_entry` of
the C core), the *index* (payload offset in the file, 8 bytes; expected checksum, 4 bytes), and the
daemon's own `slot_of` (4 bytes). Clients map the first two, memfds, read-only. They are sized once
for all shards and take memory only for open ones, so they never move or grow under a client's
mapping. A shard owns one run of numbers; runs of shards that are opened together are adjacent, so a
dataset of 10,000 shards is usually one run to its clients.

Each domain has files of its own for the directory and the index, all of one size. The daemon's
mapping of the first domain's shows another domain's file wherever a region of numbers belongs to
that; a region is whole pages in both tables. So a number has one entry, and only clients that map
the domain's file see it.

*Shard table*: from sample numbers to extents of files. Records are read in *blocks*: one record,
or, where records are far smaller than a disk's block, a run of neighbours that is read, verified
and evicted together, since the device delivers them anyway. Where records are in chunks, a block is
a chunk, or a run of small neighbouring chunks, and its slot holds the decoded bytes.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ffserve.dtypes import Bools, Int32s, Int64s, UInt32s, UInt64s
from ffserve.engine.slots import ENTRY_DTYPE, Shards
from ffserve.errors import ReadError
from ffserve.formats.base import UNKNOWN_LENGTH, ChunkedShard
from ffserve.system.memfd import MemoryFile, SharedMemory, discard_zeros, private_zeros

CAPACITY = 1 << 32
"""The tables have room for this many samples of open shards. They take 64 + 48 GiB of address
space, and no memory until it is used."""
SMALLEST_CAPACITY = 1 << 22
REGION_UNIT = mmap.PAGESIZE // 4
"""The checksums of this many numbers take a page. Regions of domains begin and end at multiples of
it."""
SMALLEST_REGION = 64 * REGION_UNIT

SMALL_RECORD_SIZE = 2048
"""Mean record size in bytes below which neighbours share a block. On a disk with larger blocks the
size of those counts: the disk delivers the neighbours anyway."""
BLOCK_SIZE = 8192
"""Target size of a shared block: two pages, so that even an unaligned block holds a whole one."""
LARGEST_SHARED_BLOCK = 65_536
"""The records of a shared block larger than this (one huge among tiny ones) are read singly."""

SHARD = 5
"""In a table of blocks, this row has the shards."""


class NumberRuns:
    """Runs of numbers that are assigned and given back.

    Numbers are reused only when all have been assigned once: a disconnected client that has not
    noticed yet would find another shard's samples under them.
    """

    def __init__(self) -> None:
        self.next = self.end = 0
        """The numbers from `next` to `end` were never assigned."""
        self._free: list[tuple[int, int]] = []

    def extend(self, start: int, count: int) -> None:
        """Assign from these numbers next."""
        self.give_back(self.next, self.end - self.next)
        self.next, self.end = start, start + count

    def take(self, count: int, unit: int = 1) -> int | None:
        """Return the first of `count` numbers that were never assigned, a multiple of `unit`."""
        start = -(-self.next // unit) * unit
        if start + count > self.end:
            return None
        self.give_back(self.next, start - self.next)
        self.next = start + count
        return start

    def reuse(self, count: int, unit: int = 1) -> int | None:
        """Return the first of `count` numbers that were given back, a multiple of `unit`."""
        self.extend(self.end, 0)
        for k, (first, free) in enumerate(self._free):
            start = -(-first // unit) * unit
            if start + count <= first + free:
                del self._free[k]
                self.give_back(first, start - first)
                self.give_back(start + count, first + free - start - count)
                return start
        return None

    @property
    def free(self) -> list[tuple[int, int]]:
        """The runs that were given back: first and count, rising."""
        return self._free

    def give_back(self, start: int, count: int) -> tuple[int, int]:
        """Numbers are not used any more; return the run of unused ones that they are in now: its
        first number, and the one behind it."""
        if count == 0:
            return start, start
        low = high = bisect.bisect(self._free, (start, count))
        first, end = start, start + count
        if low and sum(self._free[low - 1]) == start:
            low -= 1
            first = self._free[low][0]
        if high < len(self._free) and self._free[high][0] == end:
            end += self._free[high][1]
            high += 1
        self._free[low:high] = [(first, end - first)]
        return first, end


class _Region(NumberRuns):
    """The numbers of one domain, and the files that show them."""

    def __init__(self, entries: MemoryFile, index: MemoryFile) -> None:
        super().__init__()
        self.entries = entries
        self.index = index
        self.parts: list[tuple[int, int]] = []
        """All that it was given: first, count."""
        self.count = 0


class Directory:
    """The tables by sample, and the runs of numbers that shards own.

    Args:
        capacity: samples; halved while the address space does not suffice.
        files: a predecessor's, of this capacity, for entries and index; None: new ones.
    Raises: ReadError: no memory; the files are closed then.
    """

    def __init__(
        self, capacity: int = CAPACITY, files: tuple[MemoryFile, MemoryFile] | None = None
    ) -> None:
        entries, index = files or (None, None)
        while True:
            try:
                self.entries_memory = SharedMemory("ffserve-directory", capacity * 16, entries)
                self.index_memory = SharedMemory("ffserve-index", capacity * 12, index)
                self.slot_of = private_zeros(capacity, np.dtype(np.int32))
                break
            except (ReadError, OSError):
                if capacity <= SMALLEST_CAPACITY or files is not None:
                    raise
                capacity //= 2
        self.capacity = capacity
        self.entries = self.entries_memory.array.view(ENTRY_DTYPE)
        self._length_low: UInt32s = self.entries["length_low"]
        self._long = False
        self.offsets: UInt64s = self.index_memory.array[: capacity * 8].view(np.uint64)
        self.checksums: UInt32s = self.index_memory.array[capacity * 8 :].view(np.uint32)
        self._numbers = NumberRuns()
        """Those of the first domain."""
        self._numbers.extend(0, capacity)
        self._regions: dict[int, _Region] = {}
        """Those of the other domains."""
        self.next_number = np.zeros(1, np.int64)
        """All numbers from here on were never assigned: for a successor, which puts an array of
        shared memory here."""

    def add_domain(self, domain: int, entries: MemoryFile, index: MemoryFile) -> None:
        """Let another domain have numbers, shown by these files."""
        self._regions[domain] = _Region(entries, index)

    def drop_domain(self, domain: int) -> None:
        """Take the numbers of a domain back, none of which is in use. Raises: OSError."""
        region = self._regions[domain]
        while region.parts:
            start, count = region.parts[-1]
            self._show(self.entries_memory.file, self.index_memory.file, start, count)
            self._numbers.give_back(start, count)
            region.parts.pop()
        del self._regions[domain]

    def reserve(self, count: int, domain: int = 0) -> int:
        """Assign a run of `count` numbers to a shard of a domain; return the first.

        Raises: ReadError when no free run is long enough.
        """
        region = self._regions.get(domain)
        if region is None:
            start = self._any(count)
        elif (start := region.take(count)) is None:
            # As many again as it has, so that a domain has few regions.
            units = -(-max(count, region.count, SMALLEST_REGION) // REGION_UNIT)
            size = units * REGION_UNIT
            first = self._any(size, REGION_UNIT)
            if first is not None:
                try:
                    self._show(region.entries, region.index, first, size)
                except OSError as error:
                    self._numbers.give_back(first, size)
                    raise ReadError(
                        f"the daemon cannot map tables for another {count} samples: {error}",
                        hint="raise vm.max_map_count, or open fewer data sets at once",
                    ) from error
                region.parts.append((first, size))
                region.count += size
                region.extend(first, size)
                start = region.take(count)
            else:
                start = region.reuse(count)
        if start is None:
            raise ReadError(
                f"the daemon's tables cannot hold another {count} samples",
                hint="restart the daemon, or open fewer datasets at once",
            )
        return start

    def _any(self, count: int, unit: int = 1) -> int | None:
        start = self._numbers.take(count, unit)
        if start is None:
            start = self._numbers.reuse(count, unit)
        self.next_number[0] = self._numbers.next
        return start

    def adopt(self, runs: Mapping[int, Sequence[tuple[int, int]]], next_number: int) -> None:
        """Take over the numbers of a predecessor's shards, in tables of which nothing is in use.
        All entries but theirs become unreadable.

        Args:
            runs: by domain (each was added): first and count of its shards, rising. No two of them
                overlap, nor their regions.
            next_number: numbers from here on were never assigned.
        Raises: ReadError: too many mappings.
        """
        regions = {number: _regions_of(parts) for number, parts in runs.items() if number}
        parts = [*runs.get(0, ()), *(part for parts in regions.values() for part in parts)]
        ends = [start + count for start, count in parts]
        self._numbers = NumberRuns()
        self._numbers.extend(0, self.capacity)
        self._numbers.take(min(max([*ends, next_number]), self.capacity))
        for start, count in _between(sorted(parts), 0, self._numbers.next):
            self._numbers.give_back(start, count)
        self.next_number[0] = self._numbers.next
        for number, region_parts in regions.items():
            region = self._regions[number]
            for start, count in region_parts:
                try:
                    self._show(region.entries, region.index, start, count)
                except OSError as error:
                    raise ReadError(f"cannot map tables of {count} samples: {error}") from error
                region.parts.append((start, count))
                region.count += count
                for unused in _between(runs[number], start, start + count):
                    region.give_back(*unused)
        files = {0: (self.entries_memory.file, self.index_memory.file)}
        files |= {n: (region.entries, region.index) for n, region in self._regions.items()}
        for number, (entries, index) in files.items():
            for start, count in _between(runs.get(number, ()), 0, self.capacity):
                _clear(self.entries_memory, entries, start * 16, count * 16)
                _clear(self.index_memory, index, start * 8, count * 8)
                _clear(self.index_memory, index, self.capacity * 8 + start * 4, count * 4)

    def _show(self, entries: MemoryFile, index: MemoryFile, start: int, count: int) -> None:
        self.entries_memory.show(entries, start * 16, count * 16)
        self.index_memory.show(index, start * 8, count * 8)
        self.index_memory.show(index, self.capacity * 8 + start * 4, count * 4)

    def release(self, start: int, count: int, domain: int = 0) -> None:
        """Free a run and return its memory to the kernel. No client may have it in use."""
        if count == 0:
            return
        low, high = self._regions.get(domain, self._numbers).give_back(start, count)
        # With its neighbours that were freed before, as far as they are in the same pages: many
        # small runs share a page.
        first = max(low, start // REGION_UNIT * REGION_UNIT)
        end = min(high, -(-(start + count) // REGION_UNIT) * REGION_UNIT)
        self.entries_memory.discard(first * 16, (end - first) * 16)
        self.index_memory.discard(first * 8, (end - first) * 8)
        self.index_memory.discard(self.capacity * 8 + first * 4, (end - first) * 4)
        discard_zeros(self.slot_of, first, end)

    def set_lengths(self, start: int, lengths: UInt64s) -> None:
        """Write the lengths of samples to unreadable entries."""
        if not len(lengths):
            return
        run = slice(start, start + len(lengths))
        self._length_low[run] = lengths
        largest = int(lengths.max())
        if largest >> 32:
            assert largest <= UNKNOWN_LENGTH, "see bound_lengths"
            self.entries["place"][run] = lengths >> np.uint64(32) << np.uint64(48)
            # `lengths` is never called for records in chunks.
            self._long |= bool(int(lengths[lengths != UNKNOWN_LENGTH].max(initial=0)) >> 32)

    def set_new_lengths(self, numbers: Int64s, lengths: Int64s) -> Bools:
        """Write the lengths, below 2^32, of unreadable entries whose length is not known.

        Returns: which entries have this length now. A length that is known stays.
        """
        entries = self.entries[numbers]
        known = entries["place"] >> np.uint64(48) == 0
        fresh = numbers[~known]
        self.entries["place"][fresh] = 0
        self._length_low[fresh] = lengths[~known]
        same: Bools = ~known | (entries["length_low"] == lengths)
        return same

    def lengths(self, numbers: Int64s) -> Int64s:
        """Return lengths in bytes, int64[n]."""
        if not self._long:
            return self._length_low[numbers].astype(np.int64)
        entries = self.entries[numbers]
        low = entries["length_low"].astype(np.int64)
        return low | ((entries["place"] >> np.uint64(48)).astype(np.int64) << 32)

    @property
    def end(self) -> int:
        """The lowest number that was never assigned."""
        return self._numbers.next

    def close(self) -> None:
        """Unmap everything."""
        del self.entries, self._length_low, self.offsets, self.checksums, self.slot_of
        self.entries_memory.close()
        self.index_memory.close()


def _regions_of(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the regions, first and count, that these runs lie in."""
    numbers = NumberRuns()
    taken = 0
    for start, count in runs:
        low = max(start // REGION_UNIT * REGION_UNIT, taken)
        taken = max(-(-(start + count) // REGION_UNIT) * REGION_UNIT, taken)
        numbers.give_back(low, taken - low)
    return numbers.free


def _between(runs: Sequence[tuple[int, int]], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of numbers of [first, end) that are in none of these, which rise."""
    for start, count in runs:
        if first < min(start, end):
            yield first, min(start, end) - first
        first = max(first, start + count)
    if first < end:
        yield first, end - first


def _clear(memory: SharedMemory, file: MemoryFile, offset: int, size: int) -> None:
    """Make [offset, offset + size) of a file zeros. What is left of the pages at both ends is shown
    in a mapping."""
    end = offset + size
    low = min(-(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, end)
    high = max(end // mmap.PAGESIZE * mmap.PAGESIZE, low)
    memory.array[offset:low] = 0
    if high > low:
        file.punch(low, high - low)
    memory.array[high:end] = 0


class Blocks:
    """Blocks to be read, one column of `table` each; the attributes are its rows.

    firsts, counts: sample numbers. begins, ends: the extent in the file. sizes: bytes of memory
    that it needs: the extent, widened to the file's alignment where that is at most 1/32 more (a
    direct read then goes straight to the slot); of chunks, the decoded bytes. shards: rows of the
    shard table.
    """

    __slots__ = ("begins", "counts", "ends", "firsts", "shards", "sizes", "table")

    def __init__(self, table: Int64s) -> None:
        rows: Iterable[Int64s] = table
        self.table = table
        self.firsts, self.counts, self.begins, self.ends, self.sizes, self.shards = rows

    def take(self, columns: Int64s | Bools) -> Blocks:
        """Return some of the blocks."""
        return Blocks(np.ascontiguousarray(self.table[:, columns]))


class ChunkRuns:
    """The chunks of a shard, with small neighbours joined to runs of about BLOCK_SIZE.

    Unreadable chunks (of size 0) stay alone: their extent may be large.
    """

    def __init__(self, shard: ChunkedShard) -> None:
        self.shard = shard
        chunks = shard.chunks
        self.sizes_before = np.zeros(len(chunks) + 1, np.int64)
        np.cumsum(chunks.sizes, out=self.sizes_before[1:])
        small = (chunks.sizes < BLOCK_SIZE) & (chunks.sizes > 0)
        # A run ends where the sum crosses a multiple of BLOCK_SIZE, and around chunks not small.
        multiples = self.sizes_before[:-1] // BLOCK_SIZE
        edge = (multiples[1:] != multiples[:-1]) | ~small[1:] | ~small[:-1]
        (inner,) = edge.nonzero()
        self.edges = np.zeros(len(inner) + 2, np.int64)
        """int64[runs + 1], the number of each run's first chunk."""
        self.edges[1:-1], self.edges[-1] = inner + 1, len(chunks)
        self._firsts = chunks.firsts[self.edges]

    def holding(self, records: Int64s) -> Int64s:
        """Return the number of the run that holds each record."""
        return np.searchsorted(self._firsts, records, side="right") - 1


_COLUMNS = (
    "bases",
    "counts",
    "alignments",
    "shifts",
    "checksum_kinds",
    "files",
    "engines",
    "domains",
    "chunked",
    "sessions",
    "used",
)
"""The arrays of a ShardTable."""


class ShardTable:
    """The open shards, in rising order of their first sample's number.

    `files`, `engines`: their numbers in server/reading/engines.py; `domains`: to which each
    belongs; `sessions`: how many have each open; `used`: bytes of the slots that hold samples of
    each.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._c = Shards(
            directory.entries_memory.address,
            directory.index_memory.address,
            directory.index_memory.address + directory.capacity * 8,
            directory.capacity,
        )
        self._runs: list[ChunkRuns | ChunkedShard | None] = []
        """For shards with chunks; made when the first sample is asked for."""
        self.bases = np.zeros(0, np.int64)
        self.counts = np.zeros(0, np.int64)
        self.alignments = np.zeros(0, np.int64)
        self.shifts = np.zeros(0, np.int64)
        self.checksum_kinds = np.zeros(0, np.int32)
        self.files = np.zeros(0, np.int32)
        self.engines = np.zeros(0, np.int32)
        self.domains = np.zeros(0, np.int32)
        self._sole_domain: int | None = 0
        """The domain of all shards; None: they have several."""
        self.chunked = np.zeros(0, np.bool_)
        self.sessions = np.zeros(0, np.int64)
        self.used = np.zeros(0, np.int64)
        self._singly = np.zeros(0, np.int64)
        """The first samples, rising, of blocks that are no longer shared."""
        self.has_chunks = False
        """Whether the records of any shard are in chunks."""
        self._follow()

    def _follow(self) -> None:
        self.has_chunks = bool(self.chunked.any())
        each = np.unique(self.domains)
        self._sole_domain = int(each[0]) if len(each) == 1 else None
        self._c.follow(
            self.bases,
            self.counts,
            self.alignments,
            self.shifts,
            self.files,
            self.checksum_kinds,
            self.used,
            self._singly,
        )

    @property
    def c(self) -> Shards:
        """The tables for the C core."""
        return self._c

    def add(
        self,
        base: int,
        count: int,
        *,
        payload_size: int,
        alignment: int,
        checksum_kind: int,
        file: int,
        engine: int,
        domain: int = 0,
        chunked: ChunkedShard | None = None,
    ) -> None:
        """Add a shard with at least one sample; `chunked` if its records are in chunks."""
        values = base, count, payload_size, alignment, checksum_kind, file, engine, domain
        self.add_all(np.array([values], np.int64).T, [chunked])

    def add_all(
        self,
        values: Int64s,
        chunked: Sequence[ChunkedShard | None],
        has_chunks: Sequence[bool] | None = None,
    ) -> None:
        """Add shards with at least one sample each: the table is copied once for all of them.

        Args:
            values: int64[8, n]: their bases, counts, payload sizes, alignments, kinds of checksums,
                files, engines and domains.
            has_chunks: whether the records of each are in chunks, if these are not known before
                `set_chunks`.
        """
        bases, counts, payload_sizes, alignments, checksum_kinds, files, engines, domains = values
        none = np.zeros(len(bases), np.int64)
        columns = {
            "bases": bases,
            "counts": counts,
            "alignments": alignments,
            "shifts": _shifts(counts, payload_sizes, alignments),
            "checksum_kinds": checksum_kinds,
            "files": files,
            "engines": engines,
            "domains": domains,
            "chunked": np.array(has_chunks or [each is not None for each in chunked], np.bool_),
            "sessions": none,
            "used": none,
        }
        order = np.argsort(bases)
        rows = np.searchsorted(self.bases, bases[order])
        for name, fresh in columns.items():
            setattr(self, name, np.insert(getattr(self, name), rows, fresh[order]))
        for shift, k in enumerate(order.tolist()):
            self._runs.insert(int(rows[shift]) + shift, chunked[k])
        self._follow()

    def remove(self, *bases: int) -> None:
        """Remove shards."""
        rows = [self.row(base) for base in bases]
        singly = self._singly
        for row in rows:
            base, end = int(self.bases[row]), int(self.bases[row] + self.counts[row])
            singly = singly[(singly < base) | (singly >= end)]
        self._singly = singly
        for name in _COLUMNS:
            setattr(self, name, np.delete(getattr(self, name), rows))
        for row in sorted(rows, reverse=True):
            del self._runs[row]
        self._follow()

    def set_chunks(self, base: int, chunked: ChunkedShard) -> None:
        """Enter the chunks of a shard that was added without them."""
        self._runs[self.row(base)] = chunked

    def read_singly(self, firsts: Sequence[int]) -> None:
        """From now on read the samples of these blocks singly, since a part of each is damaged."""
        fresh = np.unique(np.asarray(firsts, np.int64))
        fresh = fresh[~self._is_alone(fresh)]
        self._singly = np.insert(self._singly, np.searchsorted(self._singly, fresh), fresh)
        self._follow()

    def _is_alone(self, firsts: Int64s) -> Bools:
        rows = np.searchsorted(self._singly, firsts)
        found = np.zeros(len(firsts), np.bool_)
        inside = rows < len(self._singly)
        found[inside] = self._singly[rows[inside]] == firsts[inside]
        return found

    def row(self, base: int) -> int:
        """Return the row of the shard that starts at `base`."""
        row = int(np.searchsorted(self.bases, base))
        assert self.bases[row] == base
        return row

    def set_sessions(self, bases: Sequence[int], counts: Sequence[int]) -> None:
        """Enter how many sessions have each of these shards open."""
        self.sessions[np.searchsorted(self.bases, np.array(bases, np.int64))] = counts

    def rows(self, numbers: Int64s) -> Int64s:
        """Return the row of each sample's shard."""
        return np.searchsorted(self.bases, numbers, side="right") - 1

    def domain(self, rows: Int64s) -> int | Int32s:
        """Return the domain of the shards of these rows, at least one; of each, if they differ."""
        if self._sole_domain is not None:
            return self._sole_domain
        domains: Int32s = self.domains[rows]
        return int(domains[0]) if (domains == domains[0]).all() else domains

    def idle(self) -> list[int]:
        """Return the rows of the idle shards: those with slots and without a session."""
        rows: list[int] = np.flatnonzero((self.sessions == 0) & (self.used > 0)).tolist()
        return rows

    def decoder(self, row: int) -> ChunkedShard:
        """Return the shard of a row whose records are in chunks."""
        return self._chunk_runs(row).shard

    def _chunk_runs(self, row: int) -> ChunkRuns:
        runs = self._runs[row]
        assert runs is not None
        if not isinstance(runs, ChunkRuns):
            self._runs[row] = runs = ChunkRuns(runs)
        return runs

    def blocks(self, numbers: Int64s) -> Blocks:
        """Return the block of each sample, one column per sample."""
        return Blocks(self.table(numbers))

    def table(self, numbers: Int64s) -> Int64s:
        """Return the table of the blocks of each sample."""
        table = self._c.blocks(numbers, LARGEST_SHARED_BLOCK)
        if self.has_chunks:
            rows = table[SHARD]
            for row in np.unique(rows[self.chunked[rows]]).tolist():
                inside = rows == row
                table[:, inside] = self._of_chunks(numbers[inside], row)
        return table

    def _of_chunks(self, numbers: Int64s, row: int) -> Int64s:
        base, runs = int(self.bases[row]), self._chunk_runs(row)
        chunks = runs.shard.chunks
        run = runs.holding(numbers - base)
        low, high = runs.edges[run], runs.edges[run + 1]
        if len(self._singly):
            alone = self._is_alone(base + chunks.firsts[low])
            chunk = chunks.holding(numbers - base)
            low, high = np.where(alone, chunk, low), np.where(alone, chunk + 1, high)
        return np.stack(
            (
                base + chunks.firsts[low],
                chunks.firsts[high] - chunks.firsts[low],
                chunks.begins[low],
                chunks.ends[high - 1],
                runs.sizes_before[high] - runs.sizes_before[low],
                np.full(len(numbers), row),
            )
        )


def _shifts(counts: Int64s, payload_sizes: Int64s, alignments: Int64s) -> Int64s:
    """Return the shifts from a sample's number in its shard to that of its block."""
    means = payload_sizes // counts
    small = means < np.maximum(SMALL_RECORD_SIZE, alignments)
    groups = np.where(small, BLOCK_SIZE // np.maximum(means, 1), 1)
    exponents: Int32s = np.frexp(np.clip(groups, 1, BLOCK_SIZE))[1]
    return exponents.astype(np.int64) - 1
