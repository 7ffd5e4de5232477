"""Memory of the machine that this process may use, with the limits of its cgroups."""

from __future__ import annotations

import os
import re
from pathlib import Path


def usable_memory() -> int:
    """Return the bytes of memory this process may use: MemTotal or the lowest cgroup limit."""
    limits = [_mem_total(), *_cgroup_limits()]
    return min(limits)


def free_memory(
    meminfo: Path = Path("/proc/meminfo"),
    proc_cgroup: Path = Path("/proc/self/cgroup"),
    mount: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Return the bytes that can be allocated without swapping: MemAvailable, or what the cgroup
    limits leave; page cache counts as free."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    free = [int(match[1]) * 1024] if match else []
    for directory, limit in _cgroups(proc_cgroup, mount):
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


def _cgroup_limits(
    proc_cgroup: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    return [limit for _, limit in _cgroups(proc_cgroup, mount)]


def _cgroups(proc_cgroup: Path, mount: Path) -> list[tuple[Path, int]]:
    """Return (directory, limit) of this process's memory cgroup and of each group above it.

    In a container without a cgroup namespace, the path in /proc names a group of the host that is
    not visible; the root of the mount is then the container's group, and the loop ends there.
    """
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            limit = _read_limit(directory / name)
            if limit is not None:
                limits.append((directory, limit))
            if directory == top:
                break
    return limits


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    # cgroup v2 writes "max" for no limit, v1 a number near 2^63.
    return int(text) if text.isdigit() and 0 < int(text) < 1 << 60 else None
