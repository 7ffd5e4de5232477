"""Inputs of a job: listing, shares, names, splits and lines; the outputs' places."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import os
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

import ffserve
from ffserve.errors import (
    AccessDenied,
    ChecksumError,
    FFServeError,
    FormatError,
    MissingFile,
    ReadError,
    TruncatedError,
    UsageError,
)
from ffserve.formats.base import GZIP_MAGIC, ZLIB_MAGIC
from ffserve.inputs import assign, download, find_inputs, parse_input
from ffserve.inputs.job import place_in_job
from ffserve.inputs.outputs import (
    LocalDirectory,
    Output,
    RemoteDirectory,
    RunOutput,
    job_name,
    output_directory,
    parse_output,
    places_of,
)
from ffserve.inputs.places import InputFile, alternatives, find
from ffserve.inputs.stream import Split, WorkerStream, share_of, splits_of
from ffserve.store import fetching
from ffserve.store.origin import ObjectVersion, failure
from ffserve.store.urls import check_name, shown

FILES = {
    "a/1.txt": b"one\n",
    "a/2.txt": b"two\n",
    "a.txt": b"top\n",
    "b/x/deep.txt": b"deep\n",
    "b/10.txt": b"ten",
    "b/9.txt": b"nine\n",
}
"""Files by name, in listing order but for a.txt, which comes after a/."""
OTHERS = {".hidden": b"x", "_SUCCESS": b"", "a/empty.txt": b"", "_temporary/0/part": b"x"}


@pytest.fixture(scope="module", autouse=True)
def own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let this process know no store but one that is empty."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_fetchers", "_breakers", "_listed"):
            patch.setattr(fetching, name, {})
        patch.setenv("FFSERVE_STORE", str(tmp_path_factory.mktemp("store")))
        patch.setenv("FFSERVE_START", "0")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that no test changes."""
    path = tmp_path_factory.mktemp("inputs")
    for name, data in {**FILES, **OTHERS}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def quiet(*inputs: str, workers: int = 1) -> list[dict[str, list[str]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return assign(inputs, workers)


# ---- listing and shares --------------------------------------------------------------------------


def test_a_directory_is_listed_with_all_below_it_each_sorted_by_name(folder: Path) -> None:
    names = [
        "a/1.txt", "a/2.txt", "a/empty.txt", "a.txt", "b/10.txt", "b/9.txt", "b/x/deep.txt",
    ]  # fmt: skip
    with pytest.warns(UserWarning, match="hidden: .*\\.hidden.*_SUCCESS"):
        [got] = assign([str(folder)], 1)
    assert got == {"input": [f"{folder}/{name}" for name in names]}
    [same] = quiet(f"file://{folder}")
    assert same == {"input": [f"file://{folder}/{name}" for name in names]}
    assert [file.name for file in find(str(folder)).files] == names
    left_out = dict(find(str(folder)).left_out)
    assert left_out == {
        f"{folder}/.hidden": "hidden",
        f"{folder}/_SUCCESS": "hidden",
        f"{folder}/_temporary": "hidden",
    }


def test_empty_files_are_dealt_out_like_others_but_not_to_streams(folder: Path) -> None:
    [got] = quiet(f"{folder}/a")
    assert [os.path.basename(file) for file in got["input"]] == ["1.txt", "2.txt", "empty.txt"]
    [streamed] = find_inputs([f"{folder}/a"], empty=False).values()
    assert [file.name for file in streamed.files] == ["1.txt", "2.txt"]
    assert streamed.left_out == [(f"{folder}/a/empty.txt", "empty")]
    with pytest.raises(MissingFile, match=r"no file; left out: empty: .*empty\.txt"):
        find_inputs([f"{folder}/a/empty.txt"], empty=False)


def test_inputs_of_one_alias_are_joined_in_the_order_given(folder: Path) -> None:
    [got] = quiet(f"{folder}/b/9.txt,{folder}/a#x", f"{folder}/a.txt", f"{folder}/b/10.txt#x")
    assert list(got) == ["x", "input"]
    assert [name.removeprefix(f"{folder}/") for name in got["x"]] == [
        "b/9.txt", "a/1.txt", "a/2.txt", "a/empty.txt", "b/10.txt",
    ]  # fmt: skip
    assert ffserve.inputs.assign(f"{folder}/a.txt", 1) == [{"input": [f"{folder}/a.txt"]}]


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 8])
def test_file_i_goes_to_worker_i_mod_n(folder: Path, workers: int) -> None:
    [whole] = quiet(f"{folder}/a,{folder}/b#d", f"{folder}/a.txt#e")
    shares = quiet(f"{folder}/a,{folder}/b#d", f"{folder}/a.txt#e", workers=workers)
    for rank, got in enumerate(shares):
        assert got == {alias: files[rank::workers] for alias, files in whole.items()}


