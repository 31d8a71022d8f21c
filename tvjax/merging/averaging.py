"""Sums and averages of task vectors: θ0 + λ·Σ τ_t (task arithmetic, Ilharco et al., 2022, arXiv:2212.04089) and its weighted kin."""
import jax.numpy as jnp

from tvjax.merging.numbers import Entries, per_task, sum_tasks
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


def nonzero_mean() -> Operator:
    """The mean over the tasks where the entry is not zero; 0 where it is zero in all.

    >>> nonzero_mean()({"w": jnp.array([[1.0, 0.0], [3.0, -2.0]])})["w"].tolist()
    [2.0, -2.0]
    """
    return step(_nonzero_mean)


def _nonzero_mean(x):
    return sum_tasks(x) / jnp.maximum((x != 0).sum(0, dtype=x.dtype), 1)


def largest() -> Operator:
    """The entry of largest magnitude over tasks (the first of equals).

    >>> largest()({"w": jnp.array([[1.0, 2.0], [3.0, -2.5]])})["w"].tolist()
    [3.0, -2.5]
    """
    return step(_largest)


def _largest(x):
    return jnp.take_along_axis(x, jnp.abs(x).argmax(0)[None], 0)[0]


def scale(*, by) -> Operator:
    """by·x, before or after a reduction; `by` is a number, or varies by leaf, depth or entry (not by task: see `weigh`).

    >>> scale(by=0.5)({"w": jnp.array([[2.0, 4.0]])})["w"].tolist()
    [[1.0, 2.0]]
    """
    return step(_scale, by=by)


def _scale(x, by):
    if isinstance(by, Entries):
        by = by.array
        if by.ndim == x.ndim - 1:
            by = jnp.broadcast_to(by, x.shape)
    return by * x


def weigh(*, weights) -> Operator:
    """weights_t·x_t: one number for each task (or one for all), or rules that give such numbers by leaf.

    >>> weigh(weights=jnp.array([2.0, -1.0]))({"w": jnp.array([[1.0], [4.0]])})["w"].tolist()
    [[2.0], [-4.0]]
    """
    return step(_weigh, weights=weights)


def _weigh(x, weights):
    return per_task(weights, x) * x


def task_arithmetic(*, scale=0.3) -> Operator:
    """scale·Σ_t τ_t (arXiv:2212.04089); 0.3 is the usual untuned scale for eight tasks.

    >>> task_arithmetic(scale=0.5)({"w": jnp.array([[1.0, 2.0], [3.0, -2.0]])})["w"].tolist()
    [2.0, 0.0]
    """
    return total() | step(_scale, by=scale)


def average() -> Operator:
    """Σ_t τ_t / T: the uniform average of the fine-tuned models, seen from θ0 (arXiv:2203.05482)."""
    return mean()
