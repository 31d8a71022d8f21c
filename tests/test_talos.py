"""The job of sparse fine-tuning on a network of one layer: every way of tuning, both protocols, studies, report.

Negation and the choice of the sparsity are checked by their numbers; slips in a config by their sentences.
"""
import importlib
import pathlib
import runpy

import jax
import numpy as np
import pytest

from tests.test_configs import load
from tvjax import adapters, calibration, checkpoints, evaluation, reports, tree, vectors
from tvjax.experiment import loading, negation, talos, talos_plan, talos_tuning, ways
from tvjax.experiment.loading import Problem
from tvjax.experiment.study import Bench
from tvjax.models import clip

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).parents[1]
RNG = np.random.default_rng(0)
TASKS = ("greek", "braille")
CLASSES = {"greek": 3, "braille": 2, "control": 4}


def config(**own):
    made = runpy.run_path(str(ROOT / "configs" / "talos.py"))["get_config"]("runlocal")
    made.talos.update(own)
    return made


def examples(classes, count=20):
    return RNG.normal(size=(count, 4, 4, 3)).astype(np.float32), np.arange(count, dtype=np.int32) % classes


@pytest.fixture(scope="module")
def problem():
    """Two tasks and a control of random images for a vision tower of one layer."""
    model = clip.CLIP(clip.Spec(clip.VisionSpec(4, 8, 1, 2, image_size=4, patch=2), text=None, projection_dim=3))
    theta0, encode = jax.device_get(clip.init(model, jax.random.key(0))), clip.image_features(model)
    theta0 = jax.tree.map(lambda x: x + 0.3 * RNG.normal(size=x.shape).astype(x.dtype), theta0)
    splits = {name: {split: examples(classes) for split in ("train", "val", "test")}
              for name, classes in CLASSES.items()}
    heads = {name: RNG.normal(size=(3, classes)).astype(np.float32) for name, classes in CLASSES.items()}
    keys = {name: {split: f"{name} {split}" for split in parts} for name, parts in splits.items()}
    return Problem(None, theta0, evaluation.classify(encode), heads, splits, "base", keys, encode, "control")


def bench_of(problem, folder, made, say=lambda text: None):
    todo = talos.plan(made)
    return Bench(problem, todo.usual, folder / "cache.jsonl", 0, say, todo)


WAYS = ({"name": "full"}, {"name": "talos"},
        {"name": "lota", "label": "lota, vision code", "steps": 1, "off": 0.1},
        {"name": "bitfit", "rates": (1e-7, 0.02)}, {"name": "ia3", "lr": 0.01})


@pytest.fixture(scope="module")
def run(problem, tmp_path_factory, quick_compilation):
    """(folder, config, rows, what was said) of a whole seed; every other way has its mask tested below."""
    folder, said = tmp_path_factory.mktemp("talos"), []
    made = config(methods=list(WAYS))
    rows = talos._seed(bench_of(problem, folder, made, said.append), folder, False)
    return folder, made, rows, said


def rows_of(rows, **equals):
    return [row for row in rows if all(row.get(name) == value for name, value in equals.items())]


def test_every_way_is_judged_alone_added_and_negated(run):
    _, made, rows, _ = run
    labels = [one.label for one in talos.plan(made).methods]
    for section in ("single", "addition", "negation"):
        found = {row.get("tuning") for row in rows if row.get("section") == section} - {None}
        assert found == set(labels), section
    merged = rows_of(rows, section="addition", merge="task_arithmetic", split="test", task="average")
    assert len(merged) == 2 * len(labels)
    adapted = rows_of(rows, tuning="talos", merge="adamerging by tensor", split="test", task="average")
    assert {(row["data"], row["seen"]) for row in adapted} == {("unlabelled", "unlabelled val inputs")}
    from tvjax.reports.talos import additions
    plain, other = additions(rows).items()
    assert other[0].startswith("task addition that adapts to unlabelled val inputs")
    assert other[1].columns == ("fine-tuning", "adamerging by tensor")
    assert "adamerging by tensor" not in plain[1].columns


def test_shares_that_may_move(run):
    _, _, rows, _ = run
    share = {row["method"]: row["value"] for row in rows_of(rows, metric="trainable", task="greek")}
    assert share["full"] == 1.0 and share["talos"] < 0.12 and 0 < share["bitfit"] < 0.5
    assert 0 < share["ia3"] < share["bitfit"]


