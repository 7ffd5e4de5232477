"""Checks of the machine: kernel, io_uring, limits, memory, control groups, clock.

A check yields what it found: texts for the list of facts, and findings.
"""

from __future__ import annotations

import dataclasses
import multiprocessing.synchronize
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from ffserve.config import format_size
from ffserve.doctor.case import UNLIMITED, Case, Finding, Process, number_in, text_in
from ffserve.engine.codec import checksum_library
from ffserve.engine.io import KINDS, LOCKED, best_refusal, refusal
from ffserve.errors import ReadError
from ffserve.limits import OWN_SIZE, RESERVED_SESSIONS, most_sessions
from ffserve.server.life.startup import file_limit_fault, memory_fault
from ffserve.system.machine_memory import cgroup_directories, free_memory, memory_limits
from ffserve.system.memfd import HUGE_PAGE, SharedMemory, can_map

Found: TypeAlias = Iterator[str | Finding]

KERNEL = (6, 1)
"""The oldest kernel that has everything that each read uses: DEFER_TASKRUN, MADV_COLLAPSE, and the
alignment of direct reads."""
LOCKED_MARGIN = 16 << 20
"""The daemon locks this much memory beside the arena, for rings and bounce buffers."""
TRIALS = 3
"""A huge page is tried this often: the kernel gives up on pages that are in use at the moment."""
SHM_SIZE = 256 << 20
"""A smaller /dev/shm is the default of a container runtime, and too small for loaders."""
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
OLDEST_NOW = 1_767_225_600
"""A clock that shows a time before this one (the year 2026) is wrong."""
_RING_OFF = "io_uring_disabled"
_RING_CALLS = ("io_uring_setup", "io_uring_enter", "io_uring_register")
_NEW_KERNELS = {
    "ubuntu": "apt-get install linux-generic-hwe-{VERSION_ID}",
    "debian": "apt-get install -t {VERSION_CODENAME}-backports linux-image-amd64",
    "fedora": "dnf upgrade kernel",
    "rhel": "dnf install --enablerepo=elrepo-kernel kernel-ml",
    "suse": "zypper update kernel-default",
    "arch": "pacman -Syu linux",
    "alpine": "apk add linux-lts",
}
"""The command that installs a newer kernel, by distribution. {NAMES} are those of
/etc/os-release."""
_SLOWER = "Reads cost more CPU time, and fewer are in flight."


def kernel(case: Case) -> Found:
    """Linux has what each read uses."""
    release = os.uname().release
    yield f"Linux {release}"
    if _version() >= KERNEL:
        return
    commands = [_NEW_KERNELS[name] for name in case.host.family if name in _NEW_KERNELS]
    words = commands[0] if commands else "reboot"
    for name, value in case.host.release.items():
        words = words.replace(f"{{{name}}}", value)
    yield Finding(
        "kernel-old",
        "warning",
        f"Linux {release} is older than {KERNEL[0]}.{KERNEL[1]}",
        "Reads and shared memory cost more CPU time: io_uring is slower or missing, and the arena "
        "gets no huge pages.",
        (case.host.as_root(words), case.host.as_root("reboot")),
    )


def _version() -> tuple[int, ...]:
    """Return the first two numbers of the kernel's version."""
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


# ---- io_uring ---------------------------------------------------------------------------------


def io_uring(case: Case) -> Found:
    """The daemon reads by io_uring, into registered memory."""
    kind, reason = _engine(case)
    whole = kind not in ("registered", "uring")
    yield f"{kind}, checksums by {checksum_library()}"
    wanted = case.settings.engine
    if case.facts is None and wanted != "auto" and (why := refusal(wanted)) is not None:
        yield Finding(
            "settings-unusable",
            "error",
            f"the settings choose the engine {wanted!r}, which does not work here: {why}",
            "No daemon can start.",
            case.setting("engine", '"auto"', "--engine", "auto"),
        )
    if wanted not in ("auto", "registered"):
        yield Finding(
            "engine-chosen",
            "warning",
            f"the settings choose the engine {wanted!r}",
            _SLOWER,
            case.setting("engine", '"auto"', "--engine", "auto"),
        )
    elif kind != "registered" and reason != LOCKED:
        # Else it is the limit on locked memory, which another check reports.
        yield _ring_refused(case, kind, reason, whole=whole)


def _engine(case: Case) -> tuple[str, str | None]:
    """Return the kind of engine that the daemon has or would have, and why it is not a better
    one."""
    if case.facts is not None:
        engine = case.facts["engine"]
        return str(engine["kind"]), engine.get("refused")
    kind = next((each for each in KINDS if refusal(each) is None), "none")
    return kind, best_refusal(kind)


