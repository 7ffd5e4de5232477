"""The compiled core, provided that it was built from the sources that lie beside it.

In a checkout the sources may change without the module that was built from them (``git pull``);
what does not fit together then fails far from here, or does not fail and is wrong. What is
installed came together, with the sources or without.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ffserve.engine.sources import fingerprint
from ffserve.errors import CoreError

_BUILD = f"run {sys.executable} -m ffserve.engine.build_core"
_ELSEWHERE = ", or leave this directory if ffserve is installed as a package"

try:
    from ffserve.engine import _core
except ImportError as error:
    raise CoreError(f"the C core cannot be loaded: {error}", hint=_BUILD + _ELSEWHERE) from error

ffi, lib = _core.ffi, _core.lib
_found = fingerprint(Path(__file__).parent)
if _found and getattr(lib, "FFS_SOURCES", None) != _found:
    raise CoreError(
        "the C core was built from other sources than those that lie beside it",
        path=_core.__file__,
        hint=_BUILD,
    )

__all__ = ["ffi", "lib"]
