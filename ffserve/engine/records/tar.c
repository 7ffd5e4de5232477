/* Tar archives: see tar.h. */
#define _GNU_SOURCE /* preadv2 */
#include <fcntl.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "codec.h"
#include "tar.h"

#define BLOCK FFS_TAR_BLOCK
#define NO_NUMBER INT64_MIN

/* Places in a header. */
#define NAME 0
#define NAME_SIZE 100
#define SIZE 124
#define CHECKSUM 148
#define TYPE 156
#define LINK 157
#define MAGIC 257
#define PREFIX 345
#define PREFIX_SIZE 155

/* A device that takes 0.1 ms for a read has so many at the same time, and searching for the first
 * header of a part costs a sixtieth of what the part has. */
#define PARTS 64
#define PART ((uint64_t)8 << 20)
#define SEARCHED ((uint64_t)128 << 10)

static const struct {
    int place, size;
} numbers[] = {{100, 8},  {108, 8},      {116, 8}, {SIZE, 12},
               {136, 12}, {CHECKSUM, 8}, {329, 8}, {337, 8}};

static size_t text_size(const uint8_t *p, size_t most)
{
    const uint8_t *end = memchr(p, 0, most);
    return end ? (size_t)(end - p) : most;
}

static int is_space(uint8_t c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* A number in a header: octal digits among spaces, up to a zero; or, after 0x80 or 0xff, big-endian.
 * NO_NUMBER if it is none, or negative and not of 64 bits. */
static int64_t number(const uint8_t *p, int size)
{
    if (*p == 0x80 || *p == 0xff) {
        uint64_t value = *p == 0xff ? UINT64_MAX : 0;
        for (int k = 1; k < size; k++) {
            uint64_t high = value >> 55;
            if (high != (*p == 0xff ? 511 : 0))
                return NO_NUMBER;
            value = value << 8 | p[k];
        }
        return (int64_t)value;
    }
    size_t end = text_size(p, (size_t)size), k = 0;
    while (k < end && is_space(p[k]))
        k++;
    while (end > k && is_space(p[end - 1]))
        end--;
    int64_t value = 0;
    for (; k < end; k++) {
        if (p[k] < '0' || p[k] > '7')
            return NO_NUMBER;
        value = value << 3 | (p[k] - '0');
    }
    return value;
}

static int all_zero(const uint8_t *p)
{
    return !*p && !memcmp(p, p + 1, BLOCK - 1);
}

int ffs_tar_header_is_valid(const uint8_t *p)
{
    uint32_t sum = 0;
    int32_t high = 0; /* old archivers summed up signed bytes */
    for (int k = 0; k < BLOCK; k++) {
        sum += p[k];
        high += p[k] >> 7;
    }
    for (int k = CHECKSUM; k < CHECKSUM + 8; k++) {
        sum += ' ' - p[k];
        high -= p[k] >> 7;
    }
    int64_t stored = number(p + CHECKSUM, 8);
    return stored == (int64_t)sum || stored == (int64_t)sum - 256 * (int64_t)high;
}

static int fault(ffs_tar_scan *s, ffs_tar_fault what)
{
    s->fault = what;
    return FFS_TAR_FAULT;
}

static uint64_t padded(uint64_t size)
{
    return (size + BLOCK - 1) / BLOCK * BLOCK;
}

/* Keep a text of an extended header, unless an earlier header has said it already. */
static int keep(uint8_t *into, int32_t *has, const uint8_t *text, size_t size)
{
    if (*has)
        return 1;
    if (size > FFS_TAR_MOST_NAME)
        return 0;
    memcpy(into, text, size);
    into[size] = 0;
    *has = 1;
    return 1;
}

/* Take the entries of an extended header, "length key=value\n" each; a key that comes twice has its
 * last value. Returns a fault, 0: none. */
static int take_pax(ffs_tar_scan *s, int global, const uint8_t *p, uint64_t size)
{
    static const char *const keys[] = {"path", "linkpath", "size"};
    struct {
        const uint8_t *text;
        size_t size;
    } found[3] = {{0}};
    for (uint64_t at = 0; at < size && p[at];) {
        uint64_t length = 0, k = at;
        while (k < size && k - at < 18 && p[k] >= '0' && p[k] <= '9')
            length = 10 * length + (p[k++] - '0');
        if (k == at || k == size || p[k] != ' ' || length < 5 || length > size - at)
            return FFS_TAR_BAD_PAX;
        const uint8_t *key = p + k + 1, *end = p + at + length - 1;
        if (key > end || *end != '\n')
            return FFS_TAR_BAD_PAX;
        const uint8_t *equals = memchr(key, '=', (size_t)(end - key));
        if (!equals || equals == key)
            return FFS_TAR_BAD_PAX;
        size_t key_size = (size_t)(equals - key);
        int sparse = key_size >= 11 && !memcmp(key, "GNU.sparse.", 11);
        if (global && sparse)
            return FFS_TAR_GLOBAL;
        s->sparse |= sparse;
        for (int which = 0; which < 3; which++)
            if (key_size == strlen(keys[which]) && !memcmp(key, keys[which], key_size)) {
                if (global)
                    return FFS_TAR_GLOBAL;
                found[which].text = equals + 1;
                found[which].size = (size_t)(end - equals - 1);
            }
        at += length;
    }
    for (int which = 0; which < 2; which++) {
        const uint8_t *text = found[which].text;
        size_t most = found[which].size;
        if (!text)
            continue;
        if (memchr(text, 0, most))
            return FFS_TAR_BAD_PAX;
        while (!which && most && text[most - 1] == '/')
            most--;
        if (!keep(which ? s->link : s->name, which ? &s->has_link : &s->has_name, text, most))
            return FFS_TAR_LONG_NAME;
    }
    if (found[2].text && !s->has_size) {
        uint64_t stated = 0;
        if (!found[2].size || found[2].size > 18)
            return FFS_TAR_BAD_PAX;
        for (size_t k = 0; k < found[2].size; k++) {
            if (found[2].text[k] < '0' || found[2].text[k] > '9')
                return FFS_TAR_BAD_PAX;
            stated = 10 * stated + (found[2].text[k] - '0');
        }
        s->next_size = stated;
        s->has_size = 1;
    }
    return 0;
}

/* The number of a field, found by its name or new; -1: there are too many. */
static int64_t field_of(ffs_tar_scan *s, const uint8_t *extension, size_t size)
{
    uint8_t name[FFS_TAR_MOST_NAME];
    uint32_t hash = 2166136261u;
    for (size_t k = 0; k < size; k++) {
        uint8_t c = extension[k];
        name[k] = c >= 'A' && c <= 'Z' ? c + 32 : c;
        hash = (hash ^ name[k]) * 16777619u;
    }
    for (uint32_t at = hash;; at++) {
        uint16_t *slot = &s->slots[at % (2 * FFS_TAR_MOST_FIELDS)];
        if (*slot) {
            const uint8_t *known = s->field_names + s->field_starts[*slot - 1];
            if (!memcmp(known, name, size) && !known[size])
                return *slot - 1;
            continue;
        }
        if (s->field_count == FFS_TAR_MOST_FIELDS ||
            s->field_size + (int64_t)size + FFS_TAR_MOST_NAME > FFS_TAR_FIELD_ROOM)
            return -1;
        s->field_starts[s->field_count] = (uint32_t)s->field_size;
        memcpy(s->field_names + s->field_size, name, size);
        s->field_size += (int64_t)size;
        s->field_names[s->field_size++] = 0;
        s->last_seen[s->field_count] = -1;
        *slot = (uint16_t)++s->field_count;
        return s->field_count - 1;
    }
}

/* "__name__" and files below such a directory are WebDataset's own, and belong to no sample. */
static int is_meta(const uint8_t *name, size_t size)
{
    if (size < 4 || memcmp(name, "__", 2))
        return 0;
    const uint8_t *slash = memchr(name, '/', size);
    size_t first = slash ? (size_t)(slash - name) : size;
    return first >= 4 && !memcmp(name + first - 2, "__", 2);
}

/* Enter a member, if it belongs to a sample. Returns FFS_TAR_*; MORE: go on. */
static int enter(ffs_tar_scan *s, uint64_t offset, uint64_t length, int link)
{
    size_t size = strlen((const char *)s->name), last = size;
    while (last && s->name[last - 1] != '/')
        last--;
    const uint8_t *dot = memchr(s->name + last, '.', size - last);
    if (!dot || dot == s->name + last || is_meta(s->name, size)) {
        s->skipped++;
        return FFS_TAR_MORE;
    }
    size_t key_size = (size_t)(dot - s->name);
    int first = s->key_size != (int64_t)key_size || memcmp(s->key, s->name, key_size);
    int64_t field = field_of(s, dot + 1, size - key_size - 1);
    if (field < 0)
        return fault(s, FFS_TAR_FIELDS);
    if (!first && s->last_seen[field] == s->samples)
        return fault(s, FFS_TAR_TWICE);
    if (first) {
        memcpy(s->key, s->name, key_size);
        s->key_size = (int64_t)key_size;
        s->samples++;
    }
    s->last_seen[field] = s->samples;
    memcpy(s->names + s->names_size, s->name, size + 1);
    s->names_size += (int64_t)size + 1;
    s->offsets[s->held] = offset;
    s->lengths[s->held] = length;
    s->kinds[s->held++] = (uint32_t)field | (first ? FFS_TAR_FIRST : 0);
    return link ? FFS_TAR_LINK : FFS_TAR_MORE;
}

/* Enter a record for a header that the file cuts: reading it fails, as it has more bytes than are
 * left. It is a sample with the first field. */
static void enter_cut(ffs_tar_scan *s, uint64_t left)
{
    if (!s->field_count)
        field_of(s, (const uint8_t *)"?", 1);
    memcpy(s->names + s->names_size, "?", 2);
    s->names_size += 2;
    s->offsets[s->held] = s->at;
    s->lengths[s->held] = left + 1;
    s->kinds[s->held++] = FFS_TAR_FIRST;
    s->samples++;
    s->cut = 1;
    s->at = s->file_size;
}

/* Have the name of the member, as the header says if no extended header does. */
static void name_of(ffs_tar_scan *s, const uint8_t *p)
{
    if (!s->has_name) {
        size_t size = text_size(p + NAME, NAME_SIZE);
        size_t prefix = p[TYPE] == 'S' ? 0 : text_size(p + PREFIX, PREFIX_SIZE);
        uint8_t *into = s->name;
        if (prefix) {
            memcpy(into, p + PREFIX, prefix);
            into[prefix] = '/';
            into += prefix + 1;
        }
        memcpy(into, p + NAME, size);
        into[size] = 0;
    }
    if (!s->has_link) {
        size_t size = text_size(p + LINK, NAME_SIZE);
        memcpy(s->link, p + LINK, size);
        s->link[size] = 0;
    }
}

static void forget_extended(ffs_tar_scan *s)
{
    s->has_name = s->has_link = s->has_size = s->extended = s->sparse = 0;
}

int ffs_tar(ffs_tar_scan *s, const uint8_t *window, uint64_t base, uint64_t size)
{
    uint64_t end = base + size;
    for (;;) {
        uint64_t left = s->file_size - s->at;
        s->wanted = BLOCK;
        if (!left)
            return s->extended ? fault(s, FFS_TAR_NO_MEMBER) : FFS_TAR_END;
        if (s->held == FFS_TAR_BLOCK_COUNT)
            return FFS_TAR_ROWS;
        if (left < BLOCK) {
            if (!s->tolerant)
                return fault(s, FFS_TAR_CUT_HEADER);
            enter_cut(s, left);
            return FFS_TAR_END;
        }
        if (s->at < base || s->at >= end || end - s->at < BLOCK)
            return FFS_TAR_MORE;
        const uint8_t *p = window + (s->at - base);
        if (all_zero(p))
            return s->extended ? fault(s, FFS_TAR_NO_MEMBER) : FFS_TAR_END;
        if (!ffs_tar_header_is_valid(p))
            return fault(s, FFS_TAR_BAD_CHECKSUM);
        for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++)
            if (number(p + numbers[k].place, numbers[k].size) == NO_NUMBER)
                return fault(s, FFS_TAR_BAD_NUMBER);
        int64_t stated = number(p + SIZE, 12);
        if (stated < 0)
            return fault(s, FFS_TAR_BAD_NUMBER);
        uint64_t length = (uint64_t)stated, rest = left - BLOCK;
        uint8_t type = p[TYPE];
        if (type == 'L' || type == 'K' || type == 'x' || type == 'X' || type == 'g') {
            if (length > FFS_TAR_MOST_PAX)
                return fault(s, FFS_TAR_LONG_PAX);
            uint64_t whole = padded(length);
            if (whole > rest)
                return fault(s, FFS_TAR_CUT_HEADER);
            if (end - s->at - BLOCK < whole) {
                s->wanted = BLOCK + whole;
                return FFS_TAR_MORE;
            }
            const uint8_t *text = p + BLOCK;
            int what = 0;
            if (type == 'L' || type == 'K') {
                size_t text_length = text_size(text, whole);
                int kept = type == 'L' ? keep(s->name, &s->has_name, text, text_length)
                                       : keep(s->link, &s->has_link, text, text_length);
                what = kept ? 0 : FFS_TAR_LONG_NAME;
            } else {
                what = take_pax(s, type == 'g', text, whole);
            }
            if (what)
                return fault(s, what);
            s->extended = 1;
            s->digest = ffs_checksum(FFS_CRC_32C, s->digest, p, BLOCK + whole);
            s->at += BLOCK + whole;
            continue;
        }
        if (s->has_size)
            length = s->next_size;
        name_of(s, p);
        s->length = length;
        if (type == 'S' || s->sparse)
            return fault(s, FFS_TAR_SPARSE);
        /* Version 7 marks a directory by a slash. */
        size_t own = text_size(p + NAME, NAME_SIZE);
        int directory = type == '5' || (!type && own && p[NAME + own - 1] == '/');
        int regular = !directory && (!type || type == '0' || type == '7');
        int without_content = directory || (type >= '1' && type <= '6');
        uint64_t content = without_content ? 0 : length;
        int cut = content > rest || padded(content) > rest;
        if (cut && !s->tolerant)
            return fault(s, FFS_TAR_CUT_MEMBER);
        s->digest = ffs_checksum(FFS_CRC_32C, s->digest, p, BLOCK);
        int what = FFS_TAR_MORE;
        if (regular)
            what = enter(s, s->at + BLOCK, length, 0);
        else if (type == '1')
            what = enter(s, 0, 0, 1);
        if (what == FFS_TAR_FAULT)
            return what;
        s->at = cut ? s->file_size : s->at + BLOCK + padded(content);
        s->cut |= cut;
        forget_extended(s);
        if (what != FFS_TAR_MORE)
            return what;
    }
}

