"""How many tasks need an entry (arXiv:2405.07813): the agreement profile of TALL-masks, its classes, and Consensus.

α(n) is the share of entries that exactly n of T masks keep. "catastrophic" entries serve no task, "selfish" ones a
single task, "general" ones two or more, "universal" ones (a part of the general) all.
"""
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import tree
from tvjax.compression import bits as packed
from tvjax.compression.codec import per_leaf

CLASSES = ("catastrophic", "selfish", "general", "universal")
BY = ("all", "layer", "kind", "leaf")


def counts(masks) -> dict[str, np.ndarray]:
    """{leaf: (tasks + 1,) numbers of entries that n masks keep, n = 0 … tasks}; one leaf is unpacked at a time."""
    return {name: np.asarray(_histogram(bits), np.int64) for name, bits in packed.flatten(masks).items()}


@jax.jit
def _histogram(bits):
    votes = _votes(bits)
    return jnp.stack([(votes == n).sum() for n in range(bits.packed.shape[0] + 1)])


def _votes(bits):
    """How many tasks keep each entry; the sum over tasks is one loop over the entries."""
    rows = [packed.unpack(bits[t]).astype(jnp.int32) for t in range(bits.packed.shape[0])]
    return functools.reduce(jnp.add, rows)


def profile(masks, *, by: str = "all") -> dict[str, np.ndarray]:
    """{group: (tasks + 1,) shares α(0) … α(T)}, which sum to 1: over the model ("all"), each "layer", "kind" or "leaf".

    >>> masks = packed.stack([{"w": packed.pack(np.array(row))} for row in ([True, False], [True, False])])
    >>> profile(masks)["all"].tolist()
    [0.5, 0.0, 0.5]
    """
    if by not in BY:
        raise ValueError(f"no grouping {by!r}; {tree.did_you_mean(by, BY)}")
    group = {"all": lambda name: "all", "layer": tree.layer, "kind": kind, "leaf": lambda name: name}[by]
    sums: dict[str, Any] = {}
    for name, found in counts(masks).items():
        sums[group(name)] = sums.get(group(name), 0) + found
    return {name: found / max(found.sum(), 1) for name, found in sums.items()}


def kind(name: str) -> str:
    """What a leaf is, whatever its layer: its name without the path to its numbered block.

    >>> kind("vision_model.encoder.layers.3.mlp.fc1.weight"), kind("vision_model.post_layernorm.bias")
    ('mlp.fc1.weight', 'vision_model.post_layernorm.bias')
    """
    found = tree.block(name)
    return name[len(f"{found[0]}.{found[1]}."):] if found else name


def classes(shares) -> dict[str, float]:
    """The shares of the named classes from α(0) … α(T).

    >>> classes([0.25, 0.5, 0.125, 0.125])
    {'catastrophic': 0.25, 'selfish': 0.5, 'general': 0.25, 'universal': 0.125}
    """
    shares = [float(share) for share in shares]
    single = shares[1] if len(shares) > 1 else 0.0
    return dict(zip(CLASSES, (shares[0], single, sum(shares[2:]), shares[-1]), strict=True))


def consensus_of(merged, masks, *, k: int = 2):
    """The merged vector where at least k masks keep the entry: `merging.needed_by`, from masks made before.

    k = 0 keeps all, more than there are tasks keeps nothing.
    """
    if k < 0:
        raise ValueError(f"k counts tasks: it is 0 or more; got {k}")
    return per_leaf(lambda x, bits: _kept(x, bits, k), merged, masks)


@jax.jit
def _kept(x, bits, k):
    return jnp.where(_votes(bits) >= k, x, jnp.zeros_like(x))


def overlaps(masks) -> np.ndarray:
    """(tasks, tasks) intersection over union of the masks; two empty masks are equal, 1."""
    both = either = 0
    for bits in packed.flatten(masks).values():
        one, any_ = _pairs(bits)
        both, either = both + np.asarray(one, np.int64), either + np.asarray(any_, np.int64)
    return np.where(either == 0, 1.0, both / np.maximum(either, 1))


@jax.jit
def _pairs(bits):
    """Numbers of entries in both and in either of all pairs of masks, counted in the packed bytes."""
    bytes_ = bits.packed
    count = lambda rows: jax.lax.population_count(rows).astype(jnp.int32).sum(-1)
    one = lambda row: (count(row[None] & bytes_), count(row[None] | bytes_))
    return jax.lax.map(one, bytes_)
