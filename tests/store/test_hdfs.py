"""HDFS: a NameNode and a DataNode of Hadoop, read by their own protocol and by WebHDFS."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import run_python
from hdfs_server import BLOCK_SIZE, Cluster, is_installed
from own_daemons import own_daemons, use
from store_servers import small_store, written

import ffserve
from ffserve.cli import run
from ffserve.errors import AccessDenied, MissingFile, ReadError, UsageError
from ffserve.store import fetching, origin
from ffserve.store.schemes import hdfs

pytestmark = pytest.mark.stores
COUNT = 5000
"""Samples of a file that no reading ahead fetches as a whole: 15 of its blocks of HDFS."""

# Each test has a directory of its own, and the cluster starts once: it takes half a minute.


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_store(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("hdfs_native")
    pytest.importorskip("requests")
    if not is_installed():
        pytest.skip("needs Java, and Hadoop's files (bash .ci/setup --stores)")
    with Cluster(tmp_path_factory.mktemp("hdfs")).started() as running:
        yield running


@pytest.fixture
def directory(cluster: Cluster) -> str:
    """The path of a new directory."""
    path = f"/test-{random.randrange(1 << 40):x}"
    cluster.files.mkdir(path)
    return path


@pytest.fixture(params=["hdfs", "webhdfs"])
def place(request: pytest.FixtureRequest, cluster: Cluster, directory: str) -> str:
    """The URL of that directory."""
    beginning = {"hdfs": cluster.hdfs, "webhdfs": cluster.webhdfs}[request.param]
    return beginning + directory


def put(cluster: Cluster, local: Path, path: str) -> None:
    cluster.files.pipe_file(path, local.read_bytes())


def test_files_are_found_and_read(
    cluster: Cluster, directory: str, place: str, tmp_path: Path
) -> None:
    whole = []
    for k in range(3):
        local, samples = written(tmp_path, f"train-{k}.ffr", k, count=1000)
        assert local.stat().st_size > 2 * BLOCK_SIZE
        put(cluster, local, f"{directory}/train-{k}.ffr")
        whole += samples
    cluster.files.pipe_file(f"{directory}/other.txt", b"text")
    order = random.Random(9).sample(range(3000), 3000)
    for url in (f"{place}/train-*.ffr", f"{place}/train-?.ffr", f"{place}/[a-z]*-[012].ffr", place):
        with ffserve.open(url) as reader:
            assert [bytes(s) for s in reader.read(order)] == [whole[k] for k in order]
            assert reader.shards[1].path == f"{place}/train-1.ffr"


def test_a_replaced_file_is_never_mixed(
    cluster: Cluster, directory: str, place: str, tmp_path: Path
) -> None:
    """Not even in the same second and with the same size."""
    path, url = f"{directory}/a.ffr", f"{place}/a.ffr"
    local, old = written(tmp_path, "old.ffr", 0, count=COUNT)
    new = [bytes(reversed(sample)) for sample in old]
    with ffserve.create(tmp_path / "new.ffr") as writer:
        for sample in new:
            writer.write(sample)
    assert local.stat().st_size == (tmp_path / "new.ffr").stat().st_size
    put(cluster, local, path)
    before = origin.identify(url)
    with ffserve.open(url) as reader:
        reader.read([COUNT // 2])
        put(cluster, tmp_path / "new.ffr", path)
        assert origin.identify(url).tag != before.tag
        got = reader.read(range(COUNT), errors="return")
    failed = [sample for sample in got if isinstance(sample, ReadError)]
    assert failed and all("changed at the origin" in str(error) for error in failed)
    assert all(isinstance(one, ReadError) or bytes(one) == old[k] for k, one in enumerate(got))
    with ffserve.open(url) as reader:
        assert [bytes(s) for s in reader] == new


def test_errors(
    cluster: Cluster, directory: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in (f"{place}/none.ffr", f"{place}/none/a.ffr", f"{place}/none-*.ffr"):
        with pytest.raises(MissingFile):
            ffserve.open(missing)
    with pytest.raises(MissingFile, match="contains no"):
        ffserve.open(place)
    local, _ = written(tmp_path, "a.ffr", 1)
    put(cluster, local, f"{directory}/private/a.ffr")
    cluster.files.chmod(f"{directory}/private", "700")
    put(cluster, local, f"{directory}/b.ffr")
    cluster.files.chmod(f"{directory}/b.ffr", "600")
    ask = """
