"""Jobs that decode pictures, with and without sharing what they have prepared.

    python -m benchmarks.prepared [--jobs 4] [--pictures 1000] [--size 256] [--share 1.0]

Each job is a process with a loader of one worker. Contestants: torch's loader over a dataset that
decodes; our loader over raw samples in the daemon's memory; the same with `Dataset.prepare`. All
follow orders of their own, and must deliver the same bytes. --size is the pictures' width and
height; the larger they are, the more of a job's time is decoding. --share is the arena's size, in
parts of what the prepared samples need. --folder keeps the pictures for the next run. The last
figures of a row are the CPU time of the daemon and of all jobs. Needs Pillow.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from PIL import Image

import ffserve
from ffserve.client.daemon import connection
from ffserve.torch import DataLoader, Dataset, EpochSampler

EDGE, BATCH = 224, 64
KINDS = ("torch", "raw", "prepared")


def decoded(sample: Any) -> np.ndarray[Any, Any]:
    """Return a picture as 224 x 224 x 3."""
    picture = Image.open(io.BytesIO(sample)).convert("RGB")
    return np.asarray(picture.resize((EDGE, EDGE), Image.Resampling.BILINEAR))


def augmented(pictures: Sequence[Any]) -> list[torch.Tensor]:
    """Return tensors, mirrored: what every job does anew."""
    return [torch.from_numpy(np.ascontiguousarray(picture[:, ::-1])) for picture in pictures]


class Raw(Dataset):
    """Decodes in `process`."""

    def process(self, indices: Any, data: Any) -> list[torch.Tensor]:
        """Decode and augment."""
        return augmented([decoded(sample) for sample in data])


class Prepared(Dataset):
    """Decodes in `prepare`."""

    def prepare(self, indices: Any, data: Any) -> list[Any]:
        """Decode."""
        return [decoded(sample) for sample in data]

    def process(self, indices: Any, data: Any) -> list[torch.Tensor]:
        """Augment."""
        return augmented(data)


class Files(torch.utils.data.Dataset[torch.Tensor]):
    """What a torch program does: a file per picture."""

    def __init__(self, folder: str, count: int) -> None:
        self._folder = folder
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        content = Path(self._folder, f"{index}.jpg").read_bytes()
        return augmented([decoded(content)])[0]


def write(folder: str, count: int, size: int) -> str:
    """Write pictures that are not there yet, as files and as one record file; return its path."""
    random = np.random.default_rng(0)
    path = f"{folder}/pictures.ffr"
    if os.path.exists(path):
        with ffserve.open(path, server="off") as reader:
            assert len(reader) == count, f"{folder} has {len(reader)} pictures"
        return path
    with ffserve.create(path) as writer:
        for index in range(count):
            small = random.integers(0, 256, (16, 16, 3), np.uint8)
            picture = Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC)
            noise = random.normal(0, 6, (size, size, 3))
            pixels = np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)
            content = io.BytesIO()
            Image.fromarray(pixels).save(content, "JPEG", quality=85)
            writer.write(content.getvalue())
            Path(folder, f"{index}.jpg").write_bytes(content.getvalue())
    return path


def job(kind: str, folder: str, count: int, seed: int, epochs: int, barrier: Any, out: Any) -> None:
    """Train without a model; put the seconds and the digest of each epoch."""
    torch.set_num_threads(1)
    path = f"{folder}/pictures.ffr"
    dataset: Any = {"raw": Raw, "prepared": Prepared}.get(kind, lambda _: Files(folder, count))(
        path
    )
    sampler = EpochSampler(count, seed=seed)
    loader_type = torch.utils.data.DataLoader if kind == "torch" else DataLoader
    loader: Any = loader_type(dataset, batch_size=BATCH, sampler=sampler, num_workers=1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        found = hashlib.blake2b()
        barrier.wait()
        begun = time.monotonic()
        for batch in loader:
            found.update(batch[:, ::32, ::32].contiguous().numpy())
        out.put((epoch, seed, time.monotonic() - begun, found.hexdigest()))


def run(kind: str, folder: str, count: int, jobs: int, epochs: int) -> tuple[list[float], set[Any]]:
    """Return samples per second of all jobs together, by epoch; and what was delivered."""
    context = multiprocessing.get_context("fork")
    barrier, out = context.Barrier(jobs), context.Queue()
    processes = [
        context.Process(target=job, args=(kind, folder, count, seed, epochs, barrier, out))
        for seed in range(jobs)
    ]
    for each in processes:
        each.start()
    rows = [out.get(timeout=600) for _ in range(jobs * epochs)]
    for each in processes:
        each.join()
    rates = [
        jobs * count / max(seconds for e, _, seconds, _ in rows if e == epoch)
        for epoch in range(epochs)
    ]
    return rates, {(epoch, seed, digest) for epoch, seed, _, digest in rows}


def cpu_s() -> float:
    """Return the CPU time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run all contestants and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = (("jobs", 4), ("pictures", 1000), ("size", 256), ("epochs", 3), ("turns", 1))
    for name, default in numbers:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--share", type=float, default=1.5)
    parser.add_argument("--only", nargs="*", default=KINDS)
    parser.add_argument("--folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        path = write(folder, options.pictures, options.size)
        arena = int(options.pictures * EDGE * EDGE * 3 * options.share)
        print(f"{os.path.getsize(path) / options.pictures:.0f} bytes a picture, arena {arena}")
        delivered: set[Any] = set()
        for kind in tuple(options.only) * options.turns:
            socket, before = f"{temporary}/s", cpu_s()
            daemon = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ffserve", "serve", "--socket", socket),
                    *("--arena", str(max(arena, 16 << 20))),
                ],
                stderr=subprocess.DEVNULL,
            )
            try:
                os.environ["FFSERVE_SOCKET"] = socket
                while not os.path.exists(socket):
                    time.sleep(0.05)
                rates, found = run(kind, folder, options.pictures, options.jobs, options.epochs)
                assert not delivered or delivered == found, "the same bytes"
                delivered = found
                status = connection.status(socket)
                facts = [(p["prepared"], p["found"]) for p in status["preparations"]]
                print(f"{kind:9}", *(f"{rate:8.0f}/s" for rate in rates), facts, end=" ")
                jobs_s = cpu_s() - before
            finally:
                daemon.terminate()
                daemon.wait()
            print(f"{cpu_s() - before - jobs_s:.1f} s + {jobs_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
