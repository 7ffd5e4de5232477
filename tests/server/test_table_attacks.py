"""Files that cost their owner nothing, and the daemon memory or time: holes, zeros, damage.

Each attack has an honest user beside it, whose samples are read meanwhile.
"""

from __future__ import annotations

import gzip
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from daemon import Daemon, Raw, asking, run_python, serving, until, write
from test_threats import ALICE, BOB, TRUTH, becoming, read_by

from ffserve import protocol
from ffserve.disk import index_file
from ffserve.engine.codec import crc32c, mask
from ffserve.formats.recordio_codec import MAGIC

pytestmark = [
    pytest.mark.check,
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users"),
]

COUNT = 10_000_000
"""Records that a file of a few KiB claims."""
MOST_GROWN = 200 << 20
"""The daemon's own memory may grow by so many bytes, whatever one user does."""
OPEN = """
with ffserve.open(sys.argv[2], server=sys.argv[1], **eval(sys.argv[3])) as reader:
    print(len(reader))
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving(options=["--socket-mode", "0666"]) as running:
        running.status()
        yield running


@pytest.fixture
def folder(daemon: Daemon) -> Path:
    """A directory of the hostile user."""
    made = daemon.directory / "hostile"
    made.mkdir()
    os.chown(made, ALICE, ALICE)
    return made


def memory_size(daemon: Daemon) -> int:
    """Bytes of memory of the daemon, what it shares included."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def check(daemon: Daemon, files: list[Path], about: str, **options: object) -> None:
    """Let the hostile user open files all at once, of which the last one is to be refused."""
    honest = write(daemon.directory / "honest.ffr", TRUTH)
    assert read_by(daemon, honest, BOB) == TRUTH
    before = memory_size(daemon)
    for file in files:
        os.chown(file, ALICE, ALICE)
    program = """
readers = []
try:
    for path in sys.argv[3:]:
        readers.append(ffserve.open(path, server=sys.argv[1], **eval(sys.argv[2])))
except ffserve.ReadError as error:
    print(error, error.hint)
input()
"""
    code = becoming(ALICE) + program.replace("input()", "print(len(readers)); sys.stdout.flush()")
    done = run_python(code, daemon.socket, repr(options), *files)
    assert memory_size(daemon) - before < MOST_GROWN
    *refused, count = done.stdout.splitlines()
    assert int(count) < len(files) and about in refused[0] and str(files[int(count)]) in refused[0]
    assert "are left" in refused[0] and "close readers" in refused[0]
    assert read_by(daemon, honest, BOB) == TRUTH


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_recordio_chunk_of_zeros_claimed_all_memory(
    daemon: Daemon, folder: Path, on_error: str
) -> None:
    """A tolerant scan had what it found admitted when the tables were made already."""
    file = folder / "a.recordio"
    file.write_bytes(struct.pack("<5I", MAGIC, COUNT, 0, 1, 4 * COUNT))
    os.truncate(file, 20 + 4 * COUNT)
    assert file.stat().st_blocks <= 8
    check(daemon, [file], "it has holes", on_error=on_error)


def test_a_tfrecord_file_of_zeros_claimed_all_memory(daemon: Daemon, folder: Path) -> None:
    file = folder / "a.tfrecord"
    file.touch()
    os.truncate(file, 16 * COUNT)
    check(daemon, [file], "it has holes", verify=False, format="tfrecord")


def test_empty_records_in_gzip_took_60_mb_an_open(daemon: Daemon, folder: Path) -> None:
    header = struct.pack("<Q", 0)
    empty = header + struct.pack("<I", mask(crc32c(header))) + struct.pack("<I", mask(crc32c(b"")))
    content = gzip.compress(empty * (1 << 20))
    assert len(content) < 64 << 10
    files = [folder / f"{k}.tfrecord.gz" for k in range(4)]
    for file in files:
        file.write_bytes(content)
    check(daemon, files, "nearly all equal")


def test_a_sparse_index_file_of_a_sparse_file_was_believed(daemon: Daemon, folder: Path) -> None:
    """It is valid: all records are empty."""
    file, index = folder / "a.tfrecord", folder / ".a.tfrecord.ffx"
    file.touch()
    os.truncate(file, 16 * COUNT)
    with file.open("rb") as opened:
        identity = index_file.Identity.of(opened.fileno(), str(file), "tfrecord")
    content = index_file.encode(identity, np.zeros(COUNT, np.uint64), np.zeros(COUNT, np.uint32))
    index.write_bytes(content[:72])
    os.truncate(index, len(content) - 4)
    with index.open("ab") as opened:
        opened.write(content[-4:])
    assert index.stat().st_blocks <= 16
    os.chown(index, ALICE, ALICE)
    del content
    check(daemon, [file], "it has holes", format="tfrecord")