import sys, ffserve
try:
    with ffserve.open(sys.argv[1]) as reader:
        reader.read([0])
except ffserve.AccessDenied as error:
    print(error)
"""
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    other = place.replace("webhdfs://", "webhdfs://somebody@")
    for denied in ("private/a.ffr", "b.ffr"):
        done = run_python(ask, f"{other}/{denied}")
        assert "denies access" in done.stdout and "somebody" in done.stdout
        assert "\\n" not in done.stdout and "at org.apache" not in done.stdout


def test_no_server(cluster: Cluster) -> None:
    for url in ("hdfs://127.0.0.1:9/a.ffr", "hdfs://no-such-host.invalid:8020/a.ffr"):
        with pytest.raises(ReadError, match="connection to the origin failed"):
            ffserve.open(url)
    with pytest.raises(UsageError, match="unknown name service"):
        ffserve.open("hdfs://nobody-knows/a.ffr")


def test_a_name_service(
    cluster: Cluster, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two NameNodes in Hadoop's settings, of which the first does not answer; and the default."""
    local, samples = written(tmp_path, "a.ffr", 1)
    put(cluster, local, f"{directory}/a.ffr")
    settings = tmp_path / "hadoop"
    settings.mkdir()
    names = {
        "fs.defaultFS": "hdfs://cluster",
        "dfs.nameservices": "cluster",
        "dfs.ha.namenodes.cluster": "one,two",
        "dfs.namenode.rpc-address.cluster.one": "127.0.0.1:9",
        "dfs.namenode.rpc-address.cluster.two": cluster.hdfs.removeprefix("hdfs://"),
    }
    properties = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in names.items()
    )
    for name in ("core-site.xml", "hdfs-site.xml"):
        (settings / name).write_text(f"<configuration>{properties}</configuration>")
    ask = """
import sys, ffserve
for url in sys.argv[1:]:
    with ffserve.open(url) as reader:
        print(len(reader), sum(len(sample) for sample in reader), reader.shards[0].path)
"""
    asked = [f"hdfs://cluster{directory}/*.ffr", f"hdfs://{directory}/a.ffr"]
    monkeypatch.setenv("HADOOP_CONF_DIR", str(settings))
    done = run_python(ask, *asked)
    size = sum(map(len, samples))
    found = [f"hdfs://cluster{directory}/a.ffr", f"hdfs://{directory}/a.ffr"]
    assert done.stdout.splitlines() == [f"300 {size} {url}" for url in found]


