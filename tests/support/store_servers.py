"""Servers of remote stores that run beside the tests, and what is read from them."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from pathlib import Path

import pytest
from daemon import Daemon
from shared_cache import shared_cache

import ffserve
from ffserve.store import cache_network, fetching
from ffserve.store.cache_network import CacheNetwork
from ffserve.store.credentials import Access, collect
from ffserve.store.directory import Store
from ffserve.store.fetching import Fetcher, Patience
from ffserve.store.origin import RemoteFile, identify

BLOCK = 64 << 10


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port: int = some.getsockname()[1]
        return port


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server does not listen")


def small_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a store of small blocks, and little patience, in this process."""
    directory = str(tmp_path / "store")
    monkeypatch.setenv("FFSERVE_STORE", directory)
    monkeypatch.setenv("FFSERVE_START", "0")
    fetching.forget(Patience(2.0, 2.0))
    fetching._fetchers[directory] = Fetcher(Store(directory, 1 << 30, BLOCK))


def written(tmp_path: Path, name: str, seed: int, count: int = 300) -> tuple[Path, list[bytes]]:
    rng = random.Random(seed)
    samples = [rng.randbytes(rng.randrange(3000)) for _ in range(count)]
    path = tmp_path / name
    with ffserve.create(path) as writer:
        for sample in samples:
            writer.write(sample)
    return path, samples


def read_by_a_cache(url: str, content: bytes) -> None:
    """Read an object by a cache, which has to fetch it with a signed URL and nothing else."""
    access = Access(collect([url]))
    with shared_cache() as cache:
        network = CacheNetwork(cache.address)
        cache_network.choose(network)
        try:
            file = RemoteFile(identify(url, access), access, BLOCK)
            assert file.read(0, len(content)) == content
            assert file.read(7, 99) == content[7:99]
        finally:
            cache_network._chosen.clear()
        assert len(cache.asked) == 2 and network.faults == 0
        assert not any("authorization" in each.headers for each in cache.asked)


def reading_daemon(tmp_path: Path, *options: str) -> Daemon:
    """A daemon with a store, without home and credentials of this process, with wrong ones."""
    directory = str(tmp_path / "daemon-store")
    small = f"import ffserve.store.directory as d\nd.Store.__init__.__defaults__ = (None, {BLOCK})"
    daemon = Daemon(
        options=["--store-directory", directory, "--store-size", "1GiB", *options],
        expect=[r"remote files: store /.*"],
        patch=small,
    )
    secret = "AWS_", "AZURE_", "GOOGLE_", "HF_", "HOME", "FSSPEC_", "STORAGE_EMULATOR_HOST"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(secret)}
    own = {
        "HOME": str(tmp_path / "nobody"), "AWS_ACCESS_KEY_ID": "own", "HF_TOKEN": "own",
        "AZURE_STORAGE_ACCOUNT_KEY": "own", "STORAGE_EMULATOR_HOST": "http://127.0.0.1:9",
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }  # fmt: skip
    daemon.environment = {**kept, **own}
    return daemon
