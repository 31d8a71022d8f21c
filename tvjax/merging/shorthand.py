"""How configurations write numbers that vary: plain dicts and lists for `by_name`, `by_depth`, `tasks` and `exclude`.

| written                                             | means                                                        |
| --------------------------------------------------- | ------------------------------------------------------------ |
| `0.3`                                               | the same everywhere                                          |
| `{"self_attn": 0.3, "bias$": 0.0, "default": 0.1}`  | by name: the first pattern that the leaf's name contains     |
| `[0.0, 0.3, 1.0]`                                   | a gradient: anchors from the first block to the last         |
| `{"depth": [0.0, 1.0], "outside": 0.5}`             | a gradient, and the number outside of blocks                 |
| `{"tasks": [0.2, 0.5]}`                             | one number (or gradient, or dict) for each task              |

For options that hold one number for each task anyway (`weights`, `lam`), a plain list is that. All of it nests.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tvjax.merging.numbers import ByDepth, ByName, ByTask, by_depth, by_name, by_task

PER_TASK = ("weights", "lam")
RESERVED = ("default", "depth", "outside", "tasks", "name")  # words of dicts of numbers


def number(option: str, value: Any) -> Any:
    """The value of an option with its dicts and lists turned into rules; all else as it is.

    >>> number("density", {"self_attn": 0.3, "default": 0.1})
    ByName(values=(0.3,), default=0.1, patterns=('self_attn',))
    """
    if isinstance(value, Mapping):
        return _from_dict(option, value)
    if isinstance(value, list | tuple) and value:
        return _from_list(option, value)
    return value


def _from_list(option, value):
    if option in PER_TASK:
        return _tasks(option, value)
    if any(isinstance(part, Mapping | Sequence) for part in value):
        return value  # nothing that varies by depth: names, say
    return by_depth(list(value))


def _from_dict(option, value):
    keys = set(value)
    if keys and keys <= {"depth", "outside"}:
        if "depth" not in keys:
            raise ValueError(f"{option} gives a number outside of blocks but none in them; add 'depth': [...]")
        return by_depth(list(value["depth"]), outside=value.get("outside"))
    if keys == {"tasks"}:
        return _tasks(option, value["tasks"])
    if "default" not in keys:
        raise ValueError(f"{option} by name needs a 'default' for the other leaves; got {', '.join(map(str, value))}")
    rules = {pattern: number(option, part) for pattern, part in value.items() if pattern != "default"}
    return by_name(rules, default=number(option, value["default"]))


def _tasks(option, value):
    if any(isinstance(part, Mapping | list | tuple) for part in value):
        return by_task([number("", part) for part in value])
    return np.asarray(value, np.float64)


def spelt(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a file holds them: rules as what `number` reads.

    >>> spelt({"density": by_depth([0.0, 1.0])})
    {'density': {'depth': [0.0, 1.0], 'outside': 0.0}}
    """
    return {name: _spelt(value) for name, value in options.items()}


def _spelt(value: Any) -> Any:
    if isinstance(value, ByDepth):
        return {"depth": [float(x) for x in value.anchors], "outside": _spelt(value.outside)}
    if isinstance(value, ByName):
        rules = zip(value.patterns, map(_spelt, value.values), strict=True)
        return {f"({name})" if name in RESERVED else name: one for name, one in rules} | {
            "default": _spelt(value.default)}
    if isinstance(value, ByTask):
        return {"tasks": [_spelt(one) for one in value.values]}
    if isinstance(value, np.ndarray) and value.ndim:
        return {"tasks": value.tolist()}
    return spelt(value) if isinstance(value, Mapping) else value
