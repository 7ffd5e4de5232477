"""The processes of a run: started together, watched, ended together.

Each program leads a session of its own, so a signal reaches exactly the processes that it is meant
for: a signal of the terminal comes to this process, which passes it on once. A program that goes on
is killed after a second SIGINT, or some time after a SIGTERM. It is also killed when this process
dies (PR_SET_PDEATHSIG, prctl(2)). If its input is a pipe of samples, it is killed
before the pipe ends (`Guard`): it would take the death of the writer for the end of the data. When
a program has ended, the processes that it left in the first process group of its session are ended
too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

from ffserve.errors import FFServeError, MissingFile, UsageError
from ffserve.inputs.stream import WorkerStream, write_all

GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL, for all programs after a SIGTERM to this process, and for the
workers that are ended because another has failed."""
_SAME_S = 0.3
"""Two SIGINTs within this time are one: timeout(1) sends it to the process and to its group."""
_LEFT_S = 2.0
"""Time between SIGTERM and SIGKILL for processes that an ended program has left."""
_TICK_S = 0.05
_LINE_LIMIT = 64 << 10
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

FORWARDED = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGCONT, signal.SIGTSTP, signal.SIGWINCH,
)  # fmt: skip
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal ends the run while no program runs."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class RunWorker:
    """A worker: directory and environment of its program, and the stream that this reads."""

    rank: int
    directory: str
    environment: Mapping[str, str]
    stream: WorkerStream | None = None
    process: subprocess.Popen[bytes] | None = None
    guard: Guard | None = None
    """The guard of a program that reads a stream."""
    code: int | None = None
    """Exit code of the program; 128 + N if signal N has killed it."""
    pipes: list[Prefixed] = field(default_factory=list)


class Guard:
    """A process that holds the pipe of a stream open until the program is killed, if this process
    dies: the kernel closes the files of a dying process before it sends PR_SET_PDEATHSIG, and sends
    that to the program only, not to what the program has started.

    Args: program: leader of its process group. pipe: the end that we write to.
    """

    def __init__(self, program: int, pipe: int) -> None:
        self._lock = threading.Lock()
        here, self._there = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
                self._pid = os.fork()
            if not self._pid:
                _guard(program, pipe, here)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(here)

    def end(self) -> None:
        """End the guard, because the data or the program has ended. Any thread may call it, also
        twice."""
        with self._lock:
            if self._there >= 0:
                with contextlib.suppress(BrokenPipeError):  # it was killed
                    os.write(self._there, b".")
                os.close(self._there)
                self._there = -1
                os.waitpid(self._pid, 0)


