"""Every bound of `limits.py` is exceeded by a test, and what a user has is counted by uid.

BOUNDS names the test for each; those of this file lower the bounds of a real daemon and exceed them
as one user, while another user is served.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from attack_field import python_of
from daemon import Daemon, Raw, asking, get, run_python, serving, until, write
from origins import HttpOrigin, http_origin
from test_claims import World

import ffserve
from ffserve import limits, protocol
from ffserve.cache.jobs import JobProgress
from ffserve.cache.orders import AnnouncedOrder
from ffserve.config import ServerConfig
from ffserve.protocol import UNSHARED, YOURS
from ffserve.server.life.log import LatestLines
from ffserve.server.sessions.state import ServerState
from ffserve.server.users.shares import Bound, Users

ROOT = Path(__file__).parents[2]
ALICE, BOB = 61_001, 61_002
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="connects as other users")

BOUNDS = {
    # ---- each user
    "OTHERS_SHARE": "server/test_attacks.py: test_thousands_of_connections_locked_out_root",
    "MOST_RECEIVED": "test_a_user_who_is_at_a_bound_waits_alone",
    "MOST_UNSENT": "test_a_user_who_is_at_a_bound_waits_alone",
    "USER_MESSAGES_SIZE": "server/test_attacks.py: test_an_attack_of_one_user_stopped_all_others",
    "MOST_USER_REQUESTS": "test_a_user_who_is_at_a_bound_waits_alone",
    "MOST_ASKED": "test_a_user_who_is_at_a_bound_waits_alone",
    "MOST_PATHS": "test_a_user_who_is_at_a_bound_waits_alone",
    "MOST_USER_DATASETS": "test_data_sets_of_a_session_and_of_a_user",
    "MOST_ANNOUNCED": "test_announced_data_sets_of_a_user",
    "MOST_USER_CLAIMED": "test_claims_of_a_user_and_of_a_data_set",
    "MOST_USER_DOMAINS": "server/test_trust_domains.py: test_one_user_cannot_take_all_domains",
    "MOST_USER_NAMESPACES": "test_namespaces_of_a_user",
    "NAMESPACE_OPENINGS": "server/test_opening_together.py: "
    "test_a_user_held_up_four_threads_in_each_mount_namespace",
    "USER_OPENINGS": "server/test_opening_together.py: "
    "test_a_user_held_up_four_threads_in_each_mount_namespace",
    "ASKED_AT_ONCE": "test_remote_files_that_are_asked_for_at_once",
    "PROVEN_AT_ONCE": "test_remote_files_that_are_asked_for_at_once",
    "REMOTE_COUNT": "store/test_daemon_store.py: "
    "test_opening_long_files_fetched_the_first_block_of_each",
    "MOST_SCANS": "server/test_table_attacks.py: "
    "test_a_tolerant_scan_went_on_without_its_client",
    "MOST_ORIGINS": "test_origins_of_a_user",
    "CLOSING_THREADS": "server/test_threats.py: test_a_connection_that_lingers_stopped_the_daemon",
    "MOST_CLOSING": "test_a_user_who_is_at_a_bound_waits_alone",
    "MOST_EXPLANATIONS": "server/test_explaining.py: "
    "test_calls_of_a_user_are_made_in_order_and_only_so_many",
    "MOST_EXPLAINED_FILES": "test_damage_in_more_files_than_are_looked_at",
    "MOST_EXPLAINED_SAMPLES": "test_damage_in_more_files_than_are_looked_at",
    "MOST_USER_LOG_KEYS": "server/test_log.py: test_many_keys_take_bounded_memory",
    # ---- each session
    "MOST_UNREAD": "server/test_daemon_protocol.py: "
    "test_a_client_that_reads_no_replies_waits_for_itself_only",
    "MOST_UNACKNOWLEDGED": "cache/test_cache.py: "
    "test_a_client_that_never_acknowledged_made_its_pins_grow_for_ever",
    "MOST_DATASETS": "test_data_sets_of_a_session_and_of_a_user",
    "MOST_HELD": "test_claims_of_a_user_and_of_a_data_set",
    "LEAST_WAITING": "server/test_claims.py: "
    "test_a_user_who_waits_for_too_much_prepares_for_itself",
    "MOST_WAITING": "test_claims_that_wait",
    "MOST_ERRORS": "test_damage_in_more_files_than_are_looked_at",
    "MOST_NAME": "test_a_name_that_is_too_long",
    "MOST_TAG": "store/test_daemon_store.py: test_hostile_openings_are_refused",
    "MOST_URL": "store/test_daemon_store.py: test_hostile_openings_are_refused",
    # ---- remote files
    "ORIGIN_THREADS": "store/test_store_fetching.py: "
    "test_a_failing_origin_is_asked_by_one_thread_at_a_time",
    "MOST_UNUSED": "store/test_web.py: test_connections_to_many_origins_were_all_kept",
    "HEAD_SIZE": "store/test_daemon_store.py: "
    "test_opening_long_files_fetched_the_first_block_of_each",
    "FETCH_SIZE": "store/test_store_fetching.py: test_neighbours_come_by_one_request",
    "MOST_ACCESS": "store/test_store_access.py: "
    "test_headers_travel_and_what_is_not_understood_does_not",
    "OPENED_AT_ONCE": "store/test_remote_reader.py: test_many_files_are_opened_at_the_same_time",
    "MOST_LISTED": "store/test_hostile_listings.py: "
    "test_pages_of_a_bucket_without_end_took_all_memory",
    "MOST_PAGE_SIZE": "store/test_hostile_listings.py: test_a_page_without_end_took_all_memory",
    "GATE_BLOCKS": "store/test_daemon_store.py: "
    "test_requests_for_blocks_that_never_come_took_all_memory",
    "POOL_BLOCKS": "store/test_daemon_store.py: "
    "test_requests_for_blocks_that_never_come_took_all_memory",
    "MOST_QUEUED": "store/test_daemon_store.py: "
    "test_orders_of_blocks_that_never_come_took_all_memory",
    "BLOCK_THREADS": "test_remote_files_that_are_asked_for_at_once",
    "MOST_FETCHED_AHEAD": "store/test_daemon_store.py: "
    "test_an_announced_order_is_fetched_ahead_by_the_daemon",
    "MOST_READ_AHEAD": "store/test_store_fetching.py: test_only_reads_in_order_fetch_ahead",
    "OVERHEAD_SHARE": "test_an_object_whose_state_does_not_fit_into_the_store",
    "MOST_BLOCKS": "test_an_object_whose_state_does_not_fit_into_the_store",
    "MOST_VICTIMS": "store/test_store_blocks.py: "
    "test_more_objects_than_are_remembered_are_evicted_all",
    # ---- descriptors
    "SHARDS_PART": "server/test_access.py: test_a_user_may_have_half_of_the_daemons_files",
    "EXTRA_PART": "server/test_access.py: "
    "test_second_descriptors_and_passed_ones_fit_into_the_limit",
    "SESSIONS_PART": "test_sessions_by_descriptors",
    "FDS_OF_OBJECT": "store/test_store_blocks.py: test_an_open_object_had_four_descriptors",
    "PASSED_SHARE": "server/test_access.py: "
    "test_second_descriptors_and_passed_ones_fit_into_the_limit",
    "MEMORY_FILES_SHARE": "test_memory_files_of_a_user",
    "RESERVED_SESSIONS": "test_sessions_that_are_reserved",
    "FEWEST_SESSIONS": "test_sessions_by_descriptors",
    "LEAST_FILES": "server/test_daemon.py: test_a_limit_that_is_too_low_for_a_daemon_is_named",
    "MOST_HTTP_CONNECTIONS": "server/test_metrics.py: "
    "test_more_clients_than_connections_are_all_served",
    # ---- memory
    "OWN_SIZE": "server/test_daemon.py: test_an_arena_larger_than_memory_is_refused",
    "BOUNCES_KEPT": "engine/test_engine.py: "
    "test_buffers_that_every_engine_kept_were_in_no_limit",
    "ORDERS_SHARE": "server/test_announce.py: test_all_orders_together_have_a_limit",
    "LEAST_ORDERS_SIZE": "server/test_announce.py: test_all_orders_together_have_a_limit",
    "PREPARED_SHARE": "server/test_prepared_daemon.py: "
    "test_keys_without_end_took_all_memory_for_tables",
    "LEAST_PREPARED_SIZE": "server/test_trust_domains.py: "
    "test_a_user_had_a_share_of_all_tables_in_each_mount_namespace",
    "PREPARED_SAMPLE_SIZE": "server/test_trust_domains.py: "
    "test_a_user_had_a_share_of_all_tables_in_each_mount_namespace",
    "TABLES_SHARE": "server/test_table_attacks.py: "
    "test_a_user_has_a_part_of_the_room_for_tables",
    "LEAST_TABLES_SIZE": "server/test_table_attacks.py: "
    "test_a_user_has_a_part_of_the_room_for_tables",
    "TABLE_SAMPLE_SIZE": "server/test_table_attacks.py: "
    "test_a_user_has_a_part_of_the_room_for_tables",
    "OPENING_SAMPLE_SIZE": "server/test_table_attacks.py: "
    "test_a_user_has_a_part_of_the_room_for_tables",
    "TABLES_PER_BYTE": "server/test_table_attacks.py: "
    "test_empty_records_in_gzip_took_60_mb_an_open",
    "MOST_UNBACKED": "server/test_table_attacks.py: "
    "test_a_recordio_chunk_of_zeros_claimed_all_memory",
    "SCANNED_ALLOWED": "server/test_table_attacks.py: test_a_tolerant_scan_read_holes_for_hours",
    "SCANNED_PER_BYTE": "server/test_table_attacks.py: test_a_tolerant_scan_read_holes_for_hours",
    "LEASED_SHARE": "cache/test_cache.py: "
    "test_leases_on_their_way_together_took_more_than_their_half",
    "LEASED_SLABS": "client/test_leases.py: test_leases_in_every_slab_blocked_all_other_reads",
    "ARENA_SHARE": "server/test_daemon.py: test_arena_far_smaller_than_the_data_set",
    # ---- tables
    "MOST_DOMAINS": "test_domains_of_all_users",
    "MOST_SHARDS": "server/test_warm_restart.py: "
    "test_shards_beyond_the_limit_wait_for_their_jobs",
    "MOST_CLOSED": "server/test_closing.py: test_only_so_many_closed_shards_are_kept",
    "MOST_ALIASES": "test_names_of_a_file",
    "MOST_ENGINES": "server/test_threats.py: "
    "test_each_file_system_of_a_user_took_a_thread_and_a_ring",
    "MOST_EPOCHS": "test_epochs_of_a_job",
    "MOST_VISITS": "server/test_announce.py: "
    "test_an_order_with_replacement_has_a_largest_length",
    "MOST_KEPT_JOBS": "test_what_is_kept_to_be_shown",
    "MOST_COUNTED_JOBS": "test_what_is_kept_to_be_shown",
    "MOST_SLOW_FILES": "test_slow_files_that_are_remembered",
    "MOST_USER_DISTRUSTED": "server/test_claims.py: "
    "test_one_user_had_all_preparations_that_are_not_deterministic_forgotten",
    "MOST_DISTRUSTED": "server/test_claims.py: "
    "test_one_user_had_all_preparations_that_are_not_deterministic_forgotten",
    "MOST_LOG_KEYS": "server/test_log.py: test_many_keys_take_bounded_memory",
    "MOST_SAME_LINES": "server/test_log.py: "
    "test_an_origin_for_each_line_filled_the_log_without_a_bound",
    "MOST_LOG_LINES": "test_lines_that_are_kept",
    "MOST_LOG_LINE": "test_lines_that_are_kept",
    # ---- status and metrics
    "MOST_REPORT_ROWS": "test_what_is_kept_to_be_shown",
    "MOST_PAGE_JOBS": "server/test_page.py: test_jobs_that_run_come_before_those_that_have_ended",
    "MOST_PAGE_ROWS": "server/test_page.py: test_jobs_that_run_come_before_those_that_have_ended",
    "MOST_SERIES_JOBS": "server/test_metrics.py: "
    "test_clients_cannot_make_more_series_than_are_bounded",
    "MOST_SERIES_DOMAINS": "server/test_metrics.py: "
    "test_clients_cannot_make_more_series_than_are_bounded",
    "MOST_SERIES_FILES": "server/test_metrics.py: "
    "test_clients_cannot_make_more_series_than_are_bounded",
    "MOST_LABEL": "server/test_metrics.py: test_clients_cannot_make_more_series_than_are_bounded",
    "MOST_HTTP_REQUEST_SIZE": "server/test_metrics.py: "
    "test_a_request_that_is_refused_gets_a_reason",
}  # fmt: skip
"""By bound, the test that exceeds it: in this file, or in one below `tests`."""


def test_every_bound_has_a_test_that_exceeds_it() -> None:
    tree = ast.parse((ROOT / "ffserve" / "limits.py").read_text())
    targets = (each for node in tree.body if isinstance(node, ast.Assign) for each in node.targets)
    names = [name.id for each in targets for name in ast.walk(each) if isinstance(name, ast.Name)]
    assert list(BOUNDS) == names, "bounds and rows are the same, in the same order"
    for name, test in BOUNDS.items():
        file, _, function = test.rpartition(": ")
        text = (ROOT / "tests" / (file or "server/test_limits.py")).read_text()
        assert re.search(rf"^(async )?def {function}\(", text, re.M), f"{name}: {test}"


# ---- users ----------------------------------------------------------------------------------


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """What begins now is a user's: the kernel notes who connects."""
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def connected(daemon: Daemon, uid: int, **about: object) -> Raw:
    with as_user(uid):
        raw = Raw(daemon.socket, hello=False)
    raw.hello(**about)
    return raw


