/* Copying samples of a page and more from random places.
 *
 * Three things cost a plain memcpy here. The processor's prefetchers stop at the end of a page and
 * need some misses to start again, so every page begins with waiting: here the bytes 4 KiB further
 * on in the batch, of this sample or of the next, are asked for meanwhile, into the second level,
 * since the first has room for little more than the lines on their way. Payloads lie at any byte,
 * and storing across cache lines costs more than loading across them: stores are aligned. And
 * memcpy turns to `rep movsb` at some KiB, which knows of no next sample. (Figures stand in
 * docs/decisions. Stores that go around the cache lost, more so with whoever reads the batch next.)
 */
#include <string.h>

#include "core.h"

#define LINE 64
#define STEP 256     /* bytes between two looks at where we are */
#define DISTANCE 4096
#define SHORTEST 1024

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
    for (int k = 0; k < STEP; k += LINE)
        __builtin_prefetch(from + k, 0, 2);
}

/* size >= SHORTEST. The first and the last vector are stored unaligned, over their neighbours. */
#define COPY_BY(NAME, WIDTH, TARGET)                                                               \
    typedef uint8_t NAME##_any                                                                     \
        __attribute__((vector_size(WIDTH), aligned(1), may_alias));                                \
    typedef uint8_t NAME##_even __attribute__((vector_size(WIDTH), may_alias));                    \
    __attribute__((target(TARGET)))                                                                \
    static void NAME(uint8_t *to, const uint8_t *from, uint64_t size, const uint8_t *next,         \
                     uint64_t next_size)                                                           \
    {                                                                                              \
        uint64_t k = -(uint64_t)(uintptr_t)to % WIDTH, end = size - (size - k) % STEP, asked = 0;  \
        *(NAME##_any *)to = *(const NAME##_any *)from;                                             \
        for (; k < end; k += STEP) {                                                               \
            if (k + DISTANCE < size) {                                                             \
                ask_for(from + k + DISTANCE);                                                      \
            } else if (asked < next_size) {                                                        \
                ask_for(next + asked);                                                             \
                asked += STEP;                                                                     \
            }                                                                                      \
            NAME##_even v[STEP / WIDTH];                                                           \
            for (int i = 0; i < STEP / WIDTH; i++)                                                 \
                v[i] = *(const NAME##_any *)(from + k + i * WIDTH);                                \
            for (int i = 0; i < STEP / WIDTH; i++)                                                 \
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

void ffs_copy(uint8_t *to, const uint8_t *from, uint64_t size, const uint8_t *next,
              uint64_t next_size)
{
    if (size < SHORTEST) {
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
