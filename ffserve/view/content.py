"""The bytes of samples, for a view: it reads whole samples and returns parts of them.

A sample can only be checked as a whole, so it is read as a whole, and kept while programs read it
part by part. Samples that a program reads one behind the other (tar, cp, find) are read ahead
together, if they are not in memory already.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from ffserve import Batch
from ffserve.client.public import DaemonSource
from ffserve.dtypes import Bytes
from ffserve.engine.fuse import Requests
from ffserve.errors import FFServeError
from ffserve.reader import Reader

KEPT_SIZE = 32 << 20
"""A process keeps this many bytes of samples besides the sample in use."""
AHEAD_SIZE, AHEAD_COUNT = 2 << 20, 256
"""At most this many bytes, and this many samples, are read ahead."""
NEAR = 64
"""A sample this close behind the last one counts as the next one, since several processes answer by
turns."""


class SampleReader:
    """Parts of samples. Threads may use it.

    Args: wait: called before the thread may wait for a disk or for another thread.
    """

    def __init__(self, reader: Reader, wait: Callable[[], object]) -> None:
        self._reader = reader
        self._wait = wait
        self._locks: dict[int, threading.Lock] = {}
        """Of the samples that are being read: one that several threads want is read once."""
        self._keeping = threading.Lock()
        self._kept: OrderedDict[int, Bytes] = OrderedDict()
        self._kept_size = 0
        self._ahead = range(0)
        """The samples that were read last because they were not in memory."""
        self._source: DaemonSource | None = None
        """Where samples came from lately, if that is the daemon's memory."""
        self._ends = [shard.first + shard.count for shard in reader.shards]
        """For each file the index behind its last sample; nothing is read ahead beyond."""

    def next(self, requests: Requests) -> int:
        """Wait for a request that cannot be answered from the daemon's memory, as `Requests.next`;
        until samples were read from there, none can."""
        source = self._source
        if source is None or source.look_due:
            return requests.next(None)
        size = requests.next(source.view)  # `source` keeps the memory mapped meanwhile
        samples, total = requests.take_hits()
        if len(samples):
            source.statistics.add_hits(samples, total)
        return size

    def sizes(self, samples: list[int]) -> list[int]:
        """Return lengths in bytes that have to be read first; -1 where one cannot be found out."""
        self._wait()
        try:
            sizes: list[int] = self._reader.sizes(samples).tolist()
        except FFServeError:
            if len(samples) == 1:
                return [-1]
            return [size for sample in samples for size in self.sizes([sample])]
        return sizes

    def size(self, sample: int) -> int:
        """Return the length in bytes of a sample, which is read if it is 0.

        Raises: as `Reader.read`.
        """
        self._wait()
        size = int(self._reader.sizes([sample])[0])
        if size == 0:
            self._reader.read([sample])
        return size

    def part(self, sample: int, offset: int, size: int) -> memoryview:
        """Return a part of a sample, less at its end. Raises: as `Reader.read`."""
        found = self._kept.get(sample)
        if found is None:
            lock = self._locks.setdefault(sample, threading.Lock())
            if not lock.acquire(blocking=False):
                self._wait()
                lock.acquire()
            try:
                found = self._kept.get(sample)
                if found is None:
                    found = self._whole(sample, offset + size)
            finally:
                self._locks.pop(sample, None)
                lock.release()
        return found[offset : offset + size].data

    def _whole(self, sample: int, end: int) -> Bytes:
        source = self._reader.current_source()
        self._source = source if isinstance(source, DaemonSource) else None
        cached = source.cached_batch(np.array([sample], np.int64), None)
        if isinstance(cached, Batch):
            if cached.buffer.nbytes > end:  # there is more to come
                self._keep(sample, cached.buffer)
            return cached.buffer
        self._wait()
        samples = self._next(sample)
        self._ahead = samples
        found = self._reader.read(samples, errors="return")
        for other, each in zip(samples, found, strict=True):
            if not isinstance(each, FFServeError):
                self._keep(other, each)
        if isinstance(found[0], FFServeError):
            raise found[0]
        return found[0]

    def _next(self, sample: int) -> range:
        """Return the samples to read with this one."""
        last = self._ahead
        if not last or not last.start < sample < last.stop + NEAR:
            return range(sample, sample + 1)
        end = self._ends[int(np.searchsorted(self._ends, sample, side="right"))]
        count = min(2 * len(last), AHEAD_COUNT, end - sample)
        sizes = np.cumsum(self._reader.estimates(range(sample, sample + count)))
        count = max(1, int(np.searchsorted(sizes, AHEAD_SIZE, side="right")))
        return range(sample, sample + count)

    def _keep(self, sample: int, content: Bytes) -> None:
        with self._keeping:
            if sample in self._kept:
                return
            self._kept[sample] = content
            self._kept_size += content.nbytes
            while self._kept_size > KEPT_SIZE and len(self._kept) > 1:
                _, old = self._kept.popitem(last=False)
                self._kept_size -= old.nbytes
