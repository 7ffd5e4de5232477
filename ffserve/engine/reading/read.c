/* One read from start to end: widening, pieces, bounce buffer, short reads, verification, copying to
 * the caller, publishing.
 *
 * Direct I/O must start and end at multiples of the file's alignment, so an extent is widened on both
 * sides and the payload begins `offset - lo` bytes into the buffer. A short read is continued where
 * it stopped, rounded down to the alignment. Only the end of a file leaves an unaligned remainder;
 * reading that block again returns nothing new, so no progress means the end of the file.
 *
 * A read through the page cache may bring what lies around it. If that fails, it reads what was asked
 * for and no more.
 *
 * A read without a slot goes to the bounce buffer, and each record is copied to its place when it is
 * verified, while it is in the processor's cache.
 *
 * Each piece of a larger read puts its bytes where they belong, in the slot or at the records'
 * destinations. The piece that ends last verifies them there.
 */
#define _GNU_SOURCE /* AT_EMPTY_PATH */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "backend.h"

#define PAGE 4096

/* Bounce buffers of all engines of the process `owner`. A forked child begins with none. */
static _Atomic int bounces;
static _Atomic int owner;

int ffs_op_map_bounce(ffs_op *op)
{
    if (op->bounce)
        return 0;
    void *p = mmap(NULL, FFS_BOUNCE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                   0);
    if (p == MAP_FAILED)
        return -ENOMEM;
    /* If the process forked while the device writes here, the bytes would go to whichever side keeps
     * the original page; without the mapping the child cannot take it. */
    madvise(p, FFS_BOUNCE_SIZE, MADV_DONTFORK);
    op->bounce = p;
    atomic_fetch_add_explicit(&bounces, 1, memory_order_relaxed);
    return 0;
}

void ffs_op_free(ffs_op *op)
{
    if (!op->bounce)
        return;
    munmap(op->bounce, FFS_BOUNCE_SIZE);
    op->bounce = NULL;
    atomic_fetch_sub_explicit(&bounces, 1, memory_order_relaxed);
}

bool ffs_op_is_surplus(const ffs_op *op)
{
    return op->bounce && atomic_load_explicit(&bounces, memory_order_relaxed) > FFS_BOUNCES_KEPT;
}

void ffs_count_bounces(void)
{
    int pid = getpid();
    if (atomic_exchange(&owner, pid) != pid)
        atomic_store(&bounces, 0);
}

/* The extent of a read, widened to whole blocks. */
typedef struct {
    uint64_t lo, hi;
} span;

static inline span widened(const ffs_read *read, uint32_t alignment)
{
    uint64_t mask = alignment - 1;
    return (span){read->offset & ~mask, (read->offset + read->length + mask) & ~mask};
}

/* Bytes of each piece: as equal as blocks and pages allow, so that the last one is not tiny. */
static inline uint64_t step_of(uint64_t size, uint32_t alignment)
{
    uint64_t unit = alignment < PAGE ? PAGE : alignment;
    uint64_t count = (size + FFS_BOUNCE_SIZE - 1) / FFS_BOUNCE_SIZE;
    return ((size + count - 1) / count + unit - 1) & ~(unit - 1);
}

uint32_t ffs_pieces(const ffs_read *read, uint32_t alignment)
{
    span all = widened(read, alignment);
    uint64_t size = all.hi - all.lo;
    if (size <= FFS_BOUNCE_SIZE)
        return 1;
    uint64_t step = step_of(size, alignment);
    return (uint32_t)((size + step - 1) / step);
}

/* Set up the next attempt; something is left to read. */
static void set_attempt(ffs_op *op)
{
    uint64_t from = op->got & ~(uint64_t)(op->alignment - 1);
    op->offset = op->lo + from;
    op->to = op->base + from;
    op->size = op->hi - op->offset;
}

