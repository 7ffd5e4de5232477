/* See cached.h. */
#define _GNU_SOURCE /* preadv2 */
#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "cached.h"
#include "codec.h"
#include "shm.h"

#define PAGE 4096
/* Bytes that are verified while they are in the processor's cache. */
#define STEP ((uint64_t)64 << 10)
/* Records in a row that are not in memory, after which the others are not looked for. */
#define MOST_MISSES 8

#ifndef SYS_cachestat
#define SYS_cachestat 451 /* Linux 6.5; headers may be older */
#endif

int64_t ffs_cached_pages(int fd, uint64_t offset, uint64_t length)
{
    struct {
        uint64_t offset, length;
    } range = {offset, length};
    /* In pages: cached, dirty, being written back, evicted, evicted lately. */
    uint64_t counts[5] = {0};
    if (syscall(SYS_cachestat, fd, &range, counts, 0) < 0)
        return -errno;
    return (int64_t)counts[0];
}

/* 1, 0, or -errno. */
static int is_cached(int fd, uint64_t offset, uint64_t length)
{
    if (!length) /* to cachestat it means: to the end of the file */
        return 1;
    uint64_t pages = (offset + length - 1) / PAGE - offset / PAGE + 1;
    int64_t count = ffs_cached_pages(fd, offset, length);
    return count < 0 ? (int)count : (uint64_t)count >= pages;
}

int64_t ffs_cached_extents(const int32_t *fds, const int64_t *begins, const int64_t *ends,
                           int64_t n, uint8_t *cached)
{
    int64_t found = 0;
    for (int64_t k = 0; k < n; k++) {
        int rc = fds[k] < 0
                   ? 0
                   : is_cached(fds[k], (uint64_t)begins[k], (uint64_t)(ends[k] - begins[k]));
        if (rc < 0)
            return rc;
        cached[k] = (uint8_t)rc;
        found += rc;
    }
    return found;
}

void ffs_some_cached(const int32_t *fds, const int64_t *begins, const int64_t *ends, int64_t n,
                     int64_t samples, double share, uint8_t *some)
{
    for (int64_t k = 0; k < n; k++) {
        int64_t step = (ends[k] - begins[k]) / samples, found = 0;
        step = step > PAGE ? step : PAGE;
        int64_t most = (int64_t)(share * (double)((ends[k] - begins[k] + step - 1) / step));
        for (int64_t at = begins[k]; at < ends[k] && found <= most; at += step) {
            int64_t pages = ffs_cached_pages(fds[k], (uint64_t)at, 1);
            if (pages < 0)
                break;
            found += pages;
        }
        some[k] = found > most;
    }
}

/* ---- which records go through the page cache ------------------------------------------------ */
static bool through_cache(const ffs_local *t, int64_t shard, uint64_t offset)
{
    uint64_t x = ((offset >> FFS_REGION_BITS) + t->seeds[shard]) * UINT64_C(0x9E3779B97F4A7C15);
    x ^= x >> 29;
    return (x * UINT64_C(0xBF58476D1CE4E5B9)) >> 32 < t->limits[shard];
}

void ffs_through_cache(const ffs_local *t, const int64_t *shards, const int64_t *offsets, int64_t n,
                       uint8_t *chosen)
{
    for (int64_t k = 0; k < n; k++)
        chosen[k] = through_cache(t, shards[k], (uint64_t)offsets[k]);
}

/* ---- reading ----------------------------------------------------------------------------- */
static uint64_t length_of(const ffs_local *t, int64_t sample)
{
    return t->lengths ? t->lengths[sample] : t->long_lengths[sample];
}

/* The caller's array, which other threads may write to: so each index is loaded once, and checked
 * where it is used. */
static int64_t index_of(const int64_t *indices, int64_t k)
{
    return __atomic_load_n(&indices[k], __ATOMIC_RELAXED);
}

int ffs_local_edges(const ffs_local *t, const int64_t *indices, int64_t n, int64_t *edges)
{
    edges[0] = 0;
    for (int64_t k = 0; k < n; k++) {
        int64_t sample = index_of(indices, k);
        if ((uint64_t)sample >= (uint64_t)t->sample_count)
            return FFS_ERANGE;
        edges[k + 1] = edges[k] + (int64_t)length_of(t, sample);
    }
    return 0;
}

