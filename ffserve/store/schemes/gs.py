"""Google Cloud Storage, by its JSON interface; google-auth finds and makes tokens.

Source: https://cloud.google.com/storage/docs/json_api
"""

from __future__ import annotations

import calendar
import contextlib
import hashlib
import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

from ffserve.limits import MOST_PAGE_SIZE
from ffserve.store import urls
from ffserve.store.cache_network import SIGNED_S, SignedUrl
from ffserve.store.schemes.scheme import OpenVersion, Options, cannot_pass, refuse_others
from ffserve.store.web import Answer, MissingError, StatusError, Web, WebRequest, address_of
from ffserve.store.web_files import Facts, Objects, Page, PageAsked, RenewedOptions, WebScheme

_ENDPOINT = "https://storage.googleapis.com"
_TOKENS = "https://oauth2.googleapis.com/token"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_EMULATOR = "STORAGE_EMULATOR_HOST"
_SERVICE_ACCOUNT = ("client_email", "private_key", "private_key_id")
_USER = "refresh_token", "client_id", "client_secret"
_TOKEN_SIZE = 1 << 20


class GoogleStorage(WebScheme):
    """Buckets of Google Cloud Storage."""

    name = "gs"
    protocols = "gs", "gcs"
    package = "google-auth"
    module = "google.auth"
    loggers = ("google",)
    settings = "GOOGLE_", "CLOUDSDK_", "STORAGE_EMULATOR_", "GCE_METADATA_"
    forgotten = "GOOGLE_", "STORAGE_EMULATOR_"
    options: ClassVar = {
        "token": str, "refresh_token": str, "client_id": str, "client_secret": str,
        "client_email": str, "private_key": str, "private_key_id": str, "endpoint_url": str,
        "user_project": str,
    }  # fmt: skip
    needed: ClassVar = {
        "refresh_token": ("client_id", "client_secret"),
        "private_key": ("client_email",),
    }
    credential_errors = "DefaultCredentialsError", "RefreshError"
    made_of = frozenset(("private_key", "refresh_token"))

    def collect(self, settings: Options) -> Options:
        token, project = settings.pop("token", None), settings.pop("project", None)
        payer = settings.pop("requester_pays", None)
        endpoint = settings.pop("endpoint_url", None) or os.environ.get(_EMULATOR)
        refuse_others(settings, self)
        if "GOOGLE_CLOUD_UNIVERSE_DOMAIN" in os.environ or (
            os.environ.get("GOOGLE_API_USE_CLIENT_CERTIFICATE", "").lower() == "true"
        ):
            raise cannot_pass(
                "this configuration of Google Cloud (another universe, or certificates)"
            )
        if endpoint and "://" not in endpoint:
            endpoint = f"http://{endpoint}"
        found: Options = {"endpoint_url": endpoint}
        if token != "anon":
            project = self._credentials(token, found) or project
        if payer:
            found["user_project"] = payer if isinstance(payer, str) else project
        return {name: value for name, value in found.items() if value}

    def _credentials(self, token: Any, found: Options) -> str | None:
        """Add the credentials of this process to options; return the project that they name."""
        if isinstance(token, str) and os.path.exists(token):
            with open(token, encoding="utf-8") as file:
                token = json.load(file)
        if isinstance(token, str) and token != "google_default":
            found["token"] = token
            return None
        auth = importlib.import_module("google.auth")
        if isinstance(token, dict):
            credentials, project = auth.load_credentials_from_dict(token, scopes=[_SCOPE])
        else:
            try:
                credentials, project = auth.default(scopes=[_SCOPE], request=_Transport(self._web))
            except auth.exceptions.DefaultCredentialsError:
                return None  # what is public needs none
        if getattr(credentials, "refresh_token", None) and credentials.client_secret:
            found.update({name: getattr(credentials, name) for name in _USER})
        elif (account := _service_account(token)).get("private_key"):
            found.update({name: account.get(name) for name in _SERVICE_ACCOUNT})
        else:
            found.update(_refreshed(credentials, self._web))
        return str(project) if project else None

    @property
    def _web(self) -> Web:
        return Web(self.connect_s, self.silent_s, proxies=True)

    def place(self, url: str, origin: str, options: Options, access: str) -> str:
        endpoint = options.get("endpoint_url")
        return f"{origin}@{urls.shown(endpoint)}" if endpoint else origin

    def files(self, url: str, web: Web, credentials: RenewedOptions) -> GoogleObjects:
        return GoogleObjects(web, credentials)

    def token(self, options: Options, web: Web) -> Options:
        if "private_key" in options:
            kind = importlib.import_module("google.oauth2.service_account").Credentials
            given = {name: options[name] for name in _SERVICE_ACCOUNT if name in options}
            made = kind.from_service_account_info(
                {"type": "service_account", "token_uri": _TOKENS, **given}, scopes=[_SCOPE]
            )
        else:
            kind = importlib.import_module("google.oauth2.credentials").Credentials
            made = kind(None, token_uri=_TOKENS, **{name: options[name] for name in _USER})
        return _refreshed(made, web)


