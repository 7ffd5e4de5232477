"""Questions about paths, each asked in a process of its own: a file system may never answer.

A process that waits for a silent file system cannot be killed, and a thread of it cannot be left
alone, since the process does not end before it does. So a child asks, and one that does not answer
in time is left to the kernel. The children are forked before this process has threads; they hold
nothing of it but the pipe for their answer, so that nobody waits for their output.

Nothing is written anywhere: files are opened for reading.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

TIMEOUT_S = 5.0
"""A file system that does not answer within this time is reported."""
MOST_FILES = 256
"""This many files of a directory are opened at most."""

Answer: TypeAlias = "dict[str, Any] | None"
"""None: the file system did not answer in time."""


def ask(questions: Sequence[tuple[Callable[[str], dict[str, Any]], str]]) -> list[Answer]:
    """Ask all questions at the same time; return the answers.

    Args: questions: functions of this module, and the path that each is about.
    """
    deadline = time.monotonic() + TIMEOUT_S
    children = [_fork(question, path) for question, path in questions]
    return [_collect(*child, deadline) for child in children]


def _fork(question: Callable[[str], dict[str, Any]], path: str) -> tuple[int, int]:
    """Return a child's number, and the pipe through which its answer comes."""
    here, there = os.pipe()
    pid = os.fork()
    if pid:
        os.close(there)
        return pid, here
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        answer = os.dup2(there, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        try:
            found = question(path)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}", "code": "error"}
        os.write(answer, json.dumps(found).encode())
    finally:
        os._exit(0)


def _collect(pid: int, pipe: int, deadline: float) -> Answer:
    output = b""
    try:
        while piece := _read(pipe, deadline):
            output += piece
        if piece is None:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            _wait(pid, deadline)
    finally:
        os.close(pipe)
    # The answer of a child that was killed or failed cannot be used.
    return json.loads(output) if piece is not None and output else None


def _read(pipe: int, deadline: float) -> bytes | None:
    """Return the next bytes; None: none came in time."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        return None
    return os.read(pipe, 65536)


def _wait(pid: int, deadline: float) -> None:
    """Wait for the end of a child, but not for one that cannot end."""
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.001)


# ---- questions: they run in a child -----------------------------------------------------------


def place(path: str) -> dict[str, Any]:
    """Tell what a path is without symbolic links, or why nothing is there."""
    try:
        os.stat(path)
    except (OSError, ValueError) as error:
        return {"error": getattr(error, "strerror", None) or str(error)}
    with contextlib.suppress(OSError):  # the first access to a mount that has gone
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    return {"real": os.path.realpath(path)}


def data(path: str) -> dict[str, Any]:
    """Tell what a job finds at a path: a record file, a directory of them, or a pattern."""
    from ffserve import formats
    from ffserve.dataset.paths import expand_paths
    from ffserve.errors import AccessDenied, FFServeError

    try:
        files = expand_paths(path, suffixes=formats.suffixes)
    except FFServeError as error:
        answer: dict[str, Any] = {"error": error.message, "code": error.code}
        if isinstance(error, AccessDenied):
            answer["closed"] = closed_part(os.path.abspath(path))
        return answer
    return {"files": len(files), **_look(files[:MOST_FILES])}


def _look(files: Sequence[str]) -> dict[str, Any]:
    """Open files as a job does, and one of them as the daemon does."""
    from ffserve.disk.files import open_regular
    from ffserve.engine.io import file_system_type, open_direct
    from ffserve.errors import AccessDenied, FFServeError

    answer: dict[str, Any] = {"unreadable": 0, "private": 0, "newest": 0.0}
    for path in files:
        try:
            fd = open_regular(path)
        except FFServeError as error:
            if not answer["unreadable"]:
                answer["error"] = f"{path}: {error.message}"
                if isinstance(error, AccessDenied):
                    answer["closed"] = closed_part(path)
            answer["unreadable"] += 1
            continue
        try:
            found = os.fstat(fd)
            answer["private"] += found.st_mode & 0o444 != 0o444
            answer["newest"] = max(answer["newest"], found.st_mtime)
            if "file" not in answer:
                answer["file"] = os.path.realpath(path)
                answer["device"] = [os.major(found.st_dev), os.minor(found.st_dev)]
                answer["file_system"] = file_system_type(fd)
                direct, answer["alignment"] = open_direct(fd)
                os.close(direct)
        finally:
            os.close(fd)
    return answer


def closed_part(path: str) -> dict[str, Any]:
    """Return the first directory above a path that this user may not search, or else the path; with
    its mode and its group."""
    part = "/"
    for name in path.strip("/").split("/"):
        if not os.access(part, os.X_OK, effective_ids=True):
            break
        part = os.path.join(part, name)
    found = os.stat(part)
    return {"path": part, "mode": found.st_mode, "group": found.st_gid}
