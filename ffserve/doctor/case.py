"""The facts that `ffserve doctor` judges: this machine, the socket, the process that is or would be
the daemon, the settings, the data. `Host` and `Case` also write commands as this machine needs
them.

The facts are collected without numpy and without threads, since `probe.py` forks.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import socket
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ffserve.config import CONFIG_PATH, LIVE, ServerConfig, load_config
from ffserve.doctor import probe
from ffserve.doctor.probe import Answer
from ffserve.errors import AccessDenied, FFServeError
from ffserve.system.capabilities import CAP_IPC_LOCK, CAP_SYS_ADMIN, has_capability
from ffserve.system.machine_memory import usable_memory
from ffserve.system.socket_path import (
    MAX_SOCKET_PATH,
    SYSTEM_SOCKET,
    Credentials,
    connect,
    find_socket,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNITS = ("/etc/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system")
SERVICE = "ffserve.service"
UNLIMITED = 1 << 62
CONNECT_TIMEOUT_S = 2

Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong.

    name: for programs, and in docs/REFERENCE.md. level: "error": something does not work;
    "warning": it works, but worse than it could. text: what is wrong, and where. effect: what
    follows from it. commands: what mends it, or shows the cause; a line for a shell each.
    """

    name: str
    level: Level
    text: str
    effect: str
    commands: tuple[str, ...]


# ---- the machine, and its commands ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Host:
    """This machine, as far as commands depend on it.

    is_root: this user is root. systemd: it is the service manager. container: "docker", "podman" or
    "kubernetes"; "" outside of them, and in one with all rights. release: /etc/os-release.
    """

    is_root: bool
    systemd: bool
    container: str
    release: dict[str, str]

    @classmethod
    def here(cls) -> Host:
        """Return this machine."""
        # A container that may administer the machine gets the commands of the machine.
        bounds = re.search(r"^CapBnd:\t(.*)$", text_in("/proc/self/status"), re.MULTILINE)
        rights = bounds is not None and int(bounds[1], 16) >> CAP_SYS_ADMIN & 1
        marks = {
            "kubernetes": "KUBERNETES_SERVICE_HOST" in os.environ,
            "podman": os.path.exists("/run/.containerenv"),
            "docker": os.path.exists("/.dockerenv"),
        }
        container = "" if rights else next((name for name, found in marks.items() if found), "")
        pairs = (line.partition("=") for line in text_in("/etc/os-release").splitlines())
        release = {key: value.strip("\"'") for key, _, value in pairs}
        systemd = os.path.isdir("/run/systemd/system")
        return cls(os.geteuid() == 0, systemd, container, release)

    @property
    def family(self) -> list[str]:
        """Names of the distribution, and of those that it is like."""
        return [self.release.get("ID", ""), *self.release.get("ID_LIKE", "").split()]

    def as_root(self, command: str) -> str:
        """Return a command that root must run, for this user."""
        if self.is_root:
            return command
        for program in ("sudo", "doas"):
            if shutil.which(program):
                return f"{program} {command}"
        if self.container == "kubernetes":
            return command  # of root in the image, or on the node: a pod cannot change its user
        if self.container:
            return f"{self.container} exec -u 0 {socket.gethostname()} {command}"
        return f"su -c {shlex.quote(command)}"

    def write(self, path: str, *lines: str, more: bool = False) -> str:
        """Return a command that writes lines to a file that belongs to root, or adds them to it."""
        words = ["echo", *lines] if len(lines) == 1 else ["printf", "%s\\n", *lines]
        place = shlex.quote(path)
        if self.is_root:
            return f"{shlex.join(words)} {'>>' if more else '>'} {place}"
        return f"{shlex.join(words)} | {self.as_root('tee -a' if more else 'tee')} {place}"

    def join_group(self, user: str, gid: int, group: str) -> tuple[str, ...]:
        """Return the commands that make a user a member of a group."""
        if self.container == "kubernetes":
            return (f"kubectl edit job JOB  # securityContext: {{supplementalGroups: [{gid}]}}",)
        if self.container:
            return (f"{self.container} run --group-add {gid} IMAGE",)
        words = f"usermod -aG {group} {user}"
        add = words if shutil.which("usermod") else f"addgroup {user} {group}"
        return self.as_root(add), f"newgrp {group}"

    def sysctl(self, name: str, value: int) -> tuple[str, ...]:
        """Return the commands that set a variable of the kernel, now and for later starts."""
        return (
            self.as_root(f"sysctl -w {name}={value}"),
            self.write("/etc/sysctl.d/90-ffserve.conf", f"{name} = {value}", more=True),
        )


