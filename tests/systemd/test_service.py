"""The service under a real systemd (`make systemd`): installed as documented, used by
members and outsiders, damaged, upgraded and removed."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import DEADLINE_S, sample, until, write
from service_machine import (
    COUNT,
    FFSERVE,
    PRIVATE,
    SETTINGS,
    SMALL,
    WHOLE,
    answers_again,
    has_moved,
    job,
    status,
)
from systemd_container import DATA, ROOT, SOURCE, Container

sys.path.insert(0, str(ROOT))
from benchmarks.harness.cgroup import limited

pytestmark = [pytest.mark.systemd, pytest.mark.usefixtures("sound")]


def test_the_installation_of_the_document_starts_the_daemon_with_the_first_client(
    machine: Container,
) -> None:
    assert machine.run("systemctl", "is-enabled", "ffserve.socket").strip() == "enabled"
    assert machine.property("ffserve.service", "ActiveState") == "inactive"
    assert machine.last == "ffserve status"
    assert "memory " in machine.run(*machine.last.split(), user="alice")
    assert machine.property("ffserve.service", "ActiveState") == "active"
    assert "clients: " in machine.property("ffserve.service", "StatusText")
    assert machine.property("ffserve.service", "User") == "ffserved"
    run = f"_SYSTEMD_INVOCATION_ID={machine.property('ffserve.service', 'InvocationID')}"
    assert "error" not in machine.run("journalctl", "--no-pager", "-o", "cat", run).lower()


def test_a_member_is_served_and_an_outsider_reads_by_himself(machine: Container) -> None:
    with job(machine) as member:
        pass
    assert member["sources"] == ["daemon"]
    with job(machine, "auto", "bob") as outsider:
        pass
    assert outsider["sources"] == ["engine"]
    refused = machine.run(FFSERVE, "status", user="bob", code=3)
    assert "/run/ffserve/ffserve.sock" in refused and "Permission denied" in refused


@pytest.mark.parametrize("how", ["restart", "kill", "watchdog", "memory"])
def test_a_job_goes_on_with_the_next_daemon(how: str, machine: Container) -> None:
    if how == "watchdog":
        machine.write(
            "/run/systemd/system/ffserve.service.d/test.conf", "[Service]\nWatchdogSec=2\n"
        )
        machine.run("systemctl", "daemon-reload")
    whole = {"least": WHOLE}
    with job(machine, **whole) as facts, job(machine, path=PRIVATE, **whole) as private:
        pid = machine.pid()
        assert status(machine, "root")["cache"]["blocks_read"] > 0
        kept = machine.property("ffserve.service", "NFileDescriptorStore")
        restarts = int(machine.property("ffserve.service", "NRestarts"))
        if how == "restart":
            machine.run("systemctl", "restart", "ffserve.service")
        elif how == "memory":
            run_out_of_memory(pid)
        else:
            os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        answers_again(machine, pid)
        has_moved(machine, facts, private)
        assert status(machine, "root")["cache"]["blocks_read"] == 0
        assert machine.property("ffserve.service", "NFileDescriptorStore") == kept
    assert facts["sources"] == private["sources"] == ["daemon"]
    if how != "restart":
        assert int(machine.property("ffserve.service", "NRestarts")) == restarts + 1
    if how == "watchdog":
        assert "Watchdog timeout" in machine.run("journalctl", "--no-pager", "-u", "ffserve")


def test_memory_is_let_go_when_the_service_stops(machine: Container) -> None:
    with job(machine, least=WHOLE):
        assert int(machine.property("ffserve.service", "NFileDescriptorStore")) >= 5
    machine.run("systemctl", "stop", "ffserve.service")
    assert machine.property("ffserve.service", "NFileDescriptorStore") == "0"
    with job(machine, least=WHOLE):
        assert status(machine, "root")["cache"]["blocks_read"] > 0


def run_out_of_memory(pid: int) -> None:
    """Have the kernel kill a process for lack of memory that another takes."""
    hog = (
        "import os, sys, time\n"
        "held = []\n"
        "while os.path.exists(f'/proc/{sys.argv[1]}'):\n"
        "    held.append(b'x' * (1 << 20))\n"
        "    time.sleep(0.001)\n"
    )
    with limited(memory_size=200 << 20) as group:
        group.join(pid)
        Path(f"/proc/{pid}/oom_score_adj").write_text("900")
        process = subprocess.Popen([sys.executable, "-c", hog, str(pid)], preexec_fn=group.join)
        process.wait(DEADLINE_S)
        assert group.killed() >= 1


def test_settings_are_reloaded_without_losing_the_cache(machine: Container) -> None:
    with job(machine, least=WHOLE) as facts:
        pid = machine.pid()
        read = status(machine, "root")["cache"]["blocks_read"]
        machine.write(SETTINGS, f'arena = "128M"\nmax_arena = "256M"\nroots = ["{DATA}"]\n')
        machine.run("systemctl", "reload", "ffserve.service")
        until(lambda: status(machine)["arena"]["size"] == 128 << 20, "it has grown")
        assert status(machine)["roots"] == [DATA]
        machine.write(SETTINGS, 'roots = ["/data"]\narena = "128X"\n')
        machine.run("systemctl", "reload", "ffserve.service", code=1)
        assert f"{SETTINGS}: line 2: arena: invalid size '128X'" in machine.log()
        assert machine.property("ffserve.service", "ActiveState") == "active"
        assert machine.pid() == pid
        facts["go_on"]()
        assert status(machine, "root")["cache"]["blocks_read"] == read


def test_settings_that_are_not_valid_stop_the_service_and_no_job(machine: Container) -> None:
    machine.write(SETTINGS, "# no\n\ndepth = 0\n")
    assert "line 3: depth: expected a whole number from 1 to 4096" in machine.run(
        FFSERVE, "serve", "--check", code=2
    )
    with job(machine, "auto") as facts:
        until(
            lambda: int(machine.property("ffserve.service", "NRestarts")) >= 7,
            "systemd tries again and again",
            3 * DEADLINE_S,
        )
        assert machine.property("ffserve.socket", "ActiveState") == "active"
    assert facts["sources"] == ["engine"]
    assert f"error: {SETTINGS}: line 3: depth: expected a whole number" in machine.log()
    errors = machine.run("journalctl", "--no-pager", "-o", "cat", "-u", "ffserve", "-p", "err")
    assert f"error: {SETTINGS}: line 3: depth: expected a whole number" in errors
    assert "serving " not in errors and "stopping: " not in errors
    waits = "start 8 follows in 10 s: the last 7 failed"
    until(lambda: waits in machine.property("ffserve.service", "StatusText"), "it says why")
    machine.write(SETTINGS, SMALL)
    until(lambda: machine.property("ffserve.service", "ActiveState") == "active", "it starts")
    with job(machine) as again:
        pass
    assert again["sources"] == ["daemon"]


def test_a_daemon_that_is_killed_again_and_again_comes_back_with_its_memory(
    machine: Container,
) -> None:
    with job(machine, least=WHOLE) as facts, job(machine, path=PRIVATE, least=WHOLE) as private:
        kept = machine.property("ffserve.service", "NFileDescriptorStore")
        pid, end = 0, time.monotonic() + 30
        while time.monotonic() < end:
            pid = until(lambda pid=pid: machine.pid() not in (0, pid) and machine.pid(), "another")
            time.sleep(3 * random.random())
            os.kill(pid, signal.SIGKILL)
        answers_again(machine, pid)
        has_moved(machine, facts, private)
        assert status(machine, "root")["cache"]["blocks_read"] == 0
        assert machine.property("ffserve.service", "NFileDescriptorStore") == kept
    assert facts["sources"] == private["sources"] == ["daemon"]


def test_many_restarts_fail_neither_service_nor_socket(machine: Container) -> None:
    with job(machine, least=WHOLE) as facts:
        for _ in range(7):
            machine.run("systemctl", "restart", "ffserve.service")
        for _ in range(5):
            os.kill(machine.pid(), signal.SIGKILL)
            until(lambda: machine.pid() != 0, "the next one")
        has_moved(machine, facts)
        assert machine.property("ffserve.socket", "ActiveState") == "active"
    assert facts["sources"] == ["daemon"]


def test_a_program_that_is_missing_is_tried_again_later(machine: Container) -> None:
    try:
        machine.run("mv", FFSERVE, f"{FFSERVE}.away")
        with job(machine, "auto") as facts:
            until(lambda: "203/EXEC" in machine.log(), "it cannot be run")
        assert facts["sources"] == ["engine"]
        assert int(machine.property("ffserve.service", "NRestarts")) <= 3, "each takes 10 s"
    finally:
        machine.run("mv", f"{FFSERVE}.away", FFSERVE)
    until(lambda: machine.property("ffserve.service", "ActiveState") == "active", "it starts")
    with job(machine) as again:
        pass
    assert again["sources"] == ["daemon"]


def test_a_restart_makes_the_socket_anew_when_its_directory_was_removed(
    machine: Container,
) -> None:
    with job(machine, least=WHOLE) as facts:
        pid = machine.pid()
        machine.run("rm", "-rf", "/run/ffserve")
        said = "/run/ffserve/ffserve.sock was removed"
        until(lambda: said in machine.property("ffserve.service", "StatusText"), "it says so")
        assert f"{said}, so no job finds the daemon" in machine.log()
        machine.run("systemctl", "restart", "--no-block", "ffserve.service")
        until(lambda: machine.run("ls", "/run/ffserve", code=None) == "ffserve.sock\n", "a socket")
        answers_again(machine, pid)
        has_moved(machine, facts)
        assert status(machine, "root")["cache"]["blocks_read"] == 0, "the memory survives"
    assert facts["sources"] == ["daemon"]


def test_out_of_memory_a_job_that_takes_too_much_ends_and_not_the_daemon(
    machine: Container,
) -> None:
    big = machine.data / "big.ffr"
    write(big, [bytes([index]) * (1 << 20) for index in range(100)])
    machine.write(SETTINGS, 'arena = "128M"\nmax_arena = "128M"\n')
    read = "import ffserve\nfor s in ffserve.open('/data/big.ffr', server='require'): pass"
    machine.run("/opt/job/bin/python", "-c", read, user="alice")
    pid = machine.pid()
    assert machine.property("ffserve.service", "OOMScoreAdjust") == "-900"
    # Where root may not lower it, the job's is higher by as much instead: the kernel compares them.
    protected = int(Path(f"/proc/{pid}/oom_score_adj").read_text())
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    limit = 120 << 20
    assert size > limit, "it is larger than the job will be"
    hog = "held = []\nwhile True: held.append(b'x' * (1 << 20))"
    with limited(memory_size=limit) as group:
        group.join(pid)
        process = subprocess.Popen(
            ["sh", "-c", f'echo {900 + protected} > /proc/self/oom_score_adj; exec "$@"', "sh",
             sys.executable, "-c", hog], preexec_fn=group.join,
        )  # fmt: skip
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
        assert group.killed() == 1
        assert machine.pid() == pid
        machine.run("/opt/job/bin/python", "-c", read, user="alice")
        machine.run("systemctl", "stop", "ffserve.service")
    big.unlink()


def test_check_as_root_judges_for_the_user_and_the_limits_of_the_unit(machine: Container) -> None:
    check = (FFSERVE, "serve", "--check")
    said = machine.run(*check)
    assert "judged for ffserve.service: user ffserved, 524288 open files" in said
    machine.write(SETTINGS, SMALL + 'common = "user"\n')
    machine.run(*check)
    machine.run("chmod", "600", SETTINGS)
    said = machine.run(*check, code=2)
    assert "the user of ffserve.service may not read this file" in said
    assert f"hint: chmod a+r {SETTINGS}" in said
    machine.run("chmod", "644", SETTINGS)
    limits = "[Service]\nMemoryMax=100M\nLimitNOFILE=20\n"
    machine.write("/run/systemd/system/ffserve.service.d/small.conf", limits)
    machine.run("systemctl", "daemon-reload")
    assert "the limit on open files is 20" in machine.run(*check, code=2)
    machine.write("/run/systemd/system/ffserve.service.d/small.conf", "[Service]\nMemoryMax=70M\n")
    machine.run("systemctl", "daemon-reload")
    assert "exceed the 70.0 MiB of memory" in machine.run(*check, code=2)
    machine.run("rm", "-r", "/run/systemd/system/ffserve.service.d")
    machine.run("systemctl", "daemon-reload")
    machine.write(SETTINGS, '[store]\ndirectory = "/srv/store"\naccess = "own"\n')
    assert "not judged: whether the service may write to /srv/store" in machine.run(*check)


def test_a_job_goes_on_without_a_daemon_that_is_stopped(machine: Container) -> None:
    with job(machine, "auto") as facts:
        machine.run("systemctl", "stop", "ffserve.socket", "ffserve.service")
        assert machine.run("ls", "/run/ffserve") == ""
        until(lambda: machine.pid() == 0, "the daemon has ended")
        time.sleep(1)
    assert "daemon" in facts["sources"]
    assert machine.property("ffserve.service", "Result") == "success"


def test_several_daemons_have_settings_users_and_caches_of_their_own(machine: Container) -> None:
    machine.write("/etc/ffserve/fast.toml", 'arena = "32M"\n')
    machine.run("systemctl", "enable", "--now", "--quiet", "ffserve@fast.socket")
    socket = "/run/ffserve/fast.sock"
    assert status(machine, "alice", "--socket", socket)["arena"]["size"] == 32 << 20
    assert status(machine)["arena"]["size"] != 32 << 20
    with job(machine, socket) as facts:
        pass
    assert facts["sources"] == ["daemon"]
    users = {
        Path(f"/proc/{machine.pid(unit)}/status").read_text().partition("\nUid:")[2].split()[0]
        for unit in ("ffserve.service", "ffserve@fast.service")
    }
    assert len(users) == 2 and "0" not in users
    caches = machine.run("ls", "/var/cache/private").split()
    assert {"ffserve", "ffserve-fast"} <= set(caches)
    machine.run("systemctl", "restart", "ffserve@fast.service")
    machine.run("systemctl", "reload", "ffserve@fast.service")


def test_systemd_listens_for_http_and_the_daemon_needs_no_network(machine: Container) -> None:
    folder = "/run/systemd/system/ffserve.socket.d"
    ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9469/{}').read().decode())"
    try:
        machine.run("mkdir", "-p", folder)
        machine.write(f"{folder}/http.conf", "[Socket]\nListenStream=127.0.0.1:9469\n")
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "restart", "ffserve.socket")
        assert machine.property("ffserve.service", "ActiveState") == "inactive"
        # Anybody may ask, and sees totals.
        text = machine.run("/opt/ffserve/bin/python", "-c", ask.format("metrics"), user="bob")
        assert "ffserve_build_info" in text and "ffserve_job_" not in text
        assert machine.property("ffserve.service", "PrivateNetwork") == "yes"
        with job(machine) as facts:
            assert machine.run("/opt/ffserve/bin/python", "-c", ask.format("readyz")) == "ok\n\n"
        assert facts["sources"] == ["daemon"]
    finally:
        machine.run("rm", "-rf", folder)
        machine.run("systemctl", "daemon-reload")


def test_systemd_finds_no_fault_in_the_installed_units(machine: Container) -> None:
    names = ("ffserve.socket", "ffserve.service", "ffserve@fast.socket", "ffserve@fast.service")
    assert (
        machine.run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *names) == ""
    )


def test_an_upgrade_under_load_refuses_no_batch(machine: Container) -> None:
    copy = machine.data / "next"
    leave = shutil.ignore_patterns("*.so", "__pycache__", "build")
    copy.mkdir()
    for name in ("LICENSE", "Makefile", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    for name in ("docs", "ffserve", "systemd"):
        shutil.copytree(ROOT / name, copy / name, ignore=leave)
    for name in ("pyproject.toml", "ffserve/_version.py"):
        text = (copy / name).read_text()
        (copy / name).write_text(
            re.sub(r'(?m)^(__version__|version) = ".*"', r'\1 = "9.9.9"', text)
        )
    with job(machine, least=WHOLE) as facts, job(machine, path=PRIVATE, least=WHOLE) as private:
        pid = machine.pid()
        machine.run("make", "-C", f"{DATA}/next", "install", timeout=300)
        answers_again(machine, pid)
        has_moved(machine, facts, private)
        assert status(machine)["version"] == "9.9.9"
        assert status(machine, "root")["cache"]["blocks_read"] == 0
        # A version that has its tables in another layout.
        pid = machine.pid()
        other = "for f in /opt/ffserve/lib/python*/site-packages/ffserve/cache/inventory.py; do"
        machine.run("sh", "-ec", f"{other} grep -q '^LAYOUT = 1$' $f; sed -i 's/^LAYOUT = 1$/"
                    "LAYOUT = 2/' $f; done")  # fmt: skip
        machine.run("systemctl", "restart", "ffserve.service")
        answers_again(machine, pid)
        has_moved(machine, facts, private)
        assert status(machine, "root")["cache"]["blocks_read"] > 0
        assert "the memory has layout version 1, this version of ffserve has 2" in machine.log()
    assert facts["sources"] == private["sources"] == ["daemon"]
    assert machine.run("cat", SETTINGS) == SMALL, "settings are kept"


VIEW = "ffserve-mount@photos.service"
PLACE = "/mnt/photos"
SHOWN = f"{PLACE}/samples/a.ffr/0/003"


@pytest.fixture
def photos(machine: Container) -> Iterator[None]:
    """A view that is mounted by the words of the documents, and removed at the end."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse here")
    (machine.data / "photos").mkdir(exist_ok=True)
    write(machine.data / "photos" / "a.ffr", [sample(index) for index in range(COUNT)])
    section = (ROOT / "docs/howto/mount.md").read_text().split("\n## As a service\n")[1]
    commands = section.split("```sh\n")[1].split("```")[0].replace("sudo ", "")
    try:
        machine.run("sh", "-ec", commands)
        yield
    finally:
        machine.run("systemctl", "disable", "--now", "--quiet", VIEW)
        machine.run("systemctl", "reset-failed", VIEW, code=None)
        machine.run("rm", "-rf", "/etc/ffserve/photos.conf", PLACE)


