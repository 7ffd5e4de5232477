/* Memory that a ring knows (IORING_REGISTER_BUFFERS): its pages are pinned once instead of being
 * looked up for every read.
 *
 * The table has one place for the bounce buffer of each op and one for each piece of the arena. A
 * read whose bytes all go to one registered place is issued by its number; any other is issued
 * plainly, so a refusal (RLIMIT_MEMLOCK) costs speed and nothing else. Only the I/O thread calls
 * these functions: a ring for a single issuer takes registrations from no other.
 */
#ifndef FFSERVE_BUFFERS_H
#define FFSERVE_BUFFERS_H
#ifdef FFS_HAVE_URING
#include <liburing.h>

#include "backend.h"

/* A bounce buffer is pinned whole, so only reads that fill a good part of it register it: a process
 * that reads small records keeps the few pages that it touches. */
#define FFS_BOUNCE_WORTH (FFS_BOUNCE_SIZE / 4)
#define FFS_MOST_PIECES 8192 /* of the arena: 1 TiB; what lies beyond is read plainly */

typedef struct {
    bool *bounces;          /* by op: whether its bounce buffer is registered */
    uint32_t op_count;
    uint32_t pieces;        /* of the arena, registered from its start */
    uint64_t end;           /* of the last piece, in the arena */
    bool refused;           /* the kernel takes no more */
} ffs_buffers;

/* 0, or -errno when the kernel takes no registered buffers, not even one. */
int ffs_buffers_open(ffs_engine *e, ffs_buffers *b, struct io_uring *ring);
void ffs_buffers_free(ffs_buffers *b);
/* Follow ffs_engine_arena_ready, one piece a call. */
void ffs_buffers_follow(ffs_engine *e, ffs_buffers *b, struct io_uring *ring);
/* The number of the buffer that this attempt's bytes go to, or -1. */
int ffs_buffer_of(ffs_engine *e, ffs_buffers *b, struct io_uring *ring, const ffs_op *op);
#endif
#endif
