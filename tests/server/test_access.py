"""Who may read what: real users, groups, ACLs and namespaces at a real daemon."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from daemon import Daemon, Raw, asking, get, proxy, run_python, sample, serving, until, write

from ffserve import protocol
from ffserve.errors import AccessDenied, ProtocolError, ReadError
from ffserve.server.users.access import FILE_SYSTEMS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")

COUNT = 20
TRUTH = [sample(i) for i in range(COUNT)]
ALICE, BOB, CAROL, TEAM = 61_001, 61_002, 61_003, 61_100
"""Users and a group that no name is needed for."""
EXPECT = [r"closed a session \(pid \d+\): .*"]
READ = """
import os, sys, ffserve
from ffserve.errors import FFServeError
path, place = sys.argv[1:3]
try:
    with ffserve.open(path, server=place) as reader:
        print(b"".join(bytes(one) for one in reader.read(range(len(reader)))).hex())
except FFServeError as error:
    print(type(error).__name__, error)
"""
"""Prints the bytes of all samples, read through the daemon, or the error."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A directory that every user can search, unlike pytest's own."""
    with contextlib.ExitStack() as stack:
        daemon = Daemon()
        stack.callback(daemon.close)
        yield daemon.directory


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon of root that everybody may connect to."""
    with serving(options=["--socket-mode", "0666"], expect=EXPECT) as running:
        running.status()  # it has all descriptors of its own now
        yield running


AS_USER = """
import os, sys
uid, groups = int(sys.argv.pop(1)), [int(g) for g in sys.argv.pop(1).split(",") if g]
import ffserve, ffserve.reader
import ffserve.formats.recordio, ffserve.formats.tar, ffserve.formats.tfrecord
import msgpack
import ctypes, glob, resource, daemon as support
os.setgroups(groups); os.setgid(uid); os.setuid(uid)
"""
"""The modules are imported while they may still be read."""


def reads(
    path: str | Path, daemon: Daemon, user: int = 0, groups: Sequence[int] = (), program: str = READ
) -> str:
    """Return what a user reads through the daemon, as READ prints it."""
    if user:
        numbers = ",".join(map(str, groups))
        return run_python(AS_USER + program, user, numbers, path, daemon.socket).stdout.strip()
    return run_python(program, path, daemon.socket).stdout.strip()


def text(samples: Sequence[bytes] = TRUTH) -> str:
    """Return what READ prints for these samples."""
    return b"".join(samples).hex()


# ---- what the kernel decides ------------------------------------------------------------------


@pytest.mark.check
def test_a_file_of_a_supplementary_group_was_refused(daemon: Daemon, folder: Path) -> None:
    path = write(folder / "team.ffr", TRUTH)
    os.chown(path, BOB, TEAM)
    os.chmod(path, 0o640)
    assert reads(path, daemon, ALICE, [5, TEAM]) == text()
    # More groups than any buffer of the daemon's once had room for.
    assert reads(path, daemon, ALICE, [*range(70_000, 71_500), TEAM]) == text()
    assert reads(path, daemon, CAROL, [5]).startswith("AccessDenied")


def acl(path: str | Path, *entries: tuple[int, int, int]) -> None:
    """Set a POSIX ACL: rows of (tag, permissions, user or group), see acl(5)."""
    rows = [struct.pack("<HHI", tag, bits, who & 0xFFFFFFFF) for tag, bits, who in entries]
    os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(rows))


USER_OBJ, USER, GROUP_OBJ, MASK, OTHER = 1, 2, 4, 16, 32


def test_an_acl_that_denies_was_not_seen(daemon: Daemon, folder: Path) -> None:
    path = write(folder / "denied.ffr", TRUTH)
    acl(
        path, (USER_OBJ, 6, -1), (USER, 0, ALICE), (GROUP_OBJ, 4, -1), (MASK, 4, -1), (OTHER, 4, -1)
    )
    assert os.stat(path).st_mode & 0o777 == 0o644
    assert reads(path, daemon, BOB) == text()
    assert reads(path, daemon, ALICE).startswith("AccessDenied")


def test_an_acl_that_allows(daemon: Daemon, folder: Path) -> None:
    path = write(folder / "allowed.ffr", TRUTH)
    acl(
        path, (USER_OBJ, 6, -1), (USER, 4, ALICE), (GROUP_OBJ, 0, -1), (MASK, 4, -1), (OTHER, 0, -1)
    )
    assert reads(path, daemon, ALICE) == text()
    assert reads(path, daemon, BOB).startswith("AccessDenied")


def test_a_daemon_needs_no_permission_of_its_own(folder: Path) -> None:
    """Files without tables too, of which it keeps index files, and damage that it explains."""
    patch = (
        "import os, uvloop, ffserve.cli.daemon.serve, ffserve.cli.terminal\n"
        "import ffserve.server.life.daemon\n"
        f"os.setgroups([]); os.setgid({BOB}); os.setuid({BOB})"
    )
    large = [bytes([i]) * 30_000 for i in range(60)]
    private = folder / "private"
    private.mkdir()
    records = write(private / "a.ffr", TRUTH), write(private / "a.tfrecord", large)
    cut = write(private / "cut.tfrecord", large)
    private.chmod(0o700)
    with contextlib.ExitStack() as stack:
        daemon = Daemon(patch=patch, options=["--socket-mode", "0666"])
        stack.callback(daemon.close)
        daemon.directory.chmod(0o777)
        for path in (*records, cut):
            os.chmod(path, 0o600)
        daemon.start()
        with daemon.open(records) as reader:
            got = [bytes(one) for one in reader.read(range(len(reader)))]
            assert got == TRUTH + large
        with daemon.open(cut) as reader:
            os.truncate(cut, 1_000_000)
            with pytest.raises(ReadError, match="changed since it was opened"):
                reader.read([59])
            assert bytes(reader[3]) == large[3]
        assert daemon.end() == 0
        daemon.check_log()


def test_a_path_meant_another_file_in_a_mount_namespace(daemon: Daemon, folder: Path) -> None:
    """The client got samples of the host's file, in silence."""
    path = write(folder / "same.ffr", TRUTH)
    other = [sample(i, seed=9) for i in range(COUNT)]
    hidden = write(folder / "other.ffr", other)
    command = f'mount --bind {hidden} {path} && exec {sys.executable} -c "$0" "$@"'
    inside = ["unshare", "-m", "sh", "-c", command, READ, path, daemon.socket]
    with daemon.open(path) as reader:
        assert bytes(reader[3]) == TRUTH[3]
        done = subprocess.run(inside, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == text(other)
        assert bytes(reader[5]) == TRUTH[5]
    assert reads(path, daemon) == text()


def test_root_of_a_container_read_any_file_of_the_host(daemon: Daemon, folder: Path) -> None:
    """A root whose mounts do not contain the file names it, and claims its identity."""
    secret = folder / "secret"
    secret.mkdir()
    path = write(secret / "a.ffr", TRUTH)
    status = os.stat(path)
    numbers = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    program = CLAIM.format(path=path, numbers=numbers)
    command = f'mount -t tmpfs none {secret} && exec {sys.executable} -c "$0" "$@"'
    inside = ["unshare", "-m", "sh", "-c", command]
    with daemon.open(path) as reader:
        assert bytes(reader[0]) == TRUTH[0]
        for code, said in ((program, "Need"), (READ, "MissingFile")):
            done = subprocess.run(
                [*inside, code, path, daemon.socket], capture_output=True, text=True, check=True
            )
            assert done.stdout.startswith(said), done.stdout


CLAIM = """
import socket, sys
import numpy as np
from ffserve import protocol
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[2])
decoder = protocol.Decoder(protocol.FROM_SERVER)
def ask(message):
    sock.sendall(protocol.encode(message))
    while True:
        found = decoder.feed(sock.recv(65536))
        if found:
            return found[0]
ask(protocol.Hello(dict(versions=[protocol.VERSION], job="claim")))
row = np.array([tuple({numbers})], protocol.IDENTITY_DTYPE).tobytes()
what = dict(paths=[{path!r}], format=None, verify=True)
print(type(ask(protocol.Open(1, what, row))).__name__)
"""
"""Names a file that somebody else has open, by its numbers; prints what the daemon answers."""


@pytest.mark.check
def test_the_proof_of_one_user_is_none_of_another(daemon: Daemon, folder: Path) -> None:
    path = write(folder / "proven.ffr", TRUTH)
    status = os.stat(path)
    numbers = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    program = CLAIM.format(path=path, numbers=numbers)
    with daemon.open(path):
        assert reads(path, daemon, program=program) == "Opened", "another process of this user"
        assert reads(path, daemon, ALICE, program=program) == "Need"
        assert reads(path, daemon, ALICE) == text()
        assert reads(path, daemon, ALICE, program=program) == "Need", "nobody of her is left"


@pytest.mark.check
def test_the_root_of_a_user_namespace_is_its_user(daemon: Daemon, folder: Path) -> None:
    """Root there is an ordinary user here: it reads what that user can read, and no more."""
    mine, private = write(folder / "mine.ffr", TRUTH), write(folder / "roots.ffr", TRUTH)
    os.chown(mine, ALICE, ALICE)
    for path in (mine, private):
        os.chmod(path, 0o600)
    enter = """
if os.fork():  # only a process of one thread may do this
    sys.exit(os.waitpid(-1, 0)[1])
libc = ctypes.CDLL(None)
libc.prctl(4, 1)  # PR_SET_DUMPABLE: its files in /proc are its own
assert libc.unshare(0x10000000) == 0  # CLONE_NEWUSER
for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {uid} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(line)
assert os.geteuid() == 0
"""
    assert reads(mine, daemon, ALICE, program=enter + READ) == text()
    assert reads(private, daemon, ALICE, program=enter + READ).startswith("AccessDenied")


def test_names_in_private_directories_could_be_found_out(daemon: Daemon, folder: Path) -> None:
    """MissingFile against AccessDenied told anybody which names exist."""
    private = folder / "names"
    private.mkdir()
    write(private / "there.ffr", TRUTH)
    private.chmod(0o700)
    program = AS_USER + CLAIM.format(path="{path}", numbers=[0] * 5).replace(
        "'{path}'", "sys.argv[1]"
    )
    answers = {
        run_python(program, ALICE, "", private / name, daemon.socket).stdout
        for name in ("there.ffr", "not there.ffr")
    }
    assert answers == {"Need\n"}


def test_a_directory_renamed_during_the_check_no_longer_matters(
    daemon: Daemon, folder: Path
) -> None:
    """The daemon looks nothing up: the file is the one whose descriptor came."""
    first, second = write(folder / "x1.ffr", TRUTH), write(folder / "x2.ffr", TRUTH[::-1])
    with Raw(daemon.socket) as raw:
        raw.send(asking(first))
        assert isinstance(raw.receive(), protocol.Need)
        os.rename(second, first)
        raw.pass_files(1, [first])
        answer = raw.receive()
        assert isinstance(answer, protocol.Opened)
        with daemon.open(first) as reader:
            assert bytes(reader[0]) == TRUTH[-1]
            assert len({shard["path"] for shard in daemon.status()["shards"]} & {first}) == 1


# ---- roots --------------------------------------------------------------------------------------


@pytest.mark.check
def test_only_files_below_the_roots_are_served(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "inside2"
    inside.mkdir()
    outside.mkdir()
    good = write(inside / "a.ffr", [b"good"])
    bad = write(outside / "b.ffr", [b"bad"])
    (inside / "link.ffr").symlink_to(bad)
    (inside / "dotted.ffr").symlink_to("a.ffr")
    with serving(roots=[inside]) as daemon:
        for path in (bad, inside / "link.ffr", f"{inside}/../inside2/b.ffr"):
            with pytest.raises(AccessDenied, match="outside its roots") as caught:
                daemon.open(path)
            assert caught.value.hint is not None and str(inside) in caught.value.hint
        with daemon.open([good, inside / "dotted.ffr"]) as reader:
            assert [s.tobytes() for s in reader] == [b"good", b"good"]
        # A file that the daemon refuses may still be read by the local engine.
        program = (
            "import os, sys, ffserve, logging; os.environ['FFSERVE_SOCKET'] = sys.argv[2]\n"
            "logging.basicConfig(format='%(message)s')\n"
            "r = ffserve.open(sys.argv[1]); s = ffserve.open(sys.argv[1])\n"
            "print(r[0].tobytes(), r.source)"
        )
        done = run_python(program, bad, daemon.socket)
        assert done.stdout.startswith("b'bad' engine ")
        assert done.stderr.count("reads the files without the daemon") == 1


# ---- descriptors that the daemon does not take ---------------------------------------------------


@contextlib.contextmanager
def pipe() -> Iterator[int]:
    """A pipe's end for reading."""
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


def opened(path: str, flags: int) -> contextlib.AbstractContextManager[int]:
    """A descriptor with these flags."""

    @contextlib.contextmanager
    def opening() -> Iterator[int]:
        fd = os.open(path, flags)
        yield fd
        os.close(fd)

    return opening()


UNFIT = {
    "pipe": (pipe, "regular files only"),
    "device": (lambda: opened("/dev/zero", os.O_RDONLY), "regular files only"),
    "directory": (lambda: opened("/tmp", os.O_RDONLY), "regular files only"),
    "O_PATH": (lambda: opened(__file__, os.O_PATH), "with O_PATH"),
    "write-only": (lambda: opened("scratch", os.O_WRONLY | os.O_CREAT), "for writing"),
    "read and write": (lambda: opened("scratch", os.O_RDWR | os.O_CREAT), "for writing"),
    "socket": (lambda: contextlib.closing(socket.socket()), "for writing"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_descriptor_that_is_not_of_a_file(
    daemon: Daemon, folder: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(folder / "good.ffr", TRUTH)
    before = daemon.fd_count()
    make, said = UNFIT[kind]
    with Raw(daemon.socket) as raw, make() as descriptor:  # type: ignore[operator]
        fd = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        raw.send(asking(path, tag=7))
        assert isinstance(raw.receive(), protocol.Need)
        raw.pass_files(7, [fd])
        failed = raw.receive()
        assert isinstance(failed, protocol.Fail) and failed.tag == 7
        error = protocol.error_from_wire(failed.error)
        assert isinstance(error, AccessDenied) and said in str(error) and error.path == path
        raw.open(path)
    until(lambda: daemon.fd_count() <= before + 2, "nothing is held but the shard")


def test_types_of_file_systems_are_those_of_the_kernel() -> None:
    header = Path("/usr/include/linux/magic.h")
    if not header.exists():
        pytest.skip("no headers of the kernel")
    pattern = r"#define (\w+?)(?:_SUPER)?_MAGIC(?:_V1)?\s+(0x\w+)"
    defined = {name: int(value, 16) for name, value in re.findall(pattern, header.read_text())}
    names = {each: each.upper() for each in FILE_SYSTEMS}
    names |= {"iso9660": "ISOFS", "vfat": "MSDOS", "9p": "V9FS"}
    known = {each: defined[name] for each, name in names.items() if name in defined}
    assert len(known) > 15 and known.items() <= FILE_SYSTEMS.items()


def test_a_file_of_a_file_system_that_is_not_served(daemon: Daemon) -> None:
    """It is a regular file, but reads of it may wait for whatever its sender wants."""
    program = """
from ffserve import protocol
with support.Raw(sys.argv[2]) as raw:
    raw.send(support.asking("/proc/self/status"))
    raw.receive()
    raw.pass_files(1, ["/proc/self/status"])
    print(raw.receive())
"""
    assert "file system (0x9fa0)" in reads("/", daemon, ALICE, program=program)


@pytest.mark.check
@pytest.mark.parametrize(("announced", "sent"), [(1, 2), (2, 1), (0, 1), (253, 1), (3, 253)])
def test_another_number_of_descriptors_than_announced(
    daemon: Daemon, folder: Path, announced: int, sent: int
) -> None:
    path = write(folder / "counted.ffr", TRUTH)
    before = daemon.fd_count()
    with Raw(daemon.socket) as raw:
        raw.send(asking(path))
        assert isinstance(raw.receive(), protocol.Need)
        with opened(path, os.O_RDONLY) as fd:
            raw.pass_files(1, [fd] * sent, kinds=bytes(announced))
        error = raw.refused()
        assert isinstance(error, ProtocolError) and f"but {sent} came with it" in str(error)
    until(lambda: daemon.fd_count() <= before, "nothing is held")
    assert reads(path, daemon) == text()


def test_more_descriptors_than_the_daemon_asked_for(daemon: Daemon, folder: Path) -> None:
    path = write(folder / "asked.ffr", TRUTH)
    with Raw(daemon.socket) as raw:
        raw.send(asking(path))
        assert isinstance(raw.receive(), protocol.Need)
        with opened(path, os.O_RDONLY) as fd:
            raw.pass_files(1, [fd, fd])
        assert "is not expected" in str(raw.refused())


def test_descriptors_in_many_messages_are_not_collected(daemon: Daemon, folder: Path) -> None:
    """A client that never ends its FILES has at most 253 descriptors in the daemon."""
    path = write(folder / "flood.ffr", TRUTH)
    before = daemon.fd_count()
    with Raw(daemon.socket) as raw:
        raw.send(asking(path))
        assert isinstance(raw.receive(), protocol.Need)
        frame = protocol.encode(protocol.Files(1, bytes(2000)))
        with opened(path, os.O_RDONLY) as fd, contextlib.suppress(BrokenPipeError):
            for k in range(1000):
                socket.send_fds(raw.socket, [frame[k : k + 1]], [fd] * 100)
                assert daemon.fd_count() < before + 400
        assert "more than 253" in str(raw.refused())
    until(lambda: daemon.fd_count() <= before, "nothing is held")


def test_descriptors_that_nobody_asked_for_are_dropped(daemon: Daemon, folder: Path) -> None:
    path = write(folder / "unasked.ffr", TRUTH)
    with Raw(daemon.socket) as raw:
        dataset = raw.open(path).dataset
        before = daemon.fd_count()
        with opened(path, os.O_RDONLY) as fd:
            for _ in range(100):
                with contextlib.suppress(PermissionError):  # since Linux 6.16
                    socket.send_fds(raw.socket, [protocol.encode(protocol.Close(99))], [fd] * 253)
                    raw.pass_files(5, [fd] * 253)
        raw.send(get(3, dataset, range(3)))
        assert isinstance(raw.receive(), protocol.Ready)
        until(lambda: daemon.fd_count() <= before, "nothing is held")


def test_a_proxy_that_passes_no_descriptors(daemon: Daemon, folder: Path, tmp_path: Path) -> None:
    """The error says so; nothing is held. What ffserve's own client does: test_unmapped.py."""
    path = write(folder / "proxied.ffr", TRUTH)
    before = daemon.fd_count()
    with proxy(daemon.socket, tmp_path / "proxy") as place, Raw(place) as raw:
        raw.send(asking(path))
        assert isinstance(raw.receive(), protocol.Need)
        raw.pass_files(1, [path])
        failed = raw.receive()
        assert isinstance(failed, protocol.Fail)
        with pytest.raises(AccessDenied, match=r"none came with the message.*proxy"):
            raise protocol.error_from_wire(failed.error)
    until(lambda: daemon.fd_count() <= before + 2, "nothing is held but the shard")


@pytest.mark.check
def test_a_client_that_never_answers_blocks_no_other_opening(folder: Path) -> None:
    path = write(folder / "silent.ffr", TRUTH)
    patch = (
        "import ffserve.server.sessions.server as s; s.FILES_TIMEOUT_S = 3.0; s.LANE_TIMEOUT_S = 30"
    )
    with serving(patch=patch) as daemon, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(Raw(daemon.socket)) for _ in range(6)]
        for raw in silent:
            raw.send(asking(path))
        with daemon.open(path) as reader:
            assert bytes(reader[2]) == TRUTH[2]
        late = silent[0]
        assert isinstance(late.receive(), protocol.Need)
        failed = late.receive()
        assert isinstance(failed, protocol.Fail) and "no descriptors for 3 s" in failed.error[1]
        late.pass_files(1, [path])
        late.open(path, tag=2)


def test_an_opening_that_waits_too_long_for_others_of_its_user_fails(folder: Path) -> None:
    """On Python 3.10 it was an internal error: asyncio had a TimeoutError of its own."""
    path = write(folder / "waits.ffr", TRUTH)
    patch = "import ffserve.server.sessions.server as s; s.LANE_TIMEOUT_S = 0.5"
    with serving(patch=patch) as daemon, contextlib.ExitStack() as stack:
        *silent, late = [stack.enter_context(Raw(daemon.socket)) for _ in range(5)]
        for raw in silent:
            raw.send(asking(path))
            assert isinstance(raw.receive(), protocol.Need)
        late.send(asking(path))
        failed = late.receive()
        assert isinstance(failed, protocol.Fail) and "have not ended for 0.5 s" in failed.error[1]
        silent[0].pass_files(1, [path])
        assert isinstance(silent[0].receive(), protocol.Opened)
        late.open(path, tag=2)


def test_a_client_that_ends_between_need_and_files(daemon: Daemon, folder: Path) -> None:
    path = write(folder / "ends.ffr", TRUTH)
    before = daemon.fd_count()
    for _ in range(20):
        with Raw(daemon.socket) as raw:
            raw.send(asking(path))
            assert isinstance(raw.receive(), protocol.Need)
    with Raw(daemon.socket) as raw:
        raw.send(asking(path))
        assert isinstance(raw.receive(), protocol.Need)
        raw.send(protocol.Files(1, b""))
        failed = raw.receive()
        assert isinstance(failed, protocol.Fail) and "stopped opening" in failed.error[1]
        raw.open(path)
    until(lambda: daemon.fd_count() <= before + 2, "nothing is held but the shard")


def test_a_file_that_the_client_cannot_open_gives_the_opening_up(
    daemon: Daemon, folder: Path
) -> None:
    good, gone = write(folder / "g.ffr", TRUTH), write(folder / "gone.ffr", TRUTH)
    program = f"""
import os, sys
from ffserve.client.daemon import connection
from ffserve.client.daemon import passed_files
from ffserve.client.failover import OpenRequest
from ffserve.errors import MissingFile
import ffserve
held = connection.Connection(sys.argv[2], "job")
real = passed_files.PassedFiles.of.__func__
os.stat(sys.argv[1])
def gone(cls, paths, positions):
    os.path.exists({gone!r}) and os.unlink({gone!r})
    return real(cls, paths, positions)
passed_files.PassedFiles.of = classmethod(gone)
try: held.open(OpenRequest(({good!r}, {gone!r}), None, "require", True, False))
except MissingFile as error: print("missing", error.path)
print(held.open(OpenRequest(({good!r},), None, "require", True, False)).formats)
"""
    assert reads(good, daemon, program=program) == f"missing {gone}\n['ffrecord']"


def test_a_process_with_few_descriptors_opens_many_files(daemon: Daemon, folder: Path) -> None:
    """It passes as many as it has, and the daemon asks for the rest."""
    many = folder / "many"
    many.mkdir()
    paths = [write(many / f"{k:03}.ffr", [b"%d" % k]) for k in range(300)]
    program = "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))\n" + READ.replace(
        "open(path,", "open(sorted(glob.glob(path)),"
    )
    got = reads(many / "*.ffr", daemon, ALICE, program=program)
    assert got == text([b"%d" % k for k in range(len(paths))])


@pytest.mark.check
def test_a_user_may_have_half_of_the_daemons_files(folder: Path) -> None:
    few = folder / "few"
    few.mkdir()
    for k in range(100):
        write(few / f"{k:03}.ffr", [b"x"])
    patch = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (240, 240))"
    with serving(patch=patch, options=["--socket-mode", "0666"]) as daemon:
        assert "may have 90 files open" in reads(few, daemon, ALICE)
        with daemon.open(few) as reader:
            assert len(reader) == 100


@pytest.mark.check
def test_a_user_had_half_of_the_daemons_files_in_each_mount_namespace(folder: Path) -> None:
    """So one user had all of them, and others could open none."""
    few = folder / "namespaces"
    few.mkdir()
    for user in ALICE, BOB:
        (few / str(user)).mkdir()
        for k in range(30 if user == ALICE else 40):
            path = write(few / str(user) / f"{k:03}.ffr", [b"x"])
            os.chown(path, user, user)
            os.chmod(path, 0o600)
    program = f"""
import ctypes
from pathlib import Path
pipe, refused = os.pipe(), []
os.setresuid(0, 0, 0)
for k in range(5):
    if os.fork() == 0:
        assert ctypes.CDLL(None).unshare(0x00020000) == 0
        os.setgid({ALICE}); os.setuid({ALICE})
        paths = sorted(map(str, Path(sys.argv[1]).glob("{ALICE}/*.ffr")))
        try:
            reader = ffserve.open(paths, server=sys.argv[2])
            os.write(pipe[1], b"+")
        except ffserve.ReadError as error:
            assert "files open in the daemon, half of its own" in str(error), error
            os.write(pipe[1], b"-")
        import signal
        signal.pause()
    refused.append(os.read(pipe[0], 1))
print(b"".join(refused).decode(), flush=True)
sys.stdin.read()
"""
    program = "import os, sys, ffserve, ffserve.reader\n" + program
    patch = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (240, 240))"
    with serving(patch=patch, options=["--socket-mode", "0666"]) as daemon:
        words = [sys.executable, "-c", program, str(few), daemon.socket]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as attack:
            assert attack.stdout is not None
            try:
                assert re.fullmatch(r"\+{2,3}-+\n", attack.stdout.readline())
                assert reads(few / str(BOB), daemon, BOB) == (b"x" * 40).hex()
            finally:
                os.killpg(attack.pid, 9)


def test_a_daemon_without_descriptors_says_so(folder: Path) -> None:
    """The kernel drops what does not fit into the daemon's table; the client is told."""
    few = folder / "small"
    few.mkdir()
    for k in range(100):
        write(few / f"{k:03}.ffr", [b"x"])
    patch = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "import ffserve.server.files.holding as h; real = h.DescriptorBudget.__init__\n"
        "def more(self, *a):\n    real(self, *a); self._most_open = 1000; self.most_asked = 253\n"
        "h.DescriptorBudget.__init__ = more"
    )
    refused = r"cannot accept a client, trying again: .*"
    with serving(patch=patch, expect=[refused]) as daemon:
        with pytest.raises(ReadError, match=r"(?i)too many (open files|files open)"):
            daemon.open(few)
        # A greeting passes descriptors as well: what came before is closed after the answer.
        until(lambda: daemon.fd_count() < 40, "the files that were refused are closed")
        with daemon.open(few / "001.ffr") as reader:
            assert bytes(reader[0]) == b"x"
        assert daemon.fd_count() < 64


def test_second_descriptors_and_passed_ones_fit_into_the_limit(folder: Path) -> None:
    """Files in the page cache took a passed descriptor, their own and a second one at once."""
    many = folder / "many_cached"
    many.mkdir()
    for k in range(150):
        write(many / f"{k:03}.ffr", [b"x"])
    patch = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (240, 240))"
    with serving(patch=patch) as daemon, daemon.open(many) as reader:
        assert len(reader) == 150
        assert daemon.fd_count() > 150
        with pytest.raises(ReadError, match="may have 180 files open; 150 are in use"):
            daemon.open([write(folder / f"other{k}.ffr", [b"y"]) for k in range(40)])


