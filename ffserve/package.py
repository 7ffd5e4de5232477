"""Import path of the original's ``ffrecord.package``."""

from ffserve.folders.folder_index import MAGIC as MAGIC_BYTES
from ffserve.folders.packed_folder import PackedFolder, pack_folder

__all__ = ["MAGIC_BYTES", "PackedFolder", "pack_folder"]
