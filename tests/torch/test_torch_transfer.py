"""Transfer from workers to the training process: batches as from torch, and nothing left over."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transfer_cases as cases
from daemon import DEADLINE_S, until
from transfer_cases import alike

import ffserve
from ffserve.torch import DataLoader, EpochSampler, loader
from ffserve.torch.messages import segments

START_METHODS = ["fork", "spawn", "forkserver"]
COUNT, SIZE = 96, 5000


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    for child in multiprocessing.active_children():
        child.join(DEADLINE_S)
    assert not multiprocessing.active_children()
    assert mapped() == 0
    assert not segments._receivers, "with its sockets"


def mapped() -> int:
    """Return the number of segments that this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:ffserve-batch")


def held(batches: DataLoader) -> int:
    """Return the number of segments that a loader knows."""
    receiver = batches._receiver
    assert receiver is not None
    return sum(map(len, receiver._segments))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[np.ndarray]]:
    random = np.random.default_rng(7)
    sizes = random.integers(SIZE // 2, SIZE, COUNT)
    samples = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    path = tmp_path_factory.mktemp("transfer") / "a.ffr"
    with ffserve.create(path, n=COUNT) as writer:
        for sample in samples:
            writer.write(sample)
    return str(path), samples


@pytest.fixture(params=["daemon", "alone"])
def source(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    shard: tuple[str, list[np.ndarray]],
) -> Iterator[tuple[str, list[np.ndarray]]]:
    if request.param == "alone":
        monkeypatch.setenv("FFSERVE_SOCKET", "/nonexistent")
        yield shard
        return
    daemon = request.getfixturevalue("daemon")
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    yield shard


def lists_of(dataset: Any, num_workers: int = 1, **options: Any) -> DataLoader:
    """Return a loader whose batches are lists of samples."""
    return DataLoader(dataset, num_workers=num_workers, collate_fn=cases.keep_list, **options)


# What arrives


@pytest.mark.check
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("start_method", "dataset"),
    [(method, cases.Everything(6)) for method in START_METHODS]
    + [("fork", cases.NeedsTorch(3)), ("fork", cases.Related(3))],
)
def test_batches_arrive_as_torch_hands_them_over(start_method: str, dataset: Any) -> None:
    options: dict[str, Any] = {"batch_size": 3, "collate_fn": cases.keep_list, "num_workers": 1}
    ours = list(DataLoader(dataset, multiprocessing_context=start_method, **options))
    theirs = list(torch.utils.data.DataLoader(dataset, **options))
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert alike(mine, other)
    del ours, theirs, mine, other


def test_tensors_over_one_memory_share_it_again_and_a_part_crosses_alone() -> None:
    (batch,) = DataLoader(cases.Related(1), num_workers=1, collate_fn=cases.first_only)
    whole, column, again, part = batch
    assert whole is again
    column += 5
    assert whole[:, 0].tolist() == [5.0] * 300
    assert whole[:, 1].tolist() == [0.0] * 300
    assert part.untyped_storage().nbytes() == 400


@pytest.mark.check
@pytest.mark.parametrize(("start_method", "bundle"), [("fork", 1), ("fork", 3), ("forkserver", 3)])
def test_raw_samples_are_writable_and_share_nothing(
    source: tuple[str, list[np.ndarray]], start_method: str, bundle: int
) -> None:
    path, samples = source
    options: dict[str, Any] = {"multiprocessing_context": start_method, "bundle": bundle}
    batches = lists_of(cases.Raw(path), batch_size=10, num_workers=2, **options)
    position = 0
    for batch in batches:
        for array in batch:
            assert array.flags.writeable and array.dtype == np.uint8
            assert np.array_equal(array, samples[position])
            position += 1
        batch[0][:] = 0
        assert all(
            np.array_equal(a, b)
            for a, b in zip(batch[1:], samples[position - len(batch) + 1 :], strict=False)
        )
    assert position == COUNT
    del batch, array


