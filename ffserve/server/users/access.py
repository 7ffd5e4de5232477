"""Access: which descriptors the daemon takes, and which files everybody may read.

A client proves that it may read a file by passing a descriptor that it opened itself: the kernel
has then decided, with all groups, ACLs and namespaces of the client. The daemon opens no path of a
client. It takes only descriptors that can harm nobody but their sender: of a regular file that was
opened for reading and not for writing, on a file system that no ordinary user can make hang. The
daemon learns identity and size of a file from the descriptor, never from a message.

A file system can hang in any call on its files, fstat(2) and close(2) included. So nothing here
runs in the thread of the event loop.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ffserve.config import USER_FILE_SYSTEMS, CommonName
from ffserve.disk.files import os_error
from ffserve.dtypes import Bools, Int32s, Int64s
from ffserve.engine.many_files import (
    KIND_BITS,
    States,
    flags_and_types,
    have_acls,
    stat_fds,
    stat_names,
)
from ffserve.errors import AccessDenied
from ffserve.server.users.peers import Owner, Peer
from ffserve.system.capabilities import (
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    has_capability,
)

log = logging.getLogger("ffserve")

_PATH_MAX = 4096

FILE_SYSTEMS = {
    "ext4": 0xEF53,  # and ext2, ext3
    "xfs": 0x58465342,
    "btrfs": 0x9123683E,
    "zfs": 0x2FC12FC1,
    "f2fs": 0xF2F52010,
    "bcachefs": 0xCA451A4E,
    "jfs": 0x3153464A,
    "nilfs": 0x3434,
    "ntfs3": 0x7366746E,
    "exfat": 0x2011BAB0,
    "vfat": 0x4D44,
    "erofs": 0xE0F5E1E2,
    "squashfs": 0x73717368,
    "iso9660": 0x9660,
    "udf": 0x15013346,
    "tmpfs": 0x01021994,
    "ramfs": 0x858458F6,
    "hugetlbfs": 0x958458F6,
    "nfs": 0x6969,
    "cifs": 0xFF534D42,
    "smb2": 0xFE534D42,
    "ceph": 0x00C36400,
    "lustre": 0x0BD00BD0,
    "gpfs": 0x47504653,
    "beegfs": 0x19830326,
    "orangefs": 0x20030528,
    "panfs": 0xAAD7AAEA,
    "vxfs": 0xA501FCF5,
    "ocfs2": 0x7461636F,
    "gfs2": 0x01161970,
    "afs": 0x5346414F,
    "9p": 0x01021997,
}
"""The daemon serves files on disks, and on network file systems, which only an administrator can
mount; by the f_type of statfs(2), see linux/magic.h. It does not serve file systems that ordinary
users can mount and make hang (FUSE; in a user namespace an overlay over FUSE), unless the
administrator allows them, nor those whose files are no data (proc, sysfs)."""

DECIDED_ELSEWHERE = ("afs", "cifs", "smb2")
"""The servers of these file systems decide who may read, whatever the permission bits say. So the
bits never make their files common."""


@dataclass(slots=True)
class CheckedFiles:
    """Open files of a peer, by position: its names for them, descriptors, states, and the types of
    their file systems."""

    paths: list[str]
    fds: Int32s
    states: States
    types: Int64s


DomainsOf: TypeAlias = "Callable[[CheckedFiles], list[Owner | None]]"
"""Returns the owners of the domains of open files; None: the common domain."""


class Rules:
    """The rules of the administrator: which files are served, and which are common.

    Args:
        roots: directories; the files below them are served.
        file_systems: f_types of file systems that are served as well.
        common: which files are common; see `config.CommonName`.
    """

    def __init__(
        self, roots: Sequence[str], file_systems: Sequence[int], common: CommonName
    ) -> None:
        self._common = common
        self.roots = tuple(os.path.realpath(root) for root in roots)
        self._served = np.array([*FILE_SYSTEMS.values(), *file_systems], np.int64)

    def check(self, fds: Int32s, paths: list[str], peer: Peer) -> CheckedFiles:
        """Check descriptors that a peer passed.

        Args: paths: the peer's names for the files, for errors.
        Raises: AccessDenied: a descriptor is not taken. ReadError: the file system fails.
        """
        flags, types, error = flags_and_types(fds)
        for k in np.flatnonzero(flags & (os.O_PATH | os.O_ACCMODE) != os.O_RDONLY)[:1].tolist():
            how = "with O_PATH" if flags[k] & os.O_PATH else "for writing"
            raise AccessDenied(
                f"the client opened the file {how}",
                path=paths[k],
                hint="a client passes descriptors that it opened with O_RDONLY",
            )
        if error is not None:
            raise os_error(error, paths[len(types)])
        if not peer.is_self:
            # This comes before any other call on the files: their file system may never answer.
            for k in np.flatnonzero(~np.isin(types, self._served)).tolist():
                self._check_mount(int(fds[k]), int(types[k]), paths[k])
        states, error = stat_fds(fds)
        for k in np.flatnonzero(states["mode"] & KIND_BITS != stat.S_IFREG)[:1].tolist():
            raise AccessDenied("the daemon serves regular files only", path=paths[k])
        if error is not None:
            raise os_error(error, paths[len(states)])
        if self.roots != ("/",):
            for fd, path in zip(fds.tolist(), paths, strict=True):
                self._check_roots(os.readlink(f"/proc/self/fd/{fd}"), path)
        return CheckedFiles(paths, fds, states, types)

    @contextlib.contextmanager
    def domains(self, peer: Peer) -> Iterator[DomainsOf]:
        """Return a function that returns the owners of the domains of a peer's files. It looks up
        the names that the peer gives, and opens no other file that it finds by them."""
        with contextlib.ExitStack() as held:
            if self._common == "user":
                are_common = _own_user_may_read
            elif peer.is_self and peer.uid != 0:
                are_common = _none_is
            else:
                are_common = held.enter_context(_Directories()).everybody_may_read

            def domains_of(files: CheckedFiles) -> list[Owner | None]:
                common = are_common(files)
                if peer.namespace < 0 and not common.all():
                    _say_unknown()
                return [None if each else peer.owner for each in common.tolist()]

            yield domains_of

    def _check_mount(self, fd: int, kind: int, asked: str) -> None:
        """Refuse a file system that is not served. An overlay is served if it is among the daemon's
        own mounts, which only an administrator can make."""
        if kind == USER_FILE_SYSTEMS["overlay"] and os.fstat(fd).st_dev in _own_overlays():
            return
        known = {**FILE_SYSTEMS, **USER_FILE_SYSTEMS}
        name = next((name for name, number in known.items() if number == kind), f"{kind:#x}")
        raise AccessDenied(
            f"the daemon does not serve files on this file system ({name}): a user could make its "
            "reads hang",
            path=asked,
            hint=f"if only administrators can mount it, add --file-system {name}",
        )

    def _check_roots(self, path: str, asked: str) -> None:
        if not any(path.startswith(root.rstrip("/") + "/") for root in self.roots):
            raise AccessDenied(
                "the daemon does not serve this file: it is outside its roots",
                path=asked,
                hint=f"its roots are {' '.join(self.roots)}; add one with --root",
            )


def check_memory(fds: list[int]) -> None:
    """Check that a client passed one descriptor, of a memory file. Reads of other files could hang.

    Raises: AccessDenied.
    """
    try:
        (fd,) = fds
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        readable = fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_PATH | os.O_WRONLY) == 0
    except (OSError, ValueError):
        readable = False
    if not readable:
        raise AccessDenied(
            "the client did not pass a memory file for its prepared samples",
            hint="a client passes one descriptor, made by memfd_create(2)",
        )


@functools.cache
def _say_unknown() -> None:
    log.warning(
        "the daemon cannot tell the containers of its clients apart, since it has its own PID or "
        "user namespace: it keeps the samples of files that not everybody may read, or that it "
        "does not find by their names, apart for each process of a job"
    )


def may_read_everything() -> bool:
    """Whether permission bits do not bind this process (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH)."""
    return has_capability(CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH)


def _none_is(files: CheckedFiles) -> Bools:
    return np.zeros(len(files.fds), np.bool_)


def _is_name(path: str) -> bool:
    """Whether the kernel accepts a path of this length. To resolve a longer one would take a long
    time."""
    return len(path) * 4 < _PATH_MAX or len(os.fsencode(path)) < _PATH_MAX


def _own_user_may_read(files: CheckedFiles) -> Bools:
    """Return which files the daemon's own user can open by their names."""
    rows = zip(files.paths, *_numbers(files.states), strict=True)
    found = [_is_name(path) and _own_user_opens(path, *which) for path, *which in rows]
    return np.array(found, np.bool_)


