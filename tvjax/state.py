"""The state of a training run, saved every so often so that the run can go on: any tree of arrays, keys and numbers.

Orbax writes it, a folder a step, and keeps the last two. Leaves are stored by dotted name, so optimizer states (named
tuples) need no registration; the caller's example gives the structure back.
"""
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tvjax import tree

KEPT = 2


def save_state(state: Any, directory: str | os.PathLike, step: int) -> None:
    """Writes `state` as step `step` below `directory`, atomically, and lets go of all but the last two steps there.

    Leaves are arrays, typed PRNG keys, numbers or flags. A step may be written again, but none before the latest.
    """
    latest = latest_step(directory)
    if latest is not None and step < latest:
        raise ValueError(f"{directory} already holds step {latest}; step {step} would come before it.")
    stored = {name: _stored(name, leaf) for name, leaf in tree.flatten(state).items()}
    with _checkpointer(directory) as checkpointer:
        checkpointer.save(step, stored, force=True, overwrite=step == latest)


def latest_step(directory: str | os.PathLike) -> int | None:
    """The last step saved below `directory`, None if there is none."""
    if not Path(directory).is_dir():
        return None
    with _checkpointer(directory) as checkpointer:
        return None if checkpointer.latest is None else checkpointer.latest.step


def restore_state(example: Any, directory: str | os.PathLike, step: int | None = None) -> Any:
    """The state saved as `step` (the latest by default), in the structure, types and shardings of `example`.

    `example` is a freshly initialised state, or one of `jax.ShapeDtypeStruct` for its arrays.
    """
    wanted = latest_step(directory) if step is None else step
    if wanted is None:
        raise ValueError(f"{directory} holds no saved state.")
    flat = tree.flatten(example)
    with _checkpointer(directory) as checkpointer:
        steps = [found.step for found in checkpointer.checkpoints]
        if wanted not in steps:
            there = ", ".join(map(str, sorted(steps))) or "none"
            raise ValueError(f"{directory} holds no step {wanted}; there are {there}.")
        abstract = {name: _abstract(_stored(name, leaf)) for name, leaf in flat.items()}
        faults = tree.differences(_shapes(checkpointer.metadata(wanted).metadata), _shapes(abstract),
                                  names=("the saved state", "yours"), dtypes=False)
        if faults:
            raise ValueError(f"The state in {directory} doesn't fit yours: {'; '.join(faults)}.")
        loaded = checkpointer.load(wanted, abstract)
    return tree.rebuild(example, {name: _restored(leaf, loaded[name]) for name, leaf in flat.items()})


def _checkpointer(directory: str | os.PathLike) -> Any:
    from orbax.checkpoint import v1 as ocp

    policy: Any = ocp.training.preservation_policies.LatestN(KEPT)
    return ocp.training.Checkpointer(str(Path(directory).absolute()), preservation_policy=policy)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _stored(name: str, leaf: Any) -> Any:
    """The leaf as orbax takes it: key data for keys, 0 or 1 for flags, arrays for numpy's scalars."""
    if _is_key(leaf):
        abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        return jax.eval_shape(jax.random.key_data, leaf) if abstract else jax.random.key_data(leaf)
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    if isinstance(leaf, bool):
        return int(leaf)
    if not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct, int, float)):
        raise ValueError(f"{name} is a {type(leaf).__name__}; a training state holds arrays, keys and numbers.")
    return leaf


def _abstract(leaf: Any) -> Any:
    """What orbax needs to know of a leaf to load it: for JAX arrays shape, dtype and sharding."""
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _shapes(flat: dict[str, Any]) -> dict[str, Any]:
    return {name: np.broadcast_to(np.zeros(()), getattr(leaf, "shape", ())) for name, leaf in flat.items()}


def _restored(example: Any, leaf: Any) -> Any:
    if _is_key(example):
        return jax.random.wrap_key_data(leaf, impl=_key_impl(example))
    if isinstance(example, np.generic):
        return leaf[()]
    return bool(leaf) if isinstance(example, bool) else leaf


def _key_impl(key: Any) -> Any:
    """The name of a key's generator, by tracing: `key_impl` itself refuses a ShapeDtypeStruct."""
    found: list = []
    jax.eval_shape(lambda k: found.append(jax.random.key_impl(k)), key)
    return found[0]
