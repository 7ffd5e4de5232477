"""Write record files: ``create`` writes a new file, ``Appender`` extends a RecordIO file.

A new file takes its name only when it is completely written and synced; see ``output.py``, and for
URLs ``store.public.OutputObject``.

FFRecord puts tables in front of the samples, and their size depends on the number of samples. If
that number is not given, the samples first go to a spool (a second, nameless file) and ``close``
moves them behind the tables, last piece first, while the spool shrinks: the disk holds no more than
8 MiB of them twice. Samples that fit into the write buffer never touch the spool.

``Appender`` scans the file first and cuts off an incomplete chunk at its end, which a writer that
died leaves behind. It refuses the file if intact chunks follow, because then a header is damaged.
It writes each chunk with one call, so that only the last chunk can ever be incomplete, and locks
the file against a second writer.
"""

from __future__ import annotations

import errno
import fcntl
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ffserve import formats
from ffserve.disk.files import os_error, os_hint, read_at_of, wrap_os_error
from ffserve.disk.output import OutputFile, write_error, writing
from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.formats.base import BatchEncoder, Encoder, FieldEncoder, Format, GrowingEncoder
from ffserve.formats.recordio import FORMAT as RECORDIO
from ffserve.store.urls import is_url, local_path, shown

if TYPE_CHECKING:
    from ffserve.store.public import OutputObject

BUFFER_SIZE = 4 << 20
"""Pieces smaller than this are collected into writes of this size."""

_MOVE_SIZE = 8 << 20
"""The disk holds this many bytes of samples twice while they are moved behind the tables."""
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
    """Create a record file and return its writer.

    Args:
        path: the file, or the URL of one at an origin, which ``close`` sends there. Its suffix
            decides the format unless ``format`` is given. An existing file stays unchanged until
            ``close`` replaces it.
        format: ``"ffrecord"``, ``"recordio"``, ``"tfrecord"`` or ``"tar"``.
        n: number of samples, if known. ``close`` then requires exactly ``n`` samples, and FFRecord
            needs no spool file.
        compression: ``"none"``, ``"snappy"``, ``"gzip"`` or ``"zlib"``, if the format supports it.
            None takes the format's default; for TFRecord the suffixes ``.gz`` and ``.zlib``
            select it.
        dialect: for RecordIO, ``"py"`` (default) or ``"go"``.
        max_chunk_size: for RecordIO, payload bytes per chunk.
    Returns: a Writer; use it in a ``with`` statement.
    Raises:  UsageError: unknown format, unsupported option, or a path that is not a regular file.
             MissingFile, AccessDenied, ReadError: the file cannot be created.
    Cost:    creates one temporary file.
    """
    name = os.fsdecode(path)
    name = local_path(name) or name
    chosen = format_of(name, format)
    if compression is None and chosen.name == "tfrecord":
        endings = {".gz": "gzip", ".zlib": "zlib"}
        compression = endings.get(os.path.splitext(name)[1].lower())
    if n is not None:
        n = _whole_number("n", n)
    encoder = chosen.writer(
        n=n, compression=compression, dialect=dialect, max_chunk_size=max_chunk_size
    )
    return Writer(name, encoder, n)


def format_of(path: str, name: str | None) -> Format:
    """Return the format of an output file: of this name, else by the suffix.

    Raises: UsageError if the name is None and the suffix unknown, or the name is.
    """
    found = formats.by_name(name) if name is not None else formats.by_suffix(path)
    if found is None:
        raise UsageError(
            "unknown suffix: it does not determine the format",
            path=path,
            hint=f"set the format to one of {', '.join(formats.NAMES)}",
        )
    return found


