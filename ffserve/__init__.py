"""Record file server for training jobs: one daemon per machine, one cache for all jobs.

    reader = ffserve.open("/data/*.ffr")         # read samples by index
    with ffserve.create("train.ffr") as writer:  # write a record file
        writer.write(sample)

Names are imported when they are first used, so that `import ffserve` is fast and works without
torch. `import ffserve as ffrecord` runs programs written for the original ffrecord.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"ffserve runs on Linux only, not on {sys.platform}: run it on a Linux machine, in WSL 2, "
        "or in a Linux container (Docker, Podman, Colima)"
    )

from ffserve._version import __version__
from ffserve.errors import (
    AccessDenied,
    ChecksumError,
    FFServeError,
    FormatError,
    MissingFile,
    ProtocolError,
    ReadError,
    SampleIndexError,
    ServerUnavailable,
    TruncatedError,
    UsageError,
)

if TYPE_CHECKING:
    from ffserve import (
        aio,
        convert,
        example,
        fileio,
        grain,
        hf,
        inputs,
        package,
        recordio,
        tensorflow,
        torch,
        utils,
    )
    from ffserve.client.source import Batch
    from ffserve.compat.ffrecord import FileReader, FileWriter, checkFsAlign
    from ffserve.compat.packed_folder import PackedFolder, pack_folder
    from ffserve.reader import FieldReader, Reader, open
    from ffserve.writer import Writer, create


_HOMES = {
    "open": "ffserve.reader",
    "Reader": "ffserve.reader",
    "FieldReader": "ffserve.reader",
    "Batch": "ffserve.client.source",
    "create": "ffserve.writer",
    "Writer": "ffserve.writer",
    "FileReader": "ffserve.compat.ffrecord",
    "FileWriter": "ffserve.compat.ffrecord",
    "checkFsAlign": "ffserve.compat.ffrecord",
    "PackedFolder": "ffserve.compat.packed_folder",
    "pack_folder": "ffserve.compat.packed_folder",
}
_MODULES = (
    "aio",
    "convert",
    "example",
    "fileio",
    "grain",
    "hf",
    "inputs",
    "package",
    "recordio",
    "tensorflow",
    "torch",
    "utils",
)

__all__ = [
    "AccessDenied",
    "Batch",
    "ChecksumError",
    "FFServeError",
    "FieldReader",
    "FileReader",
    "FileWriter",
    "FormatError",
    "MissingFile",
    "PackedFolder",
    "ProtocolError",
    "ReadError",
    "Reader",
    "SampleIndexError",
    "ServerUnavailable",
    "TruncatedError",
    "UsageError",
    "Writer",
    "__version__",
    "aio",
    "checkFsAlign",
    "convert",
    "create",
    "example",
    "fileio",
    "grain",
    "hf",
    "inputs",
    "open",
    "pack_folder",
    "package",
    "recordio",
    "tensorflow",
    "torch",
    "utils",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"ffserve.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ffserve' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
