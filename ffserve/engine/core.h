/* The face of the C core. Everything below the cdef mark is also what Python sees (cffi).
 *
 * Three things live here and nothing else: reading extents (an engine is one I/O thread over a
 * ring, Linux AIO, or a pool of preadv threads), checksums, and the seqlocked directory that
 * lets a client copy samples out of shared memory without asking anybody. No policy, no Python
 * object, no errno left behind: functions return 0 or a negative errno or FFS_E* below.
 */
#ifndef FFSERVE_CORE_H
#define FFSERVE_CORE_H
#include <stddef.h>
#include <stdint.h>

/* cdef */
#define FFS_ECHECKSUM -100001    /* the payload does not match its checksum */
#define FFS_ETRUNCATED -100002   /* the file ended inside the payload */
#define FFS_ESTALE -100003       /* a directory entry changed its length: look the sample up again */
#define FFS_ERANGE -100004       /* an index outside the view; a place outside the arena */

#define FFS_CRC_NONE 0
#define FFS_CRC_32 1             /* zlib's CRC-32 */
#define FFS_CRC_32C 2            /* Castagnoli */

/* ---- the directory: one entry a sample, shared read-only with every client ----------------
 * seq: low bit set = readable. Every change of state adds 1.
 * place: low 48 bits the payload's byte offset in the arena, high 16 bits the high part of the
 * length. length = length_low | (place >> 48) << 32; all 48 bits set = not known yet. */
typedef struct { uint32_t seq; uint32_t length_low; uint64_t place; } ffs_entry;

/* A run of samples [first, first + count) of a dataset whose entries lie together. */
typedef struct { const ffs_entry *entries; uint64_t first; uint64_t count; } ffs_segment;

/* What a client needs to copy samples: segments in rising order of `first`, gapless from 0. */
typedef struct {
    const uint8_t *arena; uint64_t arena_size;
    const ffs_segment *segments; uint64_t segment_count;
} ffs_view;

/* Look n indices up. offsets[n+1] gets the running sum of lengths (0 for an unknown length);
 * missing[] (or NULL) gets the positions (0..n-1) that are not readable now. Returns how many are missing,
 * or FFS_ERANGE when an index is outside the view (*bad gets its position). *unknown gets how
 * many lengths were unknown. */
int64_t ffs_locate(const ffs_view *view, const int64_t *indices, int64_t n, int64_t *offsets,
                   int64_t *missing, int64_t *unknown, int64_t *bad);

/* Copy samples out. For each k in positions[0..m) (NULL: 0..n-1): copy sample indices[k] to
 * dests[k] if dests is not NULL, else to buffer + offsets[k], provided that its entry is readable
 * before and after and its length is offsets[k+1]-offsets[k]. left[] (or NULL) gets the positions
 * that were not readable (left may be the same array as positions). Returns their number, or
 * FFS_ESTALE when a length differs, FFS_ERANGE when an entry points outside the arena. */
int64_t ffs_gather(const ffs_view *view, const int64_t *indices, const int64_t *offsets,
                   uint8_t *buffer, uint8_t *const *dests,
                   const int64_t *positions, int64_t m, int64_t *left);

/* Both in one, for a batch that can be read whole: 0 copied back to back into buffer; 1 not copied,
 * since it takes less than least or more than room bytes (offsets[] is filled); FFS_ESTALE when not
 * every sample could be read, FFS_ERANGE as above. at_once: it likely fits, so copy while looking
 * samples up, which takes longer if it does not. Other than 0: the buffer may be written to. */
int ffs_copy_batch(const ffs_view *view, const int64_t *indices, int64_t n, int64_t *offsets,
                   uint8_t *buffer, uint64_t least, uint64_t room, int at_once);

/* Copy by vectors of at most so many bytes from now on (64, 32; 0: as the C library does): for
 * tests. Returns what the processor has. */
int ffs_copy_width(int most);

/* Payload places for reading in place (the samples are pinned by the caller): places[k] = byte
 * offset in the arena, or UINT64_MAX when not readable. Returns how many were not readable. */
int64_t ffs_places(const ffs_view *view, const int64_t *indices, int64_t n, uint64_t *places);

/* Daemon side. Make entries [firsts[k], firsts[k]+counts[k]) unreadable, k < m, those only whose
 * place lies inside [slots[k], slots[k]+sizes[k]); full fence before returning. */
void ffs_retract(ffs_entry *entries, const int64_t *firsts, const int64_t *counts,
                 const uint64_t *slots, const uint64_t *sizes, int64_t m);

