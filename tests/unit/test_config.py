"""Sizes, places, settings: the file, the flags and the documentation say the same."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.cli.daemon.serve import serve
from ffserve.config import (
    LIVE,
    REMOVED,
    ServerConfig,
    default_arena_size,
    format_size,
    load_config,
    parse_size,
)
from ffserve.errors import AccessDenied, UsageError
from ffserve.system import machine_memory
from ffserve.system.socket_path import (
    Places,
    default_socket_path,
    find_socket,
    prepare_socket_directory,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FIELDS = dataclasses.fields(ServerConfig)
VALUES: dict[str, tuple[Any, Any]] = {
    "roots": (["/data", "/more/"], ("/data", "/more")),
    "file_systems": (["fuse", "0x1234"], (0x65735546, 0x1234)),
    "common": ("user", "user"),
    "socket": ("/run/x.sock", "/run/x.sock"),
    "socket_mode": ("0600", 0o600),
    "socket_group": ("video", "video"),
    "arena": ("3MiB", 3 << 20),
    "max_arena": ("9MiB", 9 << 20),
    "engine": ("threads", "threads"),
    "depth": (7, 7),
    "max_chunk_size": ("2MiB", 2 << 20),
    "max_sessions": (9, 9),
    "drain_timeout": (2.5, 2.5),
    "close_after": (3.5, 3.5),
    "scrub_rate": ("3MiB", 3 << 20),
    "idle_timeout": (2.5, 2.5),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "http": ("127.0.0.1:9469", "127.0.0.1:9469"),
    "http_jobs": ("all", "all"),
    "store.directory": ("/store", "/store"),
    "store.size": ("33MiB", 33 << 20),
    "store.common": (["s3://a", "https://b:8443"], ("s3://a", "https://b:8443")),
    "store.access": ("own", "own"),
    "store.cache": ("unix:/run/cache.sock", "unix:/run/cache.sock"),
    "store.cache_certificate": ("/tls/own.pem", "/tls/own.pem"),
    "store.cache_key": ("/tls/own.key", "/tls/own.key"),
    "store.cache_ca": ("/tls/ca.pem", "/tls/ca.pem"),
}
"""Every key, a value that is not the default, and what the setting is then."""


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("512M", 512 << 20),
        ("1.5 MiB", 3 << 19),
        ("10kb", 10_000),
        ("2TB", 2 * 10**12),
        ("64k", 65536),
        (" 7 ", 7),
        ("0", 0),
        (12, 12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_understood(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "4 GiBs", "1e3", "٣", "0x10", -1, True, None, 1.5]
)
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


@given(st.integers(0, 1 << 55))
def test_a_formatted_size_reads_back_within_its_digits(size: int) -> None:
    shown = format_size(size)
    assert re.fullmatch(r"\d+(\.\d+)? (B|[KMGTP]iB)", shown)
    assert abs(parse_size(shown) - size) <= max(1, size // 100)


# ---------------------------------------------------------------- memory


def test_the_default_arena_is_a_quarter_of_what_may_be_used() -> None:
    size = default_arena_size()
    assert size % (2 << 20) == 0
    assert size == max(64 << 20, machine_memory.usable_memory() // 4 // (2 << 20) * (2 << 20))


def test_a_limit_of_any_group_above_counts(tmp_path: Path) -> None:
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (tmp_path / "a" / "memory.max").write_text("1073741824\n")
    proc = tmp_path / "cgroup"
    proc.write_text("0::/a/b\n")
    assert [limit for _, limit in machine_memory.memory_limits(proc, tmp_path)] == [1 << 30]


def test_the_limit_of_an_old_cgroup_counts(tmp_path: Path) -> None:
    group = tmp_path / "memory" / "docker" / "x"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("536870912\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    proc = tmp_path / "cgroup"
    proc.write_text("5:cpu:/docker/x\n4:memory:/docker/x\n0::/\n")
    assert [limit for _, limit in machine_memory.memory_limits(proc, tmp_path)] == [512 << 20]


def test_no_cgroups_at_all_are_no_limit(tmp_path: Path) -> None:
    assert [limit for _, limit in machine_memory.memory_limits(tmp_path / "none", tmp_path)] == []


# ---------------------------------------------------------------- places


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Places:
    """The places of one who is not root, with nothing set, no system socket, and a private /tmp."""
    for name in ("FFSERVE_SOCKET", "XDG_RUNTIME_DIR", "RUNTIME_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    system = tmp_path / "run" / "ffserve.sock"
    return Places(str(system), str(tmp_path / f"ffserve-{os.geteuid()}"), is_root=False)


def test_what_was_told_comes_first(as_user: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", "/somewhere/x.sock")
    assert find_socket("/told.sock", as_user) == "/told.sock"
    assert find_socket(None, as_user) == default_socket_path(as_user) == "/somewhere/x.sock"


def test_a_user_has_a_socket_in_his_runtime_directory(
    as_user: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own = str(tmp_path / "ffserve" / "ffserve.sock")
    assert default_socket_path(as_user) == find_socket(None, as_user) == own


def test_a_client_finds_the_service_before_its_own(
    as_user: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    Path(as_user.system).parent.mkdir()
    Path(as_user.system).touch()
    assert find_socket(None, as_user) == as_user.system
    assert default_socket_path(as_user) != as_user.system


def test_root_and_the_service_use_the_systems_place(
    as_user: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/other:/run/ffserve")
    assert default_socket_path(as_user) == "/run/ffserve/ffserve.sock"
    monkeypatch.delenv("RUNTIME_DIRECTORY")
    root = as_user._replace(is_root=True)
    assert default_socket_path(root) == find_socket(None, root) == root.system


def test_the_last_place_is_made_private(as_user: Places) -> None:
    path = find_socket(None, as_user)
    assert path == default_socket_path(as_user)
    prepare_socket_directory(path, as_user)
    prepare_socket_directory(path, as_user)
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", ["open to all", "link", "file"])
def test_a_place_that_others_prepared_is_refused(
    as_user: Places, tmp_path: Path, trap: str
) -> None:
    place = Path(as_user.private)
    if trap == "open to all":
        place.mkdir()
        place.chmod(0o777)
    elif trap == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.touch(mode=0o600)
    with pytest.raises(AccessDenied, match="0700"):
        find_socket(None, as_user)
    with pytest.raises(AccessDenied, match="0700"):
        default_socket_path(as_user)
    with pytest.raises(AccessDenied, match="0700"):
        prepare_socket_directory(str(place / "ffserve.sock"), as_user)


# ---------------------------------------------------------------- settings


def test_every_setting_has_a_value_in_these_tests() -> None:
    assert list(VALUES) == [field.metadata["key"] for field in FIELDS]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_key_works_in_the_file(field: dataclasses.Field[Any], tmp_path: Path) -> None:
    key = field.metadata["key"]
    value, expected = VALUES[key]
    path = tmp_path / "ffserve.toml"
    path.write_text(f"{key} = {value!r}\n".replace("'", '"'))
    assert getattr(load_config(str(path)), field.name) == expected
    assert getattr(ServerConfig(), field.name) != expected


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_key_is_a_flag_of_serve_and_wins(
    field: dataclasses.Field[Any], tmp_path: Path
) -> None:
    key, flag = field.metadata["key"], field.metadata["flag"]
    option = next(o for o in serve.params if isinstance(o, click.Option) and flag in o.opts)
    assert option.name == key.replace(".", "_")
    assert option.help is not None and field.metadata["doc"] in option.help
    value, expected = VALUES[key]
    path = tmp_path / "ffserve.toml"
    path.write_text(
        'roots = ["/file"]\ndepth = 3\nengine = "aio"\narena = "5M"\nlog_level = "error"\n'
    )
    texts = value if isinstance(value, list) else [value]
    arguments = [word for text in texts for word in (flag, str(text))]
    given_settings = serve.make_context("serve", arguments).params
    given = {key: given_settings[key.replace(".", "_")]}
    assert getattr(load_config(str(path), given), field.name) == expected


def test_serve_has_no_flag_that_is_no_setting() -> None:
    flags = {name for option in serve.params for name in option.opts}
    others = {"--config", "--check", "--handover", *(f"--{key}" for key in REMOVED)}
    assert flags == {field.metadata["flag"] for field in FIELDS} | others


def test_the_document_names_the_keys_that_can_be_reloaded() -> None:
    text = (ROOT / "docs" / "CONFIGURATION.md").read_text()
    [sentence] = re.findall(r"^(.*) need no restart", text, re.MULTILINE)
    assert tuple(re.findall(r"`(\w+)`", sentence)) == LIVE
    assert set(LIVE) <= set(VALUES)


def test_every_key_is_documented_with_its_flag_and_default() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| `(--[\w-]+) \w+` \| (.+?) \| (.+) \|$",
        (ROOT / "docs" / "CONFIGURATION.md").read_text(),
        re.MULTILINE,
    )
    assert [(key, flag, doc) for key, flag, _, doc in rows] == [
        tuple(field.metadata[name] for name in ("key", "flag", "doc")) for field in FIELDS
    ]
    for field, (key, _, shown, _) in zip(FIELDS, rows, strict=True):
        if shown.startswith("`"):
            [value] = tomllib.loads(f"x = {shown.strip('`')}").values()
            assert getattr(load_config(os.devnull, {key: value}), field.name) == getattr(
                ServerConfig(), field.name
            )


def test_the_example_file_has_every_key_with_its_text_and_default(tmp_path: Path) -> None:
    text = (ROOT / "systemd" / "ffserve.toml").read_text()
    for field in FIELDS:
        [comment] = re.findall(rf"((?:^# .*\n)+)#{field.metadata['key']} = ", text, re.MULTILINE)
        assert " ".join(re.findall(r"^# (.*)$", comment, re.M)) == field.metadata["doc"]
    live = re.sub(r"^#([\w.]+ = )", r"\1", text, flags=re.MULTILINE)
    values = tomllib.loads(live)
    values.update((f"store.{key}", value) for key, value in values.pop("store").items())
    assert set(values) == set(VALUES)
    for key in ("socket", "socket_group"):
        del values[key]
    given_settings = load_config(os.devnull, values)
    assert given_settings == dataclasses.replace(ServerConfig(), socket=given_settings.socket)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deptth = 3", "unknown key 'deptth' .did you mean depth"),
        ("zzzz = 3", "use one of roots, "),
        ("depth = 0", "depth: expected a whole number from 1 to 4096"),
        ("depth = true", "depth: "),
        ("depth = [1]", "depth: "),
        ('engine = "fast"', "engine: expected one of auto, registered, uring, aio, threads"),
        ('arena = "4Q"', "arena: invalid size '4Q'"),
        ("arena = 10", "arena: expected at least"),
        ("socket_mode = 660", "socket_mode: expected permission bits"),
        ('socket_mode = "9"', "socket_mode: "),
        ("roots = []", "roots: "),
        ('roots = ["data"]', "roots: expected an absolute path"),
        ('file_systems = ["nofs"]', "file_systems: unknown file system 'nofs'"),
        ('file_systems = [["fuse"]]', "file_systems: unknown file system .'fuse'."),
        ('socket = "x.sock"', "socket: expected an absolute path"),
        (f'socket = "/{"x" * 107}"', "more than the limit of 107"),
        ("drain_timeout = nan", "drain_timeout: "),
        ("socket_group = 3", "socket_group: "),
        ('store.directory = "x"', "store.directory: expected an absolute path"),
        ('store.size = "1M"', "store.size: expected at least"),
        ('store.common = ["s3://a/b"]', "store.common: invalid origin 's3://a/b'"),
        ('store.cache = "host:80"', "store.cache: invalid address of a cache 'host:80'"),
        ('store.cache = "https://host:80/x"', "store.cache: invalid address of a cache"),
        ('store.access = "all"', "store.access: expected one of passed, own, not 'all'"),
        ("store = 3", "unknown key 'store'"),
        ("depth = ", "invalid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        load_config(str(path))
    assert caught.value.path == str(path)
    assert "line 1" in caught.value.message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("depth = 3\n\n# arena = 1\narena = 1\nengine = 'aio'\n", 4),
        ('roots = [\n  "/a",\n  # no\n]\n\n"arena" = 1', 6),
        ('depth = 3\n\nroots = [\n  "a",\n  "arena = 1",\n]\n', 3),
        ("depth = 3\r\narena = 1\r\n", 2),
        ('socket = """\n/arena\n"""\narena = 1', 4),
        ("depth = 1\n[arena]\nsize = 1", 2),
        ("depth = 1\n[store]\ndirectory = 'x'", 3),
        ("depth = 1\n[store]\nsizes = 3", 3),
        ("depth = 1\narena.size = 1", 2),
    ],
)
def test_a_wrong_value_is_found_by_its_line(text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_bytes(text.encode())
    with pytest.raises(UsageError, match=f"line {line}: ") as caught:
        load_config(str(path))
    assert str(caught.value).startswith(f"{path}: line {line}: ")


def test_a_setting_of_an_earlier_release_is_ignored_and_named(tmp_path: Path) -> None:
    """An upgrade must not keep the daemon from starting."""
    path = tmp_path / "old.toml"
    path.write_text('depth = 3\n\npayload = "inline"\n')
    ignored: list[str] = []
    assert load_config(str(path), {"payload": "shared", "depth": None}, ignored).depth == 3
    assert [text.partition(": samples")[0] for text in ignored] == [
        f"{path}: line 3: payload",
        "--payload",
    ]
    assert load_config(str(path), {"payload": None}).depth == 3


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such configuration file"):
        load_config(str(tmp_path / "none.toml"))
    (tmp_path / "latin.toml").write_bytes(b'log_level = "\xe9"')
    with pytest.raises(UsageError, match="line 1: invalid TOML: not UTF-8"):
        load_config(str(tmp_path / "latin.toml"))
    with pytest.raises(UsageError, match="cannot read the configuration"):
        load_config(str(tmp_path))


def test_a_config_made_in_a_program_is_checked_too() -> None:
    with pytest.raises(UsageError, match="depth: "):
        ServerConfig(depth=-1)
    with pytest.raises(UsageError, match="roots: "):
        ServerConfig(roots=())
    assert ServerConfig(arena_size_bytes=1 << 20).arena_size == 1 << 20
    assert ServerConfig().arena_size == default_arena_size()
