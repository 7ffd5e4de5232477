"""``inspect``, ``verify`` and ``cat``: look into record files, without a daemon."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from ffserve.cli import EXIT_BAD_DATA, report
from ffserve.cli.terminal import Progress, counted, histogram, print_facts, print_json, progress
from ffserve.config import format_size
from ffserve.errors import FFServeError, ReadError, SampleIndexError, UsageError
from ffserve.formats.base import ChunkedShard

if TYPE_CHECKING:
    import ffserve
    from ffserve.client.folder_index import Folder
    from ffserve.client.stream import StreamReader
    from ffserve.formats import Shard

BATCH_SIZE = 32 << 20
"""Bytes that one read of verify or cat asks for, unless a single sample is larger."""
BATCH_COUNT = 4096
CHECKSUMS = {0: "none", 1: "CRC-32 of every sample", 2: "CRC-32C of every sample"}

_format_option = click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help="ffrecord, recordio, …; by content, then suffix, when left out.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


def _files(paths: tuple[str, ...], format_name: str | None) -> list[str]:
    """Expand directories and patterns; what cannot be found stays, to be reported in its turn."""
    from ffserve import formats
    from ffserve.dataset import expand_paths

    names = (format_name,) if format_name else formats.NAMES
    suffixes = [suffix for name in names for suffix in formats.by_name(name).suffixes]
    files: list[str] = []
    for path in paths:
        try:
            files.extend(expand_paths(path, suffixes=suffixes))
        except ReadError:
            if os.path.isdir(path):
                raise
            files.append(os.path.abspath(path))
    return files


def _batches(sizes: NDArray[np.int64]) -> Iterator[range]:
    """Cut a run of samples into ranges of bounded bytes."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        limit = BATCH_SIZE + (int(ends[first - 1]) if first else 0)
        stop = int(np.searchsorted(ends, limit, side="right"))
        stop = min(max(stop, first + 1), first + BATCH_COUNT)
        yield range(first, stop)
        first = stop


# --------------------------------------------------------------------------- inspect


@dataclass(frozen=True)
class _Tables:
    """The tables of one file, and how many names the index sample of a packed folder holds."""

    shard: Shard
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    names: int | None


def _load(path: str, format_name: str | None) -> _Tables:
    """Read and check the tables of a file."""
    from ffserve.files import os_error, wrap_os_error
    from ffserve.shardfile import open_shard

    fd = wrap_os_error(lambda name: os.open(name, os.O_RDONLY | os.O_CLOEXEC), path)
    try:
        shard = open_shard(fd, path, format_name)
        offsets, lengths = np.empty(shard.count, np.uint64), np.empty(shard.count, np.uint64)
        shard.load(offsets, lengths, np.empty(shard.count, np.uint32))
        names = None
        if shard.format == "ffrecord" and shard.count and offsets[-1] + lengths[-1] <= shard.size:
            names = _count_names(fd, int(offsets[-1]), int(lengths[-1]), shard.count - 1)
    except OSError as error:
        if isinstance(error, FFServeError):
            raise
        raise os_error(error, path) from error
    finally:
        os.close(fd)
    return _Tables(shard, offsets, lengths, names)


def _count_names(fd: int, offset: int, size: int, count: int) -> int | None:
    """Return how many files the last sample names; None when it is a sample like the others."""
    from ffserve.client import folder_index

    if size > folder_index.SIZE_MAX or not folder_index.is_index(os.pread(fd, 16, offset)):
        return None
    names, folders = 0, [folder_index.decode(os.pread(fd, size, offset), count)]
    for folder in folders:
        for node in folder.values():
            if isinstance(node, int):
                names += 1
            else:
                folders.append(node)
    return names


