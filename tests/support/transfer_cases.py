"""Datasets for tests of the transfer, in a module that spawned workers can import."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections import namedtuple
from typing import Any

import numpy as np
import torch

from ffserve.torch import Dataset

Pair = namedtuple("Pair", "left right")


def keep_list(samples: list[Any]) -> list[Any]:
    return samples


def first_only(samples: list[Any]) -> Any:
    return samples[0]


def no_more_memory(worker: int) -> None:
    """Forbid this process to create files or shared memory of any size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def fail_to_begin(worker: int) -> None:
    raise ValueError(f"worker {worker} cannot begin")


class Made(Dataset):
    """Sample i is `make(i)`."""

    def __init__(self, n: int, **options: Any) -> None:
        self.n = n
        self.options = options

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, indices: Any) -> list[Any]:
        return [self.make(i) for i in indices]

    def make(self, index: int) -> Any:
        return np.full(self.options.get("size", 40_000), index, np.int32)


class Everything(Made):
    def make(self, index: int) -> Any:
        random = np.random.default_rng(index)
        grid = random.integers(0, 99, (60, 70)).astype(np.int32)
        fixed = grid.copy()
        fixed.flags.writeable = False
        tensor = torch.from_numpy(random.random((50, 60)))
        return {
            "arrays": [
                grid,
                grid.T,
                grid[::2, 1:],
                np.asfortranarray(grid),
                fixed,
                np.float32(index) * np.ones(()),
                np.empty((0, 3), np.uint16),
                np.array(["a", "bcd"]),
                np.array([1, "x", None], object),
                np.array([(1, 2.5)], [("a", "i2"), ("b", ">f8")]),
            ],
            "tensors": (
                tensor,
                tensor.t(),
                tensor[::3, 5:7],
                tensor.to(torch.bfloat16),
                tensor.to(torch.complex64),
                tensor > 0.5,
                torch.tensor(index),
                torch.empty(0, 4, dtype=torch.int16),
                torch.arange(3).expand(1000, 3),
            ),
            "pair": Pair(np.float64(0.5), [index, str(index), None, 2**80]),
            "text": b"x" * 50_000,
            "rows": [random.integers(0, 256, 100 * k, dtype=np.uint8) for k in range(20)],
            "set": {index, "s"},
        }


class Related(Made):
    """Tensors over one memory, one tensor twice, and a small part of a large memory."""

    def make(self, index: int) -> Any:
        whole = torch.full((300, 100), float(index))
        large = torch.full((1 << 22,), index, dtype=torch.int32)
        return whole, whole[:, 0], whole, large[1000:1100]


class NeedsTorch(Made):
    """Tensors that only torch can hand over."""

    def make(self, index: int) -> Any:
        grown = torch.full((20_000,), float(index), requires_grad=True)
        sparse = torch.eye(3).to_sparse() * index
        return {"grown": grown, "sparse": sparse, "parameter": torch.nn.Parameter(torch.ones(2))}


class Raw(Dataset):
    def process(self, indices: Any, data: list[Any]) -> Any:
        return data


class Labelled(Dataset):
    """Each sample twice, once as a tensor over the very same memory."""

    def process(self, indices: Any, data: list[Any]) -> Any:
        return [(i, d, torch.from_numpy(d), d[:10]) for i, d in zip(indices, data, strict=True)]


class Tensors(Dataset):
    def process(self, indices: Any, data: list[Any]) -> Any:
        return [torch.from_numpy(d) for d in data]


class Caching(Dataset):
    """Keeps every sample that it has read."""

    def __init__(self, fnames: Any) -> None:
        super().__init__(fnames)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, indices: Any) -> Any:
        wanted = [i for i in indices if i not in self.cache]
        if wanted:
            self.cache.update(zip(wanted, self.reader.read(wanted), strict=True))
        return [self.cache[i] for i in indices]


class Failing(Made):
    """One batch raises an error, one kills its worker."""

    def make(self, index: int) -> Any:
        if index == self.options.get("raises"):
            raise KeyError(f"no colour {index}")
        if index == self.options.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().make(index)


class Raising(Made):
    """Sample 20 raises an error."""

    def make(self, index: int) -> Any:
        if index == 20:
            raise self.options["kind"](f"no colour {index}")
        return super().make(index)


