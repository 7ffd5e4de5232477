"""Child processes of the benchmark and of the demo: daemons, ways to read, training jobs.

A process and its children have ended when the context of the function that started it ends,
whatever the reason.
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

from ffserve.client import public as client
from ffserve.disk.output import write_error
from ffserve.errors import FFServeError, ServerUnavailable, printable

START_TIMEOUT_S = 20.0
POLL_S = 0.02


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, and ignore all signals after the first.

    The command then cleans up as it does after Ctrl-C.
    """
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
    """Make a temporary directory, in TMPDIR or /var/tmp by default, and remove it at the end."""
    # /tmp is often a tmpfs, from which a benchmark would read no disk.
    candidates = [directory] if directory else [os.environ.get("TMPDIR"), "/var/tmp"]
    parent = next((p for p in candidates if p and os.access(p, os.W_OK | os.X_OK)), directory)
    try:
        work = tempfile.mkdtemp(prefix=prefix, dir=parent)
    except OSError as error:
        raise write_error(error, parent or tempfile.gettempdir()) from error
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


# --------------------------------------------------------------------------- daemons


def command(module: str, interpreter: str | None = None) -> list[str]:
    """Return the command that runs a module with the ffserve of this process.

    ``python -m`` looks in the working directory first, where another ffserve may lie (a checkout in
    which nothing was built, beside the installed one).

    Args: interpreter: of another environment, whose packages come first.
    """
    packages_first = "sys.path[1:] + " if interpreter else ""
    program = f"import runpy, sys; sys.path[:] = {packages_first}{sys.path!r}; "
    program += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [interpreter or sys.executable, "-c", program]


def failed(what: str, text: str) -> FFServeError:
    """Return the error of a program that failed: its last line. All that it has written, such as a
    traceback, goes to standard error.

    Args: what: that it failed, and with which exit code. text: its output.
    """
    lines = [printable(line) for line in text.strip().splitlines()]
    if len(lines) > 1:
        print(
            f"{what}; it has written:", *(f"  {each}" for each in lines), sep="\n", file=sys.stderr
        )
    return FFServeError(f"{what}: {lines[-1] if lines else 'no output'}")


class Daemon:
    """A running daemon: its socket, its process and its status."""

    def __init__(
        self,
        socket: str,
        process: subprocess.Popen[bytes],
        log_path: str,
        ask: Callable[[str], dict[str, Any]],
    ) -> None:
        self.socket = socket
        self.process = process
        self._log_path = log_path
        self._ask = ask

    def status(self) -> dict[str, Any]:
        """Return the daemon's status.

        Raises: FFServeError when it has ended, whose log goes to standard error;
            ServerUnavailable.
        """
        try:
            return self._ask(self.socket)
        except ServerUnavailable:
            if self.process.poll() is None:
                raise
        with open(self._log_path, errors="replace") as log:
            raise failed(f"the daemon ended with code {self.process.returncode}", log.read())

    def await_start(self) -> None:
        """Return when the daemon answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.status()
                return
            except ServerUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def await_arena(self) -> None:
        """Return when the whole arena has been populated with memory."""
        while (arena := self.status()["arena"])["populated"] < arena["size"]:
            time.sleep(POLL_S)

    def stop(self) -> float:
        """Send SIGTERM and return the seconds until the daemon has ended."""
        started = time.monotonic()
        _stop(self.process)
        if self.process.returncode != 0:
            raise FFServeError(f"the daemon ended with code {self.process.returncode}")
        return time.monotonic() - started


@contextlib.contextmanager
def daemon(
    roots: Sequence[str],
    arena: int,
    options: Sequence[str] = (),
    *,
    program: Sequence[str] | None = None,
    ask: Callable[[str], dict[str, Any]] = client.status,
    before_exec: Callable[[], None] | None = None,
) -> Iterator[Daemon]:
    """Run a daemon for as long as the context lasts; it answers when the context begins.

    Args:
        roots: directories to serve.
        arena: bytes.
        options: further flags of `ffserve serve`.
        program: the command `ffserve`; by default that of this process.
        ask: returns the status of the daemon at a socket.
        before_exec: called in the child process, for example to join a cgroup.
    Raises: FFServeError when it does not start; its log goes to standard error.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ffserve-daemon-"))
        socket = os.path.join(directory, "s")
        arguments = [*(program or command("ffserve")), "serve", "--socket", socket]
        arguments += ["--arena", str(arena), "--config", os.devnull, "--log-level", "warning"]
        for root in roots:
            arguments += ["--root", root]
        log_path = f"{socket}.log"
        log = stack.enter_context(open(log_path, "wb"))
        process = stack.enter_context(
            running([*arguments, *options], stderr=log, before_exec=before_exec)
        )
        started = Daemon(socket, process, log_path, ask)
        started.await_start()
        yield started


# --------------------------------------------------------------------------- any process


@contextlib.contextmanager
def running(
    arguments: list[str],
    *,
    stdin: Any = subprocess.DEVNULL,
    stdout: Any = None,
    stderr: Any = None,
    environment: Mapping[str, str] | None = None,
    before_exec: Callable[[], None] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program; when the context ends, the program and its children have ended, too.

    Args:
        environment: variables to set besides those of this process.
        before_exec: called in the child process.
    """
    process = subprocess.Popen(
        arguments,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(environment or {})},
        preexec_fn=before_exec,  # noqa: PLW1509 (joins a cgroup: one write)
        # In a session of its own: Ctrl-C reaches this process only, which then ends the others.
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
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
