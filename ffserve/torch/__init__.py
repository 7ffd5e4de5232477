"""ffserve for PyTorch, and the drop-in for ``ffrecord.torch``.

Nothing outside this package imports torch, so ``import ffserve`` works, and is quick, without it.
Datasets are indexed by a list: one call reads a batch. ``DataLoader`` is torch's with one dataset
call per batch, errors that cross whole from the workers, and a position that can be saved and
restored in mid-epoch.
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "ffserve.torch needs PyTorch, which is not installed: pip install 'ffserve[torch]'",
        name="torch",
    ) from None

from ffserve.torch.dataset import ConcatDataset, Dataset, RawDataset, ReaderRegistry, Subset
from ffserve.torch.image_folder import DatasetFolder, ImageFolder
from ffserve.torch.kept import CachedDataset, cache
from ffserve.torch.loader import DataLoader
from ffserve.torch.mixture import Mixture
from ffserve.torch.packed import PackedDataset
from ffserve.torch.samplers import EpochSampler, data_rank

__all__ = [
    "CachedDataset",
    "ConcatDataset",
    "DataLoader",
    "Dataset",
    "DatasetFolder",
    "EpochSampler",
    "ImageFolder",
    "Mixture",
    "PackedDataset",
    "RawDataset",
    "ReaderRegistry",
    "Subset",
    "cache",
    "data_rank",
]
