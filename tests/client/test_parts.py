"""Parts of samples: ranges of bytes, and samples as files, whatever the source."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, damage, write
from hypothesis import given
from hypothesis import strategies as st
from origins import http_origin

import ffserve
from ffserve.errors import ChecksumError, SampleIndexError, UsageError

SIZES = (0, 1, 700, 5000, 1 << 20)
CONTENTS = [np.random.default_rng(k).bytes(SIZES[k % 5]) for k in range(20)]
RANGES = [(4, 10, 20), (4, 15, 1 << 20), (0, 0, 0), (3, 4999, 5000), (9, 0, 1 << 20), (4, 10, 20)]


@pytest.fixture(params=["daemon", "off"])
def server(request: pytest.FixtureRequest, daemon: Daemon) -> str:
    return daemon.socket if request.param == "daemon" else "off"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", CONTENTS)


def expected(ranges: list[tuple[int, int, int]]) -> list[bytes]:
    return [CONTENTS[k][start:stop] for k, start, stop in ranges]


def test_parts_are_those_of_the_samples(path: str, server: str) -> None:
    with ffserve.open(path, server=server) as reader:
        parts = reader.read_ranges(RANGES)
        assert [bytes(part) for part in parts] == expected(RANGES)
        assert not any(part.verified for part in parts)
        parts[0][:] = 0
        assert bytes(reader.read_range(4, 10, 20)) == CONTENTS[4][10:20]
        assert reader.read_ranges([]) == []
        assert reader.stats()["source"] == reader.source


def test_a_part_of_a_cached_sample_is_verified(path: str, daemon: Daemon) -> None:
    with ffserve.open(path, server=daemon.socket) as reader:
        assert not reader.read_range(3, 0, 10).verified
        reader.read([3])
        part, other = reader.read_ranges([(3, 7, 19), (8, 7, 19)])
        assert part.verified and not other.verified
        assert [bytes(part), bytes(other)] == expected([(3, 7, 19), (8, 7, 19)])
        assert (part + 0).verified is False, "another array"
    with ffserve.open(path, server=daemon.socket, verify=False) as reader:
        reader.read([3])
        assert not reader.read_range(3, 7, 19).verified, "nothing was compared"


def test_verify_reads_whole_samples(path: str, server: str) -> None:
    damage(path, 3)
    with ffserve.open(path, server=server) as reader:
        assert bytes(reader.read_range(3, 0, 10)) == CONTENTS[3][:10]
        (part,) = reader.read_ranges([(4, 5, 9)], verify=True)
        assert part.verified and bytes(part) == CONTENTS[4][5:9]
        with pytest.raises(ChecksumError):
            reader.read_range(3, 0, 10, verify=True)
        with pytest.raises(ChecksumError):
            reader.open_sample(3, verify=True)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "recordio", "compression": "snappy"},
        {"format": "tfrecord", "compression": "gzip"},
    ],
)
def test_parts_in_compressed_chunks(tmp_path: Path, server: str, options: Any) -> None:
    with ffserve.create(tmp_path / "a", **options) as writer:
        for content in CONTENTS:
            writer.write(content)
    with ffserve.open(tmp_path / "a", server=server) as reader:
        parts = reader.read_ranges(RANGES)
        assert [bytes(part) for part in parts] == expected(RANGES)
        assert all(part.verified for part in parts)


@pytest.mark.parametrize("bad", [(0, 0, 1), (1, -1, 1), (1, 1, 0), (1, 0, 2)])
def test_ranges_outside_their_sample(path: str, server: str, bad: tuple[int, int, int]) -> None:
    with (
        ffserve.open(path, server=server) as reader,
        pytest.raises(UsageError, match=f"is not inside sample {bad[0]}"),
    ):
        reader.read_ranges([(3, 0, 1), bad])


def test_no_such_sample(path: str, server: str) -> None:
    with ffserve.open(path, server=server) as reader, pytest.raises(SampleIndexError):
        reader.read_range(20, 0, 0)


def test_a_file_that_was_replaced_gives_no_other_bytes(path: str, daemon: Daemon) -> None:
    with ffserve.open(path, server=daemon.socket) as reader:
        Path(path).unlink()
        write(path, CONTENTS[::-1])
        part = reader.read_range(3, 5, 20)
        assert part.verified and bytes(part) == CONTENTS[3][5:20], "the daemon has the old one"


def test_only_the_bytes_of_parts_are_fetched(tmp_path: Path) -> None:
    with http_origin() as origin:
        url = origin.put("a.ffr", Path(write(tmp_path / "a.ffr", CONTENTS)).read_bytes())
        with ffserve.open(url, server="off") as reader:
            origin.sent.clear()
            ranges = [(4, 1000, 2000), (4, 1500, 2500), (9, 500_000, 500_100)]
            parts = reader.read_ranges(ranges)
            assert [bytes(part) for part in parts] == expected(ranges)
            assert not any(part.verified for part in parts)
            assert 0 < origin.sent["a.ffr"] <= 2000


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ffserve.Reader]:
    path = write(tmp_path_factory.mktemp("parts") / "a.ffr", CONTENTS)
    with ffserve.open(path, server="off") as opened:
        yield opened


@pytest.mark.check
@given(
    st.integers(0, 4),
    st.lists(
        st.one_of(
            st.tuples(st.just("read"), st.integers(-1, 2000)),
            st.tuples(st.just("seek"), st.integers(-(1 << 20), 2 << 20), st.integers(0, 2)),
            st.tuples(st.just("tell")),
            st.tuples(st.just("copy")),
        ),
        max_size=12,
    ),
)
def test_a_sample_is_a_file(reader: ffserve.Reader, index: int, calls: list[Any]) -> None:
    """Whatever is called, it answers as io.BytesIO does."""
    file: Any = reader.open_sample(index)
    other = io.BytesIO(CONTENTS[index])
    for name, *arguments in calls:
        if name == "copy":
            file = pickle.loads(pickle.dumps(file))
            continue
        if name == "seek":
            offset, whence = arguments
            if (0, other.tell(), len(CONTENTS[index]))[whence] + offset < 0:
                with pytest.raises(UsageError, match="before the beginning"):
                    file.seek(offset, whence)
                continue
        assert getattr(file, name)(*arguments) == getattr(other, name)(*arguments)


KIB = 1 << 10


def test_a_remote_video_takes_few_requests(tmp_path: Path) -> None:
    """Its beginning, its index at the end, its beginning again, then the frames of a window."""
    content = np.random.default_rng(0).bytes(8192 * KIB)
    with http_origin() as origin:
        url = origin.put("a.ffr", Path(write(tmp_path / "a.ffr", [content])).read_bytes())
        with ffserve.open(url, server="off") as reader:
            file = reader.open_sample(0)
            origin.spans.clear()
            for start, stop in ((0, 64), (7500, 8192), (64, 300), (2000, 3900)):
                file.seek(start * KIB)
                for at in range(start * KIB, stop * KIB, 50_000):
                    part = content[at : min(at + 50_000, stop * KIB)]
                    assert file.read(len(part)) == part
            first = min(begin for _, begin, _ in origin.spans)
            assert sorted((a - first) // KIB for _, a, _ in origin.spans) == [
                0, 2000, 2512, 3024, 7500,
            ]  # fmt: skip
            assert sum(b - a for _, a, b in origin.spans) == (512 + 692 + 512 + 512 + 1024) * KIB


def test_other_programs_read_a_sample(tmp_path: Path, server: str) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("name", b"content" * 100_000)
    path = write(tmp_path / "a.ffr", [packed.getvalue()])
    with ffserve.open(path, server=server) as reader:
        file: Any = reader.open_sample(0)
        assert file.readable() and file.seekable() and not file.writable() and file.verified
        with zipfile.ZipFile(file) as archive:
            assert archive.read("name") == b"content" * 100_000
        assert not file.verified
        file.close()
        with pytest.raises(ValueError, match="closed"):
            file.read(1)
        assert io.BufferedReader(reader.open_sample(0)).read() == packed.getvalue()
        with reader.open_sample(0, verify=True) as file:
            assert file.read() == packed.getvalue() and file.verified


def test_parts_of_fields_of_tar_files(tmp_path: Path, server: str, daemon: Daemon) -> None:
    path = str(tmp_path / "a.tar")
    with ffserve.create(path, format="tar") as writer:
        for content in CONTENTS:
            writer.write({"bin": content, "txt": b"text"})
    with ffserve.open(path, server=server, fields=["bin"]) as reader:
        for _ in range(2):
            parts = reader.read_ranges(RANGES)
            assert [bytes(part) for part in parts] == expected(RANGES)
            assert not any(part.verified for part in parts), "tar files have no checksums"
            reader.read(range(len(reader)))
        assert reader.open_sample(4).read() == CONTENTS[4]
        assert not reader.read_range(4, 0, 9, verify=True).verified
    with ffserve.open(path, server=server) as reader:
        for call in (lambda: reader.read_range(0, 0, 1), lambda: reader.open_sample(0)):
            with pytest.raises(UsageError, match=r"fields bin, txt.*\['bin'\]"):
                call()
