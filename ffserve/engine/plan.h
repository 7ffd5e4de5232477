/* Planning: the cache's and the policy's tables of samples, blocks and slots, and what is computed over
 * them once per batch. Everything below the cdef mark is also what Python sees (cffi).
 */
#ifndef FFSERVE_PLAN_H
#define FFSERVE_PLAN_H
#include "io.h"

/* cdef */
/* ---- planning what to read: the daemon's own tables ---------------------------------------
 * Pure functions over arrays of the caller's, called once a batch; what they find stands in
 * tables that belong to the caller as well. They decide nothing: see ffserve/cache. */
typedef struct {
    const ffs_entry *entries;   /* by sample, sample_count of each */
    const uint64_t *offsets;
    const uint32_t *checksums;
    int64_t sample_count;
    const int64_t *bases;       /* by shard, shard_count of each, bases rising */
    const int64_t *counts;
    const int64_t *alignments;
    const int64_t *shifts;      /* 1 << shift neighbours share a block */
    const int32_t *files, *kinds;
    int64_t shard_count;
    const int64_t *singly;      /* first samples, rising, of blocks that are not shared */
    int64_t singly_count;
    int64_t *used;              /* bytes of slots that hold samples of each shard */
} ffs_shards;

/* A table of blocks has FFS_BLOCK_ROWS rows of int64, one column a block: number of its first
 * sample, number of samples, where it begins and ends in the file, its size widened to the file's
 * alignment, its shard. */
#define FFS_BLOCK_ROWS 6

/* The block of each of n samples, one column a sample, or alone where it would be larger than
 * `largest`. 0, or FFS_ERANGE when a sample is of no shard. */
int ffs_blocks(const ffs_shards *shards, const int64_t *numbers, int64_t n, int64_t largest,
               int64_t *blocks);

/* Slots that hold these samples, n of sizes[] bytes, are taken (sign 1) or given back (-1). 0, or
 * FFS_ERANGE when a sample is of no shard: those before it are counted. */
int ffs_shards_count(const ffs_shards *shards, const int64_t *numbers, const int64_t *sizes,
                     int64_t n, int64_t sign);

/* Which neighbouring extents are read together: those of up to `most` bytes in one file, at most
 * `gap` bytes apart, that begin within the same `size` bytes from the start of their read. firsts
 * gets the number of each read's first extent; returns how many reads there are. */
int64_t ffs_merge(const int64_t *begins, const int64_t *ends, const int64_t *files, int64_t n,
                  int64_t most, int64_t gap, int64_t size, int64_t *firsts);

/* A batch that reads blocks (columns of n) into slots at places[k], rooms[k] bytes large, with a
 * record for every sample; those that ffs_merge puts together are read at once, through a buffer and
 * from there to their slots. NULL: no memory, or a block or record that is not inside of what it is
 * part of. */
ffs_batch *ffs_batch_blocks(const ffs_shards *shards, const int64_t *blocks, int64_t n,
                            const int64_t *places, const int64_t *rooms, uint8_t *arena,
                            int64_t most, int64_t gap, int64_t size);

typedef struct {
    int32_t *slot_of;           /* by sample, sample_count: number of its slot + 1, 0 for none */
    int64_t sample_count;
    uint8_t *states;            /* by slot, slot_count of each */
    int32_t *pins;
    int64_t *firsts;
    int32_t *counts;
    int32_t *loads;             /* the load that fills it */
    const int64_t *offsets, *sizes;
    int64_t slot_count;
} ffs_slots;

#define FFS_SLOT_FREE 0
#define FFS_SLOT_LOADING 1
#define FFS_SLOT_RESIDENT 2
#define FFS_SLOT_FAILED 3

/* Look n samples up. absent[] gets the positions of those that are in no slot; slots[] each slot
 * that holds one, once, and positions[] where it comes first. Stops, but not before the first
 * sample, where the slots would have more than `most` bytes together. found[3]: samples looked at,
 * absent, slots. 0, or FFS_ERANGE. */
int ffs_slots_split(const ffs_slots *s, const int64_t *numbers, int64_t n, int64_t most,
                    int64_t *absent, int64_t *slots, int64_t *positions, int64_t *found);

/* Leave of n blocks (in rows of n) each one once, in order, until they have more than `most` bytes
 * together, in place: of each row the first so many columns. where[]: the sample that wants it;
 * sample 0 is served however large. Returns how many are left; *cut gets the sample that the first
 * one left out was for, or -1. FFS_ERANGE: a block outside the tables, or in a slot already. */
int64_t ffs_slots_cut(const ffs_slots *s, int64_t *blocks, int64_t *where, int64_t n,
                      int64_t most, int64_t *cut);