@contextlib.contextmanager
def lowered(*options: str, **bounds: int | float) -> Iterator[Daemon]:
    """A daemon with other bounds."""
    patch = "import ffserve.limits as l; " + "; ".join(f"l.{k} = {v}" for k, v in bounds.items())
    settings = ["--socket-mode", "0666", *options]
    lines = [r"closed a session .*", r"remote files: store /.*"]
    with serving(patch=patch, options=settings, expect=lines) as running:
        yield running


def answer(raw: Raw, message: protocol.Message, *files: str) -> protocol.Message:
    """Return the answer to a message, with descriptors where the daemon needs them."""
    raw.send(message)
    found = raw.receive()
    while isinstance(found, protocol.Need):
        positions = protocol.unpack_positions(found.positions, len(files))
        raw.pass_files(found.tag, [files[position] for position in positions])
        found = raw.receive()
    return found


def error_of(found: protocol.Message) -> str:
    assert isinstance(found, protocol.Fail), found
    return str(protocol.error_from_wire(found.error))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("received", limits.MOST_RECEIVED), ("unsent", limits.MOST_UNSENT),
        ("requests", limits.MOST_USER_REQUESTS), ("asked", limits.MOST_ASKED),
        ("opening", limits.MOST_PATHS), ("closing", limits.MOST_CLOSING),
    ],
)  # fmt: skip
def test_a_user_who_is_at_a_bound_waits_alone(name: str, most: int) -> None:
    """All connections of a user share it, and those of another have their own."""
    users = Users()

    def bound(uid: int) -> Bound:
        found = getattr(users.of(uid, trusted=False), name)
        assert isinstance(found, Bound)
        return found

    users.of(ALICE, trusted=False).sessions = users.of(BOB, trusted=False).sessions = 1
    bound(ALICE).take(most - 1)
    assert not bound(ALICE).full
    bound(ALICE).take(1)
    woken: list[int] = []
    bound(ALICE).waiting.append(lambda: not woken.append(1))
    assert bound(ALICE).full and not bound(BOB).full and not woken
    bound(ALICE).give(1)
    assert woken and not bound(ALICE).full


