"""The source of a reader in one event loop, and its requests there.

The source is opened at first use and made anew when it is lost; one task looks for another while
the others await that. A request that nobody awaits any more gives back what it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ffserve.client.announced import Announced
from ffserve.client.choice import (
    RECONNECT_S,
    Choice,
    Moves,
    Origin,
    Telling,
    Wanted,
    closed_error,
)
from ffserve.client.daemon import source_over
from ffserve.client.inline import InlineSource
from ffserve.client.local import ChunkedPending, LocalPending, LocalSource
from ffserve.client.loop import Home, LoopConnection, in_thread, pool, undisturbed
from ffserve.client.remote import RemoteSource
from ffserve.client.request import Awaited, RemotePending, Steps
from ffserve.client.source import Bytes, Int64s, Source, Target
from ffserve.engine.io import probe
from ffserve.errors import FFServeError, ServerUnavailable
from ffserve.socket_path import find_socket

T = TypeVar("T")
Failed: TypeAlias = dict[int, FFServeError]
"""What could not be read, by position."""

LARGE_COPY_SIZE = 1024 * 1024
"""Bytes from which on a copy leaves the loop to others. Copying so much takes 0.12 ms (ratios in
docs/decisions/requests.md), which is what the way to a thread and back costs too."""


@dataclass(slots=True)
class Request:
    """A request that was started. Whoever started it finishes it, and settles it in any case."""

    source: Source
    pending: Any
    ended: asyncio.Future[None] | None
    keeps_out: bool
    over: bool = False


class LoopSupply(Choice):
    """See the module's text. Used in the thread of its loop.

    Args: home: what the loop has.
    """

    def __init__(self, home: Home, wanted: Wanted, announced: Announced) -> None:
        super().__init__(wanted, announced)
        self._home = home
        self._lock = asyncio.Lock()
        self._searches = 0
        self._failure: FFServeError | None = None
        """Of the last search for a source."""
        self._copied = 0
        """Bytes copied since the loop was last left to others."""

    # ---- what is to be done ---------------------------------------------------------------

    async def _run(self, moves: Moves[T]) -> T:
        try:
            step = next(moves)
            while True:
                try:
                    done = await self._done(step)
                except FFServeError as error:
                    step = moves.throw(error)
                else:
                    step = moves.send(done)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _done(self, step: Origin | Telling | float) -> Source | None:
        if step is Origin.REMOTE:
            return await self._open_remote()
        if step is Origin.LOCAL:
            return await self._open_local()
        if isinstance(step, Telling):
            await tell(step.source, step.order)
            return None
        assert isinstance(step, float)
        await asyncio.sleep(step)
        return None

    async def _open_remote(self) -> Source:
        wanted = self._wanted
        connection = await self._home.connect(find_socket(wanted.socket))
        try:
            opened = await connection.opened(
                wanted.paths, wanted.format, wanted.verify, wanted.tolerant
            )
            return source_over(connection, opened, wanted.paths)
        except BaseException:
            connection.leave()
            raise

    async def _open_local(self) -> Source:
        await in_thread(probe, nothing)
        engine, wanted = self._home.engine().engine, self._wanted
        return await in_thread(
            lambda: LocalSource(
                wanted.paths, wanted.format, wanted.verify, wanted.tolerant, lambda: engine
            ),
            LocalSource.close,
        )

    # ---- the source -----------------------------------------------------------------------

    async def open(self) -> None:
        """Have a source. Raises what opening the files does."""
        await self._run(self.opening(0.0))

    async def current(self) -> Source:
        """Return the source, opening it in a loop that has none yet."""
        source = self.source
        if source is not None and (self.away_since is None or not await self._look_again()):
            return source
        async with self._alone():
            if self.source is None:
                await self._run(self.opening(RECONNECT_S["require"]))
            assert self.source is not None
            return self.source

    async def retrying(self, attempt: Callable[[Source], Awaitable[T]]) -> T:
        """Make a request; when the daemon goes away meanwhile, make it again as a whole."""
        while True:
            source = await self.current()
            try:
                return await attempt(source)
            except ServerUnavailable:
                if isinstance(source, LocalSource):
                    if source is self.source:
                        raise
                    continue
                async with self._alone():
                    await self._run(self.replacing(source))

    async def _look_again(self) -> bool:
        if not self.due():
            return False
        async with self._lock:
            return await self._run(self.returning())

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Look for a source for all; who waited while that failed is told the same."""
        asked = self._searches
        async with self._lock:
            if self._wanted.closed:
                raise closed_error()
            if self._failure is not None and asked < self._searches:
                raise self._failure.located()
            self._searches += 1
            self._failure = None
            try:
                yield
            except FFServeError as error:
                self._failure = error
                raise

    # ---- requests -------------------------------------------------------------------------

    async def read(
        self, source: Source, numbers: Int64s, *, apart: bool, out: Bytes | None = None
    ) -> tuple[Target, Failed]:
        """Read samples; return where they are, and what could not be read."""
        request = self._start(source, numbers, apart=apart, out=out)
        try:
            failed = await self._finish(request)
        finally:
            await self._settle(request)
        target: Target = request.pending.target
        return target, failed

    async def sizes(self, source: Source, numbers: Int64s | None) -> Int64s:
        """Return lengths in bytes; None: of all."""
        if isinstance(source, InlineSource):
            assert isinstance(source.connection, LoopConnection)
            steps = source.looking_up(numbers)
            try:
                step = next(steps)
                while True:
                    step = steps.send(await source.connection.answer(step.tag, step.kind))
            except StopIteration as end:
                sizes: Int64s = end.value[1]
                return sizes
        if not isinstance(source, RemoteSource):
            assert isinstance(source, LocalSource)
            if source.knows_sizes:
                return source.sizes(numbers)
            return await undisturbed(asyncio.wrap_future(pool().submit(source.sizes, numbers)))
        pending = source.start_sizes(numbers)
        if pending is not None:
            request = Request(source, pending, None, keeps_out=False)
            try:
                await self._drive(source, pending, source.sizes_steps(pending))
                request.over = True
            finally:
                await self._settle(request)
        return source.known_sizes(numbers)

    def _start(
        self, source: Source, numbers: Int64s, *, apart: bool, out: Bytes | None = None
    ) -> Request:
        pending = source.start(numbers, apart=apart, out=out)
        ended = None
        if isinstance(pending, LocalPending) and pending.batch is not None:
            ended = self._home.engine().watch(pending.batch)
        return Request(source, pending, ended, keeps_out=out is not None)

    async def _finish(self, request: Request) -> Failed:
        source, pending = request.source, request.pending
        if isinstance(source, LocalSource):
            if isinstance(pending, ChunkedPending):
                request.over = True
                return await undisturbed(asyncio.wrap_future(pool().submit(source.finish, pending)))
            if request.ended is not None:
                await asyncio.shield(request.ended)
            request.over = True
            return source.collect(pending)
        assert isinstance(source, RemoteSource)
        failed = await self._drive(source, pending, source.steps(pending))
        request.over = True
        return failed

    async def _drive(self, source: RemoteSource, pending: RemotePending, steps: Steps) -> Failed:
        connection = source.connection
        assert isinstance(connection, LoopConnection)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Awaited):
                    step = steps.send(await connection.ready(step.tag))
                else:
                    if step.pause_s:
                        await asyncio.sleep(step.pause_s)
                    step = steps.send(await self._copy(source, pending, step.positions))
        except StopIteration as end:
            failed: Failed = end.value
            return failed

    async def _copy(
        self, source: RemoteSource, pending: RemotePending, positions: Int64s | None
    ) -> Int64s:
        offsets = pending.target.offsets
        if positions is None:
            size = int(offsets[-1])
        else:
            size = int((offsets[positions + 1] - offsets[positions]).sum())
        if size >= LARGE_COPY_SIZE:
            return await undisturbed(
                asyncio.wrap_future(pool().submit(source.copy, pending, positions))
            )
        self._copied += size
        if self._copied >= LARGE_COPY_SIZE:
            # Who reads nothing but what is there would never let anybody else run.
            self._copied = 0
            await asyncio.sleep(0)
        return source.copy(pending, positions)

    async def _settle(self, request: Request) -> None:
        """Nobody wants this request any more: give back its pins, and the caller his buffer."""
        if request.over:
            return
        source, pending = request.source, request.pending
        request.over = True
        if isinstance(source, RemoteSource):
            connection = source.connection
            assert isinstance(connection, LoopConnection)
            for tag in source.give_up(pending):
                connection.give_up(tag)
            return
        assert isinstance(source, LocalSource)
        if request.ended is None:
            source.collect(pending)
            return
        request.ended.add_done_callback(lambda _: source.collect(pending))
        if request.keeps_out:
            # The reads go straight to the caller's buffer, and cannot be called back.
            await undisturbed(request.ended)


async def tell(source: Source, order: tuple[Int64s, int, str | None, bool]) -> None:
    """Announce an order to a source for which it is of use."""
    if isinstance(source, RemoteSource):
        assert isinstance(source.connection, LoopConnection)
        await source.connection.announced(source.dataset, *order)


def nothing(made: object) -> None:
    """What was made needs no undoing."""
