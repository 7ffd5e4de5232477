/* Deflate streams: one pass that finds the beginnings of blocks, and decoding from such a beginning.
 *
 * Pure functions of bytes in memory, as in codec.h. A deflate stream is a sequence of blocks that
 * begin at any bit. To decode from a block's beginning on, a decoder needs the up to 32 KiB of
 * output before it, its window, because blocks refer back to them (RFC 1951).
 */
#ifndef FFSERVE_INFLATE_H
#define FFSERVE_INFLATE_H
#include <stdint.h>

/* cdef */
/* Name of the library that decodes from a block's beginning: "ISA-L" or "zlib"; "" if the core was
 * built without zlib: then no function below can be called. */
const char *ffs_inflate_library(void);

#define FFS_INFLATE_MORE 0 /* the input is used up, or the output full */
#define FFS_INFLATE_BAD 1  /* the stream is damaged: see message */
#define FFS_INFLATE_REST 2 /* zlib: bytes follow the end of the stream */

/* The beginning of a block: its bit in the file, and the offset in the output of what it holds. */
typedef struct {
    uint64_t bit, out;
} ffs_block_mark;

/* A pass over a file: a zlib stream, or any number of gzip members. */
typedef struct {
    uint64_t used, made;   /* bytes of the file and of output so far */
    ffs_block_mark *marks; /* found by the last run, `room` of them at most */
    int64_t count, room;   /* beyond `room`, marks replace the last one */
    int32_t gzip;          /* else zlib */
    int32_t whole;         /* out: the bytes so far end with the end of a stream */
    const char *message;   /* out: with FFS_INFLATE_BAD */
    void *stream;          /* private */
} ffs_inflater;

/* Begin a pass, with all other members 0. Returns 0 or -ENOMEM. */
int ffs_inflate_begin(ffs_inflater *inflater, int32_t gzip);
/* Continue with the file's bytes from `used` on. Returns one of FFS_INFLATE_*, or -ENOMEM. */
int ffs_inflate_run(ffs_inflater *inflater, const uint8_t *in, uint64_t in_size, uint8_t *out,
                    uint64_t out_size);
void ffs_inflate_end(ffs_inflater *inflater);

/* Decode from the beginning of a block on. */
typedef struct {
    const uint8_t *data; /* the file's bytes from the one on in which the block begins, */
    uint64_t data_size;
    int32_t bit;  /*   at this bit of it */
    int32_t gzip; /* further members may follow the one of the block */
    const uint8_t *window;
    uint64_t window_size; /* at most 32 KiB */
    uint64_t skip;        /* output to drop */
    uint8_t *out;         /* where the output after that goes, */
    uint64_t out_size;    /*   exactly so much */
    uint64_t used, made;  /* out: bytes used of `data` and written to `out` */
} ffs_span;

/* Returns 0; -EBADMSG: the stream is damaged or has ended, -ENODATA: the input is used up, each
 * before the output was complete; or -ENOMEM. */
int ffs_inflate_span(ffs_span *span);
/* end cdef */
#endif
