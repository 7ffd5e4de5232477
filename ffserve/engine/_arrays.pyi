import numpy as np
from numpy.typing import NDArray

SOURCES: int

def connect(edges: int, read: int, /) -> None: ...
def read_cached(
    tables: int, indices: object, /
) -> (
    list[NDArray[np.uint8]]
    | tuple[list[NDArray[np.uint8]], NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]
    | None
): ...
def read_joined(
    tables: int, indices: object, most: int, /
) -> (
    tuple[NDArray[np.uint8], NDArray[np.int64]]
    | tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]
    | None
): ...
def integers(indices: object, count: int, /) -> NDArray[np.int64] | None: ...
def separate(
    offsets: NDArray[np.int64], /
) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint64]]: ...
