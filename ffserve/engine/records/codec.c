/* TFRecord frames and RecordIO chunks: see codec.h. */
#include <string.h>

#include "codec.h"

static uint32_t get32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* ---- TFRecord frames --------------------------------------------------------------------- */
#define FRAME_HEADER 12 /* u64 length, u32 masked CRC-32C of those 8 bytes */
#define FRAME_FOOTER 4  /* u32 masked CRC-32C of the payload */

static uint64_t get64(const uint8_t *p)
{
    return get32(p) | (uint64_t)get32(p + 4) << 32;
}

static uint32_t unmask(uint32_t masked)
{
    uint32_t rotated = masked - 0xA282EAD8u;
    return rotated >> 17 | rotated << 15;
}

static int header_is_valid(const uint8_t *p)
{
    return ffs_checksum(FFS_CRC_32C, 0, p, 8) == unmask(get32(p + 8));
}

int ffs_frames(ffs_frame_scan *w, const uint8_t *window, uint64_t base, uint64_t size)
{
    uint64_t end = base + size;
    for (;;) {
        if (w->owed && w->at - FRAME_FOOTER >= base && w->at <= end) {
            w->checksums[w->count - 1] = unmask(get32(window + (w->at - FRAME_FOOTER - base)));
            w->owed = 0;
        }
        if (w->owed)
            return FFS_FRAMES_MORE;
        if (w->at == w->file_size)
            return FFS_FRAMES_END;
        if (w->file_size - w->at < FRAME_HEADER)
            return FFS_FRAMES_CUT_HEADER;
        if (w->at < base || end < w->at || end - w->at < FRAME_HEADER)
            return FFS_FRAMES_MORE;
        const uint8_t *header = window + (w->at - base);
        if (w->verify && !header_is_valid(header))
            return FFS_FRAMES_BAD_HEADER;
        uint64_t length = get64(header), left = w->file_size - w->at - FRAME_HEADER;
        if (left < FRAME_FOOTER || length > left - FRAME_FOOTER)
            return FFS_FRAMES_CUT_RECORD;
        if (w->count == w->room)
            return FFS_FRAMES_FULL;
        w->offsets[w->count] = w->at + FRAME_HEADER;
        w->lengths[w->count++] = length;
        w->at += FRAME_HEADER + length + FRAME_FOOTER;
        w->owed = 1;
    }
}

static uint32_t masked(const uint8_t *p, uint64_t size)
{
    uint32_t crc = ffs_checksum(FFS_CRC_32C, 0, p, size);
    return (crc >> 15 | crc << 17) + 0xA282EAD8u;
}

static void put32(uint8_t *p, uint32_t value)
{
    for (int k = 0; k < 4; k++)
        p[k] = (uint8_t)(value >> 8 * k);
}

void ffs_frame_all(const uint8_t *payloads, const uint64_t *edges, int64_t n, uint8_t *out)
{
    for (int64_t k = 0; k < n; k++) {
        const uint8_t *payload = payloads + edges[k];
        uint64_t length = edges[k + 1] - edges[k];
        put32(out, (uint32_t)length);
        put32(out + 4, (uint32_t)(length >> 32));
        put32(out + 8, masked(out, 8));
        if (length)
            memcpy(out + FRAME_HEADER, payload, length);
        put32(out + FRAME_HEADER + length, masked(payload, length));
        out += FRAME_HEADER + length + FRAME_FOOTER;
    }
}

int ffs_frame_search(ffs_frame_finder *f, const uint8_t *window, uint64_t base, uint64_t size)
{
    uint64_t end = base + size;
    for (; f->at <= f->file_size && f->at <= end; f->at++) {
        const uint8_t *here = window + (f->at - base);
        if (f->proven) {
            uint64_t upto = f->at - FRAME_FOOTER;
            f->crc = ffs_checksum(FFS_CRC_32C, f->crc, window + (f->summed - base),
                                  upto - f->summed);
            f->summed = upto;
            if (f->crc != unmask(get32(here - FRAME_FOOTER)))
                continue;
            if (f->at == f->file_size)
                return 1;
        }
        if (f->file_size - f->at < FRAME_HEADER + FRAME_FOOTER)
            continue;
        if (end - f->at < FRAME_HEADER)
            return 0;
        if (header_is_valid(here) &&
            get64(here) <= f->file_size - f->at - FRAME_HEADER - FRAME_FOOTER)
            return 1;
    }
    return 0;
}

