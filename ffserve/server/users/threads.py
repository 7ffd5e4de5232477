"""Threads: calls that take long, or wait for storage, run beside the event loop.

`UserThreads` has one thread for each user who has calls, and makes them one after another. So
storage that hangs delays the calls of the user whose files are on it, and nobody else's.
`in_thread` starts a thread for one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Thread:
    """The thread of a user. calls: to be made, None: it ends. count: those that have not ended."""

    thread: threading.Thread
    calls: SimpleQueue[Callable[[], object] | None]
    count: int = 0


class UserThreads:
    """One thread for each user who has calls.

    Args: name: of the threads. most: calls of one user that have not ended.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._threads: dict[Hashable, _Thread] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report to this loop."""
        self._loop = loop

    def call(self, user: Hashable, call: Callable[[], T], ended: Callable[[T], object]) -> bool:
        """Make a call after the earlier ones of the same user.

        Args: ended: called in the loop's thread with the result. What the call raises is raised in
            its place.
        Returns: False if it is not made, since too many of the user's calls have not ended, or no
            thread can be started.
        """
        thread = self._threads.get(user)
        if thread is None:
            with contextlib.suppress(RuntimeError):
                thread = self._threads[user] = self._started()
        if thread is None or thread.count >= self._most:
            return False
        thread.count += 1
        thread.calls.put(partial(self._make, user, call, ended))
        return True

    def _started(self) -> _Thread:
        calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        # Where storage never answers, the daemon does not wait for it at its end.
        thread = threading.Thread(target=_run, args=(calls,), name=self._name, daemon=True)
        thread.start()
        return _Thread(thread, calls)

    def _make(self, user: Hashable, call: Callable[[], T], ended: Callable[[T], object]) -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:
            failure = error
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._end, user, ended, result, failure)

    def _end(
        self,
        user: Hashable,
        ended: Callable[[Any], object],
        result: object,
        failure: BaseException | None,
    ) -> None:
        thread = self._threads[user]
        thread.count -= 1
        if not thread.count:
            del self._threads[user]
            thread.calls.put(None)
        if failure is not None:
            raise failure
        ended(result)

    def close(self, *, wait: bool) -> None:
        """End the threads, without the calls that have not begun. Args: wait: for the others."""
        for each in self._threads.values():
            while not each.calls.empty():
                with contextlib.suppress(Empty):  # the thread was quicker
                    each.calls.get_nowait()
            each.calls.put(None)
        for each in self._threads.values():
            if wait:
                each.thread.join()


def _run(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while (call := calls.get()) is not None:
        call()


async def in_thread(call: Callable[[], T]) -> T:
    """Return the result of a call in a thread of its own. The daemon does not wait for this thread
    when it ends: a file system that does not answer keeps it forever."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def end(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end, result, failure)

    run_in_thread(run)
    return await future


def run_in_thread(call: Callable[[], object]) -> None:
    """Make a call that may wait for a file system, in a thread of its own."""
    threading.Thread(target=call, name="ffserve-open", daemon=True).start()
