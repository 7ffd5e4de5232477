/* Slots: from samples to blocks (what is read, verified and evicted together), from blocks
 * to the batch that reads them, and the cache's tables of slots. The decisions are made in
 * ffserve/cache; see tables.py there for what a block is.
 *
 * Numbers of samples and slots are checked against the tables before anything is written. A mark
 * that one call leaves in a table (SEEN in a state, MARK in slot_of) is gone when it returns.
 */
#include <stdbool.h>
#include <stdlib.h>

#include "slots.h"

#define SEEN 0x80
#define MARK -1
#define FEW 256 /* blocks: a turn of the scheduler */
#define PACKED_PART 32
#define MEMORY_ALIGNMENT                                                                           \
    512 /* that direct I/O needs on every common device (statx: dio_mem_align) */

/* Rows of a table of blocks. */
enum { FIRST, COUNT, BEGIN, END, SIZE, SHARD };

/* ---- blocks ------------------------------------------------------------------------------ */

/* Return the last shard that begins at or before a sample, -1 for none; neighbours mostly share one. */
static int64_t shard_of(const ffs_shards *s, int64_t number, int64_t hint)
{
    if (hint >= 0 && number >= s->bases[hint] &&
        (hint + 1 == s->shard_count || number < s->bases[hint + 1]))
        return hint;
    int64_t low = 0, high = s->shard_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (s->bases[middle] <= number)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1;
}

static bool is_alone(const ffs_shards *s, int64_t first)
{
    int64_t low = 0, high = s->singly_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (s->singly[middle] < first)
            low = middle + 1;
        else
            high = middle;
    }
    return low < s->singly_count && s->singly[low] == first;
}

static int64_t length_of(const ffs_shards *s, int64_t number)
{
    const ffs_entry *entry = &s->entries[number];
    return (int64_t)((uint64_t)entry->length_low | entry->place >> 48 << 32);
}

/* Wraps around: the file's tables are not trusted, and add_records checks the result. */
static int64_t end_of(const ffs_shards *s, int64_t number)
{
    return (int64_t)(s->offsets[number] + (uint64_t)length_of(s, number));
}

static int64_t widened(int64_t begin, int64_t end, int64_t alignment)
{
    uint64_t mask = (uint64_t)alignment - 1;
    return (int64_t)((((uint64_t)end + mask) & ~mask) - ((uint64_t)begin & ~mask));
}

/* Bytes of memory for an extent: those that a direct read brings, unless more than 1 part in
 * PACKED_PART of them would hold nothing. Then the bytes are copied, and only the extent is kept. */
static int64_t room_of(int64_t begin, int64_t end, int64_t alignment)
{
    int64_t exact = (int64_t)((uint64_t)end - (uint64_t)begin);
    int64_t whole = widened(begin, end, alignment);
    return (uint64_t)whole - (uint64_t)exact > (uint64_t)whole / PACKED_PART ? exact : whole;
}

int ffs_blocks(const ffs_shards *s, const int64_t *numbers, int64_t n, int64_t largest,
               int64_t *blocks)
{
    int64_t shard = -1;
    for (int64_t k = 0; k < n; k++) {
        int64_t number = numbers[k];
        shard = shard_of(s, number, shard);
        if (shard < 0 || number - s->bases[shard] >= s->counts[shard] || number >= s->sample_count)
            return FFS_ERANGE;
        int64_t base = s->bases[shard], shift = s->shifts[shard];
        int64_t first = base + ((number - base) >> shift << shift);
        int64_t stop = first + ((int64_t)1 << shift);
        if (stop > base + s->counts[shard])
            stop = base + s->counts[shard];
        if (shift && s->singly_count && is_alone(s, first)) {
            first = number;
            stop = number + 1;
        }
        int64_t begin = (int64_t)s->offsets[first], end = end_of(s, stop - 1);
        if (stop - first > 1 && (uint64_t)end - (uint64_t)begin > (uint64_t)largest) {
            first = number;
            stop = number + 1;
            begin = (int64_t)s->offsets[first];
            end = end_of(s, number);
        }
        blocks[FIRST * n + k] = first;
        blocks[COUNT * n + k] = stop - first;
        blocks[BEGIN * n + k] = begin;
        blocks[END * n + k] = end;
        blocks[SIZE * n + k] = room_of(begin, end, s->alignments[shard]);
        blocks[SHARD * n + k] = shard;
    }
    return 0;
}

