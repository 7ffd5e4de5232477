"""Attacks with files, origins and namespaces, for `attacks.py`: what makes the daemon work or hold
memory for what costs its owner nothing.

Each kind is a generator that yields after each round: the attack is under way from the first one
on. Several processes run it, each with a directory of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import itertools
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from daemon import Raw, asking
from origins import http_origin
from recorder import Recorder, recorder

import ffserve
from ffserve import protocol
from ffserve.disk import index_file
from ffserve.engine.codec import crc32c, mask
from ffserve.errors import FFServeError
from ffserve.formats.recordio_codec import MAGIC
from ffserve.limits import MOST_ORIGINS

SECRET = "geheim"
"""It stands in all settings of the daemon's user that a package may read."""
COUNT = 10_000_000
"""Records that a file of a few KiB claims."""
MOST_OPEN = 64
"""An attacker closes its files when it has so many."""
MOVING = ".moving.test"
RESOLVER = f"""
import itertools, socket
usual, turns = socket.getaddrinfo, itertools.count()
def moving(host, *others, **more):
    if isinstance(host, str) and host.endswith({MOVING!r}):
        host = f"127.0.0.{{next(turns) % 2 + 1}}"
    return usual(host, *others, **more)
socket.getaddrinfo = moving
"""
"""A resolver that has two addresses for a name, one after the other."""
_NEW_USERS, _NEW_MOUNTS, _DIE_WITH_PARENT = 0x10000000, 0x20000, 1
"""unshare(2), prctl(2)."""


def opening(path: str, files: list[tuple[Path, dict[str, Any]]]) -> Iterator[None]:
    """Open files until one is refused, close all, and begin again."""
    readers: list[ffserve.Reader] = []
    for file, options in itertools.cycle(files):
        refused = False
        try:
            readers.append(ffserve.open(file, server=path, **options))
        except FFServeError:
            refused = True
        while readers and (refused or len(readers) > MOST_OPEN):
            readers.pop().close()
        yield


def holes(file: Path, size: int, head: bytes = b"") -> Path:
    """Write a file that is a hole behind its first bytes."""
    file.write_bytes(head)
    os.truncate(file, size)
    return file


# ---- tables ---------------------------------------------------------------------------------