def test_fewer_files_than_workers_are_a_warning(folder: Path) -> None:
    with pytest.warns(UserWarning, match="alias e has 1 files for 2 workers"):
        assert assign([f"{folder}/a.txt#e"], 2)[1] == {"e": []}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assign([f"{folder}/b/*.txt"], 2)


def test_patterns(folder: Path, tmp_path: Path) -> None:
    def names(pattern: str) -> list[str]:
        return [file.name for file in find(f"{folder}/{pattern}").files]

    assert names("b/*.txt") == ["10.txt", "9.txt"]
    assert names("?/[0-9].txt") == ["a/1.txt", "a/2.txt", "b/9.txt"]
    assert names("{b,a}/*[^2].txt") == ["b/10.txt", "b/9.txt", "a/1.txt", "a/empty.txt"]
    assert names("{a/{2,1},b/9}.txt") == ["a/2.txt", "a/1.txt", "b/9.txt"]
    assert names("b*") == ["b/10.txt", "b/9.txt", "b/x/deep.txt"]
    assert names("_temp*/*/part") == ["_temporary/0/part"]
    [got] = quiet(f"{folder}/{{a,b}}/*.txt,{folder}/a.txt")
    assert len(got["input"]) == 6
    assert {reason for _, reason in find(f"{folder}/*").left_out} == {"hidden"}
    odd = tmp_path / "a[1]{x"
    odd.write_bytes(b"exists")
    assert [file.uri for file in find(str(odd)).files] == [str(odd)]
    assert alternatives("a{b") == ["a{b"] and alternatives("{a,}x{}") == ["ax", "x"]


def test_a_relative_path_becomes_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "a")
    assert quiet("1.txt,../a.txt") == [{"input": [f"{folder}/a/1.txt", f"{folder}/a/../a.txt"]}]


def test_any_name_is_listed(tmp_path: Path) -> None:
    names = [b"a\nb", b"\xff\xfe", b"x" * 255, b"..a", "ä".encode()]
    for name in names:
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
            file.write(b"x")
    got = {os.fsencode(file.name) for file in find(f"{tmp_path}/*").files}
    assert got == {*names} - {b"..a"}


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ("{}/none", MissingFile, "no such file"),
        ("{}/none*", MissingFile, "no file matches"),
        ("{}/a/empty.txt", None, ""),
        ("{}/_temporary/*", None, ""),
        ("", UsageError, "no URI"),
        (",#x", UsageError, "no URI"),
        ("{}/a#", UsageError, "alias"),
        ("{}/a#..", UsageError, "alias"),
        ("{}/a#x/y", UsageError, "alias"),
        ("{}/a#" + "x" * 256, UsageError, "alias"),
        ("{}/a\0b", UsageError, "NUL"),
        ("{}/a.txt/b", MissingFile, "no such file"),
        ("none-such://x/y", UsageError, "none-such"),
    ],
)
def test_invalid_inputs(folder: Path, given: str, kind: Any, text: str) -> None:
    given = given.format(folder)
    if kind is None:
        assert quiet(given)
        return
    with pytest.raises(kind, match=text):
        quiet(given)


def test_invalid_arguments(folder: Path) -> None:
    for workers in (0, -1, True, 1.0):
        with pytest.raises(UsageError, match="number of workers"):
            assign([str(folder)], workers)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not a string"):
        assign([folder], 1)  # type: ignore[list-item]


