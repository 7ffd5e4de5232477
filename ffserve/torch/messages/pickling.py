"""Pickling of batches, with the bytes of arrays and tensors out of band.

Dense CPU tensors are taken apart into bytes, type, shape and strides; tensors over one storage
share it again afterwards. Tensors that only torch can pass to another process raise ``NeedsTorch``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ffserve.dtypes import Bytes


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether bytes, type, shape and strides describe a tensor completely."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class NeedsTorch(Exception):
    """A tensor that only torch can pass to another process."""


class Pickler(pickle.Pickler):
    """Pickles with the bytes of arrays and tensors out of band."""

    def __init__(self, stream: io.BytesIO, buffers: list[Bytes]) -> None:
        def keep(buffer: pickle.PickleBuffer) -> None:
            buffers.append(np.frombuffer(buffer.raw(), np.uint8))

        super().__init__(stream, protocol=5, buffer_callback=keep)
        self._storages: dict[int, tuple[_Storage, int]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            return self._reduce(obj)
        if type(obj) is np.ndarray and not obj.flags.writeable and not obj.dtype.hasobject:
            return obj.copy("K").__reduce_ex__(5)  # arrives writable, as from any other pickle
        if isinstance(obj, _TORCH_TYPES):
            raise NeedsTorch
        return NotImplemented

    def _reduce(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad or not is_plain(tensor):
            raise NeedsTorch
        storage, begin = self._storage(tensor)
        offset = tensor.data_ptr() - begin if tensor.numel() else 0
        shape, strides = tuple(tensor.shape), tensor.stride()
        return _tensor, (storage, tensor.dtype, offset // tensor.element_size(), shape, strides)

    def _storage(self, tensor: torch.Tensor) -> tuple[_Storage, int]:
        """Return the bytes that a tensor needs, and the address where they begin.

        That is the whole storage if the tensor is at least half of it, else the tensor's part.
        """
        whole = tensor.untyped_storage()
        known = self._storages.get(whole.data_ptr())
        if known is not None:
            return known
        begin, size = whole.data_ptr(), whole.nbytes()
        extent = 0
        if tensor.numel():
            last = sum(
                (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            extent = (last + 1) * tensor.element_size()
        if 2 * extent >= size:
            found = _Storage(_bytes_of(whole, 0, size)), begin
            self._storages[begin] = found
            return found
        offset = int(tensor.storage_offset()) * tensor.element_size() if extent else 0
        return _Storage(_bytes_of(whole, offset, extent)), begin + offset


_TORCH_TYPES = (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)


class _Storage:
    """The bytes of a storage; becomes one again in the training process."""

    __slots__ = ("_bytes",)

    def __init__(self, bytes_: Bytes) -> None:
        self._bytes = bytes_

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _storage, (pickle.PickleBuffer(self._bytes.data),)


def _bytes_of(storage: torch.UntypedStorage, offset: int, size: int) -> Bytes:
    if not size:
        return np.empty(0, np.uint8)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,), (1,))
    array: NDArray[np.uint8] = flat.numpy()
    return array


def _storage(buffer: Any) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
