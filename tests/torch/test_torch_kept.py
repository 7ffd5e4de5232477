"""`ffserve.torch.cache`: the items of any dataset, as if each process had made its own."""

from __future__ import annotations

import logging
import os
import pickle
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from command import text_of
from daemon import Daemon, run_python, serving, until
from keeping import pictures, twice
from preparing import same

import ffserve.client.daemon.preparing
from ffserve.client import failover
from ffserve.errors import UsageError
from ffserve.torch import DataLoader, EpochSampler, Subset, cache

N = 60


class Items(torch.utils.data.Dataset[Any]):
    """Items of many kinds; each that is made is a line of a file.

    Args: log: the file. shift: of the pixels.
    """

    classes = ("cat", "dog")

    def __init__(self, log: str, count: int = N, shift: int = 0) -> None:
        self.log = log
        self.count = count
        self.shift = shift

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not -self.count <= index < self.count:
            raise IndexError(f"no item {index}")
        index %= self.count
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        picture = np.full((8, 8, 3), (index + self.shift) % 256, np.uint8)
        boxes = {"boxes": torch.arange(index % 5), "name": f"{index}.jpg", "none": [None, 0.5]}
        return torch.from_numpy(picture), index % 2, boxes


class Objects(Items):
    """Items that cannot be kept."""

    def __getitem__(self, index: int) -> Any:
        return {super().__getitem__(index)[1]}


def made(log: str) -> list[int]:
    """Which items were made, in order."""
    return [int(line) for line in Path(log).read_text().split()] if os.path.exists(log) else []


def truth(tmp_path: Path, **options: int) -> list[Any]:
    """What each item is."""
    items = Items(str(tmp_path / "truth"), **options)
    return [items[i] for i in range(N)]


@pytest.fixture
def log(tmp_path: Path) -> str:
    """A file of each test; also the name of its items."""
    return str(tmp_path / "log")