@pytest.mark.check
def test_arrays_that_share_memory_in_the_worker_do_not_share_it_here(
    source: tuple[str, list[np.ndarray]],
) -> None:
    path, samples = source
    for batch in lists_of(cases.Labelled(path), batch_size=8):
        for index, array, tensor, head in batch:
            head[:] = 1
            tensor += 1
            assert np.array_equal(array, samples[index])
            assert np.array_equal(tensor.numpy(), samples[index] + np.uint8(1))
    del batch, array, tensor, head


def test_collation_is_torchs(tmp_path: Path) -> None:
    with ffserve.create(tmp_path / "even.ffr", n=32) as writer:
        for k in range(32):
            writer.write(np.full(9000, k, np.uint8))
    dataset = cases.Tensors(str(tmp_path / "even.ffr"))
    ours = list(DataLoader(dataset, batch_size=10, num_workers=2))
    theirs = list(torch.utils.data.DataLoader(dataset, batch_size=10))
    assert all(map(alike, ours, theirs)) and len(ours) == len(theirs) == 4
    del ours


def test_a_collate_fn_that_calls_torchs_makes_no_files() -> None:
    def batches(kind: Any) -> list[Any]:
        return list(
            kind(cases.Pairs(48), batch_size=6, num_workers=1, collate_fn=cases.collate_more)
        )

    ours, theirs = batches(DataLoader), batches(torch.utils.data.DataLoader)
    assert sum(batch.pop("shm") for batch in theirs) > 0
    assert sum(batch.pop("shm") for batch in ours) == 0
    assert alike(ours, theirs)
    assert not any(batch["x"].is_shared() for batch in ours)


def test_a_users_change_of_torchs_collation_stays() -> None:
    batches = DataLoader(
        cases.Pairs(8), batch_size=4, num_workers=1, worker_init_fn=cases.collate_by_sums
    )
    assert [batch["x"].shape for batch in batches] == [(50, 60)] * 2


@pytest.mark.check
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_torch_without_the_private_names_gives_the_same_batches(num_workers: int) -> None:
    """In a process of its own, which deletes the names before it imports ffserve."""
    program = textwrap.dedent(f"""
        from torch.utils.data._utils import collate
        del collate.collate_tensor_fn
        import transfer_cases as cases
        from ffserve.torch import DataLoader
        from ffserve.torch.messages import transfer
        assert transfer.collate_tensor_fn is None
        transfer.getattr = lambda iterator, name, default: default  # of keep_queues
        for batch in DataLoader(cases.Pairs(40), batch_size=10, num_workers={num_workers}):
            print(batch["z"].tolist(), float(batch["x"].sum()))
    """)
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"{list(range(k, k + 10))} {3000.0 * sum(range(k, k + 10))}" for k in range(0, 40, 10)
    ]


@pytest.mark.check
def test_a_dataset_may_keep_what_it_read(source: tuple[str, list[np.ndarray]]) -> None:
    path, samples = source
    batches = lists_of(cases.Caching(path), batch_size=8, persistent_workers=True)
    for _ in range(3):
        position = 0
        for batch in batches:
            for array in batch:
                assert np.array_equal(array, samples[position])
                array[:] = 0
                position += 1
        assert position == COUNT
    del batch, array, batches


@pytest.mark.check
def test_without_shared_memory_everything_arrives_through_the_queue(
    source: tuple[str, list[np.ndarray]],
) -> None:
    path, samples = source
    batches = lists_of(cases.Raw(path), batch_size=32, worker_init_fn=cases.no_more_memory)
    arrays = [array for batch in batches for array in batch]
    assert mapped() == 0
    assert all(map(np.array_equal, arrays, samples)) and len(arrays) == COUNT
    assert all(array.flags.writeable for array in arrays)


# Lifetime of batches


