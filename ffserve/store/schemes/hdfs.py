"""HDFS, with hdfs-native: its clients, and the meaning of the texts of its errors.

The file system that fsspec has for `hdfs://` is not used: it runs a Java machine in this process,
which does not survive a fork. File systems of hdfs-native are not in fsspec's cache either. That is
freed in a child, and freeing a copied client there would wait for threads that the child lacks.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

from ffserve.store.schemes.scheme import BROKEN, Meaning, Options, Scheme

_FAILOVER = {
    # Each NameNode of a name service is asked twice.
    "dfs.client.failover.max.attempts": "4",
    "dfs.client.failover.sleep.base.millis": "50",
    "dfs.client.failover.sleep.max.millis": "200",
}
_RPC_ERROR = re.compile(r'RPCError\("(?:[\w.]+\.)?([\w$]+)", "(.*?)(?:\\n|"\)$)', re.DOTALL)
"""An exception of a NameNode in hdfs-native's text: its class, and the first line of its
message."""
_DENIED = (
    "AccessControlException", "AuthorizationException", "SecretManager$InvalidToken", "SASLError",
    "GSSAPIError", "NoSASLMechanism",
)  # fmt: skip
_LATER = (
    "StandbyException", "RetriableException", "SafeModeException", "DataTransferError",
    "BlocksNotFound", "ChecksumError",
)  # fmt: skip
_END_S = 10.0
"""The end of the process waits for calls at most this long."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""The number of a system's error in the text of a package in Rust."""

_clients: dict[tuple[Any, ...], Any] = {}
"""File systems, each for all threads: it has threads of its own. Its key contains the process that
made it. None is ever removed."""
_clients_lock = threading.Lock()


class Hdfs(Scheme):
    """Files of HDFS, by the protocol of its NameNodes."""

    name = "hdfs"
    protocols = "hdfs", "viewfs"
    splits_query = True
    package = "'ffserve[hdfs]'"
    settings = "HADOOP_", "KRB5"
    # HDFS has no ETag. The time is in milliseconds, and listings are as precise as other answers.
    tags = ("modification_time",)
    times = ("modification_time",)
    hints: ClassVar = {
        Meaning.DENIED: "check HADOOP_USER_NAME or the Kerberos ticket (klist), and this user's "
        "rights",
        Meaning.UNKNOWN: "give host and port of a NameNode, or set HADOOP_CONF_DIR to Hadoop's "
        "settings",
    }

    def connect_own(self, url: str, settings: Options) -> tuple[Any, str]:
        module = importlib.import_module("hdfs_native.fsspec")
        protocol, _, rest = url.partition("://")
        protocol = protocol.lower()
        key = os.getpid(), protocol, rest.partition("/")[0], repr(sorted(settings.items()))
        kind = {"hdfs": module.HdfsFileSystem, "viewfs": module.ViewfsFileSystem}[protocol]
        with _clients_lock:
            if key not in _clients:
                usual = {
                    **_FAILOVER,
                    "dfs.client.socket-timeout": str(int(self.silent_s * 1000)),
                }
                given = {name: value for name, value in usual.items() if name not in settings}
                options = {**kind._get_kwargs_from_urls(url), **given}
                _clients[key] = kind(skip_instance_cache=True, **options)
            return _clients[key], kind._strip_protocol(url)

    def call(self) -> contextlib.AbstractContextManager[None]:
        return _calls.one()

    def meaning(self, text: str) -> Meaning | None:
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

    def shortened(self, text: str) -> str:
        """Return the text of an error; of an exception of a NameNode its class and its first
        line."""
        remote = _RPC_ERROR.match(text)
        return f"{remote[1]}: {remote[2]}" if remote else text


class _Calls:
    """The running calls of hdfs-native, in all threads. The end of the process waits for them:
    Python before 3.14 ends a thread that returns to it then, and Rust aborts the process."""

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
            self._change.wait_for(lambda: not self._count, _END_S)


_calls = _Calls()


@atexit.register
def _end_calls() -> None:
    _calls.end()


def _renew_locks() -> None:
    """This process is a child: locks are as the parent's threads left them."""
    global _clients_lock, _calls
    _clients_lock, _calls = threading.Lock(), _Calls()


os.register_at_fork(after_in_child=_renew_locks)


SCHEME = Hdfs()
