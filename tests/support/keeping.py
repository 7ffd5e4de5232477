"""Datasets of others, wrapped by `ffserve.torch.cache`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from daemon import Daemon
from preparing import same

from ffserve.torch import cache


def pictures(directory: Path) -> None:
    """Write a folder of pictures, as ImageFolder reads it."""
    image = pytest.importorskip("PIL.Image")
    for index in range(12):
        path = directory / ("cat", "dog")[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        image.fromarray(np.full((9, 7, 3), 20 * index, np.uint8)).save(path)


def twice(dataset: Any, name: str, daemon: Daemon) -> None:
    """Two jobs over a dataset get what it returns, and the second one finds it in memory."""
    expected = [dataset[i] for i in range(len(dataset))]
    for hits in (0, len(dataset)):
        kept = cache(dataset, version=1, name=name)
        loader = torch.utils.data.DataLoader(kept, batch_size=5, collate_fn=list)
        assert all(map(same, [each for batch in loader for each in batch], expected))
        assert kept._items.stats()["hits"] == hits
    (row,) = [row for row in daemon.status()["preparations"] if row["name"] == name]
    assert row["prepared"] == len(dataset)
