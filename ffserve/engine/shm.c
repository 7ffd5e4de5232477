/* The seqlocked directory: how a client copies a sample that the daemon may evict meanwhile.
 *
 * Writer: seq to unreadable, full fence, then change the slot's bytes, length and place, then
 * seq to readable with release. Reader: seq with acquire, place and length, bounds check, copy,
 * acquire fence, seq again. If the reader saw anything that the writer wrote after its fence, then
 * its second look at seq sees the change too, and the copy is refused (Boehm, "Can seqlocks get
 * along with programming language memory models?", 2012). The copy itself races by design; what it
 * may never do is leave the arena, hence the bounds check on values loaded once.
 */
#include <string.h>

#include "entries.h"

#define LINE 64

/* ---- copying ----------------------------------------------------------------------------- */
/*Copying samples of a page and more from random places.
 *
 * Three things cost a plain memcpy here. The processor's prefetchers stop at the end of a page and
 * need some misses to start again, so every page begins with waiting: here the bytes 4 KiB further
 * on in the batch, of this sample or of the next, are asked for meanwhile, into the second level,
 * since the first has room for little more than the lines on their way. Payloads lie at any byte,
 * and storing across cache lines costs more than loading across them: stores are aligned. And
 * memcpy turns to `rep movsb` at some KiB, which knows of no next sample. (Figures stand in
 * docs/decisions. Stores that go around the cache lost, more so with whoever reads the batch next.)
 */
#define COPY_STEP 256     /* bytes between two looks at where we are */
#define COPY_DISTANCE 4096
#define COPY_SHORTEST 1024

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#endif

#ifdef UNDER_TSAN
/* The race is the design; the sanitizer intercepts memcpy wherever it is called from. */
__attribute__((no_sanitize("thread"), noinline))
static void copy_plain(uint8_t *to, const uint8_t *from, uint64_t size, const uint8_t *next,
                       uint64_t next_size)
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

static inline void ask_for(const uint8_t *from)
{
    for (int k = 0; k < COPY_STEP; k += LINE)
        __builtin_prefetch(from + k, 0, 2);
}