def test_what_no_program_can_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    assert dict(find(str(tmp_path)).left_out) == {f"{tmp_path}/pipe": "not a regular file"}
    (tmp_path / "circle").symlink_to(tmp_path)
    with pytest.raises(ReadError, match="leads back"):
        find(str(tmp_path))
    (tmp_path / "circle").unlink()
    (tmp_path / "broken").symlink_to("nowhere")
    with pytest.raises(MissingFile, match="broken"):
        find(str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_directory_without_permission_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "x").write_bytes(b"x")
    (tmp_path / "locked").chmod(0o700)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == 0 and "pytest" in str(above):
            above.chmod(0o755)
    os.seteuid(65534)
    try:
        for uri in (f"{tmp_path}", f"{tmp_path}/locked/*", f"local://{tmp_path}"):
            with pytest.raises(AccessDenied, match="locked"):
                find(uri)
    finally:
        os.seteuid(0)


def test_other_places_by_fsspec(folder: Path) -> None:
    """`local://` is fsspec's own name for local files, which ours does not know."""
    url = f"local://{folder}"
    here, there = find(str(folder)), find(url)
    assert [file.name for file in there.files] == [file.name for file in here.files]
    assert [file.uri for file in there.files] == [f"local://{file.uri}" for file in here.files]
    assert [file.size for file in there.files] == [file.size for file in here.files]
    left_out = {f"local://{uri}": reason for uri, reason in here.left_out}
    assert dict(there.left_out) == left_out
    for pattern in ("b/*.txt", "{b,a}/?.txt", "{b,a}/*[^2].txt", "b*", "_temp*/*/part", "{c,a}/1*"):
        got, expected = find(f"{url}/{pattern}").files, find(f"{folder}/{pattern}").files
        assert [file.name for file in got] == [file.name for file in expected]
    [only] = find(f"{url}/a.txt").files
    assert only.name == "a.txt"
    for wrong in ("none", "none*"):
        with pytest.raises(MissingFile):
            find(f"{url}/{wrong}")


def test_a_file_url_of_another_machine_is_an_error(folder: Path) -> None:
    for function in (find, parse_place):
        with pytest.raises(UsageError, match="names the host 'other', not this machine"):
            function(f"file://other{folder}")
    assert quiet(f"file:{folder}/a.txt") == [{"input": [f"file:{folder}/a.txt"]}]


def parse_place(uri: str) -> None:
    parse_output(f"out={uri}")


def test_secrets_are_not_shown() -> None:
    assert shown("sftp://me:secret@host/x") == "sftp://me@host/x"
    assert shown("https://host/x?signature=secret") == "https://host/x?…"
    error = OSError("403, url='https://me:secret@host/x?X-Amz-Signature=secret', next")
    text = str(failure(error, "https://host/x?X-Amz-Signature=secret").error)
    assert "secret" not in text and "403, url='https://me@host/x?…', next" in text
    for name in ("a/../b", "../b", "a//b", "a/./b"):
        with pytest.raises(UsageError, match="no local file can have the name"):
            check_name(name, "s3://b/x")


# ---- names and places of downloads ---------------------------------------------------------------


def file_named(name: str, uri: str = "", size: int = 1) -> InputFile:
    return InputFile(ObjectVersion(uri or f"/data/{name}", size, "1", 0), name)


def test_equal_names_are_refused_with_both_uris() -> None:
    one, two = file_named("x.txt", "/a/x.txt"), file_named("x.txt", "/b/x.txt")
    with pytest.raises(UsageError, match=r"'x.txt': /a/x.txt and /b/x.txt.*rename-input-files"):
        download.names_of([one, two], rename=False)
    with pytest.raises(UsageError, match=r"same name 'x\.txt'"):
        download.names_of([one, file_named("x.txt/y")], rename=False)
    got = download.names_of(
        [one, two, file_named("d/e.tar.gz"), file_named("n")], rename=True, now_ms=17
    )
    assert list(got) == ["17_0.txt", "17_1.txt", "17_2.tar.gz", "17_3"]


def placed(directory: Path, uri: str) -> dict[str, bytes]:
    files = find(uri).files
    wanted = download.names_of(files, rename=False)
    download.place(str(directory), {"in": wanted})
    return {
        os.path.relpath(os.path.join(folder, name), directory / "in"): Path(
            folder, name
        ).read_bytes()
        for folder, _, names in os.walk(directory / "in")
        for name in names
    }


