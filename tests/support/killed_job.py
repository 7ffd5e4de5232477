"""A training job that is killed in mid-epoch: `killed_job.py METHOD` writes its workers' pids."""

from __future__ import annotations

import os
import sys
import time

import torch_cases as cases

from ffserve.torch import DataLoader


def main() -> None:
    """Write the workers' pids when each has made a batch; then wait to be killed."""
    loader = DataLoader(
        cases.Numbers(1000),
        batch_size=1,
        num_workers=2,
        bundle=1,
        multiprocessing_context=sys.argv[1],
    )
    batches = iter(loader)
    pids = {int(next(batches)[3][0]) for _ in range(2)}
    print(os.getpid(), *pids, flush=True)
    time.sleep(100)


if __name__ == "__main__":
    main()
