"""Scrubbing: damage is found while nobody asks for it, at a limited rate, and only then."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, sample, serving, until, write

from ffserve.cli.files.verify import check_files

SIZE, COUNT, BAD = 20_000, 120, 77
SAMPLES = [sample(index, [SIZE]) for index in range(COUNT)]
FORMATS = ("ffr", "recordio", "tfrecord")
SOON = "from ffserve.server.files import scrub; scrub.IDLE_S = scrub.LOOK_S = 0.3"
"""Makes the daemon begin earlier."""


@pytest.fixture
def damaged(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A file with a damaged sample."""
    path = write(tmp_path / f"data.{getattr(request, 'param', 'ffr')}", SAMPLES)
    place = Path(path).read_bytes().index(SAMPLES[BAD][100:1100])
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(bytes([SAMPLES[BAD][100] ^ 1]))
    return path


def scrubbed(daemon: Daemon) -> dict[str, Any]:
    """Return what status says of scrubbing, and of the only file."""
    facts = daemon.status()
    (shard,) = facts["shards"]
    return {**facts["scrub"], "damaged": shard["damaged"]}


@pytest.mark.check
@pytest.mark.parametrize("damaged", FORMATS, indirect=True)
def test_an_idle_daemon_finds_damage(damaged: str) -> None:
    with serving(options=["--scrub-rate", "100MiB"], patch=SOON) as daemon, daemon.open(damaged):
        until(lambda: scrubbed(daemon)["passes"], "all is read")
        found = scrubbed(daemon)
        assert found["damaged"] >= 1 and found["size"] >= COUNT * SIZE
        assert f"{damaged}" in daemon.text() and "damaged sample" in daemon.text()
        assert daemon.cache()["asked"] == 0


@pytest.mark.check
def test_it_keeps_to_its_rate_and_ends_with_the_setting(damaged: str) -> None:
    with serving(patch=SOON) as daemon, daemon.open(damaged):
        time.sleep(1)
        assert scrubbed(daemon) == {"rate": 0, "size": 0, "passes": 0, "damaged": 0}
    with serving(options=["--scrub-rate", "1MiB"], patch=SOON) as daemon:
        begun = time.monotonic()
        with daemon.open(damaged):
            until(lambda: scrubbed(daemon)["passes"], "all is read")
        # The pauses after all but the last piece, of at most one MiB.
        assert time.monotonic() - begun > COUNT * SIZE / (1 << 20) - 1


@pytest.mark.check
def test_it_pauses_while_there_are_requests(damaged: str) -> None:
    patch = "from ffserve.server.files import scrub; scrub.IDLE_S, scrub.LOOK_S = 1.0, 0.1"
    with (
        serving(arena="1MiB", options=["--scrub-rate", "100MiB"], patch=patch) as daemon,
        daemon.open(damaged) as reader,
    ):
        found, moments = [], [time.monotonic()]
        for _ in range(2):  # before the first request it may have read something
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                reader.read(range(60))  # more than the arena holds
                moments.append(time.monotonic())
            found.append(scrubbed(daemon))
            moments.append(time.monotonic())
        # Unless this process itself was held up for so long.
        assert found[0] == found[1] or np.diff(moments).max() > 0.4, (found, moments)
        passes = found[1]["passes"]
        until(lambda: scrubbed(daemon)["passes"] > passes, "all is read")
        assert scrubbed(daemon)["damaged"] == 1


def run_scrub(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit code and its output."""
    command = [sys.executable, "-m", "ffserve", "scrub", "--json", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.returncode, json.loads(run.stdout)


@pytest.mark.check
def test_the_command_reads_what_the_daemon_has_open(damaged: str) -> None:
    with serving() as daemon, daemon.open(damaged):
        code, facts = run_scrub("--socket", daemon.socket, "--rate", "1GiB")
        assert code == 1 and [each["index"] for each in facts["damaged"]] == [BAD]


def test_the_command_keeps_to_its_rate(damaged: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    code, facts = run_scrub("--socket", str(tmp_path / "none"), "--rate", "2MiB", damaged)
    assert code == 1 and facts["samples"] == COUNT
    assert time.monotonic() - begun > COUNT * SIZE / (2 << 20)


@pytest.mark.parametrize("damaged", ["tfrecord"], indirect=True)
def test_the_scan_of_a_file_without_tables_counts_as_reading(damaged: str) -> None:
    sizes: list[int] = []
    assert check_files([damaged], 1, None, "scrubbing", True, sizes.append) == 1
    assert sum(sizes) >= 2 * COUNT * SIZE
