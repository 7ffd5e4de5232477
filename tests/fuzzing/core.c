/* libFuzzer target: the C functions that read bytes of files and of shared memory.
 *
 * The first byte of an input chooses the function, the next eight its parameters; the rest are the
 * bytes that it reads. Every buffer has exactly the size that the function was told, so that
 * AddressSanitizer sees each byte read or written outside.
 */
#define _GNU_SOURCE /* memfd_create */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "codec.h"
#include "example.h"
#include "inflate.h"
#include "shm.h"
#include "tar.h"

#define CHECK(condition) ((condition) ? (void)0 : abort())
enum { ROOM = 8, SAMPLES = 16, ARENA = 4096 };

static uint8_t *copy_of(const uint8_t *bytes, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, bytes, size);
    return copy;
}

/* Scan in windows of `step` bytes, as Python does with those of a file. */
static void frames(const uint8_t *bytes, size_t size, const uint8_t *parameters) {
    uint64_t offsets[ROOM], lengths[ROOM], step = 16 + parameters[0];
    uint32_t checksums[ROOM];
    ffs_frame_scan scan = {.file_size = size,
                           .offsets = offsets,
                           .lengths = lengths,
                           .checksums = checksums,
                           .room = ROOM,
                           .verify = parameters[1] & 1};
    for (uint64_t last = UINT64_MAX;;) {
        uint64_t base = scan.at - (scan.owed ? 4 : 0);
        CHECK(base <= size);
        uint64_t part = size - base < step ? size - base : step;
        uint8_t *window = copy_of(bytes + base, part);
        int result = ffs_frames(&scan, window, base, part);
        free(window);
        CHECK(scan.count <= ROOM);
        for (int64_t k = 0; k < scan.count; k++)
            CHECK(offsets[k] <= size && lengths[k] <= size - offsets[k]);
        if (result == FFS_FRAMES_FULL)
            scan.count = 0;
        else if (result != FFS_FRAMES_MORE || scan.at == last)
            return;
        last = result == FFS_FRAMES_FULL ? UINT64_MAX : scan.at;
    }
}

static void frame_search(const uint8_t *bytes, size_t size, const uint8_t *parameters) {
    if (size < 16) return;
    uint64_t lost = (parameters[0] | parameters[1] << 8) % (size - 15);
    ffs_frame_finder finder = {.file_size = size, .proven = parameters[2] & 1};
    finder.summed = lost + 12;
    finder.at = finder.proven ? lost + 16 : lost + 1;
    for (int turn = 0; turn < 100; turn++) {
        uint64_t base = finder.proven ? finder.summed : finder.at;
        if (base > size) return;
        uint64_t part = size - base, step = 64 + parameters[3];
        part = part < step ? part : step;
        uint8_t *window = copy_of(bytes + base, part);
        int found = ffs_frame_search(&finder, window, base, part);
        free(window);
        CHECK(finder.at > lost && finder.at <= size + 1);
        if (found) finder.at++;
    }
}

static void chunks(const uint8_t *bytes, size_t size, const uint8_t *parameters) {
    int64_t begins[ROOM], ends[ROOM], firsts[ROOM + 1] = {0}, sizes[ROOM];
    uint32_t checksums[ROOM];
    uint8_t compressors[ROOM];
    ffs_chunk_scan scan = {.file_size = size,
                           .begins = begins,
                           .ends = ends,
                           .firsts = firsts,
                           .sizes = sizes,
                           .checksums = checksums,
                           .compressors = compressors,
                           .room = ROOM,
                           .records_allowed = 1000,
                           .records_per_byte = 16,
                           .dialect = (int32_t)(parameters[1] % 3) - 1,
                           .single = parameters[2] & 1};
    for (int turn = 0; turn < 1000; turn++) {
        uint64_t base = scan.wanted > scan.at ? scan.wanted : scan.at;
        if (base > size) base = size;
        uint64_t part = size - base, step = 20 + parameters[0];
        part = part < step ? part : step;
        uint8_t *window = copy_of(bytes + base, part);
        int result = ffs_chunks(&scan, window, base, part);
        free(window);
        CHECK(scan.count <= ROOM);
        for (int64_t k = 0; k < scan.count; k++)
            CHECK(begins[k] >= 0 && begins[k] < ends[k] && (uint64_t)ends[k] <= size);
        if (result == FFS_CHUNKS_FULL)
            scan.count = 0, firsts[0] = 0;
        else if (result != FFS_CHUNKS_MORE || (base == size && !part))
            return;
    }
}

