"""From any records to record files of any format: ``ffserve convert`` and what is behind it.

    convert.convert(["/data/*.tfrecord.gz"], "/fast/train", format="ffrecord", shards=64, jobs=8)

What is read is a list of sources; what each can be read from is in ``sources.py``. Records are cut
into as many runs as there are shards, and processes write one shard each. A shard takes its name
when it is complete and synced, and the directory remembers what it is made of; so a conversion
that was interrupted goes on with the shards that are missing when it is asked for again.

Names (of files, and of the members of tar files) are kept. FFRecord keeps them as its packed
folders do, in one more sample at the end of each shard. Formats that have no place for names get
one ``tf.train.Example`` for each group of files that share a name up to its first dot, as
WebDataset groups them: "cats/1.jpg" and "cats/1.cls" become {"__key__": "cats/1", "jpg": …,
"cls": …}. ``names="drop"`` stores the files alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ffserve import formats, parallel
from ffserve.client.source import Batch
from ffserve.compat import folder_index
from ffserve.convert.inputs import Grouped, Source, find_sources
from ffserve.dataset import PathLike
from ffserve.engine.codec import crc32c
from ffserve.errors import ChecksumError, UsageError
from ffserve.output import writing
from ffserve.writer import Writer, create, flat

PLAN_NAME = ".ffserve-convert.json"
_REPORT_COUNT = 1024
_REPORT_SIZE = 32 << 20

Names = Literal["keep", "drop"]


@dataclass(frozen=True)
class Report:
    """What ``convert`` wrote."""

    paths: tuple[str, ...]
    """The files, in order."""
    samples: int
    """Records in them, samples with names not counted."""
    bytes: int
    """Of the records."""
    kept: int
    """Shards that were there already, from an earlier run."""


@dataclass(frozen=True)
class _Task:
    """One shard: which records of which sources, and how it is written."""

    out: str
    runs: tuple[tuple[Source, int, int | None], ...]
    format: str
    options: dict[str, Any] = field(hash=False)
    names: bool
    verify: bool


def convert(
    inputs: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    format: str | None = None,
    shards: int = 1,
    jobs: int = 1,
    compression: str | None = None,
    dialect: str | None = None,
    max_chunk_size: int | None = None,
    names: Names = "keep",
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Write the records of any files into record files.

    Args:
        inputs: record files of any format, patterns of them, tar files (also compressed), ``.npy``
            arrays (each row's bytes are a record), directories: of record files or of tar files,
            else all files below become records. Read in the order given.
        out: the file; with several shards a directory, which gets ``PART_00000`` and so on.
        format: of what is written; by the suffix of ``out`` when left out.
        shards: files to write, each with as many records as the others (give or take one).
        jobs: processes at a time (started afresh: a script needs its ``__main__`` guard).
        compression, dialect, max_chunk_size: as for ``ffserve.create``.
        names: what becomes of names, see above.
        verify: read every shard back and compare it with what was written.
        progress: called with the records and bytes done since the last call.
    Returns: what was written.
    Raises:  FormatError, ChecksumError, TruncatedError: damaged input, which is not converted;
             UsageError: nothing to read, an option that the format lacks, a directory that holds
             something else; ReadError, AccessDenied. Finished shards stay then, for the next run.
    Cost:    one pass over the input and the output, one more over the output to verify. Compressed
             input is read from its beginning for every shard. Memory for a few batches a process.
    """
    if shards < 1 or jobs < 1:
        raise UsageError(f"shards={shards} and jobs={jobs} have to be 1 at least")
    if names not in ("keep", "drop"):
        raise UsageError(f"names is 'keep' or 'drop', not {names!r}")
    target = os.fsdecode(out)
    chosen = formats.by_name(format) if format else formats.by_suffix(target)
    if chosen is None:
        raise UsageError(
            "the suffix tells no format",
            path=target,
            hint=f"give the format, one of {', '.join(formats.NAMES)}",
        )
    options: dict[str, Any] = {
        "compression": compression,
        "dialect": dialect,
        "max_chunk_size": max_chunk_size,
    }
    chosen.writer(**options)  # refuses an option before anything is read
    sources = find_sources(inputs, target)
    keep = names == "keep" and any(source.named for source in sources)
    if keep and chosen.name != "ffrecord":
        sources = [Grouped(source) if source.named else source for source in sources]
        keep = False
    suffix = chosen.suffixes[0]
    if chosen.name == "tfrecord" and compression not in (None, "none"):
        suffix += {"gzip": ".gz", "zlib": ".zlib"}[str(compression)]
    if shards == 1:
        whole = tuple((source, 0, source.count if source.sized else None) for source in sources)
        paths, done = [target], 0
        tasks = [_Task(target, whole, chosen.name, options, keep, verify)]
    else:
        plan = _plan(sources, [chosen.name, options, shards, names])
        paths = [os.path.join(target, f"PART_{k:05d}{suffix}") for k in range(shards)]
        _prepare(target, plan, {os.path.basename(path) for path in paths})
        cut = _cut(sources, shards)
        tasks = [
            _Task(path, runs, chosen.name, options, keep, verify)
            for path, runs in zip(paths, cut, strict=True)
            if not os.path.exists(path)
        ]
        done = shards - len(tasks)
    results = parallel.run(
        _write, [(task.out, task) for task in tasks], jobs=jobs, method="spawn", progress=progress
    )
    samples, size = (sum(column) for column in zip(*results, strict=True)) if results else (0, 0)
    return Report(tuple(paths), samples, size, done)