/* ---- RecordIO chunks --------------------------------------------------------------------- */
/* Five u32. py: magic, records, checksum, compressor, size. go: magic, checksum, compressor, size,
 * records. */
#define CHUNK_HEADER 20
#define MAGIC 0x01020304u
#define PY 0
#define GO 1
#define NONE 0 /* compressions, as in COMPRESSIONS of formats/recordio_codec.py */
#define SNAPPY 1
#define GZIP 2
#define SNAPPY_FRAME_MOST 65536 /* decoded size of a frame of a snappy stream, at most */
#define UNREAD -1               /* not a fault: bytes from w->wanted on are needed */

/* The file's bytes [place, place + n), or NULL when they are not in the window. */
static const uint8_t *look(ffs_chunk_scan *w, const uint8_t *window, uint64_t base, uint64_t size,
                           uint64_t place, uint64_t n)
{
    if (place >= base && place - base <= size && size - (place - base) >= n)
        return window + (place - base);
    w->wanted = place;
    return NULL;
}

static uint32_t compression_of(const ffs_chunk_scan *w)
{
    return w->compressor - (w->dialect == PY ? 1 : 0);
}

/* Read the header at w->at. Returns 0 or what is wrong with it. */
static int parse_header(ffs_chunk_scan *w, const uint8_t *p)
{
    uint32_t words[5];

    for (int k = 0; k < 5; k++)
        words[k] = get32(p + 4 * k);
    int dialect = words[3] <= 3 ? PY : GO;
    if (words[0] != MAGIC)
        return FFS_CHUNK_NO_HEADER;
    if (w->dialect >= 0 && w->dialect != dialect)
        return FFS_CHUNK_DIALECT;
    w->dialect = dialect;
    w->records = dialect == PY ? words[1] : words[4];
    w->checksum = dialect == PY ? words[2] : words[1];
    w->compressor = dialect == PY ? words[3] : words[2];
    w->size = dialect == PY ? words[4] : words[3];
    if (compression_of(w) > GZIP)
        return FFS_CHUNK_COMPRESSOR;
    return w->size > w->file_size - w->at - CHUNK_HEADER ? FFS_CHUNK_CUT : 0;
}

/* The u32 at the start of a raw snappy block, or -1. */
static int64_t varint(const uint8_t *p, uint64_t size)
{
    uint64_t value = 0;

    for (uint64_t k = 0; k < size && k < 5; k++) {
        value |= (uint64_t)(p[k] & 0x7F) << 7 * k;
        if (p[k] < 0x80)
            return value <= UINT32_MAX ? (int64_t)value : -1;
    }
    return -1;
}

/* Decoded size of a frame of a snappy stream, or -1 when it is invalid. p: its first 13 bytes, or all
 * `left` bytes of the stream. *size: of the encoded frame. */
static int64_t snappy_frame(const uint8_t *p, uint64_t left, uint64_t *size)
{
    int64_t decoded = 0;

    if (left < 4)
        return -1;
    uint64_t inner = get32(p) >> 8;
    *size = 4 + inner;
    if (p[0] == 0x00)
        decoded = left > 8 ? varint(p + 8, left - 8) : -1;
    else if (p[0] == 0x01)
        decoded = (int64_t)inner - 4;
    else if (p[0] == 0xFF)
        decoded = inner == 6 ? 0 : -1;
    else if (p[0] < 0x80)
        decoded = -1;
    return decoded <= SNAPPY_FRAME_MOST ? decoded : -1;
}

/* Find the decoded size that the payload states, for w->decoded. Returns 0, UNREAD or
 * FFS_CHUNK_PAYLOAD. */
