"""Preparations: how a user's samples are prepared, and whether the results are shared.

Clients make the samples of a prepared shard (`shards.prepared_shard`) by one preparation.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakValueDictionary

from ffserve.limits import MOST_DISTRUSTED, MOST_USER_DISTRUSTED
from ffserve.server.users.peers import Account, Owner, account_of

LEAST_SAVED_S = 1e-15
"""The least saving per byte. Times are divided by it, and a client may report that preparing took
no time (for empty samples it is 0)."""


@dataclass(eq=False)
class Preparation:
    """A way in which a user's samples are prepared.

    key: the client's key for it. trusted: False once it has given two results for one sample.
    count, cost_s: samples that were prepared in this way, and how long that took. shared_count:
    samples that were found in memory instead.
    """

    owner: Owner
    key: bytes
    name: str
    trusted: bool = True
    count: int = 0
    cost_s: float = 0.0
    size: int = 0
    """Bytes of the samples that were prepared."""
    shared_count: int = 0

    raw_size: float = 0.0
    """Mean bytes of a raw sample."""

    def saved_per_byte_s(self, miss_s: float) -> float:
        """Return the seconds that each byte in memory saves: of preparing, and of reading the raw
        sample. Args: miss_s: seconds in which a byte is read."""
        if not self.size:
            return miss_s
        saved_s = (self.cost_s + self.count * self.raw_size * miss_s) / self.size
        return max(saved_s, LEAST_SAVED_S)

    @property
    def saved_s(self) -> float:
        """Seconds of preparing that sharing has saved, by the mean cost."""
        return self.shared_count * self.mean_cost_s

    @property
    def mean_cost_s(self) -> float:
        """Seconds in which one sample is prepared, on average."""
        return self.cost_s / max(self.count, 1)


class Preparations:
    """The preparations of all users."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[Owner, bytes], Preparation] = WeakValueDictionary()
        self._distrusted: dict[Account, OrderedDict[tuple[Owner, bytes], Preparation]] = {}

    def obtain(self, owner: Owner, key: bytes, name: str) -> Preparation:
        """Return a user's preparation of this key; the first name that it was given stays."""
        found = self._known.get((owner, key))
        if found is None:
            found = self._known[owner, key] = Preparation(owner, key, name)
        return found

    def distrust(self, preparation: Preparation) -> None:
        """Share no sample of a preparation from now on, also when it is opened again later."""
        preparation.trusted = False
        account = account_of(preparation.owner)
        mine = self._distrusted.setdefault(account, OrderedDict())
        mine[preparation.owner, preparation.key] = preparation
        if len(mine) > MOST_USER_DISTRUSTED:
            mine.popitem(last=False)
        if sum(map(len, self._distrusted.values())) > MOST_DISTRUSTED:
            whose, most = max(self._distrusted.items(), key=lambda each: len(each[1]))
            most.popitem(last=False)
            if not most:
                del self._distrusted[whose]

    @property
    def all(self) -> list[Preparation]:
        """Return the preparations that are in use, or whose samples are in memory."""
        return list(self._known.values())
