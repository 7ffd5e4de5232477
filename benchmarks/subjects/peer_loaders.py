"""Loaders of torch over several packages, each set up as its own documents recommend.

Two workers, batches of 64 in random order, collated to tensors of one size. A sample begins with
its index, so that what came can be told: how well it was shuffled, what is lost or doubled after a
kill. The settings of each loader stand in its class, with the document that has them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray

from benchmarks.harness.peers import flat_table, import_package, import_streaming
from ffserve.bench import child_processes
from ffserve.bench.ceilings import Case, Delivered
from ffserve.errors import FFServeError
from ffserve.order import design_effect

WORKERS, BATCH = 2, 64
KILLED_AT = 0.4
"""A job is killed when it has trained on this share of its epoch."""
CHECKPOINT_EVERY = 4
"""Batches; a quarter of a shorter epoch."""


def tensor_of(sample: bytes) -> torch.Tensor:
    """Return the bytes of a sample as a tensor."""
    return torch.frombuffer(bytearray(sample), dtype=torch.uint8)


def stacked(samples: list[Any]) -> torch.Tensor:
    """Collate samples of bytes."""
    return torch.stack([tensor_of(bytes(sample)) for sample in samples])


class Loader:
    """One way to load.

    Args: case: files_path (of a peer) or paths, batch, seed, client; remote and local for files in
        a store.
    """

    loader: Any

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of an epoch: arrays or tensors of bytes, a row per sample."""
        return iter(self.loader)

    def state(self) -> Any:
        """Return the position, for a checkpoint; None if the package has none."""
        return None

    def restore(self, state: Any) -> None:
        """Continue at a position."""


class _WithState(Loader):
    def state(self) -> Any:
        return self.loader.state_dict()

    def restore(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def torch_loader(dataset: Any, **options: Any) -> Any:
    """Return torch's own loader."""
    options = {"batch_size": BATCH, "num_workers": WORKERS, "persistent_workers": True, **options}
    return torch.utils.data.DataLoader(dataset, **options)


class FFServe(_WithState):
    """README.md: `Dataset`, `DataLoader`, `EpochSampler`; docs/howto/train.md: `state_dict`."""

    def __init__(self, case: Case) -> None:
        import ffserve.torch

        class Tensors(ffserve.torch.Dataset):
            def process(self, indices: list[int], data: list[Any]) -> list[Any]:
                return [torch.from_numpy(sample) for sample in data]

        dataset = Tensors(case.get("urls") or case["paths"])
        self.loader = ffserve.torch.DataLoader(
            dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True,
            sampler=ffserve.torch.EpochSampler(len(dataset), seed=case["seed"]),
        )  # fmt: skip
        self._epoch = 0

    def epoch(self) -> Iterator[Any]:
        """Begin the next epoch, or go on with the restored one."""
        if self._epoch:
            self.loader.sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self.loader)


class Pread(Loader):
    """torch's tutorial "Datasets & DataLoaders": `__getitem__`, over one file of all samples."""

    def __init__(self, case: Case) -> None:
        fd, starts, ends = flat_table(case["files_path"])

        class Rows(torch.utils.data.Dataset[Any]):
            def __len__(self) -> int:
                return len(ends)

            def __getitem__(self, k: int) -> torch.Tensor:
                return tensor_of(os.pread(fd, int(ends[k] - starts[k]), int(starts[k])))

        self.loader = torch_loader(Rows(), shuffle=True)


class LMDB(Loader):
    """lmdb.readthedocs.io: one environment per process, readonly, without lock and read-ahead."""

    def __init__(self, case: Case) -> None:
        directory, count = case["files_path"], case["count"]

        class Rows(torch.utils.data.Dataset[Any]):
            transaction: Any = None

            def __len__(self) -> int:
                return int(count)

            def __getitem__(self, k: int) -> torch.Tensor:
                if self.transaction is None:
                    self.transaction = import_package("lmdb").open(
                        directory, readonly=True, lock=False, readahead=False, meminit=False
                    ).begin()  # fmt: skip
                return tensor_of(self.transaction.get(k.to_bytes(8, "big")))

        self.loader = torch_loader(Rows(), shuffle=True)


