"""Presets and translations against what mergekit, FusionBench and PEFT computed, and where we differ on purpose."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import merging
from tvjax.merging import compat, plan, traced
from tvjax.merging.engine import task_hashes

pytestmark = pytest.mark.usefixtures("quick_compilation")
GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "peers.npz")
ABOUT = json.loads(str(GOLDEN["about"]))
LEAVES, FACTORS = ABOUT["leaves"], ABOUT["factors"]
MODELS = {"base": GOLDEN["base"], **{f"m{t}": row for t, row in enumerate(GOLDEN["models"])}}
CASES = ABOUT["cases"]


def split(flat, shapes):
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    parts = np.split(flat, ends[:-1], -1)
    return {name: part.reshape(*part.shape[:-1], *shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def join(tree, shapes):
    return np.concatenate([np.asarray(tree[name]).reshape(-1) for name in shapes])


def translated(name):
    case = CASES[name]
    options = dict(case["options"])
    if compat.acts_on(case["tool"], case["method"]) == "factors":
        options["scaling"] = [2.0, 2.0]
    return merging.build(*compat.translate(case["tool"], case["method"], options))


def merged(name, monkeypatch):
    """Our result for a case, in the form in which the file has the tool's."""
    case, operator = CASES[name], translated(name)
    if case["tool"] == "peft":
        return merged_adapters(name, operator, monkeypatch)
    base = case["base"] or "base"
    models = compat.acts_on(case["tool"], case["method"], base=bool(case["base"])) == "models"
    given = [base, *case["inputs"]] if case["method"] == "slerp" else case["inputs"]  # mergekit's goes from its base
    origin = np.zeros_like(MODELS["base"]) if models else MODELS[base]
    taus = split(np.stack([MODELS[m] - origin for m in given]), LEAVES)
    return origin + join(drawn(operator, taus, GOLDEN["uniform"], LEAVES, monkeypatch), LEAVES)


def drawn(operator, taus, uniform, shapes, monkeypatch):
    """The operator's result with the draws of the file in place of its own."""
    if not any("uniform" in stage.needs for stage in operator.stages):
        return operator(taus)
    rows = {plan.hashed(leaf): part for leaf, part in split(uniform, shapes).items()}
    draw = lambda seed, leaf, tasks, start, shape, dtype: jnp.asarray(rows[leaf][: shape[0]], dtype)
    with monkeypatch.context() as patch:
        patch.setattr(plan, "uniform", draw)
        first = next(iter(taus))
        program = jax.jit(lambda operator, taus: traced.run(operator, taus, task_hashes(None, len(taus[first])), {}))
        return program(operator, taus)


def merged_adapters(name, operator, monkeypatch):
    case = CASES[name]
    factors = [split(row, FACTORS) for row in GOLDEN["adapters"]]
    if compat.acts_on("peft", case["method"]) == "factors":
        taus = {leaf: np.stack([f[leaf] for f in factors]) for leaf in FACTORS}
        size = GOLDEN["adapters"].shape[1]
        return join(drawn(operator, taus, GOLDEN["uniform"][:2, :size], FACTORS, monkeypatch), FACTORS)
    taus = {side: 2 * np.stack([product(f, side) for f in factors]) for side in "ab"}
    return join(operator(taus), dict.fromkeys("ab"))


def product(factors, side):
    return factors[f"{side}.lora_B.weight"] @ factors[f"{side}.lora_A.weight"]


# ---------------------------------------------------------------- equal numbers
DIFFER = {  # on purpose; each has its own test below
    "mergekit/nearswap": "not offered",
    "mergekit/breadcrumbs_default": "gamma does nothing there at density 1",
    "fusionbench/ties_sum": "keeps negative entries where sums vanish and signs balance",
}
# Results are a rounding or two apart in float32 (1e-7 of numbers about 1), except where both sides take singular
# vectors in float32: their error is the rounding times the condition of the spectrum and of the whitened bases.
SPECTRAL = {name: 2.5e-6 for name in CASES if any(part in name for part in ("tsv_m", "iso_", "svc", "svd"))}


