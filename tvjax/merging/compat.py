"""The numbers of other tools: presets that fill an operator's options as they do, and translations of their options.

`build("ties", {"density": 0.3}, compat="mergekit")` is their `ties`; `translate("mergekit", "ties", {...})` reads
theirs. Equal results, entry by entry, are tested against mergekit 0.1.5, FusionBench 0.2.33 and PEFT 0.21.2 on
float32 models.

Documented habits of the tools are reproduced: mergekit takes every statistic by tensor and rescales to the ℓ1 norm
of before a drop; FusionBench's TIES ranks the whole model and keeps one entry more than asked for, its Model Stock
averages angles in degrees; PEFT elects signs before it weighs. What is a plain defect is not (weights that cancel
their divisor, NaN that passes through, a threshold of 100 % that fails, mergekit's `gamma` that does nothing at
density 1): there our operator does what it says.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

from tvjax import tree
from tvjax.merging.numbers import by_name
from tvjax.merging.peers import CONFIGS, NONE, ROWS, Row

TOOLS = (*ROWS, "paper")
FACTOR_A, FACTOR_B = r"lora_(embedding_)?A", r"lora_(embedding_)?B"


def preset(name: str, compat: str) -> dict[str, Any]:
    """The options of our method `name` that give what a tool does by default; "paper": the papers' own.

    What the tool has no default for (weights, a density in PEFT) is not in it.

    >>> preset("ties", "fusionbench")["trim"], preset("model_stock", "fusionbench")["angle"]
    ('official', 'degrees')
    """
    _check_tool(compat, TOOLS)
    if compat == "paper":
        return _defaults(name)
    for row in ROWS[compat].values():
        if row.ours == name:
            return dict(row.preset)
    known = sorted({row.ours for row in ROWS[compat].values()})
    raise ValueError(f"{compat} has no {name}; it has {', '.join(known)}")


def _defaults(name):
    from tvjax.merging.registry import METHODS, known_method

    parameters = inspect.signature(METHODS[known_method(name)]).parameters.values()
    return {p.name: p.default for p in parameters if p.default not in (inspect.Parameter.empty, None)}


def complete(name: str, options: Mapping[str, Any], compat: str | None) -> dict[str, Any]:
    """`options` on top of the preset of a tool; nothing is added without one."""
    if compat is None:
        return dict(options)
    return _settled(name, {**preset(name, compat), **options})


def translate(tool: str, method: str, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """(our name, our options) of another tool's method and options, for `build`; defaults are the tool's.

    tool: "mergekit", "fusionbench" or "peft". method: mergekit's `merge_method`, FusionBench's class or the name of
    its configuration, PEFT's `combination_type`. options: in the tool's own words. Numbers of models are
    {model: number} or a list in the order of the models; in mergekit's each may be a gradient or a list of filters.
    PEFT's factor-wise methods take the adapters' `scaling` (α/r, 1 by default) too; the others want task vectors that
    contain it.

    Raises:
      ValueError: for an option that the tool does not have, or that cannot be had here.

    >>> translate("fusionbench", "task_arithmetic", {"scaling_factor": 0.4})
    ('task_arithmetic', {'scale': 0.4, 'normalize': False})
    """
    key, row = _row(tool, method)
    options = dict(options or {})
    _check_options(tool, key, row, options)
    made = dict(row.preset)
    for option, value in options.items():
        made |= row.takes[option](value) if option in row.takes else {}
    if row.acts == "factors":
        made["weights"] = _root_weights(made["weights"], made.pop("scaling", None))
    return row.ours, _settled(row.ours, made)


def acts_on(tool: str, method: str, *, base: bool = True) -> str:
    """What a tool's method combines: "deltas" from θ0, "models" as they are, or "factors" of adapters.

    base: whether mergekit's nuslerp and multislerp are given a base model: they combine deltas then. What combines
    models is had by giving the models for task vectors, which come back merged.

    >>> acts_on("mergekit", "karcher"), acts_on("peft", "linear")
    ('models', 'factors')
    """
    key, row = _row(tool, method)
    return "deltas" if tool == "mergekit" and key in ("nuslerp", "multislerp") and base else row.acts


def called(name: str) -> dict[str, list[str]]:
    """{tool: what it calls our method}, for those that have it.

    >>> called("magmax")
    {'fusionbench': ['MagMaxAlgorithm']}
    """
    found = {tool: [theirs for theirs, row in rows.items() if row.ours == name] for tool, rows in ROWS.items()}
    return {tool: theirs for tool, theirs in found.items() if theirs}


# ---------------------------------------------------------------- checks and special cases
def _check_tool(tool, known):
    if tool not in known:
        raise ValueError(
            f"no tool called {tool!r}; {tree.did_you_mean(str(tool), known)} (there are {', '.join(known)})"
        )


def _row(tool, method) -> tuple[str, Row]:
    _check_tool(tool, tuple(ROWS))
    key = CONFIGS.get(method, method) if tool == "fusionbench" else method
    key = str(key).rpartition(".")[2] if tool == "fusionbench" else key
    if key in NONE[tool]:
        raise ValueError(f"{tool}'s {key} has no counterpart here: {NONE[tool][key][1]}")
    if key not in ROWS[tool]:
        known = [*ROWS[tool], *(CONFIGS if tool == "fusionbench" else ())]
        raise ValueError(f"{tool} has no {method!r}; {tree.did_you_mean(str(method), known)}")
    return key, ROWS[tool][key]


def _check_options(tool, key, row, options):
    known = [*row.takes, *row.silent, *row.refused]
    if unknown := [option for option in options if option not in known]:
        hint = tree.did_you_mean(str(unknown[0]), known) if known else "it takes none"
        raise ValueError(f"{tool}'s {key} has no {', '.join(map(str, unknown))}; {hint}")
    for option, reason in row.refused.items():
        if options.get(option) not in (None, False):
            raise ValueError(f"{option} of {tool}'s {key}: {reason}")
    if missing := [option for option in row.needs if option not in options]:
        raise ValueError(f"{tool}'s {key} needs {', '.join(missing)}")


def _root_weights(weights, scaling):
    """PEFT weighs each factor by √|w·s|, A with the sign of w·s, so that one adapter's product has the weight w·s."""
    scaling = [1.0] * len(weights) if scaling is None else scaling
    if len(scaling) != len(weights):
        raise ValueError(f"there are {len(weights)} weights but {len(scaling)} scalings")
    parts = [w * s for w, s in zip(weights, scaling, strict=True)]
    roots = [math.sqrt(abs(part)) for part in parts]
    import numpy as np

    return by_name(
        {
            FACTOR_A: np.array([math.copysign(r, p) for r, p in zip(roots, parts, strict=True)]),
            FACTOR_B: np.array(roots),
        },
        default=1.0,
    )


def _settled(name, options):
    """Options whose meaning depends on each other, as the tools settle them."""
    if name in ("della", "della_linear") and options.get("epsilon") and _plainly(options.get("density"), 1.0):
        options["epsilon"] = 0.0  # nothing is dropped
    if name == "nuslerp" and ("flatten" in options or "columns" in options):
        flatten, columns = options.pop("flatten", True), options.pop("columns", False)
        options["unit"] = "leaf" if flatten else "column" if columns else "row"
    return options


def _plainly(value, number) -> bool:
    return isinstance(value, int | float) and value >= number
