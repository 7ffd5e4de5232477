"""Waiting: why the sessions of a job wait, as parts of their time.

At each moment a session waits, while a GET or LEASE of it is not answered, or it is the trainer's
own. With several requests under way the moment is divided among them equally: the part of those
that wait for memory is `memory`, that of those that wait for blocks of remote files `origin`, and
that of those that wait for their first turn `queue`, as far as the reads in flight were of other
jobs when they began to wait. The other waiting is divided by what the job's reads were like:

* `origin`, too: the part of the time of its loads in which they waited for such blocks.
* `taken`: of the rest, the part of its bytes read that it would not have read with all memory to
  itself (`JobTime.alone_size`).
* `decode`: of the rest, the part of the time of its loads in which chunks were decoded.
* `queue`, too: of that rest, the part of the reads in flight that were of other jobs when its own
  began: a device divides its time among them.
* `disk`: what is left.

So the parts of a job are the time of its sessions. A session that has neither asked for a sample
nor reported a hit for ABSENT_S does not count while others of its job have: a training process
whose workers read. A request costs two additions; the parts are computed every few seconds.

No clock: `now` is monotonic time in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

CAUSES = ("disk", "queue", "taken", "decode", "memory", "origin", "trainer")
RECENT_S = 60.0
"""The recent parts are parts of the last RECENT_S."""
ABSENT_S = 60.0
_NO_TIME = (0.0, 0.0, 0.0, 0.0, 0.0)


class JobReads:
    """The reads for one job, its prefetching included. A read for several jobs counts for the job
    that began it.

    size: their bytes. count: the reads. others: the sum of the parts of the reads in flight that
    were of other jobs. loads_s, decode_s, origin_s: the time of its loads; the parts in which they
    were decoded, and waited for blocks of remote files.
    """

    __slots__ = ("count", "decode_s", "in_flight", "loads_s", "origin_s", "others", "size")

    def __init__(self) -> None:
        self.size = self.count = self.in_flight = 0
        self.others = self.loads_s = self.decode_s = self.origin_s = 0.0

    def begin(self, reads: int, all_reads: int) -> None:
        """Reads begin; `all_reads` are in flight then, these included."""
        self.count += reads
        self.in_flight += reads
        if all_reads > self.in_flight:
            self.others += reads * (all_reads - self.in_flight) / all_reads

    def end(
        self, reads: int, seconds: float, read_s: float, decode_s: float, origin_s: float = 0.0
    ) -> None:
        """A load has ended after some time; its batches were read and decoded for so long, and
        before that it waited for its blocks."""
        self.in_flight -= reads
        self.loads_s += seconds
        origin_s = min(origin_s, seconds)
        self.origin_s += origin_s
        if decode_s:
            self.decode_s += (seconds - origin_s) * decode_s / (decode_s + read_s)


@dataclass(slots=True)
class Use:
    """The samples that a job has used so far. They show what it would have read with all memory to
    itself.

    used_size: bytes of samples it was given or that are prefetched for it, repeats included.
    payload_size: bytes of its data sets. fits: the part of them that the arena can hold. rival: the
    other job with the most memory, None: there is none.
    """

    used_size: int
    payload_size: int
    fits: float
    rival: str | None


class SessionTime:
    """The time of one session since it was last taken, by what it did."""

    __slots__ = (
        "asked", "blocked", "fetching", "memory_s", "now", "origin_s", "queue_s", "queued",
        "used_at", "waited_s", "whole_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.now = self.used_at = 0.0
        self.asked = self.blocked = self.fetching = 0
        """Requests without an answer; those of them that wait for memory; for blocks of remote
        files."""
        self.queued = 0.0
        """Those that wait for their first turn, each as the part of the reads in flight that were
        of other jobs."""
        self.whole_s = self.waited_s = self.memory_s = self.origin_s = self.queue_s = 0.0

    def advance(self, now: float) -> None:
        """Count the time until now; called before `asked` or `blocked` change."""
        elapsed = now - self.now
        if elapsed <= 0.0:
            return
        self.now = now
        self.whole_s += elapsed
        if self.asked:
            self.waited_s += elapsed
            if self.blocked:
                self.memory_s += elapsed * self.blocked / self.asked
            if self.fetching:
                self.origin_s += elapsed * self.fetching / self.asked
            if self.queued:
                self.queue_s += elapsed * self.queued / self.asked

    def ask(self, now: float) -> None:
        """A request begins."""
        self.advance(now)
        self.asked += 1
        self.used_at = now

    def answer(self, now: float) -> None:
        """A request has ended."""
        self.advance(now)
        self.asked -= 1

    def block(self, now: float, change: int) -> None:
        """A request begins to wait for memory (1), or ends it (-1)."""
        self.advance(now)
        self.blocked += change

    def fetch(self, now: float, change: int) -> None:
        """A request begins to wait for blocks of remote files (1), or ends it (-1)."""
        self.advance(now)
        self.fetching += change

    def queue(self, now: float, change: float) -> None:
        """A request begins to wait for its first turn, or ends it (negative); see `queued`."""
        self.advance(now)
        self.queued += change

    def take(self) -> tuple[float, ...]:
        """Return the time since this was called last: whole, waited, waited for memory, for blocks
        of remote files, for turns."""
        taken = self.whole_s, self.waited_s, self.memory_s, self.origin_s, self.queue_s
        self.whole_s = self.waited_s = self.memory_s = self.origin_s = self.queue_s = 0.0
        return taken


class JobTime:
    """The time of all sessions of one job; see the module."""

    def __init__(self) -> None:
        self.sessions: dict[SessionTime, None] = {}
        self.causes = dict.fromkeys(CAUSES, 0.0)
        """Seconds since the job was first seen."""
        self.taken_by: str | None = None
        """The job that took most of the memory."""
        self._ended: tuple[float, ...] = _NO_TIME
        """The time of sessions that have ended, as `SessionTime.take` returns it."""
        self._recent: deque[tuple[float, dict[str, float]]] = deque()
        """The times at which steps ended, and their parts."""
        self._reads = JobReads()
        """The reads until the last step, and what is known of the latest ones."""
        self.alone_size = 0
        """Bytes that it would have read with all memory to itself: everything once, and later what
        does not fit."""
        self._scale = 1.0
        """Bytes read in its first epoch for each byte used."""
        self._extra_size = 0
        self._taken = self._decode = self._others = self._origin = 0.0

    @property
    def idle(self) -> bool:
        """Whether no time has passed for it since the last step."""
        return not self.sessions and not self._ended[0]

    def begin(self, session: SessionTime, now: float) -> None:
        """A session has joined the job."""
        session.now = session.used_at = now
        self.sessions[session] = None

    def end(self, session: SessionTime, now: float) -> None:
        """A session has left it."""
        if session in self.sessions:
            del self.sessions[session]
            if now - session.used_at < ABSENT_S or not self.sessions:
                session.advance(now)
                self._take(session)

    def _take(self, session: SessionTime) -> None:
        self._ended = tuple(a + b for a, b in zip(self._ended, session.take(), strict=True))

    def step(self, now: float, reads: JobReads, use: Use) -> None:
        """Compute the parts of the time since the last step."""
        self._look_at(reads, use)
        present = [each for each in self.sessions if each.asked or now - each.used_at < ABSENT_S]
        for session in self.sessions:
            session.advance(now)
            if present and not (session.asked or now - session.used_at < ABSENT_S):
                session.take()
            else:
                self._take(session)
        whole_s, waited_s, memory_s, fetch_s, turn_s = self._ended
        self._ended = _NO_TIME
        if not whole_s:
            return
        left_s = waited_s - memory_s - fetch_s - turn_s
        origin_s = left_s * self._origin
        taken_s = (left_s - origin_s) * self._taken
        decode_s = (left_s - origin_s - taken_s) * self._decode
        device_s = left_s - origin_s - taken_s - decode_s
        others_s = device_s * self._others
        origin_s += fetch_s
        reading = device_s - others_s, others_s + turn_s, taken_s, decode_s
        parts = (*reading, memory_s, origin_s, whole_s - waited_s)
        causes = dict(zip(CAUSES, parts, strict=True))
        for cause, seconds in causes.items():
            self.causes[cause] += seconds
        self._recent.append((now, causes))
        while self._recent[0][0] < now - RECENT_S:
            self._recent.popleft()

    def _look_at(self, reads: JobReads, use: Use) -> None:
        """Return the shares of the reads since the last step; without any, the shares of the reads
        before."""
        before = self._reads
        size, count = reads.size - before.size, reads.count - before.count
        loads_s = reads.loads_s - before.loads_s
        later_size = use.used_size - use.payload_size
        if later_size <= 0:
            # Blocks may be larger than the samples that were asked for.
            self._scale = max(reads.size / max(use.used_size, 1), 1.0)
            self.alone_size = reads.size
        else:
            alone_size = use.payload_size + later_size * (1.0 - use.fits)
            self.alone_size = int(alone_size * self._scale)
        if size > 0:
            extra_size = max(reads.size - self.alone_size, self._extra_size)
            more = min(extra_size - self._extra_size, size)
            self._taken = 0.0 if use.rival is None else more / size
            before.size, self._extra_size = reads.size, extra_size
        if self._taken:
            self.taken_by = use.rival
        if count > 0:
            self._others = (reads.others - before.others) / count
            before.count, before.others = reads.count, reads.others
        if loads_s > 0.0:
            origin_s = reads.origin_s - before.origin_s
            self._origin = min(origin_s / loads_s, 1.0)
            self._decode = min(
                (reads.decode_s - before.decode_s) / max(loads_s - origin_s, 1e-9), 1.0
            )
            before.loads_s, before.decode_s = reads.loads_s, reads.decode_s
            before.origin_s = reads.origin_s

    def recent(self, now: float) -> dict[str, float]:
        """Return the shares of the time of the last RECENT_S; their sum is 1, or 0 without any."""
        rows = [causes for at, causes in self._recent if at > now - RECENT_S]
        whole_s = sum(sum(row.values()) for row in rows)
        return {cause: sum(row[cause] for row in rows) / (whole_s or 1.0) for cause in CAUSES}
