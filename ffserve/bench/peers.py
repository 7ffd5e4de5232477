"""Other ways to read the same samples: adapters of a few lines, used where they are installed.

``prepare`` writes the samples in the peer's own format; ``open`` returns what reads a batch there
in the way its documentation recommends for speed, and leaves the samples as bytes in this process's
memory. Nothing is compressed. ArrayRecord and TFRecord check every record, and ffrecord does when
asked, as it is here; the others check nothing. A peer that cannot read at random (WebDataset,
TFRecord) reads in order and is labelled so: its ``read`` uses the number of the indices only.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.bench.contestant import Case, Delivered, delivering
from ffserve.bench.records import Data

Read = Callable[[NDArray[np.int64]], int]
SHARD_SIZE = 64 << 20
LARGE_SIZE = 32 << 10
"""From this mean size on mmap asks for a batch's samples beforehand, not page by page."""


@dataclass(frozen=True)
class Peer:
    """One way to read samples: its name, what pip installs, what Python imports."""

    name: str
    package: str
    module: str
    prepare: Callable[[Data, str], None]
    """Write all samples below a new directory."""
    open: Callable[[str], Read]
    in_order: bool = False
    forks: bool = True
    """Whether a process may fork that has imported it."""

    @property
    def missing(self) -> str | None:
        """Why it cannot join in, or None."""
        try:
            if importlib.util.find_spec(self.module) is not None:
                return None
        except (ImportError, ValueError):
            pass
        return f"not installed (pip install {self.package})"

    def place(self, folder: str, data: Data) -> str:
        """Return where its files are, or will be."""
        return os.path.join(folder, f"{data.name}-{data.count}-{self.name}")

    def make(self, folder: str, data: Data) -> None:
        """Prepare its files; they are there as a whole or not at all."""
        path = self.place(folder, data)
        shutil.rmtree(f"{path}.part", ignore_errors=True)
        os.mkdir(f"{path}.part")
        self.prepare(data, f"{path}.part")
        os.rename(f"{path}.part", path)


def contestant(case: Case) -> Delivered:
    """Read with the peer that the case names."""
    return delivering(case, BY_NAME[case["peer"]].open(case["place"]))


def prepare(case: Case) -> dict[str, Any]:
    """Prepare a peer's files in this process, since its package may leave threads behind."""
    data = Data(**{**case["samples"], "paths": tuple(case["samples"]["paths"])})
    BY_NAME[case["peer"]].make(case["folder"], data)
    return {}


# --------------------------------------------------------------------------- plain files


def _flat(data: Data, place: str) -> None:
    """All samples back to back, and where each begins."""
    with open(os.path.join(place, "samples"), "wb") as file:
        for sample in data.samples():
            file.write(sample.data)
    np.save(os.path.join(place, "ends.npy"), np.cumsum(data.sizes()))


def _flat_table(place: str) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    ends = np.load(os.path.join(place, "ends.npy"))
    return os.open(os.path.join(place, "samples"), os.O_RDONLY), np.concatenate(([0], ends)), ends


def _open_preadv(place: str) -> Read:
    fd, starts, ends = _flat_table(place)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read(chosen: NDArray[np.int64]) -> int:
        lengths = (ends[chosen] - starts[chosen]).tolist()
        view, at = np.empty(sum(lengths), np.uint8).data, 0
        for start, length in zip(starts[chosen].tolist(), lengths, strict=True):
            os.preadv(fd, [view[at : at + length]], start)
            at += length
        return at

    return read


def _open_mmap(place: str) -> Read:
    fd, starts, ends = _flat_table(place)
    mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    # Else every fault reads ahead, by megabytes on some machines: soon the whole of a small file.
    mapping.madvise(mmap.MADV_RANDOM)
    large = len(mapping) > LARGE_SIZE * len(ends)
    whole = np.frombuffer(mapping, np.uint8)

    def read(chosen: NDArray[np.int64]) -> int:
        parts = list(zip(starts[chosen].tolist(), ends[chosen].tolist(), strict=True))
        for start, end in parts if large else ():
            first = start & -mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, first, end - first)
        return np.concatenate([whole[start:end] for start, end in parts]).nbytes

    return read


