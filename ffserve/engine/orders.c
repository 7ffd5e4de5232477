/* What the daemon keeps of an announced order: which sample stands where, and in which part of the
 * epoch a sample comes. See ffserve/cache/orders.py and narrow.py. */
#include "core.h"

int ffs_unpack(const uint8_t *planes, int64_t whole, const uint8_t *halves, int64_t count,
               int64_t start, int64_t stop, int64_t low, int64_t *numbers)
{
    if (start < 0 || start > stop || stop > count || whole < 1 || whole > 4)
        return FFS_ERANGE;
    for (int64_t k = start; k < stop; k++)
        numbers[k - start] = low + planes[k];
    for (int64_t p = 1; p < whole; p++)
        for (int64_t k = start; k < stop; k++)
            numbers[k - start] += (int64_t)planes[p * count + k] << 8 * p;
    for (int64_t k = start; halves && k < stop; k++)
        numbers[k - start] += (int64_t)(halves[k / 2] >> 4 * (k % 2) & 15) << 8 * whole;
    return 0;
}

static uint8_t bucket_of(const ffs_table *t, int64_t number)
{
    uint64_t place = (uint64_t)number - (uint64_t)t->low;
    return place < (uint64_t)t->size ? t->buckets[place] : 0;
}

void ffs_buckets(const ffs_table *t, const int64_t *numbers, int64_t n, uint8_t *buckets)
{
    for (int64_t k = 0; k < n; k++)
        buckets[k] = bucket_of(t, numbers[k]);
}

int ffs_soonest(const ffs_table *t, const double *times, int64_t time_count,
                const int64_t *numbers, int64_t n, double *best)
{
    for (int64_t k = 0; k < n; k++) {
        uint8_t bucket = bucket_of(t, numbers[k]);
        if (bucket >= time_count)
            return FFS_ERANGE;
        if (times[bucket] < best[k])
            best[k] = times[bucket];
    }
    return 0;
}
