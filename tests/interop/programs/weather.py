"""Weather: a time series of fields in one file per year, a static file, windows over time."""

import pickle
import sys
from pathlib import Path

import numpy as np
import torch
from ffrecord import FileReader, FileWriter
from ffrecord.torch import DataLoader, Dataset

YEARS, STEPS, SHAPE = 3, 40, (5, 16, 32)


def field(step):
    return np.random.default_rng(step).standard_normal(SHAPE).astype(np.float32)


def convert(folder):
    (folder / "train.ffr").mkdir()
    for year in range(YEARS):
        steps = range(year * STEPS, (year + 1) * STEPS)
        writer = FileWriter(folder / "train.ffr" / f"PART_{year:04d}.ffr", STEPS)
        for step in steps:
            # The time of a field is stored beside it; neighbours are put together at reading.
            writer.write_one(pickle.dumps((step * 6, field(step))))
        writer.close()
    fields = np.stack([field(step) for step in range(YEARS * STEPS)])
    with open(folder / "scaler.pkl", "wb") as file:
        pickle.dump({"mean": fields.mean((0, 2, 3)), "std": fields.std((0, 2, 3))}, file)
    with FileWriter(folder / "static.ffr", 1) as writer:
        writer.write_one(np.arange(16 * 32, dtype=np.int16).tobytes())


class Weather(Dataset):
    """Sample i is the field at time i, the next `window` ones, and the static field."""

    def __init__(self, folder, window):
        self.folder = folder
        self.window = window
        self.reader = FileReader(folder / "train.ffr", check_data=True)
        self.static = FileReader(folder / "static.ffr")
        with open(folder / "scaler.pkl", "rb") as file:
            scaler = pickle.load(file)
        self.mean = scaler["mean"][:, None, None]
        self.std = scaler["std"][:, None, None]

    def __len__(self):
        return self.reader.n - self.window

    def __getitem__(self, indices):
        wanted = [index + k for index in indices for k in range(self.window + 1)]
        loaded = [pickle.loads(bytes_) for bytes_ in self.reader.read(wanted)]
        ground = np.frombuffer(self.static.read_one(0), np.int16).reshape(SHAPE[1:]).copy()
        samples = []
        for at, index in enumerate(indices):
            part = loaded[at * (self.window + 1) : (at + 1) * (self.window + 1)]
            assert [time for time, _ in part] == [
                6 * (index + k) for k in range(self.window + 1)
            ], "fields of other times"
            fields = [(values - self.mean) / self.std for _, values in part]
            samples.append((index, fields[0], np.stack(fields[1:]), ground))
        return samples

    def get_scaler(self):
        return self.mean, self.std

    def loader(self, *args, **kwargs):
        return DataLoader(self, *args, **kwargs)


def main():
    folder = Path(sys.argv[1])
    convert(folder)
    dataset = Weather(folder, window=2)
    assert len(dataset.ffreaders()) == 2
    mean, std = dataset.get_scaler()
    seen = []
    for epoch in range(2):
        loader = dataset.loader(batch_size=9, shuffle=True, num_workers=2, drop_last=epoch == 1)
        for indices, now, future, ground in loader:
            assert future.shape[1:] == (2, *SHAPE) and ground.shape[1:] == SHAPE[1:]
            first = int(indices[0])
            assert torch.equal(now[0], torch.from_numpy((field(first) - mean) / std))
            assert torch.equal(future[0, 1], torch.from_numpy((field(first + 2) - mean) / std))
            seen.append(indices)
        if epoch == 0:
            assert sorted(torch.cat(seen).tolist()) == list(range(len(dataset)))
    print("ok", len(torch.cat(seen)))


if __name__ == "__main__":
    main()
