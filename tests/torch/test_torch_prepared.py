"""`Dataset.prepare`: results shared by processes and jobs, as if each had prepared its own."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from daemon import Daemon, sample, serving, until, write
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from preparing import Prepared, digest, prepared, same

import ffserve.client.daemon.preparing
from ffserve.client.daemon.preparing import LOOKED_AT
from ffserve.errors import FormatError, UsageError
from ffserve.folders import pack
from ffserve.protocol import MOST_CLAIMED
from ffserve.torch import DataLoader, Dataset, EpochSampler, RawDataset, Subset
from ffserve.torch.prepared import key_of, pieces, value

N = 60


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files of N samples together."""
    contents = [sample(i, (1, 100, 700, 5000)) for i in range(N)]
    return [write(tmp_path / "a.ffr", contents[:25]), write(tmp_path / "b.ffr", contents[25:])]


@pytest.fixture
def log(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture(autouse=True)
def shared(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    # The tests count what is prepared: nothing is prepared again to be compared.
    monkeypatch.setattr(ffserve.client.daemon.preparing, "CHECKED_EVERY", 1 << 60)
    return iter(())


def truth(files: list[str], log: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each sample is without sharing."""
    with monkeypatch.context() as patch:
        patch.setenv("FFSERVE_SOCKET", "/nonexistent")
        return Prepared(files, log + "-unshared")[list(range(N))]


# ---- bytes ---------------------------------------------------------------------------------------

PARTS = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=20),
    st.none(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    arrays.arrays(arrays.scalar_dtypes(), arrays.array_shapes(min_dims=0, min_side=0)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]).map(
        lambda kind: torch.arange(12).reshape(3, 4).to(kind)
    ),
    st.sampled_from([np.float32(3), np.int64(-1), np.bool_(True), np.complex64(1j)]),
    st.just(torch.zeros(0, 3)),
    st.just(torch.tensor(7)),
)
VALUES = st.recursive(
    PARTS,
    lambda parts: st.one_of(
        st.lists(parts, max_size=4),
        st.lists(parts, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5), parts, max_size=4),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_a_result_survives_as_bytes(result: Any) -> None:
    packed = np.frombuffer(bytearray(b"".join(map(bytes, pieces(result)))), np.uint8)
    assert same(value(packed), result)


@given(VALUES, st.data())
def test_malformed_bytes_are_an_error_or_another_result(result: Any, data: st.DataObject) -> None:
    packed = bytearray(b"".join(map(bytes, pieces(result))))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, min(len(packed), 200) - 1))] = data.draw(
            st.integers(0, 255)
        )
    packed = packed[: data.draw(st.integers(0, len(packed)))]
    with contextlib.suppress(FormatError):
        value(np.frombuffer(packed, np.uint8))


@pytest.mark.parametrize(
    "result",
    [
        {1},
        {1: b""},
        {"x" * 64: b""},
        (1, [2, {"three": object()}]),
        1 << 63,
        np.array([None]),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, requires_grad=True),
        [0] * 256,
    ],
)
def test_other_results_are_refused(result: Any) -> None:
    with pytest.raises(UsageError, match=r"a sample has "):
        pieces(result)


# ---- keys ----------------------------------------------------------------------------------------


def test_keys_follow_source_name_and_version() -> None:
    class One(RawDataset):
        def prepare(self, indices: Any, data: Any) -> Any:
            return [len(each) for each in data]

    class Two(RawDataset):
        def prepare(self, indices: Any, data: Any) -> Any:
            return [len(each) + 1 for each in data]

    Two.__qualname__ = One.__qualname__
    one, two = One.__new__(One), Two.__new__(Two)
    assert key_of(one) == key_of(One.__new__(One))
    assert key_of(one) != key_of(two)
    before = key_of(one)
    one.prepare_version = (2, "b")
    assert key_of(one) != before
    one.prepare_version = object()
    with pytest.raises(UsageError, match="differs from process to process"):
        key_of(one)


# ---- sharing -------------------------------------------------------------------------------------


def test_what_one_dataset_prepared_another_finds(
    files: list[str], log: str, monkeypatch: pytest.MonkeyPatch, daemon: Daemon
) -> None:
    expected = truth(files, log, monkeypatch)
    one, other = Prepared(files, log), Prepared(files[0], log)
    assert all(map(same, one[list(range(N))], expected))
    assert sorted(prepared(log)) == list(range(N))
    assert all(map(same, other[list(range(25))], expected))
    assert all(map(same, one[[5, 5, 59, 0, 5]], [expected[i] for i in (5, 5, 59, 0, 5)]))
    assert same(one[-1], expected[-1])
    with pytest.raises(IndexError):
        one[[N]]
    assert len(prepared(log)) == N
    facts = [shard for shard in daemon.status()["shards"] if shard["format"] == "prepared"]
    assert {shard["count"] for shard in facts} >= {25, N - 25}
    got = one[[1]][0][0]
    got += 5
    assert same(one[[1]][0], expected[1]), "samples belong to who reads them"


def test_results_that_depend_on_the_index_are_not_those_of_another_data_set(
    files: list[str], log: str
) -> None:
    Prepared(files, log)[list(range(N))]
    assert [label for _, label in Prepared(files[1], log)[[0, 1]]] == [0, 1]


class OnlyPrepared(Prepared):
    """What `prepare` returns are the samples."""

    process = Dataset.process


def test_prepared_samples_need_no_process(files: list[str], log: str) -> None:
    dataset = OnlyPrepared(files, log)
    for _ in range(2):  # prepared here, and found
        (got, index), *_ = dataset[[7, 8]]
        (raw,) = dataset.reader.read([7])
        assert index == 7 and np.array_equal(got.numpy(), raw)
    assert prepared(log) == [7, 8]


def test_repeats_in_one_batch_are_prepared_once(files: list[str], log: str) -> None:
    dataset = Prepared(files, log)
    batch = dataset[[3, 3, 4, 3]]
    assert prepared(log) == [3, 4]
    assert same(batch[0], batch[3]) and batch[0][0] is not batch[1][0]


def test_of_a_large_batch_only_a_part_was_shared(tmp_path: Path, log: str) -> None:
    everything = list(range(MOST_CLAIMED + 20))
    file = write(tmp_path / "many.ffr", [sample(i, (100,)) for i in everything])
    first, second = (Prepared([file], log)[everything] for _ in range(2))
    assert all(map(same, first, second))
    assert sorted(prepared(log)) == everything


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_of_a_second_epoch_prepare_nothing(
    files: list[str], log: str, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    expected = truth(files, log, monkeypatch)
    sampler = EpochSampler(N, seed=1)
    loader = DataLoader(
        Prepared(files, log), batch_size=7, sampler=sampler, num_workers=workers, collate_fn=list
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        got = [each for batch in loader for each in batch]
        assert all(map(same, got, [expected[i] for i in sampler.order(epoch)]))
    assert sorted(prepared(log)) == list(range(N))


def test_raw_samples_are_read_ahead_in_the_first_epoch_only(
    files: list[str], log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ahead() -> tuple[int, list[list[int]]]:
        facts = daemon.status()
        mine = [row["announced"] for row in facts["progress"] if row["announced"]]
        return facts["cache"]["prefetched"], sorted(mine)

    with serving() as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        dataset = Prepared(files, log, pause_s=0.002)
        dataset.announce(np.arange(N), 0)
        dataset.announce(np.arange(N)[::-1], 1)
        until(lambda: ahead()[0] > 0, "raw samples are read ahead")
        assert ahead()[1] == [[0], [0, 1]]
        for first in range(0, N, 10):
            dataset[list(range(first, first + 10))]
            dataset.reached(0, first + 10)
        before = ahead()[0]
        later = Prepared(files, log)
        later.announce(np.arange(N), 0)
        later.announce(np.arange(N)[::-1], 1)
        later[list(range(N))]
        assert ahead()[0] == before and len(prepared(log)) == N


def test_the_order_of_many_samples_was_not_announced(
    tmp_path: Path, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second sample of an order is no contiguous array."""
    count = LOOKED_AT + 1
    file = write(tmp_path / "many.ffr", [sample(i, (100,)) for i in range(count)])
    with serving() as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        dataset = Prepared([file], log)
        dataset.announce(np.arange(count), 0)
        announced = [row["announced"] for row in daemon.status()["progress"] if row["announced"]]
        assert announced == [[0], [0]], "raw and prepared samples"


def job(log: str, pause_ms: int, batch: int, files: list[str]) -> subprocess.Popen[str]:
    program = str(Path(__file__).parents[1] / "support" / "preparing.py")
    paths = os.pathsep.join([str(Path(program).parent), str(Path(__file__).parents[2])])
    return subprocess.Popen(
        [sys.executable, program, log, str(pause_ms), str(batch), *files],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )


@pytest.mark.check
def test_jobs_at_the_same_time_prepare_each_sample_once(
    files: list[str], log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest(truth(files, log, monkeypatch))
    jobs = [job(log, 2, batch, files) for batch in (7, 11, 7)]
    for each in jobs:
        got, _ = each.communicate(timeout=120)
        assert got.split() == ["ready", expected] and each.returncode == 0
    assert sorted(prepared(log)) == list(range(N))


@pytest.mark.check
def test_a_worker_that_dies_while_it_prepares(
    files: list[str], log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest(truth(files, log, monkeypatch))
    hanging = job(log, 100_000, N, files)
    until(lambda: prepared(log), "the first job prepares")
    other = job(log + "-other", 0, 20, files)
    assert other.stdout is not None and other.stdout.readline() == "ready\n"
    hanging.send_signal(signal.SIGKILL)
    hanging.communicate()
    got, _ = other.communicate(timeout=60)
    assert got.split() == [expected]
    assert sorted(prepared(log + "-other")) == list(range(N))


def test_prepare_that_raises(files: list[str], log: str) -> None:
    class Failing(Prepared):
        def prepare(self, indices: Any, data: Any) -> Any:
            if os.path.exists(log + "-fail"):
                raise ValueError("no picture")
            return super().prepare(indices, data)

    Path(log + "-fail").touch()
    one, other = Failing(files, log), Failing(files, log)
    with pytest.raises(ValueError, match="no picture"):
        one[[1, 2]]
    with pytest.raises(ValueError, match="no picture"):
        other[[1, 2]]
    os.unlink(log + "-fail")
    assert len(other[[1, 2]]) == 2
    assert len(one[[1, 2]]) == 2 and prepared(log) == [1, 2]


def test_a_preparation_of_chance_is_found_out(
    files: list[str],
    tmp_path: Path,
    log: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Random(Prepared):
        def prepare(self, indices: Any, data: Any) -> Any:
            super().prepare(indices, data)
            return [np.frombuffer(os.urandom(64), np.uint8) for _ in indices]

        def process(self, indices: Any, data: Any) -> Any:
            return data

    monkeypatch.setattr(ffserve.client.daemon.preparing, "CHECKED_EVERY", 1)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "x").write_bytes(b"x")
    files = [*pack([tmp_path / "tree"], tmp_path / "packed.ffr").paths, *files]
    one, other = Random(files, log), Random(files, log)
    one[[1]]
    with caplog.at_level(logging.WARNING, "ffserve"):
        other[[1]]
    assert "is not deterministic: it gave two results for sample 1;" in caplog.text
    count = len(prepared(log))
    other[[1, 2, 3]]
    one[[4, 5]]
    another = Random(files, log)
    another[[4, 5]]
    assert len(prepared(log)) == count + 7, "nothing is shared any more"


def test_results_larger_than_their_samples(files: list[str], log: str) -> None:
    class Large(Prepared):
        def prepare(self, indices: Any, data: Any) -> Any:
            super().prepare(indices, data)
            return [torch.full((index + 1, 50_000), float(index)) for index in indices]

        def process(self, indices: Any, data: Any) -> Any:
            return data

    one, other = Large(files, log), Large(files, log)
    for dataset in (one, other):
        for first in (0, 8):
            for index, tensor in enumerate(dataset[list(range(first, first + 8))], first):
                assert tensor.shape == (index + 1, 50_000) and (tensor == index).all()
    assert len(prepared(log)) == 16


def test_subsets_pickles_and_forks_share_too(files: list[str], log: str) -> None:
    dataset = Prepared(files, log)
    Subset(dataset, [4, 5, 6])[[0, 2]]
    assert prepared(log) == [4, 6]
    copied = pickle.loads(pickle.dumps(dataset))
    copied[[4, 7]]
    pid = os.fork()
    if pid == 0:
        try:
            dataset[[4, 6, 7, 8]]
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    dataset[[7, 8, 9]]
    assert prepared(log) == [4, 6, 7, 8, 9]


@pytest.mark.check
def test_a_daemon_that_goes_and_comes(
    files: list[str], log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = truth(files, log, monkeypatch)
    with serving() as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        dataset = Prepared(files, log)
        dataset.announce(np.arange(N), 0)
        dataset[[1, 2]]
        daemon.end(signal.SIGKILL)
        daemon.process = None
        daemon.start()
        assert all(map(same, dataset[[1, 2, 3]], expected[1:4]))

        def shares() -> bool:
            count = len(prepared(log))
            assert all(map(same, dataset[[1, 2, 3]], expected[1:4]))
            return len(prepared(log)) == count

        until(shares, "it shares samples of the new daemon")
        count = len(prepared(log))
        Prepared(files, log)[[1, 2, 3]]
        assert len(prepared(log)) == count