static int stated_size(ffs_chunk_scan *w, const uint8_t *window, uint64_t base, uint64_t size)
{
    uint64_t begin = w->at + CHUNK_HEADER, end = begin + w->size, n = 0;
    const uint8_t *p;

    if (compression_of(w) == NONE) {
        w->decoded = w->size;
    } else if (compression_of(w) == GZIP) {
        if (w->size < 18)
            return FFS_CHUNK_PAYLOAD;
        if (!(p = look(w, window, base, size, end - 4, 4)))
            return UNREAD;
        w->decoded = get32(p);
    } else if (w->dialect == PY) {
        n = w->size < 5 ? w->size : 5;
        if (n && !(p = look(w, window, base, size, begin, n)))
            return UNREAD;
        int64_t value = n ? varint(p, n) : -1;
        if (value < 0)
            return FFS_CHUNK_PAYLOAD;
        w->decoded = (uint64_t)value;
    } else {
        while (w->place < end) {
            uint64_t left = end - w->place, whole = 0;
            n = left < 13 ? left : 13;
            if (!(p = look(w, window, base, size, w->place, n)))
                return UNREAD;
            int64_t more = snappy_frame(p, n, &whole);
            if (more < 0 || whole > left)
                return FFS_CHUNK_PAYLOAD;
            w->decoded += (uint64_t)more;
            w->place += whole;
        }
    }
    return 0;
}

/* Whether the sizes that the chunk states are possible: 0 or what is wrong. */
static int implausible(const ffs_chunk_scan *w)
{
    /* By compression: a snappy element of 3 bytes decodes to at most 64, a deflate code of 2 bits to
     * at most 258 (zlib's technical notes). */
    static const uint64_t times[] = {1, 22, 1032};
    uint64_t end = w->at + CHUNK_HEADER + w->size;

    if (w->decoded > UINT32_MAX || w->decoded > w->size * times[compression_of(w)])
        return FFS_CHUNK_SIZE;
    if (!w->records || w->records > w->decoded / 4)
        return FFS_CHUNK_RECORDS;
    if ((uint64_t)w->firsts[w->count] + w->records > w->records_allowed + w->records_per_byte * end)
        return FFS_CHUNK_LIMIT;
    return 0;
}

/* Examine the chunk at w->at. Returns 0, UNREAD or what is wrong. */
static int examine(ffs_chunk_scan *w, const uint8_t *window, uint64_t base, uint64_t size)
{
    int fault = 0;

    if (!w->inside) {
        if (w->file_size - w->at < CHUNK_HEADER)
            return FFS_CHUNK_NO_HEADER;
        const uint8_t *p = look(w, window, base, size, w->at, CHUNK_HEADER);
        if (!p)
            return UNREAD;
        if ((fault = parse_header(w, p)))
            return fault;
        w->inside = 1;
        w->place = w->at + CHUNK_HEADER;
        w->decoded = 0;
    }
    if ((fault = stated_size(w, window, base, size)) == UNREAD)
        return fault;
    w->inside = 0;
    return fault ? fault : implausible(w);
}

int ffs_chunks(ffs_chunk_scan *w, const uint8_t *window, uint64_t base, uint64_t size)
{
    while (w->at != w->file_size) {
        if (w->count == w->room && !w->single)
            return FFS_CHUNKS_FULL;
        w->fault = examine(w, window, base, size);
        if (w->fault)
            return w->fault == UNREAD ? FFS_CHUNKS_MORE : FFS_CHUNKS_FAULT;
        if (w->single)
            return FFS_CHUNKS_VALID;
        int64_t k = w->count++;
        w->begins[k] = (int64_t)w->at;
        w->at += CHUNK_HEADER + w->size;
        w->ends[k] = (int64_t)w->at;
        w->firsts[k + 1] = w->firsts[k] + (int64_t)w->records;
        w->sizes[k] = (int64_t)w->decoded;
        w->checksums[k] = w->checksum;
        w->compressors[k] = (uint8_t)w->compressor;
    }
    return FFS_CHUNKS_END;
}

