"""Learned scaling of task vectors, aTLAS (Zhang et al., 2024, arXiv:2407.02880): θ(Λ) = θ0 + Σ_i Λ_i τ_i.

Λ_i scales τ_i block by block: what a block is says the `Scheme`, from one for the whole vector (a learned task
arithmetic) over one a tensor (layer-wise AdaMerging, aTLAS) to K random parts of every matrix (aTLAS×K). The
coefficients are a flat dict of arrays, (vectors,) or (vectors, blocks), without bounds: they are traced, so that
gradients, `vmap` and optimisers treat them as any parameters. At zero, θ is θ0 bit for bit.
"""
import dataclasses
import functools
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tvjax import tree, vectors
from tvjax.learning.pool import Pool, dense, entry_shape, size
from tvjax.merging.lowrank import is_low_rank

BY = ("task", "tensor", "row", "column", "part")
BLOCKS = ("all", "weights")
SHARING = ("none", "shape")
TOGETHER = 8  # vectors that one fused pass adds up
TASK = "task"  # the one key of the coefficients by task
Coefficients = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Which entries of a task vector share a coefficient.

    by: "task", one a vector (isotropic); "tensor", one a tensor; "row" or "column", one for each index of the first
      or second axis of a tensor; "part", one for each of `parts` random parts of its entries. The last three treat a
      tensor of one axis as "tensor" does.
    parts: K. seed: of the random parts, which depend on seed, name and shape alone.
    sharing: "none", every tensor has parts of its own; "shape", tensors of one shape share them, as in the released
      code.
    blocks: "all" tensors, or "weights", those of two axes and more; the others then stay at θ0.

    >>> Scheme(by="part", parts=20).by
    'part'
    >>> Scheme(by="layer")
    Traceback (most recent call last):
    ...
    ValueError: by is one of task, tensor, row, column, part; got 'layer'
    """

    by: str = "tensor"
    parts: int = 1
    seed: int = 0
    sharing: str = "none"
    blocks: str = "all"

    def __post_init__(self):
        for name, known in (("by", BY), ("sharing", SHARING), ("blocks", BLOCKS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}; got {getattr(self, name)!r}")
        if self.parts < 1 or (self.parts > 1 and self.by != "part"):
            raise ValueError(f"parts counts random parts, from 1 on, and goes with by='part'; got parts={self.parts}, "
                             f"by={self.by!r}")


def init(held: Pool, scheme: Scheme, *, value: float = 0.0) -> Coefficients:
    """Coefficients that all equal `value`; 0, the default, is the pretrained model.

    >>> held = {"w": jnp.ones((2, 3, 4)), "b": jnp.ones((2, 3))}
    >>> {name: c.shape for name, c in init(held, Scheme(by="row")).items()}
    {'w': (2, 3), 'b': (2,)}
    """
    names = [name for name, stack in held.items() if scales(scheme, stack)]
    if not names:
        raise ValueError("no tensor of the pool has two axes, so blocks='weights' leaves nothing to scale")
    full = lambda *shape: jnp.full(shape, value, jnp.float32)
    if scheme.by == "task":
        return {TASK: full(size(held))}
    return {name: full(held[name].shape[0], *_blocks(scheme, entry_shape(held[name]))) for name in names}


def count(coefficients: Mapping[str, Any]) -> int:
    """How many numbers are learned."""
    return tree.size(coefficients)


def scales(scheme: Scheme, stack: Any) -> bool:
    """Whether the scheme moves this tensor at all."""
    return scheme.blocks == "all" or len(entry_shape(stack)) > 1


def delta(held: Pool, coefficients: Coefficients, scheme: Scheme) -> dict:
    """Σ_i Λ_i τ_i as nested dicts, in float32.

    Each tensor is summed anew in the backward pass (`jax.checkpoint`): what stays in memory is the pool as it is held,
    never a scaled or widened copy of it. Low-rank stacks are multiplied factor by factor; only random parts, which
    need entries, form the product of one tensor of one vector at a time.
    """
    flat = {}
    for name, stack in held.items():
        if scales(scheme, stack):
            c = coefficients[TASK] if scheme.by == "task" else coefficients[name]
            flat[name] = _summed(stack, c, name, scheme)
    return tree.unflatten(flat)


def compose(theta0: Any, held: Pool, coefficients: Coefficients, scheme: Scheme) -> Any:
    """θ(Λ) = θ0 + Σ_i Λ_i τ_i, in the structure and dtypes of θ0; differentiable in the coefficients.

    Source: arXiv:2407.02880, equation 2. Call it inside `jit` with θ0 and the pool as arguments; `scheme` is static.

    >>> theta0, held = {"w": jnp.ones(2)}, {"w": jnp.array([[1.0, 2.0], [0.0, 4.0]])}
    >>> compose(theta0, held, {"w": jnp.array([1.0, -0.5])}, Scheme())["w"].tolist()
    [2.0, 1.0]
    """
    return vectors.add(theta0, delta(held, coefficients, scheme))


def parts_of(name: str, shape: tuple[int, ...], scheme: Scheme) -> Array:
    """The part, 0 … K − 1, of every entry of a tensor: uniform and independent, the same wherever it is drawn.

    Drawn anew wherever it is used, so that parts take no memory between two steps.
    """
    text = name if scheme.sharing == "none" else "×".join(map(str, shape))
    data = jax.random.key_data(jax.random.key(scheme.seed))
    key = jax.random.wrap_key_data(jax.lax.optimization_barrier(data))  # drawn when it runs, not when it compiles
    return jax.random.randint(jax.random.fold_in(key, zlib.crc32(text.encode())), shape, 0, scheme.parts)


def penalty(coefficients: Coefficients, *, p: int, strength: float = 0.5) -> Float[Array, ""]:
    """strength · mean over blocks of ‖(λ_1 … λ_n)‖_p, the norm taken over the vectors (arXiv:2407.02880, appendix A).

    >>> float(penalty({"w": jnp.array([3.0, -4.0])}, p=1)), float(penalty({"w": jnp.array([3.0, -4.0])}, p=2))
    (3.5, 2.5)
    """
    if p not in (1, 2):
        raise ValueError(f"p is 1 or 2; got {p!r}")
    columns = [c.reshape(c.shape[0], -1) for c in coefficients.values()]
    norms = [jnp.abs(c).sum(0) if p == 1 else _length(c) for c in columns]
    return strength * jnp.concatenate(norms).mean()


def _length(c):
    """‖c‖₂ over the first axis, with derivative 0 where it is 0."""
    squares = jnp.square(c).sum(0)
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)


def _blocks(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a tensor's coefficients after that of the vectors."""
    if len(shape) < 2 or scheme.by == "tensor":
        return ()
    return {"row": (shape[0],), "column": (shape[1],), "part": (scheme.parts,)}[scheme.by]


