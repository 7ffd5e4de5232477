"""A worker's answers, packed into shared memory, and unpacked in the training process.

What crosses torch's queue is a `Parcel`: where the answers lie. The answers themselves are pickled
(protocol 5) with the bytes of arrays and tensors out of band; pickle and bytes lie in one segment,
and the arrays that come out are views of it. Each answer is a pickle of its own, so nothing is
shared between batches.

Three roads, by content:

- a list of one-dimensional uint8 arrays (raw samples) is laid end to end and cut apart again,
  without a pickle for each;
- whatever else pickles, torch tensors among it: dense ones in memory are taken apart into bytes,
  type, shape and strides; tensors over one storage share it again afterwards;
- what needs torch's own way (sparse, quantised, on a device, subclasses, requiring a gradient), or
  does not pickle, makes the whole message go as if none of this were here.
"""

from __future__ import annotations

import bisect
import io
import operator
import os
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from ffserve.client.source import Int64s
from ffserve.torch.segments import TAKEN, Bytes, Segment, Sender, give_back, receiver

SMALL_SIZE = 16 << 10
"""Answers of fewer bytes cross within the message."""
ALIGNMENT = 64
PAUSE = 64
"""Messages after which it is tried again whether samples cross as they were read."""


class Parcel:
    """Answers on their way. It unpickles as the list of them.

    Args: where: the arguments of `_open` (a segment) or of `_unpack` (a buffer of its own).
    """

    __slots__ = ("where",)

    def __init__(self, *where: Any) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return (_open if len(self.where) > 3 else _unpack), self.where


def _open(
    key: int, worker: int, number: int, gone: tuple[int, ...], start: int, stop: int
) -> list[Any]:
    return _unpack(receiver(key).open(worker, number, gone), start, stop)


def _unpack(buffer: Any, start: int, stop: int) -> list[Any]:
    whole = memoryview(buffer).cast("B")
    answers: list[Any] = []
    for head, content, *spans in pickle.loads(whole[start:stop]):
        if isinstance(content, bytes):
            edges = np.frombuffer(content, np.int64).reshape(2, -1)
            batch: Any = cut(np.frombuffer(buffer, np.uint8), edges)
        else:
            first, last = content
            batch = pickle.loads(whole[first:last], buffers=[whole[a:b] for a, b in spans])
        answers.append((*head, batch))
    return answers


def cut(memory: Bytes, edges: Int64s) -> list[Bytes]:
    """Return views of the memory; edges, int64[2, n], are where they begin and end."""
    firsts, lasts = edges
    count = len(firsts)
    if count > 1:
        steps, size = np.diff(firsts), int(lasts[0] - firsts[0])
        step = int(steps[0])
        if step >= size and (steps == step).all() and (lasts - firsts == size).all():
            # Rows of a table are cheaper to make than slices.
            first = int(firsts[0])
            table = np.ndarray((count, size), np.uint8, memory, first, (step, 1))
            return list(table)
    return [memory[a:b] for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)]


