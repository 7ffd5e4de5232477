"""``ffserve install-service`` and ``ffserve uninstall-service``: the daemon as a system service.

The units are templates for several daemons (`ffserve@NAME.service`). Without the name of the
instance the same text is the unit of the daemon of the machine, so both always agree. They go below
/usr/local: systemd prefers what an administrator has in /etc, and an upgrade leaves that alone.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ffserve.disk.files import wrap_os_error
from ffserve.errors import AccessDenied, FFServeError, UsageError

GROUP = "ffserve"
_PACKAGE = Path(__file__).parents[2]
_SOURCES = next(p / "systemd" for p in (_PACKAGE, _PACKAGE.parent) if (p / "systemd").is_dir())
"""In an installed package the units are inside of it; in a checkout they stand beside it."""
_PROGRAM = "/opt/ffserve/bin/ffserve"
"""The units name this program; `units` replaces it."""
_UNITS = Path("usr/local/lib/systemd/system")
_SYSUSERS = Path("usr/local/lib/sysusers.d/ffserve.conf")
_SETTINGS = Path("etc/ffserve")
_ADMINISTRATORS = Path("etc/systemd/system")
_COMMAND = Path("usr/local/bin/ffserve")
"""A link to the program, so that `ffserve` is a command."""
_MOUNT = "ffserve-mount@.service"
_NAMES = ("ffserve.service", "ffserve.socket", "ffserve@.service", "ffserve@.socket", _MOUNT)
_ALL = ("ffserve[.]socket", "ffserve@*.socket", "ffserve[.]service", "ffserve@*.service")
"""These are patterns, so that units that are not loaded are not an error."""
_MOUNTS = "ffserve-mount@*.service"
"""An upgrade does not restart views: programs have files of theirs open."""
_HIDDEN = ("/home", "/root", "/run/user")
"""Directories that ProtectHome= hides from the service."""

_root_option = click.option(
    "--root",
    metavar="DIR",
    default="/",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Work on the file system below DIR, such as an image; start and stop nothing.",
)


@click.command()
@_root_option
def install_service(root: Path) -> int:
    """Install the daemon as a service of systemd.

    It writes the units and a link in /usr/local/bin, creates the group of the clients, and starts
    the socket, at which the first job starts the daemon. Settings that exist are kept. If the
    service is installed already, it is replaced, and running daemons are restarted; views
    (ffserve-mount@NAME) go on as they are.

    \b
      ffserve install-service                            as root
      sudo usermod -aG ffserve alice                     alice may connect
      sudo systemctl enable --now ffserve@fast.socket    another daemon: /etc/ffserve/fast.toml
    """
    root = root.resolve()
    live = root == Path("/")
    if live:
        _check_systemd("install")
    program = _program(live)
    for name, text in units(program):
        _write(root / _UNITS / name, text)
    _write(root / _SYSUSERS, (_SOURCES / "ffserve.sysusers").read_text())
    settings = root / _SETTINGS / "ffserve.toml"
    kept = settings.exists()
    if not kept:
        _write(settings, (_SOURCES / "ffserve.toml").read_text())
    _link(root / _COMMAND, program)
    for name in _NAMES:
        if (root / _ADMINISTRATORS / name).exists():
            click.echo(
                f"note: {root / _ADMINISTRATORS / name} hides the unit that was installed; "
                "remove it if it is from an earlier installation",
                err=True,
            )
    if live:
        _run("systemd-sysusers", str(root / _SYSUSERS))
        _run("systemctl", "daemon-reload")
        _run("systemctl", "enable", "--quiet", "--now", "ffserve.socket")
        _run("systemctl", "try-restart", *_ALL[2:])
    click.echo(f"installed ffserve.socket and ffserve.service for {program}")
    click.echo(f"settings: {settings}{' (kept as they are)' if kept else ''}")
    click.echo(f"members of the group {GROUP} may connect: usermod -aG {GROUP} USER")
    return 0


@click.command()
@_root_option
@click.option("--purge", is_flag=True, help="Remove settings that were changed as well.")
def uninstall_service(root: Path, purge: bool) -> int:
    """Stop and remove the service.

    It stops all daemons and views and removes units, group, and index files. Settings that are not
    as they were installed, and changes to units, are kept and named, unless --purge is given. Jobs
    that run continue by reading the files themselves.

    \b
      ffserve uninstall-service              as root
      ffserve uninstall-service --purge      also settings that were changed
    """
    root = root.resolve()
    live = root == Path("/")
    if live:
        _check_systemd("remove")
        _run("systemctl", "stop", *_ALL, _MOUNTS)
        enabled = sorted({link.name for link in (root / _ADMINISTRATORS).glob("*.wants/ffserve*")})
        if names := [
            name for name in enabled if name.startswith(("ffserve.", "ffserve@", "ffserve-mount@"))
        ]:
            _run("systemctl", "disable", "--quiet", *names)
        with contextlib.suppress(FFServeError):  # none has failed
            _run("systemctl", "reset-failed", *_ALL, _MOUNTS)
    for path in (*(root / _UNITS / name for name in _NAMES), root / _SYSUSERS):
        wrap_os_error(lambda p: Path(p).unlink(missing_ok=True), str(path))
    link = root / _COMMAND
    if link.is_symlink() and os.readlink(link) == _program_of(sys.prefix):
        wrap_os_error(_remove, str(link))
    for path in _caches(root):
        wrap_os_error(_remove, str(path))
    kept = [path for path in _of_administrator(root) if not purge and not _unchanged(path)]
    for path in [path for path in _of_administrator(root) if path not in kept]:
        wrap_os_error(_remove, str(path))
    for directory in (root / _SETTINGS, root / "run/ffserve"):
        with contextlib.suppress(OSError):  # it has something else, or is not there
            directory.rmdir()
    if live:
        _run("systemctl", "daemon-reload")
        if _group_is_local():
            _run("groupdel", GROUP)
    click.echo("removed the service")
    for path in kept:
        click.echo(f"kept {path}, which was changed (--purge removes it)")
    return 0


def _check_systemd(verb: str) -> None:
    """Raises: AccessDenied: this is not root. UsageError: systemd does not run here."""
    if os.geteuid() != 0:
        raise AccessDenied(f"only root may {verb} a service", hint="use sudo")
    if not os.path.isdir("/run/systemd/system"):
        raise UsageError(
            "systemd does not run here",
            hint="run `ffserve serve` as your service manager does, or give --root for an image",
        )


def _program_of(prefix: str) -> str:
    return f"{prefix}/bin/ffserve"


def _link(path: Path, program: str) -> None:
    """Make the command, unless something else has its place."""
    if str(path) == program or (path.is_symlink() and os.readlink(path) == program):
        return
    if os.path.lexists(path):
        click.echo(f"note: {path} is left as it is; the command of the service is {program}")
        return

    def link(name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(program, name)

    wrap_os_error(link, str(path))


def _program(live: bool, prefix: str = sys.prefix) -> str:
    """Return the command of this installation.

    Raises: UsageError: there is none, or, where it is to run, the service cannot run it.
    """
    program = Path(_program_of(prefix))
    if not program.exists():
        raise UsageError(
            "the service needs this program, which does not exist",
            path=str(program),
            hint="install ffserve with pip in a virtual environment, such as /opt/ffserve",
        )
    if not live:
        return str(program)
    for needed in (program, Path(sys.executable).resolve(), _SOURCES):
        for place in (needed, *needed.parents):
            hidden = str(place) in _HIDDEN
            if hidden or not place.stat().st_mode & 0o001:
                why = "it sees no home directories" if hidden else f"{place} is not for all users"
                raise UsageError(
                    f"the service cannot use this installation: {why}",
                    path=str(needed),
                    hint="install ffserve where all users may read, with a Python that is there: "
                    "/usr/bin/python3 -m venv /opt/ffserve",
                )
    return str(program)


def units(program: str) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the units."""
    for kind in ("service", "socket"):
        text = (_SOURCES / f"ffserve@.{kind}").read_text().replace(_PROGRAM, program)
        yield f"ffserve@.{kind}", text
        plain = text.replace("@%i", "").replace("-%i", "").replace("%i", "ffserve")
        yield f"ffserve.{kind}", plain
    yield _MOUNT, (_SOURCES / _MOUNT).read_text().replace(_PROGRAM, program)


