"""Checks of the data: can they be read, does the daemon serve them, and what are they stored on."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ffserve.config import USER_FILE_SYSTEMS
from ffserve.doctor.case import Case, Finding, number_in, text_in
from ffserve.doctor.probe import MOST_FILES, TIMEOUT_S
from ffserve.doctor.resources import Found
from ffserve.server.users.access import FILE_SYSTEMS
from ffserve.system.machine_memory import cgroup_directories

_IN_MEMORY = ("tmpfs", "ramfs")
VIRTUAL = ("vd", "xvd", "loop")
"""Disks of virtual machines and of images, whose statement about rotation is not true."""


class MountedFileSystem(NamedTuple):
    """A line of /proc/self/mountinfo. options: of the file system."""

    place: str
    kind: str
    source: str
    options: str


def data(case: Case) -> Found:
    """The files can be read, and the daemon serves them."""
    for path, answer in case.data:
        shown = os.path.abspath(path)
        if answer is None:
            yield silent(case, shown)
            continue
        if "error" in answer:
            yield _unreadable(case, shown, answer)
        if "file" in answer:
            yield from _stored(case, shown, answer)


def silent(case: Case, path: str) -> Finding:
    """Return the finding of a file system that does not answer."""
    mount = mount_of(path)
    commands = [case.host.as_root("dmesg --level=err,warn | tail -n 30")]
    if not mount.source.startswith("/dev/"):
        commands.append(case.host.as_root(f"umount -f -l {shlex.quote(mount.place)}"))
    return Finding(
        "data-silent",
        "error",
        f"{path}: the file system on {mount.place} ({mount.kind}) does not answer within "
        f"{TIMEOUT_S:g} s",
        "Processes that use it wait, and cannot be killed meanwhile.",
        tuple(commands),
    )


def _unreadable(case: Case, path: str, answer: dict[str, Any]) -> Finding:
    """Return why a job of this user cannot read the data."""
    quoted = shlex.quote(path)
    effect = "Jobs of this user cannot read these data."
    if closed := answer.get("closed"):
        user = user_name(os.geteuid())
        text = f"{path}: user {user} may not read {closed['path']}"
        if answer.get("unreadable"):
            text = (
                f"{path}: {answer['unreadable']:,} of {min(answer['files'], MOST_FILES):,} files "
                f"may not be read by user {user}, such as {closed['path']}"
            )
        return Finding("data-closed", "error", text, effect, _opened(case, user, closed))
    if answer.get("code") == "missing":
        commands = (f"namei -l {quoted}", f"ls -la {quoted}")
        return Finding("data-missing", "error", f"{path}: {answer['error']}", effect, commands)
    commands = (f"ffserve verify {quoted}", case.host.as_root("dmesg | tail -n 30"))
    return Finding("data-unreadable", "error", f"{path}: {answer['error']}", effect, commands)


def _opened(case: Case, user: str, closed: dict[str, Any]) -> tuple[str, ...]:
    """Return the command that lets a user read a file or a directory: into the group for which it
    is readable, or for everybody."""
    is_directory = os.path.isdir(closed["path"])
    needed = 0o050 if is_directory else 0o040
    group = closed["group"]
    if closed["mode"] & needed == needed and group and group not in os.getgroups():
        return case.host.join_group(user, group, group_name(group))
    bits = "a+rx" if is_directory else "a+r"
    return (case.host.as_root(f"chmod {bits} {shlex.quote(closed['path'])}"),)


def user_name(uid: int) -> str:
    """Return the name of a user, or the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return the name of a group, or the number."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# ---- what the daemon serves -------------------------------------------------------------------


