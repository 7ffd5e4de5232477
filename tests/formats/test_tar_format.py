"""Tar archives: what tarfile reads, byte for byte; hostile ones are errors."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tar_files import archive, by_tarfile, numbered, with_checksum

import ffserve
from ffserve.disk.files import read_at_of
from ffserve.disk.shardfile import Counted
from ffserve.engine.cached import cached_pages
from ffserve.errors import FFServeError, FormatError, TruncatedError, UsageError
from ffserve.formats import members
from ffserve.formats.base import ForetoldReadAt
from ffserve.formats.tar import FORMAT, TarShard
from ffserve.testing import opened, samples

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def scan(content: bytes, **options: bool) -> TarShard:
    shard = opened(FORMAT, content, **options)
    assert isinstance(shard, TarShard)
    return shard


def names(shard: TarShard) -> list[bytes]:
    return [name for block in shard.members.blocks for name in members.unpacked(block)]


def rows(shard: TarShard) -> list[tuple[bytes, int, int]]:
    offsets, lengths = shard.offsets.tolist(), shard.lengths.tolist()
    return list(zip(names(shard), offsets, lengths, strict=True))


# ---- archives of tarfile -------------------------------------------------------------------------

PARTS = st.text(st.sampled_from("ab._-ä/é \n"), min_size=1, max_size=12)
NAMES = st.one_of(
    PARTS,
    st.builds("{}/{}.jpg".format, st.text("xyz/", max_size=180), st.integers(0, 99)),
    st.builds("{:03}.{}".format, st.integers(0, 5), st.sampled_from(["jpg", "CLS", "a.b", ""])),
    st.just("__meta__/x.json"),
)
TYPES = st.sampled_from([*[tarfile.REGTYPE] * 6, *(bytes([t]) for t in b"\x00125367ZVMD")])
ENTRIES = st.lists(st.tuples(NAMES, TYPES, st.integers(0, 1500), NAMES), max_size=12)


def made(entries: list[tuple[str, bytes, int, str]], format: int) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=format) as out:
        for name, kind, size, link in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            info.size = size if kind in b"\x00\x30\x37ZVMD" else 0
            try:
                out.addfile(info, io.BytesIO(os.urandom(info.size)))
            except ValueError:  # a name that this format has no room for
                continue
    return content.getvalue()


ONLY_OURS = re.compile(
    "two members|hard link|global header|more than|not a number|malformed|sparse|zeros behind"
)
"""What we refuse, and tarfile may take."""


def check(content: bytes) -> None:
    """What we read is what tarfile reads; what we refuse it cannot read, or has a reason."""
    theirs = by_tarfile(content)
    try:
        shard = scan(content)
    except FFServeError as error:
        assert error.path == "file"
        assert theirs is None or ONLY_OURS.search(error.message), (error, theirs)
        return
    assert rows(shard) == theirs
    found: list[tuple[bytes, list[str]]] = []
    for name, kind in zip(names(shard), shard.checksums.tolist(), strict=True):
        key, field = members.split_name(name)
        assert bool(kind & members.FIRST) == (not found or found[-1][0] != key)
        if kind & members.FIRST:
            found.append((key, []))
        found[-1][1].append(shard.members.fields[kind & ~members.FIRST])
        assert os.fsencode(found[-1][1][-1]).lower() == field
    assert shard.members.samples == len(found)
    uniform = bool(found) and all(row == list(shard.members.fields) for _, row in found)
    assert shard.members.uniform == uniform
    again = FORMAT.restore(shard.lengths, shard.checksums, shard.kept, shard.size, "file")
    assert again is not None and again.fingerprint == shard.fingerprint
    assert rows(again) == rows(shard) and again.members == shard.members
    if shard.count:
        read_at = io.BytesIO(content)
        agrees = FORMAT.agrees(
            lambda at, into: read_at.seek(at) * 0 + read_at.readinto(into),
            shard.offsets, shard.lengths, shard.checksums,
        )  # fmt: skip
        assert agrees


@given(entries=ENTRIES, format=st.sampled_from(FORMATS))
@settings(max_examples=150)
def test_archives_of_tarfile(entries: list[tuple[str, bytes, int, str]], format: int) -> None:
    check(made(entries, format))


@given(data=st.data())
@settings(max_examples=300)
def test_headers_with_other_bytes(data: st.DataObject) -> None:
    """Bytes of headers are changed, and the checksum with them: what is left says the same."""
    content = bytearray(made(data.draw(ENTRIES), data.draw(st.sampled_from(FORMATS))))
    blocks = len(content) // 512
    for _ in range(data.draw(st.integers(1, 4))):
        begin = 512 * data.draw(st.integers(0, min(blocks - 1, 40)))
        block = content[begin : begin + 512]
        if data.draw(st.booleans()):
            place = data.draw(st.sampled_from([0, 99, 124, 125, 134, 135, 156, 157, 257, 345, 480]))
        else:
            place = data.draw(st.integers(0, 511))
        some = st.one_of(st.sampled_from([0, 0x80, 0xFF, *b"0157LKxgS.+-_ /"]), st.integers(0, 255))
        block[place] = data.draw(some)
        content[begin : begin + 512] = with_checksum(block) if data.draw(st.booleans()) else block
    check(bytes(content))


@given(data=st.data())
@settings(max_examples=100)
def test_files_that_are_cut(data: st.DataObject) -> None:
    """A file that ends early is an error, or an archive that ends with the file; a tolerant reader
    gets all members that are whole."""
    content = made(data.draw(ENTRIES), data.draw(st.sampled_from(FORMATS)))
    cut = content[: data.draw(st.integers(0, len(content)))]
    check(cut)
    whole = by_tarfile(content)
    if whole is None:
        return
    try:
        found = samples(FORMAT, cut, tolerant=True)
    except FFServeError:
        return
    right = [content[at : at + size] for _, at, size in whole]
    intact = [each for each in found if isinstance(each, bytes)]
    assert intact == right[: len(intact)] and len(found) <= len(intact) + 1


# ---- rules ---------------------------------------------------------------------------------------


def test_a_sample_in_two_runs_is_two_samples() -> None:
    content = archive([{"a": b"1"}, {"a": b"2"}])[:2048] + archive([{"b": b"3"}])
    shard = scan(content)
    assert names(shard) == [b"d/000000.a", b"d/000001.a", b"d/000000.b"]
    assert shard.members.samples == 3 and shard.members.fields == ("a", "b")


def test_a_field_twice_in_a_sample_is_named() -> None:
    content = archive([{"a": b"1"}])[:1024] + archive([{"A": b"2"}])
    with pytest.raises(FormatError, match="'d/000000' has two members 'a'"):
        scan(content)


def test_hard_links_have_the_bytes_of_their_target() -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as out:
        for name, link in (("1.a", ""), ("2.a", "1.a"), ("3.a", "2.a"), ("4.a", "no.a")):
            info = tarfile.TarInfo(name)
            if link:
                info.type, info.linkname = tarfile.LNKTYPE, link
            else:
                info.size = 3
            if name == "4.a":
                assert [len(each) for each in samples(FORMAT, content.getvalue() + bytes(512))] == (
                    [3, 3, 3]
                )
            out.addfile(info, io.BytesIO(b"abc"))
    with pytest.raises(FormatError, match=r"'4\.a' is a hard link to 'no\.a'"):
        scan(content.getvalue())


def test_sparse_members_are_refused_by_name(tmp_path: Path) -> None:
    with open(tmp_path / "holes.bin", "wb") as file:
        file.truncate(1 << 20)
    for format in ("gnu", "posix"):
        command = ["tar", f"--format={format}", "-S", "-cf", "-", "holes.bin"]
        content = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout
        with pytest.raises(FormatError, match=r"holes\.bin' is a sparse file"):
            scan(content)


@pytest.mark.parametrize("format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
@pytest.mark.parametrize("program", ["tar", "bsdtar"])
def test_archives_of_programs(tmp_path: Path, program: str, format: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    if program == "bsdtar" and format in ("oldgnu", "gnu"):
        format = {"oldgnu": "gnutar", "gnu": "pax"}[format]
    root = tmp_path / "data"
    contents = {}
    deep = "/".join(["directory"] * 5)
    for folder in ("", "images/", f"{deep}/"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for k in range(20):
            for field in ("jpg", "seg.png", "txt"):
                name = f"{folder}{k:04}.{field}"
                contents[name] = os.urandom(k * 300)
                (root / name).write_bytes(contents[name])
    if format not in ("v7", "ustar"):
        name = "n" * 200 + "/" + "ü" * 100 + ".jpg"
        (root / name).parent.mkdir()
        (root / name).write_bytes(b"long")
        contents[name] = b"long"
    os.link(root / "0001.jpg", root / "zz.jpg")
    contents["zz.jpg"] = contents["0001.jpg"]
    os.symlink("0001.jpg", root / "symbolic.jpg")
    if format != "v7":
        os.mkfifo(root / "fifo.jpg")
    names_in_order = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    (tmp_path / "list").write_text("\n".join(names_in_order))
    option = f"--format={format}"
    recursion = "--no-recursion" if program == "tar" else "-n"
    subprocess.run(
        [program, option, recursion, "-cf", "../out.tar", "-T", "../list"], cwd=root, check=True
    )
    content = (tmp_path / "out.tar").read_bytes()
    check(content)
    shard = scan(content)
    found = {os.fsdecode(n): content[at : at + size] for n, at, size in rows(shard)}
    assert found == contents


def test_headers_far_from_each_other_are_read_in_c(tmp_path: Path) -> None:
    """A scan of large members took 6 us for each, most of them in Python."""
    path, calls = str(tmp_path / "large.tar"), list[int]()
    with open(path, "wb") as file:
        for k in range(2500):
            info = tarfile.TarInfo(f"{'ü' * 150 if k % 50 == 7 else 'd'}/{k:04}.bin")
            if k % 99 == 98:
                info.type, info.linkname = tarfile.LNKTYPE, "d/0001.bin"
            else:
                info.size = 70_000 if k % 3 else 500_000
            file.write(info.tobuf(tarfile.PAX_FORMAT))
            file.seek(-(-info.size // 512) * 512, 1)  # a hole
        size = file.tell()
        file.truncate(size + 1024)
    with open(path, "rb") as file:
        read_at = read_at_of(file.fileno(), path)
        ours = FORMAT.open(Counted(read_at, calls.append), size + 1024, path)
        plain = FORMAT.open(lambda at, into: read_at(at, into), size + 1024, path)
        assert rows(ours) == rows(plain) and ours.count == 2500
        assert (ours.fingerprint, ours.members) == (plain.fingerprint, plain.members)
        assert len(calls) < 50
        errors = []
        for reading in (read_at, lambda at, into: read_at(at, into)):
            with pytest.raises(TruncatedError) as raised:
                FORMAT.open(reading, size - 400_000, path)
            errors.append((str(raised.value), raised.value.offset))
        assert errors[0] == errors[1]


def test_headers_on_a_disk_are_read_many_at_a_time(tmp_path: Path) -> None:
    """Each header waited for the one before it: 10,000 members a second of 100 KB."""
    path, count, bad, stride = tmp_path / "cold.tar", 260, 20, 512 * 197
    with open(path, "wb") as file:  # of holes, but for the headers
        for k in range(count):
            header = archive([{"bin": b""}], key=f"{k:06}")[:512]
            header = bytes(
                with_checksum(bytearray(header[:124] + b"%011o\0" % 100_000 + header[136:]))
            )
            file.seek(k * stride)
            file.write(header if k != bad else b"bad" + header[3:])
        file.truncate(count * stride)
        os.fsync(file.fileno())
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            if cached_pages(file.fileno(), 0, count * stride):
                pytest.skip("the file system keeps its files in memory")
        except OSError:
            pytest.skip("the kernel does not say what is in memory")
        with pytest.raises(FormatError, match="checksum"):
            FORMAT.open(read_at_of(file.fileno(), str(path)), count * stride, str(path))
        found = [cached_pages(file.fileno(), k * stride, 512) for k in range(count)]
        assert all(found[90:]) and not all(found[bad + 1 : 80]), "parts have 83 members"
        assert cached_pages(file.fileno(), 0, count * stride) * 4096 < count * stride // 2


# ---- hostile archives ----------------------------------------------------------------------------


def test_lengths_beyond_the_file() -> None:
    content = bytearray(archive([{"a": b"1"}]))
    for size in (b"77777777777\0", b"\x80" + bytes(3) + b"\xff" * 8, b"\x80" + b"\xff" * 11):
        content[124:136] = size
        content[:512] = with_checksum(content[:512])
        with pytest.raises(FormatError):
            scan(bytes(content))
        with pytest.raises(FormatError) if size[0] == 0x80 else pytest.raises(TruncatedError):
            raise next(iter(_tolerant(bytes(content))))


def _tolerant(content: bytes) -> list[FFServeError]:
    try:
        return [e for e in samples(FORMAT, content, tolerant=True) if isinstance(e, FFServeError)]
    except FFServeError as error:
        return [error]


def test_too_many_fields() -> None:
    content = archive([{str(k): b"" for k in range(1025)}])
    with pytest.raises(FormatError, match="more than 1024 different extensions"):
        scan(content)


def test_names_that_lead_elsewhere_are_names(tmp_path: Path) -> None:
    """Nothing is extracted, so a name with .. is a key as others are."""
    path = tmp_path / "up.tar"
    path.write_bytes(archive([{"a": b"1"}], key="../../etc/{}"))
    with ffserve.open(path, server="off") as reader:
        assert reader.keys([0]) == ["../../etc/0"] and reader[0].tobytes() == b"1"


@pytest.mark.check
def test_a_million_empty_members() -> None:
    header = bytearray(archive([{"a": b""}], key="{:07}")[:512])
    content = bytearray(header * 1_000_000)
    table = np.frombuffer(content, np.uint8).reshape(-1, 512)
    digits = np.array([list(b"%07d" % k) for k in range(1_000_000)], np.uint8)
    table[:, :7] = digits
    table[:, 148:156] = 32
    sums = table.sum(axis=1, dtype=np.int64)
    table[:, 148:156] = [list(b"%06o\0 " % each) for each in sums.tolist()]
    shard = scan(bytes(content))
    assert shard.count == shard.members.samples == 1_000_000 and shard.members.uniform
    assert shard.members.size < 10e6 and not shard.lengths.any()
    assert names(shard)[-1] == b"0999999.a"


def test_blocks_of_names_are_bounded() -> None:
    with pytest.raises(FormatError):
        members.unpacked(members.packed(bytes(100 << 20)))
    for block in (b"", b"x", members.packed(b"no end")):
        with pytest.raises(FormatError):
            members.unpacked(block)


@given(about=st.binary(max_size=60), records=st.integers(0, 9))
def test_any_description_is_an_error_or_plausible(about: bytes, records: int) -> None:
    try:
        found = members.Members.of(about, records)
    except FormatError:
        return
    assert found.samples <= records and len(found.fields) <= len(about)


@given(kept=st.binary(max_size=200), count=st.integers(0, 3))
def test_any_kept_bytes_are_refused_or_fit(kept: bytes, count: int) -> None:
    lengths, kinds = np.full(count, 5, np.uint64), np.full(count, members.FIRST, np.uint32)
    shard = FORMAT.restore(lengths, kinds, kept, 4096, "file")
    if shard is not None and count:
        assert int((shard.offsets + shard.lengths).max()) <= 4096


# ---- writing -------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out.tar"
    with ffserve.create(path) as writer:
        writer.write({"jpg": b"picture", "cls": np.arange(3, dtype=np.int32)})
        writer.write({"jpg": b""}, key="deep/" * 60 + "ü")
        writer.write(b"alone")
        assert writer.count == 3
    with tarfile.open(path) as theirs:
        found = {member.name: theirs.extractfile(member) for member in theirs}
    assert list(found) == [
        "000000000.jpg", "000000000.cls", "deep/" * 60 + "ü.jpg", "000000002.bin",
    ]  # fmt: skip
    listed = subprocess.run(["tar", "-tf", path], capture_output=True, check=True)
    assert not listed.stderr and listed.stdout.count(b"\n") == 4
    assert path.stat().st_size % 10240 == 0
    with ffserve.open(path, server="off") as reader:
        assert reader.fields == ["jpg", "cls", "bin"]
        assert reader[0]["cls"].view(np.int32).tolist() == [0, 1, 2]
        assert {name: each is None for name, each in reader[2].items()} == {
            "jpg": True, "cls": True, "bin": False,
        }  # fmt: skip


@pytest.mark.parametrize("key", ["", "a.b", "../x", "/x", "__a__", "a/", "a\0"])
def test_keys_that_no_reader_finds(tmp_path: Path, key: str) -> None:
    with ffserve.create(tmp_path / "out.tar") as writer:
        with pytest.raises(UsageError, match="invalid key"):
            writer.write({"a": b""}, key=key)
        for fields in ({}, {"": b""}, {"a": b"", "A": b""}, {"a/b": b""}):
            with pytest.raises(UsageError, match="invalid fields"):
                writer.write(fields)
        writer.write({"a": b""}, key="same")
        with pytest.raises(UsageError, match="the sample before"):
            writer.write({"b": b""}, key="same")
    with ffserve.create(tmp_path / "out.ffr") as writer, pytest.raises(UsageError, match="tar"):
        writer.write({"a": b""})


def test_a_uniform_archive_is_seen() -> None:
    assert scan(archive(numbered(50))).members.uniform
    assert not scan(archive(numbered(50, irregular=True))).members.uniform


# ---- remote archives -----------------------------------------------------------------------------


class FarFile:
    """A file whose blocks take a round trip; those that were announced before come by the same."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self.there: set[int] = set()
        self._coming: set[int] = set()
        self.trips = 0

    def read_at(self, offset: int, into: memoryview, /) -> int:
        self.will_need(offset, len(into))
        if self._coming - self.there:
            self.trips += 1
            self.there |= self._coming
        self._coming.clear()
        return os.preadv(self._fd, [into], offset)

    def will_need(self, offset: int, size: int) -> None:
        self._coming.update(range(offset >> 15, ((offset + size - 1) >> 15) + 1))

    def close(self) -> None:
        os.close(self._fd)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("sizes", "most"), [([300_000], 180), ([400_000, 300_000], 180), ([1_000_000, 3, 5000], 480)]
)
def test_headers_of_a_remote_archive_come_many_at_a_time(
    tmp_path: Path, sizes: list[int], most: int, format: int
) -> None:
    path, count = tmp_path / "a.tar", 2400 // len(sizes)
    with open(path, "wb") as file:
        for k in range(count):
            for field, size in enumerate(sizes):
                info = tarfile.TarInfo(f"{'d' * 120}/{k:05}.f{field}")
                info.size = size
                file.write(info.tobuf(format))
                file.seek(size + -size % 512, os.SEEK_CUR)
        file.write(bytes(10240))
    size, file_of = path.stat().st_size, FarFile(path)
    try:
        shard = FORMAT.open(
            ForetoldReadAt(file_of.read_at, file_of.will_need, 1 << 18), size, "a.tar"
        )
        with open(path, "rb") as local:
            expected = FORMAT.open(read_at_of(local.fileno(), "a.tar"), size, "a.tar")
        assert rows(shard) == rows(expected) and len(rows(shard)) == count * len(sizes)
        assert file_of.trips < most, file_of.trips
        assert len(file_of.there) << 15 < 1.2 * (count * len(sizes) << 15) + 16 * max(sizes)
    finally:
        file_of.close()
