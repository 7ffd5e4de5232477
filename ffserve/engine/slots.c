/* The cache's tables of slots: what is per sample when a request is planned. What stays and what
 * goes is decided elsewhere (ffserve/cache).
 *
 * Numbers of samples and slots are held against the tables before anything is written. A mark that
 * one call leaves in a table (SEEN in a state, MARK in slot_of) is gone when it returns.
 */
#include <stdbool.h>

#include "plan.h"

#define SEEN 0x80
#define MARK -1

enum { FIRST, COUNT, BEGIN, END, SIZE, SHARD };

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

int64_t ffs_slots_cut(const ffs_slots *s, int64_t *blocks, int64_t *where, int64_t n,
                      int64_t most, int64_t *cut)
{
    if (!inside(blocks + FIRST * n, n, s->sample_count))
        return FFS_ERANGE;
    int64_t kept = 0, bytes = 0;
    bool whole = true;
    *cut = -1;
    for (int64_t k = 0; k < n; k++) {
        int64_t first = blocks[FIRST * n + k], size = blocks[SIZE * n + k];
        if (s->slot_of[first] == MARK)
            continue;
        if (s->slot_of[first]) {
            whole = false;
            break;
        }
        if (size > most - bytes && (kept || where[k])) {
            *cut = where[k];
            break;
        }
        bytes += size;
        s->slot_of[first] = MARK;
        if (kept < k) {
            for (int row = 0; row < FFS_BLOCK_ROWS; row++)
                blocks[row * n + kept] = blocks[row * n + k];
            where[kept] = where[k];
        }
        kept++;
    }
    for (int64_t k = 0; k < kept; k++)
        s->slot_of[blocks[FIRST * n + k]] = 0;
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
    int64_t failed = 0;
    if (!inside(slots, n, s->slot_count))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        if (s->pins[slots[k]] <= 0)
            return FFS_ERANGE;
        failed += --s->pins[slots[k]] == 0 && s->states[slots[k]] == FFS_SLOT_FAILED;
    }
    return failed;
}

int64_t ffs_slots_enter(const ffs_slots *s, const int64_t *blocks, const int64_t *slots,
                        int64_t n, int32_t load, int64_t *offsets, int64_t *sizes)
{
    int64_t bytes = 0;
    if (!inside(slots, n, s->slot_count))
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

int ffs_slots_contents(const ffs_slots *s, const int64_t *slots, int64_t n, int64_t *tables)
{
    if (!inside(slots, n, s->slot_count))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        tables[k] = s->firsts[slots[k]];
        tables[n + k] = s->counts[slots[k]];
        tables[2 * n + k] = s->offsets[slots[k]];
        tables[3 * n + k] = s->sizes[slots[k]];
    }
    return 0;
}

int ffs_slots_usable(const ffs_slots *s, const int64_t *slots, int64_t n, uint8_t *usable)
{
    if (!inside(slots, n, s->slot_count))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++)
        usable[k] = s->states[slots[k]] == FFS_SLOT_RESIDENT && !s->pins[slots[k]];
    return 0;
}

int ffs_slots_vacate(const ffs_slots *s, const int64_t *slots, int64_t n)
{
    if (!inside(slots, n, s->slot_count))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        int64_t first = s->firsts[slots[k]], count = s->counts[slots[k]];
        if (first < 0 || count < 0 || count > s->sample_count - first)
            return FFS_ERANGE;
        for (int64_t i = first; i < first + count; i++)
            if (s->slot_of[i] == slots[k] + 1)
                s->slot_of[i] = 0;
        s->states[slots[k]] = FFS_SLOT_FREE;
    }
    return 0;
}

int ffs_mark(uint8_t *seen, int64_t size, const int64_t *numbers, int64_t n, int64_t low,
             int64_t *found)
{
    found[0] = found[1] = 0;
    for (int64_t k = 0; k < n; k++)
        if (numbers[k] < low || numbers[k] - low >= size)
            return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        uint8_t *mark = &seen[numbers[k] - low];
        if (*mark & SEEN)
            continue;
        found[*mark != 0]++;
        *mark |= SEEN;
    }
    for (int64_t k = 0; k < n; k++)
        seen[numbers[k] - low] = 1;
    return 0;
}
