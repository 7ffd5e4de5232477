"""Frames and messages: complete, in pieces, and invalid; docs/PROTOCOL.md matches the code."""

from __future__ import annotations

import re
import struct
import tracemalloc
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffserve import limits, protocol
from ffserve.engine.slots import ENTRY_DTYPE
from ffserve.errors import BY_CODE, FFServeError, ProtocolError, ReadError
from ffserve.protocol import FROM_CLIENT, FROM_SERVER, Decoder, Message, encode
from ffserve.server.prepared import claims
from ffserve.server.reading import pins, scheduler
from ffserve.server.sessions import server
from ffserve.store.schemes import schemes

EVERY: tuple[type[Any], ...] = (*FROM_CLIENT, *FROM_SERVER)
DOCUMENT = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text()

integers = st.integers(-(1 << 63), (1 << 64) - 1)
texts = st.text(max_size=20)
plain = st.none() | st.booleans() | integers | texts | st.binary(max_size=20)
nested = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4)
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": integers,
    "bytes": st.binary(max_size=100),
    "dict[str, Any]": st.dictionaries(texts, nested, max_size=4),
    "list[Any]": st.lists(nested, max_size=4),
    "list[str]": st.lists(texts, max_size=4),
}


def messages_of(cls: type[Any]) -> st.SearchStrategy[Message]:
    values = {f.name: VALUES[str(f.type)] for f in fields(cls)}
    return st.builds(cls, **values)


messages = st.one_of([messages_of(cls) for cls in EVERY])


def decode(stream: bytes, accept: tuple[type[Any], ...] = EVERY) -> list[Message]:
    return Decoder(accept).feed(stream)


def frame(body: object) -> bytes:
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return struct.pack("<I", len(packed)) + packed


# ---- valid streams -----------------------------------------------------------------------------


@given(message=messages)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == [message]


@given(sent=st.lists(messages, max_size=5), cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_cuts_in_the_stream_change_nothing(sent: list[Message], cuts: list[int]) -> None:
    stream = b"".join(map(encode, sent))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder, got = Decoder(EVERY), []
    for start, end in pairwise(edges):
        got += decoder.feed(stream[start:end])
    assert got == sent


@given(sent=st.lists(messages, max_size=3))
def test_byte_by_byte_equals_the_whole(sent: list[Message]) -> None:
    stream = b"".join(map(encode, sent))
    decoder, got = Decoder(EVERY), []
    for k in range(len(stream)):
        got += decoder.feed(stream[k : k + 1])
    assert got == sent == decode(stream)


@given(message=messages, data=st.data())
def test_a_truncated_frame_is_waited_for(message: Message, data: st.DataObject) -> None:
    stream = encode(message)
    cut = data.draw(st.integers(0, len(stream) - 1))
    decoder = Decoder(EVERY)
    assert decoder.feed(stream[:cut]) == []
    assert decoder.feed(memoryview(stream)[cut:]) == [message]


@given(indices=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=50))
def test_indices_survive(indices: list[int]) -> None:
    array = np.array(indices, np.int64)
    assert protocol.unpack_indices(protocol.pack_indices(array)).tolist() == indices


@given(tags=st.lists(st.integers(0, (1 << 32) - 1), max_size=50))
def test_tags_survive(tags: list[int]) -> None:
    assert protocol.unpack_tags(protocol.pack_tags(tags)) == tags


@given(
    cls=st.sampled_from(list(BY_CODE.values())),
    message=texts,
    path=st.none() | texts,
    index=st.none() | integers,
    offset=st.none() | integers,
    hint=st.none() | texts,
)
def test_errors_survive_the_wire(
    cls: type[FFServeError], message: str, **place: str | int | None
) -> None:
    error: FFServeError = cls(message, **place)  # type: ignore[arg-type]
    (fail,) = decode(encode(protocol.Fail(3, protocol.error_to_wire(error))))
    assert isinstance(fail, protocol.Fail)
    back = protocol.error_from_wire(fail.error)
    assert type(back) is cls
    assert str(back) == str(error)
    assert protocol.error_to_wire(back) == protocol.error_to_wire(error)


def test_an_unknown_code_is_a_plain_error() -> None:
    error = protocol.error_from_wire(["from the future", "text", None, None, None, None])
    assert type(error) is FFServeError


# ---- invalid frames ----------------------------------------------------------------------------

