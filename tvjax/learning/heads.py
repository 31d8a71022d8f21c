"""Several tasks in one pass: their heads side by side, their batches one after the other, Σ_d weight_d · CE_d.

The encoder sees the concatenated batch once; an example is judged by the columns of its own task alone.
"""
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tvjax import training
from tvjax.learning.coefficients import penalty

COLUMNS = 64  # heads are padded to multiples of it, so that tasks of other sizes share compiled steps


class Joined(NamedTuple):
    """Heads side by side: `owner` is the task of each column (−1: padding), `offsets` where each task begins."""

    head: Any
    owner: Any
    offsets: tuple[int, ...]


def join(heads: Sequence[Any], *, columns: int = COLUMNS) -> Joined:
    """The heads (features, classes) of several tasks as one, its width a multiple of `columns`.

    >>> join([np.ones((4, 3)), np.ones((4, 2))], columns=8).owner.tolist()
    [0, 0, 0, 1, 1, -1, -1, -1]
    """
    widths = [head.shape[1] for head in heads]
    pad = -sum(widths) % columns
    owner = np.repeat([*range(len(heads)), -1], [*widths, pad]).astype(np.int32)
    head = np.concatenate([*map(np.asarray, heads), np.zeros((heads[0].shape[0], pad), np.float32)], 1)
    return Joined(jnp.asarray(head), jnp.asarray(owner), tuple(int(x) for x in np.cumsum([0, *widths[:-1]])))


def together(splits: Sequence[Any], offsets: Sequence[int], *, batches: Sequence[int], seed: int) -> Callable:
    """A feed of batches (inputs, labels, task), `batches[d]` examples of task d, labels counted in the joined head."""
    def feed(start: int = 0) -> Iterator:
        rows = [training.batches(labelled(split), batch=batch, seed=seed, start=start)
                for split, batch in zip(splits, batches, strict=True)]
        task = np.repeat(np.arange(len(batches), dtype=np.int32), batches)
        for parts in zip(*rows, strict=True):
            inputs = jax.tree.map(lambda *xs: np.concatenate(xs), *[part[0] for part in parts])
            labels = np.concatenate([part[1] + offset for part, offset in zip(parts, offsets, strict=True)])
            yield inputs, labels.astype(np.int32), task
    return feed


@functools.cache
def weighted(point: Callable, predict: Callable, *, p: int = 0, strength: float = 0.5,
             view: Callable | None = None) -> Callable:
    """The loss Σ_d weight_d · CE_d of `learn`; its extras are (head, owner, weights).

    p: 1 or 2 adds the penalty of the coefficients, 0 none. view: (key, inputs) -> augmented inputs.
    """
    def loss(params, batch, key, frozen):
        inputs, labels, task = batch
        own, (head, owner, weights) = frozen
        inputs = inputs if view is None else view(key, inputs)
        logits = masked(predict(point(params, own), head, inputs), owner, task)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        counts = jnp.zeros_like(weights).at[task].add(1)
        total = (weights[task] / counts[task] * each).sum()
        return total + penalty(params, p=p, strength=strength) if p else total
    return loss


def masked(logits, owner, task):
    """Logits whose columns of other tasks count as −10⁹, in float32."""
    return jnp.where(owner[None, :] == task[:, None], logits.astype(jnp.float32), -1e9)


def labelled(split: Any) -> tuple:
    """A split as (inputs, labels); ValueError where it is inputs alone, as adaptation takes them.

    >>> labelled((np.ones((2, 3)), np.array([0, 1])))[1].tolist()
    [0, 1]
    """
    labels = np.asarray(split[1]) if isinstance(split, (tuple, list)) and len(split) == 2 else None
    if labels is None or labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError("labels are needed here: a split is (inputs, labels), a whole number for each example; for "
                         "inputs alone there are learning.adaptation and learning.ufm")
    return tuple(split)


def sized(split: Any) -> int:
    """Examples of a split (inputs, labels)."""
    return training.size(tuple(split))


def some(split: Any, rows) -> tuple:
    """The examples `rows` of a split."""
    rows = np.asarray(rows)
    return jax.tree.map(lambda x: np.asarray(x)[rows], tuple(split))


def fraction(split: Any, share: float, *, seed: int) -> tuple:
    """A random share of a split, at least one example.

    >>> fraction((np.arange(10), np.arange(10)), 0.3, seed=0)[1].shape
    (3,)
    """
    if not 0 < share <= 1:
        raise ValueError(f"a share of the data is above 0 and at most 1; got {share}")
    count = sized(split)
    return some(split, np.sort(np.random.default_rng(seed).permutation(count)[:max(1, round(share * count))]))


def tasks_of(heads: Mapping[str, Any], splits: Mapping[str, Any]) -> list[str]:
    """The tasks of a joint course; ValueError where heads and splits are of different tasks."""
    if list(heads) != list(splits):
        raise ValueError(f"heads are of {', '.join(heads)}, splits of {', '.join(splits)}: the same tasks are needed")
    return list(heads)
