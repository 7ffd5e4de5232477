"""The promise of SECURITY.md: whatever one local user does, an honest client of another user has no
error and waits no longer than is said there (`attack_field.py: Promise`).

`make attack` runs these alone, since they measure times.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import attacks
import pytest
from attack_field import ATTACKED_S, HONEST, HOSTILE, Field, field, python_of
from daemon import ready
from origins import HttpOrigin, http_origin

pytestmark = [
    pytest.mark.attack,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None,
        reason="needs root and setpriv, to run processes as other users",
    ),
]


@pytest.fixture(scope="module")
def crowded() -> Iterator[Field]:
    with field(12_000) as made:
        yield made


@pytest.fixture(scope="module")
def roomy() -> Iterator[Field]:
    """A daemon whose arena holds several of the largest chunks."""
    with field(samples=131_072, arena="512MiB") as made:
        yield made


@pytest.mark.parametrize("kind", [each for each in attacks.KINDS if each != "bombs"])
def test_the_promise_holds(crowded: Field, kind: str) -> None:
    crowded.run(kind)


def test_large_chunks_that_are_decoded(roomy: Field) -> None:
    roomy.run("bombs")


def served(origin: HttpOrigin, name: str, made: Field) -> str:
    return origin.put(name, Path(made.source).read_bytes())


ANNOUNCES = """
import itertools, sys, time
import ffserve
readers = [ffserve.open(url, server=sys.argv[1]) for url in sys.argv[3:]]
for reader in readers:
    reader.read([0])
print("ready", flush=True)
for epoch in itertools.count():
    for reader in readers:
        if sys.argv[2] == "hostile":
            reader.announce(range(len(reader)), epoch=epoch)
            reader.read(range(64 * epoch, 64 * epoch + 64))
    time.sleep(0.1)
"""


def test_what_one_user_announces_is_fetched_with_keys_of_that_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a common place; the other user has the same objects open all the time."""
    pytest.importorskip("botocore")
    with http_origin() as origin, contextlib.ExitStack() as stack:
        monkeypatch.setenv("AWS_ENDPOINT_URL", origin.url)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        common = ["--store-common", f"s3://bucket@{origin.url}"]
        made = stack.enter_context(field(options=common))
        urls = []
        for k in range(4):
            served(origin, f"bucket/{k}.ffr", made)
            urls.append(f"s3://bucket/{k}.ffr")
        for who, uid in (("honest", HONEST), ("hostile", HOSTILE)):
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", who)
            reading = [*python_of(uid), "-c", ANNOUNCES, made.daemon.socket, who, *urls]
            if who == "honest":
                stack.enter_context(ready(reading))
        before = len(origin.asked)
        attack = "Orders of objects that another user has open, too, with other keys"
        with made.attacked(attack), ready(reading):
            time.sleep(ATTACKED_S)
            asked = origin.asked[before:]
            assert len(asked) > 10 and {who for who, *_ in asked} == {"hostile"}