/* Publish one sample whose bytes are in place already (decoded, or served from elsewhere). */
void ffs_publish(ffs_entry *entry, uint64_t offset, uint64_t length);

/* A word in memory that two processes share: whoever sees the value that was set also sees what the
 * setter did before, and what the setter read before stays read. */
void ffs_flag_set(uint32_t *flag, uint32_t value);
uint32_t ffs_flag_get(const uint32_t *flag);

/* Publish n samples of one block: entries [first, first + n), payload k at base + starts[k]. */
void ffs_publish_run(ffs_entry *entries, uint64_t first, int64_t n, uint64_t base,
                     const int64_t *starts, const int64_t *lengths);

/* ---- leases without asking (hazards.c) --------------------------------------------------- */
#define FFS_PANEL 64             /* samples that a panel of a table can name */
#define FFS_PANELS 512

/* What a client leases: PROTOCOL.md, section 4. The daemon writes `budget`, the client the rest. */
typedef struct {
    uint64_t budget;             /* bytes that may be claimed; 0: nobody looks here */
    uint64_t reserved_0[7];
    uint64_t claimed;
    uint64_t reserved_1[7];
    uint64_t live[8];            /* a bit a panel: its samples are leased */
    uint64_t reserved_2[8];
    uint32_t samples[32768];     /* the number of a sample and 1, or 0 */
} ffs_hazards;

ffs_hazards *ffs_hazards_map(int fd);  /* of a file of that size; NULL: the kernel refused */
void ffs_hazards_unmap(ffs_hazards *table);

/* A client's own side of its table: which panels its leases have taken; whether there are to be no
 * new ones. */
typedef struct {
    ffs_hazards *table;          /* NULL: not ours any more */
    uint64_t used[8];
    uint32_t ended;
} ffs_leases;

/* What leasing samples of one data set needs. */
typedef struct {
    ffs_leases *leases;
    const uint64_t *bases;       /* of each segment of the view: the number of its first sample */
    uint64_t extra;              /* what a sample is charged beyond its length */
} ffs_leaser;

typedef struct { uint64_t panels[8]; uint64_t claimed; uint64_t size; } ffs_lease_note;

/* Lease n samples. starts[k] = byte offset in the arena, or -1 where it is not readable now, or
 * where there is no room (sizes[k] then means nothing); sizes[k] = length. note: to be given to ffs_unlease, once;
 * its `size` is the sum of the leased lengths. Returns how many were not leased, or FFS_ERANGE: an
 * index outside of the view, an entry that points outside of the arena; then nothing is leased. */
int64_t ffs_lease(const ffs_leaser *leaser, const ffs_view *view, const int64_t *indices,
                  int64_t n, int64_t *starts, int64_t *sizes, ffs_lease_note *note);
/* Returns 1 when that was the last lease and there are to be no new ones. */
int ffs_unlease(ffs_leases *leases, ffs_lease_note *note);
/* Lease nothing any more. Returns whether something is leased still, in a call to ffs_lease that
 * has not returned included. */
int ffs_leases_end(ffs_leases *leases);

/* Daemon side. Set the budget; what the client had claimed after that. */
uint64_t ffs_hazards_set_budget(ffs_hazards *table, uint64_t budget);
/* The numbers of all samples that n tables name, any u32, repeats and all; those of table t end at
 * ends[t]. `samples` has room for 32768 a table. A full fence comes before, see ffs_retract. */
int64_t ffs_hazards_read(ffs_hazards *const *tables, int64_t n, uint32_t *samples, int64_t *ends);
/* Make entries readable again that were retracted and whose slots were not written to. */
void ffs_restore(ffs_entry *entries, const int64_t *numbers, int64_t n);

/* ---- checksums --------------------------------------------------------------------------- */
uint32_t ffs_checksum(int kind, uint32_t seed, const void *bytes, uint64_t size);
/* For n records payload k = base + offsets[k] .. + lengths[k]: out[k] = its checksum. */
void ffs_checksums(int kind, const uint8_t *base, const uint64_t *offsets, const uint64_t *lengths,
                   int64_t n, uint32_t *out);

/* ---- TFRecord's frames ------------------------------------------------------------------- */
#define FFS_FRAMES_MORE 0        /* give a window from `at` on, or from 4 bytes before if owed */
#define FFS_FRAMES_FULL 1        /* no room for another record */
#define FFS_FRAMES_END 2         /* the file ends behind a whole frame */
#define FFS_FRAMES_BAD_HEADER 3  /* the header at `at` does not match its checksum */
#define FFS_FRAMES_CUT_HEADER 4  /* fewer bytes are left at `at` than a header has */
#define FFS_FRAMES_CUT_RECORD 5  /* the frame at `at` is longer than the rest of the file */

