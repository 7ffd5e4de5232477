"""Staged directories: commits that fail, are killed, or meet one another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ffserve.arrow.staged_output import Mode, OutputJob, StagedFile, job_of
from ffserve.errors import FFServeError, MissingFile, ReadError, UsageError
from ffserve.store.public import RemoteDirectory


def begin(target: Path, mode: Mode = "append") -> OutputJob:
    return OutputJob.begin(str(target), mode, pid=os.getpid())


def stage(job: OutputJob, *places: str) -> list[StagedFile]:
    attempt = job.attempt()
    staged = []
    for place in places:
        directory, name = os.path.split(place)
        Path(attempt.path(directory, name)).write_text(place)
        staged.append(StagedFile(attempt.name, directory, name, 1))
    return staged


def tree(target: Path) -> list[str]:
    return sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())


def put(target: Path, *places: str, mode: Mode = "append") -> None:
    job = begin(target, mode)
    job.commit(stage(job, *places))


def test_modes(tmp_path: Path) -> None:
    target = tmp_path / "out"
    put(target, "k=1/a", "k=2/a", mode="error")
    assert tree(target) == ["_SUCCESS", "k=1/a", "k=2/a"]
    put(target, "k=2/b")
    assert tree(target) == ["_SUCCESS", "k=1/a", "k=2/a", "k=2/b"]
    put(target, "k=2/c", "k=3/c", mode="dynamic")
    assert tree(target) == ["_SUCCESS", "k=1/a", "k=2/c", "k=3/c"]
    put(target, "k=4/d", mode="overwrite")
    assert tree(target) == ["_SUCCESS", "k=4/d"]
    assert sorted(os.listdir(target)) == ["_SUCCESS", "k=4"]
    with pytest.raises(UsageError, match="not empty"):
        begin(target, "error")


def test_of_two_attempts_of_a_task_only_the_chosen_one_counts(tmp_path: Path) -> None:
    job = begin(tmp_path / "out")
    stage(job, "k=1/a", "k=2/only-here")
    job.commit(stage(job, "k=1/a"))
    assert tree(tmp_path / "out") == ["_SUCCESS", "k=1/a"]


def test_two_jobs_that_both_want_a_new_directory(tmp_path: Path) -> None:
    one, two = begin(tmp_path / "out", "error"), begin(tmp_path / "out", "error")
    one.commit(stage(one, "a"))
    staged = stage(two, "b")
    with pytest.raises(UsageError, match="not empty"):
        two.commit(staged)
    two.discard()
    assert tree(tmp_path / "out") == ["_SUCCESS", "a"]


def test_a_task_of_an_aborted_job_cannot_bring_it_back(tmp_path: Path) -> None:
    job = begin(tmp_path / "out")
    attempt = job.attempt()
    job.discard()
    assert not (tmp_path / "out").exists()
    with pytest.raises(ReadError):
        attempt.path("k=1", "a")
    with pytest.raises(ReadError):
        job.attempt()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", ["append", "overwrite", "dynamic"])
def test_a_commit_that_fails_changes_nothing(tmp_path: Path, mode: Mode) -> None:
    target = tmp_path / "out"
    put(target, "k=1/a", "k=2/a")
    before = tree(target)
    job = begin(target, mode)
    staged = stage(job, "k=1/b", "k=3/b", "k=4/b")
    os.unlink(os.path.join(job.root, staged[-1].attempt, "k=4/b"))
    with pytest.raises(ReadError):
        job.commit(staged)
    job.discard()
    assert tree(target) == before
    assert sorted(os.listdir(target)) == ["_SUCCESS", "k=1", "k=2"]


KILLED = """
import os, signal, sys
from ffserve.arrow import staged_output
sys.path[:0] = [sys.argv[3]]
from test_staging import begin, stage
from pathlib import Path
job = begin(Path(sys.argv[1]), sys.argv[2])
staged = stage(job, "k=1/b", "k=3/b", "k=4/b")
left, rename = int(sys.argv[4]), os.rename
def dying(*names):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    rename(*names)
os.rename = dying
job.commit(staged)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_directory_by_a_link_was_lost_with_a_commit_that_failed(tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "out", tmp_path / "k"
    put(target, "k=1/a")
    os.rename(target / "k=1", elsewhere)
    os.symlink(elsewhere, target / "k=1")
    job = begin(target, "overwrite")
    staged = stage(job, "k=1/b", "k=2/b")
    os.unlink(os.path.join(job.root, staged[-1].attempt, "k=2/b"))
    with pytest.raises(ReadError):
        job.commit(staged)
    job.discard()
    assert os.readlink(target / "k=1") == str(elsewhere) and os.listdir(elsewhere) == ["a"]


@pytest.mark.check
@pytest.mark.parametrize("mode", ["append", "overwrite", "dynamic"])
@pytest.mark.parametrize("renames", [0, 1, 2, 4])
def test_the_next_job_undoes_a_commit_whose_process_was_killed(
    tmp_path: Path, mode: Mode, renames: int
) -> None:
    target = tmp_path / "out"
    put(target, "k=1/a", "k=2/a")
    before = tree(target)
    command = [sys.executable, "-c", KILLED, str(target), mode, os.path.dirname(__file__)]
    done = subprocess.run([*command, str(renames)])
    assert done.returncode == -signal.SIGKILL
    if "_temporary" not in os.listdir(target):  # it had fewer renames
        assert mode != "overwrite" and renames == 4
        return
    job = begin(target)
    assert [name for name in tree(target) if not name.startswith("_temporary")] == before
    job.discard()
    assert tree(target) == before
    assert sorted(os.listdir(target)) == ["_SUCCESS", "k=1", "k=2"]


def test_a_process_that_was_killed_while_it_wrote_its_plan_blocked_the_directory(
    tmp_path: Path,
) -> None:
    target = tmp_path / "out"
    put(target, "k=1/a")
    writes = KILLED.replace(
        "job.commit",
        """
def begun(path, *options, **more):
    file = open(path, *options, **more)
    if path.endswith("commit.json"):
        os.kill(os.getpid(), signal.SIGKILL)
    return file
staged_output.open = begun
job.commit""",
        1,
    )
    command = [sys.executable, "-c", writes, str(target), "append", os.path.dirname(__file__), "9"]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert any(name.endswith("commit.json") for name in tree(target))
    put(target, "k=1/b")
    assert tree(target) == ["_SUCCESS", "k=1/a", "k=1/b"]
    assert "_temporary" not in os.listdir(target)


def test_jobs_of_living_processes_and_of_other_machines_stay(tmp_path: Path) -> None:
    target = tmp_path / "out"
    mine, theirs = begin(target), begin(target)
    owner = Path(theirs.root, "owner.json")
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "host": "elsewhere"}))
    put(target, "a")
    assert os.path.isdir(mine.root) and os.path.isdir(theirs.root)
    Path(theirs.root, "commit.json").write_text(json.dumps({"new": ["a"], "mode": "append"}))
    with pytest.raises(ReadError, match=r"'elsewhere' was interrupted.*remove its owner\.json"):
        begin(target)
    owner.unlink()
    mine.discard()
    begin(target).discard()
    assert tree(target) == ["_SUCCESS"]  # the file of the interrupted job is gone


