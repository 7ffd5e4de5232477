"""Attacks on a real daemon by other users, containers and planted files."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from daemon import Daemon, Raw, asking, get, run_python, sample, serving, until, write

from ffserve import protocol
from ffserve.client.daemon.mapped_memory import DomainMemory
from ffserve.disk import index_file
from ffserve.engine.slots import ENTRY_DTYPE

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
        running.status()  # it has all descriptors of its own now
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


@pytest.mark.check
def test_files_of_a_server_with_rules_of_its_own_are_not_common() -> None:
    """Permission bits of AFS and CIFS do not tell who may read; here ext4 or tmpfs stands for
    them."""
    patch = (
        "import ffserve.server.users.access as a, os, ffserve.engine.io as e, tempfile\n"
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


@pytest.mark.check
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
    tasks = []
    for each in Path(f"/proc/{daemon.pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            tasks.append(each.read_text())
    assert len([name for name in tasks if not name.startswith("iou-")]) < 30, tasks
    path = write(daemon.directory / "a.ffr", TRUTH)
    assert read_by(daemon, path, ALICE) == TRUTH


# ---- descriptors whose closing takes long --------------------------------------------------------


def lingering() -> socket.socket:
    """Return a connection whose last close waits for its data to be read, for ten minutes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sending = socket.create_connection(listener.getsockname())
        silent, _ = listener.accept()
    _kept.append(silent)
    sending.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sending.send(bytes(65536))
    sending.setblocking(True)
    sending.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
    return sending


_kept: list[socket.socket] = []


@pytest.mark.check
@pytest.mark.parametrize("kernel", ["refuses", "cannot refuse"])
@pytest.mark.parametrize("how", ["unasked", "asked", "left", "before HELLO"])
def test_a_connection_that_lingers_stopped_the_daemon(how: str, kernel: str) -> None:
    """The kernel closes descriptors that were sent and not received in the thread of the loop."""
    patch = ""
    if kernel == "cannot refuse":
        patch = "import ffserve.server.users.descriptors as c; c._SO_PASSRIGHTS = 12345"
    expect = [r"closed a session .*"]
    with serving(patch=patch, options=["--socket-mode", "0666"], expect=expect) as daemon:
        path = write(daemon.directory / "a.ffr", TRUTH)
        for turn in range(6):
            raw = Raw(daemon.socket, hello=how != "before HELLO")
            if how == "asked":
                raw.send(asking(path, states=[os.stat(daemon.directory)]))
                assert isinstance(raw.receive(), protocol.Need)
            sending = lingering()
            begun = b"\1" if how == "left" else protocol.encode(protocol.Status(5))
            try:
                if how == "left":
                    raw.socket.sendall(b"\xff" * 8)  # the daemon ends the session
                if how == "asked" and turn % 2:
                    begun = protocol.encode(protocol.Files(1, b"\0"))
                socket.send_fds(raw.socket, [begun], [sending.fileno()])
            except (PermissionError, BrokenPipeError, ConnectionResetError):
                sending.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
            # It waits itself if the daemon was faster.
            threading.Thread(target=sending.close, daemon=True).start()
            raw.socket.close()
            assert daemon.status()["pid"] == daemon.pid
        assert read_by(daemon, path, ALICE) == TRUTH
        while _kept:
            _kept.pop().close()


# ---- what others plant -----------------------------------------------------------------------


@pytest.mark.check
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


@pytest.mark.check
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
            done = subprocess.run(daemon.command, capture_output=True, text=True, timeout=60)
            assert done.returncode != 0 and str(lock) in done.stderr, done.stderr
            assert "--socket" in done.stderr
            assert victim.read_text() == "precious"
            lock.unlink()
        daemon.start()
        assert daemon.end() == 0
    finally:
        daemon.close()


@pytest.mark.parametrize("plant", ["another user's", "a link", "open to others"])
def test_a_socket_directory_that_another_user_may_have_made_is_refused(plant: str) -> None:
    """A daemon there could be anybody's: it would get the files of its clients."""
    owner = 20_000 + os.getpid() % 20_000  # other tests do the same at the same time
    place = Path(f"/tmp/ffserve-{owner}")
    assert not place.exists() and not place.is_symlink()
    if plant == "a link":
        place.symlink_to("/tmp")
    else:
        place.mkdir(mode=0o700)
        os.chown(place, BOB if plant.startswith("another") else owner, BOB)
        place.chmod(0o777 if plant.startswith("open") else 0o700)
    program = """
os.environ.pop("XDG_RUNTIME_DIR", None); os.environ.pop("FFSERVE_SOCKET", None)
from ffserve.system import socket_path
for call in (socket_path.find_socket, socket_path.default_socket_path,
             lambda: socket_path.prepare_socket_directory(f"/tmp/ffserve-{os.getuid()}/s")):
    try:
        print("used", call())
    except ffserve.AccessDenied as error:
        print("refused" if "unsafe" in str(error) and error.path else error)
"""
    try:
        found = run_python(becoming(owner) + "import ffserve.errors\n" + program).stdout.split()
        assert found == ["refused"] * 3
    finally:
        if place.is_symlink():
            place.unlink()
        else:
            place.rmdir()


