"""The systemd units: valid, and consistent with each other and with the daemon."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ffserve.cli.daemon import service

analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the units as they are installed, for the program of this environment."""
    folder = tmp_path_factory.mktemp("units")
    for name, text in service.units(str(Path(sys.prefix) / "bin" / "ffserve")):
        (folder / name).write_text(text)
    return folder


def read_unit(path: Path) -> dict[str, dict[str, str]]:
    # Not strict: a key may occur twice, as SystemCallFilter does. The last one is returned.
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(path)
    return {section: dict(parser[section]) for section in parser.sections()}


@analyze
def test_systemd_reports_no_problem(units: Path) -> None:
    # Unknown keys are reported on standard error only.
    shutil.copy(units / "ffserve@.service", units / "ffserve@fast.service")
    shutil.copy(units / "ffserve@.socket", units / "ffserve@fast.socket")
    shutil.copy(units / "ffserve-mount@.service", units / "ffserve-mount@photos.service")
    names = (
        "ffserve.socket", "ffserve.service", "ffserve@fast.socket", "ffserve@fast.service",
        "ffserve-mount@photos.service",
    )  # fmt: skip
    done = subprocess.run(
        [
            "systemd-analyze", "verify", "--recursive-errors=no", "--man=no",
            *(str(units / name) for name in names),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    if "Failed to" in done.stderr and "ffserve" not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert done.stderr == ""
    assert done.returncode == 0


@analyze
@pytest.mark.parametrize("name", ["ffserve.service", "ffserve@.service"])
def test_the_service_is_hardly_exposed(name: str, units: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=10", units / name],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip(f"systemd is too old: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr  # a threshold of 10 is an exposure of 1


@pytest.mark.parametrize("instance", ["", "@fast"])
def test_service_and_socket_belong_together(instance: str, units: Path) -> None:
    name = instance.removeprefix("@") or "ffserve"
    template = "@" if instance else ""

    def unit(kind: str) -> dict[str, dict[str, str]]:
        text = (units / f"ffserve{template}.{kind}").read_text().replace("%i", name)
        path = units / "one"
        path.write_text(text)
        return read_unit(path)

    daemon, socket = unit("service"), unit("socket")
    assert daemon["Service"]["Type"] == "notify"
    assert daemon["Unit"]["Requires"] == f"ffserve{instance}.socket"
    assert daemon["Install"]["Also"] == f"ffserve{instance}.socket"
    assert socket["Socket"]["ListenStream"] == f"/run/ffserve/{name}.sock"
    assert daemon["Service"]["Environment"] == f"FFSERVE_SOCKET=/run/ffserve/{name}.sock"
    assert f"--config /etc/ffserve/{name}.toml" in daemon["Service"]["ExecStart"]
    assert socket["Socket"]["SocketMode"] == "0660"
    assert daemon["Service"]["KillSignal"] == "SIGTERM"
    end = "-fast" if instance else ""
    assert daemon["Service"]["CacheDirectory"] == f"ffserve{end}"
    # If a group of that name exists, but no user, systemd fails with 217/USER.
    assert daemon["Service"]["DynamicUser"] == "yes"
    assert daemon["Service"]["User"] == f"ffserved{end}" != socket["Socket"]["SocketGroup"]


def test_the_stop_timeout_exceeds_the_drain_timeout(units: Path) -> None:
    from ffserve.config import ServerConfig

    timeout_s = int(read_unit(units / "ffserve.service")["Service"]["TimeoutStopSec"])
    assert timeout_s > ServerConfig().drain_timeout_s


def test_every_hardening_line_is_explained(units: Path) -> None:
    paragraphs = re.split(r"\n(?=#|\n)", (units / "ffserve.service").read_text())
    unexplained = [
        line
        for paragraph in paragraphs
        if not paragraph.lstrip().startswith("#")
        for line in paragraph.splitlines()
        if re.match(r"(Protect|Private|Restrict|Lock|NoNew|System|Capab|Ambient|Memory)", line)
    ]
    assert unexplained == []