@needs_root
def test_data_sets_of_a_session_and_of_a_user() -> None:
    with lowered(MOST_DATASETS=3, MOST_USER_DATASETS=5) as daemon:
        path = write(daemon.directory / "a.ffr", [b"x"])
        first, second, other = (connected(daemon, uid) for uid in (ALICE, ALICE, BOB))
        for tag in (1, 2, 3):
            first.open(path, tag=tag)
        assert "already has 3 data sets" in error_of(answer(first, asking(path, tag=4), path))
        for tag in (1, 2):
            second.open(path, tag=tag)
        refused = error_of(answer(second, asking(path, tag=3), path))
        assert f"user {ALICE} already has 5 data sets open" in refused
        other.open(path)
        for raw in (first, second, other):
            raw.socket.close()


def order(raw: Raw, tag: int, dataset: int, **more: object) -> protocol.Message:
    what = {"name": None, "replacement": False, **more}
    packed = protocol.pack_order(np.arange(2))
    return answer(raw, protocol.Order(tag, dataset, 0, 2, 0, packed, what))


@needs_root
def test_announced_data_sets_of_a_user() -> None:
    with lowered(MOST_ANNOUNCED=2) as daemon:
        paths = [write(daemon.directory / f"{k}.ffr", [b"x", b"y"]) for k in range(3)]
        first, second, other = (connected(daemon, uid) for uid in (ALICE, ALICE, BOB))
        for tag, path in enumerate(paths[:2], 1):
            opened = first.open(path, tag=tag)
            assert isinstance(order(first, 10 + tag, opened.dataset), protocol.Ready)
        opened = second.open(paths[2])
        refused = error_of(order(second, 10, opened.dataset))
        assert f"user {ALICE} has announced orders in 2 data sets already" in refused
        assert isinstance(order(other, 10, other.open(paths[2]).dataset), protocol.Ready)
        for raw in (first, second, other):
            raw.socket.close()


