"""All errors of ffserve: one tree of classes, and one table from read status to error.

Every class has a stable ``code`` that travels in protocol messages, a flag ``retryable`` that says
whether another attempt may succeed, and a hint that the user can act on. Every class is a
``RuntimeError``, because programs written for the original ffrecord catch that, and also inherits
the more specific built-in exception that a Python programmer expects. Errors pickle completely,
since they cross from DataLoader workers to the training process.
"""

from __future__ import annotations

import os
import re
from typing import Any, ClassVar, NamedTuple


class FFServeError(RuntimeError):
    """Base class of all errors that ffserve raises.

    Args:
        message: what failed and why, in one sentence.
        path: the file, directory or socket concerned, if any.
        index: the sample's index in the caller's dataset, if any.
        offset: byte offset in ``path``, if any.
        hint: what the user can do about it.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        index: int | None = None,
        offset: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.index = index
        self.offset = offset
        self.hint = hint

    def __str__(self) -> str:
        where = []
        if self.path is not None:
            where.append(self.path)
        if self.index is not None:
            where.append(f"sample {self.index}")
        if self.offset is not None:
            where.append(f"byte {self.offset}")
        text = f"{', '.join(where)}: {self.message}" if where else self.message
        return f"{text} ({self.hint})" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.path, self.index, self.offset, self.hint)

    def located(self, *, path: str | None = None, index: int | None = None) -> FFServeError:
        """Return a copy of this error with `path` filled in if it was missing, and `index` set."""
        return _rebuild(
            type(self),
            self.message,
            self.path if self.path is not None else path,
            index if index is not None else self.index,
            self.offset,
            self.hint,
        )


def _rebuild(
    cls: type[FFServeError],
    message: str,
    path: str | None,
    index: int | None,
    offset: int | None,
    hint: str | None,
) -> FFServeError:
    return cls(message, path=path, index=index, offset=offset, hint=hint)


class FormatError(FFServeError):
    """The file violates its format: another format, inconsistent content, or unfinished."""

    code = "format"


class ChecksumError(FormatError):
    """Data does not match its stored checksum."""

    code = "checksum"


class TruncatedError(FormatError):
    """The file is shorter than its header or tables say."""

    code = "truncated"


class SampleIndexError(FFServeError, IndexError):
    """A sample index is outside the dataset."""

    code = "index"


class AccessDenied(FFServeError, PermissionError):
    """The user may not read this file, or the daemon does not serve it."""

    code = "access"


class ServerUnavailable(FFServeError, ConnectionError):
    """No daemon answers on the socket."""

    code = "unavailable"
    retryable = True


class ProtocolError(FFServeError):
    """A peer violated the protocol; the message says which side is at fault."""

    code = "protocol"


class ReadError(FFServeError, OSError):
    """The operating system failed to read or write a file, or the file changed while in use."""

    code = "read"
    retryable = True


class ArenaError(ReadError):
    """The daemon's arena cannot hold a sample, or the chunk that contains it."""

    code = "arena"
    retryable = False


class ArenaBusyError(ArenaError):
    """No memory of the daemon's arena became free for a sample."""

    code = "busy"
    retryable = True


class MissingFile(ReadError, FileNotFoundError):
    """The path does not exist, the directory has no record files, or no file matches a pattern."""

    code = "missing"
    retryable = False


class UsageError(FFServeError, ValueError):
    """The call is wrong: an unknown option, a wrong type, or a value out of range."""

    code = "usage"


class FileNameError(UsageError, AssertionError):
    """The name of a file does not end in .ffr, or is not that of a directory that is needed."""


class CoreError(FFServeError, ImportError):
    """The compiled C core is missing, or was built from other sources."""

    code = "core"


BY_CODE: dict[str, type[FFServeError]] = {
    cls.code: cls
    for cls in (
        FFServeError,
        FormatError,
        ChecksumError,
        TruncatedError,
        SampleIndexError,
        AccessDenied,
        ServerUnavailable,
        ProtocolError,
        ReadError,
        ArenaError,
        ArenaBusyError,
        MissingFile,
        UsageError,
    )
}
"""Error class by code on the wire; an unknown code becomes a plain FFServeError."""

# ---- the status of a failed read -------------------------------------------------------------

