"""Azure: adlfs with the settings of a process, Azure's own package with passed credentials.

adlfs takes what it is not given from the environment and the files of its process, tries again for
a minute by itself, and reads without conditions. So for others the daemon uses Azure's package: it
is given everything, asks once, and each read is conditional on the ETag.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from typing import Any, ClassVar

from ffserve.store import urls
from ffserve.store.schemes.scheme import (
    OpenVersion,
    Options,
    Scheme,
    cannot_pass,
    refuse_others,
)

_TOKEN_S = 3600
"""A token of Azure counts as valid for this long here; Azure itself checks it."""
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_ACCOUNT_HOST = re.compile(r"([a-z0-9]+)\.(?:dfs|blob)\.core\.windows\.net")


class AzureBlobs(Scheme):
    """Containers of storage accounts of Azure."""

    name = "abfs"
    protocols = "abfs", "abfss", "az"
    package = "adlfs"
    module = "azure.storage.blob"
    loggers = "azure", "msal"
    settings = ("AZURE_",)
    forgotten = ("AZURE_",)
    options: ClassVar = {
        "account_name": str, "account_key": str, "sas_token": str, "endpoint_url": str,
        "tenant_id": str, "client_id": str, "client_secret": str, "token": str,
    }  # fmt: skip
    needed: ClassVar = {
        "account_key": ("account_name",),
        "client_secret": ("tenant_id", "client_id"),
    }
    credential_errors = ("ClientAuthenticationError",)
    connection_errors = "ServiceRequestError", "ServiceResponseError"

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
        if text := found.pop("connection_string"):
            found = _connection(text)
        elif host:
            found["endpoint_url"] = f"https://{host}"
        if found.get("account_key"):
            kept = ["account_key"]
        elif found.get("sas_token"):
            kept = ["sas_token"]
        elif found.get("client_id") and found.get("client_secret"):
            kept = ["tenant_id", "client_id", "client_secret"]
        else:
            kept = ["token"]
            if not anonymous and not text:
                identity = importlib.import_module("azure.identity")
                with identity.DefaultAzureCredential() as credential:
                    token = credential.get_token("https://storage.azure.com/.default")
                    found["token"] = token.token
        kept += ["account_name", "endpoint_url"]
        return {name: value for name, value in found.items() if value and name in kept}

    def is_valid(self, name: str, value: Any) -> bool:
        if name == "account_name":
            return _ACCOUNT.fullmatch(value) is not None
        return super().is_valid(name, value)

    def place(self, url: str, origin: str, options: Options, access: str) -> str:
        return f"abfs://{_container(url)[0]}@{urls.shown(_account_address(url, options))}"

    def connect(self, url: str, options: Options) -> tuple[Any, str]:
        timeout = self.connect_s, self.silent_s
        system = AzureObjects(options, _account_address(url, options), timeout)
        return system, self.path_in(system, url)

    def path_in(self, system: Any, url: str) -> str:
        return "/".join(_container(url))

    def open(self, system: Any, path: str, *, size: int, tag: str) -> OpenVersion:
        if isinstance(system, AzureObjects):
            return system.open(path, tag)
        return super().open(system, path, size=size, tag=tag)


def _connection(text: str) -> Options:
    """Return the options in a connection string of Azure."""
    parts = dict(part.partition("=")[::2] for part in text.split(";") if part)
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


class AzureObjects:
    """Blobs of one account by path (``CONTAINER/NAME``), with Azure's package. It has no listings,
    since the client lists."""

    async_impl = True

    def __init__(self, options: Options, address: str, timeout: tuple[float, float]) -> None:
        blobs = importlib.import_module("azure.storage.blob")
        transports = importlib.import_module("azure.core.pipeline.transport")
        self._same = importlib.import_module("azure.core").MatchConditions.IfNotModified
        self._service = blobs.BlobServiceClient(
            address,
            credential=_credential(options),
            retry_total=0,
            permit_redirects=False,
            connection_timeout=timeout[0],
            read_timeout=timeout[1],
            transport=transports.RequestsTransport(use_env_settings=False),
        )

    def invalidate_cache(self) -> None:
        """Do nothing: there is no cache."""

    def _blob(self, path: str) -> Any:
        container, _, key = path.partition("/")
        return self._service.get_blob_client(container, key)

    def info(self, path: str) -> dict[str, Any]:
        """Return size and ETag of a blob. Raises: what the package raises."""
        facts = self._blob(path).get_blob_properties()
        version = {"etag": facts.etag, "last_modified": facts.last_modified}
        return {"name": path, "type": "file", "size": facts.size, **version}

    def open(self, path: str, etag: str) -> OpenVersion:
        """Open a version of a blob; the first request is its first read."""
        blob = self._blob(path)

        def fetch(start: int, end: int) -> bytes:
            content: bytes = blob.download_blob(
                offset=start, length=end - start, etag=f'"{etag}"', match_condition=self._same
            ).readall()
            return content

        return OpenVersion(fetch, conditional=True, shared=True)


class _Token:
    """A token of Azure that a client passed."""

    def __init__(self, token: str) -> None:
        self._token = token

    def get_token(self, *_scopes: str, **_options: Any) -> Any:
        """Return it."""
        made = importlib.import_module("azure.core.credentials").AccessToken
        return made(self._token, int(time.time()) + _TOKEN_S)


def _credential(options: Options) -> Any:
    """Return a credential made of these options alone; None if none is needed."""
    core = importlib.import_module("azure.core.credentials")
    if "account_key" in options:
        return core.AzureNamedKeyCredential(options["account_name"], options["account_key"])
    if "sas_token" in options:
        return core.AzureSasCredential(options["sas_token"])
    if "client_secret" in options:
        identity = importlib.import_module("azure.identity")
        return identity.ClientSecretCredential(
            options["tenant_id"], options["client_id"], options["client_secret"],
            authority="login.microsoftonline.com",
        )  # fmt: skip
    return _Token(options["token"]) if "token" in options else None


SCHEME = AzureBlobs()