def _guard(program: int, pipe: int, control: int) -> NoReturn:
    try:
        os.setsid()
        low, high = sorted((pipe, control))
        for first, end in ((0, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(first, end)
        if not os.read(control, 1):
            os.killpg(program, signal.SIGKILL)
    finally:
        os._exit(0)


class Prefixed:
    """Output of a program, which is passed on line by line with a prefix."""

    def __init__(self, source: int, target: int, prefix: bytes) -> None:
        os.set_blocking(source, False)
        self.source = source
        self._target = target
        self._prefix = prefix
        self._rest = b""

    def take(self) -> bool:
        """Write the lines that have come; return False at the end of the output."""
        try:
            data = os.read(self.source, _LINE_LIMIT)
        except BlockingIOError:
            return True
        whole = self._rest + data
        end = len(whole) if not data else whole.rfind(b"\n") + 1
        if not end and len(whole) >= _LINE_LIMIT:
            end = len(whole)
        self._rest = whole[end:]
        if end:
            lines = whole[:end].removesuffix(b"\n").split(b"\n")
            text = b"".join(part for line in lines for part in (self._prefix, line, b"\n"))
            if not self._write(text):
                return False  # the program notices it when its own pipe is closed
        return bool(data)

    def _write(self, text: bytes) -> bool:
        left = memoryview(text)
        while left:
            try:
                left = left[os.write(self._target, left) :]
            except BlockingIOError:  # a terminal that another program has made so
                select.select([], [self._target], [])
            except BrokenPipeError:
                return False
        return True

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.source)


class Signals:
    """Passes signals on to the programs; while none runs they end the run.

    In a ``with``: the handlers are those of before afterwards. A signal that is ignored stays so,
    for the programs too (``nohup``).

    Args: grace_s: time between SIGTERM and SIGKILL.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self.kill_at: float | None = None
        """When programs that still run are killed."""
        self._interrupted_at: float | None = None
        self.workers: list[RunWorker] = []
        """Those whose programs run."""
        self.received: list[int] = []
        """Signals that end a program, as they came."""
        self.ending = False
        """Whether processes that programs have left are being ended: a signal is only recorded."""
        self._held: list[int] | None = None
        """Signals that came while a program was started: it may run already, but is not known."""
        self._reader, self._writer = os.pipe()
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._wakeup = -1

    def __enter__(self) -> Signals:
        for fd in (self._reader, self._writer):
            os.set_blocking(fd, False)
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._forward)
        # Without a handler the wakeup descriptor would not be told.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(self._reader)
        os.close(self._writer)

    def wake(self) -> None:
        """Wake the loop; threads may call it."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")

    def wait(self, pipes: Sequence[Prefixed], timeout_s: float) -> list[Prefixed]:
        """Wait for a signal, the end of a program, or output; return the pipes that have some."""
        poll = select.poll()
        by_fd = {pipe.source: pipe for pipe in pipes}
        for fd in (self._reader, *by_fd):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(timeout_s * 1000)]
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._reader, 4096):
                    pass
        return [by_fd[fd] for fd in ready if fd in by_fd]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back while a program is started; they are passed on at the end."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            for number in held:
                self._forward(number, None)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self._held is not None:
            self._held.append(number)
            return
        if number in _ENDING:
            self.received.append(number)
        if self.ending:
            return
        if not self.workers:
            if number in _ENDING:
                raise Interrupted(number)
            if number != signal.SIGTSTP:
                return
        # The programs' groups have no shell to continue them: SIGTSTP would be discarded.
        sent = signal.SIGSTOP if number == signal.SIGTSTP else number
        for worker in self.workers:
            signal_group(worker, sent)
        self._limit(number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _limit(self, number: int) -> None:
        """Limit the time that programs have after a signal."""
        if number == signal.SIGTERM:
            self.kill_within(self.grace_s)
        elif number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at >= _SAME_S:
                self.kill_within(0)

    def kill_within(self, grace_s: float) -> None:
        """Have the programs killed after this time, or earlier if that was said before."""
        at = time.monotonic() + grace_s
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)


def signal_group(worker: RunWorker, number: int) -> bool:
    """Send a signal to a program's process group; False if nobody is left in it."""
    assert worker.process is not None
    try:
        os.killpg(worker.process.pid, number)
    except (ProcessLookupError, PermissionError):  # permission: it runs as another user
        return False
    return True


