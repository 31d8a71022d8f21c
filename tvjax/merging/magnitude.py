"""Merging by magnitude: Model Breadcrumbs (arXiv:2312.06795), MagMax (arXiv:2407.06322), EMR's unified vector
(arXiv:2405.17461), PCB (arXiv:2410.02396)."""
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tvjax.merging.averaging import as_like, largest, task_arithmetic
from tvjax.merging.averaging import scale as scaled
from tvjax.merging.checks import choice, share, weights, within
from tvjax.merging.numbers import RULES, each_task, sum_tasks
from tvjax.merging.operator import Operator, step
from tvjax.merging.signs import disjoint_merge, top
from tvjax.merging.statistics import Greatest, Kth, check_scope


def _negated(x):
    return -jnp.abs(x)


# ---------------------------------------------------------------- Breadcrumbs
def tails(*, beta=0.0, gamma=0.0, scope: str = "leaf") -> Operator:
    """Zeroes the ⌊beta·n⌋ smallest and the ⌊gamma·n⌋ largest magnitudes of each task vector (but for ties with the last
    one kept).

    beta, gamma: shares in [0, 1). scope: where they are taken, by "leaf", "layer" or over the model ("global").

    >>> tails(beta=0.25, gamma=0.25)({"w": jnp.array([[4.0, -3.0, 1.0, 0.5]])})["w"].tolist()
    [[0.0, -3.0, 1.0, 0.0]]
    """
    within("beta", beta, 0, 1, open_high=True)
    within("gamma", gamma, 0, 1, open_high=True)
    check_scope(scope)
    return step(_tails, Kth(beta, _negated, scope, 1), Kth(gamma, jnp.abs, scope, 1))


def _tails(x, least, most):
    inside = lambda row, low, high: jnp.where((jnp.abs(row) >= -low) & (jnp.abs(row) <= high), row, 0)
    return each_task(inside, x, least, most)


def _crumbs(density, beta, gamma, scope) -> Operator:
    if density is None:
        return tails(beta=0.9 if beta is None else beta, gamma=gamma, scope=scope)
    if beta is not None:
        raise ValueError("breadcrumbs takes density or beta, not both (beta = 1 - density - gamma)")
    return tails(gamma=gamma, scope=scope) | top(density=share("density", density), scope=scope)


def breadcrumbs(
    *, beta=None, gamma=0.01, density=None, scale=0.3, scope: str = "leaf", weights=None, normalize: bool = False
) -> Operator:
    """Task arithmetic without the smallest and the largest entries (arXiv:2312.06795).

    beta, gamma: dropped shares of each leaf, of the smallest (0.9 by default) and the largest. density: instead of
    beta, the share that is kept once the largest are gone. scale, weights, normalize: see `task_arithmetic`.

    >>> breadcrumbs(density=0.5, gamma=0.25, scale=1.0)({"w": jnp.array([[4.0, -3.0, 1.0, 0.5]])})["w"].tolist()
    [0.0, -3.0, 1.0, 0.0]
    """
    return _crumbs(density, beta, gamma, scope) | task_arithmetic(scale=scale, weights=weights, normalize=normalize)


def breadcrumbs_ties(
    *, beta=None, gamma=0.01, density=None, scale=1.0, scope: str = "leaf", reduce: str = "mean", weights=None,
    elect: str = "after_weights", divide: str = "count", sign: str = "total", zero: str = "majority",
) -> Operator:
    """TIES (arXiv:2306.01708) whose trim leaves out the largest entries too (arXiv:2312.06795): beta, gamma and density
    as in `breadcrumbs`, the rest as in `disjoint_merge`.

    >>> breadcrumbs_ties(beta=0.34, gamma=0.0)({"w": jnp.array([[2.0, -1.0, 0.5], [-1.0, -3.0, 0.25]])})["w"].tolist()
    [2.0, -2.0, 0.0]
    """
    merge = disjoint_merge(reduce=reduce, weights=weights, elect=elect, divide=divide, sign=sign, zero=zero)
    return _crumbs(density, beta, gamma, scope) | merge | scaled(by=scale)


# ---------------------------------------------------------------- MagMax
def magmax(*, scale=0.5, ties: str = "first") -> Operator:
    """scale · the entry of largest magnitude over tasks (arXiv:2407.06322); of equals the "first" or the "last" task's.

    >>> magmax(scale=1.0)({"w": jnp.array([[1.0, 2.0], [-3.0, -2.0]])})["w"].tolist()
    [-3.0, 2.0]
    """
    return largest(ties=ties) | scaled(by=scale)


