"""Azure: containers of storage accounts. Tokens of a process are found by azure-identity.

Source: https://learn.microsoft.com/rest/api/storageservices/
"""

from __future__ import annotations

import base64
import hmac
import importlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from email.utils import formatdate
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

from ffserve.store import urls
from ffserve.store.cache_network import SIGNED_S, SignedUrl
from ffserve.store.schemes.scheme import Options, cannot_pass, refuse_others
from ffserve.store.web import StatusError, Web, WebRequest, address_of
from ffserve.store.web_files import Objects, Page, PageAsked, RenewedOptions, WebScheme, text

_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_ACCOUNT_HOST = re.compile(r"([a-z0-9]+)\.(?:dfs|blob)\.core\.windows\.net")
_RESOURCE = "https://storage.azure.com/.default"
_VERSION = "2021-12-02"
_SIGNED = (
    "Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type", "Date",
    "If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range",
)  # fmt: skip
_COPY_S = 300.0
"""A copy within an account takes at most so long."""


class AzureBlobs(WebScheme):
    """Containers of storage accounts of Azure."""

    name = "abfs"
    protocols = "abfs", "abfss", "az"
    package = "azure-identity"
    loggers = "azure", "msal"
    settings = "AZURE_", "IDENTITY_", "MSI_"
    forgotten = ("AZURE_",)
    options: ClassVar = {
        "account_name": str, "account_key": str, "sas_token": str, "endpoint_url": str,
        "tenant_id": str, "client_id": str, "client_secret": str, "token": str,
    }  # fmt: skip
    needed: ClassVar = {
        "account_key": ("account_name",),
        "client_secret": ("tenant_id", "client_id"),
    }
    credential_errors = "ClientAuthenticationError", "CredentialUnavailableError"
    made_of = frozenset(("client_secret",))

    def collect(self, settings: Options) -> Options:
        names = (
            "account_name", "account_key", "connection_string", "sas_token", "client_id",
            "client_secret", "tenant_id",
        )  # fmt: skip
        found: Options = {
            name: settings.pop(name, None) or os.environ.get(f"AZURE_STORAGE_{name.upper()}")
            for name in names
        }
        host, anonymous = settings.pop("account_host", None), settings.pop("anon", None)
        if anonymous is None:
            named = os.environ.get("AZURE_STORAGE_ANON", "false").lower()
            anonymous = named not in ("false", "0", "f", "")
        refuse_others(settings, self)
        if connection := found.pop("connection_string"):
            found = _connection(connection)
        elif host:
            found["endpoint_url"] = f"https://{host}"
        if found.get("account_key"):
            kept = ["account_key"]
        elif found.get("sas_token"):
            kept = ["sas_token"]
        elif found.get("client_id") and found.get("client_secret"):
            kept = ["tenant_id", "client_id", "client_secret"]
        else:
            kept = ["token", "expires"]
            if not anonymous and not connection:
                identity = importlib.import_module("azure.identity")
                found.update(_token_of(identity.DefaultAzureCredential()))
        kept += ["account_name", "endpoint_url"]
        return {name: value for name, value in found.items() if value and name in kept}

    def is_valid(self, name: str, value: Any) -> bool:
        if name == "account_name":
            return _ACCOUNT.fullmatch(value) is not None
        return super().is_valid(name, value)

    def place(self, url: str, origin: str, options: Options, access: str) -> str:
        return f"abfs://{_container(url)[0]}@{urls.shown(_account_address(url, options))}"

    def files(self, url: str, web: Web, credentials: RenewedOptions) -> AzureObjects:
        address = _account_address(url, credentials.options).rstrip("/")
        return AzureObjects(web, credentials, address)

    def token(self, options: Options, web: Web) -> Options:
        names = (options[name] for name in ("tenant_id", "client_id", "client_secret"))
        kind = importlib.import_module("azure.identity").ClientSecretCredential
        return _token_of(kind(*names, authority="login.microsoftonline.com"))

    def path_in(self, system: Any, url: str) -> str:
        return "/".join(_container(url))


def _token_of(credential: Any) -> Options:
    """Return a new token of a credential of azure-identity, and when it expires."""
    with credential:
        found = credential.get_token(_RESOURCE)
    return {"token": found.token, "expires": found.expires_on}


def _connection(given: str) -> Options:
    """Return the options in a connection string of Azure."""
    parts = dict(part.partition("=")[::2] for part in given.split(";") if part)
    name, suffix = parts.get("AccountName"), parts.get("EndpointSuffix", "core.windows.net")
    usual = f"{parts.get('DefaultEndpointsProtocol', 'https')}://{name}.blob.{suffix}"
    if "UseDevelopmentStorage" in parts or not (name or parts.get("BlobEndpoint")):
        raise cannot_pass("this connection string of Azure")
    return {
        "account_name": name,
        "account_key": parts.get("AccountKey"),
        "sas_token": parts.get("SharedAccessSignature"),
        "endpoint_url": parts.get("BlobEndpoint", usual).rstrip("/"),
    }


def _container(url: str) -> tuple[str, str]:
    """Return container and name of a blob."""
    host, _, path = url.partition("://")[2].partition("/")
    container, at, _ = host.partition("@")
    if not at and _ACCOUNT_HOST.fullmatch(host):
        container, _, path = path.partition("/")
    return container, path