def views(machine: Container) -> int:
    """Return how many file systems are mounted by views; passthrough makes two of one view."""
    return machine.run("cat", "/proc/mounts").count(" fuse.ffserve ")


def shows(machine: Container) -> bool:
    """Whether the view is mounted, with its samples and files, for users as well."""
    digest = machine.run("sha256sum", SHOWN, user="bob", code=None).split()[0]
    return digest == hashlib.sha256(sample(3)).hexdigest() and 1 <= views(machine) <= 2


@pytest.mark.usefixtures("photos")
def test_a_view_as_a_service_is_mounted_again_when_it_was_killed(machine: Container) -> None:
    assert shows(machine), machine.log(VIEW)
    machine.run("cmp", f"{PLACE}/shards/a.ffr", f"{DATA}/photos/a.ffr", user="bob")
    assert ", by daemon /run/ffserve/ffserve.sock" in machine.log(VIEW)
    pid = machine.pid(VIEW)
    os.kill(pid, signal.SIGKILL)
    until(lambda: machine.property(VIEW, "NRestarts") == "1", "systemd starts it again")
    until(lambda: machine.property(VIEW, "ActiveState") == "active", "it is mounted again")
    assert machine.pid(VIEW) not in (0, pid) and shows(machine)
    assert "removed the mount of a view whose process had been killed" in machine.log(VIEW)
    machine.run("systemctl", "stop", VIEW)
    assert views(machine) == 0 and machine.run("ls", PLACE) == ""
    assert machine.property(VIEW, "Result") == "success"