static int64_t minus(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a - (uint64_t)b);
}

int64_t ffs_merge(const int64_t *begins, const int64_t *ends, const int64_t *files, int64_t n,
                  int64_t most, int64_t gap, int64_t size, int64_t *firsts)
{
    int64_t reads = 0, start = 0, piece = 0;
    for (int64_t k = 0; k < n; k++) {
        /* As unsigned numbers, extents that overlap are far apart. */
        bool joined = k && (uint64_t)begins[k] - (uint64_t)ends[k - 1] <= (uint64_t)gap &&
                      files[k] == files[k - 1] && minus(ends[k], begins[k]) <= most &&
                      minus(ends[k - 1], begins[k - 1]) <= most;
        if (!joined)
            start = begins[k];
        int64_t at = minus(begins[k], start) / size;
        if (!joined || at != piece)
            firsts[reads++] = k;
        piece = at;
    }
    return reads;
}

/* The records of one block; false: one exceeds it. */
static bool add_records(const ffs_shards *s, const int64_t *blocks, int64_t n, int64_t k,
                        uint8_t *slot, ffs_record *records)
{
    uint64_t begin = (uint64_t)blocks[BEGIN * n + k], end = (uint64_t)blocks[END * n + k];
    for (int64_t i = 0; i < blocks[COUNT * n + k]; i++) {
        int64_t number = blocks[FIRST * n + k] + i;
        ffs_record *r = &records[i];
        r->offset = s->offsets[number];
        r->length = (uint64_t)length_of(s, number);
        if (r->offset < begin || r->offset > end || r->length > end - r->offset)
            return false;
        r->entry = (uint64_t)number;
        r->checksum = s->checksums[number];
        r->dest = slot ? slot + (r->offset - begin) : NULL;
    }
    return true;
}

/* Whether a direct read of block k fits into its slot. */
static bool takes_direct(const ffs_shards *s, const int64_t *blocks, int64_t n, int64_t k,
                         const int64_t *offsets, const int64_t *sizes)
{
    int64_t alignment = s->alignments[blocks[SHARD * n + k]];
    return alignment == 1 ||
           (widened(blocks[BEGIN * n + k], blocks[END * n + k], alignment) <= sizes[k] &&
            offsets[k] % MEMORY_ALIGNMENT == 0);
}

/* firsts: the first block of each read. */
static ffs_batch *batch_of(const ffs_shards *s, const int64_t *blocks, int64_t n,
                           const int64_t *offsets, const int64_t *sizes, uint8_t *arena,
                           const int64_t *firsts, int64_t reads, bool cached)
{
    int64_t total = 0;
    for (int64_t k = 0; k < n; k++) {
        int64_t first = blocks[FIRST * n + k], count = blocks[COUNT * n + k];
        int64_t shard = blocks[SHARD * n + k];
        if (shard < 0 || shard >= s->shard_count || first < 0 || count < 1 ||
            count > s->sample_count - first || offsets[k] < 0 || sizes[k] < 0)
            return NULL;
        total += count;
    }
    if (total > UINT32_MAX)
        return NULL;
    ffs_batch *b = ffs_batch_new((uint32_t)reads, (uint32_t)total);
    if (!b)
        return NULL;
    uint32_t record = 0;
    for (int64_t r = 0; r < reads; r++) {
        int64_t low = firsts[r], high = r + 1 < reads ? firsts[r + 1] : n;
        int64_t shard = blocks[SHARD * n + low];
        bool direct = high - low == 1 &&
                      (cached || takes_direct(s, blocks, n, low, offsets, sizes));
        ffs_read *read = &b->reads[r];
        read->offset = (uint64_t)blocks[BEGIN * n + low];
        read->length = (uint64_t)blocks[END * n + high - 1] - read->offset;
        read->slot = direct ? (uint64_t)offsets[low] : UINT64_MAX;
        read->slot_size = (uint64_t)sizes[low];
        read->file = s->files[shard];
        read->checksum_kind = s->kinds[shard];
        read->first_record = record;
        for (int64_t k = low; k < high; k++) {
            uint8_t *slot = direct ? NULL : arena + offsets[k];
            if (!add_records(s, blocks, n, k, slot, &b->records[record])) {
                ffs_batch_free(b);
                return NULL;
            }
            record += (uint32_t)blocks[COUNT * n + k];
        }
        read->record_count = record - read->first_record;
    }
    return b;
}

