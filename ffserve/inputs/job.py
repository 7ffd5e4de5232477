"""A run: the workers of one machine, or one worker of a larger job, from inputs to output."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ffserve.disk.files import wrap_os_error
from ffserve.disk.output import writing
from ffserve.errors import UsageError
from ffserve.inputs import Listing, describe_left_out, download, find_inputs, share
from ffserve.inputs.outputs import Output, RunOutput, job_name
from ffserve.inputs.processes import GRACE_S, Interrupted, Processes, RunWorker, Signals
from ffserve.inputs.stream import Framing, WorkerStream, share_of, splits_of

Strategy = Literal["download", "placeholder", "stream"]

FILE_LIST, FILE_LIST_VARIABLE = "inputFileList.txt", "INPUT_FILE_LIST"
MAX_ENVIRONMENT = 120_240
"""The longest environment that has the list of files, in characters. They are counted as XLearning
counts them, in the text "[A=1, B=2]"."""

_WORKER = re.compile(r"worker-\d+")
_RANKS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, and most others
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


@dataclass(frozen=True)
class Run:
    """A command with its inputs, workers and outputs.

    Args:
        inputs: strings ``URI[,URI…][#ALIAS]``. strategy: how the program gets the files.
        workers: of the whole job. rank: the only worker here; None for all of them.
        rename: of "download": name files by time and number. epochs, seed, framing: of "stream".
        outputs: directories, and where their files go. name: of this attempt of the job, common to
            all its ranks; None for that of the launcher. command: the program and its arguments.
        grace_s: time between SIGTERM and SIGKILL. environment: of this process. directory: where
            it runs.
    """

    command: Sequence[str]
    inputs: Sequence[str] = ()
    strategy: Strategy = "download"
    workers: int = 1
    rank: int | None = None
    rename: bool = False
    epochs: int = 1
    seed: int | None = None
    framing: Framing = "lines"
    outputs: Sequence[Output] = ()
    name: str | None = None
    grace_s: float = GRACE_S
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: str = field(default_factory=os.getcwd)

    @property
    def ranks(self) -> Sequence[int]:
        """The workers of this process."""
        return range(self.workers) if self.rank is None else (self.rank,)


def place_in_job(
    workers: int | None, rank: int | None, environment: Mapping[str, str]
) -> tuple[int, int | None]:
    """Return the number of workers, and the rank of the only one here or None.

    Args:    workers, rank: as the user gave them, which come first. environment: where a launcher
             tells the rank (torchrun, Open MPI, MVAPICH, MPICH, Slurm).
    Raises:  UsageError: contradictions.
    """
    found = None
    for names in _RANKS:
        if all(environment.get(name) for name in names) and not _in_batch_script(
            names[0], environment
        ):
            found = tuple(_integer(name, environment[name]) for name in names)
            break
    where = "--rank"
    if rank is None and found is not None:
        if workers is not None and workers != found[1]:
            raise UsageError(
                f"--workers {workers}, but the environment has rank {found[0]} of {found[1]}",
                hint="add --rank, or unset the launcher's variables",
            )
        rank, where = found[0], "the environment"
    if workers is None:
        workers = found[1] if found is not None else 1
        if rank is not None and found is None:
            raise UsageError("--rank needs the number of workers", hint="add --workers N")
    if rank is not None and rank >= workers:
        raise UsageError(
            f"rank {rank} (of {where}) is not one of {workers} workers",
            hint="ranks begin at 0; --workers is the number of all workers of the job",
        )
    return workers, rank


def _in_batch_script(name: str, environment: Mapping[str, str]) -> bool:
    """Whether this is Slurm's batch script, which has a rank but is no task of the job step."""
    return (
        name == "SLURM_PROCID"
        and "SLURM_JOB_ID" in environment
        and "SLURM_STEP_ID" not in environment
    )


def _integer(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(
            f"{name}={text!r} in the environment is not a number", hint=f"unset {name}"
        )
    return int(text)


def run(job: Run, say: Callable[[str], None]) -> int:
    """Run a job, or this process's part of it.

    Args:    say: writes a line of our own to standard error.
    Returns: 0, or the exit code of the first program that failed; 128 + N for signal N.
    Raises:  FFServeError: before a program starts (inputs, directories, the program itself), while
             one runs (the source of a stream), or after it (outputs).
    """
    _check_program(job)
    found = find_inputs(job.inputs, empty=job.strategy != "stream")
    _report(found, job, say)
    files = _names(found, job) if found and job.strategy == "download" else {}
    name = job.name or (uuid.uuid4().hex if job.rank is None else job_name(job.environment))
    outputs = [
        RunOutput(output, job=name, workers=job.workers, ranks=job.ranks, say=say)
        for output in job.outputs
    ]
    with contextlib.ExitStack() as stack, Signals(job.grace_s) as signals:
        done = False
        try:
            for output in outputs:
                output.begin()
            workers = [_worker(job, found, rank, stack, say) for rank in job.ranks]
            for worker in workers:
                if files:
                    download.place(worker.directory, files[worker.rank])
            processes = Processes(
                workers, job.command, prefix=len(workers) > 1, signals=signals, say=say
            )
            code = processes.run()
            if code == 0:
                _commit(outputs, workers, signals, say)
                done = True
        except Interrupted as interrupted:
            say(f"interrupted by {interrupted}")
            code = 128 + interrupted.number
        finally:
            if not done:
                signals.ending = True
                for output in outputs:
                    output.abort()
    return code


def _commit(
    outputs: Sequence[RunOutput],
    workers: Sequence[RunWorker],
    signals: Signals,
    say: Callable[[str], None],
) -> None:
    try:
        for output in outputs:
            for worker in workers:
                output.put(worker.rank, worker.directory)
        signals.ending = True  # what has begun to appear is completed
        for output in outputs:
            output.commit()
    except BaseException:
        kept = {os.path.join(w.directory, o.output.directory) for w in workers for o in outputs}
        say(
            "the output is not complete; the programs' files are still in "
            + ", ".join(sorted(kept))
        )
        raise


# ---- before the programs start -------------------------------------------------------------------


def _check_program(job: Run) -> None:
    """Raise UsageError if the program is missing, before anything is fetched."""
    program = job.command[0]
    if "/" in program:
        found = os.path.exists(os.path.join(job.directory, program))
    else:
        found = shutil.which(program, path=job.environment.get("PATH", os.defpath)) is not None
    if not found:
        raise UsageError(
            "cannot run the program: there is no such file", path=program,
            hint="check its name and PATH",
        )  # fmt: skip


def _report(found: Mapping[str, Listing], job: Run, say: Callable[[str], None]) -> None:
    if left_out := describe_left_out(dict(found)):
        say(f"left out of the inputs: {left_out}")
    for alias, listing in found.items():
        if len(listing.files) < job.workers:
            say(
                f"warning: the alias {alias!r} has {len(listing.files)} files for {job.workers} "
                "workers: some get none"
            )
    if job.strategy == "stream" and not found:
        raise UsageError("the strategy stream needs an input", hint="add --input URI")
    both = {output.directory.split("/")[0] for output in job.outputs} & found.keys()
    if both and job.strategy == "download":
        raise UsageError(
            f"{min(both)!r} is the directory of an input and of an output",
            hint="give the input another alias (#ALIAS)",
        )


def _names(found: Mapping[str, Listing], job: Run) -> dict[int, dict[str, download.Placed]]:
    """Return the files of each worker here by alias and name; check those of all workers."""
    now = download.now_ms()
    wanted = {}
    for rank in range(job.workers):
        wanted[rank] = {
            alias: download.names_of(
                share(listing.files, rank, job.workers), rename=job.rename, now_ms=now
            )
            for alias, listing in found.items()
        }
    return wanted


def _worker(
    job: Run,
    found: Mapping[str, Listing],
    rank: int,
    stack: contextlib.ExitStack,
    say: Callable[[str], None],
) -> RunWorker:
    """Prepare a worker's directory and environment."""
    directory = job.directory
    own = [output.directory for output in job.outputs]
    if job.workers > 1:
        taken = {FILE_LIST, download.RECORD, *(path.split("/")[0] for path in own)}
        taken |= set(found) if job.strategy == "download" else set()
        directory = _directory(job.directory, rank, taken)
    if job.workers > 1 or (found and job.strategy == "download"):
        stack.enter_context(_locked(directory))
    for output in own:
        path = os.path.join(directory, output)
        with writing(path):
            os.makedirs(path, exist_ok=True)
            if os.listdir(path):
                say(f"warning: {path} has files already; they become output too")
    environment = {**job.environment, "RANK": str(rank), "WORLD_SIZE": str(job.workers)}
    environment.pop(FILE_LIST_VARIABLE, None)
    if job.strategy == "placeholder":
        _tell_files(found, rank, job.workers, directory, environment)
    stream = None
    if job.strategy == "stream":
        shares = [share_of(splits_of(each.files), rank, job.workers) for each in found.values()]
        stream = WorkerStream(
            shares, framing=job.framing, epochs=job.epochs, seed=job.seed, rank=rank
        )
    return RunWorker(rank, directory, environment, stream)


def _tell_files(
    found: Mapping[str, Listing],
    rank: int,
    workers: int,
    directory: str,
    environment: dict[str, str],
) -> None:
    """Put the list of a worker's files into its environment, or into a file if it is long."""
    uris = {
        alias: [file.uri for file in share(listing.files, rank, workers)]
        for alias, listing in found.items()
    }
    text = json.dumps(uris)
    environment[FILE_LIST_VARIABLE] = text
    if len("[" + ", ".join(f"{k}={v}" for k, v in environment.items()) + "]") > MAX_ENVIRONMENT:
        del environment[FILE_LIST_VARIABLE]
        path = os.path.join(directory, FILE_LIST)
        with writing(path), open(path, "w", encoding="ascii") as file:
            file.write(text + "\n")


def _directory(base: str, rank: int, own: set[str]) -> str:
    """Return the directory of one of several workers, with links to the entries of `base`.

    Args:    own: names that are the worker's own, and no links.
    """
    path = os.path.join(base, f"worker-{rank}")
    with writing(path):
        os.makedirs(path, exist_ok=True)
        if os.path.islink(path):
            raise UsageError(
                "the directory of a worker is a symbolic link", path=path, hint="remove it"
            )
        names = {n for n in os.listdir(base) if not _WORKER.fullmatch(n)} - own
        for name in os.listdir(path):
            link = os.path.join(path, name)
            if os.path.islink(link) and os.readlink(link) == f"../{name}" and name not in names:
                os.unlink(link)  # of an earlier run
        for name in sorted(names):
            with contextlib.suppress(FileExistsError):  # the worker's program has its own
                os.symlink(f"../{name}", os.path.join(path, name))
    return path


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Hold the lock of a directory, so that no other run places its files there."""
    fd = wrap_os_error(lambda p: os.open(p, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), directory)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                "another run uses this directory",
                path=directory,
                hint="wait for its end, or run in another directory",
            ) from None
        except OSError:
            pass  # no locks on this file system
        yield
    finally:
        os.close(fd)