/* size >= COPY_SHORTEST. The first and the last vector are stored unaligned, over their neighbours. */
#define COPY_BY(NAME, WIDTH, TARGET)                                                               \
    typedef uint8_t NAME##_any                                                                     \
        __attribute__((vector_size(WIDTH), aligned(1), may_alias));                                \
    typedef uint8_t NAME##_even __attribute__((vector_size(WIDTH), may_alias));                    \
    __attribute__((target(TARGET)))                                                                \
    static void NAME(uint8_t *to, const uint8_t *from, uint64_t size, const uint8_t *next,         \
                     uint64_t next_size)                                                           \
    {                                                                                              \
        uint64_t k = -(uint64_t)(uintptr_t)to % WIDTH, end = size - (size - k) % COPY_STEP, asked = 0;  \
        *(NAME##_any *)to = *(const NAME##_any *)from;                                             \
        for (; k < end; k += COPY_STEP) {                                                               \
            if (k + COPY_DISTANCE < size) {                                                             \
                ask_for(from + k + COPY_DISTANCE);                                                      \
            } else if (asked < next_size) {                                                        \
                ask_for(next + asked);                                                             \
                asked += COPY_STEP;                                                                     \
            }                                                                                      \
            NAME##_even v[COPY_STEP / WIDTH];                                                           \
            for (int i = 0; i < COPY_STEP / WIDTH; i++)                                                 \
                v[i] = *(const NAME##_any *)(from + k + i * WIDTH);                                \
            for (int i = 0; i < COPY_STEP / WIDTH; i++)                                                 \
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
    /* avx512vbmi: not the first processors with AVX-512, whose clock went down for it. */
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

/* ---- reading the directory --------------------------------------------------------------- */
#define AHEAD 32     /* directory entries prefetched; a power of two */
#define FAR 24       /* payloads below SMALL that are prefetched whole, into the second level */
#define NEAR 2       /* others, whose first lines are */
#define SMALL 2048

int64_t ffs_locate(const ffs_view *view, const int64_t *indices, int64_t n, int64_t *offsets,
                   int64_t *missing, int64_t *unknown, int64_t *bad)
{
    const ffs_entry *ring[AHEAD];
    uint64_t hint = 0, sum = 0;
    int64_t lost = 0, blank = 0;

    offsets[0] = 0;
    if (n > 0 && !view->segment_count) {
        *bad = 0;
        return FFS_ERANGE;
    }
    for (int64_t k = -AHEAD; k < n; k++) {
        const ffs_entry *entry = k >= 0 ? ring[k & (AHEAD - 1)] : NULL;
        int64_t next = k + AHEAD;
        if (next < n) {
            const ffs_entry *ahead = find(view, indices[next], &hint);
            if (!ahead) {
                *bad = next;
                return FFS_ERANGE;
            }
            __builtin_prefetch(ahead);
            ring[next & (AHEAD - 1)] = ahead;
        }
        if (k < 0)
            continue;
        look l = look_at(entry);
        if (l.length == UNKNOWN)
            blank++;
        else
            sum += l.length;
        offsets[k + 1] = (int64_t)sum;
        if (missing)
            missing[lost] = k;
        lost += !(l.seq & 1);
    }
    *unknown = blank;
    return lost;
}

/* What is going to be copied, as far as a prefetch wants to know; size 0: nothing. */
typedef struct { const uint8_t *payload; uint64_t size; } expected;

static inline expected expect(const ffs_view *view, const ffs_entry *entry)
{
    /* Unchecked: the prefetch of a wrong address is dropped. */
    uint64_t place = __atomic_load_n(&entry->place, __ATOMIC_RELAXED) & UNKNOWN;
    uint32_t low = __atomic_load_n(&entry->length_low, __ATOMIC_RELAXED);
    expected e = {view->arena + place, place < view->arena_size ? low : 0};
    return e;
}

/* 0 copied, 1 not readable, or FFS_E*. */
static inline int copy_one(const ffs_view *view, const ffs_entry *entry, uint8_t *to,
                           uint64_t length, expected next)
{
    look l = look_at(entry);
    if (!(l.seq & 1))
        return 1;
    if (l.length != length)
        return unchanged(entry, l.seq) ? FFS_ESTALE : 1;
    if (l.offset > view->arena_size || length > view->arena_size - l.offset)
        return unchanged(entry, l.seq) ? FFS_ERANGE : 1;
    copy_payload(to, view->arena + l.offset, length, next.payload, next.size);
    return unchanged(entry, l.seq) ? 0 : 1;
}

static inline void prefetch_start(expected e)
{
    for (int k = 0; e.size >= SMALL && k < 4; k++)
        __builtin_prefetch(e.payload + k * LINE);
}

/* Small samples are copied faster than memory answers, so these are asked for long before. */
static inline void prefetch_small(expected e)
{
    if (!e.size || e.size >= SMALL)
        return;
    for (uint64_t k = 0; k < e.size; k += LINE)
        __builtin_prefetch(e.payload + k, 0, 2);
    __builtin_prefetch(e.payload + e.size - 1, 0, 2);
}

/* As ffs_gather. edges: not NULL: the same as offsets, which are not known yet but offsets[0]; that
 * is up to `room` bytes, and the first sample that cannot be copied ends it. */
static inline int64_t gather(const ffs_view *view, const int64_t *indices, const int64_t *offsets,
                             uint8_t *buffer, uint8_t *const *dests, const int64_t *positions,
                             int64_t m, int64_t *left, int64_t *edges, uint64_t room)
{
    const ffs_entry *ring[AHEAD];
    uint64_t hint = 0;
    int64_t lost = 0;

    if (m > 0 && !view->segment_count)
        return FFS_ERANGE;
    for (int64_t k = -AHEAD; k < m; k++) {
        const ffs_entry *entry = k >= 0 ? ring[k & (AHEAD - 1)] : NULL;
        int64_t next = k + AHEAD;
        if (next < m) {
            int64_t position = positions ? positions[next] : next;
            const ffs_entry *ahead = find(view, indices[position], &hint);
            if (!ahead)
                return FFS_ERANGE;
            __builtin_prefetch(ahead);
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
            uint64_t length = look_at(entry).length;
            if (length > room - (uint64_t)edges[k])
                return 1;
            edges[k + 1] = edges[k] + (int64_t)length;
        }
        uint8_t *to = dests ? dests[position] : buffer + offsets[position];
        uint64_t length = (uint64_t)(offsets[position + 1] - offsets[position]);
        expected following = {view->arena, 0};
        if (k + 1 < m)
            following = expect(view, ring[(k + 1) & (AHEAD - 1)]);
        int rc = copy_one(view, entry, to, length, following);
        if (rc < 0 || (rc && edges))
            return rc;
        if (rc && left)
            left[lost] = position;
        lost += rc;
    }
    return lost;
}

int64_t ffs_gather(const ffs_view *view, const int64_t *indices, const int64_t *offsets,
                   uint8_t *buffer, uint8_t *const *dests,
                   const int64_t *positions, int64_t m, int64_t *left)
{
    return gather(view, indices, offsets, buffer, dests, positions, m, left, NULL, 0);
}

int ffs_copy_batch(const ffs_view *view, const int64_t *indices, int64_t n, int64_t *offsets,
                   uint8_t *buffer, uint64_t least, uint64_t room, int at_once)
{
    int64_t unknown = 0, bad, rc;
    if (at_once) {
        offsets[0] = 0;
        rc = gather(view, indices, offsets, buffer, NULL, NULL, n, NULL, offsets, room);
        if (rc == 0 && (uint64_t)offsets[n] >= least)
            return 0;
    }
    rc = ffs_locate(view, indices, n, offsets, NULL, &unknown, &bad);
    if (rc < 0)
        return (int)rc;
    if (rc || unknown)
        return FFS_ESTALE;
    uint64_t total = (uint64_t)offsets[n];
    if (total < least || total > room)
        return 1;
    rc = ffs_gather(view, indices, offsets, buffer, NULL, NULL, n, NULL);
    return rc > 0 ? FFS_ESTALE : (int)rc;
}

int64_t ffs_places(const ffs_view *view, const int64_t *indices, int64_t n, uint64_t *places)
{
    uint64_t hint = 0;
    int64_t lost = 0;
    if (n > 0 && !view->segment_count)
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k++) {
        const ffs_entry *entry = find(view, indices[k], &hint);
        if (!entry)
            return FFS_ERANGE;
        look l = look_at(entry);
        int stable = (l.seq & 1) && unchanged(entry, l.seq);
        if (stable && (l.offset > view->arena_size || l.length > view->arena_size - l.offset))
            return FFS_ERANGE;
        places[k] = stable ? l.offset : UINT64_MAX;
        lost += !stable;
    }
    return lost;
}

void ffs_retract(ffs_entry *entries, const int64_t *firsts, const int64_t *counts,
                 const uint64_t *slots, const uint64_t *sizes, int64_t m)
{
    for (int64_t k = 0; k < m; k++) {
        for (int64_t i = firsts[k]; i < firsts[k] + counts[k]; i++) {
            look l = look_at(&entries[i]);
            if ((l.seq & 1) && l.offset >= slots[k] && l.offset - slots[k] < sizes[k])
                __atomic_store_n(&entries[i].seq, l.seq + 1, __ATOMIC_RELAXED);
        }
    }
    /* Whoever reads a byte that is written to these slots after this sees the stores above. */
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
