/* Samples through a socket, see sending.c. */
#ifndef FFSERVE_SENDING_H
#define FFSERVE_SENDING_H
#include <stdint.h>

/* cdef */
/* A run: `head`, then pieces of the arena. */
typedef struct {
    int sock;             /* a Unix stream socket */
    const uint8_t *arena;
    const uint8_t *head;
    int64_t head_size;
    const int64_t *starts, *lengths; /* of the pieces, in bytes; at most 512 are sent at once */
    int64_t count;
} ffs_sending;
/* Send from byte `done` of the run on, without blocking. Returns how many bytes were sent, or -errno
 * (-EAGAIN: the socket is full). */
int64_t ffs_send(const ffs_sending *s, int64_t done);
/* end cdef */
#endif
