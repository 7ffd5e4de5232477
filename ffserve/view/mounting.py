"""Mount and unmount file systems of FUSE: by mount(2), or for users by fusermount3.

fusermount3 is a setuid program of the package fuse3. It mounts on a directory that the user may
write to, and passes the opened /dev/fuse back through a socket (_FUSE_COMMFD, fusermount3(1)).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import shutil
import socket
import stat
import subprocess
from typing import NamedTuple

from ffserve.disk.files import os_error, wrap_os_error
from ffserve.errors import AccessDenied, MissingFile, ReadError, UsageError

DEVICE = "/dev/fuse"
SUBTYPE = "ffserve"
_TYPE = f"fuse.{SUBTYPE}"
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)
"""These errors say that the process behind a mount has ended."""
_HELPERS = ("fusermount3", "fusermount")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


class Mount(NamedTuple):
    """A mount of this process's namespace. device: MAJOR:MINOR."""

    path: str
    device: str
    type: str


def find(path: str) -> Mount | None:
    """Return the uppermost mount on a path; None: nothing is mounted there."""
    wanted, found = os.fsencode(path), None
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            fields, _, rest = line.partition(b" - ")
            _, _, device, _, place, *_ = fields.split(b" ")
            if place.decode("unicode_escape").encode("latin-1") == wanted:
                found = Mount(path, device.decode(), os.fsdecode(rest.split(b" ", 1)[0]))
    return found


def resolved(path: str) -> str:
    """Return the path of a mount point without links, also of one whose process has ended."""
    directory, name = os.path.split(os.path.abspath(path))
    full = os.path.join(os.path.realpath(directory), name)
    try:
        return os.path.realpath(full, strict=True)
    except OSError:
        return full


def check_mountpoint(path: str) -> bool:
    """Check that a directory can be mounted on.

    Args: path: of `resolved`.
    Returns: whether a view was there whose process had ended; it was removed.
    Raises: MissingFile, AccessDenied, UsageError.
    """
    found = find(path)
    cleaned = False
    try:
        os.statvfs(path)  # stat(2) may be answered from what the kernel remembers
    except OSError as error:
        if error.errno not in _DEAD or found is None:
            hint = "create it first: mkdir" if isinstance(error, FileNotFoundError) else None
            raise os_error(error, path, hint=hint) from error
        if found.type != _TYPE:
            raise UsageError(
                f"the directory is a mount ({found.type}) whose process has ended",
                path=path,
                hint="remove it with `umount` or `fusermount3 -u`",
            ) from error
        unmount(path, lazy=True)
        cleaned = True
        found = find(path)
    if found is not None and found.type == _TYPE:
        raise UsageError(
            "a view is already mounted on this directory",
            path=path,
            hint="remove it with `ffserve unmount`, or use another directory",
        )
    if not stat.S_ISDIR(wrap_os_error(os.stat, path).st_mode):
        raise UsageError("the mount point is not a directory", path=path)
    if wrap_os_error(os.listdir, path):
        raise UsageError(
            "the mount point is not empty; the view would hide what is in it",
            path=path,
            hint="give an empty directory",
        )
    return cleaned


def mount(path: str, *, allow_other: bool) -> int:
    """Mount a read-only file system on a directory; return the descriptor that serves it.

    Args: path: of `resolved`, checked. allow_other: let all users read the view, as far as the
    permissions of the files allow.
    Raises: ReadError, AccessDenied, UsageError.
    """
    options = ["default_permissions", *(["allow_other"] if allow_other else [])]
    if os.geteuid() != 0:
        return _mount_by_helper(path, options)
    try:
        device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _no_device(error) from error
    words = [f"fd={device}", "rootmode=40000", f"user_id={os.geteuid()}"]
    words += [f"group_id={os.getegid()}", *options]
    if _libc.mount(
        b"ffserve", os.fsencode(path), _TYPE.encode(), _MS_RDONLY | _MS_NOSUID | _MS_NODEV,
        ",".join(words).encode(),
    ):  # fmt: skip
        failed = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(device)
        if failed.errno == errno.ENODEV:
            raise _no_device(failed)
        hint = "start the container with the capability CAP_SYS_ADMIN, which mounting needs"
        raise os_error(failed, path, hint=hint if failed.errno == errno.EPERM else None)
    return device