class Packer:
    """Packs answers in a worker.

    What is read while answers are made can be read straight into the segment that they will
    cross in (`place`), and torch's collation can put its batch there (`collate`). If somebody keeps
    such an array beyond that, in a dataset's cache for instance, the message gets a copy, and the
    segment waits until the array is gone.

    Args: key, worker: whose segments these are. sender: makes them.
    """

    def __init__(self, key: int, worker: int, sender: Sender) -> None:
        self._key = key
        self._worker = worker
        self._sender = sender
        self._expected = 0
        self._placed: Placed | None = None
        self._pause = 0
        """Messages for which samples are not placed, since the last ones did not cross as such."""

    def begin(self) -> None:
        """Begin a message; what was left of one that failed is dropped."""
        self._placed = None

    def place(self, sizes: Int64s) -> tuple[list[Bytes], NDArray[np.uint64]] | None:
        """Give room for samples of the message that is being made; see `client.source.Place`."""
        if self._pause:
            return None
        placed = self._room(int(sizes.sum()) + ALIGNMENT * len(sizes))
        return None if placed is None else placed.add_samples(sizes)

    def collate(self, samples: Any) -> Any:
        """Collate as torch's `default_collate`, but tensors into the segment."""
        return collate(
            samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: self._stack}
        )

    def _stack(self, tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        first = tensors[0]
        if is_plain(first) and not first.requires_grad:
            size = first.numel() * first.itemsize * len(tensors)
            placed = self._room(size + ALIGNMENT)
            buffer = None if placed is None else placed.add(size)
            if buffer is not None and size:
                out = torch.frombuffer(buffer, dtype=first.dtype).view(len(tensors), *first.shape)
                return torch.stack(list(tensors), 0, out=out)
        return default_collate_fn_map[torch.Tensor](tensors, collate_fn_map=collate_fn_map)

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
        return Parcel(self._key, self._worker, segment.number, gone, start, stop)

    def _beside(self, layout: _Layout, start: int, stop: int) -> Parcel:
        """No segment, or nothing that would pay for one: all of it through the queue."""
        copied = bytearray(stop)
        layout.write(np.frombuffer(copied, np.uint8), whole=True)
        return Parcel(copied, start, stop)


class Placed:
    """What lies already in the segment of the message that is being made.

    Each piece of memory crosses once: the training process gets arrays that share nothing.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.used = 0
        lent = segment.lend()
        # Whoever holds an array of it last: then it is free, unless it is on its way.
        weakref.finalize(lent, give_back, segment, os.getpid()).atexit = False
        self._alive = weakref.ref(lent)
        self._memory: Bytes | None = np.frombuffer(lent, np.uint8)
        self._address = address_of(self._memory)
        self._groups: list[_Group] = []

    def add_samples(self, sizes: Int64s) -> tuple[list[Bytes], NDArray[np.uint64]] | None:
        """Return an array for each sample, and their addresses; None if they do not fit."""
        ends = np.cumsum(-(-sizes // ALIGNMENT) * ALIGNMENT)
        end = self.used + int(ends[-1]) if len(sizes) else self.used
        if end > self.segment.room or self._memory is None:
            return None
        edges = np.empty((2, len(sizes)), np.int64)
        edges[0, :1] = self.used
        edges[0, 1:] = ends[:-1] + self.used
        edges[1] = edges[0] + sizes
        samples = cut(self._memory, edges)
        self._groups.append(_Group(self.used, end, edges, tuple(samples)))
        self.used = end
        return samples, (edges[0] + self._address).view(np.uint64)

    def add(self, size: int) -> Bytes | None:
        """Return an array of this size, or None if it does not fit."""
        end = self.used + -(-size // ALIGNMENT) * ALIGNMENT
        if end > self.segment.room or self._memory is None:
            return None
        first, self.used = self.used, end
        edges = np.array([[first], [first + size]], np.int64)
        self._groups.append(_Group(first, end, edges, ()))
        return self._memory[first : first + size]

    def claim_samples(self, rows: list[Bytes]) -> Int64s | None:
        """Return where these samples lie, int64[2, n], if they are just what one read gave."""
        first = address_of(rows[0]) - self._address
        group = self._group(first)
        if group is None or group.claimed or len(group.samples) != len(rows):
            return None
        if not all(map(operator.is_, group.samples, rows)):
            return None
        group.claimed.update(range(len(rows)))
        return group.edges

    def claim(self, piece: Bytes) -> int | None:
        """Return where this memory begins, if it lies here and crosses for the first time."""
        first = address_of(piece) - self._address
        group = self._group(first) if piece.nbytes else None
        if group is None:
            return None
        number = int(np.searchsorted(group.edges[0], first, side="right")) - 1
        if number in group.claimed or first + piece.nbytes > group.edges[1, number]:
            return None
        group.claimed.add(number)
        return first

    def _group(self, first: int) -> _Group | None:
        if not 0 <= first < self.used:
            return None
        return self._groups[bisect.bisect_right(self._groups, first, key=_first_of) - 1]

    def let_go(self) -> bool:
        """Drop what is held here; return whether nobody else holds any of it."""
        self._memory = None
        for group in self._groups:
            group.samples = ()
        return self._alive() is None

    def is_idle(self) -> bool:
        """Whether samples were placed, and none of them crossed."""
        read = [group for group in self._groups if group.is_read]
        return bool(read) and not any(group.claimed for group in read)


class _Group:
    """What one read put side by side, or one array of another origin.

    Args: first, last: of all of it. edges: int64[2, n], where each begins and ends.
    """

    __slots__ = ("claimed", "edges", "first", "is_read", "last", "samples")

    def __init__(self, first: int, last: int, edges: Int64s, samples: tuple[Bytes, ...]) -> None:
        self.first = first
        self.last = last
        self.edges = edges
        self.samples = samples
        self.is_read = bool(samples)
        self.claimed: set[int] = set()


def _first_of(group: _Group) -> int:
    return group.first


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
        stream = io.BytesIO()
        buffers: list[Bytes] = []
        _Pickler(stream, buffers).dump(batch)
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

    def _place(self, piece: Bytes) -> tuple[int, int]:
        first = None if self._placed is None else self._placed.claim(piece)
        if first is None:
            return self._append(piece, piece.nbytes)
        self._in_place.append((first, first + piece.nbytes))
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


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether bytes, type, shape and strides are all there is to a tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def address_of(array: Bytes) -> int:
    """Return where an array's memory begins."""
    address: int = array.__array_interface__["data"][0]
    return address


class _TorchsWay(Exception):
    """Something that only torch knows how to hand over."""


class _Pickler(pickle.Pickler):
    """Pickles with the bytes of arrays and tensors out of band."""

    def __init__(self, stream: io.BytesIO, buffers: list[Bytes]) -> None:
        def keep(buffer: pickle.PickleBuffer) -> None:
            buffers.append(np.frombuffer(buffer.raw(), np.uint8))

        super().__init__(stream, protocol=5, buffer_callback=keep)
        self._storages: dict[int, tuple[_Storage, int]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            return self._reduce(obj)
        if type(obj) is np.ndarray and not obj.flags.writeable and not obj.dtype.hasobject:
            return obj.copy("K").__reduce_ex__(5)  # arrives writable, as from any other pickle
        if isinstance(obj, _TORCHS):
            raise _TorchsWay
        return NotImplemented

    def _reduce(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad or not is_plain(tensor):
            raise _TorchsWay
        storage, begin = self._storage(tensor)
        where = tensor.data_ptr() - begin if tensor.numel() else 0
        shape, strides = tuple(tensor.shape), tensor.stride()
        return _tensor, (storage, tensor.dtype, where // tensor.itemsize, shape, strides)

    def _storage(self, tensor: torch.Tensor) -> tuple[_Storage, int]:
        """Return the bytes that a tensor needs, and the address where they begin.

        That is its whole storage, unless the tensor is less than half of it.
        """
        whole = tensor.untyped_storage()
        known = self._storages.get(whole.data_ptr())
        if known is not None:
            return known
        begin, size = whole.data_ptr(), whole.nbytes()
        extent = 0
        if tensor.numel():
            last = sum(
                (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            extent = (last + 1) * tensor.itemsize
        if 2 * extent >= size:
            found = _Storage(_bytes_of(whole, 0, size)), begin
            self._storages[begin] = found
            return found
        offset = int(tensor.storage_offset()) * tensor.itemsize if extent else 0
        return _Storage(_bytes_of(whole, offset, extent)), begin + offset


_TORCHS = (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)


class _Storage:
    """The bytes of a storage; becomes one again in the training process."""

    __slots__ = ("_bytes",)

    def __init__(self, bytes_: Bytes) -> None:
        self._bytes = bytes_

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _storage, (pickle.PickleBuffer(self._bytes.data),)


def _bytes_of(storage: torch.UntypedStorage, offset: int, size: int) -> Bytes:
    if not size:
        return np.empty(0, np.uint8)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,), (1,))
    array: NDArray[np.uint8] = flat.numpy()
    return array


def _storage(buffer: Any) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
