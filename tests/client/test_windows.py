"""Windowed orders without a daemon: each block of neighbours is read once, in large pieces."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import damage, until
from engines import engine_reads
from numpy.typing import NDArray

import ffserve
from ffserve.client.local import window_reads as ahead
from ffserve.errors import ChecksumError, UsageError
from ffserve.order import epoch_order

COUNT, WINDOW = 40_000, 4096
Order = NDArray[np.int64]


def content(i: int) -> bytes:
    """A sample of its own length."""
    return i.to_bytes(8, "little") * (16 + i % 32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("ahead") / "a.ffr"
    with ffserve.create(made, n=COUNT) as writer:
        for i in range(COUNT):
            writer.write(content(i))
    return str(made)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LEAST_SIZE", 1 << 18)
    monkeypatch.setattr(ahead, "LOOK_COUNT", 4 * WINDOW)
    monkeypatch.setattr(ahead, "AHEAD_SIZE", 1 << 20)


def evict(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def order_of(epoch: int = 0, **options: int) -> Order:
    return epoch_order(COUNT, seed=5, epoch=epoch, window=WINDOW, **options)


def test_windows_are_read_ahead_up_to_a_size() -> None:
    order, asked = order_of(), list[int]()
    size = 256
    windows = ahead.Windows(
        order, size, lambda _: None, lambda numbers: asked.append(len(numbers)), lambda _: {}
    )
    assert windows.take(order[:100])
    assert len(asked) > 1 and sum(asked) <= asked[0] + (1 << 20) // size + max(asked)


def check(order: Order, samples: list[NDArray[np.uint8]]) -> None:
    assert len(order) == len(samples)
    assert all(s.tobytes() == content(i) for i, s in zip(order.tolist(), samples, strict=True))


def batches_of(order: Order, size: int = 64) -> list[Order]:
    return [order[k : k + size] for k in range(0, len(order), size)]


def reads_of(path: str, order: Order, *, announce: bool) -> int:
    """Read an order one batch at a time; return the engine's reads of files."""
    evict(path)
    with ffserve.open(path, server="off") as reader:
        before = engine_reads()
        if announce:
            reader.announce(order)
        for indices in batches_of(order):
            check(indices, list(reader.read_batch(indices)))
        return engine_reads() - before


