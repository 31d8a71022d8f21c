"""A codec keeps task vectors in few bits: what all tasks share, and a small part of each task's own.

encode: τ_1 … τ_T → State(shared, (own_1, …, own_T)); decode: (state, task) → τ̂_task. Every number of bits is counted
from the state itself, indices, scales and signs included, and written as it is counted.
"""
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tvjax import checkpoints, tree
from tvjax.compression.bits import is_packed


class State(NamedTuple):
    """What is stored. `shared` belongs to all tasks (None where they share nothing), `tasks` holds each one's part."""

    shared: Any
    tasks: tuple


@dataclasses.dataclass(frozen=True)
class Codec:
    """Three functions over trees; `restore` may run inside `jit`.

    share: (taus) -> shared. one: (shared, tau, index) -> own, the part of task `index`. restore: (shared, own) -> τ̂.
    projects: whether encoding again what was restored changes nothing.
    """

    name: str
    share: Callable
    one: Callable
    restore: Callable
    projects: bool = True

    def encode(self, taus: Sequence[Any]) -> State:
        """The state of a list of task vectors."""
        if not taus:
            raise ValueError("there is nothing to encode: the list of task vectors is empty")
        for i, tau in enumerate(taus[1:], 1):
            tree.check_same(taus[0], tau, names=("the first task vector", f"task vector {i}"))
        shared = self.share(list(taus))
        return State(shared, tuple(self.one(shared, tau, i) for i, tau in enumerate(taus)))

    def decode(self, state: State, task: int):
        """The task vector of the task with this number, in the structure of what was encoded."""
        if not 0 <= task < len(state.tasks):
            raise ValueError(f"there are {len(state.tasks)} tasks, numbered from 0; got {task}")
        own = state.tasks[task]
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((state.shared, own))):
            return _compiled(self.restore)(state.shared, own)
        return self.restore(state.shared, own)  # numpy's, whose sizes differ from task to task

    def add(self, state: State, tau) -> State:
        """The state with one more task; what the tasks share stays as it is."""
        return State(state.shared, (*state.tasks, self.one(state.shared, tau, len(state.tasks))))


@functools.cache
def _compiled(restore: Callable) -> Callable:
    return jax.jit(restore)


def nothing(taus) -> None:
    """What tasks share where each is encoded on its own."""


def count_bits(state: Any) -> int:
    """How many bits a state (or a part of one) holds: masks 1, codes their width, floats 32 or what they have."""
    return sum(leaf.information if is_packed(leaf) else 8 * np.asarray(leaf).nbytes for leaf in _leaves(state))


def stored_bytes(state: Any) -> int:
    """How many bytes its arrays take, the last byte of each packed one filled up."""
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(state))


def _leaves(state) -> list:
    return jax.tree.leaves(state, is_leaf=is_packed)


def write(state: Any, path: str | os.PathLike) -> int:
    """Writes all arrays of a state to one safetensors file and returns the file's bytes."""
    checkpoints.save(tree.unflatten(tree.flatten(state)), path, max_shard_size="1000GB")
    return os.path.getsize(path)


def per_leaf(f: Callable, first: Any, *others: Any) -> Any:
    """f(leaf, …) for all leaves by name, in the structure of `first`; packed leaves and codecs' nodes are whole."""
    flats = [tree.flatten(other, is_node) for other in (first, *others)]
    return tree.rebuild(first, {name: f(*[flat[name] for flat in flats]) for name in flats[0]}, is_node)


def is_node(x: Any) -> bool:
    """Whether a node of a state stands for one leaf of a task vector."""
    return is_packed(x) or hasattr(x, "restored")


def restored(own: Any) -> Any:
    """The tree of arrays that a tree of a codec's nodes stands for."""
    return per_leaf(lambda node: node.restored() if hasattr(node, "restored") else node, own)
