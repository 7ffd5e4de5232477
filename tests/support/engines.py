"""The engines of this process."""

from __future__ import annotations

from ffserve.client.local.local_engines import LocalEngines, process_engines


def reads_of(engines: LocalEngines) -> int:
    """Return how many reads engines carried out."""
    return sum(int(engine.counters()["reads"]) for engine in engines.all)


def engine_reads() -> int:
    """Return how many reads the engines of this process carried out."""
    return reads_of(process_engines())
