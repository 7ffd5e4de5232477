"""Each test has an origin if it asks for one, and stores and breakers of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from origins import HttpOrigin, ask_origins, http_origin, settled

from ffserve.store import fetching


@pytest.fixture
def server(own_store: None) -> Iterator[HttpOrigin]:
    """A running origin without files."""
    with http_origin() as running:
        yield running
        # Else it would be asked in vain during the tests that follow.
        running.recover()
        settled()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Let other tests know nothing of the origins of one."""
    yield
    fetching.forget()


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process know no origin and no store but one that is empty, and wait little."""
    ask_origins()
    monkeypatch.setenv("FFSERVE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FFSERVE_SOCKET", str(tmp_path / "s"))
    monkeypatch.setenv("FFSERVE_START", "0")  # a test that wants a daemon says so
