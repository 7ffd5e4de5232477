"""Trust domains: who finds whose samples in memory, with real users and namespaces."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, client, run_python, serving, until, write

import ffserve
from ffserve import limits
from ffserve.config import ServerConfig
from ffserve.limits import MOST_USER_DOMAINS
from ffserve.server.sessions.state import ServerState
from ffserve.server.users.peers import HOST, OWN, account_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")

COUNT = 200
ALICE, BOB, CAROL, TEAM = 61_001, 61_002, 61_003, 61_100
MIB = 1 << 20
AS_USER = """
import os, sys
uid, groups = int(sys.argv.pop(1)), [int(g) for g in sys.argv.pop(1).split(",") if g]
import ffserve, ffserve.reader
import ffserve.formats.recordio, ffserve.formats.tar, ffserve.formats.tfrecord
import msgpack
import ctypes, daemon as support
import numpy as np
from ffserve import protocol
os.setgroups(groups); os.setgid(uid); os.setuid(uid)
"""
"""The modules are imported while they may still be read."""
READ = """
with ffserve.open(sys.argv[2], server=sys.argv[1]) as reader:
    for _ in range(int(sys.argv[3])):
        for first in range(0, len(reader), 50):
            reader.read_batch(np.arange(first, min(first + 50, len(reader))))
    print(reader.read_batch(np.arange(min(200, len(reader)))).buffer.tobytes().hex())
"""
HOLD = """
readers = [ffserve.open(path, server=sys.argv[1]) for path in sys.argv[2:]]
for reader in readers:
    reader.read_batch(np.arange(10))
