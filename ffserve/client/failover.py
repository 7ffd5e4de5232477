"""Source selection: which source a reader takes, and what it does when that one is lost.

The decisions are generators that do no I/O (`SourceSelection`). They yield what their driver is to
do (open a source, announce an order to one, wait), get the source sent in or the error thrown in,
and return when the reader has its source. `SourceSelector` drives them with blocking calls, for
threads, and `LoopSelector` in an event loop. One thread or task looks for a source while the
others wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias, TypeVar

from ffserve import protocol
from ffserve.client.announced import AnnouncedOrders, Order
from ffserve.client.daemon import connection as connections
from ffserve.client.daemon.autostart import start_daemon, start_wanted
from ffserve.client.daemon.channel import SilentError
from ffserve.client.daemon.mapped_memory import UnmappedError
from ffserve.client.daemon.passed_files import changed_file
from ffserve.client.daemon.shared_memory import DaemonSource
from ffserve.client.local.local_source import LocalSource
from ffserve.client.local.ranged_source import RangedSource, identified
from ffserve.client.loop import LARGE_COPY_SIZE, LoopConnection, LoopState, in_thread
from ffserve.client.source import SampleSource
from ffserve.engine.io import probe
from ffserve.errors import (
    AccessDenied,
    ArenaError,
    FFServeError,
    FormatError,
    MissingFile,
    ProtocolError,
    ReadError,
    ServerUnavailable,
    UsageError,
)
from ffserve.store.origin import ObjectVersion
from ffserve.store.urls import is_url
from ffserve.system.socket_path import find_socket, user_socket

log = logging.getLogger("ffserve")

RECONNECT_S = {"auto": 5.0, "require": 30.0}
"""How long a reader waits for a daemon that went away, before it reads by itself or gives up."""
RETURN_AFTER_S = 30.0
"""How long a reader that lost its daemon reads by itself before it looks for one again."""
LOOK_INTERVAL_S = 0.25
"""How often a reader that only announces, or only hits, looks for a daemon that went away."""
NOT_SERVED = (ServerUnavailable, ProtocolError, AccessDenied, ReadError)
"""The daemon does not serve these files to this process; an engine of its own may read them."""
_NOT_RUNNING = (FileNotFoundError, NotADirectoryError, ConnectionRefusedError)
"""Errors of connecting to a socket that no process listens on."""

T = TypeVar("T")


Step: TypeAlias = Callable[[Any], Any]
"""A call of the driver, such as `methodcaller("open_daemon")`; one in an event loop awaits it."""
SelectionSteps: TypeAlias = Generator[Step, Any, T]


@dataclass(slots=True)
class OpenRequest:
    """The arguments of `ffserve.open`, and facts about the data set that outlive a source.

    paths: the files. format, server, verify: as for `ffserve.open`. tolerant: on_error is "skip".
    seen: see `shardfile.open_shard`; only for reading without a daemon. served_by: the socket of
    the daemon that served last.
    count: samples in them. closed: the reader is. totals: counters of sources that were replaced.
    unserved: why a daemon that is running does not serve the files, or some samples. share: of the
    data that a local source reads through the page cache, the same in all processes that got the
    reader; None: not chosen yet. identities: the versions of remote files that were opened, the
    same in all these processes as well. own: whether the daemon is the user's own, since another
    does not serve the remote files. states: the states of files that the daemon has opened, as OPEN
    has them, likewise. parts: only some fields of samples are read.
    """

    paths: tuple[str, ...]
    format: str | None
    server: str
    verify: bool
    tolerant: bool
    seen: Callable[[int], object] | None = None
    served_by: str = ""
    count: int = 0
    closed: bool = False
    totals: dict[str, int] = field(default_factory=dict)
    unserved: str = ""
    share: float | None = None
    identities: tuple[ObjectVersion, ...] = ()
    own: bool = False
    states: bytes = b""
    parts: bool = False
    _expected: int | None = None

    @property
    def remote(self) -> bool:
        """Whether files are remote."""
        return any(map(is_url, self.paths))

    def identify(self) -> None:
        """Ask the origins for the present versions, once. Raises: what they say."""
        if not self.identities:
            self.identities = identified([path for path in self.paths if is_url(path)])

    @property
    def socket(self) -> str:
        """The daemon's socket. If there is none, the one that was used last."""
        named = self.server not in ("auto", "start", "require", "off")
        found = user_socket() if self.own else find_socket(self.server if named else None)
        return self.served_by if self.served_by and not os.path.exists(found) else found

    @property
    def optional(self) -> bool:
        """Whether the files are read without a daemon that does not serve them."""
        return self.server in ("auto", "start")

    @property
    def starts(self) -> bool:
        """Whether a daemon is started if none answers."""
        return self.server == "start" or (
            self.server == "auto" and start_wanted(remote=self.remote)
        )

    def turn_to_own(self) -> bool:
        """Look for the user's own daemon from now on, if there are remote files, which the daemon
        that was found does not serve; return False if there is no other one to look for."""
        if self.own or not self.optional or not self.remote:
            return False
        with contextlib.suppress(AccessDenied):  # the directory of its socket is not the user's
            self.own = user_socket() != self.socket
        return self.own

    def check(self, source: SampleSource) -> None:
        """Note what a new source opened. Raises when it is not what the last one had."""
        if self.closed:
            raise closed_error()
        found = source.fingerprint
        if self._expected not in (None, found):
            raise FormatError(
                "the file was replaced or rewritten since this reader was opened, and the daemon "
                "has closed the old one",
                path=changed_file(self.paths, self.states),
                hint="open a new reader to read the new content",
            )
        self._expected = found
        self.count = source.count

    def open_local(self, **options: Any) -> LocalSource:
        """Open the files in this process. Args: options: others of `LocalSource`, for local ones.
        Raises: as `LocalSource`, `RangedSource`."""
        about = self.paths, self.format, self.verify, self.tolerant
        source: LocalSource
        if self.remote:
            source = RangedSource(*about, self.seen, share=self.share, identities=self.identities)
            self.identities = source.identities
        else:
            source = LocalSource(*about, seen=self.seen, share=self.share, **options)
        self.share = source.share
        return source

    def add_totals(self, source: SampleSource) -> None:
        """A source will read no more for this reader."""
        for name in ("hits", "misses", "bytes"):
            self.totals[name] = self.totals.get(name, 0) + int(source.stats()[name])


