"""Daemons that readers start for their user."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


def daemons(socket: str) -> list[int]:
    """The processes that serve a socket, or are about to."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"serve" in command and socket.encode() in command:
            found.append(int(entry.name))
    return found


@contextlib.contextmanager
def own_daemons(place: Path) -> Iterator[str]:
    """The user's own socket below a directory; what was started there is killed at the end."""
    runtime = place / "run"
    runtime.mkdir(mode=0o700)
    socket = str(runtime / "ffserve" / "ffserve.sock")
    try:
        yield socket
    finally:
        for pid in daemons(socket):
            os.kill(pid, signal.SIGKILL)


def use(socket: str, patch: pytest.MonkeyPatch, *, machine: str | None = None) -> None:
    """Have readers of this process start and find a daemon at the user's own socket.

    Args: machine: socket of a daemon that they find first.
    """
    place = Path(socket).parents[2]
    patch.setenv("XDG_RUNTIME_DIR", str(place / "run"))
    patch.setenv("FFSERVE_SOCKET", machine or socket)  # root has no other one of its own
    patch.setenv("FFSERVE_STORE", str(place / "own-store"))
    patch.delenv("FFSERVE_START", raising=False)
