"""Engines of a process, or of an event loop, that reads without a daemon: one for each device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping

from ffserve.engine.io import Engine, local_engine
from ffserve.reads.by_device import ByDevice, SplitEngine
from ffserve.reads.records import BatchEngine

MOST_ENGINES = 8
"""An engine is a thread and a ring. A job may have a hundred processes, each of which reads from a
network file system or two besides its disks."""


class LocalEngines:
    """The engines. They start when they are first needed; most processes have one. Any thread.

    Args: started: called with each engine when it has started.
    """

    def __init__(self, started: Callable[[Engine], object] | None = None) -> None:
        self._started = started
        self._lock = threading.Lock()
        self._by_device = ByDevice(self._start, MOST_ENGINES)

    def _start(self, _number: int) -> Engine:
        engine = local_engine()
        if self._started is not None:
            self._started(engine)
        return engine

    @property
    def all(self) -> list[Engine]:
        """Those that have started."""
        return list(self._by_device.all)

    @property
    def kind(self) -> str:
        """The name of the interface of the kernel that they use."""
        with self._lock:
            return self._by_device.first().kind

    def over(self, devices: Mapping[int, int | None]) -> BatchEngine:
        """Return what reads these files: the engine of their device, or one over several engines.

        Args: devices: by descriptor, the number of the file's device; None: it is never read.
        """
        with self._lock:
            of_device = {
                device: self._by_device.of(device)
                for device in set(devices.values())
                if device is not None
            }
            any_engine = next(iter(of_device.values()), None) or self._by_device.first()
        if len(set(of_device.values())) < 2:
            return any_engine
        return SplitEngine(
            {
                fd: any_engine if device is None else of_device[device]
                for fd, device in devices.items()
            }
        )

    def close(self) -> None:
        """Close all of them."""
        for engine in self._by_device.all:
            engine.close()

    def forget(self) -> None:
        """This process is a child: they are the parent's."""
        for engine in self._by_device.all:
            engine.forget()


_engines = LocalEngines()


def process_engines() -> LocalEngines:
    """Return the engines that all readers of this process share."""
    return _engines


def _drop_engines() -> None:
    global _engines
    parents, _engines = _engines, LocalEngines()
    parents.forget()


os.register_at_fork(after_in_child=_drop_engines)
