"""All checks of `ffserve doctor`, and those of settings, socket and daemon."""

from __future__ import annotations

import grp
import os
import re
import shlex
import socket as sockets
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator

from ffserve import __version__
from ffserve.client.public import MORE_FILES, Connection
from ffserve.config import split_address
from ffserve.doctor import resources, storage
from ffserve.doctor.case import UNITS, Case, Finding, Process, has_unit
from ffserve.doctor.probe import closed_part
from ffserve.doctor.resources import Found
from ffserve.errors import FFServeError, ProtocolError, UsageError
from ffserve.server.life.startup import common_fault, group_of, http_module
from ffserve.system.memfd import can_map
from ffserve.system.socket_path import SYSTEM_SOCKET, restart_if_removed

ALONE = "Jobs read the files by themselves and share nothing."


def greet(case: Case) -> None:
    """Ask the daemon for its status, if there is one that listens."""
    if case.socket.state != "open" or case.process.stopped:
        return
    try:
        connection = Connection(case.socket.path, "doctor")
        try:
            case.unmapped = connection.handshake.unmapped
            case.facts = connection.status()
        finally:
            connection.close()
    except FFServeError as error:
        case.failure = error
        return
    if not case.process.pid:  # systemd listens for it
        process = Process.of(int(case.facts["pid"]))
        if process is not None and process.is_daemon:
            case.take_daemon(process)


# ---- settings ---------------------------------------------------------------------------------


def settings(case: Case) -> Found:
    """A daemon can start with the settings, and the one that runs has them."""
    if case.config_path in case.places and case.places[case.config_path] is None:
        yield storage.silent(case, case.config_path)
        return
    yield case.config_path if os.path.exists(case.config_path) else "defaults"
    if case.unit and case.config_error is None:
        yield from _unread(case)
    if (error := case.config_error) is not None:
        yield from _invalid(case, error)
        return
    yield from _unusable(case)
    yield from _roots(case)
    config, facts = case.settings, case.facts
    if facts is None or not (case.process.pid or case.given_config):
        return
    if list(config.roots) != list(facts["roots"]):
        unit, pid = case.process.unit, case.process.pid or facts["pid"]
        reload = f"systemctl reload {unit}" if unit else f"kill -HUP {pid}"
        yield Finding(
            "settings-old",
            "warning",
            f"the daemon has the roots {' '.join(facts['roots'])}, {case.config_path} has "
            f"{' '.join(config.roots)}",
            "The changes take effect after a reload.",
            (case.host.as_root(reload),),
        )


def _unusable(case: Case) -> Iterator[Finding]:
    """Find out whether a daemon can start with these valid settings, and which users it would
    serve."""
    config, effect = case.settings, "No daemon can start."
    runs = bool(case.process.pid) and not _starts(case.process.unit)
    try:
        group_of(config)
    except UsageError as error:
        add = case.host.as_root(f"groupadd -r {shlex.quote(str(config.socket_group))}")
        yield Finding("settings-unusable", "error", error.message, effect, (add,))
    try:
        if (config.http or (case.unit and _given_addresses())) and not runs:
            http_module()
    except UsageError as error:
        install = shlex.join([sys.executable, "-m", "pip", "install", "ffserve[metrics]"])
        yield Finding("settings-unusable", "error", error.message, effect, (install,))
    if not runs and _show(case.unit, "PrivateNetwork").get("PrivateNetwork") == "yes":
        yield from _without_network(case)
    elif not runs and (taken := _taken(config.http)) is not None:
        show = _listeners(config.http)
        yield Finding("settings-unusable", "error", taken, effect, (show, case.restart()))
    fault = None if runs or has_unit() else common_fault(config)
    if fault is not None:
        commands = case.setting("common", '"world"', "--common", "world")
        yield Finding("settings-unusable", "error", fault.message, effect, commands)
    if config.common == "user":
        yield from _open_to_all(case)


