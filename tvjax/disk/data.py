"""Data that an operator needs beside checkpoints, from files: gradients, Fisher diagonals, Gram matrices of all tasks.

Each is a .safetensors file (or a folder of them) of stacks, (tasks, …) for each tensor; one that names its tasks, as
`calibration.exemplars.save_stack` writes it, is put into the order of the models.
"""
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tvjax import checkpoints, tree


def read(text: str, tasks: Sequence[str]) -> dict[str, Any]:
    """{name: tree} of `name=file` pairs joined by commas, "" for none; tasks: the models' names, in their order.

    >>> read("", ["a", "b"])
    {}
    """
    found = {}
    for pair in filter(None, text.split(",")):
        name, equals, path = pair.partition("=")
        if not equals or not name or not path:
            raise ValueError(f"data is written name=file, as in gradients=gradients.safetensors; got {pair!r}")
        found[name] = _ordered(checkpoints.load(path), path, tasks)
    return found


def _ordered(held: checkpoints.Checkpoint, path: str, tasks: Sequence[str]) -> Any:
    wrong = [name for name, x in tree.flatten(held.params).items() if np.ndim(x) == 0 or len(x) != len(tasks)]
    if wrong:
        raise ValueError(f"{path} holds a stack of another number of tasks than the {len(tasks)} models: "
                         f"{tree.listing(wrong)}")
    named = held.metadata.get("tasks", "").split(",")
    if sorted(named) != sorted(tasks):
        return held.params  # in the order of the models, as far as one can tell
    order = np.array([named.index(task) for task in tasks])
    return jax.tree.map(lambda x: x[order], held.params)
