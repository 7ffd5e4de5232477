/* From samples to blocks (what is read, verified and evicted together), and from blocks to the
 * batch that reads them. See ffserve/cache/tables.py for what a block is. */
#include <stdbool.h>
#include <stdlib.h>

#include "plan.h"

#define FEW 256 /* blocks: a turn of the scheduler */

enum { FIRST, COUNT, BEGIN, END, SIZE, SHARD };

/* The last shard that begins at or before a sample, -1 for none; neighbours mostly share one. */
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

/* Wraps around, as nobody may rely on what a file says: whoever reads it checks it. */
static int64_t end_of(const ffs_shards *s, int64_t number)
{
    return (int64_t)(s->offsets[number] + (uint64_t)length_of(s, number));
}

static int64_t widened(int64_t begin, int64_t end, int64_t alignment)
{
    uint64_t mask = (uint64_t)alignment - 1;
    return (int64_t)((((uint64_t)end + mask) & ~mask) - ((uint64_t)begin & ~mask));
}

int ffs_blocks(const ffs_shards *s, const int64_t *numbers, int64_t n, int64_t largest,
               int64_t *blocks)
{
    int64_t shard = -1;
    for (int64_t k = 0; k < n; k++) {
        int64_t number = numbers[k];
        shard = shard_of(s, number, shard);
        if (shard < 0 || number - s->bases[shard] >= s->counts[shard] ||
            number >= s->sample_count)
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
        blocks[SIZE * n + k] = widened(begin, end, s->alignments[shard]);
        blocks[SHARD * n + k] = shard;
    }
    return 0;
}

int ffs_shards_count(const ffs_shards *s, const int64_t *numbers, const int64_t *sizes, int64_t n,
                     int64_t sign)
{
    int64_t shard = -1;
    for (int64_t k = 0; k < n; k++) {
        shard = shard_of(s, numbers[k], shard);
        if (shard < 0 || numbers[k] - s->bases[shard] >= s->counts[shard])
            return FFS_ERANGE;
        s->used[shard] += sign * sizes[k];
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
        /* As unsigned numbers those that overlap are far apart. */
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

/* The records of one block; false: one is not inside of it. */
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

/* firsts: of each read the first block. */
static ffs_batch *batch_of(const ffs_shards *s, const int64_t *blocks, int64_t n,
                           const int64_t *places, const int64_t *rooms, uint8_t *arena,
                           const int64_t *firsts, int64_t reads)
{
    int64_t total = 0;
    for (int64_t k = 0; k < n; k++) {
        int64_t first = blocks[FIRST * n + k], count = blocks[COUNT * n + k];
        int64_t shard = blocks[SHARD * n + k];
        if (shard < 0 || shard >= s->shard_count || first < 0 || count < 1 ||
            count > s->sample_count - first || places[k] < 0 || rooms[k] < 0)
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
        bool alone = high - low == 1;
        int64_t shard = blocks[SHARD * n + low];
        ffs_read *read = &b->reads[r];
        read->offset = (uint64_t)blocks[BEGIN * n + low];
        read->length = (uint64_t)blocks[END * n + high - 1] - read->offset;
        read->slot = alone ? (uint64_t)places[low] : UINT64_MAX;
        read->slot_size = (uint64_t)rooms[low];
        read->file = s->files[shard];
        read->checksum_kind = s->kinds[shard];
        read->first_record = record;
        for (int64_t k = low; k < high; k++) {
            uint8_t *slot = alone ? NULL : arena + places[k];
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
                            const int64_t *places, const int64_t *rooms, uint8_t *arena,
                            int64_t most, int64_t gap, int64_t size)
{
    int64_t few[FEW], *firsts = n > FEW ? malloc((size_t)n * sizeof *firsts) : few;
    if (!firsts)
        return NULL;
    int64_t reads = ffs_merge(blocks + BEGIN * n, blocks + END * n, blocks + SHARD * n, n, most,
                              gap, size, firsts);
    ffs_batch *b = batch_of(s, blocks, n, places, rooms, arena, firsts, reads);
    if (firsts != few)
        free(firsts);
    return b;
}
