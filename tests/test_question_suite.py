"""T5 on text-to-text tasks: fine-tune, merge, evaluate from a config, with a tiny model of random weights."""
import json

import jax
import numpy as np
import pytest

from tvjax import checkpoints, evaluation, experiment, results, tree, vectors
from tvjax.data import questions
from tvjax.experiment import benchmark, partial_job, partial_plan, question_suite, suites
from tvjax.models import t5

pytestmark = pytest.mark.usefixtures("quick_compilation")
LETTERS = "abcdefghijklmnopqrstuvwxyzACDIOST:?|'.,_0123456789"
SPEC = t5.Spec(vocabulary=4 + len(LETTERS), width=8, head_width=4, heads=2, hidden=16, depth=1, decoder_depth=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a tiny T5 of random weights that reads letters."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram
    folder = tmp_path_factory.mktemp("t5")
    transformers.T5Config(vocab_size=SPEC.vocabulary, d_model=8, d_kv=4, num_heads=2, d_ff=16, num_layers=1,
                          num_decoder_layers=1, decoder_start_token_id=0).save_pretrained(folder)
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(Unigram(words, 2)), eos_token="</s>",
                                         unk_token="<unk>", pad_token="<pad>").save_pretrained(folder)
    checkpoints.save(jax.device_get(t5.init(t5.T5(SPEC), jax.random.key(0))), folder / "model.safetensors")
    return folder


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a task of GLUE, a graded one, one that brings its choices, a control, and sentences of our own."""
    folder, rng = tmp_path_factory.mktemp("questions"), np.random.default_rng(0)
    word = lambda: "".join(rng.choice(list("abcde"), 3))
    for split, count in (("train", 40), ("validation", 48)):
        lines(folder / "glue-rte" / f"{split}.jsonl", [
            dict(sentence1=word(), sentence2=word(), label=int(rng.integers(2))) for _ in range(count)])
        lines(folder / "glue-stsb" / f"{split}.jsonl", [
            dict(sentence1=word(), sentence2=word(), label=float(rng.integers(51)) / 10) for _ in range(count)])
        lines(folder / "winogrande" / f"{split}.jsonl", [
            dict(sentence=f"{word()} _", option1=word(), option2="ab", answer=str(rng.integers(1, 3)))
            for _ in range(count)])
        lines(folder / "qasc" / f"{split}.jsonl", [
            dict(question=word(), choices=dict(text=["a", "b", "c"][:n], label=["A", "B", "C"][:n]), answerKey="A")
            for n in rng.integers(2, 4, count)])
    (folder / "own.json").write_text(json.dumps({"labels": ["bad", "fine"], **{
        split: [[i % 2, word()] for i in range(20)] for split in ("train", "test")}}))
    return folder


def config(model, folder, *, tasks=("glue-rte", "winogrande"), **changes):
    """A benchmark of two steps."""
    return {"job": "benchmark", "name": "tiny", "model": str(model), "suite": "questions", "sources": [str(folder)],
            "tasks": list(tasks), "control": "own", "counts": [len(tasks)], "seeds": [0], "finetuned": [],
            "vectors": "", "examples": {"train": 16, "val": 4, "test": 8}, "scales": [0.5, 1.0], "select_on": "val",
            "batch": 8, "finetune": {"steps": 2, "batch": 4, "lr": 1e-2, "warmup": 1, "weight_decay": 0.0},
            "merges": [{"name": "task_arithmetic"}], "save_models": True, "allow_nonfinite": False,
            "data": {"tokens": 24, "answers": 8, "prompts": "v0"},
            "benchmark": {"negation": [0.5], "threshold": 0.95, "probe": 0, "expected": {}}, **changes}


def problem(*args, **changes):
    about = experiment.problem(benchmark.plan(config(*args, **changes)).usual)
    return about._replace(theta0=jax.device_put(about.theta0))


def test_fine_tune_merge_evaluate(model, data, tmp_path):
    rows = benchmark.run(config(model, data), tmp_path, say=lambda _: None, progress=False)
    methods = {row["method"] for row in results.select(rows, metric="accuracy", split="test", task="average")}
    assert methods == {"zero-shot", "fine-tuned", "task_arithmetic"}
    assert {row["method"] for row in results.select(rows, metric="target", split="test")} == {"zero-shot", "negated"}
    assert "glue-rte (validation: 4 of 40 training examples" in results.select(
        rows, metric="examples", task="glue-rte")[0]["source"]
    read = t5.from_pretrained(tmp_path / "merged" / "2-tasks" / "task_arithmetic")
    assert set(tree.flatten(read.params)) == set(tree.flatten(t5.from_pretrained(model).params))
    vector = checkpoints.load_task_vector(tmp_path / "task_vectors" / "seed0" / "winogrande.safetensors").params
    about = problem(model, data)
    inputs, labels = about.splits["winogrande"]["train"]
    score = lambda theta: lambda head, inputs: about.predict(theta, head, inputs)
    loss = jax.jit(lambda theta: about.criterion(score(theta), None, 2, inputs, labels))
    assert loss(vectors.add(about.theta0, vectors.TaskVector(vector))) < loss(about.theta0)


def test_scores_are_log_probabilities_and_answers_their_largest(model, data):
    about = problem(model, data, tasks=("qasc", "glue-rte"))
    inputs, labels = about.splits["qasc"]["test"]
    found = jax.jit(about.encode)(about.theta0, inputs)
    plain = jax.jit(t5.choice_log_probs(about.pretrained.model))(
        about.theta0, inputs["input_ids"], inputs["attention_mask"], inputs["choices"])
    there = (inputs["choices"] != 0).any(-1)
    assert found.shape == (8, 3) and not there.all(), "some examples have two choices, some three"
    np.testing.assert_allclose(found[there], plain[there], rtol=1e-6)
    assert (found[~there] == question_suite.ABSENT).all()
    answers = evaluation.predictions(about.predict, about.theta0, about.heads["qasc"], inputs, batch=8)
    np.testing.assert_array_equal(answers, np.argmax(found, 1))
    assert about.heads["glue-rte"].shape == (2, 2) and about.readout is evaluation.plain
    assert inputs["choices"][0, 0].tolist()[-3:] == [0, 0, 0] and (inputs["choices"][0, 0] == 1).sum() == 1


def test_the_criterion_is_the_likelihood_of_the_answer(model, data):
    about = problem(model, data)
    inputs, labels = jax.tree.map(lambda x: x[:4], tuple(about.splits["winogrande"]["train"]))
    right = np.take_along_axis(inputs["choices"], labels[:, None, None], 1)[:, 0]
    loss = t5.loss(about.pretrained.model)
    score = lambda head, inputs: about.predict(about.theta0, head, inputs)
    by_hand, found = jax.jit(lambda theta, inputs: (
        loss(theta, inputs["input_ids"], inputs["attention_mask"], right), about.criterion(
            lambda head, inputs: about.predict(theta, head, inputs), about.heads["winogrande"], 2, inputs, labels)))(
                about.theta0, inputs)
    np.testing.assert_allclose(found, by_hand, rtol=1e-6)
    with pytest.raises(ValueError, match="data.criterion='choices'"):
        about.criterion(score, None, 2, inputs, labels, smoothing=0.1)
    assert problem(model, data, data={"criterion": "choices"}).criterion is not about.criterion


def test_grades_are_judged_by_rank(model, data):
    about = problem(model, data, tasks=("glue-stsb",))
    assert about.heads["glue-stsb"].shape == (51, 51)
    judged = about.judged(["glue-stsb", "own"], "test")
    assert about.sources["glue-stsb"].endswith("; judged by Spearman's rank correlation")
    labels = judged["glue-stsb"][1][1]
    metric = judged["glue-stsb"][2]
    assert metric(labels, labels) == pytest.approx(1) and metric(50 - labels, labels) == pytest.approx(-1)
    assert metric(np.full(len(labels), -1), labels) == 0 and len(judged["own"]) == 2


def test_generated_answers_are_matched_to_the_letter(model, data):
    about = problem(model, data, data={"tokens": 24, "answers": 8, "judge": "generated"})
    inputs, labels = jax.tree.map(lambda x: np.array(x[:3]), tuple(about.splits["winogrande"]["test"]))
    made = np.asarray(jax.jit(t5.generate(about.pretrained.model, max_new_tokens=8))(
        about.theta0, inputs["input_ids"], inputs["attention_mask"]))
    inputs["choices"][0, 1], inputs["choices"][1, 0] = made[0], made[1]
    answers = evaluation.predictions(about.judging, about.theta0, about.heads["winogrande"], inputs, batch=3)
    assert answers.tolist() == [1, 0, -1]


def test_lora_and_linearised_lora_of_a_t5(model, data, tmp_path):
    given = config(model, data)
    del given["benchmark"]
    way = {"kind": "lora", "options": {"rank": 1, "alpha": 2, "dropout": 0.1}}
    rows = partial_job.run({**given, "job": "llora", "llora": {
        "ways": [{"name": "LoRA", **way}, {"name": "L-LoRA", "scope": "module", **way}],
        "fusions": ["average"], "sizes": [2], "most": 0, "greedy": [1.0], "ties": {"densities": [1.0], "scales": [1.0]},
        "lorahub": {"budget": 1, "bound": 1.5, "penalty": 0.05}, "plane": {}, "scatter": False, "negation": False,
        "scaling": {}}}, tmp_path, say=lambda _: None, progress=False)
    fused = results.select(rows, part="fusion", metric="normalised accuracy", task="average")
    assert {row["way"] for row in fused} == {"LoRA", "L-LoRA"}


def test_jobs_that_judge_in_their_own_way(model, data):
    given = config(model, data)
    given.pop("benchmark")
    usual = lambda **more: {**given, "job": "llora", "llora": {}, **more}
    with pytest.raises(ValueError, match="the job llora judges by the scores of choices"):
        partial_plan.partial_plan(usual(data={"judge": "generated"}))
    with pytest.raises(ValueError, match="the job llora linearises by fields of its own"):
        partial_plan.partial_plan(usual(geometry="linearised"))
    with pytest.raises(ValueError, match="judges features, not generated answers"):
        problem(model, data, geometry="linearised", data={"tokens": 24, "judge": "generated"})


@pytest.mark.parametrize("changes, sentence", [
    (dict(tasks=["glue-rt"]), "no task 'glue-rt'.*did you mean 'glue-rte'"),
    (dict(tasks=["paws"]), "no source at hand for the task 'paws': save the hub's google-research-datasets/paws"),
    (dict(tasks=["ropes"], sources=["X/ropes"]), "ropes"),
    (dict(control="winogrande"), "leave it out of tasks"),
    (dict(data={"prompts": "v2"}), "data.prompts is 'v0' or 'v1'"), (dict(data={"answers": 1}), "from 2 on; got 1"),
    (dict(data={"template": "{}"}), "with {text} in it"), (dict(data={"answer": 3}), "did you mean 'answers'"),
    (dict(data={"judge": "x"}), "'choices' or 'generated'"),
])
def test_slips_in_a_config_of_questions(model, data, monkeypatch, changes, sentence):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=sentence) as caught:
        benchmark.plan(config(model, data, **changes))
    assert "\n" not in str(caught.value)


def test_texts_and_answers_that_are_too_long_or_too_many(model, data):
    short = lambda **more: problem(model, data, data={"tokens": 24, "truncate": False, "prompts": "v0", **more})
    with pytest.raises(ValueError, match="has .* tokens, data.tokens is 24"):
        short()
    with pytest.raises(ValueError, match="the answer 'entailment' has .* tokens, data.answers is 4"):
        short(tokens=128, answers=4)
    with pytest.raises(ValueError, match="data.choices is 1, but glue-rte has examples with 2"):
        short(tokens=128, choices=1)


def test_files_that_do_not_hold_what_they_should(tmp_path):
    read = lambda name: questions.read(name, [str(tmp_path)], prompts="v0", template="{text}",
                                       examples=dict(train=4, val=4, test=4))
    lines(tmp_path / "glue-rte" / "train.jsonl", [dict(sentence1="a", label=0)] * 20)
    with pytest.raises(ValueError, match="validation.jsonl is needed and cannot be read"):
        read("glue-rte")
    lines(tmp_path / "glue-rte" / "validation.jsonl", [dict(sentence1="a", sentence2="b", label=-1)])
    with pytest.raises(ValueError, match="lacks the column 'sentence2'"):
        read("glue-rte")
    lines(tmp_path / "glue-rte" / "train.jsonl", [dict(sentence1="a", sentence2="b", label=0)] * 20)
    with pytest.raises(ValueError, match="test holds no example whose answer is known"):
        read("glue-rte")
    (tmp_path / "glue-rte" / "train.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match="train.jsonl, line 1 is not JSON"):
        read("glue-rte")


def test_data_sets_saved_by_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [dict(question="q", answer="a", label=i % 2) for i in range(40)]
    datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split in ("train", "validation")}).save_to_disk(
        tmp_path / "wiki_qa")
    found = questions.read("wiki_qa", [str(tmp_path)], prompts="v1", template="", examples=dict(train=4, val=4, test=4))
    assert found.splits["train"].choices[0] == ("no", "yes") and "32 of 40 validation examples" in found.source


def test_ropes_has_no_choices_to_score(data):
    given = {"sources": [str(data)], "control": "", "data": {}, "finetuned": []}
    (data / "ropes").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="data.judge='generated'"):
        suites.check_questions(("ropes",), given)
    assert suites.check_questions(("ropes",), {**given, "data": {"judge": "generated"}})["data"]["answers"] == 16
