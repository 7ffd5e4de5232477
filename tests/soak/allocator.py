"""What a process uses of its private memory, as it says itself.

A process has private memory for three reasons: it uses it; it has used it, and malloc keeps it for
the next time (a client up to 512 MiB, `engine/shm.py: keep_freed_memory`); or it leaks. Only malloc
knows the second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path

INTERVAL_S = 1.0
FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip
"""Of mallinfo2(3), glibc 2.33; fordblks are the free bytes of all arenas."""


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def report(folder: str) -> None:
    """Begin to write the bytes that this process uses to FOLDER/PID, in a thread."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return
    mallinfo.restype = _Mallinfo

    def work() -> None:
        path = Path(folder, str(os.getpid()))
        with contextlib.suppress(OSError):  # the run is over
            while True:
                used = private_size("self") - mallinfo().fordblks
                path.write_text(str(used))
                time.sleep(INTERVAL_S)

    threading.Thread(target=work, name="allocator", daemon=True).start()


def private_size(pid: int | str) -> int:
    """Return the bytes of a process that are in memory and of no file. Raises: OSError,
    ValueError: it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has ended")


def used_size(folder: Path, pid: int) -> int:
    """Return the bytes that a process uses; all that is private if it has not said."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / str(pid)).read_text())
    return private_size(pid)
