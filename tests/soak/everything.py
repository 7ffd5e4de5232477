"""Everything at once, for as long as one likes: jobs of all kinds on three daemons that are killed,
stopped, resized, reloaded, attacked and replaced, over files that change and are damaged, and over
remote files whose origin fails, by a cache that lies.

    python tests/soak/everything.py [--seconds 3600] [--seed N] [--record FILE.json] [KIND…]

Every sample that a client gets is hashed and compared with what was written (`contents.py`); an
order is delivered as it is, each sample once (`clients.py`); memory, descriptors, threads and
mappings of what lives through the run must not grow (`measure.py`). The seed decides what happens
to whom; when it happens depends on the machine. A line a minute says how far it is. If anything is
wrong, the run ends at once with exit code 1, prints what happened before, and keeps logs and files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# All processes of the run have the sources beside this file.
_PATH = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])]
sys.path[:0] = _PATH
os.environ["PYTHONPATH"] = os.pathsep.join(_PATH)

import attack_field  # noqa: E402
import attacks  # noqa: E402
import contents  # noqa: E402
import daemons  # noqa: E402
import hostile_sessions  # noqa: E402
import random_client  # noqa: E402
from contents import ALL, CHANGING, OVERWRITTEN, REMOTE, REPLACED, SOUND  # noqa: E402
from counts import Counts  # noqa: E402
from daemon import damage, until, write  # noqa: E402
from measure import Series, growth, quiet_size, sizes_of  # noqa: E402
from sources import Sources  # noqa: E402

from ffserve.store.web import OPENED_AT_ONCE  # noqa: E402

START_DEADLINE_S = 180.0
"""For a client to begin: torch takes seconds to import, and all of them begin together."""
SLOW_S, STILL_S = 100.0, 600.0
"""A client that counts nothing for so long is noted with its traceback; it is stuck. A reply may
take 120 s, and a request has several."""
END_DEADLINE_S = 180.0
LIFE_S = (60.0, 400.0)
"""How long a client of those that come and go lives, if it is not killed."""
SEEN_LINES = 400
"""Of the story that is printed when something is wrong."""


@dataclass(frozen=True)
class Place:
    """A client of the run. lasting: it lives through all of it, and is measured; others end, are
    killed, and are started again."""

    kind: str
    number: int
    daemon: str
    lasting: bool = False


PLACES = (
    Place("reading", 0, "steady", lasting=True),
    Place("reading", 1, "kept"),
    Place("reading", 2, "succeeded"),
    Place("reading", 3, "steady"),
    Place("alone", 0, "steady", lasting=True),
    Place("awaiting", 0, "steady", lasting=True),
    Place("awaiting", 1, "kept"),
    Place("arbitrary", 0, "steady"),
    Place("arbitrary", 1, "kept"),
    Place("arbitrary", 2, "succeeded"),
    Place("ordered", 0, "steady", lasting=True),
    Place("ordered", 1, "kept"),
    Place("windowed", 0, "steady"),
    Place("windowed", 1, "succeeded"),
    Place("loaded", 0, "steady", lasting=True),
    Place("loaded", 1, "kept"),
    Place("threaded", 0, "succeeded"),
    Place("mixture", 0, "steady"),
    Place("prepared", 0, "steady", lasting=True),
    Place("prepared", 1, "steady"),
    Place("dropin", 0, "steady"),
    Place("command", 0, "steady"),
    Place("command", 1, "kept"),
    Place("writing", 0, "steady"),
    Place("changing", 0, "steady"),
    Place("changing", 1, "kept"),
    Place("changing", 2, "succeeded"),
    Place("overwritten", 0, "steady"),
    Place("overwritten", 1, "kept"),
    Place("damaged", 0, "steady"),
    Place("damaged", 1, "succeeded"),
    Place("remote", 0, "steady", lasting=True),
    Place("remote", 1, "kept"),
    Place("remote", 2, "steady"),
    Place("remote", 3, "succeeded"),
    Place("remote", 4, "succeeded"),
    Place("replaced", 0, "steady"),
    Place("replaced", 1, "kept"),
)
LOADERS = ("loaded", "mixture", "prepared")
"""Kinds with worker processes."""


class Failure(Exception):
    """Something is wrong."""


class Story:
    """What was done to whom and when.

    Args: path: gets all of it.
    """

    def __init__(self, path: Path) -> None:
        self.begun = time.monotonic()
        self.counts: Counter[str] = Counter()
        self._lines: deque[str] = deque(maxlen=SEEN_LINES)
        self._out = path.open("a")

    def add(self, event: str, text: str = "", *, counted: bool = True) -> None:
        """Go on."""
        line = f"{time.monotonic() - self.begun:9.3f} s: {event} {text}".rstrip()
        self.counts[event] += counted
        self._lines.append(line)
        self._out.write(line + "\n")
        self._out.flush()

    def tell(self) -> str:
        """Return the last lines."""
        return "\n".join(self._lines)


class Process:
    """One client, in a session of its own.

    Args: seconds: how long it lives by itself.
    """

    def __init__(self, place: Place, seed: int, seconds: float, run: Run) -> None:
        self.place = place
        self._story = run.story
        self.name = f"{place.kind}.{place.number}"
        self.errors = run.folder / "errors" / f"{self.name}.{seed}"
        self.stopped_until: float | None = None
        self._slow = False
        self._begun = False
        self._steps = -1
        self._moved = time.monotonic()
        self._started = time.monotonic()
        self._counts = Counts(run.folder / "counts" / self.name)
        environment = {
            **os.environ,
            "FFSERVE_SOCKET": run.daemons[place.daemon].daemon.socket,
            "FFSERVE_JOB": self.name,
            "FFSERVE_START": "0",
            "XDG_CACHE_HOME": str(run.folder / "cache"),
        }
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, str(HERE / "clients.py"), place.kind, str(place.number)),
                    *(str(seed), str(run.folder), str(seconds)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    def begun(self) -> bool:
        """Whether it works already."""
        assert self.process.stdout is not None
        if not self._begun:
            self._begun = bool(self.process.stdout.read())
            if not self._begun and time.monotonic() - self._started > START_DEADLINE_S:
                raise Failure(f"{self.name} (pid {self.pid}) did not begin")
        return self._begun

    def ended(self) -> bool:
        """Whether it ended as it should. Raises: Failure: otherwise, or it is stuck."""
        code = self.process.poll()
        if code == 0:
            self._close()
            return True
        if code is not None:
            raise Failure(f"{self.name} (pid {self.pid}) ended with {code}:\n{self.text()}")
        steps = self._counts.read()["steps"]
        now = time.monotonic()
        if steps != self._steps or self.stopped_until is not None:
            self._steps, self._moved, self._slow = steps, now, False
        elif now - self._moved > SLOW_S and not self._slow and self._begun:
            self._slow = True
            self._story.add("slow client", f"{self.name}, pid {self.pid}")
            os.kill(self.pid, signal.SIGUSR2)
        elif now - self._moved > STILL_S:
            raise Failure(f"{self.name} (pid {self.pid}) has done nothing for {STILL_S:.0f} s")
        return False

    def text(self) -> str:
        """Return what it wrote to standard error."""
        return self.errors.read_text(errors="replace")[-8000:]

    def workers(self) -> list[int]:
        """Return the processes of its session that have no children, without itself."""
        found, todo = [], [self.pid]
        while todo:
            pid = todo.pop()
            try:
                tasks = list(Path(f"/proc/{pid}/task").iterdir())
                texts = [(task / "children").read_text() for task in tasks]
            except OSError:
                continue  # it has ended
            children = [int(each) for text in texts for each in text.split()]
            todo += children
            if not children and pid != self.pid:
                found.append(pid)
        return found

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP it with its children; `resume_if_due` ends that."""
        os.killpg(self.pid, signal.SIGSTOP)
        self.stopped_until = time.monotonic() + seconds

    def resume_if_due(self, *, at_once: bool = False) -> None:
        """SIGCONT it when its time is over."""
        if self.stopped_until and (at_once or time.monotonic() >= self.stopped_until):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)
            self.stopped_until = None

    def kill(self) -> None:
        """SIGKILL the process, and nothing else of its session: children must end by themselves."""
        self.process.kill()
        self.process.wait()
        until(self._all_gone, f"the children of {self.name} have ended", 60)
        self._close()

    def kill_all(self) -> None:
        """SIGKILL its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self._close()

    def _all_gone(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()
        if not self.errors.stat().st_size:
            self.errors.unlink()


class Attack:
    """Hostile processes, as a user of their own where that is possible."""

    def __init__(self, run: Run, target: str, kind: str, seconds: float) -> None:
        self.kind = kind
        self.until = time.monotonic() + seconds
        socket = run.daemons[target].daemon.socket
        user: list[str] = []
        if os.geteuid() == 0 and shutil.which("setpriv"):
            uid = str(attack_field.HOSTILE)
            user = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"]
        if kind == "sessions":
            program = [hostile_sessions.__file__, str(run.chance.randrange(1 << 30)), socket]
            program.append(str(run.folder / "hostile" / "sessions.ffr"))
        else:
            file = str(run.folder / "hostile" / "attack.ffr")
            program = [attacks.__file__, kind, socket, file, str(attack_field.COUNTS[kind])]
        self.processes = [
            subprocess.Popen(
                [*user, sys.executable, *program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(2 if kind == "sessions" else 1)
        ]

    def over(self, *, at_once: bool = False) -> bool:
        """End it when its time is over; return whether it is."""
        if not at_once and time.monotonic() < self.until:
            return False
        for process in self.processes:
            if (code := process.poll()) is not None:
                raise Failure(f"attack {self.kind} has ended by itself with {code}")
            process.kill()
            process.wait()
        return True

    def kill(self) -> None:
        """End it, whatever happened to it."""
        for process in self.processes:
            process.kill()
            process.wait()


class Run:
    """One run."""

    def __init__(self, folder: Path, seed: int, seconds: float, kinds: Sequence[str] = ()) -> None:
        self.folder, self.seed, self.seconds = folder, seed, seconds
        self.places = [place for place in PLACES if not kinds or place.kind in kinds]
        self.chance = random.Random(seed)
        self.used = folder / "used"
        self.series = Series(self.used)
        self.clients: dict[Place, Process] = {}
        self.attacks: list[Attack] = []
        self.incarnations: Counter[str] = Counter()
        self.checked_log: dict[str, int] = {}
        self.thirds: dict[str, dict[str, list[float]]] = {}
        self.lasted = 0.0
        for name in (
            "sums", "state", "counts", "versions", "errors", "random", "hostile", "cache", "used",
        ):  # fmt: skip
            (folder / name).mkdir()
        self._write_files()
        self.story = Story(folder / "story")
        self.sources = Sources(folder)
        try:
            self.daemons = daemons.make(folder, self.sources.cache.address)
        except BaseException:
            self.sources.close()
            raise
        self._quiet = {name: control.daemon.fd_count() for name, control in self.daemons.items()}

    def _write_files(self) -> None:
        scale = 1.0 if self.seconds >= contents.FULL_SECONDS else 0.1
        for spec in ALL:
            version = 1 if spec in CHANGING + OVERWRITTEN + REPLACED else 0
            contents.write_version(self.folder, spec, version, scale=scale)
            contents.drop_cached(self.folder, spec)
            if version:
                (self.folder / "versions" / spec.name).write_bytes(
                    b"".join(version.to_bytes(8, "little") for _ in range(2))
                )
        for place, suffix in enumerate((".ffr", ".tfrecord", ".recordio", ".ffr", ".ffr")):
            path = self.folder / "random" / f"{place}{suffix}"
            write(path, random_client.samples(place))
        damage(path, random_client.DAMAGED)
        write(self.folder / "hostile" / "sessions.ffr", hostile_sessions.TRUTH)
        attacks.write_samples(str(self.folder / "hostile" / "attack.ffr"))
        for path in (self.folder / "hostile").iterdir():
            path.chmod(0o644)
        if os.geteuid() == 0:
            os.chown(self.folder / "hostile", attack_field.HOSTILE, attack_field.HOSTILE)

    # ---- clients --------------------------------------------------------------------------

    def start(self, place: Place) -> None:
        """Start a client, the next of its place."""
        seconds = 1e9 if place.lasting else self.chance.uniform(*LIFE_S)
        self.incarnations[place.kind] += 1
        seed = self.seed * 1_000_000 + sum(self.incarnations.values())
        self.clients[place] = Process(place, seed, seconds, self)

    def look_after(self) -> None:
        """Start clients that ended again, and everything that was stopped. Raises: Failure."""
        for control in self.daemons.values():
            control.resume_if_due()
            process = control.daemon.process
            if process is None or process.poll() is not None:
                raise Failure(f"a daemon has ended by itself:\n{control.tail()}")
        for place, client in list(self.clients.items()):
            client.resume_if_due()
            client.begun()
            if client.ended():
                if place.lasting:
                    raise Failure(f"{client.name} has ended by itself: {client.text()}")
                self.story.add("end of a client", client.name)
                self.start(place)
        self.attacks = [attack for attack in self.attacks if not attack.over()]
        self.sources.recover()

    def victim(self, *, lasting: bool, kinds: Sequence[str] = ()) -> Process | None:
        """Choose a client that works and is not stopped."""
        found = [
            client
            for place, client in self.clients.items()
            if (lasting or not place.lasting)
            and (not kinds or place.kind in kinds)
            and client.stopped_until is None
            and client.begun()
        ]
        return self.chance.choice(found) if found else None

    # ---- events ---------------------------------------------------------------------------

    def events(self) -> dict[Callable[[], None], float]:
        """Return what may happen, and how often in relation to one another."""
        return {
            self.kill_client: 3.0,
            self.kill_worker: 0.7,
            self.stop_client: 6.0,
            self.stop_daemon: 3.0,
            self.stop_daemon_for_long: 0.3,
            self.resize: 4.0,
            self.reload: 1.0,
            self.kill_kept: 2.0,
            self.end_kept: 1.0,
            self.kill_while_it_takes_over: 1.0,
            self.hand_over: 2.0,
            self.start_cold: 0.7,
            self.drop_page_cache: 2.0,
            self.attack: 3.0,
            self.fail_at_the_source: 6.0,
            self.replace_object: 3.0,
        }

    def kill_client(self) -> None:
        """SIGKILL; its children end by themselves."""
        if client := self.victim(lasting=False):
            self.story.add("kill client", f"{client.name}, pid {client.pid}")
            client.kill()
            self.start(client.place)

    def kill_worker(self) -> None:
        """SIGKILL a worker of a loader: the job ends with an error, and is continued."""
        client = self.victim(lasting=False, kinds=LOADERS)
        if client is None or not (workers := client.workers()):
            return
        worker = self.chance.choice(workers)
        self.story.add("kill worker", f"{worker} of {client.name}, pid {client.pid}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It may have been between two epochs, and not have needed this worker any more.
            client.process.wait(20)
        client.kill()
        self.start(client.place)

    def stop_client(self) -> None:
        """SIGSTOP for a while."""
        if client := self.victim(lasting=True):
            seconds = self.chance.choice((0.1, 0.5, 3.0))
            self.story.add("stop client", f"{client.name}, pid {client.pid}, for {seconds} s")
            client.stop_for(seconds)

    def _some_daemon(self) -> tuple[str, daemons.Control] | None:
        found = [pair for pair in self.daemons.items() if not pair[1].is_stopped]
        return self.chance.choice(found) if found else None

    def stop_daemon(self) -> None:
        """SIGSTOP for a while."""
        if chosen := self._some_daemon():
            seconds = 0.5 * self.chance.random()
            self.story.add("stop daemon", f"{chosen[0]} for {seconds:.3f} s")
            chosen[1].stop_for(seconds)

    def stop_daemon_for_long(self) -> None:
        """Longer than clients wait for a sign of life."""
        if chosen := self._some_daemon():
            self.story.add("stop daemon for 12 s", chosen[0])
            chosen[1].stop_for(12.0)

    def resize(self) -> None:
        """Another arena size."""
        if chosen := self._some_daemon():
            name, control = chosen
            size = self.chance.choice(control.arenas)
            self.story.add("resize", f"{name} to {size >> 20} MiB")
            self.story.add("resize", f"{name}: {control.resize(size)}", counted=False)

    def reload(self) -> None:
        """SIGHUP with other settings."""
        steady = self.daemons["steady"]
        if not steady.is_stopped:
            rate = self.chance.choice(("0", "2MiB", "8MiB"))
            (self.folder / "settings.toml").write_text(f'scrub_rate = "{rate}"\n')
            self.story.add("reload", f"with scrub_rate {rate}")
            os.kill(steady.pid, signal.SIGHUP)

    def _restart_kept(self, event: str, number: int) -> daemons.Control | None:
        kept = self.daemons["kept"]
        if kept.is_stopped:
            return None
        self.story.add(event, f"pid {kept.pid}")
        kept.end(number)
        return kept

    def kill_kept(self) -> None:
        """SIGKILL; the next process takes the memory over."""
        if kept := self._restart_kept("kill -9 daemon", signal.SIGKILL):
            time.sleep(self.chance.choice((0.0, 0.1, 1.0)))
            kept.start()

    def end_kept(self) -> None:
        """SIGTERM; the next process takes the memory over."""
        if kept := self._restart_kept("restart daemon", signal.SIGTERM):
            kept.start()

    def kill_while_it_takes_over(self) -> None:
        """SIGKILL to a daemon, and to the next one while it begins."""
        if kept := self._restart_kept("kill daemon while it takes over", signal.SIGKILL):
            kept.start(wait=False)
            time.sleep(self.chance.uniform(0.05, 0.7))
            kept.end(signal.SIGKILL)
            kept.start()

    def hand_over(self) -> None:
        """A successor takes over from a running daemon."""
        succeeded = self.daemons["succeeded"]
        if not succeeded.is_stopped:
            self.story.add("hand over", f"from pid {succeeded.pid}")
            succeeded.hand_over()

    def start_cold(self) -> None:
        """SIGKILL to a daemon whose memory nobody keeps."""
        succeeded = self.daemons["succeeded"]
        if not succeeded.is_stopped:
            self.story.add("kill -9 daemon without a successor", f"pid {succeeded.pid}")
            succeeded.end(signal.SIGKILL)
            time.sleep(self.chance.choice((0.0, 0.5, 7.0)))
            succeeded.start()

    def drop_page_cache(self) -> None:
        """Files are not in the page cache any more: they are read from the disk."""
        self.story.add("drop page cache")
        for spec in SOUND:
            contents.drop_cached(self.folder, spec)

    def attack(self) -> None:
        """A hostile client for some seconds."""
        if not self.attacks:
            kind = self.chance.choice(("sessions", "sessions", *attacks.KINDS))
            target = self.chance.choice(tuple(self.daemons))
            self.story.add("attack", f"{kind} on {target}", counted=False)
            self.story.counts[f"attack: {kind}"] += 1
            self.attacks.append(Attack(self, target, kind, self.chance.uniform(2.0, 5.0)))

    def fail_at_the_source(self) -> None:
        """The origin of remote files, or the cache of it, fails for seconds."""
        name, fault = self.sources.fail(self.chance)
        self.story.add("fault", f"of the {name}: {fault}", counted=False)
        self.story.counts[f"{name}: {fault}"] += 1

    def replace_object(self) -> None:
        """Another version of an object."""
        self.story.add("replace object", f"version {self.sources.replace()}")

    # ---- the run --------------------------------------------------------------------------

    def go(self, say: Callable[[str], None]) -> None:
        """Run. Raises: Failure, and whatever else goes wrong."""
        (self.folder / "going").touch()
        for place in self.places:
            self.start(place)
        until(self._all_begun, "all clients have begun", START_DEADLINE_S)
        self.story.add("all begun", f"{len(self.places)} clients", counted=False)
        events = self.events()
        self.story.begun = begun = time.monotonic()
        interval = min(10.0, self.seconds / 60)
        measure_at, say_at = 0.0, 60.0
        while (now := time.monotonic() - begun) < self.seconds:
            time.sleep(self.chance.uniform(0.2, 1.6))
            self.look_after()
            if now >= measure_at:
                self.measure(now)
                measure_at = now + interval
            if now >= say_at:
                self.check_logs()
                say(self.line(now))
                say_at += 60.0
            [event] = self.chance.choices(list(events), list(events.values()))
            event()
        self.lasted = time.monotonic() - begun
        self.end()

    def _all_begun(self) -> bool:
        self.look_after()
        return all(client.begun() for client in self.clients.values())

    def measure(self, now_s: float) -> None:
        """Measure what lives through the whole run, and the successors of what does not."""
        for name, control in self.daemons.items():
            self.series.measure(f"daemon {name}", control.pid, now_s)
        for place, client in self.clients.items():
            if place.lasting:
                self.series.measure(f"client {client.name}", client.pid, now_s)

    def check_logs(self) -> None:
        """Fail on an unexpected line of a daemon."""
        for control in self.daemons.values():
            control.daemon.check_log()

    def totals(self) -> dict[str, Counter[str]]:
        """Return the counters of each kind."""
        found: dict[str, Counter[str]] = {}
        for path in sorted((self.folder / "counts").iterdir()):
            kind = path.name.partition(".")[0]
            found.setdefault(kind, Counter()).update(Counts(path).read())
        return found

    def line(self, now_s: float) -> str:
        """Return how far it is."""
        whole: Counter[str] = sum(self.totals().values(), Counter())
        last = self.series.last("daemon steady")
        return (
            f"{now_s / 60:4.0f} min: {whole['samples'] / 1e6:.1f} million samples hashed "
            f"({whole['samples'] / now_s / 1000:.0f} thousand/s), {whole['epochs']} epochs, "
            f"{sum(self.story.counts.values())} events; daemon: "
            f"{last.anonymous >> 20} MiB of its own, {last.descriptors} descriptors, "
            f"{last.threads} threads, {last.mappings} mappings"
        )

    def end(self) -> None:
        """End clients and daemons, and look whether anything is left."""
        for attack in self.attacks:
            attack.over(at_once=True)
        self.attacks = []
        self.sources.recover(at_once=True)
        for control in self.daemons.values():
            control.resume_if_due(at_once=True)
        for client in self.clients.values():
            client.resume_if_due(at_once=True)
        (self.folder / "going").unlink()
        deadline = time.monotonic() + END_DEADLINE_S
        for client in self.clients.values():
            client.process.wait(max(deadline - time.monotonic(), 0.1))
            assert client.ended()
            until(client._all_gone, f"the children of {client.name} have ended", 60)
        self.clients.clear()
        for name, control in self.daemons.items():
            daemon = control.daemon
            until(
                lambda d=daemon: not any(shard["sessions"] for shard in d.status()["shards"]),
                f"all sessions of {name} are over",
            )
            until(lambda d=daemon: not d.status()["arena"]["leased"], f"no lease of {name} is left")
            smallest = min(control.arenas)
            control.resize(smallest)
            until(
                lambda d=daemon, s=smallest: d.status()["arena"]["size"] == s,
                f"nothing of {name} is held any more",
            )
            most = self._quiet[name] + 8 + len(REMOTE + REPLACED) + 2 * OPENED_AT_ONCE
            what = f"descriptors of {name} are closed"
            try:
                until(lambda d=daemon, n=most: d.fd_count() <= n, what)
            except AssertionError as error:
                raise Failure(f"{error}: {_open_in(control.pid)}") from error
            size = quiet_size(daemon.status())
            try:
                until(
                    lambda p=control.pid, s=size: sizes_of(p, self.used).used <= s,
                    f"{name} uses at most {size} bytes, which are known",
                )
            except AssertionError as error:
                raise Failure(f"{error}: {sizes_of(control.pid, self.used)}") from error
            used = sizes_of(control.pid, self.used).used
            text = f"{name}: {daemon.fd_count()} descriptors, {used} bytes of at most {size}"
            self.story.add("quiet", text, counted=False)
        for control in self.daemons.values():
            control.end(signal.SIGTERM)
        self.check_logs()
        self.thirds = self.series.thirds(self.lasted)
        # In a shorter run everything still grows to its size.
        if self.lasted >= contents.FULL_SECONDS and (found := growth(self.thirds, self._alone())):
            raise Failure("it grows: " + "; ".join(found))

    def _alone(self) -> set[str]:
        """Return the clients that have read files by themselves for a while."""
        found = (self.folder / "errors").iterdir()
        return {
            f"client {each.name.rpartition('.')[0]}"
            for each in found
            if "this process reads the files without" in each.read_text(errors="replace")
        }

    def close(self) -> None:
        """End everything, whatever happened."""
        for attack in self.attacks:
            attack.kill()
        for client in self.clients.values():
            if client.process.poll() is None:
                client.kill_all()
        for name, control in self.daemons.items():
            with contextlib.suppress(OSError):
                shutil.copy(control.daemon.log, self.folder / f"log-{name}")
        daemons.close(self.daemons)
        self.sources.close()

    def take_tracebacks(self) -> None:
        """Have all processes write where their threads are: into log, or standard error."""
        pids = {control.daemon.process.pid: name for name, control in self.daemons.items()
                if control.daemon.process is not None}  # fmt: skip
        for pid, name in pids.items():
            self.story.add("daemon", f"{name}, pid {pid}: {_waits_in(pid)}", counted=False)
        for pid in (*pids, *(client.pid for client in self.clients.values() if client.begun())):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(1.0)

    def record(self) -> dict[str, Any]:
        """Return what stands in the record."""
        memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        return {
            "date": time.strftime("%Y-%m-%d"),
            "machine": {
                "cores": os.cpu_count(),
                "memory": memory,
                "kernel": platform.release(),
                "python": platform.python_version(),
            },
            "seed": self.seed,
            "seconds": round(self.lasted, 1),
            "clients": {kind: self.incarnations[kind] for kind in sorted(self.incarnations)},
            "totals": {kind: dict(counts) for kind, counts in self.totals().items()},
            "events": dict(sorted(self.story.counts.items())),
            "thirds": self.thirds,
            "series": self.series.as_rows(),
        }


def _open_in(pid: int) -> str:
    """Return what a process has open, for people."""
    found: Counter[str] = Counter()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[os.readlink(each)] += 1
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items()))


def _waits_in(pid: int) -> str:
    """Return in which system calls the threads of a process are, for people."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            texts = [(task / name).read_text().strip() for name in ("comm", "wchan", "syscall")]
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            found.append(f"{task.name} {' '.join(texts)} {state}")
    return "; ".join(found)