def test_a_datanode_that_stops_and_comes_back(
    cluster: Cluster, directory: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, samples = written(tmp_path, "a.ffr", 1, count=COUNT)
    put(cluster, local, f"{directory}/a.ffr")
    with ffserve.open(f"{place}/a.ffr") as reader:
        reader.read([COUNT // 2])
        cluster.stop_datanode()
        try:
            got = reader.read(range(COUNT), errors="return")
            failed = [str(one) for one in got if isinstance(one, ReadError)]
            assert failed and not any("changed" in text for text in failed)
            right = [k for k, one in enumerate(got) if not isinstance(one, ReadError)]
            assert all(bytes(got[k]) == samples[k] for k in right)
            # With more patience a read waits for it.
            fetching.forget(fetching.Patience(120.0, 120.0))
            answers: list[object] = []
            waiting = threading.Thread(target=lambda: answers.append(reader.read(range(COUNT))))
            waiting.start()
            time.sleep(0.5)
            assert waiting.is_alive()
        finally:
            cluster.start_datanode()
        waiting.join(120)
        assert [bytes(s) for s in answers[0]] == samples  # type: ignore[attr-defined]


def test_a_forked_process_reads(cluster: Cluster, directory: str, tmp_path: Path) -> None:
    """What its parent has of hdfs-native cannot be used there, nor freed."""
    local, samples = written(tmp_path, "a.ffr", 1)
    put(cluster, local, f"{directory}/a.ffr")
    with ffserve.open(f"{cluster.hdfs}{directory}/a.ffr") as reader:
        assert bytes(reader[0]) == samples[0]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(60)
                code = 0 if [bytes(s) for s in reader] == samples else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert [bytes(s) for s in reader] == samples


def test_a_daemon_of_the_user_reads_with_what_its_user_has(
    cluster: Cluster, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, samples = written(tmp_path, "a.ffr", 1)
    put(cluster, local, f"{directory}/a.ffr")
    url = f"{cluster.hdfs}{directory}/a.ffr"
    with own_daemons(tmp_path) as socket:
        use(socket, monkeypatch)
        for _ in range(2):
            with ffserve.open(url) as reader:
                assert reader.source == f"daemon {socket}"
                assert [bytes(s) for s in reader] == samples
        # Of another user of Hadoop it has nothing.
        monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
        with pytest.raises(ReadError, match="started with other settings"):
            ffserve.open(url, server="require")


def test_threads_of_a_process_share_one_client(
    cluster: Cluster, directory: str, tmp_path: Path
) -> None:
    for k in range(12):
        put(cluster, written(tmp_path, f"{k}.ffr", k)[0], f"{directory}/{k}.ffr")
    with ffserve.open(f"{cluster.hdfs}{directory}/*.ffr") as reader:
        reader.read_batch(range(len(reader)))
    host = cluster.hdfs.removeprefix("hdfs://")
    assert len([key for key in hdfs._clients if key[0] == os.getpid() and host in key]) == 1


def test_stage(
    cluster: Cluster, directory: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {f"{k}.ffr": written(tmp_path, f"{k}.ffr", k)[0].read_bytes() for k in range(3)}
    for name, content in contents.items():
        cluster.files.pipe_file(f"{directory}/{name}", content)
    out = tmp_path / "out"
    for fetched in ([True] * 3, [False] * 3):
        assert run(["stage", "--json", f"{place}/*.ffr", "-o", str(out)]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert [fact["fetched"] for fact in facts] == fetched
    assert {p.name: p.read_bytes() for p in out.glob("*.ffr")} == contents


def test_inputs_and_output_of_a_job(
    cluster: Cluster,
    directory: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster.files.chmod(directory, "777")  # without a name, WebHDFS's user is nobody's
    for k in range(2):
        cluster.files.pipe_file(f"{directory}/in/{k}.txt", b"line %d\n" % k)
    job = ["--input", f"{place}/in/*.txt#lines", "--output", f"out={place}/out"]
    program = "cat lines/*.txt > out/all.txt"
    assert run(["run", *job, "--", "sh", "-c", program]) == 0
    assert cluster.files.cat_file(f"{directory}/out/all.txt") == b"line 0\nline 1\n"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native.fsspec", None)
    with pytest.raises(UsageError, match=r"needs a package") as failed:
        ffserve.open("hdfs://127.0.0.1:9/other.ffr")
    assert "pip install 'ffserve[hdfs]'" in str(failed.value.hint)


def test_access_denied_is_not_tried_again(cluster: Cluster, directory: str) -> None:
    text = 'RPCError("org.apache.hadoop.security.AccessControlException", "no\\n\\tat x")'
    found = origin.failure(RuntimeError(text), f"{cluster.hdfs}{directory}")
    assert isinstance(found.error, AccessDenied) and not found.again
