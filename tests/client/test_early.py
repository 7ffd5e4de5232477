"""Samples are copied as they come, before the daemon says that all of them have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from daemon import serving, until

import ffserve
from ffserve.client.remote import EARLY_SIZE, RemoteSource
from ffserve.client.request import Awaited

COUNT, SIZE = 40, 100_000


def test_what_has_come_is_copied_before_the_answer(tmp_path: Path) -> None:
    """The daemon reads and never says so; what it published can be had all the same."""
    content = np.random.default_rng(3).integers(0, 256, (COUNT, SIZE), np.uint8)
    with ffserve.create(tmp_path / "a.ffr", n=COUNT) as writer:
        for sample in content:
            writer.write(sample)
    silent = (
        "from ffserve.engine import io\nio.DirectReply.arm = lambda self: None\n"
        "from ffserve.server import reading\nreading.Reading._reap = lambda *_: None"
    )
    with serving(
        roots=[tmp_path],
        patch=silent,
        options=["--drain-timeout", "0"],
        expect=["stopped with requests unanswered.*"],
    ) as daemon:
        reader = ffserve.open(tmp_path / "a.ffr", server=daemon.socket)
        source = reader._supply.source
        assert isinstance(source, RemoteSource)
        chosen = np.random.default_rng(4).permutation(COUNT)
        pending = source.start(chosen, apart=False)
        [(tag, positions)] = pending.asked
        assert SIZE * COUNT >= EARLY_SIZE and len(positions) == COUNT
        steps = source.steps(pending)
        awaited = next(steps)
        assert isinstance(awaited, Awaited) and awaited.early is not None

        def all_came() -> bool:
            assert isinstance(awaited, Awaited) and awaited.early is not None
            assert not source.connection.answered(tag, 0.001)
            awaited.early = source.copy(pending, awaited.early)
            return not len(awaited.early)

        until(all_came, "all samples were copied")
        assert pending.target.buffer is not None
        assert (pending.target.buffer.reshape(COUNT, SIZE) == content[chosen]).all()
        for left in source.give_up(pending):
            source.connection.give_up(left)
        reader.close()