@pytest.mark.parametrize("name", [name for name in CASES if name not in DIFFER])
def test_their_numbers(name, monkeypatch):
    np.testing.assert_allclose(merged(name, monkeypatch), GOLDEN[f"out/{name}"], rtol=0, atol=SPECTRAL.get(name, 5e-7))


def test_fusionbench_keeps_negatives_where_everything_balances(monkeypatch):
    theirs, ours = (
        x - MODELS["base"] for x in (GOLDEN["out/fusionbench/ties_sum"], merged("fusionbench/ties_sum", monkeypatch))
    )
    [apart] = np.nonzero(np.abs(theirs - ours) > 5e-7)
    taus = GOLDEN["models"] - GOLDEN["base"]
    assert len(apart) == 2 and (taus[:, apart].sum(0) == 0).all()
    assert (theirs[apart] < 0).all() and (ours[apart] == 0).all()


@pytest.mark.parametrize("tool", ["mergekit", "fusionbench", "peft"])
def test_presets_are_what_translations_start_from(tool):
    for theirs, row in compat.ROWS[tool].items():
        assert row.ours in merging.METHODS, theirs
        operator = merging.build(row.ours, {"density": 0.5, "epsilon": 0.1} if "della" in theirs else {}, compat=tool)
        assert operator.stages


def test_presets():
    assert (
        merging.build("ties", {"density": 0.3, "weights": [1.0, 2.0]}, compat="mergekit").stages[0].stats[0].scope
        == "leaf"
    )
    assert (
        compat.preset("ties", "fusionbench")["trim"] == "official"
        and compat.preset("magmax", "fusionbench")["ties"] == "last"
    )
    assert compat.preset("task_arithmetic", "paper") == {"scale": 0.3, "normalize": False}
    name, options = compat.translate("mergekit", "ties", {"weight": {"a": 1.0, "b": 2.0}, "density": 0.3})
    assert str(merging.build(name, options)) == str(
        merging.build(name, {k: options[k] for k in ("density", "weights")}, compat="mergekit")
    )


@pytest.mark.parametrize(
    "tool, method, options, words",
    [
        ("mergekit", "ties", {"wieght": 1.0}, "mergekit's ties has no wieght; did you mean 'weight'?"),
        ("mergekit", "dare-ties", {"weight": 1.0}, "mergekit has no 'dare-ties'; did you mean 'dare_ties'?"),
        ("mergekit", "ties", {}, "mergekit's ties needs weight"),
        ("mergekit", "task_arithmetic", {"weight": 1.0, "density": 0.5}, "mergekit ignores it here"),
        ("mergekit", "nearswap", {"t": 0.1}, "no counterpart here: it is one task vector clipped"),
        ("mergekti", "ties", {}, "no tool called 'mergekti'; did you mean 'mergekit'?"),
        ("fusionbench", "ties_merging", {"treshold": 20}, "did you mean 'threshold'?"),
        ("fusionbench", "WUDIMerging", {}, "stops an optimizer early"),
        ("fusionbench", "dare/task_arithmetic", {"only_on_linear_weights": True}, "cannot be had by name"),
        ("peft", "ties", {"weights": [1.0]}, "peft's ties needs density"),
        ("peft", "linear", {"weights": [1.0, 2.0], "scaling": [1.0]}, "there are 2 weights but 1 scalings"),
        ("peft", "svd", {"weights": [1.0], "svd_rank": 2, "svd_clamp": 0.9}, "clamped factors are not offered"),
    ],
)
def test_slips_get_one_sentence(tool, method, options, words):
    with pytest.raises(ValueError) as error:
        compat.translate(tool, method, options)
    assert words in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="fusionbench has no della; it has average"):
        merging.build("della", compat="fusionbench")


