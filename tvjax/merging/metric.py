"""Merges that solve for a matrix: min_W Σ_t w_t ‖(W − X_t) G_t^½‖² has the solution W = (Σ w_t X_t G_t)(Σ w_t G_t)⁻¹.

The Grams G_t come from the task vectors themselves, X_tᵀ X_t (WUDI, ACTMat, SWUDI, ASWUDI), or from data (RegMean);
with diagonals in place of
matrices it is the Fisher-weighted average. Other leaves are averaged.
"""
from collections.abc import Callable

import jax.numpy as jnp

from tvjax.merging.averaging import mean
from tvjax.merging.averaging import scale as scaled
from tvjax.merging.checks import choice, share, within
from tvjax.merging.factors import product
from tvjax.merging.numbers import sum_tasks
from tvjax.merging.operator import Operator, matrix, on, step

RIDGES = ("relative", "absolute")


# ---------------------------------------------------------------- from the task vectors alone
def wudi(*, scale=1.0, ridge=1e-8, units: str = "relative") -> Operator:
    """The minimum of WUDI's objective (arXiv:2503.08099) in closed form: (Σ w_t X_t G_t)(Σ w_t G_t + ridge)⁻¹, w_t =
    1/‖X_t‖², G_t = X_tᵀX_t.

    ridge: added to the eigenvalues, ≥ 0. units: "relative" to their mean, and leaving out those of rounding, so that
    the result scales with the
    task vectors; "absolute" as published. The authors stop an optimizer early instead, which `swudi` describes. scale:
    multiplies the result.

    >>> wudi(ridge=0.0)({"w": jnp.array([[[1.0, 0.0]], [[0.0, 2.0]]])})["w"].round(5).tolist()
    [[1.0, 2.0]]
    """
    chosen = {"weigh": True, "units": choice("units", units, RIDGES)}
    return _solved(_closed, scale, chosen, ridge=_floor("ridge", ridge))


def actmat(*, scale=1.0, ridge=1e-8, units: str = "relative") -> Operator:
    """ACTMat: `wudi` (arXiv:2503.08099) without the weights 1/‖X_t‖², (Σ X_t X_tᵀX_t)(Σ X_tᵀX_t + ridge)⁻¹; options as
    there.

    >>> actmat(ridge=0.0)({"w": jnp.array([[[1.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]]])})["w"].round(5).tolist()
    [[1.0, 2.0, 0.0]]
    """
    chosen = {"weigh": False, "units": choice("units", units, RIDGES)}
    return _solved(_closed, scale, chosen, ridge=_floor("ridge", ridge))


def _closed(x, ridge, weigh, units):
    moment, gram = moments(x, weigh)
    e, V, there = spectrum(gram)
    if units == "absolute":
        return product(product(moment, V) / (e + ridge)[None], V.T)
    inverse = there / jnp.where(there > 0, e + ridge * e.mean(), 1)
    return product(product(moment, V) * inverse[None], V.T)


def swudi(*, scale=1.0, t=300.0, rho=0.65) -> Operator:
    """SWUDI: gradient descent on WUDI's objective (arXiv:2503.08099) from Σ τ for a time t, along the leading
    eigenvectors of Σ w_t G_t, in closed form.

    With eigenvalues e and vectors V: S − S V h Vᵀ + (Σ w_t X_t G_t) V (h/e) Vᵀ, h = 1 − exp(−e·t) on the share rho of
    the largest, else 0.
    t: > 0; 300 … 1800. rho: in (0, 1]. scale: multiplies the result.

    >>> swudi(t=1.0)({"w": jnp.array([[[1.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]]])})["w"].round(5).tolist()
    [[1.0, 2.0, 0.0]]
    """
    return _solved(_filtered, scale, {}, t=within("t", t, 0, float("inf"), open_low=True), rho=share("rho", rho))


def _filtered(x, t, rho):
    moment, gram = moments(x, True)
    e, V, _ = spectrum(gram)
    leading = _largest(e, jnp.floor(len(e) * jnp.asarray(rho).astype(e.dtype) + 0.999))
    h = -jnp.expm1(-e * t) * leading
    return _moved(sum_tasks(x), moment, V, h, jnp.where(e > 0, h / jnp.where(e > 0, e, 1), t * leading))


def aswudi(*, scale=1.0) -> Operator:
    """ASWUDI: `swudi` (arXiv:2503.08099) to its end (h = 1) along the K = ⌈(Σ√e)² / Σe⌉ leading eigenvectors; it has
    no hyper-parameter but the scale.

    >>> aswudi()({"w": jnp.array([[[1.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]]])})["w"].round(5).tolist()
    [[1.0, 2.0, 0.0]]
    """
    return _solved(_adaptive, scale, {})


def _adaptive(x):
    moment, gram = moments(x, True)
    e, V, there = spectrum(gram)
    roots = jnp.sqrt(e * there)
    total = (e * there).sum()
    h = _largest(e, jnp.ceil(roots.sum() ** 2 / jnp.where(total > 0, total, 1))) * there
    return _moved(sum_tasks(x), moment, V, h, h / jnp.where(h > 0, e, 1))