def test_a_user_has_a_part_of_the_room_for_tables() -> None:
    """What is closed gives way to what is opened; others are served."""
    patch = "import ffserve.limits as l; l.LEAST_TABLES_SIZE = 16 << 20"
    with serving(arena="64MiB", patch=patch, options=["--socket-mode", "0666"]) as daemon:
        path = write(daemon.directory / "0.ffr", [b"%d" % k for k in range(100_000)])
        files = [Path(path)]
        for k in range(1, 6):
            files.append(daemon.directory / f"{k}.ffr")
            files[-1].write_bytes(files[0].read_bytes())
        for file in files:
            file.chmod(0o644)
        check(daemon, files, "has tables of")
        program = OPEN.replace("print(len(reader))", "assert bytes(reader[7]) == b'7'")
        for file in files * 2:
            run_python(becoming(ALICE) + program, daemon.socket, file, "{}")


def sparse_recordio(path: Path, chunks: int) -> None:
    """Write chunks of nearly 4 GiB of zeros each, with wrong checksums: a few KiB on disk."""
    size = 0xF000_0000
    with path.open("wb") as file:
        for k in range(chunks):
            file.seek(k * (20 + size))
            file.write(struct.pack("<5I", MAGIC, 1, 1, 1, size))
        file.truncate(chunks * (20 + size))
    os.chown(path, ALICE, ALICE)


@pytest.mark.parametrize("kind", ["tfrecord", "recordio"])
def test_a_tolerant_scan_read_holes_for_hours(daemon: Daemon, folder: Path, kind: str) -> None:
    file = folder / f"a.{kind}"
    if kind == "tfrecord":
        file.write_bytes(b"damaged" * 10)
        os.truncate(file, 15 << 40)
        os.chown(file, ALICE, ALICE)
        expected = "0\n"
    else:
        sparse_recordio(file, 3)
        expected = "the file consists of holes"
    program = OPEN.replace("with", "try:\n  with").replace("    print", "      print") + (
        "except ffserve.ReadError as error: print(error)"
    )
    options = {"format": kind, "on_error": "skip"}
    done = run_python(becoming(ALICE) + program, daemon.socket, file, repr(options))
    assert expected in done.stdout
    honest = write(daemon.directory / "honest.ffr", TRUTH)
    assert read_by(daemon, honest, BOB) == TRUTH


def read_bytes(daemon: Daemon) -> int:
    """Bytes that the daemon has read so far."""
    return int(Path(f"/proc/{daemon.pid}/io").read_text().split()[1])


def begin_scan(daemon: Daemon, file: Path) -> Raw:
    raw = Raw(daemon.socket)
    asked = asking(str(file))
    asked.what.update(tolerant=True, format="recordio")
    raw.send(asked)
    assert isinstance(raw.receive(), protocol.Need)
    raw.pass_files(1, [str(file)])
    return raw


def test_a_tolerant_scan_went_on_without_its_client(folder: Path, daemon: Daemon) -> None:
    del daemon
    patch = "import ffserve.server.files.charges as c; c.SCANNED_ALLOWED = 1 << 60"
    with serving(patch=patch, options=["--socket-mode", "0666"]) as running:
        files = [folder / f"{k}.recordio" for k in range(3)]
        for file in files:
            sparse_recordio(file, 2000)
        honest = write(running.directory / "honest.ffr", TRUTH)
        assert read_by(running, honest, BOB) == TRUTH
        threads = len(os.listdir(f"/proc/{running.pid}/task"))
        raws = [begin_scan(running, file) for file in files]
        begun = read_bytes(running)
        until(lambda: read_bytes(running) > begun + (256 << 20), "a scan is under way")
        assert read_by(running, honest, BOB) == TRUTH
        assert len(os.listdir(f"/proc/{running.pid}/task")) <= threads + 2, "one scan at a time"
        for raw in raws:
            raw.socket.close()

        def quiet() -> bool:
            before = read_bytes(running)
            time.sleep(0.3)
            return read_bytes(running) - before < 8 << 20

        until(quiet, "the scans have ended")
        assert read_by(running, honest, BOB) == TRUTH
