"""Merging in a shared basis: small cores C_t with X_t = P C_t Qᵀ are merged by any operator, and the result is lifted
back.

KnOTS (one-sided, arXiv:2410.19735), core space (two-sided, arXiv:2509.17786) and DC-Merge (orthonormal bases of the
tasks' leading triplets). On
low-rank leaves none of them ever forms a dense matrix.
"""
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tvjax.merging import operator as operators
from tvjax.merging.averaging import mean, total
from tvjax.merging.averaging import scale as scaled
from tvjax.merging.checks import choice, within
from tvjax.merging.factors import kept, options, polar, product, side_by_side, svd, turned
from tvjax.merging.lowrank import LowRank, is_low_rank
from tvjax.merging.numbers import Entries
from tvjax.merging.operator import Operator, matrix, on, step
from tvjax.merging.signs import ties
from tvjax.merging.spectral import check_count, task_rank, tsv_m
from tvjax.merging.statistics import Sum, static


# ---------------------------------------------------------------- any operator on cores
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cores:
    """P·core·Qᵀ: core (tasks, k, l) before a reduction and (k, l) after it, P (rows, k), Q (columns, l) or None for
    none.

    start: the cores as they were, where a later step asks for them.
    """

    core: Any
    P: Any
    Q: Any
    start: Any
    low_rank: bool = static(default=False)

    @property
    def shape(self):
        return self.core.shape

    @property
    def dtype(self):
        return self.core.dtype


@dataclasses.dataclass(frozen=True)
class Inside:
    """A leaf function that works on the core of a state."""

    f: Callable

    def __call__(self, state: Cores, *values, **given):
        if "origin" in given:
            given["origin"] = state.start
        return dataclasses.replace(state, core=self.f(state.core, *values, **given))

    @property
    def __name__(self):
        return self.f.__name__


@dataclasses.dataclass(frozen=True)
class OfCore:
    """A score or summand of a statistic, taken from the core of a state."""

    f: Callable

    def __call__(self, state: Cores):
        return self.f(state.core)


def inside(operator: Operator) -> Operator:
    """The operator whose stages, and their statistics over the whole model, work on cores."""
    for stage in operator.stages:
        if outer := sorted(set(stage.needs) - set(operators.NEEDS)):
            raise ValueError(f"{stage!r} needs {', '.join(outer)} by entry of the leaf, which a core does not have")
        if any(isinstance(number, Entries) for number in jax.tree.leaves(stage.numbers, is_leaf=_is_entries)):
            raise ValueError(f"{stage!r} has a number for each entry of the leaf, which a core does not have")
    return Operator(tuple(map(_inside, operator.stages)))


def _is_entries(number) -> bool:
    return isinstance(number, Entries)


def _inside(stage):
    stats = tuple(_of_core(stat, "f" if isinstance(stat, Sum) else "score") for stat in stage.stats)
    return dataclasses.replace(stage, leaf=Inside(stage.leaf), stats=stats, entrywise=False)


def _of_core(stat, field: str):
    return dataclasses.replace(stat, **{field: OfCore(getattr(stat, field))})


def through(into: Callable, inner, *after: Operator, chosen, **numbers) -> Operator:
    """On matrices: cores by `into`, merged by `inner`, then `after`, lifted back; other leaves averaged."""
    if not isinstance(inner, Operator):
        raise ValueError(f"inner is an operator, such as ties(); got {type(inner).__name__}")
    chosen = dict(chosen) | {"start": any("origin" in stage.needs for stage in inner.stages)}
    chain = step(into, options=chosen, entrywise=False, **numbers) | inside(inner)
    for operator in after:
        chain = chain | operator
    return on(matrix, chain | step(_lift, entrywise=False), mean())


def _lift(state: Cores):
    right = state.core if state.Q is None else product(state.core, turned(state.Q))
    if not state.low_rank:
        return product(state.P, right)
    return LowRank(jnp.broadcast_to(state.P, (*right.shape[:-2], *state.P.shape)), right)


def _cores(core, P, Q, start: bool, low_rank: bool) -> Cores:
    return Cores(core, P, Q, core if start else None, low_rank)


# ---------------------------------------------------------------- bases
def _left(x, solver, start):
    """[X_1 … X_T] = U S [V_1 … V_T]ᵀ; the cores are S V_tᵀ = Uᵀ X_t."""
    if not is_low_rank(x):
        f = svd(jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1), solver=solver)
        core = (f.s[:, None] * f.V.T).reshape(len(f.s), len(x), x.shape[2])
        return _cores(jnp.moveaxis(core, 1, 0), f.U, None, start, False)
    Q, R = jnp.linalg.qr(side_by_side(x.B))
    L = turned(jnp.linalg.qr(turned(x.A))[1])  # A_t = L_t P_tᵀ
    small = product(jnp.moveaxis(R.reshape(R.shape[0], *x.A.shape[:2]), 1, 0), L)
    U = product(Q, svd(side_by_side(small), solver=solver).U)
    return _cores(product(product(U.T, x.B), x.A), U, None, start, True)


