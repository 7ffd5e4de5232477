/* Samples out of the arena into a Unix stream socket: pieces are gathered and copied by sendmsg. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "sending.h"

enum { MOST_PIECES = 513 }; /* a head and 512 samples; the kernel takes 1024 */

int64_t ffs_send(const ffs_sending *s, int64_t done)
{
    struct iovec pieces[MOST_PIECES];
    struct msghdr message = { .msg_iov = pieces };
    size_t count = 0;
    if (done < s->head_size)
        pieces[count++] = (struct iovec){ (void *)(s->head + done), (size_t)(s->head_size - done) };
    int64_t skip = done < s->head_size ? 0 : done - s->head_size;
    for (int64_t k = 0; k < s->count && count < MOST_PIECES; k++) {
        int64_t size = s->lengths[k] - skip;
        if (size > 0)
            pieces[count++] = (struct iovec){ (void *)(s->arena + s->starts[k] + skip), (size_t)size };
        skip = size < 0 ? -size : 0;
    }
    message.msg_iovlen = count;
    ssize_t sent;
    do
        sent = sendmsg(s->sock, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -errno : sent;
}
