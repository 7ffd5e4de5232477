"""Remote inputs of `ffserve run`: listed, fetched once through the store, private to each job."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from daemon import until
from origins import HttpOrigin, ask_origins

from ffserve.errors import MissingFile, ReadError, UsageError
from ffserve.inputs import download, find_inputs
from ffserve.inputs.places import find
from ffserve.inputs.stream import WorkerStream, splits_of
from ffserve.store import fetching
from ffserve.store.directory import Store

SIZE = 9 << 20
LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM", "OMPI", "PMI", "MV2", "TORCHELASTIC")


def noise(seed: int, size: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(size)


def lines(seed: int, size: int = SIZE) -> bytes:
    rng = random.Random(seed)
    return b"".join(rng.randbytes(500).hex().encode() + b"\n" for _ in range(size // 1001))


def start(place: Path, *words: Any, **environment: str) -> subprocess.Popen[bytes]:
    place.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return subprocess.Popen(
        [sys.executable, "-m", "ffserve", "run", *map(str, words)],
        cwd=place, env={**clean, "FFSERVE_SOCKET": "/nowhere/socket", **environment},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen[bytes], code: int = 0) -> tuple[bytes, str]:
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err.decode()
    return out, err.decode()


def shell(text: str) -> list[str]:
    return ["--", "sh", "-c", text]


def place(directory: Path, uri: str) -> Path:
    """Place the files of a URI, as a run does; return where they are."""
    directory.mkdir(exist_ok=True)
    [(alias, listing)] = find_inputs([uri]).items()
    download.place(str(directory), {alias: download.names_of(listing.files, rename=False)})
    return directory / alias


def streamed(uri: str, **options: Any) -> bytes:
    [listing] = find_inputs([uri]).values()
    usual: dict[str, Any] = {"framing": "lines", "epochs": 1, "seed": None, "rank": 0}
    return b"".join(WorkerStream([splits_of(listing.files)], **{**usual, **options}).blocks())


# ---- listing -------------------------------------------------------------------------------------


def test_what_is_left_out_of_a_listing_is_said(server: HttpOrigin) -> None:
    names = ("d/b.txt", "d/sub/a.txt", "d/sub.txt", "d/_SUCCESS", "d/.x/y", "d/odd", "d/none")
    for name in names:
        server.put(name, b"" if name in ("d/none", "d/_SUCCESS") else name.encode())
    server.unsized.add("d/odd")
    found = find(f"{server.url}/d/")
    assert [file.name for file in found.files] == ["b.txt", "none", "odd", "sub/a.txt", "sub.txt"]
    assert {file.name: file.size for file in found.files}["odd"] == -1
    assert dict(found.left_out) == {
        f"{server.url}/d/_SUCCESS": "hidden",
        f"{server.url}/d/.x": "hidden",
    }
    assert [file.name for file in find(f"{server.url}/d/*.txt").files] == ["b.txt", "sub.txt"]
    assert [file.name for file in find(f"{server.url}/d/_S*").files] == ["_SUCCESS"]
    [only] = find(f"{server.url}/d/b.txt?path=x/y&X-Amz-Signature=secret").files
    assert (only.name, only.size) == ("b.txt", 7)
    for wrong in ("none-such", "*.ffr"):
        with pytest.raises(MissingFile, match=server.url):
            find(f"{server.url}/d/{wrong}")


def test_an_empty_file_is_placed(server: HttpOrigin, tmp_path: Path) -> None:
    server.put("d/ready", b"")
    server.put("d/x", b"x")
    placed = place(tmp_path / "run", f"{server.url}/d/")
    assert {path.name: path.read_bytes() for path in placed.iterdir()} == {"ready": b"", "x": b"x"}


def test_files_of_unknown_size(server: HttpOrigin, tmp_path: Path) -> None:
    """No range of them can be asked for again: each run fetches them, from their beginning."""
    content = lines(1, 200_000)
    url = server.put("odd.txt", content)
    server.unsized.add("odd.txt")
    server.cut_after, server.cuts = 50_000, 3  # one of them while its size is asked for
    assert (place(tmp_path / "run", url) / "odd.txt").read_bytes() == content
    assert server.cuts == 0
    assert streamed(url) == content
    server.cuts = 1 << 20
    plain = r"odd\.txt: .* the origin broke off in the middle of an answer; tried once"
    with pytest.raises(ReadError, match=plain):
        streamed(url)
    with pytest.raises(ReadError, match="does not report the size of the file"):
        fetching.listing(url)


# ---- download ------------------------------------------------------------------------------------


@pytest.mark.check
def test_each_job_has_files_of_its_own(server: HttpOrigin, tmp_path: Path) -> None:
    """Two runs at once fetch each byte once. What one writes into its input, no other sees."""
    for number in range(3):
        server.put(f"d/{number}.bin", noise(number))
    server.rate = 60e6
    text = {
        "one": "printf changed | dd of=d/1.bin conv=notrunc 2>/dev/null; : > d/2.bin; cat d/0.bin",
        "two": f"until test ! -s {tmp_path}/one/d/2.bin; do sleep 0.05; done; cat d/*",
    }
    runs = [start(tmp_path / name, "--input", f"{server.url}/d/#d", *shell(each))
            for name, each in text.items()]  # fmt: skip
    assert ended(runs[0])[0] == noise(0)
    assert ended(runs[1])[0] == b"".join(map(noise, range(3)))
    assert server.total == 3 * SIZE
    assert (tmp_path / "one" / "d" / "1.bin").read_bytes() == b"changed" + noise(1)[7:]
    again = place(tmp_path / "three", f"{server.url}/d/#d")
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        f"{number}.bin": noise(number) for number in range(3)
    }
    assert os.stat(again / "0.bin").st_mtime == server.times["d/0.bin"]
    assert server.total == 3 * SIZE
    _, err = ended(start(tmp_path / "one", "--input", f"{server.url}/d/#d", *shell("true")), 2)
    assert "changed since (2 of them)" in err


@pytest.mark.stores
def test_a_killed_run_is_continued(server: HttpOrigin, tmp_path: Path) -> None:
    content = noise(1, 12 * SIZE)
    url = server.put("a.bin", content)
    server.rate = 40e6
    first = start(tmp_path / "run", "--input", url, *shell("touch started"))
    # A thread asks for a block when it has kept the one before.
    until(lambda: len(server.spans) >= fetching.ORIGIN_THREADS + 4, "four blocks are kept")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert os.listdir(tmp_path / "run" / "input") == [], "an incomplete file has no name"
    server.rate = 0
    until(lambda: not server.answering, "nothing is on its way to it")
    before = server.total
    assert (place(tmp_path / "run", url) / "a.bin").read_bytes() == content
    assert server.total - before <= len(content) - (4 << 22)


@pytest.mark.check
def test_an_interrupted_run_ends_at_once(server: HttpOrigin, tmp_path: Path) -> None:
    url = server.put("a.bin", noise(1, 3 * SIZE))
    server.rate = 1e6
    run = start(tmp_path / "run", "--input", url, *shell("touch started"))
    until(lambda: server.total > 0, "it is on its way")
    begun = time.monotonic()
    run.terminate()
    assert "interrupted by SIGTERM" in ended(run, 128 + signal.SIGTERM)[1]
    assert time.monotonic() - begun < 15, "it does not wait for the file, which takes 27 s"
    assert not (tmp_path / "run" / "started").exists()


@pytest.mark.check
def test_what_the_store_evicts_stays_with_the_job(
    server: HttpOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFSERVE_STORE_SIZE", "40MiB")
    urls = [server.put(f"{number}.bin", noise(number, 3 * SIZE)) for number in range(2)]
    files = [place(tmp_path / f"run-{k}", url) / f"{k}.bin" for k, url in enumerate(urls)]
    assert fetching.process_fetcher().store.evictions
    for number, file in enumerate(files):
        assert file.read_bytes() == noise(number, 3 * SIZE)


@pytest.mark.check
def test_a_store_with_less_room_than_one_file(
    server: HttpOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFSERVE_STORE_SIZE", "33MiB")
    url = server.put("a.bin", noise(1, 5 * SIZE))
    assert (place(tmp_path / "run", url) / "a.bin").read_bytes() == noise(1, 5 * SIZE)
    assert server.total == 5 * SIZE
    assert fetching.process_fetcher().store.used <= 33 << 20


def test_failures_that_pass_are_survived(server: HttpOrigin, tmp_path: Path) -> None:
    content = lines(1)
    url = server.put("a.txt", content)
    server.fail_until = time.monotonic() + 1
    server.cut_after, server.cuts = 1 << 18, 5
    assert (place(tmp_path / "run", url) / "a.txt").read_bytes() == content
    assert server.cuts == 0


def test_failures_that_stay_are_said(server: HttpOrigin, tmp_path: Path) -> None:
    ask_origins(0.3)
    url = server.put("a.bin", noise(1))
    [listing] = find_inputs([url]).values()
    server.status = 503
    wanted = {"input": download.names_of(listing.files, rename=False)}
    (tmp_path / "run").mkdir()
    with pytest.raises(ReadError, match=r"a\.bin: .* throttled or overloaded \(status 503\)"):
        download.place(str(tmp_path / "run"), wanted)
    assert os.listdir(tmp_path / "run" / "input") == []
    server.status = 0
    server.put("a.bin", noise(2))
    fetching._breakers.clear()
    with pytest.raises(ReadError, match="changed at the origin since it was opened"):
        download.place(str(tmp_path / "run"), wanted)


ON_A_SMALL_DISK = """
mount -t tmpfs -o size=$SIZE none $PLACE && cd $PLACE && mkdir run && cd run &&
FFSERVE_STORE=$PLACE/store $PYTHON -m ffserve run --input $URLS -- sh -c 'cat input/* | md5sum'
code=$?; find . -type f -path '*input/*'; exit $code
"""


def on_a_small_disk(place: Path, size: str, *urls: str) -> subprocess.CompletedProcess[str]:
    place.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHON": sys.executable,
                   "FFSERVE_SOCKET": "/nowhere/socket", "SIZE": size, "PLACE": str(place),
                   "URLS": ",".join(urls)}  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", ON_A_SMALL_DISK],
        capture_output=True, text=True, env=environment, timeout=100,
    )  # fmt: skip
    if "unshare failed" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("no mount namespaces here")
    return done


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.stores
def test_a_full_disk(server: HttpOrigin, tmp_path: Path) -> None:
    """Store and inputs are on one disk: the store gives way, and then it is an error."""
    import hashlib

    urls = [server.put(f"{number}.bin", noise(number, 2 * SIZE)) for number in range(3)]
    expected = hashlib.md5(noise(0, 2 * SIZE) + noise(1, 2 * SIZE)).hexdigest()
    done = on_a_small_disk(tmp_path / "enough", "48m", *urls[:2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected)
    done = on_a_small_disk(tmp_path / "little", "44m", *urls)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and ".bin" in done.stderr
    assert len(done.stdout.splitlines()) < 3


XFS = """
mount -o loop $IMAGE $PLACE && cd $PLACE && mkdir one two && export FFSERVE_STORE=$PLACE/store &&
for job in one two; do
    (cd $job && $PYTHON -m ffserve run --input $URLS -- true) || exit