int64_t ffs_split(const uint8_t *bytes, uint64_t size, int64_t n, int64_t *starts, int64_t *lengths,
                  uint64_t *end)
{
    uint64_t at = 0;
    int64_t k = 0;

    for (; k < n && size - at >= 4; k++) {
        uint64_t length = get32(bytes + at);
        if (length > size - at - 4)
            break;
        starts[k] = (int64_t)at + 4;
        lengths[k] = (int64_t)length;
        at += 4 + length;
    }
    *end = at;
    return k;
}

void ffs_scatter(const uint8_t *bytes, const int64_t *starts, const int64_t *lengths, int64_t n,
                 uint8_t *const *dests)
{
    for (int64_t k = 0; k < n; k++)
        if (lengths[k])
            memcpy(dests[k], bytes + starts[k], (size_t)lengths[k]);
}

/* ---- tables of many small files ---------------------------------------------------------- */
#define MOST_LENGTH (((uint64_t)1 << 48) - 1) /* UNKNOWN_LENGTH of formats/base.py */
#define FFRECORD_HEADER 12

/* The tables of an FFRecord file; -1 if it is not in order, or `got` has not all of them. */
static int64_t ffrecord_tables(const uint8_t *head, uint64_t got, uint64_t size, int64_t room,
                               uint64_t *offsets, uint64_t *lengths, uint32_t *checksums,
                               uint32_t *crc)
{
    if (got < FFRECORD_HEADER || size >= MOST_LENGTH)
        return -1;
    uint64_t count = get64(head + 4), end = FFRECORD_HEADER + 12 * count;
    uint32_t stored = get32(head);
    if (count > (got - FFRECORD_HEADER) / 12 || (int64_t)count > room || !stored ||
        (!count && size > FFRECORD_HEADER))
        return -1;
    *crc = ffs_checksum(FFS_CRC_32, 0, head + 4, end - 4);
    if (*crc != stored)
        return -1;
    const uint8_t *sums = head + FFRECORD_HEADER, *places = sums + 4 * count;
    for (uint64_t k = 0; k < count; k++) {
        uint64_t next = k + 1 < count ? get64(places + 8 * (k + 1)) : size;
        offsets[k] = get64(places + 8 * k);
        checksums[k] = get32(sums + 4 * k);
        if ((!k && offsets[0] != end) || offsets[k] > next || next > size)
            return -1;
        lengths[k] = next - offsets[k];
    }
    /* A last sample without bytes, but with a checksum, was cut off. */
    if (count && !lengths[count - 1] && checksums[count - 1])
        return -1;
    return (int64_t)count;
}

static void enter(ffs_small_files *f, int64_t k, int64_t count)
{
    f->done[k] = count >= 0;
    f->counts[k] = count < 0 ? 0 : count;
    f->rows += f->counts[k];
}

void ffs_small_ffrecord(ffs_small_files *f, uint64_t *offsets, uint64_t *lengths,
                        uint32_t *checksums, uint32_t *crcs)
{
    for (int64_t k = 0; k < f->n; k++)
        enter(f, k,
              ffrecord_tables(f->heads + f->stride * k, (uint64_t)f->got[k], (uint64_t)f->sizes[k],
                              f->room - f->rows, offsets + f->rows, lengths + f->rows,
                              checksums + f->rows, crcs + k));
}

void ffs_small_tfrecord(ffs_small_files *f, uint64_t *offsets, uint64_t *lengths,
                        uint32_t *checksums)
{
    for (int64_t k = 0; k < f->n; k++) {
        uint64_t size = (uint64_t)f->sizes[k];
        ffs_frame_scan scan = {
            .file_size = size,
            .offsets = offsets + f->rows,
            .lengths = lengths + f->rows,
            .checksums = checksums + f->rows,
            .room = f->room - f->rows,
            .verify = 1,
        };
        int whole = f->got[k] == f->sizes[k] &&
                    ffs_frames(&scan, f->heads + f->stride * k, 0, size) == FFS_FRAMES_END;
        enter(f, k, whole ? scan.count : -1);
    }
}

#define INDEX_HEADER 72
#define INDEX_VERSION 2

