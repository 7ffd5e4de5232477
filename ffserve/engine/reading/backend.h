/* The seam between the engine (io.c) and the ways of reading a file (uring.c, aio.c, threads.c).
 *
 * A backend knows nothing of batches, records, checksums or directories. It owns the loop of its
 * threads. It takes the next read (ffs_take), issues it, reports the result (ffs_advance) and issues
 * the rest if there is one. Then it has the engine verify and publish what has landed (ffs_settle)
 * and wake those who wait for it (ffs_flush).
 *
 * Landing and settling are separate because a checksum of 100 KiB costs as much as the read: an I/O
 * thread first refills the device's queue and settles while the device is busy. So there are twice
 * as many ops as reads may be in flight.
 */
#ifndef FFSERVE_BACKEND_H
#define FFSERVE_BACKEND_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "io.h"

/* A larger read is split into pieces of at most this size, which are in flight together. A bounce
 * buffer of this size stays mapped and in cache, while memory for a whole large record would be
 * fresh pages each time. And a read into more 4 KiB pages than the disk takes segments would be
 * passed to a kernel thread, because the block layer does not split non-blocking requests. */
#define FFS_BOUNCE_SIZE ((uint64_t)256 << 10)
/* All engines of a process together keep at most so many bounce buffers when their reads have ended:
 * those of one engine of depth 128 (BOUNCES_KEPT in limits.py). */
#define FFS_BOUNCES_KEPT 256
#define FFS_ALIGNMENT_MAX ((uint32_t)128 << 10)
/* The arena is registered in pieces of this size. The kernel takes up to 1 GiB as one buffer, but
 * the I/O thread stops while it pins one. */
#define FFS_PIECE ((uint64_t)128 << 20)
/* Batches are spread over so many condition variables: a batch that ends wakes only the threads
 * that wait for a batch of its group. */
#define FFS_WAIT_GROUPS 16

/* The state of a read that may be split into pieces. */
typedef struct {
    _Atomic uint32_t left; /* pieces that have not ended */
    _Atomic int32_t error; /* of one of them */
} ffs_pieced;

/* A batch as the engine sees it: the public part first. */
typedef struct ffs_job {
    ffs_batch face;
    ffs_pieced *pieced;         /* one per read */
    struct ffs_job *next;       /* in the FIFO, then the finished list, then the done list */
    uint32_t taken;             /* reads handed to a backend so far */
    uint32_t pieces;            /* left of the next read, if some were taken */
    _Atomic uint32_t remaining; /* reads that have not ended */
    bool submitted, notify;
    ffs_reply *reply; /* that waits for it, or NULL */
} ffs_job;

/* One read, or one piece of a read, being carried out. Backends use the fields above the line only. */
typedef struct ffs_op {
    int fd, file;
    uint32_t generation; /* distinguishes a file id from its earlier use */
    uint8_t *to;         /* where this attempt's bytes go */
    uint64_t offset;     /* this attempt: position and size */
    uint64_t size;
    uint8_t *base;   /* where the byte at `lo` goes: the arena, or the bounce buffer */
    uint8_t *bounce; /* FFS_BOUNCE_SIZE bytes, mapped when first needed */
    /* ---- */
    uint32_t alignment;
    bool around;  /* the alignment only brings what lies around the read */
    ffs_job *job; /* NULL: the op is spare */
    const ffs_read *read;
    uint32_t piece;  /* which one of the read */
    uint64_t lo, hi; /* its extent widened to the alignment */
    uint64_t end;    /* where the bytes that are needed end */
    uint64_t got;    /* bytes from lo that have arrived */
    uint64_t bytes;  /* read in total, repeated ones included */
    int error;       /* what it landed with */
} ffs_op;

typedef struct {
    /* Called in the new thread: a ring belongs to the thread that made it. */
    int (*start)(ffs_engine *e, uint32_t thread, void **state);
    /* Runs until ffs_stopping() and nothing is in flight. */
    void (*loop)(ffs_engine *e, void *state);
    void (*stop)(void *state);
    /* In a forked child, which has neither the threads nor the DONTFORK mappings. */
    void (*forget)(void *state);
    bool many_threads; /* wakes by condition variable, else by wake_fd */
} ffs_backend;

typedef struct {
    int fd;
    uint32_t alignment, around, generation;
} ffs_file;

struct ffs_engine {
    const ffs_backend *backend;
    uint32_t depth, thread_count;
    bool registers; /* wanted: registered buffers */
    int pid;
    uint8_t *arena;
    uint64_t arena_size;
    ffs_entry *entries;
    uint64_t entry_count;

