"""Web servers, with aiohttp. They may ignore conditions, so reads do not count as conditional."""

from __future__ import annotations

import functools
import importlib
from typing import Any, ClassVar

from ffserve.limits import MOST_PAGE_SIZE
from ffserve.store.schemes.scheme import (
    OpenVersion,
    Options,
    Scheme,
    listing_too_long,
    new_file_system,
    open_file,
    refuse_others,
    traced_redirects,
)


class Http(Scheme):
    """Files of web servers."""

    name = "http"
    protocols = "http", "https"
    has_query = True
    package = module = "aiohttp"
    loggers = ("aiohttp",)
    settings = ("HTTP",)
    options: ClassVar = {"headers": dict}
    connection_errors = "ClientConnectionError", "ClientPayloadError"
    cut_errors = "ContentLengthError", "TransferEncodingError"

    def collect(self, settings: Options) -> Options:
        headers = {**settings.pop("headers", {})}
        client = dict(settings.pop("client_kwargs", {}))
        headers.update(client.pop("headers", {}))
        refuse_others({**settings, **client}, self)
        return {"headers": headers} if headers else {}

    def place(self, url: str, origin: str, options: Options, access: str) -> str:
        # With headers an origin may answer for another name, or for another user.
        return f"{origin} with headers {access}" if options.get("headers") else origin

    def connect(self, url: str, options: Options) -> tuple[Any, str]:
        client: Options = {"timeout": self._timeout(), "trust_env": False}
        client["trace_configs"] = [traced_redirects()]
        if options.get("headers"):
            client["headers"] = options["headers"]
        return new_file_system(url, client_kwargs=client)

    def defaults(self, settings: Options) -> Options:
        return {"client_kwargs": {"timeout": self._timeout(), "response_class": _response_class()}}

    def open(self, system: Any, path: str, *, size: int, tag: str) -> OpenVersion:
        # Offsets are those of the file, not of its compressed form.
        headers = {**system.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
        if tag and not tag.startswith("W/"):
            headers["If-Match"] = f'"{tag}"'
        return open_file(system, path, size=size, headers=headers)

    def _timeout(self) -> Any:
        kind = importlib.import_module("aiohttp").ClientTimeout
        return kind(total=None, sock_connect=self.connect_s, sock_read=self.silent_s)


@functools.cache
def _response_class() -> Any:
    """Return the answers of aiohttp, of which pages (listings) have a largest size."""
    usual = importlib.import_module("aiohttp").ClientResponse

    class Answer(usual):  # type: ignore[misc, valid-type]
        async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
            parts, size = [], 0
            while part := await self.content.readany():
                parts.append(part)
                size += len(part)
                if size > MOST_PAGE_SIZE:
                    self.close()
                    raise listing_too_long(f"its files in more than {MOST_PAGE_SIZE >> 20} MiB")
            return b"".join(parts).decode(encoding or self.charset or "utf-8", errors)

    return Answer


SCHEME = Http()