class SourceSelection:
    """The source that a reader has, and the steps to another.

    Args: announced: goes to the next source as well.
    """

    def __init__(self, request: OpenRequest, announced: AnnouncedOrders) -> None:
        self.request = request
        self.source: SampleSource | None = None
        self.spare: LocalSource | None = None
        """Reads what the daemon's arena cannot hold; opened when that happens."""
        self.away_since: float | None = None
        """When the daemon went away, or was looked for last; None: there is no reason to look."""
        self._announced = announced
        self._swapping = threading.Lock()
        """Held while `source` and `request.closed` change together."""
        self._former: SampleSource | None = None
        """A source in the job that this process inherited: what was begun there may end there."""
        self._searches = 0
        """Searches for a source that have ended."""
        self._failure: FFServeError | None = None
        """Of the last one."""

    # ---- what a reader asks for -----------------------------------------------------------

    def opening(self) -> SelectionSteps[None]:
        """Have a first source. Raises: what opening the files does."""
        return self._for_all(self._open(0.0))

    def finding(self, source: SampleSource | None) -> SelectionSteps[SampleSource]:
        """Return the source, opening one in a process or a loop that has none yet.

        Args: source: the present one, if a look for the daemon is `due`.
        """
        if source is not None:
            yield methodcaller("look_for_daemon", source)
        if self.source is None:
            # A copy in a worker: the daemon of the original may be starting anew just now.
            yield from self._for_all(self._open(RECONNECT_S["require"]))
        source = self.source
        if source is None:  # another thread has closed the reader
            raise closed_error()
        return source

    def after(
        self, source: SampleSource, error: FFServeError
    ) -> SelectionSteps[LocalSource | None]:
        """Go on after a request has failed: the daemon is gone, or its arena has no memory for a
        sample. Returns the source for this request alone; None: the present one.

        Raises: the error, if it is final.
        """
        try:
            if isinstance(error, ArenaError):
                if isinstance(source, DaemonSource) and source.replaceable:
                    spare: LocalSource | None = yield methodcaller(
                        "alone", self.sparing(source, error)
                    )
                    return spare
                raise error
            if not isinstance(source, LocalSource):
                yield from self._for_all(self.replacing(source, error))
            elif source is self.source:
                raise error
            return None
        finally:
            del error  # with its traceback it would keep the request's buffers

    def returning(self, instead_of: SampleSource | None) -> SelectionSteps[None]:
        """Look for the daemon that went away, and return to it if it is back."""
        with contextlib.suppress(FFServeError):
            source: SampleSource = yield methodcaller("open_daemon")
            try:
                yield methodcaller("alone", self._moving(source, instead_of))
            finally:
                if self.source is not source:
                    source.close()

    def _moving(
        self, source: SampleSource, instead_of: SampleSource | None
    ) -> SelectionSteps[None]:
        """Have a source of the daemon that went away, unless there is another one by now."""
        if self.source is instead_of:
            yield from self.taking(source)
            self.away_since = None
            self.request.unserved = ""
            if instead_of is not None:
                self._retire(instead_of)

    def leading(self, job: str) -> SelectionSteps[None]:
        """Have a source in this job; the present one may be in an inherited one."""
        yield methodcaller("alone", self._leading(job))

    def _leading(self, job: str) -> SelectionSteps[None]:
        source = self.source
        if isinstance(source, DaemonSource) and source.job != job:
            self._former = source
            try:
                yield from self.taking((yield methodcaller("open_daemon")))
            except NOT_SERVED:
                self._former = None
            else:
                self.request.add_totals(source)

    def has(self, source: SampleSource) -> bool:
        """Whether a request that was started at a source can be finished there."""
        return source in (self.source, self._former) or isinstance(source, LocalSource)

    # ---- the steps to a source ------------------------------------------------------------

    def _for_all(self, steps: SelectionSteps[None]) -> SelectionSteps[None]:
        """Look for a source for all threads or tasks. If that fails, all that waited for it get the
        error."""
        yield methodcaller("alone", self._search(steps, self._searches))

    def _search(self, steps: SelectionSteps[None], asked: int) -> SelectionSteps[None]:
        if self._failure is not None and asked < self._searches:
            raise self._failure.located()
        self._failure = None
        try:
            yield from steps
        except FFServeError as error:
            self._failure = error.located()
            raise
        finally:
            self._searches += 1

    def _open(self, patience_s: float) -> SelectionSteps[None]:
        """Have a source, unless there is one now; a required daemon that is away is waited for."""
        if self.source is None:
            yield from self.taking((yield from self._first(patience_s)))

    def replacing(self, lost: SampleSource, error: FFServeError) -> SelectionSteps[None]:
        """The daemon is gone: wait for the next one, or read without it.

        Raises: the error itself if the daemon is required and stopped.
        """
        if self.source is lost:
            self._retire(lost)
            self.source = None
            if isinstance(error, SilentError):
                yield from self.taking((yield from self._instead_of_stopped(error)))
            else:
                yield from self.taking((yield from self._after_loss()))

    def taking(self, source: SampleSource) -> SelectionSteps[None]:
        """Have a source that was opened just now. Raises, and closes it, if its content is not
        that of the last one, or the reader was closed meanwhile."""
        try:
            self.request.check(source)
            # Another daemon does not know this reader's orders. They help, but are not needed.
            with contextlib.suppress(FFServeError):
                for order in self._announced.orders():
                    yield methodcaller("announce", source, order)
                epoch, position = self._announced.position
                if position:
                    source.reached(epoch, position)
            with self._swapping:
                if self.request.closed:
                    raise closed_error()
                self.source = source
        except BaseException:
            source.close()
            raise

    def sparing(
        self, source: DaemonSource, error: ArenaError
    ) -> SelectionSteps[LocalSource | None]:
        """Have the spare source for samples that the daemon's arena cannot hold. None: this process
        cannot open the files; the daemon's source gives errors for each sample from now on."""
        if self.spare is None:
            try:
                spare = yield methodcaller("open_local")
            except FFServeError:
                source.replaceable, source.refused = False, None
                return None
            self._take_spare(spare)
        if self._first_time(error, key=error.code):
            log.warning(
                "the daemon has no memory for samples, so this process reads them without it: %s",
                str(error),  # a handler that keeps the record must not keep the request's buffers
            )
        return self.spare

    def _take_spare(self, spare: LocalSource) -> None:
        """Have a spare source. Raises, and closes it, if its content is not that of the source."""
        try:
            self.request.check(spare)
            with self._swapping:
                if self.request.closed:
                    raise closed_error()
                self.spare = spare
        except BaseException:
            spare.close()
            raise

    def beside(self, source: SampleSource) -> SelectionSteps[LocalSource | None]:
        """Return a source that reads parts of the samples of the present one; None: this process
        cannot open the files, or they are others by now."""
        found: LocalSource | None = yield methodcaller("alone", self._beside(source))
        return found

    def _beside(self, source: SampleSource) -> SelectionSteps[LocalSource | None]:
        if isinstance(source, LocalSource):
            return source
        if self.spare is None:
            with contextlib.suppress(FFServeError):
                self._take_spare((yield methodcaller("open_local")))
        return self.spare

    def close(self) -> list[SampleSource]:
        """Refuse all use from now on; return the sources, which the caller closes."""
        with self._swapping:
            self.request.closed = True
            sources = self.source, self.spare, self._former
            self.source = self.spare = self._former = None
            return [source for source in sources if source is not None]

    def after_fork(self) -> None:
        """This process is a child: have another source at the next use."""
        self._swapping = threading.Lock()
        for source in (self.source, self.spare, self._former):
            if source is not None:
                source.after_fork()
        if not isinstance(self.source, LocalSource):
            self.source = None
        self._former = None

    def due(self) -> bool:
        """Whether the daemon that went away is to be looked for; then not soon again."""
        now = time.monotonic()
        if self.away_since is not None:
            if now - self.away_since < RETURN_AFTER_S:
                return False
            self.away_since = now
            return True
        source = self.source
        if not isinstance(source, DaemonSource) or not source.look_due:
            return False
        source.look_at = now + LOOK_INTERVAL_S
        return True

    def _retire(self, source: SampleSource) -> None:
        self.request.add_totals(source)
        source.close()

    def _first(self, patience_s: float) -> SelectionSteps[SampleSource]:
        request = self.request
        deadline = time.monotonic() + patience_s
        may_start, tried = request.starts, set[str]()
        refused: FFServeError | None = None
        reason: FFServeError | None = None
        while request.server != "off":
            try:
                source: SampleSource = yield methodcaller("open_daemon")
                request.unserved = ""
                return source
            except MissingFile:
                raise  # said by this machine's kernel, not by the daemon
            except NOT_SERVED as error:
                if may_start and _can_be_started(error) and request.socket not in tried:
                    tried.add(request.socket)
                    if (yield from self._starting()):
                        continue
                    break
                if request.turn_to_own():
                    refused = error
                    continue
                if request.optional:
                    reason = refused if refused and _is_none(error) else error
                    self._note_unused(reason)
                    break
                if not _is_away(error) or time.monotonic() >= deadline:
                    raise
            yield methodcaller("pause", 0.05)
        return (yield from self._without_daemon(reason))

    def _without_daemon(self, reason: FFServeError | None) -> SelectionSteps[SampleSource]:
        """Have an engine of this process; its description says why, if the daemon's memory cannot
        be mapped here."""
        source: SampleSource = yield methodcaller("open_local")
        if isinstance(reason, UnmappedError):
            source.description += f" (daemon not used: {reason.message})"
        return source

    def _note_unused(self, error: FFServeError) -> None:
        """Log why the daemon cannot be used. If no daemon runs, no warning is needed."""
        if _is_none(error):
            return
        if self._first_time(error):
            log.warning("this process reads the files without the daemon: %s", error)
        if _is_away(error):
            self.away_since = time.monotonic()

    def _starting(self) -> SelectionSteps[bool]:
        """Start a daemon; return whether there is one to look for."""
        try:
            yield methodcaller("start_daemon")
        except FFServeError as error:
            if self.request.turn_to_own():
                return True
            if self._first_time(error):
                log.warning(
                    "no daemon could be started, so this process reads the files itself: %s", error
                )
            return False
        return True

    def _after_loss(self) -> SelectionSteps[SampleSource]:
        optional = self.request.optional
        deadline = time.monotonic() + RECONNECT_S["auto" if optional else "require"]
        pause = 0.01
        while True:
            try:
                source: SampleSource = yield methodcaller("open_daemon")
                self.request.unserved = ""
                return source
            except NOT_SERVED as error:
                final = not (_is_away(error) or isinstance(error, ProtocolError))
                if final or time.monotonic() >= deadline:
                    if not optional:
                        raise
                    if self._first_time(error, key=f"lost {error.path or error}"):
                        log.warning(
                            "the daemon went away, so this process reads the files without it: %s",
                            error,
                        )
                    reason = error
                    break
            yield methodcaller("pause", pause)
            pause = min(2 * pause, 0.25)
        source = yield from self._without_daemon(reason)
        self.away_since = time.monotonic()
        return source

    def _instead_of_stopped(self, error: SilentError) -> SelectionSteps[SampleSource]:
        # Another connection would wait for the same process.
        if not self.request.optional:
            raise error.located()
        if self._first_time(error, key=f"stopped {error.path}"):
            log.warning(
                "the daemon does not respond, so this process reads the files without it: %s", error
            )
        source: SampleSource = yield methodcaller("open_local")
        self.away_since = time.monotonic()
        return source

    def _first_time(self, error: FFServeError, *, key: str = "") -> bool:
        """Note why the daemon does not serve; return whether to log it: once per process for a
        daemon that does not answer, whatever the files, and once for each other key."""
        self.request.unserved = str(error)
        key = key or f"{error.path or error}"
        new = key not in _logged
        _logged.add(key)
        return new


