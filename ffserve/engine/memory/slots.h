/* The daemon's tables of shards, slots, residents and orders, and what is computed over them
 * once per batch. All functions are pure functions over the caller's arrays; their results go to arrays
 * of the caller as well. They decide nothing: see ffserve/cache.
 *
 * Everything below the cdef mark is also what Python sees (cffi).
 */
#ifndef FFSERVE_SLOTS_H
#define FFSERVE_SLOTS_H
#include "io.h"

/* cdef */
/* ---- blocks (slots.c) -------------------------------------------------------------------- */
typedef struct {
    const ffs_entry *entries; /* by sample, sample_count of each */
    const uint64_t *offsets;
    const uint32_t *checksums;
    int64_t sample_count;
    const int64_t *bases; /* by shard, shard_count of each, bases rising */
    const int64_t *counts;
    const int64_t *alignments;
    const int64_t *shifts; /* 1 << shift neighbours share a block */
    const int32_t *files, *kinds;
    int64_t shard_count;
    const int64_t *singly; /* first samples, rising, of blocks that are not shared */
    int64_t singly_count;
    int64_t *used; /* bytes of slots that hold samples of each shard */
} ffs_shards;

/* A table of blocks has FFS_BLOCK_ROWS rows of int64, one column per block: its first sample, its
 * number of samples, its begin and end in the file, the bytes of memory that it needs (its size, widened
 * to the file's alignment if that adds little), its shard. */
#define FFS_BLOCK_ROWS 6

/* Find the block of each of n samples, one column per sample; a sample alone where its block would be
 * larger than `largest`. Returns 0, or FFS_ERANGE when a sample belongs to no shard. */
int ffs_blocks(const ffs_shards *shards, const int64_t *numbers, int64_t n, int64_t largest,
               int64_t *blocks);

/* Find the neighbouring extents that are read together: those of up to `most` bytes in one file, at
 * most `gap` bytes apart, that begin within the same `size` bytes from the start of their read. firsts
 * gets the number of each read's first extent. Returns the number of reads. */
int64_t ffs_merge(const int64_t *begins, const int64_t *ends, const int64_t *files, int64_t n,
                  int64_t most, int64_t gap, int64_t size, int64_t *firsts);

/* Make a batch that reads n blocks into slots of sizes[k] bytes at offsets[k], with a record for every
 * sample. Blocks that ffs_merge joins, and those whose slot does not hold what a direct read brings,
 * are read into a buffer and copied to their slots. cached: the reads are not direct. Returns NULL
 * without memory, or when a block or record exceeds what contains it. */
ffs_batch *ffs_batch_blocks(const ffs_shards *shards, const int64_t *blocks, int64_t n,
                            const int64_t *offsets, const int64_t *sizes, uint8_t *arena,
                            int64_t most, int64_t gap, int64_t size, int cached);

/* ---- slots (slots.c) --------------------------------------------------------------------- */
typedef struct {
    int32_t *slot_of; /* by sample, sample_count: its slot + 1, 0 for none */
    int64_t sample_count;
    uint8_t *states; /* by slot, slot_count of each */
    int32_t *pins;
    int64_t *firsts;
    int32_t *counts;
    int32_t *loads;  /* the load that fills it */
    uint8_t *parked; /* 1: pinned, and in no bucket until the last pin is released */
    const int64_t *offsets, *sizes;
    int64_t slot_count;
} ffs_slots;

#define FFS_SLOT_FREE 0
#define FFS_SLOT_LOADING 1
#define FFS_SLOT_RESIDENT 2
#define FFS_SLOT_FAILED 3

/* Look n samples up. absent[] gets the positions of those in no slot; slots[] each slot that holds
 * one, once, and positions[] its first position. Stops where the slots would have more than `most`
 * bytes together, but not before the first sample. found[3]: samples examined, absent, slots. Returns
 * 0, or FFS_ERANGE. */
int ffs_slots_split(const ffs_slots *s, const int64_t *numbers, int64_t n, int64_t most,
                    int64_t *absent, int64_t *slots, int64_t *positions, int64_t *found);

