/* The plain case of a miss, planned by one call: none of the samples is there or on its way, all of
 * their blocks take slots of a few sizes, and free slots or victims at hand suffice. What is not plain
 * is found before anything is changed, and planned step by step elsewhere (ffserve/cache/cache.py),
 * which comes to the same: tests hold the two against each other.
 *
 * Between choosing and taking nothing may look at the tables; the caller makes the victims unreadable
 * meanwhile.
 */
#include <stdbool.h>
#include <string.h>

#include "plan.h"

enum { FIRST, COUNT, BEGIN, END, SIZE, SHARD };

static int64_t class_of_size(const ffs_planner *p, int64_t size)
{
    int64_t low = 0, high = p->class_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (p->class_sizes[middle] < size)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Say how many slots of which size classes the blocks take, and of each block in row[] which of these
 * it has; false: they are too many, or one is for larger ones. */
static bool sort_by_class(const ffs_planner *p, const int64_t *sizes, int64_t n, int64_t *row,
                          ffs_plan *plan)
{
    int64_t last = -1, count = 0;
    for (int64_t k = 0; k < n; k++) {
        if (last < 0 || sizes[k] > p->class_sizes[last] ||
            (last && sizes[k] <= p->class_sizes[last - 1]))
            last = class_of_size(p, sizes[k]);
        if (last == p->class_count)
            return false;
        row[k] = last;
        int64_t at = count;
        while (at && plan->classes[at - 1] > last)
            at--;
        if (at && plan->classes[at - 1] == last) {
            plan->wanted[at - 1]++;
            continue;
        }
        if (count == FFS_PLAN_CLASSES)
            return false;
        for (int64_t i = count++; i > at; i--) {
            plan->classes[i] = plan->classes[i - 1];
            plan->wanted[i] = plan->wanted[i - 1];
        }
        plan->classes[at] = last;
        plan->wanted[at] = 1;
    }
    plan->class_count = count;
    for (int64_t k = 0; k < n; k++)
        for (int64_t i = 0; i < count; i++)
            if (row[k] == plan->classes[i]) {
                row[k] = i;
                break;
            }
    return true;
}

static bool all_absent(const ffs_slots *s, const int64_t *numbers, int64_t n)
{
    for (int64_t k = 0; k < n; k++)
        if ((uint64_t)numbers[k] >= (uint64_t)s->sample_count || s->slot_of[numbers[k]])
            return false;
    return true;
}

static bool in_no_slot(const ffs_slots *s, const int64_t *blocks, int64_t n)
{
    for (int64_t k = 0; k < n; k++) {
        int64_t first = blocks[FIRST * n + k], count = blocks[COUNT * n + k];
        if (first < 0 || count < 1 || count > INT32_MAX || count > s->sample_count - first)
            return false;
        for (int64_t i = first; i < first + count; i++)
            if (s->slot_of[i])
                return false;
    }
    return true;
}

static bool usable(const ffs_slots *s, int64_t slot, uint8_t state)
{
    return (uint64_t)slot < (uint64_t)s->slot_count && s->states[slot] == state && !s->pins[slot];
}

/* As many victims as are wanted, in the order in which they are popped off their stack a few at a time
 * and looked at, which is that of Policy. Returns how many entries that took; 0: they do not suffice,
 * or one of them cannot go just now. */
static int64_t choose_victims(const ffs_planner *p, const ffs_stock *stock, int64_t wanted,
                              int64_t *slots)
{
    const ffs_residents *r = p->residents;
    int64_t looked = 0, found = 0;
    while (found < wanted && looked < stock->victim_count) {
        int64_t left = stock->victim_count - looked, count = wanted - found;
        count = count < left ? count : left;
        const int32_t *items = stock->victims + (stock->newest ? left - count : looked);
        looked += count;
        for (int64_t k = 0; k < count; k++) {
            int64_t slot = items[k];
            if ((uint64_t)slot >= (uint64_t)r->slot_count)
                goto none;
            int64_t size_class = r->classes[slot >> r->slab_shift];
            if (r->keys[slot] != stock->key || r->groups[slot] != stock->group ||
                size_class != stock->size_class)
                continue;
            if (!usable(p->slots, slot, FFS_SLOT_RESIDENT))
                goto none;
            r->keys[slot] = FFS_NO_KEY; /* so that it is not found a second time */
            slots[found++] = slot;
        }
    }
    if (found == wanted)
        return looked;
none:
    while (found)
        r->keys[slots[--found]] = stock->key;
    return 0;
}

/* The stocks of the plan's size classes; false: one is missing, or could be larger. */
static bool find_stocks(const ffs_stock *stocks, int64_t stock_count, const ffs_plan *plan,
                        const ffs_stock **of)
{
    for (int64_t i = 0; i < plan->class_count; i++) {
        of[i] = NULL;
        for (int64_t k = 0; k < stock_count; k++)
            if (stocks[k].size_class == plan->classes[i])
                of[i] = &stocks[k];
        if (!of[i] || (plan->wanted[i] > of[i]->free_count && of[i]->more_free))
            return false;
    }
    return true;
}

static bool choose_slots(const ffs_planner *p, const ffs_stock **of, int64_t *taken, ffs_plan *plan)
{
    int64_t *at = taken;
    for (int64_t i = 0; i < plan->class_count; i++) {
        const ffs_stock *stock = of[i];
        int64_t fresh = plan->wanted[i] < stock->free_count ? plan->wanted[i] : stock->free_count;
        plan->fresh[i] = fresh;
        for (int64_t k = 0; k < fresh; k++, at++) {
            *at = stock->free_slots[stock->free_count - 1 - k];
            if (!usable(p->slots, *at, FFS_SLOT_FREE))
                return false;
        }
    }
    plan->gone = plan->count - (at - taken);
    for (int64_t i = 0; i < plan->class_count; i++) {
        int64_t wanted = plan->wanted[i] - plan->fresh[i];
        plan->looked[i] = wanted ? choose_victims(p, of[i], wanted, at) : 0;
        if (wanted && !plan->looked[i]) {
            while (i--)
                for (wanted = plan->wanted[i] - plan->fresh[i]; wanted; wanted--)
                    p->residents->keys[*--at] = of[i]->key;
            return false;
        }
        at += wanted;
    }
    return true;
}

int64_t ffs_plan_choose(const ffs_planner *p, const int64_t *numbers, int64_t n, int64_t most,
                        const ffs_stock *stocks, int64_t stock_count, int64_t *blocks,
                        int64_t *slots, int64_t *taken, int64_t *contents, ffs_plan *plan)
{
    int64_t cut;
    plan->count = 0;
    if (n < 1 || !all_absent(p->slots, numbers, n) ||
        ffs_blocks(p->shards, numbers, n, p->largest, blocks))
        return 0;
    for (int64_t k = 0; k < n; k++)
        slots[k] = k;
    int64_t kept = ffs_slots_cut(p->slots, blocks, slots, n, most, &cut);
    if (kept < 1)
        return 0;
    for (int row = 1; kept < n && row < FFS_BLOCK_ROWS; row++)
        memmove(blocks + row * kept, blocks + row * n, (size_t)kept * sizeof *blocks);
    if (!in_no_slot(p->slots, blocks, kept) ||
        !sort_by_class(p, blocks + SIZE * kept, kept, slots, plan))
        return 0;
    plan->handled = cut < 0 ? n : cut;
    plan->count = kept;
    const ffs_stock *of[FFS_PLAN_CLASSES];
    if (!find_stocks(stocks, stock_count, plan, of))
        return 0;
    if (!choose_slots(p, of, taken, plan)) {
        plan->count = 0;
        return 0;
    }
    /* Which slot comes next, of the free ones and of the victims of each class. */
    int64_t fresh[FFS_PLAN_CLASSES], gone[FFS_PLAN_CLASSES], left[FFS_PLAN_CLASSES];
    for (int64_t i = 0, a = 0, b = kept - plan->gone; i < plan->class_count; i++) {
        fresh[i] = a;
        gone[i] = b;
        left[i] = plan->fresh[i];
        a += plan->fresh[i];
        b += plan->wanted[i] - plan->fresh[i];
    }
    for (int64_t k = 0; k < kept; k++) {
        int64_t i = slots[k];
        slots[k] = taken[left[i] ? fresh[i]++ : gone[i]++];
        left[i] -= left[i] > 0;
    }
    ffs_slots_contents(p->slots, taken + kept - plan->gone, plan->gone, contents);
    return kept;
}

int ffs_plan_take(const ffs_planner *p, int64_t group, int32_t load, const int64_t *blocks,
                  const int64_t *slots, const int64_t *taken, const int64_t *contents,
                  int64_t *places, int64_t *rooms, ffs_plan *plan)
{
    const ffs_residents *r = p->residents;
    int64_t n = plan->count, gone = plan->gone, found[3] = {0, 0, 0};
    const int64_t *victims = taken + n - gone;
    if (gone &&
        (ffs_slots_vacate(p->slots, victims, gone) ||
         ffs_shards_count(p->shards, contents, contents + 3 * gone, gone, -1) ||
         ffs_residents_leave(r, victims, gone, found)))
        return FFS_ERANGE;
    plan->freed = found[1];
    plan->wasted = found[2];
    plan->held = ffs_slots_enter(p->slots, blocks, slots, n, load, places, rooms);
    if (plan->held < 0 || ffs_shards_count(p->shards, blocks + FIRST * n, rooms, n, 1))
        return FFS_ERANGE;
    plan->size = 0;
    for (int64_t k = 0; k < n; k++) {
        r->groups[slots[k]] = (int32_t)group;
        plan->size += blocks[SIZE * n + k];
    }
    for (int64_t k = 0; k < n - gone; k++)
        p->slab_used[taken[k] >> r->slab_shift]++;
    return 0;
}
