"""Runs operators: checks what came in, then picks the engine (`traced` under transformations and on accelerators,
`streamed` otherwise).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding

from tvjax import tree
from tvjax.merging import plan, sources, streamed, traced
from tvjax.merging.lowrank import is_low_rank
from tvjax.merging.operator import Operator


def run(operator: Operator, taus: Any, *, tasks: Sequence[str] | None = None, **data) -> Any:
    """The result of an operator on task vectors: a tree like one of them, or like the stack if nothing reduces over
    tasks.

    taus: a stack (leaves (tasks, ...)) or a list of task vectors. tasks: their names, to which random draws belong
      ("0", "1", … by default).
    data: trees that the operator's stages need, by name.
    """
    if isinstance(taus, Sequence):
        return _run_list(operator, list(taus), tasks, data)
    flat = tree.flatten(taus, is_low_rank)
    _check_stack(flat)
    made = _dispatch(operator, flat, sources.Stacked, tasks, data)
    return tree.rebuild(taus, made, is_low_rank)


def _run_list(operator, taus, tasks, data):
    if not taus:
        raise ValueError("there is nothing to merge: the list of task vectors is empty")
    flats = [tree.flatten(tau, is_low_rank) for tau in taus]
    for i, flat in enumerate(flats[1:], 1):
        if faults := tree.differences(flats[0], flat, names=("the first task vector", f"task vector {i}")):
            raise ValueError(f"task vectors differ: {'; '.join(faults)}")
    _check_float(flats[0])
    if abstract([operator, data, taus]) or not on_host(taus):
        return run(operator, jax.tree.map(_stack, *taus, is_leaf=is_low_rank), tasks=tasks, **data)
    made = _dispatch(operator, flats, sources.Listed, tasks, data)
    return tree.rebuild(taus[0], made, is_low_rank)


def _dispatch(operator, given: Any, source, tasks, data):
    first = given[0] if isinstance(given, list) else given
    count = len(given) if isinstance(given, list) else next(iter(given.values())).shape[0]
    hashes = task_hashes(tasks, count)
    plan.check_low_rank(operator, {name: x.shape[-2:] for name, x in first.items() if is_low_rank(x)})
    data = check_data(operator, data, list(first))
    if abstract([operator, given, data]):
        return traced.run(operator, dict(given), hashes, data)
    if not on_host(given):
        automatic = jax.tree.map(_automatic, (operator, given, hashes, data))
        return _program()(*automatic, mesh=_mesh(automatic[1]))
    return dict(streamed.run(operator, source(given), hashes, data))


def _stack(*xs):
    return xs[0].stacked(xs) if is_low_rank(xs[0]) else jax.numpy.stack(xs)


def _automatic(x):
    """The same array with its mesh's axes in automatic mode, where sorts and decompositions of sharded leaves are the
    compiler's affair.
    """
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    devices: Any = sharding.mesh.devices
    mesh = Mesh(devices, sharding.mesh.axis_names)
    return jax.device_put(x, NamedSharding(mesh, sharding.spec))


@functools.cache
def _program():
    return jax.jit(traced.run, static_argnames="mesh")


def _mesh(given: Any) -> Mesh | None:
    """The mesh of several devices on which the leaves lie, None for one device."""
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(given)]
    meshes = [one.mesh for one in shardings if isinstance(one, NamedSharding) and isinstance(one.mesh, Mesh)]
    return meshes[0] if meshes and meshes[0].size > 1 else None


def task_hashes(tasks: Sequence[str] | None, count: int) -> np.ndarray:
    """(tasks,) hashes of the tasks' names."""
    tasks = [str(i) for i in range(count)] if tasks is None else list(tasks)
    if len(tasks) != count:
        raise ValueError(f"there are {count} task vectors but {len(tasks)} names of tasks: {', '.join(tasks)}")
    return np.array([plan.hashed(task) for task in tasks], np.uint32)


def abstract(tree_: Any) -> bool:
    """Whether a transformation of JAX is at work on any leaf."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree_))


def on_host(tree_: Any) -> bool:
    """Whether all leaves lie in this machine's own memory."""
    return all(
        not isinstance(x, jax.Array) or (len(x.devices()) == 1 and next(iter(x.devices())).platform == "cpu")
        for x in jax.tree.leaves(tree_)
    )


def _check_stack(flat: Mapping[str, Any]) -> None:
    if not flat:
        raise ValueError("there is nothing to merge: the tree has no leaves")
    _check_float(flat)
    tasks = {x.shape[0] if len(x.shape) else None for x in flat.values()}
    if len(tasks) != 1 or None in tasks:
        raise ValueError(
            f"every leaf of a stack has the same leading axis of tasks; found {sorted(map(str, tasks))} "
            "(a list of task vectors is accepted too)"
        )


def _check_float(flat: Mapping[str, Any]) -> None:
    bad = [name for name, x in flat.items() if not (is_low_rank(x) or tree.is_float(x))]
    if bad:
        raise ValueError(
            f"task vectors hold floating-point arrays only; not so: {tree.listing(bad)} "
            "(task_vector leaves such leaves out)"
        )


def check_data(operator: Operator, data: Mapping[str, Any], names: list[str]) -> dict[str, dict]:
    """The trees of data by leaf; all that the operator needs must be there, for each leaf that needs it."""
    wanted = plan.wanted(operator)
    if missing := sorted(wanted - set(data)):
        raise ValueError(f"this operator needs {', '.join(missing)}: call it as operator(taus, {missing[0]}=tree)")
    if unknown := sorted(set(data) - wanted):
        raise ValueError(
            f"this operator takes no {', '.join(unknown)}"
            + (f"; it needs {', '.join(sorted(wanted))}" if wanted else "")
        )
    return {name: tree.flatten(given) for name, given in data.items()}
