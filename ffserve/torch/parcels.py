"""A worker's answers, packed into shared memory, and unpacked in the training process.

What crosses torch's queue is a `Parcel`: where the answers lie. The answers themselves are pickled
(protocol 5) with the bytes of arrays and tensors out of band; pickle and bytes lie in one segment,
and the arrays that come out are views of it. Each answer is a pickle of its own, so nothing is
shared between batches.

Four roads, by content:

- raw samples that neither `process` nor collation looks at go as they were read (raw.py);
- a list of one-dimensional uint8 arrays (raw samples) is laid end to end and cut apart again,
  without a pickle for each; a tensor that lies in the segment is told of by type and shape;
- whatever else pickles, torch tensors among it: dense ones in memory are taken apart into bytes,
  type, shape and strides; tensors over one storage share it again afterwards;
- what needs torch's own way (sparse, quantised, on a device, subclasses, requiring a gradient), or
  does not pickle, makes the whole message go as if none of this were here.
"""

from __future__ import annotations

import functools
import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from ffserve.client.source import Bytes, Int64s, placing
from ffserve.compat.ffrecord import FileReader
from ffserve.torch.joint import PAUSE, Samples, Warm
from ffserve.torch.parted import Given, Numbers, Parted, PartedSamples, Split, Way
from ffserve.torch.pickling import Pickler, is_plain
from ffserve.torch.placed import ALIGNMENT, Alive, Placed, Rows, address_of, cut, laid, places
from ffserve.torch.raw import Head, RawBatches, open_raw
from ffserve.torch.segments import TAKEN, Sender, receiver

SMALL_SIZE = 16 << 10
"""Answers of fewer bytes cross within the message."""
TABLE_SIZE = 16 << 10
"""Tensors of fewer bytes are copied sooner than looked at, whether they lie side by side."""


class Parcel:
    """Answers on their way. It unpickles as what `open` makes of `where`."""

    __slots__ = ("open", "where")

    def __init__(self, open: Callable[..., Any], *where: Any) -> None:
        self.open = open
        self.where = where

    def __reduce__(self) -> Any:
        return self.open, self.where


def _open(
    key: int, worker: int, number: int, gone: tuple[int, ...], start: int, stop: int
) -> list[Any]:
    return _unpack(receiver(key).open(worker, number, gone), start, stop)


def _unpack(buffer: Any, start: int, stop: int) -> list[Any]:
    whole = memoryview(buffer).cast("B")
    answers: list[Any] = []
    for head, content, *more in pickle.loads(whole[start:stop]):
        if isinstance(content, bytes):
            edges = np.frombuffer(content, np.int64).reshape(2, -1)
            batch: Any = cut(np.frombuffer(buffer, np.uint8), edges)
        elif isinstance(content, torch.dtype):
            shape, first, last = more
            batch = torch.frombuffer(whole[first:last], dtype=content).view(shape)
        else:
            first, last = content
            batch = pickle.loads(whole[first:last], buffers=[whole[a:b] for a, b in more])
        answers.append((*head, batch))
    return answers


