"""Batches and leases cross to other libraries by DLPack, without a copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from daemon import write

import ffserve

PAYLOADS = [b"first", b"", bytes(range(200)), b"last" * 5000]


def test_a_batch_is_one_tensor(tmp_path: Path, server: str) -> None:
    with ffserve.open(write(tmp_path / "a.ffr", PAYLOADS), server=server) as reader:
        batch = reader.read_batch([3, 0, 2])
        array = np.from_dlpack(batch)
        assert array.tobytes() == PAYLOADS[3] + PAYLOADS[0] + PAYLOADS[2]
        assert np.shares_memory(array, batch.buffer)
        torch = pytest.importorskip("torch")
        tensor = torch.from_dlpack(batch)
        tensor[0] = 7
        assert batch.buffer[0] == 7
        assert torch.from_dlpack(batch[1]).tolist() == list(PAYLOADS[0])


def test_leased_samples_are_tensors_in_place(tmp_path: Path, server: str) -> None:
    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this numpy cannot export read-only arrays")
    with (
        ffserve.open(write(tmp_path / "a.ffr", PAYLOADS), server=server) as reader,
        reader.lease([2, 3]) as samples,
    ):
        array = np.from_dlpack(samples[1])
        assert array.tobytes() == PAYLOADS[3] and not array.flags.writeable
        assert np.shares_memory(array, samples[1])
        torch = pytest.importorskip("torch")
        assert torch.from_dlpack(samples[0]).tolist() == list(PAYLOADS[2])
