"""TIES (Yadav et al., 2023, arXiv:2306.01708): trim each task vector, elect a sign for each entry, merge what agrees
with it."""
import jax.numpy as jnp

from tvjax.merging.averaging import largest, nonzero_mean, total, weigh
from tvjax.merging.averaging import scale as scaled
from tvjax.merging.checks import choice, share
from tvjax.merging.numbers import each_task, sum_tasks
from tvjax.merging.operator import Operator, step
from tvjax.merging.statistics import Kth, Sum, check_scope

EXTRA = {"exact": 0, "official": 1}


def top(*, density, scope: str = "global", extra: int = 0) -> Operator:
    """Keeps the ⌊density·n⌋ + extra entries of largest magnitude of each task vector (and ties with the last), over the
    model, layer or leaf.

    >>> top(density=0.5)({"w": jnp.array([[4.0, -3.0, 1.0, 0.0]])})["w"].tolist()
    [[4.0, -3.0, 0.0, 0.0]]
    """
    return step(_top, Kth(share("density", density), jnp.abs, check_scope(scope), extra, cuts=True))


def _top(x, threshold):
    return each_task(lambda row, least: jnp.where(jnp.abs(row) >= least, row, 0), x, threshold)


def agree(*, sign: str = "total", zero: str = "majority") -> Operator:
    """Zeroes the entries whose sign is not the elected one: that of their sum over tasks.

    sign: "total" (of the sum of values) or "frequency" (of the sum of signs). zero: the sign where that sum is exactly
    0: "majority" (of the elected signs over the whole model, as in the authors' code), "+", or "none" (nothing agrees).

    >>> agree()({"w": jnp.array([[2.0, -1.0], [-1.0, -3.0]])})["w"].tolist()
    [[2.0, -1.0], [0.0, -3.0]]
    """
    balance = Sum(BALANCES[choice("sign", sign, tuple(BALANCES))])
    majority = choice("zero", zero, ("majority", "+", "none")) == "majority"
    return step(_agree, *[balance] * majority, options={"sign": sign, "zero": zero})


def _agree(x, balance=0, *, sign, zero):
    elected = _elected(x, sign)
    fallback = jnp.sign(jnp.asarray(1 if zero == "+" else balance)).astype(x.dtype)
    elected = jnp.where(elected == 0, fallback, elected)
    return each_task(lambda row: jnp.where(row * elected > 0, row, 0), x)


def _elected(x, sign):
    return jnp.sign(sum_tasks(x if sign == "total" else jnp.sign(x)))


def _balance_of_totals(x):
    return _count(_elected(x, "total"))


def _balance_of_frequencies(x):
    return _count(_elected(x, "frequency"))


def _count(signs):
    """Their sum, over integers: those may be added in any order, which a compiler can do several at a time."""
    return signs.astype(jnp.int32).sum().astype(signs.dtype)


BALANCES = {"total": _balance_of_totals, "frequency": _balance_of_frequencies}


def disjoint_merge(
    *, reduce: str = "mean", weights=None, elect: str = "after_weights", divide: str = "count", sign: str = "total",
    zero: str = "majority",
) -> Operator:
    """Elects signs and merges the tasks that agree with them: steps 2 and 3 of TIES, which other sparsifiers share.

    reduce: "mean" over the agreeing tasks, their "sum", or the one of largest magnitude ("max"). weights: one number
    for each task (1 by default). elect: whether signs are elected "after_weights" multiply the task vectors or
    "before_weights" do. divide: whether the mean divides by the "count" of the agreeing tasks or by the sum of their
    (absolute) "weights". sign, zero: see `agree`.

    >>> disjoint_merge(weights=[3.0, 1.0], divide="weights")({"w": jnp.array([[1.0, 1.0], [5.0, -4.0]])})["w"].tolist()
    [2.0, -4.0]
    """
    choice("reduce", reduce, ("mean", "sum", "max"))
    choice("divide", divide, ("count", "weights"))
    early = choice("elect", elect, ("after_weights", "before_weights")) == "after_weights"
    apply = Operator() if weights is None else weigh(weights=weights)
    first, then = (apply, Operator()) if early else (Operator(), apply)
    shares = weights if divide == "weights" else None
    if reduce == "mean":
        merge = nonzero_mean(weights=None if early else weights, shares=shares)
    else:
        merge = then | (total() if reduce == "sum" else largest())
    return first | agree(sign=sign, zero=zero) | merge


def ties(
    *, density=0.2, scale=1.0, reduce: str = "mean", trim: str = "exact", scope: str = "global", weights=None,
    elect: str = "after_weights", divide: str = "count", sign: str = "total", zero: str = "majority",
) -> Operator:
    """Trim, elect, merge: `top(density) | agree() | nonzero_mean() | scale` (arXiv:2306.01708, algorithm 1).

    density: kept share of each task vector, in (0, 1]. scale: λ. trim: "exact" keeps ⌊density·n⌋ entries, "official"
    one more, as the authors' code does. scope: where the share is taken: over the whole model ("global"), each "layer"
    or each "leaf". The rest: see `disjoint_merge`.

    >>> ties(density=1.0)({"w": jnp.array([[2.0, -1.0], [-1.0, -3.0]])})["w"].tolist()
    [2.0, -2.0]
    """
    trimmed = top(density=density, scope=scope, extra=EXTRA[choice("trim", trim, tuple(EXTRA))])
    merge = disjoint_merge(reduce=reduce, weights=weights, elect=elect, divide=divide, sign=sign, zero=zero)
    return trimmed | merge | scaled(by=scale)
