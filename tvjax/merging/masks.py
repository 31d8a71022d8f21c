"""TALL-masks and Consensus (Wang et al., 2024, arXiv:2405.07813): which entries of the summed vector each task needs, and merging what enough tasks need.

m_t = 1{|τ_t| > λ_t·|Σ τ − τ_t|}.
"""
import jax.numpy as jnp

from tvjax.merging.averaging import scale as scaled
from tvjax.merging.checks import choice, within
from tvjax.merging.numbers import per_task, sum_tasks
from tvjax.merging.operator import Operator, step

COMPARATORS = {">": jnp.greater, ">=": jnp.greater_equal}


def needed(tau, merged, lam, comparator: str = ">"):
    """TALL-mask of task vectors against a merged vector: |τ| > λ·|merged − τ|; λ = 1 is ℓ1-optimal, smaller keeps more.

    tau: (tasks, ...). merged: (...). lam: one number or one for each task. comparator: ">" (the authors' code) or ">=" (the paper): they differ
    where τ is zero in all tasks.
    """
    return COMPARATORS[comparator](jnp.abs(tau), per_task(lam, tau) * jnp.abs(merged[None] - tau))


def consensus(*, lam=0.4, k=2, scale=0.3, comparator: str = ">") -> Operator:
    """scale·Σ τ where at least k tasks need the entry (arXiv:2405.07813): drops what none ("catastrophic") or one task alone ("selfish") needs.

    lam: λ, one number or one for each task, chosen on validation data from 0.2 … 0.6. k: least number of tasks; 0 keeps all (task arithmetic),
    more than there are tasks keeps nothing.

    >>> taus = {"w": jnp.array([[4.0, 3.0], [1.0, 3.0]])}
    >>> consensus(lam=1.0, k=1, scale=1.0)(taus)["w"].tolist(), consensus(lam=1.0, k=2, scale=1.0, comparator=">=")(taus)["w"].tolist()
    ([5.0, 0.0], [0.0, 6.0])
    """
    within("lam", lam, 0, float("inf"))
    return step(_agreed, options={"comparator": choice("comparator", comparator, tuple(COMPARATORS))}, lam=lam, k=k) | scaled(by=scale)


def _agreed(x, lam, k, comparator):
    merged = sum_tasks(x)
    return jnp.where(needed(x, merged, lam, comparator).sum(0, dtype=x.dtype) >= k, merged, 0)
