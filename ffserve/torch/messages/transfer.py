"""Messages from a worker to the training process: batches in shared memory.

A ``Message`` crosses torch's queue. It says where its payload lies: in one segment of shared memory
(segments.py), or inside the message if that is small or there is no segment. There are two kinds.

- Raw samples, which neither ``process`` nor ``collate_fn`` looks at: all samples of the message are
  read in one call, straight into the segment. The training process makes the arrays.
- Any other batches. Samples of 16 KiB and more are read straight into the segment, and torch's
  collation stacks its tensors there. ``MessageWriter.finish`` then finds for each array and tensor
  of a batch whether it is in place already, and copies the others. If an object cannot be taken
  apart into bytes (pickling.py), the whole message goes through torch.

Arrays and tensors that arrive are views of the segment, writable, and share nothing with one
another. If an object in the worker, such as the cache of a dataset, still holds memory of the
segment, the message gets a copy.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from ffserve import FileReader, Reader
from ffserve.client.public import addresses, placing
from ffserve.dtypes import Bytes, Int64s
from ffserve.errors import FFServeError
from ffserve.torch.messages.pickling import Pickler, is_plain
from ffserve.torch.messages.segments import FREE, TAKEN, Segment, Sender, give_back, receiver

try:  # Both names are private, though torch documents how to extend its collation with the second.
    from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
except ImportError:  # Tensors are then stacked by torch, in a file of its own, and copied.
    collate_tensor_fn, default_collate_fn_map = None, {}  # type: ignore[assignment]

ALIGNMENT = 64
INLINE_SIZE = 16 << 10
"""A payload of at most this size crosses inside the message."""
PLACED_SIZE = 16 << 10
"""Samples below this size, in bytes, are not read into the segment: copying them from the
processor's cache costs less than looking where they lie."""
UNPLACED_COUNT = 64
"""After a message whose samples were read into the segment in vain, the samples of this many
messages are not."""
_UINT8 = np.dtype(np.uint8)

Alive = Callable[[], object]
"""A function that returns None when no object refers to something any more."""


class WorkerMessage:
    """A message in torch's queue: unpickles as ``open(*arguments)``."""

    __slots__ = ("arguments", "open")

    def __init__(self, open: Callable[..., Any], *arguments: Any) -> None:
        self.open = open
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return self.open, self.arguments


class BatchFailure:
    """The error of one batch, on its way from a worker to the training process.

    torch makes a worker's exception anew from its class and a text, and attributes are lost. An
    error of ffserve crosses whole; any other as torch would send it.
    """

    __slots__ = ("kind", "pickled", "text", "worker")

    def __init__(self, error: Exception, worker: int) -> None:
        self.text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.worker = worker
        self.pickled = _pickled(error) if isinstance(error, FFServeError) else None
        self.kind = RuntimeError if _pickled(type(error)) is None else type(error)

    def reraise(self) -> NoReturn:
        """Raise the error."""
        # Without a name for it here: its traceback has this frame, and the circle of both would
        # keep the iterator and its workers until the garbage is collected.
        if self.pickled is not None:
            raise pickle.loads(self.pickled) from WorkerTraceback(self.text)
        text = _Text(
            f"Caught {self.kind.__name__} in DataLoader worker process {self.worker}.\n"
            f"Original {self.text}"
        )
        raise _made(self.kind, text)


def _pickled(what: Any) -> bytes | None:
    """Return a pickle that can be loaded, or None: a user's own class may fail in any way."""
    try:
        pickled = pickle.dumps(what)
        pickle.loads(pickled)
    except Exception:
        return None
    return pickled


