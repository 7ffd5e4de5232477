"""Samples of remote files, read by this process by ranges of their objects, which are not kept.

A `RangedSource` is a `LocalSource` with an engine that fetches ranges (`ffserve/reads/fetched.py`).
All reads of a shard are of the version that was opened; an object that has changed is an error.
An order that is announced changes nothing: prefetched samples need memory or a disk, which only a
daemon has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from ffserve import formats
from ffserve.client.local.local_chunks import ChunkCache, Second
from ffserve.client.local.local_engines import process_engines
from ffserve.client.local.local_source import (
    MAX_CHUNK_SIZE,
    LocalRequest,
    LocalSource,
)
from ffserve.client.source import Target
from ffserve.dtypes import Bytes, Int64s
from ffserve.errors import FormatError
from ffserve.formats.base import Heads
from ffserve.formats.ffrecord import FFRecordShard
from ffserve.limits import OPENED_AT_ONCE
from ffserve.reads import chunks
from ffserve.reads.fetched import FetchedFile, FetchingEngine
from ffserve.reads.records import BatchEngine
from ffserve.reads.shard_tables import SMALL_SIZE, How, OpenFiles, Tables, read_together
from ffserve.store.fetching import NOW, Threads, identity_of, send_identity
from ffserve.store.object_tables import parsed
from ffserve.store.origin import ObjectVersion
from ffserve.store.ranges import RangedObject, at_once, pipelined
from ffserve.store.urls import is_url
from ffserve.store.web import close_unused


class RangedSource(LocalSource):
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
        identities: tuple[ObjectVersion, ...] = (),
    ) -> None:
        urls = [path for path in paths if is_url(path)]
        self.identities = identities if len(identities) == len(urls) else identified(urls)
        systems: dict[str, Any] = {}
        objects = [RangedObject(identity, systems=systems) for identity in self.identities]
        how = How(format, verify, tolerant, MAX_CHUNK_SIZE)
        parsed: list[Tables] = []
        heads = pipelined(RangedObject.head, RangedObject.send_head, objects, urls)
        for k, _ in enumerate(heads, 1):
            if k % OPENED_AT_ONCE == 0 or k == len(objects):
                parsed += _parsed(objects[len(parsed) : k], how, seen)
        self._parsed = dict(zip(urls, parsed, strict=True))
        by_url = dict(zip(urls, objects, strict=True))
        self.objects = [by_url.get(path) for path in paths]
        """By shard; None: it is local."""
        self._remote = frozenset(k for k, path in enumerate(paths) if is_url(path))
        self._empty = os.memfd_create("ffserve-remote", os.MFD_CLOEXEC)
        try:
            super().__init__(paths, format, verify, tolerant, seen=seen, share=share)
        finally:
            os.close(self._empty)
        self._parsed.clear()
        close_unused()
        self._plain = False  # nothing is known of what is in memory
        self.description = "ranged reads"

    def _open_file(self, path: str) -> int:
        if not is_url(path):
            return super()._open_file(path)
        return os.dup(self._empty)  # no kernel reads it

    def _read_tables(
        self, fds: list[int], paths: list[str], sizes: Int64s, how: How
    ) -> list[Tables]:
        local = [k for k, path in enumerate(paths) if not is_url(path)]
        own_fds, own_paths = [fds[k] for k in local], [paths[k] for k in local]
        found = iter(super()._read_tables(own_fds, own_paths, sizes[local], how))
        return [self._parsed[path] if is_url(path) else next(found) for path in paths]

    def _new_engine(self) -> FetchingEngine:
        fetches = {
            self._files.fd(shard): FetchedFile(
                opened.ask_all,
                partial(opened.ask_all, direct=True),
                partial(self._faults.read_wrong, shard),
            )
            for shard, opened in enumerate(self.objects)
            if opened is not None
        }
        never_read = dict.fromkeys(fetches)
        return FetchingEngine(process_engines().over(self._files.devices() | never_read), fetches)

    def follow(self, order: Int64s) -> None:
        """Do nothing: a window would be fetched for one read, and not kept."""

    def _attach_decoding(self, engine: BatchEngine) -> None:
        self._decoding, self._decoding_numbers = engine, self._numbers

    def _new_chunk_cache(self) -> ChunkCache:
        # An origin may hang: its chunks are waited for by threads that hold up nobody else, nor the
        # end of the process.
        threads = Threads("ffserve-decode", chunks.THREADS)

        def in_thread(_: BatchEngine, call: Callable[[], None]) -> None:
            threads.put(NOW, call, Future())

        return ChunkCache(
            self._samples.chunked, self._samples.learned, self._faults.read_wrong, in_thread
        )

    def _to_target(
        self, indices: Int64s, edges: Int64s, apart: bool, out: Bytes | None
    ) -> LocalRequest:
        target = Target(edges, apart=apart, out=out)
        return LocalRequest(indices, target, np.arange(len(indices)))

    def _second_reads(self, shard: int) -> Second:
        opened = self.objects[shard]
        return super()._second_reads(shard) if opened is None else opened.ask_again

    def after_fork(self) -> None:
        """Connections to origins are the parent's as well."""
        super().after_fork()
        for opened in self.objects:
            if opened is not None:
                opened.after_fork()


def _parsed(
    some: Sequence[RangedObject], how: How, seen: Callable[[int], object] | None
) -> list[Tables]:
    """Return the tables of objects: of small ones together, as of other files."""
    content, got = np.zeros((len(some), SMALL_SIZE), np.uint8), np.zeros(len(some), np.int64)
    for k, opened in enumerate(some):
        head = opened.head()[:SMALL_SIZE]
        content[k, : len(head)], got[k] = np.frombuffer(head, np.uint8), len(head)
    heads = Heads(content, got, np.array([opened.size for opened in some], np.int64))
    files = OpenFiles.with_heads(heads, [opened.shown for opened in some], how.format)
    together = read_together(files, range(len(some)), how)
    left = [k for k in range(len(some)) if k not in together or together[k].scanned is not None]
    urls = [some[k].identity.url for k in left]
    singly = at_once(lambda k: _singly(some[k], how, seen), left, urls)
    together.update(zip(left, singly, strict=True))
    for k, opened in enumerate(some):
        if (small := together[k].small) is not None:
            low, count = together[k].at, together[k].count
            opened.spare(int(small.offsets[low + count - 1]) if count else 0)
    return [together[k] for k in range(len(some))]


def _singly(opened: RangedObject, how: How, seen: Callable[[int], object] | None) -> Tables:
    def read(direct: bool) -> formats.Shard:
        return parsed(
            opened.read_at(direct=direct), opened.size, opened.shown, how.format,
            verify=how.verify, tolerant=how.tolerant, seen=seen,
        )  # fmt: skip

    try:
        shard = read(False)
    except FormatError:
        # Tables may have been damaged on their way: all of their bytes are asked of the origin.
        shard = read(True)
    # The tables of all shards are entered together, when all are here.
    opened.spare(shard.last_offset if isinstance(shard, FFRecordShard) else 0)
    return Tables.of(shard, how.max_chunk_size)


def identified(urls: Sequence[str]) -> tuple[ObjectVersion, ...]:
    """Ask the origins for the present versions, several at once."""
    return tuple(pipelined(identity_of, send_identity, urls, urls))
