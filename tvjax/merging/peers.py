"""How mergekit, FusionBench and PEFT call our methods: one row for each of theirs, read by `compat`.

Written against mergekit 0.1.5, FusionBench 0.2.33 and PEFT 0.21.2.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tvjax.merging.numbers import by_depth, by_name, by_task


class Row(NamedTuple):
    """One of their methods: ours, our options that give their defaults, and what each of their options becomes.

    takes: {their option: a function from its value to our options}. needs: those that must be given. silent: options
    that do not change numbers. refused: {their option: why only a false value can be had}. acts: what their method
    works on: "deltas" (θ_t − θ0), "models" (θ_t themselves) or "factors" (A and B of adapters as leaves).
    """

    ours: str
    preset: Mapping[str, Any]
    takes: Mapping[str, Callable[[Any], Mapping[str, Any]]]
    needs: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}
    acts: str = "deltas"


def into(option: str, convert: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], dict[str, Any]]:
    """A function that puts a value under our name for it."""
    return lambda value: {option: convert(value)}


def exactly(names) -> str:
    """The pattern of a list of whole names."""
    import re

    return f"^({'|'.join(map(re.escape, names))})$"


def leaves_to(option: str) -> Callable[[Any], dict[str, Any]]:
    """A list of whole names as a pattern; nothing for an empty one."""
    return lambda names: {option: exactly(names)} if names else {}


# ---------------------------------------------------------------- mergekit
def setting(value):
    """A number as mergekit's recipes write it: a scalar, a gradient [0, 0.3, 1], or [{filter: substring, value: …}]."""
    import re

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


def each_model(value):
    """Numbers of models: {model: setting} in the order of the models, a list with one setting for each, or one for all."""
    conditional = isinstance(value, list | tuple) and all(isinstance(v, Mapping) and "value" in v for v in value)
    if isinstance(value, Mapping) and "value" not in value:
        value = list(value.values())
    elif conditional or not isinstance(value, list | tuple):
        return setting(value)
    found = [setting(part) for part in value]
    return np.asarray(found, np.float64) if all(isinstance(part, int | float) for part in found) else by_task(found)


def _mean_of_weights(on):
    return {"reduce": "mean", "divide": "weights"} if on else {"reduce": "sum"}


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
        {"filter_wise": lambda on: {"unit": "row" if on else "leaf"}},
    ),
    "slerp": Row(
        "slerp", {"threshold": 0.9995, "eps": 1e-8, "unit": "leaf"}, {"t": into("t", setting)}, ("t",), acts="models"
    ),
    "nuslerp": Row(
        "nuslerp",
        {"unit": "leaf"},
        {**WEIGHT, "nuslerp_flatten": into("flatten"), "nuslerp_row_wise": into("columns")},
        ("weight",),
        acts="models",
    ),
    "multislerp": Row("multi_slerp", {"unit": "leaf"}, WEIGHT, ("weight",), ("eps",), acts="models"),
    "karcher": Row(
        "karcher",
        {"max_iter": 10, "tol": 1e-5, "unit": "leaf"},
        {"max_iter": into("max_iter"), "tol": into("tol")},
        acts="models",
    ),
}

# ---------------------------------------------------------------- FusionBench
SCALE = {"scaling_factor": into("scale")}
DARE = {
    "sparsity_ratio": into("density", lambda p: 1 - p),
    "rescale": lambda on: {"rescale": "inverse_density" if on else "none"},
}
LINEAR = {
    "only_on_linear_weights": "dropping on linear layers alone cannot be had by name; route leaves with merging.on"
}
FB_DARE = {"density": 0.5, "rescale": "inverse_density", "normalize": False}
FB_VOTE = {"scope": "global", "zero": "majority", "sign": "total", "reduce": "sum"}
TRIM = {"merge_func": into("reduce"), "remove_keys": leaves_to("exclude")}
AVERAGED = {"exclude_keys": leaves_to("averaged")}


def _percent(threshold):
    """FusionBench reads a threshold above 1 as percent, up to 1 as a share."""
    return threshold / 100 if threshold > 1 else threshold


def _base(config):
    from tvjax.merging.compat import translate

    name, options = translate("fusionbench", config["_target_"], {k: v for k, v in config.items() if k != "_target_"})
    return {"base": {"name": name, **options}}


