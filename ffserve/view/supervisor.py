"""The processes of a view: the first one mounts and unmounts, the others answer requests.

The answering processes are forked, so they share the table of names. They hold the same descriptor
of /dev/fuse, so the kernel gives each request to whichever waits.

With passthrough shards/ is a file system of its own, mounted over that of the view: there OPEN must
be answered, while samples are opened three times as fast if it is not.

The processes end with the mount, and are
killed with the first process (PR_SET_PDEATHSIG, prctl(2)); programs that wait get errors then, and
the mount is dead until the next one, `ffserve unmount` or umount(8) removes it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from ffserve import folders as packed_folders
from ffserve import reader
from ffserve.dataset.paths import ExpandedPaths, PathLike, expand_paths
from ffserve.disk.files import open_regular, raise_file_limit
from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.folders import Folder
from ffserve.reader import ShardInfo
from ffserve.server.users.access import everybody_may_read
from ffserve.store.urls import is_url
from ffserve.view import kernel, mounting
from ffserve.view.serving import MOST_THREADS, Running, ViewFile, ViewServer
from ffserve.view.tree import ROOT, Shown, Tree, folder_of, names_of, unusable

log = logging.getLogger("ffserve")

PROCESSES = 4
"""A view has at most this many processes, and at most one per core."""
END_S = 1.0
"""A view waits this long for killed processes. A process that waits for a hanging disk ends when
the disk answers, or never."""
_PR_SET_PDEATHSIG = 1
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_NOT_BACKED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ELOOP)
"""With these errors the kernel does not read a file itself: permission is missing, or the file
system cannot do it."""


@dataclass(frozen=True)
class Options:
    """How a view is made.

    Args:
        format, server: as of `ffserve.open`.
        allow_other: for all users; files that not everybody may read, and remote ones, are left
            out, since the kernel keeps names and sizes for all users alike.
        suffix: of the names of samples that have numbers.
    """

    format: str | None = None
    server: str = "auto"
    allow_other: bool = False
    suffix: str = ""


class View:
    """Record files as a file system, not mounted yet.

    Args:
        paths: as of `ffserve.open`; a file that is named twice is shown once, and of remote files
            only the samples are shown.
        options: how.
    Raises: as `ffserve.open`; UsageError: a suffix that cannot be part of a name, or nothing to
        show to others.
    Cost: opens all files; reads the names of packed folders, one to two seconds a million.
    """

    def __init__(self, paths: Sequence[PathLike], options: Options) -> None:
        if "/" in options.suffix or "\0" in options.suffix or len(options.suffix) > 100:
            raise UsageError(f"invalid suffix {options.suffix!r}", hint="such as .jpg")
        suffixes = reader.check_options(options.format, options.server, "raise")
        found = ExpandedPaths(dict.fromkeys(expand_paths(paths, suffixes=suffixes)))
        raise_file_limit()
        if options.allow_other:
            found = _public(found)
        self._options = options
        self._reader = reader.open_files(found, options.format, options.server, whole=True)
        self.files: list[ViewFile] = []
        try:
            shards = self._reader.shards
            for shard in shards:
                self.files.append(self._open(shard))
            local = [file for file in self.files if not file.remote]
            if len(local) < len(self.files):
                log.warning("remote files are not in shards/; the view shows only their samples")
            fds = np.array([file.fd for file in local], np.int32)
            readable = everybody_may_read([file.path for file in local], fds)
            for file, public in zip(local, readable, strict=True):
                file.public = bool(public)
            names = names_of([shard.path for shard in shards])
            self.tree = Tree(list(map(self._shown, names, shards)))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._reader)

    @property
    def source(self) -> str:
        """Where samples come from, as `Reader.source`."""
        return self._reader.source

    def close(self) -> None:
        """Close the files."""
        self._reader.close()
        for file in self.files:
            if not file.remote:
                os.close(file.fd)
        self.files.clear()

    def _open(self, shard: ShardInfo) -> ViewFile:
        sizes = None
        if shard.format != "recordio":  # it has no lengths in its headers
            sizes = self._reader.sizes(range(shard.first, shard.first + shard.count))
        if is_url(shard.path):
            return ViewFile(shard.path, -1, shard.size, 0, shard.first, sizes)
        fd = open_regular(shard.path)
        found = os.fstat(fd)
        if found.st_size != shard.size:
            os.close(fd)
            raise ReadError("the file changed while it was opened", path=shard.path)
        return ViewFile(shard.path, fd, found.st_size, found.st_mtime_ns, shard.first, sizes)

    def _shown(self, name: str, shard: ShardInfo) -> Shown:
        folder = None
        try:
            folder = self._folder(shard)
        except FFServeError as error:
            log.warning(
                "the samples are named by number, because their own names cannot be read: %s", error
            )
        if folder is not None and (reason := unusable(folder)) is not None:
            log.warning(
                "%s: the samples are named by number, because their own names cannot be used: %s",
                shard.path,
                reason,
            )
            folder = None
        remote = is_url(shard.path)
        return Shown(name, shard.first, shard.count, folder, self._options.suffix, remote)

    def _folder(self, shard: ShardInfo) -> Folder | None:
        """Return the names of a packed folder or of the members of a tar file; None if the file is
        neither. Raises: as `Reader.read`."""
        if shard.format == "tar":
            first = shard.first
            names = self._reader.keys(range(first, first + shard.count))
            return folder_of(names, shard.path)
        if shard.format != "ffrecord" or not shard.count:
            return None
        last = shard.first + shard.count - 1
        [sample] = self._reader.read([last])
        if not packed_folders.is_index(sample[:16].tobytes()):
            return None
        count = shard.count - 1
        return packed_folders.decode(sample.data, count, path=shard.path, index=last)

    # ---- mounted ---------------------------------------------------------------------------

    def serve(self, path: str, ready: Callable[[], object], forked: Callable[[], object]) -> int:
        """Mount the view, serve it until it is unmounted or a signal ends it, and unmount it.

        SIGTERM, SIGINT and SIGHUP unmount it, also if files are open: programs that have them open
        get errors.

        Args:
            path: of the mount point.
            ready: called when the view is mounted.
            forked: called in each process that answers.
        Returns: 0, or 1 if a process that answers has died.
        Raises: UsageError, MissingFile, AccessDenied, ReadError: it cannot be mounted.
        """
        path = mounting.resolved(path)
        if mounting.check_mountpoint(path):
            log.warning("%s: removed the mount of a view whose process had been killed", path)
        ending = {each for each in _ENDING if signal.getsignal(each) != signal.SIG_IGN}  # nohup
        watched = {*ending, signal.SIGCHLD}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        parts: list[_MountedPart] = []
        try:
            parts.append(_MountedPart(path, self._options.allow_other))
            offered = kernel.greet(parts[0].device, passthrough=False)
            mounting.read_ahead(path, kernel.READ_AHEAD_SIZE)
            self._fork(parts[0], ROOT, min(os.cpu_count() or 1, PROCESSES), forked)
            if offered and os.geteuid() == 0:
                self._mount_shards(f"{path}/shards", parts, forked)
            ready()
            return _wait(parts, watched)
        finally:
            for part in reversed(parts):
                part.end()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _mount_shards(
        self, path: str, parts: list[_MountedPart], forked: Callable[[], object]
    ) -> None:
        """Mount shards/ once more, as a file system whose files the kernel reads itself."""
        part = _MountedPart(path, self._options.allow_other)
        parts.append(part)
        kernel.greet(part.device, passthrough=True)
        for file in self.files:
            if file.remote:
                continue
            try:
                file.backing = kernel.open_backing(part.device, file.fd)
            except OSError as error:
                if error.errno not in _NOT_BACKED:
                    raise ReadError(str(error.strerror), path=file.path) from error
        if any(file.backing for file in self.files):
            self._fork(part, self.tree.look_up(ROOT, b"shards"), 1, forked)
        else:
            parts.remove(part)
            part.end()

    def _fork(
        self, part: _MountedPart, root: int, count: int, forked: Callable[[], object]
    ) -> None:
        """Start processes that answer for a part."""
        running = Running(count * MOST_THREADS)
        for k in range(count):
            server = ViewServer(
                part.device, self.tree, self._reader, self.files,
                root=root, opens=root != ROOT, running=running,
            )  # fmt: skip
            part.processes.append(_forked(partial(_run, server, k * MOST_THREADS, forked)))


class _MountedPart:
    """A file system of the view, and the processes that answer for it.

    Raises: as `mounting.mount`.
    """

    def __init__(self, path: str, allow_other: bool) -> None:
        self.path = path
        self.processes: list[int] = []
        self.device = mounting.mount(path, allow_other=allow_other)
        self._mount = mounting.find(path)

    def end(self) -> None:
        """Unmount the file system, if it is still mounted, and end its processes."""
        try:
            if self._mount is not None and mounting.find(self.path) == self._mount:
                _unmount(self.path)
        finally:
            os.close(self.device)
            for pid in self.processes:
                os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + END_S
            while self.processes and time.monotonic() < deadline:
                self.processes = [
                    pid for pid in self.processes if not os.waitpid(pid, os.WNOHANG)[0]
                ]
                time.sleep(0.01)


def _public(paths: Sequence[str]) -> ExpandedPaths:
    """Return the files that everybody may read. Raises: UsageError: there is none."""
    local = [path for path in paths if not is_url(path)]
    with ExitStack() as opened:
        fds: list[int] = []
        for path in local:
            fds.append(open_regular(path))
            opened.callback(os.close, fds[-1])
        readable = everybody_may_read(local, np.array(fds, np.int32))
    found = ExpandedPaths(path for path, public in zip(local, readable, strict=True) if public)
    if not found:
        raise UsageError(
            "cannot show these files to other users: there is none that everybody may read",
            hint="mount them without --allow-other, or give everybody the permission to read files "
            "and directories",
        )
    if len(found) < len(paths):
        log.warning(
            "files that not everybody may read, and remote ones, are left out because of "
            "--allow-other: %d of %d",
            len(paths) - len(found),
            len(paths),
        )
    return found


def _run(server: ViewServer, first: int, forked: Callable[[], object]) -> None:
    forked()
    server.run(first)


def _forked(run: Callable[[], object]) -> int:
    """Run a function in a process of its own, which ends with this one; return its number."""
    parent = os.getpid()
    with warnings.catch_warnings():
        # The warning is about a fork beside threads of the engine, which a Reader survives.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            for number in _ENDING:  # the first process ends this one
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_ENDING, signal.SIGCHLD})
            run()
            code = 0
    except BaseException:
        log.exception("a process of the view has failed")
    finally:
        os._exit(code)


def _wait(parts: list[_MountedPart], watched: set[signal.Signals]) -> int:
    """Wait until the view is to end; return the exit code."""
    while parts[0].processes:  # else it was unmounted
        if signal.sigwait(watched) != signal.SIGCHLD:
            break
        for part in parts:
            for pid in list(part.processes):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    part.processes.remove(pid)
                    if status:
                        log.error(
                            "%s: a process of the view has died; the view is unmounted", part.path
                        )
                        return 1
    return 0


def _unmount(path: str) -> None:
    try:
        mounting.unmount(path)
    except UsageError:
        log.warning(
            "%s: programs still have files of the view open, and now get errors when they use them",
            path,
        )
        mounting.unmount(path, lazy=True)
