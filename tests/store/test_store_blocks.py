"""Blocks on disk: what is there, after kill -9, another boot, edits, with little room."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffserve.errors import AccessDenied, ReadError, UsageError
from ffserve.limits import FDS_OF_OBJECT
from ffserve.store import blocks as on_disk
from ffserve.store.blocks import (
    ABSENT,
    PRESENT,
    RESERVED,
    UNCHECKED,
    BlockState,
    StoredObject,
    runs,
)
from ffserve.store.directory import Store
from ffserve.store.origin import ObjectVersion

BLOCK = 64 << 10
LIMIT = 20 * BLOCK


def identity(name: str = "a", size: int = 10 * BLOCK - 5, tag: str = "1") -> ObjectVersion:
    return ObjectVersion(f"s3://bucket/{name}", size, tag, 1)


def content(block: int, size: int = BLOCK) -> bytes:
    return random.Random(block).randbytes(size)


def fill(store: Store, stored: StoredObject, block: int, use: float | None = None) -> bool:
    assert stored.claim(block)
    try:
        if stored.state.words[block] == PRESENT:
            return True
        if not store.reserve(stored, block, use):
            return False
        size = stored.state.end(block) - block * BLOCK
        stored.publish(block, content(block)[:size])
        return True
    finally:
        stored.unclaim(block)


def on_disk_size(directory: Path) -> int:
    found = subprocess.run(["du", "-s", "-B1", str(directory)], capture_output=True, check=True)
    return int(found.stdout.split()[0])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_blocks_are_there_after_the_store_was_closed(directory: Path) -> None:
    store = Store(str(directory), LIMIT, BLOCK)
    stored = store.open(identity())
    assert fill(store, stored, 3) and fill(store, stored, 9)
    store.close(stored)
    used = store.used
    store.abandon()
    again = Store(str(directory), LIMIT, BLOCK)
    stored = again.open(identity())
    assert np.flatnonzero(stored.state.words == PRESENT).tolist() == [3, 9]
    assert stored.read(3 * BLOCK, 4 * BLOCK) == content(3)
    assert stored.read(9 * BLOCK, stored.size) == content(9)[: stored.size - 9 * BLOCK]
    assert again.used <= used + 8 * on_disk.PAGE


def test_another_version_of_an_object_is_another_object(directory: Path) -> None:
    store = Store(str(directory), LIMIT, BLOCK)
    first = store.open(identity())
    fill(store, first, 0)
    others = [
        identity(tag="2"), identity(size=10 * BLOCK - 4), identity("b"),
        ObjectVersion("s3://bucket/a", 10, "1", 2),
    ]  # fmt: skip
    for other in others:
        found = store.open(other)
        assert found is not first and not (found.state.words != ABSENT).any()
    assert store.open(identity()) is first


def test_a_block_of_another_boot_is_compared_with_its_checksum(directory: Path) -> None:
    store = Store(str(directory), LIMIT, BLOCK)
    stored = store.open(identity())
    fill(store, stored, 1)
    fill(store, stored, 2)
    path = stored.path
    store.close(stored)
    store.abandon()
    with open(path, "rb+") as data:  # what a power failure left
        data.seek(2 * BLOCK)
        data.write(bytes(BLOCK))
    with open(Path(path).with_name("state"), "rb+") as state:
        assert state.read()[32:68] == on_disk.boot_id()
        state.seek(32)
        state.write(b"0" * 36)
    again = Store(str(directory), LIMIT, BLOCK)
    stored = again.open(identity())
    assert stored.state.words[:3].tolist() == [ABSENT, UNCHECKED, UNCHECKED]
    assert len(stored.missing(np.array([1, 2]))) == 2
    assert stored.agrees(1) and not stored.agrees(2)
    used = again.used
    assert again.reserve(stored, 2, None)
    assert again.used == used, "an unchecked block is counted already"


def test_blocks_of_closed_objects_go_first_then_what_is_used_last(directory: Path) -> None:
    store = Store(str(directory), LIMIT, BLOCK)
    old, new = store.open(identity("old")), store.open(identity("new"))
    for block in range(8):
        assert fill(store, old, block)
        assert fill(store, new, block)
    store.close(old)
    third = store.open(identity("third"))
    for block in range(10):  # the closed one gives way, also to what nobody has announced
        assert fill(store, third, block)
    assert (new.state.words[:8] == PRESENT).all()
    now = int(time.time())
    last = store.open(identity("last"))
    new.state.uses[:8] = [now + 100 + 10 * k for k in range(8)]
    third.state.uses[:] = last.state.uses[:] = now + 50
    placed = [fill(store, last, block) for block in range(10)]
    assert placed.count(True) <= 2, "what nobody announced evicts nothing that is open"
    assert (new.state.words[:8] == PRESENT).all() and (third.state.words == PRESENT).all()
    store._listed_at = -math.inf
    more = [fill(store, last, block, now + 125) for block in range(placed.count(True), 10)]
    assert more.count(True) == 5, "blocks that are used later than the new ones gave way"
    assert np.flatnonzero(new.state.words[:8] == PRESENT).tolist() == [0, 1, 2]
    assert (third.state.words == PRESENT).all()


def test_the_limit_holds_on_disk(directory: Path) -> None:
    store = Store(str(directory), LIMIT, BLOCK)
    for number in range(12):
        stored = store.open(identity(str(number)))
        for block in range(10):
            fill(store, stored, block)
            assert store.used <= LIMIT
        assert on_disk_size(directory) <= LIMIT
        store.close(stored)
    assert store.evictions > 50


def test_an_open_object_had_four_descriptors(directory: Path) -> None:
    """One for pins, one of the mapping. Pins and claims count for the process that has them, too,
    and end with the object, although an array keeps its mapping."""
    store = Store(str(directory), LIMIT, BLOCK)
    before = len(os.listdir("/proc/self/fd"))
    stored = store.open(identity())
    assert len(os.listdir("/proc/self/fd")) == before + FDS_OF_OBJECT == before + 2
    words, first = stored.state.words, np.zeros(1, np.int64)
    assert all(fill(store, stored, block) for block in range(8))
    moved = np.zeros(1, np.uint64)
    stored.pin(first)
    assert not stored.state.evict(0, moved) and stored.state.evict(1, moved)
    store.close(stored)
    assert len(os.listdir("/proc/self/fd")) == before
    again = BlockState(stored.state.directory)
    assert not again.is_open and again.evict(0, moved) and moved == [2]
    assert words[:3].tolist() == [ABSENT, ABSENT, PRESENT]
    again.close()


@pytest.mark.check
def test_a_store_of_more_objects_than_a_process_may_have_files(directory: Path) -> None:
    """Each object that nobody has open took two descriptors when blocks were evicted."""
    program = """