@pytest.fixture(params=["", "local://"], ids=["linked", "by fsspec"])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_second_run_keeps_and_removes_what_the_first_has_placed(
    folder: Path, tmp_path: Path, place: str
) -> None:
    assert placed(tmp_path, f"{place}{folder}") == {**FILES, "a/empty.txt": b""}
    inode = (tmp_path / "in" / "b" / "9.txt").stat().st_ino
    assert place or inode == (folder / "b" / "9.txt").stat().st_ino
    assert placed(tmp_path, f"{place}{folder}/b*") == {
        name: data for name, data in FILES.items() if name.startswith("b/")
    }
    assert (tmp_path / "in" / "b" / "9.txt").stat().st_ino == inode
    assert not (tmp_path / "in" / "a").exists()
    assert sorted(os.listdir(tmp_path)) == [download.RECORD, "in"]


def test_files_of_the_user_are_not_removed(folder: Path, tmp_path: Path, place: str) -> None:
    placed(tmp_path, f"{place}{folder}/b")
    (tmp_path / "in" / "mine.txt").write_bytes(b"mine")
    with pytest.raises(UsageError, match="no earlier run has placed"):
        placed(tmp_path, f"{place}{folder}/a")
    (tmp_path / "in" / "mine.txt").unlink()
    (tmp_path / "in" / "9.txt").unlink()
    (tmp_path / "in" / "9.txt").write_bytes(b"changed by the user")
    with pytest.raises(UsageError, match=r"9\.txt"):
        placed(tmp_path, f"{place}{folder}/a")
    assert (folder / "b" / "9.txt").read_bytes() == FILES["b/9.txt"]


