"""Random sparsification: DARE (Yu et al., 2024, arXiv:2311.03099) drops entries at random, DELLA (Deep et al., 2024,
arXiv:2406.11617) small ones more often.

x → m·x/p, where m is 1 with probability p. Draws belong to entries: they follow the names of tasks and leaves, never
order, device or chunking.
"""
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tvjax.merging.averaging import as_like, task_arithmetic
from tvjax.merging.averaging import scale as scaled
from tvjax.merging.checks import choice, concrete, share
from tvjax.merging.numbers import each_task, per_task, varies
from tvjax.merging.operator import Operator, identity, step
from tvjax.merging.signs import disjoint_merge, top
from tvjax.merging.statistics import Sum, check_scope


class Thinned(NamedTuple):
    """Task vectors after a drop, and before it."""

    kept: Any
    before: Any


def drop(*, density=0.5, seed=0, rescale: str = "inverse_density", scope: str = "leaf") -> Operator:
    """Keeps each entry with probability `density`.

    density: in (0, 1]. seed: an integer or a key. rescale: "inverse_density" divides what is kept by it (right on
    average), "l1" gives each task vector the ℓ1 norm that it had before the drop, by `scope` (right in ℓ1 each time; a
    leaf of which nothing is left stays 0), or "none".

    >>> drop(density=0.5)({"w": jnp.ones((1, 6))})["w"].tolist()
    [[2.0, 0.0, 0.0, 2.0, 2.0, 0.0]]
    """
    choice("rescale", rescale, ("inverse_density", "l1", "none"))
    options = {"rescale": rescale}
    dropped = step(_drop, options=options, needs=("uniform",), density=share("density", density), seed=seed)
    return dropped | (match_l1(scope=scope) if rescale == "l1" else identity())


def _drop(x, density, rescale, uniform):
    kept = jnp.where(uniform < per_task(density, x), x, 0)
    return _rescaled(kept, x, as_like(per_task(density, x), x), rescale)


def _rescaled(kept, x, probability, rescale):
    if rescale == "l1":
        return Thinned(kept, x)
    return kept if rescale == "none" else kept / probability


def match_l1(*, scope: str = "leaf") -> Operator:
    """Rescales `Thinned` task vectors to the ℓ1 norms that they had before."""
    return step(_match_l1, Sum(_l1_norms, check_scope(scope)))


def _l1_norms(thinned):
    return jnp.stack([jnp.abs(x).reshape(len(x), -1).sum(1) for x in thinned])


def _match_l1(thinned, norms):
    kept, before = norms
    ratio = jnp.where(kept > 0, before / jnp.where(kept > 0, kept, 1), 1)
    return each_task(lambda row, by: by * row, thinned.kept, ratio)


def drop_by_rank(
    *, density=0.5, epsilon=0.1, seed=0, rescale: str = "inverse_probability", scope: str = "leaf"
) -> Operator:
    """Keeps each entry with a probability that grows linearly with its magnitude's rank in its row, from density −
    epsilon to density + epsilon.

    A row is what belongs to the first index of a leaf (an output); a vector is one row. Equal magnitudes share their
    mean rank, so constant rows and rows of one entry are kept with probability `density`. epsilon: from 0 to
    min(density, 1 − density). rescale: "inverse_probability" divides each entry by its own probability, "l1" and "none"
    as in `drop`.

    >>> drop_by_rank(density=0.5, epsilon=0.5, rescale="none")({"w": jnp.array([[[1.0, 9.0]]])})["w"].tolist()
    [[[0.0, 9.0]]]
    """
    choice("rescale", rescale, ("inverse_probability", "l1", "none"))
    _check_epsilon(share("density", density), epsilon)
    options, given = {"rescale": rescale}, {"density": density, "epsilon": epsilon, "seed": seed}
    dropped = step(_drop_by_rank, options=options, needs=("uniform",), entrywise=False, **given)
    return dropped | (match_l1(scope=scope) if rescale == "l1" else identity())


def _check_epsilon(density, epsilon):
    if varies(density) or varies(epsilon):
        return
    for p in concrete(density):
        for e in concrete(epsilon):
            if ((e < 0) | (e > p + 1e-9) | (e > 1 - p + 1e-9)).any():
                raise ValueError(f"epsilon lies in [0, min(density, 1 - density)]; got {e} with density {p}")


def _drop_by_rank(x, density, epsilon, rescale, uniform):
    spread = as_like(per_task(epsilon, x), x) * (2 * relative_ranks(jnp.abs(x)) - 1)
    probability = jnp.clip(as_like(per_task(density, x), x) + spread, 0, 1)
    kept = jnp.where(uniform < probability, x, 0)
    return _rescaled(kept, x, jnp.where(probability > 0, probability, 1), rescale)