class Processes:
    """The programs of a run.

    Args:
        workers: at least one. command: the program and its arguments. prefix: write their output
            with ``[RANK]`` before each line. say: writes a line of our own.
    """

    def __init__(
        self,
        workers: Sequence[RunWorker],
        command: Sequence[str],
        *,
        prefix: bool,
        signals: Signals,
        say: Callable[[str], None],
    ) -> None:
        self._workers = workers
        self._command = list(command)
        self._prefix = prefix
        self._signals = signals
        self._say = say
        self._failed: list[tuple[RunWorker, BaseException]] = []
        """Streams whose source failed."""
        self._first_code = 0
        self._killed = False
        """Whether it was said that programs are killed."""

    def run(self) -> int:
        """Run the programs; return 0, or the exit code of the first that failed.

        Raises: UsageError: the program cannot be started. FFServeError: the source of a stream
            failed. Interrupted: a signal came before or after the programs. All programs have ended
            then.
        """
        feeders: list[threading.Thread] = []
        _adopt(True)
        try:
            for worker in self._workers:
                if self._signals.received:
                    break
                self._start(worker)
            feeders = [self._feed(worker) for worker in self._workers if worker.stream]
            self._watch()
        finally:
            known = len(self._signals.received)
            self._signals.ending = True
            self._end_all(feeders)
            self._signals.ending = False
            _adopt(False)
        if self._failed:
            raise self._failed[0][1]
        late = self._signals.received[known:]
        if any(worker.process is None for worker in self._workers):
            late = self._signals.received
        if late and not self._first_code:
            raise Interrupted(late[0])
        return self._first_code

    def _start(self, worker: RunWorker) -> None:
        stdin: int | None = None  # one program has ours
        if worker.stream is not None:
            stdin = subprocess.PIPE
        elif self._prefix:
            stdin = subprocess.DEVNULL
        out = subprocess.PIPE if self._prefix else None
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def die_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        with self._signals.held():
            try:
                with warnings.catch_warnings():
                    # The warning is about a fork beside threads, but the child only calls prctl and
                    # execve.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    worker.process = subprocess.Popen(
                        self._command,
                        cwd=worker.directory,
                        env=dict(worker.environment),
                        stdin=stdin,
                        stdout=out,
                        stderr=out,
                        start_new_session=True,
                        preexec_fn=die_with_parent,  # noqa: PLW1509
                        bufsize=0,
                    )
                if worker.stream is not None:
                    assert worker.process.stdin is not None
                    worker.guard = Guard(worker.process.pid, worker.process.stdin.fileno())
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                raise start_error(error, self._command[0], worker) from error
            self._signals.workers.append(worker)
        if self._prefix:
            assert worker.process.stdout is not None and worker.process.stderr is not None
            mark = f"[{worker.rank}] ".encode()
            for stream, target in ((worker.process.stdout, 1), (worker.process.stderr, 2)):
                worker.pipes.append(Prefixed(os.dup(stream.fileno()), target, mark))
                stream.close()

    def _feed(self, worker: RunWorker) -> threading.Thread:
        """Start the thread that writes a worker's samples."""

        def feed() -> None:
            assert worker.stream is not None
            assert worker.process is not None and worker.process.stdin is not None
            pipe = worker.process.stdin
            try:
                with contextlib.closing(worker.stream.blocks()) as blocks:
                    write_all(pipe.fileno(), blocks)
                assert worker.guard is not None
                worker.guard.end()
                pipe.close()
            except BaseException as error:
                if not _has_reader(pipe.fileno()):
                    return  # the program has read enough
                # The pipe stays open, or the program would take this for the end of the data.
                self._failed.append((worker, error))
                self._signals.wake()

        thread = threading.Thread(target=feed, name=f"stream-{worker.rank}", daemon=True)
        if worker.process is not None:
            thread.start()
        return thread

    # ---- watching --------------------------------------------------------------------------------

    def _watch(self) -> None:
        while self._signals.workers:
            pipes = [pipe for worker in self._workers for pipe in worker.pipes]
            for pipe in self._signals.wait(pipes, self._timeout()):
                self._take(pipe)
            for worker in list(self._signals.workers):
                if self._has_ended(worker):
                    self._signals.workers.remove(worker)
                    self._note(worker)
            if self._failed:
                self._end_others()
            if self._signals.kill_at is not None and time.monotonic() >= self._signals.kill_at:
                self._kill()

    def _timeout(self) -> float:
        if self._signals.kill_at is None:
            return 60.0
        return max(self._signals.kill_at - time.monotonic(), _TICK_S)

    def _kill(self) -> None:
        """Kill the programs that still run. They are killed again until they have ended: a program
        may have started another one in between."""
        if self._signals.workers and not self._killed:
            self._killed = True
            ranks = ", ".join(str(worker.rank) for worker in self._signals.workers)
            alone = len(self._workers) == 1
            which = "the program has" if alone else f"the programs of the workers {ranks} have"
            self._say(f"{which} not ended and {'is' if alone else 'are'} killed")
        for worker in self._signals.workers:
            signal_group(worker, signal.SIGKILL)

    def _take(self, pipe: Prefixed) -> None:
        if pipe.take():
            return
        pipe.close()
        for worker in self._workers:
            if pipe in worker.pipes:
                worker.pipes.remove(pipe)

    def _has_ended(self, worker: RunWorker) -> bool:
        assert worker.process is not None
        code = worker.process.poll()
        if code is not None:
            worker.code = code if code >= 0 else 128 - code
        return code is not None

    def _note(self, worker: RunWorker) -> None:
        """Record the end of a worker; if it has failed, end the others."""
        assert worker.code is not None and worker.process is not None
        if not worker.code:
            return
        first = not self._first_code and not self._failed
        if first:
            self._first_code = worker.code
        killed = worker.process.returncode < 0
        how = f"was killed by {_signal_name(worker.code)}" if killed else f"exited {worker.code}"
        if len(self._workers) == 1:
            if killed and not self._signals.received and not self._failed:
                self._say(f"the program {how}")
        elif first and not self._signals.received:
            others = "; the other workers are ended" if self._signals.workers else ""
            self._say(f"worker {worker.rank} {how}{others}")
        self._end_others()

    def _end_others(self) -> None:
        if self._signals.kill_at is None:
            self._signals.kill_within(self._signals.grace_s)
            for worker in self._signals.workers:
                signal_group(worker, signal.SIGTERM)
                signal_group(worker, signal.SIGCONT)

    # ---- the end ---------------------------------------------------------------------------------

    def _end_all(self, feeders: Sequence[threading.Thread]) -> None:
        """End all remaining processes: programs after an error of this process, and what programs
        have left."""
        started = [worker for worker in self._workers if worker.process is not None]
        self._end_groups(started)
        for worker in started:
            for pipe in worker.pipes:
                # A process that has left the session may keep the pipe open.
                while _is_ready(pipe.source) and pipe.take():
                    pass
                pipe.close()
            worker.pipes.clear()
        self._signals.workers.clear()
        for thread in feeders:
            if thread.ident is not None:
                thread.join(_LEFT_S)
        for worker in started:
            if worker.guard is not None:
                worker.guard.end()
        for worker, _ in self._failed:
            assert worker.process is not None and worker.process.stdin is not None
            worker.process.stdin.close()

    def _end_groups(self, workers: Sequence[RunWorker]) -> None:
        """Send SIGTERM, wait until the groups are empty, then send SIGKILL."""
        left = [worker for worker in workers if signal_group(worker, signal.SIGTERM)]
        begun = time.monotonic()
        while left:
            for pipe in self._signals.wait([p for w in left for p in w.pipes], _TICK_S):
                self._take(pipe)
            for worker in left:
                if self._has_ended(worker):
                    _reap(worker)
            waited_s = time.monotonic() - begun
            if waited_s >= 3 * _LEFT_S:
                break  # the kernel cannot end them: they wait for a device
            number = signal.SIGKILL if waited_s >= _LEFT_S else 0
            left = [worker for worker in left if signal_group(worker, number)]


