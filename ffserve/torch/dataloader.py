"""Import path of the original's ``ffrecord.torch.dataloader``."""

from ffserve.torch.loader import DataLoader

__all__ = ["DataLoader"]
