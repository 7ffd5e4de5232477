"""A server of S3 (moto) beside the tests of Spark and Ray, whose processes inherit the environment
that leads to it."""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_process import running
from store_servers import free_port

_PORT = free_port()


def lead_there() -> None:
    """Lead this process and those that it starts to the server, whether it runs or not."""
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{_PORT}"
    os.environ["AWS_ACCESS_KEY_ID"] = "key"
    os.environ["AWS_SECRET_ACCESS_KEY"] = "geheim"
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"


@contextmanager
def bucket(output: Path) -> Iterator[str]:
    """Run the server with an empty bucket; return its URL. Args: output: file for its output."""
    pytest.importorskip("moto")
    pytest.importorskip("botocore")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", _PORT]
    with running(command, _PORT, output):
        asked = urllib.request.Request(f"http://127.0.0.1:{_PORT}/bucket", method="PUT")
        urllib.request.urlopen(asked, timeout=20).close()
        yield "s3://bucket"
