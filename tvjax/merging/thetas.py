"""From models to a model: θ0 + operator(θ_1 − θ0, …, θ_T − θ0) without ever holding the task vectors."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tvjax import tree, vectors
from tvjax.merging import engine, streamed
from tvjax.merging.operator import Operator
from tvjax.merging.sources import Listed


def merge(operator: Operator, thetas: Sequence[Any], theta0: Any, *, tasks: Sequence[str] | None = None, **data) -> Any:
    """The merged model θ0 + operator(τ_1, …, τ_T), τ_t = θ_t − θ0, in the structure and dtypes of θ0.

    Differences and sums are taken in float32 or wider and rounded once, at the end. Leaves that are not
    floating-point are θ0's own. The operator carries its scale. tasks: names, to which random draws belong. data:
    trees that the operator needs.

    Raises:
      ValueError: naming the leaves in which a model differs from θ0 in name, shape or dtype, or that hold NaN or
        infinite entries.

    >>> from tvjax import merging
    >>> base, one, other = ({"w": np.array([x], np.float32)} for x in (1, 1, 4))
    >>> merge(merging.average(), [one, other], base)["w"].tolist()
    [2.5]
    """
    if not thetas:
        raise ValueError("there is nothing to merge: the list of models is empty")
    base = tree.flatten(vectors.floats(theta0))
    flats = [tree.flatten(vectors.floats(theta)) for theta in thetas]
    for i, flat in enumerate(flats):
        if faults := tree.differences(flat, base, names=(f"model {i if tasks is None else tasks[i]}", "theta0")):
            raise ValueError(f"model {i if tasks is None else tasks[i]} and theta0 differ: {'; '.join(faults)}")
    moved = dict(steps(operator, flats, base, tasks, data))
    return tree.rebuild(theta0, {**tree.flatten(theta0), **moved})


def steps(operator, flats, base, tasks, data):
    """(name, merged leaf) for all leaves."""
    if engine.abstract([operator, flats, base, data]) or not engine.on_host([flats, base]):
        taus = [{name: vectors.wide(flat[name]) - vectors.wide(x) for name, x in base.items()} for flat in flats]
        merged = operator(taus, tasks=tasks, **data)
        yield from ((name, (vectors.wide(x) + merged[name]).astype(x.dtype)) for name, x in base.items())
        return
    hashes = engine.task_hashes(tasks, len(flats))
    data = engine.check_data(operator, data, list(base))
    for name, delta in streamed.run(operator, Listed(flats, base), hashes, data):
        x = np.asarray(base[name])
        if delta.shape != x.shape:
            raise ValueError(
                f"this operator does not reduce over tasks: {name} came out as {delta.shape}, the model has {x.shape}"
            )
        made = np.add(x, delta, dtype=delta.dtype).astype(x.dtype, copy=False)
        yield name, jax.device_put(made) if isinstance(base[name], jax.Array) else made