def _caches(root: Path) -> Iterator[Path]:
    """Yield the directories of index files; with DynamicUser= each is a link to a private one."""
    for parent in (root / "var/cache", root / "var/cache/private"):
        yield from parent.glob("ffserve")
        yield from parent.glob("ffserve-*")


def _of_administrator(root: Path) -> list[Path]:
    """Return settings, and changes to units."""
    return [
        *sorted((root / _SETTINGS).glob("*.toml")),
        *sorted((root / _SETTINGS).glob("*.conf")),
        *sorted((root / _ADMINISTRATORS).glob("ffserve.*.d")),
        *sorted((root / _ADMINISTRATORS).glob("ffserve@*.d")),
        *sorted((root / _ADMINISTRATORS).glob("ffserve-mount@*.d")),
        *(path for name in _NAMES if (path := root / _ADMINISTRATORS / name).exists()),
    ]


def _unchanged(path: Path) -> bool:
    return path.is_file() and filecmp.cmp(path, _SOURCES / "ffserve.toml", shallow=False)


def _group_is_local() -> bool:
    return any(line.startswith(f"{GROUP}:") for line in Path("/etc/group").read_text().splitlines())


def _write(path: Path, text: str) -> None:
    """Write a file that all users may read, or leave the one before."""

    def write(name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_text(text)
        new.chmod(0o644)
        os.replace(new, name)

    wrap_os_error(write, str(path))


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _run(*command: str) -> None:
    """Run a program of the system. Raises: FFServeError: it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise FFServeError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise FFServeError(
            f"`{shlex.join(command)}` failed with exit code {done.returncode}: "
            f"{done.stderr.strip() or done.stdout.strip()}"
        )
