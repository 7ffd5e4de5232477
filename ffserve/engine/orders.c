/* What the daemon keeps of an announced order: which sample stands where, and in which part of the
 * epoch a sample comes. See ffserve/cache/orders.py. */
#include <math.h>

#include "plan.h"

/* Slots whose rows are asked for from memory while others are looked at. */
#define AHEAD 16

static uint8_t part_of(const ffs_table *t, int64_t number)
{
    uint64_t place = (uint64_t)number - (uint64_t)t->low;
    return place < (uint64_t)t->size ? t->parts[place] : 0;
}

void ffs_parts(const ffs_table *t, const int64_t *numbers, int64_t n, uint8_t *parts,
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

static void ask_for(const ffs_future *f, int64_t number)
{
    for (int64_t j = 0; j < f->announced_count; j++) {
        const ffs_table *table = &f->announced[j].table;
        uint64_t place = (uint64_t)number - (uint64_t)table->low;
        if (place < (uint64_t)table->size)
            __builtin_prefetch(&table->parts[place]);
    }
}

static double chance_of(const ffs_future *f, int64_t number)
{
    double chance = 0;
    for (int64_t j = 0; j < f->silent_count; j++) {
        const ffs_silent *job = &f->silent[j];
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
        const ffs_timed *order = &f->announced[j];
        double time = order->times[part_of(&order->table, number)];
        best = time < best ? time : best;
    }
    if (f->silent_count) {
        double time = f->now + 1 / chance_of(f, number);
        best = time < best ? time : best;
    }
    return best;
}

int ffs_keys(const ffs_future *f, const int64_t *firsts, const int32_t *counts,
             int64_t slot_count, const int64_t *slots, int64_t n, double width, int64_t far,
             int64_t *keys)
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
            ask_for(f, firsts[slots[k + AHEAD]]);
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
