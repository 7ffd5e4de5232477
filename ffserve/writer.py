"""Writing record files: any format, any number of samples, all or nothing.

The samples go to a file that takes its name when everything is written and synced; see `staging`.

Some formats (FFRecord) put tables in front of the samples whose size depends on the number of
samples. If that number is not given, the samples go to a second, nameless file first and are moved
behind the tables at the end, last piece first, the nameless file shrinking as they go: the disk
never holds them twice. What fits the gathering buffer never touches the second file.
"""

from __future__ import annotations

import errno
import fcntl
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ffserve import formats
from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.files import os_error, read_at_of, wrap_os_error
from ffserve.formats.base import BatchEncoder, Encoder, GrowingEncoder
from ffserve.formats.recordio import FORMAT as RECORDIO
from ffserve.output import Files, named, naming

GATHER_SIZE = 4 << 20
"""Smaller pieces are gathered into writes of this size."""

_MOVE_SIZE = 64 << 20
_NOT_COPYABLE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def create(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    n: int | None = None,
    compression: str | None = None,
    dialect: str | None = None,
    max_chunk_size: int | None = None,
) -> Writer:
    """Begin a record file.

    Args:
        path: where the file will stand; its suffix names the format unless ``format`` does. An
            existing file is replaced at ``close``, and stays as it is until then.
        format: ``"ffrecord"``, ``"recordio"`` or ``"tfrecord"``.
        n: the number of samples, if known: ``close`` then demands exactly so many, and formats
            with tables in front need no second file.
        compression: ``"none"``, ``"snappy"``, ``"gzip"``, ``"zlib"``, where the format has it.
            TFRecord takes it from the suffixes ``.gz`` and ``.zlib`` if it is not given.
        dialect: RecordIO: ``"py"`` or ``"go"``.
        max_chunk_size: RecordIO: payload bytes a chunk.
    Returns: a Writer, best used with ``with``.
    Raises:  UsageError for an unknown format, an option that it lacks, or a path that cannot be
             replaced by a file; ReadError or AccessDenied when no file can be made there.
    Cost:    one file created.
    """
    name = os.fsdecode(path)
    chosen = formats.by_name(format) if format is not None else formats.by_suffix(name)
    if chosen is None:
        raise UsageError(
            "the suffix tells no format",
            path=name,
            hint=f"give format=, one of {', '.join(formats.NAMES)}",
        )
    if compression is None and chosen.name == "tfrecord":
        endings = {".gz": "gzip", ".zlib": "zlib"}
        compression = endings.get(os.path.splitext(name)[1].lower())
    if n is not None:
        n = _whole_number("n", n)
    encoder = chosen.writer(
        n=n, compression=compression, dialect=dialect, max_chunk_size=max_chunk_size
    )
    return Writer(name, encoder, n)


