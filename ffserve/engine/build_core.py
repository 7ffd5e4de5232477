"""How the C core is compiled: for pip, in place, or with a sanitizer.

pip reaches ``BuildExt`` through pyproject.toml (``tool.setuptools.cmdclass``) and loads this file
alone, not the package, so nothing of ffserve may be imported here. What the machine has is found
by building something small against it; whatever is missing is left out, and the engine with it:
without liburing there is Linux AIO, without that threads, without ISA-L tables.

Run as a program it builds a copy of the package outside of any installation::

    python -m ffserve.engine.build_core                     # into the source tree
    python -m ffserve.engine.build_core --sanitize address -o build/asan
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import sysconfig
import tempfile
from pathlib import Path

import cffi  # type: ignore[import-untyped]
from setuptools import Distribution, Extension  # type: ignore[import-untyped]
from setuptools.command.build_ext import build_ext  # type: ignore[import-untyped]
from setuptools.errors import BaseError, CCompilerError  # type: ignore[import-untyped]

MODULE = "ffserve.engine._core"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCES = (
    "core.c",
    "answers.c",
    "life.c",
    "op.c",
    "uring.c",
    "buffers.c",
    "aio.c",
    "threads.c",
    "shared.c",
    "hazards.c",
    "copy.c",
    "checksum.c",
    "frames.c",
    "chunks.c",
    "blocks.c",
    "slots.c",
    "residents.c",
    "plan.c",
    "orders.c",
    "sending.c",
)
HEADERS = ("core.h", "plan.h")
"""The headers that Python sees, in the order in which they declare."""
WARNINGS = ["-std=gnu11", "-Wall", "-Wextra", "-pthread"]

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
unsigned trial(unsigned char *p) { return crc32_gzip_refl(0, p, 1) + crc32_iscsi(p, 1, 0); }
"""
TRIALS: tuple[tuple[str, str, str, tuple[tuple[str, ...], ...]], ...] = (
    # what, macro, program, ways to link it (the first that works is taken)
    ("io_uring", "FFS_HAVE_URING", LIBURING_TRIAL, (("-l:liburing.a",), ("-luring",))),
    ("Linux AIO", "FFS_HAVE_AIO", AIO_TRIAL, ((),)),
    ("ISA-L", "FFS_HAVE_ISAL", ISAL_TRIAL, (("-l:libisal.a",), ("-lisal",))),
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
    fingerprint = runpy.run_path(str(HERE / "sources.py"))["fingerprint"](HERE)
    builder.cdef(declarations() + "#define FFS_SOURCES ...\n")
    includes = "".join(f'#include "{name}"\n' for name in HEADERS)
    builder.set_source(MODULE, f"{includes}#define FFS_SOURCES {fingerprint}u")
    target.parent.mkdir(parents=True, exist_ok=True)
    builder.emit_c_code(str(target))


class BuildExt(build_ext):  # type: ignore[misc]
    """build_ext that generates the cffi module and looks for the optional libraries."""

    sanitize: str = ""

    def build_extension(self, ext: Extension) -> None:
        if ext.name == MODULE:
            generated = Path(self.build_temp) / "_core.c"
            emit(generated)
            ext.sources = [str(generated), *(os.path.relpath(HERE / name) for name in SOURCES)]
            ext.include_dirs.append(str(HERE))
            ext.extra_compile_args += WARNINGS
            ext.extra_link_args.append("-pthread")
            if self.sanitize:
                ext.extra_compile_args += [
                    f"-fsanitize={self.sanitize}",
                    "-g",
                    "-O1",
                    "-fno-omit-frame-pointer",
                ]
                ext.extra_link_args.append(f"-fsanitize={self.sanitize}")
            self._find_libraries(ext)
        super().build_extension(ext)

    def _find_libraries(self, ext: Extension) -> None:
        unwanted = set(filter(None, os.environ.get("FFSERVE_BUILD_WITHOUT", "").split(",")))
        for what, macro, program, ways in TRIALS:
            way = None if macro in unwanted else self._first_that_links(program, ways)
            print(f"ffserve: {what}: {'not found' if way is None else ' '.join(way) or 'found'}")
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
                    # A shared object, since a static library that is not PIC links only without.
                    self.compiler.link_shared_object(
                        objects,
                        str(Path(folder, "trial.so")),
                        extra_postargs=[*way, "-Wl,--no-undefined"],
                    )
                except (CCompilerError, BaseError):
                    continue
                return way
        return None


def build(target: Path, sanitize: str = "") -> Path:
    """Compile the core into ``target`` (the directory that holds the package ffserve).

    Args:
        target: the source tree, or any other directory: the package's Python files are copied.
        sanitize: what -fsanitize gets, or nothing.
    Returns: the compiled module's path.
    """
    target = target.resolve()
    if target != ROOT:
        shutil.rmtree(target / "ffserve", ignore_errors=True)
        shutil.copytree(
            ROOT / "ffserve",
            target / "ffserve",
            ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.[ch]"),
        )
    distribution = Distribution({"name": "ffserve", "ext_modules": [Extension(MODULE, [])]})
    command = BuildExt(distribution)
    command.sanitize = sanitize
    command.force = True
    command.build_lib = str(target)
    with tempfile.TemporaryDirectory() as folder:
        command.build_temp = folder
        command.ensure_finalized()
        command.run()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return target / "ffserve" / "engine" / f"_core{suffix}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile ffserve's C core.")
    parser.add_argument("-o", "--output", type=Path, default=ROOT, help="where to build")
    parser.add_argument("--sanitize", default="", help="address, thread, undefined")
    arguments = parser.parse_args()
    print(build(arguments.output, arguments.sanitize))


if __name__ == "__main__":
    main()
