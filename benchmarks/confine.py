"""A limit on the memory, and on the disk, of some processes: a cgroup of their own.

Made by hand, so root is needed; version 2 (memory.max, io.max) and version 1 (memory, blkio) of
the kernel's interface. Where neither can be had, `CannotConfine` says why.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


class CannotConfine(OSError):
    """This machine, or this user, has no such limit to give."""


class Group:
    """The cgroup's directories, one of version 2 or one for each controller of version 1."""

    def __init__(self, places: list[Path]) -> None:
        self._places = places

    def join(self) -> None:
        """Put this process into it; for `preexec_fn`."""
        for place in self._places:
            (place / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        """Return the most memory that its processes had, bytes; 0 where the kernel does not say."""
        return self._read("memory.peak") or self._read("memory.max_usage_in_bytes")

    def _read(self, name: str) -> int:
        files = [place / name for place in self._places if (place / name).exists()]
        return int(files[0].read_text()) if files else 0

    def killed(self) -> int:
        """Return how many processes were killed for want of memory."""
        for place in self._places:
            for name in ("memory.events", "memory.oom_control"):
                file = place / name
                if file.exists():
                    counts = dict(line.split() for line in file.read_text().splitlines())
                    return int(counts.get("oom_kill", 0))
        return 0


@contextlib.contextmanager
def confined(
    *, memory_size: int | None = None, read_rate: int | None = None, path: str = "/"
) -> Iterator[Group]:
    """Make a cgroup for as long as this lasts; who is in it must have ended by then.

    Args: memory_size: bytes. read_rate: bytes a second from the device that `path` lies on.
    Raises: CannotConfine.
    """
    wanted: dict[str, dict[str, str]] = {}
    second = (MOUNT / "cgroup.controllers").exists()
    if memory_size is not None:
        name = "memory.max" if second else "memory.limit_in_bytes"
        wanted["memory"] = {name: str(memory_size)}
        if second:
            wanted["memory"]["memory.swap.max"] = "0"
    if read_rate is not None:
        device = disk_of(path)
        wanted["io" if second else "blkio"] = (
            {"io.max": f"{device} rbps={read_rate}"}
            if second
            else {"blkio.throttle.read_bps_device": f"{device} {read_rate}"}
        )
    places: list[Path] = []
    try:
        try:
            name = f"ffserve-bench-{os.getpid()}"
            for controller, values in wanted.items():
                place = MOUNT / name if second else MOUNT / controller / name
                if not place.exists():
                    if second:
                        (MOUNT / "cgroup.subtree_control").write_text(f"+{controller}")
                    place.mkdir()
                    places.append(place)
                for file, value in values.items():
                    # Without swap there is nothing to forbid.
                    if file != "memory.swap.max" or (place / file).exists():
                        (place / file).write_text(value)
        except OSError as error:
            raise CannotConfine(f"no cgroup of our own: {error}") from error
        yield Group(places)
    finally:
        for place in places:
            with contextlib.suppress(OSError):
                place.rmdir()


def disk_of(path: str) -> str:
    """Return "MAJOR:MINOR" of the whole disk that a file lies on.

    Raises: CannotConfine when it lies on none (tmpfs, a network).
    """
    device = os.stat(path).st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not place.exists():
        raise CannotConfine(f"{path} lies on no block device")
    if (place / "partition").exists():
        place = place.resolve().parent
    return (place / "dev").read_text().strip()


def device_read(path: str) -> int:
    """Return the bytes that the kernel has read from a file's device, for whomever."""
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
