/* The engine: batches go in, reads go out to a backend, ended batches come back to their owners.
 *
 * Batches of all callers are in one FIFO, and the backend is fed while it has room, so reads of
 * several batches are in flight together. A batch ends when its last read ends, in whatever order
 * they complete. Everything shared is under one lock, which is taken once per read (20 ns; a read
 * costs 2-3 us). The bytes of an ended read reach the waiter through `remaining` (acquire, release)
 * and `done` (release).
 *
 * The owner may free a batch the moment it sees `done`. Therefore `done` is written last, and the
 * condition variables that owners wait on belong to the engine.
 *
 * Waking a thread takes 20 to 70 us, and the thread runs at once; so a thread that would need the
 * lock is never woken under it. Direct replies are sent under it: the client that receives one may
 * be heard from at once, and the batch must be on the done list by then.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "backend.h"

/* A client's socket, for direct replies. */
struct ffs_reply_socket {
    pthread_mutex_t lock;
    int fd;
    bool blocked;
};

/* ---- batches ----------------------------------------------------------------------------- */
static uint64_t round_up(uint64_t size, uint64_t alignment)
{
    return (size + alignment - 1) & ~(alignment - 1);
}

ffs_batch *ffs_batch_new(uint32_t read_count, uint32_t record_count)
{
    /* One block of memory, so that Python maps both arrays through a single owner. */
    uint64_t reads = round_up(sizeof(ffs_job), 64);
    uint64_t records = round_up(reads + (uint64_t)read_count * sizeof(ffs_read), 64);
    uint64_t pieced = round_up(records + (uint64_t)record_count * sizeof(ffs_record), 64);
    uint8_t *block = calloc(1, pieced + (uint64_t)read_count * sizeof(ffs_pieced));
    if (!block)
        return NULL;
    ffs_job *job = (ffs_job *)block;
    job->face.reads = (ffs_read *)(block + reads);
    job->face.records = (ffs_record *)(block + records);
    job->pieced = (ffs_pieced *)(block + pieced);
    job->face.read_count = read_count;
    job->face.record_count = record_count;
    return &job->face;
}

void ffs_batch_free(ffs_batch *b)
{
    free(b);
}

static bool record_fits(const ffs_engine *e, const ffs_read *read, const ffs_record *r)
{
    if (r->length > read->length || r->offset < read->offset ||
        r->offset - read->offset > read->length - r->length)
        return false;
    if (read->slot == UINT64_MAX) {
        /* A record that is published is copied into the arena. */
        uint64_t at = (uint64_t)(uintptr_t)r->dest - (uint64_t)(uintptr_t)e->arena;
        return r->entry == UINT64_MAX ? r->dest || !r->length
                                      : r->entry < e->entry_count && at < e->arena_size &&
                                            r->length <= e->arena_size - at;
    }
    return r->entry == UINT64_MAX || r->entry < e->entry_count;
}

/* Under the lock: the table of files may grow. */
static bool batch_fits(const ffs_engine *e, const ffs_batch *b)
{
    for (uint32_t k = 0; k < b->read_count; k++) {
        const ffs_read *read = &b->reads[k];
        if (read->file < 0 || (uint32_t)read->file >= e->file_room ||
            !e->files[read->file].generation)
            return false;
        if (read->length >= (uint64_t)1 << 48 ||
            read->offset > (uint64_t)INT64_MAX - read->length - FFS_ALIGNMENT_MAX)
            return false;
        if (read->checksum_kind < FFS_CRC_NONE || read->checksum_kind > FFS_CRC_32C)
            return false;
        if (read->record_count > b->record_count ||
            read->first_record > b->record_count - read->record_count)
            return false;
        if (read->slot != UINT64_MAX) {
            uint32_t alignment = e->files[read->file].alignment;
            uint64_t lo = read->offset & ~(uint64_t)(alignment - 1);
            uint64_t size = round_up(read->offset + read->length, alignment) - lo;
            if (read->slot > e->arena_size || read->slot_size > e->arena_size - read->slot ||
                (read->length && size > read->slot_size))
                return false;
        }
        for (uint32_t i = 0; i < read->record_count; i++)
            if (!record_fits(e, read, &b->records[read->first_record + i]))
                return false;
    }
    return true;
}

/* ---- from the callers to the backend ----------------------------------------------------- */
bool ffs_wake(ffs_engine *e)
{
    uint64_t one = 1;
    atomic_fetch_add_explicit(&e->wakeups, 1, memory_order_relaxed);
    return write(e->wake_fd, &one, sizeof one) == sizeof one;
}

