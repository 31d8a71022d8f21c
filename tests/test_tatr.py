"""The jobs of trust regions and test-time merging on a made-up problem of a few hundred weights."""
import pathlib
import runpy
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tvjax import evaluation, reports, results
from tvjax.data import glyphs
from tvjax.experiment import adamerging, adamerging_plan, columns, study, tatr, tatr_plan, tatr_suite
from tvjax.experiment.loading import Problem
from tvjax.models.layers import Linear
from tvjax.reports import grouping

ROOT = pathlib.Path(__file__).parents[1]
FEATURES, HIDDEN, CLASSES = 12, 10, 4
pytestmark = pytest.mark.usefixtures("quick_compilation")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Linear(HIDDEN, name="fc")(x)


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Block(name="0")(x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(Layers(name="layers")(x))


def encode(params, images):
    return Net().apply({"params": params}, jnp.asarray(images))


def made_up(plan) -> Problem:
    """Tasks of Gaussian classes, one layer before a frozen random head."""
    draws = np.random.default_rng(0)
    draw = lambda *shape: (0.3 * draws.normal(size=shape)).astype(np.float32)
    theta0 = {"layers": {"0": {"fc": {"weight": draw(HIDDEN, FEATURES), "bias": draw(HIDDEN)}}}}
    heads = {task: jnp.asarray(draw(HIDDEN, CLASSES)) for task in plan.tasks}
    sizes = {"train": 64, "val": 40, "test": 40}
    splits = {}
    for task in plan.tasks:
        centres = 2 * draw(CLASSES, FEATURES)
        labels = {name: draws.integers(0, CLASSES, count).astype(np.int32) for name, count in sizes.items()}
        images = {name: (centres[y] + draws.normal(size=(len(y), FEATURES))).astype(np.float32)
                  for name, y in labels.items()}
        splits[task] = {name: glyphs.Split(images[name], labels[name]) for name in sizes}
    keys = {task: {name: f"{task}-{name}" for name in sizes} for task in plan.tasks}
    return Problem(types.SimpleNamespace(params=theta0), theta0, evaluation.classify(encode), heads, splits, "base",
                   keys, encode)


def config(name, **own):
    made = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"]("runlocal")
    made.finetune.steps, made.finetune.lr, made.finetune.batch = 30, 0.05, 16
    if name == "tatr":
        made.tatr.bases, made.tatr.quantiles = made.tatr.bases[:2], (0.9,)
    for field, value in own.items():
        made[name][field] = value
    return made


@pytest.fixture(scope="module")
def done(tmp_path_factory, quick_compilation):
    """(folder, rows, what was said) of the local config of trust regions."""
    patch = pytest.MonkeyPatch()
    patch.setattr(study, "problem", made_up)
    folder, said = tmp_path_factory.mktemp("tatr") / "run", []
    yield folder, tatr.run(config("tatr"), folder, say=said.append, progress=False), said
    patch.undo()


@pytest.fixture(scope="module")
def adapted(done, tmp_path_factory, quick_compilation):
    """(folder, rows) of the local config of test-time merging, on the same task vectors."""
    folder, given = tmp_path_factory.mktemp("ada") / "run", config("adamerging")
    given.vectors = str(done[0])
    return folder, adamerging.run(given, folder, say=lambda line: None, progress=False)


def value(rows, method, **equals):
    found = results.select(rows, metric="accuracy", split="test", task="average", method=method, **equals)
    return found[0]["value"]


def test_every_row_says_family_data_and_parameters(done, adapted):
    for rows in (done[1], adapted[1]):
        judged = results.select(rows, metric=["accuracy", "normalised accuracy"])
        assert all({"family", "data", "seen", "added"} <= set(row) for row in judged)
        assert {row["family"] for row in judged} == {"glyphs, fine-tuned here"}
    data = {row["method"]: row["data"] for row in results.select(done[1], metric="accuracy")}
    assert data["TATR + ties"] == "labelled" and data["zero-shot TATR + ties"] == data["ties"] == "none"
    assert data["entropy, mean_abs"] == data["regmean++"] == data["fisher"] == "unlabelled"
    data = {row["method"]: row for row in results.select(adapted[1], metric="accuracy")}
    assert data["AdaMerging"]["data"] == data["Surgery on task arithmetic"]["data"] == "test"
    assert data["Surgery on task arithmetic"]["added"] == 3 * 2 * 16 * HIDDEN and data["AdaMerging"]["added"] == 0


def test_rows_of_every_study(done):
    _, rows, said = done
    own = config("tatr").tatr
    main = {row["method"] for row in rows if row.get("section") == "main"}
    assert len(main) == 3 * len(own.bases)
    forms = {row["method"] for row in rows if row.get("section") == "forms"}
    assert forms == {"no region", "cross_entropy, mean_abs", "entropy, mean_abs", "pairs, q = 0.99",
                     "magnitude, 0.01 removed", "sign × 0.5"}
    drawn = {(row["count"], row["draw"]) for row in rows if row.get("section") == "exemplars"}
    assert drawn == {(2, 0), (2, 1)}
    share = {row["method"]: row["value"] for row in results.select(rows, metric="kept share")}
    assert 0.97 < share["region by gradients"] < 1 and any("gradients of 3 tasks" in line for line in said)
    heights = results.select(rows, metric="omega histogram", method="region by vectors")
    assert sum(row["value"] for row in heights) == pytest.approx(1)


def test_conflicts_are_differences_of_leaving_one_out(done):
    _, rows, _ = done
    found = results.select(rows, metric="conflict")
    tasks = config("tatr").tasks
    assert {(row["other"], row["task"]) for row in found} == {(i, j) for i in tasks for j in tasks if i != j}
    for method in {row["method"] for row in found}:
        mine = [row["value"] for row in found if row["method"] == method]
        mean = results.select(rows, metric="mean conflict", method=method)[0]["value"]
        assert mean == pytest.approx(np.mean(mine)) and len(mine) == 6
        assert all(abs(40 * x - round(40 * x)) < 1e-4 for x in mine)  # of 40 test images


def test_tables_keep_kinds_of_data_apart(done, adapted):
    made = reports.write(done[0], command="the command")
    assert {"report.html", "tables.md", "tables.tex"} <= {path.name for path in made}
    text = (done[0] / "tables.md").read_text()
    assert "knowledge conflicts" in text.lower() and "no data" in text and "a few labelled examples" in text
    for path in made:
        assert path.stat().st_size > 0
    tables = grouping.grouped(done[1], tasks=3, section=("main", "statistics"))
    assert len(tables) == 3
    methods = {caption: {line[0] for line in table.lines} for caption, table in tables.items()}
    labelled = next(names for caption, names in methods.items() if "labelled examples" in caption)
    assert "TATR + ties" in labelled and "zero-shot TATR + ties" not in labelled and "fine-tuned" in labelled
    reports.write(adapted[0], command="the command")
    assert "Test-time adaptation" in (adapted[0] / "report.html").read_text()


def test_gains_are_paired(done):
    from tvjax.reports.tatr import gains

    base, alone, gain, zero = gains(done[1], 3).lines[1]
    assert base == "ties" and alone == value(done[1], "ties", section="main")
    assert gain == pytest.approx(value(done[1], "TATR + ties") - alone)
    assert zero == pytest.approx(value(done[1], "zero-shot TATR + ties") - alone)


def test_coefficients_and_entropies_are_kept(adapted):
    _, rows = adapted
    start = results.select(rows, metric="coefficient trace", step=0)
    assert start and all(row["value"] == pytest.approx(0.3) for row in start)
    finals = results.select(rows, metric="coefficient", method="AdaMerging")
    assert {row["tensor"] for row in finals} == {"layers.0.fc.weight", "layers.0.fc.bias"}
    assert all(0 <= row["value"] <= 1 for row in finals)
    assert all(0 < row["value"] < np.log(CLASSES) + 1e-3 for row in results.select(rows, metric="entropy"))


def reads_trees(plan) -> Problem:
    """The same tasks with inputs that are trees, as texts are."""
    about = made_up(plan)
    splits = {task: {name: ({"pixels": images}, labels) for name, (images, labels) in parts.items()}
              for task, parts in about.splits.items()}
    inside = lambda params, inputs: encode(params, inputs["pixels"])
    return about._replace(splits=splits, encode=inside, predict=evaluation.classify(inside))


def test_inputs_may_be_trees(tmp_path, monkeypatch):
    """AdaMerging behind a region, and Surgery, on what a text suite gives."""
    monkeypatch.setattr(study, "problem", reads_trees)
    method = {"label": "TATR + AdaMerging", "by": "task", "ties": False, "region": "gradients"}
    given = config("adamerging", methods=(method,), baselines=("none",), steps=2)
    given.finetune.steps, given.adamerging.surgery.steps = 2, 2
    rows = adamerging.run(given, tmp_path / "run", say=lambda line: None, progress=False)
    assert {"TATR + AdaMerging", "Surgery on task arithmetic"} <= {row["method"] for row in rows}


def test_a_second_run_measures_nothing_again(done, monkeypatch):
    folder, rows, _ = done
    for where, name in ((study.finetune.training, "fit"), (tatr_suite.exemplars, "exemplar_gradients"),
                        (evaluation, "accuracy")):
        monkeypatch.setattr(where, name, None)
    less = config("tatr", statistics={})
    again = tatr.run(less, folder, say=lambda line: None, progress=False)
    before = {(row["method"], row.get("section"), row.get("draw")): row["value"] for row in
              results.select(rows, metric="accuracy", split="test", task="average")}
    now = results.select(again, metric="accuracy", split="test", task="average")
    assert all(before[row["method"], row.get("section"), row.get("draw")] == row["value"] for row in now)


def test_singular_gram_matrices_are_told(done):
    """Two inputs of each of three tasks do not span twelve features: the sentence names the matrix and the ridge."""
    said, todo = [], tatr_plan.tatr_plan(config("tatr"))
    bench = study.Bench(made_up(todo.usual), todo.usual, done[0] / "none.jsonl", 0, said.append, todo)
    tau = jax.tree.map(np.ones_like, bench.about.theta0)
    merged = tatr_suite._regmean(bench, dict.fromkeys(todo.usual.tasks, tau), 2)()
    np.testing.assert_allclose(merged["layers"]["0"]["fc"]["weight"], 1, atol=1e-5)
    (line,) = said
    assert line.startswith("regmean: 1 of 1 Gram matrices are singular, such as that of layers.0.fc.weight")
    assert line.endswith("a ridge of 1e-06 of the mean eigenvalue holds elsewhere")


def test_an_empty_region_is_told(done):
    """Where no gradient is there, Ω is 0 everywhere and the merge is that without a region."""
    said, todo = [], tatr_plan.tatr_plan(config("tatr"))
    bench = study.Bench(made_up(todo.usual), todo.usual, done[0] / "none.jsonl", 0, said.append, todo)
    taus = {"a": {"w": np.ones((2, 3), np.float32)}, "b": {"w": np.ones((2, 3), np.float32)}}
    rows = tatr_suite.region_rows(bench, taus, {"w": np.zeros((2, 2, 3), np.float32)})
    assert any("the trust region by gradients would be empty" in line for line in said)
    assert results.select(rows, metric="kept share", method="region by gradients")[0]["value"] == 1


@pytest.mark.parametrize("name, change, message", [
    ("tatr", {"exemplars": 65}, "exemplars are from 1 to the 64 examples of the train split; got 65"),
    ("tatr", {"loss": "hinge"}, "no loss 'hinge'"), ("tatr", {"quantile": 1.5}, r"quantile lies in \(0, 1\]"),
    ("tatr", {"split": "test"}, "no split 'test'"), ("tatr", {"bases": ()}, "bases is empty"),
    ("tatr", {"statistics": {"fischer": 4}}, "did you mean 'fisher'"),
    ("adamerging", {"adapt_on": "train"}, "no adapt_on 'train'"),
    ("adamerging", {"batch": 41}, "a step takes 41 inputs of each task"),
    ("adamerging", {"steps": 0}, "steps is an integer of at least 1"), ("adamerging", {"store": "int4"}, "no store"),
])
def test_slips_get_one_sentence(name, change, message):
    plan = {"tatr": tatr_plan.tatr_plan, "adamerging": adamerging_plan.adamerging_plan}[name]
    with pytest.raises(ValueError, match=message):
        plan(config(name, **change))


def test_a_row_without_its_data_is_refused():
    plan = types.SimpleNamespace(model="m", finetuned={"a": "x"}, tasks=("a", "b"))
    with pytest.raises(ValueError, match="says in `seen` which"):
        columns.columns(plan, data="test")
    with pytest.raises(ValueError, match="data is one of none, unlabelled, labelled, test; got 'val'"):
        columns.columns(plan, data="val")
    assert columns.family(plan) == "m, fine-tuned here and as given"
