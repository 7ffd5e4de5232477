"""HDFS: the clients of hdfs-native, and what their errors mean.

Not the file system that fsspec has for `hdfs://`: that one runs a Java machine in this process,
which does not survive a fork. Nor is hdfs-native's in fsspec's cache, which is freed in a child: to
free there what a fork has copied would wait for threads that the child does not have.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import errno
import importlib
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

from ffserve.store.access import CONNECT_S, SILENT_S

PROTOCOLS = ("hdfs", "viewfs")
BROKEN = {errno.EPIPE, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.EIO,
          errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED}  # fmt: skip
"""Errors of the system that mean a lost connection."""
_OPTIONS = {
    # Each NameNode of a name service is asked twice.
    "dfs.client.failover.max.attempts": "4",
    "dfs.client.failover.sleep.base.millis": "50",
    "dfs.client.failover.sleep.max.millis": "200",
    "dfs.client.socket-timeout": str(int(SILENT_S * 1000)),
}
_RPC_ERROR = re.compile(r'RPCError\("(?:[\w.]+\.)?([\w$]+)", "(.*?)(?:\\n|"\)$)', re.DOTALL)
"""An exception of a NameNode in hdfs-native's text: its class, and the first line it says."""
_DENIED = (
    "AccessControlException", "AuthorizationException", "SecretManager$InvalidToken", "SASLError",
    "GSSAPIError", "NoSASLMechanism",
)  # fmt: skip
_LATER = (
    "StandbyException", "RetriableException", "SafeModeException", "DataTransferError",
    "BlocksNotFound", "ChecksumError",
)  # fmt: skip
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""The number of a system's error in the text of a package in Rust."""

inherited: list[Any] = []
"""Open files of the parent process, which are never freed here."""
_clients: dict[tuple[Any, ...], Any] = {}
"""One for all threads: each has threads of its own. The process that made one is part of its key,
and none is ever removed."""
_clients_lock = threading.Lock()


class Meaning(enum.Enum):
    """What an error means, of which hdfs-native has one class for most."""

    DENIED = enum.auto()
    UNKNOWN = enum.auto()
    """No such name service."""
    LATER = enum.auto()
    BROKEN = enum.auto()
    """The connection."""


def meaning(text: str) -> Meaning | None:
    """Return what the text of an error means; None: it does not tell."""
    number = _OS_ERROR.search(text)
    if any(word in text for word in _DENIED):
        return Meaning.DENIED
    if "No NameNode hosts found" in text:
        return Meaning.UNKNOWN
    if any(word in text for word in _LATER):
        return Meaning.LATER
    if "failed to lookup address" in text or (number and int(number[1]) in BROKEN):
        return Meaning.BROKEN
    return None


def shortened(text: str) -> str:
    """Return the text of an error; of an exception of a NameNode its class and its first line."""
    remote = _RPC_ERROR.match(text)
    return f"{remote[1]}: {remote[2]}" if remote else text


class _Calls:
    """The calls of hdfs-native that run, in all threads. The end of the process waits for them:
    Python before 3.14 ends a thread that comes back to it then, and Rust aborts the process."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._count = 0
        self._ending = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        with self._change:
            # Not the main thread, which ends the process.
            while self._ending and threading.current_thread() is not threading.main_thread():
                self._change.wait()
            self._count += 1
        try:
            yield
        finally:
            with self._change:
                self._count -= 1
                self._change.notify_all()

    def end(self) -> None:
        with self._change:
            self._ending = True
            self._change.wait_for(lambda: not self._count, CONNECT_S)


_calls = _Calls()


def call() -> contextlib.AbstractContextManager[None]:
    """Return the context of a call of hdfs-native."""
    return _calls.one()


@atexit.register
def _end_calls() -> None:
    _calls.end()


def _renew_locks() -> None:
    """This process is a child: locks are as the parent's threads left them."""
    global _clients_lock, _calls
    _clients_lock, _calls = threading.Lock(), _Calls()


os.register_at_fork(after_in_child=_renew_locks)


def serves(url: str) -> bool:
    """Whether a URL is one of HDFS."""
    return url.partition("://")[0].lower() in PROTOCOLS


def client(url: str, conf: dict[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Args: conf: options that were set for fsspec.
    Raises: ImportError: the package is missing; what hdfs-native raises.
    """
    module = importlib.import_module("hdfs_native.fsspec")
    protocol, _, rest = url.partition("://")
    key = os.getpid(), protocol.lower(), rest.partition("/")[0], repr(sorted(conf.items()))
    kind = {"hdfs": module.HdfsFileSystem, "viewfs": module.ViewfsFileSystem}[protocol.lower()]
    with _clients_lock:
        if key not in _clients:
            given = {name: value for name, value in _OPTIONS.items() if name not in conf}
            options = {**kind._get_kwargs_from_urls(url), **given}
            _clients[key] = kind(skip_instance_cache=True, **options)
        return _clients[key], kind._strip_protocol(url)