int ffs_submit(ffs_engine *e, ffs_batch *b)
{
    ffs_job *job = (ffs_job *)b;
    pthread_mutex_lock(&e->lock);
    int rc = ffs_stopping(e)  ? -ESHUTDOWN
           : e->broken        ? e->broken
           : job->submitted   ? -EBUSY
           : batch_fits(e, b) ? 0
                              : -EINVAL;
    if (rc) {
        pthread_mutex_unlock(&e->lock);
        return rc;
    }
    job->submitted = true;
    job->notify = e->notify;
    job->next = NULL;
    job->taken = job->pieces = b->failed = 0;
    b->bytes = 0;
    __atomic_store_n(&b->done, 0, __ATOMIC_RELAXED);
    atomic_store_explicit(&job->remaining, b->read_count, memory_order_relaxed);
    atomic_fetch_add_explicit(&e->submits, 1, memory_order_relaxed);
    if (!b->read_count) {
        job->next = e->finished;
        e->finished = job;
        pthread_mutex_unlock(&e->lock);
        ffs_flush(e);
        return 0;
    }
    uint32_t read_count = b->read_count;
    if (e->tail)
        e->tail->next = job;
    else
        e->head = job;
    e->tail = job;
    /* Sequentially consistent, as is the flag: either this thread sees that the I/O thread sleeps,
     * or the I/O thread sees the work (ffs_sleep). */
    atomic_fetch_add(&e->queued, read_count);
    if (e->backend->many_threads)
        for (uint32_t k = 0; k < read_count && k < e->idle; k++)
            pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->lock);
    if (!e->backend->many_threads && atomic_load(&e->sleeping) &&
        atomic_exchange(&e->sleeping, false) && !ffs_wake(e)) {
        ffs_break(e, -EBADF);
        ffs_flush(e);
    }
    return 0;
}

bool ffs_sleep(ffs_engine *e)
{
    atomic_store(&e->sleeping, true);
    if (atomic_load(&e->queued) || atomic_load(&e->stopping) || atomic_load(&e->files_removed) ||
        atomic_load(&e->arena_changed)) {
        ffs_awake(e);
        return false;
    }
    return true;
}

bool ffs_await_work(ffs_engine *e)
{
    pthread_mutex_lock(&e->lock);
    while (!e->head && !ffs_stopping(e)) {
        e->idle++;
        pthread_cond_wait(&e->work, &e->lock);
        e->idle--;
    }
    bool work = e->head != NULL;
    pthread_mutex_unlock(&e->lock);
    return work;
}

/* Count the piece that the op takes of its read; under the lock. */
static void take_piece(ffs_engine *e, ffs_job *job, ffs_op *op)
{
    uint32_t count = ffs_pieces(op->read, op->alignment);
    if (!job->pieces) {
        ffs_pieced *pieced = &job->pieced[job->taken];
        atomic_store_explicit(&pieced->left, count, memory_order_relaxed);
        atomic_store_explicit(&pieced->error, 0, memory_order_relaxed);
        for (uint32_t k = 0; count > 1 && k < op->read->record_count; k++) {
            ffs_record *r = &job->face.records[op->read->first_record + k];
            r->found = 0;
            r->status = 0;
        }
        job->pieces = count;
    }
    op->piece = count - job->pieces--;
    if (job->pieces)
        return;
    atomic_fetch_sub_explicit(&e->queued, 1, memory_order_relaxed);
    if (++job->taken == job->face.read_count) {
        e->head = job->next;
        if (!e->head)
            e->tail = NULL;
    }
}

/* Whether a read is widened to bring what lies around it. It still takes one piece. */
static bool read_around(const ffs_file *file, const ffs_read *read)
{
    return read->slot == UINT64_MAX && read->length < file->around;
}

bool ffs_take(ffs_engine *e, ffs_op *op)
{
    while (ffs_queued(e)) {
        pthread_mutex_lock(&e->lock);
        ffs_job *job = e->head;
        if (!job) {
            pthread_mutex_unlock(&e->lock);
            return false;
        }
        op->job = job;
        op->read = &job->face.reads[job->taken];
        const ffs_file *file = &e->files[op->read->file];
        op->file = op->read->file;
        op->fd = file->fd;
        op->around = read_around(file, op->read);
        op->alignment = op->around ? file->around : file->alignment;
        op->generation = file->generation;
        take_piece(e, job, op);
        atomic_fetch_add_explicit(&e->inflight, 1, memory_order_relaxed);
        pthread_mutex_unlock(&e->lock);

        int rc = ffs_op_begin(e, op);
        if (!rc)
            return true;
        op->error = rc < 0 ? rc : 0;
        ffs_settle(e, op);
        ffs_flush(e);
    }
    return false;
}