class Writer:
    """A record file that is being written; returned by ``create``.

    Threads may share a writer; samples are stored in the order of the ``write`` calls. After a
    fork the file belongs to the parent: the child's copy can neither write, finish nor remove it.

    A failed write (for example on a full disk) removes the incomplete file; ``close`` raises the
    same error again.
    """

    def __init__(self, path: str, encoder: Encoder, n: int | None) -> None:
        self.path = shown(path)
        self.n = n
        self._encoder = encoder
        self._growing = encoder if isinstance(encoder, GrowingEncoder) else None
        self._count = 0
        self._state = "open"
        self._failure: FFServeError | None = None
        self._lock = threading.Lock()
        with writing(self.path):
            files = self._files = _output(path)
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
        """Bytes of encoded records written so far, without the tables in front."""
        return self._stream.position

    @property
    def finished(self) -> bool:
        """Whether the file was closed, aborted or failed."""
        return self._state != "open"

    def write(self, buffer: Any, /, *, key: str | None = None) -> None:
        """Append one sample.

        Args:
            buffer: bytes or any object with the buffer protocol, of any item size and shape. All
                its bytes are stored, in C order. For a tar file a dict of such buffers by field,
                such as ``{"jpg": …, "cls": …}``; of a buffer alone the field is "bin".
            key: for a tar file, the name of its members before the first dot; None: a number.
        Raises:  UsageError: not a buffer (encode str first), more than ``n`` samples, or a closed
                 writer. ReadError: the file cannot be written; it is removed.
        Cost:    one checksum, and one copy of a sample below 4 MiB or not in C order.
        """
        self._check_owner()
        with self._lock:
            self._check_open()
            encoded = self._encode_sample(buffer, key)
            try:
                self._put(encoded)
            except BaseException as error:
                self._fail(error)
                raise
            self._count += 1

    def _encode_sample(self, sample: Any, key: str | None) -> Iterable[bytes | memoryview]:
        """Encode a buffer, or the fields of a sample if the format has these."""
        if key is None and not isinstance(sample, Mapping):
            return self._encode(flat(sample))
        encoder = self._encoder
        if not isinstance(encoder, FieldEncoder):
            raise UsageError(
                "only samples of tar files have fields and keys",
                path=self.path,
                hint="create the file with format='tar'",
            )
        fields = sample if isinstance(sample, Mapping) else {"bin": sample}
        buffers = {str(name): flat(each) for name, each in fields.items()}
        return self._encoded(lambda: encoder.encode_fields(buffers, key))

    def write_batch(self, payloads: NDArray[np.uint8], offsets: NDArray[np.int64], /) -> None:
        """Append samples that are stored back to back, as in a ``Batch``.

        Args:    payloads: uint8, contiguous. offsets: int64[n + 1], rising from 0 to the length of
                 payloads; sample i is payloads[offsets[i]:offsets[i + 1]].
        Raises:  as ``write``; UsageError if the offsets are invalid.
        Cost:    as ``write``; a tenth of the time per sample if samples are small.
        """
        edges = np.ascontiguousarray(offsets, np.int64)
        size = payloads.nbytes
        if not len(edges) or edges[0] or edges[-1] != size or bool((np.diff(edges) < 0).any()):
            raise UsageError(
                f"invalid offsets: they must rise from 0 to {size}, the length of payloads",
                path=self.path,
            )
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
                self._fail(error)
                raise
            self._count += len(edges) - 1

    def write_pieces(self, pieces: Iterable[Any], /) -> None:
        """Append one sample given in pieces, such as the blocks of a file.

        Args:    pieces: buffers as for ``write``; the sample is their concatenation.
        Raises:  as ``write``. An error raised by ``pieces`` itself passes through; the incomplete
                 file is removed if part of the sample was already written.
        Cost:    as ``write``; RecordIO and TFRecord join the pieces first.
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
                self._fail(error)
                raise
            self._count += 1

    def close(self) -> None:
        """Finish the file, sync it, and give it its name. Further calls do nothing.

        Raises:  UsageError: fewer than ``n`` samples were written; more can then still be written.
                 ReadError: the file could not be written, now or earlier.
        Cost:    a sync; for FFRecord without ``n`` also one move of all samples.
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
                    f"cannot finish: only {self._count} of n={self.n} samples were written",
                    path=self.path,
                    hint="write the missing samples, or create the file without n",
                )
            try:
                self._finish()
            except BaseException as error:
                self._fail(error)
                raise
            self._state = "closed"
            self._dropped.detach()

    def abort(self) -> None:
        """Remove the incomplete file; an earlier file of the same name stays."""
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
        expected = "" if self.n is None else f" of {self.n}"
        return f"<Writer {self.path!r}: {self._state}, {self._count}{expected} samples>"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a Writer cannot be pickled", path=self.path, hint="create a writer in each process"
        )

    def _encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        return self._encoded(lambda: self._encoder.encode(payload))

    def _encoded(
        self, encode: Callable[[], Iterable[bytes | memoryview]]
    ) -> Iterable[bytes | memoryview]:
        try:
            return encode()
        except FFServeError as error:
            raise error.located(path=self.path, index=self._count) from None
        except BaseException as error:
            self._fail(error)
            raise

    def _put(self, encoded: Iterable[bytes | memoryview]) -> None:
        try:
            for piece in encoded:
                self._stream.append(piece)
        except OSError as error:
            raise write_error(error, self.path) from error

    def _finish(self) -> None:
        self._put(self._encoder.tail())
        head_size = self._encoder.head_size(self._count)
        with writing(self.path):
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

    def _fail(self, error: BaseException) -> None:
        """Remove the incomplete file and keep the error for later calls."""
        self._state = "aborted"
        self._dropped()
        if isinstance(error, FFServeError):
            self._failure = error
        else:
            self._failure = ReadError(
                f"the file was removed after {type(error).__name__} in the middle of a sample",
                path=self.path,
                hint="create the file again",
            )

    def _check_owner(self) -> None:
        if self._files.owner != os.getpid():
            raise UsageError(
                "cannot write: the writer belongs to the process that forked this one",
                path=self.path,
                hint="create a writer in each process",
            )

    def _check_open(self, more: int = 1) -> None:
        if self._failure is not None:
            raise self._failure
        if self._state != "open":
            raise UsageError(f"cannot write: the writer is {self._state}", path=self.path)
        if self.n is not None and self._count + more > self.n:
            raise UsageError(
                f"cannot write more than n={self.n} samples",
                path=self.path,
                index=self._count,
                hint="create the file without n if the number is not known",
            )


