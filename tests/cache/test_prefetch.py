"""Prefetched samples, and those that were prefetched in vain, counted exactly."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from ffserve.cache.arena import Arena
from ffserve.cache.cache import Cache, Fetch, Load
from ffserve.cache.next_use import NextUse
from ffserve.cache.orders import AnnouncedOrder
from ffserve.cache.prefetch import PIECE_COUNT, RETRY_S, Piece, Prefetcher
from ffserve.cache.tables import Directory, ShardTable
from ffserve.order import epoch_order
from ffserve.server.reading.scheduler import Scheduler

COUNT, ARENA = 4096, 16 << 20


class Node:
    """A cache, what reads ahead for it, and one job with an order; every read succeeds at once."""

    def __init__(self, size: int, order: NDArray[np.int64], **sizes: int) -> None:
        self.next_use = NextUse()
        self.directory = Directory(1 << 22)
        self.table = ShardTable(self.directory)
        self.cache = Cache(Arena(ARENA), self.directory, self.table, lambda *_: None, self.next_use)
        self.prefetcher = Prefetcher(self.cache, **sizes)
        self.base = self.directory.reserve(COUNT)
        offsets = np.arange(COUNT, dtype=np.uint64) * size
        self.directory.offsets[self.base : self.base + COUNT] = offsets
        self.directory.set_lengths(self.base, np.full(COUNT, size, np.uint64))
        self.table.add(
            self.base, COUNT, payload_size=COUNT * size, alignment=1, checksum_kind=0, file=0,
            engine=0,
        )  # fmt: skip
        self.table.sessions[:] = 1
        self.order = order + self.base
        self.progress = self.next_use.join("job", np.array([self.base]), np.array([COUNT]))
        self.next_use.announced(self.progress, 0, self.announced(), None, self, 0.0)

    def announced(self) -> AnnouncedOrder:
        """Return the order as it arrives from the job."""
        arriving = self.next_use.arriving(self.progress, len(self.order), replacement=False)
        arriving.add(self.order)
        return arriving.finish()

    def prefetched(self) -> NDArray[np.int64]:
        """Let all be read ahead that is to be; return the blocks' first samples."""
        firsts = [np.zeros(0, np.int64)]
        while (found := self.prefetcher.next_load(1.0)) is not None:
            firsts.append(found[0].blocks.firsts)
            for fetch in self.cache.loaded(found[0], {}):
                assert isinstance(fetch, Piece)
                self.prefetcher.loaded(fetch, 1.0)
        return np.concatenate(firsts)

    def ask(self, numbers: NDArray[np.int64]) -> None:
        """The job asks for samples, as a session does for it."""
        self.cache.used(numbers)
        self.cache.invalidate(self.progress.asked(numbers, 1.0))
        self.bring(numbers)

    def bring(self, numbers: NDArray[np.int64]) -> None:
        """Have samples in memory."""
        fetch = Fetch(numbers)
        while fetch.cursor < len(numbers):
            load = self.cache.advance(fetch, len(numbers), ARENA)
            if load is not None:
                self.cache.loaded(load, {})
        self.cache.release(fetch.pins)

    def use(self, position: int) -> None:
        """The job reports where it is."""
        self.cache.invalidate(self.progress.advance_to(0, position, 1.0))
        self.prefetcher.advanced(self.progress)

    def evict_all(self) -> None:
        """Nothing stays in memory."""
        self.prefetcher.forget(self.progress)
        assert self.cache.allocator.evict(self.base, self.base + COUNT)

    @property
    def pinned(self) -> int:
        """How many samples are pinned because they were read ahead."""
        cursor = self.prefetcher._cursors.get(self.progress)
        return 0 if cursor is None else sum(len(p.numbers) for p in cursor.pieces)

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Return the first sample of the block of each sample, in the order."""
        return self.table.blocks(self.order).firsts


@pytest.fixture(params=(300, 1000, 8192), ids=lambda size: f"{size} bytes")
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """Samples of which eight, four or one lie in a block; their order goes back and forth."""
    made = Node(request.param, np.arange(COUNT).reshape(-1, 2)[:, ::-1].ravel())
    yield made
    made.directory.close()


def test_samples_of_one_block_are_one_read(node: Node) -> None:
    firsts = node.prefetched()
    assert len(np.unique(firsts)) == len(firsts) > 1
    assert node.cache.counters.prefetched == node.cache.counters.blocks_read == len(firsts)
    covered = np.isin(node.blocks, firsts)
    assert covered[: int(covered.sum())].all(), "what comes first in the order"


def test_used_samples_are_not_wasted_and_all_others_are(node: Node) -> None:
    firsts = node.prefetched()
    assert node.cache.counters.wasted == 0
    node.use(17)
    used = np.unique(node.blocks[:17])
    node.evict_all()
    assert node.cache.counters.wasted == len(np.setdiff1d(firsts, used)) > 0


def test_a_sample_unpinned_and_used_later_is_not_wasted(node: Node) -> None:
    firsts = node.prefetched()
    node.prefetcher.make_room()
    assert node.cache.counters.wasted == 0, "it is still there"
    everything = int(np.isin(node.blocks, firsts).sum())
    node.use(everything)
    node.evict_all()
    assert node.cache.counters.wasted == 0


def test_a_request_of_another_job_is_a_use(node: Node) -> None:
    firsts = node.prefetched()
    node.ask(firsts[:2])
    node.evict_all()
    assert node.cache.counters.wasted == len(firsts) - 2


def test_a_requested_sample_is_neither_prefetched_nor_wasted(node: Node) -> None:
    node.ask(node.order[:64])
    assert node.cache.counters.prefetched == 0
    node.evict_all()
    assert node.cache.counters.wasted == 0 and node.cache.counters.evicted > 0


def test_an_order_whose_samples_are_there_is_followed_in_longer_pieces() -> None:
    """Each piece costs the same, however long; what has to be read is in short ones, as ever."""
    node = Node(1000, np.arange(COUNT))
    node.bring(node.order[:2048])
    node.prefetcher._slow_s = 1.0
    node.use(1024)
    assert np.array_equal(node.prefetched(), np.unique(node.blocks[2048:2560]))
    lengths = [len(piece.numbers) for piece in node.prefetcher._cursors[node.progress].pieces]
    assert lengths[0] == lengths[-1] == PIECE_COUNT < max(lengths)
    assert sum(lengths) == 1536, "a step and a half ahead"
    node.directory.close()


def test_a_job_on_a_fast_disk_had_half_a_step_more_memory_pinned_than_it_could_use() -> None:
    """The arena is small for its steps, and a read takes no time."""
    node = Node(1000, np.arange(COUNT))
    node.use(1024)
    node.prefetched()
    assert sum(len(p.numbers) for p in node.prefetcher._cursors[node.progress].pieces) == 1024
    node.directory.close()


def test_the_order_of_a_data_set_that_is_all_in_memory_is_not_followed() -> None:
    """Until something of it goes: then what is wanted next is read and pinned as ever."""
    node = Node(1000, np.arange(COUNT))
    node.bring(node.order)
    node.prefetched()
    for position in range(64, COUNT, 64):
        node.use(position)
        assert len(node.prefetched()) == 0
    assert node.pinned == 0 < node.progress.position
    assert node.cache.allocator.evict(node.base, node.base + COUNT)
    node.next_use.announced(node.progress, 1, node.announced(), None, node, 0.0)
    node.use(COUNT)
    assert len(node.prefetched()) > 0 and node.pinned > 0
    node.directory.close()


def test_a_windowed_order_was_prefetched_sample_by_sample() -> None:
    """Each window is read whole and in the order of the file, before the job comes to it."""
    window = 1024
    node = Node(1000, epoch_order(COUNT, seed=3, epoch=0, window=window), window_least_size=1 << 18)
    firsts = node.prefetched()
    ahead = np.isin(node.blocks, firsts)
    assert ahead[: 2 * window].all(), "the window in use and the next"
    runs = np.diff(firsts) > 0
    assert np.count_nonzero(~runs) < 2 * len(firsts) // 32, "rising within a window"
    for position in range(64, COUNT, 64):
        node.use(position)
        node.prefetched()
        end = -(-position // window) * window + window
        ahead = node.cache._slot_of[node.order[position:end]] > 0
        assert ahead.all(), position
    node.directory.close()


def test_a_job_ahead_of_the_prefetcher_waits_for_its_window() -> None:
    """Its requests would read the blocks of the window many times."""
    node = Node(1000, epoch_order(COUNT, seed=3, epoch=0, window=1024), window_least_size=1 << 18)
    node.prefetched()
    node.evict_all()
    node.prefetcher.next_load(1.0)
    front = 2100
    node.progress.asked(node.order[front - 64 : front], 1.0)
    assert node.prefetcher.next_of_window("job", 1.0) is None, "these are read by themselves"
    node.progress.asked(node.order[front : front + 64], 1.0)
    firsts = []
    while (load := node.prefetcher.next_of_window("job", 1.0)) is not None:
        firsts.append(load.blocks.firsts)
        for fetch in node.cache.loaded(load, {}):
            assert isinstance(fetch, Piece)
            node.prefetcher.loaded(fetch, 1.0)
    assert firsts, "the rest of the window that the job has come to"
    assert (node.cache._slot_of[node.order[front:3072]] > 0).all()
    assert node.prefetcher.next_of_window("another job", 1.0) is None
    node.directory.close()


def test_a_window_whose_order_was_dropped_ended_the_daemon() -> None:
    """The announcer had gone, and another process of the job asked for samples."""
    node = Node(1000, epoch_order(COUNT, seed=3, epoch=0, window=1024), window_least_size=1 << 18)
    node.prefetched()
    node.evict_all()
    node.prefetcher.next_load(1.0)
    node.progress.asked(node.order[2036:2100], 1.0)
    node.prefetcher.next_of_window("job", 1.0)
    node.progress.asked(node.order[2100:2164], 1.0)
    node.progress.silence()
    assert node.prefetcher.next_of_window("job", 1.0) is None
    node.directory.close()


def test_a_job_hung_in_a_windowed_order_over_a_data_set_that_is_all_in_memory() -> None:
    """All samples were known to be there, and more of them were looked for."""
    node = Node(1000, epoch_order(COUNT, seed=3, epoch=0, window=1024), window_least_size=1 << 18)
    node.bring(node.order)
    assert len(node.prefetched()) == 0
    assert node.prefetcher._all_resident(node.progress, node.prefetcher._cursors[node.progress])
    node.progress.asked(node.order[:64], 1.0)
    assert node.prefetcher.next_of_window("job", 1.0) is None
    node.prefetcher.make_room()
    assert node.cache.allocator.evict(node.base, node.base + COUNT)
    assert node.prefetcher.next_of_window("job", 1.0) is not None, "what is gone is read again"
    node.directory.close()


def test_the_last_samples_of_a_batch_were_left_to_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The window of a slow job in a small arena is one sample longer than its batch."""
    node = Node(16 << 10, np.random.default_rng(0).permutation(COUNT))
    monkeypatch.setattr(Prefetcher, "window", lambda *_: 21)
    for position in range(0, 2000, 20):
        node.use(position)
        node.prefetched()
        if position >= 100:  # the usual step is known
            ahead = node.order[position : position + 20]
            assert all(node.cache.holds(number, number + 1) for number in ahead.tolist()), position
    node.directory.close()