@pytest.mark.check
@pytest.mark.parametrize("limit", [0, 1 << 20, 1 << 30])
def test_batches_that_are_kept_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(loader, "memory_limit", lambda: limit)
    batches = lists_of(cases.Made(60), batch_size=2, num_workers=2)
    iterator = iter(batches)
    kept = list(iterator)
    assert [int(array[0]) for batch in kept for array in batch] == list(range(60))
    assert all((array == array[0]).all() for batch in kept for array in batch)
    segment = 320_000
    assert held(batches) <= 2 * (limit // segment + 6), "no more than was allowed"
    del kept, iterator, batches


@pytest.mark.check
def test_memory_does_not_grow_while_a_few_batches_are_kept() -> None:
    batches = lists_of(cases.Made(400), batch_size=2)
    window: list[Any] = []
    most = 0
    for number, batch in enumerate(batches):
        assert [int(array[0]) for array in batch] == [2 * number, 2 * number + 1]
        window = [*window[-2:], batch]
        most = max(most, mapped())
    assert 1 <= most <= 10
    del window, batch, batches


@pytest.mark.check
def test_a_child_of_the_training_process_keeps_what_it_saw() -> None:
    batches = iter(DataLoader(cases.Made(80), num_workers=1, collate_fn=cases.first_only))
    for _ in range(10):
        batch = next(batches)
    parents, childs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=look_again, args=(batch, childs))
    child.start()
    del batch
    for batch in batches:
        batch[:] = -1
    parents.send("look")
    assert parents.poll(30)
    assert parents.recv() == [9]
    child.join()
    parents.close()
    childs.close()
    del batch, batches


def look_again(batch: np.ndarray, channel: Any) -> None:
    channel.recv()
    channel.send(np.unique(batch).tolist())
    # Dropping it here must not give it back in the parent's name.
    del batch
    gc.collect()


@pytest.mark.check
def test_a_child_that_drops_a_batch_does_not_return_its_segment() -> None:
    batches = iter(DataLoader(cases.Made(40), num_workers=1, collate_fn=cases.first_only))
    batch = next(batches)
    pid = os.fork()
    if pid == 0:
        del batch
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    others = [int(other[0]) for other in batches]
    assert others == list(range(1, 40))
    assert np.unique(batch).tolist() == [0]
    del batch, batches


# Ends


@pytest.mark.check
@pytest.mark.parametrize("persistent", [False, True])
def test_an_abandoned_loader_leaves_nothing(persistent: bool) -> None:
    batches = DataLoader(cases.Made(40), num_workers=2, persistent_workers=persistent)
    iterator = iter(batches)
    kept = next(iterator)
    assert mapped() > 0
    del batches, iterator
    gc.collect()
    assert int(kept[0, 0]) == 0
    assert mapped() == 1, "what is kept, and no more"


@pytest.mark.check
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_an_iterator_in_a_reference_cycle_end_by_themselves(
    monkeypatch: pytest.MonkeyPatch, persistent: bool
) -> None:
    killed = []
    kill = multiprocessing.process.BaseProcess.terminate

    def terminate(worker: Any) -> None:
        killed.append(worker)
        kill(worker)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "terminate", terminate)
    batches = DataLoader(cases.Made(40), num_workers=2, persistent_workers=persistent)
    iterator = iter(batches)
    next(iterator)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    circle: list[Any] = [iterator, batches]
    circle.append(circle)
    del batches, iterator, circle
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert not killed


@pytest.mark.check
@pytest.mark.parametrize("bundle", [1, 4])
@pytest.mark.parametrize("kind", [ValueError, ffserve.ReadError])
def test_an_error_that_was_caught_holds_no_workers(bundle: int, kind: type[Exception]) -> None:
    workers = []

    def failed() -> bool:
        batches = DataLoader(cases.Raising(40, kind=kind), num_workers=2, bundle=bundle)
        try:
            for _ in batches:
                workers.extend(multiprocessing.active_children())
        except kind:
            return True
        return False

    gc.collect()
    gc.disable()
    try:
        assert failed()
        assert {worker.exitcode for worker in workers} == {0}
    finally:
        gc.enable()