def _describe(path: str, format_name: str | None) -> dict[str, Any]:
    """Return what is in one file."""
    from ffserve.client import stream

    if format_name in (None, "tfrecord") and stream.is_compressed(path):
        return _describe_stream(path)
    tables = _load(path, format_name)
    shard, offsets, lengths = tables.shard, tables.offsets, tables.lengths
    if isinstance(shard, ChunkedShard):
        return _describe_chunks(path, shard)
    cut = np.flatnonzero(offsets + lengths > shard.size)
    facts: dict[str, Any] = {
        "path": path,
        "format": shard.format,
        "samples": shard.count,
        "size_bytes": shard.size,
        "checksums": CHECKSUMS[shard.checksum_kind],
        "fingerprint": f"{shard.fingerprint:016x}",
        **_size_facts(lengths),
        "named_files": tables.names,
        "cut_samples": cut.tolist(),
    }
    return facts


def _describe_chunks(path: str, shard: ChunkedShard) -> dict[str, Any]:
    """Return what the headers of a file of chunks say; the samples' sizes stand inside."""
    about = shard.about()
    return {
        "path": path,
        "format": shard.format,
        "samples": shard.count,
        "size_bytes": shard.size,
        "checksums": CHECKSUMS[shard.checksum_kind].replace("sample", "chunk"),
        "fingerprint": f"{shard.fingerprint:016x}",
        "sample_size_bytes": None,
        "histogram": {},
        "named_files": None,
        "cut_samples": [],
        **about,
    }


def _describe_stream(path: str) -> dict[str, Any]:
    """Return what is in a compressed file, which has to be read for that."""
    from ffserve.client.stream import StreamReader

    with StreamReader((path,), verify=False) as reader:
        parts = [np.diff(batch.offsets) for batch in reader.batches()]
    lengths = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return {
        "path": path,
        "format": "tfrecord, compressed",
        "samples": len(lengths),
        "size_bytes": os.path.getsize(path),
        "checksums": CHECKSUMS[2],
        "fingerprint": None,
        **_size_facts(lengths),
        "named_files": None,
        "cut_samples": [],
    }


def _size_facts(lengths: NDArray[Any]) -> dict[str, Any]:
    """Return what there is to say about the samples' sizes."""
    if not len(lengths):
        return {"sample_size_bytes": None, "histogram": {}}
    # Sample sizes by powers of two: bin k holds sizes from 2^(k-1) up to 2^k - 1.
    bins = np.frexp(lengths.astype(np.float64))[1]
    counts = np.bincount(bins)
    return {
        "sample_size_bytes": {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "max": int(lengths.max()),
        },
        "histogram": {
            int(1 << k >> 1): int(counts[k]) for k in range(int(bins.min()), len(counts))
        },
    }


def _print_description(facts: dict[str, Any]) -> None:
    click.echo(click.style(facts["path"], bold=True))
    lines = [
        ("format", facts["format"]),
        ("samples", f"{facts['samples']:,}"),
        ("file size", format_size(facts["size_bytes"])),
        ("checksums", facts["checksums"]),
    ]
    if "chunks" in facts:
        decoded, largest = facts["decoded_size_bytes"], facts["largest_chunk_size_bytes"]
        lines += [
            ("dialect", facts["dialect"]),
            ("compression", facts["compression"]),
            ("chunks", f"{facts['chunks']:,}, the largest {format_size(largest)}"),
            ("decoded size", format_size(decoded)),
        ]
    sizes = facts["sample_size_bytes"]
    if sizes:
        shown = "   ".join(f"{name} {format_size(sizes[name])}" for name in sizes)
        lines.append(("sample sizes", shown))
        bounds = list(facts["histogram"])
        bars = histogram(list(facts["histogram"].values()))
        last = format_size(2 * bounds[-1] if bounds[-1] else 1)
        lines.append(("", f"{format_size(bounds[0])} {bars} {last}"))
    if facts["named_files"] is not None:
        lines.append(("names", f"{facts['named_files']:,} files (PackedFolder)"))
    cut = facts["cut_samples"]
    if cut:
        some = ", ".join(map(str, cut[:5])) + (", …" if len(cut) > 5 else "")
        lines.append(
            ("damage", f"behind the end of the file: {counted(len(cut), 'sample')}, {some}")
        )
    print_facts(lines)


