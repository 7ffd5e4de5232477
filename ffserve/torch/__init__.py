"""The PyTorch face of ffserve, and the drop-in for ``ffrecord.torch``.

Nothing outside this package imports torch, so ``import ffserve`` works (and stays quick) without
it. Datasets here are indexed by a list: one call reads a batch. ``DataLoader`` is torch's, with
one dataset call a batch, errors that cross whole from the workers, and a position that
can be saved and restored in the middle of an epoch.
"""

from ffserve.torch.dataset import ConcatDataset, Dataset, ReaderRegistry, Subset
from ffserve.torch.loader import DataLoader
from ffserve.torch.sampler import EpochSampler

__all__ = [
    "ConcatDataset",
    "DataLoader",
    "Dataset",
    "EpochSampler",
    "ReaderRegistry",
    "Subset",
]
