"""What every way of reading delivers: one class of tests that all drivers of `ffserve/reads/` pass.

A driver is a subclass that says how samples are read by it. Whatever the way, the samples are those
that were written, in the order that was asked for; a damaged, cut or lost one fails alone, with the
same error everywhere.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, damage, serving
from origins import HttpOrigin, http_origin, settled

import ffserve
from ffserve.client.local import local_source as local
from ffserve.errors import FFServeError
from ffserve.store import fetching

COUNT, BAD = 300, 123
FORMATS = {
    "ffrecord": {"format": "ffrecord"},
    "tfrecord": {"format": "tfrecord"},
    "chunks": {"format": "recordio", "compression": "snappy", "max_chunk_size": 4096},
    "compressed": {"format": "tfrecord", "compression": "gzip"},
}
Outcome = bytes | tuple[str, str, int | None]
"""A sample, or its error: class, message, index."""


def content(k: int) -> bytes:
    """Sample k: of its own bytes and length; every 50th is empty, every 40th is large."""
    size = 0 if k % 50 == 7 else 70_000 + k if k % 40 == 3 else 17 + 13 * k % 900
    return np.random.default_rng(k).integers(0, 256, size, np.uint8).tobytes()


CONTENTS = [content(k) for k in range(COUNT)]


def write(path: Path, kind: str) -> str:
    with ffserve.create(path, **FORMATS[kind]) as writer:  # type: ignore[arg-type]
        for sample in CONTENTS:
            writer.write(sample)
    return str(path)


def outcome(sample: Any) -> Outcome:
    if isinstance(sample, FFServeError):
        return type(sample).__name__, sample.message, sample.index
    return bytes(sample)


class ReadConformance(ABC):
    """The tests. `read` is the only thing that a driver has to say."""

    @abstractmethod
    def read(self, paths: Sequence[str], indices: list[int], **options: Any) -> list[Outcome]:
        """Open files, read samples of them, close them."""

    @pytest.mark.parametrize("kind", FORMATS)
    def test_samples_come_in_the_order_that_was_asked_for(self, tmp_path: Path, kind: str) -> None:
        path = write(tmp_path / "a", kind)
        wanted = [*np.random.default_rng(1).permutation(COUNT).tolist(), 5, 5, 0]
        assert self.read([path], wanted) == [CONTENTS[k] for k in wanted]

    def test_files_of_all_kinds_are_one_data_set(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / kind, kind) for kind in ("ffrecord", "tfrecord")]
        wanted = [599, 0, 300, 299, 450]
        assert self.read(paths, wanted, format=None) == [CONTENTS[k % COUNT] for k in wanted]

    @pytest.mark.parametrize("kind", ["ffrecord", "tfrecord"])
    def test_a_damaged_sample_fails_alone(self, tmp_path: Path, kind: str) -> None:
        path = write(tmp_path / "a", kind)
        damage(path, BAD)
        got = self.read([path], list(range(COUNT)))
        assert [k for k in range(COUNT) if got[k] != CONTENTS[k]] == [BAD]
        name, message, index = got[BAD]  # type: ignore[misc]
        assert (name, index) == ("ChecksumError", BAD)
        assert message.startswith("checksum mismatch")

    def test_a_damaged_chunk_fails_its_own_samples(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a", "chunks")
        middle = os.path.getsize(path) // 2
        with open(path, "r+b") as file:
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 1]))
        got = self.read([path], list(range(COUNT)))
        failed = [k for k in range(COUNT) if got[k] != CONTENTS[k]]
        assert failed and failed == list(range(failed[0], failed[-1] + 1)), "those of one chunk"
        assert len(failed) < COUNT // 2
        for k in failed:
            name, _, index = got[k]  # type: ignore[misc]
            assert (name, index) == ("ChecksumError", k)

    def test_damage_is_not_looked_for_where_nobody_wants_it(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a", "ffrecord")
        damage(path, BAD)
        (got,) = self.read([path], [BAD], verify=False)
        assert isinstance(got, bytes) and len(got) == len(CONTENTS[BAD]) and got != CONTENTS[BAD]

    def test_nothing_is_read_for_nothing(self, tmp_path: Path) -> None:
        assert self.read([write(tmp_path / "a", "ffrecord")], []) == []


class Blocking(ReadConformance):
    """By `ffserve.open`."""

    server = "off"

    def read(self, paths: Sequence[str], indices: list[int], **options: Any) -> list[Outcome]:
        with ffserve.open(paths, server=self.server, **options) as reader:
            return [outcome(each) for each in reader.read(indices, errors="return")]


class TestInThisProcess(Blocking):
    """An engine of this process; what is in the page cache is copied from there."""


class TestPastThePageCache(Blocking):
    """An engine of this process, with direct reads."""

    @pytest.fixture(autouse=True)
    def _no_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "fitting_share", lambda size: 0.0)


class OnTwoDevices(ReadConformance):
    """Every other sample comes from a copy of its file on another device."""

    @pytest.fixture(autouse=True)
    def _elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(local, "fitting_share", lambda size: 0.0)
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ffs-") as place:
            self.place = Path(place)
            yield

    def read(self, paths: Sequence[str], indices: list[int], **options: Any) -> list[Outcome]:
        copies = [str(self.place / Path(path).name) for path in paths]
        for path, copied in zip(paths, copies, strict=True):
            shutil.copy2(path, copied)
        half = COUNT * len(paths)
        other = [index + half * (k % 2) for k, index in enumerate(indices)]
        found = super().read([*paths, *copies], other, **options)  # type: ignore[safe-super]
        return [
            each if isinstance(each, bytes) or each[2] is None else (*each[:2], each[2] % half)
            for each in found
        ]


class TestTwoDevices(OnTwoDevices, Blocking):
    """Engines of this process."""


class TestWindows(Blocking):
    """Out of windows of an order."""

    def read(self, paths: Sequence[str], indices: list[int], **options: Any) -> list[Outcome]:
        with ffserve.open(paths, server="off", **options) as reader:
            if indices:
                reader.announce(indices, replacement=True)
            found: list[Outcome] = []
            for first in range(0, len(indices), 64):
                part = reader.read(indices[first : first + 64], errors="return")
                found += [outcome(each) for each in part]
            return found


class TestTheDaemon(Blocking):
    """Through a daemon."""

    @pytest.fixture(autouse=True)
    def _daemon(self, daemon: Daemon) -> None:
        self.server = daemon.socket


class TestTheDaemonAnnounced(TestTheDaemon):
    """Through a daemon that prefetches the order."""

    def read(self, paths: Sequence[str], indices: list[int], **options: Any) -> list[Outcome]:
        with ffserve.open(paths, server=self.server, **options) as reader:
            if indices:
                reader.announce(indices, replacement=True)
            return [outcome(each) for each in reader.read(indices, errors="return")]


class Awaiting(ReadConformance):
    """By `ffserve.aio.open`."""

    server = "off"

    def read(self, paths: Sequence[str], indices: list[int], **options: Any) -> list[Outcome]:
        async def read() -> list[Outcome]:
            async with ffserve.aio.open(paths, server=self.server, **options) as reader:
                return [outcome(each) for each in await reader.read(indices, errors="return")]

        return asyncio.run(read())


class TestAwaitingInThisProcess(Awaiting):
    """An engine of an event loop."""


class TestAwaitingTwoDevices(OnTwoDevices, Awaiting):
    """Engines of an event loop."""


class TestAwaitingTheDaemon(Awaiting):
    """A daemon, in an event loop."""

    @pytest.fixture(autouse=True)
    def _daemon(self, daemon: Daemon) -> None:
        self.server = daemon.socket


@pytest.fixture(scope="module")
def origin() -> Iterator[HttpOrigin]:
    with pytest.MonkeyPatch.context() as patch, http_origin() as running:
        for name in ("_fetchers", "_breakers", "_listed", "_threads"):
            patch.setattr(fetching, name, {})
        yield running
        settled()


def served(origin: HttpOrigin, paths: Sequence[str]) -> list[str]:
    """Have an origin serve copies of files; return their URLs."""
    return [origin.put(os.path.basename(path), Path(path).read_bytes()) for path in paths]


class TestRanges(Blocking):
    """Remote files, by ranges."""

    @pytest.fixture(autouse=True)
    def _remote(self, origin: HttpOrigin) -> None:
        self.origin = origin

    def read(self, paths: Sequence[str], indices: list[int], **options: Any) -> list[Outcome]:
        return super().read(served(self.origin, paths), indices, **options)


class TestRangesAndFiles(TestRanges):
    """A remote file, by ranges, and local ones, in one data set."""

    def read(self, paths: Sequence[str], indices: list[int], **options: Any) -> list[Outcome]:
        paths = [*served(self.origin, paths[:1]), *paths[1:]]
        return Blocking.read(self, paths, indices, **options)


class TestAwaitingRanges(Awaiting):
    """Remote files, by ranges, in an event loop."""

    @pytest.fixture(autouse=True)
    def _remote(self, origin: HttpOrigin) -> None:
        self.origin = origin

    def read(self, paths: Sequence[str], indices: list[int], **options: Any) -> list[Outcome]:
        return super().read(served(self.origin, paths), indices, **options)


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a store of small blocks."""
    patch = (
        "import ffserve.config as c, ffserve.store.directory as d\n"
        "c.MIN_STORE_SIZE = 0; d.Store.__init__.__defaults__ = (None, 65536)\n"
    )
    place = str(tmp_path_factory.mktemp("store"))
    options = ["--store-directory", place, "--store-size", "64MiB"]
    with serving(patch=patch, options=options, expect=["remote files: store .*"]) as running:
        yield running


class TestAStore(TestRanges):
    """Remote files, through a daemon that has a store."""

    @pytest.fixture(autouse=True)
    def _daemon(self, storing: Daemon) -> None:
        self.server = storing.socket


@pytest.fixture(scope="module")
def small() -> Iterator[Daemon]:
    with serving(arena="4MiB") as running:
        yield running


class TestASmallArena(Blocking):
    """Through a daemon whose arena holds a few samples: requests are answered in parts."""

    @pytest.fixture(autouse=True)
    def _daemon(self, small: Daemon) -> None:
        self.server = small.socket