class Keeping(Dataset):
    """Tensors over samples that it keeps, and overwrites when it is called again."""

    def __init__(self, fnames: Any) -> None:
        super().__init__(fnames)
        self.last: list[Any] = []

    def process(self, indices: Any, data: list[Any]) -> Any:
        for sample in self.last:
            sample[:] = 255
        self.last = data
        return [torch.from_numpy(d) for d in data]


class Waiting:
    """A worker_init_fn: one worker waits until a file is there."""

    def __init__(self, path: str, worker: int) -> None:
        self.path = path
        self.worker = worker

    def __call__(self, worker: int) -> None:
        while worker == self.worker and not os.path.exists(self.path):
            time.sleep(0.01)


class Placed(Dataset):
    """For each sample its index, its first byte, and whether the samples kept so far, if it keeps
    them, are still as they were."""

    def __init__(self, fnames: Any, *, keeps: bool = False) -> None:
        super().__init__(fnames)
        self.keeps = keeps
        self.kept: list[tuple[int, Any]] = []

    def process(self, indices: Any, data: list[Any]) -> Any:
        found = [(i, int(d[0])) for i, d in zip(indices, data, strict=True)]
        intact = all((array == index % 256).all() for index, array in self.kept)
        if self.keeps:
            self.kept += zip(indices, map(torch.from_numpy, data), strict=True)
        return [torch.tensor([*each, intact]) for each in found]


class Various(Dataset):
    """Samples of all kinds that default collation accepts."""

    def process(self, indices: Any, data: list[Any]) -> Any:
        made = []
        for index, sample in zip(indices, data, strict=True):
            whole = torch.from_numpy(sample[:64])
            grid = whole.view(8, 8)
            made.append(
                {
                    "image": (whole, grid.t(), grid[::2, 1:]),
                    "half": whole.to(torch.bfloat16),
                    "mask": whole > 7,
                    "complex": torch.complex(grid.float(), grid.float()),
                    "label": index,
                    "scale": index / 3,
                    "name": str(index),
                    "array": sample[2:10],
                    "pair": Pair(torch.tensor(index), [whole[:0], whole[3]]),
                }
            )
        return made


class Uneven(Dataset):
    """Tensors of different sizes in some batches."""

    def process(self, indices: Any, data: list[Any]) -> Any:
        return [torch.from_numpy(d[: 64 - i // 20]) for i, d in zip(indices, data, strict=True)]


class Indexed(Dataset):
    """The index and the first byte of each sample that `process` gets."""

    def process(self, indices: Any, data: list[Any]) -> Any:
        return [torch.tensor([i, int(d[0])]) for i, d in zip(indices, data, strict=True)]


class Pairs(Made):
    """Small samples of several tensors."""

    def make(self, index: int) -> Any:
        return {"x": torch.full((50, 60), float(index)), "y": np.full(900, index), "z": index}


def collate_more(samples: list[Any]) -> Any:
    return {**torch.utils.data.default_collate(samples), "shm": shared_files()}


def shared_files() -> int:
    """Return the number of torch's shared files that this process maps."""
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm/torch_" in line for line in maps)


def sum_tensors(tensors: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0)


def collate_by_sums(worker: int) -> None:
    torch.utils.data._utils.collate.default_collate_fn_map[torch.Tensor] = sum_tensors


class Calls(Dataset):
    """A sample's index, and the number of samples that its reader has read."""

    def process(self, indices: Any, data: list[Any]) -> Any:
        samples = self.reader._open().stats()["samples"]
        return [torch.tensor([index, samples]) for index in indices]


def alike(ours: Any, theirs: Any) -> bool:
    """Whether two batches are the same in type, layout, access and value."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return (
            ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and ours.layout == theirs.layout
            and ours.requires_grad == theirs.requires_grad
            and (ours.layout != torch.strided or ours.stride() == theirs.stride())
            and bool((ours.to_dense() == theirs.to_dense()).all())
        )
    if isinstance(ours, np.ndarray):
        return (
            ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and ours.flags.f_contiguous == theirs.flags.f_contiguous
            and ours.flags.writeable == theirs.flags.writeable
            and bool(np.all(ours == theirs))
        )
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(alike(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    return bool(ours == theirs)
