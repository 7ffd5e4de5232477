"""Access: who is at the other end of a connection, and which descriptors the daemon takes.

A client proves that it may read a file by passing a descriptor that it opened itself: the kernel
has decided then, with all groups, ACLs and namespaces of the client. The daemon opens no path of a
client. It takes a descriptor only if nothing but its sender can suffer from it: a regular file,
opened for reading and not for writing, on a file system that no ordinary user can make hang. What
the daemon knows of the file (identity, size) comes from the descriptor, never from a message.

A file system can hang in any call on its files, fstat(2) and close(2) included. So nothing here
runs in the thread of the event loop.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import logging
import os
import select
import socket
import stat
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from ffserve.config import USER_FILE_SYSTEMS, CommonName
from ffserve.disk.files import os_error
from ffserve.dtypes import Bools, Int32s, Int64s
from ffserve.engine.opening import (
    KIND_BITS,
    States,
    flags_and_types,
    have_acls,
    stat_fds,
    stat_names,
)
from ffserve.errors import AccessDenied

log = logging.getLogger("ffserve")

_SO_PEERPIDFD = 77
_PATH_MAX = 4096
_UCRED = struct.Struct("=iII")

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
"""Served: disks, and network file systems, which only an administrator can mount. By the f_type of
statfs(2); see linux/magic.h. Not served are file systems that ordinary users can mount and make
hang (FUSE; in a user namespace an overlay over FUSE), unless the administrator says so, and those
whose files are no data (proc, sysfs)."""

DECIDED_ELSEWHERE = ("afs", "cifs", "smb2")
"""File systems whose servers decide who may read, whatever the permission bits say: their files are
never common by these bits."""

Owner: TypeAlias = tuple[int, int]
"""User and namespace: who shares a proof; see `Peer`."""

OWN, HOST = 0, 1
"""The namespaces that last as long as the daemon: its own, and that of process 1."""

Viewer: TypeAlias = int | Owner
"""Who sees which files and jobs in STATUS."""

_unknown = itertools.count(-1, -1)


@dataclass(frozen=True, slots=True)
class Peer:
    """The user behind a connection, as the kernel reports it.

    uid: in the daemon's user namespace. namespace: a number for the mount namespace that the client
    connected from, see `Namespaces`; below 0: unknown, and different for each connection.

    A number is not always a person: the root of a container is not the root of the machine, equal
    numbers in two containers may be two people, and all users without a number in the daemon's user
    namespace appear as one, the overflow user. So what one session has proven counts for another
    only if user and namespace are the same.
    """

    pid: int
    uid: int
    namespace: int

    @property
    def owner(self) -> Owner:
        """Whose proofs this peer shares."""
        return self.uid, self.namespace

    @property
    def viewer(self) -> Viewer:
        """As who it is told of files and jobs."""
        return viewer_of(self.owner)

    @property
    def is_self(self) -> bool:
        """Whether it is the daemon's own user, outside of any container of its own."""
        return self.uid == os.geteuid() and self.namespace == OWN

    @property
    def is_administrator(self) -> bool:
        """Whether it is root or the daemon's own user, and not the root of a container."""
        return is_administrator(self.uid) and self.namespace in (OWN, HOST)