def test_an_interrupted_run_is_completed_by_the_next(
    folder: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{place}{folder}/b"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download, "_fetch_all", killed)
        with pytest.raises(KeyboardInterrupt):
            placed(tmp_path, uri)
    (tmp_path / download.SCRATCH).mkdir()
    (tmp_path / download.SCRATCH / "half").write_bytes(b"half")
    (tmp_path / "in" / "9.txt").write_bytes(b"half")
    assert set(placed(tmp_path, uri)) == {"9.txt", "10.txt", "x/deep.txt"}
    assert (tmp_path / "in" / "9.txt").read_bytes() == FILES["b/9.txt"]
    assert not (tmp_path / download.SCRATCH).exists()


def test_a_changed_source_is_placed_anew(tmp_path: Path, place: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "x").write_bytes(b"before")
    (tmp_path / "run").mkdir()
    assert placed(tmp_path / "run", f"{place}{source}") == {"x": b"before"}
    (source / "x").write_bytes(b"and after")
    assert placed(tmp_path / "run", f"{place}{source}") == {"x": b"and after"}


def test_a_taken_or_damaged_place_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a file")
    with pytest.raises(UsageError, match="another file is in the place of an input"):
        placed(tmp_path, f"{folder}/b")
    (tmp_path / "in").unlink()
    for text in ("[]", "{", '{"in": 3}'):
        (tmp_path / download.RECORD).write_text(text)
        with pytest.raises(UsageError, match=r"record .* is damaged"):
            placed(tmp_path, f"{folder}/b")
    (tmp_path / download.RECORD).write_text('{"in": {"9.txt": [1, 2]}}')
    assert len(placed(tmp_path, f"{folder}/b")) == 3


def test_an_input_where_inputs_are_placed_is_refused_and_stays(
    folder: Path, tmp_path: Path
) -> None:
    placed(tmp_path, str(folder))
    assert (tmp_path / download.RECORD).stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to("in")
    for uri in (f"{tmp_path}/in/b", f"{tmp_path}/link/a", f"file://{tmp_path}/in/a.txt"):
        with pytest.raises(UsageError, match=r"where inputs are placed.*another alias"):
            placed(tmp_path, uri)
    assert {name: (tmp_path / "in" / name).read_bytes() for name in FILES} == FILES


def test_a_file_that_vanishes_is_named(folder: Path, tmp_path: Path, place: str) -> None:
    gone = file_named("gone.txt", f"{place}{folder}/gone.txt", 3)
    with pytest.raises(MissingFile, match=r"gone\.txt"):
        download.place(str(tmp_path), {"in": {"gone.txt": gone}})
    if place:
        other = file_named("a.txt", f"{place}{folder}/a.txt", 3)
        with pytest.raises(ReadError, match="changed at the origin"):
            download.place(str(tmp_path), {"in": {"a.txt": other}})
    assert os.listdir(tmp_path / "in") == []


def test_a_file_of_another_file_system_is_copied(folder: Path) -> None:
    import tempfile

    if os.stat("/dev/shm").st_dev == folder.stat().st_dev:
        pytest.skip("one file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        assert placed(Path(other), f"{folder}/b") == {
            "9.txt": b"nine\n", "10.txt": b"ten", "x/deep.txt": b"deep\n",
        }  # fmt: skip
        copy = Path(other, "in", "9.txt")
        assert copy.stat().st_mtime_ns == (folder / "b" / "9.txt").stat().st_mtime_ns


# ---- streams -------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 12))
def test_splits_go_to_workers_in_contiguous_runs(count: int, workers: int) -> None:
    splits = [Split(file_named(str(number))) for number in range(count)]
    shares = [share_of(splits, rank, workers) for rank in range(workers)]
    assert [split for share in shares for split in share] == splits
    more = count % workers
    assert [len(share) for share in shares] == [
        count // workers + (r < more) for r in range(workers)
    ]


def test_large_files_are_cut_as_hadoop_cuts_them() -> None:
    block = 128 << 20
    sizes = {1: 1, block: 1, int(1.1 * block): 1, int(1.1 * block) + 2: 2, 5 * block: 5}
    for size, count in sizes.items():
        assert len(splits_of([file_named("x", size=size)])) == count
    assert len(splits_of([file_named("x.gz", size=5 * block)])) == 1


def stream(
    *shares: list[Split], framing: Any = "lines", epochs: int = 1, seed: int | None = None,
    rank: int = 0, **sizes: int,
) -> bytes:  # fmt: skip
    source = WorkerStream(shares, framing=framing, epochs=epochs, seed=seed, rank=rank, **sizes)
    return b"".join(source.blocks())


def split_file(path: Path, parts: int = 1, name: str = "") -> list[Split]:
    file = file_named(name or path.name, str(path), path.stat().st_size)
    return [Split(file, part, parts) for part in range(parts)]


@pytest.fixture(scope="module")
def spare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stream")


# What begins as a compressed file is one, and Hypothesis draws constants of the code.
LINES = (
    st.lists(st.binary(max_size=6))
    .map(b"\n".join)
    .filter(lambda data: data and not data.startswith((GZIP_MAGIC, ZLIB_MAGIC)))
)


@given(LINES, st.integers(1, 7))
def test_every_line_is_in_one_split_however_it_is_cut(spare: Path, data: bytes, parts: int) -> None:
    path = spare / "lines"
    path.write_bytes(data)
    whole = data if data.endswith(b"\n") else data + b"\n"
    splits = split_file(path, parts)
    assert b"".join(stream([split]) for split in splits) == whole
    framed = stream(splits, framing="length")
    items = whole[:-1].split(b"\n")
    assert framed == b"".join(struct.pack("<Q", len(item)) + item for item in items)


@pytest.mark.parametrize("read_size", [1, 3, 16])
def test_lines_over_several_reads(spare: Path, read_size: int) -> None:
    path = spare / "reads"
    path.write_bytes(b"a long line of text\n\nshort\r\nthe last without an end")
    for parts in range(1, 60):
        splits = split_file(path, parts)
        found = b"".join(stream([s], read_size=read_size) for s in splits)
        assert found == path.read_bytes() + b"\n"


def test_files_epochs_and_aliases_follow_one_another(folder: Path) -> None:
    one = split_file(folder / "b" / "10.txt") + split_file(folder / "a.txt")
    two = split_file(folder / "b" / "9.txt")
    assert stream(one, two, epochs=2) == b"ten\ntop\nnine\n" * 2


@pytest.fixture(scope="module")
def numbers(spare: Path) -> list[Split]:
    """3,000 lines in 3 files, the last compressed."""
    lines = [b"%d\n" % number for number in range(3000)]
    for part in range(2):
        (spare / f"n{part}.txt").write_bytes(b"".join(lines[1000 * part : 1000 * part + 1000]))
    with gzip.open(spare / "n2.txt.gz", "wb") as file:
        file.write(b"".join(lines[2000:]))
    names = ("n0.txt", "n1.txt", "n2.txt.gz")
    return [split for name in names for split in split_file(spare / name)]


def test_a_shuffle_follows_from_seed_epoch_and_rank(numbers: list[Split]) -> None:
    plain = stream(numbers)
    assert [int(line) for line in plain.split()] == list(range(3000))
    two = stream(numbers, seed=7, epochs=2).split()
    epochs = [two[:3000], two[3000:]]
    assert all(sorted(epoch, key=int) == plain.split() for epoch in epochs)
    assert epochs[0] != epochs[1] != plain.split()
    assert stream(numbers, seed=7).split() == epochs[0]
    assert stream(numbers, seed=7, rank=1).split() != epochs[0]
    assert stream(numbers, seed=8).split() != epochs[0]


def test_a_shuffle_in_windows_gives_everything(numbers: list[Split]) -> None:
    lines = stream(numbers, seed=1, piece_size=100, window_size=500).split()
    got = [int(line) for line in lines]
    assert sorted(got) == list(range(3000)) and got != sorted(got)
    near = sum(abs(a - b) < 200 for a, b in itertools.pairwise(got))
    assert near < 2000  # of pieces from random places


@pytest.mark.parametrize(
    ("suffix", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)]
)
def test_compressed_text(spare: Path, suffix: str, pack: Any) -> None:
    path = spare / f"packed.txt.{suffix}"
    text = b"".join(b"line %d\n" % number for number in range(5000))
    path.write_bytes(pack(text))
    assert stream(split_file(path)) == text
    packed = path.read_bytes()
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TruncatedError, match="ends too early"):
        stream(split_file(path))
    path.write_bytes(packed[:20] + bytes(100) + packed[120:])
    with pytest.raises(FormatError, match=f"packed.txt.{suffix}"):
        stream(split_file(path))
    other = spare / "packed.zst"
    other.write_bytes(packed)
    with pytest.raises(UsageError, match=r"cannot decompress \.zst"):
        stream(split_file(other))


