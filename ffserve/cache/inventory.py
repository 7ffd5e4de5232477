"""Inventory: a description of a daemon's memory, in a memory file, for the next daemon.

The samples themselves need no record: an entry of the directory that is readable says which bytes
of which arena are which sample, at every moment, since clients act on it at every moment. What
they do not need, and a successor does, stands here:

    header     layout, sizes, and under which terms samples are shared
    domains    number, serial and owner of each
    slabs      how each is cut into slots (`arena.SlabTables`)
    slots      the state of each (`cache.Cache.state`): what the kernel may still write to; and the
               number of leases on each
    shards     which file the samples of a run of numbers come from, and how they are read

The slots' states are the daemon's own table, so a miss costs no write that it did not before.
A row is valid while its first field is not 0; that field is written last and cleared first, so a
row is whole whenever the process is killed. The numbers are checked by who reads them: the file may
hold anything. docs/decisions/restart.md has the argument.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.arena import SMALLEST_SLOT, SlabTables
from ffserve.dtypes import Bytes, Int32s, Int64s
from ffserve.errors import ReadError
from ffserve.limits import MOST_DOMAINS, MOST_SHARDS
from ffserve.system.memfd import MemoryFile, SharedMemory

MAGIC = int.from_bytes(b"FFSERVE\0", "little")
LAYOUT = 1
"""Changes whenever a table in shared memory, or the meaning of a number in one, does: those here,
the directory, the index, the sizes of slots."""
NAME = "ffserve-inventory"

SERVING, IN_DOUBT = 1, 2
"""The states of a daemon in the header. A daemon is in doubt if it ended because its tables may be
wrong."""

HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("layout", "<u4"),
        ("state", "<u4"),
        ("generation", "<i8"),
        ("attempts", "<i8"),
        ("slab_size", "<i8"),
        ("slabs", "<i8"),
        ("capacity", "<i8"),
        ("next_number", "<i8"),
        ("shard_rows", "<i8"),
        ("own_mount", "<i8"),
        ("host_mount", "<i8"),
        ("terms", "V32"),
    ]
)
"""generation: of daemons that had this memory. attempts: daemons that have begun to take it over
since one did. next_number: samples below it had a number once. shard_rows: rows that were ever
used. own_mount, host_mount: what the namespaces OWN and HOST were, see
`server/users/peers.py`. terms: see `Terms`."""
UNUSED, COMMON, OWNED, UNCLAIMED = 0, 1, 2, 3
DOMAIN = np.dtype(
    [("kind", "<i8"), ("serial", "<i8"), ("number", "<i8"), ("uid", "<i8"), ("namespace", "<i8")]
)
SHARD = np.dtype(
    [
        ("base", "<i8"),  # + 1
        ("count", "<i8"),
        ("device", "<u8"),
        ("inode", "<u8"),
        ("size", "<i8"),
        ("mtime", "<i8"),
        ("ctime", "<i8"),
        ("domain", "<i8"),
        ("fingerprint", "<u8"),
        ("payload_size", "<i8"),
        ("alignment", "<i8"),
        ("group", "<i8"),
        ("checksum_kind", "<i4"),
        ("flags", "<i4"),
        ("asked", "S16"),
        ("format", "S16"),
        ("path", "S376"),
    ]
)
"""A shard. domain: its serial. asked: the format in its key. path: the name, or its end."""
_SHARD = struct.Struct("<qqQQqqqqQqqqii16s16s376s")
assert _SHARD.size == SHARD.itemsize == 512
VERIFIED, TOLERANT, CHUNKED, PREPARED = 1, 2, 4, 8
"""The flags of a shard. PREPARED: clients made its samples of those of the file."""
_PATH_SIZE = SHARD["path"].itemsize

Rows: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A shard as a row has it; see SHARD. identity: device, inode, size, mtime, ctime."""

    base: int
    count: int
    identity: tuple[int, int, int, int, int]
    domain: int
    fingerprint: int
    payload_size: int
    alignment: int
    group: int
    checksum_kind: int
    flags: int
    asked: str
    format: str
    path: str


