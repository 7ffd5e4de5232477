"""Record files of any format as ``tf.data`` datasets.

    data = ffserve.tensorflow.dataset("/data/*.tfrecord").map(parse).batch(64).prefetch(2)
    data = ffserve.tensorflow.examples("/data/*.tfrecord", schema, batch=64).prefetch(2)

TensorFlow is imported when a dataset is created. Samples are scalars of ``tf.string``, as from
``tf.data.TFRecordDataset``; ``examples`` decodes Examples to columns.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ffserve.errors import UsageError
from ffserve.example import to_arrow
from ffserve.reader import FieldReader, Reader, StreamReader
from ffserve.reader import open as open_reader
from ffserve.recordio import index


def chunks(
    path: str | os.PathLike[str], start: int = 0, stop: int | None = None, **options: Any
) -> Any:
    """Return the records of a range of chunks of a RecordIO file, in order.

    Args:
        path: the file.
        start, stop: the chunks [start:stop]; stop=None means to the end.
            ``ffserve.recordio.index(path).partition(k)`` returns ranges for k jobs.
        options: as for ``dataset``.
    Returns, Raises: as ``dataset``.
    Cost:    as ``dataset``, plus one scan of the chunk headers.
    """
    firsts = [0, *index(path).counts.cumsum().tolist()]
    records = range(firsts[-1])[firsts[start] : None if stop is None else firsts[stop]]
    return dataset(path, indices=records, format="recordio", **options)


def dataset(
    paths: Any,
    *,
    indices: Any | Callable[[int], Any] | None = None,
    batch: int = 256,
    **options: Any,
) -> Any:
    """Return the samples of record files as a ``tf.data.Dataset``.

    Args:
        paths: as for ``ffserve.open``; or a Reader, which the caller keeps and must leave open.
        indices: samples in reading order, as for ``Reader.read``; or a function that returns them
            for an epoch (0, 1, …); None for all samples in order.
        batch: number of samples per read.
        options: as for ``ffserve.open``.
    Returns: a dataset of scalar ``tf.string``; each pass over it is the next epoch.
    Raises:  UsageError: TensorFlow is not installed. Otherwise as ``ffserve.open``. A sample that
             cannot be read raises TensorFlow's error with our message when it is due.
    Cost:    one more copy of each sample than with a Reader.
    """
    tf = _tensorflow()
    reader = _one_field(paths if isinstance(paths, Reader) else open_reader(paths, **options))
    batches = _epochs(reader, indices, batch, lambda part, _: _objects(map(bytes, part), len(part)))
    found = tf.data.Dataset.from_generator(
        batches, output_signature=tf.TensorSpec((None,), tf.string)
    ).unbatch()
    if callable(indices) or (indices is None and isinstance(reader, StreamReader)):
        return found  # to count the samples of compressed files, they would have to be read
    count = len(reader if indices is None else indices)
    return found.apply(tf.data.experimental.assert_cardinality(count))


def examples(
    paths: Any,
    schema: Any,
    *,
    indices: Any | Callable[[int], Any] | None = None,
    batch: int = 256,
    record: str = "Example",
    **options: Any,
) -> Any:
    """Return columns of Example records as a ``tf.data.Dataset`` of batches.

    Args:
        paths, indices: as for ``dataset``.
        schema: pyarrow.Schema of the wanted columns: int32, int64, float, double, string, binary,
            and lists of these; of a SequenceExample also lists of lists.
        batch: number of samples per element; fewer at the end, and where an ``indices`` ends.
        record: "Example" or "SequenceExample".
        options: as for ``ffserve.open``.
    Returns: a dataset of dicts: by column a tensor of n values, or of lists a RaggedTensor of n
        rows. A missing list is an empty row.
    Raises:  as ``dataset``. UsageError: a column of another type. Iteration raises TensorFlow's
             error with our message for a record that does not fit, and for a missing value of a
             column that is no list; its row counts in the order of reading.
    Cost:    a call of C per column and batch; features that are not wanted are skipped.
    """
    tf = _tensorflow()
    # A tensor has no null, so a column without one is what is asked for.
    wanted = _arrow().schema([one.with_nullable(_depth(one.type) > 0) for one in schema])
    signature = {one.name: _spec(tf, one) for one in schema}
    reader = _one_field(paths if isinstance(paths, Reader) else open_reader(paths, **options))

    path = os.fspath(paths) if isinstance(paths, (str, os.PathLike)) else None

    def columns(part: Any, first: int) -> dict[str, Any]:
        found = to_arrow(part, wanted, record=record, path=path, first=first)
        return {name: _tensor(tf, found.column(name)) for name in wanted.names}

    batches = _epochs(reader, indices, batch, columns)
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def _one_field(reader: Reader) -> Reader:
    """Return a reader whose samples are bytes. Raises: UsageError: they have several fields."""
    if isinstance(reader, FieldReader):
        raise UsageError(
            f"the samples have the fields {', '.join(reader.fields)}",
            hint="name one, such as fields=['jpg'], and zip the data sets of several",
        )
    return reader


def _tensorflow() -> Any:
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise UsageError(
            f"TensorFlow is not installed: {error}", hint="pip install 'ffserve[tensorflow]'"
        ) from error


def _arrow() -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise UsageError(
            f"pyarrow is not installed: {error}", hint="pip install 'ffserve[arrow]'"
        ) from error


def _epochs(
    reader: Any, indices: Any, batch: int, made_of: Callable[[Any, int], Any]
) -> Callable[[], Iterator[Any]]:
    """Return a generator function: each call reads the next epoch. A batch is handed on with the
    number of samples before it."""
    epoch = -1

    def batches() -> Iterator[Any]:
        nonlocal epoch
        epoch += 1
        chosen = indices(epoch) if callable(indices) else indices
        first = 0
        for part in reader.batches(chosen, count=batch):
            yield made_of(part, first)
            first += len(part)

    return batches


def _objects(values: Iterable[Any], count: int) -> Any:
    """Return an array of objects: numpy's own strings drop trailing zeros."""
    found = np.empty(count, object)
    found[:] = list(values)
    return found


