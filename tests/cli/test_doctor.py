"""`ffserve doctor` names real faults, each with a command, and nothing on a healthy machine."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import container
import pytest
from container import IO_URING, Container, put_inside
from daemon import Daemon, damage, proxy, sample, serving, started, stopped, until, write
from faults import Diagnosis, Doctor, faulty
from fuse import STATFS, fuse

from benchmarks.harness.cgroup import NoCgroup, limited
from ffserve.engine.io import probe
from ffserve.errors import ChecksumError, printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
NOBODY = 65_534
ALICE = 61_001
GROUP = 61_500
AS_NOBODY = [["user", NOBODY]]
FRAGMENTED = "its memory is fragmented"
SYSCTL = "/proc/sys/kernel/io_uring_disabled"
CONTAINERENV = "/run/.containerenv"
CLOCKSOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes users, mounts, control groups")


@pytest.fixture(scope="module")
def doctor() -> Iterator[Doctor]:
    with faulty() as doctor:
        yield doctor


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can search, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="ffs-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def roots() -> Iterator[Path]:
    """Two record files below the roots of the daemon."""
    path = Path(tempfile.mkdtemp(prefix="ffs-"))
    path.chmod(0o755)
    try:
        for name in "ab":
            write(path / f"{name}.ffr", [sample(i) for i in range(20)])
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def daemon(roots: Path) -> Iterator[Daemon]:
    with serving(roots=[roots]) as daemon:
        yield daemon


def found(diagnosis: Diagnosis, *names: str) -> Diagnosis:
    """Check that these were found, and nothing else, each with a command that a shell accepts."""
    # Whether the memory of the machine is fragmented depends on other programs.
    chance = {name for name, each in diagnosis.findings.items() if FRAGMENTED in each["text"]}
    assert set(diagnosis.findings) - chance == set(names), diagnosis.text
    levels = {each["level"] for each in diagnosis.findings.values()}
    assert diagnosis.code == (1 if "error" in levels else 4 if levels else 0)
    for each in diagnosis.findings.values():
        assert each["commands"] and each["text"] and each["effect"]
        for command in each["commands"]:
            done = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stderr)
    return diagnosis


# ---------------------------------------------------------------- nothing wrong


@pytest.mark.skipif(probe()[0] != "registered", reason="something is wrong with this machine")
def test_nothing_is_found_on_a_healthy_machine(doctor: Doctor, daemon: Daemon, roots: Path) -> None:
    before = {path: path.stat() for path in (roots, *roots.iterdir())}
    found(doctor(roots))
    found(doctor(roots, "--socket", daemon.socket))
    daemon_as_seen = doctor.run(roots, "--socket", daemon.socket)
    if FRAGMENTED not in daemon_as_seen.text:
        assert daemon_as_seen.text.endswith("\nfound nothing that is wrong\n")
    assert re.search("engine +registered", daemon_as_seen.text)
    assert f"{roots}: 2 files on " in daemon_as_seen.text
    found(doctor(roots, faults=AS_NOBODY))
    after = {path: path.stat() for path in (roots, *roots.iterdir())}
    for path, state in before.items():
        assert (state.st_mtime_ns, state.st_ctime_ns) == (
            after[path].st_mtime_ns, after[path].st_ctime_ns,
        )  # fmt: skip
    assert before.keys() == after.keys()


def test_what_is_found_is_written_with_its_commands(doctor: Doctor, place: Path) -> None:
    text = doctor.run("--socket", place / "none").text
    assert f"\nerror: {place}/none: this socket does not exist [socket-missing]\n" in text
    assert f"\n    ffserve serve --socket {place}/none\n" in text
    assert text.endswith("\nfound 1 error and 0 warnings; docs/REFERENCE.md explains them\n")


def test_names_are_written_without_control_characters(doctor: Doctor, place: Path) -> None:
    text = doctor.run(f"{place}/\x1b[31m\n").text
    assert "\x1b[31m" not in text and printable("\x1b[31m\n") in text


# ---------------------------------------------------------------- the machine


def test_limits(doctor: Doctor, place: Path) -> None:
    few = [["limit", "RLIMIT_NOFILE", 50]]
    assert "--nofile=524288" in found(doctor(faults=few), "open-files-few").commands(
        "open-files-few"
    )
    low = [["limit", "RLIMIT_NOFILE", 1000]]
    text = found(doctor(faults=low), "open-files-low").text
    assert "234 sessions" in text and "750 record files" in text
    locked = [["cannot_lock"], ["limit", "RLIMIT_MEMLOCK", 8 << 20]]
    commands = found(doctor(faults=locked), "locked-memory").commands("locked-memory")
    assert "prlimit --pid $$ --memlock=unlimited:unlimited" in commands
    space = [["limit", "RLIMIT_AS", 4 << 30]]
    (place / "x.toml").write_text('max_arena = "64GiB"\narena = "1GiB"\n')
    config = ("--config", place / "x.toml")
    commands = found(doctor(*config, faults=space), "address-space").commands("address-space")
    assert commands == "ulimit -v unlimited"


def test_more_files_than_the_daemon_can_open(doctor: Doctor, place: Path) -> None:
    for number in range(61):
        (place / f"{number}.ffr").touch()
    few = [["limit", "RLIMIT_NOFILE", 80]]
    text = found(doctor(place, faults=few), "open-files-data", "open-files-low").text
    assert "has 61 files" in text


def test_io_uring_by_the_kernels_variable(doctor: Doctor) -> None:
    container.seccomp()
    faults = [["own_mounts"], ["showing", SYSCTL, "2\n"], ["deny", "io_uring_setup"]]
    commands = found(doctor(faults=faults), "io_uring-disabled").commands("io_uring-disabled")
    assert commands.startswith("sysctl -w kernel.io_uring_disabled=0\n")
    # For administrators, and the group that the kernel names.
    faults[1] = ["showing", SYSCTL, "1\n"]
    found(doctor(faults=faults), "io_uring-filtered")
    sudo = doctor(faults=[*faults, ["user", NOBODY]]).commands("io_uring-disabled")
    assert re.match(r"(sudo |doas |su -c ')sysctl -w kernel.io_uring_disabled=0", sudo)


def test_io_uring_by_a_filter(doctor: Doctor) -> None:
    container.seccomp()
    whole = found(doctor(faults=[["deny", *IO_URING]]), "io_uring-filtered")
    assert "and io_uring is refused" in whole.findings["io_uring-filtered"]["text"]
    assert whole.commands("io_uring-filtered").startswith("ps -o pid,user,args -p ")
    part = found(doctor(faults=[["deny", "io_uring_register"]]), "io_uring-filtered")
    assert "registered memory" in part.findings["io_uring-filtered"]["text"]
    pod = [["contained"], ["variable", "KUBERNETES_SERVICE_HOST", "x"]]
    kubernetes = [*pod, ["deny", *IO_URING]]
    commands = found(doctor(faults=kubernetes), "io_uring-filtered").commands("io_uring-filtered")
    assert commands.endswith("--set seccomp=Localhost")


def test_shared_memory(doctor: Doctor) -> None:
    container.seccomp()
    found(doctor(faults=[["deny", "memfd_create"]]), "shared-memory", "io_uring-filtered")
    commands = found(doctor(faults=[["no_huge_pages"]]), "huge-pages").commands("huge-pages")
    assert "prctl(41, 0, 0, 0, 0)" in commands


def test_dev_shm(doctor: Doctor) -> None:
    small = [["own_mounts"], ["mount", "shm", "/dev/shm", "tmpfs", "size=64M,mode=1777"]]
    commands = found(doctor(faults=small), "shm-small").commands("shm-small")
    assert commands == "mount -o remount,size=50% /dev/shm"
    closed = [["own_mounts"], ["mount", "shm", "/dev/shm", "tmpfs", "size=1G,mode=0755"]]
    commands = found(doctor(faults=[*closed, *AS_NOBODY]), "shm-closed").commands("shm-closed")
    assert "chmod 1777 /dev/shm" in commands


def test_an_old_kernel(doctor: Doctor) -> None:
    assert "Linux 2.6." in found(doctor(faults=[["old_kernel"]]), "kernel-old").text


def test_control_groups(doctor: Doctor, roots: Path) -> None:
    try:
        with limited(memory_size=80 << 20) as group:
            faults = [["join", *map(str, group._directories)]]
            commands = found(doctor(faults=faults), "memory-limit").commands("memory-limit")
            assert commands.startswith("echo ") and "/sys/fs/cgroup" in commands
        with limited(read_iops=1_000_000, path=str(roots)) as group:
            faults = [["join", *map(str, group._directories)]]
            diagnosis = found(doctor(roots, faults=faults), "disk-limited")
            assert "1,000,000 reads per second" in diagnosis.text
    except NoCgroup as reason:
        pytest.skip(str(reason))


def test_a_control_group_without_a_core(doctor: Doctor) -> None:
    for name, text in (("cpu.max", "50000 100000"), ("cpu/cpu.cfs_quota_us", "50000")):
        quota = Path("/sys/fs/cgroup", os.path.dirname(name), f"ffserve-doctor-{os.getpid()}")
        if not (quota.parent / os.path.basename(name)).exists():
            continue
        quota.mkdir()
        try:
            (quota / os.path.basename(name)).write_text(text)
            faults = [["join", str(quota)]]
            diagnosis = found(doctor(faults=faults), "cpu-limit")
            assert "50 % of a core" in diagnosis.text and str(quota) in diagnosis.text
        finally:
            quota.rmdir()
        return
    pytest.skip("no control groups for processors")


def test_clocks(doctor: Doctor, place: Path) -> None:
    file = write(place / "a.ffr", [b"x"])
    os.utime(file, (time.time() + 86_400, time.time() + 86_400))
    diagnosis = found(doctor(file), "clock-behind")
    assert re.search(r"a file of the data is 86,\d{3} s in the future", diagnosis.text)
    slow = [["own_mounts"], ["showing", CLOCKSOURCE, "hpet\n"]]
    commands = found(doctor(faults=slow), "clock-slow").commands("clock-slow")
    assert commands.endswith(f"> {CLOCKSOURCE}")


def test_a_core_that_is_missing(place: Path) -> None:
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "torch", "spark", "ray", "bench")
    shutil.copytree(ROOT / "ffserve", place / "ffserve", ignore=ignore)
    done = subprocess.run(
        [sys.executable, "-m", "ffserve", "doctor", place],
        cwd=place, env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and not done.stderr
    assert "the C core cannot be loaded" in done.stdout and "[core]" in done.stdout
    assert f"\n    {sys.executable} -m ffserve.engine.build_core\n" in done.stdout


# ---------------------------------------------------------------- the data


def test_data_that_cannot_be_read(doctor: Doctor, place: Path) -> None:
    commands = found(doctor(place / "none"), "data-missing").commands("data-missing")
    assert commands.startswith(f"namei -l {place}/none")
    found(doctor(place), "data-missing")
    private = place / "private"
    private.mkdir(mode=0o700)
    write(private / "a.ffr", [b"x"])
    diagnosis = found(doctor(private / "a.ffr", faults=AS_NOBODY), "data-closed")
    assert diagnosis.commands("data-closed").count(f"chmod a+rx {private}") == 1
    os.chown(private, 0, GROUP)
    private.chmod(0o750)
    diagnosis = found(doctor(private, faults=AS_NOBODY), "data-closed")
    assert f"usermod -aG {GROUP} nobody" in diagnosis.commands("data-closed")
    private.chmod(0o755)
    write(private / "b.ffr", [b"x"])
    (private / "b.ffr").chmod(0o600)
    diagnosis = found(doctor(private, faults=AS_NOBODY), "data-closed")
    assert "1 of 2 files" in diagnosis.text


def test_data_that_are_no_files(doctor: Doctor, place: Path) -> None:
    os.mkfifo(place / "a.ffr")
    diagnosis = found(doctor(place / "a.ffr"), "data-unreadable")
    assert diagnosis.commands("data-unreadable").startswith(f"ffserve verify {place}/a.ffr\n")


def test_damaged_data(doctor: Doctor, place: Path) -> None:
    path = write(place / "a.ffr", [sample(i) for i in range(20)])
    damage(path, 5)
    with serving(roots=[place]) as daemon, daemon.open(path) as reader:
        with pytest.raises(ChecksumError):
            reader.read([5])
        diagnosis = found(doctor(path, "--socket", daemon.socket), "data-damaged")
        assert diagnosis.commands("data-damaged") == f"ffserve verify {path}"
        assert "1 samples did not match" in diagnosis.text


def test_data_that_the_daemon_does_not_serve(
    doctor: Doctor, daemon: Daemon, roots: Path, place: Path
) -> None:
    write(place / "a.ffr", [b"x"])
    diagnosis = found(doctor(place, "--socket", daemon.socket), "data-outside-roots")
    assert f"--root {roots} " in diagnosis.commands("data-outside-roots")
    assert f"--root {place} --handover" in diagnosis.commands("data-outside-roots")


def test_data_in_memory(doctor: Doctor, place: Path) -> None:
    faults = [["own_mounts"], ["mount", "none", str(place), "tmpfs", "size=1M"]]
    path = place / "a.ffr"
    found(doctor(place, faults=[*faults, ["write", str(path), ""]]), "data-in-memory")


@pytest.mark.check
def test_a_file_system_that_does_not_answer(doctor: Doctor, place: Path) -> None:
    begin = place / "begin"
    with fuse(place, STATFS, begin=begin) as path:
        begin.touch()
        faults = [["constant", "ffserve.doctor.probe", "TIMEOUT_S", 3.0]]
        diagnosis = found(doctor(path, place / "source.ffr", faults=faults), "data-silent")
        assert f"the file system on {place}/fuse (fuse) does not answer" in diagnosis.text
        assert f"umount -f -l {place}/fuse" in diagnosis.commands("data-silent")


@pytest.fixture
def disk(place: Path) -> Iterator[tuple[str, Path]]:
    """A device with a file system, and a directory where nobody else sees it mounted."""
    files, image, mounted = place / "files", place / "image", place / "mounted"
    files.mkdir()
    mounted.mkdir()
    write(files / "a.ffr", [sample(i) for i in range(20)])
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-d", files, image], check=True, capture_output=True)
    try:
        done = subprocess.run(
            ["losetup", "--find", "--show", "--direct-io=on", image],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device: {error.stderr}")
    device = done.stdout.strip()
    try:
        yield device, mounted
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


def unused(device: str) -> bool:
    """Return whether no file system on a device is mounted."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL))
    except OSError:
        return False
    return True


