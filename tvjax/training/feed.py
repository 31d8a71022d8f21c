"""Batches in an order that depends on the seed and the step alone: a run can be entered at any step without a replay.

The order is an endless row of permutations, one an epoch, each drawn from (seed, epoch). Batch s takes the entries
s·batch … (s + 1)·batch − 1 of that row: all batches are full and no example is left out.
"""
import functools
import itertools

import jax
import numpy as np

from tvjax import sharding


def size(split):
    """The number of examples in `split`, a tree of arrays with one leading axis; a ValueError where they disagree.

    >>> size((np.zeros((3, 2)), np.zeros(3)))
    3
    """
    sizes = {x.shape[0] if x.ndim else 0 for x in jax.tree.leaves(split)}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"a split needs arrays with one common, non-zero number of examples; got {sorted(sizes)}")
    return sizes.pop()


@functools.lru_cache(maxsize=2)
def _permutation(examples, seed, epoch):
    return np.random.default_rng((seed, epoch)).permutation(examples)


def order(start, stop, *, examples, seed):
    """Entries start … stop − 1 of the endless row of permutations.

    >>> sorted(order(4, 8, examples=4, seed=0).tolist())
    [0, 1, 2, 3]
    """
    epochs = range(start // examples, (stop - 1) // examples + 1)
    row = np.concatenate([_permutation(examples, seed, epoch) for epoch in epochs])
    return row[start - epochs[0] * examples:stop - epochs[0] * examples]


def batches(split, *, batch, seed=0, start=0, steps=None, rows=None):
    """Yields batches of `split` on the host from step `start` to step `steps` (for ever, when None).

    `split` is a tree of numpy arrays with examples first, for instance the pair (images, labels); each batch has its
    structure. The batches of start=k are those of start=0 from the k-th on.
    rows: (first, stop), the rows of each batch that are wanted, where other processes take the others.

    >>> x = np.arange(5)
    >>> first, second = batches(x, batch=5, steps=2)
    >>> bool((first != second).any()), np.array_equal(second, next(batches(x, batch=5, start=1)))
    (True, True)
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1; got batch={batch}")
    examples = size(split)
    for step in itertools.count(start) if steps is None else range(start, steps):
        chosen = order(step * batch, (step + 1) * batch, examples=examples, seed=seed)[slice(*rows or (None,))]
        yield jax.tree.map(lambda x, chosen=chosen: x[chosen], split)


def recipe_batches(split, recipe):
    """A feed for `fit`, whose `place` is then `own_rows`: the recipe's batches, of processes that share a mesh each
    one's own rows of them."""
    rows = sharding.local_rows(recipe.batch, sharding.found())
    return functools.partial(batches, split, batch=recipe.batch, seed=recipe.seed, rows=rows)


def own_rows(batch):
    """What `recipe_batches` gives on the devices: one batch of the rows of all processes."""
    return sharding.spread_local(batch, sharding.found())
