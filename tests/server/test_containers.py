"""Daemon and jobs in containers: user, PID, mount, network and IPC namespaces of their own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from container import IO_URING, Container, put_inside
from daemon import Daemon, sample, serving, until, write

import ffserve

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")

COUNT = 120
SIZE = 3000
OPEN = ["--socket-mode", "0666"]
REFUSED = r"io_uring is not used \(.*\): reading with \w+"
UNKNOWN = "the daemon cannot tell the containers of its clients apart, since .*"
READ = """
import hashlib
with ffserve.open(sys.argv[2], server=sys.argv[1]) as reader:
    for _ in range(2):
        content = reader.read_batch(np.arange(len(reader))).buffer.tobytes()
    stats = reader.stats()
print(json.dumps([os.getuid(), os.getpid(), stats["hits"], hashlib.sha256(content).hexdigest()]),
      flush=True)
"""
HOLD = """
reader = ffserve.open(sys.argv[2], server=sys.argv[1])
reader.read_batch(np.arange(len(reader)))
print("ready", flush=True)
sys.stdin.read()
"""
REFUSAL = """
import ffserve.errors
try:
    {}
except ffserve.FFServeError as error:
    print(type(error).__name__, error)
"""
STATUS = """
from ffserve.client.daemon import connection
print(json.dumps(connection.status(sys.argv[1])))
"""
SEARCH = "support.search_memory(sys.argv[1], sys.argv[2], sys.argv[3:])\n"
CLAIM = """
from ffserve import protocol
raw = support.Raw(sys.argv[1])
row = np.array([tuple(json.loads(sys.argv[3]))], protocol.IDENTITY_DTYPE).tobytes()
what = dict(paths=[sys.argv[2]], format=None, verify=True)
raw.send(protocol.Open(1, what, row))
print(type(raw.receive()).__name__)
raw.socket.close()
"""
"""Names a file with the state that another container sees, and passes no descriptor."""


def contents(seed: int) -> list[bytes]:
    chance = np.random.default_rng(seed)
    return [chance.bytes(SIZE) for _ in range(COUNT)]


def text(seed: int) -> str:
    """What READ prints of a file."""
    return hashlib.sha256(b"".join(contents(seed))).hexdigest()


def digest(reader: ffserve.Reader) -> str:
    return hashlib.sha256(reader.read_batch(range(COUNT)).buffer.tobytes()).hexdigest()


def record_file(path: Path, seed: int, owner: int = 0, mode: int = 0o644) -> str:
    write(path, contents(seed))
    os.chown(path, owner, owner)
    path.chmod(mode)
    return str(path)


def folder(path: Path, owner: int = 0) -> Path:
    path.mkdir(parents=True)
    os.chown(path, owner, owner)
    return path


@contextlib.contextmanager
def contained(box: Container, *options: str, **settings: list[str]) -> Iterator[Daemon]:
    """A daemon in a container, on a socket in a directory that all containers have."""
    daemon = Daemon(options=[*OPEN, *options], **settings)
    daemon.directory.chmod(0o777)
    put_inside(daemon, box)
    try:
        daemon.start()
        yield daemon
        if daemon.process is not None:
            assert daemon.end() == 0, daemon.text()
        daemon.check_log()
    finally:
        daemon.close()


# ---- jobs in containers, the daemon outside --------------------------------


@pytest.mark.check
def test_a_job_in_all_namespaces_hits_in_shared_memory() -> None:
    with serving(options=OPEN) as daemon:
        path = record_file(daemon.directory / "a.ffr", 1)
        uid, pid, hits, content = json.loads(Container().run(READ, daemon.socket, path))
        assert (uid, pid, hits, content) == (0, 1, COUNT, text(1))
        # A second container finds all in memory.
        uid, _, hits, content = json.loads(Container(users=200_000).run(READ, daemon.socket, path))
        assert (hits, content) == (2 * COUNT, text(1))
        assert daemon.cache()["blocks_read"] == COUNT
        with Container().client(HOLD, daemon.socket, path):
            (job,) = [job for job in daemon.status()["jobs"] if job["sessions"]]
            status = Path(f"/proc/{job['pid']}/status").read_text()
            assert f"\nNSpid:\t{job['pid']}\t1\n" in status


@pytest.mark.check
def test_containers_that_the_daemon_sees_share_among_their_own_processes_only() -> None:
    """Same user range, same file, whose name means nothing to the daemon."""
    with serving(options=OPEN) as daemon:
        inside = folder(daemon.directory / "inside")
        data = folder(daemon.directory / "data", 100_000)
        path = record_file(data / "a.ffr", 1, 100_000, 0o600)
        box = Container(mounts=((str(data), str(inside)),), hidden=(str(data),))
        seen = str(inside / "a.ffr")
        two = f"p = os.fork()\n{READ}\nif p: os.waitpid(p, 0)"
        for count in (1, 2):
            assert box.run(two, daemon.socket, seen).count(text(1)) == 2
            assert daemon.cache()["blocks_read"] == count * COUNT
        assert os.path.exists(path)


@pytest.mark.check
@pytest.mark.parametrize("users", [100_000, 300_000], ids=["the same range", "another range"])
def test_private_samples_stay_in_their_container(users: int) -> None:
    with serving(options=OPEN) as daemon:
        hers = folder(daemon.directory / "hers", 100_000)
        path = record_file(hers / "a.ffr", 1, 100_000, 0o600)
        other = record_file(daemon.directory / "b.ffr", 2)
        mine = Container(mounts=((str(hers), str(hers)),))
        stranger = Container(users=users, hidden=(str(hers),))
        prefix = contents(1)[7][:64].hex()
        status = os.stat(path)
        state = [status.st_dev, status.st_ino, status.st_size]
        claim = json.dumps([*state, status.st_mtime_ns, status.st_ctime_ns])
        with mine.client(HOLD, daemon.socket, path):
            assert stranger.run(SEARCH, daemon.socket, other, prefix) == "4"
            assert stranger.run(CLAIM, daemon.socket, path, claim) == "Need"
            refusal = REFUSAL.format("ffserve.open(sys.argv[2], server=sys.argv[1])")
            assert stranger.run(refusal, daemon.socket, path).startswith("MissingFile")
            shown = json.loads(stranger.run(STATUS, daemon.socket))
            assert shown["domains"][1:] == [] or users == 100_000
            # What the owner searches for is found, so the search works.
            assert mine.run(SEARCH, daemon.socket, path, prefix).endswith(" 0")


@pytest.mark.check
def test_another_file_at_the_same_path_is_never_mixed_up() -> None:
    with serving(options=OPEN) as daemon:
        inside = folder(daemon.directory / "inside")
        path = str(inside / "a.ffr")
        boxes = []
        for seed in range(3):
            data = folder(daemon.directory / f"data{seed}")
            record_file(data / "a.ffr", seed)
            boxes.append(Container(mounts=((str(data), str(inside)),)))
        record_file(inside / "a.ffr", 9)
        with daemon.open(path) as reader:
            for _ in range(2):
                for seed, box in enumerate(boxes):
                    assert json.loads(box.run(READ, daemon.socket, path))[3] == text(seed)
                    assert digest(reader) == text(9)


ROOTS = {
    "mapped": Container(),
    "without a user namespace": Container(users=None),
}


@pytest.mark.check
@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_root_of_a_container_had_the_rights_of_root(root: Container) -> None:
    """It saw everybody's files and jobs, and could resize the arena."""
    with serving(options=OPEN) as daemon:
        secret = record_file(daemon.directory / "secret.ffr", 1, 7000, 0o600)
        with Container(users=None, uid=7000, namespaces=()).client(HOLD, daemon.socket, secret):
            assert [shard["path"] for shard in daemon.status()["shards"]] == [secret]
            shown = json.loads(root.run(STATUS, daemon.socket))
            assert shown["shards"] == [] and shown["jobs"] == []
            resize = "from ffserve import cli\nraise SystemExit(cli.run(sys.argv[1:]))"
            said = root.run(resize, "resize", "32MiB", "--socket", daemon.socket, code=2)
            assert "may not resize the arena" in said
            said = root.run(resize, "stop", "--socket", daemon.socket, code=2)
            assert "another container" in said
        assert daemon.status()["arena"]["size"] == 64 << 20


