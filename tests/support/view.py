"""Views that are really mounted, by a process of their own, and gone at the end of the test."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ENVIRONMENT
from daemon import DEADLINE_S, until

from ffserve.view import mounting


def needs_fuse() -> None:
    """Skip the test where nothing can be mounted."""
    if not os.path.exists(mounting.DEVICE):
        pytest.skip("no /dev/fuse here")
    if os.geteuid() != 0:
        pytest.skip("only root mounts without a setuid program")


class Mounted:
    """A view that is mounted on `path` by `process`; `log` is what that has written."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self.path = path
        self.process = process
        self._log = log

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def shards(self) -> Path:
        return self.path / "shards"

    def log(self) -> str:
        return self._log.read_text()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the first process; return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def mounted(
    *paths: str | Path, options: tuple[str, ...] = ("--server", "off"), place: Path | None = None,
    program: tuple[str, ...] = (sys.executable, "-W", "error"),
) -> Iterator[Mounted]:  # fmt: skip
    """Mount files with `ffserve mount --foreground`; unmount them in any case.

    Args: place: the mount point, if not a new directory.
    """
    needs_fuse()
    with tempfile.TemporaryDirectory(prefix="ffs-") as directory:
        os.chmod(directory, 0o755)
        path = place or Path(directory) / "view"
        if place is None:
            path.mkdir()
        log = Path(directory) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*program, "-m", "ffserve", "mount", "--foreground", *options, path, *paths],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=ENVIRONMENT,
            )  # fmt: skip
        view = Mounted(path, process, log)
        try:
            until(
                lambda: b", by " in log.read_bytes() or process.poll() is not None, "it is mounted"
            )
            assert process.poll() is None, log.read_text()
            yield view
            assert process.poll() is not None or view.end() == 0, log.read_text()
            assert mounting.find(str(path)) is None, "it is still mounted"
        finally:
            process.kill()
            process.wait(DEADLINE_S)
            clear(path)


def clear(path: Path) -> None:
    """Unmount whatever is left on a path."""
    libc = ctypes.CDLL(None)
    while libc.umount2(os.fsencode(path), 2) == 0:
        pass
