"""Convert record files, directories, tar files, arrays and others to record files of any format.

    convert.convert(["/data/*.tfrecord.gz"], "/fast/train", format="ffrecord", shards=64, jobs=8)

The input is a list of sources (``inputs.py``). Its records are split into as many runs as there
are output shards, and worker processes write one shard each. A shard takes its name only when it
is complete and synced, and the output directory stores an identifier of the conversion. So an
interrupted conversion that is started again writes only the missing shards.

Names of files and of tar members are kept. FFRecord stores them like a packed folder, in one more
sample at the end of each shard. In the other formats a record is a group of files whose names are
equal up to the first dot, as in WebDataset: a sample with fields in tar, and in those that cannot
store names one ``tf.train.Example``: "cats/1.jpg" and "cats/1.cls" become {"__key__": "cats/1",
"jpg": …, "cls": …}. So a tar file with several members for one sample is not converted to FFRecord.
``names="drop"`` stores the content of the files only.

Samples of other packages (``kinds``) have columns. Tar has fields for them; other formats hold one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ffserve import Batch
from ffserve import folders as packed_folders
from ffserve import reader as readers
from ffserve.convert.inputs import Grouped, InputSource, RecordFiles, TarMembers, find_sources
from ffserve.convert.locations import remove, version_of
from ffserve.dataset.paths import PathLike
from ffserve.engine.codec import crc32c
from ffserve.errors import ChecksumError, FFServeError, UsageError
from ffserve.inputs.outputs import output_directory
from ffserve.reader import StreamReader
from ffserve.store.public import is_url, shown
from ffserve.system import parallel
from ffserve.writer import Writer, create, flat, format_of

PLAN_NAME = ".ffserve-convert.json"
_REPORT_SIZE = 32 << 20

Names = Literal["keep", "drop"]


@dataclass(frozen=True)
class ConversionReport:
    """The result of ``convert``."""

    paths: tuple[str, ...]
    """The output files, in order."""
    samples: int
    """Number of records, without the samples that store names."""
    bytes: int
    """Total size of the records."""
    kept: int
    """Number of shards that an earlier run had already written."""


@dataclass(frozen=True)
class _ShardTask:
    """One output shard: runs of records (source, first, stop), and how to write them."""

    out: str
    runs: tuple[tuple[InputSource, int, int | None], ...]
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
    kind: str | None = None,
    fields: Sequence[str] | None = None,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Convert files to record files.

    Args:
        inputs: record files of any format, glob patterns, tar files (also compressed), ``.npy``
            arrays (each row is a record), text files (``.txt``, ``.jsonl``, ``.ndjson``: each line
            is a record), what other packages write (``kinds.KINDS``), and directories of these; of
            any other directory each file below it becomes a record. Record files, tar files and
            text files may be URLs. Read in the given order.
        out: the output file, or its URL; with several shards a directory, which receives
            ``PART_00000`` and so on.
        format: output format; None decides by the suffix of ``out``.
        shards: number of output files; their numbers of records differ by at most one.
        jobs: number of worker processes (spawned: a script needs a ``__main__`` guard).
        compression, dialect, max_chunk_size: as for ``ffserve.create``.
        names: ``"keep"`` or ``"drop"`` the names of files, see the module's description.
        kind: what the inputs are, a name of ``kinds.KINDS``; None recognizes it.
        fields: columns to take, each as ``COLUMN`` or ``NAME=COLUMN``; None for all. A tar file
            gets them as fields of its samples, another format holds one.
        verify: read every shard that this call writes back and compare it with the input.
        progress: called with the records and bytes done since the last call.
    Returns: the output files and their number and size of records.
    Raises:  FormatError, ChecksumError, TruncatedError: the input is damaged. UsageError: no
             input, several columns for a format that holds one, a package that is not installed,
             an unsupported option, or an output directory with other content. MissingFile,
             ReadError, AccessDenied. Finished shards are kept for the next run.
    Cost:    one pass over input and output, and one more over the output to verify. Several
             shards of compressed TFRecord input need its index. Memory: a few batches per process.
    """
    if shards < 1 or jobs < 1:
        raise UsageError(f"shards={shards} and jobs={jobs} must be at least 1")
    if names not in ("keep", "drop"):
        raise UsageError(f"invalid names={names!r}", hint="use 'keep' or 'drop'")
    target = os.fsdecode(out)
    target = target.rstrip("/") if is_url(target) else target
    chosen = format_of(target, format)
    options: dict[str, Any] = {
        "compression": compression,
        "dialect": dialect,
        "max_chunk_size": max_chunk_size,
    }
    chosen.writer(**options)  # checks the options before anything is read
    sources = find_sources(
        inputs, target, chosen.name, names=names == "keep", kind=kind, fields=fields
    )
    keep = names == "keep" and any(source.named for source in sources)
    for source in sources if keep else ():
        if isinstance(source, RecordFiles) and source.labelled:
            raise UsageError(
                "the files have labels, which a conversion does not keep",
                path=source.files[0],
                hint="pack their directory again with --labels, or drop names (--drop-names)",
            )
    if keep and chosen.name != "ffrecord":
        tar = chosen.name == "tar"
        sources = [Grouped(s, fields=tar) if s.named else s for s in sources]
        keep = False
    suffix = chosen.suffixes[0]
    if chosen.name == "tfrecord" and compression not in (None, "none"):
        suffix += {"gzip": ".gz", "zlib": ".zlib"}[str(compression)]
    if shards == 1:
        whole = tuple((source, 0, source.count if source.sized else None) for source in sources)
        paths, done = [target], 0
        tasks = [_ShardTask(target, whole, chosen.name, options, keep, verify)]
    else:
        plan = _plan(sources, [chosen.name, options, shards, names, kind, fields])
        paths = [os.path.join(target, f"PART_{k:05d}{suffix}") for k in range(shards)]
        there = _claim(target, plan, {os.path.basename(path) for path in paths})
        cut = _cut(sources, shards)
        tasks = [
            _ShardTask(path, runs, chosen.name, options, keep, verify)
            for path, runs in zip(paths, cut, strict=True)
            if os.path.basename(path) not in there
        ]
        done = shards - len(tasks)
    results = parallel.run(
        _write, [(task.out, task) for task in tasks], jobs=jobs, method="spawn", progress=progress
    )
    samples, size = (sum(column) for column in zip(*results, strict=True)) if results else (0, 0)
    return ConversionReport(tuple(paths), samples, size, done)


