"""What the engines share: which stages a leaf passes, where it stands in depth, and how a stage is applied to it."""

import functools
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import tree
from tvjax.merging import numbers
from tvjax.merging.draws import uniform
from tvjax.merging.lowrank import is_low_rank
from tvjax.merging.operator import NEEDS, Operator, Stage
from tvjax.merging.statistics import group


class Leaf(NamedTuple):
    """What is known of a leaf without its entries; shape is one task's."""

    name: str
    shape: tuple[int, ...]
    depth: float


class Place(NamedTuple):
    """Where a piece of a leaf comes from, for what depends on it; all of it may be traced."""

    name: Any  # hash of the leaf's name
    tasks: Any  # (tasks,) hashes of the tasks' names
    start: Any  # the piece's first entry
    depth: Any


def leaves(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Leaf]:
    """Leaves by name in natural order, from their shapes."""
    last: dict[str, int] = {}
    for where, index in filter(None, map(tree.block, shapes)):
        last[where] = max(index, last.get(where, 0))
    return {name: Leaf(name, tuple(shapes[name]), _depth(name, last)) for name in sorted(shapes, key=tree.natural)}


def _depth(name: str, last: Mapping[str, int]) -> float:
    found = tree.block(name)
    return found[1] / last[found[0]] if found and last[found[0]] else 0.0


def pipeline(operator: Operator, leaf: Leaf) -> list[int]:
    """The indices of the stages that a leaf passes."""
    return [i for i, stage in enumerate(operator.stages) if stage.holds(leaf.name, leaf.shape)]


def groups(scope: str, members: Iterable[Leaf]) -> dict[str, list[Leaf]]:
    """The leaves over which each value of a statistic is taken."""
    found: dict[str, list[Leaf]] = {}
    for leaf in members:
        found.setdefault(group(scope, leaf.name), []).append(leaf)
    return found


def share_of(share, members: list[Leaf], scope: str):
    """The share that holds for a group of leaves; a share that varies inside a group has no meaning and is refused."""
    if not numbers.varies(share):
        return share
    found: list[Any] = [numbers.resolve(share, leaf.name, leaf.depth) for leaf in members]
    if any(value is not found[0] and not np.array_equal(value, found[0]) for value in found):
        raise ValueError(
            f"a density that varies inside a {scope} scope has no meaning; use scope='leaf' "
            f"(leaves {members[0].name} …)"
        )
    return found[0]


def localise(stage: Stage, leaf: Leaf) -> Stage:
    """The stage as this leaf sees it: rules resolved to its numbers, guards and statistics gone (their values come
    separately).
    """
    found = {k: numbers.resolve(v, leaf.name, leaf.depth) for k, v in stage.numbers.items()}
    return Stage(stage.leaf, found, (), stage.options, stage.needs, stage.entrywise)


def apply(stage: Stage, values: tuple, x, place: Place, origin, data: Mapping[str, Any]):
    """One stage on one leaf or piece of it."""
    dtype = jax.tree.leaves(x)[0].dtype
    given = jax.tree.map(lambda v: _as(v, dtype), {k: v for k, v in stage.numbers.items() if k != "seed"})
    values = jax.tree.map(lambda v: _as(v, dtype), values)
    try:
        return stage.leaf(x, *values, **given, **dict(stage.options), **_needs(stage, x, place, origin, data))
    except (TypeError, AttributeError) as error:
        if not is_low_rank(x):
            raise
        raise ValueError(DENSE.format(stage)) from error


DENSE = "{} takes dense matrices; merge low-rank leaves inside of core_space or knots"


def check_low_rank(operator: Operator, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises one sentence where a statistic is wanted of a leaf that is still low-rank."""
    for leaf in leaves(shapes).values():
        for stage in (operator.stages[i] for i in pipeline(operator, leaf)):
            if stage.stats:
                raise ValueError(DENSE.format(stage))
            if not stage.entrywise:
                break


def _as(number, dtype):
    """Strongly typed floats take the leaf's dtype; Python numbers, integers and keys stay as they are."""
    if isinstance(number, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(number.dtype, jnp.floating):
        return jnp.asarray(number).astype(dtype)
    return number


def _needs(stage: Stage, x, place: Place, origin, data) -> dict[str, Any]:
    made = {}
    for need in stage.needs:
        if need == "uniform":
            made[need] = uniform(stage.numbers["seed"], place.name, place.tasks, place.start, x.shape, x.dtype)
        elif need == "origin":
            made[need] = origin
        elif need == "depth":
            made[need] = place.depth
        elif need == "tasks":
            made[need] = len(place.tasks)
        else:
            made[need] = data[need]
    return made


def datum(data: Mapping[str, Mapping[str, Any]], need: str, name: str):
    """What the tree of data `need` holds for the leaf `name`."""
    if name not in data[need]:
        raise ValueError(f"{need} has nothing for the leaf {name}; it has {tree.listing(list(data[need]))}")
    return data[need][name]


def wanted(operator: Operator) -> set[str]:
    """The names of the trees of data that an operator needs."""
    return {need for stage in operator.stages for need in stage.needs} - set(NEEDS)


@functools.lru_cache(maxsize=65536)
def hashed(name: str) -> np.uint32:
    """A stable 32-bit hash of a name."""
    return np.uint32(zlib.crc32(name.encode()))
