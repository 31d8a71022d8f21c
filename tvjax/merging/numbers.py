"""Numbers that vary, wherever an operator takes a number: by regular expression, by depth, by task, by leaf, by entry.

A number is a scalar or a (tasks,) array; `per_task` makes either broadcast against a stack. The rules below hold such
numbers as pytree leaves, so that they can be traced, swept and differentiated like plain ones; engines resolve them for
each leaf.
"""
import dataclasses
import functools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import tree
from tvjax.merging.statistics import static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByName:
    """The value of the first pattern that the leaf's name contains, `default` where none does."""

    values: tuple
    default: Any
    patterns: tuple[str, ...] = static()

    def at(self, name, depth):
        for pattern, value in zip(self.patterns, self.values, strict=True):
            if re.search(pattern, name):
                return resolve(value, name, depth)
        return resolve(self.default, name, depth)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByDepth:
    """Anchors (anchors, ...) stretched piecewise linearly over the depth of the blocks; `outside` for other leaves."""

    anchors: Any
    outside: Any

    def at(self, name, depth):
        if tree.block(name) is None:
            return self.outside
        traced = any(isinstance(part, jax.Array) for part in jax.tree.leaves((depth, self.anchors)))
        xp, dtype = (jnp, jnp.result_type(float)) if traced else (np, np.float64)  # known numbers keep all their digits
        anchors = xp.asarray(self.anchors, dtype)
        if len(anchors) == 1:
            return anchors[0]
        position = xp.asarray(depth, dtype) * (len(anchors) - 1)
        low = xp.minimum(xp.floor(position).astype(xp.int32), len(anchors) - 2)
        part = position - low.astype(dtype)
        return (1 - part) * anchors[low] + part * anchors[low + 1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerLeaf:
    """One number for each leaf, by name."""

    values: dict[str, Any]

    def at(self, name, depth):
        if name not in self.values:
            raise ValueError(f"no number for the leaf {name}; there are {tree.listing(list(self.values))}")
        return self.values[name]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
    """One number for each entry, by leaf: arrays shaped as the leaf, or with a leading axis of tasks."""

    values: dict[str, Any]

    def at(self, name, depth):
        return Entries({"": PerLeaf(self.values).at(name, depth)})

    @property
    def array(self):
        return self.values[""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByTask:
    """One number or rule for each task."""

    values: tuple

    def at(self, name, depth):
        found = [resolve(value, name, depth) for value in self.values]
        if any(isinstance(value, jax.Array) for value in found):
            return jnp.stack([jnp.asarray(value, jnp.result_type(float)) for value in found])
        return np.asarray(found, np.float64)


def by_name(rules: Mapping[str, Any], *, default) -> ByName:
    """A number chosen by the leaf's name: {regular expression: number}, the first that matches.

    >>> resolve(by_name({"self_attn": 0.3, "bias$": 0.0}, default=1.0), "layers.0.self_attn.bias", 0.0)
    0.3
    """
    return ByName(tuple(rules.values()), default, tuple(rules))


def by_depth(anchors: Sequence[float | int] | jax.Array, *, outside=None) -> ByDepth:
    """A number that changes over depth: anchors for the first … last block, piecewise linear between them.

    outside: the number outside of blocks (the first anchor by default, as mergekit's gradients; a block that is the
    only one takes the first anchor too, where mergekit takes the last).

    >>> float(resolve(by_depth([0.0, 1.0]), "layers.1.weight", 0.5))
    0.5
    """
    if len(anchors) == 0:
        raise ValueError("by_depth takes at least one anchor; got none")
    return ByDepth(anchors, anchors[0] if outside is None else outside)


def by_task(values: Sequence[Any]) -> ByTask:
    """One number or rule for each task, so that what `by_name` and `by_depth` make may differ between tasks.

    >>> resolve(by_task([0.5, by_name({"bias": 0.0}, default=1.0)]), "fc.bias", 0.0).tolist()
    [0.5, 0.0]
    """
    return ByTask(tuple(values))


def per_leaf(values) -> PerLeaf:
    """A number for each leaf, from a tree (or {name: number}) whose leaves are scalars or (tasks,) arrays."""
    return PerLeaf(tree.flatten(values))


def entries(values) -> Entries:
    """A number for each entry, from a tree shaped as one task vector or as the stack."""
    return Entries(tree.flatten(values))


RULES = (ByName, ByDepth, PerLeaf, Entries, ByTask)


def resolve(number, name: str, depth: float):
    """The number that holds for the leaf `name`, whose block is at `depth` in [0, 1]."""
    return number.at(name, depth) if isinstance(number, RULES) else number


def varies(number) -> bool:
    """Whether a number is a rule over leaves."""
    return isinstance(number, RULES)


def per_task(number, x):
    """`number` (a scalar, (tasks,) or entry-wise) shaped so that it broadcasts against the stack `x` (tasks, ...)."""
    if isinstance(number, Entries):
        return jnp.broadcast_to(number.array, x.shape).astype(x.dtype)
    if len(_shape(number)) == 0:
        return number
    if len(number) != x.shape[0]:
        raise ValueError(f"there are {x.shape[0]} task vectors but {len(number)} numbers for them")
    return jnp.asarray(number, x.dtype).reshape(-1, *[1] * (x.ndim - 1))


def each_task(f, x, *numbers):
    """f(x_t, number_t, ...) for each task, stacked: entry-wise steps written so compile to one loop over the entries.

    numbers: scalars, (tasks,) arrays or `entries`, as in `per_task`.

    >>> each_task(lambda row, by: by * row, jnp.ones((2, 3)), jnp.array([1.0, 2.0])).tolist()
    [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    """
    stack = getattr(x, "stacked", jnp.stack)
    return stack([f(x[t], *[of_task(number, t, x) for number in numbers]) for t in range(x.shape[0])])


def of_task(number, t: int, x):
    """The part of a number (scalar, (tasks,) or entry-wise) that belongs to task `t` of the stack `x`."""
    if isinstance(number, Entries):
        return number.array[t] if _shape(number.array) == x.shape else number.array
    if len(_shape(number)) == 0:
        return number
    if len(number) != x.shape[0]:
        raise ValueError(f"there are {x.shape[0]} task vectors but {len(number)} numbers for them")
    return number[t]


def sum_tasks(x):
    """Σ_t x_t as a running sum: the same rounding for every shape, chunk and engine, and fast on CPU."""
    return functools.reduce(operator.add, [x[t] for t in range(x.shape[0])])


def _shape(x):
    return np.shape(x)
