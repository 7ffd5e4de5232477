"""`ffserve warm` with a daemon: into its store and its memory."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, serving, started
from origins import HttpOrigin, http_origin
from store_servers import reading_daemon, small_store, written

import ffserve
from ffserve.cli import run


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_store(tmp_path, monkeypatch)


@pytest.fixture
def origin() -> Iterator[HttpOrigin]:
    with http_origin() as running:
        yield running


def warmed(daemon: Daemon, *arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert run(["warm", "--socket", daemon.socket, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.check
def test_remote_files_are_in_store_and_memory(
    origin: HttpOrigin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, samples = written(tmp_path, "a.ffr", 1)
    url = origin.put("a.ffr", path.read_bytes())
    size, payload = path.stat().st_size, sum(map(len, samples))
    with started(reading_daemon(tmp_path)) as daemon:
        for _ in range(2):
            (row,) = warmed(daemon, url, capsys=capsys)
            assert row["url"] == url and row["size_bytes"] == size
            assert row["in_memory_bytes"] >= payload
        assert origin.total == size == daemon.status()["store"]["fetched"]
        before = daemon.status()["cache"]["blocks_read"]
        with daemon.open(url) as reader:
            assert [bytes(s) for s in reader.read(range(300))] == samples
        assert daemon.status()["cache"]["blocks_read"] == before
        assert run(["warm", "--socket", daemon.socket, url]) == 0
        assert "in the store" in capsys.readouterr().out
        assert run(["warm", "--socket", daemon.socket, f"{origin.url}/none.ffr"]) == 2
        capsys.readouterr()


def test_local_files_are_in_memory_as_far_as_they_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, samples = written(tmp_path, "a.ffr", 1)
    large = tmp_path / "large.ffr"
    with ffserve.create(large) as writer:
        for k in range(400):
            writer.write(random.Random(k).randbytes(64_000))
    with serving(arena="16MiB") as daemon:
        (row,) = warmed(daemon, str(path), capsys=capsys)
        assert row["in_memory_bytes"] >= sum(map(len, samples))
        (row,) = warmed(daemon, str(large), capsys=capsys)
        assert 8 << 20 < row["in_memory_bytes"] <= 16 << 20
        assert row["size_bytes"] == large.stat().st_size


def test_what_needs_a_daemon_says_so(
    origin: HttpOrigin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = written(tmp_path, "a.ffr", 1)
    url = origin.put("a.ffr", path.read_bytes())
    nobody = str(tmp_path / "nobody")
    for given in (str(path), url):
        assert run(["warm", "--socket", nobody, given]) == 3
    with serving() as daemon:  # it has no store
        assert run(["warm", "--socket", daemon.socket, url]) == 0
        assert "fetched" in capsys.readouterr().out
        assert origin.total == path.stat().st_size