/* Whether an index file is that of this file; see `Identity` in index_file.py. */
static int describes(const uint8_t *p, uint64_t size, int64_t mtime, uint32_t head, uint32_t tail)
{
    static const char name[16] = "tfrecord";
    return !memcmp(p, "ffserve\n", 8) && get32(p + 8) == INDEX_VERSION &&
           !memcmp(p + 16, name, sizeof name) && get64(p + 32) == size &&
           (int64_t)get64(p + 40) == mtime && get32(p + 48) == head && get32(p + 52) == tail;
}

/* The tables of a TFRecord file out of `got` bytes of an index file; -1 if it is not in order. */
static int64_t indexed_frames(const uint8_t *p, uint64_t got, uint64_t size, int64_t room,
                              uint64_t *offsets, uint64_t *lengths, uint32_t *checksums)
{
    uint64_t width = get32(p + 12), count = get64(p + 56), at = 0;
    uint64_t tables = got - INDEX_HEADER - 4;
    if (size >= MOST_LENGTH || (width != 4 && width != 8) || get64(p + 64) ||
        tables % (width + 4) || count != tables / (width + 4) || (int64_t)count > room ||
        ffs_checksum(FFS_CRC_32C, 0, p, got - 4) != get32(p + got - 4))
        return -1;
    const uint8_t *sizes = p + INDEX_HEADER, *sums = sizes + width * count;
    for (uint64_t k = 0; k < count; k++) {
        uint64_t length = width == 4 ? get32(sizes + 4 * k) : get64(sizes + 8 * k);
        uint64_t left = size - at;
        if (left < FRAME_HEADER + FRAME_FOOTER || length > left - FRAME_HEADER - FRAME_FOOTER)
            return -1;
        offsets[k] = at + FRAME_HEADER;
        lengths[k] = length;
        checksums[k] = get32(sums + 4 * k);
        at += FRAME_HEADER + length + FRAME_FOOTER;
    }
    return at == size ? (int64_t)count : -1;
}

void ffs_small_tfrecord_index(ffs_small_files *f, const int64_t *index_sizes, const int64_t *mtimes,
                              const uint32_t *head_crcs, const uint32_t *tail_crcs,
                              uint64_t *offsets, uint64_t *lengths, uint32_t *checksums)
{
    for (int64_t k = 0; k < f->n; k++) {
        const uint8_t *p = f->heads + f->stride * k;
        uint64_t size = (uint64_t)f->sizes[k];
        int fits = f->got[k] == index_sizes[k] && f->got[k] >= INDEX_HEADER + 4 &&
                   describes(p, size, mtimes[k], head_crcs[k], tail_crcs[k]);
        enter(f, k,
              fits ? indexed_frames(p, (uint64_t)f->got[k], size, f->room - f->rows,
                                    offsets + f->rows, lengths + f->rows, checksums + f->rows)
                   : -1);
    }
}

void ffs_small_recordio(ffs_small_files *f, uint64_t records_allowed, uint64_t records_per_byte,
                        int64_t *begins, int64_t *ends, int64_t *firsts, int64_t *decoded,
                        uint32_t *checksums, uint8_t *compressors, int32_t *dialects)
{
    int64_t before = 0;
    for (int64_t k = 0; k < f->n; k++) {
        uint64_t size = (uint64_t)f->sizes[k];
        ffs_chunk_scan scan = {
            .file_size = size,
            .begins = begins + f->rows,
            .ends = ends + f->rows,
            .firsts = firsts + f->rows + before,
            .sizes = decoded + f->rows,
            .checksums = checksums + f->rows,
            .compressors = compressors + f->rows,
            .room = f->room - f->rows,
            .records_allowed = records_allowed,
            .records_per_byte = records_per_byte,
            .dialect = -1,
        };
        scan.firsts[0] = 0;
        int whole = f->got[k] == f->sizes[k] &&
                    ffs_chunks(&scan, f->heads + f->stride * k, 0, size) == FFS_CHUNKS_END;
        dialects[k] = scan.dialect;
        enter(f, k, whole ? scan.count : -1);
        before += whole;
    }
}
