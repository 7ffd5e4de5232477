"""Index files: trusted only if owner, identity and content are right; else a scan replaces them."""

from __future__ import annotations

import os
import shutil
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import run_python, serving
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import ffserve
from ffserve.disk import index_file, shardfile
from ffserve.disk.index_file import Identity, decode, encode
from ffserve.engine.codec import crc32c, mask
from ffserve.errors import ChecksumError, FormatError, ReadError, TruncatedError
from ffserve.formats.tfrecord import TFRecord, frame_header
from ffserve.testing import reader_of

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user")
SAMPLES = [bytes([k]) * (1000 + k) for k in range(250)] * 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    return tmp_path / "cache" / "ffserve" / "index"


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were scanned, one entry per scan."""
    done: list[str] = []
    scan = TFRecord.open

    def watched(self: Any, read_at: Any, size: int, path: str, **options: Any) -> Any:
        done.append(path)
        return scan(self, read_at, size, path, **options)

    monkeypatch.setattr(TFRecord, "open", watched)
    return done


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file that is large enough for an index file, in a directory of this user's own."""
    directory = tmp_path / "data"
    directory.mkdir(mode=0o755)
    with ffserve.create(directory / "a.tfrecord") as writer:
        for sample in SAMPLES:
            writer.write(sample)
    return str(directory / "a.tfrecord")


def beside(path: str) -> Path:
    return Path(path).parent / f".{Path(path).name}.ffx"


def check(path: str, **options: Any) -> None:
    """Read the whole file."""
    with ffserve.open(path, server="off", **options) as reader:
        assert [sample.tobytes() for sample in reader] == SAMPLES


# ---- the bytes --------------------------------------------------------------------------------

WHO = Identity("tfrecord", 1000, 7, 8, 9)
LENGTHS = np.array([4, 0, 2**32 - 1], np.uint64)
CHECKSUMS = np.array([1, 2**32 - 1, 0], np.uint32)


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), max_size=20),
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), 2**63 - 1),
)
def test_what_was_encoded_is_decoded(rows: list[tuple[int, int]], size: int, time: int) -> None:
    who = Identity("recordio", size, time, 2**32 - 1, 0)
    lengths = np.array([length for length, _ in rows], np.uint64)
    checksums = np.array([checksum for _, checksum in rows], np.uint32)
    indexed = decode(encode(who, lengths, checksums, b"kept" * len(rows)), who, "there")
    assert indexed is not None and indexed.path == "there"
    assert indexed.kept == b"kept" * len(rows)
    assert indexed.lengths.tolist() == lengths.tolist()
    assert indexed.checksums.tolist() == checksums.tolist()


def test_eight_bytes_a_record() -> None:
    assert len(encode(WHO, LENGTHS, CHECKSUMS)) == 72 + 3 * 8 + 4
    assert len(encode(WHO, LENGTHS + 1, CHECKSUMS, b"other")) == 72 + 3 * 12 + 4 + 5


def test_every_cut_and_every_flipped_bit_is_refused() -> None:
    content = encode(WHO, LENGTHS, CHECKSUMS, b"kept")
    assert decode(content, WHO) is not None
    for size in range(len(content)):
        assert decode(content[:size], WHO) is None
    assert decode(content + b"\0", WHO) is None
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode(bytes(damaged), WHO) is None


@pytest.mark.parametrize("change", ["format", "size", "mtime_ns", "head", "tail"])
def test_index_file_of_another_file_is_refused(change: str) -> None:
    other = {**vars(WHO), change: "recordio" if change == "format" else 10}
    assert decode(encode(WHO, LENGTHS, CHECKSUMS), Identity(**other)) is None


@pytest.mark.parametrize("count", [2**32, 2**60, 2**64 - 1])
def test_absurd_count_with_a_right_checksum_is_refused(count: int) -> None:
    for place in (56, 64):
        body = bytearray(encode(WHO, LENGTHS, CHECKSUMS)[:-4])
        struct.pack_into("<Q", body, place, count)
        assert decode(bytes(body) + struct.pack("<I", crc32c(body)), WHO) is None


# ---- where it lies ----------------------------------------------------------------------------


