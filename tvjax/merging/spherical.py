"""Merges whose coefficients come from inner products: SLERP (arXiv:2306.03763 for models), NuSLERP, multi-SLERP,
Karcher mean, Model Stock (arXiv:2403.19522).

merged = Σ_t c_t(G)·x_t with G_st = <x_s, x_t>: every result lies in the span of its inputs, so that one (tasks, tasks)
matrix for each leaf, layer, model or row is all they need. On task vectors these interpolate around θ0; a stack of
whole models θ_t gives the usual interpolation around 0.
"""
import functools

import jax
import jax.numpy as jnp

from tvjax.merging import checks
from tvjax.merging.averaging import as_like
from tvjax.merging.checks import choice
from tvjax.merging.operator import Operator, step
from tvjax.merging.statistics import SCOPES, Sum

UNITS = (*SCOPES, "row", "column")


def gram(x):
    """(tasks, tasks) inner products of a stack."""
    flat = x.reshape(len(x), -1)
    return jnp.einsum("si,ti->st", flat, flat, precision="highest")


def _merge(leaf, unit: str, **given) -> Operator:
    """The stage that applies `leaf` to one Gram matrix for each leaf, layer or model, or to those of the rows or
    columns of each leaf."""
    choice("unit", unit, UNITS)
    return step(leaf, *[Sum(gram, unit)] * (unit in SCOPES), entrywise=unit in SCOPES, **given)


def _combine(coefficients, x, G, unit):
    """Σ_t c_t x_t with c = coefficients(G), G (tasks, tasks); for rows and columns each its own."""
    if unit in SCOPES:
        return functools.reduce(jnp.add, [c * x[t] for t, c in enumerate(coefficients(G))])
    columns = unit == "column" and x.ndim > 2
    rows = x.reshape(len(x), -1, x.shape[-1]) if x.ndim > 1 else x[:, None, None]
    rows = jnp.swapaxes(rows, 1, 2) if columns else rows
    c = jax.vmap(coefficients)(jnp.einsum("srn,trn->rst", rows, rows, precision="highest"))
    merged = jnp.einsum("rt,trn->rn", c, rows, precision="highest")
    return (merged.T if columns else merged).reshape(x.shape[1:])


def _norms(G):
    return jnp.sqrt(jnp.diagonal(G))


def _inverse(x, eps=0.0):
    """1/x where x > eps, 0 elsewhere."""
    return jnp.where(x > eps, 1 / jnp.where(x > eps, x, 1), 0)


def _cosines(G, eps=0.0):
    scale = _inverse(_norms(G), eps)
    return G * scale[:, None] * scale[None]


def _at_least_two(x, name: str, exactly: bool = False) -> None:
    if len(x) < 2 or (exactly and len(x) > 2):
        raise ValueError(f"{name} needs {'exactly' if exactly else 'at least'} two task vectors; got {len(x)}")


# ---------------------------------------------------------------- two points
def slerp(*, t=0.5, threshold=0.9995, eps=1e-8, unit: str = "leaf") -> Operator:
    """From the first (t = 0) to the second (t = 1) of two task vectors along the great circle: (sin((1−t)φ)·a +
    sin(tφ)·b) / sin φ.

    φ is the angle between them. threshold: where |cos φ| exceeds it, (1−t)·a + t·b is taken. eps: norms up to it have
    no direction (cos φ = 0). unit: what has an angle: each "leaf", "layer", the whole model ("global"), or each "row"
    or "column" of a matrix.

    >>> slerp(t=0.5)({"w": jnp.array([[1.0, 0.0], [0.0, 1.0]])})["w"].round(4)
    array([0.7071, 0.7071], dtype=float32)
    """
    return _merge(_slerp, unit, t=t, threshold=threshold, eps=eps, options={"unit": unit})


def _slerp(x, G=None, *, t, threshold, eps, unit):
    _at_least_two(x, "slerp", exactly=True)
    return _combine(functools.partial(_arc, t=as_like(t, x), threshold=threshold, eps=eps), x, G, unit)


def nuslerp(*, weights=None, unit: str = "leaf") -> Operator:
    """`slerp` of two task vectors to t = w_2 / (w_1 + w_2), on a line only where they are (nearly) collinear.

    weights: w, one number for each (equal by default); they must not sum to 0. unit: see `slerp`.

    >>> nuslerp(weights=[1.0, 0.0])({"w": jnp.array([[1.0, 0.0], [0.0, 1.0]])})["w"].tolist()
    [1.0, 0.0]
    """
    weights = [1.0, 1.0] if weights is None else weights
    return _merge(_nuslerp, unit, weights=checks.weights(weights, normalize=True), options={"unit": unit})


def _nuslerp(x, G=None, *, weights, unit):
    _at_least_two(x, "nuslerp", exactly=True)
    return _combine(functools.partial(_arc, t=_shares(weights, x)[1], threshold=1 - 1e-6, eps=0.0), x, G, unit)


def _arc(G, t, threshold, eps):
    cosine = _cosines(G, eps)[0, 1]
    straight = jnp.abs(cosine) > threshold
    angle = jnp.arccos(jnp.where(straight, 0, cosine))
    arc = jnp.stack([jnp.sin((1 - t) * angle), jnp.sin(t * angle)]) / jnp.sin(angle)
    return jnp.where(straight, jnp.stack([1 - t, t]), arc)