ffs_batch *ffs_batch_blocks(const ffs_shards *s, const int64_t *blocks, int64_t n,
                            const int64_t *offsets, const int64_t *sizes, uint8_t *arena,
                            int64_t most, int64_t gap, int64_t size, int cached)
{
    int64_t few[FEW], *firsts = n > FEW ? malloc((size_t)n * sizeof *firsts) : few;
    if (!firsts)
        return NULL;
    int64_t reads = ffs_merge(blocks + BEGIN * n, blocks + END * n, blocks + SHARD * n, n, most,
                              gap, size, firsts);
    ffs_batch *b = batch_of(s, blocks, n, offsets, sizes, arena, firsts, reads, cached != 0);
    if (firsts != few)
        free(firsts);
    return b;
}

/* ---- slots ------------------------------------------------------------------------------- */

static bool inside(const int64_t *values, int64_t n, int64_t count)
{
    for (int64_t k = 0; k < n; k++)
        if ((uint64_t)values[k] >= (uint64_t)count)
            return false;
    return true;
}

int ffs_slots_split(const ffs_slots *s, const int64_t *numbers, int64_t n, int64_t most,
                    int64_t *absent, int64_t *slots, int64_t *positions, int64_t *found)
{
    int64_t missing = 0, held = 0, bytes = 0, k = 0;
    bool whole = inside(numbers, n, s->sample_count);
    for (; whole && k < n; k++) {
        int64_t slot = (int64_t)s->slot_of[numbers[k]] - 1;
        if (slot < 0) {
            absent[missing++] = k;
            continue;
        }
        if (slot >= s->slot_count) {
            whole = false;
            break;
        }
        if (s->states[slot] & SEEN)
            continue;
        bytes += s->sizes[slot];
        if (bytes > most && k)
            break;
        s->states[slot] |= SEEN;
        slots[held] = slot;
        positions[held++] = k;
    }
    for (int64_t i = 0; i < held; i++)
        s->states[slots[i]] &= (uint8_t)~SEEN;
    found[0] = k;
    found[1] = missing;
    found[2] = held;
    return whole ? 0 : FFS_ERANGE;
}

int64_t ffs_slots_cut(const ffs_slots *s, int64_t *blocks, int64_t *positions, int64_t n,
                      int64_t most, int64_t *found)
{
    if (!inside(blocks + FIRST * n, n, s->sample_count))
        return FFS_ERANGE;
    int64_t kept = 0, bytes = 0, smallest = INT64_MAX, largest = 0;
    bool whole = true;
    found[0] = -1;
    for (int64_t k = 0; k < n; k++) {
        int64_t first = blocks[FIRST * n + k], size = blocks[SIZE * n + k];
        if (s->slot_of[first] == MARK)
            continue;
        if (s->slot_of[first]) {
            whole = false;
            break;
        }
        if (size > most - bytes && (kept || positions[k])) {
            found[0] = positions[k];
            break;
        }
        bytes += size;
        smallest = size < smallest ? size : smallest;
        largest = size > largest ? size : largest;
        s->slot_of[first] = MARK;
        if (kept < k) {
            for (int row = 0; row < FFS_BLOCK_ROWS; row++)
                blocks[row * n + kept] = blocks[row * n + k];
            positions[kept] = positions[k];
        }
        kept++;
    }
    for (int64_t k = 0; k < kept; k++)
        s->slot_of[blocks[FIRST * n + k]] = 0;
    found[1] = smallest;
    found[2] = largest;
    return whole ? kept : FFS_ERANGE;
}

