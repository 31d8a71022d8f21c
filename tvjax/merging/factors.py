"""Singular value decompositions and polar factors of matrices, dense or low-rank: X = U diag(s) Vᵀ, polar(X) = U Vᵀ.

Spectra are cut at their numerical rank by default: directions of the null space are an arbitrary choice of the
linear-algebra library, and have no
place in a merge. `rank="official"` keeps them, as the authors' codes do.

Two solvers. "svd" is the library's. "gram" takes the eigenvectors of the smaller Gram matrix, which squares the
condition number, and is several times faster; it works in float64, so that for float32 matrices the loss stays below
their own rounding, but for a few leading triplets of large matrices, where float32 will do and is checked. "auto" is
"gram" for all but small matrices, float64 ones and TPUs, which have no float64.
"""
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tvjax.merging.checks import choice
from tvjax.merging.lowrank import LowRank, is_low_rank
from tvjax.merging.statistics import static

RANKS = ("numerical", "official")
SOLVERS = ("auto", "svd", "gram")
EVEN = 16  # largest over smallest singular value up to which the last product of a polar factor needs no float64
QUICK = 512  # rows from which on few leading triplets are taken in float32: below, float64 costs little
SMALL = 64  # below this the library's SVD costs nothing worth saving


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Factors:
    """U diag(s) Vᵀ with U (..., rows, k), s (..., k), V (..., columns, k); `low_rank` if it came from, and goes back
    to, a low-rank leaf."""

    U: Any
    s: Any
    V: Any
    low_rank: bool = static(default=False)


def options(rank: str, solver: str) -> dict[str, str]:
    """The static options of a spectral stage, checked."""
    return {"rank": choice("rank", rank, RANKS), "solver": choice("solver", solver, SOLVERS)}


def full_rank(x) -> int:
    """The largest rank that one matrix of a stack or leaf can have by its shape."""
    rank = min(x.shape[-2:])
    return min(rank, x.A.shape[-2]) if is_low_rank(x) else rank


def product(a, b):
    return jnp.matmul(a, b, precision="highest")


def turned(a):
    """The matrix transpose."""
    return jnp.swapaxes(a, -1, -2)


def svd(x, *, k: int | None = None, rank: str = "numerical", solver: str = "auto") -> Factors:
    """The k leading singular triplets (all by default) of a matrix or of each of a stack; triplets beyond the numerical
    rank are zeroed."""
    k = full_rank(x) if k is None else min(k, full_rank(x))
    solver = "svd" if rank == "official" else solver
    if is_low_rank(x):
        if rank == "official":
            wanted = "directions of the null space, which a low-rank leaf does not have"
            raise ValueError(f"rank='official' takes {wanted}; use rank='numerical'")
        U, s, V = _of_factors(x, k)
    else:
        one = lambda matrix: _thin(matrix, k, solver)
        U, s, V = jax.lax.map(one, x) if x.ndim == 3 else one(x)
    keep = kept(s, rank)
    return Factors(U * keep[..., None, :], s * keep, V * keep[..., None, :], is_low_rank(x))


def kept(s, rank: str = "numerical"):
    """1 for singular values above the numerical rank's tolerance (8ε√k of the largest), 0 below; all 1 for
    rank="official"."""
    if rank == "official":
        return jnp.ones_like(s)
    return (s > _tolerance(s) * s.max(-1, keepdims=True)).astype(s.dtype)


def _tolerance(s):
    return 8 * jnp.finfo(s.dtype).eps * s.shape[-1] ** 0.5


def build(factors: Factors):
    """The matrix U diag(s) Vᵀ; low-rank if the factors are those of a low-rank leaf."""
    left, right = factors.U * factors.s[..., None, :], turned(factors.V)
    return LowRank(left, right) if factors.low_rank else product(left, right)


def side_by_side(a):
    """(tasks, rows, k) as (rows, tasks·k), columns grouped by task."""
    return jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1)


# ---------------------------------------------------------------- decompositions
@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _thin(x, k: int, solver: str):
    """(U, s, V) of one matrix."""
    rows, columns = x.shape
    if rows > columns:
        U, s, V = _thin(x.T, k, solver)
        return V, s, U
    if solver == "svd" or (solver == "auto" and not _squares(x, rows)):
        return _exact(x, k)
    if 2 * k > rows or (solver == "auto" and rows < QUICK):
        return _by_gram(x, k)
    found = _by_quick_gram(x, k)
    return found if solver == "gram" else _checked(_trusted(found[1]), found, lambda: _by_gram(x, k))


def _squares(x, size: int) -> bool:
    """Whether "auto" takes the Gram matrix, of so many rows."""
    return size >= SMALL and x.dtype != jnp.float64 and jax.default_backend() != "tpu"


@_thin.defjvp
def _thin_jvp(k, solver, primals, tangents):
    return jax.jvp(lambda x: _exact(x, k), primals, tangents)


def _exact(x, k: int):
    U, s, Vt = jnp.linalg.svd(x, full_matrices=False)
    return U[:, :k], s[:k], Vt[:k].T


def _by_gram(x, k: int):
    """Leading triplets of a wide matrix in float64: U from X Xᵀ, then diag(s) Vᵀ = Uᵀ X, whose norms are s."""
    return _in_double(lambda x: _leading(x, k))(x)