def _depth(type: Any) -> int:
    depth = 0
    while hasattr(type, "value_type"):
        type, depth = type.value_type, depth + 1
    return depth


def _spec(tf: Any, field: Any) -> Any:
    """Return the signature of a column. Raises: UsageError."""
    pa, inner, depth = _arrow(), field.type, _depth(field.type)
    for _ in range(depth):
        inner = inner.value_type
    dtypes = {
        pa.int32(): tf.int32, pa.int64(): tf.int64, pa.float32(): tf.float32,
        pa.float64(): tf.float64, pa.string(): tf.string, pa.binary(): tf.string,
    }  # fmt: skip
    if inner not in dtypes or depth > 2:
        raise UsageError(
            f"column {field.name!r} has the type {field.type}, which tensors of Examples cannot "
            "have",
            hint="use int32, int64, float, double, string or binary, or lists of these",
        )
    if not depth:
        return tf.TensorSpec((None,), dtypes[inner])
    return tf.RaggedTensorSpec((None,) * (depth + 1), dtypes[inner], ragged_rank=depth)


def _tensor(tf: Any, array: Any) -> Any:
    """Return an Arrow array as a tensor, or of lists as a RaggedTensor."""
    if hasattr(array.type, "value_type"):
        splits = array.offsets.to_numpy().astype(np.int64)
        return tf.RaggedTensor.from_row_splits(_tensor(tf, array.values), splits, validate=False)
    if str(array.type) in ("string", "binary"):
        return tf.constant(_objects(array.cast("binary").to_pylist(), len(array)), tf.string)
    return tf.constant(array.to_numpy())
