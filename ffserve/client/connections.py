"""What a process has to do with daemons: its connections, and the job that it belongs to.

All readers and threads of a process share one connection a socket and job. A connection that broke
stays broken: whoever needs the daemon asks `connect` for a new one. After a fork the child drops
the parent's connections and makes its own.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import threading
import uuid
import weakref
from typing import Any

from ffserve.client.connection import Connection


class SharedConnection(Connection):
    """A connection that is closed when the last of its readers leaves. Made by `connect`."""

    def leave(self) -> None:
        """A reader needs the connection no more; the last one closes it."""
        with _lock:
            self.readers -= 1
            if self.readers > 0:
                return
            key = self.path, self.job
            if _connections.get(key) is self:
                del _connections[key]
        self.close()


_lock = threading.Lock()
_connections: dict[tuple[str, str], SharedConnection] = {}
"""By socket and job."""
_job: str | None = None
_job_inherited = False
_fork_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_leaving: multiprocessing.util.Finalize | None = None


def job_name() -> str:
    """Return the name of the training run: made once, inherited by workers however started."""
    global _job
    if _job is None:
        _job = uuid.uuid4().hex
    return _job


def join_job(name: str) -> None:
    """Belong to a job that another process began, unless this process has one already."""
    global _job, _job_inherited
    if _job is None:
        _job, _job_inherited = name, True


def lead_job() -> None:
    """Be a training process, not the worker of one: who announces is that.

    Training processes that one parent made (ranks, a sweep's runs) have inherited its job. The
    orders that they announce would then be taken for those of one job, each in the other's place:
    so each begins a job of its own. Connections that it has already stay in the inherited one.
    """
    global _job, _job_inherited
    if _job_inherited:
        _job, _job_inherited = None, False


def connect(path: str) -> SharedConnection:
    """Return this process's connection to the daemon in its job, made anew if it broke."""
    global _leaving
    with _lock:
        if _leaving is None:
            # Worker processes of multiprocessing end without atexit; they run finalizers.
            _leaving = multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)
        key = path, job_name()
        connection = _connections.get(key)
        if connection is None or not connection.alive:
            connection = _connections[key] = SharedConnection(*key)
        connection.readers += 1
        return connection


def after_fork(listener: Any) -> None:
    """Have `listener.after_fork()` called in every child, after the connections were dropped."""
    _fork_listeners.add(listener)


def _in_child() -> None:
    global _lock, _leaving, _job_inherited
    _leaving = None
    _job_inherited = _job is not None
    _lock = threading.Lock()
    for connection in _connections.values():
        connection.after_fork()
    _connections.clear()
    for listener in list(_fork_listeners):
        listener.after_fork()


os.register_at_fork(after_in_child=_in_child)


def _at_exit() -> None:
    """Say goodbye for readers that nobody closed: the daemon gets their last counters."""
    with _lock:
        left = list(_connections.values())
        _connections.clear()
    for connection in left:
        connection.close()


atexit.register(_at_exit)
