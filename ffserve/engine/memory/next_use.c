/* Next use: the policy's tables of resident slots, and when samples will be wanted. The decisions are
 * made in ffserve/cache/policy.py and next_use_buckets.py.
 *
 * Slots are checked against the tables before anything is written.
 */
#include <math.h>
#include <stdbool.h>

#include "slots.h"

#define AHEAD 16       /* slots whose rows are prefetched while others are examined */
#define MOST_KEYS 2048 /* consecutive keys that are sorted by counting */
#define SEEN 0x80

static int64_t class_of(const ffs_residents *r, int64_t slot)
{
    return r->classes[slot >> r->slab_shift];
}

static bool inside(const ffs_residents *r, const int64_t *slots, int64_t n)
{
    for (int64_t k = 0; k < n; k++)
        if ((uint64_t)slots[k] >= (uint64_t)r->slot_count)
            return false;
    return true;
}

static int64_t shared_group(const ffs_residents *r, const int64_t *slots, int64_t n)
{
    for (int64_t k = 1; k < n; k++)
        if (r->groups[slots[k]] != r->groups[slots[0]])
            return FFS_MIXED;
    return n ? r->groups[slots[0]] : FFS_MIXED;
}

int64_t ffs_residents_take(const ffs_residents *r, const int32_t *entries, int64_t n, int64_t key,
                           int64_t after, int64_t group, int64_t size_class, int64_t *slots)
{
    int64_t count = 0;
    for (int64_t k = 0; k < n; k++)
        if ((uint64_t)entries[k] >= (uint64_t)r->slot_count)
            return FFS_ERANGE;
    if (key == FFS_NO_KEY)
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        int64_t slot = entries[k];
        if (k + AHEAD < n) {
            __builtin_prefetch(&r->keys[entries[k + AHEAD]], 1);
            __builtin_prefetch(&r->groups[entries[k + AHEAD]]);
        }
        if (r->keys[slot] != key || r->groups[slot] != group || class_of(r, slot) != size_class)
            continue;
        /* So that it is not found a second time. */
        r->keys[slot] = FFS_NO_KEY;
        slots[count++] = slot;
    }
    for (int64_t k = 0; after != FFS_NO_KEY && k < count; k++)
        r->keys[slots[k]] = after;
    return count;
}

int ffs_sort_by_key(const int64_t *slots, const int64_t *keys, int64_t n, int64_t far,
                    int64_t *sorted_slots, int64_t *sorted_keys)
{
    int64_t low = INT64_MAX, high = 0, places[MOST_KEYS + 1] = {0};
    for (int64_t k = 0; k < n; k++) {
        if (keys[k] < 0 || keys[k] > far)
            return 0;
        low = keys[k] < low ? keys[k] : low;
        high = keys[k] < far && keys[k] > high ? keys[k] : high;
    }
    if (high - low >= MOST_KEYS)
        return 0;
    /* Place 0 is for where the lowest begin, the last for where `far` ends. */
    int64_t last = high < low ? 0 : high - low + 1;
    for (int64_t k = 0; k < n; k++)
        places[keys[k] < far ? keys[k] - low : last]++;
    for (int64_t k = 0, start = 0; k <= last; k++) {
        int64_t count = places[k];
        places[k] = start;
        start += count;
    }
    for (int64_t k = 0; k < n; k++) {
        int64_t to = places[keys[k] < far ? keys[k] - low : last]++;
        sorted_slots[to] = slots[k];
        sorted_keys[to] = keys[k];
    }
    return 1;
}

int64_t ffs_residents_group(const ffs_residents *r, const int64_t *slots, int64_t n)
{
    return inside(r, slots, n) ? shared_group(r, slots, n) : FFS_ERANGE;
}

int ffs_residents_put(const ffs_residents *r, const int64_t *slots, int64_t n, int64_t key,
                      int64_t *group)
{
    if (!inside(r, slots, n))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++)
        r->keys[slots[k]] = key;
    *group = shared_group(r, slots, n);
    return 0;
}

