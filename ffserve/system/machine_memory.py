"""Memory of the machine that this process may use, with the limits of its cgroups."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def usable_memory(proc_cgroup: Path = _OWN_CGROUP) -> int:
    """Return the bytes of memory a process may use, this one by default: MemTotal or the lowest
    cgroup limit. Args: proc_cgroup: see `memory_limits`."""
    return min([_mem_total(), *(limit for _, limit in memory_limits(proc_cgroup))])


def free_memory(
    meminfo: Path = Path("/proc/meminfo"),
    proc_cgroup: Path = _OWN_CGROUP,
    mount: Path = _CGROUPS,
) -> int:
    """Return the bytes that can be allocated without swapping: MemAvailable, or what the cgroup
    limits leave; page cache counts as free."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    free = [int(match[1]) * 1024] if match else []
    for directory, limit in memory_limits(proc_cgroup, mount):
        usage = _read_limit(directory / "memory.current")
        prefix = ""
        if usage is None:
            usage, prefix = _read_limit(directory / "memory.usage_in_bytes"), "total_"
        try:
            text = (directory / "memory.stat").read_text()
        except OSError:
            text = ""
        cached = re.findall(rf"^{prefix}(?:in)?active_file (\d+)", text, re.MULTILINE)
        free.append(max(limit - (usage or 0) + sum(map(int, cached)), 0))
    return min(free, default=_mem_total())


def _mem_total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limits(
    proc_cgroup: Path = _OWN_CGROUP, mount: Path = _CGROUPS
) -> list[tuple[Path, int]]:
    """Return (directory, limit) of a process's memory cgroup and of each group above it that has a
    limit. Args: proc_cgroup: /proc/PID/cgroup of the process."""
    limits = []
    for directory in cgroup_directories("memory", proc_cgroup, mount):
        limit = _read_limit(directory / "memory.max")
        if limit is None:
            limit = _read_limit(directory / "memory.limit_in_bytes")
        if limit is not None:
            limits.append((directory, limit))
    return limits


def cgroup_directories(
    controller: str, proc_cgroup: Path = _OWN_CGROUP, mount: Path = _CGROUPS
) -> Iterator[Path]:
    """Yield the directory of a process's cgroup and of each group above it: version 2, and version
    1 of this controller.

    In a container without a cgroup namespace, the path in /proc names a group of the host that is
    not visible; the root of the mount is then the container's group, and the loop ends there.
    """
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            yield directory
            if directory == top:
                break


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    # cgroup v2 writes "max" for no limit, v1 a number near 2^63.
    return int(text) if text.isdigit() and 0 < int(text) < 1 << 60 else None