def relative_ranks(x):
    """Where each entry stands in its row of a stack (tasks, ...), from 0 (least) to 1 (greatest); equals share their
    mean, one alone stands at 1/2."""
    rows = x.reshape(-1, x[0, 0].size if x.ndim > 2 else x[0].size)
    ordered = jnp.sort(rows, 1)
    below = jax.vmap(lambda row, of: jnp.searchsorted(row, of, side="left"))(ordered, rows)
    upto = jax.vmap(lambda row, of: jnp.searchsorted(row, of, side="right"))(ordered, rows)
    last = rows.shape[1] - 1
    return ((below + upto - 1).astype(x.dtype) / (2 * last) if last else jnp.full_like(rows, 0.5)).reshape(x.shape)


def dare(
    *, density=0.5, scale=0.3, seed=0, rescale: str = "inverse_density", weights=None, normalize: bool = False
) -> Operator:
    """Drop and rescale, then task arithmetic: scale·Σ w_t m_t τ_t/density (arXiv:2311.03099).

    density, seed, rescale: see `drop` (the paper's p is 1 − density). scale, weights, normalize: see `task_arithmetic`.

    >>> dare(density=1.0, scale=0.5)({"w": jnp.array([[1.0, 2.0], [3.0, -2.0]])})["w"].tolist()
    [2.0, 0.0]
    """
    dropped = drop(density=density, seed=seed, rescale=rescale)
    return dropped | task_arithmetic(scale=scale, weights=weights, normalize=normalize)


def dare_ties(
    *, density=0.5, scale=1.0, seed=0, rescale: str = "inverse_density", keep=1.0, scope: str = "global",
    extra: int = 0, reduce: str = "mean", weights=None, elect: str = "after_weights", divide: str = "count",
    sign: str = "total", zero: str = "majority",
) -> Operator:
    """Drop and rescale, then TIES (arXiv:2311.03099).

    density, seed, rescale: see `drop`. keep, scope, extra: the trim after the drop, see `top`; none by default. The
    rest: see `disjoint_merge`.

    >>> dare_ties(density=1.0)({"w": jnp.array([[2.0, -1.0], [-1.0, -3.0]])})["w"].tolist()
    [2.0, -2.0]
    """
    trim = identity() if isinstance(keep, float | int) and keep == 1 else top(density=keep, scope=scope, extra=extra)
    merge = disjoint_merge(reduce=reduce, weights=weights, elect=elect, divide=divide, sign=sign, zero=zero)
    return drop(density=density, seed=seed, rescale=rescale) | trim | merge | scaled(by=scale)


def della(
    *, density=0.5, epsilon=0.1, scale=1.0, seed=0, rescale: str = "inverse_probability", reduce: str = "mean",
    weights=None, elect: str = "after_weights", divide: str = "count", sign: str = "total", zero: str = "majority",
) -> Operator:
    """Drop by rank, elect, fuse: scale · the mean of what agrees (arXiv:2406.11617).

    density, epsilon, seed, rescale: see `drop_by_rank`. The rest: see `disjoint_merge`.

    >>> della(density=1.0, epsilon=0.0)({"w": jnp.array([[2.0, -1.0], [-1.0, -3.0]])})["w"].tolist()
    [2.0, -2.0]
    """
    merge = disjoint_merge(reduce=reduce, weights=weights, elect=elect, divide=divide, sign=sign, zero=zero)
    return drop_by_rank(density=density, epsilon=epsilon, seed=seed, rescale=rescale) | merge | scaled(by=scale)


def della_linear(
    *, density=0.5, epsilon=0.1, scale=0.3, seed=0, rescale: str = "inverse_probability", weights=None,
    normalize: bool = False,
) -> Operator:
    """Drop by rank, then task arithmetic (DELLA, arXiv:2406.11617, without the election).

    density, epsilon, seed, rescale: see `drop_by_rank`. scale, weights, normalize: see `task_arithmetic`.

    >>> x = jnp.array([[2.0, -1.0, 0.5], [-1.0, -3.0, 0.25]])
    >>> della_linear(density=1.0, epsilon=0.0, scale=1.0)({"w": x})["w"].tolist()
    [1.0, -4.0, 0.75]
    """
    dropped = drop_by_rank(density=density, epsilon=epsilon, seed=seed, rescale=rescale)
    return dropped | task_arithmetic(scale=scale, weights=weights, normalize=normalize)
