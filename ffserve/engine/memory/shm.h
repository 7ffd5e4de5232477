/* Shared memory: the seqlocked directory, and copying samples out of the arena.
 *
 * The daemon writes the directory and the arena; clients map both read-only and copy samples
 * without asking the daemon. shm.c explains why a torn copy is never accepted. Everything between
 * the cdef marks is also declared to Python (cffi).
 */
#ifndef FFSERVE_SHM_H
#define FFSERVE_SHM_H
#include <stddef.h>
#include <stdint.h>

/* cdef */
#define FFS_ESTALE -100003 /* a sample's length changed: look it up again */
#define FFS_ERANGE -100004 /* an index outside the view; an offset outside the arena */

/* One directory entry per sample.
 * seq: low bit set = readable. Every change of state adds 1.
 * place: low 48 bits = the payload's byte offset in the arena, high 16 bits = the high part of the
 * length. length = length_low | (place >> 48) << 32; all 48 bits set = not known yet. */
typedef struct {
    uint32_t seq;
    uint32_t length_low;
    uint64_t place;
} ffs_entry;

/* Samples [first, first + count) of a dataset, whose entries are adjacent and name places in one
 * arena. */
typedef struct {
    const ffs_entry *entries;
    uint64_t first;
    uint64_t count;
    const uint8_t *arena;
} ffs_segment;

/* How long it took to copy whole batches. Threads may count at the same time; a lost count does no
 * harm. calls: one in FFS_TIMED is timed. counts: below 1, 2, 4, ... us; the last: all others. */
#define FFS_TIMED 8
#define FFS_DURATIONS 25
typedef struct {
    uint64_t calls;
    uint64_t sum_ns;
    uint64_t counts[25];
} ffs_times;

/* What a client needs to copy samples. segments: in rising order of `first`, from 0, no gaps.
 * arena_size: of each arena. lowest: the arena at the lowest address. times: NULL: nothing is
 * timed. */
typedef struct {
    const uint8_t *lowest;
    uint64_t arena_size;
    const ffs_segment *segments;
    uint64_t segment_count;
    ffs_times *times;
} ffs_view;

/* ---- client side ------------------------------------------------------------------------- */
/* Look n indices up. offsets[n + 1] gets the running sum of the lengths, an unknown one counted as
 * 0; missing[] (or NULL) the positions (0..n-1) that are not readable now; *unknown the number of
 * unknown lengths. Returns the number of missing samples, or FFS_ERANGE when an index is outside
 * the view (*bad gets its position) or the sum exceeds INT64_MAX (*bad gets -1). */
int64_t ffs_locate(const ffs_view *view, const int64_t *indices, int64_t n, int64_t *offsets,
                   int64_t *missing, int64_t *unknown, int64_t *bad);

/* Copy samples. For each k in positions[0..m) (NULL: 0..m-1), copy sample indices[k] to dests[k]
 * (dests NULL: to buffer + offsets[k]) if its entry is readable before and after and its length is
 * offsets[k + 1] - offsets[k]. left[] (or NULL) gets the positions that were not readable; it may be
 * the same array as positions. Returns their number, FFS_ESTALE when a length differs, or
 * FFS_ERANGE when an entry points outside the arena. */
int64_t ffs_gather(const ffs_view *view, const int64_t *indices, const int64_t *offsets,
                   uint8_t *buffer, uint8_t *const *dests, const int64_t *positions, int64_t m,
                   int64_t *left);

/* ffs_locate and ffs_gather in one call, for a batch whose samples are all readable. Returns 0:
 * copied to buffer, one sample directly after the other; 1: not copied, because the batch takes less
 * than `least` or more than `room` bytes; FFS_ESTALE: not every sample could be read; FFS_ERANGE as
 * above. found[2n + 3] gets n + 1 offsets, and with 1 and FFS_ESTALE also what ffs_locate finds: n
 * places for missing positions, their number, the number of unknown lengths. Unless it returns 0
 * the buffer may hold anything. at_once: copy while looking samples up, which is faster if the
 * batch fits and slower if it does not. */
int ffs_copy_batch(const ffs_view *view, const int64_t *indices, int64_t n, int64_t *found,
                   uint8_t *buffer, uint64_t least, uint64_t room, int at_once);

/* Limit the width of the vectors that samples are copied by (64, 32; 0: memcpy); for tests.
 * Returns the width that this processor then uses. */
int ffs_copy_width(int most);

/* For reading in place samples that the caller has leased: places[k], counted from the lowest
 * arena, or UINT64_MAX when not readable. Returns how many were not readable, or FFS_ERANGE. */
int64_t ffs_places(const ffs_view *view, const int64_t *indices, int64_t n, uint64_t *places);

/* ---- daemon side ------------------------------------------------------------------------- */
/* For each k < m make those entries of [firsts[k], firsts[k] + counts[k]) unreadable whose payload
 * is inside [slots[k], slots[k] + sizes[k]). A full fence follows. */
void ffs_retract(ffs_entry *entries, const int64_t *firsts, const int64_t *counts,
                 const uint64_t *slots, const uint64_t *sizes, int64_t m);

/* Make a sample readable whose bytes are in the arena. */
void ffs_publish(ffs_entry *entry, uint64_t offset, uint64_t length);

/* Make the n samples of a block readable: entries [first, first + n), payload k at
 * base + starts[k]. */
void ffs_publish_run(ffs_entry *entries, uint64_t first, int64_t n, uint64_t base,
                     const int64_t *starts, const int64_t *lengths);

/* ---- both sides -------------------------------------------------------------------------- */
/* A word that two processes share. Setting it releases, getting it acquires: a process that gets a
 * value sees everything the other one wrote before setting it. */
void ffs_flag_set(uint32_t *flag, uint32_t value);
uint32_t ffs_flag_get(const uint32_t *flag);

/* Have malloc take blocks of less than `block` bytes (32 MiB at most) from its heap, and keep up to
 * `total` bytes of that when they are free. With glibc; other allocators have their own ways. */
void ffs_keep_freed_memory(uint64_t block, uint64_t total);
/* end cdef */
#endif
