"""Attacks of one user, each with an honest user of the same daemon beside it."""

from __future__ import annotations

import os
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attacks
import numpy as np
import pytest
from attack_field import HOSTILE, Field, field
from daemon import ready, serving, until
from test_threats import becoming

import ffserve
from ffserve.engine.codec import crc32c, mask

pytestmark = [
    pytest.mark.attack,
    pytest.mark.check,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes other users"
    ),
]

OPTIONS, LINES = ("--socket-mode", "0666"), (r".*: scanned \d+ of \d+ MiB for its index",)


@contextmanager
def attacked(made: Field, what: str, program: str, *arguments: str) -> Iterator[None]:
    """Check the promise for the honest client while the hostile user runs a program."""
    command = [sys.executable, "-c", becoming(HOSTILE) + program, made.daemon.socket, *arguments]
    with made.attacked(what), ready(command) as attacker:
        yield
        time.sleep(4)
        assert attacker.poll() is None, "the attack goes on"


# ---- bombs -----------------------------------------------------------------------------------


def _fixed(symbol: int) -> list[int]:
    """Return the bits of a symbol in a deflate block with fixed codes (RFC 1951, 3.2.6)."""
    for begin, code, size in ((280, 0xC0, 8), (256, 0, 7), (144, 0x190, 9), (0, 0x30, 8)):
        if symbol >= begin:
            value = code + symbol - begin
            return [value >> (size - 1 - k) & 1 for k in range(size)]
    raise AssertionError


def write_bomb(path: Path, blocks: int, count: int, matches: int) -> None:
    """Write a TFRecord file of zeros: each deflate block has `count` records and makes a chunk,
    which is decoded as a whole."""
    payload = bytes(1 + 258 * matches)
    header = struct.pack("<Q", len(payload))
    frame = header + struct.pack("<I", mask(crc32c(header)))
    tail = struct.pack("<I", mask(crc32c(payload)))
    bits = [bit for byte in frame + b"\0" for bit in _fixed(byte)]
    bits += (_fixed(285) + [0] * 5) * matches  # 258 times the byte before
    bits += [bit for byte in tail for bit in _fixed(byte)]
    records = np.tile(np.array(bits, np.uint8), count)
    begin, end = np.array([0, 1, 0], np.uint8), np.array(_fixed(256), np.uint8)
    block = np.concatenate([begin, records, end])
    stream = np.concatenate([block] * blocks)
    stream[len(stream) - len(block)] = 1
    crc, record = 0, frame + payload + tail
    for _ in range(blocks * count):
        crc = zlib.crc32(record, crc)
    path.write_bytes(
        b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
        + np.packbits(stream, bitorder="little").tobytes()
        + struct.pack("<II", crc, blocks * count * len(record) & 0xFFFFFFFF)
    )


OPENS = """
import shutil, threading
folder = os.path.dirname(sys.argv[2]) + "/opened"
def open_copies(number):
    path = f"{folder}/{number}.tfrecord.gz"
    while True:
        shutil.copy(sys.argv[2], path + ".new")
        os.rename(path + ".new", path)
        ffserve.open(path, server=sys.argv[1]).close()
for number in range(16):
    threading.Thread(target=open_copies, args=(number,), daemon=True).start()
time.sleep(1)
print("ready", flush=True)
time.sleep(100)
"""


def test_files_that_take_long_to_open_slowed_all_others() -> None:
    """16 passes at once, each over a GiB of zeros that are 7 MB in the file."""
    with field(arena="64MiB", expect=LINES) as made:
        bomb = made.daemon.directory / "bomb.tfrecord.gz"
        write_bomb(bomb, 16, 61, 4064)
        folder = made.daemon.directory / "opened"
        folder.mkdir()
        os.chown(folder, HOSTILE, HOSTILE)
        with attacked(made, "opens files that take long to open", OPENS, str(bomb)):
            pass


SLOW = """
import threading
def read(number):
    with ffserve.open(sys.argv[2], server=sys.argv[1]) as reader:
        started.release()
        reader.read([number * len(reader) // 10])
started = threading.Semaphore(0)
for number in range(10):
    threading.Thread(target=read, args=(number,), daemon=True).start()
for _ in range(10):
    started.acquire()
print("ready", flush=True)
time.sleep(100)
"""


def test_chunks_that_take_long_to_decode_held_up_those_of_others() -> None:
    """One of 1 GiB may have a MiB in the file; here it takes as long as the file is there."""
    patch = """
import os, time, ffserve.reads.chunks as chunks
usual = chunks.decode
def slow(run, *given):
    while "hostile" in run.shard.path and os.path.exists(run.shard.path):
        open(run.shard.path + ".begun", "w").close()
        time.sleep(0.01)
    return usual(run, *given)
chunks.decode = slow
"""
    with serving(options=OPTIONS, patch=patch) as daemon:
        samples = [bytes([k % 251]) * 20_000 for k in range(320)]
        for name in ("hostile", "honest"):
            path = str(daemon.directory / f"{name}.recordio")
            how = {"compression": "snappy", "max_chunk_size": 25_000}
            with ffserve.create(path, format="recordio", **how) as writer:
                for each in samples:
                    writer.write(each)
        hostile = path.replace("honest", "hostile")
        command = [sys.executable, "-c", becoming(HOSTILE) + SLOW, daemon.socket, hostile]
        with daemon.open(path) as reader, ready(command):
            until(lambda: os.path.exists(hostile + ".begun"), "chunks are decoded")
            for index in range(0, 320, 40):
                assert bytes(reader[index]) == samples[index]
        os.unlink(hostile)


# ---- lies about time -------------------------------------------------------------------------

PREPARED = """
import numpy as np
raw = support.Raw(sys.argv[1], keep=True, job="lies")
source = raw.open(sys.argv[2]).dataset
size, most, count, cost = 16384, 512, int(sys.argv[3]), int(sys.argv[4])
memory = os.memfd_create("lies")
os.ftruncate(memory, size * most)
raw.send(protocol.Prepare(2, source, bytes(32), {"name": "lies"}))
assert isinstance(raw.receive(), protocol.Need)
raw.pass_files(2, [memory])
opened = raw.receive()
assert isinstance(opened, protocol.Opened), opened
pack = lambda numbers: np.array(numbers, "<u8").tobytes()
places, sizes = pack(size * np.arange(most)), pack(np.full(most, size))
def put_all():
    for first in range(0, count, most):
        packed = protocol.pack_indices(np.arange(first, first + most))
        raw.send(protocol.Claim(3, opened.dataset, packed, 0))
        assert isinstance(raw.receive(), protocol.Claimed)
        raw.send(protocol.Put(4, opened.dataset, packed, places, sizes, cost))
        assert isinstance(raw.receive(), protocol.Ready)
put_all()
print("ready", flush=True)
while True:
    put_all()
    time.sleep(0.05)
"""


def test_samples_that_claimed_to_have_cost_285_years_kept_the_memory_of_others() -> None:
    with field(arena="128MiB") as made:
        small = made.daemon.directory / "small.ffr"
        with ffserve.create(small) as writer:
            for _ in range(attacks.SAMPLES):
                writer.write(b"x")
        arguments = str(small), str(attacks.SAMPLES), str((1 << 53) - 1)
        with attacked(made, "prepares at a cost of 285 years", PREPARED, *arguments):
            pass