@click.command()
@click.argument("files", nargs=-1, required=True)
@_format_option
@_json_option
def inspect(files: tuple[str, ...], format_name: str | None, as_json: bool) -> int:
    """Show what is in record files: samples, their sizes, checksums, names.

    Only metadata are read, and checked. FILES are files, directories or patterns. The exit code
    is 1 when a file is not a sound record file.

    \b
      ffserve inspect train.ffr
      ffserve inspect --json /data/shards | jq '.[].samples'
    """
    described: list[dict[str, Any]] = []
    bad = False
    for path in _files(files, format_name):
        try:
            facts = _describe(path, format_name)
        except UsageError:
            raise
        except FFServeError as error:
            bad = True
            described.append({"path": path, "error": error.code, "message": str(error)})
            if not as_json:
                report(error)
            continue
        bad = bad or bool(facts["cut_samples"])
        described.append(facts)
        if not as_json:
            _print_description(facts)
    if as_json:
        print_json(described)
    return EXIT_BAD_DATA if bad else 0


# --------------------------------------------------------------------------- verify


class _Findings:
    """What verify found so far, over all threads."""

    def __init__(self, shown: Progress, *, quiet: bool) -> None:
        self.samples = 0
        self.size = 0
        self.damaged: list[dict[str, Any]] = []
        self.unreadable: list[dict[str, Any]] = []
        self.stopped = False
        self._shown = shown
        self._quiet = quiet
        self._lock = threading.Lock()

    def count(self, samples: int, size: int) -> None:
        with self._lock:
            self.samples += samples
            self.size += size
        self._shown.advance(size)

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
    from ffserve.client import stream
    from ffserve.client.reader import Reader
    from ffserve.files import os_error

    try:
        if format_name in (None, "tfrecord") and stream.is_compressed(path):
            _verify_stream(stream.StreamReader((path,), tolerant=True), path, findings)
            return
        # Tolerant, so that a file damaged between its samples is still read to its end.
        with Reader((path,), format_name, "off", True, tolerant=True) as reader:
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


def _verify_stream(reader: StreamReader, path: str, findings: _Findings) -> None:
    with reader:
        for batch in reader.batches():
            if findings.stopped:
                return
            findings.count(len(batch), batch.buffer.nbytes)
        for error in reader.damaged:
            findings.sample(path, error.index or 0, error)


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--jobs", type=click.IntRange(1, 256), default=min(4, os.cpu_count() or 1),
    show_default=True, help="Files at once.",
)  # fmt: skip
@_format_option
@_json_option
def verify(files: tuple[str, ...], jobs: int, format_name: str | None, as_json: bool) -> int:
    """Read everything and check every checksum.

    FILES are files, directories or patterns. A line is written for each damaged sample and for
    each file that cannot be opened; the others are still read. The exit code is 1 if there was
    any.

    \b
      ffserve verify /data/shards && echo sound
      ffserve verify --json train.ffr | jq '.damaged[].index'
    """
    paths = _files(files, format_name)
    total = sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
    with progress("verifying", total, as_bytes=True) as shown:
        findings = _Findings(shown, quiet=as_json)
        with ThreadPoolExecutor(jobs) as pool:
            tasks = [pool.submit(_verify_file, path, format_name, findings) for path in paths]
            try:
                for task in tasks:
                    task.result()
            except BaseException:
                findings.stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    bad = bool(findings.damaged or findings.unreadable)
    if as_json:
        print_json(
            {
                "files": len(paths),
                "samples": findings.samples,
                "size_bytes": findings.size,
                "damaged": sorted(findings.damaged, key=lambda e: (e["path"], e["index"])),
                "unreadable": sorted(findings.unreadable, key=lambda e: str(e["path"])),
            }
        )
    else:
        click.echo(
            f"{counted(len(paths), 'file')}, {counted(findings.samples, 'sample')}, "
            f"{format_size(findings.size)}: "
            + (
                f"{counted(len(findings.damaged), 'damaged sample')}, "
                f"{counted(len(findings.unreadable), 'unreadable file')}"
                if bad
                else "all sound"
            )
        )
    return EXIT_BAD_DATA if bad else 0


# --------------------------------------------------------------------------- cat


def _is_text(sample: NDArray[np.uint8]) -> bool:
    try:
        text = sample.tobytes().decode()
    except UnicodeDecodeError:
        return False
    return all(char.isprintable() or char in "\t\n\r" for char in text)


