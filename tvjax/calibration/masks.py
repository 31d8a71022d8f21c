"""Masks from scores: the share of all entries with the lowest (or highest) score, over all tensors at once.

The threshold is the exact k-th smallest score, found by counting, not by sorting; entries equal to it are kept, so that
a mask may hold more than k. Over R rounds the density falls as d_r = (1 − s)^(r/R) down to 1 − s (arXiv:2504.02620).
"""
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import tree
from tvjax.merging import traced

KEEP = ("lowest", "highest")


def densities(*, sparsity: float, rounds: int = 4) -> tuple[float, ...]:
    """The share of entries left after each round.

    >>> [round(d, 6) for d in densities(sparsity=0.9)]
    [0.562341, 0.316228, 0.177828, 0.1]
    """
    check_sparsity(sparsity)
    if rounds < 1:
        raise ValueError(f"there is at least one round; got rounds={rounds}")
    return tuple((1 - sparsity) ** (r / rounds) for r in range(1, rounds)) + (1 - sparsity,)


def check_sparsity(sparsity: float) -> None:
    """Raises ValueError unless 0 < sparsity < 1."""
    if not 0 < sparsity < 1:
        raise ValueError(f"sparsity is the share of entries that stay as they are, between 0 and 1; got {sparsity}")


def full(params: Any) -> Any:
    """A mask with every entry in it."""
    return jax.tree.map(lambda x: jnp.ones(np.shape(x), bool), params)


def count(mask: Any) -> int:
    """How many entries a mask holds.

    >>> count({"w": jnp.array([True, False])})
    1
    """
    return sum(int(n) for n in jax.device_get(_ones(jax.tree.leaves(mask))))


@jax.jit
def _ones(leaves):
    return [jnp.sum(leaf, dtype=jnp.int32) for leaf in leaves]


def narrowed(scores: Any, active: Any, *, density: float, keep: str = "lowest") -> Any:
    """The entries of the mask `active` with the k lowest scores, and those that tie with the last of them.

    k = min(⌊density·N⌋, n − 1), at least 1, with N entries in all and n active ones; an entry that is out stays out.

    Raises:
      ValueError: where the trees differ or no score is above zero.

    >>> s = {"w": jnp.array([0.3, 0.1, 0.2, 0.4])}
    >>> narrowed(s, full(s), density=0.5)["w"].tolist()
    [False, True, True, False]
    """
    check_mask(active, scores, names=("the mask", "the scores"))
    if keep not in KEEP:
        raise ValueError(f"keep is 'lowest' or 'highest'; got {keep!r}")
    if not any(jax.device_get([(leaf > 0).any() for leaf in jax.tree.leaves(scores)])):
        raise ValueError("all scores are zero: the output does not depend on any scored parameter")
    sign = -1.0 if keep == "lowest" else 1.0
    k = max(1, min(math.floor(density * tree.size(scores) * (1 + 1e-12)), count(active) - 1))  # 0.1·10 is 1 in binary
    return _narrowed(scores, active, np.int32(k), np.float32(sign))


@jax.jit
def _narrowed(scores, active, k, sign):
    ranked = jax.tree.map(lambda s, a: jnp.where(a, sign * s.astype(jnp.float32), -jnp.inf), scores, active)
    threshold = traced.kth_largest([traced.rows(x[None]) for x in jax.tree.leaves(ranked)], k)[0]
    return jax.tree.map(lambda s, a: a & (s >= threshold), ranked, active)


def by_score(scores: Any, *, density: float, keep: str = "lowest") -> Any:
    """The mask of the share `density` of all entries with the lowest or highest score, in one round.

    >>> by_score({"w": jnp.array([0.3, 0.1, 0.2, 0.4])}, density=0.5, keep="highest")["w"].tolist()
    [True, False, False, True]
    """
    return narrowed(scores, full(scores), density=density, keep=keep)


def at_random(params: Any, *, density: float, seed: int = 0) -> Any:
    """A mask of ⌊density·N⌋ entries drawn at random over all tensors (more only where two draws tie)."""
    keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params)))
    keys = jax.tree.unflatten(jax.tree.structure(params), list(keys))
    return by_score(jax.tree.map(lambda x, key: jax.random.uniform(key, np.shape(x)), params, keys), density=density)


def by_magnitude(params: Any, *, density: float, keep: str = "highest") -> Any:
    """The mask of the weights of largest (or smallest) magnitude.

    >>> by_magnitude({"w": jnp.array([0.3, -1.0])}, density=0.5)["w"].tolist()
    [False, True]
    """
    return by_score(jax.tree.map(jnp.abs, params), density=density, keep=keep)


def lota(tau: Any, *, density: float) -> Any:
    """LoTA's mask (arXiv:2406.16797): where a fine-tuned model moved most, over all tensors."""
    return by_magnitude(tau, density=density)


def check_mask(mask: Any, params: Any, *, names=("the mask", "the parameters")) -> None:
    """Raises ValueError naming the leaves where a mask is not a tree of booleans shaped as the parameters."""
    tree.check_same(mask, params, names=names, dtypes=False)
    if wrong := [name for name, leaf in tree.flatten(mask).items() if leaf.dtype != np.dtype(bool)]:
        raise ValueError(f"{names[0]} holds flags; not so in {tree.listing(wrong)}")
