"""Run a few long tasks in processes of their own, with progress and with whole errors.

``concurrent.futures`` would do but for two things: a worker that is killed must be named with
what it was writing, and progress has to come back while a task runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any

from ffserve.errors import FFServeError

Progress = Callable[[int, int], None]
"""Called with samples and bytes done since the last call."""


class WorkerError(FFServeError):
    """A worker process ended without a result."""


class _Remote(Exception):
    """Carries the traceback of another process as the cause of an error raised here."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace)
        self.trace = trace

    def __str__(self) -> str:
        return f"in a worker process:\n{self.trace}"


def run(
    task: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    jobs: int,
    method: str,
    progress: Progress | None = None,
) -> list[Any]:
    """Call ``task(*arguments[k], report)`` for every k, up to ``jobs`` at a time.

    Args:
        task: module-level function for ``method="spawn"``, any callable for ``"fork"``; its last
            argument is a ``Progress`` to call now and then.
        arguments: one tuple a task.
        jobs: processes at a time; 1 runs everything in this process.
        method: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
        progress: called here with what the tasks report.
    Returns: the results in the order of ``arguments``.
    Raises:  the error of the first task that failed, once all workers are gone; WorkerError when
             a worker died.
    """
    report = progress or _nobody
    if jobs <= 1 or len(arguments) <= 1:
        return [task(*given, report) for given in arguments]
    context: Any = multiprocessing.get_context(method)
    results: list[Any] = [None] * len(arguments)
    waiting = list(enumerate(arguments))[::-1]
    running: dict[Any, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                k, given = waiting.pop()
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(task, given, there), daemon=False)
                with warnings.catch_warnings(), _uninterrupted(method):
                    # Python 3.12 warns of a fork beside threads. The child runs the task alone,
                    # and waits for no lock that one of those threads may hold.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                    running[here] = (k, process)
                there.close()
            for connection in multiprocessing.connection.wait(list(running)):
                k, process = running[connection]
                kind, value = _receive(connection, process, arguments[k])
                if kind == "progress":
                    report(*value)
                    continue
                results[k] = value
                process.join()
                del running[connection]
                connection.close()  # type: ignore[union-attr]
    finally:
        for connection, (_, process) in running.items():
            process.terminate()
            process.join()
            connection.close()
    return results


@contextlib.contextmanager
def _uninterrupted(method: str) -> Iterator[None]:
    """Start a process without Ctrl-C in the middle, and one that knows nothing of Ctrl-C.

    A terminal sends it to the whole group; a worker that had only half begun, or half heard what
    to do, would show a traceback. It inherits what is blocked here, and ends when it is told to.
    Blocking alone would not do here: another thread may take the signal.
    """
    came: list[tuple[int, Any]] = []
    handler = signal.getsignal(signal.SIGINT)
    held = callable(handler) and threading.current_thread() is threading.main_thread()
    if held:
        signal.signal(signal.SIGINT, lambda *given: came.append(given))
    if method != "fork":
        resource_tracker.ensure_running()  # which would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if held:
            signal.signal(signal.SIGINT, handler)
    if came and callable(handler):
        handler(*came[0])


def _receive(connection: Any, process: Any, given: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        kind, value = connection.recv()
    except EOFError:
        process.join()
        raise WorkerError(
            f"the worker process for {given[0]!r} died (exit status {process.exitcode})",
            hint="a negative status is a signal; -9 is often the kernel short of memory",
        ) from None
    if kind == "error":
        error, trace = pickle.loads(value)  # from our own worker, through our own pipe
        raise error from _Remote(trace)
    return kind, value


def _work(task: Callable[..., Any], given: tuple[Any, ...], connection: Any) -> None:
    def report(samples: int, size: int) -> None:
        connection.send(("progress", (samples, size)))

    try:
        answer = ("done", task(*given, report))
    except BaseException as error:
        answer = ("error", _packed(error, traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError):
        connection.send(answer)


def _packed(error: BaseException, trace: str) -> bytes:
    """Pickle an error, or what it says if it does not survive that."""
    with contextlib.suppress(Exception):
        packed = pickle.dumps((error, trace))
        pickle.loads(packed)
        if isinstance(error, Exception):
            return packed
    return pickle.dumps((WorkerError(f"{type(error).__name__}: {error}"), trace))


def _nobody(samples: int, size: int) -> None:
    """Progress that nobody asked for."""
