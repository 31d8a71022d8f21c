"""Operators: how task vectors become one merged vector, as a chain of stages.

A stage *declares* the whole-model statistics that it needs (it never computes them) and has a pure function of one
leaf. Engines compute the statistics and apply the leaf functions: on concrete trees and files in chunks (`streamed`),
inside `jit`, `vmap` and `grad` and on accelerators as one program (`traced`). Operators are closed under `|`, so that
a paper is a sentence:
`top(density=0.2) | agree() | nonzero_mean()`.

Operators are pytrees: their numbers are the leaves. So `jax.jit` compiles an operator once for all values of its
numbers, `jax.vmap` sweeps them, and `jax.grad` differentiates through a merge with respect to the operator itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

NEEDS = ("uniform", "origin", "depth", "tasks")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """One step: `leaf(x, *statistics, **numbers, **options, **needs) -> x`, x being (tasks, ...) before a reduction
    and (...) after it.

    leaf: a pure function, defined at module level (it is compared by identity when programs are looked up).
    numbers: what may be traced, by keyword: scalars, (tasks,) arrays, or rules that vary by leaf (`by_name`,
      `by_depth`, `per_leaf`, `entries`).
    stats: the declared statistics (`Kth`, `Sum`, `Greatest`, `Least`), whose values are passed after x in their order.
    options: what selects code, by keyword; hashable.
    needs: what else the engine passes by keyword: "uniform" (random numbers in [0, 1) shaped as x, from the number
      `seed`), "origin" (the stack that the operator was given), "depth" (the leaf's block over the number of blocks
      less one, 0 outside of blocks), "tasks" (how many), or the name of a tree of data given at the call, such as
      `fisher`.
    entrywise: each entry's result depends on that entry of all tasks alone, and is zero where all are zero: such
      stages run on chunks.
    guards: predicates (name, shape) -> bool; the stage is skipped for leaves where one fails.
    """

    leaf: Callable = dataclasses.field(metadata=dict(static=True))
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    stats: tuple = ()
    options: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), metadata=dict(static=True))
    needs: tuple[str, ...] = dataclasses.field(default=(), metadata=dict(static=True))
    entrywise: bool = dataclasses.field(default=True, metadata=dict(static=True))
    guards: tuple[Callable, ...] = dataclasses.field(default=(), metadata=dict(static=True))

    def holds(self, name: str, shape: tuple[int, ...]) -> bool:
        return all(guard(name, shape) for guard in self.guards)

    def __repr__(self):
        given = {**self.numbers, **dict(self.options)}
        shares = [s.share for s in self.stats if getattr(s, "share", None) is not None]
        given |= {"share": shares[-1]} if shares else {}
        return f"{self.leaf.__name__.strip('_')}({', '.join(f'{k}={v}' for k, v in given.items() if not callable(v))})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """A chain of stages; call it on a stack of task vectors (leaves (tasks, ...)) or a list of task vectors.

    >>> import jax.numpy as jnp
    >>> from tvjax import merging
    >>> (merging.total() | merging.scale(by=0.5))({"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])})["w"].tolist()
    [2.0, 3.0]
    """

    stages: tuple[Stage, ...] = ()

    def __or__(self, other: "Operator") -> "Operator":
        if not isinstance(other, Operator):
            raise ValueError(
                f"an operator is followed by an operator; got {type(other).__name__} "
                "(a method needs its parentheses: mean())"
            )
        return Operator(self.stages + other.stages)

    def __call__(self, taus, *, tasks=None, **data):
        from tvjax.merging import engine

        return engine.run(self, taus, tasks=tasks, **data)

    def __repr__(self):
        return " | ".join(map(repr, self.stages)) or "identity()"


def step(leaf: Callable, *stats, options=(), needs=(), entrywise=True, **numbers) -> Operator:
    """An operator of one stage; keyword arguments not named here are its numbers.

    >>> double = step(lambda x: 2 * x)
    >>> import jax.numpy as jnp
    >>> double({"w": jnp.ones((2, 1))})["w"].tolist()
    [[2.0], [2.0]]
    """
    options = tuple(sorted(dict(options).items()))
    return Operator((Stage(leaf, numbers, tuple(stats), options, tuple(needs), entrywise),))


def identity() -> Operator:
    """The operator that changes nothing."""
    return Operator()


def on(predicate: Callable, then: Operator, otherwise: Operator) -> Operator:
    """Routes leaves: `then` where `predicate(name, shape)` holds, `otherwise` elsewhere; each branch's statistics run
    over its own leaves.

    `shape` is one task's shape. Predicates are hashable callables such as `matrix` and `named("self_attn")`.
    """
    return Operator(_guarded(then, predicate).stages + _guarded(otherwise, Not(predicate)).stages)


def _guarded(operator: Operator, predicate: Callable) -> Operator:
    return Operator(tuple(dataclasses.replace(stage, guards=(predicate, *stage.guards)) for stage in operator.stages))


def matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a leaf is a matrix."""
    return len(shape) == 2


@dataclasses.dataclass(frozen=True)
class named:
    """The predicate that a leaf's name contains the regular expression `pattern`."""

    pattern: str

    def __call__(self, name: str, shape: tuple[int, ...]) -> bool:
        import re

        return re.search(self.pattern, name) is not None


@dataclasses.dataclass(frozen=True)
class Not:
    """The opposite of a predicate."""

    predicate: Callable

    def __call__(self, name: str, shape: tuple[int, ...]) -> bool:
        return not self.predicate(name, shape)


@dataclasses.dataclass(frozen=True)
class Both:
    """Where two predicates hold."""

    first: Callable
    second: Callable

    def __call__(self, name: str, shape: tuple[int, ...]) -> bool:
        return self.first(name, shape) and self.second(name, shape)
