"""Task vectors: τ = θ − θ0 as trees, and their arithmetic (Ilharco et al., 2022, arXiv:2212.04089).

A `TaskVector` is a nested dict of floating-point leaves (and a pytree with the same names), on which +, −, *, **,
unary minus and `sum` work. Low-precision leaves are combined in float32 and keep their dtype.
"""

import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tvjax import tree
from tvjax.tree import Tree


@jax.tree_util.register_pytree_with_keys_class
class TaskVector(dict):
    """A nested dict {name: leaf} of differences; behaves as a vector.

    >>> tau = TaskVector({"w": jnp.array([1.0, 2.0])})
    >>> sum([tau, 2 * tau, -tau])["w"].tolist()
    [2.0, 4.0]
    """

    def tree_flatten_with_keys(self):
        keys = sorted(self)
        return [(jax.tree_util.DictKey(key), self[key]) for key in keys], tuple(keys)

    @classmethod
    def tree_unflatten(cls, keys, children):
        return cls(zip(keys, children, strict=True))

    def __add__(self, other):
        return self if _is_zero(other) else add_vectors(self, other)

    __radd__ = __add__

    def __sub__(self, other):
        return self + scale_vector(other, by=-1.0)

    def __neg__(self):
        return scale_vector(self, by=-1.0)

    def __mul__(self, by):
        return scale_vector(self, by=by)

    __rmul__ = __mul__

    def __truediv__(self, by):
        return scale_vector(self, by=1.0 / by)

    def __pow__(self, exponent):
        return power(self, exponent=exponent)

    def __repr__(self):
        return f"TaskVector({len(jax.tree.leaves(self))} leaves, {tree.size(self):,} entries)"


def task_vector(theta: Tree, theta0: Tree) -> TaskVector:
    """τ = θ − θ0 over the floating-point leaves; integer leaves and flags are left out.

    Raises:
      ValueError: naming the leaves, where names, shapes or dtypes differ.

    >>> task_vector({"w": jnp.array([1.5])}, {"w": jnp.array([1.0])})["w"].tolist()
    [0.5]
    """
    theta, theta0 = floats(theta), floats(theta0)
    tree.check_same(theta, theta0, names=("theta", "theta0"))
    if not theta0:
        raise ValueError("theta0 has no floating-point leaf")
    base = tree.flatten(theta0)
    return _vector({name: _combine(jnp.subtract, x, base[name]) for name, x in tree.flatten(theta).items()})


def add(theta0: Tree, tau: Tree, *, scale=1.0) -> Tree:
    """θ0 + scale·τ, in the structure and dtypes of θ0; leaves that τ lacks (frozen ones, buffers) stay as they are.

    Source: arXiv:2212.04089, §2. `scale` is a number (traced or not); negative scales negate.

    >>> add({"w": jnp.array([1.0]), "steps": jnp.array([3])}, {"w": jnp.array([0.5])}, scale=2.0)["w"].tolist()
    [2.0]
    """
    base, step = tree.flatten(theta0), tree.flatten(tau)
    extra = [name for name in step if name not in base]
    faults = [f"only in tau: {tree.listing(extra)}"] if extra else []
    faults += tree.differences(
        {n: base[n] for n in step if n in base},
        {n: x for n, x in step.items() if n in base},
        names=("theta0", "tau"),
        dtypes=False,
    )
    if faults:
        raise ValueError(f"theta0 and tau differ: {'; '.join(faults)}")
    moved = {
        name: _combine(lambda x, y: x + scale * y, x, step[name]) if name in step else x for name, x in base.items()
    }
    return tree.rebuild(theta0, moved)


