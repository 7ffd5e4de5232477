"""What a release consists of (`make release`): the wheels and packages in dist/, installed in empty
systems without a compiler and without a network."""

from __future__ import annotations

import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from built_files import DIST, VERSION, pip, platform, wheel
from daemon import until
from emulated import ABSENT
from roots import NoRoot, release, run_in
from systemd_container import SOURCE, Container, NoSystemd, booted

pytestmark = pytest.mark.wheels

ROOT = Path(__file__).parents[2]
LICENCES = {"LICENSE", "LICENSE.ISA-L", "LICENSE.liburing", "LICENSE.zlib"}
RELEASES = {"bookworm": "3.11", "trixie": "3.13"}
"""Releases of Debian, and their Python."""
TESTS = [
    str(path.relative_to(ROOT))
    for folder in ("engine", "formats")
    for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
]
TOOLS = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]
"""What those tests need."""
SUFFIXES = ("ffr", "recordio", "tfrecord")
SETTINGS = 'arena = "64M"\nmax_arena = "256M"\n'
PROGRAM = """
import hashlib, shutil, sys
import ffserve
from ffserve.engine import arrays, io

assert not any(map(shutil.which, ("cc", "gcc", "clang", "ld", "as"))), "there is a compiler"
samples = [hashlib.sha256(str(k).encode()).digest() * (k % 99 + 1) for k in range(500)]
for suffix in ("ffr", "recordio", "tfrecord"):
    path = f"/root/data.{suffix}"
    with ffserve.create(path) as writer:
        for sample in samples:
            writer.write(sample)
    ffserve.open(path, server="start").close()
    for server in ("off", "require"):  # which waits for a daemon that starts slowly
        with ffserve.open(path, server=server) as reader:
            assert [bytes(sample) for sample in reader.read(range(500))] == samples
            print(suffix, reader.source.split()[0])
assert not arrays.MISSING, arrays.MISSING
print(io.describe())
print("Python", *sys.version_info[:2])
"""
THREADS = """
import hashlib, sys, threading
import ffserve
from ffserve.engine import arrays

assert not sys._is_gil_enabled(), "something needs the GIL"
assert not arrays.MISSING, arrays.MISSING
samples = [hashlib.sha256(b"%d" % k).digest() * (k % 999 + 1) for k in range(2000)]
with ffserve.create(sys.argv[1]) as writer:
    for sample in samples:
        writer.write(sample)


def read(reader, shift):
    for k in range(300):
        indices = [(k * 7 + j * 13 + shift * 101) % 2000 for j in range(1 + k % 64)]
        assert [bytes(each) for each in reader.read(indices)] == [samples[j] for j in indices]
    done.append(shift)


for server in ("off", "start"):
    done = []
    with ffserve.open(sys.argv[1], server=server) as reader:
        threads = [threading.Thread(target=read, args=(reader, shift)) for shift in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == list(range(8)), done
        print(reader.source.split()[0])
assert not sys._is_gil_enabled(), "something switched the GIL on"
"""
CORE = """
import os
from importlib.machinery import ExtensionFileLoader, ModuleSpec

path = "/ffserve/engine/_core.abi3.so"
loader = ExtensionFileLoader("ffserve.engine._core", path)
core = loader.create_module(ModuleSpec("ffserve.engine._core", loader, origin=path))
engine = core.ffi.new("ffs_engine **")
print(os.confstr("CS_GNU_LIBC_VERSION").split()[1])
print(core.ffi.string(core.lib.ffs_checksum_library()).decode())
print(core.lib.ffs_built() == 0b11110)  # all engines
print(core.lib.ffs_engine_open(engine, 2, 2, 1))  # Linux AIO
"""


