"""The arena's memory, taken from the kernel and given back in a thread beside the work.

Taking pages ahead keeps the fault of a first touch out of the reads; a read that overtakes this
thread takes its own. Before pages go, the engines are told, so that no buffer stays registered
that would keep them (docs/decisions/engine.md).
"""

from __future__ import annotations

import threading

from ffserve.cache.shm import SharedMemory
from ffserve.server.reading import Reading

_STEP = 2 * 1024 * 1024
_STEP_BACK = 32 * _STEP


class Pages:
    """See the module's text.

    Args: size: bytes of the arena that are in use, from its start.
    """

    def __init__(self, memory: SharedMemory, reading: Reading, size: int) -> None:
        self._memory = memory
        self._reading = reading
        self._changed = threading.Condition()
        self._wanted = self._touched = size
        self._stopping = False
        self.populated = 0
        """Bytes from the start that have been taken ahead of use."""
        self._thread = threading.Thread(target=self._run, name="ffserve-populate", daemon=True)

    def start(self) -> None:
        """Begin to take pages."""
        self._thread.start()

    def follow(self, size: int) -> None:
        """So much of the arena is in use now. What lies beyond is given back: nothing may be there
        from here on, and nothing may come there before `settled`."""
        with self._changed:
            self._wanted = size
            self._touched = max(self._touched, size)
            self._changed.notify()

    @property
    def settled(self) -> bool:
        """Whether all that is to be given back has been."""
        with self._changed:
            return self._touched == self._wanted

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                # Beside the work: others get the memory's lock between two steps.
                self._changed.wait_for(lambda: self._stopping, 0.0005)
                self._changed.wait_for(self._something)
                if self._stopping:
                    return
                wanted, touched = self._wanted, self._touched
            if touched > wanted:
                self._give_back(wanted, touched)
            else:
                step = min(_STEP, wanted - self.populated)
                self._memory.populate(self.populated, step)
                self.populated += step
                self._reading.arena_ready(self.populated, wanted)

    def _something(self) -> bool:
        return self._stopping or self._touched > self._wanted or self.populated < self._wanted

    def _give_back(self, wanted: int, touched: int) -> None:
        self.populated = min(self.populated, wanted)
        self._reading.arena_ready(self.populated, wanted)
        start = max(wanted, touched - _STEP_BACK)
        self._memory.discard(start, touched - start)
        with self._changed:
            # Nothing grows before all has been given back, so this is as it was.
            self._touched = start