    pthread_mutex_t lock;                  /* guards everything down to `threads` */
    pthread_cond_t work;                   /* threads backend: the FIFO is not empty, or stop */
    pthread_cond_t settled;                /* a thread has started; the last waiter has left */
    pthread_cond_t ended[FFS_WAIT_GROUPS]; /* a batch of the group has ended */
    uint32_t listeners[FFS_WAIT_GROUPS];   /* threads that wait for that */
    ffs_job *head, *tail;                  /* FIFO of batches with reads not yet taken */
    ffs_job *finished;                     /* ended, their owners not yet woken */
    ffs_job *done_head, *done_tail;
    ffs_file *files;
    uint32_t file_room, generation;
    uint32_t files_used;  /* ids below are in use */
    uint64_t arena_ready; /* pages below may be registered */
    uint64_t arena_end;   /* of the part in use: below it all pieces but the last are full */
    uint64_t arena_floor; /* the lowest that `arena_ready` was since the I/O thread looked */
    uint32_t idle, waiters, started;
    int start_error, broken;
    bool notify, joined;
    bool abandoned; /* a thread could not be woken and still uses this memory */
    bool notified;  /* done_fd was written, or is about to be, and not read */
    pthread_t *threads;
    void **states;

    int wake_fd, done_fd;
    ffs_op *ops; /* shared out among the backend's threads */
    uint32_t op_count;
    _Atomic bool stopping;
    _Atomic bool sleeping; /* the I/O thread waits (or is about to) and could take work */
    _Atomic bool files_removed, arena_changed;
    _Atomic uint32_t queued, inflight;
    _Atomic uint64_t reads, bytes, short_reads, errors, checksum_errors, wakeups, submits;
    _Atomic uint64_t fixed, registered;
};

/* Fill a spare op with the next read of the FIFO; false when there is none. */
bool ffs_take(ffs_engine *e, ffs_op *op);
/* result: bytes of this attempt or -errno. True: issue the op again (offset, to, size are set);
 * false: it has landed. */
bool ffs_advance(ffs_engine *e, ffs_op *op, int64_t result);
/* Verify, publish and account for an op that has landed; it is spare then. */
void ffs_settle(ffs_engine *e, ffs_op *op);
/* Wake those whose batches have ended since the last call. */
void ffs_flush(ffs_engine *e);
/* Threads backend: block until there may be work; false to stop. */
bool ffs_await_work(ffs_engine *e);
/* I/O thread backends: true if it may block now; ffs_wake() is then sure to write wake_fd. */
bool ffs_sleep(ffs_engine *e);
static inline void ffs_awake(ffs_engine *e)
{
    atomic_store_explicit(&e->sleeping, false, memory_order_relaxed);
}
static inline bool ffs_stopping(ffs_engine *e)
{
    return atomic_load_explicit(&e->stopping, memory_order_acquire);
}
static inline uint32_t ffs_queued(ffs_engine *e)
{
    return atomic_load_explicit(&e->queued, memory_order_acquire);
}
/* The generation of the file that has this id now, 0 for none. */
uint32_t ffs_file_generation(ffs_engine *e, int id);
/* Write wake_fd. False: it is closed, and a thread that waits for it cannot be woken. */
bool ffs_wake(ffs_engine *e);
/* Fail the reads in the FIFO; under the lock. */
void ffs_cancel_queued(ffs_engine *e, int error);
/* The backend no longer works (its ring is gone): fail all reads that are or will be queued. */
void ffs_break(ffs_engine *e, int error);
/* Fail the reads in flight, whose completion cannot be awaited: the backend is broken. */
void ffs_lose(ffs_engine *e);
/* Reads settled in a row before the I/O thread looks at the device again. */
#define FFS_STRETCH 8
/* Pieces that a read of a file with this alignment takes: 1 or more. */
uint32_t ffs_pieces(const ffs_read *read, uint32_t alignment);
int ffs_op_begin(ffs_engine *e, ffs_op *op);
/* 0 or -ENOMEM. */
int ffs_op_map_bounce(ffs_op *op);
void ffs_op_free(ffs_op *op);
/* Whether a spare op has a bounce buffer while the process has more than it keeps. */
bool ffs_op_is_surplus(const ffs_op *op);
/* Called before the ops of an engine are used: in a forked child the parent's do not count. */
void ffs_count_bounces(void);

extern const ffs_backend ffs_backend_uring, ffs_backend_aio, ffs_backend_threads;
#endif