def _ring_refused(case: Case, kind: str, reason: str | None, *, whole: bool) -> Finding:
    """Return why io_uring, or (not whole) its registered memory, is not used."""
    process, host = case.process, case.host
    effect = f"{process.name.capitalize()} reads by {kind}. {_SLOWER}"
    disabled = number_in(f"/proc/sys/kernel/{_RING_OFF}") or 0
    if whole and (disabled == 2 or (disabled == 1 and not _ring_allowed(process))):
        text = f"kernel.{_RING_OFF} is {disabled}: the kernel refuses io_uring"
        commands = (*host.sysctl(f"kernel.{_RING_OFF}", 0), case.restart())
        return Finding("io_uring-disabled", "warning", text, effect, commands)
    what = "io_uring" if whole else "registered memory of io_uring"
    if process.filtered:
        text = f"seccomp filters the system calls of {process.name}, and {what} is refused"
        return Finding(
            "io_uring-filtered", "warning", text, effect, _unfiltered(case, *_RING_CALLS)
        )
    if case.facts is not None:
        text = f"{what} was refused when {process.name} started, and would work now"
        return Finding("io_uring-refused", "warning", text, effect, (case.restart(),))
    text = f"{what} does not work here: {reason}"
    return Finding("io_uring-refused", "warning", text, effect, (host.as_root("dmesg | tail"),))


def _ring_allowed(process: Process) -> bool:
    """Whether a process may use io_uring where it is for a group and for administrators only."""
    group = number_in("/proc/sys/kernel/io_uring_group")
    text = text_in(f"/proc/{process.pid or 'self'}/status")
    groups = re.findall(r"^(?:Gid|Groups):\t(.*)$", text, re.MULTILINE)
    return process.is_admin or str(group) in " ".join(groups).split()


def _unfiltered(case: Case, *calls: str) -> tuple[str, ...]:
    """Return the commands that admit system calls through a filter."""
    host, process = case.host, case.process
    if host.container == "kubernetes":
        chart = "helm upgrade ffserve docs/kubernetes/chart --namespace ffserve --reuse-values"
        return (f"{chart} --set seccomp=Localhost",)
    if host.container:
        profile = "seccomp=docs/kubernetes/chart/files/seccomp.json"
        return (f"{host.container} run --security-opt {profile} IMAGE",)
    if process.unit:
        return case.limit_setting(f"SystemCallFilter={' '.join(calls)}", "calls", "")
    pid, filtered = process.pid or os.getpid(), process.pid or os.getpid()
    while pid > 1:
        status = text_in(f"/proc/{pid}/status")
        if "\nSeccomp:\t2" not in status:
            break
        filtered = pid
        pid = int(status.partition("\nPPid:\t")[2].split()[0])
    # The first process that has the filter: the daemon must be started outside of it.
    return (f"ps -o pid,user,args -p {filtered}",)


# ---- limits -----------------------------------------------------------------------------------


def locked_memory(case: Case) -> Found:
    """The arena can be registered with io_uring."""
    process = case.process
    if process.locks_any or process.lockable_size >= UNLIMITED:
        yield "any amount"
        return
    yield format_size(process.lockable_size)
    if process.lockable_size >= case.arena_size + LOCKED_MARGIN:
        return
    kind, reason = _engine(case)
    effect = (
        f"io_uring needs more, so {process.name} reads by {kind}. {_SLOWER}"
        if reason == LOCKED and kind not in ("registered", "uring")
        else "The part of the arena beyond the limit is not registered with io_uring: reads into "
        "it cost half as much CPU time again."
    )
    yield Finding(
        "locked-memory",
        "warning",
        f"{process.name} may lock {format_size(process.lockable_size)} of memory, less than the "
        f"arena of {format_size(case.arena_size)}",
        effect,
        case.limit_setting("LimitMEMLOCK=infinity", "memlock", "unlimited"),
    )


