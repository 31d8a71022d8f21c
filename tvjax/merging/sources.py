"""Where the streaming engine reads task vectors from: anything that gives a piece of one leaf for all tasks."""
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from tvjax.merging import buffers
from tvjax.tree import wide


@runtime_checkable
class Source(Protocol):
    """Task vectors that can be read piece by piece."""

    shapes: Mapping[str, tuple[int, ...]]  # one task's, by leaf
    dtypes: Mapping[str, Any]
    tasks: int

    def piece(self, name: str, start: int, stop: int) -> np.ndarray:
        """The entries start:stop of a flattened leaf, (tasks, entries), in float32 or wider."""
        ...

    def whole(self, name: str) -> Any:
        """A leaf of all tasks, (tasks, ...), in float32 or wider."""
        ...


class Stacked:
    """A stack in memory: {name: (tasks, ...)}."""

    def __init__(self, stacks: Mapping[str, Any]):
        self.stacks = dict(stacks)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(x.shape[1:]) for name, x in stacks.items()}
        self.dtypes: Mapping[str, Any] = {name: x.dtype for name, x in stacks.items()}
        self.tasks = next(iter(stacks.values())).shape[0]

    def piece(self, name, start, stop):
        x = np.asarray(self.stacks[name])
        return x.reshape(self.tasks, -1)[:, start:stop].astype(wide(x.dtype), copy=False)

    def whole(self, name):
        x = self.stacks[name]
        return jax.tree.map(lambda part: jnp.asarray(part).astype(wide(part.dtype)), x)


class Listed:
    """A list of trees in memory, never stacked as a whole: [{name: (...)}]; with `base`, the differences to it."""

    def __init__(self, flats: Sequence[Mapping[str, Any]], base: Mapping[str, Any] | None = None):
        self.flats, self.base = list(flats), base
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(x.shape) for name, x in flats[0].items()}
        kind = lambda x: x.dtype if base is None else wide(x.dtype)
        self.dtypes: Mapping[str, Any] = {name: kind(x) for name, x in flats[0].items()}
        self.tasks = len(self.flats)

    def piece(self, name, start, stop):
        dtype = self.dtypes[name] if self.base is not None else wide(self.dtypes[name])
        cut = lambda flat: np.asarray(flat[name]).reshape(-1)[start:stop]
        out = buffers.array((self.tasks, stop - start), dtype)
        for row, flat in zip(out, self.flats, strict=True):
            if self.base is None:
                row[:] = cut(flat)
            else:
                np.subtract(cut(flat), cut(self.base), out=row, dtype=dtype)
        return out

    def whole(self, name):
        if hasattr(self.flats[0][name], "stacked"):
            return self.flats[0][name].stacked([flat[name] for flat in self.flats])
        shape = self.shapes[name]
        return jnp.asarray(self.piece(name, 0, int(np.prod(shape, dtype=np.int64))).reshape(self.tasks, *shape))
