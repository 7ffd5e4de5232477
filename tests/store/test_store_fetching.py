"""Fetching from an HTTP origin: each byte once, retries, errors, versions, other processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from daemon import until
from origins import HttpOrigin, ask_origins, http_origin

from ffserve.errors import AccessDenied, FFServeError, MissingFile, ReadError, UsageError
from ffserve.store import fetching, urls
from ffserve.store.credentials import Access
from ffserve.store.directory import Store
from ffserve.store.fetching import NOW, Fetcher, OpenObject, identity_of, listing
from ffserve.store.origin import ObjectVersion, OriginError
from ffserve.store.ranges import pipelined
from ffserve.store.schemes.scheme import Scheme

BLOCK = 64 << 10


@pytest.fixture
def fetcher(tmp_path: Path) -> Iterator[Fetcher]:
    store = Store(str(tmp_path / "store"), 100 * BLOCK, BLOCK)
    yield Fetcher(store)
    store.abandon()


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def opened(fetcher: Fetcher, url: str) -> OpenObject:
    return fetcher.open(identity_of(url))


def test_each_byte_comes_once_however_many_ask(server: HttpOrigin, fetcher: Fetcher) -> None:
    content = noise(20 * BLOCK + 17)
    file = opened(fetcher, server.put("a.bin", content))
    rng = random.Random(1)
    wrong: list[object] = []

    def read() -> None:
        for _ in range(20):
            start = rng.randrange(len(content))
            end = min(start + rng.randrange(3 * BLOCK), len(content))
            if fetcher.content(file, start, end) != content[start:end]:
                wrong.append((start, end))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetcher.content(file, 0, len(content)) == content
    assert not wrong
    assert server.sent["a.bin"] == len(content)


def test_an_object_is_proven_by_its_first_block_or_by_a_request_of_its_own(
    server: HttpOrigin, fetcher: Fetcher
) -> None:
    """Each user with a request of that user's own, whoever has fetched the block."""
    known = identity_of(server.put("a.bin", noise(3 * BLOCK)))

    def proven(who: str, identity: ObjectVersion = known, domain: str = "") -> tuple[int, int]:
        server.requests.clear()
        server.who.clear()
        access = Access(json.dumps({"http": {"headers": {"X-Who": who, "Authorization": who}}}))
        file = fetcher.open(identity, domain=domain, access=access)
        try:
            fetcher.prove(file)
        finally:
            fetcher.close(file)
            assert set(server.who) == {who}
        assert file.remote.proven
        return server.requests["HEAD"], server.requests["GET"]

    keeper = fetcher.open(known)
    assert [proven("1"), proven("2"), proven("1")] == [(0, 1), (1, 0), (1, 0)]
    assert server.sent["a.bin"] == BLOCK
    untimed = replace(known, modified=0)
    server.admits = lambda who: who != "3"
    for domain in ("", "3"):  # the block is there, and it is not
        with pytest.raises(AccessDenied, match="denies access"):
            proven("3", domain=domain)
        with pytest.raises(ReadError, match="changed at the origin"):
            proven("1", untimed, domain)
    server.put("a.bin", noise(3 * BLOCK, 1))
    for domain in ("", "4"):
        with pytest.raises(ReadError, match="changed at the origin"):
            proven("1", domain=domain)
    fetcher.close(keeper)