/* Under the lock. */
void ffs_cancel_queued(ffs_engine *e, int error)
{
    for (ffs_job *job = e->head, *next; job; job = next) {
        next = job->next;
        ffs_batch *b = &job->face;
        uint32_t count = b->read_count - job->taken, ending = count, failed = 0;
        if (job->pieces) {
            ffs_pieced *pieced = &job->pieced[job->taken];
            atomic_store(&pieced->error, error);
            if (atomic_fetch_sub(&pieced->left, job->pieces) != job->pieces) {
                job->taken++; /* the last of its pieces in flight ends this read */
                ending--;
            }
            job->pieces = 0;
        }
        for (; job->taken < b->read_count; job->taken++) {
            const ffs_read *read = &b->reads[job->taken];
            for (uint32_t k = 0; k < read->record_count; k++)
                b->records[read->first_record + k].status = error;
            failed += read->record_count;
        }
        __atomic_fetch_add(&b->failed, failed, __ATOMIC_RELAXED);
        if (ending &&
            atomic_fetch_sub_explicit(&job->remaining, ending, memory_order_acq_rel) == ending) {
            job->next = e->finished;
            e->finished = job;
        }
        atomic_fetch_sub(&e->queued, count);
    }
    e->head = e->tail = NULL;
}

void ffs_break(ffs_engine *e, int error)
{
    pthread_mutex_lock(&e->lock);
    e->broken = error;
    ffs_cancel_queued(e, error);
    pthread_mutex_unlock(&e->lock);
}

void ffs_lose(ffs_engine *e)
{
    for (uint32_t k = 0; k < e->op_count; k++) {
        if (e->ops[k].job) {
            e->ops[k].error = -EIO;
            ffs_settle(e, &e->ops[k]);
        }
    }
    ffs_flush(e);
}

/* ---- direct replies ----------------------------------------------------------------------
 * The I/O thread sends a reply the moment the last read of a request succeeds, so the client is not
 * woken by a thread that had to be woken first. The frame was made when the request was planned. If
 * a read failed, the socket is full or its owner blocks it, nothing is sent here: the owner learns
 * of every batch anyway and sees by `sent` that the reply is still due.
 *
 * A Unix socket takes a small frame whole or not at all, so frames of two threads cannot mix. The
 * owner blocks the socket while it has anything larger to send, or something unsent. */
ffs_reply_socket *ffs_reply_socket_new(int fd)
{
    ffs_reply_socket *socket = malloc(sizeof *socket);
    if (socket) {
        pthread_mutex_init(&socket->lock, NULL);
        socket->fd = fd;
        socket->blocked = false;
    }
    return socket;
}

void ffs_reply_socket_block(ffs_reply_socket *socket, int blocked)
{
    pthread_mutex_lock(&socket->lock);
    socket->blocked = blocked != 0;
    pthread_mutex_unlock(&socket->lock);
}

void ffs_reply_socket_free(ffs_reply_socket *socket)
{
    free(socket); /* a mutex needs no destroy on Linux */
}

void ffs_reply_wait_for(ffs_reply *reply, ffs_batch *b)
{
    if (b)
        ((ffs_job *)b)->reply = reply;
    __atomic_fetch_add(&reply->left, 1, __ATOMIC_RELAXED);
}

uint32_t ffs_reply_arm(ffs_reply *reply)
{
    return __atomic_sub_fetch(&reply->left, 1, __ATOMIC_ACQ_REL);
}

static uint32_t send_frame(const ffs_reply *reply)
{
    ffs_reply_socket *to = reply->socket;
    pthread_mutex_lock(&to->lock);
    ssize_t sent = -1;
    if (!to->blocked)
        sent = send(to->fd, reply->frame, reply->size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0 && sent != (ssize_t)reply->size)
        shutdown(to->fd, SHUT_RDWR); /* after part of a frame nothing can be understood */
    pthread_mutex_unlock(&to->lock);
    return sent >= 0;
}

/* A batch with a reply has ended; under the engine's lock, before its owner can learn of it. */
static void count_down(ffs_job *job)
{
    ffs_reply *reply = job->reply;
    job->reply = NULL;
    if (job->face.failed)
        __atomic_store_n(&reply->failed, 1, __ATOMIC_RELAXED);
    /* Releases this batch's failure to the thread that ends the last batch. */
    if (ffs_reply_arm(reply) == 0 && !__atomic_load_n(&reply->failed, __ATOMIC_RELAXED))
        reply->sent = send_frame(reply);
}

/* ---- from the backend to the callers ----------------------------------------------------- */
static uint32_t wait_group(const ffs_job *job)
{
    return (uint32_t)((uintptr_t)job / 64 % FFS_WAIT_GROUPS);
}

