"""A plan refuses slips before anything is computed; a folder is one experiment's; λ and α are chosen as papers say."""
import json
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from tvjax import experiment
from tvjax.experiment import merges, planning, workdir
from tvjax.experiment.loading import Problem

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def config(**changes):
    found = runpy.run_path(str(CONFIGS / "quickstart.py"))["get_config"]("runlocal")
    for name, value in changes.items():
        found[name] = value
    return found


def one(**options):
    return {"merges": (ConfigDict(options),)}


SLIPS = {
    "an empty list of tasks": (dict(tasks=()), "tasks is empty"),
    "an unknown task": (dict(tasks=("greek", "digit")), "did you mean 'digits'"),
    "a task twice": (dict(tasks=("greek", "greek")), "more than once"),
    "two tasks in one string": (dict(tasks=("greek,digits",)), "several tasks are written"),
    "the control task": (dict(tasks=("greek", "control")), "control"),
    "more tasks than there are": (dict(counts=(3,)), "there are 2"),
    "no seeds": (dict(seeds=()), "seeds needs at least one"),
    "an unknown operator": (one(name="tise"), "did you mean 'ties'"),
    "an operator without a name": (one(density=0.1), "a merge has a name"),
    "an unknown hyper-parameter": (one(name="ties", densty=0.1), "did you mean 'density'"),
    "a hyper-parameter out of range": (one(name="ties", density=1.5), "density lies in"),
    "a grid for a fixed scale": (one(name="average", scales=(0.5,)), "its scale is fixed"),
    "two merges of one name": (dict(merges=(ConfigDict(dict(name="ties")),) * 2), "another label"),
    "a label that leaves the folder": (one(name="ties", label="../ties"), "names a directory"),
    "no merges": (dict(merges=()), "merges is empty"),
    "a grid with nan": (dict(scales=(0.0, float("nan"))), "no finite number"),
    "an unknown split": (dict(select_on="train"), "select_on is"),
    "a folder that is not there": (dict(finetuned=("greek=nowhere",)), "no directory nowhere"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_one_sentence(slip):
    changes, sentence = SLIPS[slip]
    with pytest.raises(ValueError, match=sentence) as caught:
        experiment.plan(config(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field, value, sentence", [
    ("examples", dict(train=0, val=1, test=1), "examples.train"),
    ("examples", dict(tran=1, val=1, test=1), "did you mean 'train'"),
    ("finetune", dict(stesp=1), "did you mean 'steps'"), ("finetune", dict(steps=10, warmup=10), "warmup"),
])
def test_slips_in_groups(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        experiment.plan({**config().to_dict(), field: value})


def test_unknown_and_missing_fields():
    given = experiment.plain(config())
    with pytest.raises(ValueError, match="did you mean 'scales'"):
        experiment.plan({**given, "scale": 1})
    with pytest.raises(ValueError, match="lacks seeds"):
        experiment.plan({name: value for name, value in given.items() if name != "seeds"})


def test_a_scale_is_searched_unless_it_is_given():
    made = experiment.plan(config(merges=(
        ConfigDict(dict(name="ties")), ConfigDict(dict(name="ties", label="untuned", scale=1.0)),
        ConfigDict(dict(name="ties", label="wide", scales=(0.5, 2.0))), ConfigDict(dict(name="average")))))
    assert [merge.scales for merge in made.merges] == [(0.0, 0.5, 1.0), None, (0.5, 2.0), None]


def test_what_a_merge_saw_is_said():
    made = experiment.plan(config(merges=(
        ConfigDict(dict(name="average")), ConfigDict(dict(name="ties")),
        ConfigDict(dict(name="consensus", lam="val")))))
    said = [merges.data_used(merge, made) for merge in made.merges]
    assert said == ["none", "val labels for α", "val labels for λ and α"]


def test_a_folder_is_one_experiments(tmp_path):
    ours = experiment.plain(config())
    workdir.check_owner(tmp_path / "new", ours)
    workdir.write_text(tmp_path / "config.json", json.dumps(ours))
    workdir.check_owner(tmp_path, ours)
    workdir.check_owner(tmp_path, {**ours, "seeds": [0, 1], "merges": ours["merges"][:1]})
    with pytest.raises(ValueError, match="belongs to another config .finetune.lr 0.0003 there, 0.1 here"):
        workdir.check_owner(tmp_path, {**ours, "finetune": {**ours["finetune"], "lr": 0.1}})


def test_a_folder_of_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="holds other files"):
        workdir.check_owner(tmp_path, {})
    with pytest.raises(ValueError, match="is a file"):
        workdir.check_owner(tmp_path / "thesis.tex", {})


def test_rows_that_lack_a_field_are_refused(tmp_path):
    with pytest.raises(ValueError, match="value, method"):
        workdir.write_rows(tmp_path / "results.jsonl", [{"metric": "accuracy"}])
    assert not list(tmp_path.iterdir())


def right_below(params, head, images):
    """A model that is a number: right on the first θ·10 of ten examples."""
    right = (images < params["w"] * 10).astype(jnp.float32)
    return jnp.concatenate([1.0 - right, 1.0 * right], axis=1)


TEN = (np.arange(10, dtype=np.float32)[:, None], np.ones(10, np.int32))
TOY = Problem(None, {"w": jnp.zeros((1, 1))}, right_below, {"a": None}, {"a": {"val": TEN, "test": TEN}}, "base",
              {"a": {"val": "a", "test": "b"}})


def choice(scales, tmp_path):
    made = experiment.plan(config(scales=scales, merges=(ConfigDict(dict(name="task_arithmetic")),)))
    return merges.choose_scale(TOY, made, made.merges[0], ["a"], {"w": jnp.ones((1, 1))}, {"val": {"a": 0.5}},
                               cache=tmp_path / "cache.jsonl")


def test_alpha_is_the_first_best_and_the_trace_is_whole(tmp_path):
    scale, trace = choice((0.0, 0.5, 1.0, 2.0), tmp_path)
    assert scale == 1.0
    assert trace == ((0.0, 0.0, 0.0), (0.5, 1.0, 0.5), (1.0, 2.0, 1.0), (2.0, 2.0, 1.0))


def test_rebuilt_with_one_task_is_the_tuned_model():
    theta0, tau = {"w": jnp.arange(3.0)}, {"w": jnp.array([1.0, 0.0, -2.0])}
    made = merges.rebuilt(theta0, tau, tau, 0.4)
    jax.tree.map(np.testing.assert_array_equal, made, {"w": theta0["w"] + tau["w"]})


def test_options_are_as_the_plan_says():
    merge = planning.Merge("ties", "ties", {"density": 0.5}, (0.0, 1.0))
    assert "share=0.5" in repr(planning.operator(merge)) and "by=1.0" in repr(planning.operator(merge))


@pytest.mark.parametrize("name", ["ties", "iso_c"])
def test_nan_is_refused_by_name_or_merged_where_it_is_allowed(name):
    operator = planning.operator(planning.Merge(name, name, {}, None))
    taus = [{"w": np.array([[1.0, x], [3.0, 4.0]], np.float32)} for x in (2.0, np.nan)]
    with pytest.raises(ValueError, match="w holds NaN"):
        merges.combine(operator, taus, ["a", "b"], allow_nonfinite=False)
    assert merges.combine(operator, taus, ["a", "b"], allow_nonfinite=True)["w"].shape == (2, 2)
