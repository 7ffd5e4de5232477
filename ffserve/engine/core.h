/* The face of the C core. Everything below the cdef mark is also what Python sees (cffi).
 *
 * Three things live here and nothing else: reading extents (an engine is one I/O thread over a
 * ring, Linux AIO, or a pool of preadv threads), checksums, and the seqlocked directory that
 * lets a client copy samples out of shared memory without asking anybody. No policy, no Python
 * object, no errno left behind: functions return 0 or a negative errno or FFS_E* below.
 */
#ifndef FFSERVE_CORE_H
#define FFSERVE_CORE_H
#include <stddef.h>
#include <stdint.h>

/* cdef */
#define FFS_ECHECKSUM -100001    /* the payload does not match its checksum */
#define FFS_ETRUNCATED -100002   /* the file ended inside the payload */
#define FFS_ESTALE -100003       /* a directory entry changed its length: look the sample up again */
#define FFS_ERANGE -100004       /* an index outside the view; a place outside the arena */

#define FFS_CRC_NONE 0
#define FFS_CRC_32 1             /* zlib's CRC-32 */
#define FFS_CRC_32C 2            /* Castagnoli */

/* ---- the directory: one entry a sample, shared read-only with every client ----------------
 * seq: low bit set = readable. Every change of state adds 1.
 * place: low 48 bits the payload's byte offset in the arena, high 16 bits the high part of the
 * length. length = length_low | (place >> 48) << 32; all 48 bits set = not known yet. */
typedef struct { uint32_t seq; uint32_t length_low; uint64_t place; } ffs_entry;

/* A run of samples [first, first + count) of a dataset whose entries lie together. */
typedef struct { const ffs_entry *entries; uint64_t first; uint64_t count; } ffs_segment;

/* What a client needs to copy samples: segments in rising order of `first`, gapless from 0. */
typedef struct {
    const uint8_t *arena; uint64_t arena_size;
    const ffs_segment *segments; uint64_t segment_count;
} ffs_view;

/* Look n indices up. offsets[n+1] gets the running sum of lengths (0 for an unknown length);
 * missing[] (or NULL) gets the positions (0..n-1) that are not readable now. Returns how many are missing,
 * or FFS_ERANGE when an index is outside the view (*bad gets its position). *unknown gets how
 * many lengths were unknown. */
int64_t ffs_locate(const ffs_view *view, const int64_t *indices, int64_t n, int64_t *offsets,
                   int64_t *missing, int64_t *unknown, int64_t *bad);

/* Copy samples out. For each k in positions[0..m) (NULL: 0..n-1): copy sample indices[k] to
 * dests[k] if dests is not NULL, else to buffer + offsets[k], provided that its entry is readable
 * before and after and its length is offsets[k+1]-offsets[k]. left[] (or NULL) gets the positions
 * that were not readable (left may be the same array as positions). Returns their number, or
 * FFS_ESTALE when a length differs, FFS_ERANGE when an entry points outside the arena. */
int64_t ffs_gather(const ffs_view *view, const int64_t *indices, const int64_t *offsets,
                   uint8_t *buffer, uint8_t *const *dests,
                   const int64_t *positions, int64_t m, int64_t *left);

/* Both in one, for a batch that can be read whole: 0 copied back to back into buffer; 1 not copied,
 * since it takes less than least or more than room bytes (offsets[] is filled); FFS_ESTALE when not
 * every sample could be read, FFS_ERANGE as above. at_once: it likely fits, so copy while looking
 * samples up, which takes longer if it does not. Other than 0: the buffer may be written to. */
int ffs_copy_batch(const ffs_view *view, const int64_t *indices, int64_t n, int64_t *offsets,
                   uint8_t *buffer, uint64_t least, uint64_t room, int at_once);

/* Copy by vectors of at most so many bytes from now on (64, 32; 0: as the C library does): for
 * tests. Returns what the processor has. */
int ffs_copy_width(int most);

/* Payload places for reading in place (the samples are pinned by the caller): places[k] = byte
 * offset in the arena, or UINT64_MAX when not readable. Returns how many were not readable. */
int64_t ffs_places(const ffs_view *view, const int64_t *indices, int64_t n, uint64_t *places);