def test_names_of_leaves_become_patterns():
    name, options = compat.translate("fusionbench", "ties_merging", {"remove_keys": ["a.b", "c"]})
    assert merging.left_out(merging.build(name, options), ["a.b", "a.b.c", "axb", "c", "d"]) == ["a.b", "c"]
    name, options = compat.translate(
        "fusionbench", "isotropic_merging/iso_c", {"exclude_keys": ["text_projection"], "scaling_factor": 2.0}
    )
    taus = {"text_projection": np.array([[[1.0, 2.0]], [[3.0, 4.0]]], np.float32)}
    assert merging.build(name, options)(taus)["text_projection"].tolist() == [[4.0, 6.0]]


def test_fusionbench_wraps_methods():
    config = {
        "_target_": "fusion_bench.method.TiesMergingAlgorithm",
        "threshold": 20,
        "scaling_factor": 0.3,
        "remove_keys": [],
    }
    name, options = compat.translate(
        "fusionbench", "SingularValueCalibrationWithBaseMethod", {"base_method": config, "alpha": 0.2}
    )
    assert str(merging.build(name, options)).startswith("top(share=0.2) | agree(")


# ---------------------------------------------------------------- their defects, and what we do instead
TAUS = {"w": np.array([[[4.0, -2.0, 1.0], [0.5, 3.0, -5.0]], [[3.0, 3.0, -1.0], [-2.0, 2.0, 0.25]]], np.float32)}
FLAT = TAUS["w"].reshape(2, -1)


def flat(operator, taus=TAUS):
    return np.asarray(operator(taus)["w"]).reshape(-1)


def test_fusionbench_1_linear_interpolation_runs():
    made = flat(merging.build(*compat.translate("fusionbench", "LinearInterpolationAlgorithm", {"t": 0.25})))
    np.testing.assert_allclose(made, 0.75 * FLAT[0] + 0.25 * FLAT[1], rtol=1e-6)


def test_fusionbench_2_tall_masks_compare_task_vectors():
    taus = GOLDEN["models"] - GOLDEN["base"]
    mask = np.asarray(merging.needed(jnp.asarray(taus), jnp.asarray(taus.sum(0)), 0.6))
    np.testing.assert_array_equal(mask, np.abs(taus) > np.float32(0.6) * np.abs(taus.sum(0) - taus))
    theirs = np.abs(GOLDEN["base"] - taus) > 0.6 * np.abs(taus.sum(0) - taus)  # holds θ0 against τ
    assert abs(mask.mean() - theirs.mean()) > 0.2


def test_fusionbench_3_ties_keeps_what_was_asked_for():
    x = {"w": np.random.default_rng(0).standard_normal((1, 1000)).astype(np.float32)}
    kept = lambda options: int((flat(merging.build("ties", options), x) != 0).sum())
    assert kept({"density": 0.2}) == 200 and kept({"density": 0.2, "trim": "official"}) == 201
    name, options = compat.translate("fusionbench", "ties_merging", {"threshold": 100})
    assert kept(options) == 1000  # theirs raises
    assert compat.translate("fusionbench", "ties_merging", {"threshold": 2})[1]["density"] == 0.02
    assert compat.translate("fusionbench", "ties_merging", {"threshold": 1})[1]["density"] == 1


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "ties", "dare_ties"])
def test_fusionbench_4_to_6_frozen_leaves_counters_and_inputs_stay(method):
    theta0 = {"w": np.ones(6, np.float32), "frozen": np.full(3, 1.5, np.float32), "num_batches_tracked": np.array(3)}
    thetas = [
        {"w": theta0["w"] + row, "frozen": theta0["frozen"].copy(), "num_batches_tracked": np.array(3 + t)}
        for t, row in enumerate(FLAT)
    ]
    before = [{k: v.copy() for k, v in theta.items()} for theta in (theta0, *thetas)]
    made = merging.merge(merging.build(method, {"density": 0.5} if "ties" in method else {}), thetas, theta0)
    np.testing.assert_array_equal(made["frozen"], theta0["frozen"])
    assert made["num_batches_tracked"] == 3
    for old, new in zip(before, (theta0, *thetas), strict=True):
        for k in old:
            np.testing.assert_array_equal(old[k], new[k])