STATUS_CHECKSUM, STATUS_TRUNCATED = -100_001, -100_002
"""FFS_ECHECKSUM and FFS_ETRUNCATED of the C core."""
STATUS_TOO_LARGE = -100_100
"""No slot of the arena can hold the sample, or the chunk that contains it."""
STATUS_ARENA_BUSY = -100_101
"""The arena stayed full of samples that are leased or being read for too long."""
STATUS_FORMAT = -100_102
"""The chunk that contains the sample is damaged; the format's own error says how."""

GAP_CHECKSUM = 0xFFFFFFFF
"""Stored checksum of a gap: the entry of length 0 that a tolerant scan puts where it had to skip
damaged bytes of unknown meaning."""

_VERIFY = "restore the file from a copy; `ffserve verify` lists all damaged samples"

_BY_STATUS: dict[int, tuple[type[FFServeError], str, str]] = {
    STATUS_CHECKSUM: (
        ChecksumError,
        "checksum mismatch: the file stores {expected:08x}, its bytes give {found:08x}",
        _VERIFY,
    ),
    STATUS_TRUNCATED: (TruncatedError, "the file ends inside this sample", _VERIFY),
    STATUS_TOO_LARGE: (
        ArenaError,
        "the sample, or the chunk that contains it, takes {length} bytes in whole disk blocks and "
        "does not fit into the daemon's arena of {arena_size} bytes",
        "start the daemon with a larger --arena, or open with server='off'",
    ),
    STATUS_ARENA_BUSY: (
        ArenaBusyError,
        "no memory became free: the daemon's arena stayed full of samples that are leased or being "
        "read",
        "release leases sooner, start the daemon with a larger --arena, or check for a disk that "
        "hangs",
    ),
}
"""Error class, message and hint by status; any other status is a negative errno."""


def status_error(
    status: int,
    *,
    path: str,
    index: int | None,
    offset: int | None = None,
    length: int = 0,
    found: int = 0,
    expected: int = 0,
    arena_size: int = 0,
) -> FFServeError:
    """Return the error for the status of a failed read.

    Args:
        status: negative errno, or one of the statuses above.
        path, index, offset, length: the sample, and the extent of its payload in the file.
        found, expected: computed and stored checksum.
        arena_size: bytes of the daemon's arena.
    """
    kind: type[FFServeError]
    if status == STATUS_CHECKSUM and length == 0 and expected == GAP_CHECKSUM:
        kind, text, hint = (
            ChecksumError,
            "damaged bytes of unknown meaning; the samples up to the next intact one are lost",
            "restore the file from a copy",
        )
    else:
        kind, text, hint = _BY_STATUS.get(status) or (
            ReadError,
            f"read failed: {os.strerror(-status)}",
            "check the kernel log for device errors",
        )
    message = text.format(found=found, expected=expected, length=length, arena_size=arena_size)
    return kind(message, path=path, index=index, offset=offset, hint=hint)


class Failure(NamedTuple):
    """The reason why a sample could not be read.

    status: negative errno or one of the statuses above; found, expected: checksums; size: bytes of
    the chunk for STATUS_TOO_LARGE; error: the format's own error, which replaces all others.
    """

    status: int
    found: int = 0
    expected: int = 0
    size: int = 0
    error: FFServeError | None = None

    def named(
        self, path: str, index: int, offset: int, length: int, *, arena_size: int = 0
    ) -> FFServeError:
        """Return the error of the sample; see `status_error`."""
        if self.error is not None:
            error = self.error.located(index=index)
            error.path = path
            return error
        return status_error(
            self.status,
            path=path,
            index=index,
            offset=offset,
            length=self.size or length,
            found=self.found,
            expected=self.expected,
            arena_size=arena_size,
        )


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return text as one line without control characters.

    Names of files, samples and jobs may contain anything. Line breaks, escape sequences and
    changes of the writing direction are replaced by Python's escapes, such as ``\\n``.
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def raise_first(failed: dict[int, FFServeError]) -> None:
    """Raise the error of the lowest position, if there is one.

    It empties the dict: the error's traceback holds the frames of the callers, and with them the
    dict and the buffers of the batch. If the dict held the error in turn, all of this would stay in
    memory until the cyclic garbage collector runs.
    """
    if failed:
        error = failed[min(failed)]
        failed.clear()
        try:
            raise error
        finally:
            del error


def outside(index: int, count: int) -> SampleIndexError:
    """Return the error for an index outside a dataset."""
    return SampleIndexError(
        f"the index is outside the dataset of {count} samples",
        index=index,
        hint=f"use indices from 0 to {count - 1}; negative ones are not supported"
        if count
        else "the dataset is empty",
    )
