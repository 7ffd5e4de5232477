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

import fcntl
import functools
import itertools
import os
import select
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ffserve.config import USER_FILE_SYSTEMS
from ffserve.engine.io import file_system_type
from ffserve.errors import AccessDenied
from ffserve.files import wrap_os_error

_SO_PEERPIDFD = 77
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

Owner: TypeAlias = tuple[int, int]
"""User and namespace: who shares a proof; see `Peer`."""

_unknown = itertools.count(-1, -1)


@dataclass(frozen=True, slots=True)
class Peer:
    """The user behind a connection, as the kernel reports it.

    uid: in the daemon's user namespace. namespace: the mount namespace that the client connected
    from; below 0: unknown, and different for each connection.

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
    def is_self(self) -> bool:
        """Whether it is the daemon's own user, outside of any container of its own."""
        return self.uid == os.geteuid() and self.namespace == _own_namespace()

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Return the peer of a connected Unix socket."""
        pid, uid, _gid = _UCRED.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        )
        namespace = None if uid == _ambiguous_uid() else _namespace_of(str(pid))
        if namespace is None or _has_ended(connection):
            namespace = next(_unknown)
        return cls(pid, uid, namespace)


@functools.cache
def _ambiguous_uid() -> int | None:
    """Return the number of all users that the daemon's user namespace does not map, if any."""
    if _read("/proc/self/uid_map").split() == [b"0", b"0", b"%d" % ((1 << 32) - 1)]:
        return None
    return int(_read("/proc/sys/kernel/overflowuid"))


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(4096)


def _namespace_of(process: str) -> int | None:
    """Return a number of the mount namespace of a process; None: it cannot be found out.

    The number of the first mount belongs to one namespace only. Everybody may read it, whereas
    /proc/PID/ns/mnt is for those who may trace the process.
    """
    try:
        return int(_read(f"/proc/{process}/mountinfo").split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError):
        return None


@functools.cache
def _own_namespace() -> int | None:
    return _namespace_of("self")


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


class Rules:
    """What the administrator allows.

    Args:
        roots: directories; the files below them are served.
        file_systems: f_types of file systems that are served as well.
    """

    def __init__(self, roots: Sequence[str], file_systems: Sequence[int]) -> None:
        self.roots = tuple(os.path.realpath(root) for root in roots)
        self._served = {*FILE_SYSTEMS.values(), *file_systems}

    def check(self, fd: int, asked: str, peer: Peer) -> os.stat_result:
        """Check a descriptor that a peer passed; return the state of its file.

        Args: asked: the peer's name for the file, for errors.
        Raises: AccessDenied; ReadError: the file system fails.
        """
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_PATH or flags & os.O_ACCMODE != os.O_RDONLY:
            how = "with O_PATH" if flags & os.O_PATH else "for writing"
            raise AccessDenied(
                f"the client opened the file {how}",
                path=asked,
                hint="a client passes descriptors that it opened with O_RDONLY",
            )
        kind = wrap_os_error(lambda _: file_system_type(fd), asked)
        if kind not in self._served and not peer.is_self:
            self._check_mount(fd, kind, asked)
        status: os.stat_result = wrap_os_error(lambda _: os.fstat(fd), asked)
        if not stat.S_ISREG(status.st_mode):
            raise AccessDenied("the daemon serves regular files only", path=asked)
        if self.roots != ("/",):
            self._check_roots(os.readlink(f"/proc/self/fd/{fd}"), asked)
        return status

    def _check_mount(self, fd: int, kind: int, asked: str) -> None:
        """Refuse a file system that is not served, unless it is an overlay among the daemon's own
        mounts, where only an administrator mounts one."""
        if kind == USER_FILE_SYSTEMS["overlay"] and os.fstat(fd).st_dev in _own_devices():
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


def _own_devices() -> set[int]:
    """Return the devices of the file systems that are mounted in the daemon's mount namespace."""
    devices = set()
    with open("/proc/self/mountinfo", "rb") as file:
        for mount in file:
            major, minor = mount.split(maxsplit=3)[2].split(b":")
            devices.add(os.makedev(int(major), int(minor)))
    return devices
