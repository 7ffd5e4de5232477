/* Linux AIO (io_submit), where io_uring is not permitted: Docker's default seccomp profile permits
 * this one. It uses system calls directly and needs no library.
 *
 * Every completion also increments wake_fd (IOCB_FLAG_RESFD), the eventfd that announces new work, so
 * one blocking read waits for both. The kernel queues the event before it increments, so no event is
 * missed. When all ops are in flight there is nothing to issue, and the thread waits for several
 * events instead; the increments left over cost one idle iteration later.
 */
#ifdef FFS_HAVE_AIO
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "backend.h"

typedef struct {
    aio_context_t context;
    uint32_t depth, flying; /* flying: issued or ready to be */
    uint32_t ready_count, landed_count, spare_count;
    struct iocb *blocks; /* one per op, with the same index */
    struct iocb **ready; /* to be issued */
    struct io_event *events;
    ffs_op **landed, **spare;
} aio;

static void aio_forget(void *state)
{
    aio *a = state; /* the context belongs to the parent's address space */
    free(a->blocks);
    free(a->ready);
    free(a->events);
    free(a->landed);
    free(a->spare);
    free(a);
}

static void aio_stop(void *state)
{
    aio *a = state;
    syscall(SYS_io_destroy, a->context);
    aio_forget(a);
}

static int aio_start(ffs_engine *e, uint32_t thread, void **state)
{
    (void)thread;
    aio *a = calloc(1, sizeof *a);
    if (!a)
        return -ENOMEM;
    a->depth = e->depth;
    a->blocks = calloc(e->op_count, sizeof *a->blocks);
    a->ready = calloc(e->depth, sizeof *a->ready);
    a->events = calloc(e->depth, sizeof *a->events);
    a->landed = calloc(e->op_count, sizeof *a->landed);
    a->spare = calloc(e->op_count, sizeof *a->spare);
    bool room = a->blocks && a->ready && a->events && a->landed && a->spare;
    int rc = room ? 0 : -ENOMEM;
    if (!rc && syscall(SYS_io_setup, e->depth, &a->context) < 0)
        rc = -errno;
    if (rc) {
        aio_forget(a);
        return rc;
    }
    for (uint32_t k = 0; k < e->op_count; k++)
        a->spare[a->spare_count++] = &e->ops[k];
    *state = a;
    return 0;
}

static void prepare(ffs_engine *e, aio *a, ffs_op *op)
{
    struct iocb *block = &a->blocks[op - e->ops];
    memset(block, 0, sizeof *block);
    block->aio_data = (uint64_t)(uintptr_t)op;
    block->aio_lio_opcode = IOCB_CMD_PREAD;
    block->aio_fildes = (uint32_t)op->fd;
    block->aio_buf = (uint64_t)(uintptr_t)op->to;
    block->aio_nbytes = op->size;
    block->aio_offset = (int64_t)op->offset;
    block->aio_flags = IOCB_FLAG_RESFD;
    block->aio_resfd = (uint32_t)e->wake_fd;
    a->ready[a->ready_count++] = block;
}

static void ended(ffs_engine *e, aio *a, ffs_op *op, int64_t result)
{
    if (ffs_advance(e, op, result)) {
        prepare(e, a, op);
    } else {
        a->landed[a->landed_count++] = op;
        a->flying--;
    }
}

/* Issue what is ready. The kernel accepts a prefix; an error is that of the first read. */
static void issue(ffs_engine *e, aio *a)
{
    while (a->ready_count) {
        long taken = syscall(SYS_io_submit, a->context, (long)a->ready_count, a->ready);
        if (taken < 0 && errno == EINTR)
            continue;
        if (taken < 0 && errno == EAGAIN) {
            /* The kernel is short of requests: continue when some of ours have ended. */
            if (a->ready_count < a->flying)
                return;
            nanosleep(&(struct timespec){0, 1000000}, NULL);
            continue;
        }
        ffs_op *refused = NULL;
        int error = errno;
        if (taken < 0) {
            refused = (ffs_op *)(uintptr_t)a->ready[0]->aio_data;
            taken = 1;
        }
        a->ready_count -= (uint32_t)taken;
        memmove(a->ready, a->ready + taken, a->ready_count * sizeof *a->ready);
        if (refused)
            ended(e, a, refused, -error);
    }
}

static int reap(ffs_engine *e, aio *a, long wanted)
{
    struct timespec now = {0, 0};
    long count = syscall(SYS_io_getevents, a->context, wanted, (long)a->depth, a->events,
                         wanted ? NULL : &now);
    if (count < 0)
        return errno == EINTR ? 0 : -errno;
    for (long k = 0; k < count; k++)
        ended(e, a, (ffs_op *)(uintptr_t)a->events[k].data, a->events[k].res);
    return 0;
}

static void settle(ffs_engine *e, aio *a, uint32_t most)
{
    uint32_t count = a->landed_count < most ? a->landed_count : most;
    for (uint32_t k = 0; k < count; k++) {
        ffs_settle(e, a->landed[k]);
        if (ffs_op_is_surplus(a->landed[k]))
            ffs_op_free(a->landed[k]);
        a->spare[a->spare_count++] = a->landed[k];
    }
    a->landed_count -= count;
    memmove(a->landed, a->landed + count, a->landed_count * sizeof *a->landed);
    ffs_flush(e);
}

/* Wait for completions, or for those and new work. */
static int wait_for_more(ffs_engine *e, aio *a)
{
    uint32_t issued = a->flying - a->ready_count;
    if (a->landed_count)
        return reap(e, a, 0);
    if (issued && (a->flying == a->depth || a->ready_count || ffs_stopping(e))) {
        bool many = issued == a->depth && ffs_queued(e) && a->depth >= 16;
        return reap(e, a, many ? a->depth / 8 : 1);
    }
    if (!ffs_sleep(e))
        return 0;
    uint64_t count;
    ssize_t got = read(e->wake_fd, &count, sizeof count);
    int error = got < 0 && errno != EINTR ? -errno : 0;
    ffs_awake(e);
    return error ? error : reap(e, a, 0);
}

/* Other code closed wake_fd. The context has no descriptor, so reads in flight can be awaited. */
static void lose(ffs_engine *e, aio *a)
{
    ffs_break(e, -EIO);
    int rc = 0;
    while (a->flying && !rc) {
        issue(e, a);
        if (a->flying)
            rc = reap(e, a, 1);
        settle(e, a, a->landed_count);
    }
    ffs_lose(e);
}

static void aio_loop(ffs_engine *e, void *state)
{
    aio *a = state;
    for (;;) {
        atomic_store(&e->files_removed, false); /* there is no table of files */
        while (a->flying < a->depth && a->spare_count &&
               ffs_take(e, a->spare[a->spare_count - 1])) {
            prepare(e, a, a->spare[--a->spare_count]);
            a->flying++;
        }
        issue(e, a);
        settle(e, a, FFS_STRETCH);
        if (ffs_stopping(e) && !a->flying && !a->landed_count)
            return;
        int rc = wait_for_more(e, a);
        if (rc) {
            lose(e, a);
            return;
        }
    }
}

const ffs_backend ffs_backend_aio = {
    .start = aio_start,
    .loop = aio_loop,
    .stop = aio_stop,
    .forget = aio_forget,
};
#else
typedef int ffs_no_aio;
#endif
