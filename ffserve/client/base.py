"""What every reader knows of its data set, whether it blocks or awaits: no I/O in here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ffserve import formats
from ffserve.client import connections
from ffserve.client.announced import Announced, check_count, check_order
from ffserve.client.choice import Wanted, closed_error
from ffserve.client.source import Int64s, Source
from ffserve.dataset import as_indices
from ffserve.errors import FFServeError, UsageError

_OF_THIS_PROCESS = frozenset(("_announced", "_supply", "_supplies"))


def check_options(format: str | None, server: str, on_error: str) -> Callable[[], tuple[str, ...]]:
    """Return what gives the suffixes of the files to look for in directories.

    Raises: UsageError for an option of `open` that is none.
    """
    if on_error not in ("raise", "skip"):
        raise UsageError(f"on_error is 'raise' or 'skip', not {on_error!r}")
    if not isinstance(server, str) or not server:
        raise UsageError(f"server is 'auto', 'require', 'off' or a socket's path, not {server!r}")
    if format is not None:
        formats.check_name(format)
    return lambda: formats.suffixes(format)


class BaseReader:
    """Indices in, sample numbers out; errors by the caller's indices."""

    _name: str
    """What people know the reader as."""
    _announced: Announced

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._intact: Int64s | None = None
        self._damaged: list[FFServeError] = []
        self._set_up()

    def _set_up(self) -> None:
        """Make what belongs to this process alone, for a copy as well."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._wanted.count if self._intact is None else len(self._intact)

    @property
    def damaged(self) -> list[FFServeError]:
        """What `on_error="skip"` left out, and why; indices are those in the files."""
        return list(self._damaged)

    def _numbers(self, indices: Any) -> Int64s:
        if self._wanted.closed:
            raise closed_error()
        chosen = as_indices(indices, len(self))
        return chosen if self._intact is None else self._intact[chosen]

    def _all_numbers(self) -> Int64s:
        if self._intact is not None:
            return self._intact
        return np.arange(self._wanted.count, dtype=np.int64)

    def _named(self, error: FFServeError, position: int, numbers: Int64s) -> FFServeError:
        if self._intact is None:
            return error
        return error.located(index=int(np.searchsorted(self._intact, numbers[position])))

    def _raise_first(self, failed: dict[int, FFServeError], numbers: Int64s) -> None:
        if failed:
            position = min(failed)
            raise self._named(failed[position], position, numbers)

    def _mixed(
        self, arrays: list[Any], failed: dict[int, FFServeError], numbers: Int64s,
        errors: Literal["raise", "return"],
    ) -> list[Any]:  # fmt: skip
        """Return the samples, errors in the places of those that failed if they are wanted."""
        if errors != "return":
            self._raise_first(failed, numbers)
            return arrays
        mixed = list(arrays)
        for position, error in failed.items():
            mixed[position] = self._named(error, position, numbers)
        return mixed

    def _leave_out(self, bad: dict[int, FFServeError]) -> None:
        """Hide these samples, by number."""
        self._damaged += bad.values()
        if bad:
            self._intact = np.delete(np.arange(self._wanted.count, dtype=np.int64), list(bad))

    def _summed(self, current: Source) -> dict[str, int | float | str]:
        facts = dict(current.stats())
        for name, value in self._wanted.totals.items():
            facts[name] = int(facts[name]) + value
        hits, misses = int(facts["hits"]), int(facts["misses"])
        facts["samples"] = hits + misses
        facts["hit_rate"] = hits / max(1, hits + misses)
        facts["source"] = current.description
        if self._wanted.unserved:
            facts["unserved"] = self._wanted.unserved
        return facts

    def _checked_order(
        self, order: Any, epoch: int, name: str | None, replacement: bool
    ) -> tuple[Int64s, int, str | None, bool]:
        """Return what `Source.announce` is called with. Raises: as `Reader.announce`."""
        numbers = self._numbers(order)
        epoch = check_count("epoch", epoch)
        check_order(numbers, self._wanted.count, name, replacement)
        return numbers, epoch, name, replacement

    def __getstate__(self) -> dict[str, Any]:
        own = dataclasses.replace(self._wanted, totals={})
        kept = {k: v for k, v in self.__dict__.items() if k not in _OF_THIS_PROCESS}
        return {**kept, "_wanted": own, "job": connections.job_name()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        connections.join_job(state.pop("job"))
        self.__dict__.update(state)
        self._set_up()

    def __repr__(self) -> str:
        paths = self._wanted.paths
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return f"<{self._name} of {len(self)} samples in {paths[0]}{more}>"