def _shares(weights, x):
    """(tasks,) weights that sum to 1."""
    weights = jnp.broadcast_to(as_like(weights, x), (len(x),)) if jnp.ndim(weights) == 0 else as_like(weights, x)
    if len(weights) != len(x):
        raise ValueError(f"there are {len(x)} task vectors but {len(weights)} numbers for them")
    return weights / weights.sum()


# ---------------------------------------------------------------- several points
def multi_slerp(*, weights=None, unit: str = "leaf") -> Operator:
    """The direction of Σ w_t x_t/‖x_t‖ with the length Σ w_t ‖x_t‖ (weights normalized); where that sum vanishes, Σ w_t
    x_t.

    The published tangent step at the mean direction adds nothing: projected on the tangent plane, the weighted
    directions sum to 0. weights: one number for each task (equal by default). unit: see `slerp`.

    >>> multi_slerp()({"w": jnp.array([[2.0, 0.0], [0.0, 2.0]])})["w"].round(4)
    array([1.4142, 1.4142], dtype=float32)
    """
    weights = checks.weights(1.0 if weights is None else weights, normalize=True)
    return _merge(_multi_slerp, unit, weights=weights, options={"unit": unit})


def _multi_slerp(x, G=None, *, weights, unit):
    return _combine(functools.partial(_mean_direction, weights=_shares(weights, x)), x, G, unit)


def _mean_direction(G, weights):
    cosines, norms = _cosines(G), _norms(G)
    squared = weights @ cosines @ weights
    direction = weights * _inverse(norms) * jnp.sqrt(_inverse(squared, 1e-12))
    return jnp.where(squared > 1e-12, (weights @ norms) * direction, weights)


def karcher(*, weights=None, max_iter: int = 10, tol=1e-5, unit: str = "leaf") -> Operator:
    """The Karcher mean of the directions x_t/‖x_t‖ on the sphere, with the length Σ w_t ‖x_t‖.

    Iterates u ← cos‖v‖·u + sin‖v‖·v/‖v‖ with v = Σ w_t φ_t/sin φ_t · (u_t − cos φ_t·u), from the mean direction (the
    first one if that vanishes). weights: one number for each task (equal by default). max_iter: most iterations. tol:
    ‖v‖ below which they stop. unit: see `slerp`.

    >>> karcher()({"w": jnp.array([[2.0, 0.0], [0.0, 2.0]])})["w"].round(4)
    array([1.4142, 1.4142], dtype=float32)
    """
    weights = checks.weights(1.0 if weights is None else weights, normalize=True)
    return _merge(_karcher, unit, weights=weights, tol=tol, options={"unit": unit, "max_iter": max_iter})


def _karcher(x, G=None, *, weights, tol, max_iter, unit):
    mean = functools.partial(_karcher_mean, weights=_shares(weights, x), tol=tol, max_iter=max_iter)
    return _combine(mean, x, G, unit)


def _karcher_mean(G, weights, tol, max_iter):
    cosines, norms = _cosines(G), _norms(G)
    there = norms > 0
    parts = jnp.where(there, weights, 0)
    parts = parts * _inverse(parts.sum())
    length = lambda c: jnp.sqrt(jnp.maximum(c @ cosines @ c, 0))
    first = jnp.zeros_like(weights).at[jnp.argmax(there)].set(1)
    start = jnp.where(length(parts) > tol, parts, first)

    def towards(c, _):
        dots = jnp.clip(cosines @ c, -1, 1)
        near = jnp.abs(dots) > 1 - 4 * jnp.finfo(G.dtype).eps
        angles = jnp.arccos(jnp.where(near, 0, dots))
        pull = parts * jnp.where(near, 1, angles / jnp.sin(angles))
        tangent = pull - (pull @ dots) * c
        size = length(tangent)
        moved = jnp.cos(size) * c + jnp.sinc(size / jnp.pi) * tangent
        return jnp.where(size < tol, c, moved * _inverse(length(moved))), None

    direction, _ = jax.lax.scan(towards, start * _inverse(length(start)), length=max_iter)
    return (weights @ norms) * direction * _inverse(norms)


# ---------------------------------------------------------------- Model Stock
def model_stock(*, angle: str = "cosine", unit: str = "leaf") -> Operator:
    """Model Stock (arXiv:2403.19522): r·mean(τ) with r = T cos φ / (1 + (T − 1) cos φ), φ the angle between task
    vectors (at least two).

    angle: how those of several pairs are averaged: their "cosine"s or their "degrees". unit: see `slerp`; the paper
    takes leaves. Where the denominator vanishes, so does the result.

    >>> model_stock()({"w": jnp.array([[1.0, 0.0], [1.0, 1.0]])})["w"].round(4)
    array([0.8284, 0.4142], dtype=float32)
    """
    choice("angle", angle, ("cosine", "degrees"))
    return _merge(_model_stock, unit, options={"unit": unit, "angle": angle})


def _model_stock(x, G=None, *, unit, angle):
    _at_least_two(x, "model_stock")
    return _combine(functools.partial(_stock, angle=angle), x, G, unit)


def _stock(G, angle):
    count = len(G)
    cosines = jnp.clip(_cosines(G), -1, 1)[jnp.triu_indices(count, 1)]
    cosine = cosines.mean() if angle == "cosine" else jnp.cos(jnp.arccos(cosines).mean())
    below = 1 + (count - 1) * cosine
    ratio = jnp.where(jnp.abs(below) > 1e-6, count * cosine / jnp.where(jnp.abs(below) > 1e-6, below, 1), 0)
    return jnp.broadcast_to(ratio / count, (count,))
