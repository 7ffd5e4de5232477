/* Samples out of the arena into a Unix stream socket: one call for as much as the socket takes.
 *
 * Small pieces are gathered and copied by sendmsg. Large ones go by reference, with sendfile: the kernel
 * puts the arena's own pages into the socket, so they are copied once, by whoever receives them, and
 * no fresh pages are taken for them. What lies there by reference must not be written to until it was
 * read; whoever calls sees to that (server/references.py).
 *
 * Where the kernel cannot do that (a sandbox of its own) everything is copied. Linux 6.5.0 to 6.5.7
 * blocks in sendfile although the socket does not, when that is full; so never more is sent at once
 * than there is room for.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sockios.h>
#include <stdbool.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "sending.h"

enum {
    MOST_PIECES = 512,
    /* What a page in a socket is charged beyond its size, at most: a buffer's head each 16 pages. */
    PAGE = 4096,
    PAGE_EXTRA = 256,
};

int64_t ffs_unread(int sock)
{
    int size = 0;
    return ioctl(sock, SIOCOUTQ, &size) ? -errno : size;
}

/* Bytes that can go by reference without waiting; 0: few. Who is told that a socket is writable finds
 * at most a quarter of it in use. */
static int64_t room_of(int sock)
{
    int limit = 0;
    socklen_t size = sizeof limit;
    int64_t unread = ffs_unread(sock);
    if (unread < 0 || getsockopt(sock, SOL_SOCKET, SO_SNDBUF, &limit, &size))
        return 0;
    int64_t room = (limit - unread) / (PAGE + PAGE_EXTRA) * PAGE;
    return room < limit / 4 ? 0 : room;
}

static ssize_t send_copies(const ffs_sending *s, const struct iovec *pieces, size_t count)
{
    struct msghdr message = { .msg_iov = (struct iovec *)pieces, .msg_iovlen = count };
    return sendmsg(s->sock, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

int64_t ffs_send(const ffs_sending *s, int64_t done)
{
    struct iovec pieces[MOST_PIECES];
    int64_t sent = 0, k = 0, inside = 0, refer_from = s->refer_from;
    int64_t head = done < s->head_size ? s->head_size - done : 0;
    done -= s->head_size - head;
    while (k < s->count && done >= s->lengths[k])
        done -= s->lengths[k++];
    inside = done;
    while (head || k < s->count) {
        ssize_t went;
        int64_t asked = 0;
        if (!head && refer_from > 0 && s->lengths[k] >= refer_from) {
            int64_t left = s->lengths[k] - inside, room = room_of(s->sock);
            off_t from = s->starts[k] + inside;
            if (!room)
                return sent ? sent : -EAGAIN;
            asked = left < room ? left : room;
            went = sendfile(s->sock, s->memory, &from, (size_t)asked);
            if (went == 0 || (went < 0 && errno != EAGAIN && errno != EINTR && errno != EPIPE
                              && errno != ECONNRESET)) {
                refer_from = 0;
                continue;
            }
        } else {
            size_t count = 0;
            if (head) {
                pieces[count++] = (struct iovec){ (void *)(s->head + s->head_size - head),
                                                  (size_t)head };
                asked += head;
            }
            for (int64_t j = k, at = inside; j < s->count && count < MOST_PIECES; j++, at = 0) {
                if (refer_from > 0 && s->lengths[j] >= refer_from)
                    break;
                if (s->lengths[j] == at)
                    continue;
                pieces[count++] = (struct iovec){ (void *)(s->arena + s->starts[j] + at),
                                                  (size_t)(s->lengths[j] - at) };
                asked += s->lengths[j] - at;
            }
            if (count == 0)
                return sent; /* nothing but empty samples was left */
            went = send_copies(s, pieces, count);
        }
        if (went < 0 && errno == EINTR)
            continue;
        if (went < 0)
            return sent ? sent : -errno;
        sent += went;
        int64_t of_head = went < head ? went : head;
        head -= of_head;
        inside += went - of_head;
        while (k < s->count && inside >= s->lengths[k])
            inside -= s->lengths[k++];
        if (went < asked)
            return sent;
    }
    return sent;
}
