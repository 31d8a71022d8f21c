"""TALL-masks and Consensus (Wang et al., 2024, arXiv:2405.07813): which entries of a merged vector each task needs, and
keeping what enough tasks need.

m_t = 1{|τ_t| > λ_t·|merged − τ_t|}.
"""
import jax.numpy as jnp

from tvjax.merging.averaging import as_like, total
from tvjax.merging.averaging import scale as scaled
from tvjax.merging.checks import choice, share, within
from tvjax.merging.numbers import each_task, per_task, sum_tasks
from tvjax.merging.operator import Operator, step
from tvjax.merging.signs import EXTRA, disjoint_merge, top

COMPARATORS = {">": jnp.greater, ">=": jnp.greater_equal}


def needed(tau, merged, lam, comparator: str = ">"):
    """TALL-mask of task vectors against a merged vector: |τ| > λ·|merged − τ|; λ = 1 is ℓ1-optimal, smaller keeps more.

    tau: (tasks, ...). merged: (...). lam: one number or one for each task. comparator: ">" (the authors' code) or ">="
    (the paper): they differ where τ is zero in all tasks.
    """
    return COMPARATORS[comparator](jnp.abs(tau), per_task(lam, tau) * jnp.abs(merged[None] - tau))


def needed_by(*, k=2, lam=0.4, comparator: str = ">") -> Operator:
    """Zeroes the entries of a merged vector that fewer than k of the task vectors (those given to the whole operator)
    need.

    It follows any merge: `ties(reduce="sum") | needed_by(k=1) | scale(by=0.5)`. lam: λ, one number or one for each
    task, or rules by leaf.

    >>> (total() | needed_by(k=1, lam=1.0))({"w": jnp.array([[4.0, 3.0], [1.0, 3.0]])})["w"].tolist()
    [5.0, 0.0]
    """
    within("lam", lam, 0, float("inf"))
    choice("comparator", comparator, tuple(COMPARATORS))
    return step(_needed_by, options={"comparator": comparator}, needs=("origin",), k=k, lam=lam)


def _needed_by(x, k, lam, comparator, origin):
    above = COMPARATORS[comparator]
    vote = lambda tau, by: above(jnp.abs(tau), as_like(by, x) * jnp.abs(x - tau)).astype(x.dtype)
    votes = sum_tasks(each_task(vote, origin, lam))
    return jnp.where(votes >= as_like(k, x), x, 0)


def consensus(
    *, lam=0.4, k=2, scale=0.3, comparator: str = ">", base: str = "sum", density=1.0, trim: str = "official"
) -> Operator:
    """scale · (a merged vector where at least k tasks need the entry) (arXiv:2405.07813): drops what none or one task
    alone needs.

    lam: λ, one number or one for each task, chosen on validation data from 0.2 … 0.6. k: least number of tasks; 0 keeps
    all, more than there are tasks keeps nothing. base: the merged vector: "sum" of the task vectors, or "ties" (their
    TIES sum, of `density` and `trim`; the paper takes k=1 then).

    >>> taus = {"w": jnp.array([[4.0, 3.0], [1.0, 3.0]])}
    >>> consensus(lam=1.0, k=1, scale=1.0)(taus)["w"].tolist()
    [5.0, 0.0]
    >>> consensus(lam=1.0, k=2, scale=1.0, comparator=">=")(taus)["w"].tolist()
    [0.0, 6.0]
    """
    share("density", density)
    extra = EXTRA[choice("trim", trim, tuple(EXTRA))]
    merge = total()
    if choice("base", base, ("sum", "ties")) == "ties":
        merge = top(density=density, extra=extra) | disjoint_merge(reduce="sum")
    return merge | needed_by(k=k, lam=lam, comparator=comparator) | scaled(by=scale)
