"""Import path of the original's ``ffrecord.utils``."""

from ffserve.compat.ffrecord import dump

__all__ = ["dump"]
