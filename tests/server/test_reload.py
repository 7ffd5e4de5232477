"""Reload: SIGHUP makes a daemon read its settings again; what is in memory stays."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon import DEADLINE_S, Daemon, run_python, sample, until, write

import ffserve
from ffserve.client.daemon import connection
from ffserve.errors import AccessDenied

COUNT = 40
CHANGED = r"reloaded the settings; changed: .*"


@contextmanager
def configured(
    tmp_path: Path, text: str, *expect: str, options: Sequence[str] = ()
) -> Iterator[tuple[Daemon, Path, socket.socket]]:
    """A daemon with a configuration file, and the socket on which it notifies the service manager.

    Daemon gives --arena and --root, which would override the file.
    """
    settings = tmp_path / "settings.toml"
    settings.write_text(text)
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.settimeout(DEADLINE_S)
    # A test run that nohup started ignores SIGHUP, and its processes do.
    patch = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    daemon = Daemon(expect=[CHANGED, *expect], patch=patch)
    manager.bind(str(daemon.directory / "notify"))
    daemon.command = [
        *daemon.command[: daemon.command.index("--socket") + 2],
        *("--config", str(settings)),
        *options,
    ]
    daemon.environment = {**os.environ, "NOTIFY_SOCKET": str(daemon.directory / "notify")}
    try:
        daemon.start()
        state = told(manager)
        assert re.fullmatch(r"READY=1\nSTATUS=clients: 0; arena: .* of 32.0 MiB used; .*", state)
        yield daemon, settings, manager
        assert daemon.process is not None and daemon.process.poll() is None, daemon.text()
        assert daemon.end() == 0
        daemon.check_log()
    finally:
        daemon.close()
        manager.close()


def told(manager: socket.socket) -> str:
    """Return what the daemon says next, besides what is to be kept of its memory, and what it says
    of itself every few seconds."""
    kept = ("FDSTORE=1\n", "FDSTOREREMOVE=1\n", "STATUS=")
    while (state := manager.recv(4096).decode()).startswith(kept):
        pass
    return state


def reload(daemon: Daemon, manager: socket.socket) -> str:
    """Reload the settings; return the line for `systemctl status`."""
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: b"RELOADING=1" in (got := manager.recv(4096)) and got, "it reloads")
    ready = told(manager)
    assert ready.startswith("READY=1\nSTATUS="), ready
    return ready.partition("STATUS=")[2]


def test_the_manager_learns_of_start_reload_and_end(tmp_path: Path) -> None:
    with configured(tmp_path, 'arena = "32M"\n') as (daemon, _, manager):
        os.kill(daemon.pid, signal.SIGHUP)
        begin, ready = told(manager), told(manager)
        assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", begin)
        assert ready.startswith("READY=1\nSTATUS=clients: ")
        manager.settimeout(0.05)
        with pytest.raises(TimeoutError):  # no signal counts twice
            told(manager)
        manager.settimeout(DEADLINE_S)
        assert daemon.end() == 0
        assert told(manager) == "STOPPING=1\nSTATUS=stopping, clients: 0"
        daemon.start()
        assert told(manager).startswith("READY=1")
    assert manager.fileno() == -1


def test_new_settings_keep_what_is_in_memory(tmp_path: Path) -> None:
    samples = [sample(index) for index in range(COUNT)]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first = write(tmp_path / "one" / "a.ffr", samples)
    second = write(tmp_path / "two" / "b.ffr", samples)
    text = f'roots = ["{tmp_path}/one"]\narena = "32M"\nmax_arena = "128M"\n'
    with configured(tmp_path, text) as (daemon, settings, manager):
        reader = daemon.open(first)
        assert [bytes(s) for s in reader.read(range(COUNT))] == samples
        with pytest.raises(AccessDenied, match="outside its roots"):
            daemon.open(second)
        before = daemon.cache()
        settings.write_text(
            f'roots = ["{tmp_path}/two"]\narena = "64M"\nmax_arena = "128M"\n'
            'log_level = "debug"\nmax_sessions = 77\ndrain_timeout = 3\n'
        )
        reload(daemon, manager)
        until(lambda: daemon.status()["arena"]["size"] == 64 << 20, "the arena has grown")
        assert daemon.status()["roots"] == [f"{tmp_path}/two"]
        assert [bytes(s) for s in reader.read(range(COUNT))] == samples, "it has the file open"
        assert daemon.cache()["blocks_read"] == before["blocks_read"]
        with pytest.raises(AccessDenied, match="outside its roots"):
            daemon.open(first)
        with daemon.open(second) as other:
            assert [bytes(s) for s in other.read(range(COUNT))] == samples
        reader.close()
        settings.write_text(text)
        reload(daemon, manager)
        with daemon.open(first) as again:
            blocks = daemon.cache()["blocks_read"]
            assert [bytes(s) for s in again.read(range(COUNT))] == samples
            assert daemon.cache()["blocks_read"] == blocks, "the samples were kept"
        assert "changed: roots, arena, max_sessions, drain_timeout, log_level" in daemon.text()


@pytest.mark.check
@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("arena = 3\n", "line 1: arena: expected at least 1.00 MiB, not 3"),
        ("deptth = 3\n", r"line 1: unknown key 'deptth' \(did you mean depth\?\)"),
        ('log_level = "debug"\narena = "1G"\n', r"the arena cannot grow to 1.00 GiB: .*"),
        ('log_level = "debug"\narena = \n', "invalid TOML: Invalid value .at line 2, column 9."),
    ],
)
def test_settings_that_are_not_valid_change_nothing(
    text: str, failure: str, tmp_path: Path
) -> None:
    line = f"the settings were not changed: .*{failure}.*"
    good = 'arena = "32M"\nmax_arena = "64M"\n'
    with configured(tmp_path, good, line) as (daemon, settings, manager):
        settings.write_text(text)
        assert re.fullmatch(line, reload(daemon, manager))
        assert daemon.status()["arena"]["target"] == 32 << 20
        settings.write_text(good)
        reload(daemon, manager)
        assert "changed: none" in daemon.text(), "not even the level of the log was"


def test_what_needs_a_restart_is_named(tmp_path: Path) -> None:
    warning = "a restart is needed for the new value of engine, depth"
    with configured(tmp_path, 'arena = "32M"\n', warning) as (daemon, settings, manager):
        settings.write_text('arena = "32M"\ndepth = 3\nengine = "threads"\nclose_after = 3\n')
        reload(daemon, manager)
        until(lambda: warning in daemon.text(), "it warns")
        assert "changed: close_after" in daemon.text()


def test_a_daemon_starts_with_settings_of_an_earlier_release(tmp_path: Path) -> None:
    line = "ignored a setting of an earlier release: .*: samples go through shared memory only.*"
    text = 'arena = "32M"\npayload = "inline"\n'
    with configured(tmp_path, text, line, options=["--payload", "inline"]) as (daemon, _, manager):
        assert f"{tmp_path}/settings.toml: line 2: payload: samples go" in daemon.text()
        assert "release: --payload: samples go" in daemon.text()
        reload(daemon, manager)
        assert "changed: none" in daemon.text()


def test_a_size_that_a_command_chose_stays_when_the_file_does(tmp_path: Path) -> None:
    text = 'arena = "32M"\nmax_arena = "64M"\n'
    with configured(tmp_path, text) as (daemon, settings, manager):
        client = connection.Connection(daemon.socket, "test")
        client.resize(48 << 20)
        client.close()
        settings.write_text(text + "close_after = 3\n")
        reload(daemon, manager)
        assert daemon.status()["arena"]["target"] == 48 << 20


@pytest.mark.check
def test_fewer_sessions_and_an_idle_timeout_count_from_now_on(tmp_path: Path) -> None:
    file = write(tmp_path / "a.ffr", [b"a"])
    expect = r"no client has been connected for 0.1 s"
    with configured(tmp_path, 'arena = "32M"\n', expect) as (daemon, settings, manager):
        reader = daemon.open(file)
        settings.write_text('arena = "32M"\nmax_sessions = 1\n')
        reload(daemon, manager)
        another = "import ffserve, sys; ffserve.open(sys.argv[1], server=sys.argv[2])"
        refused = run_python(another, file, daemon.socket, code=1)
        assert "the daemon already serves 1 sessions" in refused.stderr
        assert reader[0].tobytes() == b"a"
        reader.close()
        settings.write_text('arena = "32M"\nidle_timeout = 0.1\n')
        reload(daemon, manager)
        process = daemon.process
        assert process is not None
        assert process.wait(DEADLINE_S) == 0
        daemon.process = None
        settings.write_text('arena = "32M"\n')
        daemon.start()
        assert ffserve.open(file, server=daemon.socket)[0].tobytes() == b"a"