# ---- other files than those that were asked for ------------------------------------------------


def sample_of(raw: Raw, welcome: protocol.Welcome, opened: protocol.Opened, tag: int) -> bytes:
    """Return the fourth sample of a data set, whose domain came last."""
    raw.send(get(tag, opened.dataset, [3]))
    assert isinstance(raw.receive(), protocol.Ready) and opened.domains
    sizes = welcome.about["arena_size"], welcome.about["capacity"]
    memory = DomainMemory("", [os.dup(fd) for fd in raw.fds[-3:]], *sizes)
    (shard,) = np.frombuffer(opened.shards, protocol.SHARD_DTYPE)
    entry = memory.entries(int(shard["base"]), COUNT).view(ENTRY_DTYPE)[3]
    place = int(entry["place"])
    return memory.arena[place : place + int(entry["length_low"])].tobytes()


@pytest.mark.check
def test_a_descriptor_of_another_file_than_asked_is_that_file(daemon: Daemon) -> None:
    """Its identity is taken from it: the file that was named stays what it is for others."""
    named = write(daemon.directory / "named.ffr", TRUTH)
    passed = write(daemon.directory / "passed.ffr", TRUTH[::-1])
    with Raw(daemon.socket, hello=False, keep=True) as raw:
        welcome = raw.hello()
        assert isinstance(welcome, protocol.Welcome)
        raw.send(asking(named))
        assert isinstance(raw.receive(), protocol.Need)
        raw.pass_files(1, [passed])
        answer = raw.receive()
        assert isinstance(answer, protocol.Opened)
        assert sample_of(raw, welcome, answer, 2) == TRUTH[-4]
        assert read_by(daemon, named) == TRUTH
        assert read_by(daemon, named, ALICE) == TRUTH
        # The liar itself gets the file that it named when it passes that.
        assert sample_of(raw, welcome, raw.open(named, tag=3), 4) == TRUTH[3]


@pytest.mark.check
@pytest.mark.parametrize("size", [0, 5, 200, 10_000])
def test_a_file_that_is_cut_between_opening_and_passing(daemon: Daemon, size: int) -> None:
    path = write(daemon.directory / "cut.ffr", TRUTH)
    before = daemon.fd_count()
    with Raw(daemon.socket) as raw:
        raw.send(asking(path))
        assert isinstance(raw.receive(), protocol.Need)
        fd = os.open(path, os.O_RDONLY)
        os.truncate(path, size)
        raw.pass_files(1, [fd])
        os.close(fd)
        answer = raw.receive()
        if size == 10_000:  # the tables are there, the last samples are not
            assert isinstance(answer, protocol.Opened)
            raw.send(get(2, answer.dataset, [0, COUNT - 1]))
            ready = raw.receive()
            assert isinstance(ready, protocol.Ready) and ready.count == 2
            [(position, code, message, where, *_)] = ready.errors
            assert (position, code, where) == (1, "truncated", path), (code, message)
        else:
            assert isinstance(answer, protocol.Fail)
            error = protocol.error_from_wire(answer.error)
            assert error.path == path and error.message, error
    os.unlink(path)
    until(lambda: daemon.fd_count() <= before, "nothing is held")
    assert read_by(daemon, write(path, TRUTH), ALICE) == TRUTH


@pytest.mark.check
def test_a_file_in_memory_that_shrinks_while_it_is_read(daemon: Daemon) -> None:
    """A memfd passes for a file of tmpfs; its owner can cut it at any time."""
    program = """
path = support.write(sys.argv[2], [bytes([k]) * 5000 for k in range(40)])
memory = os.memfd_create("data")
os.write(memory, open(path, "rb").read())
reading = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
with support.Raw(sys.argv[1]) as raw:
    raw.send(support.asking(path))
    raw.receive()
    raw.pass_files(1, [reading])
    dataset = raw.receive().dataset
    raw.send(support.get(2, dataset, [1]))
    assert raw.receive().errors == []
    os.ftruncate(memory, 20_000)
    raw.send(support.get(3, dataset, [39, 2]))
    ready = raw.receive()
    print(ready.count, [(row[0], row[1]) for row in ready.errors])
"""
    place = daemon.directory / "open"
    place.mkdir()
    place.chmod(0o777)
    done = run_python(becoming(ALICE) + program, daemon.socket, place / "a.ffr")
    assert done.stdout.strip() in ("2 [(0, 'read')]", "2 [(0, 'truncated')]"), done.stdout
    assert read_by(daemon, write(daemon.directory / "b.ffr", TRUTH), BOB) == TRUTH


