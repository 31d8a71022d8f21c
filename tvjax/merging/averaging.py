"""Sums and averages of task vectors: θ0 + λ·Σ τ_t (task arithmetic, Ilharco et al., 2022, arXiv:2212.04089) and its
weighted kin."""
from typing import Any

import jax.numpy as jnp

from tvjax.merging import checks
from tvjax.merging.checks import choice
from tvjax.merging.numbers import Entries, each_task, of_task, sum_tasks
from tvjax.merging.operator import Operator, step


def total() -> Operator:
    """Σ_t x_t, entry by entry.

    >>> total()({"w": jnp.array([[1.0, 2.0], [3.0, -2.0]])})["w"].tolist()
    [4.0, 0.0]
    """
    return step(_total)


def _total(x):
    return sum_tasks(x)


def mean() -> Operator:
    """The mean over tasks, entry by entry.

    >>> mean()({"w": jnp.array([[1.0, 2.0], [3.0, -2.0]])})["w"].tolist()
    [2.0, 0.0]
    """
    return step(_mean)


def _mean(x):
    return sum_tasks(x) / x.shape[0]


def nonzero_mean(*, weights=None, shares=None) -> Operator:
    """Σ w_t x_t / Σ |s_t| over the tasks where the entry is not zero; 0 where it is zero in all.

    weights: w, and shares: s, one number for each task (1 by default). So `weights` without `shares` divides by the
    count of the tasks.

    >>> nonzero_mean()({"w": jnp.array([[1.0, 0.0], [3.0, -2.0]])})["w"].tolist()
    [2.0, -2.0]
    """
    given: dict[str, Any] = {"weights": checks.weights(weights), "shares": checks.weights(shares)}
    return step(_nonzero_mean, **{name: value for name, value in given.items() if value is not None})


def _nonzero_mean(x, weights=1.0, shares=1.0):
    there = each_task(lambda row, part: jnp.where(row != 0, jnp.abs(as_like(part, row)), 0), x, shares)
    parts = sum_tasks(there)
    return sum_tasks(_weigh(x, weights)) / jnp.where(parts > 0, parts, 1)


def largest(*, ties: str = "first") -> Operator:
    """The entry of largest magnitude over tasks; of equals the "first" or the "last" task's.

    >>> largest()({"w": jnp.array([[1.0, 2.0], [3.0, -2.0]])})["w"].tolist()
    [3.0, 2.0]
    """
    return step(_largest, options={"ties": choice("ties", ties, ("first", "last"))})


def _largest(x, ties):
    rows = [x[t] for t in range(x.shape[0])]
    best, *others = rows if ties == "first" else rows[::-1]
    for row in others:
        best = jnp.where(jnp.abs(row) > jnp.abs(best), row, best)
    return best


def scale(*, by) -> Operator:
    """by·x, before or after a reduction; `by` is a number, or varies by leaf, depth or entry (not by task: see
    `weigh`).

    >>> scale(by=0.5)({"w": jnp.array([[2.0, 4.0]])})["w"].tolist()
    [[1.0, 2.0]]
    """
    return step(_scale, by=by)


def _scale(x, by):
    if not isinstance(by, Entries):
        if jnp.ndim(by):
            raise ValueError(f"scale takes one number, which may vary by leaf; got {jnp.shape(by)[0]} (see weigh)")
        return as_like(by, x) * x
    by = by.array
    if by.ndim == x.ndim - 1:
        by = jnp.broadcast_to(by, x.shape)
    return by * x


def weigh(*, weights) -> Operator:
    """weights_t·x_t: one number for each task (or one for all), or rules that give such numbers by leaf.

    >>> weigh(weights=jnp.array([2.0, -1.0]))({"w": jnp.array([[1.0], [4.0]])})["w"].tolist()
    [[2.0], [-4.0]]
    """
    return step(_weigh, weights=checks.weights(weights))


def _weigh(x, weights):
    return each_task(lambda row, weight: as_like(weight, row) * row, x, weights)


def as_like(number, x):
    """A number in the precision of `x`; integers become floats."""
    return jnp.asarray(number).astype(getattr(x.dtype, "factors", x.dtype))


def task_arithmetic(*, scale=0.3, weights=None, normalize: bool = False) -> Operator:
    """scale·Σ_t w_t τ_t (arXiv:2212.04089), with `normalize` divided by Σ w_t.

    scale: λ; 0.3 is the usual untuned value for eight tasks. weights: w, one number for each task (1 by default);
    negative ones negate a task.

    >>> task_arithmetic(scale=0.5)({"w": jnp.array([[1.0, 2.0], [3.0, -2.0]])})["w"].tolist()
    [2.0, 0.0]
    """
    return average(weights=weights, normalize=normalize) | step(_scale, by=scale)


def average(*, weights=None, normalize: bool = True) -> Operator:
    """Σ_t w_t τ_t / Σ_t w_t: the average of the fine-tuned models, seen from θ0 (arXiv:2203.05482); without `normalize`
    the sum alone.

    weights: w, one number for each task (1 by default), or rules that give them by leaf; they must not sum to 0 if they
    are normalized.

    >>> average(weights=[3.0, 1.0])({"w": jnp.array([[1.0, 2.0], [3.0, -2.0]])})["w"].tolist()
    [1.5, 1.0]
    """
    if weights is None:
        return mean() if normalize else total()
    if not normalize:
        return weigh(weights=weights) | total()
    return step(_weighted_mean, weights=checks.weights(weights, normalize=True))


def _weighted_mean(x, weights):
    parts = [as_like(of_task(weights, t, x), x) for t in range(x.shape[0])]
    whole = sum(parts[1:], start=parts[0])
    # weights that vary may vanish for a leaf or an entry, which then stays 0
    return sum_tasks(_weigh(x, weights)) / jnp.where(whole == 0, 1, whole)
