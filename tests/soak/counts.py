"""Counters of a client in a file that is mapped: what it counted stands there if it is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

FIELDS = ("samples", "size", "epochs", "errors", "opened", "steps", "alone")
"""Samples that were hashed and their bytes; epochs that were delivered whole, each sample once;
errors that had to come and came; readers opened; steps of the loop; times that a reader was found
to read without the daemon that it had."""


class Counts:
    """Counters in a file.

    Args: path: made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(FIELDS)))
        self._numbers = np.memmap(path, np.int64, "r+", shape=(len(FIELDS),))

    def add(self, **amounts: int) -> None:
        """Count."""
        for name, amount in amounts.items():
            self._numbers[FIELDS.index(name)] += amount

    def read(self) -> dict[str, int]:
        """Return all counters."""
        return dict(zip(FIELDS, self._numbers.tolist(), strict=True))
