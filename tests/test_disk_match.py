"""Names, prefixes, heads, vocabularies, tied weights: every misfit is said at once, every policy does what it says."""

import json
import runpy

import numpy as np
import pytest
import safetensors.numpy

from tvjax import disk, run
from tvjax.disk import recipe
from tvjax.disk.match import match
from tvjax.disk.readers import open_checkpoint


def write(folder, tensors, **config):
    folder.mkdir(parents=True)
    flat = {name: np.asarray(x) for name, x in tensors.items()}
    safetensors.numpy.save_file(flat, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ones(*shape, by=1.0):
    return np.full(shape, by, np.float32)


def merge(base, models, out, **settings):
    made = disk.merge_checkpoints(base, models, out, "average", say=lambda line: None, **settings)
    return safetensors.numpy.load_file(made / "model.safetensors")


BODY = {"embed_tokens.weight": ones(4, 2), "layers.0.w": ones(3, 3), "ids": np.arange(3)}


def test_every_problem_is_said_at_once(tmp_path):
    base = write(tmp_path / "base", {**BODY, "b": ones(2)}, model_type="left")
    a = write(tmp_path / "a", {**BODY, "layers.0.w": ones(3, 4), "b": ones(2)}, model_type="right")
    b = write(tmp_path / "b", {**BODY, "embed_tokens.weight": ones(6, 2), "b": ones(2), "c": ones(1)})
    c = write(tmp_path / "c", {**BODY, "layers.0.w": np.ones((3, 3), np.int8)}, model_type="right")
    with pytest.raises(ValueError) as caught:
        merge(base, [a, b, c], tmp_path / "out")
    for said in (
        "a is of another architecture or size: layers.0.w [3, 4] vs [3, 3]",
        "embed_tokens.weight has 6 rows in b, 4 in the base",
        "b has c, which the base lacks (extra=ignore",
        "layers.0.w of c is of dtype int8",
        "c lacks b, which the base has (missing=base keeps the base's); the base is a left, the model a right",
    ):
        assert said in str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="there is no file or directory.*; there is no file or directory"):
        merge(tmp_path / "none", [a, tmp_path / "neither"], tmp_path / "out")


def test_policies_for_missing_and_extra(tmp_path):
    base = write(tmp_path / "base", {**BODY, "b": ones(2)})
    a = write(tmp_path / "a", {**{n: x + 1 for n, x in BODY.items()}, "c": ones(1)})
    made = merge(base, [a], tmp_path / "out", missing="base", extra="ignore")
    assert set(made) == {*BODY, "b"}
    np.testing.assert_array_equal(made["b"], ones(2))
    np.testing.assert_array_equal(made["layers.0.w"], ones(3, 3, by=2.0))
    np.testing.assert_array_equal(made["ids"], np.arange(3))


@pytest.mark.parametrize("ours, theirs", [("", "model."), ("transformer.", ""), ("bert.", "")])
def test_prefixes_are_seen(ours, theirs, tmp_path):
    named = lambda prefix, by: {prefix + name: ones(*x.shape, by=by) for name, x in BODY.items()}
    base = write(tmp_path / "base", named(ours, 1.0))
    a = write(tmp_path / "a", {**named(theirs, 3.0), "score.weight": ones(2, 2)})
    made = merge(base, [a], tmp_path / "out")
    assert set(made) == set(named(ours, 0)) and all((x == 3).all() for x in made.values())


def test_heads_stay_with_the_base(tmp_path):
    base = write(tmp_path / "base", {**BODY, "classifier.weight": ones(10, 2)})
    a = write(tmp_path / "a", {**BODY, "classifier.weight": ones(3, 2)})
    b = write(tmp_path / "b", {**BODY, "classifier.weight": ones(10, 2, by=5.0)})
    np.testing.assert_array_equal(merge(base, [a, b], tmp_path / "out")["classifier.weight"], ones(10, 2))
    with pytest.raises(ValueError, match="a is of another architecture or size"):
        merge(base, [a, b], tmp_path / "refused", heads="refuse")


def test_vocabularies(tmp_path):
    base = write(tmp_path / "base", BODY)
    a = write(tmp_path / "a", {**BODY, "embed_tokens.weight": ones(6, 2, by=3.0)})
    b = write(tmp_path / "b", {**BODY, "embed_tokens.weight": ones(3, 2, by=5.0)})
    made = merge(base, [a, b], tmp_path / "base's", vocabulary="base")
    np.testing.assert_array_equal(made["embed_tokens.weight"], np.array([[4, 4]] * 3 + [[2, 2]], np.float32))
    made = merge(base, [a, b], tmp_path / "backbone", vocabulary="backbone")
    np.testing.assert_array_equal(made["embed_tokens.weight"], ones(4, 2))


