"""Audit of a loader: it compares the samples of an epoch with the indices of its sampler.

The loader runs with all it has (workers, threads, collation, memory transfer) over its own data
set; each sample carries its index along. So the audit counts the samples that the training loop
would get.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.utils.data
from torch.utils.data import BatchSampler

from ffserve.errors import UsageError
from ffserve.order import design_effect, displacement, together
from ffserve.torch.samplers import EpochSampler

_OPTIONS = ("pin_memory", "timeout", "worker_init_fn", "generator", "num_workers", "in_order")
_OPTIONS_OF_OURS = ("threads", "bundle")
_SHOWN = 10


@dataclass(frozen=True)
class LoaderAudit:
    """The result of ``loader_audit``.

    Attributes:
        samples, batches: delivered.
        lost: indices that the sampler handed out and the loader did not deliver, once for each
            missing sample.
        doubled: indices that were delivered more often than handed out.
        out_of_order: samples that were not at the position that the sampler gave them.
        repeated: samples that the sampler itself handed out again (padding, replacement).
        unvisited: samples of the data set that the sampler did not hand out (other ranks, a
            subset).
        displacement: mean distance of a sample from its place in the data set, relative to a
            uniform shuffle (1). All three of these are None for an epoch of fewer than two batches,
            and look at the samples that were delivered as if there were no others.
        together: probability that two neighbours share a batch, relative to a uniform shuffle (1).
        design_effect: variance of the mean index of a batch, relative to a uniform shuffle (1): for
            what varies slowly along the data set a batch is worth so many times fewer samples.
    """

    samples: int
    batches: int
    lost: list[int]
    doubled: list[int]
    out_of_order: int
    repeated: int
    unvisited: int
    displacement: float | None
    together: float | None
    design_effect: float | None

    @property
    def intact(self) -> bool:
        """Whether the loader delivered what the sampler handed out, in its order."""
        return not (self.lost or self.doubled or self.out_of_order)

    def __str__(self) -> str:
        lines = [
            f"{self.samples} samples in {self.batches} batches",
            f"lost: {_few(self.lost)}",
            f"doubled: {_few(self.doubled)}",
            f"out of order: {self.out_of_order}",
            f"handed out again by the sampler: {self.repeated}; not handed out: {self.unvisited}",
        ]
        if self.displacement is not None:
            lines.append(
                f"shuffle (uniform is 1): displacement {self.displacement:.2f}, "
                f"neighbours together {self.together:.2f}, design effect {self.design_effect:.2f}"
            )
        return "\n".join(lines)


def loader_audit(loader: Any) -> LoaderAudit:
    """Run an epoch of a torch loader and compare what it delivers with what its sampler hands out.

    Works with any ``torch.utils.data.DataLoader`` over a map-style data set, also of a subclass
    with torch's arguments. The epoch runs in a second loader of the same class and options, over
    the same data set and sampler; the sampler moves on as in any epoch.

    Args:    loader: the loader. With an EpochSampler the epoch that it is set to is run, from a
        restored position on.
    Returns: a LoaderAudit; ``intact`` says whether all is well, ``str`` of it is a report.
    Raises:  UsageError for an IterableDataset, whose samples have no indices; whatever the loader
        raises.
    Cost:    an epoch; 100 bytes of memory per sample.
    """
    dataset = loader.dataset
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise UsageError("an IterableDataset cannot be audited: its samples have no indices")
    batched = loader.batch_sampler is not None
    source = loader.batch_sampler if batched else loader.sampler
    sampler = source.sampler if type(source) is BatchSampler else source
    if isinstance(sampler, EpochSampler):
        # Such a sampler is a pure function: it hands out the same indices when it is iterated
        # again.
        handed_out, recorded = [_indices(item) for item in copy.deepcopy(source)], source
    else:
        handed_out = []
        recorded = _Recorded(source, handed_out)
    options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    options |= {name: getattr(loader, name) for name in _OPTIONS_OF_OURS if hasattr(loader, name)}
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
        options["multiprocessing_context"] = loader.multiprocessing_context
    order: dict[str, Any] = {"batch_sampler": recorded}
    if not batched:
        order = {"batch_size": None, "sampler": recorded}
    audited = type(loader)(
        _Tagged(dataset, getattr(loader, "by_list", None)),
        collate_fn=_TaggedCollate(loader.collate_fn, batched),
        **order,
        **options,
    )
    delivered = [indices for indices, _batch in audited]
    return _compared(delivered, [i for item in handed_out for i in item], len(dataset))


def _compared(delivered: list[list[int]], wanted: list[int], n: int) -> LoaderAudit:
    got = [index for batch in delivered for index in batch]
    lost = Counter(wanted)
    lost.subtract(got)
    shorter = min(len(got), len(wanted))
    moved = int(np.count_nonzero(np.not_equal(got[:shorter], wanted[:shorter])))
    different = set(wanted)
    displacement_, together_, design_effect_ = None, None, None
    if len(delivered) > 1 and len(delivered[0]) > 1:
        # The place of each sample among those delivered; repeated ones have places side by side.
        order = np.argsort(np.argsort(got, kind="stable"), kind="stable")
        size = len(delivered[0])
        displacement_ = displacement(order)
        together_ = together(order, size) * (len(order) - 1) / (size - 1)
        design_effect_ = design_effect(order, size)
    return LoaderAudit(
        samples=len(got),
        batches=len(delivered),
        lost=sorted((+lost).elements()),
        doubled=sorted((-lost).elements()),
        out_of_order=moved,
        repeated=len(wanted) - len(different),
        unvisited=n - len(different),
        displacement=displacement_,
        together=together_,
        design_effect=design_effect_,
    )


class _Recorded:
    """A sampler that records the indices that it hands out."""

    def __init__(self, source: Any, handed_out: list[list[int]]) -> None:
        self._source = source
        self._handed_out = handed_out

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        self._handed_out.clear()
        for item in self._source:
            self._handed_out.append(_indices(item))
            yield item


class _Tagged(torch.utils.data.Dataset[Any]):
    """A data set whose samples come with their indices. Other attributes are the data set's."""

    def __init__(self, dataset: Any, by_list: bool | None) -> None:
        self._dataset = dataset
        self._by_list = by_list

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, item: Any) -> tuple[Any, Any]:
        return item, self._dataset[item]

    def __getitems__(self, items: Any) -> list[tuple[Any, Any]]:
        items = list(items)
        if callable(getattr(self._dataset, "__getitems__", None)):
            samples = self._dataset.__getitems__(items)
        elif self._by_list:
            samples = self._dataset[items]
        else:
            samples = [self._dataset[item] for item in items]
        return list(zip(items, samples, strict=True))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_dataset", "_by_list"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _TaggedCollate:
    """A ``collate_fn`` for tagged samples: the indices, and what the loader's own one returns."""

    def __init__(self, collate: Any, batched: bool) -> None:
        self._collate = collate
        self._batched = batched

    def __call__(self, tagged: Any) -> tuple[list[int], Any]:
        if self._batched:
            indices = [index for item, _ in tagged for index in _indices(item)]
            return indices, self._collate([sample for _, sample in tagged])
        item, sample = tagged
        return _indices(item), self._collate(sample)


def _indices(item: Any) -> list[int]:
    """Return the indices that a sampler hands out at once: one, or a batch of them."""
    return [int(index) for index in np.asarray(item).reshape(-1)]


def _few(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:_SHOWN]))
    return f"{len(indices)}" + (
        f" ({shown}{', …' if len(indices) > _SHOWN else ''})" if shown else ""
    )