def _stored(case: Case, path: str, answer: dict[str, Any]) -> Iterator[str | Finding]:
    """Look at what the data are stored on."""
    known = {number: name for name, number in {**FILE_SYSTEMS, **USER_FILE_SYSTEMS}.items()}
    number = answer["file_system"]
    kind = known.get(number, f"{number:#x}")
    how = f"direct reads of {answer['alignment']} bytes" if answer["alignment"] > 1 else "buffered"
    shared = "kept apart for each user" if answer["private"] else "shared by all users"
    count = answer["files"]
    yield f"{path}: {count:,} {'file' if count == 1 else 'files'} on {kind}, {how}, {shared}"
    yield from _served(case, path, answer, kind)
    mount = mount_of(answer["file"])
    if kind in _IN_MEMORY:
        yield Finding(
            "data-in-memory",
            "warning",
            f"{path} lies in memory ({kind})",
            "The daemon's arena holds the samples a second time, and reading them is not faster.",
            (f"cp -a {shlex.quote(path)} /var/tmp/",),
        )
    elif answer["alignment"] == 1:
        yield _buffered(case, path, kind, mount)
    device = _block_device(answer["device"], mount)
    if device is not None:
        yield from _disk(case, device, mount)


def _served(case: Case, path: str, answer: dict[str, Any], kind: str) -> Iterator[Finding]:
    """Find out whether the daemon refuses these files."""
    number, file = answer["file_system"], answer["file"]
    effect = "Jobs read these files by themselves and share nothing."
    if case.facts is None:
        roots = list(case.settings.roots)
    else:
        roots = [str(root) for root in case.facts["roots"]]
    real = {root: (case.places.get(root) or {}).get("real", root) for root in roots}
    if not any(file.startswith(root.rstrip("/") + "/") for root in real.values()):
        folder = os.path.dirname(file)
        names = json.dumps([*roots, folder], ensure_ascii=False)  # TOML has JSON's strings
        yield Finding(
            "data-outside-roots",
            "warning",
            f"{path} is outside the roots of the daemon: {' '.join(roots)}",
            effect,
            case.setting("roots", names, "--root", folder),
        )
    known = {each: name for name, each in USER_FILE_SYSTEMS.items()}
    served = number in FILE_SYSTEMS.values() or number in case.settings.file_systems
    # A daemon takes all files of its own user; and overlays of its own mounts, which the service
    # does not see.
    own = not case.unit and (
        case.process.uid == os.geteuid() or (kind == "overlay" and not case.host.container)
    )
    if not served and not own:
        given = [
            f'"{known[each]}"' if each in USER_FILE_SYSTEMS.values() else f"{each:#x}"
            for each in case.settings.file_systems
        ]
        kinds = ", ".join([*given, f'"{kind}"'])
        yield Finding(
            "data-file-system",
            "warning",
            f"the daemon does not serve files on {kind}, such as {file}",
            f"{effect} If only administrators can mount this file system, allow it.",
            case.setting("file_systems", f"[{kinds}]", "--file-system", kind),
        )


def _buffered(case: Case, path: str, kind: str, mount: MountedFileSystem) -> Finding:
    """Return the finding of a file system without direct reads."""
    commands: tuple[str, ...] = (f"findmnt -T {shlex.quote(path)}",)
    text = f"{path} has no direct reads (O_DIRECT): it is on {kind} at {mount.place}"
    if kind == "ext4" and "data=journal" in mount.options.split(","):
        text += ", which is mounted with data=journal"
        place, source = shlex.quote(mount.place), shlex.quote(mount.source)
        commands = (
            case.host.as_root(f"umount {place}"),
            case.host.as_root(f"mount -o data=ordered {source} {place}"),
        )
    return Finding(
        "data-buffered",
        "warning",
        text,
        "Every read passes through the page cache: it costs three times the CPU time, and memory "
        "beside the arena. Data on ext4, XFS or NFS are read directly.",
        commands,
    )


# ---- the disk ---------------------------------------------------------------------------------


def mount_of(path: str) -> MountedFileSystem:
    """Return the mount below which a path lies, by its name alone: nothing is asked of the file
    system."""
    best = MountedFileSystem("/", "unknown", "", "")
    for line in text_in("/proc/self/mountinfo").splitlines():
        about, _, device = line.partition(" - ")
        place = _unescaped(about.split(" ")[4])
        if len(place) >= len(best.place) and (path + "/").startswith(place.rstrip("/") + "/"):
            kind, source, options = device.split(" ")[:3]
            best = MountedFileSystem(place, kind, _unescaped(source), options)
    return best


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _block_device(numbers: list[int], mount: MountedFileSystem) -> Path | None:
    """Return the directory in /sys of the block device of a file; None: it has none."""
    major, minor = numbers
    if major == 0 and mount.source.startswith("/dev/"):  # btrfs
        try:
            device = os.stat(mount.source).st_rdev
        except OSError:
            return None
        major, minor = os.major(device), os.minor(device)
    place = Path(f"/sys/dev/block/{major}:{minor}")
    return place.resolve() if place.exists() else None