def _numbers(states: States) -> tuple[list[int], list[int]]:
    """Return devices and inodes."""
    return states["device"].tolist(), states["inode"].tolist()


def _own_user_opens(path: str, device: int, inode: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        # The file is looked at before it is opened: to open a pipe or a device can have effects.
        own = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            found = os.fstat(own)
            if (found.st_dev, found.st_ino) == (device, inode):
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
                os.close(os.open(f"/proc/self/fd/{own}", flags))
                return True
        finally:
            os.close(own)
    return False


def everybody_may_read(paths: list[str], fds: Int32s) -> Bools:
    """Return which open files all users may open by these paths.

    A file whose path leads to another file by now is not one of them.

    Raises: OSError: the state of a file cannot be read.
    """
    _, types, error = flags_and_types(fds)
    states, other = stat_fds(fds)
    if error or other:
        raise error or other or OSError
    with _Directories() as directories:
        return directories.everybody_may_read(CheckedFiles(paths, fds, states, types))


class _Directories:
    """Finds out which files everybody may read, by the permissions of files and directories.

    It follows a path from directory to directory by descriptors, so that nobody can exchange a
    directory that was checked. It keeps the last directory open: files that are opened together
    mostly lie in one directory.
    """

    def __init__(self) -> None:
        self._last: tuple[str, int | None] = "", None

    def __enter__(self) -> _Directories:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def everybody_may_read(self, files: CheckedFiles) -> Bools:
        """Return which of the files all users may open by their paths."""
        may: Bools = (files.states["mode"] & 0o444 == 0o444) & _bits_decide(files.types)
        may[may] = ~have_acls(files.fds[may])
        by_directory: defaultdict[str, list[int]] = defaultdict(list)
        for k in np.flatnonzero(may).tolist():
            directory, name = os.path.split(files.paths[k])
            if name and _is_name(files.paths[k]):
                by_directory[directory].append(k)
            else:
                may[k] = False
        for directory, positions in by_directory.items():
            paths = [files.paths[k] for k in positions]
            may[positions] = self._are_public(directory, paths, files.states[positions])
        return may

    def _are_public(self, directory: str, paths: list[str], states: States) -> Bools:
        """Return which files everybody finds by their names, all in one directory."""
        public, names = np.zeros(len(paths), np.bool_), [os.path.basename(path) for path in paths]
        others: list[int] = []
        with contextlib.suppress(OSError, ValueError):
            fd, done = self._open(_resolved(directory)), 0
            while fd is not None and done < len(paths):
                found, _ = stat_names(fd, names[done:])
                mine = states[done : done + len(found)]
                # While a file is open, its inode number belongs to no other file.
                same = (found["device"] == mine["device"]) & (found["inode"] == mine["inode"])
                public[done : done + len(found)] = same
                links = np.flatnonzero(found["mode"] & KIND_BITS == stat.S_IFLNK)
                others += (done + links).tolist()
                done += len(found) + 1
            if fd is None:
                others = list(range(len(paths)))
        devices, inodes = _numbers(states)
        for k in others:
            public[k] = self._is_public(paths[k], devices[k], inodes[k])
        return public

    def _is_public(self, path: str, device: int, inode: int) -> bool:
        """Whether everybody finds a file by a name that is a link."""
        with contextlib.suppress(OSError, ValueError):
            if os.path.islink(path):
                found = self._look_up(*os.path.split(_resolved(path)))
                return found is not None and (found.st_dev, found.st_ino) == (device, inode)
        return False

    def _look_up(self, directory: str, name: str) -> os.stat_result | None:
        """Return the status of a name in a directory; None if not everybody may search it."""
        fd = self._open(directory)
        return None if fd is None else os.stat(name, dir_fd=fd, follow_symlinks=False)

    def _open(self, directory: str) -> int | None:
        """Return a descriptor of a directory; None if not everybody may search it."""
        if directory != self._last[0]:
            self._leave()
            self._last = directory, _open_public(directory)
        return self._last[1]

    def _leave(self) -> None:
        fd, self._last = self._last[1], ("", None)
        if fd is not None:
            os.close(fd)


def _resolved(path: str) -> str:
    """Return a path without symbolic links. The kernel follows at most 40 of them;
    `os.path.realpath` would follow as many as a user has made."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _bits_decide(types: Int64s) -> Bools:
    """Return for which types of file systems permission bits decide who may read."""
    elsewhere = [FILE_SYSTEMS[name] for name in DECIDED_ELSEWHERE]
    found: Bools = np.isin(types, elsewhere, invert=True)
    return found


def _open_public(directory: str) -> int | None:
    """Open a directory if everybody may search it and all above it; else return None."""
    fd = os.open("/", os.O_PATH | os.O_CLOEXEC)
    for name in directory.split("/"):
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        inner = -1
        try:
            if not _everybody_may_search(fd):
                return None
            inner = os.open(name or ".", flags, dir_fd=fd)
        finally:
            os.close(fd)
            fd = inner
    if _everybody_may_search(fd):
        return fd
    os.close(fd)
    return None


def _everybody_may_search(directory: int) -> bool:
    # Extended attributes cannot be read from a descriptor with O_PATH.
    searchable = os.fstat(directory).st_mode & 0o111 == 0o111
    return searchable and not _has_acl(f"/proc/self/fd/{directory}")


def _has_acl(file: str) -> bool:
    """Whether a file has an ACL, or may have one that cannot be read."""
    try:
        os.getxattr(file, "system.posix_acl_access")
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.EOPNOTSUPP)
    return True


def _own_overlays() -> set[int]:
    """Return the devices of the overlays that are mounted in the daemon's mount namespace. The
    files of an overlay can have the device of the file system below it instead."""
    devices = set()
    with open("/proc/self/mountinfo", "rb") as file:
        for mount in file:
            about, _, source = mount.partition(b" - ")
            if source.startswith(b"overlay "):
                major, minor = about.split(maxsplit=3)[2].split(b":")
                devices.add(os.makedev(int(major), int(minor)))
    return devices
