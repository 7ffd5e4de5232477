"""System calls on many files in one call: a data set may have ten thousand of them.

The Python face of reading/many_files.h. The GIL is released during every call. A function that
meets an error returns what it has done so far, and the error, for the caller to name the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bools, Bytes, Int32s, Int64s
from ffserve.engine.core import I32S, I64S, NULL, U8S, ffi, from_buffer, lib

States = NDArray[np.void]
"""An array of STATE_DTYPE."""

STATE_DTYPE = np.dtype(
    [
        ("device", "<u8"),
        ("inode", "<u8"),
        ("size", "<i8"),
        ("mtime", "<i8"),
        ("ctime", "<i8"),
        ("mode", "<u4"),
        ("uid", "<u4"),
    ]
)
"""The state of a file as stat(2) reports it, times in ns; ffs_file_state of the C core."""
assert STATE_DTYPE.itemsize == ffi.sizeof("ffs_file_state")

KIND_BITS = 0o170000
"""The bits of a mode that say what kind of file it is, as stat.S_IFREG."""

_STATES = ffi.typeof("ffs_file_state *")


def _pointer(states: States) -> Any:
    return ffi.cast(_STATES, ffi.from_buffer(states))


def _strings(texts: Sequence[str]) -> bytes:
    """Return names with a NUL behind each. Raises: ValueError: no file can have such a name."""
    joined = os.fsencode("\0".join(texts)) + b"\0"
    if joined.count(b"\0") != len(texts):
        raise ValueError("embedded null character")
    return joined


def _error(code: Any) -> OSError:
    return OSError(code[0], os.strerror(code[0]))


def _all(done: int, count: int, code: Any) -> None:
    if done < count:
        raise _error(code)


def stat_paths(paths: Sequence[str]) -> tuple[States, OSError | None]:
    """Return the states of the first files, links followed; all of them unless there is an error.

    Raises: ValueError: no file can have such a name.
    """
    states, code = np.empty(len(paths), STATE_DTYPE), ffi.new("int32_t *")
    done = lib.ffs_stat_paths(_strings(paths), len(paths), _pointer(states), code)
    return states[:done], _error(code) if done < len(paths) else None


def stat_names(directory: int, names: Sequence[str]) -> tuple[States, OSError | None]:
    """Return what the first of some names in an open directory are, links not followed.

    Raises: ValueError: no file can have such a name.
    """
    states, code = np.empty(len(names), STATE_DTYPE), ffi.new("int32_t *")
    done = lib.ffs_stat_names(directory, _strings(names), len(names), _pointer(states), code)
    return states[:done], _error(code) if done < len(names) else None


def stat_fds(fds: Int32s) -> tuple[States, OSError | None]:
    """Return the states of the first open files."""
    states, code = np.empty(len(fds), STATE_DTYPE), ffi.new("int32_t *")
    done = lib.ffs_stat_fds(from_buffer(I32S, fds), len(fds), _pointer(states), code)
    return states[:done], _error(code) if done < len(fds) else None


def contents_of(states: np.ndarray[Any, Any]) -> Int64s:
    """Return int64[n, 3]: sizes, mtimes and ctimes, of which one differs if the content does."""
    return np.stack([states[name].astype(np.int64) for name in ("size", "mtime", "ctime")], axis=1)


def open_paths(paths: Sequence[str], flags: int) -> tuple[Int32s, OSError | None]:
    """Open the first files; return their descriptors.

    Raises: ValueError: no file can have such a name.
    """
    fds, code = np.empty(len(paths), np.int32), ffi.new("int32_t *")
    done = lib.ffs_open_paths(_strings(paths), len(paths), flags, from_buffer(I32S, fds), code)
    return fds[:done], _error(code) if done < len(paths) else None


def open_again(fds: Int32s, flags: int) -> tuple[Int32s, OSError | None]:
    """Open the files of descriptors anew, up to the first that fails."""
    again, code = np.empty(len(fds), np.int32), ffi.new("int32_t *")
    done = lib.ffs_open_again(
        from_buffer(I32S, fds), len(fds), flags, from_buffer(I32S, again), code
    )
    return again[:done], _error(code) if done < len(fds) else None


def flags_and_types(fds: Int32s) -> tuple[Int32s, Int64s, OSError | None]:
    """Return the flags of the first descriptors (F_GETFL), and the types of their file systems, the
    f_type of statfs(2)."""
    flags, types = np.empty(len(fds), np.int32), np.empty(len(fds), np.int64)
    code = ffi.new("int32_t *")
    done = lib.ffs_flags_and_types(
        from_buffer(I32S, fds), len(fds), from_buffer(I32S, flags), from_buffer(I64S, types), code
    )
    return flags[:done], types[:done], _error(code) if done < len(fds) else None


def clear_flags(fds: Int32s, flags: int) -> None:
    """Switch flags of open file descriptions off. Raises: OSError."""
    code = ffi.new("int32_t *")
    _all(lib.ffs_clear_flags(from_buffer(I32S, fds), len(fds), flags, code), len(fds), code)


def have_acls(fds: Int32s) -> Bools:
    """Return which files have an ACL, or may have one that cannot be read."""
    has = np.empty(len(fds), np.bool_)
    lib.ffs_have_acls(from_buffer(I32S, fds), len(fds), from_buffer(U8S, has.view(np.uint8)))
    return has


def read_pieces(
    fds: Int32s, sizes: Int64s, most: int, offsets: Int64s | None = None
) -> tuple[Bytes, Int64s, OSError | None]:
    """Read a piece of each of several files.

    Args: sizes: int64[n], contiguous; of the files. most: bytes of each. offsets: int64[n], where
        they begin; None: at the beginning of the files.
    Returns: uint8[n, most], a row for each file; how many bytes of it there are; the error of the
        first that cannot be read, whose row and those behind it are not read.
    """
    pieces = np.empty((len(fds), most), np.uint8)
    got, code = np.zeros(len(fds), np.int64), ffi.new("int32_t *")
    done = lib.ffs_read_pieces(
        from_buffer(I32S, fds),
        NULL if offsets is None else from_buffer(I64S, offsets),
        from_buffer(I64S, sizes),
        len(fds),
        most,
        ffi.cast("uint8_t *", ffi.from_buffer(pieces)),
        from_buffer(I64S, got),
        code,
    )
    return pieces, got[:done], _error(code) if done < len(fds) else None


def stated_alignments(fds: Int32s) -> Int64s:
    """Return the alignment that the kernel demands of direct reads of each file; 0: none works, -1:
    it does not say."""
    alignments = np.empty(len(fds), np.int64)
    lib.ffs_stated_alignments(from_buffer(I32S, fds), len(fds), from_buffer(I64S, alignments))
    return alignments


def close_fds(fds: Int32s | Sequence[int]) -> None:
    """Close descriptors. It may wait for their file systems."""
    each = np.asarray(fds, np.int32)
    lib.ffs_close_fds(from_buffer(I32S, each), len(each))