def test_disks(doctor: Doctor, disk: tuple[str, Path]) -> None:
    device, mounted = disk
    name = os.path.basename(device)
    queue = f"/sys/block/{name}/queue"
    mount = [["own_mounts"], ["mount", device, str(mounted), "ext4", "errors=continue"]]
    found(doctor(mounted, faults=mount))
    until(lambda: unused(device), "it is unmounted, some time after the last process has gone")
    subprocess.run(["losetup", "--direct-io=off", device], check=True)
    mount[1] = ["mount", device, str(mounted), "ext4", "data=journal,errors=continue"]
    diagnosis = found(
        doctor(
            mounted,
            faults=[
                *mount,
                ["write", f"{queue}/rotational", "1"],
                ["constant", "ffserve.doctor.storage", "VIRTUAL", ["none"]],
                ["write", f"{queue}/read_ahead_kb", "0"],
                ["write", f"{queue}/scheduler", "bfq"],
                ["write", f"/sys/fs/ext4/{name}/trigger_fs_error", "a test"],
            ],
        ),
        "data-buffered", "disk-rotates", "disk-no-read-ahead", "disk-scheduler",
        "disk-loop-buffered", "disk-errors",
    )  # fmt: skip
    assert f"mount -o data=ordered {device} {mounted}" in diagnosis.commands("data-buffered")
    # The commands mend it.
    for kind in ("disk-rotates", "disk-no-read-ahead", "disk-scheduler", "disk-loop-buffered"):
        subprocess.run(diagnosis.commands(kind), shell=True, check=True)
    # The kernel unmounts it some time after the last process has gone.
    fsck = ["fsck.ext4", "-f", "-y", device]
    until(lambda: subprocess.run(fsck, capture_output=True).returncode < 4, "it is repaired")
    mount[1][4] = "data=ordered"
    found(doctor(mounted, faults=mount))