print("ready", flush=True)
sys.stdin.read()
"""
SEARCH = "support.search_memory(sys.argv[1], sys.argv[2], sys.argv[3:])\n"


def as_user(user: int, program: str, *arguments: Any, groups: str = "") -> str:
    return run_python(AS_USER + program, user, groups, *arguments).stdout.strip()


def private(folder: Path, user: int, name: str, seed: int, count: int = COUNT) -> str:
    """A file that only one user may read."""
    path = str(write(folder / name, contents(seed, count)))
    os.chown(path, user, user)
    os.chmod(path, 0o600)
    return path


def public(folder: Path, name: str, seed: int, count: int = COUNT) -> str:
    path = str(write(folder / name, contents(seed, count)))
    os.chmod(path, 0o644)
    return path


def deny(path: str, user: int) -> None:
    """Let everybody but one user read a file."""
    rows = [(1, 6, -1), (2, 0, user), (4, 4, -1), (16, 4, -1), (32, 4, -1)]
    packed = b"".join(struct.pack("<HHi", *row) for row in rows)
    os.setxattr(path, "system.posix_acl_access", b"\2\0\0\0" + packed)


def contents(seed: int, count: int = COUNT) -> list[bytes]:
    chance = np.random.default_rng(seed)
    return [chance.bytes(4000) for _ in range(count)]


@contextlib.contextmanager
def daemon_of(*options: str, arena: str = "16MiB") -> Iterator[Daemon]:
    with serving(arena=arena, options=["--socket-mode", "0666", *options]) as running:
        yield running


def arena_pages(running: Daemon) -> dict[int, int]:
    """Bytes of each arena file of a daemon, by inode."""
    sizes = {}
    for name in os.listdir(f"/proc/{running.pid}/fd"):
        with contextlib.suppress(OSError):
            path = f"/proc/{running.pid}/fd/{name}"
            if "ffserve-arena" in os.readlink(path):
                found = os.stat(path)
                sizes[found.st_ino] = found.st_blocks * 512
    return sizes


@pytest.mark.check
def test_a_raw_hello_and_an_mmap_found_all_private_samples_of_another_user() -> None:
    with daemon_of() as running:
        hers = private(running.directory, ALICE, "hers.ffr", 1)
        shared = public(running.directory, "shared.ffr", 2)
        with_prefix = [contents(1)[0], contents(1)[199], contents(2)[7]]
        assert as_user(ALICE, READ, running.socket, hers, 1) == b"".join(contents(1)).hex()
        wanted = [one[:64].hex() for one in with_prefix]
        # The page, and three files of the common domain: only the public sample is there.
        assert as_user(BOB, SEARCH, running.socket, shared, *wanted) == "4 2"
        # Her own samples are found in this way, so the search finds what is there.
        assert as_user(ALICE, SEARCH, running.socket, hers, *wanted) == "4 0 1"


@pytest.mark.check
def test_two_users_share_the_samples_of_a_common_file_once() -> None:
    with daemon_of() as running:
        path = public(running.directory, "shared.ffr", 2)
        text = b"".join(contents(2)).hex()
        assert as_user(ALICE, READ, running.socket, path, 1) == text
        read = running.cache()["blocks_read"]
        assert as_user(BOB, READ, running.socket, path, 1) == text
        assert running.cache()["blocks_read"] == read
        assert len(arena_pages(running)) == 1


def test_what_not_everybody_may_read_is_not_common() -> None:
    with daemon_of() as running:
        for number, place in enumerate(("file", "folder", "acl"), 1):
            folder = running.directory / place
            folder.mkdir(mode=0o755)
            path = public(folder, "shared.ffr", 2)
            if place == "file":
                os.chown(path, 0, TEAM)
                os.chmod(path, 0o640)
            elif place == "folder":
                os.chown(folder, 0, TEAM)
                folder.chmod(0o750)
            else:
                deny(path, CAROL)
            text = b"".join(contents(2)).hex()
            for user in (ALICE, BOB):
                assert as_user(user, READ, running.socket, path, 1, groups=str(TEAM)) == text
            assert running.cache()["blocks_read"] == number * 2 * COUNT, place
            assert len(arena_pages(running)) == 2, place


@pytest.mark.check
def test_a_name_that_leads_to_a_common_file_by_links_is_as_good() -> None:
    with daemon_of() as running:
        folder = running.directory / "inner"
        folder.mkdir(mode=0o755)
        path = public(folder, "shared.ffr", 2)
        os.symlink(folder, running.directory / "folder")
        os.symlink("folder/shared.ffr", running.directory / "link.ffr")
        # What the name means decides, not what is beside it.
        (running.directory / "closed").mkdir(mode=0o700)
        os.symlink(path, running.directory / "closed" / "link.ffr")
        names = ["link.ffr", "folder/shared.ffr", "inner/../folder/./shared.ffr"]
        text = b"".join(contents(2)).hex()
        for user, name in zip((ALICE, BOB, CAROL), names, strict=True):
            assert as_user(user, READ, running.socket, str(running.directory / name), 1) == text
        with ffserve.open(running.directory / "closed" / "link.ffr", server=running.socket) as r:
            assert bytes(r[0]) == contents(2)[0]
        assert running.cache()["blocks_read"] == COUNT
        assert len(arena_pages(running)) == 1


@pytest.mark.check
def test_files_that_the_daemons_own_user_may_read_are_common_if_the_administrator_says_so() -> None:
    for option, copies in (["--common", "user"], 1), ([], 2):
        with serving(arena="16MiB") as probe:
            folder = probe.directory
            path = public(folder, "team.ffr", 2)
            os.chown(path, 0, TEAM)
            os.chmod(path, 0o640)
            os.chown(folder, CAROL, CAROL)
            program = "import encodings.ascii, ffserve.cli.daemon.serve\n"
            program += f"import ffserve.server.life.daemon\n{AS_USER}"
            program += "from ffserve.cli import main\nraise SystemExit(main())"
            place = str(folder / "other")
            serve = ["serve", "--socket", place, "--arena", "16MiB", "--socket-mode", "0666"]
            command = [sys.executable, "-c", program, str(CAROL), str(TEAM), *serve, *option]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
            with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as process:
                try:
                    until(Path(place).exists, "the daemon listens")
                    for user in (ALICE, BOB):
                        as_user(user, READ, place, path, 1, groups=str(TEAM))
                    facts = ffserve.client.daemon.connection.status(place)
                    assert facts["cache"]["blocks_read"] == copies * COUNT
                finally:
                    process.terminate()


def test_a_daemon_that_may_read_everything_does_not_share_what_it_may_read() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ffserve", "serve", "--common", "user", "--socket", "/tmp/none"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "may read every file" in done.stderr


@pytest.mark.check
def test_the_roots_of_two_containers_are_two_users() -> None:
    with daemon_of() as running:
        path = private(running.directory, 0, "roots.ffr", 3)
        program = "import sys, ffserve, numpy as np\n" + READ
        for _ in range(2):
            command = ["unshare", "-m", sys.executable, "-c", program, running.socket, path, "1"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert done.stdout.strip() == b"".join(contents(3)).hex()
        assert running.cache()["blocks_read"] == 2 * COUNT
        # The daemon's own namespace is a third one.
        assert run_python(program, running.socket, path, 1).stdout
        assert running.cache()["blocks_read"] == 3 * COUNT


NAMED = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'support')!r})\n"


def in_container(program: str, *arguments: Any, mount: str | Path) -> list[str]:
    """Run a program as root of a mount namespace, with an empty file system in one place; return
    the number of its first mount and the words that it prints."""
    command = 'mount -t tmpfs none "$0" && head -c 12 /proc/self/mountinfo && echo && exec "$@"'
    program = (
        NAMED + AS_USER.partition("uid, groups")[0] + AS_USER.partition("if g]\n")[2] + program
    )
    program = program.replace("os.setgroups(groups); os.setgid(uid); os.setuid(uid)", "")
    inside = ["unshare", "-m", "sh", "-c", command, str(mount), sys.executable, "-c", program]
    done = subprocess.run([*inside, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    about, _, printed = done.stdout.partition("\n")
    return [about.split()[0], *printed.split()]


@pytest.mark.check
def test_a_container_got_the_samples_of_one_that_had_ended() -> None:
    """The kernel gives the numbers of namespaces again; the second root had the first one's domain.

    The files are in a mount of the container's own: so the daemon's descriptors keep that one, and
    not the first, whose number tells the namespace.
    """
    put = """