static void split(const uint8_t *bytes, size_t size, const uint8_t *parameters) {
    int64_t starts[ROOM], lengths[ROOM], n = parameters[0] % (ROOM + 1);
    uint64_t end = 0;
    uint8_t *copy = copy_of(bytes, size);
    int64_t found = ffs_split(copy, size, n, starts, lengths, &end);
    CHECK(found >= 0 && found <= n && end <= size);
    uint8_t *dests[ROOM];
    for (int64_t k = 0; k < found; k++) dests[k] = malloc(lengths[k] ? lengths[k] : 1);
    ffs_scatter(copy, starts, lengths, found, dests);
    for (int64_t k = 0; k < found; k++) free(dests[k]);
    free(copy);
}

/* A directory that a hostile or broken daemon wrote: nothing outside the arena may be read. */
static void directory(const uint8_t *bytes, size_t size, const uint8_t *parameters) {
    ffs_entry *entries = calloc(SAMPLES, sizeof *entries);
    memcpy(entries, bytes, size < SAMPLES * sizeof *entries ? size : SAMPLES * sizeof *entries);
    uint8_t *arena = calloc(1, ARENA);
    ffs_segment segment = {entries, 0, SAMPLES, arena};
    ffs_view view = {arena, ARENA, &segment, 1, NULL};
    int64_t indices[8], offsets[9] = {0}, missing[8], found[19], unknown, bad;
    uint64_t places[8];
    for (int k = 0; k < 8; k++) indices[k] = (int8_t)(parameters[k] % (SAMPLES + 2)) - 1;
    int64_t lacking = ffs_locate(&view, indices, 8, offsets, missing, &unknown, &bad);
    if (lacking >= 0) {
        CHECK(lacking <= 8);
        uint64_t total = (uint64_t)offsets[8];
        if (total <= 1 << 20) {
            uint8_t *buffer = malloc(total ? total : 1);
            ffs_gather(&view, indices, offsets, buffer, NULL, NULL, 8, missing);
            free(buffer);
        }
        if (ffs_places(&view, indices, 8, places) >= 0)
            for (int k = 0; k < 8; k++) CHECK(places[k] == UINT64_MAX || places[k] <= ARENA);
    }
    uint8_t *room = malloc(2 * ARENA);
    ffs_copy_batch(&view, indices, 8, found, room, 0, 2 * ARENA, parameters[0] & 1);
    free(room);
    free(entries);
    free(arena);
}

/* The bytes are a window and, behind it, a stream: the rest of one (raw), or a file. */
static void inflate(const uint8_t *bytes, size_t size, const uint8_t *parameters) {
    size_t window = size < 64u * parameters[0] ? size : 64u * parameters[0];
    ffs_span span = {.data_size = size - window,
                     .bit = parameters[1] & 7,
                     .gzip = parameters[1] >> 3 & 1,
                     .window_size = window,
                     .skip = 100u * parameters[2],
                     .out_size = 300u * parameters[3]};
    uint8_t *data = copy_of(bytes + window, size - window), *before = copy_of(bytes, window);
    span.data = data;
    span.window = before;
    span.out = malloc(span.out_size ? span.out_size : 1);
    int result = ffs_inflate_span(&span);
    CHECK(span.used <= span.data_size && span.made <= span.out_size);
    CHECK(result || span.made == span.out_size);
    ffs_block_mark marks[ROOM];
    ffs_inflater pass = {.marks = marks, .room = ROOM};
    CHECK(!ffs_inflate_begin(&pass, span.gzip));
    for (uint64_t step = 1 + parameters[4]; pass.used < span.data_size;) {
        uint64_t used = pass.used, made = pass.made, part = span.data_size - used;
        uint8_t *piece = copy_of(data + used, part < step ? part : step);
        result = ffs_inflate_run(&pass, piece, part < step ? part : step, span.out, span.out_size);
        free(piece);
        CHECK(pass.count >= 0 && pass.count <= ROOM && pass.made - made <= span.out_size);
        for (int64_t k = 0; k < pass.count; k++)
            CHECK(marks[k].bit <= 8 * pass.used && marks[k].out <= pass.made);
        if (result || (pass.used == used && pass.made == made) || pass.made > 1 << 20) break;
    }
    ffs_inflate_end(&pass);
    free(span.out);
    free(before);
    free(data);
}

/* ---- tables of many small files ----------------------------------------------------------- */
static uint64_t get(const uint8_t *from, int size) {
    uint64_t value = 0;
    memcpy(&value, from, size);
    return value;
}

