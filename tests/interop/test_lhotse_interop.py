"""Tar files that Lhotse writes (its Shar format): the same bytes by its own reader and by ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ffserve

pytestmark = [
    pytest.mark.interop,
    # Lhotse leaves files to the garbage collector, and its functions use what torch deprecates.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

lhotse = pytest.importorskip("lhotse", reason="needs lhotse (make interop)")

from lhotse.array import Array  # noqa: E402
from lhotse.shar import ArrayTarWriter, AudioTarWriter, TarIterator  # noqa: E402

COUNT, RATE = 45, 16_000


def is_placeholder(number: int) -> bool:
    return number % 7 == 3


def audio(number: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    return rng.uniform(-0.9, 0.9, (1, 800 + 10 * number)).astype(np.float32)


def written_audio(pattern: str) -> list[str]:
    with AudioTarWriter(pattern, shard_size=20, format="wav") as writer:
        for k in range(COUNT):
            if is_placeholder(k):
                writer.write_placeholder(f"cut-{k:03}-ü")
                continue
            samples = audio(k)
            manifest = lhotse.Recording(
                id=f"cut-{k:03}",
                sources=[lhotse.AudioSource(type="memory", channels=[0], source="")],
                sampling_rate=RATE,
                num_samples=samples.shape[1],
                duration=samples.shape[1] / RATE,
            )
            writer.write(f"cut-{k:03}-ü", samples, RATE, manifest)
    return list(writer.output_paths)


def written_arrays(pattern: str) -> list[str]:
    with ArrayTarWriter(pattern, shard_size=20) as writer:
        for k in range(COUNT):
            if is_placeholder(k):
                writer.write_placeholder(f"cut-{k:03}-ü")
                continue
            values = audio(k)
            about = Array("memory_raw", "", "", list(values.shape))
            writer.write(f"cut-{k:03}-ü", values, about)
    return list(writer.output_paths)


@pytest.mark.parametrize("field", ["wav", "npy"])
def test_shards_of_its_writers(tmp_path: Path, field: str) -> None:
    written = {"wav": written_audio, "npy": written_arrays}[field]
    paths = written(str(tmp_path / "recording.%06d.tar"))
    assert len(paths) == 3
    theirs: list[tuple[str, bytes | None]] = []
    for path in paths:
        for manifest, name in TarIterator(path):
            content = None
            if manifest is not None:
                content = manifest.storage_key if field == "npy" else manifest.sources[0].source
            theirs.append((str(name.with_suffix("")), content))
    with ffserve.open(paths, server="off") as reader:
        assert set(reader.fields) == {field, "json", "nodata", "nometa"}
        found = [reader[k][field] for k in range(COUNT)]
        ours = [None if each is None else bytes(each) for each in found]
        assert list(zip(reader.keys(range(COUNT)), ours, strict=True)) == theirs
    assert [content is None for _, content in theirs] == list(map(is_placeholder, range(COUNT)))
    with ffserve.open(paths, server="off", fields=[field], on_error="skip") as reader:
        assert [bytes(each) for each in reader] == [each for each in ours if each is not None]
