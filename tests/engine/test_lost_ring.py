"""A program closes descriptors of an engine that is reading."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from arena import MIB, Arena, descriptors
from daemon import DEADLINE_S, sample, serving, until, write

from ffserve.client.failover import RECONNECT_S
from ffserve.engine import io
from ffserve.engine.io import Engine, open_direct
from ffserve.errors import ReadError, ServerUnavailable

RINGS = [kind for kind in io.probe() if kind in ("registered", "uring")]
COUNT, SIZE = 400, MIB // 16


def lose(fd: int, how: str) -> None:
    if how == "closed":
        os.close(fd)
    else:
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, fd)
        os.close(null)


@pytest.mark.parametrize("how", ["closed", "replaced"])
@pytest.mark.parametrize("kind", RINGS)
def test_reads_in_flight_were_reported_failed_and_written_later(kind: io.Kind, how: str) -> None:
    before = descriptors("[io_uring]")
    arena = Arena(MIB, 1)
    readable, writable = os.pipe()
    with Engine(kind, depth=4) as engine:
        arena.serve(engine)
        [own] = descriptors("[io_uring]") - before
        batch = engine.batch(1, 1)
        file = engine.add_file(readable, 1)
        batch.reads[0] = (0, 4096, 0, 4096, file, 0, 0, 1)
        batch.records[0] = (0, 4096, 0, 0, 0, 0, 0, 0)
        engine.submit(batch)
        # The read is then in flight, and the thread has to enter the ring again.
        engine.wait(engine_turn(engine))
        lose(own, how)
        engine.wait(engine_turn(engine))
        assert not batch.done, "the kernel has the slot, and nobody else may have it"
        os.write(writable, b"x" * 4096)
        engine.wait(batch)
        assert not batch.failed and arena.bytes[:4096].tobytes() == b"x" * 4096
        if how == "replaced":
            os.fstat(own)
    if how == "replaced":
        os.close(own)  # It is not the engine's to close.
    os.close(readable)
    os.close(writable)


def engine_turn(engine: Engine) -> io.EngineBatch:
    """Submit a batch of one read."""
    fd = os.open(__file__, os.O_RDONLY)
    batch = engine.batch(1, 1)
    batch.keep = np.empty(100, np.uint8), fd
    batch.reads[0] = (0, 100, io.NOWHERE, 0, engine.add_file(fd, 1), 0, 0, 1)
    batch.records[0] = (0, 100, io.NOWHERE, batch.keep[0].ctypes.data, 0, 0, 0, 0)
    engine.submit(batch)
    return batch


@pytest.mark.parametrize("kind", [k for k in io.probe() if k != "threads"])
def test_a_slot_was_written_after_its_read_was_reported(kind: io.Kind, tmp_path: Path) -> None:
    """When its eventfd was closed, Linux AIO gave up on reads in flight; a ring was not woken."""
    (tmp_path / "file").write_bytes(os.urandom(COUNT * SIZE))
    fd, alignment = open_direct(tmp_path / "file")
    os.fsync(fd)
    before = descriptors("[eventfd]")
    arena = Arena(COUNT * SIZE, 1)
    engine = arena_engine(arena, kind)
    wake, _done = sorted(descriptors("[eventfd]") - before)
    batch = engine.batch(COUNT, COUNT)
    file = engine.add_file(fd, alignment)
    for k in range(COUNT):
        batch.reads[k] = (k * SIZE, SIZE, k * SIZE, SIZE, file, 0, k, 1)
        batch.records[k] = (k * SIZE, SIZE, io.NOWHERE, 0, 0, 0, 0, 0)
    engine.submit(batch)
    while not engine.counters()["reads"]:
        pass
    os.close(wake)
    engine.wait(batch)
    bad = np.flatnonzero(batch.records["status"])
    for k in bad.tolist():
        arena.bytes[k * SIZE : (k + 1) * SIZE] = 0xA5

    def again() -> bool:
        one = engine.batch(1, 1)
        one.reads[0], one.records[0] = batch.reads[0], batch.records[0]
        try:
            engine.submit(one)
        except ReadError:
            return True
        return not engine.wait(one, DEADLINE_S)

    until(again, "the engine is broken")
    assert engine.broken
    with open(tmp_path / "file", "rb") as plain:
        for k in range(COUNT):
            got = arena.bytes[k * SIZE : (k + 1) * SIZE].tobytes()
            assert got == (b"\xa5" * SIZE if k in bad else os.pread(plain.fileno(), SIZE, k * SIZE))
    engine.close()
    os.close(fd)


def arena_engine(arena: Arena, kind: io.Kind) -> Engine:
    engine = Engine(kind, depth=512)
    arena.serve(engine)
    return engine


FORBID = """
import ctypes, struct, threading
from pathlib import Path
def forbid():
    # From the first write there on, a registered ring (uvloop's is not) may not be entered:
    # classic BPF over seccomp_data, as in test_engine.
    Path({fifo!r}).read_text()
    steps = [(0x20, 0, 0, 0), (0x15, 0, 3, 426), (0x20, 0, 0, 40), (0x45, 0, 1, 16)]
    steps += [(6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *s) for s in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.syscall(317, 1, 1, program) == 0  # seccomp, for all threads
    Path({fifo!r}).write_text("done")
threading.Thread(target=forbid, daemon=True).start()
"""
KERNEL = tuple(int(n) for n in os.uname().release.split(".")[:2])


@pytest.mark.skipif(not RINGS or KERNEL < (5, 18), reason="no ring has a number here")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of its system calls")
def test_a_daemon_whose_engine_broke_gave_its_slots_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon ends and does not report the reads in flight."""
    monkeypatch.setitem(RECONNECT_S, "require", 0.1)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    path = write(tmp_path / "a.ffr", [sample(i, [30_000]) for i in range(20)])
    expect = ["error: an I/O engine failed while.*", "  .*", "stopped with unanswered.*"]
    patch, options = FORBID.format(fifo=str(fifo)), ["--engine", "uring"]
    with (
        serving(expect=expect, patch=patch, options=options) as daemon,
        daemon.open(path) as reader,
        reader.lease([3]) as views,
    ):
        fifo.write_text("now")
        fifo.read_text()
        with pytest.raises(ServerUnavailable):
            reader.read(range(20))
        assert daemon.process is not None
        assert daemon.process.wait(DEADLINE_S) == 1
        daemon.process = None
        assert views[0].tobytes() == sample(3, [30_000])