def _open_to_all(case: Case) -> Iterator[Finding]:
    """Find out whether everybody may connect to a daemon that serves what its user may read."""
    mode, found = case.settings.socket_mode, case.socket.found
    commands: tuple[str, ...] = ()
    if found is not None and case.socket.state == "open" and (case.process.pid or case.unit):
        mode = stat.S_IMODE(found.st_mode)
        commands = (case.host.as_root(f"chmod 0660 {shlex.quote(case.socket.path)}"),)
    if not mode & 0o006:
        return
    if case.unit:  # systemd makes the socket
        path = f"/etc/systemd/system/{case.unit.replace('.service', '.socket')}.d/mode.conf"
        commands += (
            case.host.as_root(f"mkdir -p {os.path.dirname(path)}"),
            case.host.write(path, "[Socket]", "SocketMode=0660"),
            case.host.as_root("systemctl daemon-reload"),
        )
    elif case.settings.socket_mode & 0o006:
        commands += case.setting("socket_mode", "0o660", "--socket-mode", "0660")
    yield Finding(
        "settings-open",
        "warning",
        f"common is 'user', but everybody may connect (mode {mode:04o} of the socket)",
        "All users of the machine can see samples of files that they may not read.",
        commands,
    )


def _unread(case: Case) -> Iterator[Finding]:
    """Find out whether the user of the service can read its settings."""
    path, effect = case.config_path, "No daemon can start."
    if not os.path.exists(path):
        commands = (case.host.as_root(f"install -D -m 0644 /dev/null {shlex.quote(path)}"),)
        text = f"{path} does not exist, but the service reads it"
        yield Finding("settings-invalid", "error", text, effect, (*commands, case.restart()))
    elif not os.stat(path).st_mode & 0o004:
        commands = (case.host.as_root(f"chmod a+r {shlex.quote(path)}"),)
        text = f"{path} is not readable for the user of the service"
        yield Finding("settings-closed", "error", text, effect, (*commands, case.restart()))


def _without_network(case: Case) -> Iterator[Finding]:
    """Find out whether the service, which has no network, is to listen itself."""
    http, path = case.settings.http, shlex.quote(case.config_path)
    if not http or isinstance(split_address(http), str):
        return
    socket_unit = case.unit.replace(".service", ".socket")
    folder = f"/etc/systemd/system/{socket_unit}.d"
    as_root = case.host.as_root
    yield Finding(
        "settings-unusable",
        "error",
        f"{case.config_path} has http = {http!r}, but the service has no network: systemd must "
        "listen for it",
        "No daemon can start.",
        (
            as_root(f"sed -i '/^http *=/d' {path}"),
            as_root(f"mkdir -p {folder}"),
            case.host.write(f"{folder}/http.conf", "[Socket]", f"ListenStream={http}"),
            as_root("systemctl daemon-reload"),
            as_root(f"systemctl restart {socket_unit} {case.unit}"),
        ),
    )


def _given_addresses() -> list[str]:
    """Return the addresses for HTTP at which systemd listens for the service."""
    lines = _show("ffserve.socket", "Listen").get("Listen", "").splitlines()
    addresses = (line.rpartition(" (")[0] for line in lines)
    return [each for each in addresses if each != SYSTEM_SOCKET]


def _listeners(address: str) -> str:
    """Return the command that shows who listens at HOST:PORT."""
    return f"ss -ltnp 'sport = :{address.rpartition(':')[2]}'"


def _taken(http: str) -> str | None:
    """Return why no daemon can listen at an address for HTTP; None if one can."""
    place = split_address(http) if http else ""
    if isinstance(place, str):
        return None
    try:
        found = sockets.getaddrinfo(*place, type=sockets.SOCK_STREAM)[0]
        with sockets.socket(*found[:3]) as trial:
            trial.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            trial.bind(found[4])
            trial.listen()
    except OSError as error:
        return f"cannot listen on {http} for HTTP: {error.strerror}"
    return None