/* 0: issue the read; 1: there is nothing to read; or -errno. */
int ffs_op_begin(ffs_engine *e, ffs_op *op)
{
    const ffs_read *read = op->read;
    span all = widened(read, op->alignment);

    op->got = op->bytes = 0;
    op->error = 0;
    op->lo = all.lo;
    op->hi = all.hi;
    if (all.hi - all.lo > FFS_BOUNCE_SIZE) {
        uint64_t step = step_of(all.hi - all.lo, op->alignment);
        op->lo = all.lo + op->piece * step;
        op->hi = op->lo + step < all.hi ? op->lo + step : all.hi;
    }
    uint64_t end = read->offset + read->length;
    op->end = end < op->hi ? end : op->hi;
    op->base = NULL;
    if (read->slot != UINT64_MAX)
        op->base = e->arena + read->slot + (op->lo - all.lo);
    if (!read->length)
        return 1;
    if (!op->base) {
        if (ffs_op_map_bounce(op))
            return -ENOMEM;
        op->base = op->bounce;
    }
    set_attempt(op);
    return 0;
}

/* Verify and publish a record whose bytes are at `payload`. */
static int32_t verify(ffs_engine *e, const ffs_read *read, ffs_record *r, const uint8_t *payload)
{
    if (read->checksum_kind != FFS_CRC_NONE) {
        r->found = ffs_checksum(read->checksum_kind, 0, payload, r->length);
        if (r->found != r->checksum) {
            atomic_fetch_add_explicit(&e->checksum_errors, 1, memory_order_relaxed);
            return FFS_ECHECKSUM;
        }
    }
    if (r->dest && r->dest != payload && r->length)
        memcpy(r->dest, payload, r->length);
    if (r->entry != UINT64_MAX)
        ffs_publish(&e->entries[r->entry],
                    (uint64_t)((read->slot != UINT64_MAX ? payload : r->dest) - e->arena),
                    r->length);
    return 0;
}

/* A record of a read in one piece: it is in the slot or the bounce buffer. */
static int32_t settle_record(ffs_engine *e, const ffs_op *op, ffs_record *r)
{
    uint64_t skip = r->offset - op->lo;
    if (r->length && skip + r->length > op->got)
        return FFS_ETRUNCATED;
    return verify(e, op->read, r, op->base ? op->base + skip : NULL);
}

/* Copy the part of a record that a piece brought, unless it was read to its destination. */
static void settle_part(const ffs_op *op, ffs_record *r)
{
    uint64_t from = r->offset > op->lo ? r->offset : op->lo;
    uint64_t to = r->offset + r->length < op->end ? r->offset + r->length : op->end;
    if (from >= to)
        return;
    if (to > op->lo + op->got)
        __atomic_store_n(&r->status, FFS_ETRUNCATED, __ATOMIC_RELAXED);
    else if (op->read->slot == UINT64_MAX)
        memcpy(r->dest + (from - r->offset), op->base + (from - op->lo), to - from);
}

static uint32_t settle_pieces(ffs_engine *e, const ffs_op *op, ffs_record *records, int error)
{
    const ffs_read *read = op->read;
    uint64_t lo = widened(read, op->alignment).lo;
    uint32_t failed = 0;
    for (uint32_t k = 0; k < read->record_count; k++) {
        ffs_record *r = &records[k];
        const uint8_t *at = read->slot != UINT64_MAX ? e->arena + read->slot + (r->offset - lo)
                                                     : r->dest;
        if (error)
            r->status = error;
        else if (!r->status)
            r->status = verify(e, read, r, at);
        failed += r->status != 0;
    }
    return failed;
}

