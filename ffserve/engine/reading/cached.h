/* Records in the page cache: which they are, and reading them in the calling thread.
 *
 * For a process that reads by itself, without a daemon: one call looks up a batch in the tables of
 * its source, copies what is in memory to its destination and verifies it there. An engine reads the
 * rest.
 */
#ifndef FFSERVE_CACHED_H
#define FFSERVE_CACHED_H
#include <stdint.h>

/* cdef */
/* The tables of a source, the caller's. Samples are numbered through all shards. */
typedef struct {
    int64_t sample_count, shard_count;
    const uint64_t *offsets; /* by sample: of the payload in its file */
    const uint32_t *lengths; /* NULL: long_lengths has them */
    const uint64_t *long_lengths;
    const uint32_t *checksums;
    const int64_t *firsts; /* by shard: its first sample, rising from 0 */
    const int32_t *fds;    /* opened without O_DIRECT */
    const int32_t *kinds;  /* of checksum */
    const uint64_t *seeds; /* see ffs_through_cache */
    const uint64_t *limits;
    int64_t most_at_once; /* bytes of samples that one call may read */
    int32_t in_memory;    /* all files lie in memory (tmpfs) */
    int32_t silent;       /* the file system cannot tell what is in memory: nothing is read here */
    int32_t readers;      /* threads that are reading */
    int32_t closed;
    int64_t count, size; /* samples that were read, and their bytes */
} ffs_local;

/* Running sums of the lengths, n + 1. Returns 0, or FFS_ERANGE when an index is outside. */
int ffs_local_edges(const ffs_local *t, const int64_t *indices, int64_t n, int64_t *edges);
/* Read samples that are in the page cache, and verify them: each to dests[k], or, if that is NULL,
 * to buffer + edges[k]. Waits for no device. A read that misses a page starts to fetch it, so after
 * the first miss the kernel is asked about each record before it is read (Linux 6.5; else the first
 * miss is the end), and after a few misses in a row no more records are looked for. Indices and
 * edges are those of ffs_local_edges. left: the positions of samples for an engine, which also tells
 * what is wrong with them, and of indices that were changed after ffs_local_edges; all of them if the
 * file system cannot tell what is in memory, if they are more than `most_at_once` bytes, or after
 * ffs_local_close. Returns how many these are. */
int64_t ffs_local_read(ffs_local *t, const int64_t *indices, int64_t n, const int64_t *edges,
                       uint8_t *buffer, uint8_t *const *dests, int64_t *left);
/* Let ffs_local_read read no more, and wait for the threads that are in it: the files may be closed
 * then. */
void ffs_local_close(ffs_local *t);
/* chosen[k]: records at this offset of this shard are read through the page cache. A region of a
 * file (1 << FFS_REGION_BITS bytes) is chosen if the hash of its number and its shard's seed, 32
 * bits, is below the shard's limit. */
#define FFS_REGION_BITS 20
void ffs_through_cache(const ffs_local *t, const int64_t *shards, const int64_t *offsets, int64_t n,
                       uint8_t *chosen);

/* Pages of an extent that are in the page cache (cachestat, Linux 6.5), or -errno: -ENOSYS, or
 * -EPERM for a file that the process neither owns nor may write (Linux 6.14). */
int64_t ffs_cached_pages(int fd, uint64_t offset, uint64_t length);
/* some[k]: of `samples` pages at most, evenly spaced over [begins[k], ends[k]) of file k, more than
 * this share is in the page cache. 0 where the kernel does not say. */
void ffs_some_cached(const int32_t *fds, const int64_t *begins, const int64_t *ends, int64_t n,
                     int64_t samples, double share, uint8_t *some);
/* cached[k]: extent [begins[k], ends[k]) of fds[k] is wholly in the page cache; 0 where fds[k] is
 * -1. Returns how many are, or -errno as ffs_cached_pages, of the first extent that cannot be asked
 * about. */
int64_t ffs_cached_extents(const int32_t *fds, const int64_t *begins, const int64_t *ends,
                           int64_t n, uint8_t *cached);
/* end cdef */
#endif
