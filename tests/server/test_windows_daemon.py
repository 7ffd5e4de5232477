"""Windowed orders through a real daemon: each block of neighbours is read once, in large pieces."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from daemon import Daemon, serving

import ffserve
from ffserve.order import epoch_order

COUNT, WINDOW, SIZE = 65_536, 8192, 1024
ARENA_MIB = 160  # more than all of the data


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("windows") / "a.ffr"
    with ffserve.create(made, n=COUNT) as writer:
        for i in range(COUNT):
            writer.write(i.to_bytes(8, "little") * (SIZE // 8))
    return str(made)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving(arena=f"{ARENA_MIB}MiB") as daemon:
        yield daemon


def check(indices: np.ndarray, batch: ffserve.client.source.Batch) -> None:
    rows = batch.buffer.reshape(len(indices), SIZE).view("<u8")
    assert (rows == indices[:, np.newaxis].astype(np.uint64)).all()


def reads(daemon: Daemon) -> int:
    return int(daemon.status()["engine"]["reads"])


@pytest.mark.check
@pytest.mark.parametrize("in_flight", [False, True], ids=["one batch", "several in flight"])
def test_small_records_of_a_windowed_order_were_read_one_by_one(
    daemon: Daemon, path: str, in_flight: bool
) -> None:
    order = epoch_order(COUNT, seed=1, epoch=0, window=WINDOW)
    with ffserve.open(path, server=daemon.socket) as reader:
        reader.announce(order)
        if in_flight:
            got = [(len(batch), batch) for batch in reader.batches(order, count=64)]
        else:
            got = [(64, reader.read_batch(order[k : k + 64])) for k in range(0, COUNT, 64)]
        position = 0
        for count, batch in got:
            check(order[position : position + count], batch)
            position += count
    # 64 MiB in pieces of up to 120 KiB; blocks of 8 samples would be 8192 reads.
    assert position == COUNT and reads(daemon) < 2000


def test_a_reader_that_is_faster_than_its_reports_was_taken_to_follow_no_order(
    daemon: Daemon, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked for samples more than 8192 positions beyond those that the daemon knew of."""
    monkeypatch.setattr("ffserve.client.announced.REPORT_INTERVAL_S", 1e9)
    # The last samples share no block with others, so they alone are missing.
    far = np.arange(COUNT - 2048, COUNT)
    order = np.concatenate((np.random.default_rng(1).permutation(COUNT - 2048), far))
    with ffserve.open(path, server=daemon.socket) as reader:
        reader.read_batch(np.arange(COUNT - 2048))
        reader.announce(order)
        for k in range(0, COUNT - 2048, 64):
            reader.read_batch(order[k : k + 64])
        reader.read_batch(far[1:])
        (progress,) = daemon.status()["progress"]
    assert progress["kind"] == "announced", "it follows its order"
