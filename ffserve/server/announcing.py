"""An order as a client announces it, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffserve import protocol
from ffserve.cache.cache import Int64s
from ffserve.cache.orders import Arriving
from ffserve.errors import FFServeError, ProtocolError, SampleIndexError, UsageError
from ffserve.server.report import MOST_COUNTED

if TYPE_CHECKING:
    from ffserve.server.node import Node
    from ffserve.server.session import Dataset

MOST_NAME = 200
"""Characters of the name of an order that jobs share."""


@dataclass(slots=True)
class _Announcement:
    """An order of which not all pieces have come."""

    tag: int
    dataset: Dataset
    epoch: int
    name: str | None
    order: Arriving


class Announcing:
    """The order that one session is being told; only one is under way at a time.

    Args: fail: tells the client, by tag, why an order is not taken.
    """

    def __init__(self, node: Node, fail: Callable[[int, FFServeError], None]) -> None:
        self._node = node
        self._fail = fail
        self._begun: _Announcement | None = None

    @property
    def under_way(self) -> bool:
        """Whether an order has begun to come and has not ended."""
        return self._begun is not None

    def forget(self, dataset: Dataset | None = None) -> None:
        """The rest of the order will not come, if it is for this data set; None: for any."""
        if dataset is None or (self._begun is not None and self._begun.dataset is dataset):
            self._begun = None

    def take(self, message: protocol.Order, dataset: Dataset) -> protocol.Ready | None:
        """Take a piece in; pieces of an order that was refused are passed over.

        Returns: the answer to the last piece.
        Raises: ProtocolError.
        """
        if not 0 < message.tag < 1 << 32 or not 0 <= message.epoch <= MOST_COUNTED:
            raise ProtocolError("the client announced an order with an impossible tag or epoch")
        indices = protocol.unpack_order(message.indices)
        try:
            return self._take_piece(message, dataset, indices)
        except FFServeError as error:
            if isinstance(error, ProtocolError):
                raise
            self._begun = None
            self._fail(message.tag, error)
            return None

    def _take_piece(
        self, message: protocol.Order, dataset: Dataset, indices: Int64s
    ) -> protocol.Ready | None:
        layout = dataset.layout
        announcement = self._begun
        if message.start == 0:
            if announcement is not None:
                self._begun = None
                self._fail(announcement.tag, UsageError("another order came before this one ended"))
            announcement = self._begun = self._begin(message, dataset)
        elif announcement is None or announcement.tag != message.tag:
            return None
        order = announcement.order
        if message.start != order.arrived or message.count != order.count or not len(indices):
            raise UsageError(
                f"a piece of the order says it begins at position {message.start} of "
                f"{message.count}, but {order.arrived} of {order.count} have come"
            )
        if int(indices.max()) >= layout.count:
            bad = int(indices.max())
            raise SampleIndexError(
                f"the order visits sample {bad}, outside the dataset of {layout.count} samples",
                index=bad,
            )
        order.add(layout.numbers(indices))
        if order.arrived < order.count:
            return None
        self._begun = None
        try:
            whole = order.finish()
        except SampleIndexError as error:
            assert error.index is not None
            raise error.located(index=layout.index(error.index)) from None
        progress, uses = announcement.dataset.progress, self._node.uses
        self._node.scheduler.ahead.replaced(progress, announcement.epoch)
        uses.announced(progress, announcement.epoch, whole, announcement.name, dataset)
        return protocol.Ready(message.tag, whole.count, [])

    def _begin(self, message: protocol.Order, dataset: Dataset) -> _Announcement:
        name, replacement = message.what.get("name"), message.what.get("replacement")
        if not isinstance(replacement, bool) or not (
            name is None or (isinstance(name, str) and len(name) <= MOST_NAME)
        ):
            raise ProtocolError("the client announced an order of no known kind")
        arriving = self._node.uses.arriving(
            dataset.progress, message.count, replacement=replacement
        )
        return _Announcement(message.tag, dataset, message.epoch, name, arriving)
