"""Run the command line: in this process, or in a process of its own where it serves."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ffserve import cli

ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "error", "COLUMNS": "100"}


SERVING = ("serve", "demo", "bench", "run")
"""Commands that are a process of their own also here."""


def run(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[bytes]:
    """Run ``ffserve`` with arguments, expecting an exit code."""
    words = list(map(str, arguments))
    done = (spawned if words[0] in SERVING else called)(words)
    assert done.returncode == code, (done.stdout[-2000:], done.stderr[-2000:])
    assert b"Traceback" not in done.stderr
    return done


def spawned(words: list[str], **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "ffserve", *words],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=100,
        env={**ENVIRONMENT, **environment},
    )  # fmt: skip


def called(words: list[str]) -> subprocess.CompletedProcess[bytes]:
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setenv("COLUMNS", ENVIRONMENT["COLUMNS"])
        patch.delenv("FFSERVE_SOCKET", raising=False)
        code = cli.run(words)
    out.flush()
    err.flush()
    return subprocess.CompletedProcess(words, code, out.buffer.getvalue(), err.buffer.getvalue())


def text_of(*arguments: str | Path, code: int = 0) -> str:
    return run(*arguments, code=code).stdout.decode()


def error_of(*arguments: str | Path, code: int) -> str:
    done = run(*arguments, code=code)
    lines = done.stderr.decode().splitlines()
    assert 1 <= len(lines) <= 4
    return "\n".join(lines)


def on_a_terminal(
    *arguments: str | Path, keyboard: bool = False, **environment: str
) -> tuple[bytes, int]:
    """Run ``ffserve`` with a terminal for its output, and with `keyboard` for its input as well;
    return what it wrote and the exit code."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "ffserve", *map(str, arguments)],
            stdin=theirs if keyboard else subprocess.DEVNULL, stdout=theirs, stderr=theirs,
            env={**ENVIRONMENT, "TERM": "xterm", **environment},
        )  # fmt: skip
        os.close(theirs)
        output = b""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 1)[0]:
                try:
                    piece = os.read(ours, 65536)
                except OSError:  # the other side was closed
                    break
                output += piece
        return output, process.wait(20)
    finally:
        os.close(ours)