WRONG: dict[str, bytes] = {
    "not an array": frame({"type": 1}),
    "empty array": frame([]),
    "type is text": frame(["1", {}]),
    "type is a boolean": frame([True, {}]),
    "unknown type": frame([99]),
    "negative type": frame([-1]),
    "payload of a negative size": frame([21, 1, -1]),
    "payload larger than a frame": frame([21, 1, protocol.MAX_FRAME_SIZE + 1]),
    "too few fields": frame([9]),
    "too many fields": frame([14, 1]),
    "text for an int": frame([9, "1"]),
    "boolean for an int": frame([9, True]),
    "float for an int": frame([9, 1.0]),
    "nil for bytes": frame([8, None]),
    "text for bytes": frame([8, "1234"]),
    "list for bytes": frame([8, [1, 2]]),
    "list for a map": frame([1, []]),
    "keys that are not text": frame([1, {1: 2}]),
    "empty body": b"\0\0\0\0",
    "two bodies in one": struct.pack("<I", 4) + b"\x91\x0e\x91\x0e",
    "truncated body": struct.pack("<I", 1) + b"\x91",
    "reserved byte": struct.pack("<I", 1) + b"\xc1",
    "extension": frame([1, {"a": msgpack.ExtType(5, b"x")}]),
    "broken timestamp": frame([1, {"a": msgpack.ExtType(5, b"")}]).replace(b"\x05", b"\xff"),
    "array of 4 G elements in 5 bytes": struct.pack("<I", 5) + b"\xdd\xff\xff\xff\xff",
    "map of 4 G pairs in 7 bytes": struct.pack("<I", 7) + b"\x92\x01\xdf\xff\xff\xff\xff",
    "deeply nested": struct.pack("<I", 100_000) + b"\x91" * 100_000,
    "oversize": struct.pack("<I", protocol.MAX_FRAME_SIZE + 1),
    "length of all ones": b"\xff\xff\xff\xff",
}


@pytest.mark.parametrize("stream", WRONG.values(), ids=WRONG.keys())
def test_a_broken_frame_is_a_protocol_error(stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(stream)


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_the_wrong_direction_is_refused(cls: type[Any]) -> None:
    samples: dict[str, Any] = {
        "int": 1,
        "bytes": b"",
        "dict[str, Any]": {},
        "list[Any]": [],
        "list[str]": [],
    }
    message = cls(*(samples[str(f.type)] for f in fields(cls)))
    right, wrong = (FROM_CLIENT, FROM_SERVER) if cls in FROM_CLIENT else (FROM_SERVER, FROM_CLIENT)
    assert decode(encode(message), right) == [message]
    with pytest.raises(ProtocolError):
        decode(encode(message), wrong)


@pytest.mark.check
@given(message=messages, data=st.data())
@settings(max_examples=400)
def test_mutated_frames_raise_nothing_but_protocol_errors(
    message: Message, data: st.DataObject
) -> None:
    mutate_and_decode(message, data)


@pytest.mark.fuzz
@given(message=messages, data=st.data())
@settings(max_examples=25_000, deadline=None)
def test_many_mutated_frames(message: Message, data: st.DataObject) -> None:
    mutate_and_decode(message, data)


def mutate_and_decode(message: Message, data: st.DataObject) -> None:
    stream = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(stream) - 1))
        match data.draw(st.sampled_from(("set", "insert", "delete"))):
            case "set":
                stream[place] = data.draw(st.integers(0, 255))
            case "insert":
                stream[place:place] = data.draw(st.binary(max_size=6))
            case _ if len(stream) > 1:
                del stream[place]
    if data.draw(st.booleans()):
        stream[:4] = struct.pack("<I", max(len(stream) - 4, 0))
    for accept in (FROM_CLIENT, FROM_SERVER):
        with suppress(ProtocolError):
            for got in decode(bytes(stream), accept):
                assert isinstance(got, accept)


@given(stream=st.binary(max_size=60))
def test_random_bytes_raise_nothing_but_protocol_errors(stream: bytes) -> None:
    for body in (stream, struct.pack("<I", len(stream)) + stream):
        with suppress(ProtocolError):
            decode(body)


@pytest.mark.parametrize("element", (b"\x90", b"\x80", b"\xd4\x05x", b"\x91\x80"))
def test_a_frame_of_empty_containers_does_not_take_64_times_its_size(element: bytes) -> None:
    count = 4 * 1024 * 1024 // len(element)
    body = b"\x92\x01\x81\xa1a\xdd" + struct.pack(">I", count) + element * count
    stream = struct.pack("<I", len(body)) + body
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(stream)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(stream)


def test_a_message_that_cannot_be_encoded_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        encode(protocol.Release(b"x" * protocol.MAX_FRAME_SIZE))
    with pytest.raises(ProtocolError):
        encode(protocol.Status(1 << 64))
    with pytest.raises(ProtocolError):
        encode(protocol.Open(1, {"paths": ["/\ud800"]}, b""))


def test_file_names_that_are_not_utf8_survive() -> None:
    message = protocol.Open(1, {"paths": ["/\udcff"]}, b"")
    assert b"\xa2/\xff" in encode(message)
    assert decode(encode(message)) == [message]


@pytest.mark.parametrize("size", (1, 7, 9, 8 * protocol.MAX_GET_COUNT + 8))
def test_indices_of_a_wrong_size_are_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        protocol.unpack_indices(bytes(size))


@pytest.mark.parametrize("size", (1, 6, 4 * protocol.MAX_GET_COUNT + 4))
def test_pieces_of_an_order_of_a_wrong_size_are_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        protocol.unpack_order(bytes(size))