/* A walk over the frames of a file: where it is (the next header), and what it found. */
typedef struct {
    uint64_t file_size, at;
    uint64_t *offsets, *lengths;  /* of payloads, `room` each */
    uint32_t *checksums;          /* stored, unmasked */
    int64_t count, room;
    int32_t verify;               /* hold headers against their checksums */
    int32_t owed;                 /* the last record's checksum, at - 4, was not seen yet */
} ffs_frame_walk;

/* Go on through the file's bytes [base, base + size); return one of FFS_FRAMES_*. */
int ffs_frames(ffs_frame_walk *walk, const uint8_t *window, uint64_t base, uint64_t size);

/* Frame n payloads that lie back to back, payload k = payloads[edges[k] .. edges[k + 1]); out gets
 * them all and 16 bytes each. */
void ffs_frame_all(const uint8_t *payloads, const uint64_t *edges, int64_t n, uint8_t *out);

/* The search for the frame that follows one whose header is damaged. at: where to look next;
 * proven: take a place only if the payload that would end there, begun at `summed` with checksum
 * `crc`, matches the four bytes in front of the place. The end of the file is then a place too. */
typedef struct {
    uint64_t file_size, at, summed;
    uint32_t crc;
    int32_t proven;
} ffs_frame_finder;

/* Go on through the file's bytes [base, base + size), which hold `at` and, if proven, `summed`:
 * 1 and `at` is such a place; or 0, and a window beginning at `at` (`summed`) is wanted, unless
 * the file ended. */
int ffs_frame_search(ffs_frame_finder *finder, const uint8_t *window, uint64_t base,
                     uint64_t size);

/* ---- RecordIO's chunks ------------------------------------------------------------------- */
#define FFS_CHUNKS_MORE 0   /* give a window that holds 20 bytes from `wanted` on, or all left */
#define FFS_CHUNKS_FULL 1   /* no room for another chunk */
#define FFS_CHUNKS_END 2    /* the file ends behind a whole chunk */
#define FFS_CHUNKS_FAULT 3  /* no chunk that can be taken stands at `at` */

/* A walk over the headers of a file: where it is, and the chunks it found. */
typedef struct {
    uint64_t file_size;
    uint64_t at;            /* where the next chunk begins; all before it is in the tables */
    uint64_t wanted;        /* out: with FFS_CHUNKS_MORE */
    int64_t *begins, *ends; /* extents in the file, header included, `room` each */
    int64_t *firsts;        /* number of the first record, room + 1 of them, the first is 0 */
    int64_t *sizes;         /* bytes that each decodes to, as it tells */
    uint32_t *checksums;
    uint8_t *compressors;   /* as the dialect numbers them */
    int64_t count, room;
    uint64_t records_allowed, records_a_byte; /* so many in all, and so many more a byte of file */
    int32_t dialect;        /* 0 py, 1 go, -1: the first chunk tells */
    int32_t inside;         /* the walk's own: the header at `at` was read, */
    uint64_t place;         /* its payload is looked at here next, */
    uint64_t decoded;       /* and told of so many bytes until there */
    uint32_t words[5];
} ffs_chunk_walk;

/* Go on through the file's bytes [base, base + size); return one of FFS_CHUNKS_*. */
int ffs_chunks(ffs_chunk_walk *walk, const uint8_t *window, uint64_t base, uint64_t size);

/* Walk over at most n records (u32 length, bytes) that lie one behind the other in `size` bytes.
 * starts[], lengths[]: of those that lie whole inside, whose number is returned; *end: behind the
 * last of them. The bytes hold exactly n records if n is returned and *end is size. */
int64_t ffs_split(const uint8_t *bytes, uint64_t size, int64_t n, int64_t *starts,
                  int64_t *lengths, uint64_t *end);

