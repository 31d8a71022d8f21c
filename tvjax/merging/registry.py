"""Methods by name, as configurations call them, with their hyper-parameters checked before anything is computed."""
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tvjax import tree
from tvjax.merging.averaging import average, task_arithmetic
from tvjax.merging.masks import consensus
from tvjax.merging.operator import Operator
from tvjax.merging.signs import ties
from tvjax.merging.spectral import iso_c, tsv_m

METHODS: dict[str, Callable[..., Operator]] = {
    "average": average,
    "task_arithmetic": task_arithmetic,
    "ties": ties,
    "consensus": consensus,
    "tsv_m": tsv_m,
    "iso_c": iso_c,
}


def build(name: str, options: Mapping[str, Any] | None = None) -> Operator:
    """The operator of a method by name; a slip in the name or in an option is answered by what there is.

    >>> build("ties", {"density": 0.1})
    top(share=0.1) | agree_majority() | nonzero_mean() | scale(by=1.0)
    """
    if name not in METHODS:
        raise ValueError(f"no merge called {name!r}; {tree.did_you_mean(name, sorted(METHODS))}")
    known = list(inspect.signature(METHODS[name]).parameters)
    if unknown := [option for option in (options or {}) if option not in known]:
        raise ValueError(f"{name} takes {', '.join(known) or 'no options'}; got {', '.join(unknown)}; {tree.did_you_mean(unknown[0], known)}")
    return METHODS[name](**(options or {}))
