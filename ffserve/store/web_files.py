"""Files of origins that speak HTTP: listed, looked up, read by ranges and written.

They have the calls of a file system of fsspec that the store uses. A scheme says how a request is
signed and what a listing looks like (`Objects`), or that a directory is a page of links
(`schemes/http.py`). Each answer to a range names the version that its bytes belong to, and the
reader compares that with the version that it wants.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, TypeAlias
from urllib.parse import quote, unquote_plus
from xml.etree import ElementTree

from ffserve.limits import ASKED_AT_ONCE, MOST_LISTED, MOST_PAGE_SIZE, OPENED_AT_ONCE
from ffserve.store.cache_network import SIGNED_AGAIN_S, CacheNetwork, Route, SignedUrl
from ffserve.store.schemes.scheme import (
    OpenVersion,
    Options,
    Scheme,
    listing_too_long,
    set_variables,
)
from ffserve.store.web import Answer, MissingError, StatusError, Web, WebRequest

Facts: TypeAlias = dict[str, Any]
_ERROR_SIZE = 64 << 10
_LEAST_OF_PAGE = 250
"""A page of a listing counts as this many files at least: pages may be empty for ever."""
_EARLY_S = 60.0
"""Credentials are renewed so long before they expire."""
_LEAST_RENEWAL_S = 1.0
"""Credentials that were renewed so recently are not renewed again when they are refused."""
_PIECE_SIZE = 1 << 20
PART_SIZE = 512 << 20
"""S3 takes up to 10,000 parts."""


class RenewedOptions:
    """The options of an access.

    Args: renew: collects them again shortly before `expires` (seconds since 1970, an option), and
        when an origin refuses them; None: they stay as they are.
    """

    _renewed_at = -math.inf

    def __init__(self, options: Options, renew: Callable[[], Options] | None = None) -> None:
        self._options, self._renew = options, renew

    @property
    def options(self) -> Options:
        """The present options. Raises: what collecting them raises."""
        until = self._options.get("expires")
        if until is not None and time.time() > until - _EARLY_S:
            self.renewed(self._options)
        return self._options

    def renewed(self, used: Options) -> bool:
        """Collect the options again; return whether there are others than were used."""
        if self._options is not used:
            return True
        if self._renew is None or time.monotonic() < self._renewed_at + _LEAST_RENEWAL_S:
            return False
        self._options, self._renewed_at = self._renew(), time.monotonic()
        return self._options != used


class WebFiles:
    """Files at an origin. Threads may share it."""

    async_impl = True
    flat = False
    """Whether a listing of all files below a directory is one of the origin's own."""

    def __init__(self, web: Web, credentials: RenewedOptions) -> None:
        self.web, self.credentials = web, credentials
        self.route = Route()

    def invalidate_cache(self) -> None:
        """Do nothing: nothing is cached."""

    def info(self, path: str) -> Facts:
        """Return what is known of a file or directory. Raises: StatusError, OSError."""
        raise NotImplementedError

    def entries(self, path: str, begin: str = "") -> Iterator[Facts]:
        """Yield files and directories in a directory; those that begin otherwise may be left out.

        Raises: as `info`.
        """
        raise NotImplementedError

    def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Callable[[], bytes | Iterable[bytes]] = bytes,
    ) -> Answer:
        """Return the answer to a request, which is a success. Raises: as `info`."""
        sent = None
        if self.web.ahead:
            sent = self.web.ahead.pop(_key(method, path, query or {}, headers or {}), None)
        while True:
            used = self.credentials.options if sent is None else sent.signed_with
            if sent is None:
                sent = self.new_request(used, method, path, query or {}, headers or {}, body())
            answer, sent = sent.answer(), None
            if answer.status < 300:
                return answer
            error = refusal(answer)
            if error.status not in (400, 401, 403) or not self.credentials.renewed(used):
                raise error

    def send(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> WebRequest | None:
        """Send the request of a later `ask`, as of `OpenVersion`."""
        used = self.credentials.options
        request = self.new_request(used, method, path, query, headers, b"")
        request.signed_with = used
        return request if request.send(_key(method, path, query, headers)) else None

    def send_info(self, path: str) -> WebRequest | None:
        """Send the first request of a later `info`, as of `OpenVersion`."""
        return self.send("HEAD", path, {}, {})

    def new_request(
        self, options: Options, method: str, path: str, query: Mapping[str, str],
        headers: Mapping[str, str], body: bytes | Iterable[bytes],
    ) -> WebRequest:  # fmt: skip
        """Return a request, signed with these options. Raises: OSError, ValueError."""
        raise NotImplementedError

    def ls(self, path: str, detail: bool = True) -> list[Any]:
        """Return the entries of a directory; none if there is no such directory."""
        found = {facts["name"]: facts for facts in self.entries(path)}
        return list(found.values()) if detail else sorted(found)

    def glob(self, path: str, detail: bool = True) -> dict[str, Facts]:
        """Return what matches a pattern, by name."""
        parts = path.split("/")
        first = next((k for k, part in enumerate(parts) if re.search(r"[*?[]", part)), len(parts))
        root, pattern = "/".join(parts[:first]), parts[first:]
        found: dict[str, Facts] = {}
        waiting = [(root, 0)]
        while waiting:
            directory, depth = waiting.pop()
            whole = "**" in pattern[: depth + 1]
            begin = "" if whole else re.split(r"[*?[]", pattern[min(depth, len(pattern) - 1)])[0]
            for facts in self.entries(directory, begin):
                name = facts["name"].rstrip("/")
                inner = name[len(root) :].strip("/")
                if _matches(pattern, inner):
                    found[name] = facts
                if facts["type"] == "directory" and (
                    whole or (depth + 1 < len(pattern) and _matches(pattern[: depth + 1], inner))
                ):
                    waiting.append((name, depth + 1))
        return found

    def open(self, path: str, mode: str = "rb") -> Answer:
        """Return the content of a file of unknown size as a stream from its beginning."""
        return self.ask("GET", path)

    def version(self, path: str, tag: str) -> OpenVersion:
        """Return a version of a file that is read by ranges. tag: "" if it has none."""
        if not tag or tag.startswith("W/"):
            return self.ranges(path)
        headers = {"If-Match": f'"{tag}"'}
        return self.ranges(path, headers=headers, cached=self.cached(path, tag, headers))

    def signed(self, options: Options, path: str, tag: str) -> SignedUrl | None:
        """Return a URL by which a version of a file is read without credentials in headers; None:
        there is none."""
        return None

    def cached(
        self, path: str, tag: str, headers: Mapping[str, str]
    ) -> Callable[[CacheNetwork, int, int], tuple[bytes, Facts] | None]:
        """Return what fetches ranges by a cache network, as of `OpenVersion`."""
        known: tuple[Options | None, float, SignedUrl | None] = None, 0.0, None

        def fetch(network: CacheNetwork, start: int, end: int) -> tuple[bytes, Facts] | None:
            nonlocal known
            used, now = self.credentials.options, time.monotonic()
            if known[0] is not used or now > known[1]:
                known = used, now + SIGNED_AGAIN_S, self.signed(used, path, tag)
            signed = known[2]
            if signed is None or (signed.secret and not network.is_private):
                return None
            answer = network.get(signed.url, {**headers, "Range": f"bytes={start}-{end - 1}"})
            if answer.status >= 300:
                raise refusal(answer)
            return self._range_of(answer, start, end)

        return fetch

    def ranges(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        cached: Any = None,
    ) -> OpenVersion:
        """Return a version that is read by requests like this one. Args: cached: as of it."""

        def asked(start: int, end: int) -> tuple[str, str, Mapping[str, str], dict[str, str]]:
            span = f"bytes={start}-{end - 1}"
            return "GET", path, query or {}, {**(headers or {}), "Range": span}

        def fetch(start: int, end: int) -> tuple[bytes, Facts | None]:
            return self._range_of(self.ask(*asked(start, end)), start, end)

        def send(start: int, end: int) -> WebRequest | None:
            return self.send(*asked(start, end))

        return OpenVersion(fetch, True, send, cached, self.route if cached else None)

    def _range_of(self, answer: Answer, start: int, end: int) -> tuple[bytes, Facts]:
        found = self.facts(answer)
        if found["start"] is not None:
            if found["start"] != start:
                answer.close()
                raise ValueError("the origin sent another range than it was asked for")
        elif start or found["size"] is None or found["size"] > end:
            answer.close()
            raise ValueError("the origin ignores ranges")
        # One byte too many shows that there are more.
        content = answer.read(end - start + 1)
        answer.close()
        return content, found

    def facts(self, answer: Answer) -> Facts:
        """Return what the headers of an answer say of a file. start: of the range that it has."""
        headers, start = answer.headers, None
        size = headers.get("content-length")
        if answer.status == 206 or "content-range" in headers:  # rclone says 200
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("content-range", ""))
            start, size = (int(span[1]), span[2]) if span else (-1, "*")
        return {
            "type": "file",
            "start": start,
            "size": None if size in (None, "*") else int(size),
            "ETag": headers.get("etag", ""),
            "LastModified": headers.get("last-modified", ""),
        }