import resource, sys
sys.path[:0] = [{here!r}]
from test_store_blocks import *
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
store = Store({directory!r}, 3 * LIMIT, BLOCK)
for number in range(200):
    stored = store.open(identity(str(number), BLOCK))
    assert fill(store, stored, 0), number
    store.close(stored)
print(store.evictions, len(os.listdir(store.directory + "/objects")))
"""
    code = program.format(here=str(Path(__file__).parent), directory=str(directory))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    evicted, kept = map(int, done.stdout.split())
    assert evicted + kept == 200 and kept > 30


def test_blocks_of_an_object_that_another_process_made_anew(directory: Path) -> None:
    first, second = (Store(str(directory), LIMIT, BLOCK) for _ in range(2))
    old = first.open(identity())
    assert fill(first, old, 0)
    (Path(old.state.directory) / "data").unlink()
    new = second.open(identity())  # an object without data is damaged
    assert new.state.is_there and not old.state.is_there
    assert all(fill(second, new, block) for block in range(10))
    assert not first.reserve(old, 9, 1.0), "the old object gets no room"
    before, held = first.used, new.state.held_size
    first.give_back(old, 0)
    assert first.used == before and new.read(0, BLOCK) == content(0)
    other = first.open(identity("other"))
    use = time.time() + 50
    other.state.uses[:] = use
    assert all(fill(first, other, block, use) for block in range(10))
    left = np.flatnonzero(new.state.words == PRESENT).tolist()
    assert 7 < len(left) < 10, "blocks of the new one gave way"
    for block in left:
        end = new.state.end(block)
        assert new.read(block * BLOCK, end) == content(block)[: end - block * BLOCK]
    more = other.state.held_size + new.state.held_size - held
    assert first.used == before + more + first._overhead(other.size, BLOCK)


def test_objects_without_blocks_take_no_room_for_ever(directory: Path) -> None:
    store = Store(str(directory), LIMIT, BLOCK)
    for number in range(70):
        store.close(store.open(identity(f"empty {number}")))
    stored = store.open(identity())
    assert all(fill(store, stored, block) for block in range(10))
    assert os.path.basename(stored.state.directory) in os.listdir(directory / "objects")
    assert store.used <= LIMIT and len(os.listdir(directory / "objects")) < 60


def tiny_objects(directory: Path, count: int) -> None:
    """Fill a store with objects of a few bytes that nobody has open."""
    store = Store(str(directory), None, BLOCK)
    stored = store.open(identity("tiny", 100))
    assert fill(store, stored, 0)
    first = Path(stored.state.directory)
    state, data = (first / "state").read_bytes(), (first / "data").read_bytes()
    store.close(stored)
    store.abandon()
    for number in range(1, count):
        made = directory / "objects" / f"{number:032x}"
        made.mkdir()
        (made / "state").write_bytes(state)
        (made / "data").write_bytes(data)
        os.utime(made / "state", (number, number))


@contextlib.contextmanager
def another(code: str, said: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a process of its own, from its first line of output on."""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == said
        yield other
    finally:
        other.kill()
        other.wait()
        other.stdout.close()


