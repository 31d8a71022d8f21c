"""What merging tools have beside: SCE (arXiv:2408.07990, in mergekit), and results of a given rank (PEFT)."""

import jax.numpy as jnp

from tvjax.merging import factors
from tvjax.merging.averaging import as_like
from tvjax.merging.averaging import scale as scaled
from tvjax.merging.checks import share
from tvjax.merging.numbers import each_task, sum_tasks
from tvjax.merging.operator import Operator, identity, matrix, on, step


def sce(*, density=1.0, scale=1.0) -> Operator:
    """Select, calculate, erase: Σ w_t x_t / Σ w_t over tasks that agree with the sign of Σ x, w_t = mean(x_t²) by leaf.

    density: kept share of a leaf's entries, those whose values vary most between tasks, counted among entries that
    vary at all; in (0, 1], 1 keeps all. scale: multiplies the result.

    >>> sce()({"w": jnp.array([[3.0, 1.0], [1.0, -3.0]])})["w"].tolist()
    [2.0, -3.0]
    """
    return step(_sce, entrywise=False, density=share("density", density)) | scaled(by=scale)


def _sce(x, density):
    x = jnp.where(_varied(x, as_like(density, x))[None], x, 0)
    weights = jnp.square(x).reshape(len(x), -1).mean(1)
    sign = jnp.where(sum_tasks(x) >= 0, 1, -1).astype(x.dtype)
    parts = each_task(lambda row, by: jnp.where(row * sign > 0, by, 0), x, weights)
    whole = sum_tasks(parts)
    return sum_tasks(parts * x) / jnp.where(whole > 0, whole, 1)


def _varied(x, density):
    """The ⌊density · count⌋ entries of greatest variance over tasks, count being those that vary; all for density 1."""
    mean = sum_tasks(x) / len(x)
    variance = sum_tasks(jnp.square(x - mean[None])) / len(x)
    kept = jnp.floor(density * (variance > 0).sum().astype(x.dtype)).astype(jnp.int32)
    # By place, not by comparing with the k-th value: fused twice, the same variance may round in two ways.
    order = jnp.argsort(variance.reshape(-1))
    last = jnp.arange(variance.size) >= variance.size - kept
    return (density >= 1) | jnp.zeros(variance.size, bool).at[order].set(last).reshape(variance.shape)


def truncate(*, rank: int) -> Operator:
    """The nearest matrix of at most that rank, for each merged matrix (and each of a stack); other leaves as they are.

    >>> truncate(rank=1)({"w": jnp.diag(jnp.array([3.0, 1.0]))[None]})["w"][0].round(5).tolist()
    [[3.0, 0.0], [0.0, 0.0]]
    """
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank is a whole number of at least 1; got {rank!r}")
    return on(matrix, step(_truncate, options={"rank": rank}, entrywise=False), identity())


def _truncate(x, rank):
    return factors.build(factors.svd(x, k=rank))
