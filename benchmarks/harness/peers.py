"""Adapters for other packages that read samples, used where they are installed.

`Peer.prepare` writes the samples in the peer's own format. `Peer.open` returns a function that
reads a batch in the way that the peer's documentation recommends for speed, and leaves the samples
as bytes in this process's memory. Nothing is compressed. ArrayRecord and TFRecord check every
record, and so does ffrecord as it is called here; the others check nothing. A peer without random
access (WebDataset, TFRecord) reads in order and is labelled so; only the number of indices counts.

A peer that chooses the order itself, or is a pipeline, has `Peer.stream` instead of `Peer.open`.
Two of these share data between jobs by a server (TensorSocket, tf.data service): the first client
starts it as a child, whose CPU time counts.

A peer whose dependencies exclude those of others may have a virtual environment of its own,
`peers/PACKAGE` in the environment of this interpreter.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import mmap
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ffserve
from benchmarks.harness.installation import THIS, Installation
from ffserve.bench.ceilings import Case, Delivered, batches, delivering
from ffserve.bench.samples import BenchmarkData, evict
from ffserve.errors import FFServeError

FLAT = "flat"
"""The format of the peers that have none: all samples back to back, and a table."""
ReadBatch = Callable[[NDArray[np.int64]], int]
"""Takes the indices of a batch and returns its bytes."""
SHARD_SIZE = 64 << 20
LARGE_SIZE = 32 << 10
"""From this mean size on, mmap asks for the samples of a batch in advance instead of faulting them
in page by page."""


@dataclass(frozen=True)
class Peer:
    """Another package that reads samples.

    Args:
        package: the name that pip installs.
        module: the name that Python imports.
        prepare: writes all samples into a new directory.
        in_order: it has no random access, or chooses the order itself.
        forks: a process may import it by its name, and fork then.
        stream: delivers the samples of a case, instead of `open`.
        format: the name of its files, for peers that share them; its own name by default.
        prefix: its own environment is PREFIX/peers/PACKAGE.
        timeout_s: for its warm-up and for its run; some compile themselves first.
    """

    name: str
    package: str
    module: str
    prepare: Callable[[BenchmarkData, str], None]
    open: Callable[[str], ReadBatch] | None = None
    in_order: bool = False
    forks: bool = True
    stream: Callable[[Case], Delivered] | None = None
    format: str = ""
    prefix: str = sys.prefix
    timeout_s: float = 150.0

    @property
    def installation(self) -> Installation | None:
        """The interpreter that imports it, or None where it is not installed."""
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(self.module) is not None:
                return THIS
        own = os.path.join(self.prefix, "peers", self.package, "bin", "python")
        return Installation(interpreter=own) if os.path.exists(own) else None

    @property
    def missing(self) -> str | None:
        """The reason why it cannot take part, or None."""
        return None if self.installation else f"not installed (pip install {self.package})"

    def files_path(self, folder: str, data: BenchmarkData) -> str:
        """Return the directory of its files."""
        return os.path.join(folder, f"{data.name}-{data.count}-{self.format or self.name}")

    def make(self, folder: str, data: BenchmarkData) -> None:
        """Write its files; the directory takes its name when it is complete."""
        path = self.files_path(folder, data)
        shutil.rmtree(f"{path}.part", ignore_errors=True)
        os.mkdir(f"{path}.part")
        self.prepare(data, f"{path}.part")
        os.rename(f"{path}.part", path)


def read(case: Case) -> Delivered:
    """Read with the peer that the case names."""
    peer = BY_NAME[case["peer"]]
    if peer.stream is not None:
        return peer.stream({**case, "run": os.getppid()})
    assert peer.open is not None
    return delivering(case, peer.open(case["files_path"]))


def prepare(case: Case) -> Delivered:
    """Write a peer's files in this process, since its package may leave threads behind."""
    data = BenchmarkData(**{**case["samples"], "paths": tuple(case["samples"]["paths"])})
    BY_NAME[case["peer"]].make(case["folder"], data)
    yield {}