def test_eviction_among_20_000_tiny_objects_looked_at_all_of_them(directory: Path) -> None:
    """Under the lock, whenever any object had been closed: a batch of 0.3 s took 7.0 s."""
    tiny_objects(directory, 20_000)
    holds: list[int] = []

    def counting(event: str, arguments: tuple[object, ...]) -> None:
        if holds and event == "fcntl.flock" and arguments[1] == fcntl.LOCK_EX:
            holds.append(0)
        elif holds and event == "open" and str(arguments[0]).endswith("/state"):
            holds[-1] += 1

    store = Store(str(directory), None, BLOCK)
    store.limit, before = store.used, store.used
    sys.addaudithook(counting)
    holds.append(0)
    try:
        stored, other = store.open(identity(size=64 * BLOCK)), store.open(identity("other"))
        for block in range(64):
            assert fill(store, stored, block)
            store.close(store.open(identity(f"new {block}")))
        assert all(fill(store, other, block, time.time() + 50) for block in range(10))
    finally:
        found, holds[:] = holds[:], []
    assert max(found) <= 100 and sum(found) < 3000, sorted(found)[-5:]
    left = {int(name, 16) for name in os.listdir(store._objects)} & set(range(20_000))
    assert store.used <= before and 0 < 20_000 - len(left) < 1000
    assert min(left) > 19_990 - len(left), "those that were opened longest ago are evicted"


def test_more_objects_than_are_remembered_are_evicted_all(directory: Path) -> None:
    tiny_objects(directory, 300)
    store = Store(str(directory), None, BLOCK, most_victims=40)
    store.limit = store.used + (1 << 20)
    stored = store.open(identity(size=64 * BLOCK))
    for block in range(40):  # takes the room of 200 of them
        while not fill(store, stored, block):  # the next ones are listed
            time.sleep(0.01)
    assert store.used <= store.limit and len(store._victims) <= 40


def test_pinned_blocks_stay_and_room_is_refused(directory: Path) -> None:
    store = Store(str(directory), LIMIT, BLOCK)
    first, second = store.open(identity("first")), store.open(identity("second"))
    for stored in (first, second):
        for block in range(10):
            fill(store, stored, block)
    held = np.flatnonzero(second.state.words == PRESENT)
    first.pin(np.arange(10))
    second.pin(held)
    third = store.open(identity("third"))
    assert not fill(store, third, 0, 1.0)
    second.unpin(held[:1])
    assert fill(store, third, 0, 1.0)
    assert second.state.words[held[0]] == ABSENT
    assert (first.state.words[:9] == PRESENT).all()


