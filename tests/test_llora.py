"""The jobs llora and tangent from end to end on a tiny setting: rows, reuse, the page, and numbers that must agree."""
import jax
import numpy as np
import pytest
from fusion_config import config, problem
from ml_collections import ConfigDict

from tvjax import adapters, checkpoints, evaluation, results, run, tree, vectors
from tvjax.data import glyphs
from tvjax.experiment import partial_plan, study, way_tuning, ways

pytestmark = pytest.mark.usefixtures("quick_compilation")


def group(**fields):
    return ConfigDict(fields)


def small(job="llora", **changes):
    """Two tasks; LoRA as it is, and by network, whose features are affine."""
    lora = group(rank=2, alpha=4)
    asked = dict(tasks=glyphs.suite(8)[:2], counts=(2,), sizes=(2,), most=0, scatter=False, ways=(
        group(name="LoRA", kind="lora", options=lora, finetune=group(lr=3e-3)),
        group(name="L-LoRA", kind="lora", scope="network", options=lora, finetune=group(lr=3e-3))))
    return config(job, **{**asked, **changes})


@pytest.fixture(scope="module", autouse=True)
def toy():
    """A problem of small networks in place of the glyphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "problem", problem)
        yield


@pytest.fixture(scope="module")
def done(toy, tmp_path_factory):
    """(folder, rows, what was said)"""
    folder, said = tmp_path_factory.mktemp("llora") / "run", []
    return folder, run.run(small(), folder, say=said.append), said


def some(rows, **equals):
    return [row for row in rows if all(row.get(name) == value for name, value in equals.items())]


def test_every_fusion_has_a_normalised_and_an_absolute_score(done):
    _, rows, _ = done
    for way in ("LoRA", "L-LoRA"):
        for name in partial_plan.FUSIONS:
            mine = some(rows, part="fusion", way=way, fusion=name, task="average", split="test")
            assert {row["metric"] for row in mine} == {"accuracy", "normalised accuracy"} and len(mine) == 2
    assert {row["asked"] for row in some(rows, fusion="ties")} == {4}
    assert {row["asked"] for row in some(rows, fusion="lorahub")} == {3}


def test_scores_are_normalised_by_the_same_ways_models(done):
    _, rows, _ = done
    single = {(row["method"], row["task"]): row["value"]
              for row in some(rows, part="single", metric="accuracy", split="test")}
    for row in some(rows, fusion="average", metric="normalised accuracy", task="average"):
        own = some(rows, fusion="average", metric="accuracy", way=row["way"])
        ratios = [one["value"] / single[row["way"], one["task"]] for one in own if one["task"] != "average"]
        assert row["value"] == pytest.approx(np.mean(ratios))


def test_all_tasks_of_a_run_begin_at_one_phi0(done):
    folder, _, _ = done
    todo = partial_plan.partial_plan(small())
    about = problem(todo.usual)
    first, again = (ways.build(todo.ways[0], about, seed=0).start for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    other = ways.build(todo.ways[0], about, seed=1).start
    a = lambda phi: next(x for name, x in tree.flatten(phi).items() if "lora_A" in name)
    assert (a(first) != a(other)).any()


def test_a_score_is_that_of_the_merged_model(done):
    """The simple average of LoRA, computed once more from the files of its task vectors, as a plain model."""
    folder, rows, _ = done
    todo = partial_plan.partial_plan(small())
    about = problem(todo.usual)
    way = ways.build(todo.ways[0], about, seed=0)
    taus = [vectors.TaskVector(checkpoints.load_task_vector(way_tuning.place(folder, way, task, 0)).params)
            for task in todo.usual.tasks]
    phi = vectors.add(way.start, 0.5 * (taus[0] + taus[1]))
    theta = adapters.merged(way.plan.method, about.theta0, phi, ways.sites(about))
    for row in some(rows, fusion="average", way="LoRA", metric="accuracy"):
        if row["task"] != "average":
            data = about.judged([row["task"]], "test")[row["task"]]
            assert evaluation.accuracy(about.predict, theta, *data, batch=16) == row["value"]


def test_an_affine_way_says_what_it_saved(done):
    _, rows, said = done
    [row] = some(rows, part="sweep")
    assert row["method"] == "L-LoRA" and row["value"] < row["plain"]
    assert any("affine in the coefficients" in line for line in said)


def test_the_page_has_all_maps(done):
    folder, _, _ = done
    files = {path.name for path in (folder / "figures").iterdir()}
    for words in ("cosines-of-task-vectors", "magnitudes", "of-greek-and-braille", "mean-loss", "pair-wise"):
        assert any(words in name and name.endswith(".png") for name in files), words
    text = (folder / "report.html").read_text()
    assert "Normalised by the way" in text and "class=alarm" not in text
    assert any(name.endswith(".csv") for name in files)


def test_what_was_done_is_reused(done):
    folder, rows, _ = done
    said, stamp = [], lambda: sorted(path.stat().st_mtime_ns for path in folder.rglob("*.safetensors"))
    before = stamp()
    again = run.run(small(), folder, say=said.append)
    assert stamp() == before and sum("reused" in line for line in said) == 4
    values = lambda rows: [(row["metric"], row["value"]) for row in rows
                           if row["part"] in ("single", "fusion", "plane", "pairs")]
    keep = lambda rows: [row for row in rows if "part" in row]
    assert values(keep(again)) == values(keep(rows))


def test_choosing_on_test_is_possible_and_said_in_red(done, tmp_path):
    from tvjax.reports import linearised, read
    folder, _, _ = done
    mimic = read(folder, command="")._replace(config={"select_on": "test"})
    assert "TEST split" in linearised.fusions(mimic).alarms[0]
    assert not linearised.fusions(mimic._replace(config={"select_on": "val"})).alarms


def test_the_tangent_job(tmp_path):
    asked = small("tangent", scatter=True, negation=True, fusions=("task_arithmetic",), plane=ConfigDict(), ways=(
        group(name="standard", kind="standard"), group(name="linearised", kind="tangent", remat="dots")))
    rows = run.run(asked, tmp_path / "run", say=lambda text: None)
    for metric in ("post-hoc linear accuracy", "nonlinear advantage"):
        assert {row["task"] for row in some(rows, metric=metric)} == set(asked.tasks)
    for row in some(rows, metric="nonlinear advantage"):
        [linear] = some(rows, metric="post-hoc linear accuracy", task=row["task"])
        assert row["value"] == pytest.approx((linear["tuned"] - linear["value"]) / (1 - 1 / 3))
    assert {row["method"] for row in some(rows, metric="negated target")} == {"standard", "linearised"}
    assert some(rows, part="sweep")[0]["method"] == "linearised"
    files = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    assert any("tuned-over-linearised" in name for name in files)
    assert results.read(tmp_path / "run" / "results.jsonl") == rows


def test_fusion_is_studied_over_the_numbers_that_are_trained(tmp_path):
    ranks = ConfigDict(dict(ranks=(1, 3), tasks=2, seeds=(0,)))
    asked = small(scaling=ranks, plane=ConfigDict(), fusions=("average",), ways=(
        group(name="L-LoRA", kind="lora", scope="module", options=group(rank=2, alpha=4)),))
    rows = some(run.run(asked, tmp_path / "run", say=lambda text: None), part="scaling")
    trained = {row["rank"]: row["trained"] for row in rows}
    assert trained == {rank: rank * (6 + 6 + 6 + 7) for rank in (1, 3)}  # A and B of q_proj and v_proj
    assert {(row["fusion"], row["metric"]) for row in rows} == {
        ("single", "accuracy"), ("average", "accuracy"), ("average", "normalised accuracy")}
    assert any("over-trained" in path.name for path in (tmp_path / "run" / "figures").iterdir())
