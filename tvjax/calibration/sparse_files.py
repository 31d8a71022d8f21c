"""Sparse task vectors and masks on disk: for every tensor that moved, a bit an entry and the values where it is set.

A tensor that stayed at θ0 takes no bytes beside its name and shape. What is read back has the bits of what was written.
"""
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tvjax import checkpoints, tree
from tvjax.compression import bits
from tvjax.vectors import TaskVector

KIND = "sparse_task_vector"
NOTHING: Mapping[str, str] = {}


def save_sparse(tau: Any, path: str | os.PathLike, *, base: str = "", metadata: Mapping[str, str] = NOTHING) -> None:
    """Writes the entries of τ that are not zero to a .safetensors file; `base` is the hash of the pretrained weights.

    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "tau.safetensors")
    >>> save_sparse({"a": np.array([0.0, 2.0]), "b": np.zeros(3)}, path)
    >>> load_sparse(path)["a"].tolist(), load_sparse(path)["b"].tolist()
    ([0.0, 2.0], [0.0, 0.0, 0.0])
    """
    flat = {name: np.asarray(x) for name, x in tree.flatten(jax.device_get(tau)).items()}
    if strange := [name for name, x in flat.items() if not tree.is_float(x)]:
        raise ValueError(f"a task vector holds floats; not so in {tree.listing(strange)}")
    parts: dict[str, np.ndarray] = {}
    for name, x in flat.items():
        moved = (x != 0) | (np.signbit(x) & (x == 0))  # −0 has bits of its own
        if moved.any():
            parts |= {f"{name}:places": bits.pack(moved).packed, f"{name}:values": x[moved]}
    shapes = {name: [str(x.dtype), *x.shape] for name, x in flat.items()}
    about = {**metadata, "tvjax": KIND, "base": base, "shapes": json.dumps(shapes)}
    checkpoints.save(parts or {"nothing:values": np.zeros(0, np.float32)}, path, metadata=about)


def load_sparse(path: str | os.PathLike) -> TaskVector:
    """The task vector that `save_sparse` wrote, dense, with zeros where nothing moved; ValueError for another file."""
    found = checkpoints.load(path)
    if found.metadata.get("tvjax") != KIND:
        raise ValueError(f"{path} is no sparse task vector; load_task_vector reads the others")
    held = {**tree.flatten(found.params), **found.buffers}
    return TaskVector(tree.unflatten({name: _dense(held, name, *about)
                                      for name, about in json.loads(found.metadata["shapes"]).items()}))


def _dense(held, name, dtype, *shape):
    values = held.get(f"{name}:values")
    if values is None:
        return np.zeros(shape, np.dtype(dtype))
    x = np.zeros(shape, values.dtype)
    x[bits.unpack(bits.Bits(held[f"{name}:places"], tuple(shape)))] = values
    return x


def save_mask(mask: Any, path: str | os.PathLike) -> None:
    """Writes a mask, a bit an entry."""
    flat = {name: np.asarray(x) for name, x in tree.flatten(jax.device_get(mask)).items()}
    shapes = json.dumps({name: x.shape for name, x in flat.items()})
    checkpoints.save({name: bits.pack(x).packed for name, x in flat.items()}, path,
                     metadata={"tvjax": "mask", "shapes": shapes})


def load_mask(path: str | os.PathLike) -> Any:
    """The mask that `save_mask` wrote: nested dicts of boolean arrays.

    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "mask.safetensors")
    >>> save_mask({"a": np.array([True, False, True])}, path)
    >>> load_mask(path)["a"].tolist()
    [True, False, True]
    """
    found = checkpoints.load(path)
    if found.metadata.get("tvjax") != "mask":
        raise ValueError(f"{path} is no mask")
    return tree.unflatten({name: bits.unpack(bits.Bits(found.buffers[name], tuple(shape)))
                           for name, shape in json.loads(found.metadata["shapes"]).items()})