def _moved(start, moment, V, h, part):
    """start − start V h Vᵀ + moment V (h/e) Vᵀ."""
    return start + product(product(moment, V) * part[None] - product(start, V) * h[None], V.T)


def _largest(e, count):
    """1 for the `count` largest of ascending eigenvalues."""
    return (jnp.arange(len(e), dtype=e.dtype) >= len(e) - count).astype(e.dtype)


def moments(x, weigh: bool):
    """Σ w_t X_t X_tᵀ X_t (rows, columns) and Σ w_t X_tᵀ X_t (columns, columns) of a stack; w_t = 1/‖X_t‖² or 1, 0 for a
    zero matrix."""
    squares = (x * x).sum((1, 2))
    weights = jnp.where(squares > 0, 1 / jnp.where(squares > 0, squares, 1), 0) if weigh else jnp.ones_like(squares)
    y = weights[:, None, None] * x
    rows, columns = x.shape[1:]
    gram = jnp.einsum("trc,trd->cd", y, x, precision="highest")  # devices that hold rows add up their parts
    cube = lambda a, b: product(product(a, b.T), b) if rows <= columns else product(a, product(b.T, b))
    return sum(cube(a, b) for a, b in zip(y[1:], x[1:], strict=True)) + cube(y[0], x[0]), (gram + gram.T) / 2


def spectrum(gram):
    """Ascending eigenvalues (not below 0) and eigenvectors of a Gram matrix, and 1 for those above rounding (8ε√n of
    the largest)."""
    e, V = jnp.linalg.eigh(gram)
    e = jnp.maximum(e, 0)
    return e, V, (e > 8 * jnp.finfo(e.dtype).eps * len(e) ** 0.5 * e.max()).astype(e.dtype)


def _solved(leaf: Callable, scale, chosen, **numbers) -> Operator:
    return on(matrix, step(leaf, options=chosen, entrywise=False, **numbers), mean()) | scaled(by=scale)


def _floor(name: str, value):
    return within(name, value, 0, float("inf"))


# ---------------------------------------------------------------- with statistics of data
def regmean(*, scale=1.0, off_diagonal=0.95, ridge=1e-6, where: Callable = matrix) -> Operator:
    """RegMean (Jin et al., 2022, arXiv:2212.09849): (Σ X_t G_t)(Σ G_t)⁻¹ with G_t = E[a aᵀ] of the inputs a of the
    layer; other leaves averaged.

    Data: `gram`, a tree with (tasks, in, in) for each leaf of shape (out, in) that `where(name, shape)` selects (all
    matrices by default).
    off_diagonal: what off-diagonal entries are multiplied by, in [0, 1]. ridge: pulls to the average, relative to the
    mean eigenvalue.

    >>> x = jnp.array([[[1.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]]])
    >>> gram = jnp.stack([jnp.diag(jnp.array([3.0, 1.0, 1.0])), jnp.eye(3)])
    >>> regmean(ridge=0.0)({"w": x}, gram={"w": gram})["w"].round(5).tolist()
    [[0.75, 1.0, 0.0]]
    """
    within("off_diagonal", off_diagonal, 0, 1)
    solve = step(_regmean, needs=("gram",), entrywise=False, off_diagonal=off_diagonal, ridge=_floor("ridge", ridge))
    return on(where, solve, mean()) | scaled(by=scale)


def _regmean(x, off_diagonal, ridge, gram):
    shape = (x.shape[0], x.shape[2], x.shape[2])
    if gram.shape != shape:
        raise ValueError(f"gram holds a matrix of inputs for each task and has shape {shape}; got {gram.shape}")
    gram = jnp.asarray(gram).astype(x.dtype)
    average = sum_tasks(x) / x.shape[0]
    diagonal = jnp.eye(x.shape[2], dtype=x.dtype)[None]
    gram = gram * jnp.where(diagonal > 0, 1, jnp.asarray(off_diagonal).astype(x.dtype))
    e, V, there = spectrum(sum_tasks(gram))
    moment = sum_tasks(product(x - average[None], gram))
    inverse = there / jnp.where(there > 0, e + ridge * e.mean(), 1)
    return average + product(product(moment, V) * inverse[None], V.T)


def fisher(*, scale=1.0, floor=0.0) -> Operator:
    """The Fisher-weighted average (Matena and Raffel, 2021, arXiv:2111.09832): Σ F_t τ_t / Σ F_t entry by entry; the
    average where all F are 0.

    Data: `fisher`, a tree shaped as the stack, (tasks, ...) for each leaf, of values ≥ 0. floor: least value that
    counts.

    >>> fisher()({"w": jnp.array([[1.0], [5.0]])}, fisher={"w": jnp.array([[3.0], [1.0]])})["w"].tolist()
    [2.0]
    """
    return step(_fisher, needs=("fisher",), floor=_floor("floor", floor)) | scaled(by=scale)


def _fisher(x, floor, fisher):
    if fisher.shape != x.shape:
        raise ValueError("fisher has the shape of the stack, (tasks, ...) for each leaf; here it differs")
    weights = jnp.maximum(jnp.asarray(fisher).astype(x.dtype), floor)
    total = sum_tasks(weights)
    return jnp.where(total > 0, sum_tasks(weights * x) / jnp.where(total > 0, total, 1), sum_tasks(x) / x.shape[0])
