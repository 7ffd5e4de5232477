"""What importing costs, and what the metadata promise."""

from __future__ import annotations

import filecmp
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import entry_points, metadata, version
from pathlib import Path

import pytest

import ffserve
from ffserve.bench.child_processes import command

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "ffserve" / "engine"
HEAVY = {"torch", "uvloop", "click", "rich", "pytest", "asyncio", "setuptools", "cffi"}


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after a statement."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_ffserve_is_light() -> None:
    # pip's editable installs may import parts of setuptools through .pth files.
    loaded = modules_after("import ffserve") - modules_after("pass")
    assert not loaded & (HEAVY - {"setuptools"})


def test_reading_needs_neither_torch_nor_the_servers_loop() -> None:
    loaded = modules_after("import ffserve; ffserve.open; ffserve.create; ffserve.FileReader")
    assert not loaded & {"torch", "uvloop", "click", "rich"}


def test_the_list_of_commands_imports_no_command() -> None:
    statement = "import ffserve.cli; ffserve.cli.run(['--help'])"
    assert not modules_after(statement) & {"numpy", "torch", "uvloop", "rich", "msgpack"}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        ffserve.no_such_name  # noqa: B018


def test_the_command_is_installed() -> None:
    [command] = entry_points(group="console_scripts", name="ffserve")
    assert command.value == "ffserve.cli:main"


def test_the_metadata_name_authors_and_what_it_is_for() -> None:
    """No links: the project has no public address."""
    of = metadata("ffserve")
    assert of["Author"] == "The ffserve authors" and of["License-Expression"] == "Apache-2.0"
    classifiers = of.get_all("Classifier") or []
    for promised in ("Operating System :: POSIX :: Linux", "Typing :: Typed"):
        assert promised in classifiers


ELSEWHERE = """
import sys
from setuptools import Distribution
from setuptools.errors import PlatformError
from ffserve.engine.build_core import BuildExt

sys.platform = "darwin"
sys.modules.pop("ffserve")
try:
    import ffserve
except ImportError as error:
    print(error)
try:
    BuildExt(Distribution({"name": "ffserve"})).run()
except PlatformError as error:
    print(error)
"""


def test_other_systems_are_refused_in_a_sentence(tmp_path: Path) -> None:
    imported, built = run(ELSEWHERE, tmp_path)
    assert imported == (
        "ffserve runs on Linux only, not on darwin: run it on a Linux machine, in WSL 2, or in a "
        "Linux container (Docker, Podman, Colima)"
    )
    assert built == "ffserve is for Linux only, not for darwin"


def test_the_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    notes = runpy.run_path(str(ROOT / ".ci/notes.py"))["notes"]
    said = (ROOT / "docs/CHANGELOG.md").read_text()
    version = ffserve.__version__
    with pytest.raises(ValueError, match="has no section for v9"):
        notes(said, "v9")
    if f"## {version}, not yet released" in said:
        with pytest.raises(ValueError, match="write the date"):
            notes(said, f"v{version}")
        said = said.replace("not yet released", "2026-12-01")
    text = notes(said, f"v{version}")
    assert text.startswith("The first version.") and "## " not in text and "](" not in text
    linked = notes(said, f"v{version}", "https://example.org/a/b")
    assert f"](https://example.org/a/b/blob/v{version}/docs/howto/replace.md)" in linked
    later = f"# Changes\n\n## 9.0, 2030-01-01\n\nnew\n\n{said.partition('# Changes')[2]}"
    assert notes(later, "v9.0") == "new\n" and notes(later, f"v{version}") == text


NEEDED = """
eval "$(grep '^want_[a-z]*=no$' .ci/setup)"
venv=.venv
for option in $(make -n wheels | sed -n 's/.*setup//p'); do declare "want_${option#--}=yes"; done
have() { false; }
python_fits() { true; }
eval "$(sed -n '/^look_around()/,/^}/p' .ci/setup)"
look_around
echo "${required[@]}" "${optional[@]}"
"""