/* Pin slots; loading[] gets those that are being read. Returns how many these are; *bytes: of all
 * slots. FFS_ERANGE: nothing was pinned. */
int64_t ffs_slots_pin(const ffs_slots *s, const int64_t *slots, int64_t n, int64_t *loading,
                      int64_t *bytes);
/* Give pins back. Returns how many slots failed and have no pin left; FFS_ERANGE: a slot has no
 * pin to give back (those before it have given theirs). */
int64_t ffs_slots_unpin(const ffs_slots *s, const int64_t *slots, int64_t n);

/* Say that block k (columns of n) is being read into slots[k], which is LOADING, pinned once more
 * and belongs to a load; offsets[], sizes[]: of the slots. Returns their bytes, or FFS_ERANGE: a
 * sample of a block lies in a slot already, a slot has a pin (two blocks would share it, or a
 * reader has what is in it), or something is outside the tables. */
int64_t ffs_slots_enter(const ffs_slots *s, const int64_t *blocks, const int64_t *slots,
                        int64_t n, int32_t load, int64_t *offsets, int64_t *sizes);

/* Of n samples those slots that hold one and are in this state, or in any if that is below 0; in
 * order, repeats kept. Returns how many there are, or FFS_ERANGE. */
int64_t ffs_slots_of(const ffs_slots *s, const int64_t *numbers, int64_t n, int state,
                     int64_t *slots);

/* What n slots hold, to tables[4 * n]: first samples, numbers of samples, offsets and sizes of the
 * slots, n of each. 0, or FFS_ERANGE. */
int ffs_slots_contents(const ffs_slots *s, const int64_t *slots, int64_t n, int64_t *tables);
/* usable[k]: slots[k] is RESIDENT and has no pin. 0, or FFS_ERANGE. */
int ffs_slots_usable(const ffs_slots *s, const int64_t *slots, int64_t n, uint8_t *usable);
/* n slots hold nothing any more and are FREE; their samples are in no slot. 0, or FFS_ERANGE. */
int ffs_slots_vacate(const ffs_slots *s, const int64_t *slots, int64_t n);

/* ---- the policy's tables: by what key each resident was put on a stack ---------------------- */
typedef struct {
    int64_t *keys;
    int32_t *groups;
    uint8_t *ahead;             /* 1: filled before anybody asked, and not used since */
    const int64_t *sizes;
    int64_t slot_count;
    const int32_t *classes;     /* size class of each slab of 1 << slab_shift slots; below 0: large */
    int64_t slab_shift, large;
} ffs_residents;

#define FFS_NO_KEY -1
#define FFS_MIXED -1

/* Of n entries of a stack those slots that still belong there, each once, in order: their key,
 * group and size class are these. Their key becomes `after`. Returns how many there are, or
 * FFS_ERANGE: nothing was done. */
int64_t ffs_residents_take(const ffs_residents *r, const int32_t *items, int64_t n, int64_t key,
                           int64_t after, int64_t group, int64_t size_class, int64_t *slots);
/* Sort n slots by their keys of 0 to `far`, equals as they stand. 1, or 0: nothing was done,
 * since a key is below or above that, or those below `far` are too far apart to be counted. */
int ffs_sort_by_key(const int64_t *slots, const int64_t *keys, int64_t n, int64_t far,
                    int64_t *sorted_slots, int64_t *sorted_keys);
/* The group of all n slots, FFS_MIXED (of none, too), or FFS_ERANGE. */
int64_t ffs_residents_group(const ffs_residents *r, const int64_t *slots, int64_t n);
/* Give slots a key; *group: theirs, or FFS_MIXED. 0, or FFS_ERANGE: nothing was done. */
int ffs_residents_put(const ffs_residents *r, const int64_t *slots, int64_t n, int64_t key,
                      int64_t *group);
/* n slots were used: they are not ahead any more. moved[]: those, repeats kept, whose key is below
 * `key` (as unsigned numbers, so that FFS_NO_KEY is not), which becomes theirs; whose[2]: their
 * group and size class, or FFS_MIXED. Returns how many these are, or FFS_ERANGE: nothing was done. */
int64_t ffs_residents_invalidate(const ffs_residents *r, const int64_t *slots, int64_t n, int64_t key,
                            int64_t *moved, int64_t *whose);
/* n slots, each named once, hold nothing any more. found[3]: their group or FFS_MIXED, their bytes,
 * how many were ahead. 0, or FFS_ERANGE: nothing was done. */
int ffs_residents_leave(const ffs_residents *r, const int64_t *slots, int64_t n, int64_t *found);

