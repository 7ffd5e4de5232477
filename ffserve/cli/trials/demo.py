"""``ffserve demo``: pack, serve, train and train again, on files that every machine has.

It packs the standard library's sources, starts a daemon, trains on them, starts a second job on the
same data, and shows from the daemon's counters what was read. Its files are in two temporary
directories, one of them short enough for a socket, and its processes are children of this one; all
are gone when it ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from ffserve.bench import child_processes
from ffserve.cli.terminal import (
    duration,
    percent,
    print_facts,
    print_json,
    print_table,
    progress,
)
from ffserve.config import ENGINES, default_arena_size, format_size

MOST_FILES = 6000
SHARDS = 4


@click.command()
@click.option(
    "--files",
    type=click.IntRange(8),
    default=MOST_FILES,
    help="Pack at most this many files.",
    show_default=True,
)
@click.option(
    "--epochs",
    type=click.IntRange(1, 100),
    default=2,
    show_default=True,
    help="Epochs of each job.",
)
@click.option(
    "--workers",
    type=click.IntRange(0, 64),
    default=2,
    show_default=True,
    help="DataLoader worker processes of each job.",
)
@click.option("--no-torch", is_flag=True, help="Train with numpy even if PyTorch is installed.")
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="auto",
    show_default=True,
    help="I/O engine of the daemon; see 'ffserve serve --help'.",
)
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    help="Directory for the data.  [default: TMPDIR, else /var/tmp]",
)
@click.option("--json", "as_json", is_flag=True, help="Write the figures as JSON.")
def demo(
    files: int,
    epochs: int,
    workers: int,
    no_torch: bool,
    engine: str,
    directory: str | None,
    as_json: bool,
) -> int:
    """Pack files, serve them, train on them twice, and show what was read from disk.

    Some thousand source files of this machine become FFRecord shards; a daemon serves them; a
    small PyTorch model trains on them with two workers for two epochs; then a second job does the
    same. It takes less than a minute, needs no root, and leaves nothing behind.

    \b
      ffserve demo
      ffserve demo --no-torch --json
    """
    begun = time.monotonic()
    say = Narration(quiet=as_json)
    with child_processes.interruptible(), contextlib.ExitStack() as stack:
        work = stack.enter_context(child_processes.work_directory("ffserve-demo-", directory))
        data = os.path.join(work, "data")
        packed = _pack(_collect(files), work, data, say)
        daemon = stack.enter_context(
            child_processes.daemon(
                [data],
                max(2 * packed.size, min(512 << 20, default_arena_size())),
                ["--engine", engine],
            )
        )
        facts = daemon.status()
        arena = format_size(facts["arena"]["size"])
        say(f"2. Serving: engine {facts['engine']['kind']}, arena {arena}, pid {facts['pid']}")
        torch = not no_torch and importlib.util.find_spec("torch") is not None
        example = f"ffserve.examples.{'train_torch' if torch else 'train_numpy'}"
        command = [*child_processes.command(example), data, "--json"]
        command += ["--epochs", str(epochs), "--workers", str(workers)]
        jobs = []
        for number in (1, 2):
            say(f"{number + 2}. Job {number}: ", newline=False)
            jobs.append(_run_job(command, daemon, packed.files * epochs, say))
        final = daemon.status()
        seconds = daemon.stop()
    result = {
        "framework": jobs[0]["framework"],
        "engine": final["engine"]["kind"],
        "files": packed.files,
        "samples": packed.files,
        "size_bytes": packed.size,
        "read_from_disk_bytes": final["cache"]["read_size"],
        "checksum_failures": final["cache"]["checksum_failures"],
        "jobs": jobs,
        "stop_seconds": seconds,
        "seconds": time.monotonic() - begun,
    }
    if as_json:
        print_json(result)
    else:
        _print_result(result)
    sound = result["checksum_failures"] == 0 and all(job["errors"] == 0 for job in jobs)
    return 0 if sound else 1


class Narration:
    """Writes each step, unless the result is written as JSON."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet

    def __call__(self, text: str, *, newline: bool = True) -> None:
        if not self.quiet:
            click.echo(text, nl=newline)