path = support.write(sys.argv[2] + "/a.ffr", [bytes.fromhex(sys.argv[3]) * 100] * 200)
os.chmod(path, 0o600)
"""
    with daemon_of() as running:
        mount = running.directory / "mount"
        mount.mkdir()
        read = put + "sys.argv[2:] = [path, '1']\n" + READ
        secret, other = contents(11)[0][:32], contents(12)[0][:32]
        first, got = in_container(read, running.socket, mount, secret.hex(), mount=mount)
        assert bytes.fromhex(got) == secret * 20_000
        search = put + "sys.argv[2:] = [path, sys.argv[4], sys.argv[3]]\n" + SEARCH
        for _ in range(20):  # until the kernel has given the number again
            arguments = running.socket, mount, other.hex(), secret.hex()
            number, fds, *found = in_container(search, *arguments, mount=mount)
            assert (fds, found) == ("4", ["1"]), "its own samples, and no others"
            if number == first:
                break
        # Nobody can ask for them again, so they are dropped.
        own = lambda: [each for each in running.status()["domains"] if each["namespace"]]  # noqa: E731
        until(lambda: not any(each["shards"] for each in own()), "the samples are dropped")


@pytest.mark.check
def test_root_of_a_container_was_told_everything_and_could_resize() -> None:
    program = """
from ffserve.client.daemon import connection
facts = connection.status(sys.argv[1])
print(*(each["path"] for each in facts["shards"]), len(facts["jobs"]), len(facts["domains"]))
with support.Raw(sys.argv[1]) as raw:
    raw.send(protocol.Resize(1, 8 << 20))
    print(type(raw.receive()).__name__)
