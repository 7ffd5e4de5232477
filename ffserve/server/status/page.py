"""The status page: its files, and the events that keep it up to date.

An event is an `Overview` as JSON, cut to what a page can show. The browser draws it, and remembers
the last minutes for its graphs. Nothing of what clients and files chose is markup: the browser
makes text of it, and the policy of the page (CSP) forbids every script but its own.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import asdict
from heapq import nlargest, nsmallest
from importlib.resources import files
from typing import Any

from ffserve.limits import MOST_PAGE_JOBS, MOST_PAGE_ROWS
from ffserve.server.sessions.state import ServerState
from ffserve.server.status.overview import JobRow, overview
from ffserve.server.status.report import status
from ffserve.server.users.peers import HOST, Peer

EVENT_INTERVAL_S = 2.0
"""The interval between two events."""
EVENTS = "text/event-stream; charset=utf-8"
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
"""The file and its type, by path."""
SECURITY = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
"""The headers of all answers."""
_ADMINISTRATOR = Peer(0, 0, HOST)
_STRANGER = Peer(0, -2, -1)
"""A user who has no job and no file."""


def read_files() -> dict[str, tuple[str, bytes]]:
    """Return the files of the page by path: type and content."""
    place = files("ffserve.server.status") / "assets"
    return {path: (kind, (place / name).read_bytes()) for path, (name, kind) in FILES.items()}


def event(state: ServerState, now: float, *, names: bool) -> Generator[None, None, bytes]:
    """Return an event, in steps.

    Args: names: whether names of jobs and files are shown; else there are totals only.
    """
    facts = yield from status(state, now, _ADMINISTRATOR if names else _STRANGER)
    # Only rows that are shown become rows of the overview, which takes longer than to choose them.
    ended = sum(job["sessions"] == 0 for job in facts["jobs"])
    facts["jobs"] = nsmallest(
        MOST_PAGE_JOBS, facts["jobs"], key=lambda job: (job["sessions"] == 0, job["idle_s"])
    )
    yield
    facts["shards"] = nlargest(MOST_PAGE_ROWS, facts["shards"], key=lambda row: row["cached_size"])
    facts["groups"] = facts["groups"][: 2 * MOST_PAGE_JOBS]
    facts["lines"] = facts["lines"][-MOST_PAGE_ROWS:]
    for key in ("slow_files", "preparations"):
        facts[key] = facts[key][:MOST_PAGE_ROWS]
    yield
    view = overview(facts)
    yield
    jobs = []
    for job in view.jobs:
        jobs.append(_job(job))
        yield
    lists: dict[str, Sequence[Any]] = {
        "memory": view.memory,
        "files": view.files,
        "slow": view.slow,
        "lines": view.lines,
        "preparations": view.preparations,
    }
    shown = {name: [asdict(row) for row in rows[:MOST_PAGE_ROWS]] for name, rows in lists.items()}
    yield
    totals = {**asdict(view.totals), "sessions_short": view.totals.sessions_short}
    facts = {"names": names, "totals": totals, "jobs": jobs, "ended": ended, **shown}
    text = json.dumps(facts, allow_nan=False)
    return f"event: overview\ndata: {text}\n\n".encode()


def _job(job: JobRow) -> dict[str, Any]:
    computed = ("has_ended", "at_work", "waited", "cause")
    return {**asdict(job), **{name: getattr(job, name) for name in computed}}
