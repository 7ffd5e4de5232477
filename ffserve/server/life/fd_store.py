"""The service manager's store of descriptors: a daemon's memory outlives the daemon.

systemd keeps descriptors that a service sends with FDSTORE=1, by name, and passes them to the next
process of the unit behind the sockets (sd_notify(3), sd_listen_fds(3), FileDescriptorStoreMax= in
systemd.service(5)). A store that is full drops what it gets and says nothing; the successor finds
a name missing then.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from ffserve.cache.inventory import NAME
from ffserve.server.life.daemon_memory import DaemonMemory
from ffserve.server.life.restart import FILE_NAMES, PAGE_NAME, file_names
from ffserve.server.users.domains import Domain, Domains
from ffserve.system.memfd import MemoryFile
from ffserve.system.systemd import notify, passed_names

_FIRST_PASSED_FD = 3


def passed() -> tuple[list[socket.socket], dict[str, int]]:
    """Return what the service manager passed: sockets, and the descriptors of the previous daemon
    by name. Others are closed. A second call returns nothing."""
    sockets: list[socket.socket] = []
    kept: dict[str, int] = {}
    names = passed_names() or ()
    for variable in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        os.environ.pop(variable, None)
    for fd, name in enumerate(names, _FIRST_PASSED_FD):
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                sockets.append(socket.socket(fileno=fd))
            elif _is_ours(name) and name not in kept:
                kept[name] = fd
            else:
                os.close(fd)
    return sockets, kept


def _is_ours(name: str) -> bool:
    kind, _, serial = name.rpartition("-")
    return name in (PAGE_NAME, NAME) or (kind in FILE_NAMES and serial.isdecimal())


def forget(names: list[str]) -> None:
    """Have the service manager close what it keeps by these names."""
    for name in names:
        notify(f"FDSTOREREMOVE=1\nFDNAME={name}")


def keep(memory: DaemonMemory, domains: Domains) -> None:
    """Have the service manager keep the memory of a daemon, also that of domains to come."""
    _store(PAGE_NAME, memory.page.file)
    _store(NAME, memory.inventory.file)
    for domain in domains.every:
        _keep_domain(domain)
    domains.made = _keep_domain
    domains.gone = lambda domain: forget(file_names(domain.serial))


def memory_of(memory: DaemonMemory, domains: Domains) -> dict[str, int]:
    """Return the descriptors of a daemon's memory by name."""
    fds = {PAGE_NAME: memory.page.file.fd, NAME: memory.inventory.file.fd}
    for domain in domains.every:
        names = file_names(domain.serial)
        fds |= {name: file.fd for name, file in zip(names, domain.files, strict=True)}
    return fds


def _keep_domain(domain: Domain) -> None:
    for name, file in zip(file_names(domain.serial), domain.files, strict=True):
        _store(name, file)


def _store(name: str, file: MemoryFile) -> None:
    # FDPOLL=0: a file has nothing to be polled for.
    notify(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", file.fd)
