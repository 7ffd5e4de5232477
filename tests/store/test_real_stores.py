"""Servers of S3 (moto; with `make interop` Ceph's gateway) and SFTP (OpenSSH)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ceph
import numpy as np
import pytest
from command import text_of
from daemon import Daemon, Raw, run_python, started, until
from failing_proxy import failing_proxy
from origins import ask_origins, http_origin
from server_process import running
from store_servers import free_port, read_by_a_cache, reading_daemon, small_store, wait_for, written

import ffserve
from ffserve import protocol
from ffserve.convert import convert
from ffserve.errors import AccessDenied, FFServeError, MissingFile, ReadError
from ffserve.inputs import download, find_inputs
from ffserve.inputs.outputs import Output, RunOutput
from ffserve.inputs.places import find
from ffserve.inputs.stream import WorkerStream, splits_of
from ffserve.store.credentials import Access, collect
from ffserve.store.fetching import identity_of
from ffserve.store.origin import find as find_objects

pytestmark = pytest.mark.stores
BLOCK = 64 << 10
SERVERS: dict[str, int] = {}
"""Processes of OpenSSH by the beginning of their URLs."""


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_store(tmp_path, monkeypatch)


@dataclass(frozen=True)
class S3:
    """A server of S3 with a user."""

    url: str
    key: str = "key"
    secret: str = "geheim"


@pytest.fixture(scope="module", params=["moto", pytest.param("ceph", marks=pytest.mark.interop)])
def s3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    pytest.importorskip("s3fs")
    place = tmp_path_factory.mktemp(request.param)
    if request.param == "moto":
        pytest.importorskip("moto")
        port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
        with running(command, port, place / "moto.out"):
            yield S3(f"http://127.0.0.1:{port}")
    elif not ceph.is_installed():
        pytest.skip("needs Ceph: ceph-mon, ceph-osd, radosgw")
    else:
        with ceph.gateway(place) as found:
            yield S3(found.url, found.key, found.secret)


of_ceph = pytest.mark.parametrize(
    "s3", [pytest.param("ceph", marks=pytest.mark.interop)], indirect=True
)
"""Of what moto does not have: it looks at no keys, and takes every name of a host."""


@pytest.fixture
def bucket(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A new bucket: the file system to fill it, and its name."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    name = f"bucket-{random.randrange(1 << 40):x}"
    system.mkdir(name)
    return system, name


def test_s3(bucket: Any, tmp_path: Path) -> None:
    system, name = bucket
    whole = []
    for k in range(3):
        path, samples = written(tmp_path, f"train-{k}.ffr", k)
        system.put_file(str(path), f"{name}/data/train-{k}.ffr")
        whole += samples
    system.pipe_file(f"{name}/data/other.txt", b"text")
    order = random.Random(9).sample(range(900), 900)
    for url in (f"s3://{name}/data/train-*.ffr", f"s3://{name}/data", f"s3://{name}/data/"):
        with ffserve.open(url) as reader:
            assert [bytes(s) for s in reader.read(order)] == [whole[k] for k in order]
            assert reader.shards[0].path == f"s3://{name}/data/train-0.ffr"


def test_s3_by_a_cache(bucket: Any, tmp_path: Path) -> None:
    system, name = bucket
    path, _ = written(tmp_path, "a b.ffr", 1)
    system.put_file(str(path), f"{name}/data/ü/a b.ffr")
    read_by_a_cache(f"s3://{name}/data/ü/a b.ffr", path.read_bytes())


def test_a_changed_object_of_s3_is_never_mixed(bucket: Any, tmp_path: Path) -> None:
    system, name = bucket
    url = f"s3://{name}/a.ffr"
    (old_path, old), (new_path, new) = (written(tmp_path, f"{k}.ffr", k) for k in range(2))
    system.put_file(str(old_path), url)
    with ffserve.open(url) as reader:
        reader.read([0])
        time.sleep(0.3)
        system.put_file(str(new_path), url)
        got = reader.read(range(300), errors="return")
        for k, sample in enumerate(got):
            if isinstance(sample, ReadError):
                assert "changed at the origin" in str(sample)
            else:
                assert bytes(sample) == old[k]
    with ffserve.open(url) as reader:
        assert [bytes(s) for s in reader] == new


def test_errors_of_s3(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, name = bucket
    with pytest.raises(MissingFile, match="no such file at the origin"):
        ffserve.open(f"s3://{name}/none.ffr")
    with pytest.raises(MissingFile):
        ffserve.open("s3://no-such-bucket-here/none.ffr")
    with pytest.raises(MissingFile, match="matches this pattern"):
        ffserve.open(f"s3://{name}/none-*.ffr")
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(AccessDenied, match="credentials"):
        ffserve.open(f"s3://{name}/none.ffr")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim")
    with pytest.raises(ReadError, match="connection to the origin failed") as failed:
        ffserve.open(f"s3://{name}/none.ffr")
    assert "geheim" not in str(failed.value)


def test_listings_of_s3(bucket: Any) -> None:
    system, name = bucket
    odd = "sub/ü +&%41<\x01.txt"
    for key in ("a.txt", "_x/y", "sub/b.txt", "sub/_z", "sub/odd[1].txt"):
        system.pipe_file(f"{name}/in/{key}", b"x")
    system.pipe_file(f"{name}/odd/{odd}", b"x")
    system.pipe_file(f"{name}/in/empty", b"")
    system.call_s3("put_object", Bucket=name, Key="in/marker/", Body=b"")
    for given, names in (
        ("in", ["a.txt", "empty", "sub/b.txt", "sub/odd[1].txt"]),
        ("in/", ["a.txt", "empty", "sub/b.txt", "sub/odd[1].txt"]),
        ("in/*", ["a.txt", "empty", "sub/b.txt", "sub/odd[1].txt"]),
        ("in/{sub,_x}", ["sub/b.txt", "sub/odd[1].txt", "_x/y"]),
        ("in/_*", ["_x/y"]),
        ("i*/[^a-r]*/b.txt", ["in/sub/b.txt"]),
        ("in/sub/odd[[]1].txt", ["odd[1].txt"]),
        ("odd", [odd]),
    ):
        assert [file.name for file in find(f"s3://{name}/{given}").files] == names, given
    assert dict(find(f"s3://{name}/in").left_out) == {
        f"s3://{name}/in/_x": "hidden",
        f"s3://{name}/in/sub/_z": "hidden",
    }
    for missing in ("none", "none/", "none*", "in/none*/x"):
        with pytest.raises(MissingFile, match=missing.replace("*", r"\*")):
            find(f"s3://{name}/{missing}")


@pytest.mark.parametrize("how", ["refused", "unanswered"])
def test_a_run_survives_that_every_request_fails_once(
    bucket: Any, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    """Inputs and output of a job: each request is refused, or done without an answer, and made
    again."""
    system, name = bucket
    ask_origins(60.0, 60.0, 0.01)  # a rename is tried once for each of its requests
    files = {"a.txt": b"one\n", "sub/b.txt": b"two\n" * 100_000, "sub/_hidden": b"x"}
    for key, content in files.items():
        system.pipe_file(f"{name}/in/{key}", content)
    with failing_proxy(int(s3.url.rpartition(":")[2]), how) as (url, failures):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        type(system).clear_instance_cache()
        [listing] = find_inputs([f"s3://{name}/in"]).values()
        wanted = download.names_of(listing.files, rename=False)
        download.place(str(tmp_path), {"input": wanted})
        lines = WorkerStream(
            [splits_of(listing.files)], framing="lines", epochs=1, seed=None, rank=0
        )
        assert b"".join(lines.blocks()) == files["a.txt"] + files["sub/b.txt"]
        for key in ("a.txt", "sub/b.txt"):
            assert (tmp_path / "input" / key).read_bytes() == files[key]
        for rank in range(2):
            (tmp_path / f"{rank}" / "out").mkdir(parents=True)
            (tmp_path / f"{rank}" / "out" / f"part-{rank}").write_bytes(b"%d" % rank * 1000)
            (tmp_path / f"{rank}" / "out" / "log").write_bytes(b"log of %d" % rank)
        output = RunOutput(
            Output("out", f"s3://{name}/out"), job="job", workers=2, ranks=range(2),
            say=lambda _: None,
        )  # fmt: skip
        output.begin()
        for rank in range(2):
            output.put(rank, str(tmp_path / f"{rank}"))
        assert output.commit()
        assert {"GET", "PUT"} < set(failures)
    system.invalidate_cache()
    found = {key.removeprefix(f"{name}/out/"): system.cat_file(key)
             for key in system.find(f"{name}/out")}  # fmt: skip
    assert found == {
        "_SUCCESS": b"",
        "part-0": b"0" * 1000,
        "part-1": b"1" * 1000,
        "worker-0/log": b"log of 0",
        "worker-1/log": b"log of 1",
    }


@pytest.mark.parametrize("how", ["refused", "unanswered"])
def test_what_is_written_survives_that_every_request_fails_once(
    bucket: Any, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    """A file by its writer, a conversion, and tables: complete, and nothing is left beside them."""
    pa = pytest.importorskip("pyarrow")
    from ffserve.arrow import hive, table_reading
    from ffserve.arrow.staged_output import Mode, job_of
    from ffserve.arrow.table_reading import RecordTable
    from ffserve.arrow.table_writing import TableOutput, write_task

    system, name = bucket
    root = f"s3://{name}/out"
    with failing_proxy(int(s3.url.rpartition(":")[2]), how) as (url, failures):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with ffserve.create(f"{root}/a.ffr") as writer:
            for k in range(100):
                writer.write(b"%d" % k * k)
            assert not system.exists(f"{root}/a.ffr")
        with contextlib.suppress(KeyError), ffserve.create(f"{root}/b.ffr") as writer:
            writer.write(b"x")
            raise KeyError
        convert(f"{root}/a.ffr", f"{root}/web.tar", names="drop")
        report = convert(f"{root}/web.tar", f"{root}/shards", format="tfrecord", shards=3)
        again = convert(f"{root}/web.tar", f"{root}/shards", format="tfrecord", shards=3)
        assert (report.samples, report.kept, again.kept) == (100, 0, 3)
        table, output = f"{root}/table", TableOutput("tfrecord", "ByteArray", partition_by=("k",))
        modes: tuple[Mode, ...] = ("append", "overwrite", "dynamic")
        for mode in modes:
            job = job_of(table).begin(table, mode, pid=os.getpid())
            rows = pa.RecordBatch.from_pydict({"byteArray": [b"x", b"y"], "k": [1, 2]})
            job.commit(write_task(output, job, 0, [rows]))
        assert {"GET", "PUT", "DELETE"} < set(failures)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    with ffserve.open(f"{root}/a.ffr") as reader:
        assert [bytes(sample) for sample in reader] == [b"%d" % k * k for k in range(100)]
    with ffserve.open(f"{root}/shards") as reader:
        assert len(reader) == 100
    system.invalidate_cache()
    found = [key.removeprefix(f"{name}/out/") for key in system.find(f"{name}/out")]
    parts = [f"shards/PART_{k:05d}.tfrecord" for k in range(3)]
    assert [key for key in found if not key.startswith("table/k=")] == [
        "a.ffr", "shards/.ffserve-convert.json", *parts, "table/_SUCCESS", "web.tar",
    ]  # fmt: skip
    assert len(found) == 7 + 2
    [facts] = json.loads(text_of("inspect", "--json", f"{root}/a.ffr"))
    assert facts["samples"] == 100
    for words in (("verify",), ("index",), ("ls",), ("simulate", "--cache", "0.5")):
        assert text_of(*words, f"{root}/{'shards' if words != ('ls',) else 'a.ffr'}")
    assert text_of("cat", f"{root}/a.ffr", "3") == "333"
    data = pa.schema([("byteArray", pa.binary())])
    read = RecordTable("tfrecord", "ByteArray")
    pieces = [
        p for f in hive.find_files([table]) for p in table_reading.pieces_of(read, f, 1 << 20)
    ]
    got = [b.column(0).to_pylist() for p in pieces for b in table_reading.batches(read, p, data)]
    assert got == [[b"x"], [b"y"]]


def test_an_object_of_several_parts(bucket: Any, tmp_path: Path) -> None:
    """Its ETag is not the checksum of its bytes; another object with the same bytes has another."""
    system, name = bucket
    path, samples = written(tmp_path, "a.ffr", 1, count=9000)
    whole = path.read_bytes()
    assert len(whole) > 10 << 20
    url = f"s3://{name}/a.ffr"
    system.pipe_file(url, whole, chunksize=5 << 20)
    parts = identity_of(url)
    assert parts.tag.endswith(f"-{-(-len(whole) // (5 << 20))}") and parts.size == len(whole)
    some = random.Random(2).sample(range(9000), 60)
    with ffserve.open(url) as reader:
        assert [bytes(s) for s in reader.read(some)] == [samples[k] for k in some]
        system.pipe_file(url, whole, chunksize=50 << 20)
        rest = reader.read(range(9000), errors="return")
        assert any(isinstance(sample, ReadError) for sample in rest)
    assert identity_of(url).tag != parts.tag
    with ffserve.open(url) as reader:
        assert [bytes(s) for s in reader.read(some)] == [samples[k] for k in some]


def test_more_objects_than_one_listing_has(bucket: Any, tmp_path: Path) -> None:
    system, name = bucket
    path, samples = written(tmp_path, "a.ffr", 1, count=1)
    content = path.read_bytes()
    system.pipe({f"{name}/many/{k:04}.ffr": content for k in range(1050)})
    found, _ = find_objects(f"s3://{name}/many/*.ffr")
    assert [each.url for each in found] == [f"s3://{name}/many/{k:04}.ffr" for k in range(1050)]
    with ffserve.open(f"s3://{name}/many/10[0-4]?.ffr") as reader:
        assert [bytes(s) for s in reader] == samples * 50


@of_ceph
def test_wrong_keys(bucket: Any, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, name = bucket
    path, samples = written(tmp_path, "a.ffr", 1)
    url = f"s3://{name}/a.ffr"
    system.put_file(str(path), url)
    with started(reading_daemon(tmp_path)) as daemon:
        for key, secret in ((s3.key, "falsch"), ("nobody", s3.secret)):
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
            for asked in (url, f"s3://{name}/*.ffr"):
                with pytest.raises(AccessDenied, match="denies access") as failed:
                    ffserve.open(asked)
                assert secret not in str(failed.value)
            with pytest.raises(AccessDenied, match="denies access"):
                daemon.open(url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
        with daemon.open(url) as reader:
            assert [bytes(s) for s in reader] == samples


@of_ceph
@pytest.mark.parametrize("style", ["path", "virtual"])
def test_buckets_as_hosts(
    bucket: Any, s3: S3, style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bucket.localhost` is this machine, which the gateway knows as its own name."""
    system, name = bucket
    if style == "virtual":
        try:
            socket.getaddrinfo(f"{name}.localhost", None)
        except socket.gaierror:
            pytest.skip("names below localhost have no address here (libnss-myhostname)")
    path, samples = written(tmp_path, "a.ffr", 1)
    system.put_file(str(path), f"{name}/a.ffr")
    settings = tmp_path / "config"
    settings.write_text(f"[default]\ns3 =\n  addressing_style = {style}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url.replace("127.0.0.1", "localhost"))
    url = f"s3://{name}/a.ffr"
    with started(reading_daemon(tmp_path)) as daemon:
        for reading in (ffserve.open(url, server="off"), daemon.open(url)):
            with reading as reader:
                assert [bytes(s) for s in reader] == samples
        place = daemon.status()["store"]
    assert place["fetched"] == path.stat().st_size


@pytest.fixture
def sftp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An OpenSSH server for this user; the beginning of its URLs."""
    pytest.importorskip("paramiko")
    if not os.path.exists("/usr/sbin/sshd") or os.geteuid() != 0:
        pytest.skip("needs OpenSSH's server, and root")
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    for key in (home / ".ssh" / "id_ed25519", tmp_path / "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    keys = tmp_path / "authorized"
    shutil.copy(home / ".ssh" / "id_ed25519.pub", keys)
    os.makedirs("/run/sshd", exist_ok=True)
    port = free_port()
    config = tmp_path / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nStrictModes no\n"
        f"AuthorizedKeysFile {keys}\nPermitRootLogin yes\nUsePAM no\nPidFile none\n"
        "Subsystem sftp internal-sftp\n"
    )
    monkeypatch.setenv("HOME", str(home))
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-e", "-f", config], stderr=subprocess.DEVNULL
    )
    try:
        wait_for(port, server)
        SERVERS[url := f"sftp://root@127.0.0.1:{port}"] = server.pid
        yield url
    finally:
        server.terminate()
        server.wait()


def test_sftp(sftp: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    whole = []
    for k in range(2):
        whole += written(data, f"train-{k}.ffr", k)[1]
    with ffserve.open(f"{sftp}{data}/train-*.ffr") as reader:
        assert [bytes(s) for s in reader] == whole
        assert reader.shards[1].path == f"{sftp}{data}/train-1.ffr"
    with pytest.raises(MissingFile):
        ffserve.open(f"{sftp}{data}/none.ffr")


# ---- through a daemon, which has nothing of its own ----------------------------------------------


def test_a_run_over_sftp(sftp: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Inputs with links, and an output. The server ends its connections in between."""
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "a.txt").write_bytes(b"one\n")
    (data / "sub" / "b.txt").write_bytes(b"two\n" * 3 * BLOCK)
    (data / "link.txt").symlink_to("sub/b.txt")
    (data / "linked").symlink_to("sub")
    listing = find_inputs([f"{sftp}{data}"])["input"]
    assert [file.name for file in listing.files] == ["a.txt", "link.txt", "sub/b.txt"]
    assert listing.left_out == [(f"{sftp}{data}/linked", "not a regular file")]
    (data / "broken").symlink_to("nowhere")
    with pytest.raises(MissingFile, match=f"{data}/broken"):
        find_inputs([f"{sftp}{data}"])
    drop_connections(sftp)
    place = tmp_path / "place"
    (place / "out").mkdir(parents=True)
    download.place(str(place), {"input": download.names_of(listing.files, rename=False)})
    for name in ("a.txt", "link.txt", "sub/b.txt"):
        assert (place / "input" / name).read_bytes() == (data / name).read_bytes()
    (place / "out" / "part").write_bytes(b"part")
    output = RunOutput(
        Output("out", f"{sftp}{tmp_path}/target"), job="job", workers=1, ranks=[0],
        say=lambda _: None,
    )  # fmt: skip
    output.begin()
    drop_connections(sftp)
    output.put(0, str(place))
    drop_connections(sftp)
    assert output.commit()
    found = {path.name: path.read_bytes() for path in (tmp_path / "target").rglob("*")}
    assert found == {"part": b"part", "_SUCCESS": b""}
    caplog.clear()  # paramiko's lines about lost connections