def _invalid(case: Case, error: FFServeError) -> Iterator[Finding]:
    """Find out why the settings cannot be read."""
    path = case.config_path
    exists = os.path.exists(path)
    if exists and not os.access(path, os.R_OK, effective_ids=True):
        # The daemon of the service is an ordinary user. Others may have settings of their own.
        if has_unit() or case.given_config:
            commands = (case.host.as_root(f"chmod a+r {shlex.quote(path)}"),)
            text = f"{path} is not readable for all users"
            yield Finding("settings-closed", "error", text, "No daemon can start.", commands)
        return
    line = re.search(r"line (\d+)", error.message)
    edit = f'"${{EDITOR:-vi}}" {f"+{line[1]} " if line else ""}{shlex.quote(path)}'
    if exists and not os.access(path, os.W_OK, effective_ids=True):
        edit = case.host.as_root(f"{edit}")
    text = str(error)
    check = f"ffserve serve --config {shlex.quote(path)} --check"
    effect = "No daemon can start. A running daemon keeps the settings that it has."
    again = (case.restart(),) if case.unit else ()  # by itself it starts up to 10 s later
    mend = (edit, check, *again) if exists else (check, *again)
    yield Finding("settings-invalid", "error", text, effect, mend)


def _roots(case: Case) -> Iterator[Finding]:
    for root in case.settings.roots:
        answer = case.places.get(root, {})
        if answer is None:
            yield storage.silent(case, root)
        elif "error" in answer:
            yield Finding(
                "root-missing",
                "warning",
                f"the root {root} cannot be used: {answer['error']}",
                "No file below it is served until it exists.",
                (case.host.as_root(f"mount {shlex.quote(root)}"),),
            )


# ---- the socket -------------------------------------------------------------------------------


def socket(case: Case) -> Found:
    """Jobs of this user reach a daemon, and the right one."""
    state = case.socket.state
    yield f"{case.socket.path}: {state}"
    if state == "open":
        yield from _listener(case)
    elif state == "missing":
        yield from _missing(case)
    else:
        yield _obstacle(case)


def _obstacle(case: Case) -> Finding:
    """Return what is wrong with the place of the socket."""
    found, host = case.socket, case.host
    path, quoted = found.path, shlex.quote(found.path)
    commands: tuple[str, ...]
    match found.state:
        case "denied":
            return _denied(case)
        case "silent":
            return storage.silent(case, path)
        case "unsafe":
            return Finding(
                "socket-unsafe", "error", f"{path}: {found.error}",
                f"Another user could take the place of your daemon, so no daemon is used. {ALONE}",
                (host.as_root(f"rm -rf {quoted}"),),
            )  # fmt: skip
        case "long":
            text = f"{path}: the path of a socket may have at most 107 bytes"
            commands = ("export FFSERVE_SOCKET=$XDG_RUNTIME_DIR/ffserve.sock",)
            return Finding("socket-path", "error", text, ALONE, commands)
        case "other":
            return Finding(
                "socket-no-socket", "error", f"{path} exists, but is not a socket",
                f"No daemon can listen there. {ALONE}", (_removing(case), case.restart()),
            )  # fmt: skip
        case "closed":
            part = closed_part(path)["path"]
            commands = (host.as_root(f"chmod a+rx {shlex.quote(part)}"),)
            text = f"{path}: this user may not search the directory {part}"
            return Finding("socket-closed", "error", text, ALONE, commands)
        case "stale":
            text = f"{path}: no process listens on this socket"
            return Finding("socket-stale", "error", text, ALONE, (case.restart(),))
        case _:
            text = (
                f"{path}: cannot connect: {found.error or 'too many clients wait for the daemon'}"
            )
            commands = (f"ss -xlp src {quoted}", case.restart())
            return Finding("daemon-silent", "error", text, ALONE, commands)


