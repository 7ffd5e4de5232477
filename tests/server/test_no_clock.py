"""What a message causes in the daemon gets the time from it, and reads no clock."""

from __future__ import annotations

import importlib
import types

import pytest

MODULES = [
    "sessions.context",
    "sessions.datasets",
    "sessions.failures",
    "sessions.job_table",
    "sessions.opened",
    "sessions.session",
    "prepared.claims",
    "prepared.sharing",
    "reading.pins",
    "reading.requests",
    "reading.scheduler",
    "reading.turn_order",
    "reading.waiting",
    "status.faults",
    "status.report",
    "users.shares",
]


@pytest.mark.parametrize("name", MODULES)
def test_a_message_brings_its_time(name: str) -> None:
    module = importlib.import_module(f"ffserve.server.{name}")
    imported = [each for each in vars(module).values() if isinstance(each, types.ModuleType)]
    assert not {each.__name__ for each in imported} & {"time", "datetime", "asyncio", "socket"}
