"""`ffserve stage` and `ffserve warm`: resumed, shared, atomic, checked."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemon import until
from origins import HttpOrigin

from ffserve.cli import run
from ffserve.errors import ReadError, UsageError
from ffserve.store import fetching, staging
from ffserve.store.origin import ObjectVersion
from ffserve.store.staging import Staging, items_of, plan_staging

SIZE = 9 << 20


def noise(seed: int, size: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(size)


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and staging.HIDDEN not in path.parts
    }


def stage(*arguments: str) -> int:
    return run(["stage", *arguments])


@pytest.mark.check
def test_files_are_staged_once_and_again_when_they_changed(
    server: HttpOrigin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.bin", "b.bin", "empty"):
        server.put(name, noise(1, 0 if name == "empty" else SIZE))
    out = tmp_path / "out"
    urls = [f"{server.url}/{name}" for name in ("a.bin", "b.bin", "empty")]
    assert stage(*urls, "-o", str(out)) == 0
    assert files_in(out) == server.files
    assert server.total == 2 * SIZE
    assert os.stat(out / "a.bin").st_mtime == server.times["a.bin"]
    capsys.readouterr()
    assert stage(*urls, "-o", str(out)) == 0
    assert "3 files already there" in capsys.readouterr().out
    assert server.total == 2 * SIZE
    server.put("b.bin", noise(2))
    assert stage("--json", *urls, "-o", str(out)) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [fact["fetched"] for fact in facts] == [False, True, False]
    assert files_in(out) == server.files
    assert server.total == 3 * SIZE


@pytest.mark.stores
def test_runs_at_the_same_time_share_the_work(server: HttpOrigin, tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        server.put(name, noise(1))
    server.rate = 60e6
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "ffserve",
        "stage",
        f"{server.url}/a.bin",
        f"{server.url}/b.bin",
    ]
    runs = [
        subprocess.Popen(
            [*command, "-o", str(out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(3)
    ]
    for one in runs:
        said = one.communicate()[0]
        assert one.returncode == 0, said
    assert files_in(out) == server.files
    assert server.total == 2 * SIZE


@pytest.mark.stores
def test_an_interrupted_run_goes_on_where_it_ended(server: HttpOrigin, tmp_path: Path) -> None:
    url = server.put("a.bin", noise(1, 12 * SIZE))
    server.rate = 40e6
    out = tmp_path / "out"
    first = run_of(url, out=out)
    # A thread asks for a block when it has kept the one before.
    until(lambda: len(server.spans) >= fetching.ORIGIN_THREADS + 4, "four blocks are kept")
    first.kill()
    first.communicate()
    assert not files_in(out), "a file that is not complete has no name"
    server.rate = 0
    until(lambda: not server.answering, "nothing is on its way to it")
    before = server.total
    assert stage(url, "-o", str(out)) == 0
    assert files_in(out) == server.files
    assert server.total - before <= 12 * SIZE - (4 << 22)


def run_of(*urls: str, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ffserve", "stage", *urls, "-o", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.check
def test_two_runs_to_different_directories_fetched_an_object_twice(
    server: HttpOrigin, tmp_path: Path
) -> None:
    url = server.put("a.bin", noise(1))
    server.rate = 20e6
    outs = [tmp_path / "1", tmp_path / "2"]
    for run_ in [run_of(url, out=out) for out in outs]:
        said = run_.communicate()[0]
        assert run_.returncode == 0, said
    assert server.total == SIZE
    assert [files_in(out) for out in outs] == [server.files] * 2
    inodes = {os.stat(out / "a.bin").st_ino for out in outs}
    assert len(inodes) == 2, "who writes to one of them does not change the other"

    server.rate = 0
    for out in outs:  # what was changed is not copied
        (out / "a.bin").write_bytes(noise(2))
    assert stage(url, "-o", str(tmp_path / "3")) == 0
    assert (files_in(tmp_path / "3"), server.total) == (server.files, 2 * SIZE)
    assert stage(url, "-o", str(tmp_path / "4")) == 0
    assert (files_in(tmp_path / "4"), server.total) == (server.files, 2 * SIZE)
    for out in ("3", "4"):
        (tmp_path / out / "a.bin").unlink()
    assert stage(url, "-o", str(tmp_path / "5")) == 0
    assert (files_in(tmp_path / "5"), server.total) == (server.files, 3 * SIZE)
    server.put("a.bin", noise(3))
    assert stage(url, "-o", str(tmp_path / "6")) == 0
    assert files_in(tmp_path / "6") == server.files


@pytest.mark.check
def test_a_run_fetches_what_a_killed_one_has_begun(server: HttpOrigin, tmp_path: Path) -> None:
    url = server.put("a.bin", noise(1, 4 * SIZE))
    server.rate = 20e6
    first = run_of(url, out=tmp_path / "1")
    until(lambda: server.total >= 1 << 20, "the first fetches it")
    second = run_of(url, out=tmp_path / "2")
    time.sleep(0.5)
    first.kill()
    first.communicate()
    server.rate = 0
    said = second.communicate()[0]
    assert second.returncode == 0, said
    assert files_in(tmp_path / "2") == server.files and not files_in(tmp_path / "1")


@pytest.mark.check
def test_ctrl_c_waited_for_whole_files(server: HttpOrigin, tmp_path: Path) -> None:
    """It ends after the pieces that are on their way."""
    urls = [server.put("0.bin", noise(0, 10 * SIZE)), server.put("1.bin", noise(1, 1000))]
    server.held.add("1.bin")
    server.rate = 20e6
    run_ = run_of(*urls, out=tmp_path / "out")
    until(lambda: len(server.spans) >= 2, "it fetches")
    run_.send_signal(signal.SIGINT)
    said = run_.communicate()[0]
    assert run_.returncode == 130 and b"interrupted" in said
    assert not files_in(tmp_path / "out")
    server.rate = 0
    server.held.clear()
    assert stage(*urls, "-o", str(tmp_path / "out")) == 0
    assert files_in(tmp_path / "out") == server.files


def test_names() -> None:
    def named(*names: str) -> list[str]:
        listed = [ObjectVersion(f"s3://b/d/{name}", 1, "", 0) for name in names]
        return [item.name for item in items_of([("s3://b/d/", listed)])]

    assert named("x", "e/x", "line\nbreak", "z" * 255) == ["x", "e/x", "line\nbreak", "z" * 255]
    for wrong in ("../x", "e/../x", "e//x", "z" * 256, ".ffserve-stage/x", "a\0b"):
        with pytest.raises(UsageError, match="no local file can have the name"):
            named(wrong)
    with pytest.raises(UsageError, match="is a file and the directory of another one"):
        named("e", "e/x")
    two = [ObjectVersion(f"s3://b/{name}/x", 1, "", 0) for name in ("one", "two")]
    with pytest.raises(UsageError, match="s3://b/one/x and s3://b/two/x"):
        items_of([("s3://b/*/x", two)])
    with pytest.raises(UsageError, match="not the URL of a remote file"):
        plan_staging(["/data/x"])


def test_local_files_by_url(tmp_path: Path) -> None:
    (tmp_path / "from" / "below").mkdir(parents=True)
    for name in ("a b%.bin", "below/c.bin"):
        (tmp_path / "from" / name).write_bytes(noise(1, 5))
    out = tmp_path / "out"
    assert stage((tmp_path / "from" / "a b%.bin").as_uri(), "-o", str(out)) == 0
    assert files_in(out) == {"a b%.bin": noise(1, 5)}
    assert stage((tmp_path / "from").as_uri(), "-o", str(out)) == 0
    assert files_in(out) == {"a b%.bin": noise(1, 5), "below/c.bin": noise(1, 5)}
    with pytest.raises(UsageError, match="names the host"):
        plan_staging(["file://other/x"])


def test_a_foreign_file_and_a_full_disk(
    server: HttpOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    url, other = server.put("a.bin", noise(1)), server.put("b.bin", b"b")
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.bin").write_text("mine")
    assert stage(url, other, "-o", str(out)) == 2
    assert "was not staged or was changed since" in capsys.readouterr().err
    assert files_in(out) == {"a.bin": b"mine", "b.bin": b"b"}, "the other file was staged"
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: _Full())
    with pytest.raises(ReadError, match="the disk has 5"):
        Staging(str(tmp_path / "new"), plan_staging([url]), lambda _: None)


class _Full:
    free = 5


def test_one_failing_file_does_not_stop_the_others(
    server: HttpOrigin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [server.put(f"{k}.bin", noise(k, 1000)) for k in range(3)]
    items = plan_staging(urls)
    del server.files["1.bin"]
    done = Staging(str(tmp_path / "out"), items, lambda _: None).run()
    assert [each.error is None for each in done] == [True, False, True]
    assert "1.bin: no such file at the origin" in str(done[1].error)
    assert files_in(tmp_path / "out") == server.files


def test_warm(server: HttpOrigin, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = server.put("a.bin", noise(1))
    assert run(["warm", url]) == 0
    assert "9.00 MiB fetched" in capsys.readouterr().out
    assert server.total == SIZE
    assert run(["warm", "--json", url]) == 0
    assert json.loads(capsys.readouterr().out)[0]["fetched_bytes"] == 0
    assert run(["warm", f"{server.url}/none"]) == 2
    assert run(["warm", str(tmp_path)]) == 2
    capsys.readouterr()


@pytest.mark.check
def test_warm_evicts_no_file_for_a_later_one(
    server: HttpOrigin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FFSERVE_STORE_SIZE", "40MiB")
    paths = [server.put(f"{number}.bin", noise(number)) for number in range(8)]
    assert run(["warm", "--json", *paths]) == 1
    facts = json.loads(capsys.readouterr().out)
    fetched = sum(fact["fetched_bytes"] for fact in facts)
    assert fetched == server.total <= 40 << 20
    assert fetched + sum(fact["left_out_bytes"] for fact in facts) == 8 * SIZE
    whole = [fact["url"] for fact in facts if not fact["left_out_bytes"]]
    assert run(["warm", *whole]) == 0
    assert server.total == fetched