def _removing(case: Case) -> str:
    """Return the command that removes what is in the place of the socket."""
    found, quoted = case.socket.found, shlex.quote(case.socket.path)
    recursive = found is not None and stat.S_ISDIR(found.st_mode)
    command = f"rm {'-r ' if recursive else ''}{quoted}"
    own = found is not None and found.st_uid == os.geteuid()
    return command if own else case.host.as_root(command)


def _missing(case: Case) -> Iterator[str | Finding]:
    found = case.socket
    configured = case.settings.socket
    if not found.given and configured != found.path and os.path.exists(configured):
        yield Finding(
            "socket-elsewhere",
            "warning",
            f"{case.config_path} puts the socket at {configured}, but jobs look at {found.path}",
            ALONE,
            (f"export FFSERVE_SOCKET={shlex.quote(configured)}",),
        )
    elif restart := restart_if_removed(found.path):
        text = f"{found.path} was removed, while a daemon listens on it"
        yield Finding("socket-missing", "error", text, ALONE, (case.host.as_root(restart),))
    elif found.given:
        text = f"{found.path}: this socket does not exist"
        yield Finding("socket-missing", "error", text, ALONE, (case.restart(),))


def _denied(case: Case) -> Finding:
    """Return why this user may not connect."""
    found, host = case.socket, case.host
    assert found.found is not None
    commands: tuple[str, ...]
    mode, gid = stat.S_IMODE(found.found.st_mode), found.found.st_gid
    user, group = storage.user_name(os.geteuid()), storage.group_name(gid)
    text = f"{found.path} (mode {mode:04o}, group {group}): user {user} may not connect"
    if gid in (os.getegid(), *os.getgroups()) or mode & 0o020 == 0:
        commands = (host.as_root(f"chmod 0660 {shlex.quote(found.path)}"),)
        effect = f"{ALONE} Set socket_mode (SocketMode= of the service) to keep the mode."
        return Finding("socket-mode", "error", text, effect, commands)
    if gid == 0:
        # Membership in root's group gives more than samples.
        commands = case.setting("socket_group", '"ffserve"', "--socket-group", "ffserve")
        commands = (host.as_root("groupadd -rf ffserve"), *commands)
        text += f"; nobody should become a member of {group}"
        return Finding("socket-group", "error", text, ALONE, commands)
    if _is_member(user, gid):
        text += f"; the user became a member of {group} after this login"
        return Finding("group-login", "error", text, ALONE, (f"newgrp {group}",))
    commands = host.join_group(user, gid, group)
    return Finding(
        "group-member", "error", f"{text}: the user is not a member of {group}", ALONE, commands
    )


def _is_member(user: str, gid: int) -> bool:
    try:
        return user in grp.getgrgid(gid).gr_mem
    except KeyError:
        return False


def _listener(case: Case) -> Iterator[Finding]:
    """Judge the process that listens."""
    found, process = case.socket, case.process
    # Below /run only an administrator gives anybody a directory.
    trusted = found.uid in (0, os.geteuid()) or found.path.startswith("/run/ffserve/")
    if not trusted and (not found.given or "FFSERVE_SOCKET" in os.environ):
        name = storage.user_name(found.uid)
        yield Finding(
            "socket-of-another",
            "warning",
            f"{found.path}: user {name} listens on this socket",
            f"Your jobs pass their files to a program of {name} and trust what it sends.",
            ("unset FFSERVE_SOCKET", "ffserve serve"),
        )
    if process.stopped:
        command = f"kill -CONT {process.pid}"
        yield Finding(
            "daemon-stopped",
            "error",
            f"{process.name} is stopped (a signal, or a debugger)",
            "Jobs wait for 10 s and then read the files by themselves.",
            (command if process.uid == os.geteuid() else case.host.as_root(command),),
        )
    mode = stat.S_IMODE(found.found.st_mode) if found.found is not None else 0
    if process.pid and not process.unit and case.config and mode != case.config.socket_mode:
        yield Finding(
            "socket-mode",
            "warning",
            f"{found.path} has mode {mode:04o}, but the settings say {case.config.socket_mode:04o}",
            "Not the users that the settings name may connect, but others.",
            (case.host.as_root(f"chmod {case.config.socket_mode:04o} {shlex.quote(found.path)}"),),
        )


