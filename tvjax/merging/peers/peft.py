"""PEFT 0.21.2: the combination types of `add_weighted_adapter`."""

from tvjax.merging.peers.row import Row, gives, into

ADAPTERS = {"weights": into("weights", list), "scaling": gives("weights")(into("scaling", list))}
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
RANKS = ("svd_full_matrices", "svd_driver")
CLAMP = {"svd_clamp": "clamped factors are not offered; leave it out"}
PRODUCT = {"weights": into("weights", list)}
CUT = {**PRODUCT, "svd_rank": into("truncate")}

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
    "svd": Row("task_arithmetic", PLAIN, CUT, ("weights", "svd_rank"), RANKS, CLAMP),
    "ties_svd": Row(
        "ties",
        {"trim": "exact", **PEFT_VOTE},
        {**CUT, **PRUNED, **SIGN},
        ("weights", "density", "svd_rank"),
        RANKS,
        CLAMP,
    ),
    "magnitude_prune_svd": Row(
        "breadcrumbs", PEFT_PRUNE, {**CUT, **PRUNED}, ("weights", "density", "svd_rank"), RANKS, CLAMP
    ),
    "dare_linear_svd": Row("dare", PEFT_DARE, {**CUT, **PRUNED}, ("weights", "density", "svd_rank"), RANKS, CLAMP),
    "dare_ties_svd": Row(
        "dare_ties",
        {"rescale": "inverse_density", "keep": 1.0, **PEFT_VOTE},
        {**CUT, **PRUNED, **SIGN},
        ("weights", "density", "svd_rank"),
        RANKS,
        CLAMP,
    ),
}
