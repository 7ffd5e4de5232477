"""Warming: remote files into the store of this user, before a job reads them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ffserve.disk.files import raise_file_limit
from ffserve.errors import FFServeError, UsageError
from ffserve.store import urls
from ffserve.store.fetching import (
    NOW,
    Fetcher,
    OpenObject,
    identity_of,
    outcome_of,
    process_fetcher,
)

FILES_AT_ONCE = 4
FILES_SHARE = 8
"""One file is kept open for this many descriptors that a process may have; each takes three."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """The outcome of one file. fetched, left: bytes that came just now, and that the store has no
    room for."""

    url: str
    path: str
    size: int
    fetched: int
    left: int
    error: FFServeError | None = None


def warm_up(given: Sequence[str], advance: Callable[[], None]) -> list[Warmed]:
    """Fetch files into the store; return the outcome for each.

    Args: given: URLs of files. advance: is called after each file, in any thread.
    Raises: UsageError for a path that is no URL, or a store that cannot be used.
    """
    local = next((path for path in given if not urls.is_url(path)), None)
    if local is not None:
        raise UsageError(
            "the argument is not the URL of a remote file", path=local, hint="such as s3://bucket/x"
        )
    fetcher = process_fetcher()
    raise_file_limit()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_SHARE
    kept: list[OpenObject] = []
    """Files stay open until the end, so that none is evicted for one that comes after it."""

    def one(url: str) -> Warmed:
        try:
            opened = fetcher.open(identity_of(url))
            try:
                return _warm(fetcher, opened)
            finally:
                if len(kept) < most:
                    kept.append(opened)
                else:
                    fetcher.close(opened)
        except FFServeError as error:
            return Warmed(urls.shown(url), "", 0, 0, 0, error)
        finally:
            advance()

    try:
        with ThreadPoolExecutor(FILES_AT_ONCE, "ffserve-warm") as pool:
            return list(pool.map(one, given))
    finally:
        for opened in kept:
            fetcher.close(opened)


def _warm(fetcher: Fetcher, opened: OpenObject) -> Warmed:
    stored = opened.stored
    missing = stored.missing(np.arange(stored.count)).tolist()
    asked = fetcher.ask(opened, missing, NOW, None)
    fetched = left = 0
    for block, future in asked.items():
        size = stored.state.end(block) - block * stored.block_size
        if outcome_of(future.result(), block) is True:
            fetched += size
        else:
            left += size
    return Warmed(opened.shown, stored.path, stored.size, fetched, left)
