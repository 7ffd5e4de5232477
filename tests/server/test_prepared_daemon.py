"""Prepared samples in a real daemon: claims, copies, domains, and clients that break the rules."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from daemon import (
    DEADLINE_S,
    Daemon,
    Raw,
    everything_is_given_back,
    get,
    sample,
    serving,
    until,
    write,
)
from http_daemon import ask, measured
from service_manager import ManagedDaemon, inventory_of, managed

from ffserve import protocol
from ffserve.cache.inventory import PREPARED
from ffserve.client.daemon.mapped_memory import DomainMemory
from ffserve.engine.shm import Located, MappedView
from ffserve.errors import AccessDenied, FFServeError, ProtocolError
from ffserve.protocol import ELSEWHERE, READABLE, UNSHARED, YOURS

COUNT = 40
KEY, DISTRUSTED = bytes(range(32)), bytes(32)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that may log sessions that it closed."""
    with serving(expect=[r"closed a session \(pid \d+\): .*"]) as running:
        yield running


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file of COUNT samples, another one for each test."""
    return write(tmp_path / "a.ffr", [sample(i) for i in range(COUNT)])


def pack(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, "<u8").tobytes()


class Preparer(Raw):
    """A raw client with a data set, its prepared samples, and a memory file. Args: path: None: the
    samples are made of no file."""

    def __init__(
        self, daemon: Daemon, path: str | None, key: bytes = KEY, *, verify: bool = True
    ) -> None:
        super().__init__(daemon.socket, hello=False, keep=True)
        welcome = self.hello()
        assert isinstance(welcome, protocol.Welcome) and welcome.about["prepared"] is True
        self.about = welcome.about
        self.file = os.memfd_create("prepared")
        self._tag = 100
        domains = b""
        if path is None:
            assert self.about["items"] is True
            self.send(protocol.Prepare(2, 0, key, {"name": "tests.items", "count": COUNT}))
        else:
            self.raw = self.open(path, verify=verify)
            domains = self.raw.domains
            self.send(protocol.Prepare(2, self.raw.dataset, key, {"name": "tests.prepare"}))
        need = self.receive()
        assert isinstance(need, protocol.Need), need
        self.pass_files(2, [self.file])
        opened = self.receive()
        assert isinstance(opened, protocol.Opened), opened
        self.opened = opened
        self.dataset = opened.dataset
        self.shard = np.frombuffer(opened.shards, protocol.SHARD_DTYPE)[0]
        serials = protocol.unpack_tags(domains + opened.domains)
        # A page comes first, then three descriptors for each domain.
        place = 1 + 3 * serials.index(int(self.shard["domain"]))
        fds = [os.dup(fd) for fd in self.fds[place : place + 3]]
        arena_size = self.about["arena_size"]
        self.memory = DomainMemory("test", fds, arena_size, self.about["capacity"])

    def __exit__(self, *exc: object) -> None:
        os.close(self.file)
        super().__exit__(*exc)

    def tag(self) -> int:
        self._tag += 1
        return self._tag

    def claim(self, *indices: int, wait: bool = False) -> list[int]:
        self.ask(*indices, wait=wait)
        return self.claimed()

    def ask(self, *indices: int, wait: bool = False) -> None:
        packed = protocol.pack_indices(np.array(indices, np.int64))
        self.send(protocol.Claim(self.tag(), self.dataset, packed, int(wait)))

    def claimed(self) -> list[int]:
        answer = self.receive()
        assert isinstance(answer, protocol.Claimed), answer
        return list(answer.states)

    def put(self, contents: dict[int, bytes], cost_us: int = 0) -> protocol.Ready:
        """Write samples to the memory file and hand them over; return the answer."""
        places, at = [], 0
        for content in contents.values():
            os.pwrite(self.file, content, at)
            places.append(at)
            at += len(content)
        return self.put_at(list(contents), places, [len(c) for c in contents.values()], cost_us)

    def put_at(
        self, indices: list[int], places: list[int], lengths: list[int], cost_us: int = 0
    ) -> protocol.Ready:
        packed = protocol.pack_indices(np.array(indices, np.int64))
        self.send(
            protocol.Put(self.tag(), self.dataset, packed, pack(places), pack(lengths), cost_us)
        )
        answer = self.receive()
        assert isinstance(answer, protocol.Ready), answer
        return answer

    def look(self, *indices: int) -> list[bytes | None]:
        """Copy samples out of the mapped memory as a client does; None: it is not there."""
        base, count = int(self.shard["base"]), int(self.shard["count"])
        entries, arena = self.memory.entries(base, count), self.memory.arena
        address = [a.__array_interface__["data"][0] for a in (entries, arena)]
        view = MappedView(self.about["arena_size"], [(address[0], 0, count, address[1])])
        found: list[bytes | None] = []
        for index in indices:
            copied = view.copy_arrays(np.array([index], np.int64))
            there = copied is not None and not isinstance(copied, Located)
            found.append(copied[0][0].tobytes() if there else None)
        return found


def test_what_one_client_prepares_another_reads(daemon: Daemon, path: str) -> None:
    contents = {3: b"three" * 1000, 7: b"7", 21: os.urandom(200_001)}
    with Preparer(daemon, path) as one, Preparer(daemon, path) as other:
        assert one.shard["base"] == other.shard["base"] and one.shard["count"] == COUNT
        assert one.claim(3, 7, 21, 3) == [YOURS] * 4
        assert other.look(3, 7) == [None, None]
        assert one.put(contents).errors == []
        assert other.look(3, 7, 21) == list(contents.values())
        assert other.claim(3, 7, 21, 4) == [READABLE, READABLE, READABLE, YOURS]
        assert one.look(4) == [None]
    with Preparer(daemon, path) as later:
        assert later.look(3, 21) == [contents[3], contents[21]], "it stays when all have gone"
        assert later.claim(4) == [YOURS], "the claim ended with its session"


def test_prepared_samples_of_a_replaced_file_stayed(path: str, tmp_path: Path) -> None:
    """Nobody can ask for them: the file is another one."""
    with serving(
        patch="import ffserve.server.sessions.server as s; s.TEND_INTERVAL_S = 0.02"
    ) as daemon:
        for _ in range(3):
            with Preparer(daemon, path) as one:
                assert one.claim(3) == [YOURS]
                one.put({3: b"three"})
            os.rename(write(tmp_path / "fresh.ffr", [sample(i) for i in range(COUNT)]), path)
        until(lambda: not daemon.status()["shards"], "all of them are gone")


def test_a_sample_is_prepared_once(daemon: Daemon, path: str) -> None:
    with Preparer(daemon, path) as one, Preparer(daemon, path) as other:
        assert one.claim(1, 2) == [YOURS, YOURS]
        assert other.claim(2, 3) == [ELSEWHERE, YOURS]
        other.ask(1, 2, wait=True)
        one.put({2: b"two"})
        other.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.receive()
        other.socket.settimeout(DEADLINE_S)
        one.put({1: b"one"})
        assert other.claimed() == [READABLE, READABLE]
        assert other.look(1, 2) == [b"one", b"two"]


@pytest.mark.parametrize("how", ["given up", "closed", "dead"])
def test_who_waits_gets_the_claims_of_who_stops(daemon: Daemon, path: str, how: str) -> None:
    with Preparer(daemon, path) as one, Preparer(daemon, path) as other:
        assert one.claim(1, 2) == [YOURS, YOURS]
        other.ask(1, 2, wait=True)
        if how == "given up":
            assert one.put_at([1, 2], [0, 0], [0, 0]).count == 0
        elif how == "closed":
            one.send(protocol.Close(one.dataset))
        else:
            one.socket.close()
        assert other.claimed() == [YOURS, YOURS]


@pytest.mark.check
def test_claims_of_a_worker_that_hangs_end(path: str) -> None:
    patch = "from ffserve.server.prepared import claims\nclaims.CLAIM_S = 0.1"
    with (
        serving(patch=patch) as daemon,
        Preparer(daemon, path) as one,
        Preparer(daemon, path) as other,
    ):
        begun = time.monotonic()
        assert one.claim(1) == [YOURS]
        assert other.claim(1, wait=True) == [YOURS]
        assert time.monotonic() - begun > 0.09
        assert one.put({1: b"late"}).count == 0, "it is not claimed any more"
        assert other.put({1: b"mine"}).count == 1
        assert one.look(1) == [b"mine"]


def test_claims_of_a_worker_that_hangs_ended_one_after_another(path: str) -> None:
    """Those of 64 samples lived for 187 s instead of 30: after the end of each, the next one was
    looked at as of the last message."""
    patch = (
        "from ffserve.server.prepared import claims\n"
        "from ffserve.server.sessions import server\n"
        "claims.CLAIM_S, server.ALIVE_INTERVAL_S = 0.5, 0.1"
    )
    with (
        serving(patch=patch) as daemon,
        Preparer(daemon, path) as one,
        Preparer(daemon, path) as other,
    ):
        assert one.claim(*range(COUNT)) == [YOURS] * COUNT
        other.ask(*range(COUNT), wait=True)
        signs = 0
        while isinstance(answer := other.receive(alive=True), protocol.Alive):
            signs += 1
        assert isinstance(answer, protocol.Claimed) and list(answer.states) == [YOURS] * COUNT
        assert signs < COUNT // 2, "claims are looked at with each sign of life"


def test_two_keys_share_nothing(daemon: Daemon, path: str) -> None:
    with Preparer(daemon, path) as one, Preparer(daemon, path, KEY[::-1]) as other:
        assert one.shard["base"] != other.shard["base"]
        assert one.claim(1) == [YOURS]
        one.put({1: b"one"})
        assert other.claim(1) == [YOURS] and other.look(1) == [None]


def test_a_preparation_with_two_results_is_not_shared(daemon: Daemon, path: str) -> None:
    with Preparer(daemon, path, DISTRUSTED) as one, Preparer(daemon, path, DISTRUSTED) as other:
        assert one.claim(1, 2) == [YOURS, YOURS]
        one.put({1: b"one"})
        one.send(protocol.Distrust(one.dataset, 1))
        assert other.claim(1, 2, 3, wait=True) == [UNSHARED] * 3
        until(lambda: other.look(1) == [None], "its samples are forgotten")
        assert one.put({2: b"two"}).count == 0
    with Preparer(daemon, path, DISTRUSTED) as later:
        assert later.claim(1) == [UNSHARED], "it is remembered"


def test_a_sample_of_another_length_is_not_believed(path: str) -> None:
    with serving(arena="16MiB") as daemon, Preparer(daemon, path) as one:
        assert one.claim(1) == [YOURS]
        one.put({1: b"one"})
        size = 300_000
        large = write(daemon.directory / "l.ffr", [sample(i, [size], 1) for i in range(80)])
        with daemon.open(large) as reader:
            until(lambda: reader.read(range(80)) and one.look(1) == [None], "it is evicted")
        assert one.claim(1) == [YOURS]
        assert one.put({1: b"another length"}).count == 0
        assert one.claim(1, 2) == [UNSHARED, UNSHARED]


def test_a_memory_file_that_is_cut_fails_its_samples(daemon: Daemon, path: str) -> None:
    with Preparer(daemon, path) as one, Preparer(daemon, path) as other:
        assert one.claim(1, 2) == [YOURS, YOURS]
        other.ask(2, wait=True)
        os.pwrite(one.file, b"x" * 100, 0)
        ready = one.put_at([1, 2], [0, 50_000_000], [100, 70_000])
        assert [row[0] for row in ready.errors] == [1]
        assert other.claimed() == [YOURS]
        assert other.look(1, 2) == [b"x" * 100, None]


def test_what_was_not_claimed_is_not_taken(daemon: Daemon, path: str) -> None:
    with Preparer(daemon, path) as one, Preparer(daemon, path) as other:
        assert one.claim(1) == [YOURS]
        assert other.put({1: b"false", 2: b"false"}).count == 0
        assert one.put({1: b"true"}).count == 1
        assert one.put({1: b"other"}).count == 0
        assert other.look(1, 2) == [b"true", None]


def test_more_than_the_arena_holds_is_prepared_again(path: str) -> None:
    with serving(arena="16MiB") as daemon:
        with Preparer(daemon, path) as one:
            for _ in range(2):
                for index in range(COUNT):
                    content = bytes([index]) * 1_000_000
                    if one.claim(index) == [YOURS]:
                        assert one.put({index: content}).errors == []
                    assert one.look(index) == [content]
        everything_is_given_back(daemon)


def test_a_sample_larger_than_the_arena_fails(path: str) -> None:
    with serving(arena="16MiB") as daemon, Preparer(daemon, path) as one:
        assert one.claim(1) == [YOURS]
        os.ftruncate(one.file, 20 << 20)
        ready = one.put_at([1], [0], [20 << 20])
        assert len(ready.errors) == 1 and ready.errors[0][1] == "arena"
        assert one.claim(1) == [YOURS]


def test_private_memory_files_are_closed(daemon: Daemon, path: str) -> None:
    def held() -> int:
        count = 0
        for fd in os.listdir(f"/proc/{daemon.pid}/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(f"/proc/{daemon.pid}/fd/{fd}").startswith("/memfd:prepared")
        return count

    for _ in range(5):
        with Preparer(daemon, path) as one:
            assert one.claim(1)
            assert held()
    until(lambda: not held(), "descriptors are closed")


def test_only_memory_files_are_read(daemon: Daemon, path: str, tmp_path: Path) -> None:
    pipe = os.pipe()
    writable = os.open(tmp_path / "w", os.O_CREAT | os.O_WRONLY)
    record_file = os.open(sys.executable, os.O_RDONLY)
    for fds in ([pipe[0]], [writable], [record_file], [record_file, record_file]):
        with Raw(daemon.socket) as raw:
            dataset = raw.open(path).dataset
            raw.send(protocol.Prepare(2, dataset, KEY, {"name": "n"}))
            assert isinstance(raw.receive(), protocol.Need)
            kinds = bytes([0, 1][: len(fds)])
            raw.pass_files(2, fds, kinds=kinds)
            answer = raw.receive()
            assert isinstance(answer, protocol.Fail) and answer.tag == 2
            assert isinstance(protocol.error_from_wire(answer.error), AccessDenied)
            raw.send(get(3, dataset, [1]))
            assert isinstance(raw.receive(), protocol.Ready), "the session goes on"
    for fd in (*pipe, writable, record_file):
        os.close(fd)


def test_keys_without_end_took_all_memory_for_tables(path: str) -> None:
    patch = "import ffserve.server.users.domains as domains\ndomains.PREPARED_SHARE = 1 << 40\n"
    patch += (
        f"domains.LEAST_PREPARED_SIZE = {2 * COUNT + COUNT // 2} * domains.PREPARED_SAMPLE_SIZE"
    )
    with serving(patch=patch) as daemon, Raw(daemon.socket) as raw:
        dataset = raw.open(path).dataset

        def prepare(tag: int, key: bytes) -> protocol.Message:
            raw.send(protocol.Prepare(tag, dataset, key, {"name": "n"}))
            assert isinstance(raw.receive(), protocol.Need)
            memory = os.memfd_create("n")
            raw.pass_files(tag, [memory])
            os.close(memory)
            return raw.receive()

        first, second = (prepare(tag, bytes([tag]) * 32) for tag in (2, 3))
        assert isinstance(first, protocol.Opened) and isinstance(second, protocol.Opened)
        refused = prepare(4, bytes([4]) * 32)
        assert isinstance(refused, protocol.Fail)
        assert f"has {2 * COUNT} prepared samples in the tables" in str(
            protocol.error_from_wire(refused.error)
        )
        assert isinstance(prepare(5, bytes([3]) * 32), protocol.Opened), "it is there already"
        raw.send(protocol.Close(first.dataset))
        tags = itertools.count(6)
        until(
            lambda: isinstance(prepare(next(tags), bytes([4]) * 32), protocol.Opened),
            "what nobody uses is forgotten",
        )


def as_user(uid: int, daemon: Daemon) -> Preparer:
    """Connect as a user, for items."""
    os.seteuid(uid)
    try:
        return Preparer(daemon, None)
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="connects as other users")
def test_items_without_a_file_are_their_users_own() -> None:
    with serving(options=("--socket-mode", "0666")) as daemon:
        with as_user(4001, daemon) as one, as_user(4001, daemon) as same:
            assert one.claim(3) == [YOURS] and same.claim(3) == [ELSEWHERE]
            one.put({3: b"content"})
            assert same.claim(3) == [READABLE] and same.look(3) == [b"content"]
            with as_user(4002, daemon) as other:
                assert other.claim(3) == [YOURS]
                assert int(other.shard["domain"]) != int(one.shard["domain"])
        with as_user(4001, daemon) as later:
            assert later.look(3) == [b"content"], "they stay for the next job"


def packed(*indices: int) -> bytes:
    return protocol.pack_indices(np.array(indices, np.int64))


@pytest.mark.parametrize(
    "message",
    [
        lambda one: get(9, one.dataset, [1]),
        lambda one: protocol.Lease(9, one.dataset, packed(1)),
        lambda one: protocol.Prepare(9, one.dataset, KEY, {"name": "n"}),
        lambda one: protocol.Prepare(9, one.raw.dataset, KEY[1:], {"name": "n"}),
        lambda one: protocol.Prepare(9, one.raw.dataset, KEY, {"name": "n" * 201}),
        lambda one: protocol.Prepare(9, 77, KEY, {"name": "n"}),
        lambda one: protocol.Prepare(9, 0, KEY, {"name": "n"}),
        lambda one: protocol.Prepare(9, 0, KEY, {"name": "n", "count": 0}),
        lambda one: protocol.Prepare(9, 0, KEY, {"name": "n", "count": 1 << 48}),
        lambda one: protocol.Prepare(9, 0, KEY, {"name": "n", "count": True}),
        lambda one: protocol.Prepare(9, 0, KEY[1:], {"name": "n", "count": 1}),
        lambda one: protocol.Claim(9, one.raw.dataset, packed(1), 0),
        lambda one: protocol.Claim(9, one.dataset, packed(*range(1025)), 0),
        lambda one: protocol.Claim(9, one.dataset, b"1234567", 0),
        lambda one: protocol.Put(9, one.raw.dataset, packed(1), pack([0]), pack([1]), 0),
        lambda one: protocol.Put(9, one.dataset, packed(1), pack([0, 1]), pack([1]), 0),
        lambda one: protocol.Put(9, one.dataset, packed(1), pack([1 << 62]), pack([1]), 0),
        lambda one: protocol.Put(9, one.dataset, packed(1), pack([0]), pack([1 << 32]), 0),
        lambda one: protocol.Put(9, one.dataset, packed(1), pack([0]), pack([1]), -1),
        lambda one: protocol.Distrust(one.raw.dataset, 1),
    ],
)
def test_messages_against_the_rules_end_the_session(
    daemon: Daemon, path: str, message: object
) -> None:
    with Preparer(daemon, path) as one:
        one.send(message(one))  # type: ignore[operator]
        assert isinstance(one.refused(), ProtocolError)


def test_an_index_out_of_range_is_refused(daemon: Daemon, path: str) -> None:
    with Preparer(daemon, path) as one:
        for message in (
            protocol.Claim(9, one.dataset, packed(COUNT), 0),
            protocol.Put(9, one.dataset, packed(-1), pack([0]), pack([1]), 0),
        ):
            one.send(message)
            answer = one.receive()
            assert isinstance(answer, protocol.Fail) and answer.tag == 9
            error: FFServeError = protocol.error_from_wire(answer.error)
            assert error.index in (COUNT, -1)


def test_orders_of_prepared_samples_read_nothing_ahead(daemon: Daemon, path: str) -> None:
    with Preparer(daemon, path) as one:
        order = np.arange(COUNT, dtype=np.int64)
        what = {"name": None, "replacement": False}
        message = protocol.Order(9, one.dataset, 0, COUNT, 0, protocol.pack_order(order), what)
        one.send(message)
        answer = one.receive()
        assert isinstance(answer, protocol.Ready) and answer.count == COUNT
        one.send(protocol.Reached(one.dataset, 0, 5))
        assert one.claim(*range(COUNT)) == [YOURS] * COUNT
        assert one.put({index: bytes([index]) for index in range(COUNT)}).errors == []
        assert one.look(39) == [b"\x27"]


# ---- restarts -----------------------------------------------------------------------------------

CONTENTS = {3: b"three" * 1000, 7: b"7", 21: os.urandom(200_001)}


@pytest.mark.check
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("name", ["tests.prepare", "tests.items"])
def test_prepared_samples_outlive_their_daemon(path: str, name: str, number: int) -> None:
    of = path if name == "tests.prepare" else None
    with managed() as daemon:
        with Preparer(daemon, of) as one:
            assert one.claim(*CONTENTS, 5) == [YOURS] * 4
            assert one.put(CONTENTS).errors == []
        for _ in range(2):
            daemon.restart(number)
            with Preparer(daemon, of) as later:
                assert later.look(*CONTENTS, 5) == [*CONTENTS.values(), None]
                assert later.claim(*CONTENTS, 5) == [READABLE] * 3 + [YOURS]
        with Preparer(daemon, of) as later, Preparer(daemon, of, bytes(31) + b"!") as other:
            assert other.look(3) == [None] and other.claim(3) == [YOURS]
            assert later.claim(5) == [YOURS] and later.put({5: b"five"}).errors == []
            assert later.look(3, 5) == [CONTENTS[3], b"five"]
            rows = [row for row in daemon.status()["preparations"] if row["prepared"]]
            assert [(row["name"], row["prepared"]) for row in rows] == [(name, 1)]
            # Lengths are known over a restart as well.
            assert later.claim(3) == [READABLE]


@pytest.mark.check
def test_prepared_samples_of_a_file_that_changed_meanwhile_are_not_served(path: str) -> None:
    with managed() as daemon:
        with Preparer(daemon, path) as one:
            one.claim(*CONTENTS)
            one.put(CONTENTS)
        daemon.end(signal.SIGKILL)
        write(Path(path), [sample(i + 1) for i in range(COUNT)])
        daemon.start()
        with Preparer(daemon, path) as later:
            assert later.look(*CONTENTS) == [None] * 3
            assert later.claim(*CONTENTS) == [YOURS] * 3


def rewrite(daemon: ManagedDaemon, name: str, value: object) -> None:
    """Change a field in the row of the prepared shard that a daemon which has ended left."""
    with inventory_of(daemon) as inventory:
        (k,) = np.flatnonzero(inventory._shards["flags"] & PREPARED)
        inventory._shards[name][k] = value


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("path", b"no key"),
        ("path", b"name 3 " + b"z" * 64),
        ("path", b"name 1 " + b"0" * 64),  # another first sample, another key
        ("path", b"\xff\xfe 0 " + bytes(range(32)).hex().encode()),  # the name is not in the key
        ("fingerprint", 7),
        ("domain", 1 << 20),
    ],
)
def test_rows_of_prepared_shards_are_checked(path: str, name: str, value: object) -> None:
    with managed() as daemon:
        with Preparer(daemon, path) as one:
            one.claim(*CONTENTS)
            one.put(CONTENTS)
        daemon.end(signal.SIGKILL)
        kept = isinstance(value, bytes) and value.startswith(b"\xff")
        rewrite(daemon, name, value)
        daemon.start()
        with Preparer(daemon, path) as later:
            found = list(CONTENTS.values()) if kept else [None] * 3
            assert later.look(*CONTENTS) == found
            assert later.claim(*CONTENTS) == [READABLE if kept else YOURS] * 3
            assert later.claim(5) == [YOURS] and later.put({5: b"five"}).errors == []
            assert later.look(5) == [b"five"]


# ---- figures ------------------------------------------------------------------------------------


@pytest.mark.check
def test_metrics_say_what_sharing_saved(path: str) -> None:
    pytest.importorskip("prometheus_client")

    def counters() -> dict[str, float]:
        lines = ask(address)[2].split("\n")
        rows = (line.split() for line in lines if line.startswith("ffserve_prepar"))
        return {row[0]: float(row[1]) for row in rows}

    with measured() as (daemon, address), Preparer(daemon, path) as one:
        assert one.claim(1, 2) == [YOURS] * 2
        one.put({1: b"one", 2: b"two"}, cost_us=4_000_000)
        one.send(protocol.Tell(one.dataset, 3, 9, b""))
        expected = {
            "ffserve_prepared_total": 2,
            "ffserve_prepared_found_total": 3,
            "ffserve_preparing_seconds_total": 4,
            "ffserve_preparing_saved_seconds_total": 6,
        }
        until(lambda: counters() == expected, "all is counted")
        (row,) = daemon.status()["preparations"]
        assert (row["prepared"], row["found"], row["cost_s"], row["saved_s"]) == (2, 3, 4, 6)
