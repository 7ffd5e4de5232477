"""Members of a cache network: `deploy/cache-network` as it is, several on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from daemon import until
from store_servers import free_port

PROGRAM = Path(__file__).parents[2] / "deploy/cache-network/cache-network"


class Member:
    """One member. place: its directory, which is short: a socket is in it."""

    def __init__(self, place: Path, settings: dict[str, str]) -> None:
        self.place, self.settings = place, settings
        self.socket = str(place / "run/cache.sock")
        self.process: subprocess.Popen[bytes] | None = None
        self.log = place / "log"
        place.mkdir(exist_ok=True)

    def start(self) -> Member:
        """Start it, and wait until it listens."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["/bin/sh", str(PROGRAM), "run"], env={**os.environ, **self.settings},
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        until(self._listens, "the member listens")
        return self

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        with socket.socket(socket.AF_UNIX) as attempt:
            return attempt.connect_ex(self.socket) == 0

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it with all its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, number)
            self.process.wait(20)
            self.process = None


def certificates(place: Path, names: Sequence[str] = ("127.0.0.1",)) -> dict[str, str]:
    """Make an authority and certificates; return the settings that name them."""
    subprocess.run(["/bin/sh", str(PROGRAM), "certificates", str(place), *names], check=True)
    parts = {"CERTIFICATE": f"{names[0]}.pem", "KEY": f"{names[0]}.key"}
    return {
        name: str(place / text) for name, text in (parts | {"AUTHORITY": "authority.pem"}).items()
    }


@contextmanager
def members(place: Path, count: int, **settings: str) -> Iterator[list[Member]]:
    """Run members on loopback, which may ask origins there."""
    ports = [free_port() for _ in range(count)]
    common = {
        "ORIGINS": "127.0.0.1",
        "MEMBERS": " ".join(f"127.0.0.1:{port}" for port in ports),
        "SIZE": "1g",
        "WORKERS": "1",
        **certificates(place / "certificates"),
        **settings,
    }
    found = []
    try:
        for k, port in enumerate(ports):
            at = place / str(k)
            own = {
                "RUN": str(at / "run"),
                "CACHE": str(at / "cache"),
                "LISTEN": f"127.0.0.1:{port}",
            }
            found.append(Member(at, {**common, **own}).start())
        yield found
    finally:
        for member in found:
            member.end()