def test_claims_of_a_user_and_of_a_data_set() -> None:
    most, half = limits.MOST_HELD, limits.MOST_HELD // 2
    world = World(most_user_claimed=most + half)
    # The holder's name begins with its user's.
    world.claims._user_of = lambda holder: str(holder)[0]
    states = world.claim("a1", *range(most + 10))
    assert states == [YOURS] * most + [UNSHARED] * 10
    states = world.claim("a2", *range(most, 2 * most))
    assert states == [YOURS] * half + [UNSHARED] * half
    assert world.claim("b", *range(2 * most, 2 * most + 20)) == [YOURS] * 20


@needs_root
def test_claims_that_wait() -> None:
    with lowered(MOST_WAITING=3) as daemon:
        path = write(daemon.directory / "a.ffr", [b"x"] * 10)
        holder, waiting, other = (connected(daemon, uid) for uid in (ALICE, ALICE, BOB))
        zero = protocol.pack_indices(np.zeros(1, np.int64))
        numbers = []
        for raw in (holder, waiting, other):
            memory = os.memfd_create("prepared")
            os.ftruncate(memory, 4096)
            source = raw.open(path).dataset
            raw.send(protocol.Prepare(2, source, bytes(32), {"name": "p"}))
            assert isinstance(raw.receive(), protocol.Need)
            raw.pass_files(2, [memory])
            opened = raw.receive()
            assert isinstance(opened, protocol.Opened)
            numbers.append(opened.dataset)
            os.close(memory)
        held = answer(holder, protocol.Claim(3, numbers[0], zero, 0))
        assert held == protocol.Claimed(3, bytes([YOURS]))
        waiting.send(*(protocol.Claim(tag, numbers[1], zero, 1) for tag in range(3, 7)))
        assert "too many CLAIMs wait" in str(waiting.refused())
        # Another user's preparation of the same key is another one.
        assert answer(other, protocol.Claim(3, numbers[2], zero, 1)) == held
        for raw in (holder, waiting, other):
            raw.socket.close()