def _account_address(url: str, options: Options) -> str:
    """Return the address of the account that a URL is in.

    Raises: ValueError: neither the URL nor the options name one.
    """
    if endpoint := options.get("endpoint_url"):
        return str(endpoint)
    host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    named = _ACCOUNT_HOST.fullmatch(host)
    account = named[1] if named else options.get("account_name")
    if not account:
        raise ValueError("it has no account, and no account is set")
    return f"https://{account}.blob.core.windows.net"


class AzureObjects(Objects):
    """Blobs of one account; a path is ``CONTAINER/NAME``."""

    def __init__(self, web: Web, credentials: RenewedOptions, address: str) -> None:
        super().__init__(web, credentials)
        self._address = address

    def place_of(self, asked: PageAsked) -> tuple[str, dict[str, str]]:
        query = {"restype": "container", "comp": "list", "prefix": asked.prefix}
        query |= {"delimiter": asked.delimiter, "marker": asked.following}
        query["maxresults"] = str(asked.most or "")
        return asked.bucket, {name: value for name, value in query.items() if value}

    def page(self, asked: PageAsked) -> Page:
        root, bucket = self.xml("GET", *self.place_of(asked)), asked.bucket
        files = [
            {
                "name": f"{bucket}/{text(each, 'Name')}",
                "type": "file",
                "size": int(text(each, "Properties/Content-Length")),
                "ETag": text(each, "Properties/Etag"),
                "LastModified": text(each, "Properties/Last-Modified"),
            }
            for each in root.iter("Blob")
            if text(each, "Properties/ResourceType") != "directory"
        ]
        directories = [f"{bucket}/{text(each, 'Name')}" for each in root.iter("BlobPrefix")]
        return Page(files, directories, text(root, "NextMarker"))

    def new_request(
        self, options: Options, method: str, path: str, query: Mapping[str, str],
        headers: Mapping[str, str], body: bytes | Iterable[bytes],
    ) -> WebRequest:  # fmt: skip
        asked = urlencode(query, quote_via=quote)
        if signature := options.get("sas_token", "").lstrip("?"):
            asked += f"{'&' if asked else ''}{signature}"
        url = f"{self._address}/{quote(path, safe='/~')}{'?' if asked else ''}{asked}"
        given = {**headers, "x-ms-version": _VERSION, "x-ms-date": formatdate(usegmt=True)}
        if "account_key" in options:
            given["Authorization"] = _signed(options, method, url, query, given)
        elif token := options.get("token"):
            given["Authorization"] = f"Bearer {token}"
        return WebRequest(self.web, method, url, given, body)

    def signed(self, options: Options, path: str, tag: str) -> SignedUrl | None:
        url = f"{self._address}/{quote(path, safe='/~')}"
        if signature := options.get("sas_token", "").lstrip("?"):
            return SignedUrl(f"{url}?{signature}", secret=True)
        if "account_key" not in options:
            return None if options.get("token") or "client_secret" in options else SignedUrl(url)
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + SIGNED_S))
        blob = f"/blob/{options['account_name']}/{path}"
        lines = ["r", "", until, blob, "", "", "", _VERSION, "b", *7 * [""]]
        query = {"sv": _VERSION, "sr": "b", "sp": "r", "se": until}
        query["sig"] = _keyed(options, lines)
        return SignedUrl(f"{url}?{urlencode(query, quote_via=quote, safe='')}")

    def put(self, path: str, size: int, body: Callable[[], bytes | Iterable[bytes]]) -> None:
        headers = {"Content-Length": str(size), "x-ms-blob-type": "BlockBlob"}
        self.done(self.ask("PUT", path, headers=headers, body=body))

    def in_parts(self, path: str, size: int, part: Callable[[int, int], Any]) -> None:
        raise StatusError(413, f"a file of {size} bytes is larger than one request may be")

    def copy_file(self, name: str, target: str) -> None:
        place = f"{self._address}/{quote(name, safe='/~')}"
        if signature := self.credentials.options.get("sas_token", "").lstrip("?"):
            place += f"?{signature}"
        answer = self.ask("PUT", target, headers={"x-ms-copy-source": place})
        answer.close()
        state, until = answer.headers.get("x-ms-copy-status"), time.monotonic() + _COPY_S
        while state == "pending" and time.monotonic() < until:
            time.sleep(0.5)
            answer = self.ask("HEAD", target)
            state = answer.headers.get("x-ms-copy-status")
        if state not in ("success", None):
            raise StatusError(500, f"a copy has ended as {state}")


def _signed(
    options: Options, method: str, url: str, query: Mapping[str, str], headers: Mapping[str, str]
) -> str:
    """Return the header that signs a request with the key of an account."""
    given = {**headers, "Content-Length": headers.get("Content-Length", "0").lstrip("0")}
    lines = [method, *(given.get(name, "") for name in _SIGNED)]
    lines += sorted(f"{name}:{value}" for name, value in headers.items() if name[:5] == "x-ms-")
    path = address_of(url).path.partition("?")[0]
    lines.append(f"/{options['account_name']}{path}")
    lines += [f"{name.lower()}:{query[name]}" for name in sorted(query)]
    return f"SharedKey {options['account_name']}:{_keyed(options, lines)}"


def _keyed(options: Options, lines: Iterable[str]) -> str:
    """Return the signature of lines by the key of an account."""
    key = base64.b64decode(options["account_key"])
    signature = hmac.new(key, "\n".join(lines).encode(), "sha256").digest()
    return base64.b64encode(signature).decode()


SCHEME = AzureBlobs()
