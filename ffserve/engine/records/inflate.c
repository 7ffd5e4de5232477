/* Deflate streams: see inflate.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "inflate.h"

#ifdef FFS_HAVE_ZLIB
#include <zlib.h>
#ifdef FFS_HAVE_ISAL
#include <isa-l/igzip_lib.h>
#endif

#define WINDOW 32768
#define TRAILER 8 /* of a gzip member: CRC-32 and size */
/* Marks are this far apart in the output; one that follows an empty block, as a flush leaves it, may
 * be nearer, so that the points at which a writer flushed on purpose are all found. */
#define APART 16384
#define FLUSHES_APART 256
#define RAW (-15)
#define GZIP 31
#define AT_ONCE (1u << 30) /* zlib counts in 32 bits */

static unsigned limited(uint64_t size)
{
    return size < AT_ONCE ? (unsigned)size : AT_ONCE;
}

/* ---- the pass ---------------------------------------------------------------------------- */

typedef struct {
    z_stream z;
    int begun;         /* inside a stream */
    uint64_t mark;     /* output before the last mark */
    uint64_t boundary; /* output before the last beginning of a block */
    int any;           /* there is a last mark, and such a beginning */
} pass;

int ffs_inflate_begin(ffs_inflater *f, int32_t gzip)
{
    pass *p = calloc(1, sizeof *p);

    if (!p)
        return -ENOMEM;
    if (inflateInit2(&p->z, gzip ? GZIP : 15) != Z_OK) {
        free(p);
        return -ENOMEM;
    }
    f->stream = p;
    f->gzip = gzip;
    p->begun = 1;
    return 0;
}

void ffs_inflate_end(ffs_inflater *f)
{
    pass *p = f->stream;

    if (!p)
        return;
    inflateEnd(&p->z);
    free(p);
    f->stream = NULL;
}

/* Note that a block begins here. */
static void mark(ffs_inflater *f, pass *p)
{
    int flushed = p->any && p->boundary == f->made;
    uint64_t since = f->made - p->mark;
    uint64_t bits = (uint64_t)p->z.data_type & 7;

    p->boundary = f->made;
    if (p->any && since && since < (flushed ? FLUSHES_APART : APART))
        return;
    p->any = 1;
    p->mark = f->made;
    if (!f->count || (f->marks[f->count - 1].out != f->made && f->count < f->room))
        f->count++;
    f->marks[f->count - 1] = (ffs_block_mark){8 * f->used - bits, f->made};
}

int ffs_inflate_run(ffs_inflater *f, const uint8_t *in, uint64_t in_size, uint8_t *out,
                    uint64_t out_size)
{
    pass *p = f->stream;
    z_stream *z = &p->z;
    const uint8_t *in_end = in + in_size, *out_end = out + out_size;

    f->count = 0;
    for (;;) {
        if (!p->begun) {
            for (; f->gzip && in < in_end && !*in; in++) /* zero padding, as on tapes */
                f->used++;
            if (in == in_end)
                return FFS_INFLATE_MORE;
            if (!f->gzip)
                return FFS_INFLATE_REST;
            inflateReset(z);
            p->begun = 1;
            f->whole = 0;
        }
        unsigned in_had = limited((uint64_t)(in_end - in));
        unsigned out_had = limited((uint64_t)(out_end - out));
        z->next_in = (Bytef *)in;
        z->avail_in = in_had;
        z->next_out = out;
        z->avail_out = out_had;
        int rc = inflate(z, Z_BLOCK); /* stops at the beginning of each block */
        in += in_had - z->avail_in;
        f->used += in_had - z->avail_in;
        out += out_had - z->avail_out;
        f->made += out_had - z->avail_out;
        if (rc == Z_STREAM_END) {
            p->begun = 0;
            f->whole = 1;
        } else if (rc == Z_BUF_ERROR) {
            return FFS_INFLATE_MORE;
        } else if (rc == Z_MEM_ERROR) {
            return -ENOMEM;
        } else if (rc != Z_OK) {
            f->message = z->msg ? z->msg : "it needs a preset dictionary";
            return FFS_INFLATE_BAD;
        } else if ((z->data_type & 128) && !(z->data_type & 64)) {
            mark(f, p); /* not behind the last block */
        }
    }
}

/* ---- from a block's beginning on ---------------------------------------------------------- */

/* Begin the next member. */
static int next_member(ffs_span *s, z_stream *z, int *raw)
{
    if (!s->gzip)
        return -EBADMSG;
    if (*raw) { /* zlib reads the trailers of later members itself */
        if (s->data_size - s->used < TRAILER)
            return -ENODATA;
        s->used += TRAILER;
        *raw = 0;
    }
    while (s->used < s->data_size && !s->data[s->used])
        s->used++;
    return inflateReset2(z, GZIP) == Z_OK ? 0 : -ENOMEM;
}

