/* Lease tables: what clients read in place, see hazards.c. */
#ifndef FFSERVE_HAZARDS_H
#define FFSERVE_HAZARDS_H
#include "shm.h"

/* cdef */
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
/* end cdef */
#endif
