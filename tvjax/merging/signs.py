"""TIES (Yadav et al., 2023, arXiv:2306.01708): trim each task vector, elect a sign for each entry, merge what agrees with it."""
import jax.numpy as jnp

from tvjax.merging.averaging import largest, nonzero_mean, scale, total
from tvjax.merging.checks import choice, share
from tvjax.merging.numbers import per_task, sum_tasks
from tvjax.merging.operator import Operator, Stage, step
from tvjax.merging.statistics import Kth, Sum, check_scope

REDUCTIONS = {"mean": nonzero_mean, "sum": total, "max": largest}


def top(*, density, scope: str = "global", extra: int = 0) -> Operator:
    """Keeps the ⌊density·n⌋ + extra entries of largest magnitude of each task vector (and ties with the last), over the model, layer or leaf.

    >>> top(density=0.5)({"w": jnp.array([[4.0, -3.0, 1.0, 0.0]])})["w"].tolist()
    [[4.0, -3.0, 0.0, 0.0]]
    """
    return step(_top, Kth(share("density", density), jnp.abs, check_scope(scope), extra))


def _top(x, threshold):
    return jnp.where(jnp.abs(x) >= per_task(threshold, x), x, 0)


def agree(*, zero: str = "majority") -> Operator:
    """Zeroes the entries whose sign is not that of their sum over tasks.

    zero: the sign where the sum is exactly 0: "majority" (the sign of the balance of signs over the whole model, as the authors' code), "+", or
      "none" (nothing agrees).

    >>> agree()({"w": jnp.array([[2.0, -1.0], [-1.0, -3.0]])})["w"].tolist()
    [[2.0, -1.0], [0.0, -3.0]]
    """
    if choice("zero", zero, ("majority", "+", "none")) == "majority":
        return step(_agree_majority, Sum(_balance))
    return Operator((Stage(_agree, options=(("zero", 1 if zero == "+" else 0),)),))


def _balance(x):
    return jnp.sign(sum_tasks(x)).sum()


def _agree_majority(x, balance):
    return _agree(x, jnp.sign(balance))


def _agree(x, zero):
    sign = jnp.sign(sum_tasks(x))
    sign = jnp.where(sign == 0, jnp.asarray(zero, x.dtype), sign)
    return jnp.where(x * sign[None] > 0, x, 0)


def ties(*, density=0.2, scale=1.0, reduce: str = "mean", trim: str = "exact", zero: str = "majority", scope: str = "global") -> Operator:
    """Trim, elect, merge: `top(density) | agree() | nonzero_mean() | scale` (arXiv:2306.01708, algorithm 1).

    density: kept share of each task vector, in (0, 1]. scale: λ. reduce: "mean" over the agreeing tasks, "sum" or "max" (largest magnitude).
    trim: "exact" keeps ⌊density·n⌋ entries, "official" one more, as the authors' code does. zero: see `agree`. scope: see `top`.

    >>> ties(density=1.0)({"w": jnp.array([[2.0, -1.0], [-1.0, -3.0]])})["w"].tolist()
    [2.0, -2.0]
    """
    extra = {"exact": 0, "official": 1}[choice("trim", trim, ("exact", "official"))]
    merge = REDUCTIONS[choice("reduce", reduce, tuple(REDUCTIONS))]
    return top(density=density, scope=scope, extra=extra) | agree(zero=zero) | merge() | _scaled(scale)


def _scaled(by) -> Operator:
    return scale(by=by)
