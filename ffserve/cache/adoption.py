"""Adoption: the samples that a predecessor left in shared memory become this cache's residents.

The directory is believed, everything else is compared with it. A sample is adopted if its entry is
readable and names bytes inside one slot of its shard's domain, and if the slot holds one whole
block of the shard and nothing else. All other entries become unreadable before anything is read
into memory, so what is dropped is read again and never mistaken. Slots that were being filled are
set aside: the kernel may still write to them (`Adopted.end_quarantine`). Slots that were leased
stay as they are until their readers are gone (`Adopted.end_leases`).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ffserve.cache.arena import SMALLEST_SLOT, Arena, SlabTables
from ffserve.cache.cache import Cache
from ffserve.cache.tables import LARGEST_SHARED_BLOCK, Blocks
from ffserve.dtypes import Bytes, Int32s, Int64s
from ffserve.engine.slots import FAILED, FREE, LOADING, RESIDENT, Slabs

_STATE = 0x7F
"""The bits of a state without the mark that a look-up may have left (memory/slots.c: SEEN)."""
_CHUNKED_SHIFT = 40
"""The shift of a shard whose records are in chunks: its blocks are not known before it is
opened."""
_PART = 65_536
"""The blocks of this many slots are computed together."""


class Adopted:
    """The result of an adoption of a predecessor's memory.

    samples: adopted. size: bytes of their slots. lost: samples that were readable and are not any
    more. loading: slots that may still be written to. leased: slots with leases of clients that the
    predecessor served.
    """

    def __init__(self, cache: Cache, samples: int, lost: int, loading: Int64s) -> None:
        self._cache = cache
        self.samples, self.lost, self.loading = samples, lost, loading
        self.size = cache.arena.used_size - int(cache.arena.sizes(loading).sum())
        self.leased = self._pinned = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int32)

    def keep_leases(self, leased: Int64s) -> None:
        """Keep leased slots: those of residents by a pin, and the bytes of all others, as if they
        were being filled. So another successor finds both marks on them."""
        state, leases = self._cache.state, self._cache.leases
        self.leased, self._counts = leased, leases[leased]
        resident = state[leased] == RESIDENT
        self._pinned = leased[resident]
        self._cache.pins[self._pinned] += 1
        state[leased[~resident]] = LOADING

    def end_quarantine(self) -> None:
        """Nothing is written to the slots any more that were being filled."""
        loading, self.loading = self.loading, self.loading[:0]
        self._free(np.setdiff1d(loading, self.leased))

    def end_leases(self) -> None:
        """No client reads the predecessor's leases any more."""
        leased, pinned = self.leased, self._pinned
        self._cache.leases[leased] -= self._counts
        self._cache.release([pinned])
        self._free(np.setdiff1d(leased, np.concatenate((pinned, self.loading))))
        self.leased = self._pinned = leased[:0]

    def _free(self, slots: Int64s) -> None:
        self._cache.state[slots] = FREE
        self._cache.arena.free(slots)


def adopt(
    cache: Cache, tables: SlabTables, domains: Collection[int], held: Int64s, leased: Int64s
) -> Adopted:
    """Take over the samples of the shards in the cache's table, which have no samples yet.

    Args:
        tables: of the predecessor; become those of the arena. The cache's states and leases, the
            entries of the directory and the numbers of domains are the predecessor's already.
        domains: the numbers of those that are taken over. Slabs of others are free.
        held, leased: slots that have a state, and slots that have leases. The rest of those tables
            is not looked at: that would take memory for them.
    Cost: 20 to 100 ns per sample, 10 us per slab.
    """
    arena, shards, slots = cache.arena, cache.shards, cache.slots
    heads, head_of = _sound_runs(arena, tables, domains)
    states, leases = cache.state, cache.leases
    # The states of loading slots are valid whenever this process is killed.
    marked = states[held] & _STATE == LOADING
    loading = _existing(arena, tables, head_of, held[marked])
    states[loading] = LOADING
    states[held[~marked]] = FREE
    states[np.setdiff1d(held[marked], loading)] = FREE
    slabs = Slabs(
        head_of, tables.sizes, tables.runs, tables.domains, arena.slab_size, arena.slots_per_slab
    )
    samples = 0
    for base, count, shift, domain, chunked in zip(
        shards.bases.tolist(),
        shards.counts.tolist(),
        shards.shifts.tolist(),
        shards.domains.tolist(),
        shards.chunked.tolist(),
        strict=True,
    ):
        samples += slots.adopt(slabs, base, count, _CHUNKED_SHIFT if chunked else shift, domain)
    found = _found(arena, tables, heads, states)
    counted, leased = leased, _existing(arena, tables, head_of, leased)
    leases[np.setdiff1d(counted, leased)] = 0
    taken = np.zeros(arena.slot_limit, np.bool_)
    taken[found] = taken[loading] = taken[leased] = True
    arena.adopt(tables, heads, taken)
    sizes, rows = arena.sizes(found), shards.rows(slots.firsts[found])
    np.add.at(shards.used, rows, sizes)
    lost = _drop_unsound(cache, found, rows, leased)
    found = found[states[found] == RESIDENT]
    _enter(cache, found, shards.rows(slots.firsts[found]))
    adopted = Adopted(cache, samples - lost, lost, loading)
    adopted.keep_leases(leased)
    return adopted