int64_t ffs_slots_pin(const ffs_slots *s, const int64_t *slots, int64_t n, int64_t *loading,
                      int64_t *bytes)
{
    int64_t count = 0;
    *bytes = 0;
    if (!inside(slots, n, s->slot_count))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        s->pins[slots[k]]++;
        *bytes += s->sizes[slots[k]];
        if (s->states[slots[k]] == FFS_SLOT_LOADING)
            loading[count++] = slots[k];
    }
    return count;
}

int64_t ffs_slots_unpin(const ffs_slots *s, const int64_t *slots, int64_t n)
{
    int64_t concerned = 0;
    if (!inside(slots, n, s->slot_count))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        if (s->pins[slots[k]] <= 0)
            return FFS_ERANGE;
        concerned += --s->pins[slots[k]] == 0 &&
                     (s->states[slots[k]] == FFS_SLOT_FAILED || s->parked[slots[k]]);
    }
    return concerned;
}

int64_t ffs_slots_enter(const ffs_slots *s, const ffs_shards *shards, const int64_t *blocks,
                        const int64_t *slots, int64_t n, int32_t load, int64_t *offsets,
                        int64_t *sizes, int64_t *read_size)
{
    int64_t bytes = 0;
    *read_size = 0;
    if (!inside(slots, n, s->slot_count) || !inside(blocks + SHARD * n, n, shards->shard_count))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        int64_t slot = slots[k], first = blocks[FIRST * n + k], count = blocks[COUNT * n + k];
        if (first < 0 || count < 1 || count > INT32_MAX || count > s->sample_count - first ||
            s->pins[slot])
            return FFS_ERANGE;
        for (int64_t i = first; i < first + count; i++) {
            if (s->slot_of[i])
                return FFS_ERANGE;
            s->slot_of[i] = (int32_t)slot + 1;
        }
        s->firsts[slot] = first;
        s->counts[slot] = (int32_t)count;
        s->loads[slot] = load;
        s->states[slot] = FFS_SLOT_LOADING;
        s->pins[slot]++;
        offsets[k] = s->offsets[slot];
        sizes[k] = s->sizes[slot];
        bytes += sizes[k];
        int64_t shard = blocks[SHARD * n + k];
        *read_size += widened(blocks[BEGIN * n + k], blocks[END * n + k],
                              shards->alignments[shard]);
        shards->used[shard] += sizes[k];
    }
    return bytes;
}

int64_t ffs_slots_of(const ffs_slots *s, const int64_t *numbers, int64_t n, int state,
                     int64_t *slots)
{
    int64_t count = 0;
    if (!inside(numbers, n, s->sample_count))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        int64_t slot = (int64_t)s->slot_of[numbers[k]] - 1;
        if (slot >= s->slot_count)
            return FFS_ERANGE;
        if (slot >= 0 && (state < 0 || s->states[slot] == state))
            slots[count++] = slot;
    }
    return count;
}

int ffs_slots_usable(const ffs_slots *s, const int64_t *slots, int64_t n, uint8_t *usable)
{
    if (!inside(slots, n, s->slot_count))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++)
        usable[k] = s->states[slots[k]] == FFS_SLOT_RESIDENT && !s->pins[slots[k]];
    return 0;
}

