"""Task vectors read from disk: θ_t − θ_0 of one piece at a time, in float32 (float64 where a file holds that)."""
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tvjax.disk.readers import Opened, TensorInfo
from tvjax.merging import buffers, pieces
from tvjax.tree import wide

BLOCK = pieces.SIZES[-1]  # entries that are read at once


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
        self.shapes: Mapping[str, tuple[int, ...]] = {name: base.tensors[name].shape for name in names}
        self.dtypes: Mapping[str, Any] = {name: self._dtype(name) for name in names}

    def _dtype(self, name: str) -> np.dtype:
        theirs = [model.tensors[at[name].name] for model, at in zip(self.models, self.places, strict=True)]
        return np.result_type(*[np.dtype(wide(info.dtype)) for info in (self.base.tensors[name], *theirs)])

    def piece(self, name, start, stop):
        dtype = self.dtypes[name]
        origin = self.read_base(name, start, stop)
        out = buffers.array((self.tasks, stop - start), dtype)
        for row, model, places in zip(out, self.models, self.places, strict=True):
            at = places[name]
            there = max(0, min(stop, at.entries) - start)
            if there:
                x = self._read(model, at.name, start, row[:there])
                np.subtract(x, origin[:there], out=row[:there])
            row[there:] = 0
        return out

    def _read(self, model: Opened, name: str, start: int, into: np.ndarray) -> np.ndarray:
        """The entries from `start` on, widened; in the memory of `into` where the file's dtype is the same."""
        info = model.tensors[name]
        self.told(len(into) * info.dtype.itemsize)
        read_into = getattr(model, "read_into", None)  # what a format may have besides `read`
        if read_into is None:
            return widened(model.read(name, start, start + len(into)), into.dtype)
        held = into if info.dtype == into.dtype else _scratch(2, len(into), info.dtype)
        read_into(name, start, held)
        return widened(held, into.dtype)

    def read_base(self, name: str, start: int, stop: int) -> np.ndarray:
        """The base's entries, widened, until this thread reads others."""
        return self._read(self.base, name, start, _scratch(0, stop - start, self.dtypes[name]))

    def whole(self, name):
        shape = self.shapes[name]
        entries = TensorInfo(shape, self.dtypes[name]).size
        return jnp.asarray(self.piece(name, 0, entries).reshape(self.tasks, *shape))


class Zero:
    """A base whose tensors of these names are 0: the "task vectors" from it are the models themselves."""

    def __init__(self, base: Opened, names: Collection[str]):
        self.base, self.names, self.where, self.tensors = base, names, base.where, base.tensors
        self.config, self.side, self.identity, self.close = base.config, base.side, base.identity, base.close

    def read(self, name, start, stop):
        return np.zeros(stop - start, self.tensors[name].dtype) if name in self.names else self.base.read(
            name, start, stop)

    def whole(self, name):
        info = self.tensors[name]
        return self.read(name, 0, info.size).reshape(info.shape)


_threads = threading.local()


def _scratch(which: int, entries: int, dtype: np.dtype) -> np.ndarray:
    """Memory of this thread's own, for one use at a time."""
    if entries > BLOCK:
        return np.empty(entries, dtype)
    held = getattr(_threads, str(which), None)
    if held is None:
        held = np.empty(BLOCK * 8, np.uint8)
        setattr(_threads, str(which), held)
    return held[: entries * dtype.itemsize].view(dtype)


def widened(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`x` in a wider dtype, exactly; bfloat16 by shifting its bits, which is several times faster than its cast."""
    if x.dtype == jnp.bfloat16 and dtype == np.float32:
        bits = x.view(np.uint16).astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    return x.astype(dtype, copy=False)
