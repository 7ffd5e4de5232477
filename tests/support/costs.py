"""What tests cost: `pytest --costs` prints the processor time per folder, and the slowest files.

The time of a test is that of its own process and of every process that it started and waited for.
A daemon that a module shares is counted when it ends, with the module's last test.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from preloaded import Preloaded

MOST_FILES = 30


def cpu_s() -> float:
    """Return the processor time of this process and of those that have ended."""
    return sum(os.times()[:4]) + Preloaded.cpu_s


@dataclass
class Cost:
    """Sums over tests."""

    count: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0


class Costs:
    """A plugin of pytest. Processes of pytest-xdist send what they measure with their reports."""

    def __init__(self) -> None:
        self._before_s = cpu_s()
        self.folders: defaultdict[str, Cost] = defaultdict(Cost)
        self.files: defaultdict[str, Cost] = defaultdict(Cost)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        now_s = cpu_s()
        report.cpu_s = now_s - self._before_s
        self._before_s = now_s
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        file = report.nodeid.partition("::")[0]
        for cost in (self.files[file], self.folders[file.split("/")[1]]):
            cost.count += report.when == "call"
            cost.cpu_s += report.cpu_s
            cost.wall_s += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for title, costs in (("folder", self.folders), ("file", self.files)):
            terminalreporter.section(f"CPU per {title}")
            ordered = sorted(costs.items(), key=lambda item: -item[1].cpu_s)
            for name, cost in ordered[:MOST_FILES]:
                terminalreporter.line(
                    f"{name:45} {cost.count:5} tests {cost.cpu_s:7.1f} s of CPU"
                    f" {cost.wall_s:7.1f} s by the clock"
                )
        total_s = sum(cost.cpu_s for cost in self.folders.values())
        terminalreporter.line(f"all: {total_s:.0f} s of CPU")
