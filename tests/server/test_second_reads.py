"""Second reads of damaged samples, beside the daemon's own tests of them."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from ffserve.server.reading.damage import SecondReader


def test_a_second_read_that_ended_when_the_engines_were_closed_ended_the_daemon() -> None:
    """Its end gives files back to an engine."""
    nothing: Any = None
    begun, let = threading.Event(), threading.Event()
    ended: list[Any] = []

    def read() -> Any:
        begun.set()
        let.wait(30)
        return [], {}

    async def close_meanwhile() -> None:
        reader = SecondReader(nothing, nothing, ended.append)
        reader.attach(asyncio.get_running_loop())
        load: Any = SimpleNamespace(batches=0, right=[], failures={})
        reader.call(load, read, {}, 1)
        assert begun.wait(30)
        threading.Timer(0.1, let.set).start()
        reader.close()
        await asyncio.sleep(0.1)
        assert reader.in_flight == 0

    asyncio.run(close_meanwhile())
    assert not ended
