/* One read from its start to its end: widening, the buffer, short reads, verification, the copy to
 * the caller, publication.
 *
 * Direct I/O has to start and end at multiples of the file's alignment, so an extent is widened on
 * both sides and the payload lies `offset - lo` bytes into the buffer. A read that stops short goes
 * on from where it stopped, rounded down to the alignment. Only the end of a file leaves an
 * unaligned remainder; reading that block again brings nothing new, and no progress means the end.
 */
#define _GNU_SOURCE /* AT_EMPTY_PATH */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend.h"

static uint8_t *map_buffer(uint64_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    /* A fork while the device writes here would leave the bytes with whichever side copied the
     * page first; a child that does not have the pages cannot take them. */
    madvise(p, size, MADV_DONTFORK);
    if (size >= (uint64_t)4 << 20)
        madvise(p, size, MADV_HUGEPAGE);
    return p;
}

int ffs_op_map_bounce(ffs_op *op)
{
    if (!op->bounce)
        op->bounce = map_buffer(FFS_BOUNCE_SIZE);
    return op->bounce ? 0 : -ENOMEM;
}

void ffs_op_free(ffs_op *op)
{
    if (op->bounce)
        munmap(op->bounce, FFS_BOUNCE_SIZE);
    op->bounce = NULL;
}

/* Set the next attempt; the caller knows that something is left to read. */
static void aim(ffs_op *op)
{
    uint64_t from = op->got & ~(uint64_t)(op->alignment - 1);
    op->offset = op->lo + from;
    op->to = op->base + from;
    op->size = op->hi - op->offset;
    if (op->size > FFS_READ_MAX)
        op->size = FFS_READ_MAX;
}

/* 0: issue it; 1: there is nothing to read; or -errno. */
int ffs_op_begin(ffs_engine *e, ffs_op *op)
{
    const ffs_read *read = op->read;
    uint64_t mask = op->alignment - 1;

    op->got = op->bytes = 0;
    op->error = 0;
    op->large = op->base = NULL;
    op->lo = op->hi = read->offset;
    if (read->slot != UINT64_MAX)
        op->base = e->arena + read->slot;
    if (!read->length)
        return 1;
    op->lo = read->offset & ~mask;
    op->hi = (read->offset + read->length + mask) & ~mask;
    uint64_t size = op->hi - op->lo;
    if (!op->base) {
        if (size > FFS_BOUNCE_SIZE) {
            op->base = op->large = map_buffer(size);
        } else {
            if (ffs_op_map_bounce(op))
                return -ENOMEM;
            op->base = op->bounce;
        }
        if (!op->base)
            return -ENOMEM;
    }
    aim(op);
    return 0;
}

static int32_t settle_record(ffs_engine *e, const ffs_op *op, ffs_record *r)
{
    const ffs_read *read = op->read;
    uint64_t skip = r->offset - op->lo;

    if (r->length && skip + r->length > op->got)
        return FFS_ETRUNCATED;
    const uint8_t *payload = r->length ? op->base + skip : NULL;
    if (read->checksum_kind != FFS_CRC_NONE) {
        r->found = ffs_checksum(read->checksum_kind, 0, payload, r->length);
        if (r->found != r->checksum) {
            atomic_fetch_add_explicit(&e->checksum_errors, 1, memory_order_relaxed);
            return FFS_ECHECKSUM;
        }
    }
    if (r->dest && r->length)
        memcpy(r->dest, payload, r->length);
    if (r->entry != UINT64_MAX)
        ffs_publish(&e->entries[r->entry],
                    read->slot != UINT64_MAX ? read->slot + skip : (uint64_t)(r->dest - e->arena),
                    r->length);
    return 0;
}

void ffs_settle(ffs_engine *e, ffs_op *op)
{
    int error = op->error;
    ffs_job *job = op->job;
    const ffs_read *read = op->read;
    ffs_record *records = job->face.records + read->first_record;
    uint32_t failed = 0;

    for (uint32_t k = 0; k < read->record_count; k++) {
        records[k].found = 0;
        records[k].status = error ? error : settle_record(e, op, &records[k]);
        failed += records[k].status != 0;
    }
    if (op->large)
        munmap(op->large, op->hi - op->lo);
    op->large = NULL;
    op->job = NULL;
    atomic_fetch_add_explicit(&e->reads, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&e->bytes, op->bytes, memory_order_relaxed);
    if (error)
        atomic_fetch_add_explicit(&e->errors, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&e->inflight, 1, memory_order_relaxed);

    if (failed)
        __atomic_fetch_add(&job->face.failed, failed, __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->face.bytes, op->bytes, __ATOMIC_RELAXED);
    /* Release what this read wrote, acquire what the batch's other reads did: the thread that
     * ends the last read hands all of them over. */
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
    if (result < 0) {
        op->error = (int)result;
        return false;
    }
    op->bytes += (uint64_t)result;
    uint64_t reached = op->offset - op->lo + (uint64_t)result;
    bool progress = reached > op->got;
    if (progress)
        op->got = reached;
    /* The over-read behind the payload may lie past the end of the file: nobody needs it. */
    if (!progress || op->lo + op->got >= op->read->offset + op->read->length)
        return false;
    atomic_fetch_add_explicit(&e->short_reads, 1, memory_order_relaxed);
    aim(op);
    return true;
}

int ffs_dio_alignment(int fd, uint32_t *memory, uint32_t *offset)
{
    /* struct statx by its places, which are ABI, because headers older than Linux 6.1 do not have
     * the two fields: stx_mask at 0, stx_dio_mem_align at 152, stx_dio_offset_align at 156. */
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
