"""Hugging Face datasets from record files, and record files from them.

    data = ffserve.hf.dataset("/data/*.tfrecord", decode=ffserve.example.decode)
    ffserve.hf.write(data, "/data/train.ffr", encode=lambda row: row["text"].encode())

``dataset`` is a ``datasets.IterableDataset`` with one of its shards a file, so that it can be
split over workers and nodes; nothing is copied into a cache of Arrow files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import ffserve
from ffserve import formats
from ffserve.dataset import PathLike, expand_paths
from ffserve.errors import UsageError


def _as_bytes(sample: Any) -> dict[str, Any]:
    return {"sample": sample.tobytes()}


def _rows(
    paths: list[str], decode: Callable[[Any], Mapping[str, Any]], options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for path in paths:
        with ffserve.open(path, **options) as reader:
            for batch in reader.batches():
                for sample in batch:
                    yield dict(decode(sample))


def dataset(
    paths: Any, *, decode: Callable[[Any], Mapping[str, Any]] = _as_bytes, **options: Any
) -> Any:
    """Return samples as a ``datasets.IterableDataset``.

    Args:
        paths: as for ``ffserve.open``.
        decode: from a sample (uint8 array, valid during the call) to the columns of a row. The
            default gives one column, ``sample``, of bytes.
        options: as for ``ffserve.open``.
    Returns: an iterable dataset of as many shards as there are files.
    Raises:  UsageError without the package; iteration raises as ``ffserve.open`` and reading.
    """
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"datasets is not installed: {error}", hint="pip install 'ffserve[hf]'"
        ) from error
    files = list(expand_paths(paths, suffixes=formats.suffixes()))
    # Of the arguments only lists are split over shards.
    arguments = {"paths": files, "decode": decode, "options": options}
    return datasets.IterableDataset.from_generator(_rows, gen_kwargs=arguments)


def write(
    rows: Iterable[Mapping[str, Any]],
    path: PathLike,
    *,
    encode: Callable[[Mapping[str, Any]], Any] | None = None,
    **options: Any,
) -> int:
    """Write the rows of a dataset, or any mappings, as one record file.

    Args:
        rows: a ``Dataset``, an ``IterableDataset``, or anything that gives rows.
        path: the file.
        encode: from a row to the bytes of its record; None for ``ffserve.example.encode``.
        options: as for ``ffserve.create``.
    Returns: how many records were written.
    Raises:  as ``ffserve.create`` and ``encode``; nothing is left behind then.
    """
    from ffserve import example

    encoded = map(encode or example.encode, rows)
    with ffserve.create(path, **options) as writer:
        for record in encoded:
            writer.write(record)
    return writer.count