/* Daemon side. Make entries [firsts[k], firsts[k]+counts[k]) unreadable, k < m, those only whose
 * place lies inside [slots[k], slots[k]+sizes[k]); full fence before returning. */
void ffs_retract(ffs_entry *entries, const int64_t *firsts, const int64_t *counts,
                 const uint64_t *slots, const uint64_t *sizes, int64_t m);

/* Publish one sample whose bytes are in place already (decoded, or served from elsewhere). */
void ffs_publish(ffs_entry *entry, uint64_t offset, uint64_t length);

/* A word in memory that two processes share: whoever sees the value that was set also sees what the
 * setter did before, and what the setter read before stays read. */
void ffs_flag_set(uint32_t *flag, uint32_t value);
uint32_t ffs_flag_get(const uint32_t *flag);

/* Publish n samples of one block: entries [first, first + n), payload k at base + starts[k]. */
void ffs_publish_run(ffs_entry *entries, uint64_t first, int64_t n, uint64_t base,
                     const int64_t *starts, const int64_t *lengths);

/* ---- leases without asking (hazards.c) --------------------------------------------------- */
#define FFS_PANEL 64             /* samples that a panel of a table can name */
#define FFS_PANELS 512

/* What a client leases: PROTOCOL.md, section 4. The daemon writes `budget`, the client the rest. */
typedef struct {
    uint64_t budget;             /* bytes that may be claimed; 0: nobody looks here */
    uint64_t reserved_0[7];
    uint64_t claimed;
    uint64_t reserved_1[7];
    uint64_t live[8];            /* a bit a panel: its samples are leased */
    uint64_t reserved_2[8];
    uint32_t samples[32768];     /* the number of a sample and 1, or 0 */
} ffs_hazards;

ffs_hazards *ffs_hazards_map(int fd);  /* of a file of that size; NULL: the kernel refused */
void ffs_hazards_unmap(ffs_hazards *table);

/* A client's own side of its table: which panels its leases have taken; whether there are to be no
 * new ones. */
typedef struct {
    ffs_hazards *table;          /* NULL: not ours any more */
    uint64_t used[8];
    uint32_t ended;
} ffs_leases;

/* What leasing samples of one data set needs. */
typedef struct {
    ffs_leases *leases;
    const uint64_t *bases;       /* of each segment of the view: the number of its first sample */
    uint64_t extra;              /* what a sample is charged beyond its length */
} ffs_leaser;

typedef struct { uint64_t panels[8]; uint64_t claimed; uint64_t size; } ffs_lease_note;

/* Lease n samples. starts[k] = byte offset in the arena, or -1 where it is not readable now, or
 * where there is no room (sizes[k] then means nothing); sizes[k] = length. note: to be given to ffs_unlease, once;
 * its `size` is the sum of the leased lengths. Returns how many were not leased, or FFS_ERANGE: an
 * index outside of the view, an entry that points outside of the arena; then nothing is leased. */
int64_t ffs_lease(const ffs_leaser *leaser, const ffs_view *view, const int64_t *indices,
                  int64_t n, int64_t *starts, int64_t *sizes, ffs_lease_note *note);
/* Returns 1 when that was the last lease and there are to be no new ones. */
int ffs_unlease(ffs_leases *leases, ffs_lease_note *note);
/* Lease nothing any more. Returns whether something is leased still, in a call to ffs_lease that
 * has not returned included. */
int ffs_leases_end(ffs_leases *leases);

/* Daemon side. Set the budget; what the client had claimed after that. */
uint64_t ffs_hazards_set_budget(ffs_hazards *table, uint64_t budget);
/* The numbers of all samples that n tables name, any u32, repeats and all; those of table t end at
 * ends[t]. `samples` has room for 32768 a table. A full fence comes before, see ffs_retract. */
int64_t ffs_hazards_read(ffs_hazards *const *tables, int64_t n, uint32_t *samples, int64_t *ends);
/* Make entries readable again that were retracted and whose slots were not written to. */
void ffs_restore(ffs_entry *entries, const int64_t *numbers, int64_t n);

