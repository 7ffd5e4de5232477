"""Requests of /dev/fuse that are answered from the arena. A socket stands for the device."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from arena import Arena

from ffserve.engine.fuse import Requests
from ffserve.view import kernel
from ffserve.view.kernel import Operation

FORGET = 2
FIRST_NODE = 1 << 20
ROOM = 5000
SAMPLES = [b"a" * 3000, b"", b"c" * 100, b"not in memory", b"e" * (ROOM + 1)]
NAMED = np.array([-1, 2, -1, 4], np.int64)
"""Nodes 1 to 4: two of them are samples."""


class Device:
    """What the kernel has in hand: it sends requests, and gets the answers."""

    def __init__(self) -> None:
        self.kernel, self.served = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.kernel.settimeout(0.2)
        self.arena = Arena(1 << 16, len(SAMPLES))
        at = 0
        for k, each in enumerate(SAMPLES):
            self.arena.bytes[at : at + len(each)] = np.frombuffer(each, np.uint8)
            self.arena.entries[k] = (1 if k != 3 else 2, len(each), at)
            at += len(each)
        self.view = self.arena.view()
        self.requests = Requests(
            self.served.fileno(), NAMED, FIRST_NODE,
            request_size=8192, content_size=ROOM, hit_count=3,
        )  # fmt: skip

    def ask(self, operation: int, node: int, body: bytes = b"", number: int = 7) -> bytes:
        size = kernel.HEADER.size + len(body)
        request = kernel.HEADER.pack(size, operation, number, node, 0, 0, 0, 0, 0) + body
        self.kernel.send(request)
        return request

    def read(self, node: int, offset: int = 0, size: int = 8192, number: int = 7) -> bytes:
        body = kernel.READ.pack(0, offset, size) + bytes(20)
        return self.ask(Operation.READ, node, body, number)

    def stop(self) -> None:
        """Have `next` return, since a request comes that it does not know."""
        self.ask(Operation.STATFS, 1)

    def passed_on(self, request: bytes) -> bool:
        size = self.requests.next(self.view)
        return self.requests.buffer[:size].tobytes() == request


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    with made.kernel, made.served:
        yield made


def test_samples_in_memory_are_answered(device: Device) -> None:
    for number, node in enumerate([FIRST_NODE, FIRST_NODE + 1, 2]):
        device.read(node, number=number)
    assert device.requests.next(device.view) == 0, "there is no room for another hit"
    for number in range(3):
        content = SAMPLES[number]
        head = struct.pack("<IiQ", 16 + len(content), 0, number)
        assert device.kernel.recv(8192) == head + content
    taken, size = device.requests.take_hits()
    assert taken.tolist() == [0, 1, 2] and size == 3100
    assert len(device.requests.take_hits()[0]) == 0


def test_a_read_of_the_very_size_is_answered(device: Device) -> None:
    device.read(FIRST_NODE, size=3000)
    device.stop()
    device.requests.next(device.view)
    assert device.kernel.recv(8192)[16:] == SAMPLES[0]


@pytest.mark.parametrize(
    ("node", "offset", "size"),
    [
        (FIRST_NODE + 3, 0, 8192),  # it is not in memory
        (FIRST_NODE + 4, 0, 8192),  # larger than the buffer
        (FIRST_NODE, 0, 2999),  # there is more of it
        (FIRST_NODE, 10, 8192),
        (FIRST_NODE + len(SAMPLES), 0, 8192),
        (1 << 63, 0, 8192),
        (1, 0, 8192),
        (0, 0, 8192),
        (len(NAMED) + 1, 0, 8192),
    ],
)
def test_other_reads_are_passed_on(device: Device, node: int, offset: int, size: int) -> None:
    assert device.passed_on(device.read(node, offset, size))
    with pytest.raises(TimeoutError):
        device.kernel.recv(8192)


def test_other_requests_are_passed_on(device: Device) -> None:
    device.ask(FORGET, FIRST_NODE, bytes(8))
    assert device.passed_on(device.ask(Operation.LOOKUP, 1, b"name\0"))
    read = device.read(FIRST_NODE)
    size = device.requests.next(None)
    assert device.requests.buffer[:size].tobytes() == read, "without a view nothing is in memory"


def test_an_error_of_the_device_is_raised(device: Device) -> None:
    device.served.setblocking(False)
    with pytest.raises(BlockingIOError) as raised:
        device.requests.next(device.view)
    assert raised.value.errno == errno.EAGAIN
