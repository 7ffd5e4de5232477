"""Columns of tf.train.Example records, decoded in C: the option ``features`` of a Dataset."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args, get_origin

import numpy as np

from ffserve import Batch
from ffserve.engine import example as engine
from ffserve.engine.example import Decoded, ExampleRecords, Fault, WantedColumn
from ffserve.errors import FormatError, UsageError

_KINDS = {bytes: engine.BYTES, str: engine.BYTES, int: engine.INT64, float: engine.FLOAT}
_FOUND = {engine.BYTES: "byte strings", engine.INT64: "integers", engine.FLOAT: "floats"}


class ExampleColumns:
    """Decodes the wanted features of records.

    Args:    features: bytes, str, int or float by name for one value a record, or a list of these
        such as ``list[int]`` for any number.
    Raises:  UsageError: another type, or no feature.
    """

    def __init__(self, features: Mapping[str, Any]) -> None:
        if not features:
            raise UsageError("features is empty", hint='such as {"image": bytes, "label": int}')
        self.types = dict(features)
        self._wanted = [self._column(name, kind) for name, kind in self.types.items()]

    def __repr__(self) -> str:
        return repr(self.types)

    @staticmethod
    def _column(name: str, kind: Any) -> WantedColumn:
        listed = isinstance(kind, types.GenericAlias) and get_origin(kind) is list
        one = get_args(kind)[0] if listed else kind
        if one not in _KINDS:
            raise UsageError(
                f"feature {name!r} cannot be {kind!r}",
                hint="use bytes, str, int or float, or a list of these such as list[int]",
            )
        return WantedColumn(name.encode(), _KINDS[one], int(listed))

    def decode(self, batch: Batch, indices: Sequence[int], path: str | None) -> dict[str, Any]:
        """Return the columns of records.

        Args:    indices: of the records, and path: of their file, for errors.
        Returns: for each feature int64[n], float32[n], a list of bytes or of str; of a list of
            values a list with an array or list for each record.
        Raises:  FormatError: a record that is no Example, or whose values do not fit.
        Cost:    two passes in C over the wanted features.
        """
        offsets = batch.offsets.astype(np.uint64)
        records = ExampleRecords(batch.buffer, offsets[:-1], np.diff(offsets))
        try:
            columns = engine.decode(records, self._wanted, sequence=False)
        except Fault as fault:
            name = list(self.types)[fault.column] if fault.column >= 0 else ""
            raise self._explained(fault, name).located(
                path=path, index=int(indices[fault.row])
            ) from None
        decoded: dict[str, Any] = {}
        for (name, kind), wanted, column in zip(
            self.types.items(), self._wanted, columns, strict=True
        ):
            if not wanted.depth and not column.valid.all():
                row = int(np.argmin(column.valid))
                raise _missing(name, kind, batch[row]).located(path=path, index=int(indices[row]))
            try:
                decoded[name] = _values(column, kind)
            except UnicodeDecodeError as error:
                raise FormatError(
                    f"feature {name!r} is not UTF-8: {error}", path=path, hint="read it as bytes"
                ) from None
        return decoded

    def _explained(self, fault: Fault, name: str) -> FormatError:
        kind = self.types.get(name)
        if fault.what == engine.KIND:
            return FormatError(
                f"feature {name!r} holds {_FOUND.get(fault.kind, 'values')}, not {_shown(kind)}",
                hint="`ffserve inspect` shows the features and their types",
            )
        if fault.what == engine.SEVERAL:
            return FormatError(
                f"feature {name!r} holds several values where one is wanted",
                hint=f"read it as list[{_shown(kind)}]",
            )
        if fault.what == engine.LARGE:
            return FormatError(
                f"a batch holds more than 2 GiB of feature {name!r}", hint="use smaller batches"
            )
        return FormatError(
            "the record is not a tf.train.Example", hint="leave `features` out to read the bytes"
        )

    def rows(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a dict for each record."""
        names = list(columns)
        values = [_plain(column) for column in columns.values()]
        return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def _missing(name: str, kind: type, record: Any) -> FormatError:
    """Return the error for a record without a value of a feature that must have one."""
    found = engine.types_of(record)
    if name in found:
        return FormatError(
            f"feature {name!r} of the record has no value",
            hint=f"read it as list[{kind.__name__}], which may be empty",
        )
    there = ", ".join(f"{known!r}: {each}" for known, each in found.items()) or "none"
    return FormatError(
        f"the record has no feature {name!r}; it has {there}",
        hint=f"correct the name, or read it as list[{kind.__name__}] if only some records have it",
    )


def _shown(kind: Any) -> str:
    return str(kind) if isinstance(kind, types.GenericAlias) else kind.__name__


def _plain(column: Any) -> Any:
    """Return a column with Python's own integers, which torch collates fastest."""
    return column.tolist() if getattr(column, "dtype", None) == np.int64 else column


def _values(column: Decoded, kind: Any) -> Any:
    values: Any = column.values
    if column.edges is not None:
        content, edges = memoryview(values), column.edges.tolist()
        text = str in (kind, *get_args(kind))
        values = [
            str(content[start:end], "utf-8") if text else bytes(content[start:end])
            for start, end in pairwise(edges)
        ]
    if column.outer is None:
        return values
    ends = column.outer.tolist()
    return [values[start:end] for start, end in pairwise(ends)]
