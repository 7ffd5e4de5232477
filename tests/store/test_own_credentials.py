"""The credentials of the daemon's user: no origin ever sees them, whatever scheme reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recorder import recorder

SECRET = "geheim"
ASKS = """
import contextlib, json, sys
import ffserve.store.credentials as credentials
from ffserve.store.origin import ObjectVersion, RemoteFile, identify
credentials.forget_own_settings()
access = credentials.Access(sys.argv[1])
for call in (
    lambda: identify(sys.argv[2], access),
    lambda: RemoteFile(ObjectVersion(sys.argv[2], 9, "1", 0), access).read(0, 9),
):
    with contextlib.suppress(Exception):
        call()
"""
"""As a daemon that reads for others asks an origin, of which it has heard nothing good."""


SCHEMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "http": ("ssl", "{url}/a.ffr", {}),
    "hf": ("huggingface_hub", "hf://datasets/some/data/a.ffr", {"endpoint_url": "{url}"}),
    "s3": ("ssl", "s3://bucket/a.ffr", {"endpoint_url": "{url}"}),
    "gs": ("google.auth", "gs://bucket/a.ffr", {"endpoint_url": "{url}"}),
    "abfs": ("ssl", "abfs://box/a.ffr", {"endpoint_url": "{url}/account"}),
    "webhdfs": ("requests", "webhdfs://{host}/a.ffr", {}),
}
"""By scheme: the module that it needs, a URL, and options without credentials."""
NEEDS_PACKAGES = "hf", "gs", "webhdfs"
"""Schemes whose packages `make stores` brings."""


def marked(name: str, *more: Any) -> Any:
    """Return a parameter, with a mark if it needs packages."""
    return pytest.param(name, *more, marks=[pytest.mark.stores] if name in NEEDS_PACKAGES else [])


def ask(name: str, url: str, home: Path, proxy: str, **more: Any) -> None:
    """Ask an origin as a daemon does whose user has credentials of all kinds."""
    module, address, options = SCHEMES[name]
    found = subprocess.run(
        [sys.executable, "-c", f"import {module}"], stderr=subprocess.DEVNULL, check=False
    )
    if found.returncode:
        pytest.skip(f"needs {module}")
    host = url.partition("://")[2]
    given = {key: text.format(url=url) for key, text in options.items()}
    home.mkdir()
    (home / ".netrc").write_text(f"default login own password {SECRET}\n")
    (home / ".netrc").chmod(0o600)
    for folder, file, text in (
        (".aws", "credentials", f"[default]\naws_access_key_id={SECRET}\n"
         f"aws_secret_access_key={SECRET}\n"),
        (".cache/huggingface", "token", SECRET),
        (".config/gcloud", "application_default_credentials.json", json.dumps(
            {"type": "authorized_user", "client_id": SECRET, "client_secret": SECRET,
             "refresh_token": SECRET})),
    ):  # fmt: skip
        (home / folder).mkdir(parents=True)
        (home / folder / file).write_text(text)
    names = (
        "HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
        "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_ACCOUNT_NAME",
    )  # fmt: skip
    proxies = {"http_proxy": proxy, "https_proxy": proxy, "HTTP_PROXY": proxy, "no_proxy": ""}
    environment = {**os.environ, **dict.fromkeys(names, SECRET), **proxies, "HOME": str(home)}
    environment.pop("NETRC", None)
    text = json.dumps({name: {**given, **more}})
    words = [sys.executable, "-c", ASKS, text, address.format(url=url, host=host)]
    subprocess.run(words, env=environment, timeout=120, check=True, stderr=subprocess.DEVNULL)


@pytest.mark.check
@pytest.mark.parametrize("name", [marked(name) for name in SCHEMES])
def test_an_origin_saw_the_credentials_of_the_daemons_user(name: str, tmp_path: Path) -> None:
    """The Hub's client took them from ~/.netrc."""
    with recorder() as origin, recorder() as proxy:
        ask(name, origin.url, tmp_path / "home", proxy.url)
    assert origin.seen, "it was asked"
    assert not proxy.seen, "not by a proxy of the daemon's user"
    assert SECRET not in origin.text and "uthorization" not in origin.text, origin.seen


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "options"),
    [
        marked("http", {"headers": {"X-Api-Key": "mine", "Cookie": "mine", "Host": "mine"}}),
        marked("hf", {"token": "mine"}),
        marked("gs", {"token": "mine", "user_project": "mine"}),
        marked("abfs", {"account_name": "mine", "account_key": "bWluZQ=="}),
        marked("s3", {"key": "mine", "secret": "mine", "token": "mine"}),
    ],
)
def test_another_host_got_the_headers_of_a_request_that_was_redirected(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with recorder() as other, recorder(other.url) as origin, recorder() as proxy:
        ask(name, origin.url, tmp_path / "home", proxy.url, **options)
    assert "mine" in origin.text or "uthorization" in origin.text, origin.seen
    for headers in other.seen:
        assert not {"authorization", "cookie"} & {each.lower() for each in headers}, headers
        assert "mine" not in json.dumps(headers) and SECRET not in json.dumps(headers)
    assert other.seen or name != "http"