def test_proofs_of_many_objects_are_asked_for_before_they_are_needed(
    server: HttpOrigin, fetcher: Fetcher
) -> None:
    """What somebody else has brought in the meantime proves nothing."""
    contents = [noise(BLOCK + 1, k) for k in range(13)]
    many = [server.put(f"{k}.bin", content) for k, content in enumerate(contents)]
    identities = list(map(identity_of, many))
    access = Access(json.dumps({"http": {"headers": {"Authorization": "alice"}}}))
    others = fetcher.open(identities[7])

    def proven(domain: str) -> list[bool]:
        files = [fetcher.open(each, domain=domain, access=access) for each in identities]

        def prove(file: OpenObject) -> bool:
            if file.stored is others.stored:
                assert fetcher.ask(others, [0], NOW, None)[0].result() is True
            fetcher.prove(file)
            return file.remote.proven

        server.requests.clear()
        found = list(pipelined(prove, fetcher.send_proof, files, many, 4))
        for file, content in zip(files, contents, strict=True):
            assert fetcher.content(file, 0, BLOCK) == content[:BLOCK]
            fetcher.close(file)
        return found

    server.held.update(f"{k}.bin" for k in range(4))
    with ThreadPoolExecutor(1) as pool:
        all_proven = pool.submit(proven, "")
        try:
            until(lambda: server.answering == 4, "four connections are open")
        finally:
            server.held.clear()
        assert all_proven.result() == [True] * 13
    assert server.requests == {"GET": 13 + 1, "HEAD": 1}
    assert proven("") == [True] * 13
    assert server.requests == {"HEAD": 13}
    server.admits = lambda who: who != "alice"
    with pytest.raises(AccessDenied, match=r"0.bin: the origin denies access"):
        proven("domain")
    fetcher.close(others)


def _read_all(url: str, directory: str, barrier: object, results: object) -> None:
    fetcher = Fetcher(Store(directory, 100 * BLOCK, BLOCK))
    file = opened(fetcher, url)
    barrier.wait()  # type: ignore[attr-defined]
    got = fetcher.content(file, 0, file.stored.size)
    results.put((len(got), got[:100], got[-100:]))  # type: ignore[attr-defined]


@pytest.mark.check
def test_processes_that_start_together_fetch_each_byte_once(
    server: HttpOrigin, tmp_path: Path
) -> None:
    content = noise(60 * BLOCK)
    server.rate = 20e6
    url = server.put("a.bin", content)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_read_all, args=(url, str(tmp_path / "store"), barrier, results))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found == [(len(content), content[:100], content[-100:])] * 4
    assert server.sent["a.bin"] == len(content)