@given(indices=st.lists(st.integers(0, (1 << 32) - 1), max_size=50))
def test_orders_survive(indices: list[int]) -> None:
    array = np.array(indices, np.int64)
    assert protocol.unpack_order(protocol.pack_order(array)).tolist() == indices


@pytest.mark.parametrize("size", (1, 3, 5))
def test_tags_of_a_wrong_size_are_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        protocol.unpack_tags(bytes(size))


@given(wire=nested | st.lists(plain, min_size=6, max_size=6))
def test_any_value_is_an_error_or_a_protocol_error(wire: Any) -> None:
    with suppress(ProtocolError):
        assert isinstance(protocol.error_from_wire(wire), FFServeError)


def test_the_largest_ready_fits_into_a_frame() -> None:
    error = ReadError(
        "x" * 300, path="/" + "p" * 4095, index=1 << 62, offset=1 << 62, hint="h" * 300
    )
    row = [65_535, *protocol.error_to_wire(error)]
    encode(protocol.Ready(1, 65_536, [row] * limits.MOST_ERRORS))


# ---- the document ------------------------------------------------------------------------------

KINDS = {
    "int": "int",
    "bytes": "bytes",
    "dict[str, Any]": "map",
    "list[Any]": "array",
    "list[str]": "array",
}


def table(*header: str) -> list[list[str]]:
    """The rows of the document's table with this header."""
    head = "| " + " | ".join(header) + " |\n"
    start = DOCUMENT.index(head) + len(head)
    lines = DOCUMENT[start:].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_the_document_lists_every_message() -> None:
    expected = [
        [
            str(cls.TYPE),
            cls.__name__.upper(),
            "client" if cls in FROM_CLIENT else "daemon",
            ", ".join(f"{f.name}: {KINDS[str(f.type)]}" for f in fields(cls)),
        ]
        for cls in sorted(EVERY, key=lambda cls: cls.TYPE)
    ]
    assert table("type", "message", "sender", "fields") == expected


def test_the_document_states_the_limits() -> None:
    of_users = table("limit of a user", "value", "what")
    for name, value, _ in (*table("limit", "value", "what"), *of_users):
        modules = (limits, protocol, pins, scheduler, server, claims)
        owner = next(module for module in modules if hasattr(module, name))
        assert float(value) == getattr(owner, name), name


def test_the_document_states_the_errors() -> None:
    rows = {code: retry for code, retry, _ in table("code", "retry may help", "when")}
    assert rows == {c: "yes" if cls.retryable else "no" for c, cls in BY_CODE.items()}


def test_the_document_states_the_access_of_each_protocol() -> None:
    kinds = {str: "", int: ": int", bool: ": bool", dict: ": map", list: ": array"}
    stated = {name: options.split(", ") for name, options in table("protocol", "options")}
    assert stated == {
        name: [option + kinds[kind] for option, kind in scheme.options.items()]
        for name, scheme in schemes().items()
        if scheme.options
    }


def test_the_document_states_the_layouts() -> None:
    found = []
    head = "| offset | type | field | meaning |\n"
    for part in DOCUMENT.split(head)[1:]:
        rows = [line.strip("|").split("|") for line in part.split("\n\n")[0].splitlines()[1:]]
        found.append([(int(r[0]), r[1].strip(), r[2].strip()) for r in rows])
    for layout, dtype in zip(found, (protocol.SHARD_DTYPE, ENTRY_DTYPE), strict=True):
        assert dtype.names is not None and dtype.fields is not None
        assert layout == [
            (dtype.fields[name][1], f"u{8 * dtype.fields[name][0].itemsize}", name)
            for name in dtype.names
        ]


def test_the_document_knows_its_version() -> None:
    assert DOCUMENT.startswith(f"# The protocol of ffserve, version {protocol.VERSION}\n")


def test_the_example_in_the_document_is_true() -> None:
    text = DOCUMENT.split("```frames\n")[1].split("```")[0]
    frames = {
        name: bytes.fromhex(content)
        for name, content in re.findall(r"^([A-Z]+)((?:\s+[0-9a-f]{2}\b)+)", text, re.M)
    }
    error = ReadError("Input/output error", path="/a.ffr", index=0, offset=64)
    hello = {"versions": [protocol.VERSION], "client": "c", "job": "j", "pid": 7}
    indices, tags = protocol.pack_indices(np.array([5, 0])), protocol.pack_tags([1])
    expected: list[Message] = [
        protocol.Hello(hello),
        protocol.Get(2, 1, indices, tags, 0, 0),
        protocol.Ready(2, 2, [[1, *protocol.error_to_wire(error)]]),
        protocol.Release(protocol.pack_tags([3])),
        protocol.Bye(),
    ]
    assert list(frames.values()) == [encode(message) for message in expected]
    assert list(frames) == [type(message).__name__.upper() for message in expected]
    assert decode(b"".join(frames.values())) == expected
