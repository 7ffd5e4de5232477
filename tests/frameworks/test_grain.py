"""ffserve.grain under the real Grain."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import ffserve
import ffserve.grain

grain = pytest.importorskip("grain", reason="Grain is not installed (make interop)")

SAMPLES = [bytes([k]) * (k + 1) for k in range(50)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file of 50 samples."""
    with ffserve.create(tmp_path / "a.tfrecord") as writer:
        for sample in SAMPLES:
            writer.write(sample)
    return str(tmp_path / "a.tfrecord")


def test_source_in_a_map_dataset(path: str) -> None:
    source = ffserve.grain.Source(path, server="off")
    data = grain.MapDataset.source(source)
    assert len(data) == 50 and [bytes(data[k]) for k in range(50)] == SAMPLES
    shuffled = [bytes(each) for each in data.shuffle(seed=3)]
    assert shuffled != SAMPLES and sorted(shuffled) == sorted(SAMPLES)
    lengths = data.map(len).batch(10)
    assert np.array_equal(lengths[1], np.arange(11, 21))
    copy = pickle.loads(pickle.dumps(source))
    assert bytes(copy[-1]) == SAMPLES[-1] and len(copy) == 50 and repr(copy) == repr(source)
    with pytest.raises(IndexError):
        source[50]
    source.close()


def test_source_in_a_data_loader_with_workers(path: str) -> None:
    source = ffserve.grain.Source(path, server="off")
    sampler = grain.samplers.IndexSampler(50, shuffle=True, seed=1, num_epochs=1)
    for workers in (0, 2):
        loader = grain.DataLoader(data_source=source, sampler=sampler, worker_count=workers)
        assert sorted(bytes(each) for each in loader) == sorted(SAMPLES)
