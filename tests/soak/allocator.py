"""What a process uses of its private memory, as it says itself.

A process has private memory for three reasons: it uses it; it has used it, and an allocator keeps
it for the next time; or it leaks. Only the allocators know the second: malloc (a client keeps up to
512 MiB, `engine/shm.py: keep_freed_memory`), and Python's own, which gives an arena of 1 MiB back
only if no object is left in it. Of a daemon that an attack made hold 40 MiB of objects for a moment
it keeps 20 MiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import time
from pathlib import Path

INTERVAL_S = 1.0
FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip
"""Of mallinfo2(3), glibc 2.33; fordblks are the free bytes of all arenas."""

KEPT_BY_PYTHON = re.compile(rb"(?:bytes in available blocks|unused pools[^=]*?) *= *([\d,]+)")
"""What its allocator says of itself."""
MOST_SAID = 64 << 10


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
                used = private_size("self") - mallinfo().fordblks - kept_by_python()
                path.write_text(str(used))
                time.sleep(INTERVAL_S)

    threading.Thread(target=work, name="allocator", daemon=True).start()


def kept_by_python() -> int:
    """Return the bytes that Python's allocator of small objects keeps for the next ones."""
    libc, text = ctypes.CDLL(None), ctypes.create_string_buffer(MOST_SAID)
    libc.fmemopen.restype, libc.fclose.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    file = libc.fmemopen(text, ctypes.c_size_t(MOST_SAID), b"w")
    ctypes.pythonapi._PyObject_DebugMallocStats(ctypes.c_void_p(file))
    libc.fclose(file)
    return sum(int(each.replace(b",", b"")) for each in KEPT_BY_PYTHON.findall(text.value))


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
