"""What several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon import Daemon, serving


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon for all tests of a module that leave it as they found it."""
    with serving() as running:
        yield running
