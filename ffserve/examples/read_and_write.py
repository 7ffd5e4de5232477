"""Write a record file and read it: lists, batches, slices, several in flight, in order, leases."""

from __future__ import annotations

import argparse

import numpy as np

import ffserve


def main() -> None:
    """Write samples to a file and read them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the file to write: .ffr, .recordio or .tfrecord")
    parser.add_argument("--count", type=int, default=1000, help="samples (default: 1000)")
    options = parser.parse_args()

    with ffserve.create(options.path) as writer:
        for k in range(options.count):
            writer.write(f"sample {k}".encode())

    with ffserve.open(options.path) as reader:
        print(f"{len(reader)} samples, read by the {reader.source}")

        first, last = reader.read([0, -1 % len(reader)])  # a list of uint8 arrays
        print(f"first: {first.tobytes().decode()!r}, last: {last.tobytes().decode()!r}")

        batch = reader.read_batch(range(10))  # one buffer for the whole batch
        print(f"a batch of {len(batch)}: {batch.buffer.nbytes} bytes, offsets {batch.offsets[:3]}…")

        order = np.random.default_rng(0).permutation(len(reader))
        size = sum(batch.buffer.nbytes for batch in reader.batches(order))  # several in flight
        print(f"all samples in random order: {size} bytes")

        print(f"in order: {sum(sample.nbytes for sample in reader)} bytes")

        with reader.lease([3, 4]) as views:  # read-only, without a copy
            print(f"leased: {[view.tobytes().decode() for view in views]}")


if __name__ == "__main__":
    main()
