"""Caches that nodes share: what they are asked, what they never get, and every way to fail."""

from __future__ import annotations

import json
import os
import random
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
from daemon import serving, until
from origins import HttpOrigin, http_origin
from shared_cache import FAULTS, SharedCache, shared_cache
from store_servers import BLOCK
from test_daemon_store import daemon_options, plain, samples_of, served

import ffserve
from ffserve.cache.jobs import JobProgress
from ffserve.cache.orders import AnnouncedOrder
from ffserve.config import ServerConfig
from ffserve.errors import AccessDenied, UsageError
from ffserve.limits import ORIGIN_THREADS
from ffserve.server.files import remote
from ffserve.server.files.remote import RemoteShard
from ffserve.server.reading import fetches
from ffserve.server.sessions.state import ServerState
from ffserve.store import cache_network
from ffserve.store.cache_network import ANSWER_S, CONNECT_S, CacheNetwork, Route
from ffserve.store.credentials import Access
from ffserve.store.directory import Store
from ffserve.store.fetching import Fetcher
from ffserve.store.origin import RemoteFile, identify
from ffserve.store.ranges import RangedObject, bytes_of
from ffserve.store.schemes import scheme_of

LOST_S = CONNECT_S + ANSWER_S
FAILED = r"store: the cache failed, so the origin http://.* is asked: .*"
AGAIN = r"store: the cache serves http://.* again"
S3: dict[str, Any] = {"key": "who", "secret": "geheim", "token": "session", "region": "eu-west-1"}


@pytest.fixture
def origin() -> Iterator[HttpOrigin]:
    with http_origin() as running:
        yield running


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedCache]:
    """A cache by HTTP, which this process uses."""
    with shared_cache() as running:
        monkeypatch.setenv("FFSERVE_STORE_CACHE", running.address)
        yield running


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffserve.store.ranges.BLOCK_SIZE", BLOCK)
    monkeypatch.setattr(cache_network, "_chosen", [])
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


def ranges(cache: SharedCache, *, sort: bool = True) -> list[tuple[int, ...]]:
    """The ranges that a cache was asked for: first and last byte."""
    found = [tuple(map(int, each.headers["range"][6:].split("-"))) for each in cache.asked]
    return sorted(found) if sort else found


def test_whole_blocks_are_asked_of_the_cache_as_if_it_were_the_origin(
    origin: HttpOrigin, cache: SharedCache
) -> None:
    content = random.Random(1).randbytes(5 * BLOCK + 77)
    url = origin.put("some dir/ü.bin", content).replace("some dir/ü", "some%20dir/%C3%BC")
    opened = RangedObject(identify(url))
    begin, end = BLOCK // 2, 4 * BLOCK + 9
    parts = opened.ask_all(begin, end)
    assert b"".join(bytes_of(future) for _, _, future in parts) == content[begin:end]
    assert bytes_of(opened.ask(5 * BLOCK + 3, 5 * BLOCK + 5)) == content[5 * BLOCK + 3 :][:2]
    last = 5 * BLOCK, len(content) - 1
    assert ranges(cache) == [*((k * BLOCK, (k + 1) * BLOCK - 1) for k in range(5)), last]
    for asked in cache.asked:
        host, _, path = asked.address.partition("/")
        assert f"http://{host}" == origin.url and path == "some%20dir/%C3%BC.bin"
        assert asked.headers["x-forwarded-proto"] == "http"
        assert asked.headers["if-match"] == origin.etag("some dir/ü.bin")
        usual = {"host", "range", "if-match", "x-forwarded-proto", "accept-encoding", "user-agent"}
        assert set(asked.headers) == usual
    before = origin.total
    assert bytes_of(RangedObject(identify(url)).ask(0, BLOCK)) == content[:BLOCK]
    assert origin.total == before and cache.hits == 1
    assert bytes_of(opened.ask(0, 9, direct=True)) == content[:9]
    assert origin.total == before + 9


