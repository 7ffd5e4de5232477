"""A cgroup that limits the memory or the disk reads of some processes.

It needs root. Both versions of the kernel's interface are supported: version 2 (memory.max, io.max)
and version 1 (memory, blkio). `NoCgroup` says why no cgroup can be made.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 62
"""Bytes of memory that no machine has."""
ALLOCATED_AT_ONCE = 32 << 20
"""Bytes that processes may allocate until a limit follows (`Cgroup.keeping_cached`)."""
FOLLOWED_S = 0.02
MOST_ATTEMPTS = 100
_numbers = itertools.count()


class NoCgroup(OSError):
    """This machine or this user cannot make such a cgroup."""


class Cgroup:
    """The cgroup's directories: one in version 2, one per controller in version 1."""

    def __init__(self, directories: list[Path]) -> None:
        self._directories = directories

    def join(self, pid: int | None = None) -> None:
        """Put a process into the cgroup; this one by default."""
        for directory in self._directories:
            (directory / "cgroup.procs").write_text(str(pid or os.getpid()))

    def leave(self) -> None:
        """Put this process back into the groups above."""
        for directory in self._directories:
            (directory.parent / "cgroup.procs").write_text(str(os.getpid()))

    @contextlib.contextmanager
    def keeping_cached(self, size: int) -> Iterator[None]:
        """Let the group have ``size`` bytes of page cache besides what its processes allocate.

        The limit follows what they have allocated, so that none is killed for lack of memory.

        Raises: NoCgroup.
        """
        for wait_s in (*[FOLLOWED_S] * MOST_ATTEMPTS, None):
            try:
                self._keep_cached(size)
                break
            except NoCgroup:  # version 1 gives up before it has freed all that can be freed
                if wait_s is None:
                    raise
                time.sleep(wait_s)
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(FOLLOWED_S):
                with contextlib.suppress(NoCgroup):  # the kernel could not take that much at once
                    self._keep_cached(size)

        thread = threading.Thread(target=follow, name="cgroup")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _keep_cached(self, size: int) -> None:
        counts = self._counts("memory.stat")
        used = self._read("memory.current") or self._read("memory.usage_in_bytes")
        for name in ("inactive_file", "active_file"):
            used -= counts.get(f"total_{name}", counts.get(name, 0))
        for name in ("memory.max", "memory.limit_in_bytes"):
            for file in self._files(name):
                try:
                    file.write_text(str(used + size + ALLOCATED_AT_ONCE))
                except OSError as error:
                    raise NoCgroup(f"cannot limit the memory of a cgroup: {error}") from error

    def peak(self) -> int:
        """Return the peak memory of its processes in bytes; 0 where the kernel has no figure."""
        return self._read("memory.peak") or self._read("memory.max_usage_in_bytes")

    def _read(self, name: str) -> int:
        files = self._files(name)
        return int(files[0].read_text()) if files else 0

    def _files(self, name: str) -> list[Path]:
        return [directory / name for directory in self._directories if (directory / name).exists()]

    def _counts(self, name: str) -> dict[str, int]:
        lines = [
            line.split() for file in self._files(name) for line in file.read_text().splitlines()
        ]
        return {words[0]: int(words[1]) for words in lines}

    def killed(self) -> int:
        """Return how many processes the kernel killed for lack of memory."""
        counts = self._counts("memory.events") or self._counts("memory.oom_control")
        return counts.get("oom_kill", 0)


def _settings(
    second: bool, memory_size: int | None, rates: dict[str, int | None], path: str
) -> dict[str, dict[str, str]]:
    """Return the files to write and their contents, by controller."""
    wanted: dict[str, dict[str, str]] = {}
    if memory_size is not None:
        name = "memory.max" if second else "memory.limit_in_bytes"
        wanted["memory"] = {name: str(memory_size)}
        if second:
            wanted["memory"]["memory.swap.max"] = "0"
    given = {name: rate for name, rate in rates.items() if rate is not None}
    if given and second:
        words = [f"r{name}={rate}" for name, rate in given.items()]
        wanted["io"] = {"io.max": " ".join([disk_of(path), *words])}
    elif given:
        wanted["blkio"] = {
            f"blkio.throttle.read_{name}_device": f"{disk_of(path)} {rate}"
            for name, rate in given.items()
        }
    return wanted


@contextlib.contextmanager
def limited(
    *,
    memory_size: int | None = None,
    read_rate: int | None = None,
    read_iops: int | None = None,
    path: str = "/",
) -> Iterator[Cgroup]:
    """Make a cgroup, and remove it when the context ends; its processes must have ended by then.

    In version 2 a process is in one group: within a limit on memory, an outer limit on the disk
    does not hold.

    Args:
        memory_size: bytes.
        read_rate, read_iops: bytes and reads per second from the device that holds `path`.
    Raises: NoCgroup.
    """
    second = (MOUNT / "cgroup.controllers").exists()
    wanted = _settings(second, memory_size, {"bps": read_rate, "iops": read_iops}, path)
    directories: list[Path] = []
    try:
        try:
            name = f"ffserve-bench-{os.getpid()}-{next(_numbers)}"
            for controller, values in wanted.items():
                directory = MOUNT / name if second else MOUNT / controller / name
                if not directory.exists():
                    if second:
                        (MOUNT / "cgroup.subtree_control").write_text(f"+{controller}")
                    directory.mkdir()
                    directories.append(directory)
                for file, value in values.items():
                    # The file does not exist in a kernel without swap.
                    if file != "memory.swap.max" or (directory / file).exists():
                        (directory / file).write_text(value)
        except OSError as error:
            raise NoCgroup(f"cannot make a cgroup: {error}") from error
        yield Cgroup(directories)
    finally:
        for directory in directories:
            with contextlib.suppress(OSError):
                directory.rmdir()


@functools.cache
def missing() -> str | None:
    """Return why no cgroup with a limit on memory can be made here; None if it can."""
    try:
        with limited(memory_size=UNLIMITED) as group, group.keeping_cached(UNLIMITED):
            pass
    except NoCgroup as error:
        return str(error)
    return None


def disk_of(path: str) -> str:
    """Return "MAJOR:MINOR" of the whole disk that holds a file.

    Raises: NoCgroup when the file is not on a block device (tmpfs, a network).
    """
    device = os.stat(path).st_dev
    directory = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not directory.exists():
        raise NoCgroup(f"{path} is not on a block device")
    if (directory / "partition").exists():
        directory = directory.resolve().parent
    return (directory / "dev").read_text().strip()


def device_read(path: str) -> int:
    """Return the bytes that the kernel has read from a file's device, for any process."""
    device = os.stat(path).st_dev
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if (int(fields[0]), int(fields[1])) == (os.major(device), os.minor(device)):
            return int(fields[5]) * 512
    return 0


def process_read(pid: int) -> int:
    """Return the bytes that the kernel has read from devices for a process."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
