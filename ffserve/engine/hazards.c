/* Leases without asking: a client says in a table what it reads in place, the daemon looks there
 * before it writes to a slot. (Michael, "Hazard pointers", 2004; each side's store must be seen by
 * the other before its own second look, as in Dekker's algorithm.)
 *
 *     client                              daemon
 *     seq readable? place                 seq to unreadable
 *     sample into the table               full fence
 *     full fence                          sample in the table?
 *     seq as before?                        no: the slot may be written to
 *       yes: it is leased                   yes: seq to readable again
 *
 * Of the two fences one comes first. If it is the client's, the daemon sees the sample; if it is
 * the daemon's, the client sees another seq. Both may happen, never neither.
 *
 * The bytes that a client may lease are bounded in the same way. It adds to `claimed` before it
 * names samples, a fence, and takes that back if it is above `budget`; the daemon lowers `budget`,
 * a fence, and goes by `claimed` if that is still above it. So nobody who keeps to this is ever
 * found above what the daemon allows him.
 *
 * Leases end by a release that the daemon's acquire meets: what was read in place was read before.
 */
#include <string.h>
#include <sys/mman.h>

#include "entries.h"
#include "hazards.h"

#define WORD 64

ffs_hazards *ffs_hazards_map(int fd)
{
    void *at = mmap(NULL, sizeof(ffs_hazards), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

void ffs_hazards_unmap(ffs_hazards *table)
{
    munmap(table, sizeof *table);
}

static inline int64_t cannot_lease(int64_t *starts, int64_t m)
{
    for (int64_t k = 0; k < m; k++)
        starts[k] = -1;
    return m;
}

/* A panel that no lease of this process uses, or -1. */
static int64_t take_panel(ffs_leases *leases)
{
    for (int64_t w = 0; w < FFS_PANELS / WORD; w++) {
        uint64_t used = __atomic_load_n(&leases->used[w], __ATOMIC_RELAXED);
        while (~used) {
            int64_t bit = __builtin_ctzll(~used);
            used = __atomic_fetch_or(&leases->used[w], UINT64_C(1) << bit, __ATOMIC_ACQUIRE);
            if (!(used >> bit & 1))
                return w * WORD + bit;
        }
    }
    return -1;
}

static void give_panels(ffs_leases *leases, int64_t word, uint64_t panels)
{
    __atomic_fetch_and(&leases->used[word], ~panels, __ATOMIC_SEQ_CST);
}

static int any_used(const ffs_leases *leases)
{
    for (int64_t w = 0; w < FFS_PANELS / WORD; w++)
        if (__atomic_load_n(&leases->used[w], __ATOMIC_SEQ_CST))
            return 1;
    return 0;
}

/* Lease up to a panel of samples; FFS_ERANGE, or how many cannot be leased now. */
static int64_t lease_panel(const ffs_leaser *leaser, ffs_hazards *table, const ffs_view *view,
                           const int64_t *indices, int64_t m, int64_t *starts, int64_t *sizes,
                           ffs_lease_note *note, uint64_t *hint)
{
    const ffs_entry *entries[FFS_PANEL];
    uint32_t seqs[FFS_PANEL], names[FFS_PANEL];
    uint64_t charge = 0, length = 0;
    int64_t lost = 0;

    for (int64_t k = 0; k < m; k++) {
        entries[k] = find(view, indices[k], hint);
        if (!entries[k])
            return FFS_ERANGE;
        __builtin_prefetch(entries[k]);
        uint64_t name = leaser->bases[*hint] + (uint64_t)indices[k] - view->segments[*hint].first;
        names[k] = name < UINT32_MAX ? (uint32_t)name + 1 : 0;
    }
    uint64_t claimed = __atomic_load_n(&table->claimed, __ATOMIC_RELAXED);
    uint64_t budget = __atomic_load_n(&table->budget, __ATOMIC_RELAXED);
    uint64_t room = claimed < budget ? budget - claimed : 0;
    for (int64_t k = 0; k < m; k++) {
        look l = look_at(entries[k]);
        int good = (l.seq & 1) && names[k];
        if (good && (l.offset > view->arena_size || l.length > view->arena_size - l.offset)) {
            if (unchanged(entries[k], l.seq))
                return FFS_ERANGE;
            good = 0;
        }
        good = good && l.length + leaser->extra <= room - charge;
        charge += good ? l.length + leaser->extra : 0;
        length += good ? l.length : 0;
        sizes[k] = l.length == UNKNOWN ? 0 : (int64_t)l.length;
        starts[k] = good ? (int64_t)l.offset : -1;
        names[k] = good ? names[k] : 0;
        seqs[k] = l.seq;
        lost += !good;
    }
    if (lost == m)
        return m;
    int64_t panel = take_panel(leaser->leases);
    if (panel < 0)
        return cannot_lease(starts, m);
    int64_t word = panel / WORD;
    uint64_t bit = UINT64_C(1) << panel % WORD;
    claimed = __atomic_add_fetch(&table->claimed, charge, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (claimed > __atomic_load_n(&table->budget, __ATOMIC_ACQUIRE) ||
        __atomic_load_n(&leaser->leases->ended, __ATOMIC_SEQ_CST)) {
        __atomic_fetch_sub(&table->claimed, charge, __ATOMIC_RELEASE);
        give_panels(leaser->leases, word, bit);
        return cannot_lease(starts, m);
    }
    uint32_t *to = table->samples + panel * FFS_PANEL;
    for (int64_t k = 0; k < FFS_PANEL; k++)
        __atomic_store_n(&to[k], k < m ? names[k] : 0, __ATOMIC_RELAXED);
    __atomic_fetch_or(&table->live[word], bit, __ATOMIC_RELEASE);
    note->panels[word] |= bit;
    note->claimed += charge;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int64_t k = 0; k < m; k++) {
        if (!names[k] || __atomic_load_n(&entries[k]->seq, __ATOMIC_RELAXED) == seqs[k])
            continue;
        /* It went in between. Nothing was read, and what it was charged is given back in the end. */
        __atomic_store_n(&to[k], 0, __ATOMIC_RELEASE);
        length -= (uint64_t)sizes[k];
        starts[k] = -1;
        lost++;
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    note->size += length;
    return lost;
}

int64_t ffs_lease(const ffs_leaser *leaser, const ffs_view *view, const int64_t *indices,
                  int64_t n, int64_t *starts, int64_t *sizes, ffs_lease_note *note)
{
    ffs_hazards *table = leaser->leases->table;
    uint64_t hint = 0;
    int64_t lost = 0;

    memset(note, 0, sizeof *note);
    if (!table)
        return cannot_lease(starts, n);
    if (n > 0 && !view->segment_count)
        return FFS_ERANGE;
    for (int64_t k = 0; k < n; k += FFS_PANEL) {
        int64_t m = n - k < FFS_PANEL ? n - k : FFS_PANEL;
        int64_t rc = lease_panel(leaser, table, view, indices + k, m, starts + k, sizes + k, note,
                                 &hint);
        if (rc < 0) {
            ffs_unlease(leaser->leases, note);
            return rc;
        }
        lost += rc;
    }
    return lost;
}

/* Whoever ends the leases stores `ended` and then looks at `used`; who leases or gives back changes
 * `used` and then looks at `ended`. All of it is sequentially consistent, so one sees the other. */
int ffs_leases_end(ffs_leases *leases)
{
    __atomic_store_n(&leases->ended, 1, __ATOMIC_SEQ_CST);
    return leases->table && any_used(leases);
}

int ffs_unlease(ffs_leases *leases, ffs_lease_note *note)
{
    ffs_hazards *table = leases->table;
    if (!table)
        return 0;
    for (int64_t w = 0; w < FFS_PANELS / WORD; w++)
        if (note->panels[w])
            __atomic_fetch_and(&table->live[w], ~note->panels[w], __ATOMIC_RELEASE);
    /* After that, so that what is claimed is never less than what is leased. */
    __atomic_fetch_sub(&table->claimed, note->claimed, __ATOMIC_RELEASE);
    for (int64_t w = 0; w < FFS_PANELS / WORD; w++)
        if (note->panels[w])
            give_panels(leases, w, note->panels[w]);
    memset(note, 0, sizeof *note);
    return __atomic_load_n(&leases->ended, __ATOMIC_SEQ_CST) && !any_used(leases);
}

uint64_t ffs_hazards_set_budget(ffs_hazards *table, uint64_t budget)
{
    __atomic_store_n(&table->budget, budget, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return __atomic_load_n(&table->claimed, __ATOMIC_ACQUIRE);
}

int64_t ffs_hazards_read(ffs_hazards *const *tables, int64_t n, uint32_t *samples, int64_t *ends)
{
    int64_t count = 0;
    for (int64_t t = 0; t < n; t++) {
        for (int64_t w = 0; w < FFS_PANELS / WORD; w++) {
            uint64_t live = __atomic_load_n(&tables[t]->live[w], __ATOMIC_ACQUIRE);
            for (; live; live &= live - 1) {
                int64_t panel = w * WORD + __builtin_ctzll(live);
                const uint32_t *from = tables[t]->samples + panel * FFS_PANEL;
                for (int64_t k = 0; k < FFS_PANEL; k++) {
                    uint32_t name = __atomic_load_n(&from[k], __ATOMIC_ACQUIRE);
                    samples[count] = name - 1;
                    count += name != 0;
                }
            }
        }
        ends[t] = count;
    }
    return count;
}

void ffs_restore(ffs_entry *entries, const int64_t *numbers, int64_t n)
{
    for (int64_t k = 0; k < n; k++) {
        uint32_t seq = __atomic_load_n(&entries[numbers[k]].seq, __ATOMIC_RELAXED);
        if (!(seq & 1))
            __atomic_store_n(&entries[numbers[k]].seq, seq + 1, __ATOMIC_RELEASE);
    }
}
