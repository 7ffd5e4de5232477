/* Reading files: batches of reads, the engines that carry them out, replies sent from the I/O thread.
 *
 * An engine is one I/O thread over io_uring or Linux AIO, or a pool of threads that call pread. It
 * reads extents into slots of the arena or into the caller's memory, verifies the checksums of the
 * records in them and publishes their directory entries. It has no policy and owns no Python
 * object. Functions return 0, or -errno, or FFS_E*. Everything between the cdef marks is also
 * declared to Python (cffi).
 */
#ifndef FFSERVE_IO_H
#define FFSERVE_IO_H
#include <stddef.h>
#include <stdint.h>

#include "codec.h"
#include "shm.h"

/* cdef */
#define FFS_ECHECKSUM -100001  /* the payload does not match its checksum */
#define FFS_ETRUNCATED -100002 /* the file ends inside the payload */

/* ---- batches ----------------------------------------------------------------------------- */
/* One record inside an extent. */
typedef struct {
    uint64_t offset; /* of the payload in the file */
    uint64_t length;
    uint64_t entry;    /* directory entry to publish, or UINT64_MAX */
    uint8_t *dest;     /* copy the payload here, or NULL; valid only if status is 0. If the
                           * read has no slot but the record has an entry: an address in the arena
                           * that nobody reads yet */
    uint32_t checksum; /* expected */
    uint32_t found;    /* out: computed, if verified */
    int32_t status;    /* out: 0, -errno, FFS_ECHECKSUM, FFS_ETRUNCATED */
    uint32_t reserved;
} ffs_record;

/* One read of one extent, into a slot of the arena or through a bounce buffer of the engine. */
typedef struct {
    uint64_t offset;    /* extent in the file, includes its records; the engine widens it to the */
    uint64_t length;    /*   file's alignment on both sides */
    uint64_t slot;      /* byte offset in the arena; UINT64_MAX: none, and records need a dest */
    uint64_t slot_size; /* must hold the widened extent */
    int32_t file;       /* from ffs_file_add */
    int32_t checksum_kind;
    uint32_t first_record, record_count;
} ffs_read;

typedef struct ffs_engine ffs_engine;

/* A batch of reads. The caller fills it; the engine owns it from submit until `done` is 1, which
 * it becomes when every read has ended. Results are in records[].status. */
typedef struct {
    ffs_read *reads;
    ffs_record *records;
    uint32_t read_count, record_count;
    uint32_t failed; /* out: records whose status is not 0 */
    uint32_t done;   /* out */
    uint64_t bytes;  /* out: bytes read from files, over-read included */
} ffs_batch;         /* private fields follow */

ffs_batch *ffs_batch_new(uint32_t read_count, uint32_t record_count); /* zeroed; NULL: no memory */
void ffs_batch_free(ffs_batch *b); /* never between submit and done */

/* ---- direct replies ----------------------------------------------------------------------
 * A client's socket. The descriptor stays the caller's, who blocks the socket before closing it. */
typedef struct ffs_reply_socket ffs_reply_socket;
ffs_reply_socket *ffs_reply_socket_new(int fd); /* NULL: no memory */
/* Block or unblock direct replies. After blocking returns, none is being sent. */
void ffs_reply_socket_block(ffs_reply_socket *socket, int blocked);
void ffs_reply_socket_free(ffs_reply_socket *socket);

/* A frame that the I/O thread sends when every batch it waits for has ended and none of their
 * records failed. It and its socket must outlive these batches. */
typedef struct {
    ffs_reply_socket *socket;
    uint32_t left; /* batches that have not ended, plus 1 until ffs_reply_arm */
    uint32_t failed, sent;
    uint32_t size; /* of the frame */
    uint8_t frame[24];
} ffs_reply;

/* Wait for this batch too; to be called before it is submitted. NULL: for one more ffs_reply_arm. */
void ffs_reply_wait_for(ffs_reply *reply, ffs_batch *b);
/* Wait for no further batch. */
uint32_t ffs_reply_arm(ffs_reply *reply);

