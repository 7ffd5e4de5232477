"""The promise of SECURITY.md: whatever one local user does, an honest client of another user has no
error and waits no longer than is said there (`attack_field.py: Promise`).

`make attack` runs these alone, since they measure times.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import attacks
import pytest
from attack_field import Field, field

pytestmark = [
    pytest.mark.attack,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None,
        reason="needs root and setpriv, to run processes as other users",
    ),
]


@pytest.fixture(scope="module")
def crowded() -> Iterator[Field]:
    with field(12_000) as made:
        yield made


@pytest.mark.parametrize("kind", attacks.KINDS)
def test_the_promise_holds(crowded: Field, kind: str) -> None:
    crowded.run(kind)
