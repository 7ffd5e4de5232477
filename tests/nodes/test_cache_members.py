"""The cache network of `deploy/cache-network`: four members and four daemons on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import random
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_members import PROGRAM, Member, members
from daemon import Daemon, serving, until
from origins import HttpOrigin, http_origin

import ffserve
from ffserve.store.cache_network import CacheNetwork

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(
        not all(map(shutil.which, ("nginx", "openssl"))), reason="needs nginx and openssl"
    ),
]
SLICE = 512 << 10
COUNT, SIZE, BATCH = 1024, 64 << 10, 16
EXPECTED = [
    r"remote files: store /.*", r"store: the cache failed, so the origin .* is asked: .*",
    r"store: the cache serves .* again",
]  # fmt: skip


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose name is short enough for sockets, and which no other user sees."""
    with tempfile.TemporaryDirectory(prefix="cn-") as found:
        os.chmod(found, 0o755)  # nginx's processes are another user's, if root starts it
        yield Path(found)


@pytest.fixture
def origin() -> Iterator[HttpOrigin]:
    with http_origin() as running:
        yield running


def filled(origin: HttpOrigin, place: Path, count: int = COUNT) -> tuple[str, list[bytes], int]:
    """Have samples at an origin, 64 MiB or more: URL, digests, bytes of the file."""
    rng, digests = random.Random(7), []
    with ffserve.create(place / "a.ffr") as writer:
        for _ in range(count):
            sample = rng.randbytes(SIZE)
            writer.write(sample)
            digests.append(hashlib.md5(sample).digest())
    content = (place / "a.ffr").read_bytes()
    (place / "a.ffr").unlink()
    return origin.put("a.ffr", content), digests, len(content)


@contextlib.contextmanager
def daemons(place: Path, some: list[Member]) -> Iterator[list[Daemon]]:
    with contextlib.ExitStack() as stack:
        found = []
        for k, member in enumerate(some):
            options = "--store-directory", str(place / f"store-{k}"), "--store-size", "1GiB"
            cache = "--store-cache", f"unix:{member.socket}"
            found.append(stack.enter_context(serving(options=[*options, *cache], expect=EXPECTED)))
        yield found


class Epochs:
    """An epoch of each daemon, each in an order of its own, all at once."""

    def __init__(self, some: list[Daemon], url: str, digests: list[bytes]) -> None:
        self._digests, self._url = digests, url
        self.slowest_s, self.wrong, self.read = 0.0, list[object](), 0
        self._threads = [
            threading.Thread(target=self._epoch, args=(k, daemon)) for k, daemon in enumerate(some)
        ]
        for each in self._threads:
            each.start()

    def _epoch(self, seed: int, daemon: Daemon) -> None:
        seen, count = set(), len(self._digests)
        try:
            with daemon.open(self._url) as reader:
                order = random.Random(seed).sample(range(count), count)
                for at in range(0, count, BATCH):
                    some, begun = order[at : at + BATCH], time.monotonic()
                    for k, sample in zip(some, reader.read(some), strict=True):
                        if hashlib.md5(sample).digest() != self._digests[k]:
                            self.wrong.append(k)
                        seen.add(k)
                    self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
                    self.read += len(some)
        except BaseException as error:
            self.wrong.append(error)
        if len(seen) != count:
            self.wrong.append(f"{len(seen)} samples")

    def join(self) -> None:
        """Wait for the end of all."""
        for each in self._threads:
            each.join()


def test_four_nodes_fetch_from_the_origin_once(origin: HttpOrigin, place: Path) -> None:
    url, digests, size = filled(origin, place)
    with members(place, 4) as some, daemons(place, some) as servers:
        epochs = Epochs(servers, url, digests)
        epochs.join()
        assert not epochs.wrong
        assert origin.total <= 1.02 * size, origin.total / size
        facts = [each.status()["store"] for each in servers]
        assert [each["cache_faults"] for each in facts] == [0] * 4
        assert all(each["from_cache"] == each["fetched"] for each in facts)
        used = [sum(f.stat().st_size for f in (m.place / "cache").rglob("*")) for m in some]
        assert min(used) > size / 16, "each member has its share"
        print(f"{origin.total / size:.3f} of the data, slowest batch {epochs.slowest_s:.2f} s")