class Inventory:
    """The tables of one inventory.

    Args: file: checked by `adopt`, or new.
    """

    def __init__(self, file: MemoryFile, slabs: int, slots: int) -> None:
        places, size = _places(slabs, slots)
        self._memory = SharedMemory(NAME, size, file)
        self.file = file

        def table(name: str, dtype: Any, count: int) -> Rows:
            start, item = places[name], np.dtype(dtype).itemsize
            return self._memory.array[start : start + count * item].view(dtype)

        self.header = table("header", HEADER, 1)
        self._domains = table("domains", DOMAIN, MOST_DOMAINS)
        self.slabs = SlabTables(
            table("sizes", np.int64, slabs),
            table("runs", np.int64, slabs),
            table("slab_domains", np.int32, slabs),
        )
        self.states: Bytes = table("states", np.uint8, slots)
        self.leases: Int32s = table("leases", np.int32, slots)
        self._shards = table("shards", SHARD, MOST_SHARDS)
        self._shard_bytes = self._shards.view(np.uint8).data
        self._row_of: dict[int, int] = {}
        """The row of a shard, by its first sample."""
        self._free_rows: list[int] = []
        self._domain_rows: dict[int, int] = {}
        """By serial."""

    @classmethod
    def create(cls, slab_size: int, slabs: int, mounts: tuple[int, int], terms: bytes) -> Inventory:
        """Make one for a daemon with new memory, whose capacity is entered later. Raises:
        ReadError."""
        slots = slabs * (slab_size // SMALLEST_SLOT)
        made = cls(MemoryFile(NAME, _places(slabs, slots)[1]), slabs, slots)
        header = made.header
        header["slab_size"], header["slabs"] = slab_size, slabs
        header["generation"], header["state"] = 1, SERVING
        header["layout"], header["terms"] = LAYOUT, terms
        header["own_mount"], header["host_mount"] = mounts
        header["magic"] = MAGIC
        return made

    @classmethod
    def adopt(cls, fd: int, size: int) -> Inventory:
        """Take over a predecessor's, of which only magic, layout and sizes are checked.

        Args: fd: becomes the object's. size: of its file.
        Raises: ReadError: it is none of this layout; the descriptor is still the caller's then.
        """
        file = MemoryFile.adopted(NAME, fd, size)
        if size < mmap.PAGESIZE:
            raise ReadError(f"the inventory has {size} bytes, fewer than its header needs")
        with mmap.mmap(fd, mmap.PAGESIZE, access=mmap.ACCESS_READ) as page:
            header = np.frombuffer(bytes(page), HEADER, 1)[0]
        if int(header["magic"]) != MAGIC:
            raise ReadError("the memory is not an inventory: it begins with other bytes")
        if int(header["layout"]) != LAYOUT:
            raise ReadError(
                f"the memory has layout version {header['layout']}, this version of ffserve has "
                f"{LAYOUT}"
            )
        slab_size, slabs = int(header["slab_size"]), int(header["slabs"])
        sound = slab_size.bit_count() == 1 and SMALLEST_SLOT <= slab_size <= 1 << 32
        if not sound or not 0 < slabs <= 1 << 26:
            raise ReadError(f"the inventory has invalid sizes: {slabs} slabs of {slab_size} bytes")
        slots = slabs * (slab_size // SMALLEST_SLOT)
        if slots >= 1 << 31 or _places(slabs, slots)[1] != size:
            raise ReadError(f"the inventory has {size} bytes, which does not fit its {slabs} slabs")
        return cls(file, slabs, slots)

    def close(self) -> None:
        """Close the file. The memory stays mapped until the last array over it is gone."""
        self._memory.close()

    def get(self, name: str) -> int:
        """Return a number of the header."""
        return int(self.header[name][0])

    def begin(self) -> None:
        """A daemon begins to take the memory over."""
        self.header["attempts"] += 1

    def taken_over(self, mounts: tuple[int, int]) -> None:
        """A daemon has taken the memory over."""
        self.header["own_mount"], self.header["host_mount"] = mounts
        self.header["generation"] += 1
        self.header["state"], self.header["attempts"] = SERVING, 0

    def doubt(self) -> None:
        """The tables of this daemon may be wrong."""
        self.header["state"] = IN_DOUBT

    def held(self) -> Int64s:
        """Return the slots that have a state."""
        return self._used(self.states)

    def leased(self) -> Int64s:
        """Return the slots that have leases."""
        return self._used(self.leases)

    def _used(self, table: NDArray[Any]) -> Int64s:
        """Return where a table is not 0. Parts that were never written take no memory by that."""
        start = table.__array_interface__["data"][0] - self._memory.address
        low, end = start, start + table.nbytes
        parts = [np.zeros(0, np.int64)]
        with contextlib.suppress(OSError):  # nothing was written behind it
            while (low := os.lseek(self.file.fd, low, os.SEEK_DATA)) < end:
                high = min(os.lseek(self.file.fd, low, os.SEEK_HOLE), end)
                first = (low - start) // table.itemsize
                part = table[first : (high - start) // table.itemsize]
                parts.append(first + np.flatnonzero(part))
                low = high
        return np.concatenate(parts)

    # ---- domains ----------------------------------------------------------------------------

    def domains(self) -> list[tuple[int, int, int, int, int]]:
        """Return the valid rows of domains, which are not checked: as DOMAIN has them."""
        self._domain_rows = {
            int(row["serial"]): k for k, row in enumerate(self._domains) if row["kind"] != UNUSED
        }
        rows = self._domains[sorted(self._domain_rows.values())]
        return [tuple(int(value) for value in row.tolist()) for row in rows]  # type: ignore[misc]

    def add_domain(
        self, serial: int, number: int, kind: int, owner: tuple[int, int] | None
    ) -> None:
        """Enter a domain, or change its owner. Further ones than MOST_DOMAINS are left out."""
        row = self._domain_rows.get(serial)
        if row is None:
            unused = np.flatnonzero(self._domains["kind"] == UNUSED)
            if not len(unused):
                return
            row = self._domain_rows[serial] = int(unused[0])
        self._domains["kind"][row] = UNUSED
        self._domains["serial"][row], self._domains["number"][row] = serial, number
        self._domains["uid"][row], self._domains["namespace"][row] = owner or (0, 0)
        self._domains["kind"][row] = kind

    def remove_domain(self, serial: int) -> None:
        """A domain is not there any more."""
        row = self._domain_rows.pop(serial, None)
        if row is not None:
            self._domains["kind"][row] = UNUSED

    # ---- shards -----------------------------------------------------------------------------

    def shards(self) -> list[ShardRow]:
        """Return the valid rows of shards, whose numbers are not checked. Of two with one base, the
        second is removed."""
        self.header["shard_rows"] = min(max(self.get("shard_rows"), 0), MOST_SHARDS)
        rows = self._shards[: self.get("shard_rows")]
        found = []
        for k, row in enumerate(rows.tolist()):
            base = row[0] - 1
            if base < 0 or base in self._row_of:
                rows["base"][k] = 0
                self._free_rows.append(k)
                continue
            self._row_of[base] = k
            asked, name, path = (text.decode(errors="surrogateescape") for text in row[14:])
            numbers: tuple[int, int, int, int, int, int, int] = row[7:14]
            found.append(ShardRow(base, row[1], row[2:7], *numbers, asked, name, path))
        return found

    def add_shard(self, row: ShardRow) -> None:
        """Enter a shard of which no sample is readable yet."""
        if self._free_rows:
            k = self._free_rows.pop()
        else:
            k = self.get("shard_rows")
            if k >= MOST_SHARDS:
                return
            self.header["shard_rows"] = k + 1
        path = row.path.encode(errors="surrogateescape")
        _SHARD.pack_into(
            self._shard_bytes,
            k * _SHARD.size,
            0,
            row.count,
            *row.identity,
            row.domain,
            row.fingerprint,
            row.payload_size,
            row.alignment,
            row.group,
            row.checksum_kind,
            row.flags,
            row.asked.encode(),
            row.format.encode(),
            path[-_PATH_SIZE:],
        )
        self._shards["base"][k] = row.base + 1
        self._row_of[row.base] = k

    def remove_shard(self, base: int) -> None:
        """A shard is not there any more, or not worth keeping."""
        k = self._row_of.pop(base, None)
        if k is not None:
            self._shards["base"][k] = 0
            self._free_rows.append(k)

    def set_group(self, bases: Iterable[int], group: int) -> None:
        """These shards belong to another group."""
        rows = [k for base in bases if (k := self._row_of.get(base)) is not None]
        self._shards["group"][rows] = group


def _places(slabs: int, slots: int) -> tuple[dict[str, int], int]:
    """Return where each table begins, on a page of its own, and where the last one ends."""
    sizes = {
        "header": HEADER.itemsize,
        "domains": MOST_DOMAINS * DOMAIN.itemsize,
        "sizes": 8 * slabs,
        "runs": 8 * slabs,
        "slab_domains": 4 * slabs,
        "states": slots,
        "leases": 4 * slots,
        "shards": MOST_SHARDS * SHARD.itemsize,
    }
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = end
        end = -(-(end + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    return places, end
