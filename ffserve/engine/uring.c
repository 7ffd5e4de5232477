/* io_uring, one ring and one thread that alone touches it.
 *
 * Flags by allow-list: SINGLE_ISSUER | DEFER_TASKRUN (Linux 6.1) runs completions only when this
 * thread asks for them; then COOP_TASKRUN (5.19), then none. SQPOLL and IOPOLL cost more than they
 * give here. NO_SQARRAY must never be set: liburing 2.3 writes to an array that is not there.
 *
 * New work is announced by an eventfd of which a read is always pending in the ring while the
 * thread waits with room to spare, so work that arrives during a wait is issued at once. When the
 * ring is full there is nothing to issue, and the thread asks for several completions at a time.
 *
 * The ring is entered by its number in a table of the thread's own (Linux 5.18), not by its
 * descriptor: a program that closes descriptors which are not its own, or puts something else in
 * their place, cannot take it away while reads are in flight. Where that cannot be had and the ring
 * is lost, nothing that the kernel knows of is given back, and the engine is broken.
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
#include "buffers.h"

#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

#define FIRST_READS 8
#define FILE_TABLE 4096 /* ids beyond it use their plain descriptor */

typedef struct {
    struct io_uring ring;
    uint32_t *registered;   /* by file id: the generation that stands in the ring's table */
    uint32_t table;
    ffs_buffers buffers;
    uint64_t wake_count;    /* the pending read of wake_fd writes here */
    bool armed, deaf, lost;
    dev_t device;           /* of the ring's descriptor, and its inode */
    ino_t inode;
    uint32_t flying, landed_count, spare_count;
    ffs_op **landed;        /* op_count pointers each */
    ffs_op **spare;         /* a stack: the last buffer used is the warmest */
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

/* Fixed files spare two atomic operations on the file a read. The table may not be larger than
 * RLIMIT_NOFILE; liburing would raise that limit behind the program's back. */
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
    ffs_buffers_free(&u->buffers);
    free(u->registered);
    free(u->landed);
    free(u->spare);
    free(u);
}

/* Whether the ring's descriptor is the one that it got. */
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
    io_uring_register_ring_fd(&u->ring); /* an older kernel refuses, and keeps to the descriptor */
    io_uring_ring_dontfork(&u->ring);
    rc = e->registers ? ffs_buffers_open(e, &u->buffers, &u->ring) : 0;
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
    /* A refusal (a descriptor that is not open) shows again, as the read's own result. */
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
    int buffer = ffs_buffer_of(e, &u->buffers, &u->ring, op);
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
    while (u->flying < e->depth && u->spare_count &&
           ffs_take(e, u->spare[u->spare_count - 1])) {
        issue(e, u, u->spare[--u->spare_count]);
        u->flying++;
        /* An idle device begins with the first reads of a batch while the others are prepared: the
         * kernel hands over what one call submits in pieces of 32 or when it has all of it. */
        unsigned ready = io_uring_sq_ready(&u->ring);
        if (ready >= FIRST_READS && ready >= u->flying - ready)
            io_uring_submit(&u->ring); /* what it did not take goes with the next */
    }
}

static void reap(ffs_engine *e, uring *u)
{
    struct io_uring_cqe *cqe;
    unsigned head, count = 0;
    io_uring_for_each_cqe(&u->ring, head, cqe) {
        ffs_op *op = io_uring_cqe_get_data(cqe);
        count++;
        if (!op) {
            u->armed = false;
            if (cqe->res < 0 && cqe->res != -EAGAIN && cqe->res != -EINTR)
                u->deaf = true; /* wake_fd is gone */
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
    /* In the order of arrival, so that batches end in it. */
    uint32_t count = u->landed_count < most ? u->landed_count : most;
    for (uint32_t k = 0; k < count; k++) {
        ffs_settle(e, u->landed[k]);
        u->spare[u->spare_count++] = u->landed[k];
    }
    u->landed_count -= count;
    memmove(u->landed, u->landed + count, u->landed_count * sizeof *u->landed);
    ffs_flush(e);
}

/* The ring cannot be entered any more. What was in flight cannot be awaited. */
static void lose(ffs_engine *e, uring *u)
{
    u->lost = true;
    ffs_break(e, -EIO);
    settle(e, u, u->landed_count);
    ffs_lose(e);
}

/* How many completions to wait for: none while something has landed that is not settled, one when
 * work may arrive, several when the device's queue is full and there is more to come. */
static unsigned wanted(ffs_engine *e, uring *u)
{
    if (u->landed_count)
        return 0;
    if (u->flying == e->depth)
        return ffs_queued(e) && e->depth >= 16 ? e->depth / 8 : 1;
    if (!ffs_stopping(e) && !u->deaf) {
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
        ffs_buffers_follow(e, &u->buffers, &u->ring);
        feed(e, u);
        if (u->deaf)
            ffs_break(e, -EBADF);
        if ((ffs_stopping(e) || u->deaf) && !u->flying && !u->landed_count && !u->armed)
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
typedef int ffs_no_uring; /* ISO C wants something in every file */
#endif