"""
    with daemon_of() as running:
        hers = private(running.directory, ALICE, "hers.ffr", 1)
        roots = private(running.directory, 0, "roots.ffr", 2)
        mount = running.directory / "mount"
        mount.mkdir()
        with (
            client(NAMED + AS_USER + HOLD, ALICE, "", running.socket, hers),
            running.open(roots) as reader,
        ):
            assert len(reader) == COUNT
            assert in_container(program, running.socket, mount=mount)[1:] == [
                "0", "0", "Fail",
            ]  # fmt: skip
            assert len(running.status()["shards"]) == 2


@pytest.mark.check
def test_memory_moves_between_users_and_never_exceeds_the_arena() -> None:
    with daemon_of() as running:
        mine = private(running.directory, ALICE, "a.ffr", 4, 6000)
        other = private(running.directory, BOB, "b.ffr", 5, 6000)
        as_user(ALICE, READ, running.socket, mine, 2)
        (first,) = arena_pages(running)
        assert arena_pages(running)[first] > 14 * MIB
        as_user(BOB, READ, running.socket, other, 2)
        # A huge page of which two users have parts may stay whole in both files.
        most, fits = 18 * MIB, "the files of both users fit into the arena and one huge page"
        until(lambda: sum(arena_pages(running).values()) <= most, fits)
        # She has gone, and her samples are the first to go.
        assert len(arena_pages(running)) == 2 and arena_pages(running)[first] < 4 * MIB
        as_user(ALICE, READ, running.socket, mine, 2)
        until(lambda: sum(arena_pages(running).values()) <= most, fits)
        assert arena_pages(running)[first] > 12 * MIB
        assert running.status()["arena"]["used"] <= 16 * MIB


@pytest.mark.check
def test_memory_that_moved_holds_nothing_of_the_user_who_had_it() -> None:
    """All that the second user can map is searched for what the first one had there."""
    with daemon_of() as running:
        hers = private(running.directory, ALICE, "hers.ffr", 4, 6000)
        his = private(running.directory, BOB, "his.ffr", 5, 6000)
        as_user(ALICE, READ, running.socket, hers, 2)
        as_user(BOB, READ, running.socket, his, 2)
        until(lambda: running.status()["arena"]["used"] > 14 * MIB, "he has her memory")
        first, second = contents(4, 6000), contents(5, 6000)
        wanted = [one[:32].hex() for one in (*first[::60], *second[:2])]
        words = as_user(BOB, SEARCH, running.socket, his, *wanted).split()
        assert words == ["4", "100", "101"], "his own, which were just read, and none of hers"


@pytest.mark.check
@pytest.mark.parametrize("how", ["chmod", "group", "acl", "directory"])
def test_a_file_that_becomes_private_is_shared_no_longer(how: str) -> None:
    with daemon_of("--close-after", "0") as running:
        folder = running.directory / "inner"
        folder.mkdir(mode=0o755)
        path = public(folder, "a.ffr", 2)
        os.chown(path, ALICE, TEAM)
        text = b"".join(contents(2)).hex()

        def users() -> list[int | None]:
            return [each["user"] for each in running.status()["domains"] if each["shards"]]

        for user in (ALICE, BOB):
            assert as_user(user, READ, running.socket, path, 1) == text
        assert users() == [None]
        if how == "chmod":
            os.chmod(path, 0o600)
        elif how == "group":
            os.chmod(path, 0o640)
        elif how == "directory":
            os.chown(folder, ALICE, ALICE)
            folder.chmod(0o700)
            # Its identity is what it was: a proof lasts until the file is closed.
            until(lambda: not any(s["open"] for s in running.status()["shards"]), "it is closed")
        else:
            deny(path, BOB)
        assert as_user(ALICE, READ, running.socket, path, 1) == text
        assert ALICE in users()
        refused = (
            "try:\n"
            + READ.replace("\n", "\n ")
            + "\nexcept Exception as e: print(type(e).__name__)"
        )
        assert as_user(BOB, refused, running.socket, path, 1) == "AccessDenied"
        if how == "chmod":
            os.chmod(path, 0o644)
            read = running.cache()["blocks_read"]
            for user in (ALICE, BOB):
                assert as_user(user, READ, running.socket, path, 1) == text
            assert running.cache()["blocks_read"] <= read + COUNT, "it is common again"


def test_a_data_set_over_two_domains_reads_and_leases_from_both() -> None:
    with daemon_of() as running:
        paths = [
            private(running.directory, ALICE, "mine.ffr", 6),
            public(running.directory, "ours.ffr", 7),
        ]
        program = """