def _output(path: str) -> OutputFile | OutputObject:
    """Return the temporary file of a file, or of one at an origin."""
    if not is_url(path):
        return OutputFile(path)
    from ffserve.store.public import OutputObject

    return OutputObject(path)


def flat(buffer: Any) -> memoryview:
    """Return the bytes of a buffer in C order, copied only if necessary.

    Raises:  UsageError (also a TypeError): not a buffer.
    """
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        kind = type(buffer).__name__
        hint = "encode it first" if kind == "str" else "give bytes or a buffer such as an array"
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
    """A sample does not support the buffer protocol."""


class Appender:
    """A RecordIO file opened for appending; created if it does not exist.

    Args:
        path: the file.
        dialect: "py" or "go"; None takes the file's own, and "py" for a new file.
        compression, max_chunk_size: as for `create`.
    Raises:  UsageError: the file has another dialect, or another writer appends to it.
             FormatError: the file is damaged. AccessDenied, ReadError: it cannot be written.
    """

    def __init__(
        self,
        path: str,
        *,
        dialect: str | None = None,
        compression: str | None = None,
        max_chunk_size: int | None = None,
    ) -> None:
        if is_url(path):
            raise UsageError(
                "cannot append to a file at an origin",
                path=shown(path),
                hint="write its records to a new file with ffserve.create",
            )
        self.path = path
        self._pid = os.getpid()
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = wrap_os_error(lambda p: os.open(p, flags, 0o666), path)
        try:
            own = self._prepare()
            if own is not None and dialect not in (None, own):
                raise UsageError(
                    f"cannot append in dialect {dialect}: the file has dialect {own}",
                    path=path,
                    hint="leave dialect out",
                )
            self._encoder = RECORDIO.writer(
                compression=compression, dialect=dialect or own, max_chunk_size=max_chunk_size
            )
        except BaseException:
            os.close(self._fd)
            raise

    def _prepare(self) -> str | None:
        """Lock the file, cut off an incomplete last chunk, and return the dialect."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                "another writer is appending to this file",
                path=self.path,
                hint="wait until it has closed the file",
            ) from None
        except OSError as error:
            raise os_error(error, self.path) from error
        size = os.fstat(self._fd).st_size
        shard, self._end = RECORDIO.complete(read_at_of(self._fd, self.path), size, self.path)
        self.count = shard.count
        """Records in the file, including those of the unwritten last chunk."""
        if self._end < size:
            try:
                os.ftruncate(self._fd, self._end)
                os.fsync(self._fd)
            except OSError as error:
                raise os_error(error, self.path) from error
        return shard.dialect.name if shard.dialect else None

    def write(self, payload: memoryview) -> None:
        """Append a record; write the chunk when it is full.

        Raises:  UsageError: the record is too large for the format, or the file is closed.
                 ReadError: the chunk could not be written; earlier chunks are intact.
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
            raise UsageError("cannot append: the file is closed", path=self.path)
        if self._pid != os.getpid():
            raise UsageError(
                "cannot append: the file belongs to the process that forked this one",
                path=self.path,
                hint="open the file in one process only",
            )

    def _put(self, pieces: Iterable[bytes | memoryview]) -> None:
        try:
            self._end += _write_all(self._fd, b"".join(pieces), self._end)
        except OSError as error:
            # Remove the partial chunk now; the next appender would have to.
            try:
                os.ftruncate(self._fd, self._end)
            finally:
                self._drop()
            raise ReadError(
                f"cannot append: {error.strerror}",
                path=self.path,
                offset=self._end,
                hint=os_hint(error),
            ) from error

    def close(self) -> None:
        """Write the last chunk and sync. Further calls do nothing."""
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
    """Buffered appends to a descriptor, from a given offset on."""

    def __init__(self, descriptor: Callable[[], int], position: int) -> None:
        self._descriptor = descriptor
        self._buffered = bytearray()
        self._written = position
        self._start = position

    @property
    def position(self) -> int:
        return self._written + len(self._buffered)

    def append(self, piece: bytes | memoryview) -> None:
        if len(self._buffered) + len(piece) > BUFFER_SIZE:
            self.flush()
        if len(piece) >= BUFFER_SIZE:
            self._written += _write_all(self._descriptor(), piece, self._written)
        else:
            self._buffered += piece

    def flush(self) -> None:
        if self._buffered:
            self._written += _write_all(self._descriptor(), self._buffered, self._written)
            self._buffered = bytearray()

    def move_to(self, fd: int, offset: int) -> None:
        """Move everything appended to ``fd`` at ``offset``, truncating the source as it goes."""
        written = self._written - self._start
        _write_all(fd, self._buffered, offset + written)
        self._buffered = bytearray()
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
                raise OSError(errno.EIO, "the file system accepts no more bytes")
            done += written
        return done


def _copy(source: int, source_at: int, target: int, target_at: int, size: int) -> None:
    """Copy between files inside the kernel, or through memory if the kernel cannot."""
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
            block = os.pread(source, min(BUFFER_SIZE, size - done), source_at + done)
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
        raise UsageError(f"{name}={value!r} is not a valid number of samples")
    return number
