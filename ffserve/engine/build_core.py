"""Build of the C core: for pip, in place, or with a sanitizer.

Every C file of the folders in ROOMS is part of the core, except arrays.c; there is no other list of
them.
arrays.c is a module by itself, which needs numpy's headers; the package works without it where it
cannot be built. pip reaches ``BuildExt`` through pyproject.toml (``tool.setuptools.cmdclass``) and
loads this file alone, not the package, so nothing of ffserve may be imported here. Optional
libraries are found by linking a small program; without liburing the core has no io_uring engines,
without ISA-L it computes checksums by tables, without zlib it reads compressed TFRecord files in
order only.

A build's version names the date and the commit of its sources, by git: 0.1.0+20261128.g24327da; a
commit with the tag of the version (v0.1.0) is the release, 0.1.0. A source distribution keeps it.

``FFSERVE_CHECKOUT``: the git checkout whose copy is built, since a copy has no history.
``FFSERVE_BUILD_WITHOUT``: macros of libraries to leave out (``FFS_HAVE_URING,FFS_HAVE_ISAL``).
``FFSERVE_BUILD_STRICT``: compiler warnings are errors (continuous integration, sanitizers); a
user's compiler may be newer than the code.

As a program it builds a copy of the package outside of any installation::

    python -m ffserve.engine.build_core                     # into the source tree
    python -m ffserve.engine.build_core --sanitize address -o build/asan
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import cffi  # type: ignore[import-untyped]
from setuptools import Distribution, Extension  # type: ignore[import-untyped]
from setuptools.command.bdist_wheel import bdist_wheel  # type: ignore[import-untyped]
from setuptools.command.build_ext import build_ext  # type: ignore[import-untyped]
from setuptools.command.build_py import build_py  # type: ignore[import-untyped]
from setuptools.command.egg_info import egg_info  # type: ignore[import-untyped]
from setuptools.errors import (  # type: ignore[import-untyped]
    BaseError,
    CCompilerError,
    CompileError,
    PlatformError,
)

MODULE = "ffserve.engine._core"
ARRAYS, ARRAYS_SOURCE = "ffserve.engine._arrays", "memory/arrays.c"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ROOMS = ("reading", "records", "memory")
"""Folders with the C files: reads of files, contents of records, memory that processes share."""
HEADERS = (
    "records/codec.h", "records/example.h", "records/inflate.h", "records/tar.h", "memory/shm.h",
    "reading/io.h", "reading/many_files.h", "reading/cached.h", "memory/slots.h", "memory/fuse.h",
)  # fmt: skip
"""Headers whose declarations Python sees, each after those that it includes."""
STABLE_ABI = "" if sysconfig.get_config_var("Py_GIL_DISABLED") else "cp310"
"""The oldest Python that a build serves; arrays.c says the same. Empty: only this Python."""
COMPILER_FLAGS = ("-std=gnu11", "-Wall", "-Wextra", "-pthread")

LIBURING_TRIAL = """
#include <liburing.h>
int trial(struct io_uring *r)
{
    io_uring_ring_dontfork(r);
    io_uring_submit_and_get_events(r);
    io_uring_register_buffers_sparse(r, 1);
    return io_uring_register_files_sparse(r, 1) + io_uring_queue_init(8, r, 0);
}
"""
AIO_TRIAL = """
#include <linux/aio_abi.h>
#include <sys/syscall.h>
int trial(void) { return SYS_io_submit + IOCB_FLAG_RESFD; }
"""
ISAL_TRIAL = """
#include <isa-l/crc.h>
#include <isa-l/igzip_lib.h>
unsigned trial(unsigned char *p, struct inflate_state *z)
{
    return crc32_gzip_refl(0, p, 1) + crc32_iscsi(p, 1, 0) + isal_inflate(z);
}
"""
ZLIB_TRIAL = """
#include <zlib.h>
int trial(z_stream *z) { return inflatePrime(z, 1, 1) + inflateReset2(z, -15); }
"""
TRIALS: tuple[tuple[str, str, str, tuple[tuple[str, ...], ...]], ...] = (
    # name, macro, program, linker arguments to try in order
    ("io_uring", "FFS_HAVE_URING", LIBURING_TRIAL, (("-l:liburing.a",), ("-luring",))),
    ("Linux AIO", "FFS_HAVE_AIO", AIO_TRIAL, ((),)),
    ("ISA-L", "FFS_HAVE_ISAL", ISAL_TRIAL, (("-l:libisal.a",), ("-lisal",))),
    ("zlib", "FFS_HAVE_ZLIB", ZLIB_TRIAL, (("-l:libz.a",), ("-lz",))),
)


def declarations() -> str:
    """Return the parts of the headers that Python sees."""
    parts = []
    for name in HEADERS:
        text = (HERE / name).read_text(encoding="utf-8")
        found = re.search(r"/\* cdef \*/\n(.*)/\* end cdef \*/", text, re.DOTALL)
        assert found, f"{name} has lost its cdef marks"
        parts.append(found.group(1))
    return "".join(parts)


def emit(target: Path) -> None:
    """Write the generated C module."""
    builder = cffi.FFI()
    builder.cdef(declarations() + "#define FFS_SOURCES ...\n")  # a macro of `BuildExt`
    includes = "".join(f'#include "{name}"\n' for name in HEADERS)
    builder.set_source(MODULE, includes)
    target.parent.mkdir(parents=True, exist_ok=True)
    builder.emit_c_code(str(target))


class BuildExt(build_ext):  # type: ignore[misc]
    """build_ext that generates the cffi module and looks for the optional libraries."""

    sanitize: str = ""

    def finalize_options(self) -> None:
        for ext in self.distribution.ext_modules:
            ext.py_limited_api = bool(STABLE_ABI)
        super().finalize_options()
        for ext in self.extensions:
            # A source distribution carries what stands here.
            if ext.name == MODULE:
                found = set(HERE.glob("*/*.c")) - {HERE / ARRAYS_SOURCE}
                ext.sources = [os.path.relpath(path) for path in sorted(found)]
                ext.depends = [os.path.relpath(path) for path in sorted(HERE.glob("*/*.h"))]
            elif ext.name == ARRAYS:
                ext.sources = [os.path.relpath(HERE / ARRAYS_SOURCE)]

    def run(self) -> None:
        if sys.platform != "linux":
            raise PlatformError(f"ffserve is for Linux only, not for {sys.platform}")
        super().run()
        for ext in self.extensions:
            self._remove_others(Path(self.get_ext_fullpath(ext.name)))

    def _remove_others(self, built: Path) -> None:
        """Remove builds of a module with other suffixes, which Python may prefer."""
        if built.exists():
            for path in built.parent.glob(f"{built.name.partition('.')[0]}.*.so"):
                if path.name != built.name:
                    path.unlink()

    def build_extension(self, ext: Extension) -> None:
        if ext.name == MODULE:
            generated = Path(self.build_temp) / "_core.c"
            emit(generated)
            ext.sources = [str(generated), *ext.sources]
            ext.include_dirs += [str(HERE), *_headers()]
            if not STABLE_ABI:
                ext.define_macros.append(("_CFFI_NO_LIMITED_API", None))
            self._find_libraries(ext)
        elif ext.name == ARRAYS:
            ext.include_dirs += [*_headers(), _numpy_headers()]
        fingerprint = runpy.run_path(str(HERE / "fingerprint.py"))["fingerprint"](HERE)
        ext.define_macros.append(("FFS_SOURCES", f"{fingerprint}u"))
        self._choose_flags(ext)
        super().build_extension(ext)

    def _choose_flags(self, ext: Extension) -> None:
        ext.extra_compile_args += COMPILER_FLAGS
        if self.sanitize or os.environ.get("FFSERVE_BUILD_STRICT"):
            ext.extra_compile_args.append("-Werror")
        # The symbols of libraries inside stay inside: a program may have another zlib.
        symbols = Path(self.build_temp) / "symbols.map"
        symbols.parent.mkdir(parents=True, exist_ok=True)
        symbols.write_text("{ global: PyInit_*; local: *; };\n", encoding="utf-8")
        ext.extra_link_args += ["-pthread", f"-Wl,--version-script={symbols}"]
        if self.sanitize:
            ext.extra_compile_args += [
                f"-fsanitize={self.sanitize}",
                "-g",
                "-O1",
                "-fno-omit-frame-pointer",
            ]
            if self.sanitize == "thread":
                # gcc warns that ThreadSanitizer does not see the fences of the seqlock.
                ext.extra_compile_args.append("-Wno-tsan")
            ext.extra_link_args.append(f"-fsanitize={self.sanitize}")

    def _find_libraries(self, ext: Extension) -> None:
        unwanted = set(filter(None, os.environ.get("FFSERVE_BUILD_WITHOUT", "").split(",")))
        for name, macro, program, ways in TRIALS:
            way = None if macro in unwanted else self._first_that_links(program, ways)
            print(f"ffserve: {name}: {'not found' if way is None else ' '.join(way) or 'found'}")
            if way is not None:
                ext.define_macros.append((macro, "1"))
                ext.extra_link_args += way

    def _first_that_links(
        self, program: str, ways: tuple[tuple[str, ...], ...]
    ) -> tuple[str, ...] | None:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "trial.c")
            source.write_text(program, encoding="utf-8")
            for way in ways:
                try:
                    objects = self.compiler.compile([str(source)], output_dir=folder)
                    # A shared object: a static library that is not PIC would link into a program.
                    self.compiler.link_shared_object(
                        objects,
                        str(Path(folder, "trial.so")),
                        extra_postargs=[*way, "-Wl,--no-undefined"],
                    )
                except (CCompilerError, BaseError):
                    continue
                return way
        return None


class BuildWheel(bdist_wheel):  # type: ignore[misc]
    """bdist_wheel whose wheels name the stable ABI."""

    def finalize_options(self) -> None:
        self.py_limited_api = STABLE_ABI or False
        super().finalize_options()


def _headers() -> list[str]:
    return [str(HERE / room) for room in ROOMS]


def commit_of(checkout: Path, version: str) -> str:
    """Return date and commit of a git checkout, such as "20261128.g24327da", with ".dirty" if files
    differ from the commit; "" for a release, and where git cannot tell."""
    if not (checkout / ".git").exists():
        return ""  # git would ask the directories above
    # Root may build the checkout of another user.
    git = ["git", "-c", "safe.directory=*", "-C", str(checkout)]

    def ask(*words: str) -> str:
        return subprocess.check_output([*git, *words], stderr=subprocess.DEVNULL, text=True).strip()

    try:
        changed = ask("status", "--porcelain", "--untracked-files=no")
        if not changed and f"v{version}" in ask("tag", "--points-at", "HEAD").splitlines():
            return ""
        commit = ask("log", "-1", "--date=format:%Y%m%d", "--format=%cd.g%h")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + ".dirty" * bool(changed)


class EggInfo(egg_info):  # type: ignore[misc]
    """egg_info whose version names the commit; a source distribution has it in its setup.cfg."""

    def finalize_options(self) -> None:
        checkout = Path(os.environ.get("FFSERVE_CHECKOUT") or ROOT)
        if commit := commit_of(checkout, self.distribution.get_version()):
            self.tag_build = f"+{commit}"
        super().finalize_options()


class BuildFiles(build_py):  # type: ignore[misc]
    """build_py that also takes in what stands beside the package (`package-dir`): systemd/, and
    writes the commit into the version."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            path = Path(self.build_lib, "ffserve", "_version.py")
            build = f'BUILD = "{self.get_finalized_command("egg_info").vtags}"'
            text = path.read_text(encoding="utf-8")
            path.write_text(re.sub('^BUILD = ".*"$', build, text, flags=re.M), encoding="utf-8")

    def finalize_options(self) -> None:
        packages = self.distribution.packages
        packages += [name for name in self.distribution.package_dir or () if name not in packages]
        super().finalize_options()