def test_the_rate_is_the_first_best_on_validation_data(run):
    folder, _, rows, _ = run
    tried = {row["rate"]: row for row in rows_of(rows, section="rates", method="bitfit")}
    assert set(tried) == {1e-7, 0.02} and {row["split"] for row in tried.values()} == {"val"}
    best = max(tried, key=lambda rate: tried[rate]["value"])
    assert [rate for rate, row in tried.items() if row["chosen"]] == [best]
    mine, its = ((folder / "methods" / label / "seed0" / "greek.safetensors").read_bytes()
                 for label in ("bitfit", f"bitfit, lr {best:g}"))
    assert mine == its
    alone = rows_of(rows, section="single", metric="accuracy", split="val", task="average", method="bitfit")
    assert alone[0]["value"] == tried[best]["value"]


def test_factors_are_written_into_the_weights(run, problem):
    """(IA)³'s vector has the leaves that its factors scale alone, in proportion to θ0 along rows or columns."""
    folder, *_ = run
    path = folder / "adapters" / "ia3" / "seed0" / "greek.safetensors"
    factors = tree.flatten(checkpoints.load_task_vector(path).params)
    assert all(name.endswith("ia3_l") for name in factors) and any(np.any(x != 0) for x in factors.values())
    method, found = adapters.build("ia3", {}), problem
    made = adapters.dense(method, found.theta0, vectors.add(jax.tree.map(np.ones_like, tree.unflatten(factors)),
                                                            tree.unflatten(factors)), ways.sites(found))
    for name, x in tree.flatten(made).items():
        less, base = factors[name.rpartition(".")[0] + ".ia3_l"], tree.flatten(found.theta0)[name]
        np.testing.assert_allclose(x, (less if x.ndim == 2 else less[:, 0]) * base, atol=1e-7)


def test_entries_outside_of_a_mask_keep_their_bits_and_files_are_sparse(run, problem):
    folder, _, _, _ = run
    for label in ("talos", "bitfit"):
        path = folder / "methods" / label / "seed0" / "greek.safetensors"
        tau, mask = calibration.load_sparse(path), calibration.load_mask(path.with_name("greek.mask.safetensors"))
        tuned, flags = vectors.add(problem.theta0, tau), tree.flatten(mask)
        for name, x in tree.flatten(tuned).items():
            outside = ~flags[name] if name in flags else np.ones(x.shape, bool)
            np.testing.assert_array_equal(np.asarray(x)[outside], tree.flatten(problem.theta0)[name][outside])
        assert any(np.asarray(x).any() for x in jax.tree.leaves(tau)), label


def test_lotas_vision_variant_moves_everything(run):
    folder, *_ = run
    tau = calibration.load_sparse(folder / "methods" / "lota, vision code" / "seed0" / "greek.safetensors")
    assert min(np.mean(np.asarray(x) != 0) for name, x in tree.flatten(tau).items() if "k_proj.bias" not in name) > 0.5


def test_masks_of_all_ways(problem, tmp_path):
    """As many entries as the sparsity leaves, all different; the official preset has the embeddings whole."""
    ways = ["talos", "top_sensitivity", "random", "magnitude", "small_magnitude", "attention"]
    official = {"name": "talos", "label": "o", "preset": "official"}
    made = config(methods=[{"name": name} for name in ways] + [official])
    made.talos.adamerging.methods = ()
    bench = bench_of(problem, tmp_path, made)
    found = {one.label: talos_tuning.MASKS[one.name](bench, one, "greek", 1 << 20, False) for one in bench.todo.methods}
    scored = tree.size(tree.partition(problem.theta0, calibration.scored(problem.theta0))[0])
    for name in ways[:-1]:
        assert calibration.count(found[name]) == int(0.1 * scored), name
    flags = lambda mask: tree.flatten(mask)["vision_model.encoder.layers.0.mlp.fc1.weight"]
    assert len({np.asarray(flags(found[name])).tobytes() for name in ways[:-1]}) == len(ways) - 1
    assert all("self_attn" in name for name in tree.flatten(found["attention"]))
    dense = tree.flatten(found["o"])
    assert dense["visual_projection.weight"].all() and dense["vision_model.embeddings.class_embedding"].all()


