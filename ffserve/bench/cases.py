"""Who meets whom: the groups of `ffserve bench`, and the parts that others are made of.

A row is named ``state/size/…/what``; the limits are those that this project set itself.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from ffserve.bench import peers, yardsticks
from ffserve.bench.peers import Peer
from ffserve.bench.records import Data, evict, files_below, load
from ffserve.bench.runner import Bench, Entrant, Group, Result, Row, ratio
from ffserve.errors import FFServeError

MEMCPY = "memcpy"
OURS = "ffserve"
_SUCH = {
    "blocks": "", "stream": "", "extents": ", extents", "batches": ", extents, a batch at a time",
}  # fmt: skip
DEPTH = 128
"""Reads in flight of a daemon, when nothing else is configured."""


def hot(
    bench: Bench,
    data: Data,
    batch: int,
    clients: int,
    ways: dict[str, float | None],
    rivals: Sequence[Peer] = (),
    prefix: str = "hot",
    *,
    inline: bool = False,
) -> Group:
    """Everything in memory: ours in the arena, a peer's files in the page cache.

    Args:
        ways: functions of `ffserve.bench.ours`, each with its limit.
        inline: samples come through the socket.
    """
    state = "inline" if inline else "hot"
    name = f"{'inline' if inline else prefix}/{data.name}/batch{batch}/clients{clients}"

    def ours(way: str) -> Result:
        daemon = bench.hot_daemon(data, inline=inline)
        result = bench.run(
            f"ffserve.bench.ours:{way}", data, batch=batch, clients=clients, daemon=daemon, warm=8
        )
        if result.daemon["blocks_read"] > 0:
            raise FFServeError(f"the arena did not hold {data.size} bytes: nothing here was hot")
        return result

    def entrant(way: str, limit: float | None) -> Entrant:
        row = Row(f"{name}/{way}", f"{OURS} {way}", ratio, limit=limit)
        return Entrant(f"{OURS} {way}", lambda: ours(way), (row,))

    return Group(
        title=f"{state}, {data.name}, batches of {batch}, {_counted(clients)}",
        against=MEMCPY,
        yardstick=lambda: bench.run(
            "ffserve.bench.yardsticks:memcpy", data, batch=batch, clients=clients, warm=8
        ),
        entrants=(
            *(entrant(way, limit) for way, limit in ways.items()),
            *(rival(bench, peer, data, batch, clients, name, cold=False) for peer in rivals),
        ),
        before=data.make,
        labels={"state": state, "bytes": data.mean, "batch": batch, "clients": clients},
    )


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of ours to read cold data."""

    name: str
    who: str
    batch: int
    clients: int = 1
    limit: float | None = None
    daemon: bool = True


def cold(
    bench: Bench,
    data: Data,
    depth: int,
    ways: Sequence[Way],
    rivals: Sequence[Peer] = (),
    rival_batch: int = 256,
    cpu_limit: float | None = None,
    prefix: str = "cold",
    pattern: yardsticks.Pattern = "blocks",
) -> Group:
    """Nothing in memory: every sample once, in random order.

    Args:
        depth: reads in flight of the yardstick.
        pattern: what the yardstick reads.
        cpu_limit: microseconds of the daemon's CPU a missed sample, for the first way; None: no
            row about it.
    """
    name = f"{prefix}/{data.name}/depth{depth}"

    def entrant(way: Way, first: bool) -> Entrant:
        rows = [Row(f"{name}/{way.name}", f"{OURS} {way.name}", ratio, limit=way.limit)]
        if first and cpu_limit is not None:
            row = f"{name}/daemon-cpu"
            what = "the daemon's CPU a missed sample"
            rows.append(Row(row, what, _miss_us, "µs", cpu_limit, at_most=True))
            rows.append(Row(f"{row}/fio", f"{what}, fio's CPU a read being 1", _miss_share,
                            at_most=True))  # fmt: skip
        return Entrant(
            f"{OURS} {way.name}", lambda: read_cold(bench, data, way), tuple(rows),
            labels={"batch": way.batch, "clients": way.clients},
        )  # fmt: skip

    return Group(
        title=f"cold, {data.name}, against {depth} reads in flight{_SUCH[pattern]}",
        **disk(bench, data, depth, pattern),
        entrants=(
            *(entrant(way, k == 0) for k, way in enumerate(ways)),
            *(rival(bench, peer, data, rival_batch, 1, name, cold=True) for peer in rivals),
        ),
        before=data.make,
        labels={"state": "cold", "bytes": data.mean, "batch": rival_batch, "clients": 1},
    )


