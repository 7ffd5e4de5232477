"""`ffserve run` and `ffserve stage` with origins whose listings are hostile."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from daemon import until

from ffserve.store.origin import file_system, find

pytestmark = pytest.mark.check

Page = Callable[[dict[str, str]], Iterator[bytes]]


@contextmanager
def listing(page: Page, kind: str, *, sized: bool = False) -> Iterator[str]:
    """An origin whose every answer is what `page` makes of the query; yield its address. Args:
    sized: it says the size of its answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1" if sized else "HTTP/1.0"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            if "list-type" not in query and not url.path.endswith("/") and kind != "text/html":
                return self.send_error(404)
            if kind == "text/html" and not url.path.endswith("/"):
                self.send_response(200)
                self.send_header("Content-Length", "1")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(b"x")
                return None
            parts = page(query)
            self.send_response(200)
            self.send_header("Content-Type", kind)
            if sized:
                whole = b"".join(parts)
                self.send_header("Content-Length", str(len(whole)))
                parts = iter([whole])
            self.end_headers()
            if self.command == "GET":
                try:
                    for part in parts:
                        self.wfile.write(part)
                except OSError:
                    pass  # the client has had enough
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.stores
def test_the_next_page_comes_while_one_is_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("botocore")
    asked = []

    def page(query: dict[str, str]) -> Iterator[bytes]:
        asked.append(at := int(query.get("continuation-token", "0")))
        names = [f"d/{at}-{k}.ffr" for k in range(3)]
        yield keys(names, str(at + 1) if at < 4 else "")

    with listing(page, "text/xml", sized=True) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        system, path = file_system("s3://bucket/d")
        for _ in range(2):
            asked.clear()
            entries = system.every(path)
            assert next(entries)["name"] == "bucket/d/0-0.ffr"
            until(lambda: asked == [0, 1], "the second page is asked for")
            entries.close()  # what comes is not taken for an answer to the next request
        asked.clear()
        assert len(list(system.every(path))) == 15 and asked == [0, 1, 2, 3, 4]


@pytest.mark.stores
def test_a_listing_takes_the_memory_of_the_files_that_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60,000 objects took 60 MB, also where one of them was wanted."""
    pytest.importorskip("botocore")

    def page(query: dict[str, str]) -> Iterator[bytes]:
        at = int(query.get("continuation-token", "0"))
        names = [f"d/{at:03}-{k:04}{'.ffr' if (at, k) == (7, 5) else ''}" for k in range(1000)]
        text = keys(names, str(at + 1))
        yield (
            text
            if at < 59
            else text.replace(b"<NextContinuationToken>60<", b"<X>60<").replace(
                b"</NextContinuationToken>", b"</X>"
            )
        )

    with listing(page, "text/xml", sized=True) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        find("s3://bucket/d", (".ffr",))  # imports what it needs
        tracemalloc.start()
        try:
            for options in ({}, {"below": True}):
                files, _ = find("s3://bucket/d", (".ffr",), **options)
                assert [each.url for each in files] == ["s3://bucket/d/007-0005.ffr"]
            assert tracemalloc.get_traced_memory()[1] < 12 << 20
        finally:
            tracemalloc.stop()


def links(*names: str) -> Page:
    text = "".join(f'<a href="{name}">x</a>\n' for name in names).encode()
    return lambda query: iter([text])


def keys(names: list[str], token: str) -> bytes:
    """A page of the answer to ListObjectsV2."""
    found = "".join(
        f"<Contents><Key>{name}</Key><Size>1</Size><ETag>&quot;{name}&quot;</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for name in names
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
        f"<IsTruncated>true</IsTruncated>{found}"
        f"<NextContinuationToken>{token}</NextContinuationToken>"
        f"<KeyCount>{len(names)}</KeyCount></ListBucketResult>"
    ).encode()


LIMITS = "import ffserve.limits as l; l.MOST_PAGE_SIZE, l.MOST_LISTED = 1 << 20, 10_000"


def command(tmp_path: Path, what: str, url: str, code: int | None) -> str:
    """Run a command, which may write to one directory only; return what it says.

    Args: code: that it ends with; None: 0 or 2.
    """
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True, exist_ok=True)
    endpoint, _, _ = url.partition("/bucket")
    words = {"stage": ["stage", url, "-o", "out"], "run": ["run", "--input", url, "--", "true"]}
    environment = {
        **os.environ,
        "FFSERVE_STORE": str(tmp_path / "store"),
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_ENDPOINT_URL": os.environ.get("TEST_ENDPOINT", endpoint),
    }
    program = f"{LIMITS}\nfrom ffserve.cli import main\nraise SystemExit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *words[what]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=inside,
        env=environment,
        timeout=100,
        check=False,
    )
    said = done.stdout.decode()
    assert done.returncode in ((0, 2) if code is None else (code,)), said
    assert "Traceback" not in said, said
    assert {each.name for each in tmp_path.iterdir()} <= {"a", "cache", "store"}
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["b"]
    return said


@pytest.mark.parametrize("what", ["stage", "run"])
@pytest.mark.parametrize(
    "name", ["../up", "a/../../up", "/other/absolute", "a//b", "x%00y", "z" * 300, "./x"]
)
def test_names_lead_nowhere_else(tmp_path: Path, what: str, name: str) -> None:
    """It is refused, or no link of this directory; `command` looks for what it must not do."""
    with listing(links("good", name), "text/html") as address:
        said = command(tmp_path, what, f"{address}/d/", None)
    inside = tmp_path / "a" / "b"
    files = {str(each.relative_to(inside)) for each in inside.rglob("*") if each.is_file()}
    wrong = "no local file can have the name" in said or "is a file and" in said
    assert not files if wrong else {each.partition("/")[2] for each in files} >= {"good"}, said


def test_names_that_differ_in_case_are_two_files(tmp_path: Path) -> None:
    with listing(links("Name", "name", "NAME"), "text/html") as address:
        command(tmp_path, "stage", f"{address}/d/", 0)
    out = tmp_path / "a" / "b" / "out"
    assert sorted(each.name for each in out.iterdir() if each.is_file()) == ["NAME", "Name", "name"]


@pytest.mark.parametrize("what", ["stage", "run"])
def test_a_page_without_end_took_all_memory(tmp_path: Path, what: str) -> None:
    def page(query: dict[str, str]) -> Iterator[bytes]:
        for number in itertools.count():
            yield f'<a href="{number}">x</a>\n'.encode() * 1000

    with listing(page, "text/html") as address:
        said = command(tmp_path, what, f"{address}/d/", 1)
    assert "lists its files in more than 1 MiB" in said and f"{address}/d/" in said


@pytest.mark.stores
@pytest.mark.parametrize("what", ["stage", "run"])
@pytest.mark.parametrize("kind", ["files", "empty pages", "the same page"])
def test_pages_of_a_bucket_without_end_took_all_memory(
    tmp_path: Path, what: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("botocore")
    numbers = itertools.count()

    def page(query: dict[str, str]) -> Iterator[bytes]:
        number = next(numbers)
        names = [f"d/{number}-{k}" for k in range(1000)] if kind == "files" else []
        token = "same" if kind == "the same page" else f"t{number}"
        yield keys(names, token)

    with listing(page, "application/xml") as address:
        monkeypatch.setenv("TEST_ENDPOINT", address)
        said = command(tmp_path, what, "s3://bucket/d/", 1)
    expected = "the same page again" if kind == "the same page" else "more than 10000 files"
    assert expected in said and "s3://bucket/d" in said, said
