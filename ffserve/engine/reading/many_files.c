/* See many_files.h. */
#define _GNU_SOURCE /* O_PATH */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "io.h"
#include "many_files.h"

#define ACL "system.posix_acl_access"

static int64_t ns(struct timespec time)
{
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void take(ffs_file_state *state, const struct stat *s)
{
    *state = (ffs_file_state){
        .device = s->st_dev,
        .inode = s->st_ino,
        .size = s->st_size,
        .mtime_ns = ns(s->st_mtim),
        .ctime_ns = ns(s->st_ctim),
        .mode = s->st_mode,
        .uid = s->st_uid,
    };
}

static int64_t stat_names(int directory, const char *names, int64_t n, int flags,
                          ffs_file_state *states, int32_t *error)
{
    struct stat s;
    for (int64_t k = 0; k < n; k++, names += strlen(names) + 1) {
        if (fstatat(directory, names, &s, flags)) {
            *error = errno;
            return k;
        }
        take(states + k, &s);
    }
    return n;
}

int64_t ffs_stat_paths(const char *paths, int64_t n, ffs_file_state *states, int32_t *error)
{
    return stat_names(AT_FDCWD, paths, n, 0, states, error);
}

int64_t ffs_stat_names(int directory, const char *names, int64_t n, ffs_file_state *states,
                       int32_t *error)
{
    return stat_names(directory, names, n, AT_SYMLINK_NOFOLLOW, states, error);
}

int64_t ffs_stat_fds(const int32_t *fds, int64_t n, ffs_file_state *states, int32_t *error)
{
    struct stat s;
    for (int64_t k = 0; k < n; k++) {
        if (fstat(fds[k], &s)) {
            *error = errno;
            return k;
        }
        take(states + k, &s);
    }
    return n;
}

int64_t ffs_open_paths(const char *paths, int64_t n, int flags, int32_t *fds, int32_t *error)
{
    for (int64_t k = 0; k < n; k++, paths += strlen(paths) + 1) {
        fds[k] = open(paths, flags);
        if (fds[k] < 0) {
            *error = errno;
            return k;
        }
    }
    return n;
}

int64_t ffs_open_again(const int32_t *fds, int64_t n, int flags, int32_t *out, int32_t *error)
{
    char path[32];
    for (int64_t k = 0; k < n; k++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fds[k]);
        out[k] = open(path, flags);
        if (out[k] < 0) {
            *error = errno;
            return k;
        }
    }
    return n;
}

int64_t ffs_flags_and_types(const int32_t *fds, int64_t n, int32_t *flags, int64_t *types,
                            int32_t *error)
{
    struct statfs fs;
    for (int64_t k = 0; k < n; k++) {
        flags[k] = fcntl(fds[k], F_GETFL);
        if (flags[k] < 0 || fstatfs(fds[k], &fs)) {
            *error = errno;
            return k;
        }
        types[k] = (int64_t)fs.f_type;
    }
    return n;
}

int64_t ffs_clear_flags(const int32_t *fds, int64_t n, int flags, int32_t *error)
{
    for (int64_t k = 0; k < n; k++) {
        int found = fcntl(fds[k], F_GETFL);
        if (found < 0 || (found & flags && fcntl(fds[k], F_SETFL, found & ~flags))) {
            *error = errno;
            return k;
        }
    }
    return n;
}

void ffs_have_acls(const int32_t *fds, int64_t n, uint8_t *has)
{
    for (int64_t k = 0; k < n; k++)
        has[k] = fgetxattr(fds[k], ACL, NULL, 0) >= 0 || (errno != ENODATA && errno != EOPNOTSUPP);
}

int64_t ffs_read_pieces(const int32_t *fds, const int64_t *offsets, const int64_t *sizes, int64_t n,
                        int64_t most, uint8_t *pieces, int64_t *got, int32_t *error)
{
    for (int64_t k = 0; k < n; k++) {
        int64_t begin = offsets ? offsets[k] : 0, left = sizes[k] - begin;
        int64_t wanted = left < most ? left : most;
        for (got[k] = 0; got[k] < wanted;) {
            uint8_t *to = pieces + most * k + got[k];
            ssize_t more = pread(fds[k], to, (size_t)(wanted - got[k]), begin + got[k]);
            if (more < 0) {
                *error = errno;
                return k;
            }
            if (!more)
                break;
            got[k] += more;
        }
    }
    return n;
}

void ffs_stated_alignments(const int32_t *fds, int64_t n, int64_t *alignments)
{
    for (int64_t k = 0; k < n; k++) {
        uint32_t memory, offset;
        int rc = ffs_dio_alignment(fds[k], &memory, &offset);
        alignments[k] = rc ? -1 : !offset ? 0 : (int64_t)(memory > offset ? memory : offset);
    }
}

void ffs_close_fds(const int32_t *fds, int64_t n)
{
    for (int64_t k = 0; k < n; k++)
        close(fds[k]);
}