order = np.random.default_rng(1).permutation(400)
truth = np.random.default_rng(6), np.random.default_rng(7)
truth = [chance.bytes(4000) for chance in truth for _ in range(200)]
with ffserve.open(sys.argv[2:], server=sys.argv[1]) as reader:
    for _ in range(3):
        assert [bytes(one) for one in reader.read(order)] == [truth[k] for k in order]
        batch = reader.read_batch(order)
        assert [bytes(one) for one in batch] == [truth[k] for k in order]
        with reader.lease(order[:100]) as leased:
            assert [bytes(one) for one in leased] == [truth[k] for k in order[:100]]
    assert reader.tables(0)[1].tolist() == reader.tables(1)[1].tolist() == [4000] * 200
    print(reader.stats()["hits"] > 1000)
"""
        assert as_user(ALICE, program, running.socket, *paths) == "True"
        assert len(arena_pages(running)) == 2


@pytest.mark.check
def test_status_told_everybody_the_files_and_jobs_of_all() -> None:
    status = """
from ffserve.client.daemon import connection
facts = connection.status(sys.argv[1])
print([each["path"] for each in facts["shards"]], [job["pid"] > 0 for job in facts["jobs"]])
print(len(facts["progress"]), len(facts["groups"]), [each["user"] for each in facts["domains"]])
"""
    with daemon_of() as running:
        folder = running.directory / "alices"
        folder.mkdir()
        os.chown(folder, ALICE, ALICE)
        hers = private(folder, ALICE, "secret.ffr", 1)
        link = str(folder / "another-name.ffr")
        shared = public(running.directory, "shared.ffr", 2)
        os.symlink(shared, link)
        # All jobs have the same name.
        named = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'support')!r})\n"
        named += (
            AS_USER + "from ffserve.client.daemon import connection\nconnection.join_job('name')\n"
        )
        with (
            client(named + HOLD, ALICE, "", running.socket, hers, link),
            client(named + HOLD, BOB, "", running.socket, shared),
        ):
            lines = as_user(BOB, status, running.socket).splitlines()
            assert lines == [f"['{shared}'] [True]", "1 1 [None]"]
            lines = as_user(ALICE, status, running.socket).splitlines()
            assert sorted(lines[0][1:].split("]")[0].split(", ")) == sorted(
                [repr(hers), repr(link)]
            )
            assert lines[1] == f"2 2 [{ALICE}, None]"
            assert as_user(CAROL, status, running.socket).splitlines() == ["[] []", "0 0 [None]"]
            facts = running.status()
            assert len(facts["shards"]) == 2 and len(facts["jobs"]) == 2


# ---- life of a domain ------------------------------------------------------------------------


def test_the_first_owner_gets_the_memory_that_is_there() -> None:
    state = ServerState(ServerConfig(arena_size_bytes=16 * MIB))
    first = state.domains.obtain((1000, 1))
    assert first.arena is state.memory.mapping.file and state.domains.obtain((1000, 1)) is first
    second = state.domains.obtain(None)
    assert second.number == 1 and second.arena is not state.memory.mapping.file
    state.close()


def test_a_domain_without_shards_is_dissolved_and_its_number_used_again() -> None:
    state = ServerState(ServerConfig(arena_size_bytes=16 * MIB))
    state.domains.obtain(None)
    other = state.domains.obtain((1000, 1))
    base = state.memory.directory.reserve(10, other.number)
    ((size_class, _),) = state.memory.arena.by_class(np.array([4096]), 4096, 4096, other.number)
    slots = state.memory.arena.take(size_class, 3000)
    offset = int(state.memory.arena.offsets(slots)[0])
    state.memory.mapping.array[offset : offset + 4] = 65
    assert os.pread(other.arena.fd, 4, offset) == b"AAAA"
    assert os.pread(state.memory.mapping.file.fd, 4, offset) == b"\0\0\0\0"
    assert not state.domains.dissolve(other) and state.domains.get((1000, 1)) is other
    state.memory.arena.free(slots)
    state.memory.directory.release(base, 10, other.number)
    clients = os.dup(other.arena.fd)
    while state.domains.dissolve(other):
        pass
    assert state.domains.get((1000, 1)) is None
    assert (state.memory.arena.slab_domain == 0).all()
    assert os.fstat(clients).st_blocks == 0, "a client that maps it still holds no memory"
    os.close(clients)
    again = state.domains.obtain((1000, 2))
    assert again.number == other.number and again.serial != other.serial
    state.close()


def test_one_user_cannot_take_all_domains() -> None:
    state = ServerState(ServerConfig(arena_size_bytes=16 * MIB))
    for namespace in range(MOST_USER_DOMAINS):
        state.domains.obtain((1000, namespace))
    with pytest.raises(ffserve.ReadError, match="no room for another"):
        state.domains.obtain((1000, MOST_USER_DOMAINS))
    assert state.domains.obtain((1001, 1)) is not state.domains.obtain(None)
    state.close()


def test_a_user_had_a_share_of_all_tables_in_each_mount_namespace() -> None:
    state = ServerState(ServerConfig(arena_size_bytes=16 * MIB))
    most = limits.LEAST_PREPARED_SIZE // limits.PREPARED_SAMPLE_SIZE
    held, more = most * 78 // 100, most * 15 // 100
    state.domains.obtain_for((1000, 1), held).prepared_count = held
    with pytest.raises(ffserve.ReadError, match=f"user 1000 has {held} prepared samples"):
        state.domains.obtain_for((1000, 2), more)
    assert state.domains.obtain_for((1001, 2), more)
    state.close()


def test_limits_count_a_user_once_in_whatever_namespace() -> None:
    assert account_of((1000, 5)) == account_of((1000, 7)) != account_of((1001, 5))
    # The root of a container is no administrator, and shares nothing of one.
    assert account_of((0, OWN)) == account_of((0, HOST)) != account_of((0, 5))
    assert account_of((0, 5)) == account_of((0, 6))


@pytest.mark.check
def test_a_taken_name_of_a_job_was_told() -> None:
    """The second job of a name was called `name (uid)`, so users learned the names of others."""
    status = """
from ffserve.client.daemon import connection
print([job["name"] for job in connection.status(sys.argv[1])["jobs"]])
"""
    named = AS_USER + "from ffserve.client.daemon import connection\nconnection.join_job('name')\n"
    named = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'support')!r})\n{named}"
    )
    with daemon_of() as running:
        shared = public(running.directory, "shared.ffr", 2)
        with (
            client(named + HOLD, ALICE, "", running.socket, shared),
            client(named + HOLD, BOB, "", running.socket, shared),
        ):
            for user in ALICE, BOB:
                assert as_user(user, status, running.socket) == "['name']"
            facts = running.status()
            names = {f"name ({user})" for user in (ALICE, BOB)}
            assert {job["name"] for job in facts["jobs"]} == names
            assert {row["job"] for row in facts["progress"]} == names
            assert set(facts["groups"][0]["jobs"]) == names
