"""Plugin of pytest for runs under qemu: what it lacks is no failure of what is tested.

It has no io_uring and no Linux AIO, so the engine is threads, which a daemon says in its log. Huge
pages do not show in its /proc. There is no PyTorch in these runs.
"""

from __future__ import annotations

import daemon
import pytest

ABSENT = {
    "test_lost_ring": "qemu has neither io_uring nor Linux AIO",
    "test_many_small_arrays_lie_in_huge_pages": "qemu shows no huge pages",
    "test_buffers_that_every_engine_kept": "qemu shows no flags of memory",
    "TestReadsThatHang": "qemu has no io_uring",
    "of_another_user": "these systems have one user only",
    "test_torch_loader": "PyTorch is not installed",
}
"""Names of files, classes or tests, and why they are skipped."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the line in the daemon's log; skip what cannot be."""
    daemon.EXPECTED += (r"io_uring is not used .*: reading with threads",)
    for item in items:
        for name, reason in ABSENT.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
