"""Every format under the conformance class that is also for formats of others."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from tar_files import with_checksum

from ffserve import formats
from ffserve.engine.tar import header_is_valid
from ffserve.errors import FFServeError
from ffserve.formats import by_name
from ffserve.formats.base import Heads, SmallShards, opens_small
from ffserve.testing import MEMORY_LIMIT, SMALL, FormatConformance, samples, written


class TestFFRecord(FormatConformance):
    format = by_name("ffrecord")


class TestTFRecord(FormatConformance):
    format = by_name("tfrecord")


@pytest.mark.check
class TestCompressedTFRecord(FormatConformance):
    format = by_name("tfrecord")
    options = ({"compression": "gzip"}, {"compression": "zlib"})

    def _check_tolerant(self, content: bytes, whole: list[bytes]) -> None:
        """A damaged reference of the compression may copy a record to another place, which only the
        checksum of the whole stream shows."""
        try:
            found = samples(self.format, content, tolerant=True)
        except FFServeError as error:
            self._check_located(error)
        else:
            assert {each for each in found if isinstance(each, bytes)} <= set(whole)


class TestRecordIO(FormatConformance):
    format = by_name("recordio")
    # test_recordio_format.py turns every bit of the other ways to write it.
    options = (
        {"compression": "none", "max_chunk_size": 30},
        {"dialect": "go", "compression": "gzip"},
    )


class TestTar(FormatConformance):
    """It has no checksums of contents: bits are turned in headers only."""

    format = by_name("tar")

    def test_every_cut(self) -> None:
        """Of a file of twenty blocks, the cuts around their edges."""
        [content] = self._files()
        edges = {edge + k for edge in range(0, 8193, 512) for k in (-1, 0, 1, 256)}
        for size in sorted(edges - {-1}):
            self._check_tolerant(content[:size], list(SMALL))

    @pytest.mark.check
    def test_every_flipped_bit(self) -> None:
        """As for every format, in the bytes of the first two headers."""
        whole = list(SMALL)
        [content] = self._files()
        for bit in (*range(0, 8 * 512, 3), *range(8 * 1024, 8 * 1536, 3)):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            try:
                found = samples(self.format, bytes(damaged))
            except FFServeError as error:
                self._check_located(error)
            else:
                assert found == whole

    def test_absurd_numbers_cost_no_memory(self) -> None:
        """As for every format, in headers that match their checksums: all others are refused."""
        [content] = self._files()
        headers = [at for at in range(0, len(content), 512) if header_is_valid(content[at:])]
        sizes = [
            b"\x80" + value.to_bytes(11, "big") for value in (2**32 - 1, 2**40, 2**62, 2**64 - 1)
        ]
        assert len(headers) == len(SMALL)
        tracemalloc.start()
        try:
            for at, size in itertools.product(headers, [*sizes, b"77777777777\0"]):
                damaged = bytearray(content)
                damaged[at + 124 : at + 136] = size
                damaged[at : at + 512] = with_checksum(damaged[at : at + 512])
                self._check_unverified(bytes(damaged))
            assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT
        finally:
            tracemalloc.stop()


def test_every_format_is_here() -> None:
    tested = {each.format.name for each in (TestFFRecord, TestTFRecord, TestRecordIO, TestTar)}
    assert tested == set(formats.NAMES)


class _Careless:
    """TFRecord by somebody who forgot one check: the canaries that must be caught."""

    def __init__(self, fault: str) -> None:
        self._real = by_name("tfrecord")
        self._fault = fault
        self.name, self.suffixes = "careless", (".careless",)
        self.sniff, self.writer = self._real.sniff, self._real.writer
        if fault == "together":
            self.open_small = self._open_small

    def _open_small(self, heads: Heads, paths: list[str], *, verify: bool = True) -> SmallShards:
        found = self._real.open_small(heads, paths, verify=verify)  # type: ignore[attr-defined]
        found.checksums[3:4] += 1
        return found  # type: ignore[no-any-return]

    def open(self, read_at, size, path, *, verify=True, tolerant=False):  # type: ignore[no-untyped-def]
        if self._fault == "unchecked":
            verify = False
        if self._fault == "allocates":
            head = bytearray(8)
            if size >= 8:
                read_at(0, memoryview(head))
                np.empty(min(int.from_bytes(head, "little"), 1 << 27), np.uint8)
        if self._fault == "raises ValueError" and size % 2:
            raise ValueError(size)
        try:
            shard = self._real.open(read_at, size, path, verify=verify, tolerant=tolerant)
        except FFServeError:
            if self._fault != "wrong beside damaged, if cut" or tolerant:
                raise
            shard = self._real.open(read_at, size, path, verify=verify, tolerant=True)
            if shard.count < 3 or size == len(written(by_name("tfrecord"), SMALL)):
                raise
            shard.load = lambda o, n, c: _damaged(type(shard).load, shard, o, n, c)  # type: ignore[method-assign]
        if self._fault == "unchecked":
            shard.checksum_kind = 0
        if self._fault == "wrong order" and shard.count > 1:
            shard.load = lambda o, n, c: _swapped(type(shard).load, shard, o, n, c)  # type: ignore[method-assign]
        return shard


def _swapped(load, shard, offsets, lengths, checksums) -> None:  # type: ignore[no-untyped-def]
    load(shard, offsets, lengths, checksums)
    for table in (offsets, lengths, checksums):
        table[[0, 1]] = table[[1, 0]]


def _damaged(load, shard, offsets, lengths, checksums) -> None:  # type: ignore[no-untyped-def]
    _swapped(load, shard, offsets, lengths, checksums)
    checksums[2:3] += 1


FAULTS = "unchecked", "allocates", "raises ValueError", "wrong order", "together"


@pytest.mark.check
@pytest.mark.parametrize("fault", [*FAULTS, "wrong beside damaged, if cut"])
def test_careless_format_is_caught(fault: str) -> None:
    class Careless(FormatConformance):
        format = _Careless(fault)  # type: ignore[assignment]

    checks = [name for name in dir(Careless) if name.startswith("test_")]
    caught = []
    for name in checks:
        try:
            getattr(Careless(), name)()
        except (AssertionError, ValueError):
            caught.append(name)
    assert len(checks) == 11 and caught


def test_the_careful_one_is_not() -> None:
    content = written(by_name("tfrecord"), SMALL)
    assert samples(by_name("tfrecord"), content) == list(SMALL)


@pytest.mark.parametrize("name", [name for name in formats.NAMES if name != "tar"])
def test_files_in_order_are_opened_together(name: str) -> None:
    """If they are small: so the daemon opens ten thousand of them in a second."""
    chosen = by_name(name)
    assert opens_small(chosen)
    contents = [written(chosen, SMALL[:k]) for k in range(len(SMALL))] * 20
    sizes = np.array([len(content) for content in contents], np.int64)
    heads = np.zeros((len(contents), 4096), np.uint8)
    for row, content in zip(heads, contents, strict=True):
        row[: len(content)] = np.frombuffer(content, np.uint8)
    small = chosen.open_small(Heads(heads, sizes, sizes), ["file"] * len(contents))
    assert small.done.all()
    assert small.counts.tolist() == [*range(len(SMALL))] * 20
