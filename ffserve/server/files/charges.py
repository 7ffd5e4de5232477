"""Charges: tables of open files are charged to a user before memory is taken for them.

A file says how many samples it has, and a sample takes no byte of its disk if the file has holes or
is compressed well. So what tables cost is not bounded by what the file costs its owner. Two
accounts of each user bound it: all tables, and those that the allocated bytes of the file do not
account for. `limits.py` has the numbers.

A shard is charged to one user, so that the sum of all accounts is the memory that the tables take:
to the user who opened it, then to another who has it open, and at last to the user who closed it,
as long as its samples are kept.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from ffserve.config import format_size
from ffserve.errors import ReadError, UsageError
from ffserve.limits import (
    MOST_UNBACKED,
    OPENING_SAMPLE_SIZE,
    OTHERS_SHARE,
    SCANNED_ALLOWED,
    SCANNED_PER_BYTE,
    TABLE_SAMPLE_SIZE,
    TABLES_PER_BYTE,
)

STEP = 64 << 10
"""Growing tables are charged in steps of this many bytes."""


class TablesFull(ReadError):
    """A user has no room for the tables of a file. missing: this many bytes."""

    missing = 0


class TableAccounts:
    """The tables of all users. Threads may call it.

    Args: most: bytes for all of them together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._held: Counter[int] = Counter()
        self._unbacked: Counter[int] = Counter()

    def held(self, uid: int) -> int:
        """Return the bytes that are charged to a user."""
        return self._held[uid]

    def take(self, uid: int, size: int, unbacked: int, *, trusted: bool) -> tuple[int, int] | None:
        """Charge bytes to a user, `unbacked` of them to the second account as well.

        Returns: None; or, if there is no room and nothing was charged, how many bytes are left for
            this user in both accounts.
        """
        with self._lock:
            left = self.most - self._held.total()
            if not trusted:
                left = min(left, (OTHERS_SHARE * left - self._held[uid]) // (OTHERS_SHARE + 1))
            unbacked_left = left if trusted else MOST_UNBACKED - self._unbacked[uid]
            if (size > 0 and size > left) or (unbacked > 0 and unbacked > unbacked_left):
                return max(left, 0), max(unbacked_left, 0)
            self._add(uid, size, unbacked)
            return None

    def move(self, size: int, unbacked: int, before: int, after: int | None) -> None:
        """Charge bytes to another user; None: to nobody any more."""
        with self._lock:
            self._add(before, -size, -unbacked)
            if after is not None:
                self._add(after, size, unbacked)

    def _add(self, uid: int, size: int, unbacked: int) -> None:
        for account, amount in ((self._held, size), (self._unbacked, unbacked)):
            account[uid] += amount
            if not account[uid]:
                del account[uid]


def _all() -> int:
    return 1 << 62


class TableCharge:
    """What the tables of one file cost, and who pays.

    Args:
        uid, trusted: who opens the file; whether that is an administrator.
        path: of the file, for errors.
        allocated: returns the bytes of the file that are stored anywhere.
        wanted: whether the session still waits for the file.
        sparse: whether scans are bounded by the allocated bytes; else what was read counts as
            stored, too, such as an index in the store.
    """

    __slots__ = (
        "_accounts", "_allocated", "_more", "_path", "_records", "_sparse", "_stored", "_trusted",
        "_unbacked", "_wanted", "read_size", "size", "uid",
    )  # fmt: skip

    def __init__(
        self,
        accounts: TableAccounts,
        uid: int,
        path: str,
        *,
        trusted: bool,
        allocated: Callable[[], int] = _all,
        wanted: Callable[[], bool] = lambda: True,
        sparse: bool = True,
    ) -> None:
        self._accounts = accounts
        self._path = path
        self._trusted = trusted
        self._allocated = allocated
        self._wanted = wanted
        self._sparse = sparse
        self._records = self._more = self._unbacked = self._stored = 0
        self.uid = uid
        self.size = 0
        """Bytes that are charged."""
        self.read_size = 0
        """Bytes that were read for the tables."""

    def admit(self, records: int, more: int = 0, /) -> None:
        """Charge what the tables need by now; see `formats.base.Admit`.

        Raises: TablesFull: the user has no room for them.
        """
        self._records, self._more = records, more
        size = records * (TABLE_SAMPLE_SIZE + OPENING_SAMPLE_SIZE) + more
        if size > self.size:
            self._set(-(-size // STEP) * STEP)

    def settle(self) -> None:
        """Charge what is left to be kept, now that the tables were read."""
        self._set(self._records * TABLE_SAMPLE_SIZE + self._more)

    def _set(self, size: int) -> None:
        unbacked = 0
        if size > STEP:
            if size - STEP > TABLES_PER_BYTE * self._stored:
                self._stored = self._allocated() + (0 if self._sparse else self.read_size)
            unbacked = max(size - STEP - TABLES_PER_BYTE * self._stored, 0)
        more = size - self.size, unbacked - self._unbacked
        left = self._accounts.take(self.uid, *more, trusted=self._trusted)
        if left is not None:
            raise self._full(size, more, left)
        self.size, self._unbacked = size, unbacked

    def _full(self, size: int, more: tuple[int, int], left: tuple[int, int]) -> TablesFull:
        tables = f"the tables of this file take {format_size(size)} or more of the daemon's memory"
        room = format_size(left[0] + self.size)
        held = format_size(self._accounts.held(self.uid) - self.size)
        if more[0] > left[0]:
            error = TablesFull(
                f"{tables}; user {self.uid} has tables of {held} for other files, "
                f"and {room} are left for this one",
                path=self._path,
                hint="close readers of other data sets, or raise the daemon's --arena",
            )
            error.missing = more[0] - left[0]
            return error
        error = TablesFull(
            f"{tables}, but only {format_size(self._stored)} of the file are stored: it has "
            f"holes, blocks that are in it several times, or samples that are nearly all equal. "
            f"Tables of such files may take {format_size(MOST_UNBACKED)} for a user; "
            f"{format_size(left[1] + self._unbacked)} are left for user {self.uid}",
            path=self._path,
            hint="write the file again without holes (cp --sparse=never), or close readers of "
            "such files; if it was just written, try again in a few seconds",
        )
        error.missing = more[1] - left[1]
        return error

    def reading(self, size: int) -> None:
        """Note that a scan reads this many bytes.

        Raises: UsageError: nobody waits for the file any more. ReadError: the scan reads holes.
        """
        if not self._wanted():
            raise UsageError("the session has ended")
        self.read_size += size
        if self._sparse and self.read_size > SCANNED_ALLOWED:
            allocated = self._allocated()
            if self.read_size > SCANNED_ALLOWED + SCANNED_PER_BYTE * allocated:
                raise ReadError(
                    f"a scan of this file has read {format_size(self.read_size)}, but only "
                    f"{format_size(allocated)} of it are stored: the file consists of holes",
                    path=self._path,
                    hint="write the file again without holes (cp --sparse=never), and without "
                    "bytes between its records",
                )

    def move(self, uid: int) -> None:
        """Charge another user."""
        self._accounts.move(self.size, self._unbacked, self.uid, uid)
        self.uid = uid

    def give(self) -> None:
        """Give back what was charged."""
        self._accounts.move(self.size, self._unbacked, self.uid, None)
        self.size = self._unbacked = 0


def charge_all(
    accounts: TableAccounts, uid: int, sizes: Sequence[int], paths: Sequence[str], *, trusted: bool
) -> list[TableCharge]:
    """Charge the tables of small files, which were opened together.

    Raises: TablesFull: the user has no room for them; then none is charged.
    """
    charges = [TableCharge(accounts, uid, path, trusted=trusted) for path in paths]
    if charges:
        charges[0]._set(sum(sizes))
        for charge, size in zip(charges, sizes, strict=True):
            charge.size = size
    return charges
