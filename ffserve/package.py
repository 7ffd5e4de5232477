"""Import path of the original's ``ffrecord.package``."""

from ffserve.compat.packed_folder import PackedFolder, pack_folder
from ffserve.folders import MAGIC as MAGIC_BYTES

__all__ = ["MAGIC_BYTES", "PackedFolder", "pack_folder"]
