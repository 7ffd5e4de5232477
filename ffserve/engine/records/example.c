/* Columns of tf.train.Example and tf.train.SequenceExample messages; see example.h.
 *
 * The wire format is that of protobuf: a message is a sequence of fields, each a varint
 * (number << 3 | wire type) and a value; unknown fields are skipped. Where a field that is not
 * repeated occurs again, the last one counts, and of a map the last entry of a key. Numbers come
 * packed (one field with all of them) or one by one.
 */
#include "example.h"

#include <stdlib.h>
#include <string.h>

#define VARINT 0
#define FIXED64 1
#define BLOCK 2 /* a size and so many bytes */
#define FIXED32 5

typedef struct {
    const uint8_t *at, *end;
} span;

typedef struct {
    uint64_t number, value; /* value: of a VARINT */
    int wire;
    span body; /* of the others */
} field;

static inline int take_varint(span *from, uint64_t *value)
{
    const uint8_t *at = from->at;
    if (at < from->end && *at < 0x80) {
        *value = *at;
        from->at = at + 1;
        return 0;
    }
    uint64_t sum = 0;
    for (int shift = 0; shift < 70 && at < from->end; shift += 7) {
        uint8_t byte = *at++;
        sum |= (uint64_t)(byte & 0x7f) << (shift < 64 ? shift : 63);
        if (byte < 0x80) {
            *value = sum;
            from->at = at;
            return 0;
        }
    }
    return -1;
}

static inline int take_field(span *from, field *to)
{
    uint64_t tag, size;
    if (take_varint(from, &tag) || tag >> 3 == 0 || tag >> 32)
        return -1;
    to->number = tag >> 3;
    to->wire = tag & 7;
    switch (to->wire) {
    case VARINT: return take_varint(from, &to->value);
    case BLOCK:
        if (take_varint(from, &size))
            return -1;
        break;
    case FIXED64: size = 8; break;
    case FIXED32: size = 4; break;
    default: return -1;
    }
    if (size > (uint64_t)(from->end - from->at))
        return -1;
    to->body = (span){from->at, from->at + size};
    from->at += size;
    return 0;
}

static int fail(ffs_example_batch *batch, int64_t row, int32_t column, int32_t fault)
{
    batch->row = row;
    batch->column = column;
    batch->fault = fault;
    return -1;
}

/* ---- features by name -------------------------------------------------------------------- */

static uint32_t hash_of(const uint8_t *name, uint64_t size)
{
    uint32_t hash = 2166136261u;
    for (uint64_t k = 0; k < size; k++)
        hash = (hash ^ name[k]) * 16777619u;
    return hash;
}

/* Takes each entry of a map of features: its name, and its Feature or FeatureList. */
typedef int taker(void *state, span name, span value, int place);

static int take_entries(span map, int place, taker *take, void *state)
{
    field entry = {0}, part = {0};
    while (map.at < map.end) {
        if (take_field(&map, &entry))
            return -1;
        if (entry.number != 1 || entry.wire != BLOCK)
            continue;
        span inside = entry.body, name = {inside.end, inside.end}, value = name;
        int values = 0;
        while (inside.at < inside.end) {
            if (take_field(&inside, &part))
                return -1;
            if (part.number == 1 && part.wire == BLOCK)
                name = part.body;
            /* Two values would have to be merged; nobody writes that. */
            if (part.number == 2 && (part.wire != BLOCK || values++))
                return -1;
            if (part.number == 2)
                value = part.body;
        }
        if (take(state, name, value, place))
            return -1;
    }
    return 0;
}

static int take_record(const ffs_example_batch *batch, int64_t row, taker *take, void *state)
{
    const uint8_t *begin = batch->bytes + batch->starts[row];
    span record = {begin, begin + batch->lengths[row]};
    field part = {0};
    while (record.at < record.end) {
        if (take_field(&record, &part))
            return -1;
        if (part.number == 1 || (part.number == 2 && batch->sequence)) {
            if (part.wire != BLOCK || take_entries(part.body, (int)part.number, take, state))
                return -1;
        }
    }
    return 0;
}

