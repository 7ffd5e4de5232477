"""``dump`` of the original's ``ffrecord.utils``: write anything with ``len`` and ``[]`` to files.

The module has the original's name, so that ``from ffserve.utils import dump`` is a drop-in.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from typing import Any

from ffserve import parallel
from ffserve.compat.ffrecord import FileWriter
from ffserve.errors import UsageError
from ffserve.output import staged_directory

_PROCESSES_MAX = 16
_REPORT_EVERY = 256
_SAY_EVERY_SECONDS = 2.0


def dump(ds: Any, fname: str | os.PathLike[str], nfiles: int, verbose: bool = False) -> None:
    """Write a dataset to FFRecord files, several at a time.

    Args:
        ds: supports ``len()`` and ``[i]``; items are buffers. It is reached by fork, so that it
            need not pickle.
        fname: with ``nfiles=1`` the file, ending in ``.ffr``; else a directory, which gets
            ``PART_00000.ffr`` and so on, in order. Parts already there are replaced once all new
            ones are complete.
        nfiles: how many files; a dataset that does not fill them gets fewer, with a warning.
        verbose: report progress on standard error.
    Raises:  whatever ``ds[i]`` raised, whole; WorkerError when a worker died; UsageError,
             ReadError as ``FileWriter``. Nothing is left behind then.
    Cost:    one pass over ``ds`` in up to 16 processes.
    Source:  HFAiLab/ffrecord 1.4.
    """
    n = len(ds)
    if nfiles < 1:
        raise UsageError(f"nfiles={nfiles} has to be 1 at least")
    report = _Said(n).report if verbose else None
    if nfiles == 1:
        _write_part(os.fspath(fname), ds, 0, n, report or _nobody)
        return
    if n == 0:
        raise UsageError(f"an empty dataset does not fill {nfiles} files")
    size = -(-n // nfiles)
    starts = range(0, n, size)
    if len(starts) != nfiles:
        warnings.warn(f"{n} samples fill {len(starts)} files, not {nfiles}", stacklevel=2)
    _warn_of_leftovers(fname, len(starts))
    with staged_directory(fname, replace=True) as staging:
        work = [
            (os.path.join(staging, _part_name(k)), ds, start, min(start + size, n))
            for k, start in enumerate(starts)
        ]
        jobs = min(_PROCESSES_MAX, len(work))
        parallel.run(_write_part, work, jobs=jobs, method="fork", progress=report)


def _part_name(k: int) -> str:
    return f"PART_{k:05d}.ffr"


def _write_part(out: str, ds: Any, start: int, end: int, report: parallel.Progress) -> None:
    reported = 0
    with FileWriter(out, end - start) as writer:
        for i in range(start, end):
            writer.write_one(ds[i])
            if writer.count - reported == _REPORT_EVERY:
                report(_REPORT_EVERY, 0)
                reported = writer.count
    report(end - start - reported, 0)


def _warn_of_leftovers(directory: str | os.PathLike[str], count: int) -> None:
    """Parts of an earlier, longer dump would be read together with the new ones."""
    if not os.path.isdir(directory):
        return
    new = {_part_name(k) for k in range(count)}
    others = sorted(
        name for name in os.listdir(directory) if name.endswith(".ffr") and name not in new
    )
    if others:
        warnings.warn(
            f"{os.fspath(directory)} also holds {len(others)} other .ffr files, such as "
            f"{others[0]}, which stay",
            stacklevel=3,
        )


class _Said:
    """Progress in words: a line now and then on standard error."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._done = 0
        self._next = time.monotonic() + _SAY_EVERY_SECONDS

    def report(self, samples: int, size: int) -> None:
        self._done += samples
        if self._done == self._count or time.monotonic() >= self._next:
            self._next = time.monotonic() + _SAY_EVERY_SECONDS
            print(f"{self._done}/{self._count} samples written", file=sys.stderr, flush=True)


def _nobody(samples: int, size: int) -> None:
    """Progress that nobody asked for."""
