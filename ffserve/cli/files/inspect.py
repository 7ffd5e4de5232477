"""``ffserve inspect``: samples, sizes, checksums and names of record files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from ffserve.cli import EXIT_BAD_DATA, exit_code_of_all, report
from ffserve.cli.files.record_files import files_of
from ffserve.cli.flags import format_option, json_option
from ffserve.cli.terminal import counted, histogram, print_facts, print_json
from ffserve.config import format_size
from ffserve.errors import FFServeError, UsageError, printable
from ffserve.formats.base import ChunkedShard, ReadAt, ScannedShard, members_of
from ffserve.store.urls import is_url

if TYPE_CHECKING:
    from ffserve.formats import Shard

_EXAMPLE_SIZE_MAX = 64 << 20
"""A larger record is not read to show its features."""
CHECKSUMS = {
    0: "of headers only, none of contents ('ffserve convert' gives them)",
    1: "CRC-32 of every sample",
    2: "CRC-32C of every sample",
}


@dataclass(frozen=True)
class _FileTables:
    """The tables of one file, the number of names if it is a packed folder, and the features of
    the first record if it is a tf.train.Example."""

    shard: Shard
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    names: int | None
    features: dict[str, str]


def _load(path: str, format_name: str | None) -> _FileTables:
    """Read and check the tables of a file."""
    from ffserve.disk.files import open_regular, os_error, read_at_of
    from ffserve.disk.shardfile import open_shard

    if is_url(path):
        return _load_remote(path, format_name)
    fd = open_regular(path)
    try:
        return _tables(open_shard(fd, path, format_name), read_at_of(fd, path), path)
    except OSError as error:
        if isinstance(error, FFServeError):
            raise
        raise os_error(error, path) from error
    finally:
        os.close(fd)


def _load_remote(url: str, format_name: str | None) -> _FileTables:
    from ffserve.store.public import RangedObject, identity_of, parsed

    opened = RangedObject(identity_of(url))
    read_at = opened.read_at()
    return _tables(parsed(read_at, opened.size, opened.shown, format_name), read_at, opened.shown)


def _tables(shard: Shard, read_at: ReadAt, path: str) -> _FileTables:
    offsets, lengths = np.empty(shard.count, np.uint64), np.empty(shard.count, np.uint64)
    shard.load(offsets, lengths, np.empty(shard.count, np.uint32))
    names, features = None, {}
    if shard.format == "ffrecord" and shard.count and offsets[-1] + lengths[-1] <= shard.size:
        names = _count_names(read_at, path, int(offsets[-1]), int(lengths[-1]), shard.count - 1)
    if shard.format == "tfrecord" and shard.count and not isinstance(shard, ChunkedShard):
        features = _features(read_at, path, int(offsets[0]), int(lengths[0]))
    return _FileTables(shard, offsets, lengths, names, features)


def _features(read_at: ReadAt, path: str, offset: int, size: int) -> dict[str, str]:
    """Return the features of a record if it is a tf.train.Example that is not very large."""
    from ffserve.engine.example import types_of
    from ffserve.formats.base import read_exactly

    record = np.empty(size if size <= _EXAMPLE_SIZE_MAX else 0, np.uint8)
    read_exactly(read_at, offset, record.data, path)
    return types_of(record)


def _count_names(read_at: ReadAt, path: str, offset: int, size: int, count: int) -> int | None:
    """Return the number of names in the last sample; None if that sample is not an index."""
    from ffserve import folders as packed_folders
    from ffserve.formats.base import read_exactly

    if size > packed_folders.SIZE_MAX:
        return None
    head = bytearray(min(size, 16))
    read_exactly(read_at, offset, memoryview(head), path)
    if not packed_folders.is_index(bytes(head)):
        return None
    sample = bytearray(size)
    read_exactly(read_at, offset, memoryview(sample), path)
    names, folders = 0, [packed_folders.decode(bytes(sample), count, path=path, index=count)]
    for folder in folders:
        for node in folder.values():
            if isinstance(node, int):
                names += 1
            else:
                folders.append(node)
    return names


def _describe(path: str, format_name: str | None) -> dict[str, Any]:
    """Return the facts about one file."""
    tables = _load(path, format_name)
    shard, offsets, lengths = tables.shard, tables.offsets, tables.lengths
    about: dict[str, Any] = {}
    cut = np.zeros(0, np.int64)
    checksums = CHECKSUMS[shard.checksum_kind]
    if isinstance(shard, ChunkedShard):
        about = shard.about()
        if not isinstance(shard, ScannedShard):  # the headers lack the samples' sizes
            lengths, checksums = lengths[:0], checksums.replace("sample", "chunk")
    else:
        cut = np.flatnonzero(offsets + lengths > shard.size)
    members = members_of(shard)
    if members is not None:
        fields, skipped = list(members.fields), members.skipped
        about = {"members": shard.count, "fields": fields, "skipped_files": skipped}
    return {
        "path": path,
        "format": shard.format,
        "samples": shard.count if members is None else members.samples,
        "size_bytes": shard.size,
        "checksums": checksums,
        "fingerprint": f"{shard.fingerprint:016x}",
        **_size_facts(lengths),
        "named_files": tables.names,
        "features": tables.features,
        "cut_samples": cut.tolist(),
        **about,
    }


def _size_facts(lengths: NDArray[Any]) -> dict[str, Any]:
    """Return the distribution of the samples' sizes."""
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
    click.echo(click.style(printable(facts["path"]), bold=True))
    samples, files = f"{facts['samples']:,}", facts["named_files"]
    if files is not None:
        samples = f"{samples}: {counted(files, 'file')}, and one with their names"
    lines = [
        ("format", facts["format"]),
        ("samples", samples),
        ("file size", format_size(facts["size_bytes"])),
        ("checksums", facts["checksums"]),
    ]
    if "fields" in facts:
        fields = facts["fields"]
        some = ", ".join(map(printable, fields[:20])) + (", …" if len(fields) > 20 else "")
        lines.append(("fields", some or "none"))
        lines.append(("members", f"{facts['members']:,}"))
        if facts["skipped_files"]:
            count = counted(facts["skipped_files"], "file")
            lines.append(("left out", f"{count} of no sample: no extension, or hidden"))
    if "chunks" in facts:
        decoded, largest = facts["decoded_size_bytes"], facts["largest_chunk_size_bytes"]
        lines += [
            *([("dialect", facts["dialect"])] if "dialect" in facts else []),
            ("compression", facts["compression"]),
            ("chunks", f"{facts['chunks']:,}, the largest {format_size(largest)}"),
            ("decoded size", format_size(decoded)),
        ]
    sizes = facts["sample_size_bytes"]
    if sizes:
        shown = "   ".join(f"{name} {format_size(sizes[name])}" for name in sizes)
        what = "member" if "members" in facts else "sample"
        lines.append((f"{what} sizes", shown))
        bounds = list(facts["histogram"])
        bars = histogram(list(facts["histogram"].values()))
        last = format_size(2 * bounds[-1] if bounds[-1] else 1)
        lines.append(("", f"{format_size(bounds[0])} {bars} {last}"))
    if facts["features"]:
        features = [f"{name}: {kind}" for name, kind in facts["features"].items()]
        lines += [("" if k else "features", each) for k, each in enumerate(features[:50])]
    cut = facts["cut_samples"]
    if cut:
        some = ", ".join(map(str, cut[:5])) + (", …" if len(cut) > 5 else "")
        lines.append(
            ("damage", f"{counted(len(cut), 'sample')} beyond the end of the file: {some}")
        )
    print_facts(lines)


@click.command()
@click.argument("files", nargs=-1, required=True)
@format_option
@json_option
def inspect(files: tuple[str, ...], format_name: str | None, as_json: bool) -> int:
    """Show samples, sizes, checksums and names of record files.

    Only metadata are read and checked; of TFRecord files also the first record, whose features are
    shown. FILES are files, directories, patterns or URLs. The exit code is
    1 if a file is not a valid record file, and 2 if files are missing or not readable.

    \b
      ffserve inspect train.ffr
      ffserve inspect --json /data/shards | jq '.[].samples'
    """
    described: list[dict[str, Any]] = []
    for path in files_of(files, format_name):
        try:
            facts = _describe(path, format_name)
        except UsageError:
            raise
        except FFServeError as error:
            described.append({"path": path, "error": error.code, "message": str(error)})
            if not as_json:
                report(error)
            continue
        described.append(facts)
        if not as_json:
            _print_description(facts)
    if as_json:
        print_json(described)
    if any(facts.get("cut_samples") for facts in described):
        return EXIT_BAD_DATA
    return exit_code_of_all(facts["error"] for facts in described if "error" in facts)
