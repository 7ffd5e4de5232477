"""A server of another package as a process beside a test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from store_servers import wait_for


@contextmanager
def running(
    command: Sequence[object], port: int | None, output: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, from when it listens on its port (None: at once); its output goes to a file."""
    with output.open("ab") as log:
        server = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
    try:
        if port is not None:
            wait_for(port, server)
        yield server
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
