"""Random numbers that belong to an entry: keyed by seed, leaf name, task name and the entry's place, never by order,
device or chunking.
"""

import jax
import jax.numpy as jnp

BLOCK = 1024


def uniform(seed, name, tasks, start, shape, dtype):
    """Uniform numbers in [0, 1) for the entries from `start` on of one leaf, of `shape` (tasks, ...).

    seed: an integer or a key. name, tasks: hashes (a scalar and (tasks,)). start: a multiple of 1024, so that pieces
      of a leaf draw what the
    whole would.
    """
    key = jax.random.fold_in(_key(seed), name)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.asarray(tasks))
    count = 1
    for n in shape[1:]:
        count *= n
    blocks = jnp.asarray(start, jnp.uint32) // BLOCK + jnp.arange(-(-count // BLOCK), dtype=jnp.uint32)
    draw = lambda task, block: jax.random.uniform(jax.random.fold_in(task, block), (BLOCK,), dtype)
    drawn = jax.vmap(lambda task: jax.vmap(lambda block: draw(task, block))(blocks))(keys)
    return drawn.reshape(len(keys), -1)[:, :count].reshape(shape)


def _key(seed):
    if hasattr(seed, "dtype") and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return seed
    return jax.random.key(seed)