/* Settle a piece. Returns whether it was the last one of the read. */
static bool settle_piece(ffs_engine *e, ffs_op *op, ffs_record *records, uint32_t *failed)
{
    ffs_pieced *pieced = &op->job->pieced[op->read - op->job->face.reads];
    if (op->error)
        atomic_store_explicit(&pieced->error, op->error, memory_order_relaxed);
    else
        for (uint32_t k = 0; k < op->read->record_count; k++)
            settle_part(op, &records[k]);
    /* Releases the bytes of this piece, acquires those of the others. */
    if (atomic_fetch_sub_explicit(&pieced->left, 1, memory_order_acq_rel) != 1)
        return false;
    *failed = settle_pieces(e, op, records, pieced->error);
    return true;
}

static void settle_whole(ffs_engine *e, const ffs_op *op, ffs_record *records, uint32_t *failed)
{
    for (uint32_t k = 0; k < op->read->record_count; k++) {
        records[k].found = 0;
        records[k].status = op->error ? op->error : settle_record(e, op, &records[k]);
        *failed += records[k].status != 0;
    }
}

void ffs_settle(ffs_engine *e, ffs_op *op)
{
    int error = op->error;
    ffs_job *job = op->job;
    ffs_record *records = job->face.records + op->read->first_record;
    uint32_t failed = 0;
    bool ended = true;

    /* First, because the batch may be freed once another thread has settled the last piece. */
    __atomic_fetch_add(&job->face.bytes, op->bytes, __ATOMIC_RELAXED);
    if (ffs_pieces(op->read, op->alignment) == 1)
        settle_whole(e, op, records, &failed);
    else
        ended = settle_piece(e, op, records, &failed);
    op->job = NULL;
    atomic_fetch_add_explicit(&e->reads, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&e->bytes, op->bytes, memory_order_relaxed);
    if (error)
        atomic_fetch_add_explicit(&e->errors, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&e->inflight, 1, memory_order_relaxed);
    if (!ended)
        return;
    if (failed)
        __atomic_fetch_add(&job->face.failed, failed, __ATOMIC_RELAXED);
    /* Releases the bytes of this read, acquires those of the batch's other reads: the thread that
     * ends the last read passes all of them on. */
    if (atomic_fetch_sub_explicit(&job->remaining, 1, memory_order_acq_rel) == 1) {
        pthread_mutex_lock(&e->lock);
        job->next = e->finished;
        e->finished = job;
        pthread_mutex_unlock(&e->lock);
    }
}

bool ffs_advance(ffs_engine *e, ffs_op *op, int64_t result)
{
    if (result == -EAGAIN || result == -EINTR)
        return true;
    if (result < 0 && op->around) {
        /* What lies around the read cannot be read. Nobody asked for it. */
        op->around = false;
        op->alignment = 1;
        return !ffs_op_begin(e, op);
    }
    if (result < 0) {
        op->error = (int)result;
        return false;
    }
    op->bytes += (uint64_t)result;
    uint64_t reached = op->offset - op->lo + (uint64_t)result;
    bool progress = reached > op->got;
    if (progress)
        op->got = reached;
    /* The over-read after the payload is not needed; it may be past the end of the file. */
    if (!progress || op->lo + op->got >= op->end)
        return false;
    atomic_fetch_add_explicit(&e->short_reads, 1, memory_order_relaxed);
    set_attempt(op);
    return true;
}

int64_t ffs_file_system_type(int fd)
{
    struct statfs fs;
    return fstatfs(fd, &fs) ? -errno : (int64_t)fs.f_type;
}

int ffs_dio_alignment(int fd, uint32_t *memory, uint32_t *offset)
{
    /* Headers older than Linux 6.1 lack two fields of struct statx, whose offsets are ABI: stx_mask
     * at 0, stx_dio_mem_align at 152, stx_dio_offset_align at 156. */
    uint32_t x[64] = {0};
    const unsigned dioalign = 0x2000;
    *memory = *offset = 0;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, dioalign, x) < 0)
        return errno == ENOSYS ? -EOPNOTSUPP : -errno;
    if (!(x[0] & dioalign))
        return -EOPNOTSUPP;
    *memory = x[38];
    *offset = x[39];
    return 0;
}
