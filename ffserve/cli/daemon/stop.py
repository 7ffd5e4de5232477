"""``ffserve stop``: stop a running daemon.

The process to stop is the one that listens on the socket, as the kernel names it (SO_PEERCRED). It
must be the daemon that answers there, and of this user unless the user is root. A pidfd, opened
before the daemon answers, makes sure that no later process of the same number gets the signal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import click

from ffserve.cli.flags import json_option, socket_option
from ffserve.cli.terminal import counted, print_json
from ffserve.errors import AccessDenied, ServerUnavailable, UsageError
from ffserve.system.socket_path import Credentials, find_socket

_PATIENCE_S = 1.0
"""After this time the command reports what it waits for."""


@click.command()
@socket_option
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait until the daemon has ended.  [default: --wait]",
)
@json_option
def stop(socket: str | None, wait: bool, as_json: bool) -> int:
    """Stop the daemon.

    It completes the requests in flight (at most for its drain_timeout) and ends. Jobs that run
    continue by reading the files themselves. Only root and the daemon's user may do this. A daemon
    whose socket belongs to systemd is stopped with systemctl. The exit code is 3 when no daemon
    answers.

    \b
      ffserve stop
      ffserve stop --socket /tmp/mine.sock
    """
    path = find_socket(socket)
    with _daemon(path) as (pid, pidfd, clients):
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        except ProcessLookupError:
            raise ServerUnavailable("the daemon has just ended", path=path) from None
        except PermissionError as error:
            raise AccessDenied(
                f"cannot send a signal to the daemon (pid {pid}): {error.strerror}", path=path
            ) from error
        ended = _has_ended(pidfd, _PATIENCE_S if wait else 0)
        if wait and not ended:
            click.echo(f"waiting for the requests of {counted(clients, 'client')}", err=True)
            ended = _has_ended(pidfd, None)
    if as_json:
        print_json({"socket": path, "pid": pid, "ended": ended})
    else:
        click.echo(f"{'stopped' if ended else 'stopping'} the daemon (pid {pid}) on {path}")
    return 0


@contextlib.contextmanager
def _daemon(path: str) -> Iterator[tuple[int, int, int]]:
    """Give process id, pidfd and number of other clients of the daemon that listens on a socket.

    Raises: ServerUnavailable: none answers. AccessDenied: it belongs to another user. UsageError:
        it is not the process that listens there.
    """
    from ffserve.client.public import Connection

    connection = Connection(path, "stop")
    try:
        peer = Credentials.of(connection.handshake.socket)
        pidfd = _open(peer.pid)
        try:
            facts = connection.status()
            _check(path, peer, int(facts["pid"]), pidfd)
            clients = sum(job["sessions"] for job in facts["jobs"])
            connection.close()
            yield peer.pid, pidfd, clients
        finally:
            if pidfd >= 0:
                os.close(pidfd)
    finally:
        connection.close()


def _open(pid: int) -> int:
    """Return a pidfd; -1 if the process has ended, or is in a pid namespace that is not ours."""
    with contextlib.suppress(ProcessLookupError):
        return os.pidfd_open(pid) if pid > 0 else -1
    return -1


def _check(path: str, peer: Credentials, pid: int, pidfd: int) -> None:
    """Check that the daemon, process `pid`, is the peer, and that this user may stop it."""
    if peer.pid != pid or pidfd < 0:
        name = _name(peer.pid)
        if name == "systemd":
            user = "--user " if peer.pid != 1 else ""
            raise UsageError(
                "systemd holds this socket and would start the daemon again",
                path=path,
                hint=f"use `systemctl {user}stop ffserve.socket ffserve.service`",
            )
        raise UsageError(
            f"the daemon (pid {pid}) is not the process that listens on the socket"
            + (f" ({name}, pid {peer.pid})" if name else ""),
            path=path,
            hint="a service manager or another container has started it: stop it there",
        )
    if os.geteuid() not in (0, peer.uid):
        raise AccessDenied(
            f"the daemon (pid {pid}) belongs to user {peer.uid}",
            path=path,
            hint="only that user and root may stop it",
        )
    if _user(pid) != peer.uid:
        raise UsageError(
            f"process {pid} and the process that listens on the socket belong to different users",
            path=path,
            hint="stop the daemon with the program that started it",
        )


def _user(pid: int) -> int:
    """Return the effective user of a process; -1 if it has ended."""
    # The owner of /proc/PID is root for a process with capabilities.
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("\nUid:")[2].split()[1])
    return -1


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _has_ended(pidfd: int, timeout_s: float | None) -> bool:
    """Wait for the end of a process; return whether it came."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
