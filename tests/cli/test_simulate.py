"""`ffserve simulate`: what it says, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ffserve.cli import cli


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["simulate", "--samples", "1500", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_table_for_people() -> None:
    lines = run("--jobs", "2", "--cache", "0.25", "--cache", "0.5").splitlines()
    assert "best possible" in lines[0]
    assert [line.split()[0] for line in lines if "data set" in line] == ["25%", "50%"]


def test_figures_for_scripts() -> None:
    facts = json.loads(run("--cache", "0.5", "--speeds", "1,0.6", "--json"))
    (row,) = facts["rows"]
    assert 0.6 < row["hit_rate"] <= row["belady"] + 0.001
    assert len(row["jobs"]) == 2


@pytest.mark.check
def test_same_seed_and_silent_change_the_hit_rate() -> None:
    def rate(*options: str) -> float:
        facts = json.loads(run("--jobs", "4", "--cache", "0.1", "--json", *options))
        return float(facts["rows"][0]["hit_rate"])

    assert rate("--silent") < rate() < rate("--same-seed")


def test_a_slow_disk_slows_the_jobs() -> None:
    (row,) = json.loads(run("--jobs", "1", "--cache", "0.25", "--disk", "0.5", "--json"))["rows"]
    # Misses are read at half of the rate at which the job would use them.
    assert row["speed"] == pytest.approx(0.5 / row["read_share"], rel=0.08)


@pytest.mark.check
def test_prepared_samples() -> None:
    options = "--jobs", "2", "--cache", "0.5", "--prepare-ms", "2", "--sample-size", "16KiB"
    (row,) = json.loads(run(*options, "--json"))["rows"]
    assert 0.5 < row["shared_rate"] <= row["belady"] + 0.001
    assert "found prepared" in run(*options, "--prepared-size", "32KiB").splitlines()[0]
    done = CliRunner().invoke(cli, ["simulate", "--prepared-size", "32KiB"])
    assert done.exit_code == 2 and "--prepare-ms" in done.output


def test_invalid_numbers_are_refused() -> None:
    for option, value in (
        ("--speeds", "fast"), ("--speeds", "0"), ("--speeds", "1,,2"), ("--speeds", "1,2,3"),
        ("--cache", "nan"), ("--disk", "nan"),
    ):  # fmt: skip
        done = CliRunner().invoke(cli, ["simulate", option, value])
        assert done.exit_code == 2 and value in done.output


@pytest.mark.check
def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    from matplotlib.image import imread

    run("--cache", "0.5", "--cache", "0.2", "--plot", str(tmp_path / "p.png"))
    picture = imread(tmp_path / "p.png")
    assert min(picture.shape[:2]) > 300
    # matplotlib's first colour is that of the curve.
    blue = np.abs(picture[..., :3] - np.array([31, 119, 180]) / 255).max(axis=-1) < 0.02
    assert blue.sum() > 100
    run("--cache", "0.5", "--plot", str(tmp_path / "p.svg"))
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


def test_an_invalid_plot_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(plot: Path) -> str:
        done = CliRunner().invoke(cli, ["simulate", "--samples", "5000000", "--plot", str(plot)])
        assert done.exit_code == 2 and not plot.exists()
        return done.output

    if importlib.util.find_spec("matplotlib") is not None:
        assert "hits.png" in refused(tmp_path / "p.xyz")
        assert "missing directory" in refused(tmp_path / "nowhere" / "p.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "ffserve[plot]" in refused(tmp_path / "p.png")
