"""Access: what travels to the daemon, what it takes of it, and what is the same place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.store.access import MOST_TEXT, Access, collect, served

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec.config, "conf", {})


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
    fsspec.config.conf["http"] = {"headers": {"A": "b" * MOST_TEXT}}
    with pytest.raises(ReadError, match="bytes cannot be passed"):
        collect(["http://a/x"])
    with pytest.raises(ReadError, match="the access to hdfs:// cannot be passed"):
        collect(["hdfs://a/x"])


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
        '{"sftp": {"key_filename": "/root/.ssh/id_rsa"}}', "[" * 50_000, '"' + "x" * MOST_TEXT,
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
