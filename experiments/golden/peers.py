"""Makes tests/golden/peers.npz: what mergekit, FusionBench and PEFT compute on small models.

Presets are held against these numbers. Run it in an environment of its own (README.md beside this file says how); tvjax
is not needed there:

    python experiments/golden/peers.py tests/golden/peers.npz

The file holds arrays of float32, flat over the leaves of `LEAVES` (of `FACTORS` for adapters):

- `base` (n,), `models` (3, n): three fine-tuned models with heavy-tailed differences. Numbers are multiples of 2⁻²⁰,
  so that differences and sums are exact. Some entries are equal in all models (frozen), in some the differences of the
  first two models cancel.
- `uniform` (3, n): what every random method drew in place of its own random numbers; an entry is kept where it is below
  the probability to keep.
- `adapters` (2, m): the LoRA factors of two adapters of rank 2; their scaling α/r is 2.
- `out/NAME`: the result of each case: a whole model for mergekit and FusionBench, for PEFT the factors of the new
  adapter, or their product.
- `about`: JSON with `versions`, `leaves`, `factors`, `cases` {NAME: {tool, method, options in the tool's own words,
  base, inputs}}, and `gradients` {NAME: {setting, values: {leaf: the number that mergekit used}}} for a LLaMA of four
  blocks.
"""

import contextlib
import importlib.metadata
import io
import json
import pathlib
import sys
import tempfile

import numpy as np
import torch

LEAVES = {"a.weight": (12, 10), "a.bias": (12,), "b.weight": (6, 12)}
FACTORS = {
    "a.lora_A.weight": (2, 10),
    "a.lora_B.weight": (12, 2),
    "b.lora_A.weight": (2, 12),
    "b.lora_B.weight": (6, 2),
}
GRID = 2.0**20
GRADIENTS = {
    "list": [0.0, 0.3, 1.0],
    "two": [0.25, 0.75],
    "filters": [{"filter": "self_attn", "value": [0.0, 0.5, 1.0]}, {"filter": "mlp", "value": 0.25}, {"value": 1.0}],
}


def size(shapes):
    return sum(int(np.prod(shape)) for shape in shapes.values())


def split(flat, shapes):
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    return {name: part.reshape(shapes[name]) for name, part in zip(shapes, np.split(flat, ends[:-1]), strict=True)}


def join(tree, shapes):
    return np.concatenate([np.asarray(tree[name].detach().numpy(), np.float32).reshape(-1) for name in shapes])


def inputs():
    rng = np.random.default_rng(0)
    grid = lambda x: (np.round(x * GRID) / GRID).astype(np.float32)
    n = size(LEAVES)
    base = grid(0.3 * rng.standard_normal(n))
    spread = np.concatenate(
        [np.full(int(np.prod(s)), 0.02 if name != "b.weight" else 0.06) for name, s in LEAVES.items()]
    )
    deltas = grid(np.clip(rng.standard_t(2, (3, n)), -12, 12) * spread)
    frozen, cancelling = np.arange(3, n, 23), np.arange(5, n, 31)
    deltas[:, frozen] = 0
    deltas[1, cancelling], deltas[2, cancelling] = -deltas[0, cancelling], 0
    uniform = ((rng.permutation(3 * n).reshape(3, n) % 1024 + 0.5) / 1024).astype(np.float32)
    adapters = grid(rng.standard_t(3, (2, size(FACTORS))) * 0.3)
    return base, base + deltas, uniform, adapters


class Drawn:
    """Numbers handed out in place of random ones, in the order in which a tool asks for them."""

    def __init__(self, uniform, model_first: bool):
        by_model = [split(row, LEAVES) for row in uniform]
        pairs = (
            [(t, n) for t in range(len(uniform)) for n in LEAVES]
            if model_first
            else [(t, n) for n in LEAVES for t in range(len(uniform))]
        )
        self.rest = [by_model[t][name] for t, name in pairs]

    def next(self, like):
        drawn = torch.from_numpy(self.rest.pop(0).copy())
        return drawn.reshape(like.shape)  # a tool may see a vector as one row

    def bernoulli(self, probability, **_):
        return (self.next(probability) < probability).to(probability.dtype)

    def rand_like(self, x, **_):
        return 1 - self.next(x)