def add_vectors(a: Tree, b: Tree) -> TaskVector:
    """a + b over the leaves that both have; a warning names those that only one has, and they are left out."""
    a, b = tree.flatten(a), tree.flatten(b)
    lonely = [name for name in [*a, *b] if name not in a or name not in b]
    if lonely:
        warnings.warn(f"left out of the sum, since only one task vector has them: {tree.listing(lonely)}", stacklevel=3)
    both = [name for name in a if name in b]
    if faults := tree.differences({n: a[n] for n in both}, {n: b[n] for n in both}, names=("the first", "the second")):
        raise ValueError(f"task vectors differ: {'; '.join(faults)}")
    return _vector({name: _combine(jnp.add, a[name], b[name]) for name in both})


def scale_vector(tau: Tree, *, by) -> TaskVector:
    """by·τ; `by` is one number, traced or not."""
    return _vector({name: _combine(lambda x: by * x, x) for name, x in tree.flatten(tau).items()})


def power(tau: Tree, *, exponent) -> TaskVector:
    """τ with every entry raised to `exponent`."""
    return _vector({name: _combine(lambda x: x**exponent, x) for name, x in tree.flatten(tau).items()})


def dot(a: Tree, b: Tree) -> Float[Array, ""]:
    """⟨a, b⟩ over all leaves, accumulated in float32."""
    a, b = tree.flatten(a), tree.flatten(b)
    if faults := tree.differences(a, b, names=("the first", "the second")):
        raise ValueError(f"task vectors differ: {'; '.join(faults)}")
    return jnp.stack([jnp.vdot(wide(a[name]), wide(b[name]), precision="highest") for name in a]).sum()


def norm(tau: Tree) -> Float[Array, ""]:
    """‖τ‖ = √⟨τ, τ⟩."""
    return jnp.sqrt(dot(tau, tau))


def cosines(taus: Sequence[Tree]) -> Float[Array, "tasks tasks"]:
    """The matrix of cosines between task vectors, (tasks, tasks); a zero vector has cosine 0 with all.

    >>> cosines([{"w": jnp.array([1.0, 0.0])}, {"w": jnp.array([1.0, 1.0])}]).round(3).tolist()
    [[1.0, 0.7070000171661377], [0.7070000171661377, 1.0]]
    """
    flats = [tree.flatten(tau) for tau in taus]
    for i, flat in enumerate(flats[1:], 1):
        if faults := tree.differences(
            flats[0], flat, names=("the first task vector", f"task vector {i}"), dtypes=False
        ):
            raise ValueError(f"task vectors differ: {'; '.join(faults)}")
    gram = jnp.stack([_gram([flat[name] for flat in flats]) for name in flats[0]]).sum(0)
    lengths = jnp.sqrt(jnp.diagonal(gram))
    return gram / jnp.maximum(lengths[:, None] * lengths[None, :], jnp.finfo(gram.dtype).tiny)


def floats(theta: Tree) -> dict:
    """The floating-point leaves of a tree, as nested dicts."""
    return tree.unflatten({name: x for name, x in tree.flatten(theta).items() if tree.is_float(x)})


def delta_norm_ratio(theta: Tree, theta0: Tree) -> float:
    """‖θ − θ0‖ / ‖θ0‖: far below 1 for a fine-tuned model, about √2 for two models that do not share a base."""
    return float(norm(task_vector(theta, theta0)) / jnp.maximum(norm(floats(theta0)), jnp.finfo(jnp.float32).tiny))


def wide(x) -> Array:
    """`x` in the precision in which sums are taken: float32 for narrower dtypes, its own otherwise."""
    x = jnp.asarray(x)
    return x.astype(tree.wide(x.dtype))


def _combine(f, x, *others):
    return f(wide(x), *map(wide, others)).astype(x.dtype)


def _gram(leaves):
    rows = jnp.stack([wide(leaf).reshape(-1) for leaf in leaves])
    return jnp.matmul(rows, rows.T, precision="highest")


def _vector(flat: dict) -> TaskVector:
    return TaskVector(tree.unflatten(flat))


def _is_zero(x) -> bool:
    return np.isscalar(x) and x == 0
