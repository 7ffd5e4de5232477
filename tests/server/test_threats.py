"""Attacks on a real daemon by other users, containers and planted files."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import Daemon, Raw, asking, run_python, sample, serving, until, write

from ffserve import protocol

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")

COUNT = 20
TRUTH = [sample(i) for i in range(COUNT)]
ALICE, BOB = 61_001, 61_002
SUPPORT = f"""
import ctypes, os, socket, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
import daemon as support
import ffserve, ffserve.reader, ffserve.formats.recordio, ffserve.formats.tfrecord, msgpack
from ffserve import protocol
libc = ctypes.CDLL(None, use_errno=True)
"""


def becoming(user: int) -> str:
    """Statements that give a process up to a user, with what it imported before."""
    return f"{SUPPORT}os.setgroups([]); os.setgid({user}); os.setuid({user})\n"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon of root that everybody may connect to."""
    with serving(options=["--socket-mode", "0666"], expect=[r"closed a session .*"]) as running:
        yield running


def read_by(daemon: Daemon, path: str, user: int = 0) -> list[bytes]:
    """Return what a user reads through the daemon."""
    program = """
with ffserve.open(sys.argv[2], server=sys.argv[1]) as reader:
    print(*(bytes(one).hex() or "-" for one in reader.read(range(len(reader)))))
"""
    done = run_python((becoming(user) if user else SUPPORT) + program, daemon.socket, path)
    return [bytes.fromhex(each.strip("-")) for each in done.stdout.split()]


# ---- names -----------------------------------------------------------------------------------


def test_a_chain_of_links_was_an_internal_error(daemon: Daemon) -> None:
    """The daemon followed as many links as a user made, in Python."""
    path = write(daemon.directory / "a.ffr", TRUTH)
    chain = daemon.directory / "chain"
    chain.mkdir()
    os.symlink(path, chain / "0")
    for k in range(1, 2000):
        os.symlink(chain / str(k - 1), chain / str(k))
    for last in "1999", "39":
        with Raw(daemon.socket) as raw:
            raw.send(asking(str(chain / last), states=[os.stat(path)]))
            assert isinstance(raw.receive(), protocol.Need)
            raw.pass_files(1, [path])
            assert isinstance(raw.receive(), protocol.Opened)
    # What cannot be found by its name is the user's own; what can be is common.
    facts = daemon.status()
    assert sorted((each["user"], each["shards"]) for each in facts["domains"] if each["user"]) == []
    assert [each["shards"] for each in facts["domains"]] == [1, 1]


def test_files_of_a_server_with_rules_of_its_own_are_not_common() -> None:
    """Permission bits of AFS and CIFS do not tell who may read; here ext4 or tmpfs stands for
    them."""
    patch = (
        "import ffserve.server.access as a, os, ffserve.engine.io as e, tempfile\n"
        "fd = os.open(tempfile.gettempdir(), os.O_RDONLY); kind = e.file_system_type(fd)\n"
        "a.FILE_SYSTEMS['afs'] = kind; os.close(fd)"
    )
    with serving(patch=patch, options=["--socket-mode", "0666"]) as daemon:
        path = write(daemon.directory / "a.ffr", TRUTH)
        os.chmod(path, 0o644)
        for user in ALICE, BOB:
            assert read_by(daemon, path, user) == TRUTH
        users = [each["user"] for each in daemon.status()["domains"]]
        assert users == [ALICE, BOB]


# ---- what one user can take --------------------------------------------------------------------


def test_each_file_system_of_a_user_took_a_thread_and_a_ring(daemon: Daemon) -> None:
    program = (
        SUPPORT
        + """
assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
raw = support.Raw(sys.argv[1])
for k in range(50):
    place = f"{sys.argv[2]}/{k}"
    os.mkdir(place)
    assert libc.mount(b"none", place.encode(), b"tmpfs", 0, b"") == 0
    path = support.write(f"{place}/a.ffr", [b"%d" % k])
    dataset = raw.open(path, tag=k + 1).dataset
    raw.send(support.get(100 + k, dataset, [0]))
    assert raw.receive().errors == []
raw.socket.close()
"""
    )
    run_python(program, daemon.socket, daemon.directory)
    # The kernel's own workers (iou-wrk) end by themselves.
    tasks = [each.read_text() for each in Path(f"/proc/{daemon.pid}/task").glob("*/comm")]
    assert len([name for name in tasks if not name.startswith("iou-")]) < 30, tasks
    path = write(daemon.directory / "a.ffr", TRUTH)
    assert read_by(daemon, path, ALICE) == TRUTH


# ---- what others plant -----------------------------------------------------------------------


def test_a_pipe_in_the_place_of_an_index_file_made_the_opening_fail(daemon: Daemon) -> None:
    """Everybody who may write to the directory could hinder its readers."""
    large = [bytes([k]) * 30_000 for k in range(60)]
    shared = daemon.directory / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    path = write(shared / "a.tfrecord", large)
    planted = shared / ".a.tfrecord.ffx"
    with contextlib.suppress(FileNotFoundError):
        planted.unlink()
    os.mkfifo(planted)
    os.chown(planted, BOB, BOB)
    os.chmod(planted, 0o666)
    before = daemon.fd_count()
    for user in 0, ALICE:
        assert read_by(daemon, path, user) == large
    with Raw(daemon.socket) as raw:
        raw.send(asking(path))
        raw.receive()
    until(lambda: daemon.fd_count() <= before + 3, "no pipe is held")


def test_a_link_in_the_place_of_the_lock_destroyed_its_target() -> None:
    """The daemon wrote its number into the file."""
    daemon = Daemon()
    victim = daemon.directory / "victim"
    victim.write_text("precious")
    lock = Path(f"{daemon.socket}.lock")
    try:
        for plant in (
            lambda: lock.symlink_to(victim),
            lambda: os.link(victim, lock),
            lambda: os.chown(os.open(lock, os.O_CREAT), BOB, BOB),
            lambda: os.mkfifo(lock),
        ):
            plant()
            done = subprocess.run(daemon.command, capture_output=True, text=True, timeout=30)
            assert done.returncode != 0 and str(lock) in done.stderr, done.stderr
            assert "--socket" in done.stderr
            assert victim.read_text() == "precious"
            lock.unlink()
        daemon.start()
        assert daemon.end() == 0
    finally:
        daemon.close()
