/* io_uring: one ring, and one thread that alone uses it.
 *
 * Setup flags are an allow-list: SINGLE_ISSUER | DEFER_TASKRUN (Linux 6.1) runs completions only when
 * this thread asks for them; else COOP_TASKRUN (5.19); else none. SQPOLL and IOPOLL cost more than
 * they save here. NO_SQARRAY must never be set: liburing 2.3 writes to the array that it omits.
 *
 * An eventfd announces new work. While the thread waits and the ring has room, a read of the eventfd
 * is pending in the ring, so work that arrives during the wait is issued at once. When the ring is
 * full there is nothing to issue, and the thread waits for several completions at a time.
 *
 * The thread enters the ring by its registered number (Linux 5.18), not by its descriptor: a program
 * that closes or replaces descriptors which are not its own cannot take the ring away while reads are
 * in flight. If that is not available and the ring is lost, the engine is broken and nothing that the
 * kernel may still write to is freed.
 */
#ifdef FFS_HAVE_URING
#include <assert.h>
#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend.h"

#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

#define FIRST_READS 8
#define FILE_TABLE 4096 /* ids beyond it use their plain descriptor */

/* ---- registered buffers (IORING_REGISTER_BUFFERS) ------------------------------------------
 * The pages of a registered buffer are pinned once and not looked up for every read. The table has
 * one entry for the bounce buffer of each op and one for each piece of the arena. A read whose bytes
 * all go to one entry is issued by its number; any other is issued plainly, so a refusal
 * (RLIMIT_MEMLOCK) costs speed and nothing else. Only the I/O thread registers: a ring for a single
 * issuer accepts it from no other. */

/* What is registered of a bounce buffer is pinned, so that is twice what reads need at most: a process
 * that reads small records keeps to the few pages that it touches. */
#define LEAST_BOUND 8192
#define MOST_PIECES 8192 /* of the arena: 1 TiB; reads beyond it are issued plainly */

typedef struct {
    uint32_t *bounces; /* by op: bytes of its bounce buffer that are registered */
    uint32_t pieces;   /* of the arena, registered from its start */
    uint64_t end;      /* of the last piece, in the arena */
    bool refused;      /* the kernel accepts no more */
} buffers;

/* Register one buffer, or remove it (size 0). */
static int put(struct io_uring *ring, uint32_t number, uint8_t *start, uint64_t size)
{
    struct iovec buffer = {start, size};
    int rc = io_uring_register_buffers_update_tag(ring, number, &buffer, NULL, 1);
    return rc < 0 ? rc : rc == 1 ? 0 : -EINVAL;
}

static bool bounce_is_bound(ffs_engine *e, buffers *b, struct io_uring *ring, const ffs_op *op)
{
    uint32_t number = (uint32_t)(op - e->ops), size = LEAST_BOUND;
    uint64_t end = (uint64_t)(op->to - op->bounce) + op->size;
    if (end <= b->bounces[number])
        return true;
    if (b->refused)
        return false;
    while (size < end)
        size *= 2;
    b->refused = put(ring, number, op->bounce, size) != 0;
    if (b->refused)
        return false;
    atomic_fetch_add_explicit(&e->registered, size - b->bounces[number], memory_order_relaxed);
    b->bounces[number] = size;
    return true;
}

/* Give back the bounce buffer of a spare op. */
static void give_back(ffs_engine *e, buffers *b, struct io_uring *ring, ffs_op *op)
{
    uint32_t number = (uint32_t)(op - e->ops);
    if (b->bounces && b->bounces[number]) {
        if (put(ring, number, NULL, 0))
            return; /* the kernel still has its pages */
        atomic_fetch_sub_explicit(&e->registered, b->bounces[number], memory_order_relaxed);
        b->bounces[number] = 0;
    }
    ffs_op_free(op);
}

static void free_buffers(buffers *b)
{
    free(b->bounces);
    b->bounces = NULL;
}