def test_a_job_is_far_into_an_order_when_its_prefetching_begins() -> None:
    """All was in memory until then, so nobody had looked at the order, and what the job had used of
    it was dropped."""
    node = Node(300, np.arange(COUNT))
    node.prefetched()
    for start in range(0, COUNT, 64):
        node.ask(node.order[start : start + 64])
        node.use(start + 64)
        node.prefetched()
    node.next_use.announced(node.progress, 1, node.announced(), None, node, 0.0)
    node.cache.invalidate(node.progress.advance_to(1, 0, 1.0))
    node.cache.invalidate(node.progress.advance_to(1, 1000, 1.0))
    node.prefetcher.advanced(node.progress)
    assert node.cache.allocator.evict(node.base, node.base + COUNT)
    assert set(node.prefetched()) <= set(node.blocks[1000 - 8 :])


def test_prefetching_goes_on_after_a_pause_that_nothing_ends() -> None:
    """Memory came free within the pause; then no job sent anything for a while."""
    node = Node(ARENA // 256, np.arange(COUNT))
    loads: list[Load] = []
    scheduler = Scheduler(node.cache, lambda load, _: loads.append(load), most_reads=64)
    held = Fetch(node.base + np.arange(COUNT - 256, COUNT))
    while (load := node.cache.advance(held, 256, ARENA)) is not None:
        node.cache.loaded(load, {})
    scheduler.pump(1.0)
    assert scheduler.next_deadline() == 1.0 + RETRY_S
    node.cache.release(held.pins)
    scheduler.pump(1.0 + RETRY_S / 2)
    assert not loads, "it is paused"
    assert scheduler.next_deadline() == 1.0 + RETRY_S
    scheduler.pump(1.0 + RETRY_S)
    assert loads and scheduler.next_deadline() is None
    node.directory.close()
