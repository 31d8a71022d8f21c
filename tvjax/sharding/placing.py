"""Arrays onto a mesh and back: parameters by the layout's rules, batches cut along their examples, results whole."""
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tvjax import tree
from tvjax.sharding import rules
from tvjax.sharding.meshes import Layout, found, mesh_of


def place(params: Any, layout: Layout | None) -> Any:
    """Parameters on the devices of a layout, by its rules; what lies on its mesh stays where it is.

    Each process puts the parts of its own devices; all are given the same arrays. Without a layout: as they are.
    """
    if layout is None:
        return params
    specs = rules.specs(params, layout)
    return tree.rebuild(params, {name: _put(x, layout, specs[name]) for name, x in tree.flatten(params).items()})


def settled(*trees: Any) -> tuple[list, Layout | None]:
    """(the trees on the devices of their layout, the layout): where they lie, on that of `on`, or on the one device.

    The first tree is placed by the layout's rules, the others' arrays are on every device.
    """
    layout = found(*trees)
    if layout is None:
        return [jax.device_put(one) for one in trees], None
    return [place(trees[0], layout), *(replicate(one, layout) for one in trees[1:])], layout


def replicate(arrays: Any, layout: Layout | None) -> Any:
    """A tree of arrays on every device of a layout."""
    return arrays if layout is None else jax.tree.map(lambda x: _put(x, layout, P()), arrays)


def spread(batch: Any, layout: Layout | None, *, axis: int = 0) -> Any:
    """A batch that every process has whole, cut along `axis` over the devices; each takes its own part of it.

    Raises ValueError where the examples cannot be dealt out evenly.
    """
    if layout is None:
        return batch
    spec = P(*[None] * axis, layout.batch_axes)
    check_batch(jax.tree.leaves(batch)[0].shape[axis], layout)
    return jax.tree.map(lambda x: _put(x, layout, spec), batch)


def spread_local(batch: Any, layout: Layout | None) -> Any:
    """A batch of which each process has its own rows alone (those of `local_rows`), as one array over all devices."""
    if layout is None:
        return batch
    sharding = NamedSharding(layout.mesh, P(layout.batch_axes))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), batch)


def local_rows(batch: int, layout: Layout | None) -> tuple[int, int]:
    """The rows start:stop of a global batch that this process reads."""
    if layout is None:
        return 0, batch
    check_batch(batch, layout)
    there = NamedSharding(layout.mesh, P(layout.batch_axes)).addressable_devices_indices_map((batch,))
    parts = [index[0].indices(batch) for index in there.values() if index]
    return min(first for first, _, _ in parts), max(stop for _, stop, _ in parts)


def check_batch(batch: int, layout: Layout | None, what: str = "a batch") -> None:
    """Raises ValueError where the devices do not divide a batch."""
    if layout is not None and batch % layout.data:
        raise ValueError(f"{what} of {batch} examples cannot be cut into {layout.data} equal parts (mesh.data): choose "
                         f"a multiple of {layout.data}")


def whole(arrays: Any) -> Any:
    """The same arrays where each process can read them: parts that others hold are gathered."""
    flat, structure = jax.tree.flatten(arrays)
    far = [i for i, x in enumerate(flat) if isinstance(x, jax.Array) and not x.is_fully_addressable
           and not x.is_fully_replicated]
    if far:
        everywhere = NamedSharding(flat[far[0]].sharding.mesh, P())
        gathered = jax.jit(_same, out_shardings=everywhere)([flat[i] for i in far])
        for i, x in zip(far, gathered, strict=True):
            flat[i] = x
    return jax.tree.unflatten(structure, flat)


def host(arrays: Any) -> Any:
    """The arrays on this process's host."""
    return jax.device_get(whole(arrays))


def _same(x):
    return x


def _put(x: Any, layout: Layout, spec: P) -> Any:
    if isinstance(x, bool | int | float) or mesh_of(x) == layout.mesh:
        return x
    if _is_key(x):
        return x
    sharding = NamedSharding(layout.mesh, spec)
    if len(layout.processes) == 1:
        return jax.device_put(x, sharding)
    held = np.asarray(x)  # no comparison between processes, no copy of what other processes hold
    return jax.make_array_from_callback(held.shape, sharding, lambda index: held[index])


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def constrain(arrays: Any, shardings: tuple | None, rest: NamedSharding | None = None) -> Any:
    """Inside `jit`: leaves kept where `shardings` say, one for each; or all at `rest`."""
    if rest is not None:
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rest), arrays)
    if shardings is None:
        return arrays
    flat, structure = jax.tree.flatten(arrays)
    kept = [jax.lax.with_sharding_constraint(x, s) for x, s in zip(flat, shardings, strict=True)]
    return jax.tree.unflatten(structure, kept)

