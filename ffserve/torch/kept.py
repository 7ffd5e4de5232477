"""`cache`: the items of any map-style dataset, kept by the daemon for all processes of the user.

The dataset makes an item where no process has made it yet. What it returns travels as prepared
samples do (`prepared.py`), and is theirs in every other respect: who makes what, what is compared,
what is evicted.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch.utils.data

from ffserve import __version__
from ffserve.client.public import KeptItems
from ffserve.dtypes import Int64s
from ffserve.errors import UsageError
from ffserve.torch.prepared import ENCODING, name_of, pieces, text_of, value

log = logging.getLogger("ffserve")

REFUSED_COUNT = 64
"""If none of so many items can be kept, a process asks the dataset alone from then on."""


def cache(dataset: Any, *, version: Hashable, name: str | None = None) -> CachedDataset:
    """Have the daemon keep what a dataset returns.

    All processes of the user share the items of datasets with the same name, version and length,
    and with the same releases of ffserve, torch and numpy. So put whatever else an item depends on
    into the version: paths, sizes, the version of a library. Items must be the same each time, so
    wrap the deterministic part, and do the random part afterwards.

    Args:
        dataset: map-style: it has ``__getitem__`` for integers, and ``__len__``.
        version: numbers, strings, tuples of them.
        name: of the items; None: that of the class, and the dataset's text (`repr`) if it has one
            of its own.
    Returns: a dataset of the same length and items; other attributes are the dataset's. Kept are
        bytes, strings, numbers, None, arrays, dense tensors, and tuples, lists and dicts of these;
        arrays come back contiguous. Other items are made each time, and a warning says so once.
        Without a daemon all of them are.
    Raises:  UsageError: the dataset has no length, or the version no text of its own.
    """
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"a {type(dataset).__name__} cannot be cached: its samples have no indices",
            hint="cache a dataset with __getitem__ and __len__",
        )
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= 200):
        raise UsageError(f"name must be a string of 1 to 200 characters, not {name!r}")
    shown, text = name or name_of(type(dataset)), text_of(version, "version")
    about = "" if name is not None or " at 0x" in repr(dataset) else repr(dataset)
    count = len(dataset)
    parts = (
        "cache",
        ENCODING,
        __version__,
        shown,
        about,
        text,
        count,
        torch.__version__,
        np.__version__,
    )
    key = hashlib.sha256(repr(parts).encode(errors="surrogatepass")).digest()
    return CachedDataset(dataset, KeptItems(count, key, shown, _ItemPieces(shown), value))


class _ItemPieces:
    """The bytes of items, none of those that cannot be kept. name: of the items."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refused = self.kept = 0

    def __call__(self, item: Any) -> Sequence[Any]:
        try:
            found = pieces(item)
        except UsageError as error:
            if not self.refused:
                log.warning("items of %s are not kept: %s", self.name, error)
            self.refused += 1
            return ()
        self.kept += 1
        return found


class CachedDataset(torch.utils.data.Dataset[Any]):
    """A dataset whose items the daemon keeps. Made by ``cache``."""

    def __init__(self, dataset: Any, items: KeptItems) -> None:
        self.dataset = dataset
        self._items = items

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """Return an item; anything but an integer goes to the dataset."""
        try:
            number = operator.index(index)
        except TypeError:
            return self.dataset[index]
        return self.__getitems__([number])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of a batch; torch's loader asks for these."""
        numbers = self._numbers(indices)
        made: _ItemPieces = self._items.pieces  # type: ignore[assignment]
        if numbers is None or (made.refused >= REFUSED_COUNT and not made.kept):
            return self._make(indices)
        return self._items.items(numbers, lambda some: self._make(some.tolist()))

    def _numbers(self, indices: Sequence[int]) -> Int64s | None:
        """Return the numbers of items; None: the dataset raises the error."""
        try:
            numbers = np.array(indices, np.int64)
        except (TypeError, ValueError, OverflowError):
            return None
        count = self._items.count
        if not len(numbers) or int(numbers.min()) < -count or int(numbers.max()) >= count:
            return None
        return np.where(numbers < 0, numbers + count, numbers)

    def _make(self, indices: Sequence[int]) -> list[Any]:
        batch = getattr(self.dataset, "__getitems__", None)
        made = [self.dataset[i] for i in indices] if batch is None else list(batch(list(indices)))
        if len(made) != len(indices):
            raise UsageError(
                f"{type(self.dataset).__name__} answered {len(indices)} indices with {len(made)} "
                "items",
                hint="__getitems__ must return one item per index, in order",
            )
        return made

    def announce(
        self, order: Int64s, epoch: int = 0, *, name: str | None = None, replacement: bool = False
    ) -> None:
        """Announce which items will be asked for, in order; as of ``ffserve.torch.Dataset``."""
        if len(order):
            self._items.announce(np.asarray(order, np.int64), epoch, name, replacement)

    def reached(self, epoch: int, position: int) -> None:
        """Report that the first items of an announced order are used."""
        self._items.reached(epoch, position)
