/* The policy's tables of slots: what is per slot when victims are taken, kept or doubted. What stays
 * and what goes is decided elsewhere (ffserve/cache/policy.py).
 *
 * Slots are held against the tables before anything is written.
 */
#include <stdbool.h>

#include "plan.h"

/* Slots whose rows are asked for from memory while others are looked at. */
#define AHEAD 16
/* Keys in a row that are sorted by counting. */
#define MOST_KEYS 2048

static int64_t class_of(const ffs_residents *r, int64_t slot)
{
    int64_t size_class = r->classes[slot >> r->slab_shift];
    return size_class < 0 ? r->large : size_class;
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

int64_t ffs_residents_take(const ffs_residents *r, const int32_t *items, int64_t n, int64_t key,
                           int64_t after, int64_t group, int64_t size_class, int64_t *slots)
{
    int64_t count = 0;
    for (int64_t k = 0; k < n; k++)
        if ((uint64_t)items[k] >= (uint64_t)r->slot_count)
            return FFS_ERANGE;
    if (key == FFS_NO_KEY)
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        int64_t slot = items[k];
        if (k + AHEAD < n) {
            __builtin_prefetch(&r->keys[items[k + AHEAD]], 1);
            __builtin_prefetch(&r->groups[items[k + AHEAD]]);
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

int64_t ffs_residents_invalidate(const ffs_residents *r, const int64_t *slots, int64_t n, int64_t key,
                            int64_t *moved, int64_t *whose)
{
    int64_t count = 0;
    if (!inside(r, slots, n))
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        r->ahead[slots[k]] = 0;
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
        found[2] += r->ahead[slots[k]];
        r->ahead[slots[k]] = 0;
        r->keys[slots[k]] = FFS_NO_KEY;
    }
    return 0;
}
