"""The catalogue of faults: each is brought about in a service under a real systemd, `ffserve
doctor` names it, the commands that it prints are run, and a job is served.

A fault that somebody reports gets a row here. Faults of machines, disks and containers, which need
no service, are in tests/cli/test_doctor.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from daemon import until
from service_machine import FFSERVE, FILE, SETTINGS, SMALL, status
from systemd_container import Container

pytestmark = [pytest.mark.systemd, pytest.mark.usefixtures("sound")]

PYTHON = "/opt/ffserve/bin/python"
OVERLAY = "/srv/overlay/train.ffr"
ADDRESS = "127.0.0.1:9469"


@dataclass(frozen=True)
class Fault:
    """A fault, and what is said of it.

    Args:
        name: of the finding.
        says: a part of its text.
        make: what brings it about, for a shell of root; systemd has read the units again then.
        runs: the daemon runs before. path: of the data that doctor and the job are given.
        user: who asks the doctor. person: what only a person can do, between the diagnosis and the
        commands. left: findings that stay. undo: for what the fixture does not undo.
    """

    name: str
    says: str
    make: str
    runs: bool = False
    path: str = FILE
    user: str = ""
    person: str = ""
    left: tuple[str, ...] = ()
    undo: str = ""


def unit(kind: str, *lines: str) -> str:
    """Return the command that changes a unit; what doctor prints has a later name."""
    folder = f"/run/systemd/system/ffserve.{kind}.d"
    text = "\\n".join((f"[{kind.capitalize()}]", *lines, ""))
    return f"mkdir -p {folder}; printf '{text}' > {folder}/a.conf"


def settings(text: str) -> str:
    """Return the command that writes settings."""
    return f"cat > {SETTINGS} <<'END'\n{SMALL}{text}\nEND"


AGAIN = "systemctl daemon-reload; systemctl restart ffserve.socket"
OPEN = settings('common = "user"') + f"\n{unit('socket', 'SocketMode=0666')}; {AGAIN}"
WITHOUT = "SystemCallFilter=~io_uring_setup io_uring_enter io_uring_register"
REGISTERED = 'engine = "registered"'
LISTENS = unit("socket", f"ListenStream={ADDRESS}")
CONSEQUENCES = ("service-failed", "service-inactive", "socket-stale", "daemon-silent")
"""Findings that a fault brings with it: their commands show the log, or start the service."""

FAULTS = (
    Fault("socket-missing", "was removed, while", "rm -rf /run/ffserve", runs=True),
    Fault("socket-missing", "was removed, while", "rm -rf /run/ffserve"),
    Fault("socket-missing", "was removed, while", "rm -rf /run/ffserve", runs=True, user="alice"),
    Fault(
        "data-file-system", "does not serve files on overlay",
        f"install -D -m 0644 {FILE} {OVERLAY}", runs=True, path=OVERLAY,
    ),
    Fault(  # the setting that mends it is no key of the last table
        "data-file-system", "does not serve files on overlay, such",
        settings('[store]\nsize = "1GiB"') + f"\ninstall -D -m 0644 {FILE} {OVERLAY}",
        runs=True, path=OVERLAY,
    ),
    Fault("settings-open", "mode 0666", OPEN, runs=True),
    Fault("memory-limit", "900 GiB", f"echo 'arena = \"900GiB\"' > {SETTINGS}"),
    Fault("settings-closed", "the user of the service", f"chmod 0600 {SETTINGS}"),
    Fault("settings-invalid", "does not exist", f"rm {SETTINGS}"),
    Fault("settings-invalid", "line 3: depth", settings("depth = 0"),
          person=f"sed -i /depth/d {SETTINGS}"),
    Fault("settings-old", "has the roots", settings('roots = ["/data", "/srv"]'), runs=True),
    Fault(
        "settings-unusable", "HTTP needs a package",
        f"{PYTHON} -m pip uninstall -q -y h11; {LISTENS}; {AGAIN}",
    ),
    Fault("settings-unusable", "has no network", settings(f'http = "{ADDRESS}"')),
    Fault(
        "settings-unusable", f"cannot listen on {ADDRESS} for HTTP",
        f"systemd-run -q --unit=other {PYTHON} -m http.server --bind {ADDRESS.replace(':', ' ')};"
        f"sleep 2; {LISTENS}; {AGAIN} || true",
        person="systemctl stop other",
    ),
    Fault(
        "settings-unusable", "the engine 'registered'",
        f"{settings(REGISTERED)}\n{unit('service', WITHOUT)}; {AGAIN}",
        left=("io_uring-filtered",),
    ),
    Fault(
        "settings-unusable", "'ffsreve'",
        f"{unit('socket', 'SocketGroup=ffsreve')}; {AGAIN} || true",
    ),
    Fault(
        "service-masked", "ffserve.service is masked", "systemctl -q mask ffserve.service",
        undo="systemctl -q unmask ffserve.service",
    ),
    Fault(
        "service-masked", "ffserve.socket is masked", "systemctl -q mask --now ffserve.socket",
        undo="systemctl -q unmask ffserve.socket",
    ),
    Fault("service-inactive", "not started", "systemctl stop ffserve.service ffserve.socket"),
    Fault(
        "service-store", "FileDescriptorStoreMax=0",
        f"{unit('service', 'FileDescriptorStoreMax=0')}; {AGAIN}",
    ),
    Fault(
        "service-hidden", "hides the unit",
        "cp $(systemctl show -P FragmentPath ffserve.service) /etc/systemd/system/; "
        "systemctl daemon-reload",
    ),
    Fault("open-files-low", "1,000", f"{unit('service', 'LimitNOFILE=1000')}; {AGAIN}", runs=True),
)  # fmt: skip


def findings(machine: Container, fault: Fault) -> dict[str, dict[str, Any]]:
    """Return what doctor finds, by name."""
    words = [FFSERVE, "doctor", "--json", fault.path]
    if WITHOUT in fault.make:  # the whole machine lacks it, so doctor runs without it as well
        said = "/run/doctor"
        properties = (WITHOUT, "SystemCallErrorNumber=EPERM", f"StandardOutput=truncate:{said}")
        given = [word for each in ("Type=oneshot", *properties) for word in ("-p", each)]
        machine.run("systemd-run", "-q", "--collect", *given, *words, code=None)
        words = ["cat", said]
    diagnosis = json.loads(machine.run(*words, user=fault.user, code=None))
    # A container may have less locked memory than the unit asks for.
    found = (each for each in diagnosis["findings"] if each["name"] != "locked-memory")
    return {each["name"]: each for each in found}


def try_to_connect(machine: Container) -> None:
    """Have systemd start the service, if it can."""
    machine.run(FFSERVE, "status", user="alice", code=None)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name} {fault.says}")
def test_doctor_names_a_fault_and_its_commands_mend_it(fault: Fault, machine: Container) -> None:
    try:
        if fault.runs:
            status(machine)
        machine.run("sh", "-ec", fault.make, timeout=120)
        try_to_connect(machine)
        if fault.runs:
            until(lambda: machine.pid(), "it runs")
        found = findings(machine, fault)
        others = {*CONSEQUENCES, *fault.left} - {fault.name}
        assert set(found) - others == {fault.name}, found
        assert fault.says in found[fault.name]["text"]
        machine.run("sh", "-ec", fault.person)
        for command in found[fault.name]["commands"]:
            said = command.replace("sudo ", "").replace('"${EDITOR:-vi}"', "true")
            machine.run("sh", "-ec", said, timeout=120)
        read = f"import ffserve; ffserve.open({fault.path!r}, server='require').read([0])"
        machine.run("/opt/job/bin/python", "-c", read, user="alice")
        assert set(findings(machine, fault)) == set(fault.left)
    finally:
        machine.run("sh", "-ec", fault.undo)


def test_nothing_is_found_where_nothing_is_wrong(machine: Container) -> None:
    assert findings(machine, Fault("", "", "")) == {}
    status(machine)
    for user in ("", "alice"):
        assert findings(machine, Fault("", "", "", user=user)) == {}


def test_an_outsider_is_told_to_join_the_group(machine: Container) -> None:
    found = findings(machine, Fault("", "", "", user="bob"))
    assert set(found) == {"group-member"}
    assert "usermod -aG ffserve bob" in found["group-member"]["commands"][0]


def test_status_says_that_the_socket_was_removed(machine: Container) -> None:
    status(machine)
    machine.run("rm", "-rf", "/run/ffserve")
    command = "systemctl restart ffserve.socket ffserve.service"
    for user in ("", "alice"):
        said = machine.run(FFSERVE, "status", user=user, code=3)
        assert "/run/ffserve/ffserve.sock was removed while a daemon listens on it" in said
        assert f"`{command}`" in said
    machine.run(*command.split())
    status(machine)


def test_an_error_at_the_start_of_the_service_is_shown(machine: Container) -> None:
    machine.write(SETTINGS, "depth = 0\n")
    try_to_connect(machine)
    fault = Fault("", "", "")
    until(lambda: "service-failed" in findings(machine, fault), "it fails")
    text = findings(machine, fault)["service-failed"]["text"]
    assert f"error: {SETTINGS}: line 1: depth: expected a whole number" in text
