"""Convert between record files and Hugging Face datasets.

    data = ffserve.hf.dataset("/data/*.tfrecord", decode=ffserve.example.decode)
    ffserve.hf.write(data, "/data/train.ffr", encode=lambda row: row["text"].encode())

    data = ffserve.hf.dataset("/data/*.tfrecord", schema=pyarrow.schema([("label", "int64")]))

``dataset`` returns a ``datasets.IterableDataset`` of many shards, so it can be split over workers
and machines: few files are read in parts. Nothing is copied into a cache of Arrow files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from ffserve import example, formats
from ffserve import reader as readers
from ffserve.dataset.paths import PathLike, expand_paths
from ffserve.errors import UsageError
from ffserve.writer import create


def _as_bytes(sample: Any) -> dict[str, Any]:
    if isinstance(sample, dict):
        return {name: None if one is None else one.tobytes() for name, one in sample.items()}
    return {"sample": sample.tobytes()}


SHARDS = 64
"""A data set has at least so many shards: the workers of several machines get some each."""

COMPRESSED = (".gz", ".zlib", ".deflate")
"""Suffixes of TFRecord files that are read in order: a part of one costs a pass over all of it."""

Part: TypeAlias = tuple[str, int, int]
"""A file, and which of how many parts of it."""


def _parts(files: list[str], least: int) -> list[Part]:
    """Return the shards of a data set; a compressed file, which is read in order, is one."""
    parts = -(-least // len(files))
    return [
        (path, k, of)
        for path in files
        for of in [1 if path.endswith(COMPRESSED) else parts]
        for k in range(of)
    ]


def _batches(part: Part, options: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yield the number of the first sample of each batch, and the batch."""
    path, k, parts = part
    with readers.open(path, **options) as reader:
        first, chosen = 0, None
        if parts > 1:
            first, stop = (len(reader) * edge // parts for edge in (k, k + 1))
            chosen = np.arange(first, stop)
        for batch in reader.batches(chosen):
            rows: Any = batch
            if isinstance(reader, readers.FieldReader):
                rows = reader.rows_of(rows)
            yield first, rows
            first += len(rows)


def _rows(
    parts: list[Part], decode: Callable[[Any], Mapping[str, Any]], options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for part in parts:
        for _, batch in _batches(part, options):
            for sample in batch:
                yield dict(decode(sample))


def _tables(
    parts: list[Part], schema: Any, record: str, options: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield keys, which differ, and tables."""
    import pyarrow as pa

    for part in parts:
        for first, batch in _batches(part, options):
            found = example.to_arrow(batch, schema, record=record, path=part[0], first=first)
            yield (*part, first), pa.Table.from_batches([found])


def dataset(
    paths: Any,
    *,
    decode: Callable[[Any], Mapping[str, Any]] = _as_bytes,
    schema: Any = None,
    record: str = "Example",
    num_shards: int = SHARDS,
    **options: Any,
) -> Any:
    """Return samples as a ``datasets.IterableDataset``.

    Args:
        paths: as for ``ffserve.open``.
        decode: converts a sample (uint8 array, valid during the call) to the columns of a row. The
            default returns one column ``sample`` of bytes; of samples with several fields, which
            are dicts, a column for each.
        schema: pyarrow.Schema, instead of ``decode``: the records are Examples, of which these
            columns are decoded, a batch at a time in C (``ffserve.example.to_arrow``). With
            ``with_format("arrow")`` they remain Arrow tables.
        record: "Example" or "SequenceExample", for ``schema``.
        num_shards: at least so many shards; with fewer files each is read in as many parts as are
            needed. A compressed TFRecord file is one shard.
        options: as for ``ffserve.open``.
    Returns: an iterable dataset.
    Raises:  UsageError: the package datasets is not installed, or both ``decode`` and ``schema``
             are given. Iteration raises as ``ffserve.open``, ``Reader.read`` and ``to_arrow``.
    """
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"datasets is not installed: {error}", hint="pip install 'ffserve[hf]'"
        ) from error
    if num_shards < 1:
        raise UsageError(f"num_shards={num_shards} must be at least 1")
    parts = _parts(list(expand_paths(paths, suffixes=formats.suffixes())), num_shards)
    if schema is not None:
        if decode is not _as_bytes:
            raise UsageError("both decode and schema are given", hint="give one of them")
        from datasets.iterable_dataset import ArrowExamplesIterable

        tables = ArrowExamplesIterable(
            _tables, {"parts": parts, "schema": schema, "record": record, "options": options}
        )
        features = datasets.Features.from_arrow_schema(schema)
        return datasets.IterableDataset(tables, info=datasets.DatasetInfo(features=features))
    # Only lists in gen_kwargs are split over shards.
    arguments = {"parts": parts, "decode": decode, "options": options}
    return datasets.IterableDataset.from_generator(_rows, gen_kwargs=arguments)


def write(
    rows: Iterable[Mapping[str, Any]],
    path: PathLike,
    *,
    encode: Callable[[Mapping[str, Any]], Any] | None = None,
    **options: Any,
) -> int:
    """Write the rows of a dataset, or any mappings, to a record file.

    Args:
        rows: a ``Dataset``, an ``IterableDataset``, or any iterable of rows.
        path: the output file.
        encode: converts a row to the bytes of its record; None for ``ffserve.example.encode``.
        options: as for ``ffserve.create``.
    Returns: the number of records.
    Raises:  as ``ffserve.create`` and ``encode``; no file is left behind.
    """
    encoded = map(encode or example.encode, rows)
    with create(path, **options) as writer:
        for record in encoded:
            writer.write(record)
    return writer.count
