/* libFuzzer target: the C functions that read bytes of files and of shared memory.
 *
 * The first byte of an input chooses the function, the next eight its parameters; the rest are the
 * bytes that it reads. Every buffer has exactly the size that the function was told, so that
 * AddressSanitizer sees each byte read or written outside.
 */
#include <stdlib.h>
#include <string.h>

#include "codec.h"
#include "inflate.h"
#include "shm.h"

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
    ffs_view view = {arena, ARENA, &segment, 1};
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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static void (*const targets[])(const uint8_t *, size_t, const uint8_t *) = {
        frames, frame_search, chunks, split, directory};
    if (size < 9) return 0;
    if (data[0] >= 250)
        inflate(data + 9, size - 9, data + 1);
    else
        targets[data[0] % 5](data + 9, size - 9, data + 1);
    return 0;
}