def test_small_records_of_a_windowed_order_were_read_one_by_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = order_of()
    merged = reads_of(path, order, announce=True)
    assert merged <= COUNT // (WINDOW // 32) + COUNT // WINDOW, "a read per block"
    # Through the page cache, the block around a record comes with it.
    monkeypatch.setattr("ffserve.client.local.local_source.fitting_share", lambda size: 0.0)
    assert reads_of(path, order_of(1), announce=False) > 3 * merged


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_every_way_of_reading_brings_the_right_samples(
    path: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ffserve.client.local.local_source.fitting_share", lambda size: share)
    evict(path)
    out = np.empty(1 << 20, np.uint8)
    with ffserve.open(path, server="off") as reader:
        for epoch in range(2):
            reader.announce(order_of(epoch), epoch)
        for k, indices in enumerate(batches_of(order_of(), 100)):
            if k % 3 == 0:
                check(indices, reader.read(indices))
            elif k % 3 == 1:
                check(indices, list(reader.read_batch(indices)))
            else:
                check(indices, list(reader.read_batch(indices, out=out)))
        for indices in batches_of(order_of(1), 1000):
            check(indices, reader.read(indices))
        assert reader.stats()["samples"] == 2 * COUNT
        order = order_of(2)
        got = list(reader.batches(order, count=77))
        check(order, [sample for batch in got for sample in batch])


def test_an_epoch_that_was_announced_when_the_one_before_it_was_over_was_read_singly(
    path: str,
) -> None:
    evict(path)
    with ffserve.open(path, server="off") as reader:
        for epoch in range(3):
            order = order_of(epoch)
            reader.announce(order, epoch)
            for indices in batches_of(order, 1000):
                check(indices, reader.read(indices))
            taken = reader._selector.current()._windows._position  # type: ignore[attr-defined]
            assert taken in (0, COUNT), "all of it came out of windows"
            assert reader._announced.position == (epoch, COUNT)


def test_a_program_that_does_not_follow_its_order_gets_what_it_asks_for(path: str) -> None:
    order = order_of()
    other = np.random.default_rng(1).permutation(COUNT)[:512]
    with ffserve.open(path, server="off") as reader:
        reader.announce(order)
        check(order[:64], reader.read(order[:64]))
        check(other, reader.read(other))
        check(order[64:128], reader.read(order[64:128]))
        check(order[9000:9100], reader.read(order[9000:9100]))
        reader.reached(0, 20_000)
        check(order[20_000:30_000], reader.read(order[20_000:30_000]))


def test_an_order_that_the_program_changes_afterwards_brings_no_wrong_sample(path: str) -> None:
    order = order_of()
    with ffserve.open(path, server="off") as reader:
        reader.announce(order)
        check(order[:64], reader.read(order[:64]))
        order[:] = order[::-1].copy()
        for indices in batches_of(order[: 2 * WINDOW]):
            check(indices, reader.read(indices))


def test_the_rest_of_an_epoch_and_the_slice_of_a_rank_are_read_by_windows(path: str) -> None:
    for order in (order_of()[5555:], order_of(rank=1, world_size=4)):
        merged = reads_of(path, order, announce=True)
        assert merged < len(order) // 8


def test_a_damaged_sample_of_a_window_is_an_error_where_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "bad.ffr"
    with ffserve.create(path, n=COUNT) as writer:
        for i in range(COUNT):
            writer.write(content(i))
    bad = int(order_of()[6000])
    damage(str(path), bad)
    order = order_of()
    with ffserve.open(path, server="off") as reader:
        reader.announce(order)
        for k, indices in enumerate(batches_of(order[:8000], 100)):
            if k == 60:
                with pytest.raises(ChecksumError) as caught:
                    reader.read(indices)
                assert caught.value.index == bad
                mixed = reader.read(indices, errors="return")
                assert isinstance(mixed[0], ChecksumError)
                check(indices[1:], mixed[1:])
            else:
                check(indices, reader.read(indices))


def test_a_reader_is_closed_dropped_and_forked_while_windows_are_on_their_way(path: str) -> None:
    order = order_of()
    for _ in range(5):
        evict(path)
        reader = ffserve.open(path, server="off")
        reader.announce(order)
        check(order[:64], reader.read(order[:64]))
        context = multiprocessing.get_context("fork")
        child = context.Process(target=lambda r=reader: check(order[64:999], r.read(order[64:999])))
        child.start()
        child.join()
        assert child.exitcode == 0
        check(order[64:128], reader.read(order[64:128]))
        reader.close()
        dropped = ffserve.open(path, server="off")
        next(dropped.batches(order))
        del dropped


def test_the_workers_of_a_loader_find_the_windows_in_the_page_cache(path: str) -> None:
    """The process that announced does not read by itself."""
    order = order_of()
    evict(path)
    with ffserve.open(path, server="off") as reader:
        tables = reader.tables(0)[0]
        reader.announce(order)
        for position in (0, 20_000):
            reader.reached(0, position)
            some = order[position : position + 64]
            until(lambda some=some: in_memory(path, tables[some]), "they are in memory")


def in_memory(path: str, offsets: NDArray[np.uint64]) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        for offset in offsets.tolist():
            os.preadv(fd, [bytearray(64)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        pytest.skip(f"this file system cannot tell what is in memory: {error}")
    finally:
        os.close(fd)
    return True


class Calls:
    """Notes when a function is called, and by which thread."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.threads: list[threading.Thread] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread())
        return self._call(*args, **options)


def test_the_reader_of_an_order_was_held_while_the_kernel_looked_for_memory(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """posix_fadvise takes 5 to 60 ms a window."""
    told = Calls(os.posix_fadvise)
    monkeypatch.setattr("ffserve.client.local.local_files.os.posix_fadvise", told)
    order = order_of()
    with ffserve.open(path, server="off") as reader:
        told.threads.clear()
        for indices in batches_of(order):
            if indices[0] == order[0]:
                reader.announce(order)
            check(indices, list(reader.read_batch(indices)))
        reader.reached(0, 0)
        reader.announce(order_of(1))  # other processes read: this one only tells
        reader.reached(0, WINDOW)
        until(lambda: len(told.threads) > 4, "the kernel is told")
    assert threading.main_thread() not in told.threads
    assert not [one for one in threading.enumerate() if one.name == "ffserve-ahead"]


def test_several_windows_are_found_in_one_look(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Calls(ahead.window_ends)
    monkeypatch.setattr(ahead, "window_ends", looked)
    order = order_of()
    with ffserve.open(path, server="off") as reader:
        for indices in batches_of(order, 512):
            if indices[0] == order[0]:
                reader._selector.current().follow(order)  # type: ignore[attr-defined]
            check(indices, reader.read(indices))
    assert 1 < len(looked.threads) <= COUNT // WINDOW / 2


@pytest.mark.parametrize("kind", ["float64", "uint64", "column", "strided", "list"])
def test_indices_of_another_kind_are_not_taken_for_the_next_ones(path: str, kind: str) -> None:
    """Their bytes may be those of the next indices of the order."""
    order = order_of()
    with ffserve.open(path, server="off") as reader:
        reader.announce(order)
        check(order[:64], reader.read(order[:64]))
        window = reader._selector.current()._windows._begun[0]  # type: ignore[attr-defined]
        assert window.errors == {}, "it has been read"
        indices: Any = order[64:128].copy()
        if kind == "float64":
            with pytest.raises(UsageError):
                reader.read_batch(indices.view(np.float64))
        elif kind == "column":
            with pytest.raises(UsageError):
                reader.read_batch(indices.reshape(-1, 1))
        elif kind == "strided":
            check(order[64:128:2], list(reader.read_batch(indices[::2])))
        elif kind == "uint64":
            check(indices, list(reader.read_batch(indices.view(np.uint64))))
        else:
            check(indices, list(reader.read_batch(indices.tolist())))
        check(order[:0], list(reader.read_batch(order[:0])))
        with pytest.raises(UsageError, match="out has 8 bytes"):
            reader.read_batch(order[128:192], out=np.empty(8, np.uint8))
        check(order[128:192], list(reader.read_batch(order[128:192])))
        check(order[192:256], reader.read(order[192:256]))


def test_no_samples_behind_the_last_window_were_an_index_error(path: str) -> None:
    order = order_of()
    with ffserve.open(path, server="off") as reader:
        reader.announce(order)
        check(order[:64], reader.read(order[:64]))
        reader.reached(0, COUNT // 2)
        assert len(reader.read_batch(order[:0])) == len(reader.read(order[:0])) == 0


def test_threads_that_share_a_reader_get_their_own_samples(path: str) -> None:
    order = order_of()
    parts = iter(batches_of(order, 50))
    lock, failed = threading.Lock(), []
    with ffserve.open(path, server="off") as reader:
        reader.announce(order)

        def work() -> None:
            try:
                while True:
                    with lock:
                        indices = next(parts, None)
                    if indices is None:
                        return
                    check(indices, list(reader.read_batch(indices)))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert reader.stats()["bytes"] == sum(len(content(i)) for i in range(COUNT))


def test_a_request_out_of_windows_was_empty_when_another_order_had_none(path: str) -> None:
    order = order_of()
    with ffserve.open(path, server="off") as reader:
        reader.announce(order)
        first = order[:64]
        source = reader._selector.current()
        pending = source.start(first, apart=False)
        reader.announce(np.random.default_rng(3).permutation(COUNT))
        assert not source.finish(pending)
        buffer, offsets = pending.target.buffer, pending.target.offsets
        assert buffer is not None
        check(first, [buffer[a:b] for a, b in pairwise(offsets.tolist())])
