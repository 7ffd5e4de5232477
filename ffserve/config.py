"""Settings of the daemon, and sizes as people write them.

Every setting is one field of :class:`ServerConfig`. Its metadata has the key in the TOML file, the
flag of ``ffserve serve`` and the text that documents both; ``serve --help``,
docs/CONFIGURATION.md and systemd/ffserve.toml show the same text (tests/unit/test_config.py
compares them). A flag overrides the file, and the file overrides the default. An unknown key or an
invalid value is a :class:`UsageError` that names file, line, key, and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ffserve.errors import UsageError
from ffserve.system.machine_memory import usable_memory
from ffserve.system.socket_path import MAX_SOCKET_PATH, default_socket_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_PATH = "/etc/ffserve/ffserve.toml"

MIN_ARENA_SIZE = 1 << 20
MIN_STORE_SIZE = 32 << 20
TABLES = ("store",)
"""The tables of the file. A key in a table is named after both, such as store.size."""
HUGE_PAGE_SIZE = 2 << 20

EngineName = Literal["auto", "registered", "uring", "aio", "threads"]
ENGINES: tuple[EngineName, ...] = ("auto", "registered", "uring", "aio", "threads")
AccessName = Literal["passed", "own"]
CommonName = Literal["world", "user"]
COMMON: tuple[CommonName, ...] = ("world", "user")
LogLevel = Literal["debug", "info", "warning", "error"]
HttpJobs = Literal["administrators", "all"]
LogFormat = Literal["text", "json"]

LIVE = (
    "roots", "file_systems", "arena", "max_chunk_size", "max_sessions", "drain_timeout",
    "close_after", "idle_timeout", "scrub_rate", "log_level",
)  # fmt: skip
"""Keys that a running daemon takes over when it is told to reload its settings."""

REMOVED = {
    "payload": "samples go through shared memory only, and a process that cannot map it reads "
    "files by itself",
}
"""Keys of earlier releases, and what holds instead of each. The daemon ignores them with a warning,
so that it starts after an upgrade."""

# --------------------------------------------------------------------------- sizes

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_UNITS = {
    "": 1,
    "b": 1,
    **{unit: 1024**power for power, unit in enumerate("kmgtp", 1)},
    **{f"{unit}ib": 1024**power for power, unit in enumerate("kmgtp", 1)},
    **{f"{unit}b": 1000**power for power, unit in enumerate("kmgtp", 1)},
}


def parse_size(size: str | int) -> int:
    """Parse a size and return bytes.

    Args:    size: an integer, or text such as ``"4GiB"``, ``"4G"``, ``"1.5 MiB"``, ``"512"``.
                 K, M, G, T, P and KiB … PiB are powers of 1024; KB … PB are powers of 1000.
    Returns: whole bytes, rounded down.
    Raises:  UsageError: negative, not a number, or an unknown unit.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise UsageError(
            f"invalid size {size!r}", hint="write a size such as 4GiB, 512M, 1.5GB or 65536"
        )
    if isinstance(size, int):
        if size < 0:
            raise UsageError(f"invalid size {size}: it is negative")
        return size
    match = _SIZE.fullmatch(size)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"invalid size {size!r}", hint="write a size such as 4GiB, 512M, 1.5GB or 65536"
        )
    number = match[1]
    return int(float(number) * factor) if "." in number else int(number) * factor


def format_size(size: int | float) -> str:
    """Format bytes for people: ``"0 B"``, ``"4.00 KiB"``, ``"1.46 GiB"``."""
    value = float(size)
    if abs(value) < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if abs(value) < 999.5 or unit == "PiB":
            digits = 2 - min(2, int(math.log10(abs(value)))) if abs(value) >= 1 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("the last unit returns")


# --------------------------------------------------------------------------- memory


def default_arena_size() -> int:
    """Return the default size of the arena.

    A quarter of the memory that this process may use (the machine's, or the limit of its cgroup if
    that is lower), in whole huge pages, and at least 64 MiB.
    """
    quarter = usable_memory() // 4 // HUGE_PAGE_SIZE * HUGE_PAGE_SIZE
    return max(64 << 20, quarter)


