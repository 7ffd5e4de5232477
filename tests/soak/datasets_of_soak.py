"""Datasets of the long run, in a module that worker processes can import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ffserve.torch import Dataset


class Plain(Dataset):
    """Samples as they are, through `process`."""

    def process(self, indices: Sequence[int], data: list[Any]) -> list[Any]:
        """Return the samples."""
        return data


class Inverted(Dataset):
    """Each bit is inverted in advance, and again later."""

    prepare_version = "soak"

    def prepare(self, indices: Sequence[int], data: Any) -> list[Any]:
        """Invert."""
        return [np.invert(sample) for sample in data]

    def process(self, indices: Sequence[int], data: list[Any]) -> list[Any]:
        """Invert again."""
        return [np.invert(sample) for sample in data]