/* ---- checksums --------------------------------------------------------------------------- */
uint32_t ffs_checksum(int kind, uint32_t seed, const void *bytes, uint64_t size);
/* For n records payload k = base + offsets[k] .. + lengths[k]: out[k] = its checksum. */
void ffs_checksums(int kind, const uint8_t *base, const uint64_t *offsets, const uint64_t *lengths,
                   int64_t n, uint32_t *out);

/* ---- TFRecord's frames ------------------------------------------------------------------- */
#define FFS_FRAMES_MORE 0        /* give a window from `at` on, or from 4 bytes before if owed */
#define FFS_FRAMES_FULL 1        /* no room for another record */
#define FFS_FRAMES_END 2         /* the file ends behind a whole frame */
#define FFS_FRAMES_BAD_HEADER 3  /* the header at `at` does not match its checksum */
#define FFS_FRAMES_CUT_HEADER 4  /* fewer bytes are left at `at` than a header has */
#define FFS_FRAMES_CUT_RECORD 5  /* the frame at `at` is longer than the rest of the file */

/* A walk over the frames of a file: where it is (the next header), and what it found. */
typedef struct {
    uint64_t file_size, at;
    uint64_t *offsets, *lengths;  /* of payloads, `room` each */
    uint32_t *checksums;          /* stored, unmasked */
    int64_t count, room;
    int32_t verify;               /* hold headers against their checksums */
    int32_t owed;                 /* the last record's checksum, at - 4, was not seen yet */
} ffs_frame_walk;

/* Go on through the file's bytes [base, base + size); return one of FFS_FRAMES_*. */
int ffs_frames(ffs_frame_walk *walk, const uint8_t *window, uint64_t base, uint64_t size);

/* Frame n payloads that lie back to back, payload k = payloads[edges[k] .. edges[k + 1]); out gets
 * them all and 16 bytes each. */
void ffs_frame_all(const uint8_t *payloads, const uint64_t *edges, int64_t n, uint8_t *out);

/* The search for the frame that follows one whose header is damaged. at: where to look next;
 * proven: take a place only if the payload that would end there, begun at `summed` with checksum
 * `crc`, matches the four bytes in front of the place. The end of the file is then a place too. */
typedef struct {
    uint64_t file_size, at, summed;
    uint32_t crc;
    int32_t proven;
} ffs_frame_finder;

/* Go on through the file's bytes [base, base + size), which hold `at` and, if proven, `summed`:
 * 1 and `at` is such a place; or 0, and a window beginning at `at` (`summed`) is wanted, unless
 * the file ended. */
int ffs_frame_search(ffs_frame_finder *finder, const uint8_t *window, uint64_t base,
                     uint64_t size);

/* ---- RecordIO's chunks ------------------------------------------------------------------- */
#define FFS_CHUNKS_MORE 0   /* give a window that holds 20 bytes from `wanted` on, or all left */
#define FFS_CHUNKS_FULL 1   /* no room for another chunk */
#define FFS_CHUNKS_END 2    /* the file ends behind a whole chunk */
#define FFS_CHUNKS_FAULT 3  /* no chunk that can be taken stands at `at` */

/* A walk over the headers of a file: where it is, and the chunks it found. */
typedef struct {
    uint64_t file_size;
    uint64_t at;            /* where the next chunk begins; all before it is in the tables */
    uint64_t wanted;        /* out: with FFS_CHUNKS_MORE */
    int64_t *begins, *ends; /* extents in the file, header included, `room` each */
    int64_t *firsts;        /* number of the first record, room + 1 of them, the first is 0 */
    int64_t *sizes;         /* bytes that each decodes to, as it tells */
    uint32_t *checksums;
    uint8_t *compressors;   /* as the dialect numbers them */
    int64_t count, room;
    uint64_t records_allowed, records_a_byte; /* so many in all, and so many more a byte of file */
    int32_t dialect;        /* 0 py, 1 go, -1: the first chunk tells */
    int32_t inside;         /* the walk's own: the header at `at` was read, */
    uint64_t place;         /* its payload is looked at here next, */
    uint64_t decoded;       /* and told of so many bytes until there */
    uint32_t words[5];
} ffs_chunk_walk;

/* Go on through the file's bytes [base, base + size); return one of FFS_CHUNKS_*. */
int ffs_chunks(ffs_chunk_walk *walk, const uint8_t *window, uint64_t base, uint64_t size);