def empty(name: str, packages: Sequence[str], architecture: str = "amd64") -> Path:
    try:
        return release(name, packages, architecture)
    except NoRoot as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("workflows", "workflows/*.yml"),
        ("issue-config", "ISSUE_TEMPLATE/config.yml"),
        ("issue-forms", "ISSUE_TEMPLATE/[!c]*.yml"),
    ],
)
def test_the_workflows_and_forms_are_what_github_takes(schema: str, pattern: str) -> None:
    program = str(Path(sys.executable).with_name("check-jsonschema"))
    files = sorted((ROOT / ".github").glob(pattern))
    words = [program, "--builtin-schema", f"vendor.github-{schema}", *files]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert files and done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_a_wheel_needs_an_old_glibc_and_nothing_else(architecture: str) -> None:
    path = wheel(architecture)
    program = str(Path(sys.executable).with_name("auditwheel"))
    done = subprocess.run([program, "show", path], capture_output=True, text=True, check=True)
    shown = " ".join(done.stdout.split())
    tag = re.search(r'platform tag: "manylinux_2_(\d+)_(\w+)"', shown)
    assert tag is not None and tag[2] == architecture, shown
    assert f"It needs glibc 2.{tag[1]} " in (ROOT / "docs/howto/install.md").read_text()
    assert set(re.findall(r"\blib\w+\.so\.\d+", shown)) <= {"libc.so.6", "libpthread.so.0"}, shown
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    assert {Path(n).name for n in names if ".dist-info/licenses/" in n} == LICENCES
    modules = {name for name in names if name.endswith(".so")}
    assert modules == {f"ffserve/engine/{m}.abi3.so" for m in ("_arrays", "_core")}
    assert (
        "ffserve/systemd/ffserve.toml" in names and "ffserve/server/status/assets/page.js" in names
    )


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_a_wheel_says_which_libraries_are_inside(architecture: str) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    path = wheel(architecture)
    with zipfile.ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/sboms/ffserve.cdx.json")]
        text = archive.read(name).decode()
        [record] = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        assert f"{name},sha256=" in archive.read(record).decode()
    assert text == (DIST / "ffserve.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    assert bill["metadata"]["component"]["version"] == path.name.split("-")[1]
    inside = {each["name"]: each["version"] for each in bill["components"]}
    assert set(inside) == {"ISA-L", "liburing", "zlib"}
    assert all(re.fullmatch(r"\d+(\.\d+)+", version) for version in inside.values()), inside


@pytest.mark.parametrize("name", RELEASES)
def test_one_wheel_serves_empty_systems_of_several_pythons(name: str, tmp_path: Path) -> None:
    python = RELEASES[name]
    root = empty(name, ["python3", "python3-venv"])
    house = tmp_path / "house"
    # pip judges by its own Python what only older ones need.
    older = ["tomli"] if python == "3.10" else []
    pip("download", "-q", "-d", house, *platform("x86_64", python), wheel("x86_64"), *older)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shown = [(house, "/house"), (program, "/root/program.py")]
    install = (
        "python3 -m venv /opt/ffserve && "
        "/opt/ffserve/bin/pip install --quiet --disable-pip-version-check --no-index "
        f"--find-links /house ffserve=={VERSION}"
    )
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_in(root, ["sh", "-ec", install], tmp_path, shown)
    seconds, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name}: installed in {seconds:.1f} s, {cpu:.1f} s of CPU time")
    done = run_in(root, ["/opt/ffserve/bin/python", "/root/program.py"], tmp_path, shown)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[:6] == [f"{s} {w}" for s in SUFFIXES for w in ("engine", "daemon")]
    assert "checksums by ISA-L" in lines[6] and "lists of arrays by C" in lines[6], lines
    assert "not in this build" not in lines[6]
    assert lines[7] == f"Python {python.replace('.', ' ')}"
    done = run_in(root, ["/opt/ffserve/bin/ffserve", "doctor"], tmp_path)
    assert "Traceback" not in done.stdout, done.stdout


def test_the_core_works_with_an_older_glibc(tmp_path: Path) -> None:
    """Debian 11 has glibc 2.31; its Python is too old for the package, but not for the core."""
    root = empty("bullseye", ["python3", "python3-cffi-backend"])
    with zipfile.ZipFile(wheel("x86_64")) as archive:
        archive.extract("ffserve/engine/_core.abi3.so", tmp_path)
    shown = [(tmp_path / "ffserve", "/ffserve")]
    done = run_in(root, ["python3", "-c", CORE], tmp_path, shown)
    assert done.returncode == 0, done.stdout
    assert done.stdout.split() == ["2.31", "ISA-L", "True", "0"], done.stdout


@pytest.fixture(scope="module")
def free_threaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A free-threaded interpreter with its wheel and pytest. Skips where `make wheels` has none."""
    found = runpy.run_path(str(ROOT / ".ci/wheels.py"))["free_threaded"]()
    if found is None:
        pytest.skip("no free-threaded Python: FFSERVE_FREE_THREADED names none")
    place = tmp_path_factory.mktemp("free-threaded")
    subprocess.run([found, "-m", "venv", place / "env"], check=True, timeout=300)
    python = place / "env/bin/python"
    words = ["-m", "pip", "install", "-q", "--disable-pip-version-check"]
    words += [str(wheel("x86_64", "cp3*t")), *TOOLS]
    done = subprocess.run([python, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return python


def test_without_a_gil_threads_read_at_the_same_time(free_threaded: Path, tmp_path: Path) -> None:
    program = tmp_path / "threads.py"
    program.write_text(THREADS)
    command = [free_threaded, "-W", "error", program, tmp_path / "a.ffr"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["engine", "daemon"]


def test_engine_and_formats_without_a_gil(free_threaded: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600"]
    words += ["-k", "not torch_loader"]  # PyTorch is not installed
    done = subprocess.run(
        [free_threaded, *words, *TESTS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "tests/support")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"^\d+ passed", done.stdout, re.M), done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel for aarch64, what it needs, and pytest."""
    site = tmp_path_factory.mktemp("packages")
    options = ["-q", "--target", site, *platform("aarch64", "3.11")]
    pip("install", *options, wheel("aarch64"), *TOOLS)
    return site