def _disk(case: Case, device: Path, mount: MountedFileSystem) -> Iterator[str | Finding]:
    """Look at the settings of a disk. Args: device: of it or of a partition."""
    disk = device.parent if (device / "partition").exists() else device
    name, queue, write = disk.name, disk / "queue", case.host.write
    yield f"{mount.place}: {name}"
    if number_in(f"/sys/fs/ext4/{device.name}/errors_count"):
        yield Finding(
            "disk-errors",
            "error",
            f"the file system on {mount.place} ({mount.source}) has recorded errors",
            "Files can be damaged or missing.",
            (
                case.host.as_root(f"umount {shlex.quote(mount.place)}"),
                case.host.as_root(f"fsck -f {shlex.quote(mount.source)}"),
            ),
        )
    if number_in(f"{queue}/rotational") and not name.startswith(tuple(VIRTUAL)):
        yield Finding(
            "disk-rotates",
            "warning",
            f"{name} is a spinning disk, or the kernel takes it for one",
            "Reads in random order take milliseconds each: use a windowed order, or an arena that "
            "holds all data. If it does not spin, tell the kernel.",
            (write(f"{queue}/rotational", "0"),),
        )
    if number_in(f"{queue}/read_ahead_kb") == 0:
        yield Finding(
            "disk-no-read-ahead",
            "warning",
            f"{name} has no read-ahead",
            "Files that are read in order, or scanned for their index, are read page by page.",
            (write(f"{queue}/read_ahead_kb", "128"),),
        )
    if "[bfq]" in text_in(f"{queue}/scheduler"):
        yield Finding(
            "disk-scheduler",
            "warning",
            f"reads of {name} are ordered by bfq",
            "It delays reads so that others get their share; many small reads are slower.",
            (write(f"{queue}/scheduler", "none"),),
        )
    if number_in(f"{disk}/loop/dio") == 0:
        yield Finding(
            "disk-loop-buffered",
            "warning",
            f"{name} reads its image {text_in(f'{disk}/loop/backing_file')} through the page cache",
            "Direct reads have no effect: data are copied, and held in memory beside the arena.",
            (case.host.as_root(f"losetup --direct-io=on /dev/{name}"),),
        )
    yield from _limited(case, name, text_in(f"{disk}/dev"))


def _limited(case: Case, name: str, number: str) -> Iterator[Finding]:
    """Find limits of control groups on reads from a disk."""
    for group in cgroup_directories("blkio", case.process.cgroup):
        limits = dict(
            word.split("=")
            for line in text_in(f"{group}/io.max").splitlines()
            if line.startswith(f"{number} ")
            for word in line.split()[1:]
        )
        found = {key: value for key, value in limits.items() if key[0] == "r" and value != "max"}
        file, text = group / "io.max", f"{number} rbps=max riops=max"
        for key, old in (("rbps", "read_bps"), ("riops", "read_iops")):
            path = group / f"blkio.throttle.{old}_device"
            for line in text_in(str(path)).splitlines():
                if line.startswith(f"{number} "):
                    found[key], file, text = line.split()[1], path, f"{number} 0"
        for key, value in found.items():
            kind, unit_property = (
                ("bytes", "IOReadBandwidthMax=") if key == "rbps" else ("reads", "IOReadIOPSMax=")
            )
            yield Finding(
                "disk-limited",
                "warning",
                f"the control group {group} limits {case.process.name} to {int(value):,} {kind} "
                f"per second from {name}",
                "Jobs wait for the disk, however fast it is.",
                case.unlimit(unit_property, file, text),
            )
