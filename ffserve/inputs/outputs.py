"""Output of a run: directories of the workers, committed as a whole.

A job writes to ``URI/_temporary/JOB/``: each worker's files go to ``worker-R.part`` there, which is
renamed to ``worker-R`` when it is complete. When the parts of all workers are there, the files are
renamed to their places below URI, and ``_SUCCESS`` is written last: a directory without it is not
complete. No file appears outside of ``_temporary`` before all workers have succeeded.

All workers' files share the directory. Files of one name from several workers go to ``worker-R/``
instead, so no file is lost. In a job over several machines each rank brings its part, and the rank
that completes the set commits: the one whose rename of the job's directory succeeds. Object stores
copy and delete instead of renaming, so two ranks that finish at the same moment may both copy; the
result is the same.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ffserve.disk.files import open_regular, os_error, wrap_os_error
from ffserve.disk.output import sync_directory, writing
from ffserve.errors import ReadError, UsageError, printable
from ffserve.inputs.places import local_path
from ffserve.store.public import RemoteDirectory, shown

TEMPORARY, SUCCESS = "_temporary", "_SUCCESS"


@dataclass(frozen=True)
class Output:
    """An output ``DIR=URI``: a directory of each worker, and the place of its files."""

    directory: str
    uri: str


def parse_output(text: str) -> Output:
    """Return the directory and the URI of ``DIR=URI``.

    Raises: UsageError: one is missing, or the directory does not lie below the worker's.
    """
    directory, mark, uri = text.partition("=")
    if not mark or not directory or not uri:
        raise UsageError(f"invalid output {text!r}", hint="write DIR=URI")
    clean = os.path.normpath(directory)
    if os.path.isabs(clean) or clean.split("/")[0] in ("..", ".") or "\0" in text:
        raise UsageError(
            f"the directory of the output {text!r} does not lie below the worker's",
            hint="give a relative directory, such as out=URI",
        )
    path = local_path(uri)
    return Output(clean, uri if path is None else path)


# ---- places --------------------------------------------------------------------------------------


class OutputDirectory(Protocol):
    """A directory for output. Paths are relative to it, parts joined by "/"."""

    def exists(self) -> bool:
        """Whether the directory exists."""
        ...

    def entries(self, path: str) -> list[str]:
        """Return the names in a directory; none if it does not exist."""
        ...

    def files(self, path: str) -> list[str]:
        """Return all files below a directory, relative to it."""
        ...

    def make(self, path: str) -> None:
        """Create a directory and those above it."""
        ...

    def put(self, source: str, path: str) -> None:
        """Write a local file."""
        ...

    def write(self, path: str, content: bytes) -> None:
        """Write a small file."""
        ...

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None if it is not there."""
        ...

    def rename(self, old: str, new: str) -> bool:
        """Rename a file or directory; False if it is not there."""
        ...

    def remove(self, path: str) -> None:
        """Remove a directory and all below it, if it is there."""
        ...

    def prune(self, path: str) -> None:
        """Remove a directory if it is empty."""
        ...


def output_directory(uri: str) -> OutputDirectory:
    """Return the directory at a local path or a URL."""
    path = local_path(uri)
    return RemoteDirectory(uri) if path is None else LocalDirectory(path)