def _cut(
    sources: list[InputSource], shards: int
) -> list[tuple[tuple[InputSource, int, int | None], ...]]:
    """Split all records into runs of nearly equal length."""
    counts = [source.count for source in sources]
    total = sum(counts)
    if total < shards:
        raise UsageError(
            f"cannot split {total} records into {shards} shards",
            hint=f"use at most {total} shards",
        )
    edges = [total * k // shards for k in range(shards + 1)]
    runs: list[tuple[tuple[InputSource, int, int | None], ...]] = []
    for first, stop in pairwise(edges):
        part: list[tuple[InputSource, int, int | None]] = []
        begin = 0
        for source, count in zip(sources, counts, strict=True):
            low, high = max(first - begin, 0), min(stop - begin, count)
            if low < high:
                part.append((source, low, high))
            begin += count
        runs.append(tuple(part))
    return runs


# ---- the output directory ------------------------------------------------------------------------


def _plan(sources: list[InputSource], options: list[Any]) -> str:
    """Return the identifier of a conversion: a digest of its input files and its options."""
    facts: list[Any] = [options]
    facts += [version_of(path) for source in sources for path in source.files]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _claim(directory: str, plan: str, names: set[str]) -> set[str]:
    """Create the output directory, or check that it belongs to the same conversion; return the
    names of the files in it."""
    if not is_url(directory) and os.path.lexists(directory) and not os.path.isdir(directory):
        raise UsageError(
            "the output is a file, but several shards need a directory",
            path=directory,
            hint="choose another path, or use one shard",
        )
    place = output_directory(directory)
    there = {name for name in place.entries("") if not name.startswith(".")}
    try:
        known = json.loads(place.read(PLAN_NAME) or b"{}").get("plan")
    except (ValueError, AttributeError):
        known = None
    if known == plan and there <= names:
        return there
    if there:
        raise UsageError(
            "the output directory contains other files, or shards of another conversion (different "
            "or changed input, or different options)",
            path=shown(directory),
            hint="remove it, or choose another directory",
        )
    place.make("")
    place.write(PLAN_NAME, json.dumps({"plan": plan}).encode())
    return there


# ---- one shard -----------------------------------------------------------------------------------


def _write(out: str, task: _ShardTask, report: parallel.Progress) -> tuple[int, int]:
    """Write one shard; return the number and total size of its records."""
    top: packed_folders.Folder = OrderedDict()
    reported = reported_size = size = 0
    written = _Digest()
    stops = [None if stop is None else stop - first for _, first, stop in task.runs]
    # With a known number of samples, FFRecord needs no spool file.
    n = None if None in stops else sum(filter(None, stops)) + task.names
    with create(out, format=task.format, n=n, **task.options) as writer:
        for source, first, stop in task.runs:
            key = None
            for record in source.records(first, stop):
                if isinstance(record, Batch):
                    writer.write_batch(record.buffer, record.offsets)
                    size += record.buffer.nbytes
                    if task.verify:
                        written.take(record.buffer.data, np.diff(record.offsets))
                elif isinstance(record.payload, dict):
                    writer.write(record.payload, key=record.name)
                    size += sum(map(len, record.payload.values()))
                    written.take_fields(record.payload.values() if task.verify else ())
                else:
                    payload = flat(record.payload)
                    if task.names and record.name is not None:
                        if isinstance(source, TarMembers):
                            key = source.check_key(key, record.name)
                        _enter(top, record.name, writer)
                    writer.write(payload)
                    size += len(payload)
                    if task.verify:
                        written.take(payload, np.array([len(payload)], np.int64))
                if writer.count - reported >= 1024 or size - reported_size >= _REPORT_SIZE:
                    report(writer.count - reported, size - reported_size)
                    reported, reported_size = writer.count, size
        samples = writer.count
        if task.names:
            writer.write(packed_folders.encode(top))
    report(samples - reported, size - reported_size)
    if task.verify:
        _compare(out, samples, written, members=task.format == "tar")
    return samples, size


class _Digest:
    """Checksums of the bytes and of the lengths of records, independent of batch boundaries."""

    def __init__(self) -> None:
        self.count = self._payloads = self._lengths = 0

    def take(self, payloads: memoryview, lengths: NDArray[np.int64]) -> None:
        """Add records that are stored back to back."""
        self.count += len(lengths)
        self._payloads = crc32c(payloads, self._payloads)
        self._lengths = crc32c(lengths.tobytes(), self._lengths)

    def take_fields(self, fields: Iterable[bytes]) -> None:
        """Add the members of a sample."""
        for each in fields:
            self.take(memoryview(each), np.array([len(each)], np.int64))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Digest) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def _enter(top: packed_folders.Folder, name: str, writer: Writer) -> None:
    *folders, last = name.split("/")
    node = top
    for part in folders:
        node = node.setdefault(part, OrderedDict())
        if not isinstance(node, OrderedDict):
            raise UsageError(
                f"a parent of {name!r} is a file in another input",
                path=writer.path,
                hint="convert the inputs separately, or drop names",
            )
    if last in node:
        raise UsageError(
            f"two inputs have the name {name!r}",
            path=writer.path,
            hint="convert them separately, or drop names",
        )
    node[last] = writer.count


def _compare(path: str, samples: int, expected: _Digest, *, members: bool) -> None:
    """Read a shard back; remove it if it cannot be read or differs from the input. Args: members:
    it is a tar file, of which each member is compared."""
    found = _Digest()
    options: dict[str, Any] = {}
    if members:
        samples, options = expected.count, {"format": "tar", "whole": True}
    try:
        with readers.open_files(path, server="off", **options) as reader:
            indices = None if isinstance(reader, StreamReader) else np.arange(samples)
            for batch in reader.batches(indices):
                found.take(batch.buffer.data, np.diff(batch.offsets))
        if found != expected or found.count != samples:
            raise ChecksumError(
                "verification failed: the written records differ from the input; the file was "
                "removed",
                path=path,
                hint="check the disk and the memory of this machine",
            )
    except FFServeError:
        remove(path)
        raise
