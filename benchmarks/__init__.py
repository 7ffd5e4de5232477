"""Benchmarks for developers beyond `ffserve bench`: every row of docs/BENCHMARKS.md, the comparison
with recorded ratios, and the picture."""

from importlib import import_module

from ffserve import cli
from ffserve.errors import CoreError

try:
    import_module("ffserve.engine.core")
except CoreError as error:  # every program here needs it: the message alone, no traceback
    raise SystemExit(cli.report(error)) from None
