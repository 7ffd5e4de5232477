"""Peers: who is at the other end of a connection, as the kernel reports it.

A peer is a user in a mount namespace. What one session has proven (that it may read a file) counts
for the other sessions of the same peer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import socket
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from ffserve.limits import MOST_USER_NAMESPACES
from ffserve.system.socket_path import Credentials

_SO_PEERPIDFD = 77

Owner: TypeAlias = tuple[int, int]
"""User and namespace. Sessions of one owner share proofs; see `Peer`."""

OWN, HOST = 0, 1
"""The namespaces that last as long as the daemon: its own, and that of process 1."""


@dataclass(frozen=True, slots=True)
class Account:
    """A user as limits, lanes and threads count it: a uid, in whatever mount namespaces its
    processes are. The root of another user namespace has the uid that it has outside, and the roots
    of all containers without one are one account, which is not the administrator's."""

    uid: int
    trusted: bool

    def __str__(self) -> str:
        return f"{self.uid} {'trusted' if self.trusted else ''}"


Viewer: TypeAlias = int | Owner
"""STATUS shows a viewer its own files and jobs."""

_unknown = itertools.count(-1, -1)


@dataclass(frozen=True, slots=True)
class Peer:
    """The user behind a connection, as the kernel reports it.

    uid: in the daemon's user namespace. namespace: a number for the mount namespace that the client
    connected from, see `Namespaces`; below 0: unknown, and different for each connection.

    A number is not always a person: the root of a container is not the root of the machine, equal
    numbers in two containers may be two people, and all users without a number in the daemon's user
    namespace appear as one, the overflow user. So what one session has proven counts for another
    only if user and namespace are the same.
    """

    pid: int
    uid: int
    namespace: int

    @property
    def owner(self) -> Owner:
        """The owner whose proofs this peer shares."""
        return self.uid, self.namespace

    @property
    def viewer(self) -> Viewer:
        """As which viewer it gets STATUS."""
        return viewer_of(self.owner)

    @property
    def is_self(self) -> bool:
        """Whether it is the daemon's own user, outside of any container of its own."""
        return self.uid == os.geteuid() and self.namespace == OWN

    @property
    def is_administrator(self) -> bool:
        """Whether it is root or the daemon's own user, and not the root of a container."""
        return self.account.trusted

    @property
    def account(self) -> Account:
        """The account that its limits are charged to."""
        return account_of(self.owner)


def account_of(owner: Owner) -> Account:
    """Return the account that an owner's limits are charged to."""
    uid, namespace = owner
    return Account(uid, is_administrator(uid) and namespace in (OWN, HOST))


def viewer_of(owner: Owner) -> Viewer:
    """Return as which viewer an owner gets STATUS: as the user, in all namespaces, unless the
    number of the user stands for another one elsewhere."""
    uid, account = owner[0], account_of(owner)
    elsewhere = is_administrator(uid) and not account.trusted
    return owner if elsewhere or uid == _ambiguous_uid() else uid


def is_administrator(uid: int) -> bool:
    """Whether a user is one of those who may stop the daemon, if not in a container."""
    return uid in (0, os.geteuid())


@dataclass(slots=True, eq=False)
class _Namespace:
    """A mount namespace with clients. mounts: its table of mounts, which keeps it alive. account:
    the user whose process came from it first."""

    number: int
    mounts: int
    account: Account
    clients: int = 0


class Namespaces:
    """The mount namespaces of clients.

    The numbers of their mounts tell them apart. But the kernel uses a number again when it is free,
    so a container could be taken for one that has ended, and get its samples. So each namespace has
    a number here that is never used again, and is kept alive while one of its clients is connected.
    """

    def __init__(self) -> None:
        self._by_mount: dict[int, _Namespace] = {}
        self._by_number: dict[int, _Namespace] = {}
        self._counts: Counter[Account] = Counter()
        """The namespaces of each user that are kept alive here, each with a descriptor."""
        self._numbers = itertools.count(HOST + 1)

    def peer(self, connection: socket.socket) -> Peer:
        """Return the peer of a connected Unix socket; `release` its namespace when it has gone."""
        pid, uid = Credentials.of(connection)
        namespace = None if uid == _ambiguous_uid() else self._hold(pid, uid)
        if namespace is not None and _has_ended(connection):
            self.release(namespace)
            namespace = None
        return Peer(pid, uid, next(_unknown) if namespace is None else namespace)

    def _hold(self, pid: int, uid: int) -> int | None:
        if not _proc_is_own():
            return None
        try:
            fd = os.open(f"/proc/{pid}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        first = _first_mount(fd)
        held = None if first is None else self._by_mount.get(first)
        if held is not None and _first_mount(held.mounts) != first:
            held = None  # that mount was removed from the namespace
        if first is None or held is not None or first in (_mount_of("self"), _mount_of("1")):
            os.close(fd)
        if first is None:
            return None
        if first == _mount_of("self"):
            return OWN
        if first == _mount_of("1"):
            return HOST
        if held is None:
            number = next(self._numbers)
            account = account_of((uid, number))
            if self._counts[account] >= MOST_USER_NAMESPACES:
                os.close(fd)
                return None
            held = self._by_mount[first] = _Namespace(number, fd, account)
            self._by_number[number] = held
            self._counts[account] += 1
        held.clients += 1
        return held.number

    def release(self, number: int) -> bool:
        """Note that a client has gone; return whether no client of its namespace can come again."""
        held = self._by_number.get(number)
        if held is None:
            return False
        held.clients -= 1
        if held.clients:
            return False
        del self._by_number[number]
        self._counts[held.account] -= 1
        if not self._counts[held.account]:
            del self._counts[held.account]
        for first in [first for first, each in self._by_mount.items() if each is held]:
            del self._by_mount[first]
        os.close(held.mounts)
        return True


@functools.cache
def _ambiguous_uid() -> int | None:
    """Return the number of all users that the daemon's user namespace does not map, if any."""
    if _read("/proc/self/uid_map").split() == [b"0", b"0", b"%d" % ((1 << 32) - 1)]:
        return None
    return int(_read("/proc/sys/kernel/overflowuid"))


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(4096)


def _first_mount(mounts: int) -> int | None:
    """Return the number of the first mount in an open table of mounts; None: it has none.

    It belongs to one namespace only. Everybody may read it, but /proc/PID/ns/mnt only users who may
    trace the process.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(os.pread(mounts, 64, 0).split(maxsplit=1)[0])
    return None


@functools.cache
def _proc_is_own() -> bool:
    """Whether the numbers in /proc are those of this process's PID namespace."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


@functools.cache
def _mount_of(process: str) -> int | None:
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{process}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _first_mount(fd)
        finally:
            os.close(fd)
    return None


def namespace_marks() -> tuple[int, int]:
    """Return numbers that are equal to another process's while OWN and HOST are the same namespaces
    for both; -1: unknown."""
    own, host = _mount_of("self"), _mount_of("1")
    return -1 if own is None else own, -1 if host is None else host


def _has_ended(connection: socket.socket) -> bool:
    """Whether the peer has ended, so that its number may be that of another process by now."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
    except OSError:  # before Linux 6.5
        return False
    pidfd = int.from_bytes(raw, "little")
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(pidfd)
