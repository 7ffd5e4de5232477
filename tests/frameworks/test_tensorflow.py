"""TensorFlow reads what ffserve writes, ffserve what TensorFlow writes; and the tf.data face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import ffserve
from ffserve import example
from ffserve.errors import UsageError

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (make interop)")

SIZES = (0, 1, 5, 100, 4096, 70_000, 300_000)
SAMPLES = [np.random.default_rng(k).bytes(SIZES[k % len(SIZES)]) for k in range(40)]
COMPRESSIONS = [("none", ""), ("gzip", "GZIP"), ("zlib", "ZLIB")]


@pytest.mark.parametrize(("ours", "theirs"), COMPRESSIONS)
def test_written_here_read_by_tensorflow(tmp_path: Path, ours: str, theirs: str) -> None:
    path = str(tmp_path / "a.tfrecord")
    with ffserve.create(path, compression=ours) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    found = [record.numpy() for record in tf.data.TFRecordDataset(path, theirs)]
    assert found == SAMPLES


@pytest.mark.parametrize(("ours", "theirs"), COMPRESSIONS)
def test_written_by_tensorflow_read_here(tmp_path: Path, ours: str, theirs: str) -> None:
    path = str(tmp_path / "a.bin")
    with tf.io.TFRecordWriter(path, theirs) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    with ffserve.open(path, server="off") as reader:
        assert [sample.tobytes() for sample in reader] == SAMPLES
        assert len(reader) == 40 and [bytes(s) for s in reader.read([39, 6])] == SAMPLES[39::-33]
    if ours == "none":
        with ffserve.create(tmp_path / "b.tfrecord") as again:
            for sample in SAMPLES:
                again.write(sample)
        assert (tmp_path / "b.tfrecord").read_bytes() == Path(path).read_bytes()


FEATURES: dict[str, Any] = {
    "int": [-(2**63), 0, 2**63 - 1],
    "float": [0.5, float("inf"), -1.25],
    "bytes": [b"", b"\0\xff", "é".encode()],
    "scalar": 7,
    "none": np.zeros(0, np.int64),
}


def feature(value: Any) -> Any:
    values = value if isinstance(value, (list, np.ndarray)) else [value]
    if len(values) and isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if len(values) and isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def test_example_both_ways() -> None:
    features = {name: feature(value) for name, value in FEATURES.items()}
    theirs = tf.train.Example(features=tf.train.Features(feature=features))
    ours = example.encode(FEATURES)
    assert tf.train.Example.FromString(ours) == theirs
    decoded = example.decode(theirs.SerializeToString())
    assert tf.train.Example.FromString(example.encode(decoded)) == theirs
    parsed = tf.io.parse_single_example(
        ours,
        {
            "int": tf.io.VarLenFeature(tf.int64),
            "float": tf.io.VarLenFeature(tf.float32),
            "bytes": tf.io.VarLenFeature(tf.string),
            "scalar": tf.io.FixedLenFeature([], tf.int64),
        },
    )
    assert parsed["int"].values.numpy().tolist() == FEATURES["int"]
    assert parsed["float"].values.numpy().tolist() == FEATURES["float"]
    assert parsed["bytes"].values.numpy().tolist() == FEATURES["bytes"]
    assert parsed["scalar"].numpy() == 7


def test_sequence_example_both_ways() -> None:
    context, lists = {"id": 3}, {"tokens": [[1, 2], [3]], "words": [[b"a"], [b"b", b""]]}
    theirs = tf.train.SequenceExample(
        context=tf.train.Features(feature={"id": feature(3)}),
        feature_lists=tf.train.FeatureLists(
            feature_list={
                name: tf.train.FeatureList(feature=[feature(step) for step in steps])
                for name, steps in lists.items()
            }
        ),
    )
    assert tf.train.SequenceExample.FromString(example.encode_sequence(context, lists)) == theirs
    found = example.decode_sequence(theirs.SerializeToString())
    again = example.encode_sequence(found.context, found.lists)
    assert tf.train.SequenceExample.FromString(again) == theirs


# ---- ffserve.tensorflow -----------------------------------------------------------------------


@pytest.fixture(params=["a.ffr", "a.recordio", "a.tfrecord", "a.tfrecord.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file of each kind."""
    with ffserve.create(tmp_path / request.param) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    return str(tmp_path / request.param)


