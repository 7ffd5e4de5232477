"""The systemd units: valid, and consistent with each other and with the daemon."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "systemd"


def read_unit(name: str) -> dict[str, dict[str, str]]:
    # Not strict: a key may occur twice, as SystemCallFilter does. The last one is returned.
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNITS / name)
    return {section: dict(parser[section]) for section in parser.sections()}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_reports_no_problem(tmp_path: Path) -> None:
    # Unknown keys are reported on standard error only. The program of the unit is not installed
    # where tests run, so it is replaced by this interpreter.
    for name in ("ffserve.service", "ffserve.socket"):
        text = (UNITS / name).read_text()
        (tmp_path / name).write_text(text.replace("/opt/ffserve/bin/ffserve", sys.executable))
    done = subprocess.run(
        [
            "systemd-analyze", "verify", "--recursive-errors=no", "--man=no",
            str(tmp_path / "ffserve.socket"), str(tmp_path / "ffserve.service"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    if "Failed to" in done.stderr and "ffserve" not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert done.stderr == ""
    assert done.returncode == 0


def test_service_and_socket_belong_together() -> None:
    service, socket = read_unit("ffserve.service"), read_unit("ffserve.socket")
    assert service["Service"]["Type"] == "notify"
    assert service["Unit"]["Requires"] == "ffserve.socket"
    assert socket["Socket"]["ListenStream"] == "/run/ffserve/ffserve.sock"
    assert service["Service"]["Environment"] == "FFSERVE_SOCKET=/run/ffserve/ffserve.sock"
    assert socket["Socket"]["SocketMode"] == "0660"
    assert service["Service"]["KillSignal"] == "SIGTERM"


def test_the_user_and_the_group_have_different_names() -> None:
    # If a group of that name exists, but no user, systemd fails with 217/USER.
    service, socket = read_unit("ffserve.service"), read_unit("ffserve.socket")
    assert service["Service"]["DynamicUser"] == "yes"
    assert service["Service"]["User"] not in ("ffserve", socket["Socket"]["SocketGroup"])


def test_the_stop_timeout_exceeds_the_drain_timeout() -> None:
    from ffserve.config import ServerConfig

    timeout_s = int(read_unit("ffserve.service")["Service"]["TimeoutStopSec"])
    assert timeout_s > ServerConfig().drain_timeout_s


def test_every_hardening_line_is_explained() -> None:
    paragraphs = re.split(r"\n(?=#|\n)", (UNITS / "ffserve.service").read_text())
    unexplained = [
        line
        for paragraph in paragraphs
        if not paragraph.lstrip().startswith("#")
        for line in paragraph.splitlines()
        if re.match(r"(Protect|Private|Restrict|Lock|NoNew|System|Capab|Ambient|Memory)", line)
    ]
    assert unexplained == []