def default_max_arena_size() -> int:
    """Return the default of the largest size to which the arena can grow.

    All memory that this process may use, in whole huge pages.
    """
    return usable_memory() // HUGE_PAGE_SIZE * HUGE_PAGE_SIZE


# --------------------------------------------------------------------------- settings


def _documented(
    key: str, flag: str, metavar: str, shown_default: str, parse: Callable[[Any], Any], doc: str
) -> dict[str, Any]:
    """Return the metadata of a field."""
    return {
        "key": key,
        "flag": flag,
        "metavar": metavar,
        "shown_default": shown_default,
        "parse": parse,
        "doc": doc,
    }


def _choice(key: str, choices: tuple[str, ...], default: str, doc: str) -> dict[str, Any]:
    """Return the metadata of a field that has one of some words."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise UsageError(f"expected one of {', '.join(choices)}, not {value!r}")
        return cast(str, value)

    flag = "--" + key.replace("_", "-").replace(".", "-")
    return _documented(key, flag, "|".join(choices), default, parse, doc)


def _parse_roots(value: Any) -> tuple[str, ...]:
    paths = [value] if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(paths, (list, tuple)) or not paths:
        raise UsageError(f"expected one or more directories, not {value!r}")
    return tuple(os.path.normpath(_parse_absolute(path)) for path in paths)


USER_FILE_SYSTEMS = {"fuse": 0x65735546, "overlay": 0x794C7630}
"""File systems that ordinary users can mount, by the f_type of statfs(2)."""


def _parse_file_systems(value: Any) -> tuple[int, ...]:
    names = [value] if isinstance(value, (str, int)) else value
    if not isinstance(names, (list, tuple)):
        raise UsageError(f"expected names of file systems, not {value!r}")
    return tuple(_parse_file_system(name) for name in names)


def _parse_file_system(name: Any) -> int:
    try:
        if name in USER_FILE_SYSTEMS:
            return USER_FILE_SYSTEMS[name]
        number = name if type(name) is int else int(name, 0)
    except (ValueError, TypeError):
        raise UsageError(
            f"unknown file system {name!r}",
            hint=f"use {' or '.join(USER_FILE_SYSTEMS)}, or the number that `stat -f -c 0x%t FILE` "
            "prints",
        ) from None
    return int(number)


def _parse_absolute(value: Any) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not os.path.isabs(path) or "\0" in path:
        raise UsageError(f"expected an absolute path, not {value!r}")
    return path


def _parse_socket(value: Any) -> str:
    path = _parse_absolute(value)
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise UsageError(
            f"the socket path {path} has {len(os.fsencode(path))} bytes, more than the limit of "
            f"{MAX_SOCKET_PATH}",
            hint="choose a shorter path",
        )
    return path


def split_address(text: str) -> str | tuple[str, int]:
    """Return the path of a Unix socket as it is, ``HOST:PORT`` as its parts, without brackets.

    Raises: UsageError.
    """
    if text.startswith("/"):
        return _parse_socket(text)
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"expected HOST:PORT or the path of a socket, not {text!r}",
            hint="write for example 127.0.0.1:9469, [::1]:9469 or /run/ffserve/http.sock",
        )
    return host, int(port)


def _parse_http(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"expected HOST:PORT or the path of a socket, not {value!r}")
    if value:
        split_address(value)
    return value


def _parse_mode(value: Any) -> int:
    try:
        mode = int(value, 8) if isinstance(value, str) else value
    except ValueError:
        mode = None
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o777:
        raise UsageError(
            f"expected permission bits in octal, such as 0660, not {value!r}",
            hint='write 0o660 or "0660" in TOML',
        )
    return mode


def _parse_group(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise UsageError(f"expected the name or number of a group, not {value!r}")


def _parse_arena(value: Any) -> int | None:
    if value is None or value == "auto":
        return None
    size = parse_size(value)
    if size < MIN_ARENA_SIZE:
        raise UsageError(f"expected at least {format_size(MIN_ARENA_SIZE)}, not {value!r}")
    return size


def _parse_chunk_size(value: Any) -> int:
    size = parse_size(value)
    if not 1 << 12 <= size <= 1 << 32:
        raise UsageError(f"expected a size from 4 KiB to 4 GiB, not {value!r}")
    return size


def _count(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise UsageError(f"expected a whole number from {low} to {high}, not {value!r}")
        return number

    return parse


def _seconds(value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds <= 3600:
        raise UsageError(f"expected a number of seconds from 0 to 3600, not {value!r}")
    return seconds


def _parse_store(value: Any) -> str:
    return value if value == "" else _parse_absolute(value)


def _parse_store_size(value: Any) -> int | None:
    if value is None or value == "auto":
        return None
    size = parse_size(value)
    if size < MIN_STORE_SIZE:
        raise UsageError(f"expected at least {format_size(MIN_STORE_SIZE)}, not {value!r}")
    return size


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+(@https?://[^?#\s]+)?")


def _parse_origins(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)):
        raise UsageError(f"expected origins, not {value!r}")
    for name in names:
        if not isinstance(name, str) or _ORIGIN.fullmatch(name) is None:
            raise UsageError(
                f"invalid origin {name!r}",
                hint="write for example s3://bucket or https://example.org",
            )
    return tuple(names)


def parse_cache(value: Any) -> str:
    """Return the address of a cache network; "" for none. Raises: UsageError."""
    if value == "" or (isinstance(value, str) and _CACHE.fullmatch(value) is not None):
        return str(value)
    raise UsageError(
        f"invalid address of a cache {value!r}",
        hint="write http://HOST:PORT, https://HOST:PORT or unix:/PATH",
    )


_CACHE = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}|unix:/[^\0]{1,100}")


def _parse_rate(value: Any) -> int:
    rate = parse_size(value)
    if rate and not 1 << 10 <= rate <= 1 << 40:
        raise UsageError(f"expected 0 or a size from 1KiB to 1TiB a second, not {value!r}")
    return rate


@dataclass(frozen=True)
class ServerConfig:
    """The settings of one daemon, described in docs/CONFIGURATION.md.

    Raises:  UsageError: an invalid value; the message names the key.
    """

    roots: tuple[str, ...] = field(
        default=("/",),
        metadata=_documented(
            "roots",
            "--root",
            "DIR",
            "/",
            _parse_roots,
            "Directories whose files are served; the flag can be repeated. A client still gets "
            "only files that its own user may read.",
        ),
    )
    file_systems: tuple[int, ...] = field(
        default=(),
        metadata=_documented(
            "file_systems",
            "--file-system",
            "NAME",
            "none",
            _parse_file_systems,
            "File systems that are served besides the usual disks and network file systems: "
            "'fuse', 'overlay', or the number that 'stat -f -c 0x%t FILE' prints; the flag can be "
            "repeated. A user who can mount one of them can make the daemon's reads hang.",
        ),
    )
    common: CommonName = field(
        default="world",
        metadata=_choice(
            "common",
            COMMON,
            "world",
            "Files whose cached samples all clients share: 'world' (those that everybody may read) "
            "or 'user' (those that the daemon's own user may read, which its groups decide). "
            "Samples of other files are kept apart for each user.",
        ),
    )
    socket: str = field(
        default_factory=default_socket_path,
        metadata=_documented(
            "socket",
            "--socket",
            "PATH",
            "by user",
            _parse_socket,
            "Path of the Unix socket to listen on. A socket passed by systemd takes precedence.",
        ),
    )
    socket_mode: int = field(
        default=0o660,
        metadata=_documented(
            "socket_mode",
            "--socket-mode",
            "OCTAL",
            "0660",
            _parse_mode,
            "Permission bits of the socket: which users may connect.",
        ),
    )
    socket_group: str | None = field(
        default=None,
        metadata=_documented(
            "socket_group",
            "--socket-group",
            "GROUP",
            "the daemon's own",
            _parse_group,
            "Group of the socket, by name or number; its members may connect.",
        ),
    )
    arena_size_bytes: int | None = field(
        default=None,
        metadata=_documented(
            "arena",
            "--arena",
            "SIZE",
            "auto",
            _parse_arena,
            "Size of the arena, the shared memory for samples, such as 16GiB. 'auto' is a quarter "
            "of the memory that the daemon may use (the machine's, or the limit of its cgroup), "
            "but at least 64 MiB.",
        ),
    )
    max_arena_size_bytes: int | None = field(
        default=None,
        metadata=_documented(
            "max_arena",
            "--max-arena",
            "SIZE",
            "auto",
            _parse_arena,
            "Largest size to which 'ffserve resize' can grow the arena, such as 64GiB. 'auto' is "
            "the memory that the daemon may use. Clients map this much address space.",
        ),
    )
    engine: EngineName = field(
        default="auto",
        metadata=_choice(
            "engine",
            ENGINES,
            "auto",
            "I/O engine. 'auto' takes the first that works: 'registered' (io_uring with registered "
            "buffers), 'uring' (io_uring), 'aio' (Linux AIO), 'threads'. 'ffserve status' shows "
            "which one is in use.",
        ),
    )
    depth: int = field(
        default=128,
        metadata=_documented(
            "depth",
            "--depth",
            "N",
            "128",
            _count(1, 4096),
            "Number of reads in flight, from 1 to 4096. 64 to 128 saturate a local NVMe disk; "
            "network storage may need more.",
        ),
    )
    max_chunk_size_bytes: int = field(
        default=1 << 30,
        metadata=_documented(
            "max_chunk_size",
            "--max-chunk-size",
            "SIZE",
            "1GiB",
            _parse_chunk_size,
            "Largest RecordIO chunk that is read, in the file and decoded, from 4KiB to 4GiB. "
            "Samples in larger chunks fail, so a damaged or hostile file cannot exhaust memory.",
        ),
    )
    max_sessions: int = field(
        default=4096,
        metadata=_documented(
            "max_sessions",
            "--max-sessions",
            "N",
            "4096",
            _count(1, 65536),
            "Largest number of connections, from 1 to 65536. Each reader in each process uses one.",
        ),
    )
    drain_timeout_s: float = field(
        default=10.0,
        metadata=_documented(
            "drain_timeout",
            "--drain-timeout",
            "SECONDS",
            "10",
            _seconds,
            "Seconds that SIGTERM waits for requests in flight before the daemon exits, from 0 to "
            "3600.",
        ),
    )
    close_after_s: float = field(
        default=30.0,
        metadata=_documented(
            "close_after",
            "--close-after",
            "SECONDS",
            "30",
            _seconds,
            "Seconds after which the daemon closes a file that no job has open, from 0 to 3600. "
            "Its samples stay in memory until others need it. Files that were deleted or replaced "
            "are closed within a second, and their samples are dropped.",
        ),
    )
    scrub_rate_bytes: int = field(
        default=0,
        metadata=_documented(
            "scrub_rate",
            "--scrub-rate",
            "SIZE",
            "0",
            _parse_rate,
            "Bytes a second, such as 20MiB, that the daemon reads of files that jobs have open, to "
            "find damage, while nothing is asked for; 0 means never.",
        ),
    )
    idle_timeout_s: float = field(
        default=0.0,
        metadata=_documented(
            "idle_timeout",
            "--idle-timeout",
            "SECONDS",
            "0",
            _seconds,
            "Seconds after its last client after which the daemon exits by itself, at most 3600; "
            "0 means never. A client is a process that opens files.",
        ),
    )
    log_level: LogLevel = field(
        default="info",
        metadata=_choice(
            "log_level",
            ("debug", "info", "warning", "error"),
            "info",
            "Lowest severity of the messages on standard error.",
        ),
    )
    log_format: LogFormat = field(
        default="text",
        metadata=_choice(
            "log_format",
            ("text", "json"),
            "text",
            "Form of these messages: 'text', with the severity for the journal if they go there, "
            "or 'json', one object per line.",
        ),
    )
    http: str = field(
        default="",
        metadata=_documented(
            "http",
            "--http",
            "ADDRESS",
            "none",
            _parse_http,
            "Address, such as 127.0.0.1:9469, or path of a Unix socket for HTTP: / (status page), "
            "/metrics (OpenMetrics), /healthz and /readyz. Needs the extra 'metrics' of the "
            "package.",
        ),
    )
    http_jobs: HttpJobs = field(
        default="administrators",
        metadata=_choice(
            "http_jobs",
            ("administrators", "all"),
            "administrators",
            "Who gets metrics with the names of jobs and the numbers of users, and a status page "
            "with these, command lines, files and log: 'administrators' (root and the daemon's "
            "user, through a Unix socket) or 'all' who can connect. Others get totals.",
        ),
    )

    store_directory: str = field(
        default="",
        metadata=_documented(
            "store.directory",
            "--store-directory",
            "PATH",
            "none",
            _parse_store,
            "Directory, on a local disk, of what is fetched of remote files; empty: the daemon "
            "reads no remote files. It belongs to the daemon's user alone. Needs the extra "
            "'remote' of the package.",
        ),
    )
    store_size_bytes: int | None = field(
        default=None,
        metadata=_documented(
            "store.size",
            "--store-size",
            "SIZE",
            "auto",
            _parse_store_size,
            "Limit of what the store takes on disk, such as 200GiB; at least 32 MiB. 'auto' is 0.8 "
            "of the free space of its disk and of what it has.",
        ),
    )
    store_common: tuple[str, ...] = field(
        default=(),
        metadata=_documented(
            "store.common",
            "--store-common",
            "ORIGIN",
            "none",
            _parse_origins,
            "Origins, such as s3://bucket, whose objects all clients share; the flag can be "
            "repeated. Objects of others are kept apart for each user.",
        ),
    )
    store_access: AccessName = field(
        default="passed",
        metadata=_choice(
            "store.access",
            ("passed", "own"),
            "passed",
            "With what remote files are read: 'passed' (what each client passes, and nothing of "
            "the daemon's own) or 'own' (all that the daemon's process has: environment, files, "
            "tickets; for clients of its own user, who alone get remote files then).",
        ),
    )
    store_cache: str = field(
        default="",
        metadata=_documented(
            "store.cache",
            "--store-cache",
            "ADDRESS",
            "none",
            parse_cache,
            "Cache that several nodes share: 'http://HOST:PORT', 'https://HOST:PORT' or "
            "'unix:/PATH' of an HTTP proxy that keeps objects. Blocks are asked of it, and of the "
            "origin when it fails.",
        ),
    )
    store_cache_certificate: str = field(
        default="",
        metadata=_documented(
            "store.cache_certificate",
            "--store-cache-certificate",
            "PATH",
            "none",
            _parse_store,
            "Certificate of the daemon for a cache by https, in PEM.",
        ),
    )
    store_cache_key: str = field(
        default="",
        metadata=_documented(
            "store.cache_key",
            "--store-cache-key",
            "PATH",
            "none",
            _parse_store,
            "Its private key; empty: it is in the same file.",
        ),
    )
    store_cache_ca: str = field(
        default="",
        metadata=_documented(
            "store.cache_ca",
            "--store-cache-ca",
            "PATH",
            "none",
            _parse_store,
            "Certificates of the authorities that sign the cache's certificate; empty: those of "
            "the system.",
        ),
    )

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value = _parse_named(option, getattr(self, option.name), option.metadata["key"])
            object.__setattr__(self, option.name, value)

    @property
    def arena_size(self) -> int:
        """The arena's size in bytes, with the default filled in."""
        if self.arena_size_bytes is None:
            return default_arena_size()
        return self.arena_size_bytes

    @property
    def max_arena_size(self) -> int:
        """Largest size of the arena in bytes; a value below `arena_size` counts as `arena_size`."""
        if self.max_arena_size_bytes is None:
            return default_max_arena_size()
        return self.max_arena_size_bytes


