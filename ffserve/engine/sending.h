/* Samples through a socket, see sending.c. */
#ifndef FFSERVE_SENDING_H
#define FFSERVE_SENDING_H
#include <stdint.h>

/* cdef */
/* ---- samples through a socket (sending.c) -------------------------------------------------
 * What is to be sent: `head`, then pieces of the arena. */
typedef struct {
    int sock;             /* a Unix stream socket that does not block */
    int memory;           /* the arena's file */
    const uint8_t *arena; /* its mapping */
    const uint8_t *head;
    int64_t head_size;
    const int64_t *starts, *lengths; /* of the pieces, in bytes */
    int64_t count;
    int64_t refer_from;   /* pieces of so many bytes and more go by reference; 0: none */
} ffs_sending;
/* Send, from the byte `done` of it all on, until everything went or the socket is full. Returns how many
 * bytes went, or -errno when none did (-EAGAIN: full). */
int64_t ffs_send(const ffs_sending *s, int64_t done);
/* Bytes that were sent and that the other side has not read, or more; 0: it has read all, or is gone. */
int64_t ffs_unread(int sock);
/* end cdef */
#endif
