"""Packed folders, dump and the processes that write them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ffrecord_files import split
from hypothesis import given
from hypothesis import strategies as st

import ffserve
from ffserve import PackedFolder, pack_folder
from ffserve.errors import ChecksumError, FFServeError, FormatError, ReadError, UsageError
from ffserve.folders import folder_packing
from ffserve.folders.folder_index import MAGIC, decode, encode
from ffserve.folders.folder_packing import pack
from ffserve.system import parallel
from ffserve.utils import dump

GOLDEN = Path(__file__).parents[1] / "golden" / "ffrecord"
FACTS = json.loads((GOLDEN / "manifest.json").read_text())["packed.ffr"]


def flat(folder: Any, above: str = "") -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name, node in folder.items():
        if isinstance(node, int):
            found[above + name] = node
        else:
            found[above + name] = None
            found |= flat(node, f"{above}{name}/")
    return found


def unpack(content: bytes, to: Path) -> None:
    """Lay the files of a packed folder out, by means other than those under test."""
    payloads = split(content)
    structure = pickle.loads(payloads[-1][len(MAGIC) :])
    to.mkdir()
    for name, index in flat(structure).items():
        if index is None:
            (to / name).mkdir()
        else:
            (to / name).write_bytes(payloads[index])


@pytest.fixture
def golden_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    unpack((GOLDEN / "packed.ffr").read_bytes(), folder)
    return folder


# ---- the index sample


def test_golden_index_is_decoded_and_encoded_again() -> None:
    payloads = split((GOLDEN / "packed.ffr").read_bytes())
    structure = decode(payloads[-1], len(payloads) - 1)
    assert json.loads(json.dumps(structure)) == FACTS["structure"]
    assert encode(structure) == payloads[-1]


names = st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=20)
folders: Any = st.recursive(
    st.integers(0, 2**33),
    lambda inner: st.lists(st.tuples(names.filter(lambda n: n not in (".", "..")), inner)).map(
        OrderedDict
    ),
).filter(lambda node: isinstance(node, OrderedDict))


@pytest.mark.check
@given(folders, st.integers(2, 5))
def test_any_index_is_decoded_whatever_the_protocol(folder: Any, protocol: int) -> None:
    assert decode(MAGIC + pickle.dumps(folder, protocol), 2**33 + 1) == folder
    found = decode(encode(folder), 2**33 + 1)
    assert found == folder and list(flat(found)) == list(flat(folder))


def pickled_program(*opcodes: bytes) -> bytes:
    return b"\x80\x04" + b"".join(opcodes) + b"."


def shared() -> Any:
    inner: Any = OrderedDict()
    return OrderedDict(a=inner, b=inner)


def endless() -> Any:
    loop: Any = OrderedDict()
    loop["self"] = loop
    return loop


def nested(depth: int) -> Any:
    tree: Any = OrderedDict(x=1)
    for _ in range(depth):
        tree = OrderedDict({"é" * 240: tree})
    return tree


def repeated() -> Any:
    """Return 20,000 directories with paths of 3,770 characters."""
    tree: Any = OrderedDict((str(k), OrderedDict()) for k in range(20_000))
    for _ in range(15):
        tree = OrderedDict({"n" * 250: tree})
    return tree


MAKE = b"\x8c\x0bcollections\x8c\x0bOrderedDict\x93)R"
HOSTILE = {
    "calls a function": pickle.dumps(os.getpid),
    "calls it while loading": b"cos\nsystem\n(S'true'\ntR.",
    "makes another class": pickle.dumps(np.arange(3)),
    "plain dict": pickle.dumps({"a": 1}),
    "list": pickle.dumps([1]),
    "int": pickle.dumps(3),
    "str": pickle.dumps("a"),
    "value is text": pickle.dumps(OrderedDict(a="b")),
    "value is true": pickle.dumps(OrderedDict(a=True)),
    "name is a number": pickle.dumps(OrderedDict({1: 1})),
    "index too large": pickle.dumps(OrderedDict(a=5)),
    "index negative": pickle.dumps(OrderedDict(a=-1)),
    "name goes up": pickle.dumps(OrderedDict({"..": 1})),
    "name with a slash": pickle.dumps(OrderedDict({"a/b": 1})),
    "name empty": pickle.dumps(OrderedDict({"": 1})),
    "directory twice": pickle.dumps(shared()),
    "directory in itself": pickle.dumps(endless()),
    "too deep": pickled_program(MAKE, (b"\x8c\x01d" + MAKE) * 500, b"s" * 500),
    "name of 256 characters": pickle.dumps(OrderedDict({"é" * 256: 1})),
    "path of 4097 characters": pickle.dumps(nested(17)),
    "75 MB of names in a small pickle": pickle.dumps(repeated()),
    "memo of 2 GiB entries": pickled_program(
        MAKE, b"r\xff\xff\xff\x7f", b"q\x01", b"X\xff\xff\xff\xff"
    ),
    "long text that is not there": pickled_program(b"\x8d" + b"\xff" * 7 + b"\x7f"),
    "bytearray of 2^62": pickled_program(b"\x96" + b"\0" * 7 + b"\x40"),
    "items for nobody": pickled_program(b"(\x8c\x01aK\x01u"),
    "name without value": pickled_program(MAKE, b"(\x8c\x01au"),
    "two things at the end": pickled_program(MAKE, MAKE),
    "something behind the end": pickled_program(MAKE) + b"x",
    "stack runs empty": pickled_program(b"R"),
    "mark as value": pickled_program(MAKE, b"\x8c\x01a(s"),
    "memo not there": pickled_program(b"h\x07"),
    "text that is no UTF-8": pickled_program(MAKE, b"\x8c\x01\xffK\x01s"),
    "nothing": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_index_that_does_something_else_is_refused(what: str) -> None:
    with pytest.raises(FormatError, match=r"index|directories"):
        decode(MAGIC + HOSTILE[what], 5)


def test_the_longest_names_of_a_disk_are_read() -> None:
    """NTFS has names of 255 characters, and more bytes."""
    folder = OrderedDict({"\N{HIRAGANA LETTER A}" * 255: 0, "\udcff" * 255: 1, "d": nested(16)})
    assert decode(encode(folder), 2) == folder


@given(st.binary(max_size=200))
def test_any_bytes_as_index_decode_or_raise_ours(content: bytes) -> None:
    try:
        folder = decode(MAGIC + content, 5)
    except FormatError:
        return
    assert isinstance(folder, OrderedDict)


def test_every_change_of_one_byte_of_an_index_decodes_or_raises_ours() -> None:
    sample = split((GOLDEN / "packed.ffr").read_bytes())[-1]
    for at in range(len(MAGIC), len(sample)):
        for value in range(0, 256, 5):
            changed = sample[:at] + bytes([value]) + sample[at + 1 :]
            try:
                flat(decode(changed, 6))
            except FormatError:
                continue


# ---- writing


def test_packing_gives_the_originals_bytes(
    golden_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack_folder(golden_folder, tmp_path / "a.ffr", verbose=True)
    assert (tmp_path / "a.ffr").read_bytes() == (GOLDEN / "packed.ffr").read_bytes()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 6 and "sub/deep/d" in said[4]
    seen: list[tuple[int, int]] = []
    report = pack(
        [golden_folder], str(tmp_path / "b.ffr"), progress=lambda *done: seen.append(done)
    )
    assert (tmp_path / "b.ffr").read_bytes() == (GOLDEN / "packed.ffr").read_bytes()
    size = sum(f["len"] for f in FACTS["files"].values())
    assert (report.files, report.bytes) == (6, size)
    assert (sum(s for s, _ in seen), sum(b for _, b in seen)) == (6, size)


def test_equal_names_in_two_directories(tmp_path: Path) -> None:
    """The original pickles each name as a text of its own; one shared text pickles otherwise."""
    folder = tmp_path / "f"
    for name in ("x/same.txt", "y/same.txt"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(name.encode())
    pack_folder(folder, tmp_path / "a.ffr")
    index = split((tmp_path / "a.ffr").read_bytes())[-1]
    assert index.count(b"same.txt") == 2
    expected = OrderedDict(x=OrderedDict(), y=OrderedDict())
    expected["x"]["same.txt"], expected["y"]["".join(["same", ".txt"])] = 0, 1
    assert decode(index, 2) == expected


def test_large_files_go_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    payload = os.urandom(folder_packing.BLOCK_SIZE + 12_345)
    (tmp_path / "f" / "large").write_bytes(payload)
    pack_folder(tmp_path / "f", tmp_path / "a.ffr")
    assert split((tmp_path / "a.ffr").read_bytes())[0] == payload


def test_links_and_special_files(tmp_path: Path) -> None:
    folder, out = tmp_path / "f", tmp_path / "a.ffr"
    (folder / "d").mkdir(parents=True)
    (folder / "d" / "x").write_bytes(b"1")
    (folder / "to-dir").symlink_to("d")
    (folder / "to-file").symlink_to("d/x")
    pack_folder(folder, out)
    payloads = split(out.read_bytes())
    assert payloads[:-1] == [b"1"] * 3
    assert list(flat(decode(payloads[-1], 3))) == ["d", "d/x", "to-dir", "to-dir/x", "to-file"]
    out.unlink()

    (folder / "loop").symlink_to("..", target_is_directory=True)
    (tmp_path / "f2").mkdir()
    (tmp_path / "f2" / "loop").symlink_to(".")
    with pytest.raises(UsageError, match="directory above itself"):
        pack_folder(tmp_path / "f2", out)
    (folder / "loop").unlink()
    (folder / "broken").symlink_to("nowhere")
    with pytest.raises(ReadError, match="link is broken") as caught:
        pack_folder(folder, out)
    assert caught.value.path == str(folder / "broken")
    (folder / "broken").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(UsageError, match="neither a file nor"):
        pack_folder(folder, out)
    (folder / "pipe").unlink()
    (folder / "out.ffr").write_bytes(b"")
    with pytest.raises(UsageError, match="inside the folder to pack"):
        pack_folder(folder, folder / "out.ffr")
    with pytest.raises(AssertionError):
        pack_folder(tmp_path / "nothing", out)
    with pytest.raises(UsageError, match=r"\.ffr"):
        pack_folder(folder, tmp_path / "a.bin")
    assert sorted(os.listdir(tmp_path)) == ["f", "f2"]


def make_many(folder: Path, count: int) -> dict[str, bytes]:
    files = {f"d{i % 7}/f{i:04d}": bytes([i % 256]) * (i * 37 % 2000) for i in range(count)}
    for name, payload in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(payload)
    (folder / "z-empty").mkdir()
    return files


@pytest.mark.parametrize("jobs", [1, 2])
def test_shards_are_packed_folders_each(jobs: int, tmp_path: Path) -> None:
    files = make_many(tmp_path / "f", 100)
    seen: list[int] = []
    report = pack(
        [tmp_path / "f"],
        str(tmp_path / "out"),
        shards=3,
        jobs=jobs,
        progress=lambda count, _: seen.append(count),
    )
    expected = [f"PART_{k:05d}.ffr" for k in range(3)]
    assert sorted(os.listdir(tmp_path / "out")) == expected
    assert report.paths == tuple(str(tmp_path / "out" / name) for name in expected)
    assert report.files == sum(seen) == 100 and report.bytes == sum(map(len, files.values()))
    order: list[str] = []
    for name in expected:
        payloads = split((tmp_path / "out" / name).read_bytes())
        for path, index in flat(decode(payloads[-1], len(payloads) - 1)).items():
            if index is not None:
                order.append(path)
                assert payloads[index] == files[path]
        assert len(payloads) in (34, 35)
    assert order == sorted(files)
    assert "z-empty" in decode(payloads[-1], 100)


def test_files_are_packed_under_their_own_names(tmp_path: Path) -> None:
    make_many(tmp_path / "f", 10)
    chosen = [tmp_path / "f" / "d3" / "f0003", tmp_path / "f" / "d1"]
    pack(chosen, str(tmp_path / "a.ffr"))
    payloads = split((tmp_path / "a.ffr").read_bytes())
    assert list(flat(decode(payloads[-1], 9))) == ["d1", "d1/f0001", "d1/f0008", "f0003"]
    with pytest.raises(UsageError, match="two inputs"):
        pack([chosen[0], chosen[0]], str(tmp_path / "b.ffr"))
    with pytest.raises(UsageError, match="no input to pack"):
        pack([], str(tmp_path / "b.ffr"))
    with pytest.raises(UsageError, match="cannot split"):
        pack(chosen, str(tmp_path / "b"), shards=4)
    for wrong in ({"shards": 0}, {"jobs": 0}):
        with pytest.raises(UsageError):
            pack(chosen, str(tmp_path / "b"), **wrong)
    with pytest.raises(ReadError):
        pack([tmp_path / "missing"], str(tmp_path / "b.ffr"))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_file_that_cannot_be_read_leaves_nothing(
    jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_many(tmp_path / "f", 40)
    bad = tmp_path / "f" / "d6" / "vanished"
    bad.write_bytes(b"")
    scan = folder_packing.scan

    def scanned(paths: list[str], out: str) -> Any:
        tree = scan(paths, out)
        bad.unlink()  # between the listing and the reading
        return tree

    monkeypatch.setattr(folder_packing, "scan", scanned)
    with pytest.raises(ReadError, match="No such file") as caught:
        pack([tmp_path / "f"], str(tmp_path / "out"), shards=4, jobs=jobs)
    assert caught.value.path == str(bad)
    assert os.listdir(tmp_path) == ["f"]


# ---- dump


class Squares:
    """A dataset that does not pickle, as many do not."""

    def __init__(self, count: int, bad: int = -1, how: str = "raise") -> None:
        self.count, self.bad, self.how = count, bad, how
        self.unpicklable = lambda: None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> bytes:
        if i == self.bad and self.how == "raise":
            raise KeyError(f"no sample {i}")
        if i == self.bad:
            os.kill(os.getpid(), signal.SIGKILL)
        return str(i * i).encode()


def dumped(path: Path) -> list[bytes]:
    return [s for name in sorted(os.listdir(path)) for s in split((path / name).read_bytes())]


@pytest.mark.parametrize("nfiles", [2, 5, 16])
def test_dump_writes_every_sample_in_order(
    nfiles: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(Squares(1000), tmp_path / "out", nfiles, verbose=True)
    assert dumped(tmp_path / "out") == [str(i * i).encode() for i in range(1000)]
    assert len(os.listdir(tmp_path / "out")) == nfiles
    assert "1000/1000" in capsys.readouterr().err


def test_dump_to_one_file(tmp_path: Path) -> None:
    dump(Squares(10), tmp_path / "a.ffr", 1)
    dump(Squares(0), tmp_path / "none.ffr", 1)
    assert len(split((tmp_path / "a.ffr").read_bytes())) == 10
    assert (tmp_path / "none.ffr").read_bytes() == (GOLDEN / "zero.ffr").read_bytes()


def test_dump_of_too_few_samples_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="3 files, not 4"):
        dump(Squares(6), tmp_path / "out", 4)
    with pytest.raises(ValueError, match="empty"):
        dump(Squares(0), tmp_path / "x", 4)
    with pytest.raises(ValueError, match="at least"):
        dump(Squares(3), tmp_path / "x", 0)


def test_dump_again_replaces_and_names_remaining_files(tmp_path: Path) -> None:
    dump(Squares(10), tmp_path / "out", 5)
    with pytest.warns(UserWarning, match="3 other"):
        dump(Squares(100), tmp_path / "out", 2)
    assert len(dumped(tmp_path / "out")) == 106


def test_dump_of_an_open_reader_that_has_read_before(tmp_path: Path) -> None:
    with ffserve.open(GOLDEN / "plain.ffr") as reader:
        reader.read(range(16))
        dump(reader, tmp_path / "out", 3)
        assert reader[3].tobytes() == split((GOLDEN / "plain.ffr").read_bytes())[3]
    assert dumped(tmp_path / "out") == split((GOLDEN / "plain.ffr").read_bytes())


@pytest.mark.parametrize("nfiles", [1, 4])
def test_a_failed_worker_raises_the_whole_error_and_leaves_nothing(
    nfiles: int, tmp_path: Path
) -> None:
    with pytest.raises(KeyError, match="no sample 77") as caught:
        dump(Squares(100, bad=77), tmp_path / "a.ffr", nfiles)
    if nfiles > 1:
        assert "__getitem__" in str(caught.value.__cause__)
    assert os.listdir(tmp_path) == []


def test_a_killed_worker_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(parallel.WorkerError, match=r"PART_00001.*exit status -9"):
        dump(Squares(100, bad=40, how="die"), tmp_path / "out", 4)
    assert os.listdir(tmp_path) == []


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class RaisesUnpicklable(Squares):
    def __getitem__(self, i: int) -> bytes:
        raise Unpicklable(1, 2)


def test_an_error_that_does_not_pickle_arrives_as_text(tmp_path: Path) -> None:
    with pytest.raises(FFServeError, match="Unpicklable: 1 and 2"):
        dump(RaisesUnpicklable(4), tmp_path / "out", 2)


# ---- reading


@pytest.fixture
def folder() -> Any:
    with PackedFolder(GOLDEN / "packed.ffr") as opened:
        yield opened


def test_golden_reads_as_with_the_original(folder: PackedFolder) -> None:
    assert folder.num_files() == FACTS["num_files"]
    assert folder.list() == FACTS["list"]
    assert [str(name) for name in folder.list(recursive=True)] == FACTS["list_recursive"]
    assert folder.list("sub") == ["c.json", "deep"]
    assert folder.list("sub", recursive=True) == ["c.json", "deep", Path("deep/d")]
    files = folder.list(list_dir=False, recursive=True)
    assert {str(name) for name in files} == set(FACTS["files"])
    assert [str(d) for d in folder.list(list_file=False, recursive=True)] == [
        "emptydir",
        "sub",
        "sub/deep",
    ]
    for name, facts in FACTS["files"].items():
        payload = folder.read_one(name)
        assert len(payload) == facts["len"]
        assert hashlib.sha256(payload.tobytes()).hexdigest() == facts["sha256"]
        assert folder.exists(name) and folder.is_file(Path(name)) and not folder.is_dir(name)
    assert folder.is_dir("sub/deep") and not folder.is_file("sub")
    assert not folder.exists("nothing") and not folder.exists("a.txt/below")
    one, two = folder.read(["sub/c.json", Path("a.txt")])
    assert (len(one), len(two)) == (8, 6)
    assert folder.reader.n == 7


def test_names_that_are_not_there(folder: PackedFolder) -> None:
    for call in (
        lambda: folder.read_one("nothing"),
        lambda: folder.read_one("sub"),
        lambda: folder.read_one("a.txt/x"),
        lambda: folder.read(["a.txt", "nothing"]),
        lambda: folder.read("a.txt"),
        lambda: folder.list("a.txt"),
        lambda: folder.list("nothing"),
    ):
        with pytest.raises(AssertionError):
            call()


def test_a_folder_survives_pickling(folder: PackedFolder) -> None:
    with pickle.loads(pickle.dumps(folder)) as other:
        assert other.read_one("a.txt").tobytes() == folder.read_one("a.txt").tobytes()


def test_other_files_are_not_packed_folders() -> None:
    for name in ("plain.ffr", "zero.ffr", "empties.ffr"):
        with pytest.raises(ValueError, match="not a packed folder"):
            PackedFolder(GOLDEN / name)


def test_the_offsets_of_files_ended_with_those_of_the_names() -> None:
    with ffserve.FileReader(GOLDEN / "packed.ffr") as whole:
        offsets = whole.get_offsets(0).tolist()
    with ffserve.FileReader.for_files(GOLDEN / "packed.ffr") as files:
        assert files.n + 1 == whole.n and files.get_offsets(0).tolist() == offsets[:-1]


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    content = bytearray((GOLDEN / "packed.ffr").read_bytes())
    content[-3] ^= 1
    (tmp_path / "a.ffr").write_bytes(content)
    with pytest.raises(ChecksumError):
        PackedFolder(tmp_path / "a.ffr")
    content[-3] ^= 1
    content[-2] = ord("R")
    (tmp_path / "a.ffr").write_bytes(content)
    with pytest.raises(FormatError, match="invalid folder index") as caught:
        PackedFolder(tmp_path / "a.ffr", check_data=False)
    assert caught.value.path == str(tmp_path / "a.ffr")


def test_shards_read_as_one_folder(tmp_path: Path) -> None:
    files = make_many(tmp_path / "f", 50)
    report = pack([tmp_path / "f"], str(tmp_path / "out"), shards=4)
    with PackedFolder(tmp_path / "out") as folder:
        assert folder.num_files() == 50
        found = [str(name) for name in folder.list(list_dir=False, recursive=True)]
        assert found == sorted(files)
        for name, payload in zip(found, folder.read(found), strict=True):
            assert payload.tobytes() == files[name]
        assert folder.is_dir("z-empty")
        assert folder.reader.n == 54
    with PackedFolder(report.paths[1]) as one:
        assert set(map(str, one.list(list_dir=False, recursive=True))) < set(files)