def _numpy_headers() -> str:
    try:
        import numpy
    except ImportError as error:
        raise CompileError(f"numpy's headers are needed: {error}") from error
    return str(numpy.get_include())


def build(target: Path, sanitize: str = "") -> Path:
    """Compile the core into ``target`` (the directory that holds the package ffserve).

    Args:
        target: the source tree, or another directory, to which the Python files are copied.
        sanitize: argument of -fsanitize, or "".
    Returns: path of the compiled module.
    """
    target = target.resolve()
    if target != ROOT:
        shutil.rmtree(target / "ffserve", ignore_errors=True)
        shutil.copytree(
            ROOT / "ffserve",
            target / "ffserve",
            ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.[ch]"),
        )
    modules = [Extension(MODULE, []), Extension(ARRAYS, [], optional=True)]
    distribution = Distribution({"name": "ffserve", "ext_modules": modules})
    command = BuildExt(distribution)
    command.sanitize = sanitize
    command.force = True
    command.build_lib = str(target)
    with tempfile.TemporaryDirectory() as folder:
        command.build_temp = folder
        command.ensure_finalized()
        command.run()
    return Path(command.get_ext_fullpath(MODULE))


def main() -> None:
    """Compile the C core from the command line."""
    parser = argparse.ArgumentParser(description="Compile ffserve's C core.")
    parser.add_argument("-o", "--output", type=Path, default=ROOT, help="directory of the build")
    parser.add_argument("--sanitize", default="", help="address, thread, undefined")
    arguments = parser.parse_args()
    print(build(arguments.output, arguments.sanitize))


if __name__ == "__main__":
    main()