int64_t ffs_residents_invalidate(const ffs_residents *r, const int64_t *slots, int64_t n,
                                 int64_t key, int64_t *moved, int64_t *whose)
{
    int64_t count = 0;
    if (!inside(r, slots, n))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        r->prefetched[slots[k]] = 0;
        if ((uint64_t)r->keys[slots[k]] < (uint64_t)key)
            moved[count++] = slots[k];
    }
    whose[0] = shared_group(r, moved, count);
    whose[1] = count ? class_of(r, moved[0]) : FFS_MIXED;
    for (int64_t k = 0; k < count; k++) {
        r->keys[moved[k]] = key;
        if (class_of(r, moved[k]) != whose[1])
            whose[1] = FFS_MIXED;
    }
    return count;
}

int ffs_residents_leave(const ffs_residents *r, const int64_t *slots, int64_t n, int64_t *found)
{
    if (!inside(r, slots, n))
        return FFS_ERANGE;
    found[0] = shared_group(r, slots, n);
    found[1] = found[2] = 0;
    for (int64_t k = 0; k < n; k++) {
        found[1] += r->sizes[slots[k]];
        found[2] += r->prefetched[slots[k]];
        r->prefetched[slots[k]] = 0;
        r->keys[slots[k]] = FFS_NO_KEY;
    }
    return 0;
}

/* ---- when samples will be wanted --------------------------------------------------------- */

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

static uint8_t part_of(const ffs_order *t, int64_t number)
{
    uint64_t place = (uint64_t)number - (uint64_t)t->low;
    return place < (uint64_t)t->size ? t->parts[place] : 0;
}

void ffs_order_parts(const ffs_order *t, const int64_t *numbers, int64_t n, uint8_t *parts,
                     int64_t *found)
{
    found[0] = UINT8_MAX;
    found[1] = found[2] = 0;
    for (int64_t k = 0; k < n; k++) {
        parts[k] = part_of(t, numbers[k]);
        if (parts[k] < found[0])
            found[0] = parts[k];
        if (parts[k] >= found[1]) {
            found[1] = parts[k];
            found[2] = k;
        }
    }
}

static void prefetch(const ffs_future *f, int64_t number)
{
    for (int64_t j = 0; j < f->announced_count; j++) {
        const ffs_order *table = &f->announced[j].order;
        uint64_t place = (uint64_t)number - (uint64_t)table->low;
        if (place < (uint64_t)table->size)
            __builtin_prefetch(&table->parts[place]);
    }
}

static double chance_of(const ffs_future *f, int64_t number)
{
    double chance = 0;
    for (int64_t j = 0; j < f->silent_count; j++) {
        const ffs_silent_job *job = &f->silent[j];
        uint64_t place = (uint64_t)number - (uint64_t)job->low;
        if (!job->seen)
            chance += job->first;
        else if (place < (uint64_t)job->size)
            chance += job->seen[place] ? job->again : job->first;
    }
    return chance;
}

static double soonest(const ffs_future *f, int64_t number)
{
    double best = INFINITY;
    for (int64_t j = 0; j < f->announced_count; j++) {
        const ffs_timed_order *order = &f->announced[j];
        double time = order->times[part_of(&order->order, number)];
        best = time < best ? time : best;
    }
    if (f->silent_count) {
        double time = f->now + 1 / chance_of(f, number);
        best = time < best ? time : best;
    }
    return best;
}

int ffs_keys(const ffs_future *f, const int64_t *firsts, const int32_t *counts, int64_t slot_count,
             const int64_t *slots, int64_t n, double width, int64_t far, int64_t *keys)
{
    for (int64_t j = 0; j < f->announced_count; j++)
        if (f->announced[j].time_count <= UINT8_MAX)
            return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++)
        if ((uint64_t)slots[k] >= (uint64_t)slot_count)
            return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        if (k + 2 * AHEAD < n) {
            __builtin_prefetch(&firsts[slots[k + 2 * AHEAD]]);
            __builtin_prefetch(&counts[slots[k + 2 * AHEAD]]);
        }
        if (k + AHEAD < n)
            prefetch(f, firsts[slots[k + AHEAD]]);
        int64_t first = firsts[slots[k]];
        double best = soonest(f, first);
        for (int64_t number = first + 1; number < first + counts[slots[k]]; number++) {
            double time = soonest(f, number);
            best = time < best ? time : best;
        }
        keys[k] = best / width < (double)far ? (int64_t)(best / width) : far;
    }
    return 0;
}