def test_parts_of_an_object_come_in_whole_slices(
    origin: HttpOrigin, cache: SharedCache, tmp_path: Path
) -> None:
    """Also of an object that has got smaller blocks before there was a cache."""
    content = random.Random(2).randbytes(5 * BLOCK + 77)
    new, old = (identify(origin.put(name, content)) for name in ("new.tar", "old.tar"))
    store = Store(str(tmp_path / "store"), 1 << 30, BLOCK)
    fetcher, small = Fetcher(store), store.open(old, parts=True)
    for identity, size in ((new, BLOCK), (old, BLOCK // 2)):
        cache.asked.clear()
        opened = fetcher.open(identity, parts=True)
        assert opened.stored.block_size == size
        assert fetcher.content(opened, 3 * size + 7, 5 * size) == content[3 * size + 7 : 5 * size]
        assert cache.asked
        for first, last in ranges(cache):
            assert first % BLOCK == 0 and (last + 1) % BLOCK == 0
        fetcher.close(opened)
    store.close(small)
    store.abandon()


MARKED = [
    each
    if each in ("stopped", "tag", "bytes", 502)
    else pytest.param(each, marks=pytest.mark.check)
    for each in FAULTS
]


@pytest.mark.parametrize("fault", MARKED)
def test_a_cache_that_fails_costs_two_seconds_once(
    origin: HttpOrigin, cache: SharedCache, fault: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    content = random.Random(1).randbytes(6 * BLOCK)
    opened = RangedObject(identify(origin.put("a", content)))
    assert bytes_of(opened.ask(0, BLOCK)) == content[:BLOCK]
    cache.fault, begun = fault, time.monotonic()
    wrong = fault == "bytes"  # of which only the checksums of records know
    got = bytes_of(opened.ask(BLOCK, 2 * BLOCK))
    assert (got == content[BLOCK : 2 * BLOCK]) != wrong
    assert time.monotonic() - begun < LOST_S + 0.5
    if wrong:
        return
    network = cache_network.current()
    assert network is not None and network.faults == 1 and network.sent == BLOCK
    if not caplog.records:  # it broke off, perhaps at one member of many, while others answered
        time.sleep(LOST_S)
        assert bytes_of(opened.ask(BLOCK, 2 * BLOCK)) == content[BLOCK : 2 * BLOCK]
    known, begun = len(cache.asked), time.monotonic()
    for k in range(2, 5):
        assert bytes_of(opened.ask(k * BLOCK, (k + 1) * BLOCK)) == content[k * BLOCK :][:BLOCK]
    assert time.monotonic() - begun < 0.5 and len(cache.asked) == known
    assert network.faults <= 2 and network.sent == BLOCK
    [line] = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert re.fullmatch(FAILED, line), line
    caplog.clear()
    cache.fault = None

    def works() -> bool:
        assert bytes_of(opened.ask(5 * BLOCK, 6 * BLOCK)) == content[5 * BLOCK :]
        return network.sent > BLOCK

    until(works, "the cache is used again")


def test_a_cache_that_fails_again_is_left_alone_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    network, route, now = CacheNetwork("http://127.0.0.1:9"), Route(), 1000.0
    monkeypatch.setattr("ffserve.store.cache_network.time.monotonic", lambda: now)
    pauses = []
    for _ in range(7):
        assert route.fetch(network, "o", lambda: 1 // 0) is None
        pauses.append(route._next - now)
        now = route._next
        assert route.fetch(network, "o", lambda: 1) is None
        until(lambda: not route._failed, "a thread has tried it")
        assert route.fetch(network, "o", lambda: 7) == 7
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    now += 100
    route.fetch(network, "o", lambda: 1 // 0)
    assert route._next - now == 1.0


def test_a_cache_before_a_slow_origin_made_all_nodes_ask_the_origin() -> None:
    """What is late while others are answered lets fewer be sent at a time."""
    network, route = CacheNetwork("http://127.0.0.1:9"), Route()
    route._most = float(ORIGIN_THREADS)
    begun = threading.Semaphore(0)
    in_time, too_late, extra_end = (threading.Semaphore(0) for _ in range(3))

    def fetch(end: threading.Semaphore) -> None:
        def attempt() -> int:
            begun.release()
            end.acquire()
            if end is too_late:
                raise TimeoutError
            return 1

        route.fetch(network, "o", attempt)

    for _ in range(3):
        expected = int(route._most)
        late_count = expected // 2
        ends = [too_late if k < late_count else in_time for k in range(expected)]
        threads = [threading.Thread(target=fetch, args=(end,)) for end in ends]
        for each in threads:
            each.start()
        assert all(begun.acquire(timeout=5) for _ in threads)
        extra = threading.Thread(target=fetch, args=(extra_end,))
        extra.start()
        assert not begun.acquire(timeout=0.05), "no more are sent"
        in_time.release(expected - late_count)
        for each in threads[late_count:]:
            each.join()
        too_late.release(late_count)
        extra_end.release()
        for each in (*threads, extra):
            each.join()
        assert begun.acquire(timeout=5) and not route._failed
        assert route._most < 0.8 * expected


def test_a_cache_was_asked_for_more_until_answers_were_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each late one is fetched twice. Slow answers say it before."""
    network, route, now = CacheNetwork("http://127.0.0.1:9"), Route(), 1000.0
    monkeypatch.setattr("ffserve.store.cache_network.time.monotonic", lambda: now)

    def answers(count: int, seconds: float) -> float:
        def attempt() -> int:
            nonlocal now
            now += seconds
            return 1

        for _ in range(count):
            assert route.fetch(network, "o", attempt) == 1
        return route._most

    first = route._most
    assert 1 < first < answers(20, 0.1) < answers(500, 0.1) == ORIGIN_THREADS
    assert answers(1, ANSWER_S - 0.1) == ORIGIN_THREADS / 2
    assert answers(9, ANSWER_S - 0.1) == first, "a slow cache is a cache"
    assert answers(500, 0.1) == ORIGIN_THREADS and not route._failed and not network.faults


def test_records_that_came_wrong_from_the_cache_come_from_the_origin(
    origin: HttpOrigin, cache: SharedCache, tmp_path: Path
) -> None:
    samples = samples_of(100, 6000)
    url = served(origin, tmp_path, samples)
    with ffserve.open(url, server="off") as reader:
        cache.fault = "bytes"
        assert plain(reader.read(range(100))) == samples
    assert cache.asked


def test_a_file_did_not_open_whose_tables_came_wrong_from_the_cache(
    origin: HttpOrigin, cache: SharedCache, tmp_path: Path
) -> None:
    samples = samples_of(100, 6000)
    url = served(origin, tmp_path, samples)
    cache.fault = "bytes"
    with ffserve.open(url, server="off") as reader:
        assert plain(reader.read(range(100))) == samples
    assert cache.asked


def options_of(tmp_path: Path, cache: SharedCache, **more: Any) -> dict[str, Any]:
    return daemon_options(tmp_path, options=("--store-cache", cache.address), **more)


@pytest.mark.parametrize("fault", [None, *MARKED])
def test_a_daemon_reads_by_the_cache_whatever_becomes_of_it(
    origin: HttpOrigin, tmp_path: Path, fault: str | int | None
) -> None:
    samples = samples_of(300, 6000)
    url = served(origin, tmp_path, samples)
    expect = [FAILED, AGAIN, r"store: block \d+ of .* had come damaged", r"cannot .*"]
    with (
        shared_cache(tmp_path / "c") as cache,
        serving(**options_of(tmp_path, cache, expect=expect)) as daemon,
        daemon.open(url) as reader,
    ):
        seen = len(cache.asked)
        cache.fault, begun = fault, time.monotonic()
        assert plain(reader.read(range(300))) == samples
        assert time.monotonic() - begun < LOST_S + (0.5 if fault != "bytes" else 5)
        assert len(cache.asked) > seen
        assert all(a % BLOCK == 0 and b - a < BLOCK for a, b in ranges(cache))
        facts = daemon.status()["store"]
        assert (facts["cache_faults"] > 0) == (fault is not None)
        assert facts["from_cache"] <= facts["fetched"]
        if fault is None:
            assert facts["from_cache"] == facts["fetched"] == origin.total


def test_what_one_daemon_fetched_is_not_fetched_again_for_another(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    samples = samples_of(300, 6000)
    url = served(origin, tmp_path, samples)
    with shared_cache() as cache:
        for k in range(3):
            (tmp_path / str(k)).mkdir()
            with (
                serving(**options_of(tmp_path / str(k), cache)) as daemon,
                daemon.open(url) as reader,
            ):
                assert plain(reader.read(range(300))) == samples
        assert origin.total == len(origin.files["a.ffr"])


def test_nodes_with_the_same_order_asked_the_cache_for_the_same_blocks_at_once(
    origin: HttpOrigin, cache: SharedCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = identify(origin.put("a", bytes(60 * BLOCK)))
    asked = []
    for k in range(4):
        if k == 3:
            monkeypatch.delenv("FFSERVE_STORE_CACHE")
        origin.spans.clear()
        cache.asked.clear()
        store = Store(str(tmp_path / str(k)), 1 << 30, BLOCK)
        fetcher = Fetcher(store, threads=1, fetch_size=BLOCK)
        opened = fetcher.open(known)
        firsts = np.arange(60, dtype=np.int32)
        arena = ServerState(ServerConfig(arena_size_bytes=16 << 20))
        parts = fetcher, arena.memory.table, arena.memory.directory
        looking = fetches.Fetches(*parts, lambda load: None)
        progress = JobProgress("job", 60, 0, 60)
        pieces: list[Any] = [np.arange(60, dtype=np.uint32)]
        progress.orders[0] = AnnouncedOrder(60, 0, np.ones(60, np.uint8), pieces, None)
        looking.add(0, RemoteShard(opened.stored, {(1, 0): opened}, firsts, firsts))
        looking._followers[progress] = {(1, 0): None}
        origin.stalled.set()
        looking.look_ahead(progress, [0], 1.0)
        origin.stalled.clear()
        until(lambda each=opened.stored: not len(each.missing(np.arange(60))), "all is there")
        got = [first for first, _ in ranges(cache, sort=False)] or [b for _, b, _ in origin.spans]
        asked.append([first // BLOCK for first in got])
        looking.close()
        fetcher.close(opened)
        arena.close()
        store.abandon()
    for order in asked[:3]:
        assert sorted(order) == list(range(60)) and order != list(range(60))
        assert all(order.index(k) < order.index(j) for k in range(25) for j in range(2 * k + 4, 60))
    assert asked[0] != asked[1] != asked[2] != asked[0]
    assert asked[3] == list(range(60))


def test_a_private_object_came_from_the_cache_to_who_may_not_read_it(
    origin: HttpOrigin, cache: SharedCache
) -> None:
    """Each access is proven at the origin, although the cache has the object."""
    origin.put("bucket/a", bytes(3 * BLOCK))
    right, wrong = (
        Access(json.dumps({"s3": {**S3, "key": key, "endpoint_url": origin.url}}))
        for key in ("right", "wrong")
    )
    origin.admits = lambda given: "Credential=right/" in given
    version = identify("s3://bucket/a", right)
    origin.admits = lambda given: not given or "Credential=right/" in given  # signed in the query
    assert RemoteFile(version, right, BLOCK).read(0, BLOCK) == bytes(BLOCK)
    assert cache.kept and not cache.fault
    files = remote.RemoteFiles(ServerConfig(store_directory=str(Path(os.environ["FFSERVE_STORE"]))))
    cache_network.choose(CacheNetwork(cache.address))
    known = len(cache.asked)
    for access, refused in ((wrong, True), (right, False)):
        one = remote.WantedFile(0, version, access, (7, 7), "x", "s3://bucket", (0, 0, 0, 0, 0))
        peer = type("Peer", (), {"owner": (7, 7), "account": "7"})()
        try:
            [opened] = files.identify([one], peer)  # type: ignore[arg-type]
        except AccessDenied:
            assert refused and len(cache.asked) == known
        else:
            assert not refused
            files.fetcher.content(opened, 0, 2 * BLOCK)
            assert len(cache.asked) > known
            files.close([opened])
    files.fetcher.store.abandon()


def test_a_process_that_may_not_read_an_object_got_it_from_the_cache(
    origin: HttpOrigin, cache: SharedCache
) -> None:
    """A listing named the object; who may list may not read, perhaps."""
    url = origin.put("a", bytes(BLOCK))
    version = identify(url)
    assert RemoteFile(version, block_size=BLOCK).read(0, 9) == bytes(9)
    known = len(cache.asked)
    origin.status = 403
    with pytest.raises(Exception, match="denies access"):
        RemoteFile(version, block_size=BLOCK).read(0, 9)
    assert len(cache.asked) == known


@pytest.mark.parametrize("options", [S3, {**S3, "requester_pays": True}], ids=["usual", "payer"])
def test_no_header_with_credentials_goes_to_the_cache(
    origin: HttpOrigin, cache: SharedCache, options: dict[str, Any]
) -> None:
    origin.put("bucket/a b.bin", bytes(BLOCK))
    access = Access(json.dumps({"s3": {**options, "endpoint_url": origin.url}}))
    file = RemoteFile(identify("s3://bucket/a b.bin", access), access, BLOCK)
    for _ in range(2):
        assert file.read(0, BLOCK) == bytes(BLOCK)
    first, second = cache.asked
    assert first.address == second.address, "a URL is signed once"
    assert "authorization" not in first.headers
    assert not any(name.startswith("x-amz") for name in first.headers)
    query = dict(parse_qsl(urlsplit(f"//{first.address}").query, strict_parsing=True))
    assert query["X-Amz-Security-Token"] == "session" and query["X-Amz-SignedHeaders"] == "host"
    assert ("x-amz-request-payer" in query) == ("requester_pays" in options)
    assert "geheim" not in str(cache.asked)
    assert origin.sent["bucket/a b.bin"] == BLOCK, "and kept under its address"


def test_what_is_not_signed_for_one_object_stays_between_daemon_and_origin(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    content = bytes(BLOCK)
    url = origin.put("a", content)
    origin.put("account/box/a", content)
    account = {"endpoint_url": f"{origin.url}/account"}
    secrets: list[tuple[str, dict[str, Any], bool]] = [
        (f"{url}?token=geheim", {}, True),
        (url, {"http": {"headers": {"Authorization": "Bearer geheim"}}}, False),
        (url.replace("//", "//user:geheim@"), {}, False),
        ("az://box/a", {"abfs": {**account, "sas_token": "sig=geheim"}}, True),
        ("az://box/a", {"abfs": {**account, "token": "geheim"}}, False),
    ]  # fmt: skip
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key,
         "-out", certificate, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    with (
        shared_cache() as plain_one,
        shared_cache(tmp_path / "c") as local,
        shared_cache(context=context) as sealed,
    ):
        for cache in (plain_one, local, sealed):
            files = map(str, (certificate, key, certificate))
            network = CacheNetwork(cache.address, *(files if cache is sealed else ()))
            cache_network.choose(network)
            for address, options, if_private in secrets:
                cache.asked.clear()
                access = Access(json.dumps(options))
                file = RemoteFile(identify(address, access), access, BLOCK)
                assert file.read(0, BLOCK) == content
                assert bool(cache.asked) == (if_private and cache is not plain_one), address
                assert not any("authorization" in each.headers for each in cache.asked)
            assert network.faults == 0
        cache_network.choose(CacheNetwork(sealed.address, authorities=str(certificate)))
        assert RangedObject(identify(url)).ask(0, BLOCK).result() == content
        assert cache_network.current().faults == 1, "it wants a certificate"  # type: ignore[union-attr]


@pytest.mark.stores
def test_signatures_of_s3_are_those_of_botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    auth = pytest.importorskip("botocore.auth")
    request = pytest.importorskip("botocore.awsrequest").AWSRequest
    credentials = pytest.importorskip("botocore.credentials").Credentials(
        "who", "geheim", "session"
    )
    path = "bucket/some dir/ü+&%=~.bin"
    system, _ = scheme_of("s3://x").connect("s3://x/y", {**S3, "endpoint_url": "https://host:7"})
    url = system.signed({**S3, "endpoint_url": "https://host:7"}, path, "").url
    query = dict(parse_qsl(urlsplit(url).query, strict_parsing=True))
    monkeypatch.setattr(auth, "get_current_datetime", lambda *_: _stamped(query["X-Amz-Date"]))
    theirs = request("GET", url.partition("?")[0])
    auth.S3SigV4QueryAuth(credentials, "s3", "eu-west-1", expires=900).add_auth(theirs)
    assert dict(parse_qsl(urlsplit(theirs.url).query)) == query


def _stamped(text: str) -> Any:
    from datetime import datetime, timezone

    return datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)


def test_signatures_of_google_are_those_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    signing = pytest.importorskip("google.cloud.storage._signing")
    kind = pytest.importorskip("google.oauth2.service_account").Credentials
    made = ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"]
    key = subprocess.run(made, capture_output=True, text=True, check=True).stdout
    options = {"client_email": "a@b", "private_key": key, "user_project": "payer"}
    system, _ = scheme_of("gs://x").connect("gs://x/y", options)
    url = system.signed(options, "bucket/some dir/ü+&%=~.bin", "17").url
    query = dict(parse_qsl(urlsplit(url).query, strict_parsing=True))
    account = kind.from_service_account_info(
        {"client_email": "a@b", "private_key": key, "token_uri": "https://none", "type": ""}
    )
    stamp = query["X-Goog-Date"]
    monkeypatch.setattr(signing, "get_v4_now_dtstamps", lambda: (stamp, stamp[:8]))
    theirs = signing.generate_signed_url_v4(
        account, "/bucket/some%20dir/%C3%BC%2B%26%25%3D~.bin", 900, generation="17",
        query_parameters={"userProject": "payer"}, _request_timestamp=stamp,
    )  # fmt: skip
    assert url.partition("?")[0] == theirs.partition("?")[0]
    assert dict(parse_qsl(urlsplit(theirs).query)) == query
    for without in ({"token": "x"}, {"refresh_token": "x"}):
        assert system.signed(without, "bucket/a", "17") is None
    anonymous = system.signed({}, "bucket/a", "17").url
    assert anonymous == "https://storage.googleapis.com/bucket/a?generation=17"


def test_signatures_of_azure_are_those_of_its_package() -> None:
    blob = pytest.importorskip("azure.storage.blob._shared_access_signature")
    options = {"account_name": "name", "account_key": "Z2VoZWlt"}
    system, _ = scheme_of("az://x").connect("az://x/y", options)
    url = system.signed(options, "box/some dir/ü+&%=~.bin", "").url
    query = dict(parse_qsl(urlsplit(url).query, strict_parsing=True))
    maker = blob.BlobSharedAccessSignature("name", account_key="Z2VoZWlt")
    maker.x_ms_version = query["sv"]
    theirs = maker.generate_blob("box", "some dir/ü+&%=~.bin", permission="r", expiry=query["se"])
    assert dict(parse_qsl(theirs)) == query
    start = "https://name.blob.core.windows.net/box/some%20dir/%C3%BC%2B%26%25%3D~.bin?"
    assert url.startswith(start)
    for without in ({"token": "x"}, {"client_secret": "x"}):
        assert system.signed({"account_name": "name", **without}, "box/a", "") is None


def test_an_object_without_a_version_does_not_come_from_the_cache(
    origin: HttpOrigin, cache: SharedCache
) -> None:
    origin.etags = False
    opened = RangedObject(identify(origin.put("a", bytes(BLOCK))))
    assert bytes_of(opened.ask(0, 9)) == bytes(9)
    assert not cache.asked


def test_a_forked_process_asks_the_cache_by_connections_of_its_own(
    origin: HttpOrigin, cache: SharedCache
) -> None:
    content = random.Random(1).randbytes(2 * BLOCK)
    opened = RangedObject(identify(origin.put("a", content)))
    assert bytes_of(opened.ask(0, BLOCK)) == content[:BLOCK]
    child = os.fork()
    if not child:
        opened.after_fork()
        right = bytes_of(opened.ask(BLOCK, 2 * BLOCK)) == content[BLOCK:]
        network = cache_network.current()
        os._exit(0 if right and network is not None and not network.faults else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes_of(opened.ask(0, BLOCK)) == content[:BLOCK]


def test_settings_of_a_cache_that_cannot_be(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FFSERVE_STORE_CACHE", "cache:80")
    with pytest.raises(UsageError, match="FFSERVE_STORE_CACHE: invalid address of a cache"):
        cache_network.current()
    certificate = {"store_cache_certificate": str(tmp_path / "none")}
    for address, text in (
        ("http://host:80", "not reached by https"),
        ("https://host:80", "cannot be used"),
    ):
        with pytest.raises(UsageError, match=text):
            remote.try_store(ServerConfig(store_cache=address, **certificate))  # type: ignore[arg-type]


def test_an_own_daemon_uses_the_cache_of_the_process_that_starts_it(
    origin: HttpOrigin, cache: SharedCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from own_daemons import own_daemons, use

    samples = samples_of(100, 6000)
    url = served(origin, tmp_path, samples)
    with own_daemons(tmp_path) as socket:
        use(socket, monkeypatch)
        monkeypatch.setenv("FFSERVE_STORE_SIZE", "64MiB")
        with ffserve.open(url, server="start") as reader:
            assert plain(reader.read(range(100))) == samples
    assert cache.asked and origin.total == len(origin.files["a.ffr"])
