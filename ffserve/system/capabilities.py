"""Capabilities of a process, as the kernel shows them in /proc/PID/status."""

from __future__ import annotations

import resource

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_IPC_LOCK, CAP_SYS_ADMIN = 1, 2, 14, 21


def has_capability(*numbers: int, status: str = "") -> bool:
    """Return whether a process has one of these, effectively.

    Args: status: the text of /proc/PID/status; by default that of this process.
    """
    if not status:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            status = file.read()
    effective = int(status.partition("\nCapEff:")[2].split()[0], 16)
    return any(effective >> number & 1 for number in numbers)


def lockable_size() -> int | None:
    """Return how many bytes this process may lock in memory; None: any number."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY or has_capability(CAP_IPC_LOCK) else limit