def _write(samples: list[NDArray[np.uint8]], *, force: bool) -> None:
    out = sys.stdout.buffer
    for sample in samples:
        if sys.stdout.isatty() and not force and not _is_text(sample):
            raise UsageError(
                "this sample is binary and standard output is a terminal",
                hint="redirect it to a file, or add --force",
            )
        out.write(sample.data)
    out.flush()


def _as_indices(word: str, count: int) -> range | None:
    """Return the samples that ``7`` or ``3:9`` means; None when it must be a name."""
    if word.isascii() and word.isdecimal():
        return range(int(word), int(word) + 1)
    first, colon, stop = word.partition(":")
    parts = (first or "0", stop or str(count))
    if colon and all(part.isascii() and part.isdecimal() for part in parts):
        return range(int(parts[0]), int(parts[1]))
    return None


@click.command()
@click.argument("file")
@click.argument("which", nargs=-1, required=True, metavar="INDEX|NAME...")
@click.option("--force", is_flag=True, help="Write binary to a terminal.")
@click.option(
    "--server", default="off", show_default=True, metavar="off|auto|require|SOCKET",
    help="Read through the daemon.",
)  # fmt: skip
@_format_option
def cat(
    file: str, which: tuple[str, ...], force: bool, server: str, format_name: str | None
) -> int:
    """Write samples to standard output, byte for byte, one after the other.

    Each is an index, a run of them such as 3:9, or, in a file made by 'ffserve pack DIR', a name.

    \b
      ffserve cat train.ffr 0 > first.jpg
      ffserve cat photos.ffr cats/tom.jpg > tom.jpg
    """
    import ffserve
    from ffserve.client.stream import StreamReader

    with ffserve.open(file, format=format_name, server=server) as reader:
        if isinstance(reader, StreamReader):
            _cat_stream(reader, which, file, force=force)
            return 0
        asked = [(word, _as_indices(word, len(reader))) for word in which]
        folders = _folders(reader) if any(indices is None for _, indices in asked) else []
        # All of them, before anything is written.
        wanted = [
            [_named(folders, word, file)] if indices is None else indices for word, indices in asked
        ]
        for indices in wanted:
            if len(indices) == 1:
                _write(reader.read(indices), force=force)
                continue
            for batch in _batches(reader.estimates(indices)):
                _write(reader.read(indices[batch.start : batch.stop]), force=force)
    return 0


def _cat_stream(reader: StreamReader, which: tuple[str, ...], file: str, *, force: bool) -> None:
    """Write samples of a compressed file, read from its beginning to the last that is wanted."""
    asked = [_as_indices(word, 0) for word in which]
    if any(indices is None or not indices for indices in asked):
        raise UsageError(
            "a compressed file has neither names nor an end that is known: give indices, or runs "
            "with both ends",
            path=file,
        )
    wanted = [index for indices in asked if indices for index in indices]
    missing, found = set(wanted), {}
    for index, sample in enumerate(reader):
        if index in missing:
            found[index] = sample
            missing.remove(index)
        if not missing:
            break
    if missing:
        raise SampleIndexError(
            f"sample index {min(missing)} is outside the file of {index + 1} samples", path=file
        )
    _write([found[index] for index in wanted], force=force)


def _folders(reader: ffserve.Reader) -> list[tuple[int, Folder]]:
    """Return each shard's first sample and names, for the shards that have names."""
    from ffserve.client import folder_index

    folders = []
    for shard in reader.shards:
        if shard.count:
            [last] = reader.read([shard.first + shard.count - 1])
            if folder_index.is_index(last[:16].tobytes()):
                folders.append((shard.first, folder_index.decode(last.data, shard.count - 1)))
    return folders


def _named(folders: list[tuple[int, Folder]], name: str, file: str) -> int:
    """Return the sample that a name means."""
    for first, folder in folders:
        node: Any = folder
        for part in PurePath(name).parts:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, int):
            return first + node
    raise UsageError(
        f"no file is called {name!r}" if folders else f"{name!r} is no index, and it has no names",
        path=file,
        hint="'ffserve inspect' shows how many samples and names there are",
    )