def test_dataset(path: str) -> None:
    data = ffserve.tensorflow.dataset(path, batch=7)
    for _ in range(2):
        assert [record.numpy() for record in data] == SAMPLES
    batches = list(data.batch(16).prefetch(1))
    assert [len(batch) for batch in batches] == [16, 16, 8]
    known = -2 if path.endswith(".gz") else len(SAMPLES)
    assert data.cardinality().numpy() == known


def test_dataset_in_an_order(path: str) -> None:
    order = [5, 3, 3, 39]
    with ffserve.open(path, server="off") as reader:
        data = ffserve.tensorflow.dataset(reader, indices=order)
        assert [record.numpy() for record in data] == [SAMPLES[k] for k in order]
        assert len(data) == 4
        data = ffserve.tensorflow.dataset(reader, indices=lambda epoch: [epoch, 0])
        for epoch in range(3):
            assert [r.numpy() for r in data] == [SAMPLES[epoch], SAMPLES[0]]


def test_dataset_of_damaged_samples_raises_with_our_text(tmp_path: Path) -> None:
    damaged = Path(__file__).parents[1] / "golden" / "tfrecord" / "bad_data.tfrecord"
    seen = []
    with pytest.raises(tf.errors.OpError, match=r"sample 3.*checksum"):
        for record in ffserve.tensorflow.dataset(damaged, batch=1):
            seen.append(record)
    assert len(seen) == 3
    assert len(list(ffserve.tensorflow.dataset(damaged, on_error="skip"))) == 7


def test_chunks_of_a_recordio_file(tmp_path: Path) -> None:
    path = tmp_path / "a.recordio"
    with ffserve.create(path, max_chunk_size=5000) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    tasks = ffserve.recordio.index(path).partition(3)
    found: list[bytes] = []
    for task in tasks:
        data = ffserve.tensorflow.chunks(path, task.chunks.start, task.chunks.stop)
        assert len(data) == len(task.records)
        found += [record.numpy() for record in data]
    assert found == SAMPLES
    assert [record.numpy() for record in ffserve.tensorflow.chunks(path)] == SAMPLES
    with pytest.raises(IndexError):
        ffserve.tensorflow.chunks(path, 0, 10_000)


def test_columns_of_examples(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": k, "x": k / 2, "name": b"n\0%d\0" % k, "list": list(range(k % 4)), "more": 1}
        for k in range(20)
    ]
    path = tmp_path / "a.tfrecord"
    with ffserve.create(path) as writer:
        for row in rows:
            writer.write(example.encode(row))
    schema = pa.schema(
        [
            *(("id", pa.int64()), ("x", pa.float64()), ("name", pa.binary())),
            *(("list", pa.list_(pa.int32())), ("absent", pa.list_(pa.string()))),
        ]
    )
    data = ffserve.tensorflow.examples(path, schema, batch=8)
    for _ in range(2):
        batches = list(data.prefetch(1))
        assert [len(batch["id"]) for batch in batches] == [8, 8, 4]
        for name in ("id", "x", "name"):
            found = [value for batch in batches for value in batch[name].numpy().tolist()]
            assert found == [row[name] for row in rows]
        lists = [value for batch in batches for value in batch["list"].to_list()]
        assert lists == [row["list"] for row in rows]
        assert all(batch["absent"].to_list() == [[]] * len(batch["id"]) for batch in batches)
    total = sum(int(tf.reduce_sum(batch["list"])) for batch in data.map(lambda batch: batch))
    assert total == sum(sum(row["list"]) for row in rows)
    some = ffserve.tensorflow.examples(path, pa.schema([("id", pa.int64())]), indices=[7, 3])
    assert [batch["id"].numpy().tolist() for batch in some] == [[7, 3]]
    absent = ffserve.tensorflow.examples(path, pa.schema([("nope", pa.int64())]))
    with pytest.raises(tf.errors.OpError, match=r"row 0, column 'nope': it is missing"):
        list(absent)
    with pytest.raises(UsageError, match=r"'d' has the type decimal128"):
        ffserve.tensorflow.examples(path, pa.schema([("d", pa.decimal128(5, 2))]))


def test_columns_of_sequence_examples(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    steps = [[[1, 2], []], [], [[3]]]
    with ffserve.create(path) as writer:
        for k, lists in enumerate(steps):
            writer.write(example.encode_sequence({"id": k}, {"steps": lists}))
    schema = pa.schema([("steps", pa.list_(pa.list_(pa.int64()))), ("id", pa.int64())])
    [batch] = ffserve.tensorflow.examples(path, schema, record="SequenceExample")
    assert batch["steps"].to_list() == steps and batch["id"].numpy().tolist() == [0, 1, 2]