static void put(uint8_t *to, uint64_t value, int size) { memcpy(to, &value, size); }

/* The mend_ functions write the checksums that nobody guesses. */
static void mend_ffrecord(uint8_t *head, uint64_t size) {
    uint64_t count = size < 12 ? UINT64_MAX : get(head + 4, 8);
    if (count <= (size - 12) / 12)
        put(head, ffs_checksum(FFS_CRC_32, 0, head + 4, 8 + 12 * count), 4);
}

static void mend_tfrecord(uint8_t *head, uint64_t size) {
    for (uint64_t at = 0; at < size && size - at >= 16;) {
        uint64_t length = get(head + at, 8);
        uint32_t crc = ffs_checksum(FFS_CRC_32C, 0, head + at, 8);
        put(head + at + 8, (crc >> 15 | crc << 17) + 0xa282ead8u, 4);
        if (length > size - at - 16) return;
        at += 16 + length;
    }
}

/* Returns the size of the file that the index describes. */
static int64_t mend_index(uint8_t *head, uint64_t size) {
    if (size < 76) return 0;
    uint64_t width = head[12] & 1 ? 4 : 8, count = (size - 76) / (width + 4), end = 0;
    memset(head, 0, 72);
    memcpy(head, "ffserve\n", 8);
    memcpy(head + 16, "tfrecord", 8);
    for (uint64_t k = 0; k < count; k++) end += 16 + get(head + 72 + width * k, width);
    end &= INT64_MAX;
    put(head + 8, 2, 4);
    put(head + 12, width, 4);
    put(head + 32, end, 8);
    put(head + 56, count, 8);
    put(head + size - 4, ffs_checksum(FFS_CRC_32C, 0, head, size - 4), 4);
    return (int64_t)end;
}

/* The bytes are the heads of files, of the same size but for the last. Tables have as many rows as
 * codec.py gives them. */
static void small(const uint8_t *bytes, size_t size, const uint8_t *parameters) {
    enum { FFRECORD, TFRECORD, INDEX, RECORDIO, FILES = 3 };
    static const int row_sizes[] = {12, 16, 8, 20};
    int format = parameters[0] % 4, mended = parameters[1] & 1;
    int64_t n = 1 + parameters[2] % FILES, got[FILES], sizes[FILES], index_sizes[FILES],
            counts[FILES];
    int64_t stride = (int64_t)((size + n - 1) / n), mtimes[FILES] = {0};
    uint32_t crcs[FILES] = {0};
    uint8_t done[FILES];
    uint8_t *heads = copy_of(bytes, size);
    for (int64_t k = 0; k < n; k++) {
        int64_t left = (int64_t)size - k * stride;
        uint8_t *head = heads + (left < 0 ? (int64_t)size : k * stride);
        got[k] = left < 0 ? 0 : left < stride ? left : stride;
        sizes[k] = index_sizes[k] = got[k] + (parameters[3] & 1 ? 1ll << parameters[4] % 62 : 0);
        if (mended && format == FFRECORD) mend_ffrecord(head, got[k]);
        if (mended && format == TFRECORD) mend_tfrecord(head, got[k]);
        if (mended && format == INDEX) sizes[k] = mend_index(head, got[k]);
    }
    int64_t room = (int64_t)size / row_sizes[format], rows = 0;
    size_t places = (room + 1) * sizeof(int64_t), marks = (room + 1) * sizeof(uint32_t);
    uint64_t *offsets = malloc(places), *lengths = malloc(places);
    int64_t *firsts = malloc(places + n * sizeof *firsts), *decoded = malloc(places);
    uint32_t *checksums = malloc(marks);
    uint8_t *compressors = malloc(room + 1);
    if (format != RECORDIO) { /* these have no row more than they need */
        offsets = realloc(offsets, room ? places - 8 : 1);
        lengths = realloc(lengths, room ? places - 8 : 1);
        checksums = realloc(checksums, room ? marks - 4 : 1);
    }
    ffs_small_files files = {heads, stride, n, room, got, sizes, done, counts, 0};
    switch (format) {
    case FFRECORD: ffs_small_ffrecord(&files, offsets, lengths, checksums, crcs); break;
    case TFRECORD: ffs_small_tfrecord(&files, offsets, lengths, checksums); break;
    case INDEX:
        ffs_small_tfrecord_index(&files, index_sizes, mtimes, crcs, crcs, offsets, lengths,
                                 checksums);
        break;
    default:
        ffs_small_recordio(&files, 1000, 16, (int64_t *)offsets, (int64_t *)lengths, firsts,
                           decoded, checksums, compressors, (int32_t *)crcs);
    }
    for (int64_t k = 0, before = 0; k < n; before += done[k], rows += counts[k], k++) {
        CHECK(counts[k] >= 0 && counts[k] <= room - rows && (done[k] || !counts[k]));
        for (int64_t row = rows; row < rows + counts[k]; row++) {
            uint64_t end = format == RECORDIO ? lengths[row] : offsets[row] + lengths[row];
            CHECK(offsets[row] <= end && end <= (uint64_t)sizes[k]);
            CHECK(format == RECORDIO || lengths[row] < 1ull << 48);
            CHECK(format != RECORDIO || firsts[row + before] < firsts[row + before + 1]);
        }
    }
    CHECK(files.rows == rows);
    free(offsets), free(lengths), free(firsts), free(decoded), free(checksums), free(compressors);
    free(heads);
}

