"""A signal's handler raises at the lines of what a reader does; what is read later is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from daemon import Raw, everything_is_given_back, get, run_python, sample, serving, write

from ffserve import protocol

SIZES = [30_000]
AT_EVERY_LINE = """
import faulthandler, linecache, os, random, sys
import ffserve
path, server, what, step = sys.argv[1:]
faulthandler.dump_traceback_later(90, exit=True)
truth = [s.tobytes() for s in ffserve.open(path, server="off").read(range(100))]
random = random.Random(7)
reader = ffserve.open(path, server=server)
here = os.path.dirname(ffserve.__file__)

def interrupt(line):
    def trace(frame, event, argument):
        nonlocal line
        code = frame.f_code
        # A lock is given back at the line at which it was taken: no signal comes in between.
        if not code.co_filename.startswith(here):
            return None
        text = linecache.getline(code.co_filename, frame.f_lineno)
        if event == "line" and not text.strip().startswith("with "):
            line -= 1
            if line == 0:
                raise KeyboardInterrupt
        return trace
    sys.settrace(trace)

def do():
    chosen = random.sample(range(100), 4)
    if what == "read":
        reader.read(chosen)
    elif what == "lease":
        with reader.lease(chosen):
            pass
    else:
        with ffserve.open(path, server=server) as other:
            other.read(chosen[:1])

line, done = 1, False
while not done:
    try:
        interrupt(line)
        do()
        done = True
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    line += int(step)
    chosen = random.sample(range(100), 3)
    assert [s.tobytes() for s in reader.read(chosen)] == [truth[i] for i in chosen]
    with reader.lease(chosen) as views:
        assert [bytes(view) for view in views] == [truth[i] for i in chosen]
print("done")
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", [sample(i, SIZES) for i in range(100)])


@pytest.mark.parametrize(
    ("what", "step"),
    [
        *(
            pytest.param(what, step, marks=pytest.mark.check)
            for what, step in (("read", 1), ("lease", 2), ("open", 3))
        ),
        pytest.param("lease", 1, marks=pytest.mark.soak),
        pytest.param("open", 1, marks=pytest.mark.soak),
    ],
)
def test_a_signal_at_every_line(path: str, what: str, step: int) -> None:
    with serving(arena="1MiB") as daemon:
        done = run_python(AT_EVERY_LINE, path, daemon.socket, what, step, timeout=100)
        assert done.stdout == "done\n"
        everything_is_given_back(daemon)


def test_a_lease_given_back_before_it_came_was_kept_for_ever(path: str) -> None:
    with serving(arena="1MiB") as daemon, Raw(daemon.socket) as raw:
        dataset = raw.open(path).dataset
        lease = protocol.Lease(5, dataset, protocol.pack_indices(np.arange(4)))
        raw.send(lease, protocol.Release(protocol.pack_tags([5])))
        assert isinstance(raw.receive(), protocol.Ready)
        assert daemon.status()["arena"]["leased"] == 0
        raw.send(get(6, dataset, [50]))
        assert raw.receive() == protocol.Ready(6, 1, [])
        everything_is_given_back(daemon)