# ---- the service ------------------------------------------------------------------------------


def service(case: Case) -> Found:
    """The service is started, and keeps its memory."""
    if not (case.host.systemd and has_unit()):
        return
    shown = _show("ffserve.socket", "ActiveState", "Result")
    daemon = _show(
        "ffserve.service",
        *("ActiveState", "SubState", "Result", "StatusText", "FileDescriptorStoreMax", "LoadState"),
    )
    state = f"{shown.get('ActiveState')}, {daemon.get('ActiveState')}"
    yield f"ffserve.socket and ffserve.service: {state}"
    as_root = case.host.as_root
    if "failed" in (shown.get("ActiveState"), daemon.get("ActiveState")):
        unit, result = "ffserve.socket", shown.get("Result")
        if shown.get("ActiveState") != "failed":
            unit, result = "ffserve.service", daemon.get("Result")
        yield Finding(
            "service-failed",
            "error",
            f"{unit} has failed ({result})",
            f"systemd does not start it again. {ALONE}",
            (
                f"journalctl -u {unit} -u ffserve.service -n 20 --no-pager",
                as_root("systemctl reset-failed 'ffserve.*'"),
                as_root("systemctl start ffserve.socket"),
            ),
        )
    elif daemon.get("SubState") in ("auto-restart", "stop-post") or re.match(
        r"start \d+ follows", daemon.get("StatusText", "")
    ):
        why = daemon.get("StatusText") or daemon.get("Result")
        yield Finding(
            "service-failed",
            "error",
            f"the service fails at each start ({why}){_last_error()}",
            f"systemd tries again, at most 10 s after each failure. {ALONE}",
            (
                as_root("ffserve serve --check"),
                "journalctl -u ffserve.service -n 20 --no-pager",
            ),
        )
    elif shown.get("ActiveState") == "inactive" and case.facts is None:
        commands = (as_root("systemctl enable --now ffserve.socket"),)
        text = "the service is installed, but its socket is not started"
        yield Finding("service-inactive", "error", text, ALONE, commands)
    if daemon.get("FileDescriptorStoreMax") == "0" and daemon.get("LoadState") == "loaded":
        path = "/etc/systemd/system/ffserve.service.d/store.conf"
        yield Finding(
            "service-store",
            "warning",
            "the unit keeps no descriptors (FileDescriptorStoreMax=0)",
            "A daemon that is restarted or killed comes back with empty memory.",
            (
                as_root(f"mkdir -p {os.path.dirname(path)}"),
                case.host.write(path, "[Service]", "FileDescriptorStoreMax=800"),
                as_root("systemctl daemon-reload"),
                as_root("systemctl restart ffserve.service"),
            ),
        )
    hidden = [f"{UNITS[0]}/{name}" for name in ("ffserve.service", "ffserve.socket")]
    for path in hidden:
        masked = os.path.realpath(path) == os.devnull
        if not masked and all(map(os.path.exists, (path, path.replace(UNITS[0], UNITS[1])))):
            yield Finding(
                "service-hidden",
                "warning",
                f"{path} hides the unit that `ffserve install-service` wrote",
                "The service is not what this release installed.",
                (as_root(f"rm {path}"), as_root("systemctl daemon-reload")),
            )