/* The position of the first block of [begin, begin + SEARCHED) that is a header; 0: none is. */
static uint64_t search(int fd, uint64_t begin)
{
    uint8_t page[4096];
    for (uint64_t at = begin; at < begin + SEARCHED; at += sizeof page) {
        ssize_t got = pread(fd, page, sizeof page, (off_t)at);
        for (ssize_t k = 0; k + BLOCK <= got; k += BLOCK)
            if (!memcmp(page + k + MAGIC, "ustar", 5) && ffs_tar_header_is_valid(page + k))
                return at + (uint64_t)k;
    }
    return 0;
}

/* Bring the headers of the next PARTS parts of the file into the page cache, those of different
 * parts at the same time: each part is followed from a header that is found near its begin. What is
 * taken for a header here and is none costs a read. Returns the end of the parts. */
static uint64_t read_ahead(int fd, uint64_t begin, uint64_t file_size, size_t size)
{
    uint64_t next[PARTS] = {begin}, ends[PARTS], left = file_size - begin;
    uint64_t behind = left < PARTS * PART ? file_size : begin + PARTS * PART;
    int parts = 1, going = 1;
    for (uint64_t at = begin + PART; at < behind; at += PART)
        posix_fadvise(fd, (off_t)at, SEARCHED, POSIX_FADV_WILLNEED);
    for (uint64_t at = begin + PART; at < behind; at += PART)
        if ((next[parts] = search(fd, at)))
            parts++;
    for (int k = 0; k < parts; k++)
        ends[k] = k + 1 < parts ? next[k + 1] : behind;
    while (going) {
        going = 0;
        for (int k = 0; k < parts; k++) {
            uint8_t header[BLOCK];
            if (next[k] >= ends[k])
                continue;
            int64_t length = -1;
            if (pread(fd, header, BLOCK, (off_t)next[k]) == BLOCK &&
                ffs_tar_header_is_valid(header))
                length = number(header + SIZE, 12);
            if (length < 0 || (uint64_t)length >= ends[k] - next[k]) {
                next[k] = ends[k];
                continue;
            }
            next[k] += BLOCK + padded((uint64_t)length);
            going = 1;
            if (next[k] < ends[k])
                posix_fadvise(fd, (off_t)next[k], (off_t)size, POSIX_FADV_WILLNEED);
        }
    }
    return behind;
}

int ffs_tar_headers(ffs_tar_scan *s, int fd, uint8_t *window, uint64_t size, uint64_t large)
{
    int why = FFS_TAR_MORE;
    while (why == FFS_TAR_MORE && s->length >= large) {
        struct iovec part = {window, size};
        ssize_t got = preadv2(fd, &part, 1, (off_t)s->at, RWF_NOWAIT);
        if (got < (ssize_t)s->wanted) {
            if (s->at >= s->ahead)
                s->ahead = read_ahead(fd, s->at, s->file_size, size);
            got = pread(fd, window, size, (off_t)s->at);
        }
        if (got < (ssize_t)s->wanted)
            break;
        why = ffs_tar(s, window, s->at, (uint64_t)got);
    }
    return why;
}