def _made(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except Exception:  # it takes other arguments
        return RuntimeError(text)


class _Text(str):
    """A text that a KeyError shows as it is, with its line ends."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class WorkerTraceback(Exception):
    """The cause of an error in a worker process: its traceback there, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"in a DataLoader worker\n{self.text}"


class RawBatches:
    """The batches of a raw message, in the training process: arrays are made batch by batch.

    Args:
        buffer: the samples, end to end.
        sizes: in bytes; one number if all are the same, else int64[n] as bytes.
        batches, samples: how many came before in the epoch.
        count: samples in this message. batch_size: samples in each batch but perhaps the last.
    """

    def __init__(
        self,
        buffer: Any,
        sizes: int | bytes,
        batches: int,
        samples: int,
        count: int,
        batch_size: int,
    ) -> None:
        self._memory: Bytes | None = np.frombuffer(buffer, np.uint8)
        self._batches = batches
        self._samples = samples
        self._count = count
        self._batch_size = batch_size
        self._next = 0
        self._size = sizes if isinstance(sizes, int) else -1
        self._edges: list[int] = []
        if isinstance(sizes, bytes):
            self._edges = [0, *np.cumsum(np.frombuffer(sizes, np.int64)).tolist()]

    def __len__(self) -> int:
        return -(-(self._count - self._next) // self._batch_size)

    def popleft(self) -> tuple[int, int, list[Bytes]]:
        """Take the next batch. With the last one only its arrays hold the memory."""
        memory = self._memory
        assert memory is not None
        first, end = self._next, min(self._count, self._next + self._batch_size)
        self._next = end
        self._batches += 1
        if end == self._count:
            self._memory = None
        if self._size < 0:
            edges = pairwise(self._edges[first : end + 1])
            return self._batches, self._samples + end, [memory[a:b] for a, b in edges]
        shape = end - first, self._size
        table = np.ndarray(shape, np.uint8, memory, first * self._size)
        return self._batches, self._samples + end, [*table]


def _open_raw(place: tuple[Any, ...], *arguments: Any) -> RawBatches:
    return RawBatches(_segment(place), *arguments)


def _open_segment(place: tuple[Any, ...], start: int, stop: int) -> list[Any]:
    return _open(_segment(place), start, stop)


def _segment(place: tuple[Any, ...]) -> Any:
    """Return a buffer over a segment of this process; `place` is what `Sender.send` returned."""
    key, *where = place
    return receiver(key).open(*where)


def _open(buffer: Any, start: int, stop: int) -> list[Any]:
    whole = memoryview(buffer).cast("B")
    answers: list[Any] = []
    for head, *content in pickle.loads(whole[start:stop]):
        if isinstance(head, BatchFailure):
            answers.append(head)
            continue
        kind, *rest = content
        if isinstance(kind, bytes):
            batch: Any = _cut(np.frombuffer(buffer, np.uint8), np.frombuffer(kind, np.int64))
        elif isinstance(kind, torch.dtype):
            shape, first, end = rest
            batch = torch.frombuffer(whole[first:end], dtype=kind).view(shape)
        else:
            first, end = kind
            batch = pickle.loads(whole[first:end], buffers=[whole[a:b] for a, b in rest])
        answers.append((*head, batch))
    return answers


class MessageWriter:
    """Makes messages in a worker.

    torch's collation puts its tensors into the message, whoever calls it in this process.

    Args: sender: the worker's segments.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        if default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn is not None:
            default_collate_fn_map[torch.Tensor] = self._stack
        self._payload: Payload | None = None
        self._batch_count = 1
        self._expected_size = 0
        self._tables: list[tuple[torch.Tensor, Alive]] = []
        self._unplaced = 0

    def raw(
        self,
        reader: Reader | FileReader,
        indices: Int64s,
        batches: int,
        samples: int,
        batch_size: int,
    ) -> WorkerMessage | None:
        """Return a message of raw samples; None if not all of them can be read.

        Args: as of ``RawBatches``.
        """
        segment: Segment | None = None
        try:
            sizes = reader.sizes(indices)
            segment = self._sender.take(int(sizes.sum()))
            out = None if segment is None else np.frombuffer(segment.lend(), np.uint8)
            batch = reader.read_batch(indices, out=out)
        except Exception:  # of any of these batches
            if segment is not None:
                segment.flag.set(FREE)
            return None
        size = int(sizes[0])
        common = size if (sizes == size).all() else sizes.tobytes()
        arguments = common, batches, samples, len(indices), batch_size
        if segment is None:
            return WorkerMessage(RawBatches, bytearray(batch.buffer), *arguments)
        return WorkerMessage(_open_raw, self._sender.send(segment), *arguments)

    @contextlib.contextmanager
    def message(self, batch_count: int) -> Iterator[None]:
        """Begin a message of so many batches; within, samples are read into it."""
        self._payload = None
        self._tables.clear()
        self._batch_count = batch_count
        with placing(self._place):
            yield

    def batch_made(self) -> None:
        """Note that a batch was made. If the caller still holds samples that share memory with its
        tensors, these tensors become copies."""
        for table, alive in self._tables:
            if alive() is not None:
                copy = table.clone()
                table.set_(copy.untyped_storage(), 0, copy.shape, copy.stride())
        self._tables.clear()

    def finish(self, answers: list[Any]) -> Any:
        """Return a message of the answers, or the answers if only torch can pass them on.

        Args: answers: (batches, samples, batch) or BatchFailure; emptied if the message has them.
        """
        payload, self._payload = self._payload or Payload(None), None
        try:
            for number in range(len(answers)):
                payload.add(answers[number])
        except Exception:  # torch may know what to do with it, or says what is wrong
            return answers
        start, stop = payload.finish()
        answers.clear()  # or its batches would count as held by somebody
        self._expected_size = max(stop, self._expected_size - self._expected_size // 8)
        self._unplaced = max(0, self._unplaced - 1)
        segment = payload.segment
        if segment is None and stop <= INLINE_SIZE:
            return self._inline(payload, start, stop)
        if segment is not None:
            is_held = not payload.release()
            if is_held or payload.placed_in_vain:
                self._unplaced = UNPLACED_COUNT
            if is_held or stop > segment.room:
                segment = None
        in_place = segment is not None
        if segment is None:
            segment = self._sender.take(stop)
        if segment is None:
            return self._inline(payload, start, stop)
        segment.flag.set(TAKEN)
        payload.write(np.frombuffer(segment.lend(), np.uint8), everything=not in_place)
        return WorkerMessage(_open_segment, self._sender.send(segment), start, stop)

    def _inline(self, payload: Payload, start: int, stop: int) -> WorkerMessage:
        buffer = bytearray(stop)
        payload.write(np.frombuffer(buffer, np.uint8), everything=True)
        return WorkerMessage(_open, buffer, start, stop)

    def _place(self, sizes: Int64s) -> tuple[list[Bytes], NDArray[np.uint64]] | None:
        """Return arrays for samples that are about to be read; see `client.source.Place`."""
        if self._unplaced or int(sizes.max(initial=0)) < PLACED_SIZE:
            return None
        payload = self._reserve(int(sizes.sum()) + ALIGNMENT * len(sizes))
        return None if payload is None else payload.place_samples(sizes)

    def _stack(self, tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        """Collate tensors as torch does, but into the message, or into memory of their own: torch
        makes a file in /dev/shm for each batch."""
        first = tensors[0]
        if not is_plain(first) or first.requires_grad:
            return collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
        size = first.numel() * first.element_size()
        table = self._table(tensors, size) if size >= PLACED_SIZE else None
        if table is not None:
            return table
        size *= len(tensors)
        payload = self._reserve(size + ALIGNMENT)
        memory = None if payload is None or not size else payload.place(size)
        if memory is None:
            return torch.stack(list(tensors), 0)
        out = torch.frombuffer(memory, dtype=first.dtype).view(len(tensors), *first.shape)
        return torch.stack(list(tensors), 0, out=out)

    def _table(self, tensors: Sequence[torch.Tensor], size: int) -> torch.Tensor | None:
        """Return tensors that were read side by side as the batch that they are together."""
        first, count = tensors[0], len(tensors)
        if (
            self._payload is None
            or set(map(type, tensors)) != {torch.Tensor}
            or {(t.dtype, t.shape, t.requires_grad, t.is_contiguous(), t.is_neg()) for t in tensors}
            != {(first.dtype, first.shape, False, True, False)}
            or first.dtype.is_complex
        ):
            return None
        begin = first.data_ptr()
        wanted = range(begin, begin + count * size, size)
        if any(t.data_ptr() != at for t, at in zip(tensors, wanted, strict=True)):
            return None
        claimed = self._payload.claim_table(begin, count, size)
        if claimed is None:
            return None
        memory, alive = claimed
        table = torch.frombuffer(memory, dtype=first.dtype).view(count, *first.shape)
        self._tables.append((table, alive))
        return table

    def _reserve(self, size: int) -> Payload | None:
        """Return the payload of this message; None if there is no segment for it."""
        if self._payload is None:
            expected = self._expected_size or size * self._batch_count
            segment = self._sender.take(max(expected, size) + INLINE_SIZE)
            if segment is None:
                return None
            self._payload = Payload(segment)
        return self._payload


class Payload:
    """The bytes of a message while it is made.

    Samples and stacked tensors may lie in the segment before the batches are added. Each piece of
    memory is claimed once, by the first array over it that is added; further ones are copied.

    Args: segment: where it lies; None: that is decided when its size is known.
    """

    def __init__(self, segment: Segment | None) -> None:
        self.segment = segment
        self._size = 0
        self._memory: Bytes | None = None
        self._address = 0
        self._alive: Alive = _nobody
        if segment is not None:
            lent = segment.lend()
            # The last holder of the memory frees the segment, unless it is sent.
            weakref.finalize(lent, give_back, segment, os.getpid()).atexit = False
            self._alive = weakref.ref(lent)
            self._memory = np.frombuffer(lent, np.uint8)
            self._address = int(addresses([self._memory])[0])
        self._samples: dict[int, int] = {}
        """Where samples begin and end that were read here and not claimed."""
        self._tensors: dict[int, int] = {}
        """The same of stacked tensors."""
        self._sample_count = 0
        self._reads: dict[int, tuple[Int64s, Int64s, Alive]] = {}
        """By where it begins: what one read put side by side, and whether anybody holds it."""
        self._pieces: list[tuple[int, Bytes]] = []
        """Where arrays will be copied to, and the arrays."""
        self._in_place: list[tuple[int, int]] = []
        self._table: list[tuple[Any, ...]] = []

    @property
    def placed_in_vain(self) -> bool:
        """Whether samples were read into the segment, and no batch has any of them."""
        return 0 < self._sample_count == len(self._samples)

    def place_samples(self, sizes: Int64s) -> tuple[list[Bytes], NDArray[np.uint64]] | None:
        """Return an array for each sample, and their addresses; None if they do not fit."""
        begins, ends = _edges(self._size, sizes)
        if self._memory is None or not len(sizes) or int(ends[-1]) > len(self._memory):
            return None
        self._size = int(ends[-1])
        first = int(begins[0])
        # A buffer of its own: while it exists, an object holds one of these samples.
        own = np.frombuffer(self._memory[first : self._size].data, np.uint8)
        self._reads[first] = begins, ends, weakref.ref(own)
        known = len(self._samples)
        self._samples.update(zip(begins.tolist(), ends.tolist(), strict=True))
        self._sample_count += len(self._samples) - known
        arrays = _cut(own, np.concatenate((begins, ends)) - first)
        return arrays, (begins + self._address).view(np.uint64)

    def place(self, size: int) -> Bytes | None:
        """Return memory for a tensor, or None if it does not fit."""
        first = _aligned(self._size)
        if self._memory is None or first + size > len(self._memory):
            return None
        self._size = first + size
        self._tensors[first] = self._size
        return self._memory[first : self._size]

    def claim_table(self, address: int, count: int, size: int) -> tuple[Bytes, Alive] | None:
        """Return the memory of one whole read, if it is a table of unclaimed samples of this size.

        Returns: a view, and what tells whether anybody holds one of the samples.
        """
        first = address - self._address
        end = first + count * size
        begins, ends, alive = self._reads.get(first, (_NONE, _NONE, _nobody))
        if self._memory is None or len(begins) != count or int(ends[-1]) != end:
            return None
        if (ends - begins != size).any() or not self._samples.keys() >= set(begins.tolist()):
            return None
        for begin in begins.tolist():
            del self._samples[begin]
        self._tensors[first] = end
        return self._memory[first:end], alive

    def add(self, answer: Any) -> None:
        """Add an answer behind the others."""
        if isinstance(answer, BatchFailure):
            self._table.append((answer,))
            return
        *head, batch = answer
        if _is_rows(batch):
            self._table.append((head, self._add_rows(batch).tobytes()))
        elif type(batch) is torch.Tensor and (span := self._claim_tensor(batch)) is not None:
            self._table.append((head, batch.dtype, tuple(batch.shape), *span))
        else:
            stream = io.BytesIO()
            buffers: list[Bytes] = []
            Pickler(stream, buffers).dump(batch)
            spans = self._add_arrays(buffers)
            pickled = self._append(np.frombuffer(stream.getbuffer(), np.uint8))
            self._table.append((head, pickled, *spans))

    def finish(self) -> tuple[int, int]:
        """Add the table of all answers; return where it lies. The second is the size of all."""
        return self._append(np.frombuffer(pickle.dumps(self._table, protocol=5), np.uint8))

    def release(self) -> bool:
        """Drop the memory; return whether no other object holds any of it."""
        self._memory = None
        return self._alive() is None

    def write(self, to: Bytes, *, everything: bool) -> None:
        """Copy the pieces to their places; everything: also what was claimed in the segment.

        The segment's memory is still as it was: it is not used again before this returns.
        """
        if everything and self._in_place:
            assert self.segment is not None
            memory = np.frombuffer(self.segment.lend(), np.uint8)
            for first, end in self._in_place:
                to[first:end] = memory[first:end]
        for first, piece in self._pieces:
            to[first : first + piece.nbytes] = piece

    def _add_rows(self, rows: list[Bytes]) -> Int64s:
        """Return where the samples of a batch begin, and where they end: int64[2, n]."""
        if self._samples:
            return np.array(self._add_arrays(rows), np.int64).T
        edges = np.cumsum([0, *map(len, rows)])
        first, _end = self._append(np.concatenate(rows))
        return np.stack((edges[:-1], edges[1:])) + first

    def _add_arrays(self, arrays: Sequence[Bytes]) -> list[tuple[int, int]]:
        """Return the place of each array: the one that it already has, or the one that it will be
        copied to."""
        if not self._samples or not all(array.flags.c_contiguous for array in arrays):
            return [self._append(array) for array in arrays]
        return [
            self._claim(address, array.nbytes) or self._append(array)
            for address, array in zip(addresses(arrays).tolist(), arrays, strict=True)
        ]

    def _claim_tensor(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the place of a tensor in the segment, if it is all of its storage, in order."""
        size = tensor.numel() * tensor.element_size()
        if (
            self.segment is None
            or tensor.requires_grad
            or not is_plain(tensor)
            or not tensor.is_contiguous()
            or tensor.untyped_storage().nbytes() != size
        ):
            return None
        return self._claim(tensor.data_ptr(), size)

    def _claim(self, address: int, size: int) -> tuple[int, int] | None:
        first = address - self._address
        for pieces in (self._samples, self._tensors):
            if 0 < size <= pieces.get(first, first) - first:
                del pieces[first]
                self._in_place.append((first, first + size))
                return first, first + size
        return None

    def _append(self, piece: Bytes) -> tuple[int, int]:
        first = _aligned(self._size)
        self._size = first + piece.nbytes
        self._pieces.append((first, piece))
        return first, self._size


def _nobody() -> None:
    return None


_NONE = np.empty(0, np.int64)


def _is_rows(batch: Any) -> bool:
    """Return whether a batch is a list of raw samples, which need not be pickled."""
    if type(batch) is not list or not batch:
        return False
    for row in batch:
        if type(row) is not np.ndarray or row.ndim != 1 or row.dtype is not _UINT8:
            return False
    return True


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _edges(size: int, sizes: Int64s) -> tuple[Int64s, Int64s]:
    """Return where samples begin and end that lie side by side behind so many bytes."""
    ends = np.cumsum((sizes + (ALIGNMENT - 1)) & -ALIGNMENT) + _aligned(size)
    begins = np.empty_like(ends)
    begins[:1], begins[1:] = _aligned(size), ends[:-1]
    return begins, begins + sizes


def _cut(memory: Bytes, edges: Int64s) -> list[Bytes]:
    """Return views of the memory. Args: edges: first where all begin, then where all end."""
    begins, ends = edges.reshape(2, -1)
    count = len(begins)
    if count > 1:
        size, step = int(ends[0] - begins[0]), int(begins[1] - begins[0])
        if step >= size and (ends - begins == size).all() and (np.diff(begins) == step).all():
            # The rows of a table are cheaper to make than slices.
            table = np.ndarray((count, size), np.uint8, memory, int(begins[0]), (step, 1))
            return [*table]
    return [memory[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]


def keep_queues(iterator: Iterator[Any]) -> None:
    """Keep the workers' queues until torch's iterator has used them for the last time.

    When it is deleted, it tells its workers through ``_index_queues``, a private attribute, to end.
    If it dies in a circle of garbage Python may close the queues first; then it waits five seconds
    for each worker and kills it. Without the attribute that is how it stays.
    """
    queues = getattr(iterator, "_index_queues", None)
    weakref.finalize(iterator, _nothing, queues).atexit = False


def _nothing(_queues: Any) -> None:
    pass
