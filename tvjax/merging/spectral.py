"""Operators on the singular values of each matrix: TSV-M, Iso-C, Iso-CTS, CART and the calibration SVC; other leaves
are averaged.

Steps: take triplets of every task (`share_factors`, `split_common`), make them orthonormal (`whiten`), set their
singular values
(`flatten_spectrum`), put the matrix together (`rebuild`). In between a matrix is kept as `Factors` U diag(s) Vᵀ.
"""
import dataclasses
import math

import jax.numpy as jnp

from tvjax.merging.averaging import mean, scale, total
from tvjax.merging.checks import share, within
from tvjax.merging.factors import Factors, build, full_rank, options, polar, product, side_by_side, svd, turned
from tvjax.merging.lowrank import LowRank, is_low_rank
from tvjax.merging.numbers import sum_tasks
from tvjax.merging.operator import Operator, identity, matrix, on, step


# ---------------------------------------------------------------- steps
def share_factors(*, per_task: int | None = None, rank: str = "numerical", solver: str = "auto") -> Operator:
    """The leading singular triplets of every task, side by side; per_task: how many (⌊min(rows, columns) / tasks⌋, at
    least 1, by default)."""
    chosen = options(rank, solver) | {"per_task": check_count("per_task", per_task)}
    return step(_share_factors, options=chosen, entrywise=False)


def _share_factors(x, rank, solver, per_task):
    return gathered(svd(x, k=per_task or task_rank(x), rank=rank, solver=solver))


