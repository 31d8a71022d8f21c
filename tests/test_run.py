"""The command from end to end on a tiny setting: what it leaves, what it reuses, and what it says to slips."""
import json
import pathlib
import runpy
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from tvjax import checkpoints, merging, results, run, training, tree, vectors
from tvjax.data import glyphs
from tvjax.experiment import finetune, job
from tvjax.models import clip
from tvjax.training import feed

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).parents[1]


def small(**changes):
    """The quickstart's runlocal with two merges."""
    config = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]("runlocal")
    config.merges = (ConfigDict(dict(name="task_arithmetic")), ConfigDict(dict(name="consensus", lam="val", k=1)))
    for name, value in changes.items():
        config[name] = value
    return config


@pytest.fixture(scope="module")
def done(tmp_path_factory, quick_compilation):
    """(folder, rows, what was said)."""
    folder, said = tmp_path_factory.mktemp("work") / "new", []
    return folder, run.run(small(), folder, say=said.append), said


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_everything_is_left_in_the_folder(done):
    folder, rows, _ = done
    names = contents(folder)
    assert {"config.json", "results.jsonl", "tables.md", "tables.tex", "report.html"} <= set(names)
    assert "figures/per_task_2.png" in names
    assert json.loads(names["config.json"])["merges"][1] == {"k": 1, "lam": "val", "name": "consensus"}
    assert results.read(folder / "results.jsonl") == rows
    assert not [name for name in names if name.startswith("state/") or "tmp" in name]


def test_rows_have_their_fields_and_a_header(done):
    folder, rows, _ = done
    assert all(set(results.FIELDS) <= set(row) for row in rows)
    [header] = results.headers(folder / "results.jsonl")
    assert {"jax", "tvjax", "device", "hashes"} <= set(header) and set(header["hashes"]) == {"base", "data"}
    methods = {row["method"] for row in results.select(rows, metric="accuracy")}
    assert methods == {"zero-shot", "fine-tuned", "task_arithmetic", "consensus"}


def test_normalised_is_over_the_fine_tuned_model_of_the_same_split(done):
    _, rows, _ = done
    value = {(r["metric"], r["method"], r["task"], r["split"]): r["value"] for r in rows if "accuracy" in r["metric"]}
    for split in ("val", "test"):
        ratios = [value["accuracy", "consensus", task, split] / value["accuracy", "fine-tuned", task, split]
                  for task in ("greek", "digits")]
        assert value["normalised accuracy", "consensus", "average", split] == pytest.approx(np.mean(ratios))


def test_alpha_is_the_first_maximum_of_its_validation_trace(done):
    _, rows, _ = done
    trace = results.select(rows, metric="trace", method="task_arithmetic")
    assert {row["split"] for row in trace} == {"val"} and [row["scale"] for row in trace] == [0.0, 0.5, 1.0]
    best = max(trace, key=lambda row: row["value"])["scale"]
    assert {row["scale"] for row in results.select(rows, metric="accuracy", method="task_arithmetic")} == {best}


def test_task_vectors_and_merged_models_are_what_they_say(done):
    folder, rows, _ = done
    base = clip.from_pretrained(glyphs.pretrained_dir())
    taus = [checkpoints.load_task_vector(folder / "task_vectors" / "seed0" / f"{task}.safetensors").params
            for task in ("greek", "digits")]
    scale = results.select(rows, metric="accuracy", method="task_arithmetic")[0]["scale"]
    merged = clip.from_pretrained(folder / "merged" / "2-tasks" / "task_arithmetic")
    expected = vectors.add(clip.visual(base.params), merging.task_arithmetic(scale=1.0)(taus), scale=scale)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), clip.visual(merged.params), expected)
    np.testing.assert_array_equal(merged.params["logit_scale"], base.params["logit_scale"])
    assert merged.tokenizer("greek")["input_ids"] == base.tokenizer("greek")["input_ids"]


def test_a_second_run_reuses_all_and_says_so(done, monkeypatch):
    folder, rows, _ = done
    said, before = [], contents(folder)["cache.jsonl"]
    monkeypatch.setattr(training, "fit", lambda *_, **__: pytest.fail("fine-tuned again"))
    again = run.run(small(), folder, say=said.append)
    measured = lambda found: [row for row in found if row["metric"] not in ("seconds", "peak bytes")]
    assert measured(again) == measured(rows)
    assert contents(folder)["cache.jsonl"] == before
    assert sum("reused its task vector" in line for line in said) == 2


def test_another_merge_in_the_same_folder_reuses_the_task_vectors(done, monkeypatch):
    folder, _, _ = done
    monkeypatch.setattr(training, "fit", lambda *_, **__: pytest.fail("fine-tuned again"))
    rows = run.run(small(merges=(ConfigDict(dict(name="average")),)), folder, say=lambda _: None)
    assert {row["method"] for row in results.select(rows, metric="accuracy")} == {"zero-shot", "fine-tuned", "average"}


def test_a_folder_of_another_config_is_refused_and_left_alone(done):
    folder, _, _ = done
    before = contents(folder)
    with pytest.raises(ValueError, match="belongs to another config .tasks greek, digits there, lao, boxes here"):
        run.run(small(tasks=("lao", "boxes")), folder, say=lambda _: None)
    assert contents(folder) == before