static int decode(ffs_span *s, z_stream *z)
{
    uint8_t dropped[WINDOW];
    uint64_t skip = s->skip;
    int raw = 1, ended = 0, rc;

    while (skip || s->made < s->out_size) {
        if (ended && (rc = next_member(s, z, &raw)))
            return rc;
        uint64_t room = s->out_size - s->made;
        if (skip)
            room = skip < WINDOW ? skip : WINDOW;
        unsigned in_had = limited(s->data_size - s->used), out_had = limited(room);
        z->next_in = (Bytef *)s->data + s->used;
        z->avail_in = in_had;
        z->next_out = skip ? dropped : s->out + s->made;
        z->avail_out = out_had;
        rc = inflate(z, Z_NO_FLUSH);
        s->used += in_had - z->avail_in;
        if (skip)
            skip -= out_had - z->avail_out;
        else
            s->made += out_had - z->avail_out;
        ended = rc == Z_STREAM_END;
        if (rc == Z_BUF_ERROR)
            return s->used == s->data_size ? -ENODATA : -EBADMSG;
        if (rc == Z_MEM_ERROR)
            return -ENOMEM;
        if (rc != Z_OK && !ended)
            return -EBADMSG;
    }
    return 0;
}

static int by_zlib(ffs_span *s)
{
    z_stream z = {0};
    int rc;

    if (inflateInit2(&z, RAW) != Z_OK)
        return -ENOMEM;
    s->made = 0;
    s->used = s->bit ? 1 : 0;
    if (s->bit)
        inflatePrime(&z, 8 - s->bit, s->data[0] >> s->bit);
    if (s->window_size && inflateSetDictionary(&z, s->window, (unsigned)s->window_size) != Z_OK)
        rc = -ENOMEM;
    else
        rc = decode(s, &z);
    inflateEnd(&z);
    return rc;
}

#ifdef FFS_HAVE_ISAL
/* Twice as fast as zlib. It decodes up to the end of the stream or member only; zlib repeats what
 * goes on behind it, and whatever fails. Returns whether the output is complete. */
static int by_isal(ffs_span *s)
{
    uint8_t dropped[WINDOW];
    uint64_t skip = s->skip;
    struct inflate_state *z = malloc(sizeof *z);

    if (!z)
        return 0;
    isal_inflate_init(z);
    s->made = 0;
    s->used = s->bit ? 1 : 0;
    if (s->bit) {
        z->read_in = s->data[0] >> s->bit;
        z->read_in_length = 8 - s->bit;
    }
    if (s->window_size)
        isal_inflate_set_dict(z, (uint8_t *)s->window, (uint32_t)s->window_size);
    while (skip || s->made < s->out_size) {
        uint64_t room = s->out_size - s->made;
        if (skip)
            room = skip < WINDOW ? skip : WINDOW;
        unsigned in_had = limited(s->data_size - s->used), out_had = limited(room);
        z->next_in = (uint8_t *)s->data + s->used;
        z->avail_in = in_had;
        z->next_out = skip ? dropped : s->out + s->made;
        z->avail_out = out_had;
        int rc = isal_inflate(z);
        s->used += in_had - z->avail_in;
        if (rc < 0 || out_had == z->avail_out)
            break;
        if (skip)
            skip -= out_had - z->avail_out;
        else
            s->made += out_had - z->avail_out;
    }
    free(z);
    return !skip && s->made == s->out_size;
}

const char *ffs_inflate_library(void)
{
    return "ISA-L";
}

#else

static int by_isal(ffs_span *s)
{
    (void)s;
    return 0;
}

const char *ffs_inflate_library(void)
{
    return "zlib";
}

#endif

int ffs_inflate_span(ffs_span *s)
{
    s->used = s->made = 0;
    if (!s->data_size)
        return s->skip || s->out_size ? -ENODATA : 0;
    return by_isal(s) ? 0 : by_zlib(s);
}

#else /* no zlib: see ffs_inflate_library */

const char *ffs_inflate_library(void)
{
    return "";
}

int ffs_inflate_begin(ffs_inflater *f, int32_t gzip)
{
    (void)f, (void)gzip;
    return -ENOSYS;
}

int ffs_inflate_run(ffs_inflater *f, const uint8_t *in, uint64_t in_size, uint8_t *out,
                    uint64_t out_size)
{
    (void)f, (void)in, (void)in_size, (void)out, (void)out_size;
    return -ENOSYS;
}

void ffs_inflate_end(ffs_inflater *f)
{
    (void)f;
}

int ffs_inflate_span(ffs_span *s)
{
    (void)s;
    return -ENOSYS;
}

#endif
