"""The facts about a machine on which the figures of a benchmark depend."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np

import ffserve
from ffserve.bench.ceilings import has_fio


def machine(folder: str) -> dict[str, Any]:
    """Return what figures depend on; nothing identifies the machine or its user."""
    from ffserve.engine.io import describe

    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "file_system": _file_system(folder),
        "disk": _disk(folder),
        "read_ahead_kib": _read_ahead(folder),
        "engine": describe(),
        "fio": has_fio(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ffserve": ffserve.__version__,
    }


def _disk(folder: str) -> str:
    """Return the kind of block device that holds a directory, such as "nvme" or "vda"."""
    path = _device(folder)
    if not path.exists():
        return "none"  # tmpfs, a network
    backing = path / "loop" / "backing_file"
    if not backing.exists():
        return re.sub(r"\d.*", "", path.resolve().name)
    memory = _file_system(os.path.dirname(backing.read_text().strip())) == "tmpfs"
    return "loop device in memory" if memory else "loop device"


def _device(folder: str) -> Path:
    device = os.stat(folder).st_dev
    return Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")


def _read_ahead(folder: str) -> int | None:
    """Return how many KiB the kernel reads at once for who maps a file; None without a device."""
    device = _device(folder).resolve()
    for queue in (device / "queue", device.parent / "queue"):  # a partition has none
        if queue.exists():
            return int((queue / "read_ahead_kb").read_text())
    return None


def _file_system(folder: str) -> str:
    folder = os.path.realpath(folder)
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        below = folder == mount or folder.startswith(mount.rstrip("/") + "/")
        if below and len(mount) >= len(best):
            best, kind = mount, name
    return kind


def describe_machine(facts: dict[str, Any]) -> str:
    """Return the machine in one line."""
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, Linux "
        f"{facts['kernel']}, {facts['file_system']} on {facts['disk']}"
        + (f", the disk limited to {limit}" if (limit := facts.get("disk_limit")) else "")
        + f"; {facts['engine']}"
    )