def test_building_wheels_installed_podman_unasked() -> None:
    done = subprocess.run(
        ["bash", "-euc", NEEDED], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    wanted = done.stdout.split()
    assert {"make", "nasm", "dpkg-dev"} <= set(wanted), done.stderr
    assert not {"podman", "runc", "debootstrap"} & set(wanted)


def copy_sources(target: Path) -> None:
    """Copy what a build needs."""
    for name in ("LICENSE", "README.md", "docs", "ffserve", "pyproject.toml", "systemd"):
        if (ROOT / name).is_dir():
            leave = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(ROOT / name, target / name, ignore=leave)
        else:
            shutil.copy(ROOT / name, target)


def run(program: str, folder: Path, **environment: str) -> list[str]:
    """Run a program in a folder whose packages come first; return the lines that it writes."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.check
def test_a_source_distribution_has_every_file_of_the_core(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    program = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    with tarfile.open(tmp_path / "dist" / run(program, tmp_path)[-1]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in ENGINE.glob("*/*.[ch]")}
    assert sources and sources <= packed
    assert "ffserve/engine/build_core.py" in packed
    assert {f"systemd/{path.name}" for path in (ROOT / "systemd").iterdir()} <= packed


BUILD = """
import glob, runpy, tarfile
from setuptools import build_meta, setup
words = ["-q", "build_py", "--build-lib", "lib"]
said = setup(script_name="setup.py", script_args=words).get_version()
built = runpy.run_path("lib/ffserve/_version.py")["__version__"]
assert said == built, (said, built)
with tarfile.open("packed/" + build_meta.build_sdist("packed")) as archive:
    archive.extractall("packed")
print(built, *glob.glob("packed/ffserve-*/"))
"""


@pytest.mark.check
def test_the_version_of_a_build_names_date_and_commit(tmp_path: Path) -> None:
    """Of a checkout, of a copy of it, and of a source distribution."""
    checkout, copy, alone = (tmp_path / name for name in ("checkout", "copy", "alone"))
    for place in (checkout, copy, alone):
        place.mkdir()
        copy_sources(place)

    def git(*words: str) -> str:
        named = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.check_output(["git", *named, *words], cwd=checkout, text=True).strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "x", "--date", "2026-01-02T03:04:05Z")
    now = git("log", "-1", "--date=format:%Y%m%d", "--format=%cd.g%h")
    assert re.fullmatch(r"20\d{6}\.g[0-9a-f]{7,}", now)
    release = ffserve.__version__
    version_of, packed = run(BUILD, checkout)[-1].split()
    assert version_of == f"{release}+{now}"
    assert run(BUILD, checkout / packed)[-1].split()[0] == version_of
    assert run(BUILD, copy)[-1].split()[0] == release
    assert run(BUILD, alone, FFSERVE_CHECKOUT=str(checkout))[-1].split()[0] == version_of
    with (checkout / "README.md").open("a") as file:
        file.write("changed\n")
    assert run(BUILD, checkout)[-1].split()[0] == f"{version_of}.dirty"
    git("checkout", "README.md")
    git("tag", f"v{release}")
    assert run(BUILD, checkout)[-1].split()[0] == release


@pytest.mark.check
def test_a_wheel_has_the_units_that_the_commands_of_a_checkout_install(tmp_path: Path) -> None:
    """Beside the package in a checkout, inside of it where it is installed: the same files."""
    copy_sources(tmp_path)
    build = "from setuptools import setup; setup(script_name='setup.py', "
    build += "script_args=['-q', 'build_py', '--build-lib', 'lib'])"
    run(build, tmp_path)
    units = (
        "from ffserve.cli.daemon import service; print([*service.units('/p')], service._SOURCES)"
    )
    texts = {}
    for place in (tmp_path, tmp_path / "lib"):
        texts[place], _, sources = run(units, place)[-1].rpartition(" ")
        inside = place / "ffserve" if place.name == "lib" else place
        assert Path(sources) == inside / "systemd"
        assert not filecmp.dircmp(sources, ROOT / "systemd").diff_files
        assert {p.name for p in Path(sources).iterdir()} == {
            p.name for p in (ROOT / "systemd").iterdir()
        }
    assert texts[tmp_path] == texts[tmp_path / "lib"]


@pytest.mark.check
def test_a_core_of_other_sources_says_what_to_do(tmp_path: Path) -> None:
    for package in ("ffserve", "benchmarks"):
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=leave)
    engine = tmp_path / "ffserve" / "engine"

    def loaded(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *(arguments or ("ffserve", "inspect", "/none.ffr"))],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr
        return done.stderr

    assert "No such file" in loaded()
    with (engine / "memory" / "slots.c").open("a") as source:
        source.write("/* from now on */\n")
    stale = loaded()
    assert "built from other sources" in stale and "ffserve.engine.build_core" in stale
    assert loaded("benchmarks", "--help") == stale
    for path in engine.glob("*/*.[ch]"):
        path.unlink()
    assert "No such file" in loaded(), "an installed package has no sources beside it"
    assert [path.name for path in engine.glob("_core*.so")] == ["_core.abi3.so"]
    for path in engine.glob("_core*.so"):
        path.unlink()
    assert "cannot be loaded" in loaded()


def test_what_a_command_starts_is_not_looked_for_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "ffserve").mkdir()
    (tmp_path / "ffserve" / "__init__.py").write_text("raise SystemExit('a checkout')")
    done = subprocess.run(
        [*command("ffserve"), "inspect", "/none.ffr"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "No such file" in done.stderr, done.stderr


def test_the_version_is_the_same_everywhere() -> None:
    assert ffserve.__version__ == version("ffserve").partition("+")[0]
    assert f"## {ffserve.__version__}" in (ROOT / "docs" / "CHANGELOG.md").read_text()


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "ffserve" / "py.typed").exists()


def test_the_top_level_stays_as_it_is_listed() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    assert {line.partition("/")[0] for line in tracked.stdout.splitlines()} <= {
        ".ci", ".clang-format", ".github", ".gitignore", "LICENSE", "Makefile", "README.md",
        "benchmarks", "deploy", "docs", "ffserve", "pyproject.toml", "systemd", "tests",
    }  # fmt: skip


def test_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text


def test_the_first_example_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    program = text.split("\n## Read and write\n")[1].split("```python\n")[1].split("```")[0]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("2 daemon ", "2 engine "))
