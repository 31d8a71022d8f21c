"""Which axis of which tensor is split: rules on Hugging Face names, the first that matches counts.

A rule is `pattern=axis,axis,…`, one entry for each axis of the tensor: `model` or `data` splits it over that axis of
the mesh, `-` leaves it whole; nothing after the `=` keeps the tensor on every device.
"""
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from tvjax import tree

AXES = ("data", "model")


def parsed(rules: Sequence[str]) -> tuple[tuple[str, P], ...]:
    """(pattern, spec) of each rule; ValueError for one that is none.

    >>> parsed([r"q_proj.weight=model,-"])[0][1] == P("model", None)
    True
    """
    return tuple(map(_parsed, rules))


def _parsed(rule: str) -> tuple[str, P]:
    pattern, equals, axes = str(rule).rpartition("=")
    if not equals:
        raise ValueError(f"a rule is written pattern=axis,axis, as in q_proj.weight=model,-; got {rule!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the rule {rule!r} is no regular expression: {error}") from None
    names = [name.strip() for name in axes.split(",")] if axes.strip() else []
    if bad := [name for name in names if name not in (*AXES, "-")]:
        raise ValueError(f"the rule {rule!r} splits over {bad[0]!r}; there are data, model and - for none")
    return pattern, P(*[None if name == "-" else name for name in names])


def check(params: Any, layout: Any) -> None:
    """Raises ValueError naming the rules that match no tensor, the tensors that no rule covers, and those that a rule
    cannot split. Without rules nothing can be wrong."""
    shapes = _shapes(params)
    if not layout.rules:
        return
    taken = {name: _first(layout.rules, name) for name in shapes}
    unused = [rule for i, (rule, _) in enumerate(layout.rules) if not any(re.search(rule, name) for name in shapes)]
    if unused:
        near = tree.did_you_mean(unused[0], list(shapes))
        raise ValueError(f"no tensor matches the rule{'s' * (len(unused) > 1)} {', '.join(unused)}; {near}")
    if bare := [name for name, i in taken.items() if i is None]:
        raise ValueError(f"no rule covers {tree.listing(bare)}: add one, or '.*=' as the last, which keeps the rest on "
                         "every device")
    faults = [fault for name, i in taken.items() if i is not None
              for fault in _faults(name, shapes[name], layout.rules[i][1], layout.mesh.shape)]
    if faults:
        raise ValueError(f"a rule cannot split {'; '.join(faults[:3])}" + (" …" if len(faults) > 3 else ""))


def specs(params: Any, layout: Any) -> dict[str, P]:
    """{name: how it is split}. Without rules, each tensor along the longest axis that `model` divides."""
    shapes, sizes = _shapes(params), layout.mesh.shape
    made = {}
    for name, shape in shapes.items():
        i = _first(layout.rules, name)
        spec = layout.rules[i][1] if i is not None else P() if layout.rules else _longest(shape, sizes.get("model", 1))
        made[name] = P() if any(_faults(name, shape, spec, sizes)) else spec
    return made


def _longest(shape: tuple[int, ...], parts: int) -> P:
    fits = [axis for axis, n in enumerate(shape) if parts > 1 and n % parts == 0 and n]
    if not fits or len(shape) < 2:
        return P()
    axis = max(fits, key=lambda axis: shape[axis])
    return P(*[None] * axis, "model")


def _first(rules, name: str) -> int | None:
    return next((i for i, (pattern, _) in enumerate(rules) if re.search(pattern, name)), None)


def _faults(name: str, shape: tuple[int, ...], spec: P, sizes: Mapping[str, int]):
    if len(spec) > len(shape):
        yield f"{name}, which has {len(shape)} axes, by {len(spec)}"
        return
    for axis, over in enumerate(spec):
        parts = sizes.get(over, 1) if over else 1
        if shape[axis] % parts:
            yield f"axis {axis} of {name}, {shape[axis]} long, over {over}={parts}"


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(np.shape(x)) if not isinstance(x, jax.ShapeDtypeStruct) else x.shape
            for name, x in tree.flatten(params).items()}
