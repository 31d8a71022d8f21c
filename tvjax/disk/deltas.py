"""Task vectors read from disk: θ_t − θ_0 of one piece at a time, in float32 (float64 where a file holds that)."""
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tvjax.disk.readers import Opened, TensorInfo
from tvjax.tree import wide

BLOCK = 1 << 16  # entries that are read at once


class Place(NamedTuple):
    """Where a model keeps a tensor of the base: under which name, and how many of its first entries exist in both."""

    name: str
    entries: int


class Deltas:
    """A `merging.sources.Source` over opened checkpoints.

    base: θ_0. models: θ_1 … θ_T. places: for each model {the base's name: Place}; entries that a model lacks (rows of a
    shorter embedding) count as unchanged. told: is called with the number of bytes of every read.
    """

    reads_ahead = True  # reading takes long enough to be done by other threads

    def __init__(self, base: Opened, models: Sequence[Opened], places: Sequence[Mapping[str, Place]],
                 names: Sequence[str], told: Callable[[int], Any] = lambda count: None):
        self.base, self.models, self.places, self.told = base, list(models), list(places), told
        self.tasks = len(self.models)
        self.shapes = {name: base.tensors[name].shape for name in names}
        self.dtypes = {name: self._dtype(name) for name in names}

    def _dtype(self, name: str) -> np.dtype:
        theirs = [model.tensors[at[name].name] for model, at in zip(self.models, self.places, strict=True)]
        return np.result_type(*[np.dtype(wide(info.dtype)) for info in (self.base.tensors[name], *theirs)])

    def piece(self, name, start, stop, every=1):
        if every > 1:
            return self._thinned(name, start, stop, every)
        dtype = self.dtypes[name]
        origin = self.read_base(name, start, stop)
        out = _empty((self.tasks, stop - start), dtype)
        for row, model, places in zip(out, self.models, self.places, strict=True):
            at = places[name]
            there = max(0, min(stop, at.entries) - start)
            if there:
                x = widened(model.read(at.name, start, start + there), dtype)
                self.told(there * model.tensors[at.name].dtype.itemsize)
                np.subtract(x, origin[:there], out=row[:there])
            row[there:] = 0
        return out

    def _thinned(self, name, start, stop, every):
        block = BLOCK // every * every
        parts = [self.piece(name, at, min(at + block, stop))[:, ::every] for at in range(start, stop, block)]
        return np.concatenate(parts, 1)

    def read_base(self, name: str, start: int, stop: int) -> np.ndarray:
        """The base's entries, widened."""
        x = self.base.read(name, start, stop)
        self.told(x.nbytes)
        return widened(x, self.dtypes[name])

    def whole(self, name):
        shape = self.shapes[name]
        entries = TensorInfo(shape, self.dtypes[name]).size
        return jnp.asarray(self.piece(name, 0, entries).reshape(self.tasks, *shape))


def _empty(shape: tuple[int, ...], dtype: np.dtype, to: int = 64) -> np.ndarray:
    """An array that begins at a multiple of 64 bytes: JAX takes it over on CPU instead of copying it."""
    count = int(np.prod(shape)) * dtype.itemsize
    held = np.empty(count + to, np.uint8)
    first = -held.ctypes.data % to
    return held[first : first + count].view(dtype).reshape(shape)


def widened(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`x` in a wider dtype, exactly; bfloat16 by shifting its bits, which is several times faster than its cast."""
    if x.dtype == jnp.bfloat16 and dtype == np.float32:
        bits = x.view(np.uint16).astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    return x.astype(dtype, copy=False)
