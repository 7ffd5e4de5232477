"""Prepare a table in Ray, and feed a training loop of PyTorch from it.

Ray Data reads the record files in tasks on all nodes, through the daemon of a node if it has one,
and streams batches to the loop.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

Columns = dict[str, Any]
"""A batch: by column name an array."""


def rows_of(batch: Columns) -> Columns:
    """Return rows with a target y that depends on x; runs in tasks."""
    number = batch["id"]
    x = np.random.default_rng(int(number[0])).normal(size=(len(number), 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.25
    return {"entity": number % 4, "x": list(x), "y": y.astype(np.float32)}


def prepare(path: str, rows: int) -> None:
    """Write a table that is partitioned by entity."""
    import ray

    import ffserve.ray

    dataset = ray.data.range(rows, override_num_blocks=4).map_batches(rows_of)
    ffserve.ray.write(dataset, path, format="tfrecord", partition_cols=["entity"], mode="overwrite")


def train(path: str, epochs: int) -> None:
    """Fit a linear model, and print the loss of each epoch and the weights."""
    import torch

    import ffserve.ray

    torch.manual_seed(0)
    dataset = ffserve.ray.read(path, columns=["x", "y"], parallelism=4)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    squared = torch.nn.MSELoss()
    for epoch in range(epochs):
        count, losses = 0, []
        for batch in dataset.iter_batches(batch_size=32, local_shuffle_buffer_size=256):
            # The lists of x, which are of one length, come as arrays.
            x, y = torch.tensor(np.stack(batch["x"])), torch.tensor(batch["y"])
            optimizer.zero_grad()
            loss = squared(model(x)[:, 0], y)
            loss.backward()
            optimizer.step()
            count += len(y)
            losses.append(float(loss.detach()))
        print(f"epoch {epoch + 1}: {count} samples, loss {sum(losses) / len(losses):.4f}")
    shown = " ".join(f"{w:+.2f}" for w in (*model.weight[0].tolist(), *model.bias.tolist()))
    print(f"weights {shown}")


def main() -> None:
    """Write the table, and train on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", help="the directory to write")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--cpus", type=int, help="cores of a Ray that is started for this program")
    options = parser.parse_args()
    import ray

    ray.init(num_cpus=options.cpus, include_dashboard=False, log_to_driver=False)
    prepare(options.table, options.rows)
    train(options.table, options.epochs)


if __name__ == "__main__":
    main()
