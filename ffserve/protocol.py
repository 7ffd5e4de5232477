"""Protocol: frames and messages between client and daemon, for both sides, without I/O.

A frame is a little-endian u32 (the size of the body in bytes) and a body: one msgpack array whose
first element is the type of the message and whose others are its fields in order. Arrays of numbers
travel as packed little-endian bytes, never as lists. A decoder is fed bytes as they arrive and
returns whole messages. A peer that breaks the rules raises ProtocolError, after which the
connection must be closed. `docs/PROTOCOL.md` is the normative text.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Int64s
from ffserve.errors import BY_CODE, FFServeError, ProtocolError

VERSION = 2
VERSIONS = (VERSION,)
"""The versions that this release speaks, the newest first: its own, and the one before it, from 2
on. Version 1 had no access by descriptor."""
MAX_FRAME_SIZE = 16 * 1024 * 1024
"""A body has at most this many bytes. That is enough for an OPEN of 100,000 paths, and bounds a
false size."""
MAX_MESSAGE_SIZE = 1024 * 1024
"""A body from a client has at most this many bytes, except that of OPEN."""
MAX_LIST_COUNT = 262_144
"""A list of an OPEN has at most this many values."""
FEW_VALUES = 64
"""Other lists and maps have at most this many values if the client's message is larger than
STEP_SIZE."""
STEP_SIZE, STEP_COUNT = 16_384, 512
"""A decoder handles this many bytes of a body, or values of a list, in one step."""
MAX_CONTAINERS = 16_384
"""A frame has at most this many lists and maps. When it is decoded, each takes much more memory
than its bytes."""
MAX_GET_COUNT = 65_536
"""A GET or LEASE has at most this many indices; a client splits a larger request."""
MOST_TITLE, MOST_COMMAND = 64, 256
"""HELLO describes a job to people with a name and a command of at most this many characters."""
MOST_REQUESTS = 64
"""A session has at most this many GETs and LEASEs without a reply; its client delays further
ones."""
MOST_FILES = 253
"""A FILES passes at most this many descriptors, the limit of Linux for one message (SCM_MAX_FD)."""
EVERY = "*"
"""If this is among the protocols of WELCOME, the daemon fetches by every protocol, for its own
user."""
MOST_TEXT = 8192
"""A text in an error has at most this many characters. It may quote a message of the peer, which
has up to MAX_FRAME_SIZE bytes."""

_HEADER = struct.Struct("<I")
_FILE_NAMES = "surrogateescape"
"""File names are bytes; names that are not UTF-8 travel as those bytes (os.fsencode)."""


@dataclass(slots=True)
class Hello:
    """The client's first message. `about`: versions (list of int), client, job, pid."""

    TYPE: ClassVar[int] = 1
    about: dict[str, Any]


@dataclass(slots=True)
class Welcome:
    """The daemon's answer to HELLO, with a descriptor of one page: its epoch.

    `about`: version, server, epoch (of the arena), arena_size, capacity, max_get, payload.
    """

    TYPE: ClassVar[int] = 2
    about: dict[str, Any]


@dataclass(slots=True)
class Open:
    """Open a data set. `what`: paths (absolute), format or nil, verify, tolerant.

    `identities`: packed IDENTITY_DTYPE, one per path, as stat(2) reports them to the client.
    """

    TYPE: ClassVar[int] = 3
    tag: int
    what: dict[str, Any]
    identities: bytes


@dataclass(slots=True)
class Opened:
    """The data set is open. `shards`: packed SHARD_DTYPE, one per path; `formats`: their names.

    `domains`: packed u32, those whose memory the client gets with this frame: with its first byte
    come three descriptors for each, arena, directory, index.
    """

    TYPE: ClassVar[int] = 4
    tag: int
    dataset: int
    shards: bytes
    formats: list[str]
    domains: bytes = b""


@dataclass(slots=True)
class Get:
    """Make samples readable. `indices`: packed i64 in the data set.

    `acknowledged`: packed u32 tags of earlier GETs whose samples were copied. `hits`, `hit_size`:
    samples and bytes copied without a request since the last report.
    """

    TYPE: ClassVar[int] = 5
    tag: int
    dataset: int
    indices: bytes
    acknowledged: bytes
    hits: int
    hit_size: int


