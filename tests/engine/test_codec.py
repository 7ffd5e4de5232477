"""CRC-32 against zlib; CRC-32C against published vectors and a bitwise implementation."""

from __future__ import annotations

import mmap
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.engine.codec import CRC_32, CRC_32C, CRC_NONE, checksum, checksums, scatter
from ffserve.errors import UsageError


def bitwise_crc32c(data: bytes, seed: int = 0) -> int:
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


# RFC 3720, appendix B.4, and the check value of the CRC catalogues.
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_crc32c(data: bytes, expected: int) -> None:
    assert checksum(CRC_32C, data) == expected


@given(data=st.binary(max_size=3000), seed=st.integers(0, 2**32 - 1))
def test_like_zlib(data: bytes, seed: int) -> None:
    assert checksum(CRC_32, data, seed) == zlib.crc32(data, seed)


@given(data=st.binary(max_size=300), seed=st.integers(0, 2**32 - 1))
def test_like_bit_by_bit(data: bytes, seed: int) -> None:
    assert checksum(CRC_32C, data, seed) == bitwise_crc32c(data, seed)


@pytest.mark.parametrize("kind", [CRC_32, CRC_32C])
@given(data=st.binary(max_size=3000), cut=st.integers(0, 3000))
def test_in_two_parts(kind: int, data: bytes, cut: int) -> None:
    first = checksum(kind, data[:cut])
    assert checksum(kind, data[cut:], first) == checksum(kind, data)


@pytest.mark.parametrize("kind", [CRC_NONE, CRC_32, CRC_32C])
@given(
    data=st.binary(max_size=2000),
    pieces=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000)), max_size=20),
)
def test_many_pieces_at_once(kind: int, data: bytes, pieces: list[tuple[int, int]]) -> None:
    inside = [(a, n) for a, n in pieces if a + n <= len(data)]
    offsets = np.array([a for a, _ in inside], np.uint64)
    lengths = np.array([n for _, n in inside], np.uint64)
    expected = [checksum(kind, data[a : a + n]) for a, n in inside]
    assert checksums(kind, data, offsets, lengths).tolist() == expected


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (11, 0), (10, 1), (2**64 - 1, 2)])
def test_piece_outside_the_data(offset: int, length: int) -> None:
    place = np.array([offset], np.uint64)
    with pytest.raises(UsageError):
        checksums(CRC_32, b"0123456789", place, np.array([length], np.uint64))


@pytest.mark.parametrize(
    ("start", "length"), [(0, 11), (11, 0), (10, 1), (-1, 1), (1, -1), (2**63 - 1, 2)]
)
def test_a_piece_whose_end_overflowed_was_copied_from_elsewhere(start: int, length: int) -> None:
    data, into = np.arange(10, dtype=np.uint8), np.zeros(20, np.uint8)
    dests = np.array([into.ctypes.data, into.ctypes.data + 5], np.uint64)
    starts, lengths = np.array([7, start], np.int64), np.array([3, length], np.int64)
    with pytest.raises(UsageError):
        scatter(data, starts, lengths, dests)
    assert not into.any()
    scatter(data, starts[:1], lengths[:1], dests[:1])
    assert into[:4].tolist() == [7, 8, 9, 0]


def test_any_buffer() -> None:
    data = np.arange(100, dtype=np.uint16)
    expected = zlib.crc32(data.tobytes())
    assert checksum(CRC_32, data) == expected
    assert checksum(CRC_32, memoryview(data)) == expected
    assert checksum(CRC_32, bytearray(data.tobytes())) == expected


def test_no_reference_is_kept() -> None:
    with mmap.mmap(-1, 4096) as page:
        checksum(CRC_32, page)  # closing a mapping that is exported would raise
