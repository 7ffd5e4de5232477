"""Datasets for tests of ffserve.torch, in a module that spawned workers can import."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed
import torch.distributed.device_mesh
import torch.utils.data

from ffserve.compat.ffrecord import FileReader
from ffserve.errors import ChecksumError, FFServeError
from ffserve.torch import DataLoader, Dataset, EpochSampler, RawDataset, data_rank

DAMAGED_INDEX = 9


class Recorder:
    """A reader that records announcements."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.orders: list[tuple[int, list[int]]] = []
        self.options: list[tuple[str | None, bool]] = []
        self.positions: list[tuple[int, int]] = []

    def announce(
        self,
        order: np.ndarray,
        epoch: int = 0,
        *,
        name: str | None = None,
        replacement: bool = False,
    ) -> None:
        assert order.dtype == np.int64
        self.orders.append((epoch, order.tolist()))
        self.options.append((name, replacement))

    def reached(self, epoch: int, position: int) -> None:
        self.positions.append((epoch, position))


class Numbers(Dataset):
    """Sample i is (i, 3 i, size of the batch it was read in, process that read it)."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.offset = 0
        self.reader = Recorder(n)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, indices: Any) -> list[tuple[int, int, int, int]]:
        if not isinstance(indices, list):
            raise TypeError("only a list of indices will do")
        return [(i, 3 * i + self.offset, len(indices), os.getpid()) for i in indices]


class Damaged(Numbers):
    """Numbers, of which one cannot be read."""

    def __getitem__(self, indices: Any) -> list[tuple[int, int, int, int]]:
        if DAMAGED_INDEX in indices:
            raise ChecksumError(
                "stored 00000001, found 00000002",
                path="/data/cut.ffr",
                index=DAMAGED_INDEX,
                offset=4711,
                hint="copy the file again",
            )
        return super().__getitem__(indices)


class StubbornError(FFServeError):
    """An error class of a user that cannot be unpickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} is not {b}")

    def __reduce__(self) -> tuple[Any, ...]:
        return StubbornError, ()


class Stubborn(Numbers):
    def __getitem__(self, indices: Any) -> list[tuple[int, int, int, int]]:
        raise StubbornError(1, 2)


class Foreign(Numbers):
    def __getitem__(self, indices: Any) -> list[tuple[int, int, int, int]]:
        raise KeyError("colour")


class Suicidal(Numbers):
    def __getitem__(self, indices: Any) -> list[tuple[int, int, int, int]]:
        if DAMAGED_INDEX in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(indices)


class ListOnly:
    """Indexed by a list only; inherits nothing of torch or ffserve."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, indices: list[int]) -> list[tuple[int, int]]:
        assert isinstance(indices, list)
        return [(i, len(indices)) for i in indices]


class Single(torch.utils.data.Dataset):
    """An ordinary torch dataset, indexed by one index."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index + 0, 3 * index


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class EvensThenOdds(torch.utils.data.Sampler):
    """A user's batch sampler: batches of three, the even indices first."""

    def __init__(self, n: int) -> None:
        self.batches = [
            list(range(k, n, 2))[i : i + 3] for k in (0, 1) for i in range(0, n // 2, 3)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class Raw(Dataset):
    """The samples' bytes as they are."""

    def process(self, indices: Any, data: list[np.ndarray]) -> list[bytes]:
        return [sample.tobytes() for sample in data]


class Unsized(Dataset):
    """Reads through a reader of another name, and has no length."""

    def __init__(self, fname: Any) -> None:
        self.images = FileReader(fname)

    def __getitem__(self, indices: Any) -> list[bytes]:
        return [sample.tobytes() for sample in self.images.read(indices)]


def keep_list(samples: list[Any]) -> list[Any]:
    return samples


def shift_by_hundred(worker_id: int) -> None:
    """A worker_init_fn that changes the dataset, as torch's documentation shows."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert info.dataset.n == len(info.dataset)
    info.dataset.offset = 100


def read_as_rank(file: str, server: str, init: str, rank: int, results: Any) -> None:
    """One of four ranks of a mesh of 2 data-parallel and 2 tensor-parallel ones reads two epochs;
    the ranks compare what they got."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{init}", rank=rank, world_size=4
    )
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp")
    )
    dp_rank, dp_size = data_rank(mesh, "dp")
    # The server of forked processes may have begun before the daemon.
    os.environ["FFSERVE_SOCKET"] = server
    dataset = RawDataset(file)
    sampler = EpochSampler(len(dataset), seed=5, rank=dp_rank, world_size=dp_size)
    twin = EpochSampler(len(dataset), seed=5, rank=rank, world_size=4, replication=2)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=list, threads=1)
    used: list[Any] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        twin.set_epoch(epoch)
        mine = torch.tensor(
            [int.from_bytes(bytes(sample[:8]), "little") for batch in loader for sample in batch]
        )
        assert mine.tolist() == twin.order().tolist()
        parts = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(parts, mine, group=mesh.get_group("tp"))
        assert torch.equal(*parts), "a tensor-parallel group sees the same samples"
        torch.distributed.all_gather(parts, mine, group=mesh.get_group("dp"))
        used.append(sorted(torch.cat(parts).tolist()))
    torch.distributed.barrier()
    results.put((rank, dp_rank, dp_size, data_rank(mesh, ("dp", "tp")), used))
    torch.distributed.destroy_process_group()


def folder_tree(root: Path) -> Path:
    """Make a directory with classes of every kind: nested, empty, hidden, linked, of odd names."""
    files = (
        "zebras/b.jpg", "zebras/a.JPG", "zebras/a/x.png", "zebras/a.b/x.png", "zebras/a/b/y.webp",
        "zebras/.hidden.jpg", "zebras/.git/z.bmp", "zebras/notes.txt", "cats/tom.jpeg",
        "cats/10.ppm", "cats/9.ppm", "Cats/tom.tiff", ".hidden/h.png", "notes/only.txt", "top.jpg",
        "caf\udce9/caf\udce9.png", "émile/é.png", "日本/一.gif", "日本/二.png",
    )  # fmt: skip
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name) * 3)
    (root / "empty" / "below").mkdir(parents=True)
    (root / "linked").symlink_to(root / "cats")
    (root / "cats" / "link.jpg").symlink_to(root / "zebras" / "b.jpg")
    (root / "zebras" / "linked").symlink_to(root / "cats")
    return root