done
sync; du -s --block-size=1 --apparent-size one/input; df --block-size=1 --output=used . | tail -1
printf changed | dd of=one/input/a.bin conv=notrunc 2>/dev/null
md5sum two/input/a.bin store/objects/*/data; cd /; umount $PLACE
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.stores
def test_jobs_share_the_disk_where_the_file_system_can(server: HttpOrigin, tmp_path: Path) -> None:
    import hashlib
    import shutil

    if shutil.which("mkfs.xfs") is None:
        pytest.skip("needs mkfs.xfs")
    size = 16 * SIZE + 5
    url = server.put("a.bin", noise(1, size))
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    with open(image, "wb") as file:
        file.truncate(600 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHON": sys.executable,
                   "FFSERVE_SOCKET": "/nowhere/socket", "IMAGE": str(image),
                   "PLACE": str(mounted), "URLS": url}  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", XFS], capture_output=True, text=True, env=environment
    )
    if "mount" in done.stderr or "unshare failed" in done.stderr:
        pytest.skip(f"cannot mount an image here: {done.stderr}")
    whole, used, *sums = done.stdout.splitlines()
    assert done.returncode == 0 and int(whole.split()[0]) >= size, done.stderr
    assert int(used) < 2 * size, "the store and both jobs have one copy"
    assert [text.split()[0] for text in sums] == [hashlib.md5(noise(1, size)).hexdigest()] * 2
    assert server.total == size


# ---- streams -------------------------------------------------------------------------------------


def test_a_stream_goes_on_where_it_was_cut(server: HttpOrigin) -> None:
    content = lines(1)
    url = server.put("a.txt", content)
    server.cut_after, server.cuts = 1 << 20, 6
    assert streamed(url) == content
    assert server.cuts == 0
    before = server.total
    assert streamed(url, epochs=2) == 2 * content
    mixed = streamed(url, seed=1)
    assert sorted(mixed.splitlines()) == sorted(content.splitlines()) and mixed != content
    assert server.total == before, "each block was fetched once"


def test_a_changed_file_ends_a_stream(server: HttpOrigin) -> None:
    directory = fetching.default_directory()
    fetching._fetchers[directory] = fetching.Fetcher(Store(directory, 1 << 30), read_ahead=0)
    url = server.put("a.txt", lines(1, 4 * SIZE))
    [listing] = find_inputs([url]).values()
    blocks = WorkerStream(
        [splits_of(listing.files)], framing="lines", epochs=1, seed=None, rank=0
    ).blocks()
    assert next(blocks)
    server.put("a.txt", lines(2, 4 * SIZE))
    with pytest.raises(ReadError, match="changed at the origin"):
        for _ in blocks:
            pass


@pytest.mark.check
def test_workers_of_a_stream_share_the_file(server: HttpOrigin, tmp_path: Path) -> None:
    content = [lines(number, 1 << 20) for number in range(4)]
    for number, text in enumerate(content):
        server.put(f"d/{number}.txt", text)
    words = ["--input-strategy", "stream", "--input", f"{server.url}/d/", "--workers", 2]
    ended(start(tmp_path / "run", *words, "--stream-epochs", 2, *shell("cat > got")))
    got = [(tmp_path / "run" / f"worker-{rank}" / "got").read_bytes() for rank in range(2)]
    assert got == [2 * (content[0] + content[1]), 2 * (content[2] + content[3])]
    assert server.total == sum(map(len, content))
    out, _ = ended(start(tmp_path / "head", *words[:4], "--", "head", "-1"))
    assert out == content[0].partition(b"\n")[0] + b"\n"


@pytest.mark.check
def test_a_stream_that_fails_ends_the_run(server: HttpOrigin, tmp_path: Path) -> None:
    """The program is not told the end of the data."""
    url = server.put("a.txt", lines(1, 4 * SIZE))
    server.rate = 10e6
    words = ["--input-strategy", "stream", "--input", url]
    run = start(tmp_path / "run", *words, *shell("head -c 1000 > some; cat > rest; touch marker"))
    until(lambda: (tmp_path / "run" / "rest").exists(), "it reads")
    server.put("a.txt", b"another")
    _, err = ended(run, 1)
    assert "a.txt: the object changed at the origin" in err
    assert not (tmp_path / "run" / "marker").exists()


@pytest.mark.check
def test_a_store_that_cannot_be_used_is_said_before_the_program_starts(
    server: HttpOrigin, tmp_path: Path
) -> None:
    url = server.put("a.txt", b"x\n")
    (tmp_path / "file").write_bytes(b"")
    for strategy in ("stream", "download"):
        words = ["--input-strategy", strategy, "--input", url, *shell("touch marker")]
        run = start(tmp_path / "run", *words, FFSERVE_STORE=f"{tmp_path}/file/store")
        _, err = run.communicate(timeout=100)
        assert run.returncode and b"FFSERVE_STORE" in err, err
    assert not (tmp_path / "run" / "marker").exists()


def test_invalid_names_are_refused(server: HttpOrigin) -> None:
    server.put("d/" + "x" * 256, b"x")
    with pytest.raises(UsageError, match="no local file can have the name"):
        find(f"{server.url}/d/")
