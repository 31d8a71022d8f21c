"""The registries are the papers' lists, with as many classes and prompts as published; GLUE's prompts to the letter."""
import numpy as np
import pytest

from tvjax.data import glue, nlp, splits, vision

# classes and templates of the twenty tasks, as published beside the checkpoints
COUNTS = {
    "sun397": (397, 2), "cars": (196, 8), "resisc45": (45, 18), "eurosat": (10, 3), "svhn": (10, 1), "gtsrb": (43, 3),
    "mnist": (10, 1), "dtd": (47, 8), "flowers102": (102, 1), "pcam": (2, 1), "fer2013": (7, 6), "pets": (37, 1),
    "stl10": (10, 2), "cifar100": (100, 18), "cifar10": (10, 18), "food101": (101, 1), "fashion_mnist": (10, 2),
    "emnist_letters": (26, 1), "kmnist": (10, 1), "rendered_sst2": (2, 1),
}
SIZES = {"cars": (7330, 814, 8041), "dtd": (3384, 376, 1880), "eurosat": (21600, 2700, 2700),
         "gtsrb": (23976, 2664, 12630), "mnist": (55000, 5000, 10000), "resisc45": (17010, 1890, 6300),
         "sun397": (17865, 1985, 19850), "svhn": (68257, 5000, 26032)}  # arXiv:2407.02880, table 5


def test_the_suites_are_the_papers():
    eight = {"cars", "dtd", "eurosat", "gtsrb", "mnist", "resisc45", "sun397", "svhn"}
    fourteen = eight | {"cifar100", "stl10", "flowers102", "pets", "pcam", "fer2013"}
    twenty = fourteen | {"emnist_digits", "cifar10", "food101", "fashion_mnist", "rendered_sst2", "kmnist"}
    assert set(vision.suite(8)) == eight and set(vision.suite(14)) == fourteen and set(vision.suite(20)) == twenty
    assert vision.suite(20)[:14] == vision.suite(14) and vision.suite(14)[:8] == vision.suite(8)
    assert set(vision.suite(20, emnist="emnist_letters")) == twenty - {"emnist_digits"} | {"emnist_letters"}
    assert len(set(vision.suite(22))) == 22 and set(vision.suite(22)) > eight | {"imagenet", "ucf101"}
    assert all(name in vision.TASKS for name in (*vision.suite(22), vision.CONTROL))


@pytest.mark.parametrize("name", COUNTS)
def test_classes_and_prompts_are_as_many_as_published(name):
    task = vision.task(name)
    assert (len(task.classnames), len(task.templates)) == COUNTS[name]


@pytest.mark.parametrize("name", [name for name in vision.TASKS if name != "imagenet"])
def test_classes_and_prompts_are_different_and_whole(name):
    task = vision.task(name)
    assert len(set(task.classnames)) == task.classes and len(set(task.templates)) == len(task.templates)
    assert all(template.count("{}") == 1 for template in task.templates)
    assert all(one == one.strip() and one for one in task.classnames)


@pytest.mark.parametrize("name", ["pets", "dtd", "resisc45", "food101"])
def test_names_are_those_of_the_data_set(name):
    tfds = pytest.importorskip("tensorflow_datasets")
    plain = lambda text: text.lower().replace("_", " ").replace("-", " ")
    theirs = tfds.builder(vision.task(name).tfds).info.features["label"].names
    assert sorted(map(plain, theirs)) == sorted(map(plain, vision.task(name).classnames))


def test_the_control_is_open_clips():
    pytest.importorskip("open_clip")
    task = vision.task("imagenet")
    assert len(task.classnames) == 1000 and len(task.templates) == 80


def test_emnist_is_two_tasks():
    with pytest.raises(ValueError, match="say which"):
        vision.task("emnist")


def test_names_by_which_others_call_tasks():
    assert vision.task("stanford-cars").name == "cars" and vision.task("SUN397").name == "sun397"
    with pytest.raises(ValueError, match="did you mean 'gtsrb'"):
        vision.task("gtsbr")


@pytest.mark.parametrize("name", SIZES)
def test_the_split_rule_gives_the_papers_sizes(name):
    task, (train, val, test) = vision.task(name), SIZES[name]
    assert task.sizes == (train, val, test)
    if task.rule != "own":
        assert splits.held_out_size(train + val) == val


def test_the_permutation_is_torchs():
    torch = pytest.importorskip("torch")
    for count, seed in ((0, 0), (1, 0), (7, 3), (1000, 0)):
        theirs = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()
        np.testing.assert_array_equal(splits.permutation(count, seed=seed), theirs)