/* Copy n pieces, each to a place of its own. */
void ffs_scatter(const uint8_t *bytes, const int64_t *starts, const int64_t *lengths, int64_t n,
                 uint8_t *const *dests);

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
int64_t ffs_residents_doubt(const ffs_residents *r, const int64_t *slots, int64_t n, int64_t key,
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
/* numbers[]: low + the numbers at places [start, stop) of `count`, whose bytes stand in `whole` (1 to
 * 4) planes, lowest first, and 4 bits above them two in a byte in halves, unless that is NULL. 0, or
 * FFS_ERANGE. */
int ffs_unpack(const uint8_t *planes, int64_t whole, const uint8_t *halves, int64_t count,
               int64_t start, int64_t stop, int64_t low, int64_t *numbers);

/* In which part of an epoch each of the samples low to low + size comes. */
typedef struct { const uint8_t *buckets; int64_t size, low; } ffs_table;

/* The parts of n samples, 0 for those outside. found[3]: the lowest and the highest of these, and
 * the last sample that is in the highest. */
void ffs_buckets(const ffs_table *t, const int64_t *numbers, int64_t n, uint8_t *buckets,
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

/* ---- reading ----------------------------------------------------------------------------- */
/* One record inside an extent. */
typedef struct {
    uint64_t offset;      /* of the payload in the file */
    uint64_t length;
    uint64_t entry;       /* directory entry to publish, or UINT64_MAX */
    uint8_t *dest;        /* copy the payload there, or NULL; bytes are of use only if status is 0.
                           * Of a read that bounces and has an entry: in the arena, where nobody
                           * reads yet */
    uint32_t checksum;    /* expected */
    uint32_t found;       /* out: what was computed, when verified */
    int32_t status;       /* out: 0, -errno, FFS_ECHECKSUM, FFS_ETRUNCATED */
    uint32_t reserved;
} ffs_record;

/* One read of one extent, into a slot of the arena or through a bounce buffer of the engine. */
typedef struct {
    uint64_t offset;      /* extent in the file, covers its records; the engine widens it to the */
    uint64_t length;      /*   file's alignment on both sides */
    uint64_t slot;        /* byte offset in the arena, or UINT64_MAX: bounce (then dest is needed) */
    uint64_t slot_size;   /* room there; must hold the widened extent */
    int32_t file;         /* from ffs_file_add */
    int32_t checksum_kind;
    uint32_t first_record, record_count;
} ffs_read;

typedef struct ffs_engine ffs_engine;

/* A batch of reads, filled by the caller, owned by the engine from submit until it is done.
 * `done` is 1 once every read has ended; results stand in records[].status. */
typedef struct {
    ffs_read *reads; ffs_record *records;
    uint32_t read_count, record_count;
    uint32_t failed;      /* out: records whose status is not 0 */
    uint32_t done;        /* out */
    uint64_t tag;         /* the caller's */
    uint64_t bytes;       /* out: bytes read from files, over-read included */
} ffs_batch;              /* the library's own fields follow behind these */

/* ---- answers that the I/O thread sends (answers.c) ----------------------------------------
 * A client's socket. The descriptor stays the caller's, who holds the line before he closes it. */
typedef struct ffs_line ffs_line;
ffs_line *ffs_line_new(int fd);               /* NULL: no memory */
void ffs_line_hold(ffs_line *line, int held); /* while held nothing is sent; 0: not any more */
void ffs_line_free(ffs_line *line);

/* A frame to be sent when `left` batches have ended and no record of theirs has failed. It and its
 * line must outlive these batches. */
typedef struct {
    ffs_line *line;
    uint32_t left;        /* 1 more than the batches until ffs_answer_settle */
    uint32_t failed, sent;
    uint32_t size;        /* of the frame */
    uint8_t frame[24];
} ffs_answer;

/* Before it is submitted: the answer waits for this batch; NULL: for something that never ends. */
void ffs_batch_answer(ffs_batch *b, ffs_answer *a);
/* It waits for no further batch. */
uint32_t ffs_answer_settle(ffs_answer *a);

#define FFS_ENGINE_URING 1
#define FFS_ENGINE_AIO 2
#define FFS_ENGINE_THREADS 3
#define FFS_ENGINE_REGISTERED 4  /* io_uring with registered buffers */

typedef struct {
    uint64_t reads, bytes, short_reads, errors, checksum_errors, wakeups, submits;
    uint64_t fixed;       /* reads issued into registered buffers */
    uint64_t registered;  /* bytes of memory that are registered now */
    uint32_t inflight, queued;
} ffs_counters;

/* Which kinds this build contains: bit 1 << kind. */
int ffs_built(void);
const char *ffs_checksum_library(void);

/* Start an engine. depth: reads in flight; threads: for FFS_ENGINE_THREADS. 0 or -errno. */
int ffs_engine_open(ffs_engine **out, int kind, uint32_t depth, uint32_t threads);
/* The arena and directory that slots and entries refer to; before the first submit. */
void ffs_engine_set_arena(ffs_engine *e, uint8_t *arena, uint64_t size, ffs_entry *entries,
                          uint64_t entry_count);
/* Bytes [0, size) of the arena have the pages that they will keep, so an engine that registers may
 * do so. A lower size than before takes that back: no read submitted afterwards relies on it, so
 * the pages above it may change once no read is on its way there. Nothing for other kinds. */
void ffs_engine_arena_ready(ffs_engine *e, uint64_t size, uint64_t end);
/* Add a file: alignment = logical block for offset and length (1 when buffered). The engine never
 * closes the descriptor. Returns an id >= 0 or -errno. */
int ffs_file_add(ffs_engine *e, int fd, uint32_t alignment);
void ffs_file_remove(ffs_engine *e, int id);  /* only when no read of it is queued or in flight */
/* What direct I/O asks of a file (statx, Linux 6.1): alignment of memory and of file offsets, both
 * 0 when the file cannot do it. 0, or -errno (-EOPNOTSUPP: the kernel does not tell). */
int ffs_dio_alignment(int fd, uint32_t *memory, uint32_t *offset);

ffs_batch *ffs_batch_new(uint32_t read_count, uint32_t record_count); /* zeroed; NULL: no memory */
void ffs_batch_free(ffs_batch *b);            /* never between submit and done */
/* A batch that reads blocks (columns of n) into slots at places[k], rooms[k] bytes large, with a
 * record for every sample; those that ffs_merge puts together are read at once, through a buffer and
 * from there to their slots. NULL: no memory, or a block or record that is not inside of what it is
 * part of. */
ffs_batch *ffs_batch_blocks(const ffs_shards *shards, const int64_t *blocks, int64_t n,
                            const int64_t *places, const int64_t *rooms, uint8_t *arena,
                            int64_t most, int64_t gap, int64_t size);
int ffs_submit(ffs_engine *e, ffs_batch *b);
/* Block until the batch is done or timeout_ms passed (-1: for ever): 1 done, 0 not yet. */
int ffs_wait(ffs_engine *e, ffs_batch *b, int64_t timeout_ms);
/* Batches submitted after ffs_engine_notify(e, 1) are queued on a done list when they end and the
 * descriptor becomes readable (one wake for many). Pop one, or NULL. */
int ffs_engine_notify(ffs_engine *e, int on); /* returns the eventfd, or -errno */
ffs_batch *ffs_engine_pop(ffs_engine *e);     /* NULL: it is readable no more, or once in vain */
void ffs_engine_counters(ffs_engine *e, ffs_counters *out);
/* 0, or -errno: it reads nothing any more, and where a read of it has failed the kernel may still
 * write. */
int ffs_engine_broken(ffs_engine *e);
/* Wait for what is in flight, fail what is queued with -ECANCELED, end the threads. The engine
 * stays valid: submits get -ESHUTDOWN, ended batches can still be waited for and popped. */
void ffs_engine_stop(ffs_engine *e);
/* Stop, then free all. In a child of the process that opened the engine: forget. */
void ffs_engine_close(ffs_engine *e);
/* After fork, in the child: drop the engine without touching threads that are not there. */
void ffs_engine_forget(ffs_engine *e);
/* ---- samples through a socket (sending.c) -------------------------------------------------
 * What is to be sent: `head`, then pieces of the arena. */
typedef struct {
    int sock;             /* a Unix stream socket that does not block */
    int memory;           /* the arena's file */
    const uint8_t *arena; /* its mapping */
    const uint8_t *head;
    int64_t head_size;
    const int64_t *starts, *lengths; /* of the pieces, in bytes */
    int64_t count;
    int64_t refer_from;   /* pieces of so many bytes and more go by reference; 0: none */
} ffs_sending;
/* Send, from the byte `done` of it all on, until everything went or the socket is full. Returns how many
 * bytes went, or -errno when none did (-EAGAIN: full). */
int64_t ffs_send(const ffs_sending *s, int64_t done);
/* Bytes that were sent and that the other side has not read, or more; 0: it has read all, or is gone. */
int64_t ffs_unread(int sock);
/* end cdef */

/* memcpy, in a process where others may write to `from` meanwhile. next, next_size: what will be
 * copied afterwards, asked for from memory ahead; never read, so it may be anything. */
void ffs_copy(uint8_t *to, const uint8_t *from, uint64_t size, const uint8_t *next,
              uint64_t next_size);
#endif