int ffs_slots_vacate(const ffs_slots *s, const ffs_shards *shards, const int64_t *slots, int64_t n,
                     int64_t *contents)
{
    int64_t shard = -1;
    if (!inside(slots, n, s->slot_count))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        int64_t slot = slots[k], first = s->firsts[slot], count = s->counts[slot];
        if (first < 0 || count < 0 || count > s->sample_count - first)
            return FFS_ERANGE;
        shard = shard_of(shards, first, shard);
        if (shard < 0 || first - shards->bases[shard] >= shards->counts[shard])
            return FFS_ERANGE;
        for (int64_t i = first; i < first + count; i++)
            if (s->slot_of[i] == slot + 1)
                s->slot_of[i] = 0;
        s->states[slot] = FFS_SLOT_FREE;
        shards->used[shard] -= s->sizes[slot];
        contents[k] = first;
        contents[n + k] = count;
        contents[2 * n + k] = s->offsets[slot];
        contents[3 * n + k] = s->sizes[slot];
    }
    return 0;
}

/* ---- what a predecessor left --------------------------------------------------------------- */

/* Bytes [begin, end) of the arena, and the slot that they are. */
typedef struct {
    int64_t slot;
    uint64_t begin, end;
} place;

static const place nowhere = {-1, 0, 0};

/* The slot that begins at or before an offset, in a run of slabs of this domain. */
static place slot_at(const ffs_slots *s, const ffs_slabs *slabs, uint64_t offset, int32_t domain)
{
    uint64_t slab = offset / (uint64_t)slabs->slab_size;
    if (slab >= (uint64_t)slabs->slab_count)
        return nowhere;
    int64_t head = slabs->heads[slab];
    if (head < 0 || (uint64_t)head > slab || slabs->domains[head] != domain)
        return nowhere;
    uint64_t start = (uint64_t)(head * slabs->slab_size), size = (uint64_t)slabs->sizes[head];
    uint64_t k = (offset - start) / size;
    if (k >= (uint64_t)(slabs->runs[head] * slabs->slab_size) / size)
        return nowhere;
    int64_t slot = head * slabs->slots_per_slab + (int64_t)k;
    return slot < s->slot_count ? (place){slot, start + k * size, start + (k + 1) * size} : nowhere;
}

static bool holds(place at, uint64_t offset, uint64_t length)
{
    return at.slot >= 0 && offset >= at.begin && offset <= at.end && length <= at.end - offset;
}

/* Whether sample i can be in a slot, beside those that were found there before. */
static bool take(const ffs_slots *s, int64_t slot, int64_t i)
{
    if (s->states[slot] == FFS_SLOT_FREE) {
        s->states[slot] = FFS_SLOT_RESIDENT;
        s->firsts[slot] = i;
        s->counts[slot] = 0;
    } else if (s->states[slot] == FFS_SLOT_RESIDENT && s->firsts[slot] + s->counts[slot] != i) {
        s->states[slot] = FFS_SLOT_FAILED;
    }
    if (s->states[slot] != FFS_SLOT_RESIDENT || s->counts[slot] == INT32_MAX)
        return false;
    s->counts[slot]++;
    return true;
}

int64_t ffs_slots_adopt(const ffs_slots *s, ffs_entry *entries, const ffs_slabs *slabs,
                        int64_t first, int64_t count, int64_t shift, int32_t domain)
{
    int64_t found = 0, mask = ((int64_t)1 << shift) - 1;
    place at = nowhere;
    if (first < 0 || count < 0 || count > s->sample_count - first)
        return FFS_ERANGE;
    for (int64_t i = first; i < first + count; i++) {
        ffs_entry *entry = &entries[i];
        if (((i - first) & mask) == 0)
            at = nowhere;
        uint32_t seq = __atomic_load_n(&entry->seq, __ATOMIC_RELAXED);
        if (!(seq & 1))
            continue;
        uint64_t offset = entry->place & (((uint64_t)1 << 48) - 1);
        uint64_t length = entry->length_low | entry->place >> 48 << 32;
        /* An empty sample at the end of its slot has the offset of the next slot. */
        if (!holds(at, offset, length))
            at = slot_at(s, slabs, offset, domain);
        if (holds(at, offset, length) && take(s, at.slot, i)) {
            s->slot_of[i] = (int32_t)at.slot + 1;
            found++;
        } else {
            __atomic_store_n(&entry->seq, seq + 1, __ATOMIC_RELAXED);
        }
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return found;
}