/* The shard of a sample; most batches stay in one. */
static int64_t shard_of(const ffs_local *t, int64_t sample, int64_t guess)
{
    int64_t low = 0, high = t->shard_count;
    if (sample >= t->firsts[guess] && (guess + 1 == high || sample < t->firsts[guess + 1]))
        return guess;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (t->firsts[middle] <= sample)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Returns 0, -EAGAIN or -EOPNOTSUPP. */
static int read_cached(const ffs_local *t, int64_t shard, int64_t sample, uint8_t *to)
{
    uint64_t got = 0, offset = t->offsets[sample], length = length_of(t, sample);
    uint32_t found = 0;
    int kind = t->kinds[shard];
    if (offset > INT64_MAX - length)
        return -EAGAIN;
    while (got < length) {
        uint64_t left = length - got;
        struct iovec part = {to + got, left < STEP ? left : STEP};
        ssize_t size = preadv2(t->fds[shard], &part, 1, (off_t)(offset + got),
                               t->in_memory ? 0 : RWF_NOWAIT);
        if (size < 0 && errno == EINTR)
            continue;
        if (size <= 0)
            return size < 0 && errno == EOPNOTSUPP ? -EOPNOTSUPP : -EAGAIN;
        if (kind != FFS_CRC_NONE)
            found = ffs_checksum(kind, found, to + got, (uint64_t)size);
        got += (uint64_t)size;
    }
    return kind != FFS_CRC_NONE && found != t->checksums[sample] ? -EAGAIN : 0;
}

/* Returns how many of the samples are left, or -EOPNOTSUPP. */
static int64_t read_samples(const ffs_local *t, const int64_t *indices, int64_t n,
                            const int64_t *edges, uint8_t *buffer, uint8_t *const *dests,
                            int64_t *left)
{
    int64_t count = 0, shard = 0;
    int missed = 0;
    bool ask = false;
    for (int64_t k = 0; k < n; k++) {
        int64_t sample = index_of(indices, k);
        left[count++] = k; /* taken back if it is read */
        if (missed == MOST_MISSES || (uint64_t)sample >= (uint64_t)t->sample_count ||
            length_of(t, sample) != (uint64_t)(edges[k + 1] - edges[k]))
            continue;
        shard = shard_of(t, sample, shard);
        if (!through_cache(t, shard, t->offsets[sample]))
            continue;
        int known = ask ? is_cached(t->fds[shard], t->offsets[sample], length_of(t, sample)) : 1;
        int rc = -EAGAIN;
        if (known < 0)
            missed = MOST_MISSES - 1; /* the kernel does not say */
        else if (known)
            rc = read_cached(t, shard, sample, dests ? dests[k] : buffer + edges[k]);
        if (rc == -EOPNOTSUPP)
            return -EOPNOTSUPP;
        if (!rc)
            count--;
        ask |= rc != 0;
        missed = rc ? missed + 1 : 0;
    }
    return count;
}

int64_t ffs_local_read(ffs_local *t, const int64_t *indices, int64_t n, const int64_t *edges,
                       uint8_t *buffer, uint8_t *const *dests, int64_t *left)
{
    int64_t count = -EOPNOTSUPP, size = edges[n];
    /* ffs_local_close writes `closed` before it looks at `readers`: one of us sees the other. */
    __atomic_fetch_add(&t->readers, 1, __ATOMIC_SEQ_CST);
    if (size <= t->most_at_once && !__atomic_load_n(&t->silent, __ATOMIC_RELAXED) &&
        !__atomic_load_n(&t->closed, __ATOMIC_SEQ_CST)) {
        count = read_samples(t, indices, n, edges, buffer, dests, left);
        if (count == -EOPNOTSUPP)
            __atomic_store_n(&t->silent, 1, __ATOMIC_RELAXED);
    }
    __atomic_fetch_sub(&t->readers, 1, __ATOMIC_RELEASE);
    if (count < 0) {
        for (int64_t k = 0; k < n; k++)
            left[k] = k;
        return n;
    }
    for (int64_t k = 0; k < count; k++)
        size -= edges[left[k] + 1] - edges[left[k]];
    __atomic_fetch_add(&t->count, n - count, __ATOMIC_RELAXED);
    __atomic_fetch_add(&t->size, size, __ATOMIC_RELAXED);
    return count;
}

void ffs_local_close(ffs_local *t)
{
    __atomic_store_n(&t->closed, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&t->readers, __ATOMIC_SEQ_CST))
        sched_yield(); /* no reader waits for a device */
}