def test_two_opens_at_a_time_met_the_limit_late(folder: Path) -> None:
    """When both had passed files; now the second is refused before it passes any, and users of the
    same files share the room."""
    (folder / "first").mkdir()
    (folder / "second").mkdir()
    first = [write(folder / "first" / f"{k:03}.ffr", [b"x"]) for k in range(120)]
    second = [write(folder / "second" / f"{k:03}.ffr", [b"y"]) for k in range(80)]
    patch = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (240, 240))"
    late = r"may have 180 files open; 120 are in use, and this data set has 80 more"
    with serving(patch=patch) as daemon, Raw(daemon.socket) as one, Raw(daemon.socket) as two:
        one.send(asking(*first))
        two.send(asking(*first))
        assert isinstance(one.receive(), protocol.Need)
        assert isinstance(two.receive(), protocol.Need)
        with pytest.raises(ReadError, match=late):
            daemon.open(second)
        asked: list[list[str]] = [first[:7], first[:7]]
        for _ in range(120):
            for k, raw in enumerate((one, two)):
                if asked[k]:
                    raw.pass_files(1, asked[k])
                    answer = raw.receive()
                    positions = []
                    if isinstance(answer, protocol.Need):
                        positions = protocol.unpack_positions(answer.positions, len(first))
                    else:
                        assert isinstance(answer, protocol.Opened)
                    asked[k] = [first[position] for position in positions]
        assert asked == [[], []]
        with pytest.raises(ReadError, match=late):
            daemon.open(second)
        with daemon.open(second[:60]) as reader:
            assert len(reader) == 60


@pytest.mark.check
def test_an_open_that_is_given_up_takes_no_room(folder: Path) -> None:
    paths = [write(folder / f"room{k:03}.ffr", [b"x"]) for k in range(120)]
    patch = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (240, 240))"
    with serving(patch=patch) as daemon:
        for _ in range(3):
            with Raw(daemon.socket) as raw:
                raw.send(asking(*paths))
                assert isinstance(raw.receive(), protocol.Need)
        with Raw(daemon.socket) as raw:
            raw.send(asking(*paths))
            assert isinstance(raw.receive(), protocol.Need)
            raw.pass_files(1, [])
            assert isinstance(raw.receive(), protocol.Fail)
            with daemon.open(paths) as reader:
                assert len(reader) == 120
