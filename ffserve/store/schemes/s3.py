"""S3 and compatible stores, with s3fs: each read is conditional on the ETag."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from ffserve.limits import MOST_LISTED
from ffserve.store import urls
from ffserve.store.schemes.scheme import (
    OpenVersion,
    Options,
    Scheme,
    cannot_pass,
    file_of,
    listing_too_long,
    new_file_system,
    opened,
    refuse_others,
    traced_redirects,
    without_none,
)

_REGION = re.compile(r"[a-z0-9-]{1,64}")
_LEAST_OF_PAGE = 250
"""A page of a listing counts as this many files at least: pages may be empty for ever."""
_USUAL_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-(?!gov|iso)[a-z]+-\d+")
"""Regions that share one name space of buckets. In others a bucket of the same name is another."""


class S3(Scheme):
    """Buckets of Amazon S3, or of an endpoint that speaks its protocol."""

    name = "s3"
    protocols = "s3", "s3a"
    package = module = "s3fs"
    loggers = "aiobotocore", "boto3", "botocore", "s3fs"
    settings = ("AWS_",)
    forgotten = ("AWS_",)
    own_files = "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"
    options: ClassVar = {
        "key": str, "secret": str, "token": str, "endpoint_url": str, "region": str,
        "addressing_style": str, "requester_pays": bool,
    }  # fmt: skip
    credential_errors = (
        "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
        "TokenRetrievalError", "ProfileNotFound", "SSOTokenLoadError", "UnauthorizedSSOTokenError",
    )  # fmt: skip
    denied_codes = "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "AccessDenied"
    busy_codes = "SlowDown", "ServiceUnavailable", "RequestTimeout", "Throttling", "InternalError"
    connection_errors = (
        "EndpointConnectionError", "IncompleteReadError", "ResponseStreamingError",
        "ConnectionClosedError",
    )  # fmt: skip

    def collect(self, settings: Options) -> Options:
        botocore = importlib.import_module("botocore.session")
        session = botocore.Session(profile=settings.pop("profile", None))
        scoped: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # the profile does not exist: the reader says so
            scoped = session.get_scoped_config()
        client = dict(settings.pop("client_kwargs", {}))
        found = {
            "key": settings.pop("key", settings.pop("username", None)),
            "secret": settings.pop("secret", settings.pop("password", None)),
            "token": settings.pop("token", None),
            "endpoint_url": settings.pop("endpoint_url", None) or client.pop("endpoint_url", None),
            "region": client.pop("region_name", None) or session.get_config_variable("region"),
            "requester_pays": settings.pop("requester_pays", None),
            "addressing_style": (scoped.get("s3") or {}).get("addressing_style"),
        }
        if found["endpoint_url"] is None:
            names = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"
            named = (os.environ[name] for name in names if os.environ.get(name))
            found["endpoint_url"] = next(named, scoped.get("endpoint_url"))
        anonymous = settings.pop("anon", False)
        refuse_others({**settings, **client}, self)
        encrypted = not str(found["endpoint_url"]).startswith("http://")
        own = encrypted and (os.environ.get("AWS_CA_BUNDLE") or scoped.get("ca_bundle"))
        if "services" in scoped or own:
            raise cannot_pass("this configuration of S3 (services, or certificates of its own)")
        if found["key"] is None and not anonymous:
            credentials = session.get_credentials()
            if credentials is None:
                raise cannot_pass("the access to S3 without credentials")
            frozen = credentials.get_frozen_credentials()
            found.update(key=frozen.access_key, secret=frozen.secret_key, token=frozen.token)
        return without_none(found)

    def is_valid(self, name: str, value: Any) -> bool:
        if name == "region":
            return _REGION.fullmatch(value) is not None
        if name == "addressing_style":
            return value in ("auto", "path", "virtual")
        return super().is_valid(name, value)

    def place(self, url: str, origin: str, options: Options, access: str) -> str:
        if endpoint := options.get("endpoint_url"):
            return f"{origin}@{urls.shown(endpoint)}"
        region = options.get("region", "")
        return origin if not region or _USUAL_REGION.fullmatch(region) else f"{origin}@{region}"

    def connect(self, url: str, options: Options) -> tuple[Any, str]:
        config: dict[str, Any] = {**self._config(), "ignore_configured_endpoint_urls": True}
        if (session := _session_class()) is not None:
            config["http_session_cls"] = session
        if style := options.get("addressing_style"):
            config["s3"] = {"addressing_style": style}
        made: dict[str, Any] = {"config_kwargs": config, "anon": "key" not in options}
        for name in ("key", "secret", "token", "endpoint_url", "requester_pays"):
            if name in options:
                made[name] = options[name]
        if region := options.get("region"):
            made["client_kwargs"] = {"region_name": region}
        system, path = new_file_system(url, **made)
        system.retries = 1
        return system, path

    def connect_own(self, url: str, settings: Options) -> tuple[Any, str]:
        system, path = super().connect_own(url, settings)
        system.retries = 1  # s3fs's own: the store waits and tries again by itself
        return system, path

    def defaults(self, settings: Options) -> Options:
        return {"config_kwargs": self._config()}

    def _config(self) -> dict[str, Any]:
        return {
            "connect_timeout": self.connect_s,
            "read_timeout": self.silent_s,
            "retries": {"max_attempts": 1},
            "max_pool_connections": 64,
        }

    @contextlib.contextmanager
    def listing(self, system: Any) -> Iterator[None]:
        count, before = 0, None

        def came(parsed: Options, **_: Any) -> None:
            nonlocal count, before
            count += max(int(parsed.get("KeyCount") or 0), _LEAST_OF_PAGE)
            token = parsed.get("NextContinuationToken")
            if token is not None and token == before:
                raise listing_too_long("the same page again and again")
            before = token
            if count > MOST_LISTED:
                raise listing_too_long(f"more than {MOST_LISTED} files")

        name, events = "after-call.s3.ListObjectsV2", system.s3.meta.events
        events.register(name, came)
        try:
            yield
        finally:
            events.unregister(name, came)

    def open(self, system: Any, path: str, *, size: int, tag: str) -> OpenVersion:
        file = file_of(system, path)
        # Every read is conditional on the version that was opened just now.
        conditional = bool(getattr(file, "req_kw", {}).get("IfMatch"))
        facts = getattr(file, "details", None) or None
        return opened(file, conditional=conditional, facts=facts)


@functools.cache
def _session_class() -> Any:
    """Return the sessions of aiobotocore, which follow redirects, with few headers to others; None:
    this release of it takes no other ones."""
    config = importlib.import_module("aiobotocore.config").AioConfig
    usual = importlib.import_module("aiobotocore.httpsession").AIOHTTPSession
    if "http_session_cls" not in inspect.signature(config).parameters:
        return None

    class StrictSession(usual):  # type: ignore[misc, valid-type]
        async def _get_session(self, *given: Any) -> Any:
            session = await super()._get_session(*given)
            if not session.trace_configs:
                traced = traced_redirects()
                traced.freeze()
                session.trace_configs.append(traced)
            return session

    return StrictSession


SCHEME = S3()