# --------------------------------------------------------------------------- plain files


def _flat(data: BenchmarkData, directory: str) -> None:
    """Write all samples back to back, and a table of their ends."""
    with open(os.path.join(directory, "samples"), "wb") as file:
        for sample in data.samples():
            file.write(sample.data)
    np.save(os.path.join(directory, "ends.npy"), np.cumsum(data.sizes()))


def flat_table(directory: str) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Return the file of all samples, where each begins, and where it ends."""
    ends = np.load(os.path.join(directory, "ends.npy"))
    return (
        os.open(os.path.join(directory, "samples"), os.O_RDONLY),
        np.concatenate(([0], ends)),
        ends,
    )


def _open_preadv(directory: str) -> ReadBatch:
    fd, starts, ends = flat_table(directory)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read(indices: NDArray[np.int64]) -> int:
        lengths = (ends[indices] - starts[indices]).tolist()
        view, at = np.empty(sum(lengths), np.uint8).data, 0
        for start, length in zip(starts[indices].tolist(), lengths, strict=True):
            os.preadv(fd, [view[at : at + length]], start)
            at += length
        return at

    return read


def _open_mmap(directory: str) -> ReadBatch:
    fd, starts, ends = flat_table(directory)
    mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    # Otherwise every fault reads ahead, by megabytes on some machines.
    mapping.madvise(mmap.MADV_RANDOM)
    large = len(mapping) > LARGE_SIZE * len(ends)
    whole = np.frombuffer(mapping, np.uint8)

    def read(indices: NDArray[np.int64]) -> int:
        parts = list(zip(starts[indices].tolist(), ends[indices].tolist(), strict=True))
        for start, end in parts if large else ():
            first = start & -mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, first, end - first)
        return np.concatenate([whole[start:end] for start, end in parts]).nbytes

    return read


# --------------------------------------------------------------------------- packages


def import_package(name: str) -> Any:
    """Import a package when it is used."""
    return importlib.import_module(name)


def _prepare_lmdb(data: BenchmarkData, directory: str) -> None:
    size = 2 * data.size + 200 * data.count + (64 << 20)
    with (
        import_package("lmdb").open(directory, map_size=size) as env,
        env.begin(write=True) as transaction,
    ):
        for k, sample in enumerate(data.samples()):
            transaction.put(k.to_bytes(8, "big"), sample.tobytes(), append=True)


def _open_lmdb(directory: str) -> ReadBatch:
    env = import_package("lmdb").open(directory, readonly=True, lock=False, readahead=False)
    transaction = env.begin()

    def read(indices: NDArray[np.int64]) -> int:
        keys = [k.to_bytes(8, "big") for k in indices.tolist()]
        return sum(map(len, [transaction.get(key) for key in keys]))

    return read


def _prepare_array_record(data: BenchmarkData, directory: str) -> None:
    module = import_package("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(
        os.path.join(directory, "samples.array_record"), "group_size:1,uncompressed"
    )
    for sample in data.samples():
        writer.write(sample.tobytes())
    writer.close()


def _open_array_record(directory: str) -> ReadBatch:
    module = import_package("array_record.python.array_record_module")
    reader = module.ArrayRecordReader(
        os.path.join(directory, "samples.array_record"), "readahead_buffer_size:0"
    )
    return lambda indices: sum(map(len, reader.read(indices.tolist())))


def import_streaming() -> Any:
    """Import MosaicML streaming, which imports torchvision but calls none of its operators.

    Beside a build of torch that is not its own (CPU, CUDA), torchvision cannot load its operators,
    and stops at the first that it describes to torch. Those are declared here.
    """
    with contextlib.suppress(RuntimeError):
        return import_package("streaming")
    library = import_package("torch").library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return import_package("streaming")


def _prepare_streaming(data: BenchmarkData, directory: str) -> None:
    writer = import_streaming().MDSWriter(
        out=directory, columns={"x": "bytes"}, size_limit=SHARD_SIZE, progress_bar=False
    )
    with writer:
        for sample in data.samples():
            writer.write({"x": sample.tobytes()})


def _open_streaming(directory: str) -> ReadBatch:
    dataset = import_streaming().LocalDataset(local=directory)
    return lambda indices: sum(len(dataset[k]["x"]) for k in indices.tolist())


def _prepare_lance(data: BenchmarkData, directory: str) -> None:
    lance, arrow = import_package("lance"), import_package("pyarrow")
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
        os.path.join(directory, "samples.lance"),
    )


def _open_lance(directory: str) -> ReadBatch:
    compute = import_package("pyarrow.compute")
    dataset = import_package("lance").dataset(os.path.join(directory, "samples.lance"))

    def read(indices: NDArray[np.int64]) -> int:
        taken = dataset.take(indices.tolist())["x"]
        return int(compute.sum(compute.binary_length(taken)).as_py())

    return read


def _prepare_h5py(data: BenchmarkData, directory: str) -> None:
    h5py = import_package("h5py")
    sizes = data.sizes()
    with h5py.File(os.path.join(directory, "samples.h5"), "w", libver="latest") as file:
        if sizes.min() == sizes.max():
            rows = file.create_dataset("x", (data.count, int(sizes[0])), "u1")
        else:
            rows = file.create_dataset("x", (data.count,), h5py.vlen_dtype(np.uint8))
        for k, sample in enumerate(data.samples()):
            rows[k] = sample


def _open_h5py(directory: str) -> ReadBatch:
    h5py = import_package("h5py")
    rows = h5py.File(os.path.join(directory, "samples.h5"), "r", libver="latest")["x"]
    if rows.ndim == 1:
        return lambda indices: sum(rows[k].nbytes for k in indices.tolist())

    def read(indices: NDArray[np.int64]) -> int:
        out = np.empty((len(indices), rows.shape[1]), np.uint8)
        for row, k in enumerate(indices.tolist()):
            rows.read_direct(out, np.s_[k], np.s_[row])
        return out.nbytes

    return read


def _prepare_ffrecord(data: BenchmarkData, directory: str) -> None:
    writer = import_package("ffrecord").FileWriter(
        os.path.join(directory, "samples.ffr"), data.count
    )
    for sample in data.samples():
        writer.write_one(sample.tobytes())
    writer.close()


def _open_ffrecord(directory: str) -> ReadBatch:
    reader = import_package("ffrecord").FileReader(
        os.path.join(directory, "samples.ffr"), check_data=True
    )
    return lambda indices: sum(sample.nbytes for sample in reader.read(indices.tolist()))


def _in_order(begin: Callable[[], Iterator[int]]) -> ReadBatch:
    """Read the next samples of an iteration that begins again at its end."""
    lengths = begin()

    def read(indices: NDArray[np.int64]) -> int:
        nonlocal lengths
        size = 0
        for _ in range(len(indices)):
            length = next(lengths, None)
            if length is None:
                lengths = begin()
                length = next(lengths)
            size += length
        return size

    return read


def _prepare_webdataset(data: BenchmarkData, directory: str) -> None:
    pattern = os.path.join(directory, "%06d.tar")
    with import_package("webdataset").ShardWriter(pattern, maxsize=SHARD_SIZE, verbose=0) as writer:
        for k, sample in enumerate(data.samples()):
            writer.write({"__key__": f"{k:09d}", "bin": sample.tobytes()})


def _open_webdataset(directory: str) -> ReadBatch:
    webdataset = import_package("webdataset")
    shards = sorted(os.path.join(directory, name) for name in os.listdir(directory))
    return _in_order(
        lambda: (len(s["bin"]) for s in webdataset.WebDataset(shards, shardshuffle=False))
    )


def _prepare_tfrecord(data: BenchmarkData, directory: str) -> None:
    with import_package("tensorflow").io.TFRecordWriter(
        os.path.join(directory, "samples.tfrecord")
    ) as writer:
        for sample in data.samples():
            writer.write(sample.tobytes())


def _open_tfrecord(directory: str) -> ReadBatch:
    tensorflow = import_package("tensorflow")
    tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    path = os.path.join(directory, "samples.tfrecord")
    batches: Iterator[Any] = iter(())

    def read(indices: NDArray[np.int64]) -> int:
        nonlocal batches
        batch = next(batches, None)
        if batch is None:
            files = tensorflow.data.TFRecordDataset(path, buffer_size=8 << 20)
            batches = iter(files.repeat().batch(len(indices)).prefetch(2))
            batch = next(batches)
        return sum(map(len, batch.numpy()))

    return read


def _prepare_hf(data: BenchmarkData, directory: str) -> None:
    datasets = import_package("datasets")
    features = datasets.Features({"x": datasets.Value("large_binary")})
    arrow = os.path.join(directory, "samples.arrow")
    with import_package("datasets.arrow_writer").ArrowWriter(
        path=arrow, features=features
    ) as writer:
        for sample in data.samples():
            writer.write({"x": sample.tobytes()})
        writer.finalize()


def _open_hf(directory: str) -> ReadBatch:
    """The format "arrow" gives a batch as a table, without making Python objects of it.

    Its chunks point into the mapped file: no byte of a sample is read before they are joined.
    """
    arrow, compute = import_package("pyarrow"), import_package("pyarrow.compute")
    path = os.path.join(directory, "samples.arrow")
    dataset = import_package("datasets").Dataset.from_file(path).with_format("arrow")

    def read(indices: NDArray[np.int64]) -> int:
        samples = arrow.concat_arrays(dataset[indices.tolist()]["x"].chunks)
        return int(compute.sum(compute.binary_length(samples)).as_py())

    return read


def _prepare_litdata(data: BenchmarkData, directory: str) -> None:
    cache = import_package("litdata.streaming.cache").Cache(directory, chunk_bytes="64MB")
    for k, sample in enumerate(data.samples()):
        cache[k] = sample.tobytes()
    cache.done()
    cache.merge()


def _bytes(samples: list[Any]) -> list[bytes]:
    return [bytes(sample) for sample in samples]


def _stream_litdata(case: Case) -> Delivered:
    """Without workers it is twice as fast here: they send each sample through a pipe."""
    litdata = import_package("litdata")
    while True:
        dataset = litdata.StreamingDataset(case["files_path"], shuffle=True, seed=case["seed"])
        loader = litdata.StreamingDataLoader(
            dataset, batch_size=case["batch"], num_workers=0, collate_fn=_bytes
        )
        for samples in loader:
            yield len(samples), sum(map(len, samples))
        if case["once"]:
            return


def _prepare_ffcv(data: BenchmarkData, directory: str) -> None:
    writer, fields = import_package("ffcv.writer"), import_package("ffcv.fields")

    class Samples:
        def __init__(self) -> None:
            self.reader = ffserve.open(data.paths, server="off")

        def __len__(self) -> int:
            return data.count

        def __getitem__(self, index: int) -> tuple[NDArray[np.uint8]]:
            return (self.reader[index],)

    writer.DatasetWriter(
        os.path.join(directory, "samples.beton"),
        {"x": fields.BytesField()},
        num_workers=1,
    ).from_indexed_dataset(Samples())


def _stream_ffcv(case: Case, order: str, *, os_cache: bool, pages: bool = False) -> Delivered:
    """Read batches.

    Args: pages: the first batch waits until as many pages of 8 MiB are in memory as a batch has
        samples. So it compiles itself in an epoch before, and its first batch counts.
    """
    loader, decoders = import_package("ffcv.loader"), import_package("ffcv.fields.decoders")
    path = os.path.join(case["files_path"], "samples.beton")
    batches = loader.Loader(
        path, batch_size=case["batch"],
        num_workers=len(os.sched_getaffinity(0)), os_cache=os_cache, seed=case["seed"],
        order=loader.OrderOption[order],
        pipelines={"x": [decoders.BytesDecoder()]},
    )  # fmt: skip
    if pages and case["once"]:
        for _ in batches:
            pass
        evict([path])
        yield from [(0, 0)] * case["warm"]
    while True:
        for (samples,) in batches:  # all of the longest sample's size
            yield len(samples), len(samples) * case["sample_size"]
        if case["once"]:
            return


def _stream_ffcv_random(case: Case) -> Delivered:
    """As its documentation has it for data that fit the page cache."""
    return _stream_ffcv(case, "RANDOM", os_cache=True)


def _stream_ffcv_pages(case: Case) -> Delivered:
    """As its documentation has it for data that do not: whole pages, in an order of its own."""
    return _stream_ffcv(case, "QUASI_RANDOM", os_cache=False, pages=True)


SPDL_THREADS = 4


def _stream_spdl(case: Case) -> Delivered:
    """A pipeline of threads that read batches with preadv, which releases the GIL."""
    read = _open_preadv(case["files_path"])
    pipeline = (
        import_package("spdl.pipeline")
        .PipelineBuilder()
        .add_source(batches(case))
        .pipe(lambda indices: (len(indices), read(indices)), concurrency=SPDL_THREADS)
        .add_sink(SPDL_THREADS)
        .build(num_threads=SPDL_THREADS)
    )
    with pipeline.auto_stop():
        yield from pipeline


# --------------------------------------------------------------------------- shared by a server


def _ports(case: Case, count: int) -> list[int]:
    """Return ports that all clients of a run know."""
    first = 20_000 + case["run"] * count % 40_000
    return list(range(first, first + count))


@contextlib.contextmanager
def _server(case: Case, serve: Callable[[Case], None], port: int) -> Iterator[None]:
    """Let the first client serve from a child, which ends with it; wait until the port answers."""
    alive, kept = os.pipe()
    pid = os.fork() if case["client"] == 0 else -1
    if pid == 0:
        os.close(kept)
        threading.Thread(target=lambda: (os.read(alive, 1), os._exit(0)), daemon=True).start()
        try:
            serve(case)
        finally:
            sys.stderr.flush()
            os._exit(1)
    os.close(alive)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
                break
            time.sleep(0.1)
        else:
            raise FFServeError(f"the server of {case['peer']} did not answer on port {port}")
        yield
    finally:
        os.close(kept)
        if pid > 0:
            os.waitpid(pid, 0)


def _serve_tensorsocket(case: Case) -> None:
    """Serve tensors of batches, several of them in a message as its default has it."""
    torch, producer = import_package("torch"), import_package("tensorsocket").TensorProducer
    fd, starts, ends = flat_table(case["files_path"])
    size = int(ends[0])
    if (ends - starts[: len(ends)] != size).any():
        raise FFServeError("TensorSocket sends tensors: the samples must have one size")

    class Rows(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return len(ends)

        def __getitems__(self, indices: list[int]) -> Any:
            rows = np.empty((len(indices), size), np.uint8)
            for row, k in zip(rows, indices, strict=True):
                os.preadv(fd, [row.data], int(starts[k]))
            return (torch.from_numpy(rows),)

    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=case["batch"], shuffle=True, drop_last=True, collate_fn=lambda rows: rows
    )
    port, ack, beat, echo = _ports(case, 4)
    # The second job joins a moment after the first; without this it waits for the next epoch.
    served = producer(
        loader, port=port, ack_port=ack, heart_ports=(beat, echo), rubber_band_pct=0.25
    )
    while True:
        for _ in served:
            pass


def _stream_tensorsocket(case: Case) -> Delivered:
    port, ack, beat, echo = _ports(case, 4)
    with _server(case, _serve_tensorsocket, port):
        consumer = import_package("tensorsocket").TensorConsumer(
            port=port, ack_port=ack, heart_ports=(beat, echo), batch_size=case["batch"]
        )
        while True:
            for (rows,) in consumer:
                yield len(rows), rows.nbytes
            if case["once"]:
                return


def _serve_tf_data(case: Case) -> None:
    service = import_package("tensorflow").data.experimental.service
    [port] = _ports(case, 1)
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    worker.join()


def _stream_tf_data(case: Case) -> Delivered:
    """With the cache that several trainers share, as the documentation has it for jobs that read
    the same data; uncompressed, since the network is this machine."""
    [port] = _ports(case, 1)
    with _server(case, _serve_tf_data, port):
        data = import_package("tensorflow").data
        service = data.experimental.service
        path = os.path.join(case["files_path"], "samples.tfrecord")
        files = data.TFRecordDataset(path, buffer_size=8 << 20).repeat().batch(case["batch"])
        shared = files.apply(
            service.distribute(
                service.ShardingPolicy.OFF, f"grpc://localhost:{port}", job_name="shared",
                compression=None,
                cross_trainer_cache=service.CrossTrainerCache(trainer_id=str(case["client"])),
            )
        )  # fmt: skip
        for batch in itertools.islice(shared.prefetch(2), None):
            samples = batch.numpy()
            yield len(samples), sum(map(len, samples))


PEERS = (
    Peer("preadv", "", "os", _flat, _open_preadv, format=FLAT),
    Peer("mmap", "", "mmap", _flat, _open_mmap, format=FLAT),
    Peer("LMDB", "lmdb", "lmdb", _prepare_lmdb, _open_lmdb),
    Peer(
        "ArrayRecord", "array-record", "array_record", _prepare_array_record, _open_array_record
    ),
    Peer(
        "MosaicML", "mosaicml-streaming", "streaming", _prepare_streaming, _open_streaming,
        forks=False,
    ),
    Peer("Lance", "pylance", "lance", _prepare_lance, _open_lance, forks=False),
    Peer("h5py", "h5py", "h5py", _prepare_h5py, _open_h5py),
    Peer("ffrecord", "ffrecord", "ffrecord", _prepare_ffrecord, _open_ffrecord),
    Peer("TFRecord", "tensorflow", "tensorflow", _prepare_tfrecord, _open_tfrecord, in_order=True),
    Peer(
        "WebDataset", "webdataset", "webdataset", _prepare_webdataset, _open_webdataset,
        in_order=True,
    ),
    Peer("HF datasets", "datasets", "datasets", _prepare_hf, _open_hf),
    Peer(
        "litData", "litdata", "litdata", _prepare_litdata, in_order=True, stream=_stream_litdata,
        forks=False,
    ),
    Peer("SPDL", "spdl", "spdl", _flat, stream=_stream_spdl, forks=False, format=FLAT),
    Peer("FFCV", "ffcv", "ffcv", _prepare_ffcv, stream=_stream_ffcv_random, forks=False),
    Peer(
        "FFCV quasi-random", "ffcv", "ffcv", _prepare_ffcv, stream=_stream_ffcv_pages,
        in_order=True, forks=False, format="FFCV",
    ),
    Peer(
        "TensorSocket", "tensorsocket", "tensorsocket", _flat, in_order=True,
        stream=_stream_tensorsocket, forks=False, format=FLAT,
    ),
    Peer(
        "tf.data service", "tensorflow", "tensorflow", _prepare_tfrecord, in_order=True,
        stream=_stream_tf_data, forks=False, format="TFRecord",
    ),
)  # fmt: skip
BY_NAME = {peer.name: peer for peer in PEERS}
