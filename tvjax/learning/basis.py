"""Random directions in place of task vectors: the intrinsic-dimension baseline (Li et al., 2018, arXiv:1804.08838).

Each tensor of each direction is drawn from a normal distribution with the mean and the standard deviation of the
pretrained tensor's entries, as in arXiv:2407.02880 (figure 6).
"""
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from tvjax import tree, vectors


def random_vectors(theta0: Any, count: int, *, seed: int) -> list[dict]:
    """`count` random vectors shaped as θ0; vector i is the same however many are drawn.

    >>> random_vectors({"w": jnp.full((2, 2), 3.0)}, 1, seed=0)[0]["w"].tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    if count < 1:
        raise ValueError(f"at least one random vector is needed; got {count}")
    flat = tree.flatten(vectors.floats(theta0))

    def one(i):
        key = jax.random.fold_in(jax.random.key(seed), i)
        return tree.unflatten({name: _like(x, jax.random.fold_in(key, zlib.crc32(name.encode())))
                               for name, x in flat.items()})
    return [one(i) for i in range(count)]


def _like(x, key):
    x = vectors.wide(x)
    return x.mean() + x.std() * jax.random.normal(key, x.shape, jnp.float32)
