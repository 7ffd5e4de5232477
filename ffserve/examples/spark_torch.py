"""Prepare a table in Spark, by entity, and train a model of each entity with PyTorch.

Spark writes a table that is partitioned by the entity. Each partition is a directory of record
files, and so a data set: the loop below opens one after the other and fits a linear model of it.
Run it beside a daemon, and the second epoch of each entity comes from memory.
"""

from __future__ import annotations

import argparse
import glob
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ffserve import example

if TYPE_CHECKING:
    import torch

SCHEMA = pa.schema([("x", pa.list_(pa.float32())), ("y", pa.float32())])


def prepare(path: str, rows: int, entities: int) -> None:
    """Write a table with a target y that depends on x in another way for each entity."""
    from pyspark.sql import SparkSession

    import ffserve.spark

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session: Any = spark.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    ffserve.spark.register(session)
    table = session.range(rows).selectExpr(
        f"id % {entities} as entity",
        "transform(array(randn(1), randn(2), randn(3)), v -> cast(v as float)) as x",
    )
    table = table.selectExpr(
        "entity",
        "x",
        "cast(cos(entity) * x[0] + sin(entity) * x[1] - x[2] + 0.5 as float) as y",
    )
    table.write.mode("overwrite").partitionBy("entity").format("tfrecord").save(path)
    session.stop()


def train(folder: str, epochs: int) -> tuple[int, float, list[float]]:
    """Fit a linear model of one entity.

    Returns: the number of samples, the mean loss of the last epoch, and the weights.
    """
    import torch

    import ffserve.torch

    class Entity(ffserve.torch.Dataset):
        """Pairs (x, y) of one entity."""

        def process(
            self, indices: Sequence[int], data: list[Any]
        ) -> list[tuple[torch.Tensor, torch.Tensor]]:
            batch = example.to_arrow(data, SCHEMA)
            x = torch.tensor(batch["x"].to_pylist())
            return list(zip(x, torch.tensor(batch["y"].to_numpy()), strict=True))

    torch.manual_seed(0)
    dataset = Entity(folder)
    loader = ffserve.torch.DataLoader(dataset, batch_size=32, shuffle=True)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    squared = torch.nn.MSELoss()
    losses: list[float] = []
    for _ in range(epochs):
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = squared(model(x)[:, 0], y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    weights = [*model.weight[0].tolist(), *model.bias.tolist()]
    return len(dataset), sum(losses) / len(losses), weights


def main() -> None:
    """Write the table, and train on each of its partitions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", help="the directory to write")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--entities", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    prepare(options.table, options.rows, options.entities)
    for folder in sorted(glob.glob(os.path.join(glob.escape(options.table), "entity=*"))):
        count, loss, weights = train(folder, options.epochs)
        shown = " ".join(f"{weight:+.2f}" for weight in weights)
        name = os.path.basename(folder)
        print(f"{name}: {count} samples, loss {loss:.4f}, weights {shown}")


if __name__ == "__main__":
    main()