def merge_live(old: ServerConfig, new: ServerConfig) -> tuple[ServerConfig, list[str], list[str]]:
    """Return what a running daemon takes over.

    Args:    old: its settings. new: those that it has read now.
    Returns: its next settings; the keys that change; the keys that differ and need a restart.
    """
    differ = [
        option
        for option in dataclasses.fields(ServerConfig)
        if getattr(old, option.name) != getattr(new, option.name)
    ]
    keys = [str(option.metadata["key"]) for option in differ]
    live = {o.name: getattr(new, o.name) for o in differ if o.metadata["key"] in LIVE}
    return (
        dataclasses.replace(old, **live),
        [key for key in keys if key in LIVE],
        [key for key in keys if key not in LIVE],
    )


def load_config(
    path: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    ignored: list[str] | None = None,
) -> ServerConfig:
    """Read the daemon's settings.

    Args:
        path: a TOML file; None reads ``/etc/ffserve/ffserve.toml`` if it exists.
        overrides: values that override the file, by key; None means not given.
        ignored: gets each removed key that is set, with its place and what holds instead.
    Raises:  UsageError: a missing file, invalid TOML, an unknown key, or an invalid value.
    """
    options = {option.metadata["key"]: option for option in dataclasses.fields(ServerConfig)}
    values: dict[str, Any] = {}
    source = path if path is not None else CONFIG_PATH
    text, settings = _read_toml(source, required=path is not None)
    ignored = [] if ignored is None else ignored
    for key, value in settings.items():
        if key in REMOVED:
            ignored.append(f"{source}: line {_line_of(key, text)}: {key}: {REMOVED[key]}")
            continue
        try:
            option = _known(key, options)
            values[option.name] = _parse_named(option, value, key)
        except UsageError as error:
            raise UsageError(
                f"line {_line_of(key, text)}: {error.message}", path=source, hint=error.hint
            ) from None
    for key, value in (overrides or {}).items():
        if value is not None and key in REMOVED:
            ignored.append(f"--{key}: {REMOVED[key]}")
        elif value is not None:
            option = _known(key, options)
            values[option.name] = _parse_named(option, value, option.metadata["flag"])
    return ServerConfig(**values)