@dataclass(slots=True)
class Ready:
    """The first `count` samples are readable or failed. `errors`: [position, *error] each."""

    TYPE: ClassVar[int] = 6
    tag: int
    count: int
    errors: list[Any]


@dataclass(slots=True)
class Lease:
    """As GET, but the samples stay pinned until RELEASE or the end of the session."""

    TYPE: ClassVar[int] = 7
    tag: int
    dataset: int
    indices: bytes


@dataclass(slots=True)
class Release:
    """End leases. `tags`: packed u32."""

    TYPE: ClassVar[int] = 8
    tags: bytes


@dataclass(slots=True)
class Status:
    """Ask for the state of the daemon."""

    TYPE: ClassVar[int] = 9
    tag: int


@dataclass(slots=True)
class Report:
    """The answer to STATUS and RESIZE. `facts`: what `ffserve status --json` prints."""

    TYPE: ClassVar[int] = 10
    tag: int
    facts: dict[str, Any]


@dataclass(slots=True)
class Fail:
    """A request failed; tag 0: the session failed, and the daemon closes it."""

    TYPE: ClassVar[int] = 11
    tag: int
    error: list[Any]


@dataclass(slots=True)
class Alive:
    """The daemon works on the client's requests. Sent now and then while it owes an answer."""

    TYPE: ClassVar[int] = 18


@dataclass(slots=True)
class Close:
    """Close a data set."""

    TYPE: ClassVar[int] = 12
    dataset: int


@dataclass(slots=True)
class Tell:
    """Counters and acknowledgements as in GET, without a request."""

    TYPE: ClassVar[int] = 13
    dataset: int
    hits: int
    hit_size: int
    acknowledged: bytes


@dataclass(slots=True)
class Bye:
    """End the session."""

    TYPE: ClassVar[int] = 14


@dataclass(slots=True)
class Order:
    """Announce the order of a job's epoch, in pieces with one tag.

    `count`: positions of the whole order; `start`: position of this piece's first;
    `indices`: packed u32 in the dataset; `what`: name (or nil), replacement.
    """

    TYPE: ClassVar[int] = 15
    tag: int
    dataset: int
    epoch: int
    count: int
    start: int
    indices: bytes
    what: dict[str, Any]


@dataclass(slots=True)
class Reached:
    """The job has used the first `position` samples of its announced order."""

    TYPE: ClassVar[int] = 16
    dataset: int
    epoch: int
    position: int


@dataclass(slots=True)
class Seen:
    """The client found these samples in memory. `indices`: packed u32."""

    TYPE: ClassVar[int] = 17
    dataset: int
    indices: bytes


@dataclass(slots=True)
class Times:
    """How long it took the client to copy batches of cached samples since the last report.

    `took_ns`: the sum; `counts`: 25 packed u32: batches below 1, 2, 4, … 2^23 us, and all others.
    """

    TYPE: ClassVar[int] = 28
    took_ns: int
    counts: bytes


@dataclass(slots=True)
class Need:
    """The daemon needs descriptors for an OPEN. `positions`: packed u32, in its paths."""

    TYPE: ClassVar[int] = 19
    tag: int
    positions: bytes


@dataclass(slots=True)
class Files:
    """Descriptors that the client opened; they come with the first byte of this frame.

    `kinds`: one byte per descriptor: RECORD_FILE, of the next position of NEED, or INDEX_FILE, of
    the file before. Empty: the client gives up.
    """

    TYPE: ClassVar[int] = 25
    tag: int
    kinds: bytes


@dataclass(slots=True)
class Resize:
    """Resize the arena to `size` bytes; REPORT has its state."""

    TYPE: ClassVar[int] = 24
    tag: int
    size: int


@dataclass(slots=True)
class Handover:
    """Another daemon of the same user asks for the memory and the socket of this one."""

    TYPE: ClassVar[int] = 26
    tag: int