# ---------------------------------------------------------------- mergekit
WEIGHTS = {"m0": 0.5, "m1": 0.3, "m2": 0.9}
MERGEKIT = {
    "linear": ("linear", {"weight": WEIGHTS}),
    "linear_sum": ("linear", {"weight": WEIGHTS, "normalize": False}),
    "task_arithmetic": ("task_arithmetic", {"weight": WEIGHTS}),
    "task_arithmetic_negative": ("task_arithmetic", {"weight": {"m0": 1.0, "m1": -0.5, "m2": 0.7}, "lambda": 0.6}),
    "task_arithmetic_normalized": ("task_arithmetic", {"weight": WEIGHTS, "normalize": True}),
    "ties": ("ties", {"weight": WEIGHTS, "density": 0.3}),
    "ties_sum": ("ties", {"weight": WEIGHTS, "density": 0.3, "normalize": False, "lambda": 0.4}),
    "ties_untrimmed": ("ties", {"weight": {"m0": 1.0, "m1": 1.0, "m2": 1.0}}),
    "ties_densities": ("ties", {"weight": WEIGHTS, "density": {"m0": 0.2, "m1": 0.5, "m2": 0.9}}),
    "dare_linear": ("dare_linear", {"weight": WEIGHTS, "density": 0.5}),
    "dare_linear_plain": ("dare_linear", {"weight": WEIGHTS, "density": 0.5, "rescale": False}),
    "dare_linear_full": ("dare_linear", {"weight": WEIGHTS}),
    "dare_ties": ("dare_ties", {"weight": WEIGHTS, "density": 0.5}),
    "dare_ties_normalized": ("dare_ties", {"weight": WEIGHTS, "density": 0.5, "normalize": True}),
    "della": ("della", {"weight": WEIGHTS, "density": 0.5}),
    "della_linear": ("della_linear", {"weight": WEIGHTS, "density": 0.6, "epsilon": 0.2, "lambda": 0.7}),
    "breadcrumbs": ("breadcrumbs", {"weight": WEIGHTS, "density": 0.7, "gamma": 0.1}),
    "breadcrumbs_default": ("breadcrumbs", {"weight": WEIGHTS}),
    "breadcrumbs_ties": ("breadcrumbs_ties", {"weight": WEIGHTS, "density": 0.7, "gamma": 0.1}),
    "model_stock": ("model_stock", {}),
    "model_stock_rows": ("model_stock", {"filter_wise": True}),
    "sce": ("sce", {"select_topk": 0.6}),
    "sce_all": ("sce", {}),
    "multislerp": ("multislerp", {"weight": WEIGHTS}),
}
MERGEKIT_PAIRS = {  # two models; a base or none
    "model_stock_two": ("model_stock", {}, "base", ("m0", "m1")),
    "slerp": ("slerp", {"t": 0.3}, "m0", ("m1",)),
    "nearswap": ("nearswap", {"t": 0.01}, "m0", ("m1",)),
    "nuslerp": ("nuslerp", {"weight": {"m0": 0.7, "m1": 0.4}}, None, ("m0", "m1")),
    "nuslerp_base": ("nuslerp", {"weight": {"m0": 0.7, "m1": 0.4}}, "base", ("m0", "m1")),
    "nuslerp_rows": ("nuslerp", {"weight": {"m0": 0.7, "m1": 0.4}, "nuslerp_flatten": False}, "base", ("m0", "m1")),
    "nuslerp_columns": (
        "nuslerp",
        {"weight": {"m0": 0.7, "m1": 0.4}, "nuslerp_flatten": False, "nuslerp_row_wise": True},
        "base",
        ("m0", "m1"),
    ),
    "multislerp_models": ("multislerp", {"weight": WEIGHTS}, None, ("m0", "m1", "m2")),
    "karcher": ("karcher", {}, None, ("m0", "m1", "m2")),
    "linear_with_base": ("linear", {"weight": {"base": 1.0, **WEIGHTS}}, None, ("base", "m0", "m1", "m2")),
}


def mergekit(states, uniform):
    from mergekit.merge_methods.api import merge_state_dicts

    for name, (method, options) in MERGEKIT.items():
        MERGEKIT_PAIRS.setdefault(name, (method, options, None if method == "linear" else "base", ("m0", "m1", "m2")))
    for name, (method, options, base, models) in MERGEKIT_PAIRS.items():
        given = {key: states[key] for key in ([base] if base else []) + list(models)}
        with patched("bernoulli", Drawn(uniform, model_first=False).bernoulli):
            merged = merge_state_dicts(given, method, parameters=options, base=base)
        yield f"mergekit/{name}", case("mergekit", method, options, base, models), join(merged, LEAVES)