typedef struct {
    ffs_example_batch *batch;
    ffs_example_column *columns;
    int32_t count, next;
    int32_t *slots; /* column + 1 by hash of its name */
    uint32_t mask;
    int64_t row;
} search;

static int is_named(const ffs_example_column *column, span name)
{
    uint64_t size = (uint64_t)(name.end - name.at);
    return column->name_size == size && !memcmp(column->name, name.at, size);
}

static int note_column(void *state, span name, span value, int place)
{
    search *s = state;
    int32_t k = s->next;
    /* Records of one writer have their features in one order. */
    if (k >= s->count || !is_named(&s->columns[k], name)) {
        uint32_t slot = hash_of(name.at, (uint64_t)(name.end - name.at)) & s->mask;
        while (s->slots[slot] && !is_named(&s->columns[s->slots[slot] - 1], name))
            slot = (slot + 1) & s->mask;
        if (!s->slots[slot])
            return 0;
        k = s->slots[slot] - 1;
    }
    s->columns[k].begins[s->row] = (uint64_t)(value.at - s->batch->bytes);
    s->columns[k].sizes[s->row] = (uint64_t)(value.end - value.at);
    s->columns[k].places[s->row] = (uint8_t)place;
    s->next = k + 1;
    return 0;
}

int ffs_example_find(ffs_example_batch *batch, ffs_example_column *columns, int32_t count)
{
    uint32_t room = 8;
    while (room < 2 * (uint32_t)count)
        room *= 2;
    search s = {batch, columns, count, 0, calloc(room, sizeof(int32_t)), room - 1, 0};
    if (!s.slots)
        return fail(batch, 0, -1, FFS_EXAMPLE_LARGE);
    for (int32_t k = 0; k < count; k++) {
        uint32_t slot = hash_of(columns[k].name, columns[k].name_size) & s.mask;
        while (s.slots[slot])
            slot = (slot + 1) & s.mask;
        s.slots[slot] = k + 1;
        memset(columns[k].places, 0, (size_t)batch->n);
    }
    int failed = 0;
    for (s.row = 0; s.row < batch->n && !failed; s.row++) {
        s.next = 0;
        if (take_record(batch, s.row, note_column, &s))
            failed = fail(batch, s.row, -1, FFS_EXAMPLE_MALFORMED);
    }
    free(s.slots);
    return failed;
}

/* ---- values of a feature ----------------------------------------------------------------- */

/* The list message of a Feature: its kind (0: none) and its pieces, which are more than one only in
 * messages that were concatenated. */
typedef struct {
    int kind;
    span feature;
} values_of;

static int find_kind(span feature, values_of *found)
{
    found->kind = 0;
    found->feature = feature;
    field part = {0};
    span at = feature;
    while (at.at < at.end) {
        span before = at;
        if (take_field(&at, &part))
            return -1;
        if (part.number > 3)
            continue;
        if (part.wire != BLOCK)
            return -1;
        if ((int)part.number != found->kind) { /* the last kind counts */
            found->kind = (int)part.number;
            found->feature = before;
        }
    }
    return 0;
}

/* Where values go; counts only while `values` and `data` are NULL. */
typedef struct {
    const ffs_example_column *column;
    uint64_t items, size;
    int filling;
    int inexact;
} sink;

static inline void put_integer(sink *to, uint64_t value)
{
    const ffs_example_column *column = to->column;
    if (to->filling) {
        int64_t number = (int64_t)value;
        if (column->kind == FFS_EXAMPLE_INT64) {
            ((int64_t *)column->values)[to->items] = number;
        } else {
            double wide = (double)number;
            float narrow = (float)number;
            if (column->wide)
                ((double *)column->values)[to->items] = wide;
            else
                ((float *)column->values)[to->items] = narrow;
            /* 2^63 as a double or float does not fit into int64. */
            to->inexact |= (__int128)(column->wide ? wide : narrow) != number;
        }
    }
    to->items++;
}

static int put_integers(sink *to, const field *part)
{
    if (part->wire == VARINT) {
        put_integer(to, part->value);
        return 0;
    }
    if (part->wire != BLOCK)
        return -1;
    span packed = part->body;
    uint64_t value;
    while (packed.at < packed.end) {
        if (take_varint(&packed, &value))
            return -1;
        put_integer(to, value);
    }
    return 0;
}

