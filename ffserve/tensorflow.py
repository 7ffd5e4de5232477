"""Record files of any format as ``tf.data`` datasets.

    data = ffserve.tensorflow.dataset("/data/*.tfrecord").map(parse).batch(64).prefetch(2)

TensorFlow is imported when a dataset is created. Samples are scalars of ``tf.string``, as from
``tf.data.TFRecordDataset``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ffserve.compat.pyrecordio import index
from ffserve.errors import UsageError
from ffserve.reader import Reader, StreamReader
from ffserve.reader import open as open_reader


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
    try:
        import tensorflow as tf
    except ImportError as error:
        raise UsageError(
            f"TensorFlow is not installed: {error}", hint="pip install 'ffserve[tensorflow]'"
        ) from error
    reader = paths if isinstance(paths, Reader) else open_reader(paths, **options)
    epoch = -1

    def batches() -> Iterator[Any]:
        nonlocal epoch
        epoch += 1
        chosen = indices(epoch) if callable(indices) else indices
        for part in reader.batches(chosen, count=batch):
            # An array of objects: numpy's own strings drop trailing zeros.
            strings = np.empty(len(part), object)
            strings[:] = [sample.tobytes() for sample in part]
            yield strings

    found = tf.data.Dataset.from_generator(
        batches, output_signature=tf.TensorSpec((None,), tf.string)
    ).unbatch()
    if callable(indices) or (indices is None and isinstance(reader, StreamReader)):
        return found  # to count the samples of compressed files, they would have to be read
    count = len(reader if indices is None else indices)
    return found.apply(tf.data.experimental.assert_cardinality(count))
