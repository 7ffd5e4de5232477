/* Codecs: checksums, TFRecord frames, RecordIO chunks.
 *
 * Pure functions of bytes in memory. Python decides which bytes of a file are read; the scanners
 * here say which bytes they need next. Everything between the cdef marks is also declared to
 * Python (cffi).
 */
#ifndef FFSERVE_CODEC_H
#define FFSERVE_CODEC_H
#include <stddef.h>
#include <stdint.h>

/* cdef */
#define FFS_CRC_NONE 0
#define FFS_CRC_32 1  /* zlib's CRC-32 */
#define FFS_CRC_32C 2 /* Castagnoli */

/* ---- checksums --------------------------------------------------------------------------- */
/* Checksum of `size` bytes. seed: the checksum of the bytes before them, or 0. */
uint32_t ffs_checksum(int kind, uint32_t seed, const void *bytes, uint64_t size);
/* For each of n records: out[k] = checksum of [base + offsets[k], + lengths[k]). */
void ffs_checksums(int kind, const uint8_t *base, const uint64_t *offsets, const uint64_t *lengths,
                   int64_t n, uint32_t *out);
/* Name of the implementation: "ISA-L" or "tables". */
const char *ffs_checksum_library(void);

/* ---- TFRecord frames --------------------------------------------------------------------- */
#define FFS_FRAMES_MORE 0       /* needs a window from `at`, or from at - 4 while `owed` is set */
#define FFS_FRAMES_FULL 1       /* the tables have no room for another record */
#define FFS_FRAMES_END 2        /* the file ends after a complete frame */
#define FFS_FRAMES_BAD_HEADER 3 /* the header at `at` does not match its checksum */
#define FFS_FRAMES_CUT_HEADER 4 /* the file ends inside the header at `at` */
#define FFS_FRAMES_CUT_RECORD 5 /* the file ends inside the frame at `at` */

/* Scan of a file's frames: the current position and the records found so far. */
typedef struct {
    uint64_t file_size, at;      /* at: position of the next header */
    uint64_t *offsets, *lengths; /* of payloads, `room` each */
    uint32_t *checksums;         /* as stored, unmasked */
    int64_t count, room;
    int32_t verify; /* compare headers with their checksums */
    int32_t owed;   /* the checksum of the last record, at - 4, is still missing */
} ffs_frame_scan;

/* Continue through the file's bytes [base, base + size). Returns one of FFS_FRAMES_*. */
int ffs_frames(ffs_frame_scan *scan, const uint8_t *window, uint64_t base, uint64_t size);

/* Write the frames of n adjacent payloads, payload k = payloads[edges[k] .. edges[k + 1]). out has
 * room for all payloads and 16 bytes more for each. */
void ffs_frame_all(const uint8_t *payloads, const uint64_t *edges, int64_t n, uint8_t *out);

/* Search for the next frame after a damaged header. at: the next candidate. proven: accept a
 * candidate only if the four bytes before it are the checksum of the payload that began at
 * `summed` (`crc` is the checksum so far); the end of the file is then a candidate too. */
typedef struct {
    uint64_t file_size, at, summed;
    uint32_t crc;
    int32_t proven;
} ffs_frame_finder;

/* Continue through the file's bytes [base, base + size), which include `at` and, if proven,
 * `summed`. Returns 1 when `at` is a frame; 0 when a window that begins at `at` (proven: at
 * `summed`) is needed or the file ended. */
int ffs_frame_search(ffs_frame_finder *finder, const uint8_t *window, uint64_t base, uint64_t size);

/* ---- RecordIO chunks --------------------------------------------------------------------- */
#define FFS_CHUNKS_MORE 0  /* needs a window with 20 bytes from `wanted` on, or all that is left */
#define FFS_CHUNKS_FULL 1  /* the tables have no room for another chunk */
#define FFS_CHUNKS_END 2   /* the file ends after a complete chunk */
#define FFS_CHUNKS_FAULT 3 /* there is no valid chunk at `at`: see `fault` */
#define FFS_CHUNKS_VALID 4 /* single: there is one */

/* What is wrong with a chunk, in the order of examination. */
#define FFS_CHUNK_NO_HEADER 1  /* no magic, or the file ends inside the header */
#define FFS_CHUNK_DIALECT 2    /* not that of the chunks before */
#define FFS_CHUNK_COMPRESSOR 3 /* unknown */
#define FFS_CHUNK_CUT 4        /* the file ends inside the payload */
#define FFS_CHUNK_PAYLOAD 5    /* it does not state its decoded size */
#define FFS_CHUNK_SIZE 6       /* a payload of this size cannot decode to so many bytes */
#define FFS_CHUNK_RECORDS 7    /* none, or more than fit into the decoded bytes */
#define FFS_CHUNK_LIMIT 8      /* the file has more records up to here than allowed */

