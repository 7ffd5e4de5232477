"""A systemd of its own: a container over an overlay of this machine, booted by systemd-nspawn."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from daemon import DEADLINE_S

ROOT = Path(__file__).parents[2]
SOURCE = "/usr/src/ffserve"
DATA = "/data"
_PASSED = ("PIP_", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "SSL_CERT_FILE")
"""Beginnings of the environment variables with which pip finds packages."""


class NoSystemd(Exception):
    """No systemd can be booted here, and why."""


class Container:
    """A running systemd.

    Args:
        directory: for the files that it changes, and `data`, its /data.
        console: what it wrote.
    """

    def __init__(self, directory: Path, nspawn: subprocess.Popen[bytes]) -> None:
        self.directory = directory
        self.changed = directory / "changed"
        """What differs from the machine."""
        self.data = directory / "data"
        self.before: set[str] = set()
        """The groups before the installation."""
        self.last = ""
        """The last command of the installation."""
        self._nspawn = nspawn
        self._leader = 0

    def wait(self) -> None:
        """Wait until it has booted. Raises: NoSystemd."""
        console = self.directory / "console"
        deadline = time.monotonic() + 2 * DEADLINE_S
        state = ""
        while state not in ("running", "degraded"):
            if self._nspawn.poll() is not None or time.monotonic() > deadline:
                raise NoSystemd(f"systemd does not boot ({state}): {console.read_text()[-2000:]}")
            time.sleep(0.1)
            children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children")
            with contextlib.suppress(OSError, IndexError):
                self._leader = int(children.read_text().split()[0])
                state = self.run("systemctl", "is-system-running", code=None).strip()

    def command(self, words: Sequence[str], user: str = "") -> list[str]:
        """Return the command that runs another one in the container."""
        passed = [f"{name}={os.environ[name]}" for name in os.environ if name.startswith(_PASSED)]
        return [
            *("nsenter", "--target", str(self._leader), "--all", "--wd"),
            *(
                "env",
                "--ignore-environment",
                "PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin",
                "LANG=C.UTF-8",
            ),
            *passed,
            *([] if not user else ["setpriv", f"--reuid={user}", f"--regid={user}"]),
            *([] if not user else ["--init-groups", "--inh-caps=-all"]),
            *words,
        ]

    def run(self, *words: str, user: str = "", code: int | None = 0, timeout: float = 60) -> str:
        """Run a command as root or as a user; return what it wrote."""
        done = subprocess.run(
            self.command(words, user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert code in (None, done.returncode), (words, done.returncode, done.stdout)
        return done.stdout

    def start(self, *words: str, user: str = "") -> subprocess.Popen[str]:
        """Start a command, as a process group: nsenter waits for the process that it starts."""
        return subprocess.Popen(
            self.command(words, user),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def write(self, path: str, text: str) -> None:
        """Write a file, as an administrator does."""
        done = subprocess.run(
            self.command(["sh", "-c", 'mkdir -p "${0%/*}" && cat > "$0"', path]),
            input=text,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0

    def property(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def pid(self, unit: str = "ffserve.service") -> int:
        """Return the number of a service's process in the machine, 0 if there is none."""
        inside = self.property(unit, "MainPID")
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                line = status.read_text().partition("\nNSpid:")[2].partition("\n")[0].split()
                if inside != "0" and line[1:] == [inside] and self._is_inside(status.parent):
                    return int(line[0])
        return 0

    def _is_inside(self, process: Path) -> bool:
        spaces = [Path(f"/proc/{self._leader}/ns/pid"), process / "ns/pid"]
        return len({os.readlink(space) for space in spaces}) == 1

    def log(self, unit: str = "ffserve.service") -> str:
        """Return the log of a unit."""
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")


@contextlib.contextmanager
def booted(directory: Path) -> Iterator[Container]:
    """Boot a systemd with as few services as possible, and end it.

    Raises: NoSystemd: why that cannot be done here.
    """
    if os.geteuid() != 0:
        raise NoSystemd("only root can boot a container")
    if shutil.which("systemd-nspawn") is None or not os.path.exists("/lib/systemd/systemd"):
        raise NoSystemd("systemd-nspawn is not installed: apt-get install systemd-container")
    for name in ("root", "changed", "work", "data"):
        (directory / name).mkdir()
    # The overlay is in a mount namespace of its own, and systemd-nspawn ends with this process: no
    # mount is left behind, however the tests end.
    overlay = "mount -t overlay overlay -o lowerdir=/,upperdir=changed,workdir=work root"
    nspawn = None
    try:
        with (directory / "console").open("wb") as console:
            nspawn = subprocess.Popen(
                [
                    *("unshare", "--mount", "--propagation=private", "setpriv", "--pdeathsig=KILL"),
                    *("sh", "-c", f'{overlay} && exec "$@"', "sh"),
                    *("systemd-nspawn", "--directory=root", "--boot", "--console=pipe"),
                    *("--register=no", "--keep-unit", "--link-journal=no", "--resolv-conf=off"),
                    *(f"--bind-ro={ROOT}:{SOURCE}", f"--bind={directory}/data:{DATA}"),
                    *(["--bind=/dev/fuse"] if os.path.exists("/dev/fuse") else []),
                    # Other services of the machine have no business here.
                    "systemd.unit=sysinit.target",
                ],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        container = Container(directory, nspawn)
        container.wait()
        yield container
    finally:
        if nspawn is not None:
            nspawn.send_signal(signal.SIGTERM)
            try:
                nspawn.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                nspawn.kill()
                nspawn.wait()