def _both(x, solver, start):
    """P from the left singular vectors of the B_t (or X_t) side by side, Q from the right ones of the A_t (or X_t)
    below each other."""
    B, A = (x.B, x.A) if is_low_rank(x) else (x, x)
    P = svd(side_by_side(B), solver=solver).U
    Q = svd(A.reshape(-1, A.shape[-1]), solver=solver).V
    left = product(P.T, B)
    return _cores(product(left, product(A, Q)) if is_low_rank(x) else product(left, Q), P, Q, start, is_low_rank(x))


def _cover(x, rho, smoothing, per_task, rank, solver, start):
    """The leading triplets of every task with smoothed singular values, in the orthonormal bases nearest to all of
    them."""
    f = svd(x, k=per_task or task_rank(x), rank=rank, solver=solver)
    P, Q = (polar(side_by_side(side), rank=rank, solver=solver) for side in (f.U, f.V))
    s = smoothed(f.s, rho, smoothing, rank)
    core = product(product(P.T, f.U) * s[:, None, :], turned(product(Q.T, f.V)))
    return _cores(core, P, Q, start, f.low_rank)


def smoothed(s, rho, smoothing: str, rank: str = "numerical"):
    """Singular values (tasks, k) of the same sum, "average": all equal; "linear": falling evenly to 1 / min(rho, s_1 /
    s_k) of the first."""
    there = kept(s, rank)
    count = jnp.maximum(there.sum(-1, keepdims=True), 1)
    if smoothing == "average":
        return s.sum(-1, keepdims=True) / count * there
    least = jnp.where(there > 0, s, s[:, :1]).min(-1, keepdims=True)
    ratio = jnp.minimum(rho, s[:, :1] / jnp.where(least > 0, least, 1))
    place = jnp.arange(s.shape[-1], dtype=s.dtype)[None] / jnp.maximum(count - 1, 1)
    shape = (ratio + (1 - ratio) * place) * there
    total = shape.sum(-1, keepdims=True)
    return shape * s.sum(-1, keepdims=True) / jnp.where(total > 0, total, 1)


def _blocks(state: Cores, tasks):
    """Keeps of the core what lies in one task's own rows and columns."""
    mine = jnp.kron(jnp.eye(tasks, dtype=state.dtype), jnp.ones((state.shape[-1] // tasks,) * 2, state.dtype))
    return dataclasses.replace(state, core=jnp.where(mine > 0, state.core, 0))


# ---------------------------------------------------------------- methods
def knots(*, inner=None, solver: str = "auto") -> Operator:
    """KnOTS (Stoica et al., 2024, arXiv:2410.19735): the parts S V_tᵀ of one SVD of [X_1 … X_T], merged by `inner` and
    put behind U.

    inner: an operator that reduces over tasks (ties() by default); its statistics run over the cores of all matrices,
    as in the authors' code.
    Other leaves are averaged. A trim counts the entries of the cores: for adapters use `LowRank` leaves, whose cores
    have no empty rows.

    >>> knots(inner=ties(density=1.0))({"w": jnp.array([[[2.0, 1.0, 2.0]], [[2.0, 3.0, 2.0]]])})["w"].round(4).tolist()
    [[2.0, 2.0, 2.0]]
    """
    inner = ties() if inner is None else inner
    return through(_left, inner, chosen={"solver": options("numerical", solver)["solver"]})


def core_space(*, inner=None, solver: str = "auto") -> Operator:
    """Core space (Panariello et al., 2025, arXiv:2509.17786): U_Bᵀ B_t A_t V_A in shared bases of all B and all A,
    merged by `inner`.

    inner: an operator that reduces over tasks (tsv_m() by default). Low-rank leaves stay low-rank, of rank tasks·rank;
    dense ones are only turned.

    >>> core_space(inner=total())({"w": jnp.array([[[2.0, 1.0, 2.0]], [[2.0, 3.0, 2.0]]])})["w"].round(4).tolist()
    [[4.0, 4.0, 4.0]]
    """
    inner = tsv_m() if inner is None else inner
    return through(_both, inner, chosen={"solver": options("numerical", solver)["solver"]})


def dc_merge(*, scale=1.0, inner=None, smoothing: str = "average", rho=5.0, mask: str = "block",
             per_task: int | None = None, rank: str = "numerical", solver: str = "auto") -> Operator:
    """DC-Merge (CVPR 2026): each task's leading triplets with smoothed singular values, merged in bases that cover all
    of them.

    inner: merges the cores; total() by default. For adapters the authors use top(density=0.001, scope="leaf") |
    agree(zero="none") |
    nonzero_mean(), with smoothing="linear". smoothing: "average" or "linear" (greatest over least at most rho, ≥ 1).
    mask: "block" keeps each
    task's own block of the merged core, "none" all of it. scale, per_task, rank, solver: see `tsv_m`.

    >>> x = jnp.stack([jnp.diag(jnp.array([2.0, 0.0])), jnp.diag(jnp.array([0.0, 4.0]))])
    >>> dc_merge()({"w": x})["w"].round(5).tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    chosen = options(rank, solver) | {"smoothing": choice("smoothing", smoothing, ("average", "linear"))}
    chosen |= {"per_task": check_count("per_task", per_task)}
    masked = choice("mask", mask, ("block", "none")) == "block"
    block = [step(_blocks, needs=("tasks",), entrywise=False)] if masked else []
    inner = total() if inner is None else inner
    merge = through(_cover, inner, *block, chosen=chosen, rho=within("rho", rho, 1, float("inf")))
    return merge | scaled(by=scale)