def units(case: Case) -> Found:
    """The units may be started, and the socket has its file and its group."""
    if not (case.host.systemd and has_unit()):
        return
    as_root = case.host.as_root
    for unit in ("ffserve.socket", "ffserve.service"):
        if os.path.realpath(f"{UNITS[0]}/{unit}") == os.devnull:
            commands = (
                as_root(f"systemctl unmask {unit}"),
                as_root("systemctl enable --now ffserve.socket"),
            )
            text = f"{unit} is masked: systemd does not start it"
            yield Finding("service-masked", "error", text, ALONE, commands)
    shown = _show("ffserve.socket", "ActiveState", "SocketGroup")
    for address in _given_addresses() if shown.get("ActiveState") == "failed" else ():
        if not address.startswith("/") and (taken := _taken(address)) is not None:
            yield Finding(
                "settings-unusable",
                "error",
                f"ffserve.socket {taken}",
                "systemd cannot make the socket.",
                (
                    _listeners(address),
                    as_root("systemctl reset-failed 'ffserve.*'"),
                    as_root("systemctl start ffserve.socket"),
                ),
            )
    restart = restart_if_removed(SYSTEM_SOCKET)
    if restart and case.socket.path != SYSTEM_SOCKET:
        text = f"{SYSTEM_SOCKET} was removed, while a daemon listens on it"
        yield Finding("socket-missing", "error", text, ALONE, (as_root(restart),))
    group = shown.get("SocketGroup", "")
    if group and not group.isdecimal() and group not in {each.gr_name for each in grp.getgrall()}:
        path = "/etc/systemd/system/ffserve.socket.d/zz-group.conf"
        yield Finding(
            "settings-unusable",
            "error",
            f"the socket's group {group!r} (SocketGroup= of ffserve.socket) does not exist",
            "systemd cannot make the socket.",
            (
                as_root(f"mkdir -p {os.path.dirname(path)}"),
                case.host.write(path, "[Socket]", "SocketGroup=ffserve"),
                as_root("systemctl daemon-reload"),
                as_root("systemctl reset-failed 'ffserve.*'"),
                as_root("systemctl start ffserve.socket"),
            ),
        )


def _starts(unit: str) -> bool:
    """Return whether this service has not started yet: it may fail each time."""
    return _show(unit, "ActiveState").get("ActiveState") == "activating"


def _show(unit: str, *properties: str) -> dict[str, str]:
    """Return properties of a unit, with a line for each value; none if there is no unit or systemd
    does not answer."""
    found: dict[str, str] = {}
    show = ("systemctl", "show", unit, f"--property={','.join(properties)}")
    for line in _said(*show) if unit else ():
        name, equals, value = line.partition("=")
        if equals:
            found[name] = f"{found[name]}\n{value}" if name in found else value
    return found


def _last_error() -> str:
    """Return what the service said last before it failed, as far as this user may read it."""
    words = ("-p", "err", "-n", "9", "-o", "cat", "--no-pager")
    said = _said("journalctl", "_SYSTEMD_UNIT=ffserve.service", *words)
    errors = [line for line in said if line.startswith("error: ")]
    return f"; {errors[-1]}" if errors else ""


