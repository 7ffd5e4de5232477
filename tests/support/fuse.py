"""A FUSE file system that answers when a test wants, or never."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from daemon import client, sample, write

COUNT = 10
TRUTH = [sample(i) for i in range(COUNT)]

FUSE = """
import ctypes, os, struct, sys
content = open(sys.argv[1], "rb").read()
silent, begin = set(map(int, sys.argv[3].split(","))), sys.argv[4]
device = os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other" % device
if libc.mount(b"test", os.fsencode(sys.argv[2]), b"fuse", 0, options):
    raise SystemExit(f"cannot mount: {os.strerror(ctypes.get_errno())}")

def attributes(node):
    mode, size = (0o40755, 0) if node == 1 else (0o100644, len(content))
    return struct.pack("<6Q10I", node, size, 8, 1, 1, 1, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

def answer(opcode, node, body):
    match opcode:
        case 1:  # LOOKUP
            return 0, struct.pack("<4Q2I", 2, 1, 0, 0, 0, 0) + attributes(2)
        case 3:  # GETATTR
            return 0, struct.pack("<Q2I", 0, 0, 0) + attributes(node)
        case 14:  # OPEN
            return 0, struct.pack("<Q2I", 1, 0, 0)
        case 15:  # READ
            _, offset, size = struct.unpack_from("<QQI", body)
            return 0, content[offset : offset + size]
        case 17:  # STATFS
            return 0, struct.pack("<5Q10I", 1, 1, 1, 1, 1, 4096, 255, 4096, *[0] * 7)
        case 18 | 25:  # RELEASE, FLUSH
            return 0, b""
        case 26:  # INIT
            return 0, struct.pack("<4I2H2I2H8I", 7, 31, 65536, 0, 9, 9, 65536, 1, 16, 0, *[0] * 8)
    return -38, b""

print("ready", flush=True)
while True:
    try:
        request = os.read(device, 1 << 20)
    except OSError:
        break
    _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
    if opcode in (2, 36, 42):
        continue
    if opcode in silent and os.path.exists(begin):
        if os.path.isfile(begin):
            with open(begin, "a") as file:
                file.write(f"{opcode}\\n")
        continue
    error, reply = answer(opcode, node, request[40:])
    os.write(device, struct.pack("<IiQ", 16 + len(reply), error, unique) + reply)
"""
"""A FUSE file system with one file, under any name; some kinds of requests get no answer as soon as
a file exists, to which it writes what they are."""
GETATTR, READ, STATFS, FLUSH = 3, 15, 17, 25


@contextlib.contextmanager
def fuse(
    tmp_path: Path,
    *silent: int,
    begin: str | Path = "/",
    samples: Sequence[bytes] = TRUTH,
    source: str | None = None,
) -> Iterator[str]:
    """The path of a file on FUSE; the file system ends in any case.

    Args: silent: kinds of requests without an answer. begin: from when this file exists. samples:
        of its file. source: a file with the content of its file, instead of the samples.
    """
    source = source or write(tmp_path / "source.ffr", samples)
    place = tmp_path / "fuse"
    place.mkdir()
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no FUSE here")
    try:
        with client(FUSE, source, place, ",".join(map(str, silent)) or "0", begin):
            yield str(place / "a.ffr")
    finally:
        subprocess.run(["umount", "-l", place], capture_output=True)