def test_sftp_to_a_port_without_ssh_logged_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paramiko")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"sftp://joe@127.0.0.1:{server.getsockname()[1]}/a.ffr"

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)
                        while connection.recv(4096):  # until the client has read that and closes
                            pass

        threading.Thread(target=answer, daemon=True).start()
        program = (
            "import sys\nfrom ffserve.cli import main\nsys.exit(main(['inspect', sys.argv[1]]))"
        )
        done = run_python(program, url, code=None)
    assert done.returncode and len(done.stderr.splitlines()) <= 3, done.stderr
    said = "protocol version", "SSH protocol banner", "No existing session"  # which, is chance
    assert url in done.stderr and any(text in done.stderr for text in said)


def drop_connections(sftp: str) -> None:
    """End the connections of a server, as its restart does."""
    server = SERVERS[sftp]
    for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def test_s3_through_a_daemon(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    system, name = bucket
    path, samples = written(tmp_path, "a.ffr", 1)
    system.put_file(str(path), f"{name}/a.ffr")
    url = f"s3://{name}/a.ffr"
    with started(reading_daemon(tmp_path)) as daemon:
        with daemon.open(url) as reader:
            assert [bytes(s) for s in reader.read(range(300))] == samples
            assert reader.source.startswith("daemon ")
            fetched = daemon.status()["store"]["fetched"]
            assert fetched == path.stat().st_size
        shown = json.dumps(daemon.status()) + daemon.text()
        assert "geheim" not in shown and url in shown
        # What the daemon is not told it does not have: neither endpoint nor credentials.
        found = json.loads(collect([url]))["s3"]
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        assert (found["key"], found["secret"]) == ("key", "geheim")
        assert (found["endpoint_url"], found["region"]) == (endpoint, "us-east-1")
        access = Access(json.dumps({"s3": {"endpoint_url": endpoint}}))
        made, _ = access.file_system(url)
        assert made.credentials.options == {"endpoint_url": endpoint}
        assert access.place(url) == f"s3://{name}@{endpoint}"
        (new_path, new) = written(tmp_path, "b.ffr", 2)
        time.sleep(1.1)
        system.put_file(str(new_path), f"{name}/a.ffr")
        with daemon.open(url) as reader:
            assert [bytes(s) for s in reader.read(range(300))] == new
        monkeypatch.setitem(fsspec.config.conf, "s3", {"client_kwargs": {"verify": False}})
        with pytest.raises(ReadError, match="cannot be passed to the daemon"):
            daemon.open(url)


def test_sftp_through_a_daemon(sftp: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    whole = []
    for k in range(2):
        whole += written(data, f"train-{k}.ffr", k)[1]
    with started(reading_daemon(tmp_path)) as daemon:
        with daemon.open(f"{sftp}{data}/train-*.ffr") as reader:
            assert [bytes(s) for s in reader] == whole
        (Path(os.environ["HOME"]) / ".ssh" / "id_ed25519").unlink()
        with pytest.raises(FFServeError):
            daemon.open(f"{sftp}{data}/train-1.ffr")
        assert "PRIVATE KEY" not in daemon.text()


def _is_idle(daemon: Daemon) -> bool:
    return not any(shard["sessions"] for shard in daemon.status()["shards"])


READ = """
import os, sys
import ffserve
url, socket, user, warm = sys.argv[1:]
with ffserve.open(warm, server="off") as reader:  # all modules, while they can be read
    reader.read([0])
os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
os.environ["HOME"] = "/nonexistent"
with ffserve.open(url, server=socket) as reader:
    print(len(reader), sum(len(s) for s in reader.read(range(len(reader)))))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("common", [False, True])
def test_users_share_nothing_of_an_origin_that_is_not_common(tmp_path: Path, common: bool) -> None:
    path, samples = written(tmp_path, "a.ffr", 1)
    with http_origin() as origin:
        url = origin.put("a.ffr", path.read_bytes())
        warm = origin.put("warm.ffr", written(tmp_path, "warm.ffr", 2)[0].read_bytes())
        size = len(origin.files["a.ffr"])
        options = ["--socket-mode", "0666"]
        if common:
            options += ["--store-common", origin.url]
        with started(reading_daemon(tmp_path, *options)) as daemon:
            for user in (4001, 4002):
                done = run_python(READ, url, daemon.socket, user, warm)
                assert done.stdout.split() == ["300", str(sum(map(len, samples)))]
            assert origin.sent_of("a.ffr") == (size if common else 2 * size)
            users = {domain["user"] for domain in daemon.status()["domains"]}
            assert users == ({None} if common else {4001, 4002})
            # Whom the origin refuses gets nothing, whatever is in memory and on disk.
            known = identity_of(url)
            row = np.zeros(1, protocol.IDENTITY_DTYPE)
            row["size"], row["mtime"] = known.size, known.modified
            what = {"paths": [url], "format": None, "verify": True, "access": "{}"}
            asked = protocol.Open(1, {**what, "tags": [known.tag]}, row.tobytes())
            for status, answers in ((0, protocol.Opened), (403, protocol.Fail)):
                origin.status = status
                with Raw(daemon.socket) as raw:
                    raw.send(asked)
                    answer = raw.receive()
                    assert isinstance(answer, answers)
                until(lambda: _is_idle(daemon), "the session has ended")
            assert isinstance(answer, protocol.Fail) and answer.error[0] == "access"
