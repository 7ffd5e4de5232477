"""Clouds: objects of Google Cloud Storage and Azure by the clouds' own packages, for the daemon.

The file systems of fsspec (gcsfs, adlfs) take what they are not given from the environment and the
files of their process, try again for a minute by themselves, and read without conditions. These
take all from an `Access`, ask once, and each read is conditional on the version of the object: so
no second look at it is needed. `origin.RemoteFile` uses them as it uses file systems.
"""

from __future__ import annotations

import abc
import importlib
import time
from collections.abc import Callable
from typing import Any

GOOGLE_ENDPOINT = "https://storage.googleapis.com"
GOOGLE_TOKENS = "https://oauth2.googleapis.com/token"
AZURE_LOGIN = "login.microsoftonline.com"
AZURE_HOST = "blob.core.windows.net"
_READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"
_TOKEN_S = 3600
"""How long a token of Azure counts as valid here; Azure itself knows better."""


class Ranges:
    """A file of which each read is one request, conditional on a version.

    Args: fs: where it is. fetch: returns the bytes [start, end) of that version.
    """

    conditional = True

    def __init__(self, fs: Any, fetch: Callable[[int, int], bytes]) -> None:
        self.fs = fs
        self._fetch = fetch
        self._at = 0

    def seek(self, offset: int) -> None:
        """Read from here next."""
        self._at = offset

    def read(self, size: int) -> bytes:
        """Return bytes of the version. Raises: what the package raises."""
        content = self._fetch(self._at, self._at + size)
        self._at += len(content)
        return content


class Objects(abc.ABC):
    """The objects of an origin, by path (``CONTAINER/NAME``)."""

    async_impl = False
    """Whether threads may share it; the name is fsspec's."""

    def invalidate_cache(self) -> None:  # noqa: B027 - the same for all
        """There is none."""

    @abc.abstractmethod
    def info(self, path: str) -> dict[str, Any]:
        """Return size and version of an object. Raises: what the package raises."""

    @abc.abstractmethod
    def open(self, path: str, *, version: str) -> Ranges:
        """Return a version of an object for reading; it is not asked for yet."""


class GoogleObjects(Objects):
    """Objects of Google Cloud Storage.

    Args: options: of an `Access`. timeout: seconds to connect, and of silence.
    """

    def __init__(self, options: dict[str, Any], timeout: tuple[float, float]) -> None:
        storage = importlib.import_module("google.cloud.storage")
        requests = importlib.import_module("google.auth.transport.requests")
        credentials = _google_credentials(options)
        # A session of our own takes neither client certificates nor ~/.netrc of this user.
        session = requests.AuthorizedSession(credentials)
        session.trust_env = False
        self._client = storage.Client(
            project="none",
            credentials=credentials,
            _http=session,
            client_options={"api_endpoint": options.get("endpoint_url", GOOGLE_ENDPOINT)},
        )
        self._payer = options.get("user_project")
        self._how = {"timeout": timeout, "retry": None}

    def _bucket(self, path: str) -> tuple[Any, str]:
        name, _, key = path.partition("/")
        return self._client.bucket(name, user_project=self._payer), key

    def info(self, path: str) -> dict[str, Any]:
        bucket, key = self._bucket(path)
        blob = bucket.get_blob(key, **self._how)
        if blob is None:
            raise FileNotFoundError(path)
        version = {"generation": str(blob.generation), "updated": blob.updated}
        return {"name": path, "type": "file", "size": blob.size, **version}

    def open(self, path: str, *, version: str) -> Ranges:
        bucket, key = self._bucket(path)
        blob = bucket.blob(key, generation=int(version))
        failures = importlib.import_module("google.api_core.exceptions")

        def fetch(start: int, end: int) -> bytes:
            how = {"raw_download": True, "checksum": None, **self._how}
            try:
                content: bytes = blob.download_as_bytes(start=start, end=end - 1, **how)
            except failures.NotFound as error:  # another one is in its place, or none
                raise failures.PreconditionFailed("this generation is gone") from error
            return content

        return Ranges(self, fetch)


def _google_credentials(options: dict[str, Any]) -> Any:
    """Return credentials that are made of these options alone."""
    if "private_key" in options:
        service = importlib.import_module("google.oauth2.service_account")
        names = "client_email", "private_key", "private_key_id"
        given = {name: options[name] for name in names if name in options}
        return service.Credentials.from_service_account_info(
            {"type": "service_account", "token_uri": GOOGLE_TOKENS, **given}, scopes=[_READ_ONLY]
        )
    if "token" in options or "refresh_token" in options:
        names = "refresh_token", "client_id", "client_secret"
        given = {name: options[name] for name in names if name in options}
        oauth2 = importlib.import_module("google.oauth2.credentials")
        return oauth2.Credentials(options.get("token"), token_uri=GOOGLE_TOKENS, **given)
    return importlib.import_module("google.auth.credentials").AnonymousCredentials()


class AzureObjects(Objects):
    """Blobs of one account of Azure.

    Args: options: of an `Access`. address: of the account. timeout: as of `GoogleObjects`.
    """

    async_impl = True

    def __init__(self, options: dict[str, Any], address: str, timeout: tuple[float, float]) -> None:
        blobs = importlib.import_module("azure.storage.blob")
        transports = importlib.import_module("azure.core.pipeline.transport")
        self._same = importlib.import_module("azure.core").MatchConditions.IfNotModified
        self._service = blobs.BlobServiceClient(
            address,
            credential=_azure_credential(options),
            retry_total=0,
            connection_timeout=timeout[0],
            read_timeout=timeout[1],
            transport=transports.RequestsTransport(use_env_settings=False),
        )

    def _blob(self, path: str) -> Any:
        container, _, key = path.partition("/")
        return self._service.get_blob_client(container, key)

    def info(self, path: str) -> dict[str, Any]:
        facts = self._blob(path).get_blob_properties()
        version = {"etag": facts.etag, "last_modified": facts.last_modified}
        return {"name": path, "type": "file", "size": facts.size, **version}

    def open(self, path: str, *, version: str) -> Ranges:
        blob = self._blob(path)

        def fetch(start: int, end: int) -> bytes:
            content: bytes = blob.download_blob(
                offset=start, length=end - start, etag=f'"{version}"', match_condition=self._same
            ).readall()
            return content

        return Ranges(self, fetch)


class _Token:
    """A token of Azure that a client passed."""

    def __init__(self, token: str) -> None:
        self._token = token

    def get_token(self, *_scopes: str, **_options: Any) -> Any:
        """Return it."""
        made = importlib.import_module("azure.core.credentials").AccessToken
        return made(self._token, int(time.time()) + _TOKEN_S)


def _azure_credential(options: dict[str, Any]) -> Any:
    """Return a credential that is made of these options alone; None: none is needed."""
    core = importlib.import_module("azure.core.credentials")
    if "account_key" in options:
        return core.AzureNamedKeyCredential(options["account_name"], options["account_key"])
    if "sas_token" in options:
        return core.AzureSasCredential(options["sas_token"])
    if "client_secret" in options:
        identity = importlib.import_module("azure.identity")
        return identity.ClientSecretCredential(
            options["tenant_id"], options["client_id"], options["client_secret"],
            authority=AZURE_LOGIN,
        )  # fmt: skip
    return _Token(options["token"]) if "token" in options else None
