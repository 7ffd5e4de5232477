"""Which files of the package a request passes, in the process that asks and in a daemon."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[2] / "ffserve"
LATE_S = 20.0
"""For what a daemon does after it has answered."""


class Passed(NamedTuple):
    """The files that were entered in the client's processes, and in the daemon."""

    client: set[str]
    daemon: set[str]

    @property
    def all(self) -> set[str]:
        return self.client | self.daemon


class Recorder:
    """Notes each file of the package in which a function is called, in any thread of a process.
    That a module is imported is not noted.

    Args: log: gets a line per file. turn: a file; when its size changes, all is noted anew.
    """

    def __init__(self, log: str, turn: str) -> None:
        self._fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._turn = turn
        self._seen: set[str] = set()
        self._size = -1

    def start(self) -> None:
        """Note from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Note no more: neither in this thread nor in others that have begun meanwhile."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _note(self, frame: Any, event: str, _: object) -> None:
        if event != "call" or self._fd < 0 or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return
        name = frame.f_code.co_filename
        size = os.stat(self._turn).st_size
        if size != self._size:
            self._size = size
            self._seen.clear()
        if name not in self._seen:
            self._seen.add(name)
            if name.startswith(f"{PACKAGE}/"):
                place = os.path.relpath(name, PACKAGE)
                with contextlib.suppress(OSError):  # stopped meanwhile
                    os.write(self._fd, f"{size} {place}\n".encode())


class Journey:
    """Follows requests through this process and a daemon that was started with `patch`."""

    def __init__(self, directory: Path) -> None:
        self._turn = directory / "turn"
        self._turn.write_bytes(b"")
        self._logs = [directory / "client", directory / "server"]
        for log in self._logs:
            log.write_bytes(b"")
        support = Path(__file__).parent
        self.patch = (
            f"import sys; sys.path.insert(0, {str(support)!r})\n"
            f"from journeys import Recorder\n"
            f"Recorder({str(self._logs[1])!r}, {str(self._turn)!r}).start()\n"
        )

    def recorder(self) -> Recorder:
        """Return a recorder of a process of the client."""
        return Recorder(str(self._logs[0]), str(self._turn))

    def of(self, call: Callable[[], object], awaited: Set[str] = frozenset()) -> Passed:
        """Return the files that a call passes.

        Args: awaited: files that a request passes, some of them perhaps after it was answered.
        """
        with self._turn.open("ab") as turn:
            turn.write(b".")
        recorder = self.recorder()
        recorder.start()
        try:
            call()
        finally:
            recorder.stop()
        deadline = time.monotonic() + LATE_S
        while not awaited <= (found := self._noted()).all and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def _noted(self) -> Passed:
        size = str(self._turn.stat().st_size)
        lines = ([line.split(" ") for line in log.read_text().splitlines()] for log in self._logs)
        return Passed(*({place for number, place in noted if number == size} for noted in lines))
