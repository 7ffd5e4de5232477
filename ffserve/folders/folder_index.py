"""The folder index: the last sample of a packed folder, which maps names to samples.

The original ends a packed folder with one more sample: the bytes ``piouhjgbr`` and a pickle of
nested OrderedDicts, name → sample index for a file, name → OrderedDict for a directory. The file
is untrusted and a pickle is a program, so ``pickle`` must not load it; its C implementation also
allocates memory by numbers in the input (such as a memo index of 2^31). ``decode`` interprets only
the opcodes that such an index consists of, for pickle protocols 2 to 5, refuses all others, and
uses memory in proportion to the size of the sample. Labels may stand behind the pickle
(``label_tables.py``).
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ffserve.errors import FormatError, UsageError
from ffserve.folders import label_tables

MAGIC = b"piouhjgbr"
SIZE_MAX = 1 << 30
"""The largest folder index that is read has this many bytes, enough for about 40 million names."""
DEPTH_MAX = 400
"""Directories are nested at most this deep; the original's pickling fails at about this depth as
well."""

NAME_LENGTH_MAX, PATH_LENGTH_MAX = 255, 4096
"""Characters of a file name and of a path. Linux has these limits for bytes (NAME_MAX, PATH_MAX),
and NTFS for UTF-16 units, which are no fewer than characters."""
TOTAL_LENGTH_MAX = 64 << 20
"""All paths together have at most this many characters and PATH_LENGTH_MAX more per file. Without
the bound an index of 1 MB that repeats memoized names has 40 GB of paths."""

_DAMAGED = "the file is damaged or hostile: restore it from a copy"

Folder = OrderedDict[str, Any]
"""name → sample index (int), or another Folder."""


class UnknownName(UsageError, LookupError):
    """No file of a packed folder has this name."""


def encode(structure: Folder) -> bytes:
    """Return the folder index, byte for byte as the original writes it.

    Args:    structure: nested OrderedDicts in the order of the samples.
    Raises:  UsageError: directories are nested too deeply.
    """
    try:
        return MAGIC + pickle.dumps(structure, protocol=4)
    except RecursionError:
        raise UsageError(
            "cannot store the names: directories are nested too deeply",
            hint=f"nest at most {DEPTH_MAX} directories",
        ) from None


def is_index(head: bytes) -> bool:
    """Whether a sample that begins with ``head`` is a folder index."""
    return head[: len(MAGIC)] == MAGIC and len(head) > len(MAGIC)


def check_size(size: int, path: str | None = None) -> None:
    """Raise FormatError if a folder index has too many bytes."""
    if size > SIZE_MAX:
        raise FormatError(
            f"the folder index has {size} bytes, more than the limit of {SIZE_MAX}",
            path=path,
            hint="the file is damaged, or pack the folder into more shards",
        )


def walk(folder: Folder, recursive: bool) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (parts of the name, node), depth first, without recursive calls."""
    stack: list[tuple[tuple[str, ...], Iterator[tuple[str, Any]]]] = [((), iter(folder.items()))]
    while stack:
        above, items = stack[-1]
        for name, node in items:
            yield (*above, name), node
            if recursive and isinstance(node, OrderedDict):
                stack.append(((*above, name), iter(node.items())))
                break
        else:
            stack.pop()


def names(structure: Folder) -> dict[int, str]:
    """Return the name of each sample, its parts joined by "/"."""
    files = walk(structure, recursive=True)
    return {node: "/".join(parts) for parts, node in files if isinstance(node, int)}


def decode(
    sample: bytes | memoryview, count: int, *, path: str | None = None, index: int | None = None
) -> Folder:
    """Decode a folder index.

    Args:
        sample: the whole sample, including the magic.
        count: number of samples that may be named; every index must be in [0, count).
        path, index: where the sample is, for errors.
    Returns: nested OrderedDicts, owned by the caller.
    Raises:  FormatError: anything that neither the original nor `pack` would have written.
    Cost:    one to two seconds per million names.
    """
    try:
        return _decoded(sample, count)[0]
    except FormatError as error:
        raise error.located(path=path, index=index) from None


def decode_labelled(
    sample: bytes | memoryview, count: int, *, path: str | None = None, index: int | None = None
) -> tuple[Folder, label_tables.Columns]:
    """Decode a folder index, and the labels of the files; none if there are none.

    Args, Raises, Cost: as of `decode`.
    """
    try:
        structure, rest = _decoded(sample, count)
        return structure, label_tables.decode(rest, count) if rest else {}
    except FormatError as error:
        raise error.located(path=path, index=index) from None


def _decoded(sample: bytes | memoryview, count: int) -> tuple[Folder, bytes]:
    """Return the folder, and the bytes behind the pickle."""
    check_size(len(sample))
    machine = _Machine(bytes(sample[len(MAGIC) :]))
    try:
        structure: Folder = machine.run()
    except ValueError as error:
        raise _bad(machine, str(error)) from None
    except (IndexError, KeyError, TypeError) as error:
        raise _bad(machine, f"{type(error).__name__}: {error}") from None
    _check(structure, count)
    return structure, machine.code[machine.at :]


class _Mark:
    """Marks the items of one SETITEMS on the stack."""


class _Maker:
    """Stands for the class OrderedDict on the stack."""


_MARK, _MAKER, _NO_ARGUMENTS = _Mark(), _Maker(), ()
_OPCODES = {value[0]: name for name, value in vars(pickle).items() if name.isupper()
            and isinstance(value, bytes) and len(value) == 1}  # fmt: skip


