"""Credentials that end while a job reads are collected again; and what is signed with them."""

from __future__ import annotations

import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, started
from origins import HttpOrigin

import ffserve
from ffserve.store.schemes.s3 import S3Objects
from ffserve.store.web import Web
from ffserve.store.web_files import RenewedOptions

PROCESS = """
import datetime, json, sys, time
until = datetime.datetime.fromtimestamp(time.time() + float(sys.argv[1]), datetime.timezone.utc)
print(json.dumps({"Version": 1, "AccessKeyId": f"K{time.time():.3f}", "SecretAccessKey": "geheim",
                  "SessionToken": "token", "Expiration": until.isoformat()}))
"""
"""A program from which Amazon's tools take credentials; the name of a key is when it was made."""


@pytest.mark.stores
@pytest.mark.parametrize("lasts", [3, pytest.param(30, marks=pytest.mark.soak)])
@pytest.mark.parametrize("how", ["off", "daemon"])
def test_keys_that_end_in_the_middle_of_an_epoch(
    server: HttpOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, lasts: int
) -> None:
    pytest.importorskip("botocore")
    program = tmp_path / "keys.py"
    program.write_text(PROCESS)
    config = tmp_path / "config"
    command = f"{sys.executable} {program} {lasts}"
    config.write_text(f"[default]\nregion = us-east-1\ncredential_process = {command}\n")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    rng = random.Random(1)
    samples = [rng.randbytes(100_000) for _ in range(40 * lasts)]
    with ffserve.create(tmp_path / "a.ffr") as writer:
        for sample in samples:
            writer.write(sample)
    server.put("bucket/a.ffr", (tmp_path / "a.ffr").read_bytes())
    server.rate = 1e6
    keys = set[str]()

    def admits(text: str) -> bool:
        found = re.search(r"Credential=K([\d.]+)/", text)
        if found is None or time.time() > float(found[1]) + lasts:
            return False
        keys.add(found[1])
        return True

    server.admits = admits
    url = "s3://bucket/a.ffr"
    if how == "off":
        with ffserve.open(url, server="off") as reader:
            for k in range(0, len(samples), 4):
                found = reader.read(range(k, k + 4))
                assert [bytes(sample) for sample in found] == samples[k : k + 4]
    else:
        directory = ["--store-directory", str(tmp_path / "daemon"), "--store-size", "1GiB"]
        options = [*directory, "--store-access", "own"]
        with started(Daemon(options=options, expect=["remote files: store .*"])) as daemon:
            with daemon.open(url) as reader:
                assert reader.source.startswith("daemon ")
                for k in range(0, len(samples), 4):
                    found = reader.read(range(k, k + 4))
                    assert [bytes(sample) for sample in found] == samples[k : k + 4]
            assert daemon.status()["store"]["fetched"] <= 1.05 * len(samples) * 100_000
    assert len(keys) >= 4 and server.requests["refused"] >= 1


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
    assert not made and not renewed.renewed(first), "those are not a second old"
    time.sleep(1.1)
    assert renewed.options is made[0], "these would end within a minute"
    assert renewed.renewed(first), "somebody else has renewed them"
    time.sleep(1.1)
    assert renewed.renewed(made[0]) and renewed.options is made[1]


@pytest.mark.parametrize(
    "query", [{}, {"list-type": "2", "prefix": "a b/ü+&=~*'()", "delimiter": ""}]
)
@pytest.mark.parametrize("key", ["a.ffr", "ü/a b+c&%41=~*'();:@,!$"])
def test_signatures_are_those_of_botocore(key: str, query: dict[str, str]) -> None:
    auth = pytest.importorskip("botocore.auth")
    awsrequest = pytest.importorskip("botocore.awsrequest")
    credentials = pytest.importorskip("botocore.credentials").Credentials("key", "secret", "token")
    seen: list[tuple[str, dict[str, str]]] = []

    class Asked(Web):
        def request(self, method: str, url: str, headers: Any, *_: Any, **__: Any) -> Any:
            seen.append((url, headers))

    options = {"key": "key", "secret": "secret", "token": "token", "endpoint_url": "http://host:9"}
    objects = S3Objects(Asked(1, 1), RenewedOptions(options))
    for _ in range(5):  # until both have the same second
        objects.send(options, "GET", f"bucket/{key}", query, {}, ())
        url, headers = seen[-1]
        request = awsrequest.AWSRequest("GET", url, headers={"host": "host:9"})
        auth.S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
        if request.headers["X-Amz-Date"] == headers["x-amz-date"]:
            break
    assert request.headers["Authorization"] == headers["Authorization"]