@pytest.mark.usefixtures("photos")
def test_a_view_as_a_service_ends_while_files_are_open(machine: Container) -> None:
    program = machine.start("sh", "-c", f"exec 3< {SHOWN}; echo open; sleep 1000", user="bob")
    try:
        assert program.stdout is not None and program.stdout.readline() == "open\n"
        machine.run("systemctl", "stop", VIEW)
        assert views(machine) == 0
        assert machine.property(VIEW, "Result") == "success"
        assert "programs still have files of the view open" in machine.log(VIEW)
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


@pytest.mark.usefixtures("photos")
@pytest.mark.parametrize(
    ("place", "error"),
    [("/etc/hostname", "is not a directory"), ("/etc", "is not empty")],
)
def test_a_view_as_a_service_says_what_is_wrong_with_its_mount_point(
    place: str, error: str, machine: Container
) -> None:
    machine.run("systemctl", "stop", VIEW)
    machine.write("/etc/ffserve/photos.conf", f"MOUNTPOINT={place}\nPATHS={DATA}/photos/*.ffr\n")
    machine.run("systemctl", "start", VIEW, code=1)
    waits = "start 5 follows in 1.6 s: the last 4 failed"
    until(lambda: waits in machine.property(VIEW, "StatusText"), "systemd tries again, later")
    said = machine.log(VIEW)
    assert f"error: {place}: " in said and error in said
    assert views(machine) == 0
    machine.write("/etc/ffserve/photos.conf", f"MOUNTPOINT={PLACE}\nPATHS={DATA}/photos/*.ffr\n")
    until(lambda: machine.property(VIEW, "ActiveState") == "active", "it is mounted")
    count = "NFileDescriptorStore"
    until(lambda: machine.property(VIEW, count) == "0", "the failed starts are forgotten")


