"""Operators on the singular values of each matrix: TSV-M (arXiv:2412.00081) and Iso-C (arXiv:2502.04959).

Between stages a matrix is kept as `Factors` U diag(s) Vᵀ. Spectra are cut at their numerical rank by default: the published forms take null-space
directions, which differ between linear-algebra libraries, for singular vectors of deltas of low rank. `rank="official"` reproduces them.
"""
from typing import Any, NamedTuple

import jax.numpy as jnp

from tvjax.merging.averaging import mean, scale, total
from tvjax.merging.checks import choice
from tvjax.merging.operator import Operator, matrix, on, step

RANKS = ("numerical", "official")


class Factors(NamedTuple):
    """U diag(s) Vᵀ with U (rows, k), s (k,), V (columns, k)."""

    U: Any
    s: Any
    V: Any


def svd(x) -> Factors:
    """The thin singular value decomposition, batched over leading axes."""
    U, s, Vt = jnp.linalg.svd(x, full_matrices=False)
    return Factors(U, s, jnp.swapaxes(Vt, -1, -2))


def kept(s, rank: str):
    """1 for singular values above the numerical rank's tolerance (ε·√k of the largest), 0 below; all 1 for rank="official"."""
    if rank == "official":
        return jnp.ones_like(s)
    tolerance = 8 * jnp.finfo(s.dtype).eps * s.shape[-1] ** 0.5
    return (s > tolerance * s.max(-1, keepdims=True)).astype(s.dtype)


def product(a, b):
    return jnp.matmul(a, b, precision="highest")


def build(factors: Factors):
    """The matrix U diag(s) Vᵀ."""
    return product(factors.U * factors.s[..., None, :], jnp.swapaxes(factors.V, -1, -2))


def polar(a):
    """The orthogonal factor of `a` (rows, k): its nearest matrix with orthonormal columns; zero columns stay zero."""
    f = svd(a)
    return product(f.U * kept(f.s, "numerical")[None], f.V.T)


def share_factors(*, rank: str = "numerical") -> Operator:
    """The first ⌊r/T⌋ singular triplets of every task, side by side: Factors with (r/T)·T columns."""
    return step(_share_factors, options={"rank": choice("rank", rank, RANKS)}, entrywise=False)


def _share_factors(x, rank):
    k = max(1, min(x.shape[1:]) // len(x))
    f = svd(x)
    s = f.s * kept(f.s, rank)
    side = lambda a: jnp.moveaxis(a[..., :k], 0, 1).reshape(a.shape[1], -1)
    seen = (s[:, None, :k] > 0) | (rank == "official")
    seen = seen.astype(x.dtype)
    return Factors(side(f.U[..., :k] * seen), s[:, :k].reshape(-1), side(f.V[..., :k] * seen))


def whiten() -> Operator:
    """Makes the columns of U and of V orthonormal (each its polar factor)."""
    return step(_whiten, entrywise=False)


def _whiten(f):
    return Factors(polar(f.U), f.s, polar(f.V))


def rebuild() -> Operator:
    """The matrix of the factors."""
    return step(build, entrywise=False)


def flatten_spectrum(*, rank: str = "numerical") -> Operator:
    """Sets all singular values of the merged matrix to their mean (over the numerical rank)."""
    return step(_flatten_spectrum, options={"rank": choice("rank", rank, RANKS)}, entrywise=False)


def _flatten_spectrum(x, rank):
    f = svd(x)
    keep = kept(f.s, rank)
    level = (f.s * keep).sum() / jnp.maximum(keep.sum(), 1)
    return build(f._replace(s=level * keep))


def tsv_m(*, scale=1.0, rank: str = "numerical") -> Operator:
    """TSV-M (Gargiulo et al., 2024, arXiv:2412.00081): r/T singular triplets of every task, whitened against each other; other leaves averaged.

    scale: multiplies the result. rank: "numerical" or "official".
    """
    return on(matrix, share_factors(rank=rank) | whiten() | rebuild(), mean()) | _scaled(scale)


def iso_c(*, scale=1.0, rank: str = "numerical") -> Operator:
    """Iso-C (Marczak et al., 2025, arXiv:2502.04959): Σ τ with a flat spectrum, σ := mean(σ); other leaves averaged.

    scale: multiplies the result. rank: "numerical" or "official".
    """
    return on(matrix, total() | flatten_spectrum(rank=rank), mean()) | _scaled(scale)


def _scaled(by) -> Operator:
    return scale(by=by)


