"""PackedDataset: sequences of tokens from records, shuffled, announced and resumed like samples."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_cases as cases
from daemon import Daemon, until, write

from ffserve.errors import SampleIndexError, UsageError
from ffserve.torch import DataLoader, EpochSampler, PackedDataset

SIZES = [5, 30, 0, 12, 3, 3, 41, 1, 9, 16, 16, 2, 7]
LENGTH = 16


def documents() -> list[np.ndarray]:
    """Documents in which every token is different."""
    ends = np.cumsum(SIZES)
    return [
        np.arange(end - size, end, dtype=np.uint16) + 1
        for end, size in zip(ends, SIZES, strict=True)
    ]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "tokens.ffr", [tokens.tobytes() for tokens in documents()])


def packed(file: str, **arguments: Any) -> PackedDataset:
    return PackedDataset(file, LENGTH, **{"dtype": np.uint16, "seed": 1, **arguments})


def test_sequences_hold_every_token_once(file: str, server: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", server if server != "off" else "/nowhere")
    dataset = packed(file, pad=999)
    assert len(dataset) == len(dataset.plan) == 10
    texts = documents()
    tokens = []
    for index, sequence in enumerate(dataset[list(range(len(dataset)))]):
        assert {len(part) for part in sequence.values()} == {LENGTH}
        pieces = sequence["segments"].max()
        first, end = dataset.plan.offsets[index : index + 2]
        assert pieces == end - first
        for number in range(1, pieces + 1):
            here = sequence["segments"] == number
            piece = sequence["tokens"][here]
            assert sequence["positions"][here].tolist() == list(range(len(piece)))
            k = first + number - 1
            start = dataset.plan.starts[k]
            assert piece.tolist() == texts[dataset.plan.samples[k]][start:][: len(piece)].tolist()
        filled = sequence["segments"] > 0
        assert (sequence["tokens"][~filled] == 999).all()
        tokens += sequence["tokens"][filled].tolist()
        assert dataset[index]["tokens"].tolist() == sequence["tokens"].tolist()
    assert sorted(tokens) == list(range(1, sum(SIZES) + 1))
    assert dataset[[3, 3]][1]["tokens"].tolist() == dataset[3]["tokens"].tolist()
    for wrong in (-1, 10):
        with pytest.raises(SampleIndexError, match="10 sequences"):
            dataset[[wrong]]
    dataset.reader.close()


def test_a_loader_resumes_with_other_ranks_and_stacks_tensors(file: str) -> None:
    dataset = packed(file)
    state, used = None, []
    for world_size, workers, count in ((2, 0, 1), (1, 1, 2), (2, 0, 99)):
        states = []
        for rank in range(world_size):
            sampler = EpochSampler(len(dataset), seed=4, rank=rank, world_size=world_size)
            loader = DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=workers)
            if state is not None:
                loader.load_state_dict(state)
            for batch in islice(loader, count):
                assert isinstance(batch["tokens"], torch.Tensor)
                used += batch["tokens"][batch["segments"] > 0].tolist()
            states.append(loader.state_dict())
        state = states[0]
    assert sorted(used) == list(range(1, sum(SIZES) + 1))


def test_records_are_announced_in_the_order_of_their_sequences(file: str) -> None:
    dataset = packed(file)
    recorder = cases.Recorder(dataset.reader.n)
    reader, dataset.reader = dataset.reader, recorder
    dataset.announce(np.array([3, 0, 7]), 2)
    dataset.announce(np.arange(len(dataset)), 3)
    records = [
        dataset.plan.samples[dataset.plan.offsets[s] : dataset.plan.offsets[s + 1]].tolist()
        for s in range(len(dataset))
    ]
    assert recorder.orders == [
        (2, records[3] + records[0] + records[7]),
        (3, [record for each in records for record in each]),
    ]
    assert recorder.options[1] == (None, True), "long documents come several times"
    for position in range(5):
        dataset.reached(2, position)
    ends = np.cumsum([0, *(len(records[s]) for s in (3, 0, 7))]).tolist()
    assert recorder.positions == [(2, end) for end in [*ends, ends[-1]]]
    dataset.reached(9, 1)
    reader.close()


def test_a_daemon_follows_packed_sequences(file: str, daemon: Daemon, monkeypatch: Any) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    until(lambda: not daemon.status()["progress"], "the jobs of the tests before are gone")
    dataset = packed(file)
    loader = DataLoader(dataset, batch_size=2, sampler=EpochSampler(len(dataset), seed=0))
    for _ in islice(loader, 2):
        pass
    loader._plan._announcer.settle()
    progress = daemon.status()["progress"]
    assert [(p["count"], p["announced"]) for p in progress] == [(len(dataset.plan.samples), [0, 1])]
    dataset.reader.close()


def test_records_that_are_no_tokens_are_refused(file: str, tmp_path: Path) -> None:
    odd = write(tmp_path / "odd.ffr", [b"1234", b"12345"])
    with pytest.raises(UsageError, match=r"sample 1 has 5 bytes.* the 2 bytes of a token"):
        packed(odd)
    with pytest.raises(UsageError, match="tokens are integers"):
        packed(file, dtype=np.float32)
