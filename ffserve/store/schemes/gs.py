"""Google Cloud Storage: gcsfs with a process's settings, Google's package with passed credentials.

gcsfs takes what it is not given from the environment and the files of its process, tries again for
a minute by itself, and reads without conditions. So for others the daemon uses Google's package:
it is given everything, asks once, and each read names the generation of the object.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from typing import Any, ClassVar

from ffserve.store import urls
from ffserve.store.schemes.scheme import (
    OpenVersion,
    Options,
    Scheme,
    cannot_pass,
    refuse_others,
    restrict_session,
)

_ENDPOINT = "https://storage.googleapis.com"
_TOKENS = "https://oauth2.googleapis.com/token"
_READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"
_EMULATOR = "STORAGE_EMULATOR_HOST"
_SERVICE_ACCOUNT = ("client_email", "private_key", "private_key_id")


class GoogleStorage(Scheme):
    """Buckets of Google Cloud Storage."""

    name = "gs"
    protocols = "gs", "gcs"
    package = "gcsfs"
    module = "google.cloud.storage"
    loggers = "gcsfs", "google"
    settings = "GOOGLE_", "GCSFS_", "CLOUDSDK_", "STORAGE_EMULATOR_"
    forgotten = "GCSFS_", "GOOGLE_", "STORAGE_EMULATOR_"
    options: ClassVar = {
        "token": str, "refresh_token": str, "client_id": str, "client_secret": str,
        "client_email": str, "private_key": str, "private_key_id": str, "endpoint_url": str,
        "user_project": str,
    }  # fmt: skip
    needed: ClassVar = {
        "refresh_token": ("client_id", "client_secret"),
        "private_key": ("client_email",),
    }
    tags = "generation", "etag", "md5Hash"
    credential_errors = "DefaultCredentialsError", "RefreshError"
    connection_errors = ("TransportError",)

    def collect(self, settings: Options) -> Options:
        token, project = settings.pop("token", None), settings.pop("project", None)
        payer = settings.pop("requester_pays", None)
        found: Options = {
            "endpoint_url": settings.pop("endpoint_url", None) or os.environ.get(_EMULATOR)
        }
        refuse_others(settings, self)
        if "GOOGLE_CLOUD_UNIVERSE_DOMAIN" in os.environ or (
            os.environ.get("GOOGLE_API_USE_CLIENT_CERTIFICATE", "").lower() == "true"
        ):
            raise cannot_pass(
                "this configuration of Google Cloud (another universe, or certificates)"
            )
        if (endpoint := found["endpoint_url"]) and "://" not in endpoint:
            found["endpoint_url"] = f"http://{endpoint}"
        # gcsfs finds the credentials, and has them already for the listing.
        google = importlib.import_module("fsspec").filesystem("gs").credentials
        credentials = google.credentials
        if payer:
            found["user_project"] = payer if isinstance(payer, str) else project or google.project
        account = _service_account(token)
        if credentials is not None and account.get("client_email") is not None:
            found.update({name: account.get(name) for name in _SERVICE_ACCOUNT})
        elif getattr(credentials, "refresh_token", None) and credentials.client_secret:
            names = "refresh_token", "client_id", "client_secret"
            found.update({name: getattr(credentials, name) for name in names})
        elif credentials is not None:
            google.maybe_refresh()
            found["token"] = credentials.token
        return {name: value for name, value in found.items() if value}

    def place(self, url: str, origin: str, options: Options, access: str) -> str:
        endpoint = options.get("endpoint_url")
        return f"{origin}@{urls.shown(endpoint)}" if endpoint else origin

    def connect(self, url: str, options: Options) -> tuple[Any, str]:
        system = GoogleObjects(options, (self.connect_s, self.silent_s))
        return system, self.path_in(system, url)

    def path_in(self, system: Any, url: str) -> str:
        return url.partition("://")[2]

    def open(self, system: Any, path: str, *, size: int, tag: str) -> OpenVersion:
        if isinstance(system, GoogleObjects):
            return system.open(path, tag)
        return super().open(system, path, size=size, tag=tag)


def _service_account(token: Any) -> dict[str, Any]:
    """Return the key of a service account that gcsfs takes; {} if it takes none."""
    if token in (None, "google_default"):
        token = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if isinstance(token, str) and os.path.exists(token):
        with contextlib.suppress(OSError, ValueError), open(token, encoding="utf-8") as file:
            token = json.load(file)
    known = isinstance(token, dict) and token.get("type") == "service_account"
    return token if known else {}


class GoogleObjects:
    """Objects by path (``BUCKET/NAME``), with Google's package. It has no listings, since the
    client lists."""

    async_impl = False

    def __init__(self, options: Options, timeout: tuple[float, float]) -> None:
        storage = importlib.import_module("google.cloud.storage")
        requests = importlib.import_module("google.auth.transport.requests")
        credentials = _credentials(options)
        # A session of our own takes neither client certificates nor ~/.netrc of this user.
        session = requests.AuthorizedSession(credentials)
        restrict_session(session)
        self._client = storage.Client(
            project="none",
            credentials=credentials,
            _http=session,
            client_options={"api_endpoint": options.get("endpoint_url", _ENDPOINT)},
        )
        self._payer = options.get("user_project")
        self._how = {"timeout": timeout, "retry": None}

    def invalidate_cache(self) -> None:
        """Do nothing: there is no cache."""

    def _bucket(self, path: str) -> tuple[Any, str]:
        name, _, key = path.partition("/")
        return self._client.bucket(name, user_project=self._payer), key

    def info(self, path: str) -> dict[str, Any]:
        """Return size and generation of an object. Raises: what the package raises."""
        bucket, key = self._bucket(path)
        blob = bucket.get_blob(key, **self._how)
        if blob is None:
            raise FileNotFoundError(path)
        version = {"generation": str(blob.generation), "updated": blob.updated}
        return {"name": path, "type": "file", "size": blob.size, **version}

    def open(self, path: str, generation: str) -> OpenVersion:
        """Open a generation of an object; the first request is its first read."""
        bucket, key = self._bucket(path)
        blob = bucket.blob(key, generation=int(generation))
        failures = importlib.import_module("google.api_core.exceptions")

        def fetch(start: int, end: int) -> bytes:
            how = {"raw_download": True, "checksum": None, **self._how}
            try:
                content: bytes = blob.download_as_bytes(start=start, end=end - 1, **how)
            except failures.NotFound as error:  # the object was replaced or deleted
                raise failures.PreconditionFailed(
                    "the origin no longer has this generation of the object"
                ) from error
            return content

        return OpenVersion(fetch, conditional=True)


def _credentials(options: Options) -> Any:
    """Return credentials that are made of these options alone."""
    if "private_key" in options:
        service = importlib.import_module("google.oauth2.service_account")
        given = {name: options[name] for name in _SERVICE_ACCOUNT if name in options}
        return service.Credentials.from_service_account_info(
            {"type": "service_account", "token_uri": _TOKENS, **given}, scopes=[_READ_ONLY]
        )
    if "token" in options or "refresh_token" in options:
        names = "refresh_token", "client_id", "client_secret"
        given = {name: options[name] for name in names if name in options}
        oauth2 = importlib.import_module("google.oauth2.credentials")
        return oauth2.Credentials(options.get("token"), token_uri=_TOKENS, **given)
    return importlib.import_module("google.auth.credentials").AnonymousCredentials()


SCHEME = GoogleStorage()