/* Scan of a file's chunk headers: the current position and the chunks found so far. */
typedef struct {
    uint64_t file_size;
    uint64_t at;            /* position of the next chunk; all before it are in the tables */
    uint64_t wanted;        /* out: with FFS_CHUNKS_MORE */
    int64_t *begins, *ends; /* extents in the file, headers included, `room` each */
    int64_t *firsts;        /* number of the first record, room + 1 of them, the first is 0 */
    int64_t *sizes;         /* decoded size that each chunk states */
    uint32_t *checksums;
    uint8_t *compressors; /* as the dialect numbers them */
    int64_t count, room;
    uint64_t records_allowed, records_per_byte; /* limit: so many, plus so many per byte of file */
    int32_t dialect;                            /* 0 py, 1 go, -1: the first chunk decides */
    int32_t single; /* examine the chunk at `at` only, and leave `at` and the tables as they are */
    int32_t fault;  /* out: with FFS_CHUNKS_FAULT */
    int32_t inside; /* private: the header at `at` was read, its payload is being examined */
    uint32_t records, checksum, compressor, size; /* out: the header read last */
    uint64_t decoded; /* out: bytes to which its payload decodes, as far as it was examined: */
    uint64_t place;   /*   up to here */
} ffs_chunk_scan;

/* Continue through the file's bytes [base, base + size). Returns one of FFS_CHUNKS_*. */
int ffs_chunks(ffs_chunk_scan *scan, const uint8_t *window, uint64_t base, uint64_t size);

/* Find at most n records (u32 length, bytes) in `size` bytes, each directly after the one before.
 * starts[], lengths[]: of the complete ones; returns their number; *end: where the last one ends.
 * The bytes hold exactly n records if n is returned and *end equals size. */
int64_t ffs_split(const uint8_t *bytes, uint64_t size, int64_t n, int64_t *starts, int64_t *lengths,
                  uint64_t *end);

/* Copy n pieces, piece k to dests[k]. */
void ffs_scatter(const uint8_t *bytes, const int64_t *starts, const int64_t *lengths, int64_t n,
                 uint8_t *const *dests);

/* ---- tables of many small files ---------------------------------------------------------- */
/* n files of one format, of which heads + stride * k has the first got[k] bytes; size[k]: of the
 * file. done[k]: whether file k was in order as far as its tables say, and `got` had all that is
 * needed to know. Others leave nothing in the tables; they are to be opened one by one, which says
 * what is wrong with them. counts[k]: its rows in the tables, which follow each other. */
typedef struct {
    const uint8_t *heads;
    int64_t stride, n, room; /* room: rows of the tables */
    const int64_t *got, *sizes;
    uint8_t *done;
    int64_t *counts;
    int64_t rows; /* in use */
} ffs_small_files;

/* FFRecord. crcs[k]: CRC-32 of count and tables, as the metadata checksum. */
void ffs_small_ffrecord(ffs_small_files *files, uint64_t *offsets, uint64_t *lengths,
                        uint32_t *checksums, uint32_t *crcs);
/* TFRecord, not compressed: whole files. */
void ffs_small_tfrecord(ffs_small_files *files, uint64_t *offsets, uint64_t *lengths,
                        uint32_t *checksums);
/* Index files (version 2, see index_file.py) of TFRecord files that are not compressed: `heads` and
 * `got` are of the index files, sizes[k] of the file itself, as are its modification time and the
 * CRC-32C of its first and last 4096 bytes. */
void ffs_small_tfrecord_index(ffs_small_files *files, const int64_t *index_sizes,
                              const int64_t *mtimes, const uint32_t *head_crcs,
                              const uint32_t *tail_crcs, uint64_t *offsets, uint64_t *lengths,
                              uint32_t *checksums);
/* RecordIO: whole files; a row is a chunk. firsts: file k's begin at its first row + k', where k' is
 * the number of files that are done before it; one more than its chunks. dialects[k]: 0 py, 1 go,
 * -1: an empty file. */
void ffs_small_recordio(ffs_small_files *files, uint64_t records_allowed, uint64_t records_per_byte,
                        int64_t *begins, int64_t *ends, int64_t *firsts, int64_t *decoded,
                        uint32_t *checksums, uint8_t *compressors, int32_t *dialects);
/* end cdef */
#endif