def test_a_member_that_is_killed_costs_no_error(origin: HttpOrigin, place: Path) -> None:
    # An epoch of more than 5 s: other members fetch what this one has for a second or two.
    url, digests, size = filled(origin, place, 4 * COUNT)
    with members(place, 4) as some, daemons(place, some) as servers:
        origin.rate = 50e6
        epochs = Epochs(servers, url, digests)
        until(lambda: epochs.read > 4 * COUNT, "a quarter of the epoch is over")
        some[2].end(signal.SIGKILL)
        time.sleep(0.1)  # systemd starts it again after so long
        some[2].start()
        epochs.join()
        assert not epochs.wrong
        print(f"{origin.total / size:.3f} of the data, slowest batch {epochs.slowest_s:.2f} s")
        assert origin.total <= 1.3 * size, origin.total / size
        assert epochs.slowest_s <= 2.0
        before = origin.total
        for k, each in enumerate(servers):
            each.end()
            shutil.rmtree(place / f"store-{k}")
            each.start()
        epochs = Epochs(servers, url, digests)
        epochs.join()
        assert not epochs.wrong and origin.total - before < 0.3 * size


def test_only_members_are_answered_and_only_origins_are_asked(
    origin: HttpOrigin, place: Path
) -> None:
    content = random.Random(1).randbytes(3 * SLICE)
    url, tag = origin.put("b/x", content), origin.etag("b/x")
    with members(place, 2) as [one, other]:
        port = int(other.settings["LISTEN"].rpartition(":")[2])
        context = ssl.create_default_context(cafile=one.settings["AUTHORITY"])
        stranger = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=5)
        stranger.request("GET", "/b/x", headers={"Host": url.split("/")[2]})
        assert stranger.getresponse().status == 400, "it has no certificate"
        stranger.close()
        network = CacheNetwork(f"unix:{one.socket}")
        headers = {"If-Match": tag, "Range": f"bytes={SLICE}-{2 * SLICE - 1}"}
        for where, status in (
            (url, 206), (url.replace("127.0.0.1", "127.0.0.2"), 403), ("http://localhost:1/", 403),
        ):  # fmt: skip
            answer = network.get(where, headers)
            assert answer.status == status
            body = answer.content(SLICE)
            if status == 206:
                assert body == content[SLICE : 2 * SLICE] and answer.headers["etag"] == tag
        wrong = network.request("PUT", url, {"Content-Length": "0"})
        assert wrong.status == 403
        wrong.close()
        # Another version is another slice; what the origin says of it reaches the daemon.
        assert network.get(url, {**headers, "If-Match": '"another"'}).status == 412
        before = origin.total
        for signature in ("1", "2"):
            signed = f"{url}?X-Amz-Algorithm=x&X-Amz-Signature={signature}"
            answer = network.get(signed, headers)
            assert answer.content(SLICE) == content[SLICE : 2 * SLICE]
        assert origin.total == before, "a signature is no part of the name"
        assert network.get(f"{url}?version=3", headers).content(SLICE)
        assert origin.total == before + SLICE
        keys = [run_program("purge", each, f"{origin.url}/b/") for each in (one, other)]
        assert sum(int(text.split()[0]) for text in keys) == 2
        assert network.get(url, headers).content(SLICE) == content[SLICE : 2 * SLICE]
        assert origin.total == before + 2 * SLICE
        for each in (one, other):
            assert "Signature" not in each.log.read_text()