@functools.partial(jax.checkpoint, static_argnums=(2, 3))
def _summed(stack, c, name, scheme):
    """Σ_i Λ_i τ_i of one tensor."""
    shape = entry_shape(stack)
    by = scheme.by if len(shape) > 1 else "tensor"
    if by == "part":
        return by_parts(stack, c, parts_of(name, shape, scheme))
    if is_low_rank(stack):
        return _of_factors(stack, c, by)
    ahead = (1,) if by == "column" else ()
    spread = c.reshape(c.shape[0], *ahead, *c.shape[1:], *(1,) * (len(shape) + 1 - c.ndim - len(ahead)))
    return scaled_sum(stack, spread)


@jax.custom_vjp
def scaled_sum(stack: Any, spread: Array) -> Array:
    """Σ_i spread_i · τ_i; spread: (vectors, …) of the stack's rank, 1 where a coefficient holds for a whole axis.

    A running sum over the vectors forwards and one reduction backwards: XLA's CPU code for a reduction over the first
    axis is a thousand times slower, and neither keeps a copy of the stack. The sum runs over groups of `TOGETHER`
    vectors, one after the other: of twenty bfloat16 ones at once XLA would keep wide copies.

    >>> scaled_sum(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[1.0], [0.5]])).tolist()
    [2.5, 4.0]
    """
    total: Any = None
    for first in range(0, spread.shape[0], TOGETHER):
        if total is not None:
            total, stack = jax.lax.optimization_barrier((total, stack))
        group = [] if total is None else [total]
        for i in range(first, min(first + TOGETHER, spread.shape[0])):
            group.append(spread[i] * dense(jax.tree.map(lambda x, i=i: x[i], stack)))
        total = functools.reduce(jnp.add, group)
    return total


def _scaled_sum_forwards(stack, spread):
    return scaled_sum(stack, spread), (stack, spread)


def _scaled_sum_backwards(held, slope):
    stack, spread = held
    whole = tuple(axis for axis in range(1, spread.ndim) if spread.shape[axis] == 1)
    mine = (dense(stack) * slope[None]).sum(whole, keepdims=True).astype(spread.dtype)
    return (spread * slope[None]).astype(stack.dtype) if isinstance(stack, jax.Array) else None, mine


scaled_sum.defvjp(_scaled_sum_forwards, _scaled_sum_backwards)


def _of_factors(stack, c, by):
    """Σ_i Λ_i B_i A_i from the factors alone."""
    B, A = vectors.wide(stack.B), vectors.wide(stack.A)
    if by == "column":
        A = A * c[:, None, :]
    else:
        B = B * (c[:, :, None] if by == "row" else c[:, None, None])
    return jnp.einsum("tor,tri->oi", B, A, precision="highest")


def by_parts(stack: Any, c: Array, parts: Array) -> Array:
    """Σ_i λ_i[parts] ⊙ τ_i of one tensor, one vector after the other; c: (vectors, K), parts: integers, as the tensor.

    >>> tau = jnp.array([[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]])
    >>> by_parts(tau, jnp.array([[0.5, 2.0]]), jnp.array([[0, 1, 0], [1, 1, 0]])).tolist()
    [[0.0, 2.0, 1.0], [6.0, 8.0, 2.5]]
    """
    @jax.checkpoint
    def step(total, one):
        member, scale = one
        return total + scale[parts] * dense(member), None
    return jax.lax.scan(step, jnp.zeros(parts.shape, jnp.float32), (stack, c))[0]