def test_selection_on_test_is_recorded_and_shouted(done, tmp_path):
    shutil.copytree(done[0] / "task_vectors", tmp_path / "w" / "task_vectors")
    shutil.copy(done[0] / "config.json", tmp_path / "w")
    config = small(select_on="test", merges=(ConfigDict(dict(name="task_arithmetic")),))
    rows = run.run(config, tmp_path / "w", say=lambda _: None)
    assert {row["split"] for row in results.select(rows, metric="trace")} == {"test"}
    assert "selected on the TEST split" in (tmp_path / "w" / "report.html").read_text()


def test_an_interrupted_run_goes_on_to_the_same_bits(done, tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "SAVE_EVERY", 2)
    whole, starts = training.batches, []

    def cut(split, **options):
        starts.append(options["start"])
        for i, batch in enumerate(whole(split, **options)):
            if options["start"] == 0 and i == 3:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(feed, "batches", cut)
    config = small(merges=(ConfigDict(dict(name="average")),), save_models=False)
    while len(starts) < 4:
        try:
            run.run(config, tmp_path / "w", say=lambda _: None)
        except KeyboardInterrupt:
            assert (tmp_path / "w" / "state").exists()
    assert starts == [0, 2, 0, 2]
    for task in ("greek", "digits"):
        pair = [checkpoints.load_task_vector(folder / "task_vectors" / "seed0" / f"{task}.safetensors").params
                for folder in (tmp_path / "w", done[0])]
        jax.tree.map(np.testing.assert_array_equal, *pair)


@pytest.fixture
def copied(tmp_path):
    """A function (change of the flat weights) -> folder of a changed copy of the pretrained model."""
    def make(change):
        base = clip.from_pretrained(glyphs.pretrained_dir())
        flat = {name: np.array(leaf) for name, leaf in tree.flatten(base.params).items()}
        change(flat)
        clip.save_pretrained(base, tree.unflatten(flat), tmp_path / "changed")
        return tmp_path / "changed"
    return make


def test_a_model_with_nan_is_refused_by_name(copied, tmp_path):
    def spoil(flat):
        flat["visual_projection.weight"][1, 2] = np.nan
    folder = copied(spoil)
    with pytest.raises(ValueError, match=r"visual_projection.weight\[1, 2\] is nan"):
        run.run(small(model=str(folder)), tmp_path / "w", say=lambda _: None)
    assert not (tmp_path / "w").exists()


def test_a_model_of_another_base_is_told_with_the_figure(copied, tmp_path):
    def shuffle(flat):
        rng = np.random.default_rng(0)
        for name in flat:
            flat[name] = rng.permutation(flat[name].ravel()).reshape(flat[name].shape)
    config = small(finetuned=(f"greek={copied(shuffle)}",))
    about = job.problem(job.plan(config))
    tuned = finetune.finetune(about, job.plan(config), "greek", seed=0, workdir=tmp_path / "w")
    assert f"‖θ − θ0‖/‖θ0‖ = {tuned.ratio:.2f}" in tuned.note and tuned.ratio > 0.5


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "tvjax.run", *arguments], cwd=ROOT, capture_output=True, text=True)


QUICK = "--config=configs/quickstart.py:runlocal"


@pytest.mark.parametrize("arguments, sentence", [
    ([QUICK, "--config.sed=1"], "no field sed in configs/quickstart.py; did you mean seeds?"),
    ([QUICK, "--config.merges[1].nme=ties"], "did you mean merges[1].name?"),
    ([QUICK, "--config.merges[1].name=tise"], "no merge called 'tise'; did you mean 'ties'?"),
    ([QUICK, "--config.finetune.lr=fast"], "fast"),
    ([QUICK, "--config.tasks=()"], "tasks is empty"),
    (["--config=configs/quikstart.py"],
     "there is no config file configs/quikstart.py; did you mean configs/quickstart.py?"),
    (["--config=configs/glyphs.py:9"], "glyphs takes :8, :14, :20, :runlocal; got :9"),
    ([], "--config"),
    (["--confg=x"], "confg"),
    ([QUICK, "workdir"], "what is 'workdir'?"),
    ([QUICK, "--workdir=README.md"], "README.md is a file"),
])
def test_a_slip_is_one_sentence_and_exit_code_2(arguments, sentence, tmp_path):
    where = [] if any("workdir" in part for part in arguments) else [f"--workdir={tmp_path / 'w'}"]
    ended = command(*arguments, *where)
    assert ended.returncode == 2, ended.stderr
    assert sentence in ended.stderr and "Traceback" not in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "w").exists()


def test_trouble_with_the_disk_is_one_sentence(monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "results.jsonl")
    monkeypatch.setattr(run, "run", full)
    monkeypatch.setattr(run, "CONFIG", type("Flag", (), {"value": None}))
    monkeypatch.setattr(run, "WORKDIR", type("Flag", (), {"value": None}))
    monkeypatch.setattr(run, "TRACK", type("Flag", (), {"value": None}))
    monkeypatch.setattr(run, "TRACEBACK", type("Flag", (), {"value": False}))
    with pytest.raises(SystemExit) as ended:
        run.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "[Errno 28] No space left on device: 'results.jsonl'\n"