@needs_root
def test_memory_files_of_a_user() -> None:
    with lowered(MEMORY_FILES_SHARE=1 << 30) as daemon:
        # No descriptor is left for memory files, whoever asks.
        path = write(daemon.directory / "a.ffr", [b"x"])
        for uid in (ALICE, BOB):
            raw = connected(daemon, uid)
            prepare = protocol.Prepare(2, raw.open(path).dataset, bytes(32), {"name": "p"})
            assert f"user {uid} has 0" in error_of(answer(raw, prepare))
            raw.socket.close()


@needs_root
def test_a_name_that_is_too_long() -> None:
    with lowered(MOST_NAME=20) as daemon:
        with as_user(ALICE):
            raw = Raw(daemon.socket, hello=False)
        about = {"versions": [protocol.VERSION], "client": "c", "pid": 1, "locks": True}
        raw.send(protocol.Hello({**about, "job": "x" * 21}))
        assert "the name of the job is missing or too long" in str(raw.refused())
        raw.socket.close()
        with connected(daemon, BOB, job="x" * 20) as other:
            other.open(write(daemon.directory / "a.ffr", [b"x"]))


NAMESPACES = """
import contextlib, ctypes, os, sys
from daemon import Raw
uid, raws, found = int(sys.argv[2]), [], []
for _ in range(5):
    assert ctypes.CDLL(None).unshare(0x20000) == 0
    os.seteuid(uid)
    raws.append(Raw(sys.argv[1]))
    os.seteuid(0)
    raws[-1].open(sys.argv[3])
for fd in os.listdir(f"/proc/{sys.argv[4]}/fd"):
    with contextlib.suppress(FileNotFoundError):
        found.append(os.readlink(f"/proc/{sys.argv[4]}/fd/{fd}"))
print(sum(each.endswith("/mountinfo") for each in found))
"""


