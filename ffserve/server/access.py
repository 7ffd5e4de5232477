"""Access: which files the daemon reads for which user.

The daemon serves files under its roots only, and to a peer only files that the peer could open
itself. The peer's credentials come from the kernel (SO_PEERCRED and SO_PEERGROUPS, unix(7)) and are
compared with the permission bits of the file and of every directory above it. POSIX ACLs are
ignored, which can only refuse. The path is resolved and opened first, and the path of the open
descriptor is checked, so the file that was checked is the file that is read.

The arena is one mapping for all users who may connect: every client can map all cached samples.
Users who must not see each other's samples need daemons of their own, or inline payload.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from dataclasses import dataclass

from ffserve.errors import AccessDenied

_SO_PEERGROUPS = 59
_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """The user behind a connection, as the kernel reports it."""

    pid: int
    uid: int
    groups: frozenset[int]

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Return the peer of a connected Unix socket."""
        pid, uid, gid = _UCRED.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        )
        groups = {gid}
        try:
            raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4096)
            groups.update(struct.unpack(f"{len(raw) // 4}I", raw[: len(raw) // 4 * 4]))
        except OSError:
            # Before Linux 4.13, or more than 1024 groups: the first group alone can only refuse.
            pass
        return cls(pid, uid, frozenset(groups))


def real_path(fd: int) -> str:
    """Return the path of an open file, with symbolic links resolved."""
    return os.readlink(f"/proc/self/fd/{fd}")


def check_roots(path: str, asked: str, roots: tuple[str, ...]) -> None:
    """Refuse a real path outside the roots. Raises: AccessDenied."""
    if not any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots):
        raise AccessDenied(
            "the daemon does not serve this file: it is outside its roots",
            path=asked,
            hint=f"its roots are {' '.join(roots)}; add one with --root",
        )


def check(fd: int, asked: str, roots: tuple[str, ...], peer: Peer) -> None:
    """Refuse a file outside the roots or one that the peer could not open.

    Args:
        fd: the file, opened at least with O_PATH.
        asked: the path that the peer named, for the error.
        roots: real paths of directories.

    Raises: AccessDenied.
    """
    path = real_path(fd)
    check_roots(path, asked, roots)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise AccessDenied("the daemon serves regular files only", path=asked)
    if peer.uid == 0 or peer.uid == os.geteuid():
        return
    if not _permits(os.fstat(fd), peer, stat.S_IROTH):
        raise AccessDenied(f"user {peer.uid} may not read this file", path=asked)
    parent = os.path.dirname(path)
    while True:
        if not _permits(os.stat(parent), peer, stat.S_IXOTH):
            raise AccessDenied(
                f"user {peer.uid} may not read this file: no search permission for {parent}",
                path=asked,
            )
        if parent == "/":
            return
        parent = os.path.dirname(parent)


def _permits(status: os.stat_result, peer: Peer, other_bit: int) -> bool:
    if status.st_uid == peer.uid:
        return bool(status.st_mode & other_bit << 6)
    if status.st_gid in peer.groups:
        return bool(status.st_mode & other_bit << 3)
    return bool(status.st_mode & other_bit)
