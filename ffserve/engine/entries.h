/* Entries of the directory: finding a sample's, and looking at it as engine/shm.c says. */
#ifndef FFSERVE_ENTRIES_H
#define FFSERVE_ENTRIES_H
#include "shm.h"

#define UNKNOWN ((((uint64_t)1) << 48) - 1)

typedef struct { uint32_t seq; uint64_t offset, length; } look;

static inline look look_at(const ffs_entry *entry)
{
    look l;
    l.seq = __atomic_load_n(&entry->seq, __ATOMIC_ACQUIRE);
    uint64_t place = __atomic_load_n(&entry->place, __ATOMIC_RELAXED);
    uint64_t low = __atomic_load_n(&entry->length_low, __ATOMIC_RELAXED);
    l.offset = place & UNKNOWN;
    l.length = (place >> 48) << 32 | low;
    return l;
}

static inline int unchanged(const ffs_entry *entry, uint32_t seq)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&entry->seq, __ATOMIC_RELAXED) == seq;
}

/* NULL when outside. *hint: the segment found last, which is where the next one often is. */
static inline const ffs_entry *find(const ffs_view *view, int64_t index, uint64_t *hint)
{
    const ffs_segment *s = view->segments + *hint;
    uint64_t i = (uint64_t)index;
    if (i - s->first < s->count)
        return s->entries + (i - s->first);
    uint64_t low = 0, n = view->segment_count;
    while (n > 1) {
        uint64_t half = n / 2;
        low = view->segments[low + half].first <= i ? low + half : low;
        n -= half;
    }
    s = view->segments + low;
    if (i - s->first >= s->count)
        return NULL;
    *hint = low;
    return s->entries + (i - s->first);
}

#endif
