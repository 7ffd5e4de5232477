"""Access: what travels to the daemon, what it takes of it, and what is the same place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.limits import MOST_ACCESS
from ffserve.store.credentials import Access, collect, forget_own_settings, served

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def no_settings() -> Iterator[None]:
    settings = dict(fsspec.config.conf)
    fsspec.config.conf.clear()
    yield
    fsspec.config.conf.clear()
    fsspec.config.conf.update(settings)


def access(**options: Any) -> Access:
    return Access(json.dumps(options))


def test_headers_travel_and_what_is_not_understood_does_not() -> None:
    assert json.loads(collect(["http://a/x", "https://b/y"])) == {"http": {}}
    for protocol in ("http", "https"):
        fsspec.config.conf[protocol] = {"client_kwargs": {"headers": {"A": "b"}}}
    assert json.loads(collect(["http://a/x", "https://b/y"])) == {"http": {"headers": {"A": "b"}}}
    fsspec.config.conf["https"] = {}
    with pytest.raises(ReadError, match="differs"):
        collect(["http://a/x", "https://b/y"])
    fsspec.config.conf["http"] = {"client_kwargs": {"trust_env": True}}
    with pytest.raises(ReadError, match="the option 'trust_env' of http://"):
        collect(["http://a/x"])
    fsspec.config.conf["http"] = {"headers": {"A": "b" * MOST_ACCESS}}
    with pytest.raises(ReadError, match="bytes cannot be passed"):
        collect(["http://a/x"])
    with pytest.raises(ReadError, match="the access to hdfs:// cannot be passed"):
        collect(["hdfs://a/x"])


def test_a_daemon_with_the_settings_of_its_client_uses_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    web, hadoop = ["http://a/x"], ["hdfs://a/x", "hdfs://b/y"]
    assert set(json.loads(collect(web, own=True))) == {"http", "own"}
    assert set(json.loads(collect(hadoop, own=True))) == {"own"}
    passed, own = Access(collect(web, own=True)), Access(collect(hadoop, own=True))
    passed.use_own(web)
    own.use_own(hadoop)
    assert passed.own and own.own and own.place("hdfs://a/x") == "hdfs://a"
    # Settings of another protocol do not matter.
    for name, web_is_own, hadoop_is_own in (
        ("AWS_PROFILE", True, True), ("HADOOP_CONF_DIR", True, False), ("HOME", False, False),
        ("https_proxy", False, False),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(name, "another")
            passed.use_own(web)
            assert passed.own == web_is_own
            if hadoop_is_own:
                own.use_own(hadoop)
            else:
                with pytest.raises(ReadError, match="started with other settings"):
                    own.use_own(hadoop)
    fsspec.config.conf["http"] = {"client_kwargs": {"trust_env": True}}
    passed.use_own(web)
    assert not passed.own
    # What is in one process is no daemon's.
    with pytest.raises(ReadError, match="memory:// cannot be passed"):
        collect(["memory://x"], own=True)


def test_places_differ_where_the_same_name_leads_elsewhere() -> None:
    usual = access()
    assert usual.place("s3://bucket/a/b.ffr") == "s3://bucket"
    assert usual.place("https://host:1/a?x=y") == "https://host:1"
    assert access(s3={"region": "eu-west-1", "key": "k"}).place("s3://b/x") == "s3://b"
    elsewhere = access(s3={"endpoint_url": "https://user:geheim@minio:9"}).place("s3://b/x")
    assert elsewhere == "s3://b@https://user@minio:9"
    for region in ("cn-north-1", "us-gov-west-1", "us-iso-east-1", "eu-isoe-west-1", "x"):
        assert access(s3={"region": region}).place("s3://b/x") == f"s3://b@{region}"
    places = {
        access(http={"headers": {"Host": host}}).place("http://good/x") for host in ("a", "b", "c")
    }
    assert len(places) == 3 and "http://good" not in places
    assert access(sftp={"username": "a"}).place("sftp://host/x") == "sftp://a@host"
    assert access(sftp={"username": "a", "port": 7}).place("sftp://host/x") == "sftp://a@host:7"
    assert access(sftp={"username": "a"}).place("sftp://b:geheim@host:2/x") == "sftp://b@host:2"
    assert access().place("gs://b/x") == "gs://b"
    assert access(gs={"endpoint_url": "http://h:1"}).place("gs://b/x") == "gs://b@http://h:1"
    blob = "abfs://c@https://name.blob.core.windows.net"
    assert access(abfs={"account_name": "name"}).place("az://c/x") == blob
    for host in ("c@name.dfs.core.windows.net", "name.dfs.core.windows.net/c"):
        assert access(abfs={"account_name": "other"}).place(f"abfss://{host}/x/y") == blob
    own = {"endpoint_url": "http://h/name"}
    assert access(abfs=own).place("abfs://c/x") == "abfs://c@http://h/name"
    for name in ("hf://datasets/a/b/c/d", "hf://datasets/a/b@main/c"):
        assert usual.place(name) == "hf://datasets/a/b@https://huggingface.co"
    elsewhere = access(hf={"endpoint_url": "http://hub"}).place("hf://datasets/a/b/c")
    assert elsewhere == "hf://datasets/a/b@http://hub"
    assert usual.place("webhdfs://host:1/x") == "webhdfs://host:1"
    assert access(webhdfs={"user": "a", "port": 2}).place("webhdfs://h/x") == "webhdfs://a@h:2"
    assert access(webhdfs={"user": "a", "use_https": True}).place("webhdfs://b@h:1/x") == (
        "swebhdfs://b@h:1"
    )


def test_what_azure_and_web_hdfs_have_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "name")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "signature")
    found = {"sas_token": "signature", "account_name": "name"}
    assert json.loads(collect(["abfs://c/x", "az://c/y"]))["abfs"] == found
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "key")
    found = {"account_key": "key", "account_name": "name"}
    assert json.loads(collect(["abfs://c/x"]))["abfs"] == found
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        "AccountName=other;AccountKey=a==;EndpointSuffix=core.chinacloudapi.cn",
    )
    address = "https://other.blob.core.chinacloudapi.cn"
    found = {"account_name": "other", "account_key": "a==", "endpoint_url": address}
    assert json.loads(collect(["abfs://c/x"]))["abfs"] == found
    fsspec.config.conf["abfs"] = {"credential": object()}
    with pytest.raises(ReadError, match="the option 'credential' of abfs://"):
        collect(["abfs://c/x"])
    fsspec.config.conf["webhdfs"] = {"user": "a", "use_https": True}
    assert json.loads(collect(["webhdfs://h/x"])) == {"webhdfs": {"user": "a", "use_https": True}}
    fsspec.config.conf["webhdfs"] = {"kerberos": True}
    with pytest.raises(ReadError, match="the option 'kerberos' of webhdfs://"):
        collect(["webhdfs://h/x"])


@pytest.mark.stores
def test_a_file_system_of_web_hdfs_takes_nothing_of_this_user() -> None:
    pytest.importorskip("requests")
    given = access(webhdfs={"user": "a", "port": 2})
    system, path = given.file_system("webhdfs://host/data/x")
    assert (system.url, system.pars, path) == (
        "http://host:2/webhdfs/v1",
        {"user.name": "a"},
        "/data/x",
    )
    assert not system.session.trust_env
    system, _ = given.file_system("webhdfs://b@host:3/data/x")
    assert (system.url, system.pars) == ("http://host:3/webhdfs/v1", {"user.name": "b"})


def test_variables_of_this_process_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "AZURE_STORAGE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "HF_TOKEN", "NO_PROXY"
    files = "NETRC", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"
    for name in (*names, *files, "https_proxy", "AWS_ACCESS_KEY_ID"):
        monkeypatch.setenv(name, "own")
    forget_own_settings()
    left = {name: text for name, text in os.environ.items() if text == "own"}
    assert left == {}
    assert [os.environ[name] for name in files] == [os.devnull] * 3


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "local:///etc/passwd", "memory://x", "zip://a::http://b/c",
        "http://a/x::file:///etc/passwd", "simplecache::s3://a/b", "hdfs://a/b", "http:///x",
        "http://[::1/x", "http://a:99999/x", "http://a:0/x", "http://a/\nx", "reference://x", "",
    ],
)  # fmt: skip
def test_what_is_no_place_of_others_is_not_fetched(url: str) -> None:
    assert not served(url)


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "[]", "null", "7", '{"s3": []}', '{"file": {}}', '{"s3": {"profile": "x"}}',
        '{"s3": {"key": 7}}', '{"s3": {"requester_pays": "yes"}}', '{"s3": {"region": "a/b"}}',
        '{"s3": {"endpoint_url": "file:///x"}}', '{"s3": {"addressing_style": "x"}}',
        '{"http": {"headers": {"a": 7}}}', '{"http": {"headers": {"a": "b\\nc"}}}',
        '{"sftp": {"port": true}}', '{"sftp": {"port": 65536}}', '{"sftp": {"keys": [7]}}',
        '{"sftp": {"keys": ["a","a","a","a","a","a","a","a","a"]}}',
        '{"sftp": {"key_filename": "/root/.ssh/id_rsa"}}', '{"gs": {"token": 7}}',
        '{"gs": {"private_key": "x"}}', '{"gs": {"refresh_token": "x", "client_id": "y"}}',
        '{"gs": {"endpoint_url": "file:///x"}}', '{"gs": {"token_uri": "http://x"}}',
        '{"abfs": {"account_key": "x"}}', '{"abfs": {"account_name": "a.b/c"}}',
        '{"abfs": {"connection_string": "x"}}',
        '{"abfs": {"client_secret": "x"}}',
        '{"hf": {"token": true}}', '{"hf": {"endpoint_url": "/x"}}', '{"hdfs": {}}',
        '{"webhdfs": {"kerberos": true}}', '{"webhdfs": {"session_verify": "/x"}}',
        '{"webhdfs": {"use_https": 1}}', '{"webhdfs": {"password": "x"}}',
        "[" * 50_000, '"' + "x" * MOST_ACCESS,
    ],
)  # fmt: skip
def test_an_invalid_access_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="invalid access"):
        Access(text)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
names = st.sampled_from(["s3", "http", "sftp", "key", "headers", "port", "keys", "region"])


@given(st.dictionaries(names, st.dictionaries(names, values, max_size=3) | values, max_size=3))
def test_any_access_is_taken_or_refused(options: dict[str, Any]) -> None:
    try:
        found = Access(json.dumps(options))
    except FFServeError:
        return
    assert found.place("s3://bucket/x").startswith("s3://bucket")
    assert repr(found) == "Access(…)"