class MosaicML(_WithState):
    """docs.mosaicml.com/projects/streaming: `StreamingDataset(shuffle=True, batch_size=…)`,
    `StreamingDataLoader`, its `state_dict`; after a kill `clean_stale_shared_memory`. Two jobs need
    two local directories."""

    def __init__(self, case: Case) -> None:
        streaming = import_streaming()
        import_package("streaming.base.util").clean_stale_shared_memory()
        if remote := case.get("remote"):
            where = {"remote": remote, "local": case["local"]}
        else:
            where = {"local": f"{case['files_path']}-{case['client']}"}
            with contextlib.suppress(FileExistsError):
                os.symlink(case["files_path"], where["local"])

        class Rows(streaming.StreamingDataset):  # type: ignore[misc, name-defined]
            def __getitem__(self, at: int) -> torch.Tensor:
                return tensor_of(super().__getitem__(at)["x"])

        rows = Rows(**where, shuffle=True, shuffle_seed=case["seed"], batch_size=BATCH)
        self.loader = streaming.StreamingDataLoader(
            rows, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
        )


class WebDataset(Loader):
    """github.com/webdataset/webdataset: shuffled shards, `shuffle(1000)`, batches in the workers,
    `WebLoader`; from a store by `pipe:curl`."""

    def __init__(self, case: Case) -> None:
        webdataset = import_package("webdataset")
        place = case["files_path"]
        shards = sorted(os.path.join(place, name) for name in os.listdir(place))
        if remote := case.get("remote"):
            begin = f"pipe:curl -s {case['endpoint']}/{remote.removeprefix('s3://')}"
            shards = [f"{begin}/{os.path.basename(shard)}" for shard in shards]
        rows = (
            webdataset.WebDataset(shards, shardshuffle=100, seed=case["seed"], empty_check=False)
            .shuffle(1000)
            .to_tuple("bin")
            .map(lambda sample: tensor_of(sample[0]))
            .batched(BATCH, collation_fn=torch.stack)
        )
        self.loader = webdataset.WebLoader(
            rows, batch_size=None, num_workers=WORKERS, persistent_workers=True
        )