# --------------------------------------------------------------------------- the data


@dataclass(frozen=True)
class Packed:
    """Counts of the packed data."""

    files: int
    size: int


def _collect(most: int) -> dict[str, str]:
    """Return name → file for the sources of the standard library.

    Some distributions omit most of it; files of installed packages are added then.
    """
    paths = sysconfig.get_paths()
    found: dict[str, str] = {}
    for kind in ("stdlib", "platlib", "purelib"):
        if kind == "stdlib" or len(found) < min(most, 2000):
            for name, path in _sources(paths[kind]):
                if len(found) < most:
                    found.setdefault(os.path.join(kind, name), path)
    return found


def _sources(top: str) -> Iterator[tuple[str, str]]:
    for directory, below, names in os.walk(top):
        unwanted = {"site-packages", "dist-packages", "__pycache__"}
        below[:] = sorted(set(below) - unwanted)
        for name in sorted(names):
            path = os.path.join(directory, name)
            if name.endswith(".py") and os.path.isfile(path) and os.access(path, os.R_OK):
                yield os.path.relpath(path, top), path


def _pack(files: dict[str, str], work: str, data: str, say: Narration) -> Packed:
    """Pack the files into shards and remove those from the page cache."""
    import ffserve
    from ffserve import folders as packed_folders

    say(f"1. Packing {len(files):,} Python source files of this machine", newline=False)
    tree = os.path.join(work, "tree")
    for name, path in files.items():
        link = os.path.join(tree, name)
        os.makedirs(os.path.dirname(link), exist_ok=True)
        os.symlink(path, link)
    started = time.monotonic()
    written = packed_folders.pack(
        [tree], data, shards=SHARDS, jobs=min(SHARDS, os.cpu_count() or 1)
    )
    seconds = time.monotonic() - started
    for path in written.paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with ffserve.open(written.paths, server="off") as reader:
        size = int(reader.sizes().sum())
    say(f": {format_size(written.bytes)} in {len(written.paths)} FFRecord shards, {seconds:.1f} s")
    return Packed(written.files, size)


# --------------------------------------------------------------------------- the jobs


def _run_job(
    command: list[str], daemon: child_processes.Daemon, total: int, say: Narration
) -> dict[str, Any]:
    """Run one training job; return its report with the daemon's counters."""
    before = daemon.status()
    ran = _train(command, daemon.socket, total, say)
    return _account(ran, before, _settled(daemon, ran["samples"], before))


def _train(command: list[str], socket: str, total: int, say: Narration) -> dict[str, Any]:
    """Run one training job and return its report on its epochs."""
    epochs: list[dict[str, Any]] = []
    framework = "?"
    with (
        tempfile.TemporaryFile() as errors,
        child_processes.running(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            environment={"FFSERVE_SOCKET": socket},
        ) as process,
    ):
        assert process.stdout is not None
        with progress("training", total) as shown:
            done = finished = 0
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "start":
                    framework = event["framework"]
                    workers = f", {event['workers']} workers" if event["workers"] else ""
                    say(f"{framework}{workers}")
                else:
                    now = finished + event["samples"]
                    shown.advance(now - done)
                    done = now
                if event["event"] == "epoch":
                    finished = done
                    epochs.append(event)
                    if not say.quiet:
                        shown.line(_epoch_line(event))
        if process.wait() != 0:
            errors.seek(0)
            words = errors.read().decode(errors="replace")
            what = f"the training job failed with code {process.returncode}"
            raise child_processes.failed(what, words)
    return {
        "framework": framework,
        "samples": sum(epoch["samples"] for epoch in epochs),
        "size_bytes": sum(epoch["size_bytes"] for epoch in epochs),
        "seconds": sum(epoch["seconds"] for epoch in epochs),
        "first_loss": epochs[0]["first_loss"],
        "last_loss": epochs[-1]["last_loss"],
        "epochs": epochs,
    }


