"""Where remote files of the long run come from: an origin, and a cache of it; both fail."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import shared_cache
from contents import KEPT_VERSIONS, REMOTE, REPLACED, Versions, forget_version, write_version
from origins import HttpOrigin, http_origin

FAULTS = ("503", "cut", "damaged", "short", "slow", "stalled")
"""Of the origin, after which reads go on. damaged: a byte of one answer is wrong."""
LONGEST_S = 6.0


class Sources:
    """The two servers.

    Args: folder: of the run; has the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running = contextlib.ExitStack()
        self.origin: HttpOrigin = self._running.enter_context(http_origin())
        self.cache = self._running.enter_context(shared_cache.shared_cache())
        self._until = {"origin": 0.0, "cache": 0.0}
        for spec in REMOTE + REPLACED:
            self.origin.put(spec.name, (folder / spec.name).read_bytes())
        (folder / "origin").write_text(f"{self.origin.url} {self.cache.address}")

    def replace(self) -> int:
        """Have another version of an object; return its number."""
        [spec] = REPLACED
        versions = Versions(self._folder, spec)
        version = versions.begun + 1
        versions.numbers[0] = version
        write_version(self._folder, spec, version)
        self.origin.put(spec.name, (self._folder / spec.name).read_bytes())
        versions.numbers[1] = version
        if version > KEPT_VERSIONS:
            forget_version(self._folder, spec, version - KEPT_VERSIONS)
        return version

    def fail(self, chance: random.Random) -> tuple[str, str]:
        """Let one that works fail for a while; return which, and how."""
        working = [name for name, until in self._until.items() if not until] or ["origin"]
        name = chance.choice(working)
        self._until[name] = time.monotonic() + chance.uniform(0.3, LONGEST_S)
        if name == "cache":
            self.cache.asked.clear()
            self.cache.kept.clear()
            self.cache.fault = chance.choice(shared_cache.FAULTS)
            return name, str(self.cache.fault)
        origin, fault = self.origin, chance.choice(FAULTS)
        origin.recover()
        if fault == "503":
            origin.fail_until = self._until[name]
        elif fault == "cut":
            origin.cut_after = 1
        elif fault == "damaged":
            origin.wrong = {chance.randrange(1_000_000, 10_000_000): 1}
        elif fault == "short":
            origin.short = 1
        elif fault == "slow":
            origin.rate = 1e6
        else:
            origin.stalled.set()
        return name, fault

    def recover(self, *, at_once: bool = False) -> None:
        """Let those work again whose time is over."""
        for name, until in self._until.items():
            if until and (at_once or time.monotonic() >= until):
                self._until[name] = 0.0
                if name == "cache":
                    self.cache.fault = None
                else:
                    self.origin.recover()

    def close(self) -> None:
        """End both."""
        self._running.close()
