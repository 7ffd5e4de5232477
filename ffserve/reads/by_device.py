"""Devices: one engine for each device, and batches over files on several of them.

An engine begins its reads in one thread, and a read that waits while it begins (of a file system in
user space, for instance, that does not answer) holds up all others of that engine. So the files of
each device are read by an engine of their own: what waits for a device that hangs waits for nothing
else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Generic, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from ffserve.dtypes import Int64s
from ffserve.engine.io import Engine, EngineBatch
from ffserve.reads.records import BatchEngine, part_of

T = TypeVar("T")


class ByDevice(Generic[T]):
    """Something for each device, made when the device is first asked for.

    Args:
        make: makes one, given its number in `all`.
        most: with so many, new devices without a disk (network file systems, tmpfs, subvolumes)
            share those of others. Users can make such devices; the disks of a machine are few.
    """

    def __init__(self, make: Callable[[int], T], most: int) -> None:
        self._make, self._most = make, most
        self.all: list[T] = []
        self._by_device: dict[int, T] = {}
        self._diskless: list[T] = []
        """Of devices without a disk."""

    def first(self) -> T:
        """Return the one for the first device, whichever that will be."""
        return self.all[0] if self.all else self._add()

    def of(self, number: int) -> T:
        """Return the one for the device with this number of the kernel."""
        found = self._by_device.get(number)
        if found is None:
            found = self._by_device[number] = self._choose(number)
        return found

    def numbers_of(self, one: T) -> list[int]:
        """Return the numbers of the devices that it is for."""
        return [number for number, other in self._by_device.items() if other is one]

    def _choose(self, number: int) -> T:
        if not self._by_device:
            return self.first()
        if os.major(number):
            return self._add()
        if len(self.all) < self._most or not self._diskless:
            self._diskless.append(self._add())
            return self._diskless[-1]
        return self._diskless[number % len(self._diskless)]

    def _add(self) -> T:
        self.all.append(self._make(len(self.all)))
        return self.all[-1]


Part: TypeAlias = tuple[Engine, EngineBatch, Int64s]
"""An engine's part of a batch, and the rows of its records in that."""


class SplitEngine:
    """Reads batches over files on several devices: each engine gets the part with its own files.

    Args: engines: which one reads a file, by descriptor; of all files that will be added.
    """

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        self._engine_of = engines
        self._engines = list(dict.fromkeys(engines.values()))
        self.kind = self._engines[0].kind
        self._count = 0
        self._owners = np.zeros(len(engines), np.int64)
        """By number of a file: the number of its engine. `_numbers`: its own number there."""
        self._numbers = np.zeros(len(engines), np.int32)
        self._begun: WeakKeyDictionary[EngineBatch, list[Part]] = WeakKeyDictionary()
        """The parts of a batch."""

    def add_file(self, fd: int, alignment: int, around: int = 0) -> int:
        """Add a file; return its number."""
        number, engine = self._count, self._engine_of[fd]
        self._owners[number] = self._engines.index(engine)
        self._numbers[number] = engine.add_file(fd, alignment, around)
        self._count += 1
        return number

    def remove_file(self, file: int) -> None:
        """Remove a file."""
        self.of_file(file).remove_file(int(self._numbers[file]))

    def of_file(self, file: int) -> Engine:
        """Return the engine that reads a file, by its number."""
        return self._engines[int(self._owners[file])]

    def submit(self, batch: EngineBatch) -> None:
        """Submit each engine's part."""
        owners = self._owners[batch.reads["file"]]
        begun: list[Part] = []
        self._begun[batch] = begun
        for owner in np.unique(owners).tolist():
            part, rows = part_of(batch, np.flatnonzero(owners == owner))
            part.reads["file"] = self._numbers[part.reads["file"]]
            self._engines[owner].submit(part)
            begun.append((self._engines[owner], part, rows))

    def parts(self, batch: EngineBatch) -> list[EngineBatch]:
        """Return what the engines were given of a batch."""
        return [part for _, part, _ in self._begun[batch]]

    def wait(self, batch: EngineBatch) -> None:
        """Block until all parts have ended."""
        for engine, part, _ in self._begun[batch]:
            engine.wait(part)
        self.join(batch)

    def join(self, batch: EngineBatch) -> None:
        """Collect what the parts of a batch have left, when all of them have ended."""
        for _, part, rows in self._begun.pop(batch):
            batch.records[rows] = part.records
            part.free()
        batch.ended_elsewhere()


def engine_of(engine: BatchEngine, file: int) -> BatchEngine:
    """Return the engine behind another one that reads a file, by its number in that one."""
    return engine.of_file(file) if isinstance(engine, SplitEngine) else engine
