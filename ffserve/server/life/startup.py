"""Checks before a daemon starts: whether its settings fit the machine. `ffserve doctor` explains
the same faults.
"""

from __future__ import annotations

import grp
import importlib
import logging
import os
import resource
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ffserve.config import CONFIG_PATH, ServerConfig, format_size
from ffserve.disk.files import raise_file_limit
from ffserve.errors import UsageError
from ffserve.limits import LEAST_FILES, OWN_SIZE
from ffserve.server.users.access import may_read_everything
from ffserve.system.machine_memory import usable_memory

log = logging.getLogger("ffserve")


@dataclass(frozen=True, slots=True)
class Unit:
    """A service of systemd that runs the daemon. most_files, memory: its limits."""

    name: str
    user: str
    most_files: int
    memory: int

    @classmethod
    def of(cls, settings: str) -> Unit | None:
        """Return the service with these settings; None: there is none, or systemd does not run."""
        directory, file = os.path.split(os.path.abspath(settings))
        instance, suffix = os.path.splitext(file)
        if directory != os.path.dirname(CONFIG_PATH) or suffix != ".toml":
            return None
        name = "ffserve.service" if instance == "ffserve" else f"ffserve@{instance}.service"
        asked = "--property=LoadState,User,LimitNOFILE,MemoryMax"
        try:
            done = subprocess.run(
                ["systemctl", "show", asked, name], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        facts = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        if facts.get("LoadState") != "loaded":
            return None
        most_files, memory = (
            int(text) if (text := facts.get(key, "")).isdecimal() else 1 << 62
            for key in ("LimitNOFILE", "MemoryMax")
        )
        return cls(name, facts.get("User") or "root", most_files, memory)

    def judged(self, config: ServerConfig) -> str:
        """Return what `check` has judged for this service, and what it could not."""
        text = f"judged for {self.name}: user {self.user}, {self.most_files} open files"
        if config.store_directory:
            text += f"; not judged: whether the service may write to {config.store_directory}"
        return text


def check(
    config: ServerConfig,
    ignored: Sequence[str] = (),
    unit: Unit | None = None,
) -> None:
    """Check whether a daemon could start with these settings, as far as that can be known before.

    Args: ignored: see `load_config`; each is logged. unit: judge for this service, not for this
        process.
    Raises: UsageError.
    """
    for text in ignored:
        log.warning("ignored a setting of an earlier release: %s", text)
    raise_file_limit()
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    memory = usable_memory()
    ordinary = unit is not None and unit.user != "root"
    if unit is not None:
        most_files = unit.most_files
        # Without a size the service takes a part of what it may use.
        memory = memory if config.arena_size_bytes is None else min(memory, unit.memory)
    for fault in (
        file_limit_fault(most_files),
        None if ordinary else common_fault(config),
        memory_fault(config, memory),
    ):
        if fault is not None:
            raise fault
    for root in config.roots:
        if not os.path.isdir(root):
            log.warning("missing root %s: it is served as soon as the directory exists", root)
    group_of(config)
    if config.http:
        http_module()


def closed_fault(settings: str, unit: Unit) -> UsageError | None:
    """Return why a service's user, who belongs to no group here, may not read its settings; None
    if it may."""
    if unit.user == "root" or not os.path.exists(settings):
        return None
    folders = [str(folder) for folder in Path(os.path.abspath(settings)).parents]
    for path, bit, letters in ((settings, 0o004, "r"), *((path, 0o001, "x") for path in folders)):
        if not os.stat(path).st_mode & bit:
            return UsageError(
                f"the user of {unit.name} may not read {'this file' if bit == 4 else 'files here'}",
                path=path,
                hint=f"chmod a+{letters} {path}",
            )
    return None


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
        return importlib.import_module("ffserve.server.status.http_server")
    except ImportError as error:
        raise UsageError(
            f"HTTP needs a package that is not installed: {error.name}",
            hint="pip install 'ffserve[metrics]'",
        ) from error
