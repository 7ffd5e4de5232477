"""The daemon's socket, for the daemon and for its clients: its path, and who is at its end."""

from __future__ import annotations

import os
import socket as sockets
import stat
import struct
from typing import NamedTuple

from ffserve.errors import AccessDenied, MissingFile, UsageError

SYSTEM_SOCKET = "/run/ffserve/ffserve.sock"
MAX_SOCKET_PATH = 107
"""A path in ``struct sockaddr_un`` has at most this many bytes, without the terminating zero."""
_UCRED = struct.Struct("=iII")
_ACCEPTS = 0x10000
"""A flag in /proc/net/unix: __SO_ACCEPTCON of <linux/net.h>."""


LISTENS_S = 1.0
"""Who does not take a connection in so long listens nevertheless."""


def connect(sock: sockets.socket, path: str, most_s: float) -> None:
    """Connect to a Unix socket, and wait so long at most while its queue is full. With Python's own
    timeout a connect to a full queue fails at once.

    Raises: BlockingIOError: it stays full; OSError.
    """
    timeout = struct.pack("ll", *divmod(int(most_s * 1e6), 1_000_000))
    sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDTIMEO, timeout)
    sock.connect(path)


class Places(NamedTuple):
    """Where sockets are. private: the directory of a user who has no runtime directory."""

    system: str
    private: str
    is_root: bool

    @classmethod
    def of_process(cls) -> Places:
        """Return the places for this process."""
        user = os.geteuid()
        return cls(SYSTEM_SOCKET, f"/tmp/ffserve-{user}", user == 0)


def default_socket_path(places: Places | None = None) -> str:
    """Return the socket path of a daemon without a configured one.

    ``$FFSERVE_SOCKET``; else ``/run/ffserve/ffserve.sock`` for root and for the service (whose
    directory is in systemd's ``$RUNTIME_DIRECTORY``); else the user's own
    ``$XDG_RUNTIME_DIR/ffserve/ffserve.sock``; without such a directory
    ``/tmp/ffserve-UID/ffserve.sock``.

    Raises:  AccessDenied: ``/tmp/ffserve-UID`` exists and does not belong to this user alone.
    """
    given = os.environ.get("FFSERVE_SOCKET")
    if given:
        return given
    for directory in os.environ.get("RUNTIME_DIRECTORY", "").split(":"):
        if os.path.basename(directory) == "ffserve":
            return os.path.join(directory, "ffserve.sock")
    places = places or Places.of_process()
    return places.system if places.is_root else user_socket(places)


def find_socket(explicit: str | None = None, places: Places | None = None) -> str:
    """Return the socket path that a client tries; it need not exist.

    ``explicit``; else ``$FFSERVE_SOCKET``; else the system's ``/run/ffserve/ffserve.sock`` if it
    exists or for root; else the user's own (see :func:`default_socket_path`).

    Raises:  AccessDenied: ``/tmp/ffserve-UID`` would be used and does not belong to this user
             alone.
    """
    given = explicit or os.environ.get("FFSERVE_SOCKET")
    if given:
        return given
    places = places or Places.of_process()
    if places.is_root or os.path.exists(places.system):
        return places.system
    return user_socket(places)


def restart_if_removed(path: str) -> str:
    """Return the command that makes the socket of a service anew, if its path was removed while
    systemd listens on it; else ""."""
    directory, name = os.path.split(path)
    # Without systemd this may be a container, which sees sockets of the machine by name only.
    if directory != os.path.dirname(SYSTEM_SOCKET) or not os.path.isdir("/run/systemd/system"):
        return ""
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as lines:
            fields = [line.rstrip("\n").split(None, 7) for line in lines if path in line]
    except OSError:
        return ""
    listens = any(each[-1] == path and int(each[3], 16) & _ACCEPTS for each in fields)
    if os.path.exists(path) or not listens:
        return ""
    name = name.removesuffix(".sock")
    unit = name if name == "ffserve" else f"ffserve@{name}"
    return f"systemctl restart {unit}.socket {unit}.service"


def prepare_socket_directory(socket: str, places: Places | None = None) -> None:
    """Create the directory of ``socket`` if it is ffserve's own, so that a daemon can bind there.

    The directories of the default paths are ffserve's own. A new one has mode 0755 under ``/run``
    (the socket's mode decides who may connect) and 0700 elsewhere.

    Raises:  MissingFile: another directory, which is not there. AccessDenied: the directory cannot
             be created, or the private directory belongs to another user.
    """
    places = places or Places.of_process()
    directory = os.path.dirname(os.path.abspath(socket))
    if directory not in _own_directories(places) and not os.path.isdir(directory):
        raise MissingFile(
            "the directory of the socket does not exist",
            path=socket,
            hint=f"create {directory} first, or choose another socket path with --socket",
        )
    if directory == places.private:
        _check_private(directory)
    try:
        os.makedirs(directory, mode=0o755 if directory.startswith("/run/") else 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise AccessDenied(
            f"cannot create the socket's directory: {error.strerror}",
            path=directory,
            hint="choose another socket path with --socket",
        ) from error
    if directory == places.private:
        _check_private(directory)


def remove_stale_socket(path: str) -> None:
    """Remove a socket on which nobody listens, so that the path can be used.

    Raises: UsageError: the path is not a socket, or another program listens on it.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(
            "the path of the socket exists and is not a socket",
            path=path,
            hint="remove it, or choose another path",
        )
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as attempt:
        try:
            connect(attempt, path, LISTENS_S)
        except BlockingIOError:
            pass  # its queue is full
        except OSError:
            os.unlink(path)
            return
    raise UsageError(
        "another program listens on this socket",
        path=path,
        hint="stop that program, or choose another path",
    )


def _own_directories(places: Places) -> list[str]:
    """Return the directories of the default paths, by whoever is asked."""
    passed = os.environ.get("RUNTIME_DIRECTORY", "").split(":")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [
        os.path.dirname(places.system),
        *(directory for directory in passed if directory),
        *([os.path.join(runtime, "ffserve")] if runtime and _is_own(runtime) else []),
        places.private,
    ]


def user_socket(places: Places | None = None) -> str:
    """Return the path of this user's own socket, whatever the machine has.

    Raises: AccessDenied: it would be in ``/tmp/ffserve-UID``, which does not belong to this user
        alone.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_own(runtime):
        return os.path.join(runtime, "ffserve", "ffserve.sock")
    directory = (places or Places.of_process()).private
    _check_private(directory)
    return os.path.join(directory, "ffserve.sock")


def _is_own(directory: str) -> bool:
    # After su or sudo, XDG_RUNTIME_DIR may still name the directory of another user.
    try:
        return os.stat(directory).st_uid == os.geteuid()
    except OSError:
        return False


def _check_private(directory: str) -> None:
    """Refuse a directory in /tmp that another user created to intercept clients."""
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.geteuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise AccessDenied(
            "unsafe directory for the socket: not a directory of mode 0700 that belongs to you",
            path=directory,
            hint="remove it, or set XDG_RUNTIME_DIR or FFSERVE_SOCKET",
        )


class Credentials(NamedTuple):
    """Process and user at the other end of a connection."""

    pid: int
    uid: int

    @classmethod
    def of(cls, connection: sockets.socket) -> Credentials:
        """Return the credentials with which the peer of a Unix socket connected or listens."""
        raw = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _UCRED.size)
        return cls(*_UCRED.unpack(raw)[:2])
