"""The state of a training run, saved every so often so that the run can go on: any tree of arrays, keys and numbers.

Orbax writes it, a folder a step, and keeps the last two. Leaves are stored by dotted name, so optimizer states (named
tuples) need no registration; the caller's example gives the structure back.
"""
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tvjax import tree

KEPT = 2


def save_state(state: Any, directory: str | os.PathLike, step: int) -> None:
    """Writes `state` as step `step` below `directory`, atomically, and lets go of all but the last two steps there.

    Of several processes all write a state that lies on devices of all, and each its own otherwise.
    Leaves are arrays, typed PRNG keys, numbers or flags. A step may be written again, but none before the latest.
    """
    latest = latest_step(directory)
    if latest is not None and step < latest:
        raise ValueError(f"{directory} already holds step {latest}; step {step} would come before it.")
    stored = {name: _stored(name, leaf) for name, leaf in tree.flatten(state).items()}
    with _checkpointer(directory, state) as checkpointer:
        checkpointer.save(step, stored, force=True, overwrite=step == latest)


def latest_step(directory: str | os.PathLike) -> int | None:
    """The last step saved below `directory`, None if there is none."""
    if not Path(directory).is_dir():
        return None
    if jax.process_count() > 1:  # Orbax would wait for all processes here
        whole = (path.name for path in Path(directory).iterdir() if any(path.glob("_CHECKPOINT*")))
        own = (path.stem for path in Path(directory).glob("*.safetensors"))
        return max((int(name) for name in (*whole, *own) if name.isdigit()), default=None)
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
    with _checkpointer(directory, example) as checkpointer:
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


@contextlib.contextmanager
def _checkpointer(directory: str | os.PathLike, state: Any = None) -> Iterator[Any]:
    from orbax.checkpoint import v1 as ocp

    own = jax.process_count() > 1 and not _shared(state)
    policy: Any = ocp.training.preservation_policies.LatestN(KEPT)
    opened = _Own(Path(directory).absolute()) if own else ocp.training.Checkpointer(
        str(Path(directory).absolute()), preservation_policy=policy)
    with contextlib.closing(opened):
        yield opened


class _Own:
    """The state of one process of several, which waits for no other: a safetensors file a step, whole or not there.

    Orbax writes arrays that lie on one process's devices on process 0 alone, or not at all.
    """

    def __init__(self, directory: Path):
        self.directory, self.process = directory, jax.process_index()

    @property
    def checkpoints(self) -> list["_Step"]:
        return sorted(_Step(int(path.stem)) for path in self.directory.glob("*.safetensors") if path.stem.isdigit())

    @property
    def latest(self) -> "_Step | None":
        return max(self.checkpoints, default=None)

    def _file(self, step: int) -> Path:
        return self.directory / f"{step}.safetensors"

    def save(self, step: int, stored: dict[str, Any], *, force: bool, overwrite: bool) -> None:
        del force, overwrite  # a file is replaced
        from safetensors.numpy import save_file

        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.directory / f".{step}.{self.process}"
        save_file({name: np.array(x) for name, x in jax.device_get(stored).items()}, partial)
        os.replace(partial, self._file(step))
        for old in self.checkpoints[:-KEPT]:
            self._file(old.step).unlink()

    def metadata(self, step: int) -> Any:
        return _Metadata(self._held(step))

    def load(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        return {name: _like(abstract[name], x) for name, x in self._held(step).items()}

    def _held(self, step: int) -> dict[str, np.ndarray]:
        from safetensors.numpy import load_file

        return load_file(self._file(step))

    def close(self) -> None:
        pass


def _like(example: Any, x: np.ndarray) -> Any:
    """A loaded array where and as what the example is."""
    if isinstance(example, jax.ShapeDtypeStruct):
        return jax.device_put(x, example.sharding)
    return type(example)(x) if isinstance(example, int | float) else x


class _Step(NamedTuple):
    step: int


class _Metadata(NamedTuple):
    metadata: Any


def _shared(state: Any) -> bool:
    """Whether any leaf lies on devices of other processes too."""
    placed = [getattr(x, "sharding", None) for x in jax.tree.leaves(state)]
    return any(where is not None and not where.is_fully_addressable for where in placed)


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