/* ---- tf.train.Example --------------------------------------------------------------------- */
static void allocate_column(ffs_example_column *column, int64_t n) {
    column->valid = malloc(n);
    column->outer = malloc((n + 1) * 4);
    column->inner = malloc((column->steps + 1) * 4);
    column->values = malloc(
        column->items * (column->kind == FFS_EXAMPLE_FLOAT && !column->wide ? 4 : 8) + 1);
    column->edges = malloc((column->items + 1) * 4);
    column->data = malloc(column->size + 1);
}

static void free_column(ffs_example_column *column) {
    free(column->valid), free(column->outer), free(column->inner);
    free(column->values), free(column->edges), free(column->data);
    free(column->begins), free(column->sizes), free(column->places);
}

/* Returns whether the column could be decoded. */
static int decode_column(ffs_example_batch *batch, ffs_example_column *column) {
    int64_t n = batch->n;
    column->begins = malloc(n * 8), column->sizes = malloc(n * 8), column->places = malloc(n);
    if (ffs_example_find(batch, column, 1) || ffs_example_count(batch, column)) {
        CHECK(batch->fault >= FFS_EXAMPLE_MALFORMED && batch->fault <= FFS_EXAMPLE_LARGE);
        CHECK(batch->row >= 0 && batch->row < n);
        return 0;
    }
    CHECK(column->depth || column->items == (uint64_t)n);
    allocate_column(column, n);
    if (ffs_example_fill(batch, column)) {
        CHECK(batch->fault == FFS_EXAMPLE_INEXACT);
        return 0;
    }
    uint64_t values = column->depth == 2 ? column->steps : column->items;
    CHECK(!column->depth || (column->outer[0] == 0 && (uint64_t)column->outer[n] == values));
    for (int64_t k = 0; column->depth && k < n; k++)
        CHECK(column->outer[k] <= column->outer[k + 1]);
    for (uint64_t k = 0; column->depth == 2 && k < column->steps; k++)
        CHECK(column->inner[k] <= column->inner[k + 1]);
    CHECK(column->depth < 2 || (uint64_t)column->inner[column->steps] == column->items);
    for (uint64_t k = 0; column->kind == FFS_EXAMPLE_BYTES && k < column->items; k++)
        CHECK(column->edges[k] <= column->edges[k + 1]);
    CHECK(column->kind != FFS_EXAMPLE_BYTES ||
          (uint64_t)column->edges[column->items] == column->size);
    return 1;
}

static int64_t *widen(const int32_t *from, uint64_t count) {
    int64_t *to = malloc(count * sizeof *to);
    for (uint64_t k = 0; k < count; k++) to[k] = from[k];
    return to;
}