void ffs_flush(ffs_engine *e)
{
    bool notify = false;
    uint32_t groups = 0;
    pthread_mutex_lock(&e->lock);
    ffs_job *job = e->finished, *in_order = NULL, *next;
    e->finished = NULL;
    for (; job; job = next) { /* the list is in reverse order */
        next = job->next;
        job->next = in_order;
        in_order = job;
    }
    for (job = in_order; job; job = next) {
        next = job->next;
        job->next = NULL;
        job->submitted = false;
        if (job->reply)
            count_down(job);
        if (job->notify) {
            notify |= !e->notified;
            e->notified = true;
            if (e->done_head)
                e->done_tail->next = job;
            else
                e->done_head = job;
            e->done_tail = job;
        }
        if (e->listeners[wait_group(job)])
            groups |= UINT32_C(1) << wait_group(job);
        __atomic_store_n(&job->face.done, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&e->lock);
    for (uint32_t k = 0; groups; k++, groups >>= 1)
        if (groups & 1)
            pthread_cond_broadcast(&e->ended[k]);
    if (notify) {
        uint64_t one = 1;
        ssize_t written = write(e->done_fd, &one, sizeof one);
        (void)written;
    }
}

/* Under the lock. A batch that was waited for must not be popped too: its owner may free it. */
static void unlink_done(ffs_engine *e, ffs_job *job)
{
    ffs_job *before = NULL;
    for (ffs_job *j = e->done_head; j; before = j, j = j->next) {
        if (j != job)
            continue;
        if (before)
            before->next = job->next;
        else
            e->done_head = job->next;
        if (e->done_tail == job)
            e->done_tail = before;
        return;
    }
}

int ffs_wait(ffs_engine *e, ffs_batch *b, int64_t timeout_ms)
{
    ffs_job *job = (ffs_job *)b;
    if (__atomic_load_n(&b->done, __ATOMIC_ACQUIRE) && !job->notify)
        return 1;
    struct timespec until = {0, 0};
    if (timeout_ms >= 0) {
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec += timeout_ms / 1000;
        until.tv_nsec += timeout_ms % 1000 * 1000000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000;
        }
    }
    pthread_mutex_lock(&e->lock);
    uint32_t k = wait_group(job);
    e->waiters++;
    e->listeners[k]++;
    int rc = 0;
    while (!__atomic_load_n(&b->done, __ATOMIC_ACQUIRE) && rc != ETIMEDOUT)
        rc = timeout_ms < 0 ? pthread_cond_wait(&e->ended[k], &e->lock)
                            : pthread_cond_timedwait(&e->ended[k], &e->lock, &until);
    e->listeners[k]--;
    int done = (int)__atomic_load_n(&b->done, __ATOMIC_ACQUIRE);
    if (done && job->notify)
        unlink_done(e, job);
    if (!--e->waiters && ffs_stopping(e))
        pthread_cond_broadcast(&e->settled);
    pthread_mutex_unlock(&e->lock);
    return done;
}

int ffs_engine_notify(ffs_engine *e, int on)
{
    pthread_mutex_lock(&e->lock);
    e->notify = on != 0;
    pthread_mutex_unlock(&e->lock);
    return e->done_fd;
}

ffs_batch *ffs_engine_pop(ffs_engine *e)
{
    pthread_mutex_lock(&e->lock);
    ffs_job *job = e->done_head;
    if (job) {
        e->done_head = job->next;
        job->next = NULL;
        if (!e->done_head)
            e->done_tail = NULL;
    } else {
        /* Batches that are put on the list from now on are notified of again. The notification of
         * an earlier one may arrive only now: that is the spurious wakeup. */
        uint64_t count;
        ssize_t got = read(e->done_fd, &count, sizeof count);
        (void)got;
        e->notified = false;
    }
    pthread_mutex_unlock(&e->lock);
    return job ? &job->face : NULL;
}

/* ---- files ------------------------------------------------------------------------------- */
int ffs_file_add(ffs_engine *e, int fd, uint32_t alignment, uint32_t around)
{
    if (fd < 0)
        return -EBADF;
    if (!alignment || alignment & (alignment - 1) || alignment > FFS_ALIGNMENT_MAX)
        return -EINVAL;
    if (around & (around - 1) || around > FFS_ALIGNMENT_MAX || (around && alignment > 1))
        return -EINVAL;
    pthread_mutex_lock(&e->lock);
    uint32_t id = e->files_used;
    while (id < e->file_room && e->files[id].generation)
        id++;
    if (id == e->file_room) {
        uint32_t room = e->file_room ? e->file_room * 2 : 64;
        ffs_file *files = room > 1 << 24 ? NULL : realloc(e->files, room * sizeof *files);
        if (!files) {
            pthread_mutex_unlock(&e->lock);
            return -ENOMEM;
        }
        memset(files + e->file_room, 0, (room - e->file_room) * sizeof *files);
        e->files = files;
        e->file_room = room;
    }
    if (!++e->generation)
        e->generation = 1;
    e->files[id] = (ffs_file){fd, alignment, around, e->generation};
    e->files_used = id + 1;
    pthread_mutex_unlock(&e->lock);
    return (int)id;
}

