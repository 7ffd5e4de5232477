"""RecordIO in an event loop: lengths known only by reading, decoding beside the loop."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest
from recordio_files import COUNT, SAMPLES, as_bytes, create

from ffserve import aio
from ffserve.errors import ChecksumError, UsageError


@pytest.fixture
def path(tmp_path: Path) -> str:
    return create(tmp_path / "x.recordio", max_chunk_size=30_000, compression="gzip")


async def test_samples_are_what_was_written(path: str, server: str) -> None:
    async with await aio.open(path, server=server) as reader:
        chosen = np.random.default_rng(8).integers(0, COUNT, 400)
        expected = [SAMPLES[k] for k in chosen]
        assert as_bytes(await reader.read(chosen)) == expected
        assert as_bytes(await reader.read_batch(chosen)) == expected
        assert [bytes(each) async for each in reader] == SAMPLES
        found = await asyncio.gather(*(reader.read([k]) for k in range(COUNT)))
        assert [bytes(each[0]) for each in found] == SAMPLES
        with pytest.raises(UsageError):
            await reader.read_batch([6], out=np.empty(1, np.uint8))


async def test_sizes_first(path: str, server: str) -> None:
    async with await aio.open(path, server=server) as reader:
        assert (await reader.sizes()).tolist() == [len(s) for s in SAMPLES]
        assert as_bytes(await reader.read(range(COUNT))) == SAMPLES


async def test_being_cancelled_leaves_the_reader_whole(path: str, server: str) -> None:
    async with await aio.open(path, server=server) as reader:
        for pauses in range(6):
            task = asyncio.ensure_future(reader.read_batch(range(COUNT)))
            for _ in range(pauses):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert as_bytes(await reader.read(range(COUNT))) == SAMPLES


async def test_damage(path: str, server: str) -> None:
    content = bytearray(Path(path).read_bytes())
    content[30] ^= 1
    Path(path).write_bytes(content)
    async with await aio.open(path, server=server, on_error="skip") as reader:
        assert len(reader.damaged) > 0
        left = [bytes(each) async for each in reader]
        assert left == SAMPLES[len(reader.damaged) :]
    async with await aio.open(path, server=server) as reader:
        with pytest.raises(ChecksumError):
            await reader.sizes()
        with pytest.raises(ChecksumError):
            await reader.read([COUNT - 1, 0])
