"""`ffserve.recordio`: pyrecordio's programs, appending after a crash, splitting into tasks."""

from __future__ import annotations

import codecs
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon
from recordio_files import WAYS, opened, records, written

import ffserve
from ffserve.errors import FormatError, SampleIndexError, TruncatedError, UsageError
from ffserve.recordio import Compressor, File, Index, index

WORDS = [b"china", b"usa", b"russia", b"", b"india", b"thailand", b"finland", b"san marino"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "x.recordio")


def fill(path: str, words: list[bytes] = WORDS, mode: str = "w", **options: Any) -> None:
    with File(path, mode, **options) as out:
        for word in words:
            out.write(word)


def test_the_example_runs_as_it_stands(path: str) -> None:
    recordio = File(path, "write")
    recordio.write("abc")
    recordio.write("Bjørn")
    recordio.close()
    with File(path, "read") as recordio:
        assert recordio.count() == len(recordio) == 2
        assert recordio.get(0) == recordio[0] == b"abc"
        assert list(recordio) == [b"abc", "Bjørn".encode()]


def test_reading_by_index_and_in_order(path: str) -> None:
    fill(path, max_chunk_size=12)
    with File(path, "r") as file:
        assert [file.get(k) for k in range(len(WORDS))] == WORDS
        assert list(file) == WORDS and list(iter(file)) == WORDS
        for k in (-1, len(WORDS)):
            with pytest.raises(IndexError):
                file.get(k)
        assert file[-1] == WORDS[-1] and file[1:6:2] == WORDS[1:6:2]
        with pytest.raises(SampleIndexError):
            file[-len(WORDS) - 1]
        for start, end in [(0, None), (3, 6), (5, 100), (100, None), (-2, None), (4, 4)]:
            assert list(file.get_reader(start, end)) == WORDS[start:end]
        with pytest.raises(RuntimeError):
            file.write(b"x")
    with pytest.raises(UsageError):
        file.get(0)
    file.close()


def test_reading_and_writing_in_the_wrong_mode(path: str) -> None:
    with File(path, "w") as file:
        for use in (file.count, file.index, file.get_reader, lambda: file.get(0)):
            with pytest.raises(RuntimeError, match="not opened for reading"):
                use()
        with pytest.raises(UsageError):
            file.write(7)
        file.write(bytearray(b"ab"))
        file.write(np.arange(3, dtype=np.uint8))
    with File(path) as file:
        assert list(file) == [b"ab", b"\0\1\2"]
    with pytest.raises(ValueError, match="mode"):
        File(path, "rw")
    with pytest.raises(ValueError, match="compressor"):
        File(path, "w", compressor="zip")


def test_encoder_and_decoder(path: str) -> None:
    def turned(record: bytes) -> bytes:
        return codecs.encode(record.decode(), "rot_13").encode()

    fill(path, encoder=turned)
    with File(path) as plain, File(path, decoder=turned) as file:
        assert list(plain) == [turned(word) for word in WORDS]
        assert list(file) == WORDS == [file.get(k) for k in range(len(WORDS))] == file[:]


@pytest.mark.parametrize("compressor", [*Compressor, "none", "snappy", "gzip"])
def test_the_compressor_is_honoured(path: str, compressor: Any) -> None:
    fill(path, compressor=compressor)
    name = getattr(compressor, "name", compressor).replace("no_compression", "none")
    shard = opened(Path(path).read_bytes())
    assert shard.compression(0) == name and shard.dialect.name == "py"
    with File(path) as file:
        assert list(file) == WORDS


def test_a_file_appears_when_it_is_closed_and_not_after_an_error(path: str) -> None:
    with pytest.raises(ZeroDivisionError), File(path, "w") as file:
        file.write("abc")
        _ = 1 / 0
    assert os.listdir(os.path.dirname(path)) == []


@pytest.mark.check
@pytest.mark.parametrize("way", WAYS)
def test_appending_after_a_crash_at_every_byte(way: tuple[str, str], path: str) -> None:
    options = {"dialect": way[0], "compression": way[1], "max_chunk_size": 20}
    content = written(WORDS, **options)
    shard = opened(content)
    for size in range(len(content) + 1):
        Path(path).write_bytes(content[:size])
        whole = int(np.searchsorted(shard.chunks.ends, size, side="right"))
        fill(path, [b"new", b"er"], "a", compressor="none", max_chunk_size=3)
        expected = [*WORDS[: shard.chunks.firsts[whole]], b"new", b"er"]
        assert records(Path(path).read_bytes()) == expected, size
    with File(path) as file:
        assert list(file) == [*WORDS, b"new", b"er"]
        assert opened(Path(path).read_bytes()).dialect.name == way[0]


