"""Arena: slabs, size classes and free lists.

The arena is divided into slabs. A slab serves one size class (eight per doubling, so at most one
part in nine of a slot is unused; more where a slab has only a few slots, and below SMALLEST_SLOT).
A data set whose samples are all of one size gets a class of its own, so that its slots have no
unused part; where a slab would leave much over, such a class is cut from runs of adjacent slabs. A
slab returns to the common pool when its last slot is freed, so memory follows the sizes in demand;
a slab can also be emptied by eviction and given to another class. A sample larger than a slab takes
a run of whole slabs. Slots are contiguous because clients copy out of them and the kernel reads
into them.

A slab belongs to one *domain* at a time: its pages are those of the domain's own file (`domains`).
So a size class is one of a domain: class number = domain × classes per domain + rank of the size,
and nothing that goes by class can put a sample where readers of another domain look. An empty slab
may be given to another domain; that is how memory moves between them.

This is bookkeeping over numpy arrays: no memory of the arena is touched, so a simulation can drive
it. Slot number = slab × slots_per_slab + number in the slab, or in the run that begins there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ffserve.dtypes import Bools, Int32s, Int64s
from ffserve.errors import UsageError

SLAB_SIZE = 4 * 1024 * 1024
SMALLEST_SLAB = 256 * 1024
SLABS_WANTED = 128
SMALLEST_SLOT = 2048
SLOT_ALIGNMENT = 512
"""The alignment of memory that O_DIRECT needs on every common device (statx: dio_mem_align)."""
SMALLEST_ARENA = 1024 * 1024
PACKED_ALIGNMENT = 64
"""The alignment of slots to which samples are copied: a cache line."""
OWN_CLASSES = 16
"""Size classes for data sets of one sample size, besides those for any size."""
OWN_GAIN = 1 / 64
"""A class is made for one size if a slab then holds more slots by this share at least."""
LONGEST_RUN = 8
"""A run of slabs that is cut into slots has at most this many slabs."""
RUN_SHARE = 16
"""Such a run has at most 1 part in RUN_SHARE of the arena."""
RUN_WASTE = 1 / 256
"""A longer run is preferred while more than this part of it is left over."""

_FREE = -1
_RETIRED = -3
"""The class of slabs that are beyond the present size of the arena."""
_ALL = slice(None)
NO_SLOTS: Int64s = np.zeros(0, np.int64)


class FreeSlots:
    """The free list of one size class: the slot freed last is taken first."""

    __slots__ = ("count", "slots")

    def __init__(self) -> None:
        self.slots = np.empty(16, np.int64)
        self.count = 0

    def __len__(self) -> int:
        return self.count

    @property
    def held(self) -> Int64s:
        """The slots; valid until the next call."""
        return self.slots[: self.count]

    def add(self, slots: Int64s) -> None:
        """Append slots."""
        end = self.count + len(slots)
        if end > len(self.slots):
            grown = np.empty(2 * end, np.int64)
            grown[: self.count] = self.held
            self.slots = grown
        self.slots[self.count : end] = slots
        self.count = end

    def take(self, count: int) -> Int64s:
        """Remove up to `count` slots, the last one first."""
        start = max(self.count - count, 0)
        taken = self.slots[start : self.count][::-1].copy()
        self.count = start
        return taken

    def keep(self, kept: Bools) -> None:
        """Keep only some of the slots, in their order."""
        self.slots = self.held[kept]
        self.count = len(self.slots)


class SlabTables(NamedTuple):
    """The tables by slab that a successor of the daemon needs; see `inventory`.

    sizes: bytes of a slot, of slabs that a run of slots begins with; 0: of all others. runs: slabs
    of that run. domains: whose pages each slab has.

    Of a slab that is cut into slots, the size is written last and cleared first. So while it is not
    0 the others are valid, whenever the process is killed.
    """

    sizes: Int64s
    runs: Int64s
    domains: Int32s


class Arena:
    """The slots and which of them are free.

    Slabs below `open_count` are in use; those from there up to `slab_count` are being emptied.

    Args:
        size: bytes; rounded down to whole slabs.
        limit: bytes to which it can grow, at least `size`; None: it cannot.
        slab_size: bytes of a slab, a power of two; None: what suits `size`.
        run_share, run_waste: see RUN_SHARE and RUN_WASTE.
    Raises: UsageError when smaller than SMALLEST_ARENA.

    give: gives an empty slab, of this number, the pages of a domain, of this number; False: that is
    not possible now. A simulation has no pages to give.
    """

    def __init__(
        self,
        size: int,
        limit: int | None = None,
        slab_size: int | None = None,
        *,
        run_share: int = RUN_SHARE,
        run_waste: float = RUN_WASTE,
    ) -> None:
        self._run_share, self._run_waste = run_share, run_waste
        if size < SMALLEST_ARENA:
            raise UsageError(
                f"an arena of {size} bytes is too small",
                hint=f"give at least {SMALLEST_ARENA} bytes",
            )
        # A small arena gets small slabs, so that all size classes fit.
        wanted = max(size // SLABS_WANTED, min(size // 4, SMALLEST_SLAB))
        self.slab_size = slab_size or min(SLAB_SIZE, 1 << (wanted.bit_length() - 1))
        slabs = max(size, limit or 0) // self.slab_size
        self.limit = slabs * self.slab_size
        """Bytes that it can ever have."""
        self.slots_per_slab = self.slab_size // SMALLEST_SLOT
        general = _class_sizes(self.slab_size)
        self.class_sizes = np.concatenate((general, np.zeros(OWN_CLASSES, np.int64)))
        """Bytes of a slot by rank; 0: a class that was not made."""
        self._class_runs = [1] * len(self.class_sizes)
        """Slabs in a run that is cut into slots of each class."""
        self._general = len(general)
        self.large = len(self.class_sizes)
        """The rank of the size class of slots larger than a slab, the last one of each domain."""
        self.class_count = self.large + 1
        """Size classes of one domain."""
        self._sort_classes()
        self.domain_count = 0
        self.moved = 0
        """Slabs that were given to another domain."""
        self.give: Callable[[int, int], bool] = lambda slab, domain: True
        # Sized for the limit; the part beyond the size is not touched and takes no memory.
        self.slab_class = np.empty(slabs, np.int32)
        self.slab_domain = np.zeros(slabs, np.int32)
        """Whose pages each slab has, used or not."""
        self.slab_used = np.zeros(slabs, np.int64)
        """Slots in use in each slab."""
        self._slot_size = np.zeros(slabs, np.int64)
        """See SlabTables."""
        self._run_length = np.ones(slabs, np.int64)
        """Of the run that begins with each slab."""
        self._inside_run = np.zeros(slabs, np.bool_)
        """Slabs of a run behind its first."""
        self._offset = np.zeros(slabs * self.slots_per_slab, np.int64)
        self._size = np.zeros(slabs * self.slots_per_slab, np.int64)
        self.slab_count = self.open_count = self.size = 0
        """Slabs that have slots; slabs in use; bytes of these."""
        self._free_slabs: list[list[int]] = []
        """By domain."""
        self._free_slots: list[FreeSlots] = []
        """By size class."""
        self.used_size = 0
        """Bytes of the slots in use."""
        self.add_domain()
        self.resize(size // self.slab_size)

    def slabs_of(self, slots: Sequence[Int64s]) -> Int64s:
        """Return the slabs, each once, that these slots lie in."""
        if not slots:
            return np.zeros(0, np.int64)
        heads = np.unique(np.concatenate(slots) // self.slots_per_slab)
        lengths = self._run_length[heads]
        if int(lengths.max(initial=1)) == 1:
            return heads
        return np.concatenate([np.arange(h, h + n) for h, n in zip(heads, lengths, strict=True)])

    @property
    def slot_count(self) -> int:
        """Slots in use have numbers below this."""
        return self.slab_count * self.slots_per_slab

    @property
    def slot_limit(self) -> int:
        """Slot numbers are always below this."""
        return len(self._size)

    @property
    def smallest_size(self) -> int:
        """The smallest size in which all size classes fit."""
        return max(SMALLEST_ARENA, 4 * self.slab_size)

    def resize(self, count: int) -> None:
        """Use the slabs below `count` only. Slots beyond stay until they are freed; see `trim`."""
        assert count <= len(self.slab_class)
        if count < self.open_count:
            beyond = self.slab_class[count : self.open_count]
            beyond[beyond == _FREE] = _RETIRED
            self._free_slabs = [[s for s in slabs if s < count] for slabs in self._free_slabs]
            self.open_count = count
            for free in self._free_slots:
                free.keep(self.within(free.held))
        else:
            if count > self.slab_count:
                self.slab_class[self.slab_count : count] = _RETIRED
                self.slab_count = count
            # Free slots of slabs that are still in use return when these are empty.
            again = self.open_count + np.flatnonzero(
                self.slab_class[self.open_count : count] == _RETIRED
            )
            self.slab_class[again] = _FREE
            for domain in np.unique(self.slab_domain[again]).tolist():
                fresh = again[self.slab_domain[again] == domain]
                self._free_slabs[domain][:0] = fresh[::-1].tolist()
        self.open_count, self.size = count, count * self.slab_size

    def add_domain(self) -> int:
        """Add size classes for another domain; return its number. The first one, 0, is there from
        the start, and all slabs are its own."""
        self._free_slabs.append([])
        self._free_slots += [FreeSlots() for _ in range(self.class_count)]
        self.domain_count += 1
        return self.domain_count - 1

    def is_empty(self, domain: int) -> bool:
        """Whether no slab holds a slot of a domain."""
        taken = self.slab_class[: self.slab_count] >= 0
        return not (taken & (self.slab_domain[: self.slab_count] == domain)).any()

    def slabs_in(self, domain: int) -> int:
        """Return the number of slabs with slots of a domain."""
        classes = self.slab_class[: self.slab_count]
        low = domain * self.class_count
        return int(np.count_nonzero((classes >= low) & (classes < low + self.class_count)))

    def retiring(self) -> Int64s:
        """Return the slabs beyond the size that are not empty yet."""
        return self.open_count + np.flatnonzero(
            self.slab_class[self.open_count : self.slab_count] != _RETIRED
        )

    def trim(self) -> None:
        """Drop the slabs beyond the size, which are all empty."""
        assert not len(self.retiring())
        self.slab_count = self.open_count

    def _sort_classes(self) -> None:
        made = np.flatnonzero(self.class_sizes)
        made = made[np.argsort(self.class_sizes[made])]
        self._class_sizes: list[int] = self.class_sizes.tolist()
        self._rising = self.class_sizes[made]
        self._rising_sizes: list[int] = self._rising.tolist()
        self._by_size = np.append(made, self.large)
        """The rank of each of the rising sizes, and of all above."""

    def make_class(self, size: int) -> None:
        """Make a size class for samples of this size, of at most a slab, unless the slabs would
        hold hardly more of them, or the slots of other such classes are all in use."""
        unit = PACKED_ALIGNMENT if size % SLOT_ALIGNMENT else SLOT_ALIGNMENT
        size = max(-(-size // unit) * unit, SMALLEST_SLOT)
        run = self._run_for(size)
        count = run * self.slab_size // size
        (known,) = self.classes(np.array([size])).tolist()
        if count < (1 + OWN_GAIN) * run * self._slots_in_run(known) / self._class_runs[known]:
            return
        taken = self.slab_class[: self.slab_count]
        used = set((taken[taken >= 0] % self.class_count).tolist())
        for rank in range(self._general, self.large):
            if rank not in used:
                self.class_sizes[rank] = run * self.slab_size // count // unit * unit
                self._class_runs[rank] = run
                self._sort_classes()
                return

    def _run_for(self, size: int) -> int:
        """Return how many slabs together leave the least over, or so little that it is no matter,
        when they are cut into slots of a size."""
        most = self.open_count // self._run_share
        longest = max(min(LONGEST_RUN, most, size // SMALLEST_SLOT), 1)
        best, least = 1, 1.0
        for run in range(1, longest + 1):
            waste = run * self.slab_size % size / (run * self.slab_size)
            if waste < least:
                best, least = run, waste
            if least <= self._run_waste:
                break
        return best

    def _slots_in_run(self, rank: int) -> int:
        return self._class_runs[rank] * self.slab_size // self._class_sizes[rank]

    def run_length(self, size_class: int) -> int:
        """Return how many adjacent slabs are cut into slots of a class where there are so many."""
        return self._class_runs[size_class % self.class_count]

    @property
    def longest_run(self) -> int:
        """The most slabs that are emptied with one of them."""
        return max(self._class_runs)

    def classes(self, sizes: Int64s) -> Int64s:
        """Return the rank of the size class of each size; `large` for those larger than a slab."""
        found: Int64s = self._by_size[self._rising.searchsorted(sizes)]
        return found

    def by_class(
        self,
        sizes: Int64s,
        smallest: int,
        largest: int,
        domains: int | Int32s = 0,
    ) -> list[tuple[int, Int64s | slice]]:
        """Return each size class of these sizes with the rows that have it; mostly there is one.

        Args: smallest, largest: bounds of the sizes. domains: of all, or of each.
        """
        low = bisect_left(self._rising_sizes, smallest)
        if isinstance(domains, int) and low == bisect_left(self._rising_sizes, largest):
            return [(domains * self.class_count + int(self._by_size[low]), _ALL)]
        classes = self.classes(sizes) + domains * np.int64(self.class_count)
        return [(c, np.flatnonzero(classes == c)) for c in np.unique(classes).tolist()]

    def offsets(self, slots: Int64s) -> Int64s:
        """Return the byte offset of each slot in use."""
        offsets: Int64s = self._offset[slots]
        return offsets

    def sizes(self, slots: Int64s) -> Int64s:
        """Return the size in bytes of each slot in use."""
        sizes: Int64s = self._size[slots]
        return sizes

    def tables(self) -> tuple[Int64s, Int64s]:
        """Return the offsets and sizes of all slots up to the limit; the arrays stay in place."""
        return self._offset, self._size

    def take(self, size_class: int, count: int) -> Int64s:
        """Take up to `count` slots, at least 1, of a class that are free or can be cut from a free
        slab."""
        if any(self._free_slabs):
            self._cut_slabs(size_class, count)
        free = self._free_slots[size_class]
        if not free.count:
            return NO_SLOTS
        taken = free.take(count)
        slabs = taken // self.slots_per_slab
        if np.count_nonzero(slabs != slabs[0]) == 0:
            self.slab_used[slabs[0]] += len(taken)
        else:
            np.add.at(self.slab_used, slabs, 1)
        self.used_size += len(taken) * self._class_sizes[size_class % self.class_count]
        return taken

    def _cut_slabs(self, size_class: int, count: int) -> None:
        free = self._free_slots[size_class]
        domain, rank = divmod(size_class, self.class_count)
        size = self._class_sizes[rank]
        while len(free) < count and (found := self._take_slabs(domain, self._class_runs[rank])):
            slab, run = found
            self._begin_run(slab, run, size_class)
            first = slab * self.slots_per_slab
            slots = run * self.slab_size // size
            self._size[first : first + slots] = size
            begin = slab * self.slab_size
            self._offset[first : first + slots] = range(begin, begin + slots * size, size)
            free.add(np.arange(first + slots - 1, first - 1, -1))
            self._slot_size[slab] = size

    def _begin_run(self, slab: int, run: int, size_class: int) -> None:
        self.slab_class[slab : slab + run] = size_class
        self._run_length[slab] = run
        self._inside_run[slab + 1 : slab + run] = True

    def _take_slabs(self, domain: int, run: int) -> tuple[int, int] | None:
        """Take a run of free slabs for a domain, or one slab where there is no such run; return its
        first and its length, or None."""
        if run > 1:
            free = self.slab_class[: self.open_count] == _FREE
            start = first_run(free & (self.slab_domain[: self.open_count] == domain), run)
            if start is None:
                # As high as possible: see `_pop_free_slab`.
                start = first_run(free[::-1], run)
                start = None if start is None else self.open_count - start - run
            if start is not None and self._take_run_at(start, run, domain):
                return start, run
        slab = self._pop_free_slab(domain)
        return None if slab is None else (slab, 1)

    def _take_run_at(self, start: int, run: int, domain: int) -> bool:
        """Take free slabs, which are given to a domain, from its list."""
        members = range(start, start + run)
        if not all(self._give(slab, domain) for slab in members):
            return False
        self._free_slabs[domain] = [s for s in self._free_slabs[domain] if s not in members]
        return True

    def _pop_free_slab(self, domain: int) -> int | None:
        own = self._free_slabs[domain]
        if own:
            return own.pop()
        # The highest one: what is registered with the kernel is the part below (`resize.Pages`).
        slab = max((slab for slabs in self._free_slabs for slab in slabs), default=None)
        if slab is None or not self._give(slab, domain):
            return None
        own.remove(slab)
        return slab

    def _give(self, slab: int, domain: int) -> bool:
        """Give a free slab to a domain."""
        before = int(self.slab_domain[slab])
        if before == domain:
            return True
        if not self.give(slab, domain):
            return False
        self.moved += 1
        self._free_slabs[before].remove(slab)
        self._free_slabs[domain].append(slab)
        self.slab_domain[slab] = domain
        return True

    def give_back(self, domain: int, most: int) -> bool:
        """Give some slabs of a domain, which is empty, to the first one.

        Returns: whether all could be given; the domain has none left when `slab_domain` says so.
        """
        for slab in np.flatnonzero(self.slab_domain == domain)[:most].tolist():
            if slab in self._free_slabs[domain]:
                if not self._give(slab, 0):
                    return False
            elif not self.give(slab, 0):
                return False
            else:
                self.slab_domain[slab] = 0  # beyond the size
        return True

    def take_run(self, size: int, domain: int = 0) -> int | None:
        """Take a run of free slabs for a large slot of `size` bytes, or return None."""
        need = -(-size // self.slab_size)
        start = first_run(self.slab_class[: self.open_count] == _FREE, need)
        if start is None or not self._take_run_at(start, need, domain):
            return None
        self._begin_run(start, need, domain * self.class_count + self.large)
        self.slab_used[start] = 1
        self.used_size += need * self.slab_size
        self._offset[start * self.slots_per_slab] = start * self.slab_size
        self._size[start * self.slots_per_slab] = need * self.slab_size
        self._slot_size[start] = need * self.slab_size
        return start * self.slots_per_slab

    def free(self, slots: Int64s) -> None:
        """Free slots; slabs that become empty return to the common pool."""
        if len(slots) == 0:
            return
        self.used_size -= int(self.sizes(slots).sum())
        slabs = slots // self.slots_per_slab
        classes = self.slab_class[slabs]
        np.subtract.at(self.slab_used, slabs, 1)
        used = self.slab_used[slabs] > 0
        staying = used & self.within(slots)
        self._add_free(slots[staying], classes[staying])
        emptied = np.unique(slabs[~used])
        for size_class in np.unique(self.slab_class[emptied]).tolist():
            if self._free_slots[size_class]:
                free = self._free_slots[size_class]
                free.keep(~np.isin(free.held // self.slots_per_slab, emptied))
        for slab in emptied.tolist():
            run = int(self._run_length[slab])
            self._slot_size[slab] = 0
            self._run_length[slab] = 1
            self._inside_run[slab : slab + run] = False
            self.slab_class[slab : slab + run] = _RETIRED
            end = min(slab + run, self.open_count)
            self.slab_class[slab:end] = _FREE
            own = self._free_slabs[int(self.slab_domain[slab])]
            own.extend(range(end - 1, slab - 1, -1))

    def _add_free(self, slots: Int64s, classes: Int32s) -> None:
        for size_class in np.unique(classes).tolist():
            self._free_slots[size_class].add(slots[classes == size_class])

    def free_slabs(self, low: int, high: int) -> Bools:
        """Return which of the slabs [low, high) belong to no class."""
        free: Bools = self.slab_class[low:high] == _FREE
        return free

    # ---- a successor ------------------------------------------------------------------------

    def record(self, tables: SlabTables) -> None:
        """Keep the tables by slab in these arrays from now on."""
        tables.runs[:], tables.domains[:] = self._run_length, self.slab_domain
        tables.sizes[:] = self._slot_size
        self._slot_size, self._run_length, self.slab_domain = tables

    def adopt(self, tables: SlabTables, heads: Int64s, taken: Bools) -> None:
        """Take over slabs as a predecessor has cut them, in an arena of which nothing is in use. It
        becomes as large as that needs.

        Args: heads: the slabs that begin a run, rising, with a rank of their size (`adopt_class`).
            taken: by slot, those in use. A run without one becomes free.
        """
        sizes, runs = tables.sizes[heads], tables.runs[heads]
        domains = tables.domains[heads]
        used, per_slab = np.zeros(len(self.slab_class), np.bool_), self.slots_per_slab
        free: dict[int, list[Int64s]] = {}
        for slab, size, run, domain in zip(
            heads.tolist(), sizes.tolist(), runs.tolist(), domains.tolist(), strict=True
        ):
            slots = slab * per_slab + np.arange(run * self.slab_size // size)
            held = taken[slots]
            count = int(np.count_nonzero(held))
            if not count:
                continue
            if slab + run > self.open_count:
                self.resize(slab + run)
            used[slab : slab + run] = True
            tables.domains[slab : slab + run] = domain
            rank = self.large if size > self.slab_size else self._rank_of(size)
            size_class = domain * self.class_count + rank
            self.slab_class[slab : slab + run] = size_class
            self._inside_run[slab + 1 : slab + run] = True
            self._size[slots] = size
            self._offset[slots] = slab * self.slab_size + size * (slots - slots[0])
            self.slab_used[slab] = count
            self.used_size += count * size
            free.setdefault(size_class, []).append(slots[~held][::-1])
        for size_class, parts in free.items():
            self._free_slots[size_class].add(np.concatenate(parts[::-1]))
        begins = np.zeros(len(used), np.bool_)
        begins[heads] = used[heads]
        tables.sizes[~begins], tables.runs[~begins] = 0, 1
        tables.domains[~used] = 0
        self._slot_size, self._run_length, self.slab_domain = tables
        for slabs in self._free_slabs:
            slabs.clear()
        self._free_slabs[0] += np.flatnonzero(~used[: self.open_count])[::-1].tolist()

    def adopt_class(self, size: int, run: int) -> bool:
        """Have a size class for slots of this size, of which a run of so many slabs was made;
        return whether there can be one."""
        if size > self.slab_size:
            return size == run * self.slab_size
        known = np.flatnonzero(self.class_sizes == size)
        unmade = np.flatnonzero(self.class_sizes[: self.large] == 0)
        if not len(known) and not len(unmade):
            return False
        rank = int(known[0] if len(known) else unmade[0])
        self.class_sizes[rank] = size
        if rank >= self._general:
            self._class_runs[rank] = max(self._class_runs[rank], min(run, LONGEST_RUN))
        self._sort_classes()
        return True

    def _rank_of(self, size: int) -> int:
        return int(np.flatnonzero(self.class_sizes == size)[0])

    def within(self, slots: Int64s) -> Bools:
        """Return which slots lie within the size, with all of the run that they were cut from."""
        slabs = slots // self.slots_per_slab
        within: Bools = slabs + self._run_length[slabs] <= self.open_count
        return within

    def members(self, slab: int) -> tuple[int, int]:
        """Return the slot numbers [low, high) of a slab, and of its run up to there."""
        head = slab
        while self._inside_run[head]:
            head -= 1
        return head * self.slots_per_slab, (slab + 1) * self.slots_per_slab

    def heads(self) -> Int64s:
        """Return for each slab the slab whose slots cover it: itself, or the first of its run."""
        heads = np.arange(self.slab_count)
        heads[self._inside_run[: self.slab_count]] = 0
        return np.maximum.accumulate(heads)


def joined(parts: Sequence[Int64s]) -> Int64s:
    """Concatenate arrays of slots; a sole one that is not empty is not copied."""
    filled = [part for part in parts if len(part)]
    if len(filled) == 1:
        return filled[0]
    return np.concatenate(filled) if filled else NO_SLOTS


def first_run(free: Bools, need: int) -> int | None:
    """Return the start of the first run of at least `need` True values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free.astype(np.int8), [0]))))
    starts, ends = edges[::2], edges[1::2]
    fitting = starts[ends - starts >= need]
    return int(fitting[0]) if len(fitting) else None


def _class_sizes(slab_size: int) -> Int64s:
    """Return eight sizes per doubling, each grown by what its slab would waste."""
    counts: list[int] = []
    size = SMALLEST_SLOT
    while size <= slab_size:
        for eighth in range(8):
            count = slab_size // (size + size * eighth // 8)
            if count and count not in counts:
                counts.append(count)
        size *= 2
    sizes = [slab_size // count // SLOT_ALIGNMENT * SLOT_ALIGNMENT for count in counts]
    return np.array(sorted(set(sizes)), np.int64)
