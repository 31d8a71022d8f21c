"""Models at θ0 + Σ_t c_t τ_t for many coefficients c: what each answers on a split, and its losses.

Where the features are affine in τ (tangent models: `Family.slopes`), the data passes through the network once, forward
and along every τ_t, whatever the number of coefficients; else once for each of them. The answers are the same.
"""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import sharding, tangent, tree, vectors
from tvjax.evaluation.heads import classify, unit
from tvjax.evaluation.interference import disagreement
from tvjax.evaluation.points import paired, shifted
from tvjax.evaluation.top1 import padded

COLUMNS = 64  # heads are padded to a multiple of this, so that tasks share a program


class Family(NamedTuple):
    """A base and how a vector moves it: `encode(place(base, τ), inputs)` are the features at τ.

    slopes: (base, taus, inputs) -> (features at 0, their derivatives along each τ), where features are affine in τ.
    readout: what heads see of the features, as in `classify`.
    """

    base: Any
    place: Callable
    encode: Callable
    slopes: Callable | None = None
    readout: Callable = unit


class Answers(NamedTuple):
    """`classes` (mixtures, examples) int32, −1 where a logit is no number; `losses`, cross-entropies, of that shape.

    passes: how often the data went through the network, derivatives counted as passes.
    """

    classes: np.ndarray
    losses: np.ndarray
    passes: int


def family(encode: Callable, theta0: Any, *, linear: bool = False, readout: Callable = unit) -> Family:
    """Models at θ0 + τ, or, where `linear`, those linearised at θ0.

    encode: (params, inputs) -> features, not normalised.
    """
    if not linear:
        return Family(theta0, shifted, encode, readout=readout)
    return Family(theta0, paired, at_pair(encode), tangent.slopes(encode), readout)


@functools.cache
def at_pair(encode: Callable) -> Callable:
    """((theta0, tau), inputs) -> the linearised features."""
    return lambda point, inputs: tangent.linearised(encode)(*point, inputs)


def mixtures(family: Family, taus, coefficients, head, split, *, batch=128) -> Answers:
    """What the models with these coefficients answer.

    taus: task vectors, a stack or a list. coefficients: (mixtures, tasks). head: (features, classes), under the
    family's readout of features. split: (inputs, labels); a batch is cut over the mesh of the base or of `sharding.on`.

    >>> half = family(lambda params, x: x * params, jnp.ones((1, 2)), linear=True)
    >>> x, labels = np.eye(2, dtype=np.float32), np.array([0, 1])
    >>> mixtures(half, jnp.array([[[-2.0, 0.0]]]), [[0.0], [1.0]], jnp.eye(2), (x, labels)).classes.tolist()
    [[0, 1], [1, 1]]
    """
    taus = tree.stack(taus) if isinstance(taus, (list, tuple)) else taus
    coefficients = np.asarray(coefficients, np.float32)
    tasks = jax.tree.leaves(taus)[0].shape[0]
    if coefficients.ndim != 2 or coefficients.shape[1] != tasks:
        raise ValueError(f"coefficients are one row a mixture and one column a task: there are {tasks} tasks, and rows "
                         f"of shape {coefficients.shape[1:]}")
    inputs, labels = split
    if family.slopes:
        return answers(expansion(family, taus, inputs, batch=batch), coefficients, head, labels, batch=batch)
    (base, taus, head), layout = sharding.settled(family.base, taus, _padded_head(head))
    parts = []
    for rows, real in padded((inputs, np.asarray(labels, np.int32)), batch=batch):
        x, y = sharding.spread(rows, layout)
        made = [_plain(base, taus, c, *head, x, y, place=family.place, encode=family.encode, readout=family.readout)
                for c in coefficients]
        parts.append(tuple(np.stack(side)[:, :real] for side in zip(*sharding.host(made), strict=True)))
    return Answers(*_joined(parts), len(coefficients))


class Expansion(NamedTuple):
    """Features of a split where they are affine: (examples, features) at 0 and (tasks, examples, features) along τ."""

    value: np.ndarray
    slopes: np.ndarray
    passes: int
    readout: Callable = unit


def expansion(family: Family, taus, inputs, *, batch=128) -> Expansion:
    """What all mixtures of these vectors need of a split, by one pass forward and one along each vector.

    ValueError where the family's features are not affine in τ.
    """
    if family.slopes is None:
        raise ValueError("the features of this family are not affine in its vectors: there is no expansion to keep")
    taus = tree.stack(taus) if isinstance(taus, (list, tuple)) else taus
    args, layout = sharding.settled(family.base, taus)
    parts = []
    for x, real in padded(inputs, batch=batch):
        value, slopes = _slopes(*args, sharding.spread(x, layout), slopes=family.slopes)
        parts.append((value[:real], slopes[:, :real]))
    value, slopes = zip(*sharding.host(parts), strict=True)
    return Expansion(np.concatenate(value), np.concatenate(slopes, 1), 1 + slopes[0].shape[0], family.readout)