SAMPLES = [b"sample %d" % number * (number % 5) for number in range(100)]


@pytest.fixture(scope="module", params=["x.ffr", "x.recordio", "x.tfrecord", "nosuffix"])
def records(request: pytest.FixtureRequest, spare: Path) -> Path:
    path = spare / request.param
    form = "ffrecord" if request.param == "nosuffix" else None
    with ffserve.create(path.with_suffix(".ffr") if form else path, format=form) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    if form:
        path.with_suffix(".ffr").rename(path)
    return path


def unframed(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = struct.unpack("<Q", data[:8])[0]
        found.append(data[8 : 8 + size])
        data = data[8 + size :]
    return found


@pytest.mark.parametrize("parts", [1, 3])
def test_samples_of_record_files(records: Path, parts: int, tmp_path: Path) -> None:
    splits = split_file(records, parts)
    assert unframed(stream(splits, framing="length")) == SAMPLES
    assert stream(splits) == b"".join(sample + b"\n" for sample in SAMPLES)
    mixed = unframed(stream(splits, framing="length", seed=3))
    assert sorted(mixed) == sorted(SAMPLES) and mixed != SAMPLES
    [file] = {split.file for split in splits}
    [remote] = find(f"local://{file.uri}").files
    far = [Split(remote, split.part, split.parts) for split in splits]
    assert unframed(stream(far, framing="length", epochs=2)) == SAMPLES * 2


def test_a_sample_with_a_line_feed_is_no_line(spare: Path) -> None:
    path = spare / "feeds.ffr"
    with ffserve.create(path) as writer:
        for sample in (b"plain", b"two\nlines"):
            writer.write(sample)
    with pytest.raises(UsageError, match=r"feeds.ffr, sample 1: .*line feed.*--framing length"):
        stream(split_file(path))
    assert unframed(stream(split_file(path), framing="length")) == [b"plain", b"two\nlines"]
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ChecksumError, match="sample 1"):
        stream(split_file(path), framing="length")


# ---- outputs and places in a job -----------------------------------------------------------------