_logged: set[str] = set()


def _is_away(error: FFServeError) -> bool:
    """Whether another attempt may find a daemon that serves."""
    return isinstance(error, ServerUnavailable) and not isinstance(error, UnmappedError)


def closed_error() -> UsageError:
    """Return the error for the use of a closed reader."""
    return UsageError("this reader is closed")


def _is_none(error: FFServeError) -> bool:
    """Whether no process listens on the daemon's socket."""
    return isinstance(error, ServerUnavailable) and isinstance(error.__cause__, _NOT_RUNNING)


def _can_be_started(error: FFServeError) -> bool:
    """Whether an error of connecting means that no daemon listens."""
    stopped = isinstance(error.__cause__, TimeoutError)
    return _is_away(error) and not stopped


def source_over(
    connection: connections.Driver, opened: protocol.Opened, request: OpenRequest
) -> DaemonSource:
    """Return the source of a data set that was opened. Raises, and closes the data set:
    ProtocolError, UnmappedError."""
    request.served_by = connection.path
    try:
        source = DaemonSource(connection, opened, request.paths)
        source.replaceable, source.identities = request.optional, request.states
        return source
    except BaseException:
        connection.close_dataset(opened.dataset)
        raise


class SourceSelector:
    """Source selection with blocking calls, for threads. A copy in another process begins without
    a source.

    selection: has the present source.
    """

    def __init__(self, request: OpenRequest, announced: AnnouncedOrders) -> None:
        self.selection = SourceSelection(request, announced)
        self._request = request
        self._alone = threading.Lock()
        self._closing = threading.Event()
        self._looking: threading.Thread | None = None
        self._looked = 0.0

    @property
    def source(self) -> SampleSource | None:
        """The present source, if there is one."""
        return self.selection.source

    # ---- steps ----------------------------------------------------------------------------

    def _run(self, steps: SelectionSteps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    if self._request.closed:
                        raise closed_error()
                    done = step(self)
                except FFServeError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(done)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    def alone(self, steps: SelectionSteps[T]) -> T:
        """Take steps while no other thread takes such ones; this does not hold `close` up."""
        with self._alone:
            return self._run(steps)

    def open_local(self) -> LocalSource:
        """Open the files in this process."""
        return self._request.open_local()

    def start_daemon(self) -> None:
        """Have a daemon that listens on the socket."""
        start_daemon(self._request.socket)

    def announce(self, source: SampleSource, order: Order) -> None:
        """Announce an order to a source."""
        source.announce(*order)

    def pause(self, seconds: float) -> None:
        """Wait, until the reader is closed."""
        self._closing.wait(seconds)

    def open_daemon(self) -> SampleSource:
        """Open the files by the daemon."""
        request = self._request
        connection = connections.connect(request.socket)
        try:
            return source_over(connection, connection.open(request), request)
        except BaseException:
            connection.leave()
            raise

    # ---- the source -----------------------------------------------------------------------

    def open(self) -> None:
        """Have a source. Raises what opening the files does."""
        if not self._request.remote:
            self._run(self.selection.opening())
            return
        from ffserve.store.web import close_unused

        try:
            self._request.identify()
            self._run(self.selection.opening())
        finally:
            close_unused()

    def current(self) -> SampleSource:
        """Return the source, opening it in a process that has none yet."""
        source = self.selection.source
        if source is None or self.selection.due():
            source = self._run(self.selection.finding(source))
        return source

    def after(self, source: SampleSource, error: FFServeError) -> LocalSource | None:
        """Go on after a request has failed, as `SourceSelection.after`."""
        return self._run(self.selection.after(source, error))

    def beside(self, source: SampleSource) -> LocalSource | None:
        """Return a source for parts, as `SourceSelection.beside`."""
        return self._run(self.selection.beside(source))

    def look_for_daemon(self, instead_of: SampleSource | None) -> None:
        """Look for the daemon in a thread, and announce to it what was announced: a training loop
        does not wait. One search at a time, and not again at once."""
        now = time.monotonic()
        if now - self._looked < LOOK_INTERVAL_S or (self._looking and self._looking.is_alive()):
            return
        self._looked = now
        steps = self.selection.returning(instead_of)
        self._looking = threading.Thread(
            target=self._run, args=(steps,), name="ffserve-look", daemon=True
        )
        self._looking.start()

    def lead(self) -> None:
        """Leave an inherited job, so that what siblings announce does not replace what this
        process announces."""
        connections.lead_job()
        self._run(self.selection.leading(connections.job_name()))

    # ---- life -----------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back; idempotent. It does not wait: a thread that looks for a source
        finds the reader closed."""
        sources = self.selection.close()
        self._closing.set()
        for source in sources:
            source.close()

    def after_fork(self) -> None:
        """This process is a child: have another source at the next use."""
        self._alone = threading.Lock()
        self._closing = threading.Event()
        self._looking = None
        self.selection.after_fork()


class LoopSelector:
    """Source selection in one event loop; used in its thread.

    Args: state: of the loop.
    """

    def __init__(self, state: LoopState, request: OpenRequest, announced: AnnouncedOrders) -> None:
        self.state = state
        self.selection = SourceSelection(request, announced)
        self._request = request
        self._alone = asyncio.Lock()

    @property
    def source(self) -> SampleSource | None:
        """The present source, if there is one."""
        return self.selection.source

    # ---- steps ----------------------------------------------------------------------------

    async def _run(self, steps: SelectionSteps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    if self._request.closed:
                        raise closed_error()
                    done = await step(self)
                except FFServeError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(done)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    async def alone(self, steps: SelectionSteps[T]) -> T:
        """Take steps while no other task takes such ones."""
        async with self._alone:
            return await self._run(steps)

    async def start_daemon(self) -> None:
        """Have a daemon that listens on the socket."""
        await in_thread(partial(start_daemon, self._request.socket))

    async def announce(self, source: SampleSource, order: Order) -> None:
        """Announce an order to a source."""
        await announce(source, order)

    async def look_for_daemon(self, instead_of: SampleSource | None) -> None:
        """Look for the daemon, and return to it."""
        await self._run(self.selection.returning(instead_of))

    async def pause(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def open_daemon(self) -> SampleSource:
        """Open the files by the daemon."""
        request = self._request
        connection = await self.state.connect(request.socket)
        try:
            return source_over(connection, await connection.open(request), request)
        except BaseException:
            connection.leave()
            raise

    async def open_local(self) -> LocalSource:
        """Open the files in this process, for the engine of this loop."""
        await in_thread(probe)
        options: dict[str, Any] = {}
        if not self._request.remote:
            engines = self.state.engine().engines
            options = {"engines": lambda: engines, "most_at_once": LARGE_COPY_SIZE}
        opening = partial(self._request.open_local, **options)
        return await in_thread(opening, LocalSource.close)

    # ---- the source -----------------------------------------------------------------------

    async def open(self) -> None:
        """Have a source. Raises what opening the files does."""
        if self._request.remote:
            await in_thread(self._request.identify)
        await self._run(self.selection.opening())

    async def current(self) -> SampleSource:
        """Return the source, opening it in a loop that has none yet."""
        source = self.selection.source
        if source is None or self.selection.due():
            source = await self._run(self.selection.finding(source))
        return source

    async def after(self, source: SampleSource, error: FFServeError) -> LocalSource | None:
        """Go on after a request has failed, as `SourceSelection.after`."""
        return await self._run(self.selection.after(source, error))

    # ---- life -----------------------------------------------------------------------------

    def close(self) -> list[SampleSource]:
        """Have no sources any more; return them, to be closed in the thread of this loop."""
        return self.selection.close()

    def abandon(self) -> None:
        """The loop was closed, or is that of the parent process: close the source without it."""
        for source in (self.source, self.selection.spare):
            if source is not None:
                source.after_fork()
                source.close()


async def announce(source: SampleSource, order: Order) -> None:
    """Announce an order to a source that has a use for it."""
    if isinstance(source, DaemonSource):
        assert isinstance(source.connection, LoopConnection)
        numbers, epoch, name, replacement = order
        await source.connection.announce(source.dataset, epoch, numbers, name, replacement)
