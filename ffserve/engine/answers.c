/* Answers that go out from the I/O thread, the moment the last read of a request has ended well.
 *
 * Whoever asks is woken by that thread instead of by one that it had to wake first. The frame was made
 * when the request was planned; here it is a few bytes for a socket. Whatever is not plain (a read
 * failed, the socket is full, its owner holds the line) is not sent here, and the owner, who hears of
 * every batch as ever, sees by `sent` that it is still due.
 *
 * A small frame enters a Unix socket whole or not at all, so frames of two threads cannot mix; the
 * owner holds the line while he has anything larger to send, or something unsent.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "backend.h"

struct ffs_line {
    pthread_mutex_t lock;
    int fd;
    bool held;
};

ffs_line *ffs_line_new(int fd)
{
    ffs_line *line = malloc(sizeof *line);
    if (line) {
        pthread_mutex_init(&line->lock, NULL);
        line->fd = fd;
        line->held = false;
    }
    return line;
}

void ffs_line_hold(ffs_line *line, int held)
{
    pthread_mutex_lock(&line->lock);
    line->held = held != 0;
    pthread_mutex_unlock(&line->lock);
}

void ffs_line_free(ffs_line *line)
{
    free(line); /* no destroy, as for a batch */
}

void ffs_batch_answer(ffs_batch *b, ffs_answer *a)
{
    if (b)
        ((ffs_job *)b)->answer = a;
    __atomic_fetch_add(&a->left, 1, __ATOMIC_RELAXED);
}

uint32_t ffs_answer_settle(ffs_answer *a)
{
    return __atomic_sub_fetch(&a->left, 1, __ATOMIC_ACQ_REL);
}

static uint32_t send_frame(const ffs_answer *a)
{
    ffs_line *line = a->line;
    pthread_mutex_lock(&line->lock);
    ssize_t sent = line->held ? -1
                              : send(line->fd, a->frame, a->size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0 && sent != (ssize_t)a->size)
        shutdown(line->fd, SHUT_RDWR); /* half a frame: nothing that follows could be read */
    pthread_mutex_unlock(&line->lock);
    return sent >= 0;
}

void ffs_send_answer(ffs_job *job)
{
    ffs_answer *a = job->answer;
    job->answer = NULL;
    if (job->face.failed)
        __atomic_store_n(&a->failed, 1, __ATOMIC_RELAXED);
    /* Release this batch's failure to the thread that ends the last one. */
    if (ffs_answer_settle(a) == 0 && !__atomic_load_n(&a->failed, __ATOMIC_RELAXED))
        a->sent = send_frame(a);
}
