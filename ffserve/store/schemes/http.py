"""Web servers. A directory is a page of links; servers that ignore conditions are noticed."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from html import unescape
from typing import Any, ClassVar
from urllib.parse import unquote, urljoin, urlsplit

from ffserve.limits import MOST_PAGE_SIZE
from ffserve.store.cache_network import SignedUrl
from ffserve.store.schemes.scheme import Options, listing_too_long, refuse_others, without_none
from ffserve.store.web import StatusError, Web, WebRequest
from ffserve.store.web_files import Facts, RenewedOptions, WebFiles, WebScheme

_LINK = re.compile(r"""<a\s(?:[^>]*?\s)?href=["']([^"']+)""", re.IGNORECASE)


class Http(WebScheme):
    """Files of web servers."""

    name = "http"
    protocols = "http", "https"
    has_query = True
    trusts = False
    settings = ("HTTP",)
    options: ClassVar = {"headers": dict}

    def collect(self, settings: Options) -> Options:
        headers = {**settings.pop("headers", {})}
        client = dict(settings.pop("client_kwargs", {}))
        headers.update(client.pop("headers", {}))
        trust = client.pop("trust_env", None)
        refuse_others({**settings, **client}, self)
        return without_none({"headers": headers or None, "trust_env": trust})

    def place(self, url: str, origin: str, options: Options, access: str) -> str:
        # With headers an origin may answer for another name, or for another user.
        return f"{origin} with headers {access}" if options.get("headers") else origin

    def files(self, url: str, web: Web, credentials: RenewedOptions) -> WebFiles:
        return HttpFiles(web, credentials)

    def path_in(self, system: Any, url: str) -> str:
        return url


class HttpFiles(WebFiles):
    """Files of web servers; a path is a URL."""

    def new_request(
        self, options: Options, method: str, path: str, query: Mapping[str, str],
        headers: Mapping[str, str], body: bytes | Iterable[bytes],
    ) -> WebRequest:  # fmt: skip
        # Sizes and offsets are those of the file, not of its compressed form.
        given = {**options.get("headers", {}), "Accept-Encoding": "identity", **headers}
        parts = urlsplit(path)
        if parts.username:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            given.setdefault("Authorization", f"Basic {b64encode(user.encode()).decode()}")
        return WebRequest(self.web, method, path, given, body, follow=True)

    def signed(self, options: Options, path: str, tag: str) -> SignedUrl | None:
        parts = urlsplit(path)
        if options.get("headers") or parts.username:
            return None  # they may be credentials
        return SignedUrl(path, secret=bool(parts.query))

    def info(self, path: str) -> Facts:
        try:
            found = self.facts(self.ask("HEAD", path))
        except StatusError as error:
            if error.status in (401, 404, 410) or error.status >= 500:
                raise
            found = {"size": None}
        if found["size"] is None:  # such as for a URL that is signed for GET
            answer = self.ask("GET", path, headers={"Range": "bytes=0-0"})
            found = self.facts(answer)
            answer.read(1)
            answer.close()
        return {"name": path, **found}

    def entries(self, path: str, begin: str = "") -> Iterator[Facts]:
        address, mark, query = path.partition("?")
        base = f"{address.rstrip('/')}/"
        answer = self.ask("GET", base + mark + query)
        try:
            page = answer.content(MOST_PAGE_SIZE).decode("utf-8", "replace")
        except ValueError:
            raise listing_too_long(f"its files in more than {MOST_PAGE_SIZE >> 20} MiB") from None
        for link in map(unescape, _LINK.findall(page)):
            name = urljoin(base, link).partition("#")[0]
            if name.startswith(base) and name != base and "?" not in name:
                kind = "directory" if name.endswith("/") else "file"
                yield {"name": name, "type": kind, "size": None}


SCHEME = Http()
