/* An engine from open to close: its threads, its descriptors, and what a fork leaves of it.
 *
 * The thread that will use a backend starts it, because a ring belongs to the thread that made it,
 * and hands its error back to whoever opens. Stop comes before free: a caller that is inside of
 * another function of the engine while it is stopped still finds it there.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "backend.h"

int ffs_built(void)
{
    int kinds = 1 << FFS_ENGINE_THREADS;
#ifdef FFS_HAVE_URING
    kinds |= 1 << FFS_ENGINE_URING | 1 << FFS_ENGINE_REGISTERED;
#endif
#ifdef FFS_HAVE_AIO
    kinds |= 1 << FFS_ENGINE_AIO;
#endif
    return kinds;
}

static const ffs_backend *backend_of(int kind)
{
    switch (kind) {
#ifdef FFS_HAVE_URING
    case FFS_ENGINE_REGISTERED:
    case FFS_ENGINE_URING: return &ffs_backend_uring;
#endif
#ifdef FFS_HAVE_AIO
    case FFS_ENGINE_AIO: return &ffs_backend_aio;
#endif
    case FFS_ENGINE_THREADS: return &ffs_backend_threads;
    default: return NULL;
    }
}

typedef struct { ffs_engine *engine; uint32_t thread; } errand;

static void *thread_main(void *argument)
{
    errand mine = *(errand *)argument;
    ffs_engine *e = mine.engine;
    free(argument);
    prctl(PR_SET_NAME, "ffserve-io");
    void *state = NULL;
    int rc = e->backend->start(e, mine.thread, &state);
    pthread_mutex_lock(&e->lock);
    e->states[mine.thread] = state;
    e->started++;
    if (rc)
        e->start_error = rc;
    pthread_cond_broadcast(&e->settled);
    pthread_mutex_unlock(&e->lock);
    if (!rc) {
        e->backend->loop(e, state);
        e->backend->stop(state);
    }
    return NULL;
}

static int start_threads(ffs_engine *e)
{
    sigset_t all, before;
    int rc = 0;
    uint32_t created = 0;
    sigfillset(&all); /* signals are the program's own threads' business */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; created < e->thread_count && !rc; created++) {
        errand *argument = malloc(sizeof *argument);
        if (!argument) {
            rc = -ENOMEM;
            break;
        }
        *argument = (errand){e, created};
        rc = -pthread_create(&e->threads[created], NULL, thread_main, argument);
        if (rc) {
            free(argument);
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_lock(&e->lock);
    e->thread_count = created;
    while (e->started < created)
        pthread_cond_wait(&e->settled, &e->lock);
    rc = rc ? rc : e->start_error;
    pthread_mutex_unlock(&e->lock);
    return rc;
}

int ffs_engine_open(ffs_engine **out, int kind, uint32_t depth, uint32_t threads)
{
    const ffs_backend *backend = backend_of(kind);
    *out = NULL;
    if (!backend)
        return -ENOSYS;
    if (!depth || depth > 4096 || threads > 1024 || (backend->many_threads && !threads))
        return -EINVAL;
    ffs_engine *e = calloc(1, sizeof *e);
    if (!e)
        return -ENOMEM;
    e->backend = backend;
    e->registers = kind == FFS_ENGINE_REGISTERED;
    e->arena_floor = UINT64_MAX;
    e->thread_count = backend->many_threads ? threads : 1;
    e->depth = backend->many_threads ? threads : depth;
    e->pid = getpid();
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->work, NULL);
    pthread_cond_init(&e->settled, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    for (uint32_t k = 0; k < FFS_BELLS; k++)
        pthread_cond_init(&e->bells[k], &attributes);
    pthread_condattr_destroy(&attributes);
    e->wake_fd = eventfd(0, EFD_CLOEXEC);
    e->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    e->op_count = backend->many_threads ? threads : 2 * depth;
    e->ops = calloc(e->op_count, sizeof *e->ops);
    e->threads = calloc(e->thread_count, sizeof *e->threads);
    e->states = calloc(e->thread_count, sizeof *e->states);
    int rc = e->wake_fd < 0 || e->done_fd < 0 ? -errno
             : !e->ops || !e->threads || !e->states ? -ENOMEM : 0;
    if (rc)
        e->thread_count = 0;
    else
        rc = start_threads(e);
    if (rc)
        ffs_engine_close(e);
    else
        *out = e;
    return rc;
}

void ffs_engine_set_arena(ffs_engine *e, uint8_t *arena, uint64_t size, ffs_entry *entries,
                          uint64_t entry_count)
{
    e->arena = arena;
    e->arena_size = size;
    e->entries = entries;
    e->entry_count = entry_count;
}

void ffs_engine_arena_ready(ffs_engine *e, uint64_t size, uint64_t end)
{
    if (!e->registers)
        return;
    pthread_mutex_lock(&e->lock);
    bool changed = size < e->arena_ready || size == end || end != e->arena_end ||
                   size / FFS_PIECE != e->arena_ready / FFS_PIECE;
    if (size < e->arena_ready && size < e->arena_floor)
        e->arena_floor = size;
    e->arena_ready = size;
    e->arena_end = end;
    if (changed)
        atomic_store(&e->arena_changed, true);
    pthread_mutex_unlock(&e->lock);
    if (changed && atomic_exchange(&e->sleeping, false))
        ffs_wake(e);
}

void ffs_engine_counters(ffs_engine *e, ffs_counters *out)
{
#define COUNTER(name) out->name = atomic_load_explicit(&e->name, memory_order_relaxed)
    COUNTER(reads);
    COUNTER(bytes);
    COUNTER(short_reads);
    COUNTER(errors);
    COUNTER(checksum_errors);
    COUNTER(wakeups);
    COUNTER(submits);
    COUNTER(fixed);
    COUNTER(registered);
    COUNTER(inflight);
    COUNTER(queued);
#undef COUNTER
}

int ffs_engine_broken(ffs_engine *e)
{
    pthread_mutex_lock(&e->lock);
    int broken = e->broken;
    pthread_mutex_unlock(&e->lock);
    return broken;
}

void ffs_engine_stop(ffs_engine *e)
{
    if (getpid() != e->pid)
        return; /* the threads stayed in the parent */
    pthread_mutex_lock(&e->lock);
    bool first = !ffs_stopping(e);
    atomic_store(&e->stopping, true);
    if (first)
        ffs_cancel_queued(e, -ECANCELED);
    pthread_cond_broadcast(&e->work);
    pthread_mutex_unlock(&e->lock);
    if (first) {
        ffs_flush(e);
        e->left = !ffs_wake(e) && !e->backend->many_threads && e->thread_count;
        for (uint32_t k = 0; k < e->thread_count; k++)
            e->left ? pthread_detach(e->threads[k]) : pthread_join(e->threads[k], NULL);
        ffs_flush(e);
    }
    pthread_mutex_lock(&e->lock);
    e->joined |= first;
    pthread_cond_broadcast(&e->settled);
    while (!e->joined || e->waiters)
        pthread_cond_wait(&e->settled, &e->lock);
    pthread_mutex_unlock(&e->lock);
}

static void release(ffs_engine *e)
{
    if (e->wake_fd >= 0)
        close(e->wake_fd);
    if (e->done_fd >= 0)
        close(e->done_fd);
    free(e->files);
    free(e->ops);
    free(e->threads);
    free(e->states);
    free(e);
}

void ffs_engine_close(ffs_engine *e)
{
    if (getpid() != e->pid) {
        ffs_engine_forget(e);
        return;
    }
    ffs_engine_stop(e);
    if (e->left)
        return;
    if (!e->broken) /* a ring that was lost may still be written for by the device */
        for (uint32_t k = 0; e->ops && k < e->op_count; k++)
            ffs_op_free(&e->ops[k]);
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->work);
    pthread_cond_destroy(&e->settled);
    for (uint32_t k = 0; k < FFS_BELLS; k++)
        pthread_cond_destroy(&e->bells[k]);
    release(e);
}

void ffs_engine_forget(ffs_engine *e)
{
    /* The lock may be held by a thread that stayed in the parent, and the bounce buffers are not
     * mapped here (MADV_DONTFORK): neither is touched. */
    if (e->states && !e->joined)
        for (uint32_t k = 0; k < e->thread_count; k++)
            if (e->states[k])
                e->backend->forget(e->states[k]);
    release(e);
}
