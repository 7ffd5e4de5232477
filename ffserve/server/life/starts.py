"""Failed starts: a daemon (or a view, `ffserve mount`) that has failed or was killed soon after its
start waits before the next start, longer each time.

systemd starts the daemon 100 ms after each failure and never gives up. This module counts starts
after which the daemon did not serve for SERVED_S, and the next daemon waits accordingly. The count
is in a memory file in the service manager's store (`fd_store.py`): `kill -9` does not lose it, and
`systemctl stop` does. RestartSteps= (systemd 254) has no part in it: it counts all restarts since
the last one by hand and never forgets them, so a daemon that fails once a month would be away for
long in the end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Sequence
from typing import NoReturn

from ffserve.system.memfd import sealed_file
from ffserve.system.systemd import notify, passed_names

NAME = "ffserve-starts"
SERVED_S = 2.0
"""A daemon that has served for this long was started successfully."""
FIRST_WAIT_S, MOST_WAIT_S = 0.2, 10.0
"""The wait doubles with each failure. Jobs that require a daemon wait 30 s for the next one."""
TURNED_AWAY_S = 4.0
"""A client waits 5 s for the daemon's greeting. While the daemon will wait for longer than this,
connections are closed at once, so that jobs read by themselves."""
_FIRST_PASSED_FD = 3
_SIZE = 4096


def wait_turn() -> int:
    """Count this start, and wait if earlier ones have failed.

    SIGTERM meanwhile ends the process, and the next start does not wait.

    Returns: how many starts have failed in a row; 0 if systemd does not run this process.
    """
    if not {"INVOCATION_ID", "NOTIFY_SOCKET"} <= os.environ.keys():
        return 0
    failed = _count(passed_names() or [])
    if not failed:
        return 0
    wait_s = min(FIRST_WAIT_S * 2 ** (failed - 1), MOST_WAIT_S)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        notify(f"STATUS=start {failed + 1} follows in {wait_s:g} s: the last {failed} failed")
        _wait(time.monotonic() + wait_s)
    finally:
        signal.signal(signal.SIGTERM, before)
    return failed


def forget() -> None:
    """Count from 0 again: the daemon serves, or has ended on purpose."""
    notify(f"FDSTOREREMOVE=1\nFDNAME={NAME}")


def _count(names: Sequence[str]) -> int:
    """Return how many starts have failed; count this one as failed until `forget`."""
    if NAME not in names:
        fd, failed = sealed_file(NAME, _SIZE), 0
        notify(f"FDSTORE=1\nFDPOLL=0\nFDNAME={NAME}", fd)
    else:
        fd = os.dup(_FIRST_PASSED_FD + names.index(NAME))
        failed = int.from_bytes(os.pread(fd, 1, 0), "little")
    os.pwrite(fd, min(failed + 1, 255).to_bytes(1, "little"), 0)
    os.close(fd)
    return failed


def _wait(deadline: float) -> None:
    if not stat.S_ISSOCK(os.fstat(_FIRST_PASSED_FD).st_mode):  # no socket, as those come first
        time.sleep(max(deadline - time.monotonic(), 0.0))
        return
    with socket.socket(fileno=os.dup(_FIRST_PASSED_FD)) as listener:
        listener.setblocking(False)
        while (left_s := deadline - time.monotonic()) > 0:
            if left_s <= TURNED_AWAY_S:
                time.sleep(left_s)
            elif select.select([listener], [], [], left_s - TURNED_AWAY_S)[0]:
                with contextlib.suppress(OSError):  # it has gone
                    listener.accept()[0].close()


def _end(_number: int, _frame: object) -> NoReturn:
    forget()
    raise SystemExit(0)