class Credentials(NamedTuple):
    """Process and user at the other end of a connection."""

    pid: int
    uid: int

    @classmethod
    def of(cls, connection: socket.socket) -> Credentials:
        """Return those with which the peer of a Unix socket connected, or began to listen."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return cls(*_UCRED.unpack(raw)[:2])


def viewer_of(owner: Owner) -> Viewer:
    """Return as who an owner is told of files and jobs: as the user, in all namespaces, unless that
    number stands for somebody else elsewhere."""
    uid, namespace = owner
    elsewhere = is_administrator(uid) and namespace not in (OWN, HOST)
    return owner if elsewhere or uid == _ambiguous_uid() else uid


def is_administrator(uid: int) -> bool:
    """Whether a user is one of those who may stop the daemon, if not in a container."""
    return uid in (0, os.geteuid())


@dataclass(slots=True, eq=False)
class _Namespace:
    """A mount namespace with clients. mounts: its table of mounts, which keeps it alive."""

    number: int
    mounts: int
    clients: int = 0


class Namespaces:
    """The mount namespaces of clients.

    Everybody may tell them apart by the numbers of their mounts. But the kernel gives free numbers
    to others, so a container would be taken for one that has ended, and get its samples. So each
    namespace has a number here that is never used again, and is kept alive while one of its clients
    is connected.
    """

    def __init__(self) -> None:
        self._by_mount: dict[int, _Namespace] = {}
        self._by_number: dict[int, _Namespace] = {}
        self._numbers = itertools.count(HOST + 1)

    def peer(self, connection: socket.socket) -> Peer:
        """Return the peer of a connected Unix socket; `release` its namespace when it has gone."""
        pid, uid = Credentials.of(connection)
        namespace = None if uid == _ambiguous_uid() else self._hold(pid)
        if namespace is not None and _has_ended(connection):
            self.release(namespace)
            namespace = None
        return Peer(pid, uid, next(_unknown) if namespace is None else namespace)

    def _hold(self, pid: int) -> int | None:
        if not _proc_is_own():
            return None
        try:
            fd = os.open(f"/proc/{pid}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        first = _first_mount(fd)
        held = None if first is None else self._by_mount.get(first)
        if held is not None and _first_mount(held.mounts) != first:
            held = None  # that mount has gone from it
        if first is None or held is not None or first in (_mount_of("self"), _mount_of("1")):
            os.close(fd)
        if first is None:
            return None
        if first == _mount_of("self"):
            return OWN
        if first == _mount_of("1"):
            return HOST
        if held is None:
            held = self._by_mount[first] = _Namespace(next(self._numbers), fd)
            self._by_number[held.number] = held
        held.clients += 1
        return held.number

    def release(self, number: int) -> bool:
        """A client has gone; return whether nobody of this namespace will ever come again."""
        held = self._by_number.get(number)
        if held is None:
            return False
        held.clients -= 1
        if held.clients:
            return False
        del self._by_number[number]
        for first in [first for first, each in self._by_mount.items() if each is held]:
            del self._by_mount[first]
        os.close(held.mounts)
        return True


@functools.cache
def _ambiguous_uid() -> int | None:
    """Return the number of all users that the daemon's user namespace does not map, if any."""
    if _read("/proc/self/uid_map").split() == [b"0", b"0", b"%d" % ((1 << 32) - 1)]:
        return None
    return int(_read("/proc/sys/kernel/overflowuid"))


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(4096)


def _first_mount(mounts: int) -> int | None:
    """Return the number of the first mount in an open table of mounts; None: it has none.

    It belongs to one namespace only. Everybody may read it, whereas /proc/PID/ns/mnt is for those
    who may trace the process.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(os.pread(mounts, 64, 0).split(maxsplit=1)[0])
    return None


@functools.cache
def _proc_is_own() -> bool:
    """Whether the numbers in /proc are those of this process's PID namespace."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


@functools.cache
def _mount_of(process: str) -> int | None:
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{process}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _first_mount(fd)
        finally:
            os.close(fd)
    return None


def namespace_marks() -> tuple[int, int]:
    """Return what tells whether OWN and HOST are the same namespaces as those of another process,
    as long as these last; -1: unknown."""
    own, host = _mount_of("self"), _mount_of("1")
    return -1 if own is None else own, -1 if host is None else host