def test_256_pinned_blocks_kept_all_others_of_their_object(directory: Path) -> None:
    """The 256 that were to go first were looked at again and again, so a user whose requests pinned
    them kept a store full."""
    size = on_disk.PAGE
    store = Store(str(directory), 700 * size, size)
    large, other = (store.open(identity(name, 600 * size)) for name in ("large", "other"))

    def put(stored: StoredObject, block: int) -> bool:
        assert stored.claim(block)
        found = store.reserve(stored, block, soon)
        if found:
            stored.publish(block, bytes(size))
        stored.unclaim(block)
        return found

    soon = time.time() + 50
    assert all(put(large, block) for block in range(600))
    large.state.uses[:] = int(soon) + 100 + np.arange(600)
    other.state.uses[:] = int(soon)
    large.pin(np.arange(300, 600))
    assert all(put(other, block) for block in range(200))
    assert not large.complete and (large.state.words[300:] == PRESENT).all()
    store.close(large)
    store.close(other)
    store.abandon()


def test_eviction_beside_many_objects_of_another_process_ends(directory: Path) -> None:
    """Those that it has open rank too high whenever they are listed, so that an opening, which
    takes any number of steps, listed them for ever."""
    program = """
import sys, time
sys.path[:0] = [{here!r}]
from test_store_blocks import *
store = Store({directory!r}, None, BLOCK)
held = [store.open(identity(str(number), 256 * BLOCK)) for number in range(300)]
for stored in held:
    stored.state.words[:] = PRESENT
    stored.pin(np.arange(256))
print("open", flush=True)
time.sleep(100)
"""
    code = program.format(here=str(Path(__file__).parent), directory=str(directory))
    with another(code, b"open\n"):
        store = Store(str(directory), None, BLOCK)
        store.limit = store.used - BLOCK
        ended = threading.Event()

        def make() -> None:
            with contextlib.suppress(UsageError):  # the test has failed, and closes the store
                for number in range(3):
                    store.close(store.open(identity(f"new {number}")))
            ended.set()

        threading.Thread(target=make, daemon=True).start()
        assert ended.wait(20)
        assert not fill(store, store.open(identity("last")), 0, 1.0)
        store.abandon()


def test_the_index_of_an_object_is_counted_until_it_is_gone(directory: Path) -> None:
    """A damaged object that was made anew, or one that was staged, left the bytes of its index in
    the count for ever; so did an index that was replaced by a shorter one."""
    store = Store(str(directory), 1000 * BLOCK, BLOCK)
    empty = store.used
    for end in ("damage", "move"):
        stored = store.open(identity())
        before = store.used
        for size in (5 * BLOCK, 2 * BLOCK, 3 * BLOCK):
            store.keep_index(stored, "index-x", bytes(size))
            assert store.used == before + size
        path = Path(stored.path)
        if end == "move":
            path.unlink()
            store.remove(stored)
            store.close(stored)
            assert store.used == empty
        else:
            store.close(stored)
            path.write_bytes(b"")
            stored = store.open(identity())
            assert store.used == before
            store.close(stored)
    store.abandon()


def test_a_pin_of_another_process_holds_until_it_is_killed(directory: Path) -> None:
    program = """
import sys, numpy as np, time
sys.path[:0] = [{here!r}]
from test_store_blocks import *
store = Store({directory!r}, LIMIT, BLOCK)
stored = store.open(identity())
fill(store, stored, 0)
stored.pin(np.arange(1))
print("pinned", flush=True)
time.sleep(100)
"""
    code = program.format(here=str(Path(__file__).parent), directory=str(directory))
    with another(code, b"pinned\n") as other:
        store = Store(str(directory), LIMIT, BLOCK)
        stored = store.open(identity())
        evict = stored.state.evict
        assert not evict(0, np.zeros(1, np.uint64))
        other.kill()
        other.wait()
        assert evict(0, np.zeros(1, np.uint64))