def test_names_of_several_workers_keep_apart() -> None:
    files = {0: ["log", "part-0", "a/x"], 1: ["log", "part-1", "a"], 2: ["worker-0/log"]}
    got = places_of(files)
    assert got[0, "part-0"] == "part-0" and got[1, "part-1"] == "part-1"
    assert got[0, "log"] == "worker-0/log" and got[1, "log"] == "worker-1/log"
    assert got[0, "a/x"] == "worker-0/a/x" and got[1, "a"] == "worker-1/a"
    assert got[2, "worker-0/log"] == "worker-2/worker-0/log"
    assert len(set(got.values())) == len(got)
    assert places_of({0: ["a/b", "worker-1/x"]}) == {
        (0, "a/b"): "a/b", (0, "worker-1/x"): "worker-1/x",
    }  # fmt: skip


@given(
    st.dictionaries(
        st.integers(0, 3),
        st.sets(
            st.sampled_from(
                ["a", "b", "a/b", "a/b/c", "worker-0", "worker-1/a", "worker-0/a/b", "x/worker-1/a"]
            )
        ),
    )
)
def test_no_two_outputs_have_one_place(files: dict[int, set[str]]) -> None:
    possible = {
        rank: sorted(n for n in names if not any(o.startswith(n + "/") for o in names))
        for rank, names in files.items()
    }
    got = list(places_of(possible).values())
    assert len({*got}) == len(got)
    assert not [a for a in got for b in got if b.startswith(a + "/")]


def test_invalid_outputs() -> None:
    for text in ("out", "=x", "out=", "/out=x", "../out=x", ".=x", "a/../..=x"):
        with pytest.raises(UsageError):
            parse_output(text)
    assert parse_output("out/=/data/k=v") == Output("out", "/data/k=v")


