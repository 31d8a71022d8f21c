"""Models of other models' layers: mergekit's numbers, a plain loop, the plan, a merge that goes on, and slips."""
import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy
import yaml

from tests.test_disk_recipes import layered, save, write
from tvjax import disk
from tvjax.disk import merge, moving, recipe, slices

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "slices.npz")
ABOUT = json.loads(str(GOLDEN["about"]))


def split(flat, shapes):
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    return {name: x.reshape(shape) for (name, shape), x in zip(shapes.items(), np.split(flat, ends[:-1]), strict=True)}


def named(value, folders):
    """A recipe of mergekit's with paths for the names of models."""
    if isinstance(value, list):
        return [named(one, folders) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: folders[one] if name in ("model", "base_model") else named(one, folders)
            for name, one in value.items()}


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llamas")
    return {name: write(folder / name, split(GOLDEN[name], ABOUT["names"]), num_hidden_layers=4,
                        layer_types=[f"{name}{i}" for i in range(4)]) for name in ("base", "a", "b")}


def load(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("case", ABOUT["cases"])
def test_mergekits_numbers(case, llamas, tmp_path):
    given = named(ABOUT["cases"][case]["recipe"], llamas)
    chosen = moving.read(save(tmp_path / "m.yaml", {**given, "dtype": "float32"}))
    found, config = load(disk.run(chosen, tmp_path / "out", say=lambda line: None))
    wanted = split(GOLDEN[f"out/{case}"], ABOUT["cases"][case]["names"])
    assert set(found) == set(wanted) and config["num_hidden_layers"] == ABOUT["cases"][case]["layers"]
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-6, err_msg=name)
    again, _ = load(disk.run(recipe.from_yaml(tmp_path / "out" / "recipe.yaml"), tmp_path / "again",
                             say=lambda line: None))
    for name, x in found.items():
        np.testing.assert_array_equal(again[name], x)


def test_lists_of_one_entry_a_layer_are_stacked_too(llamas, tmp_path):
    given = named(ABOUT["cases"]["passthrough"]["recipe"], llamas)
    with merge_ready(moving.read(save(tmp_path / "m.yaml", given)), tmp_path / "out") as held:
        config = json.loads(held.ready.side["config.json"])
        assert config["layer_types"] == ["a0", "a1", "a2", "b1", "b2", "b3"]
        said = held.ready.describe()
    assert "base" in said and f"{llamas['a']} 0–2 + {llamas['b']} 1–3" in said and not (tmp_path / "out").exists()


def merge_ready(chosen, out):
    import contextlib
    return contextlib.closing(merge.prepare(chosen, out))


@pytest.fixture
def three(tmp_path):
    return {name: write(tmp_path / name, layered(i), n_layer=3) for i, name in enumerate(("base", "a", "b"))}


def stacked(three, **changes):
    """Layers 2, 0, 0 of the base, under those of a and b."""
    cut = [{"": [three["base"], first, first + 1], "a": [three["a"], first, first + 1],
            "b": [three["b"], own, own + 1]} for first, own in ((2, 2), (0, 1), (0, 0))]
    fields = dict(base=three["base"], models={"a": three["a"], "b": three["b"]}, method="ties",
                  options={"density": 0.5, "weights": [1.0, 0.5]}, slices=cut)
    return recipe.Recipe(**{**fields, **changes})


def test_slices_are_the_merge_of_stacks_built_by_hand(three, tmp_path):
    order = {"base": (2, 0, 0), "a": (2, 0, 0), "b": (2, 1, 0)}
    for i, name in enumerate(three):
        own, rows = layered(i), {}
        for at, layer in enumerate(order[name]):
            for part in ("attn", "mlp"):
                rows[f"model.layers.{at}.{part}.weight"] = own[f"model.layers.{layer}.{part}.weight"]
        outside = {key: x for key, x in own.items() if ".layers." not in key}
        write(tmp_path / "by hand" / name, {**outside, **rows})
    plain = recipe.Recipe(base=str(tmp_path / "by hand" / "base"), models={
        name: str(tmp_path / "by hand" / name) for name in "ab"}, options={"density": 0.5, "weights": [1.0, 0.5]})
    wanted, _ = load(disk.run(plain, tmp_path / "wanted", say=lambda line: None))
    found, config = load(disk.run(stacked(three), tmp_path / "out", say=lambda line: None))
    assert config["n_layer"] == 3 and set(found) == set(wanted)
    for name, x in wanted.items():
        np.testing.assert_array_equal(found[name], x)


