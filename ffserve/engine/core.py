"""The compiled core: loads it, and refuses one that was built from other sources.

In a checkout the sources may change without a new build (``git pull``). A core that does not fit
them fails in unrelated places or returns wrong results, so it is refused here. An installed package
has a core that fits, whether its sources are installed or not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ffserve.engine.fingerprint import fingerprint
from ffserve.errors import CoreError

_BUILD = f"run {sys.executable} -m ffserve.engine.build_core"

try:
    from ffserve.engine import _core
except ImportError as error:
    raise CoreError(
        f"the C core cannot be loaded: {error}",
        hint=_BUILD + ", or leave this directory if ffserve is installed as a package",
    ) from error

ffi, lib = _core.ffi, _core.lib
SOURCES = fingerprint(Path(__file__).parent)
if SOURCES and getattr(lib, "FFS_SOURCES", None) != SOURCES:
    raise CoreError(
        "the C core was built from other sources than those in its folder",
        path=_core.__file__,
        hint=_BUILD,
    )

I64S, U64S = ffi.typeof("int64_t[]"), ffi.typeof("uint64_t[]")
I32S, U32S = ffi.typeof("int32_t[]"), ffi.typeof("uint32_t[]")
U8S, DESTS = ffi.typeof("uint8_t[]"), ffi.typeof("uint8_t *[]")
DOUBLES = ffi.typeof("double[]")
from_buffer, NULL = ffi.from_buffer, ffi.NULL
