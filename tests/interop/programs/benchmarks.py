"""Benchmarks: forked processes that share a reader and a queue, and loaders of growing batches."""

import pickle
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from ffrecord import FileReader, FileWriter, checkFsAlign
from ffrecord.torch import DataLoader, Dataset

COUNT, SIZE, PROCESSES = 400, 20_000, 4
fork = get_context("fork")


def read_chunks(reader, queue, done):
    count = 0
    while (work := queue.get()) is not None:
        start, size = work
        for number, bytes_ in enumerate(reader.read(list(range(start, start + size))), start):
            assert len(bytes_) == SIZE and bytes_[0] == number % 256
            count += 1
    reader.close()
    done.put(count)


def bench_read(fname, batch_size):
    reader = FileReader(fname)
    queue, done = fork.Queue(), fork.Queue()
    for start in range(0, COUNT, batch_size):
        queue.put((start, min(batch_size, COUNT - start)))
    for _ in range(PROCESSES):
        queue.put(None)
    began = time.time()
    arguments = (reader, queue, done)
    processes = [fork.Process(target=read_chunks, args=arguments) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    assert sum(done.get() for _ in processes) == COUNT
    for process in processes:
        process.join()
        assert process.exitcode == 0
    print(f"{batch_size}: {COUNT * SIZE / (time.time() - began) / 1e6:.0f} MB/s")


class Numbers(Dataset):
    def process(self, indexes, data):
        return [(int(bytes_[0]), np.frombuffer(bytes_, np.uint8)[:100]) for bytes_ in data]


def bench_loader(fname, batch_size):
    loader = DataLoader(Numbers(fname), batch_size, num_workers=2, prefetch_factor=4)
    batches = iter(loader)
    first, _ = next(batches)
    assert first.tolist() == [k % 256 for k in range(batch_size)]
    assert 1 + sum(1 for _ in batches) == len(loader) == -(-COUNT // batch_size)


def main():
    fname = str(Path(sys.argv[1]) / "test.ffr")
    writer = FileWriter(fname, COUNT)
    for number in range(COUNT):
        writer.write_one(np.full(SIZE, number % 256, np.uint8))
    writer.close()
    with open(fname, "rb") as file:
        assert checkFsAlign(file.fileno()) in (True, False)
    for batch_size in (1, 16, 64):
        bench_read(fname, batch_size)
        bench_loader(fname, batch_size)
    # Ten readers live at once, and copies of one by pickle.
    readers = [FileReader(fname) for _ in range(10)]
    readers += [pickle.loads(pickle.dumps(readers[0])) for _ in range(3)]
    for number, reader in enumerate(readers):
        assert reader.read_one(number)[0] == number
        reader.validate()
    for reader in readers:
        reader.close()
    print("ok")


if __name__ == "__main__":
    main()
