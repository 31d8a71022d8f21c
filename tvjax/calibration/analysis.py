"""What masks and sparse task vectors look like: overlap, occupancy, what θ0 can bear to lose there, localisation."""
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import compression, tree
from tvjax.calibration import masks as masking
from tvjax.calibration.eligible import kind
from tvjax.calibration.gradients import count_examples
from tvjax.compression import bits

BY = {"kind": kind, "layer": tree.layer, "leaf": lambda name: name}


def iou(masks: Sequence[Any]) -> np.ndarray:
    """(tasks, tasks) intersection over union of masks; 1 for two empty ones.

    Source of the mean over pairs as a measure of sharing: arXiv:2504.02620. Two random masks of density d have
    d/(2 − d).

    >>> iou([{"w": jnp.array([True, True])}, {"w": jnp.array([True, False])}]).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    packed = [jax.tree.map(lambda x: compression.pack(np.asarray(x)), mask) for mask in masks]
    return np.asarray(compression.overlaps(bits.stack(packed)))


def occupancy(mask: Any, *, by: str = "kind") -> dict[str, tuple[int, int]]:
    """{group: (entries of the mask, entries)}, by "kind" of tensor (Q, K, V, O, MLP, LN …), "layer" or "leaf".

    >>> occupancy({"q_proj": jnp.array([True, False]), "fc1": jnp.array([False])})
    {'MLP': (0, 1), 'Q': (1, 2)}
    """
    if by not in BY:
        raise ValueError(f"no grouping {by!r}; {tree.did_you_mean(by, list(BY))}")
    found: dict[str, tuple[int, int]] = {}
    for name, leaf in tree.flatten(mask).items():
        had = found.get(BY[by](name), (0, 0))
        found[BY[by](name)] = (had[0] + int(jnp.sum(leaf)), had[1] + int(np.size(leaf)))
    return found


@jax.jit
def pruned(params: Any, mask: Any) -> Any:
    """The parameters with the mask's entries set to zero; tensors that the mask lacks stay as they are.

    >>> pruned({"a": jnp.ones(2), "b": jnp.ones(1)}, {"a": jnp.array([True, False])})["a"].tolist()
    [0.0, 1.0]
    """
    return _where(params, mask, lambda name, x: jnp.zeros_like(x))


class Noised(NamedTuple):
    """Noisy parameters; the mean magnitude and the standard deviation of the entries before the noise."""

    params: Any
    mean: float
    std: float


def noised(params: Any, mask: Any, key: jax.Array, *, factor: float = 2.0) -> Noised:
    """The parameters with N(0, (factor·σ)²) added to the mask's entries, σ being the deviation of these entries.

    The source's N(0, 2σI) is read as a deviation of 2σ.
    """
    mean, std = (float(x) for x in _moments(params, mask))
    return Noised(_noised(params, mask, key, jnp.float32(factor * std)), mean, std)


@jax.jit
def _moments(params, mask):
    """(mean |θ|, deviation of θ) over the mask's entries."""
    flat, flags = tree.flatten(params), tree.flatten(mask)
    total = lambda f: sum(jnp.where(flags[n], f(flat[n].astype(jnp.float32)), 0.0).sum() for n in flags)
    count = jnp.maximum(total(jnp.ones_like), 1.0)
    mean = total(lambda x: x) / count
    return total(jnp.abs) / count, jnp.sqrt(total(lambda x: (x - mean) ** 2) / count)


@jax.jit
def _noised(params, mask, key, std):
    names = list(tree.flatten(mask))
    noise = lambda name, x: x + (std * jax.random.normal(jax.random.fold_in(key, names.index(name)), x.shape)
                                 ).astype(x.dtype)
    return _where(params, mask, noise)


def _where(params, mask, f):
    """`params` with f(name, leaf) at the mask's entries."""
    flags = tree.flatten(mask)
    change = lambda name, x: jnp.where(flags[name], f(name, x), x) if name in flags else x
    return tree.rebuild(params, {name: change(name, x) for name, x in tree.flatten(params).items()})


def localisation(logits: Callable, theta0: Any, tau: Any, examples: Any, *shared, classes: int,
                 chunk: int = 128) -> float:
    """Mean over examples and classes of |τᵀ∇_θ z_c(x; θ0)|, the first-order change of a task's logits along τ.

    0 on other tasks' examples means that τ edits its own task's inputs alone (arXiv:2504.02620). Taken by one forward
    derivative an example, not by gradients. logits: (params, example, *shared) -> (classes or more,).
    """
    count, total = count_examples(examples), 0.0
    for start in range(0, count, chunk):
        take = np.minimum(np.arange(start, start + chunk), count - 1)
        part = jax.tree.map(lambda x, take=take: x[take], examples)
        found = _slopes(theta0, tau, part, shared, logits=logits)
        total += float(jnp.abs(found[:count - start, :classes]).sum())
    return total / (count * classes)


@functools.partial(jax.jit, static_argnames="logits")
def _slopes(theta0, tau, part, shared, *, logits):
    along = tree.rebuild(theta0, {name: x.astype(y.dtype) for (name, x), y in zip(
        tree.flatten(tau).items(), tree.flatten(theta0).values(), strict=True)})
    one = lambda example: jax.jvp(lambda params: logits(params, example, *shared), (theta0,), (along,))[1]
    return jax.vmap(one)(part)


def chance(density: float) -> float:
    """The intersection over union of two random masks of that density, d/(2 − d)."""
    return density / (2 - density)


def shares(mask: Any, *, by: str = "kind") -> dict[str, float]:
    """The share of the mask's entries in each group; sums to 1."""
    found, whole = occupancy(mask, by=by), max(masking.count(mask), 1)
    return {group: kept / whole for group, (kept, _) in found.items()}
