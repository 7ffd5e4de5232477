"""Driver of a channel: what connections with blocking calls and those of event loops both are.

A driver owns the socket of a `channel.Channel`. What a request does is a generator of steps (see
`channel.Steps`), written once; `connection.Connection` takes them with blocking calls and
`loop.LoopConnection` with `await`. A generator that is closed gives its request up.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from ffserve import protocol
from ffserve.client.channel import RECEIVE_SIZE, Beside, DatasetRequest, Int64s, Steps
from ffserve.client.descriptors import OpenFiles, described
from ffserve.client.handshake import Handshake
from ffserve.client.memory import receive
from ffserve.errors import FFServeError, ServerUnavailable


class Driver(ABC):
    """A connection to the daemon. One that broke stays broken.

    Args: path: the socket. job: name of the training run that this process belongs to.

    Raises:
        ServerUnavailable: nothing answers there.
        ProtocolError: the other side speaks another protocol.
    """

    def __init__(self, path: str, job: str) -> None:
        self.path = path
        self.job = job
        self.readers = 0
        self.handshake = Handshake(path, job)
        self.channel = self.handshake.channel
        self._socket = self.handshake.socket

    @property
    def alive(self) -> bool:
        """False once it broke or was closed."""
        return self.channel.broken is None

    # ---- requests -------------------------------------------------------------------------

    def opening(self, request: DatasetRequest) -> Steps[protocol.Opened]:
        """Open a data set.

        Raises: what the daemon answers; ServerUnavailable if it is gone; UnmappedError;
            MissingFile, AccessDenied, ReadError: this process cannot open a file.
        """
        self.handshake.check_memory()
        paths, fetches = request.paths, self.handshake.fetches
        files = yield Beside(partial(described, paths, request.identities, fetches, self.path))
        tag = self.channel.open(request, files)
        while isinstance(answer := (yield from self._answer(tag)), protocol.Need):
            try:
                positions = protocol.unpack_positions(answer.positions, len(paths))
                passed = yield Beside(partial(OpenFiles.of, paths, positions), OpenFiles.close)
            except BaseException:
                self.channel.pass_no_files(tag)
                self.report()
                raise
            self.channel.pass_files(tag, passed)
        opened: protocol.Opened = answer
        return opened

    def _answer(self, tag: int) -> Steps[Any]:
        try:
            return (yield tag)
        except BaseException:
            self.channel.give_up(tag)
            raise

    def announcing(
        self, dataset: int, epoch: int, order: Int64s, name: str | None, replacement: bool
    ) -> Steps[None]:
        """Announce an order, unless the daemon wants none. One at a time: pieces must not mix."""
        if self.channel.takes_orders:
            tag = 0
            for tag in self.channel.order_pieces(dataset, epoch, order, name, replacement):  # noqa: B007
                self.flush()
            yield from self._answer(tag)

    # ---- the socket -----------------------------------------------------------------------

    @abstractmethod
    def check(self) -> None:
        """Break if the daemon has hung up; for a client that asks it for nothing."""

    @abstractmethod
    def flush(self) -> None:
        """Send the requests that are queued."""

    @abstractmethod
    def report(self) -> None:
        """Send the reports that are due, without waiting."""

    def _take(self) -> list[int]:
        """Receive what the daemon has sent; return the tags that were answered.

        Raises: BlockingIOError: nothing came in time; OSError; ServerUnavailable: it has hung up;
            as `Channel.feed`.
        """
        chunk = receive(self._socket, RECEIVE_SIZE, self.channel.memories_due)
        answered = self.channel.feed(chunk)
        if not chunk:
            raise self._hung_up()
        return answered

    def _hung_up(self) -> ServerUnavailable:
        return ServerUnavailable("the daemon closed the connection", path=self.path)

    def _gone(self, error: OSError) -> FFServeError:
        """Return the error of requests after an error of the socket."""
        if isinstance(error, FFServeError):
            return error
        return ServerUnavailable(f"the daemon is gone: {error}", path=self.path)

    # ---- the end --------------------------------------------------------------------------

    @abstractmethod
    def close_dataset(self, dataset: int) -> None:
        """A data set is not needed any more; requests for it fail from now on."""

    @abstractmethod
    def leave(self) -> None:
        """A reader does not need the connection any more; the last one closes it."""

    def _closed(self) -> ServerUnavailable:
        return ServerUnavailable("this connection was closed", path=self.path)

    def _drop(self) -> None:
        """Close the descriptors and nothing else: the connection is the parent process's, or its
        loop is closed."""
        # A thread that exists in the parent only may have held the lock.
        self.channel.lock = threading.RLock()
        self.channel.fail(self._closed())
        self.channel.drop_passing()
        self._socket.close()
        self.handshake.drop_fds()