def _has_ended(connection: socket.socket) -> bool:
    """Whether the peer has ended, so that its number may be that of another process by now."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
    except OSError:  # before Linux 6.5
        return False
    pidfd = int.from_bytes(raw, "little")
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(pidfd)


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
    """What the administrator allows.

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
        Raises: AccessDenied; ReadError: the file system fails.
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
            # Before anything else is asked of them: their file system may never answer.
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
        """Return a function that tells to which domains the files of a peer belong. It looks files
        up by the names that the peer gives them, and opens none that is not theirs."""
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
        """Refuse a file system that is not served, unless it is an overlay among the daemon's own
        mounts, where only an administrator mounts one."""
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
    """Check that a client passed one descriptor, of a memory file: reads of any other could hang.

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
            "prepared samples do not come through a memory file",
            hint="a client passes one descriptor, of memfd_create(2)",
        )


@functools.cache
def _say_unknown() -> None:
    log.warning(
        "the daemon does not see in which container its clients are (it has a PID or user "
        "namespace of its own): samples of files that not everybody may read, or that it does not "
        "find by their names, are kept apart for each process of a job"
    )


def may_read_everything() -> bool:
    """Whether permission bits do not bind this process (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH)."""
    with open("/proc/self/status", encoding="ascii") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) & 0b110)


def _none_is(files: CheckedFiles) -> Bools:
    return np.zeros(len(files.fds), np.bool_)


def _is_name(path: str) -> bool:
    """Whether the kernel accepts a path of this length; to resolve a longer one would take very
    long."""
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
        # Before the file is opened: to open a pipe or a device may do something.
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
    """Return which open files are those of their names, and all users may read them by those.

    Raises: OSError: of the first file about which nothing can be learned.
    """
    _, types, error = flags_and_types(fds)
    states, other = stat_fds(fds)
    if error or other:
        raise error or other or OSError
    with _Directories() as directories:
        return directories.everybody_may_read(CheckedFiles(paths, fds, states, types))


class _Directories:
    """Which files everybody may read, by the permissions of file and directories.

    Names are followed from directory to directory by descriptors, so that nobody can exchange what
    was checked. The last directory is kept: files that are opened together mostly lie together.
    """

    def __init__(self) -> None:
        self._last: tuple[str, int | None] = "", None

    def __enter__(self) -> _Directories:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def everybody_may_read(self, files: CheckedFiles) -> Bools:
        """Return which are the files of their names, and all users may read them by those."""
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
        """Return whether everybody finds files by their names, all in one directory."""
        public, names = np.zeros(len(paths), np.bool_), [os.path.basename(path) for path in paths]
        others: list[int] = []
        with contextlib.suppress(OSError, ValueError):
            fd, done = self._open(_resolved(directory)), 0
            while fd is not None and done < len(paths):
                found, _ = stat_names(fd, names[done:])
                mine = states[done : done + len(found)]
                # While it is open, its number belongs to no other file.
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
        """Return what a name in a directory is; None if not everybody may search the directory."""
        fd = self._open(directory)
        return None if fd is None else os.stat(name, dir_fd=fd, follow_symlinks=False)

    def _open(self, directory: str) -> int | None:
        """Return a directory that everybody may search; None: not everybody may."""
        if directory != self._last[0]:
            self._leave()
            self._last = directory, _open_public(directory)
        return self._last[1]

    def _leave(self) -> None:
        fd, self._last = self._last[1], ("", None)
        if fd is not None:
            os.close(fd)


def _resolved(path: str) -> str:
    """Return a path without symbolic links. The kernel follows 40 of them, `os.path.realpath` as
    many as a user makes."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _bits_decide(types: Int64s) -> Bools:
    """Return whether permission bits tell who may read, by types of file systems."""
    elsewhere = [FILE_SYSTEMS[name] for name in DECIDED_ELSEWHERE]
    found: Bools = np.isin(types, elsewhere, invert=True)
    return found


def _open_public(directory: str) -> int | None:
    """Open a directory that everybody may search, as all above it; None: it is not."""
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
    # A descriptor with O_PATH has no attributes by itself.
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
