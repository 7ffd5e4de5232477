/* Columns of tf.train.Example and tf.train.SequenceExample messages.
 *
 * Pure functions of bytes in memory, one call per batch of records. Decoding takes three calls:
 * `ffs_example_find` notes where each record has the features that are wanted, `ffs_example_count`
 * says how much memory a column needs, `ffs_example_fill` fills it. Records are hostile: every
 * length is checked against the message around it. Everything between the cdef marks is also
 * declared to Python (cffi).
 */
#ifndef FFSERVE_EXAMPLE_H
#define FFSERVE_EXAMPLE_H
#include <stdint.h>

/* cdef */
/* Kinds of values, as the messages number them. */
#define FFS_EXAMPLE_BYTES 1
#define FFS_EXAMPLE_FLOAT 2
#define FFS_EXAMPLE_INT64 3

/* What is wrong with a record. */
#define FFS_EXAMPLE_MALFORMED 1 /* not such a message */
#define FFS_EXAMPLE_KIND 2      /* the feature has values of another kind */
#define FFS_EXAMPLE_SEVERAL 3   /* several values where one is wanted */
#define FFS_EXAMPLE_PLACE 4     /* a list of features where a feature is wanted, or the reverse */
#define FFS_EXAMPLE_INEXACT 5   /* an integer that the wanted kind of floats cannot hold */
#define FFS_EXAMPLE_LARGE 6     /* the column has more than 2^31 - 1 values or bytes */

/* Records of a batch: record k is bytes[starts[k], + lengths[k]), inside the buffer. */
typedef struct {
    const uint8_t *bytes;
    const uint64_t *starts, *lengths;
    int64_t n;
    int32_t sequence;      /* SequenceExample, else Example */
    int32_t fault, column; /* out: FFS_EXAMPLE_* and the column, -1: none in particular */
    int64_t row;           /* out: the record at fault */
    int32_t found;         /* out: kind of the feature at fault */
} ffs_example_batch;

/* One wanted column. */
typedef struct {
    const uint8_t *name;
    uint64_t name_size;
    int32_t kind;
    int32_t depth;               /* 0: one value, 1: a list, 2: a list of features */
    int32_t wide;                /* floats as double */
    uint64_t *begins, *sizes;    /* n each, out: the Feature or FeatureList in the batch */
    uint8_t *places;             /* n, out: 0 missing, 1 feature, 2 list of features */
    uint64_t steps, items, size; /* out of count: features of lists, values, bytes of values */
    uint8_t *valid;              /* n, out: whether there is a value or list */
    int32_t *outer;              /* n + 1, out (depth 1 and 2) */
    int32_t *inner;              /* steps + 1, out (depth 2) */
    void *values;                /* items, out: int64, float or double */
    int32_t *edges;              /* items + 1, out (bytes) */
    uint8_t *data;               /* size, out (bytes) */
} ffs_example_column;

/* Each returns 0, or -1 and the fault in the batch. With depth 0 items equals n. */
int ffs_example_find(ffs_example_batch *batch, ffs_example_column *columns, int32_t count);
int ffs_example_count(ffs_example_batch *batch, ffs_example_column *column);
int ffs_example_fill(ffs_example_batch *batch, ffs_example_column *column);

/* A feature that occurs in a batch; the name is bytes[name_at, + name_size). */
typedef struct {
    uint64_t name_at, name_size;
    int64_t rows[4];  /* the first record with values of this kind, -1: none */
    int64_t empty[4]; /* the first record with no value but this kind, -1: none */
    int32_t several;  /* whether a record has not exactly one value */
    int32_t listed;   /* whether it is a list of features */
    int32_t binary;   /* whether a byte string is not UTF-8 */
} ffs_example_feature;

/* Collect the features of a batch. Returns their number; -1 and the fault in the batch; -2: there
 * are more than `room`. slots: int32[slot_count], a power of two of at least twice the room. */
int32_t ffs_example_infer(ffs_example_batch *batch, ffs_example_feature *features, int32_t room,
                          int32_t *slots, uint32_t slot_count);

/* One column to encode, in the order in which the features are written. Offsets count from 0. */
typedef struct {
    const uint8_t *name;
    uint64_t name_size;
    int32_t kind, depth;
    const uint8_t *valid; /* n; NULL: all */
    const int64_t *outer; /* n + 1 (depth 1 and 2) */
    const int64_t *inner; /* of features (depth 2) */
    const void *values;   /* int64 or float */
    const int64_t *edges; /* of byte strings */
} ffs_example_source;

/* sizes[k] = bytes of record k. */
void ffs_example_measure(const ffs_example_source *sources, int32_t count, int64_t n, int sequence,
                         int64_t *sizes);
/* Write the n records back to back, as measured. */
void ffs_example_encode(const ffs_example_source *sources, int32_t count, int64_t n, int sequence,
                        uint8_t *out);
/* end cdef */
#endif
