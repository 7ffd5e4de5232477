"""S3 and compatible stores: requests are signed here (Signature Version 4), botocore finds the
credentials of a process.

Source: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar
from urllib.parse import quote

from ffserve.store import urls
from ffserve.store.cache_network import SIGNED_S, SignedUrl
from ffserve.store.schemes.scheme import Options, cannot_pass, refuse_others, without_none
from ffserve.store.web import Web, WebRequest, address_of
from ffserve.store.web_files import Objects, RenewedOptions, WebScheme

_REGION = re.compile(r"[a-z0-9-]{1,64}")
_USUAL_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-(?!gov|iso)[a-z]+-\d+")
"""Regions that share one name space of buckets. In others a bucket of the same name is another."""
_RENEWED_S = 600.0
"""Credentials of services are valid for longer, after botocore has looked at them."""
_NOTHING = hashlib.sha256(b"").hexdigest()


class S3(WebScheme):
    """Buckets of Amazon S3, or of an endpoint that speaks its protocol."""

    name = "s3"
    protocols = "s3", "s3a"
    package = "botocore"
    loggers = ("botocore",)
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
            "verify": client.pop("verify", None),
        }
        if found["endpoint_url"] is None:
            names = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"
            named = (os.environ[name] for name in names if os.environ.get(name))
            found["endpoint_url"] = next(named, scoped.get("endpoint_url"))
        anonymous = settings.pop("anon", False)
        refuse_others({**settings, **client}, self)
        if found["verify"] is None and not str(found["endpoint_url"]).startswith("http://"):
            found["verify"] = os.environ.get("AWS_CA_BUNDLE") or scoped.get("ca_bundle")
        if "services" in scoped:
            raise cannot_pass("a configuration of S3 with services")
        if found["key"] is None and not anonymous:
            credentials = session.get_credentials()
            if credentials is None:
                raise importlib.import_module("botocore.exceptions").NoCredentialsError
            frozen = credentials.get_frozen_credentials()
            found.update(key=frozen.access_key, secret=frozen.secret_key, token=frozen.token)
            if hasattr(credentials, "refresh_needed"):
                found["expires"] = time.time() + _RENEWED_S
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

    def files(self, url: str, web: Web, credentials: RenewedOptions) -> S3Objects:
        return S3Objects(web, credentials)


class S3Objects(Objects):
    """Buckets of S3; the first request to a bucket of Amazon asks for its region."""

    def __init__(self, web: Web, credentials: RenewedOptions) -> None:
        super().__init__(web, credentials)
        self._addresses: dict[tuple[str, ...], tuple[str, str]] = {}
        self._key: tuple[tuple[str, ...], bytes] = (), b""
        """What the last key for signatures was made of, and the key."""
        self._made: tuple[str, dict[Any, dict[str, str]]] = "", {}
        """A second, and the headers that were signed in it: ranges of a file have the same."""

    def new_request(
        self, options: Options, method: str, path: str, query: Mapping[str, str],
        headers: Mapping[str, str], body: bytes | Iterable[bytes],
    ) -> WebRequest:  # fmt: skip
        url, region = self._url(options, path, query)
        given = dict(headers)
        if options.get("requester_pays"):
            given["x-amz-request-payer"] = "requester"
        if "key" in options:
            given |= self._signed(options, region, method, url, given, body)
        return WebRequest(self.web, method, url, given, body)

    def _url(self, options: Options, path: str, query: Mapping[str, str]) -> tuple[str, str]:
        """Return the URL of a file, and the region that it is in."""
        bucket, _, key = path.partition("/")
        place = options.get("endpoint_url", ""), options.get("region", "us-east-1")
        asked = bucket, options.get("addressing_style", "auto"), *place
        if asked not in self._addresses:
            self._addresses[asked] = self._address(*asked)
        address, region = self._addresses[asked]
        names = sorted(query)
        text = "&".join(f"{quote(name, safe='')}={quote(query[name], safe='')}" for name in names)
        return f"{address}/{quote(key, safe='/~')}{'?' if text else ''}{text}", region

    def signed(self, options: Options, path: str, tag: str) -> SignedUrl:
        query = {"x-amz-request-payer": "requester"} if options.get("requester_pays") else {}
        url, region = self._url(options, path, query)
        if "key" not in options:
            return SignedUrl(url)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        query |= {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256", "X-Amz-Date": stamp,
            "X-Amz-Credential": f"{options['key']}/{stamp[:8]}/{region}/s3/aws4_request",
            "X-Amz-Expires": str(SIGNED_S), "X-Amz-SignedHeaders": "host",
        }  # fmt: skip
        if "token" in options:
            query["X-Amz-Security-Token"] = options["token"]
        url = self._url(options, path, query)[0]
        request = "GET", url, {"host": address_of(url).place}, "UNSIGNED-PAYLOAD"
        return SignedUrl(
            f"{url}&X-Amz-Signature={self._signature(options, region, stamp, *request)}"
        )

    def _address(self, bucket: str, style: str, endpoint: str, region: str) -> tuple[str, str]:
        """Return the URL of a bucket, and its region."""
        if endpoint:
            begin, _, host = endpoint.rstrip("/").partition("://")
            virtual = style == "virtual"
            return f"{begin}://{f'{bucket}.{host}' if virtual else f'{host}/{bucket}'}", region
        if _USUAL_REGION.fullmatch(region):
            answer = self.web.request("HEAD", f"https://s3.{region}.amazonaws.com/{bucket}", {})
            region = answer.headers.get("x-amz-bucket-region", region)
        host = f"s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
        if style == "path" or "." in bucket:  # no certificate has names with more dots
            return f"https://{host}/{bucket}", region
        return f"https://{bucket}.{host}", region

    def _signed(
        self, options: Options, region: str, method: str, url: str, headers: Mapping[str, str],
        body: bytes | Iterable[bytes],
    ) -> dict[str, str]:  # fmt: skip
        """Return the headers that sign a request."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        content = "UNSIGNED-PAYLOAD" if body else _NOTHING
        signed = {name: text for name, text in headers.items() if name.startswith("x-amz-")}
        if self._made[0] != stamp:
            self._made = stamp, {}
        made = self._made[1]
        secrets = options["key"], options["secret"], options.get("token")
        asked = stamp, *secrets, region, method, url, content, *signed.items()
        if asked in made:
            return made[asked]
        signed |= {"host": address_of(url).place, "x-amz-content-sha256": content}
        signed["x-amz-date"] = stamp
        if "token" in options:
            signed["x-amz-security-token"] = options["token"]
        signature = self._signature(options, region, stamp, method, url, signed, content)
        signed["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={options['key']}/{stamp[:8]}/{region}/s3/aws4_request, "
            f"SignedHeaders={';'.join(sorted(signed))}, Signature={signature}"
        )
        made[asked] = signed
        return signed

    def _signature(
        self, options: Options, region: str, stamp: str, method: str, url: str,
        headers: Mapping[str, str], content: str,
    ) -> str:  # fmt: skip
        """Return the signature of a request. Args: headers: those that are signed."""
        names = sorted(headers)
        listed = ";".join(names)
        path, _, query = address_of(url).path.partition("?")
        lines = "".join(f"{name}:{headers[name]}\n" for name in names)
        digest = hashlib.sha256(
            f"{method}\n{path}\n{query}\n{lines}\n{listed}\n{content}".encode()
        ).hexdigest()
        scope = stamp[:8], region, "s3", "aws4_request"
        made = f"AWS4{options['secret']}", *scope
        if self._key[0] != made:
            key = made[0].encode()
            for part in scope:
                key = hmac.digest(key, part.encode(), "sha256")
            self._key = made, key
        message = f"AWS4-HMAC-SHA256\n{stamp}\n{'/'.join(scope)}\n{digest}"
        return hmac.digest(self._key[1], message.encode(), "sha256").hex()


SCHEME = S3()