def used(directory: Path) -> int:
    with contextlib.suppress(OSError), open(directory / "state", "rb") as state:
        return int.from_bytes(state.read(72)[64:], "little")
    return 0


def _fill_for_ever(directory: str, seed: int) -> None:
    store = Store(directory, LIMIT, BLOCK)
    rng = random.Random(seed)
    while True:
        stored = store.open(identity(str(rng.randrange(4))))
        block = rng.randrange(10)
        if stored.claim(block):
            try:
                if stored.state.words[block] != PRESENT and store.reserve(stored, block, 1.0):
                    size = stored.state.end(block) - block * BLOCK
                    stored.publish(block, content(block)[:size])
            finally:
                stored.unclaim(block)
        store.close(stored)


@pytest.mark.stores
def test_kill_9_leaves_blocks_that_are_whole(directory: Path) -> None:
    context = multiprocessing.get_context("spawn")
    rng = random.Random(5)
    for turn in range(3):
        processes = [
            context.Process(target=_fill_for_ever, args=(str(directory), 10 * turn + k))
            for k in range(3)
        ]
        for process in processes:
            process.start()
        while used(directory) < 12 * BLOCK:
            time.sleep(0.01)
        time.sleep(0.2 * rng.random())
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
        store = Store(str(directory), LIMIT, BLOCK)
        present = 0
        for number in range(4):
            stored = store.open(identity(str(number)))
            for block in np.flatnonzero(stored.state.words == PRESENT).tolist():
                present += 1
                size = stored.state.end(block) - block * BLOCK
                assert stored.read(block * BLOCK, block * BLOCK + size) == content(block)[:size]
            store.close(stored)
        assert present > 3
        # A killed process's reservations are no loss: all room can be used again.
        stored = store.open(identity("after"))
        assert all(fill(store, stored, block, 1.0) for block in range(10))
        assert on_disk_size(directory) <= LIMIT
        store.close(stored)
        store.abandon()


@given(st.data())
@settings(max_examples=8)
def test_the_count_of_bytes_is_what_the_objects_hold(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = Store(str(tmp_path_factory.mktemp("s") / "store"), LIMIT, BLOCK)
    opened: dict[int, StoredObject] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        number = data.draw(st.integers(0, 3))
        action = data.draw(st.sampled_from(["fill", "close", "back", "unknown"]))
        if action == "close":
            if number in opened:
                store.close(opened.pop(number))
            continue
        stored = opened.get(number) or opened.setdefault(number, store.open(identity(str(number))))
        block = data.draw(st.integers(0, 9))
        if action == "back":
            store.give_back(stored, block)
        else:
            fill(store, stored, block, None if action == "unknown" else 1.0)
        assert store.used <= LIMIT
    counted = store.used
    for stored in opened.values():
        store.close(stored)
    store.abandon()
    assert Store(store.directory, LIMIT, BLOCK).used == counted


@given(st.lists(st.integers(0, 60), unique=True))
def test_runs_cover_exactly_their_numbers(numbers: list[int]) -> None:
    rising = np.array(sorted(numbers), np.int64)
    covered = [n for first, count in runs(rising) for n in range(first, first + count)]
    assert covered == sorted(numbers)


EDITS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("state", lambda old: old[:100]),
    ("state", lambda old: b"x" + old[1:]),
    ("state", lambda old: old[:40] + b"!" + old[41:]),
    ("state", lambda old: old + b"more"),
    ("data", lambda old: old[:9]),
    ("data", lambda old: b""),
]


@pytest.mark.parametrize("case", range(len(EDITS)))
def test_an_edited_object_is_begun_anew(directory: Path, case: int) -> None:
    name, edit = EDITS[case]
    store = Store(str(directory), LIMIT, BLOCK)
    stored = store.open(identity())
    fill(store, stored, 0)
    path = Path(stored.state.directory, name)
    store.close(stored)
    path.write_bytes(edit(path.read_bytes()))
    stored = store.open(identity())
    assert len(stored.missing(np.arange(1))) == 1
    assert fill(store, stored, 0) and stored.read(0, BLOCK) == content(0)


