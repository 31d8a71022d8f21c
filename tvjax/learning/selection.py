"""Which task vectors to use under a budget b: at random, by features, by the gradient of the whole or of each block.

At λ = 0, ∂L/∂λ_i^(j) = ⟨∂L/∂θ^(j), τ_i^(j)⟩: one backward pass through the pretrained model scores every vector on
every block exactly, whatever their number, and the vectors may be read one after the other (arXiv:2407.02880, §6.1 and
D.6; there groups of b vectors are scored at a time, which does not compare across groups).
"""
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tvjax import tree, vectors
from tvjax.learning.heads import join, some
from tvjax.merging.lowrank import is_low_rank

METHODS = ("random", "features", "whole gradient", "block gradient")


def check_budget(budget: int, size: int) -> int:
    """The budget, if it is from 1 to the size of the pool."""
    if not 1 <= budget <= size:
        raise ValueError(f"a budget is from 1 to the {size} task vectors of the pool; got {budget}")
    return budget


def at_random(size: int, budget: int, *, seed: int) -> list[int]:
    """`budget` of `size` vectors; a smaller budget with the same seed takes some of the same.

    >>> at_random(5, 2, seed=0) == at_random(5, 3, seed=0)[:2]
    True
    """
    return [int(i) for i in np.random.default_rng(seed).permutation(size)[:check_budget(budget, size)]]


def by_features(target: Any, others: Sequence[Any], budget: int) -> list[int]:
    """The vectors whose data look most like the target's: by the cosine of mean zero-shot image features.

    >>> by_features(np.array([1.0, 0.0]), [np.array([0.0, 1.0]), np.array([2.0, 1.0])], 1)
    [1]
    """
    rows, target = np.stack([np.asarray(x) for x in others]), np.asarray(target)
    cosines = rows @ target / np.maximum(np.linalg.norm(rows, axis=1) * np.linalg.norm(target), 1e-12)
    return largest(cosines, budget)


def largest(scores: Any, budget: int) -> list[int]:
    """The indices of the largest scores, the first of equals first."""
    scores = np.asarray(scores)
    return [int(i) for i in np.argsort(-scores, kind="stable")[:check_budget(budget, len(scores))]]


def gradient(predict, theta0: Any, head: Any, split: Any, *, batch: int = 64) -> Any:
    """∂L/∂θ of the mean cross-entropy over a labelled split at θ0, as a tree."""
    joined, labels = join([head]), np.asarray(tuple(split)[1])
    total, theta0 = None, jax.device_put(theta0)
    for start in range(0, len(labels), batch):
        rows = np.arange(start, start + batch)  # the last batch begins anew: zeros have no derivative in a unit vector
        inputs, answers = some((tuple(split)[0], labels.astype(np.int32)), rows % len(labels))
        found = _slope(theta0, joined.head, joined.owner >= 0, inputs, answers, rows < len(labels), predict=predict)
        total = found if total is None else jax.tree.map(jnp.add, total, found)
    return jax.tree.map(lambda x: x / len(labels), total)


@functools.partial(jax.jit, static_argnames="predict")
def _slope(theta0, head, known, inputs, labels, counted, *, predict):
    def loss(theta):
        logits = jnp.where(known[None], predict(theta, head, inputs).astype(jnp.float32), -1e9)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.where(counted, each, 0).sum()
    return jax.grad(loss)(theta0)


def block_scores(slope: Any, taus: Iterable[Any]) -> dict[str, np.ndarray]:
    """{tensor: ⟨∂L/∂θ, τ_i⟩ for every vector}; the vectors, which may be low-rank, are looked at one at a time."""
    flat = tree.flatten(slope)
    rows = []
    for tau in taus:
        held = tree.flatten(tau, is_low_rank)
        rows.append({name: _inner(flat[name], held[name]) if name in held else 0.0 for name in flat})
    if not rows:
        raise ValueError("the pool is empty: at least one task vector is needed")
    return {name: np.array([row[name] for row in rows]) for name in flat if any(row[name] for row in rows)}


def _inner(slope, tau) -> float:
    slope = vectors.wide(slope)
    if is_low_rank(tau):
        through = jnp.matmul(slope, vectors.wide(tau.A).T, precision="highest")
        return float((through * vectors.wide(tau.B)).sum())
    return float(jnp.vdot(slope, vectors.wide(tau), precision="highest"))


def by_whole_gradient(scores: dict[str, Any], budget: int) -> list[int]:
    """The vectors with the largest ‖∂L/∂λ_i‖₁ over all tensors."""
    return largest(np.abs(np.stack(list(scores.values()))).sum(0), budget)


def by_block_gradient(scores: dict[str, Any], budget: int) -> dict[str, list[int]]:
    """For each tensor the vectors with the largest |∂L/∂λ_i^(j)|: another choice for each, as `pool.take` takes it."""
    return {name: largest(np.abs(score), budget) for name, score in scores.items()}


def load_chosen(paths: Sequence[Any], chosen: Any, load, theta0: Any = None, *, store: str = "float32"):
    """The pool of the chosen tensors read from files, one vector in memory at a time.

    chosen: indices, or {tensor: indices} of `by_block_gradient`. load: path -> task vector. Tensors of no choice are
    left out.
    """
    from tvjax.learning.pool import pool
    slots: list[dict] = []
    for i, path in enumerate(paths):
        by_name = chosen if isinstance(chosen, dict) else None
        if by_name is None and i not in chosen:
            continue
        flat = tree.flatten(load(path), is_low_rank)
        wanted = flat if by_name is None else {n: x for n, x in flat.items() if n in by_name and i in by_name[n]}
        for name, leaf in wanted.items():
            place = list(chosen).index(i) if by_name is None else by_name[name].index(i)
            slots += [{} for _ in range(place + 1 - len(slots))]
            slots[place][name] = leaf
    return pool([tree.unflatten(slot) for slot in slots], theta0, store=store)
