"""``ffserve verify``: read all samples of record files and check their checksums."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from ffserve.cli import EXIT_BAD_DATA, exit_code_of_all
from ffserve.cli.files.record_files import files_of
from ffserve.cli.flags import format_option, jobs_option, json_option
from ffserve.cli.terminal import Progress, counted, print_json, progress
from ffserve.config import format_size
from ffserve.errors import FFServeError, ReadError, UsageError


class _Findings:
    """The results of all threads so far.

    Args: pause: called with the bytes of each part that was read, before the next one is.
    """

    def __init__(self, shown: Progress, *, quiet: bool, pause: Callable[[int], object]) -> None:
        self.pause = pause
        self.samples = 0
        self.size = 0
        self.damaged: list[dict[str, Any]] = []
        self.unreadable: list[dict[str, Any]] = []
        self.unverified: list[str] = []
        """Files whose format has no checksums of contents."""
        self.stopped = False
        self._shown = shown
        self._quiet = quiet
        self._lock = threading.Lock()

    def count(self, samples: int, size: int) -> None:
        with self._lock:
            self.samples += samples
            self.size += size
        self._shown.advance(size)
        self.pause(size)

    def sample(self, path: str, index: int, error: FFServeError) -> None:
        entry = {"path": path, "index": index, "error": error.code, "message": error.message}
        with self._lock:
            self.damaged.append(entry)
            self._line(f"{path}: sample {index}: {error.message}")

    def file(self, path: str, error: FFServeError) -> None:
        entry = {"path": path, "error": error.code, "message": error.message}
        with self._lock:
            self.unreadable.append(entry)
            where = f"byte {error.offset}: " if error.offset is not None else ""
            self._line(f"{path}: {where}{error.message}")

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._shown.line(text)


def _verify_file(path: str, format_name: str | None, findings: _Findings) -> None:
    from ffserve import Reader
    from ffserve.disk.files import os_error

    scanned = 0

    def seen(end: int) -> None:
        nonlocal scanned
        findings.pause(end - scanned)
        scanned = end

    try:
        # Tolerant: a file with damage between its samples is read to its end. With `seen` no index
        # file is used, which would hide damage of the records' headers.
        about = (path,), format_name, "off", True
        with Reader(*about, tolerant=True, seen=seen, whole=True) as reader:
            if any(shard.format == "tar" for shard in reader.shards):
                findings.unverified.append(path)
            for first, batch, failed in reader.scan():
                for position, error in failed.items():
                    findings.sample(path, first + position, error)
                findings.count(len(batch), batch.buffer.nbytes)
                if findings.stopped:
                    return
    except UsageError:
        raise
    except FFServeError as error:
        findings.file(path, error)
    except OSError as error:
        findings.file(path, os_error(error, path))
    except MemoryError as error:
        findings.file(path, ReadError(f"a sample is too large for this machine's memory: {error}"))


@click.command()
@click.argument("files", nargs=-1, required=True)
@jobs_option
@format_option
@json_option
def verify(files: tuple[str, ...], jobs: int, format_name: str | None, as_json: bool) -> int:
    """Read all samples and check their checksums.

    FILES are files, directories, patterns or URLs. A line is written for each damaged sample and
    each unreadable file; the others are still read. The exit code is 1 if there is any damage, and
    2 if files are missing or not readable.

    \b
      ffserve verify /data/shards && echo intact
      ffserve verify --json train.ffr | jq '.damaged[].index'
    """
    return check_files(files_of(files, format_name), jobs, format_name, "verifying", as_json)


def check_files(
    paths: list[str],
    jobs: int,
    format_name: str | None,
    label: str,
    as_json: bool,
    pause: Callable[[int], object] = lambda _: None,
) -> int:
    """Read all samples of files and print what is damaged; return the exit code.

    Args: label: the work, for the progress. pause: see `_Findings`.
    """
    total = sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
    with progress(label, total, as_bytes=True) as shown:
        findings = _Findings(shown, quiet=as_json, pause=pause)
        pool = ThreadPoolExecutor(jobs)
        tasks = [pool.submit(_verify_file, path, format_name, findings) for path in paths]
        try:
            for task in tasks:
                task.result()
        finally:
            # A thread may be looking for the next record in a terabyte of damage.
            findings.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
    bad = bool(findings.damaged or findings.unreadable)
    if as_json:
        print_json(
            {
                "files": len(paths),
                "samples": findings.samples,
                "size_bytes": findings.size,
                "damaged": sorted(findings.damaged, key=lambda e: (e["path"], e["index"])),
                "unreadable": sorted(findings.unreadable, key=lambda e: str(e["path"])),
                "unverified": sorted(findings.unverified),
            }
        )
    else:
        what = "member" if len(findings.unverified) == len(paths) else "sample"
        click.echo(
            f"{counted(len(paths), 'file')}, {counted(findings.samples, what)}, "
            f"{format_size(findings.size)}: "
            + (
                f"{counted(len(findings.damaged), f'damaged {what}')}, "
                f"{counted(len(findings.unreadable), 'unreadable file')}"
                if bad
                else ("all intact" if not findings.unverified else "all readable")
            )
        )
        if findings.unverified:
            click.echo(
                f"{counted(len(findings.unverified), 'tar file')} without checksums of contents: "
                "headers and sizes were checked ('ffserve convert' gives checksums)"
            )
    if findings.damaged:
        return EXIT_BAD_DATA
    return exit_code_of_all(entry["error"] for entry in findings.unreadable)
