"""Classification: a converter with torch workers, then training that is suspended and resumed."""

import pickle
import sys
from pathlib import Path

import numpy as np
import torch
from ffrecord import FileReader, FileWriter
from ffrecord.torch import DataLoader, Dataset
from ffrecord.utils import dump
from torch.utils.data.distributed import DistributedSampler

COUNT, CLASSES, BATCH = 203, 7, 8


class Raw(torch.utils.data.Dataset):
    """What a converter reads: one pickled (pixels, label) for each image."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        pixels = np.random.default_rng(index).integers(0, 256, (9, 11, 3), dtype=np.uint8)
        return pickle.dumps((pixels, index % CLASSES))


class Images(Dataset):
    def __init__(self, fname, transform=None):
        super().__init__(fname, check_data=True)
        self.transform = transform

    def process(self, indexes, data):
        samples = []
        for bytes_ in data:
            image, label = pickle.loads(bytes_)
            samples.append((self.transform(image) if self.transform else image, label))
        return samples


def convert(out):
    loader = torch.utils.data.DataLoader(
        Raw(), batch_size=32, num_workers=2, collate_fn=lambda samples: samples
    )
    writer = FileWriter(out, COUNT)
    for samples in loader:
        for sample in samples:
            writer.write_one(sample)
    writer.close()


def to_tensor(image):
    return torch.from_numpy(image).permute(2, 0, 1).float() / 255


def epochs(folder, rank, suspend_at):
    """Return the labels of three epochs; the second is left and resumed."""
    dataset = Images(folder, transform=to_tensor)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=rank)
    loader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=2, pin_memory=False)
    seen = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(loader):
            assert images.shape[1:] == (3, 9, 11) and images.dtype is torch.float32
            seen.append(labels)
            if epoch == 1 and step + 1 == suspend_at:
                break
        if epoch == 1 and suspend_at:
            loader.set_step(suspend_at)
            assert len(loader) == -(-((COUNT + 1) // 2) // BATCH) - suspend_at
            seen.extend(labels for _, labels in loader)
            loader.set_step(0)
    try:
        loader.set_step(len(loader))
    except AssertionError:
        return torch.cat(seen)
    raise SystemExit("a step beyond the epoch was accepted")


def main():
    folder = Path(sys.argv[1])
    convert(folder / "train.ffr")
    (folder / "parts").mkdir()
    dump(Raw(), folder / "parts", nfiles=4)
    with FileReader(folder / "parts") as parts, FileReader(folder / "train.ffr") as whole:
        assert len(parts.fnames) == 4 and parts.n == whole.n == COUNT
        for one, other in zip(parts.read(range(COUNT)), whole.read(range(COUNT)), strict=True):
            np.testing.assert_array_equal(one, other)
    for rank in range(2):
        straight = epochs(folder / "train.ffr", rank, 0)
        assert torch.equal(straight, epochs(folder / "parts", rank, 4))
    print("ok", straight.sum().item())


if __name__ == "__main__":
    main()
