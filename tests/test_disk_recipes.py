"""mergekit's and FusionBench's recipes, from disk to disk, give the numbers that those tools gave."""

import json
import pathlib
import runpy

import numpy as np
import pytest
import safetensors.numpy
import yaml

from tvjax import disk, run
from tvjax.disk import moving, recipe
from tvjax.merging import compat, registry
from tvjax.merging.numbers import resolve

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "peers.npz")
ABOUT = json.loads(str(GOLDEN["about"]))
SHAPES = ABOUT["leaves"]
ALL = {"base": GOLDEN["base"], **{f"m{t}": row for t, row in enumerate(GOLDEN["models"])}}
# Not here: what draws at random (other draws), and what differs on purpose (test_compat says how).
CASES = {name.partition("/")[2]: case for name, case in ABOUT["cases"].items() if case["tool"] == "mergekit"
         and not any(part in name for part in ("dare", "della", "nearswap", "breadcrumbs_default"))}
CASES["dare_linear_full"] = ABOUT["cases"]["mergekit/dare_linear_full"]  # drops nothing


def split(flat):
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])
    parts = np.split(flat, ends[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def write(folder, flat, **config):
    folder.mkdir(parents=True)
    safetensors.numpy.save_file({n: np.ascontiguousarray(x) for n, x in flat.items()}, folder / "model.safetensors",
                                metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", **config}))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp("models") / name, split(flat)) for name, flat in ALL.items()}


def mergekit_yaml(case, folders):
    """A recipe as mergekit's users write it: numbers of models beside them, others at the end."""
    each = {name: value for name, value in case["options"].items() if isinstance(value, dict)}
    models = [{"model": folders[m], "parameters": {name: value[m] for name, value in each.items() if m in value}}
              for m in case["inputs"]]
    given = {"merge_method": case["method"], "models": models, "dtype": "float32",
             "parameters": {name: value for name, value in case["options"].items() if name not in each}}
    return given | ({"base_model": folders[case["base"]]} if case["base"] else {})


def save(path, given):
    path.write_text(yaml.safe_dump(given))
    return path


def merged(chosen, out):
    made = disk.run(chosen, out, say=lambda line: None)
    return safetensors.numpy.load_file(made / "model.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_mergekits_numbers_through_the_disk(name, folders, tmp_path):
    chosen = moving.read(save(tmp_path / "merge.yaml", mergekit_yaml(CASES[name], folders)))
    found = merged(chosen, tmp_path / "out")
    for leaf, x in split(GOLDEN[f"out/mergekit/{name}"]).items():
        np.testing.assert_allclose(found[leaf], x, rtol=0, atol=1e-6)
    again = merged(recipe.from_yaml(tmp_path / "out" / "recipe.yaml"), tmp_path / "again")
    for leaf, x in found.items():
        np.testing.assert_array_equal(again[leaf], x)


def test_fusionbenchs_numbers_through_the_disk(folders, tmp_path):
    models = ",".join(folders[m] for m in ("m0", "m1", "m2"))
    cases = {name: case for name, case in ABOUT["cases"].items() if case["tool"] == "fusionbench"}
    for short in ("task_arithmetic", "ties_mean", "simple_average", "weighted_average", "weighted_sum", "magmax"):
        case = cases[f"fusionbench/{short}"]
        given = {"_target_": f"fusion_bench.method.{case['method']}", **case["options"]}
        file = save(tmp_path / f"{short}.yaml", given)
        found = merged(moving.read(file, folders["base"], models), tmp_path / short)
        for leaf, x in split(GOLDEN[f"out/fusionbench/{short}"]).items():
            np.testing.assert_allclose(found[leaf], x, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="a merge needs a base"):
        moving.read(file)


# ---------------------------------------------------------------- gradients, filters, slices
BLOCKS = [f"model.layers.{i}.{part}.weight" for i in range(3) for part in ("attn", "mlp")]


def layered(seed):
    rng = np.random.default_rng(seed)
    names = ["model.embed_tokens.weight", *BLOCKS, "model.norm.weight"]
    return {name: rng.standard_normal((2, 3)).astype(np.float32) for name in names}


@pytest.fixture
def three(tmp_path):
    return {name: write(tmp_path / name, layered(i)) for i, name in enumerate(("base", "a", "b"))}


def test_gradients_filters_and_files_that_run_again(three, tmp_path):
    given = {"merge_method": "task_arithmetic", "base_model": three["base"], "tokenizer_source": "base", "models": [
        {"model": three["base"]},
        {"model": three["a"], "parameters": {"weight": [{"filter": "attn", "value": [0, 0.5, 1]}, {"value": 0.25}]}},
        {"model": three["b"], "parameters": {"weight": [0.0, 1.0]}}], "parameters": {"lambda": 0.5}}
    chosen = moving.read(save(tmp_path / "m.yaml", given))
    found, base, a, b = merged(chosen, tmp_path / "out"), layered(0), layered(1), layered(2)
    for name, x in found.items():
        depth = int(name.split(".")[2]) / 2 if "layers" in name else 0
        step = (depth if "attn" in name else 0.25) * (a[name] - base[name]) + depth * (b[name] - base[name])
        np.testing.assert_allclose(x, base[name] + 0.5 * step, rtol=0, atol=1e-6)
    again = merged(recipe.from_yaml(tmp_path / "out" / "recipe.yaml"), tmp_path / "again")
    for name, x in found.items():
        np.testing.assert_array_equal(again[name], x)


def sliced(three, *ranges, **change):
    return {"merge_method": "slerp", "base_model": three["a"], "dtype": "float32", "parameters": {"t": [
        {"filter": "attn", "value": [0, 1]}, {"value": 0.5}]}, "slices": [
            {"sources": [{"model": three[m], "layer_range": list(part)} for m in "ab"]} for part in ranges]} | change


def test_slices_of_all_layers(three, tmp_path):
    one = moving.read(save(tmp_path / "one.yaml", sliced(three, (0, 3))))
    assert one.origin == "zero" and list(one.models) == ["a", "b"] and not one.slices
    found, a, b = merged(one, tmp_path / "out"), layered(1), layered(2)
    for name, t in (("model.layers.0.attn.weight", 0), ("model.layers.2.attn.weight", 1)):
        np.testing.assert_allclose(found[name], (a, b)[t][name], rtol=0, atol=1e-6)
    plain = [moving.read(save(tmp_path / "p.yaml", sliced(three, *ranges, parameters={"t": 0.5})))
             for ranges in ([(0, 3)], [(0, 1), (1, 3)])]
    assert plain[0] == plain[1]


def test_the_command_takes_a_foreign_recipe(three, tmp_path, capsys):
    save(tmp_path / "m.yaml", {"merge_method": "linear", "out_dtype": "float16", "models": [
        {"model": three[m], "parameters": {"weight": w}} for m, w in (("a", 1), ("b", 3))]})
    config = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "configs" / "merge.py"))["get_config"]()
    config.recipe, config.out = str(tmp_path / "m.yaml"), str(tmp_path / "out")
    run.run(config)
    found, a, b = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors"), layered(1), layered(2)
    for name, x in found.items():
        assert x.dtype == np.float16
        np.testing.assert_allclose(x.astype(np.float32), (a[name] + 3 * b[name]) / 4, rtol=1e-3, atol=1e-3)


def test_an_adapter_on_its_base(three, tmp_path):
    given = {"merge_method": "task_arithmetic", "base_model": three["base"], "models": [
        {"model": f"{three['base']}+some/adapter", "parameters": {"weight": 1.0}},
        {"model": {"model": {"path": "x/y", "revision": "r1"}}, "parameters": {"weight": 1.0}}]}
    assert moving.read(save(tmp_path / "m.yaml", given)).models == {"adapter": "some/adapter", "y@r1": "x/y@r1"}
    given["models"][0]["model"] = "other+some/adapter"
    with pytest.raises(ValueError, match="adapter some/adapter is to be fused with other, here only with base_model"):
        moving.read(save(tmp_path / "m.yaml", given))


@pytest.mark.parametrize("said", [{"tokenizer_source": "union"}, {"tokenizer": {"source": "union"}}])
def test_the_tokens_of_all(said, tmp_path):
    assert moving.read(save(tmp_path / "m.yaml", {**FINE, **said})).vocabulary == "union"


def test_rules_are_spelt_as_they_are_read():
    _, options = compat.translate("mergekit", "ties", {
        "weight": {"a": [0.1, 0.9], "b": 0.5}, "density": {"a": [{"filter": "default", "value": 0.3}, {"value": 1.0}],
                                                           "b": [{"filter": "name", "value": [0, 1]}, {"value": 0.1}]}})
    spelt = yaml.safe_load(yaml.safe_dump(registry.shorthand.spelt(options)))
    for option in ("weights", "density"):
        read = registry._value(option, spelt[option])
        for name, depth in (("layers.0.default", 0.0), ("layers.1.name", 0.25), ("other", 0.0), ("layers.2.w", 1.0)):
            np.testing.assert_array_equal(resolve(read, name, depth), resolve(options[option], name, depth))


MODELS = [{"model": "x/a", "parameters": {"weight": 1.0}}, {"model": "x/b", "parameters": {"weight": 1.0}}]
FINE = {"merge_method": "ties", "base_model": "x/base", "models": MODELS}
one = lambda **numbers: {**FINE, "models": [{"model": "x/a", "parameters": numbers}]}
REFUSED = {
    "a mistyped key": ({**FINE, "merge_methd": 1}, "has no 'merge_methd'; did you mean 'merge_method'"),
    "a mistyped method": ({**FINE, "merge_method": "dare-ties"}, "no 'dare-ties'; did you mean 'dare_ties'"),
    "a mistyped number": ({**FINE, "parameters": {"densty": 0.5}}, "has no densty; did you mean 'density'"),
    "of a model": (one(wieght=1), "has no wieght; did you mean 'weight'"),
    "in a model": ({**FINE, "models": [{"modle": "x"}]}, "entry 1 has no 'modle'; did you mean 'model'"),
    "no model": ({**FINE, "models": [{"parameters": {}}]}, "entry 1: it lacks model"),
    "no weight": ({**FINE, "models": [*MODELS, {"model": "x/c"}]}, "c in .* has no weight"),
    "no weights": ({**FINE, "models": ["x/a"]}, "needs weight"),
    "of the merge": ({**FINE, "models": [{**MODELS[0], "parameters": {"weight": 1, "lambda": 2}}]},
                     "lambda in .* holds for the whole merge"),
    "no base": ({**FINE, "base_model": None}, "lacks base_model, which ties takes differences from"),
    "the tokenizer": ({**FINE, "tokenizer_source": "x/a"}, "tokenizer_source of .* is 'x/a': here the base's"),
    "the tokenizer's tokens": ({**FINE, "tokenizer": {"source": "base", "tokens": {}}}, "has no 'tokens'"),
    "the chat template": ({**FINE, "chat_template": "auto"}, "chat_template of .*: here the base's is kept"),
    "modules": ({**FINE, "modules": {"text": {}}}, "modules in .* cannot be had here"),
    "nothing": ({"merge_method": "ties", "base_model": "x"}, "needs either models or slices"),
    "passthrough": ({**FINE, "merge_method": "passthrough"}, "passthrough takes one model at a time"),
    "nearswap": ({**FINE, "merge_method": "nearswap"}, "nearswap has no counterpart here"),
    "models": ({**FINE, "models": "x/a"}, "models of .*: a list is needed"),
    "parameters": ({**FINE, "parameters": [1]}, "parameters of .* map names to numbers"),
    "twice": ({**FINE, "models": [MODELS[0], MODELS[0]]}, "names x/a more than once"),
    "rescale": ({**FINE, "parameters": {"rescale": True}}, "rescaling after a trim by magnitude is not offered"),
    "dtype": ({**FINE, "dtype": "float31"}, "no out_dtype 'float31'; did you mean 'float32'"),
    "slerp": ({**FINE, "merge_method": "slerp"}, "slerp goes from base_model to one other"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_is_said_in_a_sentence(case, tmp_path):
    given, said = REFUSED[case]
    with pytest.raises(ValueError, match=said) as caught:
        moving.read(save(tmp_path / "m.yaml", given))
    assert "\n" not in str(caught.value)
