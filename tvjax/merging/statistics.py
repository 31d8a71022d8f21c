"""The whole-model numbers that a stage may declare. An engine computes them, over the whole model, each layer or each
leaf (`scope`).

Exact order statistics come without a sort (31 counting passes over the float bits when traced; a sampled bracket and
one pass otherwise), and sums are additive over entries, so that every statistic can be folded over chunks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tvjax import tree

SCOPES = ("global", "layer", "leaf")


def static(**kwargs):
    return dataclasses.field(metadata=dict(static=True), **kwargs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kth:
    """Per task, the k-th largest `score(x)`, k = ⌊share · entries⌋ + extra, at least 1 and at most the number of
    entries; (tasks,).

    cuts: whether the stage asks no more of it than on which side of it a score lies (≥ or <), as a trim does.
    """

    share: Any
    score: Callable = static(default=jnp.abs)
    scope: str = static(default="global")
    extra: int = static(default=0)
    cuts: bool = static(default=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """The sum of `f(x)` over all chunks of all leaves; f is additive over entries, 0 for entries that are zero in all
    tasks, and of any fixed shape.
    """

    f: Callable = static()
    scope: str = static(default="global")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Greatest:
    """Per task, the greatest `score(x)`; (tasks,)."""

    score: Callable = static(default=jnp.abs)
    scope: str = static(default="global")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Least:
    """Per task, the least `score(x)`; (tasks,)."""

    score: Callable = static(default=jnp.abs)
    scope: str = static(default="global")


def group(scope: str, name: str) -> str:
    """The group of leaves over which a statistic of this scope is taken for the leaf `name`."""
    return {"global": lambda: "", "layer": lambda: tree.layer(name), "leaf": lambda: name}[scope]()


def check_scope(scope: str) -> str:
    if scope not in SCOPES:
        raise ValueError(f"no scope {scope!r}; {tree.did_you_mean(str(scope), SCOPES)} (there are {', '.join(SCOPES)})")
    return scope