/* 0, or -errno when the kernel accepts no registered buffer at all. */
static int open_buffers(ffs_engine *e, buffers *b, struct io_uring *ring)
{
    b->bounces = calloc(e->op_count, sizeof *b->bounces);
    int rc = b->bounces ? 0 : -ENOMEM;
    if (!rc)
        rc = io_uring_register_buffers_sparse(ring, e->op_count + MOST_PIECES);
    if (!rc)
        rc = ffs_op_map_bounce(&e->ops[0]);
    if (!rc)
        rc = put(ring, 0, e->ops[0].bounce, LEAST_BOUND);
    if (rc) {
        free_buffers(b);
        return rc;
    }
    b->bounces[0] = LEAST_BOUND;
    atomic_store(&e->registered, LEAST_BOUND);
    return 0;
}

/* Where the next piece to register ends, or 0. */
static uint64_t next_piece(const buffers *b, uint64_t end, uint64_t ready)
{
    uint64_t start = b->pieces * FFS_PIECE;
    uint64_t stop = end < start + FFS_PIECE ? end : start + FFS_PIECE;
    return b->refused || b->pieces == MOST_PIECES || start >= end || stop > ready ? 0 : stop;
}

/* Follow ffs_engine_arena_ready, one piece per call. */
static void follow_arena(ffs_engine *e, buffers *b, struct io_uring *ring)
{
    if (!b->bounces || !atomic_load_explicit(&e->arena_changed, memory_order_relaxed) ||
        !atomic_exchange(&e->arena_changed, false))
        return;
    pthread_mutex_lock(&e->lock);
    uint64_t floor = e->arena_floor, ready = e->arena_ready, end = e->arena_end;
    e->arena_floor = UINT64_MAX;
    pthread_mutex_unlock(&e->lock);
    /* The last piece was shorter than the others and the arena grew: it is registered again. */
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
        atomic_store(&e->arena_changed, true); /* the next call registers it */
}

/* The number of the buffer that holds this attempt's destination, or -1. */
static int buffer_of(ffs_engine *e, buffers *b, struct io_uring *ring, const ffs_op *op)
{
    if (!b->bounces)
        return -1;
    if (op->base == op->bounce)
        return bounce_is_bound(e, b, ring, op) ? (int)(op - e->ops) : -1;
    /* Before the change was followed, pages that are registered may be gone. */
    if (atomic_load_explicit(&e->arena_changed, memory_order_acquire))
        return -1;
    uint64_t place = (uint64_t)(op->to - e->arena);
    uint64_t piece = place / FFS_PIECE;
    if (piece >= b->pieces || place + op->size > b->end ||
        (place + op->size - 1) / FFS_PIECE != piece)
        return -1;
    return (int)(e->op_count + piece);
}

/* ---- the ring ---------------------------------------------------------------------------- */
typedef struct {
    struct io_uring ring;
    uint32_t *registered; /* by file id: the generation in the ring's table */
    uint32_t table;
    buffers buffers;
    uint64_t wake_count; /* the pending read of wake_fd writes here */
    bool armed;          /* that read is pending */
    bool wake_lost;      /* wake_fd was closed */
    bool lost;           /* the ring was */
    dev_t device;        /* of the ring's descriptor, and its inode */
    ino_t inode;
    uint32_t flying, landed_count, spare_count;
    ffs_op **landed; /* op_count pointers each */
    ffs_op **spare;  /* a stack: the last buffer used is most likely in cache */
} uring;

static int setup(struct io_uring *ring, uint32_t depth)
{
    static const unsigned ladder[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_SUBMIT_ALL |
            IORING_SETUP_CLAMP,
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SUBMIT_ALL | IORING_SETUP_CLAMP,
        IORING_SETUP_CLAMP,
    };
    int rc = -EINVAL;
    for (size_t k = 0; rc == -EINVAL && k < sizeof ladder / sizeof *ladder; k++)
        rc = io_uring_queue_init(depth + 2, ring, ladder[k]);
    return rc;
}

/* Fixed files save two atomic operations per read. The table may not be larger than RLIMIT_NOFILE,
 * which liburing would raise without the program's knowledge. */
