"""Record files as a data source of Grain, JAX's loader: random access by index, picklable.

    source = ffserve.grain.Source("/data/*.ffr")
    data = grain.MapDataset.source(source).shuffle(seed=7).map(decode).batch(64)

A Grain source is any object with ``__len__`` and ``__getitem__``, so Grain itself is not needed
here. Its workers are processes: each opens the files anew, through the daemon if there is one.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import ffserve
from ffserve.client.source import Bytes


class Source:
    """Samples by index, as uint8 arrays of their own memory.

    Args:
        paths: as for ``ffserve.open``.
        options: as for ``ffserve.open``.
    Raises:  as ``ffserve.open`` and ``Reader.read``.
    """

    def __init__(self, paths: Any, **options: Any) -> None:
        self._reader = ffserve.open(paths, **options)
        self._count = len(self._reader)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: SupportsIndex) -> Bytes:
        number = operator.index(index)
        return self._reader.read([number + self._count if number < 0 else number])[0]

    def _getitems(self, indices: list[int]) -> list[Bytes]:
        """Read several at once: what Grain calls where it knows a batch in advance."""
        return self._reader.read(indices)

    def close(self) -> None:
        """Close the reader of this process."""
        self._reader.close()

    def __repr__(self) -> str:
        # Grain holds sources against each other by this when it restores a checkpoint.
        files = ", ".join(shard.path for shard in self._reader.shards)
        return f"<ffserve.grain.Source of {self._count} samples in {files}>"
