/* The engine: batches in, reads out to a backend, ended batches back to whoever waits.
 *
 * Batches of all callers stand in one FIFO and the backend is fed while it has room, so that reads
 * of several batches are in flight together; a batch ends when its last read has, whatever order
 * they came in. Everything shared is under one lock, taken once a read (20 ns against the 2-3 us
 * that a read costs); what an ended read wrote reaches the waiter through `remaining` (acquire,
 * release) and `done` (release).
 *
 * A batch may be freed by its owner the moment it can see `done`. Therefore `done` is the last thing
 * written, and the condition variables that its owner may wait on belong to the engine.
 *
 * Waking a sleeping thread takes 20 to 70 us, and it runs at once: who would take the lock is not
 * woken under it. Answers are, since whoever gets one may be heard of at once, and by then the batch
 * has to be on the list.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backend.h"

static uint64_t at_least(uint64_t size, uint64_t alignment)
{
    return (size + alignment - 1) & ~(alignment - 1);
}

/* ---- batches ------------------------------------------------------------------------------ */
ffs_batch *ffs_batch_new(uint32_t read_count, uint32_t record_count)
{
    /* One block: Python maps both arrays through a single owner. */
    uint64_t reads = at_least(sizeof(ffs_job), 64);
    uint64_t records = at_least(reads + (uint64_t)read_count * sizeof(ffs_read), 64);
    uint64_t pieced = at_least(records + (uint64_t)record_count * sizeof(ffs_record), 64);
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
        /* What is published has to be copied into the arena. */
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
            uint64_t size = at_least(read->offset + read->length, alignment) - lo;
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

/* ---- from the callers to the backend ------------------------------------------------------ */
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
    int rc = ffs_stopping(e) ? -ESHUTDOWN
             : e->broken     ? e->broken
             : job->submitted ? -EBUSY
             : batch_fits(e, b) ? 0 : -EINVAL;
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
    /* Sequentially consistent, as is the flag: either this thread sees that the I/O thread sleeps
     * or that one sees the work (ffs_sleep). */
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
        op->alignment = file->alignment;
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
                job->taken++; /* the last of its pieces that is on its way ends it */
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

/* ---- from the backend to the callers ------------------------------------------------------ */
static uint32_t bell_of(const ffs_job *job)
{
    return (uint32_t)((uintptr_t)job / 64 % FFS_BELLS);
}

void ffs_flush(ffs_engine *e)
{
    bool tell = false;
    uint32_t rung = 0;
    pthread_mutex_lock(&e->lock);
    ffs_job *job = e->finished, *in_order = NULL, *next;
    e->finished = NULL;
    for (; job; job = next) { /* the list was built by pushing */
        next = job->next;
        job->next = in_order;
        in_order = job;
    }
    for (job = in_order; job; job = next) {
        next = job->next;
        job->next = NULL;
        job->submitted = false;
        if (job->answer)
            ffs_send_answer(job);
        if (job->notify) {
            tell |= !e->told;
            e->told = true;
            if (e->done_head)
                e->done_tail->next = job;
            else
                e->done_head = job;
            e->done_tail = job;
        }
        if (e->listeners[bell_of(job)])
            rung |= UINT32_C(1) << bell_of(job);
        __atomic_store_n(&job->face.done, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&e->lock);
    for (uint32_t k = 0; rung; k++, rung >>= 1)
        if (rung & 1)
            pthread_cond_broadcast(&e->bells[k]);
    if (tell) {
        uint64_t one = 1;
        ssize_t written = write(e->done_fd, &one, sizeof one);
        (void)written;
    }
}

/* Under the lock. A batch that was waited for is not popped as well: its owner may free it. */
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
    uint32_t k = bell_of(job);
    e->waiters++;
    e->listeners[k]++;
    int rc = 0;
    while (!__atomic_load_n(&b->done, __ATOMIC_ACQUIRE) && rc != ETIMEDOUT)
        rc = timeout_ms < 0 ? pthread_cond_wait(&e->bells[k], &e->lock)
                            : pthread_cond_timedwait(&e->bells[k], &e->lock, &until);
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
        /* What is on the list later is told of anew. What was on it may be told of only now: then
         * somebody looks once in vain. */
        uint64_t count;
        ssize_t got = read(e->done_fd, &count, sizeof count);
        (void)got;
        e->told = false;
    }
    pthread_mutex_unlock(&e->lock);
    return job ? &job->face : NULL;
}

/* ---- files -------------------------------------------------------------------------------- */
int ffs_file_add(ffs_engine *e, int fd, uint32_t alignment)
{
    if (fd < 0)
        return -EBADF;
    if (!alignment || alignment & (alignment - 1) || alignment > FFS_ALIGNMENT_MAX)
        return -EINVAL;
    pthread_mutex_lock(&e->lock);
    uint32_t id = 0;
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
    e->files[id] = (ffs_file){fd, alignment, e->generation};
    pthread_mutex_unlock(&e->lock);
    return (int)id;
}

void ffs_file_remove(ffs_engine *e, int id)
{
    pthread_mutex_lock(&e->lock);
    if (id >= 0 && (uint32_t)id < e->file_room)
        e->files[id].generation = 0;
    atomic_store(&e->files_removed, true);
    pthread_mutex_unlock(&e->lock);
    /* A ring's table holds the file open until the I/O thread takes it out. */
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