/* Walk over at most n records (u32 length, bytes) that lie one behind the other in `size` bytes.
 * starts[], lengths[]: of those that lie whole inside, whose number is returned; *end: behind the
 * last of them. The bytes hold exactly n records if n is returned and *end is size. */
int64_t ffs_split(const uint8_t *bytes, uint64_t size, int64_t n, int64_t *starts,
                  int64_t *lengths, uint64_t *end);

/* Copy n pieces, each to a place of its own. */
void ffs_scatter(const uint8_t *bytes, const int64_t *starts, const int64_t *lengths, int64_t n,
                 uint8_t *const *dests);

/* ---- reading ----------------------------------------------------------------------------- */
/* One record inside an extent. */
typedef struct {
    uint64_t offset;      /* of the payload in the file */
    uint64_t length;
    uint64_t entry;       /* directory entry to publish, or UINT64_MAX */
    uint8_t *dest;        /* copy the payload there, or NULL; bytes are of use only if status is 0.
                           * Of a read that bounces and has an entry: in the arena, where nobody
                           * reads yet */
    uint32_t checksum;    /* expected */
    uint32_t found;       /* out: what was computed, when verified */
    int32_t status;       /* out: 0, -errno, FFS_ECHECKSUM, FFS_ETRUNCATED */
    uint32_t reserved;
} ffs_record;

/* One read of one extent, into a slot of the arena or through a bounce buffer of the engine. */
typedef struct {
    uint64_t offset;      /* extent in the file, covers its records; the engine widens it to the */
    uint64_t length;      /*   file's alignment on both sides */
    uint64_t slot;        /* byte offset in the arena, or UINT64_MAX: bounce (then dest is needed) */
    uint64_t slot_size;   /* room there; must hold the widened extent */
    int32_t file;         /* from ffs_file_add */
    int32_t checksum_kind;
    uint32_t first_record, record_count;
} ffs_read;

typedef struct ffs_engine ffs_engine;

/* A batch of reads, filled by the caller, owned by the engine from submit until it is done.
 * `done` is 1 once every read has ended; results stand in records[].status. */
typedef struct {
    ffs_read *reads; ffs_record *records;
    uint32_t read_count, record_count;
    uint32_t failed;      /* out: records whose status is not 0 */
    uint32_t done;        /* out */
    uint64_t tag;         /* the caller's */
    uint64_t bytes;       /* out: bytes read from files, over-read included */
} ffs_batch;              /* the library's own fields follow behind these */

/* ---- answers that the I/O thread sends (answers.c) ----------------------------------------
 * A client's socket. The descriptor stays the caller's, who holds the line before he closes it. */
typedef struct ffs_line ffs_line;
ffs_line *ffs_line_new(int fd);               /* NULL: no memory */
void ffs_line_hold(ffs_line *line, int held); /* while held nothing is sent; 0: not any more */
void ffs_line_free(ffs_line *line);

/* A frame to be sent when `left` batches have ended and no record of theirs has failed. It and its
 * line must outlive these batches. */
typedef struct {
    ffs_line *line;
    uint32_t left;        /* 1 more than the batches until ffs_answer_settle */
    uint32_t failed, sent;
    uint32_t size;        /* of the frame */
    uint8_t frame[24];
} ffs_answer;

/* Before it is submitted: the answer waits for this batch; NULL: for something that never ends. */
void ffs_batch_answer(ffs_batch *b, ffs_answer *a);
/* It waits for no further batch. */
uint32_t ffs_answer_settle(ffs_answer *a);

#define FFS_ENGINE_URING 1
#define FFS_ENGINE_AIO 2
#define FFS_ENGINE_THREADS 3
#define FFS_ENGINE_REGISTERED 4  /* io_uring with registered buffers */

typedef struct {
    uint64_t reads, bytes, short_reads, errors, checksum_errors, wakeups, submits;
    uint64_t fixed;       /* reads issued into registered buffers */
    uint64_t registered;  /* bytes of memory that are registered now */
    uint32_t inflight, queued;
} ffs_counters;

/* Which kinds this build contains: bit 1 << kind. */
int ffs_built(void);
const char *ffs_checksum_library(void);

