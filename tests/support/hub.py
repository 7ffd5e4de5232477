"""A server that speaks as the Hugging Face Hub does: what its clients ask to list and read one
repository of data. Commits are whole trees; there is one branch.

Source: the Hub's API, https://huggingface.co/docs/hub/api, and https://huggingface.co/.well-known/openapi.json
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote


@dataclass
class Hub:
    """A repository. commits: files by name, by commit. head: the commit of the branch `main`. read:
    branches and commits of which content was read."""

    name: str
    token: str
    url: str = ""
    head: str = ""
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def commit(self, files: dict[str, bytes]) -> str:
        """Add or replace files; return the commit."""
        content = {**self.commits.get(self.head, {}), **files}
        self.head = hashlib.sha1(f"{self.head} {sorted(content)}".encode()).hexdigest()
        self.commits[self.head] = content
        return self.head

    def tree(self, revision: str) -> dict[str, bytes] | None:
        """Return the files of a branch or commit."""
        return self.commits.get(self.head if revision == "main" else revision)


def _entry(name: str, content: bytes) -> dict[str, object]:
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": oid}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", X_Error_Code=code, Content_Type="application/json")

    def _json(self, found: object) -> None:
        self._send(200, json.dumps(found).encode(), Content_Type="application/json")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def do_GET(self) -> None:
        self._answer(b"")

    do_HEAD = do_GET

    def _answer(self, body: bytes) -> None:
        hub, path = self.hub, unquote(self.path.partition("?")[0])
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._fail(401, "RepoNotFound")  # as for a repository that is private
        api, files = f"/api/datasets/{hub.name}", f"/datasets/{hub.name}/resolve/"
        if path == api:
            return self._json({"id": hub.name, "sha": hub.head})
        if path.startswith(files):
            revision, _, name = path.removeprefix(files).partition("/")
            hub.read.add(revision)
            return self._file(hub.tree(revision), name)
        if not path.startswith(f"{api}/"):
            return self._fail(404, "RepoNotFound")
        what, _, rest = path.removeprefix(f"{api}/").partition("/")
        revision, _, below = rest.partition("/")
        tree = hub.tree(revision)
        if tree is None:
            return self._fail(404, "RevisionNotFound")
        if what == "revision":
            commit = hub.head if revision == "main" else revision
            return self._json({"id": hub.name, "sha": commit})
        if what == "paths-info":
            wanted = parse_qs(body.decode()).get("paths", [])
            return self._json([_entry(name, tree[name]) for name in wanted if name in tree])
        if what == "tree":
            return self._tree(tree, below)
        return self._fail(404, "EntryNotFound")

    def _tree(self, tree: dict[str, bytes], below: str) -> None:
        begin = f"{below}/" if below else ""
        found: dict[str, dict[str, object]] = {}
        for name in sorted(name for name in tree if name.startswith(begin)):
            first, more, _ = name.removeprefix(begin).partition("/")
            directory = {"type": "directory", "path": begin + first, "size": 0, "oid": "0" * 40}
            found[first] = directory if more else _entry(name, tree[name])
        if begin and not found:
            return self._fail(404, "EntryNotFound")
        return self._json(list(found.values()))

    def _file(self, tree: dict[str, bytes] | None, name: str) -> None:
        if tree is None or name not in tree:
            return self._fail(404, "RevisionNotFound" if tree is None else "EntryNotFound")
        content, asked = tree[name], self.headers.get("Range")
        if not asked:
            return self._send(200, content)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last) + 1, len(content))
        span = f"bytes {begin}-{end - 1}/{len(content)}"
        return self._send(206, content[begin:end], Content_Range=span)


@contextmanager
def hub(name: str, *, token: str) -> Iterator[Hub]:
    """Run a hub with one repository, which one token may read."""
    found = Hub(name, token)
    found.commit({})
    handler = type("Handler", (_Handler,), {"hub": found})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
