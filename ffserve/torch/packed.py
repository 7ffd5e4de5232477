"""PackedDataset: sequences of tokens, packed from records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve import FileReader
from ffserve.dtypes import Int64s
from ffserve.errors import SampleIndexError, UsageError
from ffserve.packing import WINDOW, plan
from ffserve.torch.dataset import Dataset, announce, as_index, has_repeats, reached

_EPOCHS_KEPT = 3


class PackedDataset(Dataset):
    """Sequences of ``length`` tokens, packed from records by ``ffserve.packing.plan``.

    A record is the tokens of one document, one after another. Sample s of this data set is sequence
    s of the plan; it is read with one request for all records of a batch. Shuffle, split, announce
    and resume sequences like any samples, with an EpochSampler over ``len(dataset)``.

    Args:
        fnames, check_data: as for Dataset.
        length: tokens of a sequence.
        dtype: of the tokens in the records, such as ``numpy.uint16``.
        seed: of the plan; the same on every rank and in every run of a training.
        pad: token at the places that the plan leaves empty.
        window: as for ``plan``.
    Raises:  as Dataset does; UsageError for a record that is no whole number of tokens.
    Cost:    the table of sizes is read when the data set is opened.
    """

    def __init__(
        self,
        fnames: Any,
        length: int,
        *,
        dtype: Any,
        seed: int,
        pad: int = 0,
        window: int = WINDOW,
        check_data: bool = True,
    ) -> None:
        self.fnames = fnames
        self.reader = FileReader.for_files(fnames, check_data)
        if self.reader.several:
            raise UsageError(
                f"documents have the fields {', '.join(self.reader.fields)}",
                hint="convert the one with the tokens to record files of its own",
            )
        self.dtype = np.dtype(dtype)
        if self.dtype.kind not in "iu":
            raise UsageError(f"invalid dtype {self.dtype}: tokens are integers")
        self.pad = pad
        sizes, odd = np.divmod(self.reader.sizes(), self.dtype.itemsize)
        if odd.any():
            index = int(odd.argmax())
            raise UsageError(
                f"sample {index} has {int(self.reader.sizes([index])[0])} bytes, which is not a "
                f"multiple of the {self.dtype.itemsize} bytes of a token",
                hint="give the dtype with which the tokens were written",
            )
        self.plan = plan(sizes, length, seed, window=window)
        self._ends: dict[int, Int64s] = {}
        """By announced epoch: how many pieces the order has up to the end of each sequence."""

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, indices: Any) -> Any:
        """Read the sequences at these indices.

        Args:    indices: a list or tuple of indices (repeats allowed, order kept), or one index.
        Returns: what ``process`` returns: a list, or one sequence for one index.
        Raises:  as Dataset does.
        Cost:    one request for the whole list; a record of which it has several pieces is read
            once.
        """
        if not isinstance(indices, (list, tuple)):
            return self[[as_index(indices)]][0]
        sequences = np.array([self._checked(index) for index in indices], np.int64)
        numbers, edges = self.plan.pieces(sequences)
        records, which = np.unique(self.plan.samples[numbers], return_inverse=True)
        data = [record.view(self.dtype) for record in self.reader.read(records)]
        starts = self.plan.starts[numbers].tolist()
        ends = (self.plan.starts[numbers] + self.plan.sizes[numbers]).tolist()
        pieces = [
            data[record][start:end]
            for record, start, end in zip(which.tolist(), starts, ends, strict=True)
        ]
        cuts = edges.tolist()
        return self.process(
            indices,
            [pieces[first:end] for first, end in pairwise(cuts)],
        )

    def process(self, indices: Sequence[int], data: Any) -> Any:
        """Turn the pieces of each sequence into a sample. A subclass may override it.

        Args:
            indices: the sequences asked for.
            data: for each sequence its pieces, arrays of ``dtype``, in order.
        Returns: for each sequence a dict of three int64[length]: ``tokens``; ``segments``, which
            piece each token belongs to, from 1, and 0 where there is none; ``positions``, the place
            of each token in its piece, from 0. torch's default collation stacks them.
        """
        return [self._sequence(pieces) for pieces in data]

    def _sequence(self, pieces: list[NDArray[Any]]) -> dict[str, Int64s]:
        tokens = np.full(self.plan.length, self.pad, np.int64)
        segments = np.zeros(self.plan.length, np.int64)
        positions = np.zeros(self.plan.length, np.int64)
        first = 0
        for number, piece in enumerate(pieces, 1):
            end = first + len(piece)
            tokens[first:end] = piece
            segments[first:end] = number
            positions[first:end] = np.arange(len(piece))
            first = end
        return {"tokens": tokens, "segments": segments, "positions": positions}

    def _checked(self, index: Any) -> int:
        number: int = as_index(index)
        if not 0 <= number < len(self.plan):
            raise SampleIndexError(
                f"there are {len(self.plan)} sequences", index=number, path=str(self.fnames)
            )
        return number

    def announce(
        self,
        order: Int64s,
        epoch: int = 0,
        *,
        name: str | None = None,
        replacement: bool = False,
    ) -> None:
        """Announce the records that the sequences of an order are made of."""
        numbers, edges = self.plan.pieces(order)
        self._ends[epoch] = edges
        for old in sorted(self._ends)[:-_EPOCHS_KEPT]:
            del self._ends[old]
        records = self.plan.samples[numbers]
        announce(self.reader, records, epoch, name=name, replacement=has_repeats(records))

    def reached(self, epoch: int, position: int) -> None:
        """Report how many pieces the first sequences of an announced order have."""
        edges = self._ends.get(epoch)
        if edges is not None:
            reached(self.reader, epoch, int(edges[min(position, len(edges) - 1)]))

    def _announced_to(self) -> list[Any]:
        return [self.reader]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ends": {}}
