"""HTTP for origins: connections, bodies, silence, redirects, forks, and answers that do not fit."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from daemon import until
from origins import http_origin, tls_context

from ffserve.errors import FFServeError, ReadError
from ffserve.limits import MOST_ORIGINS
from ffserve.store import fetching
from ffserve.store.credentials import Access
from ffserve.store.fetching import Patience
from ffserve.store.origin import ObjectVersion, OriginError, RemoteFile, identify
from ffserve.store.schemes.http import HttpFiles
from ffserve.store.web import CutError, Web, address_of
from ffserve.store.web_files import RenewedOptions

BODY = bytes(range(256)) * 800


@dataclass
class Scripted:
    """A server that answers with given bytes. answer: makes them of the head of a request; it ends
    the connection after those that end in `END`."""

    answer: Callable[[str], bytes]
    context: ssl.SSLContext | None = None
    url: str = ""
    connections: int = 0
    asked: list[str] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    def talk(self, connection: socket.socket) -> None:
        try:
            if self.context is not None:
                connection = self.context.wrap_socket(connection, server_side=True)
            with connection:
                waiting = b""
                while part := connection.recv(65536):
                    waiting += part
                    while b"\r\n\r\n" in waiting:
                        head, _, waiting = waiting.partition(b"\r\n\r\n")
                        self.asked.append(head.decode())
                        content = self.answer(head.decode())
                        connection.sendall(content.removesuffix(END))
                        if content.endswith(END):
                            return
        except OSError:
            pass  # the client went away


END = b"<END>"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextmanager
def scripted(
    answer: Callable[[str], bytes], context: ssl.SSLContext | None = None
) -> Iterator[Scripted]:
    server = Scripted(answer, context)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        scheme = "http" if context is None else "https"
        server.url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=server.serve, args=(listener,), daemon=True).start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)


def sized(content: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + content


def got(web: Web, url: str, most: int = 1 << 20) -> bytes:
    return web.request("GET", url, {}).content(most)


@pytest.fixture
def web() -> Web:
    return Web(5, 1)


def test_a_connection_serves_many_requests_and_a_closed_one_is_replaced(web: Web) -> None:
    with scripted(lambda _: sized(BODY)) as server:
        for _ in range(3):
            assert got(web, f"{server.url}/a?x=%20y") == BODY
        assert server.connections == 1
        assert server.asked[0].startswith("GET /a?x=%20y HTTP/1.1\r\nHost: 127.0.0.1:")
        server.answer = lambda _: sized(BODY) + END
        for _ in range(3):
            assert got(web, server.url) == BODY
            time.sleep(0.05)
        assert server.connections == 3


def test_an_idle_connection_that_ends_when_it_is_asked(web: Web) -> None:
    """The origin closes it at the moment of the request, which is made again once."""
    with scripted(lambda _: sized(b"x")) as server:
        assert got(web, server.url) == b"x"
        server.answer = lambda _: END if len(server.asked) == 2 else sized(b"y")
        assert got(web, server.url) == b"y"
        assert len(server.asked) == 3
        server.answer = lambda _: END
        with pytest.raises(ConnectionError, match="without an answer"):
            got(Web(5, 5), server.url)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;a=b\r\nabcd\r\n3\r\nefg\r\n"
         b"0\r\nTrailer: x\r\n\r\n", b"abcdefg"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\n\r\nall up to the end" + END, b"all up to the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + sized(b"after"), b"after"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + sized(b"after"), b"after"),
        (b"HTTP/1.1 204 None\r\n\r\n", b""),
        (b"HTTP/1.1 204 None\r\nTransfer-Encoding: chunked\r\n\r\n", b""),
        (sized(b"twice", "200 OK", "Content-Length: 5"), b"twice"),
        (sized(b"last", "200 OK", "Connection: close") + END, b"last"),
        (sized(b"many", "200 OK", *(f"x-amz-meta-{k}: a" for k in range(1000))), b"many"),
    ],
)  # fmt: skip
def test_bodies(web: Web, answer: bytes, body: bytes) -> None:
    with scripted(lambda _: answer) as server:
        for _ in range(2):
            assert got(web, server.url) == body
        whole = web.request("GET", server.url, {})
        parts = []
        while part := whole.read(3):
            parts.append(part)
        assert b"".join(parts) == body and all(len(part) == 3 for part in parts[:-1])


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (sized(BODY)[:-1] + END, CutError, "in the middle of an answer"),
        (sized(b"abc")[:-1] + END, CutError, "in the middle of an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Le" + END, CutError, "in the middle of an answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nab" + END, CutError, "middle"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + END, CutError, "middle"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", CutError, "middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n", ValueError, "invalid length"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", ConnectionError, "headers"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n", ValueError, "invalid length"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000, ConnectionError, "bytes of headers"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200_000, ConnectionError, "65536 bytes of headers"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", ConnectionError, "no valid HTTP: SSH"),
        (b"HTTP/1.1 200 OK\r\n" + END, CutError, "middle"),
        (b"HTTP/1.1 200 OK\r\nno header\r\n" + sized(b"ab")[17:], ConnectionError, "no header"),
        (sized(b"ab", "200 OK", "A : b"), ConnectionError, "no header"),
        (sized(b"ab", "200 OK", "A: b", " c: d"), ConnectionError, "no header"),
        (sized(b"ab", "200 OK", ": b"), ConnectionError, "no header"),
        (sized(b"ab", "OK"), ConnectionError, "no valid HTTP: HTTP/1.1 OK"),
        (sized(b"ab", "2000 OK"), ConnectionError, "no valid HTTP: HTTP/1.1 2000 OK"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100_000, ConnectionError, "bytes of headers"),
        (sized(b"ab", "200 OK", "Content-Length: 3"), ValueError, "invalid length"),
        (sized(b"", "200 OK", "Content-Length: " + "9" * 5000), ValueError, "invalid length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 18 + b"\r\n\r\nab" + END, CutError, "mid"),
        (sized(b"ab", "200 OK", "Transfer-Encoding: gzip, chunked"), ValueError, "unknown coding"),
        (CHUNKED + b"-1\r\n" + BODY, ValueError, "invalid length"),
        (CHUNKED + b"7FFFFFFFFFFFFFF0\r\n" + BODY + END, CutError, "middle"),
        (CHUNKED + b"9" * 100_000 + b"\r\n", ConnectionError, "bytes of headers"),
        (CHUNKED + (b"1;" + b"x" * 1000 + b"\r\na\r\n") * 200, ConnectionError, "bytes of headers"),
        (CHUNKED + b"0\r\n" + b"A: b\r\n" * 100_000, ConnectionError, "bytes of headers"),
        (b"", TimeoutError, "timed out"),
        (sized(BODY)[:-1], TimeoutError, "timed out"),
        (sized(b"x" * (1 << 21)), ValueError, "more than 1048576 bytes"),
    ],
)  # fmt: skip
def test_answers_that_are_none(web: Web, answer: bytes, kind: type[Exception], text: str) -> None:
    with scripted(lambda _: answer) as server:
        with pytest.raises(kind, match=text):
            got(web, server.url)
        server.answer = lambda _: sized(b"well")
        assert got(web, server.url) == b"well", "nothing of the first answer is left"


def test_a_long_body_comes_in_many_parts() -> None:
    """The interpreter makes few calls for it. An origin is silent only when nothing comes."""
    received = []

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ == "recv_into":
            received.append(function)

    def serve(listener: socket.socket) -> None:
        connection = listener.accept()[0]
        with connection:
            connection.recv(65536)
            connection.sendall(sized(30 * BODY)[: -30 * len(BODY)])
            for _ in range(30):
                connection.sendall(BODY)
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        begun = time.monotonic()
        sys.setprofile(note)
        try:
            body = got(Web(5, 1), f"http://127.0.0.1:{listener.getsockname()[1]}", 40 * len(BODY))
        finally:
            sys.setprofile(None)
        assert body == 30 * BODY
        assert len(received) < 6 + (time.monotonic() - begun) / 0.2


def test_redirects_end(web: Web) -> None:
    with scripted(lambda _: sized(b"", "302 Found", "Location: /again#here")) as server:
        assert web.request("GET", server.url, {}).status == 302
        with pytest.raises(ConnectionError, match="redirects without end"):
            web.request("GET", server.url, {}, follow=True)
        server.answer = lambda _: sized(b"", "302 Found", "Location: file:///etc/passwd")
        with pytest.raises(ValueError, match="not the URL of a web server"):
            web.request("GET", server.url, {}, follow=True)
        with pytest.raises(ValueError, match="more than one line"):
            web.request("GET", server.url, {"A": "b\r\n c: d"})
        server.answer = lambda _: sized(b"")
        web.request("POST", server.url, {"A": "ä"}, b"")
        assert {"A: ä", "Content-Length: 0"} <= set(server.asked[-1].split("\r\n"))
    assert address_of("https://[::1]/ä b%20#x").path == "/%C3%A4%20b%20"
    assert address_of("https://[::1]:8443/").place == "[::1]:8443"


def test_a_child_process_connects_anew(web: Web) -> None:
    with scripted(lambda _: sized(BODY)) as server:
        assert got(web, server.url) == BODY
        child = os.fork()
        if not child:
            os._exit(0 if got(web, server.url) == BODY else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert server.connections == 2
        assert got(web, server.url) == BODY
        assert server.connections == 2, "that of the parent is as it was"


def test_a_child_process_reads_no_answer_that_its_parent_waits_for(web: Web) -> None:
    with scripted(lambda _: sized(BODY)) as server:
        files = HttpFiles(web, RenewedOptions({}))
        assert files.ask("GET", server.url).content(1 << 20) == BODY
        sent = files.send("GET", server.url, {}, {})
        assert sent is not None
        child = os.fork()
        if not child:
            whole = files.ask("GET", server.url).content(1 << 20) == BODY
            os._exit(0 if whole else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert server.connections == 2
        assert files.ask("GET", server.url).content(1 << 20) == BODY
        assert server.connections == 2, "that of the parent is as it was"


def test_proxies_are_used_if_this_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(lambda _: sized(b"by the proxy")) as proxy:
        address = proxy.url.replace("http://", "http://user:p%40ss@")
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, address)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert got(Web(5, 5, proxies=True), "http://example.invalid/a") == b"by the proxy"
        assert proxy.asked[0].startswith("GET http://example.invalid/a HTTP/1.1\r\n")
        assert "Proxy-Authorization: Basic dXNlcjpwQHNz" in proxy.asked[0]
        proxy.answer = lambda _: sized(b"", "403 Forbidden")
        with pytest.raises(ConnectionError, match=r"proxy refuses a connection: .* 403"):
            got(Web(5, 5, proxies=True), "https://example.invalid/a")
        assert proxy.asked[1].startswith("CONNECT example.invalid:443 HTTP/1.")
        with scripted(lambda _: sized(b"directly")) as server:
            assert got(Web(5, 5, proxies=True), server.url) == b"directly"
        with pytest.raises(OSError, match=r"[Nn]ame"):
            got(Web(5, 5), "http://example.invalid/a")


def test_certificates_are_verified(tmp_path: Path) -> None:
    context, certificate = tls_context(tmp_path)
    with scripted(lambda _: sized(BODY), context) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            got(Web(5, 5), server.url)
        for verify in (certificate, False):
            web = Web(5, 5, verify=verify)
            assert [got(web, server.url) for _ in range(3)] == [BODY] * 3
        assert server.connections == 3, "each is used again"
        server.answer = lambda _: sized(BODY)[:-1]
        with pytest.raises(TimeoutError):
            got(Web(5, 0.3, verify=False), server.url)


# ---- ranges --------------------------------------------------------------------------------------

SIZE, TAG, TIME = 100_000, "one", "Sat, 28 Nov 2026 04:00:00 GMT"
CONTENT = (b"0123456789" * 10_000)[:SIZE]


def ranged(
    start: int, end: int, *, total: int = SIZE, tag: str = TAG, content: bytes | None = None,
    status: str = "206 Partial Content", time: str = TIME,
) -> bytes:  # fmt: skip
    headers = [f"Content-Range: bytes {start}-{end - 1}/{total}", f"Last-Modified: {time}"]
    headers += [f'ETag: "{tag}"'] if tag else []
    return sized(CONTENT[start:end] if content is None else content, status, *headers)


def read(answer: bytes, *, tag: str = TAG, head: bytes | None = None) -> bytes | FFServeError:
    """Read 40,000 bytes at 10,000 from an origin that answers so; return the error if it fails."""

    def answers(request: str) -> bytes:
        if request.startswith("HEAD"):
            return head or sized(b"")
        assert "Range: bytes=10000-49999" in request
        assert ("If-Match" in request) == bool(tag)
        return answer

    with scripted(answers) as server:
        version = ObjectVersion(f"{server.url}/a", SIZE, tag, 1_795_838_400)
        try:
            return RemoteFile(version).read(10_000, 50_000)
        except OriginError as error:
            return error.error


def test_a_range_of_the_version_that_is_wanted() -> None:
    wanted = CONTENT[10_000:50_000]
    assert read(ranged(10_000, 50_000)) == wanted
    assert read(ranged(10_000, 50_000, tag=""), tag="") == wanted
    assert read(ranged(10_000, 50_000, status="200 OK")) == wanted, "as rclone says it"
    whole = f"HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n"
    head = f'{whole}ETag: "{TAG}"\r\nLast-Modified: {TIME}\r\n\r\n'.encode()
    assert read(ranged(10_000, 50_000, tag=""), head=head) == wanted, "it is looked at again"
    other = head.replace(b'"one"', b'"two"')
    assert "changed at the origin" in str(read(ranged(10_000, 50_000, tag=""), head=other))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (ranged(10_000, 49_990), "sent 39990 bytes for a range of 40000 at 10000"),
        (ranged(10_000, 50_010), "sent 40001 bytes for a range of 40000"),
        (ranged(10_000, 50_000, content=CONTENT[:39_000]), "sent 39000 bytes"),
        (ranged(10_001, 50_001), "another range than it was asked for"),
        (ranged(0, 40_000), "another range than it was asked for"),
        (ranged(10_000, 50_000, total=SIZE + 1), "changed at the origin"),
        (ranged(10_000, 50_000, tag="two"), "changed at the origin"),
        (sized(b"", "412 Precondition Failed"), "changed at the origin"),
        (sized(b"", "416 Range Not Satisfiable"), "changed at the origin"),
        (sized(CONTENT, "200 OK", 'ETag: "one"'), "ignores ranges"),
        (sized(CONTENT[:40_000], "206 Partial Content", 'ETag: "one"'), "another range"),
        (ranged(10_000, 50_000)[:-1] + END, "in the middle of an answer"),
        (sized(b"", "403 Forbidden"), "denies access"),
        (sized(b"", "503 Slow Down"), "is throttled or overloaded"),
    ],
)  # fmt: skip
def test_a_range_that_is_not_what_was_asked_for(answer: bytes, text: str) -> None:
    found = read(answer)
    assert isinstance(found, FFServeError) and text in str(found), found


def test_a_url_that_is_signed_for_reading_only() -> None:
    """Its HEAD is refused; the size comes with the first byte. A user in the URL is one of HTTP."""

    def answers(request: str) -> bytes:
        if request.startswith("HEAD"):
            return sized(b"", "403 Forbidden")
        assert "Authorization: Basic dXNlcjpnZWhlaW0=" in request
        return ranged(0, 1) if "bytes=0-0" in request else ranged(10_000, 50_000)

    with scripted(answers) as server:
        url = server.url.replace("http://", "http://user:geheim@") + "/a?signature=x"
        version = identify(url)
        assert (version.size, version.tag) == (SIZE, TAG)
        assert RemoteFile(version).read(10_000, 50_000) == CONTENT[10_000:50_000]
        assert server.connections == 1


def test_another_time_is_another_version_without_an_etag() -> None:
    late = ranged(10_000, 50_000, tag="", time="Sat, 28 Nov 2026 05:00:00 GMT")
    assert "changed at the origin" in str(read(late, tag=""))


def test_a_request_is_sent_before_it_is_asked_for() -> None:
    """By an open connection only; it is made anew if the connection or its credentials end."""
    admitted = "old"

    def answer(head: str) -> bytes:
        status = "200 OK" if f"Authorization: {admitted}\r\n" in f"{head}\r\n" else "403 Forbidden"
        return sized(BODY[:7], status)

    with scripted(answer) as server:
        credentials = RenewedOptions(
            {"headers": {"Authorization": "old"}}, lambda: {"headers": {"Authorization": admitted}}
        )
        files = HttpFiles(Web(5, 1), credentials)
        asked: tuple[str, str, dict[str, str], dict[str, str]] = "GET", server.url, {}, {}
        assert files.send(*asked) is None, "no connection is open"
        assert files.ask(*asked).content(9) == BODY[:7]
        sent, other = files.send(*asked), files.send(*asked)
        assert sent is not None and other is None and server.connections == 1
        until(lambda: len(server.asked) == 2, "it has come")
        assert files.ask(*asked).content(9) == BODY[:7]
        assert len(server.asked) == 2
        sent.close()  # it was taken
        assert files.ask(*asked).content(9) == BODY[:7]
        assert server.connections == 1
        # Nobody wants it.
        sent = files.send(*asked)
        assert sent is not None
        sent.close()
        del sent
        assert files.ask(*asked).content(9) == BODY[:7]
        assert server.connections == 2
        # Its credentials have ended, and somebody has renewed them since.
        admitted = "new"
        sent = files.send(*asked)
        assert credentials.renewed(credentials.options)
        assert files.ask(*asked).content(9) == BODY[:7]
        assert ["old" in head for head in server.asked[-2:]] == [True, False]
        assert sent is not None


def test_a_lost_answer_is_asked_for_again(own_store: None) -> None:
    fetching.forget(Patience(5.0, 5.0))
    with scripted(lambda _: b"") as server:
        server.answer = lambda _: END if len(server.asked) < 3 else ranged(10_000, 50_000)
        version = ObjectVersion(f"{server.url}/a", SIZE, TAG, 0)
        file = RemoteFile(version)
        found = fetching.call(version.url, lambda: file.read(10_000, 50_000))
        assert found == CONTENT[10_000:50_000]
        fetching.forget(Patience(0.1, 0.1))
        server.answer = lambda _: END
        with pytest.raises(ReadError, match="connection to the origin failed"):
            fetching.call(version.url, lambda: file.read(10_000, 50_000))


@pytest.mark.check
def test_connections_to_many_origins_were_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who asks one origin after another took the descriptors of the daemon."""
    monkeypatch.setattr("ffserve.store.web.MOST_UNUSED", 3)
    access, found = Access("{}"), len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        origins = [stack.enter_context(http_origin()) for _ in range(MOST_ORIGINS + 5)]
        urls = [origin.put("a", BODY) for origin in origins]
        for _ in range(2):
            for url in urls:
                assert RemoteFile(identify(url, access), access).read(0, 9) == BODY[:9]
        # Each origin has a socket of its own, and one of each connection.
        assert len(os.listdir("/proc/self/fd")) - found <= len(origins) + 2 * 3
        first = access.file_system(urls[-1])[0]
        assert access.file_system(urls[-1])[0] is first, "the last ones are kept"
        assert access.file_system(urls[0])[0] is access.file_system(urls[0])[0]
        assert len(access._shared) == MOST_ORIGINS
