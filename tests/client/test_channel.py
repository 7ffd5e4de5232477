"""The client's side of the protocol without a socket."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve import protocol
from ffserve.client.daemon.channel import ORDER_PIECE, Channel
from ffserve.client.daemon.mapped_memory import Memories
from ffserve.client.daemon.passed_files import DescribedFiles
from ffserve.client.failover import OpenRequest
from ffserve.errors import AccessDenied, ProtocolError, ServerUnavailable
from ffserve.protocol import Message

ONE = np.zeros(1, np.int64)
OPEN = OpenRequest(("/a",), None, "require", True, False)


def channel(*, takes_orders: bool = True) -> Channel:
    """A channel over which data sets 1, 2 and 3 are open."""
    decoder = protocol.Decoder(protocol.FROM_SERVER)
    memories = Memories("socket", 1 << 20, 1 << 12)
    client = Channel("socket", decoder, takes_orders=takes_orders, memories=memories)
    for dataset in (1, 2, 3):
        tag = client.open(OPEN, DescribedFiles(b""))
        sent(client)
        answer(client, protocol.Opened(tag, dataset, b"", []))
        client.collect(tag)
    return client


def sent(client: Channel, most: int | None = None) -> list[Message]:
    """Have a socket take everything, `most` bytes at a time; return the messages."""
    decoder, messages = protocol.Decoder(protocol.FROM_CLIENT), list[Message]()
    while output := client.output():
        piece = output[:most]
        messages += decoder.feed(piece)
        client.sent(len(piece))
    assert not client.urgent
    return messages


def answer(client: Channel, *messages: Message) -> list[int]:
    return client.feed(b"".join(map(protocol.encode, messages)))


@given(st.integers(1, 100))
def test_what_a_socket_takes_in_pieces_arrives_whole(most: int) -> None:
    client = channel()
    opened = client.open(OPEN, DescribedFiles(b""))
    tag = client.get(3, np.arange(20))
    first, second = sent(client, most)
    assert isinstance(first, protocol.Open) and first.tag == opened
    assert isinstance(second, protocol.Get) and second.tag == tag and second.dataset == 3


def test_requests_beyond_the_limit_are_kept_back_until_answers_come() -> None:
    client = channel()
    tags = [client.get(1, ONE) for _ in range(protocol.MOST_REQUESTS + 3)]
    assert len(sent(client)) == protocol.MOST_REQUESTS
    assert answer(client, protocol.Ready(tags[5], 1, []), protocol.Ready(tags[0], 1, [])) == [
        tags[5],
        tags[0],
    ]
    assert client.urgent
    assert [m.tag for m in sent(client)] == tags[-3:-1]  # type: ignore[union-attr]
    client.give_up(tags[-1])
    answer(client, *(protocol.Ready(tag, 1, []) for tag in tags[1:5]))
    assert not sent(client)


def test_a_closed_data_set_fails_its_requests_that_were_kept_back() -> None:
    client = channel()
    for _ in range(protocol.MOST_REQUESTS):
        client.get(1, ONE)
    kept, other = client.get(2, ONE), client.get(3, ONE)
    client.close_dataset(2)
    with pytest.raises(ServerUnavailable):
        client.collect(kept)
    assert not client.has_answer(other)


def test_what_nobody_waits_for_is_given_back() -> None:
    client = channel()
    opening, reading = client.open(OPEN, DescribedFiles(b"")), client.get(1, ONE)
    sent(client)
    client.give_up(opening)
    client.give_up(reading)
    assert client.owes_since is not None and not client.report_due
    assert answer(client, protocol.Opened(opening, 7, b"", [])) == []
    assert answer(client, protocol.Ready(reading, 1, [])) == []
    assert client.report_due and client.owes_since is None
    client.queue_reports()
    tell, close = sent(client)
    assert isinstance(tell, protocol.Tell) and protocol.unpack_tags(tell.acknowledged) == [reading]
    assert close == protocol.Close(7)


def test_reports_are_state_until_the_socket_takes_them() -> None:
    client = channel()
    client.get(1, ONE)
    for k in range(1000):
        client.count_hits(10, 100)
        client.reached(1, 0, k)
        client.queue_reports()
    assert len(sent(client)) == 1, "nothing was queued behind the request"
    client.queue_reports()
    output = bytes(client.output())
    client.count_hits(1, 1)
    client.reached(1, 0, 5000)
    client.queue_reports()
    assert bytes(client.output()) == output, "one report at a time"
    assert sent(client) == [protocol.Tell(0, 10_000, 100_000, b""), protocol.Reached(1, 0, 999)]
    client.queue_reports()
    assert sent(client) == [protocol.Tell(0, 1, 1, b""), protocol.Reached(1, 0, 5000)]


def test_acknowledgements_go_out_with_the_next_request() -> None:
    client = channel()
    client.acknowledge(4)
    client.get(1, ONE)
    [get] = sent(client)
    assert isinstance(get, protocol.Get) and protocol.unpack_tags(get.acknowledged) == [4]
    client.queue_reports()
    assert not sent(client)


def test_errors_of_requests_and_of_the_session() -> None:
    client = channel()
    first, second, third = (client.get(1, ONE) for _ in range(3))
    denied = protocol.error_to_wire(AccessDenied("no"))
    answer(client, protocol.Fail(first, denied))
    with pytest.raises(AccessDenied):
        client.collect(first)
    with pytest.raises(AccessDenied):
        answer(client, protocol.Fail(0, denied))
    with pytest.raises(ProtocolError, match="OPENED where READY is due") as wrong:
        answer(client, protocol.Opened(second, 1, b"", []))
    client.fail(wrong.value)
    with pytest.raises(ProtocolError, match="OPENED"):
        client.collect(third)
    with pytest.raises(ProtocolError):
        client.get(1, ONE)


def test_messages_of_a_closed_data_set_ended_the_session() -> None:
    """A thread that read while another one closed the reader sent its GET behind CLOSE."""
    client = channel()
    pieces = client.order_pieces(1, 0, np.arange(ORDER_PIECE + 1), None, False)
    next(pieces)
    client.close_dataset(1)
    requests: list[Callable[[], object]] = [
        lambda: client.get(1, ONE),
        lambda: client.lease(1, ONE, []),
        lambda: client.seen(1, ONE),
        lambda: next(pieces),
        lambda: next(client.order_pieces(1, 0, ONE, None, False)),
    ]
    for request in requests:
        with pytest.raises(ServerUnavailable, match="closed"):
            request()
    client.reached(1, 0, 5)
    assert [type(message) for message in sent(client)] == [protocol.Order]
    client.queue_reports()
    assert sent(client) == [protocol.Close(1)]