/* Encode a decoded column: what is decoded from that is the same. */
static void encode_column(const ffs_example_column *column, int64_t n, int sequence) {
    int bytes = column->kind == FFS_EXAMPLE_BYTES;
    ffs_example_source source = {.name = column->name,
                                 .name_size = column->name_size,
                                 .kind = column->kind,
                                 .depth = column->depth,
                                 .valid = column->valid,
                                 .values = bytes ? (void *)column->data : column->values};
    int64_t *outer = column->depth ? widen(column->outer, n + 1) : NULL;
    int64_t *inner = column->depth == 2 ? widen(column->inner, column->steps + 1) : NULL;
    int64_t *edges = bytes ? widen(column->edges, column->items + 1) : NULL;
    source.outer = outer, source.inner = inner, source.edges = edges;
    int64_t *sizes = malloc(n * 8), total = 0;
    uint64_t *starts = malloc(n * 8);
    ffs_example_measure(&source, 1, n, sequence, sizes);
    for (int64_t k = 0; k < n; total += sizes[k++]) starts[k] = (uint64_t)total;
    uint8_t *out = malloc(total ? total : 1);
    ffs_example_encode(&source, 1, n, sequence, out);
    ffs_example_batch batch = {
        .bytes = out, .starts = starts, .lengths = (uint64_t *)sizes, .n = n, .sequence = sequence};
    ffs_example_column again = {.name = column->name,
                                .name_size = column->name_size,
                                .kind = column->kind,
                                .depth = column->depth};
    CHECK(decode_column(&batch, &again));
    CHECK(again.items == column->items && again.size == column->size &&
          again.steps == column->steps);
    CHECK(!memcmp(again.valid, column->valid, n));
    CHECK(!column->depth || !memcmp(again.outer, column->outer, (n + 1) * 4));
    CHECK(column->depth < 2 || !memcmp(again.inner, column->inner, (column->steps + 1) * 4));
    CHECK(!bytes || !memcmp(again.edges, column->edges, (column->items + 1) * 4));
    CHECK(!memcmp(bytes ? again.data : again.values, source.values,
                  bytes ? column->size
                        : column->items * (column->kind == FFS_EXAMPLE_FLOAT ? 4 : 8)));
    free_column(&again);
    free(sizes), free(starts), free(out), free(outer), free(inner), free(edges);
}

/* Where records, which may be damaged, have some columns: none outside of them. */
static void find_columns(ffs_example_batch *batch, const ffs_example_feature *features, int count,
                         size_t size) {
    ffs_example_column *columns = calloc(count + 1, sizeof *columns);
    int64_t n = batch->n;
    for (int k = 0; k <= count; k++) {
        columns[k].name = k ? batch->bytes + features[k - 1].name_at : (const uint8_t *)"a";
        columns[k].name_size = k ? features[k - 1].name_size : 1;
        columns[k].begins = malloc(n * 8), columns[k].sizes = malloc(n * 8);
        columns[k].places = malloc(n);
    }
    if (!ffs_example_find(batch, columns, count + 1))
        for (int k = 0; k <= count; k++)
            for (int64_t row = 0; row < n; row++) {
                uint64_t begin = columns[k].begins[row], length = columns[k].sizes[row];
                CHECK(columns[k].places[row] <= 2);
                CHECK(!columns[k].places[row] || (begin <= size && length <= size - begin));
            }
    for (int k = 0; k <= count; k++) free_column(&columns[k]);
    free(columns);
}

/* The bytes are records, of the same size but for the last. Each feature is decoded as what it is,
 * and as what the parameters say; one named "a" also where records are damaged. */
static void examples(const uint8_t *bytes, size_t size, const uint8_t *parameters) {
    enum { RECORDS = 4, FEATURES = 16 };
    uint64_t starts[RECORDS], lengths[RECORDS];
    int32_t slots[2 * FEATURES];
    ffs_example_feature features[FEATURES];
    uint8_t *copy = copy_of(bytes, size);
    ffs_example_batch batch = {copy, starts, lengths, 1 + parameters[0] % RECORDS,
                               parameters[1] & 1};
    uint64_t step = (size + batch.n - 1) / batch.n;
    for (int64_t k = 0; k < batch.n; k++) {
        starts[k] = (uint64_t)k * step < size ? (uint64_t)k * step : size;
        lengths[k] = step < size - starts[k] ? step : size - starts[k];
    }
    int room = 1 << parameters[2] % 5;
    int32_t found = ffs_example_infer(&batch, features, room, slots, 2 * room);
    CHECK(found >= -2 && found <= room);
    find_columns(&batch, features, found < 0 ? 0 : found, size);
    ffs_example_column named = {
        .name = (const uint8_t *)"a",
        .name_size = 1,
        .kind = 1 + parameters[3] % 3,
        .depth = parameters[4] % 3,
        .wide = parameters[5] & 1,
    };
    decode_column(&batch, &named);
    free_column(&named);
    for (int32_t k = 0; k < found; k++) {
        const ffs_example_feature *feature = features + k;
        CHECK(feature->name_at <= size && feature->name_size <= size - feature->name_at);
        for (int other = 0; other < 2; other++) {
            int kind = feature->rows[3] >= 0 ? 3 : feature->rows[2] >= 0 ? 2 : 1;
            ffs_example_column column = {
                .name = copy + feature->name_at,
                .name_size = feature->name_size,
                .kind = other ? 1 + parameters[3] % 3 : kind,
                .depth = other            ? parameters[4] % 3
                       : feature->listed  ? 2
                       : feature->several ? 1
                                          : 0,
                .wide = other & parameters[5],
            };
            if (decode_column(&batch, &column) && !column.wide &&
                (batch.sequence || column.depth < 2))
                encode_column(&column, batch.n, batch.sequence);
            free_column(&column);
        }
    }
    free(copy);
}