def test_many_jobs_at_once(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda k: put(target, f"k={k % 5}/{k}"), range(200)))
    assert tree(target) == sorted(["_SUCCESS", *(f"k={k % 5}/{k}" for k in range(200))])
    assert "_temporary" not in os.listdir(target)


def test_a_dead_process_whose_parent_has_not_noticed_is_dead(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        job = OutputJob.begin(str(target), "append", pid=process.pid)
        begin(target).discard()
        assert os.path.isdir(job.root)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        put(target, "a")
        assert sorted(os.listdir(target)) == ["_SUCCESS", "a"]


# ---- at an origin --------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a new directory: of an object store, which has no rename, and of one with directories."""
    pytest.importorskip("fsspec")
    return f"{request.param}://{tmp_path}/out"


def begin_at(url: str, mode: Mode = "append") -> OutputJob:
    return job_of(url).begin(url, mode, pid=os.getpid())


def stage_at(job: OutputJob, *places: str) -> list[StagedFile]:
    attempt = job.attempt()
    staged = []
    for place in places:
        directory, name = os.path.split(place)
        RemoteDirectory(attempt.path(directory, name)).write("", place.encode())
        staged.append(StagedFile(attempt.name, directory, name, 1))
    return staged


def put_at(url: str, *places: str, mode: Mode = "append") -> None:
    job = begin_at(url, mode)
    job.commit(stage_at(job, *places))


def tree_at(url: str) -> list[str]:
    return RemoteDirectory(url).files("")


def test_modes_at_an_origin(url: str) -> None:
    put_at(url, "k=1/a", "k=2/a", mode="error")
    assert tree_at(url) == ["_SUCCESS", "k=1/a", "k=2/a"]
    put_at(url, "k=2/b")
    assert tree_at(url) == ["_SUCCESS", "k=1/a", "k=2/a", "k=2/b"]
    put_at(url, "k=2/c", "k=3/c", mode="dynamic")
    assert tree_at(url) == ["_SUCCESS", "k=1/a", "k=2/c", "k=3/c"]
    put_at(url, "k=4/d", mode="overwrite")
    assert tree_at(url) == ["_SUCCESS", "k=4/d"]
    assert RemoteDirectory(url).read("k=4/d") == b"k=4/d"
    with pytest.raises(UsageError, match="not empty"):
        begin_at(url, "error")
    job = begin_at(url)
    stage_at(job, "k=5/e")
    job.discard()
    assert tree_at(url) == ["_SUCCESS", "k=4/d"]
    with pytest.raises(ReadError, match="has ended"):
        job.attempt()


@pytest.mark.parametrize("mode", ["append", "overwrite", "dynamic"])
def test_a_commit_at_an_origin_that_fails_changes_nothing(url: str, mode: Mode) -> None:
    put_at(url, "k=1/a", "k=2/a")
    before = tree_at(url)
    job = begin_at(url, mode)
    staged = stage_at(job, "k=1/b", "k=3/b", "k=4/b")
    RemoteDirectory(job.root).delete([f"{staged[-1].attempt}/k=4/b"])
    with pytest.raises(MissingFile):
        job.commit(staged)
    job.discard()
    assert tree_at(url) == before


@pytest.mark.parametrize("mode", ["append", "overwrite", "dynamic"])
def test_a_commit_at_an_origin_is_whole_or_nothing(
    url: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its calls is the last: the next job undoes or completes it."""
    after = {
        "append": ["_SUCCESS", "k=1/a", "k=1/b", "k=2/a", "k=3/b"],
        "overwrite": ["_SUCCESS", "k=1/b", "k=3/b"],
        "dynamic": ["_SUCCESS", "k=1/b", "k=2/a", "k=3/b"],
    }[mode]
    seen, call = set[bool](), RemoteDirectory._call
    for last in range(60):
        target = f"{url}-{last}"
        put_at(target, "k=1/a", "k=2/a")
        before = tree_at(target)
        job = begin_at(target, mode)
        staged = stage_at(job, "k=1/b", "k=3/b")
        left = last

        def limited(self: RemoteDirectory, attempt: Callable[[], Any]) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise ReadError("the origin is gone")
            return call(self, attempt)

        monkeypatch.setattr(RemoteDirectory, "_call", limited)
        try:
            job.commit(staged)
            done = True
        except FFServeError:
            done = False
        monkeypatch.undo()
        place = RemoteDirectory(target)
        if owner := place.read(f"_temporary/{job.id}/owner.json"):  # as if its driver were dead
            changed = {**json.loads(owner), "boot": "another"}
            place.write(f"_temporary/{job.id}/owner.json", json.dumps(changed).encode())
        begin_at(target).discard()
        found = tree_at(target)
        assert found in (before, after), (last, found)
        assert found == after or not done
        seen.add(found == after)
        if done:
            break
    assert done
    assert seen == {True, False}
