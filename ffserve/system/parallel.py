"""Run a few long tasks in worker processes, with progress reports and complete errors.

``concurrent.futures`` lacks two things: the error for a killed worker must name the task it was
running, and a running task must be able to report progress.
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
"""A task calls it with the samples and bytes done since its last call."""


class WorkerError(FFServeError):
    """A worker process ended without a result."""


class _Remote(Exception):
    """The traceback of a worker process, as the cause of an error raised in this process."""

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
        task: a module-level function for ``method="spawn"``, any callable for ``"fork"``. Its last
            argument is a ``Progress`` function to call from time to time.
        arguments: one tuple per task.
        jobs: number of worker processes; 1 runs all tasks in this process.
        method: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
        progress: called in this process with the reports of all tasks.
    Returns: the results in the order of ``arguments``.
    Raises:  the error of the first task that failed, after all workers have ended; WorkerError if
             a worker process died.
    """
    report = progress or no_progress
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
                    # Python 3.12 warns about fork in a process with threads. The child only runs
                    # the task and takes no lock that another thread may hold.
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
    """Defer SIGINT while a worker starts, and let the worker inherit a mask that blocks it.

    A terminal sends SIGINT to the whole process group, and a worker that is still starting would
    print a traceback. This process terminates its workers instead. The mask alone does not defer
    the signal here, because another thread may receive it.
    """
    came: list[tuple[int, Any]] = []
    handler = signal.getsignal(signal.SIGINT)
    held = callable(handler) and threading.current_thread() is threading.main_thread()
    if held:
        signal.signal(signal.SIGINT, lambda *given: came.append(given))
    if method != "fork":
        resource_tracker.ensure_running()  # starting it later would unblock SIGINT
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
            f"the worker process for {given[0]!r} died with exit status {process.exitcode}",
            hint="a negative status is a signal number; for -9 check for a lack of memory",
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
    """Pickle an error and its traceback; a WorkerError with its text if it does not pickle."""
    with contextlib.suppress(Exception):
        packed = pickle.dumps((error, trace))
        pickle.loads(packed)
        if isinstance(error, Exception):
            return packed
    return pickle.dumps((WorkerError(f"{type(error).__name__}: {error}"), trace))


def no_progress(samples: int, size: int) -> None:
    """Ignore a progress report."""
