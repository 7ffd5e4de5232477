"""What ffserve writes pyrecordio 0.0.4 reads, and the other way round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from originals import python_with, run

from ffserve.recordio import Compressor, File

pytestmark = pytest.mark.interop

SIZES = (0, 1, 5, 19, 20, 21, 300, 0, 0, 4000, 70_000)
RECORDS = [np.random.default_rng(k).bytes(SIZES[k % len(SIZES)]) for k in range(60)]
RECORDS += [b"text " * k for k in range(60)]

WRITE = """
import sys
from recordio.recordio.header import Compressor
from recordio.recordio.writer import Writer
path, compressor, size = sys.argv[1:]
with open(path, "wb") as out:
    writer = Writer(out, int(size), Compressor[compressor])
    for line in sys.stdin.read().split("\\n"):
        writer.write(bytes.fromhex(line))
    writer.flush()
"""
READ = """
import sys
from recordio import File
with File(sys.argv[1], "r") as file:
    assert file.count() == sum(1 for _ in file)
    for k in range(file.count()):
        print(file.get(k).hex())
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_with("pyrecordio==0.0.4", "crc32c", "python-snappy")


@pytest.mark.parametrize("size", [20, 1024, 1 << 20])
@pytest.mark.parametrize("compressor", list(Compressor))
def test_both_ways(python: Path, tmp_path: Path, compressor: Compressor, size: int) -> None:
    ours, theirs = str(tmp_path / "ours.recordio"), str(tmp_path / "theirs.recordio")
    with File(ours, "w", compressor=compressor, max_chunk_size=size) as out:
        for record in RECORDS:
            out.write(record)
    read = run(python, READ, ours).split("\n")[:-1]
    assert [bytes.fromhex(line) for line in read] == RECORDS
    run(python, WRITE, theirs, compressor.name, str(size), feed=[r.hex() for r in RECORDS])
    with File(theirs) as file, File(ours) as own:
        assert list(file) == RECORDS
        found, expected = file.index(), own.index()
        assert found.counts.tolist() == expected.counts.tolist()
    if compressor is Compressor.no_compression:
        assert Path(theirs).read_bytes() == Path(ours).read_bytes()


def test_what_was_appended_is_read(python: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "x.recordio")
    run(python, WRITE, path, "snappy", "1024", feed=[r.hex() for r in RECORDS])
    size = Path(path).stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - 7)
    with File(path, "a", compressor="gzip", max_chunk_size=50) as file:
        kept = file._writer.count  # type: ignore[union-attr]
        for record in RECORDS[:30]:
            file.write(record)
    read = run(python, READ, path).split("\n")[:-1]
    assert [bytes.fromhex(line) for line in read] == RECORDS[:kept] + RECORDS[:30]
    assert 0 < kept < len(RECORDS)