@dataclass(slots=True)
class Handed:
    """Descriptors of the daemon's memory and socket, which come with the first byte of this frame.

    `names`: of each; `left`: how many are still to come.
    """

    TYPE: ClassVar[int] = 27
    tag: int
    names: list[str]
    left: int


@dataclass(slots=True)
class Prepare:
    """Open the prepared samples of a data set; OPENED answers, after a NEED for a memory file.

    `key`: 32 bytes, of the preparation. `what`: name, of it, for people; with `dataset` 0 also
    count, of samples that are made of no file.
    """

    TYPE: ClassVar[int] = 29
    tag: int
    dataset: int
    key: bytes
    what: dict[str, Any]


@dataclass(slots=True)
class Claim:
    """Ask who prepares samples. `indices`: packed i64 in the data set of prepared samples.

    `wait`: 1: answer when no other session prepares any of them.
    """

    TYPE: ClassVar[int] = 30
    tag: int
    dataset: int
    indices: bytes
    wait: int


@dataclass(slots=True)
class Claimed:
    """The answer to CLAIM. `states`: one byte per sample: READABLE, YOURS, ELSEWHERE, UNSHARED."""

    TYPE: ClassVar[int] = 31
    tag: int
    states: bytes


@dataclass(slots=True)
class Put:
    """Prepared samples that this session has claimed lie in its memory file; READY answers.

    `indices`: packed i64. `places`, `lengths`: packed u64, in bytes; a length of 0 gives the claim
    up. `cost_us`: the time of their preparation.
    """

    TYPE: ClassVar[int] = 32
    tag: int
    dataset: int
    indices: bytes
    places: bytes
    lengths: bytes
    cost_us: int


@dataclass(slots=True)
class Distrust:
    """The preparation of a data set of prepared samples is not deterministic: share none of it."""

    TYPE: ClassVar[int] = 33
    dataset: int
    index: int


@dataclass(slots=True)
class Names:
    """Ask for the names of records that are fields of samples, or what fields there are.

    `blocks`: packed u32, a pair for each block: position of the shard, number of the block.
    """

    TYPE: ClassVar[int] = 34
    tag: int
    dataset: int
    blocks: bytes


@dataclass(slots=True)
class Named:
    """The answer to NAMES. `blocks`: the first ones of those asked for, bytes each."""

    TYPE: ClassVar[int] = 35
    tag: int
    blocks: list[Any]


Message: TypeAlias = (
    Hello
    | Welcome
    | Open
    | Opened
    | Get
    | Ready
    | Lease
    | Release
    | Status
    | Report
    | Fail
    | Alive
    | Close
    | Tell
    | Bye
    | Order
    | Reached
    | Seen
    | Need
    | Files
    | Resize
    | Handover
    | Handed
    | Times
    | Prepare
    | Claim
    | Claimed
    | Put
    | Distrust
    | Names
    | Named
)

FROM_CLIENT = (
    Hello,
    Open,
    Get,
    Lease,
    Release,
    Status,
    Close,
    Tell,
    Bye,
    Order,
    Reached,
    Seen,
    Files,
    Resize,
    Handover,
    Times,
    Prepare,
    Claim,
    Put,
    Distrust,
    Names,
)
FROM_SERVER = (
    Welcome,
    Opened,
    Ready,
    Report,
    Fail,
    Alive,
    Need,
    Handed,
    Claimed,
    Named,
)

READABLE, YOURS, ELSEWHERE, UNSHARED = range(4)
"""The states of samples in CLAIMED: the sample is in memory; the client shall prepare it and PUT
it; another session prepares it; the client shall prepare it for itself."""
KEY_SIZE = 32
"""The key in PREPARE has this many bytes."""
MOST_CLAIMED = 1024
"""A CLAIM or PUT has at most this many samples, which take half a millisecond of the daemon's
loop."""
MOST_PREPARED_SIZE = (1 << 32) - 1
"""A prepared sample has at most this many bytes."""

MOST_NAMED = 1024
"""A NAMES asks for at most this many blocks."""
RECORD_FILE, INDEX_FILE = 0, 1
"""The kinds of descriptors in FILES."""

