"""Entries of checkpoints that are not finite: which, where, and what they do to a merge."""
from collections.abc import Callable
from typing import Any

import numpy as np

from tvjax.disk.deltas import BLOCK
from tvjax.merging import plan


def check(task: Any) -> Callable[[Any, plan.Leaf], None]:
    """The engine's check of a `drive.Task`: names the model, the tensor and the first entry that is not finite."""

    def refuse(finite, leaf: plan.Leaf) -> None:
        if not task.allow_nonfinite and not finite:
            raise ValueError(culprit(task, leaf.name))

    return refuse


def culprit(task: Any, name: str) -> str:
    """The sentence for a tensor of the base in which something is not finite."""
    every = [("the base", task.base, name)]
    for (label, model), places in zip(task.models.items(), task.source.places, strict=True):
        every.append((label, model, places[name].name))
    for label, model, theirs in every:
        info = model.tensors[theirs]
        for start in range(0, info.size, BLOCK):
            x = model.read(theirs, start, min(start + BLOCK, info.size))
            if (bad := np.flatnonzero(~np.isfinite(x))).size:
                at = int(bad[0])
                return (f"{entry(theirs, start + at, info.shape)} of {label} is {float(x[at]):g}; a merge would "
                        "spread it (allow_nonfinite merges all the same)")
    return f"{name}: the differences between models and base are more than float32 holds"


def entry(name: str, at: int, shape: tuple[int, ...]) -> str:
    """A tensor's name with the indices of its flat entry `at`."""
    return f"{name}{[int(i) for i in np.unravel_index(at, shape)]}" if shape else name
