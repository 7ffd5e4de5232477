"""Credentials that end while a job reads are collected again; and what is signed with them."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, started
from origins import HttpOrigin, http_origin, tls_context

import ffserve
from ffserve.store.schemes.s3 import S3Objects
from ffserve.store.web import Web, WebRequest
from ffserve.store.web_files import RenewedOptions

PROCESS = """
import datetime, json, sys, time
until = datetime.datetime.fromtimestamp(time.time() + float(sys.argv[1]), datetime.timezone.utc)
print(json.dumps({"Version": 1, "AccessKeyId": f"K{time.time():.3f}", "SecretAccessKey": "geheim",
                  "SessionToken": "token", "Expiration": until.isoformat()}))
"""
"""A program from which Amazon's tools take credentials; the name of a key is when it was made."""


READ = """
import sys, ffserve
path, url, server = sys.argv[1:]
with ffserve.open(path, server="off") as local, ffserve.open(url, server=server) as reader:
    assert server == "off" or reader.source.startswith("daemon "), reader.source
    for k in range(0, len(local), 4):
        some = range(k, k + 4)
        assert list(map(bytes, reader.read(some))) == list(map(bytes, local.read(some)))
"""


class _Tokens(BaseHTTPRequestHandler):
    """The services from which machines of Google and Azure take tokens; the name of a token is when
    it was made."""

    lasts = 0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        now = time.time()
        said: Any = "project"
        if "recursive" in self.path:
            said = {"email": "somebody@example.com", "scopes": ["a"], "aliases": ["default"]}
        elif "token" in self.path:
            made = {"access_token": f"K{now:.3f}/", "token_type": "Bearer"}
            said = {**made, "expires_in": self.lasts, "expires_on": str(int(now + self.lasts))}
        self.send_response(200)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())