@pytest.mark.parametrize("tests", [path for path in TESTS if Path(path).stem not in ABSENT])
def test_engine_and_formats_under_emulation(tests: str, packages: Path, tmp_path: Path) -> None:
    """qemu has neither io_uring nor Linux AIO: the engine is threads."""
    root = empty("bookworm", ["python3", "python3-venv"], "arm64")
    shown = [(packages, "/site")]
    shown += [(ROOT / name, f"/src/{name}") for name in ("tests", "pyproject.toml")]
    words = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/src/pyproject.toml"]
    words += ["-p", "emulated", "--timeout", "600", f"/src/{tests}"]
    found = {"PYTHONPATH": "/site:/src/tests/support"}
    done = run_in(root, words, tmp_path, shown, found, emulated=True, timeout_s=1100)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"^\d+ passed", done.stdout, re.M), done.stdout


def test_the_package_for_aarch64_serves(tmp_path: Path) -> None:
    """Installed by dpkg and used, all under qemu."""
    [package] = DIST.glob(f"ffserve_{VERSION}*-1+python*_arm64.deb")
    names = [name for name, python in RELEASES.items() if f"+python{python}_" in package.name]
    assert names, f"no release of Debian is known for {package.name}"
    root = empty(names[0], ["python3", "python3-venv"], "arm64")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shown = [(package, "/root/ffserve.deb"), (program, "/root/program.py")]
    for command in (
        ["dpkg", "--install", "/root/ffserve.deb"],
        ["/opt/ffserve/bin/python", "/root/program.py"],
        ["ffserve", "verify", "/root/data.ffr"],
    ):
        done = run_in(root, command, tmp_path, shown, emulated=True, timeout_s=900)
        assert done.returncode == 0, done.stdout
        for suffix in SUFFIXES if "program.py" in command[-1] else ():
            assert re.search(f"^{suffix} engine$", done.stdout, re.M), done.stdout
            assert re.search(f"^{suffix} daemon$", done.stdout, re.M), done.stdout


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A machine with systemd, and without ffserve."""
    directory = tmp_path_factory.mktemp("machine")
    for each in (directory, *directory.parents[:3]):
        each.chmod(0o755)
    try:
        with booted(directory) as container:
            container.run("useradd", "--create-home", "alice")
            yield container
    except NoSystemd as error:
        pytest.skip(str(error))


def test_the_package_is_a_service_until_it_is_purged(machine: Container) -> None:
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    python = machine.run("/usr/bin/python3", "-c", script).strip()
    packages = list(DIST.glob(f"ffserve_{VERSION}*-1+python{python}_amd64.deb"))
    assert len(packages) == 1, f"dist/ has {len(packages)} packages for {python}: run `make deb`"
    path = packages[0]
    places = ("/opt", "/etc", "/usr/bin", "/usr/lib", "/usr/local/lib", "/var/cache", "/var/lib")
    find = ("find", *places, "-name", "*ffserve*")
    before, groups = machine.run(*find), machine.run("cat", "/etc/group")
    install = ("dpkg", "--install", f"{SOURCE}/dist/{path.name}")
    machine.run(*install, timeout=300)
    machine.run("usermod", "-aG", "ffserve", "alice")
    assert machine.property("ffserve.socket", "ActiveState") == "active"
    assert machine.property("ffserve.socket", "UnitFileState") == "enabled"
    assert machine.property("ffserve.service", "ActiveState") == "inactive"
    script = "source /usr/share/bash-completion/completions/ffserve && complete -p ffserve"
    assert "_ffserve_completion" in machine.run("bash", "-c", script)
    machine.write("/etc/ffserve/ffserve.toml", SETTINGS)
    assert "of 64.0 MiB" in machine.run("ffserve", "status", user="alice"), "it starts the daemon"
    found = json.loads(machine.run("ffserve", "doctor", "--json", code=None))
    assert "Traceback" not in str(found), found
    pid = machine.pid()
    machine.run(*install, timeout=300)
    until(lambda: machine.pid() not in (0, pid), "an upgrade starts the next daemon")
    assert "took over" in machine.log()
    assert machine.run("cat", "/etc/ffserve/ffserve.toml") == SETTINGS
    machine.run("dpkg", "--remove", "ffserve", timeout=120)
    assert machine.property("ffserve.socket", "ActiveState") == "inactive"
    assert machine.run("cat", "/etc/ffserve/ffserve.toml") == SETTINGS
    machine.run("dpkg", "--purge", "ffserve", timeout=120)
    assert machine.run(*find) == before
    assert machine.run("cat", "/etc/group") == groups
