"""Items: samples that this program makes of no record file, kept by the daemon.

To the daemon they are prepared samples (`daemon/preparing.py`) of a data set without files. Which
source a process has, and what happens when the daemon is lost, is decided as for files
(`failover.py`); the source without a daemon has no samples, and the program makes each item.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ffserve.client.announced import AnnouncedOrders
from ffserve.client.daemon import connection as connections
from ffserve.client.daemon.preparing import Make, Pieces, PreparedSource
from ffserve.client.failover import OpenRequest, SourceSelector
from ffserve.client.source import SampleSource
from ffserve.dataset.layout import combined_fingerprint
from ffserve.dtypes import Bytes, Int64s
from ffserve.errors import (
    FFServeError,
    ProtocolError,
    ReadError,
    ServerUnavailable,
    UsageError,
)


class ItemSource(PreparedSource):
    """Items that the daemon keeps; a user of its connection.

    Raises: ServerUnavailable, ProtocolError, ReadError: the daemon keeps none.
    """

    def __init__(self, connection: connections.Connection, kept: KeptItems) -> None:
        if not connection.handshake.keeps_items:
            raise ProtocolError(
                "the daemon is of a release that keeps no items",
                path=connection.path,
                hint="upgrade it, or restart it if it was upgraded",
            )
        what = {"name": kept.name, "count": kept.count}
        super().__init__(
            connection, None, (kept.name,), kept.key, what, kept.pieces, kept.value, np.asarray
        )
        # Another data set may have the same name and version: the first item found is compared.
        self._unchecked = 0

    def close(self) -> None:
        """Close the data set; the last user of the connection closes that."""
        if not self.closed:
            super().close()
            self.connection.leave()


class NoItems:
    """The source without a daemon."""

    description = "the data set itself"
    fingerprint = combined_fingerprint(np.zeros(1, np.uint64))

    def __init__(self, count: int) -> None:
        self.count = count

    def announce(self, *order: object) -> None:
        """An order is of no use."""

    def reached(self, epoch: int, position: int) -> bool:
        """A position is of no use."""
        return True

    def stats(self) -> dict[str, int]:
        """Return counters; nothing is counted."""
        return dict.fromkeys(("hits", "misses", "bytes"), 0)

    def after_fork(self) -> None:
        """It belongs to the child as well."""

    def close(self) -> None:
        """There is nothing to give back."""


class KeptItems:
    """The items of a data set without files. A copy in another process connects anew.

    Args:
        count: of the items. key: 32 bytes, for which the daemon keeps them. name: for people.
        pieces: the bytes of an item, none if it cannot be kept; value: the item made of bytes.
    """

    def __init__(
        self,
        count: int,
        key: bytes,
        name: str,
        pieces: Callable[[Any], Pieces],
        value: Callable[[Bytes], Any],
    ) -> None:
        self.count, self.key, self.name = count, key, name
        self.pieces, self.value = pieces, value
        connections.job_name()  # before workers are forked: they belong to the same job
        self._set_up()

    def _set_up(self) -> None:
        self._request = OpenRequest((self.name,), None, "auto", verify=False, tolerant=False)
        self._announced = AnnouncedOrders()
        self._selector = _ItemSelector(self._request, self._announced, self)
        connections.call_after_fork(self)

    def __reduce__(self) -> Any:
        made = self.count, self.key, self.name, self.pieces, self.value
        return _copied, (connections.job_name(), *made)

    def items(self, numbers: Int64s, make: Make) -> list[Any]:
        """Return items: found in memory, or made, and kept then.

        Args: make: makes those that this process is to make.
        Raises: what `make` raises.
        """
        source = self._selector.current()
        if not isinstance(source, ItemSource) or not source.trusted:
            return make(numbers)
        try:
            return source.values(numbers, make)
        except (ServerUnavailable, ProtocolError) as error:
            if source.connection.alive:
                raise
            self._selector.after(source, error)
        return make(numbers)

    @property
    def source(self) -> str:
        """Where items come from now."""
        return self._selector.current().description

    def stats(self) -> dict[str, int | float | str]:
        """Return counters of this process: hits, and misses, which it has made."""
        return dict(self._selector.current().stats())

    def announce(self, order: Int64s, epoch: int, name: str | None, replacement: bool) -> None:
        """Announce an order. Raises: UsageError, SampleIndexError: the daemon refuses it."""
        self._selector.lead()
        source = self._selector.current()
        try:
            source.announce(order, epoch, name, replacement)
        except ServerUnavailable as error:
            self._selector.after(source, error)
            self._selector.current().announce(order, epoch, name, replacement)
        self._announced.add(order, epoch, name, replacement)

    def reached(self, epoch: int, position: int) -> None:
        """Report a position in an announced order, without waiting."""
        self._announced.reached(epoch, position)
        source = self._selector.source
        known = source is not None and source.reached(epoch, position)
        away = self._selector.selection.away_since is not None
        if self._announced.any and (not known or away):
            self._selector.look_for_daemon(source)

    def close(self) -> None:
        """Give everything back."""
        self._selector.close()

    def after_fork(self) -> None:
        """This process is a child: connect anew at the next use."""
        self._announced.forget()
        self._selector.after_fork()


def _copied(job: str, *made: Any) -> KeptItems:
    connections.join_job(job)
    return KeptItems(*made)


class _ItemSelector(SourceSelector):
    """Source selection for items."""

    def __init__(self, request: OpenRequest, announced: AnnouncedOrders, kept: KeptItems) -> None:
        super().__init__(request, announced)
        self._kept = kept

    def open_daemon(self) -> SampleSource:
        """Open the items that the daemon keeps."""
        connection = connections.connect(self._request.socket)
        try:
            source = ItemSource(connection, self._kept)
        except BaseException as error:
            connection.leave()
            ours = isinstance(error, FFServeError)
            if isinstance(error, UsageError) or (isinstance(error, OSError) and not ours):
                raise ReadError(f"it keeps no items: {error}", path=connection.path) from error
            raise
        self._request.served_by = connection.path
        return source

    def open_local(self) -> Any:
        """Have the source without samples."""
        return NoItems(self._kept.count)
