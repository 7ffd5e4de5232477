"""Appending to RecordIO files, also to one whose last writer died.

The file is scanned first. A tail that is no whole chunk is cut off, provided that nothing sound
lies behind it: what a writer that died leaves has nothing behind it, what a damaged header makes
look like that has. Each chunk is then written by one call, so that at any moment everything but
the last chunk is whole; a lock keeps a second writer away.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable

from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.files import os_error, read_at_of, wrap_os_error
from ffserve.formats.recordio import FORMAT


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
            self._encoder = FORMAT.writer(
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
        shard, self._end = FORMAT.complete(read_at_of(self._fd, self.path), size, self.path)
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
