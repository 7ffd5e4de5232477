/* The seqlocked directory: how a client copies a sample that the daemon may evict at the same time.
 *
 * The writer makes seq unreadable, then a full fence, then changes the slot's bytes, length and
 * place, then makes seq readable with release. The reader loads seq with acquire, then place and
 * length, checks the bounds, copies, then an acquire fence, and loads seq again. If the reader saw
 * anything that the writer wrote after its fence, its second load of seq sees the change too and the
 * copy is rejected (Boehm, "Can seqlocks get along with programming language memory models?", 2012).
 * The copy itself races by design. It must never leave the arena, so the bounds are checked on values
 * that are loaded once.
 */
#include <assert.h>
#include <malloc.h>
#include <string.h>
#include <time.h>

#include "shm.h"

#define LINE 64

/* ---- entries ----------------------------------------------------------------------------- */
#define UNKNOWN ((((uint64_t)1) << 48) - 1)

/* An entry as it was at one moment: seq is loaded first, with acquire. */
typedef struct {
    uint32_t seq;
    uint64_t offset, length;
} snapshot;

static inline snapshot load_entry(const ffs_entry *entry)
{
    snapshot now;
    now.seq = __atomic_load_n(&entry->seq, __ATOMIC_ACQUIRE);
    uint64_t place = __atomic_load_n(&entry->place, __ATOMIC_RELAXED);
    uint64_t low = __atomic_load_n(&entry->length_low, __ATOMIC_RELAXED);
    now.offset = place & UNKNOWN;
    now.length = (place >> 48) << 32 | low;
    return now;
}

/* Whether what was read since the snapshot with this seq is valid. */
static inline int unchanged(const ffs_entry *entry, uint32_t seq)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&entry->seq, __ATOMIC_RELAXED) == seq;
}

/* Where a sample is looked up: its entry, and the arena that the entry names a place in. */
typedef struct {
    const ffs_entry *entry;
    const uint8_t *arena;
} spot;

/* The entry of a sample, NULL when the index is outside the view. *hint: the segment found last,
 * which often holds the next sample too. */
static inline spot find(const ffs_view *view, int64_t index, uint64_t *hint)
{
    const ffs_segment *s = view->segments + *hint;
    uint64_t i = (uint64_t)index;
    if (i - s->first < s->count)
        return (spot){s->entries + (i - s->first), s->arena};
    uint64_t low = 0, n = view->segment_count;
    while (n > 1) {
        uint64_t half = n / 2;
        low = view->segments[low + half].first <= i ? low + half : low;
        n -= half;
    }
    s = view->segments + low;
    if (i - s->first >= s->count)
        return (spot){NULL, NULL};
    *hint = low;
    return (spot){s->entries + (i - s->first), s->arena};
}

/* ---- copying -----------------------------------------------------------------------------
 * Samples of a page and more, from random addresses. Three things make a plain memcpy slow here. The
 * processor's prefetchers stop at the end of a page and restart only after some misses; so the copy
 * prefetches the bytes that follow 4 KiB later in the batch, of this sample or of the next. They go
 * to the second-level cache, because the first holds little more than the lines in flight. Payloads
 * begin at any byte, and a store that crosses cache lines costs more than a load that does; so stores
 * are aligned. And memcpy uses `rep movsb` from a few KiB on, which prefetches no next sample.
 * Non-temporal stores were slower, the more so for the code that reads the batch next. (Figures:
 * docs/decisions.) */
#define COPY_STEP 256      /* bytes per iteration */
#define COPY_DISTANCE 4096 /* bytes that are prefetched ahead */
#define COPY_SHORTEST 1024 /* shorter samples are copied by memcpy */

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#endif

