import numpy as np
from numpy.typing import NDArray

SOURCES: int

def integers(indices: object, count: int, /) -> NDArray[np.int64] | None: ...
def separate(
    offsets: NDArray[np.int64], /
) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint64]]: ...