def test_a_view_without_settings_is_not_started(machine: Container) -> None:
    machine.run("systemctl", "start", "ffserve-mount@none.service", code=1)
    assert machine.property("ffserve-mount@none.service", "NRestarts") == "0"


def test_removal_leaves_nothing(machine: Container) -> None:
    machine.write("/etc/ffserve/fast.toml", 'arena = "32M"\n')
    machine.run("systemctl", "enable", "--now", "--quiet", "ffserve@fast.socket")
    status(machine, "alice", "--socket", "/run/ffserve/fast.sock")
    status(machine)
    machine.run("cp", f"{SOURCE}/systemd/ffserve.toml", SETTINGS)
    told = machine.run("make", "-C", SOURCE, "uninstall")
    assert "kept /etc/ffserve/fast.toml, which was changed (--purge removes it)" in told
    assert "kept /etc/ffserve/ffserve.toml" not in told, "it is as it was installed"
    machine.run("rm", "-r", "/etc/ffserve")  # a setting that was named
    kept = ("opt/job", SOURCE.lstrip("/"))
    left = (str(path.relative_to(machine.changed)) for path in machine.changed.rglob("*ffserve*"))
    assert [name for name in left if not name.startswith(kept)] == []
    assert machine.run("find", "/run", "-name", "*ffserve*") == ""
    assert set(machine.run("cat", "/etc/group").splitlines()) == machine.before
    assert machine.run("systemctl", "list-units", "--all", "--no-legend", "ffserve*") == ""
    assert machine.run("systemctl", "list-unit-files", "--no-legend", "ffserve*", code=1) == ""