int ffs_files_add(ffs_engine *e, const int32_t *fds, const int64_t *alignments, int64_t n,
                  int32_t *ids)
{
    for (int64_t k = 0; k < n; k++) {
        ids[k] = fds[k] < 0 ? -1 : ffs_file_add(e, fds[k], (uint32_t)alignments[k], 0);
        if (ids[k] < 0 && fds[k] >= 0) {
            int rc = ids[k];
            while (k--)
                ffs_file_remove(e, ids[k]);
            return rc;
        }
    }
    return 0;
}

void ffs_file_remove(ffs_engine *e, int id)
{
    pthread_mutex_lock(&e->lock);
    if (id >= 0 && (uint32_t)id < e->file_room) {
        e->files[id].generation = 0;
        if ((uint32_t)id < e->files_used)
            e->files_used = (uint32_t)id;
    }
    atomic_store(&e->files_removed, true);
    pthread_mutex_unlock(&e->lock);
    /* A ring's table keeps the file open until the I/O thread removes it. */
    if (!e->backend->many_threads && atomic_exchange(&e->sleeping, false))
        ffs_wake(e);
}

uint32_t ffs_file_generation(ffs_engine *e, int id)
{
    pthread_mutex_lock(&e->lock);
    uint32_t generation = (uint32_t)id < e->file_room ? e->files[id].generation : 0;
    pthread_mutex_unlock(&e->lock);
    return generation;
}

/* ---- open, close, fork ------------------------------------------------------------------- */
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

/* The argument of thread_main. */
typedef struct {
    ffs_engine *engine;
    uint32_t thread;
} thread_start;

/* A ring belongs to the thread that made it, so each thread starts its backend itself and passes
 * an error on to ffs_engine_open. */
static void *thread_main(void *argument)
{
    thread_start mine = *(thread_start *)argument;
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
    sigfillset(&all); /* signals go to the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; created < e->thread_count && !rc; created++) {
        thread_start *argument = malloc(sizeof *argument);
        if (!argument) {
            rc = -ENOMEM;
            break;
        }
        *argument = (thread_start){e, created};
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
    ffs_count_bounces();
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
    for (uint32_t k = 0; k < FFS_WAIT_GROUPS; k++)
        pthread_cond_init(&e->ended[k], &attributes);
    pthread_condattr_destroy(&attributes);
    e->wake_fd = eventfd(0, EFD_CLOEXEC);
    e->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    e->op_count = backend->many_threads ? threads : 2 * depth;
    e->ops = calloc(e->op_count, sizeof *e->ops);
    e->threads = calloc(e->thread_count, sizeof *e->threads);
    e->states = calloc(e->thread_count, sizeof *e->states);
    int rc = e->wake_fd < 0 || e->done_fd < 0     ? -errno
           : !e->ops || !e->threads || !e->states ? -ENOMEM
                                                  : 0;
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
        e->abandoned = !ffs_wake(e) && !e->backend->many_threads && e->thread_count;
        for (uint32_t k = 0; k < e->thread_count; k++)
            e->abandoned ? pthread_detach(e->threads[k]) : pthread_join(e->threads[k], NULL);
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
    if (e->abandoned)
        return;
    if (!e->broken) /* after a ring was lost the device may still write */
        for (uint32_t k = 0; e->ops && k < e->op_count; k++)
            ffs_op_free(&e->ops[k]);
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->work);
    pthread_cond_destroy(&e->settled);
    for (uint32_t k = 0; k < FFS_WAIT_GROUPS; k++)
        pthread_cond_destroy(&e->ended[k]);
    release(e);
}

void ffs_engine_forget(ffs_engine *e)
{
    /* Neither the lock nor the bounce buffers are touched: a thread of the parent may hold the
     * lock, and the buffers are not mapped in the child (MADV_DONTFORK). */
    if (e->states && !e->joined)
        for (uint32_t k = 0; k < e->thread_count; k++)
            if (e->states[k])
                e->backend->forget(e->states[k]);
    release(e);
}