def _service_account(token: Any) -> dict[str, Any]:
    """Return the key of a service account that this process uses; {} if it uses none."""
    place = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if not isinstance(token, dict) and place:
        with contextlib.suppress(OSError, ValueError), open(place, encoding="utf-8") as file:
            token = json.load(file)
    known = isinstance(token, dict) and token.get("type") == "service_account"
    return token if known else {}


class GoogleObjects(Objects):
    """Buckets of Google Cloud Storage. The version of an object is its generation."""

    most_put_size = math.inf

    def new_request(
        self, options: Options, method: str, path: str, query: Mapping[str, str],
        headers: Mapping[str, str], body: bytes | Iterable[bytes],
    ) -> WebRequest:  # fmt: skip
        given = dict(headers)
        if "user_project" in options:
            query = {**query, "userProject": options["user_project"]}
        if token := options.get("token"):
            given["Authorization"] = f"Bearer {token}"
        endpoint = options.get("endpoint_url", _ENDPOINT).rstrip("/")
        url = f"{endpoint}{path}{'?' if query else ''}{urlencode(query, quote_via=quote)}"
        return WebRequest(self.web, method, url, given, body)

    def _json(self, method: str, path: str, query: Mapping[str, str]) -> Any:
        return json.loads(self.ask(method, path, query).content(MOST_PAGE_SIZE))

    def place_of(self, asked: PageAsked) -> tuple[str, dict[str, str]]:
        query = {"prefix": asked.prefix, "delimiter": asked.delimiter, "pageToken": asked.following}
        query["maxResults"] = str(asked.most or "")
        return f"{_place(asked.bucket)}/o", {name: text for name, text in query.items() if text}

    def page(self, asked: PageAsked) -> Page:
        found, bucket = self._json("GET", *self.place_of(asked)), asked.bucket
        files = [
            {"name": f"{bucket}/{each['name']}", **_facts(each)} for each in found.get("items", ())
        ]
        directories = [f"{bucket}/{each}" for each in found.get("prefixes", ())]
        return Page(files, directories, found.get("nextPageToken", ""))

    def head(self, path: str) -> Facts:
        return _facts(self._json("GET", _place(path), {}))

    def send_info(self, path: str) -> WebRequest | None:
        return self.send("GET", _place(path), {}, {})

    def facts(self, answer: Answer) -> Facts:
        return {**super().facts(answer), "ETag": answer.headers.get("x-goog-generation", "")}

    def version(self, path: str, tag: str) -> OpenVersion:
        # Else the origin would decompress what was stored compressed.
        coding = {"Accept-Encoding": "gzip"}
        query = {"alt": "media", "generation": tag}
        opened = self.ranges(_place(path), query, coding, self.cached(path, tag, coding))

        def fetch(start: int, end: int) -> tuple[bytes, Facts | None]:
            try:
                return opened.fetch(start, end)
            except MissingError as error:
                message = "the origin no longer has this generation of the object"
                raise StatusError(412, message) from error

        return replace(opened, fetch=fetch)

    def signed(self, options: Options, path: str, tag: str) -> SignedUrl | None:
        if "private_key" not in options and options.keys() & {"token", "refresh_token"}:
            return None  # Google signs for these by another service only
        address = f"{options.get('endpoint_url', _ENDPOINT).rstrip('/')}/{quote(path, safe='/~')}"
        query = {"generation": tag}
        if "user_project" in options:
            query["userProject"] = options["user_project"]
        if "private_key" not in options:
            return SignedUrl(f"{address}?{urlencode(query, quote_via=quote)}")
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        scope = f"{stamp[:8]}/auto/storage/goog4_request"
        query |= {
            "X-Goog-Algorithm": "GOOG4-RSA-SHA256", "X-Goog-Date": stamp,
            "X-Goog-Credential": f"{options['client_email']}/{scope}",
            "X-Goog-Expires": str(SIGNED_S), "X-Goog-SignedHeaders": "host",
        }  # fmt: skip
        asked = urlencode(sorted(query.items()), quote_via=quote, safe="")
        to = address_of(address)
        lines = "GET", to.path, asked, f"host:{to.place}", "", "host", "UNSIGNED-PAYLOAD"
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        crypt = importlib.import_module("google.auth.crypt")
        signer = crypt.RSASigner.from_string(options["private_key"])
        signature = signer.sign(f"GOOG4-RSA-SHA256\n{stamp}\n{scope}\n{digest}".encode())
        return SignedUrl(f"{address}?{asked}&X-Goog-Signature={signature.hex()}")

    def put(self, path: str, size: int, body: Callable[[], bytes | Iterable[bytes]]) -> None:
        bucket, _, key = path.partition("/")
        query = {"uploadType": "media", "name": key}
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        self.done(self.ask("POST", f"/upload{_place(bucket)}/o", query, headers, body))

    def copy_file(self, name: str, target: str) -> None:
        place = f"{_place(name)}/rewriteTo{_place(target).removeprefix('/storage/v1')}"
        found = self._json("POST", place, {})
        while not found["done"]:
            found = self._json("POST", place, {"rewriteToken": found["rewriteToken"]})

    def delete(self, path: str) -> None:
        self.done(self.ask("DELETE", _place(path)))