class LitData(_WithState):
    """github.com/Lightning-AI/litData: `StreamingDataset(shuffle=True)`, `StreamingDataLoader`, its
    `state_dict`."""

    def __init__(self, case: Case) -> None:
        litdata = import_package("litdata")
        options: dict[str, Any] = {}
        if remote := case.get("remote"):
            # It has no option for an origin without TLS.
            client = import_package("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS
            client["allow_http"] = "true"
            options = {
                "cache_dir": case["local"],
                "storage_options": {"endpoint_url": case["endpoint"]},
            }
        rows = litdata.StreamingDataset(
            remote or case["files_path"], shuffle=True, seed=case["seed"], **options
        )
        self.loader = litdata.StreamingDataLoader(
            rows, batch_size=BATCH, num_workers=WORKERS, collate_fn=stacked, persistent_workers=True
        )


class HFDatasets(Loader):
    """huggingface.co/docs/datasets, "Use with PyTorch": a mapped Arrow file, torch's loader."""

    def __init__(self, case: Case) -> None:
        path = os.path.join(case["files_path"], "samples.arrow")
        rows = import_package("datasets").Dataset.from_file(path)
        self.loader = torch_loader(
            rows, shuffle=True, collate_fn=lambda samples: stacked([s["x"] for s in samples])
        )


class FFCV(Loader):
    """docs.ffcv.io, "Tuning Guide": data that fit the page cache; threads in place of workers."""

    order: ClassVar[str] = "RANDOM"

    def __init__(self, case: Case) -> None:
        ffcv, fields = import_package("ffcv.loader"), import_package("ffcv.fields.decoders")
        self.loader = ffcv.Loader(
            os.path.join(case["files_path"], "samples.beton"), batch_size=BATCH,
            num_workers=WORKERS, order=ffcv.OrderOption[self.order],
            os_cache=self.order == "RANDOM", seed=case["seed"],
            pipelines={"x": [fields.BytesDecoder()]},
        )  # fmt: skip

    def epoch(self) -> Iterator[Any]:
        """Yield arrays."""
        return (samples for (samples,) in self.loader)


class FFCVPages(FFCV):
    """docs.ffcv.io, "Tuning Guide": data that do not fit it."""

    order = "QUASI_RANDOM"


LOADERS: dict[str, type[Loader]] = {
    "ffserve": FFServe,
    "torch-pread": Pread,
    "torch-LMDB": LMDB,
    "MosaicML": MosaicML,
    "WebDataset": WebDataset,
    "litData": LitData,
    "HF-datasets": HFDatasets,
    "FFCV": FFCV,
    "FFCV-quasi-random": FFCVPages,
}
"""By their name in rows; `peer_rows.PEERS` has the same."""


def _begin(case: Case) -> Loader:
    os.environ.update(case.get("environment", {}))
    return LOADERS[case["who"]]({"client": 0, **case})


def indices_of(batch: Any) -> NDArray[np.int64]:
    """Return the indices with which the samples of a batch begin."""
    rows = np.ascontiguousarray(np.asarray(batch)[:, :8])
    return rows.view("<i8")[:, 0]


# --------------------------------------------------------------------------- contestants


def endless(case: Case) -> Delivered:
    """Load epoch after epoch."""
    loader = _begin(case)
    while True:
        for batch in loader.epoch():
            yield len(batch), len(batch) * batch.shape[1]


def one_epoch(case: Case) -> Delivered:
    """Open, load an epoch, and report the time of the first batch, from the opening on, and the
    order. What the package imports is imported before."""
    for module in case["modules"]:
        with contextlib.suppress(RuntimeError):  # see `import_streaming`
            import_package(module)
    yield 0, 0
    begun = time.perf_counter()
    first_s = 0.0
    found: list[NDArray[np.int64]] = []
    for batch in _begin(case).epoch():
        first_s = first_s or time.perf_counter() - begun
        found.append(indices_of(batch))
    order = np.concatenate(found)
    whole = len(order) == case["count"] == len(np.unique(order))
    yield {
        "first_ms": 1e3 * first_s,
        "seconds": time.perf_counter() - begun,
        "samples": len(order),
        "size": len(order) * case["sample_size"],
        "design": design_effect(order, BATCH) if whole else -1.0,
    }


def killed(case: Case) -> Delivered:
    """Kill a job in mid-epoch, start it again from its checkpoint, and report which share of the
    samples the two have lost, and which they have trained on twice."""
    yield 0, 0
    with tempfile.TemporaryDirectory() as place:
        about = json.dumps({**case, "checkpoint": os.path.join(place, "checkpoint")})
        for expected in (-signal.SIGKILL, 0):
            done = subprocess.run(
                [*child_processes.command(__name__), about], start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            if done.returncode != expected:
                last = done.stderr.strip().splitlines()[-1:]
                raise FFServeError(f"the job ended with {done.returncode}: {' '.join(last)}")
        with open(os.path.join(place, "checkpoint"), "rb") as file:
            trained, _ = pickle.load(file)
    times = np.bincount(np.concatenate(trained), minlength=case["count"])
    yield {
        "lost": 100 * float((times == 0).mean()),
        "doubled": 100 * float((times > 1).mean()),
    }


def train(case: Case) -> None:
    """Train for an epoch with checkpoints; the first job of two kills itself and its workers.

    A checkpoint has the loader's position and, in place of a model, the indices of the samples.
    """
    trained: list[NDArray[np.int64]] = []
    loader = _begin(case)
    first = not os.path.exists(case["checkpoint"])
    if not first:
        with open(case["checkpoint"], "rb") as file:
            trained, state = pickle.load(file)
        if state is not None:
            loader.restore(state)
    every = max(min(CHECKPOINT_EVERY, case["count"] // (4 * BATCH)), 1)
    for number, batch in enumerate(loader.epoch(), 1):
        trained.append(indices_of(batch).copy())
        if number % every == 0:
            _save(case["checkpoint"], trained, loader.state())
            if first and sum(map(len, trained)) >= KILLED_AT * case["count"]:
                os.killpg(0, signal.SIGKILL)
    _save(case["checkpoint"], trained, None)


def _save(path: str, *parts: Any) -> None:
    with open(f"{path}.part", "wb") as file:
        pickle.dump(parts, file)
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