@pytest.mark.check
def test_an_error_of_a_worker_kept_all_workers_until_garbage_was_collected() -> None:
    def failed() -> list[Any]:
        iterator = iter(
            DataLoader(cases.Made(40), num_workers=2, worker_init_fn=cases.fail_to_begin)
        )
        workers = multiprocessing.active_children()
        with pytest.raises(ValueError, match="cannot begin"):
            next(iterator)
        return workers

    gc.collect()
    gc.disable()
    try:
        assert [worker.exitcode for worker in failed()] == [0, 0]
    finally:
        gc.enable()


def test_a_killed_worker_leaves_nothing() -> None:
    batches = DataLoader(cases.Failing(40, dies=20), num_workers=1, collate_fn=cases.first_only)
    got = []
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|Killed"):
        for batch in batches:
            got.append(batch)
    assert [int(batch[0]) for batch in got] == list(range(len(got)))
    del got, batch, batches


@pytest.mark.check
def test_a_killed_training_process_leaves_nothing() -> None:
    program = textwrap.dedent("""
        import sys, transfer_cases as cases
        from ffserve.torch import DataLoader
        batches = DataLoader(cases.Made(10**6), num_workers=2)
        iterator = iter(batches)
        kept = [next(iterator) for _ in range(5)]
        print(*(w.pid for w in iterator._messages._workers), flush=True)
        sys.stdin.read()
    """)
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None and process.stdin is not None
    workers = process.stdout.readline().split()
    process.kill()
    process.wait()
    process.stdout.close()
    process.stdin.close()
    assert len(workers) == 2
    until(lambda: not any(is_running(pid.decode()) for pid in workers), "the workers end")
    left = set(os.listdir("/dev/shm")) - before  # its files, and those of tests that run meanwhile
    until(lambda: not left & set(os.listdir("/dev/shm")), "nothing is left of it")


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# Several batches in one message


def test_an_error_within_a_message_is_raised_for_its_batch() -> None:
    batches = iter(
        DataLoader(
            cases.Failing(10, raises=2), num_workers=1, collate_fn=cases.first_only, bundle=4
        )
    )
    got: list[Any] = []
    while True:
        try:
            got.append(int(next(batches)[0]))
        except KeyError as error:
            assert "no colour 2" in str(error) and "worker process 0" in str(error)
            got.append("error")
        except StopIteration:
            break
    assert got == [0, 1, "error", 3, 4, 5, 6, 7, 8, 9]


def test_a_position_within_a_message_is_exact() -> None:
    def fresh() -> tuple[EpochSampler, DataLoader]:
        sampler = EpochSampler(20, seed=3)
        options: dict[str, Any] = {"num_workers": 1, "collate_fn": cases.keep_list}
        return sampler, DataLoader(
            cases.Made(20), batch_size=2, sampler=sampler, bundle=4, **options
        )

    sampler, batches = fresh()
    order = sampler.order().tolist()
    iterator = iter(batches)
    for _ in range(5):
        next(iterator)
    state = batches.state_dict()
    _, restored = fresh()
    restored.load_state_dict(state)
    rest = [int(array[0]) for batch in restored for array in batch]
    assert rest == order[10:]
    del iterator, batches


@pytest.mark.check
def test_small_batches_share_messages_and_large_ones_do_not(
    shard: tuple[str, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", "/nonexistent")
    for batch_size, expected in ((2, 12), (16, 1)):
        batches = lists_of(cases.Raw(shard[0]), batch_size=batch_size)
        assert len(list(batches)) == COUNT // batch_size
        assert batches._inner is not None
        assert batches._inner.sampler.message_batches == expected
    with pytest.raises(ffserve.UsageError, match="bundle"):
        DataLoader(cases.Made(3), bundle=0)