@pytest.mark.check
def test_soonest_needed_first(server: HttpOrigin, fetcher: Fetcher) -> None:
    fetcher = Fetcher(fetcher.store, threads=1, fetch_size=BLOCK)
    file = opened(fetcher, server.put("a.bin", noise(60 * BLOCK)))
    server.stalled.set()
    before = server.requests["GET"]
    late = fetcher.ask(file, range(20, 60), 2000.0, None)
    until(lambda: server.requests["GET"] > before, "the first is on its way")
    soon = fetcher.ask(file, range(20), 1000.0, None)
    now = fetcher.ask(file, [59], NOW, None)
    server.stalled.clear()
    for future in (*late.values(), *soon.values(), *now.values()):
        assert future.result(30) is True
    order = [begin // BLOCK for _, begin, _ in server.spans]
    assert order == [20, 59, *range(20), *range(21, 59)]


def test_neighbours_come_by_one_request(server: HttpOrigin, fetcher: Fetcher) -> None:
    fetcher = Fetcher(fetcher.store, threads=1, fetch_size=8 * BLOCK)
    content = noise(40 * BLOCK + 9)
    file = opened(fetcher, server.put("a.bin", content))
    server.stalled.set()
    before = server.requests["GET"]
    first = fetcher.ask(file, [0], NOW, None)
    until(lambda: server.requests["GET"] > before, "the first is on its way")
    apart = fetcher.ask(file, [30], 1000.0, None)
    run = fetcher.ask(file, [12, 9, 11, 7, 10], 1001.0, None)
    long = fetcher.ask(file, range(31, 38), 1002.0, None)
    rest = fetcher.ask(file, range(38, 41), 1003.0, None)
    server.stalled.clear()
    asked = first, apart, run, long, rest
    for future in itertools.chain.from_iterable(each.values() for each in asked):
        assert future.result(30) is True
    spans = [(begin // BLOCK, -(-end // BLOCK)) for _, begin, end in server.spans]
    assert spans == [(0, 1), (30, 38), (9, 13), (7, 8), (38, 41)]
    assert fetcher.content(file, 0, len(content)) == content
    assert server.sent["a.bin"] == len(content)


def test_neighbours_fail_together_and_are_given_back(server: HttpOrigin, fetcher: Fetcher) -> None:
    ask_origins(0.3)
    content = noise(40 * BLOCK)
    file = opened(fetcher, server.put("a.bin", content))
    fetcher.content(file, 0, 1)
    used, server.status = fetcher.store.used, 403
    for future in fetcher.ask(file, range(1, 40), NOW, None).values():
        with pytest.raises(AccessDenied):
            future.result(30)
    until(lambda: not fetcher._tasks, "nothing is on its way")
    assert fetcher.store.used == used
    server.status = 0
    assert fetcher.content(file, 0, len(content)) == content


def test_only_reads_in_order_fetch_ahead(server: HttpOrigin, fetcher: Fetcher) -> None:
    file = opened(fetcher, server.put("a.bin", noise(20 * BLOCK)))
    read, into = fetcher.read_at(file), memoryview(bytearray(BLOCK))
    read(0, into)  # the head of a file, at its opening
    until(lambda: not fetcher._tasks, "nothing is on its way")
    assert server.sent["a.bin"] == BLOCK
    read(BLOCK, into)
    until(lambda: not fetcher._tasks, "nothing is on its way")
    assert server.sent["a.bin"] > 2 * BLOCK


def test_failures_that_pass_are_survived(server: HttpOrigin, fetcher: Fetcher) -> None:
    content = noise(20 * BLOCK)
    file = opened(fetcher, server.put("a.bin", content))
    server.cut_after, server.cuts = 1, 5
    assert fetcher.content(file, 0, 8 * BLOCK) == content[: 8 * BLOCK]
    server.fail_until = time.monotonic() + 0.7
    assert fetcher.content(file, 8 * BLOCK, len(content)) == content[8 * BLOCK :]


@pytest.mark.check
def test_a_failing_origin_is_asked_by_one_thread_at_a_time(
    server: HttpOrigin, fetcher: Fetcher, caplog: pytest.LogCaptureFixture
) -> None:
    ask_origins(2.0)
    file = opened(fetcher, server.put("a.bin", noise(60 * BLOCK)))
    fetcher.content(file, 0, 1)
    server.status = 503
    before = server.requests["GET"]
    futures = fetcher.ask(file, range(1, 60), NOW, None)
    for future in futures.values():
        with pytest.raises(ReadError, match=r"throttled or overloaded \(status 503\)") as failed:
            future.result(30)
        assert failed.value.path == f"{server.url}/a.bin"
    assert server.requests["GET"] - before < 60
    assert "the origin does not answer, so it is asked less often" in caplog.text
    caplog.clear()
    server.status = 0

    def found() -> bytes:
        with contextlib.suppress(ReadError):  # until somebody tries whether it is back
            return fetcher.content(file, 5 * BLOCK, 6 * BLOCK)
        return b""

    block = server.files["a.bin"][5 * BLOCK : 6 * BLOCK]
    until(lambda: found() == block, "the origin is asked again")


def test_an_origin_that_hangs_holds_up_no_other(server: HttpOrigin, fetcher: Fetcher) -> None:
    with http_origin() as other:
        stuck = opened(fetcher, server.put("a.bin", noise(40 * BLOCK)))
        free = opened(fetcher, other.put("b.bin", noise(5 * BLOCK)))
        server.stalled.set()
        waiting = fetcher.ask(stuck, range(40), NOW, None)
        assert fetcher.content(free, 0, 5 * BLOCK) == other.files["b.bin"]
        assert not any(future.done() for future in waiting.values())
        server.stalled.clear()
        assert all(future.result(30) is True for future in waiting.values())


@pytest.mark.parametrize("conditional", [True, False])
def test_a_changed_object_is_never_mixed(
    server: HttpOrigin, fetcher: Fetcher, conditional: bool
) -> None:
    old, new = noise(4 * BLOCK, 1), noise(4 * BLOCK, 2)
    server.conditional = conditional
    url = server.put("a.bin", old)
    file = opened(fetcher, url)
    assert fetcher.content(file, 0, BLOCK) == old[:BLOCK]
    server.put("a.bin", new)
    with pytest.raises(ReadError, match="changed at the origin since it was opened"):
        fetcher.content(file, 0, 2 * BLOCK)
    assert fetcher.content(file, 0, BLOCK) == old[:BLOCK], "what was fetched is still there"
    again = opened(fetcher, url)
    assert fetcher.content(again, 0, len(new)) == new


def test_an_origin_that_lies(server: HttpOrigin, fetcher: Fetcher) -> None:
    ask_origins(0.3)
    content = noise(4 * BLOCK)
    file = opened(fetcher, server.put("a.bin", content))
    server.short = 10
    with pytest.raises(ReadError, match=f"sent {BLOCK - 10} bytes for a range of {BLOCK}"):
        fetcher.content(file, 0, BLOCK)
    server.short, server.ranges = 0, False
    fetching._breakers.clear()
    with pytest.raises(ReadError, match="ignores ranges"):
        fetcher.content(file, 2 * BLOCK, 3 * BLOCK)
    assert not file.stored.state.words.any()
    assert server.sent["a.bin"] < 3 * len(content)
    server.ranges = True
    assert fetcher.content(file, 0, len(content)) == content


def test_errors_name_the_url_and_the_cause(server: HttpOrigin) -> None:
    ask_origins(0.2, 0.2)
    url = server.put("a.bin", b"x" * 100)
    with pytest.raises(MissingFile, match="no such file at the origin") as missing:
        identity_of(f"{server.url}/other")
    assert missing.value.path == f"{server.url}/other"
    server.password = "geheim"
    with pytest.raises(AccessDenied, match="denies access") as denied:
        identity_of(f"{url}?token=falsch")
    assert "falsch" not in str(denied.value) and url in str(denied.value)
    assert identity_of(f"{url}?token=geheim").size == 100
    server.password = ""
    server.status = 503
    with pytest.raises(ReadError, match="503"):
        identity_of(url)
    with pytest.raises(ReadError, match="connection to the origin failed") as refused:
        identity_of("http://127.0.0.1:9/a.bin")
    assert "127.0.0.1:9/a.bin" in str(refused.value)
    with pytest.raises(UsageError, match="Protocol not known: nosuch"):
        identity_of("nosuch://a/b")


def test_an_origin_that_says_nothing_has_failed(
    server: HttpOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_origins(0.2, 0.2)
    monkeypatch.setattr(Scheme, "silent_s", 0.3)
    url = server.put("a.bin", b"x")
    server.stalled.set()
    with pytest.raises(ReadError, match="did not answer in time"):
        identity_of(url)


def test_patterns_and_directories(server: HttpOrigin) -> None:
    for name in ("d/b.ffr", "d/a.ffr", "d/c.txt", "d/.hidden.ffr"):
        server.put(name, name.encode())
    found = [each.url for each in listing(f"{server.url}/d/*.ffr")]
    assert found[-2:] == [f"{server.url}/d/a.ffr", f"{server.url}/d/b.ffr"]
    before = server.requests["HEAD"]
    assert [each.url for each in listing(f"{server.url}/d/", (".ffr",))] == found[-2:]
    assert server.requests["HEAD"] - before < 5, "of other files nothing is asked"
    with pytest.raises(MissingFile, match="no file at the origin matches this pattern"):
        listing(f"{server.url}/d/*.rec")
    with pytest.raises(MissingFile, match=r"contains no \*.rec"):
        listing(f"{server.url}/d/", (".rec",))


def test_a_full_disk_is_read_past(
    server: HttpOrigin, fetcher: Fetcher, caplog: pytest.LogCaptureFixture
) -> None:
    content = noise(6 * BLOCK)
    file = opened(fetcher, server.put("a.bin", content))
    fetcher.content(opened(fetcher, server.put("b.bin", b"b")), 0, 1)  # what is imported is there
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        assert fetcher.content(file, 10, len(content)) == content[10:]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert server.sent["a.bin"] == len(content)
    assert caplog.text.count("cannot write blocks, so reads pass the store") == 1
    caplog.clear()
    assert not file.stored.state.words.any()


def test_a_copy_to_another_file_system(server: HttpOrigin, fetcher: Fetcher) -> None:
    """The kernel does not copy from one to the other."""
    content = noise(6 * BLOCK + 17)
    file = opened(fetcher, server.put("a.bin", content))
    fd = os.memfd_create("copy")
    with os.fdopen(fd, "rb") as copy:
        fetcher.copy(file, fd, lambda: None)
        assert copy.read() == content


def test_an_origin_that_is_given_up_says_how_often_it_was_asked() -> None:
    breaker = fetching.Breaker(fetching.Patience(0.2))
    breaker.call(lambda: None)

    def fail() -> None:
        raise OriginError(ReadError("it fails", path="s3://b/x"), again=True)

    for _ in range(2):
        with pytest.raises(ReadError, match=r"s3://b/x: it fails; tried (once|\d+ times in \d+ s)"):
            breaker.call(fail)


def test_an_origin_that_has_never_answered_is_given_up_soon() -> None:
    """Its name may be wrong."""
    breaker, tried = fetching.Breaker(fetching.Patience(60.0, 0.2)), list[float]()

    def fail() -> None:
        tried.append(time.monotonic())
        again = len(tried) < 8
        raise OriginError(ReadError("it fails", path="s3://b/x"), again=again, answered=False)

    with pytest.raises(ReadError, match="it fails; tried"):
        breaker.call(fail)


def test_secrets_are_not_shown() -> None:
    assert urls.shown("sftp://joe:geheim@host:22/x") == "sftp://joe@host:22/x"
    assert urls.shown("https://h/a?X-Amz-Signature=1") == "https://h/a?…"
    assert urls.shown("s3://bucket/a?b") == "s3://bucket/a?b"
    assert urls.origin_of("s3://bucket/a/b") == "s3://bucket"


def test_what_is_a_url() -> None:
    for url in ("s3://b/x", "hdfs://h:1/x", "hf://datasets/a", "https://h", "simplecache::s3://b"):
        assert urls.is_url(url) == ("::" not in url)
    for path in ("/a/b", "a:b", "C:\\x", "file:///a", "://", "s3:/b"):
        assert not urls.is_url(path)


def test_damage_on_disk_is_fetched_again(
    server: HttpOrigin, fetcher: Fetcher, caplog: pytest.LogCaptureFixture
) -> None:
    content = noise(3 * BLOCK)
    file = opened(fetcher, server.put("a.bin", content))
    fetcher.content(file, 0, len(content))
    with open(file.stored.path, "rb+") as data:
        data.seek(BLOCK + 5)
        data.write(b"damage")
    assert fetcher.repair(file, np.arange(3))
    assert "block 1 of" in caplog.text
    caplog.clear()
    assert fetcher.content(file, 0, len(content)) == content
    assert server.sent["a.bin"] == 4 * BLOCK


def test_a_closed_object_is_refused(server: HttpOrigin, fetcher: Fetcher) -> None:
    file = opened(fetcher, server.put("a.bin", noise(3 * BLOCK)))
    fetcher.close(file)
    with pytest.raises(FFServeError, match="closed"):
        fetcher.content(file, 0, 1)