def _in_double(f: Callable) -> Callable:
    """f, from a float64 array to such arrays, for an array of the usual precision.

    Under `vmap` it takes one matrix after the other: a recorded program that is batched later would lose its float64.
    """
    @jax.custom_batching.custom_vmap
    def call(x):
        with jax.enable_x64(True):
            wide = x if jax.default_backend() == "tpu" else x.astype(jnp.float64)
            return jax.tree.map(lambda part: part.astype(x.dtype), f(wide))

    @call.def_vmap
    def each(size, batched, x):
        made = jax.lax.map(call, x)
        return made, jax.tree.map(lambda _: True, made)
    return call


def _by_quick_gram(x, k: int):
    """The same in the precision of X, scaled so that squares neither vanish nor overflow."""
    size = _unit(x)
    U, s, V = _leading(x / size, k)
    return U, s * size, V


def _leading(x, k: int):
    U = jnp.linalg.eigh(product(x, x.T))[1][:, ::-1][:, :k]
    Y = product(U.T, x)
    s = jnp.sqrt((Y * Y).sum(1))
    return U, s, (Y / jnp.where(s > 0, s, jnp.ones_like(s))[:, None]).T


def _unit(x):
    """The largest magnitude, by which matrices are scaled so that squares neither vanish nor overflow."""
    size = jnp.abs(x).max()
    return jnp.where(size > 0, size, 1)


def _trusted(s):
    """Whether all singular values are large enough for a Gram matrix (24√ε of the largest: an error of about 1e-4 in
    the last vectors), or null."""
    relative = s / jnp.maximum(s.max(), jnp.finfo(s.dtype).tiny)
    return ((relative > 24 * jnp.finfo(s.dtype).eps ** 0.5) | (relative <= _tolerance(s))).all()


def _checked(fine, quick, exact):
    """`quick` where it is fine, exact() elsewhere: a loop of at most one turn, which, unlike a branch, costs nothing
    under `vmap` if all are fine."""
    return jax.lax.while_loop(lambda state: ~state[0], lambda _: (jnp.array(True), exact()), (fine, quick))[1]


def _of_factors(x: LowRank, k: int):
    """(U, s, V) of B·A from two thin QR decompositions and the SVD of a (rank, rank) matrix."""
    Q, R = jnp.linalg.qr(x.B)
    P, S = jnp.linalg.qr(turned(x.A))
    U, s, Vt = jnp.linalg.svd(product(R, turned(S)), full_matrices=False)
    return product(Q, U[..., :k]), s[..., :k], product(P, turned(Vt)[..., :k])


# ---------------------------------------------------------------- polar factors
def polar(a, *, rank: str = "numerical", solver: str = "auto"):
    """U Vᵀ of a matrix: its nearest with orthonormal columns (or rows); directions beyond the numerical rank are left
    out."""
    return _polar(a, rank, "svd" if rank == "official" else solver)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _polar(a, rank, solver):
    if solver == "svd" or (solver == "auto" and not _squares(a, min(a.shape))):
        return _polar_exact(a, rank)
    return _polar_by_gram(a)


def _polar_exact(a, rank):
    if a.shape[0] < a.shape[1]:
        return _polar_exact(a.T, rank).T
    U, s, V = _exact(a, min(a.shape))
    return product(U * kept(s, rank)[None], V.T)


def _polar_by_gram(a):
    """A (AᵀA)^-½, or (AAᵀ)^-½ A of a wide matrix, in float64, over the eigenvalues that the numerical rank counts."""
    tall = a.shape[0] >= a.shape[1]
    beside = lambda x, root: product(x, root) if tall else product(root, x)

    def factor(wide):
        rows = jax.lax.optimization_barrier(wide.T) if tall else wide  # an array of its own: twice as fast below
        squares, V = jnp.linalg.eigh(product(rows, rows.T))
        s = jnp.sqrt(jnp.maximum(squares, jnp.zeros_like(squares)))
        keep = kept(s.astype(a.dtype)).astype(s.dtype)
        inverse = keep / jnp.where(keep > 0, s, jnp.ones_like(s))
        root = product(V * inverse[None], V.T)
        quick = beside(wide.astype(a.dtype), root.astype(a.dtype))
        return _checked(s.max() <= EVEN * s.min(), quick, lambda: beside(wide, root).astype(a.dtype))
    return _in_double(factor)(a)


@_polar.defjvp
def _polar_jvp(rank, solver, primals, tangents):
    """dQ = U ((M − Mᵀ)/(s_i + s_j)) Vᵀ + (1 − U Uᵀ) dA V diag(1/s) Vᵀ + U diag(1/s) Uᵀ dA (1 − V Vᵀ), M = Uᵀ dA V:
    finite for equal values."""
    [a], [da] = primals, tangents
    U, s, V = _exact(a, min(a.shape))
    keep = kept(s, rank)
    U, V, inverse = U * keep[None], V * keep[None], keep / jnp.where(s > 0, s, 1)
    right, left = product(da, V), product(U.T, da)
    M = product(U.T, right)
    sums = s[:, None] + s[None, :]
    turn = (M - M.T) / jnp.where(sums > 0, sums, 1)
    outside = product((right - product(U, M)) * inverse[None], V.T) + product(U * inverse[None], left - product(M, V.T))
    return product(U, V.T), product(product(U, turn), V.T) + outside
