"""An origin of many objects with one content, as S3 lists and sends them, behind some latency.

It costs little CPU, since it shares the machine with the client that is measured: one thread, no
parsing but what is needed, and every answer is sent so many milliseconds after its request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import parse_qs

from ffserve.bench import child_processes

PAGE_COUNT = 1000
"""Objects of one page of a listing, as S3 has it."""
_RANGE = re.compile(rb"\r\n[Rr]ange: *bytes=(\d+)-(\d+)")
_FACTS = b'ETag: "1"\r\nLast-Modified: Tue, 14 Nov 2023 22:13:20 GMT\r\n'


def name_of(k: int) -> str:
    """Return the key of an object."""
    return f"many/{k:07d}.ffr"


@contextlib.contextmanager
def latent_origin(path: str, count: int, latency_s: float) -> Iterator[str]:
    """Serve `count` objects with the content of a file; return the endpoint."""
    words = ["-m", __name__, path, str(count), str(latency_s)]
    with child_processes.running([sys.executable, *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


class _Connection(asyncio.Protocol):
    def __init__(self, content: bytes, count: int, latency_s: float) -> None:
        self._content, self._count, self._latency_s = content, count, latency_s
        self._asked = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._asked += data
        while (end := self._asked.find(b"\r\n\r\n")) >= 0:
            request, self._asked = self._asked[:end], self._asked[end + 4 :]
            asyncio.get_running_loop().call_later(self._latency_s, self._answer, request)

    def _answer(self, request: bytes) -> None:
        method, target, _ = request.partition(b"\r\n")[0].split(b" ")
        size, found = len(self._content), _RANGE.search(request)
        if b"list-type=2" in target:
            page = _page(target.partition(b"?")[2].decode(), self._count, size)
            self._send(b"200 OK", b"", page)
        elif not target.endswith(b".ffr"):
            self._send(b"404 Not Found", b"", b"")
        elif method == b"HEAD":
            self._send(b"200 OK", _FACTS, b"", size)
        elif found is None:
            self._send(b"200 OK", _FACTS, self._content)
        else:
            begin, end = int(found[1]), min(int(found[2]) + 1, size)
            span = b"Content-Range: bytes %d-%d/%d\r\n" % (begin, end - 1, size)
            self._send(b"206 Partial Content", _FACTS + span, self._content[begin:end])

    def _send(self, status: bytes, facts: bytes, body: bytes, size: int | None = None) -> None:
        length = len(body) if size is None else size
        head = b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n" % (status, facts, length)
        self._transport.write(head + body)


def _page(query: str, count: int, size: int) -> bytes:
    first = int(parse_qs(query).get("continuation-token", ["0"])[0])
    last = min(first + PAGE_COUNT, count)
    rows = "".join(
        f"<Contents><Key>{name_of(k)}</Key><LastModified>2023-11-14T22:13:20.000Z</LastModified>"
        f"<ETag>&quot;1&quot;</ETag><Size>{size}</Size></Contents>"
        for k in range(first, last)
    )
    more = f"<NextContinuationToken>{last}</NextContinuationToken>" if last < count else ""
    return f"<ListBucketResult>{more}{rows}</ListBucketResult>".encode()


async def _serve(path: str, count: int, latency_s: float) -> None:
    with open(path, "rb") as file:
        content = file.read()
    server = await asyncio.get_running_loop().create_server(
        lambda: _Connection(content, count, latency_s), "127.0.0.1", backlog=512
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("count", type=int)
    parser.add_argument("latency_s", type=float)
    options = parser.parse_args()
    asyncio.run(_serve(options.path, options.count, options.latency_s))