/* ---- engines ----------------------------------------------------------------------------- */
#define FFS_ENGINE_URING 1
#define FFS_ENGINE_AIO 2
#define FFS_ENGINE_THREADS 3
#define FFS_ENGINE_REGISTERED 4 /* io_uring with registered buffers */

typedef struct {
    uint64_t reads, bytes, short_reads, errors, checksum_errors, wakeups, submits;
    uint64_t fixed;      /* reads issued into registered buffers */
    uint64_t registered; /* bytes of memory that are registered now */
    uint32_t inflight, queued;
} ffs_counters;

/* The kinds of engine in this build: bit 1 << kind. */
int ffs_built(void);
/* Start an engine. depth: reads in flight; threads: for FFS_ENGINE_THREADS. 0 or -errno. */
int ffs_engine_open(ffs_engine **out, int kind, uint32_t depth, uint32_t threads);
/* Set the arena and the directory that slots and entries refer to; before the first submit. */
void ffs_engine_set_arena(ffs_engine *e, uint8_t *arena, uint64_t size, ffs_entry *entries,
                          uint64_t entry_count);
/* Announce that bytes [0, size) of the arena keep their pages, so that an engine may register them;
 * [0, end) is in use. A lower size than before withdraws the rest: reads submitted afterwards do
 * not use it, and its pages may change once no earlier read is in flight there. Engines of other
 * kinds ignore this. */
void ffs_engine_arena_ready(ffs_engine *e, uint64_t size, uint64_t end);

/* Add a file. alignment: of offsets and lengths, the logical block size (1: buffered). around: a
 * shorter read without a slot brings whole blocks of so many bytes into the page cache (0: no). The
 * engine never closes the descriptor. Returns an id >= 0 or -errno. */
int ffs_file_add(ffs_engine *e, int fd, uint32_t alignment, uint32_t around);
/* Add n files; fds[k] -1: none, its id is -1. 0, or -errno: none was added. */
int ffs_files_add(ffs_engine *e, const int32_t *fds, const int64_t *alignments, int64_t n,
                  int32_t *ids);
void ffs_file_remove(ffs_engine *e, int id); /* only when no read of it is queued or in flight */
/* Alignment of memory and of file offsets that direct I/O on a file requires (statx, Linux 6.1), 0
 * where the file does not support it. 0, or -errno (-EOPNOTSUPP: the kernel does not say). */
int ffs_dio_alignment(int fd, uint32_t *memory, uint32_t *offset);

/* The type of the file system that a file is on (f_type of statfs), or -errno. */
int64_t ffs_file_system_type(int fd);

int ffs_submit(ffs_engine *e, ffs_batch *b);
/* Wait until the batch is done or timeout_ms have passed (-1: no limit): 1 done, 0 not yet. */
int ffs_wait(ffs_engine *e, ffs_batch *b, int64_t timeout_ms);
/* on: batches submitted from now on go to the done list when they end, and the descriptor that is
 * returned (an eventfd) becomes readable, once for many batches. */
int ffs_engine_notify(ffs_engine *e, int on);
/* Take a batch from the done list. NULL: it is empty and the descriptor no longer readable; one
 * spurious wakeup may follow. */
ffs_batch *ffs_engine_pop(ffs_engine *e);
void ffs_engine_counters(ffs_engine *e, ffs_counters *out);
/* 0, or the -errno for which the engine stopped reading. The kernel may still write to the
 * destinations of reads that have failed. */
int ffs_engine_broken(ffs_engine *e);
/* Wait for reads in flight, fail queued ones with -ECANCELED, end the threads. The engine stays
 * valid: a submit returns -ESHUTDOWN, batches that have ended can be waited for and popped. */
void ffs_engine_stop(ffs_engine *e);
/* Stop, then free everything. In a forked child: forget. */
void ffs_engine_close(ffs_engine *e);
/* In a forked child: free the engine without touching threads, which the child does not have. */
void ffs_engine_forget(ffs_engine *e);
/* end cdef */
#endif
