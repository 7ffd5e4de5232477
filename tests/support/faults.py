"""Real faults, and `ffserve doctor` under them: limits, filters, mounts, users, control groups.

A program that has imported everything forks a process for each call, which brings the faults about
in itself before it runs the command. So a call takes as long as the command, and no fault is seen
by anybody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

CLONE_NEWNS, MS_BIND, MS_PRIVATE = 0x20000, 4096, (1 << 18) | 16384
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAPBSET_DROP, PR_SET_THP_DISABLE = 4, 8, 24, 41
UNAME26 = 0x0020000
CAP_IPC_LOCK, CAP_SYS_ADMIN = 14, 21
PROGRAM = "import faults; faults.serve()"


class Diagnosis(NamedTuple):
    """What the command said. code: its exit code. findings: by name. text: all that it wrote."""

    code: int
    findings: dict[str, dict[str, Any]]
    text: str

    def commands(self, name: str) -> str:
        """Return the commands of a finding, one per line."""
        return "\n".join(self.findings[name]["commands"])


class Doctor:
    """Runs the command with faults; see `faulty`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, *arguments: Any, faults: list[list[Any]] | None = None) -> Diagnosis:
        """Run `ffserve doctor --json`.

        Args: faults: names of functions of this module, with their arguments.
        """
        return self.run("--json", *arguments, faults=faults)

    def run(self, *arguments: Any, faults: list[list[Any]] | None = None) -> Diagnosis:
        """Run `ffserve doctor`, with --json or without."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        print(json.dumps([list(map(str, arguments)), faults or []]), file=stdin, flush=True)
        code, out, err = json.loads(stdout.readline())
        assert code in (0, 1, 4), (out, err)
        assert not err, err
        found = json.loads(out)["findings"] if "--json" in arguments else []
        return Diagnosis(code, {each["name"]: each for each in found}, out)


@contextlib.contextmanager
def faulty() -> Iterator[Doctor]:
    """The command, in processes without a fault of their own."""
    support = str(Path(__file__).parent)
    environment = {name: value for name, value in os.environ.items() if name != "FFSERVE_SOCKET"}
    # Children are forked, so no thread may run.
    environment |= {"PYTHONPATH": support, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        yield Doctor(process)
        assert process.stdin is not None
        process.stdin.close()


# ---- in the program ---------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)


def serve() -> None:
    """Fork a process for each line of standard input; write what it wrote."""
    from ffserve.cli.daemon import doctor  # noqa: F401
    from ffserve.doctor import checks, probe  # noqa: F401

    # What is imported later may not be readable for another user.
    probe.data("/")
    probe.TIMEOUT_S = 60.0  # a slow machine answers late
    for line in sys.stdin:
        arguments, faults = json.loads(line)
        files = [os.memfd_create(name) for name in ("out", "err")]
        child = os.fork()
        if child == 0:
            _run(arguments, faults, files)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([code, *map(_content, files)]), flush=True)


def _run(arguments: list[str], faults: list[list[Any]], files: list[int]) -> None:
    from ffserve import cli

    code = 99
    try:
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
        for name, *values in faults:
            FAULTS[name](*values)
        code = cli.run(["doctor", *arguments])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _content(file: int) -> str:
    with open(file, "rb") as content:
        content.seek(0)
        return content.read().decode()


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


# ---- faults -----------------------------------------------------------------------------------


def limit(name: str, most: int) -> None:
    """Limit a resource."""
    number = getattr(resource, name)
    resource.setrlimit(number, (most, most))


def free_files(count: int) -> None:
    """Have only so many descriptors left."""
    limit("RLIMIT_NOFILE", max(map(int, os.listdir("/proc/self/fd"))) + count)


def cannot_lock() -> None:
    """Lose CAP_IPC_LOCK."""
    _set_capabilities(lambda mask: mask & ~(1 << CAP_IPC_LOCK))


def _set_capabilities(change: Callable[[int], int]) -> None:
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(libc.capget(header, data), "capget")
    permitted = change(data[1] | data[4] << 32)
    for first in (0, 1):  # effective, permitted
        data[first], data[first + 3] = permitted & 0xFFFFFFFF, permitted >> 32
    _check(libc.capset(header, data), "capset")


def no_huge_pages() -> None:
    """Switch huge pages off, as a parent process can."""
    _check(libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), "prctl")


def old_kernel() -> None:
    """Let uname(2) say 2.6."""
    assert libc.personality(UNAME26) >= 0


def deny(*calls: str) -> None:
    """Let a filter refuse system calls."""
    import container

    container.deny(calls)


def own_mounts() -> None:
    """Mount where nobody else sees it."""
    _check(libc.unshare(CLONE_NEWNS), "unshare")
    _check(libc.mount(None, b"/", None, MS_PRIVATE, None), "mount")


def mount(source: str, place: str, kind: str, options: str) -> None:
    """Mount a file system."""
    words = [word.encode() for word in (source, place, kind)]
    _check(libc.mount(*words, 0, options.encode() or None), f"mount {place}")


def showing(path: str, text: str) -> None:
    """Show another content of a file, such as one of /proc/sys."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(text)
        file.flush()
        os.chmod(file.name, 0o644)
        bound = libc.mount(file.name.encode(), path.encode(), None, MS_BIND, None)
        _check(bound, f"mount {path}")


def write(path: str, text: str) -> None:
    """Write to a file of the kernel."""
    Path(path).write_text(text)


def user(uid: int, *groups: int) -> None:
    """Become an ordinary user, who may lock memory, if no fault before took that away."""
    _check(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl")
    os.setgroups(groups)
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _set_capabilities(lambda mask: mask & 1 << CAP_IPC_LOCK)
    # As after an exec: else /proc/self belongs to root.
    _check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")


def contained() -> None:
    """Lose the right to administer the machine, as in a container."""
    _check(libc.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0), "prctl")


def variable(name: str, value: str) -> None:
    """Set a variable of the environment."""
    os.environ[name] = value


def join(*directories: str) -> None:
    """Move to control groups."""
    for directory in directories:
        Path(directory, "cgroup.procs").write_text(str(os.getpid()))


def constant(module: str, name: str, value: Any) -> None:
    """Set a constant, such as a time limit."""
    setattr(importlib.import_module(module), name, value)


def service(config: str) -> None:
    """Have systemd and the installed units, seen from nowhere else, with these settings."""
    own_mounts()
    for place, folder, name in (
        ("/run", "systemd/system", None),
        ("/usr/local/lib", "systemd/system", "ffserve.socket"),
    ):
        mount("none", place, "tmpfs", "mode=0755")
        Path(place, folder).mkdir(parents=True)
        if name is not None:
            Path(place, folder, name).touch()
    constant("ffserve.config", "CONFIG_PATH", config)
    constant("ffserve.doctor.case", "CONFIG_PATH", config)


def masked(unit: str) -> None:
    """Mask a unit, where nobody else sees it."""
    place = "/etc/systemd/system"
    mount("none", place, "tmpfs", "mode=0755")
    os.symlink("/dev/null", f"{place}/{unit}")


def removed_socket(path: str) -> None:
    """Listen on a socket whose directory is gone."""
    os.mkdir(os.path.dirname(path))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
    listener.detach()  # until the process ends


def without(package: str) -> None:
    """Lack a package."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]


FAULTS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        limit, free_files, cannot_lock, contained, no_huge_pages, old_kernel, deny, own_mounts,
        mount, showing, write, user, variable, join, constant, service, masked, without,
        removed_socket,
    )
}  # fmt: skip