# --------------------------------------------------------------------------- packages


def _import(name: str) -> Any:
    return importlib.import_module(name)


def _prepare_lmdb(data: Data, place: str) -> None:
    size = 2 * data.size + 200 * data.count + (64 << 20)
    with _import("lmdb").open(place, map_size=size) as env, env.begin(write=True) as transaction:
        for k, sample in enumerate(data.samples()):
            transaction.put(k.to_bytes(8, "big"), sample.tobytes(), append=True)


def _open_lmdb(place: str) -> Read:
    env = _import("lmdb").open(place, readonly=True, lock=False, readahead=False)
    transaction = env.begin()

    def read(chosen: NDArray[np.int64]) -> int:
        keys = [k.to_bytes(8, "big") for k in chosen.tolist()]
        return sum(map(len, [transaction.get(key) for key in keys]))

    return read


def _prepare_array_record(data: Data, place: str) -> None:
    module = _import("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(
        os.path.join(place, "samples.array_record"), "group_size:1,uncompressed"
    )
    for sample in data.samples():
        writer.write(sample.tobytes())
    writer.close()


def _open_array_record(place: str) -> Read:
    module = _import("array_record.python.array_record_module")
    reader = module.ArrayRecordReader(
        os.path.join(place, "samples.array_record"), "readahead_buffer_size:0"
    )
    return lambda chosen: sum(map(len, reader.read(chosen.tolist())))


def _prepare_streaming(data: Data, place: str) -> None:
    writer = _import("streaming").MDSWriter(
        out=place, columns={"x": "bytes"}, size_limit=SHARD_SIZE, progress_bar=False
    )
    with writer:
        for sample in data.samples():
            writer.write({"x": sample.tobytes()})


def _open_streaming(place: str) -> Read:
    dataset = _import("streaming").LocalDataset(local=place)
    return lambda chosen: sum(len(dataset[k]["x"]) for k in chosen.tolist())


def _prepare_lance(data: Data, place: str) -> None:
    lance, arrow = _import("lance"), _import("pyarrow")
    schema = arrow.schema([arrow.field("x", arrow.large_binary())])

    def pieces() -> Iterator[Any]:
        some: list[bytes] = []
        size = 0
        for sample in data.samples():
            some.append(sample.tobytes())
            size += len(some[-1])
            if size >= SHARD_SIZE:
                yield arrow.record_batch([arrow.array(some, arrow.large_binary())], schema)
                some, size = [], 0
        if some:
            yield arrow.record_batch([arrow.array(some, arrow.large_binary())], schema)

    lance.write_dataset(
        arrow.RecordBatchReader.from_batches(schema, pieces()),
        os.path.join(place, "samples.lance"),
    )


def _open_lance(place: str) -> Read:
    compute = _import("pyarrow.compute")
    dataset = _import("lance").dataset(os.path.join(place, "samples.lance"))

    def read(chosen: NDArray[np.int64]) -> int:
        taken = dataset.take(chosen.tolist())["x"]
        return int(compute.sum(compute.binary_length(taken)).as_py())

    return read


def _prepare_h5py(data: Data, place: str) -> None:
    h5py = _import("h5py")
    sizes = data.sizes()
    with h5py.File(os.path.join(place, "samples.h5"), "w", libver="latest") as file:
        if sizes.min() == sizes.max():
            rows = file.create_dataset("x", (data.count, int(sizes[0])), "u1")
        else:
            rows = file.create_dataset("x", (data.count,), h5py.vlen_dtype(np.uint8))
        for k, sample in enumerate(data.samples()):
            rows[k] = sample