def read_cold(bench: Bench, data: Data, way: Way) -> Result:
    """Run one way of ours with nothing in memory."""
    evict(data.paths)
    who = f"ffserve.bench.ours:{way.who}"
    if not way.daemon:
        return bench.run(who, data, batch=way.batch, clients=way.clients, once=True)
    with bench.cold_daemon(data) as daemon:
        return bench.run(who, data, batch=way.batch, clients=way.clients, once=True, daemon=daemon)


def stream(bench: Bench, data: Data, limit: float | None) -> Group:
    """From the first sample to the last, through the daemon and with an engine of one's own."""
    name = f"stream/{data.name}"
    ways = [
        Way("daemon", "in_order", 64, limit=limit),
        Way("engine", "in_order", 64, limit=limit, daemon=False),
    ]

    def entrant(way: Way) -> Entrant:
        row = Row(f"{name}/{way.name}", f"{OURS} in order, {way.name}", ratio, limit=way.limit)
        return Entrant(f"{OURS} {way.name}", lambda: read_cold(bench, data, way), (row,))

    return Group(
        title=f"from first to last, {data.name}",
        **disk(bench, data, yardsticks.STREAM_DEPTH, "stream"),
        entrants=tuple(entrant(way) for way in ways),
        before=data.make,
        labels={"state": "stream", "bytes": data.mean, "clients": 1},
    )


def disk(bench: Bench, data: Data, depth: int, pattern: yardsticks.Pattern) -> dict[str, Any]:
    """Return the yardstick of the disk, as parts of a Group."""
    has = yardsticks.has_fio()
    way = "fio in order" if pattern == "stream" else f"fio at depth {depth}{_SUCH[pattern]}"
    return {
        "against": way if has else f"{yardsticks.RAW_THREADS} Python threads of preadv (no fio)",
        "yardstick": lambda: bench.fio(data, depth, pattern),
        "judged": has,
    }


def rival(
    bench: Bench, peer: Peer, data: Data, batch: int, clients: int, name: str, *, cold: bool
) -> Entrant:
    """A peer in a group of ours: the same samples, in the same batches."""

    def run() -> Result:
        place = peer.place(bench.folder, data)
        if not os.path.exists(place):
            bench.run(
                "ffserve.bench.peers:prepare", peer=peer.name, folder=bench.folder,
                samples=dataclasses.asdict(data),
            )  # fmt: skip
        files = files_below(place)
        if cold:
            evict(files)
        else:
            load(files)
        return bench.run(
            "ffserve.bench.peers:contestant", data, peer=peer.name, place=place,
            imports=[peer.module] if peer.forks else [],
            batch=batch, clients=clients, once=cold,
        )  # fmt: skip

    what = f"{peer.name}, in order" if peer.in_order else peer.name
    return Entrant(peer.name, run, (Row(f"{name}/{peer.name}", what, ratio),), optional=True)


def installed() -> tuple[list[Peer], list[str]]:
    """Return the peers that can join in, and a line about each that cannot."""
    reasons = {peer: peer.missing for peer in peers.PEERS}
    return (
        [peer for peer, reason in reasons.items() if reason is None],
        [f"{peer.name}: {reason}" for peer, reason in reasons.items() if reason is not None],
    )


def inline_limits(data: Data) -> dict[int, float | None]:
    """Return the limit of samples through the socket, by batch."""
    return dict.fromkeys((64, 256), 0.25 if data.mean == 100 * 1024 else None)


def standard(bench: Bench, sets: Sequence[Data], rivals: Sequence[Peer]) -> list[Group]:
    """Return the groups of `ffserve bench`."""
    cpu_limits = {4096: 4.0, 100 * 1024: 13.0}
    groups = []
    for data in sets:
        groups += [
            hot(bench, data, 256, 1, {"read_batch": 0.85, "read": None}, rivals),
            hot(bench, data, 64, 2, {"read_batch": 0.85}),
            *(
                hot(bench, data, batch, 1, {"read_batch": limit}, inline=True)
                for batch, limit in inline_limits(data).items()
            ),
            cold(
                bench, data, DEPTH,
                [
                    Way("in_flight", "in_flight", 64, limit=0.95),
                    Way("batch256", "read_batch", 256, limit=0.8),
                ],
                rivals,
                cpu_limit=cpu_limits.get(data.mean),
            ),
            cold(bench, data, 64, [Way("batch64", "read_batch", 64, limit=0.8)]),
        ]  # fmt: skip
    return groups


def _counted(clients: int) -> str:
    return "1 client" if clients == 1 else f"{clients} clients"


def _miss_us(result: Result, base: Result | None) -> float:
    """The daemon's CPU microseconds for a sample that it read."""
    return result.daemon["cpu_s"] / max(1.0, result.daemon["blocks_read"]) * 1e6


def _miss_share(result: Result, base: Result | None) -> float:
    assert base is not None
    return _miss_us(result, base) / base.cpu_us