def test_the_split_is_torchs_random_split():
    torch = pytest.importorskip("torch")
    train, val = splits.train_val(1000)
    theirs = torch.utils.data.random_split(range(1000), [900, 100], generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(train, theirs[0].indices)
    np.testing.assert_array_equal(val, theirs[1].indices)


def test_mnist_is_split_as_the_papers_code_asserts():
    train, val = splits.train_val(60000)
    assert train[0] == 36044 and len(val) == 5000 and not set(train.tolist()) & set(val.tolist())


def test_too_few_examples_to_hold_any_out():
    with pytest.raises(ValueError, match="none can be held out"):
        splits.train_val(9)


def test_language_suites_are_the_papers():
    assert set(nlp.suite(7)) == {"qasc", "quartz", "paws", "story_cloze", "wiki_qa", "winogrande", "wsc"}
    assert set(nlp.suite(8)) == {"cosmos_qa", "qasc", "quail", "quartz", "paws", "ropes", "social_iqa", "wiki_qa"}
    assert set(nlp.suite(11)) == set(nlp.suite(7)) | set(nlp.suite(8)) and nlp.CONTROL == "rte"
    assert set(nlp.TASKS) == {*nlp.suite(11), "rte"}


def test_questions_of_all_kinds_of_choices():
    lettered = {"question": "What?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}
    assert nlp.question("qasc", lettered)[1:] == (("a", "b"), 1)
    numbered = {"sentence": "He _.", "option1": "x", "option2": "y", "answer": "1"}
    assert nlp.question("winogrande", numbered) == ("He _. What does _ stand for?\nOptions: x | y\nAnswer:",
                                                     ("x", "y"), 0)
    assert nlp.question("winogrande", {**numbered, "answer": ""})[2] is None
    listed = {"context": "c", "question": "q", "answers": ["s", "t", "u"], "correct_answer_id": 2}
    assert nlp.question("quail", listed)[1:] == (("s", "t", "u"), 2)
    with pytest.raises(ValueError, match="lacks the column 'option2'; it has sentence, option1, answer"):
        nlp.question("winogrande", {k: v for k, v in numbered.items() if k != "option2"})


def test_validation_of_language_tasks_is_the_first_of_a_shuffle():
    val, test = nlp.val_test(100)
    assert len(val) == 32 and sorted(val + test) == list(range(100))


GOLDEN = {
    ("v0", "cola"): ("cola sentence: s", "unacceptable"),
    ("v0", "mnli"): ("mnli hypothesis: h premise: p", "entailment"),
    ("v0", "mrpc"): ("mrpc sentence1: a sentence2: b", "not_equivalent"),
    ("v0", "qnli"): ("qnli question: q sentence: s", "entailment"),
    ("v0", "qqp"): ("qqp question1: q1 question2: q2", "not_duplicate"),
    ("v0", "rte"): ("rte sentence1: a sentence2: b", "entailment"),
    ("v0", "sst2"): ("sst2 sentence: s", "negative"),
    ("v0", "stsb"): ("stsb sentence1: a sentence2: b", "0.0"),
    ("v1", "cola"): ("Indicate if the following sentence is grammatically correct or not: \"s\". Answere 'acceptable' "
                     "or 'unacceptable'.", "unacceptable"),
    ("v1", "mnli"): ("Does the premise: 'p' logically imply, contradict, or is neutral to the hypothesis: 'h'? Answere "
                     "with 'entailment', 'contradiction', or 'neutral'.", "entailment"),
    ("v1", "mrpc"): ("Are the following sentences 'a' and 'b' conveying the same meaning? Answere with 'yes' or 'no'.",
                     "no"),
    ("v1", "qnli"): ("Given the context: 's', does the question 'q' have an answer based on the information provided? "
                     "Answer with 'yes' or 'no'.", "yes"),
    ("v1", "qqp"): ("Do the questions 'q1' and 'q2' have the same intent? Answere with 'yes' or 'no'.", "no"),
    ("v1", "rte"): ("Does the text: 'a' entail that 'b' is true? Provide 'yes' or 'no'.", "yes"),
    ("v1", "sst2"): ("Given the sentence 's', determine the sentiment. Is it positive or negative?", "negative"),
    ("v1", "stsb"): ("Consider the sentences 'a' and 'b'. On a scale from 1 (completely different) to 5 (completely "
                     "similar), rate the similarity.", "0.0"),
}
EXAMPLE = {"sentence": "s", "hypothesis": "h", "premise": "p", "sentence1": "a", "sentence2": "b", "question": "q",
           "question1": "q1", "question2": "q2", "label": 0}


@pytest.mark.parametrize("version, task", GOLDEN)
def test_glue_prompts_to_the_letter(version, task):
    assert glue.text_to_text(task, EXAMPLE, version=version) == GOLDEN[version, task]


def test_glue_labels():
    assert glue.text_to_text("mnli", {**EXAMPLE, "label": 2})[1] == "contradiction"
    assert glue.text_to_text("stsb", {**EXAMPLE, "label": 3.25})[1] == "3.2"
    assert glue.text_to_text("sst2", {**EXAMPLE, "label": -1})[1] == ""
    with pytest.raises(ValueError, match="from 0 to 1; got 2"):
        glue.text_to_text("rte", {**EXAMPLE, "label": 2})
    with pytest.raises(ValueError, match="lacks the column 'sentence2'"):
        glue.text_to_text("rte", {"sentence1": "a", "label": 0})


def test_glue_metrics():
    assert glue.exact_match(["yes", "no ", "Yes"], ["yes", "no", "yes"]) == 2 / 3
    rng = np.random.default_rng(0)
    given, wanted = rng.integers(0, 6, 50) / 2, rng.integers(0, 6, 50) / 2
    stats = pytest.importorskip("scipy.stats")
    assert glue.spearman(given, wanted) == pytest.approx(stats.spearmanr(given, wanted).statistic)
    assert glue.spearman(["1.0", "nan", "x"], [1.0, 1.0, 1.0]) == 0.0
    assert glue.score("stsb", ["5.0", "1.0"], ["4.0", "2.0"]) == pytest.approx(1.0)
    assert glue.score("rte", ["yes"], ["no"]) == 0.0
    with pytest.raises(ValueError, match="as many answers"):
        glue.exact_match([], [])