@pytest.mark.check
def test_root_of_a_container_gets_no_file_that_it_cannot_open() -> None:
    with serving(options=OPEN) as daemon:
        path = record_file(daemon.directory / "a.ffr", 1, 0, 0o600)
        with daemon.open(path) as reader:
            assert len(reader[0]) == SIZE
            refusal = REFUSAL.format("ffserve.open(sys.argv[2], server=sys.argv[1])")
            assert Container().run(refusal, daemon.socket, path).startswith("AccessDenied")


# ---- the daemon in a container --------------------------------

BOXES = {
    "root without capabilities": Container(users=None, capabilities=False),
    "an ordinary user": Container(users=None, uid=4444),
    "a user namespace": Container(users=500_000, capabilities=False),
}


@pytest.mark.check
@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_a_daemon_in_a_container_serves_jobs_in_others(box: Container) -> None:
    with contained(box) as daemon:
        path = record_file(daemon.directory / "a.ffr", 1)
        for users in (100_000, 200_000):
            uid, _, hits, content = json.loads(
                Container(users=users).run(READ, daemon.socket, path)
            )
            assert (uid, content) == (0, text(1))
            assert hits >= COUNT
        facts = daemon.status()
        # All may read it, and the daemon finds it by its name.
        assert facts["cache"]["blocks_read"] == COUNT
        assert facts["pid"] == 1