@pytest.fixture
def tokens(lasts: int) -> Iterator[str]:
    """The address of a server of tokens."""
    kind = type("Tokens", (_Tokens,), {"lasts": lasts})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def origin_of(
    scheme: str, lasts: int, tokens: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HttpOrigin]:
    """Run an origin that the environment leads to, and to credentials that end after `lasts` s."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    context, certificate = tls_context(directory)
    with http_origin(context=context if scheme == "abfs" else None) as origin:
        origin.google = scheme == "gs"
        program, config = directory / "keys.py", directory / "config"
        program.write_text(PROCESS)
        command = f"{sys.executable} {program} {lasts}"
        config.write_text(f"[default]\nregion = us-east-1\ncredential_process = {command}\n")
        variables = {
            "s3": {
                "AWS_CONFIG_FILE": config, "AWS_SHARED_CREDENTIALS_FILE": directory / "none",
                "AWS_ENDPOINT_URL": origin.url,
            },
            "gs": {
                "GCE_METADATA_HOST": tokens, "GCE_METADATA_IP": tokens,
                "CLOUDSDK_CONFIG": directory / "none", "STORAGE_EMULATOR_HOST": origin.url,
            },
            "abfs": {
                "IDENTITY_ENDPOINT": f"http://{tokens}/token", "IDENTITY_HEADER": "geheim",
                "FSSPEC_ABFS_ACCOUNT_HOST": origin.url.removeprefix("https://"),
                "SSL_CERT_FILE": certificate,
            },
        }  # fmt: skip
        for name, value in variables[scheme].items():
            monkeypatch.setenv(name, str(value))
        yield origin


@pytest.mark.stores
@pytest.mark.parametrize("lasts", [3, pytest.param(30, marks=pytest.mark.soak)])
@pytest.mark.parametrize("how", ["off", "daemon"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "abfs"])
def test_credentials_that_end_in_the_middle_of_an_epoch(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, how: str, lasts: int
) -> None:
    pytest.importorskip({"s3": "botocore", "gs": "google.auth", "abfs": "azure.identity"}[scheme])
    rng, count = random.Random(1), 40 * lasts
    path, used = str(tmp_path / "a.ffr"), set[str]()
    with ffserve.create(path) as writer:
        for _ in range(count):
            writer.write(rng.randbytes(100_000))

    def admits(text: str) -> bool:
        found = re.search(r"K(\d+\.\d+)/", text)
        if found is None or time.time() > float(found[1]) + lasts:
            return False
        used.add(found[1])
        return True

    with origin_of(scheme, lasts, tokens, tmp_path, monkeypatch) as origin:
        before = "storage/v1/b/bucket/o/" if scheme == "gs" else "bucket/"
        origin.put(f"{before}a.ffr", Path(path).read_bytes())
        origin.rate, origin.admits = 1e6, admits
        command = [sys.executable, "-c", READ, path, f"{scheme}://bucket/a.ffr"]
        if how == "off":
            subprocess.run([*command, "off"], check=True)
        else:
            directory = ["--store-directory", str(tmp_path / "daemon"), "--store-size", "1GiB"]
            options = [*directory, "--store-access", "own"]
            with started(Daemon(options=options, expect=["remote files: store .*"])) as daemon:
                subprocess.run([*command, daemon.socket], check=True)
                assert daemon.status()["store"]["fetched"] <= 1.05 * count * 100_000
        assert len(used) >= 4
        # Botocore does not say when the keys of a program end; the others are renewed in time.
        assert (origin.requests["refused"] > 0) == (scheme == "s3")


def test_options_are_collected_again_when_it_is_time() -> None:
    made: list[dict[str, float]] = []

    def collect() -> dict[str, float]:
        made.append({"expires": time.time() + 3600})
        return made[-1]

    fixed = {"key": "k"}
    given = RenewedOptions(fixed)
    assert given.options is fixed and not given.renewed(fixed)
    renewed = RenewedOptions({"expires": time.time() + 61}, collect)
    first = renewed.options
    assert not made
    time.sleep(1.1)
    assert renewed.options is made[0], "these would end within a minute"
    assert renewed.renewed(first), "somebody else has renewed them"
    assert not renewed.renewed(made[0]), "those are not a second old"
    time.sleep(1.1)
    assert renewed.renewed(made[0]) and renewed.options is made[1]
    same = RenewedOptions(fixed, lambda: dict(fixed))
    assert not same.renewed(fixed), "the same would be refused again"


@pytest.mark.stores
@pytest.mark.parametrize(
    "query", [{}, {"list-type": "2", "prefix": "a b/ü+&=~*'()", "delimiter": ""}]
)
@pytest.mark.parametrize("key", ["a.ffr", "ü/a b+c&%41=~*'();:@,!$"])
def test_signatures_are_those_of_botocore(key: str, query: dict[str, str]) -> None:
    auth = pytest.importorskip("botocore.auth")
    awsrequest = pytest.importorskip("botocore.awsrequest")
    credentials = pytest.importorskip("botocore.credentials").Credentials("key", "secret", "token")
    options = {"key": "key", "secret": "secret", "token": "token", "endpoint_url": "http://host:9"}
    objects = S3Objects(Web(1, 1), RenewedOptions(options))
    for _ in range(5):  # until both have the same second
        made = objects.new_request(options, "GET", f"bucket/{key}", query, {}, ())
        url, headers = made._url, made._headers
        request = awsrequest.AWSRequest("GET", url, headers={"host": "host:9"})
        auth.S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
        if request.headers["X-Amz-Date"] == headers["x-amz-date"]:
            break
    assert request.headers["Authorization"] == headers["Authorization"]


def test_requests_of_one_second_share_a_signature_only_if_they_are_alike() -> None:
    def stamp(request: WebRequest) -> bytes:
        return request._head.partition(b"x-amz-date: ")[2][:16]

    options = {"key": "key", "secret": "secret", "endpoint_url": "http://host:9"}
    asked: list[tuple[dict[str, Any], str, str, dict[str, str], bytes]] = [
        (options, "GET", "bucket/a", {}, b""),
        ({**options, "secret": "other"}, "GET", "bucket/a", {}, b""),
        ({**options, "token": "token"}, "GET", "bucket/a", {}, b""),
        ({**options, "region": "eu-west-1"}, "GET", "bucket/a", {}, b""),
        (options, "HEAD", "bucket/a", {}, b""),
        (options, "GET", "bucket/b", {}, b""),
        (options, "PUT", "bucket/a", {"x-amz-copy-source": "b"}, b""),
        (options, "PUT", "bucket/a", {}, b"body"),
    ]
    objects = S3Objects(Web(1, 1), RenewedOptions(options))
    found: set[bytes] = set()
    for given, method, path, headers, body in 2 * asked:
        alone = S3Objects(Web(1, 1), RenewedOptions(given))
        for _ in range(5):  # until both have the same second
            one = objects.new_request(given, method, path, {}, headers, body)
            other = alone.new_request(given, method, path, {}, headers, body)
            if stamp(one) == stamp(other):
                break
        assert stamp(one) and one._head == other._head
        found.add(one._head)
    assert len(found) >= len(asked)
