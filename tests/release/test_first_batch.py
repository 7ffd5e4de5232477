"""The first commands of README, as they stand, in empty systems of every Python: from `pip install
ffserve` to the first batch, without a compiler, packages of the system or a network. pip finds the
wheel of this checkout, and what it needs, in a directory."""

from __future__ import annotations

import importlib.metadata
import re
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from built_files import pip, platform, wheel
from roots import NoRoot, prefix_of, release, run_in
from run_document import PRELUDE

pytestmark = pytest.mark.wheels

README = Path(__file__).parents[2] / "README.md"

COMMANDS, SECONDS = 5, 60
"""At most so many, and so long."""
LIBRARIES = ["libbz2-1.0", "libffi8", "liblzma5", "libsqlite3-0", "libssl3", "zlib1g"]
"""What an interpreter of this machine needs."""
NO_COMPILER = "! command -v cc gcc clang as ld make"


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


def first_commands() -> list[str]:
    """Return README's commands, from the first that installs to the first program, which may be a
    block of its own."""
    commands: list[str] = []
    for language, text in re.findall(
        r"^```(sh|python)\n(.*?)^```$", README.read_text(), re.M | re.S
    ):
        if language == "python" and commands:
            return [*commands, f"python - <<'END'\n{text}END"]
        if language == "python" or not (commands or re.search(r"^pip install", text, re.M)):
            continue
        for line in text.replace("\\\n", " ").splitlines():
            if line.partition("#")[0].strip():
                commands.append(line)
            if line.startswith("python "):
                return commands
    return commands


def house_for(version: str, installs: str, folder: Path) -> Path:
    """Download what README's command installs for a Python; return the directory."""
    house = folder / "house"
    extras = re.search(r"ffserve(\[[\w,]+\])?", installs)
    assert extras is not None
    words: list[object] = [f"ffserve{extras[1] or ''} @ {wheel('x86_64').as_uri()}"]
    # pip judges by its own Python what only older ones need.
    words += ["tomli"] * (version == "3.10")
    if "torch" in (extras[1] or ""):
        words.append(f"torch=={importlib.metadata.version('torch')}")  # the build for CPUs
    pip("download", "-q", "-d", house, *platform("x86_64", version), *words)
    return house


def test_the_readme_comes_to_a_batch_in_five_commands() -> None:
    commands = first_commands()
    assert commands and len(commands) <= COMMANDS, commands
    assert re.match(r"pip install '?ffserve\b", commands[0]), commands[0]


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_the_first_batch_comes_within_a_minute(version: str, tmp_path: Path) -> None:
    commands = first_commands()
    try:
        system = system_of(version)
        root = release(system.release, system.packages)
    except NoRoot as error:
        pytest.skip(str(error))
    shown = [(house_for(version, commands[0], tmp_path), "/house")]
    python = "/usr/bin/python3"
    if system.prefix is not None:
        shown.append((system.prefix, str(system.prefix)))
        python = f"{system.prefix}/bin/python{version}"
    done = run_in(
        root, ["sh", "-ec", f"{NO_COMPILER}; {python} -m venv /root/env"], tmp_path, shown
    )
    assert done.returncode == 0, done.stdout
    variables = {
        "PATH": "/root/env/bin:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "/house",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "FFSERVE_SOCKET": "/root/s",
    }
    text = "\n".join(["cd /root", PRELUDE, *commands, 'echo "batch by $(python -V)"'])
    begin = time.monotonic()
    done = run_in(root, ["bash", "-c", text], tmp_path, shown, variables)
    seconds = time.monotonic() - begin
    print(f"Python {version}: {len(commands)} commands, {seconds:.1f} s\n{done.stdout[-1000:]}")
    assert done.returncode == 0, done.stdout
    assert f"batch by Python {version}." in done.stdout
    assert seconds <= SECONDS
