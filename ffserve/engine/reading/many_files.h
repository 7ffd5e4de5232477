/* System calls on many files in one call.
 *
 * A data set may have ten thousand files. Each function goes through its files in order. Those that
 * return int64_t return how many files were done: fewer than n if one failed, and *error is its
 * errno then. Everything between the cdef marks is also declared to Python (cffi).
 */
#ifndef FFSERVE_OPENING_H
#define FFSERVE_OPENING_H
#include <stdint.h>

/* cdef */
/* The state of a file, as stat(2) reports it. */
typedef struct {
    uint64_t device, inode;
    int64_t size, mtime_ns, ctime_ns;
    uint32_t mode, uid;
} ffs_file_state;

/* paths, names: n strings, each with its NUL, back to back. */

/* stat(2), which follows links. */
int64_t ffs_stat_paths(const char *paths, int64_t n, ffs_file_state *states, int32_t *error);
/* What names in a directory are; links are not followed. */
int64_t ffs_stat_names(int directory, const char *names, int64_t n, ffs_file_state *states,
                       int32_t *error);
int64_t ffs_stat_fds(const int32_t *fds, int64_t n, ffs_file_state *states, int32_t *error);
int64_t ffs_open_paths(const char *paths, int64_t n, int flags, int32_t *fds, int32_t *error);
/* Open the files of descriptors anew, each with a description of its own. */
int64_t ffs_open_again(const int32_t *fds, int64_t n, int flags, int32_t *out, int32_t *error);
/* Flags of descriptors (F_GETFL), and the type of their file systems, the f_type of statfs(2). */
int64_t ffs_flags_and_types(const int32_t *fds, int64_t n, int32_t *flags, int64_t *types,
                            int32_t *error);
/* Switch flags of open file descriptions off. */
int64_t ffs_clear_flags(const int32_t *fds, int64_t n, int flags, int32_t *error);
/* has[k]: the file has an ACL, or may have one that cannot be read. */
void ffs_have_acls(const int32_t *fds, int64_t n, uint8_t *has);
/* Read up to `most` of the sizes[k] bytes of file k, from offsets[k] on (NULL: from its beginning),
 * to pieces + most * k; got[k]: how many there were. */
int64_t ffs_read_pieces(const int32_t *fds, const int64_t *offsets, const int64_t *sizes, int64_t n,
                        int64_t most, uint8_t *pieces, int64_t *got, int32_t *error);
/* Alignment of direct reads that the kernel states (statx, Linux 6.1); 0: none works; -1: it does
 * not say. */
void ffs_stated_alignments(const int32_t *fds, int64_t n, int64_t *alignments);
void ffs_close_fds(const int32_t *fds, int64_t n);
/* end cdef */
#endif
