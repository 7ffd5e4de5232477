"""The one tree of errors.

Every class has a stable ``code`` (it travels in protocol frames), says by ``retryable``
whether asking again may help, and carries a hint that its reader can act on. All of them are
``RuntimeError`` because programs written for the original ffrecord catch that; the more
specific built-in that a caller of Python would expect is inherited beside it. They pickle
whole, since they cross from DataLoader workers to the training process.
"""

from __future__ import annotations

from typing import Any, ClassVar


class FFServeError(RuntimeError):
    """Base of everything that ffserve raises on purpose.

    Args:
        message: what happened, in one sentence.
        path: the file concerned, if any.
        index: the sample's index in the dataset as the caller numbered it, if any.
        offset: byte offset in ``path``, if any.
        hint: what the reader can do about it.
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
        """Return the same error with what was still unknown about its place filled in."""
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
    """The file is not what its format demands: foreign, inconsistent, or unfinished."""

    code = "format"


class ChecksumError(FormatError):
    """Bytes do not match the checksum stored with them."""

    code = "checksum"


class TruncatedError(FormatError):
    """The file ends before the bytes that its tables promise."""

    code = "truncated"


class SampleIndexError(FFServeError, IndexError):
    """An index outside the dataset."""

    code = "index"


class AccessDenied(FFServeError, PermissionError):
    """The peer may not read this file, or the daemon does not serve it."""

    code = "access"


class ServerUnavailable(FFServeError, ConnectionError):
    """No daemon answers on the socket."""

    code = "unavailable"
    retryable = True


class ProtocolError(FFServeError):
    """The other side sent what the protocol does not allow; its text says whose fault it is."""

    code = "protocol"


class ReadError(FFServeError, OSError):
    """The operating system failed to read or write, or the file changed under us."""

    code = "read"
    retryable = True


class MissingFile(ReadError, FileNotFoundError):
    """There is no such file, or none in a directory or of a pattern."""

    code = "missing"
    retryable = False


class UsageError(FFServeError, ValueError):
    """The call itself is wrong: an option, a type or a value that cannot be meant."""

    code = "usage"


class CoreError(FFServeError, ImportError):
    """The compiled part of ffserve is not there, or does not belong to these sources."""

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
        MissingFile,
        UsageError,
    )
}
"""Every class by its code on the wire; an unknown code becomes a plain FFServeError."""
