"""Memory for pieces that is used again: fresh memory costs more than what is computed in it."""
import math
from collections import deque

import numpy as np

SMALL = 1 << 12  # entries that are not worth it
MOST = 1 << 28  # bytes that wait for their next use
_free: deque[np.ndarray] = deque()


class Lease:
    """An array's memory, which goes back to where it came from when no array uses it any more."""

    def __init__(self, block: np.ndarray, shape: tuple[int, ...], dtype: np.dtype):
        self.block = block
        used = block[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        self.__array_interface__ = used.__array_interface__

    def __del__(self):
        if self.block.size + sum(block.size for block in list(_free)) <= MOST:
            _free.append(self.block)


def array(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An array with anything in it, at a multiple of 64 bytes: JAX takes such arrays over on CPU instead of copying."""
    dtype = np.dtype(dtype)
    count = math.prod(shape) * dtype.itemsize
    if math.prod(shape) < SMALL:
        return _aligned(count).view(dtype).reshape(shape)
    try:
        block = _free.pop()
    except IndexError:
        block = _aligned(count)
    if not count <= block.size <= 4 * count:
        block = _aligned(count)
    return np.asarray(Lease(block, shape, dtype))


def _aligned(count: int, to: int = 64) -> np.ndarray:
    held = np.empty(count + to, np.uint8)
    first = -held.ctypes.data % to
    return held[first : first + count]