def test_second_opening_does_not_scan(path: str, scans: list[str]) -> None:
    check(path)
    assert scans == [path] and beside(path).stat().st_mode & 0o022 == 0
    check(path)
    check(path, verify=False)
    assert scans == [path]
    assert [name for name in os.listdir(os.path.dirname(path)) if name[0] != "."] == ["a.tfrecord"]
    with ffserve.open(os.path.dirname(path), server="off") as reader:
        assert len(reader) == len(SAMPLES)


def test_small_file_gets_none_unless_asked_for(tmp_path: Path, scans: list[str]) -> None:
    path = str(tmp_path / "small.tfrecord")
    with ffserve.create(path) as writer:
        writer.write(b"x")
    with ffserve.open(path, server="off") as reader:
        assert len(reader) == 1
    assert not beside(path).exists() and not scans, "its head has all of it"
    found = shardfile.write_index_file(path)
    assert found is not None and found[1] == str(beside(path)) and beside(path).exists()
    assert shardfile.write_index_file(path) is not None and len(scans) == 1
    assert shardfile.write_index_file(path, renew=True) is not None and len(scans) == 2


def test_a_scan_of_minutes_said_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "a.tfrecord.gz")
    with ffserve.create(path) as writer:
        for _ in range(50):
            writer.write(os.urandom(100_000))
    told = shardfile.progress_of(path, os.path.getsize(path), after_s=0.0)
    with caplog.at_level("WARNING", "ffserve"), open(path, "rb") as file:
        assert shardfile.open_shard(file.fileno(), path, seen=told).count == 50
    said = [record.getMessage() for record in caplog.records]
    assert said and all(line.startswith(f"{path}: ") for line in said)
    done = [int(line.removeprefix(f"{path}: scanned ").split()[0]) for line in said]
    assert done == sorted(done) and done[-1] <= os.path.getsize(path) >> 20
    seen: list[int] = []
    assert shardfile.write_index_file(path, renew=True, seen=seen.append) is not None
    assert seen[-1] == os.path.getsize(path) and len(seen) > 10


def test_format_with_tables_of_its_own_needs_none(tmp_path: Path) -> None:
    with ffserve.create(tmp_path / "a.ffr") as writer:
        writer.write(bytes(2 << 20))
    assert shardfile.write_index_file(str(tmp_path / "a.ffr")) is None
    assert os.listdir(tmp_path) == ["a.ffr"]


def test_directory_of_others_gets_none_of_ours_but_the_cache_does(
    path: str, cache: Path, scans: list[str]
) -> None:
    os.chmod(os.path.dirname(path), 0o1777)
    check(path)
    assert not beside(path).exists() and len(os.listdir(cache)) == 1
    assert cache.stat().st_mode & 0o077 == 0
    check(path)
    assert len(scans) == 1


def limited(cache: Path, **limits: int) -> None:
    known = index_file.CacheDirectory(str(cache), **limits)
    index_file.cache_directories[str(cache)] = known


def test_cache_directory_is_bounded(path: str, cache: Path) -> None:
    os.chmod(os.path.dirname(path), 0o1777)
    check(path)
    [first] = os.listdir(cache)
    size = (cache / first).stat().st_size
    os.utime(cache / first, (1, 1))
    limited(cache, most_size=2 * size)
    for name in ("b.tfrecord", "c.tfrecord"):
        other = os.path.join(os.path.dirname(path), name)
        shutil.copy(path, other)
        check(other)
    assert len(os.listdir(cache)) == 2 and first not in os.listdir(cache)
    limited(cache, most_size=size - 1)
    check(path)
    assert os.listdir(cache) == []


def test_a_link_in_the_place_of_the_cache_lost_the_files_that_it_led_to(
    path: str, cache: Path, tmp_path: Path, scans: list[str]
) -> None:
    """Room was made among them, where another user could make the directory."""
    os.chmod(os.path.dirname(path), 0o1777)
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in ("thesis.tex", "other.ffx"):
        (victim / name).write_bytes(bytes(1000))
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.symlink_to(victim)
    limited(cache, most_size=1500)
    check(path)
    assert sorted(os.listdir(victim)) == ["other.ffx", "thesis.tex"]
    cache.unlink()
    # Files that are no index files stay in a directory of its own, too.
    cache.mkdir(mode=0o700)
    (cache / "thesis.tex").write_bytes(bytes(1000))
    check(path)
    assert "thesis.tex" in os.listdir(cache)
    cache.chmod(0o777)
    (cache / "other.ffx").write_bytes(bytes(1000))
    check(path)
    assert "other.ffx" in os.listdir(cache)


