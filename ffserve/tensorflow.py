"""Record files as ``tf.data`` datasets, whatever their format and wherever they are read.

    data = ffserve.tensorflow.dataset("/data/*.tfrecord").map(parse).batch(64).prefetch(2)

TensorFlow is imported when a dataset is made. Samples are scalars of ``tf.string``, as
``tf.data.TFRecordDataset`` gives them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import ffserve
from ffserve.client.stream import StreamReader
from ffserve.errors import UsageError


def chunks(
    path: str | os.PathLike[str], start: int = 0, stop: int | None = None, **options: Any
) -> Any:
    """Return the records of some chunks of a RecordIO file, in order.

    Args:
        path: the file.
        start, stop: the chunks from start to stop, which is not among them; None: to the end.
            ``ffserve.recordio.index(path).partition(k)`` has ranges for k jobs.
        options: as for ``dataset``.
    Returns, Raises: as ``dataset``.
    Cost:    one scan of the headers more than ``dataset``.
    """
    firsts = [0, *ffserve.recordio.index(path).counts.cumsum().tolist()]
    records = range(firsts[-1])[firsts[start] : None if stop is None else firsts[stop]]
    return dataset(path, indices=records, format="recordio", **options)


def dataset(
    paths: Any,
    *,
    indices: Any | Callable[[int], Any] | None = None,
    batch: int = 256,
    **options: Any,
) -> Any:
    """Return the samples of files as a ``tf.data.Dataset``.

    Args:
        paths: as for ``ffserve.open``; or a Reader, which stays the caller's and open.
        indices: which samples, in which order, as for ``Reader.read``; or a function of the epoch
            (0, 1, …) that returns them, such as ``EpochSampler`` has; None for all, in order.
        batch: samples that are read at once.
        options: as for ``ffserve.open``.
    Returns: a dataset of scalar ``tf.string``; each pass over it is the next epoch.
    Raises:  UsageError without TensorFlow; as ``ffserve.open``. A sample that cannot be read
             raises where it is due, as TensorFlow's error with our text in it.
    Cost:    one copy of a sample more than a Reader costs.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise UsageError(
            f"TensorFlow is not installed: {error}", hint="pip install 'ffserve[tensorflow]'"
        ) from error
    reader = paths if isinstance(paths, ffserve.Reader) else ffserve.open(paths, **options)
    epoch = -1

    def batches() -> Iterator[Any]:
        nonlocal epoch
        epoch += 1
        chosen = indices(epoch) if callable(indices) else indices
        for part in reader.batches(chosen, count=batch):
            # Objects, since numpy's own strings lose zeros at their end.
            strings = np.empty(len(part), object)
            strings[:] = [sample.tobytes() for sample in part]
            yield strings

    found = tf.data.Dataset.from_generator(
        batches, output_signature=tf.TensorSpec((None,), tf.string)
    ).unbatch()
    if isinstance(reader, StreamReader) or callable(indices):
        return found
    count = len(reader if indices is None else indices)
    return found.apply(tf.data.experimental.assert_cardinality(count))