def test_fusionbench_7_and_mergekit_4_weights_that_sum_to_nothing_are_refused():
    for tool, method, options in [
        ("fusionbench", "WeightedAverageAlgorithm", {"weights": [1, -1], "normalize": True}),
        ("mergekit", "linear", {"weight": [1.0, -1.0]}),
        ("mergekit", "task_arithmetic", {"weight": [1.0, -1.0], "normalize": True}),
    ]:
        with pytest.raises(ValueError, match="sum to 0 and cannot be normalized"):
            merging.build(*compat.translate(tool, method, options))
    with pytest.raises(ValueError, match=r"density lies in \(0, 1\]; got 0"):
        merging.build(*compat.translate("fusionbench", "DareTaskArithmetic", {"sparsity_ratio": 1.0}))


def test_mergekit_1_rescaling_by_density_is_exact_and_l1_keeps_norms():
    x = {"w": np.random.default_rng(0).standard_t(1.5, (1, 4000)).astype(np.float32)}
    kept = flat(merging.drop(density=0.1, rescale="inverse_density"), x)
    there = kept != 0
    np.testing.assert_allclose(kept[there], x["w"][0][there] / np.float32(0.1), rtol=1e-6)
    matched = flat(merging.drop(density=0.1, rescale="l1"), x)
    np.testing.assert_allclose(
        np.abs(matched).sum(), np.abs(x["w"]).sum(), rtol=1e-4
    )  # a sum of 4000 numbers in float32


def test_mergekit_2_della_takes_single_columns_and_says_what_fits():
    made = flat(merging.della(density=0.5, epsilon=0.1), {"w": np.ones((2, 8, 1), np.float32)})
    assert np.isfinite(made).all()
    with pytest.raises(ValueError, match=r"epsilon lies in \[0, min\(density, 1 - density\)\]"):
        merging.build(*compat.translate("mergekit", "della", {"weight": 1.0, "density": 0.9}))


def test_mergekit_3_gamma_works_at_density_one():
    made = flat(merging.build("breadcrumbs", {"gamma": 0.2}, compat="mergekit"), {"w": FLAT[:1]})
    assert made.tolist() == [4.0, -2.0, 1.0, 0.5, 3.0, 0.0]


def test_mergekit_5_a_negative_weight_negates():
    name, options = compat.translate("mergekit", "ties", {"weight": {"a": -1.0}})
    np.testing.assert_array_equal(flat(merging.build(name, options), {"w": FLAT[:1]}), -FLAT[0])


def test_mergekit_6_not_a_number_is_refused_by_name():
    with pytest.raises(ValueError, match="layer.w holds NaN or infinite entries"):
        merging.average()({"layer": {"w": np.array([[1.0, np.nan], [1.0, 2.0]], np.float32)}})


def adapter(rank, seed):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return {"w": merging.LowRank(draw(12, rank), draw(rank, 10))}


def dense(tau):
    return np.asarray(tau["w"].dense() if hasattr(tau["w"], "dense") else tau["w"])


def test_peft_1_products_are_merged_not_factors():
    taus = [adapter(4, 0), adapter(4, 1)]
    exact = sum(dense(tau) for tau in taus)
    np.testing.assert_allclose(dense(merging.task_arithmetic(scale=1.0)(taus)), exact, rtol=1e-5, atol=1e-5)
    factors = {k: np.stack([np.asarray(getattr(tau["w"], k)) for tau in taus]) for k in "AB"}
    rows = {"lora_A": factors["A"], "lora_B": factors["B"]}
    theirs = merging.build(*compat.translate("peft", "linear", {"weights": [1.0, 1.0]}))(rows)
    error = np.linalg.norm(np.asarray(theirs["lora_B"]) @ np.asarray(theirs["lora_A"]) - exact) / np.linalg.norm(exact)
    assert error > 0.8  # cross terms B_1 A_2 as large as the sum itself


def test_peft_4_ranks_may_differ():
    taus = [adapter(2, 0), adapter(4, 1)]
    np.testing.assert_allclose(
        dense(merging.average()(taus)), sum(dense(tau) for tau in taus) / 2, rtol=1e-5, atol=1e-5
    )