def _said(*command: str) -> list[str]:
    """Return the lines that a command of systemd writes; none if it does not answer."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()


# ---- the daemon -------------------------------------------------------------------------------


def daemon(case: Case) -> Found:
    """The daemon answers, is of this release, and its memory can be mapped."""
    if (error := case.failure) is not None:
        yield _refused(case, error)
    facts = case.facts
    if facts is None:
        yield "none answers"
        return
    version = str(facts["version"])
    yield f"{version}, pid {facts['pid']}; this is {__version__}"
    if version != __version__:
        yield Finding(
            "version-differs",
            "warning",
            f"the daemon is ffserve {version}, but this installation is {__version__}",
            "Jobs of this installation cannot use what only one of the two releases has.",
            (shlex.join([sys.executable, "-m", "pip", "install", f"ffserve=={version}"]),),
        )
    if (fault := case.unmapped) is not None and can_map(int(facts["arena"]["limit"])):
        yield Finding("memory-unmapped", "warning", str(fault), ALONE, _mapping(case, fault))
    damaged = int(facts["cache"]["checksum_failures"])
    if damaged:
        files = shlex.join([path for path, _ in case.data]) or "FILES"
        text = f"{damaged:,} samples did not match their checksum since the daemon started"
        commands = (f"ffserve verify {files}",)
        yield Finding("data-damaged", "error", text, "Jobs get errors for these samples.", commands)
    unseen = any((domain["namespace"] or 0) < 0 for domain in facts.get("domains", ()))
    own = Process.of()
    # Users are not told of the domains of others, nor of those that are of one process.
    if unseen or (own is not None and case.process.depth > own.depth):
        yield Finding(
            "containers-unseen",
            "warning",
            "the daemon does not see in which containers its clients are",
            "Samples that not everybody may read are kept once for each process of a job.",
            ("podman run --pid=host IMAGE",)
            if case.host.container != "kubernetes"
            else ("kubectl -n ffserve edit daemonset ffserve  # hostPID: true",),
        )


def _mapping(case: Case, error: FFServeError) -> tuple[str, ...]:
    """Return the commands that let the daemon's memory reach this process, or show what is in the
    way."""
    if error.hint == MORE_FILES:
        return ("ulimit -n $(ulimit -Hn)",)
    path, own = case.socket.path, case.process.flags().get("--socket", [""])[-1]
    if os.path.isabs(own) and os.path.realpath(own) != os.path.realpath(path):
        return (f"export FFSERVE_SOCKET={shlex.quote(own)}",)  # a proxy listens at the other one
    return f"ss -xlp src {shlex.quote(path)}", "grep Seccomp /proc/self/status"


def _refused(case: Case, error: FFServeError) -> Finding:
    """Return why a daemon that listens does not serve."""
    text = str(error)
    if isinstance(error, ProtocolError):
        effect = f"Daemon and jobs must speak one version of the protocol. {ALONE}"
        return Finding("version-protocol", "error", text, effect, _upgrades(case, error))
    log = ("journalctl -u ffserve -n 20 --no-pager",) if case.host.systemd else ()
    return Finding("daemon-silent", "error", text, ALONE, (*log, case.restart()))


def _upgrades(case: Case, error: ProtocolError) -> tuple[str, ...]:
    """Return the commands that upgrade the side that is older, as the daemon says; both sides if it
    does not say it."""
    pip = ["-m", "pip", "install", "--upgrade", "ffserve"]
    here = shlex.join([sys.executable, *pip])
    if error.message.startswith("upgrade ffserve in this client"):
        return (here,)
    process = case.process
    there = shlex.join([process.command[0] if process.is_daemon else "python3", *pip])
    there = there if process.uid == os.geteuid() else case.host.as_root(there)
    if error.message.startswith("upgrade the daemon"):
        return there, case.restart()
    return (*dict.fromkeys((here, there)), case.restart())


CHECKS: dict[str, Callable[[Case], Found]] = {
    "kernel": resources.kernel,
    "engine": resources.io_uring,
    "memory": resources.memory,
    "shared memory": resources.shared_memory,
    "/dev/shm": resources.shm,
    "open files": resources.open_files,
    "locked memory": resources.locked_memory,
    "address space": resources.address_space,
    "processors": resources.cpu,
    "settings": settings,
    "socket": socket,
    "service": service,
    "units": units,
    "daemon": daemon,
    "data": storage.data,
    "clock": resources.clock,
}
"""All checks, by their names in the list of facts."""


def chosen(case: Case) -> dict[str, Callable[[Case], Found]]:
    """Return the checks that apply. Nothing is known about the limits of a daemon that this user
    may not reach, so they are not judged."""
    if case.socket.state not in ("denied", "closed"):
        return CHECKS
    limits = ("memory", "open files", "locked memory", "processors")
    return {name: check for name, check in CHECKS.items() if name not in limits}
