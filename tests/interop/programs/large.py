"""Large samples: documents of tens of megabytes between small ones, and tables read by hand."""

import random
import sys
import zlib
from pathlib import Path

import numpy as np
from ffrecord import FileReader, FileWriter
from ffrecord.torch import DataLoader, Dataset

SIZES = [1024, 17, 24_000_000, 300_000, 0, 9_000_000]
COUNT = 18


def document(number):
    return np.full(SIZES[number % len(SIZES)], number % 256, np.uint8)


class Documents(Dataset):
    def __init__(self, fnames, check_data=True):
        super().__init__(fnames)
        self.reader = FileReader(fnames, check_data)  # instead of the one it has already

    def process(self, indexes, data):
        return [
            (index, len(bytes_), int(bytes_.astype(np.int64).sum()))
            for index, bytes_ in zip(indexes, data, strict=True)
        ]


def main():
    names = []
    for part in range(3):
        names.append(str(Path(sys.argv[1]) / f"{part}.ffr"))
        writer = FileWriter(names[-1], COUNT // 3)
        for number in range(part * COUNT // 3, (part + 1) * COUNT // 3):
            writer.write_one(document(number))
        writer.close()
    reader = FileReader(names, check_data=True)
    order = list(range(COUNT))
    random.Random(5).shuffle(order)
    for number, bytes_ in zip(order, reader.read(order), strict=True):
        assert np.array_equal(bytes_, document(number)) and bytes_.flags.writeable
    for number in order:
        assert np.array_equal(reader.read_one(number), document(number))
    for part in range(3):
        offsets, checksums = reader.get_offsets(part), reader.get_checksums(part)
        with open(names[part], "rb") as file:
            bytes_ = file.read()
        for k, checksum in enumerate(checksums.tolist()):
            assert zlib.crc32(bytes_[offsets[k] : offsets[k + 1]]) == checksum or not checksum
    reader.close()
    loader = DataLoader(Documents(names), batch_size=4, num_workers=2, collate_fn=list)
    found = [sample for batch in loader for sample in batch]
    sums = [int(document(k).astype(np.int64).sum()) for k in range(COUNT)]
    assert found == [(k, len(document(k)), sums[k]) for k in range(COUNT)]
    print("ok", sum(size for _, size, _ in found))


if __name__ == "__main__":
    main()
