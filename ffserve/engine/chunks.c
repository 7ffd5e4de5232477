/* Records inside a decoded chunk of RecordIO, each a u32 length and its bytes. */
#include <string.h>

#include "core.h"

int64_t ffs_split(const uint8_t *bytes, uint64_t size, int64_t n, int64_t *starts,
                  int64_t *lengths, uint64_t *end)
{
    uint64_t at = 0;
    int64_t k = 0;

    for (; k < n && size - at >= 4; k++) {
        const uint8_t *p = bytes + at;
        uint64_t length = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
                          (uint32_t)p[3] << 24;
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