static uint32_t make_table(struct io_uring *ring)
{
    struct rlimit limit;
    uint32_t size = FILE_TABLE;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < size)
        size = (uint32_t)limit.rlim_cur;
    return io_uring_register_files_sparse(ring, size) ? 0 : size;
}

static void release(uring *u)
{
    free_buffers(&u->buffers);
    free(u->registered);
    free(u->landed);
    free(u->spare);
    free(u);
}

/* Whether the ring's descriptor still refers to the ring. */
static bool own_fd(const uring *u)
{
    struct stat now;
    return fstat(u->ring.ring_fd, &now) == 0 && now.st_dev == u->device && now.st_ino == u->inode;
}

static void uring_stop(void *state)
{
    uring *u = state;
    if (u->lost)
        return;
    if (own_fd(u))
        io_uring_queue_exit(&u->ring);
    release(u);
}

static int uring_start(ffs_engine *e, uint32_t thread, void **state)
{
    (void)thread;
    uring *u = calloc(1, sizeof *u);
    if (!u)
        return -ENOMEM;
    u->registered = calloc(FILE_TABLE, sizeof *u->registered);
    u->landed = calloc(e->op_count, sizeof *u->landed);
    u->spare = calloc(e->op_count, sizeof *u->spare);
    int rc = u->registered && u->landed && u->spare ? setup(&u->ring, e->depth) : -ENOMEM;
    if (rc) {
        release(u);
        return rc;
    }
    struct stat own;
    if (fstat(u->ring.ring_fd, &own) == 0) {
        u->device = own.st_dev;
        u->inode = own.st_ino;
    }
    if (*u->ring.sq.kring_entries < e->depth + 2) {
        uring_stop(u);
        return -EINVAL;
    }
    io_uring_register_ring_fd(&u->ring); /* an older kernel refuses; then the descriptor is used */
    io_uring_ring_dontfork(&u->ring);
    rc = e->registers ? open_buffers(e, &u->buffers, &u->ring) : 0;
    if (rc) {
        uring_stop(u);
        return rc;
    }
    u->table = make_table(&u->ring);
    for (uint32_t k = 0; k < e->op_count; k++)
        u->spare[u->spare_count++] = &e->ops[k];
    *state = u;
    return 0;
}

static void uring_forget(void *state)
{
    uring *u = state;
    if (own_fd(u))
        close(u->ring.ring_fd);
    release(u);
}

static bool fixed(uring *u, const ffs_op *op)
{
    if ((uint32_t)op->file >= u->table)
        return false;
    if (u->registered[op->file] == op->generation)
        return true;
    int fd = op->fd;
    /* If this fails (a descriptor that is not open), the read fails in the same way. */
    if (io_uring_register_files_update(&u->ring, (unsigned)op->file, &fd, 1) != 1)
        return false;
    u->registered[op->file] = op->generation;
    return true;
}

static void drop_removed(ffs_engine *e, uring *u)
{
    if (!atomic_load_explicit(&e->files_removed, memory_order_relaxed) ||
        !atomic_exchange(&e->files_removed, false))
        return;
    for (uint32_t id = 0; id < u->table; id++) {
        if (!u->registered[id] || ffs_file_generation(e, (int)id) == u->registered[id])
            continue;
        int none = -1;
        io_uring_register_files_update(&u->ring, id, &none, 1);
        u->registered[id] = 0;
    }
}

static void issue(ffs_engine *e, uring *u, ffs_op *op)
{
    bool in_table = fixed(u, op);
    int buffer = buffer_of(e, &u->buffers, &u->ring, op);
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
    assert(sqe); /* the ring has room for depth + 2 */
    io_uring_prep_read(sqe, in_table ? op->file : op->fd, op->to, (unsigned)op->size, op->offset);
    if (buffer >= 0) {
        sqe->opcode = IORING_OP_READ_FIXED;
        sqe->buf_index = (uint16_t)buffer;
        atomic_fetch_add_explicit(&e->fixed, 1, memory_order_relaxed);
    }
    if (in_table)
        sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(sqe, op);
}