def drop_other_blocks(cache: Cache, base: int, count: int) -> bool:
    """Evict those slots of a shard in chunks that do not hold one of its blocks, now that these are
    known; return False if one of them is leased. Nobody has the shard open."""
    slots = cache.allocator.slots_of(base, base + count)
    firsts, counts = cache.slots.firsts[slots], cache.slots.counts[slots]
    blocks = cache.shards.blocks(firsts)
    wrong = (blocks.firsts != firsts) | (blocks.counts != counts)
    runs = zip(firsts[wrong].tolist(), counts[wrong].tolist(), strict=True)
    return all(cache.allocator.evict(first, first + size) for first, size in runs)


def _sound_runs(
    arena: Arena, tables: SlabTables, domains: Collection[int]
) -> tuple[Int64s, Int64s]:
    """Return the slabs that begin a possible run of slots, rising; and the first slab of each
    slab's run, -1 for those in none."""
    heads: list[int] = []
    head_of = np.full(len(tables.sizes), -1, np.int64)
    end = 0
    for slab in np.flatnonzero(tables.sizes).tolist():
        size, run = int(tables.sizes[slab]), int(tables.runs[slab])
        sound = (
            slab >= end
            and 0 < run <= len(head_of) - slab
            and SMALLEST_SLOT <= size <= run * arena.slab_size
            # All slots of a run have numbers of its first slab.
            and run * arena.slab_size // size <= arena.slots_per_slab
            and int(tables.domains[slab]) in domains
        )
        if sound and arena.adopt_class(size, run):
            heads.append(slab)
            end = slab + run
            head_of[slab:end] = slab
    return np.array(heads, np.int64), head_of


def _existing(arena: Arena, tables: SlabTables, head_of: Int64s, slots: Int64s) -> Int64s:
    """Return those slots that there are."""
    heads = head_of[slots // arena.slots_per_slab]
    slots, heads = slots[heads >= 0], heads[heads >= 0]
    counts = tables.runs[heads] * arena.slab_size // np.maximum(tables.sizes[heads], 1)
    existing: Int64s = slots[slots - heads * arena.slots_per_slab < counts]
    return existing


def _found(arena: Arena, tables: SlabTables, heads: Int64s, states: Bytes) -> Int64s:
    """Return the slots in which samples were found, rising."""
    parts = [np.zeros(0, np.int64)]
    counts = tables.runs[heads] * arena.slab_size // tables.sizes[heads]
    firsts = heads * arena.slots_per_slab
    for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        part = states[first : first + count]
        parts.append(first + np.flatnonzero((part == RESIDENT) | (part == FAILED)))
    return np.concatenate(parts)


def _drop_unsound(cache: Cache, found: Int64s, rows: Int64s, leased: Int64s) -> int:
    """Drop the slots that do not hold one block each; return the number of their samples."""
    slots, shards = cache.slots, cache.shards
    wrong = cache.state[found] == FAILED
    plain = ~shards.chunked[rows]
    single = shards.shifts[rows] == 0
    wrong |= plain & single & (slots.counts[found] != 1)
    (shared,) = (plain & ~single & ~wrong).nonzero()
    for start in range(0, len(shared), _PART):
        part = shared[start : start + _PART]
        firsts, counts = slots.firsts[found[part]], slots.counts[found[part]]
        blocks = Blocks(shards.c.blocks(firsts, LARGEST_SHARED_BLOCK))
        wrong[part] = (blocks.firsts != firsts) | (blocks.counts != counts)
    dropped = found[wrong]
    if not len(dropped):
        return 0
    samples = int(slots.counts[dropped].sum())
    cache.retract(*slots.vacate(dropped))
    cache.arena.free(np.setdiff1d(dropped, leased))
    return samples


def _enter(cache: Cache, found: Int64s, rows: Int64s) -> None:
    """Enter residents into the policy, by the groups of their shards."""
    arena, policy = cache.arena, cache.policy
    bases = cache.shards.bases.tolist()
    groups = np.array([cache.next_use.group_of(base) for base in bases], np.int64)
    of_slot = groups[rows]
    sizes = arena.sizes(found)
    for group in np.unique(groups).tolist():
        mine = of_slot == group
        if mine.any():
            policy.enter(found[mine], group, int(sizes[mine].sum()))
    classes: Int32s = arena.slab_class[found // arena.slots_per_slab]
    for size_class in np.unique(arena.slab_class[arena.slab_class >= 0]).tolist():
        policy.admit(found[classes == size_class], size_class)