def _place(path: str) -> str:
    """Return the path of a bucket or object in requests."""
    bucket, slash, key = path.partition("/")
    place = f"/storage/v1/b/{quote(bucket, safe='')}"
    return f"{place}/o/{quote(key, safe='')}" if slash else place


def _facts(found: dict[str, Any]) -> Facts:
    """Return what an origin says of an object."""
    facts = {"size": int(found["size"]), "ETag": found["generation"]}
    return {"type": "file", **facts, "LastModified": found["updated"]}


def _refreshed(credentials: Any, web: Web) -> Options:
    """Return a new token of credentials of google-auth, and when it expires, in seconds."""
    credentials.refresh(_Transport(web))
    until = credentials.expiry
    expires = {} if until is None else {"expires": float(calendar.timegm(until.timetuple()))}
    return {"token": credentials.token, **expires}


class _Transport:
    """How google-auth sends requests for tokens."""

    def __init__(self, web: Web) -> None:
        self._web = web

    def __call__(
        self, url: str, method: str = "GET", body: Any = None, headers: Any = None, **_: Any
    ) -> Any:
        content = body.encode() if isinstance(body, str) else body or b""
        try:
            answer = self._web.request(method, url, headers or {}, content)
            answer.data = answer.content(_TOKEN_SIZE)
        except OSError as error:
            failed = importlib.import_module("google.auth.exceptions").TransportError
            raise failed(error) from error
        return answer


SCHEME = GoogleStorage()
