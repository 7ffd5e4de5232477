"""LMDB: a record is a value, its name is the key; in the order of the keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ffserve.convert.inputs import Record, clean_name
from ffserve.convert.kinds import Wanted, damaged, needed, reading
from ffserve.errors import UsageError

SUFFIXES = ()


def recognizes(path: str, found: str) -> bool:
    """Whether it is a database, as a file or as a directory."""
    return found == "an LMDB database" or os.path.isfile(os.path.join(path, "data.mdb"))


class DatabaseValues:
    """The values of a database."""

    sized = True

    def __init__(self, path: str, wanted: Wanted) -> None:
        self.named = wanted.names
        inside = os.path.join(path, "data.mdb")
        self.files = (inside if os.path.isdir(path) else path,)
        env = self._open()
        with reading(self.files[0]), env, env.begin() as transaction:
            facts = env.stat()
            self.count: int = facts["entries"]
            if (env.info()["last_pgno"] + 1) * facts["psize"] > os.path.getsize(self.files[0]):
                raise damaged(
                    self.files[0], "the file ends early"
                )  # it is mapped: reads would kill
            first = next(iter(transaction.cursor()), None)
        if first is not None and self._is_database(first[0]):
            raise UsageError(
                "its records are in named databases, which are not read",
                path=path,
                hint="copy the records of one to a database of its own",
            )

    def _open(self) -> Any:
        [path] = self.files
        module = needed("lmdb", "lmdb", path)
        with reading(path):
            return module.open(path, subdir=False, readonly=True, lock=False, max_dbs=1)

    def _is_database(self, key: bytes) -> bool:
        env = self._open()
        with env:
            try:
                env.open_db(key, create=False)
            except Exception:  # of the package: a plain value
                return False
            return True

    def names(self) -> Iterator[str]:
        """Yield the names of the records."""
        [path] = self.files
        env = self._open()
        with reading(path), env, env.begin() as transaction:
            for key in transaction.cursor().iternext(keys=True, values=False):
                yield self._name(key)

    def _name(self, key: bytes) -> str:
        [path] = self.files
        name = os.fsdecode(key)
        if clean_name(name, path) != name or "\0" in name:
            raise UsageError(
                f"the key {key!r} cannot be the name of a file",
                path=path,
                hint="drop the names (--drop-names)",
            )
        return name

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the values [first:stop]; passes over the keys before."""
        [path] = self.files
        env = self._open()
        with reading(path), env, env.begin() as transaction:
            cursor = transaction.cursor()
            before = cursor.iternext(keys=True, values=False)
            if not cursor.first() or next(islice(before, first, None), None) is None:
                return
            left = self.count if stop is None else stop - first
            for key, value in islice(cursor.iternext(), left):
                yield Record(value, self._name(key) if self.named else None)


def open_input(path: str, wanted: Wanted) -> DatabaseValues:
    """Return the values of a database."""
    return DatabaseValues(path, wanted)