/* Reduce n blocks, in place, to each one once, in order, until they have more than `most` bytes
 * together: the first columns of each row, of n. positions[]: the sample that wants each block; the
 * sample at 0 is served however large. Returns the number of blocks left, or FFS_ERANGE when a block
 * is outside the tables or in a slot already. found[3]: the position of the first block left out, or
 * -1; the bytes of the smallest and of the largest block left. */
int64_t ffs_slots_cut(const ffs_slots *s, int64_t *blocks, int64_t *positions, int64_t n,
                      int64_t most, int64_t *found);

/* Pin slots; loading[] gets those in state LOADING. Returns the number of these, or FFS_ERANGE with
 * nothing pinned; *bytes: of all slots. */
int64_t ffs_slots_pin(const ffs_slots *s, const int64_t *slots, int64_t n, int64_t *loading,
                      int64_t *bytes);
/* Release pins. Returns the number of FAILED or parked slots without a pin left, or FFS_ERANGE when a
 * slot has no pin (those before it have lost theirs). */
int64_t ffs_slots_unpin(const ffs_slots *s, const int64_t *slots, int64_t n);

/* Give slots[k] to block k of n: it becomes LOADING, gets a pin and belongs to the load; its bytes
 * count as used by its shard. offsets[], sizes[]: of the slots; *read_size: bytes of the blocks in
 * their files, widened.
 * Returns the bytes of the slots, or FFS_ERANGE when a sample of a block is in a slot already, a slot
 * has a pin, or something is outside the tables. */
int64_t ffs_slots_enter(const ffs_slots *s, const ffs_shards *shards, const int64_t *blocks,
                        const int64_t *slots, int64_t n, int32_t load, int64_t *offsets,
                        int64_t *sizes, int64_t *read_size);

/* Find the slots of n samples that are in this state, or in any if that is below 0; in order, with
 * repeats. Returns their number, or FFS_ERANGE. */
int64_t ffs_slots_of(const ffs_slots *s, const int64_t *numbers, int64_t n, int state,
                     int64_t *slots);

/* usable[k]: slots[k] is RESIDENT and has no pin. Returns 0, or FFS_ERANGE. */
int ffs_slots_usable(const ffs_slots *s, const int64_t *slots, int64_t n, uint8_t *usable);

/* Free n slots: their samples are in no slot, their bytes no longer count as used by their shards.
 * contents[4 * n] gets what they held: first samples, numbers of samples, offsets and sizes of the
 * slots, n of each. Returns 0, or FFS_ERANGE. */
int ffs_slots_vacate(const ffs_slots *s, const ffs_shards *shards, const int64_t *slots, int64_t n,
                     int64_t *contents);

/* How the slabs of a predecessor are cut into slots. */
typedef struct {
    const int64_t *heads; /* by slab: the first of its run, -1: it is in none */
    const int64_t *sizes; /* by first slab of a run: bytes of a slot */
    const int64_t *runs;  /* slabs of the run; sizes[k] goes at least once into it */
    const int32_t *domains;
    int64_t slab_count, slab_size, slots_per_slab;
} ffs_slabs;

/* Find the slots of samples [first, first + count) of a domain, by the entries that are readable: each
 * of these samples gets its slot, and each slot, RESIDENT now, its samples, whose numbers follow each
 * other. An entry becomes unreadable if its bytes are not inside one slot of this domain, or the slot
 * is LOADING. A slot that would get samples with a gap is FAILED then. Nothing is believed of an entry.
 * shift: no slot has samples of two blocks of 1 << shift, counted from `first`. Slots were FREE or
 * LOADING before. Returns the number of samples found, or FFS_ERANGE. */
int64_t ffs_slots_adopt(const ffs_slots *s, ffs_entry *entries, const ffs_slabs *slabs,
                        int64_t first, int64_t count, int64_t shift, int32_t domain);

/* ---- residents (next_use.c): the key of the bucket that each resident is in ------------------ */
typedef struct {
    int64_t *keys;
    int32_t *groups;
    uint8_t *prefetched; /* 1: filled before a request, and not used since */
    const int64_t *sizes;
    int64_t slot_count;
    const int32_t *classes; /* size class of each slab of 1 << slab_shift slots; below 0: none */
    int64_t slab_shift;
} ffs_residents;

#define FFS_NO_KEY -1
#define FFS_MIXED -1

