"""ffserve as a contestant."""

from __future__ import annotations

import itertools

import numpy as np

import ffserve
from ffserve.bench.contestant import Case, Delivered, batches, delivering


def _open(case: Case) -> ffserve.Reader:
    return ffserve.open(case["paths"], server=case["server"])


def fill(case: Case) -> dict[str, int]:
    """Read every sample once, so that a daemon has them in its arena."""
    with _open(case) as reader:
        return {"samples": sum(len(batch) for batch in reader.batches(range(case["count"])))}


def read_batch(case: Case) -> Delivered:
    """One buffer a batch, one batch at a time."""
    reader = _open(case)
    return delivering(case, lambda chosen: reader.read_batch(chosen).buffer.nbytes)


def read(case: Case) -> Delivered:
    """A list of arrays a batch."""
    reader = _open(case)
    return delivering(case, lambda chosen: sum(sample.nbytes for sample in reader.read(chosen)))


def lease(case: Case) -> Delivered:
    """Views into the arena; nothing is copied."""
    reader = _open(case)
    for chosen in batches(case):
        with reader.lease(chosen) as views:
            count = len(views)
        yield count, count * case["step"]


def in_flight(case: Case) -> Delivered:
    """Batches in random order, several on their way."""
    reader = _open(case)
    order = np.random.default_rng(case["seed"]).permutation(case["count"])
    for batch in reader.batches(order, count=case["batch"], size=1 << 40):
        yield len(batch), batch.buffer.nbytes


def in_order(case: Case) -> Delivered:
    """From the first sample to the last, sample by sample, over and over."""
    reader = _open(case)
    samples = itertools.chain.from_iterable(itertools.repeat(reader))
    while True:
        some = list(itertools.islice(samples, case["batch"]))
        yield len(some), sum(sample.nbytes for sample in some)