# ---------------------------------------------------------------- settings


def test_settings_that_are_not_valid(doctor: Doctor, place: Path) -> None:
    path = place / "x.toml"
    config = ("--config", path)
    path.write_text("depth = 7\narean = 3\n")
    diagnosis = found(doctor(*config), "settings-invalid")
    assert "did you mean arena" in diagnosis.text
    assert f"+2 {path}" in diagnosis.commands("settings-invalid")
    path.write_text('common = "user"\nsocket_mode = 0o666\nsocket_group = "none-such"\n')
    diagnosis = found(doctor(*config), "settings-unusable", "settings-open")
    path.write_text('socket_group = "none-such"\nroots = ["/", "/none-such"]\n')
    diagnosis = found(doctor(*config), "settings-unusable", "root-missing")
    assert diagnosis.commands("settings-unusable") == "groupadd -r none-such"
    path.write_text('arena = "4096TiB"\n')
    diagnosis = found(doctor(*config), "memory-limit")
    assert re.search("ffserve serve --socket .* --arena ", diagnosis.commands("memory-limit"))
    found(doctor("--config", place / "none"), "settings-invalid")
    path.chmod(0o600)
    commands = found(doctor(*config, faults=AS_NOBODY), "settings-closed")
    assert f"chmod a+r {path}" in commands.commands("settings-closed")


