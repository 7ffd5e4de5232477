"""Every module of the package can be imported, on each Python that runs this."""

from __future__ import annotations

import subprocess
import sys

OPTIONAL = {"datasets", "grain", "pyspark", "ray", "tensorflow", "torch"}
"""Modules over a framework are not imported where it is not installed."""

PROGRAM = """
import importlib, pkgutil, ffserve
for module in pkgutil.walk_packages(ffserve.__path__, "ffserve.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except Exception as error:
        print(module.name, getattr(error, "name", None), repr(error), sep="\\t")
    else:
        print(module.name)
"""


def test_nineteen_modules_could_not_be_imported_on_an_older_python() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    imported, failed = [], []
    for line in done.stdout.splitlines():
        module, *error = line.split("\t")
        if not error:
            imported.append(module)
        elif error[0].partition(".")[0] not in OPTIONAL:
            failed.append(line)
    assert not failed
    assert {"ffserve.server.sessions.server", "ffserve.client.daemon.connection"} <= {*imported}