# ---------------------------------------------------------------- EMR
def emr(*, scale=1.0) -> Operator:
    """EMR's unified vector: the sign of Σ τ (0 counts as −) and the largest magnitude among the tasks of that sign
    (arXiv:2405.17461).

    It is a model of its own only with each task's mask and factor: scale_t · mask_t · unified, from `emr_mask` and
    `emr_rescale`.

    >>> emr()({"w": jnp.array([[1.0, 2.0], [-3.0, -2.0]])})["w"].tolist()
    [-3.0, -2.0]
    """
    return step(_unify) | scaled(by=scale)


def _unify(x):
    sign = jnp.where(sum_tasks(x) > 0, 1, -1).astype(x.dtype)
    return functools.reduce(jnp.maximum, each_task(lambda row: jnp.maximum(row * sign, 0), x)) * sign


def emr_mask(taus, unified):
    """Boolean masks (tasks, ...): where a task vector has the sign of the unified vector."""
    return jax.tree.map(lambda x, u: x * u[None] > 0, taus, unified)


def emr_rescale(taus, unified, *, average: str = "leaf"):
    """(tasks,) factors Σ mean|τ_t| / Σ mean|mask_t·unified|, which keep the average magnitude of each task.

    average: the means are taken by "leaf" and added up, as in the authors' code, or over all entries at once ("entry").
    """
    power = {"leaf": 1, "entry": 0}[choice("average", average, ("leaf", "entry"))]
    mean = lambda x: jnp.abs(x).reshape(len(x), -1).sum(1) / max(x[0].size, 1) ** power
    total = lambda parts: sum(map(mean, jax.tree.leaves(parts)))
    kept = total(jax.tree.map(lambda u, m: jnp.where(m, u[None], 0), unified, emr_mask(taus, unified)))
    return total(taus) / jnp.where(kept > 0, kept, 1)


# ---------------------------------------------------------------- PCB
class Balanced(NamedTuple):
    """Task vectors with clamped magnitudes, and how much each entry counts against its own and the other tasks'
    entries."""

    taus: Any
    scores: Any


def pcb(*, density=0.1, scale=1.0, low=1e-4, high=1e-4, scope: str = "global") -> Operator:
    """Parameter competition balancing (arXiv:2410.02396): Σ s_t λ_t τ̂_t / Σ s_t with scores s =
    n(exp(T·n(|τ̂|)²)·tanh(τ·Σ τ)) of the top entries.

    n maps the least value of a task vector to 0 and its greatest to 1; τ̂ has its magnitudes clamped at their tails.
    density: share of entries whose scores count, in (0, 1] (the paper tunes 0.05 … 0.2). scale: λ, a number or one for
    each task. low, high: shares of the smallest and largest magnitudes that are clamped. scope: where shares and n are
    taken. tanh has a unit: c·τ merges to other than c times the merge.

    >>> pcb(density=1.0)({"w": jnp.array([[2.0, -1.0, 0.5], [-1.0, -3.0, 0.25]])})["w"].round(4).tolist()
    [1.0, -1.0, 0.25]
    """
    within("low", low, 0, 1, open_high=True)
    within("high", high, 0, 1, open_high=True)
    share("density", density)
    check_scope(scope)
    # the authors index sorted scores from below; -score turns that into a k-th largest
    smallest, largest = Kth(low, _negated, scope, 1), Kth(_rest(high), _negated, scope, 0)
    compete = step(_balance, smallest, largest)
    fuse = step(_fuse, Kth(_rest(density), _negated_scores, scope, 1), Greatest(_scores, scope), scale=weights(scale))
    return compete | fuse


def _rest(share):
    """1 − share, also of every number of a rule."""
    return jax.tree.map(lambda value: 1 - value, share) if isinstance(share, RULES) else 1 - share


def _scores(balanced):
    return balanced.scores


def _negated_scores(balanced):
    return -balanced.scores


def _between(x, least, most):
    return jnp.where(most > least, (x - least) / jnp.where(most > least, most - least, 1), 0)


def _balance(x, least, most):
    least, most = -least, -most
    total = sum_tasks(x)
    clamped = each_task(lambda row, low, high: jnp.clip(jnp.abs(row), low, high), x, least, most)
    intra = each_task(lambda row, low, high: jnp.exp(len(x) * _between(row, low, high) ** 2), clamped, least, most)
    return Balanced(jnp.sign(x) * clamped, intra * jnp.tanh(x * total[None]))


def _fuse(balanced, least, most, scale):
    inter = lambda row, low, high: _between(jnp.clip(row, low, high), low, high)
    scores = each_task(inter, balanced.scores, -least, most)
    parts = each_task(lambda row, by: as_like(by, row) * row, balanced.taus * scores, scale)
    return sum_tasks(parts) / jnp.maximum(sum_tasks(scores), 1e-12)
