"""Rows of reading without a daemon: a program for the original ffrecord, with its import swapped.

Each contestant is the same program with one import or another: `ffrecord`, or `ffserve` in its
place. Where the original is not installed, `StandIn` replaces it, and limits are not judged.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import multiprocessing
import os
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ffserve
from benchmarks.harness import cgroup, measuring
from ffserve.bench import samples
from ffserve.bench.ceilings import Case, Delivered, delivering

KIB = 1024
HERE = "benchmarks.subjects.local"
FORKED = 4
WORKERS = 2
HALF_BESIDE = 80 * samples.MIB
"""Memory of a process beside its page cache, where half of the data fit."""
TIMES = {4 * KIB: 1.4, 100 * KIB: 2.5}
"""Goals with all of the data in memory."""
QUEUE_SIZE = 64 * KIB
"""Smaller samples take less time than a queue of multiprocessing takes to hand out one index."""

Note = Callable[[str], None]


# --------------------------------------------------------------------------- contestants


class StandIn:
    """What the original does for a batch, in Python: a buffered read and a checksum per sample."""

    def __init__(self, path: str, check_data: bool = True) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        with ffserve.open(path, server="off") as reader:
            starts, lengths, sums = reader.tables(0)
        self.n = len(starts)
        self._tables = starts.astype(np.int64), lengths.astype(np.int64), sums
        self._check = check_data

    def read(self, indices: list[int]) -> list[NDArray[np.uint8]]:
        """Return an array per sample."""
        starts, lengths, sums = (table[indices].tolist() for table in self._tables)
        arrays = [np.empty(length, np.uint8) for length in lengths]
        for array, start, checksum in zip(arrays, starts, sums, strict=True):
            os.preadv(self.fd, [array], start)
            assert not self._check or zlib.crc32(array) == checksum
        return arrays

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


class Nothing:
    """Reads nothing: what is left is the program itself, for instance its queue."""

    def read(self, indices: list[int]) -> list[NDArray[np.uint8]]:
        """Return no array."""
        return []

    def close(self) -> None:
        """There is nothing to close."""


def _reader(case: Case) -> Any:
    """Return the FileReader of the package that the case names."""
    [path] = case["paths"]
    if case["package"] == "nothing":
        return Nothing()
    if case["package"] in ("preadv", "stand-in"):
        return StandIn(path, check_data=case["package"] == "stand-in")
    return importlib.import_module(case["package"]).FileReader(path)


def hot(case: Case) -> Delivered:
    """Read random batches."""
    reader = _reader(case)

    def read(indices: NDArray[np.int64]) -> int:
        return sum(sample.nbytes for sample in reader.read(indices.tolist()))

    return delivering(case, read)


def epochs(case: Case) -> Delivered:
    """Read every sample once per epoch, each epoch in an order of its own."""
    reader = _reader(case)
    yield 0, 0
    for epoch in range(case["epochs"]):
        order = np.random.default_rng([case["seed"], epoch]).permutation(case["count"])
        for first in range(0, len(order), case["batch"]):
            indices = order[first : first + case["batch"]].tolist()
            yield len(indices), sum(sample.nbytes for sample in reader.read(indices))


def forked(case: Case) -> Delivered:
    """Fork processes that share a reader and take runs of samples from a queue, over and over."""
    reader = _reader(case)
    count, step = case["count"], case["batch"]
    fork = multiprocessing.get_context("fork")

    def work(runs: Any) -> None:
        while (run := runs.get()) is not None:
            reader.read(list(range(run, min(run + step, count))))
        reader.close()

    while True:
        runs = fork.Queue()
        for first in range(0, count, step):
            runs.put(first)
        for _ in range(FORKED):
            runs.put(None)
        workers = [fork.Process(target=work, args=(runs,)) for _ in range(FORKED)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not any(worker.exitcode for worker in workers)
        yield count, count * case["sample_size"]


def loader(case: Case) -> Delivered:
    """Bring batches of tensors to the training process by the package's Dataset and DataLoader."""
    import torch

    if case["package"] == "stand-in":
        dataset: Any = _stand_in_dataset(case)
        loaders: Any = torch.utils.data
    else:
        loaders = importlib.import_module(f"{case['package']}.torch")

        class Samples(loaders.Dataset):  # type: ignore[misc,name-defined]
            def process(self, indices: list[int], data: list[Any]) -> list[Any]:
                return [torch.from_numpy(sample) for sample in data]

        dataset = Samples(case["paths"][0])
    batches = loaders.DataLoader(
        dataset, case["batch"], shuffle=True, num_workers=WORKERS, persistent_workers=True
    )
    while True:
        for batch in batches:
            yield len(batch), batch.nbytes


