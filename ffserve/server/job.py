"""What the daemon counts for each training run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Job:
    """One training run, over all its sessions; counters since it was first seen."""

    name: str
    first_seen: float
    last_seen: float
    sessions: int = 0
    hits: int = 0
    hit_size: int = 0
    missed: int = 0
    errors: int = 0
    waited_s: float = 0.0
    """Between its requests and their answers, summed over its sessions."""
    pid: int = 0
    paths: str = ""
