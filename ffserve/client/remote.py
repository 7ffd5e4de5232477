"""Samples of remote files, read by this process from the local store (`ffserve/store/`).

A remote shard is a sparse file of the store. Before its samples are read, their blocks are pinned,
and fetched if they are missing; then all goes on as with local files. For a block that the store
has no room for, exactly the bytes that are needed come into a memory file of the request, at their
own offsets, and the engine reads them there.

A data set that is in the store as a whole, and takes no more than half of it, is pinned as a whole;
from then on its source is a `LocalSource` in every respect.

An announced order is also the order in which blocks are fetched ahead, and says which blocks the
store keeps: when each will be used next is written to the store for all processes to see.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.client.local import (
    ChunkedRequest,
    LocalRequest,
    LocalSource,
    Opening,
    OpenShard,
    PartlyRead,
    load_shard,
    process_engine,
)
from ffserve.client.source import Batch, Bytes, Indices, Int64s, Target
from ffserve.dataset import as_int64
from ffserve.engine.io import Engine
from ffserve.errors import FFServeError, FormatError, ReadError
from ffserve.files import raise_file_limit
from ffserve.shardfile import FileState
from ffserve.store.blocks import PRESENT, WHOLE
from ffserve.store.fetching import (
    NOW,
    Fetcher,
    OpenObject,
    Outcome,
    identity_of,
    process_fetcher,
)
from ffserve.store.opening import parsed
from ffserve.store.origin import Identity
from ffserve.store.planning import BlockOrder, Progress
from ffserve.store.urls import is_url

MANY = 64
"""Of more remote files the limit on open files is raised: each takes up to six descriptors."""
OPENED_AT_ONCE = 16
"""Remote objects that are looked up at the same time."""
CHECK_S = 0.25
"""How often a source looks whether all of it is in the store."""
PLAN_S, USES_S = 0.05, 2.0
"""How often blocks are asked for ahead, and next uses are written."""
AHEAD_SIZE = 256 << 20
"""Bytes that an order asks for ahead, or a quarter of the store if that is less."""
NEAR_HORIZON, HORIZON = 4096, 1 << 20
"""How many samples ahead of a job are looked at; if the data do not fit into the store."""
SOON_S = 60.0
"""How far the pace of a job may be behind what was expected of it."""
WORTH = 0.25
"""Part of a block that an order must use soon for the block to be worth its fetch, if the data do
not fit into the store. Else its samples are fetched singly."""
GAP = 64 << 10
"""Bytes between records that come past the store with them."""


@dataclass(slots=True)
class Extents:
    """What samples lie in, by position: shard, and [start, end) in its file."""

    shards: Int64s
    starts: Int64s
    ends: Int64s


@dataclass(slots=True, eq=False)
class RemoteRequest:
    """A request whose blocks may be on their way. pinned: blocks by shard. waiting: what of them is
    fetched. reads: what was made of it when all was there."""

    indices: Int64s
    apart: bool
    out: Bytes | None
    extents: Extents
    pinned: dict[int, Int64s] = field(default_factory=dict)
    waiting: dict[tuple[int, int], Future[Outcome]] = field(default_factory=dict)
    reads: LocalRequest | ChunkedRequest | None = None

    @property
    def target(self) -> Target:
        """Destination of the samples; there when the request is finished."""
        assert self.reads is not None
        return self.reads.target


class RemoteSource(LocalSource):
    """Shards of which some are remote.

    Args:
        paths: absolute paths, and URLs. identities: of the URLs, in order, if an earlier source of
            these paths has found them; then no origin is asked for them.

    Raises: as `LocalSource`; UsageError for a protocol that is not there.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        format: str | None,
        verify: bool,
        tolerant: bool = False,
        seen: Callable[[int], object] | None = None,
        *,
        share: float | None = None,
        identities: tuple[Identity, ...] = (),
    ) -> None:
        self._fetcher: Fetcher = process_fetcher()
        self._objects: list[OpenObject | None] = []
        self._opened: dict[str, OpenObject] = {}
        self._settled = self._forked = False
        self._complete_at, self._checked_at = -1, 0.0
        self._progress = Progress()
        self._planning = threading.Lock()
        self._planner: threading.Thread | None = None
        self._following: tuple[Int64s, int] | None = None
        self._worth: NDArray[np.bool_] | None = None
        """Of each block of the data set: whether the present order is worth its fetch."""
        self._upcoming = np.zeros(0, np.int64)
        self._looked_at = 0.0
        self._last_blocks: dict[int, int] = {}
        """Of each shard, the last block of the request before."""
        urls = [path for path in paths if is_url(path)]
        if len(urls) > MANY:
            raise_file_limit()
        self.identities = identities if len(identities) == len(urls) else identified(urls)
        try:
            self._own(self._open_objects(paths))
            super().__init__(paths, format, verify, tolerant, seen=seen, share=share)
        except BaseException:
            self._close_objects()
            raise
        self.description = f"store {self._fetcher.store.directory}, {self.description}"

    # ---- opening --------------------------------------------------------------------------

    def _own(self, objects: list[OpenObject | None]) -> None:
        """Have these objects, and close them with the source."""
        self._objects = objects
        # A local shard counts as one block.
        counts = [1 if o is None else max(o.stored.count, 1) for o in objects]
        ends = np.cumsum(counts)
        self._bases, self._block_count = ends - counts, int(ends[-1])
        self._closing = weakref.finalize(self, _close_all, self._fetcher, objects)
        self._closing.atexit = False

    def _open_objects(self, paths: tuple[str, ...]) -> list[OpenObject | None]:
        identities = iter(self.identities)
        found: list[OpenObject | None] = []
        try:
            for path in paths:
                found.append(self._fetcher.open(next(identities)) if is_url(path) else None)
                if (opened := found[-1]) is not None:
                    self._opened[path] = opened
                    if len(opened.stored.missing(np.arange(min(opened.stored.count, 1)))):
                        self._fetcher.ask(opened, [0], time.time(), None)
        except BaseException:
            for opened in found:
                if opened is not None:
                    self._fetcher.close(opened)
            raise
        return found

    def _open_shard(self, path: str, how: Opening) -> OpenShard:
        if not is_url(path):
            return super()._open_shard(path, how)
        opened = self._opened[path]
        shard = parsed(
            self._fetcher, opened, how.format, verify=how.verify, tolerant=how.tolerant,
            seen=how.seen,
        )  # fmt: skip
        fd = opened.stored.open_data()
        try:
            return load_shard(shard, opened.shown, fd, FileState(opened.stored.size, 0, 0))
        except BaseException:
            os.close(fd)
            raise

    # ---- what is there --------------------------------------------------------------------

    def _refresh(self) -> None:
        """In a child process: open the objects again, without asking their origins."""
        if not self._forked:
            return
        with self._attaching:
            if self._forked:
                self._fetcher = process_fetcher()
                former = self._objects
                self._own([None if o is None else self._fetcher.open(o.identity) for o in former])
                self._forked = False

    def _settle(self) -> bool:
        """Return whether this is a source of local files: all is in the store, and stays there."""
        if self._settled or self._forked:
            return self._settled
        now = time.monotonic()
        if now - self._checked_at < CHECK_S:
            return False
        self._checked_at = now
        store = self._fetcher.store
        remote = [opened.stored for opened in self._objects if opened is not None]
        before = store.evictions
        if not all(stored.complete for stored in remote):
            return False
        self._complete_at = before
        if 2 * sum(stored.size for stored in remote) > store.limit:
            return False
        for stored in remote:
            stored.pin(np.arange(stored.count))
        if not all(stored.complete for stored in remote):  # something went before it was pinned
            for stored in remote:
                stored.unpin(np.arange(stored.count))
            return False
        self._settled = True
        return True

    def _extents(self, indices: Int64s) -> Extents:
        shards, starts, _ = self._located(indices)
        ends = starts + self._held[indices].astype(np.int64)
        for k, shard in self._chunked.items():
            rows = np.flatnonzero(shards == k)
            if len(rows):
                chunks = shard.chunks.holding(indices[rows] - self.layout.firsts[k])
                starts[rows], ends[rows] = shard.chunks.begins[chunks], shard.chunks.ends[chunks]
        return Extents(shards, starts, ends)

    def _blocks(self, extents: Extents) -> Iterator[tuple[int, OpenObject, Int64s]]:
        """Yield the remote shards of samples, with their blocks, which rise."""
        for k in np.unique(extents.shards).tolist():
            opened = self._objects[k]
            if opened is None or not opened.stored.count:
                continue
            rows = extents.shards == k
            size = opened.stored.block_size
            firsts = extents.starts[rows] // size
            lasts = np.maximum(extents.ends[rows] - 1, extents.starts[rows]) // size
            blocks = np.unique(np.concatenate((firsts, lasts)))
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                if last - first > 1:
                    blocks = np.union1d(blocks, np.arange(first, last))
            yield k, opened, blocks[blocks < opened.stored.count]

    def _there(self, indices: NDArray[Any], evictions: int) -> bool:
        """Whether samples are in the store, if nothing was evicted since `evictions` was read."""
        if self._complete_at == evictions:
            return True
        if not isinstance(indices, np.ndarray) or indices.dtype != np.int64 or indices.ndim != 1:
            return False
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.count:
            return False
        return all(
            (opened.stored.state.words[blocks] == PRESENT).all()
            for _, opened, blocks in self._blocks(self._extents(indices))
        )

    # ---- reading --------------------------------------------------------------------------

    def cached_batch(self, indices: NDArray[Any], out: Bytes | None) -> Batch | PartlyRead | None:
        """Copy a batch of which all is in the page cache."""
        if self._settle():
            return super().cached_batch(indices, out)
        if self._forked:
            return None
        evictions = self._fetcher.store.evictions
        if not self._there(indices, evictions):
            return None
        found = super().cached_batch(indices, out)
        return found if self._fetcher.store.evictions == evictions else None

    def cached_arrays(self, indices: Indices) -> list[Bytes] | PartlyRead | None:
        """Copy samples that are all in the page cache, each to an array."""
        if self._settle():
            return super().cached_arrays(indices)
        if self._forked:
            return None
        evictions = self._fetcher.store.evictions
        numbers = as_int64(indices, self.count)
        if not self._there(numbers, evictions):
            return None
        found = super().cached_arrays(numbers)
        return found if self._fetcher.store.evictions == evictions else None

    def start(  # type: ignore[override]
        self,
        indices: Int64s,
        *,
        apart: bool,
        out: Bytes | None = None,
        found: PartlyRead | None = None,
    ) -> RemoteRequest | LocalRequest | ChunkedRequest:
        """Pin blocks, and ask for those that are missing; submit the reads if there are none."""
        self._refresh()
        if self._settle():
            return super().start(indices, apart=apart, out=out, found=found)
        indices = np.ascontiguousarray(indices)
        request = RemoteRequest(indices, apart, out, self._extents(indices))
        try:
            self._hold(request)
            if not request.waiting:
                request.reads = super().start(indices, apart=apart, out=out, found=found)
        except BaseException:
            self._let_go(request)
            raise
        self._note(indices)
        return request

    def _hold(self, request: RemoteRequest) -> None:
        worth = self._worth
        for k, opened, blocks in self._blocks(request.extents):
            opened.stored.pin(blocks)
            request.pinned[k] = blocks
            now, uses = time.time(), opened.stored.state.uses
            for block in opened.stored.missing(blocks).tolist():
                if worth is None:  # of a process that announces nothing: a worker
                    wanted = bool(uses[block] & WHOLE) and int(uses[block]) + SOON_S > now
                else:
                    wanted = bool(worth[self._bases[k] + block])
                use = now if wanted else None
                asked = self._fetcher.ask(opened, [block], NOW, use)
                request.waiting[k, block] = asked[block]
            if len(blocks) and not self._progress.orders:
                last = self._last_blocks.get(k, -2)
                if blocks[0] - 1 <= last <= blocks[0] and last < blocks[-1]:  # read in order
                    self._fetcher.ask_ahead(opened, int(blocks[-1]) + 1)
                self._last_blocks[k] = int(blocks[-1])

    @property
    def fetcher(self) -> Fetcher:
        """Of the store."""
        return self._fetcher

    def object_of(self, shard: int) -> OpenObject:
        """Return the object of a remote shard."""
        opened = self._objects[shard]
        assert opened is not None
        return opened

    def _let_go(self, request: RemoteRequest) -> None:
        pinned, request.pinned = request.pinned, {}
        for k, blocks in pinned.items():
            self.object_of(k).stored.unpin(blocks)

    def finish(self, request: Any) -> dict[int, FFServeError]:
        """Wait for the blocks and the reads."""
        if not isinstance(request, RemoteRequest):
            return super().finish(request)
        try:
            errors = self._finish_once(request)
            if errors and self._repaired(request, errors):
                request.reads = None
                self._hold(request)
                errors = self._finish_once(request)
            return errors
        finally:
            self._let_go(request)

    def read(
        self, indices: Int64s, apart: bool, out: Bytes | None
    ) -> tuple[Target, dict[int, FFServeError]]:
        """Start and finish a request, in a thread that may wait."""
        request = self.start(indices, apart=apart, out=out)
        errors = self.finish(request)
        return request.target, errors

    def _finish_once(self, request: RemoteRequest) -> dict[int, FFServeError]:
        if request.reads is not None:
            return super().finish(request.reads)
        with Passing(self, request) as passing:
            found = None
            if passing.any and not self._chunked:
                # What is in the page cache may be of holes: all is left to the engine.
                edges = self._edges(request.indices)
                target = Target(edges, apart=request.apart, out=request.out)
                found = PartlyRead(target, np.arange(len(request.indices)))
            request.reads = super().start(
                request.indices,
                apart=request.apart,
                out=request.out,
                found=found,
                instead=passing.numbers if passing.any else None,
            )
            errors = super().finish(request.reads)
        errors.update(passing.failed)
        return errors

    def _repaired(self, request: RemoteRequest, errors: dict[int, FFServeError]) -> bool:
        """Whether samples failed because blocks on disk are not what was fetched; drop those."""
        rows = np.array([k for k, error in errors.items() if isinstance(error, FormatError)], int)
        if not len(rows):
            return False
        extents = request.extents
        bad = Extents(extents.shards[rows], extents.starts[rows], extents.ends[rows])
        found = [self._fetcher.repair(opened, blocks) for _, opened, blocks in self._blocks(bad)]
        self._let_go(request)
        return any(found)

    def _explained(
        self, error: FFServeError, index: int, record: tuple[int, int, int]
    ) -> FFServeError:
        shard = int(self.layout.shards(np.array([index], np.int64))[0])
        if self._objects[shard] is None:
            return super()._explained(error, index, record)
        return error  # the store's file changes with each block

    # ---- orders ---------------------------------------------------------------------------

    def announce(self, order: Int64s, epoch: int, name: str | None, replacement: bool) -> None:
        """Fetch blocks in this order; those of a later epoch when that begins."""
        self._refresh()
        if self._settle():
            super().announce(order, epoch, name, replacement)
            return
        self._following = None
        self._plan(epoch, order)

    def reached(self, epoch: int, position: int) -> bool:
        """Follow the announced order of this epoch from this position on."""
        if self._settled:
            super().reached(epoch, position)
        with self._planning:
            self._progress.reached(epoch, position, time.monotonic())
        return True

    def follow(self, order: Int64s) -> None:
        """Fetch blocks in this order, which is read in one go."""
        self._refresh()
        if self._settle():
            super().follow(order)
        elif len(order) and not self._progress.orders:
            self._following = order, 0
            self._plan(0, order)

    def _note(self, indices: Int64s) -> None:
        """Samples were asked for; of a followed order that is the position."""
        following = self._following
        if following is None:
            return
        order, position = following
        end = position + len(indices)
        if np.array_equal(order[position:end], indices):
            self._following = order, end
            with self._planning:
                self._progress.reached(0, end, time.monotonic())
            if end >= len(order):
                self._following = None
                self._worth = None
                with self._planning:
                    self._progress.orders.clear()

    def _plan(self, epoch: int, order: Int64s) -> None:
        extents = self._extents(np.ascontiguousarray(order))
        bases, count = self._bases, self._block_count
        size = self._fetcher.store.block_size
        at = bases[extents.shards]
        firsts = at + extents.starts // size
        lasts = at + np.maximum(extents.ends - 1, extents.starts) // size
        limit = np.append(bases[1:], count)[extents.shards] - 1
        plan = BlockOrder(np.minimum(firsts, limit), np.minimum(lasts, limit), count)
        with self._planning:
            self._progress.announce(epoch, plan)
            if self._planner is None:
                self._planner = threading.Thread(
                    target=_keep_planning, args=(weakref.ref(self),), name="ffserve-plan",
                    daemon=True,
                )  # fmt: skip
                self._planner.start()

    def _look_ahead(self) -> Int64s:
        """Return the blocks to fetch, soonest needed first; note which are worth it."""
        store = self._fetcher.store
        size = sum(o.stored.size for o in self._objects if o is not None)
        horizon, least = NEAR_HORIZON, 1
        if size > store.limit:
            mean = max(int(self._sizes.sum()) // max(self.count, 1), 1)
            horizon = min(int(store.limit) // 2 // mean + 1, HORIZON)
            least = -(-int(WORTH * store.block_size) // mean)
        with self._planning:
            found = self._progress.upcoming(horizon, least)
        worth = np.zeros(self._block_count, np.bool_)
        worth[found] = True
        self._worth = worth
        return found

    def fetch_ahead(self, refused: set[int]) -> None:
        """Ask for the next blocks of the orders. refused: those that there was no room for."""
        store, begun = self._fetcher.store, time.monotonic()
        if begun >= self._looked_at:
            self._upcoming = self._look_ahead()
            # A tenth of a processor at most.
            self._looked_at = begun + 10 * (time.monotonic() - begun)
        now, rate = time.time(), self._progress.rate
        most = int(min(store.limit / 4, AHEAD_SIZE)) // store.block_size
        for position, block in enumerate(self._upcoming[:most].tolist()):
            shard = int(np.searchsorted(self._bases, block, side="right")) - 1
            opened, own = self._objects[shard], block - int(self._bases[shard])
            if opened is None or block in refused or own >= opened.stored.count:
                continue
            if opened.stored.state.words[own] == PRESENT or self._fetcher.is_asked(opened, own):
                continue
            due = now + position / rate
            opened.stored.state.uses[own] = (int(due) + 1) | WHOLE
            future = self._fetcher.ask(opened, [own], due, due)[own]
            future.add_done_callback(_Refusals(refused, block))

    def write_uses(self) -> None:
        """Tell the store when each block will be used next."""
        with self._planning:
            seconds = self._progress.next_uses(self._block_count)
        now, worth = time.time(), self._worth
        for base, opened in zip(self._bases.tolist(), self._objects, strict=True):
            if opened is None or not opened.stored.count:
                continue
            mine = now + seconds[base : base + opened.stored.count]
            known = np.isfinite(mine)
            uses = opened.stored.state.uses
            before = uses.astype(np.float64)
            # Another job's use stays if it is sooner and not over.
            best = np.where((before > now) & (before < mine), before, mine)
            written = np.clip(best, 0, (1 << 32) - 1).astype(np.uint32) & ~np.uint32(WHOLE)
            if worth is not None:
                written |= worth[base : base + len(written)] * np.uint32(WHOLE)
            uses[known] = written[known]

    # ---- the end --------------------------------------------------------------------------

    def after_fork(self) -> None:
        """The store's files and threads are the parent's."""
        super().after_fork()
        self._closing.detach()
        self._forked, self._settled = True, False
        self._complete_at = -1
        self._progress, self._planning = Progress(), threading.Lock()
        self._planner = self._following = self._worth = None

    def _release(self) -> None:
        super()._release()
        self._close_objects()

    def _close_objects(self) -> None:
        if not self._forked and self._objects:
            self._closing()

    @property
    def planning(self) -> bool:
        """Whether there are orders to follow, and the source is open."""
        return not self._closed and not self._forked and not self._settled


def _close_all(fetcher: Fetcher, objects: list[OpenObject | None]) -> None:
    for opened in objects:
        if opened is not None:
            fetcher.close(opened)


def identified(urls: list[str]) -> tuple[Identity, ...]:
    """Ask the origins for the present versions, several at once."""
    if len(urls) < 2:
        return tuple(map(identity_of, urls))
    with ThreadPoolExecutor(min(len(urls), OPENED_AT_ONCE)) as pool:
        return tuple(pool.map(identity_of, urls))


class _Refusals:
    """Notes that there was no room for a block."""

    def __init__(self, refused: set[int], block: int) -> None:
        self._refused, self._block = refused, block

    def __call__(self, future: Future[Outcome]) -> None:
        if future.exception() is not None or future.result() is not True:
            self._refused.add(self._block)


def _keep_planning(source_of: weakref.ref[RemoteSource]) -> None:
    """Fetch ahead as long as the source is there: the thread of its orders."""
    refused: set[int] = set()
    next_uses = 0.0
    while (source := source_of()) is not None and source.planning:
        begun = time.monotonic()
        try:
            if begun >= next_uses:
                source.write_uses()
                refused.clear()
                # A tenth of a processor at most.
                next_uses = begun + max(USES_S, 10 * (time.monotonic() - begun))
            source.fetch_ahead(refused)
        except (FFServeError, OSError):  # closed meanwhile, or a disk that fails: readers say so
            return
        del source
        time.sleep(PLAN_S)


class Passing:
    """What a request reads past the store: bytes that the store has no room for.

    They come into a memory file for each shard, at their own offsets. Entering waits for all
    blocks of the request.

    failed: errors of samples whose bytes could not be fetched, by position.
    """

    def __init__(self, source: RemoteSource, request: RemoteRequest) -> None:
        self.failed: dict[int, FFServeError] = {}
        self._source, self._request = source, request
        self._engine: Engine = process_engine()
        self._files: dict[int, tuple[int, int, Int64s]] = {}
        """By shard: descriptor, engine's number, and the offsets of the records in it."""

    @property
    def any(self) -> bool:
        """Whether anything does not come from the store's files."""
        return bool(self._files or self.failed)

    def __enter__(self) -> Passing:
        missing: dict[int, dict[int, Bytes | FFServeError | None]] = {}
        waiting, self._request.waiting = self._request.waiting, {}
        for (shard, block), future in waiting.items():
            try:
                outcome = self._source.fetcher.wait(self._source.object_of(shard), block, future)
            except FFServeError as error:
                missing.setdefault(shard, {})[block] = error
                continue
            if outcome is not True:
                content = np.frombuffer(outcome, np.uint8) if outcome else None
                missing.setdefault(shard, {})[block] = content
        try:
            for shard, blocks in missing.items():
                self._pass(shard, blocks)
        except BaseException:
            self._close()
            raise
        return self

    def _pass(self, shard: int, blocks: dict[int, Bytes | FFServeError | None]) -> None:
        extents, opened = self._request.extents, self._source.object_of(shard)
        size = opened.stored.block_size
        rows = np.flatnonzero(extents.shards == shard)
        firsts, ends = extents.starts[rows], extents.ends[rows]
        concerned = np.zeros(len(rows), np.bool_)
        wanted = np.zeros(len(rows), np.bool_)
        for block, content in blocks.items():
            touching = (firsts < (block + 1) * size) & (ends > block * size)
            if isinstance(content, FFServeError):
                for row in rows[touching].tolist():
                    index = int(self._request.indices[row])
                    self.failed[row] = content.located(index=index)
            concerned |= touching
            inside = (firsts >= block * size) & (ends <= (block + 1) * size)
            wanted |= touching & ~(inside & isinstance(content, np.ndarray))
        bad = np.isin(rows, list(self.failed))
        fd = os.memfd_create("ffserve-passing", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, opened.stored.size)
            for block, content in blocks.items():
                if isinstance(content, np.ndarray):
                    _write(fd, content.data, block * size)
            chosen = wanted & ~bad
            self._download(opened, fd, rows[chosen], firsts[chosen], ends[chosen])
            number = self._engine.add_file(fd, 1)
        except BaseException:
            os.close(fd)
            raise
        self._files[shard] = fd, number, np.unique(firsts[concerned])

    def _download(
        self, opened: OpenObject, fd: int, rows: Int64s, starts: Int64s, ends: Int64s
    ) -> None:
        """Fetch extents into a file, neighbours together."""
        order = np.argsort(starts, kind="stable")
        rows, starts, ends = rows[order], starts[order], ends[order]
        asked: list[tuple[int, list[int], Future[Outcome]]] = []
        at = 0
        while at < len(rows):
            begin, end, last = int(starts[at]), int(ends[at]), at + 1
            while (
                last < len(rows)
                and int(starts[last]) <= end + GAP
                and int(ends[last]) - begin <= opened.stored.block_size
            ):
                end, last = max(end, int(ends[last])), last + 1
            future = self._source.fetcher.ask_bytes(opened, begin, end)
            asked.append((begin, rows[at:last].tolist(), future))
            at = last
        for begin, concerned, future in asked:
            try:
                content = future.result()
                assert isinstance(content, bytes)
                _write(fd, memoryview(content), begin)
            except FFServeError as error:
                for row in concerned:
                    self.failed[row] = error.located(index=int(self._request.indices[row]))

    def numbers(
        self, shards: Int64s, starts: Int64s, numbers: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Return the engine's numbers of files to read records from: the usual ones, or others."""
        chosen = numbers.copy()
        for shard, (_, number, offsets) in self._files.items():
            chosen[(shards == shard) & np.isin(starts, offsets)] = number
        return chosen

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # else reads may be in flight
            self._close()

    def _close(self) -> None:
        files, self._files = self._files, {}
        for fd, number, _ in files.values():
            self._engine.remove_file(number)
            os.close(fd)


def _write(fd: int, content: memoryview, offset: int) -> None:
    """Raises: ReadError when there is no memory."""
    try:
        while content:
            done = os.pwrite(fd, content, offset)
            content, offset = content[done:], offset + done
    except OSError as error:
        raise ReadError(f"no memory for bytes that pass the store: {error}") from error
