"""Programs in processes that are forked from one which has imported ffserve.

A new interpreter takes 0.3 to 0.5 s of CPU for its imports, and hundreds of tests have another
process read something. The process that is forked from opens no reader, has one thread, and begins
with the first program; it ends with the process that runs the tests.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

_SERVE = "import sys\nimport preloaded\npreloaded.serve(int(sys.argv[1]))"
_IMPORTS = (
    *("daemon", "encodings.ascii", "msgpack", "numpy"),
    *("ffserve.reader", "ffserve.formats.recordio", "ffserve.formats.tfrecord"),
)
_LARGEST = 1 << 17
"""Bytes of a request, one packet."""


class Preloaded:
    """The process that is forked from; one program runs at a time."""

    cpu_s = 0.0
    """What the programs have cost so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        support = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", _SERVE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, support)),
                    # A process with several threads cannot change its user namespace.
                    "OPENBLAS_NUM_THREADS": "1",
                    "OMP_NUM_THREADS": "1",
                },
            )
        atexit.register(self._end)

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()

    def run(
        self, program: str, arguments: Sequence[str], imports: Sequence[str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program; return its exit code, negative for a signal, and what it has written.

        Args: imports: modules that the process imports before it is forked, if it has not yet.
        """
        request = {"program": program, "arguments": arguments, "imports": imports}
        request |= {"cwd": os.getcwd(), "environment": dict(os.environ)}
        with self._lock, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            files = [out.fileno(), err.fileno()]
            self._control.settimeout(timeout)
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], files)
                answer = self._control.recv(_LARGEST)
            except TimeoutError:
                start.cache_clear()
                atexit.unregister(self._end)
                self._end()
                raise subprocess.TimeoutExpired(program, timeout) from None
            code, cpu_s = json.loads(answer)
            Preloaded.cpu_s += cpu_s
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(program, code, *texts)


@functools.cache
def start() -> Preloaded:
    """Return the process that is forked from, begun by the first call."""
    return Preloaded()


def serve(number: int) -> None:
    """Fork a process for each request; return in it when its program has run, and when the tests
    have ended."""
    with socket.socket(fileno=number) as control:
        while True:
            frame, files, _, _ = socket.recv_fds(control, _LARGEST, 2)
            if not frame:
                return
            request = json.loads(frame)
            for name in (*_IMPORTS, *request["imports"]):
                importlib.import_module(name)
            pid = os.fork()
            if pid == 0:
                break
            for file in files:
                os.close(file)
            _, status, usage = os.wait4(pid, 0)
            cpu_s = usage.ru_utime + usage.ru_stime
            control.send(json.dumps([os.waitstatus_to_exitcode(status), cpu_s]).encode())
    for place, file in enumerate(files, 1):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = ["-c", *request["arguments"]]
    main = sys.modules["__main__"].__dict__
    exec(compile(request["program"], "<string>", "exec"), main)