def mended(doctor: Doctor, name: str, *faults: list[Any], text: str = "") -> Diagnosis:
    """Find a fault, apply what is printed, without systemd, and see it gone."""
    diagnosis = found(doctor(faults=list(faults)), name)
    assert text in diagnosis.findings[name]["text"], diagnosis.text
    commands = diagnosis.findings[name]["commands"]
    done = [command for command in commands if not command.startswith("systemctl ")]
    assert done and len(done) < len(commands), "it is changed, and the service is told of it"
    for command in done:
        subprocess.run(command, shell=True, check=True)
    found(doctor(faults=list(faults)))
    return diagnosis


def test_settings_with_which_the_service_cannot_start(doctor: Doctor, place: Path) -> None:
    path = place / "x.toml"
    service = ["service", str(path)]
    mended(doctor, "settings-invalid", service, text="does not exist")
    path.chmod(0o600)
    mended(doctor, "settings-closed", service, text="the user of the service")
    masked = ["masked", "ffserve.service"]
    commands = found(doctor(faults=[service, masked]), "service-masked").commands("service-masked")
    assert commands.startswith("systemctl unmask ffserve.service\n")
    path.write_text('arena = "900GiB"\n')
    diagnosis = mended(doctor, "memory-limit", service, text="900 GiB")
    assert "systemctl restart ffserve.service" in diagnosis.commands("memory-limit")
    container.seccomp()
    path.write_text('engine = "registered"\n')
    without = ["deny", *IO_URING]
    diagnosis = doctor(faults=[service, without])
    found(diagnosis, "settings-unusable", "io_uring-filtered")
    change, _ = diagnosis.findings["settings-unusable"]["commands"]
    subprocess.run(change, shell=True, check=True)
    found(doctor(faults=[service, without]), "io_uring-filtered")


