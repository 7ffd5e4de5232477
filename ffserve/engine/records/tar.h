/* Tar archives: one pass over the headers, from which samples and their fields follow.
 *
 * A pure function of bytes in memory, as codec.h has them: Python decides which bytes of a file are
 * read, but for headers far from each other, which take three times as long then. What a header
 * means is what Python's tarfile takes it for: POSIX.1-1988 (ustar), pax, and GNU's long names.
 */
#ifndef FFSERVE_TAR_H
#define FFSERVE_TAR_H
#include <stddef.h>
#include <stdint.h>

/* cdef */
#define FFS_TAR_MORE 0  /* needs a window with `wanted` bytes from `at` on, or all that is left */
#define FFS_TAR_ROWS 1  /* the table is full: take the rows and clear `held` and `names_size` */
#define FFS_TAR_LINK 2  /* the last member is a hard link to the one with the name `link` */
#define FFS_TAR_END 3   /* the archive has ended, by a block of zeros or with the file */
#define FFS_TAR_FAULT 4 /* the header at `at` is none, or is not supported: see `fault` */

typedef enum {
    FFS_TAR_BAD_CHECKSUM = 1, /* the header does not match its checksum */
    FFS_TAR_BAD_NUMBER,       /* a field of the header is not a number */
    FFS_TAR_CUT_HEADER,       /* the file ends inside a header */
    FFS_TAR_CUT_MEMBER,       /* the file ends inside the member, of which `length` is the size */
    FFS_TAR_BAD_PAX,          /* an extended header is malformed */
    FFS_TAR_LONG_PAX,         /* an extended header is too large */
    FFS_TAR_LONG_NAME,        /* a name is too long */
    FFS_TAR_GLOBAL,           /* a global header has a name or a size for all members */
    FFS_TAR_SPARSE,           /* the member is a sparse file */
    FFS_TAR_TWICE,            /* the sample has a field of this name already */
    FFS_TAR_FIELDS,           /* more fields than FFS_TAR_MOST_FIELDS */
    FFS_TAR_NO_MEMBER,        /* an extended header without a member behind it */
} ffs_tar_fault;

#define FFS_TAR_BLOCK 512
#define FFS_TAR_FIRST 0x80000000 /* in `kinds`: the member is the first of a sample */
#define FFS_TAR_BLOCK_COUNT 1024 /* members of a table, whose names are a block */
#define FFS_TAR_MOST_NAME 4096   /* bytes of a name */
#define FFS_TAR_MOST_PAX 1048576 /* bytes of an extended header */
#define FFS_TAR_MOST_FIELDS 1024
#define FFS_TAR_FIELD_ROOM 65536 /* bytes of the names of all fields */

/* Scan of an archive: the current position and the members found so far that belong to samples. */
typedef struct {
    uint64_t file_size, at; /* at: of the next header; all members before it were seen */
    uint64_t wanted;        /* out: with FFS_TAR_MORE */
    int64_t held;           /* rows of the table */
    uint64_t offsets[FFS_TAR_BLOCK_COUNT], lengths[FFS_TAR_BLOCK_COUNT]; /* 0, 0: a hard link */
    uint32_t kinds[FFS_TAR_BLOCK_COUNT]; /* number of the field, | FFS_TAR_FIRST */
    uint8_t *names; /* of the rows, each with a zero behind it; with room for the longest */
    int64_t names_size;
    int64_t samples, skipped; /* skipped: regular files without a field */
    int32_t tolerant;         /* a member that the file cuts is the last one */
    int32_t cut;              /* out: there was one */
    ffs_tar_fault fault;      /* out: with FFS_TAR_FAULT */
    uint32_t digest;          /* CRC-32C of the headers so far */
    uint64_t length;          /* out: size of the last member that was seen, 0 before the first */
    uint8_t field_names[FFS_TAR_FIELD_ROOM]; /* each with a zero behind it */
    int64_t field_size, field_count;
    uint8_t name[FFS_TAR_MOST_NAME + 1]; /* of the member in question */
    uint8_t link[FFS_TAR_MOST_NAME + 1];
    /* private */
    uint8_t key[FFS_TAR_MOST_NAME + 1]; /* of the last member */
    int64_t key_size;                   /* -1: there is none */
    uint64_t next_size;                 /* of the next member, as extended headers say */
    uint64_t ahead;                     /* headers before it were read ahead */
    int32_t has_name, has_link, has_size, extended, sparse;
    uint16_t slots[2 * FFS_TAR_MOST_FIELDS]; /* numbers of fields, + 1, by hash */
    uint32_t field_starts[FFS_TAR_MOST_FIELDS];
    int64_t last_seen[FFS_TAR_MOST_FIELDS]; /* number of the last sample with the field */
} ffs_tar_scan;

/* Continue through the file's bytes [base, base + size). Returns one of FFS_TAR_*. `key_size` is -1
 * at first, all else 0 but `names` and the size of the file. */
int ffs_tar(ffs_tar_scan *scan, const uint8_t *window, uint64_t base, uint64_t size);

/* The same from a descriptor, as long as members have `large` bytes or more: for each header the
 * window of `size` bytes is read. Where a header is not in the page cache, those behind it are read
 * ahead, many at the same time. MORE: the caller reads on, and says what cannot be read. */
int ffs_tar_headers(ffs_tar_scan *scan, int fd, uint8_t *window, uint64_t size, uint64_t large);

/* Whether a header matches its checksum. */
int ffs_tar_header_is_valid(const uint8_t *header);
/* end cdef */
#endif