def run_program(command: str, member: Member, *words: str, **more: str) -> str:
    done = subprocess.run(
        ["/bin/sh", str(PROGRAM), command, *words], env={**os.environ, **member.settings, **more},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def test_members_come_from_a_file_a_name_or_a_node_list(place: Path) -> None:
    listed = place / "members"
    listed.write_text("node2 # the second\nnode1\n\nnode2\n")
    slurm = place / "scontrol"
    slurm.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n2\\nn1\\n"\n')
    slurm.chmod(0o755)
    nobody = Member(place / "m", {})
    path = {"PATH": f"{place}:{os.environ['PATH']}"}
    assert run_program("members", nobody, MEMBERS="b a b") == "a\nb\n"
    assert run_program("members", nobody, MEMBERS_FILE=str(listed)) == "node1\nnode2\n"
    assert run_program("members", nobody, MEMBERS_DNS="127.0.0.1") == "127.0.0.1\n"
    assert run_program("members", nobody, SLURM_JOB_NODELIST="n[1-2]", **path) == "n1\nn2\n"
    settings = {"MEMBERS": "127.0.0.1 10.0.0.7:99 none.invalid", "ORIGINS": "*.a.example b.example"}
    text = run_program("render", nobody, **settings)
    assert re.findall(r"server (\S+) max", text) == ["10.0.0.7:99", "127.0.0.1:8444"]
    assert "        *.a.example 1;\n        b.example 1;\n" in text
    for wrong in ({"ORIGINS": "a;b"}, {"ORIGINS": ""}, {"SIZE": "100"}, {"MEMBERS": "127.0.0.1;"}):
        given: dict[str, Any] = {**settings, **wrong}
        with pytest.raises(subprocess.CalledProcessError):
            run_program("render", nobody, **given)


def test_members_that_come_and_go_are_followed(origin: HttpOrigin, place: Path) -> None:
    with members(place, 2, FOLLOW_S="1") as [one, _]:
        listed = place / "list"
        listed.write_text(one.settings["MEMBERS"])
        one.end()
        one.settings |= {"MEMBERS": "", "MEMBERS_FILE": str(listed)}
        one.start()
        listed.write_text(one.settings["LISTEN"])
        conf = place / "0/run/nginx.conf"
        until(lambda: conf.read_text().count(" max_fails=") == 1, "the other is left out")
        url = origin.put("a", bytes(SLICE))
        answer = CacheNetwork(f"unix:{one.socket}").get(url, {"Range": f"bytes=0-{SLICE - 1}"})
        assert answer.content(SLICE) == bytes(SLICE)


def test_a_job_of_slurm_has_a_cache_network_of_its_own(origin: HttpOrigin, place: Path) -> None:
    for name, text in (
        ("scontrol", "echo 127.0.0.1"),
        ("srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'),
    ):
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o755)
    url, folder = origin.put("a", bytes(SLICE)), PROGRAM.parent
    asks = (
        "import sys; from ffserve.store import cache_network as c\n"
        "answer = c.current().get(sys.argv[1], {'Range': 'bytes=0-99'})\n"
        "assert answer.content(100) == bytes(100)"
    )
    job = f"""
        . {folder}/slurm.sh {folder}
        while [ ! -S "$RUN/cache.sock" ]; do sleep 0.1; done
        [ "$(stat -c %a "$RUN")" = 700 ] || exit 3
        {sys.executable} -c "$1" {url} || exit 4
        kill $!; wait
        [ ! -e "$RUN" ] || exit 5
    """
    environment = {
        **os.environ, "PATH": f"{place}:{os.environ['PATH']}", "HOME": str(place),
        "TMPDIR": str(place), "SLURM_JOB_ID": str(random.randrange(10_000)),
        "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "ORIGINS": "127.0.0.1",
    }  # fmt: skip
    words = ["/bin/bash", "-ec", job, "job", asks]
    done = subprocess.run(words, env=environment, cwd=PROGRAM.parents[2], timeout=60)
    assert done.returncode == 0
