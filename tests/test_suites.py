"""Problems of sentences, arrays and named vision tasks, under tiny models; the benchmark's job and its report."""
import json

import jax
import numpy as np
import pytest
from PIL import Image

from tvjax import checkpoints, evaluation, experiment, reports, results, tree, vectors
from tvjax.data import pools
from tvjax.experiment import benchmark, finetune, suites
from tvjax.models import bert, clip, gpt2

pytestmark = pytest.mark.usefixtures("quick_compilation")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "cat", "dog", "this", "is", "text", "about", "the")
VISION = {"model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 8}
PROCESSOR = {"image_processor_type": "CLIPImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A folder of a tiny BERT of random weights with a vocabulary of words."""
    folder = tmp_path_factory.mktemp("bert")
    spec = bert.Spec(width=8, hidden=16, depth=1, heads=2, vocabulary=len(WORDS), positions=12)
    params = jax.device_get(bert.init(bert.BERT(spec), jax.random.key(0)))
    (folder / "config.json").write_text(json.dumps({
        "model_type": "bert", "vocab_size": len(WORDS), "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 12}))
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    checkpoints.save(params, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A folder of three tasks of sentences."""
    folder, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    for name, labels in (("mood", ("bad", "good")), ("pet", ("cat", "dog")), ("held", ("cat", "bad"))):
        row = lambda labels=labels: (label := int(rng.integers(2)), f"the text is {labels[label]}")
        (folder / f"text_{name}.json").write_text(json.dumps(
            {"labels": labels, "train": [row() for _ in range(40)], "test": [row() for _ in range(10)]}))
    return folder


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    """A folder of a tiny CLIP vision tower of random weights."""
    folder = tmp_path_factory.mktemp("tower")
    spec = clip.Spec(clip.VisionSpec(8, 16, 1, 2, image_size=8, patch=4), text=None, projection_dim=8)
    (folder / "config.json").write_text(json.dumps(VISION))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    checkpoints.save(jax.device_get(clip.init(clip.CLIP(spec), jax.random.key(0))), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def arrays_file(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("arrays") / "a.npz", np.random.default_rng(0)
    np.savez(path, **{f"{task}_{split}_{part}": value for task in "abc" for split, n in (("train", 40), ("test", 8))
                      for part, value in (("x", rng.integers(0, 256, (n, 6, 6)).astype(np.uint8)),
                                          ("y", np.arange(n) % 3))})
    return path


def config(**changes):
    """A benchmark of two steps."""
    return {"job": "benchmark", "name": "tiny", "counts": [2], "seeds": [0], "finetuned": [], "vectors": "",
            "examples": {"train": 20, "val": 4, "test": 8}, "scales": [0.5, 1.0], "select_on": "val", "batch": 8,
            "finetune": {"steps": 2, "batch": 4, "lr": 1e-3, "warmup": 1, "weight_decay": 0.1},
            "merges": [{"name": "average"}, {"name": "task_arithmetic"}], "save_models": True, "allow_nonfinite": False,
            "benchmark": {"negation": [0.5], "threshold": 0.95, "probe": 8, "expected": {"average": 0.5}}, **changes}


def of_text(encoder, sentences, **changes):
    return config(model=str(encoder), suite="text", sources=[str(sentences)], tasks=["mood", "pet"], control="held",
                  data={"tokens": 8, "truncate": False}, **changes)


def of_arrays(tower, path, **changes):
    return config(model=str(tower), suite="arrays", sources=[str(path)], tasks=["a", "b"], control="c",
                  data={"heads": "prototypes", "shots": 2}, **changes)


@pytest.fixture(scope="module")
def done(encoder, sentences, tmp_path_factory, quick_compilation):
    """(folder, rows) of the job on sentences."""
    folder = tmp_path_factory.mktemp("work") / "new"
    return folder, benchmark.run(of_text(encoder, sentences), folder, say=lambda _: None, progress=False)


def test_a_problem_of_sentences(encoder, sentences):
    about = experiment.problem(benchmark.plan(of_text(encoder, sentences)).usual)
    inputs, labels = about.splits["mood"]["train"]
    assert inputs["input_ids"].shape == (20, 8) and len(labels) == 20 and about.control == "held"
    assert set(about.heads) == set(about.splits) == set(about.keys) == {"mood", "pet", "held"}
    assert "pooler" not in about.theta0 and "pooler" in about.pretrained.params
    assert about.encode(jax.device_put(about.theta0), {k: x[:3] for k, x in inputs.items()}).shape == (3, 8)
    norms = np.linalg.norm(np.asarray(about.heads["mood"]), axis=0)
    np.testing.assert_allclose(norms, 20.0, rtol=1e-5)
    assert len({key for splits in about.keys.values() for key in splits.values()}) == 9


def test_a_problem_of_arrays(tower, arrays_file):
    about = experiment.problem(benchmark.plan(of_arrays(tower, arrays_file)).usual)
    images, labels = about.splits["a"]["train"]
    assert images.shape == (20, 8, 8, 3) and about.heads["c"].shape == (8, 3)
    features = evaluation.features(about.encode, about.theta0, images, batch=8)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    chosen = [np.flatnonzero(labels == c)[:2] for c in range(3)]
    mean = np.stack([unit[rows].mean(0) for rows in chosen])
    by_hand = 20 * (mean / np.linalg.norm(mean, axis=1, keepdims=True)).T
    np.testing.assert_allclose(about.heads["a"], by_hand, atol=1e-5)


def test_the_job_leaves_rows_of_addition_probe_and_negation(done):
    folder, rows = done
    methods = {row["method"] for row in results.select(rows, metric="accuracy", split="test", task="average")}
    assert methods == {"zero-shot", "fine-tuned", "average", "task_arithmetic", "linear probe"}
    assert {row["method"] for row in results.select(rows, metric="target", split="test")} == {"zero-shot", "negated"}
    assert results.read(folder / "results.jsonl") == rows
    assert all(row["suite"] == "text:mood+pet" for row in rows)
    told = results.select(rows, metric="examples", task="pet")
    assert {row["split"]: row["value"] for row in told} == {"train": 20, "val": 4, "test": 8}
    assert "text_pet.json (validation: 4 of 40 training examples" in told[0]["source"]


def test_a_merged_encoder_is_a_folder_that_loads(done, encoder):
    read = bert.from_pretrained(done[0] / "merged" / "2-tasks" / "average")
    base = bert.from_pretrained(encoder)
    assert set(tree.flatten(read.params)) == set(tree.flatten(base.params))
    np.testing.assert_array_equal(read.params["pooler"]["dense"]["bias"], base.params["pooler"]["dense"]["bias"])
    assert read.tokenizer(["good cat"])["input_ids"] == [[2, 4, 6, 3]]


def test_the_report_has_published_numbers_beside_and_a_table_of_negation(done):
    made = reports.write(done[0], command="the command")
    tables = (done[0] / "tables.md").read_text()
    assert "| method | average | normalised | published |" in tables and "## Negation" in tables and "## Data" in tables
    assert any(path.name == "report.html" for path in made)


def test_any_job_may_judge_models_linearised(done, encoder, sentences, tmp_path):
    given = of_text(encoder, sentences, geometry="linearised", vectors=str(done[0]), save_models=False)
    rows = benchmark.run(given, tmp_path, say=lambda _: None, progress=False)
    about = experiment.problem(benchmark.plan(given).usual)
    tau = checkpoints.load_task_vector(tmp_path / "task_vectors" / "seed0" / "mood.safetensors").params
    by_hand = evaluation.accuracy(evaluation.classify_linearised(about.encode), (about.theta0, tau),
                                  about.heads["mood"], about.splits["mood"]["test"], batch=8)
    [one] = results.select(rows, method="fine-tuned", metric="accuracy", task="mood", split="test")
    assert one["value"] == by_hand and one["family"].endswith("judged linearised")
    with pytest.raises(ValueError, match="geometry is 'standard' or 'linearised'; got 'linear'"):
        benchmark.plan({**given, "geometry": "linear"})


def test_task_vectors_are_reused(done, encoder, sentences):
    usual = benchmark.plan(of_text(encoder, sentences)).usual
    about = experiment.problem(usual)
    assert finetune.finetune(about, usual, "mood", seed=0, workdir=done[0]).reused


def test_an_expert_given_as_a_folder_is_taken(done, encoder, sentences):
    usual = benchmark.plan(of_text(encoder, sentences, finetuned=[f"mood={encoder}"])).usual
    about = experiment.problem(usual)
    one = finetune.finetune(about, usual, "mood", seed=1, workdir=done[0])
    assert one.ratio == 0.0


@pytest.mark.parametrize("changes, sentence", [
    (dict(tasks=["mood", "pets"]), "no task 'pets' in .*did you mean 'pet'"),
    (dict(sources=[]), "the suite text needs sources"), (dict(control="mood"), "leave it out of tasks"),
    (dict(data={"token": 3}), "data has no field 'token'; did you mean 'tokens'"),
    (dict(data={"templates": ["x"]}), "a list of prompts, each with one {}"),
    (dict(data={"scale": 0}), "above 0"), (dict(data={"tokens": 1}), "at least 2"),
    (dict(examples={"train": 0, "val": 1, "test": 1}), "examples.train"),
    (dict(finetuned=["mood=nowhere"]), "no directory nowhere"),
    (dict(control=""), "negation needs a control task"),
])
def test_slips_in_a_config_of_sentences(encoder, sentences, changes, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        benchmark.plan({**of_text(encoder, sentences), **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field, value, sentence", [
    ("threshold", 0, "at most 1; got 0"), ("probe", -1, "benchmark.probe"), ("negation", ["x"], "no finite number"),
    ("tresh", 1, "did you mean 'threshold'"),
])
def test_slips_in_the_jobs_own_fields(encoder, sentences, field, value, sentence):
    given = of_text(encoder, sentences)
    with pytest.raises(ValueError, match=sentence):
        benchmark.plan({**given, "benchmark": {**given["benchmark"], field: value}})


def test_texts_that_are_longer_than_the_model_or_the_config(encoder, sentences):
    plan = lambda **data: benchmark.plan({**of_text(encoder, sentences), "data": data}).usual
    with pytest.raises(ValueError, match="data.tokens is 13, but .* texts of at most 12 tokens"):
        experiment.problem(plan(tokens=13))
    with pytest.raises(ValueError, match="has 6 tokens, data.tokens is 5: raise it, or set data.truncate"):
        experiment.problem(plan(tokens=5, truncate=False, templates=["{}"]))


def test_an_encoder_without_a_tokenizer(encoder, sentences, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((encoder / name).read_bytes())
    with pytest.raises(ValueError, match="holds no tokenizer"):
        experiment.problem(benchmark.plan(of_text(tmp_path, sentences)).usual)


def test_a_hub_that_does_not_answer(encoder, sentences):
    with pytest.raises(ValueError, match="no folder here.*hub gave no such model"):
        experiment.problem(benchmark.plan(of_text(encoder, sentences, finetuned=["mood=some/expert"])).usual)


def test_heads_of_class_names_need_a_text_tower_and_names(tower, arrays_file):
    plan = benchmark.plan({**of_arrays(tower, arrays_file), "data": {"heads": "text"}}).usual
    with pytest.raises(ValueError, match="no text tower.*prototypes"):
        experiment.problem(plan)
    with pytest.raises(ValueError, match="data.heads is 'text' or 'prototypes'"):
        benchmark.plan({**of_arrays(tower, arrays_file), "data": {"heads": "words"}})
    with pytest.raises(ValueError, match="no training image of class"):
        experiment.problem(benchmark.plan(of_arrays(tower, arrays_file, examples={
            "train": 2, "val": 2, "test": 2})).usual)


def test_glyphs_have_a_control_and_take_no_sources():
    given = {"sources": [], "control": "", "data": {}}
    assert suites.check_glyphs(("greek",), given) == {"control": "control"}
    with pytest.raises(ValueError, match="has sources of its own"):
        suites.check_glyphs(("greek",), {**given, "sources": ["a"]})


def test_named_vision_tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = {"suite": "vision", "sources": [str(tmp_path)], "control": "", "data": {}}
    with pytest.raises(ValueError, match="no source at hand for the task 'cars'"):
        suites.check_vision(("cars",), given)
    with pytest.raises(ValueError, match="is called 'cars' here"):
        suites.check_vision(("stanford-cars",), given)
    for split in ("train", "test"):
        for digit in range(10):
            place = tmp_path / "mnist" / split / str(digit)
            place.mkdir(parents=True)
            Image.new("L", (9, 9), 20 * digit + (split == "test")).save(place / "0.png")
    assert suites.check_vision(("mnist",), given)["sources"] == (str(tmp_path),)


def test_published_pools():
    pool = pools.pool("vit_b_32")
    assert pool.tasks[:3] == ("sun397", "cars", "resisc45") and len(pool.tasks) == len(pool.finetuned) == 20
    assert pool.id_of("pets") == "tanganke/clip-vit-base-patch32_oxford-iiit-pet"
    assert pools.expected("vit_b_32", 8)["task_arithmetic"] == 0.68
    assert pools.expected("vit_b_32", 8)["fine-tuned"] == pytest.approx(0.9038, abs=1e-4)
    assert "task_arithmetic" not in pools.expected("vit_b_32", 14)
    with pytest.raises(ValueError, match="did you mean 'vit_b_32'"):
        pools.pool("vit_b32")


def test_a_tower_alone_keeps_the_pretrained_projection(tower, tmp_path):
    from tvjax.experiment import glyph_suite
    params = clip.from_pretrained(tower).params
    (tmp_path / "config.json").write_text(json.dumps(VISION))
    checkpoints.save({"vision_model": params["vision_model"]}, tmp_path / "model.safetensors")
    found = glyph_suite.visual_of(clip.visual(params), tmp_path)
    assert set(tree.flatten(found)) == set(tree.flatten(clip.visual(params)))


def gpt2_folder(folder, *, labels, seed=0):
    """A tiny GPT-2 of random weights that reads letters; with a head where it has labels, and then a padding token."""
    import transformers
    letters = {"<|endoftext|>": 0, **{letter: i + 1 for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz\u0120")}}
    transformers.GPT2Config(vocab_size=len(letters), n_embd=8, n_layer=1, n_head=2, n_inner=16, n_positions=24,
                            bos_token_id=0, eos_token_id=0, num_labels=max(labels, 2), pad_token_id=0 if labels else
                            None).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(letters))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    spec = gpt2.Spec(8, 16, 1, 2, len(letters), 24, max(labels, 2), pad=0)
    params = jax.device_get(gpt2.init(gpt2.GPT2(spec), jax.random.key(seed)))
    checkpoints.save(params if labels else gpt2.backbone(params), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def gpt2s(tmp_path_factory):
    """(a base without a head or a padding token, two classifiers)."""
    folder = tmp_path_factory.mktemp("gpt2")
    for name in ("base", "mood", "pet"):
        (folder / name).mkdir()
    return (gpt2_folder(folder / "base", labels=0), gpt2_folder(folder / "mood", labels=2, seed=1),
            gpt2_folder(folder / "pet", labels=2, seed=2))


def test_gpt2_is_tuned_and_merged_under_probes(gpt2s, sentences, tmp_path):
    given = of_text(gpt2s[0], sentences)
    given |= {"data": {"tokens": 20, "heads": "probe"}, "merges": given["merges"][:1]}
    inputs, _ = experiment.problem(benchmark.plan(given).usual).splits["mood"]["train"]
    assert inputs["input_ids"][0, :5].tolist() == [20, 8, 5, 27, 20] and inputs["attention_mask"][0, -1] == 0
    rows = benchmark.run(given, tmp_path, say=lambda _: None, progress=False)
    accuracy = {row["method"]: row["value"] for row in results.select(rows, metric="accuracy", split="test",
                                                                      task="average")}
    assert set(accuracy) == {"zero-shot", "fine-tuned", "average", "linear probe"}
    assert set(gpt2.from_pretrained(tmp_path / "merged" / "2-tasks" / "average").params) == {"transformer"}


def test_published_gpt2s_keep_their_heads(gpt2s, sentences, tmp_path):
    base, *experts = gpt2s
    given = {**of_text(base, sentences, finetuned=[f"{path.name}={path}" for path in experts]), "control": ""}
    given |= {"data": {"tokens": 20, "heads": "checkpoint"}, "benchmark": {**given["benchmark"], "negation": []}}
    usual = benchmark.plan(given).usual
    about = experiment.problem(usual)
    found = gpt2.from_pretrained(experts[0])
    inputs, labels = about.splits["mood"]["test"]
    tau = finetune.finetune(about, usual, "mood", seed=0, workdir=tmp_path).tau
    made = about.predict(vectors.add(about.theta0, tau), about.heads["mood"], inputs)
    theirs = gpt2.logits(found.model)(found.params, inputs["input_ids"], inputs["attention_mask"])
    np.testing.assert_allclose(made, theirs, rtol=1e-5, atol=1e-6)


def test_slips_with_heads_of_checkpoints(gpt2s, encoder, sentences):
    given = {**of_text(gpt2s[0], sentences), "data": {"heads": "checkpoint"}}
    with pytest.raises(ValueError, match="which names none for 'mood'"):
        benchmark.plan(given)
    given["finetuned"] = [f"mood={gpt2s[1]}", f"pet={encoder}"]
    with pytest.raises(ValueError, match="no head for the control 'held'"):
        benchmark.plan(given)
    with pytest.raises(ValueError, match="data.heads is 'descriptions' or 'probe' or 'checkpoint'"):
        benchmark.plan({**given, "data": {"heads": "head"}})
    given |= {"control": "", "benchmark": {**given["benchmark"], "negation": []}, "data": {"heads": "checkpoint",
                                                                                          "tokens": 20}}
    with pytest.raises(ValueError, match="this reads gpt2"):
        experiment.problem(benchmark.plan(given).usual)


def test_a_model_that_reads_no_sentences(tower, sentences):
    with pytest.raises(ValueError, match="model_type 'clip_vision_model'; sentences are read by bert, roberta, gpt2"):
        experiment.problem(benchmark.plan(of_text(tower, sentences)).usual)


def test_glue_by_name_for_encoders(encoder, tmp_path):
    for split in ("train", "validation"):
        (tmp_path / "glue-rte").mkdir(exist_ok=True)
        (tmp_path / "glue-rte" / f"{split}.jsonl").write_text("\n".join(
            json.dumps({"sentence1": "the cat", "sentence2": "good", "label": i % 2}) for i in range(20)))
    given = config(model=str(encoder), suite="text", sources=[str(tmp_path)], tasks=["glue-rte"], control="",
                   data={"tokens": 8, "templates": ["{}"]}, counts=[1])
    given["benchmark"]["negation"] = []
    about = experiment.problem(benchmark.plan(given).usual)
    inputs, labels = about.splits["glue-rte"]["test"]
    assert inputs["input_ids"][0].tolist() == [2, 12, 6, 3, 4, 3, 0, 0] and about.heads["glue-rte"].shape == (8, 2)
    with pytest.raises(ValueError, match="no source at hand|no task"):
        benchmark.plan({**given, "tasks": ["glue-mnli"]})