@needs_root
def test_namespaces_of_a_user() -> None:
    """Those of another user are counted apart, and those beyond are served."""
    with lowered(MOST_USER_NAMESPACES=3) as daemon:
        path = write(daemon.directory / "a.ffr", [b"x"])
        for uid in (ALICE, BOB):
            done = run_python(NAMESPACES, daemon.socket, uid, path, daemon.pid)
            assert int(done.stdout) == 3
            until(lambda: daemon.status()["clients"]["sessions"] <= 1, "its sessions have ended")


# ---- remote files ---------------------------------------------------------------------------


OPEN = """
import sys, ffserve
try:
    with ffserve.open(sys.argv[2:], server=sys.argv[1]) as reader:
        print([bytes(one) for one in reader.read(range(len(reader)))])
except ffserve.FFServeError as error:
    print(error)
"""


def opened_by(uid: int, daemon: Daemon, *urls: str) -> str:
    """Return what a user reads from remote files, or the error."""
    command = [*python_of(uid), "-c", OPEN, daemon.socket, *urls]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def record_file(daemon: Daemon) -> bytes:
    return Path(write(daemon.directory / "a.ffr", [b"x"])).read_bytes()


@pytest.fixture
def origins() -> Iterator[list[HttpOrigin]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(http_origin()) for _ in range(3)]


@needs_root
def test_origins_of_a_user(origins: list[HttpOrigin], tmp_path: Path) -> None:
    store = "--store-directory", str(tmp_path / "store"), "--store-size", "1GiB"
    with lowered(*store, MOST_ORIGINS=2) as daemon:
        content = record_file(daemon)
        urls = [origin.put("a.ffr", content) for origin in origins]
        refused = opened_by(ALICE, daemon, *urls)
        assert f"user {ALICE} already has files of 2 origins open" in refused
        assert opened_by(BOB, daemon, *urls[1:]) == "[b'x', b'x']\n"