@pytest.mark.parametrize("name", ["state", "data"])
def test_an_object_without_one_of_its_files_is_begun_anew(directory: Path, name: str) -> None:
    store = Store(str(directory), LIMIT, BLOCK)
    stored = store.open(identity())
    before = store.used
    assert fill(store, stored, 0)
    store.close(stored)
    Path(stored.state.directory, name).unlink()
    stored = store.open(identity())
    # What a state had counted is not known without it; the next count finds the truth.
    assert store.used == before or name == "state"
    assert fill(store, stored, 0) and stored.read(0, BLOCK) == content(0)


def test_a_directory_that_is_no_store_is_refused(directory: Path) -> None:
    directory.mkdir(0o700)
    (directory / "state").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="not a store, or its state file is damaged"):
        Store(str(directory), LIMIT, BLOCK)


def test_a_state_that_was_never_written_is_new(directory: Path) -> None:
    """Its maker was killed between the length and the head."""
    store = Store(str(directory), LIMIT, BLOCK)
    size = (directory / "state").stat().st_size
    store.abandon()
    (directory / "state").write_bytes(bytes(size))
    store = Store(str(directory), LIMIT, BLOCK)
    stored = store.open(identity())
    assert fill(store, stored, 3) and stored.read(3 * BLOCK, 4 * BLOCK) == content(3)


def test_the_tables_of_an_object_are_allocated_and_a_full_disk_is_an_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(directory), 100 * LIMIT, BLOCK)
    stored = store.open(identity(size=10_000 * BLOCK))
    state = os.stat(os.path.join(stored.state.directory, "state"))
    assert state.st_blocks * 512 >= state.st_size > 100_000
    assert os.stat(stored.path).st_blocks == 0
    used = store.used

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(ReadError, match="No space left"):
            store.open(identity("b"))
    assert store.used == used
    assert len(os.listdir(directory / "objects")) == 1
    assert fill(store, store.open(identity("b")), 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_refused_an_object_though_blocks_could_be_evicted(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "none", directory], check=True
    )
    try:
        store = Store(str(directory), 100 * BLOCK, BLOCK)
        stored = store.open(identity("old"))
        assert all(fill(store, stored, block) for block in range(10))
        with (directory / "other").open("wb", buffering=0) as other:  # of another program
            with contextlib.suppress(OSError):
                while True:
                    other.write(bytes(on_disk.PAGE))
            new = store.open(identity("new"))
            left = np.flatnonzero(stored.state.words == PRESENT)
            assert 0 < len(left) < 10
            assert fill(store, new, 0) and new.read(0, BLOCK) == content(0)
            stored.pin(np.arange(10))
            new.pin(np.arange(10))
            with contextlib.suppress(OSError):
                while True:
                    other.write(bytes(on_disk.PAGE))
            used = store.used
            with pytest.raises(ReadError, match="No space left"):
                store.open(identity("third"))
            assert store.used == used
        store.abandon()
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def test_bad_places(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UsageError, match="others may write"):
        Store(str(shared), LIMIT, BLOCK)
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot use the store"):
        Store(str(tmp_path / "file"), LIMIT, BLOCK)
    with pytest.raises(UsageError, match="needs at least"):
        Store(str(tmp_path / "small"), 2 * BLOCK, BLOCK)
    with pytest.raises((AccessDenied, Exception), match="store"):
        Store("/proc/store", LIMIT, BLOCK)


def test_a_claim_is_one_process_s(directory: Path) -> None:
    store = Store(str(directory), LIMIT, BLOCK)
    stored = store.open(identity())
    other = os.open(os.path.join(stored.state.directory, "state"), os.O_RDWR)
    try:
        assert stored.claim(4)
        assert on_disk.is_locked(other, on_disk.CLAIMS + 4)
        assert not on_disk.lock(other, fcntl.F_WRLCK, on_disk.CLAIMS + 4)
        stored.unclaim(4)
        assert on_disk.lock(other, fcntl.F_WRLCK, on_disk.CLAIMS + 4)
        assert not stored.claim(4)
    finally:
        os.close(other)
    assert stored.claim(4)
    assert RESERVED not in stored.state.words