def open_files(case: Case) -> Found:
    """Sessions and shards have descriptors."""
    process, wanted = case.process, case.settings.max_sessions
    most, needed = process.most_files, 4 * (wanted + RESERVED_SESSIONS)
    yield f"{most:,}" if most < UNLIMITED else "any number"
    commands = case.limit_setting("LimitNOFILE=524288", "nofile", "524288")
    if fault := file_limit_fault(most):
        effect = "No daemon can start."
        yield Finding("open-files-few", "error", fault.message, effect, commands)
    elif most_sessions(wanted, most) < wanted:
        yield Finding(
            "open-files-low",
            "warning",
            f"{process.name} may open {most:,} files, fewer than {needed:,}",
            f"It serves {most_sessions(wanted, most):,} sessions (max_sessions asks for "
            f"{wanted:,}) and {most * 3 // 4:,} record files at a time.",
            commands,
        )
    for path, answer in case.data:
        if answer is not None and answer.get("files", 0) > most * 3 // 4:
            yield Finding(
                "open-files-data",
                "error",
                f"{path} has {answer['files']:,} files, but {process.name} can serve "
                f"{most * 3 // 4:,}",
                "The data set cannot be opened as a whole.",
                commands,
            )


def address_space(case: Case) -> Found:
    """A job of this user can map the arena."""
    facts = case.facts
    size = int(facts["arena"]["limit"]) if facts else case.settings.max_arena_size
    if can_map(size):
        return
    yield Finding(
        "address-space",
        "warning",
        f"a process of this shell cannot map {format_size(size)}, the largest size of the arena "
        "(ulimit -v)",
        "Such a process reads the files by itself and shares nothing.",
        ("ulimit -v unlimited",),
    )


# ---- memory -----------------------------------------------------------------------------------


def memory(case: Case) -> Found:
    """The arena has room."""
    process, size = case.process, case.arena_size
    yield f"arena {format_size(size)} of {format_size(process.memory)}"
    config = dataclasses.replace(case.settings, arena_size_bytes=size)
    if fault := memory_fault(config, process.memory):
        serves = case.facts is not None
        yield Finding(
            "memory-limit",
            "error",
            f"{process.name}: {fault.message}",
            "The kernel kills it when the arena fills." if serves else "No daemon can start.",
            _more_memory(case, size + 2 * OWN_SIZE),
        )
    elif case.facts is not None:
        left = size - int(case.facts["arena"]["populated"])
        free = free_memory(proc_cgroup=process.cgroup)
        if left > free:
            yield Finding(
                "memory-taken",
                "warning",
                f"{format_size(left)} of the arena have no memory yet, but only "
                f"{format_size(free)} are free",
                "The daemon waits for the memory of other processes.",
                ("ps -eo pid,user,rss,args --sort=-rss | head",),
            )


def _more_memory(case: Case, size: int) -> tuple[str, ...]:
    """Return the commands that give the daemon so much memory, or a smaller arena."""
    limits = [(limit, str(group)) for group, limit in memory_limits(case.process.cgroup)]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if limits and case.process.memory == min(limits)[0] and size <= machine:
        if case.host.container == "kubernetes":
            chart = "helm upgrade ffserve docs/kubernetes/chart --namespace ffserve --reuse-values"
            return (f"{chart} --set memory={size >> 20}Mi",)
        if case.host.container:
            name = socket.gethostname()
            return (f"{case.host.container} update --memory {size} --memory-swap {size} {name}",)
        group = Path(min(limits)[1])
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        return case.unlimit(f"MemoryMax={size}", group / name, str(size))
    smaller = format_size(case.process.memory // 4 >> 20 << 20).replace(" ", "")
    if case.facts is not None:
        return (shlex.join(["ffserve", "resize", smaller, "--socket", case.socket.path]),)
    return case.setting("arena", f'"{smaller}"', "--arena", smaller)


def shared_memory(case: Case) -> Found:
    """Memory files can be made, and have huge pages."""
    try:
        trial = SharedMemory("ffserve-doctor", HUGE_PAGE)
    except ReadError as error:
        yield Finding(
            "shared-memory",
            "error",
            f"shared memory cannot be made: {error.message}",
            "No daemon can start, and loaders have no fast way from workers to the trainer.",
            _unfiltered(case, "memfd_create")
            if case.process.filtered
            else (case.host.as_root("dmesg | tail"),),
        )
        return
    huge = False
    for _ in range(TRIALS):
        trial.populate(0, HUGE_PAGE)
        huge = huge or _huge_size(trial.address) > 0
    trial.close()
    yield f"{'with' if huge else 'without'} huge pages"
    if case.process.huge_pages and (huge or _version() < KERNEL):
        return
    setting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    if not case.process.huge_pages:
        reason = f"{case.process.name} was started with huge pages switched off (prctl)"
        switch = "import ctypes, os, sys; ctypes.CDLL(None).prctl(41, 0, 0, 0, 0); "
        program = f"{switch}os.execvp(sys.argv[1], sys.argv[1:])"
        command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} {case.restart()}"
    elif "[deny]" in text_in(setting):
        reason = f"{setting} is 'deny'"
        command = case.host.write(setting, "advise")
    else:
        reason = "the kernel finds no huge page: its memory is fragmented"
        command = case.host.write("/proc/sys/vm/compact_memory", "1")
    yield Finding(
        "huge-pages",
        "warning",
        f"shared memory gets no huge pages: {reason}",
        "Reads and copies cost more CPU time, and each job needs 2 MiB of page tables for each GiB "
        "of arena.",
        (command,),
    )


