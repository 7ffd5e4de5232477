"""What comes through a socket: messages, and between them samples that go straight to their place.

Where memory cannot be shared, a SENDING tells the lengths of the samples of a GET and PAYLOADs
bring their bytes. The one who asked has put a `Sink` here, which says where they go; the bytes are
received there, without a buffer between. Bytes that nobody waits for any more are thrown away.
"""

from __future__ import annotations

import socket
from typing import Protocol

import numpy as np

from ffserve import protocol
from ffserve.errors import ProtocolError
from ffserve.protocol import Message

CHUNK = 256 * 1024
FRAME_CHUNK = 4096
"""Bytes to receive at once where payload follows frames: what is too much is copied once more."""
MOST_PIECES = 512


class Sink(Protocol):
    """Takes the samples of one GET."""

    def begin(self, lengths: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        """The lengths of the samples to come. Raises: ProtocolError when they are impossible."""
        ...

    def room(self, size: int) -> list[memoryview]:
        """Return where the next bytes go: together `size` bytes, or the first MOST_PIECES pieces.

        Raises: ProtocolError when fewer were to come.
        """
        ...

    def filled(self, size: int) -> None:
        """So many bytes were written there."""
        ...


class Inbox:
    """The receiving side of a connection. Used by one thread at a time."""

    def __init__(self, decoder: protocol.Decoder) -> None:
        self.most = CHUNK
        self.sinks: dict[int, Sink] = {}
        self._decoder = decoder
        self._sink: Sink | None = None
        self._waste = memoryview(bytearray(0))

    def receive(self, sock: socket.socket) -> list[Message] | None:
        """Receive once; return the messages for those who wait, None at the end of the stream.

        Raises: ProtocolError; OSError of the socket.
        """
        decoder = self._decoder
        if decoder.payload_size:
            views = self._room()
            blocking = sock.getblocking()
            size = sock.recvmsg_into(views, 0, socket.MSG_WAITALL if blocking else 0)[0]
            if not size:
                return None
            decoder.skip_payload(size)
            if self._sink is not None:
                self._sink.filled(size)
            return []
        chunk = sock.recv(self.most)
        return self._sorted(decoder.feed(chunk)) if chunk else None

    def drop(self, tag: int) -> None:
        """Nobody waits for these samples any more."""
        sink = self.sinks.pop(tag, None)
        if sink is not None and self._sink is sink:
            self._sink = None

    def _room(self) -> list[memoryview]:
        size = self._decoder.payload_size
        if self._sink is not None:
            return self._sink.room(size)
        if not self._waste:
            self._waste = memoryview(bytearray(CHUNK))
        return [self._waste[:size]]

    def _sorted(self, messages: list[Message]) -> list[Message]:
        answers: list[Message] = []
        while messages:
            for message in messages:
                match message:
                    case protocol.Sending(tag=tag, lengths=packed):
                        sink = self.sinks.get(tag)
                        if len(packed) % 8:
                            raise ProtocolError(f"the daemon sent {len(packed)} bytes of lengths")
                        if sink is not None:
                            sink.begin(np.frombuffer(packed, "<u8"))
                    case protocol.Payload(tag=tag):
                        self._sink = self.sinks.get(tag)
                    case protocol.Ready(tag=tag) | protocol.Fail(tag=tag):
                        self.sinks.pop(tag, None)
                        answers.append(message)
                    case _:
                        answers.append(message)
            messages = []
            while self._decoder.payload_size and (taken := self._decoder.take_payload()):
                self._pour(taken)
                if not self._decoder.payload_size:
                    messages = self._decoder.feed(b"")
                    break
        return answers

    def _pour(self, taken: bytes) -> None:
        """Put bytes in place that came with a frame."""
        rest = memoryview(taken)
        while rest and self._sink is not None:
            for view in self._sink.room(len(rest)):
                view[:] = rest[: len(view)]
                self._sink.filled(len(view))
                rest = rest[len(view) :]