@pytest.mark.parametrize(
    "text",
    [
        "# nothing",
        "[store]\ncommon = []\nsize = 'auto'\n",
        "depth = 7\n\n  [store]\ncommon = []",
        "roots = [\n  '/data',  # ]\n  '/a\\b',\n]\ndepth = 7\n[store]\ncommon = []\n",
        "roots = ['/data']\nfile_systems = ['fuse', 0x1234]\nstore.common = []\n",
    ],
)
def test_a_setting_is_changed_in_its_own_table(doctor: Doctor, place: Path, text: str) -> None:
    """What else the file says stays, even if a table or no line break is its end."""
    settings, lower, upper = place / "x.toml", place / "lower", place / "upper"
    for folder in (lower, upper, place / "data"):
        folder.mkdir()
    write(upper / "a.ffr", [b"x"])
    settings.write_text(text)
    overlay = ["mount", "none", f"{place}/data", "overlay", f"lowerdir={upper}:{lower}"]
    diagnosis = doctor(place / "data", faults=[["service", str(settings)], overlay])
    before = tomllib.loads(text)
    changes = {"data-file-system": {"file_systems": [*before.get("file_systems", []), "overlay"]}}
    if "roots" in before:
        changes["data-outside-roots"] = {"roots": [*before["roots"], str(place / "data")]}
    assert set(changes) <= set(diagnosis.findings)
    for name, change in changes.items():
        settings.write_text(text)
        command, _ = diagnosis.findings[name]["commands"]
        subprocess.run(command, shell=True, check=True)
        assert tomllib.loads(settings.read_text()) == {**before, **change}


def test_packages_that_the_settings_need(doctor: Doctor, place: Path) -> None:
    path = place / "x.toml"
    path.write_text('http = "127.0.0.1:9"\n')
    diagnosis = found(doctor("--config", path, faults=[["without", "h11"]]), "settings-unusable")
    assert "ffserve[metrics]" in diagnosis.commands("settings-unusable")


def test_a_port_for_metrics_that_is_taken(doctor: Doctor, place: Path) -> None:
    path = place / "x.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path.write_text(f'http = "127.0.0.1:{port}"\n')
        diagnosis = found(doctor("--config", path), "settings-unusable")
        assert diagnosis.commands("settings-unusable").startswith(f"ss -ltnp 'sport = :{port}'")
    found(doctor("--config", path))


def test_what_only_one_user_may_read_is_open_to_all(doctor: Doctor) -> None:
    box = Container(users=None, namespaces=(), uid=ALICE)
    daemon = Daemon(options=["--common", "user"])
    daemon.directory.chmod(0o777)
    put_inside(daemon, box)
    with started(daemon):
        assert "settings-open" not in doctor("--socket", daemon.socket).findings
        os.chmod(daemon.socket, 0o666)
        diagnosis = doctor("--socket", daemon.socket)
        (command,) = diagnosis.findings["settings-open"]["commands"]
        subprocess.run(command, shell=True, check=True)
        assert "settings-open" not in doctor("--socket", daemon.socket).findings