def _alpha(alpha):
    if alpha is None:
        return {}
    return {"scale": alpha} if isinstance(alpha, int | float) else {"weights": list(alpha)}


def _sum_base(scale):
    return {"base": {"name": "task_arithmetic", "scale": scale, "normalize": False}}


FUSIONBENCH = {
    "SimpleAverageAlgorithm": Row("average", {"normalize": True}, {}, (), ("inplace", "show_pbar")),
    "WeightedAverageAlgorithm": Row(
        "average",
        {"normalize": True},
        {"weights": into("weights", list), "normalize": into("normalize")},
        ("weights",),
        ("verbose",),
        acts="models",
    ),
    "TaskArithmeticAlgorithm": Row("task_arithmetic", {"scale": 0.3, "normalize": False}, SCALE, (), ("inplace",)),
    "TiesMergingAlgorithm": Row(
        "ties",
        {"density": 0.2, "scale": 0.3, "trim": "official", **FB_VOTE},
        {**SCALE, **TRIM, "threshold": into("density", _percent)},
    ),
    "MagMaxAlgorithm": Row("magmax", {"scale": 0.5, "ties": "last"}, SCALE, (), ("inplace",)),
    "DareTaskArithmetic": Row("dare", {"scale": 0.3, **FB_DARE}, {**SCALE, **DARE}, refused=LINEAR),
    "DareSimpleAverage": Row("dare", {"scale": 1.0, **FB_DARE, "normalize": True}, DARE, refused=LINEAR),
    "DareTiesMerging": Row(
        "dare_ties",
        {"density": 0.5, "rescale": "inverse_density", "keep": 0.2, "extra": 1, "scale": 0.5, **FB_VOTE},
        {**SCALE, **DARE, **TRIM, "threshold": into("keep", _percent)},
        refused=LINEAR,
    ),
    "SlerpMergeAlgorithm": Row(
        "slerp",
        {"t": 0.5, "threshold": 0.9995, "eps": 1e-8, "unit": "leaf"},
        {"t": into("t"), "DOT_THRESHOLD": into("threshold"), "epsilon": into("eps")},
        acts="models",
    ),
    "ModelStock": Row(
        "model_stock",
        {"angle": "degrees", "unit": "leaf"},
        {"ignore_keys": leaves_to("averaged")},
        (),
        ("model_save_path", "model_save_kwargs"),
    ),
    "EMRMerging": Row("emr", {"scale": 1.0}, {}),
    "TaskSingularVectorMerging": Row(
        "tsv_m",
        {"scale": 1.0, "rank": "official"},
        {"alpha": _alpha, **AVERAGED},
        refused={"return_single_task_models": "a merge gives one model; leave it false"},
    ),
    "IsotropicMergingInCommonSubspace": Row("iso_c", {"scale": 1.0, "rank": "official"}, {**SCALE, **AVERAGED}),
    "IsotropicMergingInCommonAndTaskSubspace": Row(
        "iso_cts",
        {"scale": 1.0, "common": 0.8, "rank": "official"},
        {**SCALE, **AVERAGED, "common_space_fraction": into("common")},
    ),
    "SingularValueCalibrationArithmeticTask": Row(
        "svc",
        {"alpha": 0.1, **_sum_base(0.3)},
        {"alpha": into("alpha"), "scaling_factor": _sum_base},
        silent=("accelerator",),
    ),
    "SingularValueCalibrationWithBaseMethod": Row(
        "svc", {"alpha": 0.1}, {"alpha": into("alpha"), "base_method": _base}, ("base_method",), ("accelerator",)
    ),
    "ExPOAlgorithm": Row(
        "task_arithmetic", {"scale": 1.1, "normalize": True}, {"extrapolation_factor": into("scale", lambda a: 1 + a)}
    ),
    "LinearInterpolationAlgorithm": Row(
        "average", {"normalize": True, "weights": [0.5, 0.5]}, {"t": into("weights", lambda t: [1 - t, t])}
    ),
}
FUSIONBENCH_CONFIGS = {  # the names of its configuration files
    "simple_average": "SimpleAverageAlgorithm",
    "linear/weighted_average": "WeightedAverageAlgorithm",
    "task_arithmetic": "TaskArithmeticAlgorithm",
    "ties_merging": "TiesMergingAlgorithm",
    "magmax/magmax": "MagMaxAlgorithm",
    "dare/task_arithmetic": "DareTaskArithmetic",
    "dare/simple_average": "DareSimpleAverage",
    "dare/ties_merging": "DareTiesMerging",
    "slerp/slerp": "SlerpMergeAlgorithm",
    "model_stock/model_stock": "ModelStock",
    "emr_merging/emr_merging": "EMRMerging",
    "task_singular_vector/TaskSingularVectorMerging": "TaskSingularVectorMerging",
    "isotropic_merging/iso_c": "IsotropicMergingInCommonSubspace",
    "ISO_C_Merge": "IsotropicMergingInCommonSubspace",
    "isotropic_merging/iso_cts": "IsotropicMergingInCommonAndTaskSubspace",
    "ISO_CTS_Merge": "IsotropicMergingInCommonAndTaskSubspace",
    "singular_value_calibration/task_arithmetic": "SingularValueCalibrationArithmeticTask",
    "linear/expo": "ExPOAlgorithm",
    "linear/linear_interpolation": "LinearInterpolationAlgorithm",
}