/* Find among n entries of a bucket the slots that still belong there, each once, in order: those with
 * this key, group and size class. Their key becomes `after`. Returns their number, or FFS_ERANGE with
 * nothing changed. */
int64_t ffs_residents_take(const ffs_residents *r, const int32_t *entries, int64_t n, int64_t key,
                           int64_t after, int64_t group, int64_t size_class, int64_t *slots);
/* Sort n slots by their keys of 0 to `far`, stably. Returns 1, or 0 with nothing done when a key is
 * outside of that, or those below `far` are too far apart to be counted. */
int ffs_sort_by_key(const int64_t *slots, const int64_t *keys, int64_t n, int64_t far,
                    int64_t *sorted_slots, int64_t *sorted_keys);
/* Return the group of all n slots, FFS_MIXED (also for none), or FFS_ERANGE. */
int64_t ffs_residents_group(const ffs_residents *r, const int64_t *slots, int64_t n);
/* Give slots a key; *group: theirs, or FFS_MIXED. Returns 0, or FFS_ERANGE with nothing changed. */
int ffs_residents_put(const ffs_residents *r, const int64_t *slots, int64_t n, int64_t key,
                      int64_t *group);
/* n slots were used: they no longer count as prefetched. moved[]: those, with repeats, whose key is
 * below `key` (as unsigned numbers, which excludes FFS_NO_KEY) and becomes it; whose[2]: their group and
 * size class, or FFS_MIXED. Returns the number of these, or FFS_ERANGE with nothing changed. */
int64_t ffs_residents_invalidate(const ffs_residents *r, const int64_t *slots, int64_t n,
                                 int64_t key, int64_t *moved, int64_t *whose);
/* n slots, each named once, hold nothing any more. found[3]: their group or FFS_MIXED, their bytes,
 * the number of those prefetched and not used. Returns 0, or FFS_ERANGE with nothing changed. */
int ffs_residents_leave(const ffs_residents *r, const int64_t *slots, int64_t n, int64_t *found);

/* ---- when samples will be wanted (next_use.c) ---------------------------------------------- */
/* Mark n places of `seen` (size bytes, each 0 or 1). found[2]: the number of places, each counted once,
 * that were not marked before, and that were. Returns 0, or FFS_ERANGE with nothing marked. */
int ffs_mark(uint8_t *seen, int64_t size, const int64_t *numbers, int64_t n, int64_t low,
             int64_t *found);

/* The part of an epoch in which each of the samples [low, low + size) comes. */
typedef struct {
    const uint8_t *parts;
    int64_t size, low;
} ffs_order;

/* Look up the parts of n samples, 0 for those outside. found[3]: the lowest and the highest of these,
 * and the last position in numbers[] of the highest. */
void ffs_order_parts(const ffs_order *order, const int64_t *numbers, int64_t n, uint8_t *parts,
                     int64_t *found);

/* An announced order, and when each of its parts comes. */
typedef struct {
    ffs_order order;
    const double *times;
    int64_t time_count;
} ffs_timed_order;

/* A job that announced nothing: only what it has seen in this epoch is known. */
typedef struct {
    const uint8_t *seen; /* of samples [low, low + size), each 0 or 1; NULL: all are alike */
    int64_t low, size;
    double again, first; /* chance per second to want a sample that was seen, that was not */
} ffs_silent_job;

/* All that is known of when samples will be wanted. */
typedef struct {
    const ffs_timed_order *announced;
    int64_t announced_count;
    const ffs_silent_job *silent;
    int64_t silent_count;
    double now;
} ffs_future;

/* Compute when n slots will be wanted, in units of `width` seconds, rounded down, at most `far`. A slot
 * is wanted when the first of its samples is: the soonest of what is announced and of what silent jobs
 * let expect, 1 / (the sum of their chances) from now. Samples outside of a job's dataset count nothing.
 * firsts, counts: by slot, slot_count of each. Returns 0, or FFS_ERANGE when a slot is outside, or an
 * order lacks a time for a part. */
int ffs_keys(const ffs_future *future, const int64_t *firsts, const int32_t *counts,
             int64_t slot_count, const int64_t *slots, int64_t n, double width, int64_t far,
             int64_t *keys);
/* end cdef */
#endif
