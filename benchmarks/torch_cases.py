"""The torch side of the benchmark."""

from __future__ import annotations

from typing import Any

import ffserve.torch


def same(samples: list[Any]) -> list[Any]:
    """Hand raw samples on."""
    return samples


class Raw(ffserve.torch.Dataset):
    """Samples as they are."""

    def process(self, indices: list[int], data: list[Any]) -> list[Any]:
        """Hand raw samples on."""
        return data


def raw_loader(case: dict[str, Any]) -> ffserve.torch.DataLoader[Any]:
    """Two workers, shuffled, no collation."""
    dataset = Raw(case["paths"])
    return ffserve.torch.DataLoader(
        dataset, batch_size=case["batch"], shuffle=True, num_workers=2, collate_fn=same
    )
