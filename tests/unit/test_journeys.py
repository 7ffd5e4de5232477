"""The table of journeys in docs/ARCHITECTURE.md, compared with one request of each kind."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from daemon import Daemon, sample, serving, write
from journeys import PACKAGE, Journey, Passed
from origins import http_origin

DOCUMENT = PACKAGE.parent / "docs" / "ARCHITECTURE.md"
LIMITS = {
    "hit": 5,
    "miss": 12,
    "remote read": 12,
    "prepared sample": 12,
    "prepared hit": 12,
    "torch batch": 6,
}
"""How many files may pass a request on."""
COUNT = 2000
BLOCK = 64 << 10
ATTEMPTS = 5
"""A file that is entered in each attempt belongs to the request; other files are busy at times."""
FILE = re.compile(r"`([\w/]+\.py)`")


class Row(NamedTuple):
    """passing: the files that pass a request on, in order. called: those that these call."""

    count: int
    passing: list[str]
    called: set[str]


def _table() -> dict[str, Row]:
    section = DOCUMENT.read_text().partition("\n## Journeys\n")[2].partition("\n## ")[0]
    rows: dict[str, Row] = {}
    for kind, count, passing, called in re.findall(
        r"^\| ([a-z ]+) \| (\d+) \| (.+) \| (.+) \|$", section, re.M
    ):
        before: list[str] = []
        files = set(FILE.findall(called))
        if "those of a miss as far as" in passing:
            before = rows["miss"].passing
        for other in re.findall(r"those of a (\w+)", called):
            files |= {*rows[other].passing, *rows[other].called}
        named = dict.fromkeys([*before, *FILE.findall(passing)])
        rows[kind] = Row(int(count), list(named), files)
    return rows


ROWS = _table()


class Followed(NamedTuple):
    journey: Journey
    daemon: Daemon
    path: str
    url: str
    fresh: Iterator[np.ndarray]
    """Samples that nobody has read, each far from the others."""
    idle: set[str]
    """Files that are busy in a daemon without requests."""


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    """A daemon that is followed, with a file and a remote copy of it."""
    directory = tmp_path_factory.mktemp("journeys")
    path = write(directory / "a.ffr", [sample(k, (3000,)) for k in range(COUNT)])
    journey = Journey(directory)
    patch = (
        "import ffserve.config as c, ffserve.store.directory as d\n"
        f"c.MIN_STORE_SIZE = 0; d.Store.__init__.__defaults__ = (None, {BLOCK})\n"
    )
    store = ["--store-directory", str(directory / "store"), "--store-size", "64MiB"]
    with (
        pytest.MonkeyPatch.context() as environment,
        http_origin() as origin,
        serving(
            patch=patch + journey.patch, options=store, expect=["remote files: store .*"]
        ) as daemon,
    ):
        environment.setenv("FFSERVE_START", "0")
        environment.setenv("FFSERVE_SOCKET", daemon.socket)
        environment.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        url = origin.put("a.ffr", Path(path).read_bytes())
        fresh = (np.array([k, k + 7]) for k in range(100, COUNT, 50))
        idle = journey.of(lambda: time.sleep(1.2)).daemon
        yield Followed(journey, daemon, path, url, fresh, idle)


def check(kind: str, found: Callable[[], Passed], idle: set[str]) -> None:
    """Fail unless the row of a kind says what requests pass. Args: found: makes a request."""
    row = ROWS[kind]
    unlisted: set[str] | None = None
    for _ in range(ATTEMPTS):
        passed = found().all
        assert set(row.passing) <= passed, f"{kind} does not pass {set(row.passing) - passed}"
        others = passed - set(row.passing) - row.called - idle
        unlisted = others if unlisted is None else unlisted & others
        if not unlisted:
            return
    raise AssertionError(f"{kind} also enters {unlisted}")


def test_the_table_has_each_kind_and_keeps_its_limits() -> None:
    assert set(ROWS) == set(LIMITS)
    for kind, row in ROWS.items():
        assert len(row.passing) == row.count <= LIMITS[kind], (kind, row.passing)
        assert all((PACKAGE / file).exists() for file in (*row.passing, *row.called)), kind


def test_a_hit_passes_its_files_and_sends_nothing(followed: Followed) -> None:
    with followed.daemon.open(followed.path) as reader:
        some = np.array([1, 2])
        reader.read_batch(some)

        def hit() -> Passed:
            reader.read_batch(some)  # what is due every quarter of a second is done here
            # A message would reach the daemon meanwhile.
            return followed.journey.of(lambda: (reader.read_batch(some), time.sleep(0.05)))

        check("hit", lambda: Passed(hit().client, set()), set())
        for _ in range(ATTEMPTS):
            passed = hit()
            if passed.daemon <= followed.idle:
                break
        assert passed.daemon <= followed.idle, "a message was sent"


def test_a_miss_passes_its_files(followed: Followed) -> None:
    with followed.daemon.open(followed.path) as reader:
        reader.read_batch(np.array([1]))
        check("miss", lambda: _read(followed, "miss", reader), followed.idle)


def _read(followed: Followed, kind: str, reader: Any) -> Passed:
    some = next(followed.fresh)
    return followed.journey.of(lambda: reader.read_batch(some), set(ROWS[kind].passing))


def test_a_remote_read_passes_its_files(followed: Followed) -> None:
    with followed.daemon.open(followed.url) as reader:
        reader.read_batch(np.array([1]))
        check("remote read", lambda: _read(followed, "remote read", reader), followed.idle)


def test_prepared_samples_pass_their_files(followed: Followed) -> None:
    pytest.importorskip("torch")
    from ffserve.torch import Dataset

    class Prepared(Dataset):
        prepare_version = "1"

        def prepare(self, indices: Sequence[int], data: Any) -> list[Any]:
            return [each[:10].astype(np.float32) for each in data]

        def process(self, indices: Sequence[int], data: list[Any]) -> list[Any]:
            return data

    one, other = Prepared(followed.path), Prepared(followed.path)
    for dataset in (one, other):
        dataset[[3, 4]]
    put: list[int] = []

    def prepare() -> Passed:
        put[:] = next(followed.fresh).tolist()
        one.reader.read(put)  # the raw samples are a request of their own: here, a hit
        awaited = set(ROWS["prepared sample"].passing)
        return followed.journey.of(lambda: one[put], awaited)

    check("prepared sample", prepare, followed.idle)
    other[put]  # it waits for the copies
    check(
        "prepared hit",
        lambda: Passed(followed.journey.of(lambda: other[put]).client, set()),
        set(),
    )


@pytest.mark.check
def test_a_torch_batch_passes_its_files(followed: Followed) -> None:
    torch = pytest.importorskip("torch")
    from ffserve.torch import DataLoader, Dataset

    class Tensors(Dataset):
        def process(self, indices: Sequence[int], data: list[Any]) -> list[Any]:
            return [torch.from_numpy(each) for each in data]

    parent = os.getpid()

    def record(_: int) -> None:
        assert os.getpid() != parent
        followed.journey.recorder().start()

    loader = DataLoader(
        Tensors(followed.path),
        batch_size=500,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
        worker_init_fn=record,
    )

    def epoch() -> Passed:
        # The daemon's part is a hit or a miss, and the order.
        passed = followed.journey.of(lambda: [len(batch) for batch in loader])
        return Passed(passed.client, set())

    list(loader)  # the worker starts, and connects
    check("torch batch", epoch, set())
