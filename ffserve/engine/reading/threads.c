/* A pool of threads that call pread: the last resort. It works everywhere and costs about twice the
 * CPU of a ring for nine tenths of its reads. Each thread has one op, so the depth is the number of
 * threads. */
#include <errno.h>
#include <unistd.h>

#include "backend.h"

static int threads_start(ffs_engine *e, uint32_t thread, void **state)
{
    *state = &e->ops[thread];
    return 0;
}

static void threads_loop(ffs_engine *e, void *state)
{
    ffs_op *op = state;
    while (ffs_await_work(e)) {
        while (ffs_take(e, op)) {
            int64_t result;
            do {
                result = pread(op->fd, op->to, op->size, (off_t)op->offset);
                if (result < 0)
                    result = -errno;
            } while (ffs_advance(e, op, result));
            ffs_settle(e, op);
            if (ffs_op_is_surplus(op))
                ffs_op_free(op);
            ffs_flush(e);
        }
    }
}

static void threads_nothing(void *state)
{
    (void)state;
}

const ffs_backend ffs_backend_threads = {
    .start = threads_start,
    .loop = threads_loop,
    .stop = threads_nothing,
    .forget = threads_nothing,
    .many_threads = true,
};