@needs_root
def test_remote_files_that_are_asked_for_at_once(origins: list[HttpOrigin], tmp_path: Path) -> None:
    """Requests that wait at a silent origin are counted there."""
    store = "--store-directory", str(tmp_path / "store"), "--store-size", "1GiB"
    with lowered(*store, ASKED_AT_ONCE=3, PROVEN_AT_ONCE=5, BLOCK_THREADS=2) as daemon:
        content, origin = record_file(daemon), origins[0]
        urls = [origin.put(f"{k}.ffr", content) for k in range(12)]
        origin.held.update(origin.files)
        with ThreadPoolExecutor(1) as pool:
            opened = pool.submit(opened_by, BOB, daemon, *urls)
            try:
                until(lambda: origin.answering >= 5, "the first ones are asked for")
                time.sleep(0.1)
                assert origin.answering == 5
            finally:
                origin.held.clear()
            assert opened.result() == f"{[b'x'] * 12}\n"
        names = Path(f"/proc/{daemon.pid}/task").glob("*/comm")
        assert sum(each.read_text().startswith("ffserve-blocks") for each in names) <= 2


def test_an_object_whose_state_does_not_fit_into_the_store(tmp_path: Path) -> None:
    from ffserve.store.directory import Store
    from ffserve.store.origin import ObjectVersion

    store = Store(str(tmp_path / "store"), 64 << 20, 64 << 10)
    with pytest.raises(ffserve.ReadError, match="is too large for the store"):
        store.open(ObjectVersion("http://a/x", 1 << 55, "", 0))
    store.limit = 1 << 60
    with pytest.raises(ffserve.ReadError, match="a store keeps objects of up to"):
        store.open(ObjectVersion("http://a/x", ((limits.MOST_BLOCKS + 1) << 16), "", 0))
    store.close(store.open(ObjectVersion("http://a/y", 1 << 20, "", 0)))
    store.abandon()


# ---- descriptors ----------------------------------------------------------------------------


def test_sessions_by_descriptors() -> None:
    assert limits.most_sessions(10_000, 4096) == 1024 - limits.RESERVED_SESSIONS
    assert limits.most_sessions(100, 4096) == 100
    assert limits.most_sessions(10_000, 64) == limits.FEWEST_SESSIONS


@needs_root
def test_sessions_that_are_reserved() -> None:
    with lowered("--max-sessions", "2") as daemon, contextlib.ExitStack() as stack:
        for uid in (ALICE, *[0] * (limits.RESERVED_SESSIONS + 1)):
            stack.enter_context(connected(daemon, uid))
        with as_user(0):
            raw = stack.enter_context(Raw(daemon.socket, hello=False))
        with contextlib.suppress(BrokenPipeError):
            raw.send(protocol.Status(1))
        assert "already serves 2 sessions" in str(raw.refused())


# ---- tables ---------------------------------------------------------------------------------


def test_domains_of_all_users() -> None:
    state = ServerState(ServerConfig(arena_size_bytes=16 << 20))
    for uid in range(limits.MOST_DOMAINS):
        state.domains.obtain((1000 + uid, 1))
    with pytest.raises(ffserve.ReadError, match="no room for another"):
        state.domains.obtain((999, 1))
    state.close()


@needs_root
def test_names_of_a_file() -> None:
    with lowered(MOST_ALIASES=3) as daemon:
        path = write(daemon.directory / "0.ffr", [b"x"])
        names = [path, *(str(daemon.directory / f"{k}.ffr") for k in range(1, 6))]
        for name in names[1:]:
            os.link(path, name)
        with connected(daemon, ALICE) as raw:
            for tag, name in enumerate(names, 1):
                raw.open(name, tag=tag)
            needed = []
            for tag, name in enumerate(names, 11):
                raw.send(asking(name, tag=tag))
                found = raw.receive()
                needed.append(isinstance(found, protocol.Need))
                if needed[-1]:
                    raw.pass_files(tag, [name])
                    found = raw.receive()
                assert isinstance(found, protocol.Opened)
            assert needed == [False] * 3 + [True] * 3


