"""FusionBench 0.2.33: its algorithms, by class and by the names of its configuration files."""

from tvjax.merging.peers.row import Row, gives, into, leaves_to

SCALE = {"scaling_factor": into("scale")}
DARE = {
    "sparsity_ratio": into("density", lambda p: 1 - p),
    "rescale": gives("rescale")(lambda on: {"rescale": "inverse_density" if on else "none"}),
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


@gives("base")
def _base(config):
    from tvjax.merging.compat import translate

    name, options = translate("fusionbench", config["_target_"], {k: v for k, v in config.items() if k != "_target_"})
    return {"base": {"name": name, **options}}


@gives("scale, or weights for a list")
def _alpha(alpha):
    if alpha is None:
        return {}
    return {"scale": alpha} if isinstance(alpha, int | float) else {"weights": list(alpha)}


@gives("base")
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
CONFIGS = {  # the names of its configuration files
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
NONE = {  # near to which of ours, and why they have no counterpart
    "WUDIMerging": (("swudi", "wudi"), "it stops an optimizer early; swudi has a time, wudi is the minimum"),
    "TallMaskTaskArithmeticAlgorithm": (("consensus",), "it holds θ0 against τ; the paper's masks are merging.needed"),
    "FisherMergingForCLIPVisionModel": (
        ("fisher",),
        "its Fisher matrices depend on the batch; give your own to fisher",
    ),
    "RegMeanAlgorithmForCLIP": (("regmean",), "it reads activations of its own; give Gram matrices to regmean"),
}
