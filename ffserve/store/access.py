"""Access: with what a client reaches origins, so that the daemon can fetch for it.

A client collects the options of its file systems (`collect`): the credentials that the packages
find in its environment and files, and where an endpoint of S3 is. They travel to the daemon as
text, and the daemon uses nothing else (`Access`): neither credentials, keys nor configuration of
its own, so that nobody reads with the rights of the daemon. Only options of a short list are taken,
of few protocols; what cannot travel (Kerberos tickets, keys in an agent) is left to the client.
The packages below fsspec fall back to the environment and files of their process for what they are
not given. So here they are given all of it, or are not used (`clouds.py`).

A daemon that reads for its own user alone (`store.access = "own"`) has what that user's processes
have: environment, files, tickets. If these are the client's (`own_settings`), it reads any protocol
as the client would by itself (`Access.own`).

Nothing here is logged or shown. `Access` has no secrets in its text.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import importlib
import io
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.store import clouds, urls

FAMILIES = {
    "s3": "s3", "s3a": "s3", "http": "http", "https": "http", "sftp": "sftp", "ssh": "sftp",
    "gs": "gs", "gcs": "gs", "abfs": "abfs", "abfss": "abfs", "az": "abfs", "hf": "hf",
    "webhdfs": "webhdfs",
}  # fmt: skip
"""Protocols that the daemon fetches by, and the family whose options each has."""
MODULES = {
    "s3": "s3fs", "http": "aiohttp", "sftp": "paramiko", "gs": "google.cloud.storage",
    "abfs": "azure.storage.blob", "hf": "huggingface_hub", "webhdfs": "requests",
}  # fmt: skip
"""What the daemon needs for each family."""
HUB_ENDPOINT = "https://huggingface.co"
MOST_TEXT = 64 << 10
"""Bytes of the text of an access."""
MOST_KEYS = 8
"""Private keys of one user that are tried."""
CONNECT_S, SILENT_S = 10.0, 30.0
"""An origin that does not accept a connection, or sends nothing, for so long has failed."""

_OPTIONS: dict[str, dict[str, type[Any]]] = {
    "s3": {
        "key": str, "secret": str, "token": str, "endpoint_url": str, "region": str,
        "addressing_style": str, "requester_pays": bool,
    },
    "http": {"headers": dict},
    "sftp": {"username": str, "password": str, "port": int, "keys": list},
    "gs": {
        "token": str, "refresh_token": str, "client_id": str, "client_secret": str,
        "client_email": str, "private_key": str, "private_key_id": str, "endpoint_url": str,
        "user_project": str,
    },
    "abfs": {
        "account_name": str, "account_key": str, "sas_token": str, "endpoint_url": str,
        "tenant_id": str, "client_id": str, "client_secret": str, "token": str,
    },
    "hf": {"token": str, "endpoint_url": str},
    "webhdfs": {"user": str, "password": str, "token": str, "port": int, "use_https": bool},
    "own": {"settings": str},
}  # fmt: skip
_TOGETHER: dict[str, dict[str, tuple[str, ...]]] = {
    "gs": {"refresh_token": ("client_id", "client_secret"), "private_key": ("client_email",)},
    "abfs": {"account_key": ("account_name",), "client_secret": ("tenant_id", "client_id")},
    "webhdfs": {"password": ("user",)},
}
"""Options that are nothing without others."""
_TALKING = (
    "aiobotocore", "aiohttp", "asyncio", "asyncssh", "azure", "boto3", "botocore", "fsspec",
    "gcsfs", "google", "httpx", "httpx2", "huggingface_hub", "msal", "paramiko", "requests", "s3fs",
    "urllib3", "webhdfs",
)  # fmt: skip
_OWN_VARIABLES = ("AZURE_", "GCSFS_", "GOOGLE_", "HF_", "HUGGING_FACE_", "STORAGE_EMULATOR_")
"""Of the environment: what packages would take from there."""
_SETTINGS = {
    "s3": ("AWS_",), "gs": ("GOOGLE_", "GCSFS_", "CLOUDSDK_", "STORAGE_EMULATOR_"),
    "abfs": ("AZURE_",), "hf": ("HF_", "HUGGING_FACE_"), "sftp": ("SSH_AUTH_",),
    "hdfs": ("HADOOP_", "KRB5"), "viewfs": ("HADOOP_", "KRB5"), "webhdfs": ("HADOOP_", "KRB5"),
}  # fmt: skip
"""Of the environment, by family: what its package takes from there. Of other protocols: what begins
with their names."""
_USER_SETTINGS = (
    "HOME", "USER", "LOGNAME", "NETRC", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTP_PROXY",
    "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
_IN_PROCESS = ("memory",)
"""Protocols whose files are in the memory of one process."""
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_ACCOUNT_HOST = re.compile(r"([a-z0-9]+)\.(?:dfs|blob)\.core\.windows\.net")
_REGION = re.compile(r"[a-z0-9-]{1,64}")
_USUAL_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-(?!gov|iso)[a-z]+-\d+")
"""Regions of one name space of buckets; in others a bucket's name may be somebody else's."""
Options: TypeAlias = dict[str, dict[str, Any]]


def _no_travel(what: str) -> ReadError:
    return ReadError(
        f"{what} cannot be passed to the daemon, which could not read these files",
        hint="this process reads them by itself, by ranges",
    )


# ---- in the client -------------------------------------------------------------------------------


def collect(some: Sequence[str], *, own: bool = False) -> str:
    """Return the access of this process to the origins of URLs, as text for the daemon.

    It reads files, and may ask services for credentials.

    Args: own: whether the daemon uses its own settings if they are those of this process.
    Raises: ReadError: the daemon cannot have what is needed.
    """
    protocols = _protocols(some)
    settings = {"own": {"settings": own_settings(some)}} if own else {}
    try:
        text = json.dumps({**_passed(protocols), **settings}, separators=(",", ":"))
        if len(text) > MOST_TEXT:
            raise _no_travel(f"an access of {len(text)} bytes")
        return text
    except ReadError:
        if not own or not protocols.isdisjoint(_IN_PROCESS):
            raise
        return json.dumps(settings)


def _protocols(some: Iterable[str]) -> set[str]:
    return {url.partition("://")[0].lower() for url in some}


def own_settings(some: Sequence[str]) -> str:
    """Return a digest of what decides in this process with what URLs are read: variables of the
    environment, and fsspec's configuration."""
    conf = importlib.import_module("fsspec").config.conf
    protocols = sorted(_protocols(some))
    families = {FAMILIES.get(name, name) for name in protocols}
    prefixes = {each for name in families for each in _SETTINGS.get(name, (name.upper(),))}
    found = {
        name: value
        for name, value in os.environ.items()
        if name.upper() in _USER_SETTINGS or name.startswith(tuple(prefixes))
    }
    seed = repr([sorted(found.items()), [(name, conf.get(name, {})) for name in protocols]])
    return hashlib.blake2b(seed.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _passed(protocols: Iterable[str]) -> Options:
    """Return the options of these protocols. Raises: ReadError: the daemon cannot have them."""
    found: Options = {}
    for protocol in sorted(protocols):
        family = FAMILIES.get(protocol)
        if family is None:
            raise _no_travel(f"the access to {protocol}://")
        try:
            options = _COLLECTORS[family](_settings(protocol))
        except FFServeError:
            raise
        except Exception as error:  # of the packages; the reader says what it is
            raise _no_travel(f"the access to {protocol}:// ({type(error).__name__})") from error
        if found.setdefault(family, options) != options:
            raise _no_travel(f"an access to {protocol}:// that differs from that to its like")
    return found


def _settings(protocol: str) -> dict[str, Any]:
    """Return what the user has set for a protocol in fsspec's configuration."""
    fsspec = importlib.import_module("fsspec")
    return dict(fsspec.config.conf.get(protocol, {}))


def _left(settings: dict[str, Any], protocol: str) -> None:
    """Raise a ReadError for settings that are not understood: the daemon would do without."""
    for name in settings:
        raise _no_travel(f"the option {name!r} of {protocol}:// in fsspec's configuration")


def _collect_s3(settings: dict[str, Any]) -> dict[str, Any]:
    botocore = importlib.import_module("botocore.session")
    session = botocore.Session(profile=settings.pop("profile", None))
    scoped: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a profile that is not there: the reader says so
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
    _left({**settings, **client}, "s3")
    encrypted = not str(found["endpoint_url"]).startswith("http://")
    own = encrypted and (os.environ.get("AWS_CA_BUNDLE") or scoped.get("ca_bundle"))
    if "services" in scoped or own:
        raise _no_travel("this configuration of S3 (services, or certificates of its own)")
    if found["key"] is None and not anonymous:
        credentials = session.get_credentials()
        if credentials is None:
            raise _no_travel("the access to S3 without credentials")
        frozen = credentials.get_frozen_credentials()
        found.update(key=frozen.access_key, secret=frozen.secret_key, token=frozen.token)
    return {name: value for name, value in found.items() if value is not None}


def _collect_http(settings: dict[str, Any]) -> dict[str, Any]:
    headers = {**settings.pop("headers", {})}
    client = dict(settings.pop("client_kwargs", {}))
    headers.update(client.pop("headers", {}))
    _left({**settings, **client}, "http")
    return {"headers": headers} if headers else {}


def _collect_sftp(settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"username": settings.pop("username", None) or getpass.getuser()}
    for name in ("password", "port"):
        if name in settings:
            found[name] = settings.pop(name)
    named = settings.pop("key_filename", None)
    _left(settings, "sftp")
    if named is None:
        directory = os.path.expanduser("~/.ssh")
        named = [os.path.join(directory, f"id_{kind}") for kind in ("ed25519", "ecdsa", "rsa")]
    keys: list[str] = []
    for path in [named] if isinstance(named, str) else named:
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            text = file.read()
            if len(keys) < MOST_KEYS and _private_key(text) is not None:
                keys.append(text)
    if keys:
        found["keys"] = keys
    return found


def _collect_gs(settings: dict[str, Any]) -> dict[str, Any]:
    token, project = settings.pop("token", None), settings.pop("project", None)
    payer = settings.pop("requester_pays", None)
    found: dict[str, Any] = {
        "endpoint_url": settings.pop("endpoint_url", None) or os.environ.get(_GOOGLE_EMULATOR)
    }
    _left(settings, "gs")
    if "GOOGLE_CLOUD_UNIVERSE_DOMAIN" in os.environ or (
        os.environ.get("GOOGLE_API_USE_CLIENT_CERTIFICATE", "").lower() == "true"
    ):
        raise _no_travel("this configuration of Google Cloud (another universe, or certificates)")
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


_GOOGLE_EMULATOR = "STORAGE_EMULATOR_HOST"
_SERVICE_ACCOUNT = ("client_email", "private_key", "private_key_id")


def _service_account(token: Any) -> dict[str, Any]:
    """Return the key of a service account that gcsfs takes; {} if it takes none."""
    if token in (None, "google_default"):
        token = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if isinstance(token, str) and os.path.exists(token):
        with contextlib.suppress(OSError, ValueError), open(token, encoding="utf-8") as file:
            token = json.load(file)
    known = isinstance(token, dict) and token.get("type") == "service_account"
    return token if known else {}


def _collect_abfs(settings: dict[str, Any]) -> dict[str, Any]:
    names = (
        "account_name", "account_key", "connection_string", "sas_token", "client_id",
        "client_secret", "tenant_id",
    )  # fmt: skip
    found: dict[str, Any] = {
        name: settings.pop(name, None) or os.environ.get(f"AZURE_STORAGE_{name.upper()}")
        for name in names
    }
    host, anonymous = settings.pop("account_host", None), settings.pop("anon", None)
    if anonymous is None:
        named = os.environ.get("AZURE_STORAGE_ANON", "false").lower()
        anonymous = named not in ("false", "0", "f", "")
    _left(settings, "abfs")
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
                found["token"] = credential.get_token("https://storage.azure.com/.default").token
    kept += ["account_name", "endpoint_url"]
    return {name: value for name, value in found.items() if value and name in kept}


def _connection(text: str) -> dict[str, Any]:
    """Return the options in a connection string of Azure."""
    parts = dict(part.partition("=")[::2] for part in text.split(";") if part)
    name, suffix = parts.get("AccountName"), parts.get("EndpointSuffix", "core.windows.net")
    usual = f"{parts.get('DefaultEndpointsProtocol', 'https')}://{name}.blob.{suffix}"
    if "UseDevelopmentStorage" in parts or not (name or parts.get("BlobEndpoint")):
        raise _no_travel("this connection string of Azure")
    return {
        "account_name": name,
        "account_key": parts.get("AccountKey"),
        "sas_token": parts.get("SharedAccessSignature"),
        "endpoint_url": parts.get("BlobEndpoint", usual).rstrip("/"),
    }


def _collect_hf(settings: dict[str, Any]) -> dict[str, Any]:
    hub = importlib.import_module("huggingface_hub")
    token = settings.pop("token", None)
    endpoint = settings.pop("endpoint", None) or hub.constants.ENDPOINT
    _left(settings, "hf")
    if token is None or token is True:
        token = hub.get_token()
    found = {"token": token or None, "endpoint_url": endpoint.rstrip("/")}
    if found["endpoint_url"] == HUB_ENDPOINT:
        del found["endpoint_url"]
    return {name: value for name, value in found.items() if value is not None}


def _collect_webhdfs(settings: dict[str, Any]) -> dict[str, Any]:
    found = {name: settings.pop(name) for name in _OPTIONS["webhdfs"] if name in settings}
    _left(settings, "webhdfs")
    return {name: value for name, value in found.items() if value is not None}


_COLLECTORS = {
    "s3": _collect_s3, "http": _collect_http, "sftp": _collect_sftp, "gs": _collect_gs,
    "abfs": _collect_abfs, "hf": _collect_hf, "webhdfs": _collect_webhdfs,
}  # fmt: skip


def _private_key(text: str) -> Any:
    """Return a private key, None if it is none, or has a passphrase."""
    paramiko = importlib.import_module("paramiko")
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        with contextlib.suppress(Exception):
            return kind.from_private_key(io.StringIO(text))
    return None


# ---- in the daemon -------------------------------------------------------------------------------


def forget_own_settings() -> None:
    """Have no configuration of fsspec in this process, which reads for others, nor variables that
    the packages below it would take settings from."""
    importlib.import_module("fsspec").config.conf.clear()
    for name in [name for name in os.environ if name.startswith(_OWN_VARIABLES)]:
        del os.environ[name]


def quieten_packages() -> None:
    """Log nothing of the packages but warnings: their other lines have headers of requests."""
    for name in _TALKING:
        logging.getLogger(name).setLevel(logging.WARNING)


def is_connected(system: Any) -> bool:
    """Whether a file system can be used: fsspec keeps those of SFTP whose connection was lost."""
    transport = getattr(getattr(system, "client", None), "get_transport", None)
    return transport is None or bool((found := transport()) and found.is_active())


class Access:
    """What a client passed; used for that client's user only. Threads may call it.

    Args: text: of `collect`.
    Raises: UsageError: it is not one.
    """

    def __init__(self, text: str) -> None:
        self._options = _checked(text)
        self._settings = self._options.pop("own", {}).get("settings")
        self.own = False
        """Whether what is used is what this process has."""
        self.digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
        """Another one for each access."""
        self._lock = threading.Lock()
        self._shared: dict[tuple[str, str], Any] = {}
        """File systems that all threads may use, by protocol and host."""
        self._own = threading.local()

    def __repr__(self) -> str:
        return "Access(…)"

    def use_own(self, some: Sequence[str]) -> None:
        """Use what this process has, which reads for its own user alone, if it is what the client
        has.

        Raises: ReadError: it is not, and the client could not pass what it has.
        """
        self.own = self._settings == own_settings(some)
        families = {FAMILIES.get(protocol) for protocol in _protocols(some)}
        if not self.own and not families <= set(self._options):
            raise ReadError(
                "the daemon was started with other settings for these files (environment, or "
                "fsspec's configuration) than this process has",
                path=urls.shown(some[0]),
                hint="`ffserve stop` ends it, and the next reader starts another",
            )

    def place(self, url: str) -> str:
        """Return where the bytes of a URL come from, for people and `[store] common`: its origin,
        and what leads elsewhere under the same name."""
        if self.own:
            return urls.origin_of(url)
        protocol = url.partition("://")[0].lower()
        family, origin = FAMILIES[protocol], urls.origin_of(url)
        options = self._options.get(family, {})
        if family == "s3":
            if endpoint := options.get("endpoint_url"):
                return f"{origin}@{urls.shown(endpoint)}"
            region = options.get("region", "")
            return origin if not region or _USUAL_REGION.fullmatch(region) else f"{origin}@{region}"
        if family == "http" and options.get("headers"):
            # An origin may answer another name, or another user.
            return f"{origin} with headers {self.digest.hex()[:16]}"
        if family == "sftp":
            parts = urlsplit(url)
            user = parts.username or options.get("username", "")
            port = f":{options['port']}" if "port" in options and parts.port is None else ""
            return f"{protocol}://{user}@{origin.partition('://')[2].rpartition('@')[2]}{port}"
        if family == "abfs":
            return f"abfs://{_container(url)[0]}@{urls.shown(_account_address(url, options))}"
        if family == "hf":
            repository = "/".join(url.partition("://")[2].split("/")[:3]).partition("@")[0]
            endpoint = options.get("endpoint_url", HUB_ENDPOINT)
            return f"hf://{repository}@{urls.shown(endpoint)}"
        if family == "webhdfs":
            return _web_hdfs_place(url, options)
        if endpoint := options.get("endpoint_url"):  # of Google
            return f"{origin}@{urls.shown(endpoint)}"
        return origin

    def file_system(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL, and the path in it. Raises: what fsspec raises."""
        core = importlib.import_module("fsspec.core")
        protocol, _, rest = url.partition("://")
        key = protocol.lower(), rest.partition("/")[0]
        own: dict[tuple[str, str], Any] = self._own.__dict__.setdefault("systems", {})
        with self._lock:
            found = self._shared.get(key) or own.get(key)
        if found is not None and is_connected(found):
            return found, _path_in(found, url)
        found, path = self._made(core, url, key[0])
        with self._lock:
            if getattr(found, "async_impl", False):
                found = self._shared.setdefault(key, found)
            else:
                own[key] = found
        return found, path

    def _made(self, core: Any, url: str, protocol: str) -> tuple[Any, str]:
        family = FAMILIES[protocol]
        options = self._options.get(family, {})
        make = _maker(core, url)
        if family == "s3":
            return make(**_s3(options))
        if family == "http":
            return make(client_kwargs=_http(options))
        if family == "hf":
            endpoint = options.get("endpoint_url", HUB_ENDPOINT)
            # Without a token, False: else it would look for one in files.
            return make(endpoint=endpoint, token=options.get("token", False))
        if family == "webhdfs":
            return _web_hdfs(make, url, options)
        if family == "sftp":
            return _sftp(make, url, options)
        waits = CONNECT_S, SILENT_S
        found: clouds.Objects
        if family == "gs":
            found = clouds.GoogleObjects(options, waits)
        else:
            found = clouds.AzureObjects(options, _account_address(url, options), waits)
        return found, _path_in(found, url)


def _path_in(system: Any, url: str) -> str:
    """Return the path of a URL in a file system."""
    if isinstance(system, clouds.AzureObjects):
        return "/".join(_container(url))
    if isinstance(system, clouds.GoogleObjects):
        return url.partition("://")[2]
    return str(type(system)._strip_protocol(url))


def _container(url: str) -> tuple[str, str]:
    """Return container and name of a blob of Azure."""
    host, _, path = url.partition("://")[2].partition("/")
    container, at, _ = host.partition("@")
    if not at and _ACCOUNT_HOST.fullmatch(host):
        container, _, path = path.partition("/")
    return container, path


def _account_address(url: str, options: dict[str, Any]) -> str:
    """Return the address of the account of Azure that a URL is in.

    Raises: ValueError: neither the URL nor the options name one.
    """
    if endpoint := options.get("endpoint_url"):
        return str(endpoint)
    host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    named = _ACCOUNT_HOST.fullmatch(host)
    account = named[1] if named else options.get("account_name")
    if not account:
        raise ValueError("it has no account, and no account is set")
    return f"https://{account}.{clouds.AZURE_HOST}"


def _web_hdfs_place(url: str, options: dict[str, Any]) -> str:
    """Return host and port of a URL, and as whom it is read."""
    parts = urlsplit(url)
    user = parts.username or options.get("user")
    port = parts.port or options.get("port")
    web = "swebhdfs" if options.get("use_https") else "webhdfs"
    return f"{web}://{f'{user}@' if user else ''}{parts.hostname}{f':{port}' if port else ''}"


def _web_hdfs(
    make: Callable[..., tuple[Any, str]], url: str, options: dict[str, Any]
) -> tuple[Any, str]:
    adapters = importlib.import_module("requests.adapters")

    class Impatient(adapters.HTTPAdapter):  # type: ignore[name-defined, misc]
        """Gives up an origin that is silent: fsspec's file system would wait for ever."""

        def send(self, *given: Any, **how: Any) -> Any:
            return super().send(*given, **{**how, "timeout": (CONNECT_S, SILENT_S)})

    named = urlsplit(url)
    usual = {name: value for name, value in options.items() if getattr(named, name, None) is None}
    if named.username is not None:
        usual.pop("user", None)
    system, path = make(**usual)
    system.session.trust_env = False  # neither ~/.netrc nor a proxy of the daemon's
    for begin in ("http://", "https://"):
        system.session.mount(begin, Impatient())
    return system, path


def _maker(core: Any, url: str) -> Callable[..., tuple[Any, str]]:
    """Return a function that makes a file system that nobody else gets."""

    def make(**options: Any) -> tuple[Any, str]:
        system, path = core.url_to_fs(url, skip_instance_cache=True, **options)
        return system, str(path)

    return make


def _s3(options: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "read_timeout": SILENT_S,
        "retries": {"max_attempts": 1},
        "max_pool_connections": 64,
        "ignore_configured_endpoint_urls": True,
    }
    if style := options.get("addressing_style"):
        config["s3"] = {"addressing_style": style}
    made: dict[str, Any] = {"config_kwargs": config, "anon": "key" not in options}
    for name in ("key", "secret", "token", "endpoint_url", "requester_pays"):
        if name in options:
            made[name] = options[name]
    if region := options.get("region"):
        made["client_kwargs"] = {"region_name": region}
    return made


def _http(options: dict[str, Any]) -> dict[str, Any]:
    aiohttp = importlib.import_module("aiohttp")
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
    made: dict[str, Any] = {"timeout": timeout, "trust_env": False}
    if options.get("headers"):
        made["headers"] = options["headers"]
    return made


def _sftp(
    make: Callable[..., tuple[Any, str]], url: str, options: dict[str, Any]
) -> tuple[Any, str]:
    paramiko = importlib.import_module("paramiko")
    usual: dict[str, Any] = {"look_for_keys": False, "allow_agent": False, "timeout": CONNECT_S}
    parts = urlsplit(url)
    for name in ("username", "password", "port"):
        if name in options and getattr(parts, name) is None:
            usual[name] = options[name]
    keys = [key for text in options.get("keys", ()) if (key := _private_key(text)) is not None]
    ways = [{"pkey": key} for key in keys]
    if parts.password or "password" in options or not ways:
        ways.insert(0, {})
    refused: Exception | None = None
    for way in ways:
        try:
            found = make(**usual, **way)
        except (paramiko.AuthenticationException, paramiko.BadAuthenticationType) as error:
            refused = error
        except paramiko.SSHException as error:
            if "No authentication methods" not in str(error):
                raise
            refused = paramiko.AuthenticationException(str(error))
        else:
            return found
    assert refused is not None
    raise refused


def _checked(text: str) -> Options:
    """Return the options in a text. Raises: UsageError."""
    if len(text) > MOST_TEXT:
        raise UsageError("invalid access to an origin: it is too long")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError("invalid access to an origin: not a map of options")
    for family, options in found.items():
        known = _OPTIONS.get(family)
        if known is None or not isinstance(options, dict):
            raise UsageError(f"invalid access to an origin: {family[:40]!r}")
        for name, value in options.items():
            fits = isinstance(value, known.get(name, ())) and _is_valid(name, value)
            others = _TOGETHER.get(family, {}).get(name, ())
            if not fits or any(other not in options for other in others):
                raise UsageError(f"invalid access to an origin: {family}, {name[:40]!r}")
    return found


def _is_valid(name: str, value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    if isinstance(value, dict):
        texts = [*value, *value.values()]
        if not all(isinstance(text, str) for text in texts):
            return False
        return not any("\r" in text or "\n" in text or "\0" in text for text in texts)
    if name == "keys":
        return len(texts) <= MOST_KEYS and all(isinstance(text, str) for text in texts)
    if name == "region":
        return _REGION.fullmatch(value) is not None
    if name == "endpoint_url":
        return str(value).startswith(("http://", "https://"))
    if name == "account_name":
        return _ACCOUNT.fullmatch(value) is not None
    if name == "addressing_style":
        return value in ("auto", "path", "virtual")
    if name == "port":
        return not isinstance(value, bool) and 0 < value < 65536
    return True


def served(url: str) -> bool:
    """Whether the daemon fetches this URL: of a known protocol, and of no other below it (`::`)."""
    protocol = url.partition("://")[0].lower()
    if protocol not in FAMILIES or "::" in url or any(ord(letter) < 32 for letter in url):
        return False
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return bool(parts.netloc) and (port is None or port > 0)
