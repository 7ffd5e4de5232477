"""Detection: samples of several parts, annotations of any number, joined and nested data sets."""

import pickle
import sys
from pathlib import Path

import numpy as np
import torch
from ffrecord import FileReader, FileWriter
from ffrecord.torch import ConcatDataset, DataLoader, Dataset, ReaderRegistry, Subset


def annotated(split, number):
    rng = np.random.default_rng([split, number])
    image = rng.integers(0, 256, (int(rng.integers(4, 30)), 20, 3), dtype=np.uint8)
    boxes = [
        {"bbox": rng.random(4).tolist(), "category_id": int(rng.integers(90))}
        for _ in range(int(rng.integers(0, 6)))
    ]
    return image, boxes, split * 1000 + number


def convert(out, split, count):
    with FileWriter(out, count) as writer:
        for number in range(count):
            writer.write_one(bytearray(pickle.dumps(annotated(split, number))))


class Detection(Dataset):
    def __init__(self, fname):
        super().__init__(fname)

    def process(self, indexes, data):
        assert len(indexes) == len(data)
        return [pickle.loads(bytes_) for bytes_ in data]


class Pair(ReaderRegistry):
    def __init__(self, first, second):
        self.first = FileReader(first)
        self.second = FileReader(second)


class Nested(Dataset):
    """Reads two files through an object of its own."""

    def __init__(self, first, second):
        self.pair = Pair(first, second)
        self.names = FileReader(first)

    def __len__(self):
        return self.names.n

    def __getitem__(self, indices):
        assert isinstance(indices, list)
        second = [index % self.pair.second.n for index in indices]
        left, right = self.pair.first.read(indices), self.pair.second.read(second)
        return [(pickle.loads(a)[2], pickle.loads(b)[2]) for a, b in zip(left, right, strict=True)]


def collate(batch):
    images, annotations, numbers = zip(*batch, strict=True)
    counts = torch.tensor([len(each) for each in annotations])
    boxes = [torch.tensor([a["bbox"] for a in each]).reshape(-1, 4) for each in annotations]
    return [torch.from_numpy(image) for image in images], boxes, counts, list(numbers)


def main():
    folder = Path(sys.argv[1])
    convert(folder / "train.ffr", 1, 60)
    convert(folder / "val.ffr", 2, 25)
    train, val = Detection(folder / "train.ffr"), Detection(str(folder / "val.ffr"))
    for both in (ConcatDataset([train, val]), train + val):
        assert len(both) == 85
        assert [one[2] for one in both[[0, 84, 60, 0]]] == [1000, 2024, 2000, 1000]
        picked = Subset(both, list(range(84, -1, -2)))
        loader = DataLoader(picked, batch_size=7, num_workers=2, collate_fn=collate)
        numbers = []
        for images, boxes, counts, found in loader:
            for k, number in enumerate(found):
                image, expected, _ = annotated(*divmod(number, 1000))
                assert np.array_equal(images[k].numpy(), image)
                assert counts[k] == len(expected) == len(boxes[k])
            numbers += found
        expected = [1000 + k if k < 60 else 2000 + k - 60 for k in range(84, -1, -2)]
        assert numbers == expected
    nested = Nested(folder / "train.ffr", folder / "val.ffr")
    assert len(nested.ffreaders()) == 3
    loader = DataLoader(nested, batch_size=8, num_workers=2, skippable=False)
    pairs = [pair for left, right in loader for pair in zip(left.tolist(), right.tolist())]  # noqa: B905
    assert pairs == [(1000 + k, 2000 + k % 25) for k in range(60)]
    try:
        loader.set_step(1)
    except AssertionError:
        print("ok", len(pairs))


if __name__ == "__main__":
    main()