def sparse_index(path: str, folder: Path) -> Iterator[None]:
    """Index files of holes, up to 4 GiB, beside files of holes."""
    files: list[tuple[Path, dict[str, Any]]] = []
    for k, (size, count) in enumerate(
        [(16 * COUNT, COUNT), (64 << 20, 4 << 20), (64 << 20, (4 << 30) // 8)] * 4
    ):
        file = holes(folder / f"{k}.tfrecord", size)
        with file.open("rb") as opened:
            identity = index_file.Identity.of(opened.fileno(), str(file), "tfrecord")
        nothing = np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        head = bytearray(index_file.encode(identity, *nothing))[:72]
        struct.pack_into("<Q", head, 56, count)
        holes(folder / f".{file.name}.ffx", 76 + 8 * count, bytes(head))
        files.append((file, {"format": "tfrecord"}))
    yield from opening(path, files)


def tables(path: str, folder: Path) -> Iterator[None]:
    """Files of holes and of empty records, which claim 10 million records in 4 KiB."""
    empty = struct.pack("<Q", 0)
    empty += struct.pack("<I", mask(crc32c(empty))) + struct.pack("<I", mask(crc32c(b"")))
    packed = gzip.compress(empty * (1 << 20))
    zeros = struct.pack("<5I", MAGIC, COUNT, 0, 1, 4 * COUNT)
    files: list[tuple[Path, dict[str, Any]]] = []
    for k, more in enumerate([{}, {"verify": False}, {"on_error": "skip"}]):
        options: dict[str, Any] = more
        files.append((holes(folder / f"{k}.recordio", 20 + 4 * COUNT, zeros), options))
        sparse = holes(folder / f"{k}.tfrecord", 16 * COUNT)
        files.append((sparse, {"format": "tfrecord", **options}))
        file = folder / f"{k}.tfrecord.gz"
        file.write_bytes(packed)
        files.append((file, options))
    yield from opening(path, files)


def scans(path: str, folder: Path) -> Iterator[None]:
    """Tolerant scans of files of holes, 8 TiB long, whose clients go away."""
    size = 0xF000_0000
    file = folder / "a.recordio"
    with file.open("wb") as out:
        for k in range(2000):
            out.seek(k * (20 + size))
            out.write(struct.pack("<5I", MAGIC, 1, 1, 1, size))
        out.truncate(2000 * (20 + size))
    for turn in itertools.count():
        with contextlib.suppress(OSError, EOFError), Raw(path) as raw:
            asked = asking(str(file))
            asked.what.update(tolerant=True, format="recordio")
            raw.send(asked)
            if isinstance(raw.receive(), protocol.Need):
                raw.pass_files(1, [str(file)])
            time.sleep(0.01 if turn % 2 else 0.2)
        yield


def index_cache(path: str, folder: Path) -> Iterator[None]:
    """Files without end, each of which gets an index file in the daemon's cache."""
    size = 1 << 20
    head = struct.pack("<Q", size)
    head += struct.pack("<I", mask(crc32c(head)))
    tail = struct.pack("<I", mask(crc32c(bytes(size))))
    for _ in itertools.count():
        file = holes(folder / "a.tfrecord", 12 + size, head)
        with file.open("ab") as out:
            out.write(tail)
        with contextlib.suppress(FFServeError), ffserve.open(file, server=path) as reader:
            len(reader)
        file.unlink()
        yield


# ---- users ----------------------------------------------------------------------------------


def go_on_as_root_of_a_namespace() -> None:
    """Go on in a child, which has no other threads, as root of a new user namespace. Where the
    system allows no user namespaces, the attack has none."""
    libc, uid = ctypes.CDLL(None), os.geteuid()
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if libc.unshare(_NEW_USERS | _NEW_MOUNTS):
        return
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")


def enter_another_namespace() -> None:
    """Make another mount namespace, for the connections that begin from now on."""
    ctypes.CDLL(None).unshare(_NEW_MOUNTS)


def open_files(path: str, folder: Path) -> Iterator[None]:
    """As many open files as there are, in hundreds of mount namespaces."""
    files = [folder / f"{k}.ffr" for k in range(500)]
    with ffserve.create(files[0]) as writer:
        writer.write(b"x")
    for file in files[1:]:
        file.write_bytes(files[0].read_bytes())
    names, raws = list(map(str, files)), []
    for turn in itertools.count():
        enter_another_namespace()
        with contextlib.suppress(OSError, EOFError, AssertionError, FFServeError):
            raws.append(Raw(path))
            raws[-1].open(*names)
        while len(raws) > 300:
            raws.pop(0).socket.close()
        # Other files each time.
        for file in files:
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(content)
        if turn:
            yield


# ---- origins --------------------------------------------------------------------------------


def origins(path: str, folder: Path) -> Iterator[None]:
    """An origin that asks for credentials, and leads to another host, keeps what it is sent."""
    with recorder() as other, recorder(other.url) as leading, recorder() as plain:
        for turn in itertools.count():
            url = (leading.url, plain.url)[turn % 2]
            with contextlib.suppress(FFServeError):
                ffserve.open(f"{url}/{turn}.ffr", server=path).close()
            for each in (other, leading, plain):
                _check(each)
            if turn:
                yield


def hanging(path: str, folder: Path) -> Iterator[None]:
    """Sixty-four origins that answer the tables and then hang, with sixteen requests to each."""
    file = folder / "a.ffr"
    with ffserve.create(file, n=MOST_ORIGINS * 64) as writer:
        for _ in range(MOST_ORIGINS * 64):
            writer.write(bytes(4096))
    content = file.read_bytes()
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(http_origin()) for _ in range(MOST_ORIGINS)]
        readers = [ffserve.open(each.put("a.ffr", content), server=path) for each in found]
        for each in found:
            each.stalled.set()

        def read(reader: ffserve.Reader) -> None:
            with contextlib.suppress(FFServeError):
                while True:
                    reader.read(range(0, len(reader), 64))

        for reader in readers:
            threading.Thread(target=read, args=(reader,), daemon=True).start()
        while True:
            time.sleep(0.1)
            yield


def tiny(path: str, folder: Path) -> Iterator[None]:
    """Objects of a few bytes without end."""
    file = folder / "a.ffr"
    with ffserve.create(file, n=1) as writer:
        writer.write(b"x")
    content = file.read_bytes()
    with http_origin() as origin:
        for turn in itertools.count():
            origin.files.clear()
            urls = [origin.put(f"{turn}-{k}.ffr", content) for k in range(50)]
            with contextlib.suppress(FFServeError):
                ffserve.open(urls, server=path).close()
            yield


def rebinding(path: str, folder: Path) -> Iterator[None]:
    """Names of hosts that resolve to another address each time, that of another server."""
    file = folder / "a.ffr"
    contents = []
    for number in range(2):
        with ffserve.create(file, n=256) as writer:
            for _ in range(256):
                writer.write(bytes([number]) * 8192)
        contents.append(file.read_bytes())
    with http_origin() as own:
        port = int(own.url.rpartition(":")[2])
        with http_origin("127.0.0.2", port) as other:
            exec(RESOLVER, {})
            for turn in itertools.count():
                for origin, content in zip((own, other), contents, strict=True):
                    origin.files.clear()
                    origin.put("a.ffr", content)
                url = f"http://{turn}{MOVING}:{port}/a.ffr"
                found: set[int] = set()
                with contextlib.suppress(FFServeError), ffserve.open(url, server=path) as reader:
                    for _ in range(4):
                        found |= {int(each[0]) for each in reader.read(range(0, 256, 16))}
                if len(found) > 1:
                    raise SystemExit("samples of two servers were mixed")
                yield


def _check(found: Recorder) -> None:
    if SECRET in found.text or "uthorization" in found.text:
        raise SystemExit(f"an origin got the credentials of the daemon's user: {found.text}")
    found.seen.clear()


PROGRAMS: dict[str, Callable[[str, Path], Iterator[None]]] = {
    each.__name__: each
    for each in (
        sparse_index,
        tables,
        scans,
        index_cache,
        open_files,
        origins,
        hanging,
        tiny,
        rebinding,
    )
}


def run(kind: str, path: str, file: str, count: int) -> None:
    """Attack for ever, in several processes; say "ready" after the first round."""
    number = 0
    for number in range(count):
        if number < count - 1 and os.fork() == 0:
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            break
    place = Path(file).parent / f"{kind}-{number}"
    place.mkdir(exist_ok=True)
    for turn, _ in enumerate(PROGRAMS[kind](path, place)):
        if turn == 0 and number == count - 1:
            print("ready", flush=True)
