/* See fuse.h. */
#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fuse.h"

/* include/uapi/linux/fuse.h, fixed since version 7.9. */
enum { FORGET = 2, READ = 15, BATCH_FORGET = 42 };

struct request {
    uint32_t size, operation;
    uint64_t number, node;
    uint32_t user, group, thread, unused;
    uint64_t handle, offset; /* of a read, as what follows */
    uint32_t length;
};

struct answer {
    uint32_t size;
    int32_t error;
    uint64_t number;
};

static int64_t sample_of(const ffs_fuse *fuse, uint64_t node)
{
    if (node >= fuse->first_node)
        return (int64_t)(node - fuse->first_node);
    return node - 1 < fuse->named_count ? fuse->samples[node - 1] : -1;
}

static bool answered(ffs_fuse *fuse, const ffs_view *view, const struct request *request)
{
    int64_t sample = sample_of(fuse, request->node), found[5];
    if (sample < 0 || request->offset)
        return false;
    /* A sample of which there is more to read than this is kept by the caller. */
    uint64_t room = request->length < fuse->content_size ? request->length : fuse->content_size;
    if (ffs_copy_batch(view, &sample, 1, found, fuse->content, 0, room, false))
        return false;
    size_t size = (size_t)found[1];
    struct answer head = {(uint32_t)(sizeof head + size), 0, request->number};
    struct iovec parts[] = {{&head, sizeof head}, {fuse->content, size}};
    /* An error means that nobody waits any more: the program was killed. */
    if (writev(fuse->device, parts, 2) > 0) {
        fuse->hits[fuse->hit_count++] = sample;
        fuse->hit_size += (int64_t)size;
    }
    return true;
}

int64_t ffs_fuse_next(ffs_fuse *fuse, const ffs_view *view)
{
    struct request request;
    while (fuse->hit_count < fuse->hits_room) {
        ssize_t size = read(fuse->device, fuse->request, fuse->request_size);
        if (size < 0)
            return -errno;
        memset(&request, 0, sizeof request);
        memcpy(&request, fuse->request,
               (size_t)size < sizeof request ? (size_t)size : sizeof request);
        if (request.operation == FORGET || request.operation == BATCH_FORGET)
            continue;
        if (request.operation != READ || !view || !answered(fuse, view, &request))
            return size;
    }
    return 0;
}
