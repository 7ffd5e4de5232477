/* See buffers.h. */
#ifdef FFS_HAVE_URING
#include <errno.h>
#include <stdlib.h>

#include "buffers.h"

static int put(struct io_uring *ring, uint32_t number, uint8_t *start, uint64_t size)
{
    struct iovec place = {start, size};
    int rc = io_uring_register_buffers_update_tag(ring, number, &place, NULL, 1);
    return rc < 0 ? rc : rc == 1 ? 0 : -EINVAL;
}

static bool bounce_is_bound(ffs_engine *e, ffs_buffers *b, struct io_uring *ring, const ffs_op *op)
{
    uint32_t number = (uint32_t)(op - e->ops);
    if (b->bounces[number])
        return true;
    if (b->refused || op->size < FFS_BOUNCE_WORTH)
        return false;
    b->refused = put(ring, number, op->bounce, FFS_BOUNCE_SIZE) != 0;
    b->bounces[number] = !b->refused;
    if (!b->refused)
        atomic_fetch_add_explicit(&e->registered, FFS_BOUNCE_SIZE, memory_order_relaxed);
    return !b->refused;
}

int ffs_buffers_open(ffs_engine *e, ffs_buffers *b, struct io_uring *ring)
{
    b->op_count = e->op_count;
    b->bounces = calloc(e->op_count, sizeof *b->bounces);
    int rc = b->bounces ? 0 : -ENOMEM;
    if (!rc)
        rc = io_uring_register_buffers_sparse(ring, e->op_count + FFS_MOST_PIECES);
    if (!rc)
        rc = ffs_op_map_bounce(&e->ops[0]);
    if (!rc)
        rc = put(ring, 0, e->ops[0].bounce, FFS_BOUNCE_SIZE);
    if (rc) {
        ffs_buffers_free(b);
        return rc;
    }
    b->bounces[0] = true;
    atomic_store(&e->registered, FFS_BOUNCE_SIZE);
    return 0;
}

void ffs_buffers_free(ffs_buffers *b)
{
    free(b->bounces);
    b->bounces = NULL;
}

/* Where the next piece ends, 0 if there is none yet. */
static uint64_t next_piece(const ffs_buffers *b, uint64_t end, uint64_t ready)
{
    uint64_t start = b->pieces * FFS_PIECE;
    uint64_t stop = end < start + FFS_PIECE ? end : start + FFS_PIECE;
    return b->refused || b->pieces == FFS_MOST_PIECES || start >= end || stop > ready ? 0 : stop;
}

void ffs_buffers_follow(ffs_engine *e, ffs_buffers *b, struct io_uring *ring)
{
    if (!b->bounces || !atomic_load_explicit(&e->arena_changed, memory_order_relaxed) ||
        !atomic_exchange(&e->arena_changed, false))
        return;
    pthread_mutex_lock(&e->lock);
    uint64_t floor = e->arena_floor, ready = e->arena_ready, end = e->arena_end;
    e->arena_floor = UINT64_MAX;
    pthread_mutex_unlock(&e->lock);
    /* The last piece was shorter than the others and the arena grew: it is registered anew. */
    if (b->end % FFS_PIECE && end > b->end && floor >= b->end)
        floor = b->end - 1;
    while (b->pieces && b->end > floor) {
        uint64_t start = --b->pieces * FFS_PIECE;
        put(ring, e->op_count + b->pieces, NULL, 0);
        atomic_fetch_sub_explicit(&e->registered, b->end - start, memory_order_relaxed);
        b->end = start;
    }
    uint64_t start = b->pieces * FFS_PIECE, stop = next_piece(b, end, ready);
    if (!stop)
        return;
    b->refused = put(ring, e->op_count + b->pieces, e->arena + start, stop - start) != 0;
    if (b->refused)
        return;
    atomic_fetch_add_explicit(&e->registered, stop - start, memory_order_relaxed);
    b->pieces++;
    b->end = stop;
    if (next_piece(b, end, ready))
        atomic_store(&e->arena_changed, true); /* in the next round */
}

int ffs_buffer_of(ffs_engine *e, ffs_buffers *b, struct io_uring *ring, const ffs_op *op)
{
    if (!b->bounces)
        return -1;
    if (op->base == op->bounce)
        return bounce_is_bound(e, b, ring, op) ? (int)(op - e->ops) : -1;
    /* Until the change was followed, what is registered may be pages that are no more. */
    if (atomic_load_explicit(&e->arena_changed, memory_order_acquire))
        return -1;
    uint64_t place = (uint64_t)(op->to - e->arena);
    uint64_t piece = place / FFS_PIECE;
    if (piece >= b->pieces || place + op->size > b->end ||
        (place + op->size - 1) / FFS_PIECE != piece)
        return -1;
    return (int)(e->op_count + piece);
}
#else
typedef int ffs_no_buffers;
#endif
