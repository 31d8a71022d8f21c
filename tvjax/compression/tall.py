"""TALL-masks (Wang et al., 2024, arXiv:2405.07813): one merged vector and a bit an entry give back every task's model.

m_t = 1{|τ_t| > λ_t·|τ_MTL − τ_t|}, θ̂_t = θ0 + m_t ⊙ τ_MTL. Masks are trees of `Bits`, stacked over tasks.
"""
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import vectors
from tvjax.compression import bits as packed
from tvjax.compression.codec import Codec, per_leaf
from tvjax.merging import Operator, needed, top, total
from tvjax.merging.checks import choice, share, within
from tvjax.merging.masks import COMPARATORS

GRID = (0.2, 0.3, 0.4, 0.5, 0.6)  # of λ, as in the paper


def multi_task_vector(taus: Sequence[Any], merging: Operator | None = None, *, tasks=None):
    """τ_MTL: what the operator makes of the task vectors; their sum by default.

    Take a merge at scale 1: `total()`, `ties(density=0.2, reduce="sum")`, `tsv_m(scale=1.0)`, `iso_c(scale=1.0)`.
    """
    return (total() if merging is None else merging)(list(taus), tasks=tasks)


def tall_mask(tau, merged, *, lam=0.4, comparator: str = ">"):
    """The mask of one task as a tree of `Bits`: 1{|τ| > λ·|merged − τ|}.

    lam: λ ≥ 0; 1 is the best in ℓ1, smaller keeps more. comparator: ">" (the authors' code) or ">=" (the paper), which
    differ at exact equality, above all where an entry is zero in all tasks: 0 under the first, 1 under the second.

    >>> mask = tall_mask({"w": jnp.array([4.0, 1.0])}, {"w": jnp.array([5.0, 4.0])}, lam=1.0)
    >>> packed.unpack(mask["w"]).tolist()
    [True, False]
    """
    within("lam", lam, 0, float("inf"))
    choice("comparator", comparator, tuple(COMPARATORS))
    return per_leaf(lambda x, whole: _mask(x, whole, lam, comparator=comparator), tau, merged)


@functools.partial(jax.jit, static_argnames="comparator")
def _mask(x, merged, lam, *, comparator):
    lam = jnp.asarray(lam).astype(x.dtype)
    return packed.pack(needed(x[None], merged, lam, comparator)[0])


def tall_masks(taus: Sequence[Any], merged, *, lam: Any = 0.4, comparator: str = ">"):
    """The masks of all tasks, stacked: leaves are `Bits` with (tasks, bytes). lam: one number, or one for each task."""
    lams = per_task(lam, len(taus))
    return packed.stack([tall_mask(tau, merged, lam=one, comparator=comparator)
                         for tau, one in zip(taus, lams, strict=True)])


def per_task(number: Any, tasks: int) -> list:
    """The numbers of all tasks from one number or a list of them."""
    if np.ndim(number) == 0:
        return [number] * tasks
    if len(number) != tasks:
        raise ValueError(f"there are {tasks} task vectors but {len(number)} numbers for them")
    return list(number)


def magnitude_mask(tau, *, density=0.1):
    """The mask of the largest magnitudes of one task vector, a share `density` of all its entries (never one of 0)."""
    kept = top(density=share("density", density))([tau])
    return per_leaf(lambda x: packed.pack(x[0] != 0), kept)


def masked(merged, mask):
    """m ⊙ merged: the task vector that a mask finds in a merged one. Works inside `jit`."""
    return per_leaf(lambda x, bits: packed.where_bits(bits, x), merged, mask)


def reconstruct(theta0, merged, mask):
    """θ̂ = θ0 + m ⊙ merged, the model of the task whose mask this is."""
    return vectors.add(theta0, masked(merged, mask))


def choose_lambdas(taus: Sequence[Any], merged, judge: Callable[[int, Any], float], *, grid: Sequence[float] = GRID,
                   comparator: str = ">") -> tuple[float, ...]:
    """λ of each task: the first of `grid` with the greatest `judge(task's number, m_t ⊙ merged)`.

    judge: the task's own accuracy at θ0 plus the vector that it is given, on validation data. Tasks do not depend on
    each other.

    >>> taus = [{"w": jnp.array([1.0, 0.0])}, {"w": jnp.array([0.0, 1.0])}]
    >>> choose_lambdas(taus, multi_task_vector(taus), lambda task, tau: 0.5)
    (0.2, 0.2)
    """
    def first_best(task, tau):
        scores = [judge(task, masked(merged, tall_mask(tau, merged, lam=lam, comparator=comparator))) for lam in grid]
        if all(np.isnan(score) for score in scores):
            raise ValueError(f"no λ can be chosen for task {task}: its score is nan everywhere")
        return grid[int(np.nanargmax(scores))]
    return tuple(first_best(task, tau) for task, tau in enumerate(taus))


# ---------------------------------------------------------------- as codecs
def tall_codec(*, merging: Operator | None = None, lam: Any = 0.4, comparator: str = ">") -> Codec:
    """The codec of TALL-masks: 32·P bits shared and P bits a task.

    merging: the merged vector, at scale 1 (the sum by default). lam: λ, one number or one for each task.
    """
    def own(shared, tau, index):
        return tall_mask(tau, shared, lam=lam if np.ndim(lam) == 0 else lam[index], comparator=comparator)
    return Codec("tall", lambda taus: multi_task_vector(taus, merging), own, masked)


def magnitude_masking(*, density=0.1, merging: Operator | None = None) -> Codec:
    """The baseline of arXiv:2405.07813: the mask of a task holds its own largest magnitudes, put on the sum of all."""
    return Codec("magnitude masking", lambda taus: multi_task_vector(taus, merging),
                 lambda shared, tau, index: magnitude_mask(tau, density=density), masked)


def scaling_vector(factors) -> vectors.TaskVector:
    """The task vector of (IA)³ (arXiv:2205.05638) factors l, whose pretrained value is 1: τ = l − 1.

    >>> scaling_vector({"l": jnp.array([1.5, 1.0])})["l"].tolist()
    [0.5, 0.0]
    """
    return vectors.task_vector(factors, jax.tree.map(jnp.ones_like, factors))
