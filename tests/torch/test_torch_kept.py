"""`ffserve.torch.cache`: the items of any dataset, as if each process had made its own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from daemon import Daemon, serving, until
from preparing import same

import ffserve.client.daemon.preparing
from ffserve.errors import UsageError
from ffserve.torch import DataLoader, EpochSampler, cache

N = 60


class Items(torch.utils.data.Dataset[Any]):
    """Items of every kind; each that is made is a line of a file.

    Args: log: the file. edge: pixels of a picture.
    """

    classes = ("cat", "dog")

    def __init__(self, log: str, count: int = N, edge: int = 8, shift: int = 0) -> None:
        self.log = log
        self.count = count
        self.edge = edge
        self.shift = shift

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not -self.count <= index < self.count:
            raise IndexError(index)
        index %= self.count
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        picture = np.full((self.edge, self.edge, 3), (index + self.shift) % 256, np.uint8)
        boxes = {"boxes": torch.arange(index % 5), "name": f"{index}.jpg", "none": [None, 0.5]}
        return torch.from_numpy(picture), index % 2, boxes


def made(log: str) -> list[int]:
    """Which items were made, in order."""
    return [int(line) for line in Path(log).read_text().split()] if os.path.exists(log) else []


@pytest.fixture
def log(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture(autouse=True)
def unchecked(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    # The tests count what is made: but for the first item that is found, nothing is compared.
    monkeypatch.setattr(ffserve.client.daemon.preparing, "CHECKED_EVERY", 1 << 60)
    return iter(())


def test_what_one_process_made_another_finds(log: str, daemon: Daemon) -> None:
    truth = [Items(log + "-alone")[i] for i in range(N)]
    one = cache(Items(log), version=1, name=log)
    assert len(one) == N and one.classes == ("cat", "dog")
    assert all(map(same, one.__getitems__(list(range(N))), truth))
    assert sorted(made(log)) == list(range(N))
    other = cache(Items(log + "-other"), version=1, name=log)
    assert all(map(same, other.__getitems__([5, 5, -1, 0]), [truth[i] for i in (5, 5, -1, 0)]))
    assert len(made(log + "-other")) == 1, "the first one that is found is compared"
    assert same(other[7], truth[7]) and len(made(log + "-other")) == 1
    (shard,) = [s for s in daemon.status()["shards"] if s["path"].endswith(log)]
    assert shard["format"] == "prepared" and shard["count"] == N