def _key(method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Any:
    return method, path, *query.items(), *headers.items()


def _matches(pattern: Sequence[str], name: str) -> bool:
    """Whether a name matches the parts of a pattern."""
    return _expression("/".join(pattern)).fullmatch(name) is not None


@functools.lru_cache(64)
def _expression(pattern: str) -> re.Pattern[str]:
    expression = ""
    for token in re.findall(r"\*\*/?|\[[!^]?\]?[^]/]*\]|.", pattern, re.DOTALL):
        if token in ("**", "**/"):
            expression += ".*" if token == "**" else "(?:.*/)?"
        elif token in "*?":
            expression += {"*": "[^/]*", "?": "[^/]"}[token]
        elif len(token) > 2:
            inside = token[1:-1].replace("\\", r"\\").replace("[", r"\[")
            expression += f"[^{inside[1:]}]" if inside[0] in "!^" else f"[{inside}]"
        else:
            expression += re.escape(token)
    return re.compile(expression, re.DOTALL)


def refusal(answer: Answer) -> StatusError:
    """Return the error for an answer that is no success, with what the origin says of it."""
    text = answer.read(_ERROR_SIZE).decode("utf-8", "replace")
    answer.close()
    code = re.search(r"<Code>([^<]*)</Code>|\"code\": *\"([A-Za-z]+)\"", text)
    said = re.search(r"<Message>([^<]*)</Message>|\"message\": *\"([^\"]*)\"", text)
    parts = [next(filter(None, found.groups()), "") if found else "" for found in (code, said)]
    named = answer.headers.get("x-ms-error-code", parts[0])
    if place := answer.headers.get("x-amz-bucket-region"):
        parts[1] += f" (the bucket is in the region {place})"
    message = ": ".join(filter(None, (named, parts[1]))) or f"status {answer.status}"
    kind = MissingError if answer.status in (404, 410) else StatusError
    return kind(answer.status, message, named)


class WebScheme(Scheme):
    """A scheme whose files are `WebFiles`. Options that are not in `options` do not travel, such as
    those of TLS."""

    module = "ssl"  # it needs no package
    cached = True
    at_once = OPENED_AT_ONCE
    trusts: ClassVar[bool] = True
    """Whether this process's own requests go to the proxies that its environment names."""
    made_of: ClassVar[Set[str]] = frozenset()
    """Options of which `token` makes a token."""

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[str, WebFiles] = {}
        """File systems with the settings of this process, by these."""

    def files(self, url: str, web: Web, credentials: RenewedOptions) -> WebFiles:
        """Return the files of the origin of a URL. Raises: ValueError, OSError."""
        raise NotImplementedError

    def token(self, options: Options, web: Web) -> Options:
        """Return a `token` that is made of options, and when it `expires`.

        Raises: what the packages raise.
        """
        raise NotImplementedError

    def connect(self, url: str, options: Options) -> tuple[Any, str]:
        system = self._made(url, lambda: options)
        return system, self.path_in(system, url)

    def connect_own(self, url: str, settings: Options) -> tuple[Any, str]:
        names = (self.name.upper(), *self.settings)
        host = url.partition("://")[2].partition("/")[0]
        key = repr((host, sorted(set_variables(names).items()), settings))
        if key not in self._own:

            def collect() -> Options:
                return {"trust_env": self.trusts, **self.collect(copy.deepcopy(settings))}

            self._own[key] = self._made(url, collect)
        return self._own[key], self.path_in(self._own[key], url)

    def _made(self, url: str, collect: Callable[[], Options]) -> WebFiles:
        options = collect()
        trust, verify = options.get("trust_env", False), options.get("verify", True)
        web = Web(self.connect_s, self.silent_s, proxies=trust, verify=verify)

        def renew() -> Options:
            found = collect()
            return {**found, **self.token(found, web)} if found.keys() & self.made_of else found

        first = {**options, "expires": 0.0} if options.keys() & self.made_of else options
        return self.files(url, web, RenewedOptions(first, renew))

    def path_in(self, system: Any, url: str) -> str:
        return url.partition("://")[2]

    def open(self, system: Any, path: str, *, size: int, tag: str) -> OpenVersion:
        found: OpenVersion = system.version(path, tag)
        return found


# ---- object stores -------------------------------------------------------------------------------


class Page(NamedTuple):
    """A part of a listing. following: what the next page is asked with; "": there is none."""

    files: list[Facts]
    directories: list[str]
    following: str


class PageAsked(NamedTuple):
    """A page of a listing that is wanted. following: "": the first one. most: entries; 0: as many
    as the origin likes."""

    bucket: str
    prefix: str
    delimiter: str
    following: str = ""
    most: int = 0


class Objects(WebFiles):
    """Buckets of S3, and of what speaks its protocol; a path is ``BUCKET/KEY``.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/
    """

    flat = True
    most_put_size: ClassVar[float] = 5 << 30
    """Bytes that one request may write or copy."""

    def place_of(self, asked: PageAsked) -> tuple[str, dict[str, str]]:
        """Return path and query of a page."""
        query = {"list-type": "2", "prefix": asked.prefix, "delimiter": asked.delimiter}
        query |= {"continuation-token": asked.following, "max-keys": str(asked.most or "")}
        query["encoding-type"] = "url"  # keys may have what XML may not
        return f"{asked.bucket}/", {k: v for k, v in query.items() if v or k == "prefix"}

    def page(self, asked: PageAsked) -> Page:
        """Return a page. Raises: as `info`."""
        root, bucket = self.xml("GET", *self.place_of(asked)), asked.bucket
        plain = unquote_plus if text(root, "EncodingType") == "url" else str
        files = [
            {
                "name": f"{bucket}/{plain(text(each, 'Key'))}",
                "type": "file",
                "size": int(text(each, "Size")),
                "ETag": text(each, "ETag"),
                "LastModified": text(each, "LastModified"),
            }
            for each in root.iter("Contents")
        ]
        found = (plain(text(each, "Prefix")) for each in root.iter("CommonPrefixes"))
        directories = [f"{bucket}/{name}" for name in found]
        return Page(files, directories, text(root, "NextContinuationToken"))

    def xml(self, method: str, path: str, query: Mapping[str, str], body: bytes = b"") -> Any:
        """Return the XML of an answer, without its name spaces. Raises: as `info`."""
        content = self.ask(method, path, query, body=lambda: body).content(MOST_PAGE_SIZE)
        root = ElementTree.fromstring(content or b"<None/>")
        for each in root.iter():
            each.tag = each.tag.rpartition("}")[2]
        if root.tag == "Error":  # S3 says so after status 200, when it has copied for a while
            raise StatusError(500, f"{text(root, 'Code')}: {text(root, 'Message')}")
        return root

    def pages(self, path: str, delimiter: str, begin: str = "") -> Iterator[Page]:
        """Yield the pages of a listing of a directory. Raises: as `info`; ReadError: it is too
        long."""
        bucket, _, key = path.strip("/").partition("/")
        asked = PageAsked(bucket, (f"{key}/" if key else "") + begin, delimiter)
        count = 0
        sent: WebRequest | None = None
        try:
            while True:
                page, before = self.page(asked), asked.following
                asked = asked._replace(following=page.following)
                count += max(len(page.files) + len(page.directories), _LEAST_OF_PAGE)
                if page.following not in ("", before) and count <= MOST_LISTED:
                    sent = self._send_page(asked)
                yield page
                if not page.following:
                    return
                if page.following == before:
                    raise listing_too_long("the same page again and again")
                if count > MOST_LISTED:
                    raise listing_too_long(f"more than {MOST_LISTED} files")
        finally:
            if sent is not None:
                sent.close()

    def _send_page(self, asked: PageAsked) -> WebRequest | None:
        """Send the request of a page, which is on its way while the one before it is worked on."""
        with contextlib.suppress(Exception):  # what fails is reported by `page`
            return self.send("GET", *self.place_of(asked), {})
        return None

    def info(self, path: str) -> Facts:
        path = path.strip("/")
        bucket, _, key = path.partition("/")
        missing: MissingError | None = None
        if key:
            try:
                return {"name": path, **self.head(path)}
            except MissingError as error:
                missing = error
        try:
            page = self.page(PageAsked(bucket, f"{key}/" if key else "", "/", most=1))
        except StatusError as error:
            # Who may read files may not list them, perhaps.
            raise (missing if missing and error.status == 403 else error) from error
        if missing and not (page.files or page.directories):
            raise missing
        return {"name": path, "type": "directory", "size": 0}

    def head(self, path: str) -> Facts:
        """Return what is known of a file. Raises: as `info`."""
        return self.facts(self.ask("HEAD", path))

    def entries(self, path: str, begin: str = "") -> Iterator[Facts]:
        itself = path.strip("/") + "/"
        for page in self.pages(path, "/", begin):
            yield from (facts for facts in page.files if facts["name"] != itself)
            for name in page.directories:
                yield {"name": name.rstrip("/"), "type": "directory", "size": 0}

    def every(self, path: str) -> Iterator[Facts]:
        """Yield all files below a directory, or the file of this name."""
        empty = True
        for page in self.pages(path, ""):
            empty = empty and not page.files
            yield from page.files
        if empty:
            with contextlib.suppress(MissingError):
                if (facts := self.info(path))["type"] == "file":
                    yield facts

    def find(self, path: str, detail: bool = False) -> Any:
        """Return the same as `every`, by name."""
        found = {facts["name"]: facts for facts in self.every(path)}
        return found if detail else sorted(found)

    # ---- writing --------------------------------------------------------------------------

    def makedirs(self, path: str, exist_ok: bool = True) -> None:
        """Do nothing: a directory is there when a file is in it."""

    rmdir = makedirs

    def pipe_file(self, path: str, content: bytes) -> None:
        """Write a file. Raises: as `info`."""
        self.put(path, len(content), lambda: content)

    def put_file(self, source: str, path: str) -> None:
        """Write a local file. Raises: as `info`."""
        size = os.path.getsize(source)
        if size > self.most_put_size:
            self.in_parts(path, size, lambda a, b: (lambda: _pieces(source, a, b), {}))
        else:
            self.put(path, size, lambda: _pieces(source, 0, size))

    def put(self, path: str, size: int, body: Callable[[], bytes | Iterable[bytes]]) -> None:
        """Write a file by one request. Raises: as `info`."""
        self.done(self.ask("PUT", path, headers={"Content-Length": str(size)}, body=body))

    def copy(self, names: Sequence[str], targets: Sequence[str], on_error: str = "raise") -> None:
        """Copy files within the origin. Raises: as `info`."""
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            list(pool.map(self.copy_file, names, targets))

    def copy_file(self, name: str, target: str) -> None:
        """Copy a file within the origin. Raises: as `info`."""
        source = {"x-amz-copy-source": quote(f"/{name}")}
        try:
            self.done(self.ask("PUT", target, headers=source))
        except StatusError as error:
            if error.status != 400 or (size := self.head(name)["size"]) <= self.most_put_size:
                raise
            part = "x-amz-copy-source-range"
            self.in_parts(
                target, size, lambda a, b: (bytes, {**source, part: f"bytes={a}-{b - 1}"})
            )

    def in_parts(self, path: str, size: int, part: Callable[[int, int], Any]) -> None:
        """Write a file in parts. Args: part: returns body and headers of one."""
        upload = text(self.xml("POST", path, {"uploads": ""}), "UploadId")
        tags = ""
        try:
            for number, start in enumerate(range(0, size, PART_SIZE), 1):
                end = min(start + PART_SIZE, size)
                body, headers = part(start, end)
                headers = headers or {"Content-Length": str(end - start)}
                query = {"partNumber": str(number), "uploadId": upload}
                answer = self.ask("PUT", path, query, headers, body)
                tag = self.done(answer) or answer.headers.get("etag", "")
                tags += f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
            whole = f"<CompleteMultipartUpload>{tags}</CompleteMultipartUpload>"
            self.xml("POST", path, {"uploadId": upload}, whole.encode())
        except BaseException:
            with contextlib.suppress(Exception):
                self.done(self.ask("DELETE", path, {"uploadId": upload}))
            raise

    @staticmethod
    def done(answer: Answer) -> str:
        """Read an answer to its end; return the ETag that it contains, or "".

        Raises: StatusError: S3 may say after status 200 that a copy has failed.
        """
        said = answer.content(_ERROR_SIZE).decode("utf-8", "replace")
        if "<Error>" in said:
            raise StatusError(500, said)
        found = re.search(r"<ETag>([^<]*)</ETag>", said)
        return found[1] if found else ""

    def rm(self, names: str | Sequence[str], recursive: bool = False) -> None:
        """Delete files, or all below a directory. Raises: as `info`."""
        some = self.find(names) if isinstance(names, str) else names
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            list(pool.map(self.delete, some))

    def delete(self, path: str) -> None:
        """Delete a file. Raises: as `info`."""
        self.done(self.ask("DELETE", path))


def _pieces(path: str, start: int, end: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(start)
        while start < end and (piece := file.read(min(_PIECE_SIZE, end - start))):
            start += len(piece)
            yield piece


def text(root: Any, name: str) -> str:
    """Return the text of an element of XML; "" if there is none."""
    return str(root.findtext(name) or "")
