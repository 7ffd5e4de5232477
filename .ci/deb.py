"""Debian packages of the wheels in dist/, into dist/.

    .venv/bin/python .ci/deb.py                                  # for the Python of this machine
    .venv/bin/python .ci/deb.py --python 3.13 --architecture aarch64

A package is a virtual environment in /opt/ffserve, with ffserve and all that it needs, and the
units of systemd. It runs with the Python of one release of Debian or Ubuntu, whose version is in
its name: 3.11 is that of Debian 12. Nothing of the target runs here, so one machine makes all
packages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import string
import subprocess
import sys
from pathlib import Path

from wheels import ARCHITECTURES, ROOT, Failed, program, run

BUILD = ROOT / "build" / "deb"
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
PYTHON = "/usr/bin/python3"
PREFIX = "/opt/ffserve"
SCRIPT = f"""#!{PREFIX}/bin/python
import sys

from ffserve.cli import main

sys.exit(main())
"""


def system_python() -> str:
    """Return the version of the machine's Python, such as 3.11."""
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return run([PYTHON, "-c", script]).strip()
    except OSError as error:
        raise Failed(
            f"{PYTHON} cannot run ({error.strerror}): name a version by --python"
        ) from error


def install(wheel: Path, architecture: str, python: str, site: Path) -> None:
    """Install a wheel and what it needs for another processor and Python into a directory."""
    older = (f"manylinux_2_{minor}_{architecture}" for minor in range(28, 16, -1))
    platforms = [*older, f"manylinux2014_{architecture}", f"manylinux2010_{architecture}"]
    words = ["install", "-q", "--disable-pip-version-check", "--no-compile", "--only-binary=:all:"]
    words += ["--implementation", "cp", "--python-version", python, "--target", str(site)]
    for platform in (*platforms, f"manylinux1_{architecture}"):
        words += ["--platform", platform]
    # pip judges by its own Python what only older ones need.
    older_ones = ["tomli"] if python == "3.10" else []
    run([sys.executable, "-m", "pip", *words, f"ffserve[metrics] @ {wheel.as_uri()}", *older_ones])
    shutil.rmtree(site / "bin")


def package(architecture: str, python: str, output: Path) -> Path:
    """Build one package; return its path."""
    wheels = list(output.glob(f"ffserve-*-cp310-abi3-*_{architecture}.whl"))
    if len(wheels) != 1:
        raise Failed(f"{output} has {len(wheels)} wheels for {architecture}: run `make wheels`")
    version = wheels[0].name.split("-")[1]
    stage = BUILD / f"{architecture}-{python}"
    shutil.rmtree(stage, ignore_errors=True)
    (stage / "units").mkdir(parents=True)
    install(wheels[0], architecture, python, stage / "site-packages")
    (stage / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {python}\n"
    )
    (stage / "ffserve").write_text(SCRIPT)
    sys.path.insert(0, str(ROOT))
    from ffserve.cli.daemon.service import units

    for name, text in units(f"{PREFIX}/bin/ffserve"):
        (stage / "units" / name).write_text(text)
    from ffserve.cli import cli
    from ffserve.cli.completion import scripts

    for path, text in scripts(cli).items():
        place = stage / "completion" / path.lstrip("/")
        place.parent.mkdir(parents=True)
        place.write_text(text)
    names = {
        "debian_architecture": DEBIAN[architecture],
        "maintainer": f"{os.environ.get('DEBFULLNAME', 'ffserve')} "
        f"<{os.environ.get('DEBEMAIL', 'root@localhost')}>",
        "python": python,
        "root": ROOT,
        "stage": stage,
        "version": version,
    }
    recipe = string.Template((ROOT / ".ci/deb/nfpm.yaml").read_text().partition("\n")[2])
    (stage / "nfpm.yaml").write_text(recipe.substitute(names))
    for earlier in output.glob(f"ffserve_*-1+python{python}_{DEBIAN[architecture]}.deb"):
        earlier.unlink()
    target = output / f"ffserve_{version}-1+python{python}_{DEBIAN[architecture]}.deb"
    words = ["package", "--packager", "deb", "--config", stage / "nfpm.yaml", "--target", target]
    run([program("nfpm"), *words])
    return target


def main() -> int:
    """Build the packages."""
    parser = argparse.ArgumentParser(description="Build Debian packages of the wheels.")
    parser.add_argument(
        "--architecture", choices=ARCHITECTURES, nargs="+", default=list(ARCHITECTURES)
    )
    parser.add_argument("--python", help="version, such as 3.11; default: of /usr/bin/python3")
    arguments = parser.parse_args()
    try:
        python = arguments.python or system_python()
        for architecture in arguments.architecture:
            path = package(architecture, python, ROOT / "dist")
            print(f"deb: {path.name}, {path.stat().st_size >> 20} MiB", file=sys.stderr)
    except (Failed, subprocess.SubprocessError) as error:
        print(f"deb: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