class LocalDirectory:
    """A directory of this machine, or one that is mounted."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        self._renamed: set[str] = set()

    def exists(self) -> bool:
        """Whether the directory exists."""
        return os.path.lexists(self._path)

    def entries(self, path: str) -> list[str]:
        """Return the names in a directory; none if it does not exist."""
        whole = self._whole(path)
        if not os.path.lexists(whole):
            return []
        if not os.path.isdir(whole):
            raise UsageError("the output path is a file", path=whole, hint="choose another")
        return wrap_os_error(os.listdir, whole)

    def files(self, path: str) -> list[str]:
        """Return all files below a directory, relative to it."""
        whole = self._whole(path)
        return sorted(
            os.path.relpath(os.path.join(folder, name), whole)
            for folder, _, names in os.walk(whole)
            for name in names
        )

    def make(self, path: str) -> None:
        """Create a directory and those above it."""
        with writing(self._path):
            os.makedirs(self._whole(path), exist_ok=True)

    def put(self, source: str, path: str) -> None:
        """Write a local file, and sync it."""
        whole = self._whole(path)
        fd = open_regular(source)
        with writing(whole), open(fd, "rb") as data:
            os.makedirs(os.path.dirname(whole), exist_ok=True)
            with open(whole, "xb") as out:
                shutil.copyfileobj(data, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())

    def write(self, path: str, content: bytes) -> None:
        """Write a small file, after the names that were given before it are on disk."""
        whole = self._whole(path)
        with writing(whole):
            for directory in self._renamed:
                with contextlib.suppress(FileNotFoundError):  # renamed itself since
                    sync_directory(directory)
            self._renamed.clear()
            with open(whole, "wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            sync_directory(os.path.dirname(whole))

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None if it is not there."""
        try:
            return Path(self._whole(path)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise os_error(error, self._whole(path)) from error

    def rename(self, old: str, new: str) -> bool:
        """Rename a file or directory; False if it is not there."""
        begin, end = self._whole(old), self._whole(new)
        with writing(end):
            try:
                os.makedirs(os.path.dirname(end), exist_ok=True)
                os.rename(begin, end)
            except FileNotFoundError:
                if os.path.lexists(begin):
                    raise
                return False
        self._renamed.add(os.path.dirname(end))
        return True

    def remove(self, path: str) -> None:
        """Remove a directory and all below it, if it is there."""
        shutil.rmtree(self._whole(path), ignore_errors=True)

    def prune(self, path: str) -> None:
        """Remove a directory if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self._whole(path))

    def _whole(self, path: str) -> str:
        return os.path.join(self._path, path) if path else self._path


# ---- the job -------------------------------------------------------------------------------------


class RunOutput:
    """The output of a job at one URI.

    Args:
        output: directory and URI. job: a name that all ranks of this job have in common, and no
            other job. workers: of the whole job. ranks: those of this process. say: writes a line.
    """

    def __init__(
        self,
        output: Output,
        *,
        job: str,
        workers: int,
        ranks: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        self.output = output
        self._workers = workers
        self._ranks = ranks
        self._say = say
        self._root = f"{TEMPORARY}/{job}"
        self._target = output_directory(output.uri)
        self._created = self._existed = False

    def begin(self) -> None:
        """Check, before any program starts, that the output can be written.

        Raises: UsageError: there are files already. AccessDenied, ReadError: it cannot be written.
        """
        there = [name for name in self._target.entries("") if name != TEMPORARY]
        if there:
            raise UsageError(
                f"the output directory is not empty: it has {printable(min(there))!r}",
                path=shown(self.output.uri),
                hint="remove it, or choose another",
            )
        self._existed = self._target.exists()
        self._created = True
        self._target.make(self._root)
        for rank in self._ranks:  # of an attempt before this one
            self._target.remove(f"{self._root}/worker-{rank}.part")
            self._target.remove(f"{self._root}/worker-{rank}")

    def put(self, rank: int, directory: str) -> None:
        """Copy the files of a worker into the job's directory.

        Args:    directory: the worker's.
        Raises:  ReadError, AccessDenied: a file cannot be read or written.
        """
        begin = os.path.join(directory, self.output.directory)
        part = f"{self._root}/worker-{rank}"
        self._target.make(f"{part}.part")
        found, left_out = files_below(begin)
        # A job within the program leaves marks of its own, which are not output of this job.
        files = [n for n in found if n != SUCCESS and n.split("/")[0] != TEMPORARY]
        for name in files:
            self._target.put(os.path.join(begin, name), f"{part}.part/{name}")
        self._target.write(f"{part}.part/{SUCCESS}", b"")
        if not self._target.rename(f"{part}.part", part):
            raise ReadError("another run has removed the output", path=shown(self.output.uri))
        if left_out:
            self._say(
                f"warning: left out of the output: {len(left_out)} links to directories, sockets "
                f"or pipes, the first is {os.path.join(begin, left_out[0])}"
            )
        if not files:
            self._say(f"warning: worker {rank} has written no file to {self.output.directory}")

    def commit(self) -> bool:
        """Make the output visible if the parts of all workers are there; return whether it is.

        Raises: ReadError, AccessDenied.
        """
        wanted = [f"worker-{rank}" for rank in range(self._workers)]
        if not {*wanted} <= {*self._target.entries(self._root)}:
            if len(self._ranks) == self._workers:  # all were brought by this process
                raise ReadError("another run has removed the output", path=shown(self.output.uri))
            return False
        own = f"{self._root}.commit"
        if not self._target.rename(self._root, own):
            return True  # another rank does it
        self._check_first(own)
        files = {
            rank: [name for name in self._target.files(f"{own}/worker-{rank}") if name != SUCCESS]
            for rank in range(self._workers)
        }
        moves = places_of(files)
        if shared := [new for (rank, name), new in moves.items() if new != name]:
            self._say(
                f"warning: {len(shared)} files have names that several workers use; they are in "
                "the directories worker-RANK of the output"
            )
        for (rank, name), new in moves.items():
            if not self._target.rename(f"{own}/worker-{rank}/{name}", new):
                self._check_moved(new)
        self._target.write(SUCCESS, b"")
        self._target.remove(TEMPORARY)
        return True

    def _check_first(self, own: str) -> None:
        """Raise ReadError if another run has completed its output here since this one began.

        Not where another rank of this job may have done so: the rename of an object store does not
        decide who commits.
        """
        alone = len(self._ranks) == self._workers or isinstance(self._target, LocalDirectory)
        if alone and SUCCESS in self._target.entries(""):
            self._target.remove(own)
            self._target.prune(TEMPORARY)
            raise ReadError(
                "another run has written this output meanwhile",
                path=shown(self.output.uri),
                hint="run it again with another output; the programs' files are still there",
            )

    def _check_moved(self, path: str) -> None:
        """Raise ReadError unless another rank, at the same time, has moved a file to its place."""
        folder, _, name = path.rpartition("/")
        if name not in self._target.entries(folder):
            raise ReadError(
                f"the file {name!r} vanished while the output was committed",
                path=shown(self.output.uri),
                hint="run it again with another output; the programs' files are still there",
            )

    def abort(self) -> None:
        """Remove the files of this process, or, in a job of this process alone, all files of the
        job."""
        if not self._created:
            return
        if len(self._ranks) == self._workers:
            self._target.remove(self._root)
        for rank in self._ranks:
            self._target.remove(f"{self._root}/worker-{rank}.part")
            self._target.remove(f"{self._root}/worker-{rank}")
        for path in (self._root, TEMPORARY, *([] if self._existed else [""])):
            self._target.prune(path)


def files_below(directory: str) -> tuple[list[str], list[str]]:
    """Return the files below a directory, relative to it and sorted, and what is left out.

    Links to files count as files. Links to directories (such as ``latest``), links that lead
    nowhere, sockets and pipes are left out.
    """
    files: list[str] = []
    left_out: list[str] = []
    for folder, folders, names in os.walk(directory, onerror=_raise):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in sorted(names + links):
            path = os.path.join(folder, name)
            (files if os.path.isfile(path) else left_out).append(os.path.relpath(path, directory))
    return files, left_out


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # the program has removed the directory
        raise os_error(error, str(error.filename))


def places_of(files: Mapping[int, Sequence[str]]) -> dict[tuple[int, str], str]:
    """Return the place of each worker's files in the common directory.

    A name that several workers have, or that is a directory of another, gets the worker's
    directory.
    """
    uses = Counter(name for names in files.values() for name in names)
    above: Counter[str] = Counter()
    for names in files.values():
        above.update({part for name in names for part in _above(name)})
    taken = {
        name
        for name, count in uses.items()
        if count > 1 or above[name] or any(uses[part] for part in _above(name))
    }
    # A name below worker-R/ is left to the files that are moved there.
    mine = re.compile(r"worker-\d+(/|$)")
    moved = {
        name
        for names in files.values()
        for name in names
        if name in taken or (taken and mine.match(name))
    }
    return {
        (rank, name): f"worker-{rank}/{name}" if name in moved else name
        for rank, names in files.items()
        for name in names
    }


def _above(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def job_name(environment: Mapping[str, str]) -> str:
    """Return the name of this attempt of a job that its launcher gives to all ranks, or "job"."""
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "PMI_JOBID")
    name = next((environment[name] for name in names if environment.get(name)), "job")
    attempt = (
        environment.get(extra, "") for extra in ("TORCHELASTIC_RESTART_COUNT", "SLURM_STEP_ID")
    )
    return re.sub(r"[^A-Za-z0-9-]", "-", "-".join([name[:100], *filter(None, attempt)]))
