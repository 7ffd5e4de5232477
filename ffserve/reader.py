"""The public reader: one index space over shards, wherever the samples come from.

A Reader survives what training scripts do to it. It can be used by threads; it can be forked,
spawned and pickled at any time, whatever was done with it before, because the copy connects anew
at its first use; when the daemon restarts in mid-epoch, the batch that was on its way is asked for
again as a whole, so nothing is lost or doubled. A copy, or a reader that reconnects, refuses to go
on if the files are not those that the reader was opened on.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from ffserve.client import connections
from ffserve.client.announced import Announced, check_count
from ffserve.client.base import BaseReader, check_options
from ffserve.client.choice import Wanted, closed_error
from ffserve.client.in_order import (
    READ_AHEAD_COUNT,
    READ_AHEAD_SIZE,
    SIZES_AT_ONCE,
    cut,
    requests,
    taken_apart,
)
from ffserve.client.local import LocalSource
from ffserve.client.source import Batch, Bytes, Int64s, Leased
from ffserve.client.supply import Supply
from ffserve.dataset import PathLike, ShardInfo, expand_paths
from ffserve.errors import FFServeError, ServerUnavailable, UsageError
from ffserve.files import is_compressed

if TYPE_CHECKING:
    from ffserve.client.source import Source


def open(
    paths: PathLike | Sequence[PathLike],
    *,
    format: str | None = None,
    server: str = "auto",
    verify: bool = True,
    on_error: Literal["raise", "skip"] = "raise",
) -> Reader:
    """Open record files as one sequence of samples.

    Args:
        paths: one file, a directory, a glob pattern, or a sequence of these; samples are numbered
            through them in order.
        format: "ffrecord", "recordio", "tfrecord", or None to tell by content, then by suffix.
        server: "auto": the daemon if its socket answers, else an engine in this process; which
            one it is stands in `reader.source`. "require": the daemon. "off": no daemon. Else a
            socket's path, which is required to answer.
        verify: check every sample against its checksum, and the files' tables at opening.
        on_error: "raise", or "skip" to leave out damaged samples: everything is read once to find
            them, and the reader then holds only the intact ones, in order. What was left out
            stands in `reader.damaged`. A file that is damaged between its samples, or was cut, is
            read as far as it can be.

    A TFRecord file that is compressed (GZIP, ZLIB) can only be iterated: its reader has no length
    and no indices, and the daemon cannot serve it. `ffserve convert` makes other files of it.

    Returns: a Reader; close it, or use `with`.

    Raises:
        FormatError, ChecksumError, TruncatedError: a file is not what its format demands.
        MissingFile (a FileNotFoundError), AccessDenied, ReadError: a file cannot be opened.
        ServerUnavailable: a daemon is required and does not answer.
        UsageError: an option that is none; a compressed file, asked of a daemon.

    Cost: with a daemon that has the files open already one round trip; else their tables are read.
    """
    suffixes = check_options(format, server, on_error)
    tolerant = on_error == "skip"
    files = expand_paths(paths, suffixes=suffixes)
    if format in (None, "tfrecord") and is_compressed(files[0]):
        from ffserve.client import stream
        from ffserve.formats.tfstream import InOrderOnlyError

        if server not in ("auto", "off"):
            raise InOrderOnlyError.of(files[0])
        return stream.StreamReader(files, verify=verify, tolerant=tolerant)
    reader = Reader(files, format, server, verify, tolerant)
    if tolerant:
        try:
            reader._leave_out_damaged()
        except BaseException:
            reader.close()
            raise
    return reader


class Reader(BaseReader, Sequence[Bytes]):
    """Samples of a data set by index. Made by `ffserve.open`."""

    _name = "ffserve.Reader"

    def __init__(
        self,
        paths: tuple[str, ...],
        format: str | None,
        server: str,
        verify: bool,
        tolerant: bool = False,
    ) -> None:
        super().__init__(Wanted(paths, format, server, verify, tolerant))
        self._supply.open()

    def _set_up(self) -> None:
        self._announced = Announced()
        self._supply = Supply(self._wanted, self._announced)
        connections.after_fork(self)

    @property
    def source(self) -> str:
        """Where samples come from now, such as "daemon /run/ffserve/ffserve.sock" or
        "engine uring"."""
        return self._supply.current().description

    @property
    def shards(self) -> list[ShardInfo]:
        """The files, in order."""
        return list(self._supply.current().shards)

    # ---- reading --------------------------------------------------------------------------

    @overload
    def read(self, indices: Any, *, errors: Literal["raise"] = "raise") -> list[Bytes]: ...
    @overload
    def read(self, indices: Any, *, errors: Literal["return"]) -> list[Bytes | FFServeError]: ...
    def read(
        self, indices: Any, *, errors: Literal["raise", "return"] = "raise"
    ) -> list[Bytes] | list[Bytes | FFServeError]:
        """Read samples.

        Args:
            indices: list, tuple, range, set, generator or integer ndarray; any number, also none;
                order and repeats are kept.
            errors: "raise" the first damaged sample's error, or "return" errors in the places of
                their samples, the others being there.

        Returns: one array a sample: uint8[size], writable, owning its memory.

        Raises:
            SampleIndexError: an index outside the data set; nothing is read.
            ChecksumError, TruncatedError, ReadError: of the first sample that failed.
            ServerUnavailable: the daemon is required and stayed away.

        Cost: at most one round trip for each 8 MiB of the batch, none when all is in memory; one
            copy.
        """
        numbers = self._numbers(indices)

        def attempt(source: Source) -> tuple[list[Bytes], dict[int, FFServeError]]:
            pending = source.start(numbers, apart=True)
            failed = source.finish(pending)
            assert pending.target.arrays is not None
            return pending.target.arrays, failed

        arrays, failed = self._supply.retrying(attempt)
        self._used(numbers)
        return self._mixed(arrays, failed, numbers, errors)

    def read_batch(self, indices: Any, *, out: Bytes | None = None) -> Batch:
        """Read samples into one buffer.

        Args:
            indices: as for `read`.
            out: a writable, contiguous uint8 array to use instead of a new one; must hold the
                batch, may be larger (pinned memory, for instance).

        Returns: a Batch with `.buffer` uint8[total] and `.offsets` int64[n + 1]; it owns them.

        Raises: as `read`; UsageError for an `out` that cannot be used.

        Cost: as `read`, with one allocation for the whole batch. Least for an int64 array.
        """
        if type(indices) is np.ndarray:
            copied = self.copied(indices, out)
            if copied is not None:
                return copied
        numbers = self._numbers(indices)

        def attempt(source: Source) -> tuple[Batch, dict[int, FFServeError]]:
            pending = source.start(numbers, apart=False, out=out)
            failed = source.finish(pending)
            assert pending.target.buffer is not None
            return Batch(pending.target.buffer, pending.target.offsets), failed

        batch, failed = self._supply.retrying(attempt)
        self._used(numbers)
        self._raise_first(failed, numbers)
        return batch

    def copied(self, indices: NDArray[Any], out: Bytes | None = None) -> Batch | None:
        """Read as `read_batch` does, but only a batch that is all in memory.

        Args: indices: an int64 array. out: as for `read_batch`.

        Returns: None where anything has to be waited for, is not as it should be, or has no room
            in `out`.

        Raises: UsageError for an `out` that cannot be used.
        """
        source = self._supply.source
        if source is None or self._intact is not None:
            return None
        batch = source.copied(indices, out)
        if batch is not None and self._announced:
            self._used(indices)
        return batch

    def lease(self, indices: Any) -> AbstractContextManager[Leased]:
        """Read samples in place.

        Args: indices: as for `read`.

        Returns: a context manager that gives a sequence of read-only views, straight into the
            daemon's arena where possible; they are valid until it is left, and may show other
            samples' bytes afterwards. A child that was forked meanwhile sees the same for as long
            as its parent holds them; that a daemon ends changes nothing.

        Raises: SampleIndexError at once; the rest as `read`, on entry.

        Cost: one round trip to the daemon, one message more on leaving, no copy. All leases of all
            processes together hold at most half of the arena; samples beyond that are copied.
            Leased samples cannot be evicted: leave soon.
        """
        return self._leasing(self._numbers(indices))

    @contextlib.contextmanager
    def _leasing(self, numbers: Int64s) -> Iterator[Leased]:
        leased = self._supply.retrying(lambda source: source.lease(numbers))
        try:
            self._used(numbers)
            yield leased
        finally:
            leased.release()

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> Bytes: ...
    @overload
    def __getitem__(self, index: slice | list[int] | NDArray[np.integer[Any]]) -> list[Bytes]: ...
    def __getitem__(self, index: Any) -> Bytes | list[Bytes]:
        if isinstance(index, slice):
            return self.read(range(*index.indices(len(self))))
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            return self.read([int(index)])[0]
        return self.read(index)

    def __iter__(self) -> Iterator[Bytes]:
        for batch in self.batches():
            yield from (sample.copy() for sample in batch)

    def batches(
        self, indices: Any = None, *, count: int = READ_AHEAD_COUNT, size: int = READ_AHEAD_SIZE
    ) -> Iterator[Batch]:
        """Read in order with read-ahead, in batches of at most `count` samples and about `size`
        bytes, of which the next few (`batches_ahead`) are on their way. Small ones are asked for
        together (`together`), and are parts of one buffer then.

        Args: indices: as for `read`; None for all.
        Raises: as `read`, when the batch concerned is due.
        """
        numbers = self._all_numbers() if indices is None else self._numbers(indices)
        with contextlib.closing(self._in_order(numbers, count, size)) as answers:
            for part, batch, failed in answers:
                self._raise_first(failed, part)
                yield batch

    def scan(
        self, *, count: int = READ_AHEAD_COUNT, size: int = READ_AHEAD_SIZE
    ) -> Iterator[tuple[int, Batch, dict[int, FFServeError]]]:
        """Read everything in order as `batches` does, and go on behind damage.

        Yields: the index of the batch's first sample, the batch, and the errors of those samples
            in it that failed, by position; their bytes in the batch mean nothing.
        Raises: ServerUnavailable, as `read`.
        """
        first = 0
        with contextlib.closing(self._in_order(self._all_numbers(), count, size)) as answers:
            for part, batch, failed in answers:
                named = {k: self._named(error, k, part) for k, error in sorted(failed.items())}
                yield first, batch, named
                first += len(part)

    def _in_order(
        self, numbers: Int64s, count: int, size: int
    ) -> Generator[tuple[Int64s, Batch, dict[int, FFServeError]], None, None]:
        ahead: deque[tuple[list[Int64s], tuple[Int64s, Source, Any]]] = deque()
        try:
            for parts, whole, most in requests(self._parts(numbers, count, size), count):
                ahead.append((parts, self._start(whole)))
                if len(ahead) >= most:
                    yield from self._taken_apart(*ahead.popleft())
            while ahead:
                yield from self._taken_apart(*ahead.popleft())
        finally:
            # What nobody waits for any more still has its buffers and its pins.
            for _, (_, source, pending) in ahead:
                self._discard(source, pending)

    def _taken_apart(
        self, parts: list[Int64s], begun: tuple[Int64s, Source, Any]
    ) -> Iterator[tuple[Int64s, Batch, dict[int, FFServeError]]]:
        batch, failed = self._finish(*begun)
        for part, some, errors in taken_apart(parts, batch, failed):
            if self._wanted.closed:
                raise closed_error()
            self._used(part)
            yield part, some, errors

    def _parts(self, numbers: Int64s, count: int, size: int) -> Iterator[tuple[Int64s, int]]:
        for start in range(0, len(numbers), SIZES_AT_ONCE):
            some = numbers[start : start + SIZES_AT_ONCE]
            yield from cut(some, self._estimates_of(some), count, size)

    def _start(self, numbers: Int64s) -> tuple[Int64s, Source, Any]:
        return self._supply.retrying(
            lambda source: (numbers, source, source.start(numbers, apart=False))
        )

    def _finish(
        self, numbers: Int64s, source: Source, pending: Any
    ) -> tuple[Batch, dict[int, FFServeError]]:
        if self._wanted.closed:
            self._discard(source, pending)
            raise closed_error()
        try:
            if not self._supply.has(source):
                raise ServerUnavailable("the daemon went away meanwhile")
            failed = source.finish(pending)
        except ServerUnavailable as error:
            if not isinstance(source, LocalSource):
                self._supply.replace(source, error)
            _, source, pending = self._start(numbers)
            return self._finish(numbers, source, pending)
        return Batch(pending.target.buffer, pending.target.offsets), failed

    def _discard(self, source: Source, pending: Any) -> None:
        if self._supply.has(source):
            with contextlib.suppress(FFServeError):
                source.finish(pending)

    # ---- what will be read ----------------------------------------------------------------

    def announce(
        self,
        order: Any,
        epoch: int = 0,
        *,
        name: str | None = None,
        replacement: bool = False,
    ) -> None:
        """Tell the daemon which samples this job will ask for, in order.

        The daemon then reads ahead exactly and keeps what will be needed soonest by any job. It
        needs this epoch and the next: announce both at the beginning, and each further one when
        the one before it begins. Without a daemon nothing happens. A process that was made by
        another one (a rank) is a job of its own from its first announcement on.

        Args:
            order: all indices of the epoch, as for `read`; none twice, unless `replacement`. Not
                all samples of the data set need to be in it.
            epoch: integer from 0. Announcing it again replaces what was announced; an earlier
                epoch than the current one means that the job begins anew.
            name: of an order that jobs share, for people to read.
            replacement: the samples are drawn with replacement.

        Raises:
            SampleIndexError: an index outside the data set, or one that comes twice.
            UsageError: no order, or one that the daemon has no room for. The job is served
                as before.

        Cost: 4 bytes a sample through the socket; one round trip.
        """
        announcement = self._checked_order(order, epoch, name, replacement)
        self._supply.lead()
        self._supply.retrying(lambda source: source.announce(*announcement))
        self._announced.add(*announcement)

    def reached(self, epoch: int, position: int) -> None:
        """Tell the daemon that the first `position` samples of an announced order were used.

        Who reads in the announced order with this very reader need not call it: the reader counts
        until this is called for the first time. A loader whose workers read calls it, a few times
        a second.

        Args: epoch, position: integers from 0.
        Raises: UsageError for anything else.
        Cost: one small message, no answer, no waiting: a daemon that started anew is looked for in
            a thread, and told what was announced.
        """
        epoch, position = check_count("epoch", epoch), check_count("position", position)
        if self._wanted.closed:
            raise closed_error()
        self._announced.told(epoch, position)
        self._report(epoch, position)

    def _report(self, epoch: int, position: int) -> None:
        source = self._supply.source
        known = source is not None and source.reached(epoch, position)
        if self._announced and not (known and self._supply.away_since is None):
            self._supply.look_for_daemon(source)

    def _used(self, numbers: Int64s) -> None:
        due = self._announced.read(numbers) if self._announced else None
        if due is not None:
            self._report(*due)

    # ---- about the samples ----------------------------------------------------------------

    def estimates(self, indices: Any = None) -> Int64s:
        """Return lengths in bytes, int64[n], as `sizes`, but a guess instead of a read where a
        length is not known."""
        return self._estimates_of(
            self._all_numbers() if indices is None else self._numbers(indices)
        )

    def _estimates_of(self, numbers: Int64s) -> Int64s:
        return self._supply.retrying(lambda source: source.estimate(numbers))

    def _sizes_of(self, numbers: Int64s | None) -> Int64s:
        return self._supply.retrying(lambda source: source.sizes(numbers))

    def sizes(self, indices: Any = None) -> Int64s:
        """Return lengths in bytes, int64[n]; None for all.

        Raises: as `read`, for a sample whose length cannot be known.

        Cost: no sample is read, but where they lie in chunks (RecordIO): those that nobody read
            before are.
        """
        if indices is None:
            return self._sizes_of(self._intact)
        return self._sizes_of(self._numbers(indices))

    def tables(
        self, shard: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of the tables of `shards[shard]`: payload offsets in the file, lengths,
        expected checksums."""
        if not 0 <= shard < len(self._wanted.paths):
            raise UsageError(f"there are {len(self._wanted.paths)} shards, not {shard + 1}")
        return self._supply.retrying(lambda source: source.tables(shard))

    def _leave_out_damaged(self) -> None:
        bad: dict[int, FFServeError] = {}
        for first, _, failed in self.scan():
            bad.update((first + k, error) for k, error in failed.items())
        self._leave_out(bad)

    def stats(self) -> dict[str, int | float | str]:
        """Return what this process read through this reader: samples, bytes, hits (copied
        without asking the daemon), misses, hit_rate, and the source; unserved: why a daemon that
        is there is not that, where this is so."""
        return self._summed(self._supply.current())

    # ---- life -----------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back; idempotent. Later reads raise UsageError."""
        self._supply.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def after_fork(self) -> None:
        """This process is a child: connect anew at the next use."""
        self._announced.forget()
        self._supply.after_fork()
