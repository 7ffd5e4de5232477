"""The first commands of README, as they stand, in empty systems of every Python: from `pip install
'ffserve[…]'` to a trained model, without a compiler, packages of the system or a network. pip finds
the wheel of this checkout, and what it needs, in a directory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import resource
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from built_files import pip, platform, wheel
from PIL import Image
from roots import NoRoot, prefix_of, release, run_in
from run_document import PRELUDE

pytestmark = pytest.mark.wheels

README = Path(__file__).parents[2] / "README.md"

COMMANDS, SECONDS = 5, 60
"""At most so many, and so long."""
TORCH = f"torch=={importlib.metadata.version('torch')}"
"""Of this environment: a build for CPUs."""
LIBRARIES = ["libbz2-1.0", "libffi8", "liblzma5", "libsqlite3-0", "libssl3", "zlib1g"]
"""What an interpreter of this machine needs."""
NO_COMPILER = "if command -v cc gcc clang as ld make; then exit 9; fi"


class System(NamedTuple):
    """A release of Debian and, where its own Python is another one, an interpreter to show it."""

    release: str
    packages: list[str]
    prefix: Path | None = None


def system_of(version: str) -> System:
    """Return the system for a Python. Raises: NoRoot."""
    own = {"3.11": "bookworm", "3.13": "trixie"}
    if version in own:
        return System(own[version], ["python3", "python3-venv"])
    try:
        return System("bookworm", LIBRARIES, prefix_of(version))
    except NoRoot:
        if version != "3.14":
            raise
    return System("sid", ["python3", "python3-venv"])


def first_commands(without: str = "") -> list[str]:
    """Return README's commands from the block that installs ffserve to the first program, which is
    pasted into a file. Args: without: an extra that is not installed; the first program that does
    not import it is taken."""
    commands: list[str] = []
    block = re.compile(r"^```(sh|python)\n(.*?)^```$", re.M | re.S)
    for language, text in block.findall(README.read_text()):
        if language == "python" and commands and not (without and f"import {without}" in text):
            return [*commands, f"cat > first.py <<'END'\n{text}END\npython first.py"]
        if language == "sh" and (commands or "pip install" in text):
            lines = text.replace("\\\n", " ").replace(f",{without}]", "]").splitlines()
            commands += [line for line in lines if line.partition("#")[0].strip()]
    raise AssertionError("README has no program after what installs ffserve")


def installed(commands: list[str]) -> str:
    """Return what README installs, such as ffserve[torch]."""
    found = re.findall(
        r"^pip install '?(ffserve(?:\[[\w,]+\])?)'?(?:\s|$)", "\n".join(commands), re.M
    )
    assert len(found) == 1, f"README does not install ffserve by its name: {commands}"
    return str(found[0])


def house_for(version: str, folder: Path, commands: list[str]) -> Path:
    """Download what these commands install for a Python; return the directory."""
    house = folder / "house"
    requirement = installed(commands)
    words: list[object] = [f"{requirement} @ {wheel('x86_64').as_uri()}"]
    # pip judges by its own Python what only older ones need.
    words += ["tomli"] * (version == "3.10")
    if "torch" in requirement:
        words.append(TORCH)
    pip("download", "-q", "-d", house, *platform("x86_64", version), *words)
    return house


def has_torch(version: str, folder: Path) -> bool:
    """Whether PyTorch's build for CPUs can be had for a Python."""
    with contextlib.suppress(AssertionError):
        pip("download", "-q", "--no-deps", "-d", folder, *platform("x86_64", version), TORCH)
        return True
    print(f"Python {version}: no {TORCH} can be had; README's first program without torch is run")
    return False


def test_the_readme_comes_to_a_batch_in_five_commands() -> None:
    commands = first_commands()
    assert installed(commands) and len(commands) <= COMMANDS, commands


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_the_first_batch_comes_within_a_minute(version: str, tmp_path: Path) -> None:
    commands = first_commands() if has_torch(version, tmp_path) else first_commands("torch")
    try:
        system = system_of(version)
        root = release(system.release, system.packages)
    except NoRoot as error:
        pytest.skip(str(error))
    for k in range(64):
        path = tmp_path / f"pictures/class {k % 4}/{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 60), (k * 3, 255 - k, 64 * (k % 4))).save(path)
    shown = [
        (house_for(version, tmp_path, commands), "/house"),
        (tmp_path / "pictures", "/root/pictures"),
    ]
    path_of_python = ""
    if system.prefix is not None:
        shown.append((system.prefix, str(system.prefix)))
        path_of_python = f"{system.prefix}/bin:"
    variables = {
        "PATH": f"{path_of_python}/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "/house",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "FFSERVE_SOCKET": "/root/s",
    }
    text = "\n".join([PRELUDE, NO_COMPILER, "cd /root", *commands, "python -V"])
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_in(root, ["bash", "-c", text], tmp_path, shown, variables)
    seconds, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"Python {version}: {seconds:.1f} s, {cpu:.1f} s of CPU time\n{done.stdout[-1000:]}")
    assert done.returncode == 0, done.stdout
    assert f"Python {version}." in done.stdout
    assert min(seconds, cpu) <= SECONDS  # other work of the machine does not count
