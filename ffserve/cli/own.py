"""What a command starts and makes for itself: a daemon, processes, a directory to work in.

All of it is gone when the command ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from ffserve.errors import FFServeError, ServerUnavailable

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the end of the terminal and SIGTERM clean up as Ctrl-C does, and let them do so once."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = [signal.signal(number, interrupt) for number in signals]
    try:
        yield
    finally:
        for number, disposition in zip(signals, previous, strict=True):
            signal.signal(number, disposition)


@contextlib.contextmanager
def work_directory(prefix: str, directory: str | None) -> Iterator[str]:
    """Make a directory, on a disk where possible, and remove it in the end."""
    # /tmp is often memory, and then nothing would be read from a disk.
    places = [directory] if directory else [os.environ.get("TMPDIR"), "/var/tmp"]
    parent = next((p for p in places if p and os.access(p, os.W_OK | os.X_OK)), directory)
    work = tempfile.mkdtemp(prefix=prefix, dir=parent)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def python(module: str) -> list[str]:
    """Return the command that runs a module as this process would find it.

    ``python -m`` looks in the working directory first, where another ffserve may lie (a checkout
    that nothing was built in, beside the installed one that runs now).
    """
    program = f"import runpy, sys; sys.path[:] = {sys.path!r}; "
    program += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", program]


class Daemon:
    """A daemon that a command started: its process and its status."""

    def __init__(
        self,
        socket: str,
        process: subprocess.Popen[bytes],
        log_path: str,
        ask: Callable[[str], dict[str, Any]] | None = None,
    ) -> None:
        self.socket = socket
        self.process = process
        self._log_path = log_path
        self._ask = ask

    def status(self) -> dict[str, Any]:
        """Return the daemon's status; FFServeError with the daemon's log if it has ended."""
        from ffserve.client import connection

        try:
            return (self._ask or connection.status)(self.socket)
        except ServerUnavailable:
            if self.process.poll() is None:
                raise
        with open(self._log_path, errors="replace") as log:
            words = log.read().strip()
        raise FFServeError(
            f"the daemon ended with code {self.process.returncode}: {words or 'no output'}"
        )

    def await_start(self) -> None:
        """Return when it answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.status()
                return
            except ServerUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def stop(self) -> float:
        """Send SIGTERM; return how many seconds it took to go."""
        started = time.monotonic()
        _stop(self.process)
        if self.process.returncode != 0:
            raise FFServeError(f"the daemon ended with code {self.process.returncode}")
        return time.monotonic() - started


@contextlib.contextmanager
def daemon(
    socket: str,
    roots: Sequence[str],
    arena: int,
    options: Sequence[str] = (),
    *,
    program: Sequence[str] | None = None,
    ask: Callable[[str], dict[str, Any]] | None = None,
) -> Iterator[Daemon]:
    """Run a daemon while the context lasts; it answers when the context is entered.

    Args:
        socket: where; its log stands beside it.
        roots: what it serves.
        arena: bytes.
        options: more flags of `ffserve serve`.
        program: the command that runs ffserve; this process's ffserve if None.
        ask: returns the status of the daemon on a socket, or raises ServerUnavailable; by the
            protocol if None.
    Raises: FFServeError with the daemon's log when it does not start.
    """
    command = [*(program or python("ffserve")), "serve", "--socket", socket]
    command += ["--arena", str(arena), "--config", os.devnull, "--log-level", "warning"]
    for root in roots:
        command += ["--root", root]
    log_path = f"{socket}.log"
    with open(log_path, "wb") as log, running([*command, *options], stderr=log) as process:
        started = Daemon(socket, process, log_path, ask)
        started.await_start()
        yield started


@contextlib.contextmanager
def running(
    command: list[str],
    *,
    stdin: Any = subprocess.DEVNULL,
    stdout: Any = None,
    stderr: Any = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, its environment ours with changes; whatever happens, it and its children are
    gone afterwards."""
    process = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(environment or {})},
        # A group of its own: Ctrl-C reaches this process alone, which then ends the others.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _stop(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