/* ---- a miss that is plain (plan.c) --------------------------------------------------------- */
typedef struct {
    const ffs_slots *slots;
    const ffs_shards *shards;
    const ffs_residents *residents;
    const int64_t *class_sizes; /* rising, of class_count size classes */
    int64_t class_count;
    int64_t *slab_used;         /* by slab: slots in use */
    int64_t largest;            /* see ffs_blocks */
} ffs_planner;

/* Slots of one size class that are at hand: free ones, the last of them to be taken first, then
 * victims off a stack of a group's residents with this key, from its end if `newest`. */
typedef struct {
    const int64_t *free_slots; int64_t free_count;
    const int32_t *victims; int64_t victim_count;
    int64_t key, group, size_class;
    int newest;
    int more_free;              /* more free slots could be made: if too few are here, it is not plain */
} ffs_stock;

#define FFS_PLAN_CLASSES 8

typedef struct {
    int64_t handled;            /* samples that the blocks are all of, the first so many */
    int64_t count;              /* blocks, and slots for them */
    int64_t class_count;        /* size classes that they have, rising; of each: */
    int64_t classes[8];
    int64_t wanted[8];          /* slots */
    int64_t fresh[8];           /* of these free ones; the others have victims in them */
    int64_t looked[8];          /* entries that were taken off the stack for that */
    int64_t gone;               /* victims */
    int64_t freed, wasted;      /* their bytes; how many were ahead */
    int64_t held, size;         /* bytes: of the slots, and of the blocks, widened */
} ffs_plan;

/* Plan the reading of n samples, of about `most` bytes: their blocks in order of first use, one column
 * each in blocks[6 * n]; slots[n] for them; taken[n] the same slots, the free ones by size class, then
 * the victims by size class; contents[4 * n] of the victims, see ffs_slots_contents. Victims are on
 * no stack any more, else nothing is changed yet. Returns how many blocks; 0: it is not plain, and
 * nothing was done; where nothing but a stock was in the way, which is missing or has more_free, the
 * plan has the size classes and the count, else a count of 0. */
int64_t ffs_plan_choose(const ffs_planner *p, const int64_t *numbers, int64_t n, int64_t most,
                        const ffs_stock *stocks, int64_t stock_count, int64_t *blocks,
                        int64_t *slots, int64_t *taken, int64_t *contents, ffs_plan *plan);
/* The victims were made unreadable: they go, and the blocks are being read by a load, for a group.
 * places, rooms: of the slots, offset and size. 0, or FFS_ERANGE, which is a fault of ours. */
int ffs_plan_take(const ffs_planner *p, int64_t group, int32_t load, const int64_t *blocks,
                  const int64_t *slots, const int64_t *taken, const int64_t *contents,
                  int64_t *places, int64_t *rooms, ffs_plan *plan);

/* Mark n places of `seen` (size bytes, each 0 or 1). found[2]: how many places, each counted once,
 * were not marked before, and how many were. 0, or FFS_ERANGE: nothing was marked. */
int ffs_mark(uint8_t *seen, int64_t size, const int64_t *numbers, int64_t n, int64_t low,
             int64_t *found);

/* ---- what jobs announced --------------------------------------------------------------- */
/* In which part of an epoch each of the samples low to low + size comes. */
typedef struct { const uint8_t *parts; int64_t size, low; } ffs_table;

/* The parts of n samples, 0 for those outside. found[3]: the lowest and the highest of these, and
 * the last sample that is in the highest. */
void ffs_parts(const ffs_table *t, const int64_t *numbers, int64_t n, uint8_t *parts,
                 int64_t *found);

/* A job of which nothing is known but what it has seen in this epoch. */
typedef struct {
    const uint8_t *seen;        /* of samples low to low + size, each 0 or 1; NULL: all are alike */
    int64_t low, size;
    double again, first;        /* chance a second to want a sample that was seen, that was not */
} ffs_silent;

/* When the parts of an announced epoch come. */
typedef struct { ffs_table table; const double *times; int64_t time_count; } ffs_timed;

/* All that is known of when samples will be wanted. */
typedef struct {
    const ffs_timed *announced; int64_t announced_count;
    const ffs_silent *silent; int64_t silent_count;
    double now;
} ffs_future;

/* When n slots will be wanted, in parts of `width` seconds, rounded down; not below `far`: that. A
 * slot is wanted when the first of its samples is: the soonest of what is announced and what silent
 * jobs let expect, 1 / (the sum of their chances) from now; samples outside of what a job has count
 * nothing. firsts, counts: by slot, slot_count of each. 0, or FFS_ERANGE when there is no such slot,
 * or no time for a part. */
int ffs_keys(const ffs_future *future, const int64_t *firsts, const int32_t *counts,
             int64_t slot_count, const int64_t *slots, int64_t n, double width, int64_t far,
             int64_t *keys);
/* end cdef */
#endif