def task_rank(x) -> int:
    """How many triplets each task of a stack gets if they share those of one matrix: ⌊min(rows, columns) / tasks⌋, at
    least 1."""
    return max(1, min(x.shape[1:]) // x.shape[0])


def gathered(f: Factors) -> Factors:
    """Factors of every task as factors of one matrix, columns grouped by task."""
    return Factors(side_by_side(f.U), f.s.reshape(-1), side_by_side(f.V), f.low_rank)


def split_common(*, common: float = 0.8, rank: str = "numerical", solver: str = "auto") -> Operator:
    """Leading triplets of Σ τ, beside those of every task outside of their column space: Factors of min(rows, columns)
    triplets in all.

    common: share of the triplets that come from the sum, rounded so that the tasks divide the rest.
    """
    chosen = options(rank, solver) | {"common": within("common", float(common), 0, 1)}
    return step(_split_common, options=chosen, entrywise=False)


def _split_common(x, rank, solver, common):
    tasks, merged = x.shape[0], sum_tasks(x)
    size = full_rank(merged)
    own = min(round((size - int(size * common)) / tasks), size // tasks)
    if own * tasks == size:
        return gathered(svd(x, k=own, rank=rank, solver=solver))
    shared = svd(merged, k=size - own * tasks, rank=rank, solver=solver)
    if own == 0:
        return shared
    rest = svd(_outside(shared.U, x), k=own, rank=rank, solver=solver)
    rest = gathered(rest if rank == "official" else _above(rest, shared.s.max(), size))
    beside = lambda a, b: jnp.concatenate([a, b], -1)
    return Factors(beside(rest.U, shared.U), beside(rest.s, shared.s), beside(rest.V, shared.V), shared.low_rank)


def _above(f: Factors, largest, size: int) -> Factors:
    """The triplets that are not rounding errors of a matrix whose largest singular value is `largest`."""
    keep = (f.s > 8 * jnp.finfo(f.s.dtype).eps * size**0.5 * largest).astype(f.s.dtype)
    return dataclasses.replace(f, U=f.U * keep[..., None, :], s=f.s * keep, V=f.V * keep[..., None, :])


def _outside(U, x):
    """(1 − U Uᵀ) x_t for every task."""
    rows = lambda a: a - product(U, product(U.T, a))
    return LowRank(rows(x.B), x.A) if is_low_rank(x) else rows(x)


def whiten(*, rank: str = "numerical", solver: str = "auto") -> Operator:
    """Makes the columns of U and of V orthonormal (each its polar factor)."""
    return step(_whiten, options=options(rank, solver), entrywise=False)


def _whiten(f, rank, solver):
    return dataclasses.replace(f, U=polar(f.U, rank=rank, solver=solver), V=polar(f.V, rank=rank, solver=solver))


def level(*, rank: str = "numerical") -> Operator:
    """Sets the singular values of Factors to their mean (over those that are not zero)."""
    return step(_level, options={"rank": options(rank, "auto")["rank"]}, entrywise=False)


def _level(f, rank):
    there = jnp.ones_like(f.s) if rank == "official" else (f.s > 0).astype(f.s.dtype)
    return dataclasses.replace(f, s=f.s.sum() / jnp.maximum(there.sum(), 1) * there)


def rebuild() -> Operator:
    """The matrix of the factors."""
    return step(build, entrywise=False)


def flatten_spectrum(*, rank: str = "numerical", solver: str = "auto") -> Operator:
    """Sets all singular values of the merged matrix to their mean (over the numerical rank): mean(σ)·polar(X), with Σσ
    = ⟨polar(X), X⟩."""
    return step(_flatten_spectrum, options=options(rank, solver), entrywise=False)


def _flatten_spectrum(x, rank, solver):
    if is_low_rank(x):
        return build(_level(svd(x, rank=rank), rank))
    Q = polar(x, rank=rank, solver=solver)
    count = min(x.shape) if rank == "official" else jnp.maximum(jnp.round((Q * Q).sum()), 1)
    return (Q * x).sum() / count * Q


def centre_low_rank(*, fraction: float = 0.08, scale=1.0, solver: str = "auto") -> Operator:
    """X̄ + scale·Σ_t (the ⌈fraction·min(rows, columns)⌉ leading triplets of X_t − X̄)."""
    made = options("numerical", solver) | {"fraction": share("fraction", float(fraction))}
    return step(_centre_low_rank, options={k: v for k, v in made.items() if k != "rank"}, entrywise=False, scale=scale)


def _centre_low_rank(x, scale, fraction, solver):
    if is_low_rank(x):
        raise ValueError("cart takes dense matrices; for low-rank leaves use core_space(cart())")
    average = sum_tasks(x) / x.shape[0]
    f = svd(x - average[None], k=math.ceil(fraction * min(average.shape)), solver=solver)
    return average + scale * build(gathered(f))


def calibrate(*, alpha=None, solver: str = "auto") -> Operator:
    """Divides each singular value of the merged matrix M by mean_t max(⟨u·M, u·X_t⟩ / ‖u·X_t‖², alpha): undoes what
    several tasks have in common.

    alpha: floor of a task's share, > 0; 1 / tasks by default.
    """
    if alpha is not None:
        within("alpha", alpha, 0, float("inf"), open_low=True)
    chosen = {"solver": options("numerical", solver)["solver"]}
    return step(_calibrate, options=chosen, needs=("origin",), entrywise=False, alpha=alpha)


def _calibrate(x, alpha, solver, origin):
    if len(x.shape) != 2:
        raise ValueError("svc calibrates a merged matrix; its base operator must reduce over tasks, as total() does")
    f = svd(x, solver=solver)
    rows = lambda a: product(turned(f.U), a)
    seen = product(rows(origin.B), origin.A) if is_low_rank(origin) else rows(origin)
    energy = (seen * seen).sum(-1)
    shares = ((f.s[:, None] * f.V.T)[None] * seen).sum(-1) / jnp.where(energy > 0, energy, 1)
    floor = 1 / origin.shape[0] if alpha is None else alpha
    return build(dataclasses.replace(f, s=f.s / jnp.maximum(shares, floor).mean(0)))


# ---------------------------------------------------------------- methods
def tsv_m(*, scale=1.0, per_task: int | None = None, rank: str = "numerical", solver: str = "auto") -> Operator:
    """TSV-M (Gargiulo et al., 2024, arXiv:2412.00081): the leading triplets of every task, whitened against each other;
    other leaves averaged.

    scale: multiplies the result. per_task: triplets of each task, ⌊min(rows, columns) / tasks⌋ by default (their rank
    suits adapters).
    rank: "numerical" leaves out directions beyond the numerical rank, "official" takes them as the library returns
    them. solver: see `factors`.

    >>> x = jnp.stack([jnp.diag(jnp.array([2.0, 0.0])), jnp.diag(jnp.array([0.0, 3.0]))])
    >>> tsv_m()({"w": x})["w"].tolist()
    [[2.0, 0.0], [0.0, 3.0]]
    """
    chosen = options(rank, solver)
    merge = share_factors(per_task=per_task, **chosen) | whiten(**chosen) | rebuild()
    return on(matrix, merge, mean()) | _scaled(scale)


def iso_c(*, scale=1.0, rank: str = "numerical", solver: str = "auto") -> Operator:
    """Iso-C (Marczak et al., 2025, arXiv:2502.04959): Σ τ with a flat spectrum, σ := mean(σ); other leaves averaged.

    scale, rank, solver: see `tsv_m`.

    >>> iso_c()({"w": jnp.diag(jnp.array([3.0, 1.0]))[None]})["w"].tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    return on(matrix, total() | flatten_spectrum(rank=rank, solver=solver), mean()) | _scaled(scale)


def iso_cts(*, scale=1.0, common: float = 0.8, rank: str = "numerical", solver: str = "auto") -> Operator:
    """Iso-CTS (arXiv:2502.04959): the leading space of Σ τ, beside each task's own outside of it, whitened, with a flat
    spectrum.

    common: share of the dimensions that the sum gets, in [0, 1]; rounded so that the tasks divide the rest. scale,
    rank, solver: see `tsv_m`.

    >>> x = jnp.stack([jnp.diag(jnp.array([2.0, 0.0])), jnp.diag(jnp.array([0.0, 4.0]))])
    >>> iso_cts()({"w": x})["w"].round(5).tolist()
    [[3.0, 0.0], [0.0, 3.0]]
    """
    chosen = options(rank, solver)
    merge = split_common(common=common, **chosen) | whiten(**chosen) | level(rank=rank) | rebuild()
    return on(matrix, merge, mean()) | _scaled(scale)


def cart(*, scale=1.0, fraction: float = 0.08, solver: str = "auto") -> Operator:
    """CART (Choi et al., 2024, arXiv:2412.12153): τ̄ + scale·Σ_t (low-rank part of τ_t − τ̄); other leaves averaged.

    fraction: kept share of the singular triplets, in (0, 1]. scale: multiplies what is added to the average.

    >>> cart(fraction=1.0)({"w": jnp.array([[[1.0, 0.0, 3.0]], [[0.0, 2.0, 3.0]]])})["w"].round(5).tolist()
    [[0.5, 1.0, 3.0]]
    """
    return on(matrix, centre_low_rank(fraction=fraction, scale=scale, solver=solver), mean())


def svc(base: Operator | None = None, *, alpha=None, solver: str = "auto") -> Operator:
    """SVC (arXiv:2602.05536): the merge of `base` (Σ τ by default) with its singular values calibrated against the
    tasks (see `calibrate`).

    alpha: 1 / tasks by default (the paper, for Σ τ); 0.1 to 1 elsewhere, more for bases that are spectral themselves.

    >>> svc()({"w": jnp.array([[[1.0, 2.0, 2.0]], [[1.0, 2.0, 2.0]]])})["w"].round(5).tolist()
    [[1.0, 2.0, 2.0]]
    """
    return (total() if base is None else base) | on(matrix, calibrate(alpha=alpha, solver=solver), identity())


def _scaled(by) -> Operator:
    return scale(by=by)


def check_count(name: str, value: int | None) -> int | None:
    """`value` if it is a number of triplets, or None."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} is a whole number of at least 1; got {value!r}")
    return value
