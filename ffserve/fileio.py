"""Import path of the original's ``ffrecord.fileio``."""

from ffserve.compat.ffrecord import FileReader, FileWriter, checkFsAlign

__all__ = ["FileReader", "FileWriter", "checkFsAlign"]