_LARGE = frozenset(cls.TYPE for cls in (Open, *FROM_SERVER))
"""Types of messages of up to MAX_FRAME_SIZE; the others are smaller."""
_KINDS = {"int": int, "bytes": bytes, "dict[str, Any]": dict, "list[Any]": list, "list[str]": list}
_TABLE: dict[int, tuple[type[Any], tuple[type[Any], ...]]] = {
    cls.TYPE: (cls, tuple(_KINDS[str(f.type)] for f in fields(cls)))
    for cls in (*FROM_CLIENT, *FROM_SERVER)
}


def _fields_of(cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    names = [f.name for f in fields(cls)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


_FIELDS = {cls: _fields_of(cls) for cls in (*FROM_CLIENT, *FROM_SERVER)}

SHARD_DTYPE = np.dtype(
    [
        ("base", "<u8"),
        ("count", "<u8"),
        ("size", "<u8"),
        ("fingerprint", "<u8"),
        ("checksum_kind", "<u4"),
        ("domain", "<u4"),
    ]
)
"""One shard in OPENED: its samples [base, base + count) in the tables of the daemon, the size of
its file in bytes, the fingerprint of its content, its kind of checksum, its domain."""


IDENTITY_DTYPE = np.dtype(
    [("device", "<u8"), ("inode", "<u8"), ("size", "<u8"), ("mtime", "<i8"), ("ctime", "<i8")]
)
"""The state of one file in OPEN, as of stat(2); times in ns."""


def encode(message: Message) -> bytes:
    """Return the message as one frame.

    Raises: ProtocolError when it would exceed MAX_FRAME_SIZE, or holds what no frame can (text
        that is not Unicode, a number beyond 64 bits).
    """
    try:
        body: bytes = msgpack.packb(
            [message.TYPE, *_shallow(message)], use_bin_type=True, unicode_errors=_FILE_NAMES
        )
    except (ValueError, OverflowError, TypeError) as error:
        raise ProtocolError(f"cannot encode a {type(message).__name__} message: {error}") from error
    if len(body) > MAX_FRAME_SIZE:
        raise ProtocolError(
            f"a {type(message).__name__} message of {len(body)} bytes exceeds the limit of "
            f"{MAX_FRAME_SIZE} bytes",
            hint="name fewer paths or samples at once",
        )
    return _HEADER.pack(len(body)) + body


def _shallow(message: Message) -> tuple[Any, ...]:
    values: tuple[Any, ...] = _FIELDS[type(message)](message)
    return values


def _no_extension(code: int, content: bytes) -> Any:
    raise ValueError(f"extension of type {code}")


_HOW: dict[str, Any] = {
    "raw": False,
    "unicode_errors": _FILE_NAMES,
    "strict_map_key": True,
    "use_list": True,
    "ext_hook": _no_extension,
}
"""The options with which msgpack decodes bodies."""


class Decoder:
    """Turns a byte stream into messages.

    Args: accept: the classes of messages that the peer may send.
    """

    def __init__(self, accept: tuple[type[Any], ...]) -> None:
        self._accept = frozenset(accept)
        self._buffer: bytes | bytearray | memoryview = b""
        self._start = 0
        """The first byte of the buffer that was not taken."""
        self._steps: Generator[None, None, list[Any]] | None = None
        self._containers = 0
        self._most_containers = MAX_CONTAINERS

    @property
    def pending_size(self) -> int:
        """Bytes that were pushed and not taken."""
        return len(self._buffer) - self._start

    @property
    def unfinished(self) -> bool:
        """Whether `next` has decoded a part of a message, and must be called again."""
        return self._steps is not None

    def feed(self, chunk: bytes | bytearray | memoryview) -> list[Message]:
        """Take bytes as they arrive; return the messages that are complete now, in order.

        Raises: as `next`.
        """
        self.push(chunk)
        messages: list[Message] = []
        while True:
            message = self.next()
            if message is not None:
                messages.append(message)
            elif self._steps is None:
                self._keep()
                return messages

    def push(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take bytes as they arrive; `next` returns the messages in them."""
        if self._start == len(self._buffer):
            self._buffer, self._start = chunk, 0
        else:
            self._keep()
            assert isinstance(self._buffer, bytearray)
            self._buffer += chunk

    def _keep(self) -> None:
        """Keep what was not taken, and nothing that belongs to the caller."""
        if self._start == len(self._buffer):
            self._buffer = b""
        elif isinstance(self._buffer, bytearray):
            del self._buffer[: self._start]
        else:
            self._buffer = bytearray(memoryview(self._buffer)[self._start :])
        self._start = 0

    def next(self) -> Message | None:
        """Return the next message; None: it has not arrived yet, or is `unfinished`.

        A call takes a millisecond at most: a larger message is decoded by several.

        Raises: ProtocolError: a size over the limit, an invalid body, a message that the peer must
            not send, or a field of the wrong type.
        """
        whole, begin = self._buffer, self._start + 4
        if len(whole) < begin:
            return None
        (size,) = _HEADER.unpack_from(whole, self._start)
        if size > STEP_SIZE:
            if size > MAX_FRAME_SIZE:
                raise ProtocolError(
                    f"a frame of {size} bytes exceeds the limit of {MAX_FRAME_SIZE}"
                )
            if len(whole) < begin + 2:
                return None
            if size > MAX_MESSAGE_SIZE and whole[begin + 1] not in _LARGE:
                raise ProtocolError(
                    f"a message of {size} bytes exceeds the limit of {MAX_MESSAGE_SIZE}"
                )
        if len(whole) - begin < size:
            return None
        values = self._values(memoryview(whole)[begin : begin + size])
        if values is None:
            return None
        self._start = begin + size
        return self._message(values)

    def _counted(self, container: Any) -> Any:
        # An empty list takes one byte of a frame and 64 of memory.
        self._containers += 1
        if self._containers > self._most_containers:
            raise ValueError(f"more than {self._most_containers} lists and maps")
        return container

    def _values(self, body: memoryview) -> list[Any] | None:
        """Return the values of a body; None: the next call goes on with it."""
        large = len(body) > STEP_SIZE
        try:
            if large and body[1] == Open.TYPE:
                if self._steps is None:
                    self._containers, self._most_containers = 0, MAX_CONTAINERS
                    self._steps = self._stepwise(body)
                try:
                    next(self._steps)
                    return None
                except StopIteration as end:
                    self._steps = None
                    values = end.value
            else:
                # Large content must be bytes: a million numbers would take 20 ms.
                few = large and body[1] not in _LARGE
                self._containers = 0
                self._most_containers = FEW_VALUES if few else MAX_CONTAINERS
                most = FEW_VALUES if few else -1
                hook = self._counted
                values = msgpack.unpackb(
                    body,
                    max_array_len=most,
                    max_map_len=most,
                    list_hook=hook,
                    object_hook=hook,
                    **_HOW,
                )
                body.release()
        except (
            ValueError,
            TypeError,
            RecursionError,
            UnicodeDecodeError,
            msgpack.UnpackException,
        ) as error:
            raise ProtocolError(f"invalid frame, not msgpack: {error}") from None
        if type(values) is not list or not values or type(values[0]) is not int:
            raise ProtocolError("invalid frame: not an array with a message type")
        return values

    def _stepwise(self, body: memoryview) -> Generator[None, None, list[Any]]:
        """Decode a body of values and of maps of values and lists, some at a time."""
        unpacker = _Values(
            body,
            max_array_len=FEW_VALUES,
            max_map_len=FEW_VALUES,
            list_hook=self._counted,
            object_hook=self._counted,
            **_HOW,
        )
        values: list[Any] = []
        for _ in range(unpacker.header(unpacker.read_array_header, FEW_VALUES)):
            if not _is_map(unpacker.head()):
                values.append(unpacker.take(unpacker.unpack))
                continue
            entries: dict[str, Any] = {}
            values.append(entries)
            for _ in range(unpacker.header(unpacker.read_map_header, FEW_VALUES)):
                key = unpacker.take(unpacker.unpack)
                if type(key) is not str:
                    raise ValueError("a key that is not a string")
                if not _is_list(unpacker.head()):
                    entries[key] = unpacker.take(unpacker.unpack)
                    continue
                elements = entries[key] = []
                count = unpacker.header(unpacker.read_array_header, MAX_LIST_COUNT)
                while len(elements) < count:
                    some = range(min(STEP_COUNT, count - len(elements)))
                    elements += [unpacker.take(unpacker.unpack) for _ in some]
                    yield
        if unpacker.tell() < len(body):
            raise ValueError("more than one value")
        return values

    def _message(self, values: list[Any]) -> Message:
        known = _TABLE.get(values[0])
        if known is None or known[0] not in self._accept:
            raise ProtocolError(f"unexpected message of type {values[0]}")
        cls, kinds = known
        if len(values) != len(kinds) + 1:
            raise ProtocolError(
                f"invalid {cls.__name__} message: {len(values) - 1} fields instead of {len(kinds)}"
            )
        for value, kind in zip(values[1:], kinds, strict=True):
            if type(value) is not kind:
                raise ProtocolError(
                    f"invalid {cls.__name__} message: {type(value).__name__} instead of "
                    f"{kind.__name__}"
                )
        message: Message = cls(*values[1:])
        return message


class _Values(msgpack.Unpacker):  # type: ignore[misc]
    """Unpacks a body value by value."""

    def __init__(self, body: memoryview, **how: Any) -> None:
        super().__init__(max_buffer_size=len(body), **how)
        self._body = body
        self._fed = 0

    def take(self, read: Callable[[], Any]) -> Any:
        """Return the result of a method of this object. Raises: ValueError: nothing is left."""
        while True:
            try:
                return read()
            except msgpack.OutOfData:
                if self._fed == len(self._body):
                    raise ValueError("it ends within a value") from None
                part = self._body[self._fed : self._fed + STEP_SIZE]
                self.feed(part)
                self._fed += len(part)

    def header(self, read: Callable[[], int], most: int) -> int:
        """Return the number of values in the container that comes next."""
        count: int = self.take(read)
        if count > most:
            raise ValueError(f"{count} values in a list or map, of {most} at most")
        return count

    def head(self) -> int:
        """Return the first byte of the next value."""
        place: int = self.tell()
        return self._body[place] if place < len(self._body) else 0


def _is_list(head: int) -> bool:
    """Whether the first byte of a value says that it is an array."""
    return 0x90 <= head <= 0x9F or head in (0xDC, 0xDD)


def _is_map(head: int) -> bool:
    return 0x80 <= head <= 0x8F or head in (0xDE, 0xDF)


def pack_indices(indices: Int64s) -> bytes:
    """Pack sample indices; any length, i64 little-endian."""
    return indices.astype("<i8", copy=False).tobytes()


def unpack_indices(packed: bytes) -> Int64s:
    """Unpack sample indices; read-only.

    Raises: ProtocolError when the size is no multiple of 8 or there are more than MAX_GET_COUNT.
    """
    if len(packed) % 8 or len(packed) > 8 * MAX_GET_COUNT:
        raise ProtocolError(f"invalid indices: {len(packed)} bytes")
    return np.frombuffer(packed, "<i8").astype(np.int64, copy=False)


def pack_order(indices: Int64s) -> bytes:
    """Pack a piece of an order; u32 little-endian."""
    return indices.astype("<u4").tobytes()


def unpack_order(packed: bytes) -> Int64s:
    """Unpack a piece of an order.

    Raises: ProtocolError when the size is no multiple of 4 or there are more than MAX_GET_COUNT.
    """
    if len(packed) % 4 or len(packed) > 4 * MAX_GET_COUNT:
        raise ProtocolError(f"invalid piece of an order: {len(packed)} bytes")
    return np.frombuffer(packed, "<u4").astype(np.int64)


def unpack_numbers(packed: bytes, count: int, kind: str | np.dtype[Any]) -> NDArray[Any]:
    """Unpack `count` numbers of a little-endian kind such as "<u8"; read-only.

    Raises: ProtocolError when there is another number of them.
    """
    if len(packed) != count * np.dtype(kind).itemsize:
        raise ProtocolError(f"{len(packed)} bytes for {count} numbers of type {kind}")
    return np.frombuffer(packed, kind)


def pack_tags(tags: list[int]) -> bytes:
    """Pack request tags as u32."""
    return np.array(tags, "<u4").tobytes() if tags else b""


def unpack_tags(packed: bytes) -> list[int]:
    """Unpack request tags. Raises: ProtocolError when the size is no multiple of 4."""
    if len(packed) % 4:
        raise ProtocolError(f"invalid tags: {len(packed)} bytes")
    return np.frombuffer(packed, "<u4").tolist() if packed else []


def unpack_identities(packed: bytes, count: int) -> list[tuple[int, int, int, int, int]]:
    """Unpack the states of `count` files. Raises: ProtocolError when there are fewer or more."""
    rows: list[tuple[int, int, int, int, int]] = unpack_numbers(
        packed, count, IDENTITY_DTYPE
    ).tolist()
    return rows


def pack_positions(positions: list[int]) -> bytes:
    """Pack positions in an OPEN; u32."""
    return np.array(positions, "<u4").tobytes()


def unpack_positions(packed: bytes, count: int) -> list[int]:
    """Unpack the positions of a NEED in an OPEN of `count` files. Raises: ProtocolError."""
    if len(packed) % 4 or not 0 < len(packed) <= 4 * MOST_FILES:
        raise ProtocolError(f"invalid NEED message: {len(packed)} bytes of positions")
    positions: list[int] = np.frombuffer(packed, "<u4").tolist()
    if max(positions) >= count:
        raise ProtocolError(f"invalid NEED message: position {max(positions)} of {count} files")
    return positions


def common_version(hello: dict[str, Any], server: str) -> int:
    """Return the newest version that both sides speak.

    Args: hello: what the client says. server: name and release of the daemon.
    Raises: ProtocolError: there is none; it says which side is to be upgraded.
    """
    theirs, client = hello.get("versions"), hello.get("client")
    numbers = type(theirs) is list and all(type(version) is int for version in theirs)
    if not numbers or not theirs:
        raise ProtocolError(f"invalid HELLO message: versions {reprlib.repr(theirs)}")
    for version in VERSIONS:
        if version in theirs:
            return version
    named = f" ({client})" if isinstance(client, str) and 0 < len(client) <= 100 else ""
    old, new = f"this client{named}", f"the daemon ({server})"
    speaks = f"speaks {_spoken(theirs)} of the protocol", f"speaks {_spoken(VERSIONS)}"
    if min(theirs) > VERSIONS[0]:
        raise ProtocolError(f"upgrade {new}, which {speaks[1]}: {old} {speaks[0]}")
    raise ProtocolError(f"upgrade ffserve in {old}, which {speaks[0]}: {new} {speaks[1]}")


def _spoken(versions: Sequence[int]) -> str:
    """Return versions in words; a client may list any number of them."""
    if len(versions) == 1:
        return f"version {versions[0]}"
    return f"versions {min(versions)} to {max(versions)}"


def error_to_wire(error: FFServeError) -> list[Any]:
    """Return [code, message, path, index, offset, hint]; texts are cut to MOST_TEXT characters."""
    texts = (error.message, error.path, error.hint)
    message, path, hint = (text and text[:MOST_TEXT] for text in texts)
    return [error.code, message, path, error.index, error.offset, hint]


def error_from_wire(wire: Any) -> FFServeError:
    """Rebuild an error; an unknown code becomes a plain FFServeError.

    Raises: ProtocolError when the shape or a type is wrong.
    """
    if type(wire) is not list or len(wire) != 6:
        raise ProtocolError("malformed error: not an array of six fields")
    code, message, path, index, offset, hint = wire
    texts = all(value is None or type(value) is str for value in (path, hint))
    numbers = all(value is None or type(value) is int for value in (index, offset))
    if type(code) is not str or type(message) is not str or not texts or not numbers:
        raise ProtocolError("malformed error: a field has the wrong type")
    cls = BY_CODE.get(code, FFServeError)
    return cls(message, path=path, index=index, offset=offset, hint=hint)
