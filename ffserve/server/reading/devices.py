"""Devices: one engine (one I/O thread) per block device, with the files that it reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import numpy as np

from ffserve.dtypes import Int32s, Int64s
from ffserve.engine.io import Engine, EngineBatch
from ffserve.limits import MOST_ENGINES
from ffserve.reads.by_device import ByDevice
from ffserve.reads.page_cache import CachedFiles
from ffserve.server.files.remote import RemoteShard


class Device:
    """One engine, and the files that it reads, by their numbers in it.

    number: in `Devices`. cached: which files it may read through the page cache. remote: those of
    remote shards. memory: those that lie in memory. slow: the batch in flight of which was said
    that it takes long.
    """

    def __init__(self, number: int, engine: Engine) -> None:
        self.number = number
        self.engine = engine
        self.cached = CachedFiles()
        self.remote: dict[int, RemoteShard] = {}
        self.memory: set[int] = set()
        self.slow: EngineBatch | None = None
        self._fds = np.zeros(0, np.int32)
        self._alignments = np.zeros(0, np.int64)

    def add_files(self, fds: Int32s, alignments: Int64s, cached_fds: Int32s) -> Int32s:
        """Add open files; return their numbers.

        Args: cached_fds: the same files, see `page_cache.open_cached`; -1: not open.
        """
        files = self._add(fds, alignments)
        cached = self._add(cached_fds, np.ones(len(fds), np.int64))
        self.cached.add(files, cached_fds, cached)
        return files

    def add_memory(self, fd: int, remote: RemoteShard | None) -> int:
        """Add one file that lies in memory; return its number. Args: remote: it has bytes of it."""
        file = int(self._add(np.array([fd], np.int32), np.ones(1, np.int64))[0])
        self.memory.add(file)
        if remote is not None:
            self.remote[file] = remote
        return file

    def remove_memory(self, file: int) -> None:
        """Forget such a file."""
        self.memory.discard(file)
        self.remote.pop(file, None)
        self.engine.remove_file(file)

    def _add(self, fds: Int32s, alignments: Int64s) -> Int32s:
        files = self.engine.add_files(fds, alignments)
        more = int(files.max()) + 1 - len(self._fds)
        if more > 0:
            more += len(self._fds)
            self._fds = np.append(self._fds, np.full(more, -1, np.int32))
            self._alignments = np.append(self._alignments, np.ones(more, np.int64))
        known = files >= 0
        self._fds[files[known]], self._alignments[files[known]] = fds[known], alignments[known]
        return files

    def remove_file(self, file: int) -> None:
        """Forget a file of which no read is queued or in flight."""
        for number in (file, self.cached.remove(file)):
            if number >= 0:
                self.remote.pop(number, None)
                self.engine.remove_file(number)

    def fd(self, file: int) -> int:
        """Return the descriptor of a file that is being read. Any thread."""
        return int(self._fds[file])

    def alignment(self, file: int) -> int:
        """Return the alignment of its reads."""
        return int(self._alignments[file])


class Devices:
    """The devices that files are read from.

    Args: start: opens an engine. watch: called with each device once its engine runs.
    """

    def __init__(self, start: Callable[[], Engine], watch: Callable[[Device], object]) -> None:
        self._start, self._watch = start, watch
        self._by_device = ByDevice(self._open, MOST_ENGINES)
        self._by_device.first()
        self.all = self._by_device.all

    def _open(self, number: int) -> Device:
        device = Device(number, self._start())
        self._watch(device)
        return device

    def of(self, number: int) -> Device:
        """Return the device with this number of the kernel."""
        return self._by_device.of(number)

    def name_of(self, device: Device) -> str:
        """Return where a device is mounted, and its number."""
        numbers = self._by_device.numbers_of(device)
        names = [f"{os.major(number)}:{os.minor(number)}" for number in numbers]
        name = f"device {', '.join(names)}"
        with contextlib.suppress(OSError), open("/proc/self/mountinfo", "rb") as mounts:
            for line in mounts:
                fields = os.fsdecode(line).split(" ")
                if fields[2] in names:
                    return f"{fields[4]} ({name})"
        return name