static int put_floats(sink *to, const field *part)
{
    uint64_t size = (uint64_t)(part->body.end - part->body.at);
    if ((part->wire != BLOCK && part->wire != FIXED32) || size % 4)
        return -1;
    if (to->filling && to->column->wide) {
        double *out = (double *)to->column->values + to->items;
        for (uint64_t k = 0; k < size / 4; k++) {
            float value;
            memcpy(&value, part->body.at + 4 * k, 4);
            out[k] = value;
        }
    } else if (to->filling) {
        memcpy((float *)to->column->values + to->items, part->body.at, size);
    }
    to->items += size / 4;
    return 0;
}

static int put_bytes(sink *to, const field *part)
{
    uint64_t size = (uint64_t)(part->body.end - part->body.at);
    if (part->wire != BLOCK)
        return -1;
    if (to->filling) {
        memcpy(to->column->data + to->size, part->body.at, size);
        to->column->edges[to->items + 1] = (int32_t)(to->size + size);
    }
    to->size += size;
    to->items++;
    return 0;
}

/* The values of a feature, all of the kind that find_kind found. */
static int put_values(sink *to, const values_of *from)
{
    span feature = from->feature;
    field list = {0}, part = {0};
    while (feature.at < feature.end) {
        if (take_field(&feature, &list))
            return -1;
        if ((int)list.number != from->kind)
            continue;
        while (list.body.at < list.body.end) {
            if (take_field(&list.body, &part))
                return -1;
            if (part.number != 1)
                continue;
            int failed = from->kind == FFS_EXAMPLE_INT64 ? put_integers(to, &part)
                       : from->kind == FFS_EXAMPLE_FLOAT ? put_floats(to, &part)
                                                         : put_bytes(to, &part);
            if (failed)
                return -1;
        }
    }
    return 0;
}

/* One feature of a column. Returns 0 or FFS_EXAMPLE_*; *kind: of the feature, 0: none. */
static int put_feature(sink *to, span feature, int *kind)
{
    values_of found;
    if (find_kind(feature, &found))
        return FFS_EXAMPLE_MALFORMED;
    *kind = found.kind;
    int wanted = to->column->kind;
    if (!found.kind)
        return 0;
    if (found.kind != wanted && !(found.kind == FFS_EXAMPLE_INT64 && wanted == FFS_EXAMPLE_FLOAT)) {
        /* An empty list has nothing that could be of a wrong kind. */
        ffs_example_column none = {.kind = found.kind};
        sink counted = {.column = &none};
        if (put_values(&counted, &found))
            return FFS_EXAMPLE_MALFORMED;
        return counted.items ? FFS_EXAMPLE_KIND : 0;
    }
    if (put_values(to, &found))
        return FFS_EXAMPLE_MALFORMED;
    return to->inexact ? FFS_EXAMPLE_INEXACT : 0;
}

/* Features of a FeatureList. */
static int put_steps(sink *to, span list, uint64_t *steps, int *kind)
{
    field part = {0};
    while (list.at < list.end) {
        if (take_field(&list, &part))
            return FFS_EXAMPLE_MALFORMED;
        if (part.number != 1)
            continue;
        if (part.wire != BLOCK)
            return FFS_EXAMPLE_MALFORMED;
        int fault = put_feature(to, part.body, kind);
        if (fault)
            return fault;
        (*steps)++;
        if (to->filling)
            to->column->inner[*steps] = (int32_t)to->items;
    }
    return 0;
}

static void put_null(sink *to)
{
    const ffs_example_column *column = to->column;
    if (to->filling && column->kind == FFS_EXAMPLE_BYTES)
        column->edges[to->items + 1] = (int32_t)to->size;
    else if (to->filling)
        memset((char *)column->values +
                   to->items * (column->kind == FFS_EXAMPLE_FLOAT && !column->wide ? 4 : 8),
               0, column->kind == FFS_EXAMPLE_FLOAT && !column->wide ? 4 : 8);
    to->items++;
}