@pytest.fixture(autouse=True)
def unchecked(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    # The tests count what is made: but for the first item that is found, nothing is compared.
    monkeypatch.setattr(ffserve.client.daemon.preparing, "CHECKED_EVERY", 1 << 60)
    return iter(())


def test_what_one_dataset_made_another_finds(log: str, daemon: Daemon, tmp_path: Path) -> None:
    expected = truth(tmp_path)
    one = cache(Items(log), version=1, name=log)
    assert len(one) == N and one.classes == ("cat", "dog")
    assert all(map(same, one.__getitems__(list(range(N))), expected))
    assert sorted(made(log)) == list(range(N))
    other = cache(Items(log + "-other"), version=1, name=log)
    assert all(map(same, other.__getitems__([5, 5, -1, 0]), [expected[i] for i in (5, 5, -1, 0)]))
    assert len(made(log + "-other")) == 1, "the first one that is found is compared"
    assert same(other[7], expected[7]) and len(made(log + "-other")) == 1
    (shard,) = [s for s in daemon.status()["shards"] if s["path"].endswith(log)]
    assert shard["format"] == "prepared" and shard["count"] == N
    (job,) = [p for p in daemon.status()["preparations"] if p["name"] == log]
    assert job["shared"] and job["prepared"] == N


def test_items_are_found_by_name_version_and_length(log: str) -> None:
    cache(Items(log), version=1, name=log)[3]
    for others in (
        cache(Items(log), version=2, name=log),
        cache(Items(log), version=1, name=log + "-other"),
        cache(Items(log, N - 1), version=1, name=log),
        cache(Items(log), version=1),
    ):
        others[3]
    assert made(log) == [3] * 5


def test_the_text_of_a_dataset_is_part_of_its_own_name(log: str) -> None:
    class Named(Items):
        def __repr__(self) -> str:
            return f"Named({self.log})"

    for shift, name in ((0, log), (1, log + "-other")):
        got = cache(Named(name, shift=shift), version=1)[3]
        assert int(got[0][0, 0, 0]) == 3 + shift


def test_a_pickled_copy_finds_the_items(log: str, tmp_path: Path) -> None:
    dataset = cache(Items(log), version=1, name=log)
    dataset.__getitems__(list(range(N)))
    copy = pickle.loads(pickle.dumps(dataset))
    assert all(map(same, copy.__getitems__(list(range(N))), truth(tmp_path)))
    assert len(made(log)) == N + 1 and copy.classes == dataset.classes


@pytest.mark.parametrize("index", [N, -N - 1])
def test_the_dataset_raises_its_own_errors(log: str, index: int) -> None:
    with pytest.raises(IndexError, match=f"no item {index}"):
        cache(Items(log), version=1, name=log)[index]


def test_other_datasets_are_refused(log: str) -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(UsageError, match="have no indices"):
        cache(Stream(), version=1)
    with pytest.raises(UsageError, match=r"version is .* differs from process to process"):
        cache(Items(log), version=object())
    with pytest.raises(UsageError, match="1 to 200 characters"):
        cache(Items(log), version=1, name="")


def test_items_that_cannot_be_kept_are_made_each_time(
    log: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = cache(Objects(log), version=1, name=log)
    with caplog.at_level(logging.WARNING, "ffserve"):
        for _ in range(3):
            assert dataset.__getitems__(list(range(N))) == [{i % 2} for i in range(N)]
    assert made(log) == 3 * list(range(N))
    (line,) = caplog.messages
    assert line.startswith(f"items of {log} are not kept: a sample has a value of type set, which")


def test_another_dataset_of_the_same_name_is_noticed(
    log: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache(Items(log), version=1, name=log).__getitems__(list(range(N)))
    other = cache(Items(log, shift=1), version=1, name=log)
    with caplog.at_level(logging.WARNING, "ffserve"):
        other[0]
        got = other.__getitems__(list(range(N)))
    assert all(map(same, got, truth(tmp_path, shift=1)))
    assert any("is not deterministic" in line for line in caplog.messages)


def test_without_a_daemon_the_dataset_is_asked(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", str(tmp_path / "none"))
    with caplog.at_level(logging.WARNING, "ffserve"):
        dataset = cache(Items(log), version=1, name=log)
        loader = DataLoader(dataset, batch_size=7, sampler=EpochSampler(N, seed=1), collate_fn=list)
        got = [each for batch in loader for each in batch]
    expected = truth(tmp_path)
    assert all(map(same, got, [expected[i] for i in made(log)]))
    assert sorted(made(log)) == list(range(N)) and not caplog.messages


@pytest.mark.check
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, DataLoader])
def test_workers_make_each_item_once(log: str, tmp_path: Path, kind: Any, start: str) -> None:
    expected = truth(tmp_path)
    sampler = EpochSampler(N, seed=1)
    loader = kind(
        cache(Items(log), version=1, name=log), batch_size=7, sampler=sampler, num_workers=2,
        collate_fn=list, multiprocessing_context=start,
    )  # fmt: skip
    for epoch in range(3):
        sampler.set_epoch(epoch)
        got = [each for batch in loader for each in batch]
        assert all(map(same, got, [expected[i] for i in sampler.order(epoch)]))
    # Each of six workers compares the first item that it finds.
    assert set(made(log)) == set(range(N)) and len(made(log)) <= N + 6


WORKERS = """
import sys
import torch.utils.data
from ffserve.torch import cache

items = cache([b"item %d" % i for i in range(60)], version=1, name=sys.argv[1])
loader = torch.utils.data.DataLoader(items, batch_size=6, num_workers=2, collate_fn=list)
assert len(list(loader)) == 10
"""


def test_what_short_workers_found_is_counted_for_one_job(log: str, daemon: Daemon) -> None:
    before = {job["name"] for job in daemon.status()["jobs"]}
    for _ in range(2):
        run_python(WORKERS, log)

    def found() -> int:
        [row] = [row for row in daemon.status()["preparations"] if row["name"] == log]
        return int(row["found"])

    until(lambda: found() == N, "the second job found all items")
    assert len({job["name"] for job in daemon.status()["jobs"]} - before) == 2
    shown = text_of("status", "--socket", daemon.socket, "--all")
    assert re.search(rf"^ *{N} +\S+ \w+ +- +0 +items prepared by {log}$", shown, re.M), shown


def test_an_order_is_announced(log: str, daemon: Daemon) -> None:
    dataset = Subset(cache(Items(log), version=1, name=log), range(10))
    loader = DataLoader(dataset, batch_size=5, sampler=EpochSampler(10, seed=1), collate_fn=list)
    batches = iter(loader)
    next(batches)
    until(
        lambda: [row for row in daemon.status()["progress"] if row["announced"][:2] == [0, 1]],
        "both epochs are announced",
    )
    list(batches)


@pytest.mark.check
def test_a_daemon_that_is_killed_in_the_middle(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(failover.RECONNECT_S, "auto", 0.3)
    monkeypatch.setattr(failover, "RETURN_AFTER_S", 0.3)
    expected = truth(tmp_path)
    with serving() as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        dataset = cache(Items(log), version=1, name=log)
        dataset.__getitems__(list(range(N // 2)))
        daemon.end(signal.SIGKILL)
        with caplog.at_level(logging.WARNING, "ffserve"):
            for _ in range(2):
                assert all(map(same, dataset.__getitems__(list(range(N))), expected))
        assert dataset._items.source == "the data set itself"
        assert sum("the daemon went away" in line for line in caplog.messages) == 1
        daemon.start()

        def back() -> bool:
            assert same(dataset[0], expected[0])
            return dataset._items.source.startswith("daemon")

        until(back, "the dataset goes back to the daemon")
        dataset.__getitems__(list(range(N)))
        before = len(made(log))
        assert all(map(same, dataset.__getitems__(list(range(N))), expected))
        assert len(made(log)) == before


# ---- datasets of others --------------------------------------------------------------------------


class Opened(torch.utils.data.Dataset[Any]):
    """A list of paths, with PIL.Image.open."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = pytest.importorskip("PIL.Image")
        picture = image.open(self.paths[index]).convert("RGB").resize((4, 4))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1), str(self.paths[index])


def test_paths_of_pictures(tmp_path: Path, daemon: Daemon) -> None:
    pictures(tmp_path)
    twice(Opened(sorted(tmp_path.rglob("*.png"))), str(tmp_path), daemon)


@pytest.mark.interop
def test_a_dataset_of_hugging_face(tmp_path: Path, daemon: Daemon) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "ids": [[1], [2, 3], []]})
    twice(rows, str(tmp_path), daemon)