def _stand_in_dataset(case: Case) -> Any:
    import torch

    class Samples(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.reader = StandIn(case["paths"][0])

        def __len__(self) -> int:
            return self.reader.n

        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return [torch.from_numpy(sample) for sample in self.reader.read(indices)]

    return Samples()


# --------------------------------------------------------------------------- rows


class Local:
    """The groups over one data set.

    Args:
        small: the same samples, fewer of them: for epochs.
        note: takes a line about each group that cannot run.
    """

    def __init__(
        self,
        bench: measuring.Bench,
        data: samples.BenchmarkData,
        small: samples.BenchmarkData,
        note: Note,
    ) -> None:
        self._bench = bench
        self._data = data
        self._small = small
        self._note = note
        installed = importlib.util.find_spec("ffrecord") is not None
        self._original = "ffrecord" if installed else "stand-in"

    def groups(self, cold: samples.BenchmarkData) -> list[measuring.Group]:
        """Return all groups. Args: cold: more samples of the same size, for reading from disk."""
        return [
            self._hot(),
            *self._epochs("cold", cold, 1, against={self._original: 2.0}),
            *self._epochs("fit", self._small, 2, against={self._original: 1.5, "preadv": 0.95}),
            *self._half(),
            *(self._programs("forked", forked, batch) for batch in (1, 16, 64)),
            *self._loaders(),
        ]

    def _group(
        self,
        name: str,
        title: str,
        run: Callable[[str], measuring.Result],
        *,
        against: str,
        limit: float | None,
        data: samples.BenchmarkData,
        batch: int = 64,
    ) -> measuring.Group:
        """Return a group of one row: ffserve against the original or a loop of preadv."""
        substitute = against == "stand-in"
        yardstick = {
            "ffrecord": "the original ffrecord",
            "stand-in": "a loop of preadv and zlib.crc32 (no ffrecord)",
            "preadv": "a loop of preadv",
        }[against]
        beside = "preadv" if against == "preadv" else "ffrecord"
        row = measuring.Row(
            f"local/{data.name}/{name}/{beside}",
            "ffserve without a daemon",
            measuring.ratio,
            limit=limit,
        )
        return measuring.Group(
            f"without a daemon, {title}, {data.name}, batches of {batch}",
            measuring.Yardstick(yardstick, lambda: run(against), substitute),
            (measuring.Contestant("ffserve read", lambda: run("ffserve"), (row,)),),
            data.make,
            {"state": "local", "bytes": data.mean, "batch": batch, "clients": 1},
        )

    def _run(
        self,
        function: Callable[[Case], Delivered],
        package: str,
        data: samples.BenchmarkData,
        **case: Any,
    ) -> measuring.Result:
        return self._bench.run(f"{HERE}:{function.__name__}", data, package=package, **case)

    def _hot(self) -> measuring.Group:
        def run(package: str) -> measuring.Result:
            with measuring.held_in_memory(self._data.paths):
                return self._run(hot, package, self._data, warm=8)

        limit = TIMES.get(self._data.mean, 1.0)
        return self._group(
            "hot", "in the page cache", run, against=self._original, limit=limit, data=self._data
        )

    def _epochs(
        self,
        name: str,
        data: samples.BenchmarkData,
        count: int,
        *,
        against: dict[str, float],
        join: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[measuring.Group]:
        def run(package: str) -> measuring.Result:
            self._bench.from_disk(data.paths)
            with join() as group:
                return self._run(
                    epochs, package, data, epochs=count, seconds=1e9, warm=1,
                    before_exec=group.join if group is not None else None,
                )  # fmt: skip

        title = {
            "cold": "an epoch from disk",
            "fit": "two epochs",
            "half": "two epochs, half fits",
        }[name]
        return [
            self._group(name, title, run, against=other, limit=limit, data=data)
            for other, limit in against.items()
        ]

    def _half(self) -> list[measuring.Group]:
        size = HALF_BESIDE + self._small.size // 2
        try:
            with cgroup.limited(memory_size=size):
                pass
        except cgroup.NoCgroup as error:
            self._note(f"local/{self._small.name}/half: not measured, {error}")
            return []
        return self._epochs(
            "half", self._small, 2, against={self._original: 1.5, "preadv": 0.95},
            join=lambda: cgroup.limited(memory_size=size),
        )  # fmt: skip

    def _programs(
        self, name: str, function: Callable[[Case], Delivered], batch: int
    ) -> measuring.Group:
        def run(package: str) -> measuring.Result:
            with measuring.held_in_memory(self._small.paths):
                return self._run(function, package, self._small, batch=batch, warm=1)

        title = {
            "forked": f"{FORKED} forked processes",
            "loader": f"torch DataLoader with {WORKERS} workers",
        }[name]
        # One at a time from a queue, samples of a few KiB cost less than the queue.
        queue = name == "forked" and batch == 1 and self._small.mean < QUEUE_SIZE
        group = self._group(
            f"{name}{batch}", title, run, against=self._original, limit=None if queue else 1.2,
            data=self._small, batch=batch,
        )  # fmt: skip
        if name != "forked":
            return group
        row = measuring.Row(
            f"local/{self._small.name}/{name}{batch}/nothing", "nothing is read", measuring.ratio
        )
        bound = measuring.Contestant("nothing is read", lambda: run("nothing"), (row,))
        return dataclasses.replace(group, contestants=(*group.contestants, bound))

    def _loaders(self) -> list[measuring.Group]:
        if importlib.util.find_spec("torch") is None:
            self._note(f"local/{self._small.name}/loader: not measured, torch is not installed")
            return []
        return [self._programs("loader", loader, batch) for batch in (16, 64, 256)]