def _cut(sources: list[Source], shards: int) -> list[tuple[tuple[Source, int, int | None], ...]]:
    """Cut all records into runs of as equal a number as can be."""
    counts = [source.count for source in sources]
    total = sum(counts)
    if total < shards:
        raise UsageError(
            f"{total} records do not fill {shards} shards", hint=f"shards={total} at most"
        )
    edges = [total * k // shards for k in range(shards + 1)]
    runs: list[tuple[tuple[Source, int, int | None], ...]] = []
    for first, stop in pairwise(edges):
        part: list[tuple[Source, int, int | None]] = []
        begin = 0
        for source, count in zip(sources, counts, strict=True):
            low, high = max(first - begin, 0), min(stop - begin, count)
            if low < high:
                part.append((source, low, high))
            begin += count
        runs.append(tuple(part))
    return runs


# ---- what a directory is made of -----------------------------------------------------------------


def _plan(sources: list[Source], options: list[Any]) -> str:
    """Return what identifies a conversion: its input, as it is now, and how it is written."""
    facts: list[Any] = [options]
    for source in sources:
        for path in source.files:
            status = os.stat(path)
            facts.append([os.path.abspath(path), status.st_size, status.st_mtime_ns])
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _prepare(directory: str, plan: str, names: set[str]) -> None:
    """Make the directory, or make sure that it is one of the same conversion."""
    with writing(directory):
        _claim(directory, plan, names)


def _claim(directory: str, plan: str, names: set[str]) -> None:
    place = os.path.join(directory, PLAN_NAME)
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise UsageError("several shards need a directory, and this is none", path=directory)
    os.makedirs(directory, exist_ok=True)
    there = {name for name in os.listdir(directory) if not name.startswith(".")}
    with contextlib.suppress(FileNotFoundError), open(place, encoding="utf-8") as file:
        try:
            known = json.load(file).get("plan")
        except (ValueError, AttributeError):
            known = None
        if known == plan and there <= names:
            return
    if there:
        raise UsageError(
            "the directory holds something else, or shards of another conversion (other input, "
            "changed input, or other options)",
            path=directory,
            hint="remove it, or choose another",
        )
    with open(place, "w", encoding="utf-8") as file:
        json.dump({"plan": plan}, file)


# ---- one shard -----------------------------------------------------------------------------------


def _write(out: str, task: _Task, report: parallel.Progress) -> tuple[int, int]:
    """Write one shard; return how many records and bytes it has."""
    top: folder_index.Folder = OrderedDict()
    reported = reported_size = size = 0
    written = _Digest()
    stops = [None if stop is None else stop - first for _, first, stop in task.runs]
    # Formats with tables in front need no second file if they know how long these will be.
    n = None if None in stops else sum(filter(None, stops)) + task.names
    with create(out, format=task.format, n=n, **task.options) as writer:
        for source, first, stop in task.runs:
            for record in source.records(first, stop):
                if isinstance(record, Batch):
                    writer.write_batch(record.buffer, record.offsets)
                    size += record.buffer.nbytes
                    if task.verify:
                        written.take(record.buffer.data, np.diff(record.offsets))
                else:
                    payload = flat(record.payload)
                    if task.names and record.name is not None:
                        _enter(top, record.name, writer)
                    writer.write(payload)
                    size += len(payload)
                    if task.verify:
                        written.take(payload, np.array([len(payload)], np.int64))
                if writer.count - reported >= _REPORT_COUNT or size - reported_size >= _REPORT_SIZE:
                    report(writer.count - reported, size - reported_size)
                    reported, reported_size = writer.count, size
        samples = writer.count
        if task.names:
            writer.write(folder_index.encode(top))
    report(samples - reported, size - reported_size)
    if task.verify:
        _compare(out, samples, written)
    return samples, size


class _Digest:
    """Of records, however they come in batches: a checksum of their bytes, one of their lengths."""

    def __init__(self) -> None:
        self.count = self._payloads = self._lengths = 0

    def take(self, payloads: memoryview, lengths: NDArray[np.int64]) -> None:
        """Add records that lie back to back."""
        self.count += len(lengths)
        self._payloads = crc32c(payloads, self._payloads)
        self._lengths = crc32c(lengths.tobytes(), self._lengths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Digest) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def _enter(top: folder_index.Folder, name: str, writer: Writer) -> None:
    *folders, last = name.split("/")
    node = top
    for part in folders:
        node = node.setdefault(part, OrderedDict())
        if not isinstance(node, OrderedDict):
            raise UsageError(f"{name!r} lies below something that is a file", path=writer.path)
    if last in node:
        raise UsageError(
            f"there are two files called {name!r}",
            path=writer.path,
            hint="convert them apart, or without names",
        )
    node[last] = writer.count


def _compare(path: str, samples: int, expected: _Digest) -> None:
    """Read a shard back; remove it if it is not what was written."""
    import ffserve
    from ffserve.client.stream import StreamReader

    found = _Digest()
    with ffserve.open(path, server="off") as reader:
        indices = None if isinstance(reader, StreamReader) else np.arange(samples)
        for batch in reader.batches(indices):
            found.take(batch.buffer.data, np.diff(batch.offsets))
    if found != expected or found.count != samples:
        os.unlink(path)
        raise ChecksumError(
            "what was read back is not what was written; the file was removed",
            path=path,
            hint="the disk or the memory of this machine is at fault",
        )