@pytest.fixture(params=["", "local://"], ids=["local", "by fsspec"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield f"{request.param}{tmp_path}/target"


def output_job(target: str, ranks: list[int], said: list[str], workers: int = 2) -> RunOutput:
    output = RunOutput(
        Output("out", target), job="job", workers=workers, ranks=ranks, say=said.append
    )
    output.begin()
    return output


def test_the_last_rank_commits_for_all(target: str, tmp_path: Path) -> None:
    assert isinstance(
        output_directory(target), RemoteDirectory if "://" in target else LocalDirectory
    )
    said: list[str] = []
    jobs = [output_job(target, [rank], said) for rank in range(2)]
    for rank in (1, 0):
        out = tmp_path / f"worker-{rank}" / "out"
        (out / "deep").mkdir(parents=True)
        (out / f"part-{rank}").write_bytes(b"%d" % rank)
        (out / "deep" / "log").write_bytes(b"log of %d" % rank)
        (out / "_SUCCESS").write_bytes(b"")
        (out / "latest").symlink_to("deep")
        jobs[rank].put(rank, str(out.parent))
        whole = tmp_path / "target"
        assert {path.name for path in whole.iterdir()} == {"_temporary"}
        assert jobs[rank].commit() == (rank == 0)
    names = {os.path.relpath(p, whole) for p in whole.rglob("*") if p.is_file()}
    assert names == {
        "_SUCCESS", "part-0", "part-1", "worker-0/deep/log", "worker-1/deep/log",
    }  # fmt: skip
    assert (whole / "worker-1" / "deep" / "log").read_bytes() == b"log of 1"
    assert not (whole / "_temporary").exists()
    assert len([text for text in said if "links to directories" in text]) == 2
    assert [text for text in said if "several workers" in text]
    with pytest.raises(UsageError, match="not empty"):
        output_job(target, [0], said)


def test_an_aborted_job_leaves_nothing(target: str, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_bytes(b"x")
    job = output_job(target, [0], said, workers=1)
    job.put(0, str(tmp_path))
    job.abort()
    assert not (tmp_path / "target").exists() or os.listdir(tmp_path / "target") == []
    jobs = [output_job(target, [rank], said) for rank in range(2)]
    jobs[0].put(0, str(tmp_path))
    jobs[1].abort()
    assert jobs[0].commit() is False
    again = output_job(target, [1], said)
    again.put(1, str(tmp_path / "nothing"))
    assert said == ["warning: worker 1 has written no file to out"]
    assert again.commit() is True
    assert sorted(os.listdir(tmp_path / "target")) == ["_SUCCESS", "x"]


@pytest.mark.parametrize("late", [True, False])
def test_of_two_runs_at_once_the_second_is_refused(target: str, tmp_path: Path, late: bool) -> None:
    jobs = [
        RunOutput(Output("out", target), job=name, workers=1, ranks=[0], say=lambda _: None)
        for name in ("one", "two")
    ]
    for number in range(2):
        out = tmp_path / str(number) / "out"
        out.mkdir(parents=True)
        (out / f"part-{number}").write_bytes(b"x")
    jobs[0].begin()
    jobs[1].begin()
    jobs[0].put(0, str(tmp_path / "0"))
    if not late:
        jobs[1].put(0, str(tmp_path / "1"))
    assert jobs[0].commit()
    if late:
        jobs[1].put(0, str(tmp_path / "1"))
    with pytest.raises(ReadError, match=r"another run has (written|removed)"):
        jobs[1].commit()
    jobs[1].abort()
    assert sorted(os.listdir(tmp_path / "target")) == ["_SUCCESS", "part-0"]


def test_no_directory_is_removed_that_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by HDFS, where `rmdir` of fsspec removes a directory with all below it."""
    target = RemoteDirectory(f"local://{tmp_path}/target")
    removed: list[str] = []
    monkeypatch.setattr(LocalFileSystem, "rmdir", lambda _, path: removed.append(path))
    (tmp_path / "target" / "full" / "x").mkdir(parents=True)
    for path in ("full", "", "full/x"):
        target.prune(path)
    assert removed == [f"{tmp_path}/target/full/x"]


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for wrong in ("file", "file/below"):
        with pytest.raises(FFServeError):
            output_job(f"{tmp_path}/{wrong}", [0], [])


@pytest.mark.parametrize(
    ("workers", "rank", "environment", "expected"),
    [
        (None, None, {}, (1, None)),
        (4, None, {}, (4, None)),
        (4, 3, {}, (4, 3)),
        (None, None, {"RANK": "2", "WORLD_SIZE": "3"}, (3, 2)),
        (None, None, {"RANK": "2"}, (1, None)),
        (2, 0, {"RANK": "2", "WORLD_SIZE": "3"}, (2, 0)),
        (None, 1, {"RANK": "2", "WORLD_SIZE": "3"}, (3, 1)),
        (None, None, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (2, 1)),
        (None, None, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}, (1, None)),
        (
            None, None,
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
            (2, 1),
        ),
        (
            None, None,
            {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8",
             "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
            (8, 5),
        ),
        (None, None, {"PMI_RANK": "1", "PMI_SIZE": "2"}, (2, 1)),
    ],
)  # fmt: skip
def test_the_place_in_a_job(
    workers: int | None, rank: int | None, environment: dict[str, str], expected: Any
) -> None:
    assert place_in_job(workers, rank, environment) == expected


@pytest.mark.parametrize(
    ("workers", "rank", "environment", "text"),
    [
        (None, 0, {}, "needs the number of workers"),
        (2, 2, {}, "rank 2"),
        (2, None, {"RANK": "2", "WORLD_SIZE": "3"}, "--workers 2, but .* has rank 2 of 3"),
        (4, None, {"RANK": "0", "WORLD_SIZE": "1"}, "--workers 4, but .* has rank 0 of 1"),
        (2, 2, {"RANK": "0", "WORLD_SIZE": "2"}, "rank 2"),
        (None, None, {"RANK": "x", "WORLD_SIZE": "3"}, "RANK='x'"),
        (None, None, {"RANK": "0", "WORLD_SIZE": "-1"}, "WORLD_SIZE"),
    ],
)
def test_contradictions_about_the_place_in_a_job(
    workers: int | None, rank: int | None, environment: dict[str, str], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        place_in_job(workers, rank, environment)


def test_the_name_of_a_job_comes_from_its_launcher() -> None:
    assert job_name({}) == "job"
    assert job_name({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}) == "12-0"
    assert job_name({"TORCHELASTIC_RUN_ID": "a/b", "TORCHELASTIC_RESTART_COUNT": "2"}) == "a-b-2"


def test_aliases_and_hashes() -> None:
    assert parse_input("a,b#c") == (["a", "b"], "c")
    assert parse_input("a#b.txt#c") == (["a#b.txt"], "c")
    assert parse_input("a{b,c},d") == (["a{b,c}", "d"], "input")
    assert parse_input("a{b,c") == (["a{b", "c"], "input")
    with pytest.raises(MissingFile):
        find_inputs(["/none#x"])
