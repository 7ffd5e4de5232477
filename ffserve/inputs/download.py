"""DOWNLOAD: the input files of a worker in directories beside it, one for each alias.

The directories contain these files and no others, so a program may take every file there. A record
in the same directory names the files that an earlier run has placed. Unchanged files that are
wanted again stay, and others of that run are removed. All other files are refused, since their
owner is unknown. So no file of the user is deleted, and no input of another run is read by mistake.
The record is written before the first file is placed, and again when all are placed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import shutil
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ffserve.disk.files import os_error
from ffserve.disk.output import temporary_name, writing
from ffserve.errors import UsageError
from ffserve.inputs.places import InputFile, fetch, local_path
from ffserve.store.public import shown

RECORD = ".ffserve-inputs.json"
"""Name of the record in a worker's directory: {alias: {name: [version, placed]}}."""
SCRATCH = ".ffserve-inputs.tmp"
"""Directory of incomplete files beside it. Files of an interrupted run there are removed."""

_THREADS = 8
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".snappy", ".zlib", ".deflate")

Placed = dict[str, InputFile]
"""The files of one alias by their names in its directory."""


def names_of(files: Sequence[InputFile], *, rename: bool, now_ms: int = 0) -> Placed:
    """Return the name under which each file of a worker and alias is placed.

    Args:    rename: name them by time and number, with their extension, instead of their place
             below the input. now_ms: that time, milliseconds since 1970.
    Raises:  UsageError: two files have the same name, or one has that of another's directory.
    """
    if rename:
        return {f"{now_ms}_{k}{_extension(file.name)}": file for k, file in enumerate(files)}
    placed: Placed = {}
    directories: dict[str, InputFile] = {}
    for file in files:
        above = file.name.rpartition("/")[0]
        while above:
            directories.setdefault(above, file)
            above = above.rpartition("/")[0]
        other = placed.setdefault(file.name, file)
        if other is not file:
            raise _collision(file.name, other, file)
    for name in directories.keys() & placed.keys():
        raise _collision(name, placed[name], directories[name])
    return placed


def _collision(name: str, one: InputFile, other: InputFile) -> UsageError:
    return UsageError(
        f"two inputs of one worker have the same name {name!r}: {shown(one.uri)} and "
        f"{shown(other.uri)}",
        hint="give one of them another alias (#ALIAS), or add --rename-input-files",
    )


def _extension(name: str) -> str:
    stem, extension = os.path.splitext(name.rpartition("/")[2])
    if extension.lower() in _COMPRESSIONS:
        return os.path.splitext(stem)[1] + extension
    return extension


