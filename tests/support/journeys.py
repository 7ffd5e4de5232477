"""Which files of the package a request passes, in the process that asks and in a daemon."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "ffserve"


class Recorder:
    """Notes each file of the package in which a function is called, in any thread of a process.

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
        """Note no more in this thread."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        os.close(self._fd)

    def _note(self, frame: Any, event: str, _: object) -> None:
        if event != "call":
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
                os.write(self._fd, f"{size} {place}\n".encode())


class Journey:
    """Follows requests through this process and a daemon that was started with `patch`."""

    def __init__(self, directory: Path) -> None:
        self._turn = directory / "turn"
        self._turn.write_bytes(b"")
        self._logs = [directory / "client", directory / "server"]
        support = Path(__file__).parent
        self.patch = (
            f"import sys; sys.path.insert(0, {str(support)!r})\n"
            f"from journeys import Recorder\n"
            f"Recorder({str(self._logs[1])!r}, {str(self._turn)!r}).start()"
        )

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        recorder = Recorder(str(self._logs[0]), str(self._turn))
        recorder.start()
        try:
            yield
        finally:
            recorder.stop()

    def of(self, call: Callable[[], object]) -> set[str]:
        """Return the files that a call passes, without those that are busy anyway."""
        with self._turn.open("ab") as turn:
            turn.write(b".")
        size = self._turn.stat().st_size
        with self._recorded():
            call()
        found: set[str] = set()
        for log in self._logs:
            for line in log.read_text().splitlines() if log.exists() else ():
                number, _, place = line.partition(" ")
                if int(number) == size:
                    found.add(place)
        return found
