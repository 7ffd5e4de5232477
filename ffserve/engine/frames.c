/* TFRecord's frames: a walk from header to header, for files of many small records. Pure functions
 * of bytes in memory; who reads which window is decided in Python (formats/tfrecord.py). */
#include <string.h>

#include "core.h"

#define HEADER 12 /* u64 length, u32 masked CRC-32C of those 8 bytes */
#define FOOTER 4  /* u32 masked CRC-32C of the payload */

static uint32_t get32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t get64(const uint8_t *p)
{
    return get32(p) | (uint64_t)get32(p + 4) << 32;
}

static uint32_t unmask(uint32_t masked)
{
    uint32_t turned = masked - 0xA282EAD8u;
    return turned >> 17 | turned << 15;
}

static int header_holds(const uint8_t *p)
{
    return ffs_checksum(FFS_CRC_32C, 0, p, 8) == unmask(get32(p + 8));
}

int ffs_frames(ffs_frame_walk *w, const uint8_t *window, uint64_t base, uint64_t size)
{
    uint64_t end = base + size;
    for (;;) {
        if (w->owed && w->at - FOOTER >= base && w->at <= end) {
            w->checksums[w->count - 1] = unmask(get32(window + (w->at - FOOTER - base)));
            w->owed = 0;
        }
        if (w->owed)
            return FFS_FRAMES_MORE;
        if (w->at == w->file_size)
            return FFS_FRAMES_END;
        if (w->file_size - w->at < HEADER)
            return FFS_FRAMES_CUT_HEADER;
        if (w->at < base || end < w->at || end - w->at < HEADER)
            return FFS_FRAMES_MORE;
        const uint8_t *header = window + (w->at - base);
        if (w->verify && !header_holds(header))
            return FFS_FRAMES_BAD_HEADER;
        uint64_t length = get64(header), left = w->file_size - w->at - HEADER;
        if (left < FOOTER || length > left - FOOTER)
            return FFS_FRAMES_CUT_RECORD;
        if (w->count == w->room)
            return FFS_FRAMES_FULL;
        w->offsets[w->count] = w->at + HEADER;
        w->lengths[w->count++] = length;
        w->at += HEADER + length + FOOTER;
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
            memcpy(out + HEADER, payload, length);
        put32(out + HEADER + length, masked(payload, length));
        out += HEADER + length + FOOTER;
    }
}

int ffs_frame_search(ffs_frame_finder *f, const uint8_t *window, uint64_t base, uint64_t size)
{
    uint64_t end = base + size;
    for (; f->at <= f->file_size && f->at <= end; f->at++) {
        const uint8_t *here = window + (f->at - base);
        if (f->proven) {
            uint64_t upto = f->at - FOOTER;
            f->crc = ffs_checksum(FFS_CRC_32C, f->crc, window + (f->summed - base),
                                  upto - f->summed);
            f->summed = upto;
            if (f->crc != unmask(get32(here - FOOTER)))
                continue;
            if (f->at == f->file_size)
                return 1;
        }
        if (f->file_size - f->at < HEADER + FOOTER)
            continue;
        if (end - f->at < HEADER)
            return 0;
        if (header_holds(here) && get64(here) <= f->file_size - f->at - HEADER - FOOTER)
            return 1;
    }
    return 0;
}
