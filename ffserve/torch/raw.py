"""Raw samples, on the short way from a worker to the training process.

A data set that leaves reading to `ffserve.torch.Dataset` can have all batches of a message read at
once. Where moreover neither `process` nor `collate_fn` does anything but return what it was given,
nobody in the worker looks at a sample: none becomes an array before the training process hands its
batch out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import numpy as np

from ffserve.client.source import Bytes
from ffserve.torch.dataset import Dataset
from ffserve.torch.placed import ALIGNMENT, laid
from ffserve.torch.segments import receiver

Head = tuple[int, int, int]
"""A batch: its number and that of samples up to its end, as in its ticket; its size."""


def changes_nothing(dataset: Dataset, collate: Any) -> bool:
    """Whether `process` and collation only return what they are given."""
    process = type(dataset).process
    return "process" not in vars(dataset) and _returns(process, 2, 3) and _returns(collate, 0, 1)


def _returns(function: Any, place: int, count: int) -> bool:
    """Whether a function of `count` arguments returns the one in that place, and nothing else."""
    if type(function) is not FunctionType:
        return False
    code, pattern = function.__code__, _PATTERNS[place].__code__
    return (
        code.co_code == pattern.co_code
        and code.co_argcount == count
        and code.co_kwonlyargcount == 0
        and code.co_flags & _SHAPE == pattern.co_flags & _SHAPE
    )


_SHAPE = 0x04 | 0x08 | 0x20 | 0x80 | 0x100 | 0x200
"""Flags of code: *args, **kwargs, generators and coroutines (inspect.CO_VARARGS and others)."""
_PATTERNS: dict[int, Any] = {0: lambda a: a, 2: lambda a, b, c: c}


def open_raw(
    key: int,
    worker: int,
    number: int,
    gone: tuple[int, ...],
    sizes: int | bytes,
    heads: Sequence[Head],
) -> RawBatches:
    """Open a message that lies in a segment, from its first byte on."""
    return RawBatches(receiver(key).open(worker, number, gone), sizes, heads)


class RawBatches:
    """The answers of a message: each batch becomes arrays when it is taken.

    Args: buffer: in which the samples lie. sizes, heads: as sent.
    """

    def __init__(self, buffer: Any, sizes: int | bytes, heads: Sequence[Head]) -> None:
        self._memory: Bytes | None = np.frombuffer(buffer, np.uint8)
        self._heads = deque(heads)
        self._at = 0
        self._size = sizes if isinstance(sizes, int) else -1
        self._edges: list[list[int]] = []
        if isinstance(sizes, bytes):
            self._edges = laid(0, np.frombuffer(sizes, np.int64))[0].tolist()

    def __len__(self) -> int:
        return len(self._heads)

    def popleft(self) -> tuple[int, int, list[Bytes]]:
        """Take the next answer. With the last one the memory is its arrays' alone."""
        batches, samples, count = self._heads.popleft()
        memory = self._memory
        assert memory is not None
        if not self._heads:
            self._memory = None
        first, self._at = self._at, self._at + count
        if self._size < 0:
            begins, ends = (edges[first : self._at] for edges in self._edges)
            return batches, samples, [memory[a:b] for a, b in zip(begins, ends, strict=True)]
        step = -(-self._size // ALIGNMENT) * ALIGNMENT
        table = np.ndarray((count, self._size), np.uint8, memory, first * step, (step, 1))
        return batches, samples, [*table]
