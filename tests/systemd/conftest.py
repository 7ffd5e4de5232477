"""A container with the service for all tests of this folder. Each leaves the service installed and
sound, and the last one, in test_service.py, removes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from service_machine import SETTINGS, SMALL, prepare
from systemd_container import Container, NoSystemd, booted

CHANGES = " ".join(
    f"/{place}/systemd/system/ffserve.{kind}.d"
    for place in ("run", "etc")
    for kind in ("service", "socket")
)
"""Directories of what a test has changed in the units."""


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A container with the service, two users, and a program of another installation for jobs."""
    directory = tmp_path_factory.mktemp("machine")
    directory.chmod(0o755)
    try:
        with booted(directory) as container:
            prepare(container)
            yield container
    except NoSystemd as error:
        pytest.skip(str(error))


@pytest.fixture
def sound(machine: Container) -> Iterator[None]:
    """Begin each test with the units as they were installed, and the socket alone."""
    machine.run("systemctl", "stop", "ffserve.service", "ffserve.socket")
    machine.run("sh", "-c", f"rm -rf {CHANGES}; rm -f /data/scratch/*")
    machine.write(SETTINGS, SMALL)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "reset-failed", "ffserve*")
    machine.run("systemctl", "start", "ffserve.socket")
    yield
