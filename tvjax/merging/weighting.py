"""Closed-form coefficients: MetaGPT (arXiv:2406.11385), NAN (arXiv:2505.16148) and LiNeS (arXiv:2410.17146)."""
from typing import Any, NamedTuple

import jax.numpy as jnp

from tvjax.merging.averaging import as_like, total
from tvjax.merging.averaging import scale as scaled
from tvjax.merging.checks import choice
from tvjax.merging.numbers import each_task, sum_tasks
from tvjax.merging.operator import Operator, step
from tvjax.merging.signs import ties
from tvjax.merging.statistics import Sum, check_scope


def weigh_by_norm(*, power, scope: str = "global") -> Operator:
    """w_t x_t with w_t = ‖x_t‖^power / Σ_s ‖x_s‖^power; task vectors that are all zero have no weight.

    power: 2 weighs strong task vectors up, −1 makes them equally strong, 0 weighs all alike. scope: where norms are
    taken: the whole model ("global"), each "layer" or each "leaf".

    >>> weigh_by_norm(power=-1.0)({"w": jnp.array([[3.0, 4.0], [0.0, 15.0]])})["w"].tolist()
    [[2.25, 3.0], [0.0, 3.75]]
    """
    return step(_weigh_by_norm, Sum(_squares, check_scope(scope)), power=power)


def _squares(x):
    return jnp.square(x).reshape(len(x), -1).sum(1)


def _weigh_by_norm(x, squares, power):
    # relative to the largest, so that powers of tiny norms stay finite
    relative = squares / jnp.where(squares.max() > 0, squares.max(), 1)
    powers = jnp.where(relative > 0, jnp.where(relative > 0, relative, 1) ** (as_like(power, x) / 2), 0)
    return each_task(lambda row, by: by * row, x, powers / jnp.where(powers.sum() > 0, powers.sum(), 1))


def metagpt(*, scale=1.0, scope: str = "global") -> Operator:
    """scale·Σ λ_t τ_t with λ_t = ‖τ_t‖² / Σ_s ‖τ_s‖² (arXiv:2406.11385): what least squares give for nearly linear,
    orthogonal tasks.

    >>> metagpt()({"w": jnp.array([[1.0, 0.0], [0.0, 3.0]])})["w"].round(4)
    array([0.1, 2.7], dtype=float32)
    """
    return weigh_by_norm(power=2.0, scope=scope) | total() | scaled(by=scale)


def nan(*, scale=1.0, scope: str = "global") -> Operator:
    """NAN: scale·Σ λ_t τ_t with λ_t = ‖τ_t‖⁻¹ / Σ_s ‖τ_s‖⁻¹ (arXiv:2505.16148).

    >>> nan()({"w": jnp.array([[1.0, 0.0], [0.0, 3.0]])})["w"].tolist()
    [0.75, 0.75]
    """
    return weigh_by_norm(power=-1.0, scope=scope) | total() | scaled(by=scale)


class Beside(NamedTuple):
    """A merged vector, and the sum of the task vectors."""

    merged: Any
    total: Any


def by_layer(*, alpha=None, beta=1.0, norm: str = "l1") -> Operator:
    """(alpha + beta·depth)·x, where depth is 0 in the first block and 1 in the last; leaves outside of blocks get
    alpha.

    It follows any merge, and precedes any too. alpha: None takes ‖Σ τ‖ / (T·‖x‖) for a merged vector x, over the whole
    model, in the `norm` "l1" or "l2". beta: how much the last block gets on top.

    >>> taus = {"layers": [{"w": jnp.ones((2, 1))}, {"w": jnp.ones((2, 1))}]}
    >>> [leaf["w"].tolist() for leaf in (total() | by_layer(alpha=0.5, beta=1.0))(taus)["layers"]]
    [[1.0], [3.0]]
    """
    choice("norm", norm, tuple(NORMS))
    if alpha is not None:
        return step(_by_layer, needs=("depth",), alpha=alpha, beta=beta)
    start = step(_beside, needs=("origin",))
    return start | step(_by_layer_from, Sum(NORMS[norm]), options={"norm": norm}, needs=("depth", "tasks"), beta=beta)


def _by_layer(x, alpha, beta, depth):
    return (as_like(alpha, x) + as_like(beta, x) * as_like(depth, x)) * x


def _beside(x, origin):
    return Beside(x, sum_tasks(origin))


def _l1(beside):
    return jnp.stack([jnp.abs(x).sum() for x in beside])


def _l2(beside):
    return jnp.stack([jnp.square(x).sum() for x in beside])


NORMS = {"l1": _l1, "l2": _l2}


def _by_layer_from(beside, powers, beta, norm, depth, tasks):
    merged, whole = powers if norm == "l1" else jnp.sqrt(powers)
    alpha = jnp.where(merged > 0, whole / jnp.where(merged > 0, merged, 1), 0) / tasks
    return _by_layer(beside.merged, alpha, beta, depth)


def lines(*, alpha=None, beta=0.5, base: str = "sum", density=0.2, norm: str = "l1") -> Operator:
    """LiNeS: a merged vector scaled up with depth, by alpha in the first block to alpha + beta in the last
    (arXiv:2410.17146).

    alpha, beta, norm: see `by_layer`; beta is tuned on validation data. base: "sum" of the task vectors, or their
    "ties" mean of `density`; after any other merge put `by_layer`.

    >>> taus = {"layers": [{"w": jnp.ones((2, 1))}, {"w": jnp.ones((2, 1))}]}
    >>> [leaf["w"].tolist() for leaf in lines()(taus)["layers"]]
    [[1.0], [2.0]]
    """
    trimmed = ties(density=density)
    merge = total() if choice("base", base, ("sum", "ties")) == "sum" else trimmed
    return merge | by_layer(alpha=alpha, beta=beta, norm=norm)