# ---------------------------------------------------------------- PEFT
ADAPTERS = {"weights": into("weights", list), "scaling": into("scaling", list)}
PRUNED = {"density": into("density")}
SIGN = {"majority_sign_method": into("sign")}
PEFT_VOTE = {
    "scale": 1.0,
    "reduce": "mean",
    "divide": "count",
    "elect": "before_weights",
    "sign": "total",
    "zero": "+",
    "scope": "leaf",
}
PEFT_PRUNE = {"gamma": 0.0, "scope": "leaf", "scale": 1.0, "normalize": False}
PEFT_DARE = {"rescale": "inverse_density", "scale": 1.0, "normalize": False}
PLAIN = {"scale": 1.0, "normalize": False}
RANKS = ("svd_full_matrices", "svd_driver", "svd_rank")
CLAMP = {"svd_clamp": "clamped factors are not offered; leave it out"}
PRODUCT = {"weights": into("weights", list)}

PEFT = {
    "linear": Row("task_arithmetic", PLAIN, ADAPTERS, ("weights",), acts="factors"),
    "ties": Row(
        "ties", {"trim": "exact", **PEFT_VOTE}, {**ADAPTERS, **PRUNED, **SIGN}, ("weights", "density"), acts="factors"
    ),
    "magnitude_prune": Row("breadcrumbs", PEFT_PRUNE, {**ADAPTERS, **PRUNED}, ("weights", "density"), acts="factors"),
    "dare_linear": Row("dare", PEFT_DARE, {**ADAPTERS, **PRUNED}, ("weights", "density"), acts="factors"),
    "dare_ties": Row(
        "dare_ties",
        {"rescale": "inverse_density", "keep": 1.0, **PEFT_VOTE},
        {**ADAPTERS, **PRUNED, **SIGN},
        ("weights", "density"),
        acts="factors",
    ),
    "cat": Row("task_arithmetic", PLAIN, PRODUCT, ("weights",)),
    "svd": Row("task_arithmetic", PLAIN, PRODUCT, ("weights",), RANKS, CLAMP),
    "ties_svd": Row(
        "ties", {"trim": "exact", **PEFT_VOTE}, {**PRODUCT, **PRUNED, **SIGN}, ("weights", "density"), RANKS, CLAMP
    ),
    "magnitude_prune_svd": Row("breadcrumbs", PEFT_PRUNE, {**PRODUCT, **PRUNED}, ("weights", "density"), RANKS, CLAMP),
    "dare_linear_svd": Row("dare", PEFT_DARE, {**PRODUCT, **PRUNED}, ("weights", "density"), RANKS, CLAMP),
    "dare_ties_svd": Row(
        "dare_ties",
        {"rescale": "inverse_density", "keep": 1.0, **PEFT_VOTE},
        {**PRODUCT, **PRUNED, **SIGN},
        ("weights", "density"),
        RANKS,
        CLAMP,
    ),
}

ROWS = {"mergekit": MERGEKIT, "fusionbench": FUSIONBENCH, "peft": PEFT}