def test_tied_weights_are_merged_once(tmp_path):
    both = lambda by, head: {"embed_tokens.weight": ones(4, 2, by=by), "lm_head.weight": ones(4, 2, by=head)}
    tied = lambda by, head=None: {**BODY, **both(by, head or by)}
    base = write(tmp_path / "base", tied(1.0), tie_word_embeddings=True)
    a = write(tmp_path / "a", tied(3.0), tie_word_embeddings=True)
    made = merge(base, [a], tmp_path / "out")
    assert set(made) == set(BODY) and (made["embed_tokens.weight"] == 3).all()
    alone = write(tmp_path / "alone", {**BODY, "embed_tokens.weight": ones(4, 2, by=5.0)}, tie_word_embeddings=True)
    assert (merge(base, [a, alone], tmp_path / "both")["embed_tokens.weight"] == 4).all()
    b = write(tmp_path / "b", tied(3.0, 4.0), tie_word_embeddings=True)
    with pytest.raises(ValueError, match="b says that lm_head.weight and embed_tokens.weight are tied, but its file"):
        merge(base, [b], tmp_path / "refused")
    c = write(tmp_path / "c", tied(3.0), tie_word_embeddings=False)
    with pytest.raises(ValueError, match="the base ties lm_head.weight to embed_tokens.weight, c does not"):
        merge(base, [c], tmp_path / "refused")


def test_only_and_exclude(tmp_path):
    base, a = write(tmp_path / "base", BODY), write(tmp_path / "a", {n: x + 1 for n, x in BODY.items()})
    made = merge(base, [a], tmp_path / "out", exclude="embed")
    assert (made["embed_tokens.weight"] == 1).all() and (made["layers.0.w"] == 2).all()
    with pytest.raises(ValueError, match="there is nothing to merge"):
        merge(base, [a], tmp_path / "none", only="nothing")
    with pytest.raises(ValueError, match="exclude is no regular expression"):
        merge(base, [a], tmp_path / "none", exclude="(")
    with pytest.raises(ValueError, match="no policy 'mising'; did you mean 'missing'"):
        match(open_checkpoint(base), {"a": open_checkpoint(a)}, policies={"mising": "base"})


def test_tensors_without_entries_pass(tmp_path):
    base = write(tmp_path / "base", {**BODY, "none": np.zeros((0, 3), np.float32)})
    a = write(tmp_path / "a", {**{n: x + 1 for n, x in BODY.items()}, "none": np.zeros((0, 3), np.float32)})
    made = merge(base, [a], tmp_path / "out")
    assert made["none"].shape == (0, 3) and (made["layers.0.w"] == 2).all()


def test_names_of_models():
    assert recipe.named(["runs/cars", "eu=runs/eurosat"]) == {"cars": "runs/cars", "eu": "runs/eurosat"}
    assert recipe.named("a/model.safetensors") == {"model": "a/model.safetensors"}
    with pytest.raises(ValueError, match="two models are called 'cars': write one of them as name=b/cars"):
        recipe.named("a/cars,b/cars")


def test_slips_in_recipes(tmp_path):
    for given, said in [
        ({"base": "b"}, "lacks models"),
        ({"base": "b", "models": {"a": "a"}, "metod": "ties"}, "no field 'metod'; did you mean 'method'"),
        ({"base": "b", "models": {}}, "the list of models is empty"),
        ({"base": "b", "models": ["a"], "heads": "both"}, "no heads 'both'"),
    ]:
        with pytest.raises(ValueError, match=said):
            recipe.from_fields(given)
    (tmp_path / "bad.yaml").write_text("a: [")
    for path, said in [(tmp_path / "bad.yaml", "is no recipe"), (tmp_path / "none.yaml", "there is no recipe")]:
        with pytest.raises(ValueError, match=said):
            disk.from_yaml(path)
    with pytest.raises(ValueError, match="a size is a number with KB"):
        merge(*[write(tmp_path / n, BODY) for n in "ab"], tmp_path / "out", max_shard_size="5 apples")


@pytest.fixture
def get_config(request):
    return runpy.run_path(str(request.config.rootpath / "configs" / "merge.py"))["get_config"]


def test_the_command_plans_and_merges(get_config, tmp_path, capsys):
    config = get_config("ties")
    config.base = str(write(tmp_path / "base", BODY))
    config.models = ",".join(str(write(tmp_path / name, {n: x + 1 for n, x in BODY.items()})) for name in "ab")
    config.out, config.plan = str(tmp_path / "out"), True
    config.merge.density = 0.5
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run.run(config, say=print) is None
    assert "to read: 432 bytes (2 passes over 204 bytes)" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    config.plan = False
    assert run.run(config, say=print).name == "out"
    again = get_config("average")
    again.recipe, again.out = str(tmp_path / "out" / "recipe.yaml"), str(tmp_path / "again")
    run.run(again, say=print)
    one, two = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert one == two and disk.from_yaml(tmp_path / "again" / "recipe.yaml").options["density"] == 0.5
    with pytest.raises(ValueError, match="no merge called 'tise'; did you mean 'ties'"):
        get_config("tise")
    config.out = ""
    with pytest.raises(ValueError, match="needs out"):
        run.run(config, say=print)
