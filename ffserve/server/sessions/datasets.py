"""Data sets as sessions have opened them, and the orders that are announced for them.

Work that may last for more than a moment is a generator (`Steps`): it does a part of its work
between two yields, and the server serves others in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ffserve import protocol
from ffserve.cache.jobs import JobProgress
from ffserve.cache.orders import Arriving
from ffserve.dataset.layout import Layout
from ffserve.dtypes import Int64s
from ffserve.errors import FFServeError, ProtocolError, SampleIndexError, UsageError
from ffserve.limits import MOST_ANNOUNCED, MOST_NAME, OTHERS_SHARE
from ffserve.protocol import Message
from ffserve.server.files.preparations import Preparation
from ffserve.server.files.shards import OpenShard
from ffserve.server.prepared.copying import PreparedFile
from ffserve.server.reading.statistics import LARGEST_COUNT
from ffserve.server.sessions.state import ServerState
from ffserve.server.users.shares import Bound, User

FEW = 64
"""One step handles this many tags, paths, shards, data sets or errors."""
STEP_COUNT = 8192
"""One step handles this many samples, or positions of an order."""
Steps: TypeAlias = Generator["Bound | None", float, None]
"""Work that is done in steps. It yields None after each step, or the `Bound` that it waits for, and
is sent the time of the next step. A time that it got earlier may be long past."""


@dataclass(slots=True, eq=False)
class OpenDataset:
    """A data set as one session has opened it."""

    paths: list[str]
    """The session's names for the shards; another session may have opened them by other names."""
    shards: list[OpenShard]
    layout: Layout
    progress: JobProgress
    requests: int = 0
    """Unanswered requests; they keep the shards open after the data set was closed."""
    closed: int = 0
    """Shards that were closed."""
    preparation: Preparation | None = None
    """Its samples are prepared by clients, and"""
    memory_file: PreparedFile | None = None
    """they are copied out of this file and are made of those of"""
    source: JobProgress | None = None
    """this data set; None: of no file."""
    remote: bool = False
    """Whether there are remote files among its shards."""


@dataclass(slots=True)
class _IncomingOrder:
    """An order of which some pieces are still to come."""

    tag: int
    dataset: OpenDataset
    epoch: int
    name: str | None
    order: Arriving


class OrderReceiver:
    """Puts the pieces of one announced order at a time together.

    Args:
        user: who announces.
        send, fail: tell the client, by tag, that an order was taken, and why one is refused.
    """

    def __init__(
        self,
        state: ServerState,
        user: User,
        send: Callable[[Message], None],
        fail: Callable[[int, FFServeError], None],
    ) -> None:
        self._state = state
        self._user = user
        self._send = send
        self._fail = fail
        self._current: _IncomingOrder | None = None

    @property
    def receiving(self) -> bool:
        """Whether pieces of an order are still to come."""
        return self._current is not None

    def forget(self, dataset: OpenDataset | None = None) -> None:
        """Drop the pieces received so far if they are for this data set, or with None for any data
        set."""
        if dataset is None or (self._current is not None and self._current.dataset is dataset):
            self._current = None

    def receive(self, message: protocol.Order, dataset: OpenDataset) -> Steps:
        """Take a piece; ignore pieces of an order that was refused. Answer the last piece.

        Raises: ProtocolError.
        """
        if not 0 < message.tag < 1 << 32 or not 0 <= message.epoch <= LARGEST_COUNT:
            raise ProtocolError("invalid ORDER message: the tag or the epoch is out of range")
        indices = protocol.unpack_order(message.indices)
        try:
            yield from self._add(message, dataset, indices)
        except FFServeError as error:
            if isinstance(error, ProtocolError):
                raise
            self._current = None
            self._fail(message.tag, error)

    def _add(self, message: protocol.Order, dataset: OpenDataset, indices: Int64s) -> Steps:
        layout = dataset.layout
        current = self._current
        if message.start == 0:
            if current is not None:
                self._current = None
                self._fail(current.tag, UsageError("another order began before this one ended"))
            current = self._current = self._begin(message, dataset)
        elif current is None or current.tag != message.tag:
            return
        order = current.order
        if message.start != order.arrived or message.count != order.count or not len(indices):
            raise UsageError(
                f"the order has a gap: a piece begins at position {message.start} of "
                f"{message.count}, but {order.arrived} of {order.count} positions were received"
            )
        if int(indices.max()) >= layout.count:
            bad = int(indices.max())
            raise SampleIndexError(
                f"the order visits sample {bad}, but the dataset has {layout.count} samples",
                index=bad,
            )
        for part in parts(indices):
            order.add(layout.numbers(part))
            yield None
        if order.arrived == order.count:
            yield from self._end(current)

    def _end(self, current: _IncomingOrder) -> Steps:
        """Announce the order, since all pieces have come."""
        self._current = None
        dataset = current.dataset
        try:
            whole = yield from current.order.finishing()
        except SampleIndexError as error:
            assert error.index is not None
            raise error.located(index=dataset.layout.index(error.index)) from None
        progress = dataset.progress
        now = yield None
        yield from self._state.memory.next_use.announcing(
            progress, current.epoch, whole, current.name, dataset, now, self._user.uid
        )
        # Not earlier, since between two steps the old order would be followed again.
        self._state.reading.scheduler.prefetcher.replaced(progress, current.epoch)
        if (fetches := self._state.reading.engines.fetches) is not None:
            fetches.announced()
        self._send(protocol.Ready(current.tag, whole.count, []))
        now = yield None
        self._state.reading.scheduler.pump(now)

    def _begin(self, message: protocol.Order, dataset: OpenDataset) -> _IncomingOrder:
        name, replacement = message.what.get("name"), message.what.get("replacement")
        if not isinstance(replacement, bool) or not (
            name is None or (isinstance(name, str) and len(name) <= MOST_NAME)
        ):
            raise ProtocolError("invalid ORDER message: 'name' or 'replacement' is invalid")
        next_use, user = self._state.memory.next_use, self._user
        arriving = next_use.arriving(
            dataset.progress, message.count, replacement=replacement, user=user.uid
        )
        size, count = next_use.announced_by(user.uid)
        if count > MOST_ANNOUNCED and not dataset.progress.orders:
            raise UsageError(
                f"user {user.uid} has announced orders in {MOST_ANNOUNCED} data sets already",
                hint="announce fewer data sets, or open many files as one",
            )
        held = next_use.order_size - arriving.size
        if not user.may_take(arriving.size, size - arriving.size, held, next_use.most_size):
            raise UsageError(
                f"the announced orders of user {user.uid} would take {size} bytes, more than "
                f"{OTHERS_SHARE} times what would be left for others",
                hint=f"the daemon keeps at most {next_use.most_size} bytes of orders; jobs that "
                "draw their order with the same seed share it",
            )
        return _IncomingOrder(message.tag, dataset, message.epoch, name, arriving)


def parts(numbers: Int64s) -> Iterator[Int64s]:
    """Cut a long list into parts for one step each."""
    for first in range(0, len(numbers), STEP_COUNT):
        yield numbers[first : first + STEP_COUNT]