def gradients():
    """The number that mergekit used for each leaf, read off from a merge of zeros (the base) and ones."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, value in (("zeros", 0.0), ("ones", 1.0)):
            model = LlamaForCausalLM(config)
            for p in model.parameters():
                torch.nn.init.constant_(p, value)
            model.save_pretrained(folder / name)
        for name, setting in GRADIENTS.items():
            models = [{"model": str(folder / "ones"), "parameters": {"weight": setting}}]
            recipe = {
                "merge_method": "task_arithmetic",
                "base_model": str(folder / "zeros"),
                "models": models,
                "dtype": "float32",
            }
            run_merge(MergeConfiguration.model_validate(recipe), str(folder / name), MergeOptions(copy_tokenizer=False))
            leaves = {}
            for shard in sorted((folder / name).glob("*.safetensors")):
                leaves |= load_file(shard)
            found[name] = {"setting": setting, "values": {k: float(v.flatten()[0]) for k, v in sorted(leaves.items())}}
    return found


# ---------------------------------------------------------------- FusionBench
TIES = {"scaling_factor": 0.3, "threshold": 20, "remove_keys": [], "merge_func": "sum"}
FUSIONBENCH = {
    "simple_average": ("SimpleAverageAlgorithm", {}),
    "weighted_average": ("WeightedAverageAlgorithm", {"weights": [0.5, 0.3, 0.9], "normalize": True}),
    "weighted_sum": ("WeightedAverageAlgorithm", {"weights": [0.5, 0.3, 0.9], "normalize": False}),
    "task_arithmetic": ("TaskArithmeticAlgorithm", {"scaling_factor": 0.3}),
    "ties_sum": ("TiesMergingAlgorithm", TIES),
    "ties_mean": ("TiesMergingAlgorithm", TIES | {"merge_func": "mean", "threshold": 50}),
    "ties_max": ("TiesMergingAlgorithm", TIES | {"merge_func": "max"}),
    "magmax": ("MagMaxAlgorithm", {"scaling_factor": 0.5}),
    "dare_average": ("DareSimpleAverage", {"sparsity_ratio": 0.5, "only_on_linear_weights": False, "rescale": True}),
    "dare_task_arithmetic": (
        "DareTaskArithmetic",
        {"scaling_factor": 0.3, "sparsity_ratio": 0.4, "only_on_linear_weights": False, "rescale": True},
    ),
    "dare_ties": ("DareTiesMerging", {"sparsity_ratio": 0.5, "only_on_linear_weights": False, "rescale": True} | TIES),
    "model_stock": ("ModelStock", {}),
    "tsv_m": ("TaskSingularVectorMerging", {"alpha": 1.0}),
    "tsv_m_weights": ("TaskSingularVectorMerging", {"alpha": [0.8, 1.2, 0.5]}),
    "iso_c": ("IsotropicMergingInCommonSubspace", {"scaling_factor": 1.0}),
    "iso_cts": ("IsotropicMergingInCommonAndTaskSubspace", {"scaling_factor": 1.0, "common_space_fraction": 0.6}),
    "svc": ("SingularValueCalibrationArithmeticTask", {"scaling_factor": 0.3, "alpha": 0.1}),
    "expo": ("ExPOAlgorithm", {"extrapolation_factor": 0.1}),
    "emr": ("EMRMerging", {}),
}
FUSIONBENCH_PAIRS = {
    "slerp": ("SlerpMergeAlgorithm", {"t": 0.3}, None, ("m0", "m1")),
    "model_stock_two": ("ModelStock", {}, "base", ("m0", "m1")),
}


def fusionbench(states, uniform):
    import fusion_bench.method as methods
    from fusion_bench.method.emr_merging import EMRMerging
    from fusion_bench.method.singular_value_calibration import SingularValueCalibrationArithmeticTask
    from fusion_bench.modelpool import BaseModelPool

    unlisted = {c.__name__: c for c in (EMRMerging, SingularValueCalibrationArithmeticTask)}
    for name, (method, options) in FUSIONBENCH.items():
        FUSIONBENCH_PAIRS.setdefault(name, (method, options, "base", ("m0", "m1", "m2")))
    for name, (method, options, base, models) in FUSIONBENCH_PAIRS.items():
        algorithm = unlisted[method] if method in unlisted else getattr(methods, method)
        pool = ({"_pretrained_": module(states[base])} if base else {}) | {key: module(states[key]) for key in models}
        drawn = Drawn(uniform, model_first=True)
        with contextlib.redirect_stdout(io.StringIO()), patched("rand_like", drawn.rand_like):
            merged = algorithm(**options).run(BaseModelPool(pool))
        if method == "EMRMerging":
            unified = {k: states["base"][k] + merged.unified_task_vector[k].detach() for k in LEAVES}
            yield "fusionbench/emr_unified", case("fusionbench", method, options, base, models), join(unified, LEAVES)
            continue
        yield (
            f"fusionbench/{name}",
            case("fusionbench", method, options, base, models),
            join(merged.state_dict(), LEAVES),
        )


def module(state):
    made = torch.nn.ModuleDict({"a": torch.nn.Linear(10, 12), "b": torch.nn.Linear(12, 6, bias=False)})
    made.load_state_dict({k: v.clone() for k, v in state.items()})
    return made


# ---------------------------------------------------------------- PEFT
PEFT = {
    "linear": {},
    "linear_negative": {"weights": [0.7, -0.4]},
    "ties": {"density": 0.5},
    "ties_frequency": {"density": 0.5, "majority_sign_method": "frequency"},
    "magnitude_prune": {"density": 0.5},
    "dare_linear": {"density": 0.5},
    "dare_ties": {"density": 0.5},
    "cat": {},
    "svd": {"svd_rank": 4},
    "svd_truncated": {"svd_rank": 2},
    "ties_svd": {"density": 0.5, "svd_rank": 6},
    "magnitude_prune_svd": {"density": 0.5, "svd_rank": 6},
}


def peft(adapters, uniform):
    from peft import LoraConfig, get_peft_model

    for name, options in PEFT.items():
        kind = (
            name
            if name in ("ties_svd", "magnitude_prune_svd") or name.startswith(("dare", "magnitude"))
            else name.split("_")[0]
        )
        options = {"weights": [0.7, 0.4], **options}
        config = LoraConfig(r=2, lora_alpha=4, target_modules=["a", "b"])
        model = get_peft_model(module({k: torch.zeros(s) for k, s in LEAVES.items()}), config, adapter_name="0")
        model.add_adapter("1", config)
        for t, flat in enumerate(adapters):
            for leaf, value in split(flat, FACTORS).items():
                side, kind_, _ = leaf.split(".")
                getattr(model.base_model.model[side], kind_)[str(t)].weight.data = torch.from_numpy(value.copy())
        with patched("bernoulli", adapter_draws(uniform)):
            model.add_weighted_adapter(["0", "1"], adapter_name="merged", combination_type=kind, **options)
        layers = model.base_model.model
        factors = {
            f"{side}.{k}.weight": getattr(layers[side], k)["merged"].weight
            for side in "ab"
            for k in ("lora_A", "lora_B")
        }
        if kind == "cat" or kind.endswith("svd"):
            flat = np.concatenate(
                [layers[side].get_delta_weight("merged").detach().numpy().reshape(-1) for side in "ab"]
            ).astype(np.float32)
        else:
            flat = join(factors, FACTORS)
        yield f"peft/{name}", case("peft", kind, options, None, ("0", "1")), flat


def adapter_draws(uniform):
    """PEFT goes over modules, then A and B, then adapters; an adapter's draws are the first of a row of `uniform`."""
    rows = [split(row[: size(FACTORS)], FACTORS) for row in uniform[:2]]
    rest = [rows[t][leaf] for leaf in FACTORS for t in range(2)]
    return lambda p, **_: (torch.from_numpy(rest.pop(0).copy()) < p).to(p.dtype)