class Writer:
    """A record file in the making; made by ``create``.

    Usable from several threads; samples then stand in the order in which ``write`` got them.
    After a fork the file belongs to the parent: the child's copy can neither add to it, nor
    finish it, nor remove it.

    A failed write (a full disk, say) removes what was written; ``close`` reports it again.
    """

    def __init__(self, path: str, encoder: Encoder, n: int | None) -> None:
        self.path = path
        self.n = n
        self._encoder = encoder
        self._growing = encoder if isinstance(encoder, GrowingEncoder) else None
        self._count = 0
        self._state = "open"
        self._failure: FFServeError | None = None
        self._lock = threading.Lock()
        with naming(path):
            files = self._files = Files(path)
        self._dropped = weakref.finalize(self, files.discard)
        self._spooled = n is None and encoder.head_size(1) != encoder.head_size(0)
        if self._spooled:
            self._stream = _Stream(files.spool, 0)
        else:
            self._stream = _Stream(lambda: files.fd, encoder.head_size(n or 0))

    @property
    def count(self) -> int:
        """Samples written so far."""
        return self._count

    @property
    def position(self) -> int:
        """Bytes of records written so far, as they stand in the file (head excepted)."""
        return self._stream.position

    @property
    def finished(self) -> bool:
        """Whether the file was closed or given up."""
        return self._state != "open"

    def write(self, buffer: Any, /) -> None:
        """Append one sample.

        Args:
            buffer: bytes, or anything with the buffer protocol, of any item size and shape: its
                bytes are stored whole, in C order (copied first if they do not lie so).
        Raises:  UsageError for what is no buffer (str has to be encoded), for more than ``n``
                 samples, and after close; ReadError when the file cannot be written, which
                 removes it.
        Cost:    one checksum; no copy for samples of 4 MiB and more, one for smaller ones.
        """
        self._check_owner()
        with self._lock:
            self._check_open()
            encoded = self._encode(flat(buffer))
            try:
                self._put(encoded)
            except BaseException as error:
                self._give_up(error)
                raise
            self._count += 1

    def write_batch(self, payloads: NDArray[np.uint8], offsets: NDArray[np.int64], /) -> None:
        """Append samples that lie back to back, such as a ``Batch`` has them.

        Args:    payloads: uint8, contiguous. offsets: int64[n + 1], rising from 0 to its length;
                 sample i is payloads[offsets[i]:offsets[i + 1]].
        Raises:  as ``write``; UsageError for arrays that are not so.
        Cost:    as ``write``, but for small samples a tenth of the time.
        """
        edges = np.ascontiguousarray(offsets, np.int64)
        size = payloads.nbytes
        if not len(edges) or edges[0] or edges[-1] != size or bool((np.diff(edges) < 0).any()):
            raise UsageError("offsets have to rise from 0 to the length of the payloads")
        encoder = self._encoder
        if not isinstance(encoder, BatchEncoder):
            view = flat(payloads)
            for first, stop in pairwise(edges.tolist()):
                self.write(view[first:stop])
            return
        self._check_owner()
        with self._lock:
            self._check_open(len(edges) - 1)
            try:
                self._put(encoder.encode_batch(np.frombuffer(flat(payloads), np.uint8), edges))
            except BaseException as error:
                self._give_up(error)
                raise
            self._count += len(edges) - 1

    def write_pieces(self, pieces: Iterable[Any], /) -> None:
        """Append one sample given in pieces, such as the blocks of a file.

        Args:    pieces: buffers as for ``write``; one after the other they make the sample.
        Raises:  as ``write``. An error from ``pieces`` itself goes through; if part of the
                 sample was written by then, the file is given up.
        Cost:    as ``write``; formats that must see a sample whole (RecordIO) join it.
        """
        self._check_owner()
        with self._lock:
            self._check_open()
            if self._growing is None:
                encoded = self._encode(memoryview(b"".join(flat(piece) for piece in pieces)))
                rest: Iterator[Any] = iter(())
            else:
                rest = iter(pieces)
                encoded = self._encode(flat(next(rest, b"")))
            try:
                self._put(encoded)
                for piece in rest:
                    assert self._growing is not None
                    self._put(self._growing.extend(flat(piece)))
            except BaseException as error:
                self._give_up(error)
                raise
            self._count += 1

    def close(self) -> None:
        """Finish the file, sync it, and give it its name; a second call does nothing.

        Raises:  UsageError when fewer than ``n`` samples were written (writing may then go on);
                 ReadError when the file could not be written, now or earlier.
        Cost:    writes back what the kernel holds; moves the samples if ``n`` was not known and
                 the format has tables in front.
        """
        if self._files.owner != os.getpid():
            self._files.discard()
            return
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._state != "open":
                return
            if self.n is not None and self._count < self.n:
                raise UsageError(
                    f"n={self.n} samples were announced, {self._count} were written",
                    path=self.path,
                    hint="write the others, or leave n out when the number is not known",
                )
            try:
                self._finish()
            except BaseException as error:
                self._give_up(error)
                raise
            self._state = "closed"
            self._dropped.detach()

    def abort(self) -> None:
        """Give the file up and remove what was written; whatever had its name before stays."""
        if self._files.owner != os.getpid():
            self._files.discard()
            return
        with self._lock:
            if self._state == "open":
                self._state = "aborted"
                self._dropped()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise

    def __repr__(self) -> str:
        announced = "" if self.n is None else f" of {self.n}"
        return f"<Writer {self.path!r}: {self._state}, {self._count}{announced} samples>"

    def __reduce__(self) -> NoReturn:
        raise UsageError("a Writer does not pickle", path=self.path, hint="one writer, one process")

    def _encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        try:
            return self._encoder.encode(payload)
        except FFServeError as error:
            raise error.located(path=self.path, index=self._count) from None
        except BaseException as error:
            self._give_up(error)
            raise

    def _put(self, encoded: Iterable[bytes | memoryview]) -> None:
        try:
            for piece in encoded:
                self._stream.append(piece)
        except OSError as error:
            raise named(error, self.path) from error

    def _finish(self) -> None:
        self._put(self._encoder.tail())
        head_size = self._encoder.head_size(self._count)
        with naming(self.path):
            if self._spooled:
                self._stream.move_to(self._files.fd, head_size)
            else:
                self._stream.flush()
            head = _Stream(lambda: self._files.fd, 0)
            for piece in self._encoder.head():
                head.append(piece)
            head.flush()
            assert head.position == head_size, (head.position, head_size)
            self._files.publish()

    def _give_up(self, error: BaseException) -> None:
        """Remove the file, of which half a sample may be written, and remember why."""
        self._state = "aborted"
        self._dropped()
        if isinstance(error, FFServeError):
            self._failure = error
        else:
            self._failure = ReadError(
                f"given up: {type(error).__name__} came in the middle of a sample",
                path=self.path,
                hint="what was written has been removed; write it again",
            )

    def _check_owner(self) -> None:
        if self._files.owner != os.getpid():
            raise UsageError(
                "this file is being written by the process that forked this one",
                path=self.path,
                hint="create a writer of its own in each process",
            )

    def _check_open(self, more: int = 1) -> None:
        if self._failure is not None:
            raise self._failure
        if self._state != "open":
            raise UsageError(f"the writer is {self._state}", path=self.path)
        if self.n is not None and self._count + more > self.n:
            raise UsageError(
                f"n={self.n} samples were announced and written, this is one more",
                path=self.path,
                index=self._count,
                hint="leave n out when the number is not known",
            )


