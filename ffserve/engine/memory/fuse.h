/* Requests of /dev/fuse: those that can be answered from the arena are answered here.
 *
 * For a view of record files (view/serving.py). A program that reads files of 100 KiB asks for one
 * after the other, so an answer is given in the time of two system calls and a copy, without Python.
 */
#ifndef FFSERVE_FUSE_H
#define FFSERVE_FUSE_H
#include <stdint.h>

#include "shm.h"

/* cdef */
/* What one thread needs. The arrays are the caller's.
 * samples[k]: the sample that node k + 1 is, or -1. first_node: of sample 0 among the nodes that
 * follow from numbers. request: for the request that is not answered here, and content for a
 * sample. hits: the samples that were answered, hit_count of them, with hit_size bytes. */
typedef struct {
    int32_t device;
    const int64_t *samples;
    uint64_t named_count, first_node;
    uint8_t *request, *content;
    uint64_t request_size, content_size;
    int64_t *hits;
    int64_t hits_room, hit_count, hit_size;
} ffs_fuse;

/* Wait for requests, and answer reads that take the whole of a sample that is in memory, until there
 * is another request, which `request` then has. view: of the samples; NULL: none is in memory.
 * Returns the size of the request, 0 when `hits` is full, or -errno of read(2). */
int64_t ffs_fuse_next(ffs_fuse *fuse, const ffs_view *view);
/* end cdef */
#endif