class _Machine:
    """Interpreter of the pickle opcodes of a folder index."""

    def __init__(self, code: bytes) -> None:
        self.code = code
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Run to the end; the opcodes that occur once per name are inlined for speed."""
        stack, code, memo, at = self.stack, self.code, self.memo, 0
        push = stack.append
        while True:
            opcode = code[at]
            at += 1
            if opcode == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif opcode == 0x8C:  # SHORT_BINUNICODE
                end = at + 1 + code[at]
                push(code[at + 1 : end].decode("utf-8", "surrogatepass"))
                at = end
            elif opcode == 0x4A:  # BININT
                push(int.from_bytes(code[at : at + 4], "little", signed=True))
                at += 4
            elif opcode == 0x4D:  # BININT2
                push(int.from_bytes(code[at : at + 2], "little"))
                at += 2
            elif opcode == 0x4B:  # BININT1
                push(code[at])
                at += 1
            elif opcode == 0x2E:  # STOP
                break
            else:
                self.at = at
                self._execute(opcode)
                at = self.at
            if at > len(code):
                raise ValueError("it is truncated")
        self.at = at
        labelled = code.startswith(label_tables.MARK, at)
        if len(stack) != 1 or (at != len(code) and not labelled):
            raise ValueError("bytes or values are left after STOP")
        return stack.pop()

    def _execute(self, opcode: int) -> None:  # noqa: C901 (one case per opcode)
        stack = self.stack
        name = _OPCODES.get(opcode, "unknown")
        if name == "REDUCE":
            arguments, maker = stack.pop(), stack.pop()
            if maker is not _MAKER or arguments != _NO_ARGUMENTS:
                raise ValueError("it creates an object other than an empty OrderedDict")
            stack.append(OrderedDict())
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "SETITEMS":
            self._set_items()
        elif name == "EMPTY_TUPLE":
            stack.append(_NO_ARGUMENTS)
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[self._number(1 if name == "BINGET" else 4)])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[self._number(1 if name == "BINPUT" else 4)] = stack[-1]
        elif name in ("BINUNICODE", "BINUNICODE8"):
            stack.append(self._text(self._number(4 if name == "BINUNICODE" else 8)))
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self._set(stack[-1], key, value)
        elif name == "LONG1":
            stack.append(int.from_bytes(self._take(self._number(1)), "little", signed=True))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            self._global(module, attribute)
        elif name == "GLOBAL":
            self._global(self._line(), self._line())
        elif name == "PROTO":
            if self._number(1) > 5:
                raise ValueError("its pickle protocol is later than 5")
        elif name == "FRAME":
            if self._number(8) > len(self.code) - self.at:
                raise ValueError("it is truncated")
        else:
            raise ValueError(f"opcode {name} ({opcode:#04x}) is not allowed")

    def _global(self, module: Any, attribute: Any) -> None:
        if (module, attribute) != ("collections", "OrderedDict"):
            raise ValueError(f"global {module!r}.{attribute!r} is not allowed")
        self.stack.append(_MAKER)

    def _set_items(self) -> None:
        stack = self.stack
        mark = len(stack) - 1
        while stack[mark] is not _MARK:
            mark -= 1
            if mark < 1:
                raise ValueError("SETITEMS without MARK")
        names, values = stack[mark + 1 :: 2], stack[mark + 2 :: 2]
        del stack[mark:]
        if len(names) != len(values):
            raise ValueError("a name without a value")
        for name, value in zip(names, values, strict=True):
            self._set(stack[-1], name, value)

    def _set(self, target: Any, key: Any, value: Any) -> None:
        if type(target) is not OrderedDict or type(key) is not str:
            raise ValueError("a name is not text")
        if type(value) is not int and type(value) is not OrderedDict:
            raise ValueError(f"the value of {key!r} is {type(value).__name__}")
        target[key] = value

    def _take(self, size: int) -> bytes:
        part = self.code[self.at : self.at + size]
        if len(part) != size:
            raise ValueError("it is truncated")
        self.at += size
        return part

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _text(self, size: int) -> str:
        return self._take(size).decode("utf-8", "surrogatepass")

    def _line(self) -> str:
        end = self.code.index(b"\n", self.at)
        line = self._take(end - self.at).decode("ascii")
        self.at += 1
        return line


def _check(structure: Any, count: int) -> None:
    """Check the tree: no loops, no shared directories, no names outside of it, no bad indices, and
    no more text in all paths than files have."""
    if type(structure) is not OrderedDict:
        raise FormatError("invalid folder index: the top is not a directory", hint=_DAMAGED)
    seen = {id(structure)}
    level, left = [(structure, 0)], TOTAL_LENGTH_MAX + PATH_LENGTH_MAX * count
    for _ in range(DEPTH_MAX + 1):
        below = []
        for folder, above in level:
            for name, value in folder.items():
                length = above + len(name)
                left -= length
                if len(name) > NAME_LENGTH_MAX or length > PATH_LENGTH_MAX or left < 0:
                    raise FormatError("invalid folder index: its names are too long", hint=_DAMAGED)
                if name in ("", ".", "..") or "/" in name or "\0" in name:
                    raise FormatError(f"invalid folder index: name {name!r}", hint=_DAMAGED)
                if type(value) is int:
                    if not 0 <= value < count:
                        raise FormatError(
                            f"invalid folder index: {name!r} is sample {value} of {count}",
                            hint=_DAMAGED,
                        )
                elif id(value) in seen:
                    raise FormatError(f"invalid folder index: {name!r} occurs twice", hint=_DAMAGED)
                else:
                    seen.add(id(value))
                    below.append((value, length + 1))
        if not below:
            return
        level = below
    raise FormatError(
        f"invalid folder index: directories are nested more than {DEPTH_MAX} deep", hint=_DAMAGED
    )


def _bad(machine: _Machine, what: str) -> FormatError:
    return FormatError(
        f"invalid folder index: {what}, at byte {machine.at} of its pickle",
        hint=_DAMAGED,
    )