#ifdef UNDER_TSAN
/* The copy races by design, and the sanitizer intercepts memcpy wherever it is called. */
__attribute__((no_sanitize("thread"), noinline)) static void
copy_plain(uint8_t *to, const uint8_t *from, uint64_t size, const uint8_t *next, uint64_t next_size)
{
    const volatile uint8_t *v = from;
    (void)next, (void)next_size;
    for (uint64_t k = 0; k < size; k++)
        to[k] = v[k];
}
#else
static void copy_plain(uint8_t *to, const uint8_t *from, uint64_t size, const uint8_t *next,
                       uint64_t next_size)
{
    (void)next, (void)next_size;
    memcpy(to, from, size);
}
#endif

#if defined(__x86_64__) && !defined(UNDER_TSAN)
#define HAVE_VECTORS 1

static inline void prefetch_step(const uint8_t *from)
{
    for (int k = 0; k < COPY_STEP; k += LINE)
        __builtin_prefetch(from + k, 0, 2);
}

/* size >= COPY_SHORTEST. The first and last vector are stored unaligned and overlap others. */
#define COPY_BY(NAME, WIDTH, TARGET)                                                               \
    typedef uint8_t NAME##_any __attribute__((vector_size(WIDTH), aligned(1), may_alias));         \
    typedef uint8_t NAME##_even __attribute__((vector_size(WIDTH), may_alias));                    \
    __attribute__((target(TARGET))) static void NAME(                                              \
        uint8_t *to, const uint8_t *from, uint64_t size, const uint8_t *next, uint64_t next_size)  \
    {                                                                                              \
        uint64_t k = -(uint64_t)(uintptr_t)to % WIDTH, end = size - (size - k) % COPY_STEP,        \
                 asked = 0;                                                                        \
        *(NAME##_any *)to = *(const NAME##_any *)from;                                             \
        for (; k < end; k += COPY_STEP) {                                                          \
            if (k + COPY_DISTANCE < size) {                                                        \
                prefetch_step(from + k + COPY_DISTANCE);                                           \
            } else if (asked < next_size) {                                                        \
                prefetch_step(next + asked);                                                       \
                asked += COPY_STEP;                                                                \
            }                                                                                      \
            NAME##_even v[COPY_STEP / WIDTH];                                                      \
            for (int i = 0; i < COPY_STEP / WIDTH; i++)                                            \
                v[i] = *(const NAME##_any *)(from + k + i * WIDTH);                                \
            for (int i = 0; i < COPY_STEP / WIDTH; i++)                                            \
                *(NAME##_even *)(to + k + i * WIDTH) = v[i];                                       \
        }                                                                                          \
        for (; k + WIDTH <= size; k += WIDTH)                                                      \
            *(NAME##_even *)(to + k) = *(const NAME##_any *)(from + k);                            \
        *(NAME##_any *)(to + size - WIDTH) = *(const NAME##_any *)(from + size - WIDTH);           \
    }

COPY_BY(copy_64, 64, "avx512f")
COPY_BY(copy_32, 32, "avx2")
#endif

typedef void (*copier)(uint8_t *, const uint8_t *, uint64_t, const uint8_t *, uint64_t);

static copier chosen;

int ffs_copy_width(int most)
{
    int width = 0;
    copier found = copy_plain;
#ifdef HAVE_VECTORS
    __builtin_cpu_init();
    /* avx512vbmi excludes the first processors with AVX-512, which lower their clock for it. */
    if (most >= 64 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vbmi"))
        found = copy_64, width = 64;
    else if (most >= 32 && __builtin_cpu_supports("avx2"))
        found = copy_32, width = 32;
#else
    (void)most;
#endif
    __atomic_store_n(&chosen, found, __ATOMIC_RELAXED);
    return width;
}

/* memcpy while another process may write to `from`. next, next_size: what will be copied after it; it
 * is prefetched and never read, so the address may be invalid. */
static void copy_payload(uint8_t *to, const uint8_t *from, uint64_t size, const uint8_t *next,
                         uint64_t next_size)
{
    if (size < COPY_SHORTEST) {
        copy_plain(to, from, size, next, next_size);
        return;
    }
    copier copy = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (!copy) {
        ffs_copy_width(64);
        copy = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    }
    copy(to, from, size, next, next_size);
}

/* ---- timing ------------------------------------------------------------------------------ */
static_assert(FFS_DURATIONS == sizeof(((ffs_times *)0)->counts) / sizeof(uint64_t), "one each");

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* The time at which a batch begins; 0: it is not timed. */
static inline uint64_t start_timing(const ffs_view *view)
{
    ffs_times *times = view->times;
    if (!times)
        return 0;
    uint64_t calls = __atomic_load_n(&times->calls, __ATOMIC_RELAXED);
    __atomic_store_n(&times->calls, calls + 1, __ATOMIC_RELAXED);
    return calls % FFS_TIMED ? 0 : now_ns();
}

static void stop_timing(const ffs_view *view, uint64_t began)
{
    uint64_t took_ns = now_ns() - began, us = took_ns / 1000;
    int bucket = us ? 64 - __builtin_clzll(us) : 0;
    if (bucket > FFS_DURATIONS - 1)
        bucket = FFS_DURATIONS - 1;
    __atomic_fetch_add(&view->times->counts[bucket], 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&view->times->sum_ns, took_ns, __ATOMIC_RELAXED);
}

/* ---- reading the directory --------------------------------------------------------------- */
#define AHEAD 32   /* directory entries prefetched ahead; a power of two */
#define FAR 24     /* small payloads prefetched ahead, completely, into the second-level cache */
#define NEAR 2     /* other payloads whose first lines are prefetched ahead */
#define SMALL 2048 /* a payload below this is small */

int64_t ffs_locate(const ffs_view *view, const int64_t *indices, int64_t n, int64_t *offsets,
                   int64_t *missing, int64_t *unknown, int64_t *bad)
{
    const ffs_entry *ring[AHEAD];
    uint64_t hint = 0, sum = 0;
    int64_t absent = 0, blank = 0;

    offsets[0] = 0;
    if (n > 0 && !view->segment_count) {
        *bad = 0;
        return FFS_ERANGE;
    }
    for (int64_t k = -AHEAD; k < n; k++) {
        const ffs_entry *entry = k >= 0 ? ring[k & (AHEAD - 1)] : NULL;
        int64_t next = k + AHEAD;
        if (next < n) {
            const ffs_entry *ahead = find(view, indices[next], &hint).entry;
            if (!ahead) {
                *bad = next;
                return FFS_ERANGE;
            }
            __builtin_prefetch(ahead);
            ring[next & (AHEAD - 1)] = ahead;
        }
        if (k < 0)
            continue;
        snapshot now = load_entry(entry);
        if (now.length == UNKNOWN)
            blank++;
        else
            sum += now.length;
        if (sum > INT64_MAX) { /* or offsets would wrap around, out of the buffer made for them */
            *bad = -1;
            return FFS_ERANGE;
        }
        offsets[k + 1] = (int64_t)sum;
        if (missing)
            missing[absent] = k;
        absent += !(now.seq & 1);
    }
    *unknown = blank;
    return absent;
}

/* A payload that will be copied soon, for prefetching; size 0: none. */
typedef struct {
    const uint8_t *payload;
    uint64_t size;
} expected;

static inline expected expect(const ffs_view *view, spot at)
{
    /* Not verified: the processor drops the prefetch of an invalid address. */
    uint64_t place = __atomic_load_n(&at.entry->place, __ATOMIC_RELAXED) & UNKNOWN;
    uint32_t low = __atomic_load_n(&at.entry->length_low, __ATOMIC_RELAXED);
    expected e = {at.arena + place, place < view->arena_size ? low : 0};
    return e;
}

/* 0 copied, 1 not readable, or FFS_E*. */
static inline int copy_one(const ffs_view *view, spot at, uint8_t *to, uint64_t length,
                           expected next)
{
    const ffs_entry *entry = at.entry;
    snapshot now = load_entry(entry);
    if (!(now.seq & 1))
        return 1;
    if (now.length != length)
        return unchanged(entry, now.seq) ? FFS_ESTALE : 1;
    if (now.offset > view->arena_size || length > view->arena_size - now.offset)
        return unchanged(entry, now.seq) ? FFS_ERANGE : 1;
    copy_payload(to, at.arena + now.offset, length, next.payload, next.size);
    return unchanged(entry, now.seq) ? 0 : 1;
}

static inline void prefetch_start(expected e)
{
    for (int k = 0; e.size >= SMALL && k < 4; k++)
        __builtin_prefetch(e.payload + k * LINE);
}

/* Small samples are copied faster than memory responds, so they are prefetched long before. */
static inline void prefetch_small(expected e)
{
    if (!e.size || e.size >= SMALL)
        return;
    for (uint64_t k = 0; k < e.size; k += LINE)
        __builtin_prefetch(e.payload + k, 0, 2);
    __builtin_prefetch(e.payload + e.size - 1, 0, 2);
}

/* As ffs_gather. If `edges` is not NULL it is the same array as `offsets`, of which only the first
 * is known: the others are filled in, up to `room` bytes, and the first sample that cannot be copied
 * ends the call. */
static inline int64_t gather(const ffs_view *view, const int64_t *indices, const int64_t *offsets,
                             uint8_t *buffer, uint8_t *const *dests, const int64_t *positions,
                             int64_t m, int64_t *left, int64_t *edges, uint64_t room)
{
    spot ring[AHEAD];
    uint64_t hint = 0;
    int64_t lost = 0;

    if (m > 0 && !view->segment_count)
        return FFS_ERANGE;
    for (int64_t k = -AHEAD; k < m; k++) {
        spot at = k >= 0 ? ring[k & (AHEAD - 1)] : (spot){NULL, NULL};
        int64_t next = k + AHEAD;
        if (next < m) {
            int64_t position = positions ? positions[next] : next;
            spot ahead = find(view, indices[position], &hint);
            if (!ahead.entry)
                return FFS_ERANGE;
            __builtin_prefetch(ahead.entry);
            ring[next & (AHEAD - 1)] = ahead;
        }
        if (k + FAR >= 0 && k + FAR < m)
            prefetch_small(expect(view, ring[(k + FAR) & (AHEAD - 1)]));
        if (k + NEAR >= 0 && k + NEAR < m)
            prefetch_start(expect(view, ring[(k + NEAR) & (AHEAD - 1)]));
        if (k < 0)
            continue;
        int64_t position = positions ? positions[k] : k;
        if (edges) {
            uint64_t length = load_entry(at.entry).length;
            if (length > room - (uint64_t)edges[k])
                return 1;
            edges[k + 1] = edges[k] + (int64_t)length;
        }
        uint8_t *to = dests ? dests[position] : buffer + offsets[position];
        uint64_t length = (uint64_t)(offsets[position + 1] - offsets[position]);
        expected following = {at.arena, 0};
        if (k + 1 < m)
            following = expect(view, ring[(k + 1) & (AHEAD - 1)]);
        int rc = copy_one(view, at, to, length, following);
        if (rc < 0 || (rc && edges))
            return rc;
        if (rc && left)
            left[lost] = position;
        lost += rc;
    }
    return lost;
}

int64_t ffs_gather(const ffs_view *view, const int64_t *indices, const int64_t *offsets,
                   uint8_t *buffer, uint8_t *const *dests, const int64_t *positions, int64_t m,
                   int64_t *left)
{
    uint64_t began = positions ? 0 : start_timing(view);
    int64_t rc = gather(view, indices, offsets, buffer, dests, positions, m, left, NULL, 0);
    if (began && rc == 0)
        stop_timing(view, began);
    return rc;
}

static int copy_batch(const ffs_view *view, const int64_t *indices, int64_t n, int64_t *found,
                      uint8_t *buffer, uint64_t least, uint64_t room, int at_once)
{
    int64_t *offsets = found, *missing = found + n + 1, *counts = found + 2 * n + 1;
    int64_t bad, rc;
    if (at_once) {
        offsets[0] = 0;
        rc = gather(view, indices, offsets, buffer, NULL, NULL, n, NULL, offsets, room);
        if (rc == 0 && (uint64_t)offsets[n] >= least)
            return 0;
    }
    rc = ffs_locate(view, indices, n, offsets, missing, &counts[1], &bad);
    if (rc < 0)
        return (int)rc;
    counts[0] = rc;
    if (rc || counts[1])
        return FFS_ESTALE;
    uint64_t total = (uint64_t)offsets[n];
    if (total < least || total > room)
        return 1;
    rc = gather(view, indices, offsets, buffer, NULL, NULL, n, NULL, NULL, 0);
    return rc > 0 ? FFS_ESTALE : (int)rc;
}

int ffs_copy_batch(const ffs_view *view, const int64_t *indices, int64_t n, int64_t *found,
                   uint8_t *buffer, uint64_t least, uint64_t room, int at_once)
{
    uint64_t began = start_timing(view);
    int rc = copy_batch(view, indices, n, found, buffer, least, room, at_once);
    if (began && rc == 0)
        stop_timing(view, began);
    return rc;
}

int64_t ffs_places(const ffs_view *view, const int64_t *indices, int64_t n, uint64_t *places)
{
    uint64_t hint = 0;
    int64_t lost = 0;
    if (n > 0 && !view->segment_count)
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        spot at = find(view, indices[k], &hint);
        if (!at.entry)
            return FFS_ERANGE;
        snapshot now = load_entry(at.entry);
        int stable = (now.seq & 1) && unchanged(at.entry, now.seq);
        if (stable && (now.offset > view->arena_size || now.length > view->arena_size - now.offset))
            return FFS_ERANGE;
        places[k] = stable ? (uint64_t)(at.arena - view->lowest) + now.offset : UINT64_MAX;
        lost += !stable;
    }
    return lost;
}

void ffs_retract(ffs_entry *entries, const int64_t *firsts, const int64_t *counts,
                 const uint64_t *slots, const uint64_t *sizes, int64_t m)
{
    for (int64_t k = 0; k < m; k++) {
        for (int64_t i = firsts[k]; i < firsts[k] + counts[k]; i++) {
            snapshot now = load_entry(&entries[i]);
            if ((now.seq & 1) && now.offset >= slots[k] && now.offset - slots[k] < sizes[k])
                __atomic_store_n(&entries[i].seq, now.seq + 1, __ATOMIC_RELAXED);
        }
    }
    /* A reader that sees a byte written to these slots after this fence sees the stores above. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

void ffs_publish(ffs_entry *entry, uint64_t offset, uint64_t length)
{
    uint32_t seq = __atomic_load_n(&entry->seq, __ATOMIC_RELAXED);
    if (seq & 1)
        return;
    __atomic_store_n(&entry->length_low, (uint32_t)length, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->place, offset | (length >> 32) << 48, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->seq, seq + 1, __ATOMIC_RELEASE);
}

void ffs_flag_set(uint32_t *flag, uint32_t value)
{
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

uint32_t ffs_flag_get(const uint32_t *flag)
{
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

void ffs_publish_run(ffs_entry *entries, uint64_t first, int64_t n, uint64_t base,
                     const int64_t *starts, const int64_t *lengths)
{
    for (int64_t k = 0; k < n; k++)
        ffs_publish(&entries[first + k], base + (uint64_t)starts[k], (uint64_t)lengths[k]);
}

void ffs_keep_freed_memory(uint64_t block, uint64_t total)
{
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, (int)block);
    mallopt(M_TRIM_THRESHOLD, (int)total);
#else
    (void)block, (void)total;
#endif
}
