"""Import path of RecordIO's public names: a drop-in for pyrecordio, and the chunk index.

``TorchDataset`` is imported when it is first used, so that this module works without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ffserve.compat.pyrecordio import Compressor, File, Index, Task, index

if TYPE_CHECKING:
    from ffserve.compat.pyrecordio_torch import TorchDataset

__all__ = ["Compressor", "File", "Index", "Task", "TorchDataset", "index"]


def __getattr__(name: str) -> Any:
    if name == "TorchDataset":
        return importlib.import_module("ffserve.compat.pyrecordio_torch").TorchDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