def test_a_second_run_reuses_everything(run, problem):
    folder, made, rows, _ = run
    said = []
    again = talos._seed(bench_of(problem, folder, made, said.append), folder, False)
    assert not any("fine-tuned in" in text for text in said)
    keep = lambda found: [(row["metric"], row["method"], row["value"]) for row in found if row["metric"] != "seconds"
                          and "adamerging" not in row["method"]]
    assert keep(again) == keep(rows)


def test_studies_have_a_row_for_every_pair(run):
    _, _, rows, _ = run
    for section, metric in (("pruning", "pruning ratio"), ("noise", "noise ratio"), ("masks", "mask iou"),
                            ("localisation", "localisation")):
        assert len(rows_of(rows, section=section, metric=metric, method="talos")) == len(TASKS) ** 2
    assert len(rows_of(rows, metric="deviation", method="talos")) == len(TASKS)
    shares = [row["value"] for row in rows_of(rows, metric="occupancy", by="kind", method="talos", task="greek")]
    np.testing.assert_allclose(sum(shares), 1)
    own = rows_of(rows, metric="localisation", method="talos", task="greek", other="greek")
    assert [row["relative"] for row in own] == [1.0]


def test_frozen_tensors_save_memory(run):
    _, _, rows, _ = run
    size = {(row["method"], row["what"]): row["value"] for row in rows_of(rows, metric="bytes")}
    total = lambda way: sum(size[way, what] for what in ("parameters", "gradients", "state", "mask"))
    assert total("bitfit") < total("full") and size["bitfit", "activations"] < size["full", "activations"]


def test_sparsity_is_chosen_by_negation_on_validation_data(run):
    _, _, rows, _ = run
    swept = {row["sparsity"]: row["value"] for row in rows_of(rows, section="sweep", metric="target", split="val")}
    chosen = rows_of(rows, metric="chosen sparsity")[0]["value"]
    assert set(swept) == {0.0, 0.5} and chosen == 0.5  # the only sparse one of a small config


def test_its_report_has_all_sections(run, tmp_path):
    _, made, rows, _ = run
    header = {"device": "1 x cpu", "time": "now"}
    seconds = {"metric": "seconds", "value": 1.0, "method": "all", "section": "cost of all", "seed": 0, "tasks": 2,
               "split": "none", "task": "average"}
    from tvjax.experiment import planning
    about = reports.Run(planning.plain(made), header, [*rows, seconds], "python -m tvjax.run")
    sections = importlib.import_module("tvjax.reports.talos").sections(about)
    assert [section.title for section in sections] == [
        "Addition and negation", "Over the sparsity", "What masks share and hold",
        "What θ0 bears to lose where the masks lie", "Localisation", "Linear behaviour", "Memory of a step (MiB)"]
    reports.markdown(about, sections)
    for section in sections:
        assert section.tables and all(figure.axes for figure in section.figures.values())


def test_a_text_to_text_model(tmp_path):
    """A tiny T5: the log-probabilities of its choices calibrate the mask, and its embeddings are never in it."""
    theirs, own = load("language", "runlocal"), config(
        methods=[{"name": "talos", "sparsity": 0.5, "rounds": 1, "batch": 4}],
        sweep={"sparsities": (), "seeds": (0,)}, studies={"names": (), "seeds": (0,), "budget": 1 << 28})
    own.talos.adamerging.methods = ()
    for name in ("model", "suite", "tasks", "counts", "examples", "finetune", "batch", "sources", "control", "data"):
        own[name] = theirs[name]
    about = loading.problem(talos.plan(own).usual)
    bench = bench_of(about, tmp_path, own)
    mask = talos_tuning.MASKS["talos"](bench, bench.todo.methods[0], own.tasks[0], 1 << 28, False)
    scored = tree.size(tree.partition(about.theta0, calibration.scored(about.theta0))[0])
    assert 0.4 * scored <= calibration.count(mask) <= 0.6 * scored
    assert not any("shared" in name or "relative" in name for name in tree.flatten(mask))


# ---------------------------------------------------------------- negation
class Forgetting:
    """A bench whose model answers by a table {scale: (target, control)}."""

    def __init__(self, problem, tmp_path, monkeypatch, table):
        self.about, self.cache, self.table = problem, tmp_path / "cache.jsonl", table
        self.usual = type("", (), {"batch": 4})
        monkeypatch.setattr(evaluation, "sweep", lambda *args, **more: [
            {"greek": self.table[-scale][0], "control": self.table[-scale][1]} for scale in args[3]])

    def measure(self, theta, tasks, split):
        return dict.fromkeys(tasks, 0.5)


