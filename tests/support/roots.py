"""Empty file systems of other releases and processors, from the packages of Debian, and programs
that run in them: in namespaces of their own, as root there, without a network, and, where the
processor is another one, under qemu.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "roots"
QEMU = "/usr/bin/qemu-aarch64-static"
_AARCH64 = ":".join(
    (
        *("", "aarch64", "M", ""),
        r"\x7fELF\x02\x01\x01" + r"\x00" * 9 + r"\x02\x00\xb7\x00",
        r"\xff" * 7 + r"\x00" + r"\xff" * 8 + r"\xfe\xff\xff\xff",
        QEMU,
        "F",
    )
)
"""Which programs qemu runs. A user namespace has a list of its own (Linux 6.7)."""


class NoRoot(Exception):
    """No such file system can be had here, and why."""


def release(name: str, packages: Sequence[str], architecture: str = "amd64") -> Path:
    """Return a release of Debian with a few packages; it is made once.

    One of another processor is only unpacked: no script of a package has run. dpkg knows what is
    there, so that further packages can be installed.

    Raises: NoRoot.
    """
    place = CACHE / "-".join((name, architecture, *packages))
    if (CACHE / f"{place.name}.complete").exists():
        return place
    if os.geteuid() != 0:
        raise NoRoot("only root may make a file system of another release")
    if shutil.which("debootstrap") is None:
        raise NoRoot("debootstrap is not installed: apt-get install debootstrap")
    foreign = architecture != _architecture()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    words = ["debootstrap", "--variant=minbase", f"--arch={architecture}"]
    words += [f"--include={','.join(packages)}"] * bool(packages) + ["--foreign"] * foreign
    done = subprocess.run([*words, name, place], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise NoRoot(f"debootstrap {name} failed: {(done.stdout + done.stderr)[-1000:]}")
    if foreign:
        _unpack(place)
    (CACHE / f"{place.name}.complete").touch()
    return place


def prefix_of(version: str) -> Path:
    """Return where this machine has a Python. Raises: NoRoot."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    script = "import sys; print('%d.%d' % sys.version_info[:2]); print(sys.base_prefix)"
    for each in filter(None, found):
        done = subprocess.run([each, "-c", script], capture_output=True, text=True)
        said, _, prefix = done.stdout.strip().partition("\n")
        if said == version and prefix != "/usr":
            return Path(prefix)
    raise NoRoot(f"this machine has no Python {version} that can be shown to another system")


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


def _unpack(place: Path) -> None:
    known = []
    for package in sorted((place / "var/cache/apt/archives").glob("*.deb")):
        words = (
            f"dpkg-deb --fsys-tarfile '{package}' | tar -xv --keep-directory-symlink -C '{place}'"
        )
        names = _output("bash", "-ec", f"set -o pipefail; {words}").splitlines()
        fields = _output("dpkg-deb", "--field", str(package))
        known.append(f"{fields}Status: install ok installed\n")
        name, architecture = package.name.partition("_")[0], package.stem.rpartition("_")[2]
        if "\nMulti-Arch: same\n" in fields:
            name = f"{name}:{architecture}"
        listed = [each[1:].rstrip("/") or "/." for each in names]
        (place / "var/lib/dpkg/info" / f"{name}.list").write_text("\n".join(listed) + "\n")
    (place / "var/lib/dpkg/status").write_text("\n".join(known))
    if (place / "proc").is_symlink():
        (place / "proc").unlink()
    for name, text in (("passwd", "root:x:0:0:root:/root:/bin/sh\n"), ("group", "root:x:0:\n")):
        (place / "etc" / name).write_text(text)


def run_in(
    root: Path,
    words: Sequence[str],
    directory: Path,
    shown: Sequence[tuple[Path, str]] = (),
    variables: Mapping[str, str] | None = None,
    emulated: bool = False,
    timeout_s: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a program in a file system; what it changes goes to a directory and not to `root`.

    Args: directory: of the changes; a second call with it finds them. shown: directories and files
        that it sees, read-only, and where.
    Raises: NoRoot: this machine has no such namespaces, or no qemu.
    """
    for name in ("changed", "work", "merged"):
        (directory / name).mkdir(exist_ok=True)
    merged = directory / "merged"
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
    environment |= variables or {}
    # In a user namespace only with such attributes can a directory be renamed, as dpkg does.
    options = f"userxattr,lowerdir={root},upperdir=changed,workdir=work"
    steps = [f"mount -t overlay overlay -o {options} merged"]
    if emulated:
        if not Path(QEMU).exists():
            raise NoRoot(f"{QEMU} is missing: apt-get install qemu-user-static")
        steps.append("mount -t binfmt_misc none /proc/sys/fs/binfmt_misc")
        steps.append(f"printf %s '{_AARCH64}' > /proc/sys/fs/binfmt_misc/register")
    steps.append("mkdir -p merged/proc merged/dev merged/tmp merged/run")
    steps.append("mount --rbind /dev merged/dev && mount -t tmpfs none merged/run")
    for source, target in shown:
        create = "mkdir -p" if source.is_dir() else "touch"
        steps.append(f"{create} {merged}{target}; mount --bind {source} {merged}{target}")
        steps.append(f"mount -o remount,bind,ro {merged}{target}")
    steps.append("mount -t proc proc merged/proc")
    steps.append("ip link set lo up 2>/dev/null || true")
    given = shlex.join(f"{k}={v}" for k, v in environment.items())
    steps.append(f'exec env -i {given} "$(command -v chroot)" merged "$@"')
    namespaces = ["--user", "--map-root-user", "--mount", "--pid", "--net", "--fork"]
    prepared = ["unshare", *namespaces, "--kill-child", "sh", "-ec", "\n".join(steps), "sh"]
    done = subprocess.run(
        [*prepared, *words],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if done.stdout.startswith(("unshare:", "mount:")):
        raise NoRoot(f"this machine has no namespaces for it: {done.stdout}")
    return done