@pytest.mark.parametrize(
    ("made", "again", "groups"),
    [
        (
            [["variable", "KUBERNETES_SERVICE_HOST", "x"]],
            "kubectl -n ffserve rollout restart",
            f"supplementalGroups: [{GROUP}]",
        ),
        (
            [["own_mounts"], ["mount", "none", "/run", "tmpfs", ""], ["write", CONTAINERENV, ""]],
            "podman run IMAGE",
            f"podman run --group-add {GROUP} ",
        ),
    ],
    ids=["kubernetes", "podman"],
)
def test_in_a_container_nothing_ends_it_and_groups_are_given_from_outside(
    doctor: Doctor, daemon: Daemon, place: Path, made: list[list[str]], again: str, groups: str
) -> None:
    inside = [*made, ["contained"]]
    write(place / "a.ffr", [b"x"])
    everything = doctor(place, "--socket", daemon.socket, faults=inside).text
    assert "data-outside-roots" in everything and again in everything
    with listening(place / "s", 0o660, GROUP) as path:
        member = doctor("--socket", path, faults=[*inside, *AS_NOBODY])
        assert groups in member.commands("group-member")
        everything += member.text
    assert not re.search("--handover|su -c|usermod", everything)


def test_settings_that_the_daemon_has_not_taken_over(
    doctor: Doctor, daemon: Daemon, place: Path
) -> None:
    (place / "x.toml").write_text('roots = ["/"]\n')
    diagnosis = doctor("--config", place / "x.toml", "--socket", daemon.socket)
    assert f"kill -HUP {daemon.pid}" in found(diagnosis, "settings-old").commands("settings-old")


# ---------------------------------------------------------------- the socket