def has_unit() -> bool:
    """Whether the service is installed."""
    return any(os.path.exists(f"{directory}/ffserve.socket") for directory in UNITS)


# ---- files of /proc and /sys ------------------------------------------------------------------


def text_in(path: str) -> str:
    """Return what a file has, without the last line break; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


def place_of(key: str, text: str) -> str:
    """Return what sed is told in order to set a key of settings; "": they are empty.

    The key must stand before the first table, where its value may have several lines.
    """
    lines = text.splitlines()
    tables = (number for number, line in enumerate(lines) if re.match(r"\s*\[", line))
    table = next((number for number in tables if _is_toml(lines[:number])), len(lines))
    for first in range(table):
        if re.match(rf"\s*{key}\s*=", lines[first]):
            ends = range(first + 1, table + 1)
            last = next((end for end in ends if _is_toml(lines[first:end])), first + 1)
            return f"{first + 1},{last}c\\"
    if table < len(lines):
        return f"{table + 1}i\\"
    return "$a\\" if text else ""


def _is_toml(lines: list[str]) -> bool:
    try:
        tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError:
        return False
    return True


def number_in(path: str) -> int | None:
    """Return the number that a file has; None: it has none."""
    text = text_in(path).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


# ---- processes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    """The process that is the daemon, or this one, which would become it.

    pid: 0: this process. uid: its effective user. most_files, lockable_size: limits; of files the
    hard one, to which the daemon raises its own. locks_any: CAP_IPC_LOCK. is_admin: CAP_SYS_ADMIN.
    filtered: seccomp filters its system calls. stopped: by a signal. huge_pages: not switched off
    by prctl(2). memory: bytes that it may use. depth: PID namespaces that it is in, of those that
    are seen from here. command: its arguments. unit: of systemd.
    """

    pid: int
    uid: int
    most_files: int
    lockable_size: int
    locks_any: bool
    is_admin: bool
    filtered: bool
    stopped: bool
    huge_pages: bool
    memory: int
    depth: int
    command: tuple[str, ...]
    unit: str

    @classmethod
    def of(cls, pid: int = 0) -> Process | None:
        """Return a process, this one by default; None: it has ended, or is not visible."""
        place = f"/proc/{pid or 'self'}"
        limits, status = text_in(f"{place}/limits"), text_in(f"{place}/status")
        if not limits or not status:
            return None
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        units = re.findall(r"/(ffserve[^/\n]*\.service)", text_in(f"{place}/cgroup"))
        return cls(
            pid,
            int(facts["Uid"].split()[1]),
            _limit(limits, "Max open files", 1),
            _limit(limits, "Max locked memory", 0),
            has_capability(CAP_IPC_LOCK, status=status),
            has_capability(CAP_SYS_ADMIN, status=status),
            facts.get("Seccomp") == "2",
            facts["State"][0] in "Tt",
            facts.get("THP_enabled") != "0",
            usable_memory(Path(f"{place}/cgroup")),
            len(facts.get("NSpid", "").split()),
            tuple(text_in(f"{place}/cmdline").rstrip("\0").split("\0")),
            units[0] if units else "",
        )

    @property
    def name(self) -> str:
        """The name of the daemon in messages."""
        return f"the daemon (pid {self.pid})" if self.pid else "a daemon started here"

    @property
    def is_daemon(self) -> bool:
        """Whether it is another process, with the arguments of a daemon."""
        named = any("ffserve" in word for word in self.command)
        return self.pid > 0 and named and "serve" in self.command

    @property
    def cgroup(self) -> Path:
        """The list of its control groups."""
        return Path(f"/proc/{self.pid or 'self'}/cgroup")

    def flags(self) -> dict[str, list[str]]:
        """Return the options with which a daemon was started."""
        found: dict[str, list[str]] = {}
        words = iter(self.command[self.command.index("serve") + 1 :] if self.is_daemon else ())
        for word in words:
            name, equals, value = word.partition("=")
            if name.startswith("--") and name not in ("--check", "--handover"):
                found.setdefault(name, []).append(value if equals else next(words, ""))
        return found


def _limit(text: str, name: str, which: int) -> int:
    """Return a limit of a process: the soft one (0) or the hard one (1)."""
    match = re.search(rf"^{name}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
    value = match.groups()[which] if match else "unlimited"
    return UNLIMITED if value == "unlimited" else int(value)


# ---- the socket -------------------------------------------------------------------------------


@dataclass(slots=True)
class Socket:
    """The socket at which jobs look for the daemon.

    given: by an option or a variable. state: what a connection meets: "missing", "unsafe" (its
    directory is another user's), "silent" (its file system), "closed" (its directory), "other" (no
    socket), "long", "denied", "stale" (nobody listens), "full" (nobody accepts), "failed", "open".
    pid, uid: of the listener. error: why it is unsafe, or the connection failed.
    """

    path: str
    given: bool
    state: str = "missing"
    found: os.stat_result | None = None
    pid: int = 0
    uid: int = -1
    error: str = ""

    @classmethod
    def chosen(cls, option: str | None) -> Socket:
        """Return the socket that a job of this user tries."""
        given = bool(option or os.environ.get("FFSERVE_SOCKET"))
        try:
            return cls(find_socket(option), given)
        except AccessDenied as error:
            return cls(error.path or "", given, "unsafe", error=error.message)

    def look(self) -> None:
        """Find out its state. Nothing is sent."""
        if len(os.fsencode(self.path)) > MAX_SOCKET_PATH:
            self.state = "long"
            return
        try:
            self.found = os.stat(self.path)
        except OSError as error:
            self.state = "closed" if isinstance(error, PermissionError) else "missing"
            return
        self.state = self._connect() if stat.S_ISSOCK(self.found.st_mode) else "other"

    def _connect(self) -> str:
        with socket.socket(socket.AF_UNIX) as attempt:
            try:
                connect(attempt, self.path, CONNECT_TIMEOUT_S)
            except PermissionError:
                return "denied"
            except ConnectionRefusedError:
                return "stale"
            except BlockingIOError:
                return "full"
            except OSError as error:
                self.error = error.strerror or str(error)
                return "failed"
            self.pid, self.uid = Credentials.of(attempt)
        return "open"


# ---- all of it --------------------------------------------------------------------------------


@dataclass(slots=True)
class Case:
    """Everything that the checks look at.

    given_config: the settings' file was given. process: the daemon, or this process. places: what
    is known of directories and files that the user or the settings name. data: what jobs find at
    the paths of data. facts: the daemon's status. unmapped: why its memory cannot be mapped here.
    failure: why the daemon does not answer.
    """

    host: Host
    socket: Socket
    config_path: str
    given_config: bool
    process: Process
    config: ServerConfig | None = None
    config_error: FFServeError | None = None
    places: dict[str, Answer] = field(default_factory=dict)
    data: list[tuple[str, Answer]] = field(default_factory=list)
    facts: dict[str, Any] | None = None
    unmapped: FFServeError | None = None
    failure: FFServeError | None = None

    @property
    def settings(self) -> ServerConfig:
        """The settings, or the defaults if they are not valid."""
        return self.config or ServerConfig(socket=SYSTEM_SOCKET)

    @property
    def arena_size(self) -> int:
        """Bytes that the arena has, or would have."""
        if self.facts is not None:
            return int(self.facts["arena"]["size"])
        return self.settings.arena_size

    def take_daemon(self, process: Process) -> None:
        """Take this process for the daemon, and its options for settings."""
        self.process = process
        if not self.given_config:
            self.config_path = _config_of(self.socket.path, process)
        self.config = self.config_error = None
        _load(self)

    @property
    def unit(self) -> str:
        """The unit of the daemon, or the one that would start it; "": none."""
        if self.process.pid:
            return self.process.unit
        return SERVICE if self.host.systemd and has_unit() else ""

    # ---- commands about the daemon

    def restart(self, *options: str) -> str:
        """Return the command that starts the daemon, anew if it runs; its memory is kept.

        Args: options: further ones, for a daemon that is no service.
        """
        process = self.process
        if self.unit:
            return self.host.as_root(f"systemctl restart {self.unit}")
        if self.host.container == "kubernetes":
            return "kubectl -n ffserve rollout restart daemonset ffserve"
        if self.host.container and process.is_daemon:
            # A container ends with its first process, so no other daemon can take over inside.
            name = socket.gethostname()
            if not options:
                return f"{self.host.container} restart {name}"
            return shlex.join([self.host.container, "run", "IMAGE", *process.command, *options])
        if not process.is_daemon:
            return shlex.join(["ffserve", "serve", "--socket", self.socket.path, *options])
        words = [word for word in process.command if word != "--handover"]
        return shlex.join([*words, *options, "--handover"])

    def setting(self, key: str, value: str, *options: str) -> tuple[str, ...]:
        """Return the commands that change a setting of the daemon.

        Args: value: as TOML has it. options: the same as options of `ffserve serve`.
        """
        line = f"{key} = {value}"
        if self.host.container == "kubernetes" and not self.unit:
            return f"kubectl -n ffserve edit configmap ffserve  # {line}", self.restart()
        if not self.unit:
            return (self.restart(*options),)
        where = place_of(key, text_in(self.config_path))
        if where:
            script = where + line.replace("\\", "\\\\")
            change = self.host.as_root(shlex.join(["sed", "-i", script, self.config_path]))
        else:  # it is empty or missing, or this user may not read it
            change = self.host.write(self.config_path, line, more=True)
        again = "reload" if key in LIVE and self.process.pid else "restart"
        return change, self.host.as_root(f"systemctl {again} {self.unit}")

    def limit_setting(self, line: str, resource: str, value: str) -> tuple[str, ...]:
        """Return the commands that raise a limit of the daemon.

        Args: line: of its unit. resource, value: as prlimit(1) has them.
        """
        unit = self.unit
        if unit:
            path = f"/etc/systemd/system/{unit}.d/{resource}.conf"
            return (
                self.host.as_root(f"mkdir -p {os.path.dirname(path)}"),
                self.host.write(path, "[Service]", line),
                self.host.as_root("systemctl daemon-reload"),
                self.restart(),
            )
        return self.host.as_root(f"prlimit --pid $$ --{resource}={value}:{value}"), self.restart()

    def unlimit(self, unit_property: str, path: Path, text: str) -> tuple[str, ...]:
        """Return the command that lifts a limit of a control group.

        Args: unit_property: of a service. path, text: a file of the group, and what lifts it.
        """
        if self.process.unit:
            words = ["systemctl", "set-property", self.process.unit, unit_property]
            return (self.host.as_root(shlex.join(words)),)
        return (self.host.write(str(path), text),)


def gather(paths: Sequence[str], socket_option: str | None, config_option: str | None) -> Case:
    """Find out everything that needs no numpy; file systems are asked in processes of their own."""
    found, own = Socket.chosen(socket_option), Process.of()
    assert own is not None, "a process sees itself"
    named = [path for path in (found.path if found.given else "", config_option) if path]
    places = dict(zip(named, probe.ask([(probe.place, path) for path in named]), strict=True))
    if found.path in places and places[found.path] is None:
        found.state = "silent"
    elif found.state != "unsafe":
        found.look()
    listener = Process.of(found.pid) if found.pid else None
    if listener is not None and not (listener.is_daemon or listener.stopped):
        listener = None
    path = config_option or _config_of(found.path, listener)
    case = Case(Host.here(), found, path, config_option is not None, listener or own, places=places)
    if path not in places or places[path] is not None:
        _load(case)
    roots = [root for root in case.settings.roots if root != "/"]
    answers = probe.ask(
        [(probe.data, path) for path in paths] + [(probe.place, root) for root in roots]
    )
    case.data = list(zip(paths, answers[: len(paths)], strict=True))
    case.places.update(zip(roots, answers[len(paths) :], strict=True))
    return case


def _config_of(socket_path: str, daemon: Process | None) -> str:
    """Return the file with the settings of the daemon at a socket."""
    if daemon is not None:
        flag = daemon.flags().get("--config", [""])[-1]
        return flag if os.path.isabs(flag) else CONFIG_PATH
    directory, name = os.path.split(socket_path)
    own = f"{os.path.dirname(CONFIG_PATH)}/{os.path.splitext(name)[0]}.toml"
    is_instance = directory == os.path.dirname(SYSTEM_SOCKET) and os.path.exists(own)
    return own if is_instance else CONFIG_PATH


def _load(case: Case) -> None:
    """Read the settings, with the options of the daemon that runs."""
    flags = {} if case.given_config else case.process.flags()
    overrides: dict[str, Any] = {}
    for option in dataclasses.fields(ServerConfig):
        key, values = option.metadata["key"], flags.get(option.metadata["flag"])
        if values:
            overrides[key] = values if key in ("roots", "file_systems") else values[-1]
    required = case.given_config or case.config_path != CONFIG_PATH
    path = case.config_path if required else None
    try:
        try:
            case.config = load_config(path, overrides)
        except AccessDenied:  # of the default socket, which is judged by itself
            case.config = load_config(path, {**overrides, "socket": SYSTEM_SOCKET})
    except FFServeError as error:
        case.config_error = error