def _epoch_line(epoch: dict[str, Any]) -> str:
    rate = epoch["samples"] / epoch["seconds"]
    return (
        f"     epoch {epoch['epoch'] + 1}: {epoch['samples']:,} samples, "
        f"{format_size(epoch['size_bytes'])} in {epoch['seconds']:.1f} s ({rate:,.0f} samples/s), "
        f"loss {epoch['first_loss']:.2f} → {epoch['last_loss']:.2f} bits per byte"
    )


def _settled(
    daemon: child_processes.Daemon, samples: int, before: dict[str, Any]
) -> dict[str, Any]:
    """Return the daemon's status when it has the last counters of an ended job.

    Workers report their last hits as they end, and the daemon may receive the report a moment
    after the job's process has ended.
    """
    deadline = time.monotonic() + 2
    while True:
        after = daemon.status()
        counted = sum(job["hits"] + job["missed"] for job in _new_jobs(before, after))
        idle = all(job["sessions"] == 0 for job in _new_jobs(before, after))
        if (counted >= samples and idle) or time.monotonic() > deadline:
            return after
        time.sleep(0.02)


def _new_jobs(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    known = {job["name"] for job in before["jobs"]}
    return [job for job in after["jobs"] if job["name"] not in known and job["paths"]]


def _account(ran: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Add the daemon's counters to the report of a job."""
    counted = _new_jobs(before, after)
    hits = sum(job["hits"] for job in counted)
    missed = sum(job["missed"] for job in counted)

    def grown(counter: str) -> int:
        return int(after["cache"][counter] - before["cache"][counter])

    return {
        **ran,
        "hits": hits,
        "missed": missed,
        "hit_rate": hits / max(1, hits + missed),
        "read_from_disk_bytes": grown("read_size"),
        "checksum_failures": grown("checksum_failures"),
        "errors": sum(job["errors"] for job in counted),
    }


def _print_result(result: dict[str, Any]) -> None:
    click.echo()
    heads = ["", "samples", "bytes served", "hit rate", "read from disk", "samples/s"]
    heads.append("checksum failures")
    rows = [
        [
            f"job {number}",
            f"{job['samples']:,}",
            format_size(job["size_bytes"]),
            percent(job["hits"], job["hits"] + job["missed"]),
            format_size(job["read_from_disk_bytes"]),
            f"{job['samples'] / job['seconds']:,.0f}",
            str(job["checksum_failures"]),
        ]
        for number, job in enumerate(result["jobs"], 1)
    ]
    print_table(heads, rows)
    served = sum(job["size_bytes"] for job in result["jobs"])
    disk = result["read_from_disk_bytes"]
    click.echo(
        f"\nThe data set is {format_size(result['size_bytes'])}; "
        f"{format_size(disk)} were read from disk (in whole blocks) to serve {format_size(served)}."
    )
    if result["jobs"][1]["read_from_disk_bytes"] == 0:
        click.echo("The first epoch of job 1 read it once. All later reads came from memory.")
    if result["framework"] != "PyTorch":
        click.echo(
            "The jobs trained with numpy and without workers, since PyTorch is missing or disabled."
        )
    command = _own_command()
    click.echo(f"\nAll of it took {duration(result['seconds'])}, and nothing is left running.")
    click.echo("Next steps with your own data:")
    print_facts(
        [
            (f"{command} pack DIR -o data.ffr", "pack a directory into a record file"),
            (f'{command} serve --root "$PWD" &', "start the daemon; jobs find its socket"),
            (f"{command} status", "show its memory and its jobs"),
            (
                f"less {os.path.relpath(_example_path(result))}",
                "read the training job of this demo",
            ),
        ]
    )


def _example_path(result: dict[str, Any]) -> str:
    """Return the file of the training job that ran."""
    name = "train_torch" if result["framework"] == "PyTorch" else "train_numpy"
    spec = importlib.util.find_spec(f"ffserve.examples.{name}")
    assert spec is not None and spec.origin is not None
    return spec.origin


def _own_command() -> str:
    """Return the command that runs this installation's ffserve."""
    path = os.path.join(os.path.dirname(sys.executable), "ffserve")
    if shutil.which("ffserve") == path or not os.path.exists(path):
        return "ffserve"
    return min(path, os.path.relpath(path), key=len)
