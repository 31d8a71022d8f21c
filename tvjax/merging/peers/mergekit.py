"""mergekit 0.1.5: its settings (gradients, filters, numbers of models) and its merge methods."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvjax.merging.numbers import by_depth, by_name, by_task
from tvjax.merging.peers.row import Row, gives, into


def setting(value: Any) -> Any:
    """A number as mergekit's recipes write it: a scalar, a gradient [0, 0.3, 1], or [{filter: substring, value: …}]."""
    if isinstance(value, Mapping) and "value" in value:
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    if not any(isinstance(part, Mapping) for part in value):
        return by_depth(list(value))
    rules: dict[str, Any] = {}
    for part in value:
        found = part.get("filter")
        if found is None or found == "*":
            return by_name(rules, default=setting(part["value"])) if rules else setting(part["value"])
        rules.setdefault(re.escape(found), setting(part["value"]))
    raise ValueError(
        f"the filters {', '.join(p['filter'] for p in value)} leave out leaves; add {{value: …}} at the end"
    )


def each_model(value: Any) -> Any:
    """Numbers of models: {model: setting} in the order of the models, a list of settings for them, or one for all."""
    conditional = isinstance(value, list | tuple) and all(isinstance(v, Mapping) and "value" in v for v in value)
    if isinstance(value, Mapping) and "value" not in value:
        value = list(value.values())
    elif conditional or not isinstance(value, list | tuple):
        return setting(value)
    found = [setting(part) for part in value]
    return np.asarray(found, np.float64) if all(isinstance(part, int | float) for part in found) else by_task(found)


@gives("reduce, divide")
def _mean_of_weights(on):
    return {"reduce": "mean", "divide": "weights"} if on else {"reduce": "sum"}


@gives("rescale")
def _l1(on):
    return {"rescale": "l1" if on else "none"}


WEIGHT = {"weight": into("weights", each_model)}
SUM = {**WEIGHT, "lambda": into("scale", setting), "normalize": into("normalize")}
VOTE = {**WEIGHT, "lambda": into("scale", setting), "normalize": _mean_of_weights}
DENSITY = {"density": into("density", each_model)}
EPSILON = {"epsilon": into("epsilon", each_model)}
GAMMA = {"gamma": into("gamma", each_model)}
MK_SUM = {"scale": 1.0, "normalize": False}
MK_VOTE = {"scale": 1.0, "zero": "+", "elect": "after_weights", "sign": "total"}
MK_MEAN = {**MK_VOTE, "reduce": "mean", "divide": "weights"}
L1 = {"rescale": _l1}
BITS = ("int8_mask",)
NO_RESCALE = {"rescale": "mergekit's ℓ1 rescaling after a trim by magnitude is not offered; leave it false"}
IGNORED = {"density": "mergekit ignores it here; leave it out, or take ties, dare or breadcrumbs", **NO_RESCALE}

MERGEKIT = {
    "linear": Row(
        "average", {"normalize": True}, {**WEIGHT, "normalize": into("normalize")}, ("weight",), acts="models"
    ),
    "task_arithmetic": Row("task_arithmetic", MK_SUM, SUM, ("weight",), BITS, IGNORED),
    "ties": Row(
        "ties",
        {"density": 1.0, "scope": "leaf", "trim": "exact", **MK_MEAN},
        {**VOTE, **DENSITY},
        ("weight",),
        BITS,
        NO_RESCALE,
    ),
    "dare_linear": Row(
        "dare", {"density": 1.0, "rescale": "l1", **MK_SUM}, {**SUM, **DENSITY, **L1}, ("weight",), BITS
    ),
    "dare_ties": Row(
        "dare_ties",
        {"density": 1.0, "rescale": "l1", "keep": 1.0, "reduce": "sum", **MK_VOTE},
        {**VOTE, **DENSITY, **L1},
        ("weight",),
        BITS,
    ),
    "della": Row(
        "della",
        {"density": 1.0, "epsilon": 0.15, "rescale": "l1", **MK_MEAN},
        {**VOTE, **DENSITY, **EPSILON, **L1},
        ("weight",),
        BITS,
    ),
    "della_linear": Row(
        "della_linear",
        {"density": 1.0, "epsilon": 0.15, "rescale": "l1", **MK_SUM},
        {**SUM, **DENSITY, **EPSILON, **L1},
        ("weight",),
        BITS,
    ),
    "breadcrumbs": Row(
        "breadcrumbs",
        {"density": 1.0, "gamma": 0.01, "scope": "leaf", **MK_SUM},
        {**SUM, **DENSITY, **GAMMA},
        ("weight",),
        BITS,
        NO_RESCALE,
    ),
    "breadcrumbs_ties": Row(
        "breadcrumbs_ties",
        {"density": 1.0, "gamma": 0.01, "scope": "leaf", "reduce": "sum", **MK_VOTE},
        {**VOTE, **DENSITY, **GAMMA},
        ("weight",),
        BITS,
        NO_RESCALE,
    ),
    "model_stock": Row(
        "model_stock",
        {"angle": "cosine", "unit": "leaf"},
        {"filter_wise": gives("unit")(lambda on: {"unit": "row" if on else "leaf"})},
    ),
    "slerp": Row(
        "slerp", {"threshold": 0.9995, "eps": 1e-8, "unit": "leaf"}, {"t": into("t", setting)}, ("t",), acts="models"
    ),
    "nuslerp": Row(
        "nuslerp",
        {"unit": "leaf"},
        {
            **WEIGHT,
            "nuslerp_flatten": gives("unit")(into("flatten")),
            "nuslerp_row_wise": gives("unit")(into("columns")),
        },
        ("weight",),
        acts="models",
    ),
    "multislerp": Row("multi_slerp", {"unit": "leaf"}, WEIGHT, ("weight",), ("eps",), acts="models"),
    "sce": Row("sce", {"density": 1.0, "scale": 1.0}, {"select_topk": into("density", setting)}, silent=BITS),
    "passthrough": Row("task_arithmetic", MK_SUM, {"scale": into("weights", each_model)}, acts="models"),
    "karcher": Row(
        "karcher",
        {"max_iter": 10, "tol": 1e-5, "unit": "leaf"},
        {"max_iter": into("max_iter"), "tol": into("tol")},
        acts="models",
    ),
}
NONE = {  # near to which of ours, and why they have no counterpart
    "arcee_fusion": ((), "its quantiles come from a random sample of entries"),
    "ram": ((), "it is not offered"),
    "ramplus_tl": ((), "it is not offered"),
    "nearswap": ((), "it is one task vector clipped to [-t, t]"),
}
