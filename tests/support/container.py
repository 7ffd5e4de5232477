"""Containers without an image: namespaces, mounts, user mappings and system-call filters.

`run_inside` and `client_inside` run a Python program in a container. Programs import ffserve before
they enter it, since a mapped user may be unable to read the checkout.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, ready, run_python

NAMESPACES = {"mnt": 0x20000, "ipc": 0x8000000, "net": 0x40000000, "pid": 0x20000000}
"""Besides the user namespace. CLONE_NEW* of sched.h."""
CLONE_NEWUSER = 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
RANGE = 65_536
"""Users of a container with a user namespace."""
IO_URING = ("io_uring_setup", "io_uring_enter", "io_uring_register")

IMPORTS = (
    *("container", "daemon", "encodings.ascii", "numpy", "ffserve.reader"),
    *("ffserve.formats.recordio", "ffserve.formats.tfrecord", "ffserve.server.life.daemon"),
    *("ffserve.cli.daemon.serve", "ffserve.cli.daemon.status", "ffserve.cli.daemon.screen"),
)
ENTER = f"""
import json, os, sys, {", ".join(IMPORTS)}
import numpy as np
import daemon as support
container.enter(json.loads(sys.argv.pop(1)))
"""


@dataclasses.dataclass(frozen=True)
class Container:
    """What is different inside.

    users: first number of its users outside, inside they begin at 0; None: no user namespace.
    uid, groups: of the program, inside. mounts: (source, target) directories that are bound;
    ending in ":ro": read-only. hidden: directories under which there is nothing. namespaces: see
    NAMESPACES. denied: system calls that fail with EPERM. profile: a seccomp profile as container
    runtimes read it; None: no filter. capabilities: False: it has none.
    limits: of resources, by name in the module `resource`.
    """

    users: int | None = 100_000
    uid: int = 0
    groups: tuple[int, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    hidden: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = tuple(NAMESPACES)
    denied: tuple[str, ...] = ()
    profile: str | None = None
    capabilities: bool = True
    limits: tuple[tuple[str, int], ...] = ()

    def command(self, program: str, *arguments: Any) -> list[str]:
        """Return the command that runs a Python program inside."""
        spec = json.dumps(dataclasses.asdict(self))
        return [sys.executable, "-W", "error", "-c", ENTER + program, spec, *map(str, arguments)]

    def run(self, program: str, *arguments: Any, code: int = 0) -> str:
        """Run a Python program inside; return its output."""
        spec = json.dumps(dataclasses.asdict(self))
        done = run_python(ENTER + program, spec, *arguments, code=code, imports=IMPORTS)
        return done.stdout.strip() + done.stderr.strip()

    @contextlib.contextmanager
    def client(self, program: str, *arguments: Any) -> Iterator[subprocess.Popen[str]]:
        """A program inside that says "ready", and is killed at the end."""
        with ready(self.command(program, *arguments), env=environment()) as process:
            yield process


def put_inside(daemon: Daemon, box: Container) -> None:
    """Let a daemon that is not started yet run in a container."""
    arguments = daemon.command[daemon.command.index("serve") :]
    program = "from ffserve.cli import main\nraise SystemExit(main())"
    daemon.command = box.command(program, *arguments)
    daemon.environment = environment()


def environment() -> dict[str, str]:
    """Return the environment of programs that enter a container: one thread, since a process with
    several cannot change its user namespace."""
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


# ---- inside -----------------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), what)


def enter(given: dict[str, Any]) -> None:
    """Become the first process of a container; return in it."""
    box = Container(**given)
    if box.users is not None:
        _new_users(box.users)
    _check(libc.unshare(sum(NAMESPACES[name] for name in box.namespaces)), "unshare")
    if "pid" in box.namespaces:
        _become_first()
    if "mnt" in box.namespaces:
        _mount(None, "/", None, MS_REC | MS_PRIVATE)
        if "pid" in box.namespaces:
            _mount("proc", "/proc", "proc", 0)
        _bind(box)
    _restrict(box)


def _new_users(first: int) -> None:
    """Map the users [0, RANGE) of a new user namespace; a process that stays outside does it."""
    here, there = os.pipe()
    me, child = os.getpid(), os.fork()
    if child == 0:
        os.read(here, 1)
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{me}/{name}", "w") as file:
                file.write(f"0 {first} {RANGE}")
        os._exit(0)
    _check(libc.unshare(CLONE_NEWUSER), "unshare users")
    os.write(there, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(here)
    os.close(there)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _become_first() -> None:
    """Go on as the first process of the new PID namespace; the outer one passes signals on."""
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    while True:
        with contextlib.suppress(InterruptedError):
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    words = [None if each is None else each.encode() for each in (source, target, kind)]
    _check(libc.mount(*words, flags, None), f"mount {source} on {target}")


def _bind(box: Container) -> None:
    for source, target in box.mounts:
        where, _, mode = target.partition(":")
        _mount(source, where, None, MS_BIND)
        if mode == "ro":
            _mount(None, where, None, MS_BIND | MS_REMOUNT | MS_RDONLY)
    for directory in box.hidden:
        _mount("none", directory, "tmpfs", 0)


def _restrict(box: Container) -> None:
    import resource

    for name, most in box.limits:
        resource.setrlimit(getattr(resource, name), (most, most))
    if not box.capabilities or box.uid:
        for number in range(64):
            libc.prctl(24, number)  # PR_CAPBSET_DROP
    if box.uid or box.groups:
        os.setgroups(box.groups)
        os.setresgid(box.uid, box.uid, box.uid)
        os.setresuid(box.uid, box.uid, box.uid)
    elif not box.capabilities:
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        _check(libc.capset(header, none), "capset")
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if box.denied:
        deny(box.denied)
    if box.profile:
        filter_by(box.profile)


# ---- system calls -----------------------------------------------------------------------------


def seccomp() -> Any:
    """Return libseccomp. Skips the test where there is none."""
    try:
        library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError as error:
        pytest.skip(f"no libseccomp: {error}")
    library.seccomp_init.restype = ctypes.c_void_p
    return library


ALLOW, ERRNO = 0x7FFF0000, 0x00050000
OPERATORS = {"SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}


class Condition(ctypes.Structure):
    """struct scmp_arg_cmp of seccomp.h."""

    _fields_ = (
        ("index", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("value_two", ctypes.c_uint64),
    )


def filter_by(text: str) -> None:
    """Restrict this process and its children to a profile, as a container runtime does."""
    library, profile = seccomp(), json.loads(text)
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    library.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p,
    ]  # fmt: skip
    filter = ctypes.c_void_p(library.seccomp_init(ERRNO | profile["defaultErrnoRet"]))
    for rule in profile["syscalls"]:
        action = ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else ERRNO | rule["errnoRet"]
        conditions = [
            Condition(each["index"], OPERATORS[each["op"]], each["value"], each.get("valueTwo", 0))
            for each in rule.get("args", ())
        ]
        array = (Condition * len(conditions))(*conditions)
        for name in rule["names"]:
            call = library.seccomp_syscall_resolve_name(name.encode())
            # A runtime leaves out what its library does not know.
            if call != -1:
                size = len(conditions)
                added = library.seccomp_rule_add_array(filter, action, call, size, array)
                assert added == 0, (name, added)
    assert library.seccomp_load(filter) == 0


def deny(names: Sequence[str], number: int = errno.EPERM) -> None:
    """Let system calls of this process and its children fail."""
    library = seccomp()
    filter = ctypes.c_void_p(library.seccomp_init(ALLOW))
    for name in names:
        call = library.seccomp_syscall_resolve_name(name.encode())
        assert library.seccomp_rule_add(filter, ERRNO | number, call, 0) == 0, name
    assert library.seccomp_load(filter) == 0
