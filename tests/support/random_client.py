"""A client that does anything a program may do, in any order, and checks every byte.

Run as a program: SEED, SOCKET, a file that ends it when it is gone, then the record files, each of
`samples(k)` for its place k. Prints what it has done.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from daemon import sample

import ffserve
from ffserve.client import failover
from ffserve.client.daemon.shared_memory import DaemonSource
from ffserve.client.source import Leased

COUNT = 400
SIZES = ((0, 1, 100, 700), (3000, 4096, 5000, 9000), (20_000, 70_000, 100_001, 200_000))
DAMAGED = 77
"""Of the last file."""
BATCH = 48
LONGEST_LEASE_S = 0.05
RECONNECT_S = 60.0

T = TypeVar("T")


def samples(place: int) -> list[bytes]:
    """What the file of this place holds."""
    return [sample(i, SIZES[place % len(SIZES)], seed=place) for i in range(COUNT)]


def patiently(opening: Callable[[], T]) -> T:
    """Open something although the daemon may be starting anew just now."""
    deadline = time.monotonic() + RECONNECT_S
    while True:
        try:
            return opening()
        except ffserve.ServerUnavailable:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


class Place:
    """Whose arena a reader reads at the moment, to be told when something is wrong."""

    def __init__(self, reader: ffserve.Reader) -> None:
        self.when = time.monotonic()
        source = reader._selector.source
        self._connection = source.connection if isinstance(source, DaemonSource) else None
        self._arena = "no arena"
        if isinstance(source, DaemonSource):
            address = source._arena.__array_interface__["data"][0]
            for line in Path("/proc/self/maps").read_text().splitlines():
                low, high = (int(edge, 16) for edge in line.split()[0].split("-"))
                if low <= address < high:
                    self._arena = " ".join(line.split()[4:])

    def __str__(self) -> str:
        end = None if self._connection is None else self._connection.channel.broken
        return f"{self._arena}, whose session {'lives' if end is None else f'ended: {end!r}'}"


class Client:
    """See the module's text."""

    def __init__(self, seed: int, socket: str, paths: Sequence[str]) -> None:
        self._chance = random.Random(seed)
        self._socket = socket
        self._paths = list(paths)
        self._truth = [each for place in range(len(paths)) for each in samples(place)]
        self._damaged = len(self._truth) - COUNT + DAMAGED
        self._reader = self._opened()
        self.done: Counter[str] = Counter()
        self.checked = self.checked_size = 0
        """Samples that were compared in this process, and their bytes."""
        self._steps: tuple[Callable[[], None], ...] = (
            self._read,
            self._read_batch,
            self._lease,
            self._lease,
            self._one,
            self._errors,
            self._in_order,
            self._announced,
            self._awaited,
            self._threads,
            self._forked,
            self._anew,
        )

    def step(self) -> None:
        """Do one of the things."""
        chosen = self._chance.choice(self._steps)
        chosen()
        self.done[chosen.__name__.strip("_")] += 1

    def close(self) -> None:
        """Close its reader."""
        self._reader.close()

    def _opened(self) -> ffserve.Reader:
        return patiently(lambda: ffserve.open(self._paths, server=self._socket))

    def _some(self, most: int = BATCH) -> list[int]:
        """Indices with repeats, from everywhere or from one place, without the damaged one."""
        count, whole = self._chance.randrange(1, most), len(self._truth)
        if self._chance.random() < 0.5:
            first = self._chance.randrange(whole - most)
            found = list(range(first, first + count))
        else:
            found = [self._chance.randrange(whole) for _ in range(count)]
        return [i for i in found if i != self._damaged]

    def _check(self, indices: Sequence[int], got: Sequence[np.ndarray]) -> None:
        """Fail on the first sample whose bytes are not those that were written."""
        assert len(got) == len(indices)
        for index, each in zip(indices, got, strict=True):
            if (found := bytes(each)) != self._truth[index]:
                raise AssertionError(f"at {time.monotonic():.3f} s " + self._wrong(index, found))
            self.checked_size += len(found)
        self.checked += len(indices)

    def _wrong(self, index: int, got: bytes) -> str:
        truth = self._truth[index]
        same = min(len(got), len(truth))
        differing = np.flatnonzero(
            np.frombuffer(got, np.uint8, same) != np.frombuffer(truth, np.uint8, same)
        )
        edges = np.flatnonzero(np.diff(differing, prepend=-9, append=same + 9) > 8)
        runs = [
            f"[{first}, {last}] {self._origin(got[first:][:24])}"
            for first, last in zip(differing[edges[:-1]], differing[edges[1:] - 1], strict=True)
        ]
        again = bytes(self._reader[index]) == truth
        return (
            f"sample {index} is wrong: {len(got)} bytes of {len(truth)}, {len(differing)} of them "
            f"differ: {'; '.join(runs[:5])} ({len(runs)} runs); read again it is right: {again}"
        )

    def _origin(self, some: bytes) -> str:
        """Say of which sample these bytes are."""
        if not any(some):
            return "zeros"
        places = [(i, other.find(some)) for i, other in enumerate(self._truth) if some in other]
        found = ", ".join(f"byte {at} of sample {i}" for i, at in places[:3])
        return f"from {found or 'nowhere'} {some!r}"

    def _check_leased(self, indices: Sequence[int], leased: Leased, begun: Place) -> None:
        """As `_check`, of samples that are held where they lie."""
        try:
            self._check(indices, list(leased))
        except AssertionError as error:
            facts = [
                f"{error}",
                f"leased at {begun.when:.3f} s by {type(leased._held).__name__} over {begun}",
                f"now {Place(self._reader)}",
                "indices, places, sizes: "
                f"{list(zip(indices, leased.starts.tolist(), leased.sizes.tolist(), strict=True))}",
                f"copies, not places: {sorted(leased._copies)}",
            ]
            raise AssertionError("\n".join(facts)) from None

    def _read(self, some: list[int] | None = None) -> None:
        some = some or self._some()
        self._check(some, self._reader.read(some))

    def _read_batch(self) -> None:
        some, out = self._some(), None
        if self._chance.random() < 0.5:
            out = np.full(sum(len(self._truth[i]) for i in some) + 7, 255, np.uint8)
        self._check(some, list(self._reader.read_batch(some, out=out)))

    def _lease(self, some: list[int] | None = None) -> None:
        some = some or self._some()
        with self._reader.lease(some) as leased:
            place = Place(self._reader)
            self._check_leased(some, leased, place)
            time.sleep(self._chance.random() * LONGEST_LEASE_S)
            # Nobody may have taken the memory away meanwhile.
            self._check_leased(some, leased, place)

    def _one(self) -> None:
        [index] = self._some(2) or [0]
        self._check([index], [self._reader[index]])

    def _errors(self) -> None:
        some = [*self._some(), self._damaged]
        *good, bad = self._reader.read(some, errors="return")
        assert isinstance(bad, ffserve.ChecksumError) and bad.index == self._damaged
        self._check(some[:-1], good)

    def _in_order(self) -> None:
        first = self._chance.randrange(COUNT)
        indices = range(first, first + COUNT // 4)
        got = [each for batch in self._reader.batches(indices, count=16) for each in batch]
        self._check(indices, got)

    def _announced(self) -> None:
        chosen = np.random.default_rng(self._chance.randrange(1 << 30))
        order = chosen.permutation(len(self._truth) - COUNT)
        self._reader.announce(order, epoch=self._chance.randrange(3))
        for start in range(0, self._chance.randrange(len(order)), BATCH):
            part = order[start : start + BATCH].tolist()
            self._chance.choice((self._read, self._lease))(part)

    def _awaited(self) -> None:
        async def several() -> None:
            async with ffserve.aio.open(self._paths, server=self._socket) as reader:
                parts = [self._some(16) for _ in range(6)]
                for part, got in zip(
                    parts, await asyncio.gather(*map(reader.read, parts)), strict=True
                ):
                    self._check(part, got)

        patiently(lambda: asyncio.run(several()))

    def _threads(self) -> None:
        failed: list[BaseException] = []

        def work(part: list[int]) -> None:
            try:
                self._check(part, self._reader.read(part))
                with self._reader.lease(part) as leased:
                    self._check(part, list(leased))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(self._some(),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def _forked(self) -> None:
        with self._reader.lease(some := self._some()) as leased:
            place = Place(self._reader)
            self._check_leased(some, leased, place)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    self._read()
                    self._lease()
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0, "the child failed"
            self._check_leased(some, leased, place)

    def _anew(self) -> None:
        self._reader.close()
        self._reader = self._opened()


def main() -> None:
    """Go on until the file is gone."""
    seed, socket, until, *paths = sys.argv[1:]
    failover.RECONNECT_S.update(auto=RECONNECT_S, require=RECONNECT_S)
    client = Client(int(seed), socket, paths)
    print("begun", flush=True)
    while os.path.exists(until):
        client.step()
    print(sorted(client.done.items()))


if __name__ == "__main__":
    main()