def _parse_named(option: dataclasses.Field[Any], value: Any, shown: str) -> Any:
    try:
        return option.metadata["parse"](value)
    except UsageError as error:
        raise UsageError(f"{shown}: {error.message}", hint=error.hint) from None


def _read_toml(path: str, *, required: bool) -> tuple[str, dict[str, Any]]:
    """Return the text of a configuration and its keys."""
    try:
        with open(path, "rb") as file:
            text = file.read().decode()
        return text, _flat(tomllib.loads(text))
    except FileNotFoundError:
        if not required:
            return "", {}
        raise UsageError(
            "no such configuration file", path=path, hint="check the path given with --config"
        ) from None
    except OSError as error:
        raise UsageError(
            f"cannot read the configuration: {error.strerror}",
            path=path,
            hint="check the permissions of the file",
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"line {line}: invalid TOML: not UTF-8", path=path) from None
    except tomllib.TOMLDecodeError as error:
        last = len(text.splitlines())
        reason = str(error).replace("end of document", f"the end, line {last}")
        raise UsageError(f"invalid TOML: {reason}", path=path) from None


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return keys with those of TABLES named after both."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in TABLES and isinstance(value, dict):
            found.update((f"{key}.{inner}", each) for inner, each in value.items())
        else:
            found[key] = value
    return found


def _line_of(key: str, text: str) -> int:
    """Return the number of the line where a key of a valid TOML text is set.

    The parser does not tell. A text that ends before the key does not have it, and one that ends
    within its value (a list of several lines) is not valid.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    begun = 0
    for end in range(1, len(lines) + 1):
        try:
            if key in _flat(tomllib.loads("\n".join(lines[:end]))):
                break
        except tomllib.TOMLDecodeError:
            continue
        begun = end
    own = (n for n, line in enumerate(lines[begun:], begun + 1) if line.strip().partition("#")[0])
    return next(own)


def _known(
    key: str, options: Mapping[str, dataclasses.Field[ServerConfig]]
) -> dataclasses.Field[ServerConfig]:
    """Return the option of a key. Raises: UsageError: there is none."""
    if key in options:
        return options[key]
    near = difflib.get_close_matches(key, options, n=3, cutoff=0.5)
    allowed = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(options)}"
    raise UsageError(f"unknown key {key!r}", hint=allowed)
