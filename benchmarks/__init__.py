"""Benchmarks for developers: every row of docs/BENCHMARKS.md, the comparison with other packages
and with recorded ratios, and the picture."""

from importlib import import_module

from ffserve.errors import CoreError

try:
    import_module("ffserve.engine.core")
except CoreError as error:  # every program here needs it: the message alone, no traceback
    from ffserve import cli

    raise SystemExit(cli.report(error)) from None