def test_epochs_of_a_job() -> None:
    progress = JobProgress("job", 4, 0, 4)
    for epoch in range(limits.MOST_EPOCHS + 3):
        pieces = [np.arange(4, dtype=np.uint32)]
        one = AnnouncedOrder(4, 0, np.ones(4, np.uint8), pieces, None)
        progress.announced(epoch, one, None, None, 0.0)
        assert len(progress.orders) <= limits.MOST_EPOCHS
    assert {0, epoch} <= set(progress.orders), "the current one and the newest one stay"


@needs_root
def test_what_is_kept_to_be_shown() -> None:
    with lowered(MOST_KEPT_JOBS=4, MOST_COUNTED_JOBS=2, MOST_REPORT_ROWS=3) as daemon:
        paths = [write(daemon.directory / f"{k}.ffr", [b"x"]) for k in range(6)]
        with connected(daemon, BOB, job="of another") as other:
            other.open(paths[0])
            for k, path in enumerate(paths):
                with connected(daemon, ALICE, job=f"job {k}") as raw:
                    raw.send(get(2, raw.open(path).dataset, [0]))
                    assert isinstance(raw.receive(), protocol.Ready)
            until(lambda: daemon.status()["clients"]["sessions"] <= 2, "they have ended")
            facts = daemon.status()
            assert len(facts["shards"]) == 3 and len(facts["jobs"]) == 3
            assert json.dumps(facts).count('"job 0"') == 0, "the first one was forgotten"


def test_slow_files_that_are_remembered() -> None:
    state = ServerState(ServerConfig(arena_size_bytes=16 << 20))
    faults = state.faults
    for base in range(limits.MOST_SLOW_FILES + 10):
        faults.slow_reads[-base - 1] = type("Slow", (), {})()
    faults.slow_read(np.zeros(0, np.int64), 1.0, 1.0)
    assert len(faults.slow_reads) == limits.MOST_SLOW_FILES
    state.close()


def test_lines_that_are_kept() -> None:
    lines = LatestLines()
    for k in range(limits.MOST_LOG_LINES + 5):
        text = f"{k} " + "x" * (2 * limits.MOST_LOG_LINE)
        lines.emit(logging.LogRecord("ffserve", logging.WARNING, "", 0, text, (), None))
    kept = lines.lines()
    assert len(kept) == limits.MOST_LOG_LINES and kept[0].text.startswith("5 ")
    assert {len(each.text) for each in kept} == {limits.MOST_LOG_LINE}


@needs_root
def test_damage_in_more_files_than_are_looked_at() -> None:
    """Each of the errors is told, as many in one answer as fit into it."""
    bounds = {"MOST_EXPLAINED_FILES": 2, "MOST_EXPLAINED_SAMPLES": 2, "MOST_ERRORS": 5}
    with lowered(**bounds) as daemon:
        paths = []
        for k in range(4):
            paths.append(write(daemon.directory / f"{k}.ffr", [bytes(4096)] * 3))
            content = bytearray(Path(paths[-1]).read_bytes())
            content[-3 * 4096 :] = b"\1" * (3 * 4096)
            Path(paths[-1]).write_bytes(content)
        with connected(daemon, ALICE) as raw, connected(daemon, BOB) as other:
            found = answer(raw, get(2, raw.open(*paths).dataset, range(12)))
            assert isinstance(found, protocol.Ready)
            assert found.count == len(found.errors) == 5
            good = write(daemon.directory / "good.ffr", [b"x"])
            found = answer(other, get(2, other.open(good).dataset, [0]))
            assert found == protocol.Ready(2, 1, [])