def test_an_index_file_of_another_user_is_not_believed(daemon: Daemon) -> None:
    """It would cut a common file into other records, for all its readers."""
    truth = [bytes([k]) * 3000 for k in range(40)]
    path = write(daemon.directory / "a.tfrecord", truth)
    planted = daemon.directory / "planted.ffx"
    fd = os.open(path, os.O_RDONLY)
    identity = index_file.Identity.of(fd, path, "tfrecord")
    lengths = np.array([os.path.getsize(path) - 16], np.uint64)
    planted.write_bytes(index_file.encode(identity, lengths, np.zeros(1, np.uint32)))
    os.chown(planted, BOB, BOB)
    index = os.open(planted, os.O_RDONLY)
    with Raw(daemon.socket) as raw:
        raw.send(asking(path))
        assert isinstance(raw.receive(), protocol.Need)
        raw.pass_files(1, [fd, index], kinds=bytes([protocol.RECORD_FILE, protocol.INDEX_FILE]))
        answer = raw.receive()
        assert isinstance(answer, protocol.Opened)
        [row] = np.frombuffer(answer.shards, protocol.SHARD_DTYPE)
        assert row["count"] == len(truth)
        assert read_by(daemon, path, ALICE) == truth
    os.close(fd)
    os.close(index)


# ---- shared memory ----------------------------------------------------------------------------


def test_nobody_can_write_to_the_memory_or_find_it_elsewhere(daemon: Daemon) -> None:
    path = write(daemon.directory / "a.ffr", TRUTH)
    program = """
import mmap
fds = []
class Keeping(support.Raw):
    def receive(self):
        chunk, came, _, _ = socket.recv_fds(self.socket, 65536, 16)
        fds.extend(came)
        return self._decoder.feed(chunk)[0]
raw = Keeping(sys.argv[1])
raw.open(sys.argv[2])
attempts = {
    "open": lambda fd: os.open(f"/proc/self/fd/{fd}", os.O_RDWR),
    "chmod": lambda fd: os.fchmod(fd, 0o666),
    "write": lambda fd: os.pwrite(fd, b"x", 0),
    "map": lambda fd: mmap.mmap(fd, 4096),
    "cut": lambda fd: os.ftruncate(fd, 0),
    "grow": lambda fd: os.posix_fallocate(fd, 0, 1 << 40),
    "seals": lambda fd: fcntl.fcntl(fd, 1033, 8),
    "daemon": lambda fd: os.open(f"/proc/{sys.argv[3]}/fd/{fd}", os.O_RDONLY),
    "memory": lambda fd: os.open(f"/proc/{sys.argv[3]}/mem", os.O_RDONLY),
}
done = []
for name, attempt in attempts.items():
    for fd in fds:
        try: attempt(fd)
        except OSError: continue
        done.append(name)
print(len(fds), done)
"""
    program = becoming(ALICE).replace("import ctypes", "import ctypes, fcntl, mmap") + program
    assert run_python(program, daemon.socket, path, daemon.pid).stdout == "4 []\n"


def test_the_daemons_own_memory_is_no_record_file(daemon: Daemon) -> None:
    path = write(daemon.directory / "a.ffr", TRUTH)
    with Raw(daemon.socket) as raw:
        raw.send(asking(path))
        assert isinstance(raw.receive(), protocol.Need)
        raw.pass_files(1, [path])
        _chunk, fds, _, _ = socket.recv_fds(raw.socket, 65536, 16)
        assert len(fds) == 3
        for tag, fd in enumerate(fds, 2):
            raw.send(asking(str(daemon.directory / "b.ffr"), states=[os.stat(path)], tag=tag))
            answer = raw.receive()
            assert isinstance(answer, protocol.Need), answer
            raw.pass_files(tag, [fd])
            answer = raw.receive()
            assert isinstance(answer, protocol.Fail), answer
            os.close(fd)
    assert read_by(daemon, path, ALICE) == TRUTH
