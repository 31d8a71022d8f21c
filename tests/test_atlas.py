"""The job "atlas": its plan, and every study once on the smallest problem there is, from task vectors to the page."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from tests import toy_tasks as toy
from tests.test_configs import load
from tvjax import evaluation, learning, reports, results
from tvjax.experiment import (
    atlas,
    atlas_addition,
    atlas_fewshot,
    atlas_negation,
    atlas_peft,
    atlas_plan,
    atlas_selection,
    atlas_tta,
    study,
)
from tvjax.experiment.loading import Problem
from tvjax.learning import fewshot
from tvjax.reports import atlas as report

TASKS = ("greek", "braille", "armenian")


@pytest.fixture(scope="module")
def todo():
    """The plan of `:runlocal`, without the augmentations that need images."""
    config = load("atlas", "runlocal")
    for part in ("fewshot", "contribution", "selection", "basis"):
        config.atlas[part].augment = "none"
    config.atlas.fewshot.domains = ()
    config.atlas.tta.objectives = ("entropy",)
    config.atlas.peft.parts = (2,)
    config.atlas.tta.augment = "none"
    config.atlas.basis.questions = 0
    config.atlas.addition.schemes = (ConfigDict(dict(by="tensor")),)
    config.atlas.addition.penalties = ()
    config.atlas.addition.geometry = ("standard",)
    config.atlas.negation.targets = ("greek",)
    config.atlas.negation.schemes = (ConfigDict(dict(by="tensor")),)
    return atlas.plan(config)


@pytest.fixture(scope="module")
def bench(todo, tmp_path_factory, quick_compilation):
    """A problem of three toy tasks and a control, in place of drawings and a CLIP."""
    base, splits, heads_ = toy.theta0(), {}, {}
    for i, name in enumerate((*TASKS, "control")):
        heads_[name], (x, y) = toy.task(base, toy.vector(i + 1, base), 20 + i, examples=96)
        splits[name] = {"train": (x[:48], y[:48]), "val": (x[48:72], y[48:72]), "test": (x[72:], y[72:])}
    keys = {name: {split: f"{name} {split}" for split in parts} for name, parts in splits.items()}
    about = Problem(None, base, toy.PREDICT, heads_, splits, "toy", keys, toy.encode, "control")
    cache = tmp_path_factory.mktemp("atlas") / "cache.jsonl"
    return study.Bench(about, todo.usual, cache, 0, lambda text: None, todo)


@pytest.fixture(scope="module")
def taus(bench):
    return {name: toy.vector(i + 1, bench.about.theta0) for i, name in enumerate(TASKS)}


@pytest.fixture(scope="module")
def anchors(bench, taus):
    return study.anchors(bench, taus)


@pytest.fixture(scope="module")
def folder(bench):
    return bench.cache.parent


def page(rows):
    """The sections that a run of these rows gets, drawn."""
    return report.sections(reports.Run({"name": "atlas"}, {}, rows, "command"))


def accuracy(rows, method, **equals):
    [one] = [row["value"] for row in rows if row["method"] == method
             and all(row.get(name) == value for name, value in equals.items())]
    return one


def test_addition(bench, taus, anchors, folder):
    rows = atlas_addition.addition(bench, taus, anchors, folder)
    for method in ("searched α", "aTLAS"):
        values = [row["value"] for row in rows if row["method"] == method and row["metric"] == "accuracy"
                  and row["split"] == "test" and row.get("part") == "addition" and row["task"] in TASKS]
        average = accuracy(rows, method, metric="accuracy", split="test", task="average", part="addition")
        np.testing.assert_allclose(average, np.mean(values))
        pairs = [row["value"] for row in rows if row["method"] == method and row["metric"] == "xi"
                 and row["task"] != "average"]
        assert len(pairs) == 6
        np.testing.assert_allclose(accuracy(rows, method, metric="xi", task="average"), np.mean(pairs))
        assert 0 <= accuracy(rows, method, metric="control", part="addition") <= 1
    trace = [row["value"] for row in rows if row["metric"] == "trace" and row["method"] == "aTLAS"]
    zero = evaluation.normalised(anchors["zero-shot"]["val"], anchors["fine-tuned"]["val"])
    np.testing.assert_allclose(trace[0], zero)  # it starts at the pretrained model
    shares = [row for row in rows if row["part"] == "fractions" and row["metric"] == "accuracy"]
    assert {row["method"] for row in shares} == {"aTLAS", "multi-task fine-tuning"}
    assert accuracy(rows, "aTLAS", part="fractions", metric="accuracy", share=1.0) == accuracy(
        rows, "aTLAS", metric="accuracy", split="test", task="average", part="addition")
    boxes = [row for row in rows if row["metric"] == "coefficients"]
    assert {row["by"] for row in boxes} == {"kind", "depth", "vector"}
    titles = [section.title for section in page(rows)]
    assert titles == ["Task addition", "Addition with less data"]
    before = len(list((folder / "learned").iterdir()))
    again = atlas_addition.addition(bench, taus, anchors, folder)
    assert len(list((folder / "learned").iterdir())) == before  # nothing is learned twice
    assert [row["value"] for row in again] == [row["value"] for row in rows]


def test_negation(bench, taus, anchors, folder):
    rows = atlas_negation.negation(bench, taus, anchors, folder)
    for method in ("zero-shot", "searched α", "aTLAS"):
        assert accuracy(rows, method, metric="target", task="average") == pytest.approx(np.mean(
            [accuracy(rows, method, metric="target", task=task) for task in bench.todo.of["negation"]["targets"]]))
    [section] = page(rows)
    assert section.title == "Task negation"


def test_few_shots_and_contributions(bench, taus, anchors, folder):
    rows = atlas_fewshot.fewshot(bench, taus, anchors, folder)
    assert {row["method"] for row in rows} == {"zero-shot", "Tip-Adapter", "LP++", "aTLAS", "aTLAS + LP++",
                                               "aTLAS + Tip-Adapter"}
    gains = atlas_fewshot.contribution(bench, taus, anchors, folder)
    assert {row["other"] for row in gains} == set(TASKS) and {row["task"] for row in gains} == {"greek"}
    assert [section.title for section in page([*rows, *gains])] == ["Few shots", "What one vector contributes"]


def test_the_pool_lacks_the_target(bench, taus):
    held, names = atlas_fewshot.pool_without(bench, taus, "braille")
    assert names == ["greek", "armenian"] and learning.size(held) == 2


def test_adaptation(bench, taus, anchors, folder):
    rows = atlas_tta.tta(bench, taus, anchors, folder)
    assert {(row["objective"], row["method"]) for row in rows} == {("none", "zero-shot")} | {
        ("entropy", "LayerNorm"), ("entropy", "aTLAS")}
    assert page(rows)[0].title == "Test-time adaptation"


def test_parameter_efficient_fine_tuning(bench, taus, anchors, folder, monkeypatch):
    monkeypatch.setattr(study.Bench, "common", lambda self, tasks: {})
    rows = atlas_peft.peft(bench, taus, anchors, folder)
    numbers = {row["method"]: row["numbers"] for row in rows}
    assert numbers["aTLAS × 2, LoRA vectors, rank 2"] == 2 * 2 * 2  # vectors, matrices, parts
    assert numbers["full fine-tuning"] > numbers["LoRA, rank 2"] > numbers["aTLAS, full vectors"] == 2 * 4
    assert page(rows)[0].title == "Parameter-efficient fine-tuning"


def test_lora_vectors_are_zero_but_in_attention_and_mlp(bench, folder):
    vectors = atlas_peft.lora_vectors(bench, 2, folder)
    assert set(vectors) == set(TASKS)
    held = learning.pool(list(vectors.values()), bench.about.theta0)
    assert set(held) == {"layers.0.fc1.weight", "layers.0.fc2.weight"}
    assert all(hasattr(stack, "B") for stack in held.values())


def test_selection_and_random_directions(bench, taus, anchors, folder):
    rows = atlas_selection.selection(bench, taus, anchors, folder)
    assert {row["method"] for row in rows if row["budget"] == 1} == {"random", "features", "whole gradient",
                                                                     "block gradient"}
    assert {row["method"] for row in rows if row["budget"] == 2} == {"all"}
    assert all("armenian" not in row["chosen"] or row["task"] != "armenian" for row in rows)
    more = atlas_selection.basis(bench, taus, anchors, folder)
    assert {row["method"] for row in more} == {"random vectors", "task vectors"}
    assert [section.title for section in page([*rows, *more])] == ["Selection under a budget", "Random directions"]


def test_without_gradients(bench, taus, folder, monkeypatch):
    """Every scheme beside its gradient-free twin; what learns is replaced, its own tests run it."""
    monkeypatch.setattr(atlas_selection, "_row", lambda bench, part, method, *rest, **more: {"method": method})
    own = {**bench.todo.of["basis"], "questions": 2}
    asked = bench._replace(todo=dataclasses.replace(bench.todo, of={**bench.todo.of, "basis": own}))
    data, (held, _) = atlas_fewshot.fewshot_data(bench, "greek", 1, 0), atlas_fewshot.pool_without(bench, taus, "greek")
    rows = atlas_selection._without_gradients(asked, "greek", held, data, 0, folder)
    assert [row["method"] for row in rows] == ["isotropic, by gradient", "isotropic, without gradients",
                                               "aTLAS, by gradient", "aTLAS, without gradients"]


def test_another_domain_shows_the_same_classes(bench):
    images, labels = atlas_fewshot.other_domain(bench, "greek", "plain")
    again, _ = atlas_fewshot.other_domain(bench, "greek", "plain")
    np.testing.assert_array_equal(images, again)
    assert images.shape[1:] == (32, 32, 3) and set(labels) == set(range(29))


def test_outside_of_glyphs_another_domain_is_a_task_with_the_same_classes(bench):
    of_arrays = bench._replace(usual=dataclasses.replace(bench.usual, suite="arrays"))
    inputs, labels = atlas_fewshot.other_domain(of_arrays, "greek", "braille")
    np.testing.assert_array_equal(labels, bench.about.splits["braille"]["test"][1])
    with pytest.raises(ValueError, match="domains of greek are the tasks with its classes, here braille, armenian"):
        atlas_fewshot.other_domain(of_arrays, "greek", "plain")


def test_the_report_is_written(bench, anchors, tmp_path):
    rows = [{**row, "suite": "toy", "tasks": 3, "seed": 0, "model": "toy"} for row in (
        dict(metric="accuracy", value=0.5, method=method, task="greek", split="test", part="fewshot", shots=k, draw=0)
        for method in ("zero-shot", "aTLAS") for k in (1, 4))]
    from tvjax.experiment import workdir
    workdir.write_text(tmp_path / "config.json", '{"name": "atlas", "job": "atlas"}')
    workdir.write_rows(tmp_path / "results.jsonl", rows)
    made = reports.write(tmp_path, command="command")
    assert (tmp_path / "report.html") in made and len(results.read(tmp_path / "results.jsonl")) == 4


@pytest.mark.parametrize("change, sentence", [
    (lambda c: c.atlas.update(parts=("adition",)), "did you mean 'addition'"),
    (lambda c: c.atlas.update(parts=()), "atlas.parts is empty"),
    (lambda c: c.atlas.update(store="int4"), "float32, bfloat16, int8; got 'int4'"),
    (lambda c: c.atlas.selection.update(budgets=(3,)), "without the target's own the pool holds 2"),
    (lambda c: c.atlas.fewshot.update(targets=("greik",)), "did you mean 'greek'"),
    (lambda c: c.atlas.fewshot.update(targets=()), "fewshot.targets is empty"),
    (lambda c: c.atlas.fewshot.update(augment="mirror"), "augment holds 'mirror'"),
    (lambda c: c.atlas.addition.update(fractions=(0.0,)), "shares above 0 and up to 1; got 0.0"),
    (lambda c: c.atlas.addition.course.update(epochs=0), "atlas.addition.course: epochs must be at least 1"),
    (lambda c: c.atlas.tta.update(draws=0), "whole numbers from 1 on"),
    (lambda c: c.update(job="altas"), 'job="atlas"'),
])
def test_slips_are_sentences(change, sentence):
    config = ConfigDict(load("atlas", "runlocal").to_dict(), convert_dict=True)
    with pytest.raises(ValueError, match=sentence):
        change(config)
        atlas_plan.atlas_plan(config)


def test_too_few_images_for_the_shots(bench):
    with pytest.raises(ValueError, match="shots are asked for"):
        atlas_fewshot.fewshot_data(bench, "greek", 40, 0)
    with pytest.raises(ValueError, match="that may not be used"):
        fewshot.without({"greek": jnp.ones(1)}, "greek")


def test_the_papers_settings_are_in_the_configs():
    from tvjax.learning import adaptation, arithmetic
    assert adaptation.TTA.epochs == 10 and arithmetic.ADDITION.lr == 1e-3
    assert jax.tree.leaves(load("atlas", "fewshot").atlas.fewshot.shots) == [1, 4, 16]
