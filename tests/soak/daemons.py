"""The daemons of the long run: one that lives through it, one that a service manager starts again,
one that is replaced by its successors."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from daemon import Daemon, until
from service_manager import TAKEN_OVER, ManagedDaemon

from ffserve.client.daemon.connection import Connection
from ffserve.errors import FFServeError

MIB = 1 << 20
EXPECT = (
    r"arena .*",
    r"closed a session \(pid \d+\): .*",
    r"cannot send the shared memory to a client: .*",
    r"remote files: store .*",
    r"store: block \d+ of .* had come damaged",
    r"store: the cache failed, so the origin .* is asked: .*",
    r"store: the cache serves .* again",
    r"store: the origin does not answer, so it is asked less often: .*",
    r"reloaded the settings; changed: .*",
    r"stopped with unanswered requests after .*",
    r"stopping: \d+ clients, another daemon takes over",
    r"waiting for memory to be free: .*",
    TAKEN_OVER,
)
STOP_DEADLINE_S = 60.0
START_DEADLINE_S = 120.0
TRACEBACKS = "import faulthandler as f, signal as s; f.register(s.SIGUSR2, all_threads=True)\n"
"""A daemon that gets SIGUSR2 writes where its threads are."""


class Control:
    """What a run does to a daemon.

    Args: daemon: running. arenas: sizes in bytes that it is given; it starts with the first.
    """

    def __init__(self, daemon: Daemon, arenas: tuple[int, ...]) -> None:
        self.daemon = daemon
        self.arenas = arenas
        self.stopped_until: float | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self.daemon.pid

    @property
    def is_stopped(self) -> bool:
        """Whether it got SIGSTOP and no SIGCONT yet."""
        return self.stopped_until is not None

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP it; `resume_if_due` ends that."""
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped_until = time.monotonic() + seconds

    def resume_if_due(self, *, at_once: bool = False) -> None:
        """SIGCONT it when its time is over."""
        if self.stopped_until and (at_once or time.monotonic() >= self.stopped_until):
            os.kill(self.pid, signal.SIGCONT)
            self.stopped_until = None

    def resize(self, size: int) -> str:
        """Give its arena another size; return what came of it."""
        try:
            connection = Connection(self.daemon.socket, "resizer")
        except FFServeError as error:
            return f"no connection: {error}"
        try:
            return f"is {connection.resize(size)['size'] // MIB} MiB"
        except FFServeError as error:
            return f"failed: {error}"
        finally:
            connection.close()

    def start(self, *, wait: bool = True) -> None:
        """Start the next process, and wait until it serves."""
        daemon = self.daemon
        daemon.start(wait=False)
        if wait:
            ready = daemon._is_ready if isinstance(daemon, ManagedDaemon) else daemon._answers
            until(ready, "the daemon is ready", START_DEADLINE_S)

    def end(self, number: int) -> None:
        """End it; SIGTERM must be followed by exit code 0."""
        assert self.daemon.process is not None
        self.daemon.process.send_signal(number)
        code = self.daemon.process.wait(STOP_DEADLINE_S)
        self.daemon.process = None
        assert code == (0 if number == signal.SIGTERM else -number), (code, self.tail())

    def hand_over(self, *options: str) -> None:
        """Start a successor, which takes the memory over while this one runs."""
        daemon = self.daemon
        assert daemon.process is not None
        with daemon.log.open("ab") as log:
            heir = subprocess.Popen(
                [*daemon.command, *options, "--handover"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=daemon.environment,
            )
        try:
            code = daemon.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            heir.kill()
            heir.wait()
            raise
        daemon.process = heir
        assert code == 0, (code, self.tail())
        until(daemon._answers, "the successor answers", START_DEADLINE_S)

    def tail(self) -> str:
        """Return the end of its log."""
        return self.daemon.text()[-6000:]


def make(folder: Path, cache: str) -> dict[str, Control]:
    """Start all daemons. Args: folder: of the run; gets the settings of the one that is reloaded,
    stores and index files. cache: address of a cache of remote files; the first asks the origin."""
    settings = folder / "settings.toml"
    everybody = ("--socket-mode", "0666", "--close-after", "5", "--drain-timeout", "5")
    settings.write_text('scrub_rate = "0"\n')
    # A run that nohup started ignores SIGHUP, and its processes do.
    patch = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    # A minute for each kill would set a small arena aside as a whole.
    brief = "import ffserve.server.life.daemon as d; d.QUARANTINE_S, d.SETTLE_INTERVAL_S = 5.0, 0.5"
    made: dict[str, Control] = {}
    try:
        for name, kind, arenas, options, statements in (
            ("steady", Daemon, (128, 64, 96, 192), ("--config", str(settings)), patch),
            ("kept", ManagedDaemon, (64, 32, 96), (), brief),
            ("succeeded", Daemon, (64, 32, 96), (), brief),
        ):
            sizes = tuple(size * MIB for size in arenas)
            says = f"import allocator; allocator.report({str(folder / 'used')!r})\n"
            options += ("--store-directory", str(folder / f"store-{name}"), "--store-size", "32MiB")
            options += () if name == "steady" else ("--store-cache", cache)
            daemon = kind(
                arena=str(sizes[0]),
                options=[*everybody, "--max-arena", str(max(sizes)), *options],
                expect=EXPECT,
                patch=TRACEBACKS + says + statements,
            )
            daemon.environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
            made[name] = Control(daemon, sizes)
            made[name].start()
            os.chmod(daemon.socket, 0o666)  # a socket of a service manager is its own affair
    except BaseException:
        for control in made.values():
            control.daemon.close()
        raise
    return made


def close(made: dict[str, Control]) -> None:
    """End all daemons, in whatever state they are."""
    for control in made.values():
        if control.daemon.process is not None:
            control.resume_if_due(at_once=True)
        control.daemon.close()
