"""pyrecordio's dataset for torch, imported through ``ffserve.recordio.TorchDataset``."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import Dataset

from ffserve.compat.pyrecordio import File


class TorchDataset(Dataset[Any]):
    """The records of a RecordIO file as a map-style dataset.

    Args: recordfile_path: the file. options: of `ffserve.recordio.File`, such as a decoder.
    """

    def __init__(self, recordfile_path: str | os.PathLike[str], **options: Any) -> None:
        self._file = File(recordfile_path, "r", **options)

    def __getitem__(self, index: int) -> Any:
        return self._file.get(index)

    def __len__(self) -> int:
        return self._file.count()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TorchDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