static int put_row(ffs_example_batch *batch, sink *to, int64_t row, uint64_t *steps)
{
    const ffs_example_column *column = to->column;
    int place = column->places[row], kind = 0, fault = 0;
    uint64_t before = to->items;
    int valid = place != 0;
    if (place) {
        const uint8_t *begin = batch->bytes + column->begins[row];
        span value = {begin, begin + column->sizes[row]};
        if ((place == 2) != (column->depth == 2))
            fault = FFS_EXAMPLE_PLACE;
        else if (place == 2)
            fault = put_steps(to, value, steps, &kind);
        else {
            fault = put_feature(to, value, &kind);
            valid = kind != 0;
        }
    }
    batch->found = kind;
    if (!fault && column->depth == 0) {
        if (to->items - before > 1)
            fault = FFS_EXAMPLE_SEVERAL;
        if (to->items == before) {
            valid = 0;
            put_null(to);
        }
    }
    if (!fault && (to->items > INT32_MAX || to->size > INT32_MAX || *steps > INT32_MAX))
        fault = FFS_EXAMPLE_LARGE;
    if (to->filling) {
        column->valid[row] = (uint8_t)valid;
        if (column->depth)
            column->outer[row + 1] = (int32_t)(column->depth == 2 ? *steps : to->items);
    }
    return fault;
}

static int put_rows(ffs_example_batch *batch, ffs_example_column *column, int filling)
{
    sink to = {.column = column, .filling = filling};
    uint64_t steps = 0;
    for (int64_t row = 0; row < batch->n; row++) {
        int fault = put_row(batch, &to, row, &steps);
        if (fault)
            return fail(batch, row, 0, fault);
    }
    column->steps = steps;
    column->items = to.items;
    column->size = to.size;
    return 0;
}

int ffs_example_count(ffs_example_batch *batch, ffs_example_column *column)
{
    return put_rows(batch, column, 0);
}

int ffs_example_fill(ffs_example_batch *batch, ffs_example_column *column)
{
    if (column->depth)
        column->outer[0] = 0;
    if (column->depth == 2)
        column->inner[0] = 0;
    if (column->kind == FFS_EXAMPLE_BYTES)
        column->edges[0] = 0;
    return put_rows(batch, column, 1);
}

/* ---- inference --------------------------------------------------------------------------- */

typedef struct {
    ffs_example_batch *batch;
    ffs_example_feature *features;
    int32_t count, room;
    int32_t *slots;
    uint32_t mask;
    int64_t row;
    int full;
} survey;

/* Whether bytes are UTF-8 (RFC 3629: shortest form, no surrogates, at most U+10FFFF). */
static int is_utf8(span text)
{
    const uint8_t *at = text.at, *end = text.end;
    while (at < end) {
        if (*at < 0x80) {
            at++;
            continue;
        }
        int more = *at >= 0xf0 ? 3 : *at >= 0xe0 ? 2 : 1;
        if (*at < 0xc2 || *at > 0xf4 || end - at <= more)
            return 0;
        uint32_t code = *at & (0x3f >> more);
        for (int k = 1; k <= more; k++) {
            if ((at[k] & 0xc0) != 0x80)
                return 0;
            code = code << 6 | (at[k] & 0x3f);
        }
        if ((more == 2 && code < 0x800) || (more == 3 && (code < 0x10000 || code > 0x10ffff)) ||
            (code >= 0xd800 && code < 0xe000))
            return 0;
        at += more + 1;
    }
    return 1;
}

static int all_utf8(const values_of *from)
{
    span feature = from->feature;
    field list = {0}, part = {0};
    while (feature.at < feature.end && !take_field(&feature, &list)) {
        while (list.number == FFS_EXAMPLE_BYTES && list.body.at < list.body.end) {
            if (take_field(&list.body, &part) || part.wire != BLOCK)
                return 0;
            if (part.number == 1 && !is_utf8(part.body))
                return 0;
        }
    }
    return 1;
}