@pytest.mark.check
def test_pid_of_a_job_that_the_daemon_does_not_see_was_0() -> None:
    with contained(Container(users=None, uid=4444)) as daemon:
        path = record_file(daemon.directory / "a.ffr", 1)
        with Container().client(HOLD, daemon.socket, path):
            # Root in the daemon's container sees all jobs.
            mine = (
                "from ffserve.client.daemon import connection; import json, sys\n"
                "print(json.dumps(connection.status(sys.argv[1])))"
            )
            first = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()[0]
            command = ["nsenter", "-t", first, "-m", "-p"]
            done = subprocess.run(
                [*command, sys.executable, "-c", mine, daemon.socket],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            (job,) = json.loads(done.stdout)["jobs"]
            assert job["pid"] is None and job["sessions"] == 1
            text_of = [*command, sys.executable, "-m", "ffserve", "status", "--socket"]
            shown = subprocess.run(
                [*text_of, daemon.socket], capture_output=True, text=True, check=True
            )
            assert re.search(rf"^{job['name'][:12]} +- ", shown.stdout, re.M), shown.stdout


@pytest.mark.check
def test_a_daemon_that_does_not_see_containers_keeps_each_process_apart_and_says_so() -> None:
    with contained(Container(users=None, uid=4444), expect=[UNKNOWN]) as daemon:
        hers = folder(daemon.directory / "hers", 100_000)
        path = record_file(hers / "a.ffr", 1, 100_000, 0o600)
        for count in (1, 2):
            assert json.loads(Container().run(READ, daemon.socket, path))[3] == text(1)
            assert daemon.cache()["blocks_read"] == count * COUNT
        assert daemon.text().count("cannot tell the containers of its clients apart") == 1


@pytest.mark.check
def test_a_daemon_with_the_machines_pids_sees_containers() -> None:
    box = Container(users=None, uid=4444, namespaces=("mnt", "ipc", "net"))
    with contained(box) as daemon:
        hers = folder(daemon.directory / "hers", 100_000)
        path = record_file(hers / "a.ffr", 1, 100_000, 0o600)
        two = f"p = os.fork()\n{READ}\nif p: os.waitpid(p, 0)"
        assert Container().run(two, daemon.socket, path).count(text(1)) == 2
        facts = daemon.status()
        assert facts["cache"]["blocks_read"] == COUNT
        assert facts["jobs"][0]["pid"] > 1, "root of the machine sees all"


def test_numbers_in_proc_of_another_pid_namespace_name_other_processes() -> None:
    program = """
import os, socket
from ffserve.server.users.peers import Namespaces
a, b = socket.socketpair()
print(Namespaces().peer(a).namespace >= 0)
a.close(), b.close()
"""
    assert Container().run(program) == "True"
    # The PID namespace is new, and /proc still the old one.
    command = ["unshare", "-p", "-f", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.check
def test_users_without_a_number_in_the_daemons_namespace_are_kept_apart() -> None:
    box = Container(users=500_000, namespaces=("mnt", "ipc", "net"))
    with contained(box, expect=[UNKNOWN]) as daemon:
        paths = []
        for seed, uid in enumerate((6001, 6002)):
            mine = folder(daemon.directory / str(uid), uid)
            paths.append(record_file(mine / "a.ffr", seed, uid, 0o600))
        users = [Container(users=None, uid=uid, namespaces=()) for uid in (6001, 6002)]
        prefix = contents(0)[7][:64].hex()
        with users[0].client(HOLD, daemon.socket, paths[0]):
            # Both are user 65534 to the daemon.
            assert users[1].run(SEARCH, daemon.socket, paths[1], prefix) == "4"
            shown = json.loads(users[1].run(STATUS, daemon.socket))
            assert {each["user"] for each in shown["domains"]} <= {65534, None}
            assert shown["arena"]["size"] == 64 << 20
            said = users[1].run(
                "from ffserve import cli\nraise SystemExit(cli.run(sys.argv[1:]))",
                "resize", "32MiB", "--socket", daemon.socket, code=2,
            )  # fmt: skip
            assert "may not resize" in said


# ---- the socket's directory --------------------------------

FOLLOW = """
import time
reader = ffserve.open(sys.argv[1])
content = reader.read_batch(np.arange(len(reader))).buffer.tobytes()
print("ready", flush=True)
for _ in sys.stdin:
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert reader.read_batch(np.arange(len(reader))).buffer.tobytes() == content
        time.sleep(0.05)
    with ffserve.open(sys.argv[1]) as another:
        print(another.source, flush=True)
"""


def start_in_directory(daemon: Daemon) -> Path:
    """Start a daemon anew, with its socket in a directory of its own; return that."""
    run = folder(daemon.directory / "run")
    daemon.end()
    daemon.command[daemon.command.index("--socket") + 1] = daemon.socket = str(run / "s")
    daemon.start()
    return run


@pytest.mark.check
@pytest.mark.parametrize("shared", ["directory", "file"])
def test_a_job_follows_the_daemon_through_a_directory_and_not_through_a_socket_file(
    shared: str,
) -> None:
    with serving(options=OPEN) as daemon:
        path, run = record_file(daemon.directory / "a.ffr", 1), start_in_directory(daemon)
        inside = folder(daemon.directory / "inside")
        seen = inside
        source = str(run)
        if shared == "file":
            (inside / "s").touch()
            seen, source = inside / "s", daemon.socket
        box = Container(mounts=((source, f"{seen}:ro"),))
        program = f"import os\nos.environ['FFSERVE_SOCKET'] = {str(inside / 's')!r}\n" + FOLLOW
        with box.client(program, path) as job:
            assert job.stdin is not None and job.stdout is not None

            def source() -> str:
                print(file=job.stdin, flush=True)
                return job.stdout.readline()  # type: ignore[union-attr]

            def moved() -> bool:
                found = source().startswith("daemon")
                return found and [job["sessions"] for job in daemon.status()["jobs"]] == [1]

            assert source().startswith("daemon")
            daemon.end()
            daemon.start()
            # What it has open goes to the new daemon, or stays with the memory that it has mapped.
            if shared == "directory":
                until(moved, "the job has moved")
            else:
                assert source().startswith("engine")
                assert daemon.status()["jobs"] == []


@pytest.mark.check
def test_a_job_with_a_read_only_directory_cannot_replace_the_socket() -> None:
    with serving(options=OPEN) as daemon:
        path, run = record_file(daemon.directory / "a.ffr", 1), start_in_directory(daemon)
        inside = folder(daemon.directory / "inside")
        box = Container(users=None, mounts=((str(run), f"{inside}:ro"),), hidden=(str(run),))
        assert json.loads(box.run(READ, inside / "s", path))[3] == text(1)
        replace = "try:\n    os.unlink(sys.argv[1])\nexcept OSError as error:\n    print(error)"
        assert "Read-only file system" in box.run(replace, inside / "s")


@pytest.mark.check
def test_a_second_daemon_on_the_directory_ends_and_the_first_goes_on() -> None:
    """As a DaemonSet with maxSurge would start it."""
    with contained(Container(users=None, uid=4444)) as daemon:
        second = subprocess.run(
            daemon.command, env=daemon.environment, capture_output=True, text=True
        )
        assert second.returncode == 2 and "another daemon" in second.stderr
        path = record_file(daemon.directory / "a.ffr", 1)
        assert json.loads(Container().run(READ, daemon.socket, path))[3] == text(1)


# ---- what runtimes forbid --------------------------------


@pytest.mark.check
def test_a_daemon_without_io_uring_goes_on_and_says_so_once() -> None:
    box = Container(users=None, uid=4444, denied=IO_URING)
    with contained(box, expect=[REFUSED]) as daemon:
        path = record_file(daemon.directory / "a.ffr", 1)
        assert json.loads(Container().run(READ, daemon.socket, path))[3] == text(1)
        assert daemon.status()["engine"]["kind"] == "aio"
        said = "io_uring is not used (not permitted (seccomp, or kernel.io_uring_disabled))"
        assert daemon.text().count(f"{said}: reading with aio") == 1
        assert daemon.text().count("io_uring is not used") == 1


def test_a_job_without_io_uring_goes_on_and_says_so_once(tmp_path: Path) -> None:
    path = record_file(tmp_path / "a.ffr", 1)
    program = """
import hashlib, multiprocessing

def read(_=None):
    readers = [ffserve.open(sys.argv[1], server="off") for _ in range(2)]
    for reader in readers:
        content = reader.read_batch(np.arange(len(reader))).buffer.tobytes()
        print(reader.source, hashlib.sha256(content).hexdigest(), flush=True)

read()
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(read, range(2))
sys.stdout.flush()
"""
    box = Container(users=None, denied=IO_URING)
    said = box.run(program, path)
    assert said.count(f"engine threads {text(1)}") >= 2
    line = "io_uring is not used (not permitted (seccomp, or kernel.io_uring_disabled))"
    assert said.count(f"{line}: reading with threads") == 1 and said.count("io_uring is") == 1


@pytest.mark.check
@pytest.mark.parametrize("limit", [0, 8192, 16_384, 32_768, 1 << 20])
def test_a_daemon_that_may_lock_little_memory_did_not_start(limit: int) -> None:
    """A trial with two reads in flight passed, and the engine with 128 did not open."""
    box = Container(users=None, uid=4444, limits=(("RLIMIT_MEMLOCK", limit),))
    with contained(box, expect=[REFUSED]) as daemon:
        path = record_file(daemon.directory / "a.ffr", 1)
        assert json.loads(Container().run(READ, daemon.socket, path))[3] == text(1)
        engine = daemon.status()["engine"]
        assert engine["registered"] <= limit
        assert (engine["kind"] in ("aio", "threads")) == ("io_uring is not used" in daemon.text())
        if not limit:
            assert "too little memory may be locked" in daemon.text()


@pytest.mark.check
def test_where_no_directory_can_be_written_no_engine_worked() -> None:
    """A container with a read-only root and /tmp: the trial of the engines needed a file."""
    program = """
read_only = container.MS_BIND | container.MS_REMOUNT | container.MS_RDONLY
for target in ("/", "/tmp", "/var/tmp"):
    if os.path.ismount(target):
        kept = os.statvfs(target).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
        container._mount(None, target, None, read_only | kept)
for name in ("HOME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
os.chdir("/")
"""
    with serving(options=OPEN) as host:
        # /dev/shm is writable, and no place for temporary files.
        memory = Path("/dev/shm") / host.directory.name
        memory.mkdir()
        try:
            memory.chmod(0o777)
            path = record_file(memory / "a.ffr", 1)
            off = (
                "print(ffserve.open(sys.argv[1], server='off').read_batch(range(3)).buffer.nbytes)"
            )
            assert Container().run(program + off, path) == str(3 * SIZE)
            daemon = Daemon(options=[*OPEN, "--socket", str(memory / "s")])
            daemon.socket = str(memory / "s")
            arguments = daemon.command[daemon.command.index("serve") :]
            serve = "from ffserve.cli import main\nraise SystemExit(main())"
            from container import environment

            daemon.command = Container(users=None).command(program + serve, *arguments)
            daemon.environment = environment()
            try:
                daemon.start()
                assert json.loads(Container().run(READ, daemon.socket, path))[3] == text(1)
                assert daemon.end() == 0
                daemon.check_log()
            finally:
                daemon.close()
        finally:
            for each in memory.iterdir():
                each.unlink()
            memory.rmdir()


# ---- memory --------------------------------


class Groups:
    """Memory cgroups: one on top, and those of daemon and job below it."""

    def __init__(self) -> None:
        self.top = self._make()
        if (self.top / "cgroup.subtree_control").exists():
            (self.top / "cgroup.subtree_control").write_text("+memory")

    @staticmethod
    def _make() -> Path:
        for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
            place = root / f"ffserve-test-{os.getpid()}"
            try:
                place.mkdir()
            except OSError:
                continue
            if any((place / name).exists() for name in USAGE):
                return place
            place.rmdir()
        pytest.skip("no memory cgroup can be made here")

    def limit(self, size: int) -> None:
        """Limit the memory of all groups together."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (self.top / name).exists():
                (self.top / name).write_text(str(size))

    def usage(self, name: str) -> int:
        """Return what a group is charged with, in bytes."""
        files = [self.top / name / each for each in USAGE]
        return int(next(each for each in files if each.exists()).read_text())

    def command(self, name: str, *arguments: str) -> list[str]:
        """Return a command that runs Python in a group."""
        (self.top / name).mkdir(exist_ok=True)
        join = f"import os, sys; open({str(self.top / name / 'cgroup.procs')!r}, 'w').write('0'); "
        run = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        return [sys.executable, "-c", join + run, *arguments]

    def remove(self) -> None:
        """Remove the groups when their processes have gone."""
        for group in [*(each for each in self.top.iterdir() if each.is_dir()), self.top]:
            until(lambda group=group: self._removed(group), "the group is empty")

    @staticmethod
    def _removed(group: Path) -> bool:
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()


USAGE = ("memory.current", "memory.usage_in_bytes")
IDLE = """
import sys, ffserve, numpy as np
reader = ffserve.open(sys.argv[2], server=sys.argv[1])
for _ in range(2):
    reader.read_batch(np.arange(len(reader)))
print("ready", flush=True)
for line in sys.stdin:
    reader.read_batch(np.arange(len(reader)))
    print("read", flush=True)
"""


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.remove()


@contextlib.contextmanager
def daemon_in(groups: Groups, arena: str, **settings: list[str]) -> Iterator[Daemon]:
    daemon = Daemon(arena=arena, options=OPEN, **settings)
    arguments = daemon.command[1:]
    daemon.command = groups.command("daemon", *arguments)
    try:
        yield daemon
    finally:
        daemon.close()


@contextlib.contextmanager
def idle_job(groups: Groups, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        groups.command("job", "-c", IDLE, *arguments),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        yield job
        job.kill()


@pytest.mark.check
def test_the_arena_is_charged_to_the_daemon_and_not_to_the_jobs(groups: Groups) -> None:
    with daemon_in(groups, "96MiB") as daemon:
        daemon.start()
        path = write(daemon.directory / "a.ffr", [sample(k, [100_000]) for k in range(500)])
        until(lambda: daemon.status()["arena"]["populated"] == 96 << 20, "all has its pages")
        with idle_job(groups, daemon.socket, path) as job:
            assert groups.usage("daemon") > 96 << 20
            status = Path(f"/proc/{job.pid}/status").read_text()
            shared = int(status.partition("RssShmem:")[2].split()[0]) * 1024
            own = int(status.partition("RssAnon:")[2].split()[0]) * 1024
            # The job has mapped 50 MB of the arena, and its group is charged for its own only.
            assert shared > 45 << 20
            assert groups.usage("job") < own + (40 << 20)


@pytest.mark.check
def test_a_daemon_that_started_again_in_its_container_was_killed_for_memory(groups: Groups) -> None:
    """A job that reads nothing for a while still has the old arena, against the same limit."""
    waiting = "waiting for memory to be free: .* of the arena's 192 MiB are taken"
    with daemon_in(groups, "192MiB", expect=[waiting]) as daemon:
        groups.limit(400 << 20)
        daemon.start()
        path = write(daemon.directory / "a.ffr", [sample(k, [100_000]) for k in range(900)])
        until(lambda: daemon.status()["arena"]["populated"] == 192 << 20, "all has its pages")
        with idle_job(groups, daemon.socket, path) as job:
            daemon.end(signal.SIGKILL)
            daemon.start()
            until(lambda: "waiting for memory" in daemon.text(), "it waits")
            assert daemon.status()["arena"]["populated"] < 192 << 20
            # It serves, and the job leaves the old memory.
            assert job.stdin is not None and job.stdout is not None
            for _ in range(2):
                print(file=job.stdin, flush=True)
                assert job.stdout.readline() == "read\n"
            until(lambda: daemon.status()["arena"]["populated"] == 192 << 20, "it has all")
        assert daemon.end() == 0
        daemon.check_log()
