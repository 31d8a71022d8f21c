"""A pool: the task vectors τ_1 … τ_n held once, tensor by tensor, in the form that memory allows.

{name: stack}, a stack being an array (vectors, …) of float32 or bfloat16, `Int8` codes with a scale for each row, or a
`LowRank` pair of stacked factors B (vectors, out, rank), A (vectors, rank, in). A tensor that a vector lacks counts as
zero in it; one that no vector moves is not in the pool.
"""
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import tree, vectors
from tvjax.merging.lowrank import LowRank, is_low_rank

STORES = ("float32", "bfloat16", "int8")
Pool = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
    """A stack as codes (vectors, …) in −127 … 127 times `scale` (vectors, rows, 1, …): the row's largest magnitude/127.

    A tensor of one axis has one scale a vector.
    """

    codes: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


def pool(taus: Sequence[Any], theta0: Any = None, *, store: str = "float32") -> Pool:
    """The task vectors `taus` (trees, whose leaves may be low-rank) as one pool.

    theta0: the pretrained parameters that they belong to; where given, names and shapes are checked against it.
    store: how arrays are held, "float32", "bfloat16" or "int8"; low-rank leaves keep their factors (bfloat16 under
      "int8").

    Raises:
      ValueError: for an empty pool, another architecture, numbers that are not finite.

    >>> held = pool([{"w": jnp.ones((2, 3))}, {"w": jnp.zeros((2, 3)), "b": jnp.ones(2)}])
    >>> {name: stack.shape for name, stack in held.items()}
    {'b': (2, 2), 'w': (2, 2, 3)}
    """
    if store not in STORES:
        raise ValueError(f"a pool is stored as {', '.join(STORES)}; got {store!r}")
    if not taus:
        raise ValueError("the pool is empty: at least one task vector is needed")
    flats = [tree.flatten(tau, is_low_rank) for tau in taus]
    _check_shapes(flats, theta0)
    names = sorted({name for flat in flats for name in flat}, key=tree.natural)
    held = {name: _stack(name, [flat.get(name) for flat in flats], store) for name in names}
    if not held:
        raise ValueError("the task vectors hold no tensor")
    return held


def size(held: Mapping[str, Any]) -> int:
    """How many task vectors a pool holds: the largest number that a tensor has."""
    return max(stack.shape[0] for stack in held.values())


def stored_bytes(held: Mapping[str, Any]) -> int:
    """Bytes of memory that a pool takes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))


def take(held: Mapping[str, Any], chosen: Any) -> Pool:
    """The pool of the vectors `chosen`: indices for all tensors, or {name: indices} with as many for each.

    >>> take({"w": jnp.arange(3.0)[:, None]}, {"w": [2, 0]})["w"].ravel().tolist()
    [2.0, 0.0]
    """
    by_name = chosen if isinstance(chosen, Mapping) else dict.fromkeys(held, chosen)
    members = lambda name, stack: jax.tree.map(lambda x: x[np.asarray(by_name[name])], stack)
    return {name: members(name, stack) for name, stack in held.items()}


def dense(stack: Any) -> Any:
    """A stack, or one member of it, as an array in float32 or wider."""
    if isinstance(stack, Int8):
        return stack.codes.astype(stack.scale.dtype) * stack.scale
    if is_low_rank(stack):
        return jnp.matmul(vectors.wide(stack.B), vectors.wide(stack.A), precision="highest")
    return vectors.wide(stack)


def entry_shape(stack: Any) -> tuple[int, ...]:
    """The shape of the tensor that a stack moves."""
    return tuple(stack.shape[1:])


def _check_shapes(flats, theta0) -> None:
    base = {} if theta0 is None else tree.flatten(theta0)
    known: dict = {name: np.shape(x) for name, x in base.items()}
    for i, flat in enumerate(flats):
        if base and (strange := [name for name in flat if name not in base]):
            raise ValueError(f"task vector {i} belongs to another architecture: only there {tree.listing(strange)}")
        for name, leaf in flat.items():
            shape = known.setdefault(name, tuple(leaf.shape))
            if tuple(leaf.shape) != tuple(shape):
                raise ValueError(f"task vector {i} belongs to another architecture: {name} is {tuple(leaf.shape)} "
                                 f"there, {tuple(shape)} here")


def _stack(name: str, leaves: list, store: str) -> Any:
    there = [leaf for leaf in leaves if leaf is not None]
    low = [is_low_rank(leaf) for leaf in there]
    if all(low):
        empty = LowRank(jnp.zeros_like(there[0].B[..., :1]), jnp.zeros_like(there[0].A[..., :1, :]))
        made = there[0].stacked([empty if leaf is None else leaf for leaf in leaves])
        return jax.tree.map(lambda x: _held(name, x, "float32" if store == "float32" else "bfloat16"), made)
    arrays = [dense(leaf) if is_low_rank(leaf) else leaf for leaf in there]
    zero = np.zeros(there[0].shape, np.float32)
    filled = iter(arrays)
    return _held(name, np.stack([np.asarray(zero if leaf is None else next(filled), np.float32) for leaf in leaves]),
                 store)


def _held(name: str, x: Any, store: str) -> Any:
    if not np.isfinite(np.asarray(x)).all():
        raise ValueError(f"the task vectors are not finite in {name}")
    if store != "int8":
        return jnp.asarray(x, store)
    axes = tuple(range(1 if x.ndim == 2 else 2, x.ndim))
    scale = np.maximum(np.abs(x).max(axes, keepdims=True), np.finfo(np.float32).tiny * 127) / np.float32(127)
    return Int8(jnp.asarray(np.rint(x / scale), jnp.int8), jnp.asarray(scale))