/* Start an engine. depth: reads in flight; threads: for FFS_ENGINE_THREADS. 0 or -errno. */
int ffs_engine_open(ffs_engine **out, int kind, uint32_t depth, uint32_t threads);
/* The arena and directory that slots and entries refer to; before the first submit. */
void ffs_engine_set_arena(ffs_engine *e, uint8_t *arena, uint64_t size, ffs_entry *entries,
                          uint64_t entry_count);
/* Bytes [0, size) of the arena have the pages that they will keep, so an engine that registers may
 * do so. A lower size than before takes that back: no read submitted afterwards relies on it, so
 * the pages above it may change once no read is on its way there. Nothing for other kinds. */
void ffs_engine_arena_ready(ffs_engine *e, uint64_t size, uint64_t end);
/* Add a file: alignment = logical block for offset and length (1 when buffered). The engine never
 * closes the descriptor. Returns an id >= 0 or -errno. */
int ffs_file_add(ffs_engine *e, int fd, uint32_t alignment);
void ffs_file_remove(ffs_engine *e, int id);  /* only when no read of it is queued or in flight */
/* What direct I/O asks of a file (statx, Linux 6.1): alignment of memory and of file offsets, both
 * 0 when the file cannot do it. 0, or -errno (-EOPNOTSUPP: the kernel does not tell). */
int ffs_dio_alignment(int fd, uint32_t *memory, uint32_t *offset);

ffs_batch *ffs_batch_new(uint32_t read_count, uint32_t record_count); /* zeroed; NULL: no memory */
void ffs_batch_free(ffs_batch *b);            /* never between submit and done */
int ffs_submit(ffs_engine *e, ffs_batch *b);
/* Block until the batch is done or timeout_ms passed (-1: for ever): 1 done, 0 not yet. */
int ffs_wait(ffs_engine *e, ffs_batch *b, int64_t timeout_ms);
/* Batches submitted after ffs_engine_notify(e, 1) are queued on a done list when they end and the
 * descriptor becomes readable (one wake for many). Pop one, or NULL. */
int ffs_engine_notify(ffs_engine *e, int on); /* returns the eventfd, or -errno */
ffs_batch *ffs_engine_pop(ffs_engine *e);     /* NULL: it is readable no more, or once in vain */
void ffs_engine_counters(ffs_engine *e, ffs_counters *out);
/* 0, or -errno: it reads nothing any more, and where a read of it has failed the kernel may still
 * write. */
int ffs_engine_broken(ffs_engine *e);
/* Wait for what is in flight, fail what is queued with -ECANCELED, end the threads. The engine
 * stays valid: submits get -ESHUTDOWN, ended batches can still be waited for and popped. */
void ffs_engine_stop(ffs_engine *e);
/* Stop, then free all. In a child of the process that opened the engine: forget. */
void ffs_engine_close(ffs_engine *e);
/* After fork, in the child: drop the engine without touching threads that are not there. */
void ffs_engine_forget(ffs_engine *e);
/* ---- samples through a socket (sending.c) -------------------------------------------------
 * What is to be sent: `head`, then pieces of the arena. */
typedef struct {
    int sock;             /* a Unix stream socket that does not block */
    int memory;           /* the arena's file */
    const uint8_t *arena; /* its mapping */
    const uint8_t *head;
    int64_t head_size;
    const int64_t *starts, *lengths; /* of the pieces, in bytes */
    int64_t count;
    int64_t refer_from;   /* pieces of so many bytes and more go by reference; 0: none */
} ffs_sending;
/* Send, from the byte `done` of it all on, until everything went or the socket is full. Returns how many
 * bytes went, or -errno when none did (-EAGAIN: full). */
int64_t ffs_send(const ffs_sending *s, int64_t done);
/* Bytes that were sent and that the other side has not read, or more; 0: it has read all, or is gone. */
int64_t ffs_unread(int sock);
/* end cdef */

/* memcpy, in a process where others may write to `from` meanwhile. next, next_size: what will be
 * copied afterwards, asked for from memory ahead; never read, so it may be anything. */
void ffs_copy(uint8_t *to, const uint8_t *from, uint64_t size, const uint8_t *next,
              uint64_t next_size);
#endif