def test_a_scale_that_costs_the_control_is_passed_over(problem, tmp_path, monkeypatch):
    """Check 20: the lowest target does not count where the control falls below 95 %."""
    table = {0.0: (0.9, 0.8), 0.5: (0.6, 0.77), 1.0: (0.1, 0.75)}
    bench = Forgetting(problem, tmp_path, monkeypatch, table)
    found = negation.negate(bench, vectors.TaskVector(problem.theta0), "greek", scales=(0.5, 1.0))
    assert (found.scale, found.target["val"], found.control["val"]) == (0.5, 0.6, 0.77)
    assert [scale for scale, *_ in found.trace] == [0.0, 0.5, 1.0]


def test_where_nothing_keeps_the_control_the_model_stays(problem, tmp_path, monkeypatch):
    bench = Forgetting(problem, tmp_path, monkeypatch, {0.0: (0.9, 0.8), 0.5: (0.6, 0.1), 1.0: (0.1, 0.0)})
    assert negation.negate(bench, vectors.TaskVector(problem.theta0), "greek", scales=(0.5, 1.0)).scale == 0.0


def test_no_control_no_negation(problem, tmp_path):
    bench = Bench(problem._replace(control=None), None, tmp_path / "cache", 0, print)
    with pytest.raises(ValueError, match="needs a control task"):
        negation.negate(bench, {}, "greek", scales=(1.0,))


# ---------------------------------------------------------------- configs
@pytest.mark.parametrize("own, sentence", [
    ({"methods": [{"name": "taols"}]}, "did you mean 'talos'"),
    ({"methods": [{"name": "full"}]}, "lacks talos"),
    ({"methods": [{"name": "talos"}, {"name": "talos"}]}, "two methods are called 'talos'"),
    ({"methods": [{"name": "talos", "sparsity": 1.0}]}, "between 0 and 1"),
    ({"methods": [{"name": "talos", "sparsty": 0.9}]}, "did you mean 'sparsity'"),
    ({"methods": [{"name": "talos", "preset": "offical"}]}, "did you mean 'official'"),
    ({"methods": [{"name": "talos", "score": "fischer"}]}, "did you mean 'fisher'"),
    ({"methods": [{"name": "talos", "seeds": [7]}]}, "holds 7, which is none of 0"),
    ({"methods": [{"name": "talos", "label": "a/b"}]}, "names a directory"),
    ({"methods": [{"name": "talos", "rates": [0.0]}]}, "rates are numbers above 0; got 0.0"),
    ({"methods": [{"name": "talos", "rates": [0.1], "lr": 0.1}]}, "give one of them"),
    ({"methods": [{"name": "full", "rates": [0.1]}, {"name": "talos"}]}, "whose learning rate is finetune.lr"),
    ({"methods": [{"name": "ia3", "rank": 4}, {"name": "talos"}]}, "no field 'rank'"),
    ({"negation": {"scales": [1.0], "threshold": 2}}, "share of the control's accuracy"),
    ({"sweep": {"sparsities": [0.0], "seeds": [0]}}, "between 0 and 1"),
    ({"studies": {"names": ["prunning"], "seeds": [0], "budget": 1}}, "did you mean 'pruning'"),
])
def test_slips_are_one_sentence(own, sentence):
    made = config()
    made.unlock()
    for name, value in own.items():
        made.talos[name] = value
    with pytest.raises(ValueError, match=sentence):
        talos.plan(made)


def test_a_preset_fills_in_what_is_not_given():
    paper, official = (talos_plan._tuning({"name": "talos", **more}, (0,)).options
                       for more in ({}, {"preset": "official", "score": "abs"}))
    assert paper["score"] == "fisher" and paper["batches_per_round"] == 10 and paper["norm"] == "chosen"
    assert official["score"] == "abs" and official["batches_per_round"] is None and official["soft"] == 0.1


def test_a_budget_below_one_example_is_a_sentence(problem, tmp_path):
    bench = bench_of(problem, tmp_path, config())
    with pytest.raises(ValueError, match="does not hold the gradient of one example"):
        talos_tuning.calibrated(bench, "greek", bench.todo.methods[1].options, 10)