def _huge_size(address: int) -> int:
    """Return how many bytes of huge pages the mapping at an address has."""
    inside = False
    for line in text_in("/proc/self/smaps").splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    return 0


def shm(case: Case) -> Found:
    """/dev/shm has room for loaders with worker processes."""
    effect = "Loaders with worker processes do not start: their locks are files there."
    mount = "mount -t tmpfs -o mode=1777,size=50% tmpfs /dev/shm"
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        text = f"/dev/shm cannot be used: {error.strerror}"
        commands = (case.host.as_root("mkdir -p /dev/shm"), case.host.as_root(mount))
        yield Finding("shm-closed", "error", text, effect, commands)
        return
    size = found.f_blocks * found.f_frsize
    yield format_size(size)
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        text = f"no lock can be made in /dev/shm: {error.strerror}"
        writable = found.f_flag & os.ST_RDONLY == 0
        command = "chmod 1777 /dev/shm" if writable else "mount -o remount,rw /dev/shm"
        yield Finding("shm-closed", "error", text, effect, (case.host.as_root(command),))
    if size < SHM_SIZE:
        command = case.host.as_root("mount -o remount,size=50% /dev/shm")
        if case.host.container in ("docker", "podman"):
            command = f"{case.host.container} run --shm-size=8g IMAGE"
        yield Finding(
            "shm-small",
            "warning",
            f"/dev/shm has {format_size(size)}",
            "Loaders of torch put batches there that ffserve does not carry: a worker is killed "
            "when it is full (Bus error).",
            (command,),
        )


def cpu(case: Case) -> Found:
    """The control group leaves the daemon a core."""
    for group in cgroup_directories("cpu", case.process.cgroup):
        name = "cpu.max" if (group / "cpu.max").exists() else "cpu.cfs_quota_us"
        words = text_in(str(group / name)).split()
        words += text_in(str(group / "cpu.cfs_period_us")).split()
        if len(words) < 2 or not words[0].isdigit() or int(words[0]) >= int(words[1]):
            continue
        share = 100 * int(words[0]) / int(words[1])
        yield Finding(
            "cpu-limit",
            "warning",
            f"the control group {group} gives {case.process.name} {share:.0f} % of a core",
            "All jobs wait while it is not allowed to run.",
            case.unlimit("CPUQuota=", group / name, "max" if name == "cpu.max" else "-1"),
        )


# ---- the clock --------------------------------------------------------------------------------


def clock(case: Case) -> Found:
    """The clock is right, and quick to read."""
    place = "/sys/devices/system/clocksource/clocksource0"
    source, now = text_in(f"{place}/current_clocksource"), time.time()
    yield f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(now))}, {source or 'unknown'}"
    newest = max((answer.get("newest", 0) for _, answer in case.data if answer), default=0)
    started = float(case.facts["started"]) if case.facts else 0
    if now < OLDEST_NOW or max(newest, started) > now + 60:
        late = max(newest, started, OLDEST_NOW) - now
        what = "the daemon's start" if started >= newest else "a file of the data"
        command = "chronyd -q" if shutil.which("chronyd") else "ntpd -n -q -p pool.ntp.org"
        yield Finding(
            "clock-behind",
            "warning",
            f"{what} is {late:,.0f} s in the future of this machine's clock",
            "Times in logs and metrics cannot be compared, and changed files can be mistaken for "
            "old ones.",
            (case.host.as_root("timedatectl set-ntp true" if case.host.systemd else command),),
        )
    if source in SLOW_CLOCKS:
        known = text_in(f"{place}/available_clocksource").split()
        better = [name for name in known if name not in SLOW_CLOCKS] or ["tsc"]
        yield Finding(
            "clock-slow",
            "warning",
            f"the kernel reads the time from {source}",
            "Reading the clock is a system call, which the daemon makes several times per request.",
            (case.host.write(f"{place}/current_clocksource", better[0]),),
        )