/* ---- tar ---------------------------------------------------------------------------------- */
/* Write the checksums of what looks like a header. */
static void mend_tar(uint8_t *bytes, size_t size) {
    for (size_t at = 0; at + 512 <= size; at += 512) {
        if (memcmp(bytes + at + 257, "ustar", 5)) continue;
        memset(bytes + at + 148, ' ', 8);
        unsigned sum = 0;
        for (int k = 0; k < 512; k++) sum += bytes[at + k];
        for (int k = 5; k >= 0; k--, sum >>= 3) bytes[at + 148 + k] = '0' + (sum & 7);
    }
}

/* Read headers ahead in a file that has these bytes at the begin of each part of it. */
static void tar_ahead(const uint8_t *bytes, size_t size, ffs_tar_scan *scan) {
    enum { PARTS = 3, WINDOW = 2048 };
    uint8_t window[WINDOW];
    int fd = memfd_create("tar", MFD_CLOEXEC);
    scan->file_size = PARTS * (8u << 20);
    CHECK(!ftruncate(fd, (off_t)scan->file_size));
    for (int k = 0; k < PARTS; k++) CHECK(pwrite(fd, bytes, size, k * (8 << 20)) == (ssize_t)size);
    scan->wanted = WINDOW + 1; /* as if the first header were not in memory */
    CHECK(ffs_tar_headers(scan, fd, window, WINDOW, 0) == FFS_TAR_MORE && !scan->at);
    CHECK(scan->ahead == scan->file_size);
    close(fd);
}

static void tar(const uint8_t *bytes, size_t size, const uint8_t *parameters) {
    static uint8_t names[FFS_TAR_BLOCK_COUNT * (FFS_TAR_MOST_NAME + 1)];
    static ffs_tar_scan scan;
    uint64_t step = 512 + 64u * parameters[0];
    uint8_t *copy = copy_of(bytes, size);
    if (parameters[1] & 1) mend_tar(copy, size);
    scan = (ffs_tar_scan){.names = names, .key_size = -1, .tolerant = parameters[2] & 1};
    if (parameters[3] & 1) tar_ahead(copy, size, &scan);
    scan.file_size = size + (parameters[4] & 1 ? 1ull << parameters[5] % 62 : 0);
    for (int turn = 0, result; turn < 1000 && scan.at <= size; turn++) {
        uint64_t base = scan.at, part = step > scan.wanted ? step : scan.wanted;
        part = part < size - base ? part : size - base;
        uint8_t *window = copy_of(copy + base, part);
        result = ffs_tar(&scan, window, base, part);
        free(window);
        CHECK(scan.held <= FFS_TAR_BLOCK_COUNT && scan.names_size <= (int64_t)sizeof names);
        CHECK(scan.at >= base && scan.at <= scan.file_size && scan.samples <= 1000 * 1024);
        for (int64_t k = 0; k < scan.held; k++) {
            uint64_t begin = scan.offsets[k], length = scan.lengths[k];
            CHECK((begin <= scan.file_size && length <= scan.file_size - begin) || scan.cut);
        }
        if (result == FFS_TAR_ROWS)
            scan.held = scan.names_size = 0;
        else if (result == FFS_TAR_END || result == FFS_TAR_FAULT ||
                 (result == FFS_TAR_MORE && scan.at == base && scan.wanted <= part))
            break;
    }
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static void (*const targets[])(const uint8_t *, size_t, const uint8_t *) = {
        frames, frame_search, chunks, split, directory};
    static void (*const later[])(const uint8_t *, size_t, const uint8_t *) = {small, examples,
                                                                              inflate, tar};
    if (size < 9) return 0;
    /* The numbers of a target stay: the corpus knows them. */
    (data[0] < 240 ? targets[data[0] % 5]
                   : later[data[0] < 245   ? 0
                           : data[0] < 250 ? 1
                           : data[0] == 253 ? 3
                                           : 2])(data + 9, size - 9, data + 1);
    return 0;
}