@contextlib.contextmanager
def listening(path: Path, mode: int, group: int = 0) -> Iterator[str]:
    """A socket on which this process listens, and says nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        os.chown(path, 0, group)
        path.chmod(mode)
        yield str(path)


def test_sockets_without_a_listener(doctor: Doctor, place: Path) -> None:
    found(doctor("--socket", place / "none"), "socket-missing")
    found(doctor(faults=[["variable", "FFSERVE_SOCKET", f"{place}/none"]]), "socket-missing")
    found(doctor("--socket", place / ("x" * 120)), "socket-path")
    (place / "file").touch()
    diagnosis = found(doctor("--socket", place / "file"), "socket-no-socket")
    assert diagnosis.commands("socket-no-socket").startswith(f"rm {place}/file\n")
    with listening(place / "stale", 0o660) as path:
        pass
    found(doctor("--socket", path), "socket-stale")
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    diagnosis = found(doctor("--socket", closed / "s", faults=AS_NOBODY), "socket-closed")
    assert f"chmod a+rx {closed}" in diagnosis.commands("socket-closed")


def test_the_socket_of_the_service_was_removed(doctor: Doctor, place: Path) -> None:
    (place / "x.toml").touch()
    for name, unit in (("ffserve", "ffserve"), ("fast", "ffserve@fast")):
        path = f"/run/ffserve/{name}.sock"
        faults = [["service", f"{place}/x.toml"], ["removed_socket", path]]
        diagnosis = found(doctor("--socket", path, faults=faults), "socket-missing")
        assert "was removed, while a daemon listens" in diagnosis.text
        restart = f"systemctl restart {unit}.socket {unit}.service"
        assert diagnosis.commands("socket-missing") == restart


def test_a_socket_where_jobs_do_not_look(doctor: Doctor, place: Path) -> None:
    with listening(place / "s", 0o660) as path:
        (place / "x.toml").write_text(f'socket = "{path}"\n')
        diagnosis = found(doctor("--config", place / "x.toml"), "socket-elsewhere")
        command = f"export FFSERVE_SOCKET={path}"
        assert diagnosis.commands("socket-elsewhere") == command


def test_users_who_may_not_connect(doctor: Doctor, place: Path) -> None:
    groups = Path("/etc/group").read_text()
    outside = ["showing", "/etc/group", f"{groups}ffserve-test:x:{GROUP}:\n"]
    inside = ["showing", "/etc/group", f"{groups}ffserve-test:x:{GROUP}:nobody\n"]
    for mode, group, shown, name, command in (
        (0o600, 0, outside, "socket-mode", f"chmod 0660 {place}/s"),
        (0o660, 0, outside, "socket-group", "--socket-group ffserve"),
        (0o660, GROUP, outside, "group-member", "usermod -aG ffserve-test nobody"),
        (0o660, GROUP, inside, "group-login", "newgrp ffserve-test"),
    ):
        with listening(place / "s", mode, group) as path:
            faults = [["own_mounts"], shown, *AS_NOBODY]
            diagnosis = found(doctor("--socket", path, faults=faults), name)
            assert command in diagnosis.commands(name)
        (place / "s").unlink()


def test_a_directory_that_another_user_made(doctor: Doctor) -> None:
    uid = 600_000 + os.getpid()
    directory = Path(f"/tmp/ffserve-{uid}")
    directory.mkdir(mode=0o755)
    try:
        faults = [["variable", "XDG_RUNTIME_DIR", "/none"], ["user", uid]]
        diagnosis = found(doctor(faults=faults), "socket-unsafe")
        assert f"rm -rf {directory}" in diagnosis.commands("socket-unsafe")
    finally:
        directory.rmdir()


def test_a_listener_that_says_nothing(doctor: Doctor, place: Path) -> None:
    with listening(place / "s", 0o660) as path:
        faults = [["constant", "ffserve.client.daemon.handshake", "CONNECT_TIMEOUT_S", 0.2]]
        diagnosis = found(doctor("--socket", path, faults=faults), "daemon-silent")
        assert "no WELCOME within 0.2 s" in diagnosis.text
        faults = [["constant", "ffserve.cli.daemon.doctor", "TIMEOUT_S", 0.2]]
        diagnosis = found(doctor("--socket", path, faults=faults), "check-silent")
        assert "the check of daemon has not ended" in diagnosis.text


# ---------------------------------------------------------------- daemons


def test_a_daemon_that_is_stopped(doctor: Doctor, daemon: Daemon) -> None:
    with stopped(daemon.pid):
        diagnosis = found(doctor("--socket", daemon.socket), "daemon-stopped")
        assert diagnosis.commands("daemon-stopped") == f"kill -CONT {daemon.pid}"


def test_a_socket_whose_mode_was_changed(doctor: Doctor, daemon: Daemon) -> None:
    os.chmod(daemon.socket, 0o600)
    try:
        diagnosis = found(doctor("--socket", daemon.socket), "socket-mode")
        assert diagnosis.commands("socket-mode") == f"chmod 0660 {daemon.socket}"
    finally:
        os.chmod(daemon.socket, 0o660)


def test_a_daemon_behind_a_proxy(doctor: Doctor, daemon: Daemon, place: Path) -> None:
    with proxy(daemon.socket, place / "s") as path:
        os.chmod(path, 0o660)
        diagnosis = found(doctor("--socket", path), "memory-unmapped")
        assert "connect to the daemon without a proxy" in diagnosis.text
        assert diagnosis.commands("memory-unmapped") == f"export FFSERVE_SOCKET={daemon.socket}"


def test_no_descriptor_is_free_for_the_daemons_memory(doctor: Doctor, daemon: Daemon) -> None:
    diagnosis = doctor("--socket", daemon.socket, faults=[["free_files", 4]])
    found(diagnosis, "memory-unmapped")
    assert diagnosis.commands("memory-unmapped") == "ulimit -n $(ulimit -Hn)"


def test_the_daemon_and_the_doctor_agree_about_locked_memory(doctor: Doctor) -> None:
    """CAP_IPC_LOCK, which root has, lifts the limit."""
    for uid, amount in ((0, "any amount"), (ALICE, "8.00 MiB")):
        box = Container(users=None, namespaces=(), uid=uid, limits=(("RLIMIT_MEMLOCK", 8 << 20),))
        daemon = Daemon()
        daemon.directory.chmod(0o777)
        put_inside(daemon, box)
        with started(daemon):
            assert f"{amount} of locked memory" in daemon.log.read_text()
            text = doctor.run("--socket", daemon.socket).text
            assert re.search(f"locked memory +{amount}\n", text), text


def test_a_daemon_with_slow_settings(doctor: Doctor) -> None:
    with serving(options=["--engine", "threads"]) as daemon:
        diagnosis = found(doctor("--socket", daemon.socket), "engine-chosen")
        assert diagnosis.commands("engine-chosen").endswith("--engine auto --handover")


OLD = """
import ffserve._version, ffserve.engine.io as io
ffserve._version.__version__ = "0.0.9"
trial = io._trial
io._trial = lambda kind: None if kind == "threads" else "refused then"
"""
OTHER_PROTOCOL = "import ffserve.protocol as p; p.VERSION, p.VERSIONS = {0}, ({0},)"


@pytest.mark.check
def test_a_daemon_of_another_release(doctor: Doctor) -> None:
    with serving(patch=OLD, expect=[r"io_uring is not used \(refused then\): .*"]) as daemon:
        diagnosis = doctor("--socket", daemon.socket)
        found(diagnosis, "version-differs", "io_uring-refused")
        assert "ffserve==0.0.9" in diagnosis.commands("version-differs")
        assert diagnosis.commands("io_uring-refused").endswith("--handover")
    refused = [r"closed a session \(pid \d+\): .*"]
    with started(Daemon(patch=OTHER_PROTOCOL.format(1), expect=refused)) as daemon:
        diagnosis = found(doctor("--socket", daemon.socket), "version-protocol")
        assert "which speaks version 1: this client" in diagnosis.text
        upgrade, restart = diagnosis.findings["version-protocol"]["commands"]
        assert upgrade == f"{sys.executable} -m pip install --upgrade ffserve"
        assert restart.endswith("--handover"), "the daemon is the older side"
    with started(Daemon(patch=OTHER_PROTOCOL.format(9), expect=refused)) as daemon:
        diagnosis = found(doctor("--socket", daemon.socket), "version-protocol")
        assert diagnosis.commands("version-protocol") == upgrade, "this side is the older one"


@pytest.mark.check
def test_a_daemon_of_another_user_with_low_limits(doctor: Doctor, place: Path) -> None:
    container.seccomp()
    limits = (("RLIMIT_NOFILE", 2000), ("RLIMIT_MEMLOCK", 8 << 20))
    box = Container(users=None, namespaces=(), uid=ALICE, limits=limits, denied=IO_URING)
    daemon = Daemon(options=["--socket-mode", "0666"], expect=[r"io_uring is not used \(.*\): .*"])
    daemon.directory.chmod(0o777)
    put_inside(daemon, box)
    expected = ["io_uring-filtered", "locked-memory", "open-files-low"]
    with started(daemon), fuse(place) as path:
        diagnosis = doctor("--socket", daemon.socket)
        found(diagnosis, *expected)
        assert f"the daemon (pid {daemon.pid}) may lock" in diagnosis.text
        trust = [["variable", "FFSERVE_SOCKET", daemon.socket]]
        found(doctor(faults=trust), *expected, "socket-of-another")
        diagnosis = doctor(path, "--socket", daemon.socket)
        assert "data-file-system" in diagnosis.findings
        assert "--file-system fuse" in diagnosis.commands("data-file-system")


@pytest.mark.check
def test_little_locked_memory_is_not_blamed_on_seccomp(doctor: Doctor) -> None:
    """Linux 6.14 and later count rings again."""
    container.seccomp()
    limits = (("RLIMIT_MEMLOCK", 64 << 10),)
    box = Container(users=None, namespaces=(), uid=ALICE, limits=limits, denied=("acct",))
    refused = r"io_uring is not used \(too little memory may be locked .*\): .*"
    daemon = Daemon(options=["--socket-mode", "0666"], expect=[refused])
    daemon.directory.chmod(0o777)
    put_inside(daemon, box)
    with started(daemon):
        diagnosis = found(doctor("--socket", daemon.socket), "locked-memory")
        assert "may lock 64.0 KiB of memory" in diagnosis.text
        engine = daemon.status()["engine"]
        assert engine["refused"] == "too little memory may be locked (see ulimit -l)"
        if engine["kind"] not in ("registered", "uring"):
            assert f"io_uring needs more, so the daemon (pid {daemon.pid}) reads" in diagnosis.text


def test_a_daemon_in_a_pid_namespace_of_its_own(doctor: Doctor) -> None:
    daemon = Daemon()
    put_inside(daemon, Container(users=None, namespaces=("mnt", "pid")))
    with started(daemon):
        diagnosis = found(doctor("--socket", daemon.socket), "containers-unseen")
        assert "--pid=host" in diagnosis.commands("containers-unseen")


def test_the_memory_of_a_daemon_that_runs(doctor: Doctor) -> None:
    try:
        with limited(memory_size=64 << 20) as group, serving() as daemon:
            until(lambda: daemon.status()["arena"]["populated"] == 64 << 20, "it has its memory")
            group.join(daemon.pid)
            diagnosis = found(doctor("--socket", daemon.socket), "memory-limit")
            assert "The kernel kills it" in diagnosis.text
            (command,) = diagnosis.findings["memory-limit"]["commands"]
            subprocess.run(command, shell=True, check=True)
            found(doctor("--socket", daemon.socket))
    except NoCgroup as reason:
        pytest.skip(str(reason))


# ---------------------------------------------------------------- the document


@pytest.mark.check
def test_every_finding_is_explained() -> None:
    section = (ROOT / "docs" / "REFERENCE.md").read_text().partition("\n## Findings\n")[2]
    section = section.partition("\n## ")[0]
    explained = re.findall(r"^\| `([\w-]+)` \|", section, re.M)
    named: set[str] = set()
    for path in [*(ROOT / "ffserve/doctor").glob("*.py"), ROOT / "ffserve/cli/daemon/doctor.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                first: Any = node.args[0]
                named.add(first.value)
    assert len(named) > 40 and sorted(explained) == sorted(named)
