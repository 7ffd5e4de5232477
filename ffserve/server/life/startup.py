"""Checks before a daemon starts: whether its settings fit the machine. `ffserve doctor` explains
the same faults.
"""

from __future__ import annotations

import grp
import importlib
import logging
import os
import resource
from collections.abc import Sequence
from types import ModuleType

from ffserve.config import ServerConfig, format_size
from ffserve.disk.files import raise_file_limit
from ffserve.errors import UsageError
from ffserve.limits import LEAST_FILES, OWN_SIZE
from ffserve.server.files.remote import store_fault
from ffserve.server.users.access import may_read_everything
from ffserve.system.machine_memory import usable_memory

log = logging.getLogger("ffserve")


def check(config: ServerConfig, ignored: Sequence[str] = ()) -> None:
    """Check whether a daemon could start with these settings, as far as that can be known before.

    Args: ignored: see `load_config`; each is logged.
    Raises: UsageError.
    """
    for text in ignored:
        log.warning("ignored a setting of an earlier release: %s", text)
    raise_file_limit()
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for fault in (
        file_limit_fault(most_files),
        common_fault(config),
        memory_fault(config, usable_memory()),
        store_fault(config),
    ):
        if fault is not None:
            raise fault
    for root in config.roots:
        if not os.path.isdir(root):
            log.warning("missing root %s: it is served as soon as the directory exists", root)
    group_of(config)
    if config.http:
        http_module()


def file_limit_fault(most_files: int) -> UsageError | None:
    """Return why no daemon can start with this limit on open files; None if one can."""
    if most_files >= LEAST_FILES:
        return None
    return UsageError(
        f"the limit on open files is {most_files}; the daemon needs {LEAST_FILES} and one for "
        "each file that it serves",
        hint="raise the limit (ulimit -n, or LimitNOFILE= in the systemd unit)",
    )


def common_fault(config: ServerConfig) -> UsageError | None:
    """Return why this user's daemon cannot have the setting `common`; None if it can."""
    if config.common != "user" or not may_read_everything():
        return None
    return UsageError(
        "common = 'user' shares what the daemon's own user may read, and this user may read every "
        "file",
        hint="run the daemon as an ordinary user, or set common = 'world'",
    )


def memory_fault(config: ServerConfig, memory: int) -> UsageError | None:
    """Return why the arena does not fit into this much memory; None if it does."""
    if config.arena_size <= memory - OWN_SIZE:
        return None
    return UsageError(
        f"an arena of {format_size(config.arena_size)} and {format_size(OWN_SIZE)} for the daemon "
        f"itself exceed the {format_size(memory)} of memory that this process may use",
        hint="choose a smaller --arena, and leave memory for the jobs",
    )


def group_of(config: ServerConfig) -> int | None:
    """Return the group of sockets; None: the daemon's own."""
    group = config.socket_group
    if group is None:
        return None
    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise UsageError(
            f"unknown group {group!r}", hint="set socket_group to a group of this machine"
        ) from None


def http_module() -> ModuleType:
    """Return the module for HTTP. Raises: UsageError: it needs packages that are not installed."""
    try:
        return importlib.import_module("ffserve.server.status.http")
    except ImportError as error:
        raise UsageError(
            f"HTTP needs a package that is not installed: {error.name}",
            hint="pip install 'ffserve[metrics]'",
        ) from error
