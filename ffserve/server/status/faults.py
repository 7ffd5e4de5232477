"""Faults: counts and logs refused clients, damaged samples and slow reads, for `ffserve status`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from ffserve.cache.tables import ShardTable
from ffserve.dtypes import Int64s
from ffserve.errors import ArenaError, FFServeError, FormatError
from ffserve.limits import MOST_SLOW_FILES
from ffserve.server.files.shards import OpenShard
from ffserve.server.life.log import RepeatedLines
from ffserve.server.reading.statistics import Statistics


@dataclass(slots=True)
class SlowReads:
    """The slow reads of one file: how many, the seconds that the longest took, when the last one
    ended."""

    count: int = 0
    longest_s: float = 0.0
    last: float = 0.0


class Faults:
    """See the module's text."""

    def __init__(self, statistics: Statistics, table: ShardTable) -> None:
        self._statistics = statistics
        self._table = table
        self.lines = RepeatedLines()
        self.slow_reads: OrderedDict[int, SlowReads] = OrderedDict()
        """The slow reads of each file, by the number of its first sample; the latest last."""

    def refused(self, uid: int, error: FFServeError, now: float) -> None:
        """Note that a client was refused."""
        self._statistics.refused += 1
        self.lines.warning("refused a client of user %d: %s", uid, error, user=uid, now=now)

    def failed(
        self, shard: OpenShard, number: int, error: FFServeError, now: float, uid: int = -1
    ) -> None:
        """Note that a sample is damaged, or cannot be read.

        Args: uid: the user who asked for it, -1: nobody.
        """
        self._statistics.errors[error.code] += 1
        lines = self.lines
        if isinstance(error, ArenaError):
            lines.warning("no memory for a sample: %s", error, user=uid, key=error.code, now=now)
        elif isinstance(error, FormatError):
            shard.note_damaged(number)
            lines.error("damaged sample: %s", error, user=uid, key=shard.path, now=now)
        else:
            lines.error("cannot read a sample: %s", error, user=uid, key=shard.path, now=now)

    def slow_disk(self, device: str, seconds: float, now: float) -> None:
        """Log that a read from a device takes this many seconds."""
        self.lines.warning(
            "slow disk: a read from %s takes %.1f s",
            device,
            seconds,
            key=device,
            now=now,
        )

    def corrected(self, count: int, devices: list[str], now: float) -> None:
        """Note that this many samples of these devices were right at the second read only."""
        self._statistics.corrected += count
        for device in devices:
            self.lines.warning(
                "%s gave wrong bytes, which were right when they were read again: check the disk, "
                "its cable and the memory",
                device,
                key=device,
                now=now,
            )

    def slow_read(self, numbers: Int64s, seconds: float, now: float) -> None:
        """Note that a read of these samples took this many seconds."""
        table = self._table
        for base in np.unique(table.bases[table.rows(numbers)]).tolist():
            slow = self.slow_reads.setdefault(base, SlowReads())
            slow.count += 1
            slow.longest_s, slow.last = max(slow.longest_s, seconds), now
            self.slow_reads.move_to_end(base)
        while len(self.slow_reads) > MOST_SLOW_FILES:
            self.slow_reads.popitem(last=False)

    def forget(self, base: int) -> None:
        """Forget the shard with this first sample, which was closed."""
        self.slow_reads.pop(base, None)
