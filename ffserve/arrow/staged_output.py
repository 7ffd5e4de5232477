"""Output directories that many tasks write and that change only when all of them have succeeded.

A job stages files in ``OUT/_temporary/JOB/ATTEMPT/``, a directory per attempt of a task, and moves
those of successful attempts to their places in ``commit``. Readers skip ``_temporary``. So a failed
task leaves nothing visible, and a task that ran twice counts once. ``_SUCCESS`` is written last.

The moves of a commit are several system calls. ``JOB/commit.json`` lists them before the first one,
and what an overwrite replaces is kept in ``JOB/old`` until the last one, so a commit that fails is
undone; one whose process was killed is undone by the next job of the directory, which finds
the owner of the abandoned job dead (``JOB/owner.json``). The job of another machine cannot be
examined: it is left alone, and refused if it was interrupted within its commit.

Tasks create no directory above their own: when an aborted job has removed its directory, a task
that still runs fails and cannot bring it back.

At an origin (`RemoteJob`) a file is complete or absent, and an object store has no rename. A commit
there copies the new files to their places, and deletes what they replace when all are there. Before
that it is undone as above; after it the next job of the directory completes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ffserve.disk.output import sync_directory, writing
from ffserve.errors import ReadError, UsageError
from ffserve.store.public import RemoteDirectory, is_url, shown

TEMPORARY, SUCCESS = "_temporary", "_SUCCESS"
_OWNER, _PLAN, _OLD = "owner.json", "commit.json", "old"
_WHOLE = "whole"
"""Of the plan of a commit at an origin: all new files are in their places."""

Mode = Literal["error", "append", "overwrite", "dynamic"]
"""The treatment of existing files: "error" refuses them; "overwrite" replaces all of them,
"dynamic" those in partitions that get new ones."""


@dataclass(frozen=True)
class StagedFile:
    """A complete file of an attempt: its directory and name in the output, and its records."""

    attempt: str
    directory: str
    name: str
    count: int

    @property
    def place(self) -> str:
        """The path of the file, relative to the output directory."""
        return os.path.join(self.directory, self.name)


class Attempt:
    """The staging directory of one attempt of a task."""

    def __init__(self, root: str) -> None:
        self.name = uuid.uuid4().hex
        self._root = os.path.join(root, self.name)
        with writing(root):
            os.mkdir(self._root)
        self._made = {""}

    def path(self, directory: str, name: str) -> str:
        """Return the path or URL at which to write a file of the output."""
        self._make(directory)
        return os.path.join(self._root, directory, name)

    def _make(self, directory: str) -> None:
        if directory in self._made:
            return
        self._make(os.path.dirname(directory))
        with writing(self._root):
            os.mkdir(os.path.join(self._root, directory))
        self._made.add(directory)

    def discard(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._root, ignore_errors=True)


@dataclass(frozen=True)
class OutputJob:
    """One write of a directory by many tasks. It pickles: driver and tasks use copies of it."""

    target: str
    id: str
    mode: Mode
    created: bool
    """Whether the job has created the output directory."""

    @property
    def root(self) -> str:
        """The staging directory."""
        return os.path.join(self.target, TEMPORARY, self.id)

    @classmethod
    def begin(cls, target: str, mode: Mode, *, pid: int, id: str | None = None) -> OutputJob:
        """Create the output directory and the job's own, and undo what dead jobs left.

        Args:    target: the output directory. pid: the process whose end ends the job. id: of the
                 job, a new one if None.
        Raises:  UsageError: the target is a file, or mode is "error" and it has files.
                 AccessDenied, ReadError: it cannot be written, or the commit of another machine's
                 job was interrupted.
        """
        name = id or uuid.uuid4().hex
        with writing(target):
            if os.path.lexists(target) and not os.path.isdir(target):
                raise UsageError("the output path is a file", path=target, hint="choose another")
            created = not os.path.isdir(target)
            job = cls(target, name, mode, created)
            job._check_empty()
            new = _make(os.path.join(target, TEMPORARY), f".{name}")
            for other in os.listdir(os.path.dirname(job.root)):
                if not other.startswith("."):  # it is being made
                    cls(target, other, "append", False)._recover()
            # The directory appears together with the file of its owner.
            _write(os.path.join(new, _OWNER), json.dumps(_identity(pid)))
            os.rename(new, job.root)
        return job

    def attempt(self) -> Attempt:
        """Return a staging directory for one attempt of a task.

        Raises: FFServeError: the job has ended.
        """
        return Attempt(self.root)

    def commit(self, files: Sequence[StagedFile]) -> None:
        """Move the files of successful attempts to their places, and write ``_SUCCESS``.

        Raises: FFServeError: nothing has changed; the job can be aborted.
        """
        plan = {"mode": self.mode, "new": [file.place for file in files]}
        with writing(self.target):
            self._check_empty()
            _write(os.path.join(self.root, _PLAN), json.dumps(plan))
            sync_directory(self.root)
        try:
            with writing(self.target):
                self._move(files)
                _write(os.path.join(self.target, SUCCESS), "")
                sync_directory(self.target)
                os.unlink(os.path.join(self.root, _PLAN))
        except BaseException:
            self._undo()
            raise
        self.discard()

    def _move(self, files: Sequence[StagedFile]) -> None:
        for place in self._replaced(files):
            old = os.path.join(self.root, _OLD, place)
            os.makedirs(os.path.dirname(old), exist_ok=True)
            os.rename(os.path.join(self.target, place), old)
        directories = {os.path.join(self.target, file.directory) for file in files}
        for directory in directories:
            os.makedirs(directory, exist_ok=True)
        for file in files:
            staged = os.path.join(self.root, file.attempt, file.place)
            os.rename(staged, os.path.join(self.target, file.place))
        for directory in directories:
            sync_directory(directory)

    def _replaced(self, files: Iterable[StagedFile]) -> list[str]:
        """Return the existing files that the new ones replace, relative to the target."""
        if self.mode == "overwrite":
            return _entries(self.target)
        if self.mode != "dynamic":
            return []
        found = []
        for directory in sorted({file.directory for file in files}):
            whole = os.path.join(self.target, directory)
            names = _entries(whole) if os.path.isdir(whole) else []
            found += [
                os.path.join(directory, name)
                for name in names
                if not os.path.isdir(os.path.join(whole, name))
            ]
        return found

    def _check_empty(self) -> None:
        if self.mode == "error" and self._entries():
            where = shown(self.target)
            raise UsageError(
                "the output directory is not empty", path=where, hint="use another mode"
            )

    def _entries(self) -> list[str]:
        return _entries(self.target) if os.path.isdir(self.target) else []

    def _recover(self) -> None:
        """Undo and remove this job if its owner is dead."""
        try:
            owner = json.loads(self._read(_OWNER) or "null")
        except ValueError:
            owner = None
        interrupted = self._read(_PLAN) is not None
        alive = _is_alive(owner) if owner else False
        if alive is None and interrupted:
            raise ReadError(
                f"a job of the machine {owner['host']!r} was interrupted while it moved its files "
                "here",
                path=shown(self.root),
                hint=f"if that job no longer runs, remove its {_OWNER}: the next write then undoes "
                "it",
            )
        if alive is False:
            if interrupted:
                self._undo()
            self._remove()

    def _read(self, name: str) -> str | None:
        """Return the text of a file of the job; None if there is none."""
        try:
            with open(os.path.join(self.root, name), encoding="utf-8") as file:
                return file.read()
        except (OSError, ValueError):
            return None

    def _undo(self) -> None:
        """Undo the moves of a commit, as far as they were done."""
        _undo(self)

    def _remove(self) -> None:
        """Remove what is staged."""
        shutil.rmtree(self.root, ignore_errors=True)

    def discard(self) -> None:
        """Remove what is staged, and the output directory if the job made it and it is empty."""
        self._remove()
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.root))
        if self.created:
            with contextlib.suppress(OSError):
                os.rmdir(self.target)


class RemoteJob(OutputJob):
    """A write of a directory at an origin."""

    @property
    def _places(self) -> RemoteDirectory:
        return RemoteDirectory(self.target)

    @classmethod
    def begin(cls, target: str, mode: Mode, *, pid: int, id: str | None = None) -> RemoteJob:
        """Create the job's own directory, and undo or complete what dead jobs left; see above."""
        job = cls(target, id or uuid.uuid4().hex, mode, False)
        job._check_empty()
        for other in job._places.entries(TEMPORARY):
            cls(target, other, "append", False)._recover()
        job._places.write(job._staged(_OWNER), json.dumps(_identity(pid)).encode())
        return job

    def _staged(self, *names: str) -> str:
        """Return a place in the staging directory, relative to the target."""
        return "/".join((TEMPORARY, self.id, *names))

    def attempt(self) -> Attempt:
        """Return a staging directory for one attempt of a task."""
        if self._read(_OWNER) is None:
            raise ReadError("the job that this task belongs to has ended", path=shown(self.root))
        return RemoteAttempt(self.root)

    def commit(self, files: Sequence[StagedFile]) -> None:
        """Copy the files of successful attempts to their places, delete what they replace, and
        write ``_SUCCESS``.

        Raises: FFServeError: nothing has changed and the job can be aborted; or what is replaced
            could not be deleted, which the next job of the directory does.
        """
        self._check_empty()
        plan = {"new": [file.place for file in files], "old": self._replaced(files)}
        self._places.write(self._staged(_PLAN), json.dumps(plan).encode())
        try:
            self._places.move(
                {self._staged(each.attempt, each.place): each.place for each in files}
            )
            plan[_WHOLE] = []
            self._places.write(self._staged(_PLAN), json.dumps(plan).encode())
        except BaseException:
            self._undo()
            raise
        self._complete(plan)
        self._remove()

    def _complete(self, plan: dict[str, list[str]]) -> None:
        self._places.delete(plan["old"])
        self._places.write(SUCCESS, b"")

    def _replaced(self, files: Iterable[StagedFile]) -> list[str]:
        found = self._places.files("") if self.mode in ("overwrite", "dynamic") else []
        if self.mode == "dynamic":
            directories = {file.directory for file in files}
            found = [name for name in found if os.path.dirname(name) in directories]
        # An object that stands for a directory stays.
        return [n for n in found if not n.startswith(f"{TEMPORARY}/") and not f"/{n}".endswith("/")]

    def _entries(self) -> list[str]:
        return [name for name in self._places.entries("") if name != TEMPORARY]

    def _read(self, name: str) -> str | None:
        content = self._places.read(self._staged(name))
        return None if content is None else content.decode()

    def _plan(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = json.loads(self._read(_PLAN) or "{}")
        return found

    def _recover(self) -> None:
        if _WHOLE in (plan := self._plan()):
            self._complete(plan)
            self._remove()
        else:
            super()._recover()

    def _undo(self) -> None:
        self._places.delete(self._plan().get("new", ()))

    def _remove(self) -> None:
        self._places.remove(self._staged())
        self._places.prune(TEMPORARY)

    def discard(self) -> None:
        """Remove what is staged, unless a commit is to be completed."""
        if _WHOLE not in self._plan():
            self._remove()


class RemoteAttempt(Attempt):
    """The staging directory of one attempt at an origin, where a file needs no directory."""

    def __init__(self, root: str) -> None:
        self.name = uuid.uuid4().hex
        self._root = f"{root}/{self.name}"

    def _make(self, directory: str) -> None:
        pass

    def discard(self) -> None:
        """Remove everything."""
        RemoteDirectory(self._root).remove("")


def job_of(target: str) -> type[OutputJob]:
    """Return the kind of job that writes a directory or URL."""
    return RemoteJob if is_url(target) else OutputJob


def exists(target: str) -> bool:
    """Whether an output directory exists. Raises: FFServeError."""
    return RemoteDirectory(target).exists() if is_url(target) else os.path.lexists(target)


def _make(parent: str, name: str) -> str:
    """Create a directory and its parents, which a job that ends may remove at any time."""
    path = os.path.join(parent, name)
    while True:
        os.makedirs(parent, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.mkdir(path)
            return path


def _entries(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name != TEMPORARY)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# ---- jobs that ended before their time -----------------------------------------------------------


def _undo(job: OutputJob) -> None:
    """Undo the moves of a commit, as far as they were done."""
    with open(os.path.join(job.root, _PLAN), encoding="utf-8") as file:
        try:
            places = json.load(file)["new"]
        except ValueError:
            return  # The process was killed while it wrote the plan: nothing has been moved.
    for place in places:
        path = os.path.join(job.target, place)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        while (path := os.path.dirname(path)) != job.target:
            try:
                os.rmdir(path)
            except OSError:
                break
    old = os.path.join(job.root, _OLD)
    for folder, inner, names in os.walk(old):
        place = os.path.normpath(os.path.join(job.target, os.path.relpath(folder, old)))
        os.makedirs(place, exist_ok=True)
        links = [name for name in inner if os.path.islink(os.path.join(folder, name))]
        for name in names + links:
            os.replace(os.path.join(folder, name), os.path.join(place, name))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(job.root, _PLAN))


def _identity(pid: int) -> dict[str, Any]:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "namespace": os.readlink("/proc/self/ns/pid"),
        "pid": pid,
        "started": _started(pid),
    }


def _started(pid: int) -> str:
    """Return the start time of a process; it tells it from a later one of the same number.

    Raises: OSError: there is no such process, or it is dead and only its parent has not noticed.
    """
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        state, *rest = file.read().rpartition(")")[2].split()
    if state in "ZX":
        raise ProcessLookupError(pid)
    return rest[18]


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether the process of a job lives; None if that cannot be known here."""
    try:
        here = _identity(os.getpid())
        if owner["host"] != here["host"] or (
            owner["boot"] == here["boot"] and owner["namespace"] != here["namespace"]
        ):
            return None
        return bool(owner["boot"] == here["boot"] and owner["started"] == _started(owner["pid"]))
    except (OSError, KeyError, TypeError):
        return False