def _no_device(error: OSError) -> ReadError | AccessDenied:
    if isinstance(error, PermissionError):
        return AccessDenied(
            f"cannot open the FUSE device: {error.strerror}", path=DEVICE,
            hint="allow access to the device; start a container with --device /dev/fuse",
        )  # fmt: skip
    kind = MissingFile if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO) else ReadError
    return kind(
        f"the kernel has no FUSE device: {error.strerror}",
        path=DEVICE,
        hint="load the module (modprobe fuse), or start the container with --device /dev/fuse",
    )


def _helper() -> str:
    """Return the program that mounts for users. Raises: ReadError: it is missing."""
    for name in _HELPERS:
        if found := shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin"):
            return found
    raise MissingFile(
        "the program that mounts file systems for users is missing",
        path=_HELPERS[0],
        hint="install the package fuse3, or mount as root",
    )


def _mount_by_helper(path: str, options: list[str]) -> int:
    helper = _helper()
    if not os.path.exists(DEVICE):
        raise _no_device(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    words = ["ro", "nosuid", "nodev", f"fsname={SUBTYPE}", f"subtype={SUBTYPE}", *options]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [helper, "-o", ",".join(words), "--", path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
        )
        theirs.close()
        if done.returncode == 0:
            _, rights, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
            for level, kind, passed in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(passed) == 4:
                    [device] = array.array("i", passed)
                    os.set_inheritable(device, False)
                    return device
    said = done.stderr.decode(errors="replace").strip().removeprefix("fusermount3: ")
    hint = None
    if "allow_other" in said:
        hint = (
            "let the administrator write user_allow_other into /etc/fuse.conf, or leave out "
            "--allow-other"
        )
    raise AccessDenied(said or f"{helper} failed", path=path, hint=hint)


def unmount(path: str, *, lazy: bool = False) -> None:
    """Unmount what is mounted on a path.

    Args: path: of `resolved`. lazy: also if files are open.
    Raises: UsageError: files are open. AccessDenied, ReadError.
    """
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    if _libc.umount2(os.fsencode(path), flags) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EPERM:
        words = [_helper(), "-u", *(["-z"] if lazy else []), "--", path]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode == 0:
            return
        said = done.stderr.decode(errors="replace").strip()
        if "busy" not in said:
            raise AccessDenied(said or "cannot unmount", path=path)
        code = errno.EBUSY
    if code == errno.EBUSY:
        raise UsageError(
            "cannot unmount the view: programs have files or directories of it open",
            path=path,
            hint=(
                "end the programs, which `fuser -vm` lists, or use --lazy, after which they get "
                "errors"
            ),
        )
    raise os_error(OSError(code, os.strerror(code)), path)


def unmount_view(path: str, *, lazy: bool) -> None:
    """Unmount a view with its shards/; also one whose process has ended.

    Args, Raises: as of `unmount`; UsageError: no view is mounted there.
    """
    if not is_view(path):
        raise UsageError("no view is mounted here", path=path, hint="`mount` lists all mounts")
    try:
        os.statvfs(path)
    except OSError as error:
        lazy |= error.errno in _DEAD
    if not lazy and is_view(inner := f"{path}/shards"):
        unmount(inner)
    unmount(path, lazy=lazy)


def is_view(path: str) -> bool:
    """Whether a view of ffserve is mounted on a path of `resolved`."""
    found = find(path)
    return found is not None and found.type == _TYPE


def read_ahead(path: str, size: int) -> None:
    """Let the kernel read so many bytes ahead in the files of a mount, if this process may."""
    found = find(path)
    if found is not None:
        with (
            contextlib.suppress(OSError),
            open(f"/sys/class/bdi/{found.device}/read_ahead_kb", "w") as file,
        ):
            file.write(str(size >> 10))