static void arm(ffs_engine *e, uring *u)
{
    if (u->armed)
        return;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
    assert(sqe);
    io_uring_prep_read(sqe, e->wake_fd, &u->wake_count, sizeof u->wake_count, 0);
    io_uring_sqe_set_data(sqe, NULL);
    u->armed = true;
}

static void feed(ffs_engine *e, uring *u)
{
    while (u->flying < e->depth && u->spare_count && ffs_take(e, u->spare[u->spare_count - 1])) {
        issue(e, u, u->spare[--u->spare_count]);
        u->flying++;
        /* An idle device starts on the first reads of a batch while the others are prepared: the
         * kernel passes on what one call submits in units of 32, or when it has all of it. */
        unsigned ready = io_uring_sq_ready(&u->ring);
        if (ready >= FIRST_READS && ready >= u->flying - ready)
            io_uring_submit(&u->ring); /* the next call submits what this one did not */
    }
}

static void reap(ffs_engine *e, uring *u)
{
    struct io_uring_cqe *cqe;
    unsigned head, count = 0;
    io_uring_for_each_cqe (&u->ring, head, cqe) {
        ffs_op *op = io_uring_cqe_get_data(cqe);
        count++;
        if (!op) {
            u->armed = false;
            if (cqe->res < 0 && cqe->res != -EAGAIN && cqe->res != -EINTR)
                u->wake_lost = true;
        } else if (ffs_advance(e, op, cqe->res)) {
            issue(e, u, op);
        } else {
            u->landed[u->landed_count++] = op;
            u->flying--;
        }
    }
    io_uring_cq_advance(&u->ring, count);
}

static void settle(ffs_engine *e, uring *u, uint32_t most)
{
    /* In the order of completion, so that batches end in that order. */
    uint32_t count = u->landed_count < most ? u->landed_count : most;
    for (uint32_t k = 0; k < count; k++) {
        ffs_settle(e, u->landed[k]);
        if (ffs_op_is_surplus(u->landed[k]))
            give_back(e, &u->buffers, &u->ring, u->landed[k]);
        u->spare[u->spare_count++] = u->landed[k];
    }
    u->landed_count -= count;
    memmove(u->landed, u->landed + count, u->landed_count * sizeof *u->landed);
    ffs_flush(e);
}

/* The ring is lost: the completion of reads in flight cannot be awaited. */
static void lose(ffs_engine *e, uring *u)
{
    u->lost = true;
    ffs_break(e, -EIO);
    settle(e, u, u->landed_count);
    ffs_lose(e);
}

/* How many completions to wait for: none while landed reads are not settled, one when work may
 * arrive, several when the ring is full and more reads are queued. */
static unsigned wanted(ffs_engine *e, uring *u)
{
    if (u->landed_count)
        return 0;
    if (u->flying == e->depth)
        return ffs_queued(e) && e->depth >= 16 ? e->depth / 8 : 1;
    if (!ffs_stopping(e) && !u->wake_lost) {
        arm(e, u);
        if (!ffs_sleep(e))
            return 0;
    }
    return 1;
}

static void uring_loop(ffs_engine *e, void *state)
{
    uring *u = state;
    for (;;) {
        drop_removed(e, u);
        follow_arena(e, &u->buffers, &u->ring);
        feed(e, u);
        if (u->wake_lost)
            ffs_break(e, -EBADF);
        if ((ffs_stopping(e) || u->wake_lost) && !u->flying && !u->landed_count && !u->armed)
            return;
        unsigned count = wanted(e, u);
        int rc = count ? io_uring_submit_and_wait(&u->ring, count)
                       : io_uring_submit_and_get_events(&u->ring);
        ffs_awake(e);
        if (rc < 0 && rc != -EINTR && rc != -EAGAIN && rc != -EBUSY && rc != -ETIME) {
            lose(e, u);
            return;
        }
        if (u->landed_count)
            settle(e, u, FFS_STRETCH);
        reap(e, u);
    }
}

const ffs_backend ffs_backend_uring = {
    .start = uring_start,
    .loop = uring_loop,
    .stop = uring_stop,
    .forget = uring_forget,
};
#else
typedef int ffs_no_uring; /* ISO C requires a declaration in every file */
#endif
