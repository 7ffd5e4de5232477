"""`ffserve bench`: this machine's ceilings, and the user's own files."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ffserve
from ffserve.bench.rows import Comparison

ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "error"}
SMALL = ("--size", "1MiB", "--seconds", "0.02", "--turns", "1")


def command(
    *arguments: str | Path, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "ffserve", "bench", *map(str, arguments)],
        capture_output=True, text=True, timeout=100, env={**ENVIRONMENT, **environment},
    )  # fmt: skip
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.check
def test_it_measures_and_leaves_nothing(tmp_path: Path) -> None:
    only = ("hot/4KiB/batch256/clients1/read_batch", "cold/100KiB/depth128/in_flight")
    done = command("--dir", tmp_path, *SMALL, *(word for name in only for word in ("--only", name)))
    assert "hot, 4KiB, batches of 256, 1 client; 1.00 is memcpy" in done.stdout
    assert "limits are reached." in done.stdout or "no fio" in done.stdout
    assert "cold, 100KiB" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.check
def test_a_users_files_are_read_and_not_touched(tmp_path: Path) -> None:
    path, work = tmp_path / "mine.ffr", tmp_path / "work"
    work.mkdir()
    with ffserve.create(path) as writer:
        for size in range(1, 600):
            writer.write(bytes(size))
    path.chmod(0o400)
    before = path.read_bytes(), path.stat().st_mtime_ns
    only = ("--only", "depth64", "--only", "clients1/read_batch")
    done = command(path, "--dir", work, *SMALL, *only, "--json")
    result = json.loads(done.stdout)
    names = [row["name"] for row in result["rows"]]
    assert names == [
        "hot/files/batch256/clients1/read_batch",
        "cold/files/depth64/batch64",
    ]
    assert all(row["value"] > 0 and row["bytes"] == 300 for row in result["rows"])
    assert result["machine"]["cores"] >= 1 and str(tmp_path) not in json.dumps(result["machine"])
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert list(work.iterdir()) == []


@pytest.mark.check
def test_without_fio_the_disk_is_compared_but_not_judged(tmp_path: Path) -> None:
    done = command(
        "--dir", tmp_path, *SMALL, "--only", "cold/4KiB/depth64", "--json", PATH=str(tmp_path)
    )
    result = json.loads(done.stdout)
    [row] = result["rows"]
    assert row["reached"] is None and "no fio" in row["yardstick"] and row["value"] > 0
    assert any("apt-get install fio" in note for note in result["notes"])


@pytest.mark.check
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--only", "nothing"), 2, "--list"),
        (("--size", "4KiB"), 2, "1 MiB"),
        (("--size", "much"), 2, "much"),
        (("/no/such/file.ffr",), 2, "/no/such/file.ffr"),
        (("--dir", "/no/such/directory"), 2, "/no/such/directory: cannot write"),
        (("--seconds", "nan"), 2, "nan"),
        (("--peers",), 2, "python -m benchmarks"),
    ],
)
def test_invalid_options_and_files_are_named(arguments: Any, code: int, words: str) -> None:
    assert words in command(*arguments, code=code).stderr


def test_the_rows_can_be_listed() -> None:
    names = command("--list").stdout.splitlines()
    assert "cold/4KiB/depth128/in_flight" in names and "hot/100KiB/batch256/clients1/read" in names
    assert len(names) == len(set(names))


def test_a_row_is_the_median_of_the_ratios_of_the_turns() -> None:
    ceiling, own = iter([100.0, 100.0, 200.0]), iter([50.0, 90.0, 80.0])
    compared = Comparison(
        name="hot/x", title="", limits={"a": 0.5, "b": None}, ceiling="a ceiling",
        is_substitute=False, ceiling_rate=lambda: next(ceiling),
        ways=lambda: contextlib.nullcontext({"a": lambda: next(own)}),
    )  # fmt: skip
    [row] = compared.measure(3, compared.row_names(["/a"]))
    assert row["value"] == pytest.approx(0.5)
    assert (row["low"], row["high"], row["turns"]) == (0.4, 0.9, 3)
    assert row["reached"] is True
    assert row["yardstick_mb_s"] == pytest.approx(100e-6)