static int examine(survey *s, ffs_example_feature *feature, span value)
{
    values_of found;
    if (find_kind(value, &found))
        return -1;
    if (!found.kind)
        return 0;
    ffs_example_column none = {.kind = found.kind};
    sink counted = {.column = &none};
    if (put_values(&counted, &found))
        return -1;
    int64_t *first = counted.items ? feature->rows : feature->empty;
    if (first[found.kind] < 0)
        first[found.kind] = s->row;
    feature->several |= counted.items > 1;
    if (found.kind == FFS_EXAMPLE_BYTES && !feature->binary)
        feature->binary = !all_utf8(&found);
    return 0;
}

static int note_feature(void *state, span name, span value, int place)
{
    survey *s = state;
    uint64_t size = (uint64_t)(name.end - name.at);
    uint32_t slot = hash_of(name.at, size) & s->mask;
    ffs_example_feature *feature = NULL;
    for (; s->slots[slot]; slot = (slot + 1) & s->mask) {
        feature = &s->features[s->slots[slot] - 1];
        if (feature->name_size == size &&
            !memcmp(s->batch->bytes + feature->name_at, name.at, size))
            break;
    }
    if (!s->slots[slot]) {
        if (s->count == s->room) {
            s->full = 1;
            return -1;
        }
        feature = &s->features[s->count++];
        s->slots[slot] = s->count;
        *feature = (ffs_example_feature){.name_at = (uint64_t)(name.at - s->batch->bytes),
                                         .name_size = size,
                                         .rows = {-1, -1, -1, -1},
                                         .empty = {-1, -1, -1, -1}};
    }
    if (place == 1)
        return examine(s, feature, value);
    feature->listed = 1;
    field part = {0};
    while (value.at < value.end) {
        if (take_field(&value, &part))
            return -1;
        if (part.number == 1 && (part.wire != BLOCK || examine(s, feature, part.body)))
            return -1;
    }
    return 0;
}

int32_t ffs_example_infer(ffs_example_batch *batch, ffs_example_feature *features, int32_t room,
                          int32_t *slots, uint32_t slot_count)
{
    survey s = {batch, features, 0, room, slots, slot_count - 1, 0, 0};
    memset(slots, 0, slot_count * sizeof(int32_t));
    for (s.row = 0; s.row < batch->n; s.row++) {
        if (take_record(batch, s.row, note_feature, &s))
            return s.full ? -2 : fail(batch, s.row, -1, FFS_EXAMPLE_MALFORMED);
    }
    return s.count;
}

/* ---- encoding ---------------------------------------------------------------------------- */

static inline uint64_t varint_size(uint64_t value)
{
    return (uint64_t)(63 - __builtin_clzll(value | 1)) / 7 + 1;
}

static inline uint8_t *put_varint(uint8_t *out, uint64_t value)
{
    while (value >= 0x80) {
        *out++ = (uint8_t)(value | 0x80);
        value >>= 7;
    }
    *out++ = (uint8_t)value;
    return out;
}

static uint8_t *put_block(uint8_t *out, int number, uint64_t size)
{
    *out++ = (uint8_t)(number << 3 | BLOCK);
    return put_varint(out, size);
}

static inline uint64_t block_size(uint64_t size)
{
    return 1 + varint_size(size) + size;
}

/* Bytes of the packed integers, or of the strings with their headers. */
static uint64_t values_size(const ffs_example_source *from, int64_t first, int64_t stop)
{
    uint64_t sum = 0;
    if (from->kind == FFS_EXAMPLE_FLOAT)
        return 4 * (uint64_t)(stop - first);
    for (int64_t k = first; k < stop; k++)
        sum += from->kind == FFS_EXAMPLE_INT64
                 ? varint_size((uint64_t)((const int64_t *)from->values)[k])
                 : block_size((uint64_t)(from->edges[k + 1] - from->edges[k]));
    return sum;
}

/* Size of the message BytesList, FloatList or Int64List. */
static uint64_t list_size(const ffs_example_source *from, int64_t first, int64_t stop,
                          uint64_t values)
{
    return from->kind == FFS_EXAMPLE_BYTES || first == stop ? values : block_size(values);
}

static uint64_t feature_size(const ffs_example_source *from, int64_t first, int64_t stop)
{
    return block_size(list_size(from, first, stop, values_size(from, first, stop)));
}