def test_name_too_long_for_one_beside_it(path: str, cache: Path, scans: list[str]) -> None:
    long = os.path.join(os.path.dirname(path), "n" * 245 + ".tfrecord")
    os.rename(path, long)
    check(long)
    check(long)
    assert len(scans) == 1 and len(os.listdir(cache)) == 1


def test_nowhere_to_write_is_no_error_but_for_index(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scans: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    os.chmod(os.path.dirname(path), 0o1777)
    check(path)
    check(path)
    assert len(scans) == 2
    long = os.path.join(os.path.dirname(path), "n" * 245 + ".tfrecord")
    os.rename(path, long)
    with pytest.raises(ReadError, match="cannot write the index file"):
        shardfile.write_index_file(long)


@needs_root
def test_read_only_directory_of_another_user_sends_it_to_the_cache(
    path: str, tmp_path: Path
) -> None:
    program = """
import os, sys, ffserve
from ffserve.disk import shardfile
with ffserve.open(sys.argv[1], server="off", verify=False): pass   # imports, while that is allowed
os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.environ["XDG_CACHE_HOME"] = sys.argv[2]
print(shardfile.write_index_file(sys.argv[1], renew=True)[1])
"""
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    for directory in (tmp_path, *list(tmp_path.parents)[:3]):  # as far as pytest makes them
        os.chmod(directory, directory.stat().st_mode | 0o011)
    done = run_python(program, path, tmp_path / "theirs")
    assert done.stdout.startswith(str(tmp_path / "theirs" / "ffserve"))
    assert not beside(path).exists()


# ---- stale and hostile ------------------------------------------------------------------------


def rewrite(path: str, change: Callable[[bytearray], None], *, keep_time: bool) -> None:
    times = os.stat(path)
    content = bytearray(Path(path).read_bytes())
    change(content)
    Path(path).write_bytes(content)
    if keep_time:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_stale_one_is_replaced(path: str, scans: list[str]) -> None:
    check(path)
    os.utime(path, ns=(5, 5))
    check(path)
    assert len(scans) == 2
    check(path)
    assert len(scans) == 2
    with open(path, "ab") as file:
        file.write(Path(path).read_bytes()[: 16 + len(SAMPLES[0])])
    with ffserve.open(path, server="off") as reader:
        assert len(reader) == len(SAMPLES) + 1
    os.truncate(path, os.path.getsize(path) - 5)
    with pytest.raises(TruncatedError):
        ffserve.open(path, server="off")


def test_changed_head_or_tail_is_noticed_though_size_and_time_stayed(
    path: str, scans: list[str]
) -> None:
    def last_payload_byte(content: bytearray) -> None:
        content[-5] ^= 1

    check(path)
    rewrite(path, last_payload_byte, keep_time=True)
    with ffserve.open(path, server="off") as reader, pytest.raises(ChecksumError):
        reader.read([len(SAMPLES) - 1])
    assert len(scans) == 2


def test_change_in_the_middle_gives_an_error_never_other_bytes(path: str) -> None:
    check(path)
    rewrite(path, lambda content: content.__setitem__(500_000, 1), keep_time=True)
    with ffserve.open(path, server="off") as reader:
        found = reader.read(range(len(SAMPLES)), errors="return")
    assert sum(isinstance(f, ChecksumError) for f in found) == 1
    assert all(
        isinstance(f, ChecksumError) or f.tobytes() == s
        for f, s in zip(found, SAMPLES, strict=True)
    )


def replace_records(path: str, *which: int) -> list[bytes]:
    """Write other records over some, with size and time kept; return all samples."""
    samples = list(SAMPLES)
    for number in which:
        samples[number] = bytes(reversed(range(256))) * 4 + samples[number][1024:]

    def change(content: bytearray) -> None:
        content[:] = b"".join(
            frame_header(len(sample)) + sample + struct.pack("<I", mask(crc32c(sample)))
            for sample in samples
        )

    rewrite(path, change, keep_time=True)
    return samples


LONG = [number for number in range(30, len(SAMPLES) - 30) if len(SAMPLES[number]) >= 1024]


@pytest.mark.parametrize("source", ["off", "daemon"])
def test_sound_records_replaced_in_place_were_called_damaged(path: str, source: str) -> None:
    check(path)
    samples = replace_records(path, *LONG)
    with serving() as daemon:
        where = "off" if source == "off" else str(daemon.socket)
        with ffserve.open(path, server=where) as reader:
            assert [sample.tobytes() for sample in reader] == samples
    with ffserve.open(path, server="off", on_error="skip") as reader:
        assert len(reader) == len(samples)


@pytest.mark.parametrize("source", ["off", "daemon"])
def test_one_replaced_record_makes_the_index_anew(path: str, source: str, scans: list[str]) -> None:
    """That one is not among the records that are compared at opening."""
    check(path)
    number = LONG[40]
    samples = replace_records(path, number)
    with serving() as daemon:
        where = "off" if source == "off" else str(daemon.socket)
        with ffserve.open(path, server=where) as reader:
            for _ in range(2):
                with pytest.raises(ReadError, match=r"stale.*open the file again") as raised:
                    reader.read([number])
                assert raised.value.path == path and raised.value.index == number
            assert reader[number - 1].tobytes() == samples[number - 1]
            with ffserve.open(path, server=where) as other:
                assert [sample.tobytes() for sample in other] == samples
            assert reader[number - 1].tobytes() == samples[number - 1]
        with ffserve.open(path, server=where) as reader:
            assert reader[number].tobytes() == samples[number]
    if source == "daemon":
        return  # It keeps what it found out in its own cache.
    done = len(scans)
    with ffserve.open(path, server="off") as reader:
        assert [sample.tobytes() for sample in reader] == samples
    assert len(scans) == done


def test_a_stale_index_file_was_made_invalid_once_for_each_error(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(path)
    replace_records(path, *LONG)
    os.utime(beside(path), (time.time() + 3600,) * 2)  # so nothing is compared at opening
    written: list[str] = []
    real = index_file.discard

    def counting(fd: int, path: str, *rest: Any) -> None:
        written.append(path)
        real(fd, path, *rest)

    monkeypatch.setattr(index_file, "discard", counting)
    with ffserve.open(path, server="off") as reader:
        found = reader.read(LONG, errors="return")
        assert all(isinstance(each, ReadError) for each in found), found
    assert written == [path]


@needs_root
def test_stale_index_that_may_not_be_replaced_is_overridden(path: str, cache: Path) -> None:
    check(path)
    samples = replace_records(path, LONG[40])
    os.chmod(os.path.dirname(path), 0o1777)  # nothing is written beside the file any more
    with ffserve.open(path, server="off") as reader, pytest.raises(ReadError, match="stale"):
        reader.read(range(len(samples)))
    for _ in range(2):
        with ffserve.open(path, server="off") as reader:
            assert [sample.tobytes() for sample in reader] == samples
    assert len(os.listdir(cache)) == 1


def test_damaged_record_is_no_reason_to_scan_again(path: str, scans: list[str]) -> None:
    check(path)
    rewrite(path, lambda content: content.__setitem__(500_000, 1), keep_time=True)
    for _ in range(2):
        with ffserve.open(path, server="off") as reader, pytest.raises(ChecksumError):
            reader.read(range(len(SAMPLES)))
    assert len(scans) == 1


def hostile(path: str) -> bytes:
    """An index file that is right in everything, but cuts the file into other records."""
    fd = os.open(path, os.O_RDONLY)
    identity = Identity.of(fd, path, "tfrecord")
    os.close(fd)
    size = os.path.getsize(path) - 16
    content = Path(path).read_bytes()
    lengths, checksums = np.array([size], np.uint64), np.array([crc32c(content[12:-4])], np.uint32)
    return encode(identity, lengths, checksums)


def test_hostile_one_would_be_believed_if_it_came_from_the_owner(path: str) -> None:
    """The canary: what the next tests plant is good enough but for whose it is."""
    beside(path).write_bytes(hostile(path))
    os.chmod(beside(path), 0o644)
    with ffserve.open(path, server="off") as reader:
        assert len(reader) == 1


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_one_that_others_may_write_to_is_not_believed(path: str, mode: int) -> None:
    beside(path).write_bytes(hostile(path))
    os.chmod(beside(path), mode)
    check(path)


@needs_root
def test_one_of_another_user_is_not_believed_and_replaced(path: str, scans: list[str]) -> None:
    beside(path).write_bytes(hostile(path))
    os.chown(beside(path), 65534, 65534)
    check(path)
    assert beside(path).stat().st_uid == os.geteuid()
    check(path)
    assert len(scans) == 1


def test_symbolic_links_pipes_and_directories_in_its_place(path: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    planted.write_bytes(hostile(path))
    os.chmod(planted, 0o644)
    beside(path).symlink_to(planted)
    check(path)
    assert not beside(path).is_symlink() and planted.read_bytes() == hostile(path)
    beside(path).unlink()
    os.mkfifo(beside(path))
    check(path)
    beside(path).unlink()
    beside(path).mkdir()
    check(path)


def test_garbage_and_huge_ones_are_replaced(path: str, scans: list[str]) -> None:
    for content in (b"", b"garbage", hostile(path)[:-1], bytes(100)):
        beside(path).write_bytes(content)
        check(path)
    with open(beside(path), "wb") as file:
        os.truncate(file.fileno(), 2**40)
    check(path)
    assert len(scans) == 5 and beside(path).stat().st_size < 20_000


def test_damaged_file_gets_none(path: str, cache: Path) -> None:
    rewrite(path, lambda content: content.__setitem__(0, 0), keep_time=False)
    for _ in range(2):
        with pytest.raises(ChecksumError, match="length of record 0"):
            ffserve.open(path, server="off")
        with ffserve.open(path, server="off", on_error="skip") as reader:
            assert len(reader) == len(SAMPLES) - 1
    assert not beside(path).exists() and not cache.exists()


# ---- the daemon -------------------------------------------------------------------------------


@pytest.mark.check
def test_daemon_writes_to_its_cache_only_and_reads_both(path: str, cache: Path) -> None:
    with serving() as daemon:
        with daemon.open(path) as reader:
            assert [sample.tobytes() for sample in reader] == SAMPLES
            assert reader.source.startswith("daemon")
        assert not beside(path).exists() and len(os.listdir(cache)) == 1
    before = os.stat(cache / os.listdir(cache)[0])
    with serving() as daemon, daemon.open(path) as reader:
        assert len(reader) == len(SAMPLES)
    assert os.stat(cache / os.listdir(cache)[0]).st_ino == before.st_ino


# ---- many at once ------------------------------------------------------------------------------


def variants(content: bytes) -> list[bytes]:
    """An index file; the same cut, longer, and with each byte changed, also where its checksum is
    made right again."""
    found = [content, content + b"\0", b"", content]
    found += [content[:size] for size in range(0, len(content), 3)]
    for place in range(len(content)):
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        body = changed[:-4]
        found += [changed, body + struct.pack("<I", crc32c(body)), content]
    return found


def test_many_index_files_are_decoded_as_each(path: str) -> None:
    """Or are left to that. `path` gives the file; its index file says the same of all copies."""
    lengths = [700, 0, 2000, 1500]
    content = b"".join(
        frame_header(n) + bytes(n) + struct.pack("<I", mask(crc32c(bytes(n)))) for n in lengths
    )
    Path(path).write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        identity = Identity.of(fd, path, "tfrecord")
    finally:
        os.close(fd)
    scanned = TFRecord().open(reader_of(content), len(content), path)
    files = variants(encode(identity, scanned.lengths, scanned.checksums))
    files.append(encode(identity, scanned.lengths, scanned.checksums, b"kept"))
    files.append(encode(identity, scanned.lengths[:-1], scanned.checksums[:-1]))
    files.append(encode(identity, scanned.lengths[:0], scanned.checksums[:0]))
    count, most = len(files), max(map(len, files)) - 1
    sizes = np.array([len(each) for each in files], np.int64)
    got, rows = np.minimum(sizes, most), np.zeros((count, most), np.uint8)
    for row, each in zip(rows, files, strict=True):
        row[: len(each)] = np.frombuffer(each[:most], np.uint8)

    def copies(piece: bytes) -> NDArray[np.uint8]:
        return np.tile(np.frombuffer(piece, np.uint8), (count, 1))

    done, counts, tables = index_file.decode_small(
        rows, got, sizes, np.full(count, len(content)), np.full(count, identity.mtime_ns),
        copies(content[:5000]), copies(content[-index_file.END_SIZE :]),
    )  # fmt: skip
    assert done[0] and done[3] and not counts[~done].any()
    assert 4 < done.sum() < count / 2 + 9
    ends = np.cumsum(counts)
    for k, each in enumerate(files):
        known = decode(each, identity)
        shard = known and TFRecord().restore(
            known.lengths, known.checksums, known.kept, len(content), path
        )
        if done[k]:
            assert shard and shard.count == counts[k]
            mine = [table[ends[k] - counts[k] : ends[k]].tolist() for table in tables]
            assert mine == [t.tolist() for t in (shard.offsets, shard.lengths, shard.checksums)]  # type: ignore[union-attr]
        elif len(each) <= most and known and not known.kept:
            assert shard is None


def test_daemon_opens_many_files_by_their_index_files(path: str, cache: Path) -> None:
    """It scans none, except where the index file is not the client's own, is older than a change of
    the file, or the cache has a newer one."""
    paths = [f"{path[:-9]}{k:02}.tfrecord" for k in range(40)]
    for each in paths:
        shutil.copy(path, each)
        assert shardfile.write_index_file(each) is not None
    os.chmod(index_file.beside(paths[3]) or "", 0o666)
    for each in paths[5:7]:
        os.utime(each, ns=(os.stat(each).st_mtime_ns, os.stat(each).st_mtime_ns))
    Path(index_file.beside(paths[8]) or "").unlink()
    with serving() as daemon:
        for _ in range(2):
            with daemon.open(paths) as reader:
                assert len(reader) == 40 * len(SAMPLES)
                for k in range(40):
                    for place in (0, len(SAMPLES) - 1):
                        found = reader[k * len(SAMPLES) + place]
                        assert found.tobytes() == SAMPLES[place]
        # Of those that it scanned, it keeps index files of its own.
        assert len(list(cache.iterdir())) == 2


def test_record_of_256_tib_in_a_passed_index_file_was_an_internal_error() -> None:
    """Small index files of clients were not checked for lengths that a directory cannot hold."""
    size = 1 << 49
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = os.path.join(folder, "a.tfrecord")
        with open(path, "wb") as file:
            file.write(frame_header(size - 16))
            file.truncate(size)
        with open(path, "rb") as file:
            identity = Identity.of(file.fileno(), path, "tfrecord")
        one = np.array([size - 16], np.uint64)
        beside(path).write_bytes(encode(identity, one, np.zeros(1, np.uint32)))
        with serving() as daemon, pytest.raises(FormatError, match="record 0 has"):
            daemon.open(path)


@pytest.mark.attack
@pytest.mark.parametrize("claimed", [0, 1, 1 << 60])
def test_a_sparse_index_file_was_read_whole(tmp_path: Path, claimed: int) -> None:
    """It is hundreds of MiB long and takes 4 KiB on disk; the memory for it was taken at once."""
    path = tmp_path / "sparse.tfrecord"
    with path.open("wb") as file:
        file.truncate(4 << 20)
    planted = tmp_path / ".sparse.tfrecord.ffx"
    fd = os.open(path, os.O_RDONLY)
    try:
        identity = index_file.Identity.of(fd, str(path), "tfrecord")
        content = bytearray(index_file.encode(identity, np.zeros(0, np.uint64), np.zeros(0, "u4")))
        content[56:64] = claimed.to_bytes(8, "little")
        planted.write_bytes(content)
        os.truncate(planted, 300 << 20)
        tracemalloc.start()
        try:
            assert index_file.find(fd, str(path), identity) is None
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
    finally:
        os.close(fd)


def test_a_cache_of_many_index_files_was_listed_for_each_new_one(
    tmp_path: Path, cache: Path
) -> None:
    """With 7,000 files in the cache, an opening took 180 ms instead of 24."""
    listed: list[str] = []

    def listing(event: str, arguments: tuple[object, ...]) -> None:
        if listed and event == "os.scandir":
            listed.append(str(arguments[0]))

    identity = index_file.Identity("tfrecord", 0, 0, 0, 0)
    files = [tmp_path / f"{k}.tfrecord" for k in range(100)]
    limited(cache, most_count=64)
    sys.addaudithook(listing)
    listed.append("begin")
    for file in files:
        file.write_bytes(bytes(16))
        fd = os.open(file, os.O_RDONLY)
        now = index_file.Identity.of(fd, str(file), "tfrecord")
        scanned = TFRecord().open(reader_of(b""), 0, "empty")
        assert index_file.store(fd, str(file), now, scanned, "inode")
        assert index_file.find(fd, str(file), identity, "inode") is None
        os.close(fd)
        assert len(os.listdir(cache)) <= 64
    count, listed[:] = len(listed) - 1, []
    assert 0 < count <= 10, "it is listed to remove an eighth of its files"