def answers(found: Expansion, coefficients, head, labels, *, batch=128) -> Answers:
    """`mixtures` from an expansion that is at hand; `passes` are those that it took."""
    layout, args = sharding.found(), (np.asarray(coefficients, np.float32), *_padded_head(head))
    args = sharding.replicate(args, layout) if layout else jax.device_put(args)
    rows = (found.value, np.moveaxis(found.slopes, 0, 1), np.asarray(labels, np.int32))
    parts = []
    for part, real in padded(rows, batch=batch):
        classes, losses = _affine(*args, *sharding.spread(part, layout), readout=found.readout)
        parts.append((classes[:, :real], losses[:, :real]))
    return Answers(*_joined(parts), found.passes)


def _joined(parts) -> tuple[np.ndarray, np.ndarray]:
    classes, losses = zip(*sharding.host(parts), strict=True)
    return np.concatenate(classes, 1), np.concatenate(losses, 1)


def mixture_accuracy(family: Family, taus, coefficients, head, split, *, batch=128) -> np.ndarray:
    """The share of right answers at each of the coefficients, (mixtures,)."""
    found = mixtures(family, taus, coefficients, head, split, batch=batch).classes
    return (found == np.asarray(split[1])[None]).mean(1)


class Plane(NamedTuple):
    """Two tasks on grid × grid, arrays (α₁, α₂): ξ, and the mean loss of each task."""

    xi: np.ndarray
    losses: tuple[np.ndarray, np.ndarray]
    passes: int


def plane(family: Family, tau1, tau2, data1, data2, grid, *, batch=128) -> Plane:
    """ξ(α₁, α₂) as `disentanglement` has it, and the losses in the plane of two task vectors.

    data1, data2: (head, (inputs, labels)). Row i is α₁ = grid[i], column j is α₂ = grid[j].
    """
    grid = np.asarray(grid, np.float32)
    n = len(grid)
    both = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(n * n, 2)
    alone = [np.stack([grid, 0 * grid], 1), np.stack([0 * grid, grid], 1)]
    taus = tree.stack([tau1, tau2])
    found = [mixtures(family, taus, np.concatenate([both, own]), *data, batch=batch)
             for own, data in zip(alone, (data1, data2), strict=True)]
    merged = [one.classes[:n * n].reshape(n, n, -1) for one in found]
    single = [one.classes[n * n:] for one in found]
    xi = np.array([[disagreement(single[0][i], merged[0][i, j]) + disagreement(single[1][j], merged[1][i, j])
                    for j in range(n)] for i in range(n)])
    losses = tuple(one.losses[:n * n].mean(1).reshape(n, n) for one in found)
    return Plane(xi, losses, sum(one.passes for one in found))


# ---------------------------------------------------------------- programs
@functools.partial(jax.jit, static_argnames=("place", "encode", "readout"))
def _plain(base, taus, c, head, classes, inputs, labels, *, place, encode, readout):
    """One mixture: a program of its own, whatever the number of mixtures."""
    tau = jax.tree.map(lambda x: jnp.tensordot(c, vectors.wide(x), 1, precision="highest"), taus)
    return _judged(encode(place(base, tau), inputs), head, classes, labels, readout)


@functools.partial(jax.jit, static_argnames="slopes")
def _slopes(base, taus, inputs, *, slopes):
    return slopes(base, taus, inputs)


@functools.partial(jax.jit, static_argnames="readout")
def _affine(coefficients, head, classes, value, slopes, labels, *, readout):
    """slopes: (examples, tasks, features), so that a batch of them has its examples first."""
    slopes = jnp.moveaxis(slopes, 1, 0)
    mixed = lambda c: tangent.affine(value, slopes, c)
    return jax.lax.map(lambda c: _judged(mixed(c), head, classes, labels, readout), coefficients)


def _judged(features, head, classes, labels, readout):
    logits = classify(_itself, readout)(features, head, None)
    known = jnp.arange(logits.shape[-1])[None] < classes
    masked = jnp.where(known, logits, -jnp.inf)
    answers = jnp.where((jnp.isnan(logits) & known).any(-1), -1, jnp.argmax(masked, -1).astype(jnp.int32))
    right = jnp.take_along_axis(masked, labels[:, None], 1)[:, 0]
    return answers, jax.nn.logsumexp(masked, axis=-1) - right


def _itself(features, _):
    return features


def _padded_head(head):
    head = jnp.asarray(head)
    return jnp.pad(head, ((0, 0), (0, -head.shape[1] % COLUMNS))), np.int32(head.shape[1])