# ---------------------------------------------------------------- all of it
@contextlib.contextmanager
def patched(name, function):
    original = getattr(torch, name)
    setattr(torch, name, function)
    try:
        yield
    finally:
        setattr(torch, name, original)


def case(tool, method, options, base, models):
    return {"tool": tool, "method": method, "options": options, "base": base, "inputs": list(models)}


def main(path):
    base, models, uniform, adapters = inputs()
    states = {
        name: {k: torch.from_numpy(v.copy()) for k, v in split(flat, LEAVES).items()}
        for name, flat in [("base", base)] + [(f"m{t}", model) for t, model in enumerate(models)]
    }
    made, cases = {}, {}
    for name, what, flat in (*mergekit(states, uniform), *fusionbench(states, uniform), *peft(adapters, uniform)):
        cases[name], made[f"out/{name}"] = what, flat
        print(name, flat.shape, float(np.abs(flat).sum()))
    tools = ("torch", "mergekit", "fusion-bench", "peft", "transformers", "numpy")
    about = {
        "versions": {tool: importlib.metadata.version(tool) for tool in tools},
        "leaves": LEAVES,
        "factors": FACTORS,
        "cases": cases,
        "gradients": gradients(),
    }
    np.savez_compressed(
        path, base=base, models=models, uniform=uniform, adapters=adapters, about=np.array(json.dumps(about)), **made
    )


if __name__ == "__main__":
    main(sys.argv[1])