def flat(buffer: Any) -> memoryview:
    """Return any buffer as a memoryview of its bytes in C order; copy only if they lie otherwise.

    Raises:  UsageError for what is no buffer.
    """
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        kind = type(buffer).__name__
        hint = "encode it first" if kind == "str" else "give bytes or an array that exports them"
        raise NotABufferError(f"a sample cannot be {kind}: {error}", hint=hint) from None
    if "O" in view.format:
        raise NotABufferError("a sample cannot be an array of objects", hint="pickle it first")
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        return memoryview(view.tobytes())
    try:
        return view.cast("B")
    except TypeError:  # a format such as '>f4' or a structure, which cast does not know
        return memoryview(view.tobytes())


class NotABufferError(UsageError, TypeError):
    """What should be stored as a sample has no bytes of its own."""


class Appender:
    """A RecordIO file that grows at its end.

    Args: dialect: "py", "go", or None for the file's own, and py for a new one; the others are
        those of `ffserve.create`.
    Raises: UsageError when the file has another dialect, or is being appended to already;
        FormatError when it is damaged; AccessDenied, ReadError.
    """

    def __init__(
        self,
        path: str,
        *,
        dialect: str | None = None,
        compression: str | None = None,
        max_chunk_size: int | None = None,
    ) -> None:
        self.path = path
        self._pid = os.getpid()
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = wrap_os_error(lambda p: os.open(p, flags, 0o666), path)
        try:
            own = self._prepare()
            if own is not None and dialect not in (None, own):
                raise UsageError(
                    f"the file is of the dialect {own}, which {dialect} cannot follow", path=path
                )
            self._encoder = RECORDIO.writer(
                compression=compression, dialect=dialect or own, max_chunk_size=max_chunk_size
            )
        except BaseException:
            os.close(self._fd)
            raise

    def _prepare(self) -> str | None:
        """Lock the file, cut off what is not whole; return its dialect."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError("somebody appends to this file already", path=self.path) from None
        except OSError as error:
            raise os_error(error, self.path) from error
        size = os.fstat(self._fd).st_size
        shard, self._end = RECORDIO.complete(read_at_of(self._fd, self.path), size, self.path)
        self.count = shard.count
        """Records in the file, those of the unfinished chunk included."""
        if self._end < size:
            try:
                os.ftruncate(self._fd, self._end)
                os.fsync(self._fd)
            except OSError as error:
                raise os_error(error, self.path) from error
        return shard.dialect.name if shard.dialect else None

    def write(self, payload: memoryview) -> None:
        """Append a record; a chunk that is full is written.

        Raises: UsageError for a record that the format cannot hold, and after `close`; ReadError
            when the file cannot be written: the chunk concerned is lost then, nothing before it.
        """
        with self._lock:
            self._check()
            try:
                self._put(self._encoder.encode(payload))
            except FFServeError as error:
                raise error.located(path=self.path, index=self.count) from None
            self.count += 1

    def _check(self) -> None:
        if self._fd < 0:
            raise UsageError("the file is closed", path=self.path)
        if self._pid != os.getpid():
            raise UsageError(
                "this file is being appended to by the process that forked this one",
                path=self.path,
            )

    def _put(self, pieces: Iterable[bytes | memoryview]) -> None:
        chunk = memoryview(b"".join(pieces))
        done = 0
        try:
            while done < len(chunk):
                done += os.pwrite(self._fd, chunk[done:], self._end + done)
        except OSError as error:
            # What is there of the chunk would be cut off by the next who appends; do it now.
            try:
                os.ftruncate(self._fd, self._end)
            finally:
                self._drop()
            raise ReadError(
                f"cannot write: {error.strerror}", path=self.path, offset=self._end
            ) from error
        self._end += done

    def close(self) -> None:
        """Write the last chunk and sync; a second call does nothing."""
        with self._lock:
            if self._fd < 0:
                return
            if self._pid == os.getpid():
                self._put(self._encoder.tail())
                try:
                    os.fsync(self._fd)
                except OSError as error:
                    self._drop()
                    raise os_error(error, self.path) from error
            self._drop()

    def _drop(self) -> None:
        os.close(self._fd)
        self._fd = -1


class _Stream:
    """Bytes appended to a descriptor from a position on, gathered into large writes."""

    def __init__(self, descriptor: Callable[[], int], position: int) -> None:
        self._descriptor = descriptor
        self._gathered = bytearray()
        self._written = position
        self._start = position

    @property
    def position(self) -> int:
        return self._written + len(self._gathered)

    def append(self, piece: bytes | memoryview) -> None:
        if len(self._gathered) + len(piece) > GATHER_SIZE:
            self.flush()
        if len(piece) >= GATHER_SIZE:
            self._written += _write_all(self._descriptor(), piece, self._written)
        else:
            self._gathered += piece

    def flush(self) -> None:
        if self._gathered:
            self._written += _write_all(self._descriptor(), self._gathered, self._written)
            self._gathered = bytearray()

    def move_to(self, fd: int, offset: int) -> None:
        """Put everything appended into ``fd`` at ``offset``; the old place shrinks to nothing."""
        written = self._written - self._start
        _write_all(fd, self._gathered, offset + written)
        self._gathered = bytearray()
        while written > 0:
            start = (written - 1) // _MOVE_SIZE * _MOVE_SIZE
            _copy(self._descriptor(), self._start + start, fd, offset + start, written - start)
            os.ftruncate(self._descriptor(), self._start + start)
            written = start


def _write_all(fd: int, piece: bytes | bytearray | memoryview, offset: int) -> int:
    with memoryview(piece) as view:
        done = 0
        while done < len(view):
            written = os.pwrite(fd, view[done:], offset + done)
            if written == 0:
                raise OSError(errno.EIO, "the file takes no more bytes")
            done += written
        return done


def _copy(source: int, source_at: int, target: int, target_at: int, size: int) -> None:
    """Copy between files inside the kernel, or through memory where that is not possible."""
    done = 0
    while done < size:
        try:
            got = os.copy_file_range(
                source, target, size - done, source_at + done, target_at + done
            )
        except OSError as error:
            if error.errno not in _NOT_COPYABLE:
                raise
            got = 0
        if got == 0:
            block = os.pread(source, min(GATHER_SIZE, size - done), source_at + done)
            if not block:
                raise OSError(errno.EIO, "the samples written so far cannot be read back")
            got = _write_all(target, block, target_at + done)
        done += got


def _whole_number(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"{name}={value!r} is not a number of samples")
    return number