def main() -> int:
    """Run as the options say."""
    parser = argparse.ArgumentParser(
        description="all kinds of jobs, and all that can happen to them"
    )
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, help="write figures into this JSON file")
    parser.add_argument(
        "--keep", type=Path, help="directory for the run; kept (default: temporary)"
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="only clients of these kinds")
    given = parser.parse_args()
    if given.keep:
        given.keep.mkdir(parents=True)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="ffserve-soak-"))
    folder.chmod(0o755)
    print(f"seed {given.seed}, {given.seconds:g} s, in {folder}", flush=True)
    run = Run(folder, given.seed, given.seconds, given.kinds)
    # Its time is over: everything is looked at, and recorded, as at the end.
    signal.signal(signal.SIGTERM, lambda *_: setattr(run, "seconds", 0.0))
    try:
        run.go(lambda line: print(line, flush=True))
    except BaseException as error:
        run.story.add("FAILED", f"{type(error).__name__}: {error}", counted=False)
        run.take_tracebacks()
        print(run.story.tell(), traceback.format_exc(), sep="\n", file=sys.stderr, flush=True)
        for name, control in run.daemons.items():
            print(f"---- log of {name}\n{control.tail()}", file=sys.stderr)
        print(f"seed {given.seed}; files and logs are in {folder}", file=sys.stderr)
        run.close()
        return 1
    record = run.record()
    run.close()
    if given.record:
        given.record.write_text(json.dumps(record, indent=1) + "\n")
    whole: Counter[str] = sum((Counter(each) for each in record["totals"].values()), Counter())
    print(
        f"passed: {record['seconds']:.0f} s, {whole['samples']:,} samples hashed, "
        f"{whole['epochs']} epochs delivered whole, {sum(run.story.counts.values())} events",
        flush=True,
    )
    if not given.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