def test_a_stack_goes_on_where_it_was_stopped(three, tmp_path, monkeypatch):
    chosen = stacked(three, max_shard_size=60)
    whole = disk.run(chosen, tmp_path / "whole", say=lambda line: None)
    read, calls = slices.Stacked.read, []

    def stop(self, *args):
        calls.append(args)
        if len(calls) > 40:
            raise KeyboardInterrupt
        return read(self, *args)
    monkeypatch.setattr(slices.Stacked, "read", stop)
    with pytest.raises(KeyboardInterrupt):
        disk.run(chosen, tmp_path / "out", say=lambda line: None)
    monkeypatch.undo()
    out = disk.run(chosen, tmp_path / "out", say=lambda line: None)
    shards = sorted(path.name for path in whole.glob("*.safetensors"))
    assert len(shards) > 3 and all((out / name).read_bytes() == (whole / name).read_bytes() for name in shards)


def given(three, *slices_, method="linear", **more):
    return {"merge_method": method, "slices": [{"sources": list(one)} for one in slices_], **more}


def source(three, name, part, **numbers):
    return {"model": three[name], "layer_range": part, "parameters": numbers}


SLIPS = {
    "beyond": (lambda t: given(t, [source(t, "a", [0, 5], weight=1)]), r"layers 0 to 5 of .* are asked for; it has 3"),
    "backwards": (lambda t: given(t, [source(t, "a", [2, 1], weight=1)]), r"layer_range is \[first, last\]"),
    "lengths": (lambda t: given(t, [source(t, "a", [0, 2], weight=1), source(t, "b", [0, 1], weight=1)]),
                "entry 1: its sources have other numbers of layers"),
    "counts": (lambda t: given(t, [source(t, "a", [1, 2], weight=1), source(t, "b", [0, 1], weight=1)],
                               [source(t, "a", [0, 1], weight=1)]), "have other numbers of sources"),
    "twice": (lambda t: given(t, [source(t, "a", [1, 2], weight=1), source(t, "a", [0, 1], weight=1)]),
              "name .*a more than once side by side"),
    "some": (lambda t: given(t, [source(t, "a", [1, 2], weight=1)], [source(t, "a", [0, 1])]),
             "some of the slices of .* have a weight and others have none"),
    "two at once": (lambda t: given(t, [source(t, "a", [1, 2]), source(t, "b", [0, 1])], method="passthrough"),
                    "passthrough takes one model at a time"),
    "slerp": (lambda t: given(t, [source(t, "a", [1, 2]), source(t, "b", [0, 1])], method="slerp", parameters={
        "t": 0.5}), "slerp goes from base_model to one other model"),
    "a mistyped key": (lambda t: given(t, [{"modle": t["a"]}]), "has no 'modle'; did you mean 'model'"),
}


@pytest.mark.parametrize("case", SLIPS)
def test_slips_are_sentences(case, three, tmp_path):
    make, said = SLIPS[case]
    with pytest.raises(ValueError, match=said):
        merge_ready(moving.read(save(tmp_path / "m.yaml", make(three))), tmp_path / "out").__enter__()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change, said", [
    ({"slices": [{"a": ["x", 0, 1]}]}, r'slice 1 needs \[model, first, last\] for the base'),
    ({"slices": [{"": ["x", 0, 1], "a": ["x", 1, 1], "b": ["x", 0, 1]}]}, r"slice 1: a has \[model, first, last\]"),
    ({"slices": [{"": ["x", 0, 1], "a": ["x", 0, 2], "b": ["x", 0, 1]}]}, "slice 1 takes other numbers of layers"),
    ({"output": "lora"}, "slices make a model of other layers"),
])
def test_recipes_that_do_not_fit(change, said, three):
    with pytest.raises(ValueError, match=said):
        stacked(three, **change)


def test_models_whose_layers_cannot_be_told(tmp_path, three):
    x = np.ones((2, 3), np.float32)
    towers = write(tmp_path / "towers", {"text.layers.0.w": x, "vision.layers.0.w": x})
    plain = write(tmp_path / "plain", {"w": x})
    other = write(tmp_path / "other", {"h.0.w": x})
    for models, said in (([towers], "several stacks of layers"), ([plain], "no numbered layers"),
                         ([three["a"], other], "one stack needs one kind of names")):
        cut = [{"": [model, 0, 1], "a": [model, 0, 1]} for model in models]
        with pytest.raises(ValueError, match=said):
            merge_ready(recipe.Recipe(base=models[0], models={"a": models[0]}, slices=cut), tmp_path / "out")


def test_yaml_holds_slices(three, tmp_path):
    (tmp_path / "r.yaml").write_text(recipe.to_yaml(stacked(three)))
    assert recipe.from_yaml(tmp_path / "r.yaml") == stacked(three)
    assert yaml.safe_load((tmp_path / "r.yaml").read_text())["slices"][0][""] == [three["base"], 2, 3]
