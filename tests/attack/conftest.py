"""The table of attacks, which `make attack` prints and, if told to, writes into SECURITY.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attack_field import costs, table, write_table


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode
) -> None:
    """Print the table; write it if nothing failed."""
    if costs:
        terminalreporter.write_line(f"\n{table()}")
    if costs and exitstatus == 0 and (page := os.environ.get("ATTACK_TABLE")):
        write_table(Path(page))