def now_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def place(directory: str, wanted: Mapping[str, Placed]) -> None:
    """Place the files of a worker in a directory for each alias.

    Args:    directory: the worker's. wanted: the files of each alias, by name.
    Raises:  UsageError: a directory has files that no earlier run has placed, or an input itself.
             MissingFile, AccessDenied, ReadError: a file cannot be fetched. What was placed stays,
             and is known to the next run.
    """
    _check_apart(directory, wanted)
    record, scratch = os.path.join(directory, RECORD), os.path.join(directory, SCRATCH)
    shutil.rmtree(scratch, ignore_errors=True)
    earlier = _read(record)
    kept = {
        alias: _clear(os.path.join(directory, alias), files, earlier.get(alias, {}))
        for alias, files in wanted.items()
    }
    planned = {
        alias: {name: kept[alias].get(name) or _row(file, None) for name, file in files.items()}
        for alias, files in wanted.items()
    }
    everything = {**earlier, **planned}
    _write(record, everything)
    missing = [
        (alias, name, file)
        for alias, files in wanted.items()
        for name, file in files.items()
        if name not in kept[alias]
    ]
    with writing(directory):
        os.mkdir(scratch)
        for path in {os.path.dirname(os.path.join(directory, a, n)) for a, n, _ in missing}:
            os.makedirs(path, exist_ok=True)
        for alias in wanted:
            os.makedirs(os.path.join(directory, alias), exist_ok=True)
    try:
        _fetch_all(
            [(file, os.path.join(directory, alias, name)) for alias, name, file in missing], scratch
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for alias, name, file in missing:
        state = os.lstat(os.path.join(directory, alias, name))
        planned[alias][name] = _row(file, _identity(state))
    _write(record, everything)


def _check_apart(directory: str, wanted: Mapping[str, Placed]) -> None:
    """Raise UsageError if an input lies where inputs are placed: it would be removed there."""
    base = os.path.realpath(directory)
    places = tuple(os.path.join(base, alias, "") for alias in wanted)
    real = functools.cache(os.path.realpath)
    for files in wanted.values():
        for file in files.values():
            path = local_path(file.uri)
            if path is None:
                continue
            folder, name = os.path.split(path)
            if os.path.join(real(folder), name).startswith(places):
                raise UsageError(
                    "an input lies in the directory where inputs are placed",
                    path=path,
                    hint="give the input another alias (#ALIAS)",
                )


def _fetch_all(files: list[tuple[InputFile, str]], scratch: str) -> None:
    """Fetch files, some at the same time; raise the first error. An error or an interruption ends
    it at once: files that are being fetched are dropped."""
    waiting: queue.SimpleQueue[tuple[InputFile, str]] = queue.SimpleQueue()
    for item in files:
        waiting.put(item)
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise _NotWanted

    def work() -> None:
        with contextlib.suppress(queue.Empty, _NotWanted):
            while True:
                item = waiting.get_nowait()
                check()
                try:
                    fetch(*item, scratch, check)
                except BaseException as error:
                    ended.put(error)
                else:
                    ended.put(None)

    for _ in range(min(_THREADS, len(files))):
        threading.Thread(target=work, name="ffserve-inputs", daemon=True).start()
    try:
        for _ in files:
            error = ended.get()
            if error is not None:
                raise error
    finally:
        stopped.set()


class _NotWanted(Exception):
    """The other files are not fetched: one has failed, or the run was interrupted."""


def _clear(directory: str, wanted: Placed, earlier: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Remove what an earlier run has placed, except for files that are wanted again.

    Returns: the rows of the files that stay.
    Raises:  UsageError: there is something else, or a file was changed since.
    """
    if not os.path.lexists(directory):
        return {}
    if os.path.islink(directory) or not os.path.isdir(directory):
        raise UsageError(
            "another file is in the place of an input",
            path=directory,
            hint="remove it, or give the input another alias (#ALIAS)",
        )
    kept: dict[str, list[Any]] = {}
    foreign: list[str] = []
    old: list[str] = []
    inner: list[str] = []
    for folder, folders, names in os.walk(directory):
        inner += [os.path.join(folder, name) for name in folders]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in names + links:
            path = os.path.join(folder, name)
            place = os.path.relpath(path, directory)
            row: Any = earlier.get(place)
            if not _is_ours(path, row):
                foreign.append(path)
            elif place in wanted and row == _row(wanted[place], row[1]) and row[1]:
                kept[place] = row
            else:
                old.append(path)
    if foreign:
        raise UsageError(
            "the directory of an input has a file that no earlier run has placed there, or that "
            f"was changed since ({len(foreign)} of them)",
            path=min(foreign),
            hint="move it away, or give the input another alias (#ALIAS)",
        )
    with writing(directory):
        for path in old:
            os.unlink(path)
        for path in sorted(inner, key=len, reverse=True):
            with contextlib.suppress(OSError):  # files that stay are in it
                os.rmdir(path)
    return kept


def _row(file: InputFile, placed: list[int] | None) -> list[Any]:
    return [file.identity.key, placed]


def _identity(state: os.stat_result) -> list[int]:
    """Return the identity of a placed file, which changes with its content.

    A link changes with the file that it leads to, which keeps what was written.
    """
    if state.st_nlink > 1 or stat.S_ISLNK(state.st_mode):
        return [state.st_ino]
    return [state.st_ino, state.st_size, state.st_mtime_ns]


def _is_ours(path: str, row: Any) -> bool:
    """Whether a path is the file of a row of the record, or was begun by an interrupted run."""
    if not isinstance(row, list) or len(row) != 2:
        return False
    try:
        state = os.lstat(path)
    except OSError as error:
        raise os_error(error, path) from error
    if stat.S_ISDIR(state.st_mode):
        return False
    return row[1] in (None, [state.st_ino], _identity(state))


def _read(record: str) -> dict[str, dict[str, Any]]:
    """Return what an earlier run has placed; nothing if its record is missing or damaged."""
    try:
        with open(record, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise os_error(error, record) from error
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise UsageError(
            "the record of the inputs that an earlier run has placed is damaged",
            path=record,
            hint="remove it, and the directories of inputs beside it",
        )
    return found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write(record: str, facts: Mapping[str, Any]) -> None:
    temporary = temporary_name(record)
    with writing(record):
        try:
            # The record contains URLs, perhaps with their signatures.
            with open(temporary, "x", encoding="utf-8", opener=_private) as file:
                json.dump(facts, file)
            os.replace(temporary, record)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