def _open_h5py(place: str) -> Read:
    h5py = _import("h5py")
    rows = h5py.File(os.path.join(place, "samples.h5"), "r", libver="latest")["x"]
    if rows.ndim == 1:
        return lambda chosen: sum(rows[k].nbytes for k in chosen.tolist())

    def read(chosen: NDArray[np.int64]) -> int:
        out = np.empty((len(chosen), rows.shape[1]), np.uint8)
        for place, k in enumerate(chosen.tolist()):
            rows.read_direct(out, np.s_[k], np.s_[place])
        return out.nbytes

    return read


def _prepare_ffrecord(data: Data, place: str) -> None:
    writer = _import("ffrecord").FileWriter(os.path.join(place, "samples.ffr"), data.count)
    for sample in data.samples():
        writer.write_one(sample.tobytes())
    writer.close()


def _open_ffrecord(place: str) -> Read:
    reader = _import("ffrecord").FileReader(os.path.join(place, "samples.ffr"), check_data=True)
    return lambda chosen: sum(sample.nbytes for sample in reader.read(chosen.tolist()))


def _in_turn(begin: Callable[[], Iterator[int]]) -> Read:
    """Read the next samples of an endless walk."""
    walk = begin()

    def read(chosen: NDArray[np.int64]) -> int:
        nonlocal walk
        size = 0
        for _ in range(len(chosen)):
            length = next(walk, None)
            if length is None:
                walk = begin()
                length = next(walk)
            size += length
        return size

    return read


def _prepare_webdataset(data: Data, place: str) -> None:
    pattern = os.path.join(place, "%06d.tar")
    with _import("webdataset").ShardWriter(pattern, maxsize=SHARD_SIZE, verbose=0) as writer:
        for k, sample in enumerate(data.samples()):
            writer.write({"__key__": f"{k:09d}", "bin": sample.tobytes()})


def _open_webdataset(place: str) -> Read:
    webdataset = _import("webdataset")
    shards = sorted(os.path.join(place, name) for name in os.listdir(place))
    return _in_turn(
        lambda: (len(s["bin"]) for s in webdataset.WebDataset(shards, shardshuffle=False))
    )


def _prepare_tfrecord(data: Data, place: str) -> None:
    with _import("tensorflow").io.TFRecordWriter(os.path.join(place, "samples.tfrecord")) as writer:
        for sample in data.samples():
            writer.write(sample.tobytes())


def _open_tfrecord(place: str) -> Read:
    tensorflow = _import("tensorflow")
    tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    path = os.path.join(place, "samples.tfrecord")
    walk: Iterator[Any] = iter(())

    def read(chosen: NDArray[np.int64]) -> int:
        nonlocal walk
        batch = next(walk, None)
        if batch is None:
            files = tensorflow.data.TFRecordDataset(path, buffer_size=8 << 20)
            walk = iter(files.repeat().batch(len(chosen)).prefetch(2))
            batch = next(walk)
        return sum(map(len, batch.numpy()))

    return read


PEERS = (
    Peer("preadv", "", "os", _flat, _open_preadv),
    Peer("mmap", "", "mmap", _flat, _open_mmap),
    Peer("LMDB", "lmdb", "lmdb", _prepare_lmdb, _open_lmdb),
    Peer(
        "ArrayRecord", "array-record", "array_record", _prepare_array_record, _open_array_record
    ),
    Peer("MosaicML", "mosaicml-streaming", "streaming", _prepare_streaming, _open_streaming),
    Peer("Lance", "pylance", "lance", _prepare_lance, _open_lance, forks=False),
    Peer("h5py", "h5py", "h5py", _prepare_h5py, _open_h5py),
    Peer("ffrecord", "ffrecord", "ffrecord", _prepare_ffrecord, _open_ffrecord),
    Peer("TFRecord", "tensorflow", "tensorflow", _prepare_tfrecord, _open_tfrecord, in_order=True),
    Peer(
        "WebDataset", "webdataset", "webdataset", _prepare_webdataset, _open_webdataset,
        in_order=True,
    ),
)  # fmt: skip
BY_NAME = {peer.name: peer for peer in PEERS}