class Packer:
    """Packs answers in a worker.

    What is read while answers are made can be read straight into the segment that they will
    cross in (`place`), and torch's collation puts its batch there, whoever calls it in this
    process. If somebody keeps such an array beyond that, in a dataset's cache for instance, the
    message gets a copy, and the segment waits until the array is gone.

    Args:
        key, worker: whose segments these are. sender: makes them.
        collate: the loader's.
    """

    def __init__(
        self, key: int, worker: int, sender: Sender, collate: Callable[[Any], Any]
    ) -> None:
        self._key = key
        self._worker = worker
        self._sender = sender
        self._stacks = collate is torch.utils.data.default_collate
        if default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn:
            # The way that torch tells to make its collation do something else for a type.
            default_collate_fn_map[torch.Tensor] = self._stack
        self._expected = 0
        self._placed: Placed | None = None
        self._tables: list[tuple[torch.Tensor, Alive]] = []
        self._known = False
        """Whether `expected` comes from messages."""
        self._warm: list[tuple[int, Warm]] = []
        """Of each data set that is read for, in order, what its samples have in bytes, and memory
        for them."""
        self._pause = 0
        """Messages for which samples are not placed, since the last ones did not cross as such."""

    def begin(self) -> None:
        """Begin a message; what was left of one that failed is dropped."""
        self._placed = None
        self._tables.clear()

    def read(
        self, reader: FileReader, numbers: Int64s, *, in_place: bool = True
    ) -> Sequence[Bytes]:
        """Read samples at once, side by side where one request gives them.

        Args:    in_place: they may cross as they are.
        Returns: Rows, or a list of arrays.
        Raises:  what the reader raises.
        """
        rows: Rows | None = None

        def place(sizes: Int64s) -> Any:
            nonlocal rows
            if rows is not None or not len(sizes):
                return None
            size = int(((sizes + (ALIGNMENT - 1)) & -ALIGNMENT).sum())
            placed = self._room(size) if in_place else None
            edges = None if placed is None else placed.lay(sizes)
            if placed is not None and edges is not None and placed.memory is not None:
                rows = Rows(edges, placed.memory, placed)
            else:
                edges, end = laid(0, sizes)
                rows = Rows(edges, np.empty(max(end, 1), np.uint8), None)
            return rows, places(edges, address_of(rows.memory))

        with placing(place):
            return reader.read(numbers)

    def samples(self, way: Way, numbers: Numbers) -> Given:
        """Return what gives `process` the samples of a message.

        Args: numbers: what is to be read.
        """
        self._known = bool(self._expected)
        leaves = itertools.count()
        given = self._given(way, numbers, leaves)
        if not self._known:
            self._expected += SMALL_SIZE
        return given

    def _given(self, way: Way, numbers: Numbers, leaves: Iterator[int]) -> Given:
        if isinstance(way, Parted):
            assert isinstance(numbers, Split)
            parts = zip(way.parts, numbers.below, strict=True)
            given = [self._given(part, below, leaves) for part, below in parts]
            return PartedSamples(way, numbers, given)
        assert not isinstance(numbers, Split)
        leaf = next(leaves)
        if leaf == len(self._warm):
            self._warm.append((way.mean_size(), Warm()))
        size, warm = self._warm[leaf]
        if not self._known:
            self._expected += size * sum(map(len, numbers))
        in_place = self._may_cross(size)
        read = functools.partial(self.read, in_place=in_place)
        return Samples(way, numbers, read, warm if not in_place and warm.begin() else None)

    def _may_cross(self, size: int) -> bool:
        """Whether samples of about this size, in bytes, may cross as they were read."""
        return not self._pause and not (self._stacks and size < TABLE_SIZE)

    def raw(
        self, reader: FileReader, numbers: Sequence[Int64s], heads: Sequence[Head]
    ) -> Parcel | None:
        """Return a parcel of samples that nobody has a look at.

        Args:    numbers: of each batch what is to be read.
        Returns: None if it cannot be done, or somebody has got at the memory: read them again.
        """
        try:
            rows = self.read(reader, np.concatenate(numbers))
        except Exception:  # of any of these batches
            return None
        if not isinstance(rows, Rows) or rows.seen:
            return None
        placed, self._placed = self._placed, None
        # One number where that says it all.
        sizes = (rows.edges[1] - rows.edges[0]).tobytes() if rows.size is None else rows.size
        memory = rows.let_go()
        if placed is None or rows.placed is None:
            return Parcel(RawBatches, bytearray(memory), sizes, heads)
        del memory
        if not placed.let_go():
            return None
        placed.segment.flag.set(TAKEN)
        gone = self._sender.gone()
        return Parcel(open_raw, self._key, self._worker, placed.segment.number, gone, sizes, heads)

    def place(self, sizes: Int64s) -> tuple[list[Bytes], NDArray[np.uint64]] | None:
        """Give room for samples of the message that is being made; see `client.source.Place`."""
        if not self._may_cross(int(sizes.max(initial=0))):
            return None
        placed = self._room(int(sizes.sum()) + ALIGNMENT * len(sizes))
        return None if placed is None else placed.add_samples(sizes)

    def _stack(self, tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        """Collate tensors as torch does, but into the segment, or into memory of their own: torch
        makes a file in /dev/shm for each batch."""
        first = tensors[0]
        if is_plain(first) and not first.requires_grad:
            size = first.numel() * first.element_size()
            table = None if size < TABLE_SIZE else self._table(tensors, size)
            if table is not None:
                return table
            size *= len(tensors)
            placed = self._room(size + ALIGNMENT)
            buffer = None if placed is None else placed.add(size)
            if buffer is not None and size:
                out = torch.frombuffer(buffer, dtype=first.dtype).view(len(tensors), *first.shape)
                return torch.stack(list(tensors), 0, out=out)
            return torch.stack(list(tensors), 0)
        return collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)

    def _table(self, tensors: Sequence[torch.Tensor], size: int) -> torch.Tensor | None:
        """Return tensors that lie side by side, as they were read, as the batch that they are."""
        first, count = tensors[0], len(tensors)
        if (
            self._placed is None
            or set(map(type, tensors)) != {torch.Tensor}
            or {(t.dtype, t.shape, t.requires_grad, t.is_contiguous()) for t in tensors}
            != {(first.dtype, first.shape, False, True)}
        ):
            return None
        begin = first.data_ptr()
        wanted = range(begin, begin + count * size, size)
        if first.dtype.is_complex or any(t.is_neg() for t in tensors):
            return None
        if any(t.data_ptr() != at for t, at in zip(tensors, wanted, strict=True)):
            return None
        claimed = self._placed.claim_table(begin, count, size)
        if claimed is None:
            return None
        memory, alive = claimed
        table = torch.frombuffer(memory, dtype=first.dtype).view(count, *first.shape)
        self._tables.append((table, alive))
        return table

    def settle(self) -> None:
        """A batch was made: if somebody keeps samples that it lies on, it becomes a copy."""
        for table, alive in self._tables:
            if alive() is not None:
                copy = table.clone()
                table.set_(copy.untyped_storage(), 0, copy.shape, copy.stride())
        self._tables.clear()

    def _room(self, size: int) -> Placed | None:
        if self._placed is None:
            segment = self._sender.take(max(self._expected, size + SMALL_SIZE))
            if segment is None:
                return None
            self._placed = Placed(segment)
        return self._placed

    def pack(self, answers: list[tuple[Any, ...]]) -> Any:
        """Return a parcel of the answers, or the answers when they have to go torch's way.

        Args: answers: emptied if they are in the parcel.
        """
        placed, self._placed = self._placed, None
        layout = _Layout(placed)
        try:
            for position in range(len(answers)):
                layout.add(answers[position])
        except Exception:  # torch's own way may know what to do with it, or says what is wrong
            return answers
        start, stop = layout.finish()
        answers.clear()  # so that nothing here holds what may be held by nobody else
        self._expected = max(stop, self._expected - self._expected // 8)
        self._pause = max(0, self._pause - 1)
        if placed is None and stop <= SMALL_SIZE:
            return self._beside(layout, start, stop)
        kept = placed is not None and not placed.let_go()
        if placed is not None and (kept or placed.is_idle()):
            self._pause = PAUSE
        in_place = placed is not None and not kept and stop <= placed.segment.room
        segment = placed.segment if placed and in_place else self._sender.take(stop)
        if segment is None:
            return self._beside(layout, start, stop)
        segment.flag.set(TAKEN)
        layout.write(np.frombuffer(segment.lend(), np.uint8), whole=not in_place)
        gone = self._sender.gone()
        return Parcel(_open, self._key, self._worker, segment.number, gone, start, stop)

    def _beside(self, layout: _Layout, start: int, stop: int) -> Parcel:
        """No segment, or nothing that would pay for one: all of it through the queue."""
        copied = bytearray(stop)
        layout.write(np.frombuffer(copied, np.uint8), whole=True)
        return Parcel(_unpack, copied, start, stop)


class _Layout:
    """Where everything of a message will lie."""

    def __init__(self, placed: Placed | None) -> None:
        self._placed = placed
        self._size = placed.used if placed is not None else 0
        self._pieces: list[tuple[int, Bytes | list[Bytes]]] = []
        self._in_place: list[tuple[int, int]] = []
        self._table: list[tuple[Any, ...]] = []

    def add(self, answer: tuple[Any, ...]) -> None:
        """Place an answer behind the others: its last element apart, the others in the table."""
        *head, batch = answer
        if is_rows(batch):
            self._table.append((head, self._rows(batch).tobytes()))
            return
        if type(batch) is torch.Tensor and (span := self._claim_tensor(batch)) is not None:
            self._table.append((head, batch.dtype, tuple(batch.shape), *span))
            return
        stream = io.BytesIO()
        buffers: list[Bytes] = []
        Pickler(stream, buffers).dump(batch)
        spans = [self._place(buffer) for buffer in buffers]
        text = self._append(np.frombuffer(stream.getbuffer(), np.uint8), stream.tell())
        self._table.append((head, text, *spans))

    def finish(self) -> tuple[int, int]:
        """Place the table of it all; return where it lies. The second is the size of everything."""
        table = np.frombuffer(pickle.dumps(self._table, protocol=5), np.uint8)
        return self._append(table, table.nbytes)

    def write(self, to: Bytes, *, whole: bool) -> None:
        """Copy everything to its place; `whole`: also what lies in place in the segment read into.

        That segment's memory is still as it was: nobody else has got it meanwhile.
        """
        if whole and self._in_place:
            assert self._placed is not None
            source = np.frombuffer(self._placed.segment.lend(), np.uint8)
            for first, last in self._in_place:
                to[first:last] = source[first:last]
        for first, piece in self._pieces:
            if isinstance(piece, list):
                size = sum(map(len, piece))
                np.concatenate(piece, out=to[first : first + size])
            else:
                to[first : first + piece.nbytes] = piece

    def _rows(self, rows: list[Bytes]) -> Int64s:
        """Return int64[2, n]: where the samples of a batch begin and end."""
        edges = None if self._placed is None else self._placed.claim_samples(rows)
        if edges is not None:
            self._in_place.append((int(edges[0, 0]), int(edges[1, -1])))
            return edges
        lengths = np.array([0, *map(len, rows)], np.int64)
        ends = np.cumsum(lengths)
        first, _last = self._append(rows, int(ends[-1]))
        return np.stack((ends[:-1], ends[1:])) + first

    def _claim_tensor(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return where a tensor that lies in place lies, if it is all of its storage, in order."""
        size = tensor.numel() * tensor.element_size()
        if (
            self._placed is None
            or tensor.requires_grad
            or not is_plain(tensor)
            or not tensor.is_contiguous()
            or tensor.untyped_storage().nbytes() != size
        ):
            return None
        return self._claim(tensor.data_ptr(), size)

    def _place(self, piece: Bytes) -> tuple[int, int]:
        span = self._claim(address_of(piece), piece.nbytes)
        return self._append(piece, piece.nbytes) if span is None else span

    def _claim(self, address: int, size: int) -> tuple[int, int] | None:
        first = None if self._placed is None else self._placed.claim(address, size)
        if first is None:
            return None
        self._in_place.append((first, first + size))
        return self._in_place[-1]

    def _append(self, piece: Bytes | list[Bytes], size: int) -> tuple[int, int]:
        first = -(-self._size // ALIGNMENT) * ALIGNMENT
        self._size = first + size
        self._pieces.append((first, piece))
        return first, self._size


def is_rows(batch: Any) -> bool:
    """Whether a batch is a list of raw samples, which need no pickling one by one."""
    if type(batch) is not list or not batch:
        return False
    for row in batch:
        if type(row) is not np.ndarray or row.ndim != 1 or row.dtype is not _UINT8:
            return False
    return True


_UINT8 = np.dtype(np.uint8)
