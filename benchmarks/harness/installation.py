"""Which ffserve a benchmark measures: that of this process, or another checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ffserve.bench import child_processes
from ffserve.errors import ServerUnavailable, UsageError


@dataclass(frozen=True)
class Installation:
    """The ffserve that child processes run.

    Args:
        directory: another checkout, with the C core built in it; its `.venv/bin/python` runs it if
            there is one. None: the ffserve of this process.
        interpreter: runs the ffserve of this process in another environment, whose packages come
            first.
    """

    directory: str | None = None
    interpreter: str | None = None

    def __post_init__(self) -> None:
        if self.directory is not None and not os.path.isfile(
            os.path.join(self.directory, "ffserve", "__init__.py")
        ):
            raise UsageError("this directory is not a checkout of ffserve", path=self.directory)

    @property
    def python(self) -> str:
        """The interpreter."""
        own = os.path.join(self.directory or "", ".venv", "bin", "python")
        if self.directory is not None and os.path.exists(own):
            return own
        return self.interpreter or sys.executable

    def command(self, module: str, packages: Mapping[str, str] | None = None) -> list[str]:
        """Return the command that runs a module with this ffserve.

        Args: packages: for another checkout, packages (name → directory) to take from elsewhere.
        """
        if self.directory is None:
            return child_processes.command(module, self.interpreter)
        program = _IN_CHECKOUT.format(
            directory=os.path.realpath(self.directory), packages=packages or {}, module=module
        )
        return [self.python, "-c", program]

    def status(self, socket: str) -> dict[str, Any]:
        """Return the status of a daemon of this ffserve.

        Raises: ServerUnavailable.
        """
        if self.directory is None:
            from ffserve.client.daemon import connection

            return connection.status(socket)
        command = [*self.command("ffserve"), "status", "--json", "--socket", socket]
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode != 0:
            raise ServerUnavailable(finished.stderr.strip() or "no answer", path=socket)
        facts: dict[str, Any] = json.loads(finished.stdout)
        return facts


THIS = Installation()

# An editable install would find in its own tree whatever the checkout lacks.
_IN_CHECKOUT = """
import importlib.util, os, runpy, sys
sys.path.insert(0, {directory!r})
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
import ffserve
if os.path.dirname(os.path.dirname(ffserve.__file__)) != {directory!r}:
    raise SystemExit("ffserve was imported from " + ffserve.__file__ + ", not from {directory}")
for name, place in {packages!r}.items():
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(place, "__init__.py"), submodule_search_locations=[place])
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
