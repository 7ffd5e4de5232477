"""Files in the memory of one process, of fsspec: no daemon can read them."""

from __future__ import annotations

from ffserve.store.schemes.scheme import Scheme


class ProcessMemory(Scheme):
    """Files of fsspec's memory."""

    name = "memory"
    protocols = ("memory",)
    in_process = True
    settings = ("MEMORY",)


SCHEME = ProcessMemory()
