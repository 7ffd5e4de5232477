"""Speech: wave forms of any length in several parts, written by a pool, and a small test set."""

import pickle
import sys
import tempfile
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import torch
from ffrecord.fileio import FileReader, FileWriter
from ffrecord.torch.dataloader import DataLoader
from ffrecord.torch.dataset import Dataset, Subset

COUNT, PARTS, RATE = 131, 4, 22050


def sample(number):
    rng = np.random.default_rng(number)
    wave = rng.integers(-32768, 32767, int(rng.integers(1, 3 * RATE)), dtype=np.int16)
    return f"LJ{number:03d}", RATE, wave, f"text {number}", f"text number {number}"


def write_part(work):
    out, numbers = work
    writer = FileWriter(out, len(numbers))
    for number in numbers:
        writer.write_one(pickle.dumps(sample(number)))
    writer.close()
    return len(numbers)


def convert(folder):
    (folder / "all.ffr").mkdir()
    (folder / "mini.ffr").mkdir()
    each = -(-COUNT // PARTS)
    work = [
        (folder / "all.ffr" / f"PART_{k:05d}.ffr", range(k * each, min(COUNT, (k + 1) * each)))
        for k in range(PARTS)
    ]
    work.append((str(folder / "mini.ffr" / "PART_00000.ffr"), range(10)))
    with Pool(2) as pool:
        assert sum(pool.map(write_part, work)) == COUNT + 10


class Speech(Dataset):
    def __init__(self, split, folder, transform=None):
        assert split in ("all", "mini")
        self.split = split
        self.fname = str(folder / f"{split}.ffr")
        self.reader = FileReader(self.fname, check_data=True)
        self.transform = transform

    def __len__(self):
        return self.reader.n

    def __getitem__(self, indices):
        loaded = [pickle.loads(bytes_) for bytes_ in self.reader.read(indices)]
        return [self.transform(*one) if self.transform else one for one in loaded]


def lengthened(name, rate, wave, text, normalized):
    assert rate == RATE and normalized.startswith("text number")
    return name, torch.from_numpy(wave.astype(np.float32) / 32768), text


def padded(batch):
    names, waves, texts = zip(*batch, strict=True)
    lengths = torch.tensor([len(wave) for wave in waves])
    return names, torch.nn.utils.rnn.pad_sequence(waves, batch_first=True), lengths, texts


def main():
    folder = Path(sys.argv[1])
    convert(folder)
    mini = Speech("mini", folder)
    assert [one[0] for one in mini[list(range(10))]] == [f"LJ{k:03d}" for k in range(10)]
    whole = Speech("all", folder, lengthened)
    train = Subset(whole, [k for k in range(COUNT) if k % 10])
    loader = DataLoader(
        train, batch_size=6, shuffle=True, num_workers=2, collate_fn=padded, persistent_workers=True
    )
    for _ in range(2):
        seen = []
        for names, waves, lengths, texts in loader:
            for k, name in enumerate(names):
                number = int(name[2:])
                wave = sample(number)[2].astype(np.float32) / 32768
                assert lengths[k] == len(wave) and texts[k] == f"text {number}"
                assert np.array_equal(waves[k, : len(wave)].numpy(), wave)
                seen.append(number)
        assert sorted(seen) == [k for k in range(COUNT) if k % 10]
    with tempfile.TemporaryDirectory() as other:
        try:
            FileWriter(Path(other) / "wave.bin", 1)
        except AssertionError:
            print("ok", len(seen))


if __name__ == "__main__":
    main()