static uint8_t *put_message(uint8_t *out, const ffs_example_source *from, int64_t first,
                            int64_t stop)
{
    uint64_t values = values_size(from, first, stop);
    out = put_block(out, from->kind, list_size(from, first, stop, values));
    if (first == stop)
        return out;
    if (from->kind == FFS_EXAMPLE_FLOAT) {
        out = put_block(out, 1, values);
        memcpy(out, (const float *)from->values + first, values);
        return out + values;
    }
    if (from->kind == FFS_EXAMPLE_INT64) {
        out = put_block(out, 1, values);
        for (int64_t k = first; k < stop; k++)
            out = put_varint(out, (uint64_t)((const int64_t *)from->values)[k]);
        return out;
    }
    for (int64_t k = first; k < stop; k++) {
        uint64_t size = (uint64_t)(from->edges[k + 1] - from->edges[k]);
        out = put_block(out, 1, size);
        memcpy(out, (const uint8_t *)from->values + from->edges[k], size);
        out += size;
    }
    return out;
}

static void bounds_of(const ffs_example_source *from, int64_t row, int64_t *first, int64_t *stop)
{
    *first = from->depth ? from->outer[row] : row;
    *stop = from->depth ? from->outer[row + 1] : row + 1;
}

/* Size of the Feature or FeatureList of a record. */
static uint64_t value_size(const ffs_example_source *from, int64_t row)
{
    int64_t first, stop;
    bounds_of(from, row, &first, &stop);
    if (from->depth < 2)
        return feature_size(from, first, stop);
    uint64_t sum = 0;
    for (int64_t k = first; k < stop; k++)
        sum += block_size(feature_size(from, from->inner[k], from->inner[k + 1]));
    return sum;
}

static uint64_t entry_size(const ffs_example_source *from, uint64_t value)
{
    return block_size(from->name_size) + block_size(value);
}

static int is_in(const ffs_example_source *from, int64_t row, int listed)
{
    return (from->depth == 2) == listed && (!from->valid || from->valid[row]);
}

/* Size of the message Features, or FeatureLists if `listed`. */
static uint64_t map_size(const ffs_example_source *sources, int32_t count, int64_t row, int listed)
{
    uint64_t sum = 0;
    for (int32_t k = 0; k < count; k++)
        if (is_in(&sources[k], row, listed))
            sum += block_size(entry_size(&sources[k], value_size(&sources[k], row)));
    return sum;
}

static uint8_t *put_map(uint8_t *out, const ffs_example_source *sources, int32_t count, int64_t row,
                        int listed)
{
    for (int32_t k = 0; k < count; k++) {
        const ffs_example_source *from = &sources[k];
        if (!is_in(from, row, listed))
            continue;
        uint64_t size = value_size(from, row);
        out = put_block(out, 1, entry_size(from, size));
        out = put_block(out, 1, from->name_size);
        memcpy(out, from->name, from->name_size);
        out = put_block(out + from->name_size, 2, size);
        int64_t first, stop;
        bounds_of(from, row, &first, &stop);
        if (!listed) {
            out = put_message(out, from, first, stop);
            continue;
        }
        for (int64_t step = first; step < stop; step++) {
            int64_t begin = from->inner[step], end = from->inner[step + 1];
            out = put_block(out, 1, feature_size(from, begin, end));
            out = put_message(out, from, begin, end);
        }
    }
    return out;
}

void ffs_example_measure(const ffs_example_source *sources, int32_t count, int64_t n, int sequence,
                         int64_t *sizes)
{
    for (int64_t row = 0; row < n; row++) {
        sizes[row] = 0;
        for (int listed = 0; listed <= (sequence != 0); listed++) {
            uint64_t size = map_size(sources, count, row, listed);
            sizes[row] += size ? (int64_t)block_size(size) : 0;
        }
    }
}

void ffs_example_encode(const ffs_example_source *sources, int32_t count, int64_t n, int sequence,
                        uint8_t *out)
{
    for (int64_t row = 0; row < n; row++)
        for (int listed = 0; listed <= (sequence != 0); listed++) {
            uint64_t size = map_size(sources, count, row, listed);
            if (size)
                out = put_map(put_block(out, 1 + listed, size), sources, count, row, listed);
        }
}
