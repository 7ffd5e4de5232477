"""Record files as a random-access data source of Grain, the data loader for JAX.

    source = ffserve.grain.Source("/data/*.ffr")
    data = grain.MapDataset.source(source).shuffle(seed=7).map(decode).batch(64)

A Grain source is any object with ``__len__`` and ``__getitem__``, so this module does not import
Grain. Each worker process of Grain opens the files again, through the daemon if there is one.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

from ffserve import reader as readers


class Source:
    """Samples by index, each a uint8 array that shares no byte with another; of several fields a
    dict of these.

    Args:
        paths: as for ``ffserve.open``.
        options: as for ``ffserve.open``.
    Raises:  as ``ffserve.open`` and ``Reader.read``.
    """

    def __init__(self, paths: Any, **options: Any) -> None:
        self._reader = readers.open(paths, **options)
        self._count = len(self._reader)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: SupportsIndex) -> Any:
        number = operator.index(index)
        return self._getitems([number + self._count if number < 0 else number])[0]

    def _getitems(self, indices: list[int]) -> list[Any]:
        """Read several samples; Grain calls this if it knows a batch in advance."""
        samples: Any = self._reader.read(indices)
        if isinstance(self._reader, readers.FieldReader):
            samples = self._reader.rows_of(samples)
        return list(samples)

    def close(self) -> None:
        """Close this process's reader."""
        self._reader.close()

    def __repr__(self) -> str:
        # Grain compares this text when it restores a checkpoint.
        files = ", ".join(shard.path for shard in self._reader.shards)
        return f"<ffserve.grain.Source of {self._count} samples in {files}>"