def _reap(worker: RunWorker) -> None:
    """Reap the ended processes that a program has left, which are children of this one (see
    `_adopt`)."""
    assert worker.process is not None
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-worker.process.pid, os.WNOHANG)[0]:
            pass


def _adopt(wanted: bool) -> None:
    """Become the parent of orphans below this process, so that their end can be seen."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def _is_ready(fd: int) -> bool:
    """Whether there is something to read, or the end. With many workers the number of a descriptor
    may exceed what select(2) takes."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _has_reader(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return not poll.poll(0)


def _signal_name(code: int) -> str:
    number = code - 128
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


_START = {
    errno.ENOEXEC: "give a program for this kind of machine, or a script whose first line is #! "
    "and an interpreter",
    errno.EACCES: "make it executable (chmod +x), or give the interpreter before it",
    errno.E2BIG: "the arguments and the environment are too long for the kernel: shorten them",
    errno.ENOENT: "check its name and PATH; a script's interpreter (#!) must exist as well",
}


def start_error(error: BaseException, program: str, worker: RunWorker) -> FFServeError:
    """Return the error for a program that could not be started."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, OSError) and error.filename == worker.directory:
        return MissingFile(f"the worker's directory: {error.strerror}", path=worker.directory)
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return UsageError(
        f"cannot run the program: {reason}", path=program, hint=_START.get(number or 0)
    )