def test_appending_begins_a_file_and_goes_on_with_it(path: str) -> None:
    fill(path, WORDS[:3], "a")
    fill(path, [], "append")
    fill(path, WORDS[3:], "a", compressor="gzip")
    with File(path) as file:
        assert list(file) == WORDS


def test_appending_refuses_a_damaged_file_and_does_not_cut_it(path: str) -> None:
    content = bytearray(written(WORDS, max_chunk_size=12, compression="none"))
    for place, kind in ((19, TruncatedError), (0, FormatError)):
        damaged = bytearray(content)
        damaged[place] ^= 0x80
        Path(path).write_bytes(damaged)
        with pytest.raises(kind):
            File(path, "a")
        assert Path(path).read_bytes() == damaged


def test_appending_takes_turns_and_the_dialect_of_the_file(path: str) -> None:
    fill(path, dialect="go")
    with pytest.raises(UsageError, match="dialect go"):
        File(path, "a", dialect="py")
    with File(path, "a") as file:
        with pytest.raises(UsageError, match="another writer"):
            File(path, "a")
        file.write(b"more")
    with pytest.raises(UsageError):
        file.write(b"late")
    with File(path, "a") as file:
        file.write(b"last")
        child = os.fork()
        if child == 0:
            try:
                file.write(b"never")
            except UsageError:
                file.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    with File(path) as file:
        assert list(file) == [*WORDS, b"more", b"last"]


KILLED = """
import os, sys
from ffserve.recordio import File
file = File(sys.argv[1], "a", max_chunk_size=100)
for k in range(10_000):
    file.write(b"%6d" % k)
    if k == 50:
        print("on", flush=True)
"""


def test_a_killed_writer_leaves_all_complete_chunks(path: str) -> None:
    fill(path)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"on\n"
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() in (0, -signal.SIGKILL)
    fill(path, [b"after"], "a")
    with File(path) as file:
        found = list(file)
    assert found[: len(WORDS)] == WORDS and found[-1] == b"after"
    rest = found[len(WORDS) : -1]
    assert rest == [b"%6d" % k for k in range(len(rest))] and len(rest) >= 32


def test_reading_the_rest_of_a_damaged_file(path: str) -> None:
    content = written(WORDS, max_chunk_size=12)
    Path(path).write_bytes(content[:-3])
    with pytest.raises(TruncatedError):
        File(path)
    with File(path, on_error="skip") as file:
        assert list(file) == WORDS[: file.count()] and file.count() >= 6


@pytest.mark.parametrize("k", [1, 2, 3, 7, 8, 50])
def test_a_file_is_split_into_tasks(path: str, k: int) -> None:
    words = [bytes([c]) * (c % 23) for c in range(200)]
    fill(path, words, max_chunk_size=60)
    with File(path) as file:
        found = file.index()
        tasks = found.partition(k)
        assert len(tasks) == k and found.record_count == 200
        assert [r for task in tasks for r in task.records] == list(range(200))
        assert [c for task in tasks for c in task.chunks] == list(range(len(found)))
        for task in tasks:
            assert list(file.get_reader(task.records.start, task.records.stop)) == [
                words[r] for r in task.records
            ]
            # And by its bytes alone.
            content = Path(path).read_bytes()[task.begin : task.end]
            assert records(content) == [words[r] for r in task.records]
        most = max(found.counts)
        assert all(abs(len(task.records) - 200 / k) <= most for task in tasks)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(UsageError):
            found.partition(wrong)  # type: ignore[arg-type]


def test_an_empty_file_is_split_into_nothing(path: str) -> None:
    fill(path, [])
    assert isinstance(index(path), Index) and len(index(path)) == 0
    assert [len(task.records) for task in index(path).partition(3)] == [0, 0, 0]


def test_through_the_daemon(path: str, daemon: Daemon) -> None:
    fill(path)
    with File(path, server=daemon.socket) as file:
        assert list(file) == WORDS
        again = pickle.loads(pickle.dumps(file))
        assert again.get(2) == WORDS[2]
        again.close()


def test_torch_dataset(path: str) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    from ffserve.recordio import TorchDataset

    fill(path)
    with TorchDataset(path) as dataset:
        assert isinstance(dataset, torch_data.Dataset)
        assert list(dataset) == WORDS and len(dataset) == len(WORDS)
        loader = torch_data.DataLoader(dataset, batch_size=3, num_workers=2, collate_fn=list)
        assert [word for batch in loader for word in batch] == WORDS
    with TorchDataset(path, decoder=bytes.decode) as dataset:
        assert dataset[0] == "china"


def test_importing_it_is_light() -> None:
    program = (
        "import sys, ffserve.recordio; print('torch' in sys.modules, 'cramjam' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr


def test_it_is_part_of_ffserve() -> None:
    assert ffserve.recordio.File is File
